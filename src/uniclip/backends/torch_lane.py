# SPDX-License-Identifier: MIT
"""The lane of PyTorch: dense float32 gradients of one device, in as few calls as there can be.

In a training step code and data are cold, and each other library that is entered costs 5 to 10 µs: so it uses PyTorch
alone. Nothing is remembered from step to step, since any gradient may be replaced.

On the CPU the norm is read, and nothing is written within the limit. On an accelerator, where the host would wait for
it, nothing is read, and seven kernels run.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from uniclip.backends.base import FITS, FLOAT32_MAX, Lane, factor_in_lane
from uniclip.backends.torch_modes import in_forward_mode, tracing

_DTYPE, _DENSE, _CPU = torch.float32, torch.strided, torch.device("cpu")
_LEAST, _LARGEST = map(sqrt, FITS)
"""Between them the squares of float32 numbers neither overflow nor underflow."""
ROW = 256
"""How many squares are added in a row: so few are accurate even if equal, and rows are read at memory speed."""
SHORT = 2**13
"""The number of entries up to which a copy takes no longer than norms of rows."""


def lane(leaves: list[Any], limit: float, *, in_place: bool) -> Lane | None:
    """Measure and scale; see `uniclip.backends.base.Backend.lane`."""
    if tracing() or in_forward_mode():
        return None
    arrays = [leaf for leaf in leaves if leaf is not None]
    parts = parts_of(arrays)
    if not parts:
        return lane_of_device(leaves, arrays, limit, in_place=in_place) if arrays else None
    # Joined once, and added in float64.
    norm = vector_norm(torch._C._nn.flatten_dense_tensors(parts), 2, None, False, dtype=torch.float64).item()
    if not _LEAST < norm < _LARGEST and not (norm == 0 and all_zero(arrays)):  # also NaN
        return None
    numbers = factor_in_lane(norm, limit)
    if numbers is None:
        return None
    factor = numbers[2]
    if factor == 1:
        return Lane(*numbers, leaves, _CPU)
    if in_place and not are_apart(arrays):
        return None
    by = torch.scalar_tensor(factor, dtype=_DTYPE, device=_CPU)  # takes half the time of a number
    return Lane(*numbers, products(leaves, arrays, by, in_place=in_place), _CPU)


def lane_of_device(leaves: list[Any], arrays: list[Any], limit: float, *, in_place: bool) -> Lane | None:
    """Do so on an accelerator that has float64, where no square overflows or underflows."""
    first = arrays[0]
    if type(first) is not Tensor or first.device.type in {"cpu", "mps", "meta"} or not 0 < limit <= FLOAT32_MAX:
        return None
    device = first.device
    for array in arrays:
        if type(array) is not Tensor or array.dtype is not _DTYPE or array.device != device or array.requires_grad:
            return None
        if array.layout is not _DENSE or array.is_nested:
            return None
    if in_place and not are_apart(arrays):
        return None
    norm, most = vector_norm(torch.stack(torch._foreach_norm(arrays, 2, dtype=torch.float64))), float(np.float32(limit))
    # A number divided by a tensor would be two kernels. The ratio is exactly 1 within the limit.
    ratio = torch.div(torch.scalar_tensor(most, dtype=torch.float64, device=_CPU), norm.clamp(min=most))
    factor = torch.add(ratio, norm, alpha=0, out=torch.empty_like(norm, dtype=_DTYPE))  # NaN if the norm is not finite
    return Lane(norm, most, factor, products(leaves, arrays, factor, in_place=in_place), device)


def products(leaves: list[Any], arrays: list[Tensor], factor: Tensor, *, in_place: bool) -> list[Any]:
    """Return the leaves with the arrays among them multiplied by a factor."""
    if in_place:
        torch._foreach_mul_(arrays, factor)
        return leaves
    new = torch._foreach_mul(arrays, factor)
    if len(arrays) == len(leaves):
        return list(new)
    left = iter(new)
    return [None if leaf is None else next(left) for leaf in leaves]


def parts_of(arrays: list[Any]) -> list[Tensor] | None:
    """Return tensors with the same joint norm, of short leaves themselves; ``None`` if the lane does not take all."""
    parts = []
    for array in arrays:
        # A subclass may hold anything, and what records a derivative must not be read.
        if type(array) is not Tensor or array.dtype is not _DTYPE or not array.is_cpu or array.requires_grad:
            return None
        if array.layout is not _DENSE or array.is_nested:
            return None
        size = array.numel()
        if size < SHORT:
            parts.append(array)
            continue
        ordered = array if array.is_contiguous() else in_order(array)
        if not ordered.is_contiguous():
            return None
        if size % ROW == 0:
            parts.append(vector_norm(ordered.view(-1, ROW), 2, 1))
        else:
            parts += norms_of_rows(ordered.view(-1))
    return parts


def norms_of_rows(flat: Tensor) -> list[Tensor]:
    """Return short vectors with the same joint norm: the norms of rows, and the entries that are left."""
    whole = flat.numel() - flat.numel() % ROW
    norms = vector_norm(flat[:whole].view(-1, ROW), 2, 1)
    return [norms] if whole == flat.numel() else [norms, flat[whole:].clone()]  # a view would keep all of it


def in_order(array: Tensor) -> Tensor:
    """Return the array with its axes in the order of memory."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))


def all_zero(arrays: list[Tensor]) -> bool:
    """Whether all entries are 0, by their bits but the sign's, as squares underflow."""
    return not any([bool((array.resolve_neg().view(torch.int32) & 0x7FFFFFFF).any()) for array in arrays])


def are_apart(arrays: list[Tensor]) -> bool:
    """Whether dense arrays can be written, and none ends behind the beginning of the next in memory."""
    end = 0
    for start, number in sorted(zip(map(Tensor.data_ptr, arrays), range(len(arrays)), strict=True)):
        array = arrays[number]
        if start < end or array.is_inference() or array.is_neg():
            return False
        if not (array.is_contiguous() or in_order(array).is_contiguous()):  # it has gaps, or entries in one place
            return False
        end = start + array.nbytes
    return True
