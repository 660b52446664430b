# SPDX-License-Identifier: MIT
"""The published rules that remember: they learn from the norms of earlier steps.

A step that is not finite changes nothing that they have learned.
"""

from __future__ import annotations

import math
from numbers import Real

from uniclip._checks import number, whole, within
from uniclip._mistakes import keywords_known
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
from uniclip.nonfinite import NonFinite
from uniclip.rules import Rule
from uniclip.scopes import all_leaves, each_entry, each_leaf


@keywords_known
def autoclip(percentile: float = 10, window: int | None = 10_000, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale all leaves to a percentile of the joint norms so far, this step's among them.

    Source: Seetharaman, Wichern, Pardo and Le Roux, *AutoClip*, arXiv:2007.14469.

    Parameters
    ----------
    percentile : float, default 10
        The paper's 10 clips nine of ten steps: close to normalizing. 90 to 99 only cuts spikes, 100
        is off (with a window).
    window : int or None, default 10000
        How many norms count, the newest. The paper keeps all: with ``None`` all count, to half a percent.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``percentile`` is not from 0 to 100, a share such as 0.95 (write 95), or ``window`` below 1.

    Notes
    -----
    For less than one percent write ``uc.Rule(uc.limits.Percentile(0.5, window))``.

    The published code keeps NaN in its history for ever, and saves it in no checkpoint; its port to
    TensorFlow takes the percentile of joint norms, but clips each tensor by itself.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.autoclip(percentile=50))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 2.0, 3.0, 100.0)]
    [1.0, 1.5, 2.0, 2.5]
    """
    _in_percent("percentile", percentile, "PercentileOfAll({})" if window is None else "Percentile({}, window)")
    return Rule(
        PercentileOfAll(percentile) if window is None else Percentile(percentile, window),
        scope=all_leaves,
        nonfinite=nonfinite,
    )


def _in_percent(name: str, value: float, limit: str = "") -> None:
    """Refuse a share of 1 where percents are wanted."""
    share = number(name, value)
    if 0 < share < 1:
        hint = f"; write uc.Rule(uc.{limit.format(share)}) if it is really meant" if limit else ""
        msg = f"{name} must be in percent, {share * 100:g} for a share of {share}, got {share}{hint}"
        raise ValueError(msg)


def _at_least_one(ratio: float) -> None:
    """Refuse a growth where a ratio is wanted: below 1 every norm would be a part of the one before."""
    if isinstance(ratio, Real) and ratio < 1:
        share = float(ratio)
        hint = f" ({1 + share:g} for a growth of {100 * share:g} %; below 1 all gradients shrink to 0)"
        within("ratio", ratio, 1, math.inf, hint if share > 0 else "")


@keywords_known
def percentile_clipping(percentile: int = 5, window: int = 100, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to a percentile of its own last ``window`` norms, this step's among them.

    Source: Dettmers et al., *8-bit optimizers*, arXiv:2110.02861; ``percentile_clipping`` of bitsandbytes, which
    0.50 removed.

    Parameters
    ----------
    percentile : int, default 5
        Which of the norms in order, in percent: 5 clips most steps, 100 is off.
    window : int, default 100
        How many norms are kept; the first one fills the window.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``percentile`` is not from 0 to 100, a share such as 0.05 (write 5), or ``window`` below 2.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.percentile_clipping(50))
    >>> [clipper(np.asarray([n])).item() for n in (2.0, 2.5, 1.0)]
    [2.0, 2.0, 1.0]
    """
    _in_percent("percentile", percentile)
    percentile, window = whole("percentile", percentile, 0), whole("window", window, 2)
    within("percentile", percentile, 0, 100)
    rank = min(percentile * window // 100, window - 1)
    return Rule(Percentile(100 * rank / (window - 1), window, filled=True), scope=each_leaf, nonfinite=nonfinite)


@keywords_known
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
    """Scale all leaves back where the joint norm is more than ``z`` standard deviations above its running mean.

    Source: Kumar, Owen, Chowdhury and Güra, *ZClip*, arXiv:2504.02507.

    Parameters
    ----------
    z : float, default 2.5
        The z-score above which a norm is a spike.
    decay : float, default 0.97
        Of the running mean and variance, which learn from the norms after clipping.
    target : {"reciprocal", "mean", "threshold"}, default "reciprocal"
        What a spike of score s is set back to: mean + z²/s · std (the higher, the lower), the mean, or
        mean + z · std.
    warmup : int, default 25
        For how many steps, at least 2, nothing is clipped, and the statistics are those of all norms.
    clip_factor : float, default 1
        What the target ``"reciprocal"``, mean included, is multiplied by: 0.5 to 0.9 cut spikes harder.
    skip_update_on_spike : bool, default False
        Let a spike, clipped as ever, teach mean and variance nothing; without it they learn from what it is set
        back to. No step is left out: that is `skip_spikes`.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range, ``target`` is none of the three, or ``clip_factor`` is given with another target
        than ``"reciprocal"``.

    Notes
    -----
    The reference implementation also limits every norm to 1.0 (``max_grad_norm``): for that,
    ``uc.chain(uc.zclip(), uc.by_global_norm(1.0))``. There one NaN spoils mean and variance for ever, a norm of ∞
    makes the gradients NaN, and the statistics are in no checkpoint. What it calls "percentile" is
    ``target="threshold"``; many ports do only that. Its docstring multiplies only the deviation by ``clip_factor``, its
    code the mean, too, as here. Norms that were all the same have no deviation: then any higher
    one is a spike, for good.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.zclip(warmup=4))
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 2.0, 1.0, 2.0, 100.0)]
    [1.0, 2.0, 1.0, 2.0, 1.52]
    """
    limit = ZScore(z, decay, target, warmup, clip_factor=clip_factor, skip_update_on_spike=skip_update_on_spike)
    return Rule(limit, scope=all_leaves, nonfinite=nonfinite)


@keywords_known
def log_zscore(z: float = 2.0, decay: float = 0.95, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale all leaves to the usual joint norm where it is ``z`` standard deviations above, in logarithms.

    Source: Chorowski, Bahdanau, Cho and Bengio, *End-to-end continuous speech recognition*, arXiv:1412.1602,
    and TensorFlow's former ``adaptive_clipping_fn``.

    Parameters
    ----------
    z : float, default 2
        The z-score of a spike; this step counts, so that none is above 4.4 with the default decay.
    decay : float, default 0.95
        Of the running mean and variance of the logarithms; at first all norms count the same.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    TensorFlow's function without its ``global_step`` begins with a mean logarithm of 0, a limit of about 1; here the
    first norm is the first mean. Its ``static_max_norm`` is ``uc.chain(uc.log_zscore(), uc.by_global_norm(max_norm))``.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.log_zscore())
    >>> [round(clipper(np.asarray([n])).item(), 2) for n in (1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 50.0)][-1]
    2.35
    """
    return Rule(LogZScore(z, decay), scope=all_leaves, nonfinite=nonfinite)


@keywords_known
def adagc(
    ratio: float = 1.05,
    decay: float = 0.98,
    warmup: int = 100,
    warmup_norm: float = 1.0,
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each leaf to ``ratio`` times the running average of its own norms after clipping.

    Source: Wang et al., *AdaGC*, arXiv:2502.11034.

    Parameters
    ----------
    ratio, decay : float, defaults 1.05 and 0.98
        Later code of the authors has 1.03 and 0.98, and 1.04 and 0.99.
    warmup : int, default 100
        For how many steps all leaves are scaled together, to the joint norm ``warmup_norm``; each
        average begins with the smallest of its norms in that time.
    warmup_norm : float, default 1.0
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range; ``ratio`` is at least 1.

    Notes
    -----
    No filter of spikes: since the averages learn from clipped norms, they sink (norms that vary by a fifth
    are clipped at two of three steps) and rise by (1 - decay)·(ratio - 1), 0.1 %, at a step at most. That is
    harmless with Adam, which divides by the scale, not with SGD. The published code learns from the norms
    before clipping in the warm-up; here, as in the paper, after it. Other than in the paper, norms of 0 do not count in
    the warm-up: an average of 0 would hold a leaf at 0.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.adagc(warmup=0))
    >>> [clipper([np.asarray([n])])[0].item() for n in (1.0, 2.0)]
    [1.0, 1.05]
    """
    _at_least_one(ratio)
    return Rule(Ema(ratio, decay, warmup, warmup_norm), scope=each_leaf, nonfinite=nonfinite)


@keywords_known
def norm_growth(ratio: float = 1.01, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to ``ratio`` times what its norm was after the step before.

    Source: Chen et al., *Fira*, arXiv:2410.01623, which limits a part of its update so.

    Parameters
    ----------
    ratio : float, default 1.01
        How much a norm may grow from step to step.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``ratio`` is below 1 or NaN: 1 % of growth is 1.01.

    Notes
    -----
    After one tiny gradient the next ones stay tiny for long, after a zero one they stay zero. The first norm above 0
    is the first limit.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.norm_growth(1.5))
    >>> [clipper([np.asarray([n])])[0].item() for n in (1.0, 10.0, 10.0)]
    [1.0, 1.5, 2.25]
    """
    _at_least_one(ratio)
    return Rule(Ema(ratio, decay=0.0, warmup=0), scope=each_leaf, nonfinite=nonfinite)


@keywords_known
def skip_spikes(z: float = 6.0, window: int = 128, warmup: int | None = None, *, nonfinite: NonFinite = "skip") -> Rule:
    """Make all gradients 0 where their joint norm, or the loss, is ``z`` standard deviations above its last mean.

    Source: the ``SkipStep`` optimizers of OLMo-core; compare PaLM, arXiv:2204.02311. Give the loss to
    ``update(..., loss=loss)`` or ``clipper(grads, loss=loss)``, or leave it out.

    Parameters
    ----------
    z : float, default 6
    window : int, default 128
        How many norms and losses count, spikes too, before this step's.
    warmup : int, optional
        How many there have to be before anything is a spike: half the window if not given, at least 2.
    nonfinite : str, default "skip"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    An optimizer with momentum or weight decay moves on gradients of 0 too: take no step where ``report.skipped``
    (`uniclip.integrations.torch.attach` takes none).

    As in OLMo-core only what is above the mean is a spike (its versions of 2024 skipped steps as far below, too). Other
    than there the loss may be left out, and norms and losses are judged each by its own number: ``warmup`` before this
    step's. OLMo-core judges both as soon as half a window of losses is there, this step's included: one step sooner.
    Its windows are in no checkpoint, so that every restart has 64 blind steps; here they are in the state.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.skip_spikes(warmup=3))
    >>> [clipper(np.asarray([n])).item() for n in (1.0, 1.1, 0.9, 100.0, 1.0)]
    [1.0, 1.1, 0.9, 0.0, 1.0]
    """
    window = whole("window", window, 2)
    enough = max(2, window // 2) if warmup is None else warmup
    return Rule(RollingZScore(z, window, enough), scope=all_leaves, curve=reject, nonfinite=nonfinite)


@keywords_known
def spam(factor: float = 5000.0, decay: float = 0.999, warmup: int = 20, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Clip each entry to ``±√(factor · v)``, v the running mean of its squares after clipping.

    Source: the clipping of Huang et al., *SPAM*, arXiv:2501.06842. That optimizer's momentum reset is not clipping;
    make a new state where you reset.

    Parameters
    ----------
    factor : float, default 5000
    decay : float, default 0.999
        Of v, which begins with 0 and is not corrected for it, as Adam's second moment inside of SPAM.
    warmup : int, default 20
        For how many steps nothing is clipped.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    It remembers as many numbers as the gradients have entries. Since v begins with 0, an entry is clipped at ten
    times its usual size after 20 steps, at 22 times after 100, in the end at 71 times. An entry that was always
    0 is not limited; in the reference implementation it stays 0 for ever.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.spam(factor=4.0, decay=0.5, warmup=1))
    >>> [clipper(np.asarray([1.0, n])).round(3).tolist() for n in (1.0, 100.0)]
    [[1.0, 1.0], [1.0, 1.414]]
    """
    return Rule(SecondMoment(factor, decay, warmup), scope=each_entry, nonfinite=nonfinite)


@keywords_known
def adagn(mean_decay: float = 0.7, square_decay: float = 0.9, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to the running mean of its norms divided by their running root mean square, about 1.

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
    The size of the gradient is lost, which matters to SGD. The norm is above 1 while norms grow, and too small in the
    steps after a spike.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.adagn())
    >>> [round(clipper([np.asarray([n])])[0].item(), 4) for n in (1.0, 1.0, 1.0, 100.0, 1.0)]
    [1.0, 1.0, 1.0, 0.7433, 0.5543]
    """
    return Rule(MeanOverRms(mean_decay, square_decay), scope=each_leaf, curve=normalize, nonfinite=nonfinite)
