# SPDX-License-Identifier: MIT
"""Rules made of other rules and of functions of one gradient array; `as_rule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import optree

from uniclip._core.plan import check_answers_differ, is_new
from uniclip._core.step import state_where
from uniclip._core.tree import Flat, OpenedTree, backend_for, flatten, open_tree
from uniclip._errors import (
    check,
    describe,
    holds_arrays,
    home_of,
    real,
    set_frozen_fields,
    summarize,
)
from uniclip._types import Array, Number, Path, Step
from uniclip.backends import DEFAULT, backend_of
from uniclip.backends.arrays import broadcasts, from_numpy, known_ordered, same_shape
from uniclip.backends.base import cast, fill_places
from uniclip.limits import NoState
from uniclip.report import ChainReport, Report, without_skip
from uniclip.rule import BaseRule, Rule, take_step


def chain(*rules: AnyRule) -> Chain:
    """Return a rule that runs rules and functions of one gradient array, one after the other.

    Each rule gets the gradients that the one before returned. Where one of them meets gradients
    that are not finite, all states stay as they were; where one skips the step, the states of the
    rules after it do. In place, an error in one rule leaves the changes of those before it.

    Parameters
    ----------
    *rules : rule or callable
        A callable gets one gradient array and returns the array to put in its place.

    Returns
    -------
    rule
        In its reports ``norms``, ``limits`` and ``factors`` are tuples with one element for each
        rule; ``clipped`` and ``skipped`` are true if any rule clipped or skipped, ``finite`` if all
        rules got finite gradients.

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
        A function of the path, the tuple of keys that leads to a leaf, such as
        ``("encoder", 0, "weight")``, and of the leaf.

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
    def stateful(self) -> bool:
        """Whether one of the rules has memory."""
        return any(rule.stateful for rule in self.rules)

    def init(self, grads: Any) -> tuple[Any, ...]:
        """Return the states of the rules before the first step; see `Rule.init`."""
        return tuple(rule.init(grads) for rule in self.rules)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Run the rules; see `Rule.update`."""
        fits = isinstance(state, (tuple, list)) and len(state) == len(self.rules)
        check(
            "state",
            state,
            fits or not self.stateful,
            f"what init returned, a tuple of {len(self.rules)} states",
        )
        states, new = state if self.stateful else [NoState()] * len(self.rules), []
        report = ChainReport(())
        for rule, old in zip(self.rules, states, strict=True):
            skipped = report.skipped
            grads, after, of_rule = take_step(rule, grads, old, step)
            # Its zeros must not be learned.
            new.append(
                after if skipped is None else state_where(skipped, after, old, expected=False)
            )
            report = ChainReport((*report.rules, of_rule))
        if not self.stateful:
            return grads, state, report
        finite = report.finite
        return (
            grads,
            tuple(new) if finite is None else state_where(finite, tuple(new), state),
            report,
        )


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
        set_frozen_fields(self, tells_apart=[])

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule, if the function has a name."""
        return f"uc.masked({show(self.rule)}, {show(self.where)})"

    @property
    def stateful(self) -> bool:
        """Whether the rule has memory."""
        return bool(self.rule.stateful)

    def init(self, grads: Any) -> Any:
        """Return the rule's state before the first step; see `Rule.init`."""
        leaves, spec = flatten(grads)
        chosen, first = (
            self.choose_leaves(leaves, spec),
            next((leaf for leaf in leaves if leaf is not None), None),
        )
        state = self.rule.init(spec.unflatten(chosen))
        if first is None or any([leaf is not None for leaf in chosen]):
            return state
        backend = backend_for(leaves, "params", spec)  # those that are chosen are absent
        return optree.tree_map(lambda a: from_numpy(backend, a, first), state)

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Run the rule on the chosen leaves; see `Rule.update`."""
        leaves, spec = flatten(grads)
        chosen = self.choose_leaves(leaves, spec)
        # else others may have the rest
        alone = step.single_process and not any([leaf is None for leaf in leaves])
        if alone and is_new(self):
            with (backend_of(next(iter(leaves), None)) or DEFAULT).computation_context():
                answers = [leaf is not None for leaf in chosen]
                check_answers_differ("masked(rule, where)", self.where, spec.paths(), answers)
            self.tells_apart.append(True)
        if all([leaf is None for leaf in chosen]) and step.single_process:
            return spec.unflatten(leaves), state, Report()
        clipped, state, report = take_step(self.rule, Flat(chosen, spec), state, step)
        report = without_skip(report)  # the other leaves are not skipped
        if not step.in_place:
            leaves = [
                leaf if old is None else new
                for leaf, old, new in zip(leaves, chosen, flatten(clipped)[0], strict=True)
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
    for inner in (
        rule.rules if isinstance(rule, Chain) else [rule.rule] if isinstance(rule, Masked) else ()
    ):
        yield from walk_rules(inner)


def rules_with_norms(rule: Any) -> list[Rule]:
    """Return the rules that measure norms: a rule, and those inside of it, of chains and masks."""
    return [one for one in walk_rules(rule) if isinstance(one, Rule)]


def _truth(answer: Any) -> bool:
    check("what where(path, leaf) returns", answer, not holds_arrays(answer), "True or False")
    return bool(answer)


# Rules made of functions of one gradient array.


class EachArray(BaseRule):
    """A rule without norm and memory; its reports are empty."""

    stateful = False

    def init(self, grads: Any) -> NoState:  # noqa: ARG002 - every rule has it
        """Return the empty state."""
        return NoState()

    def _run(self, grads: Any, state: Any, step: Step) -> tuple[Any, Any, Report]:
        """Replace each gradient array, or the stored values of a sparse one,
        repeated entries summed.
        """
        given = open_tree(grads, in_place=step.in_place, whole=True)
        backend, arrays, changes = given.backend, list(given.arrays), {}
        made: dict[str, Any] = {}
        with backend.computation_context(given.first):
            again = given.find_repeated()[1] if step.in_place else set()
            numbers = [number for number in given.leaf_info.present if number not in again]
            for number in given.wrapped:
                if given.is_sparse(number):
                    _with_place(given.place, number, self._raise_if_rows, arrays[number])
            new = self._change_all(given, [arrays[number] for number in numbers])
            if new is not None:
                if step.in_place:
                    given.write(numbers)
                    return given.spec.unflatten(given.leaves), state, Report()
                return given.close(fill_places(arrays, new)), state, Report()
            for number in given.leaf_info.present:
                changes[number] = _with_place(
                    given.place, number, self._change, given, arrays[number], made
                )
            if step.in_place:
                for number in numbers:
                    _with_place(
                        given.place, number, backend.write, arrays[number], *changes[number]
                    )
                given.write(numbers)
                return given.spec.unflatten(given.leaves), state, Report()
            for number, (function, *operands) in changes.items():
                arrays[number] = _with_place(
                    given.place, number, function, arrays[number], *operands
                )
            return given.close(arrays), state, Report()

    def _change_all(self, given: OpenedTree, arrays: list[Any]) -> list[Any] | None:  # noqa: ARG002
        """Return the changed arrays where a library changes many at once, else ``None``."""
        return None

    def _change(self, given: OpenedTree, array: Any, made: dict[str, Any]) -> tuple[Any, ...]:
        """Return an elementwise function of the array and of operands that broadcast against it,
        and these operands.

        What is ``made`` for one array can be kept there for those like it.
        """
        raise NotImplementedError

    def _raise_if_rows(self, array: Any) -> None:
        """Refuse the array that a sparse leaf stores,
        if there is something for each of its rows.
        """


@dataclass(frozen=True, repr=False)
class Function(EachArray):
    """A function of one gradient array as a rule."""

    function: Callable[[Any], Array]

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the function."""
        return show(self.function)

    def _change(self, given: OpenedTree, array: Any, made: dict[str, Any]) -> tuple[Any, ...]:  # noqa: ARG002
        """Call the function, and return how to put the result in the place of the array."""
        result, xp = self.function(array), given.backend.xp
        if backend_of(result) is not given.backend or not same_shape(result.shape, array.shape):
            hint = f"; call {summarize(self.function)} first" if hasattr(result, "update") else ""
            msg = (
                "the function must return an array like the one it got, but it returned "
                f"{describe(result)}{hint}"
            )
            raise TypeError(msg)
        leaf_info = (
            "complex floating",
            "real floating",
        )  # a kind holds those after it, and integers
        wide, narrow = ([xp.isdtype(a.dtype, kind) for kind in leaf_info] for a in (result, array))
        if given.in_place and wide > narrow:
            msg = (
                f"an array of {array.dtype} cannot hold the result, which is {describe(result)}; "
                "use uc.clip"
            )
            raise TypeError(msg)
        return lambda _, new: new, result


