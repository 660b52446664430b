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
    push,
    squarable,
    unlimited,
    zero_counts,
    zeros,
)

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
        # On an accelerator each operation is a kernel, so nothing is computed twice.
        xp, n, (mean, variance, count) = context.xp, squarable(context.xp, norms), state
        count = count + 1
        steps = xp.astype(align(xp, count, n), n.dtype)
        known = steps > self.warmup

        spread = self.z * xp.sqrt(variance)
        bound = spread + self.z * self.eps
        threshold = xp.where(known, mean + bound, unlimited(xp, n))
        context.threshold = threshold
        spike = n > threshold
        excess = n - mean
        # Elsewhere the excess may be 0 or less.
        share = bound / xp.where(spike, excess, 1.0) if self.target == "reciprocal" else 1.0
        target, rise = self._target(xp, mean, spread * share, excess)
        limits = xp.where(spike, target, unlimited(xp, n))

        change = xp.where(spike, rise, excess)
        weight = xp.where(known, 1 - self.decay, 1 / steps)
        move = weight * change
        # The published rule uses the deviation from the new mean, `change - move`. In the warm-up
        # this is the plain variance.
        square = move * xp.where(known, change - move, change)
        means, variances = mean + move, (1 - weight) * (variance + square)
        if self.skip_update_on_spike:
            means, variances = xp.where(spike, mean, means), xp.where(spike, variance, variances)
        return limits, Moments(means, variances, count)

    def _target(self, xp: Any, mean: Array, rise: Array, excess: Array) -> tuple[Array, Array]:
        """Return the target of spikes, and how far above the mean the clipped norm is."""
        if self.target == "mean":
            return mean, 0.0
        if self.clip_factor == 1:
            return mean + rise, rise
        target = self.clip_factor * (mean + rise)
        return target, xp.minimum(target - mean, excess)


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
        counted = count + xp.astype(positive, count.dtype)

        # A norm of 0 has the weight 0, and changes nothing.
        equal = 1 / xp.astype(count + 1, norms.dtype)
        weight = xp.where(positive, xp.clip(equal, 1 - self.decay, None), 0.0)
        change = log - mean
        move = weight * change
        mean, variance = mean + move, (1 - weight) * (variance + move * change)

        far = self.z * xp.sqrt(xp.clip(variance, self.eps, None))
        spike = positive & (log - mean > far)
        context.threshold = _above(xp, mean + far, norms)
        limits = xp.where(spike, xp.exp(mean), unlimited(xp, norms))
        return limits, Moments(mean, variance, counted)


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
        known = state.norms >= 0
        if loss is None:
            context.threshold = self._threshold(xp, state.norms, known)
            return context.threshold, NormsAndLosses(push(xp, state.norms, norms), losses)

        loss = xp.reshape(loss, (1,))
        top = unlimited(xp, loss)
        known_losses = losses < top
        if len(norms.shape) == 1 and norms.dtype == losses.dtype:
            # One row more: on an accelerator that starts half as many kernels.
            rows = self._threshold(
                xp,
                xp.concat([state.norms, losses], axis=0),
                xp.concat([known, known_losses], axis=0),
            )
            thresholds, bound = rows[:-1], rows[-1:]
        else:
            thresholds = self._threshold(xp, state.norms, known)
            bound = self._threshold(xp, losses, known_losses)
        context.threshold = thresholds

        calm = (loss <= bound) | (bound >= top)  # NaN and ∞ too, during the warm-up
        limits = xp.where(calm, thresholds, 0.0)
        losses = xp.where(xp.isfinite(loss), push(xp, losses, loss), losses)
        return limits, NormsAndLosses(push(xp, state.norms, norms), losses)

    def _threshold(self, xp: Any, history: Array, known: Array) -> Array:
        """Return for each row the mean plus ``z`` deviations of the entries that are known."""
        count = xp.sum(xp.astype(known, history.dtype), axis=1, keepdims=True)
        enough = count >= self.warmup
        count = xp.clip(count, 2.0, None)

        # In units of the largest one, so that squares stay in range. No derivative is taken here.
        values = xp.where(known, history, 0.0)
        numbers = xp.finfo(history.dtype)
        largest = xp.max(xp.abs(values), axis=1, keepdims=True)
        unit = xp.clip(largest, float(numbers.smallest_normal), float(numbers.max) / 4)
        values = values / unit
        total = xp.sum(values, axis=1, keepdims=True)
        mean = total / count
        change = xp.where(known, values - mean, 0.0)
        variance = xp.sum(change * change, axis=1, keepdims=True) / (count - 1)

        # What the mean may be off by rounding, or equal norms would be spikes.
        rounding = float(numbers.eps) * xp.abs(total)
        above = mean + self.z * xp.sqrt(variance) + rounding
        return xp.where(enough, unit * above, unlimited(xp, mean))[:, 0, ...]


def _above(xp: Any, log: Array, norms: Array) -> Array:
    """Return exp(log), the largest number of the norms' dtype where that overflows or is NaN."""
    known = log < math.log(unlimited(xp, norms))
    return xp.where(known, xp.exp(xp.where(known, log, 0.0)), unlimited(xp, norms))
