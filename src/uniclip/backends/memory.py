# SPDX-License-Identifier: MIT
"""Change arrays in place: what the core needs of libraries whose arrays are mutable, and which arrays share memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

View: TypeAlias = np.ndarray[Any, Any]
"""An array of NumPy that stands for one of any framework."""


class InPlace:
    """The defaults are those of a library whose arrays never change; others override both."""

    writes = False
    """Whether arrays can be written at all."""

    def disjoint(self, leaves: list[Any]) -> bool:
        """Whether a quick check shows that the leaves are writable and share no memory."""
        return False

    def disjoint_dense(self, leaves: list[Any]) -> bool:
        """Do as `disjoint`, for dense arrays that record no derivatives."""
        return self.disjoint(leaves)

    def memory(self, leaf: Any) -> tuple[View | None, str | None]:
        """Return an array that stands for a leaf's memory, if that is known, and why it cannot be written, if so."""
        return None, "arrays of this kind never change"

    def write(self, array: Any, function: Callable[..., Any], *operands: Any) -> None:
        """Put ``function(array, *operands)`` in place of ``array``, piece by piece.

        The function is elementwise, and the operands, at least one, broadcast against the array.
        """
        raise NotImplementedError

    def copy(self, leaf: Any, new: Any) -> None:
        """Put the entries of a sparse leaf in the place of those of another one."""
        raise NotImplementedError


def overlaps_itself(view: View) -> bool:
    """Whether several entries may share memory, as those of a broadcast array do."""
    end = view.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < end:
            return view.size > 0
        end += stride * (n - 1)
    return False


def sharing(views: list[View | None]) -> Iterator[tuple[int, int, bool]]:
    """Yield the pairs of arrays that share memory, by their numbers, and whether they are the same."""
    known = {number: view for number, view in enumerate(views) if view is not None and view.size}
    bounds = {number: byte_bounds(view) for number, view in known.items()}
    near: list[int] = []
    for number in sorted(known, key=bounds.__getitem__):
        near = [other for other in near if bounds[other][1] > bounds[number][0]]
        for other in near:
            first, second = sorted((number, other))
            if _share(known[first], known[second]):
                alike = known[first].__array_interface__ == known[second].__array_interface__
                yield first, second, alike
        near.append(number)


def _share(view: View, other: View) -> bool:
    try:
        work: Any = 100_000  # NumPy's own type for it is too narrow
        return bool(np.shares_memory(view, other, max_work=work))
    except TooHardError:
        return True  # not known to be disjoint
