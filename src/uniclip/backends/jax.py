# SPDX-License-Identifier: MIT
"""JAX arrays, tracers and BCOO matrices, sharded arrays,
and the named axes of ``shard_map``, ``pmap`` and ``vmap``.

In ``jax.shard_map`` the type of an array has the axes along which it varies from device to device;
along others it is the same on all devices. With ``check_vma=False``, in ``jax.pmap`` and in
``jax.vmap`` types have no axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from itertools import chain
from operator import add
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX 0.8
    from jax.core import get_opaque_trace_state

from uniclip._types import Axes, Op, Path, Tree, View
from uniclip.backends.arithmetic import enter_both, power_sum, same, sum_dtype, zeroed
from uniclip.backends.base import (
    HOST,
    NODES,
    TRACED,
    ArrayFacts,
    Backend,
    LeafInfo,
    OneNorm,
    Products,
    Reduce,
    Terms,
    WrappedLeaf,
    operand,
    rounded_norm,
    stack_terms,
    take,
)
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.numpy import (
    FULL,
    HIGH,
    LOW,
    add_groups,
    array_squares,
    call_bound,
    sum_of_squares,
)

Axis: TypeAlias = int | Sequence[int] | None
"""The argument ``axis`` of a reduction."""


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
    if isinstance(array, jax.core.Tracer) or array.is_fully_addressable or on_device(array):
        return array
    array.block_until_ready()
    return array


def on_device(array: jax.Array) -> bool:
    """Return whether an array is on an accelerator."""
    return any(device.platform != "cpu" for device in array.devices())


def _extreme(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a maximum or minimum that keeps NaN. XLA's drops NaN in sharded arrays."""

    def extreme(x: jax.Array, /, axis: Axis = None, **options: Any) -> jax.Array:
        extremum = reduce(x, axis, **options)
        if jax.device_count() == 1 or not jnp.issubdtype(x.dtype, jnp.floating):
            return extremum
        # Use the NaN that is there: a constant would trigger NaN debuggers.
        return extremum + REDUCTIONS["sum"](jnp.where(jnp.isnan(x), x, 0), axis, **options)

    return extreme


REDUCTIONS = {name: _one_by_one(getattr(jnp, name)) for name in ("all", "any", "mean", "sum")}
REDUCTIONS |= {name: _extreme(_one_by_one(getattr(jnp, name))) for name in ("max", "min")}


def _abs(x: jax.Array, /) -> jax.Array:
    """Return the modulus, with derivative 0 at 0 (JAX's own is 1 there)."""
    if jnp.isdtype(x.dtype, "real floating"):
        return x * jnp.sign(x)
    return jnp.abs(x)


def _clip(
    x: jax.Array, /, min: jax.Array | float | None = None, max: jax.Array | float | None = None
) -> jax.Array:
    """Clip, with derivative 1 on the bounds too (JAX's own is 1/2 there)."""
    clipped = jnp.clip(x, min, max)
    return jnp.where(clipped == x, x, clipped)


def _contract(array: jax.Array, factors: jax.Array, *, zero: bool) -> jax.Array:
    """Return the sum of the rows of an array, each multiplied by its factor.

    As one contraction, which XLA computes much faster on a CPU than a sum over the first axis.
    With ``zero``, a factor of 0 turns NaN and ∞ into 0, too.
    """
    if zero:
        array = zeroed(jnp, array, factors)
    # By default the matrix units of GPUs and TPUs round float32 numbers.
    total = jnp.tensordot(factors.reshape(-1), array, axes=1, precision=jax.lax.Precision.HIGHEST)
    return await_shared(total)


