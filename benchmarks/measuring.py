# SPDX-License-Identifier: MIT
"""Measure one task in this process: times, interleaved, what comes out, and peak memory."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import training_steps
from contenders import (
    AGC,
    ALL_OURS,
    BY_NORM,
    EAGER,
    GLOBAL,
    LIBRARIES,
    NATIVE,
    OURS,
    RATIO,
    READ,
    RULES,
    Contender,
    Leaves,
    Library,
    native_of,
)
from gradient_trees import CONVOLUTIONS, FIFTY, TREES, Shape, entries

LARGE_ENOUGH = 25_000_000  # entries, for the memory to stand out
FEWEST = 3  # rounds
WARM_UP = 30  # steps, after which rules that learn no longer only look on


class Effort(NamedTuple):
    """How long one row is measured."""

    rounds: int
    seconds: float
    at_most: float
    """Seconds after which `FEWEST` rounds are enough."""
    batch: float
    """Seconds that a short call is repeated for in each round."""


class Setting(NamedTuple):
    """What is compiled once: a call on a tree; the size of the gradients decides whether it clips."""

    framework: str
    way: str
    tree: str
    dtype: str = "float32"

    @property
    def rule(self) -> str:
        """The rule that the tree is for."""
        return {FIFTY: BY_NORM, CONVOLUTIONS: AGC}.get(self.tree, GLOBAL)


class Point(NamedTuple):
    """So many leaves, of one size, with so many entries in all."""

    framework: str
    way: str
    leaves: int
    entries: int
    rule: str = GLOBAL


class FirstCalls(NamedTuple):
    """Programs over so many leaves of 8 x 16 entries, compiled again and again."""

    framework: str
    way: str
    leaves: int

    @property
    def rules(self) -> list[str]:
        """The rules to compile; `AGC` takes PyTorch minutes each time."""
        return [rule for rule in RULES if (self.framework, rule) != ("torch", AGC)]


class Steps(NamedTuple):
    """Ways to take a step of training; see ``training_steps.py``."""

    framework: str
    kind: str


class Bench(NamedTuple):
    """Contenders, and gradients for them whose norm is known."""

    library: Library
    way: str
    saved: Leaves
    leaves: Leaves
    """The arrays that are measured: always the same ones, as compilers want it."""
    c: float
    """Half the norm of the saved gradients."""
    contenders: dict[str, Contender]

    def ready(self) -> Leaves:
        """Return gradients for one call."""
        return self.library.ready(self.way, self.leaves, self.saved)

    def call(self, name: str) -> tuple[float, float]:
        """Call a contender; return the seconds, and the norm that comes out."""
        grads, contender = self.ready(), self.contenders[name]
        start = time.perf_counter()
        out = contender.call(grads)
        spent = time.perf_counter() - start
        out = grads if contender.in_place else out[0] if isinstance(out, tuple) else out  # with the norm
        return spent, norm(self.library, out)


def bench(framework: str, way: str, dtype: str, shapes: list[Shape], rule: str = GLOBAL) -> Bench:
    """Make gradients of normally distributed numbers, small enough for the sum of their squares in float16.

    Every leaf has a root mean square of 0.001 and every unit is as large as its limit says, so that clipping halves
    all norms alike, whatever the rule.
    """
    library = LIBRARIES[framework]
    if rule == AGC and library.outputs_last:
        shapes = [shape[::-1] for shape in shapes]
    values = normal(shapes)
    saved, leaves = ([library.array(v, dtype) for v in values] for _ in range(2))
    params = [library.array(v / (2 * RATIO), dtype) for v in values] if rule == AGC else None
    c = norm(library, saved) / 2
    limit = c / math.sqrt(len(shapes)) if rule == BY_NORM else c
    return Bench(library, way, saved, leaves, c, library.contenders(way, rule, leaves, params, limit))


def normal(shapes: list[Shape]) -> list[np.ndarray]:
    """Return normally distributed numbers whose root mean square is 0.001 in each array."""
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(shape, dtype="float32") for shape in shapes]
    return [v * np.float32(1e-3 * math.sqrt(v.size) / np.linalg.norm(v)) for v in made]


def measure(setting: Setting, effort: Effort) -> list[dict[str, Any]]:
    """Measure a setting with gradients of twice the limit, then of half the limit."""
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    clips = bench(setting.framework, setting.way, setting.dtype, TREES[setting.tree], setting.rule)
    first = {name: clips.call(name)[0] for name in clips.contenders}
    passes = clips._replace(saved=[g / 4 for g in clips.saved])
    about = {**setting._asdict(), "rule": setting.rule}
    rows = [{**about, "clipped": b is clips, **row(b, effort)} for b in (clips, passes)]
    if setting.way != EAGER:
        for name, seconds in first.items():
            rows[0]["contenders"][name]["first_call_s"] = seconds
    if entries(TREES[setting.tree]) >= LARGE_ENOUGH:
        for b, r in zip((clips, passes), rows, strict=True):
            for name, contender in b.contenders.items():
                r["contenders"][name]["extra_bytes"] = b.library.extra_memory(contender.call, b.ready)
    return rows


def row(bench: Bench, effort: Effort) -> dict[str, Any]:
    """Return the median time of each contender, ratios with their quartiles, and what norms came out."""
    found: dict[str, Any] = {name: {} for name in bench.contenders}
    for name in set(found) - {READ}:
        found[name]["norm"] = bench.call(name)[1] / bench.c
    times = interleaved(bench, effort)
    for name, seconds in times.items():
        found[name]["us"] = 1e6 * float(np.median(seconds))
    for name in set(ALL_OURS) & set(times):
        found[name]["ratio"] = quartiles(times[native_of(name, times)] / times[name])
        found[name]["reads"] = quartiles(times[name] / times[READ])
    return {"rounds": len(times[READ]), "contenders": found}


def scale(point: Point, effort: Effort) -> list[dict[str, Any]]:
    """Measure how long clipping takes, for one point of a curve."""
    shapes: list[Shape] = [(point.entries // point.leaves,)] * point.leaves
    made = bench(point.framework, point.way, "float32", shapes, point.rule)
    made = made._replace(contenders={name: made.contenders[name] for name in (NATIVE, OURS)})
    for name in made.contenders:
        timed(made, name, 1)  # the first call compiles
    times = interleaved(made, effort)
    return [{**point._asdict(), "us": {name: 1e6 * float(np.median(seconds)) for name, seconds in times.items()}}]


def first_calls(task: FirstCalls, effort: Effort) -> list[dict[str, Any]]:
    """Measure how long each rule takes to compile, beside the native loop that clips each leaf by its norm."""
    shapes: list[Shape] = [(8, 16)] * task.leaves

    def first_call(name: str) -> float:
        made = bench(task.framework, task.way, "float32", shapes, BY_NORM if name == NATIVE else name)
        return made.call(NATIVE if name == NATIVE else OURS)[0]

    bench(task.framework, task.way, "float32", shapes[:1]).call(NATIVE)  # the compiler itself has a first time, too
    times = in_turn([NATIVE, *task.rules], effort, first_call)
    found = {name: {"s": quartiles(t), "times": quartiles(t / times[NATIVE])} for name, t in times.items()}
    return [{**task._asdict(), "rounds": len(times[NATIVE]), "contenders": found}]


def steps(task: Steps, effort: Effort) -> list[dict[str, Any]]:
    """Measure steps of training, each way beside the one that it is compared with."""
    library, shapes = LIBRARIES[task.framework], TREES[training_steps.GRADIENTS[task.kind]]
    saved, leaves = ([library.array(v, "float32") for v in normal(shapes)] for _ in range(2))
    made = Bench(library, EAGER, saved, leaves, math.inf, training_steps.steps(task.kind, library, leaves))
    for name in made.contenders:
        timed(made, name, WARM_UP if training_steps.BASES[task.kind] == GLOBAL else FEWEST)
    times = interleaved(made, effort)
    base = times[training_steps.BASES[task.kind]]
    found = {
        name: {"us": quartiles(1e6 * t), "above": quartiles(1e6 * (t - base)), "times": quartiles(t / base)}
        for name, t in times.items()
    }
    for name in found.keys() & {OURS, training_steps.WRAPPED}:
        native = NATIVE if name == OURS else training_steps.CLIPNORM
        found[name]["ratio"] = quartiles(times[native] / times[name])
    return [{**task._asdict(), "rounds": len(base), "contenders": found}]


def interleaved(bench: Bench, effort: Effort) -> dict[str, np.ndarray]:
    """Return the seconds of a call, by contender and round."""
    numbers = {name: math.ceil(effort.batch / timed(bench, name, 1)) for name in bench.contenders}
    return in_turn(list(bench.contenders), effort, lambda name: timed(bench, name, numbers[name]))


def in_turn(names: list[str], effort: Effort, seconds: Callable[[str], float]) -> dict[str, np.ndarray]:
    """Measure every contender once in each round, in a new order; return the seconds by contender and round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    order, shuffle = list(times), random.Random(0).shuffle  # noqa: S311 - no secret
    gc.disable()
    for _ in rounds(effort):
        shuffle(order)
        for name in order:
            times[name].append(seconds(name))
    gc.enable()
    return {name: np.asarray(found) for name, found in times.items()}


def rounds(effort: Effort) -> Iterator[int]:
    """Count rounds until there are enough."""
    start = time.perf_counter()
    for done in itertools.count():
        spent = time.perf_counter() - start
        if (done >= effort.rounds and spent >= effort.seconds) or (done >= FEWEST and spent >= effort.at_most):
            return
        yield done


def timed(bench: Bench, name: str, number: int) -> float:
    """Return the mean seconds of a call; making its gradients ready is not counted."""
    call, spent = bench.contenders[name].call, 0.0
    for _ in range(number):
        grads = bench.ready()
        start = time.perf_counter()
        call(grads)
        spent += time.perf_counter() - start
    return spent / number


def norm(library: Library, leaves: Leaves) -> float:
    """Return the norm of all leaves, added up piece by piece in float64."""
    pieces = (p for g in leaves for p in np.array_split(library.numpy(g).ravel(), 1 + math.prod(g.shape) // 2**18))
    return math.sqrt(sum(float(np.vdot(p, p)) for p in pieces))


def quartiles(values: np.ndarray) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [float(x) for x in np.quantile(values, [0.25, 0.5, 0.75])]
