# SPDX-License-Identifier: MIT
"""Measure norms: sums of powers, their range, and roots, reduced over processes.

A naive float32 sum of squares overflows from a norm of 1.8e19, and a float16 one from 256. Sums are
float64 where that is cheap. Otherwise a step checks their range, and measures again in units of the
largest modulus if a sum may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from operator import truediv
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.blocks import Measured
from uniclip._core.collectives import Exchange, Loss, Payload, loss_sums, mean_loss
from uniclip._core.norm_space import NormSpace, zero_or_nan
from uniclip._core.plan import Plan
from uniclip._core.sizes import count_elements, sizes_of_counts
from uniclip._core.tree import OpenedTree
from uniclip._errors import summarize
from uniclip._types import Flags, Namespace, Norms, StepOptions, Tensor
from uniclip.backends.arithmetic import divided_by, unstack
from uniclip.backends.arrays import check_shape, known_true
from uniclip.backends.base import FITS, FITS_FLOAT64, LIBRARY, NUMPY, Terms, expand_to_leaf
from uniclip.norms import L2, Norm

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec


_NO_CONTEXT = nullcontext()
_SAFE_POWER = 6
"""The largest power whose sums of float32 numbers neither overflow nor underflow in float64."""


class StepInputs(NamedTuple):
    """The arguments that the functions of a step share."""

    rule: RuleSpec
    trees: Sequence[OpenedTree]
    """The gradients, and the parameters if the limit needs them."""
    step: StepOptions
    state: Any
    constant: Any
    """A limit that is a number or an array; ``None`` if the rule's limit is asked."""


def measure(plan: Plan, inputs: StepInputs, original: OpenedTree) -> Measured:
    """Measure what a step needs.

    Processes exchange everything together with the first sum.

    Parameters
    ----------
    plan : Plan
    inputs : StepInputs
        The policy ``"zero"`` may have replaced elements in the gradients.
    original : OpenedTree
        The gradients in which elements that are not finite are counted: those before such a
        replacement. Any will do if the caller drops the count.
    """
    rule = inputs.rule
    space = plan.space
    collectives = plan.collectives
    # A norm that is an argument is not measured.
    trees: Sequence[OpenedTree] = inputs.trees
    if inputs.step.norm is not None:
        trees = trees[1:]

    # The host adds in float64 with NumPy; others need it to be allowed.
    with _NO_CONTEXT if space.host and collectives is None else space.library.allow_float64():
        exchange = None
        if collectives is not None:
            payload = _make_payload(plan, inputs, original)
            exchange = Exchange(collectives, trees, payload)

        measured = _measure_norms(plan, inputs, trees, exchange)
        if exchange is None and "loss" not in rule.limit.needs and rule.nonfinite != "zero":
            return measured

        reduced = Payload() if exchange is None else exchange.reduced_payload()
        present = None
        if reduced.present is not None:
            present = space.as_norms([count > 0 for count in reduced.present])
        return measured._replace(
            present=present,
            loss=_find_loss(plan, inputs, reduced.losses),
            elements_finite=_are_elements_finite(rule, plan, original, reduced),
        )


def _measure_norms(
    plan: Plan, inputs: StepInputs, trees: Sequence[OpenedTree], exchange: Exchange | None
) -> Measured:
    """Return the norms of gradients and parameters, and their sizes."""
    rule = inputs.rule
    space = plan.space
    tree = inputs.trees[0]
    norms, finite_norms = norms_of(plan, trees, rule.norm, exchange)

    sizes = plan.sizes
    if plan.counts_elements:
        counts = None if exchange is None else exchange.reduced_payload().sizes
        if counts is None:
            counts = count_elements(plan, tree)
        sizes = sizes_of_counts(plan, plan.join_blocks(counts), rule.norm.size_power)

    # A mean, such as RMS, divides by a power of the number of elements. Then the library's
    # `finite_norms` are those of other norms, and are made again below.
    if sizes is not None and rule.norm.size_power:
        finite_norms = None
        divisors = space.constants(sizes.divisors)
        norms = [list(map(truediv, of_tree, divisors)) for of_tree in norms]

    counts_of_norms = None
    if sizes is not None and "sizes" in rule.limit.needs:
        counts_of_norms = space.constants(sizes.counts)

    # If the norm is given, `trees` are without the gradients.
    given_norm = inputs.step.norm
    if given_norm is not None:
        finite_norms = None
        norms = [[_read_norm(plan, tree, given_norm)], *norms]

    of_trees = [space.as_norms(of_tree) for of_tree in norms]
    if finite_norms is None:
        finite_norms = of_trees[0]
        # With a norm of ∞ a limit could return ∞, which would not clip. A constant uses no norm.
        if rule.constant is None or space.on_device:
            finite_norms = [norm + zero_or_nan(norm) for norm in finite_norms]
    of_params = of_trees[1] if len(of_trees) > 1 else None
    return Measured(of_trees[0], finite_norms, of_params, counts_of_norms)


