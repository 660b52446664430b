# SPDX-License-Identifier: MIT
"""JAX arrays, tracers and BCOO matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from uniclip.backends import jax_axes
from uniclip.backends.base import HOST, NODES, TRACED, Array, Axes, Backend, Blocks, Stored, both, sum_dtype, unchanged
from uniclip.backends.host import HIGH, LOW, few, squares, squares_of, sums_of
from uniclip.backends.jax_reductions import REDUCTIONS, ended, on_device
from uniclip.backends.numpy import BACKEND as DEFAULT


def _abs(x: Array, /) -> Array:
    """Return the modulus, with derivative 0 at 0 (JAX's own is 1 there)."""
    return x * jnp.sign(x) if jnp.isdtype(x.dtype, "real floating") else jnp.abs(x)


def _clip(x: Array, /, min: Any = None, max: Any = None) -> Array:  # noqa: A002 - the standard's names
    """Clip, with derivative 1 on the bounds too (JAX's own is 1/2 there)."""
    clipped = jnp.clip(x, min, max)
    return jnp.where(clipped == x, x, clipped)


namespace = SimpleNamespace(**(vars(jnp) | REDUCTIONS | {"abs": _abs, "clip": _clip}))


def _rows(leaf: sparse.BCOO, factors: Array) -> Array:
    """Return for each stored row the factor of its row, which `sum_duplicates` puts in the order of indices."""
    bounds = jnp.asarray(leaf.shape[: leaf.n_sparse])
    inside = jnp.all(leaf.indices < bounds, axis=-1, keepdims=True)
    indices = jnp.where(inside, leaf.indices, bounds)
    _, row = jnp.unique(indices, axis=0, return_inverse=True, size=leaf.nse, fill_value=bounds)
    return factors[jnp.reshape(row, (-1,))]


def _within(leaf: sparse.BCOO) -> Array:
    """Return the data, float32 or wider, with 0 for padding entries, whose index is beyond the shape."""
    bounds = jnp.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    data = leaf.data.astype(sum_dtype(jnp, leaf.dtype))
    return jnp.where(jnp.expand_dims(inside, range(inside.ndim, data.ndim)), data, 0)


_FLOATS = {jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")}


_DOUBLE = {jnp.dtype("float64"), jnp.dtype("complex128")}
_SINGLE = {jnp.dtype(name) for name in ("float16", "bfloat16", "float32")}
_LONG = 2**11
"""The largest number of entries that compiled code adds in float64 in no longer than in float32."""
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


@_compiled
def _squares(arrays: list[Array]) -> Array:
    """Return the sum of squares of each array, in its precision."""
    return jnp.stack([jnp.sum(jnp.square(array.astype(jnp.result_type(jnp.float32, array.dtype)))) for array in arrays])


@_compiled
def _copied(arrays: list[Array]) -> list[Array]:
    """Return copies."""
    return list(map(jnp.copy, arrays))


@partial(jax.jit, static_argnums=(1, 2))
def _totals(arrays: list[Array], p: float, axes: tuple[Axes, ...], units: Any) -> list[Array]:
    """Return ``Σ|x/unit|ᵖ`` of each array along its axes."""
    units = [None] * len(arrays) if units is None else units
    return [BACKEND.total(array, p, *some) for array, *some in zip(arrays, axes, units, strict=True)]


@partial(jax.jit, static_argnums=1)
def _sums(totals: Array, sizes: tuple[int, ...]) -> Array:
    """Return the sum of each group of totals."""
    ends = np.cumsum(sizes)
    return jnp.stack([jnp.sum(totals[end - size : end]) for end, size in zip(ends, sizes, strict=True)])


@_compiled
def _scaled(arrays: list[Array], factors: Any) -> list[Array]:
    return [_product(array, factors[number]) for number, array in enumerate(arrays)]


def _product(array: Array, factor: Array) -> Array:
    """Return a product in the wider of two dtypes, also where the user's code may not mix them."""
    if jnp.iscomplexobj(array):
        return array * factor.astype(array.dtype)
    return (array.astype(factor.dtype) * factor).astype(array.dtype)


class _JAX(Backend):
    processes = jax_axes.Devices()

    def kind(self, leaf: Any) -> Any:
        array = getattr(leaf, "data", leaf) if isinstance(leaf, sparse.JAXSparse) else leaf
        place = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
        return type(leaf), type(array), getattr(leaf, "dtype", None), place

    def state(self, arrays: list[Array]) -> tuple[bool, bool, bool]:
        return *super().state(arrays)[:2], False  # derivatives are traced

    def doubles(self, arrays: list[Array]) -> bool:
        return jax.default_backend() != "tpu"  # whose float64 has the exponents of float32

    def double(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True) if self.doubles([]) else nullcontext()

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

    def squares(self, mode: int, arrays: list[Array], lengths: list[int]) -> Array | None:
        if mode == TRACED or not _together(arrays):
            return None
        if mode == HOST:
            if few(arrays, sum([array.size for array in arrays])) or any([a.dtype not in _SINGLE for a in arrays]):
                return squares(list(map(np.asarray, arrays)), lengths)
            totals = np.concatenate([np.asarray(_squares(some)) for some in _in_parts(arrays)]).astype(np.float64)
            odd = np.flatnonzero(~((totals > LOW) & (totals < HIGH)))
            totals[odd] = [squares_of(np.asarray(arrays[number])) for number in odd]
            return np.array(sums_of(totals.tolist(), lengths))
        each = jnp.stack([total for some in _in_parts(arrays) for total in _totals(some, 2, (None,) * len(some), None)])
        return ended(each if len(each) == len(lengths) else _sums(each, tuple(lengths)))

    def sums(self, mode: int, arrays: list[Array], p: float, axes: list[Axes], units: Any, blocks: Blocks) -> list[Any]:
        if mode == HOST:
            return DEFAULT.sums(mode, list(map(np.asarray, arrays)), p, axes, units, blocks)
        if mode == TRACED and p == 2 and units is None:
            return self.repaired(arrays, axes, blocks, self._short)
        if mode == TRACED or not _together([*arrays, *(units or ())]):
            return super().sums(mode, arrays, p, axes, units, blocks)
        ends = [slice(start, start + _TOGETHER) for start in range(0, len(arrays), _TOGETHER)]
        parts = [_totals(arrays[i], p, tuple(axes[i]), None if units is None else list(units[i])) for i in ends]
        return [ended(total) for part in parts for total in part]

    def _short(self, array: Array) -> Array | None:
        """Return the float32 sum of squares of a long array: XLA's loop for float64 takes up to twice as long."""
        long = (
            all([type(n) is int for n in array.shape])
            and array.size > _LONG
            and array.dtype in _SINGLE
            and jax.device_count() == 1
            and not self.debug_infs()
        )
        return jnp.sum(jnp.square(array.astype(jnp.float32))) if long else None

    def pieces(self, array: Array) -> Iterable[Array] | None:
        return None  # a compiler makes no copy

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool) -> list[Array]:
        numbers = not any([hasattr(factor, "shape") for factor in factors])
        if in_place or (zero and not (numbers and all(factors))) or not _together(arrays):
            return super().scaled(arrays, factors, in_place=in_place, zero=zero)
        if numbers:
            by: Any = np.asarray(factors, np.float64 if any(array.dtype in _DOUBLE for array in arrays) else np.float32)
        else:
            by = [self._operand(*pair) for pair in zip(arrays, factors, strict=True)]
            if not _together(by) or any([jnp.iscomplexobj(array) for array in arrays]):
                return super().scaled(arrays, by, in_place=False, zero=zero)
        ends = range(0, len(arrays), _TOGETHER)
        return [new for i in ends for new in _scaled(arrays[i : i + _TOGETHER], by[i : i + _TOGETHER])]

    def one_by_one(self) -> bool:
        return True

    def is_array(self, leaf: Any) -> bool:
        if not isinstance(leaf, (jax.Array, sparse.JAXSparse)):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        return leaf.dtype in _FLOATS or (jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype.name != "float8_e8m0fnu")

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:
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

    def stored(self, leaf: Any, *, in_place: bool) -> Stored | None:
        if leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, np.floating):  # which JAX does not promote
            wide = leaf.astype(jnp.float32)
            inner = self.stored(wide, in_place=in_place) or Stored(wide, unchanged)
            return inner._replace(back=lambda new: inner.back(new).astype(leaf.dtype))
        if not isinstance(leaf, sparse.BCOO):
            return None

        def of(new: Array) -> Any:
            return sparse.BCOO((new, leaf.indices), shape=leaf.shape)

        # Repeated entries are summed in float32; the number of stored entries stays the same, as jit needs.
        return Stored(leaf.data, of, False, lambda new: self.coalesced(of(new)).data, partial(_rows, leaf))

    def coalesced(self, leaf: Any) -> Any:
        if not isinstance(leaf, sparse.BCOO):
            return leaf
        return sparse.BCOO((_within(leaf), leaf.indices), shape=leaf.shape).sum_duplicates(nse=leaf.nse)

    def sparse(self, leaf: Any) -> bool:
        return isinstance(leaf, sparse.BCOO)

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if not self.traced(ok):  # on an accelerator: outside of jit a conditional is compiled at every call
            return super().cond(ok, usual, rare)
        return list(jax.lax.cond(ok, usual, rare))

    def unless_one(self, factor: Array, arrays: list[Array], change: Callable[[], list[Array]]) -> list[Array]:
        if not self.traced(factor):
            return change()
        # Compiled, donated gradients are not written again where ok is true; a conditional copies them.
        ok = jnp.all(factor == 1)
        return [jnp.where(ok, old, new) for old, new in zip(arrays, change(), strict=True)]

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
