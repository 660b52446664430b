# SPDX-License-Identifier: MIT
"""What recording costs: training steps of PyTorch without a recorder, with one, and with the norms of leaves.

    python benchmarks/recording.py [--rounds 40]

The three take turns, so that all see the same machine; what is printed are medians, and how far a quarter of the rounds
was below and above. The host's part is the time of the calls themselves, without a training step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import uniclip as uc
from uniclip import insight
from uniclip.integrations.torch import attach

MODELS: dict[str, tuple[list[int], int]] = {
    "MLP, 10 leaves of 64, batch 128": ([64] * 6, 128),
    "MLP, 10 leaves of 256, batch 256": ([256] * 6, 256),
    "1.6 M parameters, 100 leaves, batch 512": ([180] * 51, 512),
}
STEPS = 20


def trained(widths: list[int], batch: int, record: insight.Recorder | None) -> Callable[[], float]:
    """Return a function that takes some steps and returns the seconds of one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[layer for a, b in pairwise(widths) for layer in (torch.nn.Linear(a, b), torch.nn.Tanh())]
    )
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1e-3)
    handle = attach(optimizer, uc.by_global_norm(1.0), record=record)
    x, y = torch.randn(batch, widths[0]), torch.randn(batch, widths[-1])

    def steps() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            handle.loss = loss
            optimizer.step()
        return (time.perf_counter() - began) / STEPS

    return steps


def host(record: insight.Recorder, report: Any, count: int = 2000) -> float:
    """Return the seconds of a call of a recorder, writing included."""
    began = time.perf_counter()
    for _ in range(count):
        record(report, loss=0.5)
    return (time.perf_counter() - began) / count


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp())
    report = uc.clip([np.ones(10, np.float32)], uc.by_global_norm(1.0))[1]
    calls = [host(insight.Recorder(folder / f"{n}.jsonl"), report) for n in range(5)]
    print(f"a call, one norm, every=100: {1e6 * np.median(calls):.1f} µs")
    for name, (widths, batch) in MODELS.items():
        recorders = [None, insight.Recorder(folder / f"{batch}a"), insight.Recorder(folder / f"{batch}b", leaves=True)]
        runs = [trained(widths, batch, record) for record in recorders]
        seconds = np.asarray([[run() for run in runs] for _ in tqdm(range(rounds), desc=name, leave=False)])
        low, middle, high = np.percentile(100 * (seconds[:, 1:] / seconds[:, :1] - 1), [25, 50, 75], axis=0)
        alone = 1e3 * np.median(seconds[:, 0])
        more = [f"{m:+.2f} % ({a:+.2f} to {b:+.2f})" for a, m, b in zip(low, middle, high, strict=True)]
        print(f"{name}: {alone:.2f} ms a step; recorded {more[0]}; with leaves {more[1]}")


if __name__ == "__main__":
    main()
