"""Drawn rules on drawn gradients, each step compared with an oracle in intervals that shares no
code with uniclip.

Each week draws other cases; ``--fuzz SEED`` repeats those of a seed, ``--fuzz SEED:NUMBER`` one of
them. A failure has the command that runs its case alone. Cases that once found a fault are in
data/corpus.json.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit.frameworks import Framework, Strict
from kit.oracle import Inconclusive, exact, precision
from kit.run import Run, case_of

CASES = {
    "numpy": 1500,
    "torch": 400,
    "tensorflow": 250,
    "jax": 100,
    "mlx": 150,
    "array-api-strict": 150,
    "array-api-strict-device": 50,
    "array-api-strict-no-float64": 75,
    "cupy-like": 50,
}
"""How many cases a run has."""
PARTS = 10
"""In how many tests they are run, so that several workers can share them."""
CORPUS = json.loads((Path(__file__).parent / "data" / "corpus.json").read_text(encoding="utf-8"))


def week() -> int:
    """Return the seed of this week: its year and number."""
    year, number, _ = datetime.now(tz=timezone.utc).isocalendar()
    return 100 * year + number


def run_case(fw: Framework, seed: int, number: int) -> str | None:
    """Run a case; return why it was given up, if rounding decides what follows."""
    case: Any = None
    try:
        with np.errstate(all="ignore"):
            case = case_of(uc, fw, seed, number)
            Run(uc, fw, case).steps()
    except Inconclusive as why:
        return str(why)
    except Exception as error:
        name = "strict" if isinstance(fw, Strict) else fw.name
        test = f"tests/test_fuzz.py::test_cases[{fw.name}-0]"
        again = f"pytest --frameworks {name} '{test}' --fuzz {seed}:{number}"
        message = f"{again}\n{type(error).__name__}: {error}\n{case}"
        raise AssertionError(message) from error
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(framework: Framework, part: int, request: pytest.FixtureRequest) -> None:
    """None fails, and rounding leaves few open."""
    seed, _, number = (request.config.getoption("--fuzz") or str(week())).partition(":")
    numbers = [int(number)] if number else range(part, CASES[framework.name], PARTS)
    given_up = [why for one in numbers if (why := run_case(framework, int(seed), one)) is not None]
    assert len(given_up) <= 2 + len(numbers) // 25, given_up


@pytest.mark.only(*{known["framework"] for known in CORPUS})
def test_corpus(framework: Framework) -> None:
    """What was found once stays found."""
    for known in CORPUS:
        if known["framework"] == framework.name:
            assert run_case(framework, known["seed"], known["number"]) is None, known


def test_oracle_rounds() -> None:
    """An exact 0 stays one, and what is not exact holds its rounding on both sides."""
    single = precision("float32", flush=False)
    third = exact(1, single) / 3
    assert third.lo < np.float32(1 / 3) < third.hi
    assert third.hi - third.lo < 1e-6
    assert (exact(0, single) * 3).hi == 0
