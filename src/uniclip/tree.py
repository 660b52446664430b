# SPDX-License-Identifier: MIT
"""Trees of gradients: flatten with paths, rebuild, and errors that name the leaf."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, NamedTuple

import optree

from uniclip._repr import describe, printed
from uniclip.backends import DEFAULT, Backend, backend_of, plain_backend_of
from uniclip.backends.base import unchanged
from uniclip.backends.memory import overlaps_itself, sharing
from uniclip.scopes import Path


class Tree(NamedTuple):
    """A flattened tree; ``rebuild`` puts leaves back in their places.

    None of its functions holds the leaves, unless the structure is unknown.
    """

    leaves: list[Any]
    rebuild: Callable[[list[Any]], Any]
    paths: Callable[[], list[Path]]
    """The path of each leaf; only labels, parameters and errors use it."""
    name: str
    plain: Backend | None = None
    """The backend of all leaves, if a quick check showed that they are dense floating-point arrays."""
    spec: Any = None
    """The structure, comparable and hashable; ``None`` if unknown."""

    def with_leaves(self, leaves: list[Any]) -> Tree:
        """Return the tree with other leaves."""
        return Tree(leaves, self.rebuild, self.paths, self.name, None, self.spec)

    def some(self, numbers: Sequence[int]) -> Tree:
        """Return the tree of some of the leaves, with ``None`` in the places of the others."""
        count, rebuild, paths = len(self.leaves), self.rebuild, self.paths
        if len(numbers) == count:
            return self

        def rebuilt(new: list[Any]) -> Any:
            every: list[Any] = [None] * count
            for number, leaf in zip(numbers, new, strict=True):
                every[number] = leaf
            return rebuild(every)

        def paths_of_some() -> list[Path]:
            every = paths()
            return [every[number] for number in numbers]

        spec = None if self.spec is None else (self.spec, tuple(numbers))
        plain = self.plain if numbers else None
        leaves = [self.leaves[number] for number in numbers]
        return Tree(leaves, rebuilt, paths_of_some, self.name, plain, spec)

    def with_none(self) -> Tree:
        """Return the tree with each ``None`` as a leaf."""
        return flatten(closed(self), self.name, none_is_leaf=True)

    def place(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return place(self.name, self.paths()[number])


def place(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


def flatten(tree: Any, name: str = "grads", *, none_is_leaf: bool = False) -> Tree:
    """Flatten any nesting of containers; ``None`` keeps its place and is not a leaf, unless ``none_is_leaf``.

    Lists, tuples, dicts, namedtuples, deques, dataclasses and JAX-registered nodes are restored as they were; an
    iterator is consumed once and becomes a list. A tree that another rule has flattened is returned.

    Raises
    ------
    ValueError
        If an iterator in the tree is empty or exhausted.
    """
    if isinstance(tree, Tree):
        return tree if tree.plain else tree._replace(plain=plain_backend_of(tree.leaves))
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)
    plain = plain_backend_of(leaves)
    if plain or all(leaf is None or backend_of(leaf) for leaf in leaves):
        return Tree(leaves, partial(optree.tree_unflatten, spec), spec.paths, name, plain, spec)
    paths, leaves, rebuild = _flatten(tree, name, (), none_is_leaf=none_is_leaf)
    return Tree(leaves, lambda new: rebuild(iter(new)), lambda: paths, name, plain_backend_of(leaves))


def closed(grads: Any) -> Any:
    """Return gradients in the user's containers."""
    return grads.rebuild(grads.leaves) if isinstance(grads, Tree) else grads


def backend_for(tree: Tree) -> Backend:
    """Return the backend of all leaves, or the default one if there is no leaf.

    Raises
    ------
    TypeError
        If a leaf is not an array, is a parameter in ``grads``, or belongs to another framework than
        the first leaf.
    """
    chosen = None
    for number, leaf in enumerate(tree.leaves):
        backend = backend_of(leaf)
        if backend is None:
            raise TypeError(_no_array(tree.place(number), leaf))
        why = backend.unfit(leaf, gradient=tree.name == "grads")
        if why:
            msg = f"{tree.place(number)} is a {describe(leaf)}: {why}"
            raise TypeError(msg)
        chosen = chosen or backend
        if backend is not chosen:
            raise TypeError(_two_frameworks(tree, number))
    return chosen or DEFAULT


def flatten_grads(tree: Any, name: str = "grads", *, in_place: bool = False) -> tuple[Backend, Tree]:
    """Flatten a tree of gradients to clip, and return it with their backend.

    Raises
    ------
    TypeError
        As `backend_for`; and if ``in_place`` and arrays of their library never change.
    """
    flat = flatten(tree, name)
    backend = flat.plain or backend_for(flat)
    if in_place and not backend.in_place.writes:
        in_memory_before(backend, flat)  # which says what to write instead
    return backend, flat


