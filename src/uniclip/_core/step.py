# SPDX-License-Identifier: MIT
"""One step of a rule: open, plan, measure, limit, factor.

`run_step` asks the lane of a backend first, which takes what nearly every call is. The general way is
in the order in which it runs, below it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from uniclip._core.apply import FastStepResult, StepResult, multiply_in_place
from uniclip._core.collectives import Loss, raise_if_kept_axes, reduction_of, with_reduced_library
from uniclip._core.measure import Inputs, Measured, measure, zero_norms
from uniclip._core.plan import Plan, plan_of, raise_if_rows
from uniclip._core.tree import Opened, flatten_known, open_tree, with_params
from uniclip._errors import NonFiniteError, check_step_arguments, real, summarize
from uniclip._types import Step
from uniclip.backends import MET, Backend, backend_of, library_of
from uniclip.backends.arrays import broadcasts, check_shape
from uniclip.backends.base import (
    HOST,
    LIBRARY,
    NUMPY,
    TRACED,
    FastResult,
    cast,
    fast_numbers,
    finite_or_zero,
    products_by,
)
from uniclip.curves import RejectAbove, hard, never_amplifies, rejects
from uniclip.limits import Constant, Context, NoState, PerGroup, Relative
from uniclip.limits.base import Rows
from uniclip.report import StepValues

if TYPE_CHECKING:
    from uniclip.rule import Choices

NUMBERS = (float, int, np.float32, np.bool_)
"""The types that are a limit by themselves (float64 is a float); longdouble is wider."""
_NAMED = 5
"""The number of leaves named in an error."""


def run_step(
    rule: Choices,
    grads: Any,
    state: Any,
    step: Step = Step(),  # noqa: B008 - it never changes
    max_norm: Any = None,
) -> StepResult | FastStepResult:
    """Ask the lane of a backend, which takes what nearly every call is.

    Go the general way for all else.

    In the lane the leaves are clipped when this returns; else when the decision is asked for them.

    Parameters
    ----------
    rule : Rule
    grads : tree
    state : tree of arrays
    step : Step
    max_norm : float or 0-d array, optional
        A constant limit in the place of the rule's.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `uniclip.clip`.
    """
    limit = rule.constant if max_norm is None else max_norm
    single_process = all(
        [
            value is None
            for value in (step.params, step.all_reduce, step.loss, step.norm, step.shared)
        ]
    )
    takes_fast_path = rule.simple and single_process and type(limit) in {float, int}
    if takes_fast_path:
        leaves, spec = flatten_known(grads)
        first = next((leaf for leaf in leaves if leaf is not None), None)
        backend = None if first is None else MET.get(type(first)) or backend_of(first)
        fast_path = (
            None if backend is None else backend.fast_path(leaves, limit, in_place=step.in_place)
        )
        if backend is not None and fast_path is not None:
            return FastStepResult(rule, backend, spec.unflatten, fast_path, state)
    tree = open_tree(grads, in_place=step.in_place)
    if takes_fast_path and tree.wrapped and not tree.shards:
        fast_path = fast_path_of_storage(tree, limit)
        if fast_path is not None:
            return FastStepResult(rule, tree.backend, tree.spec.unflatten, fast_path, state)
    return run_general_step(rule, tree, state, step, limit)


def fast_path_of_storage(tree: Opened, limit: float) -> FastResult | None:
    """Return what the lane comes to beside odd leaves; ``None`` if it takes more."""
    with tree.backend.computation_context(tree.first):
        fast_path = tree.backend.fast_path(
            tree.arrays, math.inf if tree.in_place else limit, in_place=False
        )
        if fast_path is None or not tree.in_place:
            return fast_path and fast_path._replace(leaves=tree.restore_leaves(fast_path.leaves))
        numbers = fast_numbers(fast_path.norm, limit)
        if numbers is None:
            return None
        norm, limit, factor = numbers
        if factor != 1:
            present = list(tree.leaf_info.present)
            arrays = [tree.arrays[number] for number in present]
            multiply_in_place(tree, present, products_by(arrays, factor, in_place=True))
        return FastResult(norm, limit, factor, tree.leaves, tree.leaf_info.device)


def run_general_step(
    rule: Choices, tree: Opened, state: Any, step: Step, constant: Any
) -> StepResult:
    """Plan which leaves share a norm, and whether the host reads the norms; then decide."""
    reduction, params = None, None
    if (
        step.params is not None
        or step.all_reduce is not None
        or step.loss is not None
        or "params" in rule.limit.needs
    ):
        check_step_arguments(None if isinstance(step.loss, Loss) else step.loss, step.params)
        raise_if_kept_axes(rule.scope, step.all_reduce)
        tree, params = with_params(rule, with_reduced_library(tree, step.all_reduce), step)
    leaf_info = tree.leaf_info
    # Nearly always nothing else comes in that could be traced or be unreadable.
    if type(constant) is float and step.norm is None and params is None and not rule.holds_arrays:
        mode = leaf_info.backend.mode(leaf_info)
    else:
        values = [constant, step.norm, *getattr(rule.limit, "constants", ())]
        values += optree.tree_leaves(state) if rule.stateful and not rule.limits_checked else []
        others = (step.loss, state if rule.stateful else None)
        mode = _mode_beside(rule, [tree] if params is None else [tree, params], values, others)
    if step.all_reduce is not None or step.shared is not None:
        reduction = reduction_of(
            None if mode == TRACED else rule.agreed, step.all_reduce, step.shared
        )
    if params is not None and mode != HOST:
        detached = [
            array if array is None else leaf_info.backend.detach(array) for array in params.arrays
        ]
        params = params._replace(arrays=detached)
    plan = plan_of(rule, tree, mode, reduction, params)
    if plan.shapes is not None and tuple(getattr(constant, "shape", None) or ()):
        plan = plan.with_blocks_apart()
    first = tree.first
    if first is None and params is not None:
        # The parameters say on which device norms lie.
        first = ([leaf for leaf in params.leaves if leaf is not None] or [None])[0]
    with leaf_info.backend.computation_context(first):
        # Now it is known how many there are.
        if plan.collectives is not None and plan.collectives.compare(rule):
            plan = plan_of(rule, tree, mode, reduction, params)
        return _run_measured(Inputs(rule, plan, tree, params, step, constant), state)


def _mode_beside(rule: Choices, trees: list[Opened], values: list[Any], others: Any) -> int:
    """Return the mode of a step on gradients, and parameters, given values to look at,
    and what else may be traced.
    """
    leaf_info, backend = [tree.leaf_info for tree in trees], trees[0].backend
    mode = (
        TRACED
        if any([tree.traced for tree in leaf_info])
        else backend.mode(leaf_info[0], (values, others))
    )
    if mode != HOST:
        return mode
    reads = all([tree.reads for tree in leaf_info]) and all(
        [_viewable(backend, value) for value in values]
    )
    return HOST if reads and not rule.holds_arrays else LIBRARY


def _viewable(backend: Backend, value: Any) -> bool:
    """Whether an argument is a number, or an array that the host reads."""
    if not hasattr(value, "dtype") or isinstance(value, NUMPY):
        return True
    library = backend_of(value)  # a tree without gradients is of none
    return (
        backend.as_numpy(backend.xp.asarray(value)) if library is None else library.as_numpy(value)
    ) is not None


def _run_measured(inputs: Inputs, state: Any) -> StepResult:
    """Measure, ask the limit and the curve, and apply the policy for NaN and ∞."""
    rule, plan, tree = inputs.rule, inputs.plan, inputs.tree
    if rule.nonfinite == "zero" and not plan.math.host:
        tree = _zero_nonfinite(plan, tree)
    measured, step_finite = measure(inputs, tree), None
    if rule.nonfinite == "zero" and plan.math.host:
        tree, measured = _measure_without_nonfinite(inputs, measured)
    norms = measured.norms
    # A limit gets NaN for ∞, since a limit of ∞ would not clip. The derivative stays 1. A constant
    # limit looks at no norm.
    finite_norms = measured.finite_norms or norms
    if measured.finite_norms is None and (inputs.constant is None or plan.math.on_device):
        finite_norms = [n + (n - n) for n in norms]
    if rule.decides:
        step_finite = plan.math.finite(norms, measured.entries_finite, finite_norms)
        step_finite = (
            step_finite
            if plan.collectives is None
            else plan.collectives.true_in_all_shards([step_finite])[0]
        )
    if rule.nonfinite == "raise":
        _raise_if_nonfinite(tree, plan, step_finite)
    limits, new, thresholds = _compute_limits(inputs, measured, finite_norms, state)
    rows = zip(norms, finite_norms, limits, strict=True)
    factors = [_compute_factors(inputs, *row, step_finite) for row in rows]
    if rule.stateful:  # NaN never enters a state
        new = state_where(step_finite, new, state)
    skipped = _is_skipped(inputs, measured, factors, step_finite)
    if plan.shapes is not None:
        norms, limits, factors = map(plan.split_blocks, (norms, limits, factors))
        thresholds = thresholds and plan.split_blocks(thresholds)
    values = StepValues(plan, norms, limits, factors, thresholds, measured.entries_finite, skipped)
    return StepResult(rule, tree, plan, values, new)


def _zero_nonfinite(plan: Plan, gradients: Opened) -> Opened:
    """Return gradients with 0 for entries that are not finite."""
    library, arrays = plan.math.library, list(gradients.arrays)
    for number in gradients.leaf_info.present:
        with library.computation_context(arrays[number]):
            arrays[number] = finite_or_zero(library.xp, arrays[number])
    return gradients._replace(arrays=arrays)


def _measure_without_nonfinite(inputs: Inputs, measured: Measured) -> tuple[Opened, Measured]:
    """Return gradients with 0 for entries that are not finite, and what is measured then.

    The host reads whether there are some, and reads the gradients twice only then.
    """
    # Where processes hold parts, all of them measure again, or none.
    if measured.entries_finite is None:
        finite = inputs.plan.math.finite(measured.norms, None)
        measured = measured._replace(entries_finite=finite)
    if bool(measured.entries_finite):
        return inputs.tree, measured
    zeroed = _zero_nonfinite(inputs.plan, inputs.tree)
    again = inputs._replace(tree=zeroed, params=None, step=inputs.step._replace(loss=None))
    return zeroed, measured._replace(norms=measure(again, zeroed).norms)


# How large norms may be.


def _compute_limits(
    inputs: Inputs, measured: Measured, norms: list[Any], state: Any
) -> tuple[list[Any], Any, list[Any] | None]:
    """Return the limits of each block, numbers or arrays, the next state and the thresholds;
    validate them.
    """
    rule, plan, tree = inputs.rule, inputs.plan, inputs.tree
    limit, constant = rule.limit, inputs.constant
    if tree.wrapped:
        _raise_if_limits_by_row(inputs)
    if constant is not None:  # which needs no context
        return [_check_limits(plan, constant, n, fits=False) for n in norms], state, None
    if limit.stateful:
        if not tree.leaf_info.present and plan.collectives is None:
            return [math.inf] * len(norms), state, None  # a step without gradients changes no state
        _check_state(rule, plan, state)
    states = [state] if len(norms) == 1 else state if limit.stateful else [state] * len(norms)
    contexts = _make_contexts(inputs, measured, norms)
    answers = [
        _ask_limit(inputs, context, old) for context, old in zip(contexts, states, strict=True)
    ]
    limits = [
        _check_limits(plan, limits_of_block, n, fits=rule.limits_checked)
        for (limits_of_block, _), n in zip(answers, norms, strict=True)
    ]
    thresholds = None
    if any([context.threshold is not None for context in contexts]):
        thresholds = [
            limits_of_block if context.threshold is None else _check_threshold(plan, context)
            for context, limits_of_block in zip(contexts, limits, strict=True)
        ]
    if not limit.stateful:
        return limits, state, thresholds
    new = [old if new is None else new for (_, new), old in zip(answers, states, strict=True)]
    return limits, new[0] if len(new) == 1 else tuple(new), thresholds


def _raise_if_limits_by_row(inputs: Inputs) -> None:
    """Refuse a limit, or counts, with a value for each row of a sparse leaf."""
    rule, plan, constant = inputs.rule, inputs.plan, inputs.constant
    of_groups = (
        dict(rule.limit.limits) if constant is None and isinstance(rule.limit, PerGroup) else {}
    )
    for number in inputs.tree.leaf_info.wrapped:
        block, row = plan.places[number]
        kept, label = plan.blocks[block].kept, plan.blocks[block].labels[row]
        limit = of_groups.get(label) if of_groups else rule.limit if constant is None else constant
        value = (
            limit.value
            if isinstance(limit, Constant)
            else limit.counts
            if isinstance(limit, Relative)
            else limit
        )
        # A compiler asks no number.
        shape = () if isinstance(value, NUMBERS) else getattr(value, "shape", ())
        if kept and len(shape) >= kept and shape[-kept] != 1:
            raise_if_rows(inputs.tree, plan.axes, rule, "has a limit")


def _make_contexts(inputs: Inputs, measured: Measured, norms: list[Any]) -> list[Context]:
    """Return the context of each block."""
    plan, unknown = inputs.plan, [None] * len(norms)
    columns = [values or unknown for values in (measured.params, measured.sizes, measured.present)]
    rows = [
        Rows(n, block.labels, of_params, size, block.absent if present is None else (), present)
        for n, of_params, size, present, block in zip(
            norms, *columns, plan.norm_blocks, strict=True
        )
    ]
    needs, apart = (
        inputs.rule.limit.needs,
        plan.collectives is not None and plan.collectives.divided,
    )
    return [
        Context(plan.math.backend, rows, n, needs, measured.loss, apart=apart)
        for n in range(len(rows))
    ]


def first_state(rule: Choices, tree: Opened, plan: Plan) -> Any:
    """Return the state before the first step."""
    rows = [
        Rows(n, block.labels, absent=block.absent)
        for n, block in zip(zero_norms(plan, tree), plan.blocks, strict=True)
    ]
    contexts = [Context(plan.math.library, rows, number) for number in range(len(rows))]
    states = [rule.limit.init(context.norms, context) for context in contexts]
    return states[0] if len(states) == 1 else tuple(states)


def _ask_limit(inputs: Inputs, context: Context, state: Any) -> tuple[Any, Any]:
    """Return the limits of a block's norms, and its next state,
    ``None`` if all its gradients are absent.
    """
    limit, math_ = inputs.rule.limit, inputs.plan.math
    if (
        limit.stateful and context.absent and all(context.absent)
    ):  # the shape of its norms is unknown
        return math.inf, None
    old = optree.tree_map(partial(math_.recall, context.norms), state)
    try:
        # Not `limit(...)`: PyTorch 2.11 and 2.12 compile no call of an object that is made in
        # compiled code.
        answer = limit.__call__(context.norms, old, context)
    except (TypeError, AttributeError, RuntimeError) as error:
        _raise_if_numpy(inputs.plan, limit, error)
        raise
    if not (isinstance(answer, tuple) and len(answer) == 2):
        msg = (
            f"{summarize(limit)} must return (limits, state), the limits and the next state, got "
            f"{summarize(answer)}"
        )
        raise TypeError(msg)
    limits, new = answer
    if not hasattr(limits, "dtype"):
        shape = tuple(context.norms.shape)
        wanted = (
            f"a number or an array of real numbers that broadcasts against norms of shape {shape}"
        )
        limits = real(f"the limit of {summarize(limit)}", limits, wanted)
    if not limit.stateful:
        return limits, state
    absent = _find_absent(inputs.plan, context.absent, context.present)
    if absent is not None and isinstance(limit, PerGroup):
        rows = enumerate(zip(new, old, strict=True))
        new = tuple(
            [_restore_absent_rows(inputs.plan, *row, absent[n : n + 1, ...]) for n, row in rows]
        )
    elif absent is not None:
        new = _restore_absent_rows(inputs.plan, new, old, absent)
    keep = (lambda a: math_.to_library(np.asarray(a))) if math_.host else math_.library.detach
    return limits, optree.tree_map(keep, new)


def _raise_if_numpy(plan: Plan, choice: Any, error: Exception) -> None:
    """Say why a limit or a curve got NumPy's arrays, if it failed on them."""
    if plan.math.backend is not plan.math.library and "numpy" in str(error):
        msg = (
            f"{summarize(choice)}: {error}. Where the host can read the gradients, norms are NumPy's "
            "arrays: use the functions of context.xp in a limit, of xp in a curve, not those of "
            "one library"
        )
        raise TypeError(msg) from error


