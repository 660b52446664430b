# SPDX-License-Identifier: MIT
"""An opened tree of gradients, and its layout: which leaves share a norm, and which norms form an array.

A tree is opened once, into dense arrays and functions that restore the kinds of its leaves. The layout stays the same
from step to step, so it is cached in its scope; traced code makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._checks import check
from uniclip._repr import stable
from uniclip.backends.arrays import cast
from uniclip.backends.base import unchanged
from uniclip.scopes import Scope, everything
from uniclip.tree import Tree, backend_for, flatten, flatten_grads, place

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.backends.processes import Part

_STACKED = 2**16
"""The largest number of norms with kept axes that are stacked into one array."""
_LAYOUTS = 64
"""The number of layouts that a scope keeps."""


class Opened(NamedTuple):
    """A tree whose leaves are dense arrays, and how to restore their kinds."""

    backend: Backend
    tree: Tree
    arrays: list[Any]
    """The stored values of each leaf that is present, as floating point (except in rules without a norm)."""
    ways: list[Callable[[Any], Any]] | None = None
    """How to restore the kind of each array's leaf; ``None`` if each array is its leaf."""
    in_place: bool = False
    clean: bool = False
    """Whether entries that are not finite count as 0."""
    parts: list[Part | None] | None = None
    """The part of its leaf that each array is; ``None`` if each is the whole leaf."""

    @property
    def first(self) -> Any:
        """The first array, ``None`` if there is none."""
        return self.arrays[0] if self.arrays else None

    def own(self, array: Any) -> Any:
        """Return an array, possibly NumPy's, as one of the gradients' framework, on their device."""
        if not isinstance(array, np.ndarray):
            return array
        return self.backend.from_host(array, self.backend.device(self.first))

    def put(self, number: int, function: Callable[..., Any], *operands: Any) -> Any:
        """Return a leaf of ``function(array, *operands)``; the leaf itself if it is changed in place."""
        leaf, array = self.tree.leaves[number], self.arrays[number]
        if self.in_place:
            self.backend.in_place.write(leaf, array, function, *operands)
            return leaf
        xp, new = self.backend.xp, function(array, *operands)
        widened = new.dtype == array.dtype and not xp.isdtype(leaf.dtype, "integral")
        return self.way(number)(cast(xp, new, leaf.dtype) if widened else new)

    def way(self, number: int) -> Callable[[Any], Any]:
        """Return the function that restores the kind of an array's leaf."""
        if self.ways is not None:
            return self.ways[number]
        part = self.part(number)
        return unchanged if part is None else partial(part.whole, self.tree.leaves[number])

    def part(self, number: int) -> Part | None:
        """Return the part of its leaf that an array is, ``None`` if it is the whole leaf."""
        return None if self.parts is None else self.parts[number]

    def shape(self, number: int) -> tuple[Any, ...]:
        """Return the shape of an array, that of the whole leaf if processes hold parts."""
        part = self.part(number)
        return tuple(self.arrays[number].shape if part is None else part.shape)

    def unscaled(self, number: int) -> Any:
        """Return a leaf that no factor changes: as given, except that integers become floating point."""
        leaf = self.tree.leaves[number]
        integers = self.ways is not None and self.backend.xp.isdtype(leaf.dtype, "integral")
        return self.way(number)(self.arrays[number]) if integers else leaf

    def matching(self, params: Any, scope: Scope, absent: frozenset[int]) -> Opened:
        """Return the parameters of the leaves here, detached.

        Raises
        ------
        ValueError
            If a gradient has no parameter, or a parameter of another shape.
        TypeError
            If the parameters belong to another framework.
        """
        theirs, backend = flatten(params, "params"), self.backend
        used = theirs.leaves
        if theirs.spec is None or theirs.spec != self.tree.spec:
            numbers = {path: number for number, path in enumerate(theirs.paths())}
            paths = self.tree.paths()
            missing = [path for path in paths if path not in numbers]
            if missing:
                msg = f"{place('grads', missing[0])} has no parameter: {place('params', missing[0])} is missing"
                raise ValueError(msg)
            used = [theirs.leaves[numbers[path]] for path in paths]
        if absent and scope.label is not None:  # a parameter without a gradient is in no norm
            used = [leaf if id(leaf) in absent else param for param, leaf in zip(used, self.tree.leaves, strict=True)]
        tree = Tree(used, self.tree.rebuild, self.tree.paths, "params", None, self.tree.spec)
        plain = backend.plain(used, gradient=False)
        if used and not plain and backend_for(tree) is not backend:
            msg = f"{tree.place(0)} is of another framework than {self.tree.place(0)}"
            raise TypeError(msg)
        for number, (param, leaf) in enumerate(zip(used, self.tree.leaves, strict=True)):
            if tuple(param.shape) != tuple(leaf.shape) and not (absent and id(leaf) in absent):
                msg = (
                    f"{tree.place(number)} has shape {tuple(param.shape)}, {self.tree.place(number)} "
                    f"{tuple(leaf.shape)}"
                )
                raise ValueError(msg)
        if plain:
            arrays, parts = backend.processes.local(used)
            return Opened(backend, tree, list(map(backend.detached, arrays)), parts=parts)
        found = _opened(backend, tree)
        values = list(map(backend.detached, found.arrays))
        dense = all([way is unchanged for way in found.ways or ()]) and backend.plain(values)
        return found._replace(arrays=values, ways=None if dense else found.ways)


