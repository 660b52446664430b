# SPDX-License-Identifier: MIT
"""What may be given to uniclip, for type checkers and editors; nothing looks at these types when code runs.

They are protocols: checkers are to find mistakes also where a framework is not installed and its classes are unknown.
What uniclip measures is an array of the gradients' framework, and ``Any``: no type says which framework that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

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


Number: TypeAlias = float | Array
