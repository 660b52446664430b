# SPDX-License-Identifier: MIT
"""Factors onto leaves: as new arrays, in place, or summed over examples; the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.plan import Plan, plan_of
from uniclip._core.tree import Opened, open_tree
from uniclip._errors import summarize
from uniclip.backends import Backend
from uniclip.backends.base import HOST, LIBRARY, FastResult, Products, cast
from uniclip.report import LazyReport, Report, StepValues, report_of
from uniclip.scopes import everything

if TYPE_CHECKING:
    from uniclip.rule import Choices

LIMIT_FOR_EACH_LAYER = (
    "write uc.Rule(uc.limits.PerGroup({'body': 0.1, 'head': 1.0}), "
    "scope=uc.Scope(uc.scopes.each_example.axes, label)), where label(path, leaf) returns the "
    "name of a leaf's layer, such as path[0]"
)
"""How to limit each example's gradient layer by layer, for errors."""


class StepResult(NamedTuple):
    """What a step comes to before anything is multiplied."""

    rule: Choices
    given: Opened
    plan: Plan
    values: StepValues
    """The norms, limits and factors of each block."""
    state: Any

    def clip_leaves(self) -> Any:
        """Return the clipped gradients, like those given."""
        given, numbers = self.given, self._changed()
        arrays = list(given.arrays)
        products = self._products_of(
            numbers, [arrays[number] for number in numbers], self.values.factors
        )
        with given.backend.computation_context(given.first):
            if given.in_place:
                multiply_in_place(given, numbers, products)
                return given.spec.unflatten(given.leaves)
            for number, array in zip(
                numbers, given.backend.scale(products) if numbers else [], strict=True
            ):
                arrays[number] = array
            return given.close(arrays)

    def _changed(self) -> list[int]:
        """Return the numbers of the leaves whose factors are not known to be 1,
        in the order of blocks.
        """
        changed: list[int] = []
        for block, factors in zip(self.plan.blocks, self.values.factors, strict=True):
            ones = [False] * len(block.groups)
            if isinstance(factors, np.ndarray):
                flags = factors == 1
                ones = (
                    flags if flags.ndim == 1 else flags.all(axis=tuple(range(1, flags.ndim)))
                ).tolist()
            changed += [
                number
                for one, group in zip(ones, block.groups, strict=True)
                if not one
                for number in group
            ]
        return changed

    def _products_of(
        self, numbers: Sequence[int], arrays: list[Any], blocks: list[Any]
    ) -> Products:
        """Return the products of arrays in the places of leaves."""
        given, plan = self.given, self.plan
        return Products(
            arrays,
            blocks,
            [plan.places[number] for number in numbers],
            plan.along and [plan.along[number] for number in numbers],
            [given.shard(number) for number in numbers] if given.wrapped else None,
            given.in_place,
            self.rule.zeroes,
        )

    def summed(self) -> Any:
        """Return the sum of the clipped gradients along their first axis."""
        given, plan, backend = self.given, self.plan, self.given.backend
        _check_summable(given, plan)
        xp, numbers = backend.xp, given.leaf_info.present
        with backend.computation_context(given.first):
            arrays = [given.arrays[number] for number in numbers]
            wide = [cast(xp, array, xp.result_type(array.dtype, xp.float32)) for array in arrays]
            products = self._products_of(
                numbers, wide, list(map(plan.math.to_library, self.values.factors))
            )
            leaves: list[Any] = [None] * len(given.leaves)
            for number, product in zip(
                numbers, backend.scale(products._replace(in_place=False)), strict=True
            ):
                array, leaf = given.arrays[number], given.leaves[number]
                total = xp.sum(product, axis=0)
                total = cast(
                    xp, total, array.dtype if xp.isdtype(leaf.dtype, "integral") else leaf.dtype
                )
                shard = given.shard(number)
                leaves[number] = total if shard is None else shard.sum_examples(leaf, total)
            return given.spec.unflatten(leaves)

    def norms(self) -> Any:
        """Return the norms of the report."""
        return self.plan.arrange([self.plan.math.to_library(norms) for norms in self.values.norms])

    def report(self) -> Report:
        """Return the report, which holds no gradient."""
        return report_of(self.values)


