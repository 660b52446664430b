# SPDX-License-Identifier: MIT
"""The spine: one step of a rule, or of a chain of rules, with one Euclidean norm over dense leaves.

Most steps are of this kind. A backend measures the norm in one call, the limit and the curve are
asked for a single number, and a backend multiplies in one call. A chain measures once: the norm
after a rule is its norm times its factor. `uniclip.clip`, clippers, PyTorch's functions and
attached optimizers all call `run_spine`. If it returns ``None``, with nothing written and no state
changed, they take the general path, in `uniclip._core.step`, which handles rare cases (norms that
are not finite or out of range, several processes) and raises nearly all errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.apply import Apply, StepResult, scale_leaves
from uniclip._core.collectives import Loss, loss_sums, shard_rows
from uniclip._core.measure import Measured, StepInputs, convert_loss, mark_nonfinite, reduced_loss
from uniclip._core.norm_space import NormSpace
from uniclip._core.plan import PLAN_CACHE_SIZE, Plan, plan_for, plan_of_one_norm
from uniclip._core.step import decide, raise_if_nonfinite, run_general_step, state_where
from uniclip._core.tree import flatten_known, open_leaves
from uniclip._errors import check_step_arguments
from uniclip._types import Step, Tree
from uniclip.backends import BACKEND_CACHE, DEFAULT, backend_of
from uniclip.backends.base import (
    FLOAT32_MAX,
    HOST,
    LARGEST,
    LEAST,
    LIBRARY,
    NUMPY,
    LeafInfo,
    NormPlace,
    OneNorm,
    Products,
    Shards,
    Terms,
    cast,
    fill_places,
    rounded_norm,
)
from uniclip.curves import RejectAbove, hard, never_amplifies, reject, rejects
from uniclip.limits import Context
from uniclip.report import ChainReport, LazyReport, Report, StepValues

if TYPE_CHECKING:
    from uniclip.rule import Choices

_NUMBERS = {float, int}
_LARGEST_FACTOR = 6e4
"""Float16 overflows above 65,504: the general path rounds larger factors."""
_ONE_ROW = {(), (1,)}
"""The first length of arrays in a state of one norm, or no length."""
_UNREAD = {"propagate", "skip"}
"""The policies for which the host need not read the norm."""


class Decision(NamedTuple):
    """The factor of a step, its report, and the next state, as a rule or a chain decides them."""

    place: NormPlace
    norm: Any
    """The norm: a float if the host reads it; else the pair of `OneNorm`, or the 0-d array of
    `Backend.clip_at_once`. Of a chain, the norm after the last rule.
    """
    factor: Any
    """A number that is not rounded yet; or an array with one element, or 0-d."""
    skipped: Any
    """Whether the step is skipped: true or false, or an array where the host does not read it."""
    state: Any
    """The next state."""
    values: Any
    """`StepValues`, or a function that returns them; of a chain, a list of these."""

    def arranged_norms(self) -> Any:
        """Return the norm as a 0-d array of the library."""
        backend, device, dtype = self.place
        if type(self.norm) is float:
            return backend.from_host(np.asarray(self.norm, dtype), device)
        return self.norm[0].reshape(()) if isinstance(self.norm, tuple) else self.norm

    def report(self) -> Report:
        """Return the report. It holds no gradient, and makes its arrays on first access."""
        if type(self.values) is list:
            return ChainReport(tuple(map(LazyReport, self.values)))
        return LazyReport(self.values)


def run_step(  # noqa: PLR0913 - a step has as many parts
    rule: Choices,
    grads: Tree,
    state: Any,
    step: Step = Step(),  # noqa: B008 - it never changes
    max_norm: Any = None,
    *,
    apply: Apply | None = scale_leaves,
) -> StepResult:
    """Take one step of a rule, on the spine if it applies, else on the general path.

    Parameters
    ----------
    rule : Rule
    grads : tree
    state : tree of arrays
    step : Step
    max_norm : float or 0-d array, optional
        A constant limit in place of the rule's.
    apply : function, optional
        The default, or ``None`` to only measure, with a ``max_norm`` of ∞.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `uniclip.clip`.
    """
    flat = flatten_known(grads)
    spec = flat[1]
    taken = run_spine(rule, flat, state, step, max_norm)
    if taken is not None:
        clipped, decision = taken
        return StepResult(clipped, spec.unflatten, decision, decision.state)

    tree = open_leaves(flat, in_place=step.in_place)
    limit = rule.constant if max_norm is None else max_norm
    return run_general_step(StepInputs(rule, [tree], step, state, limit), apply)


def run_spine(  # noqa: PLR0911 - one for each thing that may not apply
    rule: Any, flat: tuple[list[Any], Any], state: Any, step: Step, limit: Any = None
) -> tuple[list[Any], Decision] | None:
    """Take a step on the spine, given the leaves and the structure of a tree: return the clipped
    leaves, and what was decided.

    ``None``, with nothing changed, if the spine does not apply. Leaves are not even validated,
    since a backend measures only arrays that it knows. The structure is ``None`` if no leaf is
    distributed. A ``limit`` is a constant in place of the rule's.
    """
    if not rule.on_spine or (state is None and rule.stateful):
        return None
    leaves = flat[0]
    measured = _measure(rule, leaves, step)
    if measured is None:
        return _run_on_shards(rule, flat, state, step, limit)

    # The host reads no norm on an accelerator.
    if measured.norm is None:
        if not _runs_unread(rule, limit):
            return None
        at_once = _clip_at_once(rule, measured, leaves, step, limit)
        if at_once is not None:
            clipped, decision = at_once
            return clipped, decision._replace(state=state)
        measured = measured._replace(norm=_norms_on_device(measured))

    decide_all = _decide_chain if rule.links else _decide
    decided = decide_all(rule, measured, state, limit)
    if decided is None:
        return None
    # Most steps are within the limit.
    if type(decided.factor) is float and decided.factor == 1:
        return leaves, decided
    scaled = _scale(rule, measured, decided.factor, in_place=step.in_place)
    if scaled is None:
        return None
    return leaves if step.in_place else fill_places(leaves, scaled), decided


def _measure(rule: Any, leaves: list[Any], step: Step) -> OneNorm | None:
    """Return the norm of leaves, with the loss of the step beside it if the rule uses one."""
    # Only the general path validates and uses these arguments.
    if step.params is not None or step.all_reduce is not None:
        return None
    if step.norm is not None or step.shared is not None:
        return None

    backend = None
    for leaf in leaves:
        if leaf is not None:
            backend = BACKEND_CACHE.get(type(leaf)) or backend_of(leaf)
            break
    # The general path raises the error for immutable arrays.
    if backend is None or (step.in_place and not backend.writes):
        return None
    measured = backend.one_norm(leaves, in_place=step.in_place)
    if measured is None or step.loss is None:
        return measured
    return _with_loss(rule, measured, step.loss)


def _with_loss(rule: Any, measured: OneNorm, loss: Any) -> OneNorm | None:
    """Return the norm with a loss, if the rule uses one, where the norm is.

    ``None`` if only the general path can take the loss there.
    """
    uses_loss = any(["loss" in link.limit.needs for link in rule.links or (rule,)])
    if not (uses_loss or isinstance(loss, Loss)):
        check_step_arguments(loss)
        return measured

    backend = measured.place[0]
    on_host = measured.norm is not None
    if type(loss) not in _NUMBERS:
        is_array = BACKEND_CACHE.get(type(loss)) is backend
        if not is_array or (on_host and not backend.readable(loss)):
            return None

    check_step_arguments(loss)
    math_ = _plan_at(measured.place, HOST if on_host else LIBRARY).math
    first = measured.arrays[0]
    with backend.computation_context(first):
        return measured._replace(loss=convert_loss(math_, loss, first))


def _decide_chain(rule: Any, measured: OneNorm, state: Any, _: Any) -> Decision | None:
    """Decide by the rules of a chain, each given the norm after those before it."""
    fits = isinstance(state, (tuple, list)) and len(state) == len(rule.links)
    if rule.stateful and not fits:
        return None
    states = state if rule.stateful else [state] * len(rule.links)

    values = []
    new_states = []
    factor: Any = 1.0
    skipped: Any = False
    for link, old in zip(rule.links, states, strict=True):
        decision = _decide(link, measured, old, None)
        if decision is None:
            return None
        new = decision.state
        # A rule must not learn from the zeros of a step that a rule before it has skipped.
        if skipped is not False:
            new = state_where(skipped, new, old, expected=False)
        new_states.append(new)
        values.append(decision.values)
        if decision.skipped is not False:
            skipped = decision.skipped if skipped is False else skipped | decision.skipped

        # The norm of a clipped step is its limit to float32, since the factor is not rounded yet.
        factor = _times(measured, factor, decision.factor)
        norm = _norm_after(measured, decision)
        if norm is None:
            return None
        measured = measured._replace(norm=norm)

    least = LEAST[measured.place[2]]
    if type(factor) is float and (0 < factor <= least or factor > _LARGEST_FACTOR):
        return None
    if rule.stateful:
        state = tuple(new_states)
    return Decision(measured.place, measured.norm, factor, skipped, state, values)


def _norm_after(measured: OneNorm, decision: Decision) -> Any:
    """Return the norm after a rule of a chain; ``None`` if it is out of range."""
    norm = decision.norm
    if type(norm) is float:
        return rounded_norm(norm * decision.factor, measured.place[2])
    # A norm of ∞ is NaN after a rule, as its elements are.
    _, finite_norm = norm
    return (_times(measured, finite_norm, decision.factor),) * 2


def _times(measured: OneNorm, value: Any, factor: Any) -> Any:
    """Return a number or an array times a factor; 0 times NaN is 0."""
    if type(factor) is float:
        return value * factor
    return measured.place[0].xp.where(factor != 0, value * factor, 0.0)


def _decide(rule: Choices, measured: OneNorm, state: Any, limit: Any) -> Decision | None:
    """Decide by one rule; return ``None`` if only the general path can."""
    limit = rule.constant if limit is None else limit
    if rule.by_numbers and type(measured.norm) is float:
        return _decide_by_numbers(rule, measured, state, limit)
    # The general path validates a limit that is an array.
    if not (limit is None or type(limit) in _NUMBERS):
        return None
    return _decide_by_arrays(rule, measured, state, limit)


def _decide_by_numbers(rule: Choices, measured: OneNorm, state: Any, limit: Any) -> Decision | None:
    """Decide with Python's numbers, where the rule allows that."""
    place, _, norm, _, _ = measured
    dtype = place[2]
    threshold = None
    if limit is None:
        asked = _ask_on_host(rule, measured, state)
        if asked is None:
            return None
        limit, threshold, state = asked
    # The general path refuses a limit that is negative or NaN.
    if type(limit) not in _NUMBERS or not (limit == 0 or limit > LEAST[dtype]):
        return None
    largest = LARGEST[dtype]
    limit = float(dtype(limit)) if limit < largest else largest

    factor = 1.0
    curve = rule.curve
    if isinstance(curve, RejectAbove) and norm > float(dtype(min(curve.bound, largest))):
        factor = 0.0
    elif norm > limit:
        factor = 0.0 if curve is reject else limit / norm
        if 0 < factor <= LEAST[dtype]:
            return None

    skipped = factor == 0 and rejects(curve)
    values = partial(_values_of, rule, place, (norm, limit, factor), threshold)
    return Decision(place, norm, factor, skipped, state, values)


