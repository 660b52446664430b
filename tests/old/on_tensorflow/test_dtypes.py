"""Every dtype and shape that an eager tensor can have, by rules of each scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import oracle
import uniclip as uc
from promises import EPS

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
SHAPES = [(), (0,), (1,), (3, 2)]
RULES: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "global": (uc.by_global_norm(2.0), lambda g: oracle.clip_leaf(g, 2.0)),
    "global, L3": (uc.by_global_norm(2.0, ord=3), lambda g: oracle.clip_leaf(g, 2.0, 3)),
    "by norm": (uc.by_norm(2.0), lambda g: oracle.clip_leaf(g, 2.0)),
    "below": (uc.by_norm(100.0), lambda g: g),
    "axis": (uc.by_norm(2.0, axis=-1), lambda g: oracle.clip_axes(g, 2.0, (-1,))),
    "value": (uc.by_value(-1.0, 1.0), lambda g: np.clip(g, -1, 1)),
    "agc": (uc.agc(0.5), lambda g: g * 0.5),
    "zero": (uc.by_norm(2.0, nonfinite="zero"), lambda g: oracle.clip_leaf(g, 2.0)),
    "skip": (uc.by_norm(2.0, nonfinite="skip"), lambda g: oracle.clip_leaf(g, 2.0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_eager(dtype: str, shape: tuple[int, ...], name: str) -> None:
    """Each is clipped, and keeps its dtype and shape."""
    rule, wanted = RULES[name]
    if (name == "value" and dtype.startswith("complex")) or (name == "axis" and not shape):
        with pytest.raises((TypeError, ValueError), match=r"^grads.*(no order|out of range)"):
            uc.clip(tf.zeros(shape, dtype), rule)
        return
    kind = "complex128" if dtype.startswith("complex") else "float64"
    values = np.arange(3, 3 + np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    grads = tf.cast(tf.constant(values), dtype)
    clipped, _ = uc.clip(grads, rule, params=grads)
    assert clipped.dtype == dtype
    assert clipped.shape == shape
    np.testing.assert_allclose(tf.cast(clipped, kind).numpy(), wanted(values), rtol=4 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits(dtype: str) -> None:
    """A limit may be a 0-d tensor of a narrow dtype, and a state is saved and loaded beside any gradient."""
    limit = tf.constant(2.0, dtype) if not dtype.startswith("complex") else 2.0
    for grads in (tf.cast(tf.constant(4.0), dtype), tf.cast(tf.fill((2, 2), 2.0), dtype)):
        for rule in (uc.by_norm(limit), uc.by_global_norm(limit, curve=uc.curves.normalize)):
            assert tf.norm(tf.cast(uc.clip(grads, rule)[0], "complex128")).numpy() == 2
        clipper, other = uc.Clipper(uc.norm_growth()), uc.Clipper(uc.norm_growth())
        clipper(grads)
        other.load_state_dict(clipper.state_dict())
        np.testing.assert_array_equal(other(grads).numpy(), grads.numpy())
