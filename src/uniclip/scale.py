# SPDX-License-Identifier: MIT
"""Work out the factor of each group of gradients, and multiply."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from uniclip._checks import check
from uniclip._repr import short
from uniclip.backends.scalars import NUMBERS, SCALARS
from uniclip.curves import AT_MOST_ONE, RATIOS, normalize
from uniclip.gradients import Gradients, Group, cast, finite_or_zero, spread, upcast
from uniclip.measure import broadcasts

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Curve, Rule

_FAR = (2.0**-100, 2.0**-900)
"""How far apart norm and limit may lie, in any dtype and in float64, so that a factor is in range."""
_FLOAT32 = 3.5e38
"""Above the largest number of float32."""


class Factor(NamedTuple):
    """What becomes of the gradients of a group: divided by ``unit``, a power of two, and multiplied by ``by``."""

    unit: Any
    """``None`` if it is 1."""
    by: Any

    def product(self, xp: Any, top: float) -> Any:
        """Return both as one factor, ``top`` if that is out of range."""
        if self.unit is None:
            return self.by
        largest = top * xp.where(self.unit < 1, self.unit, xp.ones_like(self.unit))
        return xp.where(self.by > largest, largest, self.by) / self.unit

    def parts(self) -> list[Any]:
        """Return the parts that are not 1."""
        return [self.by] if self.unit is None else [self.by, self.unit]


class Bound(NamedTuple):
    """What a norm may be."""

    limit: Any
    """A number or an array, ``top`` at most."""
    top: float
    """The largest number of the norm's dtype: a limit of ``top`` is none."""
    measures: Any = False
    """Whether the rule only measures, also what is not finite: then its constant limit is infinite."""


def factor_of(backend: Backend, rule: Rule, norm: Any, bound: Bound, finite: Any) -> Factor:
    """Return the curve's factor: 1 where nothing limits, NaN (or the policy's 0) where norm or limit is not finite."""
    xp, limit, free = backend.xp, bound.limit, bound.measures
    fault = norm - norm  # 0, or NaN; neither NaN nor ∞ is made of healthy gradients, which debuggers look for
    if isinstance(limit, NUMBERS):
        unlimited, limit = bool(limit >= bound.top), xp.asarray(limit, dtype=norm.dtype)
    else:
        limit = backend.to_device_of(norm, limit)
        unlimited, fault = limit >= bound.top, fault + (limit - limit)
    one = xp.ones_like(norm)
    unit, by = (None, one) if unlimited is True else _curved(backend, rule.curve, norm, limit, bound.top)
    if not isinstance(unlimited, bool):
        unit, by = None if unit is None else xp.where(unlimited, one, unit), xp.where(unlimited, one, by)
    by = by + fault
    if not isinstance(free, bool):
        by = xp.where(free, one, by)
    elif free:  # asked as a condition, or a compiler would keep it a symbol; then it is unlimited, too
        by = one
    if rule.nonfinite in {"skip", "zero"}:
        kept = backend.to_device_of(norm, finite) if rule.nonfinite == "skip" else xp.isfinite(norm)
        by = xp.where(kept, by, xp.zeros_like(by))
    return Factor(unit, by)


def _curved(backend: Backend, curve: Curve, norm: Any, limit: Any, top: float) -> tuple[Any, Any]:
    """Return the factor of a curve; where it would leave the range of its dtype, a unit and that of the norm in it."""
    xp, near = backend.xp, curve not in RATIOS or backend.one_pass(norm)
    if backend is SCALARS:
        near = near or norm * _FAR[0] <= limit <= norm / _FAR[0]
    unit = None if near else _unit(xp, curve, norm, limit, top)
    by = xp.asarray(_asked(curve, xp, norm if unit is None else norm / unit, limit), dtype=norm.dtype)
    return unit, by if curve in AT_MOST_ONE else xp.where(by > top, xp.ones_like(by) * top, by)


def _unit(xp: Any, curve: Curve, norm: Any, limit: Any, top: float) -> Any:
    """Return 1, or the power of two by which norm and limit lie too far apart for one factor."""
    unit = one = xp.ones_like(norm)
    for far in _FAR if top > _FLOAT32 else _FAR[:1]:
        unit = xp.where((norm * far > limit) & (limit > 0), one / far, unit)
        if curve is normalize:
            unit = xp.where((limit * far > norm) & (norm > 0), one * far, unit)
    return unit


def _asked(curve: Any, xp: Any, norm: Any, limit: Any) -> Any:
    """Ask a curve; refuse an answer that is no factor."""
    factor = curve(xp, norm, limit)
    if isinstance(factor, NUMBERS) or (hasattr(factor, "dtype") and broadcasts(factor.shape, norm.shape)):
        return factor
    wanted = f"a number, or an array like the norm, of shape {tuple(norm.shape)}"
    return check(f"the factor that {short(curve)} returned", factor, False, wanted)  # noqa: FBT003


def scaled(grads: Gradients, small: Backend, factors: list[Factor], ones: list[Any], *, skip: bool) -> Any:
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


def _multiplied(grads: Gradients, group: Group, factor: Factor, skip: bool) -> list[Any]:  # noqa: FBT001
    backend = grads.backend
    known = isinstance(factor.by, NUMBERS)
    results = None if skip and not (known and factor.by != 0) else grads.plain_arrays(group)
    for part in [1 / unit for unit in factor.parts()[1:]] + [factor.by]:
        results = None if results is None else backend.scaled(results, part, in_place=grads.in_place)
    if results is not None:
        return results
    parts, function = grads.as_arrays(factor.parts()), partial(_times, backend.xp, skip, grads.clean)
    return [
        grads.put(leaf, function, *[spread(backend, part, leaf) for part in parts]) for leaf in grads.members(group)
    ]


def reduced(grads: Gradients, factors: list[Factor], *, skip: bool, mean: bool) -> Any:
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
    for group, factor in zip(grads.groups.values(), factors, strict=True):
        parts = grads.as_arrays(factor.parts())
        for leaf in grads.members(group):
            wide, by = upcast(backend.xp, leaf.array), [spread(backend, part, leaf) for part in parts]
            total = backend.sum(_times(backend.xp, skip, grads.clean, wide, *by), (0,))
            if mean:
                count = backend.xp.asarray(backend.size(leaf.given, (0,)), dtype=total.dtype)
                total = total / backend.xp.where(count > 0, count, backend.xp.ones_like(count))
            new[leaf.number] = cast(backend.xp, total, leaf.array.dtype)
    return grads.tree.rebuild(new)


def _times(xp: Any, skip: bool, clean: bool, array: Any, by: Any, unit: Any = None) -> Any:  # noqa: FBT001
    """Return ``array / unit · by``; where the factor of a step to skip is 0, 0 even for NaN and ∞."""
    wide = upcast(xp, finite_or_zero(xp, array) if clean else array)
    if skip:
        wide = xp.where(xp.equal(by, xp.zeros_like(by)), xp.zeros_like(wide), wide)
    # Divided: compilers would put two factors together first.
    return cast(xp, (wide if unit is None else wide / unit) * by, array.dtype)
