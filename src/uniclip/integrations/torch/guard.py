# SPDX-License-Identifier: MIT
"""Notice steps whose gradients nothing has clipped.

An optimizer's ``step`` can be called past the one that clips: by a reference from before the rule
was attached, by another optimizer with the same parameters, or by a copy. While a rule is attached
to any optimizer, a global hook of PyTorch sees each step of a ``torch.optim.Optimizer``. It runs
before the hook that clips, so it only asks whether that one comes next.
"""

from __future__ import annotations

import gc
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from threading import local
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from uniclip._errors import summarize
from uniclip._warnings import warn
from uniclip.integrations.torch.checks import moves_nothing
from uniclip.integrations.torch.parameters import Parameters, params_in
from uniclip.rule import BaseRule

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_guards: dict[int, Guard] = {}
"""The guard of each attached optimizer, by its identity."""
_hook: list[RemovableHandle] = []
"""The global hook, if there is one."""
_PARAMS = itemgetter("params")
"""Returns the parameters of a group."""


class _OpenGuards(local):
    """The guards of the steps of this thread that have clipped."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []


_open = _OpenGuards()


class Guard:
    """The parameters of one rule, and whether they may move now."""

    is_running = False
    """Whether the replaced step of one of the optimizers runs."""
    is_open = False
    """Whether its gradients are clipped, or will be in its closure."""

    def __init__(self, params: Parameters, rule: BaseRule) -> None:
        self.rule = rule
        # An optimizer that is used no more is freed with its rule.
        self._params = ref(params)
        self._optimizer_ids = list(map(id, params.optimizers))
        _guards.update(dict.fromkeys(self._optimizer_ids, self))
        finalize(params, self.remove).atexit = False
        if not _hook:
            _hook.append(register_optimizer_step_pre_hook(_check_step))

    @property
    def ids(self) -> set[int]:
        """The parameters, by their identity, as they were when they were last looked at."""
        params = self._params()
        return set() if params is None else params.ids

    def open(self) -> None:
        """Let the parameters move: their gradients are clipped.

        Raises
        ------
        RuntimeError
            If a step around this one has clipped them, too.
        """
        if _open.guards:
            self._raise_if_clipped_twice()
        self.is_open = True
        _open.guards.append(self)

    def close(self) -> None:
        """Let the parameters move no more."""
        if self.is_open:
            self.is_open = False
            _open.guards.remove(self)

    def look_again(self) -> None:
        """Look at the parameters that the optimizers have now."""
        params = self._params()
        if params is not None:
            params.ids = set(map(id, params.tensors()))

    def remove(self) -> None:
        """Watch nothing any more."""
        self.close()
        self.is_running = False
        for number in self._optimizer_ids:
            if _guards.get(number) is self:
                del _guards[number]
        if not _guards and _hook:
            _hook.pop().remove()

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the rule is attached to an optimizer."""
        params = self._params()
        return params is not None and id(optimizer) in map(id, params.optimizers)

    def describe(self) -> str:
        """Return the optimizers and their rule."""
        params = self._params()
        kinds = "an optimizer" if params is None else params.kinds
        return f"{kinds}, to which {summarize(self.rule)} is attached"

    def _raise_if_clipped_twice(self) -> None:
        """Raise if a step that runs has clipped a parameter of this one."""
        if all(self.ids.isdisjoint(guard.ids) for guard in _open.guards):
            return
        msg = (
            "an optimizer with a rule took a step inside of another one with a rule for the same "
            "parameters, which are clipped twice; call remove() of one of the handles"
        )
        raise RuntimeError(msg)


class AttachedDefaults(dict[str, Any]):
    """The ``defaults`` of an attached optimizer.

    A copy of an optimizer gets only its defaults, state and groups, so it is recognized by its
    defaults.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a copy, in this process or in another."""
        return _copy_defaults, (dict(self),)


class CopiedDefaults(AttachedDefaults):
    """The ``defaults`` of a copy, whose first step warns."""


def _copy_defaults(defaults: dict[str, Any]) -> CopiedDefaults:
    """Return the defaults of a copy, and look for its first step."""
    _watch_copies()
    return CopiedDefaults(defaults)


