# SPDX-License-Identifier: MIT
"""Rules made of rules: one after the other, or for some of the leaves only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import and_, mul, or_
from typing import Any, NamedTuple

import numpy as np
import optree

from uniclip._checks import check
from uniclip._repr import holds_arrays
from uniclip.backends import DEFAULT, Backend, backend_of
from uniclip.base import BaseRule, taken
from uniclip.limits import NoState
from uniclip.report import FIELDS, LOGGED, SHARE, Late, Made, Report, apart, register
from uniclip.rules import AnyRule, as_rule
from uniclip.scopes import Path
from uniclip.step import Step, state_where
from uniclip.tree import backend_for, flatten


def chain(*rules: AnyRule) -> Chain:
    """Return a rule that runs the given rules and functions of one gradient array, one after the other.

    Each rule gets the gradients that the one before returned. Where one of them meets gradients that are not
    finite, all states stay as they were; where one skips the step, the states of the rules after it do.
    In place, an error in one rule leaves the changes of those before it.

    Parameters
    ----------
    *rules : rule or callable
        A callable gets one gradient array and returns the array to put in its place.

    Returns
    -------
    rule
        In its reports ``norms``, ``limits`` and ``factors`` are tuples with one element for each rule; ``clipped``
        and ``skipped`` are true if any rule clipped or skipped, ``finite`` if all rules got finite gradients.

    Raises
    ------
    TypeError
        If one of them is neither a rule nor a function.

    Examples
    --------
    >>> rule = uc.chain(uc.by_value(-10.0, 10.0), uc.by_global_norm(1.0))
    >>> uc.clip(np.asarray([3000.0, 10.0]), rule)[0].round(3)
    array([0.707, 0.707])
    """
    return Chain(tuple(map(as_rule, rules)))


def masked(rule: AnyRule, where: Callable[[Path, Any], bool]) -> Masked:
    """Return a rule that clips only the leaves for which ``where(path, leaf)`` is true.

    The other leaves are returned unchanged, and are part of no norm.

    Parameters
    ----------
    rule : rule or callable
    where : callable
        A function of the path, the tuple of keys that leads to a leaf, such as ``("encoder", 0, "weight")``, and of
        the leaf.

    Returns
    -------
    rule

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function, or ``where`` is not a function.

    Examples
    --------
    >>> rule = uc.masked(uc.by_global_norm(1.0), lambda path, leaf: path[0] != "head")
    >>> uc.clip({"body": np.asarray([3.0, 4.0]), "head": np.asarray([12.0])}, rule)[0]
    {'body': array([0.6, 0.8]), 'head': array([12.])}
    """
    return Masked(as_rule(rule), where)


@dataclass(frozen=True, repr=False)
class Chain(BaseRule):
    """What `chain` returns."""

    rules: tuple[BaseRule, ...]

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule."""
        return f"uc.chain({', '.join(show(rule) for rule in self.rules)})"

    @property
    def memory(self) -> bool:
        """Whether one of the rules has memory."""
        return any(rule.memory for rule in self.rules)

    def init(self, grads: Any) -> tuple[Any, ...]:
        """Return the states of the rules before the first step; see `Rule.init`."""
        return tuple(rule.init(grads) for rule in self.rules)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Run the rules; see `Rule.update`."""
        fits = isinstance(state, (tuple, list)) and len(state) == len(self.rules)
        check("state", state, fits or not self.memory, f"what init returned, a tuple of {len(self.rules)} states")
        states, new = state if self.memory else [NoState()] * len(self.rules), []
        reports: list[Report] = []
        for rule, old in zip(self.rules, states, strict=True):
            skipped = _skipped(reports)
            grads, after, report = taken(rule, grads, old, step)
            new.append(after if skipped is None else _where(skipped, old, after))  # its zeros must not enter a state
            reports.append(report)
        report = _joined(reports)
        if not self.memory:
            return grads, state, report
        return grads, tuple(new) if report.finite is None else _where(report.finite, tuple(new), state), report


@dataclass(frozen=True, repr=False)
class Masked(BaseRule):
    """What `masked` returns."""

    rule: BaseRule
    where: Callable[[Path, Any], bool]

    def __post_init__(self) -> None:
        """Validate ``where``."""
        check("where", self.where, callable(self.where), "a function of (path, leaf)")

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule, if the function has a name."""
        return f"uc.masked({show(self.rule)}, {show(self.where)})"

    @property
    def memory(self) -> bool:
        """Whether the rule has memory."""
        return bool(self.rule.memory)

    def init(self, grads: Any) -> Any:
        """Return the rule's state before the first step; see `Rule.init`."""
        leaves, spec = flatten(grads)
        some, first = self.chosen(leaves, spec), next((leaf for leaf in leaves if leaf is not None), None)
        state = self.rule.init(spec.unflatten(some))
        if first is None or any([leaf is not None for leaf in some]):
            return state
        backend = backend_for(leaves, "params", spec)  # those that are chosen are absent
        return optree.tree_map(lambda a: backend.from_host(np.asarray(a), backend.device(first)), state)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Run the rule on the chosen leaves; see `Rule.update`."""
        leaves, spec = flatten(grads)
        some = self.chosen(leaves, spec)
        if all([leaf is None for leaf in some]) and step.all_reduce is None:
            return spec.unflatten(leaves), state, Report()
        clipped, state, report = taken(self.rule, spec.unflatten(some), state, step)
        report = report.without_skip()  # the other leaves are not skipped
        if not step.in_place:
            leaves = [
                leaf if old is None else new for leaf, old, new in zip(leaves, some, flatten(clipped)[0], strict=True)
            ]
        return spec.unflatten(leaves), state, report

    def chosen(self, leaves: list[Any], spec: Any) -> list[Any]:
        """Return the leaves that are chosen, with ``None`` in the places of the others."""
        paths = spec.paths()
        return [
            leaf if leaf is not None and _truth(self.where(path, leaf)) else None
            for path, leaf in zip(paths, leaves, strict=True)
        ]


def _truth(answer: Any) -> bool:
    check("what where(path, leaf) returns", answer, not holds_arrays(answer), "True or False")
    return bool(answer)


def _where(flag: Any, yes: Any, no: Any) -> Any:
    """Return the first state where a flag is true, else the second."""
    arrays = optree.tree_leaves(no)
    return state_where(backend_of(arrays[0]) or DEFAULT, flag, yes, no) if arrays else yes


def _skipped(reports: list[Report]) -> Any:
    """Return whether one of the rules skipped the step, ``None`` if none of them can."""
    flags = [report.skipped for report in reports if report.skipped is not None]
    return reduce(or_, flags) if flags else None


def _larger(a: Any, b: Any) -> Any:
    return (backend_of(a) or DEFAULT).xp.maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return (backend_of(a) or DEFAULT).xp.minimum(a, b)


def _each(report: Report) -> list[Report]:
    """Return the report of each rule from the report of a chain."""
    thresholds = report.thresholds or [None] * len(report.norms)
    parts = zip(report.norms, report.limits, report.factors, thresholds, strict=True)
    more = {"finite": report.finite, "skipped": report.skipped}
    return [Report(*three, thresholds=last, **more) for *three, last in parts]


def _line(report: Report) -> str:
    """Return the lines of the rules that measure norms, joined."""
    return " | ".join([str(one) for one in _each(report) if one.norms is not None]) or str(Report())


class _Reports(Made):
    """The report of a chain: a tuple of each rule's norms, limits and factors."""

    __slots__ = ()
    __str__ = _line

    def scalars(self) -> dict[str, Any]:
        """Return the combined scalars of all rules."""
        return _scalars(_each(self), self.skipped)


