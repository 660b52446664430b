"""The expected result of each rule, from its documentation and paper; imports nothing of uniclip.

Numbers are intervals of NumPy's long double. A `Span` contains every value that a computation in
float32 (or float64), in any order, may produce: each operation widens it by a few units in the last
place of that precision. Tolerances thus follow from the conditioning of the computation, and a
comparison of two spans has three answers: yes, no, and maybe. Callers switch NumPy's floating-point
warnings off, since ∞ and 0/0 are handled here.

A rule is plain data here (`Plan`). The result for NaN and ∞ needs no arithmetic, so non-finite
elements are flagged, and their spans contain 0.
"""
# ruff: noqa: EM101, EM102, TRY003, N818 - what stops a case is caught and counted

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = Any
LONG = np.longdouble
if np.finfo(LONG).nmant <= np.finfo(np.float64).nmant:
    message = (
        "the oracle needs a long double that is wider than a double, as Linux has it on x86-64 and "
        "on ARM"
    )
    raise RuntimeError(message)

ROUNDINGS = 4
"""Roundings that an operation may cost: formulas can be written in several ways."""
NO, YES, MAYBE = 0, 1, 2


class Precision(NamedTuple):
    """The rounding unit and the range of a dtype."""

    ulp: float
    """Half a unit in the last place, of 1."""
    tiny: float
    """Absolute error of results near 0: the smallest subnormal number, or the smallest normal
    number if subnormals are flushed.
    """
    largest: float

    def wider(self, other: Precision) -> Precision:
        """Return the precision of a result of two operands."""
        return Precision(
            max(self.ulp, other.ulp), max(self.tiny, other.tiny), min(self.largest, other.largest)
        )


