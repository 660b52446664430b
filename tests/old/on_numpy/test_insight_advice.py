# SPDX-License-Identifier: MIT
"""The advice on made-up records, one for each branch: the verdict, the limits, and the reasons' figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from uniclip.insight.advice import suggest
from uniclip.insight.record import Record

STEPS = 400
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=STEPS)
FALLING = 2.3 * np.exp(-np.arange(STEPS) / 100) + 0.02 * RNG.normal(size=STEPS)


def record_of(norms: Any, losses: Any = None, limit: float = 1.0, **columns: Any) -> Record:
    """Return a record; a norm that is not finite is one of a step that is not."""
    norms = np.asarray(norms, float)
    n, finite = len(norms), np.isfinite(norms)
    norms = np.where(finite, norms, np.nan)
    empty = np.full(n, np.nan)
    values: dict[str, Any] = {
        "steps": np.arange(1, n + 1),
        "norms": norms,
        "limits": np.full(n, limit),
        "factors": np.minimum(1.0, limit / np.maximum(norms, 1e-9)),
        "shares": (norms > limit).astype(float),
        "finite": finite,
        "skipped": np.zeros(n, bool),
        "thresholds": empty,
        "losses": empty if losses is None else np.asarray(losses, float),
        "leaves": np.zeros((0, 0)),
        "leaf_steps": np.zeros(0, np.int64),
        "labels": [],
        "sizes": np.zeros(0, np.int64),
        "rule": "uc.by_global_norm(1.0)",
        "scope": "all_leaves",
        "ord": 2.0,
        "extra": {},
    }
    return Record(**values | columns)


def usual(scale: float = 1.0, spread: float = 0.2) -> Any:
    """Return norms of a calm run."""
    return scale * np.exp(spread * NOISE)


def exploding(scale: float, at: int = 200) -> tuple[Any, Any]:
    """Return norms and losses of a run that explodes at a step and stays finite."""
    norms, losses = usual(scale), FALLING.copy()
    norms[at:] *= np.minimum(1.2 ** np.arange(STEPS - at), 1e4)
    losses[at:] += np.minimum(0.05 * np.arange(STEPS - at), 5.0)
    return norms, losses


def test_stable() -> None:
    """Of a stable run c is the 90th percentile after the warm-up: the first tenth does not count."""
    norms = usual(3.0)
    norms[:40] *= 50
    advice = suggest(record_of(norms, FALLING))
    c = np.percentile(norms[40:], 90)
    assert (advice.verdict, advice.record_at) == ("stable", None)
    assert advice.limits == tuple(float(f"{limit:.1e}") for limit in (c / 4, c, 4 * c))
    assert any("90th percentile of 360 norms" in reason and f"{c:.3g}" in reason for reason in advice.reasons)


def test_warm_up_of_short_runs() -> None:
    """At least 20 steps are left out."""
    norms = usual()[:120]
    norms[:20] = 100.0
    assert suggest(record_of(norms, FALLING[:120])).limits[1] == float(f"{np.percentile(norms[20:], 90):.1e}")


def test_outliers() -> None:
    """Spikes make a verdict, and do not move c, not even if they are more than a tenth of the steps."""
    norms = usual()
    clean = suggest(record_of(norms, FALLING))
    loud = norms.copy()
    loud[50::8] *= 30
    advice = suggest(record_of(loud, FALLING))
    assert advice.verdict == "outliers"
    assert advice.limits[1] == pytest.approx(clean.limits[1], rel=0.05)
    assert any("44 of 360 steps stand out" in reason for reason in advice.reasons)


def test_single_spike() -> None:
    """One spike counts as an outlier if it is ten times the median."""
    for times, verdict in ((8.0, "stable"), (15.0, "outliers")):
        norms = usual()
        norms[300] = times * np.median(norms[200:300])
        assert suggest(record_of(norms, FALLING)).verdict == verdict


def test_skipped_steps_are_outliers() -> None:
    """A step that is not finite and was skipped does not make a run unstable."""
    norms, skipped = usual(), np.zeros(STEPS, bool)
    norms[[60, 160, 260]], skipped[[60, 160, 260]] = math.nan, True
    advice = suggest(record_of(norms, FALLING, skipped=skipped))
    assert advice.verdict == "outliers"
    assert any("3 were not finite, and skipped" in reason for reason in advice.reasons)


@pytest.mark.parametrize("limit", [math.inf, 50.0])
def test_exploded_without_a_limit_that_held(limit: float) -> None:
    """The median of the steps before is where to record again; no limit is suggested."""
    norms, losses = exploding(2.0)
    advice = suggest(record_of(norms, losses, limit))
    assert (advice.verdict, advice.limits) == ("unstable", ())
    assert advice.record_at == pytest.approx(2.0, rel=0.1)
    assert any(f"clipped at {advice.record_at:g}" in reason for reason in advice.reasons)


def test_exploded_though_clipped() -> None:
    """The learning rate is the answer; c is a quarter of the lesser of median and limit."""
    for scale, limit in ((1.0, 1.0), (20.0, 1.0), (0.6, 1.0)):
        norms, losses = exploding(scale)
        advice = suggest(record_of(norms, losses, limit))
        assert (advice.verdict, advice.record_at) == ("unstable", None)
        assert advice.limits[1] == pytest.approx(min(scale, limit) / 4, rel=0.1)
        assert any("lower the learning rate" in reason for reason in advice.reasons)


def test_nothing_after_the_explosion_counts() -> None:
    """Other norms after it, or a NaN at the end, change nothing."""
    norms, losses = exploding(2.0)
    first = suggest(record_of(norms, losses, math.inf))
    norms[300:] = 1e9
    second = suggest(record_of(norms, losses, math.inf))
    norms[-1] = math.nan
    third = suggest(record_of(norms, losses, math.inf))
    assert first.record_at == second.record_at == third.record_at == pytest.approx(2.0, rel=0.1)
    clipped = suggest(record_of(norms, losses))
    assert clipped.table.factors[clipped.table.max_norms == 1.0] > 0.1  # of the norms before, around 2


def test_not_finite() -> None:
    """A step that is not finite and was taken makes a run unstable, also a short one."""
    for n in (60, STEPS):
        norms = usual(2.0)[:n]
        norms[-5:] = math.nan
        advice = suggest(record_of(norms, FALLING[:n], math.inf))
        assert (advice.verdict, advice.limits) == ("unstable", ())
        assert advice.record_at == pytest.approx(2.0, rel=0.1)
        assert f"Step {n - 4} was not finite" in advice.reasons[0]


def test_not_finite_from_the_beginning() -> None:
    """Where too few norms came before, there is nothing to suggest but a lower learning rate."""
    norms = np.full(STEPS, math.nan)
    norms[:4] = 1.0
    advice = suggest(record_of(norms, limit=math.inf))
    assert (advice.verdict, advice.limits, advice.record_at) == ("unstable", (), None)
    assert any("Lower the learning rate" in reason for reason in advice.reasons)


def test_without_losses() -> None:
    """The norms alone say so: growth is unstable, and the reason says that no loss was there."""
    norms, _ = exploding(2.0)
    for values, verdict in ((usual(), "stable"), (norms, "unstable")):
        advice = suggest(record_of(values, limit=math.inf))
        assert advice.verdict == verdict
        assert any("No loss is recorded" in reason for reason in advice.reasons)
    assert suggest(record_of(norms, limit=math.inf)).record_at == pytest.approx(2.0, rel=0.15)


def test_norms_that_fall_and_rise_again() -> None:
    """Norms that come back to where they were after the warm-up are not taken for an explosion."""
    dip = np.exp(-4 * np.sin(np.linspace(0, math.pi, STEPS - 80)))
    norms = usual()
    norms[80:] *= dip
    assert suggest(record_of(norms)).verdict == "stable"


def test_a_loss_that_is_noisy_and_falls_little() -> None:
    """A rise within the noise of single steps is none."""
    for seed in range(20):
        losses = 2.3 - 0.0002 * np.arange(STEPS) + 0.2 * np.random.default_rng(seed).normal(size=STEPS)
        assert suggest(record_of(usual(), losses)).verdict == "stable"


@pytest.mark.parametrize("noise", [0.2, 0.35])
def test_a_loss_that_gets_as_quiet_as_it_gets_small(noise: float) -> None:
    """Noise that is a share of the loss makes no rise of the first steps, whatever the last ones are like."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        steps = np.arange(1000)
        falling = np.where(steps < 100, 1.0, np.exp(-(steps - 100) / 100) + 0.01) * rng.lognormal(0.0, noise, 1000)
        assert suggest(record_of(rng.lognormal(0.0, 0.4, 1000), falling)).verdict == "stable"
        falling[600:] *= 100  # and then it does rise
        assert suggest(record_of(rng.lognormal(0.0, 0.4, 1000), falling)).verdict == "unstable"


