# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch

from uniclip._types import Axes, Device, Tree, View
from uniclip.backends.arithmetic import PIECE, enter_both, row_slices
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    RECORDED,
    TRACED,
    ArrayFacts,
    LeafInfo,
    Products,
    Storage,
    Terms,
    WrappedLeaf,
    stack_terms,
    sum_examples,
    unchanged,
)
from uniclip.backends.torch import dtensor
from uniclip.backends.torch.constants import constant
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.foreach import (
    Factors,
    multiply_lists,
    squares_along_on_device,
    squares_on_device,
)
from uniclip.backends.torch.formats import (
    COMPRESSED,
    STORAGE,
    format_of_other,
    open_compressed,
    open_coo,
    unsupported_reason,
)
from uniclip.backends.torch.gpus import kernels_on
from uniclip.backends.torch.host import host_view, sums_on_host
from uniclip.backends.torch.memory import copy_if_shared, memory_of, read_only_reason
from uniclip.backends.torch.modes import (
    default_device_of,
    in_transform,
    is_recorded,
    tracing,
    valueless,
)
from uniclip.backends.torch.namespace import namespace
from uniclip.backends.torch.one_norm import (
    CPU,
    REGULAR,
    are_separate_blocks,
    bound,
    clip_at_once,
    in_memory_order,
    move,
    one_norm,
    scale_all,
)
from uniclip.backends.torch.private import in_forward_mode, local_tensors

Array: TypeAlias = torch.Tensor


_HOST_DTYPES = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes of values computed from norms."""


class _Torch(dtensor.Distributed):
    output_axis = 0
    writes = True
    one_norm = one_norm
    scale_all = staticmethod(scale_all)
    clip_at_once = staticmethod(clip_at_once)
    # No Python code runs for each array.
    detach = staticmethod(torch.Tensor.detach)
    bound = staticmethod(bound)
    unsupported_reason = staticmethod(unsupported_reason)

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
                formats[number] = format_of_other(leaf)
        return tuple(formats)

    def array_facts(self, arrays: list[Array]) -> ArrayFacts:
        return ArrayFacts(
            traced=any(map(valueless, arrays)),
            reads=all([type(array) in REGULAR and array.is_cpu for array in arrays]),
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
        return CPU if array is None else array.device

    def captured(self, array: Array) -> bool:
        if array.is_cpu or array.device.type != "cuda":
            return False
        return bool(torch.cuda.is_current_stream_capturing())

    def from_host(self, array: View, device: Device) -> Array:
        # A copy, since some of NumPy's arrays are read-only.
        on_host = torch.from_numpy(np.array(array))
        return on_host if device == CPU else move(on_host, device)

    def constant(self, array: View, device: Device) -> Array:
        if device == CPU:
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
        if new is None:
            return super().scale(products)
        return sum_examples(self, new) if products.summed else new

    def multiply(
        self, arrays: list[Array], factors: Factors, *, in_place: bool, zero: bool
    ) -> list[Array]:
        # A product by the number 0 needs a test of each element.
        needs_test = (
            zero
            and not isinstance(factors[0], torch.Tensor)
            and any([np.any(factor == 0) for factor in factors])
        )
        products = None
        if not needs_test:
            products = multiply_lists(arrays, factors, in_place=in_place, zero=zero)
        if products is not None:
            return products
        return super().multiply(arrays, factors, in_place=in_place, zero=zero)

    def is_array(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

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

    def unwrap(self, leaf: Array, *, in_place: bool, as_given: bool) -> WrappedLeaf | None:
        if leaf.dtype in STORAGE:
            return WrappedLeaf(leaf.to(torch.float32), leaf.copy_ if in_place else unchanged)
        if is_dtensor(leaf):
            return dtensor.open_partial(leaf, in_place=in_place, as_given=as_given)
        if leaf.layout is torch.sparse_coo:
            return open_coo(leaf, in_place=in_place)
        if leaf.layout in COMPRESSED:
            return open_compressed(leaf)
        return super().unwrap(leaf, in_place=in_place, as_given=as_given)

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
        return [(memory_of(leaf), read_only_reason(leaf)) for leaf in leaves]

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
            expanded = [copy_if_shared(x, array).expand(array.shape) for x in operands]
            slices = [...] if pieces is None else row_slices(array.shape)
            for rows in slices:
                own_rows = [operand[rows] for operand in expanded]
                array[rows].copy_(function(array[rows], *own_rows))

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


def _by_device(arrays: list[Array]) -> list[list[int]]:
    """Return the numbers of the arrays by device and dtype."""
    numbers: dict[Hashable, list[int]] = {}
    for number, array in enumerate(arrays):
        numbers.setdefault((array.device, array.dtype), []).append(number)
    return list(numbers.values())


BACKEND = _Torch(namespace)