def guard_of(optimizer: torch.optim.Optimizer) -> Guard | None:
    """Return the guard of an optimizer that has a rule."""
    guard = _guards.get(id(optimizer))
    return guard if guard is not None and guard.is_of(optimizer) else None


@cache
def _watch_copies() -> RemovableHandle:
    """Have a global hook look for copies from now on."""
    return register_optimizer_step_pre_hook(_check_copy)


@partial(torch.compiler.disable, recursive=False)
def _check_copy(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn if a copy of an attached optimizer has no rule, once."""
    if type(optimizer.defaults) is CopiedDefaults:
        optimizer.defaults = dict(optimizer.defaults)
        warn_of_copy(optimizer)


def warn_of_copy(optimizer: torch.optim.Optimizer) -> None:
    """Warn that a copy of an attached optimizer takes a step without a rule."""
    msg = (
        f"this {type(optimizer).__qualname__} is a copy of one to which a rule is attached, but "
        "has no rule itself, so its gradients are not clipped; attach a rule to the copy, too"
    )
    warn(msg)


# Compiled code leaves its graph for this, and eager code pays nothing.
@partial(torch.compiler.disable, recursive=False)
def _check_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise if the parameters of an optimizer have a rule that does not clip them, or none, but
    move in a step of another optimizer that has one.
    """
    guard = _guards.get(id(optimizer))
    if guard is not None and guard.is_running:
        return

    unclipped = _unclipped_ids(optimizer)
    if guard is not None or (_open.guards and unclipped) or _watches(unclipped):
        _check_unclipped(optimizer)


def _unclipped_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the parameters of an optimizer that no running step has clipped, by identity."""
    # No Python code runs for each parameter, or each step would take as long as the model.
    ids = set(map(id, chain.from_iterable(map(_PARAMS, optimizer.param_groups))))
    for guard in _open.guards:
        ids -= guard.ids
    return ids


def _watches(ids: set[int]) -> list[Guard]:
    """Return the guards of some parameters."""
    # Other threads may attach meanwhile.
    return [guard for guard in list(_guards.values()) if not guard.ids.isdisjoint(ids)]


def _check_unclipped(optimizer: torch.optim.Optimizer) -> None:
    """Do the same as `_check_step`, with a new look at the parameters of all rules."""
    # A library may have replaced parameters, and steps on the spine do not look for new groups.
    for guard in set(_guards.values()):
        guard.look_again()
    unclipped = _unclipped_ids(optimizer)
    if not unclipped or moves_nothing(optimizer.param_groups):
        return

    # An optimizer that is used no more may wait in a cycle of its class until it is collected.
    if _watches(unclipped):
        gc.collect()
    own = guard_of(optimizer)
    guards = _watches(unclipped) if own is None else [own]
    if guards:
        _raise_past(optimizer, guards[0], is_attached=own is not None)

    params = [p for p in params_in(optimizer.param_groups) if id(p) in unclipped]
    if not _open.guards or all(p.grad is None for p in params):
        return
    kind = type(optimizer).__qualname__
    msg = (
        f"a step to which a rule is attached calls step() of a {kind} inside, whose parameters are "
        "not in its param_groups, so their gradients are not clipped; attach to the optimizer "
        "inside, or to a list of all of them, or add the parameters to the groups of the outer one"
    )
    raise RuntimeError(msg)


def _raise_past(optimizer: torch.optim.Optimizer, guard: Guard, *, is_attached: bool) -> NoReturn:
    """Raise for a step that goes past the step of an attached optimizer."""
    kind = type(optimizer).__qualname__
    fix = (
        f"if your loop steps this {kind}, attach a rule to it, too, or to it alone if it steps the "
        "other one; if not, step only the other one, or call remove() of its handle"
    )
    if is_attached:
        fix = (
            "a wrapper or a compiled function kept the step() from before; attach first, then make "
            "the wrapper or compile"
        )
    msg = (
        f"{kind} took a step past the step() of {guard.describe()}, so the gradients of the same "
        f"parameters are not clipped: {fix}"
    )
    raise RuntimeError(msg)
