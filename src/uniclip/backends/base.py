# SPDX-License-Identifier: MIT
"""The interface between the core and a framework: hooks, with defaults for array API libraries.

Nothing here is specific to a framework. A library that follows the array API standard needs no
file: `uniclip.backends.arrays.Standard` is its backend. Each hook has a default. The backend of
another library overrides those whose default is not right for its arrays:

- hooks that describe arrays (`signature`, `is_array`, `unsupported_reason`, `unwrap`), say where
  they are and who can read them (`mode`, `array_facts`, `readable`, `as_numpy`, `device`,
  `from_host`, `to_host`, `to_device_of`), and whether derivatives are recorded (`detach`,
  `to_keep`, `computation_context`, `allow_float64`, `debug_infs`);
- hooks for speed and for changes in place (`one_norm`, `scale_all`, `clip_at_once`, `sums`,
  `norms`, `pieces`, `scale`, `multiply`, `bound`, `storage`, `write`),
  for constants on a device (`constant`), for CUDA graphs (`captured`), and for shards in several
  processes (`reducer`, `replicas`, `rank`);
- hooks for *compiled* code (`opens_nodes`, `traced`, `stacks`, `fast_values`, `fence`, `cond`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

import numpy as np
import optree

from uniclip._types import A, Axes, Device, Factors, Namespace, Op, T, Tensor, Tree, View
from uniclip.backends.arithmetic import (
    PIECE,
    cast,
    cut,
    in_groups,
    norm_dtype,
    op_of,
    power_sum,
    times,
    unstack,
)

Leaf: TypeAlias = object
"""A leaf of a tree: an array, or a gradient in another format, such as a sparse one."""
Rebuild: TypeAlias = Callable[[Any], Leaf]
Reduce: TypeAlias = Callable[[Any, Op], Any]
Storage: TypeAlias = tuple[View | None, str | None]
"""A view of a leaf's memory, ``None`` if its address is unknown; and the reason why the leaf cannot
be written, ``None`` if it can.
"""

NODES: list[tuple[type, Sequence[str], Callable[[Any, Any], Any]]] = []
"""Classes of uniclip to register with pytree libraries: each with the names of its children, and a
function that rebuilds a node. Iterating over a node yields the children.
"""
NUMPY = (np.ndarray, np.generic)
"""The classes of NumPy's arrays."""
HOST, LIBRARY, RECORDED, TRACED = range(4)
"""Execution modes: values readable on the host for free; computed by the framework;
computed with autograd; traced (no values).
"""
FITS = (1e-24, 3.4e38)
"""The range in which a float32 sum of squares is accurate: smallest normal number / eps² to the
largest number.
"""
FITS_FLOAT64 = (4.5e-277, 1.7976931348623157e308)
"""The same for a float64 sum."""


class ArrayFacts(NamedTuple):
    """Facts about arrays and their values."""

    traced: bool
    """Whether some are tracers, without values."""
    reads: bool
    """Whether the host reads all of them at no cost."""
    records: bool
    """Whether derivatives with respect to them may be recorded."""
    double: bool
    """Whether their sums can be float64."""


class LeafInfo:
    """Dtype, device and layout summary of a tree's leaves,
    interned so that similar trees share one instance.
    """

    def __init__(
        self, backend: Backend, arrays: list[Tensor | None], wrapped: tuple[int, ...]
    ) -> None:
        xp = backend.xp
        present = [array for array in arrays if array is not None]
        self.backend = backend
        self.wrapped = wrapped
        """The numbers of the leaves in other formats, which become a `WrappedLeaf`."""
        self.present = tuple([number for number, array in enumerate(arrays) if array is not None])
        self.traced, self.reads, self.records, self.double = backend.array_facts(present)
        """See `ArrayFacts`."""

        # Integers have no part in the dtype of the norms.
        floats = [array for array in present if not xp.isdtype(array.dtype, "integral")]
        self.dtype: Any = norm_dtype(xp, floats)
        """The dtype of their norms: float32, or the widest of their real dtypes."""

        # Norms are on the first leaf's device, which may lack float64 (such as Apple's GPUs).
        if not self.double and not backend.array_facts(present[:1]).double:
            self.dtype = xp.float32
        self.narrow = self.dtype == xp.float32
        """Whether norms are float32, so that the squares of all elements fit into float64."""

        self.device = backend.device(present[0] if present else None)
        """The device of the first leaf."""
        largest = [float(backend.xp.finfo(norm_dtype(backend.xp, [x])).max) for x in floats]
        self.largest_factor = min([math.inf, *largest])
        """The largest factor that the dtypes of all leaves can hold."""

    def without_leaves(self, backend: Backend | None = None) -> LeafInfo:
        """Return the summary of a tree without gradients, of another library if one is given."""
        # Trees of equal formats share one summary, so only a copy may be changed.
        leaf_info = copy(self) if backend is None else LeafInfo(backend, [], ())
        leaf_info.present = ()
        leaf_info.wrapped = ()
        return leaf_info


