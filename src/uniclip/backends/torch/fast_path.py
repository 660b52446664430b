# SPDX-License-Identifier: MIT
"""PyTorch fast path: dense gradients on one device, float32 or lower precision,
with minimal call overhead.

In a training step code and data are cold, and each other library that is entered costs 5 to 10 µs:
so it uses PyTorch alone. Nothing is remembered from step to step, since any gradient may be
replaced.

On the CPU the norm is read, and nothing is written within the limit. On an accelerator, where the
host would wait for it, nothing is read: three kernels of `uniclip.backends.torch.triton` run, of
which the last writes nothing within the limit; or without Triton eight of PyTorch, and one for each
tensor of half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from uniclip.backends.base import FITS, FLOAT32_MAX, PIECE, FastResult, fast_numbers, fill_places
from uniclip.backends.numpy import all_zero
from uniclip.backends.torch.kernels import kernels_on
from uniclip.backends.torch.modes import in_forward_mode, tracing

_FLOAT32, _STRIDED, _CPU = torch.float32, torch.strided, torch.device("cpu")
_HALVES = {torch.bfloat16, torch.float16}
_LOW, _HIGH = map(sqrt, FITS)
"""Between them the squares of float32 numbers neither overflow nor underflow."""
_ROW = 256
"""How many squares are added in a row: so few are accurate even if equal,
and rows are read at memory speed.
"""
_SHORT = 2**13
"""The number of entries up to which a copy takes no longer than norms of rows."""
ACCELERATORS = {"cuda", "xpu"}
"""The kinds of devices with float64 whose memory has addresses."""
_FEW = 256
"""How many numbers a CUDA graph gets from the host, each by a kernel of its own."""
_PARAMETERS = {torch.nn.Parameter}
_SINGLE = {_FLOAT32, *_HALVES}


def gradients_of(params: list[Any]) -> list[Any] | None:
    """Return the gradients of parameters for the lane, ``None`` if some are of other classes."""
    return [param.grad for param in params] if set(map(type, params)) == _PARAMETERS else None


def fast_path(leaves: list[Any], limit: float, *, in_place: bool) -> FastResult | None:
    """Measure and scale; see `uniclip.backends.base.Backend.fast_path`."""
    if tracing() or in_forward_mode():
        return None
    arrays = [leaf for leaf in leaves if leaf is not None]
    if not arrays or type(arrays[0]) is not Tensor:
        return None
    if not arrays[0].is_cpu:
        return _fast_path_on_device(leaves, arrays, limit, in_place=in_place)
    measured = norm_of(arrays)
    numbers = None if measured is None else fast_numbers(measured, limit)
    if numbers is None:
        return None
    norm, limit, factor = numbers
    if factor == 1:
        return FastResult(norm, limit, factor, leaves, _CPU)
    if in_place and not are_apart(arrays):
        return None
    single = all([array.dtype is _FLOAT32 for array in arrays])
    # which would get the dtype of the factor
    if not single and not all([array.ndim for array in arrays]):
        return None
    # A 0-d tensor takes half the time of a number; one of float32 would be narrowed beside half
    # precision.
    by = torch.scalar_tensor(factor, dtype=_FLOAT32 if single else torch.float64, device=_CPU)
    return FastResult(norm, limit, factor, _scale(leaves, arrays, by, in_place=in_place), _CPU)


def _fast_path_on_device(
    leaves: list[Any], arrays: list[Any], limit: float, *, in_place: bool
) -> FastResult | None:
    """Measure and scale on an accelerator, without a read by the host;
    in float64 no square is out of range.
    """
    device = arrays[0].device
    if device.type not in ACCELERATORS or not 0 < limit <= FLOAT32_MAX or not _are_plain(arrays):
        return None
    if not all([array.dtype in _SINGLE and array.device == device for array in arrays]):
        return None
    if not (are_apart(arrays) if in_place else are_dense(arrays)):
        return None
    most = float(np.float32(limit))
    kernels = kernels_on(device)
    clipped = None if kernels is None else kernels.clip(arrays, most, in_place=in_place)
    if clipped is not None:
        norm, factor, new = clipped
        return FastResult(
            norm, most, factor, leaves if in_place else fill_places(leaves, new), device
        )
    groups = list(by_dtype(arrays).values())
    norms = [
        norm for group in groups for norm in torch._foreach_norm(group, 2, dtype=torch.float64)
    ]
    norm = vector_norm(torch.stack(norms)).to(_FLOAT32)
    # Exactly 1 within the limit. A number divided by a tensor would be two kernels.
    ratio = torch.div(torch.scalar_tensor(most, dtype=_FLOAT32, device=_CPU), norm.clamp(min=most))
    factor = torch.add(ratio, norm, alpha=0)  # NaN if the norm is not finite
    if in_place:
        for group in groups:
            torch._foreach_mul_(group, factor)
        return FastResult(norm, most, factor, leaves, device)
    if len(groups) > 1 or (
        arrays[0].dtype is not _FLOAT32 and not all([array.ndim for array in arrays])
    ):
        return None  # 0-d products would have the dtype of the factor
    return FastResult(norm, most, factor, _scale(leaves, arrays, factor, in_place=False), device)


def by_dtype(arrays: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return arrays by their dtype: PyTorch's functions of lists are fast for those of one."""
    groups: dict[Any, list[Any]] = {}
    for array in arrays:
        groups.setdefault(array.dtype, []).append(array)
    return groups


