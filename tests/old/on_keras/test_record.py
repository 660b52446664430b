"""What `ClippedOptimizer` records: in ``fit``, compiled or not, in loops of one's own, and saved beside it or not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

BACKEND = keras.backend.backend()
COMPILED = BACKEND != "torch"  # on PyTorch, fit is eager
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


@pytest.mark.parametrize("every", [5, *[pytest.param(every, marks=pytest.mark.any_backend) for every in (1, 8, 100)]])
@pytest.mark.parametrize("eager", [False, True])
def test_fit(every: int, eager: bool, tmp_path: Path) -> None:
    """Each step is recorded once, with the norms of its leaves, whatever the window."""
    with insight.Recorder(tmp_path / "run.jsonl", every=every, leaves="all") as record:
        made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), run_eagerly=eager)
        fit(made)
    found, norms = insight.read(record.path), by_hand(20.0, 24)
    same(found, norms, 20.0)
    np.testing.assert_allclose(found.leaves, norms, rtol=2e-5)
    assert found.labels == [variable.path for variable in made.trainable_variables]
    assert found.sizes.tolist() == [5, 1]
    assert found.rule == repr(uc.by_global_norm(20.0))


def test_what_xla_compiles(tmp_path: Path) -> None:
    """Nothing calls the host from what XLA compiles, which on TensorFlow could not."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        fit(model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), jit_compile=BACKEND != "torch"))
    same(insight.read(record.path), by_hand(20.0, 24), 20.0)


def test_several_steps_in_an_execution(tmp_path: Path) -> None:
    """They are all recorded, or there is an error that says how; on PyTorch Keras takes them one by one."""
    many = 4 if COMPILED else 1
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        fit(model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), steps_per_execution=many))
    same(insight.read(record.path), by_hand(20.0, 24), 20.0)
    record = insight.Recorder(tmp_path / "other.jsonl", every=3)
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record), steps_per_execution=4)
    why = r"above the 3 steps of a window.*every=4" if COMPILED else "must be 1 with the PyTorch backend"
    with pytest.raises(ValueError, match=why):
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


RULES: dict[str, Any] = {
    "each leaf": uc.by_norm(5.0),
    "zclip": uc.zclip(warmup=3),
    "chain": uc.chain(uc.by_value(-5, 5), uc.by_norm(5.0), uc.by_global_norm(6.0)),
    "units": uc.agc(0.5),
    "value": uc.by_value(-1, 1),
    "zero": uc.by_global_norm(20.0, nonfinite="zero"),
    "unlimited": uc.by_global_norm(math.inf),
}


@pytest.mark.parametrize("name", RULES if COMPILED else ["chain"])
def test_compiled_as_eager(name: str, tmp_path: Path) -> None:
    """What compiled steps leave is what the reports of eager ones hold, for all kinds of rules."""
    y = np.where(np.arange(80)[:, None] == 35, np.float32(math.nan if name == "zero" else 1), Y)
    found = []
    for eager in (False, True):
        with insight.Recorder(tmp_path / f"{eager}.jsonl", every=5, leaves=True) as record:
            made = model(ClippedOptimizer(SGD(RATE), RULES[name], record=record), run_eagerly=eager)
            fit(made, y=y, epochs=1 if name == "zero" else 3)
        found.append(insight.read(record.path))
    for column, values in found[0]._asdict().items():
        other = getattr(found[1], column)
        if isinstance(values, np.ndarray):
            np.testing.assert_allclose(values, other, rtol=1e-5, err_msg=column)
        elif column != "labels":  # Keras numbers the layers of a second model on
            assert values == other, column


