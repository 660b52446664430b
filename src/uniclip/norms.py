# SPDX-License-Identifier: MIT
"""Second choice, the norm: how the size of the entries in a scope is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from uniclip._checks import number, settle
from uniclip._repr import Printed, short

if TYPE_CHECKING:
    from uniclip.backends import Backend

__all__ = ["L1", "L2", "MEAN", "RMS", "Linf", "Norm"]


@dataclass(frozen=True, repr=False)
class Norm(Printed):
    """Measure N entries as ``(Σ|x|ᵖ)^(1/p) / N^size_power``.

    Parameters
    ----------
    ord : float, default 2
        The order, at least 1; ``math.inf`` is the largest modulus.
    size_power : float, default 0
        The norm is divided by N to this power: 1/2 with ``ord=2`` gives the root mean square, 1 with ``ord=1``
        the mean modulus, 1 with ``ord=2`` TF 1's average norm.

    Raises
    ------
    TypeError
        If ``ord`` or ``size_power`` is not a number.
    ValueError
        If ``ord`` is below 1 or NaN, or ``size_power`` not finite.

    Examples
    --------
    >>> uc.Norm(2, size_power=0.5) == uc.norms.RMS
    True
    """

    ord: float = 2
    size_power: float = 0

    def __post_init__(self) -> None:
        """Validate the order."""
        wanted = "a number of at least 1 (or math.inf)"
        name = "ord, the order of a norm,"
        settle(self, ord=number(name, self.ord, wanted), size_power=number("size_power", self.size_power))
        if not self.ord >= 1:
            msg = f"{name} must be {wanted}, got {short(self.ord)}"
            raise ValueError(msg)
        if not math.isfinite(self.size_power):
            msg = f"size_power must be finite, got {self.size_power}"
            raise ValueError(msg)

    @property
    def op(self) -> Literal["sum", "max"]:
        """How the totals of two parts are reduced, across leaves and across devices."""
        return "max" if self.ord == math.inf else "sum"

    @property
    def has_powers(self) -> bool:
        """Whether ``|x|ᵖ`` can overflow or underflow although the norm does not."""
        return 1 < self.ord < math.inf

    def total(self, backend: Backend, x: Any, axes: tuple[int, ...] | None) -> Any:
        """Return ``Σ|x|ᵖ`` (the largest ``|x|`` for p = ∞) over ``axes``."""
        xp = backend.xp
        if self.ord == 2:  # noqa: PLR2004 - without an absolute value, whose derivative at 0 is undefined
            return backend.sum(_square(xp, x), axes)
        if self.ord == math.inf:
            return _largest(xp, x, axes)
        return backend.sum(_power(xp, xp.abs(x), self.ord), axes)

    def root(self, xp: Any, total: Any) -> Any:
        """Return ``total^(1/p)``, with derivative 0 where the total is 0."""
        if not self.has_powers:
            return total
        positive = total > 0
        safe = xp.where(positive, total, 1.0)
        return xp.where(positive, xp.sqrt(safe) if self.ord == 2 else safe ** (1 / self.ord), total)  # noqa: PLR2004


def _largest(xp: Any, x: Any, axes: tuple[int, ...] | None) -> Any:
    """Return the largest ``|x|`` over ``axes``, 0 over no entries."""
    if axes == ():
        return xp.abs(x)
    if getattr(x.shape, "rank", 0) is not None and 0 in x.shape:  # a shape of unknown rank cannot be searched
        return xp.sum(xp.abs(x), axis=axes)
    top = xp.max(xp.abs(x), axis=axes)
    return xp.where(top < 0, 0.0, top)  # -∞: a shape known only at run time was empty


def _square(xp: Any, x: Any) -> Any:
    return xp.real(x) ** 2 + xp.imag(x) ** 2 if xp.isdtype(x.dtype, "complex floating") else x * x


def _power(xp: Any, size: Any, p: float) -> Any:
    if p == 1:
        return size
    if p > 2:  # noqa: PLR2004
        return size**p
    zero = xp.equal(size, 0.0)  # where the second derivative of the power is infinite
    return xp.where(zero, size, xp.where(zero, 1.0, size) ** p)


L1 = Norm(1)
"""Sum the moduli, ``Σ|x|``.

>>> _, report = uc.clip(np.asarray([3.0, -4.0]), uc.Rule(1.0, norm=uc.norms.L1))
>>> float(report.norms)
7.0
"""
L2 = Norm(2)
"""Take the Euclidean norm, ``√(Σ|x|²)``.

>>> _, report = uc.clip(np.asarray([3.0, -4.0]), uc.Rule(1.0, norm=uc.norms.L2))
>>> float(report.norms)
5.0
"""
Linf = Norm(math.inf)
"""Take the largest modulus, ``max |x|``.

>>> _, report = uc.clip(np.asarray([3.0, -4.0]), uc.Rule(1.0, norm=uc.norms.Linf))
>>> float(report.norms)
4.0
"""
RMS = Norm(2, size_power=0.5)
"""Take the root mean square, ``√(Σ|x|²/N)``.

>>> _, report = uc.clip(np.asarray([3.0, -4.0]), uc.Rule(1.0, norm=uc.norms.RMS))
>>> round(float(report.norms), 4)
3.5355
"""
MEAN = Norm(1, size_power=1)
"""Take the mean modulus, ``Σ|x|/N``.

>>> _, report = uc.clip(np.asarray([3.0, -4.0]), uc.Rule(1.0, norm=uc.norms.MEAN))
>>> float(report.norms)
3.5
"""


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
