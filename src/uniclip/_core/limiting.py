# SPDX-License-Identifier: MIT
"""Ask the limit of a rule how large norms may be, and validate its limits and its state.

A norm that is not finite is NaN here: with a norm of ∞, a limit could return a limit of ∞.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from uniclip._core.blocks import Measured
from uniclip._core.measure import StepInputs, zero_norms
from uniclip._core.plan import Plan, raise_if_rows
from uniclip._core.tree import OpenedTree
from uniclip._errors import real, summarize
from uniclip._types import Norms, Tensor
from uniclip.backends.arrays import check_shape
from uniclip.backends.base import NUMPY
from uniclip.limits import Constant, Context, Limit, NoState, PerGroup, Relative

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

NUMBERS = (float, int, np.float32, np.bool_)
"""The types of a limit that is a plain number.

``np.float64`` is a float. A longdouble, which is wider, is converted as arrays are.
"""


def first_state(rule: RuleSpec, tree: OpenedTree, plan: Plan) -> Any:
    """Return the state before the first step."""
    norms = zero_norms(plan, tree)
    zeros = Measured(norms, norms)
    states = []
    for number in range(len(plan.blocks)):
        context = Context(plan.space.library, plan.blocks, zeros, number)
        state: Any = rule.limit.init(context.norms, context)
        _check_arrays(rule, plan, optree.tree_leaves(state))
        states.append(state)
    return states[0] if len(states) == 1 else tuple(states)


def find_limits(
    plan: Plan, inputs: StepInputs, measured: Measured
) -> tuple[list[Any], list[Any] | None, Any]:
    """Return the limits of each block (numbers or arrays), the thresholds or ``None``, and the next
    state.
    """
    constant = inputs.constant
    if constant is None:
        return _ask_limit(inputs.rule, plan, inputs.state, measured)
    limits = [_check_limits(plan, constant, norms) for norms in measured.finite_norms]
    return limits, None, inputs.state


def _ask_limit(
    rule: RuleSpec, plan: Plan, state: Any, measured: Measured
) -> tuple[list[Any], list[Any] | None, Any]:
    """Return what `find_limits` returns, for a limit that is no constant."""
    limit = rule.limit
    norms = measured.finite_norms
    # A step without gradients changes no state.
    if limit.stateful and plan.collectives is None and max(plan.order, default=-1) < 0:
        return [math.inf] * len(norms), None, state
    states = [state] * len(norms)
    if limit.stateful:
        _check_state(rule, plan, state)
        states = [state] if len(norms) == 1 else state

    sharded = plan.collectives is not None and plan.collectives.norms_sharded
    make = partial(Context, plan.space.backend, plan.norm_blocks, measured)
    contexts = []
    limits = []
    new_states = []
    for number, old in zip(range(len(norms)), states, strict=True):
        context = make(number, limit.needs, norms_sharded=sharded)
        contexts.append(context)
        of_block, new = _ask_about_block(rule, plan, context, old)
        limits.append(_check_limits(plan, of_block, context.norms, rule))
        new_states.append(new)

    thresholds = None
    if any([context.threshold is not None for context in contexts]):
        check = partial(_check_threshold, plan, in_range=limit.in_range)
        thresholds = list(map(check, contexts, limits))

    if limit.stateful:
        state = new_states[0] if len(new_states) == 1 else tuple(new_states)
    return limits, thresholds, state


def _check_threshold(plan: Plan, context: Context, limits: Any, *, in_range: bool) -> Any:
    """Return the thresholds of a block, clipped to the range of the norms' dtype.

    If the limit has set none for this block, they are its limits.

    Raises
    ------
    TypeError, ValueError
        If they have the wrong shape.
    """
    if context.threshold is None:
        return limits
    check_shape("threshold", context.threshold, context.norms)
    return context.threshold if in_range else plan.space.at_most_largest(context.threshold)


def _ask_about_block(rule: RuleSpec, plan: Plan, context: Context, state: Any) -> tuple[Any, Any]:
    """Return the limits of a block's norms, and its next state."""
    limit = rule.limit
    space = plan.space
    # Without any gradient, the shape of the norms is unknown, and the block keeps its state.
    if limit.stateful and context.absent and all(context.absent):
        return math.inf, state

    # A state may come from a file or another device.
    old = optree.tree_map(partial(space.state_to_norms, context.norms), state)
    try:
        # Not `limit(...)`: PyTorch 2.11 and 2.12 do not compile a call of an object that is made
        # in compiled code, but do compile its `__call__`.
        returned = limit.__call__(context.norms, old, context)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise_if_numpy(plan, limit, error)
        raise

    if not (isinstance(returned, tuple) and len(returned) == 2):
        msg = (
            f"{summarize(limit)} must return (limits, state), the limits and the next state, got "
            f"{summarize(returned)}"
        )
        raise TypeError(msg)

    limits, new = returned
    if not hasattr(limits, "dtype"):
        wanted = (
            "a number or an array of real numbers that broadcasts against norms of shape "
            f"{tuple(context.norms.shape)}"
        )
        limits = real(f"the limit of {summarize(limit)}", limits, wanted)

    if not limit.stateful:
        return limits, state
    return limits, _keep_state(rule, plan, context, new, old)


