"""Replaying a rule on recorded norms does what the rule does on gradients with these norms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from uniclip.insight import running
from uniclip.insight.record import Record
from uniclip.insight.replay import replay, what_if
from uniclip.insight.shares import share_and_error

SHAPES = [(3, 4), (5,), (2, 2)]
SIZES = np.asarray([math.prod(shape) for shape in SHAPES])
STEPS = 300


def label(path: tuple[Any, ...], leaf: Any) -> str:
    """Name a group of leaves."""
    return "first" if path[0] == 0 else "rest"


class Slowly(uc.Limit):
    """A limit of a user's own: half the mean of the norms so far, and what follows from how many there are."""

    memory = True

    def init(self, norms: Any, context: Any) -> Any:
        return uc.limits.averages.Averages(norms * 0, context.asarray(0, context.xp.int32))

    def __call__(self, norms: Any, state: Any, context: Any) -> Any:
        count = state.count + 1
        means = state.averages + (norms - state.averages) / count
        return 0.5 * means + 1 / context.count, state._replace(averages=means, count=count)


JOINT = {
    "by_global_norm": uc.by_global_norm(1.0),
    "by_global_norm_inf": uc.by_global_norm(math.inf),
    "by_global_norm_0": uc.by_global_norm(0.0),
    "by_global_norm_array": uc.by_global_norm(np.asarray(1.0)),
    "to_global_norm": uc.to_global_norm(2.0),
    "autoclip": uc.autoclip(90, window=50),
    "autoclip_of_all": uc.autoclip(75, window=None),
    "zclip": uc.zclip(),
    "zclip_mean": uc.zclip(2.0, target="mean", skip_update_on_spike=True),
    "log_zscore": uc.log_zscore(),
    "skip_spikes": uc.skip_spikes(3.0, window=32),
    "skip_spikes_zero": uc.skip_spikes(3.0, window=32, nonfinite="zero"),
    "soft": uc.by_global_norm(1.0, curve=uc.curves.soft),
    "smooth": uc.by_global_norm(1.0, curve=uc.curves.smooth),
    "tanh": uc.by_global_norm(1.0, curve=uc.curves.tanh),
    "reject": uc.by_global_norm(1.0, curve=uc.curves.reject),
    "regularized": uc.by_global_norm(1.0, curve=uc.curves.Regularized(0.1)),
    "nonmonotonic": uc.by_global_norm(1.0, curve=uc.curves.NonMonotonic(0.1)),
    "schedule": uc.by_global_norm(uc.limits.Schedule(lambda step: 1 + 4 * 0.9**step)),
    "ema": uc.by_global_norm(uc.limits.Ema(1.1, 0.9, warmup=10)),
    "second_moment": uc.by_global_norm(uc.limits.SecondMoment(1.5, 0.9)),
    "mean_over_rms": uc.by_global_norm(uc.limits.MeanOverRms(0.7, 0.9)),
    "quantile": uc.by_global_norm(uc.limits.TrackedQuantile(0.5, 0.1, 1.0)),
    "split": uc.by_global_norm(uc.limits.Split(1.0)),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "own": uc.by_global_norm(Slowly()),
}
OF_LEAVES = {
    "by_norm": uc.by_norm(0.7),
    "by_norm_array": uc.by_norm(np.asarray([0.5, 1.0, 2.0])),
    "by_norm_reject": uc.by_norm(0.7, curve=uc.curves.reject),
    "by_norm_split": uc.by_norm(uc.limits.Split(1.0)),
    "percentile_clipping": uc.percentile_clipping(50, window=30),
    "adagc": uc.adagc(warmup=20),
    "norm_growth": uc.norm_growth(),
    "adagn": uc.adagn(),
    "by_leaf_zclip": uc.Rule(uc.limits.ZScore(2.0, 0.9), scope=uc.scopes.each_leaf),
    "by_leaf_skip": uc.Rule(uc.limits.LogZScore(1.0, 0.9), scope=uc.scopes.each_leaf, nonfinite="skip"),
    "by_average_norm": uc.by_average_norm(0.1),
    "by_block_rms": uc.by_block_rms(0.3),
    "block_rms_adaptive": uc.Rule(uc.limits.Percentile(50, 9), scope=uc.scopes.each_leaf, norm=uc.norms.RMS),
    "joint_rms": uc.Rule(0.3, norm=uc.norms.RMS),
    "own_of_leaves": uc.Rule(Slowly(), scope=uc.scopes.each_leaf),
}
REFUSED = {
    "agc": (uc.agc(), "needs the parameters"),
    "cowclip": (uc.cowclip(np.ones(3)), "needs the parameters"),
    "larc": (uc.larc(0.1), "needs the parameters"),
    "by_value": (uc.by_value(-1.0, 1.0), "works on the entries"),
    "function": (np.sign, "works on the entries"),
    "by_example_norm": (uc.by_example_norm(1.0), "norms of parts of leaves"),
    "by_example_layer_norm": (uc.by_example_layer_norm(1.0), "norms of parts of leaves"),
    "by_example_quantile": (uc.by_example_quantile(), "norms of parts of leaves"),
    "auto_s": (uc.auto_s(), "norms of parts of leaves"),
    "psac": (uc.psac(), "norms of parts of leaves"),
    "spam": (uc.spam(), "norms of parts of leaves"),
    "by_norm_axis": (uc.by_norm(1.0, axis=0), "norms of parts of leaves"),
    "by_group_norm": (uc.by_group_norm({"first": 1.0, "rest": 2.0}, label), "groups leaves by their paths"),
    "chain": (uc.chain(uc.zclip(), uc.by_global_norm(1.0)), "one after the other"),
    "masked": (uc.masked(uc.zclip(), label), "leaves some leaves out"),
    "by_size": (uc.Rule(uc.limits.Split(1.0, by_size=True)), "numbers of entries"),
}
EVERY_PRESET = set(uc.presets.__all__)


