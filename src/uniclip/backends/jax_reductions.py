# SPDX-License-Identifier: MIT
"""Reductions of JAX arrays that are sharded over devices or processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
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


def _max(x: Array, /, axis: Any = None, **options: Any) -> Array:
    """Return the maximum, NaN if there is one; that of XLA drops NaN in sharded arrays."""
    if jax.device_count() == 1 or not jnp.issubdtype(x.dtype, jnp.floating) or options or not x.size:
        return jnp.max(x, axis, **options)
    return _in_one(axis, x)


def _min(x: Array, /, axis: Any = None, **options: Any) -> Array:
    if jax.device_count() == 1 or not jnp.issubdtype(x.dtype, jnp.floating) or options or not x.size:
        return jnp.min(x, axis, **options)
    return -_in_one(axis, -x)


# JAX has no types that a checker understands.
_with_slope: Callable[[Callable[..., Any]], Any] = partial(jax.custom_jvp, nondiff_argnums=(0,))


@_with_slope
def _max_of_all(axis: Any, x: Array) -> Array:
    """Return the maximum of floating-point numbers by that of integers in the same order, where NaN is the largest."""
    whole = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    keys = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), whole)
    largest = jnp.asarray(jnp.iinfo(whole).max, whole)
    top = jnp.max(jnp.where(keys < 0, keys ^ largest, keys), axis)
    return jax.lax.bitcast_convert_type(jnp.where(top < 0, top ^ largest, top), x.dtype)


def _slope(axis: Any, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Return the derivative: that of the largest value, or the mean of those of several."""
    [x], [tangent] = primals, tangents
    top = _max_of_all(axis, x)
    here = (x == (top if axis is None else jnp.expand_dims(top, axis))).astype(x.dtype)
    return top, jnp.sum(here * tangent, axis) / jnp.sum(here, axis)


_max_of_all.defjvp(_slope)
_in_one = jax.jit(_max_of_all, static_argnums=0)
"""One program, outside of jit too."""
REDUCTIONS = {name: _one_by_one(getattr(jnp, name)) for name in ("all", "any", "mean", "sum")}
REDUCTIONS |= {"max": _one_by_one(_max), "min": _one_by_one(_min)}
