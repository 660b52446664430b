"""TensorFlow 1 optimizers that clip, step by step against the loop that clips by hand and against TensorFlow's own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from uniclip.integrations.tensorflow import ClippedOptimizer, clip_gradients_by_norm

tf1 = tf.compat.v1
IDS = [1, 4, 1]  # a row that occurs twice
NAMES = ["rnn/kernel", "rnn/bias", "table", "unused"]
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "descent": lambda: tf1.train.GradientDescentOptimizer(0.05),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: tf1.train.AdamOptimizer(0.05),
}
RULES = {
    "clipped": uc.by_global_norm(0.5),
    "not clipped": uc.by_global_norm(1e6),
    "each leaf": uc.by_norm(0.3),
    "by value": uc.by_value(-0.1, 0.1),
    "parameters": uc.agc(0.05),
    "memory": uc.autoclip(50, window=4),
    "each remembered": uc.adagc(warmup=2),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "spikes": uc.skip_spikes(z=3.0, window=4, warmup=2),
    "chain": uc.chain(uc.autoclip(50, window=4), uc.by_global_norm(0.4), lambda grad: 0.5 * grad),
    "masked": uc.masked(uc.adagc(warmup=2), lambda path, leaf: path[0].startswith("rnn/")),
    "groups": uc.Rule(0.3, scope=uc.scopes.groups(lambda path, leaf: path[0].split("/")[0])),
}
SIZES = [1.0, 0.3, 2.0, 0.7, 300.0, 1.5]
"""What the loss is multiplied by at each step; one is a spike."""
SKIPPING = {"skip": math.nan, "spikes": 300.0}
"""The rules that skip a step, and what the loss is multiplied by there."""


def sizes_for(name: str) -> list[float]:
    """Return what the loss is multiplied by at each step under a rule."""
    return [SKIPPING.get(name, size) if size == 300 else size for size in SIZES]


def start() -> dict[str, np.ndarray]:
    """Draw the weights before the first step."""
    rng = np.random.default_rng(0)
    shapes = [(4, 3), (3,), (6, 4), (2,)]
    return {name: rng.normal(size=shape).astype("float32") for name, shape in zip(NAMES, shapes, strict=True)}


def loss_of(variables: list[Any], size: Any) -> Any:
    """Make a loss with dense, sparse and no gradients."""
    kernel, bias, table, _ = variables
    return size * tf.reduce_sum(tf.tanh(tf.nn.embedding_lookup(table, IDS) @ kernel + bias) ** 2)


class Graph:
    """A model in a TensorFlow 1 graph and its session."""

    def __init__(self, make: Callable[[], Any], *, resource: bool = True) -> None:
        with tf.Graph().as_default() as self.graph:
            self.size = tf1.placeholder(tf.float32, [])
            self.variables = [tf1.get_variable(n, initializer=v, use_resource=resource) for n, v in start().items()]
            self.count = tf1.train.get_or_create_global_step()
            self.loss, self.optimizer = loss_of(self.variables, self.size), make()
            self.build()
            self.saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
        self.session = tf1.Session(graph=self.graph)
        self.session.run(init)

    def build(self) -> None:
        """Make the train op."""
        self.train = self.optimizer.minimize(self.loss, self.count, self.variables)
        self.fetches = self.optimizer.scalars()

    def step(self, size: float) -> Any:
        """Take a step; return what is logged."""
        return self.session.run([self.train, self.fetches], {self.size: size})[1]

    def values(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds."""
        with self.graph.as_default():
            variables = tf1.global_variables()
        return dict(zip([v.name for v in variables], self.session.run(variables), strict=True))