def gradients(dtype: Any, *, spoiled: bool = False, seed: int = 0) -> list[list[Any]]:
    """Return the gradients of some steps, of sizes that drift and jump; some of them not finite."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(0.3 * rng.normal(size=(STEPS, 3)) + 0.5 * np.sin(np.arange(STEPS) / 40)[:, None])
    sizes[rng.random(STEPS) < 0.03] *= 20
    steps = [
        [(size * rng.normal(size=shape) / 3).astype(dtype) for size, shape in zip(row, SHAPES, strict=True)]
        for row in sizes
    ]
    if spoiled:
        steps[20][0][0, 0], steps[120][1][3], steps[121][2][:] = math.nan, math.inf, -math.inf
    return steps


def recorded(steps: list[list[Any]], order: float = 2, **more: Any) -> Record:
    """Return the record of a run with these gradients: all norms as they were before clipping."""
    leaves = np.asarray([[float(n) for n in uc.clip(grads, uc.by_norm(1.0, ord=order))[1].norms] for grads in steps])
    joint = np.asarray([float(uc.global_norm(grads, ord=order)) for grads in steps])
    numbers, unknown = np.arange(1, len(steps) + 1), np.full(len(steps), math.nan)
    finite = np.isfinite(joint)
    leaves[~np.isfinite(leaves)] = joint[~finite] = math.nan
    record = Record(
        steps=numbers,
        norms=joint,
        limits=unknown,
        factors=unknown,
        shares=unknown,
        finite=finite,
        skipped=np.zeros(len(steps), bool),
        thresholds=unknown,
        losses=unknown,
        leaves=leaves,
        leaf_steps=numbers,
        labels=["[0]", "[1]", "[2]"],
        sizes=SIZES,
        rule="",
        scope="all_leaves",
        ord=order,
        extra={},
    )
    return record._replace(**more)


def without_leaves(record: Record) -> Record:
    """Return a record of joint norms alone."""
    return record._replace(leaves=np.zeros((0, 0)), leaf_steps=np.zeros(0, int), labels=[], sizes=np.zeros(0, np.int64))


def of_norms(norms: Any, **more: Any) -> Record:
    """Return a record of joint norms."""
    norms = np.asarray(norms, np.float64)
    record = without_leaves(recorded(gradients(np.float64)[:1]))
    unknown = np.full(len(norms), math.nan)
    columns = dict.fromkeys(["limits", "factors", "shares", "thresholds", "losses"], unknown)
    flags = {"finite": np.isfinite(norms), "skipped": np.zeros(len(norms), bool)}
    return record._replace(**{"steps": np.arange(len(norms)), "norms": norms, **columns, **flags, **more})


def really(rule: Any, steps: list[list[Any]], losses: Any = None) -> tuple[Any, Any, Any]:
    """Run a rule; return norms, factors and skipped steps."""
    clipper, norms, factors, skipped = uc.Clipper(rule), [], [], []
    for number, grads in enumerate(steps):
        clipper(grads, loss=None if losses is None else losses[number])
        report = clipper.report
        norms.append(np.asarray(report.norms, np.float64))
        factors.append(np.asarray(report.factors, np.float64))
        skipped.append(report.skipped is not None and bool(report.skipped))
    return np.asarray(norms), np.asarray(factors), np.asarray(skipped)


def assert_same(rule: Any, record: Record, steps: list[list[Any]], losses: Any = None) -> None:
    """Assert that the replay is what the rule does, to 1e-6."""
    found, (norms, factors, skipped) = replay(record, rule), really(rule, steps, losses)
    finite = np.isfinite(norms)
    np.testing.assert_allclose(found.norms[finite], norms[finite], rtol=1e-6)
    assert np.isnan(found.norms[~finite]).all()
    np.testing.assert_allclose(found.factors, factors, rtol=1e-6)
    np.testing.assert_array_equal(found.skipped, skipped)
    np.testing.assert_array_equal(found.steps, record.steps)
    assert found.share == pytest.approx((factors != 1).mean())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("name", [*JOINT, *OF_LEAVES])
def test_exact(name: str, spoiled: bool, dtype: Any) -> None:
    """Every rule that norms determine does in a replay what it did, at steps that are not finite, too."""
    rule, steps = {**JOINT, **OF_LEAVES}[name], gradients(dtype, spoiled=spoiled)
    if spoiled and getattr(rule, "nonfinite", "") == "zero":
        steps = gradients(dtype)
    record = recorded(steps)
    if name in JOINT:
        assert_same(rule, without_leaves(record), steps)
        record = record._replace(norms=record.norms * math.nan, scope="each_leaf")
    assert_same(rule, record, steps)


@pytest.mark.parametrize("order", [1, 3, math.inf])
def test_order(order: float) -> None:
    """Norms of any order are replayed, joint ones from those of leaves; another order is refused."""
    steps = gradients(np.float64)
    record = recorded(steps, order)
    for rule in (uc.by_global_norm(1.0, ord=order), uc.by_norm(1.0, ord=order)):
        assert_same(rule, record, steps)
        assert_same(rule, record._replace(scope="other"), steps)
    with pytest.raises(TypeError, match=f"the order {order:g}, .* takes those of the order 2"):
        replay(record, uc.by_global_norm(1.0))
    with pytest.raises(TypeError, match="no order that is known"):
        replay(without_leaves(record)._replace(ord=None), uc.by_global_norm(1.0))


def test_without_order() -> None:
    """Beside norms that are root mean squares, those of leaves are Euclidean."""
    steps = gradients(np.float64)
    record = recorded(steps)
    record = record._replace(ord=None, norms=record.norms * math.nan)
    for name in ("zclip", "by_norm", "by_block_rms", "joint_rms"):
        assert_same({**JOINT, **OF_LEAVES}[name], record, steps)
    with pytest.raises(TypeError, match=r"the order 2, .* takes those of the order 3"):
        replay(record, uc.by_norm(1.0, ord=3))


def test_losses() -> None:
    """A rule that looks at the loss sees those that are recorded, and no loss where there is none."""
    steps = gradients(np.float32)
    losses: list[Any] = [1 + 0.1 * math.sin(number) for number in range(STEPS)]
    losses[200], losses[30] = 50.0, None
    known = np.asarray(losses, np.float64)
    rule = uc.skip_spikes(4.0, window=32)
    assert_same(rule, recorded(steps)._replace(losses=known), steps, losses)
    found = [replay(recorded(steps)._replace(losses=some), rule).skipped[200] for some in (known, known * math.nan)]
    assert found == [True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["skip_spikes", "zclip", "log_zscore", "by_global_norm", "by_norm", "skip_spikes_early"]
)
def test_losses_that_are_not_finite(name: str, bad: float) -> None:
    """A rule sees NaN where the loss was not finite, also before it has seen enough losses, and does what it does."""
    steps = gradients(np.float32)
    losses = [1 + 0.1 * math.sin(number) for number in range(STEPS)]
    for number in (0, 5, 200, 201):
        losses[number] = bad
    rule = uc.skip_spikes(3.0, window=8) if name == "skip_spikes_early" else {**JOINT, **OF_LEAVES}[name]
    known = np.where(np.isfinite(losses), losses, math.inf)
    assert_same(rule, recorded(steps)._replace(losses=known), steps, losses)
    if name == "skip_spikes":
        assert replay(recorded(steps)._replace(losses=known), rule).skipped[200]


@pytest.mark.parametrize("limit", [1, 1.0, np.asarray(1), np.asarray(1.0), np.asarray(1.0, np.float32)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kinds_of_limits(dtype: Any, limit: Any) -> None:
    """A limit is an integer, a float or an array without axes: all limits are those of 1.0."""
    steps = gradients(dtype)
    record = recorded(steps)
    for rule in (uc.by_global_norm, uc.by_norm, uc.to_global_norm):
        assert_same(rule(limit), record, steps)
        found = replay(record, rule(limit))
        assert found.limits.dtype == np.float64
        assert (found.limits == 1).all()
    np.testing.assert_array_equal(what_if(record, [limit]).shares, what_if(record, [1.0]).shares)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What norms do not determine is refused, with the reason."""
    rule, why = REFUSED[name]
    with pytest.raises(TypeError, match=why):
        replay(recorded(gradients(np.float64)), rule)


