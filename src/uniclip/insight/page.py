# SPDX-License-Identifier: MIT
"""A recorded run as one page of HTML, for a browser, without script and without network."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, overload

from uniclip._checks import check
from uniclip._version import version
from uniclip.insight import tables
from uniclip.insight.advice import Advice, suggest
from uniclip.insight.panels import printable
from uniclip.insight.plot import drawing
from uniclip.insight.record import BEGINNING, Record
from uniclip.insight.spikes import Spike, spikes

if TYPE_CHECKING:
    from uniclip.insight.pictures import Picture

MOST = 50
"""The number of spikes that are listed."""
COMPARE = (
    "Train with each of these three limits and compare the validation losses. One run is no measurement: seeds differ, "
    "so repeat what looks best."
)
PREDICTED = (
    "The shares are what these limits would have clipped of the norms that were recorded. Another limit changes the "
    "steps that follow, and so the later norms: read them as a forecast. Behind each ± stands how far the share of "
    "another part of the run is from it, at most, in nine of ten cases."
)
_LOOK = """
:root{color-scheme:light dark;--text:#1b1f24;--soft:#57606a;--paper:#ffffff;--box:#f3f5f7;--line:#d0d7de;--mark:#0072b2}
@media (prefers-color-scheme:dark){:root{--text:#e6e9ec;--soft:#a3adb7;--paper:#14171a;--box:#1f2429;--line:#3a424a;
--mark:#56b4e9}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--text);font:1rem/1.5 system-ui,sans-serif}
main{max-width:56rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;margin:.5rem 0}
h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
p,ul{margin:.5rem 0;overflow-wrap:anywhere}
ul{padding-left:1.3rem}
.advice{background:var(--box);border-left:4px solid var(--mark);padding:.6rem 1rem;border-radius:0 6px 6px 0}
.limits{display:flex;flex-wrap:wrap;gap:.5rem;padding:0;list-style:none}
.limits li{border:1px solid var(--mark);border-radius:6px;padding:.1rem .8rem;font-size:1.3rem}
.soft,figcaption{color:var(--soft);font-size:.9rem}
.box{overflow:auto;max-height:26rem;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .7rem;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child>*{border-bottom:0}
thead th{position:sticky;top:0;background:var(--box)}
.words td{white-space:normal;overflow-wrap:anywhere}
figure{margin:1.2rem 0}
figure h3{font-size:1rem;margin:0}
svg{display:block;width:100%;height:auto;color:var(--text)}
svg *{stroke-linejoin:round;stroke-linecap:butt}
"""


@overload
def page(record: Record) -> str: ...
@overload
def page(record: Record, path: str | PathLike[str]) -> Path: ...
def page(record: Record, path: str | PathLike[str] | None = None) -> str | Path:
    """Make a page about a recorded run: the advice, other limits, the spikes, pictures, and what the run was.

    The page is one HTML 5 file with inline pictures, without script and network access. It follows the browser's light
    or dark mode.

    Parameters
    ----------
    record : Record
        What `read` returns.
    path : str or path, optional
        The file to write, in UTF-8; an existing page is overwritten.

    Returns
    -------
    str or pathlib.Path
        The page; with ``path``, that path.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``path`` is a recorded run, which is never overwritten.
    ModuleNotFoundError
        If matplotlib is not installed.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> print(insight.page(record, "run.html"))
    run.html
    """
    check("record", record, isinstance(record, Record), "a uniclip.insight.Record, as insight.read() returns")
    check("path", path, path is None or isinstance(path, (str, PathLike)), "the path of a file, or None")
    if path is not None:
        refuse_records(Path(path))
    text = written(record, suggest(record), spikes(record))
    if path is None:
        return text
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def refuse_records(path: Path) -> None:
    """Refuse to write a page over a recorded run.

    Raises
    ------
    ValueError
        If there is one.
    """
    if path.is_file():
        with path.open("rb") as file:
            recorded = file.read(len(BEGINNING) + 3).removeprefix(codecs.BOM_UTF8).startswith(BEGINNING)
        if recorded:
            msg = f"{path} is a recorded run, which a page must not replace: give another path for the page"
            raise ValueError(msg)


def written(record: Record, advice: Advice, found: Sequence[Spike]) -> str:
    """Return the page on a record and the results about it."""
    with drawing():
        from uniclip.insight.pictures import pictures  # noqa: PLC0415 - imports matplotlib
    parts = [
        "<h1>Gradient clipping of one run</h1>",
        f'<p class="soft">{_shown(record.rule or "an unknown rule")}, {record.steps.size:,} steps</p>',
        _advice(advice),
        "<h2>What these limits would have clipped</h2>",
        _html(tables.of_limits(advice.table)),
        f'<p class="soft">{PREDICTED}</p>',
        "<h2>Spikes</h2>",
        _spikes(found),
        "<h2>Pictures</h2>",
        *map(_figure, pictures(record)),
        "<h2>The run</h2>",
        _html(tables.summary(record), "words"),
        f'<p class="soft">Made by uniclip {escape(version())}.</p>',
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Gradient clipping of one run</title>\n<style>{_LOOK}</style>\n</head>\n<body>\n<main>\n"
    )
    return head + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def _advice(advice: Advice) -> str:
    """Return the verdict, the limits to try, and the reasons."""
    limits = "".join(f"<li>{limit:g}</li>" for limit in advice.limits)
    tried = f'<p>Limits to try:</p><ul class="limits">{limits}</ul><p>{COMPARE}</p>' if limits else ""
    reasons = "".join(f"<li>{_shown(reason)}</li>" for reason in advice.reasons)
    why = f"<ul>{reasons}</ul>" if reasons else ""
    return f'<section class="advice"><p>This run: <strong>{escape(advice.verdict)}</strong></p>{tried}{why}</section>'


def _spikes(found: Sequence[Spike]) -> str:
    """Return the largest spikes, and their number."""
    about = "A spike is a norm far above the median of the norms before it, or one that is not finite."
    if not found:
        return f"<p>None. {about}</p>"
    count = f"{len(found):,} in all, the {MOST} largest are listed." if len(found) > MOST else f"{len(found)} in all."
    return f"<p>{count} {about}</p>{_html(tables.of_spikes(found, MOST))}"


def _figure(picture: Picture) -> str:
    """Return a picture with its title and explanation."""
    return (
        f"<figure><h3>{escape(picture.title)}</h3>{picture.svg}<figcaption>{escape(picture.meaning)}</figcaption>"
        "</figure>"
    )


def _html(table: tables.Table, look: str = "numbers") -> str:
    """Return a table in its own box, which scrolls where the page is too narrow."""
    if not table.rows:
        return f"<p>{tables.EMPTY}</p>"
    head = "".join(f'<th scope="col">{_shown(cell)}</th>' for cell in table.columns)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    rows = "".join(_row(row) for row in table.rows)
    return f'<div class="box" tabindex="0"><table class="{look}">{head}<tbody>{rows}</tbody></table></div>'


def _row(row: Sequence[str]) -> str:
    first, *others = map(_shown, row)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'


def _shown(text: str) -> str:
    """Return text escaped for HTML."""
    return escape(printable(text))