def bound(arrays: list[Any], low: float, high: float, *, in_place: bool) -> list[Any] | None:
    """Bring the entries of dense arrays between two numbers.

    See `uniclip.backends.base.Backend.bound`.
    """
    if tracing() or in_forward_mode() or arrays[0].is_cpu or not _are_plain(arrays):
        return None
    groups, device = by_dtype(arrays), arrays[0].device
    if not all([array.dtype.is_floating_point and array.device == device for array in arrays]):
        return None
    if not (are_apart(arrays) if in_place else are_dense(arrays)):
        return None
    kernels = kernels_on(device)
    new = None if kernels is None else kernels.bound(arrays, low, high, in_place=in_place)
    if new is not None:
        return new
    changed: dict[int, Any] = {}
    for dtype, group in groups.items():
        most = torch.finfo(dtype).max
        least, largest = (
            number if abs(number) <= most else math.copysign(math.inf, number)
            for number in (low, high)
        )
        held = group if in_place else torch._foreach_clamp_min(group, least)
        if in_place:
            torch._foreach_clamp_min_(held, least)
        torch._foreach_clamp_max_(held, largest)
        changed.update(zip(map(id, group), held, strict=True))
    return [changed[id(array)] for array in arrays]


def norm_of(arrays: Sequence[Any]) -> float | None:
    """Return the joint norm of dense CPU tensors, float32 or narrower.

    ``None`` for others, or beyond the range.
    """
    parts = _parts_of(arrays) if _are_plain(arrays) else None
    if parts is None:
        return None
    # Joined once, and added in float64.
    norm: float = vector_norm(
        torch._C._nn.flatten_dense_tensors(parts), 2, None, False, dtype=torch.float64
    ).item()
    if norm == 0:  # short leaves, which are added in float64, are 0 then
        return (
            norm if all([_is_zero(array) for array in arrays if array.numel() >= _SHORT]) else None
        )
    return norm if _LOW < norm < _HIGH else None  # also NaN is not


def _scale(leaves: list[Any], arrays: list[Tensor], factor: Tensor, *, in_place: bool) -> list[Any]:
    """Return the leaves with the arrays among them multiplied by a factor."""
    if in_place:
        torch._foreach_mul_(arrays, factor)
        return leaves
    new = torch._foreach_mul(arrays, factor)
    return list(new) if len(arrays) == len(leaves) else fill_places(leaves, new)


