"""Keras' optimizers with a rule inside: what is special to Keras, besides the contract."""

from __future__ import annotations

import csv
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, Adam, AdamW, LossScaleOptimizer

import uniclip as uc
from adapters.contract import contract, variants
from adapters.on_keras import (
    BACKEND,
    BATCHES,
    FINITE,
    IGNORED,
    Net,
    as_by_hand,
    by_hand,
    compiled,
    fit,
    in_replicas,
    mirrored,
    on_tensorflow,
    same,
    sgd,
    values,
)
from kit.pages import run_story
from kit.training import MOMENTUM, RATE, Arrays, Batch, parts, weights
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping
from uniclip.saved import renamed

pytestmark = IGNORED
needs_multi = pytest.mark.needs(
    *([] if hasattr(keras.optimizers, "MultiOptimizer") else ["a newer Keras"])
)
BY_NORM = uc.by_norm(1.0)
if BACKEND == "tensorflow":
    import tensorflow as tf

WAYS = {
    "eager": {"run_eagerly": True},
    "XLA, four steps in one": {"jit_compile": True, "steps_per_execution": 4},
}


@on_tensorflow
@pytest.mark.parametrize("way", WAYS)
def test_fit(way: str, tmp_path: Path) -> None:
    """The weights are those of training by hand for any way of running.

    Logs contain the last step, means, and the largest norm of an epoch.
    """
    rule = uc.chain(uc.by_global_norm(0.9, nonfinite="skip"), uc.zclip(z=1.0, warmup=2))
    made = compiled(ClippedOptimizer(sgd(), rule), **WAYS[way])
    logs = fit(
        made, BATCHES, LogClipping(), keras.callbacks.CSVLogger(tmp_path / "log.csv"), epochs=2
    )
    hand, steps = by_hand(rule, BATCHES * 2)
    as_by_hand(made, hand)
    assert int(made.optimizer.iterations) == 14
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text(encoding="utf-8").splitlines()))
    for number, epoch in enumerate((steps[:8], steps[8:])):
        largest = max(step["clip/norm"] for step in epoch if math.isfinite(step["clip/norm"]))
        means = {
            name: np.mean([step[name] for step in epoch]) for name in ("clip/share", "clip/skipped")
        }
        wanted = epoch[-1] | means | {"clip/norm_max": largest}
        found = {name: logs[name][number] for name in logs if name.startswith("clip/")}
        assert found == pytest.approx(wanted, rel=2e-5)
        assert {name: float(rows[number][name]) for name in wanted} == pytest.approx(
            wanted, rel=2e-5
        )
        assert 0 < found["clip/share"] < 1
        assert found["clip/skipped"] == 1 / 8


INNER: dict[str, Callable[[], Any]] = {
    "schedule": lambda: SGD(
        keras.optimizers.schedules.CosineDecay(0.05, 10), momentum=0.9, nesterov=True
    ),
    "average": lambda: SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "average at the end": lambda: SGD(0.05, use_ema=True, ema_momentum=0.5),
    "weight decay": lambda: AdamW(0.01, weight_decay=0.5),
}


@on_tensorflow
@pytest.mark.parametrize("name", INNER)
def test_what_the_inner_optimizer_does(name: str) -> None:
    """Schedules, weight averages and weight decay equal those without the wrapper, bit for bit."""
    inner, plain = INNER[name](), INNER[name]()
    wrapped = ClippedOptimizer(inner, uc.by_global_norm(math.inf))
    for optimizer in (wrapped, plain):
        optimizer.exclude_from_weight_decay(var_names=["w"])
    ours, theirs = (compiled(optimizer, run_eagerly=True) for optimizer in (wrapped, plain))
    for made in (ours, theirs):
        fit(made, FINITE[:4])
    same(ours.get_weights(), theirs.get_weights())
    same(values(inner.variables), values(plain.variables))


