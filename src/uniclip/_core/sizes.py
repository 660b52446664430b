# SPDX-License-Identifier: MIT
"""Count the elements that each norm covers, for means such as RMS and for limits that use sizes.

A plan counts them once, when it is made. Each step counts in compiled code, where a length may be
known only at run time, and in several processes, which sum their counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from uniclip._core.tree import OpenedTree
from uniclip._types import Axes, Norms, Tensor
from uniclip.backends.base import take
from uniclip.norms import Norm

if TYPE_CHECKING:
    from uniclip._core.blocks import Block
    from uniclip._core.norm_space import NormSpace
    from uniclip.limits import Limit


class Layout(Protocol):
    """The part of a `uniclip._core.plan.Plan` that reductions and counts of elements read."""

    space: NormSpace
    blocks: list[Block]
    axes: list[Axes]
    members: list[list[int]]
    order: list[int]
    places: dict[int, tuple[int, int]]
    collectives: Any


class Sizes(NamedTuple):
    """The numbers of elements of all norms, an array for each block of norms.

    They are NumPy arrays if the lengths are known, and constants to the step.
    """

    counts: list[Norms]
    """In the dtype of the norms, of shape ``(k, 1, ...)``."""
    divisors: list[Norms]
    """What norms are divided by: the counts to the power of `uniclip.Norm.size_power`."""


def needs_sizes(limit: Limit, norm: Norm) -> bool:
    """Return whether a limit or a norm uses the number of elements."""
    return "sizes" in limit.needs or bool(norm.size_power)


def count_elements(plan: Layout, tree: OpenedTree) -> list[Tensor]:
    """Return the number of elements of each norm in this process, an array for each block.

    Replicas are divided among their processes, so that the sum over these is right.
    """
    # `order` is -1 for a norm without gradients.
    counts = {}
    for number in plan.order:
        if number >= 0:
            counts[number] = _count_leaf(plan, tree, number)

    if plan.collectives is not None:
        counts = plan.collectives.count_once(counts)
    return [_add_counts(plan, block, counts) for block in plan.blocks]


def sizes_of_counts(plan: Layout, counts: Sequence[Tensor], power: float) -> Sizes:
    """Return the sizes of norms, given the number of elements of each block of norms."""
    rounded = []
    divisors = []
    for count in counts:
        xp = np if isinstance(count, np.ndarray) else plan.space.library.xp
        rounded.append(plan.space.round_to_norms(count))

        # The norm of no elements is 0. Divided by 0 it would be NaN.
        at_least_1 = xp.where(count > 0, count, xp.ones_like(count))
        divisors.append(plan.space.round_to_norms(at_least_1) ** power)

    return Sizes(rounded, divisors)


def _count_leaf(plan: Layout, tree: OpenedTree, number: int) -> float | Tensor:
    """Return the number of elements of a leaf that share a norm, with those a sparse leaf omits."""
    axes = plan.axes[number]
    # A wrapped leaf may have no shape of its own.
    shape = tree.wrapped[number].shape if number in tree.wrapped else None
    if shape is None:
        shape = tree.leaves[number].shape

    # TensorFlow's graphs may know neither the rank nor the lengths. Then the program counts the
    # elements when it runs.
    if getattr(shape, "rank", 0) is None or any([length is None for length in shape]):
        if tree.is_sparse(number):
            msg = (
                f"{tree.expression(number)} is sparse and has no size to average over; pass it "
                "with a dense_shape"
            )
            raise ValueError(msg)

        xp = plan.space.library.xp
        return xp.sum(xp.ones_like(tree.arrays[number], dtype=plan.space.sum_dtype), axis=axes)

    # Not a generator, which torch.compile does not trace.
    return math.prod(shape if axes is None else take(shape, axes))


def _add_counts(plan: Layout, block: Block, counts: dict[int, float | Tensor]) -> Tensor:
    """Return the sum of the counts of each norm of a block, as ``(k, 1, ...)``."""
    of_groups = [take(counts, group) for group in block.groups]
    shape = (len(of_groups), *(1,) * block.kept)
    if all([isinstance(count, (int, float)) for group in of_groups for count in group]):
        # Counted in float64: in float32, integers above 16,777,216 are not exact.
        totals = np.asarray([sum(group) for group in of_groups], np.float64)
        return np.reshape(totals, shape)

    xp = plan.space.library.xp
    dtype = plan.space.sum_dtype
    rows = []
    for group in of_groups:
        addends = [xp.astype(xp.asarray(count), dtype) for count in group]
        rows.append(plan.space.add(addends, "sum"))

    return xp.reshape(plan.space.stack(rows), shape)