class Plain(Graph):
    """The same without uniclip in its graph: gradients come out, and clipped ones go in."""

    def build(self) -> None:
        """Compute, and apply what is fed."""
        gvs = self.optimizer.compute_gradients(self.loss, self.variables)
        self.out = [g for g, _ in gvs if g is not None]
        self.fed = [fed_like(g) for g in self.out]
        self.train = self.optimizer.apply_gradients([*zip(self.fed, self.variables, strict=False), gvs[-1]], self.count)

    def step_by_hand(self, size: float, rule: Any, state: Any) -> tuple[Any, Any]:
        """Clip in eager code, then have the plain optimizer take the step."""
        loss, grads, params = self.session.run([self.loss, self.out, self.variables], {self.size: size})
        grads = {name: eager(grad) for name, grad in zip(NAMES, grads, strict=False)}
        params = {name: tf.constant(value) for name, value in zip(NAMES, params, strict=True)}
        clipped, state, report = rule.update(grads, state, params, loss=tf.constant(loss))
        if report.skipped is None or not bool(report.skipped):
            feed = {}
            for placeholder, name in zip(self.fed, NAMES, strict=False):
                feed |= fed(placeholder, clipped[name])
            self.session.run(self.train, feed)
        return state, report


def fed_like(grad: Any) -> Any:
    """Return a placeholder for a gradient."""
    if isinstance(grad, tf.IndexedSlices):
        values, indices = (tf1.placeholder(t.dtype, t.shape) for t in (grad.values, grad.indices))
        return tf.IndexedSlices(values, indices, tf.constant(start()["table"].shape))
    return tf1.placeholder(grad.dtype, grad.shape)


def fed(placeholder: Any, grad: Any) -> dict[Any, Any]:
    """Return what to feed to the placeholder of a gradient."""
    if isinstance(placeholder, tf.IndexedSlices):
        return {placeholder.values: grad.values.numpy(), placeholder.indices: grad.indices.numpy()}
    return {placeholder: grad.numpy()}


def eager(grad: Any) -> Any:
    """Return a gradient that a session returned as eager tensors."""
    if hasattr(grad, "indices"):
        return tf.IndexedSlices(*[tf.constant(part) for part in (grad.values, grad.indices, grad.dense_shape)])
    return tf.constant(grad)


def first_state(rule: Any) -> Any:
    """Return the state before the first step, of the three variables that get gradients."""
    return rule.init({name: tf.constant(start()[name]) for name in NAMES[:3]})