def _make_payload(plan: Plan, inputs: StepInputs, original: OpenedTree) -> Payload:
    """Return what processes exchange in a step beside sums."""
    rule = inputs.rule
    collectives: Any = plan.collectives
    losses = None
    if "loss" in rule.limit.needs:
        losses = loss_sums(plan.space.library, inputs.step.loss)
    # The host sees elements that are not finite in the norms, unless others hold shards of these.
    nonfinite_arrays = None
    if rule.nonfinite == "zero" and (not plan.space.host or collectives.mesh_groups):
        nonfinite_arrays = [_count_nonfinite(plan, original)]
    present = None
    if (rule.stateful or not plan.one_norm) and not collectives.norms_sharded:
        present = [np.asarray(list(map(len, block.groups)), np.float64) for block in plan.blocks]
    sizes = count_elements(plan, inputs.trees[0]) if plan.counts_elements else None
    return Payload(losses, nonfinite_arrays, present, sizes)


def _are_elements_finite(
    rule: RuleSpec, plan: Plan, original: OpenedTree, reduced: Payload
) -> Flags | None:
    """Return whether all elements are finite, ``None`` if that was not checked."""
    if rule.nonfinite != "zero":
        return None
    if reduced.nonfinite_arrays is not None:
        return reduced.nonfinite_arrays[0] < 1
    # The host sees them in the norms.
    if plan.space.host:
        return None
    return _count_nonfinite(plan, original) < 1


def _count_nonfinite(plan: Plan, tree: OpenedTree) -> Tensor:
    """Return how many arrays have elements that are not finite."""
    library = plan.space.library
    xp = plan.space.library.xp
    counts = []
    for number in tree.leaf_info.present:
        array = tree.arrays[number]
        # Arrays may be on several devices, and a library creates new ones on a single one.
        with library.computation_context(array):
            nonfinite = xp.logical_not(xp.all(xp.isfinite(array)))
            counts.append(xp.astype(nonfinite, plan.space.sum_dtype))

    return plan.space.add(counts, "sum")


def _find_loss(plan: Plan, inputs: StepInputs, losses: list[Any] | None) -> Tensor | None:
    """Return the loss of a step where the norms are, the mean of all processes.

    ``losses`` are the reduced `loss_sums`, if there are any. ``None`` without a loss, or if the
    limit does not use it.
    """
    if "loss" not in inputs.rule.limit.needs:
        return None
    loss = inputs.step.loss
    space = plan.space
    if losses:
        loss = mean_loss(space.library, loss, list(map(space.to_library, losses)))
    elif isinstance(loss, Loss):
        loss = loss.mean
    return None if loss is None else convert_loss(space, loss, inputs.trees[0].first)


def convert_loss(space: NormSpace, loss: Any, first: Any) -> Tensor:
    """Return a loss as a detached float32 array where the norms are, given the first gradient."""
    library = space.library
    loss = library.xp.asarray(space.read_foreign(loss))
    if not space.host and first is not None:
        loss = library.to_device_of(first, loss)
    loss = library.detach(library.xp.astype(loss, library.xp.float32))
    view = space.view(loss)
    if view is not None:
        return view
    # NumPy makes no view of an array with a recorded derivative, so read its value.
    return np.asarray(float(loss), np.float32)


def _read_norm(plan: Plan, tree: OpenedTree, given_norm: Any) -> Norms:
    """Return a norm of all leaves that is an argument, as measuring would return it."""
    backend = tree.backend
    [zero] = zero_norms(plan, tree)
    norm = backend.xp.asarray(plan.space.read_foreign(given_norm), dtype=zero.dtype)
    norm = backend.to_device_of(zero, norm)
    check_shape("norm", norm, zero)
    # NaN passes: it is the norm of gradients with NaN.
    if known_true(backend, backend.xp.any(norm < 0)):
        msg = f"norm must be 0 or more, got {summarize(norm) if norm.shape else norm}"
        raise ValueError(msg)

    # The sum has the shape and the sharding of a measured norm.
    norm = zero + norm
    view = plan.space.view(norm)
    return norm if view is None else view


