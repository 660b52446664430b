# SPDX-License-Identifier: MIT
"""Write what was measured of other libraries as Markdown, for the page that compares them."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator
from typing import Any

import features
from speed_format import table

from native_functions import LIBRARIES, TRUTH, UNICLIP, uniclip_on
from side_by_side import ERROR, NONE, RIGHT, WRONG, Case, Group, altered, number, show, summary, truth, verdicts


def parts(groups: list[Group], measured: dict[str, Any]) -> dict[str, str]:
    """Return the parts of the page by name; ``measured`` is what was written of libraries that are not installed."""
    return {
        "sentence": sentence(groups),
        "tally": tally(groups, measured),
        "versions": versions(),
        "others": others(measured),
        "features": "\n\n".join(feature_tables(measured)),
        "cases": "\n\n".join(blocks(groups)),
        "calls": "\n\n".join(calls(groups)),
        "feature-calls": "\n\n".join(feature_calls()),
    }


def sentence(groups: list[Group]) -> str:
    """Return the result in one sentence."""
    counts = summary(groups)
    return (
        f"uniclip is right in {counts['uniclip right']} of {counts['cases']} cases. At least one built-in function is "
        f"wrong, without an error, in {counts['some native wrong']} of {counts['cases']} cases."
    )


def tally(groups: list[Group], measured: dict[str, Any] | None = None) -> str:
    """Return how many cases each library gets right, but for those that have none of these functions."""
    counted = summary(groups)
    everything = counted["libraries"] | (measured["cases"] if measured else {})
    some = {name: marks for name, marks in everything.items() if marks.get(NONE, 0) < counted["cases"]}
    rows = [[name, *(str(marks.get(mark, 0)) for mark in (RIGHT, WRONG, ERROR, NONE))] for name, marks in some.items()]
    return table([" ", "right", "wrong", "error", "none"], rows, "--:")


def versions() -> str:
    """Return what was run when the page was built, and where."""
    everything = [*LIBRARIES, TRUTH, uniclip_on(TRUTH)]
    modules = [module for library in everything for module in library.modules.values()]
    names = {m.__name__.partition(".")[0]: m.__version__ for m in modules if hasattr(m, "__version__")}
    listed = ", ".join(f"{name} {version}" for name, version in names.items())
    return f"{listed}; Python {platform.python_version()} on {platform.machine()}"


def others(measured: dict[str, Any]) -> str:
    """Return what was run earlier, and when."""
    listed = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return f"{listed}; Python {measured['python']}, {measured['date']}"


def feature_tables(measured: dict[str, Any]) -> Iterator[str]:
    """Yield a heading and a table for each group of features."""
    found = features.all_marks(measured)
    for title, group in features.FEATURES.items():
        yield f"### {title}"
        rows = [[f.title, *(bold(marks[f.title]) for marks in found.values())] for f in group]
        yield f":::{{div}} marks features\n{table([' ', *found], rows, ':-:')}\n:::"


def bold(mark: str) -> str:
    """Return a mark, in bold where a library has a function that does not do it."""
    return f"**{mark}**" if mark == WRONG else mark


def feature_calls() -> Iterator[str]:
    """Yield the lines that were run for each feature, or the case."""
    for group in features.FEATURES.values():
        for feature in group:
            yield f"**{feature.title}**"
            if feature.case:
                yield f"The case “{feature.case}”, above{'; and besides:' if feature.calls else '.'}"
            if feature.calls:
                yield listed({name: in_code(text) for name, text in feature.calls.items()})


def in_code(text: str) -> str:
    """Return lines of code as one piece of inline code."""
    return f"`{text.replace(chr(10), '; ')}`"


def blocks(groups: list[Group]) -> Iterator[str]:
    """Yield each group's heading, reason and cases."""
    for group in groups:
        yield f"### {group.title}"
        yield textwrap.fill(group.why, 100)
        if group.look:
            yield textwrap.fill(f"**In your own training, look for** {group.look}", 100)
        for case in group.cases:
            yield about(case)
            yield listed(verdicts(case))


def about(case: Case) -> str:
    """Return the title, the gradient, the limit and the true result in a line of Markdown."""
    words = case.words or f"`{'`, `'.join(map(show, case.grads))}`"
    dtype = "" if case.dtype == ("float32",) else f" in {' and '.join(case.dtype)}"
    limit = "" if case.kind == "global norm" or case.measure is altered else f", limit {number(case.c)}"
    right = f"`{true[1]}`" if (true := truth(case)) else "an error"
    return f"**{case.title}**: {words}{dtype}{limit}; right: {right}"


def calls(groups: list[Group]) -> Iterator[str]:
    """Yield the calls of each kind, as they were run."""
    for kind in dict.fromkeys(["import", *(case.kind for group in groups for case in group.cases)]):
        yield f"**{kind}**"
        texts = {"uniclip": UNICLIP} | {library.name: library.calls for library in LIBRARIES}
        yield listed({name: f"`{text[kind]}`" if kind in text else NONE for name, text in texts.items()})


def listed(results: dict[str, Any]) -> str:
    """Return a list, aligned."""
    return "\n".join(f"- {f'*{name}*':12} {result}" for name, result in results.items())
