"""Every guarantee on every framework of a run, eagerly; test_compiled.py traces them."""

from __future__ import annotations

import pytest

import uniclip
from conftest import chosen
from kit.contract import PROMISES, Promise
from kit.frameworks import EAGER, Framework
from kit.promise import run_eagerly


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by the guarantees that each framework of this run can have."""
    ways = [way() for name in EAGER if name in chosen(metafunc.config) for way in EAGER[name]]
    cases = [(way, promise) for way in ways for promise in PROMISES if promise.reason(way) is None]
    if "promise" in metafunc.fixturenames:
        names = [f"{way.name}: {promise.case}" for way, promise in cases]
        metafunc.parametrize(("way", "promise"), cases, ids=names)


# PyTorch warns once.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_promise(way: Framework, promise: Promise) -> None:
    """The framework behaves as the table of guarantees says."""
    with way.context():
        for program in promise.programs_for(way):
            run_eagerly(way, uniclip, program)
        if promise.check:
            promise.check(way, uniclip)
