# SPDX-License-Identifier: MIT
"""The tables of what processes send and how long it takes, from what ``processes.py`` measured, and a model of both."""

from __future__ import annotations

import math
from typing import Any

NUMBERS = {
    "by_global_norm": (1, lambda _: 2),
    "by_norm": (1, lambda leaves: leaves + 1),
    "adagc": (1, lambda leaves: leaves + 1),
    "by_global_norm, ord=3": (2, lambda _: 3),
    "by_global_norm, ord=inf": (1, lambda _: 2),
}
"""The model: of each rule the reductions of a step, and the float64 numbers in them for so many leaves."""
LATENCY, BANDWIDTH = 10e-6, 10e9
"""Of a network: seconds for a message, bytes in a second."""
KILO = 1000
FAR, WIDE = [8, 64, 512, 4096, 10_000], [10**3, 10**4, 10**5]


def parts(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables by name, in Markdown."""
    return {"sent": _sent(found["sent"]), "divided": _divided(found), "far": _far()}


def seconds(calls: int, numbers: int, processes: int) -> float:
    """Return the time of the reductions of a step: a tree of messages each, and each byte sent twice."""
    if processes == 1:
        return 0.0
    messages = 2 * math.ceil(math.log2(processes))
    return calls * messages * LATENCY + 2 * 8 * numbers * (processes - 1) / processes / BANDWIDTH


def _sent(rows: list[dict[str, Any]]) -> str:
    """Return what was counted; the model has to say the same."""
    lines = [
        "| rule | reductions | numbers, 10 leaves | 100 leaves | 1,000 leaves |",
        "| --- | --: | --: | --: | --: |",
    ]
    for rule, (calls, numbers) in NUMBERS.items():
        own = [row for row in rows if row["rule"] == rule]
        wrong = [row for row in own if (row["calls"], row["numbers"]) != (calls, numbers(row["leaves"]))]
        if wrong or len(own) != len({(row["leaves"], row["processes"]) for row in own}):
            msg = f"the model of {rule} is not what was counted: {wrong}"
            raise ValueError(msg)
        counts = [f"{numbers(leaves):,}" for leaves in (10, 100, 1000)]
        lines.append(f"| `{rule}` | {calls} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _divided(found: dict[str, Any]) -> str:
    """Return the times of distributed tensors."""
    lines = ["| | ms | native ÷ this (quartiles) |", "| --- | --: | --: |"]
    for row in found["divided"]:
        low, middle, high = row["ratio"]
        lines.append(f"| `{row['contender']}` | {1e3 * row['seconds']:.1f} | {middle:.2f} ({low:.2f}-{high:.2f}) |")
    return "\n".join(lines)


def _far() -> str:
    """Return what the model says of larger runs."""
    heads = [f"{processes:,} processes" for processes in FAR]
    lines = [f"| | sent by each process | {' | '.join(heads)} |", f"| --- | --: | {' | '.join(['--:'] * len(FAR))} |"]
    calls, numbers = NUMBERS["by_global_norm"]
    rows = [("one norm, any number of leaves", calls, numbers(1))]
    calls, numbers = NUMBERS["by_norm"]
    rows += [(f"a norm for each of {leaves:,} leaves", calls, numbers(leaves)) for leaves in WIDE]
    for name, times, count in rows:
        cells = [f"{1e3 * seconds(times, count, processes):.2f} ms" for processes in FAR]
        size = 8 * count
        shown = f"{size} B" if size < KILO else f"{size / KILO:,.0f} kB"
        lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)
