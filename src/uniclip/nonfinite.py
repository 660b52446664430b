# SPDX-License-Identifier: MIT
"""Policies for gradients that hold NaN or ∞, or whose norm overflows its dtype: their names.

What each does is in `uniclip.step`, in the order of a step: ``"zero"`` makes such entries 0 and measures again,
``"raise"`` refuses the step, ``"skip"`` makes all factors 0; `uniclip.choices` says what a rule has to know for it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]

POLICIES = get_args(NonFinite)


class NonFiniteError(FloatingPointError, RuntimeError):
    """What ``nonfinite="raise"`` raises: a floating-point error, and the `RuntimeError` of PyTorch's own functions."""
