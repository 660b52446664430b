# SPDX-License-Identifier: MIT
"""Clipping for PyTorch: `attach` a rule to an optimizer, or call the functions of ``torch.nn.utils`` by their names."""

from uniclip.integrations.torch.attach import Attached, attach
from uniclip.integrations.torch.functions import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

__all__ = ["Attached", "attach", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]