@on_tensorflow
def test_attributes() -> None:
    """Learning rate, step count and variables are those of the inner optimizer, and can be set."""
    rule = uc.adagc(warmup=2)
    optimizer, other = (ClippedOptimizer(SGD(0.5, momentum=0.9), rule) for _ in range(2))
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner.learning_rate) == float(optimizer.learning_rate) == 0.25
    made, again = compiled(optimizer, run_eagerly=True), compiled(other, run_eagerly=True)
    fit(made, FINITE)
    assert int(optimizer.iterations) == int(optimizer.inner.iterations) == len(FINITE)
    again.set_weights(made.get_weights())
    other.build(again.trainable_variables)
    other.set_weights(values(optimizer.variables))
    assert float(other.learning_rate) == 0.25
    with pytest.raises(ValueError):  # noqa: PT011 - the message is Python's
        other.set_weights(values(optimizer.variables)[:-1])
    for one in (made, again):
        fit(one, FINITE)
    same(made.get_weights(), again.get_weights())
    same(values(other.variables), values(optimizer.variables))


@on_tensorflow
def test_saved(tmp_path: Path) -> None:
    """A saved model continues bit for bit.

    Weights alone restore no state into an optimizer that is not built.
    """
    rule = uc.chain(uc.autoclip(30, window=8), uc.adagc(warmup=2))
    whole, half, lost = (
        compiled(ClippedOptimizer(Adam(0.05), rule), run_eagerly=True) for _ in range(3)
    )
    for made in (whole, half):
        fit(made, FINITE[:3])
    half.save(tmp_path / "half.keras")
    half.save_weights(tmp_path / "half.weights.h5")
    rest = keras.saving.load_model(tmp_path / "half.keras")
    rest.run_eagerly = True
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        lost.load_weights(tmp_path / "half.weights.h5")
    for made in (whole, rest, lost):
        fit(made, FINITE[3:6])
    same(rest.get_weights(), whole.get_weights())
    same(values(rest.optimizer.variables), values(whole.optimizer.variables))
    assert rest.optimizer.rule == rule
    with pytest.raises(AssertionError):
        same(lost.get_weights(), whole.get_weights(), rtol=1e-3)


@on_tensorflow
def test_refused_memories() -> None:
    """The state of another rule or of other variables is refused without any change."""
    made = compiled(ClippedOptimizer(SGD(0.1), uc.adagc()), run_eagerly=True)
    with pytest.raises(ValueError, match=r"build\("):
        made.optimizer.load_rule_state_dict({})
    fit(made, FINITE[:2])
    saved, clipper = made.optimizer.rule_state_dict(), uc.Clipper(uc.zclip())
    clipper(weights())
    for other, reason in (
        (clipper.state_dict(), "a different rule"),
        (renamed(saved, {"['net/w']": "['net/other']"}), "net/other"),
    ):
        with pytest.raises(ValueError, match=reason):
            made.optimizer.load_rule_state_dict(other)
        assert made.optimizer.rule_state_dict() == saved


def test_the_order_of_variables() -> None:
    """A state belongs to the names of variables, also if the model does not sort them."""
    rule = uc.norm_growth(1.5)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kernel, bias = made.trainable_variables
    grads = OrderedDict(
        [(kernel.path, np.full((3, 2), 10.0, np.float32)), (bias.path, np.full(2, 1.0, np.float32))]
    )
    clipper = uc.Clipper(rule)
    clipper(grads)
    optimizer = ClippedOptimizer(SGD(1.0), rule)
    optimizer.build(made.trainable_variables)
    optimizer.load_rule_state_dict(clipper.state_dict())
    assert optimizer.rule_state_dict()["leaves"] == [[f"['{kernel.path}']", f"['{bias.path}']"]]
    (before, _), larger = (
        made.get_weights(),
        [10 * keras.ops.convert_to_tensor(grad) for grad in grads.values()],
    )
    optimizer.apply(larger, made.trainable_variables)
    assert np.linalg.norm(before - made.get_weights()[0]) == pytest.approx(1.5 * 600**0.5, rel=1e-5)
    assert optimizer.rule_state_dict()["state"]["averages"] == pytest.approx(
        [1.5 * 600**0.5, 1.5 * 2**0.5], rel=1e-5
    )


