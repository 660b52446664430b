# SPDX-License-Identifier: MIT
"""Third choice, the limit: how large a norm may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from uniclip._repr import Printed

if TYPE_CHECKING:
    from uniclip.backends import Backend

Arrays: TypeAlias = list[Any]
State: TypeAlias = Any
T = TypeVar("T")


class NoState(NamedTuple):
    """The state of a rule that remembers nothing."""


class Given(NamedTuple):
    """What a limit may ask for beside the norms."""

    backend: Backend
    labels: list[Any]
    """The label of each norm's group; ``None`` or a number where leaves are not grouped by labels."""
    reference: Callable[[], Arrays]
    """``reference()`` measures the parameters by the rule's own scope and norm; a ``ValueError`` without ``params``."""
    sizes: Callable[[], Arrays]
    """``sizes()`` counts the entries that each norm covers."""
    loss: Any = None
    """The loss of this step, if the caller gave it."""

    @property
    def xp(self) -> Any:
        """The array API namespace of the norms."""
        return self.backend.xp

    def only(self, number: int) -> Given:
        """Return the same for one of the norms."""
        return self._replace(
            labels=[self.labels[number]],
            reference=lambda: [self.reference()[number]],
            sizes=lambda: [self.sizes()[number]],
        )

    def place(self, norms: Arrays, array: Any) -> Any:
        """Return an array on the device of the norms."""
        return self.backend.to_device_of(norms[0], array) if norms else array

    def counter(self, norms: Arrays) -> Any:
        """Return the number of steps before the first one: an int32 0."""
        return self.place(norms, self.xp.zeros((), dtype=self.xp.int32))


class Limit:
    """How large norms may be; one without memory is its ``__call__`` alone.

    Examples
    --------
    >>> class Tenth(uc.Limit):
    ...     def __call__(self, norms, state, given):
    ...         return [0.1 * norm for norm in given.reference()], state
    >>> rule = uc.Rule(Tenth(), scope=uc.each_leaf)
    >>> uc.clip(np.asarray([3.0, 4.0]), rule, params=np.asarray([0.0, 10.0]))[0]
    array([0.6, 0.8])
    """

    memory: ClassVar[bool] = False
    """Whether the state changes from step to step; if so, `init` makes the first one."""

    def init(self, norms: Arrays, given: Given) -> State:  # noqa: ARG002 - a limit with memory wants them
        """Return the state before the first step, given zeros for norms."""
        return NoState()

    def __call__(self, norms: Arrays, state: State, given: Given) -> tuple[Arrays, State]:
        """Return one limit for each norm, and the next state.

        Parameters
        ----------
        norms : list of arrays
            The norms just measured, one for each group in the order of the tree (the keys of a dict
            sorted), in float32 or wider; 0-d, or of the shape of the axes that a norm does not cover.
            A norm that is not finite is NaN here.
        state : tree of arrays, such as a NamedTuple
            What `init` or the step before returned.
        given : Given
            The array API namespace ``given.xp``, the norms of the parameters ``given.reference()``, the
            numbers of entries ``given.sizes()``, the ``given.labels`` of groups, and ``given.loss``.

        Returns
        -------
        limits : list of floats or arrays
            Infinity leaves alone.
        state : tree of arrays
            Of the same shapes and dtypes. After a step that is not finite, the old one is kept.
        """
        raise NotImplementedError


def nonnegative(name: str, value: T) -> T:
    """Return ``value`` unless it is no number or array, or a number that is negative or NaN."""
    if isinstance(value, float) and value >= 0:
        return value
    if not isinstance(value, Real) and not hasattr(value, "dtype"):
        msg = f"{name} must be a number or a 0-d array (math.inf only measures the gradients), got {value!r}"
        raise TypeError(msg)
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more (0 zeroes the gradients, math.inf only measures them), got {value!r}"
        raise ValueError(msg)
    return value