def _ask_on_host(rule: Choices, measured: OneNorm, state: Any) -> tuple[float, Any, Any] | None:
    """Ask one of uniclip's own limits on the host: return limit, threshold and next state.

    Its answers need no checks. ``None`` if the state is of other norms, or the host does not read
    it.
    """
    place, _, norm, loss, _ = measured
    backend, device, dtype = place
    old = state
    if rule.stateful:
        if not _is_of_one_norm(state):
            return None
        views = [a if isinstance(a, NUMPY) else backend.as_numpy(a) for a in state]
        if any([view is None for view in views]):
            return None
        old = type(state)(*views)

    norms = np.array([norm], dtype)
    inputs = Measured([norms], loss=loss, finite_norms=[norms])
    context = Context(DEFAULT, _plan_at(place).blocks, inputs, 0, rule.limit.needs)
    with np.errstate(all="ignore"):
        limits, new = rule.limit(norms, old, context)
    if rule.stateful:
        new = type(state)(*[backend.from_host(np.asarray(array), device) for array in new])
    return np.asarray(limits).item(), context.threshold, new


def _is_of_one_norm(state: Any) -> bool:
    """Return whether a state is a named tuple of arrays with one row, or without rows."""
    if not getattr(state, "_fields", ()):
        return False
    return all([tuple(getattr(array, "shape", (0,))[:1]) in _ONE_ROW for array in state])


