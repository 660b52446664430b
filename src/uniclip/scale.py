# SPDX-License-Identifier: MIT
"""Compute the factor of each norm, and multiply the gradients by it."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from uniclip._repr import short
from uniclip.backends.arrays import cast, finite_or_zero, rows_of, spread, upcast
from uniclip.curves import RejectAbove, hard, within
from uniclip.layout import Block, Layout, Opened
from uniclip.limits import Constant
from uniclip.limits.base import Vectorized
from uniclip.ruler import MANY, broadcasts
from uniclip.tree import Tree, in_memory_before

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule

NUMBERS = (float, int, np.float32, np.bool_)
"""The types that are a limit by themselves (float64 is a float); longdouble is wider."""


def factors_of(backend: Backend, rule: Rule, block: Block, norms: Any, limits: Any, fault: Any, finite: Any) -> Any:
    """Return the curve's factors: 1 where nothing is limited, NaN (or the policy's 0) where either is not finite.

    One that its dtype, or that of a leaf, cannot hold is the largest number, or 0.

    ``fault`` is 0, and NaN where a norm is not finite; ``finite`` is needed only for the policy "skip". A limit equal
    to the largest number of the norms' dtype limits nothing; a constant ∞ leaves even NaN alone.
    """
    xp, top = backend.xp, float(backend.xp.finfo(norms.dtype).max)
    bounded = isinstance(rule.curve, RejectAbove)  # whatever the limit
    if measures(rule.limit) and not bounded:
        return _kept(backend, rule, norms, xp.ones_like(norms), finite)
    unlimited: Any = None
    if isinstance(limits, NUMBERS):
        unlimited = None if bounded else bool(limits >= top)
        limits = xp.asarray(limits, dtype=norms.dtype)
    else:
        limits = cast(xp, backend.to_device_of(norms, limits), norms.dtype)
        unlimited = None if within(rule.curve) else limits >= top
        if rule.curve is not hard:  # which turns NaN into NaN itself
            fault = fault + (limits - limits)
        own = isinstance(rule.limit, Vectorized) and not backend.traced(norms)  # a compiler does not see `host`
        if not (own and rule.limit.host):  # whose limits are 0 or more
            # 0, or NaN for what is refused where it can be read.
            fault = fault + xp.log(1 - 2 * xp.astype(limits < 0, norms.dtype))
    if unlimited is True:
        factors = xp.ones_like(norms)
    else:
        factors = xp.asarray(_asked(rule.curve, xp, norms, limits), dtype=norms.dtype)
        factors = factors if within(rule.curve) else xp.where(factors > block.largest, block.largest, factors)
    if not (unlimited is None or isinstance(unlimited, bool)):
        factors = xp.where(unlimited, 1.0, factors)
    factors = factors + fault
    free = None if bounded else _measures_by_array(backend, rule.limit)
    factors = factors if free is None else xp.where(backend.to_device_of(norms, free), 1.0, factors)
    return _kept(backend, rule, norms, factors, finite)


def _kept(backend: Backend, rule: Rule, norms: Any, factors: Any, finite: Any) -> Any:
    """Return the factors, 0 where the policy drops gradients."""
    if rule.nonfinite not in {"skip", "zero"}:
        return factors
    xp = backend.xp
    kept = backend.to_device_of(norms, finite) if rule.nonfinite == "skip" else xp.isfinite(norms)
    return xp.where(kept, factors, 0.0)


def measures(limit: Any) -> bool:
    """Whether a limit is a constant ∞, which only measures."""
    value = limit.value if type(limit) is Constant else None
    return isinstance(value, NUMBERS) and bool(value > sys.float_info.max)  # to compilers, no symbol equals ∞


def _measures_by_array(backend: Backend, limit: Any) -> Any:
    """Return whether a constant limit that is an array is ∞; ``None`` if it is not an array, or known to be finite."""
    value = limit.value if type(limit) is Constant else None
    if value is None or isinstance(value, NUMBERS):
        return None
    value = backend.xp.asarray(value)
    return backend.xp.isinf(value) if backend.xp.isdtype(value.dtype, "real floating") else None


def _asked(curve: Any, xp: Any, norms: Any, limits: Any) -> Any:
    """Call a curve, and validate its factors."""
    factors = curve(xp, norms, limits)
    if isinstance(factors, NUMBERS) or (hasattr(factors, "dtype") and broadcasts(factors.shape, norms.shape)):
        return factors
    wanted = f"a number, or an array like the norms, of shape {tuple(norms.shape)}"
    msg = f"the factor that {short(curve)} returned must be {wanted}, got {short(factors)}"
    raise TypeError(msg)


def scaled(given: Opened, layout: Layout, factors: list[Any], *, skip: bool) -> Tree:
    """Multiply each group by its factor; return leaves whose factor is known to be 1 as they are."""
    backend, tree = given.backend, given.tree
    change = partial(_changed, given, layout, factors, skip)
    # Flags of many groups would be joined, and each leaf would wait for all of them.
    alone = len(layout.groups) == 1 and given.ways is None and not given.in_place and not given.clean
    alone = alone and given.parts is None
    factor = factors[0] if alone else None
    if factor is None or isinstance(factor, np.ndarray) or backend.readable(factor):
        return tree.with_leaves(change())
    return tree.with_leaves(backend.unless_one(factor, tree.leaves, change))


def _changed(given: Opened, layout: Layout, factors: list[Any], skip: bool) -> list[Any]:  # noqa: FBT001
    """Return the leaves, each multiplied by its factor."""
    new: list[Any] = list(given.tree.leaves)
    if given.ways is None and not given.clean and all([_all_one(some) for some in factors]):
        return new
    left: list[tuple[int, int, int]] = []
    for number, (block, some) in enumerate(zip(layout.blocks, factors, strict=True)):
        known = None if given.clean else _known(given.backend, some)
        for row, group in enumerate(block.groups):
            if known is None or not known[row]:
                left += [(leaf, number, row) for leaf in layout.groups[group]]
            else:
                for leaf in layout.groups[group]:
                    new[leaf] = given.unscaled(leaf)
    if left and given.in_place:
        before = in_memory_before(given.backend, given.tree)
        left = [one for one in left if one[0] not in before]
    results = _at_once(given, layout, factors, left, skip) if left else []
    if results is None:
        results = _one_by_one(given, layout, factors, left, skip)
    elif given.parts is not None:
        results = [
            new[leaf] if given.in_place else given.way(leaf)(one) for (leaf, *_), one in zip(left, results, strict=True)
        ]
    for (leaf, _, _), result in zip(left, results, strict=True):
        new[leaf] = result
    return new


def _all_one(factors: Any) -> bool:
    """Whether all factors of a block are known to be 1."""
    return isinstance(factors, np.ndarray) and bool((factors == 1).all())


def _known(backend: Backend, factors: Any) -> list[bool] | None:
    """Return whether all factors of each row are 1, ``None`` if they cannot be read."""
    if isinstance(factors, np.ndarray):
        same = factors == 1
        return (same if same.ndim == 1 else same.reshape(len(same), -1).all(axis=1)).tolist()  # type: ignore[no-any-return]
    if not backend.readable(factors):
        return None
    same, xp = backend.xp.equal(factors, 1.0), backend.xp
    return [bool(xp.all(same[row, ...])) for row in range(same.shape[0])]


def _at_once(
    given: Opened,
    layout: Layout,
    factors: list[Any],
    left: list[tuple[int, int, int]],
    skip: bool,  # noqa: FBT001
) -> list[Any] | None:
    """Return the products of arrays and factors by the backend's fast path; ``None`` if it has none."""
    host = all(isinstance(some, np.ndarray) for some in factors)
    if given.ways is not None or given.clean or (not host and (skip or given.backend.traced(given.first))):
        return None
    if skip and any([bool((some == 0).any()) for some in factors]):
        return None
    # Factors may be too wide for a leaf.
    along, arrays = layout.axes is not None, [given.arrays[leaf] for leaf, _, _ in left]
    if along:
        if any([array.dtype != layout.blocks[n].dtype for array, (_, n, _) in zip(arrays, left, strict=True)]):
            return None
        each = [rows_of(given.backend, some) for some in factors]
        by = [_beside(given, layout, leaf, each[block][row]) for leaf, block, row in left]
    else:
        each = [some.tolist() if host else rows_of(given.backend, some) for some in factors]
        by = [each[block][row] for _, block, row in left]
    return given.backend.scaled(arrays, by, in_place=given.in_place)


