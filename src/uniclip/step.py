# SPDX-License-Identifier: MIT
"""A step of a rule: measure the norms, ask for their limits, bend the curve, and then scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from uniclip._checks import real
from uniclip._repr import short
from uniclip.backends import DEFAULT
from uniclip.backends.base import cast
from uniclip.curves import hard, skip
from uniclip.layout import Layout, Opened, layout_of
from uniclip.limits import Block as Norms
from uniclip.limits import Constant, Context, NoState, PerGroup
from uniclip.losses import loss_of
from uniclip.measure import AllReduce, broadcasts, in_range, measure, sizes_of, zeros
from uniclip.nonfinite import all_finite, refuse
from uniclip.report import Late, Made, Report
from uniclip.scale import NUMBERS, Factors, factors_of, reduced, scaled
from uniclip.scopes import everything

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


_NEAR = 2.0**-126
"""How far below a norm a limit may lie, so that the factor is a normal number."""


class Step(NamedTuple):
    """What a caller adds to the gradients of a step."""

    params: Any = None
    all_reduce: AllReduce | None = None
    loss: Any = None
    norm: Any = None
    """The norm, if it is known already."""
    absent: frozenset[int] = frozenset()
    """The ids of the leaves that stand for gradients that are absent here, but may be present in other processes."""


class Decision(NamedTuple):
    """What is to be done about the norms of a step: an array for each block."""

    given: Opened
    layout: Layout
    backend: Backend
    """That of the arrays: NumPy's where the host can read them at no cost, else the gradients' own."""
    norms: list[Any]
    limits: list[Any]
    factors: list[Factors]
    ones: list[Any]
    """Whether each factor is 1."""
    finite: Any
    skipped: Any
    """Whether the step is left out, ``None`` if the rule leaves none out."""
    state: Any

    def clipped(self, rule: Rule) -> Any:
        """Return the clipped gradients."""
        return scaled(self.given, self.layout, self.factors, self.ones, skip=rule.nonfinite == "skip")

    def reduced(self, rule: Rule, *, mean: bool) -> Any:
        """Return the sum (or the mean) of the clipped gradients along their first axis."""
        return reduced(self.given, self.layout, self.factors, skip=rule.nonfinite == "skip", mean=mean)

    def report(self) -> Report:
        """Return the report: its fields where code is traced, else what makes them when somebody looks."""
        given, own = self.given, self.given.backend
        seen = _Seen(
            own, self.layout, given.tree._replace(leaves=[]), own.device(given.first), self.norms, self.limits,
            [some.product(self.backend.xp) for some in self.factors], self.ones, self.finite, self.skipped,
        )  # fmt: skip
        if given.tree.spec is None or own.traced(given.first):  # a way back that may hold the gradients
            return Made(*[seen.field(name) for name in Made._fields])
        return Late(seen.field)


class _Seen(NamedTuple):
    """What a report is made of: small arrays, and no gradient."""

    backend: Backend
    layout: Layout
    tree: Any
    device: Any
    norms: list[Any]
    limits: list[Any]
    factors: list[Any]
    ones: list[Any]
    finite: Any
    skipped: Any

    def field(self, name: str) -> Any:
        """Return a field of the report, in arrays of the gradients' framework."""
        xp = np if all(isinstance(n, np.ndarray) for n in self.norms) else self.backend.xp
        if name == "clipped":
            same = [xp.all(one) for one in self.ones]
            return self._own(xp.logical_not(np.all(same) if xp is np else self.backend.all_of(same)))
        if name in {"finite", "skipped"}:
            return self._own(getattr(self, name))
        blocks = getattr(self, name)
        if name == "limits":
            blocks = [xp.zeros_like(n) + limit for n, limit in zip(self.norms, blocks, strict=True)]
        return self.layout.arranged(self.tree, list(map(self._own, blocks)))

    def _own(self, value: Any) -> Any:
        host = isinstance(value, (bool, np.ndarray, np.generic))
        return self.backend.from_host(np.asarray(value), self.device) if host else value


