# SPDX-License-Identifier: MIT
"""Count what processes send in a step, time it beside PyTorch's own function, and compute larger runs.

Groups of 2, 4 and 8 processes (gloo, one thread each) hold stages of one tree: what they send is counted. Two processes
hold distributed tensors: these are timed, each contender once in every round. The documentation shows what is kept in
``docs/processes.json``.
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
from uniclip.integrations.torch import clip_grad_norm_

RESULTS = Path(__file__).parent.parent / "docs" / "processes.json"
RULES: dict[str, uc.Rule] = {
    "by_global_norm": uc.by_global_norm(1.0),
    "by_norm": uc.by_norm(0.5),
    "adagc": uc.adagc(warmup=2),
    "by_global_norm, ord=3": uc.by_global_norm(1.0, ord=3),
    "by_global_norm, ord=inf": uc.by_global_norm(1.0, ord=math.inf),
}
DIVIDED: dict[str, uc.Rule] = RULES | {"autoclip": uc.autoclip(50, window=16), "agc": uc.agc(0.01)}
LEAVES, PROCESSES = [10, 100, 1000], [2, 4, 8]
ENTRIES, TENSORS = 16, 200
NATIVE, DROP_IN = "torch.nn.utils.clip_grad_norm_", "clip_grad_norm_ of uniclip"


class Counted:
    """A reduction that counts its calls and the numbers it sends."""

    def __init__(self) -> None:
        self.calls, self.numbers = 0, 0

    def __call__(self, array: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce an array over the default group."""
        self.calls, self.numbers = self.calls + 1, self.numbers + array.numel()
        distributed.all_reduce(array, getattr(distributed.ReduceOp, op.upper()))
        return array


def begin(rank: int, processes: int, folder: str) -> None:
    """Enter a group of processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=processes)


def end(rank: int, folder: str, rows: Any) -> None:
    """Leave it; the first process writes what was found."""
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    distributed.destroy_process_group()


def sent(rank: int, processes: int, folder: str) -> None:
    """Count what one of several stages sends at its second step."""
    begin(rank, processes, folder)
    rows = []
    for leaves in LEAVES:
        grads = {f"layer {n}": torch.randn(ENTRIES) for n in range(rank, leaves, processes)}
        for name, rule in RULES.items():
            reduce = Counted()
            _, state, _ = rule.update(grads, rule.init(grads), grads, reduce)
            reduce.calls = reduce.numbers = 0
            rule.update(grads, state, grads, reduce)
            row = {"rule": name, "leaves": leaves, "processes": processes}
            rows.append({**row, "calls": reduce.calls, "numbers": reduce.numbers})
    end(rank, folder, rows)


def stepper(rule: uc.Rule, grads: Any, params: Any) -> Callable[[], Any]:
    """Return a step of a rule, in place, that goes on from its own state."""
    state = [rule.init(params)]

    def step() -> None:
        _, state[0], _ = rule.update(grads, state[0], params, in_place=True)

    return step


def divided(rank: int, processes: int, folder: str, rounds: int) -> None:
    """Time the step of distributed tensors, each contender once in a round, all processes beginning together."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - takes long, and needs a group
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    begin(rank, processes, folder)
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    shapes = [(64, 64), (64,)] * (TENSORS // 2)
    grads, values = ([distribute_tensor(torch.randn(s), mesh, [Shard(0)]) for s in shapes] for _ in range(2))
    first = [grad.to_local().clone() for grad in grads]
    params = list(map(torch.nn.Parameter, values))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    contenders: dict[str, Callable[[], Any]] = {
        NATIVE: lambda: torch.nn.utils.clip_grad_norm_(params, 1.0).full_tensor(),
        DROP_IN: lambda: clip_grad_norm_(params, 1.0),
    }
    contenders |= {name: stepper(rule, grads, values) for name, rule in DIVIDED.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            for grad, old in zip(grads, first, strict=True):
                grad.to_local().copy_(old)
            distributed.barrier()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    native = times[NATIVE][1:]
    rows = []
    for name, taken in times.items():
        ratios = sorted(a / b for a, b in zip(native, taken[1:], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({"contender": name, "seconds": statistics.median(taken[1:]), "ratio": [low, middle, high]})
    end(rank, folder, rows)


def found(run: Callable[..., None], processes: int, *more: Any) -> Any:
    """Run a function in several processes, and return what the first one found."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (processes, folder, *more), processes)
        return json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    counted = [row for processes in tqdm(PROCESSES, desc="groups") for row in found(sent, processes)]
    result = {"sent": counted, "divided": found(divided, 2, options.rounds), "tensors": TENSORS}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
