# SPDX-License-Identifier: MIT
"""Limits that are percentiles of earlier norms, or track one.

A step that is not finite leaves them unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from uniclip._errors import check_range, flag, nonnegative, positive, set_frozen_fields, whole
from uniclip.limits.base import Array, Context, StatefulLimit, align, push, zero_counts, zeros

_SAME_RANK = 1e-6
"""How far, relatively, a position may be from a rank that it is meant to be.

To interpolate by a rounding error would mix in the next value, which may be huge.
"""


class History(NamedTuple):
    """The last norms, newest first along axis 1, -1 where there is none yet;
    and the number of norms in each row.
    """

    norms: Array
    norm_count: Array


class Histogram(NamedTuple):
    """The number of norms up to each bin's logarithm, along axis 1;
    and the number of norms of each row.
    """

    below: Array
    norm_count: Array


class Thresholds(NamedTuple):
    """The limit of each row."""

    limits: Array


@dataclass(frozen=True, repr=False)
class Percentile(StatefulLimit):
    """Allow a percentile of the last norms, this step's included, with linear interpolation.

    Parameters
    ----------
    percentile : float
        From 0, the smallest norm, to 100, the largest.
    window : int
        The number of norms that are kept.
    filled : bool, default False
        Whether the first norm fills the whole window.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.Percentile(50, window=3)))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 2.0, 9.0, 9.0)]
    [1.0, 1.5, 2.0, 9.0]
    """

    percentile: float
    window: int
    filled: bool = False

    def __post_init__(self) -> None:
        """Validate the percentile and the window."""
        set_frozen_fields(
            self,
            percentile=check_range("percentile", self.percentile, 0, 100),
            window=whole("window", self.window, 1),
        )
        set_frozen_fields(self, filled=flag("filled", self.filled))

    def init(self, norms: Array, context: Context) -> History:
        """Begin with empty windows."""
        return History(zeros(context, self.window) - 1, zero_counts(context))

    def __call__(self, norms: Array, state: History, context: Context) -> tuple[Array, History]:
        """Add the norms to the windows, and compute the percentiles."""
        xp, history = context.xp, push(context.xp, state.norms, norms)
        if self.filled:
            begins = align(xp, state.norm_count, history) < 1
            history = xp.where(begins, xp.expand_dims(norms, axis=1), history)
            count = xp.full_like(state.norm_count, self.window)
            return _percentile_of(xp, self.percentile, history), History(history, count)
        count = xp.clip(state.norm_count + 1, 0, self.window)
        if not isinstance(history, np.ndarray):
            known = xp.astype(count, norms.dtype)
            position = _position(xp, self.percentile, known)
            return _interpolate(context, history, known, position), History(history, count)
        low, high, share = _ranks(xp, self.percentile, count, norms.dtype)
        lower, upper = _select_on_host(history, count, low, high)
        return lower + align(xp, share, lower) * (upper - lower), History(history, count)


@dataclass(frozen=True, repr=False)
class PercentileOfAll(StatefulLimit):
    """Allow a percentile of all norms so far, this step's included, to within half a percent.

    Norms are counted in bins of their logarithms, 0.01 wide. The state takes 77 kB for each norm,
    or 582 kB in float64, whose range is wider.

    Parameters
    ----------
    percentile : float
        From 0, the smallest norm, to 100, the largest.

    Notes
    -----
    Source of the histogram: Masson, Rim and Lee, *DDSketch*, arXiv:1908.10693.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.PercentileOfAll(50)))
    >>> [round(clipper(np.asarray([n])).item(), 1) for n in (1.0, 2.0, 9.0, 9.0)]
    [1.0, 1.5, 2.0, 5.5]
    """

    percentile: float

    step: ClassVar[float] = 0.01
    first: ClassVar[float] = -103.5
    """The logarithm of the smallest float32 number."""
    bins: ClassVar[int] = 19_250
    first_wide: ClassVar[float] = -745.5
    """The same for wider dtypes."""
    bins_wide: ClassVar[int] = 145_600

    def __post_init__(self) -> None:
        """Validate the percentile."""
        set_frozen_fields(self, percentile=check_range("percentile", self.percentile, 0, 100))

    def init(self, norms: Array, context: Context) -> Histogram:
        """Begin with empty histograms."""
        bins = self._range(context.xp, norms)[1]
        return Histogram(zeros(context, bins, context.xp.int32), zero_counts(context))

    def __call__(self, norms: Array, state: Histogram, context: Context) -> tuple[Array, Histogram]:
        """Count the norms, and compute the percentiles."""
        xp, count, (first, bins) = context.xp, state.norm_count + 1, self._range(context.xp, norms)
        numbers = align(xp, xp.reshape(context.arange(bins), (1, bins)), state.below)
        positive = norms > 0
        log = xp.where(positive, xp.log(xp.where(positive, norms, 1.0)), first)
        within_bin = xp.expand_dims(log, axis=1) <= first + self.step * numbers
        below = state.below + xp.astype(within_bin, xp.int32)
        low, high, share = _ranks(xp, self.percentile, count, norms.dtype)
        lower, upper = (self._value(xp, below, rank, first, norms.dtype) for rank in (low, high))
        return lower + align(xp, share, lower) * (upper - lower), Histogram(below, count)

    def _value(self, xp: Any, below: Array, rank: Array, first: float, dtype: Any) -> Array:
        """Return the norm at a rank."""
        bin_ = xp.sum(xp.astype(below <= align(xp, rank, below), xp.int32), axis=1)
        log = first + self.step * (xp.astype(bin_, dtype) - 0.5)
        most = math.log(float(xp.finfo(dtype).max)) - 1e-4  # above it the exponential may overflow
        # Some implementations overflow a little earlier.
        root = xp.exp(xp.where(log > most, most, log) / 2)
        return root * root

    def _range(self, xp: Any, norms: Array) -> tuple[float, int]:
        """Return the smallest logarithm of a dtype, and the number of its bins."""
        return (
            (self.first, self.bins)
            if norms.dtype == xp.float32
            else (self.first_wide, self.bins_wide)
        )


@dataclass(frozen=True, repr=False)
class TrackedQuantile(StatefulLimit):
    """Allow a limit that moves until the share of norms within it is ``quantile``.

    After each step ``limit ← limit · exp(-rate · (share - quantile))``, where share is the share of
    the norms of one group (such as the examples of a batch) within the limit.

    Parameters
    ----------
    quantile : float
        The share of norms that should be within the limit.
    rate : float
        How fast the limit moves.
    start : float
        The first limit, above 0.
    min, max : float, defaults 0 and ∞
        The bounds of the limit.

    Notes
    -----
    The share is exact, and computed on each device alone. Differential privacy needs noise on it,
    and several devices need to agree on one share.

    Examples
    --------
    >>> limit = uc.limits.TrackedQuantile(0.5, rate=0.2, start=1.0)
    >>> clipper = uc.Clipper(uc.Rule(limit, scope=uc.scopes.each_example))
    >>> grads = clipper(np.asarray([[0.5], [0.1]]))
    >>> round(clipper.state.limits.item(), 3)  # it falls: both norms were within 1
    0.905
    """

    quantile: float
    rate: float
    start: float
    min: float = 0.0
    max: float = math.inf

    def __post_init__(self) -> None:
        """Validate the parameters."""
        set_frozen_fields(
            self, quantile=check_range("quantile", self.quantile, 0, 1, " (a share: 0.5 for 50 %)")
        )
        set_frozen_fields(
            self, rate=nonnegative("rate", self.rate), start=positive("start", self.start)
        )
        set_frozen_fields(
            self, min=check_range("min", self.min, 0, math.inf), max=positive("max", self.max)
        )
        if not self.min <= self.start <= self.max:
            msg = (
                f"start must be from min to max, got start={self.start}, min={self.min}, "
                f"max={self.max}"
            )
            raise ValueError(msg)

    def init(self, norms: Array, context: Context) -> Thresholds:
        """Begin with the first limit."""
        return Thresholds(context.xp.astype(zero_counts(context), norms.dtype) + self.start)

    def __call__(
        self, norms: Array, state: Thresholds, context: Context
    ) -> tuple[Array, Thresholds]:
        """Count the norms within the limit."""
        xp, limits = context.xp, state.limits
        rows = align(xp, limits, norms)
        count = _over_kept(xp, xp.ones_like(norms))
        share = _over_kept(xp, xp.astype(norms <= rows, norms.dtype)) / xp.where(
            count > 0, count, 1.0
        )
        moved = xp.where(count > 0, limits * xp.exp(-self.rate * (share - self.quantile)), limits)
        if self.min:
            moved = xp.where(moved < self.min, self.min, moved)
        if self.max < math.inf:
            moved = xp.where(moved > self.max, self.max, moved)
        return rows, Thresholds(moved)


def _over_kept(xp: Any, values: Array) -> Array:
    """Return the sum of each row."""
    kept = tuple(range(1, len(values.shape)))
    return xp.sum(values, axis=kept) if kept else values


def _position(xp: Any, q: float, count: Array) -> Array:
    """Return where a percentile of ``count`` values lies among their ranks, which begin with 0."""
    position = (count - 1) * (q / 100)
    nearest = xp.round(position)
    same = xp.abs(position - nearest) <= _SAME_RANK * (1 + position)
    return xp.where(same, nearest, position)


def _ranks(xp: Any, q: float, count: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Return the two ranks between which a percentile of ``count`` values lies,
    and its position between them.
    """
    position = _position(xp, q, xp.astype(count, dtype))
    floor = xp.floor(position)
    low = xp.astype(floor, xp.int32)
    return low, xp.minimum(low + 1, count - 1), position - floor


