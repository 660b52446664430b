"""Cases that the fuzz found, and which it no longer draws: values far from 1, and empty trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from kit.draw import Case, Slot
from kit.frameworks import Framework
from kit.oracle import Plan, Scope
from kit.run import Run


class Found(NamedTuple):
    """A rule, its plan, the values of its leaves at each step, and the dtypes of two leaves."""

    made: tuple[Any, Plan]
    steps: list[list[Any]]
    dtypes: tuple[str, str] = ("float32", "float32")
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed


def per_entry(limit: Any, *spec: Any) -> tuple[uc.Rule, Plan]:
    """Return a rule with a limit for each element."""
    return uc.Rule(limit, scope=uc.scopes.each_entry), Plan(scope=Scope("entry"), limit=spec)


def warm(joint: float) -> tuple[uc.Rule, Plan]:
    """Return AdaGC during its warmup."""
    return uc.adagc(warmup_norm=joint), Plan(
        scope=Scope("leaf"), limit=("ema", 1.05, 0.99, 100, joint)
    )


def plain(rule: Any, kind: str = "all", curve: str = "hard", **more: Any) -> tuple[uc.Rule, Plan]:
    """Return a rule with its plan."""
    return rule, Plan(scope=Scope(kind), curve=curve, **more)


MIXED, SAVED = ("float32", "float64"), {"way": "holder", "saved": 2}
HUGE = [[[1e38, 3e37, 0.0]], [[1.6e38, 1e37, 1.0]], [[2e38, 2e37, 2.0]], [[1e38, 1e37, 1.0]]]
ROWS = uc.Rule(1.0, scope=uc.scopes.each_row, curve=uc.curves.reject)
PARTS = Plan(limit=("schedule", 2.0, 0.0, 1.0)), Plan(scope=Scope("leaf"), limit=("constant", 1.0))
AXIS = uc.by_norm(5.0, axis=1), Plan(scope=Scope("axes", axes=(1,)), limit=("constant", 5.0))
CALM = Plan(limit=("rolling z-score", 6.0, 8, 2), curve="reject", policy="skip")
CASES = {
    ("a warm-up on nothing"): Found(
        per_entry(uc.limits.Ema(1.0, 0.9, 2), "ema", 1.0, 0.9, 2, 1.0), [[np.zeros(0)]] * 3
    ),
    "a warm-up to a tiny norm": Found(warm(1e-37), [[[3e-37, 4e-37], [0.0]]]),
    "a warm-up beside a huge norm": Found(warm(1e24), [[[1e25], [3e-20]]]),
    "a warm-up whose joint norm is beyond the dtype": Found(
        warm(1.0), [[[2.9e38], [3.1e38]], [[1.0], [2.0]]]
    ),
    "a warm-up from huge norms to a tiny one": Found(warm(1e-30), [[[1e20], [3e20]]]),
    "a joint norm beyond one of the dtypes": Found(warm(1e37), [[[1e37], [1e45]]], MIXED),
    ("a warm-up of huge norms"): Found(
        per_entry(uc.limits.Ema(2.0, 0.5, 9), "ema", 2.0, 0.5, 9, 1.0), HUGE
    ),
    "reciprocals that are not normal": Found(
        per_entry(uc.limits.RollingZScore(1.0, 3, 2), "rolling z-score", 1.0, 3, 2), HUGE
    ),
    "a percentile of all norms far from 1": Found(
        plain(uc.autoclip(99, window=None), limit=("percentile of all", 99)),
        [[[1.0]], [[1e100]], [[1e-60]]],
        ("float64", "float64"),
    ),
    "the largest norm in a histogram": Found(
        plain(uc.autoclip(0, window=None), limit=("percentile of all", 0)), [[[2e38, 0.0]]]
    ),
    "no rows, of which none is skipped": Found(
        plain(ROWS, "row", "reject", limit=("constant", 1.0)), [[np.ones((0, 1))], [[[5.0], [6.0]]]]
    ),
    ("zeros of complex numbers have signs"): Found(
        AXIS, [[[[complex(-0.0, -1.0)], [30.0]]]], ("complex64", "complex64")
    ),
    "bounds beyond the dtype": Found(
        (uc.by_value(-1e39, 1e39), Plan("value", bounds=(-1e39, 1e39))),
        [[[3.0, -2.0], [1.0, -5.0]]],
        ("float32", "float16"),
    ),
    "a factor beyond the dtype of one of the leaves": Found(
        plain(uc.to_global_norm(1.0), "all", "normalize", limit=("constant", 1.0)),
        [[[0.0, 0.0], [1e-300]]],
        MIXED,
    ),
    "nothing is saved and loaded": Found(
        per_entry(uc.limits.LogZScore(2.0, 0.9), "log z-score", 2.0, 0.9),
        [[np.ones((2, 0, 3)), [1.0]]] * 3,
        more=SAVED,
    ),
    "complex numbers whose moduli are subnormal": Found(
        plain(uc.Rule(1e-320, norm=uc.Norm(ord=1.5)), limit=("constant", 1e-320), p=1.5),
        [[[complex(5e-324, 5e-324)] * 500]],
        ("complex128", "complex128"),
    ),
    "factors whose product is beyond their dtype before the last": Found(
        (
            uc.chain(*map(uc.to_global_norm, (1.0, 1e100, 1e-10))),
            Plan(
                "chain",
                parts=tuple(
                    [Plan(curve="normalize", limit=("constant", n)) for n in (1.0, 1e100, 1e-10)]
                ),
            ),
        ),
        [[[1e-300]]],
        ("float64", "float64"),
    ),
    "thresholds beyond the dtype": Found(
        per_entry(uc.limits.RollingZScore(9.0, 3, 2), "rolling z-score", 9.0, 3, 2), HUGE
    ),
    "limits of a chain in two dtypes": Found(
        (
            uc.chain(uc.Rule(uc.limits.Schedule(lambda step: 2.0 + 0.0 * step)), uc.by_norm(1.0)),
            Plan("chain", parts=PARTS),
        ),
        [[[3.0, 4.0]]] * 2,
        ("float64", "float64"),
    ),
    "no gradient, and parameters of another precision": Found(
        (uc.Rule(uc.limits.Relative(2.0)), Plan(limit=("relative", 2.0, 1e-3))),
        [[None]],
        ("float64", "float64"),
        {"params": [np.ones(2)]},
    ),
    "a batch of no examples": Found(
        plain(uc.by_example_norm(1.0), "example", limit=("constant", 1.0)),
        [[np.zeros((0, 3))]],
        more={"way": "summed"},
    ),
    **{
        f"equal norms of {norm}": Found(
            (uc.skip_spikes(6.0, 8, 2), CALM), [[[norm]]] * 12, more={"losses": [norm] * 12}
        )
        for norm in (30.11644, 0.1, 7.3e-5)
    },
}


@pytest.mark.only("numpy", "torch", "tensorflow")
@pytest.mark.parametrize("name", CASES)
def test_found(framework: Framework, name: str) -> None:
    """Each step agrees with the oracle."""
    found = CASES[name]
    steps: Any = [
        [leaf if leaf is None else np.asarray(leaf) for leaf in step] for step in found.steps
    ]
    slots = [
        Slot(number, np.shape(leaf), found.dtypes[number]) for number, leaf in enumerate(steps[0])
    ]
    fields: dict[str, Any] = {
        "steps": steps,
        "params": steps[0],
        "losses": [None] * len(steps),
        **found.more,
    }
    with np.errstate(all="ignore"):
        Run(uc, framework, Case(*found.made, slots, slots, **fields)).steps()
