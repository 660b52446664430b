"""The comparison with other libraries: its cases and its programs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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


def test_speed(tmp_path: Path) -> None:
    """The speed benchmark measures a small model, and saves its row."""
    path = tmp_path / "speed.json"
    words = ["step", "--only", "16 elements", "--rounds", "2", "--out", str(path)]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", *words], check=True)
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["about"].keys() == {"cpu", "cores", "date", "versions"}
    assert [row["clipped"] for row in results["rows"]] == [False, True]
    capped = "chain(zclip, by_global_norm)"
    names = {"native", "clip_grad_norm_", "attach", "nonfinite='skip'", capped}
    # Nothing but a spike is clipped by zclip.
    assert [row["us"].keys() for row in results["rows"]] == [names | {"zclip"}, names]


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
    monkeypatch.setattr(steps, "clips", lambda params, limit, clipped: {"native": lambda: None})
    with pytest.raises(ValueError, match="after native the norm is"):
        list(steps.measure("torch", "16 elements", 1))