def _beside(given: Opened, layout: Layout, leaf: int, factors: Any) -> Any:
    """Return factors with the dimensions of a leaf."""
    axes, part = layout.axes_of(leaf), given.part(leaf)
    factors = factors if part is None else part.own(factors, axes)
    shape = tuple([1 if axes is None or axis in axes else n for axis, n in enumerate(given.arrays[leaf].shape)])
    return factors.reshape(shape) if isinstance(factors, np.ndarray) else given.backend.xp.reshape(factors, shape)


def _one_by_one(
    given: Opened,
    layout: Layout,
    factors: list[Any],
    left: list[tuple[int, int, int]],
    skip: bool,  # noqa: FBT001
) -> list[Any]:
    """Return the products of arrays and factors, one by one."""
    function, own = partial(_times, given.backend, skip, given.clean), own_factors(given, layout, factors)
    return [given.put(leaf, function, operand(given, layout, own, leaf, block, row)) for leaf, block, row in left]


def own_factors(given: Opened, layout: Layout, factors: list[Any]) -> list[Any]:
    """Return factors as arrays of the gradients' framework; compilers compute many of them only once."""

    def own(block: Block, some: Any) -> Any:
        array = given.own(some)
        return array if len(block.groups) <= MANY else given.backend.barrier(array)

    return [own(*pair) for pair in zip(layout.blocks, factors, strict=True)]