def close(one: Any, other: Any) -> None:
    """Compare what is in variables; a graph and eager code round differently, and training widens that."""
    for name, value in other.items():
        np.testing.assert_allclose(one[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def same_state(held: list[Any], state: list[Any]) -> None:
    """Compare the variables of a state, of which one may hold a row, with what is remembered by hand."""
    ours, theirs = (np.concatenate([[], *map(np.ravel, arrays)]) for arrays in (held, state))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def clipped_by(rule: Any, optimizer: str = "adam") -> Callable[[], Any]:
    """Return a function that makes an optimizer that clips."""
    return lambda: ClippedOptimizer(OPTIMIZERS[optimizer](), rule)


@cache
def by_hand(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    """Return what is in the variables, logged and remembered after each step of clipping by hand."""
    model, rule, seen = Plain(OPTIMIZERS["adam"]), RULES[name], []
    state = first_state(rule)
    for size in sizes_for(name):
        state, report = model.step_by_hand(size, rule, state)
        seen.append((model.values(), report.scalars(), state))
    return seen


REFERENCES = ["clipped", "parameters", "memory"]
"""The rules that are run on variables from before resource variables."""


@pytest.mark.parametrize(
    ("name", "resource"), [*[(name, True) for name in RULES], *[(name, False) for name in REFERENCES]]
)
def test_as_by_hand(name: str, resource: bool) -> None:
    """In a session, weights, slots, steps, state and logs are those of clipping by hand."""
    model = Graph(clipped_by(RULES[name]), resource=resource)
    for size, (values, logged, state) in zip(sizes_for(name), by_hand(name), strict=True):
        close(model.step(size), logged)
        now = model.values()
        close(now, values)
        held = [value for key, value in now.items() if "/clip/" in key]
        same_state(held, tf.nest.flatten(state))
    assert now["global_step:0"] == len(SIZES) - (name in SKIPPING)
    assert (len(held) > 0) == RULES[name].memory


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*[(name, lambda f: f) for name in RULES], *[(name, tf.function) for name in ("clipped", "chain", "spikes")]],
    ids=[*[f"{name}-eager" for name in RULES], *[f"{name}-function" for name in ("clipped", "chain", "spikes")]],
)
def test_in_current_code(name: str, compiled: Any) -> None:
    """Eagerly and in tf.function it does as in a session."""
    variables = [tf.Variable(value, name=key) for key, value in start().items()]
    count, optimizer = tf.Variable(0, dtype=tf.int64), ClippedOptimizer(OPTIMIZERS["adam"](), RULES[name])

    @compiled
    def step(size: Any) -> Any:
        optimizer.minimize(lambda: loss_of(variables, size), count, variables)
        return optimizer.scalars()

    for size, (values, logged, _) in zip(sizes_for(name), by_hand(name), strict=True):
        close(step(tf.constant(size)), logged)
        close({v.name: v.numpy() for v in variables}, {key: values[key] for key in [f"{n}:0" for n in NAMES]})
        assert count.numpy() == values["global_step:0"]


@pytest.mark.parametrize("name", SKIPPING)
def test_references_cannot_be_skipped(name: str) -> None:
    """Where tf.cond cannot change variables from before resource variables, the error says what to do."""
    with pytest.raises(ValueError, match="make them with use_resource=True"):
        Graph(clipped_by(RULES[name]), resource=False)


def test_another_optimizer() -> None:
    """What is inside makes no difference."""
    rule = RULES["memory"]
    ours, theirs, state = Graph(clipped_by(rule, "momentum")), Plain(OPTIMIZERS["momentum"]), first_state(rule)
    for size in SIZES:
        ours.step(size)
        state, _ = theirs.step_by_hand(size, rule, state)
    close(ours.values(), theirs.values())


def old_idiom(name: str, limit: float, gvs: list[Any]) -> list[Any]:
    """Clip as TensorFlow 1 code did."""
    grads, variables = zip(*gvs, strict=True)
    if name == "clip_by_global_norm":
        clipped = tf.clip_by_global_norm(grads, limit)[0]
    elif name == "clip_by_norm":
        clipped = [g if g is None else tf.clip_by_norm(g, limit) for g in grads]
    else:
        clipped = [g if g is None else tf.clip_by_value(tf.convert_to_tensor(g), -limit, limit) for g in grads]
    return list(zip(clipped, variables, strict=True))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("clip_by_global_norm", lambda optimizer: clip_gradients_by_norm(optimizer, 0.2)),
        ("clip_by_norm", lambda optimizer: ClippedOptimizer(optimizer, uc.by_norm(0.2))),
        ("clip_by_value", lambda optimizer: ClippedOptimizer(optimizer, uc.by_value(-0.2, 0.2))),
    ],
)
def test_migration(name: str, make: Any) -> None:
    """The one line replaces each old idiom: the same weights after 50 steps.

    To 1e-5: TensorFlow multiplies by clip · min(1/norm, 1/clip) where uniclip multiplies by clip/norm. No row occurs
    twice here: TensorFlow's norms would not add such rows up first.
    """

    class Old(Graph):
        def build(self) -> None:
            gvs = old_idiom(name, 0.2, self.optimizer.compute_gradients(self.loss, self.variables))
            self.train, self.fetches = self.optimizer.apply_gradients(gvs, self.count), {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "IDS", [1, 4, 3])
        old, new = Old(OPTIMIZERS["momentum"]), Graph(lambda: make(OPTIMIZERS["momentum"]()))
    shares = []
    for step in range(50):
        old.step(1 + step % 3)
        shares.append(new.step(1 + step % 3).get("clip/share", 1))
    assert max(shares) > 0
    for name_, value in old.values().items():
        np.testing.assert_allclose(new.values()[name_], value, rtol=1e-5, atol=1e-6)


class Spy(tf1.train.GradientDescentOptimizer):
    """Descent that keeps what it is given."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep, and apply."""
        self.given, self.rest = list(grads_and_vars), (args, kwargs)
        return super().apply_gradients(self.given, *args, **kwargs)


