# SPDX-License-Identifier: MIT
"""A small Keras network reads scikit-learn's handwritten digits, its gradients clipped, on each of Keras' backends.

The optimizer is wrapped once, the rule learns its limit from earlier norms, and ``LogClipping`` adds to the logs of each
epoch what it did. Then the model is saved, loaded and trained on: the rule goes on where it was.
Needs ``pip install keras scikit-learn`` and TensorFlow, JAX or PyTorch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import uniclip as uc

BACKENDS = ("tensorflow", "jax", "torch")
COLUMNS = ("loss", "clip/norm", "clip/limit", "clip/share")
RULE = uc.chain(uc.autoclip(90, window=100), uc.by_global_norm(5.0))  # the first learns, the second caps its limit


def train(epochs: int, seed: int) -> list[dict[str, float]]:
    """Train, save, load, train on; return what each epoch logged."""
    import keras

    from uniclip.integrations.keras import ClippedOptimizer, LogClipping

    keras.utils.set_random_seed(seed)
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)], name="digits"
    )
    optimizer = ClippedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), RULE)  # <-- THE ONE LINE
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def fit(model: Any, first: int, last: int) -> list[dict[str, float]]:
        options = {"batch_size": 32, "verbose": 2 if os.environ.get("VERBOSE") else 0}
        logs = model.fit(
            images, labels, initial_epoch=first, epochs=last, callbacks=[LogClipping()], **options
        ).history
        return [{name: logs[name][i] for name in COLUMNS} for i in range(last - first)]

    rows = fit(model, 0, epochs // 2)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "digits.keras")
        loaded = keras.saving.load_model(Path(folder) / "digits.keras")  # weights, moments and the rule's state
    return rows + fit(loaded, epochs // 2, epochs)
