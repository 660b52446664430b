# SPDX-License-Identifier: MIT
"""One norm in PyTorch: dense gradients on one device, with minimal call overhead.

In a training step code and data are not in the processor's cache, and each other library that is
called costs 5 to 10 µs, so it uses PyTorch alone. Nothing is kept from step to step, since any
gradient may be replaced.

On the CPU the host reads the norm, and writes nothing within the limit. On an accelerator, where
the host would have to wait, it reads nothing. Three kernels of `uniclip.backends.torch.triton` run,
and the last one writes nothing within the limit. Without Triton, eight of PyTorch's functions run
for gradients of one dtype; each starts more than one kernel for many tensors or elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from uniclip.backends.arithmetic import PIECE
from uniclip.backends.base import FITS, FITS_FLOAT64, Backend, OneNorm
from uniclip.backends.numpy import all_zero
from uniclip.backends.torch.gpus import kernels_on
from uniclip.backends.torch.modes import tracing
from uniclip.backends.torch.private import (
    flatten,
    foreach_clamp_max_,
    foreach_clamp_min,
    foreach_clamp_min_,
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    in_forward_mode,
)

# Globals are looked up faster than attributes of modules.
_FLOAT32 = torch.float32
_FLOAT64 = torch.float64
_STRIDED = torch.strided
CPU = torch.device("cpu")

HALVES = {torch.bfloat16, torch.float16}
SINGLE = {_FLOAT32, *HALVES}
REAL = {_FLOAT32, _FLOAT64}
_SINGLE_RANGE = tuple(map(sqrt, FITS))
"""Between them the squares of float32 numbers neither overflow nor underflow."""
_DOUBLE_RANGE = tuple(map(sqrt, FITS_FLOAT64))
"""The same for float64 numbers."""
_ROW = 256
"""The number of squares that are added in a row: so few are accurate even if equal,
and rows are read at memory speed.
"""
LONG = 2**13
"""The number of elements from which norms of rows take less time than a copy."""
_MANY = 2**15
"""The same for a vector that is a copy already."""
ACCELERATORS = {"cuda", "xpu"}
"""The types of devices with float64 whose memory has addresses."""
_BATCH = 2**25
"""The largest number of elements that are copied at once, 128 MiB in float32; of a single tensor,
any number.
"""
_MAX_FILLED = 256
"""The number of elements that a CUDA graph may get from the host, each by its own kernel."""
REGULAR = {Tensor, torch.nn.Parameter}
"""The classes of dense tensors without code of their own."""
_PARAMETERS = {torch.nn.Parameter}


def gradients_of(params: list[Tensor]) -> list[Tensor | None] | None:
    """Return the gradients of parameters for the spine, ``None`` if one is of another class."""
    if set(map(type, params)) != _PARAMETERS:
        return None
    return [param.grad for param in params]


def one_norm(
    backend: Backend[Tensor], leaves: list[Tensor | None], *, in_place: bool
) -> OneNorm | None:
    """Return the norm of all leaves; see `uniclip.backends.base.Backend.one_norm`.

    It is a method of the backend.
    """
    if tracing() or in_forward_mode():
        return None
    arrays = [leaf for leaf in leaves if leaf is not None]
    if type(arrays[0]) is not Tensor:
        return None
    if arrays[0].is_cpu:
        norm = host_norm(arrays)
        if norm is None:
            return None
        dtype = np.float64 if arrays[0].dtype is _FLOAT64 else np.float32
        return OneNorm((backend, CPU, dtype), arrays, float(dtype(norm)))

    device = arrays[0].device
    if device.type not in ACCELERATORS or not _are_regular(arrays):
        return None
    if not all([array.dtype in SINGLE and array.device == device for array in arrays]):
        return None
    if not (are_separate_blocks(arrays) if in_place else are_dense(arrays)):
        return None
    return OneNorm((backend, device, np.float32), arrays)


def scale_all(arrays: list[Tensor], factor: float, *, in_place: bool) -> list[Tensor] | None:
    """Multiply on the CPU; see `uniclip.backends.base.Backend.scale_all`."""
    # Nothing is written within the limit, so overlaps are checked only now.
    if in_place and not are_separate_blocks(arrays):
        return None

    # A 0-d tensor takes half the time of a number. A float32 one would be rounded to half precision
    # before the product.
    dtype = arrays[0].dtype
    if dtype in HALVES or not all([array.dtype is dtype for array in arrays]):
        # A 0-d product would get the dtype of the factor.
        if not all([array.ndim for array in arrays]):
            return None
        dtype = _FLOAT64
    scale = torch.scalar_tensor(factor, dtype=dtype, device=CPU)

    if in_place:
        foreach_mul_(arrays, scale)
        return arrays
    return list(foreach_mul(arrays, scale))


def clip_at_once(
    arrays: list[Tensor], limit: float, *, in_place: bool
) -> tuple[list[Tensor], Tensor, Tensor] | None:
    """Clip on an accelerator; see `uniclip.backends.base.Backend.clip_at_once`.

    In float64 no square is out of range.
    """
    kernels = kernels_on(arrays[0].device)
    clipped = None if kernels is None else kernels.clip(arrays, limit, in_place=in_place)
    if clipped is not None:
        norm, factor, new = clipped
        return arrays if in_place else new, norm, factor

    groups = list(by_dtype(arrays).values())
    if len(groups) > 1 and not in_place:
        return None
    norm, factor = _norm_and_factor(groups, limit)
    products = [multiply_group(group, factor, in_place=in_place) for group in groups]
    return arrays if in_place else products[0], norm, factor


def _norm_and_factor(groups: list[list[Tensor]], limit: float) -> tuple[Tensor, Tensor]:
    """Return the joint norm of tensors on an accelerator, and the factor, both 0-d and float32."""
    norms: list[Tensor] = []
    for group in groups:
        # Float32 squares can leave the range. To detect it before the product, the host would have
        # to wait.
        norms += foreach_norm(group, 2, dtype=_FLOAT64)
    norm = vector_norm(torch.stack(norms)).to(_FLOAT32)

    # As `uniclip.curves.hard`: the ratio is exactly 1 within the limit. A number divided by a
    # tensor would be two kernels.
    dividend = torch.scalar_tensor(limit, dtype=_FLOAT32, device=CPU)
    ratio = torch.div(dividend, norm.clamp(min=limit))

    # `clamp` hides an infinite norm; the factor has to be NaN if the norm is not finite.
    factor = torch.add(ratio, norm, alpha=0)
    return norm, factor


def multiply_group(
    group: list[Tensor], factor: Tensor | list[Tensor], *, in_place: bool
) -> list[Tensor]:
    """Return tensors of one dtype and device, multiplied by a factor, or by one for each."""
    if isinstance(factor, Tensor) and factor.ndim == 0 and _are_halves_elsewhere(group):
        return _multiply_halves(group, factor, in_place=in_place)
    if in_place:
        foreach_mul_(group, factor)
        return group
    return list(foreach_mul(group, factor))


def _are_halves_elsewhere(group: list[Tensor]) -> bool:
    """Return whether regular tensors of one dtype are of half precision, on an accelerator."""
    if group[0].dtype not in HALVES or group[0].device.type not in ACCELERATORS:
        return False
    return REGULAR.issuperset(map(type, group))


def _multiply_halves(group: list[Tensor], factor: Tensor, *, in_place: bool) -> list[Tensor]:
    """Return tensors of half precision, multiplied by a float32 factor in few launches."""
    # PyTorch starts a kernel for each tensor if the factor has another dtype, and a half-precision
    # factor has an error of up to 0.4 %. So float32 copies are multiplied. The function behind
    # `GradScaler.unscale_` needs none, but CUDA does not have it for bfloat16.
    products = group if in_place else [torch.empty_like(array) for array in group]
    start = 0
    while start < len(group):
        batch = slice(start, _end_of_batch(group, start))
        wide = [torch.empty_like(array, dtype=_FLOAT32) for array in group[batch]]
        foreach_copy_(wide, group[batch])
        foreach_mul_(wide, factor)
        foreach_copy_(products[batch], wide)
        start = batch.stop
    return products


def _end_of_batch(arrays: list[Tensor], start: int) -> int:
    """Return where a batch ends that has at most `_BATCH` elements, and at least one array."""
    end = start + 1
    elements = arrays[start].numel()
    while end < len(arrays) and elements + arrays[end].numel() <= _BATCH:
        elements += arrays[end].numel()
        end += 1
    return end


def by_dtype(arrays: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Return arrays by their dtype: PyTorch's functions of lists are fast for one dtype."""
    dtypes = [array.dtype for array in arrays]
    if len(set(dtypes)) == 1:
        return {dtypes[0]: list(arrays)}

    groups: dict[torch.dtype, list[Tensor]] = {}
    for array, dtype in zip(arrays, dtypes, strict=True):
        groups.setdefault(dtype, []).append(array)
    return groups


