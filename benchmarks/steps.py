# SPDX-License-Identifier: MIT
"""Clipping in training: after a backward pass in PyTorch, in a whole step in Keras and optax."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from timing import NATIVE, Call, Row, interleave

import uniclip as uc

LAYERS = [32, 64, 64, 64, 64, 10]
"""The small MLP."""
NETS = {"small MLP": LAYERS, "wide MLP": [784, 1024, 1024, 1024, 1024, 10]}
PLAIN = "not clipped"
# For whole steps: the weights hardly move, and every step is clipped.
BATCH, RATE, LIMIT = 128, 1e-6, 1e-3


def layers(sizes: list[int], bias: bool = True) -> Any:  # noqa: FBT001, FBT002
    """Return PyTorch linear layers, with activations where they have biases."""
    from torch import nn

    linear = [nn.Linear(a, b, bias) for a, b in pairwise(sizes)]
    if not bias:
        for layer in linear:
            # Otherwise the gradients of many layers vanish.
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(*linear)
    return nn.Sequential(*[part for layer in linear for part in (layer, nn.ReLU())][:-1])


def lstm() -> Any:
    """Return an LSTM of one layer."""
    from torch import nn

    return nn.LSTM(32, 64)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "16 elements": (partial(layers, [16, 1], bias=False), (8, 16)),
    "small MLP": (partial(layers, LAYERS), (128, 32)),
    "LSTM": (lstm, (16, 8, 32)),
    "50 x 16 k": (partial(layers, [128] * 51, bias=False), (8, 128)),
    "4 x 1 M": (partial(layers, [1000] * 5, bias=False), (8, 1000)),
}
"""Each PyTorch model, and the shape of its input."""
JOBS = [("torch", what) for what in MODELS] + [
    (framework, net) for framework in ("tensorflow", "jax") for net in NETS
]
"""The jobs: a framework and a model."""


def measure(framework: str, what: str, rounds: int) -> Iterator[Row]:
    """Yield the rows of a model: unclipped and clipped in PyTorch, else clipped."""
    if framework == "torch":
        yield from clip_after_backward(what, rounds)
        return
    rng, sizes = np.random.default_rng(0), NETS[what]
    data = rng.normal(size=(BATCH, sizes[0])).astype("f"), rng.integers(sizes[-1], size=BATCH)
    steps = {"tensorflow": keras_steps, "jax": optax_steps}[framework](sizes, *data)
    yield {"clipped": True, **interleave(dict(steps), lambda _: None, rounds)}


def clip_after_backward(what: str, rounds: int) -> Iterator[Row]:
    """Time PyTorch's function, the drop-in and `attach`, each after a backward pass."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    make, shape = MODELS[what]
    model, batch = make(), torch.randn(shape)
    params = list(model.parameters())

    def make_gradients() -> None:
        for param in params:
            param.grad = None
        out = model(batch)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()

    def norm() -> float:
        return float(uc.global_norm([param.grad for param in params]))

    make_gradients()
    before = norm()
    for clipped, limit in ((False, 2 * before), (True, before / 2)):
        calls = clips(params, limit, clipped=clipped)
        for name, call in calls.items():
            make_gradients()
            call()
            if not math.isclose(norm(), min(before, limit), rel_tol=1e-3):
                msg = f"{what}: after {name} the norm is {norm()}, and the limit {limit}"
                raise ValueError(msg)
        yield {"clipped": clipped, **interleave(calls, lambda _: make_gradients(), rounds)}


class NoStep:
    """An object with parameters, whose step does nothing.

    The step of one of PyTorch's optimizers would take time of its own.
    """

    def __init__(self, params: list[Any]) -> None:
        self.param_groups = [{"params": params}]

    def step(self) -> None:
        """Change nothing."""


def clips(params: list[Any], limit: float, *, clipped: bool) -> dict[str, Call]:
    """Return the functions that only clip gradients."""
    import torch

    from uniclip.integrations.torch import clip_grad_norm_

    cap = uc.by_global_norm(limit)
    rules: dict[str, Any] = {
        "attach": cap,
        "nonfinite='skip'": uc.by_global_norm(limit, nonfinite="skip"),
        "chain(zclip, by_global_norm)": uc.chain(uc.zclip(), cap),
    }
    # It clips spikes only, which these gradients have not.
    if not clipped:
        rules["zclip"] = uc.zclip()
    return {
        NATIVE: partial(torch.nn.utils.clip_grad_norm_, params, limit),
        "clip_grad_norm_": partial(clip_grad_norm_, params, limit),
        **{name: attached_step(params, rule) for name, rule in rules.items()},
    }


def attached_step(params: list[Any], rule: uc.Rule | uc.Chain) -> Call:
    """Return a step that clips, and does nothing else."""
    from uniclip.integrations.torch import attach

    attached = NoStep(params)
    # It cannot save the state of a rule.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(attached, rule)

    # The step alone would not keep the object.
    def step() -> None:
        attached.step()

    return step


def keras_steps(sizes: list[int], *data: np.ndarray) -> Iterator[tuple[str, Call]]:
    """Yield calls of ``train_on_batch`` with Adam, compiled by Keras' default."""
    import keras

    from uniclip.integrations.keras import ClippedOptimizer

    adam = partial(keras.optimizers.Adam, RATE)
    ours = ClippedOptimizer(adam(), uc.by_global_norm(LIMIT))
    for name, optimizer in {
        NATIVE: adam(global_clipnorm=LIMIT),
        "ClippedOptimizer": ours,
        PLAIN: adam(),
    }.items():
        dense = [keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        model = keras.Sequential([keras.Input(sizes[:1]), *dense, keras.layers.Dense(sizes[-1])])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        yield name, partial(model.train_on_batch, *data)


def optax_steps(sizes: list[int], *data: np.ndarray) -> Iterator[tuple[str, Call]]:
    """Yield steps with Adam under ``jax.jit``, the clipping in a chain of optax."""
    import jax
    import optax

    from uniclip.integrations.optax import to_optax

    (x, y), rng = map(jax.numpy.asarray, data), np.random.default_rng(0)
    start = [
        jax.numpy.asarray(1e-3 * rng.standard_normal(shape, "f"))
        for a, b in pairwise(sizes)
        for shape in ((a, b), (b,))
    ]

    def loss(params: list[Any]) -> Any:
        out = x
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            out = jax.nn.relu(out @ weight + bias)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    def step(transform: Any, params: list[Any], state: Any) -> tuple[list[Any], Any]:
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    native, ours = optax.clip_by_global_norm(LIMIT), to_optax(uc.by_global_norm(LIMIT))
    for name, clip in {NATIVE: native, "to_optax": ours, PLAIN: optax.identity()}.items():
        transform = optax.chain(clip, optax.adam(RATE))
        held, call = [(start, transform.init(start))], jax.jit(partial(step, transform))
        yield (
            name,
            lambda held=held, call=call: held.append(jax.block_until_ready(call(*held.pop()))),
        )
