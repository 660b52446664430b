"""Training with clipped gradients in TensorFlow: version 1 sessions, version 2 tapes, embeddings, unknown shapes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import pytest
import tensorflow as tf

import oracle
import uniclip as uc
from frameworks import TensorFlow
from promises import close

tf1 = tf.compat.v1
fw = TensorFlow()
X = np.random.default_rng(0).standard_normal((64, 3)).astype("float32")
Y = X @ np.asarray([[3.0], [-2.0], [8.0]], "float32") + 5
VOCABULARY = 10
IDS = np.asarray([1, 7, 1, 1, 3])  # a row that occurs three times
EVERY_MODE = pytest.mark.parametrize(
    "compiled",
    [lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)],
    ids=["eager", "tf.function", "xla"],
)


def dense(grad: Any) -> np.ndarray:
    """Return a gradient that may be sparse or absent as NumPy's."""
    if grad is None:
        return np.zeros(0)
    return fw.dense(grad) if isinstance(grad, tf.IndexedSlices) else np.asarray(grad)


def is_global_norm(old: list[Any], new: list[Any], limit: float) -> None:
    """Assert that gradients are clipped by their global norm, as plain loops do it."""
    for a, b in zip(new, oracle.clip_global([dense(g) for g in old], limit), strict=True):
        np.testing.assert_allclose(dense(a), b, rtol=1e-6)


def fit(clip: Callable[[list[Any]], list[Any]], unused: bool = False) -> list[tuple[float, list[Any], list[Any]]]:
    """Descend in a TensorFlow 1 session; return each step's loss, gradients and clipped gradients."""
    with tf.Graph().as_default():
        w, b = tf1.get_variable("w", [3, 1], initializer=tf1.zeros_initializer()), tf1.get_variable("b", [])
        variables = [w, b, tf1.get_variable("unused", [2])] if unused else [w, b]
        loss = tf.reduce_mean((tf.constant(X) @ w + b - Y) ** 2)
        opt = tf1.train.GradientDescentOptimizer(0.1)
        gvs = opt.compute_gradients(loss, variables)
        clipped = clip(gvs)
        assert [g is None for g, _ in clipped] == [g is None for g, _ in gvs]
        train = opt.apply_gradients(clipped)
        fetches = loss, [g for g, _ in gvs if g is not None], [g for g, _ in clipped if g is not None]
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            steps = []
            for _ in range(60):
                steps.append(session.run(fetches))
                session.run(train)
    assert steps[-1][0] < 0.2 * steps[0][0]
    return steps


def test_tf1_by_value() -> None:
    """The familiar loop over (gradient, variable) pairs clips each entry and learns."""
    steps = fit(lambda gvs: [(uc.clip_by_value(g, -1.0, 1.0), v) for g, v in gvs])
    for _, old, new in steps:
        for g, clipped in zip(old, new, strict=True):
            np.testing.assert_array_equal(clipped, np.clip(g, -1, 1))
    assert max(np.abs(g).max() for g in steps[0][1]) > 1


def test_tf1_global_norm() -> None:
    """zip(*gvs) goes straight in, and the norm becomes the limit as long as it is above it."""

    def clip(gvs: list[Any]) -> list[Any]:
        grads, variables = zip(*gvs, strict=True)
        return list(zip(uc.clip_by_global_norm(grads, 3.0)[0], variables, strict=True))

    steps = fit(clip)
    for _, old, new in steps:
        is_global_norm(old, new, 3.0)
    norms = [math.hypot(*(np.linalg.norm(g) for g in new)) for _, _, new in steps]
    assert norms[0] == pytest.approx(3)
    assert norms[-1] < 3


def test_tf1_norm_with_unused_variable() -> None:
    """Each tensor is clipped by itself, and the None of a variable that the loss does not use stays None."""
    steps = fit(lambda gvs: [(uc.clip_by_norm(g, 2.0), v) for g, v in gvs], unused=True)
    for _, old, new in steps:
        for g, clipped in zip(old, new, strict=True):
            np.testing.assert_allclose(clipped, oracle.clip_leaf(g, 2.0), rtol=1e-6)


