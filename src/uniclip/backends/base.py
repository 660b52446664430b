# SPDX-License-Identifier: MIT
"""What the core asks of a framework: an array API namespace, and hooks with defaults written in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
Rebuild: TypeAlias = Callable[[Array], Any]


class Backend:
    """Any array API library; a framework that needs more overrides a hook.

    Parameters
    ----------
    xp : module
        The array API namespace.
    """

    output_axis = -1
    """The axis of a weight that counts its output units."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def is_array(self, leaf: Any) -> bool:  # noqa: ARG002
        """Whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return True

    def advice(self, leaf: Any) -> str | None:  # noqa: ARG002
        """Return what to pass instead, if ``leaf`` can hold a gradient but is surely not one."""
        return None

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        """Whether Python can branch on the array's value at no cost (not traced, lazy or on a device)."""
        return False

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        """Return the dense array of the leaf's stored values and the way back to the leaf's own kind."""
        return leaf, lambda array: array

    def size(self, leaf: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the number of entries of the leaf along ``axes``, those that are not stored too."""
        shape = leaf.shape
        return math.prod(shape if axes is None else (shape[axis] for axis in axes))

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) holds, else ``rare()``."""
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]

    def stop_gradient(self, array: Array) -> Array:
        """Return the array as a constant, cut off from derivatives."""
        return array

    def to_device_of(self, other: Array, array: Array) -> Array:  # noqa: ARG002
        """Return ``array`` on the device of ``other``."""
        return array

    def quiet(self) -> AbstractContextManager[Any]:
        """Silence the floating-point warnings of libraries that compute, or convert, with NumPy."""
        return np.errstate(all="ignore")
