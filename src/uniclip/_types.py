# SPDX-License-Identifier: MIT
"""Types of arguments, for type checkers and editors.

They are protocols, so that checkers find mistakes also where a framework is not installed. Results
such as norms are ``Any``: they are arrays of the gradients' framework, which no type can express.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
"""A tree of arrays, which is returned with the same structure."""


class Array(Protocol):
    """An array of any framework."""

    @property
    def shape(self) -> Iterable[Any]:
        """The lengths of the axes.

        A network, which seems to have every attribute, could not be iterated over.
        """

    @property
    def dtype(self) -> Any:
        """The data type."""


Number: TypeAlias = float | Array
NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]
"""Policies for gradients that hold NaN or ∞, or whose norm overflows its dtype,
see `uniclip.rule`.
"""
Path: TypeAlias = tuple[Any, ...]
"""The keys that lead to a leaf of a tree."""


class Step(NamedTuple):
    """The optional arguments of a step."""

    params: Any = None
    all_reduce: Any = None
    loss: Any = None
    norm: Any = None
    """The norm, if it is given."""
    in_place: bool = False
    shared: Any = None

    @property
    def alone(self) -> bool:
        """Whether no other process takes part."""
        return self.all_reduce is None