class _OfRules(NamedTuple):
    """The data of a report on several rules: theirs."""

    reports: list[Report]

    @property
    def own(self) -> Backend:
        """The backend of the gradients."""
        return next(report.record.own for report in self.reports if isinstance(report, Late))

    def field(self, name: str) -> Any:
        """Return a field of the report."""
        return _field(self.reports, name)

    def scalars(self) -> dict[str, Any]:
        """Return the combined scalars of all rules."""
        return _scalars(self.reports, _skipped(self.reports))

    def without_skip(self) -> _OfRules:
        """Return the same of rules that skip nothing."""
        return _OfRules([report.without_skip() for report in self.reports])

    def apart(self) -> tuple[list[Any], Callable[[list[Any]], _OfRules]]:
        """Return the arrays, and a function that makes the record of NumPy arrays in their place."""
        each, functions = zip(*[apart(report) for report in self.reports], strict=True)
        counts = list(map(len, each))

        def on_host(found: list[Any]) -> _OfRules:
            values = iter(found)
            parts = [list(islice(values, count)) for count in counts]
            return _OfRules([rebuilt(part) for rebuilt, part in zip(functions, parts, strict=True)])

        return [array for arrays in each for array in arrays], on_host


class _LateReports(Late):
    """The same, arranged on first access."""

    __slots__ = ()
    __str__ = _line
    kind = _Reports


register(_LateReports)


def _joined(reports: list[Report]) -> Report:
    """Return the report on all rules, arranged on first access if theirs are."""
    if any([isinstance(report, Late) for report in reports]):
        return _LateReports(_OfRules(reports))
    if all([report.finite is None for report in reports]):
        return Report()
    return _Reports(*[_field(reports, name) for name in FIELDS])


def _field(reports: list[Report], name: str) -> Any:
    """Return a field of the report on all rules."""
    if name == "skipped":
        return _skipped(reports)
    values = tuple([getattr(report, name) for report in reports])
    if name == "thresholds" and all(value is None for value in values):
        return None
    if name not in {"clipped", "finite"}:
        return values
    flags = [value for value in values if value is not None]
    return reduce(or_ if name == "clipped" else and_, flags) if flags else None


def _scalars(reports: list[Report], skipped: Any) -> dict[str, Any]:
    """Return the combined scalars of all rules; a step counts as clipped if one of them clipped."""
    each = [report.scalars() for report in reports]
    join = dict(zip(LOGGED, (_larger, _smaller, _smaller, mul, _larger, _larger), strict=True))
    found = {name: [scalars[name] for scalars in each if name in scalars] for name in LOGGED}
    joined = {name: reduce(join[name], values) for name, values in found.items() if values}
    if joined and skipped is not None:  # also by a rule without norms
        share = joined[SHARE]
        joined[LOGGED[-1]] = (backend_of(share) or DEFAULT).xp.asarray(skipped, dtype=share.dtype)
    return joined
