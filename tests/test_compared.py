"""The comparison with other libraries: its cases, its programs, and the tables in the pages."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import many
import pytest
import steps

import calls
from calls import LIBRARIES, uniclip_on
from cases import GROUPS, Case
from compared import RIGHT, offers, result

ROOT = Path(__file__).parents[1]
CASES = [case for cases in GROUPS.values() for case in cases]
PAGES = json.loads((ROOT / "docs" / "compared-pages.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_case(case: Case) -> None:
    """Some library has the function of a case, and uniclip's result is right on its arrays."""
    frameworks = {library.framework.name: library for library in LIBRARIES if offers(library, case)}
    found = {name: result(uniclip_on(library), case) for name, library in frameworks.items()}
    assert found
    assert {name: ours for name, ours in found.items() if ours.mark != RIGHT} == {}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_calls_of_others(library: calls.Library) -> None:
    """Every library is right in the usual case of each of its functions, so the call is correct."""
    usual = [case for case in GROUPS["usual"] if offers(library, case)]
    assert {case.kind for case in usual} == library.calls.keys() - {"import"}
    assert {
        case.title: found for case in usual if (found := result(library, case)).mark != RIGHT
    } == {}


def test_what_is_said() -> None:
    """The recorded results cover the current cases, and README and page contain their numbers."""
    counts = {name: marks for name, *marks in cells(PAGES["parts"]["tally"])[2:]}
    right, wrong = counts["uniclip"][0], counts.pop("at least one built-in")[1]
    assert {sum(map(int, marks)) for marks in counts.values()} == {len(CASES)}
    readme, page = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/compared.md")
    )
    assert f"In {wrong} of {len(CASES)} cases at least one" in readme
    assert f"uniclip is right in all {right}." in readme
    assert (
        f"right in all {right} cases. At least one built-in function is wrong, without an "
        f"error, in {wrong}."
    ) in page


def test_speed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README has the measured ratios of the page, and lists where uniclip is slower."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("performance_tables")
    measured = [
        json.loads((ROOT / "docs" / f"{name}.json").read_bytes())
        for name in ("speed-step", "speed-growth", "speed-gpu", "launches")
    ]
    step = measured[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("- **Fast.**") : readme.index("- **Small")]
    assert cells(said) == cells(tables.parts(*measured)["readme"])
    rows = [row for row in step["rows"] if row["framework"] == "torch"]
    slow = {
        row["what"]
        for row in rows
        if any(round(ratio[1], 2) < 1 for ratio in row["times"].values())
    }
    assert slow == {
        name
        for names in re.findall(r"Slower: [^(]*\(([^)]+)\)", said)
        for name in names.split(", ")
    }


def test_sizes_are_said() -> None:
    """The README states the current lines of code, in hundreds, without docstrings and comments."""
    source = ROOT / "src" / "uniclip"
    files = [
        file for file in source.rglob("*.py") if not {"integrations", "insight"} & {*file.parts}
    ]
    core, step = (
        100 * round(sum(map(count_lines, some)) / 100)
        for some in (files, [source / "_core" / "step.py"])
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"is {core:,} lines of code in {len(files)} files." in readme
    assert f"share one step of {step} lines." in readme


def count_lines(file: Path) -> int:
    """Return the number of lines of code."""
    lines, begins = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        between = token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        if between or token.type in {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}:
            begins |= between
        else:
            docstring, begins = begins and token.type == tokenize.STRING, False
            lines |= set() if docstring else {*range(token.start[0], token.end[0] + 1)}
    return len(lines)


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table in a text."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]


def test_speed(tmp_path: Path) -> None:
    """The speed benchmark measures a small model, and saves its row."""
    path = tmp_path / "speed.json"
    words = ["step", "--only", "16 elements", "--rounds", "2", "--out", str(path)]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", *words], check=True)
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["about"].keys() == {"cpu", "cores", "date", "versions"}
    assert [row["clipped"] for row in results["rows"]] == [False, True]
    assert all(
        row["us"].keys() == {"native", "clip_grad_norm_", "attach"} for row in results["rows"]
    )


def test_gpu_without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of GPUs runs to its end on a CPU, with right results, and makes a table."""
    path = tmp_path / "gpu.json"
    words = ["waits", "times", "cupy", "jax", "--rounds", "1", "--out", str(path)]
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *words]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "left out: waits (needs a GPU), cupy (needs a GPU and CuPy)" in printed
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["about"].keys() == {"what", "device", "date", "versions"}

    # Each operation has a step that clips, and one that does not.
    names = {row["what"].rsplit(", ", 1)[0] for row in results["rows"]}
    assert {"global norm", "whole step of fused AdamW", "agc", "zclip"} <= names
    assert "JAX: whole step of AdamW, global norm" in names
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("performance_tables")
    rows = list(tables.on_gpu(results["rows"]))
    assert 2 * len(rows) == len(results["rows"])
    assert all(row[2].count(" / ") == 1 for row in rows)


def test_growth() -> None:
    """The growth benchmark compiles and runs both programs."""
    rows = list(many.measure("jax", "by_norm, 10 leaves of 32x32", 1))
    assert [row["stage"] for row in rows] == ["first call", "compiler alone", "a run"]
    assert all(row["us"].keys() == {"native", "uniclip"} for row in rows)


def test_wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark fails if the timed function does not clip."""
    monkeypatch.setattr(steps, "clips", lambda params, limit: {"native": lambda: None})
    with pytest.raises(ValueError, match="after native the norm is"):
        list(steps.measure("torch", "16 elements", 1))