def bound(arrays: list[Tensor], low: float, high: float, *, in_place: bool) -> list[Tensor] | None:
    """Clamp the elements of dense arrays on an accelerator between two numbers.

    See `uniclip.backends.base.Backend.bound`.
    """
    if tracing() or in_forward_mode() or arrays[0].is_cpu or not _are_regular(arrays):
        return None
    device = arrays[0].device
    if not all([array.dtype.is_floating_point and array.device == device for array in arrays]):
        return None
    if not (are_separate_blocks(arrays) if in_place else are_dense(arrays)):
        return None

    kernels = kernels_on(device)
    new = None if kernels is None else kernels.bound(arrays, low, high, in_place=in_place)
    if new is not None:
        return new

    # Groups by dtype lose the order of the arrays, so results are found by identity.
    clamped: dict[int, Tensor] = {}
    for group in by_dtype(arrays).values():
        bounded = _clamp(group, low, high, in_place=in_place)
        clamped.update(zip(map(id, group), bounded, strict=True))
    return [clamped[id(array)] for array in arrays]


def _clamp(group: list[Tensor], low: float, high: float, *, in_place: bool) -> list[Tensor]:
    """Clamp tensors of one dtype by PyTorch's functions of lists."""
    # PyTorch raises an error for a number that overflows the dtype, but not for an infinity.
    largest = torch.finfo(group[0].dtype).max
    if abs(low) > largest:
        low = math.copysign(math.inf, low)
    if abs(high) > largest:
        high = math.copysign(math.inf, high)

    if in_place:
        foreach_clamp_min_(group, low)
    else:
        group = list(foreach_clamp_min(group, low))
    foreach_clamp_max_(group, high)
    return group


