# SPDX-License-Identifier: MIT
"""Ways to take a step of training: rules that learn, optimizers alone, and whole steps with a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

import uniclip as uc
from contenders import GLOBAL, NATIVE, OURS, Contender, Leaves, Library
from gradient_trees import MLP, RESNET

CLIPPER, ATTACH, KERAS = "uc.Clipper", "attach, SGD", "Keras, SGD"
KERAS_STEPS = {
    (MLP, False): KERAS,
    (MLP, True): "Keras, SGD, clipped",
    (RESNET, False): "Keras, SGD, ResNet-50",
    (RESNET, True): "Keras, SGD, ResNet-50, clipped",
}
"""Steps of Keras' optimizer outside of compiled code, by the gradients and by whether they are clipped."""
FUSED = {False: "fused AdamW, not clipped", True: "fused AdamW, clipped"}
SMALL_NET, WIDE_NET = "training, small MLP", "training, wide MLP"
KERAS_SMALL_NET, KERAS_WIDE_NET = "Keras training, small MLP", "Keras training, wide MLP"
PLAIN, AUTOCLIP, WRAPPED, ATTACHED = "not clipped", "autoclip", "ClippedOptimizer", "attach"
CLIPNORM, CLIP_GRAD_NORM, CLIP_IN_PLACE = "global_clipnorm", "clip_grad_norm_", "uc.clip_"
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


def applied(clipped: bool, library: Library, leaves: Leaves) -> Iterator[tuple[str, Any]]:  # noqa: FBT001 - by partial
    """Yield steps of Keras' optimizers outside of compiled code, each over variables of its own."""
    import keras

    limit = 1e-3 if clipped else 1e6
    for name, optimizer in keras_optimizers(limit, keras.optimizers.SGD, 1e-3):
        variables = [keras.Variable(g) for g in leaves]
        yield name, library.waiting(partial(_apply, optimizer.apply_gradients, variables))


def _apply(apply: Callable[[Any], Any], variables: list[Any], grads: Leaves) -> None:
    apply(zip(grads, variables, strict=True))


def keras_optimizers(limit: float, make: Any, rate: float) -> Iterator[tuple[str, Any]]:
    """Yield an optimizer that does not clip, one that clips as Keras does, and one that clips as uniclip does."""
    from uniclip.integrations.keras import ClippedOptimizer

    yield PLAIN, make(rate)
    yield CLIPNORM, make(rate, global_clipnorm=limit)
    yield WRAPPED, ClippedOptimizer(make(rate), uc.by_global_norm(limit))


def fused(clipped: bool, _: Library, leaves: Leaves) -> Iterator[tuple[str, Any]]:  # noqa: FBT001 - by partial
    """Yield steps of PyTorch's fused AdamW; `attach` has the kernel multiply by the factor."""
    import torch

    from uniclip.integrations.torch import attach

    limit = 1e-3 if clipped else 1e6
    rule = uc.by_global_norm(limit)
    for attached in (False, True):
        params = [torch.nn.Parameter(g.clone()) for g in leaves]
        for param, grad in zip(params, leaves, strict=True):
            param.grad = grad
        step = torch.optim.AdamW(params, lr=1e-6, fused=True).step
        if attached:
            attach(step.__self__, rule)
            yield ATTACHED, lambda _, step=step.__self__.step: step()
        else:
            clip = partial(torch.nn.utils.clip_grad_norm_, params, limit)
            yield PLAIN, lambda _, step=step: step()
            yield CLIP_GRAD_NORM, lambda _, step=step, clip=clip: (clip(), step())
            yield CLIP_IN_PLACE, lambda grads, step=step: (uc.clip_(grads, rule), step())


SIZES = {SMALL_NET: [32, 64, 64, 64, 64, 10], WIDE_NET: [784, 1024, 1024, 1024, 1024, 10]}
"""The layers of the networks that are trained."""
BATCH, RATE, LIMIT = 128, 1e-6, 1e-3  # the weights hardly move, and every step is clipped