def _find_absent(plan: Plan, absent: Sequence[bool], present: Any) -> Any:
    """Return for each row of a block whether all its gradients are absent, ``None`` if none is."""
    if present is not None:
        return plan.math.xp.logical_not(present)
    return plan.math.constants([np.asarray(absent)])[0] if absent else None


def _restore_absent_rows(plan: Plan, new: Any, old: Any, absent: Any) -> Any:
    """Return the new state with the old rows of groups whose gradients are all absent."""
    xp, count = plan.math.xp, absent.shape[0]

    def row_by_row(a: Any, b: Any) -> Any:
        rows = len(a.shape) > 0 and a.shape[0] == count
        if not rows and count > 1:
            return a  # shared by all rows
        flags = xp.reshape(absent, (count,) + (1,) * (len(a.shape) - 1) if rows else ())
        return xp.where(plan.math.backend.to_device_of(a, flags), b, a)

    return optree.tree_map(row_by_row, new, old)


def _check_state(rule: Choices, plan: Plan, state: Any) -> None:
    """Validate a state: it must be of this rule, and for this number of norms."""
    limit, blocks = rule.limit, plan.blocks
    known = type(limit).__module__.startswith("uniclip.limits.")  # whose states are all of one kind
    shards = [state] if len(blocks) == 1 else state
    count = isinstance(shards, (list, tuple)) and len(shards) == len(blocks)
    kind = isinstance(limit, PerGroup) or (
        count and all(hasattr(shard, "_fields") for shard in shards)
    )
    if state is None or isinstance(state, NoState) or (known and not kind):
        msg = (
            f"state must be what rule.init(grads) returns, or an update before, for {summarize(rule)}, "
            f"got {summarize(state)}"
        )
        raise TypeError(msg)
    for shard, block in zip(shards, blocks, strict=True) if known else ():
        rows = (
            [len(shard)]
            if isinstance(limit, PerGroup)
            else [array.shape[0] for array in shard if len(array.shape)]
        )
        if rows and rows[0] != len(block.groups):
            msg = (
                f"the state of {summarize(rule)} is for {rows[0]} norms, but there are "
                f"{len(block.groups)}: it was made for other gradients"
            )
            raise ValueError(msg)