@partial(jax.jit, inline=True)
def _sum_duplicates(leaf: sparse.BCOO) -> sparse.BCOO:
    """Return a matrix of as many elements, in which those of one index are summed in float32 or
    wider, with zeros for padding.

    The index of padding is beyond the shape.
    """
    # The values of padding may be anything, and must not be counted.
    bounds = jnp.asarray(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse])
    inside = jnp.all(leaf.indices < bounds, axis=-1)
    data = leaf.data.astype(sum_dtype(jnp, leaf.dtype))
    data = jnp.where(jnp.expand_dims(inside, range(inside.ndim, data.ndim)), data, 0)
    return sparse.BCOO((data, leaf.indices), shape=leaf.shape).sum_duplicates(nse=leaf.nse)


_SINGLE = set(map(jnp.dtype, ("float16", "bfloat16", "float32")))
_DOUBLE = set(map(jnp.dtype, ("float64", "complex128")))
_FLOATS = _SINGLE | _DOUBLE | {jnp.dtype("complex64")}
_UNITS = (2.0**80, 1.0, 2.0**-100)
"""In one of these units, the squares of any float32 numbers have a float32 sum that is in range."""
_UNSTACKED = 32
"""How many rows one reduction unstacks."""
_PER_CALL = 256
"""The number of arrays for which one call is compiled."""


def _can_share_a_call(arrays: Sequence[jax.Array]) -> bool:
    """Return whether one call can be compiled for the arrays,
    outside of code that is already being compiled.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return False

    # One call takes arrays of the same devices. Most share the very same sharding.
    first = arrays[0].sharding
    shardings = [array.sharding for array in arrays]
    return all(other is first or other.device_set == first.device_set for other in shardings)


def _in_calls(arrays: Sequence[Any] | View) -> Iterator[Any]:
    """Yield the arrays of one compiled call after the other."""
    for start in range(0, len(arrays), _PER_CALL):
        yield arrays[start : start + _PER_CALL]


with jax.ensure_compile_time_eval():
    _OUTSIDE = get_opaque_trace_state()
    """JAX's state where nothing is traced."""


def _makes_tracers() -> bool:
    """Return whether a function is traced here in which new arrays are tracers, too."""
    # Making an array takes long, so look at the state first. Inside of a transformation without
    # compilation, such as jax.grad, new arrays are no tracers.
    return get_opaque_trace_state() != _OUTSIDE and isinstance(jnp.zeros(()), jax.core.Tracer)


def _float64_is_whole() -> bool:
    """Return whether sums can be float64. That of a TPU has the range of float32."""
    return jax.default_backend() != "tpu"


def _allow_float64() -> AbstractContextManager[Any]:
    """Return a context in which arrays can be float64, where sums can be."""
    return jax.enable_x64(True) if _float64_is_whole() else nullcontext()


def _widened(array: jax.Array) -> jax.Array:
    """Return an array in float64, where sums can be."""
    return array.astype(jnp.float64) if _float64_is_whole() else array


@cache
def _first_device() -> jax.Device:
    """Return the device that JAX uses by default."""
    return jax.local_devices()[0]


# jax.jit has no types that a checker understands.
_compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit


@_compiled
def _squares(arrays: list[jax.Array]) -> jax.Array:
    """Return the sum of squares of each array, in its precision."""
    sums = []
    for array in arrays:
        dtype = jnp.result_type(jnp.float32, array.dtype)
        sums.append(jnp.sum(jnp.square(array.astype(dtype))))
    return jnp.stack(sums)


def _squares_on_host(arrays: list[jax.Array], lengths: list[int]) -> View:
    """Return the sums of squares of groups of arrays that the host reads:
    many or long ones by compiled calls.
    """
    sizes = [array.size for array in arrays]
    one_by_one = call_bound(arrays, sum(sizes)) or any(
        [array.dtype not in _SINGLE for array in arrays]
    )
    if one_by_one or not _can_share_a_call(arrays):
        return sum_of_squares(list(map(np.asarray, arrays)), lengths)

    # Sums of float32 squares that are out of range, and those of zeros, are computed again.
    parts = list(map(_squares, _in_calls(arrays)))
    totals = np.concatenate(list(map(np.asarray, parts))).astype(np.float64)
    out_of_range = np.flatnonzero(~((totals > LOW) & (totals < HIGH)))
    for number in out_of_range:
        totals[number] = array_squares(np.asarray(arrays[number]))
    return np.array(add_groups(totals.tolist(), lengths))


