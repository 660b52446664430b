"""Unusual kinds of JAX's arrays: clipped where that makes sense, else refused by name."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import uniclip as uc

FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
RULES = [uc.by_global_norm(2.5), uc.by_norm(2.5, ord=3), uc.by_norm(2.5, axis=-1), uc.by_value(-2, 2)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_8_bits(dtype: str, compiled: bool) -> None:
    """8-bit floats, for which JAX promotes nothing, are clipped as float32, and rounded once."""
    wide = jnp.asarray([3.0, 4.0, -0.5])
    for rule in RULES:
        wanted = uc.clip([wide, jnp.ones(2)], rule)[0][0].astype(dtype)
        clip = partial(uc.clip, rule=rule)
        run = jax.jit(clip) if compiled else clip
        found = run([wide.astype(dtype), jnp.ones(2)])[0][0]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype("float32"), wanted.astype("float32"))


def test_sparse_8_bits() -> None:
    """Sparse ones stay sparse."""
    grad = sparse.BCOO((jnp.asarray([3.0, 4.0]).astype("float8_e5m2"), jnp.asarray([[2], [0]])), shape=(3,))
    clipped, report = uc.clip(grad, uc.by_norm(2.5))
    assert (clipped.dtype, clipped.nse, float(report.norms)) == (grad.dtype, 2, 5.0)
    np.testing.assert_array_equal(clipped.todense().astype("float32"), [2.0, 0.0, 1.5])


@pytest.mark.parametrize(
    "leaf",
    [jax.random.key(0), jnp.ones(2).astype("float8_e8m0fnu"), jnp.ones(2) > 0],
    ids=["key", "powers", "bool"],
)
def test_no_numbers(leaf: jax.Array) -> None:
    """What holds no numbers that gradients can have is refused."""
    for rule in (RULES[0], RULES[-1]):
        with pytest.raises(TypeError, match=r"grads\[1\] is a jax.* not an array of numbers"):
            uc.clip([jnp.ones(2), leaf], rule)


def test_default_device() -> None:
    """Results are where the gradients are, whatever the default device is."""
    here, other = jax.devices()[:2]
    grads = jax.device_put({"w": jnp.asarray([[3.0, 4.0]]), "b": jnp.ones(2)}, here)
    for rule in (*RULES, uc.by_value(-np.ones(2), np.ones(2)), uc.agc(0.1), uc.zclip(warmup=2), uc.autoclip(50)):
        state = rule.init(grads)
        wanted = rule.update(grads, state, grads)
        with jax.default_device(other):
            found = rule.update(grads, rule.init(grads), grads)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.devices() == b.devices() == {here}
            np.testing.assert_array_equal(a, b)


class Pair:
    """A node of a user's own with two children."""

    def __init__(self, one: jax.Array, two: jax.Array) -> None:
        self.one, self.two = one, two


class Twins(Pair):
    """A node that gives both of its children one name."""


@pytest.fixture(scope="module", autouse=True)
def _nodes() -> None:
    jax.tree_util.register_pytree_with_keys(
        Pair, lambda p: ((("one", p.one), ("two", p.two)), None), lambda _, parts: Pair(*parts)
    )
    same = jax.tree_util.GetAttrKey("one")
    jax.tree_util.register_pytree_with_keys(
        Twins, lambda p: (((same, p.one), (same, p.two)), None), lambda _, parts: Twins(*parts)
    )


@pytest.mark.parametrize("kind", [Pair, Twins])
def test_nodes_by_plain_keys(kind: type[Pair]) -> None:
    """Keys of a node may be of any kind, and need not differ."""
    clipped, report = uc.clip(kind(jnp.asarray([3.0, 4.0]), jnp.asarray([12.0])), uc.by_norm(1.0))
    assert type(clipped) is kind
    np.testing.assert_allclose(clipped.one, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose([report.norms.one, report.norms.two], [5.0, 12.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_strict_promotion(dtype: str) -> None:
    """JAX may forbid that dtypes or ranks are promoted: that is for the user's own code."""
    grads = {"w": jnp.arange(1.0, 9.0).reshape(4, 2).astype(dtype), "b": jnp.ones(4, dtype)}
    rules = [*RULES, uc.zclip(), uc.adagc(), uc.skip_spikes(), uc.autoclip(window=None), uc.agc(), uc.spam()]
    for rule in rules:
        state, params = rule.init(grads), {"w": grads["w"], "b": grads["b"]}
        wanted = rule.update(grads, state, params)[0]
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            for update in (rule.update, jax.jit(rule.update)):
                found = update(grads, rule.init(grads), params)[0]
                np.testing.assert_allclose(*(np.asarray(x["w"], "float32") for x in (found, wanted)), rtol=2**-7)


def test_reports_stay_where_the_gradients_are() -> None:
    """A report is made when somebody looks at it, wherever arrays are made by then."""
    one, two = jax.devices()[:2]
    for device in (one, two):
        grads = jax.device_put(jnp.asarray([3.0, 4.0]), device)
        for rule in (uc.by_global_norm(1.0), uc.by_norm(1.0), uc.zclip()):
            _, state, report = rule.update(grads, rule.init(grads))
            with jax.default_device(two if device is one else one):
                places = [array.devices() for array in jax.tree.leaves((report.norms, report.factors, state))]
            assert all(place == {device} for place in places)
