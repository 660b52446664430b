"""What the fuzz has found, made by hand: each was a fault once, where numbers are far from 1 or there is nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from kit.draw import Case, Slot, curve_of
from kit.frameworks import Framework
from kit.oracle import Plan, Scope
from kit.run import Run

ENTRY, LEAF, ROW, EXAMPLE = Scope("entry"), Scope("leaf"), Scope("row"), Scope("example")
MIXED = ("float32", "float64")


class Found(NamedTuple):
    """A rule, as uniclip makes it and as data, and the values of its leaves at each step."""

    rule: Callable[[ModuleType], Any]
    plan: Plan
    steps: list[list[Any]]
    dtypes: tuple[str, ...] = ("float32",)
    """Of the leaves; the last one is that of all others."""
    way: str = "plain"
    losses: tuple[float, ...] = ()
    saved: int | None = None


def per_entry(limit: Callable[[Any], Any]) -> Callable[[ModuleType], Any]:
    """Return what makes a rule with a limit for each entry."""
    return lambda uc: uc.Rule(limit(uc.limits), scope=uc.scopes.each_entry)


def warm(joint: float) -> Plan:
    """Return AdaGC in its warm-up as data."""
    return Plan(scope=LEAF, limit=("ema", 1.05, 0.99, 100, joint))


def curved(curve: Any) -> Callable[[ModuleType], Any]:
    """Return what makes a rule with a curve, whose limit is far below the norms."""
    return lambda uc: uc.Rule(1e-18, scope=uc.scopes.each_entry, curve=curve_of(uc, curve))


def equal(norm: float) -> Found:
    """Return steps of one norm, which is no spike."""
    plan = Plan(limit=("rolling z-score", 6.0, 8, 2), curve="reject", policy="skip")
    return Found(lambda uc: uc.skip_spikes(6.0, 8, 2), plan, [[[norm]]] * 12, losses=(norm,) * 12)


NOTHING = [[np.ones((2, 0, 3)), [1.0]]] * 3
TOP, ROLLING = (
    ("regularized", 0.1),
    [[[1e38, 3e37, 0.0]], [[1.6e38, 1e37, 1.0]], [[2e38, 2e37, 2.0]], [[1e38, 1e37, 1.0]]],
)
CASES = {
    "a warm-up on nothing": Found(
        per_entry(lambda limits: limits.Ema(1.0, 0.9, warmup=2)),
        Plan(scope=ENTRY, limit=("ema", 1.0, 0.9, 2, 1.0)),
        [[np.zeros(0)]] * 3,
    ),
    "a warm-up to a tiny norm": Found(lambda uc: uc.adagc(warmup_norm=1e-37), warm(1e-37), [[[3e-37, 4e-37], [0.0]]]),
    "a warm-up beside a huge norm": Found(lambda uc: uc.adagc(warmup_norm=1e24), warm(1e24), [[[1e25], [3e-20]]]),
    "a joint norm beyond one of the dtypes": Found(
        lambda uc: uc.adagc(warmup_norm=1e37), warm(1e37), [[[1e37], [1e45]]], MIXED
    ),
    "examples of several dtypes": Found(
        lambda uc: uc.by_example_layer_norm(math.sqrt(2.0)),
        Plan(scope=ROW, limit=("split", math.sqrt(2.0), False)),
        [[[[3.0], [0.0], [4.0]], [[12.0]]]],
        MIXED,
    ),
    "a percentile of all norms far from 1": Found(
        lambda uc: uc.autoclip(99, window=None),
        Plan(limit=("percentile of all", 99)),
        [[[1.0]], [[1e100]], [[1e-60]]],
        ("float64",),
    ),
    "the largest norm in a histogram": Found(
        lambda uc: uc.autoclip(0, window=None), Plan(limit=("percentile of all", 0)), [[[2e38, 0.0]]]
    ),
    "no rows, of which none is skipped": Found(
        lambda uc: uc.Rule(1.0, scope=uc.scopes.each_row, curve=uc.curves.reject),
        Plan(scope=ROW, limit=("constant", 1.0), curve="reject"),
        [[np.ones((0, 1))], [[[5.0], [6.0]]]],
    ),
    "zeros of complex numbers have signs": Found(
        lambda uc: uc.by_norm(5.0, axis=1),
        Plan(scope=Scope("axes", axes=(1,)), limit=("constant", 5.0)),
        [[[[complex(-0.0, -1.0)], [30.0]]]],
        ("complex64",),
    ),
    "bounds beyond the dtype": Found(
        lambda uc: uc.by_value(-1e39, 1e39), Plan("value", bounds=(-1e39, 1e39)), [[[3.0, -2.0], [1.0, -5.0]]],
        ("float32", "float16"),
    ),
    "a factor beyond the dtype of one of the leaves": Found(
        lambda uc: uc.to_global_norm(1.0),
        Plan(limit=("constant", 1.0), curve="normalize"),
        [[[0.0, 0.0], [1e-300]]],
        MIXED,
    ),
    "nothing is saved and loaded": Found(
        lambda uc: uc.spam(2.0, 0.9, 1), Plan(scope=ENTRY, limit=("second moment", 2.0, 0.9, 1)), NOTHING,
        way="holder", saved=2,
    ),
    "logarithms of nothing are saved and loaded": Found(
        per_entry(lambda limits: limits.LogZScore(2.0, 0.9)), Plan(scope=ENTRY, limit=("log z-score", 2.0, 0.9)),
        NOTHING, way="holder", saved=2,
    ),
    "reciprocals that are not normal": Found(
        per_entry(lambda limits: limits.RollingZScore(1.0, 3, 2)),
        Plan(scope=ENTRY, limit=("rolling z-score", 1.0, 3, 2)),
        ROLLING,
    ),
    "a warm-up of huge norms": Found(
        per_entry(lambda limits: limits.Ema(2.0, 0.5, 9)), Plan(scope=ENTRY, limit=("ema", 2.0, 0.5, 9, 1.0)), ROLLING
    ),
    "a batch of no examples": Found(
        lambda uc: uc.by_example_norm(1.0), Plan(scope=EXAMPLE, limit=("constant", 1.0)), [[np.zeros((0, 3))]],
        way="summed",
    ),
    **{f"equal norms of {norm}": equal(norm) for norm in (30.11644, 0.1, 7.3e-5)},
    **{
        f"norms far above the limit, {curve}": Found(
            curved(curve), Plan(scope=ENTRY, limit=("constant", 1e-18), curve=curve), [[[3e12, 3e18, 3e37]]]
        )
        for curve in ("soft", "smooth", "tanh", TOP, ("other", 0.1))
    },
}  # fmt: skip


@pytest.mark.only("numpy", "torch", "tensorflow")
@pytest.mark.parametrize("name", CASES)
def test_found(framework: Framework, name: str) -> None:
    """What comes out is what the oracle says, at each step."""
    found = CASES[name]
    count = len(found.steps[0])
    dtypes = [*found.dtypes, *[found.dtypes[-1]] * count][:count]
    steps = [[np.asarray(values) for values in step] for step in found.steps]
    slots = [Slot(number, np.shape(steps[0][number]), dtype) for number, dtype in enumerate(dtypes)]
    losses = [*found.losses] or [None] * len(steps)
    case = Case(found.rule(uc), found.plan, slots, slots, found.way, steps, steps[0], losses, saved=found.saved)
    with np.errstate(all="ignore"):
        Run(uc, framework, case).steps()
