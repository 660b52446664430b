"""Parts of one tree in several processes: whole leaves here and there, parts of leaves, copies, and what is neither."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parts import together

import uniclip as uc
from frameworks import EAGER, Framework

pytestmark = pytest.mark.ways(*EAGER)  # what processes say to each other is not compiled
SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3), "d": (7,)}
HELD = [("a", "b"), ("c", "d")]
"""The leaves of two stages of a pipeline."""
RULES: dict[str, uc.Rule] = {
    "global": uc.by_global_norm(0.5),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "mean square": uc.Rule(0.1, norm=uc.norms.RMS),
    "each leaf": uc.by_norm(0.5),
    "mean square of each": uc.by_block_rms(0.1),
    "units": uc.agc(0.05),
    "rows": uc.by_norm(0.5, axis=-1, nonfinite="skip"),
    "groups": uc.by_group_norm({True: 0.3, False: 0.4}, lambda path, leaf: path[0] in {"a", "d"}),
    "budget": uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.each_leaf),
    "autoclip": uc.autoclip(50, window=4),
    "adagc": uc.adagc(warmup=2),
    "rejects": uc.Rule(2.0, scope=uc.scopes.each_leaf, curve=uc.curves.reject),
    "zero": uc.by_norm(0.5, nonfinite="zero"),
    "chain": uc.chain(uc.by_value(-2.0, 2.0), uc.by_norm(1.0), uc.by_global_norm(0.5)),
    "masked": uc.masked(uc.by_global_norm(0.5), lambda path, leaf: path[0] != "b"),
    "masked adagc": uc.masked(uc.adagc(warmup=2), lambda path, leaf: path[0] != "b"),
}


def values(by: float = 1.0) -> dict[str, np.ndarray]:
    """Return the gradients of all processes."""
    rng = np.random.default_rng(0)
    return {name: by * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def arrays(fw: Framework, tree: dict[str, np.ndarray], names: Any = None) -> dict[str, Any]:
    """Return some gradients, or all, as arrays of a framework."""
    return {name: fw.array(value) for name, value in tree.items() if names is None or name in names}


def three_steps(rule: Any, trees: list[dict[str, Any]], params: Any, **joins: Any) -> Any:
    """Return the gradients after three steps, and what all processes have to know alike."""
    state, found = rule.init(params), []
    for grads in trees:
        clipped, state, report = rule.update(grads, state, params, **joins)
        found.append((clipped, report.finite, report.skipped))
    return found


def alike(found: Any, wanted: Any) -> None:
    """Compare the steps of a process with those of one process that has all leaves."""
    for (clipped, *flags), (all_clipped, *all_flags) in zip(found, wanted, strict=True):
        for name, leaf in clipped.items():
            np.testing.assert_allclose(leaf, all_clipped[name], rtol=1e-5, atol=1e-7, err_msg=name)
        assert [None if flag is None else bool(flag) for flag in flags] == [
            None if flag is None else bool(flag) for flag in all_flags
        ]


def as_numpy(fw: Framework, steps: Any) -> Any:
    """Return the steps of one process as NumPy's arrays."""
    return [({n: fw.numpy(leaf) for n, leaf in c.items()}, *map(read(fw), flags)) for c, *flags in steps]


def read(fw: Framework) -> Callable[[Any], Any]:
    """Return a function that reads a flag, if there is one."""
    return lambda flag: None if flag is None else np.asarray(fw.numpy(flag))


def not_c(path: Any, leaf: Any) -> bool:
    """Whether a leaf is not the third."""
    return path[0] != "c"


def is_a(path: Any, leaf: Any) -> bool:
    """Whether a leaf is the one that both stages hold."""
    return path[0] == "a"


