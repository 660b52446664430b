# SPDX-License-Identifier: MIT
"""A diagnosis of a recorded run, and three limits to try."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from uniclip._checks import check
from uniclip.insight.record import Record
from uniclip.insight.spikes import Spike, finite_steps, spikes

Array = np.ndarray[Any, Any]

STABLE, OUTLIERS, UNSTABLE, TOO_LITTLE = "stable", "outliers", "unstable", "too little data"
FEWEST = 100
"""How many norms are needed, for the verdict that a run is stable."""
FEWEST_LATER = 50
"""How many of them after the warm-up."""
WARM_UP, WARM_UP_STEPS = 0.1, 20
"""What is left out at the beginning: this share of the steps, and at least so many."""
QUANTILE = 90
SPAN = 10
"""How many losses, or norms, a median is taken of to see where they go."""
FEWEST_LOSSES = 2 * SPAN
RISE = 0.2
"""The share of what the loss has fallen by that it may rise again."""
NOISE = 3
"""A rise counts only if it is so many standard deviations of a single step's loss."""
GROWTH = 10
"""Without losses: the growth of the norms that counts as unstable."""
PREFIX = 10
"""How many norms before an explosion say what was usual."""
NEAR = 2
"""A recorded limit up to so many times the wanted one is as good as it."""
OUTLIER_SHARE, FEWEST_OUTLIERS, LOUD = 0.005, 3, 10
"""Spikes count as outliers if they are this share of the steps and so many, or one is so many times the median."""
HALF = 0.5
NORMALIZER = (
    "there clipping is a normalizer, and the learning rate sets the length of the steps. "
    "Lower the learning rate, or choose that knowingly."
)


class Share(NamedTuple):
    """What a limit would have done to the recorded norms.

    Attributes
    ----------
    limit : float
    share : float
        Of the known norms, those above the limit.
    factor : float
        The smallest factor, that of the largest norm; 1 where nothing is clipped.
    """

    limit: float
    share: float
    factor: float


class Advice(NamedTuple):
    """What `suggest` found; ``str()`` of it is a text for a terminal.

    Attributes
    ----------
    verdict : {"stable", "outliers", "unstable", "too little data"}
    limits : tuple of float
        Three limits to try, c/4, c and 4c with two significant digits; empty where none can be given.
    reasons : list of str
        A sentence for each number and decision.
    table : list of Share
        What these limits, and the recorded one, would have done.
    record_at : float or None
        The limit to record another run with, where this one cannot tell.
    """

    verdict: str
    limits: tuple[float, ...]
    reasons: list[str]
    table: list[Share]
    record_at: float | None

    def __str__(self) -> str:
        """Return the advice as lines of text."""
        lines = [f"Verdict: {self.verdict}"]
        if self.limits:
            lines += [f"Limits to try: {', '.join(f'{limit:g}' for limit in self.limits)}"]
        if self.record_at is not None:
            lines += [f"Record again with the limit {self.record_at:g}"]
        lines += ["", *[f"- {reason}" for reason in self.reasons]]
        if self.table:
            lines += ["", "     limit   clipped   smallest factor"]
            lines += [f"{row.limit:>10.3g} {100 * row.share:>7.1f} % {row.factor:>17.2g}" for row in self.table]
        if self.limits:
            lines += ["", "Try these three, each in a full run; one run is no measurement."]
        return "\n".join(lines)


class _Trouble(NamedTuple):
    """Where a run leaves its course: how many steps came before, and what happened."""

    before: int
    reason: str


def suggest(record: Record) -> Advice:
    """Say whether a run was stable, and which three limits to try.

    A stable run is one whose norms stay finite and whose loss, as a median of 10 steps, never rises above its least
    value so far by more than 20 % of what it falls by in all. Of such a run c is the 90th percentile of the norms after
    the warm-up. Of an unstable one only the steps before the trouble count: with their median it is to be recorded
    again, unless it was clipped at that or below already; then the learning rate is to be lowered, and c is a quarter
    of the lesser of the two.

    Parameters
    ----------
    record : Record
        Best of a full run that was clipped at 1.0: its norms are measured before clipping.

    Returns
    -------
    Advice

    Raises
    ------
    TypeError
        If ``record`` is no `Record`.

    Notes
    -----
    No single number is given: with a tuned learning rate none was found to be reliably better than 1.0. Steps that are
    not finite and were skipped are outliers; without losses, norms that grow tenfold are taken for instability.

    Examples
    --------
    >>> print(insight.suggest(insight.read("run.jsonl")))  # doctest: +SKIP
    """
    check("record", record, isinstance(record, Record), "a Record, which uniclip.insight.read returns")
    finite = finite_steps(record)
    known = finite & ~np.isnan(record.norms)
    start = max(math.ceil(WARM_UP * len(known)), WARM_UP_STEPS)
    trouble = _trouble(record, finite, known, start)
    if trouble is not None:
        return _unstable(record, known, trouble)
    if known.sum() < FEWEST or known[start:].sum() < FEWEST_LATER:
        reason = f"{known.sum():,} norms are known, {known[start:].sum():,} of them after the first {start:,} steps"
        return Advice(TOO_LITTLE, (), [f"{reason}; {FEWEST} and {FEWEST_LATER} are needed."], [], None)
    return _stable(record, known, start)


