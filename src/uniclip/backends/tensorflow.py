# SPDX-License-Identifier: MIT
"""TensorFlow tensors and IndexedSlices, eager, in ``tf.function``,
under XLA and in TensorFlow 1 graphs.

TensorFlow has no array API namespace (``tf.experimental.numpy`` needs a process-wide switch), so
this module has one. It is not complete: it has the functions that uniclip calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from inspect import getmembers
from operator import and_
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.eager import record as tape
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import control_flow_util

from uniclip._types import A, Axes, Device, Number, Tree, View
from uniclip.backends.arithmetic import (
    PIECE,
    combine,
    enter_both,
    in_groups,
    power_sum,
    row_slices,
    same,
    sum_dtype,
)
from uniclip.backends.base import (
    FITS,
    HOST,
    LIBRARY,
    RECORDED,
    TRACED,
    ArrayFacts,
    Backend,
    LeafInfo,
    OneNorm,
    Terms,
    WrappedLeaf,
    operand,
    rounded_norm,
    stack_terms,
    take,
)
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.numpy import FULL, sum_of_squares

_KINDS: dict[str, Callable[[tf.DType], bool]] = {
    "bool": lambda dtype: dtype.is_bool,
    "integral": lambda dtype: dtype.is_integer,
    "real floating": lambda dtype: dtype.is_floating,
    "complex floating": lambda dtype: dtype.is_complex,
}


_GPUS = tf.config.list_physical_devices("GPU")
_ROW = 16
"""How many elements are added in a row: XLA adds sequentially,
and the errors of equal elements have one sign.
"""
_LONG = 2**12
"""The largest number of elements that compiled code adds as fast in float64 as in float32."""
_VIEWED = {tf.float32, tf.float64, tf.bool, tf.int32, tf.int64}
"""The dtypes of values computed from norms."""
_HALF = {tf.float16, tf.bfloat16}
_SINGLE = _HALF | {tf.float32}
_STORAGE = {dtype for _, dtype in getmembers(tf.dtypes.experimental) if type(dtype) is tf.DType}
"""The dtypes of 8 bits and less that TensorFlow only stores and casts."""


def _isdtype(dtype: tf.DType, kind: str) -> bool:
    """Return whether a dtype is of a kind of the array API standard."""
    return bool(_KINDS[kind](tf.as_dtype(dtype)))


def _dtype(value: tf.Tensor | tf.DType) -> tf.DType:
    """Return the dtype of a tensor, or a dtype itself."""
    return tf.as_dtype(value.dtype if hasattr(value, "dtype") else value)


def _result_type(*values: tf.Tensor | tf.DType) -> tf.DType:
    """Promote tensors and dtypes by the array API's tables, and bfloat16 as float16."""
    dtypes = list(map(_dtype, values))
    if all(dtype == dtypes[0] for dtype in dtypes):
        return dtypes[0]

    # NumPy has no bfloat16, which is promoted to float32 at least.
    numpy_dtypes = []
    for dtype in dtypes:
        in_numpy = tf.float32 if dtype == tf.bfloat16 else dtype
        numpy_dtypes.append(in_numpy.as_numpy_dtype)
    return tf.as_dtype(np.result_type(*numpy_dtypes))


def _asarray(value: Any, *, dtype: tf.DType | None = None) -> tf.Tensor:
    """Convert numbers, arrays and variables."""
    if not tf.is_tensor(value):
        return tf.convert_to_tensor(value, dtype)
    value = tf.convert_to_tensor(value)
    return value if dtype is None else tf.cast(value, dtype)


def _clip(x: tf.Tensor, min: Number | None = None, max: Number | None = None) -> tf.Tensor:
    """Clip elementwise; a bound gets the dtype of the tensor."""
    if min is not None:
        x = tf.maximum(x, _asarray(min, dtype=x.dtype))
    if max is not None:
        x = tf.minimum(x, _asarray(max, dtype=x.dtype))
    return x


def _where(condition: tf.Tensor, x: Any, y: Any, /) -> tf.Tensor:
    """Choose elementwise; a Python number gets the dtype of the other tensor."""
    if not hasattr(x, "dtype"):
        x = tf.constant(x, y.dtype)
    if not hasattr(y, "dtype"):
        y = tf.constant(y, x.dtype)
    return tf.where(condition, x, y)


