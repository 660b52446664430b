# SPDX-License-Identifier: MIT
"""What may be given to uniclip, for type checkers and editors; nothing looks at these types when code runs.

They are protocols: checkers are to find mistakes also where a framework is not installed and its classes are unknown.
What uniclip measures is an array of the gradients' framework, and ``Any``: no type says which framework that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from uniclip.limits.base import Limit

if TYPE_CHECKING:
    from uniclip.measure import AllReduce
    from uniclip.report import Report

T = TypeVar("T")
"""A tree of arrays, which comes back as it went in."""


class Array(Protocol):
    """An array of any framework."""

    @property
    def shape(self) -> Iterable[Any]:
        """Its lengths; of a network, which seems to have every attribute, they could not be iterated over."""

    @property
    def dtype(self) -> Any:
        """Its data type."""


class RuleLike(Protocol):
    """What every rule has."""

    @property
    def memory(self) -> bool:
        """Whether the rule remembers earlier steps."""

    @property
    def by_leaf(self) -> bool:
        """Whether the state knows leaves by their order."""

    def init(self, grads: Any) -> Any:
        """Return the state before the first step."""

    def update(
        self,
        grads: T,
        state: Any,
        params: Any = None,
        all_reduce: AllReduce | None = None,
        *,
        in_place: bool = False,
        loss: Any = None,
    ) -> tuple[T, Any, Report]:
        """Clip, and return the next state, too."""


Number: TypeAlias = float | Array
MaxNorm: TypeAlias = float | Array | Limit
AnyRule: TypeAlias = RuleLike | Callable[[Any], Array]
"""A rule, or a function of one gradient array; a preset that was not called is a function too, but returns no array."""
