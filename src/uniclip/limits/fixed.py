# SPDX-License-Identifier: MIT
"""Limits that are given, or follow from the step, the parameters or the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from uniclip._checks import LIMIT, check, flag, nonnegative, nonnegatives, settle
from uniclip._repr import Printed, short
from uniclip.limits.base import Arrays, Given, Limit, NoState, Remembers, State, unlimited

_NAMED = 10
"""How many labels an error names."""


@dataclass(frozen=True, repr=False)
class Constant(Printed, Limit):
    """Allow the same norm at every step.

    Parameters
    ----------
    value : float or array
        At least 0; a 0-d array may be traced, so that changing it recompiles nothing.
    """

    value: Any

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        settle(self, value=nonnegatives("limit", self.value, LIMIT))

    def __call__(
        self,
        norms: Arrays,
        state: NoState,
        given: Given,  # noqa: ARG002 - the signature of a limit
    ) -> tuple[Arrays, NoState]:
        """Return the value once for each norm."""
        return [self.value] * len(norms), state


class Counted(NamedTuple):
    """How many steps were taken."""

    count: Any


@dataclass(frozen=True, repr=False)
class Schedule(Remembers):
    """Allow ``fn(step)``, the same for every norm.

    Parameters
    ----------
    fn : callable
        Gets the number of steps before this one, a float32 0-d array (traced in compiled code), and
        returns a number or a 0-d array. Steps that are not finite are not counted.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.by_global_norm(uc.Schedule(lambda step: 1.0 + 4.0 * 0.5**step)))
    >>> [clipper(np.asarray([300.0])).item() for _ in range(3)]
    [5.0, 3.0, 2.0]
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        """Refuse what is no function."""
        check("fn", self.fn, callable(self.fn), "a function of the step")

    def init(self, norms: Arrays, given: Given) -> Counted:
        """Begin at step 0."""
        return Counted(given.counter(norms))

    def __call__(self, norms: Arrays, state: Counted, given: Given) -> tuple[Arrays, Counted]:
        """Ask the function."""
        limit = self.fn(given.xp.astype(state.count, given.xp.float32))
        return [limit] * len(norms), Counted(state.count + 1)


@dataclass(frozen=True, repr=False)
class Relative(Printed, Limit):
    """Allow ``ratio · max(‖parameter‖, eps)``: the gradient's norm is compared with its parameter's.

    Parameters
    ----------
    ratio : float or 0-d array
        At least 0.
    eps : float or 0-d array, default 1e-3
        The least norm of a parameter that counts, or one that is zero could never change.
    counts : array, optional
        One number for each norm, of the norms' shape, to multiply its limit by.
    """

    ratio: Any
    eps: Any = 1e-3
    counts: Any = None

    def __post_init__(self) -> None:
        """Refuse what is no ratio."""
        settle(self, ratio=nonnegative("ratio", self.ratio), eps=nonnegative("eps", self.eps))
        wanted = "an array, one number for each norm"
        check("counts", self.counts, self.counts is None or hasattr(self.counts, "shape"), wanted)

    def __call__(
        self,
        norms: Arrays,  # noqa: ARG002 - the signature of a limit
        state: NoState,
        given: Given,
    ) -> tuple[Arrays, NoState]:
        """Measure the parameters."""
        xp = given.xp
        limits = [self.ratio * xp.where(w > self.eps, w, xp.ones_like(w) * self.eps) for w in given.reference()]
        return [limit * self._counted(given, limit) for limit in limits], state

    def _counted(self, given: Given, limit: Any) -> Any:
        if self.counts is None:
            return 1
        counts = given.place(limit, given.xp.asarray(self.counts, dtype=limit.dtype))
        if tuple(counts.shape) != tuple(limit.shape):
            msg = f"counts of shape {tuple(counts.shape)} do not fit norms of shape {tuple(limit.shape)}"
            raise ValueError(msg)
        return counts


@dataclass(frozen=True, repr=False)
class TrustRatio(Printed, Limit):
    """Allow a step of ``trust_coefficient · ‖parameter‖`` at the learning rate ``lr``: LARC's clip.

    Parameters
    ----------
    lr : float or 0-d array
        The learning rate that the optimizer multiplies by.
    trust_coefficient : float
        How long a step may be beside its parameter.
    weight_decay : float
        What the optimizer adds to the gradient: the factor is for both together.
    """

    lr: Any
    trust_coefficient: float
    weight_decay: float

    def __post_init__(self) -> None:
        """Refuse what is negative."""
        for name in ("lr", "trust_coefficient", "weight_decay"):
            settle(self, **{name: nonnegative(name, getattr(self, name))})

    def __call__(self, norms: Arrays, state: NoState, given: Given) -> tuple[Arrays, NoState]:
        """Measure the parameters; one that is zero limits nothing."""
        xp, limits = given.xp, []
        for n, w in zip(norms, given.reference(), strict=True):
            share = 1 / (1 + self.weight_decay * w / xp.where(n > 0, n, xp.ones_like(n)))
            limits.append(xp.where(w > 0, self.trust_coefficient * w / self.lr * share, unlimited(xp, n)))
        return limits, state


