# SPDX-License-Identifier: MIT
"""Fourth choice, the curve: the factor a gradient is multiplied by, given its norm and its limit."""

from __future__ import annotations

from typing import Any


def hard(xp: Any, norm: Any, limit: Any) -> Any:
    """Return ``min(1, limit/norm)``: leave alone what is within the limit, scale the rest onto it.

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
    """
    below, one = norm <= limit, xp.ones_like(norm)
    return xp.where(below, one, limit / xp.where(below, one, norm))


ON_SCALARS = (hard,)
"""The curves that need nothing of ``xp`` but ``where`` and ``ones_like``: they are worked out on scalars too."""
