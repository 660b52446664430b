# SPDX-License-Identifier: MIT
"""Clipping for PyTorch: `attach` a rule to an optimizer,
or use drop-ins for the functions of ``torch.nn.utils``.
"""

from uniclip._errors import needs

with needs("PyTorch", "torch"):
    from uniclip.integrations.torch.attaching import attach
    from uniclip.integrations.torch.functions import (
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
    )
    from uniclip.integrations.torch.handle import Attached
    from uniclip.integrations.torch.layout import LayoutCheck, check_layout

__all__ = [
    "Attached",
    "LayoutCheck",
    "attach",
    "check_layout",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