def table(record: Record, limits: tuple[float, ...]) -> list[Share]:
    """Return what limits would have done to the recorded norms, if these had stayed as they are.

    Parameters
    ----------
    record : Record
    limits : tuple of float

    Returns
    -------
    list of Share
        In the order of ``limits``; empty if no norm is known.
    """
    norms = record.norms[finite_steps(record) & ~np.isnan(record.norms)]
    if not len(norms):
        return []
    largest = float(norms.max())
    return [
        Share(limit, float(np.mean(norms > limit)), limit / largest if largest > limit else 1.0) for limit in limits
    ]


def recorded_limit(record: Record) -> float:
    """Return the limit that a run was clipped at: the median, ∞ if most steps had none."""
    limits = record.limits[~np.isnan(record.limits)]
    return float(np.median(limits)) if len(limits) else math.inf


def _stable(record: Record, known: Array, start: int) -> Advice:
    """Return the advice for a run that kept its course: the percentile of the norms that are no spikes."""
    first = record.steps[start]
    found = [spike for spike in spikes(record) if spike.step >= first]
    usual = known & ~np.isin(record.steps, [spike.step for spike in found])
    usual[:start] = False
    c = float(np.percentile(record.norms[usual], QUANTILE))
    loud, words = _outliers(found, len(record.steps) - start)
    reasons = [_course(record), words]
    left_out = f"the first {start:,} steps are left out as warm-up, and so are the spikes"
    reasons += [f"c = {c:.3g} is the {QUANTILE}th percentile of {usual.sum():,} norms: {left_out}."]
    if c == 0:
        reasons += ["A limit of 0 would zero the gradients, so none is suggested."]
    return _advice(record, OUTLIERS if loud else STABLE, c, reasons)


def _unstable(record: Record, known: Array, trouble: _Trouble) -> Advice:
    """Return the advice for a run that left its course: nothing after that counts."""
    prefix = record.norms[: trouble.before][known[: trouble.before]]
    limit, reasons = recorded_limit(record), [trouble.reason]
    if len(prefix) < PREFIX or not np.median(prefix):
        reasons += [
            f"Only {len(prefix):,} norms above 0 came before it, too few for a limit.",
            "Lower the learning rate, or warm it up more slowly, and record again.",
        ]
        return _advice(record, UNSTABLE, 0.0, reasons)
    middle = float(np.median(prefix))
    reasons += [f"The median of the {len(prefix):,} norms before it is {middle:.3g}; no later norm is used."]
    if limit > NEAR * middle:
        done = "was not clipped" if math.isinf(limit) else f"was clipped at {limit:.3g}, well above that"
        again = _rounded(middle)
        reasons += [f"The run {done}: record again, clipped at {again:g}, and ask again."]
        return _advice(record, UNSTABLE, 0.0, reasons, again)
    reasons += [
        f"It was clipped at {limit:.3g} already: lower the learning rate. That is what helps, not another limit.",
        f"If it has to stay, c = {min(middle, limit) / 4:.3g} is a quarter of the lesser of the two.",
    ]
    return _advice(record, UNSTABLE, min(middle, limit) / 4, reasons)


def _advice(record: Record, verdict: str, c: float, reasons: list[str], again: float | None = None) -> Advice:
    """Return advice with what follows from its limits."""
    limits = (_rounded(c / 4), _rounded(c), _rounded(4 * c)) if c > 0 else ()
    own = recorded_limit(record)
    tried = limits if math.isinf(own) or own in limits else (*limits, own)
    rows = table(record, tuple(sorted(tried)))
    most = [f"{row.limit:.3g} ({100 * row.share:.0f} %)" for row in rows if row.share > HALF]
    if most:
        reasons += [f"More than half of the steps would be clipped at {', '.join(most)}: {NORMALIZER}"]
    return Advice(verdict, limits, reasons + _about(record), rows, again)


