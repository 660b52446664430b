"""What the comparisons of frameworks share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """Have XLA leave out most optimizations, where it is not its arithmetic that is tested."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
