"""`ClippedOptimizer` in the replicas of ``tf.distribute``: skipped steps and records."""

from __future__ import annotations

from pathlib import Path

import pytest

import uniclip as uc
from adapters.on_keras import BATCHES, IGNORED, by_hand, compiled, fit, in_replicas, mirrored, on_tensorflow, sgd
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [on_tensorflow, *IGNORED]


def test_fit(tmp_path: Path) -> None:
    """What one replica alone finds is skipped in both; each step is recorded once."""
    rule = uc.chain(uc.by_global_norm(0.9, nonfinite="skip"), uc.autoclip(50, window=4))
    with insight.Recorder(tmp_path / "run.jsonl", every=4) as record:
        with mirrored().scope():
            made = compiled(ClippedOptimizer(sgd(), rule, record=record))
        logs = fit(made, BATCHES, LogClipping())
    hand, steps = by_hand(rule)
    in_replicas(made, hand)
    assert logs["clip/skipped"] == [1 / 8]
    assert insight.read(record.path).norms == pytest.approx(
        [step["clip/norm"] for step in steps], rel=2e-5, nan_ok=True
    )
