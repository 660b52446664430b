# SPDX-License-Identifier: MIT
"""What every rule has, and how rules of rules pass flattened gradients from one to the next."""

from __future__ import annotations

from typing import Any, Protocol

from uniclip._checks import flag
from uniclip._repr import Printed
from uniclip._types import Number, T
from uniclip.ask import Step
from uniclip.processes import AllReduce, Shared, joining
from uniclip.report import Report
from uniclip.tree import closed


class RuleLike(Protocol):
    """What every rule has."""

    @property
    def memory(self) -> bool:
        """Whether the rule has memory."""

    def init(self, grads: Any) -> Any:
        """Return the state before the first step."""

    def update(
        self,
        grads: T,
        state: Any,
        params: Any = None,
        all_reduce: AllReduce | None = None,
        *,
        in_place: bool = False,
        loss: Any = None,
        shared: Shared | None = None,
    ) -> tuple[T, Any, Report]:
        """Clip, and also return the next state."""


class BaseRule(Printed):
    """A rule that also takes and returns gradients that are flattened, so that a chain flattens them once."""

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Do as `update`, for gradients that may be flattened, and are or may be afterwards."""
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
        step = Step(params, joining(all_reduce, shared), loss, in_place=flag("in_place", in_place))
        clipped, state, report = self._run(grads, state, step)
        return closed(clipped), state, report


def run(rule: Any, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
    """Run a rule, of any class, on gradients that may be flattened, and may be afterwards."""
    if getattr(type(rule), "update", None) is BaseRule.update:
        return rule._run(grads, state, step)  # type: ignore[no-any-return]  # noqa: SLF001 - of a class above
    return rule.update(  # type: ignore[no-any-return]
        closed(grads), state, step.params, step.all_reduce, in_place=step.in_place, loss=step.loss
    )