@pytest.mark.ways(*EAGER, without="Dask")  # which takes long, and has the cases below and the promise
@pytest.mark.parametrize("bad", [None, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_stages(fw: Framework, name: str, bad: float | None) -> None:
    """Processes that hold different leaves do what one with all of them does; NaN in one of them is known to all."""
    rule, trees = RULES[name], [values(0.5), values(2.0), values()]
    if bad is not None:
        trees[1]["d"][3] = bad
    params = values(0.3)
    wanted = as_numpy(fw, three_steps(rule, [arrays(fw, tree) for tree in trees], arrays(fw, params)))
    parts = [([arrays(fw, tree, held) for tree in trees], arrays(fw, params, held)) for held in HELD]
    for found in together(fw, parts, lambda part, join: three_steps(rule, *part, all_reduce=join)):
        alike(found, wanted)


@pytest.mark.ways(*EAGER, without="Dask")
@pytest.mark.parametrize("name", RULES)
def test_copies_beside_stages(fw: Framework, name: str) -> None:
    """A leaf that both stages hold counts once, if it is said to be a copy."""
    rule, trees = RULES[name], [values(0.5), values(2.0), values()]
    params = values(0.3)
    wanted = as_numpy(fw, three_steps(rule, [arrays(fw, tree) for tree in trees], arrays(fw, params)))
    parts = [([arrays(fw, tree, {*held, "a"}) for tree in trees], arrays(fw, params, {*held, "a"})) for held in HELD]
    steps = together(
        fw,
        parts,
        lambda part, join: three_steps(rule, *part, all_reduce=join, shared=lambda path, leaf: path[0] == "a"),
    )
    for found in steps:
        alike(found, wanted)


@pytest.mark.parametrize(
    "make",
    [lambda rule: rule, lambda rule: uc.chain(uc.by_value(-2.0, 2.0), rule), lambda rule: uc.masked(rule, not_c)],
    ids=["rule", "chain", "mask"],
)
def test_masks_of_rules_with_memory(fw: Framework, make: Callable[[Any], Any]) -> None:
    """A leaf that a mask leaves out needs no gradient, and those of the others may be absent in one process."""
    rule, trees = uc.masked(make(uc.adagc(warmup=2)), lambda path, leaf: path[0] != "b"), [values(0.5), values(2.0)]
    params = arrays(fw, values(0.3))
    wanted = as_numpy(fw, three_steps(rule, [arrays(fw, tree) for tree in trees], params))
    some = [{**arrays(fw, tree), "b": None, "d": None} for tree in trees]
    others = [{**dict.fromkeys(SHAPES), "d": fw.array(tree["d"])} for tree in trees]
    steps = together(fw, [some, others], lambda part, join: three_steps(rule, part, params, all_reduce=join))
    for found, names in zip(steps, ["ac", "d"], strict=True):
        for clipped, *_ in found:
            assert {name for name, leaf in clipped.items() if leaf is not None} == set(names)
        alike([({name: clipped[name] for name in names}, *flags) for clipped, *flags in found], wanted)


def test_a_copy_beside_parts(fw: Framework) -> None:
    """Where all processes hold parts of the same leaves and a copy, the copy counts once."""
    whole, copy = values()["a"], values()["b"]
    rule = uc.by_global_norm(0.5)
    wanted = math.sqrt((whole**2).sum() + (copy**2).sum())
    parts = [{"a": fw.array(half), "b": fw.array(copy)} for half in np.split(whole, 2, axis=1)]

    def run(part: Any, join: Any) -> Any:
        return uc.clip(part, rule, None, join, shared=lambda path, leaf: path[0] == "b")[1].norms

    for norm in together(fw, parts, run):
        np.testing.assert_allclose(norm, wanted, rtol=1e-6)


def test_rms_of_copies_along_axes(fw: Framework) -> None:
    """Norms along axes of a copy are those of one, whatever else the processes hold."""
    rule, all_of = uc.Rule(0.1, scope=uc.scopes.axes(0), norm=uc.norms.RMS), values()
    wanted = fw.numpy(uc.clip(arrays(fw, all_of), rule)[0]["a"])
    parts = [arrays(fw, all_of, {name, "a"}) for name in ("c", "b")]
    for found in together(fw, parts, lambda part, join: uc.clip(part, rule, None, join, shared=is_a)[0]["a"]):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_sum_beyond_the_range(fw: Framework) -> None:
    """A norm is right though the processes' sums of squares are in range and their sum is not."""
    dtype = "float64" if "float64" in fw.dtypes else "float32"
    entry = 1.1e154 if dtype == "float64" else 1.5e19
    rule = uc.by_global_norm(1.0)
    parts = [fw.array([entry], dtype)] * 2
    for norm in together(fw, parts, lambda part, join: uc.clip(part, rule, None, join)[1].norms):
        np.testing.assert_allclose(norm, entry * math.sqrt(2), rtol=1e-6)


def test_a_new_holder_compares_anew(fw: Framework) -> None:
    """What processes agreed on is their holder's: another one with another rule in one of them is refused."""

    def run(part: Any, join: Any) -> Any:
        grads = {"a": fw.array([3.0, 4.0])}
        uc.Clipper(uc.zclip())(grads, None, join)
        other = uc.Clipper(uc.zclip(z=3.0 if part else 2.0))
        with pytest.raises(ValueError, match="different rules"):
            other(grads, None, join)

    assert together(fw, [0, 1], run) == [None, None]


REFUSED: dict[str, tuple[list[Any], str]] = {
    "a leaf of both, which differ": (
        [(uc.by_norm(0.5), {"a": (3,), "b": (4,)}), (uc.by_norm(0.5), {"a": (3,), "c": (2,)})],
        r"grads\['a'\] is in several processes.*shared=",
    ),
    "lists of two lengths": (
        [(uc.by_norm(0.5), [(3,), (4,)]), (uc.by_norm(0.5), [(3,)])],
        r"grads\[0\] is in several processes.*names of their own",
    ),
    "two numbers of norms": (
        [(uc.by_norm(0.5, axis=0), {"a": (3, 4)}), (uc.by_norm(0.5, axis=0), {"a": (3, 5)})],
        r"grads\['a'\] has another number of norms",
    ),
    "two limits": (
        [(uc.by_norm(0.5), {"a": (3,)}), (uc.by_norm(0.25), {"a": (3,)})],
        "different rules.*use one rule",
    ),
    "two scopes": (
        [(uc.by_global_norm(0.5), {"a": (3,)}), (uc.by_norm(0.5), {"a": (3,)})],
        "different rules.*use one rule",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_all_processes(fw: Framework, case: str) -> None:
    """What is neither parts of the same leaves nor whole is refused, and no process waits for another."""
    parts, message = REFUSED[case]

    def run(part: Any, join: Any) -> Any:
        rule, shapes = copy.deepcopy(part)  # no scope is known to two processes: it remembers what they agreed on
        ones = (
            {name: fw.array(np.ones(shape)) for name, shape in shapes.items()}
            if isinstance(shapes, dict)
            else [fw.array(np.ones(shape)) for shape in shapes]
        )
        with pytest.raises(ValueError, match=message):
            uc.clip(ones, rule, None, join)
        return None

    assert together(fw, parts, run) == [None, None]


def test_one_process_fails(fw: Framework) -> None:
    """An error of one process at the first step is known to the others, which would wait for it."""
    seen = []

    def run(part: Any, join: Any) -> Any:
        grads = {"a": fw.array([1.0]), "b": "text" if part else fw.array([2.0])}
        with pytest.raises((TypeError, RuntimeError)) as error:
            uc.clip(grads, uc.by_global_norm(0.125), None, join)
        seen.append(type(error.value))
        return None

    together(fw, [0, 1], run)
    assert sorted(kind.__name__ for kind in seen) == ["RuntimeError", "TypeError"]


def test_thousands_of_leaves() -> None:
    """Labels that meet in the table of all are told apart."""
    fw, count, rule = Framework(), 3000, uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.each_leaf)
    every = {f"leaf {n}": np.asarray([1.0 + n % 7]) for n in range(count)}
    wanted = uc.clip(every, rule)[0]
    parts = [{name: every[name] for n, name in enumerate(every) if n % 2 == rank} for rank in range(2)]
    for found in together(fw, parts, lambda part, join: uc.clip(part, rule, None, join)[0]):
        for name, leaf in found.items():
            np.testing.assert_allclose(leaf, wanted[name], rtol=1e-6)