def zero_norms(plan: Plan, tree: OpenedTree) -> list[Any]:
    """Return zeros like the norms, in the library of the gradients."""
    xp = plan.space.library.xp
    dtype, dtype_of_numpy = plan.space.dtypes
    blocks = []
    for block in plan.blocks:
        rows = []
        for group in block.groups:
            if block.kept and group:
                # Computed from the gradient, to have its sharding.
                like = xp.zeros_like(tree.arrays[group[0]], dtype=dtype)
                rows.append(xp.sum(like, axis=plan.axes[group[0]]))
            else:
                rows.append(plan.space.to_library(np.zeros((), dtype_of_numpy)))

        blocks.append(plan.space.stack(rows))

    return blocks


# Norms of sums.


def norms_of(
    plan: Plan, trees: Sequence[OpenedTree], norm: Norm, exchange: Exchange | None
) -> tuple[list[list[Any]], list[Any] | None]:
    """Return the norms of each tree by block, before they are divided by sizes.

    Elements up to float32 are summed in float64. Other sums are computed again, in units of the
    largest modulus of each norm, if they may have overflowed or underflowed.

    Returns
    -------
    norms : list of list of array
    finite_norms : list of array or None
        Those of the first tree with NaN where they are not finite, if the library has computed
        them.
    """
    if not trees:
        return [], None
    squares = norm.ord == 2 and not plan.by_element
    on_device = exchange is None and plan.space.on_device and bool(plan.order)
    # A library may have one kernel for sums and roots. These sums are not checked.
    if squares and on_device and _fit_float64(plan, trees):
        dtype = plan.space.dtypes[0]
        at_once: list[Any] = [
            plan.space.library.norms(_terms(plan, tree, 2), dtype) for tree in trees
        ]
        if None not in at_once:
            norms = [plan.join_blocks(of_tree) for of_tree, _ in at_once]
            return norms, plan.join_blocks(at_once[0][1])

    # Both trees are measured together, so that processes exchange one payload.
    norms_of_all = _norms_of_sums(plan, trees, norm, exchange)
    if len(trees) == 1:
        return [norms_of_all], None
    count = len(plan.norm_blocks)
    return [norms_of_all[:count], norms_of_all[count:]], None


def _norms_of_sums(
    plan: Plan, trees: Sequence[OpenedTree], norm: Norm, exchange: Exchange | None
) -> list[Any]:
    """Return the norms of all trees, one after the other, as roots of sums in range."""
    p = math.inf if plan.by_element else norm.ord
    terms = [_terms(plan, tree, p) for tree in trees]
    if p in {1, math.inf}:
        totals = _add_terms(plan, trees, terms, exchange)
        return [plan.space.round_to_norms(total) for total in totals]

    if p <= _SAFE_POWER and _fit_float64(plan, trees):
        return _roots(plan, norm, _add_terms(plan, trees, terms, exchange))
    # XLA takes as long to compile the rare branch of a conditional as all the rest, and reserves
    # memory for a copy of the gradients, so its programs always measure in units.
    if p != 2 or plan.space.library.debug_infs() or plan.space.unstacked:
        return _norms_in_units(plan, trees, norm, exchange)

    # Squares may have left the range of their sums: if so, all are made again, in units.
    totals = _add_terms(plan, trees, terms, exchange)
    return plan.space.choose(
        _are_in_range(plan, totals),
        lambda: _roots(plan, norm, totals),
        lambda: _norms_in_units(plan, trees, norm, exchange),
    )


def _fit_float64(plan: Plan, trees: Sequence[OpenedTree]) -> bool:
    """Return whether sums are float64, and stay in range: all numbers are float32 or narrower."""
    fit = plan.space.narrow and plan.space.double
    for tree in trees:
        fit = fit and tree.leaf_info.narrow and tree.leaf_info.double
    return fit


def _roots(plan: Plan, norm: Norm, totals: Sequence[Tensor]) -> list[Any]:
    """Return the roots of sums as norms."""
    return [plan.space.round_to_norms(_root(plan, norm, total)) for total in totals]


def _norms_in_units(
    plan: Plan, trees: Sequence[OpenedTree], norm: Norm, exchange: Exchange | None
) -> list[Any]:
    """Return norms measured in units of the largest modulus of each, whose powers stay in range."""
    terms = [_terms(plan, tree, math.inf) for tree in trees]
    tops = _add_terms(plan, trees, terms, exchange)
    units = [_choose_unit(plan, top, norm.ord) for top in tops]

    # The units of all trees are in one list, as their norms are.
    count = len(plan.norm_blocks)
    terms_in_units = []
    for number, tree in enumerate(trees):
        of_tree = units[number * count : (number + 1) * count]
        terms_in_units.append(_divide_by_units(plan, of_tree, _terms(plan, tree, norm.ord)))

    totals = _add_terms(plan, trees, terms_in_units, exchange)
    norms = []
    for unit, total in zip(units, totals, strict=True):
        norms.append(plan.space.round_to_norms(unit * _root(plan, norm, total)))
    return norms


