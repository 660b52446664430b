# SPDX-License-Identifier: MIT
"""The few numbers that a logger shows of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uniclip.tree import flatten

if TYPE_CHECKING:
    from uniclip.backends import Backend


def arrays_of(values: Any) -> list[Any]:
    """Return the arrays of a field of a report that are not empty."""
    return [array for array in flatten(values).leaves if 0 not in array.shape]


def over(backend: Backend, function: Callable[[Any], Any], arrays: list[Any]) -> Any:
    """Return a reduction over all entries of all arrays; only 0-d ones are joined: others may be divided."""
    if len(arrays) == 1:
        return function(arrays[0])
    xp = backend.xp
    each = [function(array) if len(array.shape) else array for array in arrays]
    dtype = xp.result_type(*[one.dtype for one in each])
    return function(xp.stack([backend.to_device_of(each[0], xp.astype(one, dtype)) for one in each]))


def share_changed(backend: Backend, factors: list[Any]) -> Any:
    """Return the share of the factors that are not 1."""
    xp = backend.xp
    changed = [xp.astype(xp.not_equal(factor, xp.ones_like(factor)), factor.dtype) for factor in factors]
    if len(changed) == 1 or not any(len(factor.shape) for factor in factors):
        return over(backend, xp.mean, changed)
    return over(backend, xp.sum, changed) / over(backend, xp.sum, [xp.ones_like(factor) for factor in factors])
