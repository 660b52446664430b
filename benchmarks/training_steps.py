# SPDX-License-Identifier: MIT
"""Ways to take a step of training on the leaves of a small network: with rules that learn, and in optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uniclip as uc
from contenders import GLOBAL, Contender, Leaves, Library

CLIPPER, ATTACH, KERAS = "uc.Clipper", "attach, SGD", "Keras, SGD"
PLAIN, AUTOCLIP, WRAPPED = "not clipped", "autoclip", "ClippedOptimizer"
LEARNING = [
    "adagc",
    "adagn",
    AUTOCLIP,
    "log_zscore",
    "norm_growth",
    "percentile_clipping",
    "skip_spikes",
    "spam",
    "zclip",
]
"""The rules of ``uniclip.presets.adaptive``."""
CONSTANT = uc.by_global_norm(1.0)
"""It clips none of these gradients."""


def clippers(library: Library, _: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield calls of clippers; what they learn is waited for, too."""

    def step(clipper: uc.Clipper, leaves: Leaves) -> Any:
        return clipper(leaves), clipper.state

    for name, rule in {GLOBAL: CONSTANT, **{name: getattr(uc, name)() for name in LEARNING}}.items():
        yield name, library.waiting(partial(step, uc.Clipper(rule)))


def attached(_: Library, leaves: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield steps of PyTorch's optimizers, each over parameters of its own."""
    import torch

    from uniclip.integrations.torch import attach

    for name, rule in {PLAIN: None, GLOBAL: CONSTANT, AUTOCLIP: uc.autoclip()}.items():
        params = [torch.nn.Parameter(g.clone()) for g in leaves]
        for param, grad in zip(params, leaves, strict=True):
            param.grad = grad
        optimizer = torch.optim.SGD(params, 1e-3)
        if rule is not None:
            attach(optimizer, rule)
        yield name, lambda _, step=optimizer.step: step()


def applied(library: Library, leaves: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield steps of Keras' optimizers, each over variables of its own."""
    import keras

    from uniclip.integrations.keras import ClippedOptimizer

    for name in (PLAIN, WRAPPED):
        optimizer, variables = keras.optimizers.SGD(1e-3), [keras.Variable(g) for g in leaves]
        apply = (ClippedOptimizer(optimizer, CONSTANT) if name == WRAPPED else optimizer).apply_gradients
        yield name, library.waiting(partial(_apply, apply, variables))


def _apply(apply: Callable[[Any], Any], variables: list[Any], grads: Leaves) -> None:
    apply(zip(grads, variables, strict=True))


def steps(kind: str, library: Library, leaves: Leaves) -> dict[str, Contender]:
    """Return the ways to take a step, by name."""
    return {name: Contender(call) for name, call in KINDS[kind](library, leaves)}


KINDS: dict[str, Callable[[Library, Leaves], Iterator[tuple[str, Any]]]] = {
    CLIPPER: clippers,
    ATTACH: attached,
    KERAS: applied,
}
BASES = {CLIPPER: GLOBAL, ATTACH: GLOBAL, KERAS: PLAIN}
"""What the other ways are compared with."""
WHERE = {CLIPPER: ["numpy", "torch", "tensorflow", "jax"], ATTACH: ["torch"], KERAS: ["tensorflow"]}
"""The frameworks that each kind is measured on."""
