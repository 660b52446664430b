# SPDX-License-Identifier: MIT
"""Call a rule's limit: build its context, validate its state and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import optree

from uniclip._checks import real
from uniclip._repr import short
from uniclip.layout import Layout, Opened
from uniclip.limits import Constant, Context, NoState, PerGroup
from uniclip.limits.base import Block
from uniclip.processes import AllReduce, Column
from uniclip.ruler import broadcasts
from uniclip.scale import NUMBERS
from uniclip.scopes import Path

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.rules import Rule


class Step(NamedTuple):
    """The optional arguments of a step."""

    params: Any = None
    all_reduce: AllReduce | Any = None
    loss: Any = None
    norm: Any = None
    """The norm, if it is given."""
    in_place: bool = False
    absent: frozenset[int] = frozenset()
    """The ids of the leaves that stand for gradients that are absent here, but may be present in other processes."""
    left_out: frozenset[Path] = frozenset()
    """The paths of the leaves that a mask leaves out, in all processes."""


class Beside(NamedTuple):
    """The inputs of a limit beside the norms of a step."""

    params: Column | None = None
    sizes: Column | None = None
    loss: Any = None
    elsewhere: Any = None
    """The norms of groups that only other processes have."""


class Asked(NamedTuple):
    """The inputs of a call of a rule's limit."""

    rule: Rule
    given: Opened
    layout: Layout
    backend: Backend
    """The backend of the norms: NumPy's where the host can read them at no cost, else the gradients' own."""
    step: Step | None = None
    """``None`` before the first step."""
    beside: Beside = Beside()

    def limits(self, norms: list[Any], state: Any) -> tuple[list[Any], Any, list[Any] | None]:
        """Return the limits of each block, numbers or arrays, the next state and the thresholds; validate them.

        The norms are NaN where they are not finite.
        """
        rule, limit = self.rule, self.rule.limit
        if type(limit) is Constant:  # which needs no context
            return [_checked(self.backend, self._constant(limit.value), n) for n in norms], state, None
        absent_everywhere = not self.given.tree.leaves and self.step is not None and self.step.all_reduce is None
        if limit.memory:
            if absent_everywhere:  # a step without gradients changes no state
                return [math.inf] * len(norms), state, None
            _check_state(rule, self.layout, state)
        states = [state] if len(norms) == 1 else state if limit.memory else [state] * len(norms)
        contexts = self.contexts(norms)
        answers = [self._of_block(*pair) for pair in zip(contexts, states, strict=True)]
        limits = [_checked(self.backend, one, n) for (one, _), n in zip(answers, norms, strict=True)]
        thresholds = _thresholds(contexts, limits, norms)
        if not limit.memory:
            return limits, state, thresholds
        new = _with_absent(self.backend, limit, [new for _, new in answers], states)
        return limits, new[0] if len(new) == 1 else tuple(new), thresholds

    def contexts(self, norms: list[Any]) -> list[Context]:
        """Build the context of each block."""
        needs = self.rule.limit.needs if self.step is not None else frozenset()
        beside, nothing = self.beside, Column([None] * len(norms))
        params, sizes = (nothing if one is None else one.mapped(self._in) for one in (beside.params, beside.sizes))
        loss = None if beside.loss is None else self._in(beside.loss)
        joined = self.step is not None and self.step.all_reduce is not None  # then norms are those of all processes
        every = zip(norms, params.blocks, sizes.blocks, self.layout.blocks, strict=True)
        blocks = [Block(n, own.labels, p, size, () if joined else own.absent) for n, p, size, own in every]
        if beside.elsewhere is not None:
            others = self._in(beside.elsewhere)
            blocks.append(Block(others, [None] * others.shape[0], params.elsewhere, sizes.elsewhere))
        return [Context(self.backend, blocks, number, needs, loss) for number in range(len(norms))]

    def _of_block(self, context: Context, state: Any) -> tuple[Any, Any]:
        """Return the limits of a block's norms, and its next state, ``None`` if all its gradients are absent."""
        limit, rows = self.rule.limit, context.absent
        if limit.memory and rows and all(rows):  # the shape of its norms is unknown
            return math.inf, None
        old = optree.tree_map(self._remembered, state)
        limits, new = _answer(self.rule, limit(context.norms, old, context), context.norms)
        if not limit.memory:
            return limits, state
        new = _restored(context.xp, limit, new, old, rows) if rows else new
        return limits, optree.tree_map(self._back, new)

    def _constant(self, value: Any) -> Any:
        """Return the value of a constant limit, as a NumPy array where the norms are."""
        own = self.given.backend
        return own.viewed(own.xp.asarray(value)) if self.backend is not own and hasattr(value, "dtype") else value

    def _in(self, array: Any) -> Any:
        """Convert an array to the backend in which the step is computed."""
        if self.backend is self.given.backend:
            return self.given.own(array)
        return array if isinstance(array, np.ndarray) else self.given.backend.viewed(array)

    def _remembered(self, array: Any) -> Any:
        """Convert an array of the state, and detach it."""
        return self._in(array) if self.backend is not self.given.backend else self.backend.detached(array)

    def _back(self, array: Any) -> Any:
        """Convert an array of a new state to the gradients' framework, and detach it."""
        return self.backend.detached(array) if self.backend is self.given.backend else self.given.own(np.asarray(array))


