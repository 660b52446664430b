"""The program that measures speed measures everything, and what it times is right. How fast it is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import uniclip as uc
import uniclip.presets.adaptive
from contenders import (
    ALL_OURS,
    DROP_IN,
    EAGER,
    GLOBAL,
    LIBRARIES,
    NATIVE,
    NATIVE_IN_PLACE,
    OURS,
    OURS_IN_PLACE,
    READ,
    RULES,
)
from gradient_trees import CONVOLUTIONS, FIFTY, RESNET, SMALL
from speed import COMPILERS, FEW, GROWTH, PARTS, points, settings, shortened
from speed_tables import NOT_YET, headline, parts
from targets import COMPILING, COUNTS, STEPS, TARGETS, judged
from training_steps import BASES, LEARNING, WHERE

ROOT = Path(__file__).parents[3]
IN_PLACE = {"numpy": {NATIVE_IN_PLACE, OURS_IN_PLACE}, "torch": {OURS_IN_PLACE}}
JIT = ("jax", "jax.jit")
MEASURED = [SMALL, FIFTY, CONVOLUTIONS]
"""A tree for each rule."""


def run(*words: str) -> None:
    """Run the program as its users do."""
    subprocess.run([sys.executable, ROOT / "benchmarks" / "speed.py", "--quick", *words], check=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Measure a small tree for each rule, steps and compiling on every framework, NumPy's curves, into one file."""
    path = tmp_path_factory.mktemp("speed") / "performance.json"
    run("--part", "rows", "steps", "compiling", "--tree", *MEASURED, "--out", str(path))
    run("--framework", "numpy", "--part", "scaling", "--out", str(path))
    return json.loads(path.read_text(encoding="utf-8"))


def contenders(row: Any) -> set[str]:
    """Return what is to be measured in a row."""
    names = {NATIVE, OURS, READ} | IN_PLACE.get(row["framework"], set())
    if row["rule"] != GLOBAL:
        return names - {NATIVE_IN_PLACE}
    return names | ({DROP_IN} if (row["framework"], row["way"]) == ("torch", EAGER) else set())


def test_everything_is_measured(results: Any) -> None:
    """Every way of calling, clipped and not, with every contender; a later run keeps what the others found."""
    found = [(row["framework"], row["way"], row["tree"], row["clipped"]) for row in results["rows"]]
    ways = [(f, way, SMALL) for f in LIBRARIES for way in LIBRARIES[f].ways]
    ways += [(f, way, tree) for tree in (FIFTY, CONVOLUTIONS) for f, way in [*((f, EAGER) for f in LIBRARIES), JIT]]
    assert sorted(found) == sorted((*way, clipped) for way in ways for clipped in (True, False))
    assert {row["rule"] for row in results["rows"]} == set(RULES)
    for row in results["rows"]:
        assert set(row["contenders"]) == contenders(row)
    curve = [(row["leaves"], row["entries"], row["rule"]) for row in results["scaling"]]
    few = shortened(("scaling", point) for point in points("numpy"))
    assert curve == [(point.leaves, point.entries, point.rule) for _, point in few]


def test_parts_of_the_page(results: Any) -> None:
    """Each part of the page is made from what was measured, and says so where nothing was; no table is wide."""
    found = parts(results)
    measured = {"versions", "took", "compiling", "steps", "fused", "training", "rules-compiling", "answer-keras"}
    measured |= {f"{kind}-{framework}" for kind in ("ratios", "slower") for framework in LIBRARIES}
    assert {name for name in measured if found[name] == NOT_YET} == set()
    assert found.keys() == parts({"about": results["about"]}).keys()
    assert found["memory"] == NOT_YET  # no tree is large enough for it
    lines = [line for text in found.values() for line in text.splitlines() if line.startswith("|")]
    assert max(line.count("|") for line in lines) <= 6


def test_the_readme_says_what_was_measured() -> None:
    """Its sentence on the speed is made of the numbers of the page."""
    measured = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert headline(measured) in readme


