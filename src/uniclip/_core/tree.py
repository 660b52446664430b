# SPDX-License-Identifier: MIT
"""Trees of gradients and parameters: flatten them, open leaves into dense arrays, restore and name
them.

A tree is flattened and opened once. This is the one door for leaves that are not dense arrays of
floating-point numbers: sparse and distributed ones, integers and storage formats become such arrays
here, each in a `WrappedLeaf`, in which entries that were stored twice are summed.
`OpenedTree.restore_leaves` makes them what they were. ``None``, an absent gradient, keeps its row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import ref

import optree
from optree.utils import total_order_sorted

from uniclip._errors import describe, printed, summarize
from uniclip._types import Array, Path, Step, Tensor, Tree
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
from uniclip.backends.base import Axes, LeafInfo, Op, View, WrappedLeaf, cast, take

if TYPE_CHECKING:
    from uniclip.rule import Choices

Leaf: TypeAlias = Any
"""A leaf as it came in: an array of any framework, sparse or distributed, or ``None``."""
Children: TypeAlias = "tuple[list[Leaf], Any, Iterable[Any]]"
"""The children of a container, its structure, and the keys of the children."""


class Spec(Protocol):
    """The structure of a tree, as of optree."""

    def unflatten(self, leaves: Any, /) -> Any:
        """Return a tree of this structure."""

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""


class ShardGroup(Protocol):
    """The processes that hold the shards of some leaves."""

    def processes(self) -> frozenset[int]:
        """Return their ranks, with those of the whole mesh."""

    def reduce(self, array: Any, op: Op, /) -> Any:
        """Return the sum or the maximum over them."""


class Shard(Protocol):
    """The part of a distributed leaf that this process holds."""

    shape: tuple[int, ...]
    """The lengths of the leaf."""
    local: tuple[int, ...]
    """The lengths of the part."""
    replicas: int
    """How many processes hold the same entries."""

    def divided(self, axes: Axes) -> object:
        """Return which axes that norms along ``axes`` keep are divided, and where."""

    def shard_groups(self, axes: Axes = None) -> ShardGroup | None:
        """Return the processes over which norms along ``axes`` are reduced."""

    def divide(self, leaf: Any) -> Any:
        """Return the same part of another leaf."""

    def gather(self, leaf: Any) -> Any:
        """Return the whole of another leaf."""

    def weigh(self, value: Any, *, inverse: bool = False) -> Any:
        """Return a sum in which replicas count once."""

    def sum_examples(self, like: Any, local: Any) -> Any:
        """Return a distributed leaf of summed examples."""


NAMESPACE = "uniclip"
"""The namespace in which optree knows the containers that it does not open by itself."""
LEAF_INFO_CACHE_SIZE = 256
"""The number of kinds of trees whose `LeafInfo` a backend keeps."""
_REGISTERED: set[type] = set()
_LOCK = Lock()


class OpenedTree(NamedTuple):
    """A tree whose leaves are arrays to measure and multiply, and how to make it what it was."""

    leaf_info: LeafInfo
    leaves: list[Leaf]
    """As given; ``None`` for an absent gradient."""
    arrays: list[Any]
    """The values of each leaf in this process, dense and floating-point.

    ``None`` for an absent gradient.
    """
    spec: Spec
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
        present = self.leaf_info.present
        return self.arrays[present[0]] if present else None

    @property
    def shards(self) -> dict[int, Shard]:
        """The parts of distributed leaves, by their numbers.

        Those of the parameters, if gradients are absent.
        """
        return {n: leaf.shard for n, leaf in self.wrapped.items() if leaf.shard is not None}

    def shard(self, number: int) -> Any:
        """Return the part of a distributed leaf that an array is, ``None`` for a whole leaf."""
        return self.wrapped[number].shard if number in self.wrapped else None

    def is_sparse(self, number: int) -> bool:
        """Return whether a leaf stores only some of its rows, or of its entries."""
        return number in self.wrapped and self.wrapped[number].rows is not None

    def is_integral(self, number: int) -> bool:
        """Return whether a leaf holds integers."""
        return bool(self.backend.xp.isdtype(self.leaves[number].dtype, "integral"))

    def shapes(self) -> list[Any]:
        """Return the shape of each leaf, ``None`` for an absent leaf.

        A length that is a value of a graph is ``None``, too.
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

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""
        return self.spec.paths()

    def place(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return place(self.name, self.paths()[number])

    def close(self, arrays: list[Any]) -> Any:
        """Return a tree like the one that was opened, of changed arrays."""
        return self.spec.unflatten(self.restore_leaves(arrays) if self.wrapped else arrays)

    def restore_leaves(self, arrays: Sequence[Any]) -> list[Leaf]:
        """Return the leaves of changed arrays."""
        leaves = list(arrays)
        for number in self.leaf_info.wrapped:
            unchanged = arrays[number] is self.wrapped[number].array
            if unchanged and not self.is_integral(number):
                leaves[number] = self.leaves[number]
            else:
                leaves[number] = self._restore_leaf(number, arrays[number])
        return leaves

    def find_repeated(self) -> tuple[set[int], set[int]]:
        """Return the leaves whose storage is that of earlier ones, and those that need no write.

        Copies of other leaves are written: they may have other rows in that storage, or other
        factors, and get new storage.
        """
        repeated = find_shared_storage(self.backend, self.leaves, self.place)
        written: set[int] = set()
        for number in repeated:
            # The same object is written once; other leaves with the same storage may differ.
            copied = number in self.wrapped and self.wrapped[number].copied
            leaf = self.leaves[number]
            if copied and not any([leaf is earlier for earlier in self.leaves[:number]]):
                written.add(number)

        return repeated, repeated - written

    def write(self, numbers: Iterable[int]) -> None:
        """Write arrays that were changed in place into those leaves that they are copies of."""
        for number in numbers:
            if number in self.wrapped and self.wrapped[number].copied:
                self._restore_leaf(number, self.wrapped[number].array)

    def _restore_leaf(self, number: int, array: Any) -> Leaf:
        """Return a leaf of a changed array, or write it into the leaf."""
        wrapped = self.wrapped[number]
        leaf = self.leaves[number]
        xp = self.backend.xp
        # Integers that a rule of norms has scaled stay floats; all else gets the leaf's dtype.
        scaled_integers = self.is_integral(number) and not xp.isdtype(array.dtype, "integral")
        if not scaled_integers and array.dtype == wrapped.array.dtype:
            array = cast(xp, array, leaf.dtype)
        return wrapped.rebuild(array)


def place(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


# Flatten a tree.


class Flat(NamedTuple):
    """A tree that was flattened; the core takes it in the place of the tree."""

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

    A container of a class that was not met yet is a leaf.
    """
    # Every call comes here before it does anything that an old compiler would crash in.
    if UNTOLD and COMPILER in sys.modules:
        tell_compilers()
    if isinstance(tree, Flat):
        return tree
    any_tree: Any = tree
    return optree.tree_flatten(any_tree, none_is_leaf=True, namespace=NAMESPACE)


def open_containers(leaves: list[Leaf], spec: Spec, name: str) -> Flat:
    """Return leaves and structure, with containers of classes that were not met yet opened.

    Raises
    ------
    ValueError
        If the tree is an iterator that is empty or exhausted.
    """
    others = [leaf for leaf in leaves if leaf is not None and type(leaf) not in MET]
    others = [leaf for leaf in others if backend_of(leaf) is None]
    if not others:
        return Flat(leaves, spec)

    # An iterator is read once, which makes a list of it if it is the tree itself.
    root = others[0]
    if isinstance(root, (Iterator, ValuesView)) and spec.unflatten(leaves) is root:
        items = list(root)
        if not items and isinstance(root, Iterator):
            msg = (
                f"{name} is an iterator with nothing left in it; pass a list, which can be read "
                "twice"
            )
            raise ValueError(msg)

        return flatten(items, name)

    # All classes are registered before the tree is flattened again.
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

    # A mapping has the order of the class that stands for it: a dict is sorted.
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

    kind: Any
    """The class that it is made of again: of mappings, `list` or a dataclass."""
    keys: tuple[Any, ...] = ()
    order: tuple[Any, ...] = ()
    """The keys of a mapping in their own order."""
    original: Callable[[], Any] | None = None
    """Returns the dataclass, which may have attributes beside its fields, as long as it lives."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Container) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])

    def unflatten(self, children: Iterable[Leaf]) -> Any:
        """Return the container of other children."""
        if self.kind is list:
            return list(children)
        by_key = dict(zip(self.keys, children, strict=True))
        if issubclass(self.kind, dict):
            return self.kind([(key, by_key[key]) for key in self.order])

        # Attributes that are no fields are copied from the original, as long as it lives.
        original = self.original and self.original()
        made = object.__new__(self.kind) if original is None else copy(original)
        for name, value in by_key.items():
            # Also of frozen dataclasses, and of fields that `__init__` does not take.
            object.__setattr__(made, name, value)

        return made


# Open its leaves.


def open_tree(
    tree: Tree, name: str = "grads", *, in_place: bool = False, whole: bool = False
) -> OpenedTree:
    """Open a tree of gradients, or of parameters by that name.

    ``whole`` for a function of each array.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or ``in_place`` and leaves never
        change or hold integers.
    """
    return open_leaves(flatten_known(tree), name, in_place=in_place, whole=whole)


def open_leaves(
    flat: tuple[list[Leaf], Spec],
    name: str = "grads",
    *,
    in_place: bool = False,
    whole: bool = False,
) -> OpenedTree:
    """Do as `open_tree`, given the leaves and the structure that `flatten_known` returned."""
    leaves, spec = flat
    # Trees whose leaves have equal signatures share a `LeafInfo`, which says what is wrapped.
    present = [leaf for leaf in leaves if leaf is not None]
    met = MET.get(type(present[0])) if present else None
    leaf_info = None if met is None else met.leaf_infos.get((name, whole, met.signature(leaves)))
    if leaf_info is None:
        leaves, spec = open_containers(leaves, spec, name)
        backend = backend_for(leaves, name, spec)
        candidates = tuple([number for number, leaf in enumerate(leaves) if leaf is not None])
    else:
        backend = leaf_info.backend
        candidates = leaf_info.wrapped

    arrays = leaves
    wrapped: dict[int, WrappedLeaf] = {}
    if candidates:
        # The device of a leaf may have a default dtype of its own.
        with backend.computation_context(leaves[candidates[0]]):
            for number in candidates:
                leaf = _unwrap(backend, leaves[number], in_place=in_place, whole=whole)
                if leaf is not None:
                    wrapped[number] = leaf

        arrays = list(leaves)
        for number, leaf in wrapped.items():
            arrays[number] = leaf.array

    if leaf_info is None:
        with backend.computation_context():
            leaf_info = LeafInfo(backend, arrays, tuple(wrapped))
        leaf_info = _keep_leaf_info(leaf_info, leaves, (name, whole))

    tree = OpenedTree(leaf_info, leaves, arrays, spec, name, in_place, wrapped)
    if in_place:
        _raise_if_not_writable(tree, whole=whole)
    return tree


def _keep_leaf_info(leaf_info: LeafInfo, leaves: list[Leaf], purpose: tuple[str, bool]) -> LeafInfo:
    """Return what is known of leaves of kinds that were not met, and keep it for the next tree."""
    backend = leaf_info.backend
    signature = backend.signature(leaves)
    # Compiled code keeps nothing: it would be compiled again for each entry of a cache.
    if signature is None:
        return leaf_info
    if len(backend.leaf_infos) >= LEAF_INFO_CACHE_SIZE:
        backend.leaf_infos.clear()
    return backend.leaf_infos.setdefault((*purpose, signature), leaf_info)


def _raise_if_not_writable(tree: OpenedTree, *, whole: bool) -> None:
    """Raise if leaves that never change, or integers by a rule of norms, would be changed."""
    for number in tree.wrapped:
        if not whole and tree.is_integral(number):
            msg = (
                f"{tree.place(number)} holds integers, which cannot hold what a rule of norms "
                "makes of them"
            )
            raise TypeError(msg)

    if not tree.backend.writes:
        # Its error says what to use for arrays that never change.
        find_shared_storage(tree.backend, tree.leaves, tree.place)


def _unwrap(backend: Backend, leaf: Leaf, *, in_place: bool, whole: bool) -> WrappedLeaf | None:
    """Return the dense array in a leaf and the way back, ``None`` if the leaf is that array.

    Layers, such as float8 in a distributed tensor, are opened one by one.
    """
    outer = backend.unwrap(leaf, in_place=in_place, whole=whole)
    if outer is None:
        return None
    inner = _unwrap(backend, outer.array, in_place=in_place and not outer.copied, whole=whole)
    if inner is None:
        return outer

    # What the outer layer says of rows, shape and shard holds for the leaf.
    facts = {name: value for name, value in outer._asdict().items() if value is not None}
    facts["array"] = inner.array
    facts["rebuild"] = lambda new: outer.rebuild(inner.rebuild(new))
    facts["storage"] = None if outer.copied else inner.storage
    return inner._replace(**facts)


def backend_for(leaves: Sequence[Leaf], name: str, spec: Spec) -> Backend:
    """Return the backend of all leaves, or the default one if there is no leaf.

    Raises
    ------
    TypeError
        If a leaf is not an array, is a parameter in ``grads``, or belongs to another framework than
        the first leaf.
    """

    def described(number: int) -> str:
        return f"{place(name, spec.paths()[number])} is a {describe(leaves[number])}"

    # The first leaf decides, and an error names it beside the one that differs.
    chosen = None
    first = 0
    for number, leaf in enumerate(leaves):
        if leaf is None:
            continue
        backend = backend_of(leaf)
        if backend is None:
            msg = (
                f"{described(number)}, not an array of numbers: pass gradients of NumPy, PyTorch, "
                "TensorFlow, JAX or another array API library (plain numbers as one array, an "
                "iterator as a list, an absent gradient as None)"
            )
            raise TypeError(msg)

        reason = backend.unsupported_reason(leaf, gradient=name == "grads")
        if reason:
            msg = f"{described(number)}: {reason}"
            raise TypeError(msg)

        if chosen is None:
            chosen = backend
            first = number

        if backend is not chosen:
            msg = (
                f"{described(number)} but {described(first)}: convert all gradients to one "
                "framework first"
            )
            raise TypeError(msg)

    return chosen or DEFAULT


def find_shared_storage(
    backend: Backend, leaves: Sequence[Leaf], where: Callable[[int], str]
) -> set[int]:
    """Return the leaves whose storage is that of an earlier leaf.

    It is asked before any leaf is written in place.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    # Most backends can tell quickly that all leaves can be written and share nothing.
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
            why = "several of its entries may lie in one place"
        if why:
            msg = (
                f"{where(number)}, a {describe(leaf)}, cannot be changed in place: {why}; use "
                "clipped, report = uc.clip(grads, rule), which makes new arrays"
            )
            raise TypeError(msg)

        # If its place in memory is unknown, a leaf can only be the same object as another one.
        if view is None and unknown.setdefault(_identity(leaf), number) != number:
            repeated.add(number)
        if view is not None and view.size:
            views[number] = view

    return repeated | _find_equal_views(views, where)


def _find_equal_views(views: dict[int, View], where: Callable[[int], str]) -> set[int]:
    """Return the leaves that lie where an earlier one does.

    Raises
    ------
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    repeated = set()
    for earlier, later in overlapping(views):
        if views[earlier].__array_interface__ != views[later].__array_interface__:
            msg = (
                f"{where(earlier)} and {where(later)} may overlap in memory, so that some entries "
                "would be scaled twice; pass arrays that lie in stretches of memory of their "
                "own, or use uc.clip"
            )
            raise ValueError(msg)

        repeated.add(later)

    return repeated


def _identity(leaf: Leaf) -> Any:
    """Return a key that is equal for the same object only."""
    # A compiler knows no address of a tensor, which has a hash by identity instead.
    return id(leaf) if type(leaf).__hash__ is None else leaf


# Parameters and their gradients.


def with_params(
    rule: Choices, tree: OpenedTree, step: Step
) -> tuple[OpenedTree, OpenedTree | None]:
    """Return the gradients, and the parameters if the limit needs them.

    If gradients are absent, the parameters say which library's processes take part, and over which
    meshes.
    """
    needs_params = "params" in rule.limit.needs
    if step.params is None:
        if needs_params:
            msg = f"{summarize(rule)} compares gradients with their parameters: pass params="
            raise ValueError(msg)

        return tree, None

    present = tree.leaf_info.present
    if not needs_params and present and len(present) == len(tree.leaves):
        return tree, None
    params = _put_in_order(open_tree(step.params, "params"), tree)

    if not present and params.leaf_info.present:
        tree = tree._replace(leaf_info=params.leaf_info.without_leaves())
    # An absent gradient takes part in the reductions of its distributed parameter.
    if params.shards:
        wrapped = dict(tree.wrapped)
        for number, shard in params.shards.items():
            if tree.leaves[number] is None:
                wrapped[number] = WrappedLeaf(None, shard=shard)

        tree = tree._replace(wrapped=dict(sorted(wrapped.items())))

    return tree, _match_params(rule, tree, params) if needs_params else None


def _put_in_order(params: OpenedTree, tree: OpenedTree) -> OpenedTree:
    """Return the parameters in the order of the gradients, by their paths.

    ``None`` for a leaf without parameter.
    """
    # PyTorch 2.11 and 2.12 cannot compile the comparison; without it the parameters are put in
    # order one by one.
    if not compiling() and params.spec == tree.spec:
        return params

    # By their paths: a tree of parameters may have more leaves, or another order.
    numbers = {path: number for number, path in enumerate(params.paths())}
    leaves: list[Leaf] = []
    arrays: list[Any] = []
    wrapped: dict[int, WrappedLeaf] = {}
    for number, path in enumerate(tree.paths()):
        old = numbers.get(path)
        leaves.append(None if old is None else params.leaves[old])
        arrays.append(None if old is None else params.arrays[old])
        if old in params.wrapped:
            wrapped[number] = params.wrapped[old]

    return params._replace(leaves=leaves, arrays=arrays, spec=tree.spec, wrapped=wrapped)


def _match_params(rule: Choices, tree: OpenedTree, params: OpenedTree) -> OpenedTree:
    """Return the parameters as they are compared with the gradients: as these are divided among
    processes, and at the rows that these store.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores single entries that have
        norms of their own.
    """
    _check_params(tree, params)
    # A parameter without gradient has no part in this step.
    arrays = list(params.arrays)
    for number, leaf in enumerate(tree.leaves):
        if leaf is None:
            arrays[number] = None

    shards = params.shards
    if rule.scope.axes is not None:
        if shards or tree.shards:
            arrays, shards = _divide_alike(rule, tree, params, arrays)
        for number in tree.wrapped:
            if tree.is_sparse(number):
                arrays[number] = _take_stored_rows(rule, tree, number, arrays[number])

    wrapped = {
        number: WrappedLeaf(arrays[number], shard=shard)
        for number, shard in shards.items()
        if shard is not None
    }
    leaf_info = params.leaf_info
    leaves = params.leaves
    return OpenedTree(leaf_info, leaves, arrays, tree.spec, "params", wrapped=wrapped)


def _check_params(tree: OpenedTree, params: OpenedTree) -> None:
    """Raise if parameters are not those of the gradients."""
    present = tree.leaf_info.present
    if present and params.leaf_info.present and params.backend is not tree.backend:
        msg = f"{params.place(present[0])} is of another framework than {tree.place(present[0])}"
        raise TypeError(msg)

    shapes = tree.shapes()
    for number in present:
        if params.leaves[number] is None:
            msg = f"{tree.place(number)} has no parameter: {params.place(number)} is missing"
            raise ValueError(msg)

        shape = params.leaves[number].shape
        of_gradient = shapes[number]
        # A length of None is known when the program runs.
        if not (shape == of_gradient or same_shape(shape, of_gradient)):
            msg = (
                f"{params.place(number)} has shape {tuple(shape)}, {tree.place(number)} "
                f"{tuple(of_gradient)}"
            )
            raise ValueError(msg)


def _take_stored_rows(rule: Choices, tree: OpenedTree, number: int, array: Tensor) -> Array:
    """Return a parameter at the rows that its sparse gradient stores, if each row has a norm;
    else the parameter.
    """
    axes = rule.scope.covered(len(array.shape), tree.backend.output_axis)
    if axes is None or 0 in axes:
        return array
    if tree.wrapped[number].by_entry:
        msg = (
            f"{tree.place(number)} is sparse, and stores single entries: {summarize(rule)} would "
            "compare them with other entries of the parameter; make the gradient dense, or take "
            "a norm of whole leaves"
        )
        raise TypeError(msg)

    return tree.backend.xp.take(array, tree.wrapped[number].rows, axis=0)


def _divide_alike(
    rule: Choices, tree: OpenedTree, params: OpenedTree, arrays: list[Any]
) -> tuple[list[Any], dict[int, Shard]]:
    """Return the parameters and their shards, divided among processes as the gradients are.

    Norms that keep a divided axis lie in several processes, and are compared within each.
    """
    shards = params.shards
    for number in tree.leaf_info.present:
        leaf = params.leaves[number]
        axes = rule.scope.covered(len(leaf.shape), tree.backend.output_axis)
        of_gradient = tree.shard(number)
        of_param: Any = shards.get(number)
        divided = of_gradient and of_gradient.divided(axes)
        if divided == (of_param and of_param.divided(axes)):
            continue
        if of_gradient is None:
            arrays[number] = of_param.gather(leaf)
        else:
            arrays[number] = of_gradient.divide(leaf)

        shards[number] = of_gradient

    return arrays, shards
