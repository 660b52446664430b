# SPDX-License-Identifier: MIT
"""PyTorch's process groups and distributed tensors: each process works on its local tensor,
and groups reduce.

Nothing here is imported before there is such a tensor: ``torch.distributed.tensor`` takes long to
import.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from uniclip.backends.base import Backend, Op, Reduce, WrappedLeaf
from uniclip.backends.torch.fast_path import move
from uniclip.backends.torch.modes import is_recorded, tracing

SHARD_CACHE_SIZE = 4096
"""The number of parts that are cached, so that equal ones are one object."""


def is_dtensor(leaf: Any) -> bool:
    """Whether a tensor is a distributed one."""
    if type(leaf) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def sum_partials(tensor: Any) -> Any:
    """Return a distributed tensor, partial values of which are summed over processes."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
    )


def divide_sum(like: Any, tensor: Any) -> Any:
    """Undo `sum_partials` on a tensor that was changed since, in the placements of ``like``."""
    return _like_local(like, first_of(like, tensor.to_local()))


def write_sum(leaf: Any, tensor: Any) -> Any:
    """Write a changed tensor into the partial one that it was summed from, and return that."""
    with torch.no_grad():
        leaf.to_local().copy_(first_of(leaf, tensor.to_local()))
    return leaf


def first_of(like: Any, whole: Any) -> Any:
    """Return this process's share of partial values: the first process has all of them."""
    for axis, placement in enumerate(like.placements):
        if placement.is_partial("sum") and like.device_mesh.get_local_rank(axis):
            whole = (
                _Weighted.apply(whole, 0.0, 1.0) if is_recorded(whole) else torch.zeros_like(whole)
            )
    return whole


def is_partial(tensor: Any) -> bool:
    """Whether a distributed tensor is partial: its values are still to be summed over processes."""
    return any([p.is_partial() for p in tensor.placements])


def _local_of(tensor: Any) -> Any:
    """Return what this process holds of a distributed tensor."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.to_local()
    local = tensor._local_tensor
    return local if type(local) is torch.Tensor else tensor.to_local()  # an asynchronous one


def _like_local(like: Any, local: Any) -> Any:
    """Return a local tensor as a distributed one with the mesh, placements and shape of another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class Owners(NamedTuple):
    """The processes of some dimensions of a mesh, which hold parts of distributed tensors."""

    mesh: Any
    dimensions: tuple[int, ...]

    def processes(self) -> frozenset[int]:
        """Return the ranks of the processes of the whole mesh."""
        return frozenset(self.mesh.mesh.flatten().tolist())

    def reduce(self, array: Any, op: Op) -> Any:
        """Return the sum or maximum over these dimensions."""
        groups = [self.mesh.get_group(n) for n in self.dimensions]
        return _all_reduce([group for group in groups if group.size() > 1], array, op)


