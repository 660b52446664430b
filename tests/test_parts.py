"""Two processes, simulated by threads, with shards of one tree, joined by ``all_reduce=``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit.frameworks import Framework
from kit.trees import leaves, mapped

PATIENCE = 60
"""Seconds that a process waits for the other one."""
SHAPES = {"a": (3, 4), "b": (5,), "c": (3, 4), "d": (5,)}
HELD = (("a", "b"), ("c", "d"))
"""The leaves of two stages of a pipeline."""
STRICT = ("array-api-strict", "array-api-strict-device", "cupy-like")
WITH_FLOAT64 = ("numpy", "torch", "tensorflow", *STRICT)
"""The frameworks whose arrays may be float64."""


def together(
    framework: Framework, parts: Sequence[Any], run: Callable[[Any, Callable[[Any, str], Any]], Any]
) -> list[Any]:
    """Return ``run(part, all_reduce)`` of each part as NumPy arrays; all run at once."""
    barrier, given = threading.Barrier(len(parts), timeout=PATIENCE), dict[int, np.ndarray]()

    def process(number: int) -> Any:
        def all_reduce(own: Any, op: str) -> Any:
            given[number] = np.array(framework.numpy(own))
            barrier.wait()
            arrays = np.stack([given[one] for one in range(len(parts))])
            # Both have read before the next values are written.
            barrier.wait()
            # Libraries may drop NaN in a maximum.
            joined = arrays.sum(0) if op == "sum" else np.fmax.reduce(arrays)
            return framework.array(joined, framework.dtype(own))

        try:
            with framework.context():
                # A lazy array must be computed in the thread that created it.
                return mapped(
                    lambda x: np.array(framework.numpy(x)), run(parts[number], all_reduce)
                )
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(process, range(len(parts))))


def values(by: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the leaves of all processes."""
    rng = np.random.default_rng(seed)
    return {name: by * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def arrays(
    framework: Framework, tree: dict[str, Any], names: Sequence[str] = tuple(SHAPES)
) -> dict[str, Any]:
    """Return some leaves as arrays of a framework."""
    return {name: None if tree[name] is None else framework.array(tree[name]) for name in names}


def in_group(path: Any, leaf: Any) -> str:
    """Return the group of a leaf; each stage has leaves of both."""
    return "first" if path[0] in {"a", "d"} else "second"


def is_a(path: Any, leaf: Any) -> bool:
    """Return whether a leaf is the first."""
    return path[0] == "a"


JOINT: dict[str, Any] = {
    "global": uc.by_global_norm(0.5),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "mean square": uc.Rule(0.1, norm=uc.norms.RMS),
    "relative": uc.Rule(uc.limits.Relative(0.1)),
    "named groups": uc.by_group_norm({"first": 0.3, "second": 0.4}, in_group),
    "autoclip": uc.autoclip(50, window=4),
    "zclip": uc.zclip(z=1.0, warmup=2),
    "spikes": uc.skip_spikes(z=2.0, window=4, warmup=2),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "chain": uc.chain(uc.by_value(-2.0, 2.0), uc.by_global_norm(0.5)),
}
"""Rules whose processes may have different leaves."""
EACH: dict[str, Any] = {
    **{name: rule for name, rule in JOINT.items() if name not in {"mean square", "relative"}},
    "leaf": uc.by_norm(0.5),
    "budget": uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.each_leaf),
    "adagc": uc.adagc(warmup=1),
    "zero of each": uc.by_norm(0.5, nonfinite="zero"),
    "masked": uc.masked(
        uc.chain(uc.by_value(-2.0, 2.0), uc.adagc(warmup=1)), lambda path, leaf: path[0] != "b"
    ),
}
"""Rules for shards of the same leaves. An absent gradient has no size."""
LOSSES, SPREAD = (1.0, 1.2, 9.0), (0.3, 0.3, 8.5)
STEPS = (0.5, 2.0, 3.0)


def flag(framework: Framework, found: Any) -> Any:
    """Return a flag of a report, or ``None``."""
    return framework.array(-1 if found is None else bool(framework.numpy(found)))


def three_steps(
    framework: Framework, rule: Any, trees: list[Any], params: Any, **joins: Any
) -> list[Any]:
    """Return the gradients of three steps, and the values that must agree between processes."""
    state, found = rule.init(params), []
    for grads, loss in zip(trees, joins.pop("losses", LOSSES), strict=True):
        clipped, state, report = rule.update(grads, state, params, loss=loss, **joins)
        found.append((clipped, flag(framework, report.finite), flag(framework, report.skipped)))
    return found


def alike(
    found: Any, wanted: Any, part: Callable[[str, Any], Any] = lambda name, leaf: leaf
) -> None:
    """Compare the steps of a process with shards to those of a process with the full tree."""
    for step, ((clipped, *flags), (whole, *all_flags)) in enumerate(
        zip(found, wanted, strict=True)
    ):
        assert flags == all_flags, step
        for name, leaf in clipped.items():
            if leaf is not None:
                bound = {"rtol": 1e-5, "atol": 1e-7, "err_msg": f"{name} at step {step}"}
                np.testing.assert_allclose(leaf, part(name, whole[name]), **bound)


