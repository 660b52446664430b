"""`ClippedOptimizer` in ``compile`` and ``fit``: against Keras' own clipping, saved and loaded, logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers import SGD, Adam, AdamW

import uniclip as uc
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [
    # Keras' variables do not know NumPy's copy argument yet; that is between the two.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    # Keras' trainer makes a NumPy array read-only and gives it to PyTorch.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

BACKEND = keras.backend.backend()
LEARNS = uc.chain(uc.autoclip(30, window=8), uc.adagc(warmup=2))
X = np.random.default_rng(0).normal(size=(40, 5)).astype("float32")
Y = 10 * X.sum(axis=1, keepdims=True) * np.where(np.arange(40)[:, None] < 30, np.float32(1), np.float32(5))


def model(optimizer: Any, policy: str = "float32", **options: Any) -> Any:
    """Return a small compiled model, always with the same weights."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh", name="body")])
        made.add(keras.layers.Dense(1, name="head"))
    finally:
        keras.config.set_dtype_policy("float32")
    rng = np.random.default_rng(1)  # each backend would draw others
    made.set_weights([rng.normal(size=weight.shape) / 2 for weight in made.get_weights()])
    made.compile(optimizer, loss="mse", **options)
    return made


def fit(made: Any, epochs: int = 5, **options: Any) -> Any:
    """Take four steps in each epoch, the same each time."""
    return made.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0, **options)


def equal(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Compare the weights of two models."""
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


MIGRATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "clipnorm": ({"clipnorm": 0.5}, uc.by_norm(0.5)),
    "global_clipnorm": ({"global_clipnorm": 0.5}, uc.by_global_norm(0.5)),
    "clipvalue": ({"clipvalue": 0.5}, uc.by_value(-0.5, 0.5)),
}


def once(name: str, *others: Any) -> Any:
    """Return a case for one backend: what is particular to it, no backend changes."""
    return pytest.param(name, *others, marks=pytest.mark.any_backend)


@pytest.mark.parametrize(
    ("option", "optimizer"),
    [
        ("global_clipnorm", SGD),
        once("clipnorm", SGD),
        once("clipvalue", SGD),
        *[once(name, Adam) for name in MIGRATIONS],
    ],
)
def test_migration(option: str, optimizer: Callable[..., Any]) -> None:
    """After 50 steps the weights are those of Keras' own option, to 1e-5: both round in float32, 50 times."""
    options, rule = MIGRATIONS[option]
    ours, theirs = model(ClippedOptimizer(optimizer(0.01), rule)), model(optimizer(0.01, **options))
    start = ours.get_weights()
    for one in (ours, theirs):
        one.fit(X, Y, batch_size=8, epochs=10, shuffle=False, verbose=0)
    assert int(ours.optimizer.iterations) == 50
    equal(ours, theirs)
    if optimizer is SGD:  # whose first step alone is larger than all clipped ones together
        moved = [np.abs(after - before).max() for after, before in zip(ours.get_weights(), start, strict=True)]
        assert max(moved) <= 50 * 0.01 * 0.5 * (1 + 1e-5)


def test_accumulation() -> None:
    """Accumulation is that of Keras: the mean of the micro-batches is clipped once."""
    ours = model(ClippedOptimizer(Adam(0.1), uc.by_global_norm(0.5), gradient_accumulation_steps=2))
    theirs = model(Adam(0.1, global_clipnorm=0.5, gradient_accumulation_steps=2))
    fit(ours)
    fit(theirs)
    equal(ours, theirs)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 10


INNER: dict[str, Callable[[], Any]] = {
    "weight-decay": lambda: Adam(0.1, weight_decay=0.1),
    "average": lambda: Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "average-at-the-end": lambda: SGD(0.01, use_ema=True, ema_momentum=0.5),
    "schedule": lambda: SGD(keras.optimizers.schedules.CosineDecay(0.05, 10), momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", ["average", "schedule", once("weight-decay"), once("average-at-the-end")])
def test_what_the_inner_optimizer_does(name: str) -> None:
    """Weight decay, averages of the weights and schedules are as without the wrapper."""
    ours, theirs = model(ClippedOptimizer(INNER[name](), uc.by_global_norm(1e9))), model(INNER[name]())
    fit(ours)
    fit(theirs)
    equal(ours, theirs, tolerance=1e-6)


SKIPS = uc.skip_spikes(1.0, window=8, warmup=4)
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {"eager": (SKIPS, {"run_eagerly": True})}
if BACKEND != "torch":  # where Keras compiles nothing by itself, and takes one step at a time
    WAYS |= {"xla": (SKIPS, {"jit_compile": True}), "no-xla": (SKIPS, {"jit_compile": False})}
    WAYS |= {"two-steps-in-one": (LEARNS, {"steps_per_execution": 2})}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_running(way: str) -> None:
    """Compiled or not, the weights and the logs are the same."""
    rule, options = WAYS[way]
    ours, other = model(ClippedOptimizer(Adam(0.1), rule), **options), model(ClippedOptimizer(Adam(0.1), rule))
    logs = [fit(one, epochs=3, callbacks=[LogClipping()]).history for one in (ours, other)]
    equal(ours, other, tolerance=1e-4)
    assert list(logs[0]) == list(logs[1])
    for name in logs[0]:
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-3)
    assert rule is LEARNS or max(logs[0]["clip/skipped"]) > 0


class Gain(keras.layers.Layer):
    """Multiply by one learned number."""

    def build(self, input_shape: Any) -> None:
        self.gain = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs * self.gain


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        *[(policy, LEARNS) for policy in ("bfloat16", "mixed_bfloat16", "float16")],
        *[("bfloat16", rule) for rule in (uc.by_global_norm(0.5), uc.by_norm(0.5))],  # the norms are float32 in all
    ],
    ids=repr,
)
def test_scalar_weights(policy: str, rule: Any) -> None:
    """A weight without dimensions, of a narrow dtype, is trained eagerly too."""
    made = keras.Sequential([keras.Input((5,)), Gain(dtype=policy)])
    made.compile(ClippedOptimizer(SGD(0.125), rule), loss="mse", run_eagerly=True)
    made.fit(X[:8], -X[:8], batch_size=8, verbose=0)
    (gain,) = made.get_weights()
    assert 0 <= gain < 1


