# SPDX-License-Identifier: MIT
"""Replace the ``step`` of one optimizer object, if hooks are not enough to clip before it or to
stop it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType, MethodType
from typing import Any, TypeAlias

import torch

Changed: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]] | None
"""The arguments that a step gets in place of its own, if any."""

Before: TypeAlias = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Changed]
"""A pre-hook of a step."""


class SkippedStep(BaseException):
    """Stop a step that a rule skips, from a hook or a closure inside of it.

    `StepWrapper` catches it.

    It is not an error. It derives from ``BaseException`` so that ``except Exception`` does not
    catch it.
    """

    def __init__(self, loss: object) -> None:
        super().__init__("a step was skipped")
        self.loss = loss


class StepWrapper:
    """A bound method in the place of ``optimizer.step``.

    Hooks run inside of a step and cannot stop it, run once more in a class that calls
    ``super().step()``, and do not run at all in an object that is no ``torch.optim.Optimizer``.
    With both installed, the hooks cover calls that bypass the wrapper, through a reference to the
    old step.

    Parameters
    ----------
    optimizer : object with a ``step``
    before : callable
        ``before(optimizer, args, kwargs)``, as a pre-hook of PyTorch.
    after : callable
        ``after()``, unless the step fails.
    end : callable
        ``end()`` after the outermost step, also if it fails.
    """

    depth: int | None = None
    """How many nested calls of ``step`` run, as hooks count them.

    ``None`` outside of the wrapper.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Before,
        after: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._end = end
        self._replaced = vars(optimizer).get("step")
        """The ``step`` of the object itself, next to that of its class; schedulers set one."""
        self._removed = False

        step = optimizer.step

        # Schedulers mark the step by an attribute, and warn if the mark is gone.
        @wraps(step)
        def run(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> object:
            # A copy of the optimizer has no rule.
            if this is not optimizer:
                return type(this).step(this, *args, **kwargs)
            # A wrapper that was put around this one still calls it.
            if self._removed:
                return step(*args, **kwargs)
            return self._run(step, args, kwargs)

        # Schedulers look for the __func__ of a bound method.
        self._method: MethodType | None = MethodType(run, optimizer)
        # A frozen dataclass can only be changed through its dictionary.
        vars(optimizer)["step"] = self._method

    def remove(self) -> None:
        """Put the replaced ``step`` back.

        A step that others have wrapped since then passes through.
        """
        self._removed = True
        attributes = vars(self._optimizer)
        if attributes.get("step") is not self._method:
            return

        # Without a circle of references the optimizer is freed when it is used no more.
        self._method = None
        del attributes["step"]
        if self._replaced is not None:
            attributes["step"] = self._replaced

    def _run(
        self, step: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Take a step, with ``before`` and ``after`` around it; catch one that is skipped."""
        # Steps can nest, and only the outermost one ends the step of the rule.
        outer_depth = self.depth
        self.depth = 0
        try:
            changed = self._before(self._optimizer, (self._optimizer, *args), kwargs)
            if changed is not None:
                with_optimizer, kwargs = changed
                args = with_optimizer[1:]
            result = step(*args, **kwargs)
            self._after()
        except SkippedStep as skipped:
            # A scheduler would warn that no step came before its own, so set its flag.
            if hasattr(step, "_wrapped_by_lr_sched"):
                self._optimizer._opt_called = True  # noqa: SLF001 - PyTorch's mark
            return skipped.loss
        else:
            return result
        finally:
            self.depth = outer_depth
            if outer_depth is None:
                self._end()


def find_caller(outer: torch.optim.Optimizer, wrapper: StepWrapper | None) -> object:
    """Return what steps an optimizer inside of ``outer``: a ``GradScaler``, or ``outer`` itself.

    ``None`` if neither ``outer`` nor its wrapper is on the stack.
    """
    # PyTorch does not pass hooks the caller of a step, so look for it on the stack.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as the inspect module does
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        if caller is outer or (wrapper is not None and caller is wrapper):
            return outer
        frame = frame.f_back
    return None