@_compiled
def _scale_all(arrays: list[jax.Array], factors: jax.Array | list[jax.Array]) -> list[jax.Array]:
    """Return each array times its factor."""
    return [_product(array, factors[number]) for number, array in enumerate(arrays)]


def _product(array: jax.Array, factor: jax.Array) -> jax.Array:
    """Return a product, computed in the wider of two dtypes, in the dtype of the array.

    The conversions are explicit, since a user's settings may forbid implicit ones.
    """
    if jnp.iscomplexobj(array):
        return array * factor.astype(array.dtype)
    return (array.astype(factor.dtype) * factor).astype(array.dtype)


Names: TypeAlias = tuple[str, ...]
"""The names of axes."""


def axis_names_of(all_reduce: object) -> Names | None:
    """Return the names of axes, ``None`` if ``all_reduce`` is something else."""
    if isinstance(all_reduce, str):
        return (all_reduce,)
    if not isinstance(all_reduce, tuple) or not all_reduce:
        return None
    if not all(isinstance(name, str) for name in all_reduce):
        return None
    return all_reduce


def varying(array: jax.Array) -> frozenset[str]:
    """Return the axes along which a value is known to differ from device to device."""
    aval = getattr(array, "aval", None)
    axes = getattr(aval, "manual_axis_type", None)
    if axes is None:
        # The attribute before JAX 0.10.
        return frozenset(getattr(aval, "vma", ()))
    return frozenset(axes.varying)


def _count_replicas(
    arrays: Sequence[jax.Array],
    names: Names,
    shared: list[bool] | None,
    place: Callable[[int], str],
) -> list[int]:
    """Return how many devices along the axes hold each array.

    Raises
    ------
    ValueError
        If there is no such axis here.
    ValueError
        If an array varies along an axis that is not in ``names``, or if neither types nor
        ``shared`` show which leaves are replicas.
    """
    sizes = {name: _axis_size(name) for name in names}
    untyped = [name for name in names if not _is_typed(name)]
    if untyped and shared is None and arrays:
        raise ValueError(_unknown_layout(untyped[0], place(0)))

    counts = []
    for number, array in enumerate(arrays):
        axes = varying(array)
        unnamed = sorted(str(name) for name in axes.difference(names) if _axis_size(name) > 1)
        if unnamed:
            raise ValueError(_missing_names(names, unnamed, place(number)))

        # Without types, an array is a shard along every axis, unless ``shared`` is true of it.
        is_copy = shared is not None and shared[number]
        same_along = sizes.keys() if is_copy else sizes.keys() - axes - set(untyped)
        counts.append(math.prod(take(sizes, same_along)))
    return counts


def _axis_size(name: str) -> int:
    """Return the number of devices along an axis."""
    # The sum of a constant is known while JAX traces: it is the size of the axis.
    try:
        return jax.lax.psum(1, name)
    except NameError as error:
        msg = (
            f"all_reduce names the axis {name!r}, which does not exist here; call it inside "
            "jax.shard_map or jax.pmap with that axis. Under jax.jit, where arrays are whole, "
            "leave out all_reduce"
        )
        raise ValueError(msg) from error


def _is_typed(name: str) -> bool:
    """Return whether types have the axis: if so, the index of a device along it varies."""
    return name in varying(jax.lax.axis_index(name))


def _unknown_layout(name: str, where: str) -> str:
    """Return the error text for arrays whose types do not have an axis."""
    return (
        f"all_reduce={name!r} can't show whether {where}, for example, is a shard or the same on "
        "each device, because arrays have no axes in jax.pmap, and in jax.shard_map with "
        "check_vma=False; pass shared=lambda path, leaf: False if all leaves are shards, else a "
        "function that returns True for the others, or leave out check_vma=False. In to_optax, "
        "all_reduce is called axis_name"
    )


