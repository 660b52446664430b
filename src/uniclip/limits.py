# SPDX-License-Identifier: MIT
"""Third choice, the limit: how large a norm may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from uniclip._repr import Printed

Arrays: TypeAlias = list[Any]
State: TypeAlias = Any
T = TypeVar("T")


class NoState(NamedTuple):
    """The state of a rule that remembers nothing."""


class Limit:
    """How large norms may be; one without memory is its ``__call__`` alone.

    Examples
    --------
    >>> class Relative(uc.Limit):
    ...     def __call__(self, norms, state, reference):
    ...         return [0.01 * norm for norm in reference()], state
    >>> rule = uc.Rule(Relative(), scope=uc.each_leaf)
    >>> uc.clip(np.asarray([3.0, 4.0]), rule, params=np.asarray([0.0, 100.0]))[0]
    array([0.6, 0.8])
    """

    memory: ClassVar[bool] = False
    """Whether the state changes from step to step; if so, `init` makes the first one."""

    def init(self, norms: Arrays) -> State:  # noqa: ARG002 - a limit with memory wants it
        """Return the state before the first step, given norms of the right number, shapes and dtypes."""
        return NoState()

    def __call__(self, norms: Arrays, state: State, reference: Callable[[], Arrays]) -> tuple[Arrays, State]:
        """Return one limit for each norm, and the next state.

        Parameters
        ----------
        norms : list of arrays
            The norms just measured, one for each group in the order of the tree (the keys of a dict
            sorted), in float32 or wider; 0-d, or of the shape of the axes that a norm does not cover.
            A norm that is not finite is NaN here.
        state : tree of arrays, such as a NamedTuple
            What `init` or the step before returned.
        reference : callable
            ``reference()`` measures the parameters by the rule's own scope and norm; it raises a
            ``ValueError`` if the caller gave no ``params``.

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
        reference: Callable[[], Arrays],  # noqa: ARG002 - the signature of a limit
    ) -> tuple[Arrays, NoState]:
        """Return the value once for each norm."""
        return [self.value] * len(norms), state
