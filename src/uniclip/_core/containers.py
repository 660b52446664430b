# SPDX-License-Identifier: MIT
"""Containers of gradients: flatten any nesting of them, and rebuild it.

Nothing here looks at the leaves: `uniclip._core.tree` opens them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from copy import copy
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import ref

import optree
from optree.utils import total_order_sorted

from uniclip._errors import printed
from uniclip._types import Path, Tree
from uniclip.backends import (
    BACKEND_CACHE,
    COMPILER,
    UNCONFIGURED,
    backend_of,
    flatten_registered,
    tell_compilers,
)
from uniclip.backends.base import take

Leaf: TypeAlias = Any
"""A leaf as the user passed it: an array of any framework and format, or ``None``."""
Children: TypeAlias = "tuple[list[Leaf], Any, Iterable[Any]]"
"""The children of a container, its structure, and the keys of the children."""

NAMESPACE = "uniclip"
"""The namespace in which uniclip registers containers with optree."""
_REGISTERED: set[type] = set()
_LOCK = Lock()


class Spec(Protocol):
    """The structure of a tree, as of optree."""

    def unflatten(self, leaves: Any, /) -> Any:
        """Return a tree of this structure."""

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""


def expression_of(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


class Flat(NamedTuple):
    """A flattened tree, which the core accepts in place of the tree."""

    leaves: list[Leaf]
    """Its leaves, ``None`` for absent ones."""
    spec: Spec
    """Its structure."""

    def unflatten(self) -> Any:
        """Return the tree."""
        return self.spec.unflatten(self.leaves)


def flatten(tree: Tree, name: str = "grads") -> Flat:
    """Return the leaves of any nesting of containers, ``None`` among them, and its structure.

    Lists, tuples, dicts, namedtuples, deques, dataclasses and JAX-registered nodes are restored as
    they were, their subclasses and other mappings as lists and dicts. An iterator or a view of a
    dict's values becomes a list.

    Raises
    ------
    ValueError
        If the tree is an iterator that is empty or exhausted.
    """
    return open_containers(*flatten_known(tree), name)


def flatten_known(tree: Tree) -> tuple[list[Leaf], Spec]:
    """Return leaves and structure of a tree.

    A container of a class that is not registered yet is a leaf.
    """
    # Old compilers crash in the core, and this is the first function that each call runs.
    if UNCONFIGURED and COMPILER in sys.modules:
        tell_compilers()
    if isinstance(tree, Flat):
        return tree
    any_tree: Any = tree
    return optree.tree_flatten(any_tree, none_is_leaf=True, namespace=NAMESPACE)


def open_containers(leaves: list[Leaf], spec: Spec, name: str) -> Flat:
    """Return leaves and structure; register classes of containers, and open them.

    Raises
    ------
    ValueError
        If the tree is an iterator that is empty or exhausted.
    """
    others = [leaf for leaf in leaves if leaf is not None and type(leaf) not in BACKEND_CACHE]
    others = [leaf for leaf in others if backend_of(leaf) is None]
    if not others:
        return Flat(leaves, spec)

    # An iterator can be read only once, so it becomes a list, if it is the whole tree.
    root = others[0]
    if isinstance(root, (Iterator, ValuesView)) and spec.unflatten(leaves) is root:
        items = list(root)
        if not items and isinstance(root, Iterator):
            msg = f"{name} is an empty or exhausted iterator; pass a list, which can be read twice"
            raise ValueError(msg)

        return flatten(items, name)

    # Register all classes, not just the first, before the tree is flattened again.
    if any([_register(node) for node in others]):
        return flatten(spec.unflatten(leaves), name)
    return Flat(leaves, spec)


def _register(node: Any) -> bool:
    """Register the class of a container that optree does not open; return whether it is one."""
    if _flatten_node(node) is None:
        return False
    with _LOCK:
        if type(node) not in _REGISTERED:
            flatten_node: Any = _flatten_node
            optree.register_pytree_node(
                type(node), flatten_node, _unflatten_node, namespace=NAMESPACE
            )
            _REGISTERED.add(type(node))

    return True


def _unflatten_node(structure: Any, children: Iterable[Leaf]) -> Any:
    return structure.unflatten(children)


def _flatten_node(node: Any) -> Children | None:  # noqa: PLR0911 - one for each kind of container
    """Return children, structure and keys of a container that optree does not open.

    ``None`` for another object.
    """
    # An iterator can be read once only.
    if isinstance(node, (Iterator, ValuesView)):
        return None
    of_library = flatten_registered(node)
    if of_library is not None:
        return of_library

    # optree sorts the keys of a dict, and keeps the order of an OrderedDict: do the same.
    if isinstance(node, OrderedDict):
        keys = tuple(node)
        return take(node, keys), _Container(OrderedDict, keys, keys), keys

    if isinstance(node, Mapping):
        keys = tuple(total_order_sorted(node))
        return take(node, keys), _Container(dict, keys, tuple(node)), keys

    if isinstance(node, (list, tuple)):
        return list(node), _Container(list), range(len(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = tuple([field.name for field in dataclasses.fields(node)])
        original = ref(node) if hasattr(node, "__dict__") else None
        container = _Container(type(node), names, (), original)
        return [getattr(node, name) for name in names], container, names

    return None


class _Container(NamedTuple):
    """A container without its children."""

    cls: Any
    """The class to rebuild it with: a mapping, `list` or a dataclass."""
    keys: tuple[Any, ...] = ()
    order: tuple[Any, ...] = ()
    """The keys of a mapping in their own order."""
    original: Callable[[], Any] | None = None
    """A weak reference to the dataclass, which may have attributes that are not fields."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Container) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])

    def unflatten(self, children: Iterable[Leaf]) -> Any:
        """Return the container with other children."""
        if self.cls is list:
            return list(children)
        by_key = dict(zip(self.keys, children, strict=True))
        if issubclass(self.cls, dict):
            return self.cls([(key, by_key[key]) for key in self.order])

        # Copy attributes that are not fields from the original, if it still exists.
        original = self.original and self.original()
        made = object.__new__(self.cls) if original is None else copy(original)
        for name, value in by_key.items():
            # `setattr` would fail for a frozen dataclass, and `__init__` may not take all fields.
            object.__setattr__(made, name, value)

        return made
