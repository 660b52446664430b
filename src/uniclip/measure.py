# SPDX-License-Identifier: MIT
"""Measure the norms of a layout: accurate, and safe from overflow and underflow.

Norms come as one array for each block of the layout: of NumPy where the host can read them at no cost, else of the
gradients' own framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from uniclip.backends import DEFAULT
from uniclip.backends.base import cast, finite_or_zero, row_slices, spread
from uniclip.layout import Block, Layout, Opened
from uniclip.norms import Linf, Norm

if TYPE_CHECKING:
    from uniclip.backends import Backend

Op: TypeAlias = Literal["sum", "max"]
AllReduce: TypeAlias = Callable[[Any, Op], Any]
Blocks: TypeAlias = list[Any]
"""An array for each block, of shape ``(k, *kept)``: a row for each group."""

_SMALL = 2**12
"""Up to how many entries arrays are joined in compiled code."""
MANY = 32
"""Above how many leaves of a norm, or norms of a block, compiled code is kept small. Below, that takes longer than it
saves: XLA, for one, works on large buffers in threads."""
_SINGLE, _DOUBLE = (1e-24, 3.4028234663852886e38), (4.5e-277, 1.7976931348623157e308)
"""Between smallest normal number / eps² and the largest number no sum of squares has lost anything."""


def measure(given: Opened, layout: Layout, norm: Norm, all_reduce: AllReduce | None = None) -> Blocks:
    """Return the norms, in float32 or wider.

    ``Σx²`` is summed first as it is; only where it leaves the range in which that is accurate (it
    overflows, or small squares underflow) is it summed again in units of (nearly) the
    largest modulus: one more reading of the gradients, and only when needed. For a power p other than
    2 the units come first: the rounding of 1/p would cost precision when the sum is far from 1.
    """
    ruler = _Ruler(given, layout, norm, all_reduce)
    if norm.ord == 2 and not given.backend.watched():  # noqa: PLR2004
        norms = _euclidean(ruler)
    else:
        way = ruler.in_units if norm.has_powers else ruler.totals
        norms = [way(block) for block in layout.blocks]
    norms = given.backend.together(norms)
    if norm.size_power:
        sizes = given.backend.together([*norms, *sizes_of(given, layout, all_reduce)])
        norms = [n / s**norm.size_power for n, s in zip(sizes[: len(norms)], sizes[len(norms) :], strict=True)]
    return norms


def sizes_of(given: Opened, layout: Layout, all_reduce: AllReduce | None = None) -> Blocks:
    """Return the number of entries that each norm covers, at least 1, in the dtype of the norm."""
    ruler = _Ruler(given, layout, Linf, all_reduce)
    return [ruler.sizes(block) for block in layout.blocks]


def zeros(given: Opened, layout: Layout) -> Blocks:
    """Return zeros like the norms that `measure` would return, in the framework of the gradients."""
    backend = given.backend

    def row(block: Block, group: int) -> Any:
        numbers = layout.groups[group]
        if block.kept and numbers:
            return backend.zeros(given.arrays[numbers[0]], layout.axes_of(numbers[0]) or (), block.dtype)
        return _at_home(given, backend.xp.zeros((), dtype=block.dtype))

    return [backend.stacked([row(block, group) for group in block.groups]) for block in layout.blocks]


def _at_home(given: Opened, array: Any) -> Any:
    """Return an array on the device of the gradients."""
    return array if given.first is None else given.backend.to_device_of(given.first, array)


class _Ruler(NamedTuple):
    """How the norms of a block are measured."""

    given: Opened
    layout: Layout
    norm: Norm
    all_reduce: AllReduce | None

    @property
    def backend(self) -> Backend:
        return self.given.backend

    def squares(self, block: Block, along: dict[int, Any]) -> Any:
        """Return Σ|x|² by row, by the backend's fast path if it has one."""
        given, groups = self.given, [self.layout.groups[group] for group in block.groups]
        if block.kept and along:
            known = [along.get(number) for group in groups for number in group]
            if any([one is None for one in known]):  # sums of two ways may be of two dtypes, and of two ranges
                return self.totals(block)
            return self.backend.stacked(known) if len(known) == len(groups) else self.totals(block, along=along)
        if given.ways is not None or given.clean or block.kept or not all(groups):
            return self.totals(block)
        arrays = [given.arrays[number] for group in groups for number in group]
        found = self.backend.squares(arrays, list(map(len, groups)))
        if found is None:
            return self.totals(block)
        # All processes join one dtype, whatever their way was.
        return (
            found
            if self.all_reduce is None
            else self._shared(cast(self.backend.xp, given.own(found), block.dtype), "sum")
        )

    def totals(
        self, block: Block, norm: Norm | None = None, units: Any = None, *, gather: bool = False, along: Any = None
    ) -> Any:
        """Return Σ|x/unit|ᵖ by row, the largest modulus for p = ∞.

        In compiled code, and where told to, small arrays are gathered. ``along`` holds what is known of leaves already.
        """
        norm, groups = norm or self.norm, [self.layout.groups[group] for group in block.groups]
        gather = gather or self.backend.traced(self.given.first)
        along = along or (self._alike(block, norm, units) if gather else {})
        gathered = [self._gathered(group) if gather else list(group) for group in groups]

        def part(row: int, number: Any) -> Any:
            whole = not isinstance(number, int)  # several small arrays as one
            if not whole and along.get(number) is not None:
                return along[number]
            array, axes = (number, None) if whole else (self.given.arrays[number], self.layout.axes_of(number))
            unit = None if units is None else spread(self.backend, units[row, ...], array, axes, block.dtype)
            own, unit, whole_of = self.backend.own_part(array, unit, axes, norm.op)
            return whole_of(self._part(own, axes, norm, block.dtype, unit))

        parts = [part(row, number) for row, numbers in enumerate(gathered) for number in numbers]
        if not all([isinstance(part, np.ndarray) for part in parts]):
            parts = list(map(self.given.own, parts))
        joined, rows = iter(self.backend.joined(parts, norm.op)), []
        for group, numbers in zip(groups, gathered, strict=True):
            own = [next(joined) for _ in numbers]
            self._refuse_unequal(group, own)
            rows.append(self.reduce(own, norm.op) if own else _at_home(self.given, self._zero(block)))
        return self._shared(self.backend.stacked(rows), norm.op)

    def along(self) -> dict[int, Any]:
        """Return Σ|x|² along the axes that norms cover, of those leaves for which there is a fast path."""
        layout, arrays = self.layout, self.given.arrays
        if layout.axes is None or self.given.clean or self.all_reduce is not None:
            return {}
        kept = [(block.dtype, layout.groups[group]) for block in layout.blocks if block.kept for group in block.groups]
        numbers = [number for dtype, group in kept for number in group if arrays[number].dtype == dtype]
        if not numbers:
            return {}
        axes = [layout.axes[number] for number in numbers]
        return dict(zip(numbers, self.backend.squares_along([arrays[n] for n in numbers], axes), strict=True))

    def in_units(self, block: Block) -> Any:
        """Return the norms, measured in units of the largest modulus (nearly)."""
        xp = self.backend.xp
        top = self.totals(block, Linf, gather=True)
        # The unit stays where its reciprocal is a normal number too; that of zeros is 1, or their second
        # derivative would overflow.
        normal = (1.2e-38, 8e37) if top.dtype == xp.float32 else (2.3e-308, 4e307)
        low, high = (xp.asarray(bound, dtype=top.dtype) for bound in normal)
        unit = self.backend.once(_rounded_down(xp, xp.where(top > 0, xp.clip(top, low, high), 1.0)))
        return unit * self.norm.root(xp, self.totals(block, units=unit, gather=True))

    def sizes(self, block: Block) -> Any:
        """Return the number of entries that each norm covers, 1 if there is none."""
        xp, layout, given = self.backend.xp, self.layout, self.given

        def size(number: int) -> Any:
            count = self.backend.size(given.tree.leaves[number], layout.axes_of(number))
            return _at_home(given, xp.asarray(count, dtype=block.dtype))

        groups = [[size(number) for number in layout.groups[group]] for group in block.groups]
        rows = [self.reduce(group, "sum") if group else _at_home(given, self._zero(block)) for group in groups]
        total = self._shared(self.backend.stacked(rows), "sum")
        total = xp.where(total > 0, total, 1.0)
        if not block.kept or not groups[0]:
            return total
        number = layout.groups[block.groups[0]][0]
        kept = len(given.arrays[number].shape) - len(layout.axes_of(number) or ())
        return xp.reshape(total, (len(groups), *(1,) * kept))

    def _zero(self, block: Block) -> Any:
        return self.backend.xp.zeros((), dtype=block.dtype)

    def _gathered(self, group: Sequence[int]) -> list[Any]:
        """Return a group's leaves, small ones joined into one array: compilers take time for each."""
        if self.given.ways is not None or self.layout.axes is not None or len(group) <= MANY:
            return list(group)
        small: dict[Hashable, list[int]] = {}
        for number in group:
            array = self.given.arrays[number]
            small.setdefault(array.dtype if self._few(array) else number, []).append(number)
        return [self._as_one(some) if len(some) > 1 else some[0] for some in small.values()]

    def _alike(self, block: Block, norm: Norm, units: Any) -> dict[int, Any]:
        """Return Σ|x/unit|ᵖ of small leaves where there are many norms, those of one shape together.

        Compilers take time for each.
        """
        given, layout, backend = self.given, self.layout, self.backend
        if given.ways is not None or len(block.groups) <= MANY:
            return {}
        shapes: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for row, group in enumerate(block.groups):
            for number in layout.groups[group] if len(layout.groups[group]) <= MANY else ():
                array, axes = given.arrays[number], layout.axes_of(number)
                if self._few(array) and len(array.shape) and axes != ():
                    shapes.setdefault((array.dtype, tuple(array.shape), axes), []).append((row, number))
        found: dict[int, Any] = {}
        for (_, shape, axes), some in shapes.items():
            arrays = backend.stacked([given.arrays[number] for _, number in some])
            along = tuple([axis + 1 for axis in (range(len(shape)) if axes is None else axes)])
            own = None if units is None else backend.stacked([units[row, ...] for row, _ in some])
            own = own if own is None else spread(backend, own, arrays, along, block.dtype)
            total = self._part(arrays, along, norm, block.dtype, own)
            found |= {number: total[place, ...] for place, (_, number) in enumerate(some)}
        return found

    def _few(self, array: Any) -> bool:
        """Whether an array is known to be small and whole."""
        shape = array.shape
        known = getattr(shape, "rank", 0) is not None and all(isinstance(n, int) for n in shape)
        return known and math.prod(shape) <= _SMALL and self.backend.undivided(array)

    def _as_one(self, numbers: list[int]) -> Any:
        arrays, backend = [self.given.arrays[number] for number in numbers], self.backend
        flat = [backend.xp.reshape(backend.to_device_of(arrays[0], array), (-1,)) for array in arrays]
        return backend.xp.concat(flat, axis=0)

    def _part(self, array: Any, axes: tuple[int, ...] | None, norm: Norm, dtype: Any, unit: Any) -> Any:
        """Return Σ|x/unit|ᵖ of an array (the largest modulus for p = ∞) in ``dtype`` or wider, piece by piece."""
        backend, xp = self.backend, self.backend.xp

        def total(piece: Any, unit: Any) -> Any:
            cleaned = finite_or_zero(xp, piece) if self.given.clean else piece
            wide = cast(xp, cleaned, xp.result_type(piece.dtype, dtype))
            return norm.total(backend, wide if unit is None else wide / cast(xp, unit, wide.dtype), axes)

        if not backend.large(array):
            return total(array, unit)
        if axes is None:
            return self.reduce([total(piece, unit) for piece in backend.pieces(array)], norm.op)
        rows = row_slices(array.shape)
        if 0 in axes:
            return self.reduce([total(array[some], unit) for some in rows], norm.op)
        return xp.concat([total(array[some], unit if unit is None else unit[some]) for some in rows], axis=0)

    def reduce(self, parts: list[Any], op: Op) -> Any:
        """Return the sum or the maximum of parts of one shape, in the widest of their dtypes."""
        if len(parts) == 1:
            return parts[0]
        backend = DEFAULT if isinstance(parts[0], np.ndarray) else self.backend
        stacked = backend.stacked(parts)
        return backend.sum(stacked, (0,)) if op == "sum" else backend.xp.max(stacked, axis=0)

    def _shared(self, total: Any, op: Op) -> Any:
        """Return totals joined with those of other processes."""
        if self.all_reduce is None:
            return total
        if op == "sum":
            return self.all_reduce(total, op)
        return _largest_of_all(self.backend.xp, total, self.all_reduce)

    def _refuse_unequal(self, group: Sequence[int], parts: list[Any]) -> None:
        """Refuse leaves of one group whose norms are of different shapes."""
        for number, one in zip(group, parts, strict=False):
            if not same_shape(parts[0].shape, one.shape):
                place, arrays = self.given.tree.place, self.given.arrays
                msg = (
                    "leaves that share norms need equal shapes outside the axes a norm covers, but "
                    f"{place(group[0])} of shape {tuple(arrays[group[0]].shape)} has norms of shape "
                    f"{tuple(parts[0].shape)}, {place(number)} of shape {tuple(arrays[number].shape)} has "
                    f"{tuple(one.shape)}"
                )
                raise ValueError(msg)


