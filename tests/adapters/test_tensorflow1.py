"""TensorFlow 1 optimizers that clip: in sessions, eagerly, and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from adapters.contract import Adapter, equal, trained, variants
from kit.training import MOMENTUM, RATE, Arrays, Batch, batches, weights
from uniclip.integrations.tensorflow import ClippedOptimizer, clip_gradients_by_norm

tf1 = tf.compat.v1


class InSession(Adapter):
    """A train op in a graph, run in a session, and saved by a Saver."""

    recorded = "tensorflow1"
    takes = frozenset({"loss", "scalars", "save", "state", "bits"})
    resource = True

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Build the graph."""
        self.plain = self.make()
        self.clipped = None if rule is None else ClippedOptimizer(self.plain, rule)
        with tf.Graph().as_default() as self.graph:
            self.model = {
                name: tf1.get_variable(name, initializer=array, use_resource=self.resource)
                for name, array in weights().items()
            }
            self.fed = Batch(tf1.placeholder(tf.int32, [8]), tf1.placeholder(tf.float32, [8, 2]))
            self.count = tf1.train.create_global_step()
            loss = self.loss(self.fed)
            self.train = self.outside(self.clipped or self.plain).minimize(loss, self.count)
            self.fetches = self.shown()
            self.saver, init = tf1.train.Saver(), tf1.global_variables_initializer()
        self.session = tf1.Session(graph=self.graph)
        self.session.run(init)
        self.seen: dict[str, Any] = {}

    def make(self) -> Any:
        """Return the inner optimizer."""
        return tf1.train.MomentumOptimizer(RATE, MOMENTUM)

    def outside(self, optimizer: Any) -> Any:
        """Return the wrapper around the clipped optimizer."""
        return optimizer

    def shown(self) -> dict[str, Any]:
        """Return the tensors that are fetched for a logger."""
        return {} if self.clipped is None else self.clipped.scalars()

    def loss(self, batch: Batch) -> Any:
        """Return the loss of a batch; the slots of Momentum are for dense gradients only."""
        return self.loss_of_rows(tf.gather(1.0 * self.model["table"], batch.ids), batch)

    def loss_of_rows(self, rows: Any, batch: Batch) -> Any:
        """Return the loss of a batch, from the looked-up rows of the table."""
        return tf.reduce_mean((rows @ self.model["w"] + self.model["b"] - batch.targets) ** 2)

    def step(self, batch: Batch) -> None:
        """Run the train op."""
        _, self.seen = self.session.run(
            [self.train, self.fetches], dict(zip(self.fed, batch, strict=True))
        )

    def weights(self) -> Arrays:
        """Return the weights."""
        return self.session.run(self.model)

    def inner(self) -> list[np.ndarray]:
        """Return the slots, and the step count."""
        slots = (self.plain.get_slot(variable, "momentum") for variable in self.model.values())
        return self.session.run([self.count, *(slot for slot in slots if slot is not None)])

    def scalars(self) -> dict[str, float]:
        """Return the fetched scalars."""
        return {name: float(value) for name, value in self.seen.items()}

    def save(self, folder: Path) -> None:
        """Save all variables of the graph."""
        with self.graph.as_default():
            self.saver.save(self.session, str(folder / "model"))

    def load(self, folder: Path) -> None:
        """Load all variables of the graph."""
        with self.graph.as_default():
            self.saver.restore(self.session, str(folder / "model"))

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the rule."""
        return self.clipped.rule_state_dict(self.session)

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state in a finalized graph."""
        self.graph.finalize()
        self.clipped.load_rule_state_dict(saved, self.session)


class Sparse(InSession):
    """A table with sparse gradients and duplicate rows."""

    takes = frozenset({"loss", "scalars", "rows"})
    optimizer = "sgd"

    def make(self) -> Any:
        """Return plain descent, which sums duplicate rows."""
        return tf1.train.GradientDescentOptimizer(RATE)

    def loss(self, batch: Batch) -> Any:
        """Return the loss with a lookup."""
        return self.loss_of_rows(tf.nn.embedding_lookup(self.model["table"], batch.ids), batch)


class Scaled(InSession):
    """A loss scale around the clipped optimizer."""

    takes = frozenset({"loss", "state", "scale"})

    def outside(self, optimizer: Any) -> Any:
        """Scale by 1024 at first."""
        scale = tf1.mixed_precision.DynamicLossScale(initial_loss_scale=1024.0, increment_period=2)
        return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale)

    def shown(self) -> dict[str, Any]:
        """Return nothing: the report is inside the branch for finite gradients."""
        return {}


