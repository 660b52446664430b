"""Rules that remember, step after step through spikes, NaN and ∞: the same factors and states as by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import oracle_rules as by_hand
import pytest

import uniclip as uc
from frameworks import CHOSEN, ROUNDED, Framework, some_of

pytestmark = pytest.mark.ways(*ROUNDED)

RULES: dict[str, tuple[uc.Rule, Callable[[], Any]]] = {
    "autoclip": (uc.autoclip(window=1000), lambda: by_hand.AutoClip(10)),
    "autoclip(95)": (uc.autoclip(95, window=1000), lambda: by_hand.AutoClip(95)),
    "percentile": (uc.percentile_clipping(5), lambda: by_hand.BitsAndBytes(5)),
    "zclip": (uc.zclip(), lambda: by_hand.ZClip("reciprocal")),
    "zclip to the mean": (uc.zclip(target="mean"), lambda: by_hand.ZClip("mean")),
    "zclip to the threshold": (uc.zclip(target="threshold"), lambda: by_hand.ZClip("threshold")),
    "zclip, harder": (uc.zclip(clip_factor=0.7), lambda: by_hand.ZClip("reciprocal", 0.7)),
    "zclip without its spikes": (
        uc.zclip(skip_update_on_spike=True),
        lambda: by_hand.ZClip("reciprocal", skip_update_on_spike=True),
    ),
    "log_zscore": (uc.log_zscore(), by_hand.LogZScore),
    "norm_growth": (uc.norm_growth(), by_hand.NormGrowth),
    "skip_spikes": (uc.skip_spikes(), by_hand.SkipSpikes),
    "spam": (uc.spam(), by_hand.Spam),
    "adagn": (uc.adagn(), by_hand.AdaGN),
    "by_example_quantile": (uc.by_example_quantile(), by_hand.AndrewsQuantile),
    "by_example_quantile in bounds": (
        uc.by_example_quantile(min=0.1, max=0.9),
        lambda: by_hand.AndrewsQuantile(0.1, 0.9),
    ),
}
SAME = 1e-6
"""How far factors and states may be off, relatively, where there is double precision."""


@functools.cache
def norms(steps: int, seed: int = 0) -> np.ndarray:
    """Return the norms of a training: they drift, with spikes, NaN and ∞ at times, one of them early."""
    rng = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(rng.normal(0, 0.02, steps)))
    usual = drift * rng.lognormal(0, 0.3, steps)
    spikes = np.where(rng.random(steps) < 0.02, 10 ** rng.uniform(0.5, 3, steps), 1.0)
    values = usual * spikes
    values[[3, steps // 2, steps // 2 + 1]] = math.nan
    values[[8, steps - 2]] = math.inf, -math.inf
    return values


def steps_of(fw: Framework) -> int:
    """Return how many steps there are: eagerly fewer, where they are slow and the same steps are compiled as well."""
    compiled = any(one.family == fw.family and one.name in ROUNDED for one in CHOSEN)
    return min(fw.steps, 200) if compiled and not fw.traced else fw.steps


def tolerances(fw: Framework) -> tuple[str, float]:
    """Return the dtype of a trace and how far it may be off: single precision loses digits in a thousand steps."""
    if fw.family == "MLX":  # whose functions are of single precision, also for doubles
        return "float32", 100 * SAME
    return ("float64", SAME) if "float64" in fw.dtypes else ("float32", 30 * SAME)


TRIED = [
    pytest.param(one, tuple(RULES) if name == "together" else (name,), id=f"{one.name}-{name}")
    for one in some_of(*ROUNDED, without="Dask")
    for name in (["together"] if one.traced else RULES)
]
"""Where rules are compiled, they are so together; with Dask, whose graph grows with each step, none is long."""


@pytest.mark.parametrize(("fw", "names"), TRIED, indirect=["fw"])
def test_a_long_training(fw: Framework, names: tuple[str, ...]) -> None:
    """Every factor, and what was learned, is what the paper's formula gives; NaN and ∞ teach nothing."""
    (dtype, rtol), steps = tolerances(fw), steps_of(fw)
    array = lambda values: fw.array([[values]], dtype)  # one example, where a rule has examples
    rules = {name: RULES[name][0] for name in names}
    train = fw.compiled(lambda g, states: {name: rule.update([g], states[name])[1:] for name, rule in rules.items()})
    states, factors = {name: rule.init([array(1.0)]) for name, rule in rules.items()}, {name: [] for name in names}
    shapes = [(tuple(a.shape), a.dtype) for a in optree.tree_leaves(states)]
    for norm in norms(steps):
        results = train(array(norm), states)
        for name, (state, report) in results.items():
            states[name] = state
            factors[name].append(report.factors[0] if isinstance(report.factors, list) else report.factors)
    for name in names:
        expected = RULES[name][1]()
        wanted = [expected.step(abs(norm)) for norm in norms(steps)]
        found = [fw.numpy(x).item() for x in factors[name]]
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-9, err_msg=name)
        known = [fw.numpy(a).ravel() for a in optree.tree_leaves(states[name])]
        filled = np.concatenate([a[(a != -1) & (a < np.finfo(np.float32).max)] for a in known])
        if learned := expected.known():
            np.testing.assert_allclose(filled, learned, rtol=rtol, atol=rtol, err_msg=name)
    assert [(tuple(a.shape), a.dtype) for a in optree.tree_leaves(states)] == shapes


