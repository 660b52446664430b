"""Some cases of the fuzz on each framework, always the same ones: ``python tests/fuzz.py`` runs many."""

from __future__ import annotations

import numpy as np

from frameworks import Framework
from fuzz import Tally, run_case
from fuzz_planted import FAULTS, SOURCE

SEED, CASES = 5, 250


def test_cases(fw: Framework) -> None:
    """None fails, and rounding leaves few open."""
    tally = Tally()
    for number in range(max(2, CASES // fw.cost // fw.first)):
        run_case(fw, SEED, number, tally)
    assert not tally.failures, tally.failures
    assert sum(tally.inconclusive.values()) <= 1 + tally.cases // 50


def test_faults_to_plant() -> None:
    """Each of the faults can still be planted: its text is there once."""
    for name, old, new in FAULTS.values():
        assert (SOURCE / name).read_text(encoding="utf-8").count(old) == 1, (name, old)
        assert old != new


def test_oracle_rounds() -> None:
    """An exact 0 stays one, and what is not exact holds its rounding on both sides."""
    from fuzz_spans import exact, precision

    single = precision("float32", flush=False)
    third = exact(1, single) / 3
    assert third.lo < np.float32(1 / 3) < third.hi
    assert third.hi - third.lo < 1e-6
    assert (exact(0, single) * 3).hi == 0
