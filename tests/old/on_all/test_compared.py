"""What the docs say of other libraries is what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import features
import pytest

from frameworks import Framework
from how_others_behave import GROUPS
from native_functions import LIBRARIES, Library
from side_by_side import NONE, RIGHT, WRONG, result, summary

ROOT = Path(__file__).parents[3]
MEASURED = json.loads((ROOT / "docs" / "compared.json").read_text(encoding="utf-8"))
FEATURES = [feature for group in features.FEATURES.values() for feature in group]
HERE = [feature for feature in FEATURES if feature.wanted is not None]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
def test_feature(feature: features.Feature) -> None:
    """Uniclip does what its lines say; lines are given for libraries only."""
    offered = feature.case or "uniclip" in feature.calls
    if feature.wanted is None:
        assert MEASURED["sharded"].keys() == feature.calls.keys()
        assert MEASURED["sharded"]["uniclip"] == RIGHT
    else:
        assert features.mark(feature, features.OURS) == (RIGHT if offered else NONE)
    assert set(feature.calls) <= {"uniclip", *(library.name for library in LIBRARIES), *MEASURED["features"]}


@pytest.mark.parametrize("name", MEASURED["features"])
def test_library_that_is_not_installed(name: str) -> None:
    """What was measured has the cases and features of today; else run benchmarks/other_libraries.py again."""
    marks = MEASURED["features"][name]
    assert list(marks) == [feature.title for feature in HERE]
    assert all((marks[f.title] != NONE) == (name in f.calls) for f in HERE if name in f.calls or not f.case)
    assert sum(MEASURED["cases"][name].values()) == sum(len(group.cases) for group in GROUPS)


@pytest.mark.parametrize(
    "planted",
    [
        "uc.clip_by_gobal_norm(grads, 1.0)",
        "uc.clip_by_global_norm(grad, 1.0)",
        "uc.clip_by_global_norm(grads, max_nrom=1.0)",
        "uc.clip_by_global_norm()",
        "import uniclipx",
        "uc.clip_by_global_norm(grads, 1.0",
    ],
)
@pytest.mark.parametrize("wanted", ["Error", True, [[0.6, 0.8]]], ids=str)
def test_mistake_is_no_answer(planted: str, wanted: object) -> None:
    """A line that is written wrongly fails; it counts neither for the library nor against it."""
    feature = features.Feature("planted", wanted=wanted, calls={"uniclip": planted})
    with pytest.raises(features.MISTAKES):
        features.mark(feature, features.OURS)


def test_missing_library_is_no_answer() -> None:
    """A library that cannot be imported fails, in the features and in the cases."""
    usual = GROUPS[0].cases[0]
    missing = Library("uniclip", Framework(), {"import": "import uniclipx", usual.kind: "grads"})
    with pytest.raises(ImportError):
        features.mark(features.Feature("planted", calls={"uniclip": "False"}), missing)
    with pytest.raises(ImportError):
        result(missing, usual)


def test_error_is_known_by_its_message() -> None:
    """An error is an answer by the words of its message, not by its class."""
    feature = features.Feature("planted", wanted="nan|finite", calls={"uniclip": "float('not')"})
    assert features.mark(feature, features.OURS) == WRONG
    assert features.mark(replace(feature, wanted="could not convert"), features.OURS) == RIGHT
    assert features.mark(replace(feature, wanted="ValueError"), features.OURS) == WRONG


def test_refusal_is_an_answer() -> None:
    """A library that answers with the kind of error that a mistake gives is named, with the words."""
    feature = features.Feature("planted", calls={"uniclip": "None.dtype"}, refuses={"uniclip": "no attribute 'dtype'"})
    assert features.mark(feature, features.OURS) == WRONG
    with pytest.raises(AttributeError):
        features.mark(replace(feature, calls={"uniclip": "None.type"}), features.OURS)


def test_readme() -> None:
    """Each "in n of m cases" of the README is a count of today."""
    counts = summary(GROUPS)
    known = {(counts[key], counts["cases"]) for key in ("uniclip right", "some native wrong", "no native right")}
    said = re.findall(r"in (\d+) of (?:the )?(\d+)\s+cases", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {(int(n), int(m)) for n, m in said} <= known
