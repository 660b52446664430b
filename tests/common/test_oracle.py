"""Hypothesis over scope, norm, limit and tree, against plain float64 loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import oracle
import uniclip as uc
from frameworks import CHOSEN, Framework

ENTRIES = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda x: 0.0 if abs(x) < 1e-18 else x)
LEAVES = st.lists(
    hnp.arrays("float32", hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4), elements=ENTRIES),
    max_size=4,
)
NORMS = st.builds(uc.Norm, st.sampled_from([1, 1.5, 2, 3, 7, math.inf]), st.sampled_from([0, 0.5, 1]))
EAGER = {"numpy", "numpy-readonly", "array-api-strict", "torch", "tensorflow", "jax"}
FAST = [framework for framework in CHOSEN if framework.name in EAGER]


def check(fw: Framework, leaves: list[np.ndarray], axes: Any, joined: bool, norm: uc.Norm, limit: float) -> None:
    """Compare one rule with the oracle; a result may differ by some ulp of its own size."""
    everything = [x for leaf in leaves for x in leaf.ravel().tolist()]
    if joined:
        scope, wanted = (
            uc.all_leaves,
            oracle.clip_global(leaves, limit, norm.p, norm.size_power) if everything else leaves,
        )
    else:
        scope = uc.Scope(axes=axes)
        covered = [tuple(range(leaf.ndim)) if axes is None else axes for leaf in leaves]
        wanted = [
            oracle.clip_axes(leaf, limit, over, norm.p, norm.size_power) if leaf.size else leaf
            for leaf, over in zip(leaves, covered, strict=True)
        ]
    grads = [fw.array(leaf) for leaf in leaves]
    clipped, _ = uc.clip(grads, uc.Rule(limit, scope=scope, norm=norm))
    for new, expected in zip(clipped, wanted, strict=True):
        np.testing.assert_allclose(fw.numpy(new), expected, rtol=2e-6, atol=1e-37)
    properties(fw, leaves, grads, clipped, uc.Rule(limit, scope=scope, norm=norm))


def properties(fw: Framework, leaves: list[np.ndarray], grads: list[Any], clipped: list[Any], rule: uc.Rule) -> None:
    """Never larger, same sign, nothing given is changed, clipping again changes next to nothing."""
    again, _ = uc.clip(clipped, rule)
    for leaf, old, new, newer in zip(leaves, grads, clipped, again, strict=True):
        np.testing.assert_array_equal(leaf, fw.numpy(old))
        assert (np.abs(fw.numpy(new)) <= np.abs(leaf)).all()
        assert (fw.numpy(new) * np.sign(leaf) >= 0).all()
        np.testing.assert_allclose(fw.numpy(newer), fw.numpy(new), rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("fw", FAST, ids=lambda framework: framework.name)
@settings(max_examples=60, deadline=None)
@given(
    leaves=LEAVES,
    axes=st.sampled_from([None, (), (0,), (-1,), (0, 1)]),
    joined=st.booleans(),
    norm=NORMS,
    limit=st.floats(0, 2.0**20, width=32).map(lambda x: 0.0 if x < 1e-6 else x),
)
def test_against_the_oracle(
    fw: Framework, leaves: list[np.ndarray], axes: tuple[int, ...] | None, joined: bool, norm: uc.Norm, limit: float
) -> None:
    """Any combination of the choices agrees with plain loops."""
    check(fw, leaves, axes, joined, norm, limit)


@settings(max_examples=100, deadline=None)
@given(leaves=LEAVES, power=st.integers(-30, 30), norm=NORMS)
def test_powers_of_two_and_splits(leaves: list[np.ndarray], power: int, norm: uc.Norm) -> None:
    """Scaling gradients and limit by 2ᵏ scales the result by 2ᵏ; how entries are split into leaves does not matter."""
    rule, scaled = (uc.Rule(limit, norm=norm) for limit in (1.0, 2.0**power))
    flat = np.concatenate([leaf.ravel() for leaf in leaves]) if leaves else np.zeros(0, "float32")
    plain, _ = uc.clip(leaves, rule)
    for one, other in zip(plain, uc.clip([leaf * np.float32(2.0**power) for leaf in leaves], scaled)[0], strict=True):
        np.testing.assert_allclose(other, one * np.float32(2.0**power), rtol=2e-6, atol=1e-37)
    whole, _ = uc.clip(flat, rule)
    joined = np.concatenate([leaf.ravel() for leaf in plain]) if leaves else flat
    np.testing.assert_allclose(joined, whole, rtol=2e-6, atol=1e-37)
