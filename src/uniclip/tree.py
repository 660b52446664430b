# SPDX-License-Identifier: MIT
"""Trees of gradients: open them into dense arrays, close them again, and name a leaf in an error.

A tree is opened once: sparse and distributed leaves, integers and storage formats become floating-point arrays here,
each beside the `Stored` or the part that it is of, and `Opened.closed` makes them what they were. ``None``, an absent
gradient, keeps its row.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, NamedTuple

import optree

from uniclip._errors import describe, printed
from uniclip.backends import DEFAULT, MET, Backend, backend_of, compiling, opened_node
from uniclip.backends.arrays import overlaps_itself, sharing
from uniclip.backends.base import Kinds, Stored, unchanged
from uniclip.scopes import Path

_KEPT = 256
"""For how many trees a backend keeps the facts about the kinds of their leaves."""


class Opened(NamedTuple):
    """A tree whose leaves are arrays to measure and multiply, and how to make it what it was."""

    kinds: Kinds
    leaves: list[Any]
    """As given; ``None`` for an absent gradient."""
    arrays: list[Any]
    """The values of each leaf in this process, dense and floating-point; ``None`` for an absent gradient."""
    spec: Any
    """The structure, comparable and hashable, except that of unknown containers."""
    name: str = "grads"
    in_place: bool = False
    stored: dict[int, Stored] = {}  # noqa: RUF012 - never changed
    """How the leaves are restored that are not their arrays."""
    parts: list[Any] | None = None
    """The part of its distributed leaf that each array is; ``None`` if all leaves are whole."""

    @property
    def backend(self) -> Backend:
        """The backend of the arrays."""
        return self.kinds.backend

    @property
    def first(self) -> Any:
        """The first array that is present, ``None`` if there is none."""
        return self.arrays[self.kinds.present[0]] if self.kinds.present else None

    def to_measure(self) -> list[Any]:
        """Return the arrays to measure, in which values of entries that are stored twice are summed."""
        if not self.stored:
            return self.arrays
        found = list(self.arrays)
        for number, way in self.stored.items():
            if way.merged is not None:
                found[number] = way.merged(self.arrays[number])
        return found

    def part(self, number: int) -> Any:
        """Return the part of its leaf that an array is, ``None`` if it is the whole leaf."""
        return None if self.parts is None else self.parts[number]

    def closed(self, arrays: list[Any]) -> Any:
        """Return a tree like the one that was opened, of changed arrays; in place, write what was opened as a copy."""
        if not self.stored:
            return self.spec.unflatten(arrays)
        leaves = list(arrays)
        for number, way in self.stored.items():
            new, leaf = arrays[number], self.leaves[number]
            same = new is way.array and not self.backend.xp.isdtype(leaf.dtype, "integral")
            leaves[number] = leaf if same or (self.in_place and way.view) else way.back(new)
        return self.spec.unflatten(leaves)

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""
        return self.spec.paths()

    def place(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return place(self.name, self.paths()[number])


class Nested:
    """The structure of a tree with containers that only other libraries know, or that can be read once."""

    def __init__(self, paths: list[Path], rebuild: Callable[[Iterator[Any]], Any]) -> None:
        self._paths, self._rebuild = paths, rebuild

    def unflatten(self, leaves: list[Any]) -> Any:
        """Return the tree of other leaves."""
        return self._rebuild(iter(leaves))

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""
        return self._paths


def place(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


def flatten(tree: Any, name: str = "grads") -> tuple[list[Any], Any]:
    """Return the leaves of any nesting of containers, ``None`` among them, and its structure.

    Lists, tuples, dicts, namedtuples, deques, dataclasses and JAX-registered nodes are restored as they were; an
    iterator is consumed once and becomes a list.

    Raises
    ------
    ValueError
        If an iterator in the tree is empty or exhausted.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    if all([leaf is None or backend_of(leaf) is not None for leaf in leaves]):
        return leaves, spec
    paths, leaves, rebuild = _flatten(tree, name, ())
    return leaves, Nested(paths, rebuild)