def test_what_the_inner_optimizer_gets() -> None:
    """Sparse gradients stay sparse, absent ones keep their place, and step and name are handed on."""
    with tf.Graph().as_default() as graph:
        variables = [tf1.get_variable(name, initializer=value) for name, value in start().items()]
        count, spy = tf1.train.get_or_create_global_step(), Spy(0.1)
        optimizer = ClippedOptimizer(spy, uc.by_global_norm(0.1))
        train = optimizer.minimize(loss_of(variables, 1.0), count, variables, name="training")
        assert [type(g).__name__ for g, _ in spy.given] == [
            "SymbolicTensor",
            "SymbolicTensor",
            "IndexedSlices",
            "NoneType",
        ]
        assert [v.name for _, v in spy.given] == [v.name for v in variables]
        assert spy.rest == ((count, "training"), {})
        assert train is graph.get_operation_by_name("training")
        assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [train]
        ops = {op.type for op in graph.get_operations()}
        assert "ResourceScatterAdd" in ops
        table = [
            t for op in graph.get_operations() for t in op.outputs if t.shape == (6, 4) and "clip" in t.name.lower()
        ]
        assert table == []


def test_clipped_once() -> None:
    """compute_gradients does not clip; what is changed and applied is clipped once."""
    with tf.Graph().as_default(), tf1.Session() as session:
        w, spy = tf1.get_variable("w", initializer=[0.0, 0.0]), Spy(1.0)
        optimizer = ClippedOptimizer(spy, uc.Rule(1.0, curve=uc.curves.soft))  # with which once and twice differ
        gvs = optimizer.compute_gradients(tf.reduce_sum(w * [1.5, 2.0]), [w])
        train = optimizer.apply_gradients([(2 * g, v) for g, v in gvs])
        session.run(tf1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(gvs[0][0]), [1.5, 2.0])
        session.run(train)
        np.testing.assert_allclose(session.run(w), -np.asarray([3.0, 4.0]) / 6, rtol=1e-6)


def test_the_name_of_the_old_decorator() -> None:
    """clip_gradients_by_norm clips by the global norm."""
    optimizer = clip_gradients_by_norm(OPTIMIZERS["descent"](), 5.0)
    assert isinstance(optimizer, ClippedOptimizer)
    assert optimizer.rule == uc.by_global_norm(5.0)
    with pytest.raises(ValueError, match=r"clip_norm must be 0 or more.*-1"):
        clip_gradients_by_norm(OPTIMIZERS["descent"](), -1.0)


def test_no_gradients() -> None:
    """Where there is nothing to clip the errors are those of the optimizer inside."""
    with tf.Graph().as_default():
        w, optimizer = tf1.get_variable("w", initializer=[1.0]), ClippedOptimizer(OPTIMIZERS["adam"](), RULES["memory"])
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.apply_gradients([(None, w)])
        with pytest.raises(ValueError, match="No variables provided"):
            optimizer.apply_gradients([])
        with pytest.raises(ValueError, match="No gradients provided for any variable, check your graph"):
            optimizer.minimize(tf.constant(1.0), var_list=[w])


MEMORIES = ["each remembered", "chain"]


@pytest.mark.parametrize("name", MEMORIES)
def test_save_and_restore(name: str, tmp_path: Path) -> None:
    """A Saver's file, restored in a new graph, goes on bit by bit; without the state it does not."""
    rule = RULES[name]
    whole = Graph(clipped_by(rule))
    for size in SIZES[:4]:
        whole.step(size)
    with whole.graph.as_default():
        path = whole.saver.save(whole.session, str(tmp_path / "model"))
    resumed, forgetful = Graph(clipped_by(rule)), Graph(clipped_by(rule))
    with resumed.graph.as_default():
        resumed.saver.restore(resumed.session, path)
    with forgetful.graph.as_default():
        others = [v for v in tf1.global_variables() if "/clip/" not in v.name]
        tf1.train.Saver(others).restore(forgetful.session, path)
    for size in SIZES[4:]:
        for model in (whole, resumed, forgetful):
            model.step(size)
    for key, value in whole.values().items():
        np.testing.assert_array_equal(resumed.values()[key], value, strict=True)
    differ = [key for key, value in whole.values().items() if not np.array_equal(forgetful.values()[key], value)]
    assert "rnn/kernel:0" in differ


def test_a_checkpoint_from_before() -> None:
    """Names are those of the optimizer inside: what was saved without clipping loads."""
    plain = Plain(OPTIMIZERS["adam"])
    assert set(Graph(clipped_by(RULES["skip"])).values()) == set(plain.values())
    added = set(Graph(clipped_by(RULES["memory"])).values()) - set(plain.values())
    assert added == {"Adam/clip/norms:0", "Adam/clip/count:0"}


