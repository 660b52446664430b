# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import compress
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from array_api_compat import torch as compat
from torch.autograd.graph import increment_version

from uniclip._types import Device, Tree
from uniclip.backends.arithmetic import PIECE, enter_both, in_groups, power_sum, row_slices, same
from uniclip.backends.arrays import Address
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    RECORDED,
    TRACED,
    ArrayFacts,
    Axes,
    LeafInfo,
    Products,
    Storage,
    Terms,
    View,
    WrappedLeaf,
    stack_terms,
    take,
    unchanged,
)
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.numpy import (
    add_groups,
    call_bound,
    concatenated_squares,
    sum_of_squares,
    sums_of_arrays,
    worth_concatenating,
)
from uniclip.backends.torch import dtensor
from uniclip.backends.torch.constants import constant
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.gpus import kernels_on
from uniclip.backends.torch.modes import (
    default_device_of,
    in_transform,
    is_recorded,
    valueless,
)
from uniclip.backends.torch.one_norm import (
    LONG,
    SINGLE,
    are_separate_blocks,
    bound,
    clip_at_once,
    in_memory_order,
    move,
    multiply_group,
    norm_of,
    one_norm,
    scale_all,
)
from uniclip.backends.torch.private import (
    OPAQUE,
    flatten,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    in_forward_mode,
    local_tensors,
    same_for_all_examples,
    stored_values,
    tracing,
)

Array: TypeAlias = torch.Tensor
_Factors: TypeAlias = "Sequence[float | View | torch.Tensor]"
"""A factor for each array: all numbers or NumPy's arrays, or all tensors."""
_Bound: TypeAlias = "float | torch.Tensor | None"


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


