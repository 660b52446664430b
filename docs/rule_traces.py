# SPDX-License-Identifier: MIT
"""Draw rules that learn: norms before and after them and their limit, step by step; the rules themselves are run."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from drawing_style import BLUE, GRAY, ORANGE, RED
from rule_drawing import AFTER, BEFORE, LIMIT, bare, beside, new, plain_log, small

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPIKES = {50: 8.0, 120: 100.0, 250: 6.0, 251: 6.0, 252: 6.0}
WRITTEN = {50: "8 times", 120: "100 times", 251: "6 times"}
MISSING, SHIFT, LENGTH = 85, 180, 300
LOW, HIGH = 0.05, 500.0


class Trace(NamedTuple):
    """Norms before and after a rule at each step, and above which it clips, NaN where nothing does."""

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray
    text: str  # what the bound is called


def series() -> np.ndarray:
    """Return synthetic norms: around 1, then around 2, with spikes and one NaN."""
    norms = np.random.default_rng(4).lognormal(0.0, 0.2, LENGTH)
    norms[SHIFT:] *= 2
    for step, size in SPIKES.items():
        norms[step] *= size
    norms[MISSING] = np.nan
    return norms


@cache
def trace(rule: Any) -> Trace:
    """Run a rule on the norms of `series`."""
    norms, state, after, bounds = series(), rule.init(np.zeros(1)), [], []
    above = False
    for norm in norms:
        _, state, report = rule.update(np.asarray([norm]), state)
        above = report.thresholds is not None
        after.append(norm * float(np.ravel(report.factors)[0]))
        bounds.append(float(np.ravel(report.thresholds if above else report.limits)[0]))
    there = np.asarray(bounds) < np.finfo(np.float32).max
    bound = np.where(there & ~np.isnan(norms), bounds, np.nan)
    return Trace(norms, np.asarray(after), bound, "clips above" if above else "limit")


def over_time(rule: Any) -> Figure:
    """Draw the norms before and after a rule that learns, its limit, and which steps it clips."""
    found, figure = trace(rule), new(3.0)
    ax, strip = figure.subplots(2, 1, sharex=True, height_ratios=[11, 1])
    figure.subplots_adjust(left=0.13, right=0.78, top=0.98, bottom=0.17, hspace=0.07)
    _lines(ax, found, written=True)
    plain_log(ax, LOW, HIGH)
    ax.set(ylabel="norm", xlim=(0, LENGTH))
    ax.tick_params(bottom=False)
    for step, text in WRITTEN.items():
        top = np.nanmax([found.before[step], *found.bound[max(step - 25, 0) : step + 25]])
        ax.text(step, top * 1.35, text, color=GRAY, ha="center")
    ax.annotate("norms double", (SHIFT, 5), (SHIFT + 45, 190), color=GRAY, ha="center", arrowprops=_pointer(GRAY))
    ax.annotate("NaN", (MISSING, 0.7), xytext=(MISSING, 0.12), color=RED, ha="center", arrowprops=_pointer(RED))
    last = [(found.before[-20:], "before", GRAY), (found.after[-20:], "after", BLUE), (found.bound, found.text, ORANGE)]
    ends = [(_end(line), text, color) for line, text, color in last if not np.all(np.isnan(line))]
    beside(ax, ends)
    _strip(strip, found)
    return figure


def thumbnail(rule: Any) -> Figure:
    """Draw the same on a card, without a word."""
    found, figure = trace(rule), small()
    ax = figure.add_axes((0.02, 0.03, 0.96, 0.95))
    _lines(ax, found)
    plain_log(ax, LOW, 150)
    bare(ax)
    ax.set_xlim(0, LENGTH)
    return figure


def _lines(ax: Any, found: Trace, *, written: bool = False) -> None:
    """Draw the three lines, the limit above the others; a gradient that became 0 lies at the bottom."""
    steps, shown = np.arange(LENGTH), np.where(found.after < LOW, LOW, found.after)
    ax.plot(steps, found.before, **BEFORE)
    ax.plot(steps, shown, **AFTER)
    ax.plot(steps, found.bound, **LIMIT)
    gone = steps[found.after == 0]
    ax.plot(gone, np.full(len(gone), LOW * 1.3), "v", color=BLUE, markersize=6, zorder=6)
    if len(gone) and written:
        ax.annotate("0: skipped", (gone[0], LOW * 1.3), (8, 2), color=BLUE, textcoords="offset points")


def _strip(ax: Any, found: Trace) -> None:
    """Mark the steps that are clipped."""
    changed = ~np.isnan(found.after) & (found.after != found.before)
    ax.vlines(np.flatnonzero(changed), 0, 1, color=BLUE, linewidth=1.1)
    ax.set(ylim=(0, 1), yticks=[], xlabel="step")
    ax.spines["left"].set_visible(False)
    count = int(changed.sum())
    text = f"clipped: {count}\nof {LENGTH} steps"
    ax.text(1.03, 0.5, text, color=BLUE, transform=ax.transAxes, va="center")


def _end(line: np.ndarray) -> float:
    """Return the height of a line's label."""
    return float(np.exp(np.nanmean(np.log(np.maximum(line[~np.isnan(line)][-20:], LOW)))))


