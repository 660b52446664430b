"""`ClippedOptimizer` for TensorFlow 1 in the replicas of ``tf.distribute``: what one does on the whole batch.

This file is also the script of the process that has two devices: it compares, and writes what went wrong for the tests
to read.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from in_processes import failures_in, write_failures

import uniclip as uc
from uniclip import insight
from uniclip.integrations.tensorflow import ClippedOptimizer

tf1 = tf.compat.v1
BATCH, STEPS = 8, 5
RULES = {
    "global": uc.by_global_norm(1.0),
    "agc": uc.agc(0.1),
    "learns": uc.chain(uc.autoclip(50, window=4), uc.adagc(warmup=2)),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip_spikes": uc.skip_spikes(1.5, window=4, warmup=2),  # it sees the loss, too
}
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
IDS = np.arange(STEPS * BATCH) % 7
SPIKE = np.where(np.arange(len(Y))[:, None] // BATCH == 3, np.float32(50), np.float32(1)) * Y
SPOILED = np.where(np.arange(len(Y))[:, None] == 2 * BATCH + 5, np.float32(math.nan), Y)  # in one replica alone
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
    """Return all variables: those of the rule and, in compiled code, the slots are not listed there."""
    slots = {f"{v.name} {name}": clipped.get_slot(v, name) for v in variables for name in clipped.get_slot_names()}
    ((_, _, memory),) = clipped._memories.values() or [((), (), [])]  # the same in all threads
    return {"count": count, **{v.name: v for v in [*variables, *memory]}, **slots}


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


def in_two(strategy: Any, y: Any, *settings: Any, eager: bool = False) -> Trained:
    """Train in eager code, or in ``tf.function``."""
    with strategy.scope() if strategy else nullcontext(), tf1.variable_scope("model", reuse=tf1.AUTO_REUSE):
        optimizer, clipped, variables, count = made(*settings)
    seen = []

    def step(*batch: Any) -> Any:
        return minimize(optimizer, clipped, variables, count, *batch)[1]

    def take(*batch: Any) -> Any:
        return called(strategy, step, list(batch))

    run = take if eager else tf.function(take)
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


def in_a_session(strategy: Any, y: Any, *settings: Any) -> Trained:
    """Train in a session; the train op of the first replica is that of all of them."""
    with tf.Graph().as_default(), strategy.scope() if strategy else nullcontext(), tf1.Session() as session:
        optimizer, clipped, variables, count = made(*settings)
        batch = [tf1.placeholder(array.dtype, (BATCH, *array.shape[1:])) for array in (X, IDS, y)]
        step = partial(minimize, optimizer, clipped, variables, count)
        train, scalars = called(strategy, step, batch)
        first, *_ = local(strategy, train)
        fetched = {name: local(strategy, value) for name, value in scalars.items()}
        session.run(tf1.global_variables_initializer())
        seen = []
        for start in range(0, len(X), BATCH):
            feed = {place: array[start : start + BATCH] for place, array in zip(batch, (X, IDS, y), strict=True)}
            seen.append(session.run([first, fetched], feed)[1])
        found = named(clipped, variables, count)
        return Trained(session.run({name: local(strategy, variable) for name, variable in found.items()}), seen)


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


def adam() -> Any:
    """Return an optimizer that has variables of its own, too."""
    return tf1.train.AdamOptimizer(0.01)


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


def recorded(train: Callable[..., Trained]) -> None:
    """Assert that each step is recorded once, as on one device."""
    found = []
    for strategy in (TWO(), None):
        path = Path(tempfile.mkdtemp(), "run.jsonl")
        with insight.Recorder(path, every=2, leaves="all") as record, pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "ClippedOptimizer", partial(ClippedOptimizer, record=record))
            train(strategy, SPIKE, momentum, "skip_spikes", alone)
        found.append(insight.read(path))
    ours, wanted = found
    assert ours.steps.tolist() == list(range(1, STEPS + 1))
    assert ours.labels == [name for name in wanted.labels if name in ours.labels]
    assert ours.skipped.sum() == 1
    for column in ("steps", "norms", "limits", "thresholds", "factors", "shares", "skipped", "losses", "leaves"):
        np.testing.assert_allclose(getattr(ours, column), getattr(wanted, column), rtol=1e-5, err_msg=column)


TWO, ONE = partial(mirrored, "CPU:0", "CPU:1"), partial(mirrored, "CPU:1")
OF_ONE = partial(tf.distribute.OneDeviceStrategy, "CPU:1")
SPIKED, NAN = {"y": SPIKE, "left": 1}, {"y": SPOILED, "left": 1}
EAGER = partial(in_two, eager=True)
CHECKS: dict[str, Callable[[], None]] = {
    "function, learns": partial(compare, TWO, in_two, adam, "learns", alone),
    "function, agc": partial(compare, TWO, in_two, momentum, "agc", alone),
    "function, skip": partial(compare, TWO, in_two, adam, "skip", alone, **NAN),
    "function, skip_spikes": partial(compare, TWO, in_two, momentum, "skip_spikes", alone, **SPIKED),
    "function, loss scale": partial(compare, TWO, in_two, momentum, "skip", scaled, **NAN),
    "function, one replica": partial(compare, ONE, in_two, adam, "skip_spikes", alone, **SPIKED, count=1),
    "function, one device": partial(compare, OF_ONE, in_two, adam, "skip_spikes", alone, **SPIKED, count=1),
    "eager": partial(compare, TWO, EAGER, adam, "skip_spikes", alone, **SPIKED),
    "session, learns": partial(compare, TWO, in_a_session, momentum, "learns", alone),
    "session, skip_spikes": partial(compare, TWO, in_a_session, adam, "skip_spikes", alone, **SPIKED),
    "function, recorded": partial(recorded, in_two),
    "eager, recorded": partial(recorded, EAGER),
    "session, recorded": partial(recorded, in_a_session),
    "refusals": partial(refusals, TWO),
}


def main(path: str) -> None:
    """Compare two devices with one."""
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    write_failures(CHECKS, path)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what went wrong in the process with two devices."""
    return failures_in(tmp_path_factory, __file__, [[]])[0]


@pytest.mark.parametrize("title", CHECKS)
def test_as_on_one_device(failures: dict[str, str], title: str) -> None:
    """Variables, slots, the rule's state and what it saw are those of one device, and the same in all replicas."""
    assert title not in failures, failures[title]


if __name__ == "__main__":
    main(*sys.argv[1:])