def test_saved_in_the_middle(tmp_path: Path) -> None:
    """A model that was saved and loaded goes on to the bit; without the rule's state it does not."""
    whole, part = (model(ClippedOptimizer(Adam(0.1), LEARNS)) for _ in range(2))
    fit(whole)
    fit(whole)
    fit(part)
    part.save(tmp_path / "part.keras")
    loaded, forgetful = (keras.saving.load_model(tmp_path / "part.keras") for _ in range(2))
    for variable in forgetful.optimizer._state:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    assert loaded.optimizer.rule == LEARNS
    for one in (loaded, forgetful):
        fit(one)
    equal(loaded, whole, tolerance=0.0)
    assert int(loaded.optimizer.iterations) == 40
    with pytest.raises(AssertionError):
        equal(forgetful, whole)


def test_saved_weights(tmp_path: Path) -> None:
    """``save_weights`` holds the state of optimizer and rule; ``load_weights`` sets it where the optimizer is built."""
    path = tmp_path / "part.weights.h5"
    whole, part, again = (model(ClippedOptimizer(Adam(0.1), LEARNS)) for _ in range(3))
    fit(whole)
    fit(whole)
    fit(part)
    part.save_weights(path)
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    assert int(again.optimizer.iterations) == 20
    fit(again)
    equal(again, whole, tolerance=0.0)


def frozen(number: int, *, names: bool = True) -> Any:
    """Return a model of three alike layers, one of which is not trained, after a step."""
    layers = [keras.layers.Dense(5, name=f"{'abc'[i]}" if names else None) for i in range(3)]
    made = keras.Sequential([keras.Input((5,)), *layers])
    layers[number].trainable = False
    made.compile(ClippedOptimizer(Adam(0.1), uc.adagc()), loss="mse")
    made.train_on_batch(X, X)
    return made


