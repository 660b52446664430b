# SPDX-License-Identifier: MIT
"""Work out the factor of each group of gradients, and multiply."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip._checks import check
from uniclip._repr import short
from uniclip.backends.scalars import NUMBERS
from uniclip.gradients import Gradients, Group, cast, finite_or_zero, spread, upcast
from uniclip.limits import Constant
from uniclip.measure import broadcasts

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


def factor_of(backend: Backend, rule: Rule, norm: Any, limit: Any, finite: Any) -> Any:
    """Return the curve's factor; 1 where the limit is infinite, NaN (or the policy's 0) where norm or limit is none.

    A constant infinite limit only measures, so it leaves alone what is not finite, too.
    """
    xp, one = backend.xp, backend.xp.ones_like(norm)
    measures = type(rule.limit) is Constant
    if isinstance(limit, NUMBERS):
        factor = one if measures else xp.where(xp.isfinite(norm), one, one * math.nan)
        if limit != math.inf:
            curved = _asked(rule.curve, xp, norm, xp.asarray(limit, dtype=norm.dtype))
            factor = xp.where(xp.isfinite(norm), xp.asarray(curved, dtype=norm.dtype), one * math.nan)
    else:
        limit = backend.to_device_of(norm, limit)
        unlimited = xp.isinf(limit)
        curved = _asked(rule.curve, xp, norm, xp.where(unlimited, one, limit))
        factor = xp.where(xp.isfinite(norm) & (limit >= 0), curved, one * math.nan)
        factor = xp.where(unlimited if measures else unlimited & xp.isfinite(norm), one, factor)
    if rule.nonfinite in {"skip", "zero"}:
        kept = backend.to_device_of(norm, finite) if rule.nonfinite == "skip" else xp.isfinite(norm)
        factor = xp.where(kept, factor, xp.zeros_like(factor))
    return factor


def _asked(curve: Any, xp: Any, norm: Any, limit: Any) -> Any:
    """Ask a curve; refuse an answer that is no factor."""
    factor = curve(xp, norm, limit)
    if isinstance(factor, NUMBERS) or (hasattr(factor, "dtype") and broadcasts(factor.shape, norm.shape)):
        return factor
    wanted = f"a number, or an array like the norm, of shape {tuple(norm.shape)}"
    return check(f"the factor that {short(curve)} returned", factor, False, wanted)  # noqa: FBT003


def scaled(grads: Gradients, small: Backend, factors: list[Any], ones: list[Any], *, skip: bool) -> Any:
    """Multiply each group by its factor; leaves whose factor is known to be 1 come back as they are.

    ``small`` is the backend of the factors: that of the gradients, or that of scalars.
    """
    backend, tree = grads.backend, grads.tree

    def change() -> list[Any]:
        new: list[Any] = tree.leaves[:]
        for group, factor, one in zip(grads.groups.values(), factors, ones, strict=True):
            alone = small.readable(one) and bool(one) and not grads.clean
            results = _unscaled(grads, group) if alone else _multiplied(grads, group, factor, skip)
            if len(group) == len(new):
                return results
            for number, result in zip(group, results, strict=True):
                new[number] = result
        return new

    # Flags of many groups would be joined, and each leaf wait for all of them.
    if len(ones) != 1 or small.readable(ones[0]) or grads.in_place or not tree.plain or grads.clean:
        return tree.rebuild(change())
    return tree.rebuild(backend.unless(ones[0], tree.leaves, change))


def _unscaled(grads: Gradients, group: Group) -> list[Any]:
    xp, arrays = grads.backend.xp, grads.plain_arrays(group)
    if arrays is not None:
        return arrays
    return [
        leaf.rebuild(leaf.array) if xp.isdtype(leaf.given.dtype, "integral") else leaf.given
        for leaf in grads.members(group)
    ]


def _multiplied(grads: Gradients, group: Group, factor: Any, skip: bool) -> list[Any]:  # noqa: FBT001
    backend = grads.backend
    known = isinstance(factor, NUMBERS)
    arrays = None if skip and not (known and factor != 0) else grads.plain_arrays(group)
    results = None if arrays is None else backend.scaled(arrays, factor, in_place=grads.in_place)
    if results is not None:
        return results
    (factor,) = grads.as_arrays([factor])
    function = partial(_times, backend.xp, skip, grads.clean)
    return [grads.put(leaf, function, spread(backend, factor, leaf)) for leaf in grads.members(group)]


def reduced(grads: Gradients, factors: list[Any], *, skip: bool, mean: bool) -> Any:
    """Return the sum (or the mean) of the gradients, each multiplied by its factor, along their first axis."""
    backend, new = grads.backend, list(grads.tree.leaves)
    first = grads.leaves[0] if new else None
    for leaf in grads.leaves:
        if leaf.given.shape and (leaf.axes is None or 0 in leaf.axes):
            msg = (
                f"rule must keep the examples apart, as uc.by_example_norm(1.0) does: its scope, {short(grads.scope)}, "
                "takes one norm over all of them"
            )
            raise ValueError(msg)
        shapes = [tuple(one.given.shape) for one in (first or leaf, leaf)]
        if not all(shapes) or (shapes[0][0] != shapes[1][0] and None not in {shapes[0][0], shapes[1][0]}):
            places = " and ".join(grads.tree.place(one.number) for one in (first or leaf, leaf))
            msg = f"leaves need as many examples along the first axis, but {places} have the shapes {shapes}"
            raise ValueError(msg)
    for group, factor in zip(grads.groups.values(), grads.as_arrays(factors), strict=True):
        for leaf in grads.members(group):
            wide = upcast(backend.xp, leaf.array)
            total = backend.sum(_times(backend.xp, skip, grads.clean, wide, spread(backend, factor, leaf)), (0,))
            if mean:
                count = backend.xp.asarray(backend.size(leaf.given, (0,)), dtype=total.dtype)
                total = total / backend.xp.where(count > 0, count, backend.xp.ones_like(count))
            new[leaf.number] = cast(backend.xp, total, leaf.array.dtype)
    return grads.tree.rebuild(new)


def _times(xp: Any, skip: bool, clean: bool, array: Any, factor: Any) -> Any:  # noqa: FBT001
    """Return ``array · factor``; where the factor of a step to skip is 0, 0 even for NaN and ∞."""
    wide = upcast(xp, finite_or_zero(xp, array) if clean else array)
    if skip:
        wide = xp.where(xp.equal(factor, xp.zeros_like(factor)), xp.zeros_like(wide), wide)
    return cast(xp, wide * factor, array.dtype)
