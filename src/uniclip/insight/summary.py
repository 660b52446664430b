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
"""How near to the largest norm another one reaches it, and the share that does so only if something else clips."""
_BOUND = re.compile(r"(?:skip_above=|RejectAbove\()([0-9.]+(?:e[+-]?[0-9]+)?)")
"""The bound in the text of a rule that skips steps above one."""


def summary(record: Record) -> str:
    """Sum up a recorded run: what is wrong, how often it clipped, the norms, what other limits would clip, the spikes.

    The first lines say what stands out: steps that were skipped in a row, norms that are not finite up to the end, a
    limit that is a normalizer (it clips two steps of three or more), a step-size limiter (one of ten), a safety net, or
    never clips, and norms that something else has clipped before.

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
    skipped, others = f"skipped {record.skipped.sum():,}", " of the others" if record.skipped.any() else ""
    share = [f"clipped {_percent(clipped)}{of_norms}{others}"] if clipped.size else []
    words = [skipped, *share] if others else [*share, skipped]
    words += [f"not finite {len(broken):,}{first}"]
    lines = [*_judge_run(record, clipped)]
    lines += [f"{counted(len(record.steps), 'step')}, {name_rule(record)}: {', '.join(words)}"]
    if norms.size:
        parts = [f"p{q} {norm:.3g}" for q, norm in zip(_PERCENTILES, np.percentile(norms, _PERCENTILES), strict=True)]
        parts += [f"largest {norms.max():.3g} (step {steps[norms.argmax()]})"]
        lines += ["norm   " + "   ".join(parts)]
        lines += ["above  " + "   ".join([f"{limit:g}: {_percent(norms > limit)}" for limit in _LIMITS])]
    if found:
        more = f", the {_SHOWN} largest" if len(found) > _SHOWN else ""
        lines += [f"{counted(len(found), 'spike')}{more}:", *map(_described, found[:_SHOWN])]
    return "\n".join([*lines, *_advise(record, norms[norms > 0])])


def _advise(record: Record, norms: np.ndarray) -> list[str]:
    """Return what to try next, but of a limit that learns: there is no other to try."""
    if _is_dead(record):
        return ["Raise the bound, or lower the learning rate, and record again."] * bool(norms.size)
    if not norms.size or np.unique(record.limits[np.isfinite(record.limits)]).size > 1:
        return []
    middle = 4.0 ** round(math.log(np.median(norms), 4))
    one = "try 1, or " if norms.max() > 1 else ""
    three = f"{middle / 4:g}, {middle:g} and {4 * middle:g}"
    return [f"No limit follows from norms alone: {one}compare {three},", "around the power of four nearest the median."]


def _is_dead(record: Record) -> bool:
    """Whether most steps were skipped, or many at the end."""
    return bool(2 * record.skipped.sum() > len(record.steps)) or _count_last(record.skipped) >= MANY_SKIPPED


def _judge_run(record: Record, clipped: np.ndarray) -> list[str]:
    """Return what is wrong with a run, a line for each; of one that went on to its end, what its limit is."""
    count, skipped, lines = len(record.steps), int(record.skipped.sum()), []
    in_row, dead = _count_last(record.skipped), _is_dead(record)
    if dead:
        known = record.norms[np.isfinite(record.norms)]
        last = f", the last {in_row} in a row" if in_row >= min(MANY_SKIPPED, count) else ""
        bounds = bounds_of(record)
        usual, bound = (float(np.median(some)) if some.size else math.nan for some in (known, bounds[bounds > 0]))
        why = f": the bound {bound:.3g} is below the usual norm {usual:.3g}" if bound < usual else ""
        lines.append(f"{skipped:,} of {count:,} steps skipped{last}{why}")
    in_row = _count_last(~record.finite)
    if in_row > 1:
        lines.append(f"not finite from step {record.steps[-in_row]:,} on, {in_row:,} steps in a row")
    return lines or _judge_limit(record, clipped)


def _judge_limit(record: Record, clipped: np.ndarray) -> list[str]:
    """Return what a limit is to a run, from how many of its steps it clipped."""
    known = np.isfinite(record.limits) & np.isfinite(record.norms) & (record.limits > 0)
    norms, limits = record.norms[known], record.limits[known]
    if not (norms.size and clipped.size):
        return []
    most, reached = norms.max(), norms >= norms.max() * (1 - _ROUNDING)
    if not most:
        return ["all gradients are 0"]
    alike = not reached.all() or (np.abs(limits / most - 1) < _ROUNDING).all()  # or the gradients are just the same
    if alike and reached.sum() > max(2, _REACHED * norms.size):
        return [f"norms reach {most:.3g} and never exceed it: something else clips before"]
    if not clipped.any():
        return [f"never clipped: norms are at most {(norms / limits).max():.2g} of the limit"]
    share = clipped.mean()
    what = "normalizer" if share > 2 / 3 else "step-size limiter" if share >= 0.1 else "safety net"
    return [f"clipped {_percent(clipped)}: the limit is a {what}"]


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
    size = f"{spike.ratio:.3g} times the median" if math.isfinite(spike.ratio) else "not finite"
    first = f", first in {printable(spike.leaves[0][0])}" if spike.leaves else ""
    return f"  step {spike.step}, {size}{first}"


def printable(text: str) -> str:
    """Return text with U+FFFD in place of invisible characters, such as control characters."""
    return "".join([one if one.isprintable() else "\ufffd" for one in text])


def name_rule(record: Record) -> str:
    """Return the rule of a run; where the recorder was not told it, what its limits say."""
    limits = {f"{limit:.3g}" for limit in record.limits[np.isfinite(record.limits)]}
    known = f"limit {limits.pop()} of an unknown rule" if len(limits) == 1 else "an unknown rule"
    return printable(record.rule) or known


def _percent(flags: np.ndarray) -> str:
    """Return the mean of shares in percent, to two digits."""
    return f"{100 * flags.mean():.2g} %".replace("1e+02", "100") if flags.size else "unknown"
