# SPDX-License-Identifier: MIT
"""A rule together with its memory, for training loops that are not compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree

from uniclip._errors import check, short
from uniclip._types import Number, Step, T
from uniclip._values import to_lists
from uniclip.arraywise import AnyRule, as_rule
from uniclip.backends import backend_of
from uniclip.labels import Flat, Leaves, labelled, labels_of, leaves_of, shown
from uniclip.processes import AllReduce, Shared
from uniclip.report import Report
from uniclip.rules import taken
from uniclip.saved import Saved, from_saved, restored, to_saved
from uniclip.tree import flatten, place

_ANEW = "start over with load_state_dict({})"


class _Last(NamedTuple):
    """What a clipper holds after a step, in one tuple, so that other threads never see half a step."""

    state: Any = None
    report: Report | None = None
    leaves: Leaves | None = None
    """The leaves of the norms in the state; ``None`` if not known yet."""
    spec: Any = None
    """The structure of the gradients that they were read from."""
    loaded: Saved | None = None
    """The loaded state, until the first step."""


class Clipper:
    """Clip step after step by one rule, and hold its memory.

    Parameters
    ----------
    rule : Rule or callable
        With memory or without.

    Attributes
    ----------
    rule : Rule
    report : Report or None
        The report of the last step; ``None`` before the first step.
    state : tree of arrays or None
        The rule's memory; ``None`` before the first step. It can be set to a saved one.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.

    Notes
    -----
    A clipper can be copied, pickled, and read by other threads while one thread clips. In compiled code, whose
    Python runs once and not at every step, use ``rule.init`` and ``rule.update``.

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

    def __init__(self, rule: AnyRule) -> None:
        self.rule = as_rule(rule)
        self._last = _Last()

    def __repr__(self) -> str:
        """Return source text."""
        return f"uc.Clipper({self.rule!r})"

    @property
    def report(self) -> Report | None:
        """The report of the last step."""
        return self._last.report

    @property
    def state(self) -> Any:
        """The rule's memory."""
        return self._last.state

    @state.setter
    def state(self, state: Any) -> None:
        self._last = self._last._replace(state=state, report=None, loaded=None)

    def __call__(
        self,
        grads: T,
        params: Any = None,
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
            As `uniclip.clip`; and in code that is being compiled, if the rule has memory.
        ValueError, FloatingPointError
            As `uniclip.clip`; and if a loaded state belongs to another rule or to other gradients.
        """
        return self._step(grads, Step(params, all_reduce, loss, shared=shared))[0]

    def clip_(
        self,
        grads: Any,
        params: Any = None,
        all_reduce: AllReduce | None = None,
        *,
        loss: Number | None = None,
        shared: Shared | None = None,
    ) -> Report:
        """Clip the gradients of a step in place, as `uniclip.clip_` does, and return the report."""
        return self._step(grads, Step(params, all_reduce, loss, in_place=True, shared=shared))[1]

    def init(self, grads: Any) -> None:
        """Make the state before the first step, from gradients or from parameters of the same shapes.

        Parameters that have no gradient in the first step need it in rules with a norm for each row or entry.
        """
        flat = flatten(grads)
        leaves = leaves_of(self.rule, flat)
        self._last = _Last(self._first(flat, leaves), leaves=leaves)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of the rule as plain numbers and lists, for any file format and framework.

        Returns
        -------
        dict
            ``json.dumps`` accepts it: ``"state"`` holds the numbers by name, ``"leaves"`` the leaves whose norms they
            are, ``"rule"`` the kind of rule, and ``"format"`` the version of the format. It is empty before the first
            step and for a rule without memory.
        """
        last = self._last
        if last.loaded is not None:
            values = {name: to_lists(array) for name, array in last.loaded.values.items()}
            return {**to_saved(self.rule, last.loaded.leaves, ()), "state": values}
        if last.state is None or not self.rule.memory:
            return {}
        known = last.leaves is not None or labelled(self.rule)
        return to_saved(self.rule, last.leaves if known else leaves_of(self.rule, flatten([])), last.state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a memory that was saved by a clipper or an integration, in this or another framework.

        Parameters
        ----------
        saved : dict
            It is copied, and converted to arrays at the next step, which knows the framework, the dtypes and the
            shapes. An empty dict starts over.

        Raises
        ------
        TypeError
            If it is not a dict.
        ValueError
            If it belongs to another rule; and if it belongs to other leaves or has other shapes, raised here if the
            clipper already has a state, else at the next step. Then nothing is loaded.
        """
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        last, loaded = self._last, from_saved(saved, self.rule, _ANEW) if saved else None
        if loaded is not None and last.state is not None:
            restored(loaded, self.rule, last.leaves, last.state, _ANEW)
        self._last = _Last(loaded=loaded)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which holds no framework's arrays."""
        return {"rule": self.rule, "saved": self.state_dict()}

    def __setstate__(self, held: dict[str, Any]) -> None:
        """Restore from a copy or a pickle."""
        self.rule, self._last = held["rule"], _Last()
        self.load_state_dict(held["saved"])

    def _first(self, flat: Flat, leaves: Leaves) -> Any:
        new, loaded = self.rule.init(flat[1].unflatten(flat[0])), self._last.loaded
        return new if loaded is None else restored(loaded, self.rule, leaves, new, _ANEW)

    def _step(self, grads: T, step: Step) -> tuple[T, Report]:
        state, leaves, spec = self._last.state, self._last.leaves, self._last.spec
        if state is None or labelled(self.rule):
            flat = flatten(grads)
            grads = flat[1].unflatten(flat[0])  # an iterator can be read once
            nothing = all([leaf is None for leaf in flat[0]])
            if nothing and self.rule.memory and step.all_reduce is None:
                report = Report()  # nothing to learn, and no framework known
                self._last = self._last._replace(report=report)
                return grads, report
            first = flat
            if step.params is not None and (step.all_reduce is not None or any([leaf is None for leaf in flat[0]])):
                first = flatten(step.params, "params")  # which have the shapes of absent gradients
            if step.all_reduce is not None and step.params is not None:  # then there is a norm for every parameter
                flat = first
            elif state is None and nothing and self.rule.memory:
                raise ValueError(_unknown(flat))
            if leaves is None or spec != flat[1]:
                here = leaves_of(self.rule, flat)
                if leaves not in (None, here):
                    raise ValueError(_of_others(self.rule, labels_of(leaves), labels_of(here)))
                leaves, spec = here, flat[1]
            state = self._first(first, leaves) if state is None else state
        self._refuse_traced(state)  # a graph cannot even use a state from outside
        clipped, state, report = taken(self.rule, grads, state, step)
        self._refuse_traced(state)
        self._last = _Last(state, report, leaves, spec)
        return clipped, report

    def _refuse_traced(self, state: Any) -> None:
        if any(map(_traced, optree.tree_leaves(state)[:1])):  # all arrays of a state are computed from the norms
            msg = (
                f"Clipper({short(self.rule)}) would remember values of code that is being compiled, which runs once: "
                "use state = rule.init(grads) outside, and clipped, state, report = rule.update(grads, state) inside"
            )
            raise TypeError(msg)


def _traced(array: Any) -> bool:
    backend = backend_of(array)
    return backend is not None and backend.traced(array)


def _of_others(rule: Any, known: list[str], here: list[str]) -> str:
    others = sorted(set(known) ^ set(here))
    change = f"{shown(others)} had a place at one step and none at another" if others else "their order has changed"
    return (
        f"{short(rule)} remembers each leaf or group by itself, and {change}: give the same tree, in the same order, "
        "at every step, with None in the place of a gradient that is absent"
    )


def _unknown(flat: Flat) -> str:
    which = f"{place('grads', flat[1].paths()[0])} is None" if flat[0] else "there are no gradients"
    return (
        f"{which} here, but another process may have one, and with all_reduce it would wait for this one: pass "
        "params=, the parameters of this process, which say of what framework, dtype and shape it would be"
    )
