# SPDX-License-Identifier: MIT
"""Rules made of rules: one after the other, or for some of the leaves only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import optree

from uniclip._errors import check, holds_arrays, settle
from uniclip._types import Path, Step
from uniclip.arraywise import AnyRule, as_rule
from uniclip.backends import DEFAULT, backend_of
from uniclip.backends.arrays import from_numpy
from uniclip.limits import NoState
from uniclip.plan import is_new, refuse_one_answer
from uniclip.report import ChainReport, Report, without_skip
from uniclip.rules import BaseRule, Rule, take_step
from uniclip.step import state_where
from uniclip.tree import Flat, backend_for, flatten


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
        report = ChainReport(())
        for rule, old in zip(self.rules, states, strict=True):
            skipped = report.skipped
            grads, after, of_rule = take_step(rule, grads, old, step)
            new.append(after if skipped is None else state_where(skipped, old, after))  # its zeros must not be learned
            report = ChainReport((*report.rules, of_rule))
        if not self.memory:
            return grads, state, report
        finite = report.finite
        return grads, tuple(new) if finite is None else state_where(finite, tuple(new), state), report


@dataclass(frozen=True, repr=False)
class Masked(BaseRule):
    """What `masked` returns."""

    rule: BaseRule
    where: Callable[[Path, Any], bool]
    tells_apart: ClassVar[list[bool]]
    """Whether ``where`` was seen to say different things of leaves: empty before."""

    def __post_init__(self) -> None:
        """Validate ``where``."""
        check("where", self.where, callable(self.where), "a function of (path, leaf)")
        settle(self, tells_apart=[])

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
        chosen, first = self.choose_leaves(leaves, spec), next((leaf for leaf in leaves if leaf is not None), None)
        state = self.rule.init(spec.unflatten(chosen))
        if first is None or any([leaf is not None for leaf in chosen]):
            return state
        backend = backend_for(leaves, "params", spec)  # those that are chosen are absent
        return optree.tree_map(lambda a: from_numpy(backend, a, first), state)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Run the rule on the chosen leaves; see `Rule.update`."""
        leaves, spec = flatten(grads)
        chosen = self.choose_leaves(leaves, spec)
        alone = step.alone and not any([leaf is None for leaf in leaves])  # else others may have the rest
        if alone and is_new(self):
            with (backend_of(next(iter(leaves), None)) or DEFAULT).quiet():
                answers = [leaf is not None for leaf in chosen]
                refuse_one_answer("masked(rule, where)", self.where, spec.paths(), answers)
            self.tells_apart.append(True)
        if all([leaf is None for leaf in chosen]) and step.alone:
            return spec.unflatten(leaves), state, Report()
        clipped, state, report = take_step(self.rule, Flat(chosen, spec), state, step)
        report = without_skip(report)  # the other leaves are not skipped
        if not step.in_place:
            leaves = [
                leaf if old is None else new for leaf, old, new in zip(leaves, chosen, flatten(clipped)[0], strict=True)
            ]
        return spec.unflatten(leaves), state, report

    def choose_leaves(self, leaves: list[Any], spec: Any) -> list[Any]:
        """Return the leaves that are chosen, with ``None`` in the places of the others."""
        paths = spec.paths()
        return [
            leaf if leaf is not None and _truth(self.where(path, leaf)) else None
            for path, leaf in zip(paths, leaves, strict=True)
        ]


def walk_rules(rule: Any) -> Iterator[Any]:
    """Yield a rule, and those inside of it, of chains and masks."""
    yield rule
    for inner in rule.rules if isinstance(rule, Chain) else [rule.rule] if isinstance(rule, Masked) else ():
        yield from walk_rules(inner)


def rules_with_norms(rule: Any) -> list[Rule]:
    """Return the rules that measure norms: a rule, and those inside of it, of chains and masks."""
    return [one for one in walk_rules(rule) if isinstance(one, Rule)]


def _truth(answer: Any) -> bool:
    check("what where(path, leaf) returns", answer, not holds_arrays(answer), "True or False")
    return bool(answer)
