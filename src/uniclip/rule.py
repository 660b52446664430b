# SPDX-License-Identifier: MIT
"""Rules: `Rule`, with `init` and `update`, its base class, and the decorator of presets.

`uniclip._core.rule_spec` validates the four choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, ParamSpec

from uniclip._core.collectives import AllReduce, Shared
from uniclip._core.containers import Flat
from uniclip._core.limiting import first_state
from uniclip._core.plan import plan_for
from uniclip._core.rule_spec import RuleSpec
from uniclip._core.spine import run_step
from uniclip._core.tree import open_tree
from uniclip._errors import Origin, Printed, flag, set_frozen_fields
from uniclip._types import Number, StepOptions, T, Tree
from uniclip.limits import NoState
from uniclip.report import Report

P = ParamSpec("P")


class BaseRule(Printed):
    """The base class of rules: `update` validates the arguments, `_run` takes the step."""

    stateful: ClassVar[Any]
    """Whether the state of the rule changes from step to step."""
    on_spine: Any = False
    """Whether the spine may run it, see `uniclip._core.spine`."""
    links: Any = ()
    """The rules of a chain; empty for other rules."""

    def init(self, grads: Tree) -> Any:
        """Return the state before the first step."""
        raise NotImplementedError

    def _run(self, grads: Any, state: Any, step: StepOptions) -> tuple[Any, Any, Report]:
        """Take a step, given validated arguments; see `update`."""
        raise NotImplementedError

    def update(
        self,
        grads: T,
        state: Any,
        params: Tree = None,
        all_reduce: AllReduce | None = None,
        *,
        in_place: bool = False,
        loss: Number | None = None,
        shared: Shared | None = None,
    ) -> tuple[T, Any, Report]:
        """Clip ``grads`` and return the next state: the pure form, for ``jit``,
        ``scan`` and checkpoints.

        Parameters
        ----------
        grads, params, all_reduce, shared
            As in `uniclip.clip`.
        state : tree of arrays
            What `init` or the previous step returned.
        in_place : bool, default False
            Write into the given arrays, as `uniclip.clip_` does.
        loss : float or 0-d array, optional
            The loss of this step, for limits that use it, such as that of `uniclip.skip_spikes`.
            Where norms are reduced over processes (by ``all_reduce``, or for distributed arrays),
            the mean of their losses is used.

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
        step = StepOptions(
            params, all_reduce, loss, in_place=flag("in_place", in_place), shared=shared
        )
        return self._run(grads, state, step)


@dataclass(frozen=True, repr=False, init=False)
class Rule(RuleSpec, BaseRule):
    """Multiply each gradient by ``curve(norm, limit)``, with one norm per scope.

    Parameters
    ----------
    limit : float, 0-d array, or Limit
        How large the norm may be; a number for the same limit at every step, ``math.inf`` to only
        measure.
    scope : Scope, default all_leaves
        Which elements share one norm.
    norm : Norm, default L2
        How their size is measured.
    curve : callable, default hard
        ``curve(xp, norm, limit)`` returns the factor. ``xp`` is the array API namespace of the
        gradients; the norm may be NaN or ∞, the limit is finite.
    nonfinite : {"propagate", "skip", "zero", "raise"}, default "propagate"
        What happens to gradients with NaN or ∞. ``"propagate"``: all elements that share their norm
        become NaN. ``"skip"``: all gradients become 0, and ``report.skipped`` is true. ``"zero"``:
        the elements that are not finite become 0, then the rest is clipped. ``"raise"``: a
        ``FloatingPointError``, which is a ``RuntimeError`` too, names the leaves; traced code has
        no values, so there it is a ``TypeError``. With each of them the state stays as it was.

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

    def init(self, grads: Tree) -> Any:
        """Return the state before the first step.

        Parameters
        ----------
        grads : array or tree of arrays
            Gradients, or parameters of the same shapes; only shapes and dtypes are used.

        Returns
        -------
        state : tree of arrays
        """
        if not self.stateful:
            return NoState()
        tree = open_tree(grads, "params")
        mode = tree.backend.mode(tree.leaf_info)
        with tree.backend.computation_context(tree.first):
            return first_state(self, tree, plan_for(self, [tree], mode))

    def _run(self, grads: Any, state: Any, step: StepOptions) -> tuple[Any, Any, Report]:
        """Take a step; see `BaseRule`."""
        result = run_step(self, grads, state, step)
        # In place, the caller gets the same tree back; an iterator is exhausted by now.
        if step.in_place and not isinstance(grads, Iterator):
            return grads, result.state, result.report()
        return result.clipped(), result.state, result.report()


def preset(make: Callable[P, Rule]) -> Callable[P, Rule]:
    """Decorate a function that returns rules, so that they print as its calls."""

    @wraps(make)
    def call(*positional: P.args, **named: P.kwargs) -> Rule:
        rule = make(*positional, **named)
        set_frozen_fields(rule, origin=Origin(call, positional, named))
        return rule

    return call


def take_step(rule: Any, grads: Any, state: Any, step: StepOptions) -> tuple[Any, Any, Report]:
    """Take a step by a rule of any class; ``grads`` may be `uniclip._core.containers.Flat`."""
    # A user's class may override `update`, which takes the arguments one by one.
    if isinstance(rule, BaseRule) and type(rule).update is BaseRule.update:
        return rule._run(grads, state, step)  # noqa: SLF001 - what `update` calls
    if isinstance(grads, Flat):
        grads = grads.unflatten()
    return rule.update(
        grads,
        state,
        step.params,
        step.all_reduce,
        in_place=step.in_place,
        loss=step.loss,
        shared=step.shared,
    )