def test_a_state_of_each_entry_of_variables_that_are_not_sorted() -> None:
    """A state for each element has the shapes of the variables, in any order."""
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile(ClippedOptimizer(SGD(0.1), uc.spam(warmup=1)), loss="mse")
    made.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)
    shapes = [
        np.shape(value)
        for name, value in made.optimizer.rule_state_dict()["state"].items()
        if "averages" in name
    ]
    assert shapes == [(1, 3, 2), (1, 2)]


def muon_and_adam(*, clipnorm: float | None = None) -> Any:
    """Return Keras' combination of two optimizers, one of them for matrices."""
    inside = {
        "matrix": SGD(RATE, momentum=MOMENTUM),
        "rest": SGD(RATE, momentum=MOMENTUM, clipnorm=clipnorm),
    }
    return keras.optimizers.MultiOptimizer(
        lambda variable: inside["matrix" if len(variable.shape) == 2 else "rest"]
    )


@needs_multi
def test_several_optimizers_inside(tmp_path: Path) -> None:
    """One rule covers all variables, whichever optimizer steps each.

    Files and states work as with a single optimizer.
    """
    rule = uc.chain(uc.by_global_norm(0.5), uc.adagc(warmup=2))
    made, again = (compiled(ClippedOptimizer(muon_and_adam(), rule)) for _ in range(2))
    fit(made, FINITE, LogClipping())
    hand, _ = by_hand(rule, FINITE)
    same(
        values(made.weights), [hand.weights[variable.name] for variable in made.weights], rtol=2e-5
    )
    made.save_weights(tmp_path / "made.weights.h5")
    # The first step builds the optimizer.
    fit(again, FINITE[:1])
    again.load_weights(tmp_path / "made.weights.h5")
    assert again.optimizer.rule_state_dict() == made.optimizer.rule_state_dict()
    for one in (made, again):
        fit(one, FINITE[:3])
    same(made.get_weights(), again.get_weights(), rtol=1e-6)
    # There is no rate for all variables.
    assert math.isnan(made.optimizer.learning_rate)
    with pytest.raises(AttributeError, match="MultiOptimizer"):
        made.optimizer.learning_rate = 0.1


@needs_multi
def test_an_optimizer_inside_that_clips_by_itself() -> None:
    """An inner optimizer that clips is refused, at construction or once its type is known."""
    given = keras.optimizers.OptimizerMap(SGD(), {".*kernel": SGD(clipnorm=1.0)})
    with pytest.raises(ValueError, match=r"clipnorm=1\.0(.|\n)*uc\.by_norm\(1\.0\)"):
        ClippedOptimizer(keras.optimizers.MultiOptimizer(given), BY_NORM)
    made = Net()
    with pytest.raises(ValueError, match=r"clipnorm=2\.0"):
        ClippedOptimizer(muon_and_adam(clipnorm=2.0), BY_NORM).build(made.trainable_variables)


@keras.saving.register_keras_serializable("test")
def is_matrix(path: Any, leaf: Any) -> bool:
    """Return whether a leaf is a matrix."""
    return bool(path[-1].endswith("/w"))


@keras.saving.register_keras_serializable("test")
def halved(grad: Any) -> Any:
    """Halve a gradient."""
    return grad / 2


