"""Two processes, as two threads, that hold parts of one tree: with ``all_reduce=`` both find what one process would."""

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
"""For how many seconds a process waits for the other one."""
SHAPES = {"a": (3, 4), "b": (5,), "c": (3, 4), "d": (5,)}
HELD = (("a", "b"), ("c", "d"))
"""The leaves of two stages of a pipeline."""


def together(
    framework: Framework, parts: Sequence[Any], run: Callable[[Any, Callable[[Any, str], Any]], Any]
) -> list[Any]:
    """Return ``run(part, all_reduce)`` of each part, all at once, as NumPy's arrays."""
    barrier, given = threading.Barrier(len(parts), timeout=PATIENCE), dict[int, np.ndarray]()

    def process(number: int) -> Any:
        def all_reduce(own: Any, op: str) -> Any:
            given[number] = np.array(framework.numpy(own))
            barrier.wait()
            arrays = np.stack([given[one] for one in range(len(parts))])
            barrier.wait()  # before the next ones are written
            joined = arrays.sum(0) if op == "sum" else np.fmax.reduce(arrays)  # which drops NaN, as libraries do
            return framework.array(joined, framework.dtype(own))

        try:
            with framework.context():
                # Here, since arrays that are lazy are computed in the thread that made them.
                return mapped(lambda x: np.array(framework.numpy(x)), run(parts[number], all_reduce))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(process, range(len(parts))))


def values(by: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the leaves of all processes."""
    rng = np.random.default_rng(seed)
    return {name: by * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def arrays(framework: Framework, tree: dict[str, Any], names: Sequence[str] = tuple(SHAPES)) -> dict[str, Any]:
    """Return some leaves as arrays of a framework."""
    return {name: None if tree[name] is None else framework.array(tree[name]) for name in names}


def in_group(path: Any, leaf: Any) -> str:
    """Name the group of a leaf; each stage has leaves of both."""
    return "first" if path[0] in {"a", "d"} else "second"


def is_a(path: Any, leaf: Any) -> bool:
    """Whether a leaf is the first."""
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
    "spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "chain": uc.chain(uc.by_value(-2.0, 2.0), uc.by_global_norm(0.5)),
    "masked": uc.masked(uc.by_global_norm(0.5), lambda path, leaf: path[0] != "b"),
}
"""Rules whose processes may hold different leaves."""
EACH: dict[str, Any] = {
    "leaf": uc.by_norm(0.5),
    "mean square of each": uc.by_block_rms(0.1),
    "budget": uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.each_leaf),
    "adagc": uc.adagc(warmup=1),
    "rejects": uc.Rule(2.0, scope=uc.scopes.each_leaf, curve=uc.curves.reject),
    "zero of each": uc.by_norm(0.5, nonfinite="zero"),
    "masked memory": uc.masked(uc.chain(uc.by_value(-2.0, 2.0), uc.adagc(warmup=1)), lambda path, leaf: path[0] != "b"),
}
"""Rules with a norm for each leaf, of which both processes have parts."""
LOSSES = (1.0, 1.2, 9.0)
STEPS = (0.5, 2.0, 3.0)


def flag(framework: Framework, found: Any) -> Any:
    """Return what a report says, if it does."""
    return framework.array(-1 if found is None else bool(framework.numpy(found)))


def three_steps(framework: Framework, rule: Any, trees: list[Any], params: Any, **joins: Any) -> list[Any]:
    """Return the gradients of three steps, and what all processes have to know alike."""
    state, found = rule.init(params), []
    for grads, loss in zip(trees, joins.pop("losses", LOSSES), strict=True):
        clipped, state, report = rule.update(grads, state, params, loss=loss, **joins)
        found.append((clipped, flag(framework, report.finite), flag(framework, report.skipped)))
    return found


def alike(found: Any, wanted: Any, part: Callable[[str, Any], Any] = lambda name, leaf: leaf) -> None:
    """Compare the steps of a process with those of one that has all, of whose leaves it has parts."""
    for step, ((clipped, *flags), (whole, *all_flags)) in enumerate(zip(found, wanted, strict=True)):
        assert flags == all_flags, step
        for name, leaf in clipped.items():
            if leaf is not None:
                bound = {"rtol": 1e-5, "atol": 1e-7, "err_msg": f"{name} at step {step}"}
                np.testing.assert_allclose(leaf, part(name, whole[name]), **bound)


def alone(framework: Framework, rule: Any, trees: list[Any], params: Any) -> Any:
    """Return the steps of one process as NumPy's arrays."""
    steps = three_steps(framework, rule, [arrays(framework, tree) for tree in trees], arrays(framework, params))
    return mapped(lambda x: np.array(framework.numpy(x)), steps)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf], ids=str)
def test_stages(framework: Framework, bad: float | None) -> None:
    """Processes with different leaves do what one with all of them does; NaN and ∞ in one are known to both."""
    trees, params = [values(by, number) for number, by in enumerate(STEPS)], values(0.3)
    if bad is not None:
        trees[1]["d"][3] = bad
    wanted = {name: alone(framework, rule, trees, params) for name, rule in JOINT.items()}

    def run(held: Sequence[str], join: Any) -> Any:
        grads, theirs = [arrays(framework, tree, held) for tree in trees], arrays(framework, params, held)
        spread = tuple(loss + (0.3 if held == HELD[0] else -0.3) for loss in LOSSES)  # the mean is that of one process
        how = {"all_reduce": join, "losses": spread}
        return {name: three_steps(framework, rule, grads, theirs, **how) for name, rule in JOINT.items()}

    for found in together(framework, HELD, run):
        for name in JOINT:
            alike(found[name], wanted[name])


