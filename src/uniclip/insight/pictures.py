# SPDX-License-Identifier: MIT
"""The panels of a recorded run as inline SVG for HTML, in the colors of the page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure

from uniclip.insight import panels
from uniclip.insight.record import Record

_INK = "#010203"
"""A color used nowhere else; in the page it becomes that of the text."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "uniclip",  # the same bytes each time
    "font.family": "DejaVu Sans, sans-serif",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
}
_WIDTH = 5.6
"""In inches; narrow, so that text of 10 points can be read on a phone."""


class Picture(NamedTuple):
    """A panel, and its explanation.

    Attributes
    ----------
    title, meaning : str
        In words; ``meaning`` says how to read it.
    svg : str
        An element ``<svg>`` for a page of HTML, whose ids begin with a name of its own.
    """

    title: str
    meaning: str
    svg: str


def pictures(record: Record) -> list[Picture]:
    """Draw the panels for which the record has data."""
    limit = panels.level_of(record)[1]
    found = [
        _picture("norms", "Norm at each step", _about_norms(record, limit), 3.2, panels.norms, record),
        _picture("spread", "How large the norms were", _about_spread(limit), 2.8, _spread, record),
    ]
    if panels.has_losses(record):
        about = "The loss at each step. Look for what it does after a spike of the norm."
        found.append(_picture("losses", "Loss at each step", about, 2.2, panels.losses, record))
    if panels.has_leaves(record):
        about = (
            "The norm of each leaf at the steps where it was recorded, in logarithmic colors: bright is large, "
            "what was not finite is left out. At a spike, look for the leaf that is brighter than before while "
            "others are not."
        )
        high = panels.height_of_leaves(record)
        found.append(_picture("leaves", "Norms of the leaves", about, high, panels.leaves, record))
    return found


def _about_norms(record: Record, limit: str) -> str:
    """Explain the norms over the steps."""
    many = record.steps.size > 2 * panels.COLUMNS
    each = f" Each of {panels.COLUMNS} columns shows its smallest, median and largest norm." if many else ""
    return (
        f"The norm before clipping, on a logarithmic axis; the dashed line is the {limit}.{each} Triangles are clipped "
        "steps, crosses skipped ones, and strokes at the top are steps that were not finite."
    )


def _about_spread(limit: str) -> str:
    """Explain the histogram."""
    return (
        "Bars: how many steps had which norm. Falling line: which share of the steps was above a norm; where it "
        f"crosses the dashed line, the {limit} at half of the run, it shows how many were clipped."
    )


def _spread(ax: Any, record: Record) -> None:
    panels.spread(ax, record, upright=True)


def _picture(  # noqa: PLR0913, PLR0917 - what a picture is made of
    name: str, title: str, meaning: str, height: float, draw: Callable[[Any, Record], None], record: Record
) -> Picture:
    """Draw a panel as a part of a page."""
    file = io.StringIO()
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a browser has more fonts
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.subplots(), record)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", dpi=200, metadata=nothing)
    return Picture(title, meaning, _inline(file.getvalue(), name, title))


def _inline(svg: str, name: str, title: str) -> str:
    """Convert an SVG file to an element of a page, with unique ids and the color of the text."""
    box = re.search(r'viewBox="[^"]*"', svg)
    body = re.sub(r"<style.*?</style>", "", svg[svg.index(">", svg.index("<svg")) + 1 :], flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _own(tag[0], name), body)
    return f'<svg role="img" aria-label="{title}" {box[0] if box else ""}>{body}'


def _own(tag: str, name: str) -> str:
    """Prefix the ids in a tag, and replace the ink by the color of the text."""
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag)
    return tag.replace(_INK, "currentColor")