def open_tree(tree: Any, name: str = "grads", *, in_place: bool = False) -> Opened:
    """Open a tree of gradients, or of parameters by that name, for a rule that measures norms.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or ``in_place`` and leaves never change or hold
        integers.
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    kinds = None
    for leaf in leaves:
        if leaf is not None:
            backend = MET.get(type(leaf))
            kinds = None if backend is None else backend.known.get((name, backend.kinds(leaves)))
            break
    if kinds is None:
        leaves, spec = flatten(tree, name)
        opened = _learned(leaves, spec, name, in_place=in_place)
    elif kinds.odd:
        arrays, ways, parts = _dense(kinds.backend, kinds.odd, leaves, spec, name, in_place=in_place)
        opened = Opened(kinds, leaves, arrays, spec, name, in_place, ways, parts)
    else:
        opened = Opened(kinds, leaves, leaves, spec, name, in_place)
    if in_place and not opened.kinds.backend.writes:
        same_memory(opened.backend, leaves, opened.place)  # which says what to write instead
    return opened


def _learned(leaves: list[Any], spec: Any, name: str, *, in_place: bool) -> Opened:
    """Open a tree with leaves of new kinds, which are refused if they cannot be clipped; and remember their kinds."""
    backend = backend_for(leaves, name, spec)
    with backend.quiet():
        present = [number for number, leaf in enumerate(leaves) if leaf is not None]
        arrays, ways, parts = _dense(backend, present, leaves, spec, name, in_place=in_place)
        kinds = Kinds(backend, arrays, tuple(ways))
    if not compiling():
        if len(backend.known) >= _KEPT:
            backend.known.clear()
        kinds = backend.known.setdefault((name, backend.kinds(leaves)), kinds)
    return Opened(kinds, leaves, arrays, spec, name, in_place, ways, parts)


def _dense(backend: Backend, numbers: Sequence[int], leaves: list[Any], spec: Any, name: str, *, in_place: bool) -> Any:
    """Return the arrays of leaves, the ways back of those that are none, and the parts of distributed ones."""
    xp, arrays, ways = backend.xp, list(leaves), {}
    for number in numbers:
        leaf = leaves[number]
        stored = backend.stored(leaf, in_place=in_place)
        array = leaf if stored is None else stored.array
        if xp.isdtype(leaf.dtype, "integral"):  # in the framework's default floating-point dtype
            if in_place:
                where = place(name, spec.paths()[number])
                msg = f"{where} holds integers, which cannot hold what a rule of norms makes of them"
                raise TypeError(msg)
            array = xp.astype(array, xp.asarray(1.0).dtype)
        if array is not leaf:
            ways[number] = (stored or Stored(leaf, unchanged))._replace(array=array)
            arrays[number] = array
    local, parts = backend.local(arrays)
    for number, part in enumerate(parts or ()):
        if part is not None:
            way = ways.get(number) or Stored(leaves[number], unchanged)
            back = _after(partial(part.whole, arrays[number]), way.back)
            view = way.view or arrays[number] is leaves[number]
            ways[number] = way._replace(array=local[number], back=back, view=view)
    return local, ways, parts


def backend_for(leaves: list[Any], name: str, spec: Any) -> Backend:
    """Return the backend of all leaves, or the default one if there is no leaf.

    Raises
    ------
    TypeError
        If a leaf is not an array, is a parameter in ``grads``, or belongs to another framework than the first leaf.
    """
    chosen, first = None, 0

    def what(number: int) -> str:
        return f"{place(name, spec.paths()[number])} is a {describe(leaves[number])}"

    for number, leaf in enumerate(leaves):
        if leaf is None:
            continue
        backend = backend_of(leaf)
        if backend is None:
            raise TypeError(_no_array(place(name, spec.paths()[number]), leaf))
        why = backend.unfit(leaf, gradient=name == "grads")
        if why:
            msg = f"{what(number)}: {why}"
            raise TypeError(msg)
        if chosen is None:
            chosen, first = backend, number
        if backend is not chosen:
            msg = f"{what(number)} but {what(first)}: convert all gradients to one framework first"
            raise TypeError(msg)
    return chosen or DEFAULT


def same_memory(backend: Backend, leaves: list[Any], where: Callable[[int], str]) -> set[int]:
    """Return the leaves whose memory is that of an earlier leaf, to be asked before any is written in place.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    some = [(number, leaf) for number, leaf in enumerate(leaves) if leaf is not None]
    if some and not backend.traced(some[0][1]) and backend.disjoint([leaf for _, leaf in some]):
        return set()
    first: dict[Any, int] = {}
    identity = unchanged if compiling() else id  # of numbers of objects, a compiler makes a program for these alone
    again = {number for number, leaf in some if first.setdefault(identity(leaf), number) != number}
    views: list[Any] = [None] * len(leaves)
    for number, leaf in some:
        view, why = backend.memory(leaf)
        views[number] = None if number in again else view
        if view is not None and overlaps_itself(view):
            why = why or "several of its entries may lie in one place"
        if why:
            msg = (
                f"{where(number)}, a {describe(leaf)}, cannot be changed in place: {why}; "
                "use clipped, report = uc.clip(grads, rule), which makes new arrays"
            )
            raise TypeError(msg)
    for one, two, alike in sharing(views):
        if not alike:
            msg = (
                f"{where(one)} and {where(two)} overlap in memory, so "
                "that some entries would be scaled twice; pass arrays that are apart, or use uc.clip"
            )
            raise ValueError(msg)
        again.add(two)
    return again


def _flatten(tree: Any, name: str, prefix: Path) -> tuple[list[Path], list[Any], Callable[[Iterator[Any]], Any]]:
    keys, nodes, spec = optree.tree_flatten_with_path(tree, none_is_leaf=True)
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
            more_paths, more_leaves, rebuild = _flatten(container, name, path)
            paths += more_paths
            leaves += more_leaves
            builders.append(_after(rebuild, close))
    return paths, leaves, lambda new: optree.tree_unflatten(spec, [build(new) for build in builders])


def _after(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda new: then(first(new))


def _open(node: Any, where: str) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return a container that optree can open and a function that restores it, ``None`` for a leaf."""
    if isinstance(node, (Iterator, ValuesView)):
        items = list(node)
        if not items and isinstance(node, Iterator):
            msg = f"{where} is an iterator with nothing left in it; pass a list, which can be read twice"
            raise ValueError(msg)
        return items, unchanged
    opened = opened_node(node)
    if opened:
        return opened
    if isinstance(node, (list, tuple)):
        return list(node), unchanged
    if isinstance(node, Mapping):  # in the order of the class that it stands for: that of a dict is sorted
        return OrderedDict(node) if isinstance(node, OrderedDict) else dict(node), unchanged
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}, lambda new: _replaced(node, new)
    return None


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
