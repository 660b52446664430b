"""`ClippedOptimizer` in the replicas of ``tf.distribute``: skipped steps, accumulation and records."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, LossScaleOptimizer

import uniclip as uc
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [
    pytest.mark.needs("keras on tensorflow"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    CPU = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)

BATCH, STEPS = 8, 6
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SPOILED = np.where(np.arange(len(Y))[:, None] == 2 * BATCH + 5, np.float32(math.nan), Y)  # in the second half alone
SKIPS = uc.chain(uc.by_global_norm(1.0, nonfinite="skip"), uc.autoclip(50, window=4))


def model(optimizer: Any, **options: Any) -> Any:
    """Return a small compiled model, always with the same weights."""
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    rng = np.random.default_rng(1)
    made.set_weights([rng.normal(size=weight.shape) / 2 for weight in made.get_weights()])
    made.compile(optimizer, loss="mse", **options)
    return made


@cache
def mirrored() -> Any:
    """Return a strategy of two replicas."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def fitted(make: Callable[[], Any], y: Any, *, alone: bool) -> tuple[Any, dict[str, float]]:
    """Train in replicas or alone, which is eager and takes a moment; return the model and its logs."""
    with nullcontext() if alone else mirrored().scope():
        made = model(make(), run_eagerly=alone)
    logs = made.fit(X, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[LogClipping()]).history
    return made, {name: value for name, (value,) in logs.items()}


def agree(ours: Any, theirs: Any) -> None:
    """Compare two models, and the copies that replicas have; those of addends are different."""
    pairs = zip(*[[*made.weights, *made.optimizer.variables] for made in (ours, theirs)], strict=True)
    for one, other in pairs:
        wanted, found = (np.asarray(keras.ops.convert_to_numpy(variable)) for variable in (other, one))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=one.path)
        if "accumulator" not in one.path:
            first, second = map(np.asarray, one.value.values)
            np.testing.assert_array_equal(first, second, err_msg=one.path)


CASES: dict[str, Callable[[], Any]] = {
    "skip": lambda: ClippedOptimizer(SGD(0.01, 0.9), SKIPS),
    "skip, accumulated, with a loss scale": lambda: LossScaleOptimizer(
        ClippedOptimizer(SGD(0.01, 0.9), SKIPS, gradient_accumulation_steps=2), 64.0
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fit(name: str) -> None:
    """Weights, optimizer, logs and the rule's state are those of one process, and the same in all replicas."""
    y = SPOILED if name == "skip" else Y
    (ours, logs), (theirs, wanted) = (fitted(CASES[name], y, alone=alone) for alone in (False, True))
    agree(ours, theirs)
    assert logs == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert logs["clip/skipped"] == pytest.approx((name == "skip") / STEPS)


def test_recorded(tmp_path: Path) -> None:
    """Each step is recorded once, as in one process."""
    found = []
    for alone in (False, True):
        path = tmp_path / f"{alone}.jsonl"
        with insight.Recorder(path, every=4, leaves="all") as record:
            fitted(lambda: ClippedOptimizer(SGD(0.01), uc.by_global_norm(1.0), record=record), Y, alone=alone)
        found.append(insight.read(path))
    assert found[0].steps.tolist() == list(range(1, STEPS + 1))
    for column in ("norms", "limits", "factors", "shares", "leaves"):
        np.testing.assert_allclose(getattr(found[0], column), getattr(found[1], column), rtol=1e-5, err_msg=column)


def test_outside_of_the_replicas() -> None:
    """A rule that skips needs the function that a strategy runs."""
    with mirrored().scope():
        made = model(ClippedOptimizer(SGD(0.01), SKIPS))
        made.optimizer.build(made.trainable_variables)
        grads = [tf.ones(variable.shape) for variable in made.trainable_variables]
        with pytest.raises(RuntimeError, match="replicas"):
            made.optimizer.apply(grads, made.trainable_variables)
