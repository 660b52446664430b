# SPDX-License-Identifier: MIT
"""Checks of what a rule can be attached to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from uniclip.backends.dtensor import is_dtensor
from uniclip.backends.torch import BACKEND
from uniclip.tree import flatten

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
"""The module whose functions initialize the state of an optimizer by a step."""


class Optimizer(Protocol):
    """A ``torch.optim.Optimizer``, for type checkers to tell it from a model even where PyTorch is not installed."""

    @property
    def param_groups(self) -> Any:
        """The groups of parameters."""

    @property
    def step(self) -> Callable[..., Any]:
        """What takes a step."""


def refuse_optimizer(optimizer: Any, rule: Any) -> None:
    """Refuse an object that is not an optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    fix = "give the object whose step() is called, as torch.optim.AdamW(model.parameters()) returns it"
    if isinstance(rule, torch.optim.Optimizer):
        fix = "the arguments are swapped, it is attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = "attach to the optimizer of its parameters, as in attach(torch.optim.AdamW(model.parameters()), rule)"
    msg = f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__qualname__}: {fix}"
    raise TypeError(msg)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside its wrappers, which may have no state of their own."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def has_stepped(optimizer: Any) -> bool:
    """Whether an optimizer has taken steps or loaded a state, judged by its own state."""
    return steps_of(optimizer) > 0


def steps_of(optimizer: Any, *, free: bool = False) -> float:
    """Return an optimizer's count of steps, 1 if it has a state without a count, 0 before the first.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    free : bool
        Read only values that cost nothing, not those on an accelerator.
    """
    counts = (_count(state, free=free) for state in optimizer.state.values() if isinstance(state, dict))
    return next((count for count in counts if count > 0), 0.0)


def _count(state: dict[str, Any], *, free: bool) -> float:
    """Return the count of steps in the state of a parameter; some optimizers begin with a state of zeros."""
    values = [state["step"]] if "step" in state else list(state.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if free and not all(map(BACKEND.readable, tensors)):
        return 0.0
    if "step" in state:
        return float(state["step"])
    return float(any(map(_nonzero, tensors)) if tensors else bool(state))


def _nonzero(tensor: Any) -> bool:
    return bool((tensor.to_local() if is_dtensor(tensor) else tensor).any())


def initializing() -> bool:
    """Whether this is the step, on gradients of 0, by which ``torch.distributed.checkpoint`` makes the state."""
    frame: Any = sys._getframe()  # noqa: SLF001 - nothing else distinguishes it from a step
    while frame is not None and frame.f_globals.get("__name__") != _STATE_DICT:
        frame = frame.f_back
    return frame is not None


def probe(rule: Any, tree: Any) -> None:
    """Call the rule's functions of paths once; raise an error if they need names that the optimizer lacks."""
    if all(isinstance(name, str) for group in tree for name in group):
        return
    flat = flatten(tree)
    for function in _functions(rule):
        for path, leaf in zip(flat.paths(), flat.leaves, strict=True):
            _try(function, path, leaf)


def _try(function: Any, path: Any, leaf: Any) -> None:
    try:
        function(path, leaf)
    except (AttributeError, TypeError, KeyError) as error:
        msg = (
            f"the rule's function of a path fails on {path!r}, as the optimizer knows its parameters by their numbers "
            f"only ({type(error).__name__}: {error}): give it their names, as in "
            "torch.optim.AdamW(model.named_parameters())"
        )
        raise TypeError(msg) from error


def _functions(rule: Any) -> Iterator[Any]:
    """Yield the functions of ``(path, leaf)`` in a rule."""
    for inside in (*getattr(rule, "rules", ()), *([rule.rule] if hasattr(rule, "rule") else [])):
        yield from _functions(inside)
    yield from filter(None, (getattr(rule, "where", None), getattr(getattr(rule, "scope", None), "label", None)))
