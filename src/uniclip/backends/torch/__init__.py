# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as compat
from torch.autograd.graph import increment_version

from uniclip.backends.arrays import Address
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    PIECE,
    RECORDED,
    TRACED,
    Array,
    ArrayFacts,
    Axes,
    LeafInfo,
    Products,
    Storage,
    Terms,
    WrappedLeaf,
    enter_both,
    in_groups,
    power_sum,
    row_slices,
    same,
    stack_terms,
    unchanged,
)
from uniclip.backends.numpy import BACKEND as DEFAULT
from uniclip.backends.numpy import few, small, squares, squares_of_joined, sums_of_arrays
from uniclip.backends.torch import dtensor
from uniclip.backends.torch.constants import constant
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.fast_path import (
    are_separate_blocks,
    bound,
    fast_path,
    in_memory_order,
    move,
    norm_of,
)
from uniclip.backends.torch.kernels import kernels_on
from uniclip.backends.torch.modes import (
    default_device_of,
    in_forward_mode,
    in_transform,
    is_recorded,
    same_for_all_examples,
    tracing,
    valueless,
)


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


_NARROW = {
    dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
"""The largest numbers of the dtypes that cannot hold all Python numbers."""


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays.

    PyTorch reads the latter as sequences of numbers.
    """
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        # else torch.compile treats the number as a constant
        return torch.ones((), dtype=dtype) * value
    if isinstance(value, float) and dtype in _NARROW and abs(value) > _NARROW[dtype]:
        # ∞, as elsewhere, instead of an error
        return torch.full((), value, dtype=torch.float64).to(dtype)
    if isinstance(value, float) and dtype in REAL and not torch.compiler.is_compiling():
        return torch.scalar_tensor(value, dtype=dtype)
    if isinstance(value, (bool, int, float, torch.SymInt)):
        # torch.export cannot save constants inside torch.cond
        return torch.full((), value, dtype=dtype)
    return compat.asarray(np.array(value) if hasattr(value, "__array__") else value, dtype=dtype)


def _isfinite(x: torch.Tensor, /) -> torch.Tensor:
    """Check in two operations, where PyTorch takes four."""
    return x - x == 0


def _clip(x: torch.Tensor, /, min: Any = None, max: Any = None) -> torch.Tensor:
    """Clip, with derivative 1 on the bounds too:
    what that of ``clamp`` is there depends on PyTorch's version.
    """
    if x.is_floating_point() and (
        tracing() or any([is_recorded(value) for value in (x, min, max) if hasattr(value, "dtype")])
    ):
        for bound, holds in ((min, torch.ge), (max, torch.le)):
            x = x if bound is None else torch.where(holds(x, bound) | x.isnan(), x, bound)
        return x
    # One operation where bounds are numbers; array-api-compat, which also takes arrays, does more.
    numbers = all([bound is None or isinstance(bound, (int, float)) for bound in (min, max)])
    whole = not x.is_floating_point() and any([isinstance(bound, float) for bound in (min, max)])
    return torch.clamp(x, min, max) if numbers and not whole else compat.clip(x, min, max)


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

SINGLE = {torch.float16, torch.bfloat16, torch.float32}
FOREIGN = {torch.bfloat16, torch.complex32}
"""The dtypes that NumPy does not have."""
REAL = {torch.float32, torch.float64}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_HALVES = {torch.float16, torch.bfloat16}
_CPU = torch.device("cpu")
_NUMPYS = {torch.float32: np.float32, torch.float64: np.float64}
_VIEWED = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes of values computed from norms."""


def _operands(arrays: list[torch.Tensor], factors: Sequence[Any]) -> Any:
    """Return numbers, or arrays, as ``torch._foreach_mul`` takes them: one if all are the same."""
    first = factors[0]
    if isinstance(first, torch.Tensor):
        return list(factors)
    is_same = factors.count(first) == len(factors)
    dtypes = {array.dtype for array in arrays}
    if not _HALVES.isdisjoint(dtypes):  # for which numbers are narrowed first
        dtypes = {torch.float64}
    elif not (len(dtypes) == 1 and dtypes <= REAL and all([array.is_cpu for array in arrays])):
        return first if is_same else list(factors)
    # On the CPU a 0-d tensor of the arrays' dtype takes half the time of a number.
    dtype = dtypes.pop()
    if is_same:
        return torch.scalar_tensor(first, dtype=dtype, device=_CPU)
    return list(torch.tensor(factors, dtype=dtype, device=_CPU).unbind())


_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""Integers of the same size."""


def _alike(arrays: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the numbers of arrays that PyTorch's functions of lists take in one launch.

    One array of another device or dtype, or with gaps, would cost a launch for each of a list.
    """
    numbers: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        dense = array.is_contiguous() or in_memory_order(array).is_contiguous()
        numbers.setdefault((array.device, array.dtype, dense), []).append(number)
    return list(numbers.values())


def _multiply_groups(
    arrays: list[torch.Tensor], factors: Sequence[torch.Tensor], *, in_place: bool, zero: bool
) -> list[torch.Tensor] | None:
    """Return products by 0-d factors, or by those of each entry, in few launches.

    If ``zero``, the product by 0 is 0 also for NaN. ``None`` for dtypes without bits to multiply.
    """
    if zero and not all([array.dtype in _BITS for array in arrays]):
        return None
    products = list(arrays)
    for numbers in _alike(arrays):
        group = [arrays[number] for number in numbers]
        of_group = [factors[number] for number in numbers]
        by: Any = of_group
        if same(of_group):
            by = _factor_for(group[0], of_group[0])
        change = in_place
        if zero:
            group = _without_faults(group, by, in_place=in_place)
            change = True  # what was made here
        if change:
            torch._foreach_mul_(group, by)
        else:
            group = list(torch._foreach_mul(group, by))
        for number, product in zip(numbers, group, strict=True):
            # 0-d products get the dtype of a wider factor.
            dtype = arrays[number].dtype
            products[number] = product if product.dtype is dtype else product.to(dtype)
    return products


def _factor_for(array: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor on the device of an array, and in its dtype where nothing is lost.

    A 0-d factor of another dtype takes a launch for each array.
    """
    wider = torch.promote_types(array.dtype, factor.dtype) is array.dtype
    return factor.to(array.device, array.dtype if wider else factor.dtype, non_blocking=True)


def _without_faults(arrays: list[torch.Tensor], by: Any, *, in_place: bool) -> list[torch.Tensor]:
    """Return arrays of one dtype with 0 for all entries, whatever they are, where the factor is 0.

    Their bits are multiplied by 0 or 1, as integers.
    """
    dtype = _BITS[arrays[0].dtype]
    bits = [array.view(dtype) for array in arrays]
    if isinstance(by, torch.Tensor):
        flags: Any = (by != 0).to(dtype)
    else:
        flags = [(factor != 0).to(dtype) for factor in by]
    if in_place:
        torch._foreach_mul_(bits, flags)
        return arrays
    return [new.view(arrays[0].dtype) for new in torch._foreach_mul(bits, flags)]


def view_of(array: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array of the same memory, detached;
    of the values where that is negated or conjugated.
    """
    return array.numpy(force=True)


def squares_here(arrays: list[torch.Tensor], lengths: list[int]) -> Any:
    """Return the sums of squares in a NumPy array, from memory that the CPU can read."""
    norm = norm_of(arrays) if len(lengths) == 1 else None  # the same bits as in the lane
    if norm is not None:
        return np.array([norm * norm])
    leaf_info = {array.dtype for array in arrays}
    sizes = [array.numel() for array in arrays]
    if len(leaf_info) == 1 and not leaf_info.isdisjoint(REAL) and small(sizes, lengths):
        flat = torch._utils._flatten_dense_tensors(arrays)
        return squares_of_joined(flat.numpy(force=True), sizes, lengths)
    if not leaf_info <= SINGLE or few(arrays, sum(sizes)):
        return (
            squares(list(map(view_of, arrays)), lengths) if leaf_info.isdisjoint(FOREIGN) else None
        )
    norms: list[Any] = list(map(norm_of, in_groups(arrays, lengths)))
    return None if None in norms else np.square(norms)


def sums_here(backend: _Torch, terms: Terms) -> list[Any]:
    """Return the rows of all norms in NumPy arrays, from memory that the CPU can read."""
    rows = squares_here(terms.arrays, terms.counts) if terms.whole else None
    if rows is not None:
        return terms.in_blocks(rows)
    arrays, units = terms.arrays, terms.units
    plain = [
        n
        for n, a in enumerate(arrays)
        if a.dtype not in FOREIGN and (terms.p == 2 or a.numel() <= PIECE)
    ]
    axes, by = (given and [given[n] for n in plain] for given in (terms.axes, units))
    sums_of_plain = sums_of_arrays(
        terms._replace(arrays=[view_of(arrays[n]) for n in plain], axes=axes, units=by)
    )
    sums = dict(zip(plain, sums_of_plain, strict=True))
    with torch.no_grad():
        each = enumerate(terms._replace(units=units and list(map(torch.as_tensor, units))).each())
        every = [sums[n] if n in sums else view_of(power_sum(backend, *term)) for n, term in each]
    return stack_terms(DEFAULT, every, terms)


def squares_elsewhere(arrays: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return the sums of squares on an accelerator in float64,
    so that nothing overflows and needs a second pass.
    """
    home = arrays[0].device
    norms: list[Any] = [None] * len(arrays)
    for numbers in _alike(arrays):
        group = [arrays[number] for number in numbers]
        device = group[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
        found = torch._foreach_norm(group, 2, dtype=dtype)
        if device != home:
            found = torch.stack(found).to(home, non_blocking=True).unbind()
        for number, norm in zip(numbers, found, strict=True):
            norms[number] = norm
    if len(lengths) == 1:
        norms = torch.stack(norms)
        return torch.dot(norms, norms).unsqueeze(0)
    total = torch.stack(norms).square()
    if len(lengths) == len(arrays):
        return total
    return torch.stack(
        [torch.stack(list(group)).sum() for group in in_groups(list(total.unbind()), lengths)]
    )


def squares_along_elsewhere(arrays: list[torch.Tensor], axes: list[Any]) -> list[Any]:
    """Return the sums of squares along axes on an accelerator, in float64."""
    norms = [
        torch.linalg.vector_norm(a, dim=along, dtype=torch.float64)
        for a, along in zip(arrays, axes, strict=True)
    ]
    if len({norm.shape for norm in norms}) > 1:
        return torch._foreach_mul(norms, norms)
    return list(torch.stack(norms).square().unbind())


FLOATS = {*SINGLE, torch.float64, torch.complex64, torch.complex128}
"""The dtypes in which PyTorch computes."""
STORAGE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""Storage formats, with which PyTorch does not compute: they are converted to float32."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {*FLOATS, *STORAGE, *_INTEGERS, torch.complex32}


def _without_warning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a sparse tensor of known indices,
    so that it does not warn that nobody checks them.
    """

    def made(*args: Any, **options: Any) -> Any:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return make(*args, **options)

    # PyTorch 2.11 and 2.12 warn even where ``check_invariants=False`` asks for it.
    warns = torch.__version__ >= (2, 11) and torch.__version__ < (2, 13)
    return made if warns else make


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
_UNFIT: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (
        lambda x: isinstance(x, torch.nn.parameter.UninitializedTensorMixin),
        "it has no shape yet; run the model once",
    ),
    (
        lambda x: isinstance(x, torch.masked.MaskedTensor),
        "what masked entries count is not known; use to_tensor(0.0)",
    ),
    (lambda x: x.layout is torch.jagged, "it holds rows of several lengths; use values()"),
    (lambda x: x.is_nested, "it holds tensors of several shapes; use unbind()"),
    (lambda x: x.layout is torch._mkldnn, "its layout is opaque; use to_dense()"),
    (
        lambda x: x.layout not in _LAYOUTS,
        "its layout, {0.layout}, cannot be clipped; use to_sparse_csr() or to_sparse()",
    ),
    (lambda x: x.is_quantized, "it is quantized; use dequantize()"),
    (
        lambda x: x.dtype not in _DTYPES,
        "PyTorch does not calculate with {0.dtype}; use to(torch.float32)",
    ),
]
"""Kinds of tensors that cannot be clipped, why, and what to convert them to."""


def _replace_entries(leaf: Any, new: Any) -> None:
    """Give a COO tensor other entries, in memory of its own."""
    leaf.data = new
    increment_version(leaf)


def _copy_if_shared(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Return the operand, copied if it is another view of the array to change."""
    if torch.compiler.is_compiling():  # it reads before it writes
        return operand
    # The memory of subclasses and of traced tensors is unknown.
    unknown = type(array) is not torch.Tensor or type(operand) is not torch.Tensor or tracing()
    same = unknown or operand.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return operand.clone() if same else operand


def _why_fixed(leaf: Any) -> str | None:
    """Return why a tensor's values cannot be written, ``None`` if they can."""
    if leaf.requires_grad and leaf.is_leaf:
        return (
            "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the "
            "weights)"
        )
    if torch.compiler.is_compiling():  # which knows neither of the following
        return None
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return "a tensor made in inference mode can be changed only there"
    if in_transform() and same_for_all_examples(leaf):
        return "torch.func.vmap maps over many examples, and it is one for all of them"
    return None


def _view(leaf: Any) -> Any:
    """Return a NumPy array of a tensor's memory, ``None`` if it is unknown."""
    if is_dtensor(leaf):
        leaf = leaf.to_local()
    if type(leaf) is not torch.Tensor or tracing() or valueless(leaf):
        return None
    values = torch.Tensor._values if leaf.layout is torch.sparse_coo else torch.Tensor.values
    memory = leaf if leaf.layout is torch.strided else values(leaf)
    size = memory.element_size()
    strides = [size * stride for stride in memory.stride()]
    return np.asarray(Address(memory.data_ptr(), memory.shape, strides, size))


class _Torch(dtensor.Distributed):
    output_axis = 0
    writes = True
    fast_path = staticmethod(fast_path)
    fast_path_reads = staticmethod(attrgetter("is_cpu"))  # type: ignore[assignment]
    bound = staticmethod(bound)

    def signature(self, leaves: list[Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None  # which would compile again for each entry of a cache
        return tuple(
            [
                (
                    leaf.dtype,
                    leaf.is_cpu or leaf.device,
                    leaf.layout,
                    leaf.requires_grad,
                    leaf.is_nested,
                )
                if type(leaf) is torch.Tensor
                else None
                if leaf is None
                else _kind_of_other(leaf)
                for leaf in leaves
            ]
        )

    def array_facts(self, arrays: list[Array]) -> ArrayFacts:
        reads = all([type(array) in _PLAIN and array.is_cpu for array in arrays])
        double = all([array.device.type != "mps" for array in arrays])  # which has no float64
        return ArrayFacts(
            any(map(valueless, arrays)),
            reads,
            any([array.requires_grad for array in arrays]),
            double,
        )

    def mode(self, leaf_info: LeafInfo, beside: Any = ()) -> int:
        if leaf_info.traced or tracing():
            return TRACED
        if (leaf_info.records and torch.is_grad_enabled()) or in_forward_mode():
            return RECORDED
        return HOST if leaf_info.reads else LIBRARY

    def as_numpy(self, array: Array) -> np.ndarray[Any, Any] | None:
        if tracing() or type(array) is not torch.Tensor or array.dtype not in _VIEWED:
            return None
        if not array.is_cpu or is_recorded(array):
            return None
        return view_of(array)

    def device(self, array: Array) -> Any:
        return _CPU if array is None else array.device

    def captured(self, array: Array) -> bool:
        if array.is_cpu or array.device.type != "cuda":
            return False
        return bool(torch.cuda.is_current_stream_capturing())

    def arange(self, count: int, dtype: Any, like: Array) -> Array:
        if tracing() or is_dtensor(like):
            return super().arange(count, dtype, like)
        # Made there: an array that is sent cannot be a part of a CUDA graph.
        return torch.arange(count, dtype=dtype, device=like.device)

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        # A copy, as some arrays cannot be written.
        here = torch.as_tensor(np.array(array), device=_CPU)
        return here if device == _CPU else move(here, device)

    def constant(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        if device == _CPU:
            return self.from_host(array, device)
        return constant(array, device)

    def to_keep(self, arrays: list[Array]) -> list[Array]:
        # A CUDA graph overwrites the outputs of its last run.
        return [array.detach().clone() for array in arrays]

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        values: list[Any] = [None] * len(arrays)
        for numbers in _by_device(arrays):
            flat = torch.cat([arrays[number].detach().reshape(-1) for number in numbers]).cpu()
            flat = flat if flat.dtype is not torch.bfloat16 else flat.float()
            if type(flat) is not torch.Tensor:  # one that wraps others gives single values only
                flat = torch.tensor([entry.item() for entry in flat.unbind()], dtype=flat.dtype)
            ends = np.cumsum([arrays[number].numel() for number in numbers])[:-1]
            for number, piece in zip(numbers, np.split(flat.numpy(), ends), strict=True):
                values[number] = piece.reshape(arrays[number].shape)
        return values

    def sums(self, mode: int, terms: Terms) -> list[Array]:
        if mode == HOST:
            return sums_here(self, terms)
        arrays = terms.arrays
        squares = mode == LIBRARY and terms.p == 2 and terms.units is None
        if not squares or any([array.is_complex() for array in arrays]):
            return super().sums(mode, terms)

        kernels = kernels_on(arrays[0].device)
        rows: list[Array] | None = None if kernels is None else kernels.sums(self, terms)
        if rows is not None:
            return rows
        if terms.whole:
            return terms.in_blocks(squares_elsewhere(arrays, terms.counts))
        if terms.axes and all(terms.axes) and self.array_facts(arrays).double:
            return stack_terms(self, squares_along_elsewhere(arrays, list(terms.axes)), terms)
        return super().sums(mode, terms)

    def norms(self, terms: Terms, dtype: Any) -> tuple[list[Array], list[Array]] | None:
        first = terms.arrays[0]
        if dtype is not torch.float32 or terms.units is not None or terms.p != 2:
            return None
        kernels = kernels_on(first.device)
        found: tuple[list[Array], list[Array]] | None = None
        if kernels is not None:
            found = kernels.norms(terms)
        return found

    def scale(self, products: Products) -> list[Array]:
        first = products.arrays[0]
        kernels = (
            None if first.is_cpu or tracing() or in_forward_mode() else kernels_on(first.device)
        )
        fast: list[Array] | None = None if kernels is None else kernels.scale(products)
        return super().scale(products) if fast is None else fast

    def multiply(
        self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[Array]:
        slow = (
            zero
            and not isinstance(factors[0], torch.Tensor)
            and any([np.any(factor == 0) for factor in factors])
        )
        fast = None if slow else self._at_once(arrays, factors, in_place=in_place, zero=zero)
        return (
            super().multiply(arrays, factors, in_place=in_place, zero=zero)
            if fast is None
            else fast
        )

    def _at_once(
        self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[Array] | None:
        """Return the products by one operation.

        ``None`` where that records derivatives or is traced.
        """
        numbers = not isinstance(factors[0], torch.Tensor)
        ready = (self._numbers_for if numbers else self._tensors_for)(arrays, factors)
        if ready is None or (
            in_place and any([array.is_neg() or array.is_conj() for array in arrays])
        ):
            return None
        if not numbers:
            return _multiply_groups(arrays, ready, in_place=in_place, zero=zero)
        by = _operands(arrays, ready)
        if not in_place:
            new = torch._foreach_mul(arrays, by)
            # 0-d ones now have the dtype of the factor.
            return [
                a if a.dtype is b.dtype else a.to(b.dtype) for a, b in zip(new, arrays, strict=True)
            ]
        torch._foreach_mul_(arrays, by)  # nothing here records a derivative
        return arrays

    def _numbers_for(self, arrays: list[Array], factors: Sequence[Any]) -> Sequence[Any] | None:
        """Return factors that the host reads, if one operation takes all."""
        if torch.is_grad_enabled() and any([array.requires_grad for array in arrays]):
            return None
        if not any([isinstance(factor, np.ndarray) for factor in factors]):
            return factors
        if not all([array.is_cpu and array.dtype in REAL for array in arrays]):
            return None
        return [
            self.from_host(np.asarray(f, _NUMPYS[a.dtype]), _CPU)
            for f, a in zip(factors, arrays, strict=True)
        ]

    @staticmethod
    def _tensors_for(arrays: list[Array], factors: Sequence[Any]) -> Sequence[Any] | None:
        """Return factors that are tensors, if one operation takes all."""
        pairs = list(zip(factors, arrays, strict=True))
        if tracing() or any([is_recorded(array) for pair in pairs for array in pair]):
            return None
        # A factor for each leaf is on its device already. One for all is sent to each of them.
        if not same(factors) and any([f.device != array.device for f, array in pairs]):
            return None
        return (
            None if any([f.ndim and f.dtype is not array.dtype for f, array in pairs]) else factors
        )

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def unsupported_reason(self, leaf: Any, *, gradient: bool) -> str | None:
        why = next((why.format(leaf) for holds, why in _UNFIT if holds(leaf)), None)
        if why or not (gradient and isinstance(leaf, torch.nn.Parameter)):
            return why
        return (
            "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the "
            "weights, p.detach())"
        )

    def traced(self, array: Array) -> bool:
        return tracing() or valueless(array)

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and bool(array.is_cpu)

    def pieces(self, array: Array, axes: Axes = None) -> Iterable[Array] | None:
        # whose size may be symbolic
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

    def unwrap(self, leaf: Any, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
        if leaf.dtype in STORAGE:
            return WrappedLeaf(leaf.to(torch.float32), leaf.copy_ if in_place else unchanged)
        if is_dtensor(leaf):
            return dtensor.open_distributed(leaf, in_place=in_place, whole=whole)
        if leaf.layout is torch.sparse_coo:
            return self._open_coo(leaf, in_place=in_place)
        if leaf.layout in _COMPRESSED:
            make, outer, inner = _COMPRESSED[leaf.layout]
            indices, values = (outer(leaf), inner(leaf)), leaf.values()

            def back(new: Array) -> Any:
                with torch.sparse.check_sparse_tensor_invariants(enable=False):
                    return make(*indices, new, size=leaf.shape, check_invariants=False)

            return WrappedLeaf(values, back, values, ())
        return super().unwrap(leaf, in_place=in_place, whole=whole)

    def _open_coo(self, leaf: Any, *, in_place: bool) -> WrappedLeaf:
        single = leaf
        if not leaf.is_coalesced():
            wide = torch.int32 if leaf.dtype in _INTEGERS else torch.float32
            single = leaf.to(torch.promote_types(leaf.dtype, wide)).coalesce()
        indices, values = single.indices(), single.values()

        def back(new: Array) -> Any:
            made = _make_coo(indices, new, leaf.shape, is_coalesced=True, check_invariants=False)
            return _replace_entries(leaf, made) if in_place else made

        return WrappedLeaf(
            values,
            back,
            values if single is leaf else leaf._values(),
            indices[0] if len(indices) == 1 else (),
        )

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        local = [
            leaf._local_tensor if type(leaf) is not torch.Tensor and is_dtensor(leaf) else leaf
            for leaf in leaves
        ]
        plain = all(
            [
                type(x) is torch.Tensor and x.layout is torch.strided and not x.requires_grad
                for x in local
            ]
        )
        return (
            None
            if plain and not tracing() and are_separate_blocks(local)
            else [(_view(x), _why_fixed(x)) for x in leaves]
        )

    def write(self, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        with torch.no_grad():
            if is_dtensor(array):  # a function of the whole tensor
                self.write(
                    array.to_local(),
                    function,
                    *[dtensor.own_operand(array, operand) for operand in operands],
                )
                return
            pieces = self.pieces(array)
            if pieces is not None and not any(operand.ndim for operand in operands):
                for piece in pieces:
                    piece.copy_(function(piece, *operands))
            else:
                operands = tuple(
                    _copy_if_shared(operand, array).expand(array.shape) for operand in operands
                )
                for rows in row_slices(array.shape) if pieces is not None else [...]:
                    array[rows].copy_(
                        function(array[rows], *(operand[rows] for operand in operands))
                    )

    def unstack(self, array: Array) -> list[Array]:
        return list(array.unbind())

    def cond(
        self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]
    ) -> list[Array]:
        if torch.compiler.is_compiling() and not in_transform():  # torch.cond cannot be transformed
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def detach(self, array: Array) -> Array:
        return array.detach()

    def computation_context(self, first: Array | None = None) -> AbstractContextManager[Any]:
        home = default_device_of(first)
        if torch.compiler.is_compiling():
            return home or nullcontext()
        return (
            super().computation_context(first)
            if home is None
            else enter_both(super().computation_context(first), home)
        )


def _kind_of_other(leaf: Any) -> Any:
    """Return the kind of what is not just a tensor."""
    if not isinstance(leaf, torch.Tensor) or isinstance(
        leaf, torch.nn.parameter.UninitializedTensorMixin
    ):
        return type(leaf), None
    places = (leaf.device_mesh, tuple(leaf.placements)) if is_dtensor(leaf) else ()
    return (
        type(leaf),
        leaf.dtype,
        leaf.is_cpu or leaf.device,
        leaf.layout,
        leaf.requires_grad,
        leaf.is_nested,
        *places,
    )


def _by_device(arrays: list[Array]) -> list[list[int]]:
    """Return the numbers of the arrays by device and dtype."""
    numbers: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        numbers.setdefault((array.device, array.dtype), []).append(number)
    return list(numbers.values())


BACKEND = _Torch(namespace)
