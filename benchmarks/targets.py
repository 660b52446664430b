# SPDX-License-Identifier: MIT
"""What uniclip is to reach, as data, and whether it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from contenders import AGC, BY_NORM, DROP_IN, EAGER, GLOBAL, NATIVE, OURS, OURS_IN_PLACE, native_of
from gradient_trees import BIG, CONVOLUTIONS, FIFTY, GPT, LARGE, LSTM, MLP, RESNET, SMALL, TEN, TINY
from training_steps import ATTACH, AUTOCLIP, BASES, CLIPPER, KERAS, LEARNING, WRAPPED

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
EVERY, SMALLER = [RESNET, GPT, LSTM, TINY, BIG, SMALL], [LSTM, TINY, SMALL]
COMPILED = [tree for tree in EVERY if tree != TINY]
BY_HAND = [tree for tree in EVERY if tree != SMALL]
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
    *either("numpy", EAGER, OURS, {SMALL: 0.12, MLP: 0.4, LSTM: 0.45, FIFTY: 0.6, CONVOLUTIONS: 1.0}),
    Target("torch", EAGER, UNCLIPPED, DROP_IN, all_of([SMALL, MLP, LSTM], 1.5)),
    Target("torch", EAGER, CLIPPED, DROP_IN, {SMALL: 1.0, MLP: 1.0, LSTM: 1.1}),
    *either("torch", EAGER, OURS, {FIFTY: 2.0, CONVOLUTIONS: 1.5}),
    *either("torch", EAGER, OURS_IN_PLACE, {FIFTY: 2.0, CONVOLUTIONS: 1.5}),
    *either("tensorflow", EAGER, OURS, {FIFTY: 4.0, CONVOLUTIONS: 1.2}),
    *either("jax", EAGER, OURS, {CONVOLUTIONS: 3.0}),
    *either("jax", "jax.jit", OURS, {TEN: 0.9, CONVOLUTIONS: 1.0}),
]
"""For float32."""
STEPS = [
    *((framework, CLIPPER, name, "us", 250.0) for framework in ("tensorflow", "jax") for name in LEARNING),
    ("torch", ATTACH, AUTOCLIP, "above", 50.0),
    ("tensorflow", KERAS, WRAPPED, "above", 1000.0),
]
"""The most microseconds of a step of training, or above the way that it is compared with."""
COMPILING = {("torch", BY_NORM): 2.0, ("torch", GLOBAL): 1.5, ("jax", BY_NORM): 5.0, ("jax", AGC): 8.0}
"""The most times that compiling may take as long as the native loop."""
PER_LEAF = 1.2
"""The most that the times per leaf may be apart, from `COUNTS` of leaves."""
COUNTS = [100, 10_000, 100_000]


class Verdict(NamedTuple):
    """A bound, and what was measured."""

    framework: str
    case: list[str]
    """How it was called, on what, and whether it clipped."""
    what: str
    sign: int
    bound: float
    quartiles: list[float]

    @property
    def reached(self) -> bool:
        """Whether the median is good enough, to two decimals."""
        return self.sign * (round(self.quartiles[1], 2) - self.bound) >= 0


def judged(results: dict[str, list[Row]]) -> Iterator[Verdict]:
    """Yield a verdict for each bound whose row was measured."""
    yield from against_native(results.get("rows", []))
    yield from training(results.get("steps", []))
    yield from compiling(results.get("compiling", []))
    yield from growth(results.get("scaling", []))


def against_native(rows: list[Row]) -> Iterator[Verdict]:
    """Judge the ratios and times of clipping."""
    found = {(r["framework"], r["way"], r["tree"], r["clipped"]): r for r in rows if r["dtype"] == "float32"}
    for target in TARGETS:
        for tree, bound in target.bounds.items():
            row = found.get((target.framework, target.way, tree, target.clipped))
            if row:
                what = target.measure.text.replace("uniclip", target.name)
                quartiles = target.measure.quartiles(row, target.name)
                yield Verdict(target.framework, case(row), what, target.measure.sign, bound, quartiles)


def training(rows: list[Row]) -> Iterator[Verdict]:
    """Judge steps of training."""
    found = {(row["framework"], row["kind"]): row["contenders"] for row in rows}
    for framework, kind, name, measure, bound in STEPS:
        if (framework, kind) in found:
            what = f"{name}, µs" + (f" above {BASES[kind]}" if measure == "above" else "")
            yield Verdict(framework, [kind, MLP, "no"], what, -1, bound, found[framework, kind][name][measure])


def compiling(rows: list[Row]) -> Iterator[Verdict]:
    """Judge how long rules take to compile."""
    for row in rows:
        for rule, found in row["contenders"].items():
            bound = COMPILING.get((row["framework"], rule))
            if bound:
                case = [row["way"], f"{row['leaves']} leaves", "yes"]
                yield Verdict(row["framework"], case, f"compiling {rule} / the loop", -1, bound, found["times"])


def growth(rows: list[Row]) -> Iterator[Verdict]:
    """Judge whether the time per leaf is the same for few leaves and for many."""
    for (framework, rule), found in per_leaf(rows).items():
        apart = max(found[OURS]) / min(found[OURS])
        case = [EAGER, f"{rule}, {COUNTS[0]:,} to {COUNTS[-1]:,} leaves", "yes"]
        yield Verdict(framework, case, "most / least time per leaf", -1, PER_LEAF, [apart] * 3)


def per_leaf(rows: list[Row]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return microseconds per leaf for `COUNTS` of leaves, by framework and rule, where all were measured."""
    chosen = [row for row in rows if row["way"] == EAGER and row["entries"] == 16 * row["leaves"]]
    found = {(row["framework"], row["rule"], row["leaves"]): row["us"] for row in chosen}
    keys = [key[:2] for key in found if all((*key[:2], count) in found for count in COUNTS)]
    return {key: {name: [found[(*key, n)][name] / n for n in COUNTS] for name in (NATIVE, OURS)} for key in keys}


def case(row: Row) -> list[str]:
    """Return what a row is about."""
    return [row["way"], tree_of(row), "yes" if row["clipped"] else "no"]


def tree_of(row: Row) -> str:
    """Return the gradients of a row, with their type and the rule if they are not the usual ones."""
    parts = [
        row["rule"] if row["rule"] != GLOBAL else "",
        row["tree"],
        row["dtype"] if row["dtype"] != "float32" else "",
    ]
    return ", ".join(filter(None, parts))
