# SPDX-License-Identifier: MIT
"""Replace the ``step`` of one optimizer object,
where hooks are not enough to clip before it or to stop it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType, MethodType
from typing import Any

import torch


class SkippedStep(BaseException):
    """Stop a step that a rule skips, from a hook or a closure inside of it.

    `StepWrapper` catches it.

    It is not an error. It derives from ``BaseException`` so that ``except Exception`` does not
    catch it.
    """

    def __init__(self, loss: Any) -> None:
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
        optimizer: Any,
        before: Callable[..., Any],
        after: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._optimizer, self._before, self._after, self._end = optimizer, before, after, end
        self._replaced = vars(optimizer).get("step")
        """A ``step`` that the object had beside that of its class, as of a scheduler."""
        self._removed = False

        step = optimizer.step

        # The attributes of the step go along: schedulers mark theirs, and warn where the mark is
        # gone.
        @wraps(step)
        def run(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not optimizer:  # a copy, which has no rule
                return type(this).step(this, *args, **kwargs)
            if self._removed:  # a wrapper that was put around this one still calls it
                return step(*args, **kwargs)
            return self._run(step, args, kwargs)

        # A bound method, since schedulers look for its __func__.
        self._method: MethodType | None = MethodType(run, optimizer)
        # Into the dictionary, since a frozen dataclass takes no other way.
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

    def _run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer_depth, self.depth = self.depth, 0
        try:
            changed = self._before(self._optimizer, (self._optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
            result = step(*args, **kwargs)
            self._after()
        except SkippedStep as skipped:
            # A scheduler would warn that no step came before its own, so set its flag.
            if hasattr(step, "_wrapped_by_lr_sched"):
                self._optimizer._opt_called = True  # noqa: SLF001 - the mark of PyTorch's schedulers
            return skipped.loss
        else:
            return result
        finally:
            self.depth = outer_depth
            if outer_depth is None:
                self._end()


def find_caller(outer: Any, wrapper: StepWrapper | None) -> Any:
    """Return what steps an optimizer inside of ``outer``: a ``GradScaler``, or ``outer`` itself.

    ``None`` if neither ``outer`` nor its wrapper is on the stack.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as the inspect module does
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller
        if caller is outer or (wrapper is not None and caller is wrapper):
            return outer
        frame = frame.f_back
    return None
