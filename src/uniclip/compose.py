# SPDX-License-Identifier: MIT
"""Rules that combine rules, and rules without norms: clipping by value, your own functions.

A rule that measures norms is in `uniclip.rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import optree

from uniclip._core.containers import Flat, Spec, flatten, flatten_known
from uniclip._core.plan import check_answers_differ, is_new
from uniclip._core.spine import run_spine
from uniclip._core.step import state_where
from uniclip._core.tree import OpenedTree, backend_for, open_tree
from uniclip._errors import (
    check,
    describe,
    holds_arrays,
    module_of,
    real,
    set_frozen_fields,
    summarize,
)
from uniclip._types import Array, DType, Namespace, Number, Path, StepOptions, T, Tensor, Tree
from uniclip.backends import DEFAULT, backend_of
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import broadcasts, from_numpy, known_ordered, same_shape
from uniclip.backends.base import fill_places, take
from uniclip.limits import NoState
from uniclip.report import ChainReport, Report
from uniclip.rule import BaseRule, Rule, take_step


def chain(*rules: AnyRule) -> Chain:
    """Return a rule that runs rules and functions of one gradient array, one after the other.

    Each rule gets the gradients that the one before returned. Where one of them meets gradients
    that are not finite, all states stay as they were; where one skips the step, the states of the
    rules after it do. In place, an error in one rule does not undo the changes of those before it.

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
    """Run rules one after the other; see `chain`."""

    rules: tuple[BaseRule, ...]

    def __post_init__(self) -> None:
        """Find out whether one of the rules is stateful, and whether the spine may run them."""
        on_spine = bool(self.rules)
        for rule in self.rules:
            on_spine = on_spine and type(rule) is Rule and rule.on_spine
        stateful = any([rule.stateful for rule in self.rules])
        set_frozen_fields(self, stateful=stateful, on_spine=on_spine, links=self.rules)

    def __setstate__(self, choices: dict[str, Any]) -> None:
        """Restore from a copy or a pickle."""
        set_frozen_fields(self, **choices)
        self.__post_init__()

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule."""
        return f"uc.chain({', '.join(map(show, self.rules))})"

    def init(self, grads: Tree) -> tuple[Tree, ...]:
        """Return the states of the rules before the first step; see `Rule.init`."""
        return tuple(rule.init(grads) for rule in self.rules)

    def _run(self, grads: Tree, state: Any, step: StepOptions) -> tuple[Tree, Tree, Report]:
        """Run the rules; see `Rule.update`."""
        if self.on_spine:
            leaves, spec = flatten_known(grads)
            taken = run_spine(self, leaves, state, step)
            if taken is not None:
                clipped, decision = taken
                # In place, the caller gets the same tree back, unless it is used up.
                same = step.in_place and not isinstance(grads, Iterator)
                tree = grads if same else spec.unflatten(clipped)
                return tree, decision.state, decision.report()

        old_states: Sequence[Tree] = [NoState()] * len(self.rules)
        if self.stateful:
            fits = isinstance(state, (tuple, list)) and len(state) == len(self.rules)
            check("state", state, fits, f"the tuple of {len(self.rules)} states that init returned")
            old_states = state

        report = ChainReport(())
        new_states: list[Tree] = []
        for rule, old_state in zip(self.rules, old_states, strict=True):
            skipped = report.skipped
            grads, new_state, rule_report = take_step(rule, grads, old_state, step)
            # A rule must not learn from the zeros of a step that a rule before it has skipped.
            if skipped is not None:
                new_state = state_where(skipped, new_state, old_state, expected=False)
            new_states.append(new_state)
            report = ChainReport((*report.rules, rule_report))

        if not self.stateful:
            return grads, state, report
        finite = report.finite
        if finite is None:
            return grads, tuple(new_states), report
        # A non-finite step must change all states or none, or the rules would disagree about it.
        return grads, state_where(finite, tuple(new_states), state), report


@dataclass(frozen=True, repr=False)
class Masked(BaseRule):
    """Clip only some of the leaves; see `masked`."""

    rule: BaseRule
    where: Callable[[Path, Any], bool]
    answers_checked: ClassVar[list[bool]]
    """Not empty once `check_answers_differ` has accepted what ``where`` returns for a tree."""

    def __post_init__(self) -> None:
        """Validate ``where``."""
        check("where", self.where, callable(self.where), "a function of (path, leaf)")
        set_frozen_fields(self, answers_checked=[])

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule, if the function has a name."""
        return f"uc.masked({show(self.rule)}, {show(self.where)})"

    @property
    def stateful(self) -> bool:
        """Whether the masked rule is stateful."""
        return bool(self.rule.stateful)

    def init(self, grads: Tree) -> Tree:
        """Return the rule's state before the first step; see `Rule.init`."""
        leaves, spec = flatten(grads)
        chosen = self.choose_leaves(leaves, spec)
        state = self.rule.init(spec.unflatten(chosen))

        present = [leaf for leaf in leaves if leaf is not None]
        if not present or any([leaf is not None for leaf in chosen]):
            return state

        # All chosen leaves are absent, so the rule saw no framework, and its state is NumPy's.
        backend = backend_for(leaves, "params", spec)
        return optree.tree_map(lambda array: from_numpy(backend, array, present[0]), state)

    def _run(self, grads: Tree, state: Any, step: StepOptions) -> tuple[Tree, Any, Report]:
        """Run the rule on the chosen leaves; see `Rule.update`."""
        leaves, spec = flatten(grads)
        chosen = self.choose_leaves(leaves, spec)
        # Other processes may have the other leaves, so only a complete tree is judged.
        alone = step.single_process and not any([leaf is None for leaf in leaves])
        if alone and is_new(self):
            with (backend_of(next(iter(leaves), None)) or DEFAULT).computation_context():
                answers = [leaf is not None for leaf in chosen]
                check_answers_differ(
                    "masked(rule, where)", self.where, spec.paths(), leaves, answers
                )
            self.answers_checked.append(True)
        # With several processes a step without leaves takes part, too, or the others would wait.
        if all([leaf is None for leaf in chosen]) and step.single_process:
            return spec.unflatten(leaves), state, Report()

        clipped, state, report = take_step(self.rule, Flat(chosen, spec), state, step)
        # The other leaves are not skipped, so an optimizer must take its step.
        report = report.without_skip()
        if step.in_place:
            return spec.unflatten(leaves), state, report

        merged = list(leaves)
        clipped_leaves = flatten(clipped).leaves
        for number, (old, new) in enumerate(zip(chosen, clipped_leaves, strict=True)):
            if old is not None:
                merged[number] = new
        return spec.unflatten(merged), state, report

    def choose_leaves(self, leaves: list[Any], spec: Spec) -> list[Any]:
        """Return the leaves that are chosen, with ``None`` in the places of the others."""
        chosen: list[Any] = [None] * len(leaves)
        for number, path in enumerate(spec.paths()):
            leaf = leaves[number]
            if leaf is not None and _as_bool(self.where(path, leaf)):
                chosen[number] = leaf
        return chosen


