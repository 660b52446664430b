# SPDX-License-Identifier: MIT
"""The fast path: which steps take it, and the result of such a step.

It limits one Euclidean norm over dense leaves of one process by a constant, as most steps do. On
small trees the general path takes several times as long. `uniclip.clip`, PyTorch's functions and
attached optimizers all call `run_fast_path`; if it returns ``None``, they take the general path, in
`uniclip._core.step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.apply import multiply_in_place
from uniclip._core.plan import plan_of_one_norm
from uniclip._core.tree import OpenedTree
from uniclip._types import State, Step
from uniclip.backends import Backend
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    FastResult,
    LeafInfo,
    fast_numbers,
    products_by,
    take,
)
from uniclip.report import LazyReport, Report, StepValues

if TYPE_CHECKING:
    from uniclip.rule import Choices

_PYTHON_NUMBERS = {float, int}


def run_fast_path(
    rule: Choices, backend: Backend, leaves: list[Any], limit: Any, step: Step
) -> FastResult | None:
    """Take a step on the fast path; return ``None``, with nothing written, if it does not apply."""
    if not rule.simple or type(limit) not in _PYTHON_NUMBERS:
        return None

    # Only the general path validates and uses these arguments.
    if step.params is not None or step.loss is not None or step.norm is not None:
        return None
    if step.all_reduce is not None or step.shared is not None:
        return None

    # To raise an error needs the value of the norm, and on an accelerator it is not read. The first
    # leaf is enough, since backends take no tree with leaves on several devices.
    if rule.nonfinite == "raise":
        for leaf in leaves:
            if leaf is not None:
                if not backend.fast_path_reads(leaf):
                    return None
                break

    return backend.fast_path(leaves, limit, in_place=step.in_place)


def run_fast_path_on_storage(
    rule: Choices, tree: OpenedTree, limit: float, step: Step
) -> FastResult | None:
    """Take a step on the fast path on the arrays inside of wrapped leaves.

    Return ``None``, with nothing written, if it does not apply.
    """
    if not rule.simple:
        return None
    with tree.backend.computation_context(tree.first):
        if not step.in_place:
            scaled = run_fast_path(rule, tree.backend, tree.arrays, limit, step)
            if scaled is None:
                return None
            return scaled._replace(leaves=tree.restore_leaves(scaled.leaves))

        # A limit of ∞ only measures. The backend would write the arrays, and in place some leaves
        # need their storage written instead.
        only_measure = step._replace(in_place=False)
        measured = run_fast_path(rule, tree.backend, tree.arrays, math.inf, only_measure)
        rounded = None if measured is None else fast_numbers(measured.norm, limit)
        if rounded is None:
            return None
        norm, limit, factor = rounded
        if factor != 1:
            present = tree.leaf_info.present
            arrays = take(tree.arrays, present)
            multiply_in_place(tree, present, products_by(arrays, factor, in_place=True))

        return FastResult(norm, limit, factor, tree.leaves, tree.leaf_info.device)


class FastStepResult(NamedTuple):
    """The result of a step on the fast path: the leaves are clipped already."""

    backend: Backend
    unflatten: Callable[[list[Any]], Any]
    """Returns a tree of the structure that the gradients had."""
    numbers: FastResult
    state: State

    def clipped(self) -> Any:
        """Return the tree of clipped gradients."""
        return self.unflatten(self.numbers.leaves)

    def norms(self) -> Any:
        """Return the norm as a 0-d float32 array of the library."""
        return _norm_of(self.backend, self.numbers)

    def report(self) -> Report:
        """Return the report, which holds no gradient."""
        return report_fast_path(self.backend, self.numbers)


def report_fast_path(backend: Backend, numbers: FastResult) -> Report:
    """Return the report of a step. It holds no gradient, and makes its arrays on first access."""
    norm, limit, factor, _, device = numbers
    # Not `_replace`, which takes a microsecond in each step.
    without_leaves = FastResult(norm, limit, factor, [], device)
    return LazyReport(partial(_values_of, backend, without_leaves))


def _norm_of(backend: Backend, numbers: FastResult) -> Any:
    if isinstance(numbers.norm, float):
        return backend.from_host(np.array(numbers.norm, np.float32), numbers.device)
    return numbers.norm


def _values_of(backend: Backend, numbers: FastResult) -> StepValues:
    """Return the values of a report as arrays, with a plan as the general path has one."""
    # The leaves are gone, but a report needs only their library and the dtype of their norms, so
    # the norm stands for them.
    norm = _norm_of(backend, numbers)
    leaf_info = LeafInfo(backend, [norm], ())
    if isinstance(numbers.norm, float):
        plan = plan_of_one_norm(leaf_info, HOST, numbers.device)
        norms, limits, factors = [[np.array([n], np.float32)] for n in numbers[:3]]
        return StepValues(plan, norms, limits, factors)

    plan = plan_of_one_norm(leaf_info, LIBRARY, numbers.device)
    reshape = backend.xp.reshape
    norms = [reshape(norm, (1,))]
    factors = [reshape(numbers.factor, (1,))]
    return StepValues(plan, norms, [numbers.limit], factors)
