# SPDX-License-Identifier: MIT
"""Limits that are fixed, or computed from the step, the parameters or the group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from uniclip._errors import (
    LIMIT,
    Printed,
    check,
    flag,
    nonnegative,
    nonnegatives,
    set_frozen_fields,
    summarize,
)
from uniclip._types import Number
from uniclip.backends import compiling
from uniclip.limits.base import (
    Array,
    BuiltIn,
    Context,
    Limit,
    NoState,
    State,
    StatefulLimit,
    align,
    unlimited,
)

_NAMED = 10
"""The number of labels listed in an error."""


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

    def __post_init__(self) -> None:
        """Validate the limit."""
        set_frozen_fields(self, value=nonnegatives("max_norm, the limit,", self.value, LIMIT))

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether it is one number, and so the same for norms of any shape."""
        return not getattr(self.value, "shape", ())

    def __call__(self, norms: Array, state: NoState, context: Context) -> tuple[Array, NoState]:
        """Return the value, the same for every norm."""
        return self.value, state


class Counted(NamedTuple):
    """The number of steps taken."""

    norm_count: Array


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

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        """Validate the function."""
        check("fn", self.fn, callable(self.fn), "a function of the step")

    def init(self, norms: Array, context: Context) -> Counted:
        """Begin at step 0."""
        return Counted(context.asarray(0, context.xp.int32))

    def __call__(self, norms: Array, state: Counted, context: Context) -> tuple[Array, Counted]:
        """Call the function."""
        return self.fn(context.xp.astype(state.norm_count, context.xp.float32)), Counted(
            state.norm_count + 1
        )


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
    counts: Any = None

    needs: ClassVar[frozenset[str]] = frozenset({"params"})

    def __post_init__(self) -> None:
        """Validate the ratio."""
        set_frozen_fields(
            self, ratio=nonnegative("ratio", self.ratio), eps=nonnegative("eps", self.eps)
        )
        wanted = "an array, one number for each norm"
        check("counts", self.counts, self.counts is None or hasattr(self.counts, "shape"), wanted)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether no counts have the shape of the norms."""
        return self.counts is None

    def __call__(self, norms: Array, state: NoState, context: Context) -> tuple[Array, NoState]:
        """Return limits relative to the parameters."""
        xp, w = context.xp, context.params
        limits = self.ratio * xp.where(w > self.eps, w, self.eps)
        return (limits if self.counts is None else limits * self._counted(limits, context)), state

    def _counted(self, limits: Array, context: Context) -> Array:
        counts = context.asarray(self.counts, limits.dtype)
        if tuple(counts.shape) != tuple(limits.shape)[1:]:
            msg = (
                f"counts of shape {tuple(counts.shape)} do not fit norms of shape "
                f"{tuple(limits.shape)[1:]}"
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

    def __post_init__(self) -> None:
        """Refuse negative values."""
        for name in ("lr", "trust_coefficient", "weight_decay"):
            set_frozen_fields(self, **{name: nonnegative(name, getattr(self, name))})

    def __call__(self, norms: Array, state: NoState, context: Context) -> tuple[Array, NoState]:
        """Return limits relative to the parameters; a parameter of zeros limits nothing."""
        xp, w = context.xp, context.params
        share = 1 / (1 + self.weight_decay * w / xp.where(norms > 0, norms, 1.0))
        return xp.where(
            w > 0, self.trust_coefficient * w / self.lr * share, unlimited(xp, norms)
        ), state


@dataclass(frozen=True, repr=False)
class Split(BuiltIn):
    """Split a total among K norms, so that their joint norm is at most the total.

    Parameters
    ----------
    total : float or 0-d array
        The largest joint norm.
    by_size : bool, default False
        Give each norm ``total·√(D/ΣD)``, D its number of entries, instead of ``total/√K``.

    Examples
    --------
    >>> rule = uc.Rule(uc.limits.Split(2.0), scope=uc.scopes.each_leaf)
    >>> uc.clip([np.asarray([float(n)]) for n in (1, 2, 3, 4)], rule)[0]
    [array([1.]), array([1.]), array([1.]), array([1.])]
    """

    total: Number
    by_size: bool = False

    def __post_init__(self) -> None:
        """Validate the limit."""
        set_frozen_fields(
            self,
            total=nonnegative("total", self.total, LIMIT),
            by_size=flag("by_size", self.by_size),
        )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The sizes, if the total is split by size."""
        return frozenset({"sizes"} if self.by_size else ())

    def __call__(self, norms: Array, state: NoState, context: Context) -> tuple[Array, NoState]:
        """Split the total."""
        if not self.by_size:
            count = context.count
            count = (
                max(count, 1) if isinstance(count, int) else context.xp.where(count > 0, count, 1.0)
            )
            return self.total * count**-0.5, state
        entries = context.asarray(context.total(lambda one: one.sizes))
        share = context.sizes / context.xp.where(entries > 0, entries, 1.0)
        return self.total * share**0.5, state


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
        check(
            "limits",
            self.limits,
            isinstance(self.limits, (Mapping, tuple)),
            "a mapping of label to limit",
        )
        pairs = self.limits.items() if isinstance(self.limits, Mapping) else self.limits
        set_frozen_fields(self, limits=tuple((label, as_limit(limit)) for label, limit in pairs))

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return source text that evaluates to an equal limit."""
        pairs = [(label, one.value if type(one) is Constant else one) for label, one in self.limits]
        return (
            "uc.limits.PerGroup({"
            f"{', '.join(f'{show(label)}: {show(one)}' for label, one in pairs)}"
            "})"
        )

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether one of the limits has memory."""
        return any(limit.stateful for _, limit in self.limits)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What the limits use beside the norms."""
        return frozenset().union(*(limit.needs for _, limit in self.limits))

    @property
    def groups(self) -> list[Any]:  # type: ignore[override]
        """The labels."""
        return [label for label, _ in self.limits]

    @property
    def constants(self) -> list[Any]:
        """The numbers and arrays among the limits."""
        return [limit.value for _, limit in self.limits if isinstance(limit, Constant)]

    def init(self, norms: Array, context: Context) -> State:
        """Return the state of each group's limit."""
        rows = self._rows(self._chosen(context), context)
        return tuple(limit.init(row.norms, row) for limit, row in rows)

    def __call__(self, norms: Array, state: State, context: Context) -> tuple[Array, State]:
        """Call each group's limit."""
        limits = self._chosen(context)
        top = float(context.xp.finfo(norms.dtype).max)
        constant = all(
            [type(limit) is Constant and isinstance(limit.value, (float, int)) for limit in limits]
        )
        # where a number that changes must not become part of an array
        if constant and not compiling():
            values = context.constant([float(min(limit.value, top)) for limit in limits])
            return align(context.xp, values, norms), state
        states = state if self.stateful else [NoState()] * len(limits)
        rows = self._rows(limits, context)
        # Not `limit(...)`, as in `uniclip._core.step`.
        answers = [
            limit.__call__(row.norms, one, row)
            for (limit, row), one in zip(rows, states, strict=True)
        ]
        each = [
            _like_norms(limit, top, row) for (limit, _), (_, row) in zip(answers, rows, strict=True)
        ]
        if any([row.threshold is not None for _, row in rows]):
            own = [
                one if row.threshold is None else row.threshold
                for one, (_, row) in zip(each, rows, strict=True)
            ]
            like = [_like_norms(one, top, row) for one, (_, row) in zip(own, rows, strict=True)]
            context.threshold = context.xp.concat(like, axis=0)
        return context.xp.concat(each, axis=0), tuple(
            new for _, new in answers
        ) if self.stateful else state

    def _rows(self, limits: list[Limit], context: Context) -> list[tuple[Limit, Context]]:
        return [(limit, context.row(number)) for number, limit in enumerate(limits)]

    def _chosen(self, context: Context) -> list[Any]:
        """Return the limit of each group; groups whose gradients are absent need none."""
        absent = [
            label for label, gone in zip(context.labels, context.absent, strict=False) if gone
        ]
        limits: dict[Any, Limit] = {
            **dict.fromkeys(absent, Constant(math.inf)),
            **dict(self.limits),
        }
        for label in context.labels:
            if label not in limits:
                hint = (
                    "; PerGroup needs a scope of groups, scope=uc.scopes.groups(label)"
                    if label is None
                    else ""
                )
                known = ", ".join(map(summarize, list(limits)[:_NAMED])) + ", ..." * (
                    len(limits) > _NAMED
                )
                msg = (
                    f"group {summarize(label)} has no limit: add it to [{known}] (math.inf leaves it "
                    f"alone){hint}"
                )
                raise ValueError(msg)
        return [limits[label] for label in context.labels]


def _like_norms(limit: Any, top: float, context: Context) -> Array:
    """Return a number (at most ``top``) or an array, in the shape and dtype of the norms."""
    zeros = context.xp.zeros_like(context.norms)
    if not isinstance(limit, (float, int)):
        return zeros + context.asarray(limit)
    # PyTorch's compiler makes constants of what `min` returns, and compiles anew for each number.
    return zeros + float(top if limit > top else limit)  # noqa: FURB136


def as_limit(value: Any) -> Limit:
    """Return a limit as it is, a number or an array as a constant limit."""
    if isinstance(value, Limit):
        return value
    # Checked first, since a compiler cannot tell what else they are.
    if not isinstance(value, (float, int)):
        fits = not callable(value) and not hasattr(value, "stateful")
        called = isinstance(value, type) and issubclass(value, Limit)
        hint = f" (call the class, {value.__name__}(...))" if called else " (of a rule, rule.limit)"
        check("max_norm, the limit,", value, fits, f"a number, a 0-d array or a uc.Limit{hint}")
    return Constant(value)
