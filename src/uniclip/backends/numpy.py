# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars; and sums on the memory of other frameworks' CPU arrays.

It serves other frameworks where calling them takes longer than adding. Sums are float64. Squares of
float64 numbers may underflow; a sum is 0 only if all of its elements are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from uniclip._types import Device, DType, Tree
from uniclip.backends.base import (
    FITS,
    HOST,
    NUMPY,
    PIECE,
    A,
    ArrayFacts,
    Axes,
    Backend,
    FastResult,
    LeafInfo,
    Storage,
    Terms,
    View,
    fast_numbers,
    fill_places,
    in_groups,
    power_sum,
    row_slices,
    stack_terms,
    take,
)

WIDE = 4
"""Minimum item size, in bytes, of a dtype we add and multiply in."""
_ROW = 512
"""How many squares BLAS adds in a row.

The rounding errors of equal elements have one sign, and the kernels for old processors keep few
partial sums: with any of them, 512 squares are off by at most 3e-7, 1,024 by 5e-7."""
_CONCATENATED = PIECE
"""The largest total size of arrays that are concatenated for one sum.

The memory of larger copies may be new at every step, and the system takes longer to provide it than
the copy takes."""
_COPIED = 2**12
"""The largest total size of arrays that are concatenated for many sums."""
_TINY = 2**6
"""The mean size up to which arrays are concatenated for many sums, however many they are."""
_PART = 2**13
"""How many numbers BLAS adds in one thread."""
_EXACT = 2**14
"""The largest number of elements that are added in float64."""
_FEW_ARRAYS = 64
"""The number of arrays up to which call overhead may dominate."""
_FEW_ROWS = 16
"""How many squares are added sequentially: the errors of so few are small, even with one sign."""
LOW, HIGH = FITS
_FLOAT32 = np.dtype(np.float32)
UNDERFLOWN = 1e-300
"""The sum of squares of float64 elements that are not 0 and whose squares are: out of range,
and not 0 if divided.
"""


def call_bound(arrays: Sequence[Any], size: int) -> bool:
    """Return whether call overhead dominates for this many arrays and elements."""
    return len(arrays) <= _FEW_ARRAYS and size <= PIECE


def worth_concatenating(sizes: list[int], lengths: list[int]) -> bool:
    """Return whether copying arrays of these sizes into one is faster than processing each.

    For several groups, none of the arrays is empty then.
    """
    size = sum(sizes)
    if len(lengths) == 1:
        return size <= _CONCATENATED
    return size <= max(_COPIED, _TINY * len(sizes)) and all(sizes)


def sum_of_squares(arrays: list[View], lengths: list[int]) -> View:
    """Return ``Σ|x|²`` over the arrays of each group."""
    sizes = [array.size for array in arrays]
    if (
        len(arrays) > 1
        and worth_concatenating(sizes, lengths)
        and {array.dtype.char for array in arrays} <= {"f", "d"}
    ):
        return concatenated_squares(np.concatenate(arrays, axis=None), sizes, lengths)

    # Narrower arrays are added as accurately as the widest.
    wide = any(array.dtype.char in "dD" for array in arrays)
    sums = [array_squares(array, wide) for array in arrays]
    return np.array(add_groups(sums, lengths), _sum_dtype(arrays))


def fast_path_on_host(
    leaves: list[A | None],
    numbers: tuple[float, float, float] | None,
    scale: Callable[[float], list[A] | None],
    device: Device = None,
) -> FastResult | None:
    """Return the result of `Backend.fast_path` where the host has the `fast_numbers` of a step.

    ``scale`` returns the leaves that are there times a factor, ``None`` if they cannot be written.
    """
    if numbers is None:
        return None
    norm, limit, factor = numbers
    if factor == 1:
        return FastResult(norm, limit, factor, leaves, device)

    arrays = scale(factor)
    if arrays is None:
        return None
    return FastResult(norm, limit, factor, fill_places(leaves, arrays), device)


def _sum_dtype(arrays: list[View]) -> type[np.floating[Any]]:
    """Return the dtype in which sums of these arrays are combined."""
    if any(array.dtype.char in "gG" for array in arrays):
        return np.longdouble
    return np.float64