def multiply_in_place(opened: Opened, numbers: list[int], products: Products) -> None:
    """Multiply some leaves, each memory once.

    Entries that were made 0 when they were measured are written, too.
    """
    backend, wrapped = opened.backend, opened.wrapped
    arrays = [wrapped[n].array if n in wrapped else leaf for n, leaf in enumerate(opened.leaves)]
    zeroed = [n for n in opened.leaf_info.present if arrays[n] is not opened.arrays[n]]
    if not (numbers or zeroed):
        return
    repeated, again = opened.find_repeated()
    for row, number in enumerate(numbers) if wrapped else ():
        whole = (
            number in wrapped
            and number not in repeated
            and number not in zeroed
            and products.is_single(row)
        )
        if whole and wrapped[number].storage is not None:
            arrays[number] = wrapped[number].storage
    for number in zeroed:
        if number not in again:
            backend.write(arrays[number], lambda _, new: new, opened.arrays[number])
    rows = (
        [row for row, number in enumerate(numbers) if number not in again]
        if wrapped or again or zeroed
        else []
    )
    if rows or (numbers and not (wrapped or again or zeroed)):
        backend.scale(
            products.take(rows, [arrays[numbers[row]] for row in rows]) if rows else products
        )
    changed = {*numbers, *zeroed} - again
    opened.write([n for n, leaf in wrapped.items() if arrays[n] is leaf.array and n in changed])


def _check_summable(given: Opened, plan: Plan) -> None:
    """Refuse norms over all examples, and leaves with different numbers of examples."""
    present = given.leaf_info.present
    every = given.shapes()
    shapes = [tuple(every[number]) for number in present]
    for number, shape in zip(present, shapes, strict=True):
        axes = plan.axes[number]
        if shape and (axes is None or 0 in axes):
            msg = (
                "rule must keep the examples apart, as uc.by_example_norm(1.0) does: its scope, "
                f"{summarize(plan.scope)}, takes one norm over all of them"
            )
            if plan.scope.label not in {None, everything}:
                msg += f"; for a limit for each layer, {LIMIT_FOR_EACH_LAYER}"
            raise ValueError(msg)
        first = shapes[0]
        if not (first and shape) or (first[0] != shape[0] and None not in {first[0], shape[0]}):
            places = " and ".join(given.place(n) for n in (present[0], number))
            msg = (
                f"leaves need as many examples along the first axis, but {places} have the shapes "
                f"{[first, shape]}"
            )
            raise ValueError(msg)


class FastStepResult(NamedTuple):
    """What a step came to in the lane of a backend, where all is done already."""

    rule: Choices
    backend: Backend
    close: Callable[[list[Any]], Any]
    """Makes a tree like the one that was opened."""
    fast_path: FastResult
    state: Any

    def clip_leaves(self) -> Any:
        """Return the clipped gradients, like those given."""
        return self.close(self.fast_path.leaves)

    def norms(self) -> Any:
        """Return the norm as an array of the library, 0-d and float32."""
        norm, device = self.fast_path.norm, self.fast_path.device
        return (
            self.backend.from_host(np.array(norm, np.float32), device)
            if isinstance(norm, float)
            else norm
        )

    def report(self) -> Report:
        """Return the report, which holds no gradient, and is arranged on first access."""
        norm, limit, factor, _, device = self.fast_path
        fast_path = FastResult(norm, limit, factor, [], device)  # at each step: _replace takes a µs
        return LazyReport(
            FastStepResult(self.rule, self.backend, list, fast_path, None).make_values
        )

    def make_values(self) -> StepValues:
        """Return the data of the report."""
        fast_path, norm, read = self.fast_path, self.norms(), isinstance(self.fast_path.norm, float)
        # of one norm, whatever the leaves
        plan = plan_of(self.rule, open_tree(norm), HOST if read else LIBRARY)
        if read:
            return StepValues(plan, *[[np.array([number], np.float32)] for number in fast_path[:3]])
        norms, factors = (
            self.backend.xp.reshape(value, (1,)) for value in (norm, fast_path.factor)
        )
        return StepValues(plan, [norms], [fast_path.limit], [factors])
