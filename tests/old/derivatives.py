"""Every function that has derivatives, where they are asked for, and what they are: finite differences in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import oracle
import uniclip as uc

Leaves = list[Any]
_RNG = np.random.default_rng(0)


def _like(make: Callable[[tuple[int, ...]], np.ndarray]) -> list[np.ndarray]:
    return [make(shape) for shape in [(4, 4), (4,)]]


SIGNS = _like(lambda shape: _RNG.choice([-1.0, 1.0], shape))
BASE = [sign * _RNG.uniform(0.5, 1.5, sign.shape) for sign in SIGNS]
"""Entries around 1, none near 0, where some norms have no second derivative."""
WEIGHTS = _like(_RNG.standard_normal)
DIRECTION = _like(_RNG.standard_normal)


def _filled(w: float, b: float) -> list[np.ndarray]:
    return [SIGNS[0] * w, SIGNS[1] * b]


def _one_entry(others: float) -> list[np.ndarray]:
    """Return leaves whose largest modulus is 1."""
    leaves = _filled(others, others)
    leaves[0][1, 2], leaves[1][3] = -1.0, 1.0
    return leaves


@dataclass(frozen=True, eq=False)
class Case:
    """A function of a list of gradients, its plain form in float64, and gradients that lie exactly on its limit."""

    function: Callable[[Leaves], Leaves]
    plain: Callable[[list[np.ndarray]], list[Any]]
    limit: list[np.ndarray]
    above: float = 3.0
    kink: bool = True
    """Whether the limit is a corner, with the identity below it."""

    def at(self, point: str) -> list[np.ndarray]:
        """Return the gradients at a point."""
        by = {"zero": 0.0, "below": 0.02, "above": self.above}
        return self.limit if point == "limit" else [by[point] * leaf for leaf in BASE]

    def has_second(self, point: str) -> bool:
        """Whether there is a second derivative: no norm has one at 0, unless a clip leaves all alone there."""
        return self.kink or point != "zero"


def _rows(g: list[np.ndarray]) -> list[np.ndarray]:
    return [oracle.clip_axes(g[0], 1.0, (1,)), oracle.clip_leaf(g[1], 1.0)]


def _columns(g: list[np.ndarray]) -> list[np.ndarray]:
    return [oracle.clip_axes(g[0], 1.0, (0,)), oracle.clip_leaf(g[1], 1.0)]


def _examples(g: list[np.ndarray]) -> list[np.ndarray]:
    each = [oracle.clip_global([g[0][i], g[1][i]], 1.25) for i in range(4)]
    return [np.stack(leaf) for leaf in zip(*each, strict=True)]


def _each(limit: float, p: float = 2, size_power: float = 0) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    return lambda g: [oracle.clip_leaf(leaf, limit, p, size_power) for leaf in g]


def _entries(g: list[np.ndarray]) -> list[float]:
    return [x for leaf in g for x in leaf.ravel().tolist()]


def _soft(g: list[np.ndarray]) -> list[np.ndarray]:
    return [leaf / (1 + oracle.norm(_entries(g))) for leaf in g]


def _norm(p: float) -> Case:
    return Case(
        lambda g: [uc.global_norm(g, ord=p)], lambda x: [np.asarray(oracle.norm(_entries(x), p))], BASE, kink=False
    )


def _by(rule: Any) -> Callable[[Leaves], Leaves]:
    return lambda g: uc.clip(g, rule)[0]


SOFT = uc.Rule(1.0, curve=lambda xp, norm, limit: limit / (limit + norm))
CASES = {
    "value": Case(
        lambda g: uc.clip_by_value(g, -1.0, 1.0), lambda x: [leaf.clip(-1, 1) for leaf in x], _filled(1, 1), above=1.0
    ),
    "norm": Case(lambda g: uc.clip_by_norm(g, 1.0), _each(1.0), _filled(1 / 4, 1 / 2)),
    "norm-axis": Case(lambda g: uc.clip_by_norm(g, 1.0, axis=-1), _rows, _filled(1 / 2, 1 / 2)),
    "norm-L1": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=1), _each(1.0, 1), _filled(1 / 16, 1 / 4)),
    "norm-L1.5": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=1.5), _each(1.0, 1.5), _one_entry(0.0)),
    "norm-L3": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=3), _each(1.0, 3), _one_entry(0.0)),
    "norm-Linf": Case(lambda g: uc.clip_by_norm(g, 1.0, ord=math.inf), _each(1.0, math.inf), _one_entry(0.25)),
    "average-norm": Case(
        lambda g: uc.clip_by_average_norm(g, 0.25), _each(0.25, size_power=1), _filled(1, 1 / 2)
    ),
    "global-norm": Case(
        lambda g: uc.clip_by_global_norm(g, 0.625)[0], lambda x: oracle.clip_global(x, 0.625), _filled(1 / 8, 3 / 16)
    ),
    "block-rms": Case(_by(uc.by_block_rms(1.0)), _each(1.0, size_power=0.5), _filled(1, 1)),
    "each-example": Case(_by(uc.Rule(1.25, scope=uc.scopes.each_example)), _examples, _filled(1 / 2, 3 / 4)),
    "unit": Case(_by(uc.Rule(1.0, scope=uc.scopes.unit(-1))), _columns, _filled(1 / 2, 1 / 2)),
    "soft": Case(_by(SOFT), _soft, _filled(1 / 4, 0), kink=False),
    **{f"of-norm-{p}": _norm(p) for p in (1, 1.5, 2, 3, math.inf)},
}  # fmt: skip
SOME = [
    CASES[name]
    for name in ("value", "norm", "norm-axis", "norm-L1.5", "norm-Linf", "each-example", "of-norm-1", "of-norm-2")
]
"""The ways through the code that differ, for what is slow to compile."""
PRESETS = {
    "agc": uc.agc(0.1),
    "larc": uc.larc(0.1),
    "adagc": uc.adagc(warmup=0),
    "warm-up": uc.adagc(warmup=2),
    "percentile": uc.percentile_clipping(50, window=3),
    "block-rms": uc.by_block_rms(1.0),
    "units": uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.unit(0)),
    "sizes": uc.by_example_layer_norm(1.0, by_size=True),
    "spam": uc.spam(warmup=0),
}
"""Rules with several norms, which leave gradients of zeros alone."""
POINTS = ("zero", "below", "limit", "above")
EVERYWHERE = pytest.mark.parametrize(
    ("case", "point"),
    [pytest.param(case, point, id=f"{name}-{point}") for name, case in CASES.items() for point in POINTS],
)


def _moved(x: list[np.ndarray], *steps: tuple[float, list[np.ndarray]]) -> list[np.ndarray]:
    return [leaf + sum(by * along[i] for by, along in steps) for i, leaf in enumerate(x)]


def _axes(x: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Return a unit vector for each entry."""
    ends = np.cumsum([leaf.size for leaf in x])
    rows = np.split(np.eye(ends[-1]), ends[:-1], axis=1)
    return [[row[i].reshape(leaf.shape) for row, leaf in zip(rows, x, strict=True)] for i in range(int(ends[-1]))]