def data(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return inputs, classes, and the weights and biases of a perceptron with ReLUs."""
    rng = np.random.default_rng(0)
    weights = []
    for into, out in pairwise(sizes):
        weights += [rng.normal(0, math.sqrt(2 / into), (into, out)), np.zeros(out)]
    inputs = rng.normal(size=(BATCH, sizes[0]))
    return inputs.astype("f"), rng.integers(sizes[-1], size=BATCH), [w.astype("f") for w in weights]


def trained_torch(sizes: list[int], _: Library, __: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield eager steps with AdamW, clipped by PyTorch's function, by uniclip's drop-in and by `attach`."""
    import torch

    from uniclip.integrations.torch import attach, clip_grad_norm_

    inputs, classes, weights = data(sizes)
    x, y = torch.tensor(inputs), torch.tensor(classes)
    clips: dict[str, Any] = {PLAIN: None, NATIVE: torch.nn.utils.clip_grad_norm_, OURS: clip_grad_norm_, ATTACHED: None}

    def step(optimizer: Any, params: list[Any], clip: Any) -> None:
        out = x
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            out = (torch.relu(out) if out is not x else x) @ weight + bias
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(out, y).backward()
        if clip is not None:
            clip(params, LIMIT)
        optimizer.step()

    for name, clip in clips.items():
        params = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
        optimizer = torch.optim.AdamW(params, RATE)
        if name == ATTACHED:
            attach(optimizer, uc.by_global_norm(LIMIT))
        run = partial(step, optimizer, params, clip)
        yield name, lambda _, run=run: run()


def trained_tensorflow(sizes: list[int], library: Library, _: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield steps with Adam in a ``tf.function``."""
    import keras
    import tensorflow as tf

    inputs, classes, weights = data(sizes)
    x, y = tf.constant(inputs), tf.constant(classes)
    clips: dict[str, Any] = {PLAIN: None, NATIVE: tf.clip_by_global_norm, OURS: uc.clip_by_global_norm}

    def step(optimizer: Any, variables: list[Any], clip: Any) -> None:
        with tf.GradientTape() as tape:
            out = x
            for weight, bias in zip(variables[::2], variables[1::2], strict=True):
                out = (tf.nn.relu(out) if out is not x else x) @ weight + bias
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, out))
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads if clip is None else clip(grads, LIMIT)[0], variables, strict=True))

    for name, clip in clips.items():
        variables, optimizer = [tf.Variable(w) for w in weights], keras.optimizers.Adam(RATE)
        optimizer.build(variables)
        run = tf.function(partial(step, optimizer, variables, clip))
        yield name, library.waiting(lambda _, run=run: run())


def trained_keras(sizes: list[int], library: Library, _: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield calls of ``train_on_batch`` with Adam, compiled as Keras does by itself."""
    import keras

    x, y, _weights = data(sizes)
    for name, optimizer in keras_optimizers(LIMIT, keras.optimizers.Adam, RATE):
        layers = [keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        model = keras.Sequential([keras.Input(sizes[:1]), *layers, keras.layers.Dense(sizes[-1])])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        yield name, library.waiting(lambda _, model=model: model.train_on_batch(x, y))


def trained_jax(sizes: list[int], library: Library, _: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield steps with Adam under ``jax.jit``, the clipping in a chain of optax."""
    import jax
    import jax.numpy as jnp
    import optax

    from uniclip.integrations.optax import to_optax

    inputs, classes, weights = data(sizes)
    x, y, params = jnp.asarray(inputs), jnp.asarray(classes), [jnp.asarray(w) for w in weights]
    clips = {NATIVE: [optax.clip_by_global_norm(LIMIT)], OURS: [to_optax(uc.by_global_norm(LIMIT))]}

    def loss(params: list[Any]) -> Any:
        out = x
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            out = (jax.nn.relu(out) if out is not x else x) @ weight + bias
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    def step(transform: Any, held: list[Any]) -> tuple[Any, Any]:
        updates, state = transform.update(jax.grad(loss)(held[0]), held[1], held[0])
        return optax.apply_updates(held[0], updates), state

    for name in (PLAIN, NATIVE, OURS):
        transform = optax.chain(*clips.get(name, []), optax.adam(RATE))
        run, held = jax.jit(partial(step, transform)), [params, transform.init(params)]
        yield name, library.waiting(lambda _, run=run, held=held: _hold(held, run(held)))


def _hold(held: list[Any], new: tuple[Any, Any]) -> list[Any]:
    held[:] = new
    return held


def trained_numpy(sizes: list[int], library: Library, _: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield steps of gradient descent by hand."""
    x, y, weights = data(sizes)
    clips: dict[str, Any] = {
        PLAIN: None,
        NATIVE: lambda grads: library.native(GLOBAL, LIMIT)(grads, None),
        OURS: lambda grads: uc.clip_by_global_norm(grads, LIMIT)[0],
    }

    def step(params: list[Any], clip: Any) -> None:
        inputs = [x]
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            inputs.append((np.maximum(inputs[-1], 0) if len(inputs) > 1 else x) @ weight + bias)
        shifted = np.exp(inputs[-1] - inputs[-1].max(axis=1, keepdims=True))
        back = shifted / shifted.sum(axis=1, keepdims=True)
        back[np.arange(BATCH), y] -= 1
        back /= BATCH
        grads: Leaves = []
        for place in reversed(range(len(sizes) - 1)):
            into = np.maximum(inputs[place], 0) if place else x
            grads[:0] = [into.T @ back, back.sum(axis=0)]
            back = (back @ params[2 * place].T) * (inputs[place] > 0) if place else back
        for param, grad in zip(params, grads if clip is None else clip(grads), strict=True):
            param -= RATE * grad  # noqa: PLW2901 - in place

    for name, clip in clips.items():
        run = partial(step, [w.copy() for w in weights], clip)
        yield name, lambda _, run=run: run()


def trained(kind: str, library: Library, leaves: Leaves) -> Iterator[tuple[str, Any]]:
    """Yield whole steps of training a network, of the framework's usual kind."""
    makers = {"numpy": trained_numpy, "torch": trained_torch, "tensorflow": trained_tensorflow, "jax": trained_jax}
    return makers[library.name](SIZES[kind], library, leaves)


def steps(kind: str, library: Library, leaves: Leaves) -> dict[str, Contender]:
    """Return the ways to take a step, by name."""
    return {name: Contender(call) for name, call in KINDS[kind](library, leaves)}


KINDS: dict[str, Callable[[Library, Leaves], Iterator[tuple[str, Any]]]] = {
    CLIPPER: clippers,
    ATTACH: attached,
    **{kind: partial(applied, clipped) for (_, clipped), kind in KERAS_STEPS.items()},
    **{kind: partial(fused, clipped) for clipped, kind in FUSED.items()},
    **{kind: partial(trained, kind) for kind in SIZES},
    KERAS_SMALL_NET: partial(trained_keras, SIZES[SMALL_NET]),
    KERAS_WIDE_NET: partial(trained_keras, SIZES[WIDE_NET]),
}
BASES = dict.fromkeys(KINDS, PLAIN) | {CLIPPER: GLOBAL, ATTACH: GLOBAL}
"""What the other ways are compared with."""
GRADIENTS = dict.fromkeys(KINDS, MLP) | {kind: tree for (tree, _), kind in KERAS_STEPS.items()}
GRADIENTS |= dict.fromkeys(FUSED.values(), RESNET)
"""The shapes of the gradients that a step is given, where it does not compute them."""
TORCH, TENSORFLOW = ["torch"], ["tensorflow"]
WHERE = {
    **{kind: ["numpy", *TORCH, *TENSORFLOW, "jax"] for kind in (CLIPPER, *SIZES)},
    **dict.fromkeys((ATTACH, *FUSED.values()), TORCH),
    **dict.fromkeys((*KERAS_STEPS.values(), KERAS_SMALL_NET, KERAS_WIDE_NET), TENSORFLOW),
}
"""The frameworks that each kind is measured on."""