def _are_plain(arrays: Sequence[Any]) -> bool:
    """Whether all are dense.

    A subclass may hold anything, and what records a derivative must not be read.
    """
    for array in arrays:
        if (
            type(array) is not Tensor
            or array.requires_grad
            or array.layout is not _STRIDED
            or array.is_nested
        ):
            return False
    return True


def _parts_of(arrays: Sequence[Tensor]) -> list[Tensor] | None:
    """Return tensors with the same joint norm: short leaves as they are,
    norms of rows of long ones.

    ``None`` if a leaf is not float32 or narrower, on the CPU, or a long one has gaps.
    """
    parts = []
    for array in arrays:
        single = array.dtype is _FLOAT32
        if not array.is_cpu or not (single or array.dtype in _HALVES):
            return None
        size = array.numel()
        if size < _SHORT:
            parts.append(array if single else array.float())
            continue
        ordered = array if array.is_contiguous() else in_order(array)
        if not ordered.is_contiguous():
            return None
        if size % _ROW == 0 and single:
            parts.append(vector_norm(ordered.view(-1, _ROW), 2, 1))
            continue
        # which bound the copies of half precision
        for piece in ordered.view(-1).split(size if single else PIECE):
            parts += _norms_of_rows(piece if single else piece.float())
    return parts


def _norms_of_rows(flat: Tensor) -> list[Tensor]:
    """Return short vectors with the same joint norm: the norms of rows,
    and the entries that are left.
    """
    whole = flat.numel() - flat.numel() % _ROW
    norms = vector_norm(flat[:whole].view(-1, _ROW), 2, 1)
    # A view would keep all of it.
    return [norms] if whole == flat.numel() else [norms, flat[whole:].clone()]


def move(array: Tensor, device: Any) -> Tensor:
    """Return a tensor on a device; what is sent to an accelerator does not wait for it."""
    if array.device == device:
        return array
    if (
        device.type not in ACCELERATORS
        or type(array) is not Tensor
        or not array.is_cpu
        or array.requires_grad
    ):
        return array.to(device)
    if tracing() or in_forward_mode():
        return array.to(device)
    if array.numel() == 1:  # the number is an argument of a kernel, which also a CUDA graph keeps
        return torch.full(array.shape, array.item(), dtype=array.dtype, device=device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return array.pin_memory().to(device, non_blocking=True)
    if array.numel() > _FEW:  # which PyTorch refuses
        return array.to(device)
    each = [
        torch.full((1,), value, dtype=array.dtype, device=device)
        for value in array.reshape(-1).tolist()
    ]
    # A graph would read what the host's memory holds later.
    return torch.cat(each).reshape(array.shape)


def in_order(array: Tensor) -> Tensor:
    """Return the array with its axes in the order of memory."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))


def _is_zero(array: Tensor) -> bool:
    """Whether all entries are 0, by their bits."""
    half = array.dtype is torch.bfloat16  # which NumPy does not have
    return all_zero((array.view(torch.int16) if half else array).numpy(force=True))


def are_dense(arrays: list[Tensor]) -> bool:
    """Whether arrays are without gaps, in any order of their axes,
    and hold their values as they are.
    """
    return not any(
        [
            array.is_neg() or not (array.is_contiguous() or in_order(array).is_contiguous())
            for array in arrays
        ]
    )


def are_apart(arrays: list[Tensor]) -> bool:
    """Whether dense arrays are writable, without gaps, and do not overlap."""
    end = 0
    for start, number in sorted(zip(map(Tensor.data_ptr, arrays), range(len(arrays)), strict=True)):
        array = arrays[number]
        if start < end or array.is_inference() or array.is_neg():
            return False
        # Has gaps, or repeats entries (expand).
        if not (array.is_contiguous() or in_order(array).is_contiguous()):
            return False
        end = start + array.nbytes
    return True
