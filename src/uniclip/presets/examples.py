# SPDX-License-Identifier: MIT
"""Published rules for per-example gradients, with the examples along the first axis of every leaf.

`uniclip.clip_and_sum` clips and sums in one call.
"""

from __future__ import annotations

import math

from uniclip._types import NonFinite, Number
from uniclip.curves import Curve, NonMonotonic, Regularized, hard
from uniclip.limits import Split, TrackedQuantile
from uniclip.limits.base import MaxNorm
from uniclip.rule import Rule, preset
from uniclip.scopes import each_example, each_row

__all__ = ["auto_s", "by_example_layer_norm", "by_example_norm", "by_example_quantile", "psac"]


@preset
def by_example_norm(
    max_norm: MaxNorm, *, curve: Curve = hard, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each example's gradient, over all leaves, to a norm of at most ``max_norm``.

    Source: Abadi et al., *Deep learning with differential privacy*, arXiv:1607.00133.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit
        At least 0.
    curve : callable, default hard
        What happens above the limit; `uniclip.curves.reject` drops such examples,
        `uniclip.curves.normalize` is AUTO-V.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN; when gradients are clipped, if leaves differ in their
        number of examples.

    Examples
    --------
    >>> grads = [np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[12.0], [0.0]])]
    >>> uc.clip(grads, uc.by_example_norm(6.5))[0]
    [array([[1.5, 2. ],
           [0.3, 0.4]]), array([[6.],
           [0.]])]
    """
    return Rule(max_norm, scope=each_example, curve=curve, nonfinite=nonfinite)


@preset
def by_example_layer_norm(
    max_norm: Number, *, by_size: bool = False, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each example's gradient leaf by leaf, to a norm over all of at most ``max_norm``.

    Source: McMahan, Ramage, Talwar and Zhang, *Learning differentially private recurrent language
    models*, arXiv:1710.06963.

    Parameters
    ----------
    max_norm : float or 0-d array
        At least 0. Each of K leaves may have the norm ``max_norm/√K``.
    by_size : bool, default False
        Allow each leaf ``max_norm·√(D/ΣD)`` instead, D its number of elements for one example.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN.

    Examples
    --------
    >>> grads = [np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[12.0], [0.0]])]
    >>> uc.clip(grads, uc.by_example_layer_norm(2**0.5))[0]
    [array([[0.6, 0.8],
           [0.3, 0.4]]), array([[1.],
           [0.]])]
    """
    return Rule(Split(max_norm, by_size), scope=each_row, nonfinite=nonfinite)


@preset
def by_example_quantile(  # noqa: PLR0913 - as many numbers as the published rule has
    quantile: float = 0.5,
    rate: float = 0.2,
    start: float = 0.1,
    *,
    min: float = 0.0,
    max: float = math.inf,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each example's gradient to a limit that follows a quantile of the examples' norms.

    After each step the limit c becomes ``c · exp(-rate · (share - quantile))``, where share is the
    share of the examples within c. Source: Andrew, Thakkar, McMahan and Ramaswamy, *Differentially
    private learning with adaptive clipping*, arXiv:1905.03871; Opacus calls it AdaClip.

    Parameters
    ----------
    quantile : float, default 0.5
    rate : float, default 0.2
    start : float, default 0.1
        The first limit, above 0.
    min, max : float, defaults 0 and ∞
        The bounds of the limit, as ``min_clipbound`` and ``max_clipbound`` of Opacus.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a number is out of range, or ``start`` is not between ``min`` and ``max``.

    Notes
    -----
    The share is exact, and computed on each device separately. For privacy it needs noise, which
    uniclip does not add: update c by the paper's formula with your own noisy share, and pass c to
    `by_example_norm`.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.by_example_quantile(start=1.0))
    >>> grads = clipper([np.asarray([[0.5], [0.1]])])
    >>> print(round(float(clipper.state.limits[0]), 6))
    0.904837
    """
    limit = TrackedQuantile(quantile, rate, start, min, max)
    return Rule(limit, scope=each_example, nonfinite=nonfinite)


@preset
def auto_s(
    max_norm: MaxNorm = 1.0, gamma: float = 0.01, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each example's gradient by ``max_norm/(‖g‖ + gamma)``, which needs no tuned limit.

    Source: AUTO-S in Bu, Wang, Zha and Karypis, *Automatic clipping*, arXiv:2206.07136. With
    ``gamma=r`` and ``max_norm=1`` it is the normalization of Yang et al., arXiv:2206.13033.

    Parameters
    ----------
    max_norm : float or 0-d array, default 1
        Every norm after scaling is just below it.
    gamma : float, default 0.01
        Above 0; keeps small gradients small.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN, or ``gamma`` is not above 0.

    Examples
    --------
    >>> uc.clip(np.asarray([[0.6, 0.8]]), uc.auto_s())[0].round(4)
    array([[0.5941, 0.7921]])
    """
    return Rule(max_norm, scope=each_example, curve=Regularized(gamma), nonfinite=nonfinite)


@preset
def psac(max_norm: MaxNorm = 1.0, r: float = 0.1, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each example's gradient by ``max_norm/(‖g‖ + r/(‖g‖ + r))``.

    This keeps tiny gradients small.

    Source: Xia et al., *Differentially private learning with per-sample adaptive clipping*,
    arXiv:2212.00328.

    Parameters
    ----------
    max_norm : float or 0-d array, default 1
    r : float, default 0.1
        Above 0; the paper tries 0.01 to 0.1.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN, or ``r`` is not above 0.

    Notes
    -----
    A fork of Opacus multiplies by the weight where it should divide: there large gradients end near
    0, here near ``max_norm``.

    Examples
    --------
    >>> uc.clip(np.asarray([[0.6, 0.8]]), uc.psac())[1].factors.round(5)
    array([0.91667])
    """
    return Rule(max_norm, scope=each_example, curve=NonMonotonic(r), nonfinite=nonfinite)