def unchanged(array: A) -> A:
    """Return an array as it is."""
    return array


class WrappedLeaf(NamedTuple):
    """A leaf that is not itself a dense floating-point array in this process."""

    array: Any
    """The values of the leaf as a dense array; elements that are stored twice are summed."""
    rebuild: Rebuild = unchanged
    """Returns a leaf of this format with a changed array; in place, writes it into the leaf."""
    storage: Any = None
    """The leaf's own memory, if it has some: the array itself, or elements before they are summed.

    A single factor multiplies the storage, which saves a copy.
    """
    rows: Any = None
    """The indices of the rows of a sparse leaf that are stored, a vector.

    ``()`` for a leaf that stores single elements, ``None`` for one that stores all.
    """
    shape: Any = None
    """The shape of the leaf, if its attribute ``shape`` does not have it; lengths may be arrays."""

    @property
    def copied(self) -> bool:
        """Whether the array is a copy, so that a change in place has to be written back."""
        return self.storage is not self.array

    @property
    def by_entry(self) -> bool:
        """Whether it is a sparse leaf that stores single elements, not rows."""
        return isinstance(self.rows, tuple)


class ShardGroup(Protocol):
    """The processes along one dimension of a mesh; those of equal processes are equal."""

    size: int
    """How many there are."""

    def processes(self) -> frozenset[int]:
        """Return their ranks."""

    def reduce(self, array: Any, op: Op, /) -> Any:
        """Return the sum or the maximum over these processes."""


class Shard(Protocol):
    """The shard of a distributed leaf in this process."""

    shape: tuple[int, ...]
    """The shape of the leaf."""
    local: tuple[int, ...]
    """The shape of the shard."""
    replicas: int
    """How many processes hold the same elements."""

    def divided(self, axes: Axes) -> object:
        """Return the axes that norms along ``axes`` keep and that are sharded, and how."""

    def groups(self, axes: Axes = None, *, replicas: bool = True) -> tuple[ShardGroup, ...]:
        """Return the processes over which norms along ``axes`` are reduced, with those that hold
        replicas, if wanted.
        """

    def divide(self, leaf: Any) -> Any:
        """Return the same shard of another leaf."""

    def gather(self, leaf: Any) -> Any:
        """Return another leaf gathered from all processes."""

    def distribute(self, like: Any, local: Any) -> Any:
        """Return a leaf with another local array."""

    def weigh_derivative(self, value: Any, *, inverse: bool = False) -> Any:
        """Return the same value, with its derivative multiplied by `replicas`, or divided by it if
        ``inverse``.
        """

    def sum_examples(self, like: Any, local: Any) -> Any:
        """Return a distributed leaf of summed examples."""


class Shards(dict[int, Any]):
    """The `Shard` of each distributed leaf of a tree, by the numbers of these leaves."""

    def __init__(self, by_leaf: dict[int, Any], number: int = 0, *, dense: bool = False) -> None:
        super().__init__(by_leaf)
        self.number = number
        """What these shards are in the keys of caches."""
        self.dense = dense
        """Whether all local arrays are dense, at most float32, and without a derivative."""


NO_SHARDS = Shards({})
"""The shards of a tree without distributed leaves."""
SHARDS_CACHE_SIZE = 256
"""The largest number of `Shards` that are kept, so that equal ones are one object."""
_SHARDS: dict[tuple[Any, ...], Shards] = {}
_NUMBERS = count(1)


