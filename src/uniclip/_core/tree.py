# SPDX-License-Identifier: MIT
"""Trees of gradients and parameters: open leaves into dense arrays, restore them, and name them.

A tree is opened once, and this is the one door for odd leaves: sparse and distributed ones,
integers and storage formats become floating-point arrays here, each in a `Leaf`, in which entries
that were stored twice are summed, and `Opened.close` makes them what they were. ``None``, an absent
gradient, keeps its row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import optree
from optree.utils import total_order_sorted

from uniclip._errors import describe, printed, summarize
from uniclip._types import Path, Step
from uniclip.backends import (
    COMPILER,
    DEFAULT,
    MET,
    UNTOLD,
    Backend,
    backend_of,
    compiling,
    flatten_registered,
    tell_compilers,
)
from uniclip.backends.arrays import overlapping, overlaps_itself, same_shape
from uniclip.backends.base import LeafInfo, View, WrappedLeaf, cast

if TYPE_CHECKING:
    from uniclip.rule import Choices

NAMESPACE = "uniclip"
"""The namespace in which optree knows the containers that it does not open by itself."""
_REGISTERED: set[type] = set()
_LOCK = Lock()
LEAF_INFO_CACHE_SIZE = 256
"""For how many trees a backend keeps the facts about the kinds of their leaves."""


class Opened(NamedTuple):
    """A tree whose leaves are arrays to measure and multiply, and how to make it what it was."""

    leaf_info: LeafInfo
    leaves: list[Any]
    """As given; ``None`` for an absent gradient."""
    arrays: list[Any]
    """The values of each leaf in this process, dense and floating-point.

    ``None`` for an absent gradient.
    """
    spec: Any
    """The structure."""
    name: str = "grads"
    in_place: bool = False
    wrapped: dict[int, WrappedLeaf] = {}  # noqa: RUF012 - never changed
    """The leaves that are not their arrays, by their numbers;
    and absent ones whose parameters are distributed.
    """

    @property
    def backend(self) -> Backend:
        """The backend of the arrays."""
        return self.leaf_info.backend

    @property
    def first(self) -> Any:
        """The first array that is present, ``None`` if there is none."""
        return self.arrays[self.leaf_info.present[0]] if self.leaf_info.present else None

    @property
    def shards(self) -> dict[int, Any]:
        """The parts of distributed leaves, by their numbers.

        Those of the parameters, where gradients are absent.
        """
        return {
            number: wrapped.shard
            for number, wrapped in self.wrapped.items()
            if wrapped.shard is not None
        }

    def shard(self, number: int) -> Any:
        """Return the part of a distributed leaf that an array is,
        ``None`` if it is the whole leaf.
        """
        return self.wrapped[number].shard if number in self.wrapped else None

    def is_sparse(self, number: int) -> bool:
        """Whether a leaf stores only some of its rows, or of its entries."""
        return number in self.wrapped and self.wrapped[number].rows is not None

    def shapes(self) -> list[Any]:
        """Return the shape of each leaf, with ``None`` for lengths that are values of a graph;
        ``None`` for an absent leaf.
        """
        if not self.wrapped:
            return [leaf if leaf is None else leaf.shape for leaf in self.leaves]
        return [
            leaf if leaf is None else self._shape_of(number)
            for number, leaf in enumerate(self.leaves)
        ]

    def _shape_of(self, number: int) -> Any:
        wrapped = self.wrapped.get(number)
        if wrapped is None or not isinstance(wrapped.shape, tuple):
            return self.leaves[number].shape
        return tuple([length if isinstance(length, int) else None for length in wrapped.shape])

    def close(self, arrays: list[Any]) -> Any:
        """Return a tree like the one that was opened, of changed arrays."""
        return self.spec.unflatten(self.restore_leaves(arrays) if self.wrapped else arrays)

    def restore_leaves(self, arrays: list[Any]) -> list[Any]:
        """Return the leaves of changed arrays."""
        leaves = list(arrays)
        for number in self.leaf_info.wrapped:
            same = arrays[number] is self.wrapped[number].array and not self.is_integral(number)
            leaves[number] = self.leaves[number] if same else self._put_back(number, arrays[number])
        return leaves

    def find_repeated(self) -> tuple[set[int], set[int]]:
        """Return the leaves whose memory is that of earlier ones,
        and those of them that are not written again.

        Copies of others are written: they may have other rows in that memory, or other factors, and
        get new memory.
        """
        repeated = find_shared_storage(self.backend, self.leaves, self.place)
        # Not `repeated & self.odd.keys()`, which PyTorch 2.11 and 2.12 cannot compile.
        copied = {n for n in repeated if n in self.wrapped and self.wrapped[n].copied}
        return repeated, repeated - {
            n for n in copied if not any([self.leaves[n] is leaf for leaf in self.leaves[:n]])
        }

    def write(self, numbers: Iterable[int]) -> None:
        """Write arrays that were changed in place into those leaves that they are copies of."""
        for number in [n for n in numbers if n in self.wrapped and self.wrapped[n].copied]:
            self._put_back(number, self.wrapped[number].array)

    def _put_back(self, number: int, array: Any) -> Any:
        """Return a leaf of a changed array, or write it into the leaf: in the leaf's dtype,
        but for integers.
        """
        wrapped, leaf, xp = self.wrapped[number], self.leaves[number], self.backend.xp
        like_it = xp.isdtype(array.dtype, "integral") or not self.is_integral(number)
        return wrapped.rebuild(
            cast(xp, array, leaf.dtype) if like_it and array.dtype == wrapped.array.dtype else array
        )

    def is_integral(self, number: int) -> bool:
        """Whether a leaf holds integers."""
        return bool(self.backend.xp.isdtype(self.leaves[number].dtype, "integral"))

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""
        return self.spec.paths()

    def place(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return place(self.name, self.paths()[number])


def place(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


class Flat(NamedTuple):
    """A tree that was flattened; the core takes it in the place of the tree."""

    leaves: list[Any]
    """Its leaves, ``None`` for absent ones."""
    spec: Any
    """Its structure."""

    def unflatten(self) -> Any:
        """Return the tree."""
        return self.spec.unflatten(self.leaves)


def flatten(tree: Any, name: str = "grads") -> Flat:
    """Return the leaves of any nesting of containers, ``None`` among them, and its structure.

    Lists, tuples, dicts, namedtuples, deques, dataclasses and JAX-registered nodes are restored as
    they were, their subclasses and other mappings as lists and dicts. An iterator or a view of a
    dict's values becomes a list.

    Raises
    ------
    ValueError
        If the tree is an iterator that is empty or exhausted.
    """
    if isinstance(tree, Flat):
        return tree
    if isinstance(tree, (Iterator, ValuesView)):
        items = list(tree)
        if not items and isinstance(tree, Iterator):
            msg = (
                f"{name} is an iterator with nothing left in it; pass a list, which can be read "
                "twice"
            )
            raise ValueError(msg)
        tree = items
    leaves, spec = flatten_known(tree)
    others = [leaf for leaf in leaves if leaf is not None and backend_of(leaf) is None]
    return flatten(tree, name) if any([_register(node) for node in others]) else Flat(leaves, spec)


def flatten_known(tree: Any) -> tuple[list[Any], Any]:
    """Return leaves and structure of a tree.

    A container of a class that was not met yet is a leaf.
    """
    # Every call comes here before it does anything that an old compiler would crash in.
    if UNTOLD and COMPILER in sys.modules:
        tell_compilers()
    return (
        tree
        if isinstance(tree, Flat)
        else optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    )


def _register(node: Any) -> bool:
    """Whether an object is a container that optree does not open;
    from now on it opens all of its class.
    """
    if _flatten_node(node) is None:
        return False
    with _LOCK:
        if type(node) not in _REGISTERED:
            ways = _flatten_node, lambda structure, children: structure.unflatten(children)
            optree.register_pytree_node(type(node), *ways, namespace=NAMESPACE)
            _REGISTERED.add(type(node))
    return True


def _flatten_node(node: Any) -> Any:
    """Return children, structure and keys of a container that optree does not open.

    ``None`` for another object.
    """
    if isinstance(node, (Iterator, ValuesView)):  # which may be read once
        return None
    of_library = flatten_registered(node)
    if of_library is not None:
        return of_library
    # in the order of the class that it stands for: that of a dict is sorted
    if isinstance(node, Mapping):
        kind = OrderedDict if isinstance(node, OrderedDict) else dict
        keys = tuple(node if kind is OrderedDict else total_order_sorted(node))
        return [node[key] for key in keys], _Container(kind, keys, tuple(node)), keys
    if isinstance(node, (list, tuple)):
        return list(node), _Container(list), range(len(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = tuple([field.name for field in dataclasses.fields(node)])
        original = ref(node) if hasattr(node, "__dict__") else None
        return (
            [getattr(node, name) for name in names],
            _Container(type(node), names, (), original),
            names,
        )
    return None


class _Container(NamedTuple):
    """What a container is but for its children."""

    kind: Any
    """What it is made of again: a class of mappings, `list` or a dataclass."""
    keys: tuple[Any, ...] = ()
    order: tuple[Any, ...] = ()
    """The keys of a mapping in their own order."""
    original: Callable[[], Any] | None = None
    """Gives a dataclass, which may have attributes beside its fields, as long as it is there."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Container) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])

    def unflatten(self, children: Iterable[Any]) -> Any:
        """Return the container of other children."""
        if self.kind is list:
            return list(children)
        by_key = dict(zip(self.keys, children, strict=True))
        if issubclass(self.kind, dict):
            return self.kind([(key, by_key[key]) for key in self.order])
        original = self.original and self.original()
        made = object.__new__(self.kind) if original is None else copy(original)
        for name, value in by_key.items():
            object.__setattr__(made, name, value)  # also of frozen ones, and fields without init
        return made


