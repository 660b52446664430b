# SPDX-License-Identifier: MIT
"""Policies for gradients that hold NaN or ∞, or whose norm overflows its dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from uniclip.backends.arrays import all_of
from uniclip.layout import Opened

if TYPE_CHECKING:
    from uniclip.backends import Backend

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]

POLICIES = get_args(NonFinite)
_NAMED = 5
"""The number of leaves named in an error."""


class NonFiniteError(FloatingPointError, RuntimeError):
    """What ``nonfinite="raise"`` raises: a floating-point error, and the `RuntimeError` of PyTorch's own functions."""


def all_finite(given: Opened) -> Any:
    """Whether every entry here is finite."""
    return all_of(given.backend, [_finite(given, array) for array in given.arrays])


def _finite(given: Opened, array: Any) -> Any:
    backend, xp = given.backend, given.backend.xp
    pieces = backend.pieces(array)
    return all_of(backend, [xp.all(xp.isfinite(piece)) for piece in ([array] if pieces is None else pieces)])


def refuse(given: Opened, backend: Backend, finite: Any) -> None:
    """Raise if the gradients are not finite, naming the leaves."""
    if backend.traced(finite):
        msg = (
            "nonfinite='raise' has to look at the norm, and code that is being compiled or transformed has no values "
            "to look at: use 'propagate', 'skip' or 'zero' there, and look at report.finite outside"
        )
        raise TypeError(msg)
    if not bool(finite):
        raise NonFiniteError(_explained(given))


def _explained(given: Opened) -> str:
    bad = [given.tree.place(number) for number, array in enumerate(given.arrays) if not bool(_finite(given, array))]
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        return f"NaN or ∞ in {', '.join(bad[:_NAMED])}{more}"
    return "the gradients here are finite, but their norm is beyond the range of its dtype, or another device's are not"
