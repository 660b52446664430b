"""One saved state: what any holder saved goes on in any other, in any framework."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import OrderedDict
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from in_processes import failure

import uniclip as uc
from uniclip.integrations.keras import ClippedOptimizer as Keras
from uniclip.integrations.optax import from_dict as from_dict_of_optax
from uniclip.integrations.optax import to_dict as to_dict_of_optax
from uniclip.integrations.optax import to_optax
from uniclip.integrations.tensorflow import ClippedOptimizer as TensorFlow1
from uniclip.integrations.torch import attach
from uniclip.saved import from_dict, renamed, to_dict

tf1 = tf.compat.v1
pytestmark = [
    pytest.mark.usefixtures("quickly_compiled"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

SHAPES = OrderedDict(w=(3, 2), b=(2,), table=(4, 2))
"""In an order that is not the one of their names, in which some trees come."""


def last(path: Any, leaf: Any) -> Any:
    """Return the name of a leaf, wherever it lies."""
    return path[-1]


def is_matrix(path: Any, leaf: Any) -> bool:
    """Whether a leaf is no vector."""
    return path[-1] != "b"


EMA = uc.limits.Ema(1.05, 0.5)
RULES = {
    "zclip": uc.zclip(z=1.0, decay=0.5, warmup=2),
    "autoclip": uc.autoclip(50, window=6),
    "adagc": uc.adagc(warmup=2),
    "groups": uc.by_group_norm({"w": EMA, "b": 0.5, "table": uc.limits.Percentile(50, 3)}, last),
    "chain": uc.chain(uc.zclip(z=1.0, warmup=2), uc.masked(uc.adagc(warmup=2), is_matrix), uc.by_value(-2.0, 2.0)),
}
Arrays = dict[str, np.ndarray]


class Clipper:
    """`Clipper` on one framework."""

    def __init__(self, rule: Any, make: Any = np.asarray) -> None:
        self.held, self.make = uc.Clipper(rule), make

    def step(self, grads: Arrays) -> Arrays:
        """Return clipped gradients."""
        clipped = self.held({name: self.make(grad) for name, grad in grads.items()})
        return {name: np.asarray(grad) for name, grad in clipped.items()}

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return self.held.state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.held.load_state_dict(saved)


class Attached:
    """`attach`; it knows a parameter by its group, too."""

    def __init__(self, rule: Any) -> None:
        self.params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.optimizer = torch.optim.SGD([*self.params.items()], lr=1.0)
        self.handle = attach(self.optimizer, rule)

    def step(self, grads: Arrays) -> Arrays:
        """Return minus the steps of plain descent."""
        for name, p in self.params.items():
            p.grad = torch.tensor(grads[name])
            p.data.zero_()
        self.optimizer.step()
        return {name: -p.detach().numpy().copy() for name, p in self.params.items()}

    def save(self) -> dict[str, Any]:
        """Return the state by the names alone."""
        return renamed(self.handle.state_dict(), lambda name: name.removeprefix("[0]"))

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.handle.load_state_dict(renamed(saved, lambda name: f"[0]{name}" if name.startswith("[") else name))


class InItsOptimizer(Attached):
    """The same, by the ``state_dict`` of the optimizer, whose numbers are tensors."""

    def save(self) -> dict[str, Any]:
        """Return the state, made of numbers for JSON."""
        saved = self.optimizer.state_dict()["uniclip"]
        assert all(map(torch.is_tensor, saved["state"].values()))
        other = uc.Clipper(self.handle.rule)
        other.load_state_dict(saved)
        return renamed(other.state_dict(), lambda name: name.removeprefix("[0]"))

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state, in lists."""
        own = renamed(saved, lambda name: f"[0]{name}" if name.startswith("[") else name)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "uniclip": own})