@dataclass(frozen=True, repr=False)
class ByValue(EachArray):
    """Clip each entry into ``[min, max]`` by ``xp.clip``: the one preset that measures no norm.

    Parameters
    ----------
    min, max : float or array
        The bounds; arrays broadcast against each leaf. Integer gradients need whole-number bounds.
    """

    min: Number
    max: Number

    def __post_init__(self) -> None:
        """Validate the bounds."""
        wanted = "a number or an array of real numbers (math.inf or -math.inf for no bound)"
        set_frozen_fields(
            self, min=real("min", self.min, wanted), max=real("max", self.max, wanted)
        )
        if isinstance(self.min, Real) and isinstance(self.max, Real) and not self.min <= self.max:
            raise ValueError(self._wrong_way())

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule."""
        return f"uc.by_value({show(self.min)}, {show(self.max)})"

    def _raise_if_rows(self, array: Any) -> None:
        """Refuse bounds for each row or entry, since at each step others are stored."""
        for bound in (self.min, self.max):
            shape: Any = getattr(bound, "shape", ())
            if math.prod(shape) != 1 and (
                len(array.shape) == 1 or (len(shape) >= len(array.shape) and shape[0] != 1)
            ):
                msg = (
                    f"it is sparse: {summarize(self)} has bounds for each "
                    f"{'entry' if len(array.shape) == 1 else 'row'}, and at each step others are "
                    "stored; make the gradient dense, or give bounds for whole leaves"
                )
                raise TypeError(msg)

    def _wrong_way(self) -> str:
        return (
            f"min must not be above max, and neither NaN: got min={summarize(self.min)}, "
            f"max={summarize(self.max)}"
        )

    def _change_all(self, given: OpenedTree, arrays: list[Any]) -> list[Any] | None:
        """Clip many at once, if the bounds are numbers."""
        low, high = self.min, self.max
        if not (isinstance(low, Real) and isinstance(high, Real) and arrays):
            return None
        return given.backend.bound(arrays, float(low), float(high), in_place=given.in_place)

    def _change(self, given: OpenedTree, array: Any, made: dict[str, Any]) -> tuple[Any, ...]:
        """Return the function that clips, and the bounds in the dtype of the array."""
        backend, xp = given.backend, given.backend.xp
        if xp.isdtype(array.dtype, "complex floating"):
            msg = (
                f"complex numbers have no order to clip by value in, got {array.dtype}; clip by "
                "norm instead"
            )
            raise TypeError(msg)
        if str(array.dtype) not in made:
            made[str(array.dtype)] = self._bounds(xp, array.dtype)
        low, high = made[str(array.dtype)]
        for name, bound in (("min", low), ("max", high)):
            if not broadcasts(bound.shape, array.shape):
                msg = (
                    f"{name} of shape {tuple(bound.shape)} does not fit an array of shape "
                    f"{tuple(array.shape)}"
                )
                raise ValueError(msg)
        if not known_ordered(backend, low, high):
            raise ValueError(self._wrong_way())
        moved = [backend.to_device_of(array, bound) for bound in (low, high)]
        if type(moved[0]) is type(low):  # not copies on all devices of a distributed array
            made[str(array.dtype)] = moved  # for other arrays of this device
        low, high = moved
        return lambda x, low, high: cast(xp, xp.clip(x, low, high), x.dtype), low, high

    def _bounds(self, xp: Any, dtype: Any) -> list[Any]:
        """Return the bounds in the dtype of arrays."""
        bounds = [self.min, self.max]
        if xp.isdtype(dtype, "integral"):
            bounds = [_whole(xp, bound, xp.iinfo(dtype)) for bound in bounds]
        return [xp.asarray(bound, dtype=dtype) for bound in bounds]


def _with_place(
    where: Callable[[int], str], number: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call a function, and add the place of the leaf to its errors."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        if type(error) not in {TypeError, ValueError}:
            raise  # a framework's error class may not take a message
        msg = f"{where(number)}: {error}"
        raise type(error)(msg) from error


def _whole(xp: Any, bound: Any, info: Any) -> Any:
    """Return a bound as an integer in the range of the gradients' dtype."""
    if not isinstance(bound, Real):
        if "int" not in str(bound.dtype):
            msg = f"integer gradients need whole bounds, got an array of {bound.dtype}"
            raise TypeError(msg)
        bound = xp.asarray(bound)
        held = xp.iinfo(bound.dtype)
        return xp.clip(bound, max(info.min, held.min), min(info.max, held.max))
    inside = max(info.min, min(info.max, bound))
    if not float(inside).is_integer():
        msg = f"integer gradients need whole bounds, got {summarize(bound)}"
        raise TypeError(msg)
    return int(inside)


AnyRule: TypeAlias = BaseRule | Callable[[Any], Array]
"""A rule, or a function of one gradient array.

A preset that was not called is a function, but returns no array.
"""


def as_rule(rule: AnyRule) -> BaseRule:
    """Return a rule as it is, a function of one gradient array as a rule."""
    known: Any = rule
    if hasattr(known, "stateful") and hasattr(known, "update") and not isinstance(known, type):
        return known
    home = home_of(known)
    if callable(rule) and not isinstance(rule, type) and not home.startswith("uniclip."):
        return Function(rule)
    advice, hint = "such as uc.by_global_norm(1.0), or a function of one array", ""
    if home.startswith(("uniclip.compose", "uniclip.presets", "uniclip.rule")):
        advice = (
            f"and uc.{known.__name__} makes one: call it, uc.{known.__name__}(...), as in "
            "uc.by_global_norm(1.0)"
        )
    elif holds_arrays(known):
        hint = "; gradients are clipped by uc.clip(grads, rule), or by uc.Clipper(rule)(grads)"
    msg = f"rule must be a rule, {advice}, got {summarize(known)}{hint}"
    raise TypeError(msg)
