# SPDX-License-Identifier: MIT
"""Formats of tensors: which can be clipped, why others cannot, and the elements of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from uniclip.backends.base import WrappedLeaf
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.one_norm import SINGLE
from uniclip.backends.torch.private import OPAQUE, stored_values

FLOATS = {*SINGLE, torch.float64, torch.complex64, torch.complex128}
"""The dtypes that PyTorch computes with."""
STORAGE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
"""Storage formats, which PyTorch does not compute with: they are converted to float32."""
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = {*FLOATS, *STORAGE, *_INTEGERS, torch.complex32}


def _without_warning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes a sparse tensor of valid indices,
    so that it does not warn that they are not checked.
    """
    # PyTorch 2.11 and 2.12 warn even if ``check_invariants=False`` is passed.
    warns = torch.__version__ >= (2, 11) and torch.__version__ < (2, 13)
    if not warns:
        return make

    def make_silently(*args: Any, **options: Any) -> torch.Tensor:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return make(*args, **options)

    return make_silently


_make_coo = _without_warning(torch.sparse_coo_tensor)
COMPRESSED = {
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
_LAYOUTS = {torch.strided, torch.sparse_coo, *COMPRESSED}
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
"""Conditions on which a tensor cannot be clipped, and the reason, with what to use instead."""


def unsupported_reason(leaf: torch.Tensor, *, gradient: bool) -> str | None:
    """See `uniclip.backends.base.Backend.unsupported_reason`."""
    for is_unsupported, reason in _UNSUPPORTED:
        if is_unsupported(leaf):
            return reason.format(leaf)

    if gradient and isinstance(leaf, torch.nn.Parameter):
        return (
            "not a gradient; pass the gradients, [p.grad for p in parameters] (to clip the "
            "weights, p.detach())"
        )
    return None


def format_of_other(leaf: Any) -> Hashable:
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


def open_compressed(leaf: torch.Tensor) -> WrappedLeaf:
    """Return the stored elements of a CSR or CSC tensor."""
    make, outer, inner = COMPRESSED[leaf.layout]
    outer_indices = outer(leaf)
    inner_indices = inner(leaf)
    values = leaf.values()

    def rebuild(new: torch.Tensor) -> torch.Tensor:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return make(outer_indices, inner_indices, new, size=leaf.shape, check_invariants=False)

    return WrappedLeaf(values, rebuild, storage=values, rows=())


def open_coo(leaf: torch.Tensor, *, in_place: bool) -> WrappedLeaf:
    """Return the stored elements of a COO tensor; those that are stored twice are summed."""
    # Sums of half precision or of small integers would lose digits, or overflow.
    coalesced = leaf
    if not leaf.is_coalesced():
        wide = torch.int32 if leaf.dtype in _INTEGERS else torch.float32
        coalesced = leaf.to(torch.promote_types(leaf.dtype, wide)).coalesce()
    indices = coalesced.indices()
    values = coalesced.values()

    def rebuild(new: torch.Tensor) -> torch.Tensor | None:
        made = _make_coo(indices, new, leaf.shape, is_coalesced=True, check_invariants=False)
        if not in_place:
            return made
        _replace_elements(leaf, made)
        return None

    storage = values if coalesced is leaf else stored_values(leaf)
    rows = indices[0] if len(indices) == 1 else ()
    return WrappedLeaf(values, rebuild, storage, rows)


def _replace_elements(leaf: torch.Tensor, new: torch.Tensor) -> None:
    """Give a COO tensor the elements of another one."""
    leaf.data = new
    # Autograd does not notice that the data of a tensor are replaced.
    increment_version(leaf)
