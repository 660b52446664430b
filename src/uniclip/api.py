# SPDX-License-Identifier: MIT
"""The public functions: clip by any rule, in place or summed over examples, and functions with the
names that other libraries use.

The latter keep their established names and argument order. Docstring examples assume ``np`` and
``uc``.
"""

from __future__ import annotations

import math
from typing import Any

from uniclip._core.apply import LIMIT_FOR_EACH_LAYER, sum_examples
from uniclip._core.collectives import AllReduce, Shared
from uniclip._core.measure import StepInputs
from uniclip._core.spine import run_step
from uniclip._core.step import run_general_step
from uniclip._core.tree import open_tree
from uniclip._errors import LIMIT, nonnegatives, real, summarize
from uniclip._types import Number, StepOptions, T, Tree
from uniclip.compose import AnyRule, ByValue, Masked, as_rule, walk_rules
from uniclip.limits import NoState
from uniclip.presets.fixed import by_average_norm, by_global_norm, by_norm
from uniclip.report import Report
from uniclip.rule import BaseRule, Rule, take_step

__all__ = [
    "clip", "clip_", "clip_and_sum", "clip_by_average_norm", "clip_by_global_norm", "clip_by_norm",
    "clip_by_value", "global_norm",
]  # fmt: skip


def clip(
    grads: T,
    rule: AnyRule,
    params: Tree = None,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
) -> tuple[T, Report]:
    """Clip gradients by a stateless rule, or by a function of one gradient array.

    Parameters
    ----------
    grads : array or tree of arrays
        Of one framework. ``None`` leaves are absent gradients and keep their place.
    rule : Rule or callable
        A callable gets one gradient array and returns the array to put in its place.
    params : tree, optional
        The parameters, for limits relative to them; a tree with the same paths as ``grads``.
    all_reduce : callable, process group, device mesh, or axis name, optional
        How to reduce over the processes or devices that hold parts of one tree: a function of
        ``(array, op)`` that reduces an array elementwise over all of them, where ``op`` is
        ``"sum"`` or ``"max"``; a ``torch.distributed.ProcessGroup`` or ``DeviceMesh``; the name of
        a JAX axis, or a tuple of names. With one norm, processes may have different leaves. With a
        norm for each leaf, all need the same leaves, ``None`` where one is absent. Named groups
        (`uniclip.by_group_norm`) may be empty in some.
    shared : callable, optional
        A function of a leaf's path (a tuple of keys) and the leaf, for replicas, which then count
        once: return ``True`` if every process holds a copy, or the number of those that do.

    Returns
    -------
    clipped : tree
        Like ``grads``: every leaf keeps its dtype, shape, device and sparsity (integers become the
        framework's default float under a rule that measures norms).
    report : Report

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, a function does not return an
        array, or ``rule`` is neither a rule nor a function.
    ValueError
        If the rule is stateful, a limit is negative or NaN, or an iterator is exhausted.
    FloatingPointError
        If the rule has ``nonfinite="raise"`` and a gradient is not finite.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> clipped, report = uc.clip(grads, uc.by_global_norm(6.5))
    >>> clipped
    [array([1.5, 2. ]), array([6.])]
    >>> float(report.norms), float(report.factors)
    (13.0, 0.5)
    >>> uc.clip(np.asarray([3.0, -4.0]), np.sign)[0]
    array([ 1., -1.])
    """
    return _clip_by(grads, rule, StepOptions(params, all_reduce, shared=shared))


def clip_(
    grads: Tree,
    rule: AnyRule,
    params: Tree = None,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
) -> Report:
    """Clip gradients in place, without a second copy of them.

    Parameters
    ----------
    grads, rule, params, all_reduce, shared
        As in `clip`, but the arrays must be writable. An array that occurs twice counts twice, and
        is written once.

    Returns
    -------
    report : Report

    Raises
    ------
    TypeError
        As `clip`; and if an array has to be written and cannot be: the framework's arrays are
        immutable, it is read-only, or several of its elements share memory; or if it holds integers
        and the rule measures norms.
    ValueError
        As `clip`; and if an array has to be written and overlaps with another.
    FloatingPointError
        As `clip`. After an error raised by uniclip no array has changed, except by earlier rules of
        a `chain`.

    Notes
    -----
    A function of an array, the scope `uniclip.scopes.each_entry` and tensors that record
    derivatives need temporary memory of the array's size.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> report = uc.clip_(grads, uc.by_global_norm(6.5))
    >>> grads, float(report.norms)
    ([array([1.5, 2. ]), array([6.])], 13.0)
    """
    return _clip_by(grads, rule, StepOptions(params, all_reduce, in_place=True, shared=shared))[1]


