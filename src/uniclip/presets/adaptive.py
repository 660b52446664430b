# SPDX-License-Identifier: MIT
"""Published adaptive rules, whose limits follow the norms of earlier steps.

They are stateful. A step that is not finite leaves their state unchanged.
"""

from __future__ import annotations

import math
from numbers import Real

from uniclip._errors import check_range, number, whole_number
from uniclip._types import NonFinite
from uniclip.curves import normalize, reject
from uniclip.limits import (
    Ema,
    LogZScore,
    MeanOverRms,
    Percentile,
    PercentileOfAll,
    RollingZScore,
    SecondMoment,
    ZScore,
)
from uniclip.limits.zscores import Target
from uniclip.rule import Rule, preset
from uniclip.scopes import all_leaves, each_entry, each_leaf

__all__ = [
    "adagc",
    "adagn",
    "autoclip",
    "log_zscore",
    "norm_growth",
    "percentile_clipping",
    "skip_spikes",
    "spam",
    "zclip",
]


@preset
def autoclip(
    percentile: float = 10, window: int | None = 10_000, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Clip all leaves to a percentile of the global norms so far, this step's included.

    Source: Seetharaman, Wichern, Pardo and Le Roux, *AutoClip*, arXiv:2007.14469.

    Parameters
    ----------
    percentile : float, default 10
        The paper's 10 clips nine of ten steps, close to normalizing. 90 to 99 clips only spikes;
        100 clips nothing (with a window).
    window : int or None, default 10000
        How many of the latest norms count. With ``None`` all count, as in the paper, to within half
        a percent.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``percentile`` is not from 0 to 100, a share such as 0.95 (write 95), or ``window`` below
        1.

    Notes
    -----
    For less than one percent write ``uc.Rule(uc.limits.Percentile(0.5, window))``.

    Compiled code sorts the window in each step, which may take longer than clipping a small model;
    a smaller ``window`` takes less. The host, where it reads the gradients, finds the percentile
    without sorting.

    The published code keeps a NaN in its history forever, and saves the history in no checkpoint;
    its port to TensorFlow takes the percentile of global norms, but clips each tensor by itself.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.autoclip(percentile=50))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 2.0, 3.0, 100.0)]
    [1.0, 1.5, 2.0, 2.5]
    """
    if window is None:
        _check_percentage(percentile, "PercentileOfAll({})")
        return Rule(PercentileOfAll(percentile), scope=all_leaves, nonfinite=nonfinite)

    _check_percentage(percentile, "Percentile({}, window)")
    return Rule(Percentile(percentile, window), scope=all_leaves, nonfinite=nonfinite)


def _check_percentage(percentile: float, limit: str = "") -> None:
    """Raise if a percentile is a fraction, such as 0.95 for 95."""
    fraction = number("percentile", percentile)
    if not 0 < fraction < 1:
        return

    msg = f"percentile must be a percentage, got {fraction}; did you mean {100 * fraction:g}?"
    if limit:
        msg += f" For {fraction}%, write uc.Rule(uc.limits.{limit.format(fraction)})"
    raise ValueError(msg)


def _check_ratio(ratio: float) -> None:
    """Raise if a ratio is below 1, such as 0.05 for a growth of 5%."""
    # Other types of numbers, and NaN, are left to the limit.
    if not isinstance(ratio, Real) or not ratio < 1:
        return

    hint = ""
    growth = float(ratio)
    if growth > 0:
        hint = f" ({1 + growth:g} for {100 * growth:g}% of growth; below 1 gradients shrink to 0)"
    check_range("ratio", ratio, 1, math.inf, hint)


@preset
def percentile_clipping(
    percentile: int = 5, window: int = 100, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Clip each leaf to a percentile of its own last ``window`` norms, this step's included.

    Source: Dettmers et al., *8-bit optimizers*, arXiv:2110.02861; ``percentile_clipping`` of
    bitsandbytes, which 0.50 removed.

    Parameters
    ----------
    percentile : int, default 5
        The rank among the sorted norms, in percent: 5 clips most steps, 100 none.
    window : int, default 100
        How many norms are kept; the first one fills the window.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``percentile`` is not from 0 to 100, a share such as 0.05 (write 5), or ``window`` below
        2.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.percentile_clipping(50))
    >>> [clipper(np.asarray([n])).item() for n in (2.0, 2.5, 1.0)]
    [2.0, 2.0, 1.0]
    """
    _check_percentage(percentile)
    percentile = whole_number("percentile", percentile, 0)
    window = whole_number("window", window, 2)
    check_range("percentile", percentile, 0, 100)

    # bitsandbytes takes one of the sorted norms and does not interpolate: this percentile is
    # exactly that norm.
    rank = min(percentile * window // 100, window - 1)
    limit = Percentile(100 * rank / (window - 1), window, filled=True)
    return Rule(limit, scope=each_leaf, nonfinite=nonfinite)


@preset
def zclip(  # noqa: PLR0913 - as many options as the published code has
    z: float = 2.5,
    decay: float = 0.97,
    target: Target = "reciprocal",
    warmup: int = 25,
    *,
    clip_factor: float = 1.0,
    skip_update_on_spike: bool = False,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Clip all leaves where the global norm is a spike.

    A spike is more than ``z`` standard deviations above the running mean.

    Source: Kumar, Owen, Chowdhury and Güra, *ZClip*, arXiv:2504.02507.

    Parameters
    ----------
    z : float, default 2.5
        The z-score above which a norm is a spike.
    decay : float, default 0.97
        Decay of the running mean and variance, which are updated with the norms after clipping.
    target : {"reciprocal", "mean", "threshold"}, default "reciprocal"
        The norm that a spike with z-score s is scaled to: ``mean + z²/s · std`` (lower for a higher
        spike), the mean, or ``mean + z · std``.
    warmup : int, default 25
        The number of first steps, at least 2, that are not clipped; mean and variance are then
        those of all norms.
    clip_factor : float, default 1
        Multiplies the target ``"reciprocal"``, mean included: 0.5 to 0.9 clip spikes harder.
    skip_update_on_spike : bool, default False
        Do not update mean and variance at a spike; by default they are updated with its target. The
        spike is clipped either way. No step is skipped: for that use `skip_spikes`.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range, ``target`` is not one of the three, or ``clip_factor`` is given
        with a target other than ``"reciprocal"``.

    Notes
    -----
    The reference implementation also limits every norm to 1.0 (``max_grad_norm``): for that,
    ``uc.chain(uc.zclip(), uc.by_global_norm(1.0))``. There one NaN makes mean and variance NaN
    forever, a norm of ∞ makes the gradients NaN, and no checkpoint has the statistics. What it
    calls "percentile" is ``target="threshold"``; many ports have only that. Its docstring
    multiplies only the deviation by ``clip_factor``; its code, as here, the mean too. If all norms
    were equal, their standard deviation is 0, and from then on any higher norm is a spike.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.zclip(warmup=4))
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 2.0, 1.0, 2.0, 100.0)]
    [1.0, 2.0, 1.0, 2.0, 1.52]
    """
    limit = ZScore(
        z, decay, target, warmup, clip_factor=clip_factor, skip_update_on_spike=skip_update_on_spike
    )
    return Rule(limit, scope=all_leaves, nonfinite=nonfinite)


@preset
def log_zscore(z: float = 2.0, decay: float = 0.95, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Clip all leaves to the usual global norm where the logarithm of theirs is a spike.

    A spike is ``z`` standard deviations above the mean.

    Source: Chorowski, Bahdanau, Cho and Bengio, *End-to-end continuous speech recognition*,
    arXiv:1412.1602, and TensorFlow's former ``adaptive_clipping_fn``.

    Parameters
    ----------
    z : float, default 2
        The z-score of a spike; this step's norm counts, so that no z-score exceeds 4.4 with the
        default decay.
    decay : float, default 0.95
        Decay of the running mean and variance of the logarithms; the first norms are weighted
        equally.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    Without ``global_step`` TensorFlow's function begins with a mean logarithm of 0, a limit of
    about 1; here the first norm is the first mean. Its ``static_max_norm`` is
    ``uc.chain(uc.log_zscore(), uc.by_global_norm(max_norm))``.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.log_zscore())
    >>> for n in 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 50.0:
    ...     clipped = clipper(np.asarray([n]))
    >>> round(clipped.item(), 2)
    2.35
    """
    return Rule(LogZScore(z, decay), scope=all_leaves, nonfinite=nonfinite)


