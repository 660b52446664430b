# SPDX-License-Identifier: MIT
"""The published rules with a limit that is given: by value, by norm, for groups, and normalized."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from numbers import Real
from typing import Any

from uniclip._checks import real
from uniclip._repr import short
from uniclip.arraywise import ByValue
from uniclip.curves import Curve, hard, normalize
from uniclip.limits import PerGroup
from uniclip.nonfinite import NonFinite
from uniclip.norms import AVERAGE, RMS, Norm
from uniclip.rules import Rule
from uniclip.scopes import Label, all_leaves, along, each_leaf, groups


def by_value(lo: Any, hi: Any = None) -> ByValue:
    """Clip each entry into ``[lo, hi]``, or into ``[-lo, lo]`` if ``hi`` is not given.

    Source: Mikolov, PhD thesis, 2012.

    Parameters
    ----------
    lo, hi : float or array
        The bounds; a lone ``lo`` is the largest modulus allowed, at least 0.

    Raises
    ------
    ValueError
        If ``lo > hi``, a bound is NaN, or a lone ``lo`` is negative.

    Examples
    --------
    >>> uc.clip(np.asarray([-3.0, 0.5]), uc.by_value(1.0))[0]
    array([-1. ,  0.5])
    """
    if hi is not None:
        return ByValue(lo, hi)
    lo = real("lo", lo, "a number or an array of real numbers")
    both = "; for an interval give both, by_value(lo, hi)"
    if isinstance(lo, Real) and not float(lo) >= 0:
        msg = f"a lone lo is the largest modulus, at least 0, got {short(lo)}{both}"
        raise ValueError(msg)
    if "uint" in str(getattr(lo, "dtype", "")):
        msg = f"a lone lo needs a dtype that holds -lo, got {short(lo)}{both}"
        raise TypeError(msg)
    return ByValue(-lo, lo)


def by_norm(
    c: Any,
    axis: int | tuple[int, ...] | None = None,
    ord: float = 2,
    *,
    curve: Curve = hard,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each leaf, or each slice along ``axis``, to norm ``c`` at most: ``g · min(1, c/‖g‖)``.

    Source: Pascanu, Mikolov and Bengio, *On the difficulty of training recurrent neural networks*,
    arXiv:1211.5063.

    Parameters
    ----------
    c : float, 0-d array, or Limit
        How large each norm may be, at least 0.
    axis : int or tuple of int, optional
        The axes that one norm covers; all if not given.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.
    curve : callable, default hard
        What happens above the limit; `soft`, `smooth` and `tanh` have no corner there.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``c`` is negative or NaN, or ``ord`` below 1.

    Examples
    --------
    >>> uc.clip(np.asarray([[3.0, 4.0], [0.3, 0.4]]), uc.by_norm(1.0, axis=1))[0]
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    return Rule(c, scope=each_leaf if axis is None else along(axis), norm=Norm(ord), curve=curve, nonfinite=nonfinite)


def by_average_norm(c: Any, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to ``‖g‖₂/N ≤ c``, N its number of entries; not the RMS, which is ``‖g‖₂/√N``.

    Source: the function ``clip_by_average_norm`` of TF 1.

    Parameters
    ----------
    c : float, 0-d array, or Limit
        How large each average norm may be, at least 0.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``c`` is negative or NaN.

    Examples
    --------
    >>> uc.clip(np.asarray([3.0, 4.0]), uc.by_average_norm(1.0))[0]
    array([1.2, 1.6])
    """
    return Rule(c, scope=each_leaf, norm=AVERAGE, nonfinite=nonfinite)


def by_global_norm(c: Any, ord: float = 2, *, curve: Curve = hard, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale all leaves by one factor to joint norm ``c`` at most, which keeps the direction.

    Source: Pascanu, Mikolov and Bengio, arXiv:1211.5063.

    Parameters
    ----------
    c : float, 0-d array, or Limit
        How large the joint norm may be, at least 0.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus of all.
    curve : callable, default hard
        What happens above the limit; `soft`, `smooth` and `tanh` have no corner there.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``c`` is negative or NaN, or ``ord`` below 1.

    Examples
    --------
    >>> uc.clip([np.asarray([3.0, 4.0]), np.asarray([12.0])], uc.by_global_norm(6.5))[0]
    [array([1.5, 2. ]), array([6.])]
    """
    return Rule(c, scope=all_leaves, norm=Norm(ord), curve=curve, nonfinite=nonfinite)


def by_block_rms(c: Any, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each leaf to root mean square ``c`` at most: ``g · min(1, c·√N/‖g‖₂)``.

    Source: Shazeer and Stern, *Adafactor*, arXiv:1804.04235.

    Parameters
    ----------
    c : float, 0-d array, or Limit
        How large each root mean square may be, at least 0.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``c`` is negative or NaN.

    Examples
    --------
    >>> uc.clip(np.asarray([7.0, 1.0]), uc.by_block_rms(1.0))[0]
    array([1.4, 0.2])
    """
    return Rule(c, scope=each_leaf, norm=RMS, nonfinite=nonfinite)


def by_group_norm(
    limits: Mapping[Hashable, Any], label_of: Label, ord: float = 2, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale the leaves of each group by one factor to the group's own joint norm at most.

    Parameters
    ----------
    limits : mapping of label to float, 0-d array, or Limit
        One for each label; ``math.inf`` leaves a group alone.
    label_of : callable
        ``label_of(path, leaf)`` names the group of a leaf; ``path`` is the tuple of keys that leads to
        it, such as ``("encoder", 0, "weight")``.
    ord : float, default 2
        The order of the norm, at least 1.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If a limit is negative or NaN, or, when gradients are clipped, if a label has none.

    Examples
    --------
    >>> rule = uc.by_group_norm({"body": 1.0, "head": 6.0}, lambda path, leaf: path[0])
    >>> uc.clip({"body": np.asarray([3.0, 4.0]), "head": np.asarray([12.0])}, rule)[0]
    {'body': array([0.6, 0.8]), 'head': array([6.])}
    """
    return Rule(PerGroup(limits), scope=groups(label_of), norm=Norm(ord), nonfinite=nonfinite)


def normalized(c: Any = 1.0, ord: float = 2, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale all leaves by one factor to joint norm ``c``, smaller gradients too: ``g · c/‖g‖``; zeros stay zeros.

    Source: Hazan, Levy and Shalev-Shwartz, *Beyond convexity*, arXiv:1507.02030; with momentum, Cutkosky and
    Mehta, arXiv:2002.03305. The size of the gradient is lost: the learning rate alone says how long steps are.

    Parameters
    ----------
    c : float, 0-d array, or Limit, default 1
        The joint norm, at least 0.
    ord : float, default 2
        The order of the norm, at least 1.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``c`` is negative or NaN, or ``ord`` below 1.

    Examples
    --------
    >>> uc.clip([np.asarray([0.3, 0.4])], uc.normalized(1.0))[0]
    [array([0.6, 0.8])]
    """
    return Rule(c, scope=all_leaves, norm=Norm(ord), curve=normalize, nonfinite=nonfinite)