def walk_rules(rule: BaseRule) -> Iterator[BaseRule]:
    """Yield a rule, and the rules inside of chains and masks."""
    yield rule
    if isinstance(rule, Chain):
        for inner in rule.rules:
            yield from walk_rules(inner)
    if isinstance(rule, Masked):
        yield from walk_rules(rule.rule)


def rules_with_norms(rule: BaseRule) -> list[Rule]:
    """Return the rules that measure norms: a rule, and the rules inside of chains and masks."""
    return [inner for inner in walk_rules(rule) if isinstance(inner, Rule)]


def _as_bool(chosen: object) -> bool:
    """Return whether ``where`` chose a leaf."""
    # A comparison with the leaf itself gives an array of booleans, not one answer.
    is_bool = not holds_arrays(chosen)
    check("the result of where(path, leaf)", chosen, is_bool, "True or False")
    return bool(chosen)


# Rules made of functions of one gradient array.

Change: TypeAlias = tuple[Callable[..., Tensor], list[Tensor]]
"""An elementwise function of an array and of operands that broadcast against it; the operands."""


class EachArray(BaseRule):
    """A rule of a function of one array, without norm and state; its reports are empty."""

    stateful = False

    def init(self, grads: Tree) -> NoState:  # noqa: ARG002 - every rule has it
        """Return the empty state."""
        return NoState()

    def _run(self, grads: Tree, state: Any, step: StepOptions) -> tuple[Tree, Any, Report]:
        """Replace each gradient array, or the stored values of a sparse one,
        elements at a repeated index summed.
        """
        opened = open_tree(grads, in_place=step.in_place, as_given=True)
        with opened.backend.computation_context(opened.first):
            # An array that is written in place through two leaves must change only once.
            repeated: set[int] = set()
            if step.in_place:
                repeated = opened.find_repeated()[1]
            numbers = [number for number in opened.leaf_info.present if number not in repeated]

            # All leaves are checked before the first write, so an error changes no gradient.
            for number in opened.wrapped:
                if opened.is_sparse(number):
                    array = opened.arrays[number]
                    _naming_leaf(opened.expression, number, self._raise_if_rows, array)

            changed = self._change_all(opened, take(opened.arrays, numbers))
            if changed is None:
                return self._change_each(opened, numbers), state, Report()
            if not step.in_place:
                return opened.close(fill_places(opened.arrays, changed)), state, Report()
            opened.write(numbers)
            return opened.spec.unflatten(opened.leaves), state, Report()

    def _change_each(self, opened: OpenedTree, numbers: list[int]) -> Tree:
        """Change the arrays one by one, and return the tree."""
        # All functions are found before the first array is written: an error in a later leaf must
        # not leave earlier ones changed.
        arrays = list(opened.arrays)
        changes: dict[int, Change] = {}
        cache: dict[DType, Any] = {}
        for number in opened.leaf_info.present:
            changes[number] = _naming_leaf(
                opened.expression, number, self._change, opened, arrays[number], cache
            )

        if opened.in_place:
            write = opened.backend.write
            for number in numbers:
                function, operands = changes[number]
                _naming_leaf(opened.expression, number, write, arrays[number], function, *operands)
            opened.write(numbers)
            return opened.spec.unflatten(opened.leaves)

        for number, (function, operands) in changes.items():
            arrays[number] = _naming_leaf(
                opened.expression, number, function, arrays[number], *operands
            )
        return opened.close(arrays)

    def _change_all(self, opened: OpenedTree, arrays: list[Any]) -> list[Any] | None:  # noqa: ARG002
        """Return the changed arrays if a library changes many at once, else ``None``."""
        return None

    def _change(self, opened: OpenedTree, array: Tensor, cache: dict[DType, Any]) -> Change:
        """Return how to change an array; ``cache`` is shared by all arrays of a step."""
        raise NotImplementedError

    def _raise_if_rows(self, array: Tensor) -> None:
        """Raise if there is an operand for each row of the array that a sparse leaf stores."""


