# SPDX-License-Identifier: MIT
"""Show a recorded run as one HTML page, which needs no script and no network."""

from __future__ import annotations

import io
import math
import warnings
from html import escape
from importlib.resources import files
from string import Template

from uniclip._errors import needs
from uniclip._version import version
from uniclip.insight.plot import new_figure
from uniclip.insight.record import INSTALL, Record
from uniclip.insight.spikes import Spike, largest
from uniclip.insight.summary import name_rule, printable, summary

_MAX_SPIKES = 50
"""The number of spikes that are listed."""
_TEXT_COLOR = "#010203"
"""A color used nowhere else, which becomes the text color of the page."""
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "uniclip",  # the same bytes each time
    "font.family": "sans-serif",
    "savefig.facecolor": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": _TEXT_COLOR,
    "axes.edgecolor": _TEXT_COLOR,
    "axes.labelcolor": _TEXT_COLOR,
    "xtick.color": _TEXT_COLOR,
    "ytick.color": _TEXT_COLOR,
}
_FIGURE_SIZE = 5.6, 3.2
"""In inches; narrow, so that text of 10 points is readable on a phone."""


def page(record: Record) -> str:
    """Return a page about a recorded run: summary, figure and spikes.

    It follows the browser's light or dark mode.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.
    """
    spikes = largest(record)
    rows = "".join([_table_row(spike) for spike in spikes[:_MAX_SPIKES]])
    shown = ""
    if len(spikes) > _MAX_SPIKES:
        shown = f"The table shows the {_MAX_SPIKES} largest of {len(spikes):,} spikes."

    html = files("uniclip.insight").joinpath("page.html").read_text(encoding="utf-8")
    return Template(html).substitute(
        title=escape(name_rule(record)),
        summary=escape(summary(record)),
        figure=_figure(record),
        spikes=rows or '<tr><td colspan="4">none</td></tr>',
        shown=shown,
        version=version(),
    )


def _table_row(spike: Spike) -> str:
    """Return the table row of a spike."""
    norm = f"{spike.norm:.3g}" if math.isfinite(spike.norm) else "non-finite"
    if spike.skipped:
        norm += ", skipped"
    ratio = f"{spike.ratio:.3g}" if math.isfinite(spike.ratio) else ""
    leaves = [f"{printable(label)} ({ratio:.2g})" for label, ratio in spike.leaves]

    texts = [f"{spike.step:,}", norm, ratio, ", ".join(leaves)]
    cells = [f"<td>{escape(text)}</td>" for text in texts]
    return f"<tr>{''.join(cells)}</tr>\n"


def _figure(record: Record) -> str:
    """Return the figure as an element of a page, in the text color of the page."""
    with needs("matplotlib", INSTALL):
        import matplotlib.style  # noqa: PLC0415 - takes longer to import than uniclip

    file = io.StringIO()
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # A browser has fonts for letters that matplotlib lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = new_figure(record, _FIGURE_SIZE)
        # The date would make the bytes of each page differ.
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", dpi=200, metadata=no_metadata)

    svg = file.getvalue()
    element = svg[svg.index("<svg") :]
    return element.replace(_TEXT_COLOR, "currentColor")