def host_norm(arrays: Sequence[Tensor]) -> float | None:
    """Return the joint norm of dense CPU tensors, all float64 or none.

    ``None`` for other tensors, or if the norm is out of range.
    """
    is_double = arrays[0].dtype is _FLOAT64
    pieces = _pieces_of(arrays, double=is_double) if _are_regular(arrays) else None
    if pieces is None:
        return None

    # All are copied into one vector, and added in float64.
    flat = flatten(pieces)
    # Many short leaves, none of which is in rows yet, take less time in rows.
    in_rows = not is_double and flat.numel() >= _MANY
    in_rows = in_rows and flat.numel() == sum([array.numel() for array in arrays])
    if in_rows:
        flat = flatten(_norms_of_rows(flat))
    norm: float = vector_norm(flat, 2, None, False, dtype=_FLOAT64).item()
    if norm == 0:
        # The squares of a row may underflow. Short float32 leaves are added in float64, so they
        # are 0.
        doubtful = arrays
        if not (is_double or in_rows):
            doubtful = [array for array in arrays if array.numel() >= LONG]
        return norm if all([_is_zero(array) for array in doubtful]) else None

    # NaN is out of range, too.
    smallest, largest = _DOUBLE_RANGE if is_double else _SINGLE_RANGE
    return norm if smallest < norm < largest else None


def _are_regular(arrays: Sequence[Tensor]) -> bool:
    """Return whether all are dense tensors without a derivative.

    A subclass may compute anything, and the value of a recorded tensor must not be read.
    """
    for array in arrays:
        if type(array) is not Tensor or array.requires_grad:
            return False
        if array.layout is not _STRIDED or array.is_nested:
            return False
    return True


