"""What `ClippedOptimizer` records in compiled ``fit``: a line for each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD

import uniclip as uc
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [
    pytest.mark.needs("keras on tensorflow"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

X = np.random.default_rng(0).normal(size=(80, 5)).astype("float32")
Y = 10 * X.sum(axis=1, keepdims=True) * np.where(np.arange(80)[:, None] < 70, np.float32(1), np.float32(5))
RATE = 0.01


def model(optimizer: Any, **options: Any) -> Any:
    """Return a linear model, always with the same weights."""
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, name="head")])
    made.set_weights([np.linspace(-1, 1, 5).reshape(5, 1), np.zeros(1)])
    made.compile(optimizer, loss="mse", **options)
    return made


def fit(made: Any, epochs: int = 3, y: Any = Y, **options: Any) -> Any:
    """Take eight steps in each epoch, the same each time."""
    options = {"callbacks": [LogClipping()], **options}
    return made.fit(X, y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, **options)


def by_hand(limit: float, steps: int, micro: int = 1, rate: float = RATE) -> np.ndarray[Any, Any]:
    """Return the norms of the gradients of both leaves at each step, by NumPy alone."""
    w, b, norms = np.linspace(-1, 1, 5).reshape(5, 1), np.zeros(1), []
    for step in range(steps):
        mean = [np.zeros((5, 1)), np.zeros(1)]
        for number in range(step * micro, (step + 1) * micro):
            rows = slice(10 * (number % 8), 10 * (number % 8) + 10)
            error = 2 * (X[rows] @ w + b - Y[rows]) / 10 / micro
            mean = [mean[0] + X[rows].T @ error, mean[1] + error.sum(0)]
        norms.append([float(np.linalg.norm(one)) for one in mean])
        factor = min(1.0, limit / float(np.linalg.norm(norms[-1])))
        w, b = w - rate * factor * mean[0], b - rate * factor * mean[1]
    return np.asarray(norms)


def same(record: insight.Record, norms: np.ndarray[Any, Any], limit: float, first: int = 1) -> None:
    """Compare a record with what was found by hand."""
    joint = np.linalg.norm(norms, axis=1)
    assert record.steps.tolist() == list(range(first, first + len(norms)))
    np.testing.assert_allclose(record.norms, joint, rtol=2e-5)
    np.testing.assert_allclose(record.limits, limit)
    np.testing.assert_allclose(record.factors, np.minimum(1, limit / joint), rtol=2e-5)
    np.testing.assert_array_equal(record.shares, joint > limit)
    assert record.finite.all()


def test_fit(tmp_path: Path) -> None:
    """Each step is recorded once, with the norms of its leaves, whatever the window."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5, leaves="all") as record:
        made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record))
        fit(made)
    found, norms = insight.read(record.path), by_hand(20.0, 24)
    same(found, norms, 20.0)
    np.testing.assert_allclose(found.leaves, norms, rtol=2e-5)
    assert found.labels == [variable.path for variable in made.trainable_variables]
    assert found.sizes.tolist() == [5, 1]
    assert found.rule == repr(uc.by_global_norm(20.0))


def test_several_steps_in_an_execution(tmp_path: Path) -> None:
    """They are all recorded, or there is an error that says how."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        fit(model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), steps_per_execution=4))
    same(insight.read(record.path), by_hand(20.0, 24), 20.0)
    record = insight.Recorder(tmp_path / "other.jsonl", every=3)
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), steps_per_execution=4)
    with pytest.raises(ValueError, match="every=4"):
        fit(made)


def test_accumulation(tmp_path: Path) -> None:
    """What is recorded are steps, of several batches each."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        rule = uc.by_global_norm(20.0)
        fit(model(ClippedOptimizer(SGD(RATE), rule, gradient_accumulation_steps=2, record=record)))
    same(insight.read(record.path), by_hand(20.0, 12, micro=2), 20.0)


def test_skipped_steps(tmp_path: Path) -> None:
    """They are recorded and counted, though the optimizer does not count them."""
    y = np.where(np.arange(80)[:, None] == 35, np.float32(math.nan), Y)
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0, nonfinite="skip"), record=record))
        fit(made, y=y)
    found = insight.read(record.path)
    assert found.steps.tolist() == list(range(1, 25))
    assert np.flatnonzero(found.skipped).tolist() == [3, 11, 19]
    assert np.flatnonzero(~found.finite).tolist() == [3, 11, 19]
    assert int(made.optimizer.iterations) == 21


def test_is_written_where_it_is_saved(tmp_path: Path) -> None:
    """A checkpoint finds the steps before it in the file; one that is loaded drops those after it."""
    record = insight.Recorder(tmp_path / "run.jsonl", every=100)
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record))
    read: list[int] = []

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                made.save_weights(tmp_path / "half.weights.h5")
                read.append(len(insight.read(record.path).steps))

    fit(made, 1, callbacks=[LogClipping(), Save()])
    assert read == [3]
    made.load_weights(tmp_path / "half.weights.h5")
    made.fit(X[30:], Y[30:], batch_size=10, shuffle=False, verbose=0, callbacks=[LogClipping()])
    record.close()
    same(insight.read(record.path), by_hand(20.0, 8), 20.0)


def test_fit_without_the_callback(tmp_path: Path) -> None:
    """It is refused at the first step; and where a step is compiled already, it says what is missing, and is right."""
    record = insight.Recorder(tmp_path / "run.jsonl", every=5)
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record))
    with pytest.raises(ValueError, match=r"callbacks=\[LogClipping\(\)\]"):
        fit(made, callbacks=[])
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record))
    fit(made, 1)
    fit(made, 1, callbacks=[])
    with pytest.warns(UserWarning, match="3 steps of compiled code are missing"):
        record.close()
    found = insight.read(record.path)
    assert found.steps.tolist() == [*range(1, 9), *range(12, 17)]
    np.testing.assert_allclose(found.norms, np.linalg.norm(by_hand(20.0, 16), axis=1)[found.steps - 1], rtol=2e-5)
