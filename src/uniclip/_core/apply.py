# SPDX-License-Identifier: MIT
"""Multiply leaves by their factors: into new arrays, in place, or summed over examples.

This is the last part of a step. `uniclip._core.factors` computes the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from uniclip._core.plan import Plan
from uniclip._core.tree import OpenedTree
from uniclip._errors import summarize
from uniclip._types import Factors, State
from uniclip.backends import replacement
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import Products, take
from uniclip.report import Report
from uniclip.scopes import everything

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

LIMIT_FOR_EACH_LAYER = (
    "write uc.Rule(uc.limits.PerGroup({'body': 0.1, 'head': 1.0}), "
    "scope=uc.Scope(uc.scopes.each_example.axes, label)), where label(path, leaf) returns the "
    "name of a leaf's layer, such as path[0]"
)
"""How to limit each example's gradient layer by layer, for errors."""

Apply: TypeAlias = "Callable[[RuleSpec, OpenedTree, Plan, Sequence[Factors]], list[Any]]"
"""A function that returns the leaves of a step's result, given the opened gradients and the factors
of each block.
"""


class StepResult(NamedTuple):
    """The result of one step: clipped leaves, the next state, and the values of a report."""

    leaves: list[Any]
    unflatten: Callable[[list[Any]], Any]
    """Returns a tree of the structure that the gradients had."""
    values: Any
    """The norms, limits and factors of each block: `StepValues`, or a `Decision` of the spine."""
    state: State

    def clipped(self) -> Any:
        """Return the tree of clipped gradients."""
        return self.unflatten(self.leaves)

    def norms(self) -> Any:
        """Return the norms as the report has them."""
        return self.values.arranged_norms()

    def report(self) -> Report:
        """Return the report, which holds no gradient."""
        report: Report = self.values.report()
        return report


def scale_leaves(
    rule: RuleSpec, tree: OpenedTree, plan: Plan, factors: Sequence[Factors]
) -> list[Any]:
    """Return the leaves multiplied by their factors, in place if the tree was opened for that."""
    # Most steps clip nothing: a leaf whose factor is 1 is not read, and is returned as it is.
    changed = _find_changed(plan, factors)
    products = plan.products(tree, changed, factors, zero=rule.zeroes)
    if tree.in_place:
        multiply_in_place(tree, changed, products)
        return tree.leaves

    arrays = list(tree.arrays)
    if changed:
        scaled = tree.leaf_info.backend.scale(products)
        for number, array in zip(changed, scaled, strict=True):
            arrays[number] = array

    return tree.restore_leaves(arrays)


def sum_examples(
    rule: RuleSpec, tree: OpenedTree, plan: Plan, factors: Sequence[Factors]
) -> list[Any]:
    """Return the clipped gradients summed over the examples, their first axis."""
    _check_summable(tree, plan)
    backend = tree.backend
    xp = tree.backend.xp
    present = tree.leaf_info.present

    # Many rounded examples would add up to a rounding error: they are summed in float32 or wider.
    arrays = take(tree.arrays, present)
    wide = [cast(xp, array, xp.result_type(array.dtype, xp.float32)) for array in arrays]
    of_library = list(map(plan.space.to_library, factors))
    products = plan.products(tree, present, of_library, zero=rule.zeroes)
    sums = backend.scale(products._replace(arrays=wide, in_place=False, summed=True))

    leaves: list[Any] = [None] * len(tree.leaves)
    for number, wide_total in zip(present, sums, strict=True):
        leaf = tree.leaves[number]
        dtype = leaf.dtype
        if xp.isdtype(dtype, "integral"):
            dtype = tree.arrays[number].dtype
        total = cast(xp, wide_total, dtype)
        # Each process may hold only some examples of a distributed leaf.
        shard = tree.shard(number)
        if shard is not None:
            total = shard.sum_examples(leaf, total)
        leaves[number] = total

    return leaves


def _find_changed(plan: Plan, factors: Sequence[Factors]) -> list[int]:
    """Return the numbers of the leaves whose factors may differ from 1, in the order of blocks."""
    changed: list[int] = []
    for block, of_block in zip(plan.blocks, factors, strict=True):
        # Reading the factors of an accelerator would wait for it, so all leaves are multiplied.
        if not isinstance(of_block, np.ndarray):
            for group in block.groups:
                changed += group
            continue

        ones = of_block == 1
        if ones.ndim > 1:
            ones = ones.all(axis=tuple(range(1, ones.ndim)))
        for is_one, group in zip(ones.tolist(), block.groups, strict=True):
            if not is_one:
                changed += group

    return changed


def multiply_in_place(tree: OpenedTree, numbers: Sequence[int], products: Products) -> None:
    """Multiply some leaves in place, each storage once.

    Also write leaves in which the policy ``"zero"`` has replaced elements by 0.
    """
    backend = tree.backend
    wrapped = tree.wrapped
    targets = list(tree.opened)
    zeroed = [n for n in tree.leaf_info.present if targets[n] is not tree.arrays[n]]
    if not (numbers or zeroed):
        return

    # An array that occurs twice counts twice in the norm. Multiplied twice, it would be scaled by
    # the square of its factor.
    repeated, again = tree.find_repeated()
    if not (wrapped or again or zeroed):
        backend.scale(products)
        return

    # A single factor multiplies the storage, which saves writing a copy back. Not storage that
    # several leaves share, and not elements that were replaced in the copy.
    by_copy = repeated.union(zeroed)
    for row, number in enumerate(numbers):
        storage = wrapped[number].storage if number in wrapped else None
        if storage is not None and number not in by_copy and products.is_single(row):
            targets[number] = storage

    for number in [n for n in zeroed if n not in again]:
        backend.write(targets[number], replacement, tree.arrays[number])
    # The products keep the order of blocks, so that those of one block are multiplied together.
    rows = [row for row, number in enumerate(numbers) if number not in again]
    if rows:
        backend.scale(products.take(rows, take(targets, take(numbers, rows))))

    # Copies that were multiplied are written back into their leaves.
    written = {*numbers, *zeroed} - again
    tree.write([n for n in wrapped if n in written and targets[n] is wrapped[n].array])


def _check_summable(tree: OpenedTree, plan: Plan) -> None:
    """Raise if a norm covers all examples, or leaves have different numbers of examples."""
    present = tree.leaf_info.present
    shapes = tree.shapes()
    for number in present:
        shape = tuple(shapes[number])
        axes = plan.axes[number]
        if shape and (axes is None or 0 in axes):
            msg = (
                "rule must have a norm for each example, as uc.by_example_norm(1.0) does: its "
                f"scope, {summarize(plan.scope)}, has one norm over all of them"
            )
            if plan.scope.label not in {None, everything}:
                msg += f"; for a limit for each layer, {LIMIT_FOR_EACH_LAYER}"
            raise ValueError(msg)

        first = tuple(shapes[present[0]])
        # A compiled program may learn a length only when it runs: then it is None here.
        if not (first and shape and same_shape(first[:1], shape[:1])):
            pair = f"{tree.expression(present[0])} and {tree.expression(number)}"
            msg = (
                f"leaves need equal numbers of examples along the first axis, but {pair} have "
                f"the shapes {[first, shape]}"
            )
            raise ValueError(msg)
