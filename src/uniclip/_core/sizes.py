# SPDX-License-Identifier: MIT
"""Count the entries that each norm covers, for norms per entry and for limits that use sizes.

The sizes of a plan are counted once, where they are known when it is made. In compiled code, where
a length may be a value, and in several processes, which add their counts up, each step counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from uniclip._core.tree import OpenedTree
from uniclip._types import Norms, Tensor
from uniclip.backends.base import take
from uniclip.norms import Norm

if TYPE_CHECKING:
    from uniclip._core.plan import Block, Plan
    from uniclip.limits import Limit


class Sizes(NamedTuple):
    """The numbers of entries of all norms, an array for each block of norms.

    They are NumPy's if the lengths are known: a step sends them to its device as constants.
    """

    counts: list[Norms]
    """In the dtype of the norms, of shape ``(k, 1, ...)``."""
    divisors: list[Norms]
    """What norms are divided by: the counts to the power of `uniclip.Norm.size_power`."""


def needs_sizes(limit: Limit, norm: Norm) -> bool:
    """Return whether a limit or a norm uses the number of entries."""
    return "sizes" in limit.needs or bool(norm.size_power)


def count_entries(plan: Plan, tree: OpenedTree) -> list[Tensor]:
    """Return the number of entries of each norm in this process, an array for each block.

    Entries that several processes hold are divided among them, so that they add up to their number.
    """
    # A norm without gradients has no leaf, which the order marks by -1.
    counts = {}
    for number in plan.order:
        if number >= 0:
            counts[number] = _entries_of(plan, tree, number)

    if plan.collectives is not None:
        counts = plan.collectives.count_once(counts)
    return [_add_counts(plan, block, counts) for block in plan.blocks]


def sizes_of_counts(plan: Plan, counts: Sequence[Tensor], power: float) -> Sizes:
    """Return the sizes of norms, given the number of entries of each block of norms."""
    rounded = []
    divisors = []
    for count in counts:
        xp = np if isinstance(count, np.ndarray) else plan.math.library.xp
        rounded.append(plan.math.round_to_norms(count))

        # The norm of no entries is 0, and stays 0.
        at_least_1 = xp.where(count > 0, count, xp.ones_like(count))
        divisors.append(plan.math.round_to_norms(at_least_1) ** power)

    return Sizes(rounded, divisors)


def _entries_of(plan: Plan, tree: OpenedTree, number: int) -> float | Tensor:
    """Return the number of entries of a leaf that share a norm, also of those not stored."""
    axes = plan.axes[number]
    # A wrapped leaf may have no shape of its own.
    shape = tree.wrapped[number].shape if number in tree.wrapped else None
    if shape is None:
        shape = tree.leaves[number].shape

    # TensorFlow's graphs may know neither the rank nor the lengths: then the entries are counted
    # when the program runs.
    if getattr(shape, "rank", 0) is None or any([length is None for length in shape]):
        if tree.is_sparse(number):
            msg = (
                f"{tree.place(number)} is sparse and has no size to average over; give it a "
                "dense_shape"
            )
            raise ValueError(msg)

        xp = plan.math.library.xp
        return xp.sum(xp.ones_like(tree.arrays[number], dtype=plan.math.sum_dtype), axis=axes)

    # Not a generator, which torch.compile does not trace.
    return math.prod(shape if axes is None else take(shape, axes))


def _add_counts(plan: Plan, block: Block, counts: dict[int, float | Tensor]) -> Tensor:
    """Return the sum of the counts of each norm of a block, as ``(k, 1, ...)``."""
    of_groups = [take(counts, group) for group in block.groups]
    shape = (len(of_groups), *(1,) * (block.kept or 0))
    if all([isinstance(count, (int, float)) for group in of_groups for count in group]):
        # Counted in float64: float32 holds no number of entries above 16 million exactly.
        totals = np.asarray([sum(group) for group in of_groups], np.float64)
        return np.reshape(totals, shape)

    xp = plan.math.library.xp
    dtype = plan.math.sum_dtype
    rows = []
    for group in of_groups:
        addends = [xp.astype(xp.asarray(count), dtype) for count in group]
        rows.append(plan.math.add(addends, "sum"))

    return xp.reshape(plan.math.stack(rows), shape)