def shards_of(by_leaf: dict[int, Any], *, dense: bool = False) -> Shards:
    """Return the shards of leaves, the same object for the same shards."""
    if not by_leaf:
        return NO_SHARDS
    key = (dense, *by_leaf.items())
    if len(_SHARDS) >= SHARDS_CACHE_SIZE:
        _SHARDS.clear()
    return _SHARDS.setdefault(key, Shards(by_leaf, next(_NUMBERS), dense=dense))


FLOAT32_MAX = float(np.finfo(np.float32).max)
LARGEST: dict[Any, float] = {np.float32: FLOAT32_MAX, np.float64: sys.float_info.max}
"""The largest number of a dtype."""
LEAST: dict[Any, float] = {np.float32: 1e-37, np.float64: 1e-138}
"""Smaller norms, limits and factors lose digits in a dtype, or the squares of such norms do."""


NormPlace: TypeAlias = "tuple[Backend[Any], Device, type[np.floating[Any]]]"
"""The backend of a norm, its device for `Backend.from_host`, and the dtype in which it is reported.

A plain tuple, since a class costs one more call in each step.
"""


class OneNorm(NamedTuple):
    """The norm of all leaves of a step, as `Backend.one_norm` returns it."""

    place: NormPlace
    arrays: list[Any]
    """The leaves that are not ``None``."""
    norm: Any = None
    """A float from `rounded_norm`. ``None`` if the host does not read it; the spine then puts a
    pair of arrays with one element here, the norm and the same with NaN if it is not finite.
    """
    loss: Any = None
    """The loss of the step, where the norm is."""


def rounded_norm(norm: float, dtype: type[np.floating[Any]]) -> float | None:
    """Return a norm in the precision in which it is compared and reported.

    ``None`` if it is out of range.
    """
    if norm != 0 and not LEAST[dtype] < norm <= LARGEST[dtype]:
        return None
    return float(dtype(norm))


class Terms(NamedTuple):
    """The arrays whose powers a step sums.

    The arrays of one norm are consecutive, and so are the norms of one block.
    """

    arrays: list[Any]
    counts: list[int]
    """The number of arrays, at least one, of each norm."""
    blocks: list[int]
    """The number of norms of each block."""
    axes: Sequence[Axes] | None = None
    """The axes along which each array is summed, ``None`` for all axes.

    ``None`` if all arrays are summed whole.
    """
    p: float = 2
    """The power; ∞ for the largest modulus."""
    weigh: Callable[[list[Any]], list[Any]] | None = None
    """A function of the sums of all arrays, applied before those of one norm are added."""

    @property
    def whole(self) -> bool:
        """Whether only squares of whole arrays are summed, the case for which backends are fast."""
        return self.p == 2 and self.axes is None and self.weigh is None

    def by_array(self) -> list[tuple[Any, float, Axes]]:
        """Return the arguments of `power_sum` for each array."""
        axes: Sequence[Axes] = self.axes or [None] * len(self.arrays)
        return [(array, self.p, along) for array, along in zip(self.arrays, axes, strict=True)]

    def in_blocks(self, rows: Sequence[Any] | View) -> list[Any]:
        """Return the rows of all norms grouped by block."""
        if len(self.blocks) == 1:
            return [rows]
        return in_groups(rows, self.blocks)


