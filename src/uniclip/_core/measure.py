# SPDX-License-Identifier: MIT
"""Norms of leaves: sums, their range, roots and sizes; reduced over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.collectives import Loss, Payload, mean_loss
from uniclip._core.plan import Block, Plan
from uniclip._core.tree import Opened
from uniclip._errors import summarize
from uniclip._types import Step
from uniclip.backends.arrays import check_shape, known_true
from uniclip.backends.base import FITS, LIBRARY, NUMPY, Terms, expand_to_leaf, in_groups
from uniclip.norms import L2, Norm

if TYPE_CHECKING:
    from uniclip.rule import Choices


_NO_CONTEXT = nullcontext()
_EXACT_POWER = 6
"""The largest power of float32 numbers that float64 holds."""
_FITS = (4.5e-277, 1.7976931348623157e308)
"""Between smallest normal number / eps² and the largest number a sum of squares in float64
is accurate.
"""


class Inputs(NamedTuple):
    """What a step of the general way starts from."""

    rule: Choices
    plan: Plan
    tree: Opened
    params: Opened | None
    """The parameters of the gradients, if the limit needs them."""
    step: Step
    constant: Any
    """The constant limit, ``None`` if there is another one."""


class Measured(NamedTuple):
    """The measurements of a step, joined over processes, where the norms lie:
    an array for each block.
    """

    norms: list[Any]
    params: list[Any] | None = None
    sizes: list[Any] | None = None
    present: list[Any] | None = None
    """For each norm, whether some process has a gradient of it.

    ``None`` where this process knows.
    """
    loss: Any = None
    finite_norms: list[Any] | None = None
    """The norms with NaN where they are not finite, where the library has made them."""
    entries_finite: Any = None
    """Whether all entries are finite, where that was looked at."""


def measure(inputs: Inputs, tree: Opened) -> Measured:
    """Measure what a step needs, of gradients in which entries may have been made 0.

    All that processes join goes in one packet with the sums of leaves.
    """
    rule, plan, original, params, step, _ = inputs
    math_, needs, power = plan.math, rule.limit.needs, rule.norm.size_power
    collectives, sized = plan.collectives, "sizes" in needs or bool(power)
    looks_at_entries = rule.nonfinite == "zero" and (
        not math_.host or (collectives is not None and bool(collectives.mesh_groups))
    )
    with _NO_CONTEXT if math_.host and collectives is None else math_.library.allow_float64():
        payload = Payload(
            unsound=[_count_nonfinite(plan, original)] if looks_at_entries else None,
            sizes=sizes_of(plan, tree) if sized and plan.sizes is None else None,
        )
        if collectives is not None:
            presence = rule.stateful or not plan.one_norm
            payload = collectives.ask_for(
                step.loss, payload, losses="loss" in needs, presence=presence
            )
        trees = [tree for tree in (tree if step.norm is None else None, params) if tree is not None]
        at_once = _norms_at_once(plan, trees, rule.norm, payload)
        if at_once is None:
            norms, joined = norms_of(plan, trees, rule.norm, payload)
        else:
            norms, joined = [norms for norms, _ in at_once], payload
        finite_norms = None
        if at_once is not None and step.norm is None and not power:
            finite_norms = at_once[0][1]
        sizes = plan.sizes
        if joined.sizes is not None:
            sizes = divisors_of(plan, plan.join_blocks(joined.sizes), power)
            plan.sizes = None if math_.compiled or collectives is not None else sizes
        if sizes is not None:
            sizes = (math_.constants(sizes[0]), math_.constants(sizes[1]))
        if sizes is not None and power:
            norms = [[n / size for n, size in zip(tree, sizes[1], strict=True)] for tree in norms]
        return Measured(
            norms=math_.as_norms(norms[0]) if step.norm is None else [_given_norm(inputs)],
            params=None if params is None else math_.as_norms(norms[-1]),
            sizes=None if sizes is None else sizes[0],
            present=None
            if joined.present is None
            else math_.as_norms([count > 0 for count in joined.present]),
            loss=_find_loss(inputs, joined.losses) if "loss" in needs else None,
            finite_norms=finite_norms,
            entries_finite=None if joined.unsound is None else joined.unsound[0] < 1,
        )


def _count_nonfinite(plan: Plan, tree: Opened) -> Any:
    """Return how many arrays have entries that are not finite."""
    xp, dtype = plan.math.library.xp, plan.math.sum_dtype
    arrays = [tree.arrays[number] for number in tree.leaf_info.present]
    counts = []
    for array in arrays:
        with plan.math.library.computation_context(array):
            counts.append(xp.astype(xp.logical_not(xp.all(xp.isfinite(array))), dtype))
    return plan.math.add(counts, "sum")


def _find_loss(inputs: Inputs, sums: list[Any] | None) -> Any:
    """Return the loss of a step where the norms are, the mean of all processes.

    ``None`` if there is none.
    """
    plan, loss, first = inputs.plan, inputs.step.loss, inputs.tree.first
    xp = plan.math.library.xp
    if sums is not None:
        loss = mean_loss(plan.math.library, loss, list(map(plan.math.to_library, sums)))
    elif isinstance(loss, Loss):
        loss = loss.mean
    if loss is None:
        return None
    loss = xp.asarray(plan.math.read_foreign(loss))
    if not plan.math.host and first is not None:
        loss = plan.math.library.to_device_of(first, loss)
    loss = plan.math.library.detach(xp.astype(loss, xp.float32))
    view = plan.math.view(loss)
    return np.asarray(float(loss), np.float32) if view is None else view


def _given_norm(inputs: Inputs) -> Any:
    """Return the norm of all leaves that was given, as measuring would return it;
    refuse an invalid one.
    """
    plan, backend, [zero] = inputs.plan, inputs.tree.backend, zero_norms(inputs.plan, inputs.tree)
    norm = backend.xp.asarray(plan.math.read_foreign(inputs.step.norm), dtype=zero.dtype)
    norm = backend.to_device_of(zero, norm)
    check_shape("norm", norm, zero)
    if known_true(backend, backend.xp.any(norm < 0)):  # NaN is a norm that was measured
        msg = f"norm must be 0 or more, got {summarize(norm) if norm.shape else norm}"
        raise ValueError(msg)
    view = plan.math.view(zero + norm)
    return zero + norm if view is None else view


def zero_norms(plan: Plan, tree: Opened) -> list[Any]:
    """Return zeros like the norms, in the library of the gradients."""
    xp, (dtype, numpys) = plan.math.library.xp, plan.math.dtypes

    def zero(block: Block, group: tuple[int, ...]) -> Any:
        if not (block.kept and group):
            return plan.math.to_library(np.zeros((), numpys))
        # Sharded as it is.
        return xp.sum(xp.zeros_like(tree.arrays[group[0]], dtype=dtype), axis=plan.axes[group[0]])

    return [
        plan.math.stack([zero(block, group) for group in block.groups]) for block in plan.blocks
    ]


def _norms_at_once(
    plan: Plan, trees: list[Opened], norm: Norm, payload: Payload
) -> list[Any] | None:
    """Return the norms of each tree by block, and the same with NaN where they are not finite, if
    they are made with their sums. ``None`` if something else is joined, or for other norms.
    """
    if plan.collectives is not None or norm.ord != 2 or plan.entries or not trees or any(payload):
        return None
    found = plan.math.norms_at_once(trees, [_terms(plan, tree, 2, None) for tree in trees])
    if found is None:
        return None
    return [[plan.join_blocks(norms) for norms in of_tree] for of_tree in found]


def norms_of(
    plan: Plan, trees: list[Opened], norm: Norm, payload: Payload
) -> tuple[list[list[Any]], Payload]:
    """Return the norms of each tree by block, before they are divided by sizes;
    and the packet, joined.

    It decides whether sums are made again, and what is joined. Sums of entries up to float32 are
    float64; others that may have overflowed or underflowed are made again in units of the largest
    modulus of each norm.
    """
    p = math.inf if plan.entries else norm.ord

    def roots(totals: list[Any]) -> list[Any]:
        return [plan.math.round_to_norms(_root(plan, norm, total)) for total in totals]

    def in_units(payload: Payload) -> tuple[list[Any], Payload]:
        tops, _ = _join_sums(plan, trees, math.inf, None, Payload())
        units = [_measure_unit(plan, top) for top in tops]
        totals, payload = _join_sums(plan, trees, p, units, payload)
        pairs = zip(units, totals, strict=True)
        return [
            plan.math.round_to_norms(unit * _root(plan, norm, total)) for unit, total in pairs
        ], payload

    exact = (
        plan.math.narrow
        and plan.math.double
        and all([tree.leaf_info.narrow and tree.leaf_info.double for tree in trees])
    )
    if p == math.inf or not trees:
        totals, _ = _join_sums(plan, trees, p, None, Payload())
        norms = list(map(plan.math.round_to_norms, totals))
        payload = _join_sums(plan, [], 1, None, payload)[1] if any(payload) else payload
    elif p == 1 or (exact and p <= _EXACT_POWER):
        totals, payload = _join_sums(plan, trees, p, None, payload)
        norms = list(map(plan.math.round_to_norms, totals)) if p == 1 else roots(totals)
    elif p != 2 or plan.math.library.debug_infs():
        norms, payload = in_units(payload)
    else:
        totals, payload = _join_sums(plan, trees, 2, None, payload)
        in_range = _are_in_range(plan, totals)
        norms = plan.math.choose(in_range, lambda: roots(totals), lambda: in_units(Payload())[0])
    count = len(plan.norm_blocks)
    return [norms[number * count : (number + 1) * count] for number in range(len(trees))], payload


def _are_in_range(plan: Plan, totals: list[Any]) -> Any:
    """Return whether no sum of squares may have overflowed or underflowed."""
    least, most = _FITS if plan.math.double else FITS
    zero = 0.0 if plan.math.host else -1.0  # where the host reads, the sum of zeros alone is 0
    return plan.math.all(
        [((total > least) | (total == zero)) & (total <= most) for total in totals]
    )


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


def _measure_unit(plan: Plan, top: Any) -> Any:
    """Return the unit in which a norm is measured, given the largest modulus: detached,
    as no norm depends on it.
    """
    xp = np if isinstance(top, NUMPY) else plan.math.library.xp
    # It stays where its reciprocal is a normal number too; that of zeros is 1, or their second
    # derivative overflows.
    low, high = (2.3e-308, 4e307) if plan.math.double else (1.2e-38, 8e37)
    unit = xp.where(top > 0, xp.clip(top, low, high), xp.ones_like(top))
    return unit if xp is np else plan.math.library.detach(unit)


def _join_sums(
    plan: Plan, trees: list[Opened], p: float, units: list[Any] | None, payload: Payload
) -> tuple[list[Any], Payload]:
    """Return ``Σ|x/unit|ᵖ`` of each norm, an array for each block of each tree,
    and the packet, joined.
    """
    count = len(plan.norm_blocks)
    by = [None] * len(trees) if units is None else in_groups(units, [count] * len(trees))
    terms = [_terms(plan, tree, p, of_tree) for tree, of_tree in zip(trees, by, strict=True)]
    if plan.collectives is not None:
        return plan.collectives.rows(trees, terms, payload)
    rows = []
    for tree, added in zip(trees, terms, strict=True):
        of_tree = plan.math.sums(tree, added)
        rows += of_tree if plan.shapes is None else plan.join_blocks(of_tree)
    return rows, payload


def _terms(plan: Plan, tree: Opened, p: float, units: Sequence[Any] | None) -> Terms:
    """Return what is added up of a tree; a norm without gradients is that of a zero."""
    held = [*tree.arrays, plan.math.zero_like(tree.first)] if -1 in plan.order else tree.arrays
    arrays = [held[number] for number in plan.order]
    axes = plan.along and [plan.along[number] for number in plan.order]
    if units is not None:
        blocks = plan.split_blocks(units)
        rows = [row for unit in blocks for row in plan.math.backend.unstack(unit)]
        each = [row for row, count in zip(rows, plan.counts, strict=True) for _ in range(count)]
        every = zip(each, arrays, axes or [None] * len(arrays), strict=True)
        units = [expand_to_leaf(plan.math.library, *arguments) for arguments in every]
    weigh = None if plan.collectives is None else plan.collectives.weigher(tree, p)
    return Terms(arrays, plan.counts, plan.heights, axes, p, units, weigh)


def sizes_of(plan: Plan, tree: Opened) -> list[Any]:
    """Return the number of entries of each norm, ``(k, 1, ...)`` for each block, in this process;
    copies count once.
    """
    counts = {n: _count_entries(plan, tree, n) for n in plan.order if n >= 0}
    counts = counts if plan.collectives is None else plan.collectives.count_once(counts)
    return [
        _add_counts(plan, block, [[counts[n] for n in group] for group in block.groups])
        for block in plan.blocks
    ]


def _count_entries(plan: Plan, tree: Opened, number: int) -> Any:
    """Return the number of entries of a leaf that share a norm,
    also of those that are not stored.
    """
    leaf, wrapped, axes, xp = (
        tree.leaves[number],
        tree.wrapped.get(number),
        plan.axes[number],
        plan.math.library.xp,
    )
    shape = leaf.shape if wrapped is None or wrapped.shape is None else wrapped.shape
    if getattr(shape, "rank", 0) is None or any([length is None for length in shape]):
        if tree.is_sparse(number):
            msg = (
                f"{tree.place(number)} is sparse, and does not tell the size to average over: "
                "give it a dense_shape"
            )
            raise ValueError(msg)
        return xp.sum(xp.ones_like(tree.arrays[number], dtype=plan.math.sum_dtype), axis=axes)
    # not a generator: torch.compile
    return math.prod(shape if axes is None else [shape[axis] for axis in axes])


def _add_counts(plan: Plan, block: Block, counts: list[list[Any]]) -> Any:
    """Return the sum of the counts of each norm of a block."""
    xp, shape = plan.math.library.xp, (len(counts), *(1,) * (block.kept or 0))
    if all([isinstance(count, (int, float)) for group in counts for count in group]):
        return np.reshape(np.asarray([sum(group) for group in counts], np.float64), shape)
    rows = [
        plan.math.add([xp.astype(xp.asarray(count), plan.math.sum_dtype) for count in group], "sum")
        for group in counts
    ]
    return xp.reshape(plan.math.stack(rows), shape)


def divisors_of(plan: Plan, sizes: list[Any], power: float) -> tuple[list[Any], list[Any]]:
    """Return numbers of entries in the dtype of the norms, and what norms are divided by: NumPy's
    arrays, where the sizes are.
    """
    counts, by = [], []
    for size in sizes:
        xp = np if isinstance(size, np.ndarray) else plan.math.library.xp
        counts.append(plan.math.round_to_norms(size))

        # The norm of no entries is 0, and stays 0.
        divisor = plan.math.round_to_norms(xp.where(size > 0, size, xp.ones_like(size)))
        by.append(divisor**power)
    return counts, by
