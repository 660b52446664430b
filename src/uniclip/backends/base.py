# SPDX-License-Identifier: MIT
"""What the core needs of a framework: an array API namespace, and hooks with defaults written in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from uniclip.backends.memory import InPlace
from uniclip.backends.processes import Processes

Array: TypeAlias = Any
Rebuild: TypeAlias = Callable[[Array], Any]

NODES: list[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]]] = []
"""Classes of uniclip that pytree libraries open, with how to take them apart and rebuild them."""
PIECE = 2**17
"""How many entries of a large array are processed at a time, to fit a cache."""
_BLOCK = 16
"""How many entries are added in a row; with so few, libraries that add sequentially lose no accuracy."""


class Backend:
    """Any array API library; a framework that needs more overrides hooks.

    Parameters
    ----------
    xp : module
        The array API namespace.
    """

    in_place = InPlace()
    processes = Processes()
    output_axis = -1
    """The axis of a weight along which its output units lie."""
    static_shapes = True
    """Whether lengths that are known in traced code can be told from others: they are numbers."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    # What a leaf holds.

    def is_array(self, leaf: Any) -> bool:
        """Whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return not self.xp.isdtype(leaf.dtype, "bool")

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:  # noqa: ARG002
        """Return why an array cannot be measured, or be a ``gradient``, and what to pass instead; else ``None``."""
        return None

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        """Return the dense array of the leaf's stored values, and a function that restores the leaf's kind."""
        return leaf, unchanged

    def sparse(self, leaf: Any) -> bool:  # noqa: ARG002
        """Whether the leaf stores only some of its entries or rows."""
        return False

    def size(self, leaf: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the number of entries of the leaf along ``axes``, including those that are not stored."""
        shape = leaf.shape
        return math.prod(shape if axes is None else [shape[axis] for axis in axes])  # not a generator: torch.compile

    # Where arrays are, and whether they have values.

    def traced(self, array: Array) -> bool:  # noqa: ARG002
        """Whether the array has no value yet: it is a tracer in code that is compiled or transformed."""
        return False

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        """Whether Python can branch on the array's value at no cost (not traced, lazy or on a device)."""
        return False

    def device(self, array: Array) -> Any:  # noqa: ARG002
        """Return the device of an array (or of ``None``), for `from_host`."""
        return None

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:  # noqa: ARG002
        """Return a NumPy array as an array of this library."""
        return self.xp.asarray(array)

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        """Return the values of small arrays as NumPy arrays, from any device, read together."""
        return list(map(np.asarray, arrays))

    def to_device_of(self, other: Array, array: Array) -> Array:  # noqa: ARG002
        """Return ``array`` on the device of ``other``."""
        return array

    def detached(self, array: Array) -> Array:
        """Return an array to keep, detached from its computation."""
        return array.persist() if hasattr(array, "persist") else array  # a lazy one would hold all gradients

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays to read later, copied on their device if they may be overwritten."""
        return list(map(self.detached, arrays))

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Silence NumPy's floating-point warnings, and create arrays on the device of the first gradient."""
        return np.errstate(all="ignore")

    def debug_infs(self) -> bool:
        """Whether a debugger stops at ∞, so that not even squares may overflow."""
        return False

    # For speed or memory: the defaults leave the work to the algorithm, which is written in the array API.

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:  # noqa: ARG002
        """Whether a quick check shows that all are dense floating-point arrays of this backend without special cases.

        Without ``gradient`` they may be parameters.
        """
        return False

    def apart(self, leaves: list[Any]) -> bool:  # noqa: ARG002
        """Whether a quick check shows that ``leaves``, which are plain, are writable and share no memory."""
        return False

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:  # noqa: ARG002
        """Return a NumPy array of the same values, ``None`` if they are not readable or a derivative is recorded."""
        return None

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:  # noqa: ARG002
        """Return ``Σ|x|²`` over all entries of each group of arrays, ``(k,)``; ``None`` if there is no fast path.

        The arrays of a group are consecutive, and the lengths of the groups are given. The result is a NumPy array
        where the host can read it, in the dtype of the norm or a wider one in which no square of the arrays' own
        dtype overflows or underflows.
        """
        return None

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:  # noqa: ARG002
        """Return ``Σ|x|²`` of each array along its axes, a NumPy array where the host can read it.

        ``None`` for an array without a fast path; as wide as the result of `squares`.
        """
        return [None] * len(arrays)

    def squares_in_units(
        self,
        arrays: list[Array],  # noqa: ARG002
        axes: list[Any],  # noqa: ARG002
        units: Array,  # noqa: ARG002
        rows: list[int],  # noqa: ARG002
    ) -> list[Array] | None:
        """Return ``Σ|x/unit|²`` of each array along its axes (``None`` for all of them), as wide as the units.

        The unit of each array is a row of ``units``, whose number is given. ``None`` if there is no fast path.
        """
        return None

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:  # noqa: ARG002
        """Return each array multiplied by its factor, in its own dtype; ``None`` if there is no fast path.

        The factors are all Python numbers, all arrays of this library, or, where the host can read them, all NumPy
        arrays. Factors with dimensions broadcast against their array, and have its dtype.
        """
        return None

    def pieces(self, array: Array) -> Iterable[Array] | None:
        """Split a large array into vectors, in any order of its entries; ``None`` if it is measured as a whole.

        This avoids a wide copy of all of it.
        """
        xp = self.xp
        narrow = xp.result_type(array.dtype, xp.float32) != array.dtype
        if not narrow or self.traced(array) or math.prod(array.shape) <= PIECE:
            return None
        flat = xp.reshape(array, (-1,))
        return (flat[rows] for rows in row_slices(flat.shape))

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        """Return the sum along ``axes``, added in blocks, as sequential sums lose small entries."""
        for axis in range(array.ndim - 1, -1, -1):
            if axes is None or axis in axes:
                array = _sum_in_blocks(self.xp, array, axis)
        return array

    # For code that is compiled.

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) is true, else ``rare()``."""
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]

    def unless_one(self, factor: Array, arrays: list[Array], change: Callable[[], list[Array]]) -> list[Array]:  # noqa: ARG002
        """Return ``change()``, which may be skipped where all of ``factor`` is 1, as it then equals ``arrays``."""
        return change()

    def barrier(self, array: Array) -> Array:
        """Return an array as it is, computed once although every leaf uses it."""
        return array


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts."""
    with one, other:
        yield


def in_groups(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    """Return consecutive values as groups."""
    return [values[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def unchanged(array: Array) -> Array:
    """Return an array as it is."""
    return array


def sum_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype for sums: float32 or wider, integers as they are."""
    return dtype if xp.isdtype(dtype, "integral") else xp.result_type(dtype, xp.float32)


def row_slices(shape: tuple[int, ...]) -> list[slice]:
    """Return slices of the first axis that cut a large array into pieces."""
    step = max(1, PIECE * shape[0] // math.prod(shape))
    return [slice(start, start + step) for start in range(0, shape[0], step)]


def _sum_in_blocks(xp: Any, array: Array, axis: int) -> Array:
    while array.shape[axis] > _BLOCK:
        before, n, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
        whole = n - n % _BLOCK
        start, rest = (
            array[(slice(None),) * axis + (part,) + (slice(None),) * len(after)]
            for part in (slice(0, whole), slice(whole, n))
        )
        blocks = xp.reshape(start, (*before, whole // _BLOCK, _BLOCK, *after))
        array = xp.concat([xp.sum(blocks, axis=axis + 1), rest], axis=axis)
    return xp.sum(array, axis=axis)
