"""Derivatives through steps of rules that remember: finite, and the same in every framework."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import uniclip as uc

RULES = {
    "zclip": uc.zclip(warmup=2),
    "threshold": uc.zclip(warmup=2, target="threshold"),
    "skip_spikes": uc.skip_spikes(window=4, warmup=2),
    "spam": uc.spam(warmup=1),
    "adagc": uc.adagc(warmup=2),
    "adagn": uc.adagn(),
    "log_zscore": uc.log_zscore(z=1.5),
    "autoclip": uc.autoclip(50, window=4),
}
STEPS = {
    "different": [[3.0, 4.0], [1.0, 2.0], [2.0, 2.0], [5.0, 1.0], [60.0, 80.0]],
    "equal": [[3.0, 4.0], [4.0, 3.0], [3.0, 4.0], [4.0, 3.0], [60.0, 80.0]],
    "zeros": [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]],
}


def trained(rule: Any, steps: Any, state: Any) -> Any:
    """Return the sum of what the steps leave of their gradients."""
    total = 0
    for number in range(5):
        clipped, state, _ = rule.update(steps[number], state)
        total = total + (clipped[0] + 2 * clipped[1])
    return total


def with_torch(rule: Any, steps: np.ndarray) -> np.ndarray:
    """Return PyTorch's derivative."""
    given = torch.tensor(steps, requires_grad=True)
    trained(rule, given, rule.init(torch.tensor(steps[0]))).backward()
    return given.grad.numpy()


def with_tensorflow(rule: Any, steps: np.ndarray, *, graph: bool = False) -> np.ndarray:
    """Return TensorFlow's derivative."""

    def slope(given: Any, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            total = trained(rule, tf.unstack(given), state)
        return tape.gradient(total, given)

    run = tf.function(slope, autograph=False) if graph else slope
    return run(tf.constant(steps), rule.init(tf.constant(steps[0]))).numpy()


def with_jax(rule: Any, steps: np.ndarray, *, jit: bool = False) -> np.ndarray:
    """Return JAX's derivative."""
    slope = jax.grad(lambda given, state: trained(rule, given, state))
    return np.asarray((jax.jit(slope) if jit else slope)(jnp.asarray(steps), rule.init(jnp.asarray(steps[0]))))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", RULES)
def test_the_same_everywhere(name: str, kind: str) -> None:
    """A memory is a record of numbers, which no derivative goes through."""
    rule, steps = RULES[name], np.asarray(STEPS[kind], np.float32)
    wanted = with_torch(rule, steps)
    assert np.isfinite(wanted).all()
    for found in (
        with_tensorflow(rule, steps),
        with_tensorflow(rule, steps, graph=True),
        with_jax(rule, steps),
        with_jax(rule, steps, jit=True),
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_in_a_loop_of_jax(name: str) -> None:
    """Nor does the derivative through ``scan`` get one."""
    rule, steps = RULES[name], np.asarray(STEPS["equal"], np.float32)

    def loop(given: Any) -> Any:
        def step(state: Any, grads: Any) -> Any:
            clipped, state, _ = rule.update(grads, state)
            return state, clipped[0] + 2 * clipped[1]

        return jax.lax.scan(step, rule.init(given[0]), given)[1].sum()

    np.testing.assert_allclose(jax.grad(loop)(jnp.asarray(steps)), with_torch(rule, steps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adagc", "adagn"])
def test_at_zero(name: str) -> None:
    """Where all gradients are 0, first and second derivatives are finite, compiled and vectorized too."""
    rule, weights = RULES[name], [1.0, 2.0, 3.0]
    zeros = np.zeros(3, np.float32)

    def total(grads: Any, state: Any, weights: Any) -> Any:
        return (weights * rule.update(grads, state)[0]).sum()

    state, w = rule.init(jnp.asarray(zeros)), jnp.asarray(weights)
    for slope in (jax.grad(total), jax.jit(jax.grad(total)), jax.jit(jax.hessian(total))):
        assert np.isfinite(slope(jnp.asarray(zeros), state, w)).all()
    state, w = rule.init(torch.tensor(zeros)), torch.tensor(weights)
    for slope in (torch.func.grad(total), torch.func.jacrev(total), torch.func.hessian(total)):
        assert slope(torch.tensor(zeros), state, w).isfinite().all()

    @tf.function(autograph=False)
    def second(grads: Any, state: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(grads)
            with tf.GradientTape() as inner:
                inner.watch(grads)
                value = tf.reduce_sum(tf.constant(weights) * rule.update(grads, state)[0])
            first = inner.gradient(value, grads)
        return first, outer.gradient(first, grads)

    for slope in second(tf.constant(zeros), rule.init(tf.constant(zeros))):
        assert slope is None or np.isfinite(slope.numpy()).all()
