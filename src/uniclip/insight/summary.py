# SPDX-License-Identifier: MIT
"""What clipping did in a recorded run, in a few lines."""

from __future__ import annotations

import math

import numpy as np

from uniclip._errors import counted
from uniclip.insight.record import Record
from uniclip.insight.spikes import Spike, largest

_LIMITS = 0.25, 1.0, 4.0, 16.0
_PERCENTILES = 10, 50, 90, 99
_SHOWN = 5
"""The number of spikes that are listed."""


def summary(record: Record) -> str:
    """Sum up a recorded run: how often it clipped, the norms, what other limits would have clipped, and the spikes.

    Parameters
    ----------
    record : Record
        What `read` returns.

    Returns
    -------
    str
        Some lines of text.

    Raises
    ------
    TypeError
        If it is no record.

    Examples
    --------
    >>> from uniclip import insight
    >>> print(insight.summary(insight.read("run.jsonl")))
    400 steps, uc.by_global_norm(1.0): clipped 47 %, skipped 0, not finite 0
    norm   p10 0.685   p50 0.985   p90 1.48   p99 2.02   largest 20 (step 300)
    above  0.25: 100 %   1: 47 %   4: 0.25 %   16: 0.25 %
    1 spike:
      step 300, 22.2 times the median
    No limit follows from norms alone: try 1, or compare 0.25, 1 and 4,
    around the power of four nearest the median.
    """
    found = largest(record)
    known = np.isfinite(record.norms)
    norms, steps = record.norms[known], record.steps[known]
    shares = record.shares[np.isfinite(record.shares) & record.finite & ~record.skipped]
    broken, clipped = record.steps[~record.finite], shares > 0
    of_norms = f" ({_percent(shares)} of the norms)" if (shares[clipped] < 1).any() else ""
    first = f" (first step {broken[0]})" if len(broken) else ""
    lines = [f"{counted(len(record.steps), 'step')}, {printable(record.rule) or 'an unknown rule'}: clipped "]
    lines[0] += f"{_percent(clipped)}{of_norms}, skipped {record.skipped.sum():,}, not finite {len(broken):,}{first}"
    if norms.size:
        parts = [f"p{q} {norm:.3g}" for q, norm in zip(_PERCENTILES, np.percentile(norms, _PERCENTILES), strict=True)]
        parts += [f"largest {norms.max():.3g} (step {steps[norms.argmax()]})"]
        lines += ["norm   " + "   ".join(parts)]
        lines += ["above  " + "   ".join([f"{limit:g}: {_percent(norms > limit)}" for limit in _LIMITS])]
    if found:
        more = f", the {_SHOWN} largest" if len(found) > _SHOWN else ""
        lines += [f"{counted(len(found), 'spike')}{more}:", *map(_described, found[:_SHOWN])]
    if (norms > 0).any():
        middle = 4.0 ** round(math.log(np.median(norms[norms > 0]), 4))
        three = f"{middle / 4:g}, {middle:g} and {4 * middle:g}"
        lines += [f"No limit follows from norms alone: try 1, or compare {three},"]
        lines += ["around the power of four nearest the median."]
    return "\n".join(lines)


def _described(spike: Spike) -> str:
    """Return a spike in words."""
    size = f"{spike.ratio:.3g} times the median" if math.isfinite(spike.ratio) else "not finite"
    first = f", first in {printable(spike.leaves[0][0])}" if spike.leaves else ""
    return f"  step {spike.step}, {size}{first}"


def printable(text: str) -> str:
    """Return text with U+FFFD in place of invisible characters, such as control characters."""
    return "".join([one if one.isprintable() else "\ufffd" for one in text])


def _percent(flags: np.ndarray) -> str:
    """Return the mean of shares in percent, to two digits."""
    return f"{100 * flags.mean():.2g} %".replace("1e+02", "100") if flags.size else "unknown"