def test_a_loss_that_rises_from_the_beginning() -> None:
    """There is no need for it to have fallen."""
    losses = np.linspace(2.3, 4.0, STEPS) + 0.02 * NOISE
    assert suggest(record_of(usual(), losses)).verdict == "unstable"


def test_too_little_data() -> None:
    """Fewer than 100 norms, or fewer than 50 after the warm-up, give no limit."""
    assert suggest(record_of(usual()[:100], FALLING[:100])).verdict == "stable"
    few = suggest(record_of(usual()[:99], FALLING[:99]))
    assert (few.verdict, few.limits) == ("too little data", ())
    assert "99 norms are known" in few.reasons[0]
    norms = np.full(1000, math.nan)
    norms[:100], norms[-20:] = 1.0, 1.0
    late = suggest(record_of(norms, finite=np.ones(1000, bool)))
    assert late.verdict == "too little data"
    assert suggest(record_of([])).verdict == "too little data"


def test_zeros() -> None:
    """Norms of 0 give no limit, for it would zero the gradients."""
    advice = suggest(record_of(np.zeros(STEPS), FALLING))
    assert (advice.verdict, advice.limits) == ("stable", ())
    assert any("would zero the gradients" in reason for reason in advice.reasons)


def test_normalizer() -> None:
    """It is said of each limit that clips more than half of the steps, the recorded one included."""
    advice = suggest(record_of(usual(8.0), FALLING))
    words = [reason for reason in advice.reasons if "normalizer" in reason]
    assert len(words) == 1
    assert "1 (100 %)" in words[0]
    assert not any("normalizer" in reason for reason in suggest(record_of(usual(0.1, 1.5), FALLING)).reasons)