def _check_threshold(plan: Plan, context: Context) -> Any:
    """Return a threshold, the largest number of the norms' dtype where it is beyond;
    refuse wrong shapes.
    """
    threshold: Any = context.threshold
    check_shape("threshold", threshold, context.norms)
    return plan.math.at_most_largest(threshold)


def _check_limits(plan: Plan, value: Any, norms: Any, *, fits: bool) -> Any:
    """Clip limits to the range of the norms' dtype; refuse wrong shapes.

    Negative limits and NaN are refused where they can be read. ``fits`` tells that none is
    negative.
    """
    xp, backend, largest = plan.math.xp, plan.math.backend, plan.math.largest_norm
    if isinstance(value, NUMBERS):
        wrong = not value >= 0 and not (
            backend.readable(norms) and not bool(xp.any(xp.isfinite(norms)))
        )
        # NaN stays NaN. PyTorch 2.11 and 2.12 compile `min` anew for each number.
        value = largest if value > largest else value  # noqa: FURB136
    else:
        if not isinstance(value, NUMPY):
            value = plan.math.read_foreign(value)
        if plan.math.host and not isinstance(value, NUMPY):
            value = plan.math.library.as_numpy(plan.math.library.xp.asarray(value))
        value = backend.to_device_of(norms, xp.asarray(value, dtype=norms.dtype))
        check_shape("limit", value, norms)
        # The limit of a norm that is not finite need not be a number.
        read = backend.readable(value) and backend.readable(norms)
        wrong = (
            read
            and not bool(xp.all(value >= 0))
            and bool(xp.any(xp.logical_not(value >= 0) & xp.isfinite(norms)))
        )
        if isinstance(value, np.ndarray) or fits:
            value = plan.math.at_most_largest(value)
        else:
            value = xp.clip(value, 0, largest)
    if wrong:
        shown = summarize(value) if getattr(value, "shape", ()) else value
        msg = f"limit must be 0 or more (0 zeroes the gradients), got {shown}"
        raise ValueError(msg)
    return value


