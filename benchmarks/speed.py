# SPDX-License-Identifier: MIT
"""Time uniclip beside each framework's own clipping function, and measure the memory both take.

In every round each contender runs once, or as often as a short call needs, in a new order; a ratio is the median of
the rounds' ratios. Each framework has a process of its own. The documentation shows what is kept in
``docs/performance.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import speed_tables
from contenders import BY_NORM, EAGER, GLOBAL, LIBRARIES
from gradient_trees import RESNET, TINY, TREES
from measuring import Effort, FirstCalls, Point, Setting, Steps, first_calls, measure, scale, steps
from training_steps import WHERE

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what is compared is the CPU
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # else the time to compile is that of a later run
}
RESULTS = Path(__file__).parent.parent / "docs" / "performance.json"
FULL, BRIEF = Effort(11, 1.0, 7.0, 5e-3), Effort(5, 0.3, 2.0, 5e-3)
PROGRAMS = Effort(5, 0.0, 120.0, 0.0)
QUICK, ONCE = Effort(3, 0.0, 1.0, 2e-4), Effort(1, 0.0, 1.0, 0.0)
LEAVES = [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000]  # of 16 entries
ENTRIES = [10**n for n in range(3, 9)]  # of one leaf
GROWTH = {GLOBAL: [*LEAVES, 100_000], BY_NORM: [100, 10_000, 100_000]}
"""Leaves, by rule, where each leaf is cheap enough: on NumPy and PyTorch."""
LONG = ("torch.compile", TINY)
"""What takes many minutes to compile."""
PER_LEAF_WAYS = {EAGER, "jax.jit"}
"""The ways of calling in which other rules than that of the global norm are measured, and half precision."""
COMPILERS = {"torch": "torch.compile", "jax": "jax.jit"}
MANY, FEW = {"torch": 30, "jax": 100}, 2  # leaves that are compiled
SMALL_LEAVES, SMALL_ENTRIES = 100, 10**5  # enough for --quick


def settings(framework: str) -> Iterator[Setting]:
    """Yield what is compared with the native function."""
    for way in LIBRARIES[framework].ways:
        for tree in TREES:
            setting = Setting(framework, way, tree)
            if (way in PER_LEAF_WAYS or setting.rule == GLOBAL) and (way, tree) != LONG:
                yield setting
            if tree == RESNET and way in PER_LEAF_WAYS:
                yield setting._replace(dtype=LIBRARIES[framework].half)


def points(framework: str) -> Iterator[Point]:
    """Yield the points of the curves; of compiled code only the sizes, since many leaves take minutes to compile."""
    for rule, leaves in (GROWTH if framework in {"numpy", "torch"} else {GLOBAL: LEAVES}).items():
        yield from (Point(framework, EAGER, n, 16 * n, rule) for n in leaves)
    for way in {"jax": [EAGER, "jax.jit"]}.get(framework, [EAGER]):
        yield from (Point(framework, way, 1, n) for n in ENTRIES)


def training(framework: str) -> Iterator[Steps]:
    """Yield the kinds of steps that are measured on a framework."""
    return (Steps(framework, kind) for kind, frameworks in WHERE.items() if framework in frameworks)


def programs(framework: str) -> Iterator[FirstCalls]:
    """Yield what is compiled again and again."""
    if framework in COMPILERS:
        yield FirstCalls(framework, COMPILERS[framework], MANY[framework])


def shortened(jobs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the tasks that take a moment, and shorter ones for some that do not."""
    for name, task in jobs:
        if isinstance(task, FirstCalls):
            yield name, task._replace(leaves=FEW)
        elif not isinstance(task, Point) or (task.leaves <= SMALL_LEAVES and task.entries <= SMALL_ENTRIES):
            yield name, task


class Part(NamedTuple):
    """A part of the results: what is measured, how and for how long, and the fields by which a row is known."""

    tasks: Callable[[str], Iterator[Any]]
    function: Callable[..., list[Any]]
    effort: Effort
    fields: tuple[str, ...]
    quick: Effort = QUICK


