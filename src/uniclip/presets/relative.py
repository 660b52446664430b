# SPDX-License-Identifier: MIT
"""Published rules relative to the parameters, which every step needs as ``params``."""

from __future__ import annotations

from uniclip._errors import whole_number
from uniclip._types import Array, NonFinite, Number
from uniclip.limits import Relative, TrustRatio
from uniclip.norms import Norm
from uniclip.rule import Rule, preset
from uniclip.scopes import Layers, Scope, each_leaf, each_row, unit, with_layers

__all__ = ["agc", "cowclip", "larc"]


@preset
def agc(  # noqa: PLR0913 - the arguments of the published rule, and of its leaves
    ratio: Number = 0.01,
    eps: float = 1e-3,
    axis: int | tuple[int, ...] | None = None,
    ord: float = 2,
    *,
    output_axis: int | None = None,
    stacked: Layers | None = None,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each output unit's gradient to a norm of at most ``ratio · max(‖w‖, eps)``.

    Here w are the unit's weights.

    Source: Brock, De, Smith and Simonyan, *High-performance large-scale image recognition without
    normalization*, arXiv:2102.06171. Exclude the last linear layer's weight, as the paper does:
    in Flax ``uc.masked(uc.agc(), lambda path, leaf: path[-2:] != ("head", "kernel"))``; paths
    differ between frameworks. Check the report, which is ``None`` for leaves that are excluded.

    Parameters
    ----------
    ratio : float or 0-d array, default 0.01
        The paper's value for SGD with batches of 4,096; up to 0.16 for small batches. With Adam
        0.01 often clips far too much.
    eps : float, default 1e-3
        The smallest norm of weights that is used; without it weights that begin at zero could never
        change.
    axis : int or tuple of int, optional
        The axes that one norm covers, as in optax. By default all but the output axis, which is the
        first in PyTorch and the last elsewhere; then a vector or a scalar is one unit.
    ord : float, default 2
        The order of the norm of gradients and weights, at least 1, as ``norm_type`` in timm;
        ``math.inf`` is the largest modulus.
    output_axis : int, optional
        The axis of the units in leaves of two or more axes, as of `uniclip.scopes.unit`: 0 for
        Equinox, whose layers have it first, unlike JAX's other libraries. A vector or a scalar is
        one unit.
    stacked : int or callable, optional
        The number of leading axes along which a leaf stacks layers, or a function of
        ``(path, leaf)`` that returns it; see `uniclip.scopes.stacked`. The axes of the other
        arguments are those of one layer.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        If ``ratio`` or ``eps`` is negative or NaN, ``ord`` below 1, or both ``axis`` and
        ``output_axis`` are given; when gradients are clipped, without ``params``, or if a leaf has
        no axis beside those that stack layers.

    Notes
    -----
    Embedding tables, transposed and depthwise convolutions have their units along another axis: use
    `masked` and ``axis``. The reference implementation treats (n, 1, 1, 1) as one unit; other ports
    clip whole leaves.

    Examples
    --------
    >>> params, grads = np.asarray([[1.0], [1.0]]), np.asarray([[3.0], [4.0]])
    >>> uc.clip(grads, uc.agc(0.1, axis=1), params=params)[0]
    array([[0.1],
           [0.1]])
    """
    if axis is not None and output_axis is not None:
        msg = (
            f"axis={axis!r} names the axes that one norm covers, and output_axis={output_axis!r} "
            "the one that it does not; pass one of them"
        )
        raise ValueError(msg)
    scope = unit(None if output_axis is None else whole_number("output_axis", output_axis))
    if axis is not None:
        scope = Scope(axes=axis)
    scope = with_layers(scope, stacked)
    return Rule(Relative(ratio, eps), scope=scope, norm=Norm(ord), nonfinite=nonfinite)


@preset
def cowclip(
    counts: Array, ratio: float = 1.0, eps: float = 1e-5, *, nonfinite: NonFinite = "propagate"
) -> Rule:
    """Scale each row of an embedding's gradient to at most ``ratio · count · max(‖row‖, eps)``.

    Source: Zheng et al., *CowClip*, arXiv:2204.06240. Only for the embedding table: clip it alone,
    or use `masked`. The gradient of the table must be dense.

    Parameters
    ----------
    counts : array, of shape (rows,)
        How often each row's id occurs in the batch, 1 for ids that do not; of any real dtype, also
        a NumPy array. Make a new rule at each step.
    ratio : float, default 1
    eps : float, default 1e-5
        The smallest norm of a row that is used; the paper has 1e-5 for Criteo, 1e-4 to 1e-3 for
        Avazu.
    nonfinite : str, default "propagate"
        What happens to gradients with NaN or ∞; see `Rule`.

    Raises
    ------
    ValueError
        When gradients are clipped: without ``params``, or if ``counts`` does not match the rows.

    Examples
    --------
    >>> table = np.asarray([[3.0, 4.0], [0.0, 1.0]])
    >>> grads = np.asarray([[30.0, 40.0], [0.3, 0.4]])
    >>> uc.clip(grads, uc.cowclip(np.asarray([2.0, 1.0])), params=table)[0]
    array([[6. , 8. ],
           [0.3, 0.4]])
    """
    return Rule(Relative(ratio, eps, counts), scope=each_row, nonfinite=nonfinite)


@preset
def larc(
    lr: Number,
    trust_coefficient: float = 0.02,
    weight_decay: float = 0.0,
    *,
    nonfinite: NonFinite = "propagate",
) -> Rule:
    """Scale each leaf so that a step of rate ``lr`` is at most ``trust_coefficient · ‖w‖`` long.

    The factor is ``min(1, trust_coefficient·‖w‖ / (lr·(‖g‖ + weight_decay·‖w‖)))``. Source: the
    clipping mode of LARC in NVIDIA's apex, after You, Gitman and Ginsburg, *Large batch training of
    convolutional networks*, arXiv:1708.03888. There the weight decay is added to the gradient
    before it is scaled; here the optimizer adds it afterwards, so it is not scaled.

    Parameters
    ----------
    lr : float or 0-d array
        The learning rate of this step; make a new rule when it changes.
    trust_coefficient : float, default 0.02
        How long a step may be relative to its parameter.
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
    limit = TrustRatio(lr, trust_coefficient, weight_decay)
    return Rule(limit, scope=each_leaf, nonfinite=nonfinite)