def _keep_state(rule: RuleSpec, plan: Plan, context: Context, new: Any, old: Any) -> Any:
    """Return the next state of a block as detached arrays of the library."""
    space = plan.space
    # The states of uniclip's own limits keep their shapes.
    if not rule.limits_checked:
        _check_shapes(rule, plan, new, old)

    # The norm of an absent group is 0, from which its state must not learn: it keeps its old rows.
    absent = find_absent(plan, context.absent, context.present)
    if absent is not None and isinstance(rule.limit, PerGroup):
        rows = []
        for number, (new_row, old_row) in enumerate(zip(new, old, strict=True)):
            is_absent = absent[number : number + 1, ...]
            rows.append(_restore_absent_rows(plan, new_row, old_row, is_absent))

        new = tuple(rows)
    elif absent is not None:
        new = _restore_absent_rows(plan, new, old, absent)

    if space.host:
        return optree.tree_map(lambda array: space.to_library(np.asarray(array)), new)
    return optree.tree_map(space.library.detach, new)


def find_absent(plan: Plan, absent: Sequence[bool], present: Any) -> Any:
    """Return flags of the rows of a block whose gradients are all absent, ``None`` if none is."""
    if present is not None:
        return plan.space.xp.logical_not(present)
    if not absent:
        return None
    [flags] = plan.space.constants([np.asarray(absent)])
    return flags


def _restore_absent_rows(plan: Plan, new: Any, old: Any, absent: Tensor) -> Any:
    """Return the new state with the old rows of groups whose gradients are all absent."""
    xp = plan.space.xp
    count = absent.shape[0]

    def restore(new: Tensor, old: Tensor) -> Tensor:
        has_rows = len(new.shape) > 0 and new.shape[0] == count
        # An array without rows is shared by all groups, of which others have gradients.
        if not has_rows and count > 1:
            return new
        shape = (count,) + (1,) * (len(new.shape) - 1) if has_rows else ()
        flags = plan.space.backend.to_device_of(new, xp.reshape(absent, shape))
        return xp.where(flags, old, new)

    return optree.tree_map(restore, new, old)


def raise_if_numpy(plan: Plan, choice: object, error: Exception) -> None:
    """Raise an error that names the fix, if a limit or a curve failed on NumPy's arrays.

    Users write limits with the functions of their framework, which refuse NumPy's arrays.
    """
    if plan.space.backend is not plan.space.library and "numpy" in str(error):
        msg = (
            f"{summarize(choice)}: {error}. If the host can read the gradients, norms are NumPy's "
            "arrays: use the functions of context.xp in a limit, and of xp in a curve, not those "
            "of one library"
        )
        raise TypeError(msg) from error


# Validate limits and states.


def _check_limits(plan: Plan, limits: Any, norms: Norms, rule: RuleSpec | None = None) -> Any:
    """Return limits in the range of the norms' dtype.

    With ``rule`` the limits are those that its limit has returned: built-in ones need no check, and
    some never leave the range. Without, they are a constant.

    Raises
    ------
    TypeError, ValueError
        If they have the wrong shape, or a limit that can be read is negative or NaN.
    """
    space = plan.space
    xp = plan.space.xp
    backend = plan.space.backend
    largest = space.largest_norm
    if isinstance(limits, NUMBERS):
        if not limits >= 0:
            # A limit computed from a norm that is not finite may be NaN.
            any_finite = not backend.readable(norms) or bool(xp.any(xp.isfinite(norms)))
            if any_finite:
                raise ValueError(_describe_negative(limits))

        # NaN stays NaN. PyTorch 2.11 and 2.12 compile `min` again for each number.
        return largest if limits > largest else limits  # noqa: FURB136

    limits = _check_array(plan, limits, norms)
    checked = rule is not None and rule.limits_checked
    if not (checked or isinstance(limits, np.ndarray)):
        return xp.clip(limits, 0, largest)
    # An accelerator starts a kernel for it.
    if space.on_device and rule is not None and rule.limit.in_range:
        return limits
    return space.at_most_largest(limits)


def _check_array(plan: Plan, limits: Any, norms: Norms) -> Any:
    """Return limits that are an array where the norms are; raise as `_check_limits`."""
    space = plan.space
    xp = plan.space.xp
    backend = plan.space.backend
    # A limit may be an array of another library, or be on another device.
    if not isinstance(limits, NUMPY):
        limits = space.read_foreign(limits)
    if space.host and not isinstance(limits, NUMPY):
        limits = space.library.as_numpy(space.library.xp.asarray(limits))
    limits = backend.to_device_of(norms, xp.asarray(limits, dtype=norms.dtype))
    check_shape("limit", limits, norms)
    if backend.readable(limits) and backend.readable(norms) and not bool(xp.all(limits >= 0)):
        wrong = xp.logical_not(limits >= 0) & xp.isfinite(norms)
        if bool(xp.any(wrong)):
            raise ValueError(_describe_negative(limits))
    return limits


