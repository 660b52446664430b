# SPDX-License-Identifier: MIT
"""A recorded run as one page of HTML, for a browser, without script and without network."""

from __future__ import annotations

import io
import math
import warnings
from html import escape
from importlib.resources import files
from string import Template

from uniclip._errors import needs
from uniclip._version import version
from uniclip.insight.plot import plot
from uniclip.insight.record import INSTALL, Record
from uniclip.insight.spikes import Spike, largest
from uniclip.insight.summary import name_rule, printable, summary

_MOST = 50
"""The number of spikes that are listed."""
_INK = "#010203"
"""A color used nowhere else; in the page it becomes that of the text."""
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "uniclip",  # the same bytes each time
    "font.family": "sans-serif",
    "savefig.facecolor": "none",
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}
_SIZE = 5.6, 3.2
"""In inches; narrow, so that text of 10 points can be read on a phone."""


def page(record: Record) -> str:
    """Return a page about a recorded run: summary, figure and spikes.

    It follows the browser's light or dark mode.

    Raises
    ------
    ModuleNotFoundError
        If matplotlib is not installed.
    """
    found = largest(record)
    rows = "".join(map(_row, found[:_MOST])) or '<tr><td colspan="4">none</td></tr>'
    title = escape(name_rule(record))
    template = Template(files("uniclip.insight").joinpath("page.html").read_text(encoding="utf-8"))
    more = f"The {_MOST} largest of {len(found):,}." if len(found) > _MOST else ""
    return template.substitute(
        title=title,
        summary=escape(summary(record)),
        figure=_figure(record),
        spikes=rows,
        more=more,
        version=version(),
    )


def _row(spike: Spike) -> str:
    """Return the row of a spike."""
    norm = f"{spike.norm:.3g}" if math.isfinite(spike.norm) else "not finite"
    ratio = f"{spike.ratio:.3g}" if math.isfinite(spike.ratio) else ""
    leaves = ", ".join([f"{printable(label)} ({times:.2g})" for label, times in spike.leaves])
    cells = [f"{spike.step:,}", norm + (", skipped" if spike.skipped else ""), ratio, leaves]
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _figure(record: Record) -> str:
    """Return the figure as an element of a page, in the color of its text."""
    with needs("matplotlib", INSTALL):
        import matplotlib.style  # noqa: PLC0415 - takes longer to import than uniclip
        from matplotlib.figure import Figure  # noqa: PLC0415
    file = io.StringIO()
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a browser has more fonts
        figure = Figure(figsize=_SIZE, layout="constrained")
        plot(record, figure.subplots())
        figure.savefig(
            file,
            format="svg",
            dpi=200,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")
