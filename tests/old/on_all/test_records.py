"""Integrations that record one training: PyTorch's optimizers, Keras, TensorFlow 1, and loops in JAX and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import uniclip as uc
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer as Keras
from uniclip.integrations.keras import LogClipping
from uniclip.integrations.tensorflow import ClippedOptimizer as TensorFlow1
from uniclip.integrations.torch import attach

tf1 = tf.compat.v1
STEPS, BATCH, RATE, LIMIT = 30, 4, 0.01, 3.0
WEIGHTS = np.linspace(-1, 1, 6).reshape(3, 2)
BIAS = np.zeros(2)
RULE = uc.by_global_norm(LIMIT)
_rng = np.random.default_rng(0)
X = _rng.normal(size=(STEPS, BATCH, 3))
Y = _rng.normal(size=(STEPS, BATCH, 2)) + X.sum(-1, keepdims=True)
Y[20] *= 50


def steps() -> Iterator[tuple[float, list[float]]]:
    """Train a linear model with SGD and one norm for all; yield the loss and the norms of both leaves of each step."""
    w, b = WEIGHTS.copy(), BIAS.copy()
    for x, y in zip(X, Y, strict=True):
        error = x @ w + b - y
        grads = [x.T @ error * 2 / error.size, error.sum(0) * 2 / error.size]
        norms = [float(np.sqrt((grad**2).sum())) for grad in grads]
        factor = min(1.0, LIMIT / float(np.hypot(*norms)))
        yield float((error**2).mean()), norms
        w, b = w - RATE * factor * grads[0], b - RATE * factor * grads[1]


def check(path: Path, *, losses: bool = True) -> None:
    """Assert that a file holds these steps, to 1e-6; what integrations without the loss write, too."""
    record = insight.read(path)
    found, norms = zip(*steps(), strict=True)
    joint = np.linalg.norm(norms, axis=1)
    assert 0 < (joint > LIMIT).sum() < STEPS
    assert record.steps.tolist() == list(range(1, STEPS + 1))
    np.testing.assert_allclose(record.norms, joint, rtol=1e-6)
    np.testing.assert_allclose(record.limits, LIMIT, rtol=1e-6)
    np.testing.assert_allclose(record.factors, np.minimum(1, LIMIT / joint), rtol=1e-6)
    np.testing.assert_array_equal(record.shares, joint > LIMIT)
    assert record.leaf_steps.tolist() == record.steps.tolist()
    np.testing.assert_allclose(_in_order(record.leaves, record.sizes), norms, rtol=1e-6)
    assert sorted(record.sizes.tolist()) == [2, 6]
    assert record.finite.all()
    np.testing.assert_allclose(record.losses, found if losses else np.nan, rtol=1e-6)


def _in_order(leaves: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the norms of the weights and of the bias, which a tree may have the other way round."""
    return leaves[:, np.argsort(-sizes)]


def in_numpy(record: insight.Recorder) -> None:
    """Record by hand."""
    w, b = WEIGHTS.copy(), BIAS.copy()
    for x, y in zip(X, Y, strict=True):
        error = x @ w + b - y
        grads = {"w": x.T @ error * 2 / error.size, "b": error.sum(0) * 2 / error.size}
        norms = insight.leaf_norms(grads)
        grads, report = uc.clip(grads, RULE)
        record(report, loss=(error**2).mean(), leaves=norms)
        w, b = w - RATE * grads["w"], b - RATE * grads["b"]


def in_jax(record: insight.Recorder) -> None:
    """Record what a compiled step returns."""

    @jax.jit
    def step(params: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return ((x @ params["w"] + params["b"] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        norms = insight.leaf_norms(grads)
        grads, report = uc.clip(grads, RULE)
        return {name: params[name] - RATE * grads[name] for name in params}, report, loss, norms

    with jax.enable_x64(True):
        params = jax.device_put({"w": WEIGHTS, "b": BIAS})
        data = jax.device_put(list(zip(X, Y, strict=True)))
        for x, y in data:
            params, report, loss, norms = step(params, x, y)
            record(report, loss=loss, leaves=norms)


def in_torch(record: insight.Recorder) -> None:
    """Record by the handle of an optimizer."""
    w, b = (torch.nn.Parameter(torch.tensor(value)) for value in (WEIGHTS, BIAS))
    optimizer = torch.optim.SGD([w, b], lr=RATE)
    attach(optimizer, RULE, record=record)
    for x, y in zip(map(torch.tensor, X), map(torch.tensor, Y), strict=True):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = ((x @ w + b - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def in_keras(record: insight.Recorder) -> None:
    """Record what ``fit`` compiles."""
    made = keras.Sequential([keras.Input((3,), dtype="float64"), keras.layers.Dense(2, dtype="float64")])
    made.set_weights([WEIGHTS, BIAS])
    made.compile(Keras(keras.optimizers.SGD(RATE), RULE, record=record), loss="mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    made.fit(data, shuffle=False, verbose=0, callbacks=[LogClipping()])


def eagerly(record: insight.Recorder) -> None:
    """Record by a TensorFlow 1 optimizer in eager code."""
    _in_tensorflow(record, lambda step: step)


def in_functions(record: insight.Recorder) -> None:
    """Record what ``tf.function`` compiles."""
    _in_tensorflow(record, tf.function)


def _in_tensorflow(record: insight.Recorder, compiled: Callable[[Any], Any]) -> None:
    w, b = tf.Variable(WEIGHTS), tf.Variable(BIAS)
    optimizer = TensorFlow1(tf1.train.GradientDescentOptimizer(RATE), RULE, record=record)

    def step(x: Any, y: Any) -> None:
        optimizer.minimize(lambda: tf.reduce_mean((x @ w + b - y) ** 2), var_list=[w, b])

    step = compiled(step)
    for x, y in zip(X, Y, strict=True):
        step(tf.constant(x), tf.constant(y))


def in_sessions(record: insight.Recorder) -> None:
    """Record what a session runs."""
    with tf.Graph().as_default(), tf1.Session() as session:
        w, b = (tf1.get_variable(name, initializer=value) for name, value in (("w", WEIGHTS), ("b", BIAS)))
        x, y = tf1.placeholder("float64", X.shape[1:]), tf1.placeholder("float64", Y.shape[1:])
        optimizer = TensorFlow1(tf1.train.GradientDescentOptimizer(RATE), RULE, record=record)
        train = optimizer.minimize(tf.reduce_mean((x @ w + b - y) ** 2))
        session.run(tf1.global_variables_initializer())
        for one, other in zip(X, Y, strict=True):
            session.run(train, {x: one, y: other})


WAYS = [in_numpy, in_jax, in_torch, in_keras, eagerly, in_functions, in_sessions]


# Between TensorFlow and NumPy: Keras gives a tensor to np.array.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("train", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("every", [7, 100])
def test_equal_records(train: Callable[[insight.Recorder], None], every: int, tmp_path: Path) -> None:
    """They are equal to 1e-6: steps, norms, limits, factors, shares, norms of leaves, and losses, where they know them.

    Keras' optimizers are not told the loss.
    """
    known: dict[str, Any] = {"rule": RULE, "params": {"w": WEIGHTS, "b": BIAS}} if train in {in_numpy, in_jax} else {}
    with insight.Recorder(tmp_path / "run.jsonl", every=every, leaves="all", **known) as record:
        train(record)
    check(record.path, losses=train is not in_keras)
