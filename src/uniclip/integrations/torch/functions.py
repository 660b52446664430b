# SPDX-License-Identifier: MIT
# The signatures are PyTorch's.
# ruff: noqa: ARG001, FBT001, FBT002, PLR0913
"""The functions of ``torch.nn.utils`` that clip gradients, with uniclip's algorithm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from numbers import Number
from typing import Any

import torch

from uniclip._core.collectives import AllReduce, Shared
from uniclip._core.fast_path import run_fast_path
from uniclip._core.step import run_step
from uniclip._errors import LIMIT, article, check, check_range, nonnegative, number, summarize
from uniclip._types import Array, NonFinite, Step
from uniclip.api import clip_
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.backends.torch.fast_path import gradients_of
from uniclip.integrations.torch.processes import check_shards
from uniclip.limits import NoState
from uniclip.presets.fixed import by_global_norm, by_value
from uniclip.rule import Rule


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | Array,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
) -> torch.Tensor:
    """Scale the gradients of parameters in place to a norm of at most ``max_norm``.

    The result is ``g · min(1, max_norm/‖g‖)``.

    Parameters
    ----------
    parameters : tensor or iterable of tensors
        Tensors whose ``.grad`` is clipped: dense or sparse, plain or distributed. One that occurs
        twice counts twice, and is scaled once.
    max_norm : float or 0-d tensor
        At least 0; ``math.inf`` only measures. A tensor on an accelerator is not read.
    norm_type : float, default 2.0
        The order of the norm, at least 1; ``math.inf`` or ``"inf"`` is the largest modulus.
    error_if_nonfinite : bool, default False
        Raise an error if a gradient is NaN or infinite, before any is changed. By default all
        become NaN, unless ``max_norm`` is ``math.inf``.
    foreach : bool, optional
        Ignored; accepted for compatibility with PyTorch.
    all_reduce, shared : optional
        As for `attach`: the processes that hold parts of one model as plain tensors, and which
        tensors are copies; the path of a tensor is its number.

    Returns
    -------
    norm : 0-d tensor
        The norm before clipping, in float32 or wider, on the device of the first gradient; for
        distributed gradients the norm of the whole, as a plain tensor. 0 if no parameter has a
        gradient.

    Raises
    ------
    TypeError
        If ``parameters`` holds anything but tensors, such as the pairs of ``named_parameters()``,
        or tensors that cannot have a gradient, such as the gradients themselves.
    ValueError
        If ``max_norm`` is negative or NaN, or ``norm_type`` below 1. With several processes, if the
        parameters are those of ``FullyShardedDataParallel`` (FSDP1), and no ``all_reduce`` is
        given.
    RuntimeError
        If ``error_if_nonfinite`` and a gradient is not finite; the error names the gradients by
        their number.

    Warns
    -----
    UserWarning
        If an iterator is empty: it was read before, or the module has no parameters.

    Notes
    -----
    ``torch.nn.utils.clip_grad_norm_`` divides by the norm + 1e-6. Here nothing is added, so clipped
    gradients differ by the relative amount 1e-6/norm.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import clip_grad_norm_
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([w], max_norm=1.0), w.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if hasattr(parameters, "__next__"):  # a generator is read once, and an empty one is warned of
        parameters = list(parameters) or parameters
    rule = _RULES.get((norm_type, error_if_nonfinite)) if type(norm_type) in _NUMBERS else None
    at_least_0 = type(max_norm) in _NUMBERS and max_norm >= 0  # type: ignore[operator]
    alone = all_reduce is None and shared is None
    if rule is not None and at_least_0 and alone and type(parameters) is list:
        if _DISTRIBUTED and torch.distributed.is_initialized():
            check_shards(parameters, "parameters", rule, None)
        present = gradients_of(parameters)
        result = None
        if present is not None:
            result = run_fast_path(rule, BACKEND, present, max_norm, _IN_PLACE)
        if result is not None:
            norm = result.norm
            if type(norm) is float:
                norm = torch.scalar_tensor(norm, dtype=torch.float32, device=_CPU)
            return norm
    tensors = _tensors(parameters, "parameters")
    limit = max_norm if type(max_norm) is float and max_norm >= 0 else _limit("max_norm", max_norm)
    rule = rule or _rule(norm_type, error_if_nonfinite)
    if _DISTRIBUTED and torch.distributed.is_initialized():
        check_shards(tensors, "parameters", rule, all_reduce)
    grads = _grads_of(tensors)
    if all_reduce is not None or shared is not None:
        step = Step(
            [tensor.detach() for tensor in tensors], all_reduce, in_place=True, shared=shared
        )
    elif all([grad is None for grad in grads]):
        return torch.tensor(0.0)
    else:
        step = _IN_PLACE
    recorded = isinstance(max_norm, torch.Tensor) or any(
        [grad is not None and grad.requires_grad for grad in grads]
    )
    with torch.no_grad() if recorded else nullcontext():
        return run_step(rule, grads, NOTHING, step, limit).norms()


