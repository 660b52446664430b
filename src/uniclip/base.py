# SPDX-License-Identifier: MIT
"""What every rule has."""

from __future__ import annotations

from typing import Any, ClassVar

from uniclip._checks import flag
from uniclip._repr import Printed
from uniclip._types import Number, T
from uniclip.processes import AllReduce, Shared
from uniclip.report import Report
from uniclip.step import Step


class BaseRule(Printed):
    """A rule, which takes a step with validated arguments."""

    memory: ClassVar[Any]
    """Whether the rule has memory, a state that changes from step to step."""

    def init(self, grads: Any) -> Any:
        """Return the state before the first step."""
        raise NotImplementedError

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Do as `update`."""
        raise NotImplementedError

    def update(
        self,
        grads: T,
        state: Any,
        params: Any = None,
        all_reduce: AllReduce | None = None,
        *,
        in_place: bool = False,
        loss: Number | None = None,
        shared: Shared | None = None,
    ) -> tuple[T, Any, Report]:
        """Clip ``grads`` and return the next state: the pure form, for ``jit``, ``scan`` and checkpoints.

        Parameters
        ----------
        grads, params, all_reduce, shared
            As in `uniclip.clip`.
        state : tree of arrays
            What `init` or the previous step returned.
        in_place : bool, default False
            Write into the given arrays, as `uniclip.clip_` does.
        loss : float or 0-d array, optional
            The loss of this step, for limits that use it, such as that of `uniclip.skip_spikes`. Where norms are
            reduced over processes (by ``all_reduce``, or for distributed arrays), the mean of their losses is used.

        Returns
        -------
        clipped : tree
        state : tree of arrays
            The next state; the same as ``state`` after a step that is not finite.
        report : Report

        Raises
        ------
        TypeError, ValueError, FloatingPointError
            As `uniclip.clip` and, with ``in_place``, `uniclip.clip_`.
        """
        step = Step(params, all_reduce, loss, in_place=flag("in_place", in_place), shared=shared)
        return self._run(grads, state, step)


def taken(rule: Any, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
    """Take a step by a rule of any class."""
    return rule.update(
        grads, state, step.params, step.all_reduce, in_place=step.in_place, loss=step.loss, shared=step.shared
    )
