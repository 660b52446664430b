# SPDX-License-Identifier: MIT
"""Check, on the processes of a run, that a rule finds the norms of one process."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from uniclip._errors import short
from uniclip.arraywise import AnyRule
from uniclip.integrations import inside, rule_for_steps
from uniclip.integrations.torch.checks import Optimizer, refuse_optimizer
from uniclip.integrations.torch.functions import grad_of
from uniclip.integrations.torch.layout_pieces import Piece, counts_of, gathered, held, named, own_rank, pieces_of
from uniclip.integrations.torch.layout_report import (
    NOT_AVERAGED,
    Difference,
    LayoutCheck,
    Leaf,
    problems_of,
)
from uniclip.integrations.torch.optimizer import attach
from uniclip.integrations.torch.processes import several
from uniclip.scopes import Path
from uniclip.tree import flatten, place

Found: TypeAlias = tuple[dict[str, dict[Path, Any]], str | None]
"""Norms and factors, each by its path, or the reason why there are none."""

_CLOSE = 1e-5
"""The tolerance between norms in float32 and in float64."""


class _Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


def check_layout(optimizer: Optimizer, rule: AnyRule, all_reduce: Any = None, shared: Any = None) -> LayoutCheck:
    """Check that a rule, on the processes of this run, finds the norms and factors that one process would.

    Call it once, in every process, after ``backward`` and before the step. It gathers the gradients of all processes on
    the first one, clips them there by the rule's first step in float64, and compares. Neither gradients nor the
    optimizer are changed. A layout does not depend on the size of a model, so check a small one: the first process
    holds all of it in main memory.

    Plain tensors do not tell whether they are parts, so their values are compared. A leaf whose parameter is equal in
    several processes is a copy, which was not averaged if its gradients differ; if the parameters differ, they are
    parts.

    Parameters
    ----------
    optimizer, rule, all_reduce, shared
        As for `attach`.

    Returns
    -------
    check : LayoutCheck
        The same in all processes. ``check.ok`` tells whether everything agrees; printed, it is a table of the leaves,
        their kinds, and how often each counts. ``check.raise_if_wrong()`` raises an error.

    Raises
    ------
    TypeError, ValueError
        If ``optimizer`` is not an optimizer or ``rule`` not a rule, or if no process has a gradient.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import check_layout
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> print(check_layout(optimizer, uc.by_global_norm(1.0)))
    uc.Rule(1.0) on 1 process: as in one process
    norm: 1.73205 in one process; 1.73205 in process 0
    <BLANKLINE>
    leaf                shape  processes  taken for  counts
    grads[0]['weight']  1x2    0          whole      once
    grads[0]['bias']    1      0          whole      once
    """
    refuse_optimizer(optimizer, rule)
    optimizer, rule = getattr(optimizer, "optimizer", optimizer), rule_for_steps(rule)
    kept: dict[Path, Any] = {}
    leaves_here = [(path, p, grad_of(p)) for path, p in named(optimizer)]
    every = gathered([held(path, p, grad, rule, kept) for path, p, grad in leaves_here if grad is not None])
    if not any(every):
        msg = "no process has a gradient: call check_layout after backward, and before the step and zero_grad"
        raise ValueError(msg)
    pieces = pieces_of(every)
    counts = counts_of(pieces, every, {path: grad for path, _, grad in leaves_here}, all_reduce, shared)
    leaves = [
        Leaf(place("grads", piece.held.path), piece.held.shape, piece.processes, piece.kind, tuple(count))
        for piece, count in zip(pieces, counts, strict=True)
    ]
    paths = [piece.held.path for piece in pieces]
    unknown = [path for path in dict.fromkeys(paths) if paths.count(path) > 1] if _along_axes(rule) else []
    wanted, failed = _of_one(pieces, rule, kept)
    found, refusal = _as_it_runs(optimizer, rule, all_reduce, shared)
    every = gathered(([] if refusal or failed else _differences(found, wanted, unknown), refusal, _joint(found)))
    problems = problems_of(
        leaves,
        joined=all_reduce is not None,
        differences=[(rank, one) for rank, (some, _, _) in enumerate(every) for one in some],
        refused=[(rank, text) for rank, (_, text, _) in enumerate(every) if text],
        unknown=[place("grads", path) for path in unknown],
    )
    norms = tuple(norm for _, _, norm in every)
    return LayoutCheck(not problems, short(rule), _joint(wanted), norms, tuple(leaves), tuple(problems))


def _joint(found: Any) -> float | None:
    """Return the norm if there is only one, else ``None``."""
    norms = found.get("norm", {})
    return norms[()].item() if set(norms) == {()} else None


def _of_one(pieces: list[Piece], rule: Any, kept: dict[Path, Any]) -> Found:
    """Return norms and factors as one process finds them."""
    rank = own_rank()
    mine = {}
    for number, piece in enumerate(pieces):
        firsts = [copy[0] for copy in piece.holders]
        if rank == min(firsts) or (rank in firsts and piece.kind == NOT_AVERAGED):
            mine[number] = kept[piece.held.path]
    values: list[Any] = [None]
    if several():
        every: list[Any] | None = [None] * torch.distributed.get_world_size() if rank == 0 else None
        torch.distributed.gather_object(mine, every)
        values = every or values
    else:
        values = [mine]
    found = [_tried(lambda: _clipped_whole(pieces, rule, values)) if rank == 0 else None]
    if several():
        torch.distributed.broadcast_object_list(found)
    return found[0]  # type: ignore[return-value]


def _clipped_whole(pieces: list[Piece], rule: Any, values: list[dict[int, Any]]) -> dict[str, dict[Path, Any]]:
    """Clip the whole tree, with leaves assembled from their parts; norms do not depend on how these are laid out."""
    parts: dict[Path, list[Any]] = {}
    for number, piece in enumerate(pieces):
        copies = [some[number] for some in values if number in some]
        mean = [torch.stack(one).mean(0) for one in zip(*copies, strict=True)]  # averages what was not averaged
        parts.setdefault(piece.held.path, []).append(mean)
    trees: list[list[Any]] = [[OrderedDict() for _ in range(1 + max(path[0] for path in parts))] for _ in range(2)]
    for path, some in parts.items():
        for tree, leaves in zip(trees, zip(*some, strict=True), strict=True):
            tree[path[0]][path[1]] = leaves[0] if len(leaves) == 1 else torch.cat([leaf.flatten() for leaf in leaves])
    grads, params = trees
    return _numbers(rule.update(grads, rule.init(params), params)[2])


def _as_it_runs(optimizer: Any, rule: Any, all_reduce: Any, shared: Any) -> Found:
    """Return norms and factors as `attach` finds them, on copies of the gradients."""
    groups = []
    for group in optimizer.param_groups:
        copies = list(map(_copy, group["params"]))
        groups.append(
            {"params": list(zip(group["param_names"], copies, strict=True)) if "param_names" in group else copies}
        )
    still = _Still(groups, {})

    handle, refusal = _tried(lambda: attach(still, rule, all_reduce, shared))
    if any(gathered(refusal)):  # one that refuses takes no step, and the others would wait for it
        return {}, refusal
    _, refusal = _tried(still.step)
    return {} if refusal else _numbers(handle.report), refusal


def _copy(p: Any) -> Any:
    """Return a parameter with the same values, and its own gradient."""
    copy = torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    copy.grad = None if p.grad is None else p.grad.detach().clone()
    if getattr(p, "_fsdp_flattened", False):
        copy._fsdp_flattened = True  # noqa: SLF001 - FSDP1's mark
    return copy


def _tried(run: Callable[[], Any]) -> Any:
    """Return the result of a function, and the error that it raises."""
    try:
        return run(), None
    except (ValueError, TypeError, FloatingPointError, RuntimeError) as error:  # the last if another process failed
        return {}, f"{type(error).__name__}: {error}"


def _numbers(report: Any) -> dict[str, dict[Path, Any]]:
    """Return the norms and factors of a report, by their paths."""
    found = {}
    for what in ("norm", "factor"):
        values = getattr(report, f"{what}s", None)
        if values is None:
            continue
        leaves, spec = flatten(values)
        pairs = [(path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if leaf is not None]
        found[what] = {path: leaf.detach().to("cpu", torch.float64) for path, leaf in pairs}
    return found


def _differences(found: Any, wanted: Any, unknown: list[Path]) -> list[Difference]:
    """Return the numbers that differ from those of one process."""
    differences = []
    for what, numbers in found.items():
        for path, here in numbers.items():
            if path[-2:] in unknown:
                continue
            there = wanted.get(what, {}).get(path)
            if there is None or there.shape != here.shape or not torch.allclose(here, there, _CLOSE, 0, equal_nan=True):
                differences.append(_difference(f"the {what}{place(' of grads', path) if path else ''}", here, there))
    return differences


def _difference(what: str, here: Any, there: Any) -> Difference:
    """Return the two numbers of arrays that differ most."""
    if there is None or there.shape != here.shape:
        return Difference(
            what, *(math.nan if one is None or not one.numel() else one.max().item() for one in (here, there))
        )
    worst = (here - there).abs().nan_to_num(math.inf).argmax()
    return Difference(what, here.flatten()[worst].item(), there.flatten()[worst].item())


def _along_axes(rule: Any) -> bool:
    """Whether a rule, or one inside it, has norms along axes."""
    return getattr(getattr(rule, "scope", None), "axes", None) is not None or any(map(_along_axes, inside(rule)))
