# SPDX-License-Identifier: MIT
"""The curve, last of the four choices of a rule: the factor for a norm, given its limit.

A curve is a function of the array API namespace, the norm and the limit: real floating-point arrays
whose shapes broadcast together. The factor of a norm of 0 is finite, as are all derivatives. So
each curve divides only by what cannot be 0: `where` alone does not stop a NaN in the derivative of
the branch that is not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from uniclip._errors import Checked, Checks, positive
from uniclip._types import Factors, Flags, Limits, Namespace, Norms, Tensor

__all__ = [
    "NonMonotonic",
    "Regularized",
    "RejectAbove",
    "hard",
    "normalize",
    "reject",
    "smooth",
    "soft",
    "tanh",
]

# Not in terms of uniclip's protocols, so that your own curve may name one framework's arrays.
Curve: TypeAlias = Callable[[Any, Any, Any], Any]


def hard(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return ``min(1, limit/norm)``: larger norms are scaled to the limit, others stay.

    There is no epsilon: the factor is exactly 1 up to the limit, and neither it nor its derivative
    divides by zero.

    Parameters
    ----------
    xp : array API namespace
    norm, limit : array, real floating point
        Of shapes that broadcast together.

    Returns
    -------
    array
        The factor, between 0 and 1; NaN where the norm is NaN.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.hard(np, norms, 1.0)
    array([1.  , 1.  , 1.  , 0.25])
    """
    ones = xp.ones_like(norm)
    below = norm <= limit
    return xp.where(below, ones, limit / xp.where(below, ones, norm))


# The formula of `hard` has four implementations: here for arrays of any library, for two numbers in
# `uniclip._core.spine`, for one call of a library in `Backend.clip_at_once`, and in the kernels of
# such a library. The two functions below take fewer operations, and do not guard derivatives. Their
# last operation is the division: XLA would repeat an earlier one wherever its result is used.


