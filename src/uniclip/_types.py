# SPDX-License-Identifier: MIT
"""Types of arguments, for type checkers and editors; not used at run time.

They are protocols, so that checkers find mistakes also where a framework is not installed. Results such as norms are
``Any``: they are arrays of the gradients' framework, which no type can express.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
"""A tree of arrays, which is returned with the same structure."""


class Array(Protocol):
    """An array of any framework."""

    @property
    def shape(self) -> Iterable[Any]:
        """The lengths of the axes. A network, which seems to have every attribute, could not be iterated over."""

    @property
    def dtype(self) -> Any:
        """The data type."""


Number: TypeAlias = float | Array
