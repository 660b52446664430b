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

pytestmark = pytest.mark.usefixtures("quickly_compiled")

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


def with_tensorflow(rule: Any) -> Any:
    """Return a function that finds TensorFlow's derivative."""

    def slope(given: Any, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            total = trained(rule, tf.unstack(given), state)
        return tape.gradient(total, given)

    return slope


def with_jax(rule: Any) -> Any:
    """Return a function that finds JAX's derivative."""
    return jax.grad(lambda given, state: trained(rule, given, state))


def with_scan(rule: Any) -> Any:
    """Return a function that finds JAX's derivative through a loop."""

    def total(given: Any, state: Any) -> Any:
        def step(state: Any, grads: Any) -> Any:
            clipped, state, _ = rule.update(grads, state)
            return state, clipped[0] + 2 * clipped[1]

        return jax.lax.scan(step, state, given)[1].sum()

    return jax.grad(total)


@pytest.mark.parametrize("name", RULES)
def test_the_same_everywhere(name: str) -> None:
    """A memory is a record of numbers, which no derivative goes through; each compiler compiles once for all steps."""
    rule = RULES[name]
    ways = [
        (with_tensorflow(rule), tf.constant),
        (tf.function(with_tensorflow(rule), autograph=False), tf.constant),
        (with_jax(rule), jnp.asarray),
        (jax.jit(with_scan(rule)), jnp.asarray),
    ]
    for kind, values in STEPS.items():
        steps = np.asarray(values, np.float32)
        wanted = with_torch(rule, steps)
        assert np.isfinite(wanted).all(), kind
        for slope, array in ways:
            found = np.asarray(slope(array(steps), rule.init(array(steps[0]))))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=kind)


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
