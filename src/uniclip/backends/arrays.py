# SPDX-License-Identifier: MIT
"""Functions of arrays of any library, written with the hooks of its backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from uniclip.backends.base import NUMPY, Array

if TYPE_CHECKING:
    from uniclip.backends.base import Backend


View: TypeAlias = np.ndarray[Any, Any]
"""An array of NumPy that stands for the memory of one of any framework."""


def spread(backend: Backend, value: Array, array: Array, axes: tuple[int, ...] | None) -> Array:
    """Return a norm's value with the dimensions of the array;
    that of a whole array fits as it is.
    """
    if axes is None:
        return value
    if isinstance(value, NUMPY):
        return value.reshape([1 if axis in axes else n for axis, n in enumerate(array.shape)])
    value = backend.to_device_of(array, value)
    for axis in axes:
        value = backend.xp.expand_dims(value, axis=axis)
    return value


def from_numpy(backend: Backend, array: Any, like: Array) -> Array:
    """Return values of NumPy as a plain array of a library, on the device of another one."""
    return backend.from_host(np.asarray(array), backend.device(like))


def surely(backend: Backend, flag: Array) -> bool:
    """Whether a flag can be read, and is true."""
    return backend.readable(flag) and bool(flag)


def surely_ordered(backend: Backend, low: Array, high: Array) -> bool:
    """Whether arrays are in order, as far as both can be read."""
    return not (backend.readable(low) and backend.readable(high)) or bool(
        backend.xp.all(low <= high)
    )


def broadcasts(shape: Any, to: Any, *, one: bool = True) -> bool:
    """Whether an array of ``shape`` broadcasts to shape ``to``, as far as they are known."""
    if _rank_is_unknown(shape, to):
        return True
    pairs = zip(reversed(tuple(shape)), reversed(tuple(to)), strict=False)
    return len(shape) <= len(to) and all(
        m == n or None in (m, n) or (one and m == 1) for m, n in pairs
    )


def same_shape(shape: Any, other: Any) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return _rank_is_unknown(shape, other) or (
        len(shape) == len(other) and broadcasts(shape, other, one=False)
    )


def _rank_is_unknown(*shapes: Any) -> bool:
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
    for stride, n in sorted(
        (abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1
    ):
        if stride < end:
            return view.size > 0
        end += stride * (n - 1)
    return False


def overlapping(views: dict[int, View]) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each array whose stretch of memory overlaps that of one before:
    the smaller one first.
    """
    last, end = 0, 0
    for start, stop, number in sorted(
        [(*byte_bounds(view), number) for number, view in views.items()]
    ):
        if start < end:
            yield min(last, number), max(last, number)
        if stop > end:
            last, end = number, stop
