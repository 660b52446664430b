# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as compat

from uniclip.backends.base import PIECE, Array, Backend, Rebuild, row_slices, sum_dtype


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays; PyTorch reads the latter as sequences of numbers."""
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        return torch.ones((), dtype=dtype) * value  # else torch.compile takes the number for a constant
    if isinstance(value, (bool, int, float, torch.SymInt)):
        return torch.full((), value, dtype=dtype)  # torch.export cannot save constants inside torch.cond
    return compat.asarray(np.array(value) if hasattr(value, "__array__") else value, dtype=dtype)


namespace = SimpleNamespace(**(vars(compat) | {"asarray": _asarray, "result_type": _result_type}))

_COMPRESSED = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}


class _Memory:
    """What NumPy may know of a tensor's memory; it looks at the address, never at what is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _apart(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Return the operand, a copy if it is another view of the array that is to be changed."""
    if torch.compiler.is_compiling() or operand.untyped_storage().data_ptr() != array.untyped_storage().data_ptr():
        return operand
    return operand.clone()


class _Torch(Backend):
    output_axis = 0

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool

    def advice(self, leaf: Any) -> str | None:
        if leaf.layout not in _LAYOUTS:
            return f"its layout, {leaf.layout}, cannot be clipped; convert it with to_sparse_csr() or to_sparse()"
        if not isinstance(leaf, torch.nn.Parameter):
            return None
        return "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the weights, p.detach())"

    def traced(self, array: Array) -> bool:  # noqa: ARG002 - it is the code that is traced
        return torch.compiler.is_compiling() or _in_transform()

    def readable(self, array: Array) -> bool:
        return array.device.type == "cpu" and not self.traced(array)

    def large(self, array: Array) -> bool:
        recorded = array.requires_grad and torch.is_grad_enabled()  # derivatives would keep every piece anyway
        return type(array) is torch.Tensor and not recorded and array.numel() > PIECE and not self.traced(array)

    def pieces(self, array: Array) -> Iterable[Array]:
        ordered = array.permute(sorted(range(array.ndim), key=array.stride, reverse=True))  # as it lies in memory
        flat = ordered.view(-1) if ordered.is_contiguous() else ordered
        return [flat[rows] for rows in row_slices(flat.shape)]

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        return self.xp.sum(array, axis=axes)

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if leaf.layout is torch.sparse_coo:
            # Entries that occur often are summed in float32, not in half precision.
            merged = leaf if leaf.is_coalesced() else leaf.to(sum_dtype(self.xp, leaf.dtype)).coalesce()
            return merged.values(), lambda new: torch.sparse_coo_tensor(
                merged.indices(), new, leaf.shape, is_coalesced=True, check_invariants=False
            )
        if leaf.layout in _COMPRESSED:
            make, outer, inner = _COMPRESSED[leaf.layout]
            return leaf.values(), lambda new: make(outer(leaf), inner(leaf), new, leaf.shape, check_invariants=False)
        return super().stored(leaf)

    def why_fixed(self, leaf: Any) -> str | None:
        if leaf.requires_grad and leaf.is_leaf:
            return "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the weights)"
        compiling = torch.compiler.is_compiling()  # which knows no inference mode
        if not compiling and leaf.is_inference() and not torch.is_inference_mode_enabled():
            return "a tensor made in inference mode can be changed only there"
        return None

    def memory(self, leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or self.traced(leaf):
            return None
        if leaf.layout is torch.strided:
            return np.asarray(_Memory(leaf))
        return np.asarray(_Memory(leaf._values() if leaf.layout is torch.sparse_coo else leaf.values()))  # noqa: SLF001

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        with torch.no_grad():
            if self.large(array) and not any(operand.ndim for operand in operands):
                for piece in self.pieces(array):
                    piece.copy_(function(piece, *operands))
            else:
                operands = tuple(_apart(operand, array).expand(array.shape) for operand in operands)
                for rows in row_slices(array.shape) if self.large(array) else [...]:
                    array[rows].copy_(function(array[rows], *(operand[rows] for operand in operands)))
            if leaf.layout is torch.sparse_coo and not leaf.is_coalesced():
                leaf.copy_(self.stored(leaf)[1](array.to(leaf.dtype)))

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if torch.compiler.is_compiling() and not _in_transform():  # torch.cond cannot be transformed
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def to_device_of(self, other: Array, array: Array) -> Array:
        return array.to(other.device)

    def quiet(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _in_transform() -> bool:
    """Whether ``torch.func`` is transforming the caller: then a value may stand for many."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - torch has no public question


BACKEND = _Torch(namespace)