def _pointer(color: str) -> dict[str, Any]:
    return {"arrowstyle": "-|>", "color": color, "linewidth": 1, "shrinkA": 0, "shrinkB": 1}


class Batches(NamedTuple):
    """Norms of the examples of each batch, before and after a rule, and its limits."""

    before: np.ndarray
    after: np.ndarray
    limits: np.ndarray


@cache
def batches(rule: Any, count: int = 60, size: int = 24) -> Batches:
    """Run a rule for examples that learns; half-way the norms grow."""
    rng, before, after, limits = np.random.default_rng(5), [], [], []
    state = rule.init(np.zeros((size, 1)))
    for step in range(count):
        norms = rng.lognormal(0.0 if step < count // 2 else 1.0, 0.6, (size, 1))
        clipped, state, report = rule.update(norms, state)
        before.append(norms[:, 0])
        after.append(clipped[:, 0])
        limits.append(float(np.ravel(report.limits)[0]))
    return Batches(np.asarray(before), np.asarray(after), np.asarray(limits))


def over_batches(rule: Any) -> Figure:
    """Draw the norms of the examples before and after a rule that learns, and its limit."""
    found, figure = batches(rule), new(2.7)
    ax = figure.subplots()
    figure.subplots_adjust(left=0.13, right=0.79, top=0.98, bottom=0.18)
    _dots(ax, found, 12, 4.5)
    plain_log(ax, 0.08, 60)
    ax.set(xlabel="step", ylabel="norm of an example", xlim=(-1, len(found.limits)))
    half = len(found.limits) // 2
    ax.annotate("norms grow", (half, 12), xytext=(half, 30), color=GRAY, ha="center", arrowprops=_pointer(GRAY))
    beside(ax, [(float(found.before[-1].max()), "before ·", GRAY), (found.limits[-1], "limit", ORANGE)])
    ax.text(1.02, 0.4, "after •", color=BLUE, transform=ax.transAxes)
    return figure


def thumbnail_of_batches(rule: Any) -> Figure:
    """Draw the same on a card, without a word."""
    found, figure = batches(rule), small()
    ax = figure.add_axes((0.02, 0.03, 0.96, 0.95))
    _dots(ax, found, 5, 4.0)
    plain_log(ax, 0.08, 20)
    bare(ax)
    return figure


def _dots(ax: Any, found: Batches, shown: int, size: float) -> None:
    """Draw some of the examples of each batch, and the limit."""
    steps = np.repeat(np.arange(len(found.limits)), shown)
    ax.plot(steps, found.before[:, :shown].ravel(), ".", color=GRAY, markersize=0.6 * size)
    ax.plot(steps, found.after[:, :shown].ravel(), ".", color=BLUE, markersize=size)
    ax.plot(found.limits, **LIMIT)