def test_table() -> None:
    """It has the limits, two between them and the recorded one, and what each would have clipped."""
    for limit in (1.0, math.inf):
        record = record_of(usual(8.0), FALLING, limit)
        advice = suggest(record)
        limits, found = advice.table.max_norms.tolist(), advice.table
        assert set(limits) >= {*advice.limits, *([] if math.isinf(limit) else [limit])}
        assert limits == sorted(limits)
        assert len(limits) == (5 if math.isinf(limit) else 6)
        for tried, share, factor in zip(limits, found.shares, found.factors, strict=True):
            assert share == np.mean(record.norms > tried)
            assert math.isclose(factor, min(1.0, tried / record.norms.max()), rel_tol=1e-6)


def test_scopes_and_orders() -> None:
    """It says what the limits are for if that is not the Euclidean norm of all leaves, and if the limit varied."""
    plain = suggest(record_of(usual(), FALLING)).reasons
    for columns, words in (
        ({"scope": "each_leaf"}, "limits for each leaf"),
        ({"scope": "other"}, "the rule's own scope"),
        ({"ord": math.inf}, "of order inf"),
        ({"ord": None}, "of no order"),
        ({"limits": np.linspace(1.0, 2.0, STEPS)}, "limit varied"),
    ):
        assert any(words in reason for reason in suggest(record_of(usual(), FALLING, **columns)).reasons)
        assert not any(words in reason for reason in plain)


