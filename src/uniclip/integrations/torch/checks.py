# SPDX-License-Identifier: MIT
"""Checks of what a rule can be attached to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Optimizer(Protocol):
    """A ``torch.optim.Optimizer``, for type checkers to tell it from a model even where PyTorch is not installed."""

    @property
    def param_groups(self) -> Any:
        """The groups of parameters."""

    @property
    def step(self) -> Callable[..., Any]:
        """What takes a step."""


def refuse_optimizer(optimizer: Any, rule: Any) -> None:
    """Refuse an object that is not an optimizer, or one whose hooks do not run."""
    if isinstance(optimizer, torch.optim.Optimizer):
        inner = unwrapped(optimizer)
        if not hasattr(inner, "_optimizer_step_pre_hooks"):
            msg = f"{type(optimizer).__qualname__} runs no hooks before its step: attach to the optimizer inside"
            raise TypeError(msg)
        inside = _optimizers_in(inner)
        if inside:
            msg = (
                f"{type(inner).__qualname__} holds another optimizer, and may take steps that do not go through its "
                f"own step(), as the two of SAM do: attach to the one inside, attach(optimizer.{inside[0]}, rule)"
            )
            raise ValueError(msg)
        return
    fix = "give the object whose step() is called, as torch.optim.AdamW(model.parameters()) returns it"
    if isinstance(rule, torch.optim.Optimizer):
        fix = "the arguments are swapped, it is attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = "attach to the optimizer of its parameters, as in attach(torch.optim.AdamW(model.parameters()), rule)"
    msg = f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__qualname__}: {fix}"
    raise TypeError(msg)


def _optimizers_in(optimizer: Any) -> list[str]:
    """Return where an optimizer holds others; those of PyTorch take all their steps by ``step()``."""
    if type(optimizer).__module__.startswith("torch."):
        return []
    found = []
    for name, value in vars(optimizer).items():
        keyed = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        held = [(name, value), *((f"{name}[{key!r}]", one) for key, one in keyed)]
        found += [place for place, one in held if isinstance(one, torch.optim.Optimizer)]
    return found


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside its wrappers, which may have no state of their own."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