@on_tensorflow
def test_config() -> None:
    """Rules with arrays, and with functions registered in Keras, survive a config in JSON.

    Errors for other functions name the remedy.
    """
    groups = uc.by_group_norm({True: 1.0, False: keras.ops.convert_to_tensor(2.0)}, is_matrix)
    bounds = uc.by_value(np.asarray([-1.0, -2.0]), keras.ops.convert_to_tensor([1.0, math.inf]))
    rule = uc.chain(
        uc.masked(uc.zclip(z=2.0), is_matrix), groups, uc.masked(bounds, is_matrix), halved
    )
    optimizer = ClippedOptimizer(
        AdamW(0.5), rule, loss_scale_factor=2.0, gradient_accumulation_steps=3, name="mine"
    )
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == optimizer.get_config()
    assert repr(again.rule.rules[0]) == f"uc.masked(uc.zclip(z=2.0), {is_matrix.__qualname__})"
    assert isinstance(again.inner, AdamW)
    assert (again.name, again.loss_scale_factor, again.gradient_accumulation_steps) == (
        "mine",
        2.0,
        3,
    )
    tree = {"net/w": np.asarray([8.0, -6.0], np.float32), "net/b": np.asarray([5.0], np.float32)}
    found, wanted = (one.update(tree, one.init(tree), tree)[0] for one in (again.rule, rule))
    same([found[name] for name in tree], [wanted[name] for name in tree])
    same([found["net/w"]], [[0.5 * 4 / 17**0.5 / 4, -0.5 / 17**0.5]], rtol=1)
    for wrong in (
        uc.masked(bounds, lambda path, leaf: True),
        uc.by_group_norm({"a": 1.0}, lambda path, leaf: "a"),
    ):
        with pytest.raises(TypeError, match="register_keras_serializable"):
            ClippedOptimizer(SGD(), wrong).get_config()


@on_tensorflow
def test_a_copy_prints_the_preset() -> None:
    """An optimizer restored from a config or a file prints the rule as it was written."""
    optimizer = ClippedOptimizer(SGD(), uc.by_global_norm(1.0))
    again = ClippedOptimizer.from_config(optimizer.get_config())
    assert (
        repr(again)
        == repr(optimizer)
        == "<ClippedOptimizer: uc.by_global_norm(1.0), SGD, not built>"
    )


@on_tensorflow
def test_an_error_shows_the_preset() -> None:
    """Errors print the preset, also where Keras' output axis differs from the framework's."""
    import tensorflow as tf

    optimizer, table = (
        ClippedOptimizer(SGD(), uc.cowclip(np.ones(3, np.float32))),
        keras.Variable(np.ones((3, 2))),
    )
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))
    optimizer.build([table])
    with pytest.raises(TypeError, match=r"uc\.cowclip\(.* has a limit for each row"):
        optimizer.apply([slices], [table])


def clipped(inner: Any, rule: Any = BY_NORM) -> ClippedOptimizer:
    """Return an optimizer with a rule around an inner one."""
    return ClippedOptimizer(inner, rule)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: clipped("adam"), TypeError, "keras.optimizers.Adam"),
    "no rule": (lambda: clipped(SGD(), 1.0), TypeError, "uc.by_global_norm"),
    "examples": (lambda: clipped(SGD(), uc.by_example_norm(1.0)), ValueError, "uc.clip_and_sum"),
    "twice": (lambda: clipped(clipped(SGD())), ValueError, r"uc\.chain"),
    "scaled": (
        lambda: clipped(LossScaleOptimizer(SGD())),
        ValueError,
        r"LossScaleOptimizer\(ClippedOptimizer",
    ),
    "accumulated": (
        lambda: clipped(SGD(gradient_accumulation_steps=4)),
        ValueError,
        "gradient_accumulation_steps=4",
    ),
    "scaling": (lambda: clipped(SGD(loss_scale_factor=4.0)), ValueError, "loss_scale_factor=4"),
    "clips nothing": (lambda: clipped(SGD(clipnorm=0.0)), ValueError, "since Keras ignores it"),
    "no numbers": (
        lambda: fit(compiled(sgd()), FINITE, LogClipping()),
        TypeError,
        "ClippedOptimizer",
    ),
    "not built": (lambda: clipped(SGD()).apply([keras.ops.ones(2)]), ValueError, "build"),
    "too few": (
        lambda: clipped(SGD()).apply([keras.ops.ones(2)], Net().trainable_variables),
        ValueError,
        "shorter",
    ),
    "no window": (lambda: LogClipping(every=0), ValueError, "every"),
    "no recorder": (lambda: LogClipping(record="run.jsonl"), TypeError, "record"),
}


