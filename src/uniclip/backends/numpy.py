# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars, and sums of squares on the memory of other frameworks' CPU arrays.

Other backends use these sums for small arrays, where a call of their framework takes longer than
the addition. Sums are float64. Squares of float64 numbers may underflow, but a sum is 0 only if all
of its elements are.
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

from uniclip._types import Axes, Device, DType, Tree, View
from uniclip.backends.arithmetic import PIECE, in_groups, power_sum, row_slices
from uniclip.backends.base import (
    FITS,
    HOST,
    NUMPY,
    ArrayFacts,
    Backend,
    LeafInfo,
    OneNorm,
    Storage,
    Terms,
    rounded_norm,
    stack_terms,
    take,
)

WIDE = 4
"""Minimum item size, in bytes, of a dtype we add and multiply in."""
_ROW = 512
"""How many squares BLAS adds in one call in float32.

BLAS keeps few partial sums on old processors, and the rounding errors of equal elements have the
same sign. The relative error of 512 squares is at most 3e-7 on any processor, of 1,024 5e-7."""
_CONCATENATED = PIECE
"""The largest total size of arrays that are concatenated for one sum.

The system may map new memory for larger copies at every step, which takes longer than the copy."""
_COPIED = 2**12
"""The largest total size of arrays that are concatenated for several sums, and of a vector that is
converted to float64.
"""
_TINY = 2**6
"""The mean size up to which any number of arrays is concatenated for several sums."""
_PART = 2**13
"""The largest number of elements that BLAS adds in a single thread."""
_EXACT = 2**14
"""The largest size of a concatenated vector that is added in float64."""
_FEW_ARRAYS = 64
"""The largest number of arrays for which call overhead may dominate."""
_FEW_ROWS = 16
"""How many squares are added sequentially in float32, so few that rounding errors stay small."""
LOW, HIGH = FITS
FULL = (np.dtype(np.float32), np.dtype(np.float64))
"""The dtypes in which norms are reported, in the byte order of this machine."""
UNDERFLOWN = 1e-300
"""Stands for a sum of squares that is 0 by underflow: the range check of a step rejects it, and
dividing it by a number of replicas does not make it 0.
"""


def call_bound(arrays: Sequence[Any], size: int) -> bool:
    """Return whether call overhead dominates for this many arrays and elements."""
    return len(arrays) <= _FEW_ARRAYS and size <= PIECE


def worth_concatenating(sizes: list[int], lengths: list[int]) -> bool:
    """Return whether to copy arrays of these sizes into one is faster than to sum each.

    Never for several groups with an empty array, for which ``reduceat`` is wrong.
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

    # A norm with a float64 array is float64, so its float32 arrays have to be as accurate.
    wide = any(array.dtype.char in "dD" for array in arrays)
    sums = [array_squares(array, wide) for array in arrays]
    return np.array(add_groups(sums, lengths), _sum_dtype(arrays))


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
        # A float64 sum of float32 squares cannot underflow, so 0 means that all are 0.
        if not (total or never_underflows):
            total = _zero_or_underflown(flat)
        return np.array([total])

    # `reduceat` sums all groups in one call.
    wide = flat.astype(np.float64, copy=False)
    starts = list(accumulate(add_groups(sizes, lengths)[:-1], initial=0))
    totals: View = np.add.reduceat(wide * wide, starts)
    # A caller takes 0 for exact, so a sum that underflowed must not be 0.
    if not never_underflows and not totals.all():
        nonzero = np.add.reduceat(wide != 0, starts) > 0
        totals[(totals == 0) & nonzero] = UNDERFLOWN
    return totals


def array_squares(array: View, wide: bool = False) -> float:
    """Return ``Σ|x|²`` of an array, with each square in float64 if ``wide``."""
    if array.dtype.kind == "c":
        return array_squares(array.real, wide) + array_squares(array.imag, wide)

    # BLAS has float32 and float64 only.
    has_blas = array.dtype.char in "fd" and not (wide and array.dtype.char == "f")
    if has_blas and (array.size <= PIECE or array.flags.forc):
        return _vector_squares(array.ravel("K"))

    # Other dtypes and layouts are converted in pieces, since a copy of a large array is slow.
    least = np.float64 if wide else np.float32
    dtype = np.result_type(array.dtype, least)
    with walk([array], "readonly", [dtype]) as pieces:
        return sum(_vector_squares(np.ascontiguousarray(piece)) for piece in pieces)


def _vector_squares(flat: View) -> float:
    """Return ``Σx²`` of a vector: short sums in its own precision, which are added in float64."""
    # A short vector is cheap to copy, and float32 squares stay in the range of float64.
    if flat.size <= _COPIED:
        dtype = np.result_type(flat.dtype, np.float64)
        return _dot_squares(flat.astype(dtype, copy=False))
    if flat.dtype.char not in "fd":
        return _dot_squares(flat)

    # One float32 sum of millions of squares would lose digits, and `np.sum` of squares would make a
    # copy. BLAS does neither in short rows.
    rest = flat.size % _ROW
    whole = flat[: flat.size - rest]
    rows = whole.reshape(-1, _ROW)
    with np.errstate(all="ignore"):
        total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
        if rest:
            total += float(flat[-rest:].dot(flat[-rest:]))

    if flat.dtype.char == "d":
        return total or _zero_or_underflown(flat)
    # Out of this range float32 squares overflow or lose digits, so they are added again.
    if LOW < total < HIGH or (total == 0 and all_zero(flat)):
        return total
    return sum(_dot_squares(flat[rows].astype(np.float64)) for rows in row_slices(flat.shape))


def _sum_squares_float64(flat: View) -> float:
    """Return ``Σx²`` added in float64, in parts too short for BLAS to start threads.

    To start threads takes longer than to add so few numbers.
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
    """Return the sum of squares that are all 0: 0, or `UNDERFLOWN` if the elements are not."""
    return 0.0 if all_zero(flat) else UNDERFLOWN


