# SPDX-License-Identifier: MIT
"""Limits in standard deviations above the mean of earlier norms.

A step that is not finite changes neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from uniclip._errors import (
    below_one,
    check_range,
    flag,
    nonnegative,
    one_of,
    set_frozen_fields,
    whole,
)
from uniclip.limits.base import (
    Array,
    Context,
    StatefulLimit,
    align,
    at_most,
    push,
    squarable,
    unit_of,
    unlimited,
    zero_counts,
    zeros,
)
from uniclip.norms import L2

Target: TypeAlias = Literal["reciprocal", "mean", "threshold"]


class Moments(NamedTuple):
    """Mean and variance of each norm, and the number of steps of each row (in `LogZScore` of
    each norm).
    """

    means: Array
    variances: Array
    norm_count: Array


class NormsAndLosses(NamedTuple):
    """The last norms and losses, newest first along axis 1."""

    norms: Array
    """-1 where there is none yet."""
    losses: Array
    """One row for all norms.

    The largest float32 where there is none yet, since a loss may be negative.
    """


@dataclass(frozen=True, repr=False)
class ZScore(StatefulLimit):
    """Allow ``z`` standard deviations above the running mean, and scale larger norms to a target.

    Parameters
    ----------
    z : float
        The z-score above which a norm is a spike.
    decay : float
        Decay of the running mean and variance, which are updated with the norms after clipping.
    target : {"reciprocal", "mean", "threshold"}, default "reciprocal"
        The norm that a spike is scaled to: ``mean + z²/score · std`` (lower for a higher spike),
        the mean, or ``mean + z · std``.
    warmup : int, default 25
        The number of first steps, at least 2, without a limit; mean and variance are then those of
        all norms so far.
    eps : float, default 1e-6
        Added to the standard deviation in the z-score.
    clip_factor : float, default 1
        Multiplies the target ``"reciprocal"``.
    skip_update_on_spike : bool, default False
        Whether mean and variance stay as they were at a spike, instead of being updated with its
        target.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.ZScore(2.5, 0.97, warmup=4)))
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 2.0, 1.0, 2.0, 100.0)]
    [1.0, 2.0, 1.0, 2.0, 1.52]
    """

    z: float
    decay: float
    target: Target = "reciprocal"
    warmup: int = 25
    eps: float = 1e-6
    clip_factor: float = 1.0
    skip_update_on_spike: bool = False

    def __post_init__(self) -> None:
        """Validate the parameters."""
        set_frozen_fields(self, clip_factor=nonnegative("clip_factor", self.clip_factor))
        set_frozen_fields(
            self, skip_update_on_spike=flag("skip_update_on_spike", self.skip_update_on_spike)
        )
        set_frozen_fields(self, z=nonnegative("z", self.z), decay=below_one("decay", self.decay))
        set_frozen_fields(
            self, warmup=whole("warmup", self.warmup, 2)
        )  # 1 has no standard deviation
        set_frozen_fields(self, eps=nonnegative("eps", self.eps))
        one_of("target", self.target, get_args(Target))
        if self.clip_factor != 1 and self.target != "reciprocal":
            msg = (
                f"clip_factor is for target='reciprocal' only, got {self.clip_factor} and "
                f"target={self.target!r}"
            )
            raise ValueError(msg)

    def init(self, norms: Array, context: Context) -> Moments:
        """Return the state before the first norm."""
        return Moments(norms * 0, norms * 0, zero_counts(context))

    def __call__(self, norms: Array, state: Moments, context: Context) -> tuple[Array, Moments]:
        """Compare with mean and deviation, then update them with the clipped norms."""
        xp, n, (mean, variance, count) = context.xp, squarable(context.xp, norms), state
        count, std, excess = count + 1, xp.sqrt(variance), n - mean
        steps, far = align(xp, count, n), self.z * (std + self.eps)
        known = steps > self.warmup
        context.threshold = xp.where(known, mean + far, unlimited(xp, n))
        spike = known & (excess > far)
        target = self._target(mean, std, far / xp.where(spike, excess, 1.0))
        weight = xp.where(known, 1 - self.decay, 1 / xp.astype(steps, n.dtype))
        change, left = xp.where(spike, at_most(xp, target, n), n) - mean, 1 - weight
        # The published rule uses the deviation from the new mean; in the warm-up this is the plain
        # variance.
        square = weight * change**2 * xp.where(known, left, 1.0)
        means, variances = mean + weight * change, left * (variance + square)
        if self.skip_update_on_spike:
            means, variances = xp.where(spike, mean, means), xp.where(spike, variance, variances)
        return xp.where(spike, target, unlimited(xp, n)), Moments(means, variances, count)

    def _target(self, mean: Array, std: Array, share: Array) -> Array:
        """Return the target of spikes; ``share`` is (bound - mean) / (norm - mean)."""
        if self.target == "mean":
            return mean
        high = self.z * std * share if self.target == "reciprocal" else self.z * std
        return self.clip_factor * (mean + high)


@dataclass(frozen=True, repr=False)
class LogZScore(StatefulLimit):
    """Allow ``z`` standard deviations above the mean logarithm.

    Larger norms are scaled to ``exp(mean)``.

    Parameters
    ----------
    z : float
        The z-score above which a norm is a spike.
    decay : float
        Decay of the running mean and variance of the logarithms. They are updated with every norm,
        before it is compared; the first norms are weighted equally.
    eps : float, default 1e-8
        The smallest variance.

    Notes
    -----
    Since this step's norm counts, no z-score exceeds ``√(decay/(1 - decay))``, 4.4 for a decay of
    0.95. A norm of 0, which has no logarithm, does not change the averages.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.LogZScore(2.0, 0.95)))
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 50.0)]
    [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.35]
    """

    z: float
    decay: float
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Validate the parameters."""
        set_frozen_fields(self, z=nonnegative("z", self.z), decay=below_one("decay", self.decay))
        set_frozen_fields(self, eps=nonnegative("eps", self.eps))

    def init(self, norms: Array, context: Context) -> Moments:
        """Return the state before the first norm."""
        return Moments(norms * 0, norms * 0, context.xp.astype(norms, context.xp.int32))

    def __call__(self, norms: Array, state: Moments, context: Context) -> tuple[Array, Moments]:
        """Update mean and variance of the logarithms, then compare."""
        xp, (mean, variance, count) = context.xp, state
        positive = norms > 0
        log = xp.log(xp.where(positive, norms, 1.0))
        equal = 1 / xp.astype(count + 1, norms.dtype)
        weight = xp.where(equal > 1 - self.decay, equal, 1 - self.decay)
        weight = xp.where(positive, weight, 0.0)
        change = xp.where(positive, log - mean, 0.0)
        mean, variance = mean + weight * change, (1 - weight) * (variance + weight * change**2)
        std = xp.sqrt(xp.where(variance > self.eps, variance, self.eps))
        spike = positive & (log - mean > self.z * std)
        context.threshold = _above(xp, mean + self.z * std, norms)
        limits = xp.where(spike, xp.exp(mean), unlimited(xp, norms))
        return limits, Moments(mean, variance, xp.where(positive, count + 1, count))