def alone(framework: Framework, rule: Any, trees: list[Any], params: Any) -> Any:
    """Return the steps of one process as NumPy arrays."""
    steps = three_steps(
        framework, rule, [arrays(framework, tree) for tree in trees], arrays(framework, params)
    )
    return mapped(lambda x: np.array(framework.numpy(x)), steps)


@pytest.mark.parametrize(
    ("held", "bad"),
    [(HELD, None), (HELD, "a"), (HELD, "d"), ((("a", "b"), ("a", "c", "d")), None)],
    ids=["finite", "inf", "nan", "copies"],
)
def test_stages(framework: Framework, held: Any, bad: str | None) -> None:
    """Processes with different leaves, or replicas, find the same as one with all leaves.

    NaN and ∞ in one process reach both.
    """
    trees, params = [values(by, number) for number, by in enumerate(STEPS)], values(0.3)
    if bad is not None:
        trees[1][bad].flat[3] = math.inf if bad == "a" else math.nan
    wanted = {name: alone(framework, rule, trees, params) for name, rule in JOINT.items()}

    def run(mine: Sequence[str], join: Any) -> Any:
        grads, theirs = (
            [arrays(framework, tree, mine) for tree in trees],
            arrays(framework, params, mine),
        )
        # The loss of one process is the mean. In the last step, a process alone would see no spike.
        spread = [
            loss + by if mine == held[0] else loss - by
            for loss, by in zip(LOSSES, SPREAD, strict=True)
        ]
        how = {"all_reduce": join, "losses": spread, "shared": is_a if held != HELD else None}
        return {
            name: three_steps(framework, rule, grads, theirs, **how) for name, rule in JOINT.items()
        }

    for found in together(framework, held, run):
        for name in JOINT:
            alike(found[name], wanted[name])


@pytest.mark.parametrize("tellers", [0, 1])
def test_losses_of_some(framework: Framework, tellers: int) -> None:
    """The mean is over the processes with a loss; without any, only norms can spike."""
    rule, trees, params = (
        uc.skip_spikes(2.0, 3, 2),
        [values(by) for by in (1.0, 1.1, 1.0, 1.05)],
        values(0.3),
    )
    losses = [1.0, 1.2, 1.1, 99.0]

    def run(number: int, join: Any) -> Any:
        told = losses if number < tellers else [None] * len(losses)
        grads, theirs = (
            [arrays(framework, tree, HELD[number]) for tree in trees],
            arrays(framework, params, HELD[number]),
        )
        return three_steps(framework, rule, grads, theirs, all_reduce=join, losses=told)

    for steps in together(framework, range(len(HELD)), run):
        skipped = [bool(np.asarray(skipped) == 1) for _, _, skipped in steps]
        assert skipped == [False, False, False, tellers > 0]


@pytest.mark.parametrize(
    ("absent", "names"), [((1,), set(EACH)), ((0, 1), set(EACH))], ids=["in one", "in both"]
)
def test_halves(framework: Framework, absent: tuple[int, ...], names: set[str]) -> None:
    """Processes with shards of the same leaves find the same as one with the full leaves.

    A gradient is absent in one of them, or in both.
    """
    some = {name: EACH[name] for name in sorted(names)}
    trees, params = [values(by, number) for number, by in enumerate(STEPS)], values(0.3)
    trees[1]["c"][:, 2:] = 0
    half = lambda leaf, number: np.split(leaf, [2], axis=-1)[number]
    alone_trees = [trees[0], trees[1] | ({"c": None} if len(absent) == 2 else {}), trees[2]]
    wanted = {name: alone(framework, rule, alone_trees, params) for name, rule in some.items()}

    def run(number: int, join: Any) -> Any:
        mine: Any = [
            {name: half(leaf, number) for name, leaf in tree.items()} for tree in (*trees, params)
        ]
        if number in absent:
            mine[1]["c"] = None
        *grads, theirs = (arrays(framework, tree) for tree in mine)
        return {
            name: three_steps(framework, rule, grads, theirs, all_reduce=join)
            for name, rule in some.items()
        }

    for number, found in enumerate(together(framework, range(2), run)):
        for name in some:
            alike(found[name], wanted[name], lambda _, leaf, number=number: half(leaf, number))


def test_a_copy_that_is_not_said_counts_twice(framework: Framework) -> None:
    """Only ``shared=`` distinguishes a replica from another leaf of the same name."""
    leaf = values()["a"]
    run = lambda part, join: (
        uc.clip({"a": framework.array(leaf)}, JOINT["global"], None, join)[1].norms
    )
    for norm in together(framework, range(2), run):
        np.testing.assert_allclose(norm, math.sqrt(2) * np.linalg.norm(leaf), rtol=1e-6)


