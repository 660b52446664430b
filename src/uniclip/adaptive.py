# SPDX-License-Identifier: MIT
"""Limits that remember: each learns from the norms of earlier steps how large the next ones may be.

Their states are named tuples of arrays of fixed shapes. A step that is not finite changes no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from uniclip._repr import Printed
from uniclip.limits import Arrays, Given, Limit, nonnegative, positive, within

Target: TypeAlias = Literal["reciprocal", "mean", "threshold"]

_LARGEST = 1e18
"""The largest norm that enters a statistic of squares: a float32 can hold the square."""


class Counted(NamedTuple):
    """How many steps were taken."""

    count: Any


class Averages(NamedTuple):
    """A running average for each norm, and how many steps were taken."""

    averages: Arrays
    count: Any


class Moments(NamedTuple):
    """Mean and variance (`MeanOverRms`: mean square) for each norm, and how many steps were taken."""

    means: Arrays
    variances: Arrays
    count: Any


class History(NamedTuple):
    """The last norms along a new first axis, newest first, ∞ where there is none yet; and how many there are."""

    norms: Arrays
    count: Any


class Histogram(NamedTuple):
    """How many norms had at most each of the logarithms, along a new first axis; and how many there were."""

    below: Arrays
    count: Any


class NormsAndLosses(NamedTuple):
    """The last norms and losses along a new first axis, newest first, ∞ where there is none yet."""

    norms: Arrays
    losses: Any


class Thresholds(NamedTuple):
    """The limit of each norm, 0-d."""

    limits: Arrays


class Remembers(Printed, Limit):
    """A limit with memory."""

    memory: ClassVar[bool] = True


@dataclass(frozen=True, repr=False)
class Schedule(Remembers):
    """Allow ``fn(step)``, the same for every norm.

    Parameters
    ----------
    fn : callable
        Gets the number of steps before this one, a float32 0-d array (traced in compiled code), and
        returns a number or a 0-d array. Steps that are not finite are not counted.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.by_global_norm(uc.Schedule(lambda step: 1.0 + 4.0 * 0.5**step)))
    >>> [clipper(np.asarray([300.0])).item() for _ in range(3)]
    [5.0, 3.0, 2.0]
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        """Refuse what is no function."""
        if not callable(self.fn):
            msg = f"fn must be a function of the step, got {self.fn!r}"
            raise TypeError(msg)

    def init(self, norms: Arrays, given: Given) -> Counted:
        """Begin at step 0."""
        return Counted(given.counter(norms))

    def __call__(self, norms: Arrays, state: Counted, given: Given) -> tuple[Arrays, Counted]:
        """Ask the function."""
        limit = self.fn(given.xp.astype(state.count, given.xp.float32))
        return [limit] * len(norms), Counted(state.count + 1)


