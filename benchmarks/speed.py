# SPDX-License-Identifier: MIT
"""Time uniclip beside each framework's own clipping function, and measure the memory they take.

In every round each contender runs once, or as often as a short call needs, in a new order; a ratio is the median of
the rounds' ratios. Each framework has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import speed_tables
from contenders import EAGER, LIBRARIES, NATIVE, NATIVE_IN_PLACE, OURS_IN_PLACE, READ, Contender, Leaves, Library
from gradient_trees import RESNET, TINY, TREES, Shape
from memory import peak_of

RESULTS = Path(__file__).parent.parent / "docs" / "performance.json"
LARGE_ENOUGH = 25_000_000  # entries, for the memory to stand out


class Effort(NamedTuple):
    """How long one row is measured."""

    rounds: int
    seconds: float
    at_most: float
    """Seconds after which fewer rounds, but five, are enough."""
    batch: float
    """Seconds that a short call is repeated for in each round."""


FULL, QUICK = Effort(15, 1.5, 8.0, 5e-3), Effort(3, 0.0, 1.0, 2e-4)
FEWEST = 3


class Setting(NamedTuple):
    """What is compiled once: the same call on the same tree, then clipped and unclipped by the size of the gradients."""

    framework: str
    way: str
    tree: str
    dtype: str = "float32"


def settings(framework: str, trees: list[str]) -> Iterator[Setting]:
    """Yield what is measured for a framework."""
    library = LIBRARIES[framework]
    for way in library.ways:
        for tree in trees:
            if (way, tree) != ("torch.compile", TINY):  # which takes many minutes to compile
                yield Setting(framework, way, tree)
            if tree == RESNET:
                yield Setting(framework, way, tree, library.half)


def measure(setting: Setting, effort: Effort) -> list[dict[str, Any]]:
    """Measure one setting, clipped and unclipped, in this process."""
    library = LIBRARIES[setting.framework]
    values = random_values(TREES[setting.tree])
    saved = [library.array(v, setting.dtype) for v in values]
    c = norm(library, saved) / 2
    return [{**setting._asdict(), **row} for row in measured(library, setting, values, c, effort)]


def measured(
    library: Library, setting: Setting, values: list[np.ndarray], c: float, effort: Effort
) -> Iterator[dict[str, Any]]:
    """Yield the row of gradients twice as long as the limit ``c``, then of those half as long."""
    way, first = setting.way, {}
    leaves = [library.array(v, setting.dtype) for v in values]  # the same arrays always, as compilers want it
    contenders = library.contenders(way, leaves, c)
    for clipped in (True, False):
        saved = [library.array(v if clipped else v / 4, setting.dtype) for v in values]

        def ready(saved: Leaves = saved) -> Leaves:
            return library.ready(way, leaves, saved)

        norms = {}
        for name, contender in contenders.items():
            grads = ready()
            start = time.perf_counter()
            out = contender.call(grads)
            first.setdefault(name, time.perf_counter() - start)
            if name != READ:
                norms[name] = norm(library, grads if contender.in_place else out) / c
            del grads, out
        found = {name: {"norm": value} for name, value in norms.items()} | {READ: {}}
        rounds, times = interleaved(contenders, ready, effort)
        for name, entry in found.items():
            entry["us"] = 1e6 * float(np.median(times[name]))
            if way != EAGER:
                entry["first_call_s"] = first[name]
            if name not in {NATIVE, NATIVE_IN_PLACE, READ}:
                entry["ratio"] = quartiles(times[native_of(name, times)] / times[name])
                entry["reads"] = quartiles(times[name] / times[READ])
        if sum(v.size for v in values) >= LARGE_ENOUGH:
            for name, contender in contenders.items():
                found[name]["extra_bytes"] = peak_of(contender.call, ready)
        yield {"clipped": clipped, "rounds": rounds, "contenders": found}


def native_of(name: str, times: dict[str, Any]) -> str:
    """Return what a contender is compared with: in place, if there is such a native function."""
    return NATIVE_IN_PLACE if name == OURS_IN_PLACE and NATIVE_IN_PLACE in times else NATIVE


def interleaved(
    contenders: dict[str, Contender], ready: Callable[[], Leaves], effort: Effort
) -> tuple[int, dict[str, np.ndarray]]:
    """Return how many rounds there were, and the seconds of a call in each, by contender."""
    numbers = {n: math.ceil(effort.batch / timed(c.call, ready, 1)) for n, c in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle  # noqa: S311 - no secret
    rounds, start = 0, time.perf_counter()
    gc.disable()
    while True:
        shuffle(order)
        for name in order:
            times[name].append(timed(contenders[name].call, ready, numbers[name]))
        rounds += 1
        spent = time.perf_counter() - start
        enough = rounds >= effort.rounds and spent >= effort.seconds
        if enough or (spent >= effort.at_most and rounds >= FEWEST):
            break
    gc.enable()
    return rounds, {name: np.asarray(seconds) for name, seconds in times.items()}


def timed(call: Callable[[Leaves], Any], ready: Callable[[], Leaves], number: int) -> float:
    """Return the mean seconds of a call; making its gradients ready is not counted."""
    spent = 0.0
    for _ in range(number):
        grads = ready()
        start = time.perf_counter()
        call(grads)
        spent += time.perf_counter() - start
    return spent / number


def random_values(shapes: list[Shape]) -> list[np.ndarray]:
    """Return normally distributed numbers of about 1e-3, whose squares add up to less than float16 can hold."""
    rng = np.random.default_rng(0)
    return [np.float32(1e-3) * rng.standard_normal(shape, dtype="float32") for shape in shapes]


def norm(library: Library, leaves: Leaves) -> float:
    """Return the norm of all leaves, added up piece by piece in float64."""
    pieces = (p for g in leaves for p in np.array_split(library.numpy(g).ravel(), 1 + math.prod(g.shape) // 2**18))
    return math.sqrt(sum(float(np.vdot(p, p)) for p in pieces))


def quartiles(values: np.ndarray) -> list[float]:
    """Return the median and the quartiles around it, in ascending order."""
    return [float(x) for x in np.quantile(values, [0.25, 0.5, 0.75])]


def machine() -> dict[str, Any]:
    """Return what the times depend on."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    today = datetime.now(timezone.utc).date().isoformat()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "date": today}


