# SPDX-License-Identifier: MIT
"""Sums, products and dtypes, by the functions of the array API: the defaults of hooks in `base`.

Nothing here is specific to a framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, Protocol

from uniclip._types import A, Axes, DType, Namespace, Op, Tensor, View

PIECE = 2**17
"""The number of elements of a large array that are processed at a time, to fit into a cache."""


class Library(Protocol[A]):
    """The part of a `uniclip.backends.base.Backend` that sums of powers use."""

    xp: Namespace

    def pieces(self, array: A, axes: Axes = None) -> Iterable[A] | None:
        """Split a large array."""

    def array_facts(self, arrays: list[A]) -> Any:
        """Return the facts about arrays."""


def op_of(p: float) -> Op:
    """Return the reduction that combines sums of a power."""
    return "max" if p == math.inf else "sum"


def power_sum(backend: Library[A], array: A, p: float, axes: Axes) -> A:
    """Return ``Σ|x|ᵖ``, the largest modulus for p = ∞, of one array, large ones piece by piece."""
    pieces = backend.pieces(array, axes)
    if pieces is None:
        return _powers(backend, array, p, axes)

    parts = [_powers(backend, piece, p, axes) for piece in pieces]
    if axes is None or 0 in axes:
        return combine(backend, parts, op_of(p))
    # Each piece has rows of the result.
    return backend.xp.concat(parts, axis=0)


def combine(backend: Library[A], parts: list[A], op: Op) -> A:
    """Return the sum or the maximum of arrays of one shape."""
    xp = backend.xp
    if op == "sum":
        return reduce(add, parts)

    # The maximum function of some libraries ignores NaN.
    largest_of = parts[0]
    for part in parts[1:]:
        largest_of = xp.where(xp.isnan(part) | (part > largest_of), part, largest_of)
    return largest_of


def _powers(backend: Library[A], x: A, p: float, axes: Axes) -> A:
    """Return ``Σ|x|ᵖ``, the largest modulus for p = ∞, in float64 if the library has it."""
    xp = backend.xp
    if p == 2:
        # Squares without an absolute value, whose derivative at 0 is undefined.
        floats = [_wide(backend, part) for part in _real_parts(xp, x)]
        squares = reduce(add, [part * part for part in floats])
        return xp.sum(squares, axis=axes)

    # Real numbers need no wider dtype until they are summed if no power is taken.
    if 1 < p < math.inf or xp.isdtype(x.dtype, "complex floating"):
        size = modulus(backend, x)
    else:
        size = xp.abs(x)

    if p == math.inf:
        return _wide(backend, largest(xp, size, axes))
    powers = _wide(backend, size) if p == 1 else _power(xp, size, p)
    return xp.sum(powers, axis=axes)


def _real_parts(xp: Namespace, x: A) -> list[A]:
    """Return real and imaginary part, only the former of real numbers."""
    if xp.isdtype(x.dtype, "complex floating"):
        return [xp.real(x), xp.imag(x)]
    return [x]


def divided_by(backend: Library[A], x: A, p: float, unit: Any) -> A:
    """Return ``x/unit`` or ``|x/unit|``, whose power p is summed, in the precision of sums."""
    # A square needs no modulus, which has no second derivative at 0.
    if p == 2 and not backend.xp.isdtype(x.dtype, "complex floating"):
        return _wide(backend, x) / unit
    return modulus(backend, x, unit)


def modulus(backend: Library[A], x: A, unit: Any = 1) -> A:
    """Return ``|x/unit|`` in the precision of sums; no square of a complex number overflows."""
    xp = backend.xp
    sizes: list[A] = [xp.abs(_wide(backend, part)) / unit for part in _real_parts(xp, x)]
    if len(sizes) == 1:
        return sizes[0]

    # The larger part is taken out of the root, so that no square overflows or underflows.
    real, imag = sizes
    top = xp.where(real > imag, real, imag)
    low = xp.where(real > imag, imag, real)
    ratio = low / xp.where(top > 0, top, xp.ones_like(top))
    return top * xp.sqrt(1 + ratio * ratio)


def _wide(backend: Library[A], array: A) -> A:
    """Return real numbers in the precision of sums: float64 if the library has it."""
    xp = backend.xp
    widest = xp.float64 if backend.array_facts([array]).double else xp.float32
    return cast(xp, array, xp.result_type(array.dtype, widest))


@contextmanager
def enter_both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    """Return a context that enters two others."""
    with first, second:
        yield


def unstack(xp: Namespace, array: A) -> list[A]:
    """Return the rows of an array, by a single operation where there is one."""
    # The array API standard has this function since 2023.
    if hasattr(xp, "unstack"):
        return list(xp.unstack(array))
    return [array[row, ...] for row in range(array.shape[0])]


def in_groups(values: Sequence[Any] | View, lengths: Sequence[int]) -> list[Any]:
    """Split consecutive values into groups of these lengths."""
    ends = zip(accumulate(lengths), lengths, strict=True)
    return [values[end - length : end] for end, length in ends]


def cast(xp: Namespace, array: A, dtype: DType) -> A:
    """Return the array in ``dtype``, or itself if it already has it."""
    if array.dtype == dtype:
        return array
    return xp.astype(array, dtype)


def real_dtype(xp: Namespace, dtype: DType) -> DType:
    """Return the real dtype of the same precision."""
    if not xp.isdtype(dtype, "complex floating"):
        return dtype
    return xp.abs(xp.zeros((), dtype=dtype)).dtype


def norm_dtype(xp: Namespace, arrays: Sequence[Tensor]) -> DType:
    """Return the real dtype, float32 or wider, of the norm of arrays."""
    dtypes = {array.dtype for array in arrays}
    if not dtypes:
        return xp.float32

    wide = [xp.result_type(dtype, xp.float32) for dtype in dtypes]
    return real_dtype(xp, reduce(xp.result_type, wide))


def sum_dtype(xp: Namespace, dtype: DType) -> DType:
    """Return the dtype for sums: float32 or wider, of integers int32 or wider."""
    if not xp.isdtype(dtype, "integral"):
        return xp.result_type(dtype, xp.float32)
    if xp.iinfo(dtype).max < xp.iinfo(xp.int32).max:
        return xp.int32
    return dtype


def times(xp: Namespace, array: A, factor: A, zero: bool) -> A:
    """Return ``array · factor`` in the array's dtype.

    With ``zero``, a factor of 0 turns NaN and ∞ into 0, too.
    """
    wide = cast(xp, array, xp.result_type(array.dtype, xp.float32))
    if zero:
        wide = zeroed(xp, wide, factor)
    product = wide * factor

    # A product with the complex number 1 can change the sign of a zero.
    if xp.isdtype(wide.dtype, "complex floating"):
        product = xp.where(xp.equal(factor, 1.0), wide, product)
    return cast(xp, product, array.dtype)


def zeroed(xp: Namespace, array: A, factor: A) -> A:
    """Return the array with 0 where the factor is 0: a product with NaN or ∞ would be NaN."""
    return xp.where(xp.equal(factor, 0.0), 0.0, array)


def same(factors: Sequence[Any]) -> bool:
    """Return whether all factors are the same 0-d array."""
    first = factors[0]
    return getattr(first, "shape", None) == () and all([factor is first for factor in factors])


def finite_or_zero(xp: Namespace, array: A) -> A:
    """Return the array with 0 for each element that is not finite."""
    # NumPy widens the bfloat16 of ml_dtypes in an operation with a Python number, so cast back.
    return cast(xp, xp.where(xp.isfinite(array), array, 0.0), array.dtype)


def cut(xp: Namespace, array: A, axes: Axes, size: int) -> Iterable[A] | None:
    """Return the pieces of an array of more than ``size`` elements, as `Backend.pieces` does."""
    if math.prod(array.shape) <= size:
        return None

    # The first axis may be too short to be cut into small pieces.
    if axes is None:
        array = xp.reshape(array, (-1,))
    return (array[rows, ...] for rows in row_slices(array.shape, size))


def row_slices(shape: tuple[int, ...], piece: int = PIECE) -> list[slice]:
    """Return slices of the first axis that cut a large array into pieces."""
    length = shape[0]
    step = max(1, piece * length // math.prod(shape))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def largest(xp: Namespace, size: A, axes: Axes) -> A:
    """Return the largest modulus over ``axes``, 0 over no elements."""
    if axes == ():
        return size

    # In TensorFlow's graphs, a shape of unknown rank cannot be iterated over.
    if getattr(size.shape, "rank", 0) is not None and 0 in size.shape:
        return xp.sum(size, axis=axes)

    # A shape that is known only at run time may be empty, and the maximum is -∞ then.
    top = xp.max(size, axis=axes)
    return xp.where(top < 0, xp.zeros_like(top), top)


def _power(xp: Namespace, size: A, p: float) -> A:
    """Return the power of a modulus, with finite second derivatives at 0."""
    if p > 2:
        return size**p

    # The second derivative of a smaller power is infinite at 0, and times 0 it would be NaN.
    zero = xp.equal(size, 0.0)
    nonzero = xp.where(zero, xp.ones_like(size), size)
    return xp.where(zero, size, nonzero**p)
