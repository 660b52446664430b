"""What the docs say of other libraries is what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import features
import pytest

from how_others_behave import GROUPS
from native_functions import LIBRARIES
from side_by_side import summary

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "docs" / "compared.json").read_text(encoding="utf-8"))
FEATURES = [feature for group in features.FEATURES.values() for feature in group]
HERE = [feature for feature in FEATURES if feature.wanted is not None]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
def test_feature(feature: features.Feature) -> None:
    """Uniclip does what its lines say; lines are given for libraries only."""
    offered = feature.case or "uniclip" in feature.calls
    if feature.wanted is None:
        assert MEASURED["sharded"] == dict.fromkeys(feature.calls, features.YES)
    else:
        assert features.mark(feature, features.OURS) == (features.YES if offered else features.NONE)
    assert set(feature.calls) <= {"uniclip", *(library.name for library in LIBRARIES), *MEASURED["features"]}


@pytest.mark.parametrize("name", MEASURED["features"])
def test_library_that_is_not_installed(name: str) -> None:
    """What was measured has the cases and features of today; else run benchmarks/other_libraries.py again."""
    marks = MEASURED["features"][name]
    assert list(marks) == [feature.title for feature in HERE]
    assert all((marks[f.title] != features.NONE) == (name in f.calls) for f in HERE if not f.case)
    assert sum(MEASURED["cases"][name].values()) == sum(len(group.cases) for group in GROUPS)


def test_readme() -> None:
    """Each "in n of m cases" of the README is a count of today."""
    counts = summary(GROUPS)
    known = {(counts[key], counts["cases"]) for key in ("uniclip right", "some native wrong", "no native right")}
    said = re.findall(r"in (\d+) of (?:the )?(\d+)\s+cases", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {(int(n), int(m)) for n, m in said} <= known
