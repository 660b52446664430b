"""The advice on made-up records, one for each branch: the verdict, the limits, and the reasons' figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from insight.recorded import of_norms
from uniclip.insight import Record, suggest

STEPS = 400
RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=STEPS)
FALLING = 2.3 * np.exp(-np.arange(STEPS) / 100) + 0.02 * RNG.normal(size=STEPS)


def record_of(norms: Any, losses: Any = None, limit: float = 1.0, **columns: Any) -> Record:
    """Return a record of a run with a limit."""
    norms = np.asarray(norms, float)
    columns |= {"limits": np.full(len(norms), limit), "factors": np.minimum(1.0, limit / np.maximum(norms, 1e-9))}
    columns |= {"shares": (norms > limit).astype(float), "ord": 2.0}
    return of_norms(norms, **columns | ({} if losses is None else {"losses": np.asarray(losses, float)}))


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


def test_not_finite() -> None:
    """A step that is not finite and was taken makes a run unstable, also a short one."""
    for n in (60, STEPS):
        norms = usual(2.0)[:n]
        norms[-5:] = math.nan
        advice = suggest(record_of(norms, FALLING[:n], math.inf))
        assert (advice.verdict, advice.limits) == ("unstable", ())
        assert advice.record_at == pytest.approx(2.0, rel=0.1)
        assert f"Step {n - 4} was not finite" in advice.reasons[0]


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


def test_refused() -> None:
    """Only a record is taken."""
    with pytest.raises(TypeError, match="record must be a Record"):
        suggest([1.0])  # type: ignore[arg-type]