def _pieces_of(arrays: Sequence[Tensor], *, double: bool) -> list[Tensor] | None:
    """Return tensors with the same joint norm: short leaves as they are,
    and norms of the rows of long ones.

    ``None`` if a leaf is not on the CPU, or of another precision, or a long one has gaps.
    """
    full = _FLOAT64 if double else _FLOAT32
    pieces = []
    for array in arrays:
        is_full = array.dtype is full
        if not array.is_cpu or not (is_full or (array.dtype in HALVES and not double)):
            return None
        size = array.numel()
        if size < LONG:
            pieces.append(array if is_full else array.float())
            continue

        ordered = array if array.is_contiguous() else in_memory_order(array)
        if not ordered.is_contiguous():
            return None
        if size % _ROW == 0 and is_full:
            pieces.append(vector_norm(ordered.view(-1, _ROW), 2, 1))
            continue

        # Half precision is converted piece by piece, to bound the memory of the copies.
        flat = ordered.view(-1)
        if is_full:
            pieces += _norms_of_rows(flat)
            continue
        for piece in flat.split(PIECE):
            pieces += _norms_of_rows(piece.float())
    return pieces


def _norms_of_rows(flat: Tensor) -> list[Tensor]:
    """Return short vectors with the same joint norm: the norms of rows,
    and the elements that are left.
    """
    size = flat.numel()
    end = size - size % _ROW
    norms = vector_norm(flat[:end].view(-1, _ROW), 2, 1)
    if end == size:
        return [norms]

    # A view would keep all elements alive.
    return [norms, flat[end:].clone()]


def move(array: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the host does not wait until an accelerator has it."""
    if array.device == device:
        return array
    if device.type not in ACCELERATORS or type(array) is not Tensor:
        return array.to(device)
    if not array.is_cpu or array.requires_grad or tracing() or in_forward_mode():
        return array.to(device)

    # A number is an argument of the kernel that fills, so that a CUDA graph keeps it, too.
    if array.numel() == 1:
        return torch.full(array.shape, array.item(), dtype=array.dtype, device=device)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return array.pin_memory().to(device, non_blocking=True)

    # PyTorch raises an error for this copy in a capture.
    if array.numel() > _MAX_FILLED:
        return array.to(device)

    # A graph would read the host's memory at each replay, whatever it contains then.
    numbers = array.reshape(-1).tolist()
    filled = [torch.full((1,), n, dtype=array.dtype, device=device) for n in numbers]
    return torch.cat(filled).reshape(array.shape)


def in_memory_order(array: Tensor) -> Tensor:
    """Return the array with its axes in the order of memory."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))


def _is_zero(array: Tensor) -> bool:
    """Return whether all elements are 0, by their bits."""
    # NumPy has no bfloat16.
    if array.dtype is torch.bfloat16:
        array = array.view(torch.int16)
    return all_zero(array.numpy(force=True))


def are_dense(arrays: Sequence[Tensor]) -> bool:
    """Return whether arrays have no gaps, in any order of their axes, and no negative bit."""
    return not any(map(Tensor.is_neg, arrays)) and are_without_gaps(arrays)


def are_without_gaps(arrays: Sequence[Tensor]) -> bool:
    """Return whether arrays have no gaps, in any order of their axes."""
    # `map` runs no Python code for each of many tensors.
    if all(map(Tensor.is_contiguous, arrays)):
        return True
    return all([x.is_contiguous() or in_memory_order(x).is_contiguous() for x in arrays])


def are_separate_blocks(arrays: list[Tensor]) -> bool:
    """Return whether dense arrays are writable, without gaps, and do not overlap."""
    if any(map(Tensor.is_inference, arrays)) or any(map(Tensor.is_neg, arrays)):
        return False

    # An array has gaps, or repeats elements after `expand`.
    if not are_without_gaps(arrays):
        return False

    addresses = map(Tensor.data_ptr, arrays)
    sizes = [array.nbytes for array in arrays]
    end = 0
    for start, size in sorted(zip(addresses, sizes, strict=True)):
        if start < end:
            return False
        end = start + size
    return True
