# SPDX-License-Identifier: MIT
"""Norms from the sums of leaves: accurate, safe from overflow and underflow, joined over processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from uniclip.backends.arrays import spread
from uniclip.backends.base import FITS, LIBRARY, NUMPY, RECORDED, Terms, in_groups, op_of
from uniclip.norms import L2, Norm
from uniclip.plan import Block, Plan
from uniclip.processes import packed
from uniclip.tree import Opened

_EXACT_POWER = 6
"""The largest power of float32 numbers that float64 holds."""
_FITS = (4.5e-277, 1.7976931348623157e308)
"""Between smallest normal number / eps² and the largest number a sum of squares in float64 is accurate."""


class Packet(NamedTuple):
    """What processes join beside the sums of leaves; ``None`` for what is not asked for."""

    losses: list[Any] | None = None
    """The sum of their losses, and how many there are."""
    unsound: list[Any] | None = None
    """How many arrays have entries that are not finite."""
    present: list[Any] | None = None
    """How many gradients each norm has, an array for each block."""
    sizes: list[Any] | None = None
    """How many entries each norm has, an array for each block; those of distributed leaves are known."""

    @property
    def arrays(self) -> list[Any]:
        """All of its arrays."""
        return [array for arrays in self if arrays for array in arrays]

    def filled(self, arrays: Iterable[Any]) -> Packet:
        """Return the packet with other arrays in the places of its own."""
        left = iter(arrays)
        return Packet(*[own and [next(left) for _ in own] for own in self])


def norms_of(plan: Plan, trees: list[Opened], norm: Norm, packet: Packet) -> tuple[list[list[Any]], Packet]:
    """Return the norms of each tree by block, before they are divided by sizes; and the packet, joined.

    It decides whether sums are made again, and what is joined. Sums of entries up to float32 are float64; others that
    may have overflowed or underflowed are made again in units of the largest modulus of each norm.
    """
    p = math.inf if plan.entries else norm.ord
    waits = any(packet)

    def rows(p: float, units: list[Any] | None = None) -> list[Any]:
        nonlocal packet, waits
        goes = waits and p < math.inf
        sums, joined = _joined(plan, trees, p, units, packet if goes else Packet())
        packet, waits = (joined, False) if goes else (packet, waits)
        return sums

    def roots(totals: list[Any]) -> list[Any]:
        return [plan.math.rounded(_root(plan, norm, total)) for total in totals]

    def in_units() -> list[Any]:
        units = [_unit(plan, top) for top in rows(math.inf)]
        return [plan.math.rounded(u * _root(plan, norm, s)) for u, s in zip(units, rows(p, units), strict=True)]

    low = plan.math.narrow and plan.math.double and all([tree.kinds.narrow and tree.kinds.double for tree in trees])
    if p in {1, math.inf}:
        norms = [plan.math.rounded(total) for total in rows(p)]
    elif low and p <= _EXACT_POWER:
        norms = roots(rows(p))
    elif p != 2 or plan.math.library.debug_infs():
        norms = in_units()
    else:
        totals = rows(2)
        norms = plan.math.choose(_fit(plan, totals), lambda: roots(totals), in_units)
    if waits:
        packet = _joined(plan, [], 1, None, packet)[1]
    count = len(plan.blocks)
    return [norms[number * count : (number + 1) * count] for number in range(len(trees))], packet


def _fit(plan: Plan, totals: list[Any]) -> Any:
    """Return whether no sum of squares may have overflowed or underflowed."""
    least, most = _FITS if plan.math.double else FITS
    zero = 0.0 if plan.math.host else -1.0  # where the host reads, the sum of zeros alone is 0
    return plan.math.all([((total > least) | (total == zero)) & (total <= most) for total in totals])


def _root(plan: Plan, norm: Norm, total: Any) -> Any:
    """Return the root of sums, with derivatives where they are wanted."""
    if isinstance(total, NUMPY):
        return np.sqrt(total) if norm.ord == 2 else np.power(total, 1 / norm.ord)
    if norm.ord != 2:
        return norm.root(plan.math.library.xp, total)
    if plan.math.mode == LIBRARY:
        return plan.math.library.xp.sqrt(total)
    return plan.math.library.fast_values(_sqrt, L2.root)(total)


def _sqrt(xp: Any, total: Any) -> Any:
    """Return the root, whose derivative is infinite at 0."""
    return xp.sqrt(total)


def _unit(plan: Plan, top: Any) -> Any:
    """Return the unit in which a norm is measured, given the largest modulus: detached, as no norm depends on it."""
    xp = np if isinstance(top, NUMPY) else plan.math.library.xp
    # It stays where its reciprocal is a normal number too; that of zeros is 1, or their second derivative overflows.
    low, high = (2.3e-308, 4e307) if plan.math.double else (1.2e-38, 8e37)
    unit = xp.where(top > 0, xp.clip(top, low, high), xp.ones_like(top))
    return unit if xp is np else plan.math.library.detached(unit)


def _joined(
    plan: Plan, trees: list[Opened], p: float, units: list[Any] | None, packet: Packet
) -> tuple[list[Any], Packet]:
    """Return ``Σ|x/unit|ᵖ`` of each norm, an array for each block of each tree, and the packet, joined."""
    by = [None] * len(trees) if units is None else in_groups(units, [len(plan.blocks)] * len(trees))
    terms = [_terms(plan, tree, p, some) for tree, some in zip(trees, by, strict=True)]
    if plan.owner_groups:
        rows, packet = _over_owners(plan, trees, terms, packet)
    else:
        rows = [row for tree, one in zip(trees, terms, strict=True) for row in _sums(plan, tree, one)]
    if plan.join is None:
        return rows, packet
    arrays = packed(plan.math, [*rows, *packet.arrays], op_of(p), plan.join)
    return arrays[: len(rows)], packet.filled(arrays[len(rows) :])


def _terms(plan: Plan, tree: Opened, p: float, units: Sequence[Any] | None) -> Terms:
    """Return what is added up of a tree; a norm without gradients is that of a zero."""
    held = [*tree.arrays, plan.math.zero_like(tree.first)] if -1 in plan.order else tree.arrays
    arrays = [held[number] for number in plan.order]
    axes = plan.along and [plan.along[number] for number in plan.order]
    if units is not None:
        rows = [row for unit in units for row in plan.math.backend.apart(unit)]
        each = [row for row, count in zip(rows, plan.counts, strict=True) for _ in range(count)]
        every = zip(each, arrays, axes or [None] * len(arrays), strict=True)
        units = [spread(plan.math.library, *one) for one in every]
    weigh = partial(_weighed, plan, tree, p) if plan.copies is not None or (tree.odd and tree.parts) else None
    return Terms(arrays, plan.counts, plan.heights, axes, p, units, weigh)


def _weighed(plan: Plan, tree: Opened, p: float, sums: list[Any]) -> list[Any]:
    """Return the sums of leaves, those of copies divided by their number, so that together they count once."""
    parts, weighed = tree.parts, []
    for number, total in zip(plan.order, sums, strict=True):
        part, copies = parts.get(number), 1 if plan.copies is None else plan.copies[number]
        value, copies = (total, copies) if part is None else (part.weighted(total, part.copies), copies * part.copies)
        weighed.append(value / copies if copies > 1 and p < math.inf else value)
    return weighed


def _sums(plan: Plan, tree: Opened, terms: Terms) -> list[Any]:
    """Return the rows of each block; no derivatives are recorded with respect to parameters."""
    mode = LIBRARY if plan.math.mode == RECORDED and tree.name == "params" else plan.math.mode
    return plan.math.library.sums(mode, terms) if terms.arrays else []


def _over_owners(plan: Plan, trees: list[Opened], terms: list[Terms], packet: Packet) -> tuple[list[Any], Packet]:
    """Return the rows of each block of each tree, and the packet, joined over the owners of distributed leaves."""
    sums: list[dict[int, Any]] = []
    for tree, one in zip(trees, terms, strict=True):
        alone = one._replace(counts=[1] * len(one.arrays), blocks=list(map(sum, one.in_blocks(one.counts))))
        rows = [row for rows in _sums(plan, tree, alone) for row in plan.math.backend.apart(rows)]
        sums.append({number: row for number, row in zip(plan.order, rows, strict=True) if number >= 0})
    if packet.present is not None:
        sums.append({number: np.ones(()) for number in plan.order if number >= 0})
    op = op_of(terms[0].p) if terms else "sum"
    every = [(number, members) for number in range(len(sums)) for members in plan.members]
    addends: list[list[Any]] = [[] for _ in every]
    scalars = Packet(packet.losses, packet.unsound)
    # Which norms form a block may differ from process to process, the order of leaves does not.
    order = sorted(range(len(every)), key=lambda row: (every[row][0], every[row][1][:1]))
    for owners in (None, *plan.owner_groups):
        joined, sent = [], []
        for row in order:
            number, members = every[row]
            measured = trees[number] if number < len(trees) else None
            mine = [n for n in members if plan.owners[number if measured else 0][n] == owners]
            held = [sums[number][n] for n in mine if n in sums[number]]
            if held or (mine and owners is not None):
                joined.append(row)
                sent.append(plan.math.add(held, op) if held else _nothing(plan, measured, mine[0]))
        if owners is not None:
            beside = scalars.arrays if owners in plan.covering else []
            sent = packed(plan.math, [*sent, *beside], op, owners)
            scalars = scalars.filled(sent[len(joined) :]) if beside else scalars
        for row, value in zip(joined, sent, strict=False):
            addends[row].append(value)
    each = in_groups([plan.math.add(some, op) for some in addends], plan.heights * len(sums))
    blocks = [plan.math.stack(list(rows)) for rows in each]
    count = len(trees) * len(plan.blocks)
    present = None if packet.present is None else blocks[count:]
    return blocks[:count], packet._replace(losses=scalars.losses, unsound=scalars.unsound, present=present)


def _nothing(plan: Plan, tree: Opened | None, number: int) -> Any:
    """Return the sums of an absent part of a distributed leaf, or how many gradients that is."""
    axes, shape = plan.axes[number], tree.part(number).local if tree else ()
    kept = () if axes is None else [n for axis, n in enumerate(shape) if axis not in axes]
    return plan.math.to_library(np.zeros(kept, np.float64 if plan.math.double else np.float32))


def in_all_owners(plan: Plan, flags: list[Any]) -> list[Any]:
    """Return flags of the norms, each true only if it is in all processes that have norms of their own."""
    for owners in plan.covering if plan.norms_apart else ():
        xp = plan.math.xp
        own = [1 - xp.astype(xp.asarray(flag), xp.float32) for flag in flags]
        flags = plan.math.as_norms([value < 1 for value in packed(plan.math, own, "max", owners)])
    return flags


def sizes_of(plan: Plan, given: Opened) -> list[Any]:
    """Return the number of entries of each norm, ``(k, 1, ...)`` for each block, in this process; copies count once."""
    counts = {n: _size(plan, given, n) for n in plan.order if n >= 0}
    if plan.copies is not None:
        counts = {n: count / plan.copies[n] for n, count in counts.items()}
    return [_added(plan, block, [[counts[n] for n in group] for group in block.groups]) for block in plan.blocks]


def _size(plan: Plan, given: Opened, number: int) -> Any:
    """Return the number of entries of a leaf that share a norm, also of those that are not stored."""
    leaf, odd, axes, xp = given.leaves[number], given.odd.get(number), plan.axes[number], plan.math.library.xp
    shape = leaf.shape if odd is None or odd.shape is None else odd.shape
    if getattr(shape, "rank", 0) is None or any([length is None for length in shape]):
        if given.is_sparse(number):
            msg = f"{given.place(number)} is sparse, and does not tell the size to average over: give it a dense_shape"
            raise ValueError(msg)
        return xp.sum(xp.ones_like(given.arrays[number], dtype=plan.math.sum_dtype), axis=axes)
    return math.prod(shape if axes is None else [shape[axis] for axis in axes])  # not a generator: torch.compile


def _added(plan: Plan, block: Block, counts: list[list[Any]]) -> Any:
    """Return the sum of the counts of each norm of a block."""
    xp, shape = plan.math.library.xp, (len(counts), *(1,) * (block.kept or 0))
    if all([isinstance(count, (int, float)) for group in counts for count in group]):
        return np.reshape(np.asarray([sum(group) for group in counts], np.float64), shape)
    rows = [
        plan.math.add([xp.astype(xp.asarray(count), plan.math.sum_dtype) for count in group], "sum") for group in counts
    ]
    return xp.reshape(plan.math.stack(rows), shape)


def divisors_of(plan: Plan, sizes: list[Any], power: float) -> tuple[list[Any], list[Any]]:
    """Return numbers of entries, at least 1, in the dtype of the norms; and what norms are divided by."""
    counts, by = [], []
    for size in sizes:
        xp = np if isinstance(size, np.ndarray) else plan.math.library.xp
        counts.append(plan.math.rounded(xp.where(size > 0, size, xp.ones_like(size))))
        by.append(counts[-1] ** power if plan.math.host else plan.math.to_library(counts[-1] ** power))
    return counts, by