def open_tree(
    tree: Any, name: str = "grads", *, in_place: bool = False, whole: bool = False
) -> Opened:
    """Open a tree of gradients, or of parameters by that name.

    ``whole`` for a function of each array.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or ``in_place`` and leaves never
        change or hold integers.
    """
    leaves, spec = flatten_known(tree)
    present = [leaf for leaf in leaves if leaf is not None]
    met = MET.get(type(present[0])) if present else None
    leaf_info = None if met is None else met.leaf_infos.get((name, whole, met.signature(leaves)))
    if leaf_info is None:  # of new kinds of leaves, which are refused if they cannot be clipped
        leaves, spec = flatten(tree, name)
        backend = backend_for(leaves, name, spec)
        numbers = tuple([number for number, leaf in enumerate(leaves) if leaf is not None])
    else:
        backend, numbers = leaf_info.backend, leaf_info.wrapped
    arrays, wrapped = leaves, {}
    if numbers:
        with backend.computation_context(
            leaves[numbers[0]]
        ):  # whose device may have a default dtype of its own
            each = [
                (n, _open_leaf(backend, leaves[n], in_place=in_place, whole=whole)) for n in numbers
            ]
        wrapped = {number: leaf for number, leaf in each if leaf is not None}
        arrays = [
            wrapped[number].array if number in wrapped else leaf
            for number, leaf in enumerate(leaves)
        ]
    if leaf_info is None:
        with backend.computation_context():
            leaf_info = LeafInfo(backend, arrays, tuple(wrapped))
        key = backend.signature(leaves)
        if key is not None:
            if len(backend.leaf_infos) >= LEAF_INFO_CACHE_SIZE:
                backend.leaf_infos.clear()
            leaf_info = backend.leaf_infos.setdefault((name, whole, key), leaf_info)
    opened = Opened(leaf_info, leaves, arrays, spec, name, in_place, wrapped)
    if in_place and not whole:
        _raise_if_integers(opened)
    if in_place and not backend.writes:
        find_shared_storage(backend, leaves, opened.place)  # which says what to write instead
    return opened


