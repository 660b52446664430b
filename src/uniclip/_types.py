# SPDX-License-Identifier: MIT
"""Types of arguments and results, for readers, type checkers and editors.

A framework's arrays share no base class, so arrays are protocols: checkers find mistakes even if
the framework is not installed. What an array API namespace returns is not typed.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:
    from typing import TypeVar

T = TypeVar("T")
"""A tree of arrays, which is returned with the same structure."""

Tree: TypeAlias = object
"""A tree of arrays: any nesting of containers, or a single array."""


class Array(Protocol):
    """An array of any framework, as an argument."""

    @property
    def shape(self) -> Iterable[Any]:
        """The lengths of the axes.

        A network, which seems to have every attribute, could not be iterated over.
        """

    @property
    def dtype(self) -> Any:
        """The data type."""


class Tensor(Array, Protocol):
    """An array with the operators of the array API standard, which the core computes with."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes."""

    def __getitem__(self, key: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __radd__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __rmul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __rtruediv__(self, other: Any, /) -> Any: ...
    def __pow__(self, other: Any, /) -> Any: ...
    def __rpow__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...
    def __bool__(self) -> bool: ...


Norms: TypeAlias = Tensor
"""The norms of a block, of shape ``(k, *kept)``: one row for each group."""

Limits: TypeAlias = Tensor
"""The limits of a block, which broadcast against its norms."""

Factors: TypeAlias = Tensor
"""The factors of a block, in the shape of its norms."""

Flags: TypeAlias = Tensor
"""Booleans in the shape of norms, or one for all."""

State: TypeAlias = tuple[Any, ...]
"""The state of a limit: a named tuple of arrays; several blocks of norms have a tuple of these."""

Namespace: TypeAlias = ModuleType
"""An array API namespace."""

if TYPE_CHECKING:
    A = TypeVar("A", bound=Tensor, default=Any)
else:
    A = TypeVar("A")
"""The class of the arrays of a library."""

View: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array, which may be a view of the memory of any framework's array."""

Axes: TypeAlias = tuple[int, ...] | None
"""The axes along which a norm is taken, ``None`` for all."""

Op: TypeAlias = Literal["sum", "max"]
"""A reduction."""

DType: TypeAlias = object
"""A data type of a framework."""

Device: TypeAlias = object
"""A device of a framework, ``None`` if it has one only."""

Number: TypeAlias = float | Array
NonFinite: TypeAlias = Literal["propagate", "skip", "zero", "raise"]
"""Policies for gradients with NaN or ∞, or with a norm that overflows, see `uniclip.Rule`."""
Path: TypeAlias = tuple[Any, ...]
"""The keys that lead to a leaf of a tree."""


class StepOptions(NamedTuple):
    """The optional arguments of a step."""

    params: Tree = None
    all_reduce: Any = None
    loss: Any = None
    norm: Any = None
    """The norm, if it is given."""
    in_place: bool = False
    shared: Any = None

    @property
    def single_process(self) -> bool:
        """Whether no other process takes part."""
        return self.all_reduce is None
