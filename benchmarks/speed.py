# SPDX-License-Identifier: MIT
"""Time uniclip next to each framework's own clipping.

``step`` times it in a training step, ``rules`` times rules with one norm there, ``processes`` times
the host under FSDP2, ``engines`` inside of DeepSpeed, and ``growth`` many leaves. In every round
each contender runs as often as the others, in a random order; a ratio is the median of the rounds'
ratios. Each framework has a process of its own. The documentation shows the results in
``docs/speed-COMMAND.json``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import engines
import many
import processes
import rules
import steps
from timing import Row, save
from tqdm import tqdm

DOCS = Path(__file__).parent.parent / "docs"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}
"""The environment of measurements: CPU only, without compilation caches."""
COMMANDS = {
    "step": steps,
    "rules": rules,
    "processes": processes,
    "engines": engines,
    "growth": many,
}


def measured(
    command: str, framework: str, what: str, rounds: int
) -> tuple[dict[str, str], list[Row]]:
    """Return the versions that times depend on, and the rows of a job.

    This process imports no other framework.
    """
    rows = [
        {"framework": framework, "what": what, **row}
        for row in COMMANDS[command].measure(framework, what, rounds)
    ]
    names = {"jax": ["jax", "optax"], "tensorflow": ["tensorflow", "keras"]}.get(
        framework, [framework]
    )
    return {name: importlib.import_module(name).__version__ for name in names}, rows


def machine() -> dict[str, Any]:
    """Return the machine and the date of the measurement."""
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpu.read_text("utf-8")) if cpu.exists() else None
    today = datetime.now(timezone.utc).date().isoformat()
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "date": today,
    }


def line(row: Row) -> str:
    """Return a row as a line of text."""
    numbers = {"us", "times", "cost", "host", "collectives", "clipped"}
    about = [str(value) for name, value in row.items() if name not in numbers]
    about += {None: [], True: ["clipped"], False: ["not clipped"]}[row.get("clipped")]
    parts = [f"{name} {us:,.1f} µs" for name, us in row["us"].items()]
    parts += [
        f"{name} {ratio:.2f} ({low:.2f}-{high:.2f})"
        for name, (low, ratio, high) in row["times"].items()
    ]
    parts += [
        f"{name} {cost:.2f} ({low:.2f}-{high:.2f}) of a constant limit's step"
        for name, (low, cost, high) in row.get("cost", {}).items()
    ]
    return f"{', '.join(about)}: {'; '.join(parts)}"


def main() -> None:
    """Run the requested measurements, print them, and save them for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=COMMANDS, help="what to measure")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only rows with each of these words"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="the number of rounds, 15 unless given"
    )
    parser.add_argument(
        "--out", type=Path, help="the file to write; docs/speed-COMMAND.json of all rows"
    )
    args = parser.parse_args()
    jobs = [
        job
        for job in COMMANDS[args.command].JOBS
        if all(text in ", ".join(job) for text in args.only)
    ]
    if not jobs:
        parser.error(f"nothing has the words {' '.join(args.only)}")
    out = args.out or (None if args.only else DOCS / f"speed-{args.command}.json")
    os.environ.update(ENVIRONMENT)
    prepare, found = many.use_one_core if args.command == "growth" else None, list[Row]()
    versions = {"python": platform.python_version()}
    with tqdm(total=len(jobs), dynamic_ncols=True) as bar:
        for _, some in groupby(jobs, itemgetter(0)):
            with ProcessPoolExecutor(1, get_context("spawn"), prepare) as process:
                for job in some:
                    bar.set_description(", ".join(job))
                    here, rows = process.submit(measured, args.command, *job, args.rounds).result()
                    versions, found = versions | here, found + rows
                    bar.write("\n".join(map(line, rows)))
                    if out:
                        # Save now, so that a later error does not lose the results.
                        save(out, machine() | {"versions": versions}, found)
                    bar.update()


if __name__ == "__main__":
    main()
