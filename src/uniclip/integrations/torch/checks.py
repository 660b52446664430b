# SPDX-License-Identifier: MIT
"""Facts about optimizers and rules that `attach` needs, and errors for what it cannot take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from uniclip._core.plan import check_answers_differ
from uniclip._errors import article, summarize
from uniclip._types import Path
from uniclip.backends.torch.private import OVERLAPS, STEP_PRE_HOOKS
from uniclip.compose import AnyRule, Masked, rules_with_norms
from uniclip.curves import rejects
from uniclip.integrations import masks_and_labels
from uniclip.integrations.torch.functions import get_total_norm
from uniclip.integrations.torch.parameters import ParamGroup, params_in
from uniclip.limits import Ema, PercentileOfAll, Split
from uniclip.rule import BaseRule

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",  # Accelerate
    "DPOptimizer": "original_optimizer",  # Opacus
    "LightningOptimizer": "optimizer",  # Lightning
    "OptimWrapper": "optimizer",  # MMEngine
    "_FabricOptimizer": "optimizer",  # Lightning Fabric
}
"""The wrappers that stand for an optimizer, by their class, and the attribute that has it.

They change the gradients in their own step, or do not step the optimizer each time.
"""


class Optimizer(Protocol):
    """A ``torch.optim.Optimizer``, for type checkers to tell it from a model even where PyTorch is
    not installed.
    """

    @property
    def param_groups(self) -> Any:
        """The groups of parameters."""

    @property
    def step(self) -> Callable[..., Any]:
        """The function that takes a step."""


Optimizers: TypeAlias = "Optimizer | Iterable[Optimizer] | Mapping[Any, Optimizer]"
"""One optimizer, or several that are stepped one after the other."""


def check_masks_and_labels(rule: BaseRule, paths: list[Path], leaves: list[torch.Tensor]) -> None:
    """Raise if a mask or a label inside of a rule fails, or returns the same for all parameters.

    Parameters without names have paths of numbers, in which a function finds no name. The rule
    checks no more later: at a step there may be only some of the leaves.

    Raises
    ------
    TypeError
        If a function fails.
    ValueError
        See `uniclip._core.plan.check_answers_differ`.
    """
    # A function that looks at the leaf, too, may still look for a name that is not there.
    named = not all(isinstance(name, int) for _, name in paths)

    for inner, function in masks_and_labels(rule):
        answers = [
            _call_on_path(rule, function, path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
        ]

        what = "scopes.groups(label)"
        if isinstance(inner, Masked):
            what = "masked(rule, where)"
            answers = list(map(bool, answers))
        check_answers_differ(what, function, paths, leaves, answers, by_leaf=named)
        inner.answers_checked.append(True)


def _call_on_path(
    rule: BaseRule, function: Callable[[Path, Any], Any], path: Path, leaf: torch.Tensor
) -> Any:
    """Return what a mask or a label returns, and show the path if it fails."""
    try:
        return function(path, leaf)
    except (AttributeError, LookupError, TypeError) as error:
        keys, fix = "group and name", ""
        if isinstance(path[1], int):
            keys = "group and number"
            fix = "; if it looks for names, pass them by attach(optimizer, rule, names=model)"
        msg = (
            f"a function of {summarize(rule)} failed for the path {path} of {keys} "
            f"({type(error).__name__}: {error}){fix}"
        )
        raise TypeError(msg) from error


def as_list(optimizer: Optimizers) -> list[Any]:
    """Return the elements of a list, tuple or dict of optimizers, or the only optimizer."""
    if optimizer and isinstance(optimizer, Mapping):
        return list(optimizer.values())
    if optimizer and isinstance(optimizer, (list, tuple)):
        return list(optimizer)
    return [optimizer]


def optimizers_of(optimizer: Optimizers, rule: AnyRule) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps are clipped if a rule is attached to ``optimizer``.

    Raises
    ------
    TypeError
        If one is not an optimizer, or its step cannot be replaced.
    ValueError
        If one occurs twice, or has hooks that its step may not run.
    """
    optimizers = list(map(unwrap, as_list(optimizer)))
    for number, one in enumerate(optimizers):
        place = "" if len(optimizers) == 1 else f" at position {number} of the list"
        _raise_if_no_optimizer(one, place, rule)
        _raise_if_not_replaceable(one)
        _raise_if_hooks_are_unknown(one)

    if len(set(map(id, optimizers))) < len(optimizers):
        msg = "a list of optimizers must have each only once"
        raise ValueError(msg)
    return optimizers


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside of known wrappers."""
    for base in type(optimizer).__mro__:
        # Other libraries have classes of these names, too.
        inside = getattr(optimizer, _WRAPPERS.get(base.__name__, ""), None)
        if is_optimizer(inside):
            return unwrap(inside)
    return optimizer


def is_optimizer(candidate: object) -> bool:
    """Return whether an object is stepped as an optimizer: one of PyTorch's, or one with the same
    two attributes.
    """
    if isinstance(candidate, (type, torch.nn.Module)):
        return False
    return hasattr(candidate, "param_groups") and callable(getattr(candidate, "step", None))


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step of an optimizer runs the step hooks of PyTorch."""
    # A wrapper may pass on the attributes of the optimizer inside.
    attributes = vars(optimizer)
    if STEP_PRE_HOOKS not in attributes:
        return False
    step = attributes.get("step")
    if step is None:
        return True

    # Schedulers wrap the step of the class, and so do others that mark what they wrap. Any other
    # function in its place may run no hooks.
    innermost = inspect.unwrap(getattr(step, "__func__", step))
    is_of_class = innermost is inspect.unwrap(type(optimizer).step)
    return is_of_class or getattr(innermost, "runs_hooks", False)


