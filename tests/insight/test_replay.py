"""A replay of a rule on recorded norms equals the rule on gradients with these norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit.rules import every_rule
from uniclip.insight import leaf_norms, replay

SHAPES, STEPS = [(3, 4), (5,), (2, 2)], 120
RULES = every_rule(uc) | {
    "by_norm, rejected": uc.by_norm(0.7, curve=uc.curves.reject),
    "by_norm, split": uc.by_norm(uc.limits.Split(1.0)),
    "each leaf, z-score": uc.Rule(uc.limits.ZScore(2.0, 0.9), scope=uc.scopes.each_leaf),
    "each leaf, skipped": uc.Rule(
        uc.limits.LogZScore(1.0, 0.9), scope=uc.scopes.each_leaf, nonfinite="skip"
    ),
    "quantile": uc.by_global_norm(uc.limits.TrackedQuantile(0.5, 0.1, 1.0)),
}
SCOPES = uc.scopes.all_leaves, uc.scopes.each_leaf
WHOLE = {name for name, rule in RULES.items() if getattr(rule, "scope", None) in SCOPES}
BY_NORMS = {
    name
    for name in WHOLE
    if not {"params", "sizes"} & set(RULES[name].limit.needs) and not RULES[name].norm.size_power
}


def gradients(*, spoiled: bool) -> list[list[Any]]:
    """Return the gradients of some steps, of magnitudes that drift and jump.

    Some of them are absent, and some are not finite.
    """
    rng = np.random.default_rng(0)
    sizes = np.exp(0.3 * rng.normal(size=(STEPS, 3)) + 0.5 * np.sin(np.arange(STEPS) / 40)[:, None])
    sizes[rng.random(STEPS) < 0.03] *= 20
    steps = [
        [size * rng.normal(size=s) / 3 for size, s in zip(row, SHAPES, strict=True)]
        for row in sizes
    ]
    if spoiled:
        steps[20][0][0, 0], steps[70][1][3], steps[71][2][:] = math.nan, math.inf, -math.inf
    for number in np.flatnonzero(rng.random(STEPS) < 0.2):
        steps[number][number % 3] = None
    return steps


@pytest.mark.parametrize("name", sorted(BY_NORMS))
def test_exact(name: str) -> None:
    """Every rule that norms determine has the same results in a replay, NaN included."""
    rule: Any = RULES[name]
    steps, losses = gradients(spoiled=rule.nonfinite != "zero"), 1 + 0.1 * np.sin(np.arange(STEPS))
    losses[100], losses[30] = 50.0, math.nan
    norms = np.asarray([list(leaf_norms(grads, rule.norm).values()) for grads in steps])
    if rule.scope == uc.scopes.all_leaves:
        norms = np.linalg.norm(norms, ord=rule.norm.ord, axis=1)
    found, state = replay(norms, rule, losses), rule.init([np.ones(s) for s in SHAPES])
    for step, (grads, loss) in enumerate(zip(steps, losses, strict=True)):
        _, state, report = rule.update(grads, state, loss=None if math.isnan(loss) else loss)
        factors = report.factors if rule.scope == uc.scopes.each_leaf else [report.factors]
        wanted = [math.nan if one is None else float(one) for one in factors]
        np.testing.assert_allclose(
            np.atleast_1d(found.factors[step]), wanted, rtol=1e-6, err_msg=f"{step}"
        )
        assert found.skipped[step] == (report.skipped is not None and bool(report.skipped))


@pytest.mark.parametrize("name", sorted(set(RULES) - WHOLE))
def test_refused(name: str) -> None:
    """Rules that need more than the norms of whole leaves are refused."""
    with pytest.raises(TypeError, match=r"rule must be a uc\.Rule with one norm"):
        replay(np.ones(3), RULES[name])


def test_parameters_are_missing() -> None:
    """A rule that reads the parameters raises an error that says so."""
    with pytest.raises(ValueError, match="params"):
        replay(np.ones((3, 2)), uc.larc(0.1))


def test_edges() -> None:
    """No steps have an empty replay.

    Limits are ∞ where nothing is limited, and a rule that raises reports the step.
    """
    assert replay([], uc.zclip()).factors.shape == (0,)
    assert replay(np.ones((0, 3)), uc.by_norm(1.0)).factors.shape == (0, 3)
    found = replay([1.0, 2.0, 1.0, 2.0, 100.0], uc.zclip(warmup=4))
    assert np.isinf(found.limits[:4]).all()
    assert found.limits[4] == pytest.approx(1.52, abs=0.01)
    with pytest.raises(FloatingPointError):
        replay([1.0, math.nan], uc.by_global_norm(1.0, nonfinite="raise"))
    with pytest.raises(ValueError, match="norms must have one or two dimensions"):
        replay(np.ones((2, 2, 2)), uc.zclip())
    with pytest.raises(ValueError, match=r"a norm for each leaf; pass record\.leaves"):
        replay(np.ones(3), uc.by_norm(1.0))  # whose norms these are not
