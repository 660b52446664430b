# SPDX-License-Identifier: MIT
"""A picture of a recorded run, by matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from uniclip._errors import check, needs
from uniclip.insight.record import INSTALL, Record
from uniclip.insight.spikes import Spike, largest
from uniclip.insight.summary import printable, skip_thresholds

Array: TypeAlias = np.ndarray[Any, Any]

BLUE, VERMILION, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
"""From the palette of Okabe and Ito, but for gray.

Their contrast is at least 3 on white and on black.
"""
COLUMNS, STRIP = 600, 200
"""How many columns a long run is drawn in: about one for each pixel; in strips wider,
so that a single one is seen.
"""
NAMED = 5
"""The number of spikes with their step and leaf."""
LONGEST = 24
"""The number of characters of a leaf that are shown, its last."""
_LETTER = 0.062
"""The width of a letter of a small text, in inches."""
_SIZE = 9.0, 4.0
"""The size of the figure, in inches."""


def plot(record: Record, ax: Any = None) -> Any:
    """Draw the norms of a recorded run, the limit, and what happened to the steps.

    The norm before clipping is on a logarithmic axis, with the limit (or the threshold, if the rule
    clips to less than the threshold), and the bound above which steps are skipped. The largest
    spikes have their step and, if recorded, the leaf that stands out most. Strips above show which
    steps were clipped, skipped and not finite, and above them is the loss, if it was recorded. Of
    more than 1,200 steps the smallest, median and largest norm in each of 600 columns is drawn, so
    that no spike is lost; the strips then have 200 columns, and the color of "clipped" is the
    fuller, the more of them were.

    Parameters
    ----------
    record : Record
        What `read` returns.
    ax : matplotlib.axes.Axes, optional
        Where to draw. By default pyplot makes a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        ``.figure`` is the figure.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ModuleNotFoundError
        If matplotlib is not installed.

    Notes
    -----
    Text, ticks and frames have the colors of ``matplotlib.rcParams``, so that any style applies.
    The colors of the data are from the color-blind safe palette of Okabe and Ito (2008), with a
    contrast of at least 3 on white and on black.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> ax = insight.plot(record)
    >>> ax.figure.savefig("run.png")
    """
    found = largest(record)
    check("ax", ax, ax is None or hasattr(ax, "inset_axes"), "one Axes of matplotlib, or None")
    if ax is None:
        with needs("matplotlib", INSTALL):
            import matplotlib.pyplot as plt  # noqa: PLC0415 - takes longer to import than uniclip
        ax = plt.figure(figsize=_SIZE, layout="constrained").subplots()
    ax.set(xlabel="step", ylabel="norm before clipping", yscale="log")
    ax.xaxis.set_major_formatter("{x:,g}")
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(partial(_tick, ax.yaxis))
    shown = record.norms > 0
    if not (shown & np.isfinite(record.norms)).any():
        ax.text(
            0.5, 0.5, "no finite norm above 0", transform=ax.transAxes, ha="center", va="center"
        )
    _line(ax, record.steps, record.norms, "norm", color=BLUE)
    has_thresholds = bool(np.isfinite(record.thresholds).any())
    level = record.thresholds if has_thresholds else record.limits
    _line(
        ax,
        record.steps,
        level,
        "threshold" if has_thresholds else "limit",
        color=GREEN,
        linestyle="--",
    )
    bounds = skip_thresholds(
        record
    )  # no line of their own where they are the limits or the thresholds
    _line(
        ax,
        record.steps,
        np.where(bounds == level, np.nan, bounds),
        "skips above",
        color=PURPLE,
        linestyle=":",
    )
    if record.steps.size > 1:
        ax.set_xlim(record.steps[0] - 0.5, record.steps[-1] + 0.5)
    _spikes(ax, record, [one for one in found if math.isfinite(one.ratio)][:NAMED])
    _losses(ax, record, _strips(ax, record))
    _name_lines(ax)
    return ax


def _tick(axis: Any, value: float, _: int) -> str:
    """Return the text of a tick: between powers of ten only where there is little of them."""
    low, high = sorted(axis.get_view_interval())
    few = high < 1e3 * low and f"{value:e}"[:3] in {"2.0", "5.0"}
    return f"{value:g}" if f"{value:e}".startswith("1.0") or few or high < 10 * low else ""


def _name_lines(ax: Any) -> None:
    """Write the name of each line beside its end, one above the other where they are near."""
    low, high = np.log(ax.get_ylim())
    lines, place = [line for line in ax.get_lines() if line.get_label()[:1] != "_"], -1.0
    for line in sorted(lines, key=lambda line: line.get_ydata()[-1]):
        place = max((np.log(line.get_ydata()[-1]) - low) / (high - low), place + 0.07)
        ax.text(
            1.01,
            place,
            line.get_label(),
            color=line.get_color(),
            transform=ax.transAxes,
            va="center",
            fontsize="small",
        )


def _line(ax: Any, steps: Array, values: Array, label: str, **look: Any) -> None:
    """Draw values over steps; of many the median in each column,
    in a band from the smallest to the largest.
    """
    known = np.isfinite(values) & ((values > 0) | (ax.get_yscale() == "linear"))
    steps, values = steps[known], values[known]
    if not steps.size:
        return
    if steps.size > 2 * COLUMNS:
        cuts = np.linspace(0, steps.size, COLUMNS + 1).astype(int)
        at = steps[(cuts[1:] + cuts[:-1]) // 2]
        low, high = (some.reduceat(values, cuts[:-1]) for some in (np.minimum, np.maximum))
        ax.fill_between(
            at, low, high, color=look["color"], alpha=0.5, linewidth=look.get("linewidth", 0.8)
        )
        steps, values = at, np.asarray([np.median(part) for part in np.split(values, cuts[1:-1])])
    marker = "." if steps.size == 1 else ""
    ax.plot(steps, values, marker=marker, label=label, **{"linewidth": 1.2} | look)


def _spikes(ax: Any, record: Record, found: list[Spike]) -> None:
    """Mark the largest spikes, with their step and the leaf that stands out most,
    in rows where they cross nothing.
    """
    if not found:
        return
    look: dict[str, Any] = {
        "color": VERMILION,
        "fillstyle": "none",
        "clip_on": False,
        "label": "_spikes",
    }
    ax.plot([one.step for one in found], [one.norm for one in found], "o", **look)
    wide = _LETTER / (ax.get_window_extent().width / ax.figure.dpi)
    named = []
    for one in found:
        text = (
            f" {one.step:,} {printable(_last(one.leaves[0][0]))} "
            if one.leaves
            else f" {one.step:,} "
        )
        place = (one.step - record.steps[0]) / max(record.steps[-1] - record.steps[0], 1)
        width = wide * len(text)
        named.append((place + width > 1, place, width, text, one))
    rows: list[list[tuple[float, float]]] = [[] for _ in found]
    line = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.6, "shrinkA": 0}
    look = {
        "textcoords": ax.get_xaxis_transform(),
        "fontsize": "small",
        "parse_math": False,
        "va": "top",
    }
    # In this order no line to a spike crosses the text of another.
    for left, place, width, text, one in sorted(
        named, key=lambda name: (name[0], -name[1] if name[0] else name[1])
    ):
        span = (place - width, place) if left else (place, place + width)
        free = [
            number
            for number, row in enumerate(rows)
            if not any(a < span[1] and span[0] < b for a, b in row)
        ]
        number = free[0] if free else len(rows) - 1
        rows[number].append(span)
        look |= {"ha": "right" if left else "left", "arrowprops": line | {"relpos": (int(left), 0)}}
        ax.annotate(text, (one.step, one.norm), (one.step, 0.97 - 0.07 * number), **look)
    low, high = np.log(ax.get_ylim())
    used = 0.04 + 0.07 * sum(map(bool, rows))
    ax.set_ylim(top=math.exp(low + (high - low) / (1 - used)))


def _last(label: str) -> str:
    """Return the end of a label."""
    return label if len(label) <= LONGEST else f"…{label[1 - LONGEST :]}"


def _losses(ax: Any, record: Record, bottom: float) -> None:
    """Draw the recorded loss as a thin line above the strips."""
    if not np.isfinite(record.losses).any():
        return
    panel = ax.inset_axes((0, 1.03 + bottom, 1, 0.2), sharex=ax)
    if not (record.losses <= 0).any():
        panel.set_yscale("log")
    _line(panel, record.steps, record.losses, "loss", color=GRAY, linewidth=0.8)
    panel.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    panel.margins(y=0.2)  # what is above the axes may be cut by a constrained layout
    panel.set_ylabel("loss", fontsize="small", rotation=0, ha="right", va="center")
    panel.spines[:].set_visible(False)


def _strips(ax: Any, record: Record) -> float:
    """Draw a strip for the steps that were clipped, one for those that were skipped,
    and one for those not finite.

    Return their height.
    """
    from matplotlib.colors import to_rgb  # noqa: PLC0415 - takes longer to import than uniclip

    flags = {
        "clipped": ((record.shares > 0) & record.finite & ~record.skipped, VERMILION),
        "skipped": (record.skipped, PURPLE),
        "not finite": (~record.finite, GRAY),
    }
    drawn = {name: one for name, one in flags.items() if one[0].any()}
    if not drawn:
        return 0.0
    first, last = record.steps[[0, -1]]
    count = int(min(2 * COLUMNS if len(record.steps) <= 2 * COLUMNS else STRIP, last - first + 1))
    columns = (record.steps - first) * count // (last - first + 1)
    of_each = np.maximum(np.bincount(columns, minlength=count), 1)
    pixels = np.zeros((len(drawn), count, 4))
    for row, (name, (flag, color)) in zip(pixels, drawn.items(), strict=True):
        share = np.bincount(columns, flag, count) / of_each
        row[:, :3] = to_rgb(color)
        row[:, 3] = np.where(share > 0, 0.4 + 0.6 * share if name == "clipped" else 1, 0)
    # Above the label of a tick at the very top.
    strip = ax.inset_axes((0, 1.05, 1, 0.06 * len(drawn)), sharex=ax)
    strip.imshow(
        pixels,
        extent=(first - 0.5, last + 0.5, len(drawn), 0),
        aspect="auto",
        interpolation="nearest",
    )
    strip.set_yticks(np.arange(len(drawn)) + 0.5, drawn, fontsize="small")
    strip.tick_params(length=0, labelbottom=False)
    return 0.03 + 0.06 * len(drawn)
