"""Stateful rules in a thousand steps with drift, spikes, NaN and ∞, compared with the oracle."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit import oracle
from kit.check import reported_of
from kit.frameworks import Framework
from kit.oracle import Plan, Scope

LEAF, EXAMPLE, DOUBLE = Scope("leaf"), Scope("example"), oracle.precision("float64", flush=False)
QUANTILE, ZSCORE = ("quantile", 0.5, 0.2, 0.1, 0.0, math.inf), ("z-score", 2.5, 0.97)
RULES: dict[str, tuple[Any, Plan]] = {
    "autoclip": (uc.autoclip(10, window=64), Plan(limit=("percentile", 10, 64, False))),
    "autoclip of all": (uc.autoclip(75, window=None), Plan(limit=("percentile of all", 75))),
    "percentile": (
        uc.percentile_clipping(5),
        Plan(scope=LEAF, limit=("percentile", 500 / 99, 100, True)),
    ),
    "zclip": (uc.zclip(), Plan(limit=(*ZSCORE, "reciprocal", 25, 1e-6, 1.0, False))),
    ("zclip to the mean"): (
        uc.zclip(target="mean"),
        Plan(limit=(*ZSCORE, "mean", 25, 1e-6, 1.0, False)),
    ),
    "zclip without its spikes": (
        uc.zclip(skip_update_on_spike=True),
        Plan(limit=(*ZSCORE, "reciprocal", 25, 1e-6, 1.0, True)),
    ),
    "log_zscore": (uc.log_zscore(), Plan(limit=("log z-score", 2.0, 0.95))),
    "norm_growth": (uc.norm_growth(), Plan(scope=LEAF, limit=("ema", 1.01, 0.0, 0, 1.0))),
    "adagc": (uc.adagc(), Plan(scope=LEAF, limit=("ema", 1.05, 0.98, 100, 1.0))),
    "skip_spikes": (
        uc.skip_spikes(window=32),
        Plan(limit=("rolling z-score", 6.0, 32, 16), curve="reject", policy="skip"),
    ),
    "spam": (uc.spam(), Plan(scope=Scope("entry"), limit=("second moment", 5000.0, 0.999, 20))),
    "adagn": (uc.adagn(), Plan(scope=LEAF, limit=("mean over rms", 0.7, 0.9), curve="normalize")),
    "by_example_quantile": (uc.by_example_quantile(), Plan(scope=EXAMPLE, limit=QUANTILE)),
}
CURVES = {
    "hard": lambda norm, limit: min(norm, limit) / norm,
    "normalize": lambda norm, limit: limit / norm,
    "reject": lambda norm, limit: float(norm <= limit),
}
STEPS = {"numpy": 1000, "torch": 200}


@functools.cache
def norms(steps: int) -> np.ndarray:
    """Return the norms of a training: they drift, with occasional spikes, NaN and ∞."""
    rng = np.random.default_rng(0)
    drift = np.exp(np.cumsum(rng.normal(0, 0.02, steps)))
    usual = drift * rng.lognormal(0, 0.3, steps)
    values = usual * np.where(rng.random(steps) < 0.02, 10 ** rng.uniform(0.5, 3, steps), 1.0)
    values[[3, steps // 2, steps // 2 + 1]] = math.nan
    values[[8, steps - 2]] = math.inf, -math.inf
    return values


@pytest.mark.only(*STEPS)
@pytest.mark.parametrize("name", RULES)
def test_a_long_training(framework: Framework, name: str) -> None:
    """Every limit and factor follows the published formula; NaN and ∞ leave the state unchanged."""
    (rule, plan), own, looked = RULES[name], None, 0
    # The leaf has one example, for rules of examples.
    array = lambda value: [framework.array([[value]], "float64")]
    state = rule.init(array(1.0))
    for number, norm in enumerate(norms(200 if "of all" in name else STEPS[framework.name])):
        clipped, state, report = rule.update(array(norm), state)
        assert bool(report.finite) is bool(np.isfinite(norm))
        if not np.isfinite(norm):
            continue
        (limit,), (factor,) = reported_of(plan, report, framework)
        inputs = oracle.LimitInputs(
            [None], list, lambda: [1], oracle.precision("float32", flush=False), reported=[limit]
        )
        with np.errstate(all="ignore"):
            (span,), own = oracle.step(
                plan.limit, [oracle.exact(np.full(limit.shape, norm), DOUBLE)], own, inputs
            )
        assert min(span.lo.item(), np.finfo(float).max) <= limit.item() <= span.hi.item(), (
            number,
            limit,
            span,
        )
        if np.isfinite(span.hi).all():
            looked += 1
            # A wide span would check nothing.
            assert span.hi.item() <= span.lo.item() * (1.02 if "of all" in name else 1 + 1e-6)
        wanted = CURVES[plan.curve](norm, limit.item())
        np.testing.assert_allclose(factor.item(), wanted, rtol=1e-15)
        np.testing.assert_allclose(
            framework.numpy(clipped[0]).item(), norm * factor.item(), rtol=1e-15
        )
    assert looked
