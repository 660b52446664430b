# SPDX-License-Identifier: MIT
"""Limits in standard deviations above the mean of the norms so far. A step that is not finite changes neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from uniclip._checks import below_one, flag, nonnegative, one_of, settle, whole, within
from uniclip.limits.base import LARGEST, Arrays, Given, Remembers, at_most, empty, pushed, unit_of, unlimited
from uniclip.norms import L2

Target: TypeAlias = Literal["reciprocal", "mean", "threshold"]


class Moments(NamedTuple):
    """Mean and variance for each norm, and how many steps were taken (in `LogZScore`, by each norm)."""

    means: Arrays
    variances: Arrays
    count: Any


class NormsAndLosses(NamedTuple):
    """The last norms and losses along a new first axis, newest first."""

    norms: Arrays
    """-1 where there is none yet."""
    losses: Any
    """The largest number of float32 where there is none yet: a loss may be negative."""


@dataclass(frozen=True, repr=False)
class ZScore(Remembers):
    """Allow ``z`` standard deviations above the running mean; a norm above that is set back to a target.

    Parameters
    ----------
    z : float
        The z-score above which a norm is a spike.
    decay : float
        Of the running mean and variance. They learn from the norms after clipping.
    target : {"reciprocal", "mean", "threshold"}, default "reciprocal"
        What a spike is set back to: ``mean + z²/score · std`` (the higher the spike, the lower),
        the mean, or ``mean + z · std``.
    warmup : int, default 25
        For how many steps, at least 2, nothing is limited, and the statistics are those of all norms so far.
    eps : float, default 1e-6
        Added to the standard deviation in the z-score.
    clip_factor : float, default 1
        What the target ``"reciprocal"`` is multiplied by.
    skip_update_on_spike : bool, default False
        Whether mean and variance stay as they were at a spike, instead of learning from its target.
    """

    z: float
    decay: float
    target: Target = "reciprocal"
    warmup: int = 25
    eps: float = 1e-6
    clip_factor: float = 1.0
    skip_update_on_spike: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        settle(self, clip_factor=nonnegative("clip_factor", self.clip_factor))
        settle(self, skip_update_on_spike=flag("skip_update_on_spike", self.skip_update_on_spike))
        settle(self, z=nonnegative("z", self.z), decay=below_one("decay", self.decay))
        settle(self, warmup=whole("warmup", self.warmup, 2))  # without a deviation every norm would be a spike
        settle(self, eps=nonnegative("eps", self.eps))
        one_of("target", self.target, get_args(Target))
        if self.clip_factor != 1 and self.target != "reciprocal":
            msg = f"clip_factor is for target='reciprocal' only, got {self.clip_factor} and target={self.target!r}"
            raise ValueError(msg)

    def init(self, norms: Arrays, given: Given) -> Moments:
        """Begin with nothing known."""
        return Moments([n * 0 for n in norms], [n * 0 for n in norms], given.counter(norms))

    def __call__(self, norms: Arrays, state: Moments, given: Given) -> tuple[Arrays, Moments]:
        """Compare with what is known, then learn from what is left."""
        xp, limits, means, variances = given.xp, [], [], []
        warm = state.count < self.warmup
        for norm, mean, variance in zip(norms, state.means, state.variances, strict=True):
            n = at_most(xp, norm, xp.ones_like(norm) * LARGEST)
            std = L2.root(xp, variance)
            spike = xp.logical_not(warm) & (n - mean > self.z * (std + self.eps))
            target = self._target(mean, std, xp.where(spike, n - mean, xp.ones_like(n)))
            equal = xp.ones_like(n) / xp.astype(state.count + 1, n.dtype)
            weight = xp.where(warm, equal, xp.ones_like(n) * (1 - self.decay))
            change = xp.where(spike, at_most(xp, target, n), n) - mean
            # The published rule takes the deviation from the new mean; in the warm-up it is the plain variance.
            square = weight * change**2 * xp.where(warm, xp.ones_like(n), 1 - weight)
            limits.append(xp.where(spike, target, unlimited(xp, n)))
            same = spike if self.skip_update_on_spike else None
            means.append(_unless(xp, same, mean + weight * change, mean))
            variances.append(_unless(xp, same, (1 - weight) * (variance + square), variance))
        return limits, Moments(means, variances, state.count + 1)

    def _target(self, mean: Any, std: Any, excess: Any) -> Any:
        if self.target == "mean":
            return mean
        if self.target == "threshold":
            return mean + self.z * std
        return self.clip_factor * (mean + self.z * std * (self.z * (std + self.eps) / excess))


def _unless(xp: Any, same: Any, new: Any, old: Any) -> Any:
    """Return the new value, the old one where a flag, if there is one, holds."""
    return new if same is None else xp.where(same, old, new)


@dataclass(frozen=True, repr=False)
class LogZScore(Remembers):
    """Allow ``z`` standard deviations above the mean in logarithms; a norm above that is set back to exp(mean).

    Parameters
    ----------
    z : float
        The z-score above which a norm is a spike.
    decay : float
        Of the running mean and variance of the logarithms. They learn from every norm, this step's
        included, before it is compared; at first all norms count the same.
    eps : float, default 1e-8
        The least variance.

    Notes
    -----
    Since this step's norm counts, no z-score is above ``√(decay/(1 - decay))``, 4.4 for a decay of 0.95. A norm of
    0, which has no logarithm, is not learned from.
    """

    z: float
    decay: float
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse what is no such choice."""
        settle(self, z=nonnegative("z", self.z), decay=below_one("decay", self.decay))
        settle(self, eps=nonnegative("eps", self.eps))

    def init(self, norms: Arrays, given: Given) -> Moments:
        """Begin with nothing known."""
        counts = [given.xp.astype(n, given.xp.int32) for n in norms]
        return Moments([n * 0 for n in norms], [n * 0 for n in norms], counts)

    def __call__(self, norms: Arrays, state: Moments, given: Given) -> tuple[Arrays, Moments]:
        """Learn from the logarithms, then compare with them."""
        xp, limits, means, variances, counts = given.xp, [], [], [], []
        for n, mean, variance, count in zip(norms, *state, strict=True):
            positive = n > 0
            log = xp.log(xp.where(positive, n, xp.ones_like(n)))
            equal = xp.ones_like(n) / xp.astype(count + 1, n.dtype)
            weight = xp.where(equal > 1 - self.decay, equal, xp.ones_like(n) * (1 - self.decay))
            change = xp.where(positive, log - mean, xp.zeros_like(n))
            weight = xp.where(positive, weight, xp.zeros_like(n))
            counts.append(xp.where(positive, count + 1, count))
            means.append(mean + weight * change)
            variances.append((1 - weight) * (variance + weight * change**2))
            least = xp.ones_like(n) * self.eps
            std = xp.sqrt(xp.where(variances[-1] > least, variances[-1], least))
            spike = positive & (log - means[-1] > self.z * std)
            limits.append(xp.where(spike, xp.exp(means[-1]), unlimited(xp, n)))
        return limits, Moments(means, variances, counts)


