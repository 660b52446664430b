# SPDX-License-Identifier: MIT
"""The published rules that compare a gradient with its parameters, which they need as ``params``."""

from __future__ import annotations

from uniclip._mistakes import keywords_known
from uniclip._types import Array, Number
from uniclip.limits import Relative, TrustRatio
from uniclip.nonfinite import NonFinite
from uniclip.norms import Norm
from uniclip.rules import Rule
from uniclip.scopes import along, each_leaf, each_row, unit


@keywords_known
def agc(
    ratio: Number = 0.01,
    eps: float = 1e-3,
    axis: int | tuple[int, ...] | None = None,
    ord: float = 2,  # noqa: A002 - the standard's name
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each output unit's gradient to ``ratio · max(‖w‖, eps)`` at most, w the unit's weights.

    Source: Brock, De, Smith and Simonyan, *High-performance large-scale image recognition without
    normalization*, arXiv:2102.06171. Leave out the last linear layer's weight, as the paper does:
    ``uc.masked(uc.agc(), lambda path, leaf: path[-2:] != ("head", "kernel"))``; look at the report, which is ``None``
    for what is left out.

    Parameters
    ----------
    ratio : float or 0-d array, default 0.01
        The paper's is for batches of 4,096 and SGD; up to 0.16 for small ones. With Adam 0.01 is often
        far too strong.
    eps : float, default 1e-3
        The least norm of weights that counts, or weights that begin with zeros could never change.
    axis : int or tuple of int, optional
        The axes that one norm covers, as in optax; without it all but that of the output units, by the framework's
        convention the first in PyTorch and the last elsewhere. A vector or a scalar is one unit then.
    ord : float, default 2
        The order of the norm of gradients and weights, at least 1, as ``norm_type`` in timm; ``math.inf`` is the
        largest modulus.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``ratio`` or ``eps`` is negative or NaN, ``ord`` below 1, or, when gradients are clipped, without ``params``.

    Notes
    -----
    Embedding tables, transposed and depthwise convolutions have their units elsewhere: use `masked` and
    ``axis``. The reference implementation takes (n, 1, 1, 1) as one unit, other ports clip whole leaves.

    Examples
    --------
    >>> params, grads = np.asarray([[1.0], [1.0]]), np.asarray([[3.0], [4.0]])
    >>> uc.clip(grads, uc.agc(0.1, axis=1), params=params)[0]
    array([[0.1],
           [0.1]])
    """
    scope = unit() if axis is None else along(axis)
    return Rule(Relative(ratio, eps), scope=scope, norm=Norm(ord), nonfinite=nonfinite)


@keywords_known
def cowclip(counts: Array, ratio: float = 1.0, eps: float = 1e-5, *, nonfinite: NonFinite = "propagate") -> Rule:
    """Scale each row of an embedding table's gradient to ``ratio · count · max(‖row‖, eps)`` at most.

    Source: Zheng et al., *CowClip*, arXiv:2204.06240. Only for the embedding table: clip it by itself, or
    use `masked`. The table's gradient has to be dense.

    Parameters
    ----------
    counts : array, of shape (rows,)
        How often each row's id occurs in the batch, 1 for those that do not; of any real dtype, NumPy's too.
        Make a new rule at each step.
    ratio : float, default 1
    eps : float, default 1e-5
        The least norm of a row that counts; the paper has 1e-5 for Criteo, 1e-4 to 1e-3 for Avazu.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        When gradients are clipped: without ``params``, or if ``counts`` does not fit the rows.

    Examples
    --------
    >>> table, grads = np.asarray([[3.0, 4.0], [0.0, 1.0]]), np.asarray([[30.0, 40.0], [0.3, 0.4]])
    >>> uc.clip(grads, uc.cowclip(np.asarray([2.0, 1.0])), params=table)[0]
    array([[6. , 8. ],
           [0.3, 0.4]])
    """
    return Rule(Relative(ratio, eps, counts), scope=each_row, nonfinite=nonfinite)


@keywords_known
def larc(
    lr: Number, trust_coefficient: float = 0.02, weight_decay: float = 0.0, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each leaf so that a step at the learning rate ``lr`` is at most ``trust_coefficient · ‖w‖`` long.

    The factor is ``min(1, trust_coefficient·‖w‖ / (lr·(‖g‖ + weight_decay·‖w‖)))``. Source: the clipping mode of LARC
    in NVIDIA's apex, after You, Gitman and Ginsburg, *Large batch training of convolutional networks*,
    arXiv:1708.03888. There the weight decay is added to the gradient before it is multiplied; here the
    optimizer adds it afterwards, so it is not scaled.

    Parameters
    ----------
    lr : float or 0-d array
        The learning rate of this step; make a new rule when it changes.
    trust_coefficient : float, default 0.02
        How long a step may be beside its parameter.
    weight_decay : float, default 0
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        When gradients are clipped without ``params``.

    Examples
    --------
    >>> uc.clip(np.asarray([30.0, 40.0]), uc.larc(lr=0.1), params=np.asarray([3.0, 4.0]))[0]
    array([0.6, 0.8])
    """
    return Rule(TrustRatio(lr, trust_coefficient, weight_decay), scope=each_leaf, nonfinite=nonfinite)
