# SPDX-License-Identifier: MIT
# The signatures are PyTorch's.
# ruff: noqa: ARG001, FBT001, FBT002, PLR0913
"""The functions of ``torch.nn.utils`` that clip gradients, with uniclip's algorithm.

They keep PyTorch's signatures, so code changes only its import. For the gradients of an optimizer,
`attach` is in `attaching`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np
import torch

from uniclip._core.collectives import AllReduce, Shared
from uniclip._core.containers import Flat, flatten_known
from uniclip._core.spine import Decision, run_spine, run_step
from uniclip._errors import LIMIT, article, check, check_range, nonnegative, number, summarize
from uniclip._types import Array, NonFinite, StepOptions
from uniclip.api import clip_
from uniclip.backends.torch import BACKEND
from uniclip.backends.torch.dtensor import is_dtensor, shards_of_gradients
from uniclip.backends.torch.one_norm import gradients_of
from uniclip.integrations.torch.processes import check_shards
from uniclip.limits import NoState
from uniclip.presets.fixed import by_global_norm, by_value
from uniclip.rule import Rule

NOTHING = NoState()
"""The state of the rules of this module, which keep none."""

_IN_PLACE = StepOptions(in_place=True)
_CPU = torch.device("cpu")
_DISTRIBUTED = torch.distributed.is_available()

_NUMBERS = {float, int}
"""The types of limits and orders that need no check."""

_RULES = {
    (order, raises): by_global_norm(1.0, ord=order, nonfinite="raise" if raises else "propagate")
    for order in (1.0, 2.0, math.inf)
    for raises in (False, True)
}
"""The rules of the usual orders, made once, since making one takes longer than a call."""


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
        Tensors whose ``.grad`` is clipped: dense or sparse, regular or distributed. One that occurs
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
        As for `attach`: the processes that hold shards of one model as regular tensors, and which
        tensors are replicas; the path of a tensor is its number.

    Returns
    -------
    norm : 0-d tensor
        The norm before clipping, in float32 or wider, on the device of the first gradient; for
        distributed gradients the norm of the whole, as a regular tensor. 0 if no parameter has a
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
        If an iterator is empty: it is already used up, or the module has no parameters.

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
    # A generator is read once; an empty one stays, since it is warned of.
    if hasattr(parameters, "__next__"):
        parameters = list(parameters) or parameters

    rule = None
    if type(norm_type) in _NUMBERS:
        rule = _RULES.get((norm_type, error_if_nonfinite))

    # Nearly every call takes the spine, so nothing is done before it that it does not need.
    single_process = all_reduce is None and shared is None
    if rule is not None and single_process and type(parameters) is list:
        is_limit = type(max_norm) in _NUMBERS and max_norm >= 0  # type: ignore[operator]
        grads = gradients_of(parameters) if is_limit else None
        shards = shards_of_gradients(parameters) if is_limit and grads is None else None
        is_plain = grads is not None or shards is not None
        if is_plain and _DISTRIBUTED and torch.distributed.is_initialized():
            check_shards(parameters, "parameters", rule, _IN_PLACE)
        if shards is not None:
            flat = Flat(shards, _spec_of_list(len(shards)))
            norm: torch.Tensor = run_step(rule, flat, NOTHING, _IN_PLACE, max_norm).norms()
            return norm
        if grads is not None:
            taken = run_spine(rule, grads, NOTHING, _IN_PLACE, max_norm)
            if taken is not None:
                return _norm_tensor(taken[1])

    tensors = _tensors(parameters, "parameters")
    if rule is None:
        rule = _rule(norm_type, error_if_nonfinite)
    return _clip_tensors(tensors, max_norm, rule, all_reduce, shared)


@lru_cache
def _spec_of_list(length: int) -> Any:
    """Return the structure of a list of tensors."""
    return flatten_known([None] * length)[1]


def _norm_tensor(decision: Decision) -> torch.Tensor:
    """Return the norm of a step on the spine."""
    norm: Any = decision.norm
    # A tensor of NumPy's number takes longer.
    if type(norm) is float and decision.place[2] is np.float32:
        return torch.scalar_tensor(norm, dtype=torch.float32, device=_CPU)
    of_device: torch.Tensor = decision.arranged_norms()
    return of_device


def _clip_tensors(
    tensors: list[torch.Tensor],
    max_norm: float | Array,
    rule: Rule,
    all_reduce: AllReduce | None,
    shared: Shared | None,
) -> torch.Tensor:
    """Clip the gradients of tensors in place by any norm, and return it."""
    limit = max_norm
    if type(max_norm) is not float or not max_norm >= 0:
        limit = _limit("max_norm", max_norm)
    if _DISTRIBUTED and torch.distributed.is_initialized():
        check_shards(tensors, "parameters", rule, StepOptions(None, all_reduce, shared=shared))

    _check_have_grads(tensors)
    grads = grads_of(tensors)

    # Other processes wait for this one, also if it has no gradient.
    step = _IN_PLACE
    if all_reduce is not None or shared is not None:
        # The parameter of an absent gradient has the shape of what other processes reduce.
        params = [tensor.detach() for tensor in tensors]
        step = StepOptions(params, all_reduce, in_place=True, shared=shared)
    elif all([grad is None for grad in grads]):
        return torch.tensor(0.0)

    # To enter `no_grad` takes a microsecond.
    recorded = isinstance(max_norm, torch.Tensor) or any(
        [grad is not None and grad.requires_grad for grad in grads]
    )
    with torch.no_grad() if recorded else nullcontext():
        norm: torch.Tensor = run_step(rule, grads, NOTHING, step, limit).norms()
    return norm


def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float | Array,
    foreach: bool | None = None,
) -> None:
    """Clip each element of the gradients of parameters in place into ``[-clip_value, clip_value]``.

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
    tensors = _tensors(parameters, "parameters")
    _check_have_grads(tensors)
    clip_(grads_of(tensors), by_value(-limit, limit))


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
    # These may be gradients, so it is not checked whether they can have one.
    leaves = _tensors(tensors, "tensors", absent=True)
    rule = _rule(norm_type, error_if_nonfinite)
    check_shards(leaves, "tensors", rule, StepOptions(None, all_reduce, shared=shared))

    values = [leaf if leaf is None else leaf.detach() for leaf in leaves]
    if all([value is None for value in values]):
        if all_reduce is None:
            return torch.tensor(0.0)
        # This process takes part in the reduction with a norm of no elements.
        values = [torch.zeros(0)]

    step = StepOptions(all_reduce=all_reduce, shared=shared)
    with torch.no_grad():
        result = run_step(rule, values, NOTHING, step, math.inf, apply=None)
        norm: torch.Tensor = result.norms()
    return norm


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
    rule = by_global_norm(_limit("max_norm", max_norm))
    norm = _total_norm(total_norm)
    tensors = _tensors(parameters, "parameters")
    _check_have_grads(tensors)
    run_step(rule, grads_of(tensors), NOTHING, StepOptions(norm=norm, in_place=True))


