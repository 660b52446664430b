"""The comparison with other libraries shows uniclip right, and the programs that compare and measure run."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import calls
import speed
from calls import LIBRARIES, uniclip_on
from cases import GROUPS, Case
from compared import RIGHT, offers, result
from trees import LSTM, RESNET, SMALL, TREES

ROOT = Path(__file__).parents[1]
CASES = [case for cases in GROUPS.values() for case in cases]
PAGES = json.loads((ROOT / "docs" / "compared-pages.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_case(case: Case) -> None:
    """Some library has such a function, and on the arrays of each that has, uniclip is right."""
    frameworks = {library.framework.name: library for library in LIBRARIES if offers(library, case)}
    found = {name: result(uniclip_on(library), case) for name, library in frameworks.items()}
    assert found
    assert {name: ours for name, ours in found.items() if ours.mark != RIGHT} == {}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_calls_of_others(library: calls.Library) -> None:
    """In the usual case every library is right in all that it has: else its call is written wrongly."""
    usual = [case for case in GROUPS["usual"] if offers(library, case)]
    assert {case.kind for case in usual} == library.calls.keys() - {"import"}
    assert {case.title: found for case in usual if (found := result(library, case)).mark != RIGHT} == {}


def test_what_is_said() -> None:
    """What was found is of the cases of today, and the README and the page have its numbers."""
    counts = {name: marks for name, *marks in cells(PAGES["parts"]["tally"])[2:]}
    right, wrong = counts["uniclip"][0], counts.pop("at least one built-in")[1]
    assert {sum(map(int, marks)) for marks in counts.values()} == {len(CASES)}
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/compared.md"))
    assert f"In {wrong} of {len(CASES)} cases at least one" in readme
    assert f"uniclip is right in all {right}." in readme
    assert f"right in all {right} cases. At least one built-in function is wrong, without an error, in {wrong}." in page


def test_speed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's table has the ratios that were measured, as the page has them."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("performance_tables")
    results = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))
    parts, readme = tables.parts(results), (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("- **Fast.**") : readme.index("- **Small")]
    steps, others = (cells(text) for text in said.split("Elsewhere"))
    assert steps == cells(parts["steps"])
    head, line, *measured = cells(parts["ratios"])
    assert others[:2] == [head, line]
    assert [row[0] for row in others[2:]] == ["TensorFlow, eager", "JAX, `jit`", "JAX, no `jit`"]
    assert [row for row in others[2:] if row not in measured] == []


def cells(text: str) -> list[list[str]]:
    """Return the cells of the rows of a table in a text."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


@pytest.mark.parametrize(("tree", "leaves", "entries"), [(RESNET, 161, 25_557_032), (LSTM, 10, 66_688)])
def test_trees(tree: str, leaves: int, entries: int) -> None:
    """The networks whose gradients are clipped have as many parameters as they have where they are published."""
    assert (len(TREES[tree]), sum(map(math.prod, TREES[tree]))) == (leaves, entries)


def test_speed(tmp_path: Path) -> None:
    """The program that measures speed measures one small tree, and keeps it."""
    path = tmp_path / "speed.json"
    words = ["--only", "numpy", SMALL, "--rounds", "2", "--out", str(path)]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", *words], check=True)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["clipped"] for row in rows] == [False, True]
    assert all(row["us"].keys() == {"native", "uniclip"} for row in rows)


def test_wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed has to clip."""
    monkeypatch.setitem(calls.NATIVE, ("numpy", calls.GLOBAL), "grads")
    with pytest.raises(ValueError, match=r"after native the norm is 2\.0"):
        list(speed.clipping("numpy", calls.EAGER, SMALL, 1))