class Single(NamedTuple):
    """What is to be done about one norm and a constant limit, in NumPy's scalars."""

    given: Opened
    state: Any
    norms: Any
    limits: Any
    factors: Any
    skipped: None = None

    def clipped(self, rule: Rule) -> Any:
        """Return the clipped gradients."""
        given, arrays, factor = self.given, self.given.arrays, float(self.factors)
        new = arrays if factor == 1 else given.backend.scaled(arrays, [factor] * len(arrays), in_place=given.in_place)
        return self._in_arrays(rule).clipped(rule) if new is None else given.tree.rebuild(new)

    def reduced(self, rule: Rule, *, mean: bool) -> Any:
        """Return the sum (or the mean) of the clipped gradients along their first axis."""
        return self._in_arrays(rule).reduced(rule, mean=mean)

    def _in_arrays(self, rule: Rule) -> Decision:
        """Return the same in arrays."""
        norms, limits, factors = (np.asarray([one]) for one in (self.norms, self.limits, self.factors))
        layout, true = layout_of(self.given, rule.scope), np.True_
        one = [factors == 1]
        return Decision(
            self.given, layout, DEFAULT, [norms], [limits], [Factors(None, factors)], one, true, None, self.state
        )

    def report(self) -> Report:
        """Return the report."""
        values = {"norms": self.norms, "limits": self.limits, "factors": self.factors, "finite": True}
        values["clipped"] = self.factors != 1
        return Late(partial(_of_single, self.given.backend, self.given.backend.device(self.given.first), values))


def _of_single(backend: Backend, device: Any, values: dict[str, Any], name: str) -> Any:
    """Return a field of a report, in arrays of the gradients' framework."""
    return backend.from_host(np.asarray(values[name]), device) if name in values else None


def _single(rule: Rule, given: Opened, state: Any) -> Single | None:
    """Decide about one Euclidean norm with a constant limit where the host can read it; ``None`` in any other case."""
    limit, norm = rule.limit, rule.norm
    constant = type(limit) is Constant and type(limit.value) is float and 0 < limit.value < 3e38  # noqa: PLR2004
    alone = rule.scope.join is everything and rule.scope.axes is None and given.ways is None and given.arrays
    if not (
        constant
        and alone
        and rule.curve is hard
        and norm.p == 2
        and not norm.size_power
        and rule.nonfinite == "propagate"
    ):
        return None
    own = given.backend
    total = own.squares([given.arrays]) if own.readable(given.first) and not own.watched() else None
    total = total if total is None else own.together([total])[0]
    if not isinstance(total, np.ndarray) or not in_range(total[0], total.dtype == np.float32):
        return None
    n, most, one = np.sqrt(total[0]), total.dtype.type(limit.value), total.dtype.type(1)
    return Single(given, state, n, most, one if n <= most else most / n) if n * _NEAR <= most else None


def decide(rule: Rule, given: Opened, state: Any, step: Step) -> Decision | Single:
    """Measure the gradients and work out their factors."""
    if step.norm is None and step.all_reduce is None:
        single = _single(rule, given, state)
        if single is not None:
            return single
    own = given.backend
    layout = layout_of(given, rule.scope, remembers=rule.limit.memory)
    sound = [all_finite(given, step.all_reduce)] if rule.nonfinite == "zero" else []
    if sound and not (own.readable(sound[0]) and bool(sound[0])):
        given = given._replace(clean=True)
    norms = measure(given, layout, rule.norm, step.all_reduce) if step.norm is None else _known(given, layout, step)
    host = (
        all(isinstance(n, np.ndarray) for n in norms)
        and getattr(rule.curve, "host", False)
        and _for_host(own, rule.limit)
    )
    if "loss" in rule.limit.needs:
        step = step._replace(loss=_found(given, step))
        host = host and (step.loss is None or own.viewed(step.loss) is not None)
    views = [own.viewed(flag) for flag in sound] if host else []
    host = host and all(view is not None for view in views)
    backend, sound = (DEFAULT, views) if host else (own, sound)
    if not host:
        norms = [own.from_host(n, own.device(given.first)) if isinstance(n, np.ndarray) else n for n in norms]
    limits, new_state = _limits(rule, given, layout, backend, norms, state, step)
    xp = backend.xp
    finite = backend.all_of([*sound, *[xp.all(xp.isfinite(n)) for n in norms]])
    if rule.nonfinite == "raise":
        refuse(given, backend, finite)
    limits = [_checked(backend, "limit", limit, n) for limit, n in zip(limits, norms, strict=True)]
    factors = [factors_of(backend, rule, n, limit, finite) for n, limit in zip(norms, limits, strict=True)]
    ones = [xp.equal(some.rest, xp.ones_like(some.rest)) for some in factors]
    if new_state is not state:
        state = kept(backend, finite, new_state, state)
    skipped = _skipped(backend, rule, layout, factors, finite)
    return Decision(given, layout, backend, norms, limits, factors, ones, finite, skipped, state)