def _rule(norm_type: float, error_if_nonfinite: bool) -> Rule:
    """Return the rule of `clip_grad_norm_`, whose limit is an argument of a step."""
    policy: NonFinite = "raise" if error_if_nonfinite else "propagate"
    return by_global_norm(1.0, ord=_order(norm_type), nonfinite=policy)


def grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter.

    Zeros for a distributed one without, as others may have one.
    """
    grad = parameter.grad
    if grad is None and parameter.requires_grad and is_dtensor(parameter):
        return torch.zeros_like(parameter, requires_grad=False)
    return grad


def grads_of(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each tensor.

    Zeros for a distributed one without, as other processes may have one.
    """
    grads = [tensor.grad for tensor in tensors]
    if any([grad is None for grad in grads]):
        return list(map(grad_of, tensors))
    return grads


def _check_have_grads(tensors: list[torch.Tensor]) -> None:
    """Raise if no tensor can have a gradient: these are probably the gradients themselves."""
    # Usual calls pass parameters, so the first tensor decides at almost no cost.
    if not tensors or type(tensors[0]) is torch.nn.Parameter:
        return
    if any(map(_can_have_grad, tensors)):
        return
    msg = (
        "parameters holds tensors that can have no gradient; pass the parameters, as in "
        "model.parameters(), whose .grad is clipped. To clip tensors that are gradients, use "
        "uc.clip_(tensors, uc.by_global_norm(max_norm))"
    )
    raise TypeError(msg)