@on_tensorflow
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """An invalid use raises an error with the remedy."""
    use, error, fix = REFUSED[name]
    with pytest.raises(error, match=fix):
        use()


@on_tensorflow
def test_mixed_precision() -> None:
    """In float16 ``compile`` adds Keras' loss scale, and logs still find the scalars behind it."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        made = compiled(ClippedOptimizer(sgd(), BY_NORM), run_eagerly=True)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(made.optimizer, LossScaleOptimizer)
    made.optimizer.initial_scale = 64.0
    logs = fit(made, FINITE[:3], LogClipping())
    assert logs["clip/norm"] == pytest.approx(
        [by_hand(BY_NORM, FINITE[:3])[1][-1]["clip/norm"]], rel=0.01
    )


@on_tensorflow
def test_steps_of_ones_own() -> None:
    """A custom loop in a `tf.function` is clipped, and has the scalars of each step."""
    rule = uc.by_norm(0.3, nonfinite="skip")
    hand, steps = by_hand(rule)
    made = Net()
    made.optimizer = ClippedOptimizer(sgd(), rule)
    made.optimizer.build(made.trainable_variables)

    @tf.function
    def step(ids: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((made(ids) - targets) ** 2)
        made.optimizer.apply(
            tape.gradient(loss, made.trainable_variables), made.trainable_variables
        )
        return made.optimizer.scalars()

    for batch, wanted in zip(BATCHES, steps, strict=True):
        found = {name: float(value) for name, value in step(*map(tf.constant, batch)).items()}
        assert found == pytest.approx(wanted, rel=2e-5, nan_ok=True)
    as_by_hand(made, hand)


@on_tensorflow
# The test is about such gradients.
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("compiling", [False, True])
def test_some_variables(compiling: bool) -> None:
    """An absent gradient is no part of the norm, and its variable stays.

    Variables can also be excluded.
    """
    made = Net()
    optimizer = ClippedOptimizer(SGD(1.0), uc.by_global_norm(1.0))
    optimizer.build(made.trainable_variables)
    before = weights()
    grads = {"b": np.asarray([3.0, 4.0], np.float32), "w": np.zeros((3, 2), np.float32)}
    some = [variable for variable in made.trainable_variables if variable.name in grads]

    def step() -> None:
        optimizer.apply(
            [grads.get(variable.name) for variable in made.trainable_variables],
            made.trainable_variables,
        )
        optimizer.apply_gradients([(grads[variable.name], variable) for variable in some])

    (tf.function(step) if compiling else step)()
    same(
        values([made.b, made.table, made.w]),
        [before["b"] - [1.2, 1.6], before["table"], before["w"]],
        rtol=1e-6,
    )


@on_tensorflow
def test_paths_and_frozen_layers() -> None:
    """A rule gets the paths of the trained variables only."""
    seen = set()

    def where(path: Any, leaf: Any) -> bool:
        seen.add(path)
        return "head" not in path[0]

    layers = [keras.layers.Dense(3, name=name) for name in ("frozen", "body", "head")]
    made = keras.Sequential([keras.Input((3,)), *layers])
    layers[0].trainable = False
    made.compile(
        ClippedOptimizer(SGD(0.1), uc.masked(uc.by_global_norm(0.0), where)),
        "mse",
        run_eagerly=True,
    )
    before = made.get_weights()
    made.train_on_batch(np.ones((2, 3), np.float32), np.full((2, 3), 9, np.float32))
    assert seen == {(variable.path,) for layer in layers[1:] for variable in layer.weights}
    moved = [
        not np.array_equal(one, other)
        for one, other in zip(before, made.get_weights(), strict=True)
    ]
    assert moved == [False, False, False, False, True, True]


@on_tensorflow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_in_narrow_dtypes(dtype: str) -> None:
    """A 0-d weight of a low-precision dtype is trained, also in steps run by Python."""
    gain = keras.Variable(1.0, dtype=dtype)
    optimizer = ClippedOptimizer(
        SGD(0.125), uc.chain(uc.autoclip(30, window=8), uc.adagc(warmup=1), uc.by_norm(0.5))
    )
    for _ in range(2):
        optimizer.apply([4 * keras.ops.ones((), dtype)], [gain])
    assert float(gain) == 0.875


@on_tensorflow
def test_debugger() -> None:
    """With TensorFlow's NaN checks on, no step and no log of a rule contains NaN or ∞."""
    rule = uc.chain(uc.agc(0.01), uc.adagc(warmup=2), uc.zclip(warmup=2))
    made = compiled(ClippedOptimizer(Adam(), rule), run_eagerly=True)
    tf.debugging.enable_check_numerics()
    try:
        logs = fit(made, FINITE[:3], LogClipping())
    finally:
        tf.debugging.disable_check_numerics()
    assert np.isfinite([value for values in logs.values() for value in values]).all()


