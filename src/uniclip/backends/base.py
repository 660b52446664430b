# SPDX-License-Identifier: MIT
"""What the core needs of a framework: an array API namespace,
and hooks with defaults written in it.

A library that follows the standard needs no file: `uniclip.backends.arrays.Standard` is its
backend. Another one:

- *must* say what its arrays are: `signature`, `is_array`, `unsupported_reason`, `unwrap`; where
  they lie, and who reads them: `mode`, `array_facts`, `readable`, `as_numpy`, `device`,
  `from_host`, `to_host`, `to_device_of`; whether derivatives are recorded: `detach`, `to_keep`,
  `computation_context`, `allow_float64`, `debug_infs`;
- *may* be faster, and change arrays in place: `fast_path`, `fast_path_reads`, `sums`, `norms`,
  `pieces`, `scale`, `multiply`, `bound`, `unstack`, `storage`, `write`; keep constants on a device,
  and make numbers there: `constant`, `arange`; run again what was `captured`; and have shards in
  several processes: `reducer`, `replicas`, `rank`;
- in *compiled* code has its own ways: `opens_nodes`, `traced`, `stacks`, `fast_values`,
  `reduce_rows`, `cond`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial, reduce
from itertools import accumulate
from operator import and_, or_
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import optree

Array: TypeAlias = Any
Rebuild: TypeAlias = Callable[[Array], Any]
Op: TypeAlias = Literal["sum", "max"]
Reduce: TypeAlias = Callable[[Any, Op], Any]
Axes: TypeAlias = tuple[int, ...] | None
Storage: TypeAlias = tuple[np.ndarray[Any, Any] | None, str | None]
"""An array at a leaf's place in memory, if that is known,
and why the leaf cannot be written, if so.
"""

NODES: list[tuple[type, Sequence[str], Callable[[Any, Any], Any]]] = []
"""Classes of uniclip that pytree libraries open by iterating: the names of the children,
and what rebuilds a node.
"""
PIECE = 2**17
"""How many entries of a large array are processed at a time, to fit a cache."""
NUMPY = (np.ndarray, np.generic)
"""The classes of NumPy's arrays."""
HOST, LIBRARY, RECORDED, TRACED = range(4)
"""The modes of a step: the host reads values at no cost.

The library does; it records derivatives; none has any.
"""
FITS = (1e-24, 3.4e38)
"""Between smallest normal number / eps² and the largest number a sum of squares in float32
is accurate.
"""


class ArrayFacts(NamedTuple):
    """What is known of some arrays and their values."""

    traced: bool
    """Whether some have no values."""
    reads: bool
    """Whether the host reads all at no cost."""
    records: bool
    """Whether derivatives with respect to them may be recorded."""
    double: bool
    """Whether their sums can be float64."""


class LeafInfo:
    """The facts about the kinds of a tree's leaves; trees of equal kinds share one object."""

    def __init__(
        self, backend: Backend, arrays: list[Array | None], wrapped: tuple[int, ...]
    ) -> None:
        present = [array for array in arrays if array is not None]
        self.backend = backend
        self.wrapped = wrapped
        """The leaves whose array is not the leaf itself: sparse or distributed ones, integers,
        storage formats.
        """
        self.present = tuple([number for number, array in enumerate(arrays) if array is not None])
        self.traced, self.reads, self.records, self.double = backend.array_facts(present)
        """See `ArrayFacts`."""
        floats = [x for x in present if not backend.xp.isdtype(x.dtype, "integral")]
        self.dtype = norm_dtype(backend.xp, floats)
        """The dtype of their norms: float32, or the widest real one.

        Norms lie with the first leaf, whose device may have no float64 though that of others has.
        """
        if not self.double and not backend.array_facts(present[:1]).double:
            self.dtype = backend.xp.float32
        self.narrow = self.dtype == backend.xp.float32
        """Whether all of their squares fit into float64."""
        self.device = backend.device(present[0] if present else None)
        """The device of the first."""
        largest = [float(backend.xp.finfo(norm_dtype(backend.xp, [x])).max) for x in floats]
        self.largest_factor = min([math.inf, *largest])
        """The largest factor that all of them can be multiplied by."""

    def without_leaves(self, backend: Backend | None = None) -> LeafInfo:
        """Return the facts about a tree without gradients, of a library if one is given."""
        leaf_info = copy(self) if backend is None else LeafInfo(backend, [], ())
        leaf_info.present, leaf_info.wrapped = (), ()
        return leaf_info


