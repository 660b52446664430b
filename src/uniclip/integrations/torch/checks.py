# SPDX-License-Identifier: MIT
"""Checks of what a rule can be attached to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from uniclip._core.plan import check_answers_differ
from uniclip._errors import summarize
from uniclip._types import Path
from uniclip.compose import Masked, rules_with_norms
from uniclip.curves import rejects
from uniclip.integrations import masks_and_labels
from uniclip.integrations.torch.stepped import Stepped, find_stepped, has_hooks, is_optimizer
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
        """What takes a step."""


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
    numbered = all(isinstance(name, int) for _, name in paths)
    for inner, function in masks_and_labels(rule):
        answers = [
            _call_on_path(rule, function, path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        what = "scopes.groups(label)"
        if isinstance(inner, Masked):
            what = "masked(rule, where)"
            answers = list(map(bool, answers))

        # Where there are no names, a function that looks at the leaf, too, may still look for one.
        check_answers_differ(what, function, paths, leaves, answers, by_leaf=not numbered)
        inner.tells_apart.append(True)


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


def stepped_by(optimizer: Any, rule: Any) -> Stepped:
    """Return what is stepped where a rule is attached to ``optimizer``.

    Refuse an object that is not stepped so.

    Raises
    ------
    TypeError
        If it is not an optimizer, or holds an object without hooks, whose steps nobody sees.
    """
    if not is_optimizer(optimizer):
        fix = (
            "give the object whose step() is called, as torch.optim.AdamW(model.parameters()) "
            "returns it"
        )
        if is_optimizer(rule):
            fix = "the arguments are swapped, it is attach(optimizer, rule)"
        elif isinstance(optimizer, torch.nn.Module):
            fix = (
                "attach to the optimizer of its parameters, as in "
                "attach(torch.optim.AdamW(model.parameters()), rule)"
            )
        msg = (
            "optimizer must be a torch.optim.Optimizer, or have its step and param_groups, "
            f"got a {type(optimizer).__qualname__}: {fix}"
        )
        raise TypeError(msg)

    stepped = find_stepped(optimizer)
    outer = type(stepped.outer).__qualname__
    if not stepped.inner and not hasattr(stepped.outer, "param_groups"):
        msg = (
            f"{outer} has no param_groups and holds no optimizer: call super().__init__(params, "
            "defaults) in its class"
        )
        raise TypeError(msg)

    for one in stepped.inner:
        if not has_hooks(one):
            msg = (
                f"{outer} holds a {type(one).__qualname__}, which runs no hooks before its step: "
                "make it a torch.optim.Optimizer, whose __init__ calls super().__init__(params, "
                "defaults)"
            )
            raise TypeError(msg)
    kind = type(stepped.outer)
    if not hasattr(stepped.outer, "__dict__") or not kind.__weakrefoffset__:
        msg = (
            f"{outer} has slots, so its step cannot be replaced by one that clips: give its class "
            "a __dict__ and a __weakref__"
        )
        raise TypeError(msg)
    return stepped


def can_skip(rule: Any) -> bool:
    """Return whether a rule may skip a step."""
    return any(one.nonfinite == "skip" or rejects(one.curve) for one in rules_with_norms(rule))


def spans_leaves(rule: Any) -> bool:
    """Return whether a norm or a limit in a rule depends on several leaves."""
    for one in rules_with_norms(rule):
        # In its warm-up an average has the joint norm of all leaves.
        joint_warmup = isinstance(one.limit, Ema) and one.limit.warmup > 0
        if (
            one.scope.label is not None
            or joint_warmup
            or isinstance(one.limit, (Split, PercentileOfAll))
        ):
            return True
    return False


def names_in(model: torch.nn.Module, optimizer: Any) -> torch.nn.Module | None:
    """Return a trainer's model if it has parameters of an optimizer, whose names it then tells;
    else ``None``.
    """
    known = set(map(id, model.parameters()))
    shared = any(id(p) in known for group in optimizer.param_groups for p in group["params"])
    return model if shared else None
