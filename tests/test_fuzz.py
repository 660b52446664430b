"""Drawn rules on drawn gradients, each step compared with an interval oracle that shares no code.

Each week draws other cases; ``--fuzz SEED`` repeats those of a seed, ``--fuzz SEED:NUMBER`` one of
them. A failure prints the command that runs its case alone. Cases that once revealed a fault are in
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
from kit.draw import plans_of
from kit.frameworks import Framework, Strict
from kit.oracle import Inconclusive, Plan, exact, precision
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
"""The number of cases of a run."""
PARTS = 10
"""The number of tests that share the cases, for several workers."""
CORPUS = json.loads((Path(__file__).parent / "data" / "corpus.json").read_text(encoding="utf-8"))


def week() -> int:
    """Return the seed of this week: year and week."""
    year, number, _ = datetime.now(tz=timezone.utc).isocalendar()
    return 100 * year + number


def has_one_norm(plan: Plan) -> bool:
    """Return whether each norm of a rule is the Euclidean norm of all leaves."""
    return all(
        [
            one.kind == "rule" and one.scope.kind == "all" and one.p == 2 and one.power == 0
            for one in plans_of(plan)
        ]
    )


def run_case(fw: Framework, seed: int, number: int, *, spine: bool = True) -> str | None:
    """Run a case; return the reason if rounding makes it inconclusive.

    Without the spine, only rules that could take it are run.
    """
    case: Any = None
    try:
        with np.errstate(all="ignore"):
            case = case_of(uc, fw, seed, number)
            if spine or has_one_norm(case.plan):
                Run(uc, fw, case).steps()
    except Inconclusive as why:
        return str(why)
    except Exception as error:
        name = "strict" if isinstance(fw, Strict) else fw.name
        way = "spine" if spine else "general"
        test = f"tests/test_fuzz.py::test_cases[{fw.name}-{way}-0]"
        again = f"pytest --frameworks {name} '{test}' --fuzz {seed}:{number}"
        message = f"{again}\n{type(error).__name__}: {error}\n{case}"
        raise AssertionError(message) from error
    return None


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("_spine", [True, False], ids=["spine", "general"], indirect=True)
def test_cases(framework: Framework, part: int, request: pytest.FixtureRequest) -> None:
    """No case fails, and few are inconclusive."""
    spine = request.node.callspec.params["_spine"]
    seed, _, number = (request.config.getoption("--fuzz") or str(week())).partition(":")
    numbers = [int(number)] if number else range(part, CASES[framework.name], PARTS)
    outcomes = [run_case(framework, int(seed), one, spine=spine) for one in numbers]
    given_up = [why for why in outcomes if why is not None]
    assert len(given_up) <= 2 + len(numbers) // 25, given_up


@pytest.mark.only(*{known["framework"] for known in CORPUS})
def test_corpus(framework: Framework) -> None:
    """Cases that once failed still pass."""
    for known in CORPUS:
        if known["framework"] == framework.name:
            assert run_case(framework, known["seed"], known["number"]) is None, known


def test_oracle_rounds() -> None:
    """An exact 0 stays exact, and other values lie between both of their roundings."""
    single = precision("float32", flush=False)
    third = exact(1, single) / 3
    assert third.lo < np.float32(1 / 3) < third.hi
    assert third.hi - third.lo < 1e-6
    assert (exact(0, single) * 3).hi == 0
