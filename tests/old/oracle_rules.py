"""The published rules that remember, by their papers' formulas, in Python's own floats; nothing of uniclip is used.

Each is a class whose ``step(norm)`` returns the factor of a gradient of that norm. A norm that is not finite gives
NaN and teaches nothing. ``known()`` returns what was learned, in the order of uniclip's state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


class Learner:
    """What all have in common."""

    steps = 0

    def step(self, norm: float) -> float:
        """Return the factor."""
        if not math.isfinite(norm):
            return math.nan
        limit = self.limit(norm)
        self.steps += 1
        return min(1.0, limit / norm) if norm else 1.0

    def limit(self, norm: float) -> float:
        """Return the limit, and learn."""
        raise NotImplementedError

    def known(self) -> Sequence[float]:
        """Return what was learned."""
        raise NotImplementedError


def percentile(values: Sequence[float], q: float) -> float:
    """Return a percentile, between two values linearly (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


class AutoClip(Learner):
    """Seetharaman et al., arXiv:2007.14469."""

    def __init__(self, q: float) -> None:
        self.q, self.history = q, []

    def limit(self, norm: float) -> float:
        self.history.append(norm)
        return percentile(self.history, self.q)

    def known(self) -> Sequence[float]:
        return [*self.history[::-1], len(self.history)]


class BitsAndBytes(Learner):
    """The rule of bitsandbytes, whose ring of squares is filled by the first one."""

    def __init__(self, p: int) -> None:
        self.p, self.ring = p, []

    def limit(self, norm: float) -> float:
        if not self.steps:
            self.ring = [norm**2] * 100
        self.ring[self.steps % 100] = norm**2
        return math.sqrt(sorted(self.ring)[self.p])

    def known(self) -> Sequence[float]:
        return []


class ZClip(Learner):
    """Kumar et al., arXiv:2504.02507."""

    def __init__(self, target: str, clip_factor: float = 1.0, *, skip_update_on_spike: bool = False) -> None:
        self.target, self.first, self.mean, self.variance = target, [], 0.0, 0.0
        self.clip_factor, self.skip_update_on_spike = clip_factor, skip_update_on_spike

    def limit(self, norm: float) -> float:
        if self.steps < 25:
            self.first.append(norm)
            self.mean, self.variance = statistics.fmean(self.first), statistics.pvariance(self.first)
            return math.inf
        std = math.sqrt(self.variance)
        score, limit = (norm - self.mean) / (std + 1e-6), math.inf
        if score > 2.5:
            limit = {
                "reciprocal": self.clip_factor * (self.mean + 2.5 * std / (score / 2.5)),
                "mean": self.mean,
                "threshold": self.mean + 2.5 * std,
            }[self.target]
            if self.skip_update_on_spike:
                return limit
        left = min(norm, limit)
        self.mean = 0.97 * self.mean + 0.03 * left
        self.variance = 0.97 * self.variance + 0.03 * (left - self.mean) ** 2
        return limit

    def known(self) -> Sequence[float]:
        return [self.mean, self.variance, self.steps]


class LogZScore(Learner):
    """Chorowski et al., arXiv:1412.1602, as TensorFlow had it (mean and mean square of the logarithms)."""

    def __init__(self) -> None:
        self.mean, self.square = 0.0, 0.0

    def limit(self, norm: float) -> float:
        decay, log = min(0.95, self.steps / (self.steps + 1)), math.log(norm)
        self.mean = decay * self.mean + (1 - decay) * log
        self.square = decay * self.square + (1 - decay) * log**2
        std = math.sqrt(max(1e-8, self.square - self.mean**2))
        return math.exp(self.mean) if norm > math.exp(self.mean + 2 * std) else math.inf

    def known(self) -> Sequence[float]:
        return [self.mean, self.square - self.mean**2, self.steps]


class SkipSpikes(Learner):
    """The SkipStep optimizers of OLMo-core: mean and unbiased deviation of the last 128 norms."""

    def __init__(self) -> None:
        self.window: list[float] = []

    def step(self, norm: float) -> float:
        if not math.isfinite(norm):
            return 0.0
        skipped = len(self.window) >= 64 and norm > statistics.fmean(self.window) + 6 * statistics.stdev(self.window)
        self.window = [norm, *self.window][:128]
        return 0.0 if skipped else 1.0

    def known(self) -> Sequence[float]:
        return self.window


class AdaGN(Learner):
    """Huang et al., arXiv:2502.17055."""

    def __init__(self) -> None:
        self.mean, self.square = 0.0, 0.0

    def step(self, norm: float) -> float:
        if not math.isfinite(norm):
            return math.nan
        self.steps += 1
        self.mean = 0.7 * self.mean + 0.3 * norm
        self.square = 0.9 * self.square + 0.1 * norm**2
        mean, square = self.mean / (1 - 0.7**self.steps), self.square / (1 - 0.9**self.steps)
        return mean / (math.sqrt(square) + 1e-8) / norm

    def known(self) -> Sequence[float]:
        return [self.mean, self.square, self.steps]


class NormGrowth(Learner):
    """Chen et al., arXiv:2410.01623: at most 1.01 times the norm of the step before, after clipping."""

    def __init__(self) -> None:
        self.last = math.inf

    def limit(self, norm: float) -> float:
        limit = 1.01 * self.last
        self.last = min(norm, limit)
        return limit

    def known(self) -> Sequence[float]:
        return [self.last, self.steps]


class Spam(Learner):
    """Huang et al., arXiv:2501.06842, for one entry."""

    def __init__(self) -> None:
        self.v = 0.0

    def limit(self, norm: float) -> float:
        limit = math.sqrt(5000 * self.v) if self.steps >= 20 else math.inf
        self.v = 0.999 * self.v + 0.001 * min(norm, limit) ** 2
        return limit

    def known(self) -> Sequence[float]:
        return [self.v, self.steps]


class AndrewsQuantile(Learner):
    """Andrew et al., arXiv:1905.03871, for one norm at a step."""

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self.c, self.least, self.most = 0.1, least, most

    def limit(self, norm: float) -> float:
        limit = self.c
        self.c = max(self.least, min(self.most, self.c * math.exp(-0.2 * ((norm <= limit) - 0.5))))
        return limit

    def known(self) -> Sequence[float]:
        return [self.c]


class AdaGC:
    """Wang et al., arXiv:2502.11034, for several norms, of which some may be absent at a step."""

    def __init__(
        self,
        norms: int,
        ratio: float = 1.05,
        decay: float = 0.98,
        warmup: int = 100,
        warmup_norm: float = 1.0,
    ) -> None:
        self.gamma, self.steps = [math.inf] * norms, 0
        self.ratio, self.decay, self.warmup, self.warmup_norm = ratio, decay, warmup, warmup_norm

    def step(self, norms: Sequence[float | None]) -> list[float]:
        """Return a factor for each norm, 1 for one that is absent (``None``)."""
        present = [n for n in norms if n is not None]
        if not all(map(math.isfinite, present)):
            return [math.nan] * len(norms)
        joint = math.sqrt(math.fsum(n**2 for n in present))
        factors = [1.0 if n is None else self._factor(i, n, joint) for i, n in enumerate(norms)]
        for i, (n, factor) in enumerate(zip(norms, factors, strict=True)):
            if n is None:
                continue
            if self.steps < self.warmup or math.isinf(self.gamma[i]):  # the average begins with a norm above 0
                self.gamma[i] = min(self.gamma[i], n * factor) if n else self.gamma[i]
            else:
                self.gamma[i] = self.decay * self.gamma[i] + (1 - self.decay) * n * factor
        self.steps += 1
        return factors

    def _factor(self, i: int, norm: float, joint: float) -> float:
        if not norm:
            return 1.0
        if self.steps < self.warmup:
            return min(1.0, self.warmup_norm / joint)
        return min(1.0, self.ratio * self.gamma[i] / norm)

    def known(self) -> Sequence[float]:
        """Return what was learned."""
        return [*self.gamma, self.steps]