@pytest.mark.any_backend
def test_another_layer_frozen(tmp_path: Path) -> None:
    """The rule's state of other layers is refused by name; the same layers made anew are the same ones."""
    path = tmp_path / "one.weights.h5"
    frozen(0).save_weights(path)
    other, again = frozen(1), frozen(0)
    own = other.optimizer.variables[: 2 + len(other.optimizer._state)]
    before = [keras.ops.convert_to_numpy(v) for v in own]
    message = r"norms of grads\['b/kernel'\], .*which are not here, and none of grads\['a/kernel'\]"
    with pytest.raises(ValueError, match=message.replace("b/", "[^']*/b/").replace("a/", "[^']*/a/")):
        other.load_weights(path)
    for old, variable in zip(before, own, strict=True):
        np.testing.assert_array_equal(old, keras.ops.convert_to_numpy(variable))
    again.load_weights(path)
    unnamed = frozen(1, names=False)
    unnamed.save_weights(path)
    frozen(1, names=False).load_weights(path)
    with pytest.raises(ValueError, match=r"saved state .* is that of other leaves"):
        frozen(2, names=False).load_weights(path)
    with pytest.raises(ValueError, match=r"saved state .* is that of other leaves"):
        frozen(1).load_weights(path)


@pytest.mark.any_backend
def test_files_with_a_wrong_state(tmp_path: Path) -> None:
    """A state that does not say whose it is, that of another rule, and numbers that cannot be are refused."""
    made = frozen(0)
    store: dict[str, Any] = {}
    made.optimizer.save_own_variables(store)
    numbers = {v.name: str(i) for i, v in enumerate(made.optimizer.variables)}
    average, count = numbers["rule_0"], numbers[f"rule_{len(made.optimizer._state) - 1}"]
    tuned, other = (ClippedOptimizer(Adam(0.1), rule) for rule in (uc.adagc(ratio=2.0), uc.adagn()))
    for optimizer in (tuned, other):
        optimizer.build(made.trainable_variables)
    tuned.load_own_variables(store)  # another number is no other rule
    for optimizer, change, message in (
        (tuned, {"uniclip": None}, r"does not say whose norms it holds of .*compile=False\)"),
        (tuned, {average: np.full(4, math.nan, np.float32)}, "NaN"),
        (tuned, {average: np.full(4, -0.5, np.float32)}, "negative"),
        (tuned, {count: np.int64(2**40)}, "does not fit"),
        (tuned, {count: np.int32(-1)}, "negative"),
    ):
        wrong = {name: value for name, value in (store | change).items() if value is not None}
        before = [keras.ops.convert_to_numpy(v).copy() for v in optimizer.variables]
        with pytest.raises(ValueError, match=message):
            optimizer.load_own_variables(wrong)
        if "uniclip" in wrong:
            weights = [wrong[str(number)] for number in range(len(optimizer.variables))]
            with pytest.raises(ValueError, match=message):
                optimizer.set_weights(weights)
        for old, variable in zip(before, optimizer.variables, strict=True):
            np.testing.assert_array_equal(old, keras.ops.convert_to_numpy(variable))
    more = {str(number): store["0"] for number in range(len(other.variables))} | {"uniclip": store["uniclip"]}
    with pytest.raises(ValueError, match=r"is that of another rule than .*of Ema .* of MeanOverRms"):
        other.load_own_variables(more)
    joint = ClippedOptimizer(Adam(0.1), uc.by_norm(1.0))
    joint.build(made.trainable_variables)
    store = {}
    joint.save_own_variables(store)
    assert "uniclip" not in store


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")  # as Keras says, too
def test_groups_need_gradients() -> None:
    """A rule that remembers groups refuses a step in which one has no gradient."""
    rule = uc.Rule(uc.limits.Percentile(50, 4), scope=uc.scopes.groups(lambda path, leaf: path[0]))
    optimizer = ClippedOptimizer(SGD(0.1), rule)
    params = [keras.Variable(np.ones(2, np.float32), name=name) for name in "ab"]
    optimizer.build(params)
    with pytest.raises(ValueError, match=r"group 'b' had a gradient at one step and none at another: .*at every step"):
        optimizer.apply([keras.ops.ones(2), None], params)


