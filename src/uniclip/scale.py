# SPDX-License-Identifier: MIT
"""Work out the factor of each group of gradients, and multiply."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip.gradients import Gradients, Leaf, cast, finite_or_zero, spread, upcast

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


def factor_of(backend: Backend, rule: Rule, norm: Any, limit: Any, finite: Any) -> Any:
    """Return the curve's factor; 1 where the limit is infinite, NaN (or the policy's 0) where norm or limit is none."""
    xp = backend.xp
    limit = backend.to_device_of(norm, limit)
    unlimited, one = xp.isinf(limit), xp.ones_like(norm)
    factor = rule.curve(xp, norm, xp.where(unlimited, one, limit))
    sound = xp.isfinite(norm) & (limit >= 0)
    factor = xp.where(unlimited, one, xp.where(sound, factor, one * math.nan))
    if rule.nonfinite in {"skip", "zero"}:
        kept = backend.to_device_of(norm, finite) if rule.nonfinite == "skip" else xp.isfinite(norm)
        factor = xp.where(kept, factor, xp.zeros_like(factor))
    return factor


def scaled(grads: Gradients, factors: list[Any], ones: list[Any], *, skip: bool) -> Any:
    """Multiply each group by its factor; leaves whose factor is known to be 1 come back as they are."""
    backend = grads.backend
    function = partial(_times, backend.xp, skip, grads.clean)
    new: dict[int, Any] = {}
    for group, factor, one in zip(grads.groups.values(), factors, ones, strict=True):
        alone = backend.readable(one) and bool(one) and not grads.clean
        for leaf in group:
            new[leaf.index] = (
                _unscaled(backend.xp, leaf) if alone else grads.put(leaf, function, spread(backend, factor, leaf))
            )
    return grads.rebuild([new[index] for index in range(len(new))])


def _unscaled(xp: Any, leaf: Leaf) -> Any:
    return leaf.rebuild(leaf.array) if xp.isdtype(leaf.given.dtype, "integral") else leaf.given


def _times(xp: Any, skip: bool, clean: bool, array: Any, factor: Any) -> Any:  # noqa: FBT001
    """Return ``array · factor``; where the factor of a step to skip is 0, 0 even for NaN and ∞."""
    wide = upcast(xp, finite_or_zero(xp, array) if clean else array)
    if skip:
        wide = xp.where(xp.equal(factor, xp.zeros_like(factor)), xp.zeros_like(wide), wide)
    return cast(xp, wide * factor, array.dtype)