def clip_and_sum(
    grads: T,
    rule: Rule,
    params: Tree = None,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
) -> tuple[T, Report]:
    """Clip each example's gradient and sum over the examples, without storing the clipped ones.

    Parameters
    ----------
    grads : array or tree of arrays
        The examples along the first axis of every leaf, as ``jax.vmap(jax.grad(loss), (None, 0))``
        and ``torch.func.vmap(torch.func.grad(loss), (None, 0))`` return them.
    rule : Rule
        A stateless one, such as `uniclip.by_example_norm`. With a limit for each layer:
        ``uc.Rule(uc.limits.PerGroup(limits), scope=uc.Scope(uc.scopes.each_example.axes, label))``.
    params, all_reduce, shared
        As in `clip`.

    Returns
    -------
    total : tree
        Like ``grads``, without the first axis; summed in float32 or wider.
    report : Report

    Raises
    ------
    TypeError
        As `clip`; and if ``rule`` measures no norms.
    ValueError
        As `clip`; and if a leaf has no first axis, or leaves differ in its length.

    Notes
    -----
    For the mean divide by the number of examples; with differential privacy add the noise first,
    and divide by the expected number.

    Examples
    --------
    >>> grads = [np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[12.0], [0.0]])]
    >>> uc.clip_and_sum(grads, uc.by_example_norm(6.5))[0]
    [array([1.8, 2.4]), array([6.])]
    """
    if not isinstance(rule, Rule):
        msg = f"rule must be one of norms, such as uc.by_example_norm(1.0), got {summarize(rule)}"
        # A mask would let the leaves that it leaves out into the sum without any limit.
        if any([isinstance(inner, Masked) for inner in walk_rules(rule)]):
            msg += f"; for a limit for each layer, {LIMIT_FOR_EACH_LAYER}"
        raise TypeError(msg)

    update = "clipped, state, report = rule.update(grads, state), and sum the clipped gradients"
    _check_stateless(rule, update)

    # The spine does not sum over examples.
    step = StepOptions(params, all_reduce, shared=shared)
    inputs = StepInputs(rule, [open_tree(grads)], step, _NO_STATE, rule.constant)
    result = run_general_step(inputs, apply=sum_examples)
    return result.clipped(), result.report()


def clip_by_value(grads: T, min: Number, max: Number) -> T:
    """Clip each element into ``[min, max]``.

    Parameters
    ----------
    grads : array or tree of arrays
        Real; integers stay integers and need whole-number bounds.
    min, max : float or array
        The bounds; arrays broadcast against each leaf.

    Returns
    -------
    tree
        Like ``grads``, every leaf with its dtype and shape. NaN stays NaN.

    Raises
    ------
    TypeError
        If a leaf is complex or not an array, or a bound for integer gradients is not a whole
        number.
    ValueError
        If ``min > max`` or either is NaN.

    Notes
    -----
    Changes the direction of the gradient; `clip_by_global_norm` does not.

    Examples
    --------
    >>> uc.clip_by_value({"w": np.asarray([-3.0, 0.5]), "b": None}, -1, 1)
    {'w': array([-1. ,  0.5]), 'b': None}
    """
    return clip(grads, ByValue(min, max))[0]


def clip_by_norm(
    grads: T, max_norm: Number, *, axis: int | tuple[int, ...] | None = None, ord: float = 2
) -> T:
    """Scale each leaf to a norm of at most ``max_norm``: ``g · min(1, max_norm/‖g‖)``.

    Parameters
    ----------
    grads : array or tree of arrays
    max_norm : float or 0-d array
        At least 0; ``math.inf`` clips nothing.
    axis : int or tuple of int, optional
        The axes that one norm covers; by default all, one norm for each leaf.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.

    Returns
    -------
    tree
        Like ``grads``; integers become the framework's default float.

    Raises
    ------
    TypeError
        If a leaf is not an array, or ``max_norm`` not a number.
    ValueError
        If ``max_norm`` is negative or NaN, ``ord`` below 1, or ``axis`` out of range.

    Examples
    --------
    >>> uc.clip_by_norm(np.asarray([[3.0, 4.0], [0.3, 0.4]]), 1.0, axis=1)
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """
    # A rule caches its plans, so one that is made at each call would plan at each call.
    rule = _rule_of_order(_EACH, ord) if axis is None else None
    if rule is None:
        rule = by_norm(1.0, axis=axis, ord=ord)
    limit = nonnegatives("max_norm", max_norm, LIMIT)
    return run_step(rule, grads, _NO_STATE, max_norm=limit).clipped()