def test_every_preset() -> None:
    """Each preset is replayed or refused here."""
    cases = {*JOINT, *OF_LEAVES, *REFUSED}
    assert cases >= EVERY_PRESET


@pytest.mark.parametrize("name", OF_LEAVES)
def test_without_leaves(name: str) -> None:
    """A rule with norms of leaves says how they are recorded; leaves at some steps are not enough."""
    record, rule = recorded(gradients(np.float64)), OF_LEAVES[name]
    joint, sparse = without_leaves(record), record._replace(leaves=record.leaves[::2], leaf_steps=record.steps[::2])
    if name == "joint_rms":
        with pytest.raises(TypeError, match="divides norms by the sizes of leaves"):
            replay(joint, rule)
        return
    for one in (joint, sparse):
        with pytest.raises(TypeError, match=r'leaves at every step: record with Recorder\(\.\.\., leaves="all"\)'):
            replay(one, rule)


def test_without_sizes() -> None:
    """A norm that is divided by the number of entries needs it."""
    record = recorded(gradients(np.float64))._replace(sizes=np.zeros(3, int))
    for rule in (uc.by_block_rms(1.0), uc.by_average_norm(1.0)):
        with pytest.raises(TypeError, match="which the record does not hold"):
            replay(record, rule)


def test_missing_steps() -> None:
    """A rule that remembers needs every step; another one is replayed on those that there are."""
    record = of_norms(np.arange(1.0, 41.0), steps=np.arange(0, 400, 10))
    with pytest.raises(TypeError, match="after step 0 the record goes on with step 10"):
        replay(record, uc.zclip())
    found = replay(record, uc.by_global_norm(20.0))
    assert found.share == 0.5
    assert found.factors[-1] == 0.5
    norms = record.norms.copy()
    norms[5] = math.nan  # not recorded: the step itself was finite
    partly = record._replace(norms=norms, finite=np.ones(40, bool))
    assert 50 not in replay(partly, uc.by_global_norm(20.0)).steps
    with pytest.raises(TypeError, match="after step 4 the record goes on with step 6"):
        replay(partly._replace(steps=np.arange(40)), uc.zclip())


