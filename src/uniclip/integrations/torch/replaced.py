# SPDX-License-Identifier: MIT
"""The ``step`` that stands in the place of that of an attached optimizer.

What it does is in `step`.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

from uniclip.backends.torch.private import SCHEDULED, SUPPORTS_SCALING
from uniclip.integrations.torch.checks import runs_hooks
from uniclip.integrations.torch.guard import AttachedDefaults, CopiedDefaults, warn_of_copy
from uniclip.integrations.torch.step import Steps

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class ReplacedStep:
    """A bound method in the place of ``optimizer.step``, as learning-rate schedulers set one.

    It does not keep the optimizer alive, which has it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps, *, is_joint: bool) -> None:
        self._optimizer = ref(optimizer)
        self._steps = steps
        self._is_removed = False
        self.runs_hooks = runs_hooks(optimizer)
        """Whether the step runs hooks, one of which clips."""

        # The method itself, as `__wrapped__`, would keep the optimizer.
        step = optimizer.step
        update_wrapper(self, step, updated=())
        del vars(self)["__wrapped__"]
        # Schedulers mark the step, and warn if the mark is gone.
        if hasattr(step, SCHEDULED):
            vars(self)[SCHEDULED] = True

        attributes = vars(optimizer)
        self._set_before = attributes.get("step")
        """The ``step`` of the object itself, next to that of its class; schedulers set one."""
        self._own = self._set_before
        """The step to take; ``None`` if it is that of the class."""
        if self._own is None and not hasattr(type(optimizer), "step"):
            # A wrapper passes on all attributes of the optimizer inside.
            self._own = step

        # A frozen dataclass can only be changed through its dictionary.
        attributes["step"] = self
        self._defaults = attributes.get("defaults")
        if type(self._defaults) is CopiedDefaults:
            # A copy that has its own rule needs no warning.
            self._defaults = dict(self._defaults)
        if type(self._defaults) is dict:
            attributes["defaults"] = AttachedDefaults(self._defaults)
        # The first step of a list clips the gradients of all, but a GradScaler checks each
        # optimizer before its own step. So it passes its scale and its flag, as to a fused step.
        self._declared_scaling = is_joint and not hasattr(optimizer, SUPPORTS_SCALING)
        if self._declared_scaling:
            attributes[SUPPORTS_SCALING] = True
        # Hooks that are there already come before this one, which clips.
        self._hook: RemovableHandle | None = None
        if self.runs_hooks:
            self._hook = optimizer.register_step_pre_hook(steps.step_pre_hook)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Clip, and take a step of the optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            msg = "the optimizer of this step was deleted; keep a reference to it, not to its step"
            raise ReferenceError(msg)

        step = self._own or partial(type(optimizer).step, optimizer)
        if self._is_removed:
            return step(*args, **kwargs)
        if not self.runs_hooks:
            step = partial(self._steps.clip_and_step, optimizer, step)
        return self._steps.take_step(optimizer, step, args, kwargs)

    @property
    def __func__(self) -> Any:
        """The function of this method, for which schedulers look."""

        def step(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> object:
            if this is self._optimizer():
                return self(*args, **kwargs)
            return _step_of_copy(this, *args, **kwargs)

        return update_wrapper(step, self, updated=())

    @property
    def __self__(self) -> torch.optim.Optimizer | None:
        """The optimizer, as of a bound method."""
        return self._optimizer()

    @property
    def __signature__(self) -> Signature:
        """The signature of the step that is replaced, at which a GradScaler looks."""
        optimizer: Any = self._optimizer()
        return signature(self._own or partial(type(optimizer).step, optimizer))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make the step of a copy of the optimizer."""
        return partial, (_step_of_copy, self._optimizer())

    def remove(self) -> None:
        """Give the optimizer its own step back.

        A step that others have wrapped since then passes through.
        """
        self._is_removed = True
        if self._hook is not None:
            self._hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:
            return

        attributes = vars(optimizer)
        defaults = attributes.get("defaults")
        if type(defaults) is AttachedDefaults and self._defaults is not None:
            # The very dict that was there before, with what was changed since then.
            self._defaults.clear()
            self._defaults.update(defaults)
            attributes["defaults"] = self._defaults
        if self._declared_scaling:
            attributes.pop(SUPPORTS_SCALING, None)
        if attributes.get("step") is self:
            del attributes["step"]
            if self._set_before is not None:
                attributes["step"] = self._set_before


def _step_of_copy(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> object:
    """Take a step of a copy, which has no rule, and warn once."""
    if vars(this).pop("step", None) is not None:
        warn_of_copy(this)
    return this.step(*args, **kwargs)
