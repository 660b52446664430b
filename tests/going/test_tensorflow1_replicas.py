"""`ClippedOptimizer` for TensorFlow 1 in the replicas of ``tf.distribute``: what one does on the whole batch.

This file is also the script of the process that has two devices.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from uniclip.integrations.tensorflow import ClippedOptimizer

tf1 = tf.compat.v1
BATCH, STEPS = 8, 5
RULES = {
    "global": uc.by_global_norm(1.0),
    "learns": uc.chain(uc.autoclip(50, window=4), uc.adagc(warmup=2)),
    "skip_spikes": uc.skip_spikes(1.5, window=4, warmup=2),  # it sees the loss, too
}
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
IDS = np.arange(STEPS * BATCH) % 7
SPIKE = np.where(np.arange(len(Y))[:, None] // BATCH == 3, np.float32(50), np.float32(1)) * Y
SHAPES = {"kernel": (5, 4), "bias": (4,), "head": (4, 1), "table": (7, 1)}


class Trained(NamedTuple):
    """What there is after the steps, in each replica, and what a rule saw in each step."""

    values: dict[str, list[Any]]
    seen: list[dict[str, list[float]]]


def minimize(optimizer: Any, clipped: Any, variables: list[Any], count: Any, *batch: Any) -> tuple[Any, Any]:
    """Take a step on a part of a batch, whose loss is an addend of that of the batch."""
    x, ids, y = batch
    kernel, bias, head, table = variables

    def loss() -> Any:
        # The gradient of the sum waits for the other replicas, between this loss and the step.
        hidden = tf.tanh(x @ kernel + bias)
        if tf.distribute.has_strategy():
            hidden += 0 * tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, hidden)
        return tf.reduce_sum((hidden @ head + tf.gather(table, ids) - y) ** 2) / BATCH

    train = optimizer.minimize(loss if tf1.executing_eagerly_outside_functions() else loss(), count, variables)
    return train, clipped.scalars()


def made(make: Callable[[], Any], rule: str, outer: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return optimizers, variables and a count of the steps."""
    rng = np.random.default_rng(1)
    start = {name: rng.normal(size=shape).astype("float32") / 2 for name, shape in SHAPES.items()}
    clipped = ClippedOptimizer(make(), RULES[rule])
    once = tf.VariableAggregation.ONLY_FIRST_REPLICA
    variables = [tf1.get_variable(name, initializer=value, use_resource=True) for name, value in start.items()]
    count = tf1.get_variable("count", initializer=np.int64(0), use_resource=True, aggregation=once, trainable=False)
    return outer(clipped), clipped, variables, count


def named(clipped: Any, variables: list[Any], count: Any) -> dict[str, Any]:
    """Return the variables and their slots."""
    slots = {f"{v.name} {name}": clipped.get_slot(v, name) for v in variables for name in clipped.get_slot_names()}
    return {"count": count, **{v.name: v for v in variables}, **slots}


def parts(strategy: Any, batch: list[Any]) -> list[Any]:
    """Return a batch divided among the replicas."""
    if strategy is None:
        return batch
    many = strategy.num_replicas_in_sync
    return [
        strategy.experimental_distribute_values_from_function(
            lambda context, array=array: array[context.replica_id_in_sync_group :: many]
        )
        for array in batch
    ]


def called(strategy: Any, function: Callable[..., Any], batch: list[Any]) -> Any:
    """Call a function in all replicas."""
    return strategy.run(function, parts(strategy, batch)) if strategy else function(*batch)


def local(strategy: Any, value: Any) -> list[Any]:
    """Return what each replica has."""
    return list(strategy.experimental_local_results(value)) if strategy else [value]


