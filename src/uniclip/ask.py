# SPDX-License-Identifier: MIT
"""Ask a rule's limit how large norms may be, and its curve for the factors; and validate their answers."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import optree

from uniclip._errors import real, short
from uniclip.backends.arrays import broadcasts, refuse_shape
from uniclip.backends.base import NUMPY, TRACED, cast
from uniclip.choices import Choices
from uniclip.curves import RejectAbove, hard, within
from uniclip.limits import Constant, Context, NoState, PerGroup, Relative
from uniclip.limits.base import Rows
from uniclip.plan import Measured, Plan, refuse_rows
from uniclip.tree import Opened

NUMBERS = (float, int, np.float32, np.bool_)
"""The types that are a limit by themselves (float64 is a float); longdouble is wider."""


def limits_of(
    rule: Choices, plan: Plan, given: Opened, seen: list[Any], state: Any, found: Measured, constant: Any
) -> tuple[list[Any], Any, list[Any] | None]:
    """Return the limits of each block, numbers or arrays, the next state and the thresholds; validate them."""
    limit = rule.limit
    if given.odd:
        _refuse_limits_by_row(rule, plan, given, constant)
    if constant is not None:  # which needs no context
        return [_checked(plan, constant, n, fits=False) for n in seen], state, None
    if limit.memory:
        if not given.kinds.present and plan.join is None and not plan.covering:
            return [math.inf] * len(seen), state, None  # a step without gradients changes no state
        _check_state(rule, plan, state)
    states = [state] if len(seen) == 1 else state if limit.memory else [state] * len(seen)
    contexts = _contexts(rule, plan, seen, found)
    gone = [plan.absent(*pair) for pair in zip(plan.blocks, found.present or [None] * len(seen), strict=True)]
    answers = [_of_block(rule, plan, *some) for some in zip(contexts, gone, states, strict=True)]
    limits = [_checked(plan, one, n, fits=rule.limits_checked) for (one, _), n in zip(answers, seen, strict=True)]
    known = [context.threshold for context in contexts]
    thresholds = None if all(one is None for one in known) else [
        one if own is None else own for one, own in zip(limits, known, strict=True)
    ]  # fmt: skip
    for one, n in zip(known, seen, strict=True):
        if one is not None:
            refuse_shape("threshold", one, n)
    if not limit.memory:
        return limits, state, thresholds
    new = [old if new is None else new for (_, new), old in zip(answers, states, strict=True)]
    return limits, new[0] if len(new) == 1 else tuple(new), thresholds


def _refuse_limits_by_row(rule: Choices, plan: Plan, given: Opened, constant: Any) -> None:
    """Refuse a limit, or counts, with a value for each row of a sparse leaf."""
    of_groups = dict(rule.limit.limits) if constant is None and isinstance(rule.limit, PerGroup) else {}
    for number in given.kinds.odd:
        block, row = plan.places[number]
        kept, label = plan.blocks[block].kept, plan.blocks[block].labels[row]
        limit = of_groups.get(label) if of_groups else rule.limit if constant is None else constant
        value = limit.value if isinstance(limit, Constant) else limit.counts if isinstance(limit, Relative) else limit
        shape = () if isinstance(value, NUMBERS) else getattr(value, "shape", ())  # a compiler asks no number
        if kept and len(shape) >= kept and shape[-kept] != 1:
            refuse_rows(given, plan.axes, rule, "has a limit")


def _contexts(rule: Choices, plan: Plan, seen: list[Any], found: Measured) -> list[Context]:
    """Build the context of each block."""
    nothing = [None] * len(seen)
    columns = [
        nothing if some is None else plan.math.as_norms(some) for some in (found.params, found.sizes, found.present)
    ]
    rows = [
        Rows(n, block.labels, p, size, block.absent if there is None else (), there)
        for n, p, size, there, block in zip(seen, *columns, plan.blocks, strict=True)
    ]
    each = range(len(seen))
    return [Context(plan.math.backend, rows, n, rule.limit.needs, found.loss, apart=plan.norms_apart) for n in each]


def _of_block(rule: Choices, plan: Plan, context: Context, gone: Any, state: Any) -> tuple[Any, Any]:
    """Return the limits of a block's norms, and its next state, ``None`` if all its gradients are absent.

    ``gone`` are the rows of absent gradients, ``None`` if there are none.
    """
    limit = rule.limit
    if limit.memory and context.absent and all(context.absent):  # the shape of its norms is unknown
        return math.inf, None
    old = optree.tree_map(lambda a: plan.math.view(a if plan.math.host else plan.math.library.detached(a)), state)
    try:
        answer = limit(context.norms, old, context)
    except (TypeError, AttributeError, RuntimeError) as error:
        _refuse_numpy(plan, limit, error)
        raise
    if not (isinstance(answer, tuple) and len(answer) == 2):
        msg = f"{short(limit)} must return (limits, state), the limits and the next state, got {short(answer)}"
        raise TypeError(msg)
    limits, new = answer
    if not hasattr(limits, "dtype"):
        wanted = (
            f"a number or an array of real numbers that broadcasts against norms of shape {tuple(context.norms.shape)}"
        )
        limits = real(f"the limit of {short(limit)}", limits, wanted)
    if not limit.memory:
        return limits, state
    if gone is not None and isinstance(limit, PerGroup):
        new = tuple([_restored(plan, *row, gone[n : n + 1, ...]) for n, row in enumerate(zip(new, old, strict=True))])
    elif gone is not None:
        new = _restored(plan, new, old, gone)
    keep = (lambda a: plan.math.to_library(np.asarray(a))) if plan.math.host else plan.math.library.detached
    return limits, optree.tree_map(keep, new)


def _refuse_numpy(plan: Plan, choice: Any, error: Exception) -> None:
    """Say why a limit or a curve got NumPy's arrays, if it failed on them."""
    if plan.math.backend is not plan.math.library and "numpy" in str(error):
        msg = (
            f"{short(choice)}: {error}. Where the host can read the gradients, norms are NumPy's arrays: use the "
            "functions of context.xp in a limit, of xp in a curve, not those of one library"
        )
        raise TypeError(msg) from error


