"""What rules do to gradients, by their documentation and their papers; imports nothing of uniclip.

Numbers are intervals of NumPy's long double. A `Span` holds every value that a computation in float32 (or float64), in
whatever order, may come to: each operation widens it by a few units in the last place of that precision. So tolerances
follow from the conditioning of what is computed, and a comparison of two spans has three answers: yes, no, and maybe.
NumPy's floating-point warnings are to be off: ∞ and 0/0 are handled.

A rule is plain data here (`Plan`). Where NaN and ∞ are, what comes out is known without arithmetic, so entries that are
not finite are marked, and the spans hold 0 in their place.
"""
# ruff: noqa: EM101, EM102, TRY003, N818 - what stops a case is caught and counted

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
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
    """Return the precision of a floating-point dtype, of a complex one that of its parts."""
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
        """Return what so many roundings may make of it; an exact 0 stays one."""
        ulp, tiny, largest = self.precision
        if not times:
            return self
        ends = []
        for end, by in ((self.lo, -times * ulp), (self.hi, times * ulp)):
            size = np.abs(end)
            ends.append(end + size * by + math.copysign(tiny, by) * ((size > 0) & (size < tiny / ulp)))
        lo, hi = ends
        if math.isfinite(largest) and (hi > largest).any():
            lo, hi = np.minimum(lo, largest), np.where(hi > largest, np.inf, hi)
        return Span(lo, hi, self.precision)

    def __add__(self, other: Any) -> Span:
        other = other if isinstance(other, Span) else exact(other, self.precision)
        return Span(self.lo + other.lo, self.hi + other.hi, self.precision.wider(other.precision)).rounded()

    def __sub__(self, other: Any) -> Span:
        """Return the difference; its rounding is that of what is subtracted."""
        other = other if isinstance(other, Span) else exact(other, self.precision)
        return Span(self.lo - other.hi, self.hi - other.lo, self.precision.wider(other.precision)).rounded()

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


# Limits.

Spec: TypeAlias = tuple[Any, ...]
State: TypeAlias = Any
Answer: TypeAlias = tuple[list[Span], State]
CAP = 1e18
"""The largest norm that a statistic of squares takes in."""


class Inconclusive(Exception):
    """What comes next depends on how a number is rounded."""


@dataclass
class Given:
    """What a limit may ask for."""

    labels: list[Any]
    reference: Callable[[], list[Span]]
    sizes: Callable[[], list[Array]]
    single: Precision
    """That of float32, in which steps are counted and losses are held."""
    loss: float | None = None
    seen: list[Array] | None = None
    """The limits that were reported: they say which way a step went that could go either way."""
    broken: bool = False
    """Whether one of the norms is not finite."""
    widest: Precision | None = None
    """That of the most precise leaf: the norms of a step may all have it, or each its own."""
    thresholds: list[Span] | None = None
    """What the limit says the norms are compared with, if that is not the limits."""

    def decided(self, number: int, limited: Array) -> Array:
        """Return whether norms are limited; where that depends on rounding, ask the report."""
        unsure = limited == MAYBE
        if not unsure.any() or self.seen is None:
            return limited
        seen = np.broadcast_to(self.seen[number], np.shape(limited))
        return np.where(unsure, np.where(seen < largest_of(seen), YES, NO), limited)

    def only(self, number: int) -> Given:
        """Return the same for one of the norms."""
        one = lambda some: lambda: [some()[number]]
        seen = None if self.seen is None else [self.seen[number]]
        labels = [self.labels[number]]
        return replace(self, labels=labels, reference=one(self.reference), sizes=one(self.sizes), seen=seen)


def largest_of(array: Array) -> float:
    """Return the largest number of an array's dtype: a limit as large limits nothing."""
    return float(np.finfo(np.asarray(array).dtype).max)


def unlimited(like: Span) -> Span:
    """Return a limit for norms like these that limits nothing."""
    endless = np.full(like.shape, np.inf, dtype=LONG)
    return Span(endless, endless, like.precision)


def constant(value: float, precision: Precision, widest: Precision | None = None) -> Span:
    """Return a limit in the precision of its norm: the nearest number that it can hold, the largest at most."""
    if value == math.inf:
        return exact(math.inf, precision)
    near = LONG(np.float32(min(value, precision.largest)) if precision.ulp > 2**-30 else np.float64(value))
    low = near if near >= precision.tiny / precision.ulp else max(near - precision.tiny, 0)
    high = near if low == near else near + precision.tiny
    if widest is not None and widest.ulp < precision.ulp:
        if value > precision.largest / 16:
            raise Inconclusive("a limit that only some of the norms can hold")
        low, high = min(low, LONG(value)), max(high, LONG(value))
    return Span(LONG(low), LONG(high), precision)


def _positive(n: Span) -> Array:
    """Return whether norms are above 0."""
    if (unsure := (n.lo <= 0) & (n.hi > 0)).any():
        raise Inconclusive(f"{int(unsure.sum())} norms that may be 0")
    return n.lo > 0


