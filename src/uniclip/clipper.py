# SPDX-License-Identifier: MIT
"""A rule together with its state, for training loops that are not compiled,
and for integrations with such loops.

An integration knows where its framework's gradients, steps, states and logs are. This module holds
the state and the report of a step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from uniclip._core.collectives import AllReduce, Loss, Shared
from uniclip._core.containers import Flat, expression_of, flatten, flatten_known
from uniclip._core.spine import run_spine, run_step
from uniclip._errors import check, summarize
from uniclip._types import Number, StepOptions, T, Tree
from uniclip._warnings import warn
from uniclip.backends import outlives, to_lists, to_remember
from uniclip.compose import AnyRule, Chain, as_rule
from uniclip.report import (
    AVERAGED,
    MANY_SKIPPED,
    NORM,
    NORM_MAX,
    Report,
    nan_where_unlimited,
    read_arrays,
)
from uniclip.rule import BaseRule, Rule, take_step
from uniclip.saved import (
    Leaves,
    Saved,
    by_name,
    from_saved,
    labelled,
    labels_of,
    leaves_of,
    merge_states,
    restore_state,
    shown,
    to_saved,
    values_of,
)

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_ON_SPINE = {Rule, Chain}
"""The classes of rules that the spine runs; their subclasses may override `update`."""
MAX_PENDING_REPORTS = 200
"""The number of reports that wait to be averaged; so many small arrays are kept at most."""


class _Last(NamedTuple):
    """The state of a clipper after a step, in one tuple: no thread ever sees half a step."""

    state: Any = None
    report: Report | None = None
    leaves: Leaves | None = None
    """The leaves of the norms in the state; ``None`` if not known yet."""
    spec: Any = None
    """The structure of the gradients that they were read from."""
    loaded: Saved | None = None
    """The loaded state, until the first step."""
    kept: Saved | None = None
    """The rows of leaves or groups that are not in the tree, where an integration keeps them;
    else ``None``.
    """


class Clipper:
    """Clip step after step by one rule, and hold its state.

    Parameters
    ----------
    rule : Rule or callable
        Stateful or stateless.
    record : uniclip.insight.Recorder, optional
        Records each step.
    resume : bool, default True
        ``False`` ignores the state of a rule in a checkpoint, so the rule starts with empty state.
        Use it for the first run with another rule than the one that wrote the checkpoint.

    Attributes
    ----------
    rule : Rule
    record : Recorder or None
    resume : bool
    report : Report or None
        The report of the last step; ``None`` before the first step.
    state : tree of arrays or None
        The rule's state; ``None`` before the first step. It can be set to a saved one.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array, or ``record`` not a
        recorder.

    Notes
    -----
    A clipper can be copied, pickled, and read by other threads while one thread clips. In compiled
    code, whose Python runs once and not at every step, use ``rule.init`` and ``rule.update``.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.autoclip(percentile=50))
    >>> for norm in [1.0, 3.0, 50.0]:
    ...     print(clipper({"w": np.asarray([norm])}))
    {'w': array([1.])}
    {'w': array([2.])}
    {'w': array([3.])}
    >>> float(clipper.report.norms)
    50.0
    """

    def __init__(
        self, rule: AnyRule, record: Recorder | None = None, *, resume: bool = True
    ) -> None:
        wanted = 'a recorder, such as uniclip.insight.Recorder("run.jsonl")'
        check("record", record, record is None or hasattr(record, "norms_of"), wanted)
        self.rule = as_rule(rule)
        self.record = record
        self.resume = resume
        # The header of the file names the rule.
        if record is not None:
            record.describe(self.rule)

        self._last = _Last()
        self._window: _Window | None = None
        self._skipped: int | None = 0

    def __repr__(self) -> str:
        """Return source text."""
        return f"uc.Clipper({self.rule!r})"

    @property
    def report(self) -> Report | None:
        """The report of the last step."""
        return self._last.report

    @property
    def state(self) -> Any:
        """The rule's state."""
        return self._last.state

    @state.setter
    def state(self, state: Any) -> None:
        # A loaded state that still waits for the first step would take precedence over this one.
        self._last = self._last._replace(state=state, report=None, loaded=None)

    def __call__(
        self,
        grads: T,
        params: Tree = None,
        all_reduce: AllReduce | None = None,
        *,
        loss: Number | None = None,
        shared: Shared | None = None,
    ) -> T:
        """Clip the gradients of a step.

        Parameters
        ----------
        grads, params, all_reduce, shared
            As in `uniclip.clip`.
        loss
            As in `Rule.update`.

        Returns
        -------
        clipped : tree

        Raises
        ------
        TypeError
            As `uniclip.clip`; and in code that is being compiled, if the rule is stateful.
        ValueError, FloatingPointError
            As `uniclip.clip`; and if a loaded state belongs to another rule or to other gradients.
        """
        return self._step(grads, StepOptions(params, all_reduce, loss, shared=shared))[0]

    def clip_(
        self,
        grads: Tree,
        params: Tree = None,
        all_reduce: AllReduce | None = None,
        *,
        loss: Number | None = None,
        shared: Shared | None = None,
    ) -> Report:
        """Clip the gradients of a step in place, as `uniclip.clip_` does, and return the report."""
        return self._step(
            grads, StepOptions(params, all_reduce, loss, in_place=True, shared=shared)
        )[1]

    def init(self, grads: Tree) -> None:
        """Make the state before the first step, from gradients or from parameters of the
        same shapes.

        Parameters that have no gradient in the first step need it in rules with a norm for each row
        or element.
        """
        flat = flatten(grads)
        leaves = leaves_of(self.rule, flat)
        self._last = _Last(self._first_state(flat, leaves), None, leaves, flat.spec)

    def scalars(self) -> dict[str, Any]:
        """Return the scalars of the last step, see `uniclip.Report.scalars`.

        Empty before the first one.
        """
        return {} if self.report is None else self.report.scalars()

    def logs(self) -> dict[str, float]:
        """Return the scalars since the last call as floats, read from their device together.

        Returns
        -------
        dict of str to float
            `scalars`, with the means over these steps of ``"clip/share"`` and ``"clip/skipped"``,
            and ``"clip/norm_max"``, the largest finite norm. A limit or threshold that does not
            exist is NaN. Empty if there was no step. Steps are kept from the first call on, which
            returns the last one only.

        Examples
        --------
        >>> clipper = uc.Clipper(uc.by_global_norm(2.0))
        >>> _ = clipper.logs()
        >>> for norm in [1.0, 3.0, 5.0, 1.0]:
        ...     _ = clipper(np.asarray([norm]))
        >>> logs = clipper.logs()
        >>> logs["clip/norm"], logs["clip/share"], logs["clip/norm_max"]
        (1.0, 0.5, 5.0)
        """
        return self.totals().scalars()

    def totals(self) -> Totals:
        """Return the statistics for `logs`, which integrations add up over several windows."""
        # Nothing is kept for a clipper whose logs nobody reads.
        if self._window is None:
            self._window = _Window()
            if self.report is not None:
                self._window.add(self.report)

        return self._window.read()

    def state_dict(self, convert: Callable[[Any], Any] = to_lists) -> dict[str, Any]:
        """Return the state of the rule as plain numbers and lists,
        for any file format and framework.

        Parameters
        ----------
        convert : function of an array, optional
            What to save in the place of numbers and lists.

        Returns
        -------
        dict
            ``json.dumps`` accepts it: ``"state"`` holds the numbers by name, ``"leaves"`` the
            leaves whose norms they are, ``"rule"`` the type of rule, and ``"format"`` the version
            of the format. It is empty before the first step and for a stateless rule.
        """
        # One read of the tuple gives parts of the same step while another thread clips.
        last = self._last
        if last.loaded is not None:
            return to_saved(self.rule, last.loaded, convert)
        if last.state is None or not self.rule.stateful:
            return {}
        leaves = last.leaves
        # A state that was set directly has no known leaves, but one norm of all leaves needs none.
        if leaves is None and not labelled(self.rule):
            leaves = leaves_of(self.rule, flatten([]))
        saved = Saved(leaves, values_of(last.state))
        if last.kept is not None:
            saved = merge_states(self.rule, saved, last.kept)
        return to_saved(self.rule, saved, convert)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a state that was saved by a clipper or an integration,
        in this or another framework.

        Parameters
        ----------
        saved : dict
            It is copied, and converted to arrays like those of the state, or at the first step,
            which knows the framework, the dtypes and the shapes. An empty dict starts over, and so
            does any with ``resume=False``.

        Raises
        ------
        TypeError
            If it is not a dict.
        ValueError
            If it belongs to another rule; and if it belongs to other leaves or has other shapes,
            raised here if the clipper already has a state, else at the next step. Then nothing is
            loaded.
        """
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        if not saved or not self.resume:
            self._last = _Last()
            return

        # Without a state yet, the first step knows the leaves and the framework.
        loaded = from_saved(saved, self.rule)
        if self.state is None:
            self._last = _Last(loaded=loaded)
        else:
            self.state = restore_state(loaded, self.rule, self._last.leaves, self.state)

    @property
    def rows(self) -> list[str]:
        """The names of leaves and groups with rows in the state, also of those that are gone."""
        kept = self._last.kept
        return [*labels_of(self._last.leaves), *(labels_of(kept.leaves) if kept else ())]

    def change_leaves(self, grads: Tree, renamed: Mapping[str, str]) -> None:
        """Go on with a tree of other leaves, for integrations that know which of them are the same.

        Leaves that were there before keep their rows of the state, also while they are gone;
        others get new ones.

        Parameters
        ----------
        grads : tree
            Gradients, or parameters of the same shapes.
        renamed : mapping
            The new names of leaves that have others now, ``""`` for those that never come back.
        """
        # A new state for the new leaves, into which the rows of those that stay go by name.
        before = self._last
        self.init(grads)
        if before.state is not None and before.leaves is not None:
            rows = Saved(before.leaves, values_of(before.state))
            if before.kept is not None:
                rows = merge_states(self.rule, rows, before.kept)
            leaves = [
                of_rule and [renamed.get(label, label) for label in of_rule]
                for of_rule in rows.leaves or ()
            ]
            self._last = self._with_rows(rows._replace(leaves=leaves))[0]

        self._last = self._last._replace(report=before.report)

    def look_up(self, saved: dict[str, Any]) -> tuple[Callable[[], None], list[str]]:
        """Return what loads a saved state, and the names of leaves without a row there;
        nothing is loaded yet.

        Rows are looked up by the names of leaves, and those of others are kept; if they are all of
        others, this raises an error.
        """
        loaded = from_saved(saved, self.rule)
        missing: list[str] = []
        if set(labels_of(loaded.leaves)).isdisjoint(labels_of(self._last.leaves)):
            state = restore_state(loaded, self.rule, self._last.leaves, self.state)
            last = self._last._replace(state=state, report=None, kept=None)
        else:
            last, missing = self._with_rows(loaded)

        # The caller applies it later: the optimizer may still reject its part of a checkpoint.
        return partial(setattr, self, "_last", last), missing

    def _with_rows(self, rows: Saved) -> tuple[_Last, list[str]]:
        """Return what is held with the rows of a saved state, and the leaves that it lacks."""
        leaves: Any = self._last.leaves
        state, kept, missing = by_name(rows, self.rule, leaves, self.state)
        others = kept if labels_of(kept.leaves) else None
        return self._last._replace(state=state, report=None, kept=others), missing

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which holds no framework's arrays."""
        return {"rule": self.rule, "saved": self.state_dict()}

    def __setstate__(self, copied: dict[str, Any]) -> None:
        """Restore from a copy or a pickle."""
        self.__init__(copied["rule"])  # type: ignore[misc]
        self.load_state_dict(copied["saved"])

    def _first_state(self, flat: Flat, leaves: Leaves) -> Any:
        """Return the state before the first step, or a loaded one."""
        state = self.rule.init(flat.unflatten())
        if self._last.loaded is None:
            return state
        return restore_state(self._last.loaded, self.rule, leaves, state)

    def _step(self, grads: Any, step: StepOptions) -> tuple[Any, Report]:
        """Take a step, and hold its state and its report."""
        # A user's class need not derive from `BaseRule`.
        if getattr(self.rule, "on_spine", False):
            # `flatten_known` treats an iterator as a leaf, so the general path can still read it.
            known_leaves, known_spec = flatten_known(grads)
            taken = self.step_on_spine(known_leaves, step)
            if taken is not None:
                clipped_leaves, _, report = taken
                return known_spec.unflatten(clipped_leaves), report
        return self._step_generally(grads, step)

    def _step_generally(self, grads: Any, step: StepOptions) -> tuple[Any, Report]:
        """Take a step of any kind."""
        last = self._last
        rule = self.rule
        # Usual steps are not flattened here: only a state with rows by leaf needs a look at them.
        looks_at_leaves = rule.stateful and labelled(rule)
        records_leaves = self.record is not None and self.record.leaves
        if last.state is None or looks_at_leaves or records_leaves:
            grads = flatten(grads)
            has_gradients = any([leaf is not None for leaf in grads.leaves])
            # Without gradients there is nothing to learn, and no framework known.
            if rule.stateful and not has_gradients and step.all_reduce is None:
                report = Report()
                self._last = last._replace(report=report)
                return grads.unflatten(), report

            last = self._with_state(grads, step, has_gradients=has_gradients)

        # A graph cannot even use a state from outside.
        self._raise_if_traced(last.state)
        # Before they are clipped.
        norms = None if self.record is None else self.record.norms_of(grads)
        clipped, new_state, report = take_step(rule, grads, last.state, step)
        self._raise_if_traced(new_state)
        if rule.stateful:
            new_state = to_remember(new_state, last.state)
        # A single assignment publishes the step, so that other threads see all of it or nothing.
        self._last = _Last(new_state, report, last.leaves, last.spec, kept=last.kept)
        if self.record is not None:
            loss = step.loss.own if isinstance(step.loss, Loss) else step.loss
            self.record(report, loss=loss, leaves=norms)
        self._see(report, skipped=report.was_skipped())
        return clipped, report

    def _with_state(self, grads: Flat, step: StepOptions, *, has_gradients: bool) -> _Last:
        """Return the last step with the leaves of this one, and the first state if there is none.

        Raises
        ------
        ValueError
            If there is no state, and neither gradients nor parameters to make it from; and as
            `_check_leaves`.
        """
        last = self._last
        is_unknown = last.state is None and not has_gradients and step.params is None
        if self.rule.stateful and is_unknown:
            raise ValueError(_describe_nothing(grads))
        leaves, spec = self._check_leaves(grads, step)
        state = last.state
        if state is None:
            state = self._first_state(_tree_for_state(grads, step), leaves)
        return last._replace(state=state, leaves=leaves, spec=spec)

    def _check_leaves(self, grads: Flat, step: StepOptions) -> tuple[Leaves, Any]:
        """Return the leaves of the norms in the state, and the structure that they are read from.

        Raises
        ------
        ValueError
            If they are others than at the step before.
        """
        # With several processes there is a norm for every parameter.
        flat = grads
        if step.all_reduce is not None and step.params is not None:
            flat = flatten(step.params, "params")
        last = self._last
        # With an unchanged structure, a step need not compute the labels of all leaves again.
        if last.leaves is not None and last.spec == flat.spec:
            return last.leaves, last.spec
        leaves = leaves_of(self.rule, flat)
        if last.leaves is not None and last.leaves != leaves:
            before = labels_of(last.leaves)
            now = labels_of(leaves)
            raise ValueError(_describe_others(self.rule, before, now))

        return leaves, flat.spec

    def forget_report(self) -> None:
        """Drop the report of the step before, since nothing was clipped in this one."""
        self._last = self._last._replace(report=None)

    def step_on_spine(
        self, leaves: list[Any], step: StepOptions, spec: Any = None
    ) -> tuple[list[Any], Any, Report] | None:
        """Take a step on the spine, and hold its state and its report; return the leaves, whether
        the step is skipped, and the report.

        ``None``, with nothing changed, if the spine does not apply. With ``spec``, the structure of
        distributed leaves, a `Rule` takes its step here on any path.
        """
        rule = self.rule
        last = self._last
        # A user's class may override `update`, a recorder wants the norms of all leaves, and the
        # first step makes the state.
        if type(rule) not in _ON_SPINE or self.record is not None or last.state is None:
            return None
        if spec is not None and type(rule) is Rule:
            result = run_step(rule, Flat(leaves, spec), last.state, step)
            clipped, state, decided = result.leaves, result.state, result.values
            skipped = decided.skipped
            if skipped is None or isinstance(skipped, (np.ndarray, np.bool_)):
                skipped = bool(skipped)
        else:
            taken = run_spine(rule, leaves, last.state, step)
            if taken is None:
                return None
            clipped, decided = taken
            state, skipped = decided.state, decided.skipped

        report = decided.report()
        if rule.stateful and type(getattr(decided, "norm", None)) is not float:
            state = to_remember(state, last.state)
        # Not `_replace`, which takes a microsecond of each step.
        self._last = _Last(state, report, last.leaves, last.spec, loaded=None, kept=last.kept)
        self._see(report, skipped=skipped is True)
        return clipped, skipped, report

    def _see(self, report: Report, *, skipped: bool) -> None:
        """Keep what is seen of a step for `logs`, and warn of a run that does not train."""
        if self._window is not None:
            self._window.add(report)
        # The warning appears once: it sets the count to ``None``, which ends the counting.
        if self._skipped is not None:
            self._skipped = self._skipped + 1 if skipped else 0
            if self._skipped == MANY_SKIPPED:
                self._skipped = None
                self._warn_of_skips(report)

    def _warn_of_skips(self, report: Report) -> None:
        """Say once that a run does not train."""
        norm = float(report.scalars().get(NORM, math.nan))
        why = (
            "the gradients are not finite: look for the cause, such as a learning rate that is too "
            "large"
        )
        if math.isfinite(norm):
            why = (
                f"a norm of {norm:.3g} is above its bound: raise the bound if such norms are usual"
            )

        msg = (
            f"{MANY_SKIPPED} steps in a row were skipped by {summarize(self.rule)}, and nothing is "
            f"learned in them; {why}"
        )
        warn(msg)

    def _raise_if_traced(self, state: Any) -> None:
        if not outlives(optree.tree_leaves(state)):
            msg = (
                f"Clipper({summarize(self.rule)}) would remember values of code that is being "
                "compiled, which runs once: use state = rule.init(grads) outside, and clipped, "
                "state, report = rule.update(grads, state) inside"
            )
            raise TypeError(msg)


