# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars; and sums on the memory of other frameworks' CPU arrays.

There calling the framework takes longer than adding. Sums are float64. Squares of float64 numbers
may underflow; a sum is 0 only if all of its entries are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from uniclip.backends.base import (
    FITS,
    HOST,
    NUMPY,
    PIECE,
    ArrayFacts,
    Axes,
    Backend,
    FastResult,
    LeafInfo,
    Storage,
    Terms,
    fast_numbers,
    fill_places,
    in_groups,
    power_sum,
    row_slices,
    stack_terms,
)

View: TypeAlias = np.ndarray[Any, Any]

WIDE = 4
"""The bytes of an entry that is precise enough to add and multiply in."""
_ROW = 512
"""How many squares BLAS adds in a row.

The rounding errors of equal entries have one sign, and the kernels for old processors keep few
partial sums: with any of them, 512 squares are off by at most 3e-7, 1,024 by 5e-7."""
_JOINED, _COPIED, _TINY = PIECE, 2**12, 2**6
"""The largest number of entries of arrays that are copied: for one sum, for many, or for each of
many. The memory of larger copies may be new at every step, and the system takes longer to provide
it than the copy takes."""
_PART, _EXACT = 2**13, 2**14
"""How many numbers BLAS adds in one thread, and up to how many are added in float64."""
_FEW = 64
_FEW_ROWS = 16
"""How many squares are added sequentially: the errors of so few are small, even with one sign."""
LOW, HIGH = FITS
_FLOAT32 = np.dtype(np.float32)
UNDERFLOWN = 1e-300
"""The sum of squares of float64 entries that are not 0 and whose squares are: out of range,
and not 0 if divided.
"""


def few(arrays: Sequence[Any], size: int) -> bool:
    """Whether calls take longer than arithmetic for these numbers of arrays and entries."""
    return len(arrays) <= _FEW and size <= PIECE


def small(sizes: list[int], lengths: list[int]) -> bool:
    """Whether copying arrays of these sizes into one is faster than processing each.

    None of a group is empty.
    """
    if len(lengths) == 1:
        return sum(sizes) <= _JOINED
    return sum(sizes) <= max(_COPIED, _TINY * len(sizes)) and all(sizes)


def squares(arrays: list[View], lengths: list[int]) -> View:
    """Return ``Σ|x|²`` over the arrays of each group."""
    sizes = [array.size for array in arrays]
    if (
        len(arrays) > 1
        and small(sizes, lengths)
        and {array.dtype.char for array in arrays} <= {"f", "d"}
    ):
        return squares_of_joined(np.concatenate(arrays, axis=None), sizes, lengths)
    # then narrower ones are added as accurately
    wide = any(array.dtype.char in "dD" for array in arrays)
    return np.array(
        sums_of([squares_of(array, wide) for array in arrays], lengths), _sum_dtype(arrays)
    )


def lane_on_host(
    leaves: list[Any],
    total: float,
    limit: float,
    scale: Callable[[float], list[Any] | None],
    device: Any = None,
) -> FastResult | None:
    """Return the result of a lane where the host reads the sum of squares; see `Backend.fast_path`.

    ``scale`` returns the leaves that are there times a factor, ``None`` if they cannot be written.
    """
    numbers = fast_numbers(math.sqrt(total), limit)
    if numbers is None:
        return None
    norm, limit, factor = numbers
    arrays = None if factor == 1 else scale(factor)
    if factor != 1 and arrays is None:
        return None
    return FastResult(
        norm, limit, factor, leaves if arrays is None else fill_places(leaves, arrays), device
    )


def _sum_dtype(arrays: list[View]) -> Any:
    return np.longdouble if any(array.dtype.char in "gG" for array in arrays) else np.float64


def sums_of(values: list[Any], lengths: list[int]) -> list[Any]:
    """Return the sum of the values of each group; no group is empty."""
    return (
        values
        if len(lengths) == len(values)
        else [sum(group) for group in in_groups(values, lengths)]
    )


def squares_of_joined(flat: View, sizes: list[int], lengths: list[int]) -> View:
    """Return ``Σx²`` of groups of arrays of few entries that were joined, whose sizes are given."""
    exact = flat.dtype.char == "f"
    if len(lengths) == 1:
        total = _sum_squares_float64(flat) if flat.size <= _EXACT else _sum_vector(flat)
        return np.array([total if total or exact else _or_underflown(flat)])
    wide = flat.astype(np.float64, copy=False)
    starts = list(accumulate(sums_of(sizes, lengths)[:-1], initial=0))
    totals: View = np.add.reduceat(wide * wide, starts)
    if not (exact or totals.all()):
        totals[(totals == 0) & (np.add.reduceat(wide != 0, starts) > 0)] = UNDERFLOWN
    return totals


