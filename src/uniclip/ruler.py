# SPDX-License-Identifier: MIT
"""Measure the leaves of a tree: sums of powers or largest moduli, by the blocks of its layout, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from uniclip.backends import DEFAULT
from uniclip.backends.arrays import cast, finite_or_zero, spread, stacked
from uniclip.backends.base import row_slices
from uniclip.backends.processes import Op
from uniclip.layout import Block, Layout, Opened
from uniclip.norms import Norm
from uniclip.processes import Joint, Share

if TYPE_CHECKING:
    from uniclip.backends import Backend

Rows: TypeAlias = Sequence[int] | None
"""The numbers of some rows of a block, ``None`` for all rows."""

_SMALL = 2**12
"""The largest number of entries of arrays that compiled code joins."""
MANY = 32
"""The number of leaves of a norm, or norms of a block, above which compiled code is kept small. Below it, that costs
more than it saves, since XLA, for one, works on large buffers in threads."""


def zeros(given: Opened, layout: Layout) -> list[Any]:
    """Return zeros like the norms that `measure` would return, in the framework of the gradients."""
    backend, xp = given.backend, given.backend.xp

    def row(block: Block, group: int) -> Any:
        numbers = layout.groups[group]
        if not (block.kept and numbers):
            return _at_home(given, xp.zeros((), dtype=block.dtype))
        array, part, axes = given.arrays[numbers[0]], given.part(numbers[0]), layout.axes_of(numbers[0]) or ()
        if part is None and not backend.processes.unsharded(array):  # they are sharded as it is
            return xp.sum(xp.zeros_like(array, dtype=block.dtype), axis=axes)
        kept = tuple(n for axis, n in enumerate(given.shape(numbers[0])) if axis not in axes)
        return backend.to_device_of(array, xp.zeros(kept, dtype=block.dtype))

    return [stacked(backend, [row(block, group) for group in block.groups]) for block in layout.blocks]


def _at_home(given: Opened, array: Any) -> Any:
    """Return an array on the device of the gradients."""
    return array if given.first is None else given.backend.to_device_of(given.first, array)


class Ruler(NamedTuple):
    """How the norms of a tree are measured."""

    given: Opened
    layout: Layout
    norm: Norm
    joint: Joint | None = None
    """How they are reduced over processes; ``None`` in a single process."""

    @property
    def backend(self) -> Backend:
        """The backend of the gradients."""
        return self.given.backend

    def shares(self, block: Block, how: Callable[[Ruler, Block, Rows], Any], op: Op) -> list[Share]:
        """Return this process's shares of a block, one for all leaves that are reduced in the same way.

        ``how(ruler, block, rows)`` measures some of the rows of a block.
        """
        kinds = self._kinds(block, op)
        if not kinds:
            return [Share(how(self, block, None))]
        found = []
        for (_, part, held), rows in kinds.items():
            whole = len(kinds) == 1 and len(rows) == len(block.groups)
            groups = tuple(map(tuple, rows.values()))
            some = block._replace(groups=tuple(range(len(groups))))
            array = how(self._replace(layout=self.layout._replace(groups=groups)), some, list(rows))
            if part is not None:
                axes = self.layout.axes_of(groups[0][0])
                array = part.embedded(np if isinstance(array, np.ndarray) else self.backend.xp, array, axes)
            array = array if held == 1 else array / held
            found.append(Share(array, None if whole else list(rows), self.given.part(groups[0][0])))
        absent = [row for row, group in enumerate(block.groups) if not self.layout.groups[group]]
        return [*found, Share(self._zeros(found[0].array, len(absent)), absent)] if absent else found

    def _zeros(self, like: Any, rows: int) -> Any:
        """Return zeros for a number of rows."""
        xp = np if isinstance(like, np.ndarray) else self.backend.xp
        zero = xp.zeros_like(like[:1])
        return xp.concat([zero] * rows, axis=0)

    def _copies(self, block: Block) -> Sequence[int] | None:
        """Return how many processes hold each leaf; norms with axes of different leaves are not reduced together."""
        joint = self.joint
        return None if joint is None or (block.kept and joint.rows is not None) else joint.copies

    def _kinds(self, block: Block, op: Op) -> dict[Any, dict[int, list[int]]]:
        """Return the leaves of each row by how they are reduced; nothing if all are local, and alike."""
        given, copies = self.given, self._copies(block)
        kinds: dict[Any, dict[int, list[int]]] = {}
        if given.parts is None and copies is None:
            return kinds
        for row, group in enumerate(block.groups):
            for number in self.layout.groups[group]:
                part = given.part(number)
                held = (1 if copies is None else copies[number]) * (1 if part is None else part.copies)
                kind = None if part is None else part.owner, part if block.kept else None, held if op == "sum" else 1
                kinds.setdefault(kind, {}).setdefault(row, []).append(number)
        return kinds

    def squares(self, block: Block, along: dict[int, Any]) -> Any:
        """Return Σ|x|² by row, by the backend's fast path if it has one."""
        given, groups = self.given, [self.layout.groups[group] for group in block.groups]
        if block.kept and along:
            known = self._with_empty([number for group in groups for number in group], along)
            if any([one is None for one in known]):  # sums reduced in two ways may differ in dtype and range
                return self.totals(block)
            return stacked(self.backend, known) if len(known) == len(groups) else self.totals(block, along=along)
        if given.ways is not None or given.clean or block.kept or not all(groups):
            return self.totals(block)
        arrays = [given.arrays[number] for group in groups for number in group]
        found = self.backend.squares(arrays, list(map(len, groups)))
        return self.totals(block) if found is None else found

    def _with_empty(self, numbers: Sequence[int], along: dict[int, Any]) -> list[Any]:
        """Return known values of leaves, with 0 for leaves without entries, on which no other sums depend."""
        if not any([0 in self.given.arrays[number].shape for number in numbers]):
            return list(map(along.get, numbers))
        like = next((along[number] for number in numbers if along.get(number) is not None), None)
        zeros = None if like is None else (np if isinstance(like, np.ndarray) else self.backend.xp).zeros_like(like)
        return [zeros if 0 in self.given.arrays[number].shape else along.get(number) for number in numbers]

    def totals(
        self, block: Block, norm: Norm | None = None, units: Any = None, *, gather: bool = False, along: Any = None
    ) -> Any:
        """Return Σ|x/unit|ᵖ by row, the largest modulus for p = ∞.

        In compiled code, and on request, small arrays are joined. ``along`` holds values of leaves known already.
        """
        norm, groups = norm or self.norm, [self.layout.groups[group] for group in block.groups]
        gather = gather or self.backend.traced(self.given.first)
        along = along or self._in_units(block, norm, units) or (self._alike(block, norm, units) if gather else {})
        gathered = [self._gathered(group) if gather else list(group) for group in groups]

        def part(row: int, number: Any) -> Any:
            whole = not isinstance(number, int)  # several small arrays as one
            if not whole and along.get(number) is not None:
                return along[number]
            array, axes = (number, None) if whole else (self.given.arrays[number], self.layout.axes_of(number))
            unit = None if units is None else self._unit(units[row, ...], None if whole else number, array, block)
            return self._part(array, axes, norm, block.dtype, unit)

        rows = []
        for row, (group, numbers) in enumerate(zip(groups, gathered, strict=True)):
            own = [part(row, number) for number in numbers]
            if not all([isinstance(one, np.ndarray) for one in own]):
                own = list(map(self.given.own, own))
            self._refuse_unequal(group, own)
            rows.append(self.reduce(own, norm.op) if own else _at_home(self.given, self._zero(block)))
        host = all([isinstance(row, np.ndarray) for row in rows])
        return stacked(self.backend, rows if host else list(map(self.given.own, rows)))

    def _unit(self, unit: Any, number: int | None, array: Any, block: Block) -> Any:
        """Return the unit of a row with the dimensions of an array."""
        part, axes = (None, None) if number is None else (self.given.part(number), self.layout.axes_of(number))
        return spread(self.backend, unit if part is None else part.own(unit, axes), array, axes, block.dtype)

    def along(self) -> dict[int, Any]:
        """Return Σ|x|² along the axes that norms cover, for the leaves that have a fast path."""
        layout, arrays = self.layout, self.given.arrays
        if layout.axes is None or self.given.clean:
            return {}
        kept = [(block.dtype, layout.groups[group]) for block in layout.blocks if block.kept for group in block.groups]
        numbers = [number for dtype, group in kept for number in group if arrays[number].dtype == dtype]
        if not numbers:
            return {}
        axes = [layout.axes[number] for number in numbers]
        return dict(zip(numbers, self.backend.squares_along([arrays[n] for n in numbers], axes), strict=True))

    def sizes(self) -> list[Share]:
        """Return the number of entries of each norm of each block; copies count once."""
        given, layout, xp = self.given, self.layout, self.backend.xp

        def of_group(group: Sequence[int], copies: Sequence[int] | None) -> Any:
            counts = [self.backend.size(given.tree.leaves[number], layout.axes_of(number)) for number in group]
            if copies is not None:
                counts = [count / copies[number] for count, number in zip(counts, group, strict=True)]
            return counts

        def of_block(block: Block) -> Any:
            copies = self._copies(block)
            groups = [of_group(layout.groups[group], copies) for group in block.groups]
            known = self.joint is None and not self.backend.traced(given.first)
            if known and all([isinstance(count, int) for counts in groups for count in counts]):
                wide = np.float32 if block.dtype == xp.float32 else np.float64
                total: Any = np.asarray(list(map(sum, groups)), wide)
            else:
                zero = [0]
                sizes = [[_at_home(given, xp.asarray(n, dtype=block.dtype)) for n in some or zero] for some in groups]
                total = stacked(self.backend, [self.reduce(some, "sum") for some in sizes])
            if not block.kept or not groups[0]:
                return total
            shape = (len(groups), *(1,) * block.kept)
            return total.reshape(shape) if isinstance(total, np.ndarray) else xp.reshape(total, shape)

        return [Share(of_block(block)) for block in layout.blocks]

    def _zero(self, block: Block) -> Any:
        return self.backend.xp.zeros((), dtype=block.dtype)

    def _gathered(self, group: Sequence[int]) -> list[Any]:
        """Return a group's leaves, with small ones concatenated, since compilers take time for each array."""
        if self.given.ways is not None or self.layout.axes is not None or len(group) <= MANY:
            return list(group)
        small: dict[Hashable, list[int]] = {}
        for number in group:
            array = self.given.arrays[number]
            small.setdefault(array.dtype if self._few(array) else number, []).append(number)
        return [self._as_one(some) if len(some) > 1 else some[0] for some in small.values()]

    def _in_units(self, block: Block, norm: Norm, units: Any) -> dict[int, Any]:
        """Return Σ|x/unit|² of the leaves, if there is a fast path."""
        given, layout = self.given, self.layout
        plain = given.ways is None and given.parts is None and not given.clean
        if units is None or norm.ord != 2 or not plain:  # noqa: PLR2004
            return {}
        pairs = [(row, number) for row, group in enumerate(block.groups) for number in layout.groups[group]]
        arrays, axes = [given.arrays[number] for _, number in pairs], [layout.axes_of(number) for _, number in pairs]
        found = self.backend.squares_in_units(arrays, axes, units, [row for row, _ in pairs])
        return {} if found is None else dict(zip([number for _, number in pairs], found, strict=True))

    def _alike(self, block: Block, norm: Norm, units: Any) -> dict[int, Any]:
        """Return Σ|x/unit|ᵖ of small leaves where there are many norms, leaves of one shape together.

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
            arrays = stacked(backend, [given.arrays[number] for _, number in some])
            along = tuple([axis + 1 for axis in (range(len(shape)) if axes is None else axes)])
            own = None if units is None else stacked(backend, [units[row, ...] for row, _ in some])
            own = own if own is None else spread(backend, own, arrays, along, block.dtype)
            total = self._part(arrays, along, norm, block.dtype, own)
            found |= {number: total[place, ...] for place, (_, number) in enumerate(some)}
        return found

    def _few(self, array: Any) -> bool:
        """Whether an array is known to be small and whole."""
        shape = array.shape
        known = getattr(shape, "rank", 0) is not None and all(isinstance(n, int) for n in shape)
        return known and math.prod(shape) <= _SMALL and self.backend.processes.unsharded(array)

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

        pieces = backend.pieces(array)
        if pieces is None:
            return total(array, unit)
        if axes is None:
            return self.reduce([total(piece, unit) for piece in pieces], norm.op)
        rows = row_slices(array.shape)
        if 0 in axes:
            return self.reduce([total(array[some], unit) for some in rows], norm.op)
        return xp.concat([total(array[some], unit if unit is None else unit[some]) for some in rows], axis=0)

    def reduce(self, parts: list[Any], op: Op) -> Any:
        """Return the sum or the maximum of parts of one shape, in the widest of their dtypes."""
        if len(parts) == 1:
            return parts[0]
        backend = DEFAULT if isinstance(parts[0], np.ndarray) else self.backend
        rows = stacked(backend, parts)
        return backend.sum(rows, (0,)) if op == "sum" else backend.xp.max(rows, axis=0)

    def _refuse_unequal(self, group: Sequence[int], parts: list[Any]) -> None:
        """Refuse a group whose leaves have norms of different shapes."""
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


def same_shape(shape: Any, other: Any) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return _unknown(shape, other) or (len(shape) == len(other) and broadcasts(shape, other, one=False))


def broadcasts(shape: Any, to: Any, *, one: bool = True) -> bool:
    """Whether an array of ``shape`` broadcasts to shape ``to``, as far as they are known."""
    if _unknown(shape, to):
        return True
    pairs = zip(reversed(tuple(shape)), reversed(tuple(to)), strict=False)
    return len(shape) <= len(to) and all(m == n or None in (m, n) or (one and m == 1) for m, n in pairs)


def _unknown(*shapes: Any) -> bool:
    return None in {getattr(shape, "rank", 0) for shape in shapes}
