# SPDX-License-Identifier: MIT
"""The panels of a picture of a recorded run, each drawn into matplotlib axes; matplotlib is not imported here."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from uniclip.insight.record import Record

Array: TypeAlias = np.ndarray[Any, Any]

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito; their contrast is at least 3 on white and on black."""
COLUMNS = 600
"""About one for each pixel of a panel."""
MARKS = 200
"""The largest number of markers of a kind, as more overlap."""
_SINGLE = 60
"""The largest number of steps with a dot each."""
_NAMED = 32
"""The number of leaves with a label, if there are more."""
_LONGEST = 26
"""The number of characters of a label that are shown, its last."""
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "borderaxespad": 0.2,
    "handlelength": 1.2,
    "columnspacing": 1.0,
    "handletextpad": 0.4,
}


def norms(ax: Any, record: Record) -> None:
    """Draw the norm over the steps, the limit, and what happened to the steps."""
    ax.set(xlabel="step", ylabel="norm", yscale="log")
    plain_numbers(ax.yaxis)
    positive = record.norms > 0
    if not (positive & np.isfinite(record.norms)).any():
        nothing(ax, "all norms are 0" if (record.norms == 0).any() else "no finite norms")
    _line(ax, record.steps, record.norms, positive, "norm")
    level, name = level_of(record)
    _middle(ax, record.steps, level, name)
    was_clipped = clipped(record)
    marks = {"linestyle": "none", "zorder": 3}
    _mark(
        ax, record, was_clipped & ~record.skipped, label="clipped", marker="v", color=VERMILION, markersize=4, **marks
    )
    _mark(ax, record, record.skipped, label="skipped", marker="X", color=PURPLE, markersize=7, **marks)
    broken = record.steps[~record.finite]
    if broken.size:
        top = ax.get_xaxis_transform()
        shown = broken[np.unique(np.linspace(0, broken.size - 1, COLUMNS).astype(int))]
        color = ax.yaxis.label.get_color()
        ax.plot(shown, np.full(shown.size, 0.98), "|", color=color, markersize=9, transform=top, label="not finite")
    count = len(ax.get_legend_handles_labels()[1])
    if count:
        wide = 3 if count > 4 else count  # noqa: PLR2004 - more than 4 are too wide for a row
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=wide, **_LEGEND)


def spread(ax: Any, record: Record, *, upright: bool = False) -> None:
    """Draw the histogram of the norms, and the share of the steps that are above each norm.

    The norms are on the vertical axis, beside those over the steps, or ``upright`` on the horizontal one.
    """
    values = np.sort(record.norms[np.isfinite(record.norms) & (record.norms > 0)])
    name = "x" if upright else "y"
    ax.set(**{f"{name}scale": "log"})
    plain_numbers(ax.xaxis if upright else ax.yaxis)
    if not values.size:
        nothing(ax, "no finite norms")
        return
    low, high = values[0] / 1.02, values[-1] * 1.02  # equal norms need a bin, too
    ax.hist(values, np.geomspace(low, high, 41), orientation="vertical" if upright else "horizontal", color=BLUE)
    other = ax.twinx() if upright else ax.twiny()
    shown = np.unique(np.linspace(0, values.size - 1, COLUMNS).astype(int))
    above = 100 * (values.size - 1 - shown) / values.size
    other.plot(*((values[shown], above) if upright else (above, values[shown])), color=VERMILION, linewidth=1.5)
    level = level_of(record)[0]
    level = level[np.isfinite(level) & (level > 0)]
    if level.size:
        line = ax.axvline if upright else ax.axhline
        line(np.median(level), color=GREEN, linestyle="--", linewidth=1.5)
    if upright:
        ax.set(xlabel="norm", ylabel="steps")
        other.set(ylim=(0, 105), ylabel="% of steps above")
    else:
        ax.set(xlabel="steps")
        other.set(xlim=(0, 105), xlabel="% of steps above")
    (other.yaxis if upright else other.xaxis).label.set_color(VERMILION)


def losses(ax: Any, record: Record) -> None:
    """Draw the losses over the steps."""
    values = record.losses[np.isfinite(record.losses)]
    ax.set(xlabel="step", ylabel="loss")
    if values.size and values.min() > 0 and values.max() > 100 * values.min():
        ax.set(yscale="log")
        plain_numbers(ax.yaxis)
    _line(ax, record.steps, record.losses, np.isfinite(record.losses), "loss")


def leaves(ax: Any, record: Record) -> None:
    """Draw the norms of the leaves over the steps as a map of logarithmic colors; what is not finite is left out."""
    edges, cells = _cells(record)
    known = cells[cells > 0]
    ax.set(xlabel="step")
    if not known.size:
        nothing(ax, "no finite norms of leaves")
        return
    low, high = known.min(), known.max()
    if low == high:
        low, high = low / 2, high * 2
    rows = np.arange(len(record.labels) + 1) - 0.5
    picture = np.ma.masked_where(~(cells > 0), cells)
    mesh = ax.pcolormesh(edges, rows, picture, norm="log", vmin=low, vmax=high, cmap="viridis", rasterized=True)
    ax.invert_yaxis()
    name_leaves(ax, record.labels)
    bar = ax.figure.colorbar(mesh, cax=ax.inset_axes((1.02, 0, 0.03, 1)), label="norm of the leaf")
    bar.solids.set_rasterized(True)
    plain_numbers(bar.ax.yaxis)