def test_leaf_without_gradient() -> None:
    """A leaf that never had a gradient takes no part."""
    steps = gradients(np.float64)
    record = recorded(steps)
    holes = np.concatenate([record.leaves[:, :1], np.full((STEPS, 1), math.nan), record.leaves[:, 1:]], axis=1)
    sizes = np.insert(SIZES, 1, 99)
    wider = record._replace(leaves=holes, labels=["a", "b", "c", "d"], sizes=sizes, scope="other")
    for name in ("by_norm", "adagc", "by_block_rms", "joint_rms"):
        assert_same(OF_LEAVES[name], wider, steps)


@pytest.mark.parametrize(
    "rule",
    [
        uc.by_norm(0.7),
        uc.by_norm(0.7, nonfinite="skip"),
        uc.by_norm(0.7, curve=uc.curves.reject),
        uc.by_norm(uc.limits.Split(1.0)),
        uc.by_block_rms(0.3),
        uc.Rule(0.3, norm=uc.norms.RMS),
        uc.zclip(),
        uc.by_global_norm(1.0),
    ],
)
def test_absent_gradients(rule: Any) -> None:
    """A leaf without a gradient at some steps is ``None`` there: no step is left out."""
    steps: list[list[Any]] = gradients(np.float64, spoiled=True)
    record = recorded(steps)
    rng = np.random.default_rng(1)
    leaves, finite = record.leaves.copy(), record.finite
    for number in np.flatnonzero(finite):
        for leaf in np.flatnonzero(rng.random(3) < 0.3):
            steps[number][leaf], leaves[number, leaf] = None, math.nan
    joint = np.asarray([float(uc.global_norm(grads)) for grads in steps])
    whole = record._replace(leaves=leaves, norms=np.where(finite, joint, math.nan))
    assert np.isnan(leaves[finite]).all(axis=1).any()
    for one in (whole, whole._replace(scope="other", norms=joint * math.nan)):
        clipper, found = uc.Clipper(rule), replay(one, rule)
        np.testing.assert_array_equal(found.steps, record.steps)
        for number, grads in enumerate(steps):
            clipper(grads)
            factors = clipper.report.factors
            here = [math.nan if f is None else float(f) for f in factors] if isinstance(factors, list) else factors
            np.testing.assert_allclose(found.factors[number], here, rtol=1e-6)
            assert found.skipped[number] == (clipper.report.skipped is not None and bool(clipper.report.skipped))
        if found.factors.ndim > 1:
            absent = np.isnan(leaves) & finite[:, None]
            rows = [(row[~gone] != 1).mean() for row, gone in zip(found.factors, absent, strict=True) if not gone.all()]
            assert found.share == pytest.approx(np.mean(rows))


