# SPDX-License-Identifier: MIT
"""The spine: one step of a rule, or of a chain of rules, with one Euclidean norm over dense leaves.

Most steps are of this kind. A backend measures the norm in one call, the limit and the curve are
asked for a single number, and a backend multiplies in one call. A chain measures once: the norm
after a rule is its norm times its factor. `uniclip.clip`, clippers, PyTorch's functions and
attached optimizers all call `run_spine`. If it returns ``None``, with nothing written and no state
changed, they take the general path, in `uniclip._core.step`, which handles rare cases (norms that
are not finite or out of range, several processes) and raises nearly all errors. For distributed
leaves with one norm, the general path measures the norm, and the spine decides and scales.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.apply import Apply, StepResult, scale_leaves
from uniclip._core.blocks import Block, Measured
from uniclip._core.collectives import Loss
from uniclip._core.containers import flatten_known
from uniclip._core.measure import StepInputs, convert_loss
from uniclip._core.norm_space import NormSpace, zero_or_nan
from uniclip._core.plan import PLAN_CACHE_SIZE, Plan
from uniclip._core.step import decide, run_general_step, state_where
from uniclip._core.tree import open_leaves
from uniclip._errors import check_step_arguments
from uniclip._types import StepOptions, Tree
from uniclip.backends import BACKEND_CACHE, DEFAULT, backend_of
from uniclip.backends.arithmetic import cast
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
    Terms,
    fill_places,
    rounded_norm,
    take,
)
from uniclip.curves import RejectAbove, hard, never_amplifies, reject, rejects
from uniclip.limits import Context
from uniclip.report import ChainReport, LazyReport, Report, StepValues
from uniclip.scopes import all_leaves

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

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
    rule: RuleSpec,
    grads: Tree,
    state: Any,
    step: StepOptions = StepOptions(),  # noqa: B008 - it never changes
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
    step : StepOptions
    max_norm : float or 0-d array, optional
        A constant limit in place of the rule's.
    apply : function, optional
        The default scales the leaves; ``None``, with a ``max_norm`` of ∞, only measures.

    Raises
    ------
    TypeError, ValueError, FloatingPointError
        As `uniclip.clip`.
    """
    flat = flatten_known(grads)
    leaves, spec = flat
    taken = run_spine(rule, leaves, state, step, max_norm)
    if taken is not None:
        clipped, decision = taken
        return StepResult(clipped, spec.unflatten, decision, decision.state)

    tree = open_leaves(flat, in_place=step.in_place)
    limit = rule.constant if max_norm is None else max_norm
    finish = _finish_by_numbers if rule.on_spine and apply is scale_leaves else None
    return run_general_step(StepInputs(rule, [tree], step, state, limit), apply, finish)


def run_spine(  # noqa: PLR0911 - one for each thing that may not apply
    rule: Any, leaves: list[Any], state: Any, step: StepOptions, limit: Any = None
) -> tuple[list[Any], Decision] | None:
    """Take a step on the spine: return the clipped leaves, and what was decided.

    ``None``, with nothing changed, if the spine does not apply. Leaves are not even validated,
    since a backend measures only arrays that it knows. A ``limit`` is a constant in place of the
    rule's.
    """
    if not rule.on_spine or (state is None and rule.stateful):
        return None
    measured = _measure(rule, leaves, step)
    if measured is None:
        return None

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


def _measure(rule: Any, leaves: list[Any], step: StepOptions) -> OneNorm | None:
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
    space = _plan_at(measured.place, HOST if on_host else LIBRARY).space
    first = measured.arrays[0]
    with backend.computation_context(first):
        return measured._replace(loss=convert_loss(space, loss, first))


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


def _decide(rule: RuleSpec, measured: OneNorm, state: Any, limit: Any) -> Decision | None:
    """Decide by one rule; return ``None`` if only the general path can."""
    limit = rule.constant if limit is None else limit
    if rule.by_numbers and type(measured.norm) is float:
        return _decide_by_numbers(rule, measured, state, limit)
    # The general path validates a limit that is an array.
    if not (limit is None or type(limit) in _NUMBERS):
        return None
    return _decide_by_arrays(rule, measured, state, limit)


def _decide_by_numbers(
    rule: RuleSpec, measured: OneNorm, state: Any, limit: Any
) -> Decision | None:
    """Decide with Python's numbers, where the rule allows that."""
    place, _, norm, _ = measured
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

    # The formula of `uniclip.curves.hard` for two numbers; see there for its other places.
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


