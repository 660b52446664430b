# SPDX-License-Identifier: MIT
"""A diagnosis of a recorded run, and three limits to try."""

from __future__ import annotations

import math
import shutil
import textwrap
from typing import Any, NamedTuple

import numpy as np

from uniclip._checks import check
from uniclip.insight.course import Trouble, first_trouble, kept_course
from uniclip.insight.record import Record
from uniclip.insight.replay import WhatIf, what_if
from uniclip.insight.spikes import Spike, finite_steps, spikes
from uniclip.report import UNLIMITED

Array = np.ndarray[Any, Any]

STABLE, OUTLIERS, UNSTABLE, TOO_LITTLE = "stable", "outliers", "unstable", "too little data"
FEWEST = 100
"""The number of norms needed for the verdict that a run is stable."""
FEWEST_LATER = 50
"""The number of them needed after the warm-up."""
WARM_UP, WARM_UP_STEPS = 0.1, 20
"""What is left out at the beginning: this share of the steps, and at least this number."""
QUANTILE = 90
PREFIX = 10
"""The number of norms before an explosion that tell what was usual."""
NEAR = 2
"""A recorded limit up to this multiple of the wanted one is as good as it."""
OUTLIER_SHARE, FEWEST_OUTLIERS, LOUD = 0.005, 3, 10
"""Spikes count as outliers from this share and number of steps on, or if one is this multiple of the median."""
HALF = 0.5
SMALLEST, LARGEST = 2.0**-126, 1e38
"""Limits are suggested only between these, which float32 holds: smaller ones may be rounded to 0 there, larger ones
limit nothing."""
_FAR = 1e150
"""Norms and losses are clamped to it, since sums of larger ones would overflow."""
_LINE = 90
NORMALIZER = (
    "there clipping is a normalizer, and the learning rate sets the length of the steps. "
    "Lower the learning rate, or choose that knowingly."
)


class Advice(NamedTuple):
    """The result of `suggest`; ``str()`` of it is a text for a terminal.

    Attributes
    ----------
    verdict : {"stable", "outliers", "unstable", "too little data"}
    limits : tuple of float
        Three limits to try, c/4, c and 4c with two significant digits; empty where none can be given.
    reasons : list of str
        A sentence for each number and decision.
    table : WhatIf
        The effect that these limits, two between them and the recorded one would have had on the norms that count;
        with too little data the effect of limits around the median.
    record_at : float or None
        The limit for another recorded run, if this run is not enough.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> print(insight.suggest(record).reasons[0])
    The loss, as medians of 10 steps, went from 0.946 to 0.0192 and did not rise.
    """

    verdict: str
    limits: tuple[float, ...]
    reasons: list[str]
    table: WhatIf
    record_at: float | None

    def __str__(self) -> str:
        """Return the advice as lines of text."""
        lines = [f"Verdict: {self.verdict}"]
        if self.limits:
            lines += [f"Limits to try: {', '.join(f'{limit:g}' for limit in self.limits)}"]
        if self.record_at is not None:
            lines += [f"Record again with the limit {self.record_at:g}"]
        width = min(shutil.get_terminal_size((_LINE, 24)).columns, _LINE)
        lines += ["", *[textwrap.fill(f"- {reason}", width, subsequent_indent="  ") for reason in self.reasons]]
        if len(self.table.max_norms):
            lines += ["", str(self.table)]
        if self.limits:
            lines += ["", "Try these three, each in a full run; one run is no measurement."]
        return "\n".join(lines)


def suggest(record: Record) -> Advice:
    """Say whether a run was stable, and which three limits to try.

    In a stable run norms and losses stay finite, and the loss, as a median of 10 steps, never rises above its minimum
    so far by more than 20 % of its total decrease and three times the noise of a single step. Then c is the 90th
    percentile of the norms after the warm-up. Of an unstable run only the steps before the trouble count: the advice
    is to record it again with their median as the limit. If it was already clipped at that or below, the advice is to
    lower the learning rate, and c is a quarter of the smaller of the two.

    Parameters
    ----------
    record : Record
        Preferably of a full run that was clipped at 1.0; norms are measured before clipping.

    Returns
    -------
    Advice

    Raises
    ------
    TypeError
        If ``record`` is not a `Record`.

    Notes
    -----
    It returns no single number: with a tuned learning rate none was found to be reliably better than 1.0. Steps that
    are not finite and were skipped are outliers; without losses, tenfold growth of the norms counts as instability.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> advice = insight.suggest(record)
    >>> advice.verdict, advice.limits
    ('outliers', (0.37, 1.5, 5.9))
    """
    check("record", record, isinstance(record, Record), "a Record, which uniclip.insight.read returns")
    record = record._replace(norms=_near(record.norms), losses=_near(record.losses))
    finite = finite_steps(record)
    known = finite & ~np.isnan(record.norms)
    start = max(math.ceil(WARM_UP * len(known)), WARM_UP_STEPS)
    trouble = first_trouble(record, finite, known, start)
    if trouble is not None:
        return _unstable(record, known, trouble)
    if known.sum() < FEWEST or known[start:].sum() < FEWEST_LATER:
        reason = f"{known.sum():,} norms are known, {known[start:].sum():,} of them after the first {start:,} steps"
        reason = f"{reason}; {FEWEST} and {FEWEST_LATER} are needed."
        return Advice(TOO_LITTLE, (), [reason], what_if(record), None)
    return _stable(record, known, start)


