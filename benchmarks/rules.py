# SPDX-License-Identifier: MIT
"""Rules with one norm in a whole step of PyTorch's SGD, beside the constant limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from steps import MODELS
from timing import NATIVE, Call, Row, in_turn, quartiles, row

import uniclip as uc

JOBS = [("torch", what) for what in ("small MLP", "50 x 16 k")]
"""The jobs: a framework and a model."""
CONSTANT = "by_global_norm"
WARMUP = 120
"""The number of steps after which windows are full."""
# The weights hardly move, and a constant limit clips every step.
RATE = 1e-6
LIMIT = 1e-3
RULES = {
    CONSTANT: uc.by_global_norm(LIMIT),
    "nonfinite='skip'": uc.by_global_norm(LIMIT, nonfinite="skip"),
    "skip_above": uc.by_global_norm(LIMIT, skip_above=1e30),
    "zclip": uc.zclip(),
    "autoclip": uc.autoclip(),
    "skip_spikes": uc.skip_spikes(),
    "chain(skip_spikes, by_global_norm)": uc.chain(uc.skip_spikes(), uc.by_global_norm(LIMIT)),
}


def measure(framework: str, what: str, rounds: int) -> Iterator[Row]:
    """Yield the row of a model: the time of ``optimizer.step()`` with the clip, by rule; ``cost``
    has the quartiles of these times over that of the constant limit.
    """
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    make, shape = MODELS[what]
    batch = torch.randn(shape)
    models = {name: make() for name in (NATIVE, *RULES)}

    def make_gradients() -> None:
        for model in models.values():
            model.zero_grad()
            model(batch).square().sum().backward()

    calls = {name: step_of(model, RULES.get(name)) for name, model in models.items()}
    for _ in range(WARMUP):
        make_gradients()
        for call in calls.values():
            call()
    seconds = in_turn(calls, lambda _: make_gradients(), rounds)
    constant = np.asarray(seconds[CONSTANT])
    cost = {name: quartiles(np.asarray(seconds[name]) / constant) for name in RULES}
    yield {"clipped": True, **row(seconds), "cost": cost}


def step_of(model: Any, rule: Any) -> Call:
    """Return a step of a model's optimizer, with PyTorch's own clip if there is no rule."""
    import torch

    from uniclip.integrations.torch import attach

    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, RATE)
    if rule is not None:
        attach(optimizer, rule)

        # The method alone would not keep the optimizer.
        def step() -> None:
            optimizer.step()

        return step

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, LIMIT)
        optimizer.step()

    return clip_and_step