def operand(given: Opened, layout: Layout, factors: list[Any], leaf: int, block: int, row: int) -> Any:
    """Return a leaf's factor, with its dimensions and in a sufficient precision."""
    array, axes, part = given.arrays[leaf], layout.axes_of(leaf), given.part(leaf)
    factor = factors[block][row, ...]
    return spread(given.backend, factor if part is None else part.own(factor, axes), array, axes)


def reduced(given: Opened, layout: Layout, factors: list[Any], *, skip: bool) -> Tree:
    """Return the sum of the gradients, each multiplied by its factor, along their first axis."""
    backend, new, own = given.backend, list(given.tree.leaves), own_factors(given, layout, factors)
    xp = backend.xp
    _refuse_reduced(given, layout)
    for number, block in enumerate(layout.blocks):
        for row, group in enumerate(block.groups):
            for leaf in layout.groups[group]:
                original, array = given.tree.leaves[leaf], given.arrays[leaf]
                by = operand(given, layout, own, leaf, number, row)
                total = backend.sum(_times(backend, skip, given.clean, upcast(xp, array), by), (0,))
                whole = xp.isdtype(original.dtype, "integral")
                total = cast(xp, total, array.dtype if whole else original.dtype)
                part = given.part(leaf)
                new[leaf] = total if part is None else part.summed(original, total)
    return given.tree.with_leaves(new)


def _refuse_reduced(given: Opened, layout: Layout) -> None:
    """Refuse norms over all examples, and leaves with different numbers of examples."""
    shapes = [tuple(leaf.shape) for leaf in given.tree.leaves]
    for number, shape in enumerate(shapes):
        axes = layout.axes_of(number)
        if shape and (axes is None or 0 in axes):
            msg = (
                "rule must keep the examples apart, as uc.by_example_norm(1.0) does: its scope, "
                f"{short(layout.scope)}, takes one norm over all of them"
            )
            raise ValueError(msg)
        first = shapes[0]
        if not (first and shape) or (first[0] != shape[0] and None not in {first[0], shape[0]}):
            places = " and ".join(given.tree.place(one) for one in (0, number))
            msg = f"leaves need as many examples along the first axis, but {places} have the shapes {[first, shape]}"
            raise ValueError(msg)


def _times(backend: Backend, skip: bool, clean: bool, array: Any, factor: Any) -> Any:  # noqa: FBT001
    """Return ``array · factor``; where the factor of a skipped step is 0, return 0 even for NaN and ∞."""
    xp = backend.xp
    wide = upcast(xp, finite_or_zero(xp, array) if clean else array)
    if skip:
        wide = xp.where(xp.equal(factor, 0.0), 0.0, wide)
    product = wide * factor
    if xp.isdtype(wide.dtype, "complex floating"):  # a complex 1 changes the sign of a zero
        product = xp.where(xp.equal(factor, 1.0), wide, product)
    return cast(xp, product, array.dtype)