def _missing_names(names: Names, unnamed: list[str], where: str) -> str:
    """Return the error text for an array that varies along axes that ``all_reduce`` lacks."""
    return (
        f"all_reduce={_as_argument(names)}, but {where} varies along the axis {unnamed[0]!r} of "
        f"jax.shard_map; pass all_reduce={_as_argument((*names, *unnamed))} if each device has a "
        "shard of it, or add the gradients first, by jax.lax.psum or pmean. For each device to "
        "clip its own, pass a function that reduces over no more axes, such as lambda array, op: "
        "array. In to_optax, all_reduce is called axis_name"
    )


def _as_argument(names: Names) -> str:
    """Return the shortest ``all_reduce`` for some names."""
    if not names:
        return "None"
    return repr(names if len(names) > 1 else names[0])


def _reduce_over_axes(names: Names, array: jax.Array, op: Op) -> jax.Array:
    """Return the sum or the maximum over devices.

    A value that is the same on n devices counts n times.
    """
    # Cast to vary along all axes, so that XLA makes one reduction of many.
    missing = tuple([name for name in names if name not in varying(array) and _is_typed(name)])
    if missing:
        array = jax.lax.pcast(array, missing, to="varying")

    if op == "max":
        return _largest(names, array)
    return jax.lax.psum(array, names)


# JAX has no types that a checker understands.
_with_derivative: Callable[[Callable[..., Any]], Any] = partial(
    jax.custom_jvp, nondiff_argnums=(0,)
)


@_with_derivative
def _largest(names: Names, array: jax.Array) -> jax.Array:
    """Return the maximum along axes. JAX has no derivative of it."""
    return jax.lax.pmax(array, names)


