"""Work that grows with the number of leaves, counted in calls of functions, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import uniclip as uc

EVERY_RULE = pytest.mark.parametrize(
    "rule",
    [
        uc.by_global_norm(1e-3),
        uc.by_global_norm(1e9),
        uc.by_norm(1e-3),
        uc.by_global_norm(1e-3, nonfinite="zero"),
        uc.by_global_norm(1e-3, ord=3),
        uc.Rule(1e-3, scope=uc.scopes.axes(-1)),
        uc.Rule(1e-3, scope=uc.scopes.groups(lambda path, leaf: path[0] % 2)),
        uc.by_value(-1e-3, 1e-3),
    ],
    ids=["above", "below", "leaf", "zero", "L3", "axes", "groups", "value"],
)


def calls(function: Callable[[], Any]) -> int:
    """Return how many functions, Python's and others', are called while one runs."""
    count = 0

    def listen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    function()  # what is imported or compiled once
    sys.setprofile(listen)
    function()
    sys.setprofile(None)
    return count


def assert_linear(array: Callable[[], Any], rule: Any) -> None:
    """Assert that from one tree to a larger one the calls grow as the leaves do, or less; in place too.

    Of 32 leaves or fewer, each is measured by itself.
    """
    for clip in (uc.clip, uc.clip_):
        few, some, many = (calls(partial(_clip_new, clip, array, rule, leaves)) for leaves in (40, 400, 4000))
        assert many - some <= 1.2 * 10 * (some - few)


def _clip_new(clip: Callable[..., Any], array: Callable[[], Any], rule: Any, leaves: int) -> None:
    """Clip new gradients: those clipped in place before are at the limit."""
    clip([array() for _ in range(leaves)], rule)