@pytest.mark.parametrize(
    "rule", [uc.adagc(), uc.chain(uc.by_value(-1.0, 1.0), uc.percentile_clipping(50, 4))], ids=repr
)
def test_a_saver_knows_other_variables(tmp_path: Path, rule: Any) -> None:
    """A checkpoint with the norms of as many other variables has no norms of these: the error names them."""

    def saver(trained: str, action: Any) -> list[str]:
        with tf.Graph().as_default(), tf1.Session() as session:
            weights = {name: tf1.get_variable(f"{name}/kernel", initializer=[1.0, 2.0]) for name in "abc"}
            chosen = [weights[name] for name in trained]
            optimizer = ClippedOptimizer(tf1.train.GradientDescentOptimizer(1.0), rule)
            optimizer.minimize(tf.add_n([tf.reduce_sum(w) for w in chosen]), var_list=chosen)
            session.run(tf1.global_variables_initializer())
            action(tf1.train.Saver(), session)
            return [v.op.name for v in optimizer.variables()]

    path = str(tmp_path / "model")
    names = saver("ab", lambda saver, session: saver.save(session, path))
    assert any(name.endswith("/b/kernel") and "/clip/" in name for name in names)
    saver("ab", lambda saver, session: saver.restore(session, path))
    with pytest.raises(tf.errors.NotFoundError, match=r"Key GradientDescent/clip/.*/c/kernel not found"):
        saver("ac", lambda saver, session: saver.restore(session, path))


def test_object_checkpoints(tmp_path: Path) -> None:
    """Eager code saves it in a tf.train.Checkpoint: weights, slots and state; one of the optimizer inside loads."""

    def make(rule: Any) -> tuple[Any, Any, Any]:
        variables, optimizer = [tf.Variable(value) for value in start().values()], OPTIMIZERS["adam"]()
        optimizer = optimizer if rule is None else ClippedOptimizer(optimizer, rule)
        return variables, optimizer, tf.train.Checkpoint(optimizer=optimizer, variables=variables)

    def train(model: Any, sizes: list[float]) -> Any:
        for size in sizes:
            model[1].minimize(lambda: loss_of(model[0], size), var_list=model[0])
        return [v.numpy() for v in model[0]]

    for before, after in ((RULES["memory"], RULES["memory"]), (None, RULES["not clipped"])):
        one, other = make(before), make(after)
        train(one, SIZES[:4])
        other[2].restore(one[2].save(str(tmp_path / "model"))).assert_existing_objects_matched()
        for a, b in zip(train(one, SIZES[4:]), train(other, SIZES[4:]), strict=True):
            np.testing.assert_array_equal(a, b)


def model_fn(features: Any, params: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Build a model as an Estimator's model_fn did: a loss, a train op, what to log."""
    w = tf1.get_variable("w", initializer=[5.0, -3.0])
    loss = tf.reduce_mean((features @ tf.expand_dims(w, 1)) ** 2)
    optimizer = ClippedOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), params["rule"])
    train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
    logged = optimizer.scalars()
    for name, value in logged.items():
        tf1.summary.scalar(name, value)
    return loss, train_op, logged


def estimate(folder: Path, steps: int, rule: Any) -> list[Any]:
    """Train up to a step in a monitored session, which goes on from what is in the folder."""
    seen = []
    with tf.Graph().as_default():
        tf1.train.create_global_step()
        features = tf.constant(np.random.default_rng(0).normal(size=(8, 2)), tf.float32)
        loss, train_op, logged = model_fn(features, {"rule": rule})
        hooks = [tf1.train.StopAtStepHook(last_step=steps), tf1.train.LoggingTensorHook(logged, every_n_iter=1)]
        settings = {"save_checkpoint_steps": 5, "save_summaries_steps": 1, "log_step_count_steps": None}
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(folder), hooks=hooks, **settings) as session:
            while not session.should_stop():
                seen.append(session.run([loss, logged, train_op])[:2])
    return seen


