# SPDX-License-Identifier: MIT
"""The gradients of a tree, sorted into the groups that share a norm."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from uniclip.scopes import Path, Scope, everything
from uniclip.tree import backend_for, flatten, flatten_grads, place

if TYPE_CHECKING:
    from uniclip.backends import Backend


@dataclass(frozen=True, slots=True)
class Leaf:
    """One gradient: its place among the leaves, as it was given, and its stored values as a floating-point array."""

    index: int
    path: Path
    given: Any
    array: Any
    rebuild: Callable[[Any], Any]
    axes: tuple[int, ...] | None


Group: TypeAlias = list[Leaf]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The leaves of a tree in the groups that share a norm, by the label of the group."""

    backend: Backend
    scope: Scope
    groups: dict[Hashable, Group]
    rebuild: Callable[[list[Any]], Any]
    in_place: bool = False
    clean: bool = False
    """Whether entries that are not finite count as 0."""

    @property
    def leaves(self) -> list[Leaf]:
        """Every leaf, in the order of the groups."""
        return [leaf for group in self.groups.values() for leaf in group]

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
        wide = [xp.result_type(leaf.array.dtype, xp.float32) for leaf in group]
        return xp.abs(xp.asarray(0, dtype=reduce(xp.result_type, wide, xp.float32))).dtype

    def arrange(self, values: list[Any]) -> Any:
        """Present one value per group as the scope's user thinks of them."""
        if self.scope.join is everything:
            return values[0]
        by_label = dict(zip(self.groups, values, strict=True))
        return by_label if self.scope.join is not None else self.rebuild(values)

    def matching(self, params: Any) -> Gradients:
        """Return the parameters that have a gradient here, in the same groups.

        Raises
        ------
        ValueError
            If a gradient has no parameter, or one of another shape.
        TypeError
            If the parameters are of another framework.
        """
        paths, leaves, _ = flatten(params, "params")
        by_path = dict(zip(paths, leaves, strict=True))
        ours = self.leaves
        missing = [leaf.path for leaf in ours if leaf.path not in by_path]
        if missing:
            msg = f"{place('grads', missing[0])} has no parameter: {place('params', missing[0])} is missing"
            raise ValueError(msg)
        used = {leaf.path: by_path[leaf.path] for leaf in ours}
        if ours and backend_for(list(used), list(used.values()), "params") is not self.backend:
            msg = f"{place('params', ours[0].path)} is of another framework than {place('grads', ours[0].path)}"
            raise TypeError(msg)
        odd = [leaf for leaf in ours if tuple(used[leaf.path].shape) != tuple(leaf.given.shape)]
        if odd:
            shapes = f"{tuple(used[odd[0].path].shape)}, {place('grads', odd[0].path)} {tuple(odd[0].given.shape)}"
            msg = f"{place('params', odd[0].path)} has shape {shapes}"
            raise ValueError(msg)
        groups = {
            label: [_leaf(self.backend, self.scope, leaf.index, leaf.path, used[leaf.path]) for leaf in group]
            for label, group in self.groups.items()
        }
        return replace(self, groups=groups)


def read(tree: Any, scope: Scope, *, in_place: bool = False) -> Gradients:
    """Flatten a tree of gradients and sort its leaves into the scope's groups."""
    backend, (paths, leaves, rebuild) = flatten_grads(tree, in_place=in_place)
    groups: dict[Hashable, Group] = {None: []} if scope.join is everything else {}
    for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        label = index if scope.join is None else scope.join(path, leaf)
        groups.setdefault(label, []).append(_leaf(backend, scope, index, path, leaf))
    if in_place:
        for leaf in (leaf for group in groups.values() for leaf in group):
            if backend.xp.isdtype(leaf.given.dtype, "integral"):
                msg = (
                    f"{place('grads', leaf.path)} holds integers, which cannot hold what a rule of norms makes of them"
                )
                raise TypeError(msg)
    return Gradients(backend, scope, groups, rebuild, in_place)


def _leaf(backend: Backend, scope: Scope, index: int, path: Path, given: Any) -> Leaf:
    xp = backend.xp
    array, rebuild = backend.stored(given)
    if xp.isdtype(array.dtype, "integral"):
        array = xp.astype(array, xp.asarray(1.0).dtype)
    try:
        axes = None if scope.axes is None else scope.covered(len(given.shape), backend.output_axis)
    except ValueError as error:
        msg = f"{place('grads', path)} of shape {tuple(given.shape)}: {error}"
        raise ValueError(msg) from None
    if axes and len(array.shape) != len(given.shape):
        msg = f"{place('grads', path)} is sparse, and stores no axes to take norms along; use a scope of whole leaves"
        raise TypeError(msg)
    return Leaf(index, path, given, array, rebuild, axes)


def all_of(backend: Backend, flags: list[Any]) -> Any:
    """Return whether all of the boolean 0-d arrays hold."""
    xp = backend.xp
    if not flags:
        return xp.asarray(True)  # noqa: FBT003
    return xp.all(xp.stack([backend.to_device_of(flags[0], flag) for flag in flags]))


def finite_or_zero(xp: Any, array: Any) -> Any:
    """Return the array with 0 for each entry that is not finite."""
    return xp.where(xp.isfinite(array), array, xp.zeros_like(array))


def upcast(xp: Any, array: Any) -> Any:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def spread(backend: Backend, value: Any, leaf: Leaf) -> Any:
    """Return a group's value in the leaf's own (but wide) precision, device and number of dimensions."""
    xp = backend.xp
    value = backend.to_device_of(leaf.array, value)
    for axis in leaf.axes or ():
        value = xp.expand_dims(value, axis=axis)
    return cast(xp, value, xp.result_type(leaf.array.dtype, xp.float32))


def cast(xp: Any, array: Any, dtype: Any) -> Any:
    """Return the array in ``dtype``, itself if it has it already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)