PARTS = {
    "rows": Part(settings, measure, FULL, Setting._fields),
    "scaling": Part(points, scale, BRIEF, Point._fields),
    "steps": Part(training, steps, FULL, Steps._fields),
    "compiling": Part(programs, first_calls, PROGRAMS, FirstCalls._fields[:2], ONCE),
}


def prepare() -> None:
    """Set what the frameworks read when they are imported."""
    os.environ.update(ENVIRONMENT)


def run(jobs: list[tuple[str, Any]], *, quick: bool) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """Measure tasks of parts, those of each framework in one process that imports no other framework.

    Yields the name of the part, the seconds that a task took, and its rows.
    """
    with tqdm(total=len(jobs), dynamic_ncols=True, disable=not jobs) as bar:
        for framework in dict.fromkeys(task.framework for _, task in jobs):
            with ProcessPoolExecutor(1, get_context("spawn"), prepare) as process:
                for name, task in ((name, task) for name, task in jobs if task.framework == framework):
                    bar.set_description(", ".join(map(str, task)))
                    part = PARTS[name]
                    effort = part.quick if quick else part.effort
                    start = time.perf_counter()
                    rows = process.submit(part.function, task, effort).result()
                    yield name, time.perf_counter() - start, rows
                    bar.update()


def save(path: Path, new: dict[str, Any]) -> None:
    """Write results, one row a line; what was measured before and not again stays."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = old.get("about", {})
    about = {f: a | {"took": before.get(f, {}).get("took", {}) | a["took"]} for f, a in new["about"].items()}
    blocks = [f'"about": {json.dumps(rounded(before | about), indent=1)}']
    for name, part in PARTS.items():
        rows = [*old.get(name, []), *new[name]]
        found = {(*(row[field] for field in part.fields), row.get("clipped")): row for row in rows}
        measured = (task for framework in LIBRARIES for task in part.tasks(framework))
        keys = [(*(getattr(task, field) for field in part.fields), c) for task in measured for c in (True, False, None)]
        lines = ",\n".join(json.dumps(rounded(found[key])) for key in keys if key in found)
        blocks.append(f'"{name}": [\n{lines}\n]')
    path.write_text("{" + ",\n".join(blocks) + "}\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Keep six digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def about(framework: str) -> dict[str, Any]:
    """Return what the times depend on."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    today = datetime.now(timezone.utc).date().isoformat()
    versions = LIBRARIES[framework].versions() | {"python": platform.python_version()}
    return {"versions": versions, "cpu": cpu, "cores": os.cpu_count(), "date": today, "took": {}}


def main() -> None:
    """Measure what is asked for, print it beside the targets, and keep it for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="only these")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="only these parts of the results; rows, with --tree")
    parser.add_argument("--tree", nargs="+", choices=TREES, default=list(TREES), help="rows of these trees only")
    parser.add_argument("--quick", action="store_true", help="few repetitions; kept only where --out says")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"keep the results here, not in docs/{RESULTS.name}")
    args = parser.parse_args()
    out = args.out or (None if args.quick else RESULTS)
    results: dict[str, Any] = {"about": {f: about(f) for f in args.framework}} | {name: [] for name in PARTS}
    parts = args.part or (list(PARTS) if args.tree == list(TREES) else ["rows"])
    jobs = [(name, task) for name in parts for framework in args.framework for task in PARTS[name].tasks(framework)]
    jobs = [(name, task) for name, task in jobs if name != "rows" or task.tree in args.tree]
    for name, seconds, rows in run(list(shortened(jobs)) if args.quick else jobs, quick=args.quick):
        results[name] += rows
        took = results["about"][rows[0]["framework"]]["took"]  # seconds, by part
        took[name] = took.get(name, 0.0) + seconds
        if out:
            save(out, results)  # every time, lest an error cost what was measured before it
    print(speed_tables.report(results))


if __name__ == "__main__":
    main()
