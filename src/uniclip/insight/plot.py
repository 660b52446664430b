# SPDX-License-Identifier: MIT
"""A picture of a recorded run, by matplotlib, which is imported only here and only when something is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uniclip._checks import check
from uniclip.insight import panels
from uniclip.insight.record import Record

INSTALL = 'pip install "uniclip-gradients[insight]"'
_WIDTH, _MAIN, _LOSSES = 9.0, 3.2, 1.4
"""The sizes of the figure and its panels, in inches."""


def plot(record: Record, ax: Any = None) -> Any:
    """Draw the norms of a recorded run, and what was clipped.

    The main panel shows the norm at each step on a logarithmic axis, the limit (or the threshold, if the rule clips to
    less than the threshold), the clipped and the skipped steps, and at the top the steps that were not finite. Without
    ``ax`` there are also a histogram of the norms with the share of steps above each norm, the losses and the norms of
    the leaves, if recorded. Runs of more than 1,200 steps are drawn as the smallest,
    median and largest norm in each of 600 columns, so that no spike is lost.

    Parameters
    ----------
    record : Record
        What `read` returns.
    ax : matplotlib.axes.Axes, optional
        Where to draw the main panel alone. By default pyplot makes a new figure with all panels.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the main panel; ``.figure`` is the figure.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ModuleNotFoundError
        If matplotlib is not installed.

    Notes
    -----
    Text, ticks and frames have the colors of ``matplotlib.rcParams``, so that any style applies. The colors of the data
    are from the color-blind safe palette of Okabe and Ito (2008), with a contrast of at least 3 on white and on black.
    Characters that the fonts lack are drawn as U+FFFD.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> ax = insight.plot(record)
    >>> ax.figure.savefig("run.png")
    """
    check("record", record, isinstance(record, Record), "a uniclip.insight.Record, as insight.read() returns")
    check("ax", ax, ax is None or hasattr(ax, "get_xaxis_transform"), "one Axes of matplotlib, or None")
    if ax is None:
        axes = _panels(record)
        panels.spread(axes["spread"], record)
        axes["spread"].tick_params(which="both", labelleft=False)
        if "losses" in axes:
            panels.losses(axes["losses"], record)
        if "leaves" in axes:
            panels.leaves(axes["leaves"], record._replace(labels=_in_font(record.labels)))
            for colors in axes["leaves"].child_axes:
                colors.set_in_layout(False)  # there is room beside it
        ax = axes["norms"]
    panels.norms(ax, record)
    return ax


def _panels(record: Record) -> dict[str, Any]:
    """Make a figure with an axes for each panel that has data, by name."""
    with drawing():
        import matplotlib.pyplot as plt  # noqa: PLC0415 - takes longer to import than uniclip
    rows, heights = [["norms", "spread"]], [_MAIN]
    if panels.has_losses(record):
        rows.append(["losses", "."])
        heights.append(_LOSSES)
    if panels.has_leaves(record):
        rows.append(["leaves", "."])
        heights.append(panels.height_of_leaves(record))
    figure = plt.figure(figsize=(_WIDTH, sum(heights) + 0.3), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic(rows, width_ratios=[3, 1], height_ratios=heights)
    for name in axes.keys() & {"losses", "leaves"}:
        axes[name].sharex(axes["norms"])
    axes["spread"].sharey(axes["norms"])
    return axes


def _in_font(labels: list[str]) -> list[str]:
    """Return labels with U+FFFD in place of characters that the fonts lack, for which matplotlib would warn."""
    from matplotlib.font_manager import FontProperties, findfont, get_font  # noqa: PLC0415 - imports matplotlib

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]
    every = {one for label in labels for one in panels.printable(label) if not one.isascii()}
    lacking = [one for one in every if not any(font.get_char_index(ord(one)) for font in fonts)]
    table = str.maketrans(dict.fromkeys(lacking, "\ufffd"))
    return [label.translate(table) for label in labels]


@contextmanager
def drawing() -> Iterator[None]:
    """Say what to install if matplotlib cannot be imported.

    Raises
    ------
    ModuleNotFoundError
        If a module is missing inside.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"pictures need matplotlib: {INSTALL} ({error})"
        raise ModuleNotFoundError(msg, name=error.name) from error
