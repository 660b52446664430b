"""Keras optimizers that clip beside uniclip and a plain one: the same steps, and where the two differ on purpose."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc

SHAPES = [(5, 3), (3,), (2, 2, 2)]
CLIPS: dict[str, Callable[[Any, float], Any]] = {
    "clipnorm": uc.clip_by_norm,
    "global_clipnorm": lambda grads, c: uc.clip_by_global_norm(grads, c)[0],
    "clipvalue": lambda grads, c: uc.clip_by_value(grads, -c, c),
}


def variables() -> list[keras.Variable]:
    """Return the same random weights every time."""
    rng = np.random.default_rng(0)
    return [keras.Variable(rng.standard_normal(shape), dtype="float32") for shape in SHAPES]


def step(grad: Any, clip: Callable[[Any], Any] = lambda grads: grads, **options: Any) -> np.ndarray:
    """Return zero weights after one step of plain descent, so minus the gradient that was applied."""
    weights = keras.Variable(np.zeros(grad.shape), dtype="float32")
    keras.optimizers.SGD(1.0, **options).apply(clip([grad]), [weights])
    return np.asarray(weights)


def test_backend() -> None:
    """These tests are about Keras on TensorFlow."""
    assert keras.backend.backend() == "tensorflow"


@pytest.mark.parametrize("limit", [0.5, 4.0, 1000.0])
@pytest.mark.parametrize("option", CLIPS)
def test_steps(option: str, limit: float) -> None:
    """Ten steps with momentum give the same weights after each, to a few units in the last place."""
    theirs, ours = variables(), variables()
    clipping = keras.optimizers.SGD(0.1, momentum=0.9, **{option: limit})
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    rng = np.random.default_rng(1)
    for _ in range(10):
        grads = [tf.constant(3 * rng.standard_normal(shape), tf.float32) for shape in SHAPES]
        clipping.apply(grads, theirs)
        plain.apply(CLIPS[option](grads, limit), ours)
        for a, b in zip(ours, theirs, strict=True):
            size = float(np.abs(np.asarray(b)).max())
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=4 * 2**-23 * size)


def test_below_the_limit() -> None:
    """Below some limits Keras's global norm rounds every gradient, since c·(1/c) != 1; uniclip changes no bit."""
    grad = tf.constant([1.0, 0.1, 3.0])
    assert (step(grad, global_clipnorm=47.0) != -grad.numpy()).all()
    np.testing.assert_array_equal(step(grad, lambda g: CLIPS["global_clipnorm"](g, 47.0)), -grad.numpy())


@pytest.mark.parametrize(("option", "native"), [("global_clipnorm", [math.nan, math.nan]), ("clipnorm", [0.0, 0.0])])
def test_squares_overflow(option: str, native: list[float]) -> None:
    """Where squares overflow Keras writes NaN into the weights or does not step; uniclip clips."""
    grad = tf.constant([1e30, 1.0])
    np.testing.assert_array_equal(step(grad, **{option: 1.0}), native)
    np.testing.assert_allclose(step(grad, lambda g: CLIPS[option](g, 1.0)), [-1.0, -1e-30], rtol=1e-6)


@pytest.mark.parametrize("option", CLIPS)
def test_limits_below_zero(option: str) -> None:
    """A negative limit silently switches clipping off in Keras; uniclip raises."""
    grad = tf.constant([3.0, 4.0])
    np.testing.assert_array_equal(step(grad, **{option: -1.0}), [-3.0, -4.0])
    with pytest.raises(ValueError, match=r"must be 0 or more|must not be above"):
        CLIPS[option]([grad], -1.0)


@pytest.mark.parametrize("option", CLIPS)
def test_zero_limit(option: str) -> None:
    """A zero limit silently switches clipping off in Keras; uniclip zeroes."""
    grad = tf.constant([3.0, 4.0])
    np.testing.assert_array_equal(step(grad, **{option: 0.0}), [-3.0, -4.0])
    np.testing.assert_array_equal(step(grad, lambda g: CLIPS[option](g, 0.0)), [0.0, 0.0])


@pytest.mark.parametrize(
    ("option", "native"), [("clipnorm", math.sqrt(2)), ("global_clipnorm", math.sqrt(2)), ("clipvalue", 2)]
)
def test_rows_that_occur_twice(option: str, native: float) -> None:
    """Keras clips rows that occur twice one by one, so the limit is exceeded; uniclip clips their sum."""
    grad = tf.IndexedSlices(tf.constant([[3.0], [3.0]]), tf.constant([0, 0]), tf.constant([4, 1]))
    np.testing.assert_allclose(step(grad, **{option: 1.0})[:, 0], [-native, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(step(grad, lambda g: CLIPS[option](g, 1.0))[:, 0], [-1, 0, 0, 0], rtol=1e-6)