class Block(NamedTuple):
    """The groups whose norms form one array, one row for each."""

    groups: tuple[int, ...]
    """The indices of the groups."""
    labels: tuple[Any, ...]
    absent: tuple[bool, ...]
    """Whether all gradients of each group are absent; empty if none is."""
    dtype: Any
    """The dtype of their norms."""
    largest: float
    """The largest number that all of their leaves can hold, as float32 or wider."""
    kept: int | None = 0
    """The number of kept axes of each norm; ``None`` if all its gradients are absent."""


class Layout(NamedTuple):
    """Which leaves share a norm, and which norms form an array."""

    scope: Scope
    labels: tuple[Any, ...]
    """For each group, its label in the scope or the number of its leaf."""
    groups: tuple[Sequence[int], ...]
    """The numbers of the leaves of each group; none if all gradients of a group are absent."""
    dtypes: tuple[Any, ...]
    """The dtype of each group's norm, float32 or wider."""
    axes: tuple[tuple[int, ...] | None, ...] | None
    """The axes of each leaf that its norm covers, ``None`` for all axes."""
    blocks: tuple[Block, ...]

    def axes_of(self, number: int) -> tuple[int, ...] | None:
        """Return the axes of a leaf that its norm covers."""
        return None if self.axes is None else self.axes[number]

    def rows(self, blocks: Sequence[Any]) -> list[Any]:
        """Return a value for each group from arrays with one row for each."""
        values: list[Any] = [None] * len(self.groups)
        for block, array in zip(self.blocks, blocks, strict=True):
            for row, group in enumerate(block.groups):
                values[group] = array[row] if len(array.shape) == 1 else array[row, ...]
        return values

    def arranged(self, tree: Tree, blocks: Sequence[Any]) -> Any:
        """Return a value for each group in the scope's form: a tree, a dict by label, or a single value."""
        rows = self.rows(blocks)
        if self.scope.label is everything:
            return rows[0]
        present = [(label, row) for label, row, group in zip(self.labels, rows, self.groups, strict=True) if len(group)]
        return dict(present) if self.scope.label is not None else tree.rebuild([row for _, row in present])


def opened(grads: Any, *, in_place: bool = False, name: str = "grads") -> Opened:
    """Open a tree of gradients (or of parameters, by that name) for a rule that measures norms.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or ``in_place`` and leaves never change or
        hold integers.
    """
    backend, tree = flatten_grads(grads, name, in_place=in_place)
    if tree.plain:
        arrays, parts = backend.processes.local(tree.leaves)
        return Opened(backend, tree, arrays, in_place=in_place, parts=parts)
    if in_place:
        _refuse_integers(backend, tree)
    return _opened(backend, tree, in_place=in_place)


