# SPDX-License-Identifier: MIT
"""Time a whole step of PyTorch's fused AdamW on the shapes of ResNet-50, with and without clipping.

Every round times each way once, in random order; a way's overhead is measured against the plain step of its round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import uniclip as uc
from gradient_trees import RESNET, TREES
from uniclip.integrations.torch import attach

LIMITS = {"not clipped": 1e6, "clipped": 1.0}


def steps(optimizer: Any, limit: float) -> dict[str, Callable[[], Any]]:
    """Return each way to step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rule = uc.by_global_norm(limit)

    def native() -> None:
        torch.nn.utils.clip_grad_norm_(params, limit)
        optimizer.step()

    def by_hand() -> None:
        uc.clip_([p.grad for p in params], rule)
        optimizer.step()

    return {"plain step": optimizer.step, "clip_grad_norm_": native, "uc.clip_": by_hand, "attach": optimizer.step}


def start() -> tuple[list[Any], list[Any], Any]:
    """Return parameters, the gradients of each step, and an optimizer."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.05 * torch.randn(shape)) for shape in TREES[RESNET]]
    return params, [torch.randn_like(p) for p in params], torch.optim.AdamW(params, fused=True)


def step(params: list[Any], grads: list[Any], optimizer: Any, way: str, limit: float) -> float:
    """Take one step; return its time in seconds."""
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone() if p.grad is None else p.grad.copy_(grad)
    take = steps(optimizer, limit)[way]
    handle = attach(optimizer, uc.by_global_norm(limit)) if way == "attach" else None
    begin = time.perf_counter()
    take()
    seconds = time.perf_counter() - begin
    if handle:
        handle.remove()
    return seconds


def measured(rounds: int) -> list[dict[str, Any]]:
    """Return one row for each limit and way."""
    setting, rows = start(), []
    for name, limit in LIMITS.items():
        ways = list(steps(setting[2], limit))
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 2):
            for way in random.sample(ways, len(ways)):
                seconds = step(*setting, way, limit)
                if number >= 2:  # noqa: PLR2004 - the first two warm up
                    times[way].append(1e3 * seconds)
        for way in ways:
            over = [100 * (t / plain - 1) for t, plain in zip(times[way], times["plain step"], strict=True)]
            low, middle, high = statistics.quantiles(over, n=4)
            row = {"gradients": name, "way": way, "ms": statistics.median(times[way])}
            rows.append(row | {"overhead": middle, "quartiles": [low, high]})
    return rows


def difference(count: int = 5) -> float:
    """Return how far parameters are apart, in units of the largest one's last place, after steps of both kinds."""
    ends = []
    for way in ("uc.clip_", "attach"):
        params, grads, optimizer = start()
        for _ in range(count):
            step(params, grads, optimizer, way, LIMITS["clipped"])
        ends.append([p.detach() for p in params])
    most = [max(float(t.abs().max()) for t in tensors) for tensors in (ends[0], map(torch.sub, *ends))]
    return most[1] / (torch.finfo(torch.float32).eps * most[0])


def main() -> None:
    """Print a table; write it to a file, too, if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    asked = parser.parse_args()
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    results = about | {"rounds": asked.rounds, "rows": measured(asked.rounds), "difference": difference()}
    for row in results["rows"]:
        spread = "{:+.0f} to {:+.0f} %".format(*row["quartiles"])
        print(f"{row['gradients']:12} {row['way']:16} {row['ms']:7.1f} ms {row['overhead']:+6.0f} % ({spread})")
    print(f"after 5 steps, attach and uc.clip_ differ by {results['difference']:.1f} ulp of the largest parameter")
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
