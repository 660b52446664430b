# SPDX-License-Identifier: MIT
"""Plot a recorded run with matplotlib, which is imported only to draw."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from uniclip._errors import check, needs
from uniclip.insight.record import INSTALL, Booleans, Floats, Integers, Record
from uniclip.insight.spikes import Spike, largest
from uniclip.insight.summary import printable, skip_thresholds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
"""Colors of Okabe and Ito, with another gray.

Their contrast is at least 3 on white and on black.
"""
MAX_COLUMNS = 600
"""The number of columns for a long run: about one for each pixel."""
STRIP_COLUMNS = 200
"""The number of columns in the strips of a long run, wide enough to see a single step."""
MAX_SPIKES = 5
"""The number of spikes that are labeled."""
MAX_NAME = 24
"""The number of characters of a leaf's name that are shown, the last ones."""
_LETTER_WIDTH = 0.062
"""The width of a letter of small text, in inches."""
_ROW_HEIGHT = 0.07
"""The height of a row of small text, as a fraction of the axes."""
_STRIP_HEIGHT = 0.06
"""The height of a strip, as a fraction of the axes."""
_FIGURE_SIZE = 9.0, 4.0
"""The size of the figure, in inches."""


def plot(record: Record, ax: Axes | None = None) -> Axes:
    """Plot the norms of a recorded run, the limit, and which steps were clipped or skipped.

    The norm before clipping is on a logarithmic axis, with the limit (or the threshold, if the rule
    clips to less than the threshold) and the skip threshold. Labels show the steps of the largest
    spikes and, if recorded, the leaf that stands out most. Strips at the top show which steps were
    clipped, skipped, or non-finite; above them is the loss, if it was recorded.

    For more than 1,200 steps, the plot shows the smallest, median and largest norm in each of 600
    columns, so that no spike is lost. The strips then have 200 columns, and "clipped" is darker for
    columns with more clipped steps.

    Parameters
    ----------
    record : Record
        The result of `read`.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on. By default pyplot makes a new figure.

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
    spikes = [spike for spike in largest(record) if math.isfinite(spike.ratio)]
    is_axes = ax is None or hasattr(ax, "inset_axes")
    check("ax", ax, is_axes, "one Axes of matplotlib, or None")
    if ax is not None:
        return _draw(ax, record, spikes)

    with needs("matplotlib", INSTALL):
        import matplotlib.pyplot as plt  # noqa: PLC0415 - takes longer to import than uniclip

    figure = plt.figure(figsize=_FIGURE_SIZE, layout="constrained")
    try:
        ax = _draw(figure.subplots(), record, spikes)
        _make_room(figure)
    except BaseException:
        # Pyplot would keep a figure that nobody has.
        plt.close(figure)
        raise
    return ax


def _draw(ax: Axes, record: Record, spikes: list[Spike]) -> Axes:
    """Draw a recorded run on axes, and return them."""
    ax.set(xlabel="step", ylabel="norm before clipping", yscale="log")
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.yaxis.set_major_formatter(partial(_format_tick, ax.yaxis))
    ax.yaxis.set_minor_formatter(partial(_format_tick, ax.yaxis))

    _draw_norms(ax, record)
    if record.steps.size > 1:
        ax.set_xlim(record.steps[0] - 0.5, record.steps[-1] + 0.5)
    _label_spikes(ax, record, spikes[:MAX_SPIKES])

    height = _draw_strips(ax, record)
    _draw_losses(ax, record, bottom=1.03 + height)
    _name_lines(ax)
    return ax


def _make_room(figure: Figure) -> None:
    """Lay out a figure once, since the first layout leaves too little room above the axes."""
    figure.draw_without_rendering()


def _format_tick(axis: Axis, value: float, _position: int | None) -> str:
    """Return the text of a tick, empty for ticks that would crowd a logarithmic axis."""
    low, high = sorted(axis.get_view_interval())
    digits = f"{value:e}"[:3]
    if digits == "1.0" or high < 10 * low:
        return f"{value:g}"

    # Over fewer than three powers of ten, 2 and 5 have room, too.
    if digits in {"2.0", "5.0"} and high < 1e3 * low:
        return f"{value:g}"
    return ""


def save_plot(record: Record, path: Path) -> None:
    """Write the figure of a recorded run to a file."""
    new_figure(record).savefig(path)


def new_figure(record: Record, size: tuple[float, float] = _FIGURE_SIZE) -> Figure:
    """Return the figure of a recorded run, without pyplot, which may need a display.

    The size is in inches.
    """
    with needs("matplotlib", INSTALL):
        from matplotlib.figure import Figure  # noqa: PLC0415 - takes longer to import than uniclip

    figure = Figure(figsize=size, layout="constrained")
    plot(record, figure.subplots())
    _make_room(figure)
    return figure


def _draw_norms(ax: Axes, record: Record) -> None:
    """Draw the norms, the limit or threshold, and the skip threshold."""
    has_norm = np.isfinite(record.norms) & (record.norms > 0)
    if not has_norm.any():
        # Above the middle of the axis, where a constant limit is.
        text = "no finite norm above 0"
        ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center")
    _draw_line(ax, record.steps, record.norms, _Line("norm", BLUE))

    levels = record.limits
    name = "limit"
    if np.isfinite(record.thresholds).any():
        levels = record.thresholds
        name = "threshold"
    _draw_line(ax, record.steps, levels, _Line(name, GREEN, "--"))

    # A skip threshold that equals the limit or the threshold would cover its line.
    skip_levels = skip_thresholds(record)
    skip_levels[skip_levels == levels] = np.nan
    _draw_line(ax, record.steps, skip_levels, _Line("skip threshold", PURPLE, ":"))


class _Line(NamedTuple):
    """The name and the look of a line."""

    name: str
    color: str
    style: str = "-"
    width: float = 1.2


def _draw_line(ax: Axes, steps: Integers, values: Floats, line: _Line) -> None:
    """Draw values over steps.

    In a long run, draw the median of each column in a band from its smallest to its largest value.
    """
    drawable = np.isfinite(values)
    if ax.get_yscale() == "log":
        drawable &= values > 0
    steps = steps[drawable]
    values = values[drawable]
    if not steps.size:
        return

    # More points than pixels take long to draw, and only their extremes stay visible.
    if steps.size > 2 * MAX_COLUMNS:
        edges = np.linspace(0, steps.size, MAX_COLUMNS + 1).astype(int)
        steps = steps[(edges[1:] + edges[:-1]) // 2]
        lowest = np.minimum.reduceat(values, edges[:-1])
        highest = np.maximum.reduceat(values, edges[:-1])
        edge_width = min(line.width, 0.8)
        ax.fill_between(steps, lowest, highest, color=line.color, alpha=0.5, linewidth=edge_width)
        columns = np.split(values, edges[1:-1])
        values = np.asarray(list(map(np.median, columns)))

    [drawn] = ax.plot(steps, values, color=line.color, label=line.name)
    drawn.set(linestyle=line.style, linewidth=line.width)
    # A line through one point is invisible.
    if steps.size == 1:
        drawn.set_marker(".")


def _name_lines(ax: Axes) -> None:
    """Write the name of each line next to its end, and move names up that would overlap."""
    named = []
    for line in ax.get_lines():
        name = str(line.get_label())
        if not name.startswith("_"):
            last = float(np.asarray(line.get_ydata())[-1])
            named.append((last, name, line.get_color()))
    named.sort(key=lambda line: line[0])

    low, high = np.log(ax.get_ylim())
    place = -1.0
    for last, name, color in named:
        height = (math.log(last) - low) / (high - low)
        place = max(height, place + _ROW_HEIGHT)
        text = ax.text(1.01, place, name, transform=ax.transAxes, va="center", fontsize="small")
        text.set_color(color)


class _Label(NamedTuple):
    """The label of a spike, with its extent as fractions of the width of the axes."""

    spike: Spike
    text: str
    start: float
    end: float
    is_left: bool
    """Whether the label ends at its spike."""


def _label_spikes(ax: Axes, record: Record, spikes: list[Spike]) -> None:
    """Mark spikes with circles, and write their steps and leaves in rows above the norms."""
    if not spikes:
        return
    steps = [spike.step for spike in spikes]
    norms = [spike.norm for spike in spikes]
    ax.plot(steps, norms, "o", label="_spikes", color=VERMILION, fillstyle="none", clip_on=False)

    # Matplotlib knows the size of a text only after it is drawn, so estimate it.
    letter_width = _LETTER_WIDTH / (ax.get_window_extent().width / ax.figure.dpi)
    labels = [_make_label(record, spike, letter_width) for spike in spikes]
    rows = _arrange(labels)

    line_style = {"arrowstyle": "-", "color": GRAY, "linewidth": 0.6, "shrinkA": 0}
    for number, row in enumerate(rows):
        height = 0.97 - _ROW_HEIGHT * number
        for label in row:
            ax.annotate(
                label.text,
                xy=(label.spike.step, label.spike.norm),
                xytext=(label.spike.step, height),
                textcoords=ax.get_xaxis_transform(),
                ha="right" if label.is_left else "left",
                va="top",
                fontsize="small",
                parse_math=False,
                arrowprops=line_style | {"relpos": (int(label.is_left), 0)},
            )

    # Make room for the rows above the norms.
    low, high = np.log(ax.get_ylim())
    used = 0.04 + _ROW_HEIGHT * len(rows)
    ax.set_ylim(top=math.exp(low + (high - low) / (1 - used)))


def _make_label(record: Record, spike: Spike, letter_width: float) -> _Label:
    """Return the label of a spike: to its right, or to its left near the end of the run."""
    text = f" step {spike.step:,} "
    if spike.leaves:
        name, _ = spike.leaves[0]
        text = f" step {spike.step:,}: {printable(_shorten(name))} "
    width = letter_width * len(text)

    length = max(record.steps[-1] - record.steps[0], 1)
    place = float((spike.step - record.steps[0]) / length)
    if place + width > 1:
        return _Label(spike, text, place - width, place, is_left=True)
    return _Label(spike, text, place, place + width, is_left=False)


def _arrange(labels: list[_Label]) -> list[list[_Label]]:
    """Return rows of labels that do not overlap."""
    # In this order no line to a spike crosses the text of another one.
    to_right = sorted(
        [label for label in labels if not label.is_left], key=lambda label: label.start
    )
    to_left = sorted([label for label in labels if label.is_left], key=lambda label: -label.end)

    rows: list[list[_Label]] = []
    for label in to_right + to_left:
        for row in rows:
            if not any([_overlap(label, neighbor) for neighbor in row]):
                row.append(label)
                break
        else:
            rows.append([label])
    return rows


def _overlap(first: _Label, second: _Label) -> bool:
    """Return whether two labels of one row overlap."""
    return first.start < second.end and second.start < first.end


def _shorten(name: str) -> str:
    """Return the end of a long name."""
    if len(name) <= MAX_NAME:
        return name
    return f"…{name[1 - MAX_NAME :]}"


def _draw_losses(ax: Axes, record: Record, bottom: float) -> None:
    """Draw the recorded loss as a thin line above the strips."""
    if not np.isfinite(record.losses).any():
        return
    panel = ax.inset_axes((0, bottom, 1, 0.2), sharex=ax)
    if not (record.losses <= 0).any():
        panel.set_yscale("log")
    _draw_line(panel, record.steps, record.losses, _Line("loss", GRAY, width=0.8))

    panel.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    # A constrained layout may still cut a little of what is above the axes.
    panel.margins(y=0.2)
    panel.set_ylabel("loss", fontsize="small", rotation=0, ha="right", va="center")
    panel.spines[:].set_visible(False)


def _draw_strips(ax: Axes, record: Record) -> float:
    """Draw a strip for the clipped steps, one for the skipped, and one for the non-finite.

    Return the height of all strips.
    """
    # A skipped or non-finite step has factors that are not 1, too.
    is_clipped = (record.shares > 0) & record.finite & ~record.skipped
    strips: dict[str, tuple[Booleans, str]] = {
        "clipped": (is_clipped, VERMILION),
        "skipped": (record.skipped, PURPLE),
        "non-finite": (~record.finite, GRAY),
    }
    strips = {name: strip for name, strip in strips.items() if strip[0].any()}
    if not strips:
        return 0.0

    # Above the label of a tick at the very top.
    panel = ax.inset_axes((0, 1.05, 1, _STRIP_HEIGHT * len(strips)), sharex=ax)
    first, last = record.steps[[0, -1]]
    panel.imshow(
        _strip_pixels(record.steps, strips),
        extent=(first - 0.5, last + 0.5, len(strips), 0),
        aspect="auto",
        interpolation="nearest",
    )
    panel.set_yticks(np.arange(len(strips)) + 0.5, strips, fontsize="small")
    panel.tick_params(length=0, labelbottom=False)
    return 0.03 + _STRIP_HEIGHT * len(strips)


def _strip_pixels(
    steps: Integers, strips: dict[str, tuple[Booleans, str]]
) -> npt.NDArray[np.float64]:
    """Return the red, green, blue and alpha values of each column of each strip."""
    from matplotlib.colors import to_rgb  # noqa: PLC0415 - takes longer to import than uniclip

    span = steps[-1] - steps[0] + 1
    max_columns = 2 * MAX_COLUMNS
    if len(steps) > max_columns:
        max_columns = STRIP_COLUMNS
    count = int(min(max_columns, span))

    # Steps that were not recorded leave columns empty, which must not divide by 0.
    columns = (steps - steps[0]) * count // span
    column_sizes = np.maximum(np.bincount(columns, minlength=count), 1)

    pixels = np.zeros((len(strips), count, 4))
    for row, (name, (flags, color)) in zip(pixels, strips.items(), strict=True):
        shares = np.bincount(columns, flags, count) / column_sizes
        # One skipped step matters, while clipping is usual: only its share is of interest.
        opacity = 0.4 + 0.6 * shares if name == "clipped" else np.ones(count)
        row[:, :3] = to_rgb(color)
        row[:, 3] = np.where(shares > 0, opacity, 0)
    return pixels