class Products(NamedTuple):
    """The arrays that a step multiplies, and their factors."""

    arrays: list[Any]
    blocks: list[Any]
    """The factors of each block of norms, as an array of this library or of NumPy."""
    places: Sequence[tuple[int, int]]
    """For each array, the block of its factor, and the row in this block."""
    axes: Sequence[Axes] | None = None
    """The axes of each array along which its factor is constant, ``None`` for all axes.

    ``None`` if each array has a single factor.
    """
    shards: Sequence[Any] | None = None
    """For each array, its `Shard`, ``None`` for a whole leaf."""
    in_place: bool = False
    zero: bool = False
    """Whether a factor of 0 turns NaN and ∞ into 0, too."""
    summed: bool = False
    """Whether each product is summed over its first axis, that of examples."""

    def take(self, numbers: list[int], arrays: list[Any]) -> Products:
        """Return the products of some rows, with other arrays in place of theirs."""
        return self._replace(
            arrays=arrays,
            places=take(self.places, numbers),
            axes=self.axes and take(self.axes, numbers),
            shards=self.shards and take(self.shards, numbers),
        )

    def is_single(self, number: int) -> bool:
        """Return whether an array has a single factor."""
        block, _ = self.places[number]
        return math.prod(self.blocks[block].shape[1:]) == 1

    def factors(self, backend: Backend) -> list[Any]:
        """Return the factor of each array: a Python number, or an array that broadcasts against it.

        A factor that is an array belongs to this library or to NumPy.
        """
        # Thousands of arrays may use one block: unstack each block once.
        used = [block for block, _ in self.places]
        rows = {}
        for block in set(used):
            rows[block] = _rows_of(backend, self.blocks[block], used.count(block))
        factors = [rows[block][row] for block, row in self.places]

        # Replicas of a shard must count once in the derivative of their factor.
        if self.shards is not None:
            for number, shard in enumerate(self.shards):
                if shard is not None:
                    factors[number] = shard.weigh_derivative(factors[number], inverse=True)

        if self.axes is None:
            return factors
        terms = zip(factors, self.arrays, self.axes, strict=True)
        return [expand_to_leaf(backend, factor, array, axes) for factor, array, axes in terms]


def take(values: Sequence[T] | Mapping[Any, T], numbers: Iterable[Any]) -> list[T]:
    """Return the values with these numbers, or keys."""
    return [values[number] for number in numbers]


def kept_lengths(lengths: Sequence[Any], axes: Axes) -> tuple[Any, ...]:
    """Return the lengths of the axes that a norm along ``axes`` keeps."""
    if axes is None:
        return ()
    return tuple([length for axis, length in enumerate(lengths) if axis not in axes])


def _rows_of(backend: Backend, block: View | Factors, users: int) -> Sequence[Any] | View:
    """Return the factors of a block, one for each row; ``users`` is how many arrays use one."""
    if isinstance(block, np.ndarray):
        return block.tolist() if block.ndim == 1 else block
    # For a single row, an index is cheaper than an operation that returns all rows.
    if users == block.shape[0] == 1:
        return [block[0, ...]]
    return unstack(backend.xp, block)


def expand_to_leaf(backend: Backend, value: Any, array: Tensor, axes: Axes) -> Any:
    """Return the value of a norm on the device of its array, with axes added to broadcast.

    A Python number, or the value of a norm that covers a whole array, needs no axes.
    """
    if not hasattr(value, "shape"):
        return value

    # A NumPy array needs no transfer, and a single reshape adds all axes.
    if isinstance(value, NUMPY):
        if axes is None:
            return value
        lengths = list(array.shape)
        for axis in axes:
            lengths[axis] = 1
        return value.reshape(lengths)

    value = backend.to_device_of(array, value)
    for axis in axes or ():
        value = backend.xp.expand_dims(value, axis=axis)
    return value


def fill_places(leaves: Sequence[A | None], arrays: Sequence[A]) -> list[A | None]:
    """Return the leaves with other arrays in place of those that are not ``None``."""
    if len(arrays) == len(leaves):
        return list(arrays)
    remaining = iter(arrays)
    return [None if leaf is None else next(remaining) for leaf in leaves]


