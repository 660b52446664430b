# SPDX-License-Identifier: MIT
"""NumPy on the memory of other frameworks' CPU arrays, where calling the framework takes longer than adding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from uniclip.backends.base import PIECE, in_groups

View: TypeAlias = np.ndarray[Any, Any]

WIDE = 4
"""The bytes of an entry that is precise enough to add and multiply in."""
_REAL = {"e", "E", "f", "d"}  # E is the bfloat16 of ml_dtypes
_ROW = 512
"""How many squares BLAS adds in a row. The rounding errors of equal entries have one sign, and the kernels for old
processors keep few partial sums: with any of them, 512 squares are off by at most 3e-7, 1,024 by 5e-7."""
_COPIED, _TINY = 2**12, 2**6
"""The largest number of entries of arrays that are copied: in total, or for each of many. The memory of larger copies
may be new at every step, and the system takes longer to provide it than the copy takes."""
_FEW = 64
_FEW_ROWS = 16
"""How many squares are added sequentially: the errors of so few are small, even with one sign."""


def few(arrays: Sequence[Any], size: int) -> bool:
    """Whether calls take longer than arithmetic for these numbers of arrays and entries."""
    return len(arrays) <= _FEW and size <= PIECE


def small(sizes: list[int]) -> bool:
    """Whether copying arrays of these sizes into one is faster than processing each; none of them is empty."""
    return sum(sizes) <= max(_COPIED, _TINY * len(sizes)) and all(sizes)


def squares(arrays: list[View], lengths: list[int]) -> View | None:
    """Return ``Σx²`` over the arrays of each group, ``None`` if one is not real floating point."""
    kinds = {array.dtype.char for array in arrays}
    if not kinds <= _REAL or (len(kinds) > 1 and "d" in kinds):  # squares that one dtype can hold and the other cannot
        return None
    sizes = [array.size for array in arrays]
    if len(arrays) > 1 and kinds <= {"f", "d"} and small(sizes):
        return squares_of_joined(np.concatenate(arrays, axis=None), sums_of(sizes, lengths))
    totals = sums_of(list(map(_squares, arrays)), lengths)
    return np.array(totals, np.float64 if "d" in kinds else np.float32)


def sums_of(values: list[Any], lengths: list[int]) -> list[Any]:
    """Return the sum of the values of each group; no group is empty."""
    return values if len(lengths) == len(values) else [sum(some) for some in in_groups(values, lengths)]


def squares_of_joined(flat: View, counts: Sequence[int]) -> View:
    """Return ``Σx²`` over consecutive parts of a vector, with the given lengths above 0."""
    if len(counts) == 1:
        return np.array([_of_vector(flat)], flat.dtype)
    wide = flat.astype(np.float64)
    wide *= wide
    return np.add.reduceat(wide, list(accumulate(counts[:-1], initial=0)))


def _squares(array: View) -> float:
    if array.itemsize >= WIDE and (array.size <= PIECE or array.flags.forc):
        return _of_vector(array.ravel("K"))
    with walk([array], "readonly", [np.result_type(array.dtype, np.float32)]) as pieces:
        return sum(_of_vector(np.ascontiguousarray(piece)) for piece in pieces)  # BLAS adds no other dtypes


def _of_vector(flat: View) -> float:
    if flat.size <= _COPIED:
        flat = flat if flat.size <= _ROW else flat.astype(np.float64, copy=False)
        return float(flat.dot(flat))
    over = flat.size % _ROW
    rows = (flat[:-over] if over else flat).reshape(-1, _ROW)
    total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
    return total + float(flat[-over:].dot(flat[-over:])) if over else total


def squares_along(array: View, axes: tuple[int, ...]) -> View | None:
    """Return ``Σx²`` along axes; ``None`` if these are not contiguous first or last axes, or are narrow."""
    way = _way_along(array.shape, axes) if array.dtype.char in "fd" else None
    if way is None:
        return None
    shape, rows, columns, count, length = way
    in_rows, in_columns = array.transpose(rows), array.transpose(columns)
    if in_rows.flags.c_contiguous:
        flat = in_rows.reshape(count, -1)
        total = np.vecdot(flat, flat) if flat.shape[1] <= _ROW else _of_long_rows(flat, length)
    elif in_columns.flags.c_contiguous:
        flat = in_columns.reshape(-1, count)
        whole = len(flat) - len(flat) % _FEW_ROWS
        blocks = flat[:whole].reshape(-1, _FEW_ROWS, count)
        total = np.einsum("bij,bij->bj", blocks, blocks).sum(0, dtype=np.float64)
        total = total + np.einsum("ij,ij->j", flat[whole:], flat[whole:])
    else:
        return None
    return np.asarray(total, array.dtype).reshape(shape)


@lru_cache(maxsize=1024)
def _way_along(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int] | None:
    """Return the kept shape, the axis orders with it first and last, its size, and a length to add."""
    kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
    if not axes or not kept or 0 in shape:
        return None
    lengths = tuple([shape[axis] for axis in kept])
    count, covered = math.prod(lengths), math.prod([shape[axis] for axis in axes])
    length = next((n for n in range(_ROW, _ROW // 4, -1) if covered % n == 0), _ROW)  # a length without a remainder
    return lengths, (*kept, *axes), (*axes, *kept), count, length


def _of_long_rows(rows: View, length: int) -> View:
    whole = rows.shape[1] - rows.shape[1] % length
    parts, rest = rows[:, :whole].reshape(len(rows), -1, length), rows[:, whole:]
    total: View = np.vecdot(parts, parts).sum(axis=1, dtype=np.float64)
    return total + np.vecdot(rest, rest) if rest.size else total


def walk(arrays: list[View], access: str, dtypes: list[Any] | None = None) -> Any:
    """Iterate over arrays that broadcast together, in pieces; one that is not contiguous goes through a buffer."""
    # Memory that an operand shares with the array to change is copied first, unless entries coincide.
    operands = [
        [access, "overlap_assume_elementwise"],
        *[["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1),
    ]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(  # type: ignore[call-overload]
        arrays, flags, operands, dtypes, order="K", casting="same_kind", buffersize=PIECE
    )