def name_leaves(ax: Any, labels: list[str]) -> None:
    """Write labels of leaves beside their rows, only some if there are many."""
    shown = range(0, len(labels), -(-len(labels) // _NAMED))
    texts = [labels[row] if len(labels[row]) <= _LONGEST else f"…{labels[row][1 - _LONGEST :]}" for row in shown]
    ax.set_yticks(shown)
    for text in ax.set_yticklabels(map(printable, texts), fontsize="small"):
        text.set_parse_math(False)


def printable(text: str) -> str:
    """Return text with U+FFFD in place of invisible characters, such as control characters."""
    return "".join([one if one.isprintable() else "\ufffd" for one in text])


def has_losses(record: Record) -> bool:
    """Whether a loss was recorded."""
    return bool(np.isfinite(record.losses).any())


def has_leaves(record: Record) -> bool:
    """Whether norms of leaves were recorded."""
    return bool(record.leaves.size)


def height_of_leaves(record: Record) -> float:
    """Return the height of the panel of the leaves, in inches."""
    return 0.8 + 0.17 * min(max(len(record.labels), 4), _NAMED)


def clipped(record: Record) -> Array:
    """Return at which steps a factor was not 1; none if that was not recorded."""
    known = np.where(np.isnan(record.shares), record.factors != 1, record.shares > 0)
    result: Array = known & ~(np.isnan(record.shares) & np.isnan(record.factors))
    return result


def level_of(record: Record) -> tuple[Array, str]:
    """Return the norm above which each step is clipped, and its name."""
    if np.isfinite(record.thresholds).any():
        return record.thresholds, "threshold"
    return record.limits, "limit"


def plain_numbers(axis: Any) -> None:
    """Write the numbers of a logarithmic axis without powers; also multiples of 2 and 5 where there is room."""

    def between(value: float, _: int) -> str:
        low, high = sorted(axis.get_view_interval())
        digit = f"{value:e}"[0]
        return f"{value:g}" if high < 100 * low and digit in "25" or high < 3 * low else ""  # noqa: RUF021

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(between)


def nothing(ax: Any, text: str) -> None:
    """Write in an empty panel why it is empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center")


def _line(ax: Any, steps: Array, values: Array, shown: Array, label: str) -> None:
    """Draw values over steps: each of a few; of many the median of each column in a band from smallest to largest."""
    shown = shown & np.isfinite(values)
    steps, values = steps[shown], values[shown]
    if not steps.size:
        return
    if steps.size <= 2 * COLUMNS:
        ax.plot(steps, values, ".-" if steps.size <= _SINGLE else "-", color=BLUE, linewidth=1, label=label)
        return
    at, low, middle, high = columns(steps, values)
    ax.fill_between(at, low, high, color=BLUE, alpha=0.5, linewidth=0.8, label=f"{label}: range")
    ax.plot(at, middle, color=BLUE, linewidth=1.2, label=f"{label}: median")


def _middle(ax: Any, steps: Array, level: Array, label: str) -> None:
    """Draw a limit or threshold over the steps where there is one."""
    known = np.isfinite(level) & (level > 0)
    steps, level = steps[known], level[known]
    if not steps.size:
        return
    if steps.size > 2 * COLUMNS:
        steps, _, level, _ = columns(steps, level)
    marker = "_" if steps.size == 1 else ""
    ax.plot(steps, level, color=GREEN, linestyle="--", marker=marker, linewidth=1.5, label=label, zorder=2.5)


def _mark(ax: Any, record: Record, chosen: Array, **look: Any) -> None:
    """Mark steps at their norms; of many, the largest norm in each column."""
    chosen = chosen & np.isfinite(record.norms) & (record.norms > 0)
    steps, values = record.steps[chosen], record.norms[chosen]
    if not steps.size:
        return
    edges = np.linspace(record.steps[0], record.steps[-1] + 1, MARKS + 1)
    cuts = np.unique(np.searchsorted(steps, edges[:-1]))
    cuts = cuts[cuts < steps.size]
    largest = [start + int(part.argmax()) for start, part in zip(cuts, np.split(values, cuts[1:]), strict=True)]
    ax.plot(steps[largest], values[largest], **look)


def columns(steps: Array, values: Array, count: int = COLUMNS) -> tuple[Array, Array, Array, Array]:
    """Return the middle step and the smallest, median and largest value of each of ``count`` parts of a run."""
    cuts = np.linspace(0, steps.size, count + 1).astype(int)[:-1]
    middle = np.asarray([np.median(part) for part in np.split(values, cuts[1:])])
    at = steps[(cuts + np.append(cuts[1:], steps.size)) // 2]
    return at, np.minimum.reduceat(values, cuts), middle, np.maximum.reduceat(values, cuts)


def _cells(record: Record) -> tuple[Array, Array]:
    """Return the edges of columns of steps, and the largest norm of each leaf (k, columns) in each of them.

    A column in which nothing was recorded shows the nearest step that was.
    """
    steps, values = record.leaf_steps, np.where(np.isfinite(record.leaves), record.leaves, np.nan)
    first, last = int(record.steps.min()), int(record.steps.max())
    count = min(COLUMNS, last - first + 1)
    edges = np.linspace(first - 0.5, last + 0.5, count + 1)
    starts = np.searchsorted(steps, edges)
    middle = (edges[1:] + edges[:-1]) / 2
    after = np.clip(np.searchsorted(steps, middle), 1, steps.size - 1) if steps.size > 1 else np.zeros(count, int)
    before = np.maximum(after - 1, 0)
    nearest = np.where(middle - steps[before] <= steps[after] - middle, before, after)
    cells = values[nearest]
    for column in np.flatnonzero(np.diff(starts)):
        cells[column] = np.fmax.reduce(values[starts[column] : starts[column + 1]])
    return edges, cells.T
