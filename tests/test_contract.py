"""Every promise on every framework this run is for, eagerly.

Compiled code runs the same programs elsewhere.
"""

from __future__ import annotations

import pytest

import uniclip
from conftest import chosen
from kit.contract import PROMISES, Promise
from kit.frameworks import EAGER, Framework
from kit.promise import run_eagerly


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test each promise that each framework of this run can keep."""
    ways = [way() for name in EAGER if name in chosen(metafunc.config) for way in EAGER[name]]
    cases = [(way, promise) for way in ways for promise in PROMISES if promise.reason(way) is None]
    if "promise" in metafunc.fixturenames:
        names = [f"{way.name}: {promise.case}" for way, promise in cases]
        metafunc.parametrize(("way", "promise"), cases, ids=names)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # PyTorch says so once
def test_promise(way: Framework, promise: Promise) -> None:
    """What the table says happens, happens."""
    with way.context():
        for program in promise.programs_for(way):
            run_eagerly(way, uniclip, program)
        if promise.check:
            promise.check(way, uniclip)