@pytest.mark.parametrize("name", ["adagc", "percentile_clipping", "norm_growth"])
def test_absent_gradients_of_rules_that_remember(name: str) -> None:
    """A rule that remembers each leaf refuses in a replay, as it does itself, to miss one at some steps."""
    record = recorded(gradients(np.float64))
    record.leaves[3, 1] = math.nan
    with pytest.raises(TypeError, match=r"remembers each leaf by itself, and '\[1\]' had no gradient at step 4"):
        replay(record, OF_LEAVES[name])


def test_zero_policy() -> None:
    """The norm of what the policy "zero" leaves is used where it was recorded, else the factor is not known."""
    steps = gradients(np.float32, spoiled=True)
    for rule in (uc.by_global_norm(1.0, nonfinite="zero"), uc.Rule(uc.limits.ZScore(2.0, 0.9), nonfinite="zero")):
        norms, factors, _ = really(rule, steps)
        record = without_leaves(recorded(steps))
        found = replay(record._replace(norms=norms), rule)
        np.testing.assert_allclose(found.factors, factors, rtol=1e-6)
        unknown = replay(record, rule).factors
        assert np.isnan(unknown[~record.finite]).all()
        np.testing.assert_allclose(unknown[record.finite], factors[record.finite], rtol=1e-6)
        propagated = replay(record._replace(norms=norms), uc.Rule(rule.limit))
        assert np.isnan(propagated.factors[~record.finite]).all()