Axis: TypeAlias = int | Sequence[int] | None
"""The argument ``axis`` of a reduction."""


def _reduction(reduce: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Return a reduction with the arguments of the array API standard."""

    def reduction(x: tf.Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> tf.Tensor:
        if axis is not None and not isinstance(axis, int):
            axis = list(axis)
        return reduce(x, axis=axis, keepdims=keepdims)

    return reduction


def _isfinite(x: tf.Tensor) -> tf.Tensor:
    """Return which elements are neither NaN nor infinite, also of complex tensors."""
    if x.dtype.is_complex:
        return tf.math.is_finite(tf.math.real(x)) & tf.math.is_finite(tf.math.imag(x))
    return tf.math.is_finite(x)


def _extreme(reduce: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Return a maximum or minimum that keeps NaN. XLA's drop NaN."""

    def extreme(x: tf.Tensor, axis: Axis, keepdims: bool) -> tf.Tensor:
        extremum = reduce(x, axis, keepdims)
        if not x.dtype.is_floating:
            return extremum
        # Use the NaN that is there: a constant would trigger NaN debuggers.
        nans = tf.where(tf.math.is_nan(x), x, tf.zeros_like(x))
        return extremum + tf.reduce_sum(nans, axis, keepdims)

    return extreme


def _sum(x: tf.Tensor, axis: Axis, keepdims: bool) -> tf.Tensor:
    """Return the sum, of float32 numbers in float64: TensorFlow adds them sequentially."""
    if x.dtype != tf.float32:
        return tf.reduce_sum(x, axis, keepdims)
    return tf.cast(tf.reduce_sum(tf.cast(x, tf.float64), axis, keepdims), x.dtype)


def _sort(x: tf.Tensor, /, *, axis: int = -1) -> tf.Tensor:
    """Sort along an axis. tf.sort would read its axis on the host, where it is a tensor."""
    order = list(range(x.shape.rank))
    order.append(order.pop(axis))
    # `top_k` sorts the last axis from large to small, so the sign is changed twice.
    last = -tf.nn.top_k(-tf.transpose(x, order), x.shape[axis]).values
    return tf.transpose(last, [order.index(place) for place in range(x.shape.rank)])


namespace: Any = SimpleNamespace(
    __name__="uniclip.backends.tensorflow.namespace",
    abs=tf.abs,
    all=_reduction(tf.reduce_all),
    any=_reduction(tf.reduce_any),
    arange=lambda stop, /, *, dtype=tf.int32: tf.range(stop, dtype=dtype),
    asarray=_asarray,
    # Tensors are immutable, so a copy is not needed.
    astype=lambda x, dtype, /, *, copy=True: tf.cast(x, dtype),  # noqa: ARG005
    ceil=tf.math.ceil,
    clip=_clip,
    concat=lambda arrays, /, *, axis=0: tf.concat(arrays, axis),
    equal=tf.equal,
    exp=tf.exp,
    expand_dims=lambda x, /, *, axis=0: tf.expand_dims(x, axis),
    expm1=tf.math.expm1,
    finfo=lambda dtype: np.finfo(dtype.as_numpy_dtype),
    float32=tf.float32,
    float64=tf.float64,
    floor=tf.floor,
    full_like=lambda x, fill_value, /: tf.fill(tf.shape(x), tf.cast(fill_value, x.dtype)),
    greater=tf.greater,
    greater_equal=tf.greater_equal,
    iinfo=lambda dtype: SimpleNamespace(min=dtype.min, max=dtype.max),
    imag=tf.math.imag,
    int32=tf.int32,
    isdtype=_isdtype,
    isfinite=_isfinite,
    isinf=tf.math.is_inf,
    isnan=tf.math.is_nan,
    less=tf.less,
    less_equal=tf.less_equal,
    log=tf.math.log,
    log1p=tf.math.log1p,
    log2=lambda x, /: tf.math.log(x) / math.log(2),
    logical_and=tf.logical_and,
    logical_not=tf.logical_not,
    logical_or=tf.logical_or,
    max=_reduction(_extreme(tf.reduce_max)),
    maximum=tf.maximum,
    mean=_reduction(tf.reduce_mean),
    min=_reduction(_extreme(tf.reduce_min)),
    prod=_reduction(tf.reduce_prod),
    minimum=tf.minimum,
    not_equal=tf.not_equal,
    ones_like=tf.ones_like,
    pow=tf.pow,
    real=tf.math.real,
    reshape=lambda x, shape, /: tf.reshape(x, shape),
    result_type=_result_type,
    round=tf.round,
    sign=tf.sign,
    sort=_sort,
    sqrt=tf.sqrt,
    square=tf.square,
    stack=lambda arrays, /, *, axis=0: tf.stack(arrays, axis),
    sum=_reduction(_sum),
    take=lambda x, indices, /, *, axis: tf.gather(x, indices, axis=axis),
    tanh=tf.tanh,
    unstack=lambda x, /, *, axis=0: tf.unstack(x, axis=axis),
    where=_where,
    zeros=lambda shape, /, *, dtype=tf.float32: tf.zeros(shape, dtype),
    zeros_like=tf.zeros_like,
)


class _TensorFlow(Backend[tf.Tensor]):
    def signature(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        return tuple([None if leaf is None else _format_of(leaf) for leaf in leaves])

    def array_facts(self, arrays: list[tf.Tensor]) -> ArrayFacts:
        traced = any(map(tf.is_symbolic_tensor, arrays))
        reads = not traced and all(["CPU" in array.device for array in arrays])
        return ArrayFacts(traced, reads, records=True, double=True)

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        if leaf_info.traced or not tf.executing_eagerly():
            return TRACED

        # There is no public function to find out whether a tape records.
        if tape.could_possibly_record():
            return RECORDED
        return HOST if leaf_info.reads else LIBRARY

    def is_array(self, leaf: Any) -> bool:
        if not isinstance(leaf, (tf.Tensor, tf.Variable, tf.IndexedSlices)):
            return False
        return bool(leaf.dtype.is_floating or leaf.dtype.is_complex or leaf.dtype.is_integer)

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        if leaf.dtype in _STORAGE:
            wider = "int8" if leaf.dtype.is_integer else "float32"
            return f"TensorFlow does not compute with {leaf.dtype.name}; use tf.cast(g, tf.{wider})"
        if not (gradient and isinstance(leaf, tf.Variable)):
            return None
        return (
            "a variable is not a gradient; pass the gradients without their variables (to clip the "
            "weights, pass v.value())"
        )

    def as_numpy(self, array: tf.Tensor) -> View | None:
        if array.dtype not in _VIEWED or not self.readable(array) or tape.could_possibly_record():
            return None
        return np.asarray(array.numpy())

    def device(self, array: tf.Tensor | None) -> str | None:
        if array is None or not _GPUS:
            return None
        return array.device

    def from_host(self, array: View, device: Device) -> tf.Tensor:
        with nullcontext() if device is None else tf.device(device):
            return tf.constant(array)

    def to_keep(self, arrays: list[tf.Tensor]) -> list[tf.Tensor]:
        # A variable may change later.
        return list(map(tf.identity, arrays))

    def one_norm(self, leaves: list[tf.Tensor | None], *, in_place: bool) -> OneNorm | None:
        if not tf.executing_eagerly() or tape.could_possibly_record():
            return None
        tensors = [leaf for leaf in leaves if leaf is not None]
        dtype = tensors[0].dtype
        if not all([_is_on_cpu(tensor) and tensor.dtype == dtype for tensor in tensors]):
            return None
        if dtype.as_numpy_dtype not in FULL:
            return None

        with np.errstate(all="ignore"):
            [total] = sum_of_squares(list(map(_view_memory, tensors)), [len(tensors)])
        place = (self, self.device(tensors[0]), dtype.as_numpy_dtype)
        norm = rounded_norm(math.sqrt(total), place[2])
        return None if norm is None else OneNorm(place, tensors, norm)

    def scale_all(
        self, arrays: list[tf.Tensor], factor: float, *, in_place: bool
    ) -> list[tf.Tensor] | None:
        by = tf.constant(factor, arrays[0].dtype)
        return [tf.raw_ops.Mul(x=array, y=by) for array in arrays]

    def sums(self, mode: int, terms: Terms) -> list[tf.Tensor]:
        if mode == HOST:
            return DEFAULT.sums(mode, terms._replace(arrays=list(map(_view_memory, terms.arrays))))
        if mode == TRACED and terms.p == 2:
            return stack_terms(self, sum_long_squares(self, terms, self._float32_sum), terms)
        return super().sums(mode, terms)

    def _float32_sum(self, array: tf.Tensor) -> tf.Tensor | None:
        """Return the float32 sum of squares of a long array, ``None`` for another one.

        TensorFlow's own kernels convert a whole array to float64 first, and XLA's loop is slower.
        """
        size = array.shape.num_elements() or 0
        # A float32 sum may overflow before it is replaced, and a debugger would stop there.
        if array.dtype not in _SINGLE or size <= _LONG or self.debug_infs():
            return None
        if _in_xla():
            return _sum_squares_in_rows(tf.cast(array, tf.float32))
        if array.dtype != tf.float32:
            return None
        # `l2_loss` is half the sum of squares, by one operation.
        return 2 * tf.nn.l2_loss(array)

    def stacks(self, array: tf.Tensor | None) -> bool:
        return array is not None or not _in_xla()

    def fence(self, rows: tf.Tensor) -> tf.Tensor:
        # XLA would turn the sum of k stacked numbers into k additions, and copy all of them into
        # each user of the sum.
        return _optimization_barrier(rows) if _in_xla() else rows

    def multiply(
        self, arrays: list[tf.Tensor], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[tf.Tensor]:
        products = partial(self._products, arrays, factors, in_place=in_place, zero=zero)
        # A conditional saves products by 1. Under XLA, and for small gradients, it takes longer
        # than they do.
        sizes = [array.shape.num_elements() or 0 for array in arrays]
        is_one_tensor = same(factors) and self.traced(factors[0])
        if sum(sizes) <= PIECE or not is_one_tensor or _in_xla():
            return products()
        is_one = tf.equal(factors[0], 1)
        return list(tf.nest.flatten(tf.cond(is_one, lambda: arrays, products)))

    def _products(
        self, arrays: list[tf.Tensor], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[tf.Tensor]:
        """Multiply by few operations, without a copy in a wider dtype."""
        converted = any([array.dtype in _HALF or array.dtype.is_complex for array in arrays])
        if zero or in_place or converted:
            return super().multiply(arrays, factors, in_place=in_place, zero=zero)

        pairs = list(zip(arrays, factors, strict=True))
        if not all([isinstance(factor, float) for factor in factors]):
            return [tf.multiply(array, operand(self, array, factor)) for array, factor in pairs]

        # One constant for each number and dtype.
        constants: dict[tuple[float, tf.DType], tf.Tensor] = {}
        products = []
        for array, factor in pairs:
            key = factor, array.dtype
            if key not in constants:
                constants[key] = tf.constant(factor, array.dtype)
            products.append(tf.raw_ops.Mul(x=array, y=constants[key]))
        return products

    def debug_infs(self) -> bool:
        return hasattr(check_numerics_callback._state, "check_numerics_callback")

    def traced(self, array: tf.Tensor) -> bool:
        return not tf.executing_eagerly() or bool(tf.is_symbolic_tensor(array))

    def readable(self, array: tf.Tensor) -> bool:
        return not self.traced(array) and "CPU" in array.device

    def pieces(self, array: tf.Tensor, axes: Axes = None) -> Iterable[tf.Tensor] | None:
        # Without XLA, traced code would make the wide copy, too.
        if array.dtype not in _HALF or (array.shape.num_elements() or 0) <= PIECE:
            return None

        if axes is not None:
            return (array[rows, ...] for rows in row_slices(array.shape))
        flat = tf.reshape(array, [-1])
        return (flat[rows] for rows in row_slices(flat.shape))

    def unwrap(
        self, leaf: tf.Tensor | tf.Variable | tf.IndexedSlices, *, in_place: bool, as_given: bool
    ) -> WrappedLeaf | None:
        if isinstance(leaf, tf.Variable):
            return WrappedLeaf(tf.convert_to_tensor(leaf))
        if isinstance(leaf, tf.IndexedSlices):
            return _unwrap_slices(leaf, as_given=as_given)
        return super().unwrap(leaf, in_place=in_place, as_given=as_given)

    def cond(
        self,
        ok: tf.Tensor,
        usual: Callable[[], list[tf.Tensor]],
        rare: Callable[[], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        # On an accelerator, tf.cond waits for the value in eager code.
        if not self.traced(ok):
            return super().cond(ok, usual, rare)
        return list(tf.nest.flatten(tf.cond(ok, usual, rare)))

    def detach(self, array: tf.Tensor) -> tf.Tensor:
        recorded = self.traced(array) or tape.could_possibly_record()
        if not recorded or isinstance(array, tf.Variable):
            return array
        return tf.stop_gradient(array)

    def computation_context(self, first: tf.Tensor | None = None) -> AbstractContextManager[Any]:
        context = super().computation_context(first)
        if tf.executing_eagerly():
            return context
        # There is nothing for AutoGraph to convert, and reading all this code takes it seconds.
        return enter_both(context, ag_ctx.ControlStatusCtx(ag_ctx.Status.DISABLED))


def _format_of(leaf: Any) -> tuple[Any, ...]:
    """Return class, dtype and device of a leaf, also of an object that is no tensor."""
    values = leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
    return type(leaf), type(values), getattr(leaf, "dtype", None), getattr(values, "device", None)


def _is_on_cpu(tensor: tf.Tensor) -> bool:
    """Return whether the host can read the memory of a tensor."""
    return type(tensor) is EagerTensor and "CPU" in tensor.device


def _view_memory(array: tf.Tensor) -> View:
    """Return the memory of an eager tensor as a NumPy array."""
    # A memoryview is the fastest way, but it does not support bfloat16.
    if array.dtype != tf.bfloat16:
        return np.asarray(memoryview(array))
    # ``__array__`` of a 0-d tensor does not work.
    if array.shape.rank == 0:
        array = array.numpy()
    return np.asarray(array)


def _in_xla() -> bool:
    """Return whether XLA will compile what is being traced; there is no public function for it."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _optimization_barrier(
    array: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Return an array that XLA does not fuse, and its derivative,
    for which TensorFlow has none.
    """
    return xla.optimization_barrier(array)[0], lambda upstream: upstream


def _sum_squares_in_rows(array: tf.Tensor) -> tf.Tensor:
    """Return the sum of squares of a long array by short rows,
    since XLA adds the elements of a row sequentially.
    """
    # The rows' sums are added in float64.
    flat = tf.reshape(array, [-1])
    whole = flat.shape[0] - flat.shape[0] % _ROW
    rows = tf.reduce_sum(tf.square(tf.reshape(flat[:whole], [-1, _ROW])), -1)
    tail = tf.reduce_sum(tf.square(flat[whole:]))
    total = tf.reduce_sum(tf.cast(rows, tf.float64)) + tf.cast(tail, tf.float64)
    return tf.cast(total, array.dtype)


def _unwrap_slices(slices: tf.IndexedSlices, *, as_given: bool) -> WrappedLeaf:
    """Return the values, float32 or wider, with each row's sum at its first occurrence,
    and zeros at later ones.

    The number of rows stays the same, as XLA must know it, and so do the indices. If ``as_given``,
    for a function that may not map 0 to 0, later ones are made zeros again.
    """
    # The number of the first occurrence of each row's index.
    values = tf.convert_to_tensor(slices.values)
    count = tf.size(slices.indices)
    _, row = tf.unique(tf.reshape(slices.indices, [-1]))
    first = tf.gather(tf.math.unsorted_segment_min(tf.range(count), row, count), row)

    def rebuild(new: tf.Tensor) -> tf.IndexedSlices:
        # A segment with a negative number is dropped.
        if as_given:
            kept = tf.where(tf.equal(first, tf.range(count)), first, -1)
            new = tf.math.unsorted_segment_sum(new, kept, count)
        return tf.IndexedSlices(new, slices.indices, slices.dense_shape)

    wide = tf.cast(values, sum_dtype(namespace, values.dtype))
    summed = tf.ensure_shape(tf.math.unsorted_segment_sum(wide, first, count), values.shape)
    return WrappedLeaf(summed, rebuild, rows=slices.indices, shape=_lengths_of(slices))


def _lengths_of(slices: tf.IndexedSlices) -> Sequence[Any] | None:
    """Return the shape of slices as a dense tensor, ``None`` if their own attribute has it."""
    shape = slices.dense_shape
    if shape is None:
        return None
    if tf.is_tensor(shape):
        if slices.shape.is_fully_defined():
            return None
        return tf.unstack(tf.cast(shape, tf.float64))

    # A tensor shape may be unknown. The values have all lengths but the first.
    if isinstance(shape, tf.TensorShape):
        shape = shape.merge_with([None, *slices.values.shape[1:]])

    # TensorFlow leaves a tuple as it is, and then ``slices.shape`` is an error.
    return tuple(map(_length, shape))


def _length(length: int | tf.Tensor | None) -> int | tf.Tensor | None:
    """Return one number of a shape, a Python integer if it is known."""
    if tf.is_symbolic_tensor(length):
        return tf.cast(length, tf.float64)
    return length if length is None else int(length)


def sum_long_squares(
    backend: Backend[A], terms: Terms, float32_sum: Callable[[A], A | None]
) -> list[A]:
    """Return ``Σ|x|²`` of each array in float64, of long arrays by float32 sums if these are
    accurate.

    A float32 sum saves the conversion of each element. ``float32_sum(array)`` returns it for a long
    array, ``None`` for a short one. Each block has one conditional, whose rare branch measures its
    long arrays again.
    """
    # Only arrays that are summed whole have long sums.
    sums = []
    long = {}
    for number, term in enumerate(terms.by_array()):
        array, _, axes = term
        total = float32_sum(array) if axes is None else None
        if total is None:
            total = power_sum(backend, *term)
        else:
            long[number] = array
        sums.append(total)

    for block in terms.in_blocks(in_groups(range(len(sums)), terms.counts)):
        groups = [group for group in block if not long.keys().isdisjoint(group)]
        if groups:
            _replace_long_sums(backend, sums, groups, long)
    return sums


def _replace_long_sums(
    backend: Backend[A], sums: list[A], groups: list[Sequence[int]], long: dict[int, A]
) -> None:
    """Put float64 sums in place of the float32 sums of long arrays.

    ``groups`` are the numbers of the arrays of each norm that has long ones.
    """
    xp = backend.xp
    low, high = FITS

    # Check the sum over all arrays of the norm, also short ones: if it is in range, squares that
    # underflow in a long array add less than a rounding error.
    in_range = []
    for group in groups:
        total = combine(backend, [xp.astype(sums[number], xp.float32) for number in group], "sum")
        in_range.append((total > low) & (total < high))

    numbers = []
    long_arrays = []
    for group in groups:
        members = [number for number in group if number in long]
        long_arrays.append(take(long, members))
        numbers += members

    long_sums = _LongSums(backend, long_arrays, take(sums, numbers), in_range)
    for number, total in zip(numbers, long_sums.in_float64(), strict=True):
        sums[number] = total


class _LongSums(NamedTuple):
    """The float32 sums of the long arrays of one block, and the functions of its conditional."""

    backend: Backend
    arrays: list[list[Any]]
    """The long arrays of each norm that has some."""
    sums: list[Any]
    """The sum of each of these arrays, one norm after the other."""
    in_range: list[Any]
    """For each of these norms, whether its float32 sum is accurate."""

    def in_float64(self) -> list[Any]:
        """Return accurate sums in float64, by one conditional."""
        return self.backend.cond(
            reduce(and_, self.in_range), self.widened, self.recomputed_unless_zero
        )

    def widened(self) -> list[Any]:
        """Return the float32 sums, cast to float64."""
        xp = self.backend.xp
        return [xp.astype(total, xp.float64) for total in self.sums]

    def recomputed_unless_zero(self) -> list[Any]:
        """Return sums computed again, unless each norm that is out of range is that of zeros.

        Zeros are common, for example in rows of an embedding that do not occur, and their sums are
        exact.
        """
        accurate = []
        for in_range, arrays in zip(self.in_range, self.arrays, strict=True):
            accurate.append(in_range | self._are_zeros(arrays))
        return self.backend.cond(reduce(and_, accurate), self.widened, self.recomputed)

    def _are_zeros(self, arrays: list[Any]) -> Any:
        """Return whether all elements are 0, by moduli, since their squares may underflow."""
        xp = self.backend.xp
        moduli = [xp.sum(xp.abs(xp.astype(array, xp.float32))) for array in arrays]
        return xp.equal(combine(self.backend, moduli, "sum"), 0)

    def recomputed(self) -> list[Any]:
        """Return sums computed in float64."""
        sums = []
        for arrays in self.arrays:
            sums += [power_sum(self.backend, array, 2, None) for array in arrays]
        return sums


BACKEND = _TensorFlow(namespace)
