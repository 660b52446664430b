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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

import speed_tables
from contenders import EAGER, LIBRARIES
from gradient_trees import RESNET, TINY, TREES
from measuring import Effort, Point, Setting, measure, scale

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what is compared is the CPU
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # else the time to compile is that of a later run
}
RESULTS = Path(__file__).parent.parent / "docs" / "performance.json"
FULL, BRIEF, QUICK = Effort(15, 1.5, 8.0, 5e-3), Effort(5, 0.3, 2.0, 5e-3), Effort(3, 0.0, 1.0, 2e-4)
LEAVES = [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 20_000]  # of 16 entries
ENTRIES = [10**n for n in range(3, 9)]  # of one leaf
SMALL_LEAVES, SMALL_ENTRIES = 100, 10**5  # enough for --quick


def settings(framework: str, trees: list[str]) -> Iterator[Setting]:
    """Yield what is compared with the native function."""
    for way in LIBRARIES[framework].ways:
        for tree in trees:
            if (way, tree) != ("torch.compile", TINY):  # which takes many minutes to compile
                yield Setting(framework, way, tree)
            if tree == RESNET:
                yield Setting(framework, way, tree, LIBRARIES[framework].half)


def points(framework: str, *, quick: bool = False) -> Iterator[Point]:
    """Yield the points of the curves; of compiled code only the sizes, since many leaves take minutes to compile."""
    for way in {"jax": [EAGER, "jax.jit"]}.get(framework, [EAGER]):
        for n in LEAVES if way == EAGER else []:
            if n <= (SMALL_LEAVES if quick else n):
                yield Point(framework, way, n, 16 * n)
        for n in ENTRIES:
            if n <= (SMALL_ENTRIES if quick else n):
                yield Point(framework, way, 1, n)


def prepare() -> None:
    """Set what the frameworks read when they are imported."""
    os.environ.update(ENVIRONMENT)


def run(function: Callable[..., list[Any]], tasks: list[Any], effort: Effort) -> Iterator[dict[str, Any]]:
    """Measure the tasks, those of each framework in one process that imports no other framework."""
    with tqdm(total=len(tasks), dynamic_ncols=True, disable=not tasks) as bar:
        for framework in dict.fromkeys(task.framework for task in tasks):
            with ProcessPoolExecutor(1, get_context("spawn"), prepare) as process:
                for task in (task for task in tasks if task.framework == framework):
                    bar.set_description(", ".join(map(str, task)))
                    yield from process.submit(function, task, effort).result()
                    bar.update()


def save(path: Path, new: dict[str, Any]) -> None:
    """Write results, one row a line; what was measured before and not again stays."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = [(*setting, clipped) for f in LIBRARIES for setting in settings(f, list(TREES)) for clipped in (True, False)]
    orders = {"rows": rows, "scaling": [point for f in LIBRARIES for point in points(f)]}
    parts = [f'"about": {json.dumps(old.get("about", {}) | new["about"], indent=1)}']
    for part, order in orders.items():
        fields = (*Setting._fields, "clipped") if part == "rows" else Point._fields
        found = {tuple(row[f] for f in fields): row for row in [*old.get(part, []), *new.get(part, [])]}
        lines = ",\n".join(json.dumps(rounded(found[key])) for key in order if key in found)
        parts.append(f'"{part}": [\n{lines}\n]')
    path.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


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
    return {"versions": versions, "cpu": cpu, "cores": os.cpu_count(), "date": today}


def main() -> None:
    """Measure what is asked for, print it beside the targets, and keep it for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="only these")
    parser.add_argument("--tree", nargs="+", choices=TREES, help="only these gradient trees")
    parser.add_argument("--scaling", action="store_true", help="only the curves over leaves and entries")
    parser.add_argument("--quick", action="store_true", help="few repetitions; kept only where --out says")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"keep the results here, not in docs/{RESULTS.name}")
    args = parser.parse_args()
    out = args.out or (None if args.quick else RESULTS)
    trees = args.tree or ([] if args.scaling else list(TREES))
    rows = [setting for framework in args.framework for setting in settings(framework, trees)]
    curves = [p for f in args.framework for p in points(f, quick=args.quick) if args.scaling or not args.tree]
    results: dict[str, Any] = {"about": {f: about(f) for f in args.framework}, "rows": [], "scaling": []}
    for part, function, tasks, effort in [("rows", measure, rows, FULL), ("scaling", scale, curves, BRIEF)]:
        for row in run(function, tasks, QUICK if args.quick else effort):
            results[part].append(row)
            if out:
                save(out, results)  # every time, lest an error cost what was measured before it
    print(speed_tables.report(results))


if __name__ == "__main__":
    main()
