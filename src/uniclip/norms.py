# SPDX-License-Identifier: MIT
"""The norm, second of the four choices of a rule: how the size of a scope's elements is measured.

This module only describes norms. `uniclip._core.measure` computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from uniclip._errors import Printed, number, set_frozen_fields, summarize
from uniclip._types import Namespace, Tensor

__all__ = ["L1", "L2", "MEAN", "RMS", "Linf", "Norm"]


@dataclass(frozen=True, repr=False)
class Norm(Printed):
    """Measure N elements as ``(Σ|x|ᵖ)^(1/p) / N^size_power``.

    Parameters
    ----------
    ord : float, default 2
        The order, at least 1; ``math.inf`` is the largest modulus.
    size_power : float, default 0
        The norm is divided by N to this power: 1/2 with ``ord=2`` gives the root mean square, 1
        with ``ord=1`` the mean modulus, 1 with ``ord=2`` TF 1's average norm.

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
        """Validate ``ord`` and ``size_power``."""
        name = "ord, the order of a norm,"
        wanted = "a number of at least 1 (or math.inf)"
        order = number(name, self.ord, wanted)
        size_power = number("size_power", self.size_power)
        set_frozen_fields(self, ord=order, size_power=size_power)

        # Written so that NaN fails, too. Below 1 the triangle inequality does not hold.
        if not self.ord >= 1:
            msg = f"{name} must be {wanted}, got {summarize(self.ord)}"
            raise ValueError(msg)

        if not math.isfinite(self.size_power):
            msg = f"size_power must be finite, got {self.size_power}"
            raise ValueError(msg)

    def root(self, xp: Namespace, total: Tensor) -> Tensor:
        """Return ``total^(1/p)``, with derivative 0 where the total is 0."""
        # The root's own derivative at 0 is infinite, and `where` would turn it into NaN: so the
        # root is taken of 1 there.
        positive = total > 0
        safe = xp.where(positive, total, 1.0)

        # A square root costs less than a general power.
        if self.ord == 2:
            return xp.where(positive, xp.sqrt(safe), total)
        return xp.where(positive, safe ** (1 / self.ord), total)


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