def add_groups(values: list[Any], lengths: list[int]) -> list[Any]:
    """Return the sum of the values of each group; no group is empty."""
    if len(lengths) == len(values):
        return values
    return list(map(sum, in_groups(values, lengths)))


def concatenated_squares(flat: View, sizes: list[int], lengths: list[int]) -> View:
    """Return ``Σx²`` of groups of small arrays that were concatenated, given their sizes."""
    never_underflows = flat.dtype.char == "f"
    if len(lengths) == 1:
        add_squares = _sum_squares_float64 if flat.size <= _EXACT else _vector_squares
        total = add_squares(flat)
        # Squares of float32 numbers fit into float64, so their sum is 0 only for zeros.
        if not (total or never_underflows):
            total = _zero_or_underflown(flat)
        return np.array([total])

    # One call adds all groups.
    wide = flat.astype(np.float64, copy=False)
    starts = list(accumulate(add_groups(sizes, lengths)[:-1], initial=0))
    totals: View = np.add.reduceat(wide * wide, starts)
    if not never_underflows and not totals.all():
        nonzero = np.add.reduceat(wide != 0, starts) > 0
        totals[(totals == 0) & nonzero] = UNDERFLOWN
    return totals


def array_squares(array: View, wide: bool = False) -> float:
    """Return ``Σ|x|²`` over all elements of an array, exactly in float64 if ``wide``."""
    if array.dtype.kind == "c":
        return array_squares(array.real, wide) + array_squares(array.imag, wide)

    # BLAS adds float32 and float64 vectors, in rows that keep the errors of float32 small.
    has_blas = array.dtype.char in "fd" and not (wide and array.dtype.char == "f")
    if has_blas and (array.size <= PIECE or array.flags.forc):
        return _vector_squares(array.ravel("K"))

    least = np.float64 if wide else np.float32
    dtype = np.result_type(array.dtype, least)
    with walk([array], "readonly", [dtype]) as pieces:
        return sum(_vector_squares(np.ascontiguousarray(piece)) for piece in pieces)


def _vector_squares(flat: View) -> float:
    """Return ``Σx²`` of a vector, added in rows that are short enough for float32."""
    if flat.size <= _COPIED:
        dtype = np.result_type(flat.dtype, np.float64)
        return _dot_squares(flat.astype(dtype, copy=False))
    if flat.dtype.char not in "fd":
        return _dot_squares(flat)

    rest = flat.size % _ROW
    whole = flat[: flat.size - rest]
    rows = whole.reshape(-1, _ROW)
    with np.errstate(all="ignore"):
        total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
        if rest:
            total += float(flat[-rest:].dot(flat[-rest:]))

    if flat.dtype.char == "d":
        return total or _zero_or_underflown(flat)
    if LOW < total < HIGH or (total == 0 and all_zero(flat)):
        return total
    return sum(_dot_squares(flat[rows].astype(np.float64)) for rows in row_slices(flat.shape))


def _sum_squares_float64(flat: View) -> float:
    """Return ``Σx²`` added in float64, in parts that BLAS does not divide among threads.

    For so few numbers, starting threads takes longer than adding.
    """
    if flat.size <= _PART:
        wide = flat.astype(np.float64, copy=False)
        return float(wide.dot(wide))
    starts = range(0, flat.size, _PART)
    return sum([_sum_squares_float64(flat[start : start + _PART]) for start in starts])


def _dot_squares(flat: View) -> float:
    """Return ``Σx²`` of a vector in its own precision."""
    total: float = flat.dot(flat)
    if total or not flat.size:
        return total
    return _zero_or_underflown(flat)


def _zero_or_underflown(flat: View) -> float:
    """Return the sum of squares that are all 0."""
    return 0.0 if all_zero(flat) else UNDERFLOWN


def all_zero(array: View) -> bool:
    """Return whether all elements are 0, by their bits but the sign's: where squares underflow,
    a sum of 0 does not tell.

    Reading bits takes as long as reading memory, and adding again in float64 several times as long.
    """
    if array.dtype.kind == "c" or array.itemsize > WIDE * 2:
        return not array.any()

    # The highest bit is the sign, which -0.0 has.
    bits = array.view(f"{array.dtype.byteorder}u{array.itemsize}")
    magnitude = ~(1 << (8 * array.itemsize - 1))
    return int(np.bitwise_or.reduce(bits, axis=None)) & magnitude == 0


