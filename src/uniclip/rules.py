# SPDX-License-Identifier: MIT
"""A rule is its four choices; what they are is in `uniclip.choices`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, ParamSpec

from uniclip._errors import Origin, Printed, flag, settle
from uniclip._types import Number, Step, T
from uniclip.choices import Choices
from uniclip.joins import AllReduce, Shared
from uniclip.limits import NoState
from uniclip.plan import plan_of
from uniclip.report import Report
from uniclip.step import decide, first_state
from uniclip.tree import Flat, open_tree

P = ParamSpec("P")


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


@dataclass(frozen=True, repr=False, init=False)
class Rule(Choices, BaseRule):
    """Multiply each gradient by ``curve(norm, limit)``, with one norm per scope.

    Parameters
    ----------
    limit : float, 0-d array, or Limit
        How large the norm may be; a number for the same limit at every step, ``math.inf`` to only measure.
    scope : Scope, default all_leaves
        Which entries share one norm.
    norm : Norm, default L2
        How their size is measured.
    curve : callable, default hard
        ``curve(xp, norm, limit)`` returns the factor. ``xp`` is the array API namespace of the gradients; the norm
        may be NaN or ∞, the limit is finite.
    nonfinite : {"propagate", "skip", "zero", "raise"}, default "propagate"
        What happens to gradients with NaN or ∞. ``"propagate"``: every entry that shares their norm becomes
        NaN. ``"skip"``: all gradients become 0, and ``report.skipped`` is true. ``"zero"``: the entries that are
        not finite become 0, then the rest is clipped. ``"raise"``: a ``FloatingPointError``, which is a
        ``RuntimeError`` too, names the leaves; traced code has no values, so there it is a ``TypeError``. With each of
        them the state stays as it was.

    Raises
    ------
    TypeError
        If a choice has the wrong type.
    ValueError
        If a constant limit is negative or NaN, or ``nonfinite`` is not one of the four policies.

    Examples
    --------
    >>> uc.Rule(1.0, scope=uc.scopes.each_leaf, norm=uc.norms.RMS)
    uc.Rule(1.0, scope=uc.scopes.each_leaf, norm=uc.norms.RMS)
    >>> uc.clip(np.asarray([7.0, 1.0]), uc.Rule(1.0, norm=uc.norms.RMS))[0]
    array([1.4, 0.2])
    """

    def init(self, grads: Any) -> Any:
        """Return the state before the first step.

        Parameters
        ----------
        grads : array or tree of arrays
            Gradients, or parameters of the same shapes; only shapes and dtypes are used.

        Returns
        -------
        state : tree of arrays
        """
        if not self.memory:
            return NoState()
        given = open_tree(grads, "params")
        with given.backend.quiet(given.first):
            return first_state(self, given, plan_of(self, given, given.backend.mode(given.kinds)))

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Take a step; see `BaseRule`."""
        decision = decide(self, grads, state, step)
        return decision.clip_leaves(), decision.state, decision.report()


def preset(make: Callable[P, Rule]) -> Callable[P, Rule]:
    """Return a function that makes rules which print as its calls."""

    @wraps(make)
    def call(*positional: P.args, **named: P.kwargs) -> Rule:
        rule = make(*positional, **named)
        settle(rule, origin=Origin(call, positional, named))
        return rule

    return call


def take_step(rule: Any, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
    """Take a step by a rule of any class; ``grads`` may be `uniclip.tree.Flat`."""
    if isinstance(rule, BaseRule) and type(rule).update is BaseRule.update:
        return rule._run(grads, state, step)  # noqa: SLF001 - without the arguments of `update`
    grads = grads.unflatten() if isinstance(grads, Flat) else grads
    return rule.update(
        grads, state, step.params, step.all_reduce, in_place=step.in_place, loss=step.loss, shared=step.shared
    )
