# SPDX-License-Identifier: MIT
"""Policies for gradients that hold NaN or ∞, or whose norm overflows its dtype: their names.

``"zero"`` cleans the gradients in `uniclip.measure`; ``"skip"`` makes factors 0 in `uniclip.ask`, as `uniclip.step`
reports; ``"raise"`` does so there.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]

POLICIES = get_args(NonFinite)


class NonFiniteError(FloatingPointError, RuntimeError):
    """What ``nonfinite="raise"`` raises: a floating-point error, and the `RuntimeError` of PyTorch's own functions."""