def _largest_derivative(
    names: Names, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the derivative: that of the largest value, or the mean of those of several."""
    [array] = primals
    [tangent] = tangents

    # Devices with equal largest values share the derivative.
    top = _largest(names, array)
    is_largest = jnp.equal(array, top).astype(array.dtype)
    weight = is_largest / jax.lax.psum(is_largest, names)
    return top, jax.lax.psum(weight * tangent, names)


_largest.defjvp(_largest_derivative)


class _Structure:
    """The structure of a node without its children.

    It may hold arrays, which JAX cannot always compare. Then two structures are not equal.
    """

    def __init__(self, treedef: jax.tree_util.PyTreeDef) -> None:
        self._treedef = treedef
        self.unflatten = treedef.unflatten

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Structure) and bool(self._treedef == other._treedef)
        except ValueError:
            return False

    def __hash__(self) -> int:
        return hash(self._treedef)


def flatten_registered(node: Tree) -> tuple[list[Tree], _Structure, Path] | None:
    """Return children, structure and keys of a node of a class that is registered with JAX.

    ``None`` for another object.
    """
    tree_util = jax.tree_util
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    # JAX treats an object of an unregistered class as a leaf.
    if treedef == tree_util.tree_structure(0):
        return None

    keys = [_key(entry) for (entry,), _ in pairs]
    # A class may give several children the same name.
    if len(set(keys)) < len(keys):
        keys = list(range(len(keys)))
    return [child for _, child in pairs], _Structure(treedef), tuple(keys)


def _key(entry: object) -> object:
    """Return the key, index or name in an entry of a JAX path; it may be one itself."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


@cache
def _fast_values(
    fast: Callable[..., jax.Array], guarded: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return a function with the values of one function and the derivatives of another,
    traced once for all calls.
    """
    function = jax.custom_jvp(partial(fast, namespace))

    def derivative(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        # JAX' derivative of a quotient has the square of the divisor, which leaves the range of
        # float32.
        with _allow_float64():
            wide = [tuple(map(_widened, arrays)) for arrays in (primals, tangents)]
            _, tangent = jax.jvp(partial(guarded, namespace), *wide)
            value = function(*primals)
            return value, tangent.astype(value.dtype)

    function.defjvp(derivative)
    return jax.jit(function, inline=True)


def _unstack(array: jax.Array, /, *, axis: int = 0) -> tuple[jax.Array, ...]:
    """Return the parts of an array along an axis; those of a traced vector by few reductions."""
    if array.ndim > 1 or not isinstance(array, jax.core.Tracer):
        return tuple(jnp.unstack(array, axis=axis))
    rows: list[jax.Array] = []
    for start in range(0, array.shape[0], _UNSTACKED):
        rows += _reduce_to_elements(array[start : start + _UNSTACKED])
    return tuple(rows)


@jax.custom_jvp  # type: ignore[untyped-decorator]
def _reduce_to_elements(array: jax.Array) -> tuple[jax.Array, ...]:
    """Return the elements of a vector by one reduction that has a result for each.

    XLA compiles a product with a slice twenty times as long as one with a result of its own, and
    computes the sliced array again in each product. The row of zeros, added, makes it a reduction.
    """
    count = array.shape[0]
    padded = jax.lax.optimization_barrier(jnp.stack([array, jnp.zeros_like(array)]))
    columns = [padded[:, row] for row in range(count)]
    # A reduction of one operand would return an array in the place of a tuple.
    if count == 1:
        columns *= 2

    def add_all(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(add, first, second))

    zero = np.zeros((), array.dtype)
    rows = jax.lax.reduce(tuple(columns), (zero,) * len(columns), add_all, (0,))
    return tuple(rows[:count])


@_reduce_to_elements.defjvp  # type: ignore[untyped-decorator]
def _unstack_derivative(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    return _reduce_to_elements(*primals), tuple(tangents[0])


namespace = SimpleNamespace(
    **(vars(jnp) | REDUCTIONS | {"abs": _abs, "clip": _clip, "unstack": _unstack})
)


def _sum_squares(backend: Backend[jax.Array], array: jax.Array, axes: Axes) -> jax.Array:
    """Return ``Σ|x|²`` in float64 on a GPU, of narrower numbers by float32 sums."""
    if array.dtype not in _SINGLE:
        return power_sum(backend, array, 2, axes)
    return _sum_in_units(axes, array)


@_with_derivative
def _sum_in_units(axes: Axes, array: jax.Array) -> jax.Array:
    """Return ``Σx²`` in float64 by float32 sums in three units, of which one is in range.

    Many GPUs have few units for float64. A compiler adds all three in one pass, and no conditional
    is needed, for which the host would wait.
    """
    array = array.astype(jnp.float32)
    sums = []
    for unit in _UNITS:
        total = jnp.sum(jnp.square(array * np.float32(1 / unit)), axis=axes)
        sums.append(total.astype(jnp.float64) * unit**2)

    large, usual, small = sums
    return jnp.where(usual > LOW, jnp.where(usual < HIGH, usual, large), small)


def _derivative_in_float64(
    axes: Axes, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the derivative in float64, where no unit is needed."""
    # Code that is compiled already may be differentiated where float64 is not allowed.
    with _allow_float64():
        array, tangent = map(_widened, (*primals, *tangents))
        return _sum_in_units(axes, *primals), jnp.sum(2 * array * tangent, axis=axes)


_sum_in_units.defjvp(_derivative_in_float64)


class _JAX(Backend[jax.Array]):
    opens_nodes = True
    joins_by = (
        "the name of an axis of jax.shard_map or jax.pmap, a tuple of such names, or a function of "
        "(array, op)"
    )

    def signature(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        return tuple([None if leaf is None else _format_of(leaf) for leaf in leaves])

    def array_facts(self, arrays: list[jax.Array]) -> ArrayFacts:
        # JAX traces derivatives, and records none.
        return super().array_facts(arrays)._replace(records=False, double=_float64_is_whole())

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        # In compiled code, new arrays are tracers even if the gradients are constants.
        return TRACED if _makes_tracers() else super().mode(leaf_info, inputs)

    def allow_float64(self) -> AbstractContextManager[Any]:
        return _allow_float64()

    def as_numpy(self, array: jax.Array) -> View | None:
        if not self.readable(array):
            return None
        return np.asarray(array)

    def device(self, array: jax.Array | None) -> Sharding | None:
        if array is None or self.traced(array):
            return None
        return _replicated(array.sharding)

    def from_host(self, array: View, device: Sharding | None) -> jax.Array:
        if device is None:
            return jnp.asarray(array)
        # For the default device, asarray takes half as long as device_put.
        is_single = isinstance(device, SingleDeviceSharding)
        is_first = is_single and device.device_set == {_first_device()}
        if is_first and jax.config.jax_default_device is None:
            return jnp.asarray(array)
        if device.is_fully_addressable:
            return jax.device_put(array, device)

        # device_put would compare the value over all processes.
        return jax.make_array_from_callback(array.shape, device, lambda index: array[index])

    def to_host(self, arrays: list[jax.Array]) -> list[View]:
        # device_get takes longer for each array than reading it.
        if not all(map(self.readable, arrays)):
            arrays = jax.device_get(arrays)
        return list(map(np.asarray, arrays))

    def one_norm(self, leaves: list[jax.Array | None], *, in_place: bool) -> OneNorm | None:
        arrays = [leaf for leaf in leaves if leaf is not None]
        # A sparse matrix is no jax.Array.
        if _makes_tracers() or not all([isinstance(array, jax.Array) for array in arrays]):
            return None
        # Tracers are never readable.
        dtype = arrays[0].dtype
        if not all([array.dtype == dtype and self.readable(array) for array in arrays]):
            return None
        if dtype not in FULL:
            return None

        # The host waits for this value only: products are dispatched asynchronously.
        with np.errstate(all="ignore"):
            [total] = _squares_on_host(arrays, [len(arrays)])
        norm = rounded_norm(math.sqrt(total), dtype.type)
        if norm is None:
            return None
        return OneNorm((self, self.device(arrays[0]), dtype.type), arrays, norm)

    def to_keep(self, arrays: list[jax.Array]) -> list[jax.Array]:
        # The buffers may be donated later.
        return list(map(jnp.copy, arrays))

    def sums(self, mode: int, terms: Terms) -> list[jax.Array]:
        if mode == HOST and terms.whole:
            return terms.in_blocks(_squares_on_host(terms.arrays, terms.counts))
        if mode == HOST:
            return DEFAULT.sums(mode, terms._replace(arrays=list(map(np.asarray, terms.arrays))))
        # A float32 sum may overflow before another one is chosen, and a debugger would stop there.
        avoids_float64 = jax.default_backend() == "gpu" and not self.debug_infs()
        if mode == TRACED and terms.p == 2 and avoids_float64:
            sums = [_sum_squares(self, array, axes) for array, _, axes in terms.by_array()]
            return stack_terms(self, sums, terms)
        return super().sums(mode, terms)

    def pieces(self, array: jax.Array, axes: Axes = None) -> Iterable[jax.Array] | None:
        # The compiler fuses the conversion into the sum, and makes no copy.
        return None

    def scale(self, products: Products) -> list[jax.Array]:
        # The compiler uses one contraction for the products of a leaf and their sum.
        if not products.summed:
            return super().scale(products)
        factors = products.factors(self)
        # A contraction needs a single factor for each row.
        if any([math.prod(factor.shape[1:]) > 1 for factor in factors]):
            return super().scale(products)
        sums = []
        for array, factor in zip(products.arrays, factors, strict=True):
            sums.append(_contract(array, operand(self, array, factor), zero=products.zero))
        return sums

    def multiply(
        self, arrays: list[jax.Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[jax.Array]:
        if same(factors) and self.traced(factors[0]):
            return self._multiply_unless_one(arrays, factors, zero=zero)

        # `_scale_all` only multiplies, so NaN times a factor of 0 would stay NaN.
        numbers = not any([hasattr(factor, "shape") for factor in factors])
        makes_zeros = zero and not (numbers and all(factors))
        if not (in_place or makes_zeros) and _can_share_a_call(arrays):
            operands = self._operands_of_a_call(arrays, factors, numbers=numbers)
            if operands is not None:
                products = map(_scale_all, _in_calls(arrays), _in_calls(operands))
                return list(chain.from_iterable(products))
        return super().multiply(arrays, factors, in_place=in_place, zero=zero)

    def _multiply_unless_one(
        self, arrays: list[jax.Array], factors: Sequence[jax.Array], *, zero: bool
    ) -> list[jax.Array]:
        """Multiply by one factor in compiled code, which keeps arrays where it is 1.

        Donated gradients are not written again then. A conditional would copy them.
        """
        is_one = jnp.equal(factors[0], 1)
        products = super().multiply(arrays, factors, in_place=False, zero=zero)
        pairs = zip(arrays, products, strict=True)
        return [jnp.where(is_one, array, product) for array, product in pairs]

    def _operands_of_a_call(
        self, arrays: list[jax.Array], factors: Sequence[Any], *, numbers: bool
    ) -> View | list[jax.Array] | None:
        """Return factors for `_scale_all`, ``None`` if it cannot take them."""
        if numbers:
            # Products are computed in the dtype of the factors, so these are as narrow as possible.
            double = any(array.dtype in _DOUBLE for array in arrays)
            dtype = np.float64 if double else np.float32
            return np.asarray(factors, dtype)
        if any(map(jnp.iscomplexobj, arrays)):
            return None
        operands = [operand(self, *pair) for pair in zip(arrays, factors, strict=True)]
        if not _can_share_a_call(operands):
            return None
        return operands

    def reducer(self, all_reduce: object) -> Reduce | None:
        names = axis_names_of(all_reduce)
        if names is None:
            return None
        return partial(_reduce_over_axes, names)

    def replicas(
        self,
        arrays: list[jax.Array],
        all_reduce: object,
        shared: list[bool] | None,
        place: Callable[[int], str],
    ) -> list[int] | None:
        # Without all_reduce, an array must not vary along any axis.
        names = () if all_reduce is None else axis_names_of(all_reduce)
        if names is None:
            return None
        counts = _count_replicas(arrays, names, shared, place)
        return counts if set(counts) - {1} else None

    def rank(self) -> int:
        return int(jax.process_index())

    def stacks(self, array: jax.Array | None) -> bool:
        if array is None or self.traced(array):
            return False
        # Stacking sharded arrays would gather them.
        return bool(array.sharding.is_fully_replicated)

    def is_array(self, leaf: Any) -> bool:
        if not isinstance(leaf, (jax.Array, sparse.JAXSparse)):
            return False
        return leaf.dtype in _FLOATS or jnp.issubdtype(leaf.dtype, np.number)

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        # A format of exponents alone has neither zero nor negative numbers.
        if leaf.dtype.name == "float8_e8m0fnu":
            return "float8_e8m0fnu cannot be clipped; use astype(jnp.float32)"
        if not isinstance(leaf, sparse.JAXSparse) or isinstance(leaf, sparse.BCOO):
            return None
        return (
            "BCOO is the only sparse format that is supported, since its duplicates can be summed"
        )

    def debug_infs(self) -> bool:
        return bool(jax.config.jax_debug_infs)

    def traced(self, array: jax.Array) -> bool:
        return isinstance(array, jax.core.Tracer)

    def readable(self, array: jax.Array) -> bool:
        if self.traced(array) or on_device(array):
            return False
        # Every process holds a copy of a fully replicated array.
        return bool(array.is_fully_addressable or array.is_fully_replicated)

    def unwrap(
        self, leaf: jax.Array | sparse.BCOO, *, in_place: bool, as_given: bool
    ) -> WrappedLeaf | None:
        # JAX does not promote float8.
        if leaf.dtype.itemsize == 1 and jnp.issubdtype(leaf.dtype, np.floating):
            return WrappedLeaf(leaf.astype(jnp.float32))
        if not isinstance(leaf, sparse.BCOO):
            return super().unwrap(leaf, in_place=in_place, as_given=as_given)
        return _unwrap_bcoo(leaf)

    def fast_values(
        self, fast: Callable[..., jax.Array], guarded: Callable[..., jax.Array]
    ) -> Callable[..., jax.Array]:
        return _fast_values(fast, guarded)

    def fence(self, rows: jax.Array) -> jax.Array:
        # XLA would turn the sum of k stacked numbers into k additions, and copy all of them into
        # each user of the sum.
        return jax.lax.optimization_barrier(rows) if self.traced(rows) else rows

    def cond(
        self,
        ok: jax.Array,
        usual: Callable[[], list[jax.Array]],
        rare: Callable[[], list[jax.Array]],
    ) -> list[jax.Array]:
        # JAX would compile a conditional at every call, and `rare` reads the gradients twice more
        # than `usual`: waiting for one flag takes less than either. Traced code has none.
        return usual() if bool(ok) else rare()

    def computation_context(self, first: jax.Array | None = None) -> AbstractContextManager[Any]:
        context = super().computation_context(first)
        promotes_dtypes = jax.config.jax_numpy_dtype_promotion == "standard"
        if promotes_dtypes and jax.config.jax_numpy_rank_promotion == "allow":
            return context

        # The settings are for the user's own code: here dtypes and ranks are promoted on purpose.
        promotion = enter_both(
            jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        )
        return enter_both(context, promotion)

    def detach(self, array: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(array) if self.traced(array) else array

    def to_device_of(self, like: jax.Array, array: jax.Array) -> jax.Array:
        if self.traced(array) or self.traced(like) or array.devices() == like.devices():
            return array
        return jax.device_put(array, _replicated(like.sharding))


def _replicated(sharding: Sharding) -> Sharding:
    """Return a sharding over the same devices, of which each holds a whole array."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _unwrap_bcoo(leaf: sparse.BCOO) -> WrappedLeaf:
    """Return the values of a sparse matrix, with those of one index summed."""
    summed = _sum_duplicates(leaf)

    def rebuild(data: jax.Array) -> sparse.BCOO:
        # The flags are part of the type, which code that is compiled must keep.
        flags = {"indices_sorted": leaf.indices_sorted, "unique_indices": leaf.unique_indices}
        return sparse.BCOO((data, summed.indices), shape=leaf.shape, **flags)

    if summed.n_sparse != 1 or summed.n_batch:
        return WrappedLeaf(summed.data, rebuild, rows=())
    # The index of padding is behind the last row.
    rows = jnp.minimum(summed.indices[:, 0], leaf.shape[0] - 1)
    return WrappedLeaf(summed.data, rebuild, rows=rows)


def _format_of(leaf: Any) -> tuple[Any, ...]:
    """Return class, dtype and sharding of a leaf, also of an object that is no array."""
    array = leaf
    if isinstance(leaf, sparse.JAXSparse):
        array = getattr(leaf, "data", leaf)
    sharding = None
    if not isinstance(array, jax.core.Tracer):
        sharding = getattr(array, "sharding", None)
    return type(leaf), type(array), getattr(leaf, "dtype", None), sharding


BACKEND = _JAX(namespace)
for _class, _names, _rebuild in NODES:
    _keys = tuple(map(jax.tree_util.GetAttrKey, _names))
    jax.tree_util.register_pytree_with_keys(
        _class,
        lambda node, keys=_keys: (tuple(zip(keys, node, strict=True)), None),
        _rebuild,
        lambda node: (tuple(node), None),
    )
