"""Optax's transformations beside uniclip's functions: the same results, and where the two differ on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import uniclip as uc
from frameworks import JAX, JAXJit, JAXx64
from promises import close

fw = JAX()
RUNS = pytest.mark.parametrize("run", [JAX(), JAXJit(), JAXx64()], ids=["eager", "jit", "jit-x64"])
LIMITS = (0.3, 2.0, 1000.0)
PAIRS: dict[str, tuple[Callable[[float], Any], Callable[[Any, float], Any]]] = {
    "global norm": (optax.clip_by_global_norm, lambda g, c: uc.clip_by_global_norm(g, c)[0]),
    "block rms": (optax.clip_by_block_rms, lambda g, c: uc.clip(g, uc.by_block_rms(c))[0]),
    "value": (optax.clip, lambda g, c: uc.clip_by_value(g, -c, c)),
}


def native(transformation: Any, grads: Any) -> Any:
    """Run a transformation once."""
    return transformation.update(grads, transformation.init(grads))[0]


def random(dtype: str) -> dict[str, Any]:
    """Return a tree of random gradients of several shapes, one of them absent."""
    rng = np.random.default_rng(0)
    a, b, c, d = (fw.array(3 * rng.standard_normal(shape), dtype) for shape in [(5, 3), (7,), (2, 3, 4), ()])
    return {"a": a, "b": [b, None, (c, {"d": d})]}


@RUNS
@pytest.mark.parametrize("pair", PAIRS)
def test_clipped(run: JAX, pair: str) -> None:
    """Above and below the limit the gradients agree: to the bit by value, to a few units in the last place by norm."""
    theirs, ours = PAIRS[pair]
    dtype = run.default_float
    with run.context():
        grads = random(dtype)
        every = run.run(lambda g: [(ours(g, limit), native(theirs(limit), g)) for limit in LIMITS], grads)
        for a, b in every:
            assert jax.tree.structure(a) == jax.tree.structure(b) == jax.tree.structure(grads)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.dtype == y.dtype
                close(fw, x, np.asarray(y), dtype, ulps=0 if pair == "value" else 4)


@RUNS
@pytest.mark.parametrize("order", [None, 1, 2, math.inf])
def test_tree_norm(run: JAX, order: float | None) -> None:
    """optax.tree.norm and uc.global_norm return the same number in the same dtype, for every order optax knows."""
    dtype = run.default_float
    with run.context():
        ours, theirs = run.run(
            lambda g: (uc.global_norm(g, ord=order or 2), optax.tree.norm(g, ord=order)), random(dtype)
        )
        assert ours.dtype == theirs.dtype
        close(fw, ours, np.asarray(theirs), dtype)


@pytest.mark.parametrize("k", [5, 9, 17])
def test_exactly_at_the_limit(k: int) -> None:
    """At the limit optax computes (g/n)·n, which rounds for some norms n; uniclip returns the gradient as it is."""
    grad = jnp.asarray([3.0 * k, 4.0 * k])
    theirs = native(optax.clip_by_global_norm(5 * k), grad)
    assert (theirs != grad).any()
    close(fw, theirs, np.asarray(grad), "float32")
    assert uc.clip_by_global_norm(grad, 5 * k)[0] is grad


@pytest.mark.parametrize("pair", ["global norm", "block rms"])
def test_squares_overflow(pair: str) -> None:
    """Where squares overflow optax zeroes the gradient; uniclip clips it."""
    theirs, ours = PAIRS[pair]
    grad = jnp.asarray([1e30, 1.0])
    assert not native(theirs(1.0), grad).any()
    norm = 1e30 if pair == "global norm" else 1e30 / math.sqrt(2)
    close(fw, ours(grad, 1.0), [1e30 / norm, 1 / norm], "float32")


def test_only_measure() -> None:
    """Where squares overflow, optax's infinite limit makes NaN; uniclip's only measures."""
    grad = jnp.asarray([1e30, 1.0])
    assert jnp.isnan(native(optax.clip_by_global_norm(math.inf), grad)).all()
    assert uc.clip_by_global_norm(grad, math.inf)[0] is grad


def test_zero_limit_of_zero() -> None:
    """A zero gradient under a zero limit is NaN in optax and zero in uniclip."""
    grad = jnp.zeros(2)
    assert jnp.isnan(native(optax.clip_by_global_norm(0.0), grad)).all()
    assert not uc.clip_by_global_norm(grad, 0.0)[0].any()


@pytest.mark.parametrize(("limit", "factor"), [(-1.0, -0.2), (math.nan, math.nan)])
def test_wrong_limits(limit: float, factor: float) -> None:
    """Optax turns the gradient round for a negative limit and makes NaN for NaN; uniclip raises."""
    grad = jnp.asarray([3.0, 4.0])
    np.testing.assert_allclose(native(optax.clip_by_global_norm(limit), grad), factor * np.asarray(grad), rtol=1e-6)
    with pytest.raises(ValueError, match="must be 0 or more"):
        uc.clip_by_global_norm(grad, limit)


def test_wrong_bounds() -> None:
    """optax.clip(-1) makes every entry -1; uniclip raises."""
    assert native(optax.clip(-1.0), jnp.asarray([3.0, 0.5])).tolist() == [-1.0, -1.0]
    with pytest.raises(ValueError, match="min must not be above max"):
        uc.by_value(1.0, -1.0)


def test_half_precision_sum() -> None:
    """Optax adds squares in bfloat16, whose sum stops growing at 256; uniclip adds them in float32."""
    grads = [jnp.ones(1, jnp.bfloat16) for _ in range(300)]
    assert optax.tree.norm(grads) == 16
    close(fw, uc.global_norm(grads), math.sqrt(300), "float32")
    assert native(optax.clip_by_global_norm(16.5), grads)[0] == 1
    close(fw, uc.clip_by_global_norm(grads, 16.5)[0][0], [16.5 / math.sqrt(300)], "bfloat16")


def test_two_precisions() -> None:
    """Optax casts the norm to float16 for a float16 leaf, which it zeroes where that overflows; uniclip does not."""
    grads = [jnp.asarray([3.0], jnp.float16), jnp.asarray([1e5])]
    np.testing.assert_array_equal(np.concatenate(native(optax.clip_by_global_norm(1.0), grads)), [0.0, 1.0])
    clipped, _ = uc.clip_by_global_norm(grads, 1.0)
    np.testing.assert_allclose(clipped[0].astype("float32"), [3e-5], rtol=1e-2)  # a subnormal of float16


def test_half_precision_overflow() -> None:
    """Optax zeroes a float16 gradient whose squares overflow; uniclip clips it."""
    grad = jnp.asarray([300.0, 400.0], jnp.float16)
    assert not native(optax.clip_by_global_norm(1.0), grad).any()
    assert not native(optax.clip_by_block_rms(1.0), grad).any()
    close(fw, uc.clip_by_global_norm(grad, 1.0)[0], [0.6, 0.8], "float16")


def test_sparse() -> None:
    """Optax takes the indices of a BCOO for gradients and rewrites them; uniclip clips its data only."""
    grad = sparse.BCOO((jnp.asarray([3.0, 4.0]), jnp.asarray([[0], [7]])), shape=(10,))
    close(fw, optax.tree.norm(grad), math.sqrt(3**2 + 4**2 + 7**2), "float32")
    assert native(optax.clip(1.0), grad).indices.tolist() == [[0], [1]]
    assert uc.global_norm(grad) == 5
    assert uc.clip_by_value(grad, -1, 1).indices.tolist() == [[0], [7]]


@pytest.mark.parametrize("pair", ["global norm", "block rms"])
def test_derivative_at_zero(pair: str) -> None:
    """The derivative through optax's clip is NaN at zero; through uniclip's it is 1."""
    theirs, ours = PAIRS[pair]
    assert jnp.isnan(jax.grad(lambda x: native(theirs(1.0), x).sum())(jnp.zeros(2))).all()
    assert jax.grad(lambda x: ours(x, 1.0).sum())(jnp.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pair", ["global norm", "block rms"])
def test_infinite_gradient(pair: str) -> None:
    """An infinite entry makes optax zero the finite ones; uniclip makes NaN of its whole scope."""
    theirs, ours = PAIRS[pair]
    grad = jnp.asarray([1.0, math.inf])
    np.testing.assert_array_equal(native(theirs(1.0), grad), [0.0, math.nan])
    assert jnp.isnan(ours(grad, 1.0)).all()


def test_integers() -> None:
    """Optax cannot clip integers by norm and turns them into floats by value; uniclip does the reverse."""
    grad = jnp.asarray([3, 4])
    with pytest.raises(TypeError, match="same dtypes"):
        native(optax.clip_by_global_norm(1.0), grad)
    close(fw, uc.clip_by_global_norm(grad, 1.0)[0], [0.6, 0.8], "float32")
    assert native(optax.clip(3.5), grad).dtype == jnp.float32
    assert uc.clip_by_value(grad, -3, 3).dtype == grad.dtype


def test_same_array_twice() -> None:
    """An array in two places counts in each, in both."""
    grad = jnp.asarray([3.0, 4.0])
    ours, theirs = uc.clip_by_global_norm([grad, grad], 1.0)[0], native(optax.clip_by_global_norm(1.0), [grad, grad])
    for a, b in zip(ours, theirs, strict=True):
        close(fw, a, np.asarray([3.0, 4.0]) / math.sqrt(50), "float32")
        close(fw, b, np.asarray(a), "float32")
