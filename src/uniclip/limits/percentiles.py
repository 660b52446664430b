# SPDX-License-Identifier: MIT
"""Limits that are percentiles of the norms so far, or follow one. A step that is not finite changes none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from uniclip._checks import flag, nonnegative, positive, settle, whole, within
from uniclip.limits.base import Arrays, Given, Remembers, empty, pushed


class History(NamedTuple):
    """The last norms along a new first axis, newest first, -1 where there is none yet; and how many there are."""

    norms: Arrays
    count: Any


class Histogram(NamedTuple):
    """How many norms had at most each of the logarithms, along a new first axis; and how many there were."""

    below: Arrays
    count: Any


class Thresholds(NamedTuple):
    """The limit of each norm, 0-d."""

    limits: Arrays


@dataclass(frozen=True, repr=False)
class Percentile(Remembers):
    """Allow a percentile of the last norms, this step's among them; in between two of them, linearly.

    Parameters
    ----------
    q : float
        From 0, the smallest norm, to 100, the largest.
    window : int
        How many norms are kept.
    filled : bool, default False
        Whether the first norm fills the window, as if it had been there all along.
    """

    q: float
    window: int
    filled: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no percentile, and windows that hold nothing."""
        settle(self, q=within("the percentile q", self.q, 0, 100), window=whole("window", self.window, 1))
        settle(self, filled=flag("filled", self.filled))

    def init(self, norms: Arrays, given: Given) -> History:
        """Begin with an empty window."""
        return History([empty(given, n, self.window) for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: History, given: Given) -> tuple[Arrays, History]:
        """Take the norms in, and look the percentiles up."""
        xp, limits = given.xp, []
        histories = [pushed(xp, old, n) for old, n in zip(state.norms, norms, strict=True)]
        full = xp.ones_like(state.count) * self.window
        count = xp.where(state.count < full, state.count + 1, full)
        if self.filled:
            begins = state.count < 1
            histories = [xp.where(begins, xp.zeros_like(h) + n, h) for n, h in zip(norms, histories, strict=True)]
            count = full
        for n, history in zip(norms, histories, strict=True):
            in_order = xp.sort(history, axis=0)
            none_yet = self.window - count  # these come first
            limits.append(_interpolated(xp, self.q, n, count, partial(_at, xp, in_order, none_yet)))
        return limits, History(histories, count)


@dataclass(frozen=True, repr=False)
class PercentileOfAll(Remembers):
    """Allow a percentile of all norms so far, this step's among them, to half a percent.

    The norms are counted by their logarithms, in steps of a hundredth: a state of 77 kB for each norm, of 582 kB for
    one in float64, whose range is wider.

    Parameters
    ----------
    q : float
        From 0, the smallest norm, to 100, the largest.

    Notes
    -----
    Source of the way of counting: Masson, Rim and Lee, *DDSketch*, arXiv:1908.10693.
    """

    q: float

    step: ClassVar[float] = 0.01
    first: ClassVar[float] = -103.5
    """The least logarithm of float32 numbers."""
    bins: ClassVar[int] = 19_250
    first_wide: ClassVar[float] = -745.5
    """That of wider ones."""
    bins_wide: ClassVar[int] = 145_600

    def __post_init__(self) -> None:
        """Refuse what is no percentile."""
        settle(self, q=within("the percentile q", self.q, 0, 100))

    def init(self, norms: Arrays, given: Given) -> Histogram:
        """Begin with nothing counted."""
        xp = given.xp
        below = [given.place(n, xp.zeros((self._range(xp, n)[1], *tuple(n.shape)), dtype=xp.int32)) for n in norms]
        return Histogram(below, given.counter(norms))

    def __call__(self, norms: Arrays, state: Histogram, given: Given) -> tuple[Arrays, Histogram]:
        """Count the norms, and look the percentiles up."""
        xp, count, limits, counts = given.xp, state.count + 1, [], []
        for n, old in zip(norms, state.below, strict=True):
            first, bins = self._range(xp, n)
            numbers = given.place(n, xp.reshape(xp.arange(bins), (bins,) + (1,) * len(n.shape)))
            one, positive = xp.ones_like(n), n > 0
            log = xp.where(positive, xp.log(xp.where(positive, n, one)), first * one)
            below = old + xp.astype(log <= first + self.step * xp.astype(numbers, n.dtype), xp.int32)

            def value(rank: Any, below: Any = below, first: float = first, dtype: Any = n.dtype) -> Any:
                bin_ = xp.astype(xp.sum(xp.astype(below <= rank, xp.int32), axis=0), dtype)
                log = first + self.step * (bin_ - 0.5)
                most = math.log(float(xp.finfo(dtype).max)) - 1e-4  # above it the exponential may be ∞
                root = xp.exp(xp.where(log > most, xp.ones_like(log) * most, log) / 2)  # some are ∞ already before
                return root * root

            limits.append(_interpolated(xp, self.q, n, count, value))
            counts.append(below)
        return limits, Histogram(counts, count)

    def _range(self, xp: Any, n: Any) -> tuple[float, int]:
        """Return the least logarithm of a dtype, and how many steps its range has."""
        return (self.first, self.bins) if n.dtype == xp.float32 else (self.first_wide, self.bins_wide)


@dataclass(frozen=True, repr=False)
class TrackedQuantile(Remembers):
    """Allow a limit that moves until the share of norms within it is ``quantile``.

    After each step ``limit ← limit · exp(-rate · (share - quantile))``, where the share is that of the
    norms of one group (the examples of a batch, say) within the limit.

    Parameters
    ----------
    quantile : float
        Which share of the norms is to be within the limit.
    rate : float
        How fast the limit moves.
    start : float
        The first limit, above 0.
    min, max : float, defaults 0 and ∞
        Between which the limit moves.

    Notes
    -----
    The share is counted exactly, and on each device by itself: differential privacy needs noise, and several
    devices need a share that they agree on.
    """

    quantile: float
    rate: float
    start: float
    min: float = 0.0
    max: float = math.inf

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        settle(self, quantile=within("quantile", self.quantile, 0, 1, " (a share: 0.5 for 50 %)"))
        settle(self, rate=nonnegative("rate", self.rate), start=positive("start", self.start))
        settle(self, min=within("min", self.min, 0, math.inf), max=positive("max", self.max))
        if not self.min <= self.start <= self.max:
            msg = f"start must be from min to max, got start={self.start}, min={self.min}, max={self.max}"
            raise ValueError(msg)

    def init(self, norms: Arrays, given: Given) -> Thresholds:
        """Begin with the first limit."""
        xp = given.xp
        return Thresholds([given.place(n, xp.zeros((), dtype=n.dtype)) + self.start for n in norms])

    def __call__(self, norms: Arrays, state: Thresholds, given: Given) -> tuple[Arrays, Thresholds]:
        """Count the norms within the limit."""
        xp = given.xp
        moved = []
        for n, limit in zip(norms, state.limits, strict=True):
            one = xp.ones_like(limit)
            count = xp.sum(xp.ones_like(n)) * one
            share = xp.sum(xp.astype(n <= limit, n.dtype)) / xp.where(count > 0, count, one)
            change = xp.exp(-self.rate * (share - self.quantile))
            moved.append(self._bounded(xp, xp.where(count > 0, limit * change, limit)))
        return state.limits, Thresholds(moved)

    def _bounded(self, xp: Any, limit: Any) -> Any:
        one = xp.ones_like(limit)
        above = xp.where(limit < self.min, one * self.min, limit) if self.min else limit
        return xp.where(above > self.max, one * self.max, above) if self.max < math.inf else above


def _at(xp: Any, in_order: Any, first: Any, rank: Any) -> Any:
    return xp.take(in_order, xp.reshape(first + rank, (1,)), axis=0)[0, ...]


def _interpolated(xp: Any, q: float, n: Any, count: Any, at: Callable[[Any], Any]) -> Any:
    """Return the ``q``-th percentile of ``count`` values, ``at(rank)`` the one that so many are below."""
    position = xp.astype(count - 1, n.dtype) * (q / 100)
    nearest = xp.round(position)  # a whole number that was rounded off would take in the next value, which may be huge
    position = xp.where(xp.abs(position - nearest) <= 1e-6 * (1 + position), nearest, position)
    low = xp.floor(position)
    rank = xp.astype(low, xp.int32)
    lower, upper = at(rank), at(xp.where(rank + 1 < count, rank + 1, rank))
    return lower + (position - low) * (upper - lower)
