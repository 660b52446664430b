# SPDX-License-Identifier: MIT
"""The distinct gradients of a tree, sorted into the groups that share a norm."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uniclip.scopes import Path, Scope, everything
from uniclip.tree import backend_for, flatten, place

if TYPE_CHECKING:
    from uniclip.backends import Backend


@dataclass(frozen=True, slots=True)
class Leaf:
    """One distinct gradient: as it was given, and as the array of its stored values, floating point."""

    path: Path
    given: Any
    array: Any
    rebuild: Callable[[Any], Any]
    axes: tuple[int, ...] | None
    group: Hashable

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of the leaf's norms."""
        return () if self.axes is None else tuple(n for i, n in enumerate(self.array.shape) if i not in self.axes)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The distinct leaves of a tree in their groups; the same array given twice is one leaf."""

    backend: Backend
    scope: Scope
    groups: list[list[Leaf]]
    order: list[int]
    rebuild: Callable[[list[Any]], Any]

    @property
    def norm_dtype(self) -> Any:
        """The real dtype, float32 or wider, of these gradients' joint norm."""
        xp = self.backend.xp
        widest = xp.result_type(xp.float32, *(leaf.array.dtype for group in self.groups for leaf in group))
        return xp.abs(xp.asarray(0, dtype=widest)).dtype

    def arrange(self, values: list[Any]) -> Any:
        """Present one value per group as the scope's user thinks of them."""
        if self.scope.join is everything:
            return values[0]
        if self.scope.join is not None:
            return {group[0].group: value for group, value in zip(self.groups, values, strict=True)}
        by_id = {id(group[0].given): value for group, value in zip(self.groups, values, strict=True)}
        return self.rebuild([by_id[i] for i in self.order])

    def of(self, params: Any) -> Gradients:
        """Return the parameters that have a gradient here, in the same groups."""
        paths, leaves, _ = flatten(params, "params")
        by_path = dict(zip(paths, leaves, strict=True))
        used = [leaf.path for group in self.groups for leaf in group]
        if missing := [path for path in used if path not in by_path]:
            msg = f"{place('grads', missing[0])} has no parameter: {place('params', missing[0])} is missing"
            raise ValueError(msg)
        backend = backend_for(used, [by_path[path] for path in used], "params")
        groups = [
            [_leaf(backend, self.scope, leaf.path, by_path[leaf.path], leaf.group, "params") for leaf in group]
            for group in self.groups
        ]
        return replace(self, groups=groups)


def read(tree: Any, scope: Scope) -> Gradients:
    """Flatten a tree of gradients and sort its distinct leaves into the scope's groups."""
    paths, leaves, rebuild = flatten(tree)
    backend = backend_for(paths, leaves)
    groups: dict[Hashable, list[Leaf]] = {None: []} if scope.join is everything else {}
    seen: set[int] = set()
    for path, leaf in zip(paths, leaves, strict=True):
        if id(leaf) not in seen:
            seen.add(id(leaf))
            group = path if scope.join is None else scope.join(path, leaf)
            groups.setdefault(group, []).append(_leaf(backend, scope, path, leaf, group))
    return Gradients(backend, scope, list(groups.values()), [id(leaf) for leaf in leaves], rebuild)


def _leaf(backend: Backend, scope: Scope, path: Path, given: Any, group: Hashable, name: str = "grads") -> Leaf:  # noqa: PLR0913, PLR0917
    xp = backend.xp
    array, rebuild = backend.stored(given)
    if xp.isdtype(array.dtype, "integral"):
        array = xp.astype(array, xp.asarray(1.0).dtype)
    try:
        axes = None if scope.axes is None else scope.covered(len(array.shape), backend.output_axis)
    except ValueError as error:
        msg = f"{place(name, path)} of shape {tuple(array.shape)}: {error}"
        raise ValueError(msg) from None
    return Leaf(path, given, array, rebuild, axes, group)


def wide(xp: Any, array: Any) -> Any:
    """Return the array in float32 or wider (complex64 or wider)."""
    return cast(xp, array, xp.result_type(array.dtype, xp.float32))


def spread(backend: Backend, value: Any, leaf: Leaf) -> Any:
    """Return a group's value in the leaf's own (but wide) precision, device and number of dimensions."""
    xp = backend.xp
    value = backend.beside(value, leaf.array)
    for axis in leaf.axes or ():
        value = xp.expand_dims(value, axis=axis)
    return cast(xp, value, xp.result_type(leaf.array.dtype, xp.float32))


def cast(xp: Any, array: Any, dtype: Any) -> Any:
    """Return the array in ``dtype``, itself if it has it already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)