def _describe_negative(limits: Any) -> str:
    shown = summarize(limits) if getattr(limits, "shape", ()) else limits
    return f"limit must be 0 or more (0 zeroes the gradients), got {shown}"


def raise_if_limits_by_row(rule: RuleSpec, plan: Plan, tree: OpenedTree, constant: Any) -> None:
    """Raise if a limit, or the counts of `Relative`, have a value for each row of a sparse leaf.

    The leaf stores other rows at each step, so that the values would go to the wrong rows.
    """
    of_groups: dict[Any, Any] = {}
    if constant is None and isinstance(rule.limit, PerGroup):
        of_groups = dict(rule.limit.limits)
    for number in tree.leaf_info.wrapped:
        block, row = plan.places[number]
        kept = plan.blocks[block].kept
        if not kept:
            continue

        limit: Any = rule.limit if constant is None else constant
        if of_groups:
            limit = of_groups.get(plan.blocks[block].labels[row])
        if isinstance(limit, Constant):
            limit = limit.value
        elif isinstance(limit, Relative):
            limit = limit.counts

        # torch.compile cannot look up attributes of a number. A length of 1 along the rows is one
        # value for all of them.
        shape = () if isinstance(limit, NUMBERS) else getattr(limit, "shape", ())
        if len(shape) >= kept and shape[-kept] != 1:
            raise_if_rows(tree, plan.axes, rule, "has a limit")


def _check_state(rule: RuleSpec, plan: Plan, state: Any) -> None:
    """Raise if a state is not of this rule, or has another number of norms."""
    limit = rule.limit
    blocks = plan.blocks
    states = [state] if len(blocks) == 1 else state
    # The states of uniclip's own limits are named tuples of arrays with a row for each norm.
    built_in = type(limit).__module__.startswith("uniclip.limits.")
    fits = True
    if built_in and not isinstance(limit, PerGroup):
        fits = isinstance(states, (list, tuple)) and len(states) == len(blocks)
        fits = fits and all([hasattr(of_block, "_fields") for of_block in states])

    if isinstance(state, NoState) and type(limit).init is Limit.init:
        msg = (
            f"{type(limit).__name__} is stateful, but has no first state; define "
            "init(self, norms, context) in the class, which returns it"
        )
        raise TypeError(msg)

    if state is None or isinstance(state, NoState) or not fits:
        msg = (
            "state must be what rule.init(grads) or the previous update returned, for "
            f"{summarize(rule)}, got {summarize(state)}"
        )
        raise TypeError(msg)

    if built_in:
        _check_rows(rule, plan, states)


def _check_arrays(rule: RuleSpec, plan: Plan, leaves: list[Any]) -> None:
    """Raise if a limit has other objects in its state than arrays of numbers or flags."""
    for leaf in leaves:
        is_flag = "bool" in str(getattr(leaf, "dtype", ""))
        if not (is_flag or isinstance(leaf, NUMPY) or plan.space.library.is_array(leaf)):
            msg = (
                f"the state of {summarize(rule.limit)} must be a tree of arrays of numbers, got "
                f"{summarize(leaf)}; for a number return norms * 0 + number, for a random key the "
                "integers that it consists of"
            )
            raise TypeError(msg)


def _check_shapes(rule: RuleSpec, plan: Plan, new: Any, old: Any) -> None:
    """Raise if a limit returns a state of another structure or of other shapes than it got."""
    leaves, structure = optree.tree_flatten(new)
    _check_arrays(rule, plan, leaves)
    old_leaves, old_structure = optree.tree_flatten(old)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    old_shapes = [tuple(leaf.shape) for leaf in old_leaves]
    if structure == old_structure and shapes == old_shapes:
        return
    msg = (
        f"{summarize(rule.limit)} got a state with arrays of shapes {old_shapes}, and returned one "
        f"with {shapes}; a state must keep its shapes, which compiled code and saved states need, "
        "so give the arrays their full size in init"
    )
    raise ValueError(msg)


def _check_rows(rule: RuleSpec, plan: Plan, states: Sequence[Any]) -> None:
    """Raise if the states of the blocks have other numbers of rows than there are norms."""
    for of_block, block in zip(states, plan.blocks, strict=True):
        # The state of limits of groups is a tuple with the state of each group.
        if isinstance(rule.limit, PerGroup):
            rows = [len(of_block)]
        else:
            rows = [array.shape[0] for array in of_block if len(array.shape)]

        if rows and rows[0] != len(block.groups):
            msg = (
                f"the state of {summarize(rule)} has rows for {rows[0]} norms, but there are "
                f"{len(block.groups)}: it belongs to other gradients"
            )
            raise ValueError(msg)