_RowSums: TypeAlias = tuple[View, View, tuple[int, ...]]
"""Sums of squares in a vector, the array with a row for each of them, and the shape of the sums."""


def squares_along(arrays: list[View], axes: Sequence[Axes]) -> list[View | None]:
    """Return ``Σx²`` of each array along its axes.

    ``None`` if these are not the first or the last axes of a contiguous array.
    """
    pairs = zip(arrays, axes, strict=True)
    row_sums = [_sum_along(array, along) if along else None for array, along in pairs]

    # One test for all: sums are nearly always in range.
    totals = [sums[0] for sums in row_sums if sums is not None]
    if totals:
        joined = np.concatenate(totals, axis=None)
        if not (joined.min() > LOW and joined.max() < HIGH):
            for number, sums in enumerate(row_sums):
                if sums is not None:
                    row_sums[number] = _recompute_out_of_range(arrays[number], *sums)

    return [sums and np.asarray(sums[0], np.float64).reshape(sums[2]) for sums in row_sums]


def _sum_along(array: View, axes: tuple[int, ...]) -> _RowSums | None:
    """Return ``Σx²`` along axes by BLAS or einsum, ``None`` for other dtypes and layouts."""
    if array.dtype.char not in "fd":
        return None
    layout = _layout_along(array.shape, axes)
    if layout is None:
        return None

    in_rows = array if layout.rows is None else array.transpose(layout.rows)
    if in_rows.flags.c_contiguous:
        rows = in_rows.reshape(layout.size, -1)
        if rows.shape[1] > _ROW:
            return _sum_long_rows(rows, layout.length), rows, layout.kept
        return np.vecdot(rows, rows), rows, layout.kept

    # A transpose of a contiguous array is added by columns, without a copy.
    in_columns = array.transpose(layout.columns)
    if not in_columns.flags.c_contiguous:
        return None
    columns = in_columns.reshape(-1, layout.size)
    return _sum_columns(columns), columns.T, layout.kept


def _sum_long_rows(rows: View, length: int) -> View:
    """Return ``Σx²`` of each row, added in stretches of a length."""
    # The partial sums are added in float64.
    whole = rows.shape[1] - rows.shape[1] % length
    parts = rows[:, :whole].reshape(len(rows), -1, length)
    total: View = np.vecdot(parts, parts).sum(axis=1, dtype=np.float64)
    tail = rows[:, whole:]
    if tail.size:
        total = total + np.vecdot(tail, tail)
    return total


def _sum_columns(columns: View) -> View:
    """Return ``Σx²`` of each column, few rows at a time."""
    whole = len(columns) - len(columns) % _FEW_ROWS
    blocks = columns[:whole].reshape(-1, _FEW_ROWS, columns.shape[1])
    total = np.einsum("bij,bij->bj", blocks, blocks).sum(0, dtype=np.float64)
    tail = columns[whole:]
    return total + np.einsum("ij,ij->j", tail, tail)


def _recompute_out_of_range(
    array: View, total: View, rows: View, shape: tuple[int, ...]
) -> _RowSums:
    """Return the same sums, those recomputed that may not be accurate."""
    low = 0.0 if array.dtype.char == "d" else LOW
    in_range = (total > low) & (total < HIGH)
    if not in_range.all():
        total = _recompute(array, rows, np.asarray(total, np.float64), in_range)
    return total, rows, shape