def _schedule(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    start, change, ratio = spec[1:]
    steps = 0 if state is None else state
    value = start + change * ratio**steps
    limits = [exact(value, given.single.wider(n.precision)).rounded(16) for n in norms]
    return [Span(limit.lo, limit.hi, n.precision) for limit, n in zip(limits, norms, strict=True)], steps + 1


def _relative(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    ratio, eps = spec[1:]
    return [larger(w, exact(eps, w.precision).rounded()) * ratio for w in given.reference()], state


def _trust(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    lr, trust, decay = spec[1:]
    limits = []
    for n, w in zip(norms, given.reference(), strict=True):
        share = exact(1, n.precision) / (w * decay / n + 1) if decay else exact(1, n.precision)
        limit = w * trust * share / lr
        some = np.where(w.lo > 0, YES, np.where(w.hi > 0, MAYBE, NO))
        limit = either(some, limit, unlimited(n))
        # The limit of a norm of 0 says nothing.
        limits.append(Span(np.where(n.lo > 0, limit.lo, 0), np.where(n.lo > 0, limit.hi, np.inf), n.precision))
    return limits, state


def _split(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    joint, by_size = spec[1:]
    sizes = given.sizes() if by_size else [1] * len(norms)
    shares = [LONG(size) / LONG(sum(sizes)) for size in sizes]
    pairs = zip(norms, shares, strict=True)
    return [exact(joint * np.sqrt(share), n.precision).rounded(8) for n, share in pairs], state


def _per_group(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    limits, states, thresholds = [], [], []
    for number, (n, label) in enumerate(zip(norms, given.labels, strict=True)):
        own = given.only(number)
        (limit,), new = step(spec[1][label], [n], None if state is None else state[number], own)
        limits.append(limit)
        states.append(new)
        thresholds.append(own.thresholds)
    if any(one is not None for one in thresholds):
        given.thresholds = [limit if one is None else one[0] for limit, one in zip(limits, thresholds, strict=True)]
    return limits, states


def _percentile(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    q, window, filled = spec[1:]
    if state is None:
        state = [[] for _ in norms]
    pairs = zip(norms, state, strict=True)
    histories = [([n, *old] if old or not filled else [n] * window)[:window] for n, old in pairs]
    return [_at_percentile(history, q) for history in histories], histories


def _percentile_of_all(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    state = [[n, *old] for n, old in zip(norms, state or [[] for _ in norms], strict=True)]
    limits = []
    for history in state:
        coarse = [Span(n.lo * LONG(0.994), n.hi * LONG(1.006) + LONG(2e-45), n.precision) for n in history]
        limits.append(_at_percentile(coarse, spec[1]))
    return limits, state


def _at_percentile(history: list[Span], q: float) -> Span:
    """Return a percentile, in between two numbers linearly."""
    lows, highs = (np.sort(np.stack([getattr(n, end) for n in history]), axis=0) for end in ("lo", "hi"))
    position, unit = LONG(len(history) - 1) * LONG(q) / 100, history[0].precision
    error = 8 * LONG(unit.ulp) * position
    near = abs(position - round(float(position))) <= 2e-6 * (1 + position)  # which are taken for whole numbers
    error = max(error, abs(position - round(float(position)))) if near else error
    ends = []
    for values, exactly in ((lows, position - error), (highs, position + error)):
        at = min(max(exactly, LONG(0)), LONG(len(history) - 1))
        low = int(np.floor(at))
        upper = values[min(low + 1, len(history) - 1)]
        ends.append(values[low] + (at - low) * (upper - values[low]))
    scale = Span(ends[0], ends[1], unit).rounded(8)
    # lower + share·(upper - lower) loses what upper - lower does.
    top = highs[min(int(np.ceil(position + error)), len(history) - 1)]
    lost = np.where(ends[0] < ends[1], 2 * LONG(unit.ulp) * top * (error > 0), 0)
    return Span(scale.lo - lost, scale.hi + lost, unit)


def _quantile(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    quantile, rate, start, low, high = spec[1:]
    limits = state or [exact(start, n.precision).rounded() for n in norms]
    moved = []
    for n, limit in zip(norms, limits, strict=True):
        answer = within(n, limit)
        if not answer.size:
            moved.append(limit)
            continue
        shares = [LONG(count) / answer.size for count in ((answer == YES).sum(), (answer != NO).sum())]
        by = Span(-rate * (shares[1] - quantile), -rate * (shares[0] - quantile), n.precision).rounded()
        low_, high_ = (constant(end, n.precision, given.widest) for end in (low, high))
        moved.append(smaller(larger(limit * by.each(np.exp), low_), high_))
    return limits, moved


def _ema(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    ratio, decay, warmup, warmup_norm = spec[1:]
    averages, count = state or ([unlimited(n) for n in norms], 0)
    limits, new = [], []
    joint = _joint(norms) if count < warmup else None
    for n, average in zip(norms, averages, strict=True):
        unknown = np.isinf(average.lo)
        if joint is None:
            limit = either(np.where(unknown, NO, YES), average * ratio, unlimited(n))
        else:
            above = 1 - within(joint, exact(warmup_norm, n.precision).rounded())
            above = np.where(above < 0, MAYBE, above)  # 1 - MAYBE
            limit = either(above, n * (exact(warmup_norm, n.precision) / joint), unlimited(n))
            if given.broken:  # there is no joint norm to speak of
                limit = Span(np.zeros(n.shape, LONG), unlimited(n).hi, n.precision)
        left, positive = smaller(n, limit), _positive(n)
        first = unknown | (joint is not None)
        usual = _finite(average) * decay + left * (1 - decay)
        moved = either(np.where(first, YES, NO), smaller(left, average), usual)
        limits.append(limit)
        new.append(either(np.where(first & ~positive, YES, NO), average, moved))
    return limits, (new, count + 1)


def _finite(span: Span) -> Span:
    return Span(np.where(np.isinf(span.lo), 0, span.lo), np.where(np.isinf(span.lo), 0, span.hi), span.precision)


def _joint(norms: list[Span]) -> Span:
    """Return the norm of all norms."""
    flat = Span(
        np.concatenate([np.ravel(n.lo) for n in norms]),
        np.concatenate([np.ravel(n.hi) for n in norms]),
        norms[0].precision,
    )
    unit = norms[0].precision
    for n in norms:
        unit = unit.wider(n.precision)
    free = Precision(unit.ulp, unit.tiny, math.inf)  # it is no result
    return Span(np.sqrt((flat.lo**2).sum()), np.sqrt((flat.hi**2).sum()), free).rounded(12)


def _second_moment(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    factor, decay, warmup = spec[1:]
    moments, count = state or ([n * 0 for n in norms], 0)
    limits, new = [], []
    for number, (n, v) in enumerate(zip(norms, moments, strict=True)):
        some = np.where(v.lo > 0, YES, np.where(v.hi > 0, MAYBE, NO))
        some = np.where(count < warmup, NO, some)
        limit = either(given.decided(number, some), (v * factor).sqrt(), unlimited(n))
        left = smaller(smaller(n, limit), exact(CAP, n.precision))
        limits.append(limit)
        new.append(v * decay + left.square() * (1 - decay))
    return limits, (new, count + 1)


def _mean_over_rms(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    mean_decay, square_decay = (LONG(decay) for decay in spec[1:])
    means, squares, count = state or ([n * 0 for n in norms], [n * 0 for n in norms], 0)
    limits, new_means, new_squares = [], [], []
    for norm, mean, square in zip(norms, means, squares, strict=True):
        n = smaller(norm, exact(CAP, norm.precision))
        new_means.append(mean * mean_decay + n * (1 - mean_decay))
        new_squares.append(square * square_decay + n.square() * (1 - square_decay))
        begun = [
            exact(1, n.precision) - exact(decay, n.precision).rounded(1).power(count + 1)  # decays are rounded, too
            for decay in (mean_decay, square_decay)
        ]
        rms = (new_squares[-1] / begun[1]).sqrt()
        limits.append(new_means[-1] / begun[0] / (rms + 1e-8))
    return limits, (new_means, new_squares, count + 1)


def _z_score(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    z, decay, target, warmup, eps, clip_factor, same = spec[1:]
    limits, new, given.thresholds = [], [], []
    for number, norm in enumerate(norms):
        n = smaller(norm, exact(CAP, norm.precision))
        history, mean, variance = ([], None, None) if state is None else state[number]
        if len(history) < warmup:
            history = [*history, n]
            mean = total(history) / len(history)
            variance = total([(one - mean).square() for one in history]) / len(history)
            limits.append(unlimited(n))
            given.thresholds.append(unlimited(n))
        else:
            std = variance.sqrt()
            excess, bound = n - mean, (std + eps) * z
            spike = given.decided(
                number, np.where(excess.lo > bound.hi, YES, np.where(excess.hi <= bound.lo, NO, MAYBE))
            )
            goal = {
                "mean": lambda: mean,
                "threshold": lambda: mean + std * z,
                "reciprocal": lambda: (mean + std * z * (bound / larger(excess, bound))) * clip_factor,
            }[target]()
            limits.append(either(spike, goal, unlimited(n)))
            given.thresholds.append(mean + bound)
            left = either(spike, smaller(goal, n), n)
            moved = mean * decay + left * (1 - decay)
            spread = variance * decay + (left - moved).square() * (1 - decay)
            stays = spike if same else np.asarray(NO)
            mean, variance = either(stays, mean, moved), either(stays, variance, spread)
        new.append((history, mean, variance))
    return limits, new


def _log_z_score(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    z, decay = spec[1:]
    limits, new, given.thresholds = [], [], []
    for number, n in enumerate(norms):
        zero = exact(np.zeros(n.shape), n.precision)
        mean, variance, count = (zero, zero, np.zeros(n.shape)) if state is None else state[number]
        positive = _positive(n)
        weight = np.where(positive, np.maximum(LONG(1) / (count + 1), 1 - LONG(decay)), 0)
        one = exact(1, n.precision)
        log = Span(np.where(positive, n.lo, one.lo), np.where(positive, n.hi, one.hi), n.precision).each(np.log)
        change = log - mean
        mean = either(np.where(positive, YES, NO), mean * (1 - weight) + log * weight, mean)
        variance = either(np.where(positive, YES, NO), (variance + change.square() * weight) * (1 - weight), variance)
        std = larger(variance, exact(1e-8, n.precision)).sqrt()
        excess, bound = log - mean, std * z
        spike = np.where(excess.lo > bound.hi, YES, np.where(excess.hi <= bound.lo, NO, MAYBE))
        spike = given.decided(number, np.where(positive, spike, NO))
        limits.append(either(spike, mean.each(np.exp), unlimited(n)))
        given.thresholds.append(_exp(mean + bound))
        new.append((mean, variance, count + positive))
    return limits, new


def _exp(log: Span) -> Span:
    """Return exp(log), whose error is that of a difference: relative to it, not to the result."""
    top = LONG(11000)
    return Span(np.exp(np.minimum(log.lo, top)), np.exp(np.minimum(log.hi, top)), log.precision).rounded(16)


def _rolling(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    z, window, warmup = spec[1:]
    histories, losses = state or ([[] for _ in norms], [])
    limits = [_threshold(history, z, warmup, n) for history, n in zip(histories, norms, strict=True)]
    given.thresholds = limits
    if given.loss is not None:
        with np.errstate(over="ignore"):
            loss = exact(np.float32(given.loss), given.single)
        bound = _threshold(losses, z, warmup, loss)
        calm = np.asarray(YES if len(losses) < warmup else NO)
        if np.isfinite(loss.lo) and len(losses) >= warmup:
            calm = within(loss, bound)
        limits = [either(np.broadcast_to(calm, n.shape), limit, n * 0) for n, limit in zip(norms, limits, strict=True)]
        losses = [loss, *losses][:window] if np.isfinite(loss.lo) else losses
    return limits, ([[n, *old][:window] for n, old in zip(norms, histories, strict=True)], losses)


def _threshold(history: list[Span], z: float, warmup: int, like: Span) -> Span:
    """Return so many standard deviations above the mean, in units of the largest number: no square leaves the range."""
    if len(history) < warmup:
        return unlimited(like)
    top = np.maximum.reduce([np.maximum(np.abs(n.lo), np.abs(n.hi)) for n in history])
    unit = np.exp2(np.floor(np.log2(np.where(top > 0, top, 1))))
    scaled = [Span(n.lo / unit, n.hi / unit, n.precision) for n in history]
    mean = _divided(total(scaled), len(history))
    square = total([(n - mean).square() for n in scaled]) / (len(history) - 1)
    # What rounding may make of the mean of equal norms is no deviation: count·eps·|mean| is allowed.
    bound = mean + square.sqrt() * z + mean.size() * (len(history) * 2 * mean.precision.ulp)
    return Span(bound.lo * unit, bound.hi * unit, bound.precision).rounded(1)


def _divided(span: Span, by: int) -> Span:
    return Span(span.lo / by, span.hi / by, span.precision).rounded()  # losses may be negative


_STEPS: dict[str, Callable[[Spec, list[Span], State, Given], Answer]] = {
    "constant": lambda spec, norms, state, given: (
        [constant(spec[1], n.precision, given.widest) for n in norms],
        state,
    ),
    "schedule": _schedule,
    "relative": _relative,
    "trust": _trust,
    "split": _split,
    "per group": _per_group,
    "percentile": _percentile,
    "percentile of all": _percentile_of_all,
    "quantile": _quantile,
    "ema": _ema,
    "second moment": _second_moment,
    "mean over rms": _mean_over_rms,
    "z-score": _z_score,
    "log z-score": _log_z_score,
    "rolling z-score": _rolling,
}


def step(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    """Return the limits of norms, and the state after a step that was finite; ``None`` is the one before the first."""
    return _STEPS[spec[0]](spec, norms, state, given)


# Rules.

Path = tuple[Any, ...]
BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}
FORGETFUL = {"constant", "relative", "trust", "split"}
"""The limits without memory."""
APART = {"percentile", "percentile of all", "second moment", "mean over rms", "z-score", "log z-score"}
"""The limits with memory in which each norm has its own."""


@dataclass(frozen=True)
class Machine:
    """What the framework does with numbers, and with a weight's axes."""

    flush: bool = False
    """Whether subnormal numbers may become 0."""
    default_float: str = "float64"
    output_axis: int = -1
    exact: bool = True
    """Whether the root of a square is exact."""

    def of_norm(self, dtypes: list[str]) -> Precision:
        """Return the precision of the norm of leaves."""
        return precision("float64" if any(BITS[dtype] > 24 for dtype in dtypes) else "float32", flush=self.flush)


@dataclass(frozen=True)
class Leaf:
    """A gradient: real and imaginary parts along a new last axis."""

    path: Path
    dtype: str
    parts: Span
    bad: Array
    """Which entries are not finite."""
    signs: Array = 0.0
    """Where entries are not finite, the sign of ∞, 0 for NaN."""
    same: Array = field(default_factory=lambda: np.bool_(True))
    """Which entries are, bit for bit, what was given."""
    integer: str | None = None
    """The dtype of integers that no rule of norms has made floating-point numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gradient."""
        return self.parts.shape[:-1]

    def sizes(self) -> Span:
        """Return the modulus of each entry."""
        if self.parts.shape[-1] == 1:
            return self.parts[..., 0].size()
        sizes = self.parts.size()
        return Span(np.sqrt((sizes.lo**2).sum(-1)), np.sqrt((sizes.hi**2).sum(-1)), sizes.precision)


def leaf_of(path: Path, array: Array, dtype: str, machine: Machine) -> Leaf:
    """Return a leaf of an array of NumPy; integers are read as the framework's default float."""
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
    """Which entries share a norm."""

    kind: str
    axes: tuple[int, ...] = ()
    axis: int | None = None
    label: Callable[[Path, Any], Any] | None = None

    def covered(self, ndim: int, machine: Machine) -> tuple[int, ...] | None:
        """Return the axes that a norm covers, ``None`` for all."""
        if self.kind in {"all", "leaf", "groups"}:
            return None
        if self.kind == "entry":
            return ()
        if self.kind == "axes":
            return tuple(sorted({axis % ndim for axis in self.axes}))
        if self.kind in {"row", "example"}:
            return tuple(range(1, ndim))
        output = machine.output_axis if self.axis is None else self.axis
        return tuple(range(ndim)) if ndim < 2 else tuple(n for n in range(ndim) if n != output % ndim)

    def groups(self, leaves: list[Leaf]) -> list[tuple[Any, list[int]]]:
        """Return labels and the numbers of the leaves that share norms."""
        if self.kind in {"all", "example"}:
            return [(None, list(range(len(leaves))))]
        if self.kind != "groups":
            return [(None, [number]) for number in range(len(leaves))]
        labels = [self.label(leaf.path, None) for leaf in leaves]
        return [(one, [n for n, label in enumerate(labels) if label == one]) for one in sorted(set(labels), key=repr)]


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
    def remembers(self) -> bool:
        """Whether a state is kept from step to step."""
        if self.parts:
            return any(part.remembers for part in self.parts)
        limits = self.limit[1].values() if self.limit[0] == "per group" else [self.limit]
        return self.kind == "rule" and any(limit[0] not in FORGETFUL for limit in limits)

    @property
    def rows_apart(self) -> bool:
        """Whether what is known of a leaf depends on its own gradients alone, so that one may be absent at a step."""
        return self.scope.kind in {"all", "leaf", "axes", "unit", "row", "entry"} and self.limit[0] in APART


@dataclass
class Outcome:
    """What a step comes to. A flag is ``None`` where rounding decides it."""

    leaves: list[Leaf]
    state: State = None
    measured: bool = False
    norms: list[Span] = field(default_factory=list)
    broken: list[Array] = field(default_factory=list)
    """Which norms are not finite."""
    limits: list[Span] = field(default_factory=list)
    thresholds: list[Span] | None = None
    """The norms above which is clipped, where these are not the limits."""
    widest: Precision | None = None
    factors: list[Span] = field(default_factory=list)
    """NaN where the norm is not finite and the policy does not say otherwise."""
    labels: list[Any] | None = None
    finite: bool = True
    clipped: bool | None = False
    skips: bool = False
    """Whether the rule may leave out a step."""
    skipped: bool | None = False
    parts: list[Outcome] = field(default_factory=list)


@dataclass
class Step:
    """What a caller adds to a step, and what was reported of it."""

    machine: Machine
    params: dict[Path, Leaf] = field(default_factory=dict)
    loss: float | None = None
    seen: Any = None
    """The limits and the factors that were reported, as lists of arrays; of a chain, a list with those of each rule."""


def clip(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Take a step; ``None`` is the state before the first."""
    return {"rule": _rule, "value": _value, "halve": _halve, "chain": _chain, "masked": _masked}[plan.kind](
        plan, leaves, state, given
    )


# Rules.


def _value(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Clip each entry; NaN stays."""
    new = []
    for leaf in leaves:
        bounds, unit = [_cast(bound, leaf.dtype) for bound in plan.bounds], leaf.parts.precision
        ends = [
            np.clip(np.where(leaf.signs == 0, end[..., 0], leaf.signs * np.inf), *bounds)
            for end in (leaf.parts.lo, leaf.parts.hi)
        ]
        zero = np.asarray((leaf.parts.lo[..., 0] == 0) & np.bool_(0 in bounds))  # its sign may be that of the bound
        inside = (ends[0] == leaf.parts.lo[..., 0]) & (ends[1] == leaf.parts.hi[..., 0]) & ~leaf.bad & ~zero
        ends = _flushed(ends, leaf, bounds) if given.machine.flush else ends
        endless = np.isinf(ends[0])
        parts = Span(*(np.where(endless, 0, end)[..., None] for end in ends), unit)
        bad = leaf.bad & ((leaf.signs == 0) | endless)
        new.append(replace(leaf, parts=parts, bad=bad, signs=leaf.signs * endless, same=leaf.same & (inside | bad)))
    return Outcome(new, state)


def _flushed(ends: list[Array], leaf: Leaf, bounds: list[Array]) -> list[Array]:
    """Allow 0, the entry and the bounds where these are subnormal: a comparison takes them for equal."""
    tiny = leaf.parts.precision.tiny
    near = (np.abs(ends[0]) < tiny) & (np.abs(ends[1]) < tiny)
    some = [leaf.parts.lo[..., 0], leaf.parts.hi[..., 0], *ends, *(one for one in bounds if abs(one) < tiny)]
    some = np.broadcast_arrays(*[np.where(np.abs(one) < tiny, one, 0) for one in some])
    return [
        np.where(near, np.minimum.reduce(some), ends[0]),
        np.where(near, np.maximum.reduce(some), ends[1]),
    ]


def _cast(bound: float, dtype: str) -> Array:
    """Return a bound as the dtype holds it."""
    return LONG(ml_dtypes.bfloat16(bound) if dtype == "bfloat16" else np.dtype(dtype).type(bound))


def _halve(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Halve each entry; ∞ stays what it is."""
    halves = [_scaled(leaf, exact(0.5, _free(leaf.parts.precision)), ()) for leaf in leaves]
    return Outcome([replace(half, signs=leaf.signs) for half, leaf in zip(halves, leaves, strict=True)], state)


def _chain(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """One after the other; states stay where one met what is not finite, and after one that skips."""
    states = state or [None] * len(plan.parts)
    parts: list[Outcome] = []
    for number, (part, old) in enumerate(zip(plan.parts, states, strict=True)):
        own = replace(given, seen=None if given.seen is None else given.seen[number])
        outcome = clip(part, leaves, old, own)
        if part.remembers and any(one.skips and one.skipped is None for one in parts):
            raise Inconclusive("whether the rule before skipped")
        if any(one.skips and one.skipped for one in parts):
            outcome.state = old
        parts.append(outcome)
        leaves = outcome.leaves if number == len(states) - 1 else [_in_range(leaf) for leaf in outcome.leaves]
    measured = [part for part in parts if part.measured]
    finite = all(part.finite for part in measured)
    return Outcome(
        leaves, [part.state for part in parts] if finite else states, bool(measured),
        finite=finite, clipped=_any([part.clipped for part in measured]), skips=any(part.skips for part in measured),
        skipped=_any([part.skipped for part in measured if part.skips]), parts=parts
    )  # fmt: skip


def _in_range(leaf: Leaf) -> Leaf:
    """Return what the next rule gets: ∞ where an entry is beyond its dtype."""
    sizes, largest = leaf.parts.size(), leaf.parts.precision.largest
    gone = sizes.lo > largest * (1 + 2 * LONG(leaf.parts.precision.ulp))
    if ((sizes.hi > largest) & ~gone).any() or (gone.any() and gone.shape[-1] > 1):
        raise Inconclusive("an entry near the largest number, or a complex one above it")
    if not gone.any():
        return leaf
    signs = np.where(gone[..., 0], np.sign(leaf.parts.lo[..., 0]), leaf.signs)
    parts = Span(*(np.where(gone, 0, end) for end in (leaf.parts.lo, leaf.parts.hi)), leaf.parts.precision)
    return replace(leaf, parts=parts, bad=leaf.bad | gone[..., 0], signs=signs)


def _masked(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Clip some of the leaves; a step is not left out for the others."""
    numbers = [number for number, leaf in enumerate(leaves) if plan.where(leaf.path, None)]
    if not numbers:
        return Outcome(leaves, state)
    outcome = clip(plan.parts[0], [leaves[number] for number in numbers], state, given)
    new = list(leaves)
    for number, leaf in zip(numbers, outcome.leaves, strict=True):
        new[number] = leaf
    return replace(outcome, leaves=new, skips=False)


def _any(flags: list[bool | None]) -> bool | None:
    return True if True in flags else None if None in flags else False


def _rule(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Measure, ask the limit, bend the curve, scale."""
    machine, sound = given.machine, not any(leaf.bad.any() for leaf in leaves)
    own = leaves
    if plan.policy == "zero":
        own = [replace(leaf, bad=np.zeros_like(leaf.bad), signs=0.0) for leaf in leaves]
    norms, broken, sizes = norms_of(plan, own, machine)
    widest = machine.of_norm([leaf.dtype for leaf in leaves])
    finite = sound and not any(bad.any() for bad in broken)
    out = Outcome(
        list(leaves),
        state,
        True,
        norms,
        broken,
        finite=finite,
        widest=widest,
        skips=plan.policy == "skip" or plan.curve == "reject",
    )
    groups = plan.scope.groups(leaves)
    out.labels = [label for label, _ in groups] if plan.scope.kind == "groups" else None
    out.limits, new_state = _limits(plan, groups, leaves, out, sizes, state, given)
    out.state = new_state if finite else state
    measures = plan.limit == ("constant", math.inf)
    changed: list[bool | None] = []
    for number, ((_, numbers), *pair, bad) in enumerate(zip(groups, norms, out.limits, broken, strict=True)):
        n, limit = (Span(one.lo, one.hi, _free(one.precision)) for one in pair)
        seen = None if given.seen is None else given.seen[1][number]
        factor = _factor(plan, n, limit, norms[number].precision.largest, seen)
        nothing = (bad & (plan.policy == "zero")) | (plan.policy == "skip" and not finite)
        factor = either(np.where(nothing, YES, NO), factor * 0, factor)
        spoiled = bad & (plan.policy in {"propagate", "raise"}) & (not measures)
        factor = Span(np.where(spoiled, np.nan, factor.lo), np.where(spoiled, np.nan, factor.hi), factor.precision)
        out.factors.append(factor)
        changed += [_differs(factor)]
        for one in numbers:
            axes = plan.scope.covered(len(leaves[one].shape), machine)
            out.leaves[one] = _scaled(own[one], factor, axes)
            if plan.policy == "zero":
                kept = ~leaves[one].bad & out.leaves[one].same
                out.leaves[one] = replace(out.leaves[one], same=kept)
    out.clipped = _any(changed)
    out.skipped = _left_out(plan, out)
    return out


def _limits(
    plan: Plan, groups: Any, leaves: list[Leaf], out: Outcome, sizes: list[Array], state: State, given: Step
) -> tuple[list[Span], State]:
    """Ask the limit; in place of a norm that is not finite it sees 1."""
    calm = [
        Span(np.where(bad, 1, n.lo), np.where(bad, 1, n.hi), n.precision)
        for n, bad in zip(out.norms, out.broken, strict=True)
    ]
    if plan.remembers and not leaves:
        return [unlimited(n) for n in calm], state
    ask = Given(
        [label for label, _ in groups],
        lambda: norms_of(plan, [given.params[leaf.path] for leaf in leaves], given.machine)[0],
        lambda: sizes, precision("float32", flush=given.machine.flush),
        given.loss, None if given.seen is None else given.seen[0],
        any(bad.any() for bad in out.broken), out.widest
    )  # fmt: skip
    if not plan.rows_apart or plan.scope.kind == "all":
        limits, state = step(plan.limit, calm, state, ask)
        out.thresholds = ask.thresholds
        return limits, state
    known, limits, thresholds = dict(state or {}), [], []
    for number, (norm, leaf) in enumerate(zip(calm, leaves, strict=True)):
        own = ask.only(number)
        (limit,), known[leaf.path] = step(plan.limit, [norm], known.get(leaf.path), own)
        limits.append(limit)
        thresholds += own.thresholds or []
    out.thresholds = thresholds or None
    return limits, known


def _factor(plan: Plan, n: Span, limit: Span, largest: float, seen: Array | None) -> Span:
    """Return the factors; where rounding decides whether a gradient is left out, the report says it.

    A limit as large as the largest number of its norm's dtype limits nothing.
    """
    endless = np.where(limit.lo >= largest, YES, np.where(limit.hi >= largest, MAYBE, NO))
    held = Span(*(np.where(endless == YES, 1, end) for end in (limit.lo, limit.hi)), limit.precision)
    held = Span(*np.broadcast_arrays(held.lo, held.hi, n.lo)[:2], held.precision)
    factor = either(endless, exact(np.ones(n.shape), n.precision), _curve(plan.curve, n, held))
    if plan.curve == "reject" and seen is not None:
        unsure = (factor.lo < factor.hi) & ((seen == 0) | (seen == 1))
        factor = Span(np.where(unsure, seen, factor.lo), np.where(unsure, seen, factor.hi), factor.precision)
    return factor


def in_reach(factor: Span, dtype: str) -> Span:
    """Return what a factor is at least: one beyond its dtype, which has that of its leaf or norm, is its last number.

    One below the normal numbers may be 0.
    """
    largest, normal = (2.0**1023, 2.0**-1022) if BITS[dtype] > 24 else (2.0**127, 2.0**-126)
    lo = np.where(factor.lo < normal, 0 * factor.lo, np.minimum(factor.lo, largest))
    return Span(lo, factor.hi + normal * 2.0**-23 * ((factor.hi < normal) & (factor.hi > 0)), factor.precision)


def _differs(factor: Span) -> bool | None:
    """Return whether one of the factors is not 1."""
    if ((factor.hi < 1) | (factor.lo > 1) | np.isnan(factor.lo)).any():
        return True
    return None if ((factor.lo != 1) | (factor.hi != 1)).any() else False


def _left_out(plan: Plan, out: Outcome) -> bool | None:
    if plan.policy == "skip" and not out.finite:
        return True
    if plan.curve != "reject" or not any(factor.lo.size for factor in out.factors):
        return False
    if all((factor.hi == 0).all() for factor in out.factors):
        return True
    return None if all((factor.lo == 0).all() for factor in out.factors) else False


def _free(unit: Precision) -> Precision:
    """Return the same precision without bounds: only results have to be in range."""
    return Precision(unit.ulp, 0.0, math.inf)


def _scaled(leaf: Leaf, factor: Span, axes: tuple[int, ...] | None) -> Leaf:
    """Multiply; where the factor is NaN, all is."""
    factor = in_reach(factor, leaf.dtype)
    kept = Span(*(np.expand_dims(end, axes or ())[..., None] for end in (factor.lo, factor.hi)), factor.precision)
    if axes is None:
        kept = factor
    spoiled = np.broadcast_to(np.isnan(kept.lo), leaf.parts.shape)[..., 0]
    ones = np.broadcast_to((kept.lo == 1) & (kept.hi == 1), leaf.parts.shape)[..., 0]
    zeros = np.broadcast_to(kept.hi == 0, leaf.parts.shape)[..., 0]
    calm = Span(np.where(np.isnan(kept.lo), 0, kept.lo), np.where(np.isnan(kept.hi), 0, kept.hi), kept.precision)
    unit = leaf.parts.precision
    product = Span(leaf.parts.lo, leaf.parts.hi, _free(unit)) * calm
    rounded = Span(product.lo, product.hi, unit._replace(largest=math.inf)).rounded()
    parts = Span(
        np.where(ones[..., None], leaf.parts.lo, rounded.lo), np.where(ones[..., None], leaf.parts.hi, rounded.hi), unit
    )
    return replace(
        leaf,
        parts=parts,
        bad=(leaf.bad & ~zeros) | spoiled,
        signs=leaf.signs * ones,
        same=leaf.same & ones,
        integer=None,
    )


def summed(plan: Plan, leaves: list[Leaf], given: Step) -> Outcome:
    """Clip the gradients of examples, and add them up along the first axis."""
    out = clip(plan, leaves, None, given)
    new = []
    for leaf in out.leaves:
        parts = leaf.parts
        sizes = np.maximum(np.abs(parts.lo), np.abs(parts.hi)).sum(axis=0)
        if (sizes > np.finfo(np.float64 if BITS[leaf.dtype] > 24 else np.float32).max).any():
            raise Inconclusive("a sum near the largest number")  # of which ∞ - ∞ is made
        slack = (len(leaf.bad) + 2) * sizes * LONG(2.0**-52 if BITS[leaf.dtype] > 24 else 2.0**-23)
        ends = Span(parts.lo.sum(axis=0) - slack, parts.hi.sum(axis=0) + slack, parts.precision)
        ends = Span(ends.lo, ends.hi, parts.precision._replace(largest=math.inf)).rounded()
        new.append(replace(leaf, parts=ends, bad=leaf.bad.any(axis=0), same=np.bool_(False)))
    return replace(out, leaves=new)


# Norms.


def norms_of(plan: Plan, leaves: list[Leaf], machine: Machine) -> tuple[list[Span], list[Array], list[Array]]:
    """Return the norms, which of them are not finite, and how many entries each covers.

    Raises
    ------
    Inconclusive
        If a norm is as large as its dtype just holds.
    """
    norms, broken, sizes = [], [], []
    widest = machine.of_norm([leaf.dtype for leaf in leaves])
    for _, numbers in plan.scope.groups(leaves):
        members = [leaves[number] for number in numbers]
        unit = machine.of_norm([leaf.dtype for leaf in members])
        axes = [plan.scope.covered(len(leaf.shape), machine) for leaf in members]
        over = [tuple(range(len(leaf.shape))) if one is None else one for leaf, one in zip(members, axes, strict=True)]
        size = LONG(sum(math.prod(leaf.shape[a] for a in one) for leaf, one in zip(members, over, strict=True)))
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
        sizes.append(max(size, 1))
    return norms, broken, sizes


def _norm(p: float, members: list[Leaf], over: list[tuple[int, ...]], unit: Precision, machine: Machine) -> Span:
    if not members:
        return exact(0, unit)
    spans = [leaf.sizes() for leaf in members]
    ends = []
    for end in ("lo", "hi"):
        tops = [np.max(getattr(s, end), axis=one, initial=0) for s, one in zip(spans, over, strict=True)]
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
    if p == 1 and modulus:  # each modulus is rounded by itself
        lost = sum(math.prod(leaf.shape) for leaf in members) * LONG(unit.tiny)
        norm = Span(np.where(norm.lo > 0, np.maximum(norm.lo - lost, 0), 0), norm.hi + lost * (norm.hi > 0), unit)
    # In double precision libraries may add one by one: half a rounding for each entry.
    added = 0.5 * max(math.prod(leaf.shape) for leaf in members) if unit.ulp < 2**-30 else 0
    loose = norm.rounded({1: 9 + 2 * added, 2: 9 + added, math.inf: modulus}.get(p, 32 + added))
    sharp = _is_exact(p, members, over, norm) & np.isfinite(loose.hi) & machine.exact
    return Span(np.where(sharp, norm.lo, loose.lo), np.where(sharp, norm.hi, loose.hi), unit)


def _is_exact(p: float, members: list[Leaf], over: list[tuple[int, ...]], norm: Span) -> Array:
    """Return which norms every order of summation gets exactly: of small whole numbers, times a power of two."""
    if any(leaf.parts.shape[-1] > 1 for leaf in members) or (norm.lo != norm.hi).any() or p not in {1, 2}:
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
    """Return the factor of norms that are limited."""
    one, zero = exact(np.ones(n.shape), n.precision), exact(np.zeros(n.shape), n.precision)
    below, nothing = within(n, limit), np.where(n.hi <= 0, YES, np.where(n.lo > 0, NO, MAYBE))
    if curve == "hard":
        factor = limit / n
        return either(below, one, Span(np.minimum(factor.lo, 1), np.minimum(factor.hi, 1), n.precision))
    if curve == "reject":
        return either(below, one, zero)
    if curve == "normalize":
        return either(nothing, one, limit / n)
    if curve == "root":
        inner, lost = _curve("hard", n, limit), 2.0**-1022 if n.precision.ulp < 2**-30 else 2.0**-126
        return Span(np.maximum(inner.lo - lost, 0), inner.hi + lost * (inner.hi < 1), inner.precision).sqrt()
    if isinstance(curve, tuple):
        kind, gamma = curve
        return limit / (n + (gamma if kind == "regularized" else exact(gamma, n.precision) / (n + gamma)))
    # These depend on limit/norm alone, and rise with it.
    ratio = limit / n
    functions = {
        "soft": lambda x: np.where(np.isinf(x), 1, x / (1 + np.where(np.isinf(x), 0, x))),
        "smooth": lambda x: np.where(x > 1e30, 1, x / np.sqrt(1 + np.where(x > 1e30, 0, x) ** 2)),
        "tanh": lambda x: np.where(x > 1e15, 1, x * np.tanh(1 / np.where((x > 0) & (x < 1e15), x, 1))),
    }
    factor = ratio.each(functions[curve])
    factor = Span(np.maximum(factor.lo, 0), np.minimum(factor.hi, 1), n.precision)
    return either(nothing, one, factor)
