# SPDX-License-Identifier: MIT
"""Find the steps of a recorded run whose norm stands out from the norms before it."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np

from uniclip._errors import check, positive, whole_number
from uniclip.insight.record import Booleans, Floats, Integers, Record

Z, WINDOW = 5, 100
"""The allowed number of standard deviations, and the number of earlier norms to compare with."""
MIN_EARLIER, MIN_EARLIER_AT_START = 20, 10
"""The smallest number of earlier norms to compare with, and the smallest for very large spikes."""
MIN_RATIO, MIN_RATIO_AT_START = 2.0, 5.0
"""The smallest ratio of a spike to the median, and the smallest while there are fewer than
``MIN_EARLIER`` norms.
"""
NORMAL = 1.48
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
MIN_DEVIATION = 0.05
"""The smallest deviation of the logarithms, 5%.

Without it, rounding errors would be spikes among norms that hardly vary.
"""
_WINDOWS_AT_ONCE = 4096
"""The number of windows in one call of NumPy: with 100 norms each they take 3 MB."""
_MAX_LEAVES = 5
"""The number of leaves in a spike."""


class Spike(NamedTuple):
    """A step whose norm stands out, or is non-finite.

    Attributes
    ----------
    step : int
    norm : float
        Before clipping; NaN if it is non-finite.
    ratio : float
        The norm divided by the median of the norms before it; NaN if it is unknown.
    skipped : bool
        Whether the rule skipped the step.
    leaves : list of (str, float)
        Up to five leaves with the largest ratio of their norm to its median so far, largest first;
        infinity for a non-finite norm. Empty if the leaves of this step or of earlier steps were
        not recorded.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> spike = insight.spikes(record)[0]
    >>> spike.step, round(spike.norm), round(spike.ratio), spike.skipped
    (300, 20, 22, False)
    """

    step: int
    norm: float
    ratio: float
    skipped: bool
    leaves: list[tuple[str, float]]


def spikes(record: Record, z: float = Z, window: int = WINDOW) -> list[Spike]:
    """List the steps whose norm is a spike, and the non-finite steps.

    A spike is ``norm > median · max(2, exp(z · 1.48 · MAD(log norm)))``.

    The median and the MAD, the median absolute deviation from the median, cover the last ``window``
    norms before the step; later norms have no influence. From 10 to 19 earlier norms, the 2 is a 5.

    Parameters
    ----------
    record : Record
    z : float, default 5
        The allowed number of standard deviations of the logarithms, as estimated by the MAD; above
        0.
    window : int, default 100
        The number of earlier norms to compare with, at least 20. With fewer than 10 earlier norms,
        only non-finite steps are listed.

    Returns
    -------
    list of Spike
        In the order of the steps.

    Raises
    ------
    TypeError
        If ``record`` is not a `Record`, ``z`` not a number, or ``window`` not an integer.
    ValueError
        If ``z`` is not above 0, or ``window`` below 20.

    Notes
    -----
    Spikes stay in the window. They hardly change a median and a MAD while they are less than half
    of it; after half a window a new level is accepted. Norms that are 0, unknown or non-finite are
    excluded. The deviation is at least 5%.

    The noisier the norms, the higher a spike must be: at least twice the median, so that a small
    change of level is not a spike, and 12 times the median if the logarithms have a standard
    deviation of 0.5. Bad data that does not change the norms is not detected: a saturated network
    has small gradients for it. A spike is not an early warning: the loss, or the updates of an
    optimizer, may rise first.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> [spike.step for spike in insight.spikes(record)]
    [300]
    """
    expected = "a Record, the result of uniclip.insight.read"
    check("record", record, isinstance(record, Record), expected)
    z = positive("z", z)
    window = whole_number("window", window, MIN_EARLIER)

    # A norm of NaN in a finite step is unknown, not non-finite.
    finite = record.finite & ~np.isinf(record.norms)
    medians, thresholds = spike_thresholds(record.norms, finite, z, window)
    with np.errstate(over="ignore"):
        ratios = np.where(finite, record.norms, math.nan) / medians

    numbers = np.flatnonzero(~finite | (record.norms > thresholds))
    # Leaves are recorded at every spike, so their medians must exclude the spikes.
    usual_leaf_rows = ~np.isin(record.leaf_steps, record.steps[numbers])

    listed = []
    for number in numbers:
        step = int(record.steps[number])
        spike = Spike(
            step=step,
            norm=float(record.norms[number]) if finite[number] else math.nan,
            ratio=float(ratios[number]),
            skipped=bool(record.skipped[number]),
            leaves=_leaves_with_largest_ratios(record, step, usual_leaf_rows, window),
        )
        listed.append(spike)
    return listed


def largest(record: Record) -> list[Spike]:
    """Return the spikes: the non-finite ones, then the others by descending ratio.

    Of consecutive spikes, only the first counts that is at least half as large as the largest of
    them.
    """
    found = spikes(record)
    row_numbers = {step: number for number, step in enumerate(record.steps.tolist())}

    series: list[list[Spike]] = []
    for spike in found:
        if series and _continues(spike, series[-1][-1], row_numbers):
            series[-1].append(spike)
        else:
            series.append([spike])

    first_spikes = list(map(_first_large, series))
    return sorted(first_spikes, key=_descending_ratio)


def _continues(spike: Spike, previous: Spike, row_numbers: dict[int, int]) -> bool:
    """Return whether a spike directly follows another one that is as finite as it is."""
    if row_numbers[spike.step] != row_numbers[previous.step] + 1:
        return False
    return math.isnan(spike.norm) == math.isnan(previous.norm)


def _first_large(consecutive: list[Spike]) -> Spike:
    """Return the first spike of at least half the largest norm, or the first non-finite one."""
    half = max([spike.norm for spike in consecutive]) / 2
    # A norm of NaN is not below any number.
    return next(spike for spike in consecutive if not spike.norm < half)


def _descending_ratio(spike: Spike) -> float:
    """Return the sort key of a spike: a ratio of NaN comes first."""
    if math.isnan(spike.ratio):
        return -math.inf
    return -spike.ratio


def spike_thresholds(
    norms: Floats, finite: Booleans, z: float = Z, window: int = WINDOW
) -> tuple[Floats, Floats]:
    """Return the median of the norms before each step, and the norm above which it is a spike.

    They are NaN and infinity for a step with too few norms before it. Only usable norms count:
    those that are finite and above 0.
    """
    with np.errstate(invalid="ignore"):
        usable = finite & (norms > 0)
    # Norms vary by factors, so the statistics are those of their logarithms.
    medians, deviations = _windowed_medians(np.log(norms[usable]), window)

    # Early medians are uncertain, so only very large norms are spikes there.
    counts = np.arange(len(medians))
    min_ratios = np.where(counts < MIN_EARLIER, MIN_RATIO_AT_START, MIN_RATIO)
    margins = np.maximum(z * np.maximum(deviations, MIN_DEVIATION), np.log(min_ratios))
    with np.errstate(over="ignore"):
        thresholds = np.exp(medians + margins)
    thresholds[np.isnan(thresholds)] = np.inf

    # The number of usable norms before each step.
    before: Integers = np.cumsum(usable) - usable
    return np.exp(medians)[before], thresholds[before]


def _windowed_medians(logs: Floats, window: int) -> tuple[Floats, Floats]:
    """Return the median and the estimated standard deviation of the logarithms before each one.

    The last element is for the step after all of them. Elements with too few before them are NaN
    and infinity.
    """
    medians = np.full(len(logs) + 1, np.nan)
    deviations = np.full(len(logs) + 1, np.inf)

    # At the start the window is still growing.
    for count in range(MIN_EARLIER_AT_START, min(window, len(logs) + 1)):
        median, deviation = _median_and_deviation(logs[None, :count])
        medians[count] = median[0]
        deviations[count] = deviation[0]

    # All windows of a long run at once would take too much memory.
    for start in range(window, len(logs) + 1, _WINDOWS_AT_ONCE):
        section = logs[start - window : start + _WINDOWS_AT_ONCE - 1]
        windows = np.lib.stride_tricks.sliding_window_view(section, window)
        places = slice(start, start + len(windows))
        medians[places], deviations[places] = _median_and_deviation(windows)

    return medians, deviations


def _median_and_deviation(rows: Floats) -> tuple[Floats, Floats]:
    """Return the median and the estimated standard deviation of each row."""
    medians = np.median(rows, axis=1)
    distances = np.abs(rows - medians[:, None])
    return medians, NORMAL * np.median(distances, axis=1)


def _leaves_with_largest_ratios(
    record: Record, step: int, usual_rows: Booleans, window: int
) -> list[tuple[str, float]]:
    """Return the leaves whose norms at a step are largest compared with their medians before it.

    The medians cover the last ``window`` rows that are not spikes.
    """
    at_step = record.leaf_steps == step
    if not at_step.any():
        return []
    norms = record.leaves[at_step][0]
    earlier = record.leaves[usual_rows & (record.leaf_steps < step)][-window:]

    with np.errstate(all="ignore"), warnings.catch_warnings():
        # NumPy warns about leaves without an earlier finite norm; their median is NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        ratios = norms / np.nanmedian(earlier, axis=0)
    ratios[~np.isfinite(norms)] = math.inf

    known = []
    for label, ratio in zip(record.labels, ratios.tolist(), strict=True):
        if not math.isnan(ratio):
            known.append((label, ratio))
    known.sort(key=lambda leaf: leaf[1], reverse=True)
    return known[:_MAX_LEAVES]
