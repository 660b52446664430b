# SPDX-License-Identifier: MIT
"""What uniclip is to reach, as data, and whether it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from contenders import EAGER, OURS, OURS_IN_PLACE, native_of
from gradient_trees import GPT, LARGE, LSTM, RESNET, SMALL, TINY, TREES

Row = dict[str, Any]


class Measure(NamedTuple):
    """A number that is judged: how it is read from a row, and whether more of it is better."""

    text: str
    quartiles: Callable[[Row, str], list[float]]
    sign: int
    """1 if the bound is the least, -1 if it is the most."""


def above(row: Row, name: str) -> list[float]:
    """Return how many microseconds more a contender takes than the native function."""
    found = row["contenders"]
    return [found[name]["us"] - found[native_of(name, found)]["us"]] * 3


AHEAD = Measure("native / uniclip", lambda row, name: row["contenders"][name]["ratio"], 1)
READS = Measure("uniclip / plain read", lambda row, name: row["contenders"][name]["reads"], -1)
ABOVE = Measure("uniclip - native, µs", above, -1)


class Target(NamedTuple):
    """Bounds by tree, for one way of calling."""

    framework: str
    way: str
    clipped: bool
    name: str
    bounds: dict[str, float]
    measure: Measure = AHEAD


def all_of(trees: list[str], bound: float) -> dict[str, float]:
    """Return the same bound for several trees."""
    return dict.fromkeys(trees, bound)


def either(framework: str, way: str, name: str, bounds: dict[str, float], measure: Measure = AHEAD) -> list[Target]:
    """Return targets that are the same unclipped and clipped."""
    return [Target(framework, way, clipped, name, bounds, measure) for clipped in (False, True)]


UNCLIPPED, CLIPPED = False, True
EVERY, SMALLER = list(TREES), [LSTM, TINY, SMALL]
COMPILED = [tree for tree in TREES if tree != TINY]
BY_HAND = [tree for tree in TREES if tree != SMALL]
TORCH = {RESNET: 2.2, GPT: 2.4, LSTM: 2.5, TINY: 1.8, SMALL: 1.0}
TARGETS = [
    *either("numpy", EAGER, OURS, all_of(BY_HAND, 1.0)),
    *either("numpy", EAGER, OURS_IN_PLACE, all_of(BY_HAND, 1.0)),
    *either("numpy", EAGER, OURS, {SMALL: 8.0}, ABOVE),
    *either("numpy", EAGER, OURS_IN_PLACE, {SMALL: 8.0}, ABOVE),
    Target("numpy", EAGER, UNCLIPPED, OURS, all_of(LARGE, 1.3), READS),
    Target("torch", EAGER, UNCLIPPED, OURS, TORCH),
    Target("torch", EAGER, UNCLIPPED, OURS_IN_PLACE, TORCH),
    Target("torch", EAGER, CLIPPED, OURS_IN_PLACE, {RESNET: 1.15, GPT: 1.2, LSTM: 1.6, TINY: 1.05, SMALL: 1.0}),
    Target("torch", EAGER, UNCLIPPED, OURS, all_of(LARGE, 1.3), READS),
    *either("torch", "torch.compile", OURS_IN_PLACE, all_of(COMPILED, 1.0)),
    Target("tensorflow", EAGER, UNCLIPPED, OURS, all_of([RESNET, GPT], 4.5) | all_of([LSTM, SMALL], 4.0)),
    Target("tensorflow", EAGER, CLIPPED, OURS, all_of([RESNET, GPT], 1.25) | all_of([LSTM, SMALL], 2.0)),
    Target("tensorflow", "tf.function", UNCLIPPED, OURS, {RESNET: 2.0} | all_of(SMALLER, 1.0)),
    Target("tensorflow", "tf.function", CLIPPED, OURS, {RESNET: 1.0} | all_of(SMALLER, 1.0)),
    *either("tensorflow", "tf.function, XLA", OURS, all_of(EVERY, 0.95)),
    *either("jax", EAGER, OURS, all_of(EVERY, 8.0)),
    Target("jax", "jax.jit", UNCLIPPED, OURS, all_of(LARGE, 1.0) | all_of(SMALLER, 0.95)),
    Target("jax", "jax.jit", CLIPPED, OURS, {RESNET: 1.2} | all_of(SMALLER, 0.95)),
    Target("jax", "jax.jit, donated", UNCLIPPED, OURS, all_of(LARGE, 1.3)),
]
"""For float32."""


class Verdict(NamedTuple):
    """A target at one tree, what was measured there, and whether that is enough, to two decimals."""

    target: Target
    tree: str
    bound: float
    quartiles: list[float]
    reached: bool


def judged(rows: list[Row]) -> Iterator[Verdict]:
    """Yield a verdict for each bound whose row was measured."""
    found = {case(row): row for row in rows}
    for target in TARGETS:
        for tree, bound in target.bounds.items():
            row = found.get((target.framework, target.way, tree, "float32", target.clipped))
            if row:
                quartiles = target.measure.quartiles(row, target.name)
                reached = target.measure.sign * (round(quartiles[1], 2) - bound) >= 0
                yield Verdict(target, tree, bound, quartiles, reached)


def case(row: Row) -> tuple[Any, ...]:
    """Return what identifies a row."""
    return row["framework"], row["way"], row["tree"], row["dtype"], row["clipped"]