def _like_leaves(values: list[float], x: list[np.ndarray]) -> list[np.ndarray]:
    return [
        part.reshape(leaf.shape)
        for part, leaf in zip(np.split(np.asarray(values), np.cumsum([leaf.size for leaf in x])[:-1]), x, strict=True)
    ]


def _sides(case: Case, point: str) -> tuple[list[np.ndarray], float]:
    """Return where to take differences, and their scale; on a corner the side below counts."""
    x = case.at(point)
    x = [0.9 * leaf for leaf in x] if point == "limit" and case.kink else x
    return x, max(float(np.abs(leaf).max()) for leaf in x) or 1e-3


def weights(results: Leaves) -> list[np.ndarray]:
    """Return a weight for each entry of some results: their weighted sum has a gradient."""
    return WEIGHTS if len(results) == len(WEIGHTS) else [np.asarray(1.0)]


def _total(case: Case, x: list[np.ndarray]) -> float:
    results = case.plain(x)
    return math.fsum(_entries([w * leaf for w, leaf in zip(weights(results), results, strict=True)]))


@cache
def gradient(case: Case, point: str) -> list[np.ndarray]:
    """Return the gradient of the weighted sum of the results."""
    x, scale = _sides(case, point)
    h = 1e-5 * scale
    slopes = [(_total(case, _moved(x, (h, e))) - _total(case, _moved(x, (-h, e)))) / (2 * h) for e in _axes(x)]
    return _like_leaves(slopes, x)


@cache
def along(case: Case, point: str) -> list[np.ndarray]:
    """Return the derivative of the results in one direction."""
    x, scale = _sides(case, point)
    h = 1e-5 * scale
    ends = [case.plain(_moved(x, (by, DIRECTION))) for by in (h, -h)]
    return [(a - b) / (2 * h) for a, b in zip(*ends, strict=True)]


@cache
def gradient_along(case: Case, point: str) -> list[np.ndarray]:
    """Return the derivative of `gradient` in one direction: the second derivative times it."""
    x, scale = _sides(case, point)
    h = 3e-4 * scale

    def mixed(e: list[np.ndarray]) -> float:
        corners = [s * t * _total(case, _moved(x, (s * h, e), (t * h, DIRECTION))) for s in (1, -1) for t in (1, -1)]
        return math.fsum(corners) / (4 * h**2)

    return _like_leaves([mixed(e) for e in _axes(x)], x)


def same(found: Leaves, wanted: list[np.ndarray], tolerance: float = 1e-7) -> None:
    """Assert that a framework's derivatives are these."""
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=10 * tolerance, atol=tolerance)


def same_second(case: Case, point: str, found: Leaves) -> None:
    """Assert that a framework's second derivatives are right where there are any, else finite."""
    if case.has_second(point):
        same(found, gradient_along(case, point), 1e-5)
    else:
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in found)
