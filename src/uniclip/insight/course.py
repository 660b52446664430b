# SPDX-License-Identifier: MIT
"""Whether a run is stable: its gradients and losses stay finite, and do not rise again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from uniclip.insight.record import Record

Array = np.ndarray[Any, Any]

SPAN = 10
"""The number of losses, or norms, in a median that shows their course."""
FEWEST_LOSSES = 2 * SPAN
RISE = 0.2
"""The share of its decrease by which the loss may rise again."""
NOISE, AROUND = 3, 100
"""A rise counts only from this number of standard deviations of a single step's loss, over this number of changes."""
GROWTH = 10
"""Without losses: the growth of the norms that counts as unstable."""
AGAIN = 2
"""And the norms must also be this multiple of those after the warm-up."""


class Trouble(NamedTuple):
    """Where a run becomes unstable: the number of steps before, and what happened."""

    before: int
    reason: str


def first_trouble(record: Record, finite: Array, known: Array, start: int) -> Trouble | None:
    """Return the first trouble; a run may be unstable long before something is not finite."""
    found = [_not_finite(record, finite), _left_course(record, known, start)]
    return min([trouble for trouble in found if trouble is not None], default=None)


def kept_course(record: Record) -> str:
    """Return the evidence that a run was stable."""
    losses = _losses(record)[1]
    if len(losses) < FEWEST_LOSSES:
        return f"No loss is recorded: the verdict is from the norms alone, which did not grow {GROWTH}-fold."
    medians = _running(losses)
    return f"The loss, as medians of {SPAN} steps, went from {medians[0]:.3g} to {medians[-1]:.3g} and did not rise."


def _not_finite(record: Record, finite: Array) -> Trouble | None:
    """Return the first step that was taken although its gradients or loss were not finite, if any."""
    lost = np.isinf(record.losses)
    taken = np.flatnonzero((~finite | lost) & ~record.skipped)
    if not len(taken):
        return None
    what = "Step" if not finite[taken[0]] else "The loss of step"
    return Trouble(int(taken[0]), f"{what} {record.steps[taken[0]]:,} was not finite, and was not skipped.")


def _left_course(record: Record, known: Array, start: int) -> Trouble | None:
    """Return where the loss, or without losses the norms, rises lastingly."""
    where, losses = _losses(record)
    if len(losses) < FEWEST_LOSSES:
        later = np.flatnonzero(known)
        later = later[later >= start]
        return _grown(record, later) if len(later) >= FEWEST_LOSSES else None
    medians = _running(losses)
    usual = _spread(np.abs(np.diff(losses)))
    least = np.minimum.accumulate(medians)
    at = np.maximum.accumulate(np.where(medians == least, np.arange(len(medians)), 0))
    bound = np.maximum(RISE * (medians[0] - medians.min()), NOISE * np.maximum(usual, _noise(losses)[at]))
    words = f"The loss, as a median of {SPAN} steps, rose", f"; it had begun at {medians[0]:.3g}."
    return _risen(record, where, medians, medians > least + bound, words)


def _noise(losses: Array) -> Array:
    """Return the standard deviation of a step's loss around each run of `SPAN` losses, from the changes up to its end.

    The noise of many losses shrinks with them, and the average noise of a run is too small for its beginning.
    """
    changes = np.abs(np.diff(losses))
    count = min(AROUND, len(changes))
    spreads = _spread(np.lib.stride_tricks.sliding_window_view(changes, count))
    ends = np.arange(SPAN - 1, len(losses)) - 1  # the last change within each run
    found: Array = spreads[np.maximum(ends - count + 1, 0)]
    return found


def _spread(changes: Array) -> Any:
    """Return the standard deviation of values, given the changes from step to step."""
    return 1.48 / math.sqrt(2) * np.median(changes, axis=-1)


def _grown(record: Record, places: Array) -> Trouble | None:
    """Return where the norms have grown tenfold above their minimum, and to twice those after the warm-up."""
    medians = _running(record.norms[places])
    least = np.minimum.accumulate(medians)
    high = (medians > GROWTH * least) & (medians > AGAIN * medians[0])
    words = f"No loss is recorded, and the norms, as medians of {SPAN} steps, grew", "."
    return _risen(record, places, medians, high, words)


def _risen(record: Record, places: Array, medians: Array, high: Array, words: tuple[str, str]) -> Trouble | None:
    """Return the trouble where medians rise, worded with the texts before and after the numbers."""
    found = np.flatnonzero(high)
    if not len(found):
        return None
    lowest = int(medians[: found[0]].argmin())
    rise = f"from {medians[lowest]:.3g} to {medians[found].max():.3g} after step {record.steps[places[lowest]]:,}"
    return Trouble(int(places[lowest + SPAN - 1]) + 1, f"{words[0]} {rise}{words[1]}")


def _losses(record: Record) -> tuple[Array, Array]:
    """Return where losses are known, and the losses."""
    where = np.flatnonzero(np.isfinite(record.losses))
    return where, record.losses[where]


def _running(values: Array) -> Array:
    """Return the medians of all runs of `SPAN` values."""
    medians: Array = np.median(np.lib.stride_tricks.sliding_window_view(values, SPAN), axis=1)
    return medians
