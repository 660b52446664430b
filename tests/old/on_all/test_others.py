"""The page on the comparison with others shows uniclip right, or the tests fail."""

from __future__ import annotations

import pytest

from how_others_behave import GROUPS
from native_functions import LIBRARIES
from side_by_side import ERROR, NONE, RIGHT, WRONG, Case, run, verdicts

CASES = [pytest.param(case, id=case.title) for group in GROUPS for case in group.cases]


@pytest.mark.parametrize("case", CASES)
def test_case(case: Case) -> None:
    """Some library has such a function; uniclip is right on the arrays of each that has."""
    results = run(case)
    native = [results[library.name] for library in LIBRARIES if library.name in results]
    ours = [result for name, result in results.items() if name.startswith("uniclip")]
    assert native
    assert all(result.mark in {RIGHT, WRONG, ERROR} and result.text for result in native)
    assert ours
    assert all(result.mark == RIGHT for result in ours), ours


def test_every_call_is_right_in_the_usual_case() -> None:
    """A call that is written wrongly would be shown as an error of its library."""
    kinds = {(name, case.kind) for case in GROUPS[0].cases for name, r in verdicts(case).items() if r.mark == RIGHT}
    offered = {(library.name, kind) for library in LIBRARIES for kind in library.calls if kind != "import"}
    assert offered <= kinds
    assert all(result.mark in {RIGHT, NONE} for case in GROUPS[0].cases for result in verdicts(case).values())
