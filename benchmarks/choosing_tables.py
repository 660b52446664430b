# SPDX-License-Identifier: MIT
"""The tables of how the advice does, from what ``choose_a_limit.py`` measured.

Regret is a validation loss against that of the cell's best limit of the grid, both means over the seeds, in percent.
Where a way has several runs, that with the least validation loss counts, for each seed on its own. What is better than
the grid's best limit, as a value between those of the grid may be, counts as 0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

Cell = dict[str, Any]
MEAN, WORST = 6, 30
"""What was expected of the suggested limits beforehand, in percent."""
LOUD = 5
"""Bad batches are loud if their median norm is so many times that of the others."""


def at(found: Any, cell: Cell, limits: Sequence[float | None]) -> list[float]:
    """Return for each seed the least validation loss of some limits of the grid."""
    rows = [cell["grid"][found["grid"].index(limit)] for limit in limits]
    return [min(reached) for reached in zip(*rows, strict=True)]


def advised(cell: Cell, *, pilots: bool) -> list[float]:
    """Return the same of the suggested limits; without any, the pilots are all there is."""
    return [min(p["suggested"] + (p["reached"] if pilots or not p["suggested"] else [])) for p in cell["pilots"]]


def middle(cell: Cell) -> list[float]:
    """Return the validation losses at c alone; without one, the last pilot's."""
    return [(p["suggested"] or p["reached"][-1:] * 3)[1] for p in cell["pilots"]]


WAYS: dict[str, tuple[str, Callable[[Any, Cell], list[float]]]] = {
    "no clipping": ("1", lambda found, cell: at(found, cell, [None])),
    "1.0": ("1", lambda found, cell: at(found, cell, [1.0])),
    "90th percentile of an unclipped pilot": ("2", lambda _, cell: cell["percentile"]["reached"]),
    "the middle limit alone": ("2", lambda _, cell: middle(cell)),
    "three fixed, 0.25, 1 and 4": ("3", lambda found, cell: at(found, cell, [0.25, 1.0, 4.0])),
    "four fixed, 0.25, 1, 4 and 16": ("4", lambda found, cell: at(found, cell, [0.25, 1.0, 4.0, 16.0])),
    "**three suggested**": ("4", lambda _, cell: advised(cell, pilots=False)),
    "**three suggested, or the pilot**": ("4", lambda _, cell: advised(cell, pilots=True)),
    "the whole grid": ("11", lambda found, cell: at(found, cell, found["grid"])),
}
"""For each way how many full runs it takes, the usual number of pilots counted, and what it reaches."""
SHOWN = ["no clipping", "1.0", "90th percentile of an unclipped pilot", "three fixed, 0.25, 1 and 4"]
SHOWN += ["four fixed, 0.25, 1, 4 and 16", "**three suggested**", "**three suggested, or the pilot**"]
HEADS = ["none", "1.0", "percentile", "3 fixed", "4 fixed", "3 suggested", "or pilot"]


def regret(found: Any, cell: Cell, way: str) -> float:
    """Return the regret of a way, in percent; what is better than the grid's best limit counts as 0."""
    best = min(map(statistics.mean, cell["grid"]))
    return max(100 * (statistics.mean(WAYS[way][1](found, cell)) / best - 1), 0.0)


def filled(page: str, found: Any) -> str:
    """Return a page with its tables written anew, each between two comments with its name."""
    tables = {"overall": overall, "cells": cells, "suggestions": suggestions, "spikes": spikes, "about": about}
    tables |= {"outcome": outcome}
    for name, table in tables.items():
        pattern = rf"(% begin {name}\n).*?(\n% end {name}\n)"
        page, count = re.subn(pattern, lambda m: f"{m[1]}\n{table(found)}\n{m[2]}", page, flags=re.DOTALL)  # noqa: B023 - called here
        if count != 1:
            msg = f"the page has {count} places for the table {name!r}, not one"
            raise ValueError(msg)
    return page


def about(found: Any) -> str:
    """Return how much was run."""
    limits = ", ".join("∞" if limit is None else f"{limit:g}" for limit in found["grid"])
    return (
        f"{len(found['cells'])} cells, {len(found['seeds'])} seeds, {found['steps']} steps; the grid is {limits}. "
        f"All took {found['seconds'] / 60:.0f} minutes on two cores."
    )