def _are_in_range(plan: Plan, totals: Sequence[Tensor]) -> Flags:
    """Return whether no sum of squares may have overflowed or underflowed."""
    least, most = FITS_FLOAT64 if plan.space.double else FITS
    # On the host a sum of 0 is one of zeros, see `Backend.sums`. Elsewhere squares may have
    # underflowed, and no sum equals -1.
    zero: Any = 0.0 if plan.space.host else -1.0
    in_range = [((total > least) | (total == zero)) & (total <= most) for total in totals]
    return plan.space.all(in_range)


def _root(plan: Plan, norm: Norm, total: Tensor) -> Tensor:
    """Return the root of sums, with finite derivatives at 0 where derivatives are recorded."""
    if isinstance(total, NUMPY) and norm.ord == 2:
        return np.sqrt(total)
    if isinstance(total, NUMPY):
        return np.power(total, 1 / norm.ord)
    if norm.ord != 2:
        return norm.root(plan.space.library.xp, total)
    if plan.space.mode == LIBRARY:
        return plan.space.library.xp.sqrt(total)
    return plan.space.library.fast_values(_sqrt, L2.root)(total)


def _sqrt(xp: Namespace, total: Tensor) -> Tensor:
    """Return the square root, whose derivative is infinite at 0."""
    return xp.sqrt(total)


def _choose_unit(plan: Plan, top: Tensor, p: float) -> Tensor:
    """Return the unit in which a norm is measured, given its largest modulus."""
    xp = np if isinstance(top, NUMPY) else plan.space.library.xp
    usual = xp.logical_not(top > 0)
    # The unit 1 rounds as sums without a unit do. These are in range for up to 2³⁰ elements.
    if p == 2:
        least, most = (1e-138, 1e149) if plan.space.double else (1e-12, 1e14)
        usual = usual | ((top > least) & (top < most))

    # Between these bounds the reciprocal, by which compilers multiply, is a normal number. The unit
    # of zeros is 1: with a tiny one, their second derivative would overflow.
    low, high = (2.3e-308, 4e307) if plan.space.double else (1.2e-38, 8e37)
    unit = xp.where(usual, xp.ones_like(top), xp.clip(top, low, high))
    # The norm does not depend on its unit, so neither does its derivative.
    return unit if xp is np else plan.space.library.detach(unit)


def _add_terms(
    plan: Plan, trees: Sequence[OpenedTree], terms: list[Terms], exchange: Exchange | None
) -> list[Any]:
    """Return ``Σ|x|ᵖ`` of each norm, an array for each block of each tree."""
    if exchange is not None:
        return exchange.reduce_sums(terms)

    sums: list[Any] = []
    for tree, terms_of_tree in zip(trees, terms, strict=True):
        blocks = plan.space.sums(tree, terms_of_tree)
        sums += blocks if plan.shapes is None else plan.join_blocks(blocks)

    return sums


def _terms(plan: Plan, tree: OpenedTree, p: float) -> Terms:
    """Return the arrays of a tree whose powers are summed, in the order of the plan."""
    # `order` is -1 for a norm without gradients: a zero at the end of the leaves stands for one.
    leaves = tree.arrays
    if -1 in plan.order:
        leaves = [*leaves, plan.space.zero_like(tree.first)]
    arrays = [leaves[number] for number in plan.order]
    axes = plan.along and [plan.along[number] for number in plan.order]
    weigh = None if plan.collectives is None else plan.collectives.weigher(tree, p)
    return Terms(arrays, plan.counts, plan.heights, axes, p, weigh)


def _divide_by_units(plan: Plan, units: Sequence[Tensor], terms: Terms) -> Terms:
    """Return the terms of arrays, or of moduli, each divided by the unit of its norm."""
    library = plan.space.library
    rows: list[Any] = []
    for of_block in plan.split_blocks(units):
        rows += unstack(plan.space.xp, of_block)

    divided: list[Tensor] = []
    rest = iter(terms.by_array())
    for row, count in zip(rows, plan.counts, strict=True):
        for array, _, covered in islice(rest, count):
            with library.allow_float64(), library.computation_context(array):
                unit = expand_to_leaf(library, plan.space.to_library(row), array, covered)
                divided.append(divided_by(library, array, terms.p, unit))

    return terms._replace(arrays=divided)