@on_tensorflow
# The test is about such gradients.
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_gradients_that_are_absent_in_some_steps() -> None:
    """Absent gradients leave variables and state unchanged, as in ``rule.update`` with `None`."""
    rule, made = uc.chain(uc.adagc(warmup=1), uc.spam()), Net()
    optimizer = ClippedOptimizer(SGD(1.0), rule)
    optimizer.build(made.trainable_variables)
    state, wanted = rule.init(weights()), weights()
    for absent, size in ((None, 1.0), ("b", 4.0), ("table", 0.5), (None, 9.0)):
        grads = {
            name: None if name == absent else size * array for name, array in weights().items()
        }
        update, state, _ = rule.update(grads, state, wanted)
        wanted = {
            name: w if update[name] is None else w - update[name] for name, w in wanted.items()
        }
        optimizer.apply([grads[variable.name] for variable in made.trainable_variables])
        same(
            values(made.trainable_variables),
            [wanted[v.name] for v in made.trainable_variables],
            rtol=2e-6,
        )


WINDOWS: dict[int, tuple[dict[str, Any], list[int]]] = {3: ({}, [3, 6, 8])}
"""For each way of running the steps, the ends of the windows of a record."""
if BACKEND == "tensorflow":
    WINDOWS = {1: ({"run_eagerly": True}, [*range(1, 9)]), 3: ({"steps_per_execution": 2}, [4, 8])}


@pytest.mark.parametrize("every", WINDOWS)
def test_a_record_of_windows(every: int, tmp_path: Path) -> None:
    """A record has a row for each window, with the logs of its steps, skipped ones included.

    Logs of an epoch cover all of it.
    """
    rule = uc.chain(uc.by_global_norm(3.0, nonfinite="skip"), uc.autoclip(50, window=4))
    way, ends = WINDOWS[every]
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        made = compiled(ClippedOptimizer(sgd(), rule), **way)
        logs = fit(made, BATCHES, LogClipping(every, record), epochs=2)
    _, steps = by_hand(rule, BATCHES * 2)
    found = insight.read(record.path)
    assert found.steps.tolist() == [*ends, *(8 + end for end in ends)]
    windows = [steps[a:b] for a, b in zip([0, *found.steps[:-1]], found.steps, strict=True)]
    assert found.norms == pytest.approx(list(map(most, windows)), rel=2e-5, nan_ok=True)
    assert found.shares == pytest.approx([mean("share", one) for one in windows])
    assert found.skipped.tolist() == [mean("skipped", one) == 1 for one in windows]
    for name in ("share", "skipped"):
        assert logs[f"clip/{name}"] == pytest.approx([mean(name, steps[:8]), mean(name, steps[8:])])
    assert logs["clip/norm_max"] == pytest.approx([most(steps[:8]), most(steps[8:])], rel=2e-5)


