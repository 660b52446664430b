# SPDX-License-Identifier: MIT
"""What the core needs of a framework: an array API namespace, and hooks with defaults written in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np

from uniclip._repr import short

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

    output_axis = -1
    """The axis of a weight along which its output units lie."""
    joins_by = "a function of (array, op)"
    """The kinds of ``all_reduce`` that `reducer` accepts."""
    closes_over_symbols = True
    """Whether a branch of `cond` may use arrays from outside whose lengths are unknown in traced code."""
    stacks_traced = False
    """Whether norms with axes are stacked also in traced code, where shapes are numbers."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def is_array(self, leaf: Any) -> bool:  # noqa: ARG002
        """Whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return True

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:  # noqa: ARG002
        """Return why an array cannot be measured, or be a ``gradient``, and what to pass instead; else ``None``."""
        return None

    def traced(self, array: Array) -> bool:  # noqa: ARG002
        """Whether the array has no value yet: it is a tracer in code that is compiled or transformed."""
        return False

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        """Whether Python can branch on the array's value at no cost (not traced, lazy or on a device)."""
        return False

    def watched(self) -> bool:
        """Whether a debugger stops at ∞, so that not even squares may overflow."""
        return False

    def one_pass(self, norm: Array) -> bool:  # noqa: ARG002
        """Whether gradients are multiplied only once, as each multiplication is a pass over memory."""
        return False

    # For speed: the defaults leave the work to the algorithm, which is written in the array API.

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

    def device(self, array: Array) -> Any:  # noqa: ARG002
        """Return the device of an array (or of ``None``), for `from_host`."""
        return None

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:  # noqa: ARG002
        """Return a NumPy array as an array of this library."""
        return self.xp.asarray(array)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return an array's values as a NumPy array, from any device."""
        return np.asarray(array)

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:  # noqa: ARG002
        """Return ``Σ|x|²`` over all entries of each group of arrays, ``(k,)``; ``None`` if there is no fast path.

        The arrays of a group are consecutive, and the lengths of the groups are given. The result is a NumPy array
        where the host can read it, in the dtype of the norm or a wider one in which no square of the arrays' own
        dtype overflows or underflows.
        """
        return None

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:  # noqa: ARG002
        """Return each array multiplied by its factor, in its own dtype; ``None`` if there is no fast path.

        The factors are all Python numbers, all arrays of this library, or, where the host can read them, all NumPy
        arrays. Factors with dimensions broadcast against their array, and have its dtype.
        """
        return None

    def unless_one(self, factor: Array, arrays: list[Array], change: Callable[[], list[Array]]) -> list[Array]:  # noqa: ARG002
        """Return ``change()``, which may be skipped where all of ``factor`` is 1, as it then equals ``arrays``."""
        return change()

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        """Return the dense array of the leaf's stored values, and a function that restores the leaf's kind."""
        return leaf, unchanged

    def sparse(self, leaf: Any) -> bool:
        """Whether the leaf stores only some of its entries or rows."""
        del leaf
        return False

    def large(self, array: Array) -> bool:
        """Whether the array is measured piece by piece, to avoid a wide copy of all of it."""
        xp = self.xp
        narrow = xp.result_type(array.dtype, xp.float32) != array.dtype
        return bool(narrow) and not self.traced(array) and math.prod(array.shape) > PIECE

    def pieces(self, array: Array) -> Iterable[Array]:
        """Split a large ``array`` into pieces, in any order of its entries."""
        flat = self.xp.reshape(array, (-1,))
        return [flat[rows] for rows in row_slices(flat.shape)]

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        """Return the sum along ``axes``, added in blocks, as sequential sums lose small entries."""
        for axis in range(array.ndim - 1, -1, -1):
            if axes is None or axis in axes:
                array = _sum_in_blocks(self.xp, array, axis)
        return array

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:  # noqa: ARG002
        """Return ``Σ|x|²`` of each array along its axes, a NumPy array where the host can read it.

        ``None`` for an array without a fast path; as wide as the result of `squares`.
        """
        return [None] * len(arrays)

    def size(self, leaf: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the number of entries of the leaf along ``axes``, including those that are not stored."""
        shape = leaf.shape
        return math.prod(shape if axes is None else [shape[axis] for axis in axes])  # not a generator: torch.compile

    def kind(self, arrays: list[Array]) -> Hashable:  # noqa: ARG002
        """Return a key: 0-d norms of arrays with equal keys can be stacked."""
        return None

    # For distributed arrays, of which each process holds a part: libraries that have them override all of these.

    def local(self, arrays: list[Array]) -> tuple[list[Array], list[Any] | None]:
        """Return what this process holds of each array, and which part that is (``None`` for a whole array).

        A part has an ``owner``, whose processes together hold the whole array, the number of ``copies`` of each entry
        among them, ``kept(axes)``, the shape of norms of the whole array, and ``embedded`` and ``own``, which convert
        norms of the part to norms of the whole, and back.
        """
        return arrays, None

    def whole(self, like: Array, local: Array) -> Array:  # noqa: ARG002
        """Return a new array of which this process holds ``local``, sharded as ``like`` is."""
        return local

    def summed_whole(self, like: Array, local: Array) -> Array:  # noqa: ARG002
        """Return the sum of ``like`` along its first axis, given the sum of this process's part."""
        return local

    def join_parts(self, owner: Any, array: Array, op: Literal["sum", "max"]) -> Array:
        """Return the sum or maximum over all processes of an owner."""
        raise NotImplementedError

    def covering(self, owners: list[Any]) -> list[Any]:
        """Return as few of the owners as cover all processes of all of them."""
        return owners

    def reducer(self, all_reduce: Any) -> Callable[[Array, Literal["sum", "max"]], Array]:
        """Return a function of ``(array, op)`` that reduces over the parts of a tree."""
        if callable(all_reduce):
            return all_reduce  # type: ignore[no-any-return]
        msg = f"all_reduce must be {self.joins_by} for gradients of this library, got {short(all_reduce)}"
        raise TypeError(msg)

    def copies(
        self,
        arrays: list[Array],  # noqa: ARG002
        all_reduce: Any,  # noqa: ARG002
        shared: list[bool] | None,  # noqa: ARG002
        place: Callable[[int], str],  # noqa: ARG002
    ) -> list[int] | None:
        """Return how many members of ``all_reduce`` hold each array, where the arrays' types tell; ``None`` for one."""
        return None

    def joined_dtype(self, dtype: Any, array: Array) -> Any:  # noqa: ARG002
        """Return the dtype in which sums of a dtype are reduced over processes, on the device of an array."""
        return dtype

    def replicated(self, array: Array, operand: Array) -> Array:  # noqa: ARG002
        """Return an operand, the same in all processes, as one that can be combined with ``array``."""
        return operand

    # For arrays that look whole, although each device holds a part.

    def undivided(self, array: Array) -> bool:  # noqa: ARG002
        """Whether the array is known to be whole on each of its devices, so that others may be copied into it."""
        return True

    def zeros(self, array: Array, axes: tuple[int, ...], dtype: Any) -> Array:
        """Return zeros of the shape of ``array`` without ``axes``, sharded as it is."""
        shape = tuple(n for axis, n in enumerate(array.shape) if axis not in axes)
        return self.to_device_of(array, self.xp.zeros(shape, dtype=dtype))

    # In place: libraries whose arrays are mutable override all three.

    def why_fixed(self, leaf: Any) -> str | None:  # noqa: ARG002
        """Return why the leaf's values cannot be written, ``None`` if they can."""
        return "arrays of this kind never change"

    def memory(self, leaf: Any) -> np.ndarray[Any, Any] | None:  # noqa: ARG002
        """Return a NumPy array of the same memory, ``None`` if unknown."""
        return None

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        """Put ``function(array, *operands)`` in place of ``array``, the stored values of ``leaf``, piece by piece.

        The function is elementwise, and the operands, at least one, broadcast against the array.
        """
        raise NotImplementedError

    def shifted(self, array: Array, power: Array) -> Array:
        """Return ``array · power``, a power of two, nearly always 1; no compiler may merge it with a factor."""
        return array * power

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) is true, else ``rare()``."""
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]

    def once(self, array: Array) -> Array:
        """Return an array as it is, computed once although every leaf uses it."""
        return array

    def detached(self, array: Array) -> Array:
        """Return an array to keep, detached from its computation."""
        return array.persist() if hasattr(array, "persist") else array  # a lazy one would hold all gradients

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays to read later, copied on their device if they may be overwritten."""
        return list(map(self.detached, arrays))

    def fetched(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        """Return the values of many small arrays as NumPy arrays, read together."""
        return list(map(self.to_host, arrays))

    def process(self) -> int:
        """Return the number of this process in a run over several."""
        return 0

    def together(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays as NumPy arrays if the host can read all of them at no cost, else as this library's."""
        views = [array if isinstance(array, np.ndarray) else self._small_view(array) for array in arrays]
        if all(view is not None for view in views):
            return views
        device = self.device(next(array for array in arrays if not isinstance(array, np.ndarray)))
        return [self.from_host(one, device) if isinstance(one, np.ndarray) else one for one in arrays]

    def _small_view(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None if self.traced(array) or math.prod(array.shape) > PIECE else self.viewed(array)

    def stacked(self, arrays: list[Array]) -> Array:
        """Return arrays of one shape stacked along a new first axis, in the widest of their dtypes."""
        xp = self.xp
        if all([isinstance(array, np.ndarray) for array in arrays]):
            return np.stack(arrays)
        if len(arrays) == 1:
            return xp.expand_dims(arrays[0], axis=0)
        dtype = xp.result_type(*{array.dtype for array in arrays})
        return xp.stack([cast(xp, self.to_device_of(arrays[0], array), dtype) for array in arrays])

    def all_of(self, flags: list[Array]) -> Array:
        """Return whether all of the boolean 0-d arrays are true."""
        if len(flags) == 1:
            return flags[0]
        if not flags:
            return self.xp.asarray(True)  # noqa: FBT003
        return self.xp.all(self.stacked(flags))

    def to_device_of(self, other: Array, array: Array) -> Array:  # noqa: ARG002
        """Return ``array`` on the device of ``other``."""
        return array

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Silence NumPy's floating-point warnings, and create arrays on the device of the first gradient."""
        return np.errstate(all="ignore")


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts."""
    with one, other:
        yield


def on_accelerator(self: Backend, norm: Array) -> bool:
    """Implement `Backend.one_pass` for a framework with accelerators, where reading a value takes time."""
    return not self.traced(norm) and not self.readable(norm)


def in_groups(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    """Return consecutive values as groups."""
    return [values[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def unchanged(array: Array) -> Array:
    """Return an array as it is."""
    return array


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return the array in ``dtype``, or itself if it already has it."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def upcast(xp: Any, array: Array) -> Array:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def finite_or_zero(xp: Any, array: Array) -> Array:
    """Return the array with 0 for each entry that is not finite."""
    return xp.where(xp.isfinite(array), array, 0.0)


def spread(backend: Backend, value: Array, array: Array, axes: tuple[int, ...] | None, dtype: Any = None) -> Array:
    """Return a norm's value with the device and dimensions of the array, at least in its wide precision."""
    xp = backend.xp
    dtype = xp.result_type(array.dtype, xp.float32 if dtype is None else dtype)
    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = xp.expand_dims(value, axis=axis)
    return backend.replicated(array, cast(xp, value, dtype))


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
