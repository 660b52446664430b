# SPDX-License-Identifier: MIT
"""Limits that are percentiles of earlier norms, or track one.

A step that is not finite leaves them unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from uniclip._errors import Checks, at_least, check_range, flag, nonnegative, positive
from uniclip._types import DType, Limits, Namespace, Norms, Tensor
from uniclip.backends.arithmetic import cast
from uniclip.limits.base import Context, StatefulLimit, align, push, zero_counts, zeros

_Host: TypeAlias = np.ndarray[Any, Any]

_percentage = partial(check_range, low=0, high=100)
_RANK_TOLERANCE = 1e-6
"""The relative distance up to which a position is a rank, but for rounding.

Interpolating by a rounding error could pull in the next value, which may be huge.
"""


class History(NamedTuple):
    """The last norms, newest first along axis 1, -1 where there is none yet;
    and the number of norms in each row.
    """

    norms: Tensor
    norm_count: Tensor


class Histogram(NamedTuple):
    """The number of norms up to each bin's logarithm, along axis 1;
    and the number of norms of each row.
    """

    below: Tensor
    norm_count: Tensor


class Thresholds(NamedTuple):
    """The limit of each row."""

    limits: Tensor


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

    in_range: ClassVar[bool] = True

    checks: ClassVar[Checks] = {"percentile": _percentage, "window": at_least(1), "filled": flag}

    def init(self, norms: Norms, context: Context) -> History:
        """Return the state before the first norm: empty windows."""
        return History(zeros(context, self.window) - 1, zero_counts(context))

    def __call__(self, norms: Norms, state: History, context: Context) -> tuple[Limits, History]:
        """Add the norms to the windows, and compute the percentiles."""
        xp = context.xp
        history = push(xp, state.norms, norms)
        if self.filled:
            is_first = align(xp, state.norm_count, history) < 1
            history = xp.where(is_first, xp.expand_dims(norms, axis=1), history)
            count = xp.full_like(state.norm_count, self.window)
            # On an accelerator a full window takes half as many operations.
            limits = _percentile_of(xp, self.percentile, history)
            return limits, History(history, count)

        count = xp.clip(state.norm_count + 1, 0, self.window)
        new_state = History(history, count)
        if not isinstance(history, np.ndarray):
            present = xp.astype(count, norms.dtype)
            position = _position(xp, self.percentile, present)
            return _interpolate(context, history, present, position), new_state

        low, high, fraction = _ranks(xp, self.percentile, count, norms.dtype)
        lower, upper = _select_on_host(history, count, low, high)
        limits = lower + align(xp, fraction, lower) * (upper - lower)
        return limits, new_state


@dataclass(frozen=True, repr=False)
class PercentileOfAll(StatefulLimit):
    """Allow a percentile of all norms so far, this step's included, to within half a percent.

    Norms are counted in bins of their logarithms, 0.01 wide. The state takes tens of kilobytes
    for each norm, and hundreds in float64, whose range is wider.

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

    checks: ClassVar[Checks] = {"percentile": _percentage}

    def init(self, norms: Norms, context: Context) -> Histogram:
        """Return the state before the first norm: empty histograms."""
        xp = context.xp
        _, bins = self._range(xp, norms)
        return Histogram(zeros(context, bins, xp.int32), zero_counts(context))

    def __call__(
        self, norms: Norms, state: Histogram, context: Context
    ) -> tuple[Limits, Histogram]:
        """Count the norms, and compute the percentiles."""
        xp = context.xp
        count = state.norm_count + 1
        first, bins = self._range(xp, norms)

        # A leaf of a wider dtype may come or go, and the histogram keeps its bins.
        if state.below.shape[1] == self.bins:
            first, bins = self.first, self.bins
        elif state.below.shape[1] == self.bins_wide:
            first, bins = self.first_wide, self.bins_wide

        # A norm of 0 has no logarithm, and is in the first bin.
        positive = norms > 0
        log = xp.where(positive, xp.log(xp.where(positive, norms, 1.0)), first)
        bin_numbers = xp.reshape(context.constant(np.arange(bins)), (1, bins))
        bin_numbers = align(xp, bin_numbers, state.below)
        is_below = xp.expand_dims(log, axis=1) <= first + self.step * bin_numbers
        below = state.below + xp.astype(is_below, xp.int32)

        low, high, fraction = _ranks(xp, self.percentile, count, norms.dtype)
        lower = self._value(context, below, low, first)
        upper = self._value(context, below, high, first)
        limits = lower + align(xp, fraction, lower) * (upper - lower)
        return limits, Histogram(below, count)

    def _value(self, context: Context, below: Tensor, rank: Tensor, first: float) -> Tensor:
        """Return the norm at a rank: the middle of its bin."""
        xp = context.xp
        dtype = context.norms.dtype
        is_lower = below <= align(xp, rank, below)
        bin_number = xp.sum(xp.astype(is_lower, xp.int32), axis=1)
        log = first + self.step * (xp.astype(bin_number, dtype) - 0.5)

        # Above the largest logarithm the exponential overflows, in some implementations a little
        # below it, too. The exponential of the half does not, and its square is in range.
        largest = math.log(float(xp.finfo(dtype).max)) - 1e-4
        root = xp.exp(xp.where(log > largest, largest, log) / 2)
        return root * root

    def _range(self, xp: Namespace, norms: Norms) -> tuple[float, int]:
        """Return the smallest logarithm of a dtype, and the number of its bins."""
        if norms.dtype == xp.float32:
            return self.first, self.bins
        return self.first_wide, self.bins_wide


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

    checks: ClassVar[Checks] = {
        "quantile": partial(check_range, low=0, high=1, hint=" (a share: 0.5 for 50%)"),
        "rate": nonnegative,
        "start": positive,
        "min": partial(check_range, low=0, high=math.inf),
        "max": positive,
    }

    def __post_init__(self) -> None:
        """Validate the parameters."""
        super().__post_init__()
        if not self.min <= self.start <= self.max:
            msg = (
                f"start must be between min and max, got start={self.start}, min={self.min}, "
                f"max={self.max}"
            )
            raise ValueError(msg)

    def init(self, norms: Norms, context: Context) -> Thresholds:
        """Return the first limit for each row."""
        zero_limits = context.xp.astype(zero_counts(context), norms.dtype)
        return Thresholds(zero_limits + self.start)

    def __call__(
        self, norms: Norms, state: Thresholds, context: Context
    ) -> tuple[Limits, Thresholds]:
        """Return the limits, then move them by the share of norms within them."""
        xp = context.xp
        limits = state.limits
        aligned = align(xp, limits, norms)

        # A row without norms, such as a batch without examples, leaves its limit as it was.
        count = _sum_rows(xp, xp.ones_like(norms))
        within = _sum_rows(xp, xp.astype(norms <= aligned, norms.dtype))
        share = within / xp.where(count > 0, count, 1.0)
        moved = limits * xp.exp(-self.rate * (share - self.quantile))
        moved = xp.where(count > 0, moved, limits)

        if self.min:
            moved = xp.where(moved < self.min, self.min, moved)
        if self.max < math.inf:
            moved = xp.where(moved > self.max, self.max, moved)
        return aligned, Thresholds(moved)


