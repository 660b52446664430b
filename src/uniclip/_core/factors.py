# SPDX-License-Identifier: MIT
"""Ask the curve of a rule for the factors of norms and limits.

The usual curve, `hard`, has formulas with fewer operations for compilers and accelerators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip._core.limiting import NUMBERS, raise_if_numpy
from uniclip._core.measure import Measured, StepInputs
from uniclip._core.plan import Plan
from uniclip._errors import summarize
from uniclip._types import Factors, Flags, Limits, Namespace, Norms
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import broadcasts
from uniclip.backends.base import TRACED
from uniclip.curves import RejectAbove, hard, never_amplifies, normalize, smooth, soft, tanh

if TYPE_CHECKING:
    from uniclip.rule import Choices


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
    # To a compiler no symbol is ∞. A bound on norms holds whatever the limit is.
    bounded = isinstance(rule.curve, RejectAbove)
    only_measures = isinstance(constant, NUMBERS) and constant > sys.float_info.max and not bounded
    if only_measures:
        return [plan.math.xp.ones_like(norms) for norms in measured.norms]

    finite_norms: Any = measured.finite_norms
    factors = []
    for norms, finite, of_block in zip(measured.norms, finite_norms, limits, strict=True):
        if isinstance(of_block, NUMBERS) and of_block >= plan.math.largest_norm and not bounded:
            factors.append(plan.math.xp.ones_like(norms) + (norms - norms))
        else:
            factors.append(_factors_of_block(rule, plan, norms, finite, of_block))

    return factors


def zero_where_skipped(
    plan: Plan, measured: Measured, factors: Sequence[Factors], step_finite: Flags | None
) -> list[Any]:
    """Return the factors with 0 for what is not finite.

    By the policy ``"skip"`` that is the whole step, if ``step_finite`` is false. By others it is
    each norm that is not finite, and ``step_finite`` is ``None``.
    """
    math_ = plan.math
    finite_norms: Any = measured.finite_norms
    zeroed = []
    for norms, finite, of_block in zip(measured.norms, finite_norms, factors, strict=True):
        if step_finite is not None:
            kept = math_.backend.to_device_of(norms, step_finite)
        else:
            kept = math_.each_finite(norms, finite)

        zeroed.append(math_.xp.where(kept, of_block, 0.0))

    return zeroed


def _factors_of_block(
    rule: Choices, plan: Plan, norms: Norms, finite_norms: Norms, limits: float | Limits
) -> Factors:
    """Return the factors of a block whose norms may be limited."""
    math_ = plan.math
    xp = plan.math.xp
    # Compilers turn a division by a constant into a product with its reciprocal. A subnormal
    # reciprocal may be flushed to 0.
    is_number = isinstance(limits, NUMBERS)
    has_reciprocal = is_number and 0 < limits <= math_.largest_norm / 4
    as_array: Any = xp.asarray(limits, dtype=norms.dtype) if is_number else limits
    as_array = cast(xp, as_array, norms.dtype)

    if rule.curve is hard and math_.mode == TRACED:
        divide = _divide_by_larger if has_reciprocal else _divide_where_limited
        return math_.backend.fast_values(divide, _hard)(norms, as_array)

    # On an accelerator each operation starts a kernel, and these formulas need half as many.
    rejects_above = isinstance(rule.curve, RejectAbove)
    if math_.on_device and has_reciprocal and (rule.curve is hard or rejects_above):
        factors = as_array / xp.clip(finite_norms, limits, None)
        if isinstance(rule.curve, RejectAbove):
            factors = xp.where(finite_norms > rule.curve.bound, 0.0, factors)
        return factors

    if math_.on_device and rule.curve is hard:
        return _divide_where_above(xp, finite_norms, as_array)

    factors = _ask_curve(rule, plan, norms, as_array) + (norms - norms)
    # `hard` propagates the NaN of a limit. The limits of uniclip are NaN only if norms are.
    checked = rule.limits_checked and rule.constant is None
    if is_number or rule.curve is hard or checked:
        return factors
    return factors + (as_array - as_array)


def _hard(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return the factor of the curve `hard`, NaN where the norm is not finite."""
    return hard(xp, norm, limit) + (norm - norm)


def _divide_by_larger(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return the same as `_hard` with fewer operations, for limits above 0.

    The division is last: XLA would repeat one before it in each of its users.
    """
    return limit / (xp.maximum(norm, limit) + (norm - norm))


def _divide_where_limited(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return the same as `_hard` for any limit, also 0.

    Where nothing is limited it divides 1 by 1.
    """
    within = norm <= limit
    return xp.where(within, 1.0, limit) / (xp.where(within, 1.0, norm) + (norm - norm))


def _divide_where_above(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return the same as `_hard`, given norms that are NaN where they are not finite."""
    within = norm <= limit
    return xp.where(within, 1.0, limit) / xp.where(within, 1.0, norm)


def _ask_curve(rule: Choices, plan: Plan, norms: Norms, limits: Limits) -> Factors:
    """Return the factors of a curve, validated, and 1 where nothing is limited."""
    math_ = plan.math
    xp = plan.math.xp
    curve: Any = rule.curve
    # PyTorch 2.11 and 2.12 do not compile a call of an object that is made in compiled code, but do
    # compile its `__call__`. That of a function, which most curves are, no compiler knows.
    call: Any = partial(curve.__call__ if hasattr(curve, "__dataclass_fields__") else curve, xp)
    # The derivatives of a quotient may leave the range of its values' dtype.
    if math_.mode == TRACED and curve in _QUOTIENTS:
        call = math_.backend.fast_values(curve, curve)
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
    factors = xp.where(factors > math_.largest_factor, math_.largest_factor, factors)
    # A condition on another device would have to be read, which waits for that device.
    limits = math_.backend.to_device_of(norms, limits)
    return xp.where(limits >= math_.largest_norm, xp.ones_like(factors), factors)
