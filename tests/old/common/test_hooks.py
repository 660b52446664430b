"""Every hook that is there for speed or memory gives what its default in the array API gives; others are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import EAGER, Framework, some_of
from promises import EPS
from tracing import leaves, soft
from uniclip.backends import backend_of
from uniclip.backends.base import Backend
from uniclip.backends.memory import InPlace
from uniclip.backends.processes import Processes

TESTS = Path(__file__).parents[1]

HOOKS = (
    "plain", "apart", "viewed", "squares", "squares_along", "squares_in_units", "scaled", "pieces", "sum", "cond",
    "unless_one", "barrier",
)  # fmt: skip
"""Those for speed or memory, which are switched off here."""
NEEDED = {
    "output_axis": "common/test_presets.py",
    "static_shapes": "on_torch/test_tracing.py",
    "accelerators": "on_torch/test_accelerator.py",
    "is_array": "common/test_tree.py",
    "unfit": "on_torch/test_kinds.py",
    "stored": "on_torch/test_kinds.py",
    "sparse": "on_all/test_agree.py",
    "size": "common/test_promises.py",
    "traced": "common/test_compiled.py",
    "readable": "on_torch/test_accelerator.py",
    "device": "on_jax/test_kinds.py",
    "from_host": "on_jax/test_kinds.py",
    "to_host": "common/test_recorder.py",
    "to_device_of": "on_torch/test_accelerator.py",
    "detached": "on_torch/test_derivatives.py",
    "to_keep": "common/test_recorder.py",
    "quiet": "on_torch/test_devices.py",
    "debug_infs": "on_jax/test_debuggers.py",
    "shifted": "common/test_promises.py",
    "memory": "on_torch/test_in_place.py",
    "write": "on_torch/test_in_place.py",
    "local": "on_torch/test_distributed.py",
    "replicated": "on_torch/test_distributed.py",
    "joins_by": "common/test_mistakes.py",
    "reducer": "on_torch/test_processes.py",
    "copies": "on_jax/test_layouts.py",
    "varying": "on_jax/test_layouts.py",
    "unsharded": "on_jax/test_sharding.py",
    "reduction_dtype": "common/test_parts.py",
    "rank": "on_torch/test_record.py",
}
"""The others, each with the tests that are for it."""
SMALL = [(3, 4), (5,), (2, 1, 2)]
LARGE = [(140_001,), (400, 350)]
HALVES = ("float16", "bfloat16")


def arrays(fw: Framework, shapes: list[tuple[int, ...]], dtype: str = "float32", by: float = 100.0) -> list[Any]:
    """Return the same random arrays at each call."""
    rng = np.random.default_rng(0)
    values = [by * rng.standard_normal(shape) for shape in shapes]
    return [fw.array(v * (1 + 0.5j) if "complex" in dtype else v, dtype) for v in values]


def nested(some: list[Any]) -> dict[str, Any]:
    """Return arrays as a tree with an absent gradient, in which the last one is by itself."""
    return {"layers": [*some[:-1], None], "head": (some[-1],)}


def strided(fw: Framework) -> Any:
    """Return arrays that do not lie in a row, large and small."""
    large, small, gaps, thin = arrays(fw, [(400, 350), (4, 3), (9, 2), (132_000, 2)])
    return [large.T, small.T, gaps[::2], thin[:, 1], thin[::3, 0]]


def with_bad(fw: Framework, bad: float) -> Any:
    """Return arrays of which one holds an entry that is not finite."""
    return [*arrays(fw, SMALL), fw.array([1.0, bad, 2.0])]


def rules(limit: float, array: Any) -> dict[str, uc.Rule]:
    """Return rules that differ in what a hook can see of them; the second is the same limit as an array."""
    by_depth = uc.scopes.groups(lambda path, leaf: len(leaf.shape))
    return {
        "all": uc.Rule(limit),
        "zero": uc.Rule(limit, nonfinite="zero"),
        "leaf": uc.Rule(limit, scope=uc.scopes.each_leaf),
        "array": uc.Rule(array),
        "soft": uc.Rule(limit, curve=soft),
        "skip": uc.Rule(limit, nonfinite="skip"),
        "groups": uc.Rule(limit, scope=by_depth),
        "unlimited": uc.Rule(math.inf),
        "raise": uc.Rule(limit, nonfinite="raise"),
        "leaf, array": uc.Rule(array, scope=uc.scopes.each_leaf),
        "leaf, zero": uc.Rule(limit, scope=uc.scopes.each_leaf, nonfinite="zero"),
        "leaf, skip": uc.Rule(limit, scope=uc.scopes.each_leaf, nonfinite="skip"),
        "leaf, soft": uc.Rule(limit, scope=uc.scopes.each_leaf, curve=soft),
        "leaf, raise": uc.Rule(limit, scope=uc.scopes.each_leaf, nonfinite="raise"),
        "groups, L3": uc.Rule(limit, scope=by_depth, norm=uc.Norm(3)),
        "L1": uc.Rule(limit, norm=uc.norms.L1),
        "Linf": uc.Rule(limit, norm=uc.norms.Linf),
        "rms": uc.Rule(limit, scope=uc.scopes.each_leaf, norm=uc.norms.RMS),
        "axes": uc.Rule(limit, scope=uc.scopes.axes(-1)),
        "axes, L3": uc.Rule(limit, scope=uc.scopes.axes(0), norm=uc.Norm(3)),
    }


ALL = tuple(rules(1.0, 1.0))
SCOPES = ("all", "leaf", "groups", "soft", "zero", "axes")
FEW = ("all", "axes", "zero")


class Case(NamedTuple):
    """Gradients, the limit, and the rules they are clipped by."""

    grads: Callable[[Framework], Any]
    limit: float
    rules: tuple[str, ...] = SCOPES
    dtype: str | None = None
    """What it takes arrays of, if not of float32 alone."""
    compiled: int = 0
    """How many of the rules are tried where each takes long to compile."""
    cost: int = 10
    """Up to which cost of a framework it is tried."""
    families: tuple[str, ...] = ()
    """The only families it is tried in."""

    def fits(self, fw: Framework) -> bool:
        """Whether it is tried on a framework."""
        there = self.dtype not in fw.missing and (not self.families or fw.family in self.families)
        return there and (self.compiled > 0 or fw.cost <= self.cost)

    def names(self, fw: Framework) -> tuple[str, ...]:
        """Return the names of its rules there."""
        if fw.cost > self.cost:
            return self.rules[: self.compiled]
        if fw.cost >= 5:
            return self.rules[:3]
        return tuple(name for name in self.rules if not (fw.traced and "raise" in name))


CASES = {
    "a tree": Case(lambda fw: nested(arrays(fw, SMALL)), 100.0, ALL, compiled=3),
    "below": Case(lambda fw: nested(arrays(fw, SMALL)), 1e6, ALL, compiled=1),
    "one leaf": Case(lambda fw: arrays(fw, [(7, 3)])[0], 100.0),
    **{
        dtype: Case(lambda fw, dtype=dtype: arrays(fw, SMALL, dtype), 150.0, dtype=dtype)
        for dtype in ("float16", "bfloat16", "float64", "complex64")
    },
    "mixed": Case(
        lambda fw: [arrays(fw, SMALL, dtype) for dtype in fw.dtypes if dtype in EPS], 300.0, ("all", "leaf", "zero")
    ),
    "many": Case(lambda fw: arrays(fw, [(2, 3), (2, 1, 2), (4,)] * 25), 300.0, ("all", "leaf"), cost=4),
    "large": Case(lambda fw: arrays(fw, LARGE), 1000.0, (*FEW, "groups, L3"), cost=4),
    "large and small": Case(lambda fw: arrays(fw, [*SMALL, (140_000,), *SMALL]), 1000.0, ("all", "zero")),
    **{
        f"large {dtype}": Case(
            lambda fw, dtype=dtype: arrays(fw, LARGE, dtype, 1.0), 100.0, FEW[:2], dtype=dtype, cost=4
        )
        for dtype in HALVES
    },
    "strided": Case(strided, 1000.0, FEW[::2], families=("NumPy", "PyTorch")),
    "empty and 0-d": Case(
        lambda fw: [fw.array(np.zeros((0, 3))), fw.array(-30.0), None, *arrays(fw, SMALL)],
        100.0,
        ("all", "leaf", "skip"),
    ),
    "squares overflow": Case(lambda fw: arrays(fw, SMALL, by=1e30), 1e30),
    "squares underflow": Case(lambda fw: arrays(fw, SMALL, by=1e-30), 1e-30),
    "zeros": Case(lambda fw: [fw.array(np.zeros(shape)) for shape in SMALL], 0.0),
    "NaN": Case(lambda fw: with_bad(fw, math.nan), 100.0, ALL),
    "infinite": Case(lambda fw: with_bad(fw, -math.inf), 100.0, ALL),
}
ALONE = ("a tree", "many", "large", "large bfloat16", "strided", "empty and 0-d", "NaN")
"""The cases for which hooks are switched off one by one, too; there is one for each way of every hook."""
# JAX has float64 in 64 bits only, Dask no hook of its own; a compiler meets the hooks in the promises.
WAYS = some_of(*EAGER, "jax.jit-x64", without="Dask")
TRIED = [
    pytest.param(fw, case, name in ALONE, id=f"{fw.name}: {name}")
    for fw in WAYS
    for name, case in CASES.items()
    if case.fits(fw)
]


class Outcome(NamedTuple):
    """What came of one rule, if not an error."""

    clipped: Any = None
    report: Any = None
    same: tuple[bool, ...] = ()
    """Which leaves are the very objects that were given."""
    error: str | None = None


def outcome(call: Callable[[Any], tuple[Any, Any]], grads: Any) -> Outcome:
    """Return what a call returns, or the error of its policy."""
    try:
        clipped, report = call(grads)
    except FloatingPointError as error:
        return Outcome(error=str(error))
    same = tuple(new is old for new, old in zip(leaves(clipped), leaves(grads), strict=True))
    return Outcome(clipped, report, same)


def outcomes(fw: Framework, case: Case) -> list[Outcome]:
    """Clip by each rule, functionally and in place."""
    names = case.names(fw)
    limit = fw.array(case.limit)

    def functional(grads: Any, limit: Any) -> list[Outcome]:
        every = rules(case.limit, limit)
        return [outcome(lambda g, rule=every[name]: uc.clip(g, rule), grads) for name in names]

    def in_place(each: list[Any], limit: Any) -> list[Outcome]:
        every = rules(case.limit, limit)
        return [
            outcome(lambda g, rule=every[name]: (g, uc.clip_(g, rule)), grads)
            for name, grads in zip(names, each, strict=True)
        ]

    found = list(fw.run(functional, case.grads(fw), limit))
    if fw.writes:
        found += fw.run(in_place, [case.grads(fw) for _ in names], limit)
    return found


def fields(report: uc.Report | None) -> tuple[Any, ...]:
    """Return the fields of a report, none of none."""
    return () if report is None else tuple(report)


def assert_equal(fw: Framework, found: Outcome, wanted: Outcome, off: str) -> None:
    """Assert that two outcomes are equal, but for rounding in the dtype of each array."""
    assert found.error == wanted.error, off
    assert not fw.same_objects or found.same == wanted.same, off
    for one, other in ((found.clipped, wanted.clipped), (fields(found.report), fields(wanted.report))):
        assert optree.tree_structure(one) == optree.tree_structure(other), off
        for a, b in zip(leaves(one), leaves(other), strict=True):
            assert (fw.dtype(a), tuple(a.shape)) == (fw.dtype(b), tuple(b.shape)), off
            rounding = EPS[fw.dtype(a)] if fw.dtype(a) in HALVES else 1e-6
            wide = complex if "complex" in fw.dtype(a) else float
            np.testing.assert_allclose(*(fw.numpy(x).astype(wide) for x in (a, b)), rtol=rounding, err_msg=off)


def whole(self: Backend, array: Any) -> None:
    """Measure every array as a whole."""


def switches(fw: Framework, *, alone: bool) -> dict[str, dict[str, Any]]:
    """Return what to put in place of which hooks: of all that the framework has, and of each of them."""
    kind = type(backend_of(fw.array([1.0])))
    own = {hook: vars(Backend)[hook] for hook in HOOKS if kind is not Backend and hook in vars(kind)}
    alone = {hook: {hook: default} for hook, default in own.items()}
    every = {**own, "pieces": whole}
    if fw.traced or not alone:
        return {"all": every}
    return {**alone, "in one piece": {"pieces": whole}, "all": every} if own else {"all": every}


@contextmanager
def switched(fw: Framework, hooks: dict[str, Any]) -> Iterator[None]:
    """Put others in place of some hooks of the framework's backend."""
    kind = type(backend_of(fw.array([1.0])))
    with ExitStack() as stack:
        for hook, default in hooks.items():
            stack.enter_context(mock.patch.object(kind, hook, default))
        yield


def test_every_hook_is_listed() -> None:
    """There is no hook of which nobody knows why."""
    hooks = {hook for base in (Backend, InPlace, Processes) for hook in vars(base) if not hook.startswith("_")}
    assert hooks - {"in_place", "processes"} == {*HOOKS, *NEEDED}
    assert [file for file in NEEDED.values() if not (TESTS / file).exists()] == []


@pytest.mark.parametrize(("fw", "case", "alone"), TRIED)
def test_defaults(fw: Framework, case: Case, alone: bool) -> None:
    """With any hook of the framework switched off, and with all, the outcome is the same."""
    with fw.context():
        usual = outcomes(fw, case)
        for off, hooks in switches(fw, alone=alone).items():
            with switched(fw, hooks):
                for found, wanted in zip(outcomes(fw, case), usual, strict=True):
                    assert_equal(fw, found, wanted, off)
