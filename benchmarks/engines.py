# SPDX-License-Identifier: MIT
"""Clipping inside of DeepSpeed on two processes, beside the clipping of its own: the host's time.

It needs DeepSpeed, which ``pip install --group engines`` installs, and the environment variable
``DS_ACCELERATOR=cpu``. The time is that of the processor in the calling thread, in a whole step.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from timing import NATIVE, Row, in_turn, quartiles, row

import uniclip as uc

STAGES = {"ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3}
JOBS = [("torch", stage) for stage in STAGES]
"""The jobs: a framework and a stage."""
PROCESSES = 2
LAYERS = 24
WIDTH = 64
LIMIT = 1e-3
"""A limit below each norm."""
RULES = {
    "attach": uc.by_global_norm(LIMIT),
    "nonfinite='skip'": uc.by_global_norm(LIMIT, nonfinite="skip"),
    "zclip": uc.zclip(),
}


def measure(framework: str, what: str, rounds: int) -> Iterator[Row]:
    """Yield the row of a stage: the host's time of a step in µs, and its quartiles over those of a
    step that DeepSpeed clips (``host``).
    """
    import torch.multiprocessing

    del framework
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work, (folder, STAGES[what], rounds), nprocs=PROCESSES, start_method="spawn"
        )
        yield json.loads((Path(folder) / "row").read_text("utf-8"))


def work(rank: int, folder: str, stage: int, rounds: int) -> None:
    """Measure as one of the processes; the first one writes the row."""
    import deepspeed
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # As a launcher does.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    deepspeed.init_distributed("gloo", dist_init_required=False)
    engines = {name: make_engine(stage, RULES.get(name)) for name in (NATIVE, *RULES)}
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))

    # An engine takes a step after each backward pass, so the passes are not shared.
    def make_gradients(name: str) -> None:
        engines[name].backward(engines[name](batch).square().sum())
        distributed.barrier()

    calls = {name: engine.step for name, engine in engines.items()}
    seconds = in_turn(calls, make_gradients, rounds, time.thread_time)
    native = np.asarray(seconds[NATIVE])
    host = {name: quartiles(np.asarray(found) / native) for name, found in seconds.items()}
    if rank == 0:
        found = {"clipped": True, **row(seconds), "host": host}
        (Path(folder) / "row").write_text(json.dumps(found), "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def make_engine(stage: int, rule: Any) -> Any:
    """Return an engine that a rule clips, or DeepSpeed itself if there is none."""
    import deepspeed
    import torch
    from torch import nn

    from uniclip.integrations.torch import attach

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": LIMIT if rule is None else 0.0,
    }
    # The weights hardly move.
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if rule is not None:
        attach(engine, rule)
    return engine
