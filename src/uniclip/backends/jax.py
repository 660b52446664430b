# SPDX-License-Identifier: MIT
"""JAX arrays, tracers and BCOO matrices.

Sharded arrays, and the named axes of ``shard_map``, ``pmap`` and ``vmap``.

In ``jax.shard_map`` the type of an array tells along which axes it varies from device to device;
along others it is the same on all devices. With ``check_vma=False``, in ``jax.pmap`` and in
``jax.vmap`` types tell nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from operator import add
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX 0.8
    from jax.core import get_opaque_trace_state

from uniclip.backends.base import (
    HOST,
    NODES,
    TRACED,
    ArrayFacts,
    Axes,
    Backend,
    FastResult,
    LeafInfo,
    Op,
    Reduce,
    Terms,
    WrappedLeaf,
    enter_both,
    operand,
    same,
    stack_terms,
    sum_dtype,
    sum_long_squares,
)
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.numpy import (
    HIGH,
    LOW,
    add_groups,
    array_squares,
    call_bound,
    fast_path_on_host,
    sum_of_squares,
)


def _one_by_one(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wait for a reduction before the next one starts, where CPU processes share arrays.

    There the collectives of programs that run at the same time deadlock (JAX 0.10, gloo).
    """

    @wraps(reduce)
    def reduced(*args: Any, **options: Any) -> jax.Array:
        return await_shared(reduce(*args, **options))

    return reduced


def await_shared(array: jax.Array) -> jax.Array:
    """Return an array, computed if it is shared by CPU processes."""
    if (
        not isinstance(array, jax.core.Tracer)
        and not array.is_fully_addressable
        and not on_device(array)
    ):
        array.block_until_ready()
    return array


def on_device(array: jax.Array) -> bool:
    """Whether an array is on an accelerator."""
    return any(device.platform != "cpu" for device in array.devices())


