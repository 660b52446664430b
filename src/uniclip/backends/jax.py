# SPDX-License-Identifier: MIT
"""JAX arrays, tracers and BCOO matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from uniclip.backends import jax_axes
from uniclip.backends.base import NODES, Array, Backend, Rebuild, both, sum_dtype
from uniclip.backends.host import few, squares, squares_along
from uniclip.backends.jax_reductions import REDUCTIONS, ended, on_device


def _abs(x: Array, /) -> Array:
    """Return the modulus, with derivative 0 at 0 (JAX's own is 1 there)."""
    return x * jnp.sign(x) if jnp.isdtype(x.dtype, "real floating") else jnp.abs(x)


def _clip(x: Array, /, min: Any = None, max: Any = None) -> Array:  # noqa: A002 - the standard's names
    """Clip, with derivative 1 on the bounds too (JAX's own is 1/2 there)."""
    clipped = jnp.clip(x, min, max)
    return jnp.where(clipped == x, x, clipped)


namespace = SimpleNamespace(**(vars(jnp) | REDUCTIONS | {"abs": _abs, "clip": _clip}))


def _within(leaf: sparse.BCOO) -> Array:
    """Return the data, float32 or wider, with 0 for padding entries, whose index is beyond the shape."""
    bounds = jnp.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    data = leaf.data.astype(sum_dtype(jnp, leaf.dtype))
    return jnp.where(jnp.expand_dims(inside, range(inside.ndim, data.ndim)), data, 0)


_FLOATS = {jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")}


_DOUBLE = {jnp.dtype("float64"), jnp.dtype("complex128")}
_TOGETHER = 256
"""The number of arrays for which one call is compiled."""


def _together(arrays: list[Array]) -> bool:
    """Whether one call can be compiled for the arrays, outside of code that is already being compiled."""
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return False
    first = arrays[0].sharding
    return all(array.sharding is first or array.sharding.device_set == first.device_set for array in arrays)


@cache
def _first_device() -> jax.Device:
    return jax.local_devices()[0]


def _in_parts(arrays: list[Array]) -> list[list[Array]]:
    """Split lists of arrays so that each compiles in seconds, not minutes."""
    return [arrays[start : start + _TOGETHER] for start in range(0, len(arrays), _TOGETHER)]


# jax.jit has no types that a checker understands.
_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit


def _total(array: Array, dtype: Any, axes: tuple[int, ...] | None = None, unit: Any = 1) -> Array:
    """Return the sum of squares of an array in a unit, in a real dtype."""
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    return sum(jnp.sum(jnp.square(part.astype(dtype) / unit), axes) for part in parts)


def _wide(arrays: list[Array]) -> Any:
    """Return the real dtype in which squares are added."""
    return jnp.finfo(jnp.result_type(jnp.float32, *(array.dtype for array in arrays))).dtype


@_compiled
def _squares(arrays: list[Array]) -> Array:
    """Return the sum of squares of each array."""
    return jnp.stack([_total(array, _wide(arrays)) for array in arrays])


@_compiled
def _copied(arrays: list[Array]) -> list[Array]:
    """Return copies."""
    return list(map(jnp.copy, arrays))


@partial(jax.jit, static_argnums=1)
def _squares_along(arrays: list[Array], axes: tuple[Any, ...]) -> list[Array]:
    """Return the sums of squares of each array along its axes."""
    return [_total(array, _wide([array]), own) for array, own in zip(arrays, axes, strict=True)]


@partial(jax.jit, static_argnums=(1, 3))
def _squares_in_units(arrays: list[Array], axes: tuple[Any, ...], units: Array, rows: tuple[int, ...]) -> list[Array]:
    """Return the sums of squares of each array along its axes, in units."""
    by = [jnp.expand_dims(units[row], own or ()) for row, own in zip(rows, axes, strict=True)]
    return [_total(array, units.dtype, *some) for array, *some in zip(arrays, axes, by, strict=True)]


@partial(jax.jit, static_argnums=1)
def _sums(totals: Array, sizes: tuple[int, ...]) -> Array:
    """Return the sum of each group of totals."""
    ends = np.cumsum(sizes)
    return jnp.stack([jnp.sum(totals[end - size : end]) for end, size in zip(ends, sizes, strict=True)])


@_compiled
def _scaled(arrays: list[Array], factors: Any) -> list[Array]:
    return [(array * factors[number]).astype(array.dtype) for number, array in enumerate(arrays)]


class _JAX(Backend):
    processes = jax_axes.Devices()

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:  # noqa: ARG002
        return all(isinstance(leaf, jax.Array) and leaf.dtype in _FLOATS for leaf in leaves)

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:
        return np.asarray(array) if self.readable(array) else None

    def device(self, array: Array) -> Any:
        if array is None or self.traced(array):
            return None
        sharding = array.sharding
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        single = isinstance(device, SingleDeviceSharding) and device.device_set == {_first_device()}
        usual = device is None or (single and jax.config.jax_default_device is None)
        if usual:
            return jnp.asarray(array)  # takes half as long
        if device.is_fully_addressable:
            return jax.device_put(array, device)
        # Without comparing the value over all processes, as device_put does.
        return jax.make_array_from_callback(array.shape, device, lambda index: array[index])

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        if all(map(self.readable, arrays)):
            return list(map(np.asarray, arrays))  # device_get takes longer for each array than reading it
        return list(map(np.asarray, jax.device_get(arrays)))

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        return _copied(arrays) if _together(arrays) else list(map(jnp.copy, arrays))  # they may be donated later

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:
        if not _together(arrays):
            return None
        if few(arrays, sum([array.size for array in arrays])) and all([self.readable(array) for array in arrays]):
            total = squares(list(map(np.asarray, arrays)), lengths)
            if total is not None:
                return total
        totals = [ended(_squares(some)) for some in _in_parts(arrays)]
        each = totals[0] if len(totals) == 1 else jnp.concatenate(totals)
        return each if len(each) == len(lengths) else _sums(each, tuple(lengths))

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:
        if all([self.readable(array) for array in arrays]):
            return list(map(squares_along, map(np.asarray, arrays), axes))
        if not _together(arrays):
            return [None] * len(arrays)
        ends = range(0, len(arrays), _TOGETHER)
        parts = [_squares_along(arrays[i : i + _TOGETHER], tuple(axes[i : i + _TOGETHER])) for i in ends]
        return [ended(total) for part in parts for total in part]

    def squares_in_units(
        self, arrays: list[Array], axes: list[Any], units: Array, rows: list[int]
    ) -> list[Array] | None:
        if not arrays or not _together([*arrays, units]):
            return None
        some = [slice(start, start + _TOGETHER) for start in range(0, len(arrays), _TOGETHER)]
        parts = [_squares_in_units(arrays[i], tuple(axes[i]), units, tuple(rows[i])) for i in some]
        return [ended(total) for part in parts for total in part]

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:  # noqa: ARG002
        if not arrays or not _together(arrays):
            return None if arrays else []
        by: Any = factors
        if isinstance(factors[0], float):
            by = np.asarray(factors, self._wide(arrays))
        elif not any([factor.ndim for factor in factors]):
            by = jnp.stack(list(factors))
        ends = range(0, len(arrays), _TOGETHER)
        return [new for i in ends for new in _scaled(arrays[i : i + _TOGETHER], by[i : i + _TOGETHER])]

    def _wide(self, arrays: list[Array]) -> Any:
        return np.float64 if any(array.dtype in _DOUBLE for array in arrays) else np.float32

    def is_array(self, leaf: Any) -> bool:
        if not isinstance(leaf, (jax.Array, sparse.JAXSparse)):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        return leaf.dtype in _FLOATS or (jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype.name != "float8_e8m0fnu")

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:  # noqa: ARG002
        if isinstance(leaf, sparse.JAXSparse) and not isinstance(leaf, sparse.BCOO):
            return "of the sparse kinds only BCOO is taken, because it can be summed where an index occurs twice"
        return None

    def debug_infs(self) -> bool:
        return bool(jax.config.jax_debug_infs)

    def traced(self, array: Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def readable(self, array: Array) -> bool:
        if self.traced(array) or on_device(array):
            return False
        return bool(array.is_fully_addressable or array.is_fully_replicated)  # of which each process has a copy

    def pieces(self, array: Array) -> Iterable[Array] | None:
        return super().pieces(array) if self.processes.unsharded(array) else None

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, np.floating):  # which JAX does not promote
            array, rebuild = self.stored(leaf.astype(jnp.float32))
            return array, lambda new: rebuild(new).astype(leaf.dtype)
        if isinstance(leaf, sparse.BCOO):
            # Repeated entries are summed in float32; the number of stored entries stays the same, as jit needs.
            wide = sparse.BCOO((_within(leaf), leaf.indices), shape=leaf.shape)
            merged = wide.sum_duplicates(nse=leaf.nse)
            return merged.data, lambda new: sparse.BCOO((new, merged.indices), shape=leaf.shape)
        return super().stored(leaf)

    def sparse(self, leaf: Any) -> bool:
        return isinstance(leaf, sparse.BCOO)

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if not self.traced(ok):  # on an accelerator: outside of jit a conditional is compiled at every call
            return super().cond(ok, usual, rare)
        return list(jax.lax.cond(ok, usual, rare))

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return ended(jnp.sum(array, axes))

    def unless_one(self, factor: Array, arrays: list[Array], change: Callable[[], list[Array]]) -> list[Array]:
        if not self.traced(factor):
            return change()
        # Compiled, donated gradients are not written again where ok is true; a conditional copies them.
        ok = jnp.all(factor == 1)
        return [jnp.where(ok, old, new) for old, new in zip(arrays, change(), strict=True)]

    def barrier(self, array: Array) -> Array:
        # XLA computes again for each leaf what it can move there, and takes minutes to compile that. It moves
        # nothing out of a conditional, and removes one whose branches are equal.
        if not self.traced(array):
            return array
        number = array.astype(jnp.float32) if array.dtype == bool else array
        found = jax.lax.cond(jnp.all(number > 0), lambda: number, lambda: number * (1 + (number - number)))
        return found if number is array else found > 0

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:
        quiet = super().quiet(first)
        if jax.config.jax_numpy_dtype_promotion == "standard" and jax.config.jax_numpy_rank_promotion == "allow":
            return quiet
        # These are for the user's own code: here dtypes and ranks are promoted on purpose.
        return both(quiet, both(jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")))

    def detached(self, array: Array) -> Array:
        return jax.lax.stop_gradient(array) if self.traced(array) else array

    def to_device_of(self, other: Array, array: Array) -> Array:
        if self.traced(array) or self.traced(other) or array.devices() == other.devices():
            return array
        mesh = isinstance(other.sharding, NamedSharding)
        return jax.device_put(array, NamedSharding(other.sharding.mesh, PartitionSpec()) if mesh else other.sharding)


BACKEND = _JAX(namespace)
for _node in NODES:
    jax.tree_util.register_pytree_node(*_node)