def _raise_if_hooks_are_unknown(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer has step pre-hooks, but a step that may not run them."""
    if runs_hooks(optimizer) or not getattr(optimizer, STEP_PRE_HOOKS, None):
        return
    msg = (
        f"{type(optimizer).__qualname__} has step pre-hooks, but another function stands in the "
        "place of its step(), so uniclip can't clip after the hooks; attach before step is "
        "replaced, or mark the function by functools.wraps(optimizer.step)"
    )
    raise ValueError(msg)


def _raise_if_not_replaceable(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the step of an optimizer cannot be replaced, or is not the one that is taken."""
    if getattr(optimizer, OVERLAPS, False):
        msg = (
            f"{type(optimizer).__qualname__}(overlap_with_ddp=True) takes its steps inside of "
            "backward, before all gradients are there, and its step() does nothing; make it "
            "without overlap_with_ddp"
        )
        raise ValueError(msg)

    # The new step is an attribute of the object, and its rule is found by a weak reference.
    kind = type(optimizer)
    if hasattr(type(getattr(kind, "step", None)), "__set__"):
        msg = (
            f"the step of {kind.__qualname__} is a property, so uniclip can't replace it by one "
            "that clips; attach to the optimizer inside"
        )
        raise TypeError(msg)
    if not hasattr(optimizer, "__dict__") or not kind.__weakrefoffset__:
        msg = (
            f"{kind.__qualname__} has slots, so uniclip can't replace its step by one that clips; "
            "give its class a __dict__ and a __weakref__"
        )
        raise TypeError(msg)


def _raise_if_no_optimizer(optimizer: object, place: str, rule: AnyRule) -> None:
    """Raise if an object is not an optimizer, and say what to pass in its place."""
    if is_optimizer(optimizer):
        return

    kind = type(optimizer).__qualname__
    # A class that has not called the __init__ of PyTorch's has no groups.
    if isinstance(optimizer, torch.optim.Optimizer):
        msg = (
            f"{kind} has no param_groups; call super().__init__(params, defaults) in its class, or "
            "attach to the optimizer inside"
        )
        raise TypeError(msg)

    fix = "pass an optimizer, such as torch.optim.AdamW(model.parameters())"
    if is_optimizer(rule):
        fix = "swap the arguments, as in attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = (
            "attach to the optimizer of its parameters, as in "
            "attach(torch.optim.AdamW(model.parameters()), rule)"
        )
    elif callable(getattr(optimizer, "step", None)):
        fix = (
            "attach to the optimizer that it steps, as in attach(wrapper.optimizer, rule), or to "
            "all that it steps, as in attach([muon, adamw], rule)"
        )
    msg = (
        "optimizer must be a torch.optim.Optimizer, or have its step and param_groups, or be a "
        f"list of these, got {article(kind)} {kind}{place}; {fix}"
    )
    raise TypeError(msg)


@torch.no_grad()  # type: ignore[untyped-decorator]
def moves_nothing(groups: list[ParamGroup]) -> bool:
    """Return whether a step can move no parameter, as the one by which
    ``torch.distributed.checkpoint`` makes the state of an optimizer before it loads.

    All its rates are 0, and each parameter that takes a gradient has one of zeros.
    """
    for group in groups:
        rate = group.get("lr", 0)
        if rate is None or float(rate) != 0:
            return False
        if any(p.grad is None and p.requires_grad for p in group["params"]):
            return False
    # A norm of NaN is not 0 either.
    grads = [p.grad for p in params_in(groups)]
    return bool(get_total_norm(grads) == 0)


def can_skip(rule: BaseRule) -> bool:
    """Return whether a rule may skip a step."""
    return any(
        inner.nonfinite == "skip" or rejects(inner.curve) for inner in rules_with_norms(rule)
    )


def spans_leaves(rule: BaseRule) -> bool:
    """Return whether a norm or a limit in a rule depends on several leaves."""
    for inner in rules_with_norms(rule):
        # In its warm-up an average has the joint norm of all leaves.
        joint_warmup = isinstance(inner.limit, Ema) and inner.limit.warmup > 0
        if inner.scope.label is not None or joint_warmup:
            return True
        if isinstance(inner.limit, (Split, PercentileOfAll)):
            return True
    return False


def names_in(model: torch.nn.Module, optimizer: Optimizer) -> torch.nn.Module | None:
    """Return a trainer's model to take names from, ``None`` if it has no parameter of the
    optimizer.
    """
    ids = set(map(id, model.parameters()))
    return None if ids.isdisjoint(map(id, params_in(optimizer.param_groups))) else model