def squares_of(array: View, wide: bool = False) -> float:
    """Return ``Σ|x|²`` over all entries of an array, exactly in float64 if ``wide``."""
    if array.dtype.kind == "c":
        return squares_of(array.real, wide) + squares_of(array.imag, wide)
    if (
        array.dtype.char in "fd"
        and (array.size <= PIECE or array.flags.forc)
        and not (wide and array.dtype.char == "f")
    ):
        return _sum_vector(array.ravel("K"))
    with walk(
        [array], "readonly", [np.result_type(array.dtype, np.float64 if wide else np.float32)]
    ) as pieces:
        return sum(_sum_vector(np.ascontiguousarray(piece)) for piece in pieces)


def _sum_vector(flat: View) -> float:
    if flat.size <= _COPIED:
        return _sum_wide(flat.astype(np.result_type(flat.dtype, np.float64), copy=False))
    over = flat.size % _ROW
    if flat.dtype.char not in "fd":
        return _sum_wide(flat)
    rows = (flat[:-over] if over else flat).reshape(-1, _ROW)
    with np.errstate(all="ignore"):
        total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
        total = total + float(flat[-over:].dot(flat[-over:])) if over else total
    if flat.dtype.char == "d":
        return total or _or_underflown(flat)
    if LOW < total < HIGH or (total == 0 and all_zero(flat)):
        return total
    return sum(_sum_wide(flat[rows].astype(np.float64)) for rows in row_slices(flat.shape))


def _sum_squares_float64(flat: View) -> float:
    """Return ``Σx²`` added in float64, in parts that BLAS does not divide among threads,
    which takes longer.
    """
    if flat.size <= _PART:
        wide = flat.astype(np.float64, copy=False)
        return float(wide.dot(wide))
    return sum(
        [_sum_squares_float64(flat[start : start + _PART]) for start in range(0, flat.size, _PART)]
    )


def _sum_wide(flat: View) -> float:
    total = flat.dot(flat)
    return total or (_or_underflown(flat) if flat.size else 0.0)


def _or_underflown(flat: View) -> float:
    return 0.0 if all_zero(flat) else UNDERFLOWN


def all_zero(array: View) -> bool:
    """Whether all entries are 0, by their bits but the sign's: where squares underflow,
    a sum of 0 does not tell.

    Reading bits takes as long as reading memory, and adding again in float64 several times as long.
    """
    if array.dtype.kind == "c" or array.itemsize > WIDE * 2:
        return not array.any()
    bits = array.view(f"{array.dtype.byteorder}u{array.itemsize}")
    return int(np.bitwise_or.reduce(bits, axis=None)) & ~(1 << (8 * array.itemsize - 1)) == 0


def squares_along(arrays: list[View], axes: list[Any]) -> list[View | None]:
    """Return ``Σx²`` of each array along its axes.

    ``None`` if these are not first or last axes of numbers in a row.
    """
    sums = [_along(*pair) if pair[1] else None for pair in zip(arrays, axes, strict=True)]
    totals = [total[0] for total in sums if total is not None]
    if totals:
        every = np.concatenate(totals, axis=None)
        if not (every.min() > LOW and every.max() < HIGH):
            sums = [
                total and _in_range(array, *total)
                for total, array in zip(sums, arrays, strict=True)
            ]
    return [total and np.asarray(total[0], np.float64).reshape(total[2]) for total in sums]


def _along(array: View, axes: tuple[int, ...]) -> tuple[View, View, tuple[int, ...]] | None:
    """Return ``Σx²`` in a row, the array with a row for each of them, and their shape."""
    way = _way_along(array.shape, axes) if array.dtype.char in "fd" else None
    if way is None:
        return None
    shape, rows, columns, count, length = way
    in_rows = array if rows is None else array.transpose(rows)
    if in_rows.flags.c_contiguous:
        flat = in_rows.reshape(count, -1)
        return (
            np.vecdot(flat, flat) if flat.shape[1] <= _ROW else _of_long_rows(flat, length),
            flat,
            shape,
        )
    in_columns = array.transpose(columns)
    if not in_columns.flags.c_contiguous:
        return None
    columned = in_columns.reshape(-1, count)
    whole = len(columned) - len(columned) % _FEW_ROWS
    blocks = columned[:whole].reshape(-1, _FEW_ROWS, count)
    total = np.einsum("bij,bij->bj", blocks, blocks).sum(0, dtype=np.float64)
    return total + np.einsum("ij,ij->j", columned[whole:], columned[whole:]), columned.T, shape


