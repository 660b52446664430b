# SPDX-License-Identifier: MIT
"""Published rules with a fixed limit: by value, by norm, for groups, and normalized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from uniclip._errors import check, positive
from uniclip._types import NonFinite, Number
from uniclip.compose import ByValue
from uniclip.curves import Curve, RejectAbove, hard, normalize
from uniclip.limits import PerGroup
from uniclip.limits.base import MaxNorm
from uniclip.norms import RMS, Norm
from uniclip.rule import Rule, preset
from uniclip.scopes import Label, Layers, Scope, all_leaves, each_leaf, groups, with_layers

__all__ = [
    "by_average_norm",
    "by_block_rms",
    "by_global_norm",
    "by_group_norm",
    "by_norm",
    "by_value",
    "to_global_norm",
]


def by_value(min: Number, max: Number) -> ByValue:
    """Clip each element into ``[min, max]``.

    Source: Mikolov, PhD thesis, 2012.

    Parameters
    ----------
    min, max : float or array
        The bounds; arrays broadcast against each leaf.

    Raises
    ------
    ValueError
        If ``min > max`` or a bound is NaN.

    Examples
    --------
    >>> uc.clip(np.asarray([-3.0, 0.5]), uc.by_value(-1.0, 1.0))[0]
    array([-1. ,  0.5])
    """
    return ByValue(min, max)


@preset
def by_norm(  # noqa: PLR0913 - the arguments of the published rule, and of its leaves
    max_norm: MaxNorm,
    axis: int | tuple[int, ...] | None = None,
    ord: float = 2,
    *,
    stacked: Layers | None = None,
    curve: Curve = hard,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each leaf, or each slice along ``axis``, to a norm of at most ``max_norm``.

    The result is ``g · min(1, max_norm/‖g‖)``.

    Source: Pascanu, Mikolov and Bengio, *On the difficulty of training recurrent neural networks*,
    arXiv:1211.5063.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit
        How large each norm may be, at least 0.
    axis : int or tuple of int, optional
        The axes that one norm covers; by default all.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.
    stacked : int or callable, optional
        The number of leading axes along which a leaf stacks layers, or a function of
        ``(path, leaf)`` that returns it; see `uniclip.scopes.stacked`. ``axis`` is an axis of one
        layer.
    curve : callable, default hard
        What happens above the limit; `uniclip.curves.soft`, ``smooth`` and ``tanh`` have no corner
        there.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN, or ``ord`` below 1; when gradients are clipped, if a
        leaf has no axis beside those that stack layers.

    Examples
    --------
    >>> uc.clip(np.asarray([[3.0, 4.0], [0.3, 0.4]]), uc.by_norm(1.0, axis=1))[0]
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    scope = with_layers(each_leaf if axis is None else Scope(axes=axis), stacked)
    return Rule(max_norm, scope=scope, norm=Norm(ord), curve=curve, nonfinite=nonfinite)


@preset
def by_average_norm(max_norm: MaxNorm, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to ``‖g‖₂/N ≤ max_norm``, with N its number of elements.

    This is not the RMS, which is ``‖g‖₂/√N``.

    Source: ``clip_by_average_norm`` of TensorFlow 1.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit
        How large each average norm may be, at least 0.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN.

    Examples
    --------
    >>> uc.clip(np.asarray([3.0, 4.0]), uc.by_average_norm(1.0))[0]
    array([1.2, 1.6])
    """
    return Rule(max_norm, scope=each_leaf, norm=Norm(2, size_power=1), nonfinite=nonfinite)