def run(chosen: list[Setting], effort: Effort) -> Iterator[dict[str, Any]]:
    """Measure settings, those of each framework in one process that imports no other framework."""
    with tqdm(total=len(chosen), unit="setting", dynamic_ncols=True) as bar:
        for framework in dict.fromkeys(setting.framework for setting in chosen):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                for setting in (s for s in chosen if s.framework == framework):
                    bar.set_description(f"{framework}, {setting.way}, {setting.tree}")
                    yield from process.submit(measure, setting, effort).result()
                    bar.update()


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], keys: list[str]) -> list[dict[str, Any]]:
    """Replace old rows by new ones of the same keys; those of other keys stay."""
    rows = {tuple(row[key] for key in keys): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows, key=lambda key: list(map(str, key)))]


def main() -> None:
    """Measure what is asked for, print it beside the targets, and keep it for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="only these")
    parser.add_argument("--tree", nargs="+", choices=TREES, default=list(TREES), help="only these gradient trees")
    parser.add_argument("--quick", action="store_true", help="few repetitions; kept only where --out says")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where to keep the results, instead of {RESULTS.name}"
    )
    args = parser.parse_args()
    out = args.out or (None if args.quick else RESULTS)
    chosen = [s for framework in args.framework for s in settings(framework, args.tree)]
    results = {"about": {framework: about(framework) for framework in args.framework}}
    results["rows"] = list(run(chosen, QUICK if args.quick else FULL))
    print(speed_tables.table(results["rows"]))
    print(speed_tables.reached(results["rows"]))
    if out:
        save(out, results)


def save(path: Path, new: dict[str, Any]) -> None:
    """Write results, one row a line, and keep what is there of others."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = json.dumps(old.get("about", {}) | new["about"], indent=1)
    rows = merged(old.get("rows", []), new["rows"], [*Setting._fields, "clipped"])
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{"about": {about},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def about(framework: str) -> dict[str, Any]:
    """Return what the times depend on."""
    return {"versions": LIBRARIES[framework].versions(), **machine()}


if __name__ == "__main__":
    main()
