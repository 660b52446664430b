# SPDX-License-Identifier: MIT
"""Clipping inside Keras' optimizers, on TensorFlow, JAX and PyTorch.

`ClippedOptimizer` wraps an optimizer, and `LogClipping` adds its scalars to Keras' logs.
"""

from uniclip._errors import needs

with needs("Keras 3", "keras"):
    from uniclip.integrations.keras.callback import LogClipping
    from uniclip.integrations.keras.optimizer import ClippedOptimizer

__all__ = ["ClippedOptimizer", "LogClipping"]
