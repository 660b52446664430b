# SPDX-License-Identifier: MIT
"""What a rule can be attached to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from uniclip.tree import flatten


class Optimizer(Protocol):
    """A ``torch.optim.Optimizer``, for type checkers to tell it from a model also where PyTorch is not installed."""

    @property
    def param_groups(self) -> Any:
        """The groups of parameters."""

    @property
    def step(self) -> Callable[..., Any]:
        """What takes a step."""


def refuse_optimizer(optimizer: Any, rule: Any) -> None:
    """Refuse what is no optimizer."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    fix = "give the object whose step() is called, as torch.optim.AdamW(model.parameters()) returns it"
    if isinstance(rule, torch.optim.Optimizer):
        fix = "the arguments are swapped, it is attach(optimizer, rule)"
    elif isinstance(optimizer, torch.nn.Module):
        fix = "attach to the optimizer of its parameters, as in attach(torch.optim.AdamW(model.parameters()), rule)"
    msg = f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__qualname__}: {fix}"
    raise TypeError(msg)


def has_stepped(optimizer: Any) -> bool:
    """Whether an optimizer has taken steps or loaded a state, as far as its own state tells."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return any(float(state.get("step", 1)) > 0 for state in states if state)  # some begin with a state


def probe(rule: Any, tree: Any) -> None:
    """Call the rule's functions of paths once, and say where they want names that the optimizer does not know."""
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
