"""A rule inside the training loops of Flax and Equinox, and in their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import by_flax, by_orbax
from flax import linen, nnx
from flax.training.train_state import TrainState

import uniclip as uc
from uniclip.integrations.optax import scalars, to_optax

RULE = uc.chain(
    uc.masked(uc.autoclip(50, window=4), lambda path, _: path[-1] != "bias"), uc.by_global_norm(0.5, nonfinite="skip")
)
"""One that remembers, looks at paths and leaves steps out."""
X = jnp.float32(np.random.default_rng(0).normal(size=(8, 3)))
SIZES = [1.0, 5.0, 0.2, float("nan"), 3.0]


def optimizer() -> Any:
    """Return the optimizer of these tests."""
    return to_optax(RULE, optax.sgd(0.1, momentum=0.9))


def by_hand(params: Any, grad: Any) -> tuple[Any, list[Any]]:
    """Train by clipping and stepping; return weights and logs."""
    plain, clipper, logs = optax.sgd(0.1, momentum=0.9), uc.Clipper(RULE), []
    state = plain.init(params)
    for size in SIZES:
        clipped = clipper(grad(params, size * X))
        logs.append(clipper.report.scalars())
        if not clipper.report.skipped:
            updates, state = plain.update(clipped, state, params)
            params = optax.apply_updates(params, updates)
    return params, logs


def close(one: Any, other: Any) -> None:
    """Compare trees of one structure."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), one, other)


def train_state() -> tuple[TrainState, Any]:
    """Return Flax's train state for a small network, and its gradient."""
    model = linen.Sequential([linen.Dense(4), linen.tanh, linen.Dense(1)])
    params = model.init(jax.random.key(0), X)
    grad = jax.jit(jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer()), grad


@jax.jit
def apply(state: TrainState, grads: Any) -> TrainState:
    """Take a step."""
    return state.apply_gradients(grads=grads)


def test_train_state() -> None:
    """Flax linen: the steps are those by hand."""
    state, grad = train_state()
    params, logs = by_hand(state.params, grad)
    for size, seen in zip(SIZES, logs, strict=True):
        state = apply(state, grad(state.params, size * X))
        close(scalars(state), seen)
    close(state.params, params)
    assert scalars(state).keys() == {
        "clip/norm",
        "clip/limit",
        "clip/factor",
        "clip/share",
        "clip/skipped",
    }


@pytest.mark.parametrize("file", [by_flax, by_orbax])
def test_checkpoints(tmp_path: Path, file: Any) -> None:
    """Training goes on bit by bit as it would have; without the memory of the rule it does not."""
    state, grad = train_state()
    fresh = state
    for size in SIZES[:3]:
        state = apply(state, grad(state.params, size * X))
    again = file(state, fresh, tmp_path)
    forgetful = again.replace(opt_state=again.opt_state._replace(memory=fresh.opt_state.memory))
    for size in SIZES[3:]:
        state, again, forgetful = (apply(s, grad(s.params, size * X)) for s in (state, again, forgetful))
    jax.tree.map(np.testing.assert_array_equal, (again.params, again.opt_state), (state.params, state.opt_state))
    kernels = [s.params["params"]["layers_0"]["kernel"] for s in (forgetful, state)]
    assert not np.array_equal(*kernels)


def test_nnx() -> None:
    """Flax NNX: the steps are those by hand, by the same paths, and nothing is compiled again."""
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(4, 1, rngs=nnx.Rngs(1)))
    graph, start = nnx.split(model, nnx.Param)
    grad = jax.grad(lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2))
    pure = nnx.as_pure(start)
    params, logs = by_hand(pure, lambda params, x: nnx.as_pure(grad(params, x)))
    wrapped, traces = nnx.Optimizer(model, optimizer(), wrt=nnx.Param), []

    @nnx.jit
    def step(model: Any, wrapped: Any, x: Any) -> Any:
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        wrapped.update(model, grads, value=loss)
        return scalars(wrapped.opt_state)

    for size, seen in zip(SIZES, logs, strict=True):
        close(step(model, wrapped, size * X), seen)
    close(nnx.as_pure(nnx.state(model, nnx.Param)), params)
    assert all(type(value) is not nnx.OptArray for value in scalars(wrapped.opt_state).values())
    assert len(traces) == 1


def test_equinox() -> None:
    """Equinox: gradients are a module in which what is no parameter is None; frozen parameters too."""
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    frozen = eqx.tree_at(lambda tree: tree.layers[0].bias, jax.tree.map(eqx.is_inexact_array, model), replace=False)
    params, rest = eqx.partition(model, frozen)

    @eqx.filter_value_and_grad
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(eqx.combine(params, rest))(x) ** 2)

    wanted, logs = by_hand(params, lambda params, x: loss(params, x)[1])
    optim = optimizer()
    state = optim.init(params)

    @eqx.filter_jit
    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = loss(params, x)
        updates, state = optim.update(grads, state, params, value=value)
        return eqx.apply_updates(params, updates), state

    for size, seen in zip(SIZES, logs, strict=True):
        params, state = step(params, state, size * X)
        close(scalars(state), seen)
    close(params, wanted)