# What the curve makes of norms and limits.


def _compute_factors(
    inputs: Inputs, norms: Any, finite_norms: Any, limits: Any, step_finite: Any
) -> Any:
    """Return the curve's factors: 1 where nothing is limited,
    NaN (or the policy's 0) where either is not finite.

    One that its dtype, or that of a leaf, cannot hold is the largest number, or 0.
    ``finite_norms`` are NaN where a norm is not finite, but may be the norms under a constant
    limit. A limit equal to the largest number of the norms' dtype limits nothing; a constant number
    ∞ leaves even NaN alone.
    """
    rule, plan, constant = inputs.rule, inputs.plan, inputs.constant
    xp, backend, number = plan.math.xp, plan.math.backend, isinstance(limits, NUMBERS)
    bounded = isinstance(rule.curve, RejectAbove)  # whatever the limit
    # to compilers no symbol is ∞
    if isinstance(constant, NUMBERS) and constant > sys.float_info.max and not bounded:
        factors = xp.ones_like(norms)
    elif number and limits >= plan.math.largest_norm and not bounded:
        factors = xp.ones_like(norms) + (norms - norms)
    else:
        # A compiler divides by a constant as it multiplies by its reciprocal, which has to be a
        # normal number.
        small = number and 0 < limits <= plan.math.largest_norm / 4
        plain = _divide_by_larger if small else _divide_where_limited
        smallest = limits
        limits = cast(xp, xp.asarray(limits, dtype=norms.dtype) if number else limits, norms.dtype)
        if rule.curve is hard and plan.math.mode == TRACED:
            factors = backend.fast_values(plain, _hard)(norms, limits)
        elif plan.math.on_device and small and (rule.curve is hard or bounded):
            # In half as many kernels as the curve.
            factors = limits / xp.clip(finite_norms, smallest, None)
            if bounded:
                factors = xp.where(finite_norms > rule.curve.bound, 0.0, factors)
        elif rule.curve is hard and plan.math.on_device:
            factors = _divide_where_above(xp, finite_norms, limits)
        else:
            factors = _ask_curve(rule, plan, norms, limits) + (norms - norms)
            # `hard` propagates NaN. The limits of uniclip are numbers if the norms are.
            checked = rule.limits_checked and constant is None
            if not (number or rule.curve is hard or checked):
                factors = factors + (limits - limits)
    if not rule.zeroes:
        return factors
    if rule.nonfinite == "skip":
        kept = backend.to_device_of(norms, step_finite)
    else:
        kept = plan.math.each_finite(norms, finite_norms)
    return xp.where(kept, factors, 0.0)


