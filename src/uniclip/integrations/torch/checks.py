# SPDX-License-Identifier: MIT
"""Checks of what a rule can be attached to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from uniclip.integrations import masks_and_labels


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


def refuse_names(rule: Any, paths: list[Any], leaves: list[Any]) -> None:
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


def optimizer_inside(optimizer: Any, rule: Any) -> Any:
    """Return the optimizer inside its wrappers.

    Refuse an object that is none, or one whose hooks do not run.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        inner, path = unwrapped(optimizer)
        if not hasattr(inner, "_optimizer_step_pre_hooks"):
            msg = (
                f"{type(optimizer).__qualname__} runs no hooks before its step: attach to the "
                "optimizer inside"
            )
            raise TypeError(msg)
        inside = _optimizers_in(inner)
        if inside:
            calls = " and ".join([f"attach({path}.{one}, rule)" for one in inside])
            msg = (
                f"{type(inner).__qualname__} holds another optimizer, and may take steps that do "
                "not go through its own step(), as the two of SAM do: attach to what is inside, "
                f"{calls}"
            )
            raise ValueError(msg)
        return inner
    fix = (
        "give the object whose step() is called, as torch.optim.AdamW(model.parameters()) returns "
        "it"
    )
    if isinstance(rule, torch.optim.Optimizer):
        fix = "the arguments are swapped, it is attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = (
            "attach to the optimizer of its parameters, as in "
            "attach(torch.optim.AdamW(model.parameters()), rule)"
        )
    msg = f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__qualname__}: {fix}"
    raise TypeError(msg)


def _optimizers_in(optimizer: Any) -> list[str]:
    """Return the places in which an optimizer holds others: attributes,
    and lists and dicts in these.

    What a class of PyTorch's holds does not count, since such a class takes all its steps by
    ``step()``.
    """
    bases, places = {*type(optimizer).__mro__} - {torch.optim.Optimizer, object}, []
    if any(base.__module__.startswith("torch.") for base in bases):
        return []
    for name, value in vars(optimizer).items():
        keyed = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, (list, tuple))
            else ()
        )
        if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
            places.append(name)
        places += [
            f"{name}[{key!r}]" for key, one in keyed if isinstance(one, torch.optim.Optimizer)
        ]
    return places


def unwrapped(optimizer: Any) -> tuple[Any, str]:
    """Return the optimizer inside its wrappers, which may have no state of their own,
    and where it is.
    """
    path = "optimizer"
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer, path = optimizer.optimizer, f"{path}.optimizer"
    return optimizer, path


def names_in(model: torch.nn.Module, optimizer: Any) -> torch.nn.Module | None:
    """Return a trainer's model if it has parameters of an optimizer, whose names it then tells;
    else ``None``.
    """
    known = set(map(id, model.parameters()))
    shared = any(id(p) in known for group in optimizer.param_groups for p in group["params"])
    return model if shared else None