def unchanged(array: Array) -> Array:
    """Return an array as it is."""
    return array


class WrappedLeaf(NamedTuple):
    """An odd leaf: one that is not itself a dense array of floating-point numbers in
    this process.
    """

    array: Array
    """Its numbers as such an array; those of entries that are stored twice are summed."""
    rebuild: Rebuild = unchanged
    """Makes a leaf of this kind of a changed array; in place, writes it into the leaf."""
    storage: Any = None
    """The leaf's own memory, if it has some: the array, or entries that are not summed,
    which one number multiplies.
    """
    rows: Any = None
    """Which rows of a sparse leaf the array holds, a vector.

    ``()`` if it holds single entries, ``None`` if all.
    """
    shape: Any = None
    """The lengths of the leaf, numbers or arrays, if it does not tell them."""
    shard: Any = None
    """Which part of a distributed leaf it is, with the attributes
    of `uniclip.backends.torch.dtensor.LocalShard`.
    """

    @property
    def copied(self) -> bool:
        """Whether the array is not the leaf's own memory,
        so that what changes it in place is written back.
        """
        return self.storage is not self.array

    @property
    def by_entry(self) -> bool:
        """Whether it is a sparse leaf that stores single entries, not rows."""
        return isinstance(self.rows, tuple)


class FastResult(NamedTuple):
    """The result of `Backend.fast_path`: the leaves, and three numbers rounded to float32."""

    norm: Any
    """A number; where the host does not read it, a 0-d array, as the factor then is."""
    limit: float
    factor: Any
    leaves: list[Any]
    """The same objects where the factor is the number 1."""
    device: Any
    """That of the norm, for `Backend.from_host`."""


FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_LEAST = 1e-37
"""Smaller norms, limits and factors lose digits in float32."""


def fast_numbers(norm: float, limit: float) -> tuple[float, float, float] | None:
    """Return norm, limit and factor, rounded to float32 before they are used.

    ``None`` if one is out of its range.
    """
    if not (norm == 0 or _FLOAT32_LEAST < norm <= FLOAT32_MAX) or not (
        limit == 0 or limit > _FLOAT32_LEAST
    ):
        return None
    norm, limit = float(np.float32(norm)), float(np.float32(min(limit, FLOAT32_MAX)))
    if norm <= limit:
        return norm, limit, 1.0
    factor = limit / norm
    return (norm, limit, float(np.float32(factor))) if factor > _FLOAT32_LEAST else None


class Terms(NamedTuple):
    """The arrays whose powers a step adds up: those of one norm are in a row,
    and so are the norms of one block.
    """

    arrays: list[Array]
    counts: list[int]
    """How many arrays, at least one, each norm has."""
    blocks: list[int]
    """How many norms each block has."""
    axes: Sequence[Axes] | None = None
    """The axes along which each is added, ``None`` for all; ``None`` if all are added whole."""
    p: float = 2
    """The power; ∞ for the largest modulus."""
    units: Sequence[Any] | None = None
    """What each array is divided by first."""
    weigh: Callable[[list[Array]], list[Array]] | None = None
    """What is done with the sums of the arrays before they are added."""

    @property
    def whole(self) -> bool:
        """Whether only squares of whole arrays are added."""
        return self.p == 2 and self.axes is None and self.units is None and self.weigh is None

    def each(self) -> Iterable[tuple[Array, float, Axes, Any]]:
        """Return what `power_sum` takes for each array."""
        axes, units = (
            [None] * len(self.arrays) if given is None else given
            for given in (self.axes, self.units)
        )
        return [
            (array, self.p, *pair) for array, *pair in zip(self.arrays, axes, units, strict=True)
        ]

    def in_blocks(self, rows: Any) -> list[Any]:
        """Return the rows of all norms as those of each block."""
        return [rows] if len(self.blocks) == 1 else in_groups(rows, self.blocks)