def _largest_of_all(xp: Any, value: Any, all_reduce: AllReduce) -> Any:
    """Return the largest of all processes' values, NaN where one of them is: the maximum of many libraries drops it."""
    isnan = xp.isnan(value)
    pair = all_reduce(xp.stack([xp.where(isnan, 0.0, value), xp.astype(isnan, value.dtype)]), "max")
    value, isnan = pair[0, ...], pair[1, ...] > 0
    # 0/0 there, and no constant NaN, which a debugger would take for a result.
    return xp.where(isnan, 0.0, value) / xp.astype(xp.logical_not(isnan), value.dtype)


def _rounded_down(xp: Any, array: Any) -> Any:
    """Return positive numbers rounded down to 20 bits: integers in between, they have no derivatives.

    The norm does not depend on the unit it is measured in, so its derivative must not either.
    """

    def whole(x: Any) -> Any:
        return xp.astype(xp.astype(xp.floor(x), xp.int32), array.dtype)

    power = 2 ** whole(xp.log2(array))
    # A compiler that divides the power first would leave the range; with the 1 it cannot.
    return power * (1 + whole((array / power - 1) * 2**20) / 2**20)


def _euclidean(ruler: _Ruler) -> Blocks:
    """Return the Euclidean norms, by plain sums of squares where these are accurate."""
    backend, layout, given = ruler.backend, ruler.layout, ruler.given
    along = ruler.along()
    totals = backend.together([ruler.squares(block, along) for block in layout.blocks])
    if all(isinstance(total, np.ndarray) for total in totals):
        norms = [_on_host(ruler, *pair) for pair in zip(layout.blocks, totals, strict=True)]
        if all(n is not None for n in norms):
            return norms
    xp, totals = backend.xp, list(map(given.own, totals))
    dtypes = [block.dtype for block in layout.blocks]

    def usual() -> Blocks:
        # The wide ones of a fast path have no derivative where there are values.
        plain = [
            total.dtype != dtype and not backend.traced(total) for total, dtype in zip(totals, dtypes, strict=True)
        ]
        roots = [xp.sqrt(t) if short else ruler.norm.root(xp, t) for t, short in zip(totals, plain, strict=True)]
        return [cast(xp, root, dtype) for root, dtype in zip(roots, dtypes, strict=True)]

    if ruler.all_reduce is None and all(total.dtype != dtype for total, dtype in zip(totals, dtypes, strict=True)):
        return usual()  # wide totals, which no square can leave the range of
    accurate = backend.all_of([xp.all(in_range(total, total.dtype == xp.float32)) for total in totals])

    def rare() -> Blocks:
        return [ruler.in_units(block) for block in layout.blocks]

    if backend.readable(accurate):
        return usual() if bool(accurate) else rare()
    return backend.cond(accurate, usual, rare)


def _on_host(ruler: _Ruler, block: Block, totals: Any) -> Any:
    """Return the norms of a block whose sums of squares can be read; rows out of range are measured again.

    It is ``None`` if those cannot be read.
    """
    fine = in_range(totals, totals.dtype == np.float32)
    norms = np.sqrt(totals).astype(_host_dtype(ruler, block), copy=False)
    if fine.all():
        return norms
    for row in np.flatnonzero(~fine.reshape(len(block.groups), -1).all(1)).tolist():
        again = ruler.in_units(block._replace(groups=block.groups[row : row + 1]))
        view = ruler.backend.viewed(again)
        if view is None:
            return None
        norms[row] = view[0]
    return norms


def _host_dtype(ruler: _Ruler, block: Block) -> Any:
    """Return NumPy's dtype of the norms of a block that the host can read."""
    xp = ruler.backend.xp
    return np.float32 if block.dtype == xp.float32 else np.float64 if block.dtype == xp.float64 else block.dtype


def in_range(total: Any, single: bool) -> Any:  # noqa: FBT001
    """Whether neither overflow nor underflow can have touched a sum of squares (NaN: it may have)."""
    smallest, largest = _SINGLE if single else _DOUBLE
    return (total > smallest) & (total <= largest)


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