def _about(record: Record) -> list[str]:
    """Return what is to be known of the norms that were recorded."""
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


def _course(record: Record) -> str:
    """Return what a run that kept its course was judged by."""
    losses = _losses(record)[1]
    if len(losses) < FEWEST_LOSSES:
        return f"No loss is recorded: the verdict is from the norms alone, which did not grow {GROWTH}-fold."
    medians = _running(losses)
    return f"The loss, as medians of {SPAN} steps, went from {medians[0]:.3g} to {medians[-1]:.3g} and did not rise."


def _outliers(found: list[Spike], steps: int) -> tuple[bool, str]:
    """Return whether spikes make outliers, and what they are."""
    if not found:
        return False, "No step stands out from those before it."
    ratios = [spike.ratio for spike in found if not math.isnan(spike.ratio)]
    lost = len(found) - len(ratios)
    many = len(found) >= FEWEST_OUTLIERS and len(found) >= OUTLIER_SHARE * steps
    largest = f", the largest {max(ratios):.3g} times the median" if ratios else ""
    words = f"{len(found):,} of {steps:,} steps stand out{largest}"
    words += f"; {lost:,} were not finite, and skipped." if lost else "."
    return many or (bool(ratios) and max(ratios) >= LOUD), words


def _trouble(record: Record, finite: Array, known: Array, start: int) -> _Trouble | None:
    """Return the first trouble; a run may leave its course long before something is not finite."""
    found = [_not_finite(record, finite), _left_course(record, known, start)]
    return min([trouble for trouble in found if trouble is not None], default=None)


def _not_finite(record: Record, finite: Array) -> _Trouble | None:
    """Return the first step that is not finite and was taken all the same, if there is one."""
    taken = np.flatnonzero(~finite & ~record.skipped)
    if not len(taken):
        return None
    return _Trouble(int(taken[0]), f"Step {record.steps[taken[0]]:,} was not finite, and was not skipped.")


def _left_course(record: Record, known: Array, start: int) -> _Trouble | None:
    """Return where the loss rises for good, or, without losses, the norms."""
    where, losses = _losses(record)
    if len(losses) < FEWEST_LOSSES:
        later = np.flatnonzero(known)
        later = later[later >= start]
        return _grown(record, later) if len(later) >= FEWEST_LOSSES else None
    medians = _running(losses)
    noise = 1.48 * float(np.median(np.abs(np.diff(losses)))) / math.sqrt(2)
    bound = max(RISE * (medians[0] - medians.min()), NOISE * noise)
    least = np.minimum.accumulate(medians)
    high = np.flatnonzero(medians > least + bound)
    if not len(high):
        return None
    lowest = int(medians[: high[0]].argmin())
    reason = (
        f"The loss, as a median of {SPAN} steps, rose from {medians[lowest]:.3g} to {medians[high].max():.3g} after "
        f"step {record.steps[where[lowest]]:,}; it had begun at {medians[0]:.3g}."
    )
    return _Trouble(int(where[lowest + SPAN - 1]) + 1, reason)


def _grown(record: Record, places: Array) -> _Trouble | None:
    """Return where the norms have grown tenfold above their least, and to twice those after the warm-up."""
    medians = _running(record.norms[places])
    least = np.minimum.accumulate(medians)
    high = np.flatnonzero((medians > GROWTH * least) & (medians > NEAR * medians[0]))
    if not len(high):
        return None
    lowest = int(medians[: high[0]].argmin())
    reason = (
        f"No loss is recorded, and the norms, as medians of {SPAN} steps, grew from {medians[lowest]:.3g} to "
        f"{medians[high].max():.3g} after step {record.steps[places[lowest]]:,}."
    )
    return _Trouble(int(places[lowest + SPAN - 1]) + 1, reason)


def _losses(record: Record) -> tuple[Array, Array]:
    """Return where losses are known, and these."""
    where = np.flatnonzero(np.isfinite(record.losses))
    return where, record.losses[where]


def _running(values: Array) -> Array:
    """Return the medians of all runs of `SPAN` values."""
    medians: Array = np.median(np.lib.stride_tricks.sliding_window_view(values, SPAN), axis=1)
    return medians


def _rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.1e}")