def divide_where_above(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return `hard`'s factor for any limit, also 0: where nothing is limited, 1 is divided by 1."""
    below = norm <= limit
    return xp.where(below, 1.0, limit) / xp.where(below, 1.0, norm)


def divide_by_larger(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return `hard`'s factor for a limit above 0; ``maximum`` propagates NaN."""
    return limit / xp.maximum(norm, limit)


def normalize(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return ``limit/norm``: every norm becomes the limit, smaller ones too; zeros stay zero.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.normalize(np, norms, 1.0).round(3)
    array([1.  , 2.  , 1.  , 0.25])
    """
    ones = xp.ones_like(norm)
    # A zero in the unused branch of `where` would turn its derivative into NaN.
    zero = xp.equal(norm, 0.0)
    return xp.where(zero, ones, limit / xp.where(zero, ones, norm))


def reject(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return 1 up to the limit, 0 above it: gradients with larger norms are dropped.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.reject(np, norms, 1.0)
    array([1., 1., 1., 0.])
    """
    return xp.astype(norm <= limit, norm.dtype)


def soft(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return ``limit/(limit + norm)``: norms stay below the limit, and small ones shrink a little.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.soft(np, norms, 1.0).round(3)
    array([1.   , 0.667, 0.5  , 0.2  ])
    """
    above, ratio = _ratio(xp, norm, limit)
    return xp.where(above, ratio, 1.0) / (1 + ratio)


def smooth(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return ``1/√(1 + (norm/limit)²)``: norms stay below the limit; small ones hardly change.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.smooth(np, norms, 1.0).round(3)
    array([1.   , 0.894, 0.707, 0.243])
    """
    above, ratio = _ratio(xp, norm, limit)
    return xp.where(above, ratio, 1.0) / xp.sqrt(1 + ratio * ratio)


def tanh(xp: Namespace, norm: Norms, limit: Limits) -> Factors:
    """Return ``limit·tanh(norm/limit)/norm``.

    Norms stay within the limit, and small ones hardly change.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.tanh(np, norms, 1.0).round(3)
    array([1.   , 0.924, 0.762, 0.25 ])
    """
    above, ratio = _ratio(xp, norm, limit)

    # Outside this range the result is the ratio, or 1, to rounding, and the derivative of the
    # formula would overflow.
    in_range = (above & (ratio > 1 / 32)) | (xp.logical_not(above) & (ratio > _TINY))
    safe = xp.where(in_range, ratio, 1.0)

    x = xp.where(above, 1 / safe, safe)
    return xp.where(in_range, xp.tanh(x) / x, xp.where(above, ratio, 1.0))


@dataclass(frozen=True, repr=False)
class Regularized(Checked):
    """Return ``limit/(norm + gamma)``: `normalize`, but tiny gradients stay small (AUTO-S).

    Parameters
    ----------
    gamma : float
        Above 0.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.Regularized(0.1)(np, norms, 1.0).round(3)
    array([10.   ,  1.667,  0.909,  0.244])
    """

    gamma: float

    checks: ClassVar[Checks] = {"gamma": positive}

    def __call__(self, xp: Namespace, norm: Norms, limit: Limits) -> Factors:  # noqa: ARG002
        """Return the factor."""
        return limit / (norm + self.gamma)


@dataclass(frozen=True, repr=False)
class NonMonotonic(Checked):
    """Return ``limit/(norm + r/(norm + r))``, the curve of PSAC.

    It is `normalize`, but tiny gradients get the factor ``limit``.

    Parameters
    ----------
    r : float
        Above 0.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 1.0, 4.0])
    >>> uc.curves.NonMonotonic(0.1)(np, norms, 1.0).round(3)
    array([1.   , 1.5  , 0.917, 0.248])
    """

    r: float

    checks: ClassVar[Checks] = {"r": positive}

    def __call__(self, xp: Namespace, norm: Norms, limit: Limits) -> Factors:  # noqa: ARG002
        """Return the factor."""
        return limit / (norm + self.r / (norm + self.r))


@dataclass(frozen=True, repr=False)
class RejectAbove(Checked):
    """Return `hard`'s factor up to another bound, 0 above it: clip, but drop what is far too large.

    Parameters
    ----------
    bound : float
        Above 0, in the unit of the norm.

    Examples
    --------
    >>> norms = np.asarray([0.0, 0.5, 4.0, 11.0])
    >>> uc.curves.RejectAbove(10.0)(np, norms, 1.0)
    array([1.  , 1.  , 0.25, 0.  ])
    """

    bound: float

    checks: ClassVar[Checks] = {"bound": positive}

    def __call__(self, xp: Namespace, norm: Norms, limit: Limits) -> Factors:
        """Return the factor."""
        return xp.where(norm > self.bound, xp.zeros_like(norm), hard(xp, norm, limit))


def never_amplifies(curve: Curve) -> bool:
    """Return whether the factor of a curve is at most 1, however large the limit."""
    return curve is hard or rejects(curve)


def of_numbers(curve: Curve) -> bool:
    """Return whether the factor of a curve takes a comparison and a division of two numbers."""
    # A subclass may return other factors.
    return curve is hard or curve is reject or type(curve) is RejectAbove


def rejects(curve: Curve) -> bool:
    """Return whether a curve drops gradients, and so skips the step if it drops all of them."""
    return curve is reject or isinstance(curve, RejectAbove)


_TINY = 1e-8
"""A number whose square is lost when added to 1."""


def _ratio(xp: Namespace, norm: Norms, limit: Limits) -> tuple[Flags, Tensor]:
    """Return whether the norm is above the limit,
    and the smaller of the two divided by the larger (0/0 is 0).
    """
    # Unlike norm/limit and limit/norm, this ratio cannot overflow, nor can its square.
    above = norm > limit
    smaller = xp.where(above, limit, norm)
    larger = xp.where(above, norm, limit)
    return above, smaller / xp.where(larger > 0, larger, 1.0)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