class Totals(NamedTuple):
    """Statistics of several steps, for logs: the last scalars, sums of others, the largest norm."""

    last: dict[str, float]
    sums: dict[str, float]
    """The sums of the scalars that are averaged."""
    steps: int
    largest: float
    """The largest finite norm, NaN if there was none."""

    @classmethod
    def of_step(cls, report: Report) -> Totals:
        """Return the totals of one step, whose report has been read from its device."""
        last = {name: float(value) for name, value in report.scalars().items()}
        norm = last.get(NORM, math.nan)
        largest = norm if math.isfinite(norm) else math.nan
        return cls(last, {name: last[name] for name in AVERAGED if name in last}, 1, largest)

    def followed_by(self, later: Totals) -> Totals:
        """Return the totals of these steps and of later ones."""
        if not later.steps:
            return self
        sums = dict(self.sums)
        for name, total in later.sums.items():
            sums[name] = sums.get(name, 0.0) + total
        # Unlike `max`, this ignores NaN.
        largest = float(np.fmax(self.largest, later.largest))
        return Totals(later.last, sums, self.steps + later.steps, largest)

    def scalars(self) -> dict[str, float]:
        """Return the last scalars, means, and the largest norm; empty if there was no step."""
        scalars = dict(self.last)
        for name, total in self.sums.items():
            scalars[name] = total / self.steps
        if NORM in scalars:
            scalars[NORM_MAX] = self.largest
        return nan_where_unlimited(scalars)