def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float | Array,
    foreach: bool | None = None,
) -> None:
    """Clip each entry of the gradients of parameters in place into ``[-clip_value, clip_value]``.

    Parameters
    ----------
    parameters : tensor or iterable of tensors
        As for `clip_grad_norm_`.
    clip_value : float or 0-d tensor
        At least 0.
    foreach : bool, optional
        Ignored; accepted for compatibility with PyTorch.

    Raises
    ------
    TypeError
        As `clip_grad_norm_`; and if a gradient is complex.
    ValueError
        If ``clip_value`` is negative or NaN.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import clip_grad_value_
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([-3.0, 0.5])
    >>> clip_grad_value_(w, 1.0)
    >>> w.grad
    tensor([-1.0000,  0.5000])
    """
    limit = _limit("clip_value", clip_value, "")
    clip_(_grads_of(_tensors(parameters, "parameters")), by_value(-limit, limit))


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor | None],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
) -> torch.Tensor:
    """Return the joint norm of tensors, ``(Σ|x|ᵖ)^(1/p)``.

    Parameters
    ----------
    tensors : tensor or iterable of tensors
        Gradients or any other tensors; ``None`` is ignored. One that occurs twice counts twice.
    norm_type, error_if_nonfinite, foreach, all_reduce, shared
        As for `clip_grad_norm_`.

    Returns
    -------
    norm : 0-d tensor
        As that of `clip_grad_norm_`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `clip_grad_norm_`.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import get_total_norm
    >>> get_total_norm([torch.tensor([3.0, 4.0]), None, torch.tensor([[12.0]])])
    tensor(13.)
    """
    given = _tensors(tensors, "tensors", absent=True)
    rule = _rule(norm_type, error_if_nonfinite)
    check_shards(given, "tensors", rule, all_reduce)
    values = [tensor if tensor is None else tensor.detach() for tensor in given]
    if all([value is None for value in values]):
        if all_reduce is None:
            return torch.tensor(0.0)
        values = [torch.zeros(0)]
    with torch.no_grad():
        step = Step(all_reduce=all_reduce, shared=shared)
        return run_step(rule, values, NOTHING, step, math.inf, apply=None).norms()


def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | Array,
    total_norm: float | Array,
    foreach: bool | None = None,
) -> None:
    """Scale gradients of parameters in place by ``min(1, max_norm/total_norm)``, given their norm.

    Parameters
    ----------
    parameters : tensor or iterable of tensors
        As for `clip_grad_norm_`.
    max_norm : float or 0-d tensor
        At least 0.
    total_norm : float or 0-d tensor
        The result of `get_total_norm`, or of PyTorch's function of that name: with several
        processes that of all. If it is NaN or infinite, all gradients become NaN.
    foreach : bool, optional
        Ignored; accepted for compatibility with PyTorch.

    Raises
    ------
    TypeError, ValueError
        As `clip_grad_norm_`; and if ``total_norm`` is negative.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import clip_grads_with_norm_
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_grads_with_norm_(w, max_norm=1.0, total_norm=10.0)
    >>> w.grad
    tensor([0.3000, 0.4000])
    """
    rule, norm = by_global_norm(_limit("max_norm", max_norm)), _known(total_norm)
    grads = _grads_of(_tensors(parameters, "parameters"))
    run_step(rule, grads, NOTHING, Step(norm=norm, in_place=True))


NOTHING, _IN_PLACE = NoState(), Step(in_place=True)
_NUMBERS, _CPU = {float, int}, torch.device("cpu")
_DISTRIBUTED = torch.distributed.is_available()
_RULES: dict[Any, Rule] = {
    (p, flag): by_global_norm(1.0, ord=p, nonfinite="raise" if flag else "propagate")
    for p in (1.0, 2.0, math.inf)
    for flag in (False, True)
}


def _rule(norm_type: Any, error_if_nonfinite: bool) -> Rule:
    """Return the rule of `clip_grad_norm_`, whose limit is an argument of a step."""
    policy: NonFinite = "raise" if error_if_nonfinite else "propagate"
    return by_global_norm(1.0, ord=_order(norm_type), nonfinite=policy)


