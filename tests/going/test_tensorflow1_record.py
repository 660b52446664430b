"""What `ClippedOptimizer` for TensorFlow 1 records: skipped steps, and those that a loss scale leaves out."""

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


@pytest.mark.parametrize("way", ["eager", "session"])
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
    if way == "eager":
        w = tf.Variable([0.0, 0.0])
        for grad in GRADS:
            made.minimize(lambda: tf.reduce_sum(w * grad), var_list=[w])
        return
    with tf.Graph().as_default(), tf1.Session() as session:
        w, grad = tf1.get_variable("w", initializer=[0.0, 0.0], use_resource=True), tf1.placeholder("float32", [2])
        train = made.minimize(tf.reduce_sum(w * grad))
        session.run(tf1.global_variables_initializer())
        for one in GRADS:
            session.run(train, {grad: one})


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


def test_no_recorder() -> None:
    """What is none is refused."""
    with pytest.raises(TypeError, match="record must be a recorder"):
        optimizer("run.jsonl")