NO_STEPS = Totals({}, {}, 0, math.nan)


class _Window:
    """The steps between two logs: reports that wait to be read together,
    and the totals of earlier ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Report] = []
        self._totals = NO_STEPS

    def add(self, report: Report) -> None:
        """Add a step, unless it is of code that is being compiled, which runs once."""
        if not report.outlives_step():
            return
        with self._lock:
            # A run that is logged seldom would keep the arrays of all its steps.
            self._waiting.append(report)
            if len(self._waiting) >= MAX_PENDING_REPORTS:
                self._fold()

    def _fold(self) -> None:
        """Add up the reports that wait."""
        # Their arrays are read from the device together.
        waiting = self._waiting
        self._waiting = []
        for report in read_arrays(waiting):
            self._totals = self._totals.followed_by(Totals.of_step(report))

    def read(self) -> Totals:
        """Return the totals; start the next window."""
        with self._lock:
            self._fold()
            totals = self._totals
            self._totals = NO_STEPS
            return totals


def _tree_for_state(grads: Flat, step: StepOptions) -> Flat:
    """Return the tree whose shapes the first state has: the parameters if gradients are absent."""
    absent = any([leaf is None for leaf in grads.leaves])
    if step.params is not None and (absent or step.all_reduce is not None):
        return flatten(step.params, "params")
    return grads


def _describe_others(rule: BaseRule, before: list[str], now: list[str]) -> str:
    others = sorted(set(before) ^ set(now))
    change = "their order has changed"
    if others:
        change = f"{shown(others)} had a place at one step and none at another"
    return (
        f"{summarize(rule)} remembers each leaf or group by itself, and {change}: give the same "
        "tree, in the same order, at every step, with None in the place of a gradient that is "
        "absent"
    )


def _describe_nothing(flat: Flat) -> str:
    which = "there are no gradients"
    if flat.leaves:
        which = f"{expression_of('grads', flat.spec.paths()[0])} is None"
    return (
        f"{which} here, but another process may have one, and with all_reduce it would wait for "
        "this one: pass params=, the parameters of this process, which say of what framework, "
        "dtype and shape it would be"
    )