@pytest.mark.any_backend
def test_every_kind_of_saved_file(tmp_path: Path) -> None:
    """What is recorded is in no file: one saved with a recorder loads without, and the other way round."""
    rule = uc.zclip(warmup=3)
    recorded = model(ClippedOptimizer(SGD(RATE, momentum=0.9), rule, record=insight.Recorder(tmp_path / "a.jsonl")))
    plain = model(ClippedOptimizer(SGD(RATE, momentum=0.9), rule))
    fit(recorded, 1)
    fit(plain, 1)
    assert "record" not in recorded.optimizer.get_config()
    recorded.save(tmp_path / "recorded.keras")
    plain.save(tmp_path / "plain.keras")
    sizes = []
    for name in ("recorded", "plain"):
        loaded = keras.saving.load_model(tmp_path / f"{name}.keras")
        assert int(loaded.optimizer.iterations) == 8
        sizes.append([variable.shape for variable in loaded.optimizer.variables])
        with insight.Recorder(tmp_path / f"{name}.jsonl", every=3) as record:
            loaded.optimizer.record = record
            fit(loaded, 1)
        assert insight.read(record.path).steps.tolist() == list(range(9, 17))
        recorded.optimizer.load_own_variables(store_of(loaded.optimizer))
        plain.optimizer.load_own_variables(store_of(loaded.optimizer))
        assert int(recorded.optimizer.iterations) == int(plain.optimizer.iterations) == 16
    assert sizes[0] == sizes[1]
    weights = [keras.ops.convert_to_numpy(variable) for variable in plain.optimizer.variables]
    recorded.optimizer.set_weights(weights)
    plain.optimizer.set_weights(weights)
    with pytest.raises(ValueError, match="zip"):
        recorded.optimizer.set_weights(weights[:-1])


def store_of(optimizer: Any) -> dict[str, Any]:
    """Return what is saved of an optimizer."""
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return store


def test_is_written_where_it_is_saved(tmp_path: Path) -> None:
    """A checkpoint finds the steps before it in the file; one that is loaded drops those after it."""
    record = insight.Recorder(tmp_path / "run.jsonl", every=100)
    made = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record))
    read: list[int] = []

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                getattr(made, "jax_state_sync", list)()  # as Keras' own callbacks do
                made.save_weights(tmp_path / "half.weights.h5")
                read.append(len(insight.read(record.path).steps))

    fit(made, 1, callbacks=[LogClipping(), Save()])
    assert read == [3]
    made.load_weights(tmp_path / "half.weights.h5")
    made.fit(X[30:], Y[30:], batch_size=10, shuffle=False, verbose=0, callbacks=[LogClipping()])
    record.close()
    same(insight.read(record.path), by_hand(20.0, 8), 20.0)


