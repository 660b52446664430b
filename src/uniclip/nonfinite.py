# SPDX-License-Identifier: MIT
"""Policies for gradients that hold NaN or ∞, or whose norm overflows its dtype: their names, and ``"raise"``.

``"zero"`` cleans the gradients in `uniclip.measure`; ``"skip"`` makes factors 0 in `uniclip.ask`, as `uniclip.step`
reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from uniclip.plan import Plan
    from uniclip.tree import Opened

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]

POLICIES = get_args(NonFinite)
_NAMED = 5
"""The number of leaves named in an error."""


class NonFiniteError(FloatingPointError, RuntimeError):
    """What ``nonfinite="raise"`` raises: a floating-point error, and the `RuntimeError` of PyTorch's own functions."""


def refuse(given: Opened, plan: Plan, finite: Any) -> None:
    """Raise if the gradients are not finite, naming the leaves."""
    if plan.norms_backend.traced(finite):
        msg = (
            "nonfinite='raise' has to look at the norm, and code that is being compiled or transformed has no values "
            "to look at: use 'propagate', 'skip' or 'zero' there, and look at report.finite outside"
        )
        raise TypeError(msg)
    if not bool(finite):
        raise NonFiniteError(_explained(given))


def _explained(given: Opened) -> str:
    xp = given.backend.xp
    bad = [given.place(number) for number in given.kinds.present if not bool(xp.all(xp.isfinite(given.arrays[number])))]
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        return f"NaN or ∞ in {', '.join(bad[:_NAMED])}{more}"
    return "the gradients here are finite, but their norm is beyond the range of its dtype, or another device's are not"