def layout_of(given: Opened, scope: Scope, *, remembers: bool = False, joined: bool = False) -> Layout:
    """Return the layout of an opened tree, from the cache if possible.

    If the rule ``remembers``, absent gradients have groups too, so that the norms depend only on the structure of the
    tree; norms with axes are then not stacked, since not all compiled code can. Norms that are ``joined`` over all axes
    along which their gradients vary are of one kind.
    """
    tree = given.tree
    if tree.spec is None or given.ways is not None or given.backend.traced(given.first):
        return _made(given, scope, remembers, joined)
    shapes = (
        None if scope.axes is None and scope.label in {None, everything} else tuple([a.shape for a in given.arrays])
    )
    parts = None if given.parts is None else tuple(given.parts)
    key = (tree.spec, tuple([array.dtype for array in given.arrays]), shapes, parts, remembers)
    found = scope.layouts.get(key)
    if found is None:
        found = _made(given, scope, remembers, joined)
        if len(scope.layouts) >= _LAYOUTS:
            scope.layouts.clear()
        scope.layouts[key] = found
    return found


def _opened(backend: Backend, tree: Tree, *, in_place: bool = False) -> Opened:
    xp, arrays, ways = backend.xp, [], []
    for leaf in tree.leaves:
        array, way = backend.stored(leaf)
        arrays.append(xp.astype(array, xp.asarray(1.0).dtype) if xp.isdtype(array.dtype, "integral") else array)
        ways.append(way)
    local, parts = backend.processes.local(arrays)
    if parts is not None:
        ways = [_through(*some) for some in zip(ways, arrays, parts, strict=True)]
    return Opened(backend, tree, local, ways, in_place, parts=parts)


def _through(way: Callable[[Any], Any], array: Any, part: Part | None) -> Callable[[Any], Any]:
    """Return the function that restores an array from the part that a process holds."""
    return way if part is None else lambda local: way(part.whole(array, local))


def _refuse_integers(backend: Backend, tree: Tree) -> None:
    for number, leaf in enumerate(tree.leaves):
        if backend.xp.isdtype(leaf.dtype, "integral"):
            msg = f"{tree.place(number)} holds integers, which cannot hold what a rule of norms makes of them"
            raise TypeError(msg)


def _made(given: Opened, scope: Scope, remembers: bool, joined: bool) -> Layout:  # noqa: FBT001
    """Make a layout."""
    found = _groups(given.tree, scope, remembers)
    labels, groups = tuple(found), tuple(map(tuple, found.values()))
    axes = None if scope.axes is None else tuple(_axes(given, scope, number) for number in range(len(given.arrays)))
    known = [_norm_dtype(given.backend, [given.arrays[number] for number in group]) for group in groups if group]
    usual, of_known = known[0] if known else given.backend.xp.float32, iter(known)
    dtypes = tuple(next(of_known) if group else usual for group in groups)
    alike: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        arrays = [given.arrays[n] for n in group]
        kind = None if remembers or joined else given.backend.processes.varying(arrays)
        if axes is not None:
            kind = None if remembers or len(group) != 1 else _kept(given, group[0], axes[group[0]])
            kind = number if kind is None else kind
        alike.setdefault((dtypes[number], kind), []).append(number)
    firsts = [(tuple(some), some[0]) for some in alike.values()]
    most = [_largest(given, dtype, group) for dtype, group in zip(dtypes, groups, strict=True)]
    blocks = []
    for some, one in firsts:
        own, gone = tuple(labels[group] for group in some), tuple(not groups[group] for group in some)
        largest = min(most[group] for group in some)
        kept = _axes_kept(given, axes, groups[one])
        blocks.append(Block(some, own, gone if any(gone) else (), dtypes[one], largest, kept))
    return Layout(scope, labels, groups, dtypes, axes, tuple(blocks))