def test_backup_and_restore(tmp_path: Path) -> None:
    """A fit that goes on from a backup goes on in the file."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.epoch == 1 and batch == 4:
                raise KeyboardInterrupt

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    rule = uc.by_global_norm(20.0)
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        stopped = model(ClippedOptimizer(SGD(RATE), rule, record=record))
        with pytest.raises(KeyboardInterrupt):
            fit(stopped, 3, callbacks=[backup(), LogClipping(), Stop()])
    same(insight.read(record.path), by_hand(20.0, 12), 20.0)  # what fit had not read when it was interrupted, too
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        fit(model(ClippedOptimizer(SGD(RATE), rule, record=record)), 3, callbacks=[LogClipping(), backup()])
    same(insight.read(record.path), by_hand(20.0, 24), 20.0)


def test_fit_without_the_callback(tmp_path: Path) -> None:
    """It is refused at the first step; and where a step is compiled already, it says what is missing, and is right.

    Where nothing is compiled, as on PyTorch, nothing is missing.
    """
    record = insight.Recorder(tmp_path / "run.jsonl", every=5)
    if not COMPILED:
        fit(model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record)), 1, callbacks=[])
        record.close()
        same(insight.read(record.path), by_hand(20.0, 8), 20.0)
        return
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


def compiled_step(made: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    """Return a step in the compiled code of the backend, as its users write it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((made(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)

        return step
    if BACKEND == "torch":

        def step(x: Any, y: Any) -> None:
            made.zero_grad()
            ((made(x) - keras.ops.convert_to_tensor(y)) ** 2).mean().backward()
            optimizer.apply([v.value.grad for v in made.trainable_variables], made.trainable_variables)

        return step
    import jax

    @jax.jit
    def pure(trained: Any, others: Any, x: Any, y: Any) -> Any:
        def loss(trained: Any) -> Any:
            predicted, _ = made.stateless_call(trained, [], x)
            return ((predicted - y) ** 2).mean()

        return optimizer.stateless_apply(others, jax.grad(loss)(trained), trained)

    def step(x: Any, y: Any) -> None:
        new = pure([v.value for v in made.trainable_variables], [v.value for v in optimizer.variables], x, y)
        for variables, values in zip((made.trainable_variables, optimizer.variables), new, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    return step


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Whoever flushes in time loses nothing; who does not is told how many steps are missing."""
    for often in (5, 7):
        with warnings.catch_warnings(record=True) as caught, insight.Recorder(tmp_path / f"{often}", every=5) as record:
            warnings.simplefilter("always")
            optimizer = ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record)
            made = model("sgd")
            optimizer.build(made.trainable_variables)
            step = compiled_step(made, optimizer)
            for number in range(14):
                rows = slice(10 * (number % 8), 10 * (number % 8) + 10)
                step(X[rows], Y[rows])
                if (number + 1) % often == 0:
                    record.flush()
        told = [str(one.message) for one in caught if "are missing" in str(one.message)]
        found, norms = insight.read(record.path), np.linalg.norm(by_hand(20.0, 14), axis=1)
        if often == 5 or not COMPILED:
            assert not told
            same(found, by_hand(20.0, 14), 20.0)
        else:
            assert ["2 steps" in one for one in told] == [True, True]
            assert found.steps.tolist() == [*range(3, 8), *range(10, 15)]
            np.testing.assert_allclose(found.norms, norms[found.steps - 1], rtol=2e-5)


def test_loss_scale(tmp_path: Path) -> None:
    """Norms are those of unscaled gradients, and steps that overflow are none; on JAX it is refused in ``fit``."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5) as record:
        inside = ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record)
        made = model(LossScaleOptimizer(inside, initial_scale=8.0))
        if BACKEND == "jax":
            with pytest.raises(ValueError, match="LossScaleOptimizer would save what is recorded"):
                fit(made)
            return
        fit(made)
        made.save(tmp_path / "run.keras")
    same(insight.read(record.path), by_hand(20.0, 24), 20.0)
    assert int(keras.saving.load_model(tmp_path / "run.keras").optimizer.iterations) == 24


def test_frozen_variables_have_no_norm(tmp_path: Path) -> None:
    """A leaf without a gradient has none in the file, and the others keep their places."""
    with insight.Recorder(tmp_path / "run.jsonl", every=5, leaves="all") as record:
        optimizer = ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record=record)
        variables = [keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(2, "float32"))]
        optimizer.build(variables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.apply([None, keras.ops.convert_to_tensor([3.0, 4.0])], variables)
    found = insight.read(record.path)
    np.testing.assert_allclose(found.leaves, [[math.nan, 5.0]], rtol=1e-6)


def test_without_a_recorder_nothing_is_added() -> None:
    """The variables are those of an optimizer that cannot record; what is no recorder is refused."""
    plain = model(ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0)))
    plain.optimizer.build(plain.trainable_variables)
    assert not [variable.name for variable in plain.optimizer.variables if "record" in variable.name]
    with pytest.raises(TypeError, match="record must be a recorder"):
        ClippedOptimizer(SGD(RATE), uc.by_global_norm(20.0), record="run.jsonl")


def test_thresholds_are_logged() -> None:
    """The logs of an epoch hold the threshold of a rule that has one, with the largest norm."""
    made = model(ClippedOptimizer(SGD(RATE), uc.zclip(warmup=3)))
    logs = fit(made).history
    assert logs["clip/threshold"][-1] == float(made.optimizer.scalars()["clip/threshold"]) > 0
    assert logs["clip/norm_max"][-1] >= logs["clip/norm"][-1]