def _extreme(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the maximum or minimum, NaN if there is one;
    that of XLA drops NaN in sharded arrays.
    """

    def extreme(x: jax.Array, /, axis: Any = None, **options: Any) -> jax.Array:
        extremum = reduce(x, axis, **options)
        if jax.device_count() == 1 or not jnp.issubdtype(x.dtype, jnp.floating):
            return extremum
        # Uses the NaN that is there: a constant would trigger NaN debuggers.
        return extremum + REDUCTIONS["sum"](jnp.where(jnp.isnan(x), x, 0), axis, **options)

    return extreme


REDUCTIONS = {name: _one_by_one(getattr(jnp, name)) for name in ("all", "any", "mean", "sum")}
REDUCTIONS |= {name: _extreme(_one_by_one(getattr(jnp, name))) for name in ("max", "min")}


def _abs(x: jax.Array, /) -> jax.Array:
    """Return the modulus, with derivative 0 at 0 (JAX's own is 1 there)."""
    return x * jnp.sign(x) if jnp.isdtype(x.dtype, "real floating") else jnp.abs(x)


def _clip(x: jax.Array, /, min: Any = None, max: Any = None) -> jax.Array:
    """Clip, with derivative 1 on the bounds too (JAX's own is 1/2 there)."""
    clipped = jnp.clip(x, min, max)
    return jnp.where(clipped == x, x, clipped)


namespace = SimpleNamespace(**(vars(jnp) | REDUCTIONS | {"abs": _abs, "clip": _clip}))


@partial(jax.jit, inline=True)
def _sum_duplicates(leaf: sparse.BCOO) -> sparse.BCOO:
    """Return a matrix of as many entries, in which those of one index are summed in float32 or
    wider, padding as 0.

    The index of padding is beyond the shape.
    """
    bounds = jnp.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    data = leaf.data.astype(sum_dtype(jnp, leaf.dtype))
    data = jnp.where(jnp.expand_dims(inside, range(inside.ndim, data.ndim)), data, 0)
    return sparse.BCOO((data, leaf.indices), shape=leaf.shape).sum_duplicates(nse=leaf.nse)


_FLOATS = {
    jnp.dtype(name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
}


_DOUBLE = {jnp.dtype("float64"), jnp.dtype("complex128")}
_SINGLE = {jnp.dtype(name) for name in ("float16", "bfloat16", "float32")}
_LONG = 2**14
"""The largest number of entries that compiled code adds in float64 in no longer than in float32."""
_ROWS = 32
"""How many rows one reduction takes apart."""
_TOGETHER = 256
"""The number of arrays for which one call is compiled."""


def _can_share_a_call(arrays: list[jax.Array]) -> bool:
    """Whether one call can be compiled for the arrays,
    outside of code that is already being compiled.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return False
    first = arrays[0].sharding
    return all(
        array.sharding is first or array.sharding.device_set == first.device_set for array in arrays
    )


with jax.ensure_compile_time_eval():
    _OUTSIDE = get_opaque_trace_state()
    """JAX's state where nothing is traced."""


def _makes_tracers() -> bool:
    """Return whether a function is traced here, in which arrays that are made of constants are
    tracers, too.
    """
    # Inside of a transformation without compilation, such as jax.grad, they are not. Making one
    # takes long.
    return get_opaque_trace_state() != _OUTSIDE and isinstance(jnp.zeros(()), jax.core.Tracer)


def _float64_is_whole() -> bool:
    """Whether sums can be float64: that of a TPU has the exponents of float32."""
    return jax.default_backend() != "tpu"


@cache
def _first_device() -> jax.Device:
    return jax.local_devices()[0]


# jax.jit has no types that a checker understands.
_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit


@_compiled
def _squares(arrays: list[jax.Array]) -> jax.Array:
    """Return the sum of squares of each array, in its precision."""
    return jnp.stack(
        [
            jnp.sum(jnp.square(array.astype(jnp.result_type(jnp.float32, array.dtype))))
            for array in arrays
        ]
    )


def _squares_here(arrays: list[jax.Array], lengths: list[int]) -> np.ndarray[Any, Any]:
    """Return the sums of squares of groups of arrays that the host reads:
    many or long ones by one compiled call.
    """
    float32_sum = call_bound(arrays, sum([array.size for array in arrays])) or any(
        [array.dtype not in _SINGLE for array in arrays]
    )
    starts = (
        range(0, len(arrays), _TOGETHER) if not float32_sum and _can_share_a_call(arrays) else ()
    )
    parts = [_squares(arrays[start : start + _TOGETHER]) for start in starts]
    if not parts:
        return sum_of_squares(list(map(np.asarray, arrays)), lengths)
    totals = np.concatenate(list(map(np.asarray, parts))).astype(np.float64)
    wrapped = np.flatnonzero(~((totals > LOW) & (totals < HIGH)))
    totals[wrapped] = [array_squares(np.asarray(arrays[number])) for number in wrapped]
    return np.array(add_groups(totals.tolist(), lengths))


@_compiled
def _copy(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return copies."""
    return list(map(jnp.copy, arrays))


@_compiled
def _scale_all(arrays: list[jax.Array], factors: Any) -> list[jax.Array]:
    return [_product(array, factors[number]) for number, array in enumerate(arrays)]


def _product(array: jax.Array, factor: jax.Array) -> jax.Array:
    """Return a product in the wider of two dtypes, also where the user's code may not mix them."""
    if jnp.iscomplexobj(array):
        return array * factor.astype(array.dtype)
    return (array.astype(factor.dtype) * factor).astype(array.dtype)


Names = tuple[Any, ...]


def names_of(all_reduce: Any) -> Names | None:
    """Return the axes with a name, ``None`` if there is none."""
    names = (all_reduce,) if isinstance(all_reduce, str) else all_reduce
    fits = (
        isinstance(names, tuple) and len(names) > 0 and all(isinstance(name, str) for name in names)
    )
    return names if fits else None


def varying(array: jax.Array) -> frozenset[Any]:
    """Return the axes along which a value is known to differ from device to device."""
    aval = getattr(array, "aval", None)
    axes = getattr(aval, "manual_axis_type", None)  # before JAX 0.10 ``vma``
    names: frozenset[Any] = getattr(aval, "vma", frozenset()) if axes is None else axes.varying
    return frozenset(names)


def _copies(
    arrays: Sequence[jax.Array],
    names: Names,
    shared: list[bool] | None,
    place: Callable[[int], str],
) -> list[int]:
    """Return how many devices along the axes hold each array.

    Refuse arrays for which it is unknown.

    Raises
    ------
    ValueError
        If there is no such axis here.
    ValueError
        If an array varies along an axis without a name, or neither types nor ``shared`` tell which
        leaves are copies.
    """
    sizes = {name: _axis_size(name) for name in names}
    unknown = [name for name in names if not _is_typed(name)]
    if unknown and shared is None and arrays:
        raise ValueError(_untold(unknown[0], place))
    if shared is None:
        shared = [False] * len(arrays)

    def count(number: int, array: jax.Array, copy: bool) -> int:
        axes = varying(array)
        more = sorted(str(name) for name in axes.difference(names) if _axis_size(name) > 1)
        if more:
            raise ValueError(_unnamed(names, more, place(number)))
        return math.prod(
            size
            for name, size in sizes.items()
            if copy or (name not in axes and name not in unknown)
        )

    return [count(*arguments) for arguments in zip(range(len(arrays)), arrays, shared, strict=True)]


def _axis_size(name: Any) -> int:
    """Return the number of devices along an axis."""
    try:
        size: int = jax.lax.psum(1, name)
    except NameError as error:
        msg = (
            f"all_reduce names the axis {name!r}, and there is none here: call it inside of "
            "jax.shard_map or jax.pmap, with that axis; under jax.jit, where arrays are whole, "
            "leave all_reduce out"
        )
        raise ValueError(msg) from error
    return size


def _is_typed(name: Any) -> bool:
    """Whether types tell what varies along an axis: if so,
    the number of a device along it surely varies.
    """
    return name in varying(jax.lax.axis_index(name))


def _untold(name: Any, place: Callable[[int], str]) -> str:
    return (
        f"all_reduce={name!r}: in jax.pmap, and in jax.shard_map with check_vma=False, it cannot "
        f"be known whether {place(0)}, for one, is a part of the gradient or the same on each "
        "device of the axis: pass shared=lambda path, leaf: False if all leaves are parts, else "
        "a function that returns True for the others (or leave out check_vma=False); to_optax "
        "calls all_reduce axis_name"
    )


def _unnamed(names: Names, more: list[str], where: str) -> str:
    given = repr(names if len(names) > 1 else names[0]) if names else None
    every = (*names, *more)
    return (
        f"all_reduce={given}, but {where} varies along the axis {more[0]!r} of jax.shard_map: "
        f"pass all_reduce={every if len(every) > 1 else every[0]!r} if each device holds a part "
        "of it; add the gradients first, by jax.lax.psum or pmean, if they are to be added; and "
        "if each device clips its own, pass a function of (array, op), such as lambda array, op: "
        "array, that joins them along no more axes; to_optax calls all_reduce axis_name"
    )


def _reduce_over_axes(names: Names, array: jax.Array, op: str) -> jax.Array:
    """Return the sum or the maximum over devices.

    A value that is the same on n devices counts n times.

    All values are taken as ones that vary along all axes, so that XLA makes one reduction of many.
    """
    missing = tuple([name for name in names if name not in varying(array) and _is_typed(name)])
    array = jax.lax.pcast(array, missing, to="varying") if missing else array
    return _largest(names, array) if op == "max" else jax.lax.psum(array, names)


# JAX has no types that a checker understands.
_with_slope: Callable[[Callable[..., Any]], Any] = partial(jax.custom_jvp, nondiff_argnums=(0,))


@_with_slope
def _largest(names: Names, array: jax.Array) -> jax.Array:
    """Return the maximum along axes, for which JAX has no derivative."""
    return jax.lax.pmax(array, names)


def _slope(
    names: Names, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the derivative: that of the largest value, or the mean of those of several."""
    [array], [tangent] = primals, tangents
    top = _largest(names, array)
    mine = jnp.equal(array, top).astype(array.dtype)
    return top, jax.lax.psum(mine / jax.lax.psum(mine, names) * tangent, names)


_largest.defjvp(_slope)


class _Structure:
    """What a node holds beside its children, equal to that of another one if JAX can tell:
    it may hold arrays.
    """

    def __init__(self, treedef: Any) -> None:
        self._treedef = treedef
        self.unflatten = treedef.unflatten

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Structure) and bool(self._treedef == other._treedef)
        except ValueError:
            return False

    def __hash__(self) -> int:
        return hash(self._treedef)


def flatten_registered(node: Any) -> tuple[list[Any], Any, tuple[Any, ...]] | None:
    """Return children, structure and keys of a node of a registered class.

    ``None`` for another object.
    """
    tree_util = jax.tree_util
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    if treedef == tree_util.tree_structure(0):
        return None
    keys = [_key(entry) for (entry,), _ in pairs]
    if len(set(keys)) < len(keys):  # of a class that gives several children the same name
        keys = list(range(len(keys)))
    return [child for _, child in pairs], _Structure(treedef), tuple(keys)


def _key(entry: Any) -> Any:
    """Return the key, index or name in an entry of a JAX path; it may be one itself."""
    return next(
        (getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry
    )


@cache
def _fast_values(
    plain: Callable[..., jax.Array], guarded: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return a function with the values of one function and the derivatives of another,
    traced once for all calls.
    """
    function = jax.custom_jvp(partial(plain, namespace))

    def slope(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        return function(*primals), jax.jvp(partial(guarded, namespace), primals, tangents)[1]

    function.defjvp(slope)
    return jax.jit(function, inline=True)


@jax.custom_jvp  # type: ignore[untyped-decorator]
def _unstack(array: jax.Array) -> tuple[jax.Array, ...]:
    """Return the rows of a vector by one reduction that has a result for each.

    XLA compiles a product with a slice twenty times as long as one with a result of its own, and
    makes anew in each product what the slice is of. The row of zeros, added, is what makes it a
    reduction.
    """
    two = jax.lax.optimization_barrier(jnp.stack([array, jnp.zeros_like(array)]))
    rows = (
        tuple([two[:, row] for row in range(array.shape[0])])
        if array.shape[0] > 1
        else (two[:, 0],) * 2
    )
    zero = np.zeros((), array.dtype)
    each = jax.lax.reduce(rows, (zero,) * len(rows), lambda a, b: tuple(map(add, a, b)), (0,))
    return tuple(each[: array.shape[0]])


@_unstack.defjvp  # type: ignore[untyped-decorator]
def _slopes(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return _unstack(*primals), tuple(tangents[0])


class _JAX(Backend[jax.Array]):
    opens_nodes = True
    joins_by = (
        "the name of an axis of jax.shard_map or jax.pmap, a tuple of such names, or a function of "
        "(array, op)"
    )

    def signature(self, leaves: list[Any]) -> Any:
        return tuple([None if leaf is None else _kind_of(leaf) for leaf in leaves])

    def array_facts(self, arrays: list[jax.Array]) -> ArrayFacts:
        # Derivatives are traced.
        return super().array_facts(arrays)._replace(records=False, double=_float64_is_whole())

    def mode(self, leaf_info: LeafInfo, beside: Any = ()) -> int:
        # What is made of constants in compiled code is a tracer, and no host reads it.
        return TRACED if _makes_tracers() else super().mode(leaf_info, beside)

    def allow_float64(self) -> AbstractContextManager[Any]:
        return jax.enable_x64(True) if _float64_is_whole() else nullcontext()

    def as_numpy(self, array: jax.Array) -> np.ndarray[Any, Any] | None:
        return np.asarray(array) if self.readable(array) else None

    def device(self, array: jax.Array) -> Any:
        if array is None or self.traced(array):
            return None
        sharding = array.sharding
        return (
            NamedSharding(sharding.mesh, PartitionSpec())
            if isinstance(sharding, NamedSharding)
            else sharding
        )

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> jax.Array:
        single = isinstance(device, SingleDeviceSharding) and device.device_set == {_first_device()}
        usual = device is None or (single and jax.config.jax_default_device is None)
        if usual:
            return jnp.asarray(array)  # takes half as long
        if device.is_fully_addressable:
            return jax.device_put(array, device)
        # Without comparing the value over all processes, as device_put does.
        return jax.make_array_from_callback(array.shape, device, lambda index: array[index])

    def to_host(self, arrays: list[jax.Array]) -> list[np.ndarray[Any, Any]]:
        if all(map(self.readable, arrays)):
            # device_get takes longer for each array than reading it
            return list(map(np.asarray, arrays))
        return list(map(np.asarray, jax.device_get(arrays)))

    def fast_path(self, leaves: list[Any], limit: float, *, in_place: bool) -> FastResult | None:
        arrays = [leaf for leaf in leaves if leaf is not None]
        # BCOO is none.
        if in_place or not (arrays and all([isinstance(array, jax.Array) for array in arrays])):
            return None
        if _makes_tracers():
            return None
        # which no tracer is
        if not all([array.dtype == jnp.float32 and self.readable(array) for array in arrays]):
            return None

        def scale(factor: float) -> list[jax.Array]:
            return self.multiply(arrays, [factor] * len(arrays), in_place=False, zero=False)

        [total] = _squares_here(arrays, [len(arrays)])
        return fast_path_on_host(leaves, float(total), limit, scale, self.device(arrays[0]))

    def to_keep(self, arrays: list[jax.Array]) -> list[jax.Array]:
        # They may be donated later.
        return _copy(arrays) if _can_share_a_call(arrays) else list(map(jnp.copy, arrays))

    def sums(self, mode: int, terms: Terms) -> list[jax.Array]:
        if mode == HOST:
            if terms.whole:
                return terms.in_blocks(_squares_here(terms.arrays, terms.counts))
            return DEFAULT.sums(mode, terms._replace(arrays=list(map(np.asarray, terms.arrays))))
        if mode == TRACED and terms.p == 2 and terms.units is None:
            return stack_terms(self, sum_long_squares(self, terms, self._short), terms)
        return super().sums(mode, terms)

    def _short(self, array: jax.Array) -> jax.Array | None:
        """Return the float32 sum of squares of a long array:
        XLA's loop for float64 takes up to twice as long.
        """
        long = (
            all([type(n) is int for n in array.shape])
            and array.size > _LONG
            and array.dtype in _SINGLE
            and jax.device_count() == 1
            and not self.debug_infs()
        )
        return jnp.sum(jnp.square(array.astype(jnp.float32))) if long else None

    def pieces(self, array: jax.Array, axes: Axes = None) -> Iterable[jax.Array] | None:
        return None  # a compiler makes no copy

    def multiply(
        self, arrays: list[jax.Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[jax.Array]:
        numbers = not any([hasattr(factor, "shape") for factor in factors])
        if same(factors) and self.traced(factors[0]):
            # Compiled, donated gradients are not written again where ok is true; a conditional
            # copies them.
            ok, new = (
                jnp.equal(factors[0], 1),
                super().multiply(arrays, factors, in_place=False, zero=zero),
            )
            return [jnp.where(ok, *pair) for pair in zip(arrays, new, strict=True)]
        if in_place or (zero and not (numbers and all(factors))) or not _can_share_a_call(arrays):
            return super().multiply(arrays, factors, in_place=in_place, zero=zero)
        if numbers:
            by: Any = np.asarray(
                factors,
                np.float64 if any(array.dtype in _DOUBLE for array in arrays) else np.float32,
            )
        else:
            by = [operand(self, *pair) for pair in zip(arrays, factors, strict=True)]
            if not _can_share_a_call(by) or any([jnp.iscomplexobj(array) for array in arrays]):
                return super().multiply(arrays, by, in_place=False, zero=zero)
        ends = range(0, len(arrays), _TOGETHER)
        return [
            new
            for i in ends
            for new in _scale_all(arrays[i : i + _TOGETHER], by[i : i + _TOGETHER])
        ]

    def reducer(self, all_reduce: Any) -> Reduce | None:
        names = names_of(all_reduce)
        return None if names is None else partial(_reduce_over_axes, names)

    def replicas(
        self,
        arrays: list[jax.Array],
        all_reduce: Any,
        shared: list[bool] | None,
        place: Callable[[int], str],
    ) -> list[int] | None:
        names = () if all_reduce is None else names_of(all_reduce)
        counts = [] if names is None else _copies(arrays, names, shared, place)
        return None if all(count == 1 for count in counts) else counts

    def rank(self) -> int:
        return int(jax.process_index())

    def stacks(self, array: jax.Array | None) -> bool:
        # To be stacked, those that are sharded would be gathered.
        return (
            array is not None
            and not self.traced(array)
            and bool(array.sharding.is_fully_replicated)
        )

    def is_array(self, leaf: Any) -> bool:
        if not isinstance(leaf, (jax.Array, sparse.JAXSparse)):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        return leaf.dtype in _FLOATS or (
            jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype.name != "float8_e8m0fnu"
        )

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        if isinstance(leaf, sparse.JAXSparse) and not isinstance(leaf, sparse.BCOO):
            return (
                "of the sparse kinds only BCOO is taken, because it can be summed where an index "
                "occurs twice"
            )
        return None

    def debug_infs(self) -> bool:
        return bool(jax.config.jax_debug_infs)

    def traced(self, array: jax.Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def readable(self, array: jax.Array) -> bool:
        if self.traced(array) or on_device(array):
            return False
        # of which each process has a copy
        return bool(array.is_fully_addressable or array.is_fully_replicated)

    def unwrap(self, leaf: Any, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
        # which JAX does not promote
        if leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, np.floating):
            return WrappedLeaf(leaf.astype(jnp.float32))
        if not isinstance(leaf, sparse.BCOO):
            return super().unwrap(leaf, in_place=in_place, whole=whole)
        summed = _sum_duplicates(leaf)

        def back(new: jax.Array) -> Any:
            # Parts of its type.
            flags = {"indices_sorted": leaf.indices_sorted, "unique_indices": leaf.unique_indices}
            return sparse.BCOO((new, summed.indices), shape=leaf.shape, **flags)

        alone = summed.n_sparse == 1 and not summed.n_batch
        # The index of padding lies behind the last row.
        return WrappedLeaf(
            summed.data,
            back,
            rows=jnp.minimum(summed.indices[:, 0], leaf.shape[0] - 1) if alone else (),
        )

    def fast_values(
        self, plain: Callable[..., jax.Array], guarded: Callable[..., jax.Array]
    ) -> Callable[..., jax.Array]:
        return _fast_values(plain, guarded)

    def reduce_rows(self, rows: jax.Array, op: Op) -> jax.Array:
        # Of the sum of k stacked numbers XLA makes k additions, and copies all of them into each
        # user of the sum.
        return super().reduce_rows(
            jax.lax.optimization_barrier(rows) if self.traced(rows) else rows, op
        )

    def unstack(self, array: jax.Array) -> list[jax.Array]:
        if array.ndim > 1 or not self.traced(array):
            return super().unstack(array)
        return [
            row
            for start in range(0, array.shape[0], _ROWS)
            for row in _unstack(array[start : start + _ROWS])
        ]

    def cond(
        self,
        ok: jax.Array,
        usual: Callable[[], list[jax.Array]],
        rare: Callable[[], list[jax.Array]],
    ) -> list[jax.Array]:
        if self.traced(ok):
            return list(jax.lax.cond(ok, usual, rare))

        # Outside of jit, JAX would compile a conditional at every call, and `rare` reads the
        # gradients twice more than `usual`: waiting for one flag takes less than either.
        return usual() if bool(ok) else rare()

    def computation_context(self, first: jax.Array | None = None) -> AbstractContextManager[Any]:
        computation_context = super().computation_context(first)
        if (
            jax.config.jax_numpy_dtype_promotion == "standard"
            and jax.config.jax_numpy_rank_promotion == "allow"
        ):
            return computation_context
        # These are for the user's own code: here dtypes and ranks are promoted on purpose.
        return enter_both(
            computation_context,
            enter_both(jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")),
        )

    def detach(self, array: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(array) if self.traced(array) else array

    def to_device_of(self, other: jax.Array, array: jax.Array) -> jax.Array:
        if self.traced(array) or self.traced(other) or array.devices() == other.devices():
            return array
        mesh = isinstance(other.sharding, NamedSharding)
        return jax.device_put(
            array, NamedSharding(other.sharding.mesh, PartitionSpec()) if mesh else other.sharding
        )


def _kind_of(leaf: Any) -> Any:
    """Return the kind of a leaf, or of what is none."""
    array = getattr(leaf, "data", leaf) if isinstance(leaf, sparse.JAXSparse) else leaf
    place = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    return type(leaf), type(array), getattr(leaf, "dtype", None), place


BACKEND = _JAX(namespace)
for _class, _names, _rebuild in NODES:
    _keys = tuple(map(jax.tree_util.GetAttrKey, _names))
    jax.tree_util.register_pytree_with_keys(
        _class,
        lambda node, keys=_keys: (tuple(zip(keys, node, strict=True)), None),
        _rebuild,
        lambda node: (tuple(node), None),
    )