@dataclass(frozen=True, repr=False)
class Split(Printed, Limit):
    """Split a total among K norms, so that the norm of all of them together is within it.

    Parameters
    ----------
    total : float or 0-d array
        The largest joint norm.
    by_size : bool, default False
        Give each norm ``total·√(D/ΣD)``, D its number of entries, instead of ``total/√K``.
    """

    total: Any
    by_size: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        settle(self, total=nonnegative("total", self.total, LIMIT), by_size=flag("by_size", self.by_size))

    def __call__(self, norms: Arrays, state: NoState, given: Given) -> tuple[Arrays, NoState]:
        """Split the total."""
        if not self.by_size:
            return [self.total * len(norms) ** -0.5 * given.xp.ones_like(n) for n in norms], state
        sizes = given.sizes()
        return [self.total * (size / _sum(given, size, sizes)) ** 0.5 for size in sizes], state


def _sum(given: Given, like: Any, sizes: Arrays) -> Any:
    return sum(given.xp.astype(given.place(like, size), like.dtype) for size in sizes)


@dataclass(frozen=True, repr=False)
class PerGroup(Printed, Limit):
    """Give each group of the scope `uniclip.groups` a limit of its own.

    Parameters
    ----------
    limits : mapping of label to float, array or Limit
        One for each label that occurs; ``math.inf`` leaves a group alone.
    """

    limits: Any

    def __post_init__(self) -> None:
        """Read numbers as constant limits, and keep what can be hashed."""
        check("limits", self.limits, isinstance(self.limits, (Mapping, tuple)), "a mapping of label to limit")
        pairs = self.limits.items() if isinstance(self.limits, Mapping) else self.limits
        settle(self, limits=tuple((label, as_limit(limit)) for label, limit in pairs))

    @property
    def memory(self) -> bool:  # type: ignore[override]
        """Whether one of the limits remembers."""
        return any(limit.memory for _, limit in self.limits)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What the limits look at."""
        return frozenset().union(*(limit.needs for _, limit in self.limits))

    def init(self, norms: Arrays, given: Given) -> State:
        """Return the state of each group's limit."""
        parts = self._parts(norms, given)
        return [limit.init([n], part) for limit, n, part in parts]

    def __call__(self, norms: Arrays, state: State, given: Given) -> tuple[Arrays, State]:
        """Ask each group's limit."""
        states = state if self.memory else [NoState()] * len(norms)
        answers = [
            limit([n], one, part) for (limit, n, part), one in zip(self._parts(norms, given), states, strict=True)
        ]
        return [limits[0] for limits, _ in answers], [new for _, new in answers] if self.memory else state

    def _parts(self, norms: Arrays, given: Given) -> list[tuple[Limit, Any, Given]]:
        limits: dict[Any, Limit] = dict(self.limits)
        found: dict[str, Arrays] = {}

        def once(name: str) -> Arrays:  # not anew for each group
            if name not in found:
                found[name] = getattr(given, name)()
            return found[name]

        shared = given._replace(reference=partial(once, "reference"), sizes=partial(once, "sizes"))
        for label in given.labels:
            if label not in limits:
                hint = "; PerGroup needs a scope of groups, scope=uc.groups(label)" if label is None else ""
                known = ", ".join(map(short, list(limits)[:_NAMED])) + ", ..." * (len(limits) > _NAMED)
                msg = f"group {short(label)} has no limit: add it to [{known}] (math.inf leaves it alone){hint}"
                raise ValueError(msg)
        return [
            (limits[label], n, shared.only(i)) for i, (label, n) in enumerate(zip(given.labels, norms, strict=True))
        ]


def as_limit(value: Any) -> Limit:
    """Return a limit as it is, a number or an array as a constant one."""
    if isinstance(value, Limit):
        return value
    if not isinstance(value, (float, int)):  # of which a compiler does not know what else they are
        fits = not callable(value) and not hasattr(value, "memory")
        check("limit", value, fits, "a number, a 0-d array or a uc.Limit (of a rule, rule.limit)")
    return Constant(value)
