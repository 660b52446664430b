# SPDX-License-Identifier: MIT
"""The general path of a step: plan, measure, decide by the limit and the curve, apply.

`uniclip._core.spine` takes the common steps itself, and calls `run_general_step` for all others.
For distributed leaves with one norm, this module measures, and the spine decides and scales, by a
`Finish`. The functions follow in the order in which they run.

This module applies the policies for gradients that are not finite,
`uniclip._core.rule_spec.POLICIES`:

- ``"zero"`` in `_measure_and_zero`, which replaces elements and measures again,
- ``"raise"`` in `_check_finite`, before anything is decided,
- ``"skip"`` in `decide`, which calls `uniclip._core.factors.zero_where_skipped` for the whole step;
  with ``"zero"``, it does so for each norm that is still not finite,
- ``"propagate"`` nowhere: a factor is NaN where its norm is not finite, see
  `uniclip._core.norm_space.zero_or_nan`.

With each of them, `decide` keeps the old state after a step that is not finite. On the spine, a
norm that the host reads is always finite, so no policy applies. If the host does not read the norm,
the spine calls `decide`, or, with ``"propagate"``, `Backend.clip_at_once`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import optree

from uniclip._core.apply import Apply, StepResult, scale_leaves
from uniclip._core.blocks import Measured
from uniclip._core.collectives import (
    Loss,
    Reduction,
    raise_if_kept_axes,
    reduction_of,
    with_reduced_library,
)
from uniclip._core.factors import compute_factors, zero_where_skipped
from uniclip._core.limiting import find_absent, find_limits, raise_if_limits_by_row
from uniclip._core.measure import StepInputs, measure
from uniclip._core.plan import Plan, names_of_norms, norm_space_of, plan_for
from uniclip._core.tree import OpenedTree, with_params
from uniclip._errors import NonFiniteError, check_step_arguments
from uniclip._types import Factors, Flags, StepOptions
from uniclip.backends import Backend, backend_of, library_of
from uniclip.backends.arithmetic import finite_or_zero
from uniclip.backends.base import HOST, LIBRARY, NUMPY, TRACED
from uniclip.curves import rejects
from uniclip.report import StepValues
from uniclip.scopes import is_one_norm

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

MAX_NAMED_LEAVES = 5
"""The largest number of leaves that an error names."""
Finish: TypeAlias = "Callable[[Plan, StepInputs, Measured], tuple[list[Any], Any] | None]"
"""A function that decides and scales, given what was measured.

