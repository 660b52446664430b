# SPDX-License-Identifier: MIT
"""Arrays of which several processes or devices hold parts: what the core needs of libraries that have them.

Any library can join parts by a function, ``all_reduce``: for that it needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeAlias

Op: TypeAlias = Literal["sum", "max"]
Reduce: TypeAlias = Callable[[Any, Op], Any]


class Processes:
    """The defaults are those of a library whose arrays lie in one process, on one device."""

    joins_by = "a function of (array, op)"
    """The kinds of ``all_reduce`` that are taken."""

    def local(self, arrays: list[Any]) -> tuple[list[Any], list[Any] | None]:
        """Return what this process holds of each array (or ``None``), and which part that is; ``None`` for all.

        A part has the attributes and methods of `uniclip.backends.dtensor.Part`.
        """
        return arrays, None

    def divided_as(self, leaf: Any, part: Any) -> Any:
        """Return what this process holds of a leaf that is divided as a part of another is; for ``None`` all of it."""
        return leaf

    def varied(self, array: Any, all_reduce: Any) -> Any:
        """Return a value as one that may differ along all axes of ``all_reduce``, so that one reduction joins many."""
        return array

    def replicated(self, array: Any, operand: Any) -> Any:
        """Return an operand, the same in all processes, as one that can be combined with a distributed ``array``."""
        return operand

    def reducer(self, all_reduce: Any) -> Reduce | None:
        """Return a function that reduces over the parts of a tree, ``None`` if ``all_reduce`` is not of these kinds."""
        return None

    def copies(
        self,
        arrays: list[Any],
        all_reduce: Any,
        shared: list[bool] | None,
        place: Callable[[int], str],
    ) -> list[int] | None:
        """Return how many members of ``all_reduce`` hold each array, where the arrays' types tell; ``None`` for one."""
        return None

    def varying(self, arrays: list[Any]) -> Hashable:
        """Return the named axes along which arrays vary from device to device: norms that differ are not stacked."""
        return None

    def unsharded(self, array: Any) -> bool:
        """Whether an array is known to be whole on each of its devices, so that others may be copied into it."""
        return True

    def rank(self) -> int:
        """Return the number of this process in a run over several."""
        return 0