@dataclass(frozen=True, repr=False)
class Function(EachArray):
    """A rule of your own function of one gradient array."""

    function: Callable[[Any], Array]

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the function as source text."""
        return show(self.function)

    def _change(
        self,
        opened: OpenedTree,
        array: Tensor,
        cache: dict[DType, Any],  # noqa: ARG002 - each result is computed for its own array
    ) -> Change:
        """Call the function, and return how to put the result in the place of the array."""
        result: Any = self.function(array)
        if backend_of(result) is not opened.backend or not same_shape(result.shape, array.shape):
            msg = (
                "the function must return an array like its argument, but it returned "
                f"{describe(result)}"
            )
            # A function that makes rules was passed in the place of a rule.
            if hasattr(result, "update"):
                msg += f"; call {summarize(self.function)} first"
            raise TypeError(msg)

        # A write in place would drop imaginary or fractional parts without an error.
        rank = partial(_rank_of_dtype, opened.backend.xp)
        if opened.in_place and rank(result.dtype) > rank(array.dtype):
            msg = (
                f"an array of {array.dtype} can't hold the result, {describe(result)}; use "
                "uc.clip, which returns new arrays"
            )
            raise TypeError(msg)
        return lambda _, new: new, [result]


def _rank_of_dtype(xp: Namespace, dtype: DType) -> int:
    """Return the rank of a dtype, which can hold the values of dtypes of lower ranks."""
    if xp.isdtype(dtype, "complex floating"):
        return 2
    if xp.isdtype(dtype, "real floating"):
        return 1
    return 0


@dataclass(frozen=True, repr=False)
class ByValue(EachArray):
    """Clip each element into ``[min, max]`` by ``xp.clip``: the one preset that measures no norm.

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
        low = real("min", self.min, wanted)
        high = real("max", self.max, wanted)
        set_frozen_fields(self, min=low, max=high)

        # Arrays are compared at each step: they may be values of compiled code.
        if isinstance(self.min, Real) and isinstance(self.max, Real) and not self.min <= self.max:
            raise ValueError(self._describe_order())

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal rule."""
        return f"uc.by_value({show(self.min)}, {show(self.max)})"

    def _raise_if_rows(self, array: Tensor) -> None:
        """Raise if there are bounds for each row or element: others are stored at each step."""
        part = "row"
        if len(array.shape) == 1:
            part = "entry"

        for bound in (self.min, self.max):
            shape = tuple(getattr(bound, "shape", ()))
            if math.prod(shape) == 1:
                continue
            if part == "entry" or (len(shape) >= len(array.shape) and shape[0] != 1):
                msg = (
                    f"it is sparse, but {summarize(self)} has bounds for each {part}, and the "
                    "stored ones differ from step to step; make the gradient dense, or use bounds "
                    "for whole leaves"
                )
                raise TypeError(msg)

    def _describe_order(self) -> str:
        """Return the error that the bounds are not in order."""
        return (
            f"min must be at most max, and neither may be NaN, got min={summarize(self.min)}, "
            f"max={summarize(self.max)}"
        )

    def _change_all(self, opened: OpenedTree, arrays: list[Any]) -> list[Any] | None:
        """Clip many arrays at once, if the bounds are numbers."""
        low, high = self.min, self.max
        # Batched kernels take one pair of numbers, so bounds that are arrays go leaf by leaf.
        if not (isinstance(low, Real) and isinstance(high, Real) and arrays):
            return None
        return opened.backend.bound(arrays, float(low), float(high), in_place=opened.in_place)

    def _change(self, opened: OpenedTree, array: Tensor, cache: dict[DType, Any]) -> Change:
        """Return the function that clips, and the bounds in the dtype of the array."""
        backend = opened.backend
        xp = backend.xp
        if xp.isdtype(array.dtype, "complex floating"):
            msg = f"{array.dtype} numbers can't be clipped by value; clip by norm instead"
            raise TypeError(msg)

        # By name, since the standard does not promise that a dtype can be hashed.
        dtype = str(array.dtype)
        if dtype not in cache:
            cache[dtype] = self._bounds(xp, array.dtype)
        low, high = cache[dtype]

        for name, bound in (("min", low), ("max", high)):
            if not broadcasts(bound.shape, array.shape):
                msg = (
                    f"{name} of shape {tuple(bound.shape)} doesn't broadcast against an array of "
                    f"shape {tuple(array.shape)}"
                )
                raise ValueError(msg)
        if not known_ordered(backend, low, high):
            raise ValueError(self._describe_order())

        moved = [backend.to_device_of(array, bound) for bound in (low, high)]
        # Other arrays of this device use the same copies, unless these are on all devices of a
        # distributed array.
        if type(moved[0]) is type(low):
            cache[dtype] = moved
        return lambda x, low, high: cast(xp, xp.clip(x, low, high), x.dtype), moved

    def _bounds(self, xp: Namespace, dtype: DType) -> list[Tensor]:
        """Return the bounds in the dtype of arrays."""
        bounds: list[Any] = [self.min, self.max]
        if xp.isdtype(dtype, "integral"):
            bounds = [_integer_bound(xp, bound, xp.iinfo(dtype)) for bound in bounds]
        return [xp.asarray(bound, dtype=dtype) for bound in bounds]


def _naming_leaf(
    where: Callable[[int], str], number: int, function: Callable[..., T], *arguments: Any
) -> T:
    """Call a function, and name the leaf in its errors."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        # The class of a framework's error may not take a message.
        if type(error) not in {TypeError, ValueError}:
            raise
        msg = f"{where(number)}: {error}"
        raise type(error)(msg) from error


