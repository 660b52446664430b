# SPDX-License-Identifier: MIT
"""A recorded run as tables of text, for the terminal and for the page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from uniclip.insight.panels import clipped, printable
from uniclip.insight.record import Record
from uniclip.insight.replay import WhatIf, percent
from uniclip.insight.spikes import Spike

EMPTY = "No norm was recorded."
"""The text for a table without rows."""
_GAP = "  "
_NARROWEST = 10
"""The smallest width of the last column, in characters."""
_LEAVES = 3
"""The number of leaves that are named for a spike."""
_SCOPES = {"all_leaves": "all leaves together", "each_leaf": "each leaf, the largest of them"}


class Table(NamedTuple):
    """Cells of text.

    Attributes
    ----------
    columns : tuple of str
        The heads of the columns; all empty where a table needs none.
    rows : list of tuple of str
        One text for each column.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary(record: Record) -> Table:
    """Return a summary of a run: the rule, its length, how much was clipped, the sizes of norms and losses."""
    count = record.steps.size
    rows: list[tuple[str, ...]] = [("rule", record.rule or "not recorded"), ("norms", _kind(record))]
    rows.append(("steps", f"{count:,} ({record.steps[0]} to {record.steps[-1]})" if count else "none"))
    if count:
        known = np.isfinite(record.shares) | np.isfinite(record.factors)
        rows += [
            ("clipped", _part(clipped(record)[known], "not recorded")),
            ("skipped", _part(record.skipped)),
            ("not finite", _part(~record.finite)),
        ]
    norms, losses = record.norms[np.isfinite(record.norms)], record.losses[np.isfinite(record.losses)]
    if norms.size:
        half, most = np.quantile(norms, [0.5, 0.9])
        rows.append(("norm", f"median {number(half)}, 90 % up to {number(most)}, largest {number(norms.max())}"))
    if losses.size:
        first, least, last = number(losses[0]), number(losses.min()), number(losses[-1])
        rows.append(("loss", f"first {first}, smallest {least}, last {last}"))
    if record.leaves.size:
        rows.append(("leaves", f"{len(record.labels):,}, recorded at {record.leaf_steps.size:,} steps"))
    return Table(("", ""), rows)


def of_limits(outlook: WhatIf) -> Table:
    """Return the result of `what_if` as a table."""
    rows: list[tuple[str, ...]] = [
        (number(limit), percent(share, error), number(factor))
        for limit, share, error, factor in zip(*outlook, strict=True)
    ]
    return Table(("limit", "clipped", "smallest factor"), rows)


def of_spikes(found: Sequence[Spike], most: int | None = None) -> Table:
    """Return the largest spikes in the order of their steps, each with the leaves that grew most."""
    largest = sorted(found, key=_size, reverse=True)[:most]
    rows: list[tuple[str, ...]] = [
        (
            f"{spike.step}",
            number(spike.norm) if math.isfinite(spike.norm) else "not finite",
            _times(spike.ratio),
            "yes" if spike.skipped else "no",
            number(spike.loss_before),
            number(spike.loss_after),
            ", ".join(f"{label} ({_times(ratio)})" for label, ratio in spike.leaves[:_LEAVES]) or "-",
        )
        for spike in sorted(largest, key=lambda spike: spike.step)
    ]
    columns: tuple[str, ...] = ("step", "norm", "of median", "skipped", "loss before", "after", "leaves that grew most")
    if not any([spike.leaves for spike in found]):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(columns, rows)


def number(value: float) -> str:
    """Return a number with three digits, ``-`` for NaN."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def as_text(table: Table, width: int) -> str:
    """Return a table in columns, the last one wrapped to the width in characters."""
    if not table.rows:
        return EMPTY
    rows = [table.columns, *table.rows] if any(table.columns) else table.rows
    rows = [tuple(map(printable, row)) for row in rows]
    wide = [max(len(row[column]) for row in rows) for column in range(len(table.columns) - 1)]
    start = sum(wide) + len(_GAP) * len(wide)
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, wide, strict=False)]
        parts = textwrap.wrap(row[-1], max(width - start, _NARROWEST)) or [""]
        lines += [f"{_GAP.join([*cells, parts[0]])}".rstrip(), *(" " * start + part for part in parts[1:])]
    return "\n".join(lines)


def _kind(record: Record) -> str:
    """Return the scope of the norms, and their order."""
    scope = _SCOPES.get(record.scope, "parts of the gradients, the largest of them")
    return scope if record.ord is None else f"{scope}, of order {record.ord:g}"


def _part(chosen: Any, unknown: str = "none") -> str:
    """Return the number of chosen steps, and their share of all."""
    if not chosen.size:
        return unknown
    if not chosen.any():
        return "no step"
    return f"{chosen.mean():.1%} ({chosen.sum():,} {'step' if chosen.sum() == 1 else 'steps'})".replace("%", " %")


def _times(ratio: float) -> str:
    """Return the ratio of a norm to the median as text; ∞ is the ratio of one that is not finite."""
    if math.isinf(ratio):
        return "not finite"
    return "-" if math.isnan(ratio) else f"{ratio:.3g} x"


def _size(spike: Spike) -> float:
    """Return the size of a spike; one that is not finite is larger than all."""
    return spike.ratio if math.isfinite(spike.norm) and math.isfinite(spike.ratio) else math.inf