@pytest.mark.only(*WITH_FLOAT64)
def test_a_copy_whose_squares_underflow(framework: Framework) -> None:
    """The share of a replica in a tiny sum of squares does not underflow."""
    run = lambda part, join: (
        uc.clip(
            {"a": framework.array([3e-200, 4e-200], "float64")},
            JOINT["global"],
            None,
            join,
            shared=is_a,
        )[1].norms
    )
    for norm in together(framework, range(2), run):
        np.testing.assert_allclose(norm, 5e-200, rtol=1e-12)


@pytest.mark.only(*WITH_FLOAT64)
def test_one_has_float64(framework: Framework) -> None:
    """If one process has float64 gradients, both sum in float64, and find bitwise the same norm."""
    for factor in (1.0, 1e-200):
        tree = values(factor)
        for rule in (JOINT["global"], JOINT["named groups"]):

            def run(number: int, join: Any, tree: Any = tree, rule: Any = rule) -> Any:
                dtype = ("float32", "float64")[number]
                grads = {name: framework.array(tree[name], dtype) for name in HELD[number]}
                clipped, report = uc.clip(grads, rule, None, join)
                return clipped, report.norms

            (one, norms), (two, norms_too) = together(framework, range(2), run)
            # Float32 underflows.
            representable = {
                name: leaf * (factor == 1.0 or name in HELD[1]) for name, leaf in tree.items()
            }
            wanted, report = uc.clip(representable, rule)
            assert leaves(norms) == leaves(norms_too)
            np.testing.assert_allclose(leaves(norms), leaves(report.norms), rtol=1e-6)
            for name, leaf in (one | two).items():
                np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5)
                assert leaf.dtype == ("float32" if name in one else "float64")


@pytest.mark.only("torch", "tensorflow", "jax")
def test_one_is_sparse(framework: Framework) -> None:
    """A sharded leaf may be sparse: duplicate rows are summed, and it stays sparse."""
    # Rows 0 and 2 of it, the first one stored twice.
    table = [[3.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    tree = values() | {"a": np.asarray([[4.0, 0.0], [0.0, 0.0], [0.0, 1.0]])}

    def run(number: int, join: Any) -> Any:
        grads = arrays(framework, tree, HELD[number])
        if number == 0:
            grads["a"] = framework.sparse((3, 2), [0, 2, 0], table)
        clipped, report = uc.clip(grads, JOINT["global"], None, join)
        if number == 0:
            clipped["a"] = framework.array(framework.dense(clipped["a"]))
        return clipped, report.norms

    (one, norm), (two, norm_too) = together(framework, range(2), run)
    wanted, report = uc.clip(tree, JOINT["global"])
    assert norm == norm_too
    np.testing.assert_allclose(norm, report.norms, rtol=1e-6)
    for name, leaf in (one | two).items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5)


def test_a_sum_beyond_the_range(framework: Framework) -> None:
    """The norm is right even if the sum of the processes' squares overflows."""
    dtype, entry = ("float64", 1.1e154) if "float64" in framework.dtypes else ("float32", 1.5e19)
    run = lambda part, join: (
        uc.clip([framework.array([entry], dtype)], uc.by_global_norm(1.0), None, join)[1].norms
    )
    for norm in together(framework, range(2), run):
        np.testing.assert_allclose(norm, entry * math.sqrt(2), rtol=1e-6)


REFUSED: dict[str, tuple[Sequence[Any], Any, str]] = {
    "two limits": ((uc.by_norm(0.5), uc.by_norm(0.25)), ValueError, "rule"),
    "two scopes": ((uc.by_norm(0.5), uc.by_global_norm(0.5)), ValueError, "rule"),
    "two rules with memory": ((uc.zclip(z=2.0), uc.zclip(z=3.0)), ValueError, "rule"),
    "an axis": ((uc.by_norm(0.5, axis=0),) * 2, ValueError, "all_reduce="),
    "units": ((uc.agc(0.5),) * 2, ValueError, "all_reduce="),
    "rows": ((uc.Rule(1.0, scope=uc.scopes.each_row),) * 2, ValueError, "all_reduce="),
    "NaN in one": (
        (uc.by_global_norm(1.0, nonfinite="raise"),) * 2,
        FloatingPointError,
        "finite|NaN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_both(framework: Framework, case: str) -> None:
    """A mistake of one process is an error in both, before any write, and neither waits."""
    rules, error, token = REFUSED[case]

    def run(number: int, join: Any) -> Any:
        rule = rules[number]
        grads = {
            "a": framework.array(np.full((2, 2), math.nan if number and "NaN" in case else 1.0))
        }
        with pytest.raises(error, match=token):
            rule.update(grads, rule.init(grads), grads, join, in_place=framework.writes)
        return leaves(grads)

    for number, [grad] in enumerate(together(framework, range(2), run)):
        np.testing.assert_array_equal(
            grad, np.full((2, 2), math.nan if number and "NaN" in case else 1.0)
        )
