# SPDX-License-Identifier: MIT
"""Classify plain and distributed gradients by their values: copies, parts, or leaves of one process alone."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch

from uniclip.backends.dtensor import is_dtensor
from uniclip.combine import Masked
from uniclip.integrations.torch.layout_report import NOT_AVERAGED, UNCLEAR
from uniclip.integrations.torch.processes import several
from uniclip.rules import Rule
from uniclip.scopes import Path, everything


class Held(NamedTuple):
    """The description of a gradient by a process that holds it."""

    path: Path
    shape: tuple[int, ...]
    processes: tuple[int, ...]
    """The processes that hold parts of it, for a DTensor; of a plain tensor only this one."""
    distributed: bool
    grad: str
    param: str
    """Digests of the bits."""
    constant: bool
    """Whether all entries of the parameter are equal, so that parts of it look like copies."""
    keys: tuple[Hashable, ...]
    """For each rule in the rule, the key of its norm; ``None`` if the rule leaves it out."""


class Piece(NamedTuple):
    """A leaf, or a part of one, the same in all processes that hold it."""

    held: Held
    holders: tuple[tuple[int, ...], ...]
    """For each copy, the processes that hold it."""
    kind: str

    @property
    def processes(self) -> tuple[int, ...]:
        """All processes that hold it."""
        return tuple(sorted({rank for copy in self.holders for rank in copy}))


def named(optimizer: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the parameters with their groups and names."""
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        names = group.get("param_names", range(len(params)))
        names = names if len(set(names)) == len(params) else range(len(params))
        yield from (((number, name), p) for name, p in zip(names, params, strict=True))


def held(path: Path, p: Any, grad: Any, rule: Any, kept: dict[Path, Any]) -> Held:
    """Describe a gradient and its parameter, and keep their values if this is the first process that holds them."""
    rank = own_rank()
    processes = tuple(sorted(grad.device_mesh.mesh.flatten().tolist())) if is_dtensor(grad) else (rank,)
    whole_grad, whole = _whole(grad), _whole(p)
    if processes[0] == rank:
        kept[path] = [one.to(torch.promote_types(one.dtype, torch.float64)) for one in (whole_grad, whole)]
    constant = whole.numel() == 0 or bool((whole == whole.flatten()[0]).all())
    keys = tuple(_keys(rule, path, whole_grad))
    digests = _digest(whole_grad), _digest(whole)
    return Held(path, tuple(whole.shape), processes, is_dtensor(grad), *digests, constant, keys)


def _whole(tensor: Any) -> Any:
    """Return the whole tensor, dense and in main memory."""
    tensor = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).cpu()


def _digest(tensor: Any) -> str:
    return hashlib.blake2b(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _keys(rule: Any, path: Path, leaf: Any) -> Iterator[Hashable]:
    """Yield, for each rule in a rule, the key of the norm of a leaf; ``None`` if it has none."""
    for one in getattr(rule, "rules", ()):
        yield from _keys(one, path, leaf)
    if isinstance(rule, Masked):
        yield from _keys(rule.rule, path, leaf) if rule.where(path, leaf) else [None]
    elif isinstance(rule, Rule):
        label = rule.scope.label
        yield "all" if label is everything else path if label is None else ("group", repr(label(path, leaf)))


def pieces_of(every: list[list[Held]]) -> list[Piece]:
    """Return the leaves and parts of leaves of all processes, with copies merged."""
    copies: dict[tuple[Path, tuple[int, ...]], Held] = {}
    for held in (one for some in every for one in some):
        copies.setdefault((held.path, held.processes), held)
    alike: dict[Any, list[Held]] = {}
    for held in copies.values():
        alike.setdefault((held.path, held.shape, held.grad if held.constant else held.param), []).append(held)
    spread = {tuple(sorted(h.processes for h in some)) for some in alike.values() if len({h.grad for h in some}) > 1}
    apart: dict[Path, list[list[Held]]] = {}
    for some in alike.values():
        apart.setdefault(some[0].path, []).append(some)
    pieces = []
    for classes in apart.values():
        together = [held for some in classes for held in some]
        constant = all(held.constant for held in together) and len({held.shape for held in together}) == 1
        # A constant parameter is ambiguous: it is classified as other leaves of the same processes.
        if constant and len(classes) > 1 and tuple(sorted(held.processes for held in together)) in spread:
            pieces.append(_piece(together, NOT_AVERAGED))
        else:
            pieces += [_piece(some, _kind(some, len(classes), constant=constant)) for some in classes]
    return pieces


def _piece(some: list[Held], kind: str) -> Piece:
    return Piece(some[0], tuple(held.processes for held in some), kind)


def _kind(copies: list[Held], classes: int, *, constant: bool) -> str:
    """Return the kind of leaves whose parameters are equal."""
    if len({held.grad for held in copies}) > 1:
        return NOT_AVERAGED
    if len(copies) > 1:
        return "copy" if classes == 1 else "copy of a part"
    if copies[0].distributed:
        return "distributed"
    if classes == 1:
        return "whole"
    return UNCLEAR if constant else "part"


def counts_of(
    pieces: list[Piece], every: list[list[Held]], grads: Any, all_reduce: Any, shared: Any
) -> list[list[int | None]]:
    """Return how often each piece counts in each process, ``None`` if it has no norm there."""
    rank = own_rank()
    here = [rank in piece.processes for piece in pieces]
    copies = [
        one and shared is not None and bool(shared(piece.held.path, grads[piece.held.path]))
        for piece, one in zip(pieces, here, strict=True)
    ]
    mine = [float(one and not (all_reduce is not None and copy)) for one, copy in zip(here, copies, strict=True)]
    if all_reduce is not None:
        device = next((grad.device for grad in grads.values() if grad is not None), torch.device("cpu"))
        mine = _joined(torch.tensor(mine, device=device), all_reduce).tolist()
        mine = [1.0 if copy else one for one, copy in zip(mine, copies, strict=True)]
    found = gathered([round(one) for one in mine])
    keys = [{key for held in some for key in held.keys} for some in every]

    def belongs(piece: Piece, rank: int) -> bool:
        return any([key == "all" or (key is not None and key in keys[rank]) for key in piece.held.keys])

    return [
        [some[n] if belongs(piece, rank) else None for rank, some in enumerate(found)] for n, piece in enumerate(pieces)
    ]


def _joined(array: Any, all_reduce: Any) -> Any:
    """Sum arrays over an ``all_reduce`` of any kind that `attach` accepts."""
    if isinstance(all_reduce, torch.distributed.ProcessGroup):
        torch.distributed.all_reduce(array, group=all_reduce)
    elif callable(all_reduce):
        return all_reduce(array, "sum")
    else:
        for group in all_reduce.get_all_groups():
            torch.distributed.all_reduce(array, group=group)
    return array


def own_rank() -> int:
    """Return the number of this process."""
    return torch.distributed.get_rank() if several() else 0


def gathered(one: Any) -> list[Any]:
    """Return the descriptions of all processes."""
    if not several():
        return [one]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, one)
    return every
