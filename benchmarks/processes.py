# SPDX-License-Identifier: MIT
"""Time what processes add to a step, count what they send, and compare both with a model of it.

Groups of 2, 4 and 8 processes (gloo, one thread each) hold stages of one tree. The model has two numbers that are
measured here, the time of a reduction and of what a process does by itself; from them follow larger runs. The
documentation shows what is kept in ``docs/processes.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from tqdm import tqdm

import uniclip as uc

RESULTS = Path(__file__).parent.parent / "docs" / "processes.json"
RULES: dict[str, Callable[[], uc.Rule]] = {
    "by_global_norm": lambda: uc.by_global_norm(1.0),
    "by_norm": lambda: uc.by_norm(0.5),
    "adagc": lambda: uc.adagc(warmup=2),
    "by_global_norm, ord=3": lambda: uc.by_global_norm(1.0, ord=3),
}
LEAVES = [10, 100, 1000]
PROCESSES = [2, 4, 8]
FAR = [1, 8, 64, 512, 4096, 10_000]
"""Numbers of processes that are computed."""
WIDE = [10**3, 10**4, 10**5]
"""Numbers of leaves that are computed; what a process does by itself is measured."""
ENTRIES = 16
LATENCY, BANDWIDTH = 20e-6, 10e9
"""Of the network that is assumed for larger runs: seconds for a message, bytes in a second."""


class Counted:
    """A reduction that counts its calls and their bytes."""

    def __init__(self, reduce: Callable[[Any, str], Any]) -> None:
        self.reduce, self.calls, self.bytes = reduce, 0, 0

    def __call__(self, array: Any, op: str) -> Any:
        """Reduce an array."""
        self.calls, self.bytes = self.calls + 1, self.bytes + array.numel() * array.element_size()
        return self.reduce(array, op)


def over_all(array: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce an array over the default group."""
    distributed.all_reduce(array, getattr(distributed.ReduceOp, op.upper()))
    return array


def stage(rank: int, processes: int, leaves: int) -> dict[str, torch.Tensor]:
    """Return the leaves of one of several stages."""
    return {f"layer {n}": torch.randn(ENTRIES) for n in range(rank, leaves, processes)}


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, with all processes beginning together."""
    times = []
    for _ in range(repeats):
        distributed.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def stepper(rule: uc.Rule, grads: Any, all_reduce: Any) -> Callable[[], Any]:
    """Return a step of a rule, in place, that goes on from its own state."""
    state = [rule.init(grads)]

    def step() -> None:
        _, state[0], _ = rule.update(grads, state[0], grads, all_reduce, in_place=True)

    return step


def measured(rank: int, processes: int, folder: str, repeats: int) -> None:
    """Measure in one process of a group; the first one writes what it found."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=processes)
    small = torch.zeros(8, dtype=torch.float64)
    rows: list[dict[str, Any]] = []
    for leaves in LEAVES:
        grads = stage(rank, processes, leaves)
        for name, make in RULES.items():
            reduce, own = Counted(over_all), stepper(make(), grads, None)
            step = stepper(make(), grads, reduce)
            step()
            reduce.calls = reduce.bytes = 0
            step()
            calls, sent = reduce.calls, reduce.bytes
            own()
            vector = torch.zeros(max(1, sent // (8 * calls)), dtype=torch.float64)
            times = {
                "joined": seconds(step, repeats),
                "alone": seconds(own, repeats),
                "reduction": seconds(lambda v=vector: over_all(v, "sum"), repeats),
            }
            rows.append(
                {"rule": name, "leaves": leaves, "processes": processes, "calls": calls, "bytes": sent, **times}
            )
    rows.append({"rule": "", "processes": processes, "reduction": seconds(lambda: over_all(small, "sum"), repeats)})
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    distributed.destroy_process_group()


def alone(array: torch.Tensor, op: str) -> torch.Tensor:  # noqa: ARG001 - the signature of a reduction
    """Reduce an array over this process."""
    return array


def by_itself(leaves: int) -> dict[str, float]:
    """Return the time of a step of one process among others that send nothing: what grows with its own leaves."""
    grads, found = stage(0, 1, leaves), {}
    for name, make in RULES.items():
        step = stepper(make(), grads, alone)
        step()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        found[name] = min(times)
    return found


def computed(calls: int, sent: int, processes: int) -> float:
    """Return the time of the reductions of a step: a tree of messages, and each byte sent and received once."""
    if processes == 1:
        return 0.0
    return calls * 2 * math.ceil(math.log2(processes)) * LATENCY + 2 * sent * (processes - 1) / processes / BANDWIDTH


def main() -> None:
    """Measure all groups, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for processes in tqdm(PROCESSES, desc="groups of processes"):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measured, (processes, folder, options.repeats), processes)
            rows += json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    own = {leaves: by_itself(leaves) for leaves in tqdm(WIDE, desc="leaves of one process")}
    counts = {row["rule"]: row for row in rows if row.get("leaves") == LEAVES[-1]}
    far = [
        {
            "rule": name,
            "leaves": leaves,
            "processes": processes,
            "own": own[leaves][name],
            "sent": 8 * _numbers(row, leaves),
            "reductions": computed(row["calls"], 8 * _numbers(row, leaves), processes),
        }
        for name, row in counts.items()
        for leaves in WIDE
        for processes in FAR
    ]
    result = {"measured": rows, "computed": far, "latency": LATENCY, "bandwidth": BANDWIDTH}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _numbers(row: dict[str, Any], leaves: int) -> int:
    """Return how many numbers a step sends: as many as were sent, a share of them for each norm."""
    sent: int = row["bytes"] // 8
    return sent * leaves // row["leaves"] if sent >= row["leaves"] else sent


if __name__ == "__main__":
    main()
