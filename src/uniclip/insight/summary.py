# SPDX-License-Identifier: MIT
"""Describe in a few lines of text what clipping did in a recorded run."""

from __future__ import annotations

import math
import re

import numpy as np

from uniclip._errors import counted
from uniclip.insight.record import Booleans, Floats, Record
from uniclip.insight.spikes import Spike, largest
from uniclip.report import MANY_SKIPPED

_LIMITS = 0.25, 1.0, 4.0, 16.0
"""The limits for which a summary shows the share of larger norms."""
_PERCENTILES = 10, 50, 90, 99
_MAX_SPIKES = 5
"""The number of spikes that are listed."""
_ROUNDING = 1e-4
"""The relative distance up to which a norm counts as equal to the largest one."""
_SHARE_AT_MAXIMUM = 0.05
"""The share of norms at the maximum above which something else seems to clip."""
_LARGEST_POWER = 510
"""The largest power of four whose quadruple is a float."""
_SKIP_THRESHOLD = re.compile(r"(?:skip_above=|RejectAbove\()([0-9.]+(?:e[+-]?[0-9]+)?)")
"""The skip threshold in the text of a rule."""


def summary(record: Record) -> str:
    """Summarize a recorded run: problems, how often it clipped, norms, other limits, spikes.

    The first lines show what stands out: steps that were skipped in a row, norms that are
    non-finite up to the end, and norms that something else seems to have clipped already. If there
    is no such problem, the first line shows how the limit acts: as a normalizer (it clips more than
    two thirds of the steps), a step-size limiter (at least a tenth), a safety net, or never.

    Parameters
    ----------
    record : Record
        The result of `read`.

    Returns
    -------
    str
        Some lines of text.

    Raises
    ------
    TypeError
        If ``record`` is not a `Record`.

    Examples
    --------
    >>> from uniclip import insight
    >>> print(insight.summary(insight.read("run.jsonl")))
    47% of steps clipped: the limit acts as a step-size limiter
    400 steps, uc.by_global_norm(1.0): 47% clipped, 0 skipped, 0 non-finite
    norm: p10 0.685, p50 0.985, p90 1.48, p99 2.02, max 20 (step 300)
    steps with norm > 0.25: 100%, > 1: 47%, > 4: 0.25%, > 16: 0.25%
    1 spike:
      step 300: 22.2 times the median
    Norms alone don't determine the best limit: try 1, or compare 0.25, 1, and 4
    (powers of four around the median norm).
    """
    spikes = largest(record)
    # Skipped and non-finite steps have factors that are not 1, too.
    clipped_shares = record.shares[np.isfinite(record.shares) & record.finite & ~record.skipped]

    steps = counted(len(record.steps), "step")
    counts = ", ".join(_count_steps(record, clipped_shares))
    lines = [
        *_judge_run(record, clipped_shares > 0),
        f"{steps}, {name_rule(record)}: {counts}",
        *_describe_norms(record),
        *_list_spikes(spikes),
        *_advise(record),
    ]
    return "\n".join(lines)


def _count_steps(record: Record, clipped_shares: Floats) -> list[str]:
    """Return how many steps were clipped, skipped and non-finite."""
    skipped = f"{record.skipped.sum():,} skipped"
    nonfinite_steps = record.steps[~record.finite]
    nonfinite = f"{len(nonfinite_steps):,} non-finite"
    if len(nonfinite_steps):
        nonfinite += f" (first at step {nonfinite_steps[0]:,})"

    if not clipped_shares.size:
        return [skipped, nonfinite]
    is_clipped = clipped_shares > 0
    clipped = _percent(is_clipped)
    # With several norms in a step, often only some of them are clipped.
    of_norms = ""
    if (clipped_shares[is_clipped] < 1).any():
        of_norms = f" ({_percent(clipped_shares)} of the norms)"

    if record.skipped.any():
        return [skipped, f"{clipped} of the others clipped{of_norms}", nonfinite]
    return [f"{clipped} clipped{of_norms}", skipped, nonfinite]