def _restored(plan: Plan, new: Any, old: Any, gone: Any) -> Any:
    """Return the new state with the old rows of groups whose gradients are all absent."""
    xp, count = plan.math.xp, gone.shape[0]

    def row_by_row(a: Any, b: Any) -> Any:
        rows = len(a.shape) > 0 and a.shape[0] == count
        if not rows and count > 1:
            return a  # shared by all rows
        flags = xp.reshape(gone, (count,) + (1,) * (len(a.shape) - 1) if rows else ())
        return xp.where(plan.math.backend.to_device_of(a, flags), b, a)

    return optree.tree_map(row_by_row, new, old)


def _check_state(rule: Choices, plan: Plan, state: Any) -> None:
    """Validate a state: it must be of this rule, and for this number of norms."""
    limit, blocks = rule.limit, plan.blocks
    known = type(limit).__module__.startswith("uniclip.limits.")  # whose states are all of one kind
    parts = [state] if len(blocks) == 1 else state
    count = isinstance(parts, (list, tuple)) and len(parts) == len(blocks)
    kind = isinstance(limit, PerGroup) or (count and all(hasattr(part, "_fields") for part in parts))
    if state is None or isinstance(state, NoState) or (known and not kind):
        msg = f"state must be what rule.init(grads) returns, or an update before, for {short(rule)}, got {short(state)}"
        raise TypeError(msg)
    for part, block in zip(parts, blocks, strict=True) if known else ():
        rows = [len(part)] if isinstance(limit, PerGroup) else [array.shape[0] for array in part if len(array.shape)]
        if rows and rows[0] != len(block.groups):
            msg = (
                f"the state of {short(rule)} is for {rows[0]} norms, but there are {len(block.groups)}: it was made "
                "for other gradients"
            )
            raise ValueError(msg)


def _checked(plan: Plan, value: Any, norms: Any, *, fits: bool) -> Any:
    """Clip limits to the range of the norms' dtype; refuse wrong shapes.

    Negative limits and NaN are refused where they can be read. ``fits`` tells that none is negative.
    """
    xp, backend, largest = plan.math.xp, plan.math.backend, plan.math.largest_norm
    if isinstance(value, NUMBERS):
        wrong = not value >= 0 and not (backend.readable(norms) and not bool(xp.any(xp.isfinite(norms))))
        value = min(value, largest)  # in the other order NaN would become largest
    else:
        if plan.math.host and not isinstance(value, NUMPY):
            value = plan.math.library.viewed(plan.math.library.xp.asarray(value))
        value = xp.asarray(value, dtype=norms.dtype)
        refuse_shape("limit", value, norms)
        # The limit of a norm that is not finite need not be a number.
        read = backend.readable(value) and backend.readable(norms)
        wrong = read and not bool(xp.all(value >= 0)) and bool(xp.any(xp.logical_not(value >= 0) & xp.isfinite(norms)))
        if isinstance(value, np.ndarray) or fits:
            value = xp.where(value > largest, largest, value)
        else:
            value = xp.clip(value, 0, largest)
    if wrong:
        shown = short(value) if getattr(value, "shape", ()) else value
        msg = f"limit must be 0 or more (0 zeroes the gradients), got {shown}"
        raise ValueError(msg)
    return value


