"""One fixture for all frameworks; the environment names them and a missing one is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from frameworks import CHOSEN, Framework, some_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
settings.register_profile("default", PATIENT, max_examples=100, derandomize=True)
settings.register_profile("thorough", PATIENT, max_examples=3000)
settings.load_profile("default")

COMMON = Path(__file__).parent / "common"


def pytest_configure(config: pytest.Config) -> None:
    """Explain the markers."""
    config.addinivalue_line("markers", "ways(names): the frameworks, of those of a run, that change what is tested")
    config.addinivalue_line("markers", "everywhere: uses no framework, but its being installed matters")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test each framework this run is for, or those that it is marked with."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "fw" in metafunc.fixturenames and not any("fw" in names for names in given):
        mark = metafunc.definition.get_closest_marker("ways")
        ways = some_of(*mark.args, **mark.kwargs) if mark else CHOSEN
        metafunc.parametrize("fw", ways, ids=lambda framework: framework.name, indirect=True)


@pytest.fixture
def fw(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Return the framework of a test, with what it needs switched on."""
    with request.param.context():
        yield request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what uses no framework to the run for NumPy."""
    if any(one.family == "NumPy" for one in CHOSEN):
        return
    left = {item for item in items if item.path.is_relative_to(COMMON) and uses_none(item)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def uses_none(item: pytest.Item) -> bool:
    """Whether a test is the same for every framework."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return not any(isinstance(value, Framework) for value in given) and not item.get_closest_marker("everywhere")
