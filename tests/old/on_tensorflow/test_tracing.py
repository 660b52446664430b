"""Clipping inside TensorFlow's functions and graphs: traced once, batched, in loops, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import uniclip as uc
from tracing import CASES, Halving, everything, leaves, same, some, values

EVERY_MODE = pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
ROWS = {"w": tf.TensorSpec([None, 3]), "b": [tf.TensorSpec([None])]}
ANY_RANK = {"w": tf.TensorSpec(None), "b": [tf.TensorSpec(None)]}
LIMIT = tf.TensorSpec([])


def given(by: float = 1.0, rows: int = 4) -> Any:
    """Return gradients in TensorFlow."""
    tree = values(by)
    return {"w": tf.constant(tree["w"][:rows]), "b": [tf.constant(tree["b"][0][:rows])]}


def plain(by: float = 1.0, rows: int = 4) -> Any:
    """Return gradients in NumPy, in a tree like that of `given`."""
    tree = values(by)
    return {"w": tree["w"][:rows], "b": [tree["b"][0][:rows]]}


def wanted(function: Any, by: float, limit: float, rows: int = 4) -> Any:
    """Return what NumPy makes of them."""
    tree = values(by)
    return function({"w": tree["w"][:rows], "b": [tree["b"][0][:rows], None]}, limit)


@EVERY_MODE
def test_one_trace(jit_compile: bool) -> None:
    """Limits and values of any size, and any number of rows, go through one trace of every function."""
    clip = tf.function(everything, input_signature=[ROWS, LIMIT], jit_compile=jit_compile)
    for by, limit in CASES.values():
        for rows in {4} if jit_compile else {4, 2}:  # XLA compiles for each number of rows
            same(clip(given(by, rows), limit), wanted(everything, by, limit, rows))
    assert clip.experimental_get_tracing_count() == 1


def whole(grads: Any, limit: Any) -> Any:
    """Clip in the ways that need to know no axis."""
    return [
        uc.clip_by_global_norm(grads, limit),
        uc.clip_by_norm(grads, limit, ord=3),
        uc.clip_by_average_norm(grads, limit),
        uc.clip_by_value(grads, -limit, limit),
    ]


def test_unknown_rank() -> None:
    """Nothing needs to be known of the shapes, and the limit may be a tensor."""
    clip = tf.function(whole, input_signature=[ANY_RANK, LIMIT])
    for by, limit in CASES.values():
        same(clip(given(by), limit), wanted(whole, by, limit))
    assert clip.experimental_get_tracing_count() == 1


PER_LEAF = {
    "each leaf": uc.by_norm(0.5),
    "agc": uc.agc(0.1, axis=0),
    "last axis": uc.by_norm(0.5, axis=-1),
    "adagc": uc.adagc(warmup=1),
    "percentile": uc.percentile_clipping(50, window=3),
    "warm-up of rows": uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=1), scope=uc.Scope(axes=(0,))),
}
NO_AXES = ["each leaf", "adagc", "percentile"]


@pytest.mark.parametrize("known", [True, False], ids=["unknown rows", "unknown rank"])
def test_unknown_shapes_of_rules_by_leaf(known: bool) -> None:
    """Step after step, leaves of unknown and unequal shapes go through one trace, and are learned from."""
    rules = PER_LEAF if known else {name: PER_LEAF[name] for name in NO_AXES}
    specs = {"w": tf.TensorSpec([None, 3]), "b": [tf.TensorSpec([None])]} if known else ANY_RANK
    states = {name: rule.init(given()) for name, rule in rules.items()}
    wanted_states = {name: rule.init(plain()) for name, rule in rules.items()}
    kinds = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape, array.dtype), states)

    @tf.function(input_signature=[specs, kinds, specs], autograph=False)
    def step(grads: Any, states: Any, params: Any) -> Any:
        results = {name: rule.update(grads, states[name], params) for name, rule in rules.items()}
        return {name: result[0] for name, result in results.items()}, {name: r[1] for name, r in results.items()}

    for by, rows in ((1.0, 4), (0.5, 2), (30.0, 3), (1.0, 4)):
        grads, params = given(by, rows), given(3.0, rows)
        clipped, states = step(grads, states, params)
        for name, rule in rules.items():
            one, wanted_states[name], _ = rule.update(plain(by, rows), wanted_states[name], plain(3.0, rows))
            same(clipped[name], one)
            same(states[name], wanted_states[name])
    assert step.experimental_get_tracing_count() == 1


@EVERY_MODE
def test_steps(jit_compile: bool) -> None:
    """A rule that counts steps is traced once, and its state goes through a loop that AutoGraph converts."""
    rule = uc.Rule(Halving(4.0))
    step = tf.function(rule.update, jit_compile=jit_compile)

    @tf.function(jit_compile=jit_compile)
    def loop(grads: Any, state: Any) -> Any:
        clipped = grads
        for _ in tf.range(4):
            clipped, state, _ = rule.update(grads, state)
        return clipped, state

    state = rule.init(given())
    for limit in (4.0, 2.0, 1.0, 0.5):
        clipped, state, report = step(given(), state)
        assert report.limits == limit
        same(clipped, uc.clip_by_global_norm(values(), limit)[0])
    assert step.experimental_get_tracing_count() == 1
    looped, last = loop(given(), rule.init(given()))
    assert last.step == 4
    same(looped, clipped)


@EVERY_MODE
def test_while_and_cond(jit_compile: bool) -> None:
    """AutoGraph's while and if, on tensors, can hold clips."""

    @tf.function(jit_compile=jit_compile)
    def halved(grad: Any) -> Any:
        while uc.global_norm(grad) > 1.0:
            grad = uc.clip_by_norm(grad, uc.global_norm(grad) / 2)
        if uc.global_norm(grad) > 0.75:
            return uc.clip_by_norm(grad, 0.75)
        return uc.clip_by_value(grad, -0.25, 0.25)

    for by in (0.1, 0.2, 1000.0):
        grad = values(by)["w"]
        while uc.global_norm(grad) > 1:
            grad = uc.clip_by_norm(grad, uc.global_norm(grad) / 2)
        large = uc.global_norm(grad) > 0.75
        same(halved(given(by)["w"]), uc.clip_by_norm(grad, 0.75) if large else uc.clip_by_value(grad, -0.25, 0.25))