def _raise_if_integers(opened: Opened) -> None:
    """Refuse integers to be changed in place, by a rule of norms."""
    for number in opened.wrapped:
        if opened.is_integral(number):
            msg = (
                f"{opened.place(number)} holds integers, which cannot hold what a rule of norms "
                "makes of them"
            )
            raise TypeError(msg)


def _open_leaf(backend: Backend, leaf: Any, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
    """Return what an odd leaf holds.

    Layers, as float8 in a distributed tensor, are opened one by one.
    """
    outer = backend.unwrap(leaf, in_place=in_place, whole=whole)
    if outer is None:
        return None
    inner = _open_leaf(backend, outer.array, in_place=in_place and not outer.copied, whole=whole)
    if inner is None:
        return outer
    known = inner._replace(
        **{name: value for name, value in outer._asdict().items() if value is not None}
    )
    storage = None if outer.copied else inner.storage
    return known._replace(
        array=inner.array, rebuild=lambda new: outer.rebuild(inner.rebuild(new)), storage=storage
    )


def backend_for(leaves: list[Any], name: str, spec: Any) -> Backend:
    """Return the backend of all leaves, or the default one if there is no leaf.

    Raises
    ------
    TypeError
        If a leaf is not an array, is a parameter in ``grads``, or belongs to another framework than
        the first leaf.
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
        why = backend.unsupported_reason(leaf, gradient=name == "grads")
        if why:
            msg = f"{what(number)}: {why}"
            raise TypeError(msg)
        if chosen is None:
            chosen, first = backend, number
        if backend is not chosen:
            msg = f"{what(number)} but {what(first)}: convert all gradients to one framework first"
            raise TypeError(msg)
    return chosen or DEFAULT


def find_shared_storage(
    backend: Backend, leaves: list[Any], where: Callable[[int], str]
) -> set[int]:
    """Return the leaves whose memory is that of an earlier leaf,
    to be asked before any is written in place.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    present = [number for number, leaf in enumerate(leaves) if leaf is not None]
    storages = backend.storage([leaves[number] for number in present])
    if storages is None:
        return set()
    again: set[int] = set()
    views: dict[int, View] = {}
    unknown: dict[Any, int] = {}
    for number, (view, reason) in zip(present, storages, strict=True):
        repeats = view is not None and overlaps_itself(view)
        why = reason or ("several of its entries may lie in one place" if repeats else None)
        if why:
            msg = (
                f"{where(number)}, a {describe(leaves[number])}, cannot be changed in place: "
                f"{why}; use clipped, report = uc.clip(grads, rule), which makes new arrays"
            )
            raise TypeError(msg)
        if view is not None and view.size:
            views[number] = view
        elif view is None and unknown.setdefault(_identity(leaves[number]), number) != number:
            again.add(number)
    for earlier, later in overlapping(views):
        if views[earlier].__array_interface__ != views[later].__array_interface__:
            msg = (
                f"{where(earlier)} and {where(later)} may overlap in memory, so that some entries "
                "would be scaled twice; pass arrays that lie in stretches of memory of their "
                "own, or use uc.clip"
            )
            raise ValueError(msg)
        again.add(later)
    return again


def _identity(leaf: Any) -> Any:
    """Return what is equal for the same object only; a compiler knows no address of a tensor."""
    return id(leaf) if type(leaf).__hash__ is None else leaf


def _no_array(where: str, leaf: object) -> str:
    return (
        f"{where} is a {describe(leaf)}, not an array of numbers: pass gradients of NumPy, "
        "PyTorch, TensorFlow, JAX or another array API library (plain numbers as one array, an "
        "iterator as a list, an absent gradient as None)"
    )


# Parameters beside their gradients.


def with_params(rule: Choices, given: Opened, step: Step) -> tuple[Opened, Opened | None]:
    """Return the gradients, and the parameters if the limit needs them.

    Where gradients are absent, the parameters say which library's processes are joined, and over
    which meshes.
    """
    needed, theirs, nothing = "params" in rule.limit.needs, None, not given.leaf_info.present
    if needed and step.params is None:
        msg = f"{summarize(rule)} compares gradients with their parameters: pass params="
        raise ValueError(msg)
    if step.params is not None and (
        needed or nothing or len(given.leaf_info.present) < len(given.leaves)
    ):
        theirs = _put_in_order(open_tree(step.params, "params"), given)
    if nothing and theirs is not None and theirs.leaf_info.present:
        given = given._replace(leaf_info=theirs.leaf_info.without_leaves())
    if theirs is not None and theirs.shards:
        absent = {
            n: WrappedLeaf(None, shard=shard)
            for n, shard in theirs.shards.items()
            if given.leaves[n] is None
        }
        given = given._replace(wrapped=dict(sorted((given.wrapped | absent).items())))
    return given, _match_params(rule, given, theirs) if needed and theirs is not None else None


def _put_in_order(theirs: Opened, given: Opened) -> Opened:
    """Return the parameters in the order of the gradients, by their paths,
    ``None`` where there is none.
    """
    # PyTorch 2.11 and 2.12 cannot compile the comparison; without it the parameters are put in
    # order one by one.
    if not compiling() and theirs.spec == given.spec:
        return theirs
    numbers = {path: number for number, path in enumerate(theirs.paths())}
    order = [numbers.get(path) for path in given.paths()]

    leaves, arrays = (
        [None if n is None else values[n] for n in order]
        for values in (theirs.leaves, theirs.arrays)
    )
    wrapped = {number: theirs.wrapped[n] for number, n in enumerate(order) if n in theirs.wrapped}
    return theirs._replace(leaves=leaves, arrays=arrays, spec=given.spec, wrapped=wrapped)


def _match_params(rule: Choices, given: Opened, theirs: Opened) -> Opened:
    """Return the parameters of the gradients.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores single entries that have
        norms of their own.
    """
    present, backend = given.leaf_info.present, given.backend
    if present and theirs.leaf_info.present and theirs.backend is not backend:
        msg = f"{theirs.place(present[0])} is of another framework than {given.place(present[0])}"
        raise TypeError(msg)
    shapes = given.shapes()
    for number in present:
        if theirs.leaves[number] is None:
            msg = f"{given.place(number)} has no parameter: {theirs.place(number)} is missing"
            raise ValueError(msg)
        shape, of_gradient = theirs.leaves[number].shape, shapes[number]
        # Some are known at run time.
        if not (shape == of_gradient or same_shape(shape, of_gradient)):
            msg = (
                f"{theirs.place(number)} has shape {tuple(shape)}, {given.place(number)} "
                f"{tuple(of_gradient)}"
            )
            raise ValueError(msg)
    arrays = [
        None if leaf is None else a for leaf, a in zip(given.leaves, theirs.arrays, strict=True)
    ]
    shards = theirs.shards
    if rule.scope.axes is not None and (shards or given.shards):
        arrays, shards = _divide_alike(rule, given, theirs, arrays)
    if rule.scope.axes is not None:
        for number in filter(given.is_sparse, given.wrapped):
            arrays[number] = _at_stored_rows(rule, given, number, arrays[number])
    wrapped = {
        number: WrappedLeaf(arrays[number], shard=shard)
        for number, shard in shards.items()
        if shard is not None
    }
    return Opened(theirs.leaf_info, theirs.leaves, arrays, given.spec, "params", wrapped=wrapped)


def _at_stored_rows(rule: Choices, given: Opened, number: int, array: Any) -> Any:
    """Return a parameter at the rows that its sparse gradient stores, if each row has a norm;
    else the parameter.
    """
    axes = rule.scope.covered(len(array.shape), given.backend.output_axis)
    if axes is None or 0 in axes:
        return array
    if given.wrapped[number].by_entry:
        msg = (
            f"{given.place(number)} is sparse, and stores single entries: {summarize(rule)} would "
            "compare them with other entries of the parameter; make the gradient dense, or take "
            "a norm of whole leaves"
        )
        raise TypeError(msg)
    return given.backend.xp.take(array, given.wrapped[number].rows, axis=0)


def _divide_alike(
    rule: Choices, given: Opened, theirs: Opened, arrays: list[Any]
) -> tuple[list[Any], dict[int, Any]]:
    """Return the parameters and their parts, divided among processes as the gradients are where
    norms keep axes.
    """
    shards = theirs.shards
    for number in given.leaf_info.present:
        shard, leaf = given.shard(number), theirs.leaves[number]
        axes = rule.scope.covered(len(leaf.shape), given.backend.output_axis)
        mine: Any = shards.get(number)
        if (shard and shard.divided(axes)) != (mine and mine.divided(axes)):
            arrays[number], shards[number] = (
                mine.gather(leaf) if shard is None else shard.divide(leaf),
                shard,
            )
    return arrays, shards