class Backend(Generic[A]):
    """The hooks, with defaults for immutable arrays on one device, which NumPy can read.

    Parameters
    ----------
    xp : module
        The array API namespace.
    """

    writes = False
    """Whether arrays can be changed in place."""
    joins_by = "a function of (array, op)"
    """The kinds of ``all_reduce`` that are supported."""
    opens_nodes = False
    """Whether compilers open and rebuild `NODES` in the result of compiled code."""
    output_axis = -1
    """The axis of a weight along which its output units are."""

    def __init__(self, xp: Any) -> None:
        self.xp: Namespace = xp
        self.leaf_infos: dict[Any, LeafInfo] = {}

    # The format of a leaf.

    def signature(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        """Return a hashable key of the formats of all leaves, or ``None`` if nothing may be cached.

        An absent leaf counts as a format.
        """
        formats: list[Any] = [None] * len(leaves)
        for number, leaf in enumerate(leaves):
            if leaf is not None:
                formats[number] = type(leaf), str(getattr(leaf, "dtype", None))
        return tuple(formats)

    def is_array(self, leaf: Any) -> bool:
        """Return whether ``leaf``, whose class led to this backend, can hold a gradient."""
        return not self.xp.isdtype(leaf.dtype, "bool")

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        """Return why an array cannot be measured, or cannot be a ``gradient``, and what to pass
        instead; ``None`` for a supported array.
        """
        return None

    def unwrap(self, leaf: Any, *, in_place: bool, as_given: bool) -> WrappedLeaf | None:
        """Return the dense array in a leaf of another format; it may be such a leaf again.

        Return ``None`` for a dense floating-point leaf. `signature` must tell the formats apart.
        With ``as_given``, integers and distributed arrays stay as they are, except partial sums.
        """
        if as_given or not self.xp.isdtype(leaf.dtype, "integral"):
            return None
        default_dtype = self.xp.asarray(1.0).dtype
        return WrappedLeaf(self.xp.astype(leaf, default_dtype))

    # Where arrays are, and whether they have values.

    def open_shards(self, leaves: list[Any]) -> tuple[list[Any], Shards]:
        """Return leaves with the local arrays of distributed ones, and the shards of these.

        The list of a tree without distributed leaves is returned as it is.
        """
        return leaves, NO_SHARDS

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        """Return the execution mode of a step on such leaves.

        ``inputs`` is a tree of all other inputs of the step.
        """
        if leaf_info.traced:
            return TRACED
        # One traced input, such as a limit, makes the result of the step traced.
        arrays: list[A] = optree.tree_leaves(inputs)  # type: ignore[arg-type]
        if any([self.traced(array) for array in arrays]):
            return TRACED

        if leaf_info.reads:
            return HOST
        if leaf_info.records:
            return RECORDED
        return LIBRARY

    def array_facts(self, arrays: list[A]) -> ArrayFacts:
        """Return the facts about the values of arrays, equal for equal signatures."""
        return ArrayFacts(
            any(map(self.traced, arrays)),
            all(map(self.readable, arrays)),
            records=True,
            double=True,
        )

    def traced(self, array: A) -> bool:
        """Return whether the array is a tracer: it has no value in code that is compiled
        or transformed.
        """
        return False

    def readable(self, array: A) -> bool:
        """Return whether Python can branch on the array's value at no cost: it is not traced, lazy
        or on an accelerator.
        """
        return False

    def as_numpy(self, array: A) -> View | None:
        """Return a NumPy array of the same values.

        ``None`` if they are not `readable`, or a derivative is recorded.
        """
        return None

    def device(self, array: A | None) -> Device:
        """Return the device of an array (or of ``None``), for `from_host`."""
        return None

    def from_host(self, array: View, device: Device) -> A:
        """Return a NumPy array as an array of this library."""
        return self.xp.asarray(array)

    def constant(self, array: View, device: Any) -> A:
        """Return a small constant NumPy array as an array of this library, not to be written.

        A backend may cache it on the device, so that it is sent once.
        """
        return self.from_host(array, device)

    def to_host(self, arrays: list[A]) -> list[View]:
        """Return the values of small arrays as NumPy arrays, from any device, read together."""
        return list(map(np.asarray, arrays))

    def to_device_of(self, like: A, array: A) -> A:
        """Return ``array`` on the device of ``like``; on all of them, if that is distributed."""
        return array

    def captured(self, array: A) -> bool:
        """Return whether a step on the array is being captured, as in a CUDA graph, to be replayed
        on the same memory.
        """
        return False

    def detach(self, array: A) -> A:
        """Return an array without a recorded derivative, to keep after the step.

        By default this is ``stop_gradient`` of the library, if there is one.
        """
        if not hasattr(self.xp, "stop_gradient"):
            return array
        return self.xp.stop_gradient(array)

    def to_keep(self, arrays: list[A]) -> list[A]:
        """Return small arrays to read later, copied if a later step may overwrite them."""
        return list(map(self.detach, arrays))

    def computation_context(self, first: A | None = None) -> AbstractContextManager[Any]:
        """Silence NumPy's floating-point warnings, and create arrays on the device of the
        first gradient.
        """
        return np.errstate(all="ignore")

    def allow_float64(self) -> AbstractContextManager[Any]:
        """Return a context in which float64 is allowed."""
        return nullcontext()

    def debug_infs(self) -> bool:
        """Return whether a debugger stops at ∞, so that not even an unused sum may overflow."""
        return False

    # One norm of all leaves, with little overhead, see `uniclip._core.spine`.

    def one_norm(self, leaves: list[A | None], *, in_place: bool) -> OneNorm | None:
        """Return the Euclidean norm of all leaves, of which one or more are not ``None``.

        It takes dense leaves of one process, all float64 or none, neither traced nor with a
        recorded derivative. On an accelerator the norm is ``None``: nothing is measured here, but
        leaves that cannot be written ``in_place`` are rejected. For anything else, and if the norm
        may be inaccurate, return ``None``: the caller then takes the general path.
        """
        return None

    def scale_all(self, arrays: list[A], factor: float, *, in_place: bool) -> list[A] | None:
        """Multiply the arrays that `one_norm` measured on the host by one number.

        Return ``None``, with nothing written, if they share memory or are read-only.
        """
        return self.multiply(arrays, [factor] * len(arrays), in_place=in_place, zero=False)

    def clip_at_once(
        self, arrays: list[A], limit: float, *, in_place: bool
    ) -> tuple[list[A], A, A] | None:
        """Clip arrays on an accelerator by a constant limit: return them, the norm and the factor.

        ``None``, with nothing written, if the library is no faster at that.
        """
        return None

    # Sums and products, for speed and memory.

    def sums(self, mode: int, terms: Terms) -> list[A]:
        """Return ``Σ|x|ᵖ`` (the largest modulus for p = ∞) of each norm,
        one array ``(k, *kept)`` for each block.

        Sums are float64 if possible. In the mode `HOST` they are NumPy arrays, and a sum of float64
        elements must be 0 only if all elements are: a caller takes 0 for exact.
        """
        sums = [power_sum(self, *term) for term in terms.by_array()]
        return stack_terms(self, sums, terms)

    def norms(self, terms: Terms, dtype: Any) -> tuple[list[A], list[A]] | None:
        """Return the Euclidean norms of each block in a dtype, and the same with NaN where they are
        not finite.

        Called in the mode `LIBRARY`, if no sum of squares can leave its range. ``None`` if `sums`
        and a few operations on the sums are as fast.
        """
        return None

    def pieces(self, array: A, axes: Axes = None) -> Iterable[A] | None:
        """Split a large array, to avoid a float64 copy of all of it.

        Without ``axes`` the pieces are vectors, in any order of the elements. With ``axes`` they
        are slices of the first axis, in order. ``None`` if the array is measured as a whole.
        """
        if self.traced(array):
            return None
        return cut(self.xp, array, axes, PIECE)

    def scale(self, products: Products) -> list[A]:
        """Return each array multiplied by its factor, in its own dtype; and summed over its first
        axis, if ``products.summed``.

        An array with a single factor of 1 may be returned as it is.
        """
        factors = products.factors(self)
        scaled = self.multiply(
            products.arrays, factors, in_place=products.in_place, zero=products.zero
        )
        return sum_examples(self, scaled) if products.summed else scaled

    def multiply(
        self, arrays: list[A], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[A]:
        """Multiply as `scale` does, given the factor of each array: Python numbers,
        or arrays that broadcast against theirs.
        """
        xp = self.xp
        pairs = zip(arrays, factors, strict=True)
        if not in_place:
            return [times(xp, array, operand(self, array, by), zero) for array, by in pairs]

        def multiplied(array: A, factor: A) -> A:
            return times(xp, array, factor, zero)

        for array, factor in pairs:
            self.write(array, multiplied, operand(self, array, factor))
        return arrays

    def bound(self, arrays: list[A], low: float, high: float, *, in_place: bool) -> list[A] | None:
        """Clip the elements of all arrays to two numbers with one call; NaN stays NaN.

        ``None`` if that is not faster.
        """
        return None

    # Changes in place. By default arrays are immutable.

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        """Return the memory of each leaf.

        ``None`` if a quick check shows that all can be written and share no memory.
        """
        return [(None, "arrays of this kind are immutable")] * len(leaves)

    def write(self, array: A, function: Callable[..., A], *operands: A) -> None:
        """Put ``function(array, *operands)`` in place of ``array``, piece by piece.

        The function is elementwise, and the operands, at least one, broadcast against the array.
        """
        raise NotImplementedError

    # Shards in several processes or devices. By default an array is in one process, on one device.

    def reducer(self, all_reduce: object) -> Reduce | None:
        """Return a function that reduces over the shards of a tree,
        ``None`` if this backend does not support ``all_reduce``.
        """
        return None

    def replicas(
        self,
        arrays: list[A],
        all_reduce: object,
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

    # Compiled code.

    def stacks(self, array: A | None) -> bool:
        """Return whether norms along axes of an array are stacked in blocks.

        For ``None``, return whether any norms are stacked in compiled code.
        """
        return True

    def fast_values(self, fast: Callable[..., A], guarded: Callable[..., A]) -> Callable[..., A]:
        """Return a function of arrays with the derivatives of ``guarded``,
        and the values of either function.

        Both take the namespace first. Values need no guards against a division by 0, which make
        programs twice as large; derivatives do.
        """
        return partial(guarded, self.xp)

    def fence(self, rows: A) -> A:
        """Return stacked numbers, which compiled code computes once, not in each operation that
        uses them.
        """
        return rows

    def cond(self, ok: A, usual: Callable[[], list[A]], rare: Callable[[], list[A]]) -> list[A]:
        """Return ``usual()`` where ``ok`` (one boolean that cannot be read) is true,
        else ``rare()``.
        """
        return [self.xp.where(ok, a, b) for a, b in zip(usual(), rare(), strict=True)]


def stack_terms(backend: Backend[A], sums: list[A], terms: Terms) -> list[A]:
    """Return the sums of each block's norms, given the sums of each array."""
    rows = sums
    if terms.weigh is not None:
        rows = terms.weigh(sums)
    if len(rows) > len(terms.counts):
        op = op_of(terms.p)
        rows = [_add_rows(backend, group, op) for group in in_groups(rows, terms.counts)]
    return [stack_arrays(backend, group) for group in terms.in_blocks(rows)]


def _add_rows(backend: Backend[A], group: Sequence[A], op: Op) -> A:
    """Return the sum or the maximum of the sums of one norm's arrays."""
    if len(group) == 1:
        return group[0]
    return reduce_rows(backend, stack_arrays(backend, group), op)


def sum_examples(backend: Backend[A], arrays: Sequence[A]) -> list[A]:
    """Return arrays summed over their first axis, that of examples."""
    return [backend.xp.sum(array, axis=0) for array in arrays]


def reduce_rows(backend: Backend[A], rows: A, op: Op) -> A:
    """Return the sum or the maximum of the rows of an array."""
    rows = backend.fence(rows)
    return backend.xp.sum(rows, axis=0) if op == "sum" else backend.xp.max(rows, axis=0)


def stack_arrays(backend: Backend[A], arrays: Sequence[A]) -> A:
    """Return arrays of one shape stacked along a new first axis, in the widest of their dtypes."""
    xp = backend.xp
    if all([isinstance(array, NUMPY) for array in arrays]):
        # This takes half as long as np.stack.
        stacked: Any = np.array(arrays)
        return stacked
    if len(arrays) == 1:
        return xp.expand_dims(arrays[0], axis=0)

    # Move first: a device without float64 narrows the arrays, and their common dtype follows.
    moved = [backend.to_device_of(arrays[0], array) for array in arrays]
    dtype = xp.result_type(*{array.dtype for array in moved})
    return xp.stack([cast(xp, array, dtype) for array in moved])


def operand(backend: Backend[A], array: A, factor: Any) -> A:
    """Return a factor as an array on the device of another array, in float32 or wider."""
    if not hasattr(factor, "shape") or isinstance(factor, np.ndarray):
        factor = backend.from_host(np.asarray(factor), backend.device(array))

    # A product of float16 or bfloat16 numbers is computed in float32.
    xp = backend.xp
    dtype = xp.result_type(array.dtype, xp.float32)
    return cast(xp, backend.to_device_of(array, factor), dtype)