def test_tf1_gradients_of_a_batch() -> None:
    """tf.gradients of a cost per example, clipped and zipped with the trainable variables, learns."""
    with tf.Graph().as_default():
        x, batch_size = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.float32, [])
        w = tf1.get_variable("w", [3, 1], initializer=tf1.zeros_initializer())
        cost = tf.reduce_sum((x @ w - x @ np.asarray([[1.0], [-2.0], [0.5]], "float32")) ** 2)
        variables = tf1.trainable_variables()
        grads = tf.gradients(cost / batch_size, variables)
        clipped, norm = uc.clip_by_global_norm(grads, 1.0)
        native, native_norm = tf.clip_by_global_norm(grads, 1.0)
        train = tf1.train.GradientDescentOptimizer(0.2).apply_gradients(zip(clipped, variables, strict=True))
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            costs = []
            for _ in range(40):
                feed = {x: X, batch_size: len(X)}
                before, *both = session.run([cost, [*clipped, norm], [*native, native_norm]], feed)
                for ours, theirs in zip(*both, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=4 * 2**-23)
                session.run(train, feed)
                costs.append(before)
    assert costs[-1] < 0.01 * costs[0]


PURE_TF1 = """
import numpy as np
import tensorflow as tf
import uniclip as uc
tf1 = tf.compat.v1
tf1.disable_v2_behavior()
x = tf1.placeholder(tf.float32, [None, 3])
w = tf1.get_variable("w", [3, 1], initializer=tf1.zeros_initializer())
table = tf1.get_variable("table", [5, 1], initializer=tf1.zeros_initializer())
opt = tf1.train.GradientDescentOptimizer(0.1)
part = tf.reduce_sum(tf.gather(table, [1, 1, 4]))
gvs = opt.compute_gradients(tf.reduce_mean((x @ w + part - 4.0) ** 2))
(grads, variables) = zip(*gvs)
clipped, norm = uc.clip_by_global_norm(grads, 1.0)
assert isinstance(clipped[1], tf.IndexedSlices)
by_norm, by_value = uc.clip_by_norm(grads[0], 0.5), uc.clip_by_value(grads[0], -0.1, 0.1)
natives = tf.clip_by_norm(grads[0], 0.5), tf.clip_by_value(grads[0], -0.1, 0.1)
loss = tf.reduce_mean((x @ w + part - 4.0) ** 2)
train = opt.apply_gradients(zip(clipped, variables))
dense = [tf.convert_to_tensor(clipped[0]), tf.math.unsorted_segment_sum(clipped[1].values, clipped[1].indices, 5)]
feed = {x: np.random.default_rng(0).standard_normal((8, 3))}
with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    first = session.run(loss, feed)
    norms = np.sqrt(sum((g ** 2).sum() for g in session.run(dense, feed)))
    np.testing.assert_allclose(norms, 1.0, rtol=1e-6)
    for ours, theirs in zip(*session.run([(by_norm, by_value), natives], feed)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for _ in range(50):
        session.run(train, feed)
    assert session.run(loss, feed) < 0.1 * first
print("learnt")
"""