def all_zero(array: View) -> bool:
    """Return whether all elements are 0, by all of their bits except the sign.

    If squares underflow, their sum is 0, too. To read the bits takes as long as to read the memory;
    to sum again in float64 takes several times as long.
    """
    if array.dtype.kind == "c" or array.itemsize > WIDE * 2:
        return not array.any()

    # The highest bit is the sign, and set in -0.0.
    bits = array.view(f"{array.dtype.byteorder}u{array.itemsize}")
    magnitude = ~(1 << (8 * array.itemsize - 1))
    return int(np.bitwise_or.reduce(bits, axis=None)) & magnitude == 0


_RowSums: TypeAlias = tuple[View, View, tuple[int, ...]]
"""A vector of sums of squares, the array whose rows were summed, and the shape of the sums."""


def squares_along(arrays: list[View], axes: Sequence[Axes]) -> list[View | None]:
    """Return ``Σx²`` of each array along its axes.

    ``None`` for an array whose layout or dtype has no fast method.
    """
    pairs = zip(arrays, axes, strict=True)
    row_sums = [_sum_along(array, along) if along else None for array, along in pairs]

    # Check all arrays at once, since sums are nearly always in range.
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

    # If the summed axes come first in memory, sum columns: to make rows would take a copy.
    in_columns = array.transpose(layout.columns)
    if not in_columns.flags.c_contiguous:
        return None
    columns = in_columns.reshape(-1, layout.size)
    return _sum_columns(columns), columns.T, layout.kept


def _sum_long_rows(rows: View, length: int) -> View:
    """Return ``Σx²`` of each row: sums of ``length`` squares in float32, added in float64."""
    whole = rows.shape[1] - rows.shape[1] % length
    parts = rows[:, :whole].reshape(len(rows), -1, length)
    total: View = np.vecdot(parts, parts).sum(axis=1, dtype=np.float64)
    tail = rows[:, whole:]
    if tail.size:
        total = total + np.vecdot(tail, tail)
    return total


def _sum_columns(columns: View) -> View:
    """Return ``Σx²`` of each column: sums of a few rows in float32, added in float64."""
    whole = len(columns) - len(columns) % _FEW_ROWS
    blocks = columns[:whole].reshape(-1, _FEW_ROWS, columns.shape[1])
    total = np.einsum("bij,bij->bj", blocks, blocks).sum(0, dtype=np.float64)
    tail = columns[whole:]
    return total + np.einsum("ij,ij->j", tail, tail)


def _recompute_out_of_range(
    array: View, total: View, rows: View, shape: tuple[int, ...]
) -> _RowSums:
    """Return the same sums, with those recomputed that may be inaccurate."""
    low = 0.0 if array.dtype.char == "d" else LOW
    in_range = (total > low) & (total < HIGH)
    if not in_range.all():
        total = _recompute(array, rows, np.asarray(total, np.float64), in_range)
    return total, rows, shape