def within(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number that is out of range."""
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        msg = f"{name} must be {allowed}, got {value!r}"
        raise ValueError(msg)


def positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0."""
    if not value > 0:
        msg = f"{name} must be above 0, got {value!r}"
        raise ValueError(msg)


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
        nonnegative("limit", self.value)

    def __call__(
        self,
        norms: Arrays,
        state: NoState,
        given: Given,  # noqa: ARG002 - the signature of a limit
    ) -> tuple[Arrays, NoState]:
        """Return the value once for each norm."""
        return [self.value] * len(norms), state


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
        nonnegative("ratio", self.ratio)
        nonnegative("eps", self.eps)

    def __call__(
        self,
        norms: Arrays,  # noqa: ARG002 - the signature of a limit
        state: NoState,
        given: Given,
    ) -> tuple[Arrays, NoState]:
        """Measure the parameters."""
        xp = given.xp
        limits = [self.ratio * xp.where(n > self.eps, n, xp.ones_like(n) * self.eps) for n in given.reference()]
        return [limit * self._counted(given, limit) for limit in limits], state

    def _counted(self, given: Given, limit: Any) -> Any:
        if self.counts is None:
            return 1
        counts = given.place([limit], given.xp.asarray(self.counts, dtype=limit.dtype))
        if tuple(counts.shape) != tuple(limit.shape):
            msg = f"counts of shape {tuple(counts.shape)} do not fit norms of shape {tuple(limit.shape)}"
            raise ValueError(msg)
        return counts


@dataclass(frozen=True, repr=False)
class TrustRatio(Printed, Limit):
    """Allow a step of ``trust · ‖parameter‖`` at the learning rate ``lr``: LARC's clip.

    Parameters
    ----------
    lr : float or 0-d array
        The learning rate that the optimizer multiplies by.
    trust : float, default 0.02
        How long a step may be beside its parameter.
    weight_decay : float, default 0
        What the optimizer adds to the gradient: the factor is for both together.
    """

    lr: Any
    trust: float = 0.02
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is negative."""
        for name in ("lr", "trust", "weight_decay"):
            nonnegative(name, getattr(self, name))

    def __call__(self, norms: Arrays, state: NoState, given: Given) -> tuple[Arrays, NoState]:
        """Measure the parameters; one that is zero limits nothing."""
        xp, limits = given.xp, []
        for n, size in zip(norms, given.reference(), strict=True):
            share = 1 / (1 + self.weight_decay * size / xp.where(n > 0, n, xp.ones_like(n)))
            limits.append(xp.where(size > 0, self.trust * size / self.lr * share, xp.ones_like(n) * math.inf))
        return limits, state


@dataclass(frozen=True, repr=False)
class Shared(Printed, Limit):
    """Share a total among K norms, so that the norm of all of them together is within it.

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
        nonnegative("total", self.total)

    def __call__(self, norms: Arrays, state: NoState, given: Given) -> tuple[Arrays, NoState]:
        """Share the total."""
        sizes = given.sizes() if self.by_size else [n * 0 + 1 for n in norms]
        return [self.total * (size / sum(sizes)) ** 0.5 for size in sizes], state


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
        pairs = self.limits.items() if isinstance(self.limits, Mapping) else self.limits
        object.__setattr__(self, "limits", tuple((label, as_limit(limit)) for label, limit in pairs))

    @property
    def memory(self) -> bool:  # type: ignore[override]
        """Whether one of the limits remembers."""
        return any(limit.memory for _, limit in self.limits)

    def init(self, norms: Arrays, given: Given) -> State:
        """Return the state of each group's limit."""
        parts = self._parts(norms, given)
        return [limit.init([n], part) for limit, n, part in parts]

    def __call__(self, norms: Arrays, state: State, given: Given) -> tuple[Arrays, State]:
        """Ask each group's limit."""
        states = state or [NoState()] * len(norms)
        answers = [
            limit([n], one, part) for (limit, n, part), one in zip(self._parts(norms, given), states, strict=True)
        ]
        return [limits[0] for limits, _ in answers], [new for _, new in answers] if state else state

    def _parts(self, norms: Arrays, given: Given) -> list[tuple[Limit, Any, Given]]:
        limits = dict(self.limits)
        for label in given.labels:
            if label not in limits:
                msg = f"group {label!r} has no limit: add it to {sorted(map(str, limits))} (math.inf leaves it alone)"
                raise ValueError(msg)
        return [(limits[label], n, given.only(i)) for i, (label, n) in enumerate(zip(given.labels, norms, strict=True))]


def as_limit(value: Any) -> Limit:
    """Return a limit as it is, a number or an array as a constant one."""
    return value if isinstance(value, Limit) else Constant(value)
