# SPDX-License-Identifier: MIT
"""Clipping inside TensorFlow 1 optimizers: wrap one once, and every ``apply_gradients`` clips first."""

from uniclip._errors import needs

with needs("TensorFlow", "tensorflow"):
    from uniclip.integrations.tensorflow.optimizer import ClippedOptimizer, clip_gradients_by_norm

__all__ = ["ClippedOptimizer", "clip_gradients_by_norm"]
