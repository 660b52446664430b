# SPDX-License-Identifier: MIT
"""Third choice, the limit: how large a norm may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from uniclip._repr import Printed

Arrays: TypeAlias = list[Any]
State: TypeAlias = Any
T = TypeVar("T")


class NoState(NamedTuple):
    """The state of a rule that remembers nothing."""


class Limit(Protocol):
    """What a rule asks of a limit: an initial state, and the limits for the norms just measured."""

    memory: ClassVar[bool]
    """Whether the state changes from step to step."""

    def init(self, norms: Arrays) -> State:
        """Return the state before the first step, given norms of the right number, shape and dtype."""

    def __call__(self, norms: Arrays, state: State, reference: Callable[[], Arrays]) -> tuple[Arrays, State]:
        """Return one limit for each norm (infinity leaves alone) and the next state.

        ``reference()`` measures the parameters by the rule's own scope and norm; it raises a
        ``ValueError`` if the caller gave no ``params``.
        """


def nonnegative(name: str, value: T) -> T:
    """Return ``value`` unless it is no number or array, or a number that is negative or NaN."""
    if not isinstance(value, Real) and not hasattr(value, "dtype"):
        msg = f"{name} must be a number or a 0-d array (math.inf only measures the gradients), got {value!r}"
        raise TypeError(msg)
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more (0 zeroes the gradients, math.inf only measures them), got {value!r}"
        raise ValueError(msg)
    return value


@dataclass(frozen=True, repr=False)
class Constant(Printed):
    """Allow the same norm at every step.

    Parameters
    ----------
    value : float or array
        At least 0; a 0-d array may be traced, so that changing it recompiles nothing.
    """

    memory: ClassVar[bool] = False
    value: Any

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        nonnegative("limit", self.value)

    def init(self, norms: Arrays) -> NoState:  # noqa: ARG002 - the signature of a limit
        """Return the empty state."""
        return NoState()

    def __call__(
        self,
        norms: Arrays,
        state: NoState,
        reference: Callable[[], Arrays],  # noqa: ARG002 - the signature of a limit
    ) -> tuple[Arrays, NoState]:
        """Return the value once for each norm."""
        return [self.value] * len(norms), state