def _sum_rows(xp: Namespace, values: Tensor) -> Tensor:
    """Return the sum of each row."""
    axes = tuple(range(1, len(values.shape)))
    if not axes:
        return values
    return xp.sum(values, axis=axes)


def _position(xp: Namespace, percentile: float, count: Tensor) -> Tensor:
    """Return the position of a percentile of ``count`` values among their ranks, from 0."""
    position = (count - 1) * (percentile / 100)
    nearest = xp.round(position)
    is_rank = xp.abs(position - nearest) <= _RANK_TOLERANCE * (1 + position)
    return xp.where(is_rank, nearest, position)


def _ranks(
    xp: Namespace, percentile: float, count: Tensor, dtype: DType
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two ranks between which a percentile of ``count`` values is,
    and its position between them.
    """
    position = _position(xp, percentile, xp.astype(count, dtype))
    floor = xp.floor(position)
    low = xp.astype(floor, xp.int32)
    high = xp.minimum(low + 1, count - 1)
    return low, high, position - floor


def _percentile_of(xp: Namespace, percentile: float, history: Tensor) -> Tensor:
    """Return the percentile of each row of a full window."""
    window = history.shape[1]
    position = (window - 1) * (percentile / 100)
    nearest = round(position)
    if abs(position - nearest) <= _RANK_TOLERANCE * (1 + position):
        position = nearest

    low = math.floor(position)
    high = min(low + 1, window - 1)
    ascending = xp.sort(history, axis=1)
    lower = ascending[:, low, ...]
    upper = ascending[:, high, ...]
    return lower + (position - low) * (upper - lower)


def _interpolate(context: Context, history: Tensor, present: Tensor, position: Tensor) -> Tensor:
    """Return the norm of each row at a position between two ranks, given how many are present.

    Each norm has a weight: 1 less the distance of its rank from the position, if that is above 0.
    That is linear interpolation in half as many operations as with the two ranks.
    """
    xp = context.xp
    dtype = history.dtype
    # Some tracers record a length as a tensor.
    window = int(history.shape[1])
    ascending = xp.sort(history, axis=1)

    # Missing norms are -1, so they come first, and have negative ranks.
    numbers = cast(xp, context.constant(np.arange(-window, 0)), dtype)
    numbers = xp.reshape(numbers, (1, window))
    ranks = numbers + xp.reshape(present, (-1, 1))
    distance = xp.abs(ranks - xp.reshape(position, (-1, 1)))
    weights = align(xp, xp.clip(1 - distance, 0.0, None), ascending)

    # A NaN among the norms must not enter with a weight of 0.
    weighted = xp.where(weights > 0, weights * ascending, 0.0)
    return xp.sum(weighted, axis=1)


def _select_on_host(history: _Host, count: _Host, low: Tensor, high: Tensor) -> tuple[_Host, _Host]:
    """Return the norms of each row at two neighboring ranks, computed by NumPy."""
    longest = count.max(initial=1)
    recent = history[:, :longest]

    # Partitioning at one rank is faster than sorting.
    if len(set(count.tolist())) == 1:
        parts = np.partition(recent, high[0], axis=1)
        return parts[:, : low[0] + 1].max(axis=1), parts[:, high[0]]

    rows = np.arange(len(count))
    missing = longest - count
    ascending = np.sort(recent, axis=1)
    return ascending[rows, missing + low], ascending[rows, missing + high]
