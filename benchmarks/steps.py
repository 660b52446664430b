# SPDX-License-Identifier: MIT
"""Clipping in PyTorch as in training: after a forward and a backward pass, where neither code nor data is cached."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import uniclip as uc
from trees import LAYERS

CALLS = 20
"""How often each contender runs in a round, after a backward pass of its own."""
Call = Callable[[], object]


def layers(sizes: list[int], bias: bool = True) -> Any:  # noqa: FBT001, FBT002
    """Return linear layers, with activations where they have biases."""
    from torch import nn

    linear = [nn.Linear(a, b, bias) for a, b in pairwise(sizes)]
    if not bias:
        for layer in linear:
            nn.init.orthogonal_(layer.weight)  # or the gradients of many layers vanish
        return nn.Sequential(*linear)
    return nn.Sequential(*[part for layer in linear for part in (layer, nn.ReLU())][:-1])


def lstm() -> Any:
    """Return an LSTM of one layer."""
    from torch import nn

    return nn.LSTM(32, 64)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "one leaf of 16": (partial(layers, [16, 1], bias=False), (8, 16)),
    "MLP, ten leaves": (partial(layers, LAYERS), (128, 32)),
    "LSTM, four leaves": (lstm, (16, 8, 32)),
    "50 leaves of 16 k": (partial(layers, [128] * 51, bias=False), (8, 128)),
    "4 leaves of 1 M": (partial(layers, [1000] * 5, bias=False), (8, 1000)),
}
"""Each model, and the shape of its input."""


def clips(params: list[Any], limit: float) -> dict[str, Call]:
    """Return what clips gradients alone: PyTorch's function, the drop-in, the hooks of `attach` around a step."""
    import torch

    from uniclip.integrations.torch import attach, clip_grad_norm_

    attached = torch.optim.SGD(params, lr=1e-12)
    attach(attached, uc.by_global_norm(limit))
    before, after = attached._optimizer_step_pre_hooks, attached._optimizer_step_post_hooks  # noqa: SLF001

    def run_hooks() -> None:
        for hook in before.values():
            hook(attached, (attached,), {})
        for hook in after.values():
            hook(attached, (attached,), {})

    native = partial(torch.nn.utils.clip_grad_norm_, params, limit)
    return {"native": native, "clip_grad_norm_": partial(clip_grad_norm_, params, limit), "attach": run_hooks}


def whole_steps(params: list[Any], limit: float) -> dict[str, Call]:
    """Return steps of SGD clipped in each of these ways, and one that is not clipped."""
    import torch

    from uniclip.integrations.torch import attach, clip_grad_norm_

    plain, attached = (torch.optim.SGD(params, lr=1e-12) for _ in range(2))
    attach(attached, uc.by_global_norm(limit))

    def step(clip: Any) -> None:
        clip(params, limit)
        plain.step()

    return {
        "native": partial(step, torch.nn.utils.clip_grad_norm_),
        "clip_grad_norm_": partial(step, clip_grad_norm_),
        "attach": attached.step,
        "not clipped": plain.step,
    }


def measure(what: str, threads: int, rounds: int) -> Iterator[tuple[str, bool, dict[str, np.ndarray]]]:
    """Yield what is measured, whether it is clipped, and the median seconds of each contender in each round."""
    import torch

    torch.set_num_threads(threads)
    make, shape = MODELS[what]
    torch.manual_seed(0)
    model, batch = make(), torch.randn(shape)
    params = list(model.parameters())

    def make_gradients() -> None:
        for param in params:
            param.grad = None
        out = model(batch)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()

    make_gradients()
    norm = float(uc.global_norm([param.grad for param in params]))
    for title, contenders in (("the clip", clips), ("a step of SGD", whole_steps)):
        for clipped in (False, True):
            calls = contenders(params, norm / 2 if clipped else 2 * norm)
            yield title, clipped, interleave(calls, make_gradients, rounds)


def interleave(calls: dict[str, Call], make_gradients: Call, rounds: int) -> dict[str, np.ndarray]:
    """Return the median seconds of each call in each round; each call follows a backward pass, in a random order."""
    order, shuffle = list(calls), random.Random(0).shuffle  # noqa: S311 - no secret
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(CALLS):
            shuffle(order)
            for name in order:
                make_gradients()
                start = time.perf_counter()
                calls[name]()
                spent[name].append(time.perf_counter() - start)
        for name, seconds in spent.items():
            medians[name].append(float(np.median(seconds)))
    return {name: np.asarray(seconds[1:]) for name, seconds in medians.items()}
