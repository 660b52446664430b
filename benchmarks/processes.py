# SPDX-License-Identifier: MIT
"""Clipping under FSDP2 on two processes, beside PyTorch's own function: the time of the host.

The model is so small that the overhead of the host dominates. The time is that of the processor in
the calling thread, so other programs hardly change it, and waiting for the other process does not
count.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from timing import NATIVE, Call, Row, in_turn, quartiles, row

import uniclip as uc

LAYERS = {"52 parameters": 4, "148 parameters": 12}
JOBS = [("torch", f"FSDP2, {what}") for what in LAYERS]
"""The jobs: a framework and a model."""
PROCESSES = 2
WIDTH = 32
WARMUP = 40
"""The number of steps after which windows are full, and nothing is made for the first time."""
WITHIN, CLIPPED = 1e6, 1e-3
"""A limit above each norm, and one below."""
RULES = {
    "attach": uc.by_global_norm(CLIPPED),
    "nonfinite='skip'": uc.by_global_norm(CLIPPED, nonfinite="skip"),
    "skip_above": uc.by_global_norm(CLIPPED, skip_above=1e30),
    "zclip": uc.zclip(),
    "chain(zclip, by_global_norm)": uc.chain(uc.zclip(), uc.by_global_norm(CLIPPED)),
    "skip_spikes": uc.skip_spikes(),
    "by_norm": uc.by_norm(1e-4),
    "adagc": uc.adagc(),
    "agc": uc.agc(0.01),
}


def measure(framework: str, what: str, rounds: int) -> Iterator[Row]:
    """Yield the rows of a model, not clipped and clipped: the host's time of a clip in µs, its
    quartiles over those of the native function (``host``), and the number of ``collectives``.
    """
    import torch.multiprocessing

    del framework
    layers = LAYERS[what.partition(", ")[2]]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work, (folder, layers, rounds), nprocs=PROCESSES, start_method="spawn"
        )
        yield from json.loads((Path(folder) / "rows").read_text("utf-8"))


def work(rank: int, folder: str, layers: int, rounds: int) -> None:
    """Measure as one of the processes; the first one writes the rows."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    model = make_model(layers)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(rank))

    def make_gradients() -> None:
        model.zero_grad()
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        distributed.barrier()

    rows = []
    for clipped in (False, True):
        calls = calls_of(list(model.parameters()), clipped=clipped)
        for _ in range(WARMUP):
            make_gradients()
            for call in calls.values():
                call()
        collectives = {name: count(call) for name, call in calls.items()}
        seconds = in_turn(calls, lambda _: make_gradients(), rounds, time.thread_time)
        native = np.asarray(seconds[NATIVE])
        host = {name: quartiles(np.asarray(found) / native) for name, found in seconds.items()}
        numbers = {"host": host, "collectives": collectives}
        rows.append({"clipped": clipped, **row(seconds), **numbers})
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps(rows), "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def calls_of(params: list[Any], *, clipped: bool) -> dict[str, Call]:
    """Return the calls to time by name."""
    import torch

    from uniclip.integrations.torch import attach, clip_grad_norm_

    class NoStep(torch.optim.Optimizer):
        """An optimizer that changes nothing, so that only its clip takes time."""

        def __init__(self) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Change nothing."""

    def attached(rule: Any) -> Call:
        optimizer = NoStep()
        attach(optimizer, rule)

        # The method alone would not keep the optimizer.
        def step() -> None:
            optimizer.step()

        return step

    limit = CLIPPED if clipped else WITHIN
    rules: dict[str, Any] = RULES if clipped else {"attach": uc.by_global_norm(limit)}
    return {
        NATIVE: lambda: torch.nn.utils.clip_grad_norm_(params, limit),
        "clip_grad_norm_": lambda: clip_grad_norm_(params, limit),
        **{name: attached(rule) for name, rule in rules.items()},
    }


def count(call: Call) -> int:
    """Return the number of collectives of a call."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        call()
    return int(counted.get_total_counts())


def make_model(layers: int) -> Any:
    """Return a small GPT-2, whose blocks have 12 parameters each, sharded over the processes."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = self.attention(self.ln_1(x)).chunk(3, -1)
            x = x + self.projection((q @ k.transpose(-1, -2)).softmax(-1) @ v)
            return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(64, WIDTH), nn.Embedding(16, WIDTH)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.ln = nn.LayerNorm(WIDTH)

        def forward(self, tokens: Any) -> Any:
            x = self.blocks(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
            return self.ln(x) @ self.tokens.weight.T

    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