@dataclass(frozen=True, repr=False)
class Percentile(Remembers):
    """Allow a percentile of the last norms, this step's among them; in between two of them, linearly.

    Parameters
    ----------
    q : float
        From 0, the smallest norm, to 100, the largest.
    window : int, default 10000
        How many norms are kept.
    filled : bool, default False
        Whether the first norm fills the window, as if it had been there all along.
    """

    q: float
    window: int = 10_000
    filled: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no percentile, and windows that hold nothing."""
        within("q", self.q, 0, 100)
        within("window", self.window, 1, math.inf)

    def init(self, norms: Arrays, given: Given) -> History:
        """Begin with an empty window."""
        return History([_empty(given, n, self.window) for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: History, given: Given) -> tuple[Arrays, History]:
        """Take the norms in, and look the percentiles up."""
        xp, limits = given.xp, []
        histories = [_pushed(xp, old, n) for old, n in zip(state.norms, norms, strict=True)]
        full = xp.ones_like(state.count) * self.window
        count = xp.where(state.count < full, state.count + 1, full)
        if self.filled:
            begins = state.count < 1
            histories = [xp.where(begins, xp.zeros_like(h) + n, h) for n, h in zip(norms, histories, strict=True)]
            count = full
        for n, history in zip(norms, histories, strict=True):
            in_order = xp.sort(history, axis=0)
            limits.append(_interpolated(xp, self.q, n, count, partial(_at, xp, in_order)))
        return limits, History(histories, count)


@dataclass(frozen=True, repr=False)
class PercentileOfAll(Remembers):
    """Allow a percentile of all norms so far, this step's among them, to half a percent.

    The norms are counted by their logarithms, in steps of a hundredth: a state of 77 kB for each norm.

    Parameters
    ----------
    q : float
        From 0, the smallest norm, to 100, the largest.

    Notes
    -----
    Source of the way of counting: Masson, Rim and Lee, *DDSketch*, arXiv:1908.10693.
    """

    q: float

    first: ClassVar[float] = -103.5
    """The least logarithm; float32 numbers have none below."""
    step: ClassVar[float] = 0.01
    bins: ClassVar[int] = 19_250

    def __post_init__(self) -> None:
        """Refuse what is no percentile."""
        within("q", self.q, 0, 100)

    def init(self, norms: Arrays, given: Given) -> Histogram:
        """Begin with nothing counted."""
        xp = given.xp
        below = [given.place(norms, xp.zeros((self.bins, *tuple(n.shape)), dtype=xp.int32)) for n in norms]
        return Histogram(below, given.counter(norms))

    def __call__(self, norms: Arrays, state: Histogram, given: Given) -> tuple[Arrays, Histogram]:
        """Count the norms, and look the percentiles up."""
        xp, count, limits, counts = given.xp, state.count + 1, [], []
        for n, old in zip(norms, state.below, strict=True):
            numbers = given.place(norms, xp.reshape(xp.arange(self.bins), (self.bins,) + (1,) * len(n.shape)))
            below = old + xp.astype(xp.log(n) <= self.first + self.step * xp.astype(numbers, n.dtype), xp.int32)

            def value(rank: Any, below: Any = below, dtype: Any = n.dtype) -> Any:
                bin_ = xp.astype(xp.sum(xp.astype(below <= rank, xp.int32), axis=0), dtype)
                return xp.exp(self.first + self.step * (bin_ - 0.5))

            limits.append(_interpolated(xp, self.q, n, count, value))
            counts.append(below)
        return limits, Histogram(counts, count)


@dataclass(frozen=True, repr=False)
class ZScore(Remembers):
    """Allow ``z`` standard deviations above the running mean; a norm above that is set back to a target.

    Parameters
    ----------
    z : float, default 2.5
        The z-score above which a norm is a spike.
    decay : float, default 0.97
        Of the running mean and variance. They learn from the norms after clipping.
    target : {"reciprocal", "mean", "threshold"}, default "reciprocal"
        What a spike is set back to: ``mean + z²/score · std`` (the higher the spike, the lower),
        the mean, or ``mean + z · std``.
    warmup : int, default 25
        For how many steps, at least 2, nothing is limited, and the statistics are those of all norms so far.
    eps : float, default 1e-6
        Added to the standard deviation in the z-score.
    """

    z: float = 2.5
    decay: float = 0.97
    target: Target = "reciprocal"
    warmup: int = 25
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        nonnegative("z", self.z)
        within("decay", self.decay, 0, 1)
        within("warmup", self.warmup, 2, math.inf)  # without a deviation every norm would be a spike
        if self.target not in get_args(Target):
            msg = f"target must be one of {', '.join(map(repr, get_args(Target)))}, got {self.target!r}"
            raise ValueError(msg)

    def init(self, norms: Arrays, given: Given) -> Moments:
        """Begin with nothing known."""
        return Moments([n * 0 for n in norms], [n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Moments, given: Given) -> tuple[Arrays, Moments]:
        """Compare with what is known, then learn from what is left."""
        xp, limits, means, variances = given.xp, [], [], []
        warm = state.count < self.warmup
        for norm, mean, variance in zip(norms, state.means, state.variances, strict=True):
            n = xp.where(norm > _LARGEST, xp.ones_like(norm) * _LARGEST, norm)
            std = xp.sqrt(variance)
            spike = xp.logical_not(warm) & (n - mean > self.z * (std + self.eps))
            target = self._target(mean, std, xp.where(spike, n - mean, xp.ones_like(n)))
            weight = _weight(xp, n, state.count, warm, 1 - self.decay)
            change = xp.where(spike, target, n) - mean
            # The published rule takes the deviation from the new mean; in the warm-up it is the plain variance.
            square = weight * change**2 * xp.where(warm, xp.ones_like(n), 1 - weight)
            limits.append(xp.where(spike, target, xp.ones_like(n) * math.inf))
            means.append(mean + weight * change)
            variances.append((1 - weight) * (variance + square))
        return limits, Moments(means, variances, state.count + 1)

    def _target(self, mean: Any, std: Any, excess: Any) -> Any:
        if self.target == "mean":
            return mean
        return mean + self.z * std * (1 if self.target == "threshold" else self.z * (std + self.eps) / excess)


@dataclass(frozen=True, repr=False)
class LogZScore(Remembers):
    """Allow ``z`` standard deviations above the mean in logarithms; a norm above that is set back to exp(mean).

    Parameters
    ----------
    z : float, default 2
        The z-score above which a norm is a spike.
    decay : float, default 0.95
        Of the running mean and variance of the logarithms. They learn from every norm, this step's
        included, before it is compared; at first all norms count the same.
    eps : float, default 1e-8
        The least variance.

    Notes
    -----
    Since this step's norm counts, no z-score is above ``√(decay/(1 - decay))``, 4.4 by default. A norm of
    0, which has no logarithm, is not learned from.
    """

    z: float = 2.0
    decay: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        nonnegative("z", self.z)
        within("decay", self.decay, 0, 1)

    def init(self, norms: Arrays, given: Given) -> Moments:
        """Begin with nothing known."""
        return Moments([n * 0 for n in norms], [n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Moments, given: Given) -> tuple[Arrays, Moments]:
        """Learn from the logarithms, then compare with them."""
        xp, limits, means, variances = given.xp, [], [], []
        early = state.count < round(1 / max(1 - self.decay, 1e-9))
        for n, mean, variance in zip(norms, state.means, state.variances, strict=True):
            positive = n > 0
            log = xp.log(xp.where(positive, n, xp.ones_like(n)))
            weight = _weight(xp, n, state.count, early, 1 - self.decay)
            change = xp.where(positive, log - mean, xp.zeros_like(n))
            weight = xp.where(positive, weight, xp.zeros_like(n))
            means.append(mean + weight * change)
            variances.append((1 - weight) * (variance + weight * change**2))
            least = xp.ones_like(n) * self.eps
            std = xp.sqrt(xp.where(variances[-1] > least, variances[-1], least))
            spike = positive & (log - means[-1] > self.z * std)
            limits.append(xp.where(spike, xp.exp(means[-1]), xp.ones_like(n) * math.inf))
        return limits, Moments(means, variances, state.count + 1)


@dataclass(frozen=True, repr=False)
class RollingZScore(Remembers):
    """Allow ``z`` standard deviations above the mean of the last norms; 0 where the loss is as far above its own.

    Parameters
    ----------
    z : float, default 6
        The z-score above which a norm, or the loss, is a spike.
    window : int, default 128
        How many norms and losses are kept, spikes too; this step's are compared before they are.
    least : int, default 64
        How many have to be there before anything is a spike.

    Notes
    -----
    The standard deviation is the unbiased one. A loss that is not finite is a spike, and is not kept.
    """

    z: float = 6.0
    window: int = 128
    least: int = 64

    def __post_init__(self) -> None:
        """Refuse windows in which nothing can be a spike."""
        nonnegative("z", self.z)
        within("window", self.window, 2, math.inf)
        within("least", self.least, 2, self.window)

    def init(self, norms: Arrays, given: Given) -> NormsAndLosses:
        """Begin with empty windows."""
        losses = given.xp.zeros((self.window,), dtype=given.xp.float32) + math.inf
        return NormsAndLosses([_empty(given, n, self.window) for n in norms], given.place(norms, losses))

    def __call__(self, norms: Arrays, state: NormsAndLosses, given: Given) -> tuple[Arrays, NormsAndLosses]:
        """Compare with the windows, then keep."""
        xp, losses = given.xp, state.losses
        usual = [self._threshold(xp, history) for history in state.norms]
        if given.loss is not None:
            loss = given.place(norms, xp.astype(xp.asarray(given.loss), xp.float32))
            bound = self._threshold(xp, losses)
            calm = (loss <= bound) | (xp.isinf(bound) & xp.isnan(loss))
            usual = [xp.where(calm, limit, xp.zeros_like(limit)) for limit in usual]
            losses = xp.where(xp.isfinite(loss), _pushed(xp, losses, loss), losses)
        limited = [xp.where(n > _LARGEST, xp.ones_like(n) * _LARGEST, n) for n in norms]
        histories = [_pushed(xp, old, n) for old, n in zip(state.norms, limited, strict=True)]
        return usual, NormsAndLosses(histories, losses)

    def _threshold(self, xp: Any, history: Any) -> Any:
        there = xp.isfinite(history)
        count = xp.sum(xp.astype(there, history.dtype), axis=0)
        enough = count >= self.least
        count = xp.where(enough, count, xp.ones_like(count) * 2)
        mean = xp.sum(xp.where(there, history, xp.zeros_like(history)), axis=0) / count
        square = xp.sum(xp.where(there, history - mean, xp.zeros_like(history)) ** 2, axis=0) / (count - 1)
        return xp.where(enough, mean + self.z * xp.sqrt(square), xp.ones_like(mean) * math.inf)


@dataclass(frozen=True, repr=False)
class Ema(Remembers):
    """Allow ``ratio`` times the running average of the norms after clipping.

    Parameters
    ----------
    ratio : float, default 1.05
        How far above its average a norm may be.
    decay : float, default 0.98
        Of the average; 0 compares with the step before.
    warmup : int, default 100
        For how many steps all norms are scaled together, to the joint norm ``warmup_norm`` at most,
        while the average is the smallest norm so far.
    warmup_norm : float, default 1.0
        The largest joint norm in the warm-up.

    Notes
    -----
    The average begins with the first norm. One that is 0 limits nothing, or no gradient could ever
    grow again.
    """

    ratio: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    warmup_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        nonnegative("ratio", self.ratio)
        nonnegative("warmup_norm", self.warmup_norm)
        within("decay", self.decay, 0, 1)
        within("warmup", self.warmup, 0, math.inf)

    def init(self, norms: Arrays, given: Given) -> Averages:
        """Begin with nothing known."""
        return Averages([n + math.inf for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Averages, given: Given) -> tuple[Arrays, Averages]:
        """Compare with the averages, then learn from what is left."""
        xp, limits, averages = given.xp, [], []
        warm = state.count < self.warmup
        joint = _joint(given, norms) if self.warmup and norms else None
        for n, average in zip(norms, state.averages, strict=True):
            endless = xp.ones_like(n) * math.inf
            limit = xp.where(average > 0, self.ratio * average, endless)
            if joint is not None:
                whole = xp.astype(given.place([n], joint), n.dtype)
                above = whole > self.warmup_norm
                shared = n * (self.warmup_norm / xp.where(above, whole, xp.ones_like(whole)))
                limit = xp.where(warm, xp.where(above, shared, endless), limit)
            left = xp.where(n > limit, limit, n)
            first = warm | xp.isinf(average)
            before = xp.where(first, xp.zeros_like(n), average)
            smallest = xp.where(left < average, left, average)
            limits.append(limit)
            averages.append(xp.where(first, smallest, self.decay * before + (1 - self.decay) * left))
        return limits, Averages(averages, state.count + 1)


@dataclass(frozen=True, repr=False)
class SecondMoment(Remembers):
    """Allow ``√(factor · v)``, v the running mean square of the norms after clipping.

    With the scope `uniclip.each_entry` it is the second moment of each entry.

    Parameters
    ----------
    factor : float, default 5000
        How far a square may be above the mean square.
    decay : float, default 0.999
        Of the mean square, which begins with 0.
    warmup : int, default 20
        For how many steps nothing is limited.

    Notes
    -----
    A mean square of 0 limits nothing, or an entry that begins with zeros could never grow.
    """

    factor: float = 5000.0
    decay: float = 0.999
    warmup: int = 20

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        nonnegative("factor", self.factor)
        within("decay", self.decay, 0, 1)
        within("warmup", self.warmup, 0, math.inf)

    def init(self, norms: Arrays, given: Given) -> Averages:
        """Begin with 0."""
        return Averages([n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Averages, given: Given) -> tuple[Arrays, Averages]:
        """Compare with the mean square, then learn from what is left."""
        xp, limits, averages = given.xp, [], []
        for n, v in zip(norms, state.averages, strict=True):
            limits.append(xp.where((state.count < self.warmup) | (v <= 0), n + math.inf, xp.sqrt(self.factor * v)))
            left = xp.where(n > limits[-1], limits[-1], n)
            left = xp.where(left > _LARGEST, xp.ones_like(n) * _LARGEST, left)
            averages.append(self.decay * v + (1 - self.decay) * left * left)
        return limits, Averages(averages, state.count + 1)


@dataclass(frozen=True, repr=False)
class Quantile(Remembers):
    """Allow a limit that moves until the share of norms within it is ``quantile``.

    After each step ``limit ← limit · exp(-rate · (share - quantile))``, where the share is that of the
    norms of one group (the examples of a batch, say) within the limit.

    Parameters
    ----------
    quantile : float, default 0.5
        Which share of the norms is to be within the limit.
    rate : float, default 0.2
        How fast the limit moves.
    start : float, default 0.1
        The first limit, above 0.

    Notes
    -----
    The share is counted exactly: for differential privacy it would need noise of its own.
    """

    quantile: float = 0.5
    rate: float = 0.2
    start: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        within("quantile", self.quantile, 0, 1)
        nonnegative("rate", self.rate)
        positive("start", self.start)

    def init(self, norms: Arrays, given: Given) -> Thresholds:
        """Begin with the first limit."""
        xp = given.xp
        return Thresholds([given.place([n], xp.zeros((), dtype=n.dtype)) + self.start for n in norms])

    def __call__(self, norms: Arrays, state: Thresholds, given: Given) -> tuple[Arrays, Thresholds]:
        """Count the norms within the limit."""
        xp = given.xp
        shares = [xp.mean(xp.astype(n <= limit, n.dtype)) for n, limit in zip(norms, state.limits, strict=True)]
        moved = [
            limit * xp.exp(-self.rate * (share - self.quantile))
            for limit, share in zip(state.limits, shares, strict=True)
        ]
        return state.limits, Thresholds(moved)


@dataclass(frozen=True, repr=False)
class MeanOverRms(Remembers):
    """Allow the running mean of the norms divided by their running root mean square, which is about 1.

    Both learn from every norm, this step's included, and are corrected for beginning with 0. It is made
    for the curve `uniclip.normalize`.

    Parameters
    ----------
    mean_decay, square_decay : float, defaults 0.7 and 0.9
        Of the mean and of the mean square.
    eps : float, default 1e-8
        Added to the root mean square.
    """

    mean_decay: float = 0.7
    square_decay: float = 0.9
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        within("mean_decay", self.mean_decay, 0, 1)
        within("square_decay", self.square_decay, 0, 1)

    def init(self, norms: Arrays, given: Given) -> Moments:
        """Begin with nothing known."""
        return Moments([n * 0 for n in norms], [n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Moments, given: Given) -> tuple[Arrays, Moments]:
        """Learn, then divide."""
        xp, count, limits, means, squares = given.xp, state.count + 1, [], [], []
        for norm, mean, square in zip(norms, state.means, state.variances, strict=True):
            n = xp.where(norm > _LARGEST, xp.ones_like(norm) * _LARGEST, norm)
            means.append(self.mean_decay * mean + (1 - self.mean_decay) * n)
            squares.append(self.square_decay * square + (1 - self.square_decay) * n * n)
            steps = xp.astype(count, n.dtype)
            m = means[-1] / (1 - self.mean_decay**steps)
            v = squares[-1] / (1 - self.square_decay**steps)
            limits.append(m / (xp.sqrt(v) + self.eps))
        return limits, Moments(means, squares, count)


def _weight(xp: Any, n: Any, count: Any, early: Any, weight: float) -> Any:
    """Return the weight of a new value in an average: the same for each one early on, then ``weight``."""
    return xp.where(early, xp.ones_like(n) / xp.astype(count + 1, n.dtype), xp.ones_like(n) * weight)


def _empty(given: Given, n: Any, window: int) -> Any:
    return given.place([n], given.xp.zeros((window, *tuple(n.shape)), dtype=n.dtype)) + math.inf


def _pushed(xp: Any, history: Any, n: Any) -> Any:
    """Return a history with a new first entry, without its last one."""
    return xp.concat([xp.expand_dims(n, axis=0), history[:-1, ...]], axis=0)


def _at(xp: Any, in_order: Any, rank: Any) -> Any:
    return xp.take(in_order, xp.reshape(rank, (1,)), axis=0)[0, ...]


def _interpolated(xp: Any, q: float, n: Any, count: Any, at: Callable[[Any], Any]) -> Any:
    """Return the ``q``-th percentile of ``count`` values, ``at(rank)`` the one that so many are below."""
    position = xp.astype(count - 1, n.dtype) * (q / 100)
    low = xp.floor(position)
    rank = xp.astype(low, xp.int32)
    lower, upper = at(rank), at(xp.where(rank + 1 < count, rank + 1, rank))
    return lower + (position - low) * (upper - lower)


def _joint(given: Given, norms: Arrays) -> Any:
    """Return the norm of all norms, in units of the largest one."""
    xp, dtype = given.xp, given.xp.result_type(*(n.dtype for n in norms))
    flat = xp.concat([xp.reshape(xp.astype(given.place(norms, n), dtype), (-1,)) for n in norms], axis=0)
    top = xp.max(flat)
    unit = xp.where(top > 0, top, xp.ones_like(top))
    return unit * xp.sqrt(xp.sum((flat / unit) ** 2))
