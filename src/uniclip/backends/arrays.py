# SPDX-License-Identifier: MIT
"""Functions of arrays of any library, written with the hooks of its backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from uniclip.backends.base import PIECE, Array

if TYPE_CHECKING:
    from uniclip.backends.base import Backend


def together(backend: Backend, arrays: list[Array]) -> list[Array]:
    """Return small arrays as NumPy arrays if the host can read all of them at no cost, else as the library's."""
    views = [array if isinstance(array, np.ndarray) else _small_view(backend, array) for array in arrays]
    if all(view is not None for view in views):
        return views
    device = backend.device(next(array for array in arrays if not isinstance(array, np.ndarray)))
    return [backend.from_host(one, device) if isinstance(one, np.ndarray) else one for one in arrays]


def _small_view(backend: Backend, array: Array) -> np.ndarray[Any, Any] | None:
    return None if backend.traced(array) or math.prod(array.shape) > PIECE else backend.viewed(array)


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
    plain = isinstance(array, np.ndarray) or backend.traced(array)
    unstack = None if plain else getattr(backend.xp, "unstack", None)
    return [array[row, ...] for row in range(array.shape[0])] if unstack is None else list(unstack(array))


def all_of(backend: Backend, flags: list[Array]) -> Array:
    """Return whether all of the boolean 0-d arrays are true."""
    if len(flags) == 1:
        return flags[0]
    if not flags:
        return backend.xp.asarray(True)  # noqa: FBT003
    return backend.xp.all(stacked(backend, flags))


def spread(backend: Backend, value: Array, array: Array, axes: tuple[int, ...] | None, dtype: Any = None) -> Array:
    """Return a norm's value with the device and dimensions of the array, at least in its wide precision."""
    xp = backend.xp
    dtype = xp.result_type(array.dtype, xp.float32 if dtype is None else dtype)
    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = xp.expand_dims(value, axis=axis)
    return cast(xp, value, dtype)


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return the array in ``dtype``, or itself if it already has it."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def upcast(xp: Any, array: Array) -> Array:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def finite_or_zero(xp: Any, array: Array) -> Array:
    """Return the array with 0 for each entry that is not finite."""
    return xp.where(xp.isfinite(array), array, 0.0)
