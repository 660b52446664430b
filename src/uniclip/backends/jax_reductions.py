# SPDX-License-Identifier: MIT
"""Reductions of JAX arrays that are sharded over devices or processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from uniclip.backends.base import Array


def _one_by_one(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """Wait for a reduction before the next one starts, where CPU processes share arrays.

    There the collectives of programs that run at the same time deadlock (JAX 0.10, gloo).
    """

    @wraps(reduce)
    def reduced(*args: Any, **options: Any) -> Array:
        return ended(reduce(*args, **options))

    return reduced


def ended(array: Array) -> Array:
    """Return an array, computed if it is shared by CPU processes."""
    if not isinstance(array, jax.core.Tracer) and not array.is_fully_addressable and not on_device(array):
        array.block_until_ready()
    return array


def on_device(array: Array) -> bool:
    """Whether an array is on an accelerator."""
    return any(device.platform != "cpu" for device in array.devices())


def _extreme(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """Return the maximum or minimum, NaN if there is one; that of XLA drops NaN in sharded arrays."""

    def extreme(x: Array, /, axis: Any = None, **options: Any) -> Array:
        found = reduce(x, axis, **options)
        if jax.device_count() == 1 or not jnp.issubdtype(x.dtype, jnp.floating):
            return found
        # Uses the NaN that is there: a constant would trigger NaN debuggers.
        return found + REDUCTIONS["sum"](jnp.where(jnp.isnan(x), x, 0), axis, **options)

    return extreme


REDUCTIONS = {name: _one_by_one(getattr(jnp, name)) for name in ("all", "any", "mean", "sum")}
REDUCTIONS |= {name: _extreme(_one_by_one(getattr(jnp, name))) for name in ("max", "min")}