def are_apart(backend: Backend, tree: Tree) -> bool:
    """Whether a quick check shows that all leaves are writable and share no memory."""
    return tree.plain is not None and backend.apart(tree.leaves)


def in_memory_before(backend: Backend, tree: Tree) -> set[int]:
    """Return the leaves whose memory is that of an earlier leaf, to be asked before any is written in place.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    if are_apart(backend, tree):
        return set()
    first: dict[int, int] = {}
    again = {number for number, leaf in enumerate(tree.leaves) if first.setdefault(id(leaf), number) != number}
    views: list[Any] = []
    for number, leaf in enumerate(tree.leaves):
        view, why = backend.in_place.memory(leaf)
        views.append(None if number in again else view)
        if view is not None and overlaps_itself(view):
            why = why or "several of its entries may lie in one place"
        if why:
            msg = (
                f"{tree.place(number)}, a {describe(leaf)}, cannot be changed in place: {why}; "
                "use clipped, report = uc.clip(grads, rule), which makes new arrays"
            )
            raise TypeError(msg)
    for one, two, alike in sharing(views):
        if not alike:
            msg = (
                f"{tree.place(one)} and {tree.place(two)} overlap in memory, so "
                "that some entries would be scaled twice; pass arrays that are apart, or use uc.clip"
            )
            raise ValueError(msg)
        again.add(two)
    return again


def _flatten(
    tree: Any, name: str, prefix: Path, *, none_is_leaf: bool
) -> tuple[list[Path], list[Any], Callable[[Iterator[Any]], Any]]:
    keys, nodes, spec = optree.tree_flatten_with_path(tree, none_is_leaf=none_is_leaf)
    paths: list[Path] = []
    leaves: list[Any] = []
    builders: list[Callable[[Iterator[Any]], Any]] = []
    for key, node in zip(keys, nodes, strict=True):
        path = (*prefix, *key)
        opened = None if node is None or backend_of(node) else _open(node, place(name, path))
        if opened is None:
            paths.append(path)
            leaves.append(node)
            builders.append(next)
        else:
            container, close = opened
            more_paths, more_leaves, rebuild = _flatten(container, name, path, none_is_leaf=none_is_leaf)
            paths += more_paths
            leaves += more_leaves
            builders.append(partial(_rebuilt, rebuild, close))
    return paths, leaves, lambda new: optree.tree_unflatten(spec, [build(new) for build in builders])


def _rebuilt(rebuild: Callable[[Iterator[Any]], Any], close: Callable[[Any], Any], new: Iterator[Any]) -> Any:
    return close(rebuild(new))


def _open(node: Any, where: str) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return a container that optree can open and a function that restores it, ``None`` for a leaf."""
    if isinstance(node, (Iterator, ValuesView)):
        items = list(node)
        if not items and isinstance(node, Iterator):
            msg = f"{where} is an iterator with nothing left in it; pass a list, which can be read twice"
            raise ValueError(msg)
        return items, unchanged
    # The one framework used outside backends/ and integrations/: classes registered with JAX
    # (such as flax and equinox modules) are nodes that only JAX can open.
    opened = _open_registered(sys.modules["jax"].tree_util, node) if "jax" in sys.modules else None
    if opened:
        return opened
    if isinstance(node, (list, tuple)):
        return list(node), unchanged
    if isinstance(node, Mapping):
        return dict(node), unchanged
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}, lambda new: _replaced(node, new)
    return None


def _open_registered(tree_util: Any, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    if treedef == tree_util.tree_structure(0):
        return None
    keys = [_key(entry) for (entry,), _ in pairs]
    if len(set(keys)) < len(keys):  # of a class that gives several children the same name
        keys = list(range(len(keys)))
    children = {key: child for key, (_, child) in zip(keys, pairs, strict=True)}
    return children, lambda new: treedef.unflatten([new[key] for key in keys])


def _key(entry: Any) -> Any:
    """Return the key, index or name in an entry of a JAX path; it may be one itself."""
    return next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), entry)


def _replaced(node: Any, new: dict[str, Any]) -> Any:
    made = copy.copy(node)
    for field, value in new.items():
        object.__setattr__(made, field, value)  # also frozen dataclasses and fields without init
    return made


def _no_array(where: str, leaf: object) -> str:
    return (
        f"{where} is a {describe(leaf)}, not an array of numbers: pass gradients of NumPy, PyTorch, TensorFlow, JAX or "
        "another array API library (plain numbers as one array, an absent gradient as None)"
    )


def _two_frameworks(tree: Tree, number: int) -> str:
    return (
        f"{tree.place(number)} is a {describe(tree.leaves[number])} but {tree.place(0)} is a "
        f"{describe(tree.leaves[0])}: convert all gradients to one framework first"
    )
