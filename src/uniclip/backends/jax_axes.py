# SPDX-License-Identifier: MIT
"""Reduce values along named axes of JAX: those of ``jax.shard_map``, ``jax.pmap`` and ``jax.vmap``.

In ``jax.shard_map`` the type of an array tells along which axes it varies from device to device; along others it is the
same on all devices. With ``check_vma=False``, in ``jax.pmap`` and in ``jax.vmap`` types tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from uniclip._repr import short
from uniclip.backends.base import Array
from uniclip.backends.processes import Processes, Reduce

Names = tuple[Any, ...]


def names_of(all_reduce: Any) -> Names | None:
    """Return the axes with a name, ``None`` if there is none."""
    names = (all_reduce,) if isinstance(all_reduce, str) else all_reduce
    fits = isinstance(names, tuple) and len(names) > 0 and all(isinstance(name, str) for name in names)
    return names if fits else None


def varying(array: Array) -> frozenset[Any]:
    """Return the axes along which a value is known to differ from device to device."""
    aval = getattr(array, "aval", None)
    axes = getattr(aval, "manual_axis_type", None)  # before JAX 0.10 ``vma``
    found: frozenset[Any] = getattr(aval, "vma", frozenset()) if axes is None else axes.varying
    return frozenset(found)


class Devices(Processes):
    """Named axes join what their devices hold, and arrays may be sharded over devices."""

    joins_by = "the name of an axis of jax.shard_map or jax.pmap, a tuple of such names, or a function of (array, op)"

    def reducer(self, all_reduce: Any) -> Reduce | None:
        names = names_of(all_reduce)
        return None if names is None else partial(_reduced, names)

    def copies(
        self, arrays: list[Array], all_reduce: Any, shared: list[bool] | None, place: Callable[[int], str]
    ) -> list[int] | None:
        names = () if all_reduce is None else names_of(all_reduce)
        counts = [] if names is None else _copies(arrays, names, shared, place)
        return None if all(count == 1 for count in counts) else counts

    def varying(self, arrays: list[Array]) -> Hashable:
        return frozenset().union(*[varying(array) for array in arrays if isinstance(array, jax.core.Tracer)])

    def varied(self, array: Array, all_reduce: Any) -> Array:
        names = names_of(all_reduce) or ()
        missing = tuple([name for name in names if name not in varying(array) and _known(name)])
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    def unsharded(self, array: Array) -> bool:
        if not isinstance(array, jax.core.Tracer):
            return bool(array.sharding.is_fully_replicated)
        # A tracer shows nothing of Auto axes, and sharded leaves would be gathered to be joined. Joining none
        # takes XLA up to five times as long, for a thousand leaves: so they are joined on a single device.
        spec = getattr(getattr(array.aval, "sharding", None), "spec", ())
        return jax.device_count() == 1 and all(axis is None for axis in spec)

    def rank(self) -> int:
        return int(jax.process_index())


def _copies(arrays: Sequence[Array], names: Names, shared: list[bool] | None, place: Callable[[int], str]) -> list[int]:
    """Return how many devices along the axes hold each array; refuse arrays for which it is unknown.

    Raises
    ------
    ValueError
        If there is no such axis here.
    ValueError
        If an array varies along an axis without a name, or neither types nor ``shared`` tell which leaves are copies.
    """
    sizes = {name: _size(name) for name in names}
    unknown = [name for name in names if not _known(name)]
    if unknown and shared is None and arrays:
        raise ValueError(_untold(unknown[0], place))
    if shared is None:
        shared = [False] * len(arrays)

    def count(number: int, array: Array, copy: bool) -> int:
        axes = varying(array)
        more = sorted(str(name) for name in axes.difference(names) if _size(name) > 1)
        if more:
            raise ValueError(_unnamed(names, more, place(number)))
        return math.prod(size for name, size in sizes.items() if copy or (name not in axes and name not in unknown))

    return [count(*some) for some in zip(range(len(arrays)), arrays, shared, strict=True)]


def _size(name: Any) -> int:
    """Return the number of devices along an axis."""
    try:
        size: int = jax.lax.psum(1, name)
    except NameError as error:
        msg = (
            f"all_reduce names the axis {short(name)}, and there is none here: call it inside of jax.shard_map or "
            "jax.pmap, with that axis; under jax.jit, where arrays are whole, leave all_reduce out"
        )
        raise ValueError(msg) from error
    return size


def _known(name: Any) -> bool:
    """Whether types tell what varies along an axis: if so, the number of a device along it surely varies."""
    return name in varying(jax.lax.axis_index(name))


def _untold(name: Any, place: Callable[[int], str]) -> str:
    return (
        f"all_reduce={name!r}: in jax.pmap, and in jax.shard_map with check_vma=False, it cannot be known whether "
        f"{place(0)}, for one, is a part of the gradient or the same on each device of the axis: pass "
        "shared=lambda path, leaf: False if all leaves are parts, else a function that returns True for the others "
        "(or leave out check_vma=False); to_optax calls all_reduce axis_name"
    )


def _unnamed(names: Names, more: list[str], where: str) -> str:
    given = short(names if len(names) > 1 else names[0]) if names else None
    every = (*names, *more)
    return (
        f"all_reduce={given}, but {where} varies along the axis {more[0]!r} of jax.shard_map: pass "
        f"all_reduce={short(every if len(every) > 1 else every[0])} if each device holds a part of it; add the "
        "gradients first, by jax.lax.psum or pmean, if they are to be added; and if each device clips its own, pass a "
        "function of (array, op), such as lambda array, op: array, that joins them along no more axes; "
        "to_optax calls all_reduce axis_name"
    )


def _reduced(names: Names, array: Array, op: str) -> Array:
    """Return the sum or the maximum over devices; a value that is the same on n devices counts n times."""
    axes = varying(array)
    over = tuple(name for name in names if name in axes or not _known(name))  # JAX accepts no others
    if op == "max":
        return _largest(over, array) if over else array
    times = math.prod(_size(name) for name in names if name not in over)
    total = jax.lax.psum(array, over) if over else array
    return total if times == 1 else total * times


# JAX has no types that a checker understands.
_with_slope: Callable[[Callable[..., Any]], Any] = partial(jax.custom_jvp, nondiff_argnums=(0,))


@_with_slope
def _largest(names: Names, array: Array) -> Array:
    """Return the maximum along axes, for which JAX has no derivative."""
    return jax.lax.pmax(array, names)


def _slope(names: Names, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Return the derivative: that of the largest value, or the mean of those of several."""
    [array], [tangent] = primals, tangents
    top = _largest(names, array)
    mine = jnp.equal(array, top).astype(array.dtype)
    return top, jax.lax.psum(mine / jax.lax.psum(mine, names) * tangent, names)


_largest.defjvp(_slope)