def test_adagc_in_a_long_training(fw: Framework) -> None:
    """Each leaf has its own average, after a warm-up in which all leaves are scaled together."""
    (dtype, rtol), expected, rule = tolerances(fw), by_hand.AdaGC(2), uc.adagc()
    step = fw.compiled(lambda grads, state: rule.update(grads, state)[1:])
    state, factors = rule.init([fw.array(np.ones(2), dtype), fw.array(1.0, dtype)]), []
    series = list(zip(norms(steps_of(fw)), norms(steps_of(fw), 1), strict=True))
    for one, two in series:
        state, report = step([fw.array([0.6 * one, 0.8 * one], dtype), fw.array(two, dtype)], state)
        factors.append(report.factors)
    for (one, two), factor in zip(series, factors, strict=True):
        wanted = expected.step([abs(one), abs(two)])
        if math.isfinite(one) and math.isfinite(two):
            np.testing.assert_allclose([fw.numpy(f).item() for f in factor], wanted, rtol=rtol)
    known = np.concatenate([fw.numpy(a).ravel() for a in optree.tree_leaves(state)])
    np.testing.assert_allclose(known, expected.known(), rtol=rtol)


def test_all_of_history_in_a_histogram(fw: Framework) -> None:
    """Without a window the percentile is that of all norms, to half a percent."""
    (dtype, _), rule, steps = tolerances(fw), uc.autoclip(75, window=None), min(steps_of(fw), 300)
    step = fw.compiled(lambda grads, state: rule.update(grads, state)[1:])
    state, seen = rule.init(fw.array([1.0], dtype)), []
    for norm in norms(steps):
        state, report = step(fw.array([norm], dtype), state)
        if math.isfinite(norm):
            seen.append(norm)
            np.testing.assert_allclose(fw.numpy(report.limits), np.percentile(seen, 75), rtol=6e-3)


def test_losses_in_a_long_training(fw: Framework) -> None:
    """A spike of the loss skips the step too; a loss that is no number is one, and is not remembered."""
    rule, steps = uc.skip_spikes(z=4, window=16, warmup=8), 24
    step = fw.compiled(lambda grads, loss, state: rule.update(grads, state, loss=loss))
    state, rng = rule.init(fw.array([1.0])), np.random.default_rng(0)
    losses, kept, skipped = rng.normal(2, 0.1, steps), [], []
    losses[[12, 17, 18]] = 9.0, math.nan, math.inf
    grads = fw.array([1.0])
    for i, loss in enumerate(losses):
        clipped, state, report = step(grads, fw.array(loss), state)
        if fw.numpy(report.factors).item() == 0:
            skipped.append(i)
        assert fw.numpy(clipped).item() == (0.0 if i in {12, 17, 18} else 1.0)
        if math.isfinite(loss):
            kept = [loss, *kept][:16]
    assert skipped == [12, 17, 18]
    np.testing.assert_allclose(fw.numpy(state.losses)[0], kept, rtol=1e-6)
