# SPDX-License-Identifier: MIT
"""The numbers of a saved state: as lists, as NumPy arrays, and as arrays like those of a new state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from uniclip.backends import Backend, backend_of


def to_lists(array: Any) -> Any:
    """Return the values of an array as a number or nested lists."""
    return numpy_of(array).tolist()


def numpy_of(array: Any) -> np.ndarray[Any, Any]:
    """Return the values of an array of any library as one of NumPy."""
    backend = backend_of(array)
    return np.asarray(array) if backend is None else backend.to_host([array])[0]


def array_of(value: Any) -> Any:
    """Return values as a new array."""
    backend = backend_of(value)
    if backend is None:
        return np.array(to_lists(value))
    array = backend.detach(value)
    return array.clone() if hasattr(array, "clone") else copy.copy(array)


def array_like(backend: Backend, name: str, value: Any, like: Any) -> Any:
    """Return values as an array like another one."""
    if 0 == math.prod(value.shape) == math.prod(like.shape):  # empty lists have neither shape nor dtype
        return like
    if tuple(value.shape) != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {tuple(value.shape)}, but here it is {tuple(like.shape)}: load the state of "
            "the same rule on gradients of the same shapes"
        )
        raise ValueError(msg)
    value = value if backend_of(value) is backend else np.asarray(to_lists(value))
    with backend.quiet(like):
        return backend.to_device_of(like, backend.xp.asarray(value, dtype=like.dtype))
