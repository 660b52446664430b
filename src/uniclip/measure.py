# SPDX-License-Identifier: MIT
"""Compute norms from the sums of rulers: accurate, and safe from overflow and underflow.

Norms come as one array for each block of the layout: of NumPy where the host can read them at no cost, else of the
gradients' own framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from uniclip.backends.arrays import all_of, cast, stacked, together
from uniclip.backends.processes import Op
from uniclip.layout import Block, Layout
from uniclip.norms import Linf, Norm
from uniclip.processes import Column, Joint
from uniclip.ruler import Rows, Ruler

if TYPE_CHECKING:
    from uniclip.backends import Backend

_SINGLE, _DOUBLE = (1e-24, 3.4028234663852886e38), (4.5e-277, 1.7976931348623157e308)
"""Between smallest normal number / eps² and the largest number a sum of squares is accurate."""
_SINGLE_UNITS = (2.0**80, 2.0**-120, 2.0**-60, 2.0**-100)
_DOUBLE_UNITS = (2.0**600, 2.0**-1000, 2.0**-460, 2.0**-900)
"""The unit after an overflow; a sum of squares, the unit above it and the unit below it. In these units no square
overflows or underflows; the smaller one is not used where the square of its reciprocal, a second derivative, would."""


_MANY_PROCESSES = 2.0**24
"""More processes than reduce one sum."""


class Measured(NamedTuple):
    """The measurements of a step, reduced over all processes."""

    norms: list[Column]
    """The norms of each ruler, in float32 or wider."""
    sizes: Column | None
    """The number of entries of each norm of the first ruler, at least 1, in the dtype of the norm."""
    scalars: list[Any]
    """The sums of the scalars."""


def measure(rulers: list[Ruler], *, sizes: bool = False, scalars: Sequence[Any] = ()) -> Measured:
    """Return the norms of trees, sizes and scalars, with as few reductions over processes as possible.

    ``Σx²`` is first summed as it is. Only where that is not accurate (it overflows, or small squares underflow) is it
    summed again in units of a power of two, which reads the gradients once more. For a power p other than 2 it is
    summed in units of nearly the largest modulus, since the rounding of 1/p costs precision when the sum is far from 1.
    """
    if rulers[0].joint is None and all([_of_entries(ruler.layout) for ruler in rulers]):
        rulers = [ruler._replace(norm=Norm(math.inf, ruler.norm.size_power)) for ruler in rulers]
    norm, backend = rulers[0].norm, rulers[0].backend
    some = rulers if norm.size_power else rulers[:1] if sizes else []
    counts = [[[share] for share in ruler.sizes()] for ruler in some]
    way = _by_units if norm.has_powers else _by_totals
    if norm.ord == 2 and not backend.debug_infs():  # noqa: PLR2004
        way = _by_squares
    columns, scalars = way(rulers, counts, scalars)
    norms, counted = columns[: len(rulers)], columns[len(rulers) :]
    counted = [_counted(*pair) for pair in zip(some, counted, strict=True)]
    norms = [column.filled(together(backend, column.arrays)) for column in norms]
    if norm.size_power:
        norms = [_divided(backend, *pair, norm.size_power) for pair in zip(norms, counted, strict=True)]
    return Measured(norms, counted[0] if counted else None, list(scalars))


def _of_entries(layout: Layout) -> bool:
    """Whether each norm covers a single entry, and is its modulus whatever the order."""
    single = layout.axes is not None and all([axes == () for axes in layout.axes])
    return single and all([len(group) == 1 for group in layout.groups])


def _counted(ruler: Ruler, sizes: Column) -> Column:
    """Return numbers of entries, at least 1, in the dtype of the norms."""

    def at_least_one(count: Any) -> Any:
        return (np if isinstance(count, np.ndarray) else ruler.backend.xp).where(count > 0, count, 1.0)

    return _typed(ruler, sizes).mapped(at_least_one)


def _divided(backend: Backend, norms: Column, sizes: Column, power: float) -> Column:
    """Return norms divided by a power of their sizes."""
    both = together(backend, [*norms.arrays, *[s**power for s in sizes.arrays]])
    count = len(norms.arrays)
    return norms.filled([n / s for n, s in zip(both[:count], both[count:], strict=True)])


def _rounded_down(xp: Any, array: Any) -> Any:
    """Return positive numbers rounded down to 20 bits, through integers, which have no derivatives.

    The norm does not depend on its unit, so its derivative must not either.
    """

    def whole(x: Any) -> Any:
        return xp.astype(xp.astype(xp.floor(x), xp.int32), array.dtype)

    power = 2 ** whole(xp.log2(array))
    # A compiler that divides the power first would overflow; the 1 prevents that.
    return power * (1 + whole((array / power - 1) * 2**20) / 2**20)


Answer: TypeAlias = tuple[list[Column], Sequence[Any]]
"""Columns of norms, then of sizes, and sums of scalars."""
How: TypeAlias = Callable[[int, int], Callable[[Ruler, Block, Rows], Any]]
"""A function that measures a block of a ruler, given the numbers of both."""


def _joined(rulers: list[Ruler], how: How, op: Op, counts: Any = (), scalars: Sequence[Any] = ()) -> Answer:
    """Measure all blocks of all rulers, and reduce them, sizes and scalars over the processes."""
    return _over_processes(rulers[0].joint, [*_here(rulers, how, op), *counts], op, scalars)


def _here(rulers: list[Ruler], how: How, op: Op) -> list[Any]:
    """Measure all blocks of all rulers in this process."""
    return [
        [ruler.shares(block, how(n, b), op) for b, block in enumerate(ruler.layout.blocks)]
        for n, ruler in enumerate(rulers)
    ]


def _over_processes(joint: Joint | None, columns: Any, op: Op, scalars: Sequence[Any]) -> Answer:
    if joint is None:
        return [Column([shares[0].array for shares in column]) for column in columns], scalars
    return joint.columns(columns, op, scalars)


def _by_totals(rulers: list[Ruler], counts: Any, scalars: Sequence[Any]) -> Answer:
    """Return the norms of order 1 or ∞."""

    def how(*_: int) -> Any:
        return lambda ruler, block, _: ruler.totals(block)

    if rulers[0].norm.op == "sum":
        columns, sums = _joined(rulers, how, "sum", counts, scalars)
        sizes = columns[len(rulers) :]
    else:
        columns, _ = _joined(rulers, how, "max")
        sizes, sums = _over_processes(rulers[0].joint, counts, "sum", scalars) if counts or scalars else ([], ())
    return [*map(_typed, rulers, columns), *sizes], sums


def _by_units(rulers: list[Ruler], counts: Any, scalars: Sequence[Any]) -> Answer:
    """Return the norms, measured in units of the largest modulus (nearly)."""
    backend = rulers[0].backend
    tops, _ = _joined(rulers, lambda *_: lambda ruler, block, _: ruler.totals(block, Linf, gather=True), "max")
    tops = [_typed(ruler, column.mapped(ruler.given.own)) for ruler, column in zip(rulers, tops, strict=True)]
    units = [column.mapped(lambda top: backend.barrier(_unit(backend.xp, top))) for column in tops]
    columns, sums = _joined(rulers, partial(_in_units, units), "sum", counts, scalars)
    norms = [_times_root(*some) for some in zip(rulers, units, columns, strict=False)]
    return [*norms, *columns[len(rulers) :]], sums


def _in_units(units: list[Column], number: int, place: int) -> Any:
    """Return the function that measures a block in units."""
    unit = units[number].blocks[place]

    def total(ruler: Ruler, block: Block, rows: Rows) -> Any:
        own = unit if rows is None else stacked(ruler.backend, [unit[row, ...] for row in rows])
        return ruler.totals(block, units=own, gather=True)

    return total


def _times_root(ruler: Ruler, unit: Column, column: Column) -> Column:
    """Return the norms from totals in units."""
    norm, xp = ruler.norm, ruler.backend.xp
    totals = _typed(ruler, column.mapped(ruler.given.own)).arrays
    both = zip(unit.arrays, totals, strict=True)
    return column.filled([u * norm.root(xp, ruler.backend.to_device_of(u, total)) for u, total in both])


def _rescaled(rulers: list[Ruler], totals: list[Column]) -> list[Column]:
    """Return the Euclidean norms whose sums of squares may have overflowed or underflowed.

    The sums determine the power of two in which each norm is measured again, so that the largest entry is not needed,
    which would take one more reading and one more reduction over processes.
    """
    xp = rulers[0].backend.xp
    first = [_typed(ruler, column.mapped(ruler.given.own)) for ruler, column in zip(rulers, totals, strict=True)]

    def unit(total: Any) -> Any:
        single = total.dtype == xp.float32
        (low, high), (huge, bound, small, tiny) = (_SINGLE, _SINGLE_UNITS) if single else (_DOUBLE, _DOUBLE_UNITS)
        below = xp.where(total >= bound, small, xp.asarray(tiny, dtype=total.dtype))
        return xp.where(total > high, huge, xp.where(total >= low, 1.0, below))

    units = [column.mapped(unit) for column in first]
    columns, _ = _joined(rulers, partial(_in_units, units), "sum")
    found = [_times_root(*some) for some in zip(rulers, units, columns, strict=True)]
    # Zeros have no second derivative, and in such units it would overflow.
    return [column.mapped(lambda norm: xp.where(xp.equal(norm, 0.0), 0.0, norm)) for column in found]


def _unit(xp: Any, top: Any) -> Any:
    """Return the units in which norms are measured, given the largest modulus of each."""
    # The unit stays where its reciprocal is a normal number too; that of zeros is 1, or their second
    # derivative would overflow.
    normal = (1.2e-38, 8e37) if top.dtype == xp.float32 else (2.3e-308, 4e307)
    low, high = (xp.asarray(bound, dtype=top.dtype) for bound in normal)
    return _rounded_down(xp, xp.where(top > 0, xp.clip(top, low, high), 1.0))


def _typed(ruler: Ruler, column: Column) -> Column:
    """Return norms in their dtypes, those of other processes' groups in the first of them."""
    dtypes = [block.dtype for block in ruler.layout.blocks]
    dtypes += dtypes[:1] or [ruler.backend.xp.float32]
    return column.filled([_as(ruler, array, dtype) for array, dtype in zip(column.arrays, dtypes, strict=False)])


