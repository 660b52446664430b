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
from typing import TYPE_CHECKING, Any

from uniclip._errors import summarize
from uniclip._warnings import warn
from uniclip.integrations.torch.checks import as_list, unwrap
from uniclip.integrations.torch.engines import deepspeed
from uniclip.integrations.torch.engines.megatron import Megatron
from uniclip.integrations.torch.engines.optimizer import (
    ClippedStep,
    EngineOptimizer,
    check_rule,
    raise_if_replaced,
    shared_of,
    warn_of_limits,
)
from uniclip.integrations.torch.engines.source import Handle, Limit, ReplacedAttribute, Source
from uniclip.integrations.torch.parameters import read_names

if TYPE_CHECKING:
    from uniclip._core.collectives import Shared
    from uniclip.rule import BaseRule

_PACKAGES = {"deepspeed", "megatron"}
_OPTIMIZERS = {"deepspeed.DeepSpeedOptimizer", "megatron.MegatronOptimizer"}
"""The base classes of optimizers that step another one inside."""


class Engine:
    """An engine, and the arguments that it supplies to `attach`."""

    def __init__(
        self, inside: Any, source: Source | None, limits: tuple[Limit, ...], engine: Any
    ) -> None:
        self.kind = type(inside).__qualname__
        """The class of the optimizer of the engine."""
        self._source = source
        """The gradients in it, ``None`` if it has whole parameters."""
        self._limits = limits
        self._engine = engine
        """DeepSpeed's engine, if it was passed."""
        self.optimizer = inside
        self.group: Any = None
        self.shared: Shared | None = None
        self.names: Any = None
        """The names of whole parameters."""
        if source is not None:
            self.optimizer = EngineOptimizer(source)
            self.group = source.group
            self.shared = shared_of(source)

    def check(self, rule: BaseRule, *, reduces: bool, warns: bool) -> None:
        """Raise if a rule cannot clip inside of the engine. ``reduces`` says whether the user has
        passed processes to reduce over, ``warns`` whether nobody else saves the state of the rule.
        """
        if reduces:
            msg = (
                f"{self.kind} knows which processes have the other parts of its parameters; leave "
                "all_reduce= and shared= out"
            )
            raise ValueError(msg)
        if self._source is not None:
            raise_if_replaced(self._source)
            check_rule(self._source, rule)
        # Its default is 1.0.
        config = {} if self._engine is None else self._engine._config._param_dict
        is_set_by_user = "gradient_clipping" in config
        warn_of_limits(self._limits, is_set_by_user=is_set_by_user)
        if warns and rule.stateful and self._engine is None:
            msg = (
                f"{self.kind} doesn't save the state of {summarize(rule)}; save "
                "handle.state_dict(), too, and load it by handle.load_state_dict(saved), or attach "
                "to DeepSpeed's engine"
            )
            warn(msg)

    def add_hooks(self, handle: Handle) -> None:
        """Have the engine clip in its steps, and save the state of the rule."""
        source = self._source
        if source is not None:
            step = ClippedStep(source, self.optimizer, handle.rule)
            handle.add_hook(ReplacedAttribute(source.stepped, source.method, step))
        for owner, name in self._limits:
            handle.add_hook(ReplacedAttribute(owner, name, 0.0))
        if self._engine is not None and handle.rule.stateful:
            for hook in deepspeed.checkpoint_hooks(self._engine, handle):
                handle.add_hook(hook)


def engine_of(optimizer: Any, names: Any) -> Engine | None:
    """Return the engine in an argument of `attach`, ``None`` if there is none.

    Raises
    ------
    TypeError
        If its optimizer is of a class that is not known.
    ValueError
        If it is one of several in a list, or divides the model in a way that is not supported.
    """
    if _PACKAGES.isdisjoint(sys.modules):
        return None
    several = as_list(optimizer)
    inside = unwrap(optimizer)
    if several != [optimizer] and any(_is_of_engine(unwrap(one)) for one in several):
        msg = "an optimizer of DeepSpeed or Megatron can't be one of a list; attach to it alone"
        raise ValueError(msg)
    if not _is_of_engine(inside):
        return None

    engine = None
    if "deepspeed.DeepSpeedEngine" in _bases(inside):
        if "deepspeed.PipelineEngine" in _bases(inside):
            msg = "uniclip can't clip in DeepSpeed's PipelineEngine; use its gradient_clipping"
            raise ValueError(msg)
        engine = inside
        inside = engine.optimizer
        names = engine.module if names is None else names
        # Without ZeRO, in float32, this is the optimizer that the user made.
        if not _is_of_engine(inside):
            whole = Engine(inside, None, ((engine._config, "gradient_clipping"),), engine)
            whole.names = names
            return whole

    params = [] if engine is None else list(engine.module.parameters())
    names_by_id = read_names(names, params)()
    source: Source
    if "megatron.MegatronOptimizer" in _bases(inside):
        source = Megatron(inside, names_by_id)
    else:
        source = deepspeed.source_of(inside, names_by_id)
    return Engine(inside, source, source.limits, engine)


def _is_of_engine(candidate: object) -> bool:
    """Return whether an object is an engine, or an optimizer that steps another one inside."""
    return not (_OPTIMIZERS | {"deepspeed.DeepSpeedEngine"}).isdisjoint(_bases(candidate))


def raise_if_inside(optimizer: Any) -> None:
    """Raise in the first step of an optimizer if an engine takes that step, and each process would
    clip by another norm, or the engine has clipped before.

    Such an optimizer looks like any other, so this looks once at who called the step.
    """
    if _PACKAGES.isdisjoint(sys.modules) or isinstance(optimizer, EngineOptimizer):
        return
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        # To read the variables of another frame may keep them alive.
        is_of_engine = module.partition(".")[0] in _PACKAGES
        caller: Any = frame.f_locals.get("self") if is_of_engine else None
        bases = _bases(caller)
        if bases & _OPTIMIZERS:
            msg = (
                f"the rule is attached to the {type(optimizer).__qualname__} inside of "
                f"{type(caller).__qualname__}, which steps it with flat copies or parts of the "
                "parameters; attach to DeepSpeed's engine or Megatron's optimizer, after it was "
                "made, as in attach(engine, rule)"
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
