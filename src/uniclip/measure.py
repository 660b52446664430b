# SPDX-License-Identifier: MIT
"""Measure the norm of each group of gradients: accurate, and safe from overflow and underflow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from uniclip.backends.base import row_slices
from uniclip.backends.scalars import SCALARS, Scalar
from uniclip.gradients import Gradients, Group, Leaf, all_of, cast, finite_or_zero, spread
from uniclip.norms import Linf, Norm

if TYPE_CHECKING:
    from uniclip.backends import Backend

AllReduce: TypeAlias = Callable[[Any, Literal["sum", "max"]], Any]


def measure(grads: Gradients, norm: Norm, all_reduce: AllReduce | None = None) -> list[Any]:
    """Return the norm of each group, in float32 or wider; as a scalar where reading it costs nothing.

    ``Σx²`` is summed first as it is; only where it leaves the range in which that is accurate (it
    overflows, or small squares underflow) is it summed again in units of (nearly) the
    largest modulus: one more reading of the gradients, and only when needed. For a power p other than
    2 the units come first: the rounding of 1/p would cost precision when the sum is far from 1.
    """
    ruler, groups = _Ruler(grads, norm, all_reduce), grads.groups.values()
    if norm.p == 2 and not grads.backend.watched():  # noqa: PLR2004
        norms = _euclidean(ruler, groups)
    elif norm.has_powers:
        norms = [ruler.in_units(group) for group in groups]
    else:
        norms = [ruler.total(group) for group in groups]
    if norm.size_power:
        norms = grads.as_arrays(norms)
        norms = [n / size**norm.size_power for n, size in zip(norms, sizes_of(grads, all_reduce), strict=True)]
    return norms


def sizes_of(grads: Gradients, all_reduce: AllReduce | None = None) -> list[Any]:
    """Return the number of entries that each norm covers, at least 1, in the dtype of the norm."""
    ruler = _Ruler(grads, Linf, all_reduce)
    return [ruler.size(group, grads.norm_dtype(group)) for group in grads.groups.values()]


def zeros(grads: Gradients) -> list[Any]:
    """Return a zero for each norm that `measure` would return, of its shape and dtype."""
    return [_zero(grads, group) for group in grads.groups.values()]


def _zero(grads: Gradients, group: Group) -> Any:
    backend, dtype = grads.backend, grads.norm_dtype(group)
    if not group:
        return backend.xp.zeros((), dtype=dtype)
    first = grads.members(group[:1])[0]
    if grads.scope.axes is not None:
        return backend.zeros(first.array, first.axes or (), dtype)
    return backend.to_device_of(first.array, backend.xp.zeros((), dtype=dtype))


class _Ruler(NamedTuple):
    """How the norm of a group is measured."""

    grads: Gradients
    norm: Norm
    all_reduce: AllReduce | None

    @property
    def backend(self) -> Backend:
        return self.grads.backend

    def total(self, group: Group) -> Any:
        """Return Σ|x|ᵖ over the group, the largest modulus for p = ∞."""
        arrays = self.grads.plain_arrays(group) if self.norm.p == 2 else None  # noqa: PLR2004
        total = None if arrays is None else self.backend.squares(arrays)
        if total is not None and self.all_reduce is not None:  # all devices join one dtype, whatever their way was
            (total,) = self.grads.as_arrays([total])
            return self.all_reduce(cast(self.backend.xp, total, self.grads.norm_dtype(group)), "sum")
        if total is not None:
            return total
        leaves = self.grads.members(group)
        return self.join(leaves, self.norm.op, self.part_of(leaves, self.norm))

    def in_units(self, group: Group) -> Any:
        """Return the norm, measured in units of the largest modulus (nearly)."""
        xp, leaves = self.backend.xp, self.grads.gathered(group)
        top = self.join(leaves, "max", self.part_of(leaves, Linf))
        # The unit stays where its reciprocal is a normal number too; that of zeros is 1, or their second
        # derivative would overflow.
        normal = (1.2e-38, 8e37) if top.dtype == xp.float32 else (2.3e-308, 4e307)
        low, high = (xp.asarray(bound, dtype=top.dtype) for bound in normal)
        unit = self.backend.once(_rounded_down(xp, xp.where(top > 0, xp.clip(top, low, high), xp.ones_like(top))))
        scale = 1 / unit
        totals = self.join(leaves, "sum", self.part_of(leaves, self.norm, scale))
        return unit * self.norm.root(xp, totals)

    def part_of(self, leaves: list[Leaf], norm: Norm, scale: Any = None) -> Callable[[Leaf], Any]:
        """Return the function that gives a leaf's part, in one precision for all: what one holds the others do."""
        xp, dtypes = self.backend.xp, {leaf.array.dtype for leaf in leaves}
        dtype = reduce(xp.result_type, dtypes, xp.float32) if len(dtypes) > 1 else xp.float32

        def part(leaf: Leaf) -> Any:
            factor = None if scale is None else spread(self.backend, scale, leaf, dtype)
            own, factor, whole = self.backend.own_part(leaf.array, factor, leaf.axes, norm.op)
            return whole(self.part(leaf._replace(array=own), norm, dtype, factor))

        return part

    def part(self, leaf: Leaf, norm: Norm, dtype: Any, scale: Any) -> Any:
        """Return a leaf's Σ|x·scale|ᵖ (the largest modulus for p = ∞) in ``dtype`` or wider, piece by piece."""
        backend, xp, axes = self.backend, self.backend.xp, leaf.axes

        def total(piece: Any, scale: Any) -> Any:
            cleaned = finite_or_zero(xp, piece) if self.grads.clean else piece
            wide = cast(xp, cleaned, xp.result_type(piece.dtype, dtype))
            return norm.total(backend, wide if scale is None else wide * cast(xp, scale, wide.dtype), axes)

        if not backend.large(leaf.array):
            return total(leaf.array, scale)
        if axes is None:
            return self.reduce([total(piece, scale) for piece in backend.pieces(leaf.array)], norm.op)
        rows = row_slices(leaf.array.shape)
        if 0 in axes:
            return self.reduce([total(leaf.array[some], scale) for some in rows], norm.op)
        return xp.concat([total(leaf.array[some], scale if scale is None else scale[some]) for some in rows], axis=0)

    def size(self, group: Group, dtype: Any) -> Any:
        """Return the number of entries that each norm of the group covers, 1 if there is none."""
        xp, leaves = self.backend.xp, self.grads.members(group)
        size = self.join(leaves, "sum", lambda leaf: xp.asarray(self.backend.size(leaf.given, leaf.axes), dtype=dtype))
        return xp.where(size > 0, size, xp.ones_like(size))

    def join(self, leaves: list[Leaf], op: Literal["sum", "max"], part: Callable[[Leaf], Any]) -> Any:
        """Join the parts of a group's leaves, and those of other devices."""
        parts = [part(leaf) for leaf in leaves] or [self.backend.xp.asarray(0.0, dtype=self.backend.xp.float32)]
        for leaf, one in zip(leaves, parts, strict=False):
            if not same_shape(parts[0].shape, one.shape):
                place = self.grads.tree.place
                msg = (
                    "leaves that share norms need equal shapes outside the axes a norm covers, but "
                    f"{place(leaves[0].number)} of shape {tuple(leaves[0].array.shape)} has norms of shape "
                    f"{tuple(parts[0].shape)}, {place(leaf.number)} of shape {tuple(leaf.array.shape)} has "
                    f"{tuple(one.shape)}"
                )
                raise ValueError(msg)
        joined = self.reduce(self.backend.joined(parts, op), op)
        if self.all_reduce is None:
            return joined
        return self.all_reduce(joined, op) if op == "sum" else _largest_of_all(self.backend.xp, joined, self.all_reduce)

    def reduce(self, parts: list[Any], op: Literal["sum", "max"]) -> Any:
        """Return the sum or the maximum of parts of one shape, in the widest of their dtypes."""
        if len(parts) == 1:
            return parts[0]
        xp = self.backend.xp
        dtype = xp.result_type(*(one.dtype for one in parts))
        stacked = xp.stack([cast(xp, self.backend.to_device_of(parts[0], one), dtype) for one in parts])
        return self.backend.sum(stacked, (0,)) if op == "sum" else xp.max(stacked, axis=0)


