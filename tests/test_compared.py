"""The comparison with other libraries shows uniclip right, and its programs run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from how_others_behave import GROUPS
from native_functions import LIBRARIES, uniclip_on
from side_by_side import RIGHT, Case, offers, result

ROOT = Path(__file__).parents[1]
CASES = [case for group in GROUPS for case in group.cases]
MEASURED = json.loads((ROOT / "docs" / "compared.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_case(case: Case) -> None:
    """Some library has such a function, and on the arrays of each that has, uniclip is right."""
    frameworks = {library.framework.name: library for library in LIBRARIES if offers(library, case)}
    found = {name: result(uniclip_on(library), case) for name, library in frameworks.items()}
    assert found
    assert {name: ours for name, ours in found.items() if ours.mark != RIGHT} == {}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_calls_of_others(library: object) -> None:
    """In the usual case every library is right in all that it has: else its call is written wrongly."""
    usual = [case for case in GROUPS[0].cases if offers(library, case)]
    assert {case.kind for case in usual} == library.calls.keys() - {"import"}
    assert {case.title: found for case in usual if (found := result(library, case)).mark != RIGHT} == {}


def test_what_was_measured() -> None:
    """What is kept of other libraries has the cases of today, and uniclip's part is what it is."""
    assert MEASURED["number of cases"] == len(CASES)
    assert {sum(counts.values()) for counts in MEASURED["cases"].values()} == {len(CASES)}
    assert MEASURED["sharded"]["uniclip"] == RIGHT


def test_speed(tmp_path: Path) -> None:
    """The program that measures speed measures one small tree, and what it times is right."""
    path = tmp_path / "speed.json"
    words = ["--quick", "--framework", "numpy", "--part", "rows", "--tree", "one leaf of 16", "--out", str(path)]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", *words], check=True)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["clipped"] for row in rows} == {True, False}
    ours = {row["clipped"]: row["contenders"]["uniclip"] for row in rows}
    assert {key: found["norm"] for key, found in ours.items()} == pytest.approx({True: 1.0, False: 0.5}, rel=1e-6)
