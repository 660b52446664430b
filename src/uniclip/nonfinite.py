# SPDX-License-Identifier: MIT
"""What happens to gradients that hold NaN or ∞, or whose norm is beyond the range of its dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from uniclip.gradients import Gradients, Leaf
from uniclip.tree import place

if TYPE_CHECKING:
    from uniclip.backends import Backend

NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]


def checked(policy: NonFinite) -> NonFinite:
    """Return a policy; refuse what is none."""
    if policy not in get_args(NonFinite):
        msg = f"nonfinite must be one of {', '.join(map(repr, get_args(NonFinite)))}, got {policy!r}"
        raise ValueError(msg)
    return policy


def zeroed(grads: Gradients) -> tuple[Gradients, Any]:
    """Return the gradients with 0 for each entry that is not finite, and whether there was none."""
    backend, xp = grads.backend, grads.backend.xp
    finite = all_of(backend, [xp.all(xp.isfinite(leaf.array)) for leaf in grads.leaves])
    if backend.readable(finite) and bool(finite):
        return grads, finite
    groups = {label: [_zeroed(grads, leaf) for leaf in group] for label, group in grads.groups.items()}
    return replace(grads, groups=groups), finite


def _zeroed(grads: Gradients, leaf: Leaf) -> Leaf:
    xp = grads.backend.xp
    given = grads.put(leaf, lambda array: xp.where(xp.isfinite(array), array, xp.zeros_like(array)))
    array, rebuild = grads.backend.stored(given)
    return replace(leaf, array=array, given=given, rebuild=rebuild)


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
    xp = grads.backend.xp
    bad = [place("grads", leaf.path) for leaf in grads.leaves if not bool(xp.all(xp.isfinite(leaf.array)))]
    if bad:
        return f"NaN or ∞ in {', '.join(bad)}"
    return "the gradients here are finite, but their norm is beyond the range of its dtype, or another device's are not"


def all_of(backend: Backend, flags: list[Any]) -> Any:
    """Return whether all of the boolean 0-d arrays hold."""
    xp = backend.xp
    if not flags:
        return xp.asarray(True)  # noqa: FBT003
    return xp.all(xp.stack([backend.to_device_of(flags[0], flag) for flag in flags]))
