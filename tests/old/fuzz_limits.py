"""The limits of rules as their documentation and their papers define them, on `Span`; imports nothing of uniclip."""
# ruff: noqa: EM102, TRY003, N818 - what stops a case is caught and counted

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fuzz_spans import LONG, MAYBE, NO, YES, Array, Precision, Span, either, exact, larger, smaller, total, within

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
    maybes: Counter[str] = field(default_factory=Counter)
    broken: bool = False
    """Whether one of the norms is not finite."""

    def decided(self, number: int, limited: Array) -> Array:
        """Return whether norms are limited; where that depends on rounding, ask the report."""
        unsure = limited == MAYBE
        if not unsure.any():
            return limited
        self.maybes["limited or not"] += 1
        if self.seen is None:
            return limited
        seen = np.broadcast_to(self.seen[number], np.shape(limited))
        return np.where(unsure, np.where(seen < largest_of(seen), YES, NO), limited)

    def only(self, number: int) -> Given:
        """Return the same for one of the norms."""
        return Given(
            [self.labels[number]],
            lambda: [self.reference()[number]],
            lambda: [self.sizes()[number]],
            self.single,
            self.loss,
            None if self.seen is None else [self.seen[number]],
            self.maybes,
            self.broken,
        )


def largest_of(array: Array) -> float:
    """Return the largest number of an array's dtype: a limit as large limits nothing."""
    return float(np.finfo(np.asarray(array).dtype).max)


def unlimited(like: Span) -> Span:
    """Return a limit for norms like these that limits nothing."""
    endless = np.full(like.shape, np.inf, dtype=LONG)
    return Span(endless, endless, like.precision)


def constant(value: float, precision: Precision) -> Span:
    """Return a limit in the precision of its norm: the nearest number that it can hold, the largest at most."""
    if value == math.inf:
        return exact(math.inf, precision)
    near = LONG(np.float32(min(value, precision.largest)) if precision.ulp > 2**-30 else np.float64(value))
    low = near if near >= precision.tiny / precision.ulp else max(near - precision.tiny, 0)
    return Span(LONG(low), LONG(near) if low == near else near + precision.tiny, precision)


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
    ratio, eps, counts = spec[1:]
    limits = [larger(w, exact(eps, w.precision).rounded()) * ratio for w in given.reference()]
    return [limit if counts is None else limit * counts for limit in limits], state


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
    return [
        exact(joint * np.sqrt(share), n.precision).rounded(8) for n, share in zip(norms, shares, strict=True)
    ], state


def _per_group(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    limits, states = [], []
    for number, (n, label) in enumerate(zip(norms, given.labels, strict=True)):
        old = None if state is None else state[number]
        (limit,), new = step(spec[1][label], [n], old, given.only(number))
        limits.append(limit)
        states.append(new)
    return limits, states


def _percentile(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    q, window, filled = spec[1:]
    if state is None:
        state = [[] for _ in norms]
    histories = [
        ([n, *old] if old or not filled else [n] * window)[:window] for n, old in zip(norms, state, strict=True)
    ]
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
        given.maybes["within a quantile's limit or not"] += int((answer == MAYBE).any())
        if not answer.size:
            moved.append(limit)
            continue
        shares = [LONG(count) / answer.size for count in ((answer == YES).sum(), (answer != NO).sum())]
        by = Span(-rate * (shares[1] - quantile), -rate * (shares[0] - quantile), n.precision).rounded()
        low_, high_ = (constant(end, n.precision) for end in (low, high))
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
    limits, new = [], []
    for number, norm in enumerate(norms):
        n = smaller(norm, exact(CAP, norm.precision))
        history, mean, variance = ([], None, None) if state is None else state[number]
        if len(history) < warmup:
            history = [*history, n]
            mean = total(history) / len(history)
            variance = total([(one - mean).square() for one in history]) / len(history)
            limits.append(unlimited(n))
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
            left = either(spike, smaller(goal, n), n)
            moved = mean * decay + left * (1 - decay)
            spread = variance * decay + (left - moved).square() * (1 - decay)
            stays = spike if same else np.asarray(NO)
            mean, variance = either(stays, mean, moved), either(stays, variance, spread)
        new.append((history, mean, variance))
    return limits, new


def _log_z_score(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    z, decay = spec[1:]
    limits, new = [], []
    for number, n in enumerate(norms):
        zero = exact(np.zeros(n.shape), n.precision)
        mean, variance, count = (zero, zero, np.zeros(n.shape)) if state is None else state[number]
        positive = _positive(n)
        weight = np.where(positive, np.maximum(LONG(1) / (count + 1), 1 - LONG(decay)), 0)
        one = exact(1, n.precision)
        log = Span(np.where(positive, n.lo, one.lo), np.where(positive, n.hi, one.hi), n.precision).each(np.log)
        change = log - mean
        mean = either(np.where(positive, YES, NO), mean + change * weight, mean)
        variance = either(np.where(positive, YES, NO), (variance + change.square() * weight) * (1 - weight), variance)
        std = larger(variance, exact(1e-8, n.precision)).sqrt()
        excess, bound = log - mean, std * z
        spike = np.where(excess.lo > bound.hi, YES, np.where(excess.hi <= bound.lo, NO, MAYBE))
        spike = given.decided(number, np.where(positive, spike, NO))
        limits.append(either(spike, mean.each(np.exp), unlimited(n)))
        new.append((mean, variance, count + positive))
    return limits, new


def _rolling(spec: Spec, norms: list[Span], state: State, given: Given) -> Answer:
    z, window, warmup = spec[1:]
    histories, losses = state or ([[] for _ in norms], [])
    limits = [_threshold(history, z, warmup, n) for history, n in zip(histories, norms, strict=True)]
    if given.loss is not None:
        with np.errstate(over="ignore"):
            loss = exact(np.float32(given.loss), given.single)
        bound = _threshold(losses, z, warmup, loss)
        calm = np.asarray(YES if len(losses) < warmup else NO)
        if np.isfinite(loss.lo) and len(losses) >= warmup:
            calm = within(loss, bound)
            given.maybes["a loss that spikes or not"] += int(calm == MAYBE)
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
    "constant": lambda spec, norms, state, given: ([constant(spec[1], n.precision) for n in norms], state),
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
