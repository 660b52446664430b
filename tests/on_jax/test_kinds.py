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