def _decide_by_arrays(rule: Choices, measured: OneNorm, state: Any, limit: Any) -> Decision | None:
    """Decide with the functions of the general path, for a factor in range.

    For accelerators, where the host reads nothing, and for limits and curves that take arrays.
    """
    decided = _decide_any(rule, measured, state, limit)
    factor = decided.factor
    if type(factor) is not float or factor == 0:
        return decided
    return decided if LEAST[measured.place[2]] < factor <= _LARGEST_FACTOR else None


def _decide_any(rule: Choices, measured: OneNorm, state: Any, limit: Any) -> Decision:
    """Decide with the functions of the general path, by any norm."""
    place, _, norm, loss, present = measured
    plan = _plan_at(place, HOST if type(norm) is float else LIBRARY)
    if plan.math.host:
        # A limit may write into its own array.
        norms = np.array([norm], place[2])
        with np.errstate(invalid="ignore"):
            [finite_norms] = mark_nonfinite(rule, plan, [norms.copy()])
    else:
        norms, finite_norms = norm

    inputs = StepInputs(rule, [], Step(), state, limit)
    of_step = Measured([norms], present=present, loss=loss, finite_norms=[finite_norms])
    with plan.math.backend.computation_context(norms):
        step_finite = None
        if rule.needs_finite:
            step_finite = plan.math.finite([norms], None, [finite_norms])
        values, new_state = decide(plan, inputs, of_step, step_finite)

    [factor] = values.factors
    skipped = False if values.skipped is None else values.skipped
    if plan.math.host:
        skipped = bool(skipped)
        factor = float(factor.item())
    return Decision(place, norm, factor, skipped, new_state, values)


