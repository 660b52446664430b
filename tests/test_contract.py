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
    names = [name for name in EAGER if name in chosen(metafunc.config)]
    ways = [(way(), pytest.mark.needs(name)) for name in names for way in EAGER[name]]
    cases = [
        pytest.param(way, promise, marks=mark, id=f"{way.name}: {promise.case}")
        for way, mark in ways
        for promise in PROMISES
        if promise.reason(way) is None
    ]
    if "promise" in metafunc.fixturenames:
        metafunc.parametrize(("way", "promise"), cases)


@pytest.mark.beside_others
# PyTorch warns once.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_promise(way: Framework, promise: Promise) -> None:
    """The framework behaves as the table of guarantees says."""
    with way.context():
        for program in promise.programs_for(way):
            run_eagerly(way, uniclip, program)
        if promise.check:
            promise.check(way, uniclip)
