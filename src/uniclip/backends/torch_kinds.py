# SPDX-License-Identifier: MIT
"""The kinds of tensors: which can be clipped, what a sparse or distributed one stores, and how to restore its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from uniclip.backends import dtensor
from uniclip.backends.base import PIECE, Array, Rebuild, row_slices, unchanged
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.torch_modes import recorded, tracing, valueless
from uniclip.backends.torch_sums import SINGLE, in_order

FLOATS = {*SINGLE, torch.float64, torch.complex64, torch.complex128}
"""The dtypes in which PyTorch computes."""
STORAGE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""Storage formats, with which PyTorch does not compute: they are converted to float32."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {*FLOATS, *STORAGE, *_INTEGERS, torch.complex32}
_COMPRESSED = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = {torch.strided, torch.sparse_coo, *_COMPRESSED}
_UNFIT: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda x: isinstance(x, torch.nn.parameter.UninitializedTensorMixin), "it has no shape yet; run the model once"),
    (lambda x: isinstance(x, torch.masked.MaskedTensor), "what masked entries count is not known; use to_tensor(0.0)"),
    (lambda x: x.layout is torch.jagged, "it holds rows of several lengths; use values()"),
    (lambda x: x.is_nested, "it holds tensors of several shapes; use unbind()"),
    (lambda x: x.layout is torch._mkldnn, "its layout is opaque; use to_dense()"),  # noqa: SLF001
    (
        lambda x: x.layout not in _LAYOUTS,
        "its layout, {0.layout}, cannot be clipped; use to_sparse_csr() or to_sparse()",
    ),
    (lambda x: x.is_quantized, "it is quantized; use dequantize()"),
    (lambda x: x.dtype not in _DTYPES, "PyTorch does not calculate with {0.dtype}; use to(torch.float32)"),
]
"""Kinds of tensors that cannot be clipped, why, and what to convert them to."""


def why_unfit(leaf: Any) -> str | None:
    """Return why a tensor cannot be measured, and what to pass instead; ``None`` if it can."""
    return next((why.format(leaf) for holds, why in _UNFIT if holds(leaf)), None)


def stored(leaf: Any) -> tuple[Array, Rebuild]:
    """Return the dense tensor of the stored values, and a function that restores the kind."""
    if leaf.dtype in STORAGE:
        array, rebuild = stored(leaf.to(torch.float32))
        return array, lambda new: rebuild(new).to(leaf.dtype)
    if leaf.layout is torch.sparse_coo:
        # Repeated entries are summed in float32, not in half precision.
        wide = leaf.dtype if leaf.dtype in _INTEGERS else torch.promote_types(leaf.dtype, torch.float32)
        merged = leaf if leaf.is_coalesced() else leaf.to(wide).coalesce()
        return merged.values(), lambda new: torch.sparse_coo_tensor(
            merged.indices(), new, leaf.shape, is_coalesced=True, check_invariants=False
        )
    if leaf.layout in _COMPRESSED:
        make, outer, inner = _COMPRESSED[leaf.layout]
        return leaf.values(), lambda new: make(outer(leaf), inner(leaf), new, leaf.shape, check_invariants=False)
    if is_dtensor(leaf):
        whole = dtensor.summed(leaf)
        return whole, unchanged if whole is leaf else partial(dtensor.unsummed, leaf)
    return leaf, unchanged


def pieces_of(array: Array) -> Iterable[Array] | None:
    """Split a large tensor, in any order of its entries; ``None`` if it is measured as a whole."""
    if type(array) is not torch.Tensor or tracing() or valueless(array):  # whose size may be symbolic
        return None
    if array.numel() <= PIECE or recorded(array):  # derivatives would keep every piece anyway
        return None
    ordered = in_order(array)
    flat = ordered.view(-1) if ordered.is_contiguous() else ordered
    return (flat[rows] for rows in row_slices(flat.shape))
