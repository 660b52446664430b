# SPDX-License-Identifier: MIT
"""The five familiar functions, by their oldest names and argument order; each is one expression over a rule.

The examples assume ``np`` and ``uc``, as everywhere in the documentation.
"""

from __future__ import annotations

from typing import Any

from uniclip._checks import LIMIT, in_order, nonnegatives, real
from uniclip.arraywise import ByValue
from uniclip.norms import Norm
from uniclip.presets import by_average_norm, by_global_norm, by_norm
from uniclip.rules import clip_known, norm_of
from uniclip.scopes import all_leaves
from uniclip.verbs import clip


def clip_by_value(grads: Any, min: Any, max: Any) -> Any:
    """Clip each entry into ``[min, max]``.

    Parameters
    ----------
    grads : array or tree of arrays
        Real; integers stay integers and need whole bounds.
    min, max : float or array
        The bounds; arrays broadcast against each leaf.

    Returns
    -------
    tree
        Like ``grads``, every leaf with its dtype and shape. NaN stays NaN.

    Raises
    ------
    TypeError
        If a leaf is complex or no array, or a bound of integer gradients is not whole.
    ValueError
        If ``min > max`` or one of them is NaN.

    Notes
    -----
    Changes the direction of the gradient; `clip_by_global_norm` does not.

    Examples
    --------
    >>> uc.clip_by_value({"w": np.asarray([-3.0, 0.5]), "b": None}, -1, 1)
    {'w': array([-1. ,  0.5]), 'b': None}
    """
    in_order("uc.clip_by_value(grads, min, max)", grads, min, max)
    return clip(grads, ByValue(min, max))[0]


def clip_by_norm(grads: Any, max_norm: Any, *, axis: int | tuple[int, ...] | None = None, ord: float = 2) -> Any:
    """Scale each leaf by itself to norm ``max_norm`` at most: ``g · min(1, max_norm/‖g‖)``.

    Parameters
    ----------
    grads : array or tree of arrays
    max_norm : float or 0-d array
        At least 0; ``math.inf`` leaves alone.
    axis : int or tuple of int, optional
        Give each slice along these axes its own norm; without it, each leaf has one.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.

    Returns
    -------
    tree
        Like ``grads``; integers become the framework's default float.

    Raises
    ------
    TypeError
        If a leaf or ``max_norm`` is no array or number.
    ValueError
        If ``max_norm`` is negative or NaN, ``ord`` below 1, or ``axis`` out of range.

    Examples
    --------
    >>> uc.clip_by_norm(np.asarray([[3.0, 4.0], [0.3, 0.4]]), 1.0, axis=1)
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    in_order("uc.clip_by_norm(grads, max_norm)", grads, max_norm)
    return clip(grads, by_norm(nonnegatives("max_norm", max_norm, LIMIT), axis=axis, ord=ord))[0]


def clip_by_average_norm(grads: Any, max_norm: Any) -> Any:
    """Scale each leaf by itself to ``‖g‖₂/N ≤ max_norm``, N its number of entries.

    This is TF 1's function of that name. It is not the root mean square ``‖g‖₂/√N``, which
    `uniclip.by_block_rms` limits.

    Parameters
    ----------
    grads : array or tree of arrays
    max_norm : float or 0-d array
        At least 0.

    Returns
    -------
    tree
        Like ``grads``; integers become the framework's default float.

    Raises
    ------
    TypeError
        If a leaf or ``max_norm`` is no array or number.
    ValueError
        If ``max_norm`` is negative or NaN.

    Examples
    --------
    >>> uc.clip_by_average_norm(np.asarray([3.0, 4.0]), 1.0)
    array([1.2, 1.6])
    """
    in_order("uc.clip_by_average_norm(grads, max_norm)", grads, max_norm)
    return clip(grads, by_average_norm(nonnegatives("max_norm", max_norm, LIMIT)))[0]


def clip_by_global_norm(grads: Any, max_norm: Any, *, ord: float = 2, norm: Any = None) -> tuple[Any, Any]:
    """Scale all leaves by one factor, ``min(1, max_norm/‖grads‖)``: the direction is kept.

    Parameters
    ----------
    grads : array or tree of arrays
    max_norm : float or 0-d array
        At least 0; ``math.inf`` only measures.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus of all.
    norm : float or 0-d array, optional
        The norm, if it is known already (from `global_norm`, say); then it is not measured.

    Returns
    -------
    clipped : tree
        Like ``grads``; integers become the framework's default float. Unclipped gradients come back
        bit for bit, and in eager code on the CPU as the very same arrays.
    norm : 0-d array
        The norm before clipping, in float32 or wider.

    Raises
    ------
    TypeError
        If a leaf is no array, or leaves belong to two frameworks.
    ValueError
        If ``max_norm`` is negative or NaN, ``norm`` negative, or ``ord`` below 1.

    Notes
    -----
    Source: Pascanu, Mikolov and Bengio, *On the difficulty of training recurrent neural networks*,
    arXiv:1211.5063.

    Examples
    --------
    >>> clipped, norm = uc.clip_by_global_norm([np.asarray([3.0, 4.0]), np.asarray([12.0])], 6.5)
    >>> clipped, float(norm)
    ([array([1.5, 2. ]), array([6.])], 13.0)
    """
    in_order("uc.clip_by_global_norm(grads, max_norm)", grads, max_norm)
    rule = by_global_norm(nonnegatives("max_norm", max_norm, LIMIT), ord=ord)
    return clip_known(rule, grads, norm if norm is None else real("norm", norm, "a number or a 0-d array"))


def global_norm(grads: Any, *, ord: float = 2) -> Any:
    """Return the norm of all leaves together, ``(Σ|g|ᵖ)^(1/p)``.

    Parameters
    ----------
    grads : array or tree of arrays
        ``None`` leaves are absent.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.

    Returns
    -------
    0-d array
        In float32 or wider; 0 for a tree without arrays.

    Raises
    ------
    TypeError
        If a leaf is no array, or leaves belong to two frameworks.
    ValueError
        If ``ord`` is below 1.

    Examples
    --------
    >>> float(uc.global_norm({"w": np.asarray([3.0, 4.0]), "b": np.asarray(12.0)}))
    13.0
    """
    return norm_of(grads, all_leaves, Norm(ord))
