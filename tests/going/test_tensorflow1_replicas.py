"""`ClippedOptimizer` for TensorFlow 1 in the replicas of ``tf.distribute``: what one does with the sum of gradients.

This file is also the script of the process that has two devices.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from uniclip.integrations.tensorflow import ClippedOptimizer

tf1 = tf.compat.v1
PARTS = np.float32([[[1, 2], [2, 2]], [[9, 0], [3, 0]], [[1, math.nan], [1, 1]], [[0, 1], [0, 2]]])
"""The gradients of four steps in two replicas; in one step that of one of them is NaN."""


def main() -> None:
    """Train on two devices, and by hand on one."""
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    rule = uc.autoclip(50, window=4, nonfinite="skip")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = tf.Variable([0.0, 0.0])
        optimizer = ClippedOptimizer(tf1.train.GradientDescentOptimizer(1.0), rule)
        with pytest.raises(RuntimeError, match="strategy"):
            optimizer.apply_gradients([(tf.constant([1.0, 1.0]), w)])

    @tf.function
    def step(parts: Any) -> None:
        def in_replica() -> None:
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.apply_gradients([(tf.gather(parts, here), w)])

        strategy.run(in_replica)

    clipper, wanted = uc.Clipper(rule), np.zeros(2)
    for parts in PARTS:
        step(tf.constant(parts))
        (clipped,) = clipper([parts.sum(0)])
        wanted = wanted if clipper.report.skipped else wanted - clipped
        for copy in strategy.experimental_local_results(w):
            np.testing.assert_allclose(copy.numpy(), wanted, rtol=1e-6)


def test_as_on_one_device() -> None:
    """All replicas take the step of one device with the sum of the gradients."""
    run = subprocess.run([sys.executable, __file__], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


if __name__ == "__main__":
    main()
