# SPDX-License-Identifier: MIT
"""PyTorch's process groups and distributed tensors: each process works on its local tensor, and groups reduce.

Nothing here is imported before there is such a tensor: ``torch.distributed.tensor`` takes long to import.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch

from uniclip.backends.processes import Op, Processes, Reduce
from uniclip.backends.torch_modes import recorded, tracing

_KEPT = 4096
"""The number of parts that are cached, so that equal ones are one object."""


def is_dtensor(leaf: Any) -> bool:
    """Whether a tensor is a distributed one."""
    if type(leaf) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def summed(tensor: Any) -> Any:
    """Return a partial tensor with its values summed over processes, others as they are."""
    from torch.distributed.tensor import Replicate

    if not is_partial(tensor):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def unsummed(like: Any, tensor: Any) -> Any:
    """Undo `summed` on a tensor that was changed since, in the placements of ``like``."""
    return _like_local(like, first_of(like, tensor.to_local()))


def written(leaf: Any, tensor: Any) -> Any:
    """Write a changed tensor into the partial one that it was summed from, and return that."""
    with torch.no_grad():
        leaf.to_local().copy_(first_of(leaf, tensor.to_local()))
    return leaf


def first_of(like: Any, whole: Any) -> Any:
    """Return this process's share of partial values: the first process has all of them."""
    for axis, placement in enumerate(like.placements):
        if placement.is_partial("sum") and like.device_mesh.get_local_rank(axis):
            whole = torch.zeros_like(whole)
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
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Part:
    """The part of a distributed tensor that this process holds; equal parts are one object."""

    def __init__(self, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        self.owner, self._placements, self.shape = mesh, placements, shape

    @cached_property
    def copies(self) -> int:
        """How many processes of the mesh hold the same entries."""
        return math.prod(n for n, p in zip(self.owner.shape, self._placements, strict=True) if p.is_replicate())

    @cached_property
    def _along(self) -> dict[int, Any]:
        """The indices along each sharded axis, as a slice if they are consecutive."""
        axes = {p.dim for p in self._placements if not p.is_replicate()}
        return {axis: _indices(self.owner, self._placements, axis, self.shape[axis]) for axis in sorted(axes)}

    def processes(self) -> frozenset[int]:
        """Return the ranks of the processes of the mesh."""
        return frozenset(self.owner.mesh.flatten().tolist())

    def reduce(self, array: Any, op: Op) -> Any:
        """Return the sum or maximum over the mesh."""
        if tracing() or recorded(array):
            from torch.distributed.tensor import DTensor, Partial

            mesh = self.owner  # with derivatives if they are recorded
            return DTensor.from_local(array, mesh, [Partial(op)] * mesh.ndim, run_check=False).full_tensor()
        return _all_reduce([group for group in self.owner.get_all_groups() if group.size() > 1], array, op)

    def whole(self, like: Any, local: Any) -> Any:
        """Return a local tensor as a distributed one like another."""
        return _like_local(like, local)

    def summed(self, like: Any, local: Any) -> Any:
        """Return the sum of a distributed tensor along its first axis, given the sum of the local tensor."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        def without_first(placement: Any) -> Any:
            if placement.is_replicate():
                return placement
            return Partial("sum") if placement.dim == 0 else Shard(placement.dim - 1)

        whole = torch.empty(like.shape[1:], device="meta")
        places = list(map(without_first, summed(like).placements))
        return DTensor.from_local(
            local, like.device_mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def embedded(self, xp: Any, norms: Any, axes: tuple[int, ...] | None) -> Any:
        """Return norms along ``axes``, ``(k, *kept)``, as norms of the whole tensor, 0 for other entries."""
        for place, indices, size in self._places(axes):
            shape = (*norms.shape[:place], size, *norms.shape[place + 1 :])
            wide = norms.new_zeros(shape) if hasattr(norms, "new_zeros") else xp.zeros(shape, dtype=norms.dtype)
            wide[(slice(None),) * place + (indices,)] = norms
            norms = wide
        return norms

    def own(self, values: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the values for norms along ``axes``, of shape ``kept``, that belong to the entries here."""
        for place, indices, size in self._places(axes):
            if values.shape[place - 1] == size:  # else it is one for all
                values = values[(slice(None),) * (place - 1) + (indices,)]
        return values

    def _places(self, axes: tuple[int, ...] | None) -> list[tuple[int, Any, int]]:
        """Return, for each kept axis that is sharded, its place after the rows, its indices and its length."""
        kept = [] if axes is None else [axis for axis in range(len(self.shape)) if axis not in axes]
        along = self._along if kept else {}
        return [(kept.index(axis) + 1, along[axis], self.shape[axis]) for axis in kept if axis in along]


_parts: dict[Any, Part] = {}


def _part_of(tensor: Any) -> Part:
    """Return the part of a distributed tensor that this process holds."""
    mesh = tensor.device_mesh
    what = mesh, tuple(tensor.placements), tuple(tensor.shape)
    if torch.compiler.is_compiling():
        return Part(*what)
    key = (*what, tuple(mesh._dim_group_names))  # meshes of another initialization are equal, but have other groups
    part = _parts.get(key)
    if part is None:
        if len(_parts) >= _KEPT:
            _parts.clear()
        part = _parts[key] = Part(*what)
    return part


def _indices(mesh: Any, placements: Sequence[Any], axis: int, size: int) -> Any:
    """Return the indices along an axis that this process holds, as the library shards them."""
    from torch.distributed.tensor import DTensor, Replicate

    def alone(placement: Any) -> Any:
        if placement.is_replicate() or placement.dim != axis:
            return Replicate()
        more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
        return type(placement)(0, **more)

    every = DTensor.from_local(
        torch.arange(size, device=mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    here = every.redistribute(placements=list(map(alone, placements))).to_local().tolist()
    one_by_one = here == list(range(here[0], here[0] + len(here))) if here else True
    return slice(here[0] if here else 0, here[-1] + 1 if here else 0) if one_by_one else here


def _replicated(like: Any, array: Any) -> Any:
    """Return a plain tensor, the same in every process, as a distributed one to combine with another."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(array, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def own_operand(like: Any, operand: Any) -> Any:
    """Return the part of an operand that this process needs to change its part of a tensor."""
    if not is_dtensor(operand):
        operand = _replicated(like, operand)
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
    operation = torch.distributed.ReduceOp.SUM if op == "sum" else torch.distributed.ReduceOp.MAX
    array = array.clone()
    for group in groups:
        torch.distributed.all_reduce(array, operation, group=group)
    return array


class Distributed(Processes):
    """Distributed tensors, and process groups."""

    joins_by = "a process group, a device mesh, or a function of (array, op)"

    def local(self, arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        if not any([array is not None and is_dtensor(array) for array in arrays]):
            return arrays, None
        parts = [_part_of(array) if array is not None and is_dtensor(array) else None for array in arrays]
        return [_local_of(array) if part else array for array, part in zip(arrays, parts, strict=True)], parts

    def replicated(self, array: Any, operand: Any) -> Any:
        if is_dtensor(operand):
            return operand
        if operand.ndim or array.is_meta:  # every other device accepts 0-d CPU tensors
            operand = operand.to(array.device)
        return _replicated(array, operand) if is_dtensor(array) else operand

    def reducer(self, all_reduce: Any) -> Reduce | None:
        groups = _groups_of(all_reduce)
        return None if groups is None else partial(_all_reduce, groups)

    def rank(self) -> int:
        runs = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if runs else 0
