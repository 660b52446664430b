# SPDX-License-Identifier: MIT
"""The memory of tensors: its address, and whether it can be written."""

from __future__ import annotations

import numpy as np
import torch

from uniclip._types import View
from uniclip.backends.arrays import Address
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.modes import in_transform, tracing, valueless
from uniclip.backends.torch.private import same_for_all_examples, stored_values


def read_only_reason(leaf: torch.Tensor) -> str | None:
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


def memory_of(leaf: torch.Tensor) -> View | None:
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


def copy_if_shared(operand: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Return the operand, copied if it is another view of the array to change."""
    # Compiled code reads before it writes.
    if torch.compiler.is_compiling():
        return operand

    # The memory of subclasses and of traced tensors is unknown.
    if type(array) is not torch.Tensor or type(operand) is not torch.Tensor or tracing():
        return operand.clone()
    is_shared = operand.untyped_storage().data_ptr() == array.untyped_storage().data_ptr()
    return operand.clone() if is_shared else operand
