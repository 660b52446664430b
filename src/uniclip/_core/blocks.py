# SPDX-License-Identifier: MIT
"""Blocks of norms: how norms are stacked in arrays, and what a step measures for each block."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

Label: TypeAlias = Hashable
"""The label of a group in the scope, or the number of a leaf that has a norm of its own."""
Groups: TypeAlias = dict[Label, list[int]]
"""The numbers of the leaves of each group."""


class Block(NamedTuple):
    """Groups whose norms are stacked in one array, with a row for each."""

    groups: tuple[tuple[int, ...], ...]
    """For each group, the numbers of its leaves that are present."""
    labels: tuple[Label, ...]
    """For each group, its label in the scope or the number of its leaf."""
    kept: int = 0
    """The number of kept axes of each norm; 0, too, if all its gradients are absent."""

    @property
    def absent(self) -> tuple[bool, ...]:
        """Whether all gradients of each group are absent; empty if none is."""
        flags = tuple([not group for group in self.groups])
        return flags if any(flags) else ()


class Measured(NamedTuple):
    """The measurements of a step, over all processes.

    Each list has an array for each of `uniclip._core.plan.Plan.norm_blocks`, in the library of the
    norms.
    """

    norms: list[Any]
    finite_norms: list[Any]
    """The norms, NaN where they are not finite.

    With a constant limit, which uses no norm, they are the norms unchanged, except in the mode
    ``LIBRARY``.
    """
    params: list[Any] | None = None
    """The norms of the parameters."""
    sizes: list[Any] | None = None
    """The numbers of elements of the norms."""
    present: list[Any] | None = None
    """For each norm, whether some process has a gradient of it.

    ``None`` where the plan is enough: in a run of one process, for a stateless rule with one norm,
    and if each process has norms of its own.
    """
    loss: Any = None
    elements_finite: Any = None
    """Whether all elements are finite, ``None`` if that was not checked."""