class Products(NamedTuple):
    """The arrays that a step multiplies, and their factors;
    for a product what `Terms` is for sums.
    """

    arrays: list[Array]
    blocks: list[Any]
    """The factors of each block of norms: an array of this library or NumPy's."""
    places: Sequence[tuple[int, int]]
    """The block and the row in it of the factor of each array."""
    axes: Sequence[Axes] | None = None
    """The axes of each array along which a factor is the same, ``None`` for all.

    ``None`` if all have one factor.
    """
    shards: Sequence[Any] | None = None
    """The part of a distributed leaf that each array is."""
    in_place: bool = False
    zero: bool = False
    """Whether the product by 0 is 0, also that of NaN and ∞."""

    def take(self, numbers: list[int], arrays: list[Array]) -> Products:
        """Return the products of others in the places of some of the arrays."""
        axes, shards = (
            given and [given[number] for number in numbers] for given in (self.axes, self.shards)
        )
        return self._replace(
            arrays=arrays,
            places=[self.places[number] for number in numbers],
            axes=axes,
            shards=shards,
        )

    def is_single(self, number: int) -> bool:
        """Whether one number multiplies a whole array."""
        return math.prod(self.blocks[self.places[number][0]].shape[1:]) == 1

    def factors(self, backend: Backend) -> list[Any]:
        """Return the factor of each array: a Python number, or an array that broadcasts against it.

        The arrays are of this library, or NumPy's.
        """
        users = [block for block, _ in self.places]
        rows = {
            block: _rows_of(backend, self.blocks[block], users.count(block)) for block in set(users)
        }
        found = [rows[block][row] for block, row in self.places]
        if self.shards is not None:
            each = zip(found, self.shards, strict=True)
            found = [
                value if shard is None else shard.weigh(value, inverse=True)
                for value, shard in each
            ]
        if self.axes is None:
            return found
        every = zip(found, self.arrays, self.axes, strict=True)
        return [expand_to_leaf(backend, value, array, axes) for value, array, axes in every]


def products_by(
    arrays: list[Array], factor: Any, *, in_place: bool = False, zero: bool = False
) -> Products:
    """Return the products of all arrays by one number."""
    return Products(
        arrays, [np.asarray([factor])], [(0, 0)] * len(arrays), in_place=in_place, zero=zero
    )


def _rows_of(backend: Backend, block: Any, users: int) -> Any:
    """Return the factors of a block."""
    if isinstance(block, np.ndarray):
        return block.tolist() if block.ndim == 1 else block
    return [block[0, ...]] if users == block.shape[0] == 1 else backend.unstack(block)


def expand_to_leaf(backend: Backend, value: Any, array: Array, axes: Axes) -> Any:
    """Return a norm's value, if it is not a Python number, on the device of the array,
    with the array's dimensions.

    That of a whole array fits as it is.
    """
    if not hasattr(value, "shape"):
        return value
    if isinstance(value, NUMPY):
        return (
            value
            if axes is None
            else value.reshape([1 if n in axes else m for n, m in enumerate(array.shape)])
        )
    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = backend.xp.expand_dims(value, axis=axis)
    return value


def fill_places(leaves: list[Any], arrays: Iterable[Array]) -> list[Any]:
    """Return the leaves with other arrays in the places of those that are there."""
    left = iter(arrays)
    return [None if leaf is None else next(left) for leaf in leaves]


