# SPDX-License-Identifier: MIT
"""How often each rule clips norms with which nothing is wrong; defined on docs/rules/index.md, measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from rule_presets import family, made

import uniclip as uc

STEPS, SETTLE, BATCH = 2_000, 500, 64
EARLIER, LATER = 1_000, 500  # steps of whole gradients, which take longer
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(cv: float) -> Draw:
    """Return what draws norms around 1 of the coefficient of variation ``cv``."""
    return lambda rng, count: np.abs(rng.normal(1.0, cv, count))


def lognormal(sigma: float) -> Draw:
    """Return what draws norms of median 1 whose logarithms have the standard deviation ``sigma``."""
    return lambda rng, count: rng.lognormal(0.0, sigma, count)


NORMS: dict[str, Draw] = {"calm": normal(0.2), "usual": lognormal(0.3), "wild": lognormal(1.0)}
"""Norms around 1 that differ from step to step, each independent of those before."""


@cache
def shares(name: str) -> tuple[float, ...]:
    """Return the share of the steps that a preset clips (of the examples, if it is for those), for each of `NORMS`."""
    if family(name) == "adaptive":
        return shares_over_time(made(name))
    if family(name) == "examples":
        return tuple(share_of_examples(name, draw) for draw in NORMS.values())
    return shares_of_steps(name)


@cache
def shares_over_time(rule: Any) -> tuple[float, ...]:
    """Return how often a rule clips each of three series of norms, once it has settled."""
    series = np.stack([draw(np.random.default_rng(0), SETTLE + STEPS) for draw in NORMS.values()], axis=1)
    if getattr(rule.limit, "warmup_norm", None) and rule.limit.warmup:  # which scales all leaves together
        return tuple(float(_clipped(rule, one[:, None])[0]) for one in series.T)
    return tuple(map(float, _clipped(replace(rule, scope=uc.scopes.each_entry), series)))


def _clipped(rule: Any, series: np.ndarray) -> np.ndarray:
    """Return the share of clipped steps of each column, which is one series of norms."""
    state, clipped = rule.init(np.zeros(series.shape[1])), []
    for norms in series:
        _, state, report = rule.update(norms, state)
        clipped.append(np.ravel(report.factors) != 1)
    return np.asarray(np.mean(clipped[SETTLE:], axis=0))


def share_above(percentile: float) -> tuple[float, ...]:
    """Return how often norms are above a constant, that percentile of as many earlier norms."""
    limits = [np.percentile(draw(np.random.default_rng(1), STEPS), percentile) for draw in NORMS.values()]
    late = [draw(np.random.default_rng(0), SETTLE + STEPS)[SETTLE:] for draw in NORMS.values()]
    return tuple(float(np.mean(norms > limit)) for norms, limit in zip(late, limits, strict=True))


def shares_of_steps(name: str) -> tuple[float, ...]:
    """Return how often a rule with a given limit clips anything of two leaves of 5 by 10 entries.

    A constant is the 90th percentile of what the rule measured in earlier steps; a ratio lets the usual norm be half of
    the limit. The rule measures gradients of norm 1, since its norms are multiplied by what a gradient is.
    """
    early, rule, limits = _measured(name, 1, EARLIER)
    late, _, _ = _measured(name, 2, LATER)
    found = []
    for draw in NORMS.values():
        before = early * draw(np.random.default_rng(1), EARLIER)[:, None]
        norms = late * draw(np.random.default_rng(2), LATER)[:, None]
        if family(name) == "relative":
            bounds = limits * (2 * np.median(before) / np.median(limits))
        else:
            bounds = np.full_like(limits, np.percentile(before, 90))
        factors = getattr(rule, "curve", uc.curves.hard)(np, norms, np.broadcast_to(bounds, norms.shape))
        found.append(float(np.mean(np.any(factors != 1, axis=1))))
    return tuple(found)


def _measured(name: str, seed: int, count: int) -> tuple[np.ndarray, Any, np.ndarray]:
    """Return the norms that a preset measures of gradients of norm 1, a row for each, the rule and its limits."""
    directions = list(_directions(seed, count))
    if name == "by_value":
        entries = [np.abs(np.concatenate([leaf.ravel() for leaf in leaves])) for leaves in directions]
        return np.asarray(entries), made(name), np.ones(entries[0].shape)
    rule = {"cowclip": uc.cowclip(np.ones(5)), "agc": uc.agc(axis=0)}.get(name) or made(name)
    params = [np.ones((5, 10)), np.ones((5, 10))]
    reports = [rule.update(leaves, (), params)[2] for leaves in directions]
    return np.asarray([_flat(report.norms) for report in reports]), rule, _flat(reports[0].limits)


def _directions(seed: int, count: int) -> Iterator[list[np.ndarray]]:
    """Return gradients of two equal leaves with the joint norm 1."""
    rng = np.random.default_rng(seed + 10)
    for _ in range(count):
        direction = rng.normal(size=(2, 5, 10))
        yield list(direction / np.linalg.norm(direction))


def share_of_examples(name: str, draw: Draw) -> float:
    """Return the share of the examples that a rule clips, in batches of 64; a constant is the median norm."""
    rng, rule = np.random.default_rng(3), made(name)
    if name in {"by_example_norm", "by_example_layer_norm"}:
        rule = getattr(uc, name)(float(np.median(draw(rng, STEPS))))
    state, clipped = rule.init([np.zeros((BATCH, 20)), np.zeros((BATCH, 20))]), []
    for _ in range(150):
        direction = rng.normal(size=(2, BATCH, 20))
        direction *= (draw(rng, BATCH) / np.sqrt((direction**2).sum((0, 2))))[:, None]
        _, state, report = rule.update(list(direction), state)
        factors = np.stack(report.factors) if isinstance(report.factors, list) else report.factors[None]
        clipped.append(np.mean((factors != 1).any(0)))
    return float(np.mean(clipped[50:]))


def settled(rule: Any, cvs: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return how often AdaGC clips norms around 1 of these coefficients of variation, and where its averages settle."""
    series = [normal(cv)(np.random.default_rng(0), 2 * STEPS) for cv in cvs]
    state, seen = rule.init([np.zeros(1) for _ in cvs]), []
    for norms in zip(*series, strict=True):
        _, state, report = rule.update([np.asarray([norm]) for norm in norms], state)
        seen.append((report.factors, state.averages))
    factors, averages = np.moveaxis(np.asarray(seen[STEPS:], dtype=float), 1, 0)
    return (factors < 1).mean(0), averages.mean(0)


def _flat(value: Any) -> np.ndarray:
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return np.concatenate([np.ravel(one) for one in values])
