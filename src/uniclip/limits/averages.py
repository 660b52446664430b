# SPDX-License-Identifier: MIT
"""Limits from running averages of the norms.

A step that is not finite leaves the averages unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from uniclip._errors import below_one, nonnegative, set_frozen_fields, whole
from uniclip.backends.base import cast
from uniclip.limits.base import (
    Array,
    Context,
    StatefulLimit,
    align,
    squarable,
    unit_of,
    unlimited,
    zero_counts,
)
from uniclip.norms import L2


class Averages(NamedTuple):
    """A running average of each norm, and the number of steps: for all rows together (`Ema`),
    or for each row.
    """

    averages: Array
    """In `Ema` -1 where there is no average yet."""
    norm_count: Array


class MeansAndSquares(NamedTuple):
    """Running mean and mean square of each norm, and the number of steps of each row."""

    means: Array
    squares: Array
    norm_count: Array


@dataclass(frozen=True, repr=False)
class Ema(StatefulLimit):
    """Allow ``ratio`` times the running average of the norms after clipping.

    Parameters
    ----------
    ratio : float
        How many times its average a norm may be.
    decay : float
        Decay of the average, from 0 to below 1; 0 compares with the previous step.
    warmup : int, default 0
        The number of first steps in which all norms are limited together, to the joint norm
        ``warmup_norm``, and the average is the smallest norm so far.
    warmup_norm : float, default 1.0
        The largest joint norm in the warm-up.

    Notes
    -----
    The average begins with the first norm above 0, since the first gradients of many layers are
    zero.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.Ema(1.5, decay=0.5)))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 10.0, 10.0)]
    [1.0, 1.5, 1.875]
    """

    ratio: float
    decay: float
    warmup: int = 0
    warmup_norm: float = 1.0

    def __post_init__(self) -> None:
        """Validate the parameters."""
        set_frozen_fields(
            self, ratio=nonnegative("ratio", self.ratio), decay=below_one("decay", self.decay)
        )
        set_frozen_fields(
            self,
            warmup=whole("warmup", self.warmup, 0),
            warmup_norm=nonnegative("warmup_norm", self.warmup_norm),
        )

    def init(self, norms: Array, context: Context) -> Averages:
        """Return the state before the first norm."""
        return Averages(norms - 1, context.asarray(0, context.xp.int32))

    def __call__(self, norms: Array, state: Averages, context: Context) -> tuple[Array, Averages]:
        """Compare with the averages, then update them with the clipped norms."""
        xp, averages = context.xp, state.averages
        known = averages >= 0
        limited, limits, settled = known, self.ratio * averages, known
        if self.warmup:
            cold = state.norm_count >= self.warmup
            beyond, together = self._limits_together(norms, context)
            limited, limits = xp.where(cold, known, beyond), xp.where(cold, limits, together)
            settled = known & cold
        limits = xp.where(limited, limits, unlimited(xp, norms))

        left = xp.minimum(norms, limits)
        first = left
        if self.warmup:
            first = xp.minimum(left, xp.where(known, averages, unlimited(xp, norms)))
        first = xp.where(norms > 0, first, averages)
        moved = left
        if self.decay:
            moved = self.decay * averages + (1 - self.decay) * left
        return limits, Averages(xp.where(settled, moved, first), state.norm_count + 1)

    def _limits_together(self, norms: Array, context: Context) -> tuple[Array, Array]:
        """Return whether the joint norm is beyond ``warmup_norm``, and the limits that scale all
        norms to it.
        """
        xp, most = context.xp, self.warmup_norm
        largest = context.largest(lambda block: block.norms)
        if most == 0:
            return context.asarray(largest, norms.dtype) > 0, 0 * norms

        # The joint norm, root * unit, may overflow the dtype of these norms, and even its own.
        unit = unit_of(xp, largest)
        dtype = unit.dtype
        total = context.total(
            lambda block: _square(cast(xp, block.norms, dtype) / block.asarray(unit, dtype))
        )
        root = L2.root(xp, total)
        times = context.asarray(root * (unit / most), dtype)
        beyond = times > 1  # not where a norm is NaN: others are not limited then
        together = cast(xp, norms, dtype) / xp.where(beyond, times, 1.0)
        return beyond, cast(xp, together, norms.dtype)


@dataclass(frozen=True, repr=False)
class SecondMoment(StatefulLimit):
    """Allow ``√(factor · v)``, v the running mean square of the norms after clipping.

    With the scope `uniclip.scopes.each_entry` v is the second moment of each entry.

    Parameters
    ----------
    factor : float
        How many times the mean square a square may be.
    decay : float
        Decay of the mean square, which begins at 0.
    warmup : int, default 0
        The number of first steps without a limit.

    Notes
    -----
    A mean square of 0 limits nothing; otherwise an entry that begins at zero could never grow.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.SecondMoment(4.0, decay=0.5)))
    >>> [round(clipper(np.asarray([n])).item(), 3) for n in (1.0, 10.0, 10.0)]
    [1.0, 1.414, 2.236]
    """

    factor: float
    decay: float
    warmup: int = 0

    def __post_init__(self) -> None:
        """Validate the parameters."""
        set_frozen_fields(
            self, factor=nonnegative("factor", self.factor), decay=below_one("decay", self.decay)
        )
        set_frozen_fields(self, warmup=whole("warmup", self.warmup, 0))

    def init(self, norms: Array, context: Context) -> Averages:
        """Return zeros."""
        return Averages(norms * 0, zero_counts(context))

    def __call__(self, norms: Array, state: Averages, context: Context) -> tuple[Array, Averages]:
        """Compare with the mean square, then update it with the clipped norms."""
        xp, v = context.xp, state.averages
        free = (align(xp, state.norm_count, norms) < self.warmup) | (v <= 0)
        limits = xp.where(free, unlimited(xp, norms), L2.root(xp, self.factor * v))
        left = squarable(xp, xp.minimum(norms, limits))
        return limits, Averages(
            self.decay * v + (1 - self.decay) * left * left, state.norm_count + 1
        )


@dataclass(frozen=True, repr=False)
class MeanOverRms(StatefulLimit):
    """Allow the running mean of the norms divided by their running root mean square.

    That is about 1, and more while norms grow.

    Both averages include this step's norm and are bias-corrected, as Adam's moments. Made for the
    curve `uniclip.curves.normalize`.

    Parameters
    ----------
    mean_decay, square_decay : float
        The decays of the mean and of the mean square, from 0 to below 1.
    eps : float, default 1e-8
        Added to the root mean square.

    Examples
    --------
    >>> rule = uc.Rule(uc.limits.MeanOverRms(0.7, 0.9), curve=uc.curves.normalize)
    >>> clipper = uc.Clipper(rule)
    >>> [round(clipper(np.asarray([n])).item(), 3) for n in (5.0, 5.0, 100.0, 5.0)]
    [1.0, 1.0, 0.795, 0.609]
    """

    mean_decay: float
    square_decay: float
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Validate the parameters."""
        for name in ("mean_decay", "square_decay"):
            set_frozen_fields(self, **{name: below_one(name, getattr(self, name))})
        set_frozen_fields(self, eps=nonnegative("eps", self.eps))

    def init(self, norms: Array, context: Context) -> MeansAndSquares:
        """Return the state before the first norm."""
        return MeansAndSquares(norms * 0, norms * 0, zero_counts(context))

    def __call__(
        self, norms: Array, state: MeansAndSquares, context: Context
    ) -> tuple[Array, MeansAndSquares]:
        """Update the averages, then divide."""
        xp, count, n = context.xp, state.norm_count + 1, squarable(context.xp, norms)
        means = self.mean_decay * state.means + (1 - self.mean_decay) * n
        squares = self.square_decay * state.squares + (1 - self.square_decay) * n * n
        steps = align(xp, xp.astype(count, n.dtype), n)
        m = means / (1 - self.mean_decay**steps)
        v = squares / (1 - self.square_decay**steps)
        return m / (L2.root(xp, v) + self.eps), MeansAndSquares(means, squares, count)


def _square(x: Array) -> Array:
    """Return the square, by a product: a power takes longer."""
    return x * x