@EVERY_MODE
def test_vectorized_map(jit_compile: bool) -> None:
    """A batch in which each example has its own scale and its own limit equals one call for each."""
    trees = [given(by) for by, _ in CASES.values()]
    batch = [tf.stack([t["w"] for t in trees]), tf.stack([t["b"][0] for t in trees])]
    limits = tf.constant([limit for _, limit in CASES.values()])

    def one(element: Any) -> Any:
        return leaves(some({"w": element[0], "b": [element[1]]}, element[2]))

    found = tf.function(lambda *x: tf.vectorized_map(one, x), jit_compile=jit_compile)(*batch, limits)
    for i, (by, limit) in enumerate(CASES.values()):
        same([leaf[i] for leaf in found], wanted(some, by, limit))


class Clipping(tf.Module):
    """A module that clips to a limit of its own, which is a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = tf.Variable(1.0)

    @tf.function(input_signature=[ROWS])
    def __call__(self, grads: Any) -> Any:
        """Return the arrays of the results."""
        return leaves(some(grads, self.limit.value()))


def test_saved_model(tmp_path: Path) -> None:
    """A module that was saved and loaded clips other values and numbers of rows, to the limit that is set."""
    tf.saved_model.save(Clipping(), str(tmp_path))
    clip = tf.saved_model.load(str(tmp_path))
    for by, limit in CASES.values():
        clip.limit.assign(limit)
        for rows in (4, 2):
            grads = given(by, rows)
            same(clip(grads), wanted(some, by, limit, rows))


def test_tf1_graph() -> None:
    """In a graph of TensorFlow 1 gradients and limit can be placeholders, and the graph stays as it is."""
    tf1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        w, b = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.float32, [None])
        limit = tf1.placeholder(tf.float32, [])
        fetched = leaves(everything({"w": w, "b": [b, None]}, limit))
        graph.finalize()
        with tf1.Session() as session:
            for by, c in CASES.values():
                tree = values(by)
                found = session.run(fetched, {w: tree["w"], b: tree["b"][0], limit: c})
                same(found, wanted(everything, by, c))


@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize(("norm", "limit"), [(1e30, 1e-20), (1e-20, 1e30), (2.0, 1.0)])
def test_factors_out_of_range(size: int, norm: float, limit: float) -> None:
    """Grappler, which puts factors together, leaves two of them alone whose product no float32 can hold."""
    rule = uc.to_global_norm(limit)

    @tf.function(autograph=False)
    def clip(grads: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(grads)
            clipped = uc.clip([grads], rule)[0][0]
        return clipped, tape.gradient(clipped, grads)

    clipped, slope = clip(tf.fill([size], norm / size**0.5))
    np.testing.assert_allclose(clipped, np.full(size, limit / size**0.5), rtol=2e-6)
    assert np.isfinite(slope).all() or norm < 1e-10  # limit/norm² is beyond float32