def _scale(rule: Any, measured: OneNorm, factor: Any, *, in_place: bool) -> list[Any] | None:
    """Return arrays times a factor; ``None``, with nothing written, if the backend cannot."""
    backend, _, dtype = measured.place
    arrays = measured.arrays
    if type(factor) is float:
        rounded = float(dtype(factor))
        return arrays if rounded == 1 else backend.scale_all(arrays, rounded, in_place=in_place)

    zero = any([link.zeroes for link in rule.links or (rule,)])
    places = [(0, 0)] * len(arrays)
    return backend.scale(Products(arrays, [factor], places, in_place=in_place, zero=zero))


# On distributed leaves.


class LocalLeaves(NamedTuple):
    """What this process has of a tree with distributed leaves."""

    arrays: list[Any]
    """The local array of each leaf, ``None`` for an absent one."""
    spec: Any
    """The structure of the tree."""
    shards: Shards
    place: NormPlace
    mode: int
    """`HOST` or `LIBRARY`."""


def _run_on_shards(
    rule: Any, flat: tuple[list[Any], Any], state: Any, step: Step, limit: Any
) -> tuple[list[Any], Decision] | None:
    """Do as `run_spine` for a tree with distributed leaves.

    The norm is that of the local arrays, reduced over processes. After the reduction the step is
    taken here in any case, since another process would wait for this one. Before it a process may
    take the general path, which sends the same.
    """
    # A chain takes one step for each of its rules.
    if flat[1] is None or rule.links:
        return None
    # The general path rounds factors that are too large for a dtype, and validates arrays.
    limit = rule.constant if limit is None else limit
    if not never_amplifies(rule.curve) or not (limit is None or type(limit) in _NUMBERS):
        return None
    local = _open_local(flat, step)
    if local is None or not _takes_loss(rule, local, step.loss):
        return None
    if local.mode == LIBRARY and not _runs_unread(rule, limit):
        return None

    measured = _measure_shards(rule, local, step.loss)
    in_range = local.mode == LIBRARY or rounded_norm(measured.norm, np.float32) is not None
    if rule.nonfinite == "raise" and not in_range:
        tree = open_leaves((local.arrays, local.spec))
        finite = np.asarray(np.isfinite(measured.norm))
        raise_if_nonfinite(tree, _plan_at(local.place).math, finite)

    decided = None
    if in_range and measured.present is None:
        decided = _decide(rule, measured, state, limit)
    if decided is None:
        decided = _decide_any(rule, measured, state, limit)
    arrays = _scale_local(rule, local, measured, decided.factor, in_place=step.in_place)
    if step.in_place:
        return flat[0], decided

    clipped = list(arrays)
    for number, shard in local.shards.items():
        leaf = flat[0][number]
        unchanged = arrays[number] is local.arrays[number]
        clipped[number] = leaf if unchanged else shard.distribute(leaf, arrays[number])
    return clipped, decided