@preset
def adagc(
    ratio: float = 1.05,
    decay: float = 0.98,
    warmup: int = 100,
    warmup_norm: float = 1.0,
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Clip each leaf to ``ratio`` times the running average of its own norms after clipping.

    Source: Wang et al., *AdaGC*, arXiv:2502.11034.

    Parameters
    ----------
    ratio, decay : float, defaults 1.05 and 0.98
        Later code of the authors has 1.03 and 0.98, or 1.04 and 0.99.
    warmup : int, default 100
        The number of first steps in which all leaves are clipped together, to the global norm
        ``warmup_norm``; each average begins with the leaf's smallest norm in these steps.
    warmup_norm : float, default 1.0
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range; ``ratio`` is at least 1.

    Notes
    -----
    It clips more than spikes: since the averages are updated with clipped norms, they sink until
    most steps are clipped, and rise by at most the fraction ``(1 - decay)·(ratio - 1)`` per step.
    That is harmless with Adam, which divides by the scale, but not with SGD. In the warm-up the
    published code uses the norms before clipping; here, as in the paper, those after it. Unlike in
    the paper, norms of 0 do not count in the warm-up: an average of 0 would keep a leaf at 0.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.adagc(warmup=0))
    >>> [clipper([np.asarray([n])])[0].item() for n in (1.0, 2.0)]
    [1.0, 1.05]
    """
    _check_ratio(ratio)
    return Rule(Ema(ratio, decay, warmup, warmup_norm), scope=each_leaf, nonfinite=nonfinite)


@preset
def norm_growth(ratio: float = 1.01, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Clip each leaf to ``ratio`` times its clipped norm of the step before.

    Source: Chen et al., *Fira*, arXiv:2410.01623, which limits a part of its update in this way.

    Parameters
    ----------
    ratio : float, default 1.01
        How much a norm may grow from step to step.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``ratio`` is below 1 or NaN: 1% of growth is 1.01.

    Notes
    -----
    After one tiny gradient the next ones stay tiny for long; after a zero gradient they stay zero.
    The first norm above 0 is the first limit.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.norm_growth(1.5))
    >>> [clipper([np.asarray([n])])[0].item() for n in (1.0, 10.0, 10.0)]
    [1.0, 1.5, 2.25]
    """
    _check_ratio(ratio)
    # Without decay an average is its latest norm.
    return Rule(Ema(ratio, decay=0.0, warmup=0), scope=each_leaf, nonfinite=nonfinite)


