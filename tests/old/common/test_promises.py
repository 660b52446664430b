"""Every promise on every framework this run is for."""

from __future__ import annotations

import pytest

from frameworks import CHOSEN, Framework
from promises import PROMISES, Promise

CASES = [
    pytest.param(framework, promise, id=f"{framework.name}: {promise.case}")
    for framework in CHOSEN
    for promise in PROMISES
    if promise.reason(framework) is None
]


@pytest.mark.parametrize(("framework", "promise"), CASES)
def test_promise(framework: Framework, promise: Promise) -> None:
    """What the table says happens, happens."""
    with framework.context():
        promise.check(framework)


@pytest.mark.everywhere
def test_something_is_promised_for_every_framework() -> None:
    """An environment that names a framework runs checks on it."""
    assert {case.values[0].name for case in CASES} == {framework.name for framework in CHOSEN}