@dataclass(frozen=True, repr=False)
class RollingZScore(StatefulLimit):
    """Allow ``z`` standard deviations above the mean of the last norms.

    The limit is 0 if the loss is as far above its mean.

    Parameters
    ----------
    z : float
        The z-score above which a norm, or the loss, is a spike.
    window : int
        The number of norms and losses that are kept, spikes included. This step's are added after
        they are compared.
    warmup : int
        The number of norms, or losses, at least 2, that must be there before one can be a spike.

    Notes
    -----
    The variance is the unbiased one. After the warm-up a loss of NaN or ∞ is a spike; it is not
    kept.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.Rule(uc.limits.RollingZScore(6.0, window=128, warmup=3)))
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 1.1, 0.9, 100.0)]
    [1.0, 1.1, 0.9, 1.6]
    """

    z: float
    window: int
    warmup: int

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __post_init__(self) -> None:
        """Refuse windows in which no norm can be a spike."""
        set_frozen_fields(self, z=nonnegative("z", self.z), window=whole("window", self.window, 2))
        set_frozen_fields(self, warmup=whole("warmup", self.warmup, 2))
        check_range("warmup", self.warmup, 2, self.window)

    def init(self, norms: Array, context: Context) -> NormsAndLosses:
        """Begin with empty windows."""
        xp = context.xp
        losses = xp.zeros((1, self.window), dtype=xp.float32)
        losses = context.asarray(losses + unlimited(xp, losses), xp.float32)
        return NormsAndLosses(zeros(context, self.window) - 1, losses)

    def __call__(
        self, norms: Array, state: NormsAndLosses, context: Context
    ) -> tuple[Array, NormsAndLosses]:
        """Compare with the windows, then add to them."""
        xp, losses, loss = context.xp, state.losses, context.loss
        thresholds = limits = self._threshold(xp, state.norms, state.norms >= 0)
        context.threshold = thresholds
        if loss is not None:
            loss = xp.reshape(loss, (1,))
            top = unlimited(xp, loss)
            bound = self._threshold(xp, losses, losses < top)
            calm = (loss <= bound) | (bound >= top)  # NaN and ∞ too, during the warm-up
            limits = xp.where(calm, limits, 0.0)
            losses = xp.where(xp.isfinite(loss), push(xp, losses, loss), losses)
        return limits, NormsAndLosses(push(xp, state.norms, norms), losses)

    def _threshold(self, xp: Any, history: Array, known: Array) -> Array:
        count = xp.sum(xp.astype(known, history.dtype), axis=1, keepdims=True)
        enough = count >= self.warmup
        count = xp.where(enough, count, 2.0)
        values = xp.where(known, history, 0.0)
        unit = unit_of(xp, xp.max(xp.abs(values), axis=1, keepdims=True))  # keeps squares in range
        values = values / unit
        mean = xp.sum(values, axis=1, keepdims=True) / count
        change = xp.where(known, values - mean, 0.0)
        std = L2.root(xp, xp.sum(change**2, axis=1, keepdims=True) / (count - 1))
        # or equal norms would be spikes
        rounding = count * float(xp.finfo(history.dtype).eps) * xp.abs(mean)
        return xp.where(enough, unit * (mean + self.z * std + rounding), unlimited(xp, mean))[
            :, 0, ...
        ]


def _above(xp: Any, log: Array, norms: Array) -> Array:
    """Return exp(log), the largest number of the norms' dtype where that overflows or is NaN."""
    known = log < math.log(unlimited(xp, norms))
    return xp.where(known, xp.exp(xp.where(known, log, 0.0)), unlimited(xp, norms))