def first_state(rule: Rule, given: Opened) -> Any:
    """Return the state before the first step."""
    layout = layout_of(given, rule.scope, remembers=True)
    contexts = _contexts(rule, given, layout, given.backend, zeros(given, layout), None)
    states = [rule.limit.init(context.norms, context) for context in contexts]
    return states[0] if len(states) == 1 else tuple(states)


def kept(backend: Backend, finite: Any, new: Any, old: Any) -> Any:
    """Return the new state, the old one after a step that is not finite: one NaN must not spoil all later steps."""
    if not optree.tree_leaves(old):
        return new
    if backend.readable(finite):
        return new if bool(finite) else old
    xp = backend.xp
    zero = xp.zeros_like(xp.astype(finite, xp.float32))
    finite = backend.once(xp.where(finite, zero + 1, zero)) > 0  # compilers would work it out again for each array
    return optree.tree_map(lambda a, b: xp.where(backend.to_device_of(a, finite), a, b), new, old)


def _for_host(own: Backend, limit: Any) -> bool:
    """Whether NumPy's arrays will do for a limit: none of its own numbers is an array of the framework."""
    if isinstance(limit, PerGroup):
        return all(_for_host(own, one) for _, one in limit.limits)
    if type(limit) is Constant and hasattr(limit.value, "dtype"):
        return own.viewed(own.xp.asarray(limit.value)) is not None
    return limit.host and not any(hasattr(value, "dtype") for value in vars(limit).values())


def _skipped(backend: Backend, rule: Rule, layout: Layout, factors: list[Factors], finite: Any) -> Any:
    """Return whether the whole step is left out, ``None`` if the rule leaves none out."""
    xp, skipped = backend.xp, None
    if rule.nonfinite == "skip":
        skipped = xp.logical_not(finite)
    if rule.curve is skip:
        every, none = [], []
        for some, block in zip(factors, layout.blocks, strict=True):
            gone = xp.equal(some.rest, xp.zeros_like(some.rest))
            here = [row for row, group in enumerate(block.groups) if layout.groups[group]]
            rows = [gone] if len(here) == len(block.groups) else [gone[row, ...] for row in here]
            every += [xp.all(row) for row in rows]
            none += [xp.logical_not(xp.any(row)) for row in rows]  # holds, too, where there is nothing
        every, none = backend.all_of(every), backend.all_of(none)
        none_left = every & xp.logical_not(none)
        skipped = none_left if skipped is None else skipped | none_left
    return skipped


def _contexts(
    rule: Rule, given: Opened, layout: Layout, backend: Backend, norms: list[Any], step: Step | None
) -> list[Context]:
    """Return what the limit may ask for, for each block; what it needs is measured now."""
    needs = rule.limit.needs if step is not None else frozenset()
    params: list[Any] = [None] * len(norms)
    sizes, loss = params, None
    if step is not None and "params" in needs:
        params = [_in(backend, given, n) for n in _params(rule, given, step)]
    if step is not None and "sizes" in needs:
        sizes = [_in(backend, given, n) for n in sizes_of(given, layout, step.all_reduce)]
    if step is not None and "loss" in needs and step.loss is not None:
        loss = step.loss if backend is given.backend else given.backend.viewed(step.loss)
    labels = [[layout.labels[group] for group in block.groups] for block in layout.blocks]
    absent = [[not layout.groups[group] for group in block.groups] for block in layout.blocks]
    gone = [rows if any(rows) else () for rows in absent]
    blocks = [Norms(*some) for some in zip(norms, labels, params, sizes, gone, strict=True)]
    return [Context(backend, blocks, number, needs, loss) for number in range(len(blocks))]


def _found(given: Opened, step: Step) -> Any:
    """Return the loss as a float32 array of the gradients' framework, ``None`` if there is none."""
    own, loss = given.backend, loss_of(given, step.all_reduce, step.loss)()
    return loss if loss is None else own.detached(cast(own.xp, own.xp.asarray(loss), own.xp.float32))


def _in(backend: Backend, given: Opened, array: Any) -> Any:
    """Return an array as one of the backend in which a step is worked out."""
    if backend is given.backend:
        return (
            given.backend.from_host(array, given.backend.device(given.first))
            if isinstance(array, np.ndarray)
            else array
        )
    return array if isinstance(array, np.ndarray) else given.backend.viewed(array)


def _params(rule: Rule, given: Opened, step: Step) -> list[Any]:
    """Return the norms of the parameters."""
    if step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    theirs = given.matching(step.params, rule.scope, step.absent)
    theirs = theirs._replace(arrays=list(map(given.backend.detached, theirs.arrays)))
    return measure(theirs, layout_of(theirs, rule.scope, remembers=rule.limit.memory), rule.norm, step.all_reduce)