def recorded_limit(record: Record) -> float:
    """Return the limit of a run: the median, or ∞ if most steps had none."""
    limits = record.limits[~np.isnan(record.limits)]
    limits = np.where(limits < UNLIMITED, limits, math.inf)
    return float(np.median(limits)) if len(limits) else math.inf


def _stable(record: Record, known: Array, start: int) -> Advice:
    """Return the advice for a stable run: the percentile of the norms that are not spikes."""
    first = record.steps[start]
    found = [spike for spike in spikes(record) if spike.step >= first]
    usual = known & ~np.isin(record.steps, [spike.step for spike in found])
    usual[:start] = False
    c = float(np.percentile(record.norms[usual], QUANTILE))
    loud, words = _outliers(found, len(record.steps) - start)
    reasons = [kept_course(record), words]
    left_out = f"the first {start:,} steps are left out as warm-up, and so are the spikes"
    reasons += [f"The middle limit, {c:.3g}, is the {QUANTILE}th percentile of {usual.sum():,} norms: {left_out}."]
    if c == 0:
        reasons += ["A limit of 0 would zero the gradients, so none is suggested."]
    elif not _limits(c):
        reasons += ["Limits for such norms are out of the range of float32, so none is suggested."]
    return _advice(record, OUTLIERS if loud else STABLE, c, reasons)


def _unstable(record: Record, known: Array, trouble: Trouble) -> Advice:
    """Return the advice for an unstable run; nothing after the trouble counts."""
    prefix = record.norms[: trouble.before][known[: trouble.before]]
    limit, reasons = recorded_limit(record), [trouble.reason]
    if len(prefix) < PREFIX or not _limits(float(np.median(prefix))):
        reasons += [
            f"{len(prefix):,} norms came before it: too few, or most of them 0 or out of range, to take a limit from.",
            "Lower the learning rate, or warm it up more slowly, and record again.",
        ]
        return _advice(record, UNSTABLE, 0.0, reasons)
    middle = float(np.median(prefix))
    reasons += [f"The median of the {len(prefix):,} norms before it is {middle:.3g}; no later norm is used."]
    before = record.before(trouble.before)
    if limit > NEAR * middle:
        done = "was not clipped" if math.isinf(limit) else f"was clipped at {limit:.3g}, well above that"
        again = _rounded(middle)
        reasons += [f"The run {done}: record again, clipped at {again:g}, and ask again."]
        return _advice(before, UNSTABLE, 0.0, reasons, again)
    c = min(middle, limit) / 4
    reasons += [
        f"It was clipped at {limit:.3g} already: first lower the learning rate, which helps more than another limit."
    ]
    if _limits(c):
        lesser = "a quarter of that median or of the recorded limit, whichever is less"
        reasons += [f"If the learning rate has to stay: the middle limit, {c:.3g}, is {lesser}."]
    return _advice(before, UNSTABLE, c, reasons)


def _advice(record: Record, verdict: str, c: float, reasons: list[str], again: float | None = None) -> Advice:
    """Return advice with the text that follows from its limits."""
    limits = _limits(c)
    own = recorded_limit(record)
    tried = {*limits, *(_rounded(c * factor) for factor in (0.5, 2) if limits), *([] if math.isinf(own) else [own])}
    rows = what_if(record, sorted(tried))
    most = [
        f"{limit:.3g} ({100 * share:.0f} %)"
        for limit, share in zip(rows.max_norms, rows.shares, strict=True)
        if share > HALF and limit in {*limits, own}
    ]
    if most:
        reasons += [f"More than half of the steps would be clipped at {', '.join(most)}: {NORMALIZER}"]
    return Advice(verdict, limits, reasons + _about(record), rows, again)


def _limits(c: float) -> tuple[float, ...]:
    """Return the limits to try around c; none if one of them would be out of range."""
    return (_rounded(c / 4), _rounded(c), _rounded(4 * c)) if c >= 4 * SMALLEST and 4 * c <= LARGEST else ()


def _near(values: Array) -> Array:
    """Return values whose sums and differences are finite."""
    near: Array = np.where(np.isfinite(values), np.clip(values, -_FAR, _FAR), values)
    return near


def _about(record: Record) -> list[str]:
    """Return a description of the recorded norms."""
    reasons = []
    if record.scope == "each_leaf":
        reasons += ["The norms are the largest of a leaf: these are limits for each leaf, as uc.by_norm has."]
    elif record.scope != "all_leaves":
        reasons += ["The norms are not of all leaves together: these are limits for the rule's own scope only."]
    if record.ord != 2:  # noqa: PLR2004 - Euclidean
        kind = "of no order" if record.ord is None else f"of order {record.ord:g}"
        reasons += [f"The norms are {kind}, not Euclidean: these are limits for such norms."]
    limits = record.limits[~np.isnan(record.limits)]
    if len(np.unique(limits)) > 1:
        reasons += ["The recorded limit varied; its median stands for it."]
    return reasons


def _outliers(found: list[Spike], steps: int) -> tuple[bool, str]:
    """Return whether spikes count as outliers, with a description of them."""
    if not found:
        return False, "No step stands out from those before it."
    ratios = [spike.ratio for spike in found if not math.isnan(spike.ratio)]
    lost = len(found) - len(ratios)
    many = len(found) >= FEWEST_OUTLIERS and len(found) >= OUTLIER_SHARE * steps
    largest = f", the largest {max(ratios):.3g} times the median" if ratios else ""
    words = f"{len(found):,} of {steps:,} steps stand out{largest}"
    words += f"; {lost:,} were not finite, and skipped." if lost else "."
    return many or (bool(ratios) and max(ratios) >= LOUD), words


def _rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.1e}")