def _describe_norms(record: Record) -> list[str]:
    """Return a line of percentiles, and one with the share of steps above some limits."""
    is_finite = np.isfinite(record.norms)
    norms = record.norms[is_finite]
    if not norms.size:
        return []

    quantiles = zip(_PERCENTILES, np.percentile(norms, _PERCENTILES), strict=True)
    percentiles = [f"p{percent} {norm:.3g}" for percent, norm in quantiles]
    step = record.steps[is_finite][norms.argmax()]
    maximum = f"max {norms.max():.3g} (step {step:,})"

    shares = [f"> {limit:g}: {_percent(norms > limit)}" for limit in _LIMITS]
    return [
        f"norm: {', '.join([*percentiles, maximum])}",
        f"steps with norm {', '.join(shares)}",
    ]


def _list_spikes(spikes: list[Spike]) -> list[str]:
    """Return the number of spikes, and a line for each of the largest."""
    if not spikes:
        return []
    count = counted(len(spikes), "spike")
    if len(spikes) > _MAX_SPIKES:
        count += f"; the {_MAX_SPIKES} largest"
    return [f"{count}:", *[_describe_spike(spike) for spike in spikes[:_MAX_SPIKES]]]


def _describe_spike(spike: Spike) -> str:
    """Return a line about a spike."""
    size = f"{spike.ratio:.3g} times the median"
    if math.isnan(spike.norm):
        size = "non-finite"
    if not spike.leaves:
        return f"  step {spike.step:,}: {size}"
    label, _ = spike.leaves[0]
    return f"  step {spike.step:,}: {size}, largest change in {printable(label)}"


def _advise(record: Record) -> list[str]:
    """Return what to try next; nothing if the limit varied."""
    if _is_dead(record):
        remedy = "Find the cause of the non-finite gradients"
        if _skips_finite_steps(record):
            remedy = "Raise the skip threshold"
        return [f"{remedy}, or lower the learning rate, and record again."]

    # A limit that varies is learned or scheduled, so a constant is no advice.
    norms = record.norms[np.isfinite(record.norms) & (record.norms > 0)]
    limits = record.limits[np.isfinite(record.limits)]
    if not norms.size or np.unique(limits).size > 1:
        return []

    power = round(math.log(np.median(norms), 4))
    middle = 4.0 ** min(power, _LARGEST_POWER)
    # A limit of 1 would clip nothing if no norm is larger.
    default = "try 1, or " if norms.max() > 1 else ""
    limits_to_try = f"{middle / 4:g}, {middle:g}, and {4 * middle:g}"
    return [
        f"Norms alone don't determine the best limit: {default}compare {limits_to_try}",
        "(powers of four around the median norm).",
    ]


def _is_dead(record: Record) -> bool:
    """Return whether most steps were skipped, or many at the end."""
    if 2 * record.skipped.sum() > len(record.steps):
        return True
    return _count_last(record.skipped) >= MANY_SKIPPED


def _skips_finite_steps(record: Record) -> bool:
    """Return whether most of the skipped steps were finite."""
    finite_and_skipped = record.skipped & record.finite
    return bool(2 * finite_and_skipped.sum() > record.skipped.sum())


def _judge_run(record: Record, is_clipped: Booleans) -> list[str]:
    """Return a line for each problem of a run; without a problem, how its limit acts."""
    lines = []
    count = len(record.steps)

    if _is_dead(record):
        last_skipped = _count_last(record.skipped)
        in_a_row = ""
        if last_skipped >= min(MANY_SKIPPED, count):
            in_a_row = f", the last {last_skipped:,} in a row"
        cause = _compare_skip_threshold(record)
        lines.append(f"{record.skipped.sum():,} of {count:,} steps skipped{in_a_row}{cause}")

    last_nonfinite = _count_last(~record.finite)
    if last_nonfinite > 1 and last_nonfinite >= min(MANY_SKIPPED, count / 10):
        first = record.steps[-last_nonfinite]
        lines.append(
            f"non-finite from step {first:,} to the end, {last_nonfinite:,} steps in a row"
        )

    # In a run with such a problem, the limit is not what needs attention.
    return lines or _judge_limit(record, is_clipped)