def _open_local(flat: tuple[list[Any], Any], step: Step) -> LocalLeaves | None:
    """Return the local arrays of a tree, ``None`` if it needs the general path."""
    if step.all_reduce is not None or step.norm is not None or step.shared is not None:
        return None
    leaves, spec = flat
    likes = leaves
    params = None
    # An absent leaf is distributed as its parameter is.
    if step.params is not None and any([leaf is None for leaf in leaves]):
        params, params_spec = flatten_known(step.params)
        if params_spec != spec:
            return None
        likes = [p if leaf is None else leaf for leaf, p in zip(leaves, params, strict=True)]

    first = next((like for like in likes if like is not None), None)
    backend = None if first is None else backend_of(first)
    if backend is None or (step.in_place and not backend.writes):
        return None
    arrays, shards = backend.open_shards(leaves, params)
    if not shards.dense:
        return None
    first = next((array for array in arrays if array is not None), first)
    mode = HOST if backend.readable(first) else LIBRARY
    if mode == LIBRARY and not backend.array_facts([first]).double:
        return None
    return LocalLeaves(arrays, spec, shards, (backend, backend.device(first), np.float32), mode)


def _takes_loss(rule: Choices, local: LocalLeaves, loss: Any) -> bool:
    """Return whether a loss is not used, or is where the norm is."""
    is_reduced = isinstance(loss, Loss)
    if not is_reduced:
        check_step_arguments(loss)
    value = loss.mean if is_reduced else loss
    if "loss" not in rule.limit.needs or value is None or type(value) in _NUMBERS:
        return True
    backend = local.place[0]
    is_array = BACKEND_CACHE.get(type(value)) is backend
    return is_array and (local.mode == LIBRARY or backend.readable(value))


def _measure_shards(rule: Choices, local: LocalLeaves, loss: Any) -> OneNorm:
    """Return the norm over all processes. It may be out of range or not finite."""
    backend = local.place[0]
    math_ = _plan_at(local.place, local.mode).math
    arrays = [array for array in local.arrays if array is not None]
    first = arrays[0] if arrays else None
    rows = shard_rows(local.shards, len(local.arrays), decides=rule.decides)
    count = len(rows.leaves)
    with backend.computation_context(first), backend.allow_float64():
        values = _sums_of_rows(local, rows.leaves)
        # A rule learns nothing from a step in which no process has a gradient.
        if rule.stateful:
            numbers = [sum([local.arrays[n] is not None for n in row]) for row in rows.leaves]
            values += math_.constants([np.asarray(number, np.float64) for number in numbers])
        losses = None
        if "loss" in rule.limit.needs:
            losses = loss_sums(backend, loss)
        values, losses = rows.reduce(math_, values, losses or [])
        total = math_.add(values[:count], "sum")
        present = None
        if rule.stateful:
            present = [math_.xp.reshape(math_.add(values[count:], "sum") > 0, (1,))]

        mean = None
        if "loss" in rule.limit.needs:
            mean = reduced_loss(math_, loss, losses, first)
        norm = _norm_of_total(math_, total)
    if math_.host and present and present[0].all():
        present = None
    return OneNorm(local.place, arrays, norm, mean, present)


def _sums_of_rows(local: LocalLeaves, rows: list[list[int]]) -> list[Any]:
    """Return the sum of squares of each row in this process."""
    backend = local.place[0]
    math_ = _plan_at(local.place, local.mode).math
    of_rows = [[local.arrays[n] for n in row if local.arrays[n] is not None] for row in rows]
    heights = [len(arrays) for arrays in of_rows if arrays]
    sums: Iterator[Any] = iter(())
    if heights:
        terms = Terms([array for arrays in of_rows for array in arrays], heights, [len(heights)])
        [block] = backend.sums(local.mode, terms)
        sums = iter(math_.backend.unstack(block))
    return [next(sums) if arrays else math_.zeros() for arrays in of_rows]


def _norm_of_total(math_: NormSpace, total: Any) -> Any:
    """Return the norm of a sum of squares, as `OneNorm` has it."""
    if math_.host:
        with np.errstate(over="ignore"):
            return float(np.float32(math.sqrt(total)))
    norms = cast(math_.xp, math_.xp.reshape(math_.xp.sqrt(total), (1,)), math_.xp.float32)
    # ∞ - ∞ is NaN.
    return norms, norms + (norms - norms)


