# SPDX-License-Identifier: MIT
"""Limits that follow from running averages of the norms. A step that is not finite changes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from uniclip._checks import below_one, nonnegative, settle, whole
from uniclip.limits.base import LARGEST, Arrays, Given, Remembers, at_most, unit_of, unlimited
from uniclip.norms import L2


class Averages(NamedTuple):
    """A running average for each norm, -1 where there is none yet, and how many steps were taken."""

    averages: Arrays
    count: Any


class MeansAndSquares(NamedTuple):
    """Running mean and mean square of each norm, and how many steps were taken."""

    means: Arrays
    squares: Arrays
    count: Any


@dataclass(frozen=True, repr=False)
class Ema(Remembers):
    """Allow ``ratio`` times the running average of the norms after clipping.

    Parameters
    ----------
    ratio : float
        How far above its average a norm may be.
    decay : float
        Of the average; 0 compares with the step before.
    warmup : int, default 0
        For how many steps all norms are scaled together, to the joint norm ``warmup_norm`` at most,
        while the average is the smallest norm so far.
    warmup_norm : float, default 1.0
        The largest joint norm in the warm-up.

    Notes
    -----
    The average begins with the first norm above 0: many a layer's first gradients are zeros.
    """

    ratio: float
    decay: float
    warmup: int = 0
    warmup_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        settle(self, ratio=nonnegative("ratio", self.ratio), decay=below_one("decay", self.decay))
        settle(self, warmup=whole("warmup", self.warmup, 0), warmup_norm=nonnegative("warmup_norm", self.warmup_norm))

    def init(self, norms: Arrays, given: Given) -> Averages:
        """Begin with nothing known."""
        return Averages([n - 1 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Averages, given: Given) -> tuple[Arrays, Averages]:
        """Compare with the averages, then learn from what is left."""
        xp, limits, averages = given.xp, [], []
        warm = state.count < self.warmup
        some = [n for n in norms if 0 not in n.shape]
        joint = _joint(given, some) if self.warmup and some else None
        for n, average in zip(norms, state.averages, strict=True):
            endless, unknown = unlimited(xp, n), average < 0
            limit = xp.where(unknown, endless, self.ratio * average)
            if joint is not None:
                unit, root = (given.place(n, one) for one in joint)
                own = xp.astype(n, unit.dtype)  # the joint norm may be beyond the dtype of this one
                above, most = unit * root > self.warmup_norm, xp.ones_like(own) * self.warmup_norm
                # own · most / joint: neither is above the joint norm, which may leave the range, as own · most may.
                high = xp.where(above, xp.where(own > most, own, most), unit) / unit
                low = at_most(xp, own, most) / xp.where(above, root, xp.ones_like(root))
                limit = xp.where(warm, xp.where(above, xp.astype(high * low, n.dtype), endless), limit)
            left = at_most(xp, n, limit)
            first = warm | unknown
            before = xp.where(first, xp.zeros_like(n), average)
            least = xp.where(unknown, left, at_most(xp, left, average))
            moved = xp.where(first, least, self.decay * before + (1 - self.decay) * left)
            limits.append(limit)
            averages.append(xp.where(first & (n <= 0), average, moved))
        return limits, Averages(averages, state.count + 1)


@dataclass(frozen=True, repr=False)
class SecondMoment(Remembers):
    """Allow ``√(factor · v)``, v the running mean square of the norms after clipping.

    With the scope `uniclip.each_entry` it is the second moment of each entry.

    Parameters
    ----------
    factor : float
        How far a square may be above the mean square.
    decay : float
        Of the mean square, which begins with 0.
    warmup : int, default 0
        For how many steps nothing is limited.

    Notes
    -----
    A mean square of 0 limits nothing, or an entry that begins with zeros could never grow.
    """

    factor: float
    decay: float
    warmup: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        settle(self, factor=nonnegative("factor", self.factor), decay=below_one("decay", self.decay))
        settle(self, warmup=whole("warmup", self.warmup, 0))

    def init(self, norms: Arrays, given: Given) -> Averages:
        """Begin with 0."""
        return Averages([n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Averages, given: Given) -> tuple[Arrays, Averages]:
        """Compare with the mean square, then learn from what is left."""
        xp, limits, averages = given.xp, [], []
        for n, v in zip(norms, state.averages, strict=True):
            free = (state.count < self.warmup) | (v <= 0)
            limits.append(xp.where(free, unlimited(xp, n), L2.root(xp, self.factor * v)))
            left = at_most(xp, at_most(xp, n, limits[-1]), xp.ones_like(n) * LARGEST)
            averages.append(self.decay * v + (1 - self.decay) * left * left)
        return limits, Averages(averages, state.count + 1)


@dataclass(frozen=True, repr=False)
class MeanOverRms(Remembers):
    """Allow the running mean of the norms divided by their running root mean square: about 1, more while norms grow.

    Both learn from every norm, this step's included, and are corrected for beginning with 0. It is made
    for the curve `uniclip.normalize`.

    Parameters
    ----------
    mean_decay, square_decay : float
        From 0 to below 1, of the mean and of the mean square.
    eps : float, default 1e-8
        Added to the root mean square.
    """

    mean_decay: float
    square_decay: float
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        for name in ("mean_decay", "square_decay"):
            settle(self, **{name: below_one(name, getattr(self, name))})
        settle(self, eps=nonnegative("eps", self.eps))

    def init(self, norms: Arrays, given: Given) -> MeansAndSquares:
        """Begin with nothing known."""
        return MeansAndSquares([n * 0 for n in norms], [n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: MeansAndSquares, given: Given) -> tuple[Arrays, MeansAndSquares]:
        """Learn, then divide."""
        xp, count, limits, means, squares = given.xp, state.count + 1, [], [], []
        for norm, mean, square in zip(norms, state.means, state.squares, strict=True):
            n = at_most(xp, norm, xp.ones_like(norm) * LARGEST)
            means.append(self.mean_decay * mean + (1 - self.mean_decay) * n)
            squares.append(self.square_decay * square + (1 - self.square_decay) * n * n)
            steps = xp.astype(count, n.dtype)
            m = means[-1] / (1 - self.mean_decay**steps)
            v = squares[-1] / (1 - self.square_decay**steps)
            limits.append(m / (L2.root(xp, v) + self.eps))
        return limits, MeansAndSquares(means, squares, count)


def _joint(given: Given, norms: Arrays) -> Any:
    """Return the norm of all norms as a unit and how many of it, so that it is in range."""
    xp, dtype = given.xp, given.xp.result_type(*(n.dtype for n in norms))
    norms = [xp.astype(n, dtype) for n in norms]

    def joined(function: Any, values: Arrays) -> Any:  # only 0-d ones are stacked: others may be divided among devices
        return function(xp.stack([given.place(values[0], function(v) if len(v.shape) else v) for v in values]))

    top = joined(xp.max, norms)
    unit = unit_of(xp, top)
    return unit, L2.root(xp, joined(xp.sum, [(n / given.place(n, unit)) ** 2 for n in norms]))