def clip_by_average_norm(grads: T, max_norm: Number) -> T:
    """Scale each leaf to ``‖g‖₂/N ≤ max_norm``, N its number of elements.

    As TensorFlow 1's function of that name. It is not the root mean square ``‖g‖₂/√N``, which
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
        If a leaf is not an array, or ``max_norm`` not a number.
    ValueError
        If ``max_norm`` is negative or NaN.

    Examples
    --------
    >>> uc.clip_by_average_norm(np.asarray([3.0, 4.0]), 1.0)
    array([1.2, 1.6])
    """
    limit = nonnegatives("max_norm", max_norm, LIMIT)
    return run_step(_AVERAGE, grads, _NO_STATE, max_norm=limit).clipped()


def clip_by_global_norm(
    grads: T, max_norm: Number, *, ord: float = 2, norm: Number | None = None
) -> tuple[T, Any]:
    """Scale all leaves by one factor, ``min(1, max_norm/‖grads‖)``, which keeps the direction.

    Parameters
    ----------
    grads : array or tree of arrays
    max_norm : float or 0-d array
        At least 0; ``math.inf`` only measures.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus of all.
    norm : float or 0-d array, optional
        The norm if it is already known, for example from `global_norm`; then it is not measured.

    Returns
    -------
    clipped : tree
        Like ``grads``; integers become the framework's default float. Unclipped gradients are
        returned bit for bit, in eager code on the CPU as the same objects.
    norm : 0-d array
        The norm before clipping, in float32 or wider.

    Raises
    ------
    TypeError
        If a leaf is not an array, or leaves belong to two frameworks.
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
    rule = _rule_of_order(_ALL, ord) or by_global_norm(1.0, ord=ord)
    # One object for the usual arguments, since making one takes a part of a small step.
    step = _NO_OPTIONS
    if norm is not None:
        step = StepOptions(norm=real("norm", norm, "a number or a 0-d array"))
    limit = nonnegatives("max_norm", max_norm, LIMIT)
    result = run_step(rule, grads, _NO_STATE, step, limit)
    return result.clipped(), result.norms()


def global_norm(grads: Tree, *, ord: float = 2) -> Any:
    """Return the norm of all leaves together, ``(Σ|g|ᵖ)^(1/p)``.

    Parameters
    ----------
    grads : array or tree of arrays
        ``None`` leaves are absent gradients.
    ord : float, default 2
        The order of the norm, at least 1; ``math.inf`` is the largest modulus.

    Returns
    -------
    0-d array
        In float32 or wider; 0 for a tree without arrays.

    Raises
    ------
    TypeError
        If a leaf is not an array, or leaves belong to two frameworks.
    ValueError
        If ``ord`` is below 1.

    Examples
    --------
    >>> float(uc.global_norm({"w": np.asarray([3.0, 4.0]), "b": np.asarray(12.0)}))
    13.0
    """
    rule = _rule_of_order(_ALL, ord) or by_global_norm(1.0, ord=ord)
    return run_step(rule, grads, _NO_STATE, max_norm=math.inf, apply=None).norms()


_NO_OPTIONS = StepOptions()
_NO_STATE = NoState()
_AVERAGE = by_average_norm(1.0)
_ALL = {p: by_global_norm(1.0, ord=p) for p in (1, 2, math.inf)}
_EACH = {p: by_norm(1.0, ord=p) for p in _ALL}
"""Rules for the usual orders of norms; the limit is an argument of a step."""


def _rule_of_order(rules: dict[float, Rule], ord: object) -> Rule | None:
    """Return the rule for a usual order of the norm."""
    return rules.get(ord) if type(ord) in {int, float} else None  # type: ignore[call-overload]


def _clip_by(grads: T, rule: AnyRule, step: StepOptions) -> tuple[T, Report]:
    """Take a step of a stateless rule."""
    rule = as_rule(rule)
    where = ", in_place=True" if step.in_place else ""
    _check_stateless(rule, f"clipped, state, report = rule.update(grads, state{where})")
    clipped, _, report = take_step(rule, grads, _NO_STATE, step)
    return clipped, report


def _check_stateless(rule: BaseRule, update: str) -> None:
    """Raise if a rule is stateful, and name the call of ``update`` to use instead."""
    if rule.stateful:
        msg = (
            f"{summarize(rule)} is stateful: use a uc.Clipper(rule); or "
            f"state = rule.init(grads), then {update}"
        )
        raise ValueError(msg)