@pytest.mark.any_backend
def test_the_order_of_callbacks(tmp_path: Path) -> None:
    """LogClipping after a callback that writes logs is a warning that names the order; before it, it is none."""
    path = tmp_path / "log.csv"
    for after in (True, False):
        callbacks = [keras.callbacks.CSVLogger(path), LogClipping()]
        made = model(ClippedOptimizer(SGD(0.01), uc.by_norm(1.0)))
        message = r"CSVLogger comes before LogClipping, .*callbacks=\[LogClipping\(\), CSVLogger\(\.\.\.\)\]"
        with pytest.warns(UserWarning, match=message) if after else nullcontext():
            fit(made, epochs=1, callbacks=callbacks if after else callbacks[::-1])
        assert ("clip/norm" in path.read_text(encoding="utf-8")) == (not after)


class Scaled(keras.layers.Layer):
    """A layer with one number for a weight."""

    def build(self, shape: Any) -> None:
        """Make it."""
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        """Multiply."""
        return x * keras.ops.cast(self.scale, x.dtype)


@pytest.mark.any_backend
@pytest.mark.parametrize("rule", [uc.by_norm(0.5), uc.by_global_norm(0.5), uc.adagc(warmup=1)], ids=repr)
def test_a_number_for_a_weight_in_bfloat16(rule: Any) -> None:
    """A weight without dimensions, in bfloat16 and step by step in Python, is clipped as any."""
    keras.config.set_dtype_policy("bfloat16")
    try:
        made = keras.Sequential([keras.Input((5,)), Scaled(), keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")
    made.compile(ClippedOptimizer(SGD(0.01), rule), loss="mse", run_eagerly=True)
    fit(made, epochs=1)
    assert all(np.isfinite(weight.astype("float32")).all() for weight in made.get_weights())
    assert np.isfinite(float(made.optimizer.scalars()["clip/norm"]))


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")  # which is what happens
def test_saved_weights_before_the_first_step(tmp_path: Path) -> None:
    """Into an optimizer that is not built Keras loads no state."""
    part, again = (model(ClippedOptimizer(Adam(0.1), LEARNS)) for _ in range(2))
    fit(part)
    part.save_weights(tmp_path / "part.weights.h5")
    again.load_weights(tmp_path / "part.weights.h5")
    equal(again, part, tolerance=0.0)
    assert int(again.optimizer.iterations) == 0


@pytest.mark.any_backend
def test_excluded_from_weight_decay() -> None:
    """What is excluded at the wrapper is excluded in the optimizer that decays."""
    decaying, clipped = (AdamW(1e-3, weight_decay=10.0) for _ in range(2))
    wrapped = ClippedOptimizer(clipped, uc.by_global_norm(math.inf))
    for optimizer in (decaying, wrapped):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    one, other = model(decaying), model(wrapped)
    for made in (one, other):
        made.get_layer("body").bias.assign(np.ones(4))
        fit(made)
    equal(other, one)


def test_logs() -> None:
    """An epoch's share is that of its steps, the other scalars those of its last one; steps one by one agree."""
    rule = uc.by_global_norm(100.0)
    logged, single = (model(ClippedOptimizer(SGD(0.01), rule)) for _ in range(2))
    history = fit(logged, epochs=3, callbacks=[LogClipping()], validation_data=(X, Y)).history
    for epoch in range(3):
        steps = []
        for start in range(0, 40, 10):
            single.train_on_batch(X[start : start + 10], Y[start : start + 10])
            steps.append({name: float(value) for name, value in single.optimizer.scalars().items()})
        assert history["clip/share"][epoch] == np.mean([step["clip/share"] for step in steps])
        for name in ("clip/norm", "clip/limit", "clip/factor"):
            assert history[name][epoch] == pytest.approx(steps[-1][name], rel=1e-5)
        assert history["clip/norm_max"][epoch] == pytest.approx(max(step["clip/norm"] for step in steps), rel=1e-5)
    assert repr(single.optimizer) == "<ClippedOptimizer: uc.Rule(100.0), SGD of 4 variables, 12 steps>"
    assert repr(ClippedOptimizer(SGD(0.01), rule)) == "<ClippedOptimizer: uc.Rule(100.0), SGD, not built>"
    assert 0 < np.mean(history["clip/share"]) < 1


def test_skipped_steps_in_fit() -> None:
    """A batch with NaN is left out: it moves no weight, no moment and no count, and the logs say so."""
    spoiled = np.where(np.arange(40)[:, None] // 10 == 1, np.float32(math.nan), Y)
    ours = model(ClippedOptimizer(Adam(0.1), uc.by_global_norm(1.0, nonfinite="skip")))
    theirs = model(ClippedOptimizer(Adam(0.1), uc.by_global_norm(1.0)))
    logs = ours.fit(X, spoiled, batch_size=10, shuffle=False, verbose=0, callbacks=[LogClipping()]).history
    clean = np.flatnonzero(np.isfinite(spoiled[:, 0]))
    theirs.fit(X[clean], Y[clean], batch_size=10, shuffle=False, verbose=0)
    equal(ours, theirs, tolerance=1e-6)
    assert logs["clip/skipped"] == [0.25]
    assert int(ours.optimizer.iterations) == 3


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy: str) -> None:
    """The norm is that of the unscaled gradients; for float16 ``compile`` puts its own scaling around."""
    ours, plain = (model(ClippedOptimizer(SGD(0.001), uc.by_global_norm(1e9)), one) for one in (policy, "float32"))
    plain.optimizer.learning_rate = 0.001
    assert isinstance(ours.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    if policy == "mixed_float16":
        ours.optimizer.initial_scale = 64.0
    logs = [one.fit(X, Y, batch_size=40, verbose=0, callbacks=[LogClipping()]).history for one in (ours, plain)]
    assert logs[0]["clip/norm"] == pytest.approx(logs[1]["clip/norm"], rel=0.02)


@pytest.mark.any_backend
def test_frozen_layers() -> None:
    """Variables that are not trainable are no part of the norm, nor of the paths."""
    made = model(SGD(0.1))
    made.layers[0].trainable = False
    made.compile(ClippedOptimizer(SGD(0.1), uc.adagc()), loss="mse")
    before = made.layers[0].get_weights()
    fit(made)
    assert made.optimizer._paths == tuple(v.path for v in made.layers[1].trainable_variables)
    np.testing.assert_array_equal(before[0], made.layers[0].get_weights()[0])


def test_embedding() -> None:
    """An embedding, whose gradient TensorFlow keeps sparse, trains in fit as by Keras' own clipping."""
    ids, target = np.arange(40).reshape(20, 2) % 7, np.ones((20, 2, 3), np.float32) * 5

    def table(optimizer: Any) -> Any:
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 3)])
        made.compile(optimizer, loss="mse")
        made.fit(ids, target, batch_size=10, epochs=3, shuffle=False, verbose=0)
        return made

    ours = table(ClippedOptimizer(SGD(1.0), uc.by_value(-0.01, 0.01)))
    free = table(SGD(1.0))
    assert np.abs(ours.get_weights()[0] - free.get_weights()[0]).max() > 0.1
    clipped = table(ClippedOptimizer(SGD(1.0), uc.by_global_norm(0.5)))
    (made,) = clipped.get_weights()
    keras.utils.set_random_seed(0)
    start = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 3)]).get_weights()[0]
    np.testing.assert_array_equal(made[7:], start[7:])  # ids that never occur
    moved = np.linalg.norm(made - start)
    assert 2.5 < moved <= 3.0 + 1e-5  # six steps of norm 0.5, in nearly one direction


@pytest.mark.any_backend
def test_log_clipping_needs_a_clipped_optimizer() -> None:
    """LogClipping without one is an error that names the fix."""
    with pytest.raises(TypeError, match=r"optimizer=ClippedOptimizer\(optimizer, rule\)"):
        fit(model(SGD(0.1)), callbacks=[LogClipping()])


@pytest.mark.any_backend
def test_names_in_rules() -> None:
    """A rule sees the path of each variable."""
    seen = set()

    def where(path: Any, leaf: Any) -> bool:
        seen.add(path)
        return "head" not in path[0]

    made = model(ClippedOptimizer(SGD(0.1), uc.masked(uc.by_global_norm(0.0), where)))
    before = made.get_weights()
    fit(made, epochs=1)
    after = made.get_weights()
    assert seen == {(v.path,) for v in made.trainable_variables}
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[2] - after[2]).max() > 0