_LARGEST = {
    dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
"""The largest numbers of the dtypes whose range is smaller than that of Python's numbers."""


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays.

    PyTorch reads the latter as sequences of numbers.
    """
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)

    # torch.compile would treat the number as a constant.
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        return torch.ones((), dtype=dtype) * value

    # A number beyond the dtype's range becomes ∞, as elsewhere, instead of an error.
    if isinstance(value, float) and dtype in _LARGEST and abs(value) > _LARGEST[dtype]:
        return torch.full((), value, dtype=torch.float64).to(dtype)

    # torch.export cannot save constants inside torch.cond, so numbers fill.
    if isinstance(value, float) and dtype in REAL and not torch.compiler.is_compiling():
        return torch.scalar_tensor(value, dtype=dtype)
    if isinstance(value, (bool, int, float, torch.SymInt)):
        return torch.full((), value, dtype=dtype)

    if hasattr(value, "__array__"):
        value = np.array(value)
    return compat.asarray(value, dtype=dtype)


def _isfinite(x: torch.Tensor, /) -> torch.Tensor:
    """Return which elements are finite, by two operations; PyTorch's function takes four."""
    return x - x == 0


def _clip(x: torch.Tensor, /, min: _Bound = None, max: _Bound = None) -> torch.Tensor:
    """Clip, with derivative 1 at the bounds, too.

    The derivative of ``clamp`` there depends on PyTorch's version.
    """
    is_float = x.is_floating_point()
    if is_float and (
        tracing() or any([is_recorded(value) for value in (x, min, max) if hasattr(value, "dtype")])
    ):
        for bound, is_within in ((min, torch.ge), (max, torch.le)):
            if bound is not None:
                x = torch.where(is_within(x, bound) | x.isnan(), x, bound)
        return x

    # `clamp` is one operation for numbers; array-api-compat, which also takes arrays, needs more.
    are_numbers = all([bound is None or isinstance(bound, (int, float)) for bound in (min, max)])
    changes_dtype = not is_float and any([isinstance(bound, float) for bound in (min, max)])
    if are_numbers and not changes_dtype:
        return torch.clamp(x, min, max)
    return compat.clip(x, min, max)


namespace = SimpleNamespace(
    **(
        vars(compat)
        | {
            "asarray": _asarray,
            "clip": _clip,
            "isfinite": _isfinite,
            "result_type": _result_type,
            "where": torch.where,
        }
    )
)

NOT_IN_NUMPY = {torch.bfloat16, torch.complex32}
"""The dtypes that NumPy does not have."""
REAL = {torch.float32, torch.float64}
_REGULAR = {torch.Tensor, torch.nn.Parameter}
_HALVES = {torch.float16, torch.bfloat16}
_CPU = torch.device("cpu")
_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
_HOST_DTYPES = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes of values computed from norms."""


def _operands(arrays: list[torch.Tensor], factors: _Factors) -> Any:
    """Return numbers, or arrays, as ``torch._foreach_mul`` takes them."""
    if isinstance(factors[0], torch.Tensor):
        return list(factors)

    dtypes = {array.dtype for array in arrays}
    if not _HALVES.isdisjoint(dtypes):
        # PyTorch would round a number to half precision before the product.
        dtypes = {torch.float64}
    elif not (len(dtypes) == 1 and dtypes <= REAL and all([array.is_cpu for array in arrays])):
        return list(factors)

    # On the CPU a 0-d tensor of the arrays' dtype takes half the time of a number.
    dtype = dtypes.pop()
    return list(torch.tensor(factors, dtype=dtype, device=_CPU).unbind())


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""Integers of the same size."""


def _by_layout(arrays: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of arrays that PyTorch's functions of lists take in one launch.

    One array of another device or dtype, or with gaps, would cost a launch for each of a list.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        is_dense = array.is_contiguous() or in_memory_order(array).is_contiguous()
        numbers.setdefault((array.device, array.dtype, is_dense), []).append(number)
    return list(numbers.values())


def _multiply_groups(
    arrays: list[torch.Tensor], factors: Sequence[torch.Tensor], *, in_place: bool, zero: bool
) -> list[torch.Tensor] | None:
    """Return products by 0-d factors, or by factors of each element, in few launches.

    If ``zero``, the product by 0 is 0 also for NaN. ``None`` for dtypes without bits to multiply.
    """
    if zero and not all([array.dtype in _BITS for array in arrays]):
        return None

    products = list(arrays)
    for numbers in _by_layout(arrays):
        group = take(arrays, numbers)
        factor: Any = take(factors, numbers)
        if same(factor):
            factor = _factor_for(group[0], factor[0])

        # Zeroed arrays are new, or are changed in place, so the product may overwrite them.
        writes = in_place
        if zero:
            group = _zero_by_factor(group, factor, in_place=in_place)
            writes = True
        group = multiply_group(group, factor, in_place=writes)

        # 0-d products get the dtype of a wider factor.
        for number, product in zip(numbers, group, strict=True):
            dtype = arrays[number].dtype
            products[number] = product if product.dtype is dtype else product.to(dtype)
    return products


def _factor_for(array: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor on the device of an array, in the dtype in which PyTorch multiplies."""
    dtype = factor.dtype
    if array.dtype in _HALVES:
        dtype = torch.float32
    elif array.dtype in FLOATS:
        dtype = array.dtype
    return factor.to(array.device, dtype, non_blocking=True)


def _zero_by_factor(
    arrays: list[torch.Tensor], factor: torch.Tensor | list[torch.Tensor], *, in_place: bool
) -> list[torch.Tensor]:
    """Return arrays of one dtype with 0 for all elements, NaN included, where the factor is 0.

    Their bits are multiplied by 0 or 1, as integers. The arrays may be written afterwards.
    """
    # NaN times 0 is NaN, but its bits times the integer 0 are those of the number 0.
    integer = _BITS[arrays[0].dtype]
    bits = [array.view(integer) for array in arrays]
    flags: Any
    if isinstance(factor, torch.Tensor):
        flags = (factor != 0).to(integer)
    else:
        flags = [(single != 0).to(integer) for single in factor]

    if in_place:
        foreach_mul_(bits, flags)
        return arrays
    return [new.view(arrays[0].dtype) for new in foreach_mul(bits, flags)]


def host_view(array: torch.Tensor) -> View:
    """Return a NumPy array of the same memory, detached; a copy if it is negated or conjugated."""
    return array.numpy(force=True)


def squares_on_host(arrays: list[torch.Tensor], lengths: list[int]) -> View | None:
    """Return the sums of squares in a NumPy array, from memory that the CPU can read.

    ``None`` if NumPy does not have a dtype, or a sum is out of range.
    """
    # The spine computes the same bits.
    norm = norm_of(arrays) if len(lengths) == 1 else None
    if norm is not None:
        return np.array([norm * norm])

    dtypes = {array.dtype for array in arrays}
    sizes = [array.numel() for array in arrays]
    if len(dtypes) == 1 and dtypes <= REAL and worth_concatenating(sizes, lengths):
        flat = flatten(arrays)
        return concatenated_squares(flat.numpy(force=True), sizes, lengths)

    if not dtypes <= SINGLE or call_bound(arrays, sum(sizes)):
        if not dtypes.isdisjoint(NOT_IN_NUMPY):
            return None
        return sum_of_squares(list(map(host_view, arrays)), lengths)

    norms = _norms_of_each(arrays)
    if norms is None:
        return None
    return np.array(add_groups(np.square(norms).tolist(), lengths))


def _norms_of_each(arrays: list[torch.Tensor]) -> list[float] | None:
    """Return the norm of each array on the CPU, ``None`` if one is out of range."""
    # One call for all short arrays. In long ones the conversion of each element takes longer.
    is_short = [array.numel() < LONG for array in arrays]
    short = list(compress(arrays, is_short))
    norms_of_short: Iterator[float] = iter(())
    if short:
        in_one_call = foreach_norm(short, 2, dtype=torch.float64)
        norms_of_short = iter(torch.stack(in_one_call).tolist())
    norms: list[float] = []
    for array, is_in_call in zip(arrays, is_short, strict=True):
        norm = next(norms_of_short) if is_in_call else norm_of([array])
        if norm is None:
            return None
        norms.append(norm)
    return norms


def sums_on_host(backend: _Torch, terms: Terms) -> list[View]:
    """Return the rows of all norms in NumPy arrays, from memory that the CPU can read."""
    rows = squares_on_host(terms.arrays, terms.counts) if terms.whole else None
    if rows is not None:
        return terms.in_blocks(rows)

    # NumPy's calls take less time than PyTorch's, but for other powers of long arrays.
    arrays = terms.arrays
    axes = terms.axes
    in_numpy = [
        number
        for number, array in enumerate(arrays)
        if array.dtype not in NOT_IN_NUMPY and (terms.p == 2 or array.numel() <= PIECE)
    ]
    terms_in_numpy = terms._replace(
        arrays=list(map(host_view, take(arrays, in_numpy))),
        axes=axes and take(axes, in_numpy),
    )
    sums = dict(zip(in_numpy, sums_of_arrays(terms_in_numpy), strict=True))

    with torch.no_grad():
        for number, term in enumerate(terms.by_array()):
            if number not in sums:
                sums[number] = host_view(power_sum(backend, *term))
    return stack_terms(DEFAULT, take(sums, range(len(arrays))), terms)


def squares_on_device(arrays: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return the sums of squares on an accelerator in float64,
    so that nothing overflows and needs a second pass.
    """
    home = arrays[0].device
    norms: list[Any] = [None] * len(arrays)
    for numbers in _by_layout(arrays):
        group = take(arrays, numbers)
        device = group[0].device
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        group_norms = foreach_norm(group, 2, dtype=dtype)
        # All norms of another device are moved by one transfer, not by one for each.
        if device != home:
            group_norms = torch.stack(group_norms).to(home, non_blocking=True).unbind()
        for number, norm in zip(numbers, group_norms, strict=True):
            norms[number] = norm

    stacked = torch.stack(norms)
    # A dot product is one kernel, where a square and a sum are two.
    if len(lengths) == 1:
        return torch.dot(stacked, stacked).unsqueeze(0)
    rows = stacked.square()
    if len(lengths) == len(arrays):
        return rows
    groups = in_groups(list(rows.unbind()), lengths)
    return torch.stack([torch.stack(list(group)).sum() for group in groups])


def squares_along_on_device(arrays: list[torch.Tensor], axes: list[Axes]) -> list[torch.Tensor]:
    """Return the sums of squares along axes on an accelerator, in float64."""
    norms = [
        torch.linalg.vector_norm(array, dim=along, dtype=torch.float64)
        for array, along in zip(arrays, axes, strict=True)
    ]
    if len({norm.shape for norm in norms}) > 1:
        return foreach_mul(norms, norms)
    return list(torch.stack(norms).square().unbind())


FLOATS = {*SINGLE, torch.float64, torch.complex64, torch.complex128}
"""The dtypes that PyTorch computes with."""
STORAGE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""Storage formats, which PyTorch does not compute with: they are converted to float32."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {*FLOATS, *STORAGE, *_INTEGERS, torch.complex32}


def _without_warning(make: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap a function that makes a sparse tensor of valid indices,
    so that it does not warn that they are not checked.
    """
    # PyTorch 2.11 and 2.12 warn even if ``check_invariants=False`` is passed.
    warns = torch.__version__ >= (2, 11) and torch.__version__ < (2, 13)
    if not warns:
        return make

    def make_silently(*args: Any, **options: Any) -> Array:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return make(*args, **options)

    return make_silently


_make_coo = _without_warning(torch.sparse_coo_tensor)
_COMPRESSED = {
    torch.sparse_csr: (
        _without_warning(torch.sparse_csr_tensor),
        torch.Tensor.crow_indices,
        torch.Tensor.col_indices,
    ),
    torch.sparse_csc: (
        _without_warning(torch.sparse_csc_tensor),
        torch.Tensor.ccol_indices,
        torch.Tensor.row_indices,
    ),
}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}
_UNSUPPORTED: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (
        lambda x: isinstance(x, torch.nn.parameter.UninitializedTensorMixin),
        "it has no shape yet; run the model once",
    ),
    (
        lambda x: isinstance(x, torch.masked.MaskedTensor),
        "its masked elements have no defined norm; use to_tensor(0.0)",
    ),
    (lambda x: x.layout is torch.jagged, "it holds rows of several lengths; use values()"),
    (lambda x: x.is_nested, "it holds tensors of several shapes; use unbind()"),
    (lambda x: x.layout is OPAQUE, "its layout is opaque; use to_dense()"),
    (
        lambda x: x.layout not in _LAYOUTS,
        "its layout, {0.layout}, cannot be clipped; use to_sparse_csr() or to_sparse()",
    ),
    (lambda x: x.is_quantized, "it is quantized; use dequantize()"),
    (
        lambda x: x.dtype not in _DTYPES,
        "PyTorch does not compute with {0.dtype}; use to(torch.float32)",
    ),
]
"""Conditions of tensors that cannot be clipped, the reason, and a function that converts them."""


def _replace_elements(leaf: Array, new: Array) -> None:
    """Give a COO tensor the elements of another one."""
    leaf.data = new
    # Autograd does not notice that the data of a tensor are replaced.
    increment_version(leaf)


def _copy_if_shared(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Return the operand, copied if it is another view of the array to change."""
    # Compiled code reads before it writes.
    if torch.compiler.is_compiling():
        return operand

    # The memory of subclasses and of traced tensors is unknown.
    if type(array) is not torch.Tensor or type(operand) is not torch.Tensor or tracing():
        return operand.clone()
    is_shared = operand.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return operand.clone() if is_shared else operand


def _read_only_reason(leaf: Array) -> str | None:
    """Return why a tensor's values cannot be written, ``None`` if they can."""
    if leaf.requires_grad and leaf.is_leaf:
        return (
            "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the "
            "weights)"
        )

    # The compiler can evaluate neither of the following.
    if torch.compiler.is_compiling():
        return None
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return "a tensor made in inference mode can be changed only there"
    if in_transform() and same_for_all_examples(leaf):
        return "torch.func.vmap maps over many examples, and it is one for all of them"
    return None


def _memory_of(leaf: Array) -> View | None:
    """Return a NumPy array at a tensor's address, ``None`` if that is unknown."""
    if is_dtensor(leaf):
        leaf = leaf.to_local()
    if type(leaf) is not torch.Tensor or tracing() or valueless(leaf):
        return None

    values = leaf
    if leaf.layout is torch.sparse_coo:
        values = stored_values(leaf)
    elif leaf.layout is not torch.strided:
        values = leaf.values()
    # PyTorch counts strides in elements, and NumPy counts them in bytes.
    size = values.element_size()
    strides = [size * stride for stride in values.stride()]
    return np.asarray(Address(values.data_ptr(), values.shape, strides, size))


class _Torch(dtensor.Distributed):
    output_axis = 0
    writes = True
    one_norm = one_norm
    scale_all = staticmethod(scale_all)
    clip_at_once = staticmethod(clip_at_once)
    # No Python code runs for each array.
    detach = staticmethod(torch.Tensor.detach)
    bound = staticmethod(bound)

    def signature(self, leaves: list[Any]) -> tuple[Hashable, ...] | None:
        # The compiler would compile again for each signature in a cache.
        if torch.compiler.is_dynamo_compiling():
            return None

        # Formats are assigned, not appended: this runs for each leaf at each step.
        formats: list[Hashable] = [None] * len(leaves)
        for number, leaf in enumerate(leaves):
            if type(leaf) is torch.Tensor:
                formats[number] = (
                    leaf.dtype,
                    leaf.is_cpu or leaf.device,
                    leaf.layout,
                    leaf.requires_grad,
                    leaf.is_nested,
                )
            elif leaf is not None:
                formats[number] = _format_of_other(leaf)
        return tuple(formats)

    def array_facts(self, arrays: list[Array]) -> ArrayFacts:
        return ArrayFacts(
            traced=any(map(valueless, arrays)),
            reads=all([type(array) in _REGULAR and array.is_cpu for array in arrays]),
            records=any([array.requires_grad for array in arrays]),
            # MPS has no float64.
            double=all([array.device.type != "mps" for array in arrays]),
        )

    def mode(self, leaf_info: LeafInfo, inputs: Tree = ()) -> int:
        if leaf_info.traced or tracing():
            return TRACED
        if (leaf_info.records and torch.is_grad_enabled()) or in_forward_mode():
            return RECORDED
        return HOST if leaf_info.reads else LIBRARY

    def as_numpy(self, array: Array) -> View | None:
        if tracing() or type(array) is not torch.Tensor or array.dtype not in _HOST_DTYPES:
            return None
        if not array.is_cpu or is_recorded(array):
            return None
        return host_view(array)

    def device(self, array: Array | None) -> torch.device:
        return _CPU if array is None else array.device

    def captured(self, array: Array) -> bool:
        if array.is_cpu or array.device.type != "cuda":
            return False
        return bool(torch.cuda.is_current_stream_capturing())

    def from_host(self, array: View, device: Device) -> Array:
        # A copy, since some of NumPy's arrays are read-only.
        on_host = torch.from_numpy(np.array(array))
        return on_host if device == _CPU else move(on_host, device)

    def constant(self, array: View, device: Device) -> Array:
        if device == _CPU:
            return self.from_host(array, device)
        return constant(array, device)

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        # A CUDA graph overwrites the outputs of its last run.
        return [array.detach().clone() for array in arrays]

    def to_host(self, arrays: list[Array]) -> list[View]:
        views: list[Any] = [None] * len(arrays)
        # The host waits for each transfer, so there is one for each device and dtype.
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].detach().reshape(-1) for number in numbers]).cpu()
            # NumPy has no bfloat16.
            if flat.dtype is torch.bfloat16:
                flat = flat.float()
            # A tensor that wraps another one gives only single values.
            if type(flat) is not torch.Tensor:
                flat = torch.tensor([value.item() for value in flat.unbind()], dtype=flat.dtype)

            ends = np.cumsum([arrays[number].numel() for number in numbers])[:-1]
            for number, piece in zip(numbers, np.split(flat.numpy(), ends), strict=True):
                views[number] = piece.reshape(arrays[number].shape)
        return views

    def sums(self, mode: int, terms: Terms) -> list[Any]:
        if mode == HOST:
            return sums_on_host(self, terms)
        arrays = terms.arrays
        are_squares = mode == LIBRARY and terms.p == 2
        if not are_squares or any([array.is_complex() for array in arrays]):
            return super().sums(mode, terms)

        kernels = kernels_on(arrays[0].device)
        rows: list[Array] | None = None if kernels is None else kernels.sums(self, terms)
        if rows is not None:
            return rows
        if terms.whole:
            return terms.in_blocks(squares_on_device(arrays, terms.counts))
        if terms.axes and all(terms.axes) and self.array_facts(arrays).double:
            return stack_terms(self, squares_along_on_device(arrays, list(terms.axes)), terms)
        return super().sums(mode, terms)

    def norms(self, terms: Terms, dtype: torch.dtype) -> tuple[list[Array], list[Array]] | None:
        if dtype is not torch.float32 or terms.p != 2:
            return None
        kernels = kernels_on(terms.arrays[0].device)
        if kernels is None:
            return None
        norms: tuple[list[Array], list[Array]] | None = kernels.norms(terms)
        return norms

    def scale(self, products: Products) -> list[Array]:
        first = products.arrays[0]
        kernels = None
        # Kernels follow addresses, so they see neither tracers nor tangents.
        if not (first.is_cpu or tracing() or in_forward_mode()):
            kernels = kernels_on(first.device)
        new: list[Array] | None = None if kernels is None else kernels.scale(products)
        if new is not None:
            return new
        return super().scale(products)

    def multiply(
        self, arrays: list[Array], factors: _Factors, *, in_place: bool, zero: bool
    ) -> list[Array]:
        # A product by the number 0 needs a test of each element.
        needs_test = (
            zero
            and not isinstance(factors[0], torch.Tensor)
            and any([np.any(factor == 0) for factor in factors])
        )
        products = None
        if not needs_test:
            products = self._multiply_by_foreach(arrays, factors, in_place=in_place, zero=zero)
        if products is not None:
            return products
        return super().multiply(arrays, factors, in_place=in_place, zero=zero)

    def _multiply_by_foreach(
        self, arrays: list[Array], factors: _Factors, *, in_place: bool, zero: bool
    ) -> list[Array] | None:
        """Return the products by PyTorch's functions of lists.

        ``None`` if that records derivatives or is traced.
        """
        are_tensors = isinstance(factors[0], torch.Tensor)
        convert = self._tensors_for if are_tensors else self._numbers_for
        converted = convert(arrays, factors)
        if converted is None:
            return None
        if in_place and any([array.is_neg() or array.is_conj() for array in arrays]):
            return None
        if are_tensors:
            return _multiply_groups(arrays, converted, in_place=in_place, zero=zero)

        operands = _operands(arrays, converted)
        if in_place:
            foreach_mul_(arrays, operands)
            return arrays

        # 0-d products have the dtype of the factor.
        products = list(foreach_mul(arrays, operands))
        for number, array in enumerate(arrays):
            if products[number].dtype is not array.dtype:
                products[number] = products[number].to(array.dtype)
        return products

    def _numbers_for(self, arrays: list[Array], factors: _Factors) -> _Factors | None:
        """Return factors that the host reads, ``None`` if PyTorch's functions do not take them."""
        if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
            return None
        if not any([isinstance(factor, np.ndarray) for factor in factors]):
            return factors
        if not all([array.is_cpu and array.dtype in REAL for array in arrays]):
            return None

        converted = []
        for factor, array in zip(factors, arrays, strict=True):
            of_dtype = np.asarray(factor, _NUMPY_DTYPES[array.dtype])
            converted.append(self.from_host(of_dtype, _CPU))
        return converted

    @staticmethod
    def _tensors_for(arrays: list[Array], factors: Sequence[Any]) -> Sequence[Any] | None:
        """Return factors that are tensors, ``None`` if PyTorch's functions do not take them."""
        pairs = list(zip(factors, arrays, strict=True))
        if tracing() or any([is_recorded(array) for pair in pairs for array in pair]):
            return None

        # A factor for each leaf is on its device already. One for all is sent to each of them.
        if not same(factors) and any([f.device != array.device for f, array in pairs]):
            return None
        if any([f.ndim and f.dtype is not array.dtype for f, array in pairs]):
            return None
        return factors

    def is_array(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def unsupported_reason(self, leaf: Array, *, gradient: bool) -> str | None:
        for is_unsupported, reason in _UNSUPPORTED:
            if is_unsupported(leaf):
                return reason.format(leaf)

        if gradient and isinstance(leaf, torch.nn.Parameter):
            return (
                "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the "
                "weights, p.detach())"
            )
        return None

    def traced(self, array: Array) -> bool:
        return tracing() or valueless(array)

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and bool(array.is_cpu)

    def pieces(self, array: Array, axes: Axes = None) -> Iterable[Array] | None:
        # The size of a traced tensor may be symbolic.
        if type(array) is not torch.Tensor or tracing() or valueless(array):
            return None
        # Derivatives would keep every piece anyway.
        if array.numel() <= PIECE or is_recorded(array):
            return None
        if axes is not None:
            return (array[rows] for rows in row_slices(array.shape))

        ordered = in_memory_order(array)
        flat = ordered.view(-1) if ordered.is_contiguous() else ordered
        return (flat[rows] for rows in row_slices(flat.shape))

    def unwrap(self, leaf: Array, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
        if leaf.dtype in STORAGE:
            return WrappedLeaf(leaf.to(torch.float32), leaf.copy_ if in_place else unchanged)
        if is_dtensor(leaf):
            return dtensor.open_partial(leaf, in_place=in_place, whole=whole)
        if leaf.layout is torch.sparse_coo:
            return self._open_coo(leaf, in_place=in_place)
        if leaf.layout in _COMPRESSED:
            return self._open_compressed(leaf)
        return super().unwrap(leaf, in_place=in_place, whole=whole)

    def _open_compressed(self, leaf: Array) -> WrappedLeaf:
        """Return the stored elements of a CSR or CSC tensor."""
        make, outer, inner = _COMPRESSED[leaf.layout]
        outer_indices = outer(leaf)
        inner_indices = inner(leaf)
        values = leaf.values()

        def rebuild(new: Array) -> Array:
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                return make(
                    outer_indices, inner_indices, new, size=leaf.shape, check_invariants=False
                )

        return WrappedLeaf(values, rebuild, storage=values, rows=())

    def _open_coo(self, leaf: Array, *, in_place: bool) -> WrappedLeaf:
        """Return the stored elements of a COO tensor; those that are stored twice are summed."""
        # Sums of half precision or of small integers would lose digits, or overflow.
        coalesced = leaf
        if not leaf.is_coalesced():
            wide = torch.int32 if leaf.dtype in _INTEGERS else torch.float32
            coalesced = leaf.to(torch.promote_types(leaf.dtype, wide)).coalesce()
        indices = coalesced.indices()
        values = coalesced.values()

        def rebuild(new: Array) -> Array | None:
            made = _make_coo(indices, new, leaf.shape, is_coalesced=True, check_invariants=False)
            if not in_place:
                return made
            _replace_elements(leaf, made)
            return None

        storage = values if coalesced is leaf else stored_values(leaf)
        rows = indices[0] if len(indices) == 1 else ()
        return WrappedLeaf(values, rebuild, storage, rows)

    def storage(self, leaves: list[Array]) -> list[Storage] | None:
        local = leaves
        if any([type(leaf) is not torch.Tensor and is_dtensor(leaf) for leaf in leaves]):
            local = local_tensors(leaves)
        are_regular = all(
            [
                type(x) is torch.Tensor and x.layout is torch.strided and not x.requires_grad
                for x in local
            ]
        )
        if are_regular and not tracing() and are_separate_blocks(local):
            return None
        return [(_memory_of(leaf), _read_only_reason(leaf)) for leaf in leaves]

    def write(self, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        with torch.no_grad():
            # The function is of the whole tensor, so each operand is divided as the tensor is.
            if is_dtensor(array):
                own = [dtensor.own_operand(array, operand) for operand in operands]
                self.write(array.to_local(), function, *own)
                return

            pieces = self.pieces(array)
            if pieces is not None and not any([operand.ndim for operand in operands]):
                for piece in pieces:
                    piece.copy_(function(piece, *operands))
                return

            # An operand that is a view of the array would change while pieces are written.
            expanded = [_copy_if_shared(x, array).expand(array.shape) for x in operands]
            slices = [...] if pieces is None else row_slices(array.shape)
            for rows in slices:
                own_rows = [operand[rows] for operand in expanded]
                array[rows].copy_(function(array[rows], *own_rows))

    # The standard's way has no batching rule under vmap.
    def unstack(self, array: Array) -> list[Array]:
        return list(array.unbind())

    def cond(
        self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]
    ) -> list[Array]:
        # torch.cond cannot be transformed by torch.func.
        if torch.compiler.is_compiling() and not in_transform():
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def computation_context(self, first: Array | None = None) -> AbstractContextManager[object]:
        default_device = default_device_of(first)
        if torch.compiler.is_compiling():
            return default_device or nullcontext()

        silent = super().computation_context(first)
        if default_device is None:
            return silent
        return enter_both(silent, default_device)


def _format_of_other(leaf: Any) -> Hashable:
    """Return the part of a signature for a leaf that is a subclass of tensors, or no tensor."""
    is_uninitialized = isinstance(leaf, torch.nn.parameter.UninitializedTensorMixin)
    if not isinstance(leaf, torch.Tensor) or is_uninitialized:
        return type(leaf), None

    sharding = (leaf.device_mesh, tuple(leaf.placements)) if is_dtensor(leaf) else ()
    return (
        type(leaf),
        leaf.dtype,
        leaf.is_cpu or leaf.device,
        leaf.layout,
        leaf.requires_grad,
        leaf.is_nested,
        *sharding,
    )


def _by_device(arrays: list[Array]) -> list[list[int]]:
    """Return the numbers of the arrays by device and dtype."""
    numbers: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        numbers.setdefault((array.device, array.dtype), []).append(number)
    return list(numbers.values())


BACKEND = _Torch(namespace)
