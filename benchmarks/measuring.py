# SPDX-License-Identifier: MIT
"""Measure one setting in this process: times, interleaved, what comes out, and peak memory."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from contenders import EAGER, LIBRARIES, NATIVE, OURS, OURS_IN_PLACE, READ, Contender, Leaves, Library, native_of
from gradient_trees import TREES, Shape, entries

LARGE_ENOUGH = 25_000_000  # entries, for the memory to stand out
FEWEST = 3  # rounds


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


class Point(NamedTuple):
    """So many leaves, of one size, with so many entries in all."""

    framework: str
    way: str
    leaves: int
    entries: int


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
        return spent, norm(self.library, grads if contender.in_place else out)


def bench(framework: str, way: str, dtype: str, shapes: list[Shape]) -> Bench:
    """Make gradients of normally distributed numbers, small enough for the sum of their squares in float16."""
    library, rng = LIBRARIES[framework], np.random.default_rng(0)
    values = [np.float32(1e-3) * rng.standard_normal(shape, dtype="float32") for shape in shapes]
    saved, leaves = ([library.array(v, dtype) for v in values] for _ in range(2))
    c = norm(library, saved) / 2
    return Bench(library, way, saved, leaves, c, library.contenders(way, leaves, c))


def measure(setting: Setting, effort: Effort) -> list[dict[str, Any]]:
    """Measure a setting with gradients of twice the limit, then of half the limit."""
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
    clips = bench(setting.framework, setting.way, setting.dtype, TREES[setting.tree])
    first = {name: clips.call(name)[0] for name in clips.contenders}
    passes = clips._replace(saved=[g / 4 for g in clips.saved])
    rows = [{**setting._asdict(), "clipped": b is clips, **row(b, effort)} for b in (clips, passes)]
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
    for name in {OURS, OURS_IN_PLACE} & set(times):
        found[name]["ratio"] = quartiles(times[native_of(name, times)] / times[name])
        found[name]["reads"] = quartiles(times[name] / times[READ])
    return {"rounds": len(times[READ]), "contenders": found}


def scale(point: Point, effort: Effort) -> list[dict[str, Any]]:
    """Measure how long clipping takes, for one point of a curve."""
    shapes: list[Shape] = [(point.entries // point.leaves,)] * point.leaves
    made = bench(point.framework, point.way, "float32", shapes)
    made = made._replace(contenders={name: made.contenders[name] for name in (NATIVE, OURS)})
    for name in made.contenders:
        timed(made, name, 1)  # the first call compiles
    times = interleaved(made, effort)
    return [{**point._asdict(), "us": {name: 1e6 * float(np.median(seconds)) for name, seconds in times.items()}}]


def interleaved(bench: Bench, effort: Effort) -> dict[str, np.ndarray]:
    """Run every contender once in each round, in a new order; return the seconds of a call, by contender and round."""
    numbers = {name: math.ceil(effort.batch / timed(bench, name, 1)) for name in bench.contenders}
    times: dict[str, list[float]] = {name: [] for name in bench.contenders}
    order, shuffle = list(times), random.Random(0).shuffle  # noqa: S311 - no secret
    gc.disable()
    for _ in rounds(effort):
        shuffle(order)
        for name in order:
            times[name].append(timed(bench, name, numbers[name]))
    gc.enable()
    return {name: np.asarray(seconds) for name, seconds in times.items()}


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