def in_two(strategy: Any, y: Any, *settings: Any) -> Trained:
    """Train in ``tf.function``."""
    with strategy.scope() if strategy else nullcontext(), tf1.variable_scope("model", reuse=tf1.AUTO_REUSE):
        optimizer, clipped, variables, count = made(*settings)
    seen = []

    def step(*batch: Any) -> Any:
        return minimize(optimizer, clipped, variables, count, *batch)[1]

    def take(*batch: Any) -> Any:
        return called(strategy, step, list(batch))

    run = tf.function(take)
    for start in range(0, len(X), BATCH):
        scalars = run(*(tf.constant(array[start : start + BATCH]) for array in (X, IDS, y)))
        seen.append({name: [float(one) for one in local(strategy, value)] for name, value in scalars.items()})
    if RULES[settings[1]].memory:
        state = clipped.rule_state_dict()
        clipped.load_rule_state_dict(state)
        assert clipped.rule_state_dict() == state
    values = {
        name: [np.asarray(one) for one in local(strategy, variable)]
        for name, variable in named(clipped, variables, count).items()
    }
    return Trained(values, seen)


def compare(strategy: Any, train: Any, *settings: Any, y: Any = Y, left: int = 0, count: int = 2) -> None:
    """Compare replicas with one process: weights, slots, the rule's state, and what it saw in each step."""
    ours, theirs = (train(each, y, *settings) for each in (strategy(), None))
    assert len(ours.values) == len(theirs.values)
    for (name, values), (wanted,) in zip(ours.values.items(), theirs.values.values(), strict=True):
        assert len(values) == count, name
        assert all(np.array_equal(value, values[0]) for value in values), (name, values)
        tolerance = (1e-6 if name.split(":")[0].split("/")[-1] in SHAPES else 1e-5) * np.abs(wanted).max()
        assert np.abs(values[0] - wanted).max() <= tolerance, (name, values[0], wanted)
    for here, there in zip(ours.seen, theirs.seen, strict=True):
        assert here.keys() == there.keys()
        for name, values in here.items():
            np.testing.assert_array_equal(values, values[0], err_msg=name)
            np.testing.assert_allclose(values[0], there[name][0], rtol=2e-6, err_msg=name)
    assert int(ours.values["count"][0]) == STEPS - left


def scaled(clipped: Any) -> Any:
    """Return an optimizer around, that scales the loss."""
    return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(clipped, 64.0)


def alone(clipped: Any) -> Any:
    """Return the optimizer, with nothing around."""
    return clipped


def momentum() -> Any:
    """Return an optimizer that has slots."""
    return tf1.train.MomentumOptimizer(0.01, 0.9)


def refusals(strategy: Any) -> None:
    """Refuse what cannot be right, and say what to do."""
    with strategy().scope():
        w = tf.Variable([1.0])
        optimizer = ClippedOptimizer(momentum(), RULES["global"])
        with pytest.raises(RuntimeError, match=r"outside of the replicas, .* in the function that strategy"):
            optimizer.apply_gradients([(tf.constant([1.0]), w)])
    optimizer.loss = 1.0
    with pytest.raises(ValueError, match=r"optimizer.loss was set outside of strategy.run, .* in the function"):
        strategy().run(lambda: optimizer.apply_gradients([(tf.constant([1.0]), w)]))
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    message = r"is not for CentralStorageStrategy: take MirroredStrategy, .*uc\.clip"
    with central.scope(), pytest.raises(ValueError, match=message):
        optimizer.apply_gradients([(tf.constant([1.0]), w)])


@cache
def mirrored(*devices: str) -> Any:
    """Return a strategy."""
    return tf.distribute.MirroredStrategy(devices)


TWO = partial(mirrored, "CPU:0", "CPU:1")


def main() -> None:
    """Compare two devices with one."""
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    compare(TWO, in_two, momentum, "learns", alone)
    compare(TWO, in_two, momentum, "skip_spikes", scaled, y=SPIKE, left=1)
    refusals(TWO)


def test_as_on_one_device() -> None:
    """Variables, slots, the rule's state and what it saw are those of one device, and the same in all replicas."""
    run = subprocess.run([sys.executable, __file__], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


if __name__ == "__main__":
    main()
