# SPDX-License-Identifier: MIT
"""Sums of squares of PyTorch tensors: on the CPU, on an accelerator, and in code that is being compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from uniclip.backends.base import PIECE, in_groups
from uniclip.backends.host import HIGH, LOW, few, small, squares, squares_of, squares_of_joined

SINGLE = {torch.float16, torch.bfloat16, torch.float32}
FOREIGN = {torch.bfloat16, torch.complex32}
"""The dtypes that NumPy does not have."""
REAL = {torch.float32, torch.float64}

_ROW = 256
"""How many squares are added in a row: so few are accurate even if equal, and rows are read at memory speed."""
_SHORT = 2**13
"""The number of entries up to which a float64 copy takes no longer than norms of rows."""


def view_of(array: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array of the same memory, detached; of the values where that is negated or conjugated."""
    return array.numpy(force=True)


def squares_here(arrays: list[torch.Tensor], lengths: list[int]) -> Any:
    """Return the sums of squares in a NumPy array, from memory that the CPU can read."""
    if len(arrays) == 1 and arrays[0].dtype in REAL and arrays[0].numel() <= PIECE:
        return np.array([squares_of(arrays[0].numpy(force=True))])
    kinds = {array.dtype for array in arrays}
    sizes = [array.numel() for array in arrays]
    if len(kinds) == 1 and not kinds.isdisjoint(REAL) and small(sizes, lengths):
        flat = torch._utils._flatten_dense_tensors(arrays)
        return squares_of_joined(flat.numpy(force=True), sizes, lengths)
    if kinds.isdisjoint(FOREIGN) and (len(kinds) > 1 or few(arrays, sum(sizes))):
        return squares(list(map(view_of, arrays)), lengths)
    if not kinds <= {*REAL, torch.bfloat16} or len(kinds) > 1 or any([array.is_neg() for array in arrays]):
        return None
    totals = list(map(_total, in_groups(arrays, lengths)))
    return None if None in totals else np.array(totals)


def _total(arrays: Sequence[torch.Tensor]) -> float | None:
    """Return the sum of squares of arrays by PyTorch's threads, ``None`` if one of them is not contiguous."""
    parts: list[torch.Tensor] = []
    for array in arrays:
        ordered = array if array.is_contiguous() else in_order(array)
        if not ordered.is_contiguous():
            return None
        narrow = array.dtype is torch.bfloat16
        for flat in ordered.view(-1).split(PIECE) if narrow else (ordered.view(-1),):
            parts += _rows(flat.float() if narrow else flat)
    rows = torch.cat(parts).double()
    total = float(rows.dot(rows))
    if LOW < total < HIGH or (total and arrays[0].dtype is torch.float64):
        return total
    return sum([squares_of(view_of(p.double())) for array in arrays for p in in_order(array).view(-1).split(PIECE)])


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return short vectors with the same joint norm: the norms of rows, and the remaining entries."""
    if flat.numel() < _SHORT:
        return [flat]
    whole = flat.numel() - flat.numel() % _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return [norms] if whole == flat.numel() else [norms, flat[whole:].clone()]  # a view would keep all of it


def squares_elsewhere(arrays: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return the sums of squares on an accelerator in float64, so that nothing overflows and needs a second pass."""
    narrow = arrays[0].device.type == "mps"  # has no float64
    norms = torch._foreach_norm(arrays, 2, dtype=torch.float32 if narrow else torch.float64)
    if len(lengths) == 1:
        norms = torch.stack(norms)
        return torch.dot(norms, norms).unsqueeze(0)
    total = torch.stack(norms).square()
    return total if len(lengths) == len(arrays) else _by_group(list(total.unbind()), lengths)


def squares_along_elsewhere(arrays: list[torch.Tensor], axes: list[Any]) -> list[Any]:
    """Return the sums of squares along axes on an accelerator in float64; ``None`` for norms of entries."""
    if arrays[0].device.type == "mps" or not all(axes):
        return [None] * len(arrays)
    norms = [torch.linalg.vector_norm(a, dim=some, dtype=torch.float64) for a, some in zip(arrays, axes, strict=True)]
    if len({norm.shape for norm in norms}) > 1:
        return torch._foreach_mul(norms, norms)
    return list(torch.stack(norms).square().unbind())


def _by_group(totals: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return the totals of groups from those of arrays."""
    if len(totals) == len(lengths):
        return torch.stack(totals)
    return torch.stack([torch.stack(list(some)).sum() for some in in_groups(totals, lengths)])


def in_order(array: torch.Tensor) -> torch.Tensor:
    """Return the array with its axes in memory order."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))