def test_as_an_estimator(tmp_path: Path) -> None:
    """As a train_op in a monitored session it counts steps, logs, is saved and goes on."""
    whole = estimate(tmp_path / "whole", 10, RULES["memory"])
    parts = [estimate(tmp_path / "parts", steps, RULES["memory"]) for steps in (5, 10)]
    assert [len(part) for part in parts] == [5, 5]
    tf.nest.map_structure(np.testing.assert_array_equal, [*parts[0], *parts[1]], whole)
    (file,) = (tmp_path / "whole").glob("events*")
    events = [(e.step, v) for e in tf1.train.summary_iterator(str(file)) for v in e.summary.value]
    norms = [v.simple_value for _, v in events if v.tag == "clip/norm"]
    np.testing.assert_array_equal(norms, [logged["clip/norm"] for _, logged in whole])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_steps(optimizer: str) -> None:
    """A step on NaN changes nothing that a checkpoint holds, also if it is the first one."""
    model = Graph(clipped_by(uc.autoclip(50, window=4, nonfinite="skip"), optimizer))
    for size in [math.nan, 1.0, 2.0, math.inf]:
        before = model.values()
        seen = model.step(size)
        same = {key: np.array_equal(value, before[key]) for key, value in model.values().items()}
        assert seen["clip/skipped"] == (not math.isfinite(size))
        assert all(same.values()) == (not math.isfinite(size))
        assert same["global_step:0"] == (not math.isfinite(size))


