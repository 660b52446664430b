# SPDX-License-Identifier: MIT
"""Change tensors in place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from uniclip.backends import dtensor
from uniclip.backends.base import Array, row_slices
from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.memory import InPlace
from uniclip.backends.torch_kinds import pieces_of
from uniclip.backends.torch_modes import in_transform, one_for_all, tracing, valueless


class _Memory:
    """A tensor's memory as NumPy sees it, for its address only; the contents are never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr() or 1, True),  # an empty one has no address, which NumPy up to 2.1 does not take
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _copied_if_shared(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
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
        return "a leaf that requires a gradient is a weight (pass w.grad, or w.detach() to clip the weights)"
    if torch.compiler.is_compiling():  # which knows neither of the following
        return None
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return "a tensor made in inference mode can be changed only there"
    if in_transform() and one_for_all(leaf):
        return "torch.func.vmap maps over many examples, and it is one for all of them"
    return None


def _view(leaf: Any) -> Any:
    """Return a NumPy array of a tensor's memory, ``None`` if it is unknown."""
    if is_dtensor(leaf):
        leaf = leaf.to_local()
    if type(leaf) is not torch.Tensor or tracing() or valueless(leaf):
        return None
    if leaf.layout is torch.strided:
        return np.asarray(_Memory(leaf))
    return np.asarray(_Memory(leaf._values() if leaf.layout is torch.sparse_coo else leaf.values()))


class TensorsInPlace(InPlace):
    """Tensors of every kind, changed without derivatives."""

    writes = True

    def memory(self, leaf: Any) -> tuple[np.ndarray[Any, Any] | None, str | None]:
        return _view(leaf), _why_fixed(leaf)

    def write(self, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        with torch.no_grad():
            if is_dtensor(array):  # a function of the whole tensor
                self.write(array.to_local(), function, *[dtensor.own_operand(array, one) for one in operands])
                return
            pieces = pieces_of(array)
            if pieces is not None and not any(operand.ndim for operand in operands):
                for piece in pieces:
                    piece.copy_(function(piece, *operands))
            else:
                operands = tuple(_copied_if_shared(operand, array).expand(array.shape) for operand in operands)
                for rows in row_slices(array.shape) if pieces is not None else [...]:
                    array[rows].copy_(function(array[rows], *(operand[rows] for operand in operands)))

    def copy(self, leaf: Any, new: Any) -> None:
        leaf.copy_(new.to(leaf.dtype))

    def disjoint(self, leaves: list[Any]) -> bool:
        own = [leaf._local_tensor if type(leaf) is not torch.Tensor and is_dtensor(leaf) else leaf for leaf in leaves]
        if not all([type(x) is torch.Tensor and x.layout is torch.strided and not x.requires_grad for x in own]):
            return False
        return self.disjoint_dense(own)

    def disjoint_dense(self, leaves: list[Any]) -> bool:
        spans = sorted(
            [(x.data_ptr(), x.nbytes) for x in leaves if x.is_contiguous() and not (x.is_inference() or x.is_neg())]
        )
        if len(spans) < len(leaves):
            return False
        return all([start + size <= after for (start, size), (after, _) in pairwise(spans)])
