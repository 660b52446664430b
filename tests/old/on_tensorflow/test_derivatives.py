"""TensorFlow's derivatives of every function equal finite differences: reverse, forward and second, in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tensorflow as tf

import derivatives
from derivatives import EVERYWHERE, POINTS, SOME, Case

DIRECTION = [tf.constant(leaf) for leaf in derivatives.DIRECTION]


def at(case: Case, point: str) -> list[Any]:
    """Return the gradients at a point."""
    return [tf.constant(leaf) for leaf in case.at(point)]


def total(case: Case, x: list[Any]) -> Any:
    """Return the weighted sum of all entries of the results."""
    results = case.function(x)
    return sum(tf.reduce_sum(w * leaf) for leaf, w in zip(results, derivatives.weights(results), strict=True))


def reverse(case: Case, x: list[Any]) -> list[Any]:
    """Return the gradient of `total` by a tape."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = total(case, x)
    return tape.gradient(y, x)


def forward(case: Case, x: list[Any]) -> list[Any]:
    """Return the derivative of the results in one direction."""
    with tf.autodiff.ForwardAccumulator(x, DIRECTION) as accumulator:
        results = case.function(x)
    return [accumulator.jvp(leaf) for leaf in results]


def nested(case: Case, x: list[Any]) -> list[Any]:
    """Return the second derivative in one direction by two nested tapes."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        slope = sum(tf.reduce_sum(a * b) for a, b in zip(reverse(case, x), DIRECTION, strict=True))
    return tape.gradient(slope, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def mixed(case: Case, x: list[Any]) -> list[Any]:
    """Return the second derivative in one direction, forward over reverse."""
    with tf.autodiff.ForwardAccumulator(x, DIRECTION) as accumulator:
        slopes = reverse(case, x)
    return [accumulator.jvp(leaf, unconnected_gradients=tf.UnconnectedGradients.ZERO) for leaf in slopes]


@EVERYWHERE
def test_eager(case: Case, point: str) -> None:
    """Tapes and forward accumulators find the right first derivatives."""
    derivatives.same(reverse(case, at(case, point)), derivatives.gradient(case, point))
    derivatives.same(forward(case, at(case, point)), derivatives.along(case, point))


@EVERYWHERE
def test_second(case: Case, point: str) -> None:
    """Nested tapes, and a forward accumulator over a tape, find the right second derivatives."""
    derivatives.same_second(case, point, nested(case, at(case, point)))
    derivatives.same_second(case, point, mixed(case, at(case, point)))


@cache
def compiled(jit_compile: bool) -> Any:
    """Return derivatives of some functions, traced once for all points.

    Forward over reverse is not among them: TensorFlow cannot take it of a tf.cond in a tf.function.
    """

    def everything(points: list[Any]) -> list[Any]:
        ways = (reverse, forward) if jit_compile else (reverse, forward, nested)
        return [[way(case, x) for way in ways] for case, x in zip(SOME, points, strict=True)]

    return tf.function(everything, jit_compile=jit_compile, autograph=False)  # converting these helpers takes longest


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_compiled(jit_compile: bool, point: str) -> None:
    """In tf.function the gradient, the derivative in a direction and, without XLA, the second one are right too."""
    found = compiled(jit_compile)([at(case, point) for case in SOME])
    for case, (first, along, *second) in zip(SOME, found, strict=True):
        derivatives.same(first, derivatives.gradient(case, point))
        derivatives.same(along, derivatives.along(case, point))
        for one in second:
            derivatives.same_second(case, point, one)
