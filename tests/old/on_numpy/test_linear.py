"""Clipping many NumPy arrays takes work that grows as their number does."""

from __future__ import annotations

from typing import Any

import numpy as np

from linear import EVERY_RULE, assert_linear


@EVERY_RULE
def test_linear(rule: Any) -> None:
    """Ten times as many leaves take ten times as many calls."""
    assert_linear(lambda: np.ones(3), rule)