def on_host(own: Backend, limit: Any) -> bool:
    """Whether a limit can be computed in NumPy: none of its parameters is an array of the framework."""
    if isinstance(limit, PerGroup):
        return all(on_host(own, one) for _, one in limit.limits)
    if type(limit) is Constant and hasattr(limit.value, "dtype"):
        return own.viewed(own.xp.asarray(limit.value)) is not None
    return bool(limit.host)


def opened_params(rule: Rule, given: Opened, layout: Layout, step: Step) -> Opened:
    """Open the parameters for a limit relative to them; refuse stored rows beside all rows."""
    for number, axes in enumerate(layout.axes or ()):
        if axes is not None and 0 not in axes and given.backend.sparse(given.tree.leaves[number]):
            msg = (
                f"{given.tree.place(number)} is sparse: {short(rule)} would compare the rows that it stores with all "
                "rows of the parameter; make the gradient dense, or take a norm of whole leaves"
            )
            raise TypeError(msg)
    if step.params is None:
        msg = f"{short(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    return given.matching(step.params, rule.scope, step.absent)


def _answer(rule: Rule, answer: Any, norms: Any) -> tuple[Any, Any]:
    """Validate the results of a limit; return its limits and state."""
    if not (isinstance(answer, tuple) and len(answer) == 2):  # noqa: PLR2004
        msg = f"{short(rule.limit)} must return (limits, state), the limits and the next state, got {short(answer)}"
        raise TypeError(msg)
    limits, state = answer
    if hasattr(limits, "dtype"):
        return limits, state
    wanted = f"a number or an array of real numbers that broadcasts against norms of shape {tuple(norms.shape)}"
    return real(f"the limit of {short(rule.limit)}", limits, wanted), state


def _thresholds(contexts: list[Context], limits: list[Any], norms: list[Any]) -> list[Any] | None:
    """Return the thresholds of each block; a limit without any has its limits as thresholds."""
    known = [context.threshold for context in contexts]
    if all(one is None for one in known):
        return None
    for one, n in zip(known, norms, strict=True):
        if one is not None:
            refuse_shape("threshold", one, n)
    return [limit if one is None else one for one, limit in zip(known, limits, strict=True)]