def _compare_skip_threshold(record: Record) -> str:
    """Return that the skip threshold of a run is below its median norm, if so."""
    if not _skips_finite_steps(record):
        return ""

    thresholds = skip_thresholds(record)
    thresholds = thresholds[thresholds > 0]
    norms = record.norms[np.isfinite(record.norms)]
    if not (norms.size and thresholds.size):
        return ""

    threshold = np.median(thresholds)
    norm = np.median(norms)
    if threshold >= norm:
        return ""
    return f": the skip threshold {threshold:.3g} is below the median norm {norm:.3g}"


def _judge_limit(record: Record, is_clipped: Booleans) -> list[str]:
    """Return how a limit acts in a run, from the share of steps that it clipped."""
    # A limit of 0, which zeroes all gradients, has no ratio to a norm.
    usable = np.isfinite(record.limits) & np.isfinite(record.norms) & (record.limits > 0)
    norms = record.norms[usable]
    limits = record.limits[usable]
    if not (norms.size and is_clipped.size):
        return []

    if not norms.any():
        return ["all gradients are 0"]
    if _look_clipped(norms, limits):
        maximum = f"{norms.max():.3g}"
        return [f"many norms are {maximum} and none is larger: something else seems to clip first"]
    if not is_clipped.any():
        return [f"never clipped: the largest norm is {(norms / limits).max():.2g} times the limit"]

    share = is_clipped.mean()
    role = "safety net"
    if share > 2 / 3:
        role = "normalizer"
    elif share >= 0.1:
        role = "step-size limiter"
    return [f"{_percent(is_clipped)} of steps clipped: the limit acts as a {role}"]


def _look_clipped(norms: Floats, limits: Floats) -> bool:
    """Return whether norms look as if something had clipped them already.

    Many equal the maximum, and either the maximum is the limit, or the others vary.
    """
    largest_norm = norms.max()
    at_maximum = norms >= largest_norm * (1 - _ROUNDING)
    if at_maximum.sum() <= max(2, _SHARE_AT_MAXIMUM * norms.size):
        return False

    distances = np.abs(limits[at_maximum] / largest_norm - 1)
    if (distances < _ROUNDING).all():
        return True

    # Norms with few distinct values, say of a toy problem, reach their maximum often.
    others = norms[~at_maximum]
    return others.size > 0 and 2 * np.unique(others).size > others.size


def skip_thresholds(record: Record) -> Floats:
    """Return the norm above which each step is skipped, NaN if it is unknown."""
    match = _SKIP_THRESHOLD.search(record.rule or "")
    if match:
        return np.full(len(record.steps), float(match[1]))
    if not record.skipped.any():
        return np.full(len(record.steps), np.nan)

    # Rules with the curve `reject` skip what they would otherwise clip.
    levels = record.limits
    if np.isfinite(record.thresholds).any():
        levels = record.thresholds
    return np.where(np.isfinite(levels), levels, np.nan)


def _count_last(flags: Booleans) -> int:
    """Return how many flags at the end are true."""
    if flags.all():
        return int(flags.size)
    return int(np.argmin(flags[::-1]))


def printable(text: str) -> str:
    """Return text with U+FFFD in place of invisible characters, such as control characters."""
    return "".join([letter if letter.isprintable() else "\ufffd" for letter in text])


def name_rule(record: Record) -> str:
    """Return the rule of a run; if it was not recorded, what the limits show of it."""
    if record.rule:
        return printable(record.rule)

    limits = np.unique(record.limits[np.isfinite(record.limits)])
    if limits.size == 1:
        return f"unknown rule with limit {limits[0]:.3g}"
    return "unknown rule"


def _percent(shares: Floats | Booleans) -> str:
    """Return the mean of shares as a percentage, to two digits."""
    if not shares.size:
        return "unknown"
    # Two digits of 100 are printed as 1e+02.
    return f"{100 * shares.mean():.2g}%".replace("1e+02", "100")
