# SPDX-License-Identifier: MIT
"""Limits that are fixed, or computed from the step, the parameters or the group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

from uniclip._errors import (
    LIMIT,
    Checks,
    Printed,
    check,
    flag,
    nonnegative,
    nonnegatives,
    set_frozen_fields,
    summarize,
)
from uniclip._types import Array, Limits, Norms, Number, State, Tensor
from uniclip.backends import compiling
from uniclip.limits.base import (
    BuiltIn,
    Context,
    Limit,
    NoState,
    StatefulLimit,
    align,
    unlimited,
)

_Label: TypeAlias = object
"""The label of a group, ``None`` without groups."""
_MAX_SHOWN_LABELS = 10
"""The number of labels that an error lists."""


@dataclass(frozen=True, repr=False)
class Constant(BuiltIn):
    """Allow the same norm at every step.

    Parameters
    ----------
    value : float or array
        At least 0. A 0-d array may be traced, so that a new value needs no recompilation.

    Examples
    --------
    >>> uc.clip(np.asarray([3.0, 4.0]), uc.Rule(uc.limits.Constant(1.0)))[0]
    array([0.6, 0.8])
    >>> uc.Rule(uc.limits.Constant(1.0)) == uc.Rule(1.0)
    True
    """

    value: Number

    checks: ClassVar[Checks] = {
        "value": lambda _, value: nonnegatives("max_norm, the limit,", value, LIMIT)
    }

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether the value is one number, and so the same for norms of any shape."""
        return not getattr(self.value, "shape", ())

    def __call__(self, norms: Norms, state: NoState, context: Context) -> tuple[Number, NoState]:
        """Return the value, the same for every norm."""
        return self.value, state


class Counted(NamedTuple):
    """The number of steps taken."""

    norm_count: Tensor


@dataclass(frozen=True, repr=False)
class Schedule(StatefulLimit):
    """Allow ``fn(step)``, the same for every norm.

    Parameters
    ----------
    fn : callable
        Called with the number of earlier steps, a 0-d float32 array: NumPy's where the host can
        read the gradients, else one of their library (traced in compiled code). It returns a number
        or a 0-d array. Steps that are not finite are not counted.

    Examples
    --------
    >>> limit = uc.limits.Schedule(lambda step: 1.0 + 4.0 * 0.5**step)
    >>> clipper = uc.Clipper(uc.by_global_norm(limit))
    >>> [clipper(np.asarray([300.0])).item() for _ in range(3)]
    [5.0, 3.0, 2.0]
    """

    fn: Callable[[Tensor], Number]

    def __post_init__(self) -> None:
        """Validate the function."""
        check("fn", self.fn, callable(self.fn), "a function of the step")

    def init(self, norms: Norms, context: Context) -> Counted:
        """Return the state before the first step."""
        return Counted(context.asarray(0, context.xp.int32))

    def __call__(self, norms: Norms, state: Counted, context: Context) -> tuple[Number, Counted]:
        """Call the function with the number of earlier steps."""
        xp = context.xp
        step = xp.astype(state.norm_count, xp.float32)
        return self.fn(step), Counted(state.norm_count + 1)