class InKeras:
    """`ClippedOptimizer` of Keras."""

    def __init__(self, rule: Any) -> None:
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
        self.optimizer = Keras(keras.optimizers.SGD(1.0), rule)
        self.optimizer.build(self.variables)

    def step(self, grads: Arrays) -> Arrays:
        """Return minus the steps of plain descent."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, np.float32))
        self.optimizer.apply([keras.ops.convert_to_tensor(grads[v.name]) for v in self.variables], self.variables)
        return {v.name: -keras.ops.convert_to_numpy(v.value) for v in self.variables}

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return self.optimizer.rule_state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.optimizer.load_rule_state_dict(saved)


class InOptax:
    """The state of `to_optax`, inside of a chain and of compiled code."""

    def __init__(self, rule: Any) -> None:
        self.rule, self.params = rule, {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        optimizer = optax.chain(to_optax(rule), optax.sgd(1.0))
        self.state, self.update = optimizer.init(self.params), jax.jit(optimizer.update)

    def step(self, grads: Arrays) -> Arrays:
        """Return minus the updates."""
        updates, self.state = self.update({n: jnp.asarray(g) for n, g in grads.items()}, self.state, self.params)
        return {name: -np.asarray(update) for name, update in updates.items()}

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return to_dict_of_optax(self.rule, self.state, self.params)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.state = from_dict_of_optax(self.rule, saved, self.state, self.params)


class InLoop:
    """A state by itself, in compiled code."""

    def __init__(self, rule: Any) -> None:
        self.rule, self.params = rule, {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        self.state, self.update = rule.init(self.params), jax.jit(lambda *given: rule.update(*given)[:2])

    def step(self, grads: Arrays) -> Arrays:
        """Return clipped gradients."""
        clipped, self.state = self.update({name: jnp.asarray(grad) for name, grad in grads.items()}, self.state)
        return {name: np.asarray(grad) for name, grad in clipped.items()}

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return to_dict(self.rule, self.state, self.params)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.state = from_dict(self.rule, saved, self.params)


class InGraph:
    """`ClippedOptimizer` of TensorFlow 1, in a graph that is finalized."""

    def __init__(self, rule: Any) -> None:
        with tf.Graph().as_default() as graph:
            self.fed = {name: tf1.placeholder(tf.float32, shape) for name, shape in SHAPES.items()}
            zeros = {n: tf1.get_variable(n, initializer=np.zeros(s, np.float32)) for n, s in SHAPES.items()}
            self.optimizer = TensorFlow1(tf1.train.GradientDescentOptimizer(1.0), rule)
            with tf.control_dependencies([v.assign(tf.zeros(v.shape)) for v in zeros.values()]):
                grads = {name: tf.identity(grad) for name, grad in self.fed.items()}
            train = self.optimizer.apply_gradients([(grads[name], zeros[name]) for name in SHAPES])
            with tf.control_dependencies([train]):
                self.steps = {name: -v.read_value() for name, v in zeros.items()}
            init = tf1.global_variables_initializer()
            graph.finalize()
        self.session = tf1.Session(graph=graph)
        self.session.run(init)

    def step(self, grads: Arrays) -> Arrays:
        """Return minus the steps of plain descent."""
        steps: Arrays = self.session.run(self.steps, {self.fed[name]: grad for name, grad in grads.items()})
        return steps

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return self.optimizer.rule_state_dict(self.session)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        with self.session.as_default():
            self.optimizer.load_rule_state_dict(saved)


class InEager:
    """The same in eager code."""

    def __init__(self, rule: Any) -> None:
        self.variables = {n: tf.Variable(np.zeros(s, np.float32), name=n) for n, s in SHAPES.items()}
        self.optimizer = TensorFlow1(tf1.train.GradientDescentOptimizer(1.0), rule)
        self.step({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})  # which makes its variables
        self.optimizer.load_rule_state_dict({})

    def step(self, grads: Arrays) -> Arrays:
        """Return minus the steps of plain descent."""
        for variable in self.variables.values():
            variable.assign(tf.zeros(variable.shape))
        self.optimizer.apply_gradients([(tf.constant(grads[name]), v) for name, v in self.variables.items()])
        return {name: -v.numpy() for name, v in self.variables.items()}

    def save(self) -> dict[str, Any]:
        """Return the state."""
        return self.optimizer.rule_state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a state."""
        self.optimizer.load_rule_state_dict(saved)


HOLDERS: dict[str, Any] = {
    "Clipper on NumPy": Clipper,
    "Clipper on PyTorch": functools.partial(Clipper, make=torch.tensor),
    "Clipper on TensorFlow": functools.partial(Clipper, make=tf.constant),
    "Clipper on JAX": functools.partial(Clipper, make=jnp.asarray),
    "handle of attach": Attached,
    "optimizer of attach": InItsOptimizer,
    "Keras": InKeras,
    "optax": InOptax,
    "a loop": InLoop,
    "TensorFlow 1 in a graph": InGraph,
    "TensorFlow 1 in eager code": InEager,
}