def _ask_on_host(rule: RuleSpec, measured: OneNorm, state: Any) -> tuple[float, Any, Any] | None:
    """Ask one of uniclip's own limits on the host: return limit, threshold and next state.

    Its answers need no checks. ``None`` if the state is of other norms, or the host does not read
    it.
    """
    place, _, norm, loss = measured
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
    inputs = Measured([norms], [norms], loss=loss)
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


def _decide_by_arrays(rule: RuleSpec, measured: OneNorm, state: Any, limit: Any) -> Decision | None:
    """Decide with the functions of the general path.

    For accelerators, where the host reads nothing, and for limits and curves that take arrays.
    """
    place, _, norm, loss = measured
    plan = _plan_at(place, HOST if type(norm) is float else LIBRARY)
    if plan.space.host:
        # Two arrays, since a limit may write into its own.
        norms, finite_norms = [np.array([norm], place[2]) for _ in range(2)]
    else:
        norms, finite_norms = norm

    inputs = StepInputs(rule, [], StepOptions(), state, limit)
    of_step = Measured([norms], [finite_norms], loss=loss)
    with plan.space.backend.computation_context(norms):
        step_finite = None
        if rule.needs_finite:
            step_finite = plan.space.finite([norms], None, [finite_norms])
        values, new_state = decide(plan, inputs, of_step, step_finite)

    [factor] = values.factors
    skipped = False if values.skipped is None else values.skipped
    if plan.space.host:
        skipped = bool(skipped)
        factor = float(factor.item())
        if 0 < factor <= LEAST[place[2]] or not factor <= _LARGEST_FACTOR:
            return None
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


# On distributed leaves, which the general path measures.


def _finish_by_numbers(
    plan: Plan, inputs: StepInputs, measured: Measured
) -> tuple[list[Any], Decision] | None:
    """Decide and scale as the spine does, given a norm over several processes.

    ``None``, with nothing written, if only the general path can. It goes on with the same
    measurement: to measure again, this process would have to wait for the others.
    """
    rule, trees, step, state, limit = inputs
    tree = trees[0]
    space = plan.space
    if not (space.host and space.narrow and tree.all_dense_shards):
        return None
    norm = rounded_norm(measured.norms[0].item(), np.float32)
    is_present = measured.present is None or bool(measured.present[0].all())
    if norm is None or not is_present:
        return None

    place = (space.library, space.device, np.float32)
    arrays = take(tree.arrays, tree.leaf_info.present)
    of_step = OneNorm(place, arrays, norm, measured.loss)
    decided = _decide(rule, of_step, state, limit)
    if decided is None:
        return None

    leaves = tree.leaves
    if decided.factor != 1 and arrays:
        scaled = _scale(rule, of_step, decided.factor, in_place=step.in_place)
        if scaled is None:
            return None
        if not step.in_place:
            leaves = tree.restore_leaves(fill_places(tree.arrays, scaled))
    return leaves, decided


# On an accelerator.


def _runs_unread(rule: Any, limit: Any) -> bool:
    """Return whether the host can take a step without reading the norm or the factor."""
    for link in rule.links or (rule,):
        if link.nonfinite not in _UNREAD or not never_amplifies(link.curve):
            return False
        constant = link.constant if limit is None else limit
        # A limit of 0 or ∞ changes all leaves or none, which the general path knows beforehand.
        if type(constant) in _NUMBERS and not 0 < constant <= FLOAT32_MAX:
            return False
    return True


def _clip_at_once(
    rule: Any, measured: OneNorm, leaves: list[Any], step: StepOptions, limit: Any
) -> tuple[list[Any], Decision] | None:
    """Clip leaves by a constant limit in one call of the backend.

    ``None`` if the rule needs more than that, or the backend has no faster way for it. The caller
    sets the state.
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
    return norms, norms + zero_or_nan(norms)


# The values of reports.


@lru_cache(PLAN_CACHE_SIZE)
def _plan_at(place: NormPlace, mode: int = HOST) -> Plan:
    """Return the plan of a single norm."""
    backend, device, dtype = place
    # Without an array norms are float32.
    like = [] if dtype is np.float32 else [backend.from_host(np.zeros((), dtype), device)]
    space = NormSpace(LeafInfo(backend, like, ()), mode, device, narrow=True)
    return Plan(space, all_leaves, [Block(((0,),), (None,))], [None], [[0]])


def _values_of(
    rule: RuleSpec, place: NormPlace, numbers: tuple[float, float, float], threshold: Any
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
