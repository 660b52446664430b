# SPDX-License-Identifier: MIT
"""The gradients of a tree, sorted into the groups that share a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from uniclip._checks import check
from uniclip._repr import stable
from uniclip.backends.base import unchanged
from uniclip.backends.scalars import Scalar
from uniclip.scopes import Scope, everything
from uniclip.tree import Tree, backend_for, flatten, flatten_grads, place

if TYPE_CHECKING:
    from uniclip.backends import Backend


class Leaf(NamedTuple):
    """One gradient: its place among the leaves, as it was given, and its stored values as a floating-point array."""

    number: int
    given: Any
    array: Any
    rebuild: Callable[[Any], Any]
    axes: tuple[int, ...] | None


_SMALL = 2**12
"""Up to how many entries leaves are joined."""
Group: TypeAlias = Sequence[int]
"""The numbers of the leaves that share a norm."""


class Gradients(NamedTuple):
    """The leaves of a tree, and the groups of them that share a norm, by the label of the group."""

    backend: Backend
    scope: Scope
    groups: dict[Hashable, Group]
    tree: Tree
    special: list[Leaf] | None = None
    """The leaves, unless all are plain and norms cover the whole of each: then they are made when they are needed."""
    in_place: bool = False
    clean: bool = False
    """Whether entries that are not finite count as 0."""
    absent: frozenset[int] = frozenset()
    """The ids of the leaves that stand for gradients that are absent here, but may be present in other processes."""

    def members(self, group: Group) -> list[Leaf]:
        """Return the leaves of a group."""
        if self.special is not None:
            return [self.special[number] for number in group]
        given = self.tree.leaves
        return [Leaf(number, given[number], given[number], unchanged, None) for number in group]

    def gathered(self, group: Group) -> list[Leaf]:
        """Return the leaves of a group, small ones that are plain joined into one: compilers take time for each."""
        leaves = self.members(group)
        if self.special is not None:
            return leaves
        xp = self.backend.xp
        small: dict[Any, list[Leaf]] = {}
        for leaf in leaves:
            shape = leaf.array.shape
            known = getattr(shape, "rank", 0) is not None and all(isinstance(n, int) for n in shape)
            few = known and math.prod(shape) <= _SMALL
            kind = leaf.array.dtype if few and self.backend.undivided(leaf.array) else leaf.number
            small.setdefault(kind, []).append(leaf)
        return [
            some[0]._replace(array=xp.concat([self._flat(some[0], leaf) for leaf in some], axis=0))
            if len(some) > 1
            else some[0]
            for some in small.values()
        ]

    def _flat(self, first: Leaf, leaf: Leaf) -> Any:
        return self.backend.xp.reshape(self.backend.to_device_of(first.array, leaf.array), (-1,))

    @property
    def first(self) -> Any:
        """The array of the first leaf, ``None`` if there is none."""
        arrays = self.tree.leaves if self.special is None else [leaf.array for leaf in self.special[:1]]
        return arrays[0] if arrays else None

    def as_arrays(self, values: list[Any]) -> list[Any]:
        """Return values that may be scalars as arrays of the gradients' own framework."""
        return [self.backend.array_of(one, self.first) if isinstance(one, Scalar) else one for one in values]

    @property
    def leaves(self) -> list[Leaf]:
        """Every leaf, in the order of the tree."""
        return self.members(range(len(self.tree.leaves)))

    def plain_arrays(self, group: Group) -> list[Any] | None:
        """Return the arrays of a group for what a backend does with all at once, ``None`` if one is special."""
        if self.special is not None or self.clean or not group:
            return None
        given = self.tree.leaves
        return given if len(group) == len(given) else [given[number] for number in group]

    def put(self, leaf: Leaf, function: Callable[..., Any], *operands: Any) -> Any:
        """Return a leaf like ``leaf`` of ``function(array, *operands)``; it is ``leaf`` itself if changed in place."""
        if not self.in_place:
            xp, new = self.backend.xp, function(leaf.array, *operands)
            widened = new.dtype == leaf.array.dtype and not xp.isdtype(leaf.given.dtype, "integral")
            return leaf.rebuild(cast(xp, new, leaf.given.dtype) if widened else new)
        self.backend.write(leaf.given, leaf.array, function, *operands)
        return leaf.given

    def norm_dtype(self, group: Group) -> Any:
        """Return the real dtype, float32 or wider, of a group's norm."""
        xp = self.backend.xp
        wide = [xp.result_type(leaf.array.dtype, xp.float32) for leaf in self.members(group)]
        return xp.abs(xp.asarray(0, dtype=reduce(xp.result_type, wide, xp.float32))).dtype

    def arrange(self, values: list[Any]) -> Any:
        """Present one value per group as the scope's user thinks of them."""
        if self.scope.join is everything:
            return values[0]
        by_label = dict(zip(self.groups, values, strict=True))
        return by_label if self.scope.join is not None else self.tree.rebuild(values)

    def matching(self, params: Any) -> Gradients:
        """Return the parameters that have a gradient here, in the same groups.

        Raises
        ------
        ValueError
            If a gradient has no parameter, or one of another shape.
        TypeError
            If the parameters are of another framework.
        """
        theirs = flatten(params, "params")
        numbers = {path: number for number, path in enumerate(theirs.paths())}
        paths = self.tree.paths()
        missing = [leaf for leaf in self.leaves if paths[leaf.number] not in numbers]
        if missing:
            path = paths[missing[0].number]
            msg = f"{place('grads', path)} has no parameter: {place('params', path)} is missing"
            raise ValueError(msg)
        used = [theirs.leaves[numbers[path]] for path in paths]
        if self.scope.join is not None:  # a parameter without a gradient shares no norm
            pairs = zip(used, self.tree.leaves, strict=True)
            used = [leaf if id(leaf) in self.absent else param for param, leaf in pairs]
        whole = Tree(used, self.tree.rebuild, self.tree.paths, "params")
        if used and backend_for(whole) is not self.backend:
            msg = f"{whole.place(0)} is of another framework than {self.tree.place(0)}"
            raise TypeError(msg)
        for leaf in self.leaves:
            shapes = [tuple(one.shape) for one in (used[leaf.number], leaf.given)]
            if shapes[0] != shapes[1] and id(leaf.given) not in self.absent:
                place_, ours = whole.place(leaf.number), self.tree.place(leaf.number)
                msg = f"{place_} has shape {shapes[0]}, {ours} {shapes[1]}"
                raise ValueError(msg)
        return self._replace(tree=whole, special=_leaves(self.backend, self.scope, whole))


