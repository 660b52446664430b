"""What `ClippedOptimizer` records in compiled ``fit``: a line for each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import uniclip as uc
from adapters.on_keras import BATCHES, IGNORED, as_by_hand, by_hand, compiled, fit, on_tensorflow, sgd
from uniclip import insight
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [on_tensorflow, *IGNORED]


def test_fit(tmp_path: Path) -> None:
    """Each step is recorded once, with the norms of its leaves, whatever the window; a skipped one too."""
    rule = uc.by_global_norm(0.9, nonfinite="skip")
    with insight.Recorder(tmp_path / "run.jsonl", every=5, leaves="all") as record:
        made = compiled(ClippedOptimizer(sgd(), rule, record=record), steps_per_execution=4)
        fit(made, BATCHES, LogClipping(), epochs=2)
    hand, steps = by_hand(rule, BATCHES * 2)
    as_by_hand(made, hand)
    found = insight.read(record.path)
    assert found.steps.tolist() == list(range(1, len(steps) + 1))
    for name, column in (("norm", found.norms), ("factor", found.factors), ("skipped", found.skipped)):
        np.testing.assert_allclose(column, [step[f"clip/{name}"] for step in steps], rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(np.linalg.norm(found.leaves, axis=1), found.norms, rtol=2e-5)
    assert found.labels == [variable.path for variable in made.trainable_variables]
