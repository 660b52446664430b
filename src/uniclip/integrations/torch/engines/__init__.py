# SPDX-License-Identifier: MIT
"""Clip inside of engines that keep gradients in flat buffers: DeepSpeed and Megatron.

The step of an engine copies gradients, and updates its groups of parameters one after the other. A
`source.Source` finds before that which part of each parameter this process has, and the gradient of
the part. `optimizer.EngineOptimizer` shows the parts as the parameters of an optimizer, to which
`attach` attaches a rule. Nothing here imports an engine: a class of one is known by its name, and
one that is not known is refused.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from uniclip.integrations.torch.engines import deepspeed
from uniclip.integrations.torch.engines.megatron import Megatron
from uniclip.integrations.torch.engines.optimizer import EngineOptimizer
from uniclip.integrations.torch.engines.source import Limit, Source

_PACKAGES = {"deepspeed", "megatron"}
_OPTIMIZERS = {"deepspeed.DeepSpeedOptimizer", "megatron.MegatronOptimizer"}
"""The base classes of optimizers that step another one inside."""


class Engine(NamedTuple):
    """What a rule is attached to inside of an engine."""

    optimizer: Any
    """The optimizer inside, whose parameters are whole; or one of the engine."""
    source: Source | None
    """The gradients inside of it, ``None`` if it has whole parameters."""
    limits: tuple[Limit, ...]
    """Where the engine has the limits of its own clipping."""
    engine: Any = None
    """DeepSpeed's engine, if it was passed."""


def engine_of(optimizer: Any, names: Any) -> Engine | None:
    """Return the engine in an argument of `attach`, ``None`` if there is none."""
    if _PACKAGES.isdisjoint(sys.modules):
        return None
    inside = optimizer
    while not _bases(inside):
        # Accelerate wraps an optimizer of an engine.
        inside = vars(inside).get("optimizer") if hasattr(inside, "__dict__") else None
        if inside is None:
            return None

    bases = _bases(inside)
    engine = None
    if "deepspeed.PipelineEngine" in bases:
        msg = "uniclip can't clip inside of DeepSpeed's PipelineEngine; use its gradient_clipping"
        raise ValueError(msg)
    if "deepspeed.DeepSpeedEngine" in bases:
        engine = inside
        names = engine.module if names is None else names
        inside = engine.optimizer
        bases = _bases(inside)
        # Without ZeRO, in float32, this is the optimizer that the user made.
        if not bases:
            return Engine(inside, None, (deepspeed.limit_of(engine),), engine)

    if _OPTIMIZERS.isdisjoint(bases):
        return None
    pairs = names.named_parameters() if isinstance(names, torch.nn.Module) else names or ()
    names_by_param = {p: name.removeprefix("module.") for name, p in pairs}
    source: Source
    if "megatron.MegatronOptimizer" in bases:
        source = Megatron(inside, names_by_param)
    else:
        source = deepspeed.source_of(inside, names_by_param)
    return Engine(inside, source, source.limits, engine)


def raise_if_inside(optimizer: Any) -> None:
    """Raise in the first step of an optimizer if an engine takes that step, and each process would
    clip by another norm, or the engine has clipped before.

    Such an optimizer looks like any other, so this looks once at who called the step.
    """
    if _PACKAGES.isdisjoint(sys.modules) or isinstance(optimizer, EngineOptimizer):
        return
    frame = sys._getframe(1)  # noqa: SLF001 - as the module inspect does
    while frame is not None:
        caller = frame.f_locals.get("self")
        bases = _bases(caller)
        if bases & _OPTIMIZERS:
            msg = (
                f"the rule is attached to the {type(optimizer).__qualname__} inside of "
                f"{type(caller).__qualname__}, which gives it parts of the parameters, so each "
                "process would clip by another norm; attach to the engine, after it was made, as "
                "in attach(engine, rule)"
            )
            raise RuntimeError(msg)
        if "deepspeed.DeepSpeedEngine" in bases and caller.gradient_clipping():
            msg = (
                f"DeepSpeed clips to a norm of {caller.gradient_clipping()} before the rule sees "
                "the gradients; attach to the engine, as in attach(engine, rule)"
            )
            raise RuntimeError(msg)
        frame = frame.f_back  # type: ignore[assignment]


def _bases(candidate: object) -> set[str]:
    """Return the classes of an object that an engine defines, each after the name of the engine."""
    bases = set()
    for base in type(candidate).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _PACKAGES:
            bases.add(f"{package}.{base.__name__}")
    return bases
