"""Every framework gives NumPy's result, and that of plain float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import dask
import jax
import numpy as np
import optree
import pytest
import tensorflow as tf

import oracle
import uniclip as uc
from frameworks import KNOWN, Framework

NAMES = ["array-api-strict", "mlx", "dask", "torch", "tensorflow", "tf.function", "jax", "jax.jit-x64"]
EPS = {"float32": 2**-23, "float64": 2**-52}
BATCH = [(4, 3), (4, 2, 3), (4, 5), (4, 2, 2, 2)]
RAGGED = [(2, 3, 2, 2), (5, 3), (7,), ()]

Parts = list[list[tuple[int, Any]]]
"""The groups of (number of the leaf, index into it) that share one norm."""


def nest(leaves: list[Any]) -> dict[str, Any]:
    """Put four leaves into a tree of every kind of container, with absent gradients."""
    conv, weight, bias, gain = leaves
    return {"conv": (conv, None), "dense": [weight, {"bias": bias, "unused": None}], "gain": gain, "frozen": None}


def unnest(tree: dict[str, Any]) -> list[Any]:
    """Take the leaves out again; another structure is an error."""
    assert isinstance(tree["conv"], tuple)
    assert isinstance(tree["dense"], list)
    (conv, no), (weight, dense), gain, frozen = tree["conv"], tree["dense"], tree["gain"], tree["frozen"]
    assert no is dense["unused"] is frozen is None
    return [conv, weight, dense["bias"], gain]


def dtypes(fw: Framework) -> list[str]:
    """Return the dtypes to compare in: one where another framework has compared the other, or lazy graphs take long."""
    return ["float64"] if fw.name in ("jax.jit-x64", "dask") else sorted(set(EPS) & set(fw.dtypes))


def together(leaves: list[np.ndarray]) -> Parts:
    """Join all leaves."""
    return [[(i, ...) for i in range(len(leaves))]]


def apart(leaves: list[np.ndarray]) -> Parts:
    """Keep every leaf by itself."""
    return [[(i, ...)] for i in range(len(leaves))]


def labelled(leaves: list[np.ndarray]) -> Parts:
    """Join the leaves under one name at the top of the tree."""
    return [[(0, ...)], [(1, ...), (2, ...)], [(3, ...)]]


def examples(leaves: list[np.ndarray]) -> Parts:
    """Join what belongs to one example, the first axis."""
    return [[(i, n) for i in range(len(leaves))] for n in range(len(leaves[0]))]


def slices(covered: Callable[[int], tuple[int, ...]]) -> Callable[[list[np.ndarray]], Parts]:
    """Keep every slice along the covered axes by itself."""

    def parts(leaves: list[np.ndarray]) -> Parts:
        return [
            [(i, index)]
            for i, leaf in enumerate(leaves)
            for index in product(
                *([slice(None)] if axis in covered(leaf.ndim) else range(n) for axis, n in enumerate(leaf.shape))
            )
        ]

    return parts


CASES: dict[str, tuple[Callable[[float], Any], Callable[[list[np.ndarray]], Parts], float, float]] = {
    "average": (uc.by_average_norm, apart, 2, 1),
    "block rms": (uc.by_block_rms, apart, 2, 0.5),
    "groups": (lambda c: uc.Rule(c, scope=uc.scopes.groups(lambda path, leaf: path[0])), labelled, 2, 0),
    "each entry": (lambda c: uc.Rule(c, scope=uc.scopes.each_entry), slices(lambda ndim: ()), 2, 0),
    "each example": (lambda c: uc.Rule(c, scope=uc.scopes.each_example), examples, 2, 0),
    "unit": (
        lambda c: uc.Rule(c, scope=uc.scopes.unit(0)),
        slices(lambda ndim: tuple(range(1 if ndim > 1 else 0, ndim))),
        2,
        0,
    ),
}
for p in (1, 2, 3, math.inf):
    CASES[f"global L{p}"] = (lambda c, p=p: uc.by_global_norm(c, ord=p), together, p, 0)
    CASES[f"leaf L{p}"] = (lambda c, p=p: uc.by_norm(c, ord=p), apart, p, 0)
    for axis in (0, 1):
        CASES[f"axis {axis} L{p}"] = (
            lambda c, p=p, axis=axis: uc.by_norm(c, axis=axis, ord=p),
            slices(lambda ndim, axis=axis: (axis,)),
            p,
            0,
        )


COMPILERS: dict[str, Callable[[Any], Any]] = {"tf.function": tf.function, "jax.jit-x64": jax.jit}
"""Where one compilation serves every limit."""


def clipped_by_loops(case: str, values: list[np.ndarray], limit: float) -> list[np.ndarray]:
    """Return what the oracle makes of the leaves, group by group."""
    _, parts, p, size_power = CASES[case]
    exact = [np.array(leaf, dtype="float64") for leaf in values]
    for part in parts(values):
        new = oracle.clip_global([values[i][index] for i, index in part], limit, p, size_power)
        for (i, index), slice_ in zip(part, new, strict=True):
            exact[i][index] = slice_
    return exact


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_rules(name: str, case: str) -> None:
    """Random trees, with limits below, at and above the norms, are clipped and reported alike everywhere."""
    make, parts, p, size_power = CASES[case]
    fw, rng = KNOWN[name](), np.random.default_rng(len(case))
    shapes = BATCH if "axis" in case or "example" in case else RAGGED

    def clip(grads: Any, limit: Any) -> Any:
        return uc.clip(grads, make(limit))

    run = COMPILERS.get(name, lambda function: function)(clip)
    for dtype in dtypes(fw):
        values = [np.asarray(10 * rng.standard_normal(shape), dtype=dtype) for shape in shapes]
        groups = [np.concatenate([np.ravel(values[i][index]) for i, index in part]) for part in parts(values)]
        norms = sorted(oracle.norm(group.tolist(), p, size_power) for group in groups)
        for limit, clips in [(norms[-1] * 2, False), (norms[len(norms) // 2], None), (norms[0] / 3, True)]:
            wanted, wanted_report = clip(nest(values), limit)
            with fw.context():
                grads = nest([fw.array(leaf, dtype) for leaf in values])
                clipped, report = run(grads, fw.array(limit, dtype) if name in COMPILERS else limit)
                if name == "dask":
                    clipped, report = dask.compute(clipped, report, scheduler="synchronous")
                exact = clipped_by_loops(case, values, limit)
                for leaf, numpy_leaf, truth in zip(unnest(clipped), unnest(wanted), exact, strict=True):
                    np.testing.assert_allclose(fw.numpy(leaf), numpy_leaf, rtol=4 * EPS[dtype], strict=True)
                    np.testing.assert_allclose(fw.numpy(leaf), truth, rtol=4 * EPS[dtype])
                for field, numpy_field in zip(tuple(report)[:3], tuple(wanted_report)[:3], strict=True):
                    assert optree.tree_structure(field) == optree.tree_structure(numpy_field)
                    for one, numpy_one in zip(optree.tree_leaves(field), optree.tree_leaves(numpy_field), strict=True):
                        np.testing.assert_allclose(fw.numpy(one), numpy_one, rtol=4 * EPS[dtype], strict=True)
                assert clips is None or bool(fw.numpy(report.clipped)) is clips


@pytest.mark.parametrize("name", NAMES)
def test_value(name: str) -> None:
    """Clipping by value gives the very same bits everywhere, whatever the bounds."""
    fw, rng = KNOWN[name](), np.random.default_rng(0)
    bounds = [(-math.inf, math.inf), (-0.7, 0.7), (0.1, 0.3), (-math.inf, 0.0), (0.5, 0.5)]
    for shapes, dtype in product([BATCH, RAGGED], dtypes(fw)):
        values = [np.asarray(rng.standard_normal(shape), dtype=dtype) for shape in shapes]
        with fw.context():
            tree = nest([fw.array(v, dtype) for v in values])
            for (lo, hi), clipped in zip(
                bounds, fw.run(lambda g: [uc.clip_by_value(g, *b) for b in bounds], tree), strict=True
            ):
                for leaf, value in zip(unnest(clipped), values, strict=True):
                    kind = value.dtype.type
                    np.testing.assert_array_equal(fw.numpy(leaf), np.clip(value, kind(lo), kind(hi)), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_exactly_at_the_limit(name: str) -> None:
    """A norm that equals its limit exactly changes no bit of any gradient on any framework."""
    fw = KNOWN[name]()
    grads = [[[3.0, -4.0]], [12.0, 0.0], [84.0], 720.0]
    limits = {1: 823.0, 2: 725.0, math.inf: 720.0}

    def clip(tree: Any) -> list[Any]:
        each = [uc.clip_by_norm(tree["conv"], 5.0), uc.clip_by_average_norm(tree["dense"], 84.0)]
        return [[uc.clip_by_global_norm(tree, c, ord=p)[0] for p, c in limits.items()], each]

    for dtype in dtypes(fw):
        with fw.context():
            tree = nest([fw.array(values, dtype) for values in grads])
            every, (conv, dense) = fw.run(clip, tree)
            for clipped in [*every, {**tree, "conv": conv, "dense": dense}]:
                for leaf, values in zip(unnest(clipped), grads, strict=True):
                    np.testing.assert_array_equal(fw.numpy(leaf), np.asarray(values, dtype=dtype), strict=True)


@pytest.mark.parametrize("name", ["numpy", *NAMES])
@pytest.mark.parametrize("rule", [uc.by_norm(1.0), uc.by_average_norm(1.0), uc.by_block_rms(1.0)], ids=repr)
def test_empty_leaf(rule: uc.Rule, name: str) -> None:
    """An empty gradient has norm 0 under every rule: it is reported neither as clipped nor as infinite."""
    fw = KNOWN[name]()
    with fw.context():
        clipped, report = fw.run(lambda g: uc.clip(g, rule), [fw.array(np.zeros((0, 3))), fw.array([0.3, 0.4])])
        assert tuple(clipped[0].shape) == (0, 3)
        assert fw.numpy(report.norms[0]) == 0
        assert bool(fw.numpy(report.finite))
        assert not bool(fw.numpy(report.clipped))


def test_every_framework_is_compared() -> None:
    """Each family of frameworks that the promises name is compared with NumPy here."""
    assert {KNOWN[name].family for name in NAMES} | {Framework.family} == {cls.family for cls in KNOWN.values()}


@pytest.mark.parametrize("name", ["torch", "tensorflow", "jax"])
def test_rows_of_a_sparse_gradient_beside_parameters(name: str) -> None:
    """The rows that are stored are not those of the parameter, not even where there are as many."""
    fw = KNOWN[name]()
    params = {"table": fw.array([[1.0], [2.0], [3.0]])}
    for rows in ([2, 0], [2, 0, 1]):
        grads = {"table": fw.sparse((3, 1), rows, [[1.0]] * len(rows))}
        for rule in (uc.agc(1.0, axis=1), uc.cowclip(fw.array([1.0, 1.0, 1.0]))):
            with pytest.raises(TypeError, match=r"grads\['table'\] is sparse.* make the gradient dense"):
                uc.clip(grads, rule, params=params)
    clipped, _ = uc.clip(grads, uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.each_leaf), params=params)
    assert abs(float(np.linalg.norm(fw.dense(clipped["table"]))) - 0.1 * math.sqrt(14.0)) < 1e-6
