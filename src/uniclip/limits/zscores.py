# SPDX-License-Identifier: MIT
"""Limits in standard deviations above the mean of earlier norms.

A step that is not finite changes neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

from uniclip._errors import Checks, at_least, below_one, check_range, flag, nonnegative, one_of
from uniclip._types import Flags, Limits, Namespace, Norms, Tensor
from uniclip.limits.base import (
    LARGEST,
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
    """Mean and variance of each norm, and the number of steps: one for each row,
    in `LogZScore` one for each norm.
    """

    means: Tensor
    variances: Tensor
    norm_count: Tensor


class NormsAndLosses(NamedTuple):
    """The last norms and losses, newest first along axis 1."""

    norms: Tensor
    """-1 where there is none yet."""
    losses: Tensor
    """One row for all norms.

    The largest float32 where there is none yet, since a loss may be negative.
    """


_NUMBERS = (float, int)
"""The types of a parameter with a value. In compiled code it may be an array without one."""


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

    @property
    def in_range(self) -> bool:  # type: ignore[override]
        """Whether `LARGEST` keeps limits and thresholds in range: all but huge factors do."""
        if self._has_factor or not isinstance(self.z * self.eps, _NUMBERS):
            return False
        return self.z * (1 + self.eps) < LARGEST

    @property
    def _has_factor(self) -> bool:
        """Whether the factor is not 1, or an array without a value."""
        return not (isinstance(self.clip_factor, _NUMBERS) and self.clip_factor == 1)

    checks: ClassVar[Checks] = {
        "z": nonnegative,
        "decay": below_one,
        # One norm has no standard deviation.
        "warmup": at_least(2),
        "eps": nonnegative,
        "clip_factor": nonnegative,
        "skip_update_on_spike": flag,
    }

    def __post_init__(self) -> None:
        """Validate the parameters."""
        super().__post_init__()
        one_of("target", self.target, get_args(Target))
        if self._has_factor and self.target != "reciprocal":
            msg = (
                f"clip_factor multiplies target='reciprocal' only, got clip_factor="
                f"{self.clip_factor} and target={self.target!r}; leave it out, or change the target"
            )
            raise ValueError(msg)

    def init(self, norms: Norms, context: Context) -> Moments:
        """Return the state before the first norm."""
        return Moments(norms * 0, norms * 0, zero_counts(context))

    def __call__(self, norms: Norms, state: Moments, context: Context) -> tuple[Limits, Moments]:
        """Compare with mean and deviation, then update them with the clipped norms.

        The comments give the paper's formulas: score is a norm's z-score, std the root of the
        variance, and clipped the norm after clipping.
        """
        # On an accelerator each operation is a kernel, so nothing is computed twice.
        xp = context.xp
        norms = squarable(xp, norms)
        mean, variance, old_count = state
        count = old_count + 1
        steps = xp.astype(align(xp, count, norms), norms.dtype)
        is_warm = steps > self.warmup

        # score = (norm - mean) / (std + eps). A spike has a score above z, and so a norm above
        # mean + z * (std + eps).
        spread = self.z * xp.sqrt(variance)
        margin = spread + self.z * self.eps
        threshold = xp.where(is_warm, mean + margin, unlimited(xp, norms))
        context.threshold = threshold
        spike = norms > threshold

        # The share of a spike is z / score. The excess of other norms may be 0, or negative.
        excess = norms - mean
        share: Tensor | float = 1.0
        if self.target == "reciprocal":
            share = margin / xp.where(spike, excess, 1.0)

        # target = mean + z * std * z / score, the mean, or mean + z * std.
        target, rise = self._target(xp, mean, spread * share, excess)
        limits = xp.where(spike, target, unlimited(xp, norms))

        # new_mean = decay * mean + (1 - decay) * clipped = mean + (1 - decay) * (clipped - mean).
        # In the warm-up all norms have the same weight, 1 / steps in place of 1 - decay.
        change = xp.where(spike, rise, excess)
        divisor = xp.where(is_warm, 1 / (1 - self.decay), steps)
        move = change / divisor
        new_mean = mean + move

        # new_variance = decay * variance + (1 - decay) * (clipped - new_mean)², where clipped -
        # new_mean is `change - move`, or decay * change. In the warm-up it is the usual variance.
        total = variance + move * xp.where(is_warm, change - move, change)
        new_variance = total - total / divisor
        if self.skip_update_on_spike:
            new_mean = xp.where(spike, mean, new_mean)
            new_variance = xp.where(spike, variance, new_variance)
        return limits, Moments(new_mean, new_variance, count)

    def _target(
        self, xp: Namespace, mean: Tensor, rise: Tensor, excess: Tensor
    ) -> tuple[Tensor, Tensor | float]:
        """Return the target of spikes, and how far above the mean the clipped norm is."""
        if self.target == "mean":
            return mean, 0.0
        if not self._has_factor:
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

    checks: ClassVar[Checks] = {"z": nonnegative, "decay": below_one, "eps": nonnegative}

    def init(self, norms: Norms, context: Context) -> Moments:
        """Return the state before the first norm."""
        return Moments(norms * 0, norms * 0, context.xp.astype(norms, context.xp.int32))

    def __call__(self, norms: Norms, state: Moments, context: Context) -> tuple[Limits, Moments]:
        """Update mean and variance of the logarithms, then compare."""
        xp = context.xp
        mean, variance, count = state

        # A norm of 0 has no logarithm; its weight is 0, so that it changes no average.
        positive = norms > 0
        log = xp.log(xp.where(positive, norms, 1.0))
        new_count = count + xp.astype(positive, count.dtype)

        # The first norms are weighted equally.
        equal_weight = 1 / xp.astype(count + 1, norms.dtype)
        weight = xp.clip(equal_weight, 1 - self.decay, None)
        weight = xp.where(positive, weight, 0.0)
        deviation = log - mean
        move = weight * deviation
        mean = mean + move
        variance = (1 - weight) * (variance + move * deviation)

        # The root has no derivative at 0.
        margin = self.z * xp.sqrt(xp.clip(variance, self.eps, None))
        spike = positive & (log - mean > margin)
        context.threshold = _exp(xp, mean + margin, norms)
        limits = xp.where(spike, xp.exp(mean), unlimited(xp, norms))
        return limits, Moments(mean, variance, new_count)


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

    checks: ClassVar[Checks] = {"z": nonnegative, "window": at_least(2), "warmup": at_least(2)}

    def __post_init__(self) -> None:
        """Validate the parameters; in a window shorter than the warm-up no norm is a spike."""
        super().__post_init__()
        check_range("warmup", self.warmup, 2, self.window)

    def init(self, norms: Norms, context: Context) -> NormsAndLosses:
        """Return the state before the first norm: empty windows."""
        xp = context.xp
        losses = xp.zeros((1, self.window), dtype=xp.float32)
        losses = context.asarray(losses + unlimited(xp, losses), xp.float32)
        return NormsAndLosses(zeros(context, self.window) - 1, losses)

    def __call__(
        self, norms: Norms, state: NormsAndLosses, context: Context
    ) -> tuple[Limits, NormsAndLosses]:
        """Compare with the windows, then add to them."""
        xp = context.xp
        loss = context.loss
        losses = state.losses
        present = state.norms >= 0
        if loss is None:
            context.threshold = self._threshold(xp, state.norms, present)
            return context.threshold, NormsAndLosses(push(xp, state.norms, norms), losses)

        loss = xp.reshape(loss, (1,))
        largest = unlimited(xp, loss)
        losses_present = losses < largest
        if len(norms.shape) == 1 and norms.dtype == losses.dtype:
            # One row more: on an accelerator that starts half as many kernels.
            histories = xp.concat([state.norms, losses], axis=0)
            both_present = xp.concat([present, losses_present], axis=0)
            rows = self._threshold(xp, histories, both_present)
            thresholds = rows[:-1]
            bound = rows[-1:]
        else:
            thresholds = self._threshold(xp, state.norms, present)
            bound = self._threshold(xp, losses, losses_present)
        context.threshold = thresholds

        # During the warm-up NaN and ∞ are no spikes, either; they are not kept.
        is_calm = (loss <= bound) | (bound >= largest)
        limits = xp.where(is_calm, thresholds, 0.0)
        new_losses = xp.where(xp.isfinite(loss), push(xp, losses, loss), losses)
        return limits, NormsAndLosses(push(xp, state.norms, norms), new_losses)

    def _threshold(self, xp: Namespace, history: Tensor, present: Flags) -> Limits:
        """Return for each row the mean plus ``z`` standard deviations of what is present."""
        count = xp.sum(xp.astype(present, history.dtype), axis=1, keepdims=True)
        is_enough = count >= self.warmup
        count = xp.clip(count, 2.0, None)

        # In units of the largest one, so that squares stay in range. `unit_of` guards derivatives,
        # too, but none is taken here.
        values = xp.where(present, history, 0.0)
        numbers = xp.finfo(history.dtype)
        largest = xp.max(xp.abs(values), axis=1, keepdims=True)
        unit = xp.clip(largest, float(numbers.smallest_normal), float(numbers.max) / 4)
        values = values / unit

        total = xp.sum(values, axis=1, keepdims=True)
        mean = total / count
        deviation = xp.where(present, values - mean, 0.0)
        variance = xp.sum(deviation * deviation, axis=1, keepdims=True) / (count - 1)

        # The rounding error of the mean is added, or equal norms would be spikes.
        rounding = float(numbers.eps) * xp.abs(total)
        thresholds = unit * (mean + self.z * xp.sqrt(variance) + rounding)
        return xp.where(is_enough, thresholds, unlimited(xp, mean))[:, 0, ...]


def _exp(xp: Namespace, log: Tensor, norms: Norms) -> Tensor:
    """Return the exponential, and the largest number of the norms' dtype where that overflows
    or is NaN.
    """
    fits = log < math.log(unlimited(xp, norms))
    exponential = xp.exp(xp.where(fits, log, 0.0))
    return xp.where(fits, exponential, unlimited(xp, norms))
