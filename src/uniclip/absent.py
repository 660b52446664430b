# SPDX-License-Identifier: MIT
"""Gradients that are absent in one process and may be present in another: with ``all_reduce`` both take part in a step.

An absent gradient is replaced by an array without entries, whose norm is 0, so that every process reduces the same
number of norms, in the same order and dtypes. Its shape and dtype come from the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import optree

from uniclip.backends import backend_of
from uniclip.scopes import Path, Scope, everything
from uniclip.tree import Tree, closed, flatten, place

if TYPE_CHECKING:
    from uniclip.backends import Backend


class Filled(NamedTuple):
    """A tree of gradients with arrays in the place of those that only other processes have."""

    grads: Any
    """Possibly flattened."""
    absent: frozenset[int] = frozenset()
    """The ids of the arrays that stand for absent gradients."""
    given: Tree | None = None
    """The tree as given, if it has no place for some of these."""

    def emptied(self, given: Tree, clipped: Tree) -> Tree:
        """Return the clipped tree of the given leaves, with ``None`` for absent gradients."""
        if not self.absent:
            return clipped
        if self.given is not None:
            return self.given
        return clipped.some([number for number, leaf in enumerate(given.leaves) if id(leaf) not in self.absent])


def filled(  # noqa: PLR0913
    scope: Scope, grads: Any, params: Any, state: Any, *, known: bool = False, left_out: frozenset[Path] = frozenset()
) -> Filled:
    """Replace absent gradients by arrays without entries, but for those that are left out in all processes.

    ``known`` tells that the framework is known even if a process has neither gradients nor parameters.

    Raises
    ------
    ValueError
        If their shapes or dtypes are unknown.
    """
    here = flatten(grads)
    here = here if here.spec is not None else flatten(closed(here))  # where iterators are lists, in all processes
    tree = here.with_none()
    if left_out:
        tree = tree.some([number for number, path in enumerate(tree.paths()) if path not in left_out])
    gaps = [number for number, leaf in enumerate(tree.leaves) if leaf is None]
    nothing = len(gaps) == len(tree.leaves)
    if not gaps and not nothing:
        return Filled(here)
    if known and not tree.leaves and not flatten(params, "params").leaves:
        return Filled(here)
    if params is not None:
        params = flatten(params, "params")
        by_path = dict(zip(params.paths(), params.leaves, strict=True))
        paths = tree.paths()
        leaves = {number: _like(scope, by_path[paths[number]]) for number in gaps if paths[number] in by_path}
        if nothing and not leaves and params.leaves:  # such as a list of only the gradients that exist
            every = [_like(scope, leaf) for leaf in params.leaves]
            return Filled(params.rebuild(every), frozenset(map(id, every)), here)
        tree.leaves[:] = [leaves.get(number, leaf) for number, leaf in enumerate(tree.leaves)]
    return _without_parameters(scope, tree, gaps, state)


def _without_parameters(scope: Scope, tree: Tree, gaps: list[int], state: Any) -> Filled:
    """Fill the gaps whose parameters are unknown."""
    left = [number for number in gaps if tree.leaves[number] is None]
    present = [leaf for leaf in tree.leaves if leaf is not None]
    if left or not tree.leaves:
        shared = scope.label is everything
        if not (shared and present):
            like = None if scope.axes is not None or not (shared or scope.label is None) else _one_kind(present, state)
            if like is None or not tree.leaves:
                raise ValueError(unknown(tree, left))
            for number in left:
                tree.leaves[number] = like()
    return Filled(tree.rebuild(tree.leaves), frozenset(id(tree.leaves[n]) for n in gaps if tree.leaves[n] is not None))


def _like(scope: Scope, leaf: Any) -> Any:
    """Return an array without entries for each norm of a parameter like ``leaf``."""
    backend = backend_of(leaf)
    if backend is None:
        return None
    axes = None if scope.axes is None else scope.covered(len(leaf.shape), backend.output_axis)
    shape = (0,) if axes is None else tuple(0 if axis in axes else n for axis, n in enumerate(leaf.shape))
    return _empty(backend, leaf, shape)


def _empty(backend: Backend, leaf: Any, shape: tuple[int, ...] = (0,)) -> Any:
    xp, (array, _) = backend.xp, backend.stored(leaf)
    dtype = xp.asarray(1.0).dtype if xp.isdtype(array.dtype, "integral") else array.dtype
    return backend.to_device_of(array, xp.zeros(shape, dtype=dtype))


def _one_kind(present: list[Any], state: Any) -> Any:
    """Return a function that makes arrays of the only dtype, ``None`` if there are several or none."""
    arrays = present or [array for array in optree.tree_leaves(state) if _floats(array)]
    kinds = {array.dtype for array in arrays}
    backend = backend_of(arrays[0]) if len(kinds) == 1 else None
    return None if backend is None else partial(_empty, backend, arrays[0])


def _floats(array: Any) -> bool:
    backend = backend_of(array)
    return backend is not None and bool(backend.xp.isdtype(array.dtype, "real floating"))


def unknown(tree: Tree, left: Sequence[int]) -> str:
    """Return the error message for an absent gradient whose dtype and shape are unknown."""
    which = f"{place('grads', tree.paths()[left[0]])} is None" if left else "there are no gradients"
    return (
        f"{which} here, but another process may have one, and with all_reduce it would wait for this one: pass "
        "params=, the parameters of this process, which say of what framework, dtype and shape it would be"
    )