def outcome(found: Any) -> str:
    """Return what was expected beforehand, and what came out."""
    three, pilot = "**three suggested**", "**three suggested, or the pilot**"
    fixed, four = "three fixed, 0.25, 1 and 4", "four fixed, 0.25, 1, 4 and 16"
    means = {way: statistics.mean(regret(found, cell, way) for cell in found["cells"]) for way in WAYS}
    worst = {way: max(regret(found, cell, way) for cell in found["cells"]) for way in WAYS}
    kept = "met" if means[three] <= MEAN and worst[three] <= WORST else "missed"
    better = "better" if means[pilot] < means[four] else "worse"
    best = [list(map(statistics.mean, cell["grid"])) for cell in found["cells"]]
    limits = [found["grid"][row.index(min(row))] or math.inf for row in best]
    verdicts = [verdict for cell in found["cells"] for pilots in cell["pilots"] for verdict in pilots["verdicts"]]
    return (
        f"Of the three suggested a mean of at most {MEAN} % and at most {WORST} % at worst were expected. They have "
        f"{percent(means[three])} % and {percent(worst[three])} %: that is {kept}. The three fixed ones have "
        f"{percent(means[fixed])} % and {percent(worst[fixed])} %. With four runs, the suggested limits and the pilot "
        f"are {better} than four fixed limits: {percent(means[pilot])} % against {percent(means[four])} % in the mean. "
        f"The best limits of the cells are between {min(limits):g} and {max(limits):g}, so these cells do not show how "
        "either does where the norms are of another order. "
        f"{verdicts.count('unstable')} of {len(verdicts)} pilots were unstable."
    )


def overall(found: Any) -> str:
    """Return median, mean and worst regret of each way, also of the clean and the bad cells alone."""
    lines = ["| way | full runs | median | mean | worst | mean, clean | mean, bad batches |"]
    lines += ["| --- | --: | --: | --: | --: | --: | --: |"]
    for way, (runs, _) in WAYS.items():
        all_of = [regret(found, cell, way) for cell in found["cells"]]
        split = [
            statistics.mean(value for value, cell in zip(all_of, found["cells"], strict=True) if cell["bad"] == bad)
            for bad in (False, True)
        ]
        numbers = [statistics.median(all_of), statistics.mean(all_of), max(all_of), *split]
        lines += [f"| {way} | {runs} | {' | '.join(map(percent, numbers))} |"]
    return "\n".join(lines)


def cells(found: Any) -> str:
    """Return the regrets of all cells."""
    lines = [f"| cell | best limit | loss there | {' | '.join(HEADS)} |", f"| --- |{' --: |' * (2 + len(HEADS))}"]
    for cell in found["cells"]:
        means = list(map(statistics.mean, cell["grid"]))
        best = found["grid"][means.index(min(means))]
        shown = "∞" if best is None else f"{best:g}"
        numbers = [percent(regret(found, cell, way)) for way in SHOWN]
        lines += [f"| {name(cell)} | {shown} | {min(means):.3g} | {' | '.join(numbers)} |"]
    return "\n".join(lines)


def suggestions(found: Any) -> str:
    """Return verdicts and limits, of each seed."""
    lines = ["| cell | verdicts | middle limits |", "| --- | --- | --- |"]
    for cell in found["cells"]:
        verdicts = "; ".join(", then ".join(pilot["verdicts"]) for pilot in cell["pilots"])
        limits = "; ".join(f"{pilot['limits'][1]:g}" if pilot["limits"] else "none" for pilot in cell["pilots"])
        lines += [f"| {name(cell)} | {verdicts} | {limits} |"]
    return "\n".join(lines)


def spikes(found: Any) -> str:
    """Return recall and false alarms of `uniclip.insight.spikes`."""
    lines = ["| cell | norm of bad batches ÷ others | bad | found | recall | false in 1,000 steps |"]
    lines += ["| --- | --: | --: | --: | --: | --: |"]
    loud = [cell for cell in found["cells"] if (cell["spikes"]["loudness"] or 0) >= LOUD]
    clean = [cell for cell in found["cells"] if not cell["bad"]]
    lines += [spikes_row(name(cell), [cell]) for cell in found["cells"] if cell["bad"]]
    lines += [spikes_row("**all loud cells**", loud), spikes_row("**all clean cells**", clean)]
    return "\n".join(lines)


def spikes_row(title: str, chosen: list[Cell]) -> str:
    """Return the row of one or several cells."""
    bad, seen, false, steps = (
        sum(cell["spikes"][key] for cell in chosen) for key in ("bad", "found", "false", "steps")
    )
    loudness = [cell["spikes"]["loudness"] for cell in chosen if cell["spikes"]["loudness"] is not None]
    times = f"{min(loudness):.3g}" if len(loudness) == 1 else ""
    recall = f"{seen / bad:.2f}" if bad else ""
    return f"| {title} | {times} | {bad} | {seen} | {recall} | {1000 * false / steps if steps else math.nan:.1f} |"


def name(cell: Cell) -> str:
    """Return the name of a cell."""
    return f"{cell['task']}, {cell['rate']:g}{', bad batches' if cell['bad'] else ''}"


def percent(value: float) -> str:
    """Return a regret as it is shown."""
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"  # noqa: PLR2004 - two digits are enough
