# SPDX-License-Identifier: MIT
"""One step of a rule: measure the norms, ask the limit, compute the factors; then multiply."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree

from uniclip._errors import refuse_in_step, short
from uniclip._types import Step
from uniclip.ask import factors_of, limits_of
from uniclip.backends import DEFAULT, MET, backend_of
from uniclip.backends.base import HOST, LIBRARY, NUMPY, TRACED, Backend, Lane, cast, numbers_in_lane
from uniclip.choices import Choices
from uniclip.curves import rejects
from uniclip.measure import cleaned, measured
from uniclip.nonfinite import NonFiniteError
from uniclip.params import beside
from uniclip.plan import Measured, Plan, plan_of
from uniclip.processes import Loss, compare, join_of, refuse_kept_axes
from uniclip.report import Late, Made, Raw, Report
from uniclip.tree import NODES, Opened, open_tree, same_memory

__all__ = ["Decision", "LaneDecision", "decide", "decide_generally", "norm_in_lane", "report_in_lane", "state_where"]

_NAMED = 5
"""The number of leaves named in an error."""


class Decision(NamedTuple):
    """What a step comes to before anything is multiplied."""

    rule: Choices
    given: Opened
    plan: Plan
    raw: Raw
    """The norms, limits and factors of each block."""
    state: Any

    def clipped(self) -> Any:
        """Return the clipped gradients, like those given."""
        given, plan = self.given, self.plan
        numbers, by = plan.by_leaf(given, self.raw.factors)
        backend, arrays, zero = given.backend, list(given.arrays), self.rule.nonfinite in {"skip", "zero"}
        if given.in_place:
            with backend.quiet(given.first):
                write_products(given, numbers, by, zero=zero)
            return given.spec.unflatten(given.leaves)
        if not numbers:
            return given.closed(arrays)

        def change() -> list[Any]:
            return backend.scaled([given.arrays[n] for n in numbers], by, in_place=False, zero=zero)

        with backend.quiet(given.first):
            one = plan.one_norm and not plan.math.host
            new = backend.unless_one(by[0], [given.arrays[n] for n in numbers], change) if one else change()
            for number, array in zip(numbers, new, strict=True):
                arrays[number] = array
            return given.closed(arrays)

    def summed(self) -> Any:
        """Return the sum of the clipped gradients along their first axis."""
        given, plan, backend = self.given, self.plan, self.given.backend
        _refuse_summed(given, plan)
        xp, zero = backend.xp, self.rule.nonfinite in {"skip", "zero"}
        with backend.quiet(given.first):
            factors = [plan.math.to_library(some) for some in self.raw.factors]
            leaves: list[Any] = [None] * len(given.leaves)
            for number in given.kinds.present:
                block, row = plan.places[number]
                array, leaf = given.arrays[number], given.leaves[number]
                factor = plan.factor(given, factors[block][row, ...], number)
                wide = cast(xp, array, xp.result_type(array.dtype, xp.float32))
                [product] = backend.scaled([wide], [factor], in_place=False, zero=zero)
                total = xp.sum(product, axis=0)
                whole = xp.isdtype(leaf.dtype, "integral")
                total = cast(xp, total, array.dtype if whole else leaf.dtype)
                part = given.part(number)
                leaves[number] = total if part is None else part.summed(leaf, total)
            return given.spec.unflatten(leaves)

    def norms(self) -> Any:
        """Return the norms of the report."""
        return self.plan.arranged([self.plan.math.to_library(some) for some in self.raw.norms])

    def report(self) -> Report:
        """Return the report, with its fields in traced code, else arranged on first access."""
        if self.plan.math.mode == TRACED:
            return Made(*[self.raw.field(name) for name in Made._fields])
        return Late(self.raw)


def write_products(given: Opened, numbers: list[int], by: list[Any], *, zero: bool) -> None:
    """Multiply arrays in place, each memory once; entries that were made 0 are written, too."""
    backend, factors = given.backend, dict(zip(numbers, by, strict=True))
    arrays = [given.odd[n].array if n in given.odd else leaf for n, leaf in enumerate(given.leaves)]
    zeroed = [n for n in given.kinds.present if arrays[n] is not given.arrays[n]]
    if not (factors or zeroed):
        return
    later = same_memory(backend, given.leaves, given.place)
    again = later and later - given.later_copies(later)
    for number, odd in given.odd.items():
        if number in factors and number not in later and number not in zeroed and odd.view is not None:
            alike = math.prod(getattr(factors[number], "shape", ())) == 1
            arrays[number] = odd.view if alike else arrays[number]
    for number in zeroed:
        if number not in again:
            backend.write(arrays[number], lambda _, new: new, given.arrays[number])
    pairs = [(arrays[n], factor) for n, factor in factors.items() if n not in again]
    if pairs:
        backend.scaled([array for array, _ in pairs], [factor for _, factor in pairs], in_place=True, zero=zero)
    changed = {*factors, *zeroed} - again
    given.write([n for n, odd in given.odd.items() if arrays[n] is odd.array and n in changed])


class LaneDecision(NamedTuple):
    """What a step came to in the lane of a backend, where all is done already."""

    rule: Choices
    backend: Backend
    close: Callable[[list[Any]], Any]
    """Makes a tree like the one that was opened."""
    lane: Lane
    state: Any

    def clipped(self) -> Any:
        """Return the clipped gradients, like those given."""
        return self.close(self.lane.leaves)

    def norms(self) -> Any:
        """Return the norm."""
        return norm_in_lane(self.backend, self.lane)

    def report(self) -> Report:
        """Return the report, which holds no gradient."""
        return report_in_lane(self.rule, self.backend, self.lane)


def norm_in_lane(backend: Backend, lane: Lane) -> Any:
    """Return the norm as an array of the library, 0-d and float32."""
    read = isinstance(lane.norm, float)
    return backend.from_host(np.array(lane.norm, np.float32), lane.device) if read else lane.norm


def report_in_lane(rule: Choices, backend: Backend, lane: Lane) -> Report:
    """Return the report of a step in the lane of a backend, which is arranged on first access."""
    numbers = lane._replace(leaves=[])  # it holds no gradient

    def make() -> Raw:
        norm, read = norm_in_lane(backend, numbers), isinstance(numbers.norm, float)
        plan = plan_of(rule, open_tree(norm), HOST if read else LIBRARY)  # of one norm, whatever the leaves
        if read:
            return Raw(plan, *[[np.array([number], np.float32)] for number in numbers[:3]])
        norms, factors = (backend.xp.reshape(value, (1,)) for value in (norm, numbers.factor))
        return Raw(plan, [norms], [numbers.limit], [factors])

    return Late(make)


def decide(
    rule: Choices,
    grads: Any,
    state: Any,
    step: Step = Step(),  # noqa: B008 - it never changes
    max_norm: Any = None,
) -> Decision | LaneDecision:
    """Ask the lane of a backend, which takes what nearly every call is; go the general way for all else.

    In the lane the leaves are clipped when this returns; else when the decision is asked for them.

    Parameters
    ----------
    rule : Rule
    grads : tree
    state : tree of arrays
    step : Step
    max_norm : float or 0-d array, optional
        A constant limit in the place of the rule's.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `uniclip.clip`.
    """
    limit = rule.constant if max_norm is None else max_norm
    alone = all([one is None for one in (step.params, step.all_reduce, step.loss, step.norm, step.shared)])
    takes_lane = rule.simple and alone and type(limit) in {float, int}
    if takes_lane:
        leaves, spec = optree.tree_flatten(grads, none_is_leaf=True, namespace=NODES)
        first = next((leaf for leaf in leaves if leaf is not None), None)
        backend = None if first is None else MET.get(type(first)) or backend_of(first)
        lane = None if backend is None else backend.lane(leaves, limit, in_place=step.in_place)
        if backend is not None and lane is not None:
            return LaneDecision(rule, backend, spec.unflatten, lane, state)
    given = open_tree(grads, in_place=step.in_place)
    if takes_lane and given.odd and not given.parts:
        lane = lane_of_arrays(given, limit)
        if lane is not None:
            return LaneDecision(rule, given.backend, given.spec.unflatten, lane, state)
    return decide_generally(rule, given, state, step, limit)


def lane_of_arrays(given: Opened, limit: float) -> Lane | None:
    """Return what the lane comes to beside odd leaves; ``None`` if it takes more."""
    with given.backend.quiet(given.first):
        lane = given.backend.lane(given.arrays, math.inf if given.in_place else limit, in_place=False)
        if lane is None or not given.in_place:
            return lane and lane._replace(leaves=given.restored(lane.leaves))
        numbers = numbers_in_lane(lane.norm, limit)
        if numbers is None:
            return None
        norm, limit, factor = numbers
        if factor != 1:
            present = list(given.kinds.present)
            write_products(given, present, [factor] * len(present), zero=False)
        return Lane(norm, limit, factor, given.leaves, given.kinds.device)


def decide_generally(rule: Choices, given: Opened, state: Any, step: Step, constant: Any) -> Decision:
    """Measure gradients, and compute their factors, under a constant limit if there is one."""
    join, params = None, None
    if step.params is not None or step.all_reduce is not None or step.loss is not None or "params" in rule.limit.needs:
        refuse_in_step(None if isinstance(step.loss, Loss) else step.loss, step.params)
        refuse_kept_axes(rule.scope, step.all_reduce)
        given, params = beside(rule, given, step)
    kinds = given.kinds
    if type(constant) is float and step.norm is None and params is None and not rule.holds_arrays:
        mode = kinds.backend.mode(kinds)
    else:
        values = [constant, step.norm, step.loss, *getattr(rule.limit, "constants", ())]
        trees = [given] if params is None else [given, params]
        mode = _mode_beside(rule, trees, values, state if rule.memory else None)
    if step.all_reduce is not None or step.shared is not None:
        join = join_of(rule.joins, step.all_reduce, step.shared, traced=mode == TRACED)
    plan = plan_of(rule, given, mode, join, params)
    with kinds.backend.quiet(given.first):
        if join is not None and not join.checked and mode != TRACED:
            compare(join, rule, plan)
            plan = plan_of(rule, given, mode, join, params)
        return _decided(rule, given, plan, state, step, params, constant)


def _mode_beside(rule: Choices, trees: list[Opened], values: list[Any], state: Any) -> int:
    """Return the mode of a step on gradients, and parameters, given all that comes in beside them."""
    kinds, backend = [tree.kinds for tree in trees], trees[0].backend
    mode = TRACED if any([one.traced for one in kinds]) else backend.mode(kinds[0], (values, state))
    if mode != HOST:
        return mode
    viewed = values if rule.limits_checked else [*values, *optree.tree_leaves(state)]
    reads = all([one.reads for one in kinds]) and all([_viewable(backend, value) for value in viewed])
    return HOST if reads and not rule.holds_arrays else LIBRARY


def _viewable(backend: Backend, value: Any) -> bool:
    """Whether an argument is a number, or an array that the host reads."""
    if not hasattr(value, "dtype") or isinstance(value, NUMPY):
        return True
    return backend.viewed(backend.xp.asarray(value)) is not None


def _decided(
    rule: Choices, given: Opened, plan: Plan, state: Any, step: Step, params: Opened | None, constant: Any
) -> Decision:
    """Decide on any norms."""
    policy = rule.nonfinite
    found = measured(rule, given, plan, step, params)
    norms, entries_finite = plan.math.as_norms(found.norms), None
    if policy == "zero":
        given, norms, entries_finite = cleaned(rule, given, plan, step, params, found, norms)
    faults = [n - n for n in norms]
    # A limit gets NaN for ∞, since a limit of ∞ would not clip. The derivative stays 1.
    nan_norms = [n + fault for n, fault in zip(norms, faults, strict=True)]
    step_finite = None
    if rule.decides:
        flags = [plan.math.xp.all(plan.math.xp.isfinite(n)) for n in norms]
        [step_finite] = plan.everywhere([plan.math.all(flags if entries_finite is None else [entries_finite, *flags])])
    if policy == "raise":
        _refuse_nonfinite(given, plan, step_finite)
    limits, new, thresholds = limits_of(rule, plan, given, nan_norms, state, found, constant)
    factors = [factors_of(rule, plan, *some, step_finite, constant) for some in zip(norms, limits, faults, strict=True)]
    if rule.memory:  # NaN never enters a state
        new = state_where(step_finite, new, state)
    skipped = _skipped(rule, plan, factors, step_finite, found)
    return Decision(rule, given, plan, Raw(plan, norms, limits, factors, thresholds, entries_finite, skipped), new)


def state_where(flag: Any, yes: Any, no: Any) -> Any:
    """Return the first state where a flag is true, else the second."""
    arrays: list[Any] = optree.tree_leaves(no)
    if not arrays:
        return yes
    backend = backend_of(arrays[0]) or DEFAULT
    if isinstance(flag, (bool, np.bool_, np.ndarray)) or backend.readable(flag):
        return yes if bool(flag) else no
    return optree.tree_map(lambda a, b: backend.xp.where(backend.to_device_of(a, flag), a, b), yes, no)


def _skipped(rule: Choices, plan: Plan, factors: list[Any], step_finite: Any, found: Measured) -> Any:
    """Return whether the whole step is skipped, ``None`` if the rule skips none."""
    xp, skipped = plan.math.xp, None
    if rule.nonfinite == "skip":
        skipped = xp.logical_not(step_finite)
    if rejects(rule.curve):
        every, none = [], []
        for some, block, there in zip(factors, plan.blocks, found.present or [None] * len(factors), strict=True):
            gone, absent = xp.equal(some, xp.zeros_like(some)), plan.absent(block, there)
            none.append(xp.logical_not(xp.any(gone)))  # true also where there is no norm
            if absent is not None:
                gone = gone | xp.reshape(absent, tuple(absent.shape) + (1,) * (len(gone.shape) - 1))
            every.append(xp.all(gone))
        all_gone, none_gone = plan.everywhere([plan.math.all(every), plan.math.all(none)])
        none_left = all_gone & xp.logical_not(none_gone)
        skipped = none_left if skipped is None else skipped | none_left
    return skipped


def _refuse_nonfinite(given: Opened, plan: Plan, finite: Any) -> None:
    """Raise if the gradients are not finite, naming the leaves."""
    if plan.math.backend.traced(finite):
        msg = (
            "nonfinite='raise' has to look at the norm, and code that is being compiled or transformed has no values "
            "to look at: use 'propagate', 'skip' or 'zero' there, and look at report.finite outside"
        )
        raise TypeError(msg)
    if not bool(finite):
        raise NonFiniteError(_explained(given))


def _explained(given: Opened) -> str:
    xp = given.backend.xp
    bad = [given.place(number) for number in given.kinds.present if not bool(xp.all(xp.isfinite(given.arrays[number])))]
    if bad:
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        return f"NaN or ∞ in {', '.join(bad[:_NAMED])}{more}"
    return "the gradients here are finite, but their norm is beyond the range of its dtype, or another device's are not"


def _refuse_summed(given: Opened, plan: Plan) -> None:
    """Refuse norms over all examples, and leaves with different numbers of examples."""
    present = given.kinds.present
    shapes = [tuple(given.leaves[number].shape) for number in present]
    for number, shape in zip(present, shapes, strict=True):
        axes = plan.axes[number]
        if shape and (axes is None or 0 in axes):
            msg = (
                "rule must keep the examples apart, as uc.by_example_norm(1.0) does: its scope, "
                f"{short(plan.scope)}, takes one norm over all of them"
            )
            raise ValueError(msg)
        first = shapes[0]
        if not (first and shape) or (first[0] != shape[0] and None not in {first[0], shape[0]}):
            places = " and ".join(given.place(one) for one in (present[0], number))
            msg = f"leaves need as many examples along the first axis, but {places} have the shapes {[first, shape]}"
            raise ValueError(msg)
