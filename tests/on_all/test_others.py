"""The page on how others behave shows uniclip right, or the tests fail."""

from __future__ import annotations

import pytest

from how_others_behave import GROUPS
from native_functions import LIBRARIES
from side_by_side import ERROR, RIGHT, WRONG, Case, installed, run

CASES = [pytest.param(case, id=case.title) for group in GROUPS for case in group.cases]


def test_all_libraries_are_measured() -> None:
    """Nothing is left out in silence."""
    assert [type(library) for library in installed()[0]] == list(LIBRARIES)


@pytest.mark.parametrize("case", CASES)
def test_case(case: Case) -> None:
    """Some library has such a function; uniclip is right beside it."""
    rows = run(case).rows
    assert rows
    for row in rows:
        assert row.native
        assert row.native.text
        assert row.native.mark in {RIGHT, WRONG, ERROR}
        assert row.ours
        assert row.ours.mark == RIGHT, row.ours
