"""Hypothesis over scope, norm, limit, curve, tree and dtype, against plain float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import oracle
import uniclip as uc
from frameworks import EAGER, Framework, some_of
from promises import EPS

WAYS = some_of(*EAGER, "jax.jit-x64")  # which has all dtypes; others compile what is tried here by chance in the fuzz
RANGE = {"float16": 11, "bfloat16": 100, "float32": 100, "float64": 900, "complex64": 100, "complex128": 900}
"""How many powers of two from 1 the entries lie; their squares are far out of range."""
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "complex64": 2.0**-126}
SCOPES = {
    "all leaves": uc.scopes.all_leaves,
    "each leaf": uc.scopes.each_leaf,
    "each entry": uc.scopes.each_entry,
    "rows": uc.scopes.axes(-1),
    "columns": uc.scopes.axes(0),
    "unit": uc.scopes.unit(0),
    "groups": uc.scopes.groups(lambda path, leaf: len(path) % 2),
}
CURVES: dict[Callable[..., Any], Callable[[float, float], float]] = {
    uc.curves.hard: oracle.factor,
    uc.curves.soft: lambda n, c: c / (c + n) if c + n else 1.0,
    lambda xp, n, c: xp.sqrt(uc.curves.hard(xp, n, c)): lambda n, c: math.sqrt(oracle.factor(n, c)),
}


@dataclass(frozen=True)
class Case:
    """A tree of gradients and a rule for it."""

    leaves: list[np.ndarray]
    nested: Any
    dtype: str
    scope: str
    norm: uc.Norm
    ratio: float
    """The limit, as a multiple of the norm of all leaves."""

    @property
    def size(self) -> float:
        """The norm of all leaves together."""
        return oracle.norm(
            (x for leaf in self.leaves for x in leaf.ravel().tolist()), self.norm.ord, self.norm.size_power
        )

    @property
    def limit(self) -> float:
        """The limit, a number that every dtype of a norm holds."""
        return float(np.float32(self.ratio)) if self.size == 0 else _rounded(self.ratio * self.size, self.dtype)

    @property
    def ulp(self) -> float:
        """The precision of a leaf."""
        return EPS[self.dtype]


def _rounded(value: float, dtype: str) -> float:
    return value if EPS[dtype] < 2**-40 else float(np.float32(value))


@st.composite
def cases(draw: st.DrawFn, fw: Framework) -> Case:
    """Draw a case whose dtype the framework has."""
    dtype = draw(st.sampled_from([name for name in fw.dtypes if name in RANGE]))
    scale = 2.0 ** draw(st.integers(-RANGE[dtype], RANGE[dtype]))
    parts = st.one_of(st.just(0.0), st.floats(2**-8, 1, width=16), st.floats(-1, -(2**-8), width=16))
    entries = st.builds(complex, parts, parts) if dtype.startswith("complex") else parts
    kind = "complex128" if dtype.startswith("complex") else "float64"
    shapes = hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4)
    arrays = hnp.arrays(kind, shapes, elements=entries)
    # As the framework rounds them: bfloat16 holds 8 bits of what float16 gave.
    leaf = arrays.map(lambda a: fw.numpy(fw.array(a * scale, dtype)).astype(kind))
    nested = draw(st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | _dicts(inner), max_leaves=4))
    return Case(
        optree.tree_leaves(nested),
        nested,
        dtype,
        draw(st.sampled_from(sorted(SCOPES))),
        uc.Norm(draw(st.sampled_from([1, 1.5, 2, 3, 7, math.inf])), draw(st.sampled_from([0, 0.5, 1]))),
        draw(st.sampled_from([0.0, 1.0, math.inf]) | st.floats(2**-6, 2**6)),
    )


def _dicts(inner: Any) -> Any:
    return st.dictionaries(st.sampled_from("abc"), inner, max_size=3)


def arrays(fw: Framework, case: Case) -> Any:
    """Return the tree of the case in arrays of the framework."""
    return optree.tree_map(lambda leaf: fw.array(leaf, case.dtype), case.nested)


def wanted(case: Case, curve: Callable[[float, float], float]) -> list[np.ndarray]:
    """Return what plain loops make of the case."""
    paths = optree.tree_paths(case.nested)
    p, power, scope = case.norm.ord, case.norm.size_power, SCOPES[case.scope]
    if scope.label is None:
        covered = [scope.covered(leaf.ndim, 0) for leaf in case.leaves]
        over = [tuple(range(leaf.ndim)) if c is None else c for leaf, c in zip(case.leaves, covered, strict=True)]
        return [
            oracle.clip_axes(leaf, case.limit, axes, p, power, curve) if leaf.size else leaf
            for leaf, axes in zip(case.leaves, over, strict=True)
        ]
    labels = [scope.label(path, None) for path in paths]
    by_label = {}
    for label in set(labels):
        group = [leaf for leaf, own in zip(case.leaves, labels, strict=True) if own == label]
        by_label[label] = iter(oracle.clip_global(group, case.limit, p, power, curve))
    return [next(by_label[label]) for label in labels]


def near(case: Case, actual: np.ndarray, expected: np.ndarray, ulps: float = 16) -> None:
    """Assert equality to some units in the last place of the leaf, or of the smallest normal number."""
    tiny = TINY.get(case.dtype, 2.0**-1022)
    np.testing.assert_allclose(actual.astype(expected.dtype), expected, rtol=ulps * case.ulp, atol=ulps * tiny)


def examples(fw: Framework) -> Any:
    """Run fewer examples where each one is compiled or slow; ``--hypothesis-profile=thorough`` runs many."""
    fw.array([1.0])  # what an import draws at random must not happen while Hypothesis draws
    return settings(max_examples=max(2, settings.default.max_examples // fw.cost // fw.first))


@pytest.mark.parametrize("fw", WAYS, ids=lambda framework: framework.name)
@pytest.mark.parametrize("curve", CURVES, ids=["hard", "soft", "root"])
def test_against_the_oracle(fw: Framework, curve: Callable[..., Any]) -> None:
    """Any combination of the choices agrees with plain loops."""

    @examples(fw)
    @given(cases(fw))
    def check(case: Case) -> None:
        rule = uc.Rule(case.limit, scope=SCOPES[case.scope], norm=case.norm, curve=curve)
        grads = arrays(fw, case)
        clipped = optree.tree_leaves(fw.run(lambda g: uc.clip(g, rule)[0], grads))
        for old, new, expected in zip(case.leaves, clipped, wanted(case, CURVES[curve]), strict=True):
            assert fw.dtype(new) == case.dtype
            near(case, fw.numpy(new), expected)
            assert (np.abs(fw.numpy(new).astype(old.dtype)) <= np.abs(old)).all()

    with fw.context():
        check()


@pytest.mark.parametrize("fw", WAYS, ids=lambda framework: framework.name)
def test_below_and_above(fw: Framework) -> None:
    """Below the limit the same bits; above it a norm of the limit to 4 ulp, and clipping again changes no more."""

    @examples(fw)
    @given(cases(fw))
    def check(case: Case) -> None:
        limit = case.limit
        grads = arrays(fw, case)
        run = lambda g: uc.clip(g, uc.Rule(limit, norm=case.norm))[0]
        once = fw.run(run, grads)
        new = [
            fw.numpy(leaf).astype(old.dtype) for leaf, old in zip(optree.tree_leaves(once), case.leaves, strict=True)
        ]
        size = oracle.norm((x for leaf in new for x in leaf.ravel().tolist()), case.norm.ord, case.norm.size_power)
        note(f"norm {case.size}, limit {limit}, then {size}")
        if case.size <= limit * (1 - 1e-5):
            for old, leaf in zip(case.leaves, new, strict=True):
                np.testing.assert_array_equal(old, leaf)
        smallest = TINY.get(case.dtype, 2.0**-1022) * sum(leaf.size for leaf in new)
        assert size <= limit * (1 + 4 * case.ulp) + smallest
        for leaf, again in zip(new, optree.tree_leaves(fw.run(run, once)), strict=True):
            near(case, fw.numpy(again), leaf, ulps=4)

    with fw.context():
        check()


@pytest.mark.parametrize("fw", WAYS, ids=lambda framework: framework.name)
def test_splits_order_and_powers_of_two(fw: Framework) -> None:
    """How entries are split into leaves, ordered and nested does not matter; 2ᵏ times the gradients give 2ᵏ times."""

    @examples(fw)
    @given(cases(fw), st.integers(-10, 10))
    def check(case: Case, power: int) -> None:
        assume(case.size > 0 and case.dtype != "float16")  # which has few powers to spare
        flat = np.concatenate([leaf.ravel() for leaf in case.leaves])
        by = 2.0**power
        rules = [uc.Rule(case.limit, norm=case.norm), uc.Rule(case.limit * by, norm=case.norm)]

        def both(tree: Any, backwards: Any, joined: Any, scaled: Any) -> Any:
            return [uc.clip(g, rules[0])[0] for g in (tree, backwards, joined)] + [uc.clip(scaled, rules[1])[0]]

        backwards = {str(len(case.leaves) - i): fw.array(leaf, case.dtype) for i, leaf in enumerate(case.leaves)}
        joined, scaled = fw.array(flat, case.dtype), fw.array(flat * by, case.dtype)
        tree, turned, whole, larger = fw.run(both, arrays(fw, case), backwards, joined, scaled)
        one = np.concatenate([fw.numpy(leaf).ravel() for leaf in optree.tree_leaves(tree)]).astype(flat.dtype)
        two = np.concatenate([fw.numpy(turned[key]).ravel() for key in backwards]).astype(flat.dtype)
        for other in (two, fw.numpy(whole).astype(flat.dtype), fw.numpy(larger).astype(flat.dtype) / by):
            near(case, other, one)

    with fw.context():
        check()
