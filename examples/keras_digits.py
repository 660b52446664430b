# SPDX-License-Identifier: MIT
"""A small Keras network that reads handwritten digits with clipped gradients, on each backend.

The optimizer is wrapped once, the rule adapts its limit to earlier norms, and ``LogClipping`` adds
its results to the logs of each epoch. Halfway the model is saved, loaded and trained further: the
rule continues from its state. Needs ``pip install "uniclip-gradients[demo]" keras`` and TensorFlow,
JAX or PyTorch.
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
# The first rule adapts, the second one caps its limit.
RULE = uc.chain(uc.autoclip(90, window=100), uc.by_global_norm(5.0))


def build(seed: int) -> Any:
    """Return a compiled model whose optimizer clips."""
    import keras

    from uniclip.integrations.keras import ClippedOptimizer

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = ClippedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), RULE)  # the one line
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model: Any, first: int, last: int) -> list[dict[str, float]]:
    """Train from one epoch to another, and return the logs of each."""
    from uniclip.integrations.keras import LogClipping

    images, labels = load_digits(return_X_y=True)
    options = {"batch_size": 32, "initial_epoch": first, "epochs": last, "verbose": 0}
    logs = model.fit(np.float32(images / 16), labels, callbacks=[LogClipping()], **options).history
    return [{name: logs[name][epoch] for name in COLUMNS} for epoch in range(last - first)]


def save_and_load(model: Any) -> Any:
    """Return the model after a round trip through a file, with optimizer and rule states."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.keras"
        model.save(path)
        return keras.saving.load_model(path)


def run(epochs: int, seed: int) -> str | None:
    """Train on the chosen backend, print a table, and return any fault."""
    import keras

    name, half = keras.backend.backend(), epochs // 2
    model = build(seed)
    rows = fit(model, 0, half)
    print(f"{name}\nepoch  {'  '.join(f'{column:>10}' for column in COLUMNS)}")
    rows += fit(save_and_load(model), half, epochs)
    for epoch, row in enumerate(rows):
        print(f"{epoch:5}  {'  '.join(f'{row[column]:10.3f}' for column in COLUMNS)}")
    first, last = rows[0]["loss"], rows[-1]["loss"]
    return (
        None
        if last < first / 2
        else f"FAILED: on {name} the loss went from {first:.3f} to {last:.3f}"
    )


def run_all(epochs: int, seed: int) -> str | None:
    """Run each backend in a process of its own, since Keras allows one in a process."""
    options = ["--epochs", str(epochs), "--seed", str(seed)]
    commands = [[sys.executable, __file__, "--backend", name, *options] for name in BACKENDS]
    failed = [command[3] for command in commands if subprocess.run(command, check=False).returncode]  # noqa: S603 - this very file
    return f"FAILED: {', '.join(failed)}" if failed else None


def main() -> str | None:
    """Train as the command line asks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--backend", default="all", choices=[*BACKENDS, "all"], help="what Keras runs on"
    )
    parser.add_argument(
        "--epochs", type=int, default=6, help="the model is saved and loaded after half of them"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and the order of the images"
    )
    arguments = parser.parse_args()
    if arguments.backend == "all":
        return run_all(arguments.epochs, arguments.seed)
    # Keras reads the variable when it is imported.
    os.environ["KERAS_BACKEND"] = arguments.backend
    return run(arguments.epochs, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