def test_a_limit_that_does_not_exist(tmp_path: Path) -> None:
    """A limit that does not exist is NaN in the logs, a gap in a plot, and infinite in a record."""
    rule = uc.zclip(z=1.0, warmup=4)
    made = compiled(ClippedOptimizer(sgd(), rule))
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        logs = fit(made, FINITE[:4], LogClipping(record=record), epochs=3)
    # The first epoch ends before the rule has a limit.
    _, steps = by_hand(rule, FINITE[:4] * 3)
    ends = steps[3::4]
    for name in ("clip/limit", "clip/threshold"):
        wanted = [math.nan, ends[1][name], ends[2][name]]
        assert logs[name] == pytest.approx(wanted, rel=2e-5, nan_ok=True)
        assert max(wanted[1:]) < 100
    limits = [math.inf, ends[1]["clip/limit"], ends[2]["clip/limit"]]
    np.testing.assert_allclose(insight.read(record.path).limits, limits, rtol=2e-5)


def mean(name: str, steps: list[dict[str, float]]) -> float:
    """Return the mean of a logged value."""
    return float(np.mean([step[f"clip/{name}"] for step in steps]))


def most(steps: list[dict[str, float]]) -> float:
    """Return the largest finite norm."""
    norms = [step["clip/norm"] for step in steps if math.isfinite(step["clip/norm"])]
    return max(norms, default=math.nan)


@on_tensorflow
@pytest.mark.parametrize("sparse", [False, True])
def test_replicas(sparse: bool) -> None:
    """Two replicas clip the sum of their gradients once, and follow the training by hand."""
    rule = uc.chain(uc.by_global_norm(0.9), uc.adagc(warmup=2))
    with mirrored().scope():
        made = compiled(ClippedOptimizer(sgd(), rule))
        made.sparse = sparse
    logs = fit(made, FINITE, LogClipping())
    hand, seen = by_hand(rule, FINITE)
    in_replicas(made, hand)
    assert logs["clip/norm"] == pytest.approx([seen[-1]["clip/norm"]], rel=2e-5)


@on_tensorflow
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {}], ids=["accumulated", "skipped"]
)
def test_what_replicas_refuse(options: dict[str, Any]) -> None:
    """Replicas refuse options under which they cannot sum gradients or skip steps together."""
    rule = uc.by_global_norm(0.9) if options else uc.by_global_norm(0.9, nonfinite="skip")
    with mirrored().scope():
        made = compiled(ClippedOptimizer(sgd(), rule, **options))
    with pytest.raises(ValueError, match="several replicas"):
        fit(made, FINITE)


