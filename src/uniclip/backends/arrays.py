# SPDX-License-Identifier: MIT
"""Functions of arrays of any library, written with the hooks of its backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from uniclip.backends.base import Array, cast

if TYPE_CHECKING:
    from uniclip.backends.base import Backend


View: TypeAlias = np.ndarray[Any, Any]
"""An array of NumPy that stands for the memory of one of any framework."""


def stacked(backend: Backend, arrays: list[Array]) -> Array:
    """Return arrays of one shape stacked along a new first axis, in the widest of their dtypes."""
    xp = backend.xp
    if all([isinstance(array, np.ndarray) for array in arrays]):
        return np.array(arrays)  # takes half as long as np.stack
    if len(arrays) == 1:
        return xp.expand_dims(arrays[0], axis=0)
    dtype = xp.result_type(*{array.dtype for array in arrays})
    return xp.stack([cast(xp, backend.to_device_of(arrays[0], array), dtype) for array in arrays])


def rows_of(backend: Backend, array: Array) -> list[Array]:
    """Return the rows of an array, taken apart by a single operation where there is one."""
    if isinstance(array, np.ndarray):
        return [array[row, ...] for row in range(array.shape[0])]
    if backend.traced(array):
        return backend.apart(array)
    unstack = getattr(backend.xp, "unstack", None)
    return [array[row, ...] for row in range(array.shape[0])] if unstack is None else list(unstack(array))


def all_of(backend: Backend, flags: list[Array]) -> Array:
    """Return whether all of the boolean 0-d arrays are true."""
    if len(flags) == 1:
        return flags[0]
    if not flags:
        return backend.xp.asarray(True)
    return backend.xp.all(stacked(backend, flags))


def spread(backend: Backend, value: Array, array: Array, axes: tuple[int, ...] | None) -> Array:
    """Return a norm's value with the device and dimensions of the array."""
    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = backend.xp.expand_dims(value, axis=axis)
    return value


def broadcasts(shape: Any, to: Any, *, one: bool = True) -> bool:
    """Whether an array of ``shape`` broadcasts to shape ``to``, as far as they are known."""
    if _unknown(shape, to):
        return True
    pairs = zip(reversed(tuple(shape)), reversed(tuple(to)), strict=False)
    return len(shape) <= len(to) and all(m == n or None in (m, n) or (one and m == 1) for m, n in pairs)


def same_shape(shape: Any, other: Any) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return _unknown(shape, other) or (len(shape) == len(other) and broadcasts(shape, other, one=False))


def _unknown(*shapes: Any) -> bool:
    return None in {getattr(shape, "rank", 0) for shape in shapes}


def refuse_shape(name: str, array: Any, norms: Any) -> None:
    """Refuse limits, or a given norm, whose shape does not fit the norms."""
    if len(array.shape) and not broadcasts(array.shape, norms.shape):
        shapes = f"{tuple(array.shape)} does not fit norms of shape {tuple(norms.shape)}"
        msg = f"a {name} of shape {shapes}; give one number"
        raise ValueError(msg)


def overlaps_itself(view: View) -> bool:
    """Whether several entries may share memory, as those of a broadcast array do."""
    end = view.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < end:
            return view.size > 0
        end += stride * (n - 1)
    return False


def overlapping(views: dict[int, View]) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each array whose stretch of memory overlaps that of one before: the smaller one first."""
    last, end = 0, 0
    for start, stop, number in sorted([(*byte_bounds(view), number) for number, view in views.items()]):
        if start < end:
            yield min(last, number), max(last, number)
        if stop > end:
            last, end = number, stop
