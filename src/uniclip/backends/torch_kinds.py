# SPDX-License-Identifier: MIT
"""The kinds of tensors: which can be clipped, what a sparse or distributed one stores, and how to restore its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from uniclip.backends import dtensor
from uniclip.backends.base import PIECE, Array, Rebuild, Stored, row_slices, unchanged
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
    (lambda x: x.layout is torch._mkldnn, "its layout is opaque; use to_dense()"),
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


def stored(leaf: Any, *, in_place: bool) -> Stored | None:
    """Return what a tensor stores, ``None`` if it is a dense one that PyTorch calculates with."""
    if leaf.dtype in STORAGE:
        inner = leaf.to(torch.float32)
        whole = stored(inner, in_place=False) or Stored(inner, unchanged)
        return whole._replace(back=partial(_narrowed, leaf, whole.back, in_place), view=False)
    if leaf.layout is torch.sparse_coo:
        return _coo(coalesced(leaf) if leaf.requires_grad else leaf)
    if leaf.layout in _COMPRESSED:
        make, outer, inner = _COMPRESSED[leaf.layout]
        return Stored(
            leaf.values(),
            lambda new: make(outer(leaf), inner(leaf), new, leaf.shape, check_invariants=False),
            view=True,
        )
    if is_dtensor(leaf) and dtensor.is_partial(leaf):
        back = dtensor.written if in_place else dtensor.unsummed
        return Stored(dtensor.summed(leaf), partial(back, leaf))
    return None


def coalesced(leaf: Any) -> Any:
    """Return a sparse tensor whose repeated entries are summed, in float32 or wider; any other one as it is."""
    if leaf.layout is not torch.sparse_coo or leaf.is_coalesced():
        return leaf
    wide = leaf.dtype if leaf.dtype in _INTEGERS else torch.promote_types(leaf.dtype, torch.float32)
    return leaf.to(wide).coalesce()


def _narrowed(leaf: Any, back: Rebuild, in_place: bool, new: Array) -> Any:
    """Return changed values in a storage format, written into the leaf if it is changed in place."""
    found = back(new).to(leaf.dtype)
    return leaf.copy_(found) if in_place else found


def _coo(leaf: Any) -> Stored:
    single = leaf.is_coalesced()
    indices, values = (leaf.indices(), leaf.values()) if single else (leaf._indices(), leaf._values())

    def of(new: Array) -> Any:
        return torch.sparse_coo_tensor(indices, new, leaf.shape, is_coalesced=single, check_invariants=False)

    def merged(new: Array) -> Array:
        return coalesced(of(new)).values()

    def rows(factors: Array) -> Array:
        return factors[torch.unique(indices, dim=1, return_inverse=True)[1]]

    return Stored(values, of, view=True) if single else Stored(values, of, True, merged, rows)


def pieces_of(array: Array) -> Iterable[Array] | None:
    """Split a large tensor, in any order of its entries; ``None`` if it is measured as a whole."""
    if type(array) is not torch.Tensor or tracing() or valueless(array):  # whose size may be symbolic
        return None
    if array.numel() <= PIECE or recorded(array):  # derivatives would keep every piece anyway
        return None
    ordered = in_order(array)
    flat = ordered.view(-1) if ordered.is_contiguous() else ordered
    return (flat[rows] for rows in row_slices(flat.shape))
