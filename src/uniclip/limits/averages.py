# SPDX-License-Identifier: MIT
"""Limits from running averages of the norms.

A step that is not finite leaves the averages unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from uniclip._errors import Checks, at_least, below_one, nonnegative
from uniclip._types import Flags, Limits, Norms, Tensor
from uniclip.backends.arithmetic import cast
from uniclip.limits.base import (
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
    """A running average of each norm, and the number of steps: one for all rows (`Ema`),
    or one for each row.
    """

    averages: Tensor
    """In `Ema` -1 where there is no average yet."""
    norm_count: Tensor


class MeansAndSquares(NamedTuple):
    """Running mean and mean square of each norm, and the number of steps of each row."""

    means: Tensor
    squares: Tensor
    norm_count: Tensor


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

    checks: ClassVar[Checks] = {
        "ratio": nonnegative,
        "decay": below_one,
        "warmup": at_least(0),
        "warmup_norm": nonnegative,
    }

    def init(self, norms: Norms, context: Context) -> Averages:
        """Return the state before the first norm."""
        return Averages(norms - 1, context.asarray(0, context.xp.int32))

    def __call__(self, norms: Norms, state: Averages, context: Context) -> tuple[Limits, Averages]:
        """Compare with the averages, then update them with the clipped norms."""
        xp = context.xp
        averages = state.averages
        has_average = averages >= 0

        is_limited = has_average
        limits = self.ratio * averages
        is_averaged = has_average
        if self.warmup:
            is_warm = state.norm_count >= self.warmup
            beyond, joint_limits = self._limits_together(norms, context)
            is_limited = xp.where(is_warm, has_average, beyond)
            limits = xp.where(is_warm, limits, joint_limits)
            is_averaged = has_average & is_warm
        limits = xp.where(is_limited, limits, unlimited(xp, norms))
        clipped = xp.minimum(norms, limits)

        # In the warm-up the average is the smallest norm so far.
        smallest = clipped
        if self.warmup:
            earlier = xp.where(has_average, averages, unlimited(xp, norms))
            smallest = xp.minimum(clipped, earlier)

        # The first gradients of many layers are zero, and an average of 0 would limit all later
        # ones to 0.
        smallest = xp.where(norms > 0, smallest, averages)

        moved = clipped
        if self.decay:
            moved = self.decay * averages + (1 - self.decay) * clipped
        new_averages = xp.where(is_averaged, moved, smallest)
        return limits, Averages(new_averages, state.norm_count + 1)

    def _limits_together(self, norms: Norms, context: Context) -> tuple[Flags, Limits]:
        """Return whether the joint norm is beyond ``warmup_norm``, and the limits that scale all
        norms to it.
        """
        xp = context.xp
        largest = context.largest(lambda block: block.norms)
        if self.warmup_norm == 0:
            return context.asarray(largest, norms.dtype) > 0, 0 * norms

        # The joint norm, root * unit, may overflow the dtype of these norms.
        unit = unit_of(xp, largest)
        dtype = unit.dtype
        total = context.total(
            lambda block: _square(cast(xp, block.norms, dtype) / block.asarray(unit, dtype))
        )
        root = context.asarray(L2.root(xp, total), dtype)
        unit = context.asarray(unit, dtype)

        # If one norm is NaN, the joint norm is NaN, and the other norms are not limited.
        beyond = root * unit > self.warmup_norm
        wide = cast(xp, norms, dtype)

        # The joint norm may overflow, and its quotient with `warmup_norm`, too. So each division is
        # in range by itself: by the unit first if the target is small, last if it is large.
        if self.warmup_norm <= 1:
            scale = self.warmup_norm / xp.where(beyond, root, self.warmup_norm)
            joint_limits = wide / unit * scale
        else:
            ratio = xp.where(beyond, unit / self.warmup_norm, 1.0)
            joint_limits = wide / xp.where(beyond, root, 1.0) / ratio

        return beyond, cast(xp, joint_limits, norms.dtype)


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

    checks: ClassVar[Checks] = {"factor": nonnegative, "decay": below_one, "warmup": at_least(0)}

    def init(self, norms: Norms, context: Context) -> Averages:
        """Return the state before the first norm."""
        return Averages(norms * 0, zero_counts(context))

    def __call__(self, norms: Norms, state: Averages, context: Context) -> tuple[Limits, Averages]:
        """Compare with the mean square, then update it with the clipped norms."""
        xp = context.xp
        mean_square = state.averages

        is_free = (align(xp, state.norm_count, norms) < self.warmup) | (mean_square <= 0)
        root = L2.root(xp, self.factor * mean_square)
        limits = xp.where(is_free, unlimited(xp, norms), root)

        # The square of a large norm without a limit would overflow.
        clipped = squarable(xp, xp.minimum(norms, limits))
        moved = self.decay * mean_square + (1 - self.decay) * clipped * clipped
        return limits, Averages(moved, state.norm_count + 1)


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

    checks: ClassVar[Checks] = {
        "mean_decay": below_one,
        "square_decay": below_one,
        "eps": nonnegative,
    }

    def init(self, norms: Norms, context: Context) -> MeansAndSquares:
        """Return the state before the first norm."""
        return MeansAndSquares(norms * 0, norms * 0, zero_counts(context))

    def __call__(
        self, norms: Norms, state: MeansAndSquares, context: Context
    ) -> tuple[Limits, MeansAndSquares]:
        """Update the averages, then divide."""
        xp = context.xp
        norms = squarable(xp, norms)
        count = state.norm_count + 1

        means = self.mean_decay * state.means + (1 - self.mean_decay) * norms
        squares = self.square_decay * state.squares + (1 - self.square_decay) * norms * norms

        # Both averages begin at 0, so the first ones are too small.
        steps = align(xp, xp.astype(count, norms.dtype), norms)
        mean = means / (1 - self.mean_decay**steps)
        mean_square = squares / (1 - self.square_decay**steps)
        limits = mean / (L2.root(xp, mean_square) + self.eps)
        return limits, MeansAndSquares(means, squares, count)


def _square(x: Tensor) -> Tensor:
    """Return the square, by a product: a power takes longer."""
    return x * x
