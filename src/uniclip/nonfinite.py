# SPDX-License-Identifier: MIT
"""What happens to gradients that hold NaN or ∞, or whose norm is beyond the range of its dtype."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from uniclip.gradients import Gradients, Leaf, all_of
from uniclip.measure import AllReduce

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]

POLICIES = get_args(NonFinite)
_NAMED = 5
"""How many leaves an error names."""


def all_finite(grads: Gradients, all_reduce: AllReduce | None = None) -> Any:
    """Whether every entry is finite, also those of other devices."""
    xp = grads.backend.xp
    here = all_of(grads.backend, [_finite(grads, leaf) for leaf in grads.leaves])
    here = grads.backend.agreed([leaf.array for leaf in grads.leaves], here)
    if all_reduce is None:
        return here
    faults = xp.where(here, xp.asarray(0.0, dtype=xp.float32), xp.asarray(1.0, dtype=xp.float32))
    return all_reduce(faults, "max") < 1


def _finite(grads: Gradients, leaf: Leaf) -> Any:
    backend, xp = grads.backend, grads.backend.xp
    array, _, _ = backend.own_part(leaf.array, None, None, "max")
    pieces = backend.pieces(array) if backend.large(array) else [array]
    return all_of(backend, [xp.all(xp.isfinite(piece)) for piece in pieces])


def refuse(grads: Gradients, finite: Any) -> None:
    """Raise if the gradients are not finite; the error names the leaves."""
    if grads.backend.traced(finite):
        msg = (
            "nonfinite='raise' has to look at the norm, and code that is being compiled or transformed has no values "
            "to look at: use 'propagate', 'skip' or 'zero' there, and look at report.finite outside"
        )
        raise TypeError(msg)
    if not bool(finite):
        raise FloatingPointError(_explained(grads))


def _explained(grads: Gradients) -> str:
    bad = [grads.tree.place(leaf.number) for leaf in grads.leaves if not bool(_finite(grads, leaf))]
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        return f"NaN or ∞ in {', '.join(bad[:_NAMED])}{more}"
    return "the gradients here are finite, but their norm is beyond the range of its dtype, or another device's are not"