def _limits(
    rule: Rule, given: Opened, layout: Layout, backend: Backend, norms: list[Any], state: Any, step: Step
) -> tuple[list[Any], Any]:
    """Ask the rule's limit for each block; refuse an answer that is none."""
    limit: Any = rule.limit
    if type(limit) is Constant:  # which asks for no norms
        value = limit.value
        own = given.backend
        value = own.viewed(own.xp.asarray(value)) if backend is not own and hasattr(value, "dtype") else value
        return [value] * len(norms), state
    # It sees ∞ as NaN: as a limit, ∞ would leave alone. No NaN is made of a finite norm, and its derivative stays 1.
    seen = [n + (n - n) for n in norms]
    if limit.memory:
        if not given.tree.leaves and step.all_reduce is None:  # a step without gradients teaches nothing
            return [math.inf] * len(norms), state
        _check_state(rule, layout, state)
    states = [state] if len(norms) == 1 else state if limit.memory else [state] * len(norms)
    limits: list[Any] = []
    new: list[Any] = []
    for context, old in zip(_contexts(rule, given, layout, backend, seen, step), states, strict=True):
        rows = context.absent
        if limit.memory and rows and all(rows):
            limits.append(math.inf)
            new.append(None)
            continue
        old_here = optree.tree_map(lambda array: _in(backend, given, array), old)
        answer = limit(context.norms, old_here, context)
        limits.append(_answer(rule, answer, context.norms))
        if limit.memory:
            state_here = _restored(context.xp, limit, answer[1], old_here, rows) if rows else answer[1]
            new.append(optree.tree_map(lambda array: _back(backend, given, array), state_here))
    if not limit.memory:
        return limits, state
    new = _with_absent(given.backend, limit, new, states)
    return limits, new[0] if len(new) == 1 else tuple(new)


def _with_absent(backend: Backend, limit: Any, new: list[Any], old: Sequence[Any]) -> list[Any]:
    """Return the states of all blocks; one whose gradients are all absent (``None``) keeps its rows.

    What is shared by all rows, such as a count of steps, goes on as in the other blocks.
    """
    taken = [state for state in new if state is not None]
    if len(taken) == len(new):
        return new
    if not taken or isinstance(limit, PerGroup):
        return [b if a is None else a for a, b in zip(new, old, strict=True)]

    def row_by_row(a: Any, b: Any) -> Any:
        return a if len(a.shape) else backend.to_device_of(a, b)

    return [optree.tree_map(row_by_row, b, taken[0]) if a is None else a for a, b in zip(new, old, strict=True)]


def _back(backend: Backend, given: Opened, array: Any) -> Any:
    """Return an array of a new state as one of the gradients' framework, without the computation that it came from."""
    own = given.backend
    if backend is not own:
        return own.from_host(np.asarray(array), own.device(given.first))
    return own.detached(array)


def _answer(rule: Rule, answer: Any, norms: Any) -> Any:
    """Return the limits that a limit has returned; refuse what are none."""
    if not (isinstance(answer, tuple) and len(answer) == 2):  # noqa: PLR2004
        msg = f"{short(rule.limit)} must return (limits, state), the limits and the next state, got {short(answer)}"
        raise TypeError(msg)
    limits = answer[0]
    wanted = f"a number or an array of real numbers that broadcasts against norms of shape {tuple(norms.shape)}"
    if hasattr(limits, "dtype"):
        return limits
    return real(f"the limit of {short(rule.limit)}", limits, wanted)


def _check_state(rule: Rule, layout: Layout, state: Any) -> None:
    """Refuse a state that is none, or one for another number of norms."""
    own = type(rule.limit).__module__.startswith("uniclip.limits.")  # whose states are all of one kind
    parts = [state] if len(layout.blocks) == 1 else state
    count = isinstance(parts, (list, tuple)) and len(parts) == len(layout.blocks)
    kind = isinstance(rule.limit, PerGroup) or (count and all(hasattr(part, "_fields") for part in parts))
    if state is None or isinstance(state, NoState) or (own and not kind):
        msg = f"state must be what rule.init(grads) returns, or an update before, for {short(rule)}, got {short(state)}"
        raise TypeError(msg)
    for part, block in zip(parts, layout.blocks, strict=True) if own else ():
        rows = _rows_of(rule.limit, part)
        if rows is not None and rows != len(block.groups):
            msg = (
                f"the state of {short(rule)} is for {rows} norms, but there are {len(block.groups)}: it was made for "
                "other gradients"
            )
            raise ValueError(msg)