class OldVariables(InSession):
    """Variables without resources."""

    takes = frozenset({"loss", "scalars", "save"})
    resource = False


class OldBranches(InSession):
    """Branches from before TensorFlow 2."""

    takes = frozenset({"loss", "scalars"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Build the graph with the old ``tf.cond``."""
        tf1.disable_control_flow_v2()
        try:
            super().start(uc, rule, **options)
        finally:
            tf1.enable_control_flow_v2()


class Eager(InSession):
    """The optimizer without a session, saved by a Checkpoint."""

    takes = frozenset({"loss", "scalars", "save", "bits"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Create variables."""
        self.plain = self.make()
        self.clipped = None if rule is None else ClippedOptimizer(self.plain, rule)
        self.model = {name: tf.Variable(array, name=name) for name, array in weights().items()}
        self.count = tf.Variable(0, dtype=tf.int64)
        held = {"optimizer": self.clipped or self.plain, "count": self.count, **self.model}
        self.checkpoint = tf.train.Checkpoint(**held)
        self.once = self.compiled(self.train)
        self.seen = {}

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as it is."""
        return function

    def train(self, ids: Any, targets: Any) -> dict[str, Any]:
        """Take a step."""
        optimizer = self.clipped or self.plain
        optimizer.minimize(
            lambda: self.loss(Batch(ids, targets)), self.count, list(self.model.values())
        )
        return self.shown()

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.seen = self.once(*map(tf.constant, batch))

    def weights(self) -> Arrays:
        """Return the weights."""
        return {name: variable.numpy() for name, variable in self.model.items()}

    def inner(self) -> list[np.ndarray]:
        """Return the slots, or zeros before they exist, and the step count."""
        made = {
            name: self.plain.get_slot(variable, "momentum") for name, variable in self.model.items()
        }
        zeros = {name: np.zeros_like(array) for name, array in weights().items()}
        return [
            self.count.numpy(),
            *(zeros[name] if slot is None else slot.numpy() for name, slot in made.items()),
        ]

    def save(self, folder: Path) -> None:
        """Write an object-based checkpoint."""
        self.checkpoint.write(str(folder / "model"))

    def load(self, folder: Path) -> None:
        """Read the checkpoint; later objects are restored when they are created."""
        self.checkpoint.read(str(folder / "model"))


class InFunction(Eager):
    """A step in ``tf.function``."""

    takes = frozenset({"loss", "scalars"})

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the traced function."""
        return tf.function(function)


VARIANTS: dict[type[InSession], tuple[str, ...] | None] = {
    InSession: (
        "by_global_norm",
        "agc",
        "autoclip",
        "adagc",
        "skip",
        "zero",
        "skip_spikes",
        "chain",
    ),
    Sparse: ("by_norm", "adagc", "skip"),
    Scaled: ("by_norm",),
    OldVariables: ("by_global_norm", "adagc"),
    OldBranches: ("skip_spikes",),
    Eager: ("by_global_norm", "adagc", "skip"),
    InFunction: ("chain", "skip_spikes"),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """The wrapper keeps the contract of all integrations for each way of running."""
    check(make, uc, tmp_path)


def descent() -> Any:
    """Return an optimizer that subtracts gradients."""
    return tf1.train.GradientDescentOptimizer(1.0)


class Spy(tf1.train.GradientDescentOptimizer):
    """Descent that stores its gradients."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        self.given, self.rest = list(grads_and_vars), (args, kwargs)
        return super().apply_gradients(self.given, *args, **kwargs)


def test_what_the_inner_optimizer_gets() -> None:
    """The inner optimizer gets sparse gradients as such, and absent ones in their place.

    Step, name and collection are those of TensorFlow.
    """
    with tf.Graph().as_default() as graph:
        shapes = {"kernel": (4, 3), "table": (6, 4), "unused": (2,)}
        kernel, table, _ = variables = [
            tf1.get_variable(name, shape) for name, shape in shapes.items()
        ]
        loss = tf.reduce_sum((tf.nn.embedding_lookup(table, [1, 4, 1]) @ kernel) ** 2)
        count, spy = tf1.train.create_global_step(), Spy(0.1)
        train = ClippedOptimizer(spy, uc.by_global_norm(0.1)).minimize(
            loss, count, variables, name="training"
        )
        assert [type(g) for g, _ in spy.given[1:]] == [tf.IndexedSlices, type(None)]
        assert [v for _, v in spy.given] == variables
        assert spy.rest == ((count, "training"), {})
        assert train is graph.get_operation_by_name("training")
        assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [train]


def test_clipped_once() -> None:
    """``compute_gradients`` does not clip, so changed gradients are clipped once when applied."""
    with tf.Graph().as_default(), tf1.Session() as session:
        w = tf1.get_variable("w", initializer=[0.0, 0.0])
        # With this curve, clipping twice differs from once.
        optimizer = ClippedOptimizer(descent(), uc.Rule(1.0, curve=uc.curves.soft))
        pairs = optimizer.compute_gradients(tf.reduce_sum(w * [1.5, 2.0]), [w])
        train = optimizer.apply_gradients([(2 * grad, variable) for grad, variable in pairs])
        session.run(tf1.global_variables_initializer())
        session.run(train)
        np.testing.assert_allclose(session.run(w), -np.asarray([3.0, 4.0]) / 6, rtol=1e-6)


def test_the_function_of_old() -> None:
    """``clip_gradients_by_norm`` clips by the global norm."""
    u, v = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = clip_gradients_by_norm(descent(), 1.0)
    optimizer.apply_gradients([(tf.constant([3.0]), u), (tf.constant([4.0]), v)])
    np.testing.assert_allclose([u.numpy()[0], v.numpy()[0]], [-0.6, -0.8])


def test_names_of_variables() -> None:
    """Variables are those of the inner optimizer, and one for each array of the rule's state.

    Slots are those of the inner optimizer.
    """
    plain, clipped, remembering = (InSession() for _ in range(3))
    for model, rule in (
        (plain, None),
        (clipped, uc.by_global_norm(0.5)),
        (remembering, uc.adagc()),
    ):
        model.start(uc, rule)
    names = [
        {v.op.name for v in model.graph.get_collection("variables")}
        for model in (plain, clipped, remembering)
    ]
    assert names[0] == names[1]
    assert names[2] - names[0] == {"Momentum/clip/averages", "Momentum/clip/count"}
    optimizer, w = clipped.clipped, clipped.model["w"]
    assert optimizer.get_slot(w, "momentum") is clipped.plain.get_slot(w, "momentum") is not None
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_name() == "Momentum"
    with remembering.graph.as_default():
        assert {v.op.name for v in remembering.clipped.variables()} == names[2] - {
            *weights(),
            "global_step",
        }


@pytest.mark.parametrize("make", [InSession, Eager])
def test_a_checkpoint_from_before(make: Any, tmp_path: Path) -> None:
    """Checkpoints without clipping load with it, slots included, and the other way round."""
    for rules in ((None, uc.by_global_norm(1e9)), (uc.by_global_norm(1e9), None)):
        models = [make(), make()]
        for model, rule in zip(models, rules, strict=True):
            model.start(uc, rule)
        models[0].step(batches()[0])
        models[0].save(tmp_path)
        models[1].load(tmp_path)
        for model in models:
            model.step(batches()[1])
        equal(trained(models[1]), trained(models[0]), "loading")


def estimated(folder: Path, steps: int) -> list[Any]:
    """Train to a step like an Estimator, in a session that resumes from the folder."""
    seen = []
    with tf.Graph().as_default():
        count, w = tf1.train.create_global_step(), tf1.get_variable("w", initializer=[5.0, -3.0])
        optimizer = ClippedOptimizer(
            tf1.train.MomentumOptimizer(0.1, 0.9), uc.autoclip(50, window=4)
        )
        train = optimizer.minimize(tf.reduce_sum(w**2), count)
        logged = optimizer.scalars()
        hooks = [
            tf1.train.StopAtStepHook(last_step=steps),
            tf1.train.LoggingTensorHook(logged, every_n_iter=1),
        ]
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(folder), hooks=hooks) as session:
            while not session.should_stop():
                seen.append(session.run([logged, train])[0])
    return seen


def test_as_an_estimator(tmp_path: Path) -> None:
    """A monitored session counts steps, logs, saves, and resumes."""
    parts = [*estimated(tmp_path / "parts", 3), *estimated(tmp_path / "parts", 6)]
    assert parts == estimated(tmp_path / "whole", 6)
    assert len(parts) == 6


def test_variables_of_one_name() -> None:
    """Variables with the same name are distinguished, and each dtype is kept."""
    u, v = tf.Variable([0.0], dtype=tf.float64), tf.Variable([0.0], dtype=tf.float16)
    optimizer = ClippedOptimizer(descent(), uc.adagc(warmup=0))
    optimizer.apply_gradients(
        [(tf.constant([6.0], tf.float64), u), (tf.constant([8.0], tf.float16), v)]
    )
    assert sorted(float(norm) for norm in optimizer.report.norms.values()) == [6, 8]
    assert (u.numpy().tolist(), v.numpy().tolist()) == ([-6], [-8])


REMEMBERING: dict[str, Any] = {
    "leaves": uc.chain(uc.adagc(warmup=1), uc.spam()),
    "groups": uc.Rule(
        uc.limits.Ema(1.0, 0.5), scope=uc.scopes.groups(lambda path, leaf: path[0] == "w")
    ),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_gradients_that_are_absent_in_some_steps(name: str) -> None:
    """Absent gradients leave variables and state unchanged, as in ``rule.update``.

    A step may have fewer variables.
    """
    rule, wanted = REMEMBERING[name], weights()
    state = rule.init(wanted)
    model = {key: tf.Variable(array, name=key) for key, array in wanted.items()}
    optimizer = ClippedOptimizer(descent(), rule)
    for absent, size in ((None, 1.0), ("w", 4.0), ("b", 0.5), (None, 9.0)):
        grads = {key: None if key == absent else size * array for key, array in weights().items()}
        update, state, _ = rule.update(grads, state, wanted)
        wanted = {key: w if update[key] is None else w - update[key] for key, w in wanted.items()}
        pairs = [
            (grads[key], variable) for key, variable in model.items() if key != "b" or absent != "b"
        ]
        optimizer.apply_gradients(pairs)
        for key, variable in model.items():
            np.testing.assert_allclose(variable.numpy(), wanted[key], rtol=2e-6, err_msg=key)


def test_a_loss_is_for_one_step() -> None:
    """A loss applies to the next step only."""
    w = tf.Variable([1.0, 2.0])
    optimizer = ClippedOptimizer(descent(), uc.skip_spikes(window=4, warmup=2))
    for loss in (1.0, 1.1, 1.05, 99.0):
        optimizer.loss = tf.constant(loss)
        optimizer.apply_gradients([(tf.constant([3.0, 4.0]), w)])
        assert optimizer.loss is None
        assert bool(optimizer.report.skipped) == (loss == 99)


OTHERS = {"rule": (uc.zclip(), "w"), "leaves": (uc.adagc(), "v")}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_others(what: str) -> None:
    """The state of another rule or of other variables is refused without any change."""
    rule, name = OTHERS[what]
    optimizer, other = ClippedOptimizer(descent(), uc.adagc()), uc.Clipper(rule)
    optimizer.apply_gradients([(tf.constant([3.0, 4.0]), tf.Variable([1.0, 2.0], name="w"))])
    other({name: np.ones(2)})
    before = optimizer.rule_state_dict()
    with pytest.raises(ValueError, match=what):
        optimizer.load_rule_state_dict(other.state_dict())
    assert optimizer.rule_state_dict() == before


def stepped(*steps: str) -> None:
    """Take steps with the variables of these names."""
    optimizer, made = (
        ClippedOptimizer(descent(), uc.adagc()),
        {name: tf.Variable([1.0], name=name) for name in "vw"},
    )
    for names in steps:
        optimizer.apply_gradients([(tf.constant([1.0]), made[name]) for name in names])


def in_no_session() -> Any:
    """Read values of a graph without a session."""
    model = InSession()
    model.start(uc, uc.autoclip())
    with model.graph.as_default():
        return model.clipped.rule_state_dict()


def scaled_inside() -> Any:
    """Clip scaled gradients."""
    return ClippedOptimizer(
        tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(descent(), 8.0), uc.by_norm(1.0)
    )


def in_replicas() -> Any:
    """Step under a strategy."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return ClippedOptimizer(descent(), uc.by_norm(1.0)).apply_gradients(
            [(tf.constant([1.0]), tf.Variable([1.0]))]
        )


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "keras": (
        lambda: ClippedOptimizer(tf.keras.optimizers.SGD(), uc.by_norm(1.0)),
        TypeError,
        "integrations.keras",
    ),
    "twice": (
        lambda: clip_gradients_by_norm(clip_gradients_by_norm(descent(), 1.0), 1.0),
        ValueError,
        "uc.chain",
    ),
    "a loss scale inside": (scaled_inside, ValueError, "MixedPrecisionLossScaleOptimizer"),
    "replicas": (in_replicas, ValueError, "MirroredStrategy"),
    "no session": (in_no_session, ValueError, "session="),
    "no variables": (
        lambda: ClippedOptimizer(descent(), uc.zclip()).load_rule_state_dict({}),
        ValueError,
        "after",
    ),
    "a variable twice": (lambda: stepped("vv"), ValueError, "sum"),
    "other variables": (lambda: stepped("v", "vw"), ValueError, "other gradients"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """An invalid optimizer, rule or use raises an error with the remedy."""
    call, error, token = WRONG[name]
    with pytest.raises(error, match=token):
        call()
