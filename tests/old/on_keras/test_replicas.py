"""`ClippedOptimizer` in the replicas of ``tf.distribute``: what one process does on the whole batch.

This file is also the script of the processes that train: one with two devices, and two that are a worker each. They
compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from in_processes import failure, failures_in, write_failures
from keras.optimizers import SGD, Adam, LossScaleOptimizer

import uniclip as uc
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

PAGE = Path(__file__).parents[3] / "docs" / "use-it-with-keras.md"
BATCH, STEPS = 8, 6
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(1.0),
    "agc": uc.agc(0.1),
    "learns": uc.chain(uc.autoclip(50, window=4), uc.adagc(warmup=2)),
    "zclip": uc.zclip(warmup=2),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip_spikes": uc.skip_spikes(1.5, window=4, warmup=2),
}
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
IDS = np.arange(STEPS * BATCH)[:, None] % 7  # of an embedding, several times in a batch
SPIKE = np.where(np.arange(len(Y))[:, None] // BATCH == 3, np.float32(50), np.float32(1)) * Y
SPOILED = np.where(np.arange(len(Y))[:, None] == 2 * BATCH + 5, np.float32(math.nan), Y)  # in the second half alone


def scope(strategy: Any) -> Any:
    """Return the scope of a strategy, if there is one."""
    return strategy.scope() if strategy else nullcontext()


def model(make: Callable[[], Any], *, sparse: bool = False, **options: Any) -> Any:
    """Return a small compiled model, always with the same weights."""
    first = keras.layers.Embedding(7, 4) if sparse else keras.layers.Dense(4, "tanh")
    inputs = keras.Input((1,), dtype="int32") if sparse else keras.Input((5,))
    made = keras.Sequential([inputs, first, keras.layers.Flatten(), keras.layers.Dense(1)])
    rng = np.random.default_rng(1)
    made.set_weights([rng.normal(size=weight.shape) / 2 for weight in made.get_weights()])
    made.compile(make(), loss="mse", **options)
    return made


def clipped(rule: Any, inner: Callable[[], Any] = lambda: SGD(0.01, 0.9, weight_decay=0.01), **options: Any) -> Any:
    """Return what makes an optimizer that clips."""
    return lambda: ClippedOptimizer(inner(), RULES.get(rule, rule) if isinstance(rule, str) else rule, **options)


def copies(variable: Any) -> list[Any]:
    """Return what a variable holds in each of the replicas of this process."""
    values = getattr(variable.value, "values", [variable.value])
    return [np.asarray(one) for one in values] if isinstance(values, tuple) else [np.asarray(variable.value)]


def agree(ours: Any, theirs: Any, count: int = 2) -> None:
    """Compare two models, and the copies that replicas have of one; those of addends are different."""
    optimizers = [ours.optimizer, theirs.optimizer]
    pairs = zip(*[[*made.weights, *made.optimizer.variables] for made in (ours, theirs)], strict=True)
    for number, (one, other) in enumerate(pairs):
        wanted = copies(other)[0]
        tolerance = (1e-6 if number < len(ours.weights) else 1e-5) * np.abs(wanted).max()  # moments may nearly cancel
        close = np.abs(np.asarray(keras.ops.convert_to_numpy(one)) - wanted).max() <= tolerance
        assert close, (one.path, keras.ops.convert_to_numpy(one), wanted)
        if "accumulator" not in one.path:
            assert len(copies(one)) == count, one.path
            assert all(np.array_equal(copy, copies(one)[0]) for copy in copies(one)), (one.path, copies(one))
    inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
    one, other = ({name: float(value) for name, value in optimizer.scalars().items()} for optimizer in inner)
    assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


def fitted(strategy: Any, make: Any, y: Any, options: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """Train, and return the model and its logs; without a strategy eagerly, which takes a moment."""
    if strategy is None:
        options = {"sparse": options.get("sparse", False), "run_eagerly": True}
    with scope(strategy):
        made = model(make, **options)
    x = IDS if options.get("sparse") else X
    logs = made.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[LogClipping()]).history
    return made, {name: value for name, (value,) in logs.items()}


def fit(strategy: Any, make: Any, y: Any = Y, left: int = 0, count: int = 2, **options: Any) -> None:
    """Train in replicas and in one process, both by ``fit``."""
    (ours, logs), (theirs, wanted) = (fitted(one, make, y, options) for one in (strategy(), None))
    agree(ours, theirs, count)
    assert logs == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert logs.get("clip/skipped", 0.0) == pytest.approx(left / STEPS)


def saved_in_the_middle(strategy: Any) -> None:
    """Save between two micro-batches, load and go on: in replicas the file holds the sum of their addends."""
    made = []
    for one, file in (strategy(), "replicas.keras"), (None, "alone.keras"):
        part, _ = fitted(one, clipped("learns", gradient_accumulation_steps=4), Y, {})
        path = Path(sys.argv[-1]).parent / file
        part.save(path)
        with scope(one):
            made.append(keras.saving.load_model(path))
        made[-1].fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        assert int(keras.ops.convert_to_numpy(made[-1].optimizer.iterations)) == 2 * STEPS // 4
    agree(*made)
    state = [one.optimizer.rule_state_dict() for one in made]
    assert state[0]["state"].keys() == state[1]["state"].keys()
    for one in made:
        one.optimizer.load_rule_state_dict(state[1])
    agree(*made)


def loop(strategy: Any, make: Any, *, absent: bool = False, workers: int = 1) -> tuple[Any, Any]:
    """Train by one's own loop, compiled in replicas; return the model, and the scalars of each step in each of them."""
    import tensorflow as tf

    with scope(strategy):
        made = model(make)
        made.optimizer.build(made.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((made(x, training=True) - y) ** 2) / BATCH
        grads = tape.gradient(loss, made.trainable_variables)
        made.optimizer.apply([None, *grads[1:]] if absent else grads, made.trainable_variables)
        return made.optimizer.scalars()

    def run(x: Any, y: Any) -> Any:
        if strategy is None:
            return step(x, y)
        count, rank = strategy.num_replicas_in_sync, int(os.environ.get("RANK", "0"))

        def part(array: Any) -> Any:
            return strategy.experimental_distribute_values_from_function(
                lambda context: array[rank if workers > 1 else context.replica_id_in_sync_group :: count]
            )

        return strategy.run(step, (part(x), part(y)))

    run, seen = tf.function(run) if strategy or workers > 1 else run, []
    for start in range(0, len(X), BATCH):
        scalars = run(*(tf.constant(array[start : start + BATCH]) for array in (X, SPIKE)))
        local = strategy.experimental_local_results if strategy else lambda value: [value]
        seen.append({name: [float(one) for one in local(value)] for name, value in scalars.items()})
    return made, seen


def own_loop(strategy: Any, make: Any, **options: Any) -> None:
    """Train in replicas and in one process, both by one's own loop."""
    (ours, one), (theirs, other) = (loop(each, make, **options) for each in (strategy(), None))
    agree(ours, theirs)
    for here, there in zip(one, other, strict=True):
        for name, (value, *more) in here.items():
            assert more == [value], name
            assert value == pytest.approx(there[name][0], rel=1e-6), name


def recorded(strategy: Any, **options: Any) -> None:
    """Record each step once, as in one process."""
    found = []
    for one in (strategy(), None):
        path = Path(tempfile.mkdtemp(), "run.jsonl")
        with insight.Recorder(path, every=4, leaves="all") as record:
            fitted(one, clipped("skip_spikes", record=record), SPIKE, options)
        found.append(insight.read(path))
    ours, wanted = found
    assert ours.steps.tolist() == list(range(1, STEPS + 1))
    for column in ("norms", "limits", "thresholds", "factors", "shares", "skipped", "leaves"):
        np.testing.assert_allclose(getattr(ours, column), getattr(wanted, column), rtol=1e-5, err_msg=column)


def sums(strategy: Any) -> None:
    """In a step replicas are summed as often as in one of the optimizer alone; that one still sums, too."""
    import tensorflow as tf

    with strategy().scope():
        ours, theirs = model(clipped("global", lambda: SGD(1.0))), model(lambda: SGD(1.0))

    def reductions(made: Any, optimizer: Any) -> int:
        optimizer.build(made.trainable_variables)

        def step() -> None:  # one tensor for all of them would be no sum
            optimizer.apply([2 * variable.value for variable in made.trainable_variables], made.trainable_variables)

        graph = tf.function(lambda: strategy().run(step)).get_concrete_function().graph
        return sum("CollectiveReduce" in operation.type for operation in graph.get_operations())

    counts = [reductions(made, made.optimizer) for made in (ours, theirs)]
    assert counts[0] == counts[1] > 0, counts
    before = ours.get_weights()

    def alone() -> None:
        grads = [tf.ones(variable.shape) for variable in ours.trainable_variables]
        ours.optimizer.inner.apply(grads, ours.trainable_variables)

    strategy().run(alone)
    for old, new in zip(before, ours.get_weights(), strict=True):
        np.testing.assert_allclose(old - new, 2.0, rtol=1e-5)


def refusals(strategy: Any) -> None:
    """Refuse what cannot be right, and say what to do; without a strategy whole gradients are clipped, too."""
    import tensorflow as tf

    outside = SGD(0.1)
    with strategy().scope():
        made = model(clipped("skip"))
        grads = [tf.ones(variable.shape) for variable in made.trainable_variables]
        made.optimizer.build(made.trainable_variables)
        with pytest.raises(RuntimeError, match=r"outside of the replicas, .* in the function that strategy"):
            made.optimizer.apply(grads, made.trainable_variables)
        with pytest.raises(ValueError, match=r"inner was made under _Default.*: make both, and the model, inside of"):
            ClippedOptimizer(outside, RULES["global"]).build(made.trainable_variables)
    made.optimizer.apply(grads, made.trainable_variables)
    assert repr(made.optimizer).endswith("SGD of 4 variables, 1 step>")
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0").scope():
        made = model(clipped("global"))
        with pytest.raises(ValueError, match=r"is not for CentralStorageStrategy: take MirroredStrategy, .*uc\.clip"):
            made.optimizer.build(made.trainable_variables)


class Twice(SGD):
    """An optimizer that sums its gradients in a way of its own."""

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return grads_and_vars

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        for _ in range(2):
            super()._backend_update_step(grads, trainable_variables, learning_rate)


def other_sums(strategy: Any) -> None:
    """Refuse an optimizer inside that does not sum once: nobody knows what it does with sums."""
    import tensorflow as tf

    with strategy().scope():
        made = model(clipped("global", lambda: Twice(0.1)))
        made.optimizer.build(made.trainable_variables)
    grads = [tf.ones(variable.shape) for variable in made.trainable_variables]
    with pytest.raises(RuntimeError, match="asked 2 times for sums over the replicas, and not once"):
        strategy().run(lambda: made.optimizer.apply(grads, made.trainable_variables))


def page() -> None:
    """Run what the page shows, on two devices."""
    (shown,) = re.findall("```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"keras": keras, "uc": uc, "ClippedOptimizer": ClippedOptimizer, "x": X[:8, :3], "y": 99 * Y[:8]}
    names["strategy"] = TWO()  # a second strategy would use the same collectives
    exec(shown.replace("tf.distribute.MirroredStrategy()", "strategy"), names)  # noqa: S102
    assert float(names["optimizer"].scalars()["clip/share"]) == 1


@cache
def mirrored(*devices: str, collective: bool = True) -> Any:
    """Return a strategy; without collectives its steps can be in a loop, which they else cannot on CPUs."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(devices, None if collective else tf.distribute.ReductionToOneDevice())


def one_device() -> Any:
    """Return a strategy of one replica that is no thread."""
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy("CPU:1")


TWO, ONE = partial(mirrored, "CPU:0", "CPU:1"), partial(mirrored, "CPU:1")
GATHERED = partial(mirrored, "CPU:0", "CPU:1", collective=False)
ACCUMULATED = {"gradient_accumulation_steps": 2}
CHECKS: dict[str, Callable[[], None]] = {
    "fit": partial(fit, TWO, clipped("learns")),
    "NaN in one replica": partial(fit, TWO, clipped("skip"), SPOILED, 1),
    "a loss scale": partial(fit, TWO, lambda: LossScaleOptimizer(clipped("skip", **ACCUMULATED)(), 64.0)),
    "an embedding": partial(fit, TWO, clipped("agc"), sparse=True),
    "an embedding, accumulated": partial(fit, TWO, clipped("global", **ACCUMULATED), sparse=True),
    "steps in a loop": partial(fit, GATHERED, clipped("skip", Adam, **ACCUMULATED), steps_per_execution=3),
    "step by step": partial(fit, GATHERED, clipped("skip_spikes"), SPIKE, 1, run_eagerly=True),
    "one device": partial(fit, one_device, clipped("skip_spikes", **ACCUMULATED), count=1),
    "one replica": partial(fit, ONE, clipped("skip_spikes", **ACCUMULATED), count=1),
    "saved in the middle": partial(saved_in_the_middle, TWO),
    "a loop": partial(own_loop, TWO, clipped("skip_spikes")),
    "a loop, an absent gradient": partial(own_loop, TWO, clipped("zclip", lambda: SGD(0.01, 0.9)), absent=True),
    "recorded": partial(recorded, TWO),
    "recorded eagerly": partial(recorded, TWO, run_eagerly=True),
    "sums": partial(sums, TWO),
    "the page": page,
    "refusals": partial(refusals, TWO),
    "other sums": partial(other_sums, TWO),
}
WORKERS = {
    "global": clipped("global"),
    "skip_spikes": clipped("skip_spikes"),
    "accumulation": clipped("learns", **ACCUMULATED),
}


def check_devices(path: str) -> None:
    """Compare two devices with one."""
    import tensorflow as tf

    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    write_failures(CHECKS, path)


def check_worker(rank: str, ports: str, path: str) -> None:
    """Compare two workers with one."""
    os.environ["RANK"] = rank
    cluster = {"worker": [f"localhost:{port}" for port in ports.split(",")]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": int(rank)}})
    import tensorflow as tf

    strategy, failures = tf.distribute.MultiWorkerMirroredStrategy(), {}

    def check(make: Any) -> None:
        (ours, one), (theirs, other) = (loop(each, make, workers=2) for each in (strategy, None))
        agree(ours, theirs, count=1)
        for here, there in zip(one, other, strict=True):
            assert here == {name: pytest.approx(value, rel=1e-6) for name, value in there.items()}

    for title, make in WORKERS.items():
        failures |= failure(title, partial(check, make))

    def first_writes() -> None:
        file = Path(path).with_suffix(".jsonl")
        with insight.Recorder(file, every=STEPS) as record:
            loop(strategy, clipped("global", record=record), workers=2)
        assert file.exists() == (rank == "0")
        assert rank == "1" or insight.read(file).steps.tolist() == list(range(1, STEPS + 1))

    failures |= failure("recorded", first_writes)
    Path(path).write_text(json.dumps(failures))


def free_ports(count: int) -> str:
    """Return ports that nobody uses."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = ",".join(str(one.getsockname()[1]) for one in sockets)
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return what went wrong in the process with two devices, and in each worker."""
    ports = free_ports(2)
    calls = [["devices"], ["worker", "0", ports], ["worker", "1", ports]]
    return failures_in(tmp_path_factory, __file__, calls, {"KERAS_BACKEND": "tensorflow"})


@pytest.mark.parametrize("title", CHECKS)
def test_as_on_one_device(failures: list[dict[str, str]], title: str) -> None:
    """Weights, optimizer, logs and the rule's state are those of one process, and the same in all replicas."""
    assert title not in failures[0], failures[0][title]


@pytest.mark.parametrize("title", [*WORKERS, "recorded"])
def test_as_in_one_process(failures: list[dict[str, str]], title: str) -> None:
    """They are so in two processes that are workers."""
    for worker in failures[1:]:
        assert title not in worker, worker[title]


if __name__ == "__main__":
    {"devices": check_devices, "worker": check_worker}[sys.argv[1]](*sys.argv[2:])