def test_steps_and_programs_are_measured(results: Any) -> None:
    """Every kind of step with what it is compared with, and every rule compiled beside the native loop."""
    found = [(row["framework"], row["kind"]) for row in results["steps"]]
    assert sorted(found) == sorted((f, kind) for kind, frameworks in WHERE.items() for f in frameworks)
    for row in results["steps"]:
        base = row["contenders"][BASES[row["kind"]]]
        assert base["above"] == [0, 0, 0]
        assert base["times"] == [1, 1, 1]
        assert all(0 < c["us"][0] <= c["us"][1] <= c["us"][2] for c in row["contenders"].values())
    assert [(r["framework"], r["way"], r["leaves"]) for r in results["compiling"]] == [
        (framework, way, FEW) for framework, way in COMPILERS.items()
    ]
    for row in results["compiling"]:
        rules = {rule for framework, rule in COMPILING if framework == row["framework"]}
        assert set(row["contenders"]) == {NATIVE, GLOBAL} | rules
        assert all(0 < c["times"][0] <= c["times"][1] for c in row["contenders"].values())
    judgments = [(verdict.framework, verdict.what) for verdict in judged({"rows": [], **results, "scaling": []})]
    assert len(judgments) > len(STEPS) + len(COMPILING)
    assert {what.partition(",")[0] for _, what in judgments} >= {name for _, _, name, _, _ in STEPS}


def test_every_rule_that_learns_takes_steps() -> None:
    """The steps are those of all presets that learn."""
    adaptive = uniclip.presets.adaptive
    assert sorted(LEARNING) == [n for n in sorted(uc.presets.__all__) if getattr(uc, n).__module__ == adaptive.__name__]


def test_time_per_leaf() -> None:
    """A time per leaf that is not the same for few leaves and many is a target missed."""
    assert set(COUNTS) <= set(GROWTH[GLOBAL]) & set(GROWTH["by_norm"])
    about = {"framework": "numpy", "way": EAGER, "rule": "by_norm"}
    for factor, reached in ((1.1, True), (1.3, False)):
        rows = [{**about, "leaves": n, "entries": 16 * n, "us": {NATIVE: 1.0 * n, OURS: 2.0 * n}} for n in COUNTS]
        rows[0]["us"][OURS] *= factor
        (verdict,) = judged({"scaling": rows})
        assert verdict.quartiles[1] == pytest.approx(factor)
        assert verdict.reached == reached


def test_what_is_timed_is_right(results: Any) -> None:
    """Clipped gradients end at the limit, others stay at half of it; times and ratios are positive."""
    for row in results["rows"]:
        for name, found in row["contenders"].items():
            assert found["us"] > 0
            if name != READ:
                tolerance = 1e-6 if name in ALL_OURS else 1e-3
                assert found["norm"] == pytest.approx(1.0 if row["clipped"] else 0.5, rel=tolerance)
            for quartiles in (found[key] for key in ("ratio", "reads") if key in found):
                assert 0 < quartiles[0] <= quartiles[1] <= quartiles[2]
        assert all("ratio" in row["contenders"][name] for name in set(ALL_OURS) & set(row["contenders"]))
    assert all(row["us"][name] > 0 for row in results["scaling"] for name in (NATIVE, OURS))


@pytest.mark.parametrize("framework", LIBRARIES)
def test_every_target_is_measured(framework: str) -> None:
    """No target is left unjudged, half precision is measured too, and no part of the results is known twice."""
    measured = list(settings(framework))
    cases = {(setting.way, setting.tree) for setting in measured if setting.dtype == "float32"}
    targets = {(target.way, tree) for target in TARGETS if target.framework == framework for tree in target.bounds}
    assert targets <= cases
    assert {setting.dtype for setting in measured if setting.tree == RESNET} == {"float32", LIBRARIES[framework].half}
    for part in PARTS.values():
        keys = [tuple(getattr(task, field) for field in part.fields) for task in part.tasks(framework)]
        assert len(keys) == len(set(keys))
