"""What `ClippedOptimizer` for TensorFlow 1 records: skipped steps, too."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import tensorflow as tf

import uniclip as uc
from uniclip import insight
from uniclip.integrations.tensorflow import ClippedOptimizer

tf1 = tf.compat.v1


def test_skipped_steps(tmp_path: Path) -> None:
    """They are recorded as all others, with the loss."""
    descent, rule = tf1.train.GradientDescentOptimizer(1.0), uc.by_global_norm(1.0, nonfinite="skip")
    record = insight.Recorder(tmp_path / "run.jsonl", every=2)
    with record, tf.Graph().as_default(), tf1.Session() as session:
        w, grad = tf1.get_variable("w", initializer=[0.0, 0.0], use_resource=True), tf1.placeholder("float32", [2])
        train = ClippedOptimizer(descent, rule, record=record).minimize(tf.reduce_sum(w * grad))
        session.run(tf1.global_variables_initializer())
        for one in ([3.0, 4.0], [0.3, 0.4], [math.nan, 1.0], [6.0, 8.0], [0.0, 1.0]):
            session.run(train, {grad: one})
    found = insight.read(record.path)
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found.norms, [5, 0.5, math.nan, 10, 1], rtol=1e-6)
    np.testing.assert_allclose(found.losses[:2], [0.0, -0.5], rtol=1e-6)  # after a step of length 1
    assert found.skipped.tolist() == [False, False, True, False, False]
