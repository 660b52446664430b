# SPDX-License-Identifier: MIT
"""The parts of an engine's parameters as the parameters of an optimizer, and the method of the
engine that clips them first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uniclip._core.collectives import Shared
from uniclip._errors import summarize
from uniclip._warnings import warn
from uniclip.compose import ByValue, EachArray, rules_with_norms, walk_rules
from uniclip.integrations import masks_and_labels
from uniclip.integrations.torch.engines.source import Limit, Source
from uniclip.rule import BaseRule

_DEFAULT = 1.0
"""The limit of DeepSpeed and of Megatron if the user sets none."""


class EngineOptimizer:
    """An optimizer to which `attach` attaches a rule, inside of an engine.

    Its parameters are the parts that this process has; one of which it has nothing is an empty
    part, so all processes have the same leaves. A rule that skips stops its step.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._goes_on = False
        """Whether the rule has let the last step pass."""
        self.param_groups: list[dict[str, Any]] = []
        for parts in source.groups:
            leaves = [part.leaf(is_whole=source.group is None) for part in parts]
            names = [part.name for part in parts]
            self.param_groups.append({"params": leaves, "param_names": names})

    def step(self) -> None:
        """Let the engine go on; not called if the rule skips the step."""
        self._goes_on = True

    def clip_and_step(self, engine_step: Callable[[], Any]) -> Any:
        """Clip, and take the engine's step, or skip it."""
        source = self._source
        # As with a GradScaler, a rule does not see a step that overflows.
        if source.has_overflowed():
            return engine_step()

        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        for leaf, grad in zip(leaves, source.take(), strict=True):
            if grad is not None:
                leaf.grad = grad.view_as(leaf)
            elif not leaf.numel():
                leaf.grad = leaf.new_zeros(leaf.shape)
        self._goes_on = False
        try:
            self.step()
        finally:
            for leaf in leaves:
                leaf.grad = None
            source.give_back()
        return engine_step() if self._goes_on else source.skip()


class ClippedStep:
    """The method of an engine that takes its step, with a clip before."""

    def __init__(self, source: Source, optimizer: EngineOptimizer, rule: BaseRule) -> None:
        self._optimizer = optimizer
        self.rule = rule
        self._method = getattr(source.stepped, source.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Clip, and take the engine's step."""
        return self._optimizer.clip_and_step(lambda: self._method(*args, **kwargs))


def warn_of_limits(limits: tuple[Limit, ...], *, is_set_by_user: bool) -> None:
    """Warn if the user has set a limit of the engine, which is not used."""
    for limit in {getattr(owner, name) for owner, name in limits}:
        if not limit or (limit == _DEFAULT and not is_set_by_user):
            continue
        msg = (
            f"the engine's own clipping to a norm of {limit} is off while a rule is attached; to "
            f"clip to it as well, write uc.chain(rule, uc.by_global_norm({limit}))"
        )
        warn(msg)


def raise_if_replaced(source: Source) -> None:
    """Raise if an engine has a rule: gradients would be clipped twice."""
    method = vars(source.stepped).get(source.method)
    if not isinstance(method, ClippedStep):
        return
    msg = (
        f"this engine is clipped already, by {summarize(method.rule)}; call remove() of that "
        "handle first"
    )
    raise ValueError(msg)


def shared_of(source: Source) -> Shared | None:
    """Return a function that says how many processes have each part, ``None`` if one has each."""
    holders = {part.name: part.holders for parts in source.groups for part in parts}
    if all(count == 1 for count in holders.values()):
        return None
    return lambda path, leaf: holders[path[1]]  # noqa: ARG005 - the arguments of a function


def check_rule(source: Source, rule: BaseRule) -> None:
    """Raise if a rule needs more of a parameter than the part that a process has."""
    if source.group is None:
        return
    functions = [inner for inner in walk_rules(rule) if isinstance(inner, EachArray)]
    if not all(isinstance(inner, ByValue) for inner in functions):
        msg = (
            f"{summarize(rule)} has a function of one gradient, but inside of an engine each "
            "process has only a part of it, as a vector; use a rule of uniclip"
        )
        raise ValueError(msg)
    if any(inner.scope.axes is not None for inner in rules_with_norms(rule)):
        msg = (
            f"{summarize(rule)} has norms along axes, but inside of an engine each process has "
            "only a part of a parameter, as a vector; use a norm for each leaf, such as "
            "uc.by_norm(1.0) or uc.adagc()"
        )
        raise ValueError(msg)

    for _, function in masks_and_labels(rule):
        for number, parts in enumerate(source.groups):
            for part in parts:
                path = (number, part.name)
                whole = part.values.new_empty(part.shape, device="meta")
                if function(path, part.leaf(is_whole=False)) != function(path, whole):
                    msg = (
                        f"a function in {summarize(rule)} looks at the shape of {part.name!r}, of "
                        "which each process has only a part, as a vector; let it look at the path "
                        "or at leaf.ndim"
                    )
                    raise ValueError(msg)
