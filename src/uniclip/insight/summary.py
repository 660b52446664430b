# SPDX-License-Identifier: MIT
"""What clipping did in a recorded run, in a few lines."""

from __future__ import annotations

import math
import re

import numpy as np

from uniclip._errors import counted
from uniclip.insight.record import Record
from uniclip.insight.spikes import Spike, largest
from uniclip.report import MANY_SKIPPED

_LIMITS = 0.25, 1.0, 4.0, 16.0
_PERCENTILES = 10, 50, 90, 99
_SHOWN = 5
"""The number of spikes that are listed."""
_ROUNDING, _REACHED = 1e-4, 0.05
"""How near to the largest norm another one reaches it,
and the share that does so only if something else clips.
"""
_BOUND = re.compile(r"(?:skip_above=|RejectAbove\()([0-9.]+(?:e[+-]?[0-9]+)?)")
"""The bound in the text of a rule that skips steps above one."""


def summary(record: Record) -> str:
    """Sum up a recorded run: what is wrong, how often it clipped, norms, other limits, spikes.

    The first lines say what stands out: steps that were skipped in a row, norms that are not finite
    up to the end, a limit that is a normalizer (it clips two steps of three or more), a step-size
    limiter (one of ten), a safety net, or never clips, and norms that something else has clipped
    before.

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
    clipped 47 %: the limit is a step-size limiter
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
    skipped, others = (
        f"skipped {record.skipped.sum():,}",
        " of the others" if record.skipped.any() else "",
    )
    share = [f"clipped {_percent(clipped)}{of_norms}{others}"] if clipped.size else []
    words = [skipped, *share] if others else [*share, skipped]
    words += [f"not finite {len(broken):,}{first}"]
    lines = [*_judge_run(record, clipped)]
    lines += [f"{counted(len(record.steps), 'step')}, {name_rule(record)}: {', '.join(words)}"]
    if norms.size:
        parts = [
            f"p{q} {norm:.3g}"
            for q, norm in zip(_PERCENTILES, np.percentile(norms, _PERCENTILES), strict=True)
        ]
        parts += [f"largest {norms.max():.3g} (step {steps[norms.argmax()]})"]
        lines += ["norm   " + "   ".join(parts)]
        lines += [
            "above  " + "   ".join([f"{limit:g}: {_percent(norms > limit)}" for limit in _LIMITS])
        ]
    if found:
        more = f", the {_SHOWN} largest" if len(found) > _SHOWN else ""
        lines += [f"{counted(len(found), 'spike')}{more}:", *map(_described, found[:_SHOWN])]
    return "\n".join([*lines, *_advise(record, norms[norms > 0])])


def _advise(record: Record, norms: np.ndarray) -> list[str]:
    """Return what to try next; nothing where the limit varied."""
    if _is_dead(record):
        cause = (
            "Raise the bound, or lower"
            if _skips_finite(record)
            else "Look for what is not finite, or lower"
        )
        return [f"{cause} the learning rate, and record again."]
    if not norms.size or np.unique(record.limits[np.isfinite(record.limits)]).size > 1:
        return []
    middle = 4.0 ** min(round(math.log(np.median(norms), 4)), 510)
    one = "try 1, or " if norms.max() > 1 else ""
    three = f"{middle / 4:g}, {middle:g} and {4 * middle:g}"
    return [
        f"No limit follows from norms alone: {one}compare {three},",
        "around the power of four nearest the median.",
    ]


def _is_dead(record: Record) -> bool:
    """Whether most steps were skipped, or many at the end."""
    return (
        bool(2 * record.skipped.sum() > len(record.steps))
        or _count_last(record.skipped) >= MANY_SKIPPED
    )


def _skips_finite(record: Record) -> bool:
    """Whether most of the steps that were skipped were finite."""
    return bool(2 * (record.skipped & record.finite).sum() > record.skipped.sum())


def _judge_run(record: Record, clipped: np.ndarray) -> list[str]:
    """Return what is wrong with a run, a line for each; if nothing is, how its limit acts."""
    count, lines = len(record.steps), []
    skipped, broken = _count_last(record.skipped), _count_last(~record.finite)
    if _is_dead(record):
        last = f", the last {skipped} in a row" if skipped >= min(MANY_SKIPPED, count) else ""
        lines.append(
            f"{record.skipped.sum():,} of {count:,} steps skipped{last}{_compare_bound(record)}"
        )
    if broken > 1 and broken >= min(MANY_SKIPPED, count / 10):
        lines.append(
            f"not finite from step {record.steps[-broken]:,} on, {broken:,} steps in a row"
        )
    return lines or _judge_limit(record, clipped)


def _compare_bound(record: Record) -> str:
    """Return that the bound of a run is below its usual norm, if it is."""
    bounds, norms = bounds_of(record), record.norms[np.isfinite(record.norms)]
    bounds = bounds[bounds > 0]
    if not (
        _skips_finite(record)
        and norms.size
        and bounds.size
        and np.median(bounds) < np.median(norms)
    ):
        return ""
    return f": the bound {np.median(bounds):.3g} is below the usual norm {np.median(norms):.3g}"


def _judge_limit(record: Record, clipped: np.ndarray) -> list[str]:
    """Return how a limit acts in a run, from the share of its steps that it clipped."""
    known = np.isfinite(record.limits) & np.isfinite(record.norms) & (record.limits > 0)
    norms, limits = record.norms[known], record.limits[known]
    if not (norms.size and clipped.size):
        return []
    if not norms.any():
        return ["all gradients are 0"]
    if _are_clipped(norms, limits):
        return [
            (
                f"many norms are {norms.max():.3g} and none is larger: something else seems to "
                "clip before"
            )
        ]
    if not clipped.any():
        return [f"never clipped: norms are at most {(norms / limits).max():.2g} of the limit"]
    share = clipped.mean()
    what = "normalizer" if share > 2 / 3 else "step-size limiter" if share >= 0.1 else "safety net"
    return [f"clipped {_percent(clipped)}: the limit is a {what}"]


def _are_clipped(norms: np.ndarray, limits: np.ndarray) -> bool:
    """Whether norms look as if something had clipped them: many are the largest,
    which is the limit, or others vary.
    """
    reached = norms >= norms.max() * (1 - _ROUNDING)
    at_limit = bool((np.abs(limits[reached] / norms.max() - 1) < _ROUNDING).all())
    others = norms[~reached]
    vary = others.size > 0 and 2 * np.unique(others).size > others.size
    return bool(reached.sum() > max(2, _REACHED * norms.size)) and (at_limit or vary)


def bounds_of(record: Record) -> np.ndarray:
    """Return the norm above which each step is skipped, NaN where that is not known."""
    if constant := _BOUND.search(record.rule or ""):
        return np.full(len(record.steps), float(constant[1]))
    if not record.skipped.any():
        return np.full(len(record.steps), np.nan)
    levels = record.thresholds if np.isfinite(record.thresholds).any() else record.limits
    return np.where(np.isfinite(levels), levels, np.nan)


def _count_last(flags: np.ndarray) -> int:
    """Return how many flags at the end are true."""
    return int(flags.size if flags.all() else np.argmin(flags[::-1]))


def _described(spike: Spike) -> str:
    """Return a spike in words."""
    size = "not finite" if math.isnan(spike.norm) else f"{spike.ratio:.3g} times the median"
    first = f", first in {printable(spike.leaves[0][0])}" if spike.leaves else ""
    return f"  step {spike.step}, {size}{first}"


def printable(text: str) -> str:
    """Return text with U+FFFD in place of invisible characters, such as control characters."""
    return "".join([one if one.isprintable() else "\ufffd" for one in text])


def name_rule(record: Record) -> str:
    """Return the rule of a run; where the recorder was not told it, what its limits say."""
    if record.rule:
        return printable(record.rule)
    limits = np.unique(record.limits[np.isfinite(record.limits)])
    return f"limit {limits[0]:.3g} of an unknown rule" if limits.size == 1 else "an unknown rule"


def _percent(flags: np.ndarray) -> str:
    """Return the mean of shares in percent, to two digits."""
    return f"{100 * flags.mean():.2g} %".replace("1e+02", "100") if flags.size else "unknown"
