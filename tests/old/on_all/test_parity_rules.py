"""Rules beside the functions of other libraries that do the same, and gradients of examples as frameworks make them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import uniclip as uc

RNG = np.random.default_rng(0)
GRADS = {"kernel": RNG.normal(size=(5, 3)).astype("float32"), "bias": RNG.normal(size=3).astype("float32")}
PARAMS = {"kernel": RNG.normal(size=(5, 3)).astype("float32"), "bias": np.zeros(3, "float32")}
EXAMPLES = {"w": RNG.normal(size=(6, 4, 2)).astype("float32"), "b": RNG.normal(size=(6, 3)).astype("float32")}


def close(ours: Any, theirs: Any) -> None:
    """Compare two trees."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), ours, theirs)


def test_agc() -> None:
    """`optax.adaptive_grad_clip`: columns of matrices, whole vectors."""
    grads, params = jax.tree.map(jnp.asarray, (GRADS, PARAMS))
    transform = optax.adaptive_grad_clip(0.1, eps=1e-3)
    theirs, _ = transform.update(grads, transform.init(params), params)
    close(uc.clip(grads, uc.agc(0.1), params=params)[0], theirs)
    for axis in (0, 1, (0, 1)):
        transform = optax.adaptive_grad_clip(0.1, axis=axis)
        theirs, _ = transform.update(grads["kernel"], transform.init(params["kernel"]), params["kernel"])
        close(uc.clip(grads["kernel"], uc.agc(0.1, axis=axis), params=params["kernel"])[0], theirs)


@pytest.mark.parametrize("c", [0.5, 3.0])
def test_examples(c: float) -> None:
    """`optax.per_example_global_norm_clip`: the sum, and how many were clipped."""
    leaves, spec = jax.tree.flatten(jax.tree.map(jnp.asarray, EXAMPLES))
    theirs, clipped = optax.per_example_global_norm_clip(leaves, c)
    total, report = uc.clip_and_sum(jax.tree.unflatten(spec, leaves), uc.by_example_norm(c))
    close(jax.tree.leaves(total), theirs)
    assert (report.factors < 1).sum() == clipped


@pytest.mark.parametrize("by_size", [False, True])
def test_examples_layer_by_layer(by_size: bool) -> None:
    """`optax.per_example_layer_norm_clip`: the limit shared evenly, or by size."""
    leaves = jax.tree.leaves(jax.tree.map(jnp.asarray, EXAMPLES))
    theirs, _ = optax.per_example_layer_norm_clip(leaves, 1.5, uniform=not by_size)
    close(uc.clip_and_sum(leaves, uc.by_example_layer_norm(1.5, by_size=by_size))[0], theirs)


def test_gradients_of_examples() -> None:
    """What ``jax.vmap(jax.grad)`` and ``torch.func.vmap(torch.func.grad)`` return is clipped alike, compiled too."""
    x, y = RNG.normal(size=(7, 5)).astype("float32"), RNG.normal(size=7).astype("float32")
    rule = uc.by_example_norm(0.3)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return ((x @ params["kernel"]).sum() + params["bias"].sum() - y) ** 2

    each = jax.vmap(jax.grad(loss), (None, 0, 0))
    params = jax.tree.map(jnp.asarray, PARAMS)
    total, _ = jax.jit(lambda p, x, y: uc.clip_and_sum(each(p, x, y), rule))(params, x, y)
    theirs = {name: torch.from_numpy(array) for name, array in PARAMS.items()}
    examples = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(theirs, torch.from_numpy(x), torch.from_numpy(y))
    ours, _ = uc.clip_and_sum(examples, rule)
    close({name: array.numpy() for name, array in ours.items()}, total)
    by_hand = jax.tree.map(np.asarray, each(params, x, y))
    norms = np.sqrt((by_hand["kernel"] ** 2).sum((1, 2)) + (by_hand["bias"] ** 2).sum(1))
    close(total["bias"], (by_hand["bias"] * np.minimum(1, 0.3 / norms)[:, None]).sum(0))