class Stepping:
    """Keras' own training function, called for one batch at a time."""

    recorded = "keras"
    takes = frozenset(
        {"scalars", "save", "state", "micro"} | ({"bits"} if BACKEND != "jax" else set())
    )
    """In JAX the step is one program, which XLA may round differently."""
    optimizer = "momentum"
    left_out = frozenset[str]()
    own_clipping: ClassVar[dict[str, Any]] = {
        "clipnorm": 0.5,
        "global_clipnorm": 0.5,
        "clipvalue": 0.5,
    }
    options: ClassVar[dict[str, Any]] = {}
    kind: type[SGD] = SGD

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Compile the model."""
        inner = self.kind(RATE, momentum=MOMENTUM, **options)
        self.micro = micro
        steps = {"gradient_accumulation_steps": micro} if micro > 1 else {}
        self.clipped = inner if rule is None else ClippedOptimizer(inner, rule, **steps)
        self.net = compiled(self.clipped, **self.options)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        for part in parts(batch, self.micro):
            self.net.train_on_batch(*part)

    def weights(self) -> Arrays:
        """Return the weights."""
        return {
            variable.name: one
            for variable, one in zip(self.net.weights, values(self.net.weights), strict=True)
        }

    def inner(self) -> list[np.ndarray]:
        """Return the variables of the inner optimizer."""
        return values(self.clipped.inner.variables)

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the last step."""
        return {name: float(value) for name, value in self.clipped.scalars().items()}

    def save(self, folder: Path) -> None:
        """Save the weights, including those of the optimizer."""
        self.net.save_weights(folder / "half.weights.h5")

    def load(self, folder: Path) -> None:
        """Load them into an optimizer that is built."""
        self.net.optimizer.build(self.net.trainable_variables)
        self.net.load_weights(folder / "half.weights.h5")

    def rule_state(self) -> dict[str, Any]:
        """Return the state, without the model in its names."""
        return renamed(self.clipped.rule_state_dict(), lambda name: name.replace("net/", ""))

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state into the optimizer, which must have variables."""
        self.net.optimizer.build(self.net.trainable_variables)
        self.net.optimizer.load_rule_state_dict(
            renamed(saved, lambda name: name.replace("['", "['net/"))
        )


class Eager(Stepping):
    """Keras' training function, run eagerly."""

    options: ClassVar[dict[str, Any]] = {"run_eagerly": True}


class Unchanged(SGD):
    """An optimizer that requires sparse gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Require a sparse gradient."""
        assert any(isinstance(grad, tf.IndexedSlices) for grad in grads), (
            "a sparse gradient has become another one"
        )
        super().apply(grads, trainable_variables)


class Sparse(Eager):
    """A table whose gradient TensorFlow keeps sparse, with duplicate rows."""

    takes = frozenset({"scalars"})
    own_clipping: ClassVar[dict[str, Any]] = {}
    kind = Unchanged

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Keep the gradient of the table sparse."""
        super().start(uc, rule, **options)
        self.net.sparse = True


class Scaled(Eager):
    """An optimizer inside Keras' loss scale."""

    takes = frozenset({"scalars", "state", "scale"})
    own_clipping: ClassVar[dict[str, Any]] = {}

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Wrap the optimizer, and build it."""
        super().start(uc, rule, **options)
        self.net = compiled(LossScaleOptimizer(self.clipped, 1024.0), **self.options)
        self.net.optimizer.build(self.net.trainable_variables)


KINDS = {"torch": None, "jax": ("agc", "adagc", "skip"), "tensorflow": ("adagc", "skip")}[BACKEND]
"""The kinds of rules: few for compiled steps, which take long."""


@pytest.mark.parametrize("check", contract(Stepping, KINDS))
def test_contract(check: Any, tmp_path: Path) -> None:
    """Steps on the backend of this run keep the contract of all integrations."""
    check(Stepping, uc, tmp_path)


@on_tensorflow
@pytest.mark.parametrize(
    ("make", "check"), variants({Eager: None, Sparse: ("by_value", "skip"), Scaled: ()})
)
def test_eagerly(make: Any, check: Any, tmp_path: Path) -> None:
    """Eager steps keep the contract, with sparse gradients and with a loss scale, too."""
    check(make, uc, tmp_path)


@on_tensorflow
def test_only_sound_checkpoints(tmp_path: Path) -> None:
    """The recipe of the page saves no epoch with a skipped step."""
    keep = run_story("skip-a-step.md", "sound-keras")["KeepSound"]
    made = compiled(ClippedOptimizer(sgd(), uc.by_norm(0.3, nonfinite="skip")))
    for name, of in {"sound": FINITE, "broken": BATCHES}.items():
        fit(made, of, LogClipping(), keep(tmp_path / f"{name}.keras"))
    assert [file.name for file in tmp_path.iterdir()] == ["sound.keras"]