def factors_of(rule: Choices, plan: Plan, norms: Any, limits: Any, fault: Any, step_finite: Any, constant: Any) -> Any:
    """Return the curve's factors: 1 where nothing is limited, NaN (or the policy's 0) where either is not finite.

    One that its dtype, or that of a leaf, cannot hold is the largest number, or 0. ``fault`` is 0, and NaN where a norm
    is not finite. A limit equal to the largest number of the norms' dtype limits nothing; a constant number ∞ leaves
    even NaN alone.
    """
    xp, world, number = plan.math.xp, plan.math.backend, isinstance(limits, NUMBERS)
    bounded = isinstance(rule.curve, RejectAbove)  # whatever the limit
    if isinstance(constant, NUMBERS) and constant > sys.float_info.max and not bounded:  # to compilers no symbol is ∞
        factors = xp.ones_like(norms)
    elif number and limits >= plan.math.largest_norm and not bounded:
        factors = xp.ones_like(norms) + fault
    else:
        plain = _divided if number and limits > 0 else _divided_or_one
        array = xp.asarray(limits, dtype=norms.dtype) if number else world.to_device_of(norms, limits)
        limits = cast(xp, array, norms.dtype)
        if rule.curve is hard and plan.math.mode == TRACED:
            factors = world.fast_values(plain, _hard)(norms, limits)
        else:
            factors = _asked(rule, plan, norms, limits) + fault
            if not (number or rule.curve is hard):  # which turns NaN into NaN itself
                factors = factors + (limits - limits)
    if rule.nonfinite not in {"skip", "zero"}:
        return factors
    kept = world.to_device_of(norms, step_finite) if rule.nonfinite == "skip" else xp.isfinite(norms)
    return xp.where(kept, factors, xp.zeros_like(factors))


def _hard(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the factor of the curve `hard`, NaN where the norm is not finite."""
    return hard(xp, norm, limit) + (norm - norm)


def _divided(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the same by fewer operations, for limits above 0; the division is last, or XLA makes it in each user."""
    return limit / (xp.maximum(norm, limit) + (norm - norm))


def _divided_or_one(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the same for limits that may be 0."""
    most = xp.maximum(norm, limit)
    some = most != 0
    return xp.where(some, limit, 1.0) / (xp.where(some, most, 1.0) + (norm - norm))


def _asked(rule: Choices, plan: Plan, norms: Any, limits: Any) -> Any:
    """Return the factors of a curve, validated, and 1 where nothing is limited."""
    xp, curve = plan.math.xp, rule.curve
    try:
        factors = curve(xp, norms, limits)
    except (TypeError, AttributeError, RuntimeError) as error:
        _refuse_numpy(plan, curve, error)
        raise
    if not (isinstance(factors, NUMBERS) or (hasattr(factors, "dtype") and broadcasts(factors.shape, norms.shape))):
        wanted = f"a number, or an array like the norms, of shape {tuple(norms.shape)}"
        msg = f"the factor that {short(curve)} returned must be {wanted}, got {short(factors)}"
        raise TypeError(msg)
    factors = xp.asarray(factors, dtype=norms.dtype)
    if within(curve):
        return factors
    factors = xp.where(factors > plan.math.largest_factor, plan.math.largest_factor, factors)
    return xp.where(limits >= plan.math.largest_norm, xp.ones_like(factors), factors)


def first_state(rule: Choices, given: Opened, plan: Plan) -> Any:
    """Return the state before the first step."""
    rows = [Rows(n, block.labels, absent=block.absent) for n, block in zip(plan.zeros(given), plan.blocks, strict=True)]
    contexts = [Context(plan.math.library, rows, number) for number in range(len(rows))]
    states = [rule.limit.init(context.norms, context) for context in contexts]
    return states[0] if len(states) == 1 else tuple(states)
