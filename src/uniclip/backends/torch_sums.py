# SPDX-License-Identifier: MIT
"""Sums of squares of PyTorch tensors: on the CPU, on an accelerator, and in code that is being compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from uniclip.backends.base import PIECE, in_groups
from uniclip.backends.host import HIGH, LOW, UNDERFLOWN, few, small, squares, squares_of, squares_of_joined

SINGLE = {torch.float16, torch.bfloat16, torch.float32}
FOREIGN = {torch.bfloat16, torch.complex32}
"""The dtypes that NumPy does not have."""
REAL = {torch.float32, torch.float64}

_ROW = 256
"""How many squares are added in a row: so few are accurate even if equal, and rows are read at memory speed."""
_SHORT = 2**11
"""The number of entries up to which a float64 copy takes no longer than norms of rows."""
_SMALL = 2**14
"""The number of entries up to which copying arrays into one is faster than processing each."""
_KEPT = 2**22
"""For how many entries, about, norms of rows are kept before they are added, to bound the memory."""


def _rows(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return short vectors with the same joint norm: the norms of rows, and the remaining entries."""
    if flat.numel() < _SHORT:
        return [flat]
    whole = flat.numel() - flat.numel() % _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return [norms] if whole == flat.numel() else [norms, flat[whole:].clone()]  # a view would keep all of it


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
    wide = torch.float64 if torch.float64 in kinds else torch.float32
    if len(kinds) > 1 or any(array.is_complex() or array.is_neg() for array in arrays):
        return None
    totals = [_total(group, wide) for group in in_groups(arrays, lengths)]
    return None if None in totals else np.array(totals)


def _total(arrays: Sequence[torch.Tensor], wide: torch.dtype) -> float | None:
    """Return the sum of squares of arrays, ``None`` if one of them is not contiguous."""
    total, parts, entries = 0.0, [], 0
    for flat in _vectors(arrays, wide):
        if flat is None:
            return None
        parts += _rows(flat)
        entries += flat.numel()
        if entries > _KEPT:
            total += _dot(parts)
            parts, entries = [], 0
        del flat  # before the next one is made
    total = total + _dot(parts) if parts else total
    if (total > 0 and wide is torch.float64) or LOW < total < HIGH:
        return total
    return _again(arrays, wide, total)


def _again(arrays: Sequence[torch.Tensor], wide: torch.dtype, total: float) -> float:
    """Return a sum that may not be accurate, made in float64."""
    flat = [piece for array in arrays for piece in array.reshape(-1).split(PIECE) if array.numel()]
    if not total and not any([bool(piece.any()) for piece in flat]):
        return 0.0
    if wide is torch.float64:
        return total or UNDERFLOWN
    return sum([float(torch.dot(double, double)) for double in (piece.double() for piece in flat)])


def _vectors(arrays: Sequence[torch.Tensor], wide: torch.dtype) -> Iterator[torch.Tensor | None]:
    """Yield the entries of arrays in pieces, small arrays together; ``None`` for one that is not contiguous."""
    small: list[torch.Tensor] = []
    entries = 0
    for array in arrays:
        size = array.numel()
        if size > _SMALL:
            flat = _flat(array)
            if flat is None:
                yield None
            elif array.dtype is wide:
                yield from flat.split(_KEPT) if size > _KEPT else (flat,)
            else:
                yield from (piece.to(wide) for piece in flat.split(PIECE))
            continue
        if entries + size > PIECE:
            yield torch.cat(small).to(wide)
            small, entries = [], 0
        small.append(array if array.ndim == 1 else array.reshape(-1))
        entries += size
    if small:
        yield torch.cat(small).to(wide)


def _dot(parts: list[torch.Tensor]) -> float:
    """Return the sum of squares of vectors."""
    rows = (torch.cat(parts) if len(parts) > 1 else parts[0]).double()
    return float(torch.dot(rows, rows))


def squares_in_double(arrays: list[torch.Tensor], lengths: list[int]) -> torch.Tensor | None:
    """Return the sums of squares in float64, to which a compiler converts each entry where it is read."""
    if any(array.dtype not in SINGLE for array in arrays):
        return None
    return _by_group([array.float().double().square().sum() for array in arrays], lengths)


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


def _flat(array: torch.Tensor) -> torch.Tensor | None:
    """Return a real array as a vector without a copy, ``None`` if it is not contiguous."""
    if array.is_contiguous():
        return array.view(-1)
    ordered = in_order(array)
    return ordered.view(-1) if ordered.is_contiguous() else None


def in_order(array: torch.Tensor) -> torch.Tensor:
    """Return the array with its axes in memory order."""
    return array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))