@dataclass(frozen=True, repr=False)
class Relative(BuiltIn):
    """Allow ``ratio · max(‖parameter‖, eps)``, a limit relative to the norm of the parameter.

    Parameters
    ----------
    ratio : float or 0-d array
        At least 0.
    eps : float or 0-d array, default 1e-3
        The smallest norm of a parameter that is used; without it a parameter of zeros could never
        change.
    counts : array, optional
        Multiplies the limits; of the shape of the norms of one group, one number for each.

    Examples
    --------
    >>> rule = uc.Rule(uc.limits.Relative(0.1), scope=uc.scopes.each_leaf)
    >>> uc.clip(np.asarray([3.0, 4.0]), rule, params=np.asarray([0.0, 10.0]))[0]
    array([0.6, 0.8])
    """

    ratio: Number
    eps: Number = 1e-3
    counts: Array | None = None

    needs: ClassVar[frozenset[str]] = frozenset({"params"})

    checks: ClassVar[Checks] = {"ratio": nonnegative, "eps": nonnegative}

    def __post_init__(self) -> None:
        """Validate the parameters."""
        super().__post_init__()
        # The shapes of norms are not known before a step.
        is_array = self.counts is None or hasattr(self.counts, "shape")
        check("counts", self.counts, is_array, "an array, one number for each norm")

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether no counts depend on the place of a norm."""
        return self.counts is None

    def __call__(self, norms: Norms, state: NoState, context: Context) -> tuple[Limits, NoState]:
        """Return limits relative to the parameters."""
        xp = context.xp
        params = context.params
        limits = self.ratio * xp.where(params > self.eps, params, self.eps)
        if self.counts is not None:
            limits = limits * self._counts_like(limits, context)
        return limits, state

    def _counts_like(self, limits: Limits, context: Context) -> Tensor:
        """Return the counts as an array in the dtype of the limits, with the shape of one group."""
        counts = context.asarray(self.counts, limits.dtype)
        shape = tuple(limits.shape)[1:]
        if tuple(counts.shape) != shape:
            msg = (
                f"counts has shape {tuple(counts.shape)}, but the norms have shape {shape}; pass "
                "one count for each norm"
            )
            raise ValueError(msg)
        return counts


@dataclass(frozen=True, repr=False)
class TrustRatio(BuiltIn):
    """Allow a step of ``trust_coefficient · ‖parameter‖`` at the learning rate ``lr``: LARC's clip.

    Parameters
    ----------
    lr : float or 0-d array
        The learning rate of the optimizer.
    trust_coefficient : float
        How long a step may be relative to its parameter.
    weight_decay : float
        The weight decay of the optimizer, which counts as part of the step.

    Examples
    --------
    >>> limit = uc.limits.TrustRatio(lr=0.1, trust_coefficient=0.02, weight_decay=0.0)
    >>> rule = uc.Rule(limit, scope=uc.scopes.each_leaf)
    >>> uc.clip(np.asarray([30.0, 40.0]), rule, params=np.asarray([3.0, 4.0]))[0]
    array([0.6, 0.8])
    """

    lr: Number
    trust_coefficient: float
    weight_decay: float

    needs: ClassVar[frozenset[str]] = frozenset({"params"})
    elementwise: ClassVar[bool] = True

    checks: ClassVar[Checks] = dict.fromkeys(
        ("lr", "trust_coefficient", "weight_decay"), nonnegative
    )

    def __call__(self, norms: Norms, state: NoState, context: Context) -> tuple[Limits, NoState]:
        """Return limits relative to the parameters; a parameter of zeros limits nothing."""
        xp = context.xp
        params = context.params

        # A gradient of 0 is not clipped, whatever its limit; 1 avoids a division by 0.
        divisors = xp.where(norms > 0, norms, 1.0)
        gradient_shares = 1 / (1 + self.weight_decay * params / divisors)
        limits = self.trust_coefficient * params / self.lr * gradient_shares
        return xp.where(params > 0, limits, unlimited(xp, norms)), state


@dataclass(frozen=True, repr=False)
class Split(BuiltIn):
    """Split a total among K norms, so that their joint norm is at most the total.

    Parameters
    ----------
    total : float or 0-d array
        The largest joint norm.
    by_size : bool, default False
        Give each norm ``total·√(D/ΣD)``, D its number of elements, instead of ``total/√K``.

    Examples
    --------
    >>> rule = uc.Rule(uc.limits.Split(2.0), scope=uc.scopes.each_leaf)
    >>> uc.clip([np.asarray([float(n)]) for n in (1, 2, 3, 4)], rule)[0]
    [array([1.]), array([1.]), array([1.]), array([1.])]
    """

    total: Number
    by_size: bool = False

    checks: ClassVar[Checks] = {"total": partial(nonnegative, hint=LIMIT), "by_size": flag}

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The sizes, if the total is split by size."""
        return frozenset({"sizes"} if self.by_size else ())

    def __call__(
        self, norms: Norms, state: NoState, context: Context
    ) -> tuple[Limits | Number, NoState]:
        """Split the total."""
        xp = context.xp
        if self.by_size:
            entries = context.asarray(context.total(lambda block: block.sizes))
            shares = context.sizes / xp.where(entries > 0, entries, 1.0)
            return self.total * shares**0.5, state

        # A step without gradients has no norms, and 0 has no negative power.
        count = context.count
        if isinstance(count, int):
            return self.total * max(count, 1) ** -0.5, state
        return self.total * xp.where(count > 0, count, 1.0) ** -0.5, state


