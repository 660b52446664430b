"""One fixture for all frameworks; the environment names them and a missing one is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from frameworks import CHOSEN, Framework

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
settings.register_profile("default", PATIENT, max_examples=100, derandomize=True)
settings.register_profile("thorough", PATIENT, max_examples=3000)
settings.load_profile("default")


@pytest.fixture(params=CHOSEN, ids=lambda framework: framework.name)
def fw(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Each framework this run is for."""
    with request.param.context():
        yield request.param