def _groups(tree: Tree, scope: Scope, remembers: bool) -> dict[Hashable, list[int]]:  # noqa: FBT001
    """Return the numbers of the leaves that share a norm, by the label of their group."""
    if scope.label is everything:
        return {None: list(range(len(tree.leaves)))}
    numbers = iter(range(len(tree.leaves)))
    whole = tree.with_none() if remembers else tree
    groups: dict[Hashable, list[int]] = {}
    for place_, (path, leaf) in enumerate(zip(whole.paths(), whole.leaves, strict=True)):
        label = place_ if scope.label is None else label_of(scope.label, path, leaf, place(tree.name, path))
        groups.setdefault(label, []).extend([] if leaf is None else [next(numbers)])
    if scope.label is None:
        return groups
    # Whichever leaf is first, or None, in any process.
    return dict(sorted(groups.items(), key=lambda item: stable(repr(item[0]))))


def label_of(label: Callable[..., Hashable], path: Any, leaf: Any, where: str) -> Hashable:
    """Return the label of a leaf's group; refuse labels that are unhashable or hold arrays."""
    try:
        found: Any = label(path, leaf)
    except AttributeError as error:
        if leaf is not None:
            raise
        msg = f"{where} is absent (None), and a rule that remembers asks for its group: label it by its path alone"
        raise TypeError(msg) from error
    try:
        fits = not hasattr(found, "dtype") or isinstance(found, (Number, str)) or found in {True, False}
        hash(found)
    except TypeError:
        fits = False
    check("the label of a group", found, fits, "hashable, such as a text or a number")
    return found  # type: ignore[no-any-return]


def _axes(given: Opened, scope: Scope, number: int) -> tuple[int, ...] | None:
    """Return the axes of a leaf that its norm covers."""
    leaf, tree = given.tree.leaves[number], given.tree
    try:
        axes = scope.covered(len(leaf.shape), given.backend.output_axis)
    except ValueError as error:
        msg = f"{tree.place(number)} of shape {tuple(leaf.shape)}: {error}"
        raise ValueError(msg) from None
    if axes and len(given.arrays[number].shape) != len(leaf.shape):
        msg = f"{tree.place(number)} is sparse, and stores no axes to take norms along; use a scope of whole leaves"
        raise TypeError(msg)
    return axes


def _kept(given: Opened, number: int, axes: tuple[int, ...] | None) -> Hashable:
    """Return a key that must be equal for norms with axes to be stacked, ``None`` if they must not be."""
    backend, array, shape = given.backend, given.arrays[number], given.shape(number)
    fixed = not backend.traced(array) or (backend.static_shapes and all([type(n) is int for n in shape]))
    if axes is None or not fixed or not backend.processes.unsharded(array):
        return None
    kept = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    size = math.prod(kept)
    alone = size > _STACKED or size == math.prod(shape) > 1
    return None if alone else (kept, backend.device(array), given.part(number), backend.processes.varying([array]))


def _axes_kept(given: Opened, axes: Any, group: Sequence[int]) -> int | None:
    """Return the number of kept axes of the norm of a group, ``None`` if unknown."""
    if axes is None:
        return 0
    if not group:
        return None
    covered = axes[group[0]]
    return 0 if covered is None else len(given.shape(group[0])) - len(covered)


def _norm_dtype(backend: Backend, arrays: list[Any]) -> Any:
    """Return the real dtype, float32 or wider, of the norm of arrays."""
    xp = backend.xp
    wide = reduce(xp.result_type, [xp.result_type(dtype, xp.float32) for dtype in {a.dtype for a in arrays}])
    return xp.abs(xp.asarray(0, dtype=wide)).dtype if xp.isdtype(wide, "complex floating") else wide


def _largest(given: Opened, dtype: Any, group: Sequence[int]) -> float:
    """Return the largest number that a norm and each leaf of its group can hold."""
    one_of_each = {given.arrays[number].dtype: given.arrays[number] for number in group}.values()
    dtypes = [dtype, *[_norm_dtype(given.backend, [array]) for array in one_of_each]]
    return min(float(given.backend.xp.finfo(one).max) for one in dtypes)
