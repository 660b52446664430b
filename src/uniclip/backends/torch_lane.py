# SPDX-License-Identifier: MIT
"""The lane of PyTorch: dense float32 gradients on the CPU, in as few calls as there can be.

In a training step code and data are cold, and each other library that is entered costs 5 to 10 µs: so it uses PyTorch
alone. Nothing is remembered from step to step, since any gradient may be replaced.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from uniclip.backends.base import FITS, Lane, factor_in_lane
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
        return None
    # Joined once, and added in float64.
    norm = vector_norm(torch._C._nn.flatten_dense_tensors(parts), 2, None, False, dtype=torch.float64).item()
    if not _LEAST < norm < _LARGEST and not (norm == 0 and all_zero(arrays)):  # also NaN
        return None
    numbers = factor_in_lane(norm, limit)
    if numbers is None:
        return None
    factor = numbers[2]
    if factor == 1:
        return Lane(*numbers, leaves)
    by = torch.scalar_tensor(factor, dtype=_DTYPE, device=_CPU)  # takes half the time of a number
    if in_place:
        if not are_apart(arrays):
            return None
        torch._foreach_mul_(arrays, by)
        return Lane(*numbers, leaves)
    new = torch._foreach_mul(arrays, by)
    if len(arrays) == len(leaves):
        return Lane(*numbers, list(new))
    left = iter(new)
    return Lane(*numbers, [None if leaf is None else next(left) for leaf in leaves])


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