def test_pure_tf1() -> None:
    """With TensorFlow 2's behaviour switched off for the whole process, everything works the same."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PURE_TF1], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "learnt\n", done.stderr


@EVERY_MODE
def test_tape_and_keras(compiled: Any) -> None:
    """A tape, a clip by global norm and a Keras optimizer learn, eagerly and compiled."""
    w, b = tf.Variable(tf.zeros([3, 1])), tf.Variable(0.0)
    opt = keras.optimizers.SGD(0.1)
    opt.build([w, b])

    @compiled
    def step() -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((X @ w + b - Y) ** 2)
        grads = tape.gradient(loss, [w, b])
        clipped, norm = uc.clip_by_global_norm(grads, 3.0)
        opt.apply_gradients(zip(clipped, [w, b], strict=True))
        return loss, grads, clipped, norm

    steps = [step() for _ in range(60)]
    for _, old, new, norm in steps:
        is_global_norm(old, new, 3.0)
        close(fw, norm, oracle.norm(float(x) for g in old for x in np.ravel(g)), "float32")
    assert steps[0][3] > 3 > steps[-1][3]
    assert steps[-1][0] < 0.2 * steps[0][0]


def embedding_loss(table: Any, scale: Any, ids: Any) -> Any:
    """Return a loss whose gradient for the table is sparse."""
    return tf.reduce_sum((tf.gather(table, ids) * scale - 4.0) ** 2)


SPARSE_CLIPS: dict[str, tuple[Callable[[list[Any]], list[Any]], Callable[[list[np.ndarray]], list[np.ndarray]]]] = {
    "global norm": (lambda g: uc.clip_by_global_norm(g, 5.0)[0], lambda g: oracle.clip_global(g, 5.0)),
    "norm": (lambda g: uc.clip_by_norm(g, 4.0), lambda g: [oracle.clip_leaf(leaf, 4.0) for leaf in g]),
    "rows": (lambda g: [uc.clip_by_norm(g[0], 2.0, axis=1), g[1]], lambda g: [oracle.clip_axes(g[0], 2.0, (1,)), g[1]]),
    "value": (lambda g: uc.clip_by_value(g, -2.0, 2.0), lambda g: [leaf.clip(-2, 2) for leaf in g]),
}


@EVERY_MODE
@pytest.mark.parametrize("name", SPARSE_CLIPS)
def test_embedding(name: str, compiled: Any) -> None:
    """An embedding's gradient stays sparse through the clip, and rows that occur twice count as their sum."""
    clip, clip_dense = SPARSE_CLIPS[name]
    table, scale = tf.Variable(tf.ones([VOCABULARY, 2])), tf.Variable(1.0)

    @compiled
    def step(ids: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            loss = embedding_loss(table, scale, ids)
        grads = tape.gradient(loss, [table, scale])
        return loss, grads, clip(grads)

    losses = []
    for _ in range(100):
        loss, old, new = step(tf.constant(IDS))
        assert isinstance(old[0], tf.IndexedSlices)
        assert isinstance(new[0], tf.IndexedSlices)
        for a, b in zip(new, clip_dense([dense(g) for g in old]), strict=True):
            np.testing.assert_allclose(dense(a), b, rtol=1e-6)
        table.scatter_sub(tf.IndexedSlices(0.02 * new[0].values, new[0].indices))
        scale.assign_sub(0.02 * new[1])
        losses.append(float(loss))
    assert losses[-1] < 0.05 * losses[0]


def test_tf1_embedding() -> None:
    """In a TensorFlow 1 graph an embedding's gradient stays sparse too, and the optimizer takes it."""
    with tf.Graph().as_default():
        table = tf1.get_variable("table", [VOCABULARY, 2], initializer=tf1.ones_initializer())
        scale = tf1.get_variable("scale", initializer=1.0)
        loss = embedding_loss(table, scale, IDS)
        opt = tf1.train.GradientDescentOptimizer(0.02)
        grads, variables = zip(*opt.compute_gradients(loss), strict=True)
        clipped, norm = uc.clip_by_global_norm(grads, 5.0)
        assert isinstance(clipped[0], tf.IndexedSlices)
        train = opt.apply_gradients(zip(clipped, variables, strict=True))
        full = tf.math.unsorted_segment_sum(grads[0].values, grads[0].indices, VOCABULARY), grads[1]
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            first, old, new, total = session.run([loss, full, clipped, norm])
            for _ in range(100):
                session.run(train)
            last = session.run(loss)
    np.testing.assert_allclose(total, math.hypot(*(np.linalg.norm(g) for g in old)), rtol=1e-6)
    out = np.zeros((VOCABULARY, 2))
    np.add.at(out, new[0].indices, new[0].values)
    np.testing.assert_allclose(out, old[0] * (5 / total), rtol=1e-6)
    assert last < 0.05 * first


ROWS, WIDTH = 148_331_760, 64
HUGE = {
    "global norm": (uc.by_global_norm(1.0), 1.0),
    "rms": (uc.by_block_rms(1e-6), math.sqrt(ROWS * WIDTH)),
    "average": (uc.by_average_norm(1e-9), float(ROWS * WIDTH)),
}


@EVERY_MODE
@pytest.mark.parametrize("shape_dtype", [tf.int32, tf.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("rule", "size"), HUGE.values(), ids=HUGE)
def test_huge_embedding(rule: uc.Rule, size: float, shape_dtype: tf.DType, compiled: Any) -> None:
    """A sparse gradient whose dense form would fill 38 GB is clipped, and its size does not overflow."""
    indices, dense_shape = tf.constant([5, ROWS - 1]), tf.constant([ROWS, WIDTH], shape_dtype)
    clip = compiled(lambda values: uc.clip(tf.IndexedSlices(values, indices, dense_shape), rule))
    clipped, report = clip(tf.fill([2, WIDTH], 3.0))
    norm = math.sqrt(2 * WIDTH * 3**2) / size
    assert isinstance(clipped, tf.IndexedSlices)
    close(fw, report.norms, norm, "float32")
    close(fw, clipped.values, np.full((2, WIDTH), 3 * report.limits / norm), "float32", ulps=8)


RULES = {
    "global norm": uc.by_global_norm(1.5),
    "largest": uc.by_global_norm(1.5, ord=math.inf),
    "axis 0": uc.by_norm(1.5, axis=0),
    "axis 1": uc.by_norm(1.5, axis=1),
    "rms": uc.by_block_rms(0.5),
    "average": uc.by_average_norm(0.1),
    "each example": uc.Rule(1.5, scope=uc.scopes.each_example),
    "value": uc.by_value(-0.5, 0.5),
}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_unknown_number_of_rows(rule: uc.Rule, jit_compile: bool) -> None:
    """A function traced once for any number of rows clips as NumPy does for each."""
    signature = [tf.TensorSpec([None, 3])]
    clip = tf.function(lambda g: uc.clip(g, rule)[0], input_signature=signature, jit_compile=jit_compile)
    for rows in (1, 4, 64):
        np.testing.assert_allclose(clip(X[:rows]), uc.clip(X[:rows], rule)[0], rtol=4 * 2**-23)
    assert clip.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("name", ["global norm", "largest", "rms", "average"])
def test_no_rows_at_run_time(name: str) -> None:
    """A gradient that turns out to have no rows has norm 0, as one that is known to have none."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def clip(grad: Any) -> Any:
        return uc.clip(grad, RULES[name])

    clipped, report = clip(X[:0])
    assert clipped.shape == (0, 3)
    assert report.norms == 0
    assert report.finite
    assert not report.clipped


@pytest.mark.parametrize("name", ["global norm", "largest", "rms", "average", "value"])
def test_unknown_rank(name: str) -> None:
    """Rules without axes clip tensors of which not even the number of dimensions is known."""
    clip = tf.function(lambda g: uc.clip(g, RULES[name])[0], input_signature=[tf.TensorSpec(None)])
    for grad in (X, X[0], X[:8].reshape(2, 4, 3)):
        np.testing.assert_allclose(clip(grad), uc.clip(grad, RULES[name])[0], rtol=4 * 2**-23)


@EVERY_MODE
def test_many_duplicates_in_half_precision(compiled: Any) -> None:
    """Rows that occur often are summed in float32; twice clipped in one function, under XLA too."""
    grad = tf.IndexedSlices(tf.ones((3000, 1), tf.bfloat16), tf.zeros(3000, tf.int32), tf.constant([2, 1]))

    def both(grad: Any) -> Any:
        return uc.clip_by_global_norm(grad, 10.0), uc.clip_by_norm(grad, 20.0)

    (clipped, norm), other = compiled(both)(grad)
    assert norm == 3000
    assert clipped.dtype == other.dtype == tf.bfloat16
    assert tf.convert_to_tensor(clipped).numpy().ravel().tolist() == [10, 0]
    assert tf.convert_to_tensor(other).numpy().ravel().tolist() == [20, 0]
