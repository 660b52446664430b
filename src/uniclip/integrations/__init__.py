# SPDX-License-Identifier: MIT
"""Clipping inside what people train with; each module imports its own library, and nothing here imports any."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uniclip import curves, presets
from uniclip.combine import chain, masked
from uniclip.limits import Limit
from uniclip.rules import Rule, as_rule
from uniclip.scopes import each_example


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Say what to install where the imports inside fail."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this part of uniclip needs {library}: pip install {install} ({error})"
        raise ModuleNotFoundError(msg, name=error.name) from error


def rule_for_steps(rule: Any) -> Any:
    """Return a rule for the gradients that optimizers get, a function of one gradient array as a rule.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If it clips the gradients of single examples, which optimizers do not get.
    """
    if hasattr(rule, "__qualname__") and str(rule.__module__).startswith("uniclip."):
        raise TypeError(_not_called(rule))
    rule = as_rule(rule)
    if _by_example(rule):
        msg = (
            f"{rule!r} clips the gradients of single examples, and an optimizer gets those of the batch: clip by "
            "uc.clip_and_mean before, and give its result to the optimizer"
        )
        raise ValueError(msg)
    return rule


def _not_called(maker: Any) -> str:
    """Return what to write instead of one of uniclip's own functions or classes."""
    name = maker.__name__
    fix = f"uc.{name} is none: give one such as uc.by_global_norm(1.0)"
    if maker in [*vars(presets).values(), Rule, chain, masked]:
        fix = f"uc.{name} makes one: call it, as in uc.by_global_norm(1.0)"
    elif isinstance(maker, type) and issubclass(maker, Limit):
        fix = f"uc.{name} is a kind of limit, which is only one of its choices: uc.Rule(uc.{name}(...))"
    elif maker in vars(curves).values():
        fix = f"uc.{name} is a curve, which is only one of its choices: uc.Rule(1.0, curve=uc.{name})"
    return f"rule must be a rule, and {fix}"


def _by_example(rule: Any) -> bool:
    """Whether a rule, or one inside of it, has a norm for each example."""
    inside = [*getattr(rule, "rules", ()), *([rule.rule] if hasattr(rule, "rule") else [])]
    return getattr(rule, "scope", None) == each_example or any(map(_by_example, inside))
