"""Replaying a rule on recorded norms does what the rule does on gradients with these norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from insight.recorded import run
from kit.rules import every_rule
from uniclip.insight import Record, replay, what_if

SHAPES, STEPS = [(3, 4), (5,), (2, 2)], 120
RULES = every_rule(uc) | {
    "by_norm, rejected": uc.by_norm(0.7, curve=uc.curves.reject),
    "by_norm, split": uc.by_norm(uc.limits.Split(1.0)),
    "each leaf, z-score": uc.Rule(uc.limits.ZScore(2.0, 0.9), scope=uc.scopes.each_leaf),
    "each leaf, skipped": uc.Rule(uc.limits.LogZScore(1.0, 0.9), scope=uc.scopes.each_leaf, nonfinite="skip"),
    "ema": uc.by_global_norm(uc.limits.Ema(1.1, 0.9, warmup=10)),
    "quantile": uc.by_global_norm(uc.limits.TrackedQuantile(0.5, 0.1, 1.0)),
}
REFUSED = {
    name: why
    for why, names in {
        "needs the parameters": ["agc", "agc along an axis", "agc, units", "larc"],
        "works on the entries": ["by_value"],
        "norms of parts of leaves": [
            "by_example_norm", "by_example_layer_norm", "by_example_layer_norm, by size", "by_example_quantile",
            "auto_s", "psac", "spam", "by_norm along an axis", "scope entries", "scope axis 0", "scope last axis",
            "scope unit 0", "scope unit 1", "scope examples",
        ],
        "groups leaves by their paths": ["by_group_norm", "by_group_norm, a limit that learns", "norm L3 of groups"],
        "one after the other": ["chain", "chain of skip and autoclip", "chain of value and zclip"],
        "leaves some leaves out": ["masked", "masked adagc", "cowclip"],
    }.items()
    for name in names
}  # fmt: skip
REFUSED["by_group_norm, relative"] = "groups leaves by their paths|needs the parameters"


def gradients(*, spoiled: bool = False) -> list[list[Any]]:
    """Return the gradients of some steps, of sizes that drift and jump; some of them not finite."""
    rng = np.random.default_rng(0)
    sizes = np.exp(0.3 * rng.normal(size=(STEPS, 3)) + 0.5 * np.sin(np.arange(STEPS) / 40)[:, None])
    sizes[rng.random(STEPS) < 0.03] *= 20
    steps = [[size * rng.normal(size=s) / 3 for size, s in zip(row, SHAPES, strict=True)] for row in sizes]
    if spoiled:
        steps[20][0][0, 0], steps[70][1][3], steps[71][2][:] = math.nan, math.inf, -math.inf
    return steps


def recorded(steps: list[list[Any]], order: float = 2) -> Record:
    """Return the record of a run with these gradients: all norms as they were before clipping."""
    leaves = np.asarray([[float(n) for n in uc.clip(grads, uc.by_norm(1.0, ord=order))[1].norms] for grads in steps])
    joint = np.asarray([float(uc.global_norm(grads, ord=order)) for grads in steps])
    finite, unknown = np.isfinite(joint), np.full(len(steps), math.nan)
    leaves[~np.isfinite(leaves)] = joint[~finite] = math.nan
    columns = dict.fromkeys(["limits", "factors", "shares", "losses"], unknown)
    record = run(len(steps), norms=joint, finite=finite, ord=order, **columns)
    sizes = np.asarray([math.prod(shape) for shape in SHAPES])
    return record._replace(leaves=leaves, leaf_steps=record.steps, labels=["[0]", "[1]", "[2]"], sizes=sizes)


def of_norms(norms: Any, **more: Any) -> Record:
    """Return a record of joint norms."""
    norms = np.asarray(norms, np.float64)
    return run(len(norms), **{"norms": norms, "finite": np.isfinite(norms), "ord": 2.0, **more})


def really(rule: Any, steps: list[list[Any]], losses: Any = None) -> tuple[Any, Any, Any]:
    """Run a rule; return norms, factors and skipped steps."""
    clipper, found = uc.Clipper(rule), list[Any]()
    for number, grads in enumerate(steps):
        clipper(grads, loss=None if losses is None else losses[number])
        report = clipper.report
        found.append((report.norms, report.factors, report.skipped is not None and bool(report.skipped)))
    norms, factors, skipped = zip(*found, strict=True)
    return np.asarray(norms, float), np.asarray(factors, float), np.asarray(skipped)


def assert_same(rule: Any, record: Record, steps: list[list[Any]], losses: Any = None) -> None:
    """Assert that the replay is what the rule does, to 1e-6."""
    found, (norms, factors, skipped) = replay(record, rule), really(rule, steps, losses)
    finite = np.isfinite(norms)
    np.testing.assert_allclose(found.norms[finite], norms[finite], rtol=1e-6)
    assert np.isnan(found.norms[~finite]).all()
    np.testing.assert_allclose(found.factors, factors, rtol=1e-6)
    np.testing.assert_array_equal(found.skipped, skipped)
    assert found.share == pytest.approx((factors != 1).mean())


@pytest.mark.parametrize("name", sorted(set(RULES) - set(REFUSED)))
def test_exact(name: str) -> None:
    """Every rule that norms determine does in a replay what it did, at steps that are not finite, too."""
    rule = RULES[name]
    steps = gradients(spoiled=rule.nonfinite != "zero")
    assert_same(rule, recorded(steps, rule.norm.ord), steps)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What norms do not determine is refused, with the reason."""
    with pytest.raises(TypeError, match=REFUSED[name]):
        replay(recorded(gradients()), RULES[name])