def test_raise_policy() -> None:
    """The policy "raise" says where it would have stopped."""
    with pytest.raises(FloatingPointError, match="step 2 is not finite"):
        replay(of_norms([1.0, 2.0, math.nan]), uc.by_global_norm(1.0, nonfinite="raise"))
    assert replay(of_norms([1.0, 2.0]), uc.by_global_norm(1.0, nonfinite="raise")).share == 0.5


def test_nine_digits() -> None:
    """Norms of float32 that were written with nine digits are replayed in float32: no decision differs."""
    steps = gradients(np.float32)
    record = without_leaves(recorded(steps))
    written = record._replace(norms=np.asarray([float(f"{n:.9g}") for n in record.norms]))
    for rule in (JOINT["zclip"], JOINT["log_zscore"]):
        np.testing.assert_array_equal(replay(written, rule).factors, really(rule, steps)[1])


def test_nothing() -> None:
    """A record without steps has an empty replay."""
    record = of_norms([])
    for rule in (uc.by_global_norm(1.0), uc.zclip()):
        found = replay(record, rule)
        assert found.factors.shape == (0,)
        assert math.isnan(found.share)
        assert str(found) == "clipped unknown of 0 steps"
    assert what_if(record).shares.shape == (0,)
    assert replay(of_norms([math.nan] * 3), uc.by_global_norm(1.0)).share == 1


def test_limits() -> None:
    """Limits are those of the rule, ∞ where nothing limits."""
    found = replay(of_norms([1.0, 2.0, 1.0, 2.0, 100.0]), uc.zclip(warmup=4))
    assert np.isinf(found.limits[:4]).all()
    assert found.limits[4] == pytest.approx(1.52, abs=0.01)
    assert np.isinf(replay(of_norms([1.0]), uc.by_global_norm(math.inf)).limits).all()


def test_as_text() -> None:
    """A replay prints as one line."""
    record = of_norms(np.tile([0.5, 4.0], 50))
    assert str(replay(record, uc.by_global_norm(1.0))) == "clipped 50 ± 12 % of 100 steps, smallest factor 0.25"
    rejected = str(replay(record, uc.by_global_norm(1.0, curve=uc.curves.reject)))
    assert rejected == "clipped 50 ± 12 % of 100 steps, smallest factor 0, skipped 50 steps"
    assert "of 900 norms" in str(replay(recorded(gradients(np.float64)), uc.by_norm(1.0)))
    few = of_norms([0.5, 4.0])
    assert str(replay(few, uc.by_global_norm(1.0))) == "clipped 50 % of 2 steps, smallest factor 0.25"


def test_what_if() -> None:
    """The table says of each limit what its replay does; steps may be far apart."""
    norms = np.exp(np.random.default_rng(0).normal(size=400)) * 3
    record = of_norms(norms, steps=np.arange(0, 4000, 10))
    table = what_if(record)
    np.testing.assert_array_equal(table.max_norms, 2.0 ** np.arange(-2, 7))
    for row in zip(*table, strict=True):
        found = replay(record, uc.by_global_norm(row[0]))
        assert row[1:] == (found.share, found.error, found.factors.min())
    assert np.all(np.diff(table.shares) <= 0)
    lines = str(table).splitlines()
    assert len(lines) == 10
    assert lines[0].split() == ["max_norm", "clipped", "smallest", "factor"]
    assert len(set(map(len, lines))) == 1
    np.testing.assert_array_equal(what_if(record, [1.0, 7.5]).max_norms, [1.0, 7.5])
    of_leaf = what_if(record._replace(scope="each_leaf", ord=None), [1.0])
    assert of_leaf.shares == (norms > 1).mean()