def test_version_one_behavior() -> None:
    """With TensorFlow 2's behavior off, as old programs have it, steps are skipped on variables of the old kind."""
    program = """
import math, sys, tensorflow as tf, uniclip as uc
from uniclip.integrations.tensorflow import ClippedOptimizer
tf1 = tf.compat.v1
tf1.disable_v2_behavior()
w = tf1.get_variable("w", initializer=[3.0, 4.0])
assert not tf1.resource_variables_enabled() and not tf1.control_flow_v2_enabled() and w.dtype != tf.float32
x, count = tf1.placeholder(tf.float32, []), tf1.train.get_or_create_global_step()
optimizer = ClippedOptimizer(tf1.train.AdamOptimizer(0.5), uc.autoclip(50, window=4, nonfinite="skip"))
train, logged = optimizer.minimize(x * tf.reduce_sum(w**2) / 2, count), optimizer.scalars()
assert tf1.get_collection("train_op") == [train]
names = [v.name for v in tf1.global_variables()]
assert {"Adam/clip/norms:0", "beta1_power:0", "w/Adam:0"} < set(names), names
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    for x_, skipped, steps in [(1.0, 0, 1), (math.nan, 1, 1), (2.0, 0, 2)]:
        before = session.run(tf1.global_variables())
        seen = session.run([train, logged], {x: x_})[1]
        after = session.run(tf1.global_variables())
        assert seen["clip/skipped"] == skipped and session.run(count) == steps, seen
        assert all((a == b).all() for a, b in zip(before, after)) == bool(skipped)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_loss_scale_outside(scale: Any) -> None:
    """Inside of MixedPrecisionLossScaleOptimizer the gradients are unscaled; a step that it skips teaches nothing."""

    def outside() -> Any:
        clipped = ClippedOptimizer(OPTIMIZERS["momentum"](), RULES["memory"])
        return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(clipped, scale)

    class Scaled(Graph):
        def build(self) -> None:
            self.train, self.fetches = self.optimizer.minimize(self.loss, self.count, self.variables), {}

    scaled, plain = Scaled(outside), Graph(clipped_by(RULES["memory"], "momentum"))
    for size in SIZES:
        scaled.step(size)
        plain.step(size)
    close(scaled.values(), plain.values())
    if scale == "dynamic":
        before = scaled.values()
        scaled.step(math.inf)
        changed = {key for key, value in scaled.values().items() if not np.array_equal(value, before[key])}
        assert changed == {"current_loss_scale:0", "good_steps:0"}
        with scaled.graph.as_default(), pytest.raises(ValueError, match="a dynamic loss scale has one"):
            scaled.optimizer._optimizer.scalars()


def test_one_memory() -> None:
    """All train ops of one optimizer share one memory; a rule of each leaf refuses those of other variables."""
    with tf.Graph().as_default(), tf1.Session() as session:
        u, v = (tf1.get_variable(name, initializer=[1.0]) for name in "uv")
        optimizer = ClippedOptimizer(OPTIMIZERS["descent"](), uc.autoclip(100, window=4))
        first = optimizer.minimize(3 * u, var_list=[u])
        second = optimizer.minimize(30 * v, var_list=[v])
        assert [x.name for x in optimizer.variables()] == [
            "GradientDescent/clip/count:0",
            "GradientDescent/clip/norms:0",
        ]
        session.run(tf1.global_variables_initializer())
        for train in (first, second):
            session.run(train)
        np.testing.assert_array_equal(session.run(optimizer.variables()[1]), [[30, 3, -1, -1]])
        optimizer = ClippedOptimizer(OPTIMIZERS["descent"](), RULES["each remembered"])
        optimizer.minimize(3 * u, var_list=[u])
        optimizer.minimize(4 * u, var_list=[u])
        with pytest.raises(ValueError, match="remembers each variable by itself, and u, v had a gradient in one"):
            optimizer.minimize(30 * v, var_list=[v])


def test_eager_variables_without_names() -> None:
    """Variables that share a name are told apart, by name and in a state that knows them by their order."""
    u, v = tf.Variable([3.0]), tf.Variable([4.0])
    optimizer = ClippedOptimizer(OPTIMIZERS["descent"](), RULES["each remembered"])
    optimizer.apply_gradients([(tf.constant([6.0]), u), (tf.constant([8.0]), v)])
    assert {name: float(n) for name, n in optimizer.report.norms.items()} == {"Variable": 6, "Variable_1": 8}
    for pairs in ([(tf.constant([6.0]), u), (None, v)], [(tf.constant([8.0]), v)]):
        with pytest.raises(ValueError, match="remembers each variable by itself, and"):
            optimizer.apply_gradients(pairs)


def test_groups_that_come_and_go() -> None:
    """A rule that remembers groups needs a gradient in each of them: a state of one is not that of another."""
    u, v = tf.Variable([3.0], name="u"), tf.Variable([4.0], name="v")
    rule = uc.Rule(uc.limits.Ema(1.01, 0.9), scope=uc.scopes.groups(lambda path, leaf: path[0]))
    optimizer = ClippedOptimizer(OPTIMIZERS["descent"](), rule)
    optimizer.apply_gradients([(tf.constant([1.0]), u)])
    with pytest.raises(ValueError, match=r"group 'u', group 'v' had a gradient at one step and none at another"):
        optimizer.apply_gradients([(tf.constant([100.0]), v)])


def test_paths() -> None:
    """A rule sees (name of the variable,), and reports by name."""
    seen = set()
    model = Graph(clipped_by(uc.masked(uc.by_norm(0.1), lambda path, leaf: bool(seen.add(path)) or path[0] != "table")))
    assert seen == {(name,) for name in NAMES[:3]}
    assert model.optimizer.report.norms.keys() == {"rnn/kernel", "rnn/bias", "table"}
    assert model.optimizer.report.norms["table"] is None


def test_what_is_handed_on() -> None:
    """Name, locking, slots and variables are those of the optimizer inside."""
    with tf.Graph().as_default():
        w, inner = (
            tf1.get_variable("w", initializer=[1.0]),
            tf1.train.MomentumOptimizer(0.1, 0.9, use_locking=True, name="M"),
        )
        optimizer = ClippedOptimizer(inner, RULES["not clipped"])
        optimizer.minimize(w, var_list=[w])
        assert (optimizer.get_name(), optimizer._use_locking) == ("M", True)
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(w, "momentum") is inner.get_slot(w, "momentum") is not None
        assert optimizer.variables() == inner.variables() != []


def test_no_second_norm() -> None:
    """The logged numbers follow from those that clipping measured."""
    model = Graph(clipped_by(uc.by_global_norm(1.0)))
    with model.graph.as_default():
        before = len(model.graph.get_operations())
        model.optimizer.scalars()
        added = model.graph.get_operations()[before:]
    gradients = {tuple(start()[name].shape) for name in NAMES} | {(3, 4)}
    assert added
    assert all(tuple(t.shape) not in gradients for op in added for t in op.inputs)


class LossLimit(uc.Limit):
    """Allow as much as the loss is."""

    needs = frozenset({"loss"})

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        """Ask for the loss."""
        return math.inf if context.loss is None else context.loss, state


def test_the_loss() -> None:
    """A rule sees the loss of minimize (of a vector, its sum), or one that is set for the next step only."""
    w = tf.Variable([1.0, 2.0])
    optimizer = ClippedOptimizer(OPTIMIZERS["descent"](), uc.Rule(LossLimit()))

    def limit() -> float:
        return float(optimizer.report.limits)

    optimizer.minimize(lambda: 3 * w, var_list=[w])
    assert limit() == 9
    optimizer.apply_gradients([(tf.constant([3.0, 4.0]), w)])
    assert limit() == np.finfo(np.float32).max
    optimizer.loss = tf.constant(5.0)
    optimizer.apply_gradients([(tf.constant([3.0, 4.0]), w)])
    assert limit() == 5
    assert optimizer.loss is None
    with tf.Graph().as_default(), tf1.Session() as session:
        v = tf1.get_variable("v", initializer=[1.0, 2.0])
        optimizer.minimize(2 * v, var_list=[v])
        session.run(tf1.global_variables_initializer())
        assert session.run(optimizer.report.limits) == 6


def test_dtypes() -> None:
    """Gradients of several dtypes are clipped together, and each keeps its own."""
    with tf.Graph().as_default(), tf1.Session() as session:
        u, v = (
            tf1.get_variable("u", initializer=np.float64([0.0])),
            tf1.get_variable("v", initializer=np.float16([0.0])),
        )
        optimizer = ClippedOptimizer(tf1.train.GradientDescentOptimizer(1.0), uc.autoclip(50, window=4))
        train = optimizer.apply_gradients([(np.float64([3.0]), u), (np.float16([4.0]), v)])
        session.run(tf1.global_variables_initializer())
        session.run(train)
        assert session.run(optimizer.report.norms) == 5
        assert [float(x[0]) for x in session.run([u, v])] == [-3, -4]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "keras": (
        lambda: ClippedOptimizer(keras.optimizers.SGD(), RULES["clipped"]),
        TypeError,
        r"uniclip\.integrations\.keras",
    ),
    "a class": (lambda: ClippedOptimizer(tf1.train.AdamOptimizer, RULES["clipped"]), TypeError, "an object of one"),
    "nothing": (
        lambda: ClippedOptimizer(None, RULES["clipped"]),
        TypeError,
        r"tf\.compat\.v1\.train\.Optimizer, got None",
    ),
    "a number": (lambda: ClippedOptimizer(OPTIMIZERS["adam"](), 1.0), TypeError, r"a rule, such as uc\.by_global_norm"),
    "twice": (
        lambda: clip_gradients_by_norm(clip_gradients_by_norm(OPTIMIZERS["adam"](), 1.0), 1.0),
        ValueError,
        "wrap it once",
    ),
    "a loss scale inside": (
        lambda: ClippedOptimizer(
            tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(OPTIMIZERS["adam"](), 8.0), RULES["clipped"]
        ),
        ValueError,
        r"MixedPrecisionLossScaleOptimizer\(ClippedOptimizer\(optimizer, rule\), loss_scale\)",
    ),
    "no report yet": (
        lambda: ClippedOptimizer(OPTIMIZERS["adam"](), RULES["clipped"]).scalars(),
        ValueError,
        r"after minimize\(\)",
    ),
}


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(wrong: Any, error: Any, message: str) -> None:
    """Each error names the fix."""
    with pytest.raises(error, match=message):
        wrong()


def test_refuses_a_variable_twice() -> None:
    """The norm would be of two gradients that are one."""
    w, optimizer = tf.Variable([1.0], name="w"), ClippedOptimizer(OPTIMIZERS["descent"](), RULES["clipped"])
    with pytest.raises(ValueError, match="w:0 occurs twice in grads_and_vars: give the sum of its gradients once"):
        optimizer.apply_gradients([(tf.constant([1.0]), w), (tf.constant([2.0]), w)])
