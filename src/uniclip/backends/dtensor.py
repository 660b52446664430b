# SPDX-License-Identifier: MIT
"""PyTorch's distributed tensors: each process measures its own part, and the parts are joined to one number for all.

Nothing here is imported before there is such a tensor: ``torch.distributed.tensor`` takes long to import.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch


def is_dtensor(leaf: Any) -> bool:
    """Whether a tensor is a distributed one."""
    if type(leaf) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def summed(tensor: Any) -> Any:
    """Return a tensor whose values are still to be added up across processes with its values, others as they are."""
    from torch.distributed.tensor import Replicate

    if not any(p.is_partial() for p in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def unsummed(like: Any, tensor: Any) -> Any:
    """Return what `summed` has made of ``like``, and has been changed since, in the placements of ``like`` again."""
    from torch.distributed.tensor import DTensor

    here, mesh = tensor.to_local(), like.device_mesh
    for axis, placement in enumerate(like.placements):
        if placement.is_partial("sum") and mesh.get_local_rank(axis):
            here = torch.zeros_like(here)  # the first process holds the sum
    return DTensor.from_local(here, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def own_part(
    tensor: Any, unit: Any, axes: tuple[int, ...] | None, op: Literal["sum", "max"]
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return what this process holds of a tensor and of its unit, and a function that marks a total as a part."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    kept = [] if axes is None else [axis for axis in range(tensor.ndim) if axis not in axes]
    if kept and not all(p.is_replicate() or isinstance(p, Shard) for p in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * len(tensor.placements))
    # What is replicated counts once; whatever else it is, it is split: along an axis that is kept, or not.
    along = [None if p.is_replicate() or p.dim not in kept else p.dim for p in tensor.placements]
    totals = [
        Shard(kept.index(axis)) if axis is not None else p if p.is_replicate() else Partial(op)
        for p, axis in zip(tensor.placements, along, strict=True)
    ]
    shape = torch.empty([tensor.shape[axis] for axis in kept], device="meta")
    whole = partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=totals,
        run_check=False,
        shape=shape.shape,
        stride=shape.stride(),
    )
    if unit is not None:
        unit = unit.redistribute(placements=[Replicate() if axis is None else Shard(axis) for axis in along]).to_local()
    return tensor.to_local(), unit, whole


def joined(parts: list[Any], op: Literal["sum", "max"]) -> list[Any]:
    """Join each part with those of all processes: one reduction for all that are alike (0-d ones of a mesh)."""
    wholes = list(parts)
    alike: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        if is_dtensor(part):
            alike.setdefault((part.device_mesh, part.placements, part.shape, part.dtype), []).append(number)
    for (mesh, placements, shape, _), numbers in alike.items():
        stacked, size = torch.stack([parts[number].to_local() for number in numbers], -1), (*shape, len(numbers))
        if op == "sum":
            whole = _whole(stacked, mesh, placements, size)
        else:  # NaN gets lost among processes
            pair = torch.stack([stacked.nan_to_num(0.0, math.inf), stacked.isnan().to(stacked.dtype)], -1)
            value, isnan = _whole(pair, mesh, placements, (*size, 2)).unbind(-1)
            whole = torch.where(isnan > 0, math.nan, value)
        for number, one in zip(numbers, whole.unbind(-1), strict=True):
            wholes[number] = one
    return wholes


def _whole(here: Any, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    """Return the whole of a tensor, of which this process holds a part, as a plain one."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


def meshes(arrays: list[Any]) -> list[Any]:
    """Return the meshes that arrays are split among."""
    return list(dict.fromkeys(array.device_mesh for array in arrays if is_dtensor(array)))


def added(meshes: Iterable[Any], values: Any) -> Any:
    """Return values added up over the processes of the meshes."""
    from torch.distributed.tensor import Partial

    for mesh in meshes:
        values = _whole(values, mesh, [Partial("sum")] * mesh.ndim, values.shape)
    return values


def replicated(like: Any, array: Any) -> Any:
    """Return a plain tensor, the same in every process, as a distributed one that can be combined with another."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(array, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def own_operand(like: Any, operand: Any) -> Any:
    """Return what this process needs of an operand to change its part of a tensor."""
    if not is_dtensor(operand):
        operand = replicated(like, operand)
    if operand.ndim == 0:
        return operand.to_local()
    return operand.expand(like.shape).redistribute(placements=like.placements).to_local()