@preset
def by_global_norm(
    max_norm: MaxNorm,
    ord: float = 2,
    *,
    skip_above: float | None = None,
    curve: Curve = hard,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale all leaves by one factor to a global norm of at most ``max_norm``.

    This keeps the direction.

    Source: Pascanu, Mikolov and Bengio, arXiv:1211.5063.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit
        How large the global norm may be, at least 0.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus of all.
    skip_above : float, optional
        A norm above which the whole step is skipped: the gradients become 0, and ``report.skipped``
        is true, so the integrations skip the step. For NaN and ∞ see ``nonfinite="skip"``.
    curve : callable, default hard
        What happens above the limit; `uniclip.curves.soft`, ``smooth`` and ``tanh`` have no corner
        there.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    TypeError
        If ``skip_above`` is not a number, or is given together with ``curve``.
    ValueError
        If ``max_norm`` is negative or NaN, ``ord`` below 1, or ``skip_above`` 0 or less, or below
        ``max_norm``.

    Examples
    --------
    >>> uc.clip([np.asarray([3.0, 4.0]), np.asarray([12.0])], uc.by_global_norm(6.5))[0]
    [array([1.5, 2. ]), array([6.])]
    >>> clipped, report = uc.clip(np.asarray([3.0, 4.0]), uc.by_global_norm(1.0, skip_above=4.0))
    >>> clipped, bool(report.skipped)
    (array([0., 0.]), True)
    """
    if skip_above is not None:
        check("curve", curve, curve is hard, "omitted if skip_above= is given")
        curve = RejectAbove(positive("skip_above", skip_above))

        # A limit of infinity only measures, so steps may be skipped below it.
        if isinstance(max_norm, Real) and skip_above < max_norm < math.inf:
            msg = f"skip_above must be at least max_norm, {max_norm}, got {skip_above}"
            raise ValueError(msg)

    return Rule(max_norm, scope=all_leaves, norm=Norm(ord), curve=curve, nonfinite=nonfinite)


@preset
def by_block_rms(
    max_norm: MaxNorm, *, stacked: Layers | None = None, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each leaf to a root mean square of at most ``max_norm``.

    The result is ``g · min(1, max_norm·√N/‖g‖₂)``.

    Source: Shazeer and Stern, *Adafactor*, arXiv:1804.04235.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit
        How large each root mean square may be, at least 0.
    stacked : int or callable, optional
        The number of leading axes along which a leaf stacks layers, or a function of
        ``(path, leaf)`` that returns it; see `uniclip.scopes.stacked`.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN; when gradients are clipped, if a leaf has no axis beside
        those that stack layers.

    Examples
    --------
    >>> uc.clip(np.asarray([7.0, 1.0]), uc.by_block_rms(1.0))[0]
    array([1.4, 0.2])
    """
    scope = with_layers(each_leaf, stacked)
    return Rule(max_norm, scope=scope, norm=RMS, nonfinite=nonfinite)


@preset
def by_group_norm(
    max_norm: Mapping[Any, MaxNorm],
    label: Label,
    ord: float = 2,
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Clip the joint norm of each group of leaves to the group's own limit.

    Parameters
    ----------
    max_norm : mapping of label to float, 0-d array, or Limit
        One for each label; ``math.inf`` does not clip a group.
    label : callable
        ``label(path, leaf)`` returns the group of a leaf; ``path`` is the tuple of keys that leads
        to it, such as ``("encoder", 0, "weight")``.
    ord : float, default 2
        The order of the norm, at least 1.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a limit is negative or NaN; when gradients are clipped, if a label has no limit.

    Examples
    --------
    >>> rule = uc.by_group_norm({"body": 1.0, "head": 6.0}, lambda path, leaf: path[0])
    >>> uc.clip({"body": np.asarray([3.0, 4.0]), "head": np.asarray([12.0])}, rule)[0]
    {'body': array([0.6, 0.8]), 'head': array([6.])}
    """
    return Rule(PerGroup(max_norm), scope=groups(label), norm=Norm(ord), nonfinite=nonfinite)


@preset
def to_global_norm(
    max_norm: MaxNorm = 1.0, ord: float = 2, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Normalize all leaves by one factor to global norm ``max_norm``: ``g · max_norm/‖g‖``.

    Smaller gradients are scaled, too.

    This is normalized gradient descent; zeros stay zero. Source: Hazan, Levy and Shalev-Shwartz,
    *Beyond convexity*, arXiv:1507.02030; with momentum, Cutkosky and Mehta, arXiv:2002.03305. The
    size of the gradient is lost: the learning rate alone sets the length of a step.

    Parameters
    ----------
    max_norm : float, 0-d array, or Limit, default 1
        The global norm, at least 0.
    ord : float, default 2
        The order of the norm, at least 1.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``max_norm`` is negative or NaN, or ``ord`` below 1.

    Examples
    --------
    >>> uc.clip([np.asarray([0.3, 0.4])], uc.to_global_norm(1.0))[0]
    [array([0.6, 0.8])]
    """
    return Rule(max_norm, scope=all_leaves, norm=Norm(ord), curve=normalize, nonfinite=nonfinite)
