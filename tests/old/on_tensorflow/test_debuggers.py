"""TensorFlow's own searches for NaN and ∞ find none that uniclip has made from healthy gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from healthy import PARAMS, RULES, STEPS, arrays_of, train

tf1 = tf.compat.v1


def float32(array: object) -> tf.Tensor:
    """Return a tensor."""
    return tf.constant(array, tf.float32)


@pytest.fixture
def _stopping() -> Iterator[None]:
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.mark.usefixtures("_stopping")
@pytest.mark.parametrize("name", RULES)
def test_eager(name: str) -> None:
    """Neither NaN nor ∞ is made, in a result, in a report or in a state."""
    train(RULES[name], arrays_of(float32, STEPS[1:4]), arrays_of(float32, PARAMS))


@pytest.mark.usefixtures("_stopping")
@pytest.mark.parametrize("name", RULES)
def test_graph(name: str) -> None:
    """Nor is it in a graph, where each operation is looked at, also one whose result nobody uses."""
    rule, params = RULES[name], arrays_of(float32, PARAMS)

    @tf.function(autograph=False)
    def step(grads: object, state: object, loss: object) -> object:
        _, state, report = rule.update(grads, state, params, loss=loss)
        return state, tuple(report), report.scalars()

    state = rule.init(params)
    for grads in STEPS[1:4]:
        state, *_ = step(arrays_of(float32, grads), state, float32(2.0))


@pytest.mark.usefixtures("_stopping")
def test_sums_of_examples() -> None:
    """Nor where gradients of single examples are added up."""
    grads = arrays_of(float32, STEPS[0])
    for rule in (uc.by_example_norm(1.0), uc.auto_s()):
        uc.clip_and_sum(grads, rule)
        tf.function(lambda g, rule=rule: uc.clip_and_sum(g, rule), autograph=False)(grads)


def test_check_numerics_ops() -> None:
    """The operation that looks at all tensors of a TensorFlow 1 graph finds none."""
    with tf.Graph().as_default(), tf1.Session() as session:
        grads, params = (arrays_of(float32, tree) for tree in (STEPS[0], PARAMS))
        results = [
            train(RULES[name], [grads], params) for name in ("global", "rows", "agc", "zclip", "autoclip", "adagc")
        ]
        check = tf1.add_check_numerics_ops()
        session.run([check, [x for x in tf.nest.flatten(results) if tf.is_tensor(x)]])


@pytest.mark.usefixtures("_stopping")
@pytest.mark.parametrize("by", [1e30, 1e-30])
def test_squares_out_of_range(by: float) -> None:
    """Finite gradients whose squares are not pass, too."""
    grads, rule = [tf.fill([400, 400], by), tf.fill([3], by)], uc.by_norm(1e-3 * by)
    clip = tf.function(lambda g: uc.clip(g, rule)[0], autograph=False)
    for clipped in (uc.clip(grads, rule)[0], clip(grads)):
        assert float(clipped[0][0, 0]) == pytest.approx(1e-3 * by / 400, rel=1e-5)
        assert float(clipped[1][0]) == pytest.approx(1e-3 * by / 3**0.5, rel=1e-5)


@pytest.mark.usefixtures("_stopping")
@pytest.mark.parametrize("name", RULES)
def test_derivatives(name: str) -> None:
    """Nor do derivatives through a rule alarm."""
    grads, params = (arrays_of(float32, tree) for tree in (STEPS[2], PARAMS))
    known = [x for x in tf.nest.flatten(grads) if x is not None]
    with tf.GradientTape() as tape:
        tape.watch(known)
        clipped = train(RULES[name], [grads], params)[0][0]
        total = sum(tf.reduce_sum(x * x) for x in tf.nest.flatten(clipped) if tf.is_tensor(x) and x.dtype.is_floating)
    for slope in tape.gradient(total, known):
        assert slope is None or np.isfinite(slope.numpy()).all()