@dataclass(frozen=True, repr=False)
class RollingZScore(Remembers):
    """Allow ``z`` standard deviations above the mean of the last norms; 0 where the loss is as far above its own.

    Parameters
    ----------
    z : float
        The z-score above which a norm, or the loss, is a spike.
    window : int
        How many norms and losses are kept, spikes too; this step's are compared before they are.
    warmup : int
        How many norms, or losses, at least 2, have to be there before one is a spike.

    Notes
    -----
    The standard deviation is the unbiased one. After the warm-up a loss of NaN or ∞ is a spike; it is not kept.
    """

    z: float
    window: int
    warmup: int

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __post_init__(self) -> None:
        """Refuse windows in which nothing can be a spike."""
        settle(self, z=nonnegative("z", self.z), window=whole("window", self.window, 2))
        settle(self, warmup=whole("warmup", self.warmup, 2))
        within("warmup", self.warmup, 2, self.window)

    def init(self, norms: Arrays, given: Given) -> NormsAndLosses:
        """Begin with empty windows."""
        losses = unlimited(given.xp, given.xp.zeros((self.window,), dtype=given.xp.float32))
        return NormsAndLosses(
            [empty(given, n, self.window) for n in norms], given.place(norms[0], losses) if norms else losses
        )

    def __call__(self, norms: Arrays, state: NormsAndLosses, given: Given) -> tuple[Arrays, NormsAndLosses]:
        """Compare with the windows, then keep."""
        xp, losses = given.xp, state.losses
        usual = [self._threshold(xp, history, history >= 0) for history in state.norms]
        loss = given.loss
        if loss is not None:
            loss = given.place(losses, xp.reshape(xp.astype(xp.asarray(loss), xp.float32), ()))
            top = unlimited(xp, loss)
            bound = self._threshold(xp, losses, losses < top)
            calm = (loss <= bound) | (bound >= top)  # NaN and ∞ too, as long as nothing is known
            usual = [xp.where(calm, limit, xp.zeros_like(limit)) for limit in usual]
            losses = xp.where(xp.isfinite(loss), pushed(xp, losses, loss), losses)
        histories = [pushed(xp, old, n) for old, n in zip(state.norms, norms, strict=True)]
        return usual, NormsAndLosses(histories, losses)

    def _threshold(self, xp: Any, history: Any, there: Any) -> Any:
        count = xp.sum(xp.astype(there, history.dtype), axis=0)
        enough = count >= self.warmup
        count = xp.where(enough, count, xp.ones_like(count) * 2)
        values = xp.where(there, history, xp.zeros_like(history))
        top = xp.max(xp.abs(values), axis=0)
        unit = unit_of(xp, top)  # squares of large and of tiny numbers leave the range
        values = values / unit
        mean = xp.sum(values, axis=0) / count
        square = xp.sum(xp.where(there, values - mean, xp.zeros_like(values)) ** 2, axis=0) / (count - 1)
        rounding = count * float(xp.finfo(history.dtype).eps) * xp.abs(mean)  # or equal norms would be spikes
        return xp.where(enough, unit * (mean + self.z * L2.root(xp, square) + rounding), unlimited(xp, mean))
