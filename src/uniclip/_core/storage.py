# SPDX-License-Identifier: MIT
"""Find out which leaves can be changed in place, and which of them share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from uniclip._core.containers import Leaf
from uniclip._errors import describe
from uniclip._types import View
from uniclip.backends import Backend
from uniclip.backends.arrays import overlapping, overlaps_itself
from uniclip.backends.base import take


def find_shared_storage(
    backend: Backend, leaves: Sequence[Leaf], where: Callable[[int], str]
) -> set[int]:
    """Return the leaves whose storage is that of an earlier leaf.

    Called before any leaf is written in place, so that an error leaves all of them unchanged.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    # Most backends have a quick check for leaves that can be written and share no memory.
    present = [number for number, leaf in enumerate(leaves) if leaf is not None]
    storages = backend.storage(take(leaves, present))
    if storages is None:
        return set()

    repeated: set[int] = set()
    views: dict[int, View] = {}
    unknown: dict[Leaf, int] = {}
    for number, (view, reason) in zip(present, storages, strict=True):
        leaf = leaves[number]
        why = reason
        if not why and view is not None and overlaps_itself(view):
            why = "several of its elements may share memory"
        if why:
            msg = (
                f"{where(number)}, a {describe(leaf)}, cannot be changed in place: {why}; use "
                "clipped, report = uc.clip(grads, rule), which returns new arrays"
            )
            raise TypeError(msg)

        # If its place in memory is unknown, only the same object is known to share it.
        if view is None and unknown.setdefault(_identity(leaf), number) != number:
            repeated.add(number)
        if view is not None and view.size:
            views[number] = view

    return repeated | _find_equal_views(views, where)


def _find_equal_views(views: dict[int, View], where: Callable[[int], str]) -> set[int]:
    """Return the leaves that have the same memory as an earlier leaf.

    Raises
    ------
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    repeated = set()
    for earlier, later in overlapping(views):
        if views[earlier].__array_interface__ != views[later].__array_interface__:
            msg = (
                f"{where(earlier)} and {where(later)} may overlap in memory, so that some elements "
                "would be scaled twice; pass arrays that do not share memory, or use uc.clip"
            )
            raise ValueError(msg)

        repeated.add(later)

    return repeated


def _identity(leaf: Leaf) -> Any:
    """Return a key that is equal for the same object only."""
    # torch.compile has no `id` of a tensor, but a tensor is hashed by identity.
    return id(leaf) if type(leaf).__hash__ is None else leaf