def _checked(backend: Backend, value: Any, norms: Any) -> Any:
    """Clamp limits to the range of the norms' dtype; refuse negative ones, NaN and wrong shapes."""
    xp, top = backend.xp, float(backend.xp.finfo(norms.dtype).max)
    if isinstance(value, NUMBERS):
        wrong = not value >= 0 and not (backend.readable(norms) and not bool(xp.any(xp.isfinite(norms))))
        value = min(value, top)  # in the other order NaN would become top
    else:
        value = xp.asarray(value, dtype=norms.dtype)
        refuse_shape("limit", value, norms)
        # Negative limits are refused where they can be read; in compiled code they must not be -∞.
        value = xp.minimum(value, top) if isinstance(value, np.ndarray) else xp.clip(value, -top, top)
        # The limit of a norm that is not finite need not be a number.
        read = backend.readable(value) and backend.readable(norms)
        wrong = read and not bool(xp.all(value >= 0)) and bool(xp.any(xp.logical_not(value >= 0) & xp.isfinite(norms)))
    if wrong:
        shown = short(value) if getattr(value, "shape", ()) else value
        msg = f"limit must be 0 or more (0 zeroes the gradients), got {shown}"
        raise ValueError(msg)
    return value


def refuse_shape(name: str, array: Any, norms: Any) -> None:
    """Refuse limits, or a given norm, whose shape does not fit the norms."""
    if len(array.shape) and not broadcasts(array.shape, norms.shape):
        shapes = f"{tuple(array.shape)} does not fit norms of shape {tuple(norms.shape)}"
        msg = f"a {name} of shape {shapes}; give one number"
        raise ValueError(msg)


def _check_state(rule: Rule, layout: Layout, state: Any) -> None:
    """Validate a state: it must be of this rule, and for this number of norms."""
    limit = rule.limit
    known = type(limit).__module__.startswith("uniclip.limits.")  # whose states are all of one kind
    parts = [state] if len(layout.blocks) == 1 else state
    count = isinstance(parts, (list, tuple)) and len(parts) == len(layout.blocks)
    kind = isinstance(limit, PerGroup) or (count and all(hasattr(part, "_fields") for part in parts))
    if state is None or isinstance(state, NoState) or (known and not kind):
        msg = f"state must be what rule.init(grads) returns, or an update before, for {short(rule)}, got {short(state)}"
        raise TypeError(msg)
    for part, block in zip(parts, layout.blocks, strict=True) if known else ():
        own = isinstance(limit, PerGroup)
        rows = [len(part)] if own else [array.shape[0] for array in part if len(array.shape)]
        if rows and rows[0] != len(block.groups):
            msg = (
                f"the state of {short(rule)} is for {rows[0]} norms, but there are {len(block.groups)}: it was made "
                "for other gradients"
            )
            raise ValueError(msg)


def _with_absent(backend: Backend, limit: Any, new: list[Any], old: Sequence[Any]) -> list[Any]:
    """Return the states of all blocks; a block whose gradients are all absent (``None``) keeps its rows.

    Values shared by all rows, such as a count of steps, change as in the other blocks.
    """
    taken = [state for state in new if state is not None]
    if len(taken) == len(new):
        return new
    if not taken or isinstance(limit, PerGroup):
        return [b if a is None else a for a, b in zip(new, old, strict=True)]

    def row_by_row(a: Any, b: Any) -> Any:
        return a if len(a.shape) else backend.to_device_of(a, b)

    return [optree.tree_map(row_by_row, b, taken[0]) if a is None else a for a, b in zip(new, old, strict=True)]


def _restored(xp: Any, limit: Any, new: Any, old: Any, absent: Sequence[bool]) -> Any:
    """Return the new state with the old rows of groups whose gradients are all absent."""
    if isinstance(limit, PerGroup):
        return tuple(b if gone else a for a, b, gone in zip(new, old, absent, strict=True))

    def row_by_row(a: Any, b: Any) -> Any:
        if not len(a.shape) or a.shape[0] != len(absent):
            return a
        flags = xp.reshape(xp.asarray(absent), (len(absent),) + (1,) * (len(a.shape) - 1))
        return xp.where(flags, b, a)

    return optree.tree_map(row_by_row, new, old)
