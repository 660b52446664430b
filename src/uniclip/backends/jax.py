# SPDX-License-Identifier: MIT
"""JAX arrays, tracers and BCOO matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec

from uniclip.backends.base import Array, Backend, Rebuild


class _JAX(Backend):
    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, (jax.Array, sparse.BCOO)) and leaf.dtype != jnp.bool_

    def traced(self, array: Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def readable(self, array: Array) -> bool:
        return (
            not self.traced(array)
            and array.is_fully_addressable
            and all(device.platform == "cpu" for device in array.devices())
        )

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if isinstance(leaf, sparse.BCOO):
            merged = leaf.sum_duplicates(nse=leaf.nse)  # as many stored entries as before: jit needs it
            return merged.data, lambda new: sparse.BCOO((new, merged.indices), shape=leaf.shape)
        return super().stored(leaf)

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        return list(jax.lax.cond(ok, usual, rare))

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return jnp.sum(array, axes)

    def stop_gradient(self, array: Array) -> Array:
        return jax.lax.stop_gradient(array)

    def to_device_of(self, other: Array, array: Array) -> Array:
        if self.traced(array) or self.traced(other) or array.devices() == other.devices():
            return array
        mesh = isinstance(other.sharding, NamedSharding)
        return jax.device_put(array, NamedSharding(other.sharding.mesh, PartitionSpec()) if mesh else other.sharding)


BACKEND = _JAX(jnp)
