"""Shared parts of the tests of Keras: the small model, and its reference training by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD

import uniclip as uc
from kit.training import MOMENTUM, RATE, Batch, ByHand, batches, weights

IGNORED = [
    # Keras' variables do not support NumPy's copy argument yet.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    ),
    # Keras' trainer passes read-only NumPy arrays to PyTorch.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]
BACKEND = keras.backend.backend()
on_tensorflow = pytest.mark.needs("keras on tensorflow")
"""Tests that do not depend on the backend, or that are about TensorFlow."""

# Two devices, for replicas.
if BACKEND == "tensorflow":
    import tensorflow as tf

    CPU = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)

BATCHES = batches()
FINITE = [batch for batch in BATCHES if np.isfinite(batch.targets).all()]


@keras.saving.register_keras_serializable("test")
class Net(keras.Model):
    """The small model of all integrations."""

    sparse = False
    """True if TensorFlow keeps the gradient of the table sparse."""

    def __init__(self, name: str = "net", **options: Any) -> None:
        super().__init__(name=name, **options)
        for key, value in weights().items():
            setattr(self, key, self.add_weight(shape=value.shape, name=key))
            getattr(self, key).assign(value)
        self.built = True

    def call(self, ids: Any) -> Any:
        """Look up rows, and multiply."""
        table = self.table if self.sparse else 1.0 * self.table
        return keras.ops.take(table, keras.ops.cast(ids, "int32"), axis=0) @ self.w + self.b


def sgd() -> Any:
    """Return the optimizer of the training by hand."""
    return SGD(RATE, momentum=MOMENTUM)


def compiled(optimizer: Any, net: Any = None, **options: Any) -> Any:
    """Return the model, compiled."""
    made = Net() if net is None else net
    made.compile(optimizer, loss="mse", **options)
    return made


def fit(
    made: Any, of: list[Batch] = BATCHES, *callbacks: Any, epochs: int = 1
) -> dict[str, list[float]]:
    """Take one step for each batch, and return the logs."""
    x, y = (np.concatenate(arrays) for arrays in zip(*of, strict=True))
    options = {
        "batch_size": len(of[0].targets),
        "shuffle": False,
        "verbose": 0,
        "callbacks": list(callbacks),
    }
    logs: dict[str, list[float]] = made.fit(x, y, epochs=epochs, **options).history
    return logs


def by_hand(rule: Any, of: list[Batch] = BATCHES) -> tuple[ByHand, list[dict[str, float]]]:
    """Return the training by hand, and the logs of its steps."""
    hand, seen = ByHand(uc, rule), []
    for batch in of:
        hand.step(batch)
        seen.append(hand.scalars())
    return hand, seen


def values(variables: list[Any]) -> list[np.ndarray]:
    """Return copies of the values."""
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def same(ours: Any, theirs: Any, rtol: float = 0.0) -> None:
    """Require lists of arrays to be equal, or nearly so."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def as_by_hand(made: Any, hand: ByHand) -> None:
    """Require the weights and the optimizer's state to equal those of the training by hand."""
    same(
        values(made.weights), [hand.weights[variable.name] for variable in made.weights], rtol=2e-5
    )
    inner = [variable for variable in made.optimizer.variables if "momentum" in variable.path]
    same(
        values(inner),
        [-RATE * hand.optimizer.sums[name] for name in ("b", "table", "w")],
        rtol=2e-4,
    )


def in_replicas(made: Any, hand: ByHand) -> None:
    """Require both replicas to equal the training by hand."""
    as_by_hand(made, hand)
    for variable in [*made.weights, *made.optimizer.variables]:
        first, second = (np.asarray(copy) for copy in variable.value.values)
        np.testing.assert_array_equal(first, second, err_msg=variable.path)


@cache
def mirrored() -> Any:
    """Return two replicas; a second strategy in the same process would reuse their keys."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
