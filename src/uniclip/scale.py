# SPDX-License-Identifier: MIT
"""Work out the factor of each group of gradients, and multiply."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from uniclip._checks import check
from uniclip._repr import short
from uniclip.backends.scalars import NUMBERS, SCALARS
from uniclip.curves import AT_MOST_ONE, LINEAR, RATIOS, normalize
from uniclip.gradients import Gradients, Group, cast, finite_or_zero, spread, upcast
from uniclip.measure import broadcasts

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Curve, Rule

_FAR = (2.0**-126, 2.0**-1022)
"""How far apart norm and limit may lie, in any dtype and in float64, so that a factor is a normal number."""
_FLOAT32 = 3.5e38
"""Above the largest number of float32."""


class Factor(NamedTuple):
    """What becomes of the gradients of a group: they are multiplied by ``power``, a power of two, then by ``rest``."""

    power: Any
    """``None`` if it is 1."""
    rest: Any

    def product(self, xp: Any, top: float) -> Any:
        """Return both as one factor, ``top`` if that is out of range."""
        if self.power is None:
            return self.rest
        one = xp.ones_like(self.power)
        largest = top * xp.where(self.power > 1, 1 / self.power, one)
        return self.power * xp.where(self.rest > largest, largest, self.rest)

    def parts(self) -> list[Any]:
        """Return the rest, and the power if it is not 1."""
        return [self.rest] if self.power is None else [self.rest, self.power]


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
    xp, limit, free, one = backend.xp, bound.limit, bound.measures, backend.xp.ones_like(norm)
    fault = norm - norm  # 0, or NaN; neither NaN nor ∞ is made of healthy gradients, which debuggers look for
    if isinstance(limit, NUMBERS):
        unlimited, limit = bool(limit >= bound.top), xp.asarray(limit, dtype=norm.dtype)
    else:
        limit = backend.to_device_of(norm, limit)
        unlimited, fault = limit >= bound.top, fault + (limit - limit)
        fault = fault + xp.log(xp.where(limit < 0, -one, one))  # 0, or NaN for what is refused where it can be read
    power, rest = (None, one) if unlimited is True else _curved(backend, rule.curve, norm, limit, bound.top)
    if not isinstance(unlimited, bool):
        power = None if power is None else xp.where(unlimited, one, power)
        rest = xp.where(unlimited, one, rest)
    rest = rest + fault
    if not isinstance(free, bool):
        rest = xp.where(free, one, rest)
    elif free:  # asked as a condition, or a compiler would keep it a symbol; then it is unlimited, too
        rest = one
    if rule.nonfinite in {"skip", "zero"}:
        kept = backend.to_device_of(norm, finite) if rule.nonfinite == "skip" else xp.isfinite(norm)
        rest = xp.where(kept, rest, xp.zeros_like(rest))
    return Factor(power, rest)


def _curved(backend: Backend, curve: Curve, norm: Any, limit: Any, top: float) -> tuple[Any, Any]:
    """Return the factor of a curve, as a power of two and the rest where it would leave the range of its dtype."""
    xp, linear = backend.xp, isinstance(curve, LINEAR)
    near = not (linear or curve in RATIOS) or backend.one_pass(norm)
    if backend is SCALARS:
        near = near or norm * _FAR[0] <= limit <= norm / _FAR[0]
    power = None if near else _power(xp, curve, norm, limit, top)
    if power is None or (backend is SCALARS and power == 1):
        power = None
        rest = _asked(curve, xp, norm, limit)
    elif linear:
        rest = _asked(curve, xp, norm, limit / power)
    else:
        one = xp.ones_like(norm)
        far, limit = xp.logical_not(xp.equal(power, one)), limit * one
        ratio = limit / xp.where(far, norm * power, one)
        rest = xp.where(far, ratio, _asked(curve, xp, xp.where(far, limit, norm), limit))
    rest = xp.asarray(rest, dtype=norm.dtype)
    return power, rest if curve in AT_MOST_ONE else xp.where(rest > top, xp.ones_like(rest) * top, rest)


def _power(xp: Any, curve: Curve, norm: Any, limit: Any, top: float) -> Any:
    """Return 1, or the power of two that brings a norm nearer to a limit that is too far away for one factor."""
    power = one = xp.ones_like(norm)
    for far in _FAR if top > _FLOAT32 else _FAR[:1]:
        power = xp.where((norm * far > limit) & (limit > 0), one * far, power)
        if curve is normalize:
            power = xp.where((limit * far > norm) & (norm > 0), one * (1 / far), power)
    return power


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
    backend, xp = grads.backend, grads.backend.xp
    known = {isinstance(part, NUMBERS) for part in factor.parts()}
    together = len(known) == 1 and (not skip or (True in known and factor.rest != 0))  # all parts by a hook, or none
    results = grads.plain_arrays(group) if together else None
    dtype = _dtype(grads, group, factor)
    if dtype is not None and any([xp.result_type(array.dtype, xp.float32) != dtype for array in results or ()]):
        results = None  # parts that some of them cannot hold
    for part in reversed(factor.parts()):
        results = None if results is None else backend.scaled(results, part, in_place=grads.in_place)
    if results is not None:
        return results
    parts, function = grads.as_arrays(factor.parts()), partial(_times, backend, skip, grads.clean)
    return [
        grads.put(leaf, function, *[spread(backend, part, leaf, dtype) for part in parts])
        for leaf in grads.members(group)
    ]


def _dtype(grads: Gradients, group: Group, factor: Factor) -> Any:
    """Return the dtype that holds both parts of a factor, that of the norm; ``None`` if there is one part."""
    return None if factor.power is None else grads.norm_dtype(group)


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
        parts, dtype = grads.as_arrays(factor.parts()), _dtype(grads, group, factor)
        for leaf in grads.members(group):
            wide, by = upcast(backend.xp, leaf.array), [spread(backend, part, leaf, dtype) for part in parts]
            total = backend.sum(_times(backend, skip, grads.clean, wide, *by), (0,))
            if mean:
                count = backend.xp.asarray(backend.size(leaf.given, (0,)), dtype=total.dtype)
                total = total / backend.xp.where(count > 0, count, backend.xp.ones_like(count))
            whole = backend.xp.isdtype(leaf.given.dtype, "integral")
            new[leaf.number] = cast(backend.xp, total, leaf.array.dtype if whole else leaf.given.dtype)
    return grads.tree.rebuild(new)


def _times(backend: Backend, skip: bool, clean: bool, array: Any, rest: Any, power: Any = None) -> Any:  # noqa: FBT001
    """Return ``array · power · rest``; where the factor of a step to skip is 0, 0 even for NaN and ∞."""
    xp = backend.xp
    wide = upcast(xp, finite_or_zero(xp, array) if clean else array)
    if skip:
        wide = xp.where(xp.equal(rest, xp.zeros_like(rest)), xp.zeros_like(wide), wide)
    wide = wide if power is None else cast(xp, wide, rest.dtype)
    product = (wide if power is None else backend.shifted(wide, power)) * rest
    if xp.isdtype(wide.dtype, "complex floating"):  # where 1 as a complex number changes the sign of a zero
        product = xp.where(xp.equal(rest, xp.ones_like(rest)), wide, product)
    return cast(xp, product, array.dtype)
