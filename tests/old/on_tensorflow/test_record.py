"""What `ClippedOptimizer` for TensorFlow 1 records: skipped steps, a loss scale, several train ops, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from uniclip import insight
from uniclip.integrations.tensorflow import ClippedOptimizer

tf1 = tf.compat.v1
GRADS = [[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0], [6.0, 8.0], [0.0, 1.0]]


def optimizer(record: Any, rule: Any = None) -> ClippedOptimizer:
    """Return an optimizer that records."""
    return ClippedOptimizer(tf1.train.MomentumOptimizer(1.0, 0.9), rule or uc.by_global_norm(1.0), record=record)


@pytest.mark.parametrize("way", ["eager", "function", "session", "old control flow"])
def test_skipped_steps(way: str, tmp_path: Path) -> None:
    """They are recorded as all others, with the loss."""
    with insight.Recorder(tmp_path / "run.jsonl", every=2) as record:
        rule = uc.by_global_norm(1.0, nonfinite="skip")
        train_in(way, optimizer(record, rule))
    found = insight.read(record.path)
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found.norms, [5, 0.5, math.nan, 10, 1], rtol=1e-6)
    assert found.skipped.tolist() == [False, False, True, False, False]
    assert found.finite.tolist() == [True, True, False, True, True]
    assert found.losses[:2].tolist() == [0.0, pytest.approx(-0.5)]  # after a step of length 1
    assert found.rule == repr(rule)


def train_in(way: str, made: ClippedOptimizer) -> None:
    """Take a step for each gradient."""
    if way in {"eager", "function"}:
        w = tf.Variable([0.0, 0.0])

        def step(grad: Any) -> None:
            made.minimize(lambda: tf.reduce_sum(w * grad), var_list=[w])

        step = tf.function(step) if way == "function" else step
        for grad in GRADS:
            step(tf.constant(grad))
        return
    new = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if way == "session" else tf1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), tf1.Session() as session:
            w, grad = tf1.get_variable("w", initializer=[0.0, 0.0]), tf1.placeholder("float32", [2])
            train = made.minimize(tf.reduce_sum(w * grad))
            session.run(tf1.global_variables_initializer())
            for one in GRADS:
                session.run(train, {grad: one})
    finally:
        (tf1.enable_control_flow_v2 if new else tf1.disable_control_flow_v2)()


def test_nothing_is_added_to_a_graph_without_a_recorder(tmp_path: Path) -> None:
    """With one there is an operation for each train op, and no variable: checkpoints are the same."""
    kinds, variables = [], []
    for record in (None, insight.Recorder(tmp_path / "run.jsonl")):
        with tf.Graph().as_default() as graph:
            w = tf1.get_variable("w", initializer=[0.0, 0.0])
            optimizer(record).minimize(tf.reduce_sum(w * [3.0, 4.0]))
            kinds.append([op.type for op in graph.get_operations()])
            variables.append([variable.name for variable in tf1.global_variables()])
    assert [types.count("PyFunc") for types in kinds] == [0, 1]
    assert variables[0] == variables[1]


def test_a_dynamic_loss_scale(tmp_path: Path) -> None:
    """Norms are those of unscaled gradients, and a step that the scale skips is none."""
    with insight.Recorder(tmp_path / "run.jsonl") as record, tf.Graph().as_default(), tf1.Session() as session:
        w, grad = tf1.get_variable("w", initializer=[0.0, 0.0]), tf1.placeholder("float32", [2])
        scaled = tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer(record), "dynamic")
        train = scaled.minimize(tf.reduce_sum(w * grad))
        session.run(tf1.global_variables_initializer())
        for one in GRADS:
            session.run(train, {grad: one})
    np.testing.assert_allclose(insight.read(record.path).norms, [5, 0.5, 10, 1], rtol=1e-6)


def test_a_monitored_session(tmp_path: Path) -> None:
    """Nothing is lost when a session is closed, and a run that goes on from its checkpoint goes on in the file."""
    for end in (3, 5):
        with insight.Recorder(tmp_path / "run.jsonl", every=100) as record, tf.Graph().as_default():
            w, count = tf1.get_variable("w", initializer=[0.0, 0.0]), tf1.train.get_or_create_global_step()
            train = optimizer(record).minimize(tf.reduce_sum(w * [3.0, 4.0]), count)
            with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path)) as session:
                record.resume(int(session.run(count)))
                while session.run(count) < end:
                    session.run(train)
    found = insight.read(record.path)
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    assert found.norms.tolist() == [5.0] * 5


def test_leaves_without_a_gradient(tmp_path: Path) -> None:
    """They have no norm in the file; other variables than at first are refused, but where no leaves are recorded."""
    a, b = tf.Variable([0.0, 0.0], name="b"), tf.Variable([[0.0], [0.0], [0.0]], name="a")
    with insight.Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        made = optimizer(record)
        made.apply_gradients([(tf.constant([3.0, 4.0]), a), (None, b)])
        made.apply_gradients([(tf.constant([3.0, 4.0]), a), (tf.constant([[2.0], [2.0], [1.0]]), b)])
        with pytest.raises(ValueError, match="a ClippedOptimizer and a recorder of its own"):
            made.apply_gradients([(tf.constant([3.0, 4.0]), a)])
    found = insight.read(record.path)
    assert dict(zip(found.labels, found.sizes.tolist(), strict=True)) == {"a": 3, "b": 2}
    places = [found.labels.index(name) for name in ("b", "a")]
    np.testing.assert_allclose(found.leaves[:, places], [[5, math.nan], [5, 3]], rtol=1e-6)
    with insight.Recorder(tmp_path / "other.jsonl") as record:
        made = optimizer(record)
        made.apply_gradients([(tf.constant([3.0, 4.0]), a)])
        made.apply_gradients([(tf.constant([[2.0], [2.0], [1.0]]), b)])
    np.testing.assert_allclose(insight.read(record.path).norms, [5, 3], rtol=1e-6)


def test_rules_without_a_norm(tmp_path: Path) -> None:
    """They have lines all the same."""
    for way in ("eager", "session"):
        with insight.Recorder(tmp_path / way) as record:
            train_in(way, optimizer(record, uc.by_value(-1, 1)))
        found = insight.read(record.path)
        assert found.steps.tolist() == [1, 2, 3, 4, 5]
        assert np.isnan(found.norms).all()


def test_no_recorder() -> None:
    """What is none is refused."""
    with pytest.raises(TypeError, match="record must be a recorder"):
        optimizer("run.jsonl")