@pytest.mark.parametrize("absent", [False, True])
def test_halves(framework: Framework, absent: bool) -> None:
    """Processes with parts of the same leaves do what one with the whole does; a gradient may be absent in one."""
    trees, params = [values(by, number) for number, by in enumerate(STEPS)], values(0.3)
    sized = {"mean square", "mean square of each", "relative"} if absent else set()  # what is absent has no size
    rules = {name: rule for name, rule in (JOINT | EACH).items() if name not in sized}
    if absent:
        trees[1]["c"][:, 2:] = 0
    half = lambda leaf, number: None if leaf is None else np.split(leaf, [2], axis=-1)[number]
    wanted = {name: alone(framework, rule, trees, params) for name, rule in rules.items()}

    def run(number: int, join: Any) -> Any:
        mine = [{name: half(leaf, number) for name, leaf in tree.items()} for tree in (*trees, params)]
        if absent and number == 1:
            mine[1]["c"] = None
        *grads, theirs = (arrays(framework, tree) for tree in mine)
        return {name: three_steps(framework, rule, grads, theirs, all_reduce=join) for name, rule in rules.items()}

    for number, found in enumerate(together(framework, range(2), run)):
        for name in rules:
            alike(found[name], wanted[name], lambda _, leaf, number=number: half(leaf, number))


def test_copies_count_once(framework: Framework) -> None:
    """A leaf that both processes hold counts once, if it is said to be a copy."""
    trees, params = [values(by, number) for number, by in enumerate(STEPS)], values(0.3)
    rules = {name: JOINT[name] for name in ("global", "largest", "mean square", "named groups", "zclip", "skip")}
    wanted = {name: alone(framework, rule, trees, params) for name, rule in rules.items()}

    def run(held: Sequence[str], join: Any) -> Any:
        grads, theirs = [arrays(framework, tree, held) for tree in trees], arrays(framework, params, held)
        how = {"all_reduce": join, "shared": is_a}
        return {name: three_steps(framework, rule, grads, theirs, **how) for name, rule in rules.items()}

    for found in together(framework, (("a", "b"), ("a", "c", "d")), run):
        for name in rules:
            alike(found[name], wanted[name])


def test_a_copy_that_is_not_said_counts_twice(framework: Framework) -> None:
    """Nothing but ``shared=`` tells a copy from another leaf of its name."""
    leaf = values()["a"]
    run = lambda part, join: uc.clip({"a": framework.array(leaf)}, JOINT["global"], None, join)[1].norms
    for norm in together(framework, range(2), run):
        np.testing.assert_allclose(norm, math.sqrt(2) * np.linalg.norm(leaf), rtol=1e-6)


def test_a_sum_beyond_the_range(framework: Framework) -> None:
    """A norm is right though each process's sum of squares is in range and their sum is not."""
    dtype, entry = ("float64", 1.1e154) if "float64" in framework.dtypes else ("float32", 1.5e19)
    run = lambda part, join: uc.clip([framework.array([entry], dtype)], uc.by_global_norm(1.0), None, join)[1].norms
    for norm in together(framework, range(2), run):
        np.testing.assert_allclose(norm, entry * math.sqrt(2), rtol=1e-6)


REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "two limits": ((uc.by_norm(0.5), uc.by_norm(0.25)), "rule"),
    "two scopes": ((uc.by_norm(0.5), uc.by_global_norm(0.5)), "rule"),
    "two rules with memory": ((uc.zclip(z=2.0), uc.zclip(z=3.0)), "rule"),
    "an axis": ((uc.by_norm(0.5, axis=0), uc.by_norm(0.5, axis=0)), "all_reduce="),
    "units": ((uc.agc(0.5), uc.agc(0.5)), "all_reduce="),
    "rows": ((uc.Rule(1.0, scope=uc.scopes.each_row),) * 2, "all_reduce="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_both(framework: Framework, case: str) -> None:
    """What one process may not do is an error in both, before anything is written, and none waits for the other."""
    rules, token = REFUSED[case]

    def run(rule: Any, join: Any) -> Any:
        grads = {"a": framework.array(np.ones((2, 2)))}
        with pytest.raises(ValueError, match=token):
            rule.update(grads, rule.init(grads), grads, join, in_place=framework.writes)
        return leaves(grads)

    for [grad] in together(framework, rules, run):
        np.testing.assert_array_equal(grad, np.ones((2, 2)))


def test_raised_in_both(framework: Framework) -> None:
    """A NaN in one process is an error in both."""
    rule = uc.by_global_norm(1.0, nonfinite="raise")

    def run(value: float, join: Any) -> Any:
        with pytest.raises(FloatingPointError):
            uc.clip([framework.array([value])], rule, None, join)
        return []

    assert together(framework, (1.0, math.nan), run) == [[], []]