class Backend:
    """The hooks, with defaults for arrays on one device, which NumPy reads and which never change.

    Parameters
    ----------
    xp : module
        The array API namespace.
    """

    writes = False
    """Whether arrays can be changed in place."""
    joins_by = "a function of (array, op)"
    """The kinds of ``all_reduce`` that are taken."""
    opens_nodes = False
    """Whether compilers open and rebuild `NODES` in what compiled code returns."""
    output_axis = -1
    """The axis of a weight along which its output units lie."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.known: dict[Any, LeafInfo] = {}

    # What a leaf holds.

    def signature(self, leaves: list[Any]) -> Any:
        """Return a key that is equal for leaves of equal kinds, ``None`` for no key;
        ``None`` is a kind, too.
        """
        return tuple(
            [
                None if leaf is None else (type(leaf), str(getattr(leaf, "dtype", None)))
                for leaf in leaves
            ]
        )

    def is_array(self, leaf: Any) -> bool:
        """Whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return not self.xp.isdtype(leaf.dtype, "bool")

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        """Return why an array cannot be measured, or be a ``gradient``, and what to pass instead;
        else ``None``.
        """
        return None

    def unwrap(self, leaf: Any, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
        """Return what an odd leaf holds, whose array may be an odd leaf again.

        ``None`` for other leaves.

        Odd leaves have keys of their own in `kinds`. If ``whole``, for a function of each array,
        integers and distributed arrays are not odd, but for partial sums.
        """
        if whole or not self.xp.isdtype(leaf.dtype, "integral"):
            return None
        # in the framework's default dtype
        return WrappedLeaf(self.xp.astype(leaf, self.xp.asarray(1.0).dtype))

    # Where arrays are, and whether they have values.

    def mode(self, leaf_info: LeafInfo, beside: Any = ()) -> int:
        """Return the mode of a step on leaves of these kinds.

        ``beside`` is a tree of all else that comes in.
        """
        traced = leaf_info.traced or any(
            [self.traced(array) for array in optree.tree_leaves(beside)]
        )
        return (
            TRACED
            if traced
            else HOST
            if leaf_info.reads
            else RECORDED
            if leaf_info.records
            else LIBRARY
        )

    def array_facts(self, arrays: list[Array]) -> ArrayFacts:
        """Return the facts about the values of arrays,
        which do not change while their kinds are the same.
        """
        return ArrayFacts(
            any(map(self.traced, arrays)),
            all(map(self.readable, arrays)),
            records=True,
            double=True,
        )

    def traced(self, array: Array) -> bool:
        """Whether the array has no value yet: it is a tracer in code that is compiled
        or transformed.
        """
        return False

    def readable(self, array: Array) -> bool:
        """Whether Python can branch on the array's value at no cost (not traced, lazy or on
        a device).
        """
        return False

    def as_numpy(self, array: Array) -> np.ndarray[Any, Any] | None:
        """Return a NumPy array of the same values, ``None`` if they are not readable or a
        derivative is recorded.
        """
        return None

    def device(self, array: Array) -> Any:
        """Return the device of an array (or of ``None``), for `from_host`."""
        return None

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        """Return a NumPy array as an array of this library."""
        return self.xp.asarray(array)

    def constant(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        """Return a small NumPy array that is the same at every step as an array of this library.

        It must not be written. It may be kept on the device, so that it is sent once.
        """
        return self.from_host(array, device)

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        """Return the values of small arrays as NumPy arrays, from any device, read together."""
        return list(map(np.asarray, arrays))

    def to_device_of(self, other: Array, array: Array) -> Array:
        """Return ``array`` on the device of ``other``; on all of them, if that is distributed."""
        return array

    def captured(self, array: Array) -> bool:
        """Return whether a step on the array is being recorded to run again on the same memory."""
        return False

    def arange(self, count: int, dtype: Any, like: Array) -> Array:
        """Return the numbers from 0 to below ``count`` on the device of ``like``."""
        return self.to_device_of(like, self.xp.arange(count, dtype=dtype))

    def detach(self, array: Array) -> Array:
        """Return an array to keep, detached from its computation,
        where a library without a file can do that.
        """
        return self.xp.stop_gradient(array) if hasattr(self.xp, "stop_gradient") else array

    def detach_all(self, arrays: list[Array | None]) -> list[Array | None]:
        """Return arrays of which no derivative is taken; ``None`` stays."""
        return [array if array is None else self.detach(array) for array in arrays]

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        """Return small arrays to read later, copied on their device if they may be overwritten."""
        return list(map(self.detach, arrays))

    def computation_context(self, first: Array | None = None) -> AbstractContextManager[Any]:
        """Silence NumPy's floating-point warnings, and create arrays on the device of the
        first gradient.
        """
        return np.errstate(all="ignore")

    def allow_float64(self) -> AbstractContextManager[Any]:
        """Return a context in which float64 is allowed."""
        return nullcontext()

    def debug_infs(self) -> bool:
        """Whether a debugger stops at ∞, so that not even squares may overflow."""
        return False

    def fast_path(self, leaves: list[Any], limit: float, *, in_place: bool) -> FastResult | None:
        """Clip by one Euclidean norm of all leaves under a constant limit, with little overhead.

        It takes dense float32 leaves and ``None``, of one process, neither traced nor recorded. For
        all else it returns ``None``, before anything is written, and the caller goes the general
        way.
        """
        return None

    @staticmethod
    def fast_path_reads(leaf: Any) -> bool:
        """Return whether the fast path reads the norm of leaves like this one.

        A rule that raises errors takes it only then. Others return ``None`` for what they cannot
        read, so that this needs no look at the leaf.
        """
        return True

    # Sums and products, for speed and memory.

    def sums(self, mode: int, terms: Terms) -> list[Array]:
        """Return ``Σ|x/unit|ᵖ`` (the largest modulus for p = ∞) of each norm,
        one array ``(k, *kept)`` for each block.

        In float64 if it can be; NumPy's in the mode `HOST`, where a sum of float64 entries is 0
        only if all are.
        """
        return stack_terms(self, [power_sum(self, *term) for term in terms.each()], terms)

    def norms(self, terms: Terms, dtype: Any) -> tuple[list[Array], list[Array]] | None:
        """Return the Euclidean norms of each block in a dtype, and the same with NaN where they are
        not finite.

        It is asked in the mode `LIBRARY` where squares cannot leave the range of their sums.
        ``None`` where `sums` and operations on what they return are as fast.
        """
        return None

    def pieces(self, array: Array, axes: Axes = None) -> Iterable[Array] | None:
        """Split a large array, which avoids a wide copy of all of it.

        Into vectors, in any order of its entries; where it is added along ``axes``, into runs of
        its first axis, in order. ``None`` if it is measured as a whole.
        """
        return None if self.traced(array) else cut(self.xp, array, axes, PIECE)

    def scale(self, products: Products) -> list[Array]:
        """Return each array multiplied by its factor, in its own dtype.

        A single factor of 1 may do nothing.
        """
        return self.multiply(
            products.arrays, products.factors(self), in_place=products.in_place, zero=products.zero
        )

    def multiply(
        self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[Array]:
        """Do as `scale`, given the factor of each array: Python numbers,
        or arrays that broadcast against theirs.
        """
        if in_place:
            for array, factor in zip(arrays, factors, strict=True):
                self.write(
                    array, lambda x, f: times(self.xp, x, f, zero), operand(self, array, factor)
                )
            return arrays
        return [
            times(self.xp, a, operand(self, a, f), zero)
            for a, f in zip(arrays, factors, strict=True)
        ]

    def bound(
        self, arrays: list[Array], low: float, high: float, *, in_place: bool
    ) -> list[Array] | None:
        """Return arrays with entries between two numbers, NaN as it is, at once.

        ``None`` where that is not faster.
        """
        return None

    # Arrays that are changed in place; by default they never are.

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        """Return the memory of each leaf.

        ``None`` if a quick check shows that all can be written, and share none.
        """
        return [(None, "arrays of this kind never change")] * len(leaves)

    def write(self, array: Any, function: Callable[..., Any], *operands: Any) -> None:
        """Put ``function(array, *operands)`` in place of ``array``, piece by piece.

        The function is elementwise, and the operands, at least one, broadcast against the array.
        """
        raise NotImplementedError

    # Arrays of which several processes or devices hold parts; by default they lie in one process,
    # on one device.

    def reducer(self, all_reduce: Any) -> Reduce | None:
        """Return a function that reduces over the parts of a tree,
        ``None`` if ``all_reduce`` is not of these kinds.
        """
        return None

    def replicas(
        self,
        arrays: list[Any],
        all_reduce: Any,
        shared: list[bool] | None,
        place: Callable[[int], str],
    ) -> list[int] | None:
        """Return how many members of ``all_reduce`` hold each array, where the arrays' types tell;
        ``None`` for one.
        """
        return None

    def rank(self) -> int:
        """Return the number of this process in a run over several."""
        return 0

    # For code that is compiled.

    def stacks(self, array: Array | None) -> bool:
        """Whether norms along axes of an array are stacked; for ``None`` whether any norms are,
        in compiled code.
        """
        return True

    def fast_values(
        self, plain: Callable[..., Array], guarded: Callable[..., Array]
    ) -> Callable[..., Array]:
        """Return a function of arrays whose derivatives are those of ``guarded``,
        and its values of either function.

        Both take the namespace first. Guards against 0 make compilers compile twice as much.
        """
        return partial(guarded, self.xp)

    def reduce_rows(self, rows: Array, op: Op) -> Array:
        """Return the sum or the maximum of the rows of an array,
        which a compiler makes once for all of its users.
        """
        return self.xp.sum(rows, axis=0) if op == "sum" else self.xp.max(rows, axis=0)

    def unstack(self, array: Array) -> list[Array]:
        """Return the rows of an array, by a single operation where there is one."""
        unstack = getattr(self.xp, "unstack", None)
        return (
            [array[row, ...] for row in range(array.shape[0])]
            if unstack is None
            else list(unstack(array))
        )

    def cond(
        self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]
    ) -> list[Array]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) is true,
        else ``rare()``.
        """
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]


def stack_terms(backend: Backend, sums: list[Array], terms: Terms) -> list[Array]:
    """Return the sums of each block's norms as rows, given that of each array."""
    rows, op = sums if terms.weigh is None else terms.weigh(sums), op_of(terms.p)
    if len(rows) > len(terms.counts):
        groups = in_groups(rows, terms.counts)
        rows = [
            group[0] if len(group) == 1 else backend.reduce_rows(stack_arrays(backend, group), op)
            for group in groups
        ]
    return [stack_arrays(backend, group) for group in terms.in_blocks(rows)]


def stack_arrays(backend: Backend, arrays: Sequence[Array]) -> Array:
    """Return arrays of one shape stacked along a new first axis, in the widest of their dtypes."""
    xp = backend.xp
    if all([isinstance(array, NUMPY) for array in arrays]):
        return np.array(arrays)  # takes half as long as np.stack
    if len(arrays) == 1:
        return xp.expand_dims(arrays[0], axis=0)
    # A device without float64 gets what it can hold.
    moved = [backend.to_device_of(arrays[0], array) for array in arrays]
    dtype = xp.result_type(*{array.dtype for array in moved})
    return xp.stack([cast(xp, array, dtype) for array in moved])


def op_of(p: float) -> Op:
    """Return how sums of a power are joined."""
    return "max" if p == math.inf else "sum"


def power_sum(backend: Backend, array: Array, p: float, axes: Axes, unit: Any = None) -> Array:
    """Return ``Σ|x/unit|ᵖ``, the largest modulus for p = ∞, of one array,
    large ones piece by piece.
    """

    def of(piece: Array, unit: Any) -> Array:
        return _powers(backend, piece if unit is None else _modulus(backend, piece, unit), p, axes)

    pieces = backend.pieces(array, axes)
    if pieces is None:
        return of(array, unit)
    # A unit has one row where the first axis is added.
    if axes is None or 0 in axes:
        return _combine(backend, [of(piece, unit) for piece in pieces], op_of(p))

    parts, start = [], 0
    for piece in pieces:
        stop = start + piece.shape[0]
        parts.append(of(piece, unit if unit is None else unit[start:stop, ...]))
        start = stop
    return backend.xp.concat(parts, axis=0)


def _combine(backend: Backend, parts: list[Array], op: Op) -> Array:
    """Return the sum or the maximum of arrays of one shape."""
    xp = backend.xp
    if op == "sum":
        return reduce(lambda a, b: a + b, parts)
    return reduce(lambda a, b: xp.where(xp.isnan(b) | (b > a), b, a), parts)


def _powers(backend: Backend, x: Array, p: float, axes: Axes) -> Array:
    """Return ``Σ|x|ᵖ``, the largest modulus for p = ∞, in float64 if the library has it."""
    xp = backend.xp
    if p == 2:  # without an absolute value, whose derivative at 0 is undefined
        parts = [xp.real(x), xp.imag(x)] if xp.isdtype(x.dtype, "complex floating") else [x]
        floats = [_wide(backend, part) for part in parts]
        return xp.sum(reduce(lambda a, b: a + b, [part * part for part in floats]), axis=axes)
    size = (
        _modulus(backend, x)
        if 1 < p < math.inf or xp.isdtype(x.dtype, "complex floating")
        else xp.abs(x)
    )
    if p == math.inf:
        return _wide(backend, largest(xp, size, axes))
    return xp.sum(_wide(backend, size) if p == 1 else _power(xp, size, p), axis=axes)


def _modulus(backend: Backend, x: Array, unit: Any = None) -> Array:
    """Return ``|x/unit|`` in the precision in which it is added,
    of complex numbers without a square out of range.
    """
    xp = backend.xp
    parts = [xp.real(x), xp.imag(x)] if xp.isdtype(x.dtype, "complex floating") else [x]
    sizes = [xp.abs(_wide(backend, part)) for part in parts]
    one, *other = sizes if unit is None else [size / unit for size in sizes]
    if not other:
        return one
    top, low = xp.where(one > other[0], one, other[0]), xp.where(one > other[0], other[0], one)
    ratio = low / xp.where(top > 0, top, xp.ones_like(top))
    return top * xp.sqrt(1 + ratio * ratio)


def _wide(backend: Backend, array: Array) -> Array:
    """Return real numbers in the precision in which they are added:
    float64 if the library has it.
    """
    xp = backend.xp
    dtype = xp.result_type(
        array.dtype, xp.float64 if backend.array_facts([array]).double else xp.float32
    )
    return cast(xp, array, dtype)


def operand(backend: Backend, array: Array, factor: Any) -> Array:
    """Return a factor as an array on the device of another, wide enough to multiply in."""
    if not hasattr(factor, "shape") or isinstance(factor, np.ndarray):
        factor = backend.from_host(np.asarray(factor), backend.device(array))
    xp = backend.xp
    return cast(xp, backend.to_device_of(array, factor), xp.result_type(array.dtype, xp.float32))


def sum_long_squares(
    backend: Backend, terms: Terms, float32_sum: Callable[[Array], Array | None]
) -> list[Array]:
    """Return ``Σ|x|²`` of each array in float64,
    of long ones by float32 sums where these are accurate.

    ``short(array)`` is the float32 sum of a long array, ``None`` for another one. Each block has
    one conditional, whose rare branch measures its long arrays again, unless those of each sum of 0
    are zeros.
    """
    xp, (low, high), arrays = backend.xp, FITS, terms.arrays
    sums_of_arrays = [
        float32_sum(array) if axes is None else None for array, _, axes, _ in terms.each()
    ]
    long = {number for number, total in enumerate(sums_of_arrays) if total is not None}
    for number, term in enumerate(terms.each()):
        if number not in long:
            sums_of_arrays[number] = power_sum(backend, *term)
    for block in terms.in_blocks(in_groups(range(len(arrays)), terms.counts)):
        repeated = [number for group in block for number in group if number in long]
        if not repeated:
            continue
        groups = [group for group in block if long & {*group}]
        short_sums = [[xp.astype(sums_of_arrays[n], xp.float32) for n in group] for group in groups]
        totals = [_combine(backend, addends, "sum") for addends in short_sums]
        fits = [(total > low) & (total < high) for total in totals]
        sums = [sums_of_arrays[number] for number in repeated]

        def usual(sums: list[Array] = sums) -> list[Array]:
            return [xp.astype(total, xp.float64) for total in sums]

        def again(repeated: list[int] = repeated) -> list[Array]:
            return [power_sum(backend, arrays[number], 2, None) for number in repeated]

        def rare(
            groups: list[Sequence[int]] = groups,
            fits: list[Array] = fits,
            usual: Any = usual,
            again: Any = again,
        ) -> list[Array]:
            sizes = [
                [xp.sum(xp.abs(xp.astype(arrays[n], xp.float32))) for n in group if n in long]
                for group in groups
            ]  # of zeros 0
            zero = [xp.equal(_combine(backend, each, "sum"), 0) for each in sizes]
            return backend.cond(reduce(and_, map(or_, fits, zero)), usual, again)

        for number, total in zip(
            repeated, backend.cond(reduce(and_, fits), usual, rare), strict=True
        ):
            sums_of_arrays[number] = total
    return sums_of_arrays


@contextmanager
def enter_both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    """Enter two contexts."""
    with first, second:
        yield


def in_groups(values: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[Any]]:
    """Return consecutive values as groups."""
    return [
        values[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)
    ]


def cast(xp: Any, array: Array, dtype: Any) -> Array:
    """Return the array in ``dtype``, or itself if it already has it."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def real_dtype(xp: Any, dtype: Any) -> Any:
    """Return the real dtype of the same precision."""
    return (
        xp.abs(xp.zeros((), dtype=dtype)).dtype if xp.isdtype(dtype, "complex floating") else dtype
    )


def norm_dtype(xp: Any, arrays: list[Array]) -> Any:
    """Return the real dtype, float32 or wider, of the norm of arrays."""
    wide = [xp.result_type(dtype, xp.float32) for dtype in {array.dtype for array in arrays}]
    return real_dtype(xp, reduce(xp.result_type, wide)) if wide else xp.float32


def sum_dtype(xp: Any, dtype: Any) -> Any:
    """Return the dtype for sums: float32 or wider, of integers int32 or wider."""
    if not xp.isdtype(dtype, "integral"):
        return xp.result_type(dtype, xp.float32)
    return xp.int32 if xp.iinfo(dtype).max < xp.iinfo(xp.int32).max else dtype


def times(xp: Any, array: Array, factor: Array, zero: bool) -> Array:
    """Return ``array · factor`` in the array's dtype;
    with ``zero`` the factor 0 makes 0 of NaN and ∞, too.
    """
    wide = cast(xp, array, xp.result_type(array.dtype, xp.float32))
    if zero:
        wide = xp.where(xp.equal(factor, 0.0), 0.0, wide)
    product = wide * factor
    if xp.isdtype(wide.dtype, "complex floating"):  # a complex 1 changes the sign of a zero
        product = xp.where(xp.equal(factor, 1.0), wide, product)
    return cast(xp, product, array.dtype)


def same(factors: Sequence[Any]) -> bool:
    """Whether all factors are one 0-d array."""
    return getattr(factors[0], "shape", None) == () and all(
        [factor is factors[0] for factor in factors]
    )


def finite_or_zero(xp: Any, array: Array) -> Array:
    """Return the array with 0 for each entry that is not finite."""
    # Beside a number NumPy widens bfloat16.
    return cast(xp, xp.where(xp.isfinite(array), array, 0.0), array.dtype)


def cut(xp: Any, array: Array, axes: Axes, size: int) -> Iterable[Array] | None:
    """Return the pieces of an array of more than ``size`` entries, as `Backend.pieces` does."""
    if math.prod(array.shape) <= size:
        return None
    if axes is None:
        array = xp.reshape(array, (-1,))
    return (array[rows, ...] for rows in row_slices(array.shape, size))


def row_slices(shape: tuple[int, ...], piece: int = PIECE) -> list[slice]:
    """Return slices of the first axis that cut a large array into pieces."""
    step = max(1, piece * shape[0] // math.prod(shape))
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def largest(xp: Any, size: Array, axes: Axes) -> Array:
    """Return the largest modulus over ``axes``, 0 over no entries."""
    if axes == ():
        return size
    # A shape of unknown rank cannot be searched.
    if getattr(size.shape, "rank", 0) is not None and 0 in size.shape:
        return xp.sum(size, axis=axes)
    top = xp.max(size, axis=axes)
    # -∞: a shape known only at run time was empty
    return xp.where(top < 0, xp.zeros_like(top), top)


def _power(xp: Any, size: Array, p: float) -> Array:
    if p > 2:
        return size**p
    zero = xp.equal(size, 0.0)  # where the second derivative of the power is infinite
    return xp.where(zero, size, xp.where(zero, xp.ones_like(size), size) ** p)