def _recompute(array: View, rows: View, total: View, in_range: View) -> View:
    """Return sums of rows, with those out of range recomputed in float64."""
    # Sums out of range are nearly always sums of zeros, which are exact. If all are 0, check the
    # whole array, without a copy of rows.
    zero = total == 0
    if zero.any():
        suspects = array if zero.all() else rows[zero]
        if all_zero(suspects):
            in_range = in_range | zero

    remaining = np.flatnonzero(~in_range)
    step = max(1, PIECE // rows.shape[1])
    for start in range(0, len(remaining), step):
        # In pieces, since a float64 copy of all rows may be large.
        numbers = remaining[start : start + step]
        wide = rows[numbers].astype(np.float64)
        squares = np.vecdot(wide, wide)
        squares[(squares == 0) & wide.any(axis=1)] = UNDERFLOWN
        total[numbers] = squares
    return total


class _Layout(NamedTuple):
    """How to sum an array of one shape along axes."""

    kept: tuple[int, ...]
    """The shape of the sums."""
    rows: tuple[int, ...] | None
    """The permutation that puts kept axes first, ``None`` if they already are."""
    columns: tuple[int, ...]
    """The permutation that puts kept axes last."""
    size: int
    """The number of sums."""
    length: int
    """How many squares are added in one call."""


@lru_cache(maxsize=1024)
def _layout_along(shape: tuple[int, ...], axes: tuple[int, ...]) -> _Layout | None:
    """Return how to sum along axes, ``None`` if no axis is summed, or none is kept."""
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
    """Iterate over arrays that broadcast together, in pieces that fit into a cache.

    Arrays that are not contiguous are buffered.
    """
    # `copy_if_overlap` copies operands that share memory with the array to write, but not equal
    # views, which elementwise writes do not disturb.
    reads = [["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1)
    operands = [[access, "overlap_assume_elementwise"], *reads]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(  # type: ignore[call-overload]
        arrays, flags, operands, dtypes, order="K", casting="same_kind", buffersize=PIECE
    )


_USER_DEFINED = 2
"""The value of ``dtype.isbuiltin`` for dtypes of other packages, whose ``kind`` may be NumPy's."""


def _isdtype(dtype: DType, kind: str) -> bool:
    """Return the result of NumPy's function, but False for dtypes of ml_dtypes, where it raises."""
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
            # The dtype alone is the format of an `ndarray`, since a tuple for each leaf takes time.
            if type(leaf) is np.ndarray:
                formats[number] = leaf.dtype
            elif leaf is not None:
                formats[number] = type(leaf), getattr(leaf, "dtype", None)
        return tuple(formats)

    def is_array(self, leaf: Any) -> bool:
        # A matrix product is not elementwise, and whether masked elements count is undefined.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)):
            return False
        # SciPy's sparse formats are leaves, so that `unsupported_reason` can say what to use.
        if not isinstance(leaf, NUMPY):
            return hasattr(leaf, "toarray")
        return leaf.dtype.kind in "iufc" or leaf.dtype.type.__module__ == "ml_dtypes"

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        if not isinstance(leaf, NUMPY):
            return "SciPy's sparse formats are not supported; use toarray()"
        # The format e8m0fnu has exponents only: neither 0 nor negative numbers.
        name = leaf.dtype.name
        if leaf.dtype.kind in "iufc" or ("float" in name and not name.endswith("e8m0fnu")):
            return None
        return f"{name} cannot be clipped; use astype(np.float32)"

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        return HOST

    def array_facts(self, arrays: list[View]) -> ArrayFacts:
        return _FACTS

    def readable(self, array: View) -> bool:
        return True

    def as_numpy(self, array: View) -> View | None:
        return np.asarray(array)

    def from_host(self, array: View, device: Device) -> View:
        # Return a scalar, as NumPy's own reductions do in place of a 0-d array.
        return array[()] if array.ndim == 0 else array

    def one_norm(self, leaves: list[View | None], *, in_place: bool) -> OneNorm | None:
        arrays = [leaf for leaf in leaves if leaf is not None]
        dtype = arrays[0].dtype
        if not all([type(array) is np.ndarray and array.dtype == dtype for array in arrays]):
            return None
        if dtype not in FULL:
            return None

        # A sum that overflowed is rejected, so NumPy need not warn of it.
        with np.errstate(all="ignore"):
            [total] = sum_of_squares(arrays, [len(arrays)])
        norm = rounded_norm(math.sqrt(total), dtype.type)
        return None if norm is None else OneNorm((self, None, dtype.type), arrays, norm)

    def scale_all(self, arrays: list[View], factor: float, *, in_place: bool) -> list[View] | None:
        # A product may underflow.
        with np.errstate(all="ignore"):
            if not in_place:
                return [array * factor for array in arrays]
            # The general path finds out which arrays overlap or are read-only, and names them.
            if not _are_disjoint(arrays):
                return None
            return [np.multiply(array, factor, out=array) for array in arrays]

    def sums(self, mode: int, terms: Terms) -> list[View]:
        if terms.whole:
            return terms.in_blocks(sum_of_squares(terms.arrays, terms.counts))
        return stack_terms(self, sums_of_arrays(terms), terms)

    def multiply(
        self, arrays: list[View], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[View]:
        # NaN times 0 is NaN, so a factor of 0 may need more than a product.
        nonzero = all([type(factor) is float and factor for factor in factors])
        if nonzero and not in_place and all([array.itemsize >= WIDE for array in arrays]):
            # A product with a Python number keeps the dtype of an array, but not that of a scalar.
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
        """Multiply one array, in pieces if it has to be converted.

        Float16 products are computed in float32, and a copy of a large array is slow.
        """
        makes_zeros = zero and bool(np.any(factor == 0))
        is_complex_by_array = array.dtype.kind == "c" and isinstance(factor, np.ndarray)
        if array.itemsize < WIDE or makes_zeros or is_complex_by_array:
            new = array if in_place else np.array(array, order="K")
            super().multiply([new], [factor], in_place=True, zero=makes_zeros)
            return new if isinstance(array, np.ndarray) else new[()]

        if in_place:
            return np.multiply(array, factor, out=array, casting="same_kind")
        # A product with a Python number keeps the dtype of an array, but not that of a scalar.
        new = array * factor
        if new.dtype == array.dtype:
            return new
        return new.astype(array.dtype)

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        if _are_disjoint(leaves):
            return None
        # Scalars are read-only, too.
        return [(leaf, None if leaf.flags.writeable else "it is read-only") for leaf in leaves]

    def write(self, array: View, function: Callable[..., View], *operands: View) -> None:
        with walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)

    def pieces(self, array: View, axes: Axes = None) -> Iterable[View] | None:
        if axes is not None:
            return super().pieces(array, axes)
        if array.size <= PIECE:
            return None
        return walk([array], "readonly")


def sums_of_arrays(terms: Terms) -> list[View]:
    """Return ``Σ|x|ᵖ`` of each array."""
    if terms.p != 2:
        return [power_sum(BACKEND, *term) for term in terms.by_array()]

    # A norm with a float64 array is float64, so its float32 arrays have to be as accurate.
    arrays = list(map(np.asarray, terms.arrays))
    wide = any(array.dtype.char in "dD" for array in arrays)
    axes = terms.axes or [None] * len(arrays)
    fast_axes = axes
    if wide:
        pairs = zip(arrays, axes, strict=True)
        fast_axes = [None if array.dtype.char == "f" else along for array, along in pairs]

    sums = squares_along(arrays, fast_axes)
    return [
        _squares_along_axes(array, along, wide=wide) if total is None else total
        for total, array, along in zip(sums, arrays, axes, strict=True)
    ]


def _squares_along_axes(array: View, axes: Axes, *, wide: bool) -> View:
    """Return ``Σ|x|²`` of an array along axes, in any memory layout."""
    if axes is None or (len(axes) == array.ndim and array.dtype.char in "fd"):
        return np.asarray(array_squares(array, wide))
    total = power_sum(BACKEND, array, 2, axes)
    if array.dtype.char not in "dD" or total.all():
        return total

    # Squares of float64 numbers may underflow, but moduli do not.
    nonzero = power_sum(BACKEND, array, np.inf, axes) > 0
    return np.where((total == 0) & nonzero, UNDERFLOWN, total)


def _are_disjoint(arrays: list[Any]) -> bool:
    """Return whether a quick check shows that arrays are writable, without gaps, and do not
    overlap.
    """
    if not all([type(a) is np.ndarray and a.flags.writeable and a.flags.forc for a in arrays]):
        return False
    # Arrays that own their memory share none, unless one occurs twice.
    if all([array.base is None and array.flags.owndata for array in arrays]):
        return len(set(map(id, arrays))) == len(arrays)

    # In the order of addresses only neighbors are compared, not all pairs.
    spans = sorted([(array.__array_interface__["data"][0], array.nbytes) for array in arrays])
    return all([start + size <= after for (start, size), (after, _) in pairwise(spans)])


BACKEND = _NumPy(namespace)
