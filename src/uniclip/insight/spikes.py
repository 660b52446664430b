# SPDX-License-Identifier: MIT
"""Steps whose norm stands out from the norms before it."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from uniclip._errors import check, positive, whole
from uniclip.insight.record import Record

Z, WINDOW = 5, 100
"""The allowed number of standard deviations, and the number of earlier norms to compare with."""
FEWEST, EARLY = 20, 10
"""The smallest number of earlier norms to compare with; and that for norms that are very large."""
LEAST, LEAST_EARLY = 2.0, 5.0
"""How many times the median a spike is at least,
and while there are fewer norms than ``FEWEST``.
"""
NORMAL = 1.48
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
LEAST_SPREAD = 0.05
"""The smallest deviation of the logarithms, 5 %; for norms that hardly vary,
rounding would make spikes.
"""
_ROWS = 4096  # windows at a time: 100 norms each in 3 MB
_TOP = 5
"""The number of leaves that are named."""

Array = np.ndarray[Any, Any]


class Spike(NamedTuple):
    """A step whose norm stands out, or is not finite.

    Attributes
    ----------
    step : int
    norm : float
        Before clipping; NaN where it is not finite.
    ratio : float
        The norm divided by the median of those before it; NaN if there is none.
    skipped : bool
        Whether the rule skipped the step.
    leaves : list of (str, float)
        Up to five leaves with the largest ratio of their norm to its median so far, largest first;
        ∞ if the norm is not finite. Empty if the leaves of this step or of earlier steps were not
        recorded.

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
    """List the steps whose norm is a spike, and those that are not finite.

    A spike is ``norm > median · max(2, exp(z · 1.48 · MAD(log norm)))``.

    Median and MAD, the median absolute deviation from the median, are those of the last ``window``
    norms before the step; later norms have no influence. After ten norms and up to the twentieth
    the 2 is a 5.

    Parameters
    ----------
    record : Record
    z : float, default 5
        The allowed number of standard deviations of the logarithms, as the MAD estimates them;
        above 0.
    window : int, default 100
        The number of earlier norms to compare with, at least 20. Before there are 10, only steps
        that are not finite are listed.

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
    Spikes stay in the window, where they hardly change a median and a MAD while they are less than
    half of it; a new level is accepted after half a window. Norms that are 0, unknown or not finite
    are left out. The deviation is taken to be at least 5 %.

    The noisier the norms, the higher a spike must be: at least twice the median, so that a new
    level is none, and 12 times where their logarithms have a standard deviation of 0.5. Bad data
    that does not change the norms is not detected: a saturated network has small gradients for it.
    A spike is not an early warning: the loss, or the updates of an optimizer, may rise first.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> [spike.step for spike in insight.spikes(record)]
    [300]
    """
    check(
        "record", record, isinstance(record, Record), "a Record, which uniclip.insight.read returns"
    )
    z, window = positive("z", z), whole("window", window, FEWEST)
    finite = record.finite & ~np.isinf(record.norms)  # a norm of NaN may only be unknown
    medians, bounds = compared(record.norms, finite, z, window)
    found = np.flatnonzero(~finite | (record.norms > bounds))
    usual = ~np.isin(record.leaf_steps, record.steps[found])
    with np.errstate(over="ignore"):
        ratios = np.where(finite, record.norms, math.nan) / medians
    return [
        Spike(
            step=int(record.steps[n]),
            norm=float(record.norms[n]) if finite[n] else math.nan,
            ratio=float(ratios[n]),
            skipped=bool(record.skipped[n]),
            leaves=_largest(record, record.steps[n], usual, window),
        )
        for n in found
    ]


def largest(record: Record) -> list[Spike]:
    """Return the spikes, the largest ratios first after those that are not finite.

    Of steps in a row that are spikes the first counts that is at least half as large as the largest
    of them.
    """
    found, rows = spikes(record), list[list[Spike]]()
    number = {step: number for number, step in enumerate(record.steps.tolist())}
    for spike in found:
        follows = rows and number[spike.step] == number[rows[-1][-1].step] + 1
        if follows and math.isnan(spike.norm) == math.isnan(rows[-1][-1].norm):
            rows[-1].append(spike)
        else:
            rows.append([spike])
    first = [
        next(one for one in row if not one.norm < max([other.norm for other in row]) / 2)
        for row in rows
    ]
    return sorted(first, key=lambda spike: -math.inf if math.isnan(spike.ratio) else -spike.ratio)


def compared(
    norms: Array, finite: Array, z: float = Z, window: int = WINDOW
) -> tuple[Array, Array]:
    """Return the median of the norms before each step, and the threshold of a spike.

    NaN and ∞ if too few are known.

    The windows hold usable norms only; a step is compared with the usable norms before it.
    """
    with np.errstate(invalid="ignore"):
        usable = finite & (norms > 0)
    logs = np.log(norms[usable])
    middles, spreads = np.full(len(logs) + 1, np.nan), np.full(len(logs) + 1, np.inf)
    for count in range(EARLY, min(window, len(logs) + 1)):
        one = slice(count, count + 1)
        middles[one], spreads[one] = _middle_and_spread(logs[None, :count])
    for start in range(window, len(logs) + 1, _ROWS):
        part = logs[start - window : start + _ROWS - 1]
        rows = np.lib.stride_tricks.sliding_window_view(part, window)
        middles[start : start + len(rows)], spreads[start : start + len(rows)] = _middle_and_spread(
            rows
        )
    before: Array = np.cumsum(usable) - usable
    least = np.where(np.arange(len(middles)) < FEWEST, math.log(LEAST_EARLY), math.log(LEAST))
    with np.errstate(over="ignore"):
        bounds = np.exp(middles + np.maximum(z * np.maximum(spreads, LEAST_SPREAD), least))
    return np.exp(middles)[before], np.where(np.isnan(bounds), np.inf, bounds)[before]


def _middle_and_spread(rows: Array) -> tuple[Array, Array]:
    """Return median and estimated standard deviation of each row."""
    middles = np.median(rows, axis=1)
    return middles, NORMAL * np.median(np.abs(rows - middles[:, None]), axis=1)


def _largest(record: Record, step: int, usual: Array, window: int) -> list[tuple[str, float]]:
    """Return the leaves with the largest ratios at a step to their medians over the ``usual`` rows
    before it.
    """
    here = record.leaf_steps == step
    earlier = record.leaves[usual & (record.leaf_steps < step)][-window:]
    if not here.any():
        return []
    norms = record.leaves[here][0]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a leaf that was never finite before
        ratios = np.where(np.isfinite(norms), norms / np.nanmedian(earlier, axis=0), math.inf)
    known = [
        (label, ratio)
        for label, ratio in zip(record.labels, ratios.tolist(), strict=True)
        if not math.isnan(ratio)
    ]
    return sorted(known, key=lambda pair: -pair[1])[:_TOP]