def _largest_of_all(xp: Any, value: Any, all_reduce: AllReduce) -> Any:
    """Return the largest of all processes' values, NaN where one of them is: the maximum of many libraries drops it."""
    isnan, zero = xp.isnan(value), xp.zeros_like(value)
    pair = all_reduce(xp.stack([xp.where(isnan, zero, value), xp.where(isnan, xp.ones_like(value), zero)]), "max")
    value, isnan, zero = pair[0, ...], pair[1, ...] > 0, xp.zeros_like(pair[0, ...])
    # 0/0 there, and no constant NaN, which a debugger would take for a result.
    return xp.where(isnan, zero, value) / xp.where(isnan, zero, xp.ones_like(value))


def _rounded_down(xp: Any, array: Any) -> Any:
    """Return positive numbers rounded down to 20 bits: integers in between, they have no derivatives.

    The norm does not depend on the unit it is measured in, so its derivative must not either.
    """

    def whole(x: Any) -> Any:
        return xp.astype(xp.astype(xp.floor(x), xp.int32), array.dtype)

    power = 2 ** whole(xp.log2(array))
    return power * (whole(array / power * 2**20) / 2**20)


def _euclidean(ruler: _Ruler, groups: Collection[Group]) -> list[Any]:
    """Return the Euclidean norms, by plain sums of squares where these are accurate."""
    backend = ruler.backend
    totals = [ruler.total(group) for group in groups]
    numbers = [total if isinstance(total, Scalar) else backend.number(total) for total in totals]
    if all([number is not None for number in numbers]):  # a scalar is not compared with None quickly
        return [
            SCALARS.xp.sqrt(number) if _in_range(number, SCALARS.xp.float32) else ruler.in_units(group)
            for number, group in zip(numbers, groups, strict=True)
        ]
    xp, totals = backend.xp, ruler.grads.as_arrays(totals)  # some can be read, and some not
    dtypes = [ruler.grads.norm_dtype(group) for group in groups]
    usual: Sequence[Callable[[], Any]] = [
        partial(_rooted, xp, ruler.norm, total, dtype) for total, dtype in zip(totals, dtypes, strict=True)
    ]
    if ruler.all_reduce is None and all(n.dtype != dtype for n, dtype in zip(totals, dtypes, strict=True)):
        return [u() for u in usual]  # wide totals, which no square can leave the range of
    rare: Sequence[Callable[[], Any]] = [partial(ruler.in_units, group) for group in groups]
    accurate = [xp.all(_in_range(total, xp.float32)) for total in totals]
    if all(backend.readable(one) for one in accurate):
        return [(u if bool(one) else r)() for one, u, r in zip(accurate, usual, rare, strict=True)]
    # One conditional for the whole tree: one per group costs compiled code its speed.
    return backend.cond(all_of(backend, accurate), lambda: [u() for u in usual], lambda: [r() for r in rare])


def _rooted(xp: Any, norm: Norm, total: Any, dtype: Any) -> Any:
    return cast(xp, norm.root(xp, total), dtype)


def _in_range(total: Any, float32: Any) -> Any:
    """Whether neither overflow nor underflow can have touched a sum of squares (NaN: it may have)."""
    single = total.dtype == float32
    smallest = 1e-24 if single else 4.5e-277  # smallest normal number / eps²
    return (total > smallest) & (total <= (3.4028234663852886e38 if single else 1.7976931348623157e308))


def same_shape(shape: Any, other: Any) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return _unknown(shape, other) or (len(shape) == len(other) and broadcasts(shape, other, one=False))


def broadcasts(shape: Any, to: Any, *, one: bool = True) -> bool:
    """Whether an array of ``shape`` fits one of shape ``to``, as far as they are known."""
    if _unknown(shape, to):
        return True
    pairs = zip(reversed(tuple(shape)), reversed(tuple(to)), strict=False)
    return len(shape) <= len(to) and all(m == n or None in (m, n) or (one and m == 1) for m, n in pairs)


def _unknown(*shapes: Any) -> bool:
    return None in {getattr(shape, "rank", 0) for shape in shapes}