def test_text() -> None:
    """It is a text of at most 30 lines, with verdict, limits, reasons, table and what to do."""
    norms, losses = exploding(20.0)
    for record in (record_of(usual(8.0), FALLING, scope="other", ord=None), record_of(norms, losses)):
        advice = suggest(record)
        text = str(advice)
        assert len(text.splitlines()) <= 30
        assert text.startswith(f"Verdict: {advice.verdict}")
        assert all(reason in " ".join(text.split()) for reason in advice.reasons)
        assert all(f"{limit:.3g}" in text for limit in advice.table.max_norms)
        assert "one run is no measurement" in text
    again = str(suggest(record_of(norms, losses, math.inf)))
    assert "Record again with the limit 20" in again
    assert "Try these three" not in again


def test_refused() -> None:
    """Only a record is taken."""
    with pytest.raises(TypeError, match="record must be a Record"):
        suggest([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("skipped", [False, True])
def test_loss_that_is_not_finite(skipped: bool) -> None:
    """A loss that is not finite is trouble if its step was taken, though all gradients were finite."""
    losses, flags = FALLING.copy(), np.zeros(STEPS, bool)
    losses[250], flags[250] = math.inf, skipped
    advice = suggest(record_of(usual(), losses, skipped=flags))
    if skipped:
        assert advice.verdict == "stable"
        return
    assert advice.verdict == "unstable"
    assert advice.reasons[0] == "The loss of step 251 was not finite, and was not skipped."
    both = suggest(record_of(np.where(np.arange(STEPS) == 250, math.nan, usual()), losses))
    assert both.reasons[0] == "Step 251 was not finite, and was not skipped."


@pytest.mark.parametrize("scale", [1e-320, 1e-310, 1e-38, 1e-30, 1e37, 1e200, 1e307])
@pytest.mark.parametrize("explodes", [False, True])
def test_extreme_norms(scale: float, explodes: bool) -> None:
    """Limits are normal numbers of float32, or there are none, and it is said why."""
    norms, losses = exploding(1.0) if explodes else (usual(), FALLING)
    advice = suggest(record_of(np.minimum(norms, 10) * scale, losses, limit=scale if explodes else 1.0))
    assert advice.verdict == ("unstable" if explodes else "stable")
    assert all(np.finfo(np.float32).tiny <= limit <= np.finfo(np.float32).max for limit in advice.limits)
    assert bool(advice.limits) == (scale in {1e-30, 1e37})
    if not advice.limits:
        assert "range" in f"{advice}"
    suggest(record_of(norms[:50] * scale))


@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
def test_extreme_losses(value: float) -> None:
    """Losses near the largest number are as good as others."""
    losses = np.where(np.arange(STEPS) < 200, FALLING, value)
    assert suggest(record_of(usual(), losses)).verdict == ("unstable" if value > 0 else "stable")
    losses[::2] *= -1
    spiky = usual()
    spiky[300] = 1.7e308
    spiky[310:320] = 1e-300
    suggest(record_of(spiky, losses))


def test_norms_of_infinity() -> None:
    """A norm of ∞ is not finite, whatever the flag says."""
    norms = usual()
    record = record_of(norms, FALLING)
    infinite = norms.copy()
    infinite[300:] = math.inf
    assert suggest(record._replace(norms=infinite)).reasons[0] == "Step 301 was not finite, and was not skipped."
    skipped = suggest(record._replace(norms=infinite, skipped=np.isinf(infinite)))
    assert skipped.verdict == "outliers"


def test_prefix_has_its_extra_columns() -> None:
    """What is left of an unstable run is a whole record."""
    norms, losses = exploding(1.0)
    extra = {"lr": np.arange(STEPS) * 1.0}
    leaves = {
        "leaves": norms[:, None],
        "leaf_steps": np.arange(1, STEPS + 1),
        "labels": ["w"],
        "sizes": np.ones(1, int),
    }
    assert suggest(record_of(norms, losses, limit=0.5, extra=extra, **leaves)).verdict == "unstable"