def _in_range(
    array: View, total: View, flat: View, shape: tuple[int, ...]
) -> tuple[View, View, tuple[int, ...]]:
    """Return the same, with sums that may not be accurate made again."""
    low = 0.0 if array.dtype.char == "d" else LOW
    fine = (total > low) & (total < HIGH)
    return (
        total if fine.all() else _recompute(array, flat, np.asarray(total, np.float64), fine),
        flat,
        shape,
    )


def _recompute(array: View, flat: View, total: View, fine: View) -> View:
    """Return sums of rows, those that may not be accurate made again in float64."""
    zero = total == 0
    # Nearly always: zeros, whose sums are right.
    if zero.any() and all_zero(array if zero.all() else flat[zero]):
        fine = fine | zero
    wrapped = np.flatnonzero(~fine)
    for start in range(0, len(wrapped), step := max(1, PIECE // flat.shape[1])):
        rows = wrapped[start : start + step]
        wide = flat[rows].astype(np.float64)
        squares = np.vecdot(wide, wide)
        squares[(squares == 0) & wide.any(axis=1)] = UNDERFLOWN
        total[rows] = squares
    return total


@lru_cache(maxsize=1024)
def _way_along(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...], int, int] | None:
    """Return the kept shape, the axis orders with it first (``None`` if it is) and last, its size,
    a length to add.
    """
    kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
    if not axes or not kept or 0 in shape:
        return None
    lengths = tuple([shape[axis] for axis in kept])
    count, covered = math.prod(lengths), math.prod([shape[axis] for axis in axes])
    # A length without a remainder.
    length = next((n for n in range(_ROW, _ROW // 4, -1) if covered % n == 0), _ROW)
    rows = (*kept, *axes)
    return (
        lengths,
        None if rows == tuple(range(len(shape))) else rows,
        (*axes, *kept),
        count,
        length,
    )


def _of_long_rows(rows: View, length: int) -> View:
    whole = rows.shape[1] - rows.shape[1] % length
    parts, tail = rows[:, :whole].reshape(len(rows), -1, length), rows[:, whole:]
    total: View = np.vecdot(parts, parts).sum(axis=1, dtype=np.float64)
    return total + np.vecdot(tail, tail) if tail.size else total


def walk(arrays: list[View], access: str, dtypes: list[Any] | None = None) -> Any:
    """Iterate over arrays that broadcast together, in pieces.

    One that is not contiguous goes through a buffer.
    """
    # Memory that an operand shares with the array to change is copied first, unless entries
    # coincide.
    operands = [
        [access, "overlap_assume_elementwise"],
        *[["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1),
    ]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(  # type: ignore[call-overload]
        arrays, flags, operands, dtypes, order="K", casting="same_kind", buffersize=PIECE
    )


_NOT_NUMPYS = 2
"""The value of ``dtype.isbuiltin`` for other packages' types, some of whose kinds are NumPy's."""


def _isdtype(dtype: Any, kind: str) -> bool:
    """Answer as NumPy does, and False for the dtypes of ml_dtypes, about which NumPy raises."""
    return (
        isinstance(dtype, np.dtype) and dtype.isbuiltin != _NOT_NUMPYS and np.isdtype(dtype, kind)
    )


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype}))


_FACTS = ArrayFacts._make((False, True, False, True))


class _NumPy(Backend[View]):
    writes = True

    def signature(self, leaves: list[Any]) -> Any:
        return tuple([
            leaf.dtype
            if type(leaf) is np.ndarray
            else None if leaf is None else (type(leaf), getattr(leaf, "dtype", None))
            for leaf in leaves
        ])  # fmt: skip

    def is_array(self, leaf: Any) -> bool:
        # A matrix product is not elementwise, and whether masked entries count is undefined.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, NUMPY):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        name = leaf.dtype.name if leaf.dtype.type.__module__ == "ml_dtypes" else ""
        floats = "float" in name and not name.endswith("e8m0fnu")
        return leaf.dtype.kind in "iufc" or floats

    def mode(self, leaf_info: LeafInfo, beside: Any = ()) -> int:
        return HOST

    def array_facts(self, arrays: list[View]) -> ArrayFacts:
        return _FACTS

    def readable(self, array: View) -> bool:
        return True

    def as_numpy(self, array: View) -> np.ndarray[Any, Any] | None:
        return np.asarray(array)

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> View:
        return array[()] if array.ndim == 0 else array

    def fast_path(self, leaves: list[Any], limit: float, *, in_place: bool) -> FastResult | None:
        arrays = [leaf for leaf in leaves if leaf is not None]
        if not all([type(array) is np.ndarray and array.dtype == _FLOAT32 for array in arrays]):
            return None

        def scale(factor: float) -> list[View] | None:
            if not in_place:
                return [array * factor for array in arrays]
            return (
                [np.multiply(array, factor, out=array) for array in arrays]
                if _are_apart(arrays)
                else None
            )

        with np.errstate(all="ignore"):
            return lane_on_host(leaves, float(squares(arrays, [len(arrays)])[0]), limit, scale)

    def sums(self, mode: int, terms: Terms) -> list[View]:
        if terms.whole:
            return terms.in_blocks(squares(terms.arrays, terms.counts))
        return stack_terms(self, sums_of_arrays(terms), terms)

    def multiply(
        self, arrays: list[View], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[View]:
        plain = all([type(factor) is float and factor for factor in factors])
        if plain and not in_place and all([array.itemsize >= WIDE for array in arrays]):
            with np.errstate(all="ignore"):
                new = list(map(mul, arrays, factors))  # a Python number keeps the dtype
            return [
                a if a.dtype == b.dtype else a.astype(b.dtype)
                for a, b in zip(new, arrays, strict=True)
            ]
        with np.errstate(all="ignore"):
            return [
                self._scale_one(*pair, in_place=in_place, zero=zero)
                for pair in zip(arrays, factors, strict=True)
            ]

    def _scale_one(self, array: View, factor: Any, *, in_place: bool, zero: bool) -> View:
        exact = zero and bool(np.any(factor == 0))
        if (
            array.itemsize < WIDE
            or exact
            or (array.dtype.kind == "c" and isinstance(factor, np.ndarray))
        ):
            new = array if in_place else np.array(array, order="K")
            super().multiply([new], [factor], in_place=True, zero=exact)
            return new if isinstance(array, np.ndarray) else new[()]
        if in_place:
            return np.multiply(array, factor, out=array, casting="same_kind")
        new = array * factor  # a Python number keeps the dtype
        return new if new.dtype == array.dtype else new.astype(array.dtype)

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        # Scalars are read-only, too.
        return (
            None
            if _are_apart(leaves)
            else [(x, None if x.flags.writeable else "it is read-only") for x in leaves]
        )

    def write(self, array: View, function: Callable[..., View], *operands: View) -> None:
        with walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)

    def unstack(self, array: View) -> list[View]:
        return list(array)

    def pieces(self, array: View, axes: Axes = None) -> Iterable[View] | None:
        if axes is not None:
            return super().pieces(array, axes)
        return walk([array], "readonly") if array.size > PIECE else None


def sums_of_arrays(terms: Terms) -> list[View]:
    """Return ``Σ|x/unit|ᵖ`` of each array."""
    arrays, units = list(map(np.asarray, terms.arrays)), terms.units
    if units is not None or terms.p != 2:
        return [power_sum(BACKEND, *term) for term in terms.each()]
    # then narrower ones are added as accurately
    wide = any(array.dtype.char in "dD" for array in arrays)
    exact = [wide and array.dtype.char == "f" for array in arrays]
    axes = terms.axes or [None] * len(arrays)
    quick = squares_along(
        arrays, [None if slow else along for slow, along in zip(exact, axes, strict=True)]
    )
    every = zip(quick, arrays, axes, strict=True)
    return [
        _squares_of(array, along, wide=wide) if total is None else total
        for total, array, along in every
    ]


def _squares_of(array: View, axes: Axes, *, wide: bool) -> Any:
    """Return ``Σ|x|²`` of an array along axes."""
    if axes is None:
        return np.asarray(squares_of(array, wide))
    total = power_sum(BACKEND, array, 2, axes)
    if array.dtype.char in "dD" and not total.all():
        return np.where(
            (total == 0) & (power_sum(BACKEND, array, np.inf, axes) > 0), UNDERFLOWN, total
        )
    return total


def _are_apart(arrays: list[Any]) -> bool:
    """Whether a quick check shows that arrays are writable, without gaps, and do not overlap."""
    if not all([type(a) is np.ndarray and a.flags.writeable and a.flags.forc for a in arrays]):
        return False
    if all([a.base is None and a.flags.owndata for a in arrays]):  # no other array has their memory
        return len(set(map(id, arrays))) == len(arrays)
    spans = sorted([(a.__array_interface__["data"][0], a.nbytes) for a in arrays])
    return all([start + size <= after for (start, size), (after, _) in pairwise(spans)])


BACKEND = _NumPy(namespace)