def _rows_of(limit: Any, state: Any) -> int | None:
    """Return how many rows a state has, ``None`` if all of it is shared by all rows."""
    if isinstance(limit, PerGroup):
        return len(state)
    shapes = [
        array.shape
        for name, array in zip(state._fields, state, strict=True)
        if name not in getattr(limit, "shared", ())
    ]
    return next((shape[0] for shape in shapes if len(shape)), None)


def _restored(xp: Any, limit: Any, new: Any, old: Any, absent: Sequence[bool]) -> Any:
    """Return the new state with the old rows of groups whose gradients are all absent."""
    if isinstance(limit, PerGroup):
        return tuple(b if gone else a for a, b, gone in zip(new, old, absent, strict=True))

    def row_by_row(a: Any, b: Any) -> Any:
        if not len(a.shape) or a.shape[0] != len(absent):
            return a
        flags = xp.reshape(xp.asarray(absent), (len(absent),) + (1,) * (len(a.shape) - 1))
        return xp.where(flags, b, a)

    if not hasattr(new, "_fields"):
        return optree.tree_map(row_by_row, new, old)
    pairs = zip(new._fields, new, old, strict=True)
    return type(new)(*[a if name in getattr(limit, "shared", ()) else row_by_row(a, b) for name, a, b in pairs])


def _known(given: Opened, layout: Layout, step: Step) -> list[Any]:
    """Return a norm that is known already, in the dtype that measuring would give it."""
    backend = given.backend
    home = zeros(given, layout)
    known = [_checked(backend, "norm", _in_reach(backend, step.norm, zero.dtype), zero) for zero in home]
    norms = [cast(backend.xp, zero, norm.dtype) + norm for zero, norm in zip(home, known, strict=True)]
    return backend.together(norms)


def _in_reach(backend: Backend, norm: Any, dtype: Any) -> Any:
    """Return a known norm as an array of a dtype, of a wider one if it needs that: it may be that of wider arrays."""
    xp = backend.xp
    if hasattr(norm, "dtype"):
        norm = xp.asarray(norm)
        wide = xp.isdtype(norm.dtype, "real floating")
        return cast(xp, norm, xp.result_type(dtype, norm.dtype) if wide else dtype)
    largest = float(xp.finfo(dtype).max)
    if not largest < norm < math.inf:
        return xp.asarray(norm, dtype=dtype)
    wide = xp.result_type(xp.float64, dtype)  # not always wider
    if wide == dtype:
        msg = f"norm must be within the range of {dtype}, up to {largest:.3g}, got {short(norm)}"
        raise ValueError(msg)
    return xp.asarray(norm, dtype=wide)


def _checked(backend: Backend, name: str, value: Any, norms: Any) -> Any:
    """Return a limit (or a known norm), the largest number of its dtype at most; refuse a wrong one."""
    xp = backend.xp
    if isinstance(value, NUMBERS):
        top = float(xp.finfo(norms.dtype).max)
        wrong = not value >= 0 and not _not_finite(backend, norms)  # NaN too is not >= 0
        value = min(value, top)  # the other way round NaN would become top
    else:
        value = xp.asarray(value, dtype=value.dtype if name == "norm" else norms.dtype)
        wrong = _wrong(backend, name, value, norms)
        if name == "limit":
            top = float(xp.finfo(norms.dtype).max)
            value = xp.where(value > top, xp.ones_like(value) * top, value)
    if wrong:
        shown = short(value) if getattr(value, "shape", ()) else value
        msg = f"{name} must be 0 or more{' (0 zeroes the gradients)' if name == 'limit' else ''}, got {shown}"
        raise ValueError(msg)
    return value


def _not_finite(backend: Backend, norms: Any) -> bool:
    """Whether the norms are known not to be finite; then their limit need not be."""
    xp = backend.xp
    return backend.readable(norms) and not bool(xp.any(xp.isfinite(norms)))


def _wrong(backend: Backend, name: str, array: Any, norms: Any) -> bool:
    """Whether an array is known to hold what is no limit (or no norm)."""
    xp = backend.xp
    if len(array.shape) and not broadcasts(array.shape, norms.shape):
        msg = (
            f"a {name} of shape {tuple(array.shape)} does not fit norms of shape {tuple(norms.shape)}; give one number"
        )
        raise ValueError(msg)
    if not (backend.readable(array) and backend.readable(norms)):
        return False
    # A NaN norm is one that was measured, and the limit of one that is not finite need not be finite.
    return bool(xp.any(array < 0 if name == "norm" else xp.logical_not(array >= 0) & xp.isfinite(norms)))