@preset
def skip_spikes(
    z: float = 6.0, window: int = 128, warmup: int | None = None, *, nonfinite: NonFinite = "skip"
) -> Rule:
    """Set all gradients to 0 where their global norm, or the loss, is a spike.

    A spike is ``z`` standard deviations above the rolling mean.

    Source: the ``SkipStep`` optimizers of OLMo-core; compare PaLM, arXiv:2204.02311. Pass the loss
    to ``update(..., loss=loss)`` or ``clipper(grads, loss=loss)``; it is optional.

    Parameters
    ----------
    z : float, default 6
    window : int, default 128
        How many earlier norms and losses count, spikes included.
    warmup : int, optional
        How many there must be before a step can be a spike, at least 2; by default half the window.
    nonfinite : str, default "skip"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    An optimizer with momentum or weight decay changes parameters at gradients of 0 too: take no
    step where ``report.skipped`` is true (`uniclip.integrations.torch.attach` takes none).

    As in OLMo-core only values above the mean are spikes (its versions of 2024 also skipped steps
    as far below). Unlike there, the loss is optional, and norms and losses each need their own
    ``warmup`` earlier values. OLMo-core judges both as soon as there is half a window of losses,
    this step's included: one step sooner. No checkpoint has its windows, so that every restart has
    64 steps without detection; here they are in the state.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.skip_spikes(warmup=3))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 1.1, 0.9, 100.0, 1.0)]
    [1.0, 1.1, 0.9, 0.0, 1.0]
    """
    window = whole_number("window", window, 2)
    if warmup is None:
        warmup = max(2, window // 2)
    limit = RollingZScore(z, window, warmup)
    return Rule(limit, scope=all_leaves, curve=reject, nonfinite=nonfinite)


@preset
def spam(
    factor: float = 5000.0,
    decay: float = 0.999,
    warmup: int = 20,
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Clip each element to ``±√(factor · v)``, v the running mean of its squares after clipping.

    Source: the clipping in Huang et al., *SPAM*, arXiv:2501.06842. The momentum reset of that
    optimizer is not part of it; make a new state where you reset.

    Parameters
    ----------
    factor : float, default 5000
    decay : float, default 0.999
        Decay of v, which begins at 0 without bias correction, as Adam's second moment in SPAM.
    warmup : int, default 20
        The number of first steps that are not clipped.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    The state is as large as the gradients. Since v begins at 0, an element is clipped at ten
    times its usual size after 20 steps, at 22 times after 100, in the end at 71 times. An element
    that was always 0 is not limited; in the reference implementation it stays 0 forever.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.spam(factor=4.0, decay=0.5, warmup=1))
    >>> [clipper(np.asarray([1.0, n])).round(3).tolist() for n in (1.0, 100.0)]
    [[1.0, 1.0], [1.0, 1.414]]
    """
    return Rule(SecondMoment(factor, decay, warmup), scope=each_entry, nonfinite=nonfinite)


@preset
def adagn(
    mean_decay: float = 0.7, square_decay: float = 0.9, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Normalize each leaf to a ratio of two running averages of its norms, about 1.

    The first is their mean, the second their root mean square.

    Source: AdaGN in Huang et al., *Stable-SPAM* (now *GradientStabilizer*), arXiv:2502.17055.

    Parameters
    ----------
    mean_decay, square_decay : float, defaults 0.7 and 0.9
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    The size of the gradient is lost, which matters for SGD. The result is above 1 while norms grow,
    and too small in the steps after a spike.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.adagn())
    >>> [round(clipper([np.asarray([n])])[0].item(), 4) for n in (1.0, 1.0, 1.0, 100.0, 1.0)]
    [1.0, 1.0, 1.0, 0.7433, 0.5543]
    """
    limit = MeanOverRms(mean_decay, square_decay)
    return Rule(limit, scope=each_leaf, curve=normalize, nonfinite=nonfinite)