def _scale_local(
    rule: Choices, local: LocalLeaves, measured: OneNorm, factor: Any, *, in_place: bool
) -> list[Any]:
    """Return the local arrays times a factor, in any way that is possible."""
    if not measured.arrays or (type(factor) is float and factor == 1):
        return local.arrays
    scaled = None
    backend, _, dtype = measured.place
    if type(factor) is float:
        # A factor of 0 is left to the general path if elements may not be finite.
        is_usual = factor > LEAST[dtype] or (factor == 0 and math.isfinite(measured.norm))
        if is_usual:
            scaled = _scale(rule, measured, factor, in_place=in_place)
        factor = np.asarray([factor], dtype)
    elif not in_place or backend.storage(measured.arrays) is None:
        scaled = _scale(rule, measured, factor, in_place=in_place)
    if scaled is not None:
        return local.arrays if in_place else fill_places(local.arrays, scaled)

    tree = open_leaves((local.arrays, local.spec), in_place=in_place)
    plan = plan_for(rule, [tree], local.mode)
    return scale_leaves(rule, tree, plan, [factor])


# On an accelerator.


def _runs_unread(rule: Any, limit: Any) -> bool:
    """Return whether a step needs no value of its norm or factor."""
    for link in rule.links or (rule,):
        if link.nonfinite not in _UNREAD or not never_amplifies(link.curve):
            return False
        constant = link.constant if limit is None else limit
        # A limit of 0 or ∞ changes all leaves or none, which the general path knows beforehand.
        if type(constant) in _NUMBERS and not 0 < constant <= FLOAT32_MAX:
            return False
    return True


def _clip_at_once(
    rule: Any, measured: OneNorm, leaves: list[Any], step: Step, limit: Any
) -> tuple[list[Any], Decision] | None:
    """Clip leaves by a constant limit; ``None`` if the backend is not faster than in parts.

    The caller sets the state.
    """
    if rule.links or rule.curve is not hard or rule.nonfinite != "propagate":
        return None
    limit = rule.constant if limit is None else limit
    if type(limit) not in _NUMBERS:
        return None
    # The norm is compared in float32, and the reported limit has to be the same number.
    limit = float(np.float32(limit))
    place = measured.place
    clipped = place[0].clip_at_once(measured.arrays, limit, in_place=step.in_place)
    if clipped is None:
        return None

    arrays, norm, factor = clipped
    values = partial(_values_on_device, place, norm, limit, factor)
    new_leaves = leaves if step.in_place else fill_places(leaves, arrays)
    return new_leaves, Decision(place, norm, factor, skipped=False, state=None, values=values)


def _norms_on_device(measured: OneNorm) -> tuple[Any, Any]:
    """Return the norm as an array with one element, and the same with NaN if it is not finite."""
    backend = measured.place[0]
    xp = backend.xp
    terms = Terms(measured.arrays, [len(measured.arrays)], [1])
    at_once = backend.norms(terms, xp.float32)
    if at_once is not None:
        [norms], [finite_norms] = at_once
        return norms, finite_norms
    [sums] = backend.sums(LIBRARY, terms)
    norms = cast(xp, xp.sqrt(sums), xp.float32)
    # ∞ - ∞ is NaN.
    return norms, norms + (norms - norms)


# The values of reports.


@lru_cache(PLAN_CACHE_SIZE)
def _plan_at(place: NormPlace, mode: int = HOST) -> Plan:
    """Return the plan of a single norm."""
    backend, device, dtype = place
    # Without an array norms are float32.
    like = [] if dtype is np.float32 else [backend.from_host(np.zeros((), dtype), device)]
    return plan_of_one_norm(LeafInfo(backend, like, ()), mode, device)


def _values_of(
    rule: Choices, place: NormPlace, numbers: tuple[float, float, float], threshold: Any
) -> StepValues:
    """Return the values of a step as arrays, given the norm, the limit and the factor."""
    dtype = place[2]
    norms, limits, factors = [[np.array([number], dtype)] for number in numbers]
    thresholds = None
    if threshold is not None:
        largest = min(np.asarray(threshold).item(), LARGEST[dtype])
        thresholds = [np.array([largest], dtype)]
    skipped = None
    may_reject = rejects(rule.curve)
    if rule.nonfinite == "skip" or may_reject:
        skipped = np.asarray(numbers[2] == 0 and may_reject)
    return StepValues(_plan_at(place), norms, limits, factors, thresholds, None, skipped)


def _values_on_device(place: NormPlace, norm: Any, limit: float, factor: Any) -> StepValues:
    """Return the values of a step with a constant limit, given 0-d arrays."""
    norms, factors = [[place[0].xp.reshape(array, (1,))] for array in (norm, factor)]
    return StepValues(_plan_at(place, LIBRARY), norms, [limit], factors)