def autoregressive(rng: np.random.Generator, count: int) -> Any:
    """Return logarithms of norms that remember, some for long."""
    phi = rng.choice([0, 0.5, 0.9, 0.97, 0.99])
    values, noise = np.zeros(count), rng.normal(size=count)
    values[0] = noise[0]
    for number in range(1, count):
        values[number] = phi * values[number - 1] + math.sqrt(1 - phi**2) * noise[number]
    return values


def least_squares(rng: np.random.Generator, limit: float, count: int) -> Any:
    """Return the norms of a training run by SGD with momentum, clipped: a linear model, heavy-tailed data."""
    weights, momentum, norms, target = np.zeros(6), np.zeros(6), np.zeros(count), rng.normal(size=6)
    for number in range(count):
        inputs = rng.normal(size=(8, 6))
        errors = inputs @ (weights - target) - rng.standard_t(2.5, size=8)
        grads = inputs.T @ errors / 8
        norms[number] = np.linalg.norm(grads)
        momentum = 0.9 * momentum + grads * min(1.0, limit / norms[number])
        weights = weights - 0.03 * momentum
    return norms


def covered(cases: list[tuple[Any, float]]) -> float:
    """Return in which share of cases the share of the other part is within the error."""
    found = [(*share_and_error(here), there) for here, there in cases]
    return float(np.mean([abs(share - there) <= error for share, error, there in found]))


def test_coverage_of_series() -> None:
    """The error covers the share of the other half of norms that remember, in nine of ten cases."""
    rng, cases = np.random.default_rng(0), []
    for _ in range(400):
        above = autoregressive(rng, 1000) > rng.choice([-1, 0, 1, 1.5, 2.5])
        cases.append((above[:500], above[500:].mean()))
    assert covered(cases) >= 0.9


def test_coverage_of_training() -> None:
    """The error covers the share of later steps, and that of another run with the new limit, in nine of ten cases."""
    rng = np.random.default_rng(0)
    later: list[tuple[Any, float]] = []
    others: list[tuple[Any, float]] = []
    for _ in range(60):
        here = least_squares(rng, 1.0, 800)
        for limit in (0.5, 1.0, 2.0, 4.0):
            above = here > limit
            later.append((above[100:450], above[450:].mean()))
            there = least_squares(rng, limit, 800)[450:]
            others.append((above[100:450], (there > limit).mean()))
    assert covered(later) >= 0.9
    assert covered(others) >= 0.9


def test_error() -> None:
    """Without a clipped step there is an error, too, which gets smaller with more of them; of few steps it is NaN."""
    errors = [share_and_error(np.zeros(count, bool))[1] for count in (16, 100, 10_000)]
    assert 0.25 > errors[0] > errors[1] > errors[2] > 0
    assert math.isnan(share_and_error(np.zeros(15, bool))[1])
    drifting = share_and_error(np.arange(1000) > 500)[1]
    assert drifting > 0.9


@pytest.mark.parametrize(("rule", "count", "seconds"), [(uc.by_global_norm(1.0), 100_000, 2), (uc.zclip(), 5_000, 15)])
def test_time(rule: Any, count: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant limit is one call for all steps; a rule that remembers takes a fraction of a millisecond a step."""
    monkeypatch.setattr(running, "_SLOW", math.inf)
    record = of_norms(np.exp(np.random.default_rng(0).normal(size=count)))
    times = []
    for _ in range(3):
        start = time.process_time()
        replay(record, rule)
        times.append(time.process_time() - start)
    assert min(times) <= seconds


@pytest.mark.parametrize("installed", [True, False])
def test_progress(installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay that takes long says so on the standard error, with a bar if tqdm is installed; a short one does not."""
    find: Callable[[str], Any] = running.importlib.util.find_spec
    seen = object() if installed and find("tqdm") else None
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: seen)
    record = of_norms(np.ones(300))
    replay(record, uc.zclip())
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(running, "_SLOW", 1e-9)
    replay(of_norms(np.ones(3000)), uc.zclip())
    out, err = capsys.readouterr()
    assert not out
    assert ("steps/s" in err) if seen else (err == "replay of 3,000 steps ...\n")
