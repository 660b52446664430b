# SPDX-License-Identifier: MIT
"""What was measured by speed.py, as Markdown, and how far it is from what was to be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gradient_trees import BIG, GPT, LARGE, LSTM, RESNET, SMALL, TINY, TREES

Row = dict[str, Any]
FUNCTIONAL, IN_PLACE = "uniclip", "uniclip in place"
EVERY, SMALLS = list(TREES), [LSTM, TINY, SMALL]


class Measure(NamedTuple):
    """A number to be judged: what it is called, how it is read from a row, and on which side it should be."""

    text: str
    quartiles: Callable[[Row, str], list[float]]
    sign: int
    """1 if it should be large, -1 if small."""


def above(row: Row, name: str) -> list[float]:
    """Return the microseconds that a contender takes more than the native function."""
    native = row["contenders"]["native in place" if name == IN_PLACE else "native"]["us"]
    return [row["contenders"][name]["us"] - native] * 3


AHEAD = Measure("native / uniclip", lambda row, name: row["contenders"][name]["ratio"], 1)
READS = Measure("uniclip / plain read", lambda row, name: row["contenders"][name]["reads"], -1)
ABOVE = Measure("µs above native", above, -1)


class Target(NamedTuple):
    """What was to be reached in one way of calling, by tree."""

    framework: str
    way: str
    clipped: bool
    name: str
    bounds: dict[str, float]
    measure: Measure = AHEAD


def both(framework: str, way: str, name: str, bounds: dict[str, float]) -> list[Target]:
    """Return targets that are the same clipped and unclipped."""
    return [Target(framework, way, clipped, name, bounds) for clipped in (False, True)]


def same(trees: list[str], bound: float) -> dict[str, float]:
    """Return one bound for several trees."""
    return dict.fromkeys(trees, bound)


UNCLIPPED, CLIPPED = False, True
COMPILED = [RESNET, GPT, LSTM, BIG, SMALL]
TARGETS = [
    Target("torch", "eager", UNCLIPPED, FUNCTIONAL, {RESNET: 2.2, GPT: 2.4, LSTM: 2.5, TINY: 1.8, SMALL: 1.0}),
    Target("torch", "eager", UNCLIPPED, IN_PLACE, {RESNET: 2.2, GPT: 2.4, LSTM: 2.5, TINY: 1.8, SMALL: 1.0}),
    Target("torch", "eager", CLIPPED, IN_PLACE, {RESNET: 1.15, GPT: 1.2, LSTM: 1.6, TINY: 1.05, SMALL: 1.0}),
    Target("torch", "eager", UNCLIPPED, FUNCTIONAL, same(LARGE, 1.3), READS),
    *both("torch", "torch.compile", IN_PLACE, same(COMPILED, 1.0)),
    Target("tensorflow", "eager", UNCLIPPED, FUNCTIONAL, {RESNET: 4.5, GPT: 4.5, LSTM: 4.0, SMALL: 4.0}),
    Target("tensorflow", "eager", CLIPPED, FUNCTIONAL, {RESNET: 1.25, GPT: 1.25, LSTM: 2.0, SMALL: 2.0}),
    Target("tensorflow", "tf.function", UNCLIPPED, FUNCTIONAL, {RESNET: 2.0, **same(SMALLS, 1.0)}),
    Target("tensorflow", "tf.function", CLIPPED, FUNCTIONAL, {RESNET: 1.0, **same(SMALLS, 1.0)}),
    *both("tensorflow", "tf.function, XLA", FUNCTIONAL, same(EVERY, 0.95)),
    *both("jax", "eager", FUNCTIONAL, same(EVERY, 8.0)),
    Target("jax", "jax.jit", UNCLIPPED, FUNCTIONAL, same(LARGE, 1.0) | same(SMALLS, 0.95)),
    Target("jax", "jax.jit", CLIPPED, FUNCTIONAL, {RESNET: 1.2, **same(SMALLS, 0.95)}),
    Target("jax", "jax.jit, donated", UNCLIPPED, FUNCTIONAL, same(LARGE, 1.3)),
    *both("numpy", "eager", IN_PLACE, same([RESNET, GPT, LSTM, TINY, BIG], 1.0)),
    *both("numpy", "eager", FUNCTIONAL, same([RESNET, GPT, LSTM, TINY, BIG], 1.0)),
    *[target._replace(measure=ABOVE) for target in both("numpy", "eager", IN_PLACE, {SMALL: 8.0})],
    *[target._replace(measure=ABOVE) for target in both("numpy", "eager", FUNCTIONAL, {SMALL: 8.0})],
    Target("numpy", "eager", UNCLIPPED, FUNCTIONAL, same(LARGE, 1.3), READS),
]


def reached(rows: list[Row]) -> str:
    """Return the table of targets."""
    return table_of(["case", "clipped", "what", "wanted", "measured", "reached"], list(judged(rows)))


def judged(rows: list[Row]) -> Iterator[list[str]]:
    """Yield each target and tree that was measured, and whether it was reached, to two decimals."""
    by_case = {case(row): row for row in rows}
    for target in TARGETS:
        for tree, bound in target.bounds.items():
            row = by_case.get((target.framework, target.way, tree, "float32", target.clipped))
            if row:
                measured = target.measure.quartiles(row, target.name)
                good = target.measure.sign * (round(measured[1], 2) - bound) >= 0
                wanted = f"{'at least' if target.measure.sign > 0 else 'at most'} {bound:g}"
                where = f"{target.framework}, {target.way}, {tree}, {target.name}"
                yes = "yes" if target.clipped else "no"
                yield [where, yes, target.measure.text, wanted, spread(measured), "reached" if good else "**not**"]


def case(row: Row) -> tuple[Any, ...]:
    """Return what identifies a row."""
    return row["framework"], row["way"], row["tree"], row["dtype"], row["clipped"]


def table(rows: list[Row]) -> str:
    """Return the ratios and the times of rows."""
    heads = ["way", "tree", "clipped", "native", "uniclip", "in place", "read", "ratio", "in place"]
    return table_of(heads, list(map(cells, rows)))


def cells(row: Row) -> list[str]:
    """Return a row as texts."""
    found, names = row["contenders"], ["native", FUNCTIONAL, IN_PLACE, "plain read"]
    times = [duration(found[name]["us"]) if name in found else "" for name in names]
    ratios = [spread(found[name]["ratio"]) if name in found else "" for name in (FUNCTIONAL, IN_PLACE)]
    tree = row["tree"] if row["dtype"] == "float32" else f"{row['tree']}, {row['dtype']}"
    return [f"{row['framework']} {row['way']}", tree, "yes" if row["clipped"] else "no", *times, *ratios]


def spread(quartiles: list[float]) -> str:
    """Return a median and the quartiles around it."""
    low, middle, high = (f"{x:.2f}" for x in quartiles)
    return f"{middle} ({low}-{high})" if low != high else middle


def duration(us: float) -> str:
    """Return a time to three digits, in µs or ms."""
    return f"{us:.3g} µs" if us < 1000 else f"{us / 1000:.4g} ms"  # noqa: PLR2004


def table_of(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, aligned."""
    lines = [heads, ["-" * len(head) for head in heads], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
