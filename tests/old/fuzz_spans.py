"""Numbers that are known up to rounding: intervals of NumPy's long double, for the fuzz's oracle.

A `Span` holds every value that a computation in float32 (or float64), in whatever order, may come to: each operation
widens it by a few units in the last place of that precision. So tolerances follow from the conditioning of what is
computed, and a comparison of two spans has three answers: yes, no, and maybe. NumPy's floating-point warnings are to be
off: ∞ and 0/0 are handled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any
LONG = np.longdouble
if np.finfo(LONG).nmant <= np.finfo(np.float64).nmant:
    message = "the oracle needs a long double that is wider than a double, as Linux has it on x86-64 and on ARM"
    raise RuntimeError(message)

ROUNDINGS = 4
"""How many roundings an operation may cost: formulas can be written in several ways."""
NO, YES, MAYBE = 0, 1, 2


class Precision(NamedTuple):
    """What a computation can hold."""

    ulp: float
    """Half a unit in the last place, of 1."""
    tiny: float
    """What is lost where a result is near 0: the smallest number, or the smallest normal one if others become 0."""
    largest: float

    def wider(self, other: Precision) -> Precision:
        """Return what holds for a result of both."""
        return Precision(max(self.ulp, other.ulp), max(self.tiny, other.tiny), min(self.largest, other.largest))


def precision(dtype: str, *, flush: bool) -> Precision:
    """Return the precision of a real floating-point dtype of NumPy."""
    info = np.finfo(dtype)
    tiny = info.smallest_normal if flush else info.smallest_subnormal
    return Precision(float(info.eps) / 2, float(tiny), float(info.max))


class Span:
    """An array of intervals ``[lo, hi]``."""

    __slots__ = ("hi", "lo", "precision")

    def __init__(self, lo: Array, hi: Array, precision: Precision) -> None:
        self.lo, self.hi, self.precision = lo, hi, precision

    def __repr__(self) -> str:
        lo, hi = (np.array2string(np.asarray(end), precision=20) for end in (self.lo, self.hi))
        return f"[{lo}, {hi}]"

    def __getitem__(self, index: Any) -> Span:
        return Span(self.lo[index], self.hi[index], self.precision)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return np.shape(self.lo)

    def rounded(self, times: float = ROUNDINGS) -> Span:
        """Return what so many roundings may make of it; an exact 0 stays one."""
        ulp, tiny, largest = self.precision
        if not times:
            return self
        ends = []
        for end, by in ((self.lo, -times * ulp), (self.hi, times * ulp)):
            size = np.abs(end)
            pad = size * by
            if tiny and (small := size < tiny / ulp).any():
                pad = np.where(small & (size > 0), pad + math.copysign(tiny, by), pad)
            ends.append(end + pad)
        lo, hi = ends
        if math.isfinite(largest) and (hi > largest).any():
            lo, hi = np.minimum(lo, largest), np.where(hi > largest, np.inf, hi)
        return Span(lo, hi, self.precision)

    def _with(self, other: Any) -> Span:
        return other if isinstance(other, Span) else exact(other, self.precision)

    def __add__(self, other: Any) -> Span:
        other = self._with(other)
        return Span(self.lo + other.lo, self.hi + other.hi, self.precision.wider(other.precision)).rounded()

    def __sub__(self, other: Any) -> Span:
        """Return the difference; its rounding is that of what is subtracted."""
        other = self._with(other)
        return Span(self.lo - other.hi, self.hi - other.lo, self.precision.wider(other.precision)).rounded()

    def __mul__(self, other: Any) -> Span:
        other = self._with(other)
        if (self.lo >= 0).all() and (other.lo >= 0).all():
            lo, hi = _times(self.lo, other.lo), _times(self.hi, other.hi)
        else:
            ends = [_times(a, b) for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
            lo, hi = np.minimum.reduce(ends), np.maximum.reduce(ends)
        return Span(lo, hi, self.precision.wider(other.precision)).rounded()

    def __truediv__(self, other: Any) -> Span:
        """Divide numbers of at least 0."""
        other = self._with(other)
        lo = np.where(other.hi > 0, np.maximum(self.lo, 0) / other.hi, 0)
        hi = np.where(other.lo > 0, self.hi / other.lo, np.inf)
        hi = np.where((self.hi == 0) & (other.lo > 0), 0, hi)
        lo, hi = np.where(np.isnan(lo), 0, lo), np.where(np.isnan(hi), np.inf, hi)  # ∞/∞
        return Span(lo, hi, self.precision.wider(other.precision)).rounded()

    def each(self, function: Callable[[Array], Array], times: float = 4 * ROUNDINGS) -> Span:
        """Apply a function that never falls."""
        return Span(function(self.lo), function(self.hi), self.precision).rounded(times)

    def sqrt(self) -> Span:
        """Return the square root."""
        return Span(np.maximum(self.lo, 0), self.hi, self.precision).each(np.sqrt, ROUNDINGS)

    def square(self) -> Span:
        """Return the square."""
        sizes = self.size()
        return Span(sizes.lo**2, sizes.hi**2, self.precision).rounded()

    def size(self) -> Span:
        """Return the absolute value."""
        one, other = np.abs(self.lo), np.abs(self.hi)
        across = (self.lo < 0) & (self.hi > 0)
        return Span(np.where(across, 0, np.minimum(one, other)), np.maximum(one, other), self.precision)

    def power(self, exponent: float) -> Span:
        """Return a number of at least 0 to a power above 0."""
        return Span(np.maximum(self.lo, 0), self.hi, self.precision).each(lambda x: x ** LONG(exponent))


def _times(a: Array, b: Array) -> Array:
    """Return the product, where 0 times ∞ is 0."""
    product = a * b
    return np.where(np.isnan(product), LONG(0), product)


def exact(value: Any, precision: Precision) -> Span:
    """Return a number, or an array, as it is."""
    array = np.asarray(value, dtype=LONG)
    return Span(array, array, precision)


def smaller(a: Span, b: Span) -> Span:
    """Return the minimum."""
    return Span(np.minimum(a.lo, b.lo), np.minimum(a.hi, b.hi), a.precision.wider(b.precision))


def larger(a: Span, b: Span) -> Span:
    """Return the maximum."""
    return Span(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.precision.wider(b.precision))


def within(a: Span, b: Span) -> Array:
    """Return whether ``a <= b``: yes, no or maybe."""
    return np.where(a.hi <= b.lo, YES, np.where(a.lo > b.hi, NO, MAYBE))


def either(answer: Array, a: Span, b: Span) -> Span:
    """Return ``a`` for yes, ``b`` for no, what holds both for maybe."""
    yes, no = answer == YES, answer == NO
    lo = np.where(yes, a.lo, np.where(no, b.lo, np.minimum(a.lo, b.lo)))
    hi = np.where(yes, a.hi, np.where(no, b.hi, np.maximum(a.hi, b.hi)))
    return Span(lo, hi, a.precision.wider(b.precision))


def total(spans: list[Span]) -> Span:
    """Return the sum of arrays of one shape."""
    last = spans[0]
    for span in spans[1:]:
        last += span
    return last