def grad_of(parameter: Any) -> Any:
    """Return the gradient of a parameter.

    Zeros for a distributed one without, as others may have one.
    """
    grad = parameter.grad
    if grad is None and parameter.requires_grad and is_dtensor(parameter):
        return torch.zeros_like(parameter, requires_grad=False)
    return grad


def _grads_of(tensors: list[Any]) -> list[Any]:
    """Return the gradient of each tensor, or ``None``; refuse tensors that cannot have one."""
    if (
        tensors
        and type(tensors[0]) is not torch.nn.Parameter
        and not any(map(_can_have_grad, tensors))
    ):
        msg = (
            "parameters holds tensors that can have no gradient: pass the parameters, as in "
            "model.parameters(), whose .grad is clipped; to clip tensors that are gradients, "
            "uc.clip_(tensors, uc.by_global_norm(max_norm))"
        )
        raise TypeError(msg)
    return grads_of(tensors)


def grads_of(tensors: list[Any]) -> list[Any]:
    """Return the gradient of each tensor.

    Zeros for a distributed one without, as other processes may have one.
    """
    grads = [tensor.grad for tensor in tensors]
    return list(map(grad_of, tensors)) if any([grad is None for grad in grads]) else grads


def _can_have_grad(tensor: Any) -> bool:
    """Whether backward leaves a gradient in a tensor, or did; true for a frozen parameter, too."""
    if isinstance(tensor, torch.nn.Parameter):
        return True
    held = tensor.is_leaf or tensor.retains_grad  # for all others PyTorch warns when .grad is read
    return bool(held and (tensor.requires_grad or tensor.grad is not None))


def _tensors(given: Any, name: str, *, absent: bool = False) -> list[Any]:
    """Return the tensors in a tensor or an iterable; refuse anything else."""
    if isinstance(given, torch.Tensor):
        return [given]
    usual = "model.parameters()" if name == "parameters" else "[p.grad for p in model.parameters()]"
    module = isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ParameterList)
    if type(given) is not list and (module or not isinstance(given, Iterable)):
        first = f", and {name} come first" if isinstance(given, Number) else ""
        msg = (
            f"{name} must be a tensor or an iterable of tensors, got {_described(given)}{first}: "
            f"pass {usual}"
        )
        raise TypeError(msg)
    tensors = list(given)
    if not tensors and isinstance(given, Iterator):
        why = "it was read before, or the module has no parameters"
        # Compiled code cannot walk its own stack, as uniclip's own warnings do.
        warnings.warn(
            f"{name} is an empty generator, and there is nothing to clip: {why}", stacklevel=3
        )
    others = [
        other
        for other in tensors
        if not isinstance(other, torch.Tensor) and not (absent and other is None)
    ]
    if others:
        msg = f"{name} must hold tensors, got {_described(others[0])}: pass {usual}"
        raise TypeError(msg)
    return tensors


def _described(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"the pair of a name and a parameter ({summarize(value[0])}, ...)"
    return f"{article(type(value).__qualname__)} {type(value).__qualname__}"


def _limit(name: str, value: Any, hint: str = LIMIT) -> Any:
    """Return a limit; a tensor that can be read at no cost as a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item() if BACKEND.readable(value) else value.reshape(())
    return nonnegative(name, value, hint)


def _known(norm: Any) -> Any:
    """Return a given norm, which may be NaN."""
    if isinstance(norm, torch.Tensor):
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        check("total_norm", norm, norm.numel() == 1, "one number")
        return norm.reshape(())
    value = number("total_norm", norm, "a number or a 0-d tensor")
    return value if math.isnan(value) else nonnegative("total_norm", value)


def _order(norm_type: Any) -> float:
    """Return the order of a norm, which may be a string as in PyTorch."""
    if isinstance(norm_type, bool) or getattr(norm_type, "dtype", None) is torch.bool:
        msg = (
            f"norm_type must be a number of at least 1, got {norm_type}: write "
            f"error_if_nonfinite={bool(norm_type)}"
        )
        raise TypeError(msg)
    try:
        order = float(norm_type)
    except (TypeError, ValueError, RuntimeError):
        msg = f"norm_type must be a number of at least 1, math.inf or 'inf', got {summarize(norm_type)}"
        raise TypeError(msg) from None
    check_range("norm_type", order, 1, math.inf)
    return order
