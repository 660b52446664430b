# SPDX-License-Identifier: MIT
"""PyTorch tensors, dense and sparse, eager, compiled and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from array_api_compat import torch as compat

from uniclip.backends.base import Array, Backend, Rebuild


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays; PyTorch reads the latter as sequences of numbers."""
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    return compat.asarray(np.array(value) if hasattr(value, "__array__") else value, dtype=dtype)


namespace = SimpleNamespace(**(vars(compat) | {"asarray": _asarray, "result_type": _result_type}))

_COMPRESSED = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}


class _Torch(Backend):
    output_axis = 0

    def is_array(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.bool and leaf.layout in _LAYOUTS

    def advice(self, leaf: Any) -> str | None:
        if not isinstance(leaf, torch.nn.Parameter):
            return None
        return "pass the gradients, [p.grad for p in parameters] (to clip the weights themselves, pass p.detach())"

    def readable(self, array: Array) -> bool:
        return array.device.type == "cpu" and not torch.compiler.is_compiling() and not _in_transform()

    def stored(self, leaf: Any) -> tuple[Array, Rebuild]:
        if leaf.layout is torch.sparse_coo:
            leaf = leaf.coalesce()
            return leaf.values(), lambda new: torch.sparse_coo_tensor(
                leaf.indices(), new, leaf.shape, is_coalesced=True, check_invariants=False
            )
        if leaf.layout in _COMPRESSED:
            make, outer, inner = _COMPRESSED[leaf.layout]
            return leaf.values(), lambda new: make(outer(leaf), inner(leaf), new, leaf.shape, check_invariants=False)
        return super().stored(leaf)

    def cond(self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]) -> list[Array]:
        if torch.compiler.is_compiling():
            return list(torch.cond(ok, lambda: tuple(usual()), lambda: tuple(rare())))
        return super().cond(ok, usual, rare)

    def stop_gradient(self, array: Array) -> Array:
        return array.detach()

    def to_device_of(self, other: Array, array: Array) -> Array:
        return array.to(other.device)

    def quiet(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _in_transform() -> bool:
    """Whether ``torch.func`` is transforming the caller: then a value may stand for many."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - torch has no public question


BACKEND = _Torch(namespace)
