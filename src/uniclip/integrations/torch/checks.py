# SPDX-License-Identifier: MIT
"""Checks of what a rule can be attached to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from uniclip.compose import rules_with_norms
from uniclip.curves import rejects
from uniclip.integrations import masks_and_labels
from uniclip.integrations.torch.stepped import Stepped, find_stepped, has_hooks, is_optimizer
from uniclip.limits import Ema, PercentileOfAll, Split


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


class Unnamed(int):
    """The number of a parameter that has no name: a function that makes text of it,
    or looks it up, fails.
    """

    def __repr__(self, *_: Any) -> str:
        """Refuse to be a text."""
        raise TypeError(_NO_NAME)

    __format__ = __repr__

    def __hash__(self) -> int:
        """Refuse to be looked up."""
        raise TypeError(_NO_NAME)

    def __eq__(self, other: object) -> bool:
        """Compare numbers; refuse a text."""
        if isinstance(other, str):
            raise TypeError(_NO_NAME)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        """Compare numbers; refuse a text."""
        return not self == other


_NO_NAME = "a parameter has a number in the place of a name, which is no text"
_OTHERS = 1009, 20011
"""What is added to numbers, to see whether a function tells them apart."""


def check_names(rule: Any, paths: list[Any], leaves: list[Any]) -> None:
    """Refuse a mask or a label inside of a rule that looks for names, where paths end with numbers.

    It does if it makes text of a number, or looks it up, and any other number would do as well.

    Raises
    ------
    TypeError
        If it does.
    """
    for _, function in masks_and_labels(rule):
        if _asks_for_names(function, paths, leaves) and not _tells_numbers_apart(
            function, paths, leaves
        ):
            raise TypeError(_NO_NAME)


def _asks_for_names(function: Any, paths: list[Any], leaves: list[Any]) -> bool:
    """Whether a function of a path makes text of a number, or looks it up."""
    try:
        for (number, key), leaf in zip(paths, leaves, strict=True):
            function((number, Unnamed(key)), leaf)
    except TypeError as error:
        return str(error) == _NO_NAME
    return False


def _tells_numbers_apart(function: Any, paths: list[Any], leaves: list[Any]) -> bool:
    """Whether a function of a path says something else of other numbers."""
    try:
        answers = [
            [
                function((number, key + more), leaf)
                for (number, key), leaf in zip(paths, leaves, strict=True)
            ]
            for more in (0, *_OTHERS)
        ]
    except LookupError:  # a table of the numbers that there are
        return True
    return any([one != answers[0] for one in answers])


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