def _recompute(array: View, rows: View, total: View, in_range: View) -> View:
    """Return sums of rows, those out of range recomputed in float64."""
    # Sums out of range are nearly always those of zeros, and right. A whole array needs no copy.
    zero = total == 0
    if zero.any():
        suspects = array if zero.all() else rows[zero]
        if all_zero(suspects):
            in_range = in_range | zero

    remaining = np.flatnonzero(~in_range)
    step = max(1, PIECE // rows.shape[1])
    for start in range(0, len(remaining), step):
        # Pieces, since the float64 copy of all rows may be large.
        numbers = remaining[start : start + step]
        wide = rows[numbers].astype(np.float64)
        squares = np.vecdot(wide, wide)
        squares[(squares == 0) & wide.any(axis=1)] = UNDERFLOWN
        total[numbers] = squares
    return total


class _Layout(NamedTuple):
    """How an array of one shape is added along axes."""

    kept: tuple[int, ...]
    """The shape of the sums."""
    rows: tuple[int, ...] | None
    """The order of the axes with the kept ones first, ``None`` if they are."""
    columns: tuple[int, ...]
    """The order of the axes with the kept ones last."""
    size: int
    """The number of sums."""
    length: int
    """How many squares are added in a row."""


@lru_cache(maxsize=1024)
def _layout_along(shape: tuple[int, ...], axes: tuple[int, ...]) -> _Layout | None:
    """Return how to add along axes, ``None`` if there is nothing to add or to keep."""
    kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
    if not axes or not kept or 0 in shape:
        return None

    lengths = tuple(take(shape, kept))
    covered = math.prod(take(shape, axes))
    # A length without a remainder saves a second sum.
    divisors = (n for n in range(_ROW, _ROW // 4, -1) if covered % n == 0)
    rows = (*kept, *axes)
    in_order = rows == tuple(range(len(shape)))
    return _Layout(
        kept=lengths,
        rows=None if in_order else rows,
        columns=(*axes, *kept),
        size=math.prod(lengths),
        length=next(divisors, _ROW),
    )


def walk(arrays: list[View], access: str, dtypes: list[Any] | None = None) -> Any:
    """Iterate over arrays that broadcast together, in pieces.

    One that is not contiguous goes through a buffer.
    """
    # Memory that an operand shares with the array to change is copied first, unless elements
    # coincide.
    reads = [["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1)
    operands = [[access, "overlap_assume_elementwise"], *reads]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(  # type: ignore[call-overload]
        arrays, flags, operands, dtypes, order="K", casting="same_kind", buffersize=PIECE
    )


_USER_DEFINED = 2
"""The value of ``dtype.isbuiltin`` for other packages' types, some of whose kinds are NumPy's."""


def _isdtype(dtype: DType, kind: str) -> bool:
    """Return what NumPy does, and False for the dtypes of ml_dtypes, for which NumPy raises."""
    if not isinstance(dtype, np.dtype) or dtype.isbuiltin == _USER_DEFINED:
        return False
    return np.isdtype(dtype, kind)


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype}))


_FACTS = ArrayFacts(traced=False, reads=True, records=False, double=True)


class _NumPy(Backend[View]):
    writes = True

    def signature(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        formats: list[Any] = [None] * len(leaves)
        for number, leaf in enumerate(leaves):
            # The dtype alone stands for the usual class.
            if type(leaf) is np.ndarray:
                formats[number] = leaf.dtype
            elif leaf is not None:
                formats[number] = type(leaf), getattr(leaf, "dtype", None)
        return tuple(formats)

    def is_array(self, leaf: Any) -> bool:
        # A matrix product is not elementwise, and whether masked elements count is undefined.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, NUMPY):
            return False
        if leaf.dtype.kind in "iufc":
            return True
        # A format of exponents alone has neither zero nor negative numbers.
        name = leaf.dtype.name
        is_extension = leaf.dtype.type.__module__ == "ml_dtypes"
        return is_extension and "float" in name and not name.endswith("e8m0fnu")

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        return HOST

    def array_facts(self, arrays: list[View]) -> ArrayFacts:
        return _FACTS

    def readable(self, array: View) -> bool:
        return True

    def as_numpy(self, array: View) -> View | None:
        return np.asarray(array)

    def from_host(self, array: View, device: Device) -> View:
        return array[()] if array.ndim == 0 else array

    def fast_path(
        self, leaves: list[View | None], limit: float, *, in_place: bool
    ) -> FastResult | None:
        arrays = [leaf for leaf in leaves if leaf is not None]
        if not all([type(array) is np.ndarray and array.dtype == _FLOAT32 for array in arrays]):
            return None

        def scale(factor: float) -> list[View] | None:
            if not in_place:
                return [array * factor for array in arrays]
            if not _are_separate(arrays):
                return None
            return [np.multiply(array, factor, out=array) for array in arrays]

        with np.errstate(all="ignore"):
            [total] = sum_of_squares(arrays, [len(arrays)])
            return fast_path_on_host(leaves, fast_numbers(math.sqrt(total), limit), scale)

    def sums(self, mode: int, terms: Terms) -> list[View]:
        if terms.whole:
            return terms.in_blocks(sum_of_squares(terms.arrays, terms.counts))
        return stack_terms(self, sums_of_arrays(terms), terms)

    def multiply(
        self, arrays: list[View], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[View]:
        nonzero = all([type(factor) is float and factor for factor in factors])
        if nonzero and not in_place and all([array.itemsize >= WIDE for array in arrays]):
            # A Python number keeps the dtype, but of scalars.
            with np.errstate(all="ignore"):
                products = list(map(mul, arrays, factors))
            return [
                new if new.dtype == array.dtype else new.astype(array.dtype)
                for new, array in zip(products, arrays, strict=True)
            ]

        with np.errstate(all="ignore"):
            return [
                self._scale_one(array, factor, in_place=in_place, zero=zero)
                for array, factor in zip(arrays, factors, strict=True)
            ]

    def _scale_one(self, array: View, factor: Any, *, in_place: bool, zero: bool) -> View:
        """Multiply one array, in pieces if it has to be converted."""
        makes_zeros = zero and bool(np.any(factor == 0))
        is_complex_by_array = array.dtype.kind == "c" and isinstance(factor, np.ndarray)
        if array.itemsize < WIDE or makes_zeros or is_complex_by_array:
            new = array if in_place else np.array(array, order="K")
            super().multiply([new], [factor], in_place=True, zero=makes_zeros)
            return new if isinstance(array, np.ndarray) else new[()]

        if in_place:
            return np.multiply(array, factor, out=array, casting="same_kind")
        # A Python number keeps the dtype, but of scalars.
        new = array * factor
        if new.dtype == array.dtype:
            return new
        return new.astype(array.dtype)

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        if _are_separate(leaves):
            return None
        # Scalars are read-only, too.
        return [(leaf, None if leaf.flags.writeable else "it is read-only") for leaf in leaves]

    def write(self, array: View, function: Callable[..., View], *operands: View) -> None:
        with walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)

    def unstack(self, array: View) -> list[View]:
        return list(array)

    def pieces(self, array: View, axes: Axes = None) -> Iterable[View] | None:
        if axes is not None:
            return super().pieces(array, axes)
        if array.size <= PIECE:
            return None
        return walk([array], "readonly")


def sums_of_arrays(terms: Terms) -> list[View]:
    """Return ``Σ|x/unit|ᵖ`` of each array."""
    if terms.units is not None or terms.p != 2:
        return [power_sum(BACKEND, *term) for term in terms.by_array()]

    # Narrower arrays are added as accurately as the widest.
    arrays = list(map(np.asarray, terms.arrays))
    wide = any(array.dtype.char in "dD" for array in arrays)
    axes = terms.axes or [None] * len(arrays)
    quick_axes = axes
    if wide:
        pairs = zip(arrays, axes, strict=True)
        quick_axes = [None if array.dtype.char == "f" else along for array, along in pairs]

    sums = squares_along(arrays, quick_axes)
    return [
        _squares_along_axes(array, along, wide=wide) if total is None else total
        for total, array, along in zip(sums, arrays, axes, strict=True)
    ]


def _squares_along_axes(array: View, axes: Axes, *, wide: bool) -> View:
    """Return ``Σ|x|²`` of an array along axes, in any memory layout."""
    if axes is None:
        return np.asarray(array_squares(array, wide))
    total = power_sum(BACKEND, array, 2, axes)
    if array.dtype.char not in "dD" or total.all():
        return total

    # Squares of float64 numbers may underflow, their moduli do not.
    nonzero = power_sum(BACKEND, array, np.inf, axes) > 0
    return np.where((total == 0) & nonzero, UNDERFLOWN, total)


def _are_separate(arrays: list[Any]) -> bool:
    """Return whether a quick check shows that arrays are writable, without gaps, and do not
    overlap.
    """
    if not all([type(a) is np.ndarray and a.flags.writeable and a.flags.forc for a in arrays]):
        return False
    # No other array has the memory of one that owns it.
    if all([array.base is None and array.flags.owndata for array in arrays]):
        return len(set(map(id, arrays))) == len(arrays)

    spans = sorted([(array.__array_interface__["data"][0], array.nbytes) for array in arrays])
    return all([start + size <= after for (start, size), (after, _) in pairwise(spans)])


BACKEND = _NumPy(namespace)
