"""What the tests of the wrappers for JAX share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _quickly_compiled() -> Iterator[None]:
    """Have XLA leave out most optimizations: the rules themselves are tested with all of them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