def _hard(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the factor of the curve `hard`, NaN where the norm is not finite."""
    return hard(xp, norm, limit) + (norm - norm)


def _divide_by_larger(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the same by fewer operations, for limits above 0.

    The division is last, or XLA makes it in each user.
    """
    return limit / (xp.maximum(norm, limit) + (norm - norm))


def _divide_where_limited(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the same for limits that may be 0, or so large that nothing is limited,
    where it divides 1 by 1.
    """
    within = norm <= limit
    return xp.where(within, 1.0, limit) / (xp.where(within, 1.0, norm) + (norm - norm))


def _divide_where_above(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the factor of the curve `hard` for norms that are NaN where they are not finite."""
    within = norm <= limit
    return xp.where(within, 1.0, limit) / xp.where(within, 1.0, norm)


def _ask_curve(rule: Choices, plan: Plan, norms: Any, limits: Any) -> Any:
    """Return the factors of a curve, validated, and 1 where nothing is limited."""
    xp = plan.math.xp
    curve: Any = rule.curve
    # As in `_ask_limit`. Most curves are functions, whose `__call__` no compiler knows.
    call = curve.__call__ if hasattr(curve, "__dataclass_fields__") else curve
    try:
        factors = call(xp, norms, limits)
    except (TypeError, AttributeError, RuntimeError) as error:
        _raise_if_numpy(plan, curve, error)
        raise
    if not (
        isinstance(factors, NUMBERS)
        or (hasattr(factors, "dtype") and broadcasts(factors.shape, norms.shape))
    ):
        wanted = f"a number, or an array like the norms, of shape {tuple(norms.shape)}"
        msg = f"the factor that {summarize(curve)} returned must be {wanted}, got {summarize(factors)}"
        raise TypeError(msg)
    factors = xp.asarray(factors, dtype=norms.dtype)
    if never_amplifies(curve):
        return factors
    factors = xp.where(factors > plan.math.largest_factor, plan.math.largest_factor, factors)
    limits = plan.math.backend.to_device_of(norms, limits)  # of which a condition must not be read
    return xp.where(limits >= plan.math.largest_norm, xp.ones_like(factors), factors)


def state_where(flag: Any, new: Any, old: Any, *, expected: bool = True) -> Any:
    """Return the new state where a flag is as expected, else the old one,
    on the device of the new one.
    """
    arrays: list[Any] = optree.tree_leaves(new)
    if not arrays:
        return new
    backend = library_of(arrays[0])
    if isinstance(flag, (bool, np.bool_, np.ndarray)) or backend.readable(flag):
        return new if bool(flag) is expected else old

    def choose(new: Any, old: Any) -> Any:
        flag_there, old_there = (backend.to_device_of(new, array) for array in (flag, old))
        pair = (new, old_there) if expected else (old_there, new)
        return backend.xp.where(flag_there, *pair)

    with backend.computation_context(arrays[0]):
        return optree.tree_map(choose, new, old)


def _is_skipped(inputs: Inputs, measured: Measured, factors: list[Any], step_finite: Any) -> Any:
    """Return whether the whole step is skipped, ``None`` if the rule skips none."""
    rule, plan, xp = inputs.rule, inputs.plan, inputs.plan.math.xp
    every_row_counts = plan.collectives is None and not any([b.absent for b in plan.blocks])
    some = factors and not any([0 in factor.shape for factor in factors])
    if rejects(rule.curve) and every_row_counts and some:
        # The policy "skip" rejects all norms of a step that is not finite, too.
        return plan.math.all([xp.equal(factor, 0.0) for factor in factors])

    skipped = None
    if rule.nonfinite == "skip":
        skipped = xp.logical_not(step_finite)
    if not rejects(rule.curve):
        return skipped
    rows, none = [], []
    unknown = [None] * len(factors)
    blocks = zip(factors, plan.blocks, measured.present or unknown, strict=True)
    for factor, block, present in blocks:
        dropped = xp.equal(factor, 0.0)
        none.append(xp.logical_not(xp.any(dropped)))  # true also where there is no norm
        absent = _find_absent(plan, block.absent, present)
        if absent is not None:
            shape = tuple(absent.shape) + (1,) * (len(dropped.shape) - 1)
            dropped = dropped | xp.reshape(absent, shape)
        rows.append(dropped)
    flags = [plan.math.all(rows), plan.math.all(none)]
    if plan.collectives is not None:
        flags = plan.collectives.true_in_all_shards(flags)
    all_gone, none_gone = flags
    none_left = all_gone & xp.logical_not(none_gone)
    return none_left if skipped is None else skipped | none_left


def _raise_if_nonfinite(tree: Opened, plan: Plan, finite: Any) -> None:
    """Raise if the gradients are not finite, naming the leaves."""
    if plan.math.backend.traced(finite):
        msg = (
            "nonfinite='raise' has to look at the norm, and code that is being compiled or "
            "transformed has no values to look at: use 'propagate', 'skip' or 'zero' there, and "
            "look at report.finite outside"
        )
        raise TypeError(msg)
    if not bool(finite):
        xp, arrays, present = tree.backend.xp, tree.arrays, tree.leaf_info.present
        bad = [
            tree.place(number)
            for number in present
            if not bool(xp.all(xp.isfinite(arrays[number])))
        ]
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        msg = f"NaN or ∞ in {', '.join(bad[:_NAMED])}{more}"
        if not bad:
            msg = (
                "the gradients are finite, but their norm is out of its dtype's range, or another "
                "device's are not"
            )
        raise NonFiniteError(msg)