def read(grads: Any, scope: Scope, *, in_place: bool = False, name: str = "grads") -> Gradients:
    """Flatten a tree of gradients (or of parameters, by that name) and sort its leaves into the scope's groups."""
    backend, tree = flatten_grads(grads, name, in_place=in_place)
    special = None if tree.plain and scope.axes is None else _leaves(backend, scope, tree)
    if in_place and not tree.plain:
        _refuse_integers(backend, tree)
    numbers = range(len(tree.leaves))
    groups: dict[Hashable, Any] = {None: numbers}
    if scope.join is None:
        groups = {number: (number,) for number in numbers}
    elif scope.join is not everything:
        groups = {}
        for number, path, leaf in zip(numbers, tree.paths(), tree.leaves, strict=True):
            groups.setdefault(_label(scope.join(path, leaf)), []).append(number)
        # Whichever leaf comes first, or is None, in any process.
        groups = dict(sorted(groups.items(), key=lambda item: stable(repr(item[0]))))
    return Gradients(backend, scope, groups, tree, special, in_place)


def _label(found: Any) -> Hashable:
    """Return the label of a group; refuse what cannot be looked up: an array may differ from an equal one."""
    try:
        fits = not hasattr(found, "dtype") or isinstance(found, (Number, str)) or found in {True, False}
        hash(found)
    except TypeError:
        fits = False
    check("the label of a group", found, fits, "hashable, such as a text or a number")
    return found  # type: ignore[no-any-return]


def _leaves(backend: Backend, scope: Scope, tree: Tree) -> list[Leaf]:
    return [_leaf(backend, scope, tree, number) for number in range(len(tree.leaves))]


def _refuse_integers(backend: Backend, tree: Tree) -> None:
    for number, leaf in enumerate(tree.leaves):
        if backend.xp.isdtype(leaf.dtype, "integral"):
            msg = f"{tree.place(number)} holds integers, which cannot hold what a rule of norms makes of them"
            raise TypeError(msg)


def _leaf(backend: Backend, scope: Scope, tree: Tree, number: int) -> Leaf:
    xp, given = backend.xp, tree.leaves[number]
    array, rebuild = backend.stored(given)
    if xp.isdtype(array.dtype, "integral"):
        array = xp.astype(array, xp.asarray(1.0).dtype)
    try:
        axes = None if scope.axes is None else scope.covered(len(given.shape), backend.output_axis)
    except ValueError as error:
        msg = f"{tree.place(number)} of shape {tuple(given.shape)}: {error}"
        raise ValueError(msg) from None
    if axes and len(array.shape) != len(given.shape):
        msg = f"{tree.place(number)} is sparse, and stores no axes to take norms along; use a scope of whole leaves"
        raise TypeError(msg)
    return Leaf(number, given, array, rebuild, axes)


def all_of(backend: Backend, flags: list[Any]) -> Any:
    """Return whether all of the boolean 0-d arrays hold."""
    xp = backend.xp
    if len(flags) == 1:
        return flags[0]
    if not flags:
        return xp.asarray(True)  # noqa: FBT003
    return xp.all(xp.stack([backend.to_device_of(flags[0], flag) for flag in flags]))


def finite_or_zero(xp: Any, array: Any) -> Any:
    """Return the array with 0 for each entry that is not finite."""
    return xp.where(xp.isfinite(array), array, xp.zeros_like(array))


def upcast(xp: Any, array: Any) -> Any:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def spread(backend: Backend, value: Any, leaf: Leaf, dtype: Any = None) -> Any:
    """Return a group's value in the leaf's own (but wide) precision, or a wider one, its device and dimensions."""
    xp = backend.xp
    dtype = xp.result_type(leaf.array.dtype, xp.float32 if dtype is None else dtype)
    value = backend.to_device_of(leaf.array, value)
    for axis in leaf.axes or ():
        value = xp.expand_dims(value, axis=axis)
    return backend.replicated(leaf.array, cast(xp, value, dtype))


def cast(xp: Any, array: Any, dtype: Any) -> Any:
    """Return the array in ``dtype``, itself if it has it already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)
