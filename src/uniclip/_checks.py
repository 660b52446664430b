# SPDX-License-Identifier: MIT
"""Refuse arguments that do not fit; each error names the argument, what is allowed, and what it got."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeVar

T = TypeVar("T")

LIMIT = " (0 zeroes the gradients, math.inf only measures them)"
"""What there is to know about the range of a limit."""


def check(name: str, value: object, fits: bool, wanted: str) -> None:  # noqa: FBT001
    """Refuse an argument that does not fit."""
    if not fits:
        msg = f"{name} must be {wanted}, got {value!r}"
        raise TypeError(msg)


def nonnegative(name: str, value: T, hint: str = "") -> T:
    """Return ``value`` unless it is no number or array, or a number that is negative or NaN."""
    if isinstance(value, float) and value >= 0:
        return value
    if not isinstance(value, Real) and not hasattr(value, "dtype"):
        msg = f"{name} must be a number or a 0-d array{hint}, got {value!r}"
        raise TypeError(msg)
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more{hint}, got {value!r}"
        raise ValueError(msg)
    return value


def positive(name: str, value: float) -> None:
    """Refuse what is no number, or not above 0."""
    check(name, value, isinstance(value, Real), "a number")
    if not value > 0:
        msg = f"{name} must be above 0, got {value!r}"
        raise ValueError(msg)


def within(name: str, value: float, low: float, high: float) -> None:
    """Refuse what is no number, or out of range."""
    check(name, value, isinstance(value, Real), "a number")
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        msg = f"{name} must be {allowed}, got {value!r}"
        raise ValueError(msg)


def below_one(name: str, value: float) -> None:
    """Refuse a decay with which nothing would ever be learned."""
    check(name, value, isinstance(value, Real), "a number")
    if not 0 <= value < 1:
        msg = f"{name} must be from 0 to below 1, got {value!r}"
        raise ValueError(msg)


def whole(name: str, value: int, low: int) -> None:
    """Refuse what is no whole number, or below ``low``."""
    check(name, value, isinstance(value, int), "a whole number")
    within(name, value, low, math.inf)
