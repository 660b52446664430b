"""The program that measures speed measures everything, and what it times is right. How fast it is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contenders import LIBRARIES, NATIVE, NATIVE_IN_PLACE, OURS, OURS_IN_PLACE, READ
from gradient_trees import RESNET, SMALL, TREES
from speed import points, settings
from speed_tables import parts
from targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
IN_PLACE = {"numpy": {NATIVE_IN_PLACE, OURS_IN_PLACE}, "torch": {OURS_IN_PLACE}}


def run(*words: str) -> None:
    """Run the program as its users do."""
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", "--quick", *words], check=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measure the smallest tree on every framework, and the curves of NumPy, into one file."""
    path = tmp_path_factory.mktemp("speed") / "performance.json"
    run("--tree", SMALL, "--out", str(path))
    run("--framework", "numpy", "--scaling", "--out", str(path))
    return json.loads(path.read_text(encoding="utf-8"))


def test_everything_is_measured(results: Any) -> None:
    """Every way of calling, clipped and not, with every contender; a second run keeps what the first one found."""
    found = [(row["framework"], row["way"], row["clipped"]) for row in results["rows"]]
    assert found == [(f, way, clipped) for f in LIBRARIES for way in LIBRARIES[f].ways for clipped in (True, False)]
    for row in results["rows"]:
        assert set(row["contenders"]) == {NATIVE, OURS, READ} | IN_PLACE.get(row["framework"], set())
    curve = [(row["leaves"], row["entries"]) for row in results["scaling"]]
    assert curve == [(point.leaves, point.entries) for point in points("numpy", quick=True)]
    assert all(parts(results)[name] for name in ("versions", "ratios", "targets", "slower", "compiling", "scaling"))


def test_what_is_timed_is_right(results: Any) -> None:
    """Clipped gradients end at the limit, others stay at half of it; times and ratios are positive."""
    for row in results["rows"]:
        for name, found in row["contenders"].items():
            assert found["us"] > 0
            if name != READ:
                tolerance = 1e-6 if name in {OURS, OURS_IN_PLACE} else 1e-3
                assert found["norm"] == pytest.approx(1.0 if row["clipped"] else 0.5, rel=tolerance)
            for quartiles in (found[key] for key in ("ratio", "reads") if key in found):
                assert 0 < quartiles[0] <= quartiles[1] <= quartiles[2]
        assert all("ratio" in row["contenders"][name] for name in {OURS, OURS_IN_PLACE} & set(row["contenders"]))
    assert all(row["us"][name] > 0 for row in results["scaling"] for name in (NATIVE, OURS))


@pytest.mark.parametrize("framework", LIBRARIES)
def test_every_target_is_measured(framework: str) -> None:
    """No target is left unjudged, and half precision is measured too."""
    measured = list(settings(framework, list(TREES)))
    cases = {(setting.way, setting.tree) for setting in measured if setting.dtype == "float32"}
    assert {
        (target.way, tree) for target in TARGETS if target.framework == framework for tree in target.bounds
    } <= cases
    assert {setting.dtype for setting in measured if setting.tree == RESNET} == {"float32", LIBRARIES[framework].half}