def _can_have_grad(tensor: torch.Tensor) -> bool:
    """Return whether backward leaves a gradient in a tensor, or did; true for a frozen parameter,
    too.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return True
    # PyTorch warns if .grad of any other tensor is read.
    if not tensor.is_leaf and not tensor.retains_grad:
        return False
    return bool(tensor.requires_grad or tensor.grad is not None)


def _tensors(
    tensors: torch.Tensor | Iterable[torch.Tensor | None], name: str, *, absent: bool = False
) -> list[Any]:
    """Return a tensor, or those of an iterable, as a list; with ``absent`` it may hold ``None``.

    Raises
    ------
    TypeError
        If there is anything else.
    """
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if type(tensors) is not list:
        _check_iterable(tensors, name)

    found = list(tensors)
    if not found and isinstance(tensors, Iterator):
        # Compiled code cannot walk its own stack, as uniclip's own warnings do.
        warnings.warn(
            f"{name} is an empty generator, and there is nothing to clip: it is already used up, "
            "or the module has no parameters",
            stacklevel=3,
        )

    for element in found:
        if isinstance(element, torch.Tensor) or (absent and element is None):
            continue
        msg = f"{name} must hold tensors, got {_describe(element)}; pass {_EXAMPLES[name]}"
        raise TypeError(msg)
    return found


_EXAMPLES = {
    "parameters": "model.parameters()",
    "tensors": "[p.grad for p in model.parameters()]",
}
"""Examples of arguments, for errors."""


def _check_iterable(tensors: object, name: str) -> None:
    """Raise if an argument is no iterable of tensors; some modules are iterable, but hold none."""
    is_module = isinstance(tensors, torch.nn.Module)
    if isinstance(tensors, torch.nn.ParameterList):
        is_module = False
    if isinstance(tensors, Iterable) and not is_module:
        return

    first = f", and {name} come first" if isinstance(tensors, Number) else ""
    msg = (
        f"{name} must be a tensor or an iterable of tensors, got {_describe(tensors)}{first}; "
        f"pass {_EXAMPLES[name]}"
    )
    raise TypeError(msg)


def _describe(wrong: object) -> str:
    """Return what was passed in the place of a tensor."""
    if isinstance(wrong, tuple) and len(wrong) == 2 and isinstance(wrong[0], str):
        return f"the pair of a name and a parameter ({summarize(wrong[0])}, ...)"
    kind = type(wrong).__qualname__
    return f"{article(kind)} {kind}"


def _limit(name: str, limit: Any, hint: str = LIMIT) -> Any:
    """Return a limit; a tensor that can be read at no cost as a number."""
    if isinstance(limit, torch.Tensor) and limit.numel() == 1:
        # Reading a tensor on an accelerator would wait for it.
        limit = limit.item() if BACKEND.readable(limit) else limit.reshape(())
    return nonnegative(name, limit, hint)


def _total_norm(norm: Any) -> Any:
    """Return the norm that was passed, which may be NaN."""
    if isinstance(norm, torch.Tensor):
        if is_dtensor(norm):
            norm = norm.full_tensor()
        check("total_norm", norm, norm.numel() == 1, "one number")
        return norm.reshape(())

    value = number("total_norm", norm, "a number or a 0-d tensor")
    if math.isnan(value):
        return value
    return nonnegative("total_norm", value)


def _order(norm_type: float | str) -> float:
    """Return the order of a norm, which may be a string as in PyTorch."""
    # In the place of the order, a flag would count as 0 or 1.
    if isinstance(norm_type, bool) or getattr(norm_type, "dtype", None) is torch.bool:
        msg = (
            f"norm_type must be a number of at least 1, got {norm_type}; write "
            f"error_if_nonfinite={bool(norm_type)}"
        )
        raise TypeError(msg)

    try:
        order = float(norm_type)
    except (TypeError, ValueError, RuntimeError):
        msg = (
            "norm_type must be a number of at least 1, math.inf or 'inf', got "
            f"{summarize(norm_type)}"
        )
        raise TypeError(msg) from None
    check_range("norm_type", order, 1, math.inf)
    return order