def _integer_bound(xp: Namespace, bound: Any, limits: Any) -> int | Tensor:
    """Return a bound as an integer within the limits of the gradients' dtype."""
    if not isinstance(bound, Real):
        if "int" not in str(bound.dtype):
            msg = f"integer gradients need whole bounds, got an array of {bound.dtype}"
            raise TypeError(msg)

        # Limits that the dtype of the bound itself cannot hold would wrap around.
        bound = xp.asarray(bound)
        bound_limits = xp.iinfo(bound.dtype)
        low = max(limits.min, bound_limits.min)
        high = min(limits.max, bound_limits.max)
        return xp.clip(bound, low, high)

    # A bound beyond these limits, such as an infinity, bounds nothing.
    inside = max(limits.min, min(limits.max, bound))
    if not float(inside).is_integer():
        msg = f"integer gradients need whole bounds, got {summarize(bound)}"
        raise TypeError(msg)
    return int(inside)


AnyRule: TypeAlias = BaseRule | Callable[[Any], Array]
"""A rule, or a function of one gradient array.

A preset that was not called is a function, but does not return an array.
"""


def as_rule(rule: AnyRule) -> BaseRule:
    """Return a rule as it is, a function of one gradient array as a rule."""
    argument: Any = rule
    # Your own class of rules need not be a subclass of uniclip's.
    is_rule = hasattr(argument, "stateful") and hasattr(argument, "update")
    if is_rule and not isinstance(argument, type):
        return argument

    module = module_of(argument)
    if callable(rule) and not isinstance(rule, type) and not module.startswith("uniclip."):
        return Function(rule)

    if module.startswith(("uniclip.compose", "uniclip.presets", "uniclip.rule")):
        msg = (
            f"expected a rule, got {summarize(argument)}; call it to create a rule, as in "
            "uc.by_global_norm(1.0)"
        )
        raise TypeError(msg)

    msg = (
        "rule must be a rule, such as uc.by_global_norm(1.0), or a function of one array, got "
        f"{summarize(argument)}"
    )
    if holds_arrays(argument):
        msg += "; to clip gradients, call uc.clip(grads, rule) or uc.Clipper(rule)(grads)"
    raise TypeError(msg)