@dataclass(frozen=True, repr=False)
class PerGroup(Printed, Limit):
    """Give each group of the scope `uniclip.scopes.groups` its own limit.

    Parameters
    ----------
    limits : mapping of label to float, array or Limit
        One for each label that occurs; ``math.inf`` does not clip a group.

    Examples
    --------
    >>> limit = uc.limits.PerGroup({"body": 1.0, "head": 6.0})
    >>> rule = uc.Rule(limit, scope=uc.scopes.groups(lambda path, leaf: path[0]))
    >>> uc.clip({"body": np.asarray([3.0, 4.0]), "head": np.asarray([12.0])}, rule)[0]
    {'body': array([0.6, 0.8]), 'head': array([6.])}
    """

    limits: Any

    def __post_init__(self) -> None:
        """Convert numbers to constant limits, and store a hashable tuple."""
        limits = self.limits
        check("limits", limits, isinstance(limits, (Mapping, tuple)), "a mapping of label to limit")
        pairs = limits.items() if isinstance(limits, Mapping) else limits
        set_frozen_fields(self, limits=tuple((label, as_limit(limit)) for label, limit in pairs))

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal limit."""
        texts = []
        for label, limit in self.limits:
            # A constant is written as its number, which makes it again.
            shown = limit.value if type(limit) is Constant else limit
            texts.append(f"{show(label)}: {show(shown)}")
        return f"uc.limits.PerGroup({{{', '.join(texts)}}})"

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether one of the limits is stateful."""
        return any(limit.stateful for _, limit in self.limits)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The inputs of the limits in addition to the norms."""
        return frozenset().union(*(limit.needs for _, limit in self.limits))

    @property
    def groups(self) -> list[_Label]:  # type: ignore[override]
        """The labels."""
        return [label for label, _ in self.limits]

    @property
    def constants(self) -> list[Number]:
        """The numbers and arrays among the limits."""
        return [limit.value for _, limit in self.limits if isinstance(limit, Constant)]

    def init(self, norms: Norms, context: Context) -> State:
        """Return the state of each group's limit."""
        states = []
        for number, limit in enumerate(self._limits_of_rows(context)):
            row = context.row(number)
            states.append(limit.init(row.norms, row))
        return tuple(states)

    def __call__(self, norms: Norms, state: State, context: Context) -> tuple[Limits, State]:
        """Call each group's limit."""
        xp = context.xp
        limits = self._limits_of_rows(context)
        largest = float(xp.finfo(norms.dtype).max)

        # A number that changes must not become part of an array in a compiled function.
        numbers = [
            limit.value
            for limit in limits
            if type(limit) is Constant and isinstance(limit.value, (float, int))
        ]
        if len(numbers) == len(limits) and not compiling():
            values = context.constant([float(min(number, largest)) for number in numbers])
            return align(xp, values, norms), state

        states = state if self.stateful else [NoState()] * len(limits)
        rows = [context.row(number) for number in range(len(limits))]
        row_limits = []
        thresholds = []
        new_states = []
        for limit, row, row_state in zip(limits, rows, states, strict=True):
            # Not `limit(...)`, as in `uniclip._core.limiting`.
            returned, new = limit.__call__(row.norms, row_state, row)
            array = _like_norms(returned, largest, row)
            row_limits.append(array)
            new_states.append(new)

            # A limit without a threshold clips what is above it.
            if row.threshold is not None:
                array = _like_norms(row.threshold, largest, row)
            thresholds.append(array)

        if any([row.threshold is not None for row in rows]):
            context.threshold = xp.concat(thresholds, axis=0)
        new_state = tuple(new_states) if self.stateful else state
        return xp.concat(row_limits, axis=0), new_state

    def _limits_of_rows(self, context: Context) -> list[Limit]:
        """Return the limit of each group; groups whose gradients are absent need none."""
        limits = dict(self.limits)
        found = []
        for number, label in enumerate(context.labels):
            limit = limits.get(label)
            if limit is None:
                if not (context.absent and context.absent[number]):
                    _raise_no_limit(label, list(limits))
                limit = Constant(math.inf)
            found.append(limit)
        return found


def _raise_no_limit(label: _Label, labels: list[_Label]) -> NoReturn:
    """Raise an error for a group that has no limit."""
    hint = ""
    if label is None:
        hint = "; PerGroup needs a scope of groups, scope=uc.scopes.groups(label)"
    names = list(map(summarize, labels[:_MAX_SHOWN_LABELS]))
    if len(labels) > _MAX_SHOWN_LABELS:
        names.append("...")
    msg = (
        f"no limit for group {summarize(label)} (limits are set for: {', '.join(names)}); add one, "
        f"or use math.inf to leave the group unclipped{hint}"
    )
    raise ValueError(msg)


def _like_norms(limit: Limits | Number, largest: float, context: Context) -> Limits:
    """Return a number (at most ``largest``) or an array, in the shape and dtype of the norms."""
    zeros = context.xp.zeros_like(context.norms)
    if not isinstance(limit, (float, int)):
        return zeros + context.asarray(limit)

    # PyTorch's compiler makes a constant of the result of `min`, and recompiles for each number.
    return zeros + float(largest if limit > largest else limit)  # noqa: FURB136


def as_limit(value: Any) -> Limit:
    """Return a limit as it is, a number or an array as a constant limit."""
    if isinstance(value, Limit):
        return value
    if isinstance(value, (float, int)):
        return Constant(value)

    # Numbers come first, since a compiler cannot evaluate the following for them.
    fits = not callable(value) and not hasattr(value, "stateful")
    hint = " (of a rule, rule.limit)"
    if callable(value) and not hasattr(value, "limit"):
        hint = " (of a function of the step, uc.limits.Schedule(function))"
    if isinstance(value, type) and issubclass(value, Limit):
        hint = f" (call the class, {value.__name__}(...))"
    check("max_norm, the limit,", value, fits, f"a number, a 0-d array or a uc.Limit{hint}")
    return Constant(value)
