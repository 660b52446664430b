# SPDX-License-Identifier: MIT
"""Check an optimizer, and the functions in a rule, before the rule is attached.

Checks of a single step are in `optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from uniclip._core.plan import check_answers_differ
from uniclip._errors import summarize
from uniclip._types import Path
from uniclip.compose import AnyRule, Masked, rules_with_norms
from uniclip.curves import rejects
from uniclip.integrations import masks_and_labels
from uniclip.integrations.torch.stepped import (
    Stepped,
    find_stepped,
    has_hooks,
    is_optimizer,
    params_in,
)
from uniclip.limits import Ema, PercentileOfAll, Split
from uniclip.rule import BaseRule


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


def stepped_by(optimizer: Optimizer, rule: AnyRule) -> Stepped:
    """Return the object whose step is clipped if a rule is attached to ``optimizer``.

    Raises
    ------
    TypeError
        If it is not an optimizer, or holds an object without hooks, whose steps nobody sees.
    """
    _raise_if_no_optimizer(optimizer, rule)

    # A class that has not called the __init__ of PyTorch's has no groups and no hooks.
    stepped = find_stepped(optimizer)
    outer = type(stepped.outer)
    if not stepped.inner and not hasattr(stepped.outer, "param_groups"):
        msg = (
            f"{outer.__qualname__} has no param_groups and holds no optimizer; call "
            "super().__init__(params, defaults) in its class"
        )
        raise TypeError(msg)

    for inner in stepped.inner:
        if not has_hooks(inner):
            msg = (
                f"{outer.__qualname__} holds a {type(inner).__qualname__}, which runs no hooks "
                "before its step; make it a torch.optim.Optimizer, whose __init__ calls "
                "super().__init__(params, defaults)"
            )
            raise TypeError(msg)

    # The new step is an attribute of the object, and its rule is found by a weak reference.
    if not hasattr(stepped.outer, "__dict__") or not outer.__weakrefoffset__:
        msg = (
            f"{outer.__qualname__} has slots, so uniclip can't replace its step by one that "
            "clips; give its class a __dict__ and a __weakref__"
        )
        raise TypeError(msg)
    return stepped


def _raise_if_no_optimizer(optimizer: Optimizer, rule: AnyRule) -> None:
    """Raise if an object is not an optimizer, and say what to pass in its place."""
    if is_optimizer(optimizer):
        return

    fix = "pass the object whose step() is called, such as torch.optim.AdamW(model.parameters())"
    if is_optimizer(rule):
        fix = "swap the arguments, as in attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = (
            "attach to the optimizer of its parameters, as in "
            "attach(torch.optim.AdamW(model.parameters()), rule)"
        )
    msg = (
        "optimizer must be a torch.optim.Optimizer, or have its step and param_groups, got a "
        f"{type(optimizer).__qualname__}; {fix}"
    )
    raise TypeError(msg)


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
    for p in params_in(optimizer.param_groups):
        if id(p) in ids:
            return model
    return None
