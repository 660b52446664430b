# SPDX-License-Identifier: MIT
"""What the core asks of a framework: an array API namespace, and hooks with defaults written in it."""

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
"""Classes of uniclip's own that a library of trees is to open, and how it takes them apart and makes them again."""
PIECE = 2**17
"""How many entries of a large array are worked on at a time; they fit a cache."""
_BLOCK = 16
"""How many entries are added in a row; libraries that add one by one lose no more in so few."""


class Backend:
    """Any array API library; a framework that needs more overrides a hook.

    Parameters
    ----------
    xp : module
        The array API namespace.
    """

    output_axis = -1
    """The axis of a weight that counts its output units."""
    joins_by = "a function of (array, op)"
    """What `reducer` takes."""
    closes_over_symbols = True
    """Whether a branch of `cond` may use arrays from outside whose lengths are unknown while code is traced."""
    stacks_traced = False
    """Whether norms with axes are copied into one array in code that is traced, too, where shapes are numbers."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def is_array(self, leaf: Any) -> bool:  # noqa: ARG002
        """Whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return True

    def unfit(self, leaf: Any, *, gradient: bool) -> str | None:  # noqa: ARG002
        """Return why an array cannot be measured, or be a ``gradient``, and what to pass instead; else ``None``."""
        return None

    def traced(self, array: Array) -> bool:  # noqa: ARG002
        """Whether the array has no value yet: it stands for one in code that is being compiled or transformed."""
        return False

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        """Whether Python can branch on the array's value at no cost (not traced, lazy or on a device)."""
        return False

    def watched(self) -> bool:
        """Whether a debugger stops at ∞, so that not even squares may leave the range."""
        return False

    def one_pass(self, norm: Array) -> bool:  # noqa: ARG002
        """Whether gradients are multiplied once: on an accelerator a second time would be one more pass over them."""
        return False

    # For speed: each has a default that leaves the work to the algorithm, which is written in the array API.

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:  # noqa: ARG002
        """Whether a quick look shows that all are dense floating-point arrays of this backend that need no care.

        What is no ``gradient`` may be a parameter.
        """
        return False

    def apart(self, leaves: list[Any]) -> bool:  # noqa: ARG002
        """Whether a quick look shows that ``leaves``, which are plain, can be changed and share no memory."""
        return False

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:  # noqa: ARG002
        """Return a NumPy array of the same values, ``None`` if they are not readable or their derivative counts."""
        return None

    def device(self, array: Array) -> Any:  # noqa: ARG002
        """Return where an array (or ``None``) is, for `from_host`."""
        return None

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:  # noqa: ARG002
        """Return a NumPy array as one of this library."""
        return self.xp.asarray(array)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return an array's values as NumPy's, read from wherever it is."""
        return np.asarray(array)

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:  # noqa: ARG002
        """Return ``Σ|x|²`` over all entries of each group of arrays, ``(k,)``; ``None`` if there is no fast path.

        Arrays of one group follow each other, as many as its length says. The result is a NumPy array where the host
        can read it, of the dtype of the norm or a wider one, in which no square of the arrays' own dtype leaves the
        range.
        """
        return None

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:  # noqa: ARG002
        """Return each array multiplied by its factor, in its own dtype; ``None`` if there is no fast path.

        The factors are all numbers of Python's, all arrays of this library, or, where the host can read them, all
        arrays of NumPy. Those that have dimensions broadcast against their array, and have its dtype.
        """
        return None

    def unless_one(self, factor: Array, arrays: list[Array], change: Callable[[], list[Array]]) -> list[Array]:  # noqa: ARG002
        """Return ``change()``, which may be skipped where all of ``factor`` is 1: there it equals ``arrays``."""
        return change()

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        """Return the dense array of the leaf's stored values and the way back to the leaf's own kind."""
        return leaf, unchanged

    def sparse(self, leaf: Any) -> bool:
        """Whether the leaf stores only some of its entries or rows."""
        del leaf
        return False

    def large(self, array: Array) -> bool:
        """Whether the array is measured piece by piece, so that no wide copy of all of it is made."""
        xp = self.xp
        narrow = xp.result_type(array.dtype, xp.float32) != array.dtype
        return bool(narrow) and not self.traced(array) and math.prod(array.shape) > PIECE

    def pieces(self, array: Array) -> Iterable[Array]:
        """Split a large ``array`` into pieces, in any order of its entries."""
        flat = self.xp.reshape(array, (-1,))
        return [flat[rows] for rows in row_slices(flat.shape)]

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        """Return the sum along ``axes``, added in blocks: one by one, small entries are lost in a large sum."""
        for axis in range(array.ndim - 1, -1, -1):
            if axes is None or axis in axes:
                array = _sum_in_blocks(self.xp, array, axis)
        return array

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:  # noqa: ARG002
        """Return ``Σ|x|²`` of each array along its axes, a NumPy array where the host can read it.

        It is ``None`` for an array without a fast path, and as wide as what `squares` returns.
        """
        return [None] * len(arrays)

    def size(self, leaf: Any, axes: tuple[int, ...] | None) -> Any:
        """Return the number of entries of the leaf along ``axes``, those that are not stored too."""
        shape = leaf.shape
        return math.prod(shape if axes is None else [shape[axis] for axis in axes])  # not a generator: torch.compile

    def kind(self, arrays: list[Array]) -> Hashable:  # noqa: ARG002
        """Return a key; the 0-d norms of arrays with equal keys can be stacked."""
        return None

    # For distributed arrays, of which each process holds a part: libraries that have them override all of these.

    def local(self, arrays: list[Array]) -> tuple[list[Array], list[Any] | None]:
        """Return what this process holds of each array, and which part that is (``None`` for one that is whole).

        A part has an ``owner``, whose processes hold all of the array, the number of ``copies`` of each entry among
        them, ``kept(axes)``, the shape of norms of the whole array, and ``embedded`` and ``own``, which make norms of
        the whole of norms of the part, and the other way round.
        """
        return arrays, None

    def whole(self, like: Array, local: Array) -> Array:  # noqa: ARG002
        """Return a new array of which this process holds ``local``, divided as ``like`` is."""
        return local

    def summed_whole(self, like: Array, local: Array) -> Array:  # noqa: ARG002
        """Return the sum of ``like`` along its first axis, given that of what this process holds of it."""
        return local

    def join_parts(self, owner: Any, array: Array, op: Literal["sum", "max"]) -> Array:
        """Return the sum or maximum over all processes of an owner."""
        raise NotImplementedError

    def covering(self, owners: list[Any]) -> list[Any]:
        """Return as few of the owners as have all processes of all of them."""
        return owners

    def reducer(self, all_reduce: Any) -> Callable[[Array, Literal["sum", "max"]], Array]:
        """Return what joins parts of a tree, as a function of ``(array, op)``."""
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
        """Return the dtype in which sums of a dtype are joined over processes, on the device of an array."""
        return dtype

    def replicated(self, array: Array, operand: Array) -> Array:  # noqa: ARG002
        """Return an operand, the same in all processes, as one that can be combined with ``array``."""
        return operand

    # For arrays that look whole, although each device holds a part.

    def undivided(self, array: Array) -> bool:  # noqa: ARG002
        """Whether the array is known to be whole on one device or on each, so that others may be copied into it."""
        return True

    def zeros(self, array: Array, axes: tuple[int, ...], dtype: Any) -> Array:
        """Return zeros of the shape of ``array`` without ``axes``, divided among devices as it is."""
        shape = tuple(n for axis, n in enumerate(array.shape) if axis not in axes)
        return self.to_device_of(array, self.xp.zeros(shape, dtype=dtype))

    # In place: libraries whose arrays can be changed override all three.

    def why_fixed(self, leaf: Any) -> str | None:  # noqa: ARG002
        """Return why the leaf's values cannot be changed, ``None`` if they can."""
        return "arrays of this kind never change"

    def memory(self, leaf: Any) -> np.ndarray[Any, Any] | None:  # noqa: ARG002
        """Return a NumPy array of the same memory, ``None`` if that is not known."""
        return None

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        """Put ``function(array, *operands)`` in place of ``array``, the stored values of ``leaf``, piece by piece.

        The function works entry by entry, and the operands, at least one, broadcast against the array.
        """
        raise NotImplementedError

    def shifted(self, array: Array, power: Array) -> Array:
        """Return ``array · power``, a power of two, nearly always 1; no compiler may put it together with a factor."""
        return array * power

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) holds, else ``rare()``."""
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]

    def once(self, array: Array) -> Array:
        """Return an array as it is, computed once although every leaf uses it."""
        return array

    def detached(self, array: Array) -> Array:
        """Return an array to keep, detached from the computation that it came from."""
        return array.persist() if hasattr(array, "persist") else array  # one that is lazy would hold all gradients

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays to read later, copied on their device where what made them may write over them."""
        return list(map(self.detached, arrays))

    def fetched(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        """Return the values of many small arrays as NumPy's, read together."""
        return list(map(self.to_host, arrays))

    def process(self) -> int:
        """Return the number of this process in a run over several."""
        return 0

    def together(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays as NumPy's if the host can read all of them at no cost, else as this library's."""
        views = [array if isinstance(array, np.ndarray) else self._small_view(array) for array in arrays]
        if all(view is not None for view in views):
            return views
        device = self.device(next(array for array in arrays if not isinstance(array, np.ndarray)))
        return [self.from_host(one, device) if isinstance(one, np.ndarray) else one for one in arrays]

    def _small_view(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None if self.traced(array) or math.prod(array.shape) > PIECE else self.viewed(array)

    def stacked(self, arrays: list[Array]) -> Array:
        """Return arrays of one shape as one along a new first axis, in the widest of their dtypes."""
        xp = self.xp
        if all([isinstance(array, np.ndarray) for array in arrays]):
            return np.stack(arrays)
        if len(arrays) == 1:
            return xp.expand_dims(arrays[0], axis=0)
        dtype = xp.result_type(*{array.dtype for array in arrays})
        return xp.stack([cast(xp, self.to_device_of(arrays[0], array), dtype) for array in arrays])

    def all_of(self, flags: list[Array]) -> Array:
        """Return whether all of the boolean 0-d arrays hold."""
        if len(flags) == 1:
            return flags[0]
        if not flags:
            return self.xp.asarray(True)  # noqa: FBT003
        return self.xp.all(self.stacked(flags))

    def to_device_of(self, other: Array, array: Array) -> Array:  # noqa: ARG002
        """Return ``array`` on the device of ``other``."""
        return array

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Silence the floating-point warnings of NumPy, and make new arrays where the first gradient is, if any."""
        return np.errstate(all="ignore")


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts."""
    with one, other:
        yield


def on_accelerator(self: Backend, norm: Array) -> bool:
    """Do `Backend.one_pass` for a framework with accelerators: there is a value, and reading it costs time."""
    return not self.traced(norm) and not self.readable(norm)


def in_groups(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    """Return values, which follow each other, by group."""
    return [values[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def unchanged(array: Array) -> Array:
    """Return an array as it is."""
    return array


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return the array in ``dtype``, itself if it has it already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def upcast(xp: Any, array: Array) -> Array:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def finite_or_zero(xp: Any, array: Array) -> Array:
    """Return the array with 0 for each entry that is not finite."""
    return xp.where(xp.isfinite(array), array, 0.0)


def spread(backend: Backend, value: Array, array: Array, axes: tuple[int, ...] | None, dtype: Any = None) -> Array:
    """Return a norm's value in the array's own (but wide) precision, or a wider one, its device and dimensions."""
    xp = backend.xp
    dtype = xp.result_type(array.dtype, xp.float32 if dtype is None else dtype)
    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = xp.expand_dims(value, axis=axis)
    return backend.replicated(array, cast(xp, value, dtype))


def sum_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype to add entries in: float32 or wider, integers as they are."""
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