It returns the clipped leaves and a `uniclip._core.spine.Decision`; or ``None``, with nothing
written, if it does not apply.
"""


def run_general_step(
    inputs: StepInputs, apply: Apply | None = scale_leaves, finish: Finish | None = None
) -> StepResult:
    """Take a step of any kind: plan, measure, ask the limit and the curve, apply.

    ``apply`` multiplies the leaves by the factors; with ``None`` they stay as they are, for a step
    that only measures. ``finish`` replaces all that follows the measurement, if it applies.
    """
    rule, _, step, _, constant = inputs
    if (
        step.params is not None
        or step.all_reduce is not None
        or step.loss is not None
        or "params" in rule.limit.needs
    ):
        inputs = _with_params(inputs)

    mode = find_mode(inputs)
    tree, *params = inputs.trees
    if params and mode != HOST:
        inputs = inputs._replace(trees=[tree, _detach(params[0])])

    # New arrays go to the device of the first gradient; without gradients, of the first parameter.
    first = tree.first
    if first is None and params:
        first = _first_leaf(params[0])
    with tree.leaf_info.backend.computation_context(first):
        reduction = None
        if step.all_reduce is not None or step.shared is not None:
            reduction = _agree(rule, tree, mode, step)
        # Only in this mode: a compiler cannot look up the shape of a number that is a symbol.
        separate = mode == LIBRARY and bool(tuple(getattr(constant, "shape", None) or ()))
        plan = plan_for(rule, inputs.trees, mode, reduction, separate=separate)

        return _run_planned(plan, inputs, apply, finish)


def _run_planned(
    plan: Plan, inputs: StepInputs, apply: Apply | None, finish: Finish | None
) -> StepResult:
    """Take a step, given its plan."""
    rule = inputs.rule
    tree = inputs.trees[0]
    if rule.nonfinite == "zero":
        tree, measured = _measure_and_zero(plan, inputs)
    else:
        measured = measure(plan, inputs, tree)
    # The policy "zero" may have replaced elements.
    finished = None
    if finish is not None and tree is inputs.trees[0]:
        finished = finish(plan, inputs, measured)
    if finished is not None:
        clipped, decision = finished
        return StepResult(clipped, tree.spec.unflatten, decision, decision.state)

    step_finite = None
    if rule.needs_finite:
        step_finite = _check_finite(rule, plan, tree, measured)
    if tree.wrapped:
        raise_if_limits_by_row(rule, plan, tree, inputs.constant)
    values, new_state = decide(plan, inputs, measured, step_finite)
    leaves = tree.leaves if apply is None else apply(rule, tree, plan, values.factors)
    return StepResult(leaves, tree.spec.unflatten, values, new_state)


def decide(
    plan: Plan, inputs: StepInputs, measured: Measured, step_finite: Flags | None
) -> tuple[StepValues, Any]:
    """Compute limits and factors; return the values of the report, and the next state.

    ``step_finite`` is ``None`` if the rule does not need it. The function reads no gradient, so
    ``inputs.trees`` may be empty.
    """
    rule = inputs.rule
    limits, thresholds, new_state = find_limits(plan, inputs, measured)
    factors = compute_factors(plan, inputs, measured, limits)
    # A step that is not finite keeps the old state, so NaN never enters a state.
    if rule.stateful:
        new_state = _choose_state(step_finite, new_state, inputs.state)

    # Only the policy "skip" skips a step because it is not finite.
    kept = step_finite if rule.nonfinite == "skip" else None
    if rule.zeroes:
        factors = zero_where_skipped(plan, measured, factors, kept)
    skipped = None
    if rejects(rule.curve):
        skipped = _is_skipped(plan, measured, factors, kept)
    elif kept is not None:
        skipped = plan.space.xp.logical_not(kept)

    # An accelerator computes all norms as one vector: split it into blocks again.
    norms = measured.norms
    if plan.shapes is not None:
        norms = plan.split_blocks(norms)
        limits = plan.split_blocks(limits)
        factors = plan.split_blocks(factors)
        thresholds = thresholds and plan.split_blocks(thresholds)

    finite = measured.elements_finite
    return StepValues(plan, norms, limits, factors, thresholds, finite, skipped), new_state


# Open the inputs.


def _with_params(inputs: StepInputs) -> StepInputs:
    """Return the inputs of a step with the parameters, opened, if the limit needs them."""
    rule, [tree], step, _, _ = inputs
    # A loss that is reduced already has been validated.
    loss = None if isinstance(step.loss, Loss) else step.loss
    check_step_arguments(loss, step.params)
    raise_if_kept_axes(rule.scope, step.all_reduce)
    tree, params = with_params(rule, with_reduced_library(tree, step.all_reduce), step)
    return inputs._replace(trees=[tree] if params is None else [tree, params])


def _detach(params: OpenedTree) -> OpenedTree:
    """Return parameters detached, since a limit is a constant of the step."""
    detach = params.backend.detach
    arrays = params.arrays
    # In PyTorch no Python code runs for each array, unless a gradient is absent.
    if type(None) not in map(type, arrays):
        return params._replace(arrays=list(map(detach, arrays)))
    return params._replace(arrays=[x if x is None else detach(x) for x in arrays])


def _first_leaf(tree: OpenedTree) -> Any:
    for leaf in tree.leaves:
        if leaf is not None:
            return leaf
    return None


def find_mode(inputs: StepInputs) -> int:
    """Return the execution mode of a step, given all of its inputs; see `uniclip.backends.base`."""
    rule, trees, step, state, constant = inputs
    leaf_info = trees[0].leaf_info
    backend = leaf_info.backend
    # Usually the gradients are the only input that could be traced or on a device.
    if type(constant) is float and step.norm is None and len(trees) == 1 and not rule.holds_arrays:
        return backend.mode(leaf_info)

    # A single argument that the host cannot read makes the step compute with the library.
    to_read = [constant, step.norm, *getattr(rule.limit, "constants", ())]
    # A user's limit may combine the state with the norms, so these must be in one library.
    if rule.stateful and not rule.limits_checked:
        to_read += optree.tree_leaves(state)
    if any([tree.leaf_info.traced for tree in trees]):
        return TRACED
    mode = backend.mode(leaf_info, (to_read, step.loss, state if rule.stateful else None))
    if mode != HOST:
        return mode

    # Arrays of a limit or a curve are of the user's library, and do not mix with NumPy's.
    if rule.holds_arrays or not all([tree.leaf_info.reads for tree in trees]):
        return LIBRARY
    return HOST if all([_is_viewable(backend, value) for value in to_read]) else LIBRARY


def _is_viewable(backend: Backend, value: object) -> bool:
    """Return whether an argument is a number, or an array that the host reads."""
    if not hasattr(value, "dtype") or isinstance(value, NUMPY):
        return True
    library = backend_of(value)
    # A boolean array is no gradient, so `backend_of` returns `None` for it.
    if library is None:
        return backend.as_numpy(backend.xp.asarray(value)) is not None
    return library.as_numpy(value) is not None


def _agree(rule: RuleSpec, tree: OpenedTree, mode: int, step: StepOptions) -> Reduction | None:
    """Return the reduction over the processes of a step; at the first step, check that they agree.

    This comes before the plan, which depends on their number and dtypes.
    """
    reductions = None if mode == TRACED else rule.cache.reductions
    reduction = reduction_of(reductions, step.all_reduce, step.shared)
    if reduction is not None and not reduction.checked and mode != TRACED:
        names = None if is_one_norm(rule.scope) else names_of_norms(rule, tree)
        reduction.agree(rule, names, norm_space_of(tree, mode, reduction))

    return reduction


# Handle gradients that are not finite.


def _check_finite(rule: RuleSpec, plan: Plan, tree: OpenedTree, measured: Measured) -> Flags:
    """Return whether a step is finite in all processes; with ``"raise"``, raise if it is not."""
    finite = plan.space.finite(measured.norms, measured.elements_finite, measured.finite_norms)
    if plan.collectives is not None:
        [finite] = plan.collectives.true_in_all_shards([finite])
    if rule.nonfinite == "raise":
        _raise_if_nonfinite(tree, plan, finite)
    return finite


def _measure_and_zero(plan: Plan, inputs: StepInputs) -> tuple[OpenedTree, Measured]:
    """Return gradients with 0 for elements that are not finite, and what is measured then.

    If the host reads the norms, only gradients with such elements are measured twice.
    """
    tree = inputs.trees[0]
    if not plan.space.host:
        zeroed = _zero_nonfinite(plan, tree)
        of_zeroed = inputs._replace(trees=[zeroed, *inputs.trees[1:]])
        return zeroed, measure(plan, of_zeroed, tree)

    measured = measure(plan, inputs, tree)
    # Processes that hold shards have counted together, so that all of them measure again, or none.
    # Others have not counted, and look at their norms.
    if measured.elements_finite is None:
        measured = measured._replace(elements_finite=plan.space.finite(measured.norms, None))
    if bool(measured.elements_finite):
        return tree, measured
    # The norms change. The rest, such as those of parameters, is kept from the first time.
    zeroed = _zero_nonfinite(plan, tree)
    of_zeroed = inputs._replace(trees=[zeroed], step=inputs.step._replace(loss=None))
    again = measure(plan, of_zeroed, zeroed)
    return zeroed, measured._replace(norms=again.norms, finite_norms=again.finite_norms)


def _zero_nonfinite(plan: Plan, tree: OpenedTree) -> OpenedTree:
    """Return gradients with 0 for elements that are not finite."""
    library = plan.space.library
    arrays = list(tree.arrays)
    for number in tree.leaf_info.present:
        # Arrays may be on several devices, and a library creates new ones on a single one.
        with library.computation_context(arrays[number]):
            arrays[number] = finite_or_zero(library.xp, arrays[number])
    return tree._replace(arrays=arrays)


def _raise_if_nonfinite(tree: OpenedTree, plan: Plan, finite: Flags) -> None:
    """Raise if the gradients are not finite, naming the leaves."""
    if plan.space.backend.traced(finite):
        msg = (
            "nonfinite='raise' has to read the norm, and code that is being compiled or "
            "transformed has no values to read: use 'propagate', 'skip' or 'zero' there, and "
            "read report.finite outside"
        )
        raise TypeError(msg)

    if bool(finite):
        return

    # Only a step that fails pays for reading all elements.
    xp = tree.backend.xp
    bad = [
        tree.expression(number)
        for number in tree.leaf_info.present
        if not bool(xp.all(xp.isfinite(tree.arrays[number])))
    ]
    if not bad:
        msg = (
            "the gradients are finite, but their norm is out of its dtype's range, or gradients on "
            "another device are not finite"
        )
        raise NonFiniteError(msg)

    more = len(bad) - MAX_NAMED_LEAVES
    msg = f"NaN or ∞ in {', '.join(bad[:MAX_NAMED_LEAVES])}"
    raise NonFiniteError(f"{msg} and {more} more" if more > 0 else msg)


def state_where(flag: Any, new: Any, old: Any, *, expected: bool = True) -> Any:
    """Return the new state if a flag is as expected, else the old state.

    Its arrays are on the devices of the new state.
    """
    arrays: list[Any] = optree.tree_leaves(new)
    if not arrays:
        return new
    with library_of(arrays[0]).computation_context(arrays[0]):
        return _choose_state(flag, new, old, expected=expected)


def _choose_state(flag: Any, new: Any, old: Any, *, expected: bool = True) -> Any:
    """Implement `state_where`, within the computation context of a step."""
    arrays: list[Any] = optree.tree_leaves(new)
    if not arrays:
        return new
    # Where the host reads the flag, `where` would copy the state for nothing.
    backend = library_of(arrays[0])
    if isinstance(flag, (bool, np.bool_, np.ndarray)) or backend.readable(flag):
        return new if bool(flag) is expected else old

    def choose(new: Any, old: Any) -> Any:
        flag_here = backend.to_device_of(new, flag)
        old_here = backend.to_device_of(new, old)
        if expected:
            return backend.xp.where(flag_here, new, old_here)
        return backend.xp.where(flag_here, old_here, new)

    return optree.tree_map(choose, new, old)


def _is_skipped(
    plan: Plan, measured: Measured, factors: Sequence[Factors], step_finite: Flags | None
) -> Flags:
    """Return whether a curve that rejects norms, or the policy ``"skip"``, skips the whole step.

    ``step_finite`` is ``None`` with other policies.
    """
    xp = plan.space.xp
    # Without absent rows, a step is skipped if all factors are 0. The policy "skip" makes those of
    # a non-finite step 0, too.
    complete = plan.collectives is None and not any([block.absent for block in plan.blocks])
    if complete and factors and not any([0 in factor.shape for factor in factors]):
        return plan.space.all([xp.equal(factor, 0.0) for factor in factors])

    present: Sequence[Any] = measured.present or [None] * len(factors)
    rejected = []
    none_rejected = []
    for of_block, block, has_gradient in zip(factors, plan.blocks, present, strict=True):
        is_zero = xp.equal(of_block, 0.0)
        # Also true for a block without norms, so that an empty block skips nothing.
        none_rejected.append(xp.logical_not(xp.any(is_zero)))
        # An absent norm is 0 and has the factor 1: without this it would count as a kept one.
        absent = find_absent(plan, block.absent, has_gradient)
        if absent is not None:
            shape = tuple(absent.shape) + (1,) * (len(is_zero.shape) - 1)
            is_zero = is_zero | xp.reshape(absent, shape)

        rejected.append(is_zero)

    flags = [plan.space.all(rejected), plan.space.all(none_rejected)]
    if plan.collectives is not None:
        flags = plan.collectives.true_in_all_shards(flags)
    all_rejected, nothing_rejected = flags
    skipped = all_rejected & xp.logical_not(nothing_rejected)
    if step_finite is not None:
        skipped = xp.logical_not(step_finite) | skipped
    return skipped