def _percentile_of(xp: Any, q: float, history: Array) -> Array:
    """Return the percentile of each row, all of whose entries count."""
    position = (history.shape[1] - 1) * (q / 100)
    nearest = round(position)
    if abs(position - nearest) <= _SAME_RANK * (1 + position):
        position = nearest
    low = math.floor(position)
    in_order = xp.sort(history, axis=1)
    lower = in_order[:, low, ...]
    upper = in_order[:, min(low + 1, history.shape[1] - 1), ...]
    return lower + (position - low) * (upper - lower)


def _interpolate(context: Context, history: Array, known: Array, position: Array) -> Array:
    """Return the norm of each row at a position between two ranks, given how many are known.

    Each norm has a weight: 1 less the distance of its rank from the position, if that is above 0.
    That is linear interpolation in half as many operations as to look for the two ranks.
    """
    xp, window = context.xp, history.shape[1]
    dtype = history.dtype
    in_order = xp.sort(history, axis=1)

    # Missing entries come first, and have negative ranks.
    numbers = xp.reshape(context.arange(window, dtype) - window, (1, window))
    ranks = numbers + xp.reshape(known, (-1, 1))
    distance = xp.abs(ranks - xp.reshape(position, (-1, 1)))
    weights = align(xp, xp.clip(1 - distance, 0.0, None), in_order)
    return xp.sum(xp.where(weights > 0, weights * in_order, 0.0), axis=1)


def _select_on_host(history: Array, count: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return the norms of each row at two neighboring ranks, computed by NumPy."""
    most = count.max(initial=1)
    kept = history[:, :most]
    if len(set(count.tolist())) == 1:  # partitioning at one rank is faster than sorting
        parts = np.partition(kept, high[0], axis=1)
        return parts[:, : low[0] + 1].max(axis=1), parts[:, high[0]]
    rows, none_yet, in_order = np.arange(len(count)), most - count, np.sort(kept, axis=1)
    return in_order[rows, none_yet + low], in_order[rows, none_yet + high]
