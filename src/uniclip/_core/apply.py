# SPDX-License-Identifier: MIT
"""Factors onto leaves: as new arrays, in place, or summed over examples; the result of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.plan import Plan, plan_of
from uniclip._core.tree import Opened, open_tree
from uniclip._errors import short
from uniclip.backends import Backend
from uniclip.backends.arrays import spread
from uniclip.backends.base import HOST, LIBRARY, Lane, cast
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


class Decision(NamedTuple):
    """What a step comes to before anything is multiplied."""

    rule: Choices
    given: Opened
    plan: Plan
    values: StepValues
    """The norms, limits and factors of each block."""
    state: Any

    def clip_leaves(self) -> Any:
        """Return the clipped gradients, like those given."""
        given, factors = self.given, self._factor_of_each_leaf()
        backend, zero = given.backend, self.rule.zeroes
        if given.in_place:
            with backend.quiet(given.first):
                multiply_in_place(given, factors, zero=zero)
            return given.spec.unflatten(given.leaves)
        arrays = list(given.arrays)
        if not factors:
            return given.close(arrays)
        with backend.quiet(given.first):
            old = [arrays[number] for number in factors]
            new = backend.scale(old, list(factors.values()), in_place=False, zero=zero)
            for number, array in zip(factors, new, strict=True):
                arrays[number] = array
            return given.close(arrays)

    def _factor_of_each_leaf(self) -> dict[int, Any]:
        """Return the factor of each leaf; those known to be 1 change nothing."""
        by: dict[int, Any] = {}
        for block, factors in zip(self.plan.blocks, self.values.factors, strict=True):
            host = isinstance(factors, np.ndarray)
            if host and (factors == 1).all():
                continue
            if host and factors.ndim == 1:
                values = factors.tolist()
            elif len(block.groups) == len(block.groups[0]) == 1:  # which one leaf uses
                values = [factors[0, ...]]
            else:
                values = self.plan.math.backend.unstack(factors)
            for value, group in zip(values, block.groups, strict=True):
                if host and (value == 1 if isinstance(value, float) else (value == 1).all()):
                    continue
                for number in group:
                    by[number] = value if isinstance(value, float) else self._spread(value, number)
        return by

    def _spread(self, value: Any, number: int) -> Any:
        """Return the factor of a leaf, with its dimensions."""
        part = self.given.part(number)
        value = value if part is None else part.weigh(value, inverse=True)
        return spread(
            self.plan.math.library, value, self.given.arrays[number], self.plan.axes[number]
        )

    def summed(self) -> Any:
        """Return the sum of the clipped gradients along their first axis."""
        given, plan, backend = self.given, self.plan, self.given.backend
        _refuse_summed(given, plan)
        xp, zero = backend.xp, self.rule.zeroes
        with backend.quiet(given.first):
            factors = [plan.math.to_library(rows) for rows in self.values.factors]
            leaves: list[Any] = [None] * len(given.leaves)
            for number in given.kinds.present:
                block, row = plan.places[number]
                array, leaf = given.arrays[number], given.leaves[number]
                factor = self._spread(factors[block][row, ...], number)
                wide = cast(xp, array, xp.result_type(array.dtype, xp.float32))
                [product] = backend.scale([wide], [factor], in_place=False, zero=zero)
                total = xp.sum(product, axis=0)
                total = cast(
                    xp, total, array.dtype if xp.isdtype(leaf.dtype, "integral") else leaf.dtype
                )
                part = given.part(number)
                leaves[number] = total if part is None else part.sum_examples(leaf, total)
            return given.spec.unflatten(leaves)

    def norms(self) -> Any:
        """Return the norms of the report."""
        return self.plan.arrange([self.plan.math.to_library(norms) for norms in self.values.norms])

    def report(self) -> Report:
        """Return the report, which holds no gradient."""
        return report_of(self.values)


def multiply_in_place(opened: Opened, factors: dict[int, Any], *, zero: bool) -> None:
    """Multiply arrays, each memory once.

    Entries that were made 0 when the tree was measured are written, too.
    """
    backend, odd = opened.backend, opened.odd
    arrays = [odd[n].array if n in odd else leaf for n, leaf in enumerate(opened.leaves)]
    zeroed = [n for n in opened.kinds.present if arrays[n] is not opened.arrays[n]]
    if not (factors or zeroed):
        return
    repeated, again = opened.find_repeated()
    for number, leaf in odd.items():
        if (
            number in factors
            and number not in repeated
            and number not in zeroed
            and leaf.view is not None
        ):
            alike = math.prod(getattr(factors[number], "shape", ())) == 1
            arrays[number] = leaf.view if alike else arrays[number]
    for number in zeroed:
        if number not in again:
            backend.write(arrays[number], lambda _, new: new, opened.arrays[number])
    pairs = [(arrays[n], factor) for n, factor in factors.items() if n not in again]
    if pairs:
        backend.scale(
            [array for array, _ in pairs], [factor for _, factor in pairs], in_place=True, zero=zero
        )
    changed = {*factors, *zeroed} - again
    opened.write([n for n, leaf in odd.items() if arrays[n] is leaf.array and n in changed])


def _refuse_summed(given: Opened, plan: Plan) -> None:
    """Refuse norms over all examples, and leaves with different numbers of examples."""
    present = given.kinds.present
    every = given.shapes()
    shapes = [tuple(every[number]) for number in present]
    for number, shape in zip(present, shapes, strict=True):
        axes = plan.axes[number]
        if shape and (axes is None or 0 in axes):
            msg = (
                "rule must keep the examples apart, as uc.by_example_norm(1.0) does: its scope, "
                f"{short(plan.scope)}, takes one norm over all of them"
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


class LaneDecision(NamedTuple):
    """What a step came to in the lane of a backend, where all is done already."""

    rule: Choices
    backend: Backend
    close: Callable[[list[Any]], Any]
    """Makes a tree like the one that was opened."""
    lane: Lane
    state: Any

    def clip_leaves(self) -> Any:
        """Return the clipped gradients, like those given."""
        return self.close(self.lane.leaves)

    def norms(self) -> Any:
        """Return the norm as an array of the library, 0-d and float32."""
        norm, device = self.lane.norm, self.lane.device
        return (
            self.backend.from_host(np.array(norm, np.float32), device)
            if isinstance(norm, float)
            else norm
        )

    def report(self) -> Report:
        """Return the report, which holds no gradient, and is arranged on first access."""
        norm, limit, factor, _, device = self.lane
        lane = Lane(norm, limit, factor, [], device)  # at each step: _replace takes a µs
        return LazyReport(LaneDecision(self.rule, self.backend, list, lane, None).make_values)

    def make_values(self) -> StepValues:
        """Return the data of the report."""
        lane, norm, read = self.lane, self.norms(), isinstance(self.lane.norm, float)
        # of one norm, whatever the leaves
        plan = plan_of(self.rule, open_tree(norm), HOST if read else LIBRARY)
        if read:
            return StepValues(plan, *[[np.array([number], np.float32)] for number in lane[:3]])
        norms, factors = (self.backend.xp.reshape(value, (1,)) for value in (norm, lane.factor))
        return StepValues(plan, [norms], [lane.limit], [factors])