@functools.cache
def steps() -> list[Arrays]:
    """Return the gradients of some steps, of sizes from 0.1 to 10."""
    rng = np.random.default_rng(4)
    sizes = 10 ** rng.uniform(-1, 1, 8)
    return [
        {name: np.asarray(size * rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}
        for size in sizes
    ]


@functools.cache
def uninterrupted(name: str) -> list[Arrays]:
    """Return the clipped gradients of one clipper."""
    clipper = Clipper(RULES[name])
    return [clipper.step(grads) for grads in steps()]


@functools.cache
def used(holder: str, name: str) -> tuple[Any, str]:
    """Return a holder, made once since compiling takes long, and its state after half of the steps.

    The state is JSON, which knows no NaN and no ∞; whoever takes the holder gives it a state first.
    """
    held = HOLDERS[holder](RULES[name])
    for grads, wanted in zip(steps()[:4], uninterrupted(name), strict=False):
        close(held.step(grads), wanted)
    return held, json.dumps(held.save(), allow_nan=False)


def saved_by(holder: str, name: str) -> Any:
    """Return the state of a holder after half of the steps."""
    return json.loads(used(holder, name)[1])


def close(got: Arrays, wanted: Arrays) -> None:
    """Compare gradients to rounding."""
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_each_pair(name: str) -> None:
    """The steps after are those of one clipper that was never interrupted; one process compiles for all pairs."""
    failures: dict[str, str] = {}
    for before, after in itertools.product(HOLDERS, HOLDERS):
        failures |= failure(f"from {before} to {after}", functools.partial(goes_on, before, after, name))
    assert not failures, "\n".join(f"{pair}: {text}" for pair, text in failures.items())


def goes_on(before: str, after: str, name: str) -> None:
    """Assert that one holder goes on from the state of another."""
    saved = saved_by(before, name)
    assert list(saved) == ["format", "rule", "leaves", "state"]
    held, _ = used(after, name)
    held.load(saved)
    for grads, wanted in zip(steps()[4:], uninterrupted(name)[4:], strict=True):
        close(held.step(grads), wanted)


@pytest.mark.parametrize("name", RULES)
def test_it_matters(name: str) -> None:
    """Without the state the steps are others."""
    held = Clipper(RULES[name])
    after = [held.step(grads) for grads in steps()[4:]]
    pairs = zip(after, uninterrupted(name)[4:], strict=True)
    assert not all(np.allclose(got["w"], wanted["w"], rtol=1e-2) for got, wanted in pairs)


@pytest.mark.parametrize("holder", HOLDERS)
def test_refusals(holder: str) -> None:
    """Each holder refuses what is no state, another format and another rule, and then goes on as if nothing was."""
    held, _ = used(holder, "adagc")
    saved, other = saved_by(holder, "adagc"), saved_by(holder, "zclip")
    held.load(saved)
    before = held.save()
    with pytest.raises(ValueError, match=r"has the format 7, and uniclip .* knows the format 1"):
        held.load({**saved, "format": 7})
    with pytest.raises(ValueError, match="that of another rule than"):
        held.load(other)
    if not isinstance(held, Attached):  # whose names are given here as a dict has them
        with pytest.raises(TypeError, match="saved must be what "):
            held.load("adagc")
    assert held.save() == before
    for grads, wanted in zip(steps()[4:], uninterrupted("adagc")[4:], strict=True):
        close(held.step(grads), wanted)


@pytest.mark.parametrize("holder", [name for name in HOLDERS if name != "optimizer of attach"])
def test_a_new_beginning(holder: str) -> None:
    """An empty state is one."""
    held, _ = used(holder, "chain")
    held.step(steps()[4])
    held.load({})
    for grads, wanted in zip(steps(), uninterrupted("chain"), strict=True):
        close(held.step(grads), wanted)


def test_a_rule_without_memory() -> None:
    """It saves nothing."""
    rule = uc.by_global_norm(1.0)
    for holder in ("Clipper on NumPy", "handle of attach", "Keras", "optax", "a loop"):
        held = HOLDERS[holder](rule)
        held.step(steps()[0])
        assert held.save() == {}
        held.load({})


def test_several_in_optax() -> None:
    """Of several clip states the one is passed; none is an error, too."""
    rule, params = uc.adagc(), {"w": jnp.zeros(2)}
    state = optax.chain(to_optax(rule), to_optax(rule)).init(params)
    assert to_dict_of_optax(rule, state[0], params)["leaves"] == [["['w']"]]
    with pytest.raises(ValueError, match=r"holds 2 ClipStates, and one was expected: .* opt_state\[0\]"):
        to_dict_of_optax(rule, state, params)
    with pytest.raises(ValueError, match="holds no ClipState, and one"):
        from_dict_of_optax(rule, {}, optax.sgd(1.0).init(params), params)
    with pytest.raises(ValueError, match="begin with init"):
        to_dict_of_optax(uc.zclip(), state[0], params)


def test_before_there_are_variables() -> None:
    """Keras and TensorFlow 1 say what makes them."""
    saved = saved_by("Clipper on NumPy", "adagc")
    unbuilt = Keras(keras.optimizers.SGD(1.0), RULES["adagc"])
    assert unbuilt.rule_state_dict() == {}
    with pytest.raises(ValueError, match=r"call build\(model\.trainable_variables\) first"):
        unbuilt.load_rule_state_dict(saved)
    unused = TensorFlow1(tf1.train.GradientDescentOptimizer(1.0), RULES["adagc"])
    assert unused.rule_state_dict() == {}
    with pytest.raises(ValueError, match="after minimize or apply_gradients"):
        unused.load_rule_state_dict(saved)
    graph = InGraph(RULES["adagc"])
    with graph.session.graph.as_default(), pytest.raises(ValueError, match="pass it, session="):
        graph.optimizer.rule_state_dict()
