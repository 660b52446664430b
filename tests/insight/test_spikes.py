"""Spikes in made-up norms: which ones are found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from insight.recorded import of_norms
from uniclip.insight import Record, Spike, spikes

FEWEST, EARLY = 20, 10


def steps_of(record: Record, **choices: Any) -> list[int]:
    """Return the steps of the spikes."""
    return [spike.step for spike in spikes(record, **choices)]


def oracle(norms: Any, z: float, window: int) -> list[int]:
    """Return the steps of the spikes by a loop over all steps."""
    found, kept = [], []
    for step, norm in enumerate(norms, 1):
        if not math.isfinite(norm):
            found.append(step)
            continue
        if len(kept) >= EARLY:
            logs = np.log(kept[-window:])
            spread = max(1.48 * np.median(np.abs(logs - np.median(logs))), 0.05)
            if norm > math.exp(np.median(logs)) * max(
                math.exp(z * spread), 2 if len(kept) >= FEWEST else 5
            ):
                found.append(step)
        kept += [norm] if norm > 0 else []
    return found


def noisy(seed: int, n: int, spread: float) -> Any:
    """Return norms that vary around a level that falls and rises by a factor of ten."""
    rng = np.random.default_rng(seed)
    return np.exp(spread * rng.normal(size=n) + 1.15 * np.sin(np.arange(n) * 2 * np.pi / 2000))


@pytest.mark.parametrize(("z", "window"), [(2.0, 57), (5.0, 100)])
def test_against_a_loop(z: float, window: int) -> None:
    """The vectorized comparison equals the definition, also beyond the size of a chunk."""
    norms = noisy(0, 4400, 0.3)
    norms[np.random.default_rng(1).random(4400) < 0.03] *= 20
    norms[[3, 500, 4300]] = [math.nan, math.inf, 0.0]
    found = steps_of(of_norms(norms), z=z, window=window)
    assert found == oracle(norms, z, window)
    assert len(found) > 50


@pytest.mark.parametrize(("spread", "times"), [(0.0, 5), (0.2, 10), (0.5, 60)])
def test_recall_and_false_alarms(spread: float, times: float) -> None:
    """At least 95 % of loud spikes are found, with at most 2 false ones in 1,000 steps.

    Noisier norms need louder spikes.
    """
    found = false = loud = others = 0
    for seed in range(5):
        norms = noisy(seed, 4000, spread)
        bad = np.random.default_rng(100 + seed).random(4000) < 0.02
        bad[:FEWEST] = False
        norms[bad] *= times
        listed = np.zeros(4000, bool)
        listed[np.asarray(steps_of(of_norms(norms)), int) - 1] = True
        found, loud = found + int((listed & bad).sum()), loud + int(bad.sum())
        false, others = false + int((listed & ~bad).sum()), others + int((~bad).sum())
    assert found >= 0.95 * loud, (found, loud)
    assert false <= 2e-3 * others, (false, others)


def test_a_new_level_is_accepted() -> None:
    """Norms that stay high are spikes for half a window."""
    norms = noisy(0, 1000, 0.1)
    norms[500:] *= 100
    found = steps_of(of_norms(norms))
    assert found[0] == 501
    assert 500 + 45 <= found[-1] <= 500 + 55


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.05])
def test_a_change_of_level_is_none(spread: float) -> None:
    """An increase by half, as after a change of learning rate or data, is no spike."""
    norms = np.exp(spread * np.random.default_rng(0).normal(size=400))
    norms[200:] *= 1.5
    assert steps_of(of_norms(norms)) == []


def test_causal() -> None:
    """Detection is causal: no decision and no ratio depends on later steps."""
    norms = noisy(0, 1000, 0.3)
    norms[::37] *= 30
    whole = spikes(of_norms(norms))
    changed = norms.copy()
    changed[600:] = np.random.default_rng(5).lognormal(3, 3, 400)
    changed[700] = math.nan
    other = spikes(of_norms(changed))
    early = [spike for spike in whole if spike.step <= 600]
    assert len(early) > 10
    assert early == [spike for spike in other if spike.step <= 600]


def test_not_finite() -> None:
    """A non-finite norm is a spike at once, also among the first.

    An unknown norm is none.
    """
    norms = np.ones(100)
    norms[[2, 60]] = [math.nan, math.inf]
    first, second = spikes(of_norms(norms, skipped=np.arange(100) == 60))
    assert (first.step, second.step, first.skipped, second.skipped) == (3, 61, False, True)
    assert all(
        math.isnan(value) for spike in (first, second) for value in (spike.norm, spike.ratio)
    )
    norms[[2, 60]] = math.nan
    assert spikes(of_norms(norms, finite=np.ones(100, bool))) == []


def test_few_norms() -> None:
    """Other spikes are not listed before there are 10 norms to compare with.

    Norms of 0 and unknown norms do not count. Below 20 norms a spike is five times their median,
    later twice.
    """
    for step, times, found in [
        (9, 100.0, []),
        (10, 5.5, [11]),
        (10, 4.5, []),
        (19, 4.5, []),
        (20, 2.1, [21]),
    ]:
        norms = np.ones(40)
        norms[step] = times
        assert steps_of(of_norms(norms)) == found, step
    norms[[4, 5]] = [0.0, math.nan]
    assert steps_of(of_norms(norms, finite=np.ones(40, bool))) == []
    assert steps_of(of_norms([])) == []


def test_what_is_told() -> None:
    """The step, norm and ratio of a spike are those of the record."""
    norms = np.full(60, 2.0)
    norms[40] = 30.0
    (spike,) = spikes(of_norms(norms, steps=np.arange(60) * 10))
    assert spike == Spike(400, 30.0, pytest.approx(15.0), skipped=False, leaves=[])


def test_fault_in_one_leaf() -> None:
    """The leaf with a planted fault ranks first in at least 95 of 100 cases, for any leaf sizes."""
    first = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        leaves = 10 ** rng.uniform(-2, 1, 20) * np.exp(0.3 * rng.normal(size=(200, 20)))
        wrong = int(rng.integers(20))
        total = np.linalg.norm(leaves[:150], axis=1)
        leaves[150, wrong] = 10 * np.median(total)
        norms = np.linalg.norm(leaves, axis=1)
        # The leaves are recorded every tenth step, and at the spike.
        rows = np.flatnonzero((np.arange(200) % 10 == 5) | (np.arange(200) == 150))
        labels = [f"leaf {n}" for n in range(20)]
        record = of_norms(norms)._replace(leaves=leaves[rows], leaf_steps=rows + 1, labels=labels)
        (spike,) = [spike for spike in spikes(record) if spike.step == 151]
        assert len(spike.leaves) == 5
        assert [ratio for _, ratio in spike.leaves] == sorted(
            (ratio for _, ratio in spike.leaves), reverse=True
        )
        first += spike.leaves[0][0] == labels[wrong]
    assert first >= 95, first


def test_leaves_at_the_edges() -> None:
    """A non-finite leaf ranks first; one that was always 0 is listed only if it changes."""
    norms = np.ones(50)
    norms[40] = math.nan
    leaves = np.asarray([[1.0, 0.0, 0.0, 2.0], [math.nan, 0.0, 1.0, 2.0]])
    labels = ["lost", "dead", "woken", "calm"]
    (spike,) = spikes(
        of_norms(norms)._replace(leaves=leaves, leaf_steps=np.asarray([10, 41]), labels=labels)
    )
    assert spike.leaves == [("lost", math.inf), ("woken", math.inf), ("calm", 1.0)]
    (spike,) = spikes(
        of_norms(norms)._replace(leaves=leaves[1:], leaf_steps=np.asarray([41]), labels=labels)
    )
    # The other leaves have no known ratio.
    assert spike.leaves == [("lost", math.inf)]


def test_refused() -> None:
    """Each error names the argument."""
    record = of_norms(np.ones(30))
    with pytest.raises(TypeError, match="record must be a Record"):
        spikes(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="z must be above 0"):
        spikes(record, z=0)
    with pytest.raises(ValueError, match="window must be at least 20"):
        spikes(record, window=19)
    with pytest.raises(TypeError, match="window must be a whole number"):
        spikes(record, window=50.5)  # type: ignore[arg-type]