def _as(ruler: Ruler, array: Any, dtype: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.astype(_host_dtype(ruler, dtype), copy=False)
    return cast(ruler.backend.xp, array, dtype)


def _by_squares(rulers: list[Ruler], counts: Any, scalars: Sequence[Any]) -> Answer:
    """Return the Euclidean norms, by plain sums of squares where these are accurate."""
    backend, joint = rulers[0].backend, rulers[0].joint
    along, outside = [ruler.along() for ruler in rulers], []

    def how(number: int, _: int) -> Any:
        def total(ruler: Ruler, block: Block, _: Rows) -> Any:
            found = together(backend, [ruler.squares(block, along[number])])[0]
            if joint is None:
                return found
            wide, left = _in_range_here(ruler, block, found)
            outside.extend(left)
            return wide

        return total

    columns, lost = [*_here(rulers, how, "sum"), *counts], False
    first = rulers[0].given.first
    read = first is None or backend.readable(first)
    if joint is None or not read:
        totals, sums = _over_processes(joint, columns, "sum", scalars)
    else:
        totals, (*sums, flag) = joint.columns(columns, "sum", [*scalars, np.asarray(len(outside), np.float32)])
        lost = float(flag) > 0
    sizes, totals = totals[len(rulers) :], totals[: len(rulers)]
    if lost:
        return [*_rescaled(rulers, totals), *sizes], sums
    totals = [column.filled(together(backend, column.arrays)) for column in totals]
    host = all([isinstance(total, np.ndarray) for column in totals for total in column.arrays])
    if host and (joint is None or read):
        norms = _on_host(rulers, totals)
        if norms is not None:
            return [*norms, *sizes], sums
    return [*_off_host(rulers, totals), *sizes], sums


def _in_range_here(ruler: Ruler, block: Block, totals: Any) -> tuple[Any, list[int]]:
    """Return sums of squares in the dtype in which processes reduce them, and the rows that are out of its range.

    So all processes reduce once, whatever each of them holds.
    """
    backend, xp = ruler.backend, ruler.backend.xp
    wide = backend.processes.reduction_dtype(block.dtype, ruler.given.first)
    safe = totals.dtype != (_host_dtype(ruler, block.dtype) if isinstance(totals, np.ndarray) else block.dtype)
    if not isinstance(totals, np.ndarray):
        return (totals if safe or wide == block.dtype else ruler.totals(block._replace(dtype=wide))), []
    if safe:
        return totals, []
    left, fine = [], in_range(totals, totals.dtype == np.float32)
    if wide == block.dtype:  # the sum over all processes must be in range, too
        fine &= totals <= (_SINGLE if totals.dtype == np.float32 else _DOUBLE)[1] / _MANY_PROCESSES
    totals = totals if fine.all() else totals.astype(_host_dtype(ruler, wide))
    for row in np.flatnonzero(~fine.reshape(len(totals), -1).all(1)).tolist():
        numbers = ruler.layout.groups[block.groups[row]]
        one = block._replace(groups=block.groups[row : row + 1], dtype=wide)
        if numbers and wide != block.dtype:
            totals[row] = np.asarray(backend.viewed(ruler.given.own(ruler.totals(one))))[0]
        elif numbers and bool(xp.any(ruler.totals(one, Linf) > 0)):  # else they are zeros
            left.append(row)
    return totals, left


def _on_host(rulers: list[Ruler], totals: list[Column]) -> list[Column] | None:
    """Return the norms from sums of squares that can be read; rows out of range are measured again.

    It is ``None`` if those cannot be read.
    """
    found = []
    for ruler, column in zip(rulers, totals, strict=True):
        if ruler.joint is not None:  # whose sums are in range
            found.append(_typed(ruler, column.mapped(np.sqrt)))
            continue
        blocks = [_rooted(ruler, *pair) for pair in zip(ruler.layout.blocks, column.blocks, strict=True)]
        if any([block is None for block in blocks]):
            return None
        found.append(Column(blocks))
    return found


def _rooted(ruler: Ruler, block: Block, totals: Any) -> Any:
    fine = in_range(totals, totals.dtype == np.float32)
    norms = np.sqrt(totals).astype(_host_dtype(ruler, block.dtype), copy=False)
    if fine.all():
        return norms
    for row in np.flatnonzero(~fine.reshape(len(block.groups), -1).all(1)).tolist():
        alone = block._replace(groups=block.groups[row : row + 1])
        one = ruler._replace(layout=ruler.layout._replace(blocks=(alone,)))
        (again,) = _rescaled([one], [Column([totals[row : row + 1]])])
        view = ruler.backend.viewed(again.blocks[0])
        if view is None:
            return None
        norms[row] = view[0]
    return norms


def _off_host(rulers: list[Ruler], totals: list[Column]) -> list[Column]:
    """Return the norms from sums of squares that cannot be read."""
    backend, xp, norm = rulers[0].backend, rulers[0].backend.xp, rulers[0].norm
    totals = [column.mapped(ruler.given.own) for ruler, column in zip(rulers, totals, strict=True)]
    every = [total for column in totals for total in column.arrays]
    dtypes = [
        array.dtype for ruler, column in zip(rulers, totals, strict=True) for array in _typed(ruler, column).arrays
    ]
    wide = [total.dtype != dtype for total, dtype in zip(every, dtypes, strict=True)]

    def usual() -> list[Any]:
        # Sums in a wider dtype from a fast path have no derivative where there are values.
        plain = [one and not backend.traced(total) for total, one in zip(every, wide, strict=True)]
        roots = [xp.sqrt(t) if one else norm.root(xp, t) for t, one in zip(every, plain, strict=True)]
        return [cast(xp, root, dtype) for root, dtype in zip(roots, dtypes, strict=True)]

    def rare() -> list[Any]:
        short = backend.static_shapes or not backend.traced(rulers[0].given.first)
        columns = _rescaled(rulers, totals) if short else _by_units(rulers, (), ())[0]
        return [array for column in columns for array in column.arrays]

    if all(wide):  # no square can overflow or underflow
        found = usual()
    else:
        accurate = all_of(backend, [xp.all(in_range(total, total.dtype == xp.float32)) for total in every])
        if backend.readable(accurate):
            found = usual() if bool(accurate) else rare()
        else:
            found = backend.cond(accurate, usual, rare)
    left = iter(found)
    return [column.filled([next(left) for _ in column.arrays]) for column in totals]


def _host_dtype(ruler: Ruler, dtype: Any) -> Any:
    """Return NumPy's dtype of norms that the host can read."""
    xp = ruler.backend.xp
    return np.float32 if dtype == xp.float32 else np.float64 if dtype == xp.float64 else dtype


def in_range(total: Any, single: bool) -> Any:  # noqa: FBT001
    """Whether a sum of squares surely had neither overflow nor underflow (false for NaN)."""
    smallest, largest = _SINGLE if single else _DOUBLE
    return (total > smallest) & (total <= largest)