def test_another_order() -> None:
    """Norms of another order are refused."""
    with pytest.raises(TypeError, match="order 3"):
        replay(recorded(gradients(), 3), uc.by_global_norm(1.0))


def test_losses() -> None:
    """A rule that looks at the loss sees those that are recorded, and no loss where there is none."""
    steps, rule = gradients(), uc.skip_spikes(4.0, window=32)
    losses: list[Any] = [1 + 0.1 * math.sin(number) for number in range(STEPS)]
    losses[100], losses[30] = 50.0, None
    known = np.asarray(losses, np.float64)
    assert_same(rule, recorded(steps)._replace(losses=known), steps, losses)
    found = [replay(recorded(steps)._replace(losses=some), rule).skipped[100] for some in (known, known * math.nan)]
    assert found == [True, False]


def test_missing_steps() -> None:
    """A rule that remembers needs every step; another one is replayed on those that there are."""
    record = of_norms(np.arange(1.0, 41.0), steps=np.arange(0, 400, 10))
    with pytest.raises(TypeError, match="after step 0 the record goes on with step 10"):
        replay(record, uc.zclip())
    found = replay(record, uc.by_global_norm(20.0))
    assert (found.share, found.factors[-1]) == (0.5, 0.5)


def test_absent_gradients() -> None:
    """A leaf without a gradient at some steps is ``None`` there: no step is left out."""
    steps, rng = gradients(), np.random.default_rng(1)
    record = recorded(steps)
    leaves = record.leaves.copy()
    for number in range(STEPS):
        for leaf in np.flatnonzero(rng.random(3) < 0.3):
            steps[number][leaf], leaves[number, leaf] = None, math.nan
    joint = np.asarray([float(uc.global_norm(grads)) for grads in steps])
    record = record._replace(leaves=leaves, norms=joint)
    found = replay(record, uc.zclip())
    np.testing.assert_allclose(found.factors, really(uc.zclip(), steps)[1], rtol=1e-6)
    found = replay(record, uc.by_norm(0.7))
    np.testing.assert_allclose(found.factors, np.minimum(1, 0.7 / leaves), rtol=1e-6)


def test_policies() -> None:
    """What "zero" leaves is used where it was recorded; "raise" says where it would have stopped."""
    steps, rule = gradients(spoiled=True), uc.by_global_norm(1.0, nonfinite="zero")
    norms, factors, _ = really(rule, steps)
    record = recorded(steps)._replace(leaves=np.zeros((0, 0)), leaf_steps=np.zeros(0, int), labels=[])
    np.testing.assert_allclose(replay(record._replace(norms=norms), rule).factors, factors, rtol=1e-6)
    assert np.isnan(replay(record, rule).factors[~record.finite]).all()
    with pytest.raises(FloatingPointError, match="step 3 is not finite"):
        replay(of_norms([1.0, 2.0, math.nan]), uc.by_global_norm(1.0, nonfinite="raise"))


def test_nothing_and_limits() -> None:
    """A record without steps has an empty replay; limits are ∞ where nothing limits."""
    assert math.isnan(replay(of_norms([]), uc.zclip()).share)
    found = replay(of_norms([1.0, 2.0, 1.0, 2.0, 100.0]), uc.zclip(warmup=4))
    assert np.isinf(found.limits[:4]).all()
    assert found.limits[4] == pytest.approx(1.52, abs=0.01)


def test_what_if() -> None:
    """The table says of each limit what its replay does; steps may be far apart."""
    norms = np.exp(np.random.default_rng(0).normal(size=400)) * 3
    record = of_norms(norms, steps=np.arange(0, 4000, 10))
    table = what_if(record)
    for row in zip(*table, strict=True):
        found = replay(record, uc.by_global_norm(row[0]))
        assert row[1:] == (found.share, found.error, found.factors.min())
    assert np.all(np.diff(table.shares) <= 0)
    assert what_if(record, [1.0]).shares == (norms > 1).mean()
