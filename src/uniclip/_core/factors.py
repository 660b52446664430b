# SPDX-License-Identifier: MIT
"""Ask the curve of a rule for the factors of norms and limits.

The usual curve, `hard`, has formulas with fewer operations for compilers and accelerators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip._core.blocks import Measured
from uniclip._core.limiting import NUMBERS, raise_if_numpy
from uniclip._core.measure import StepInputs
from uniclip._core.norm_space import zero_or_nan
from uniclip._core.plan import Plan
from uniclip._errors import summarize
from uniclip._types import Factors, Flags, Limits, Norms
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import broadcasts
from uniclip.backends.base import TRACED
from uniclip.curves import (
    RejectAbove,
    divide_by_larger,
    divide_where_above,
    hard,
    never_amplifies,
    normalize,
    smooth,
    soft,
    tanh,
)

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec


_QUOTIENTS = (normalize, smooth, soft, tanh)
"""Curves of uniclip that divide by the norm or the limit, beside `hard`."""


def compute_factors(
    plan: Plan, inputs: StepInputs, measured: Measured, limits: Sequence[Any]
) -> list[Any]:
    """Return the curve's factors for each block.

    A factor is 1 where nothing is limited, and NaN where a norm or a limit is not finite. Its range
    is that of the norms' and the leaves' dtypes. A limit equal to the largest number of the norms'
    dtype limits nothing. With a constant limit of ∞ the factor is 1 even for a norm of NaN.
    """
    rule = inputs.rule
    constant = inputs.constant
    # A traced limit is never known to be ∞. `RejectAbove` has a bound that applies to any limit.
    bounded = isinstance(rule.curve, RejectAbove)
    only_measures = isinstance(constant, NUMBERS) and constant > sys.float_info.max and not bounded
    if only_measures:
        return [plan.space.xp.ones_like(norms) for norms in measured.norms]

    factors = []
    for norms, finite, of_block in zip(measured.norms, measured.finite_norms, limits, strict=True):
        if isinstance(of_block, NUMBERS) and of_block >= plan.space.largest_norm and not bounded:
            factors.append(plan.space.xp.ones_like(norms) + zero_or_nan(norms))
        else:
            factors.append(_factors_of_block(rule, plan, norms, finite, of_block))

    return factors


def zero_where_skipped(
    plan: Plan, measured: Measured, factors: Sequence[Factors], step_finite: Flags | None
) -> list[Any]:
    """Return the factors with 0 for what is not finite.

    With the policy ``"skip"`` that is the whole step, if ``step_finite`` is false. With others,
    ``step_finite`` is ``None``, and it is each norm that is not finite.
    """
    space = plan.space
    zeroed = []
    for norms, finite, of_block in zip(measured.norms, measured.finite_norms, factors, strict=True):
        if step_finite is not None:
            kept = space.backend.to_device_of(norms, step_finite)
        else:
            kept = space.each_finite(norms, finite)

        zeroed.append(space.xp.where(kept, of_block, 0.0))

    return zeroed


def _factors_of_block(
    rule: RuleSpec, plan: Plan, norms: Norms, finite_norms: Norms, limits: float | Limits
) -> Factors:
    """Return the factors of a block whose norms may be limited."""
    space = plan.space
    xp = plan.space.xp
    is_number = isinstance(limits, NUMBERS)
    as_array: Any = xp.asarray(limits, dtype=norms.dtype) if is_number else limits
    as_array = cast(xp, as_array, norms.dtype)

    # Compilers turn a division by a constant into a product with its reciprocal. A subnormal
    # reciprocal may be flushed to 0.
    has_reciprocal = is_number and 0 < limits <= space.largest_norm / 4
    divide = divide_by_larger if has_reciprocal else divide_where_above
    # On an accelerator each operation starts a kernel, and these formulas need half as many.
    if space.on_device and rule.curve is hard:
        return divide(xp, finite_norms, as_array)
    if space.on_device and has_reciprocal and isinstance(rule.curve, RejectAbove):
        factors = divide(xp, finite_norms, as_array)
        return xp.where(finite_norms > rule.curve.bound, 0.0, factors)

    # Not `finite_norms`, into which a limit may have written.
    if rule.curve is hard:
        call: Any = partial(hard, xp)
        if space.mode == TRACED:
            call = space.backend.fast_values(divide, hard)
        return call(norms + zero_or_nan(norms), as_array)

    factors = _ask_curve(rule, plan, norms, as_array) + zero_or_nan(norms)
    # The limits of uniclip are NaN only if norms are.
    checked = rule.limits_checked and rule.constant is None
    if is_number or checked:
        return factors
    return factors + zero_or_nan(as_array)


def _ask_curve(rule: RuleSpec, plan: Plan, norms: Norms, limits: Limits) -> Factors:
    """Return the factors of a curve, validated, and 1 where nothing is limited."""
    space = plan.space
    xp = plan.space.xp
    curve: Any = rule.curve
    # PyTorch 2.11 and 2.12 do not compile a call of an object that is made in compiled code, but do
    # compile its `__call__`. Most curves are functions, whose `__call__` no compiler supports.
    call: Any = partial(curve.__call__ if hasattr(curve, "__dataclass_fields__") else curve, xp)
    # The derivatives of a quotient may leave the range of its values' dtype.
    if space.mode == TRACED and curve in _QUOTIENTS:
        call = space.backend.fast_values(curve, curve)
    try:
        factors = call(norms, limits)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise_if_numpy(plan, curve, error)
        raise

    fits = isinstance(factors, NUMBERS)
    if not fits and hasattr(factors, "dtype"):
        fits = broadcasts(factors.shape, norms.shape)
    if not fits:
        msg = (
            f"the factor that {summarize(curve)} returned must be a number, or an array like the "
            f"norms, of shape {tuple(norms.shape)}, got {summarize(factors)}"
        )
        raise TypeError(msg)

    # A curve that amplifies may leave the range of a leaf's dtype, where ∞ · 0 would be NaN.
    factors = xp.asarray(factors, dtype=norms.dtype)
    if never_amplifies(curve):
        return factors
    factors = xp.where(factors > space.largest_factor, space.largest_factor, factors)
    # A condition on another device would have to be read, which waits for that device.
    limits = space.backend.to_device_of(norms, limits)
    return xp.where(limits >= space.largest_norm, xp.ones_like(factors), factors)