def precision(dtype: str, *, flush: bool) -> Precision:
    """Return the precision of a floating-point dtype, of a complex one that of its components."""
    info = ml_dtypes.finfo({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype))
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
        """Return the interval after this many roundings; an exact 0 stays exact."""
        ulp, tiny, largest = self.precision
        if not times:
            return self
        ends = []
        for end, by in ((self.lo, -times * ulp), (self.hi, times * ulp)):
            size = np.abs(end)
            ends.append(
                end + size * by + math.copysign(tiny, by) * ((size > 0) & (size < tiny / ulp))
            )
        lo, hi = ends
        if math.isfinite(largest) and (hi > largest).any():
            lo, hi = np.minimum(lo, largest), np.where(hi > largest, np.inf, hi)
        return Span(lo, hi, self.precision)

    def __add__(self, other: Any) -> Span:
        other = other if isinstance(other, Span) else exact(other, self.precision)
        return Span(
            self.lo + other.lo, self.hi + other.hi, self.precision.wider(other.precision)
        ).rounded()

    def __sub__(self, other: Any) -> Span:
        """Return the difference, rounded relative to the minuend."""
        other = other if isinstance(other, Span) else exact(other, self.precision)
        return Span(
            self.lo - other.hi, self.hi - other.lo, self.precision.wider(other.precision)
        ).rounded()

    def __mul__(self, other: Any) -> Span:
        other = other if isinstance(other, Span) else exact(other, self.precision)
        if (self.lo >= 0).all() and (other.lo >= 0).all():
            lo, hi = _times(self.lo, other.lo), _times(self.hi, other.hi)
        else:
            ends = [_times(a, b) for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
            lo, hi = np.minimum.reduce(ends), np.maximum.reduce(ends)
        return Span(lo, hi, self.precision.wider(other.precision)).rounded()

    def __truediv__(self, other: Any) -> Span:
        """Divide numbers of at least 0."""
        other = other if isinstance(other, Span) else exact(other, self.precision)
        lo = np.where(other.hi > 0, np.maximum(self.lo, 0) / other.hi, 0)
        hi = np.where(other.lo > 0, self.hi / other.lo, np.inf)
        hi = np.where((self.hi == 0) & (other.lo > 0), 0, hi)
        # ∞/∞ may be anything from 0 to ∞.
        lo, hi = np.where(np.isnan(lo), 0, lo), np.where(np.isnan(hi), np.inf, hi)
        return Span(lo, hi, self.precision.wider(other.precision)).rounded()

    def map(self, function: Callable[[Array], Array], times: float = 4 * ROUNDINGS) -> Span:
        """Apply a function that never decreases."""
        return Span(function(self.lo), function(self.hi), self.precision).rounded(times)

    def put(self, where: Array, value: Any) -> Span:
        """Return the array with another value in some places."""
        return self.map(lambda end: np.where(where, value, end), times=0)

    def within(self, precision: Precision) -> Span:
        """Return the same intervals for results of another precision."""
        return Span(self.lo, self.hi, precision)

    def sqrt(self) -> Span:
        """Return the square root."""
        return self.map(lambda end: np.sqrt(np.maximum(end, 0)), ROUNDINGS)

    def square(self) -> Span:
        """Return the square."""
        return self.size().map(np.square, ROUNDINGS)

    def size(self) -> Span:
        """Return the absolute value."""
        one, other = np.abs(self.lo), np.abs(self.hi)
        across = (self.lo < 0) & (self.hi > 0)
        return Span(
            np.where(across, 0, np.minimum(one, other)), np.maximum(one, other), self.precision
        )


def _times(a: Array, b: Array) -> Array:
    """Return the product, where 0 times ∞ is 0."""
    product = a * b
    return np.where(np.isnan(product), LONG(0), product)


def exact(value: Any, precision: Precision) -> Span:
    """Return a number, or an array, as a span of width 0."""
    array = np.asarray(value, dtype=LONG)
    return Span(array, array, precision)


def smaller(a: Span, b: Span) -> Span:
    """Return the minimum."""
    return Span(np.minimum(a.lo, b.lo), np.minimum(a.hi, b.hi), a.precision.wider(b.precision))


def larger(a: Span, b: Span) -> Span:
    """Return the maximum."""
    return Span(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.precision.wider(b.precision))


def above(a: Span, b: Span) -> Array:
    """Return whether ``a > b``: yes, no or maybe."""
    return np.where(a.lo > b.hi, YES, np.where(a.hi <= b.lo, NO, MAYBE))


def either(verdict: Array, a: Span, b: Span) -> Span:
    """Return ``a`` for yes, ``b`` for no, and a span that contains both for maybe."""
    yes, no = verdict == YES, verdict == NO
    lo = np.where(yes, a.lo, np.where(no, b.lo, np.minimum(a.lo, b.lo)))
    hi = np.where(yes, a.hi, np.where(no, b.hi, np.maximum(a.hi, b.hi)))
    return Span(lo, hi, a.precision.wider(b.precision))


def total(spans: list[Span]) -> Span:
    """Return the sum of arrays of one shape."""
    return reduce(add, spans)


# Limits.

Spec: TypeAlias = tuple[Any, ...]
State: TypeAlias = Any
Limits: TypeAlias = tuple[list[Span], State]
OneLimit: TypeAlias = tuple[Span, State]
CAP = 1e18
"""The largest norm that enters a statistic of squares."""


class Inconclusive(Exception):
    """The next step depends on how a number is rounded."""


@dataclass
class LimitInputs:
    """Inputs that a limit may read."""

    labels: list[Any]
    reference: Callable[[], list[Span]]
    sizes: Callable[[], list[Array]]
    single: Precision
    """The precision of float32, in which steps are counted and losses are stored."""
    loss: float | None = None
    reported: list[Array] | None = None
    """The limits in the report: they decide a comparison that rounding leaves open."""
    broken: bool = False
    """True if one of the norms is not finite."""
    widest: Precision | None = None
    """The precision of the most precise leaf, which the norms of a step may share."""
    thresholds: list[Span] | None = None
    """The norms above which the limit clips, if these are not the limits."""

    def decide(self, limited: Array) -> Array:
        """Return whether the one norm is limited; read the report if that depends on rounding."""
        unsure = limited == MAYBE
        if not unsure.any() or self.reported is None:
            return limited
        reported = np.broadcast_to(self.reported[0], np.shape(limited))
        # The dtype's largest number stands for no limit.
        largest = float(np.finfo(reported.dtype).max)
        return np.where(unsure, np.where(reported < largest, YES, NO), limited)

    def only(self, number: int) -> LimitInputs:
        """Return the inputs for one of the norms."""
        one = lambda some: lambda: [some()[number]]
        reported = None if self.reported is None else [self.reported[number]]
        labels = [self.labels[number]]
        return replace(
            self,
            labels=labels,
            reference=one(self.reference),
            sizes=one(self.sizes),
            reported=reported,
        )


def unlimited(like: Span) -> Span:
    """Return a limit that never clips, for norms like these."""
    return exact(np.full(like.shape, np.inf), like.precision)


def constant(value: float, precision: Precision, widest: Precision | None = None) -> Span:
    """Return a limit rounded to the precision of its norm, and at most its largest number."""
    if value == math.inf:
        return exact(math.inf, precision)
    near = LONG(
        np.float32(min(value, precision.largest)) if precision.ulp > 2**-30 else np.float64(value)
    )
    low = near if near >= precision.tiny / precision.ulp else max(near - precision.tiny, 0)
    high = near if low == near else near + precision.tiny
    if widest is not None and widest.ulp < precision.ulp:
        if value > precision.largest / 16:
            raise Inconclusive("a limit that only some of the norms can hold")
        low, high = min(low, LONG(value)), max(high, LONG(value))
    return Span(LONG(low), LONG(high), precision)


def _constant(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    return constant(spec[1], n.precision, inputs.widest), state


def _positive(n: Span) -> Array:
    """Return whether norms are above 0."""
    if (unsure := (n.lo <= 0) & (n.hi > 0)).any():
        raise Inconclusive(f"{int(unsure.sum())} norms that may be 0")
    return n.lo > 0


def _schedule(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    start, change, ratio = spec[1:]
    steps = state or 0
    limit = exact(start + change * ratio**steps, inputs.single.wider(n.precision)).rounded(16)
    return limit.within(n.precision), steps + 1


def _relative(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    ratio, eps = spec[1:]
    return [larger(w, exact(eps, w.precision).rounded()) * ratio for w in inputs.reference()], state


def _trust(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    lr, trust, decay = spec[1:]
    limits = []
    for n, w in zip(norms, inputs.reference(), strict=True):
        share = exact(1, n.precision) / (w * decay / n + 1) if decay else exact(1, n.precision)
        limit = w * trust * share / lr
        limit = either(above(w, w * 0), limit, unlimited(n))
        # The limit for a norm of 0 may be anything.
        limits.append(
            Span(np.where(n.lo > 0, limit.lo, 0), np.where(n.lo > 0, limit.hi, np.inf), n.precision)
        )
    return limits, state


def _split(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    joint, by_size = spec[1:]
    sizes = inputs.sizes() if by_size else [1] * len(norms)
    shares = [LONG(size) / LONG(max(sum(sizes), 1)) for size in sizes]
    pairs = zip(norms, shares, strict=True)
    return [exact(joint * np.sqrt(share), n.precision).rounded(8) for n, share in pairs], state


def _per_group(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    return ask_each([spec[1][label] for label in inputs.labels], norms, state, inputs)


def ask_each(
    specs: list[Spec], norms: list[Span], states: list[State] | None, inputs: LimitInputs
) -> tuple[list[Span], list[State]]:
    """Ask a limit separately for each norm."""
    owns = [inputs.only(number) for number in range(len(norms))]
    rows = zip(specs, norms, states or [None] * len(norms), owns, strict=True)
    answers = [_for_one(spec, n, old, own) for spec, n, old, own in rows]
    limits = [limit for limit, _ in answers]
    if any(own.thresholds is not None for own in owns):
        inputs.thresholds = [
            (own.thresholds or [limit])[0] for own, limit in zip(owns, limits, strict=True)
        ]
    return limits, [state for _, state in answers]


def _percentile(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    q, window, filled = spec[1:]
    history = ([n] * window if filled and not state else [n, *(state or [])])[:window]
    return _at_percentile(history, q), history


def _percentile_of_all(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    bins = Span(n.lo * LONG(0.994), n.hi * LONG(1.006) + LONG(2e-45), n.precision)
    return _percentile((*spec, None, False), bins, state, inputs)


def _at_percentile(history: list[Span], q: float) -> Span:
    """Return a percentile, linearly interpolated between two values."""
    lows, highs = (
        np.sort(np.stack([getattr(n, end) for n in history]), axis=0) for end in ("lo", "hi")
    )
    position, unit = LONG(len(history) - 1) * LONG(q) / 100, history[0].precision
    error = 8 * LONG(unit.ulp) * position
    beside = abs(position - round(float(position)))
    # Positions this close to an integer are rounded to it.
    error = max(error, beside) if beside <= 2e-6 * (1 + position) else error
    ends = []
    for values, exactly in ((lows, position - error), (highs, position + error)):
        at = min(max(exactly, LONG(0)), LONG(len(history) - 1))
        low = int(np.floor(at))
        upper = values[min(low + 1, len(history) - 1)]
        ends.append(values[low] + (at - low) * (upper - values[low]))
    scale = Span(ends[0], ends[1], unit).rounded(8)
    # lower + share·(upper - lower) has the rounding error of upper - lower.
    top = highs[min(int(np.ceil(position + error)), len(history) - 1)]
    lost = np.where(ends[0] < ends[1], 2 * LONG(unit.ulp) * top * (error > 0), 0)
    return Span(scale.lo - lost, scale.hi + lost, unit)


def _quantile(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    quantile, rate, start, *bounds = spec[1:]
    limit = state or exact(start, n.precision).rounded()
    verdict = above(n, limit)
    if not verdict.size:
        return limit, limit
    shares = [
        LONG(count) / verdict.size for count in ((verdict == NO).sum(), (verdict != YES).sum())
    ]
    by = Span(-rate * (shares[1] - quantile), -rate * (shares[0] - quantile), n.precision).rounded()
    low, high = (constant(end, n.precision, inputs.widest) for end in bounds)
    return limit, smaller(larger(limit * by.map(np.exp), low), high)


def _ema(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    ratio, decay, warmup, warmup_norm = spec[1:]
    averages, count = state or ([unlimited(n) for n in norms], 0)
    limits, new = [], []
    joint = _joint(norms) if count < warmup else None
    for n, average in zip(norms, averages, strict=True):
        unknown = np.isinf(average.lo)
        if joint is None:
            limit = either(np.where(unknown, NO, YES), average * ratio, unlimited(n))
        else:
            most = exact(warmup_norm, n.precision)
            limit = either(above(joint, most.rounded()), n * (most / joint), unlimited(n))
            # The joint norm is not finite.
            if inputs.broken:
                limit = Span(np.zeros(n.shape, LONG), unlimited(n).hi, n.precision)
        left, positive = smaller(n, limit), _positive(n)
        first = unknown | (joint is not None)
        usual = average.put(unknown, 0) * decay + left * (1 - decay)
        moved = either(np.where(first, YES, NO), smaller(left, average), usual)
        limits.append(limit)
        new.append(either(np.where(first & ~positive, YES, NO), average, moved))
    return limits, (new, count + 1)


def _joint(norms: list[Span]) -> Span:
    """Return the norm of all norms."""
    lo, hi = (np.sqrt(sum((getattr(n, end) ** 2).sum() for n in norms)) for end in ("lo", "hi"))
    unit = reduce(Precision.wider, [n.precision for n in norms])
    # An intermediate result may exceed the range.
    return Span(lo, hi, unit._replace(largest=math.inf)).rounded(12)


def _second_moment(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    factor, decay, warmup = spec[1:]
    moment, count = state or (n * 0, 0)
    some = np.where(count < warmup, NO, above(moment, moment * 0))
    limit = either(inputs.decide(some), (moment * factor).sqrt(), unlimited(n))
    left = smaller(smaller(n, limit), exact(CAP, n.precision))
    return limit, (moment * decay + left.square() * (1 - decay), count + 1)


def _mean_over_rms(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    mean, square, count = state or (n * 0, n * 0, 0)
    n, decays = smaller(n, exact(CAP, n.precision)), [LONG(decay) for decay in spec[1:]]
    mean = mean * decays[0] + n * (1 - decays[0])
    square = square * decays[1] + n.square() * (1 - decays[1])
    left = [
        exact(decay, n.precision).rounded(1).map(lambda x: x ** (count + 1)) for decay in decays
    ]
    # Decays are rounded, too.
    begun = [exact(1, n.precision) - one for one in left]
    return mean / begun[0] / ((square / begun[1]).sqrt() + 1e-8), (mean, square, count + 1)


def _z_score(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    z, decay, target, warmup, eps, clip_factor, same = spec[1:]
    n, (history, mean, variance) = smaller(n, exact(CAP, n.precision)), state or ([], None, None)
    if len(history) < warmup:
        history = [*history, n]
        mean = total(history) / len(history)
        variance = total([(one - mean).square() for one in history]) / len(history)
        inputs.thresholds = [unlimited(n)]
        return unlimited(n), (history, mean, variance)
    std = variance.sqrt()
    excess, bound = n - mean, (std + eps) * z
    inputs.thresholds = [mean + bound]
    spike = inputs.decide(above(excess, bound))
    goal = mean if target == "mean" else mean + std * z
    if target == "reciprocal":
        goal = (mean + std * z * (bound / larger(excess, bound))) * clip_factor
    left = either(spike, smaller(goal, n), n)
    moved = mean * decay + left * (1 - decay)
    spread = variance * decay + (left - moved).square() * (1 - decay)
    stays = spike if same else np.asarray(NO)
    return either(spike, goal, unlimited(n)), (
        history,
        either(stays, mean, moved),
        either(stays, variance, spread),
    )


def _log_z_score(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    z, decay = spec[1:]
    mean, variance, count = state or (n * 0, n * 0, np.zeros(n.shape))
    positive = _positive(n)
    weight = np.where(positive, np.maximum(LONG(1) / (count + 1), 1 - LONG(decay)), 0)
    log, learned = n.put(~positive, 1).map(np.log), np.where(positive, YES, NO)
    change = log - mean
    mean = either(learned, mean * (1 - weight) + log * weight, mean)
    variance = either(learned, (variance + change.square() * weight) * (1 - weight), variance)
    bound = larger(variance, exact(1e-8, n.precision)).sqrt() * z
    inputs.thresholds = [(mean + bound).map(lambda x: np.exp(np.minimum(x, 11000)))]
    spike = inputs.decide(np.where(positive, above(log - mean, bound), NO))
    return either(spike, mean.map(np.exp), unlimited(n)), (mean, variance, count + positive)


def _rolling(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    z, window, warmup = spec[1:]
    histories, losses = state or ([[] for _ in norms], [])
    limits = [
        _threshold(history, z, warmup, n) for history, n in zip(histories, norms, strict=True)
    ]
    inputs.thresholds = limits
    if inputs.loss is not None:
        loss, loss_is_finite = (
            exact(np.float32(inputs.loss), inputs.single),
            np.isfinite(inputs.loss),
        )
        spike = above(loss.put(not loss_is_finite, math.inf), _threshold(losses, z, warmup, loss))
        pairs = zip(norms, limits, strict=True)
        limits = [either(np.broadcast_to(spike, n.shape), n * 0, limit) for n, limit in pairs]
        losses = [loss, *losses][:window] if loss_is_finite else losses
    return limits, ([[n, *old][:window] for n, old in zip(norms, histories, strict=True)], losses)


def _threshold(history: list[Span], z: float, warmup: int, like: Span) -> Span:
    """Return the mean plus z standard deviations.

    Values are scaled by the largest one, so that no square overflows.
    """
    if len(history) < warmup:
        return unlimited(like)
    top = np.maximum.reduce([np.maximum(np.abs(n.lo), np.abs(n.hi)) for n in history])
    unit = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1))))
    scaled = [Span(n.lo / unit, n.hi / unit, n.precision) for n in history]
    # Losses may be negative.
    mean = total(scaled).map(lambda x: x / len(history), ROUNDINGS)
    square = total([(n - mean).square() for n in scaled]) / (len(history) - 1)
    # Rounding the mean of equal norms must not count as deviation: count·eps·|mean| is allowed.
    bound = mean + square.sqrt() * z + mean.size() * (len(history) * 2 * mean.precision.ulp)
    return Span(bound.lo * unit, bound.hi * unit, bound.precision).rounded(1)


_OF_ONE: dict[str, Callable[[Spec, Span, State, LimitInputs], OneLimit]] = {
    "constant": _constant, "schedule": _schedule, "percentile": _percentile,
    "percentile of all": _percentile_of_all, "quantile": _quantile, "second moment": _second_moment,
    "mean over rms": _mean_over_rms, "z-score": _z_score, "log z-score": _log_z_score,
}  # fmt: skip
_OF_ALL: dict[str, Callable[[Spec, list[Span], State, LimitInputs], Limits]] = {
    "relative": _relative, "trust": _trust, "split": _split, "per group": _per_group, "ema": _ema,
    "rolling z-score": _rolling,
}  # fmt: skip


def step(spec: Spec, norms: list[Span], state: State, inputs: LimitInputs) -> Limits:
    """Return the limits of norms, and the state after a finite step.

    ``None`` is the state before the first step.
    """
    if spec[0] in _OF_ONE:
        return ask_each([spec] * len(norms), norms, state, inputs)
    return _OF_ALL[spec[0]](spec, norms, state, inputs)


def _for_one(spec: Spec, n: Span, state: State, inputs: LimitInputs) -> OneLimit:
    if spec[0] in _OF_ONE:
        return _OF_ONE[spec[0]](spec, n, state, inputs)
    (limit,), new = _OF_ALL[spec[0]](spec, [n], state, inputs)
    return limit, new


# Rules.

Path = tuple[Any, ...]
BITS = {
    "float16": 11,
    "bfloat16": 8,
    "float32": 24,
    "complex64": 24,
    "float64": 53,
    "complex128": 53,
}
STATELESS = {"constant", "relative", "trust", "split"}
"""The stateless limits."""
SEPARATE = {
    "percentile",
    "percentile of all",
    "second moment",
    "mean over rms",
    "z-score",
    "log z-score",
}
"""The stateful limits that keep a separate state for each norm."""


@dataclass(frozen=True)
class Machine:
    """How a framework rounds, and which axis of a weight is its output."""

    flush: bool = False
    """True if subnormal numbers may become 0."""
    default_float: str = "float64"
    output_axis: int = -1
    exact: bool = True
    """True if the root of a square is exact."""

    def of_norm(self, dtypes: list[str]) -> Precision:
        """Return the precision of the norm of leaves."""
        return precision(
            "float64" if any(BITS[dtype] > 24 for dtype in dtypes) else "float32", flush=self.flush
        )


@dataclass(frozen=True)
class Leaf:
    """A gradient, with real and imaginary parts along a new last axis."""

    path: Path
    dtype: str
    parts: Span
    bad: Array
    """Mask of non-finite elements."""
    signs: Array = 0.0
    """The signs of infinite elements; 0 for NaN."""
    same: Array = field(default_factory=lambda: np.bool_(True))
    """Mask of elements that must come back with the same bits."""
    integer: str | None = None
    """The integer dtype, until a norm turns the leaf into floating-point numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gradient."""
        return self.parts.shape[:-1]

    def sizes(self) -> Span:
        """Return the modulus of each element."""
        if self.parts.shape[-1] == 1:
            return self.parts[..., 0].size()
        sizes = self.parts.size()
        return Span(np.sqrt((sizes.lo**2).sum(-1)), np.sqrt((sizes.hi**2).sum(-1)), sizes.precision)


def leaf_of(path: Path, array: Array, dtype: str, machine: Machine) -> Leaf:
    """Return a leaf of a NumPy array; integers get the framework's default float."""
    integer = None if dtype in BITS else dtype
    dtype = dtype if dtype in BITS else machine.default_float
    wide = np.asarray(array, dtype=np.clongdouble if np.iscomplexobj(array) else LONG)
    parts = np.stack([wide.real, wide.imag], axis=-1) if np.iscomplexobj(wide) else wide[..., None]
    bad = ~np.isfinite(parts).all(axis=-1)
    parts = np.where(bad[..., None], 0, parts)
    unit = precision(dtype, flush=machine.flush)
    lost = (np.abs(parts) < unit.tiny) & machine.flush
    low, high = (np.where(lost, end(parts, 0), parts) for end in (np.minimum, np.maximum))
    signs = 0.0 if np.iscomplexobj(wide) else np.sign(np.where(bad & ~np.isnan(wide), wide, 0))
    return Leaf(path, dtype, Span(low, high, unit), bad, signs, integer=integer)


@dataclass(frozen=True)
class Scope:
    """The sets of elements that share a norm."""

    kind: str
    axes: tuple[int, ...] = ()
    axis: int | None = None
    label: Callable[[Path, Any], Any] | None = None

    def covered(self, ndim: int, machine: Machine) -> tuple[int, ...]:
        """Return the axes that a norm covers."""
        if self.kind in {"all", "leaf", "groups"}:
            return tuple(range(ndim))
        if self.kind == "entry":
            return ()
        if self.kind == "axes":
            return tuple(sorted({axis % ndim for axis in self.axes}))
        if self.kind in {"row", "example"}:
            return tuple(range(1, ndim))
        output = machine.output_axis if self.axis is None else self.axis
        return (
            tuple(range(ndim)) if ndim < 2 else tuple(n for n in range(ndim) if n != output % ndim)
        )

    def groups(self, leaves: list[Leaf]) -> list[tuple[Any, list[int]]]:
        """Return the labels, and the indices of the leaves that share norms."""
        if self.kind in {"all", "example"}:
            return [(None, list(range(len(leaves))))]
        if self.kind != "groups":
            return [(None, [number]) for number in range(len(leaves))]
        labels = [self.label(leaf.path, None) for leaf in leaves]
        return [
            (one, [n for n, label in enumerate(labels) if label == one])
            for one in sorted(set(labels), key=repr)
        ]


@dataclass(frozen=True)
class Plan:
    """A rule as data."""

    kind: str = "rule"
    """``rule``, ``value``, ``halve``, ``chain`` or ``masked``."""
    scope: Scope = Scope("all")
    p: float = 2
    power: float = 0
    limit: Spec = ("constant", math.inf)
    curve: Any = "hard"
    policy: str = "propagate"
    bounds: tuple[Any, Any] = (None, None)
    parts: tuple[Plan, ...] = ()
    where: Callable[[Path, Any], bool] | None = None

    @property
    def bounded(self) -> bool:
        """Return whether the curve drops gradients above a bound of its own."""
        return isinstance(self.curve, tuple) and self.curve[0] == "reject above"

    @property
    def rejects(self) -> bool:
        """Return whether the curve drops gradients."""
        return self.curve == "reject" or self.bounded

    @property
    def stateful(self) -> bool:
        """Return whether the rule is stateful."""
        if self.parts:
            return any(part.stateful for part in self.parts)
        limits = self.limit[1].values() if self.limit[0] == "per group" else [self.limit]
        return self.kind == "rule" and any(limit[0] not in STATELESS for limit in limits)

    @property
    def independent_rows(self) -> bool:
        """Return whether the state of a leaf depends on its own gradients alone.

        Such a leaf may be absent at a step.
        """
        return (
            self.scope.kind in {"all", "leaf", "axes", "unit", "row", "entry"}
            and self.limit[0] in SEPARATE
        )


@dataclass
class Outcome:
    """The expected result of one step. A flag is ``None`` where rounding decides it."""

    leaves: list[Leaf]
    state: State = None
    measured: bool = False
    norms: list[Span] = field(default_factory=list)
    broken: list[Array] = field(default_factory=list)
    """Masks of non-finite norms."""
    limits: list[Span] = field(default_factory=list)
    thresholds: list[Span] | None = None
    """The norms above which the rule clips, if these are not the limits."""
    widest: Precision | None = None
    factors: list[Span] = field(default_factory=list)
    """NaN where a norm is not finite, except under a policy that replaces the gradient."""
    labels: list[Any] | None = None
    finite: bool = True
    clipped: bool | None = False
    skips: bool = False
    """True if the rule may skip a step."""
    skipped: bool | None = False
    parts: list[Outcome] = field(default_factory=list)


@dataclass
class Step:
    """The inputs of a step besides its gradients, and the reported limits."""

    machine: Machine
    params: dict[Path, Leaf] = field(default_factory=dict)
    loss: float | None = None
    reported: Any = None
    """The limits and factors in the report, as lists of arrays; in a chain, one pair a rule."""


def clip(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Take a step; ``None`` is the state before the first."""
    kinds = {"rule": _rule, "value": _value, "halve": _halve, "chain": _chain, "masked": _masked}
    return kinds[plan.kind](plan, leaves, state, inputs)


# Rules.


def _value(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Clip each element; NaN stays."""
    new = []
    for leaf in leaves:
        bounds, unit = [_cast(bound, leaf.dtype) for bound in plan.bounds], leaf.parts.precision
        small = [
            (np.abs(one) < unit.tiny) & (one != 0)
            for one in (leaf.parts.lo, leaf.parts.hi, *bounds)
        ]
        if inputs.machine.flush and any(one.any() for one in small):
            raise Inconclusive("a subnormal number, which a comparison may take for 0")
        old = leaf.parts[..., 0]
        new_ = old.put(leaf.signs != 0, leaf.signs * np.inf).map(
            lambda end: np.clip(end, *bounds), times=0
        )
        # A 0 may get the sign of the bound.
        zero = np.asarray((old.lo == 0) & np.bool_(0 in bounds))
        inside = (new_.lo == old.lo) & (new_.hi == old.hi) & ~leaf.bad & ~zero
        endless = np.isinf(new_.lo)
        parts = new_.put(endless, 0)[..., None]
        bad = leaf.bad & ((leaf.signs == 0) | endless)
        new.append(
            replace(
                leaf,
                parts=parts,
                bad=bad,
                signs=leaf.signs * endless,
                same=leaf.same & (inside | bad),
            )
        )
    return Outcome(new, state)


def _cast(bound: float, dtype: str) -> Array:
    """Return a bound rounded to a dtype."""
    return LONG(ml_dtypes.bfloat16(bound) if dtype == "bfloat16" else np.dtype(dtype).type(bound))


def _halve(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Halve each element; ∞ stays ∞."""
    halves = [_scaled(leaf, exact(0.5, _free(leaf.parts.precision)), ()) for leaf in leaves]
    return Outcome(
        [replace(half, signs=leaf.signs) for half, leaf in zip(halves, leaves, strict=True)], state
    )


def _chain(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Apply rules one after the other.

    A rule that sees a non-finite gradient keeps its state, and so do all rules after a skipped
    step.
    """
    states = state or [None] * len(plan.parts)
    parts: list[Outcome] = []
    for number, (part, old) in enumerate(zip(plan.parts, states, strict=True)):
        own = replace(inputs, reported=None if inputs.reported is None else inputs.reported[number])
        outcome = clip(part, leaves, old, own)
        if part.stateful and any(one.skips and one.skipped is None for one in parts):
            raise Inconclusive("whether the rule before skipped")
        if any(one.skips and one.skipped for one in parts):
            outcome.state = old
        parts.append(outcome)
        leaves = (
            outcome.leaves
            if number == len(states) - 1
            else [_in_range(leaf) for leaf in outcome.leaves]
        )
    measured = [part for part in parts if part.measured]
    finite = all(part.finite for part in measured)
    return Outcome(
        leaves,
        [part.state for part in parts] if finite else states,
        bool(measured),
        finite=finite,
        clipped=_any([part.clipped for part in measured]),
        skips=any(part.skips for part in measured),
        skipped=_any([part.skipped for part in measured if part.skips]),
        parts=parts,
    )


def _in_range(leaf: Leaf) -> Leaf:
    """Return the input of the next rule: elements beyond the range of their dtype are ∞."""
    sizes, largest = leaf.parts.size(), leaf.parts.precision.largest
    gone = sizes.lo > largest * (1 + 2 * LONG(leaf.parts.precision.ulp))
    if ((sizes.hi > largest) & ~gone).any() or (gone.any() and gone.shape[-1] > 1):
        raise Inconclusive("an entry near the largest number, or a complex one above it")
    if not gone.any():
        return leaf
    signs = np.where(gone[..., 0], np.sign(leaf.parts.lo[..., 0]), leaf.signs)
    return replace(leaf, parts=leaf.parts.put(gone, 0), bad=leaf.bad | gone[..., 0], signs=signs)


def _masked(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Clip some of the leaves; the others take the step even if these skip it."""
    numbers = [number for number, leaf in enumerate(leaves) if plan.where(leaf.path, None)]
    if not numbers:
        return Outcome(leaves, state)
    outcome = clip(plan.parts[0], [leaves[number] for number in numbers], state, inputs)
    new = list(leaves)
    for number, leaf in zip(numbers, outcome.leaves, strict=True):
        new[number] = leaf
    return replace(outcome, leaves=new, skips=False)


def _any(flags: list[bool | None]) -> bool | None:
    return True if True in flags else None if None in flags else False


def _rule(plan: Plan, leaves: list[Leaf], state: State, inputs: Step) -> Outcome:
    """Measure the norms, ask the limit, apply the curve, and scale."""
    machine, sound = inputs.machine, not any(leaf.bad.any() for leaf in leaves)
    own = leaves
    if plan.policy == "zero":
        own = [replace(leaf, bad=np.zeros_like(leaf.bad), signs=0.0) for leaf in leaves]
    norms, broken, sizes = norms_of(plan, own, machine)
    widest = machine.of_norm([leaf.dtype for leaf in leaves or inputs.params.values()])
    finite = sound and not any(bad.any() for bad in broken)
    out = Outcome(list(leaves), state, True, norms, broken, finite=finite, widest=widest)
    out.skips = plan.policy == "skip" or plan.rejects
    groups = plan.scope.groups(leaves)
    out.labels = [label for label, _ in groups] if plan.scope.kind == "groups" else None
    out.limits, new_state = _limits(plan, groups, leaves, out, sizes, state, inputs)
    out.state = new_state if finite and plan.stateful else state
    measures = plan.limit == ("constant", math.inf) and not plan.bounded
    for number, ((_, numbers), *pair, bad) in enumerate(
        zip(groups, norms, out.limits, broken, strict=True)
    ):
        n, limit = (one.within(_free(one.precision)) for one in pair)
        reported = None if inputs.reported is None else inputs.reported[1][number]
        factor = _in_reach(
            _factor(plan, n, limit, norms[number].precision.largest, reported), leaves
        )
        nothing = (bad & (plan.policy == "zero")) | (plan.policy == "skip" and not finite)
        factor = either(np.where(nothing, YES, NO), factor * 0, factor)
        spoiled = bad & (plan.policy in {"propagate", "raise"}) & (not measures)
        out.factors.append(factor.put(spoiled, np.nan))
        for one in numbers:
            axes = plan.scope.covered(len(leaves[one].shape), machine)
            new = _scaled(own[one], out.factors[-1], axes)
            out.leaves[one] = (
                replace(new, same=new.same & ~leaves[one].bad) if plan.policy == "zero" else new
            )
    out.clipped = _any([_differs(factor) for factor in out.factors])
    out.skipped = _left_out(plan, out)
    return out


def _limits(
    plan: Plan,
    groups: Any,
    leaves: list[Leaf],
    out: Outcome,
    sizes: list[Array],
    state: State,
    inputs: Step,
) -> tuple[list[Span], State]:
    """Ask the limit, with 1 in place of each non-finite norm."""
    calm = [n.put(bad, 1) for n, bad in zip(out.norms, out.broken, strict=True)]
    if plan.stateful and not leaves:
        return [unlimited(n) for n in calm], state
    ask = LimitInputs(
        [label for label, _ in groups],
        lambda: norms_of(plan, [inputs.params[leaf.path] for leaf in leaves], inputs.machine)[0],
        lambda: sizes, precision("float32", flush=inputs.machine.flush),
        inputs.loss, None if inputs.reported is None else inputs.reported[0],
        any(bad.any() for bad in out.broken), out.widest
    )  # fmt: skip
    if not plan.independent_rows or plan.scope.kind == "all":
        limits, state = step(plan.limit, calm, state, ask)
    else:
        paths, state = [leaf.path for leaf in leaves], state or {}
        limits, new = ask_each(
            [plan.limit] * len(calm), calm, [state.get(path) for path in paths], ask
        )
        state = state | dict(zip(paths, new, strict=True))
    out.thresholds = ask.thresholds
    return limits, state


def _factor(plan: Plan, n: Span, limit: Span, largest: float, reported: Array | None) -> Span:
    """Return the factors; read the report where rounding decides whether a gradient is dropped.

    A limit of at least the largest number of the norm's dtype never clips.
    """
    endless = np.where(limit.lo >= largest, YES, np.where(limit.hi >= largest, MAYBE, NO))
    bounded_limit = limit.put(endless == YES, 1).map(
        lambda end: np.broadcast_to(end, n.shape), times=0
    )
    factor = either(
        endless,
        exact(np.ones(n.shape), n.precision),
        _curve("hard" if plan.bounded else plan.curve, n, bounded_limit),
    )
    if plan.bounded:
        factor = either(
            above(n, exact(np.full(n.shape, plan.curve[1]), n.precision)), factor * 0, factor
        )
    if plan.rejects and reported is not None:
        factor = factor.put((factor.lo < factor.hi) & ((reported == 0) | (reported == 1)), reported)
    return factor


def _in_reach(factor: Span, leaves: list[Leaf]) -> Span:
    """Clamp factors to the range of their dtype, which is that of the norm or of a leaf.

    Factors below the normal numbers may be 0.
    """
    dtypes = {"float64" if BITS[leaf.dtype] > 24 else "float32" for leaf in leaves}
    largest = min((float(np.finfo(dtype).max) for dtype in dtypes), default=math.inf)
    normal = max((float(np.finfo(dtype).smallest_normal) for dtype in dtypes), default=0.0)
    lo = np.where(factor.lo < normal, 0 * factor.lo, np.minimum(factor.lo, largest))
    hi = np.minimum(factor.hi, largest if len(dtypes) == 1 else math.inf)
    return Span(lo, hi + normal * 2.0**-23 * ((hi < normal) & (hi > 0)), factor.precision)


def _differs(factor: Span) -> bool | None:
    """Return whether one of the factors is not 1."""
    if ((factor.hi < 1) | (factor.lo > 1) | np.isnan(factor.lo)).any():
        return True
    return None if ((factor.lo != 1) | (factor.hi != 1)).any() else False


def _left_out(plan: Plan, out: Outcome) -> bool | None:
    if plan.policy == "skip" and not out.finite:
        return True
    if not plan.rejects or not any(factor.lo.size for factor in out.factors):
        return False
    if all((factor.hi == 0).all() for factor in out.factors):
        return True
    return None if all((factor.lo == 0).all() for factor in out.factors) else False


def _free(unit: Precision) -> Precision:
    """Return the precision without a range: only results must be in range."""
    return Precision(unit.ulp, 0.0, math.inf)


def _scaled(leaf: Leaf, factor: Span, axes: tuple[int, ...]) -> Leaf:
    """Multiply a leaf by a factor; a NaN factor makes every element NaN."""
    unit = leaf.parts.precision
    kept = factor.map(lambda end: np.broadcast_to(np.expand_dims(end, axes), leaf.shape), times=0)
    spoiled, ones = np.isnan(kept.lo), (kept.lo == 1) & (kept.hi == 1)
    product = leaf.parts.within(_free(unit)) * kept.put(spoiled, 0)[..., None]
    rounded = product.within(unit._replace(largest=math.inf)).rounded().within(unit)
    parts = either(np.where(ones, YES, NO)[..., None], leaf.parts, rounded)
    bad = (leaf.bad & (kept.hi != 0)) | spoiled
    return replace(
        leaf, parts=parts, bad=bad, signs=leaf.signs * ones, same=leaf.same & ones, integer=None
    )


def summed(plan: Plan, leaves: list[Leaf], inputs: Step) -> Outcome:
    """Clip per-example gradients, and sum them along the first axis."""
    out = clip(plan, leaves, None, inputs)
    new = []
    for leaf in out.leaves:
        parts = leaf.parts
        sizes, added = (
            parts.size().hi.sum(axis=0),
            np.finfo(np.float64 if BITS[leaf.dtype] > 24 else np.float32),
        )
        if (sizes > added.max).any():
            # Partial sums may contain ∞ - ∞.
            raise Inconclusive("a sum near the largest number")
        slack = (len(leaf.bad) + 2) * sizes * LONG(added.eps)
        unit = parts.precision._replace(largest=math.inf)
        ends = Span(parts.lo.sum(axis=0) - slack, parts.hi.sum(axis=0) + slack, unit).rounded()
        # Sums beyond the range are ∞.
        ends = Span(ends.lo, ends.hi, parts.precision)
        new.append(replace(leaf, parts=ends, bad=leaf.bad.any(axis=0), same=np.bool_(False)))
    return replace(out, leaves=new)


# Norms.


def norms_of(
    plan: Plan, leaves: list[Leaf], machine: Machine
) -> tuple[list[Span], list[Array], list[Array]]:
    """Return the norms, which of them are not finite, and how many elements each covers.

    Raises
    ------
    Inconclusive
        If rounding decides whether a norm overflows.
    """
    norms, broken, sizes = [], [], []
    widest = machine.of_norm([leaf.dtype for leaf in leaves])
    for _, numbers in plan.scope.groups(leaves):
        members = [leaves[number] for number in numbers]
        unit = machine.of_norm([leaf.dtype for leaf in members])
        over = [plan.scope.covered(len(leaf.shape), machine) for leaf in members]
        size = LONG(
            sum(
                math.prod(leaf.shape[a] for a in one)
                for leaf, one in zip(members, over, strict=True)
            )
        )
        norm = _norm(plan.p, members, over, unit, machine)
        norm = norm if not plan.power else (norm / max(size, 1) ** LONG(plan.power)).rounded(16)
        bad = [leaf.bad.any(axis=one) for leaf, one in zip(members, over, strict=True)]
        spoiled = np.logical_or.reduce(bad) if bad else np.bool_(False)
        if (np.isinf(norm.hi) & (norm.lo < unit.largest) & ~spoiled).any():
            raise Inconclusive("a norm near the largest number")
        if widest.ulp < unit.ulp and ((norm.hi > unit.largest / 16) & ~spoiled).any():
            raise Inconclusive("a norm that only some of the norms' dtypes can hold")
        broken.append(np.asarray(spoiled | np.isinf(norm.hi)))
        norms.append(norm)
        sizes.append(size)
    return norms, broken, sizes


def _norm(
    p: float, members: list[Leaf], over: list[tuple[int, ...]], unit: Precision, machine: Machine
) -> Span:
    if not members:
        return exact(0, unit)
    spans = [leaf.sizes() for leaf in members]
    ends = []
    for end in ("lo", "hi"):
        tops = [
            np.max(getattr(s, end), axis=one, initial=0) for s, one in zip(spans, over, strict=True)
        ]
        top = np.maximum.reduce(tops)
        if p == math.inf:
            ends.append(top)
            continue
        safe = np.where(top > 0, top, 1)
        sums = []
        for span, one in zip(spans, over, strict=True):
            kept = np.expand_dims(safe, one)
            sums.append((np.asarray(getattr(span, end) / kept) ** LONG(p)).sum(axis=one))
        ends.append(safe * np.add.reduce(sums) ** (1 / LONG(p)))
    norm = Span(np.asarray(ends[0]), np.asarray(ends[1]), unit)
    modulus = 9 if any(leaf.parts.shape[-1] > 1 for leaf in members) else 0
    # Each modulus is rounded by itself.
    if p == 1 and modulus:
        lost = sum(math.prod(leaf.shape) for leaf in members) * LONG(unit.tiny)
        norm = Span(
            np.where(norm.lo > 0, np.maximum(norm.lo - lost, 0), 0),
            norm.hi + lost * (norm.hi > 0),
            unit,
        )
    # In double precision, libraries may add sequentially: half a rounding for each element.
    added = 0.5 * max(math.prod(leaf.shape) for leaf in members) if unit.ulp < 2**-30 else 0
    loose = norm.rounded({1: 9 + 2 * added, 2: 9 + added, math.inf: modulus}.get(p, 32 + added))
    sharp = _is_exact(p, members, over, norm) & np.isfinite(loose.hi) & machine.exact
    return Span(np.where(sharp, norm.lo, loose.lo), np.where(sharp, norm.hi, loose.hi), unit)


def _is_exact(p: float, members: list[Leaf], over: list[tuple[int, ...]], norm: Span) -> Array:
    """Return which norms are exact in every order of summation.

    These are the norms of small integers, times a power of two.
    """
    if (
        any(leaf.parts.shape[-1] > 1 for leaf in members)
        or (norm.lo != norm.hi).any()
        or p not in {1, 2}
    ):
        return np.bool_(False)
    root = np.asarray(norm.lo)
    usual = ((root > 1e-10) & (root < 1e15)).all() and not any(leaf.bad.any() for leaf in members)
    unit = np.exp2(np.floor(np.log2(np.where(usual, root, 1))) - 11)
    whole = [
        ((leaf.parts.lo[..., 0] / np.expand_dims(unit, one)) % 1 == 0).all(axis=one)
        for leaf, one in zip(members, over, strict=True)
    ]
    return usual & np.logical_and.reduce(whole) & ((root / unit) % 1 == 0)


# Curves.


def _curve(curve: Any, n: Span, limit: Span) -> Span:
    """Return the factors that a curve gives to norms and limits."""
    one, zero = exact(np.ones(n.shape), n.precision), exact(np.zeros(n.shape), n.precision)
    if curve == "hard":
        return either(above(n, limit), smaller(limit / n, one).within(n.precision), one)
    if curve == "reject":
        return either(above(n, limit), zero, one)
    if curve == "normalize":
        return either(above(n, zero), limit / n, one)
    if curve == "root":
        inner, lost = (
            _curve("hard", n, limit),
            2.0**-1022 if n.precision.ulp < 2**-30 else 2.0**-126,
        )
        return Span(
            np.maximum(inner.lo - lost, 0), inner.hi + lost * (inner.hi < 1), inner.precision
        ).sqrt()
    if isinstance(curve, tuple):
        kind, gamma = curve
        return limit / (
            n + (gamma if kind == "regularized" else exact(gamma, n.precision) / (n + gamma))
        )
    # These curves depend on limit/norm alone, and increase with it.
    ratio = limit / n
    functions = {
        "soft": lambda x: np.where(np.isinf(x), 1, x / (1 + np.where(np.isinf(x), 0, x))),
        "smooth": lambda x: np.where(x > 1e30, 1, x / np.sqrt(1 + np.where(x > 1e30, 0, x) ** 2)),
        "tanh": lambda x: np.where(
            x > 1e15, 1, x * np.tanh(1 / np.where((x > 0) & (x < 1e15), x, 1))
        ),
    }
    factor = (
        ratio.map(functions[curve]).map(lambda x: np.clip(x, 0, 1), times=0).within(n.precision)
    )
    return either(above(n, zero), factor, one)