class LocalShard:
    """The part of a distributed tensor that this process holds; equal parts are one object."""

    def __init__(
        self, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], local: tuple[int, ...]
    ) -> None:
        self.mesh, self.placements, self.shape, self.local = mesh, placements, shape, local
        self.replicas = math.prod(
            [n for n, p in zip(mesh.shape, placements, strict=True) if p.is_replicate()]
        )
        """How many processes of the mesh hold the same entries."""

    def divided(self, axes: tuple[int, ...] | None) -> tuple[Any, dict[int, Any]] | None:
        """Return the mesh and those of its dimensions that divide an axis which norms along
        ``axes`` keep.
        """
        if axes is None:
            return None
        places = {
            n: p
            for n, p in enumerate(self.placements)
            if not p.is_replicate() and p.dim not in axes
        }
        return (self.mesh, places) if places else None

    def shard_groups(self, axes: tuple[int, ...] | None = None) -> Owners | None:
        """Return the processes over which norms along ``axes`` are joined,
        ``None`` if each norm lies in one.
        """
        _, apart = self.divided(axes) or (None, {})
        dimensions = [n for n in range(self.mesh.ndim) if n not in apart]
        return Owners(self.mesh, tuple(dimensions)) if dimensions else None

    def divide(self, leaf: Any) -> Any:
        """Return the same part of another leaf, which may be divided in another way,
        or not at all.
        """
        if not is_dtensor(leaf) or leaf.device_mesh != self.mesh:
            leaf = _replicate(self.mesh, leaf.full_tensor() if is_dtensor(leaf) else leaf)
        return leaf.redistribute(self.mesh, self.placements).to_local()

    def gather(self, leaf: Any) -> Any:
        """Return all of a leaf that is divided in this way."""
        return leaf.full_tensor()

    def weigh(self, value: Any, *, inverse: bool = False) -> Any:
        """Return a value, with as many times its derivative as there are copies, or the inverse:
        they count once.
        """
        by = 1 / self.replicas if inverse else self.replicas
        if by == 1 or not isinstance(value, torch.Tensor) or not (tracing() or is_recorded(value)):
            return value
        return _Weighted.apply(value, 1, by)

    def sum_examples(self, like: Any, local: Any) -> Any:
        """Return the sum of a distributed tensor along its first axis,
        given the sum of the local tensor.
        """
        from torch.distributed.tensor import DTensor, Partial, Shard

        def without_first(placement: Any) -> Any:
            if placement.is_replicate():
                return placement
            return Partial("sum") if placement.dim == 0 else Shard(placement.dim - 1)

        whole = torch.empty(like.shape[1:], device="meta")
        places = list(map(without_first, sum_partials(like).placements))
        return DTensor.from_local(
            local,
            like.device_mesh,
            places,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def open_distributed(leaf: Any, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
    """Return a partial tensor summed, what this process holds of another one,
    or ``None`` if that is to stay whole.
    """
    if is_partial(leaf):
        return WrappedLeaf(sum_partials(leaf), partial(write_sum if in_place else divide_sum, leaf))
    if whole:
        return None
    local = _local_of(leaf)
    return WrappedLeaf(local, partial(_like_local, leaf), local, shard=_shard_of(leaf))


_shards: dict[Any, LocalShard] = {}


def _shard_of(tensor: Any) -> LocalShard:
    """Return the part of a distributed tensor that this process holds."""
    mesh = tensor.device_mesh
    what = mesh, tuple(tensor.placements), tuple(tensor.shape)
    if torch.compiler.is_compiling():
        return LocalShard(*what, tuple(_local_of(tensor).shape))
    # Meshes of another initialization are equal, but have other groups.
    key = (*what, tuple(mesh._dim_group_names))
    shard = _shards.get(key)
    if shard is None:
        if len(_shards) >= SHARD_CACHE_SIZE:
            _shards.clear()
        shard = _shards[key] = LocalShard(*what, tuple(_local_of(tensor).shape))
    return shard


def _replicate(mesh: Any, array: Any) -> Any:
    """Return a plain tensor, the same in every process, as a distributed one on a mesh."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(array, mesh, [Replicate()] * mesh.ndim, run_check=False)


def own_operand(like: Any, operand: Any) -> Any:
    """Return the part of an operand that this process needs to change its part of a tensor."""
    if not is_dtensor(operand):
        operand = _replicate(like.device_mesh, operand)
    if operand.ndim == 0:
        return operand.to_local()
    return operand.expand(like.shape).redistribute(placements=like.placements).to_local()


def _groups_of(all_reduce: Any) -> list[Any] | None:
    """Return the process groups of a group or a mesh, ``None`` for anything else."""
    if not torch.distributed.is_available():
        return None
    if isinstance(all_reduce, torch.distributed.ProcessGroup):
        return [all_reduce]
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None and isinstance(all_reduce, mesh.DeviceMesh):
        return list(all_reduce.get_all_groups())
    return None


def _all_reduce(groups: Sequence[Any], array: Any, op: Op) -> Any:
    """Return a new array, reduced over process groups one after the other."""
    for group in groups:
        reduce = _Reduced.apply if tracing() or is_recorded(array) else _reduce_over_group
        array = reduce(array, op, group)
    return array


def _reduce_over_group(array: Any, op: Op, group: Any) -> Any:
    reduced = array.clone()
    operation = torch.distributed.ReduceOp.SUM if op == "sum" else torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(reduced, operation, group=group)
    return reduced


class _Reduced(torch.autograd.Function):  # type: ignore[misc]
    """A sum or maximum over a process group, with the derivative of the sum of what all processes
    make of it.
    """

    @staticmethod
    def forward(array: Any, op: Op, group: Any) -> Any:
        """Reduce."""
        return _reduce_over_group(array, op, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the derivative needs."""
        array, ctx.op, ctx.group = inputs
        ctx.save_for_backward(array, output)

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        """Sum the derivatives of all processes; that of a maximum belongs to those that have it."""
        slope = _all_reduce([ctx.group], slope, "sum")
        if ctx.op == "max":
            array, top = ctx.saved_tensors
            mine = (array == top).to(slope.dtype)
            slope = slope * mine / _reduce_over_group(mine, "sum", ctx.group)
        return slope, None, None


class _Weighted(torch.autograd.Function):  # type: ignore[misc]
    """A value times one number, with its derivative times another one."""

    @staticmethod
    def forward(value: Any, by: float, slope_by: float) -> Any:
        """Multiply."""
        return value * by

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the factors."""
        _, by, slope_by = inputs
        ctx.by = slope_by, by

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        """Multiply the derivative; it has the derivative that the value has."""
        return _Weighted.apply(slope, *ctx.by), None, None


class Distributed(Backend):
    """Distributed tensors, and process groups."""

    joins_by = "a process group, a device mesh, or a function of (array, op)"

    def to_device_of(self, other: Any, array: Any) -> Any:
        if is_dtensor(array):
            return array
        array = move(array, other.device)
        return _replicate(other.device_mesh, array) if is_dtensor(other) else array

    def reducer(self, all_reduce: Any) -> Reduce | None:
        groups = _groups_of(all_reduce)
        return None if groups is None else partial(_all_reduce, groups)

    def rank(self) -> int:
        runs = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if runs else 0
