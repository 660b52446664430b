# SPDX-License-Identifier: MIT
"""Trees of gradients and parameters: flatten them, open leaves into dense arrays, and rebuild them.

A tree is flattened and opened once. Only this module opens leaves that are not dense floating-point
arrays. Distributed ones become their local arrays, and `Shards`. Sparse ones, integers and storage
formats become a `WrappedLeaf` each, with a dense array in which elements that are stored twice are
summed. `OpenedTree.restore_leaves` rebuilds the formats. An absent gradient, ``None``, stays in its
place.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from copy import copy
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import ref

import optree
from optree.utils import total_order_sorted

from uniclip._errors import article, describe, printed, summarize
from uniclip._types import Array, Path, Step, Tensor, Tree
from uniclip.backends import (
    BACKEND_CACHE,
    COMPILER,
    DEFAULT,
    UNCONFIGURED,
    Backend,
    backend_of,
    compiling,
    flatten_registered,
    tell_compilers,
)
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import overlapping, overlaps_itself, same_shape
from uniclip.backends.base import (
    NO_SHARDS,
    Axes,
    LeafInfo,
    Op,
    Shards,
    View,
    WrappedLeaf,
    shards_of,
    take,
)
from uniclip.scopes import Scope, Stacked

if TYPE_CHECKING:
    from uniclip.rule import Choices

Leaf: TypeAlias = Any
"""A leaf as the user passed it: an array of any framework and format, or ``None``."""
Children: TypeAlias = "tuple[list[Leaf], Any, Iterable[Any]]"
"""The children of a container, its structure, and the keys of the children."""


class Spec(Protocol):
    """The structure of a tree, as of optree."""

    def unflatten(self, leaves: Any, /) -> Any:
        """Return a tree of this structure."""

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""


class ShardGroup(Protocol):
    """The processes along one dimension of a mesh; those of equal processes are equal."""

    size: int
    """How many there are."""

    def processes(self) -> frozenset[int]:
        """Return their ranks."""

    def reduce(self, array: Any, op: Op, /) -> Any:
        """Return the sum or the maximum over these processes."""


class Shard(Protocol):
    """The shard of a distributed leaf in this process."""

    shape: tuple[int, ...]
    """The shape of the leaf."""
    local: tuple[int, ...]
    """The shape of the shard."""
    replicas: int
    """How many processes hold the same elements."""

    def divided(self, axes: Axes) -> object:
        """Return the axes that norms along ``axes`` keep and that are sharded, and how."""

    def groups(self, axes: Axes = None, *, replicas: bool = True) -> tuple[ShardGroup, ...]:
        """Return the processes over which norms along ``axes`` are reduced, with those that hold
        replicas, if wanted.
        """

    def divide(self, leaf: Any) -> Any:
        """Return the same shard of another leaf."""

    def gather(self, leaf: Any) -> Any:
        """Return another leaf gathered from all processes."""

    def distribute(self, like: Any, local: Any) -> Any:
        """Return a leaf with another local array."""

    def weigh_derivative(self, value: Any, *, inverse: bool = False) -> Any:
        """Return the same value, with its derivative multiplied by `replicas`, or divided by it if
        ``inverse``.
        """

    def sum_examples(self, like: Any, local: Any) -> Any:
        """Return a distributed leaf of summed examples."""


NAMESPACE = "uniclip"
"""The namespace in which uniclip registers containers with optree."""
LEAF_INFO_CACHE_SIZE = 256
"""The largest number of `LeafInfo` objects in the cache of a backend."""
_REGISTERED: set[type] = set()
_LOCK = Lock()


class OpenedTree(NamedTuple):
    """A flattened tree with dense arrays to measure and multiply, and what rebuilds its leaves."""

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
    """The leaves in other formats, by their numbers."""
    shards: Shards = NO_SHARDS
    """The shards of distributed leaves. An absent gradient has the shard of its parameter."""
    opened: list[Any] = []  # noqa: RUF012 - never changed
    """The arrays of gradients as they were opened, before the policy ``"zero"`` has replaced
    elements.
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
    def all_dense_shards(self) -> bool:
        """Whether some leaves are distributed, and all arrays are dense and at most float32."""
        return self.shards.dense and not self.wrapped

    def shard(self, number: int) -> Any:
        """Return the shard of a distributed leaf, ``None`` for a whole leaf."""
        return self.shards.get(number)

    def is_sparse(self, number: int) -> bool:
        """Return whether a leaf stores only some of its rows, or of its elements."""
        return number in self.wrapped and self.wrapped[number].rows is not None

    def is_integral(self, number: int) -> bool:
        """Return whether a leaf holds integers."""
        return bool(self.backend.xp.isdtype(self.leaves[number].dtype, "integral"))

    def shapes(self) -> list[Any]:
        """Return the shape of each leaf, ``None`` for an absent leaf.

        A length that is known only at run time is ``None``, too.
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

    def covered(self, scope: Scope, number: int, ndim: int) -> Axes:
        """Return the axes of a leaf that its norms cover, ``None`` for all."""
        if not isinstance(scope.axes, Stacked):
            return scope.covered(ndim, self.backend.output_axis)
        path = self.paths()[number]
        return scope.covered(ndim, self.backend.output_axis, path, self.leaves[number])

    def paths(self) -> list[Path]:
        """Return the path of each leaf."""
        return self.spec.paths()

    def place(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return place(self.name, self.paths()[number])

    def close(self, arrays: list[Any]) -> Any:
        """Return a tree of the original structure and formats, given changed arrays."""
        return self.spec.unflatten(self.restore_leaves(arrays))

    def restore_leaves(self, arrays: list[Any]) -> list[Leaf]:
        """Return leaves of the original formats, given changed arrays."""
        if not (self.wrapped or self.shards):
            return arrays
        leaves = list(arrays)
        for number, shard in self.shards.items():
            if number in self.wrapped:
                continue
            unchanged = arrays[number] is self.opened[number]
            leaf = self.leaves[number]
            leaves[number] = leaf if unchanged else shard.distribute(leaf, arrays[number])

        for number in self.leaf_info.wrapped:
            # Integers are rebuilt even if unchanged, since a rule of norms always returns floats.
            unchanged = arrays[number] is self.wrapped[number].array
            if unchanged and not self.is_integral(number):
                leaves[number] = self.leaves[number]
            else:
                leaves[number] = self._restore_leaf(number, arrays[number])
        return leaves

    def find_repeated(self) -> tuple[set[int], set[int]]:
        """Return the leaves that have the storage of earlier leaves, and those of them that need no
        write.

        A leaf that is opened as a copy is written all the same: it may have other rows in that
        storage, or another factor.
        """
        repeated = find_shared_storage(self.backend, self.leaves, self.place)
        written: set[int] = set()
        for number in repeated:
            # The same object needs one write; two leaves with the same storage may differ.
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
        # Scaled integers stay floats. Rounded to the dtype of the leaf, most would become 0.
        scaled_integers = self.is_integral(number) and not xp.isdtype(array.dtype, "integral")
        if not scaled_integers and array.dtype == wrapped.array.dtype:
            array = cast(xp, array, leaf.dtype)
        rebuilt = wrapped.rebuild(array)
        if number in self.shards and not self.in_place:
            return self.shards[number].distribute(leaf, rebuilt)
        return rebuilt


def place(name: str, path: Path) -> str:
    """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
    return name + "".join(f"[{printed(key)}]" for key in path)


# Flatten a tree.


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


# Open its leaves.


def open_tree(
    tree: Tree, name: str = "grads", *, in_place: bool = False, whole: bool = False
) -> OpenedTree:
    """Open a tree of gradients, or of parameters if ``name`` is ``"params"``.

    With ``whole``, integers and distributed arrays stay as they are, for a function of each array.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or, with ``in_place``, leaves
        are immutable or hold integers.
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
    known = BACKEND_CACHE.get(type(present[0])) if present else None
    leaf_info = None
    if known is not None:
        local, shards = (leaves, NO_SHARDS) if whole else known.open_shards(leaves)
        signature = _signature(known, local, shards) if shards else known.signature(local)
        leaf_info = known.leaf_infos.get((name, whole, signature))
    if leaf_info is None:
        leaves, spec = open_containers(leaves, spec, name)
        backend = backend_for(leaves, name, spec)
        local, shards = (leaves, NO_SHARDS) if whole else backend.open_shards(leaves)
        candidates = tuple([number for number, leaf in enumerate(leaves) if leaf is not None])
    else:
        backend, candidates = leaf_info.backend, leaf_info.wrapped

    arrays = local
    wrapped: dict[int, WrappedLeaf] = {}
    if candidates:
        # Integers become the default float, which depends on the device.
        with backend.computation_context(local[candidates[0]]):
            unwrap = partial(_unwrap, backend, in_place=in_place, whole=whole)
            arrays, wrapped = _unwrap_each(unwrap, local, candidates)

    if leaf_info is None:
        with backend.computation_context():
            leaf_info = LeafInfo(backend, arrays, tuple(wrapped))
        leaf_info = _keep_leaf_info(leaf_info, (name, whole, _signature(backend, local, shards)))

    tree = OpenedTree(leaf_info, leaves, arrays, spec, name, in_place, wrapped, shards, arrays)
    if in_place:
        _raise_if_not_writable(tree, whole=whole)
    return tree


def _unwrap_each(
    unwrap: Callable[[Leaf], WrappedLeaf | None], leaves: list[Leaf], numbers: Iterable[int]
) -> tuple[list[Any], dict[int, WrappedLeaf]]:
    """Return leaves with the dense arrays in some of them, and the ways back."""
    arrays = list(leaves)
    wrapped = {}
    for number in numbers:
        leaf = unwrap(leaves[number])
        if leaf is not None:
            wrapped[number] = leaf
            arrays[number] = leaf.array
    return arrays, wrapped


def _signature(backend: Backend, leaves: list[Leaf], shards: Shards) -> Any:
    """Return the signature of leaves, given the local arrays of distributed ones."""
    # Dense shards are at most float32, so their `LeafInfo` differs by the device alone.
    if shards.dense and len(shards) == len(leaves):
        return shards.number, backend.device(leaves[0])
    return backend.signature(leaves)


def _keep_leaf_info(leaf_info: LeafInfo, key: tuple[str, bool, Any]) -> LeafInfo:
    """Return what is known of leaves of kinds that were not met, and keep it for the next tree."""
    # Compiled code caches nothing: it would be compiled again after each change of the cache.
    if key[2] is None:
        return leaf_info
    leaf_infos = leaf_info.backend.leaf_infos
    if len(leaf_infos) >= LEAF_INFO_CACHE_SIZE:
        leaf_infos.clear()
    return leaf_infos.setdefault(key, leaf_info)


def _raise_if_not_writable(tree: OpenedTree, *, whole: bool) -> None:
    """Raise if leaves that never change, or integers by a rule of norms, would be changed."""
    for number in tree.wrapped:
        if not whole and tree.is_integral(number):
            msg = (
                f"{tree.place(number)} holds integers, which a rule of norms scales to fractions, "
                "so they can't be clipped in place; use clipped, report = uc.clip(grads, rule), "
                "or make them floating-point numbers"
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

    # Rows and shape of the outer layer are those of the leaf.
    facts = {name: value for name, value in outer._asdict().items() if value is not None}
    facts["array"] = inner.array
    facts["rebuild"] = lambda new: outer.rebuild(inner.rebuild(new))
    # If the outer layer is a copy, the leaf itself does not change with the inner storage.
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
        noun = describe(leaves[number])
        return f"{place(name, spec.paths()[number])} is {article(noun)} {noun}"

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

    Called before any leaf is written in place, so that an error leaves all of them unchanged.

    Raises
    ------
    TypeError
        If a leaf cannot be written.
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    # Most backends have a quick check for leaves that can be written and share no memory.
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
            why = "several of its elements may share memory"
        if why:
            msg = (
                f"{where(number)}, a {describe(leaf)}, cannot be changed in place: {why}; use "
                "clipped, report = uc.clip(grads, rule), which returns new arrays"
            )
            raise TypeError(msg)

        # If its place in memory is unknown, only the same object is known to share it.
        if view is None and unknown.setdefault(_identity(leaf), number) != number:
            repeated.add(number)
        if view is not None and view.size:
            views[number] = view

    return repeated | _find_equal_views(views, where)


def _find_equal_views(views: dict[int, View], where: Callable[[int], str]) -> set[int]:
    """Return the leaves that have the same memory as an earlier leaf.

    Raises
    ------
    ValueError
        If two leaves overlap in memory, and are not the same.
    """
    repeated = set()
    for earlier, later in overlapping(views):
        if views[earlier].__array_interface__ != views[later].__array_interface__:
            msg = (
                f"{where(earlier)} and {where(later)} may overlap in memory, so that some elements "
                "would be scaled twice; pass arrays that do not share memory, or use uc.clip"
            )
            raise ValueError(msg)

        repeated.add(later)

    return repeated


def _identity(leaf: Leaf) -> Any:
    """Return a key that is equal for the same object only."""
    # torch.compile has no `id` of a tensor, but a tensor is hashed by identity.
    return id(leaf) if type(leaf).__hash__ is None else leaf


# Parameters and their gradients.


def with_params(
    rule: Choices, tree: OpenedTree, step: Step
) -> tuple[OpenedTree, OpenedTree | None]:
    """Return the gradients, and the parameters if the limit needs them.

    If gradients are absent, the library and the meshes of their parameters decide how this process
    takes part in reductions.
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
    if params.shards and len(present) < len(tree.leaves):
        pairs = zip(tree.leaves, params.leaves, strict=True)
        likes = [param if leaf is None else leaf for leaf, param in pairs]
        tree = tree._replace(shards=tree.backend.open_shards(likes)[1])

    return tree, _match_params(rule, tree, params) if needs_params else None


def _put_in_order(params: OpenedTree, tree: OpenedTree) -> OpenedTree:
    """Return the parameters in the order of the gradients, by their paths.

    ``None`` for a leaf without parameter.
    """
    # PyTorch 2.11 and 2.12 cannot compile the comparison of structures.
    if not compiling() and params.spec == tree.spec:
        return params

    # The tree of parameters may have more leaves, or another order.
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

    shards = params.backend.open_shards(leaves)[1] if params.shards else NO_SHARDS
    return params._replace(
        leaves=leaves, arrays=arrays, spec=tree.spec, wrapped=wrapped, shards=shards
    )


def _match_params(rule: Choices, tree: OpenedTree, params: OpenedTree) -> OpenedTree:
    """Return the parameters sharded as the gradients are, and at the rows that sparse ones store.

    Raises
    ------
    ValueError
        If a gradient has no parameter, or a parameter of another shape.
    TypeError
        If the parameters belong to another framework, or a gradient stores single elements and
        norms keep axes.
    """
    _check_params(tree, params)
    # A parameter without gradient is not measured.
    arrays = list(params.arrays)
    for number, leaf in enumerate(tree.leaves):
        if leaf is None:
            arrays[number] = None

    shards = params.shards
    if rule.scope.axes is not None:
        # Equal shards are usually one object. Others are compared below.
        if shards is not tree.shards:
            arrays, shards = _divide_alike(rule, tree, params, arrays)
        for number in tree.wrapped:
            if tree.is_sparse(number):
                arrays[number] = _take_stored_rows(rule, tree, number, arrays[number])

    leaf_info = params.leaf_info
    leaves = params.leaves
    return OpenedTree(leaf_info, leaves, arrays, tree.spec, "params", shards=shards)


def _check_params(tree: OpenedTree, params: OpenedTree) -> None:
    """Raise if parameters are not those of the gradients."""
    present = tree.leaf_info.present
    if present and params.leaf_info.present and params.backend is not tree.backend:
        gradient = tree.place(present[0])
        msg = f"{params.place(present[0])} belongs to another framework than {gradient}"
        raise TypeError(msg)

    shapes = tree.shapes()
    for number in present:
        if params.leaves[number] is None:
            msg = f"{tree.place(number)} has no parameter: {params.place(number)} is missing"
            raise ValueError(msg)

        shape = params.leaves[number].shape
        of_gradient = shapes[number]
        # A length that is known only at run time is None here.
        if not (shape == of_gradient or same_shape(shape, of_gradient)):
            msg = (
                f"{params.place(number)} has shape {tuple(shape)}, but {tree.place(number)} has "
                f"{tuple(of_gradient)}"
            )
            raise ValueError(msg)


def _take_stored_rows(rule: Choices, tree: OpenedTree, number: int, array: Tensor) -> Array:
    """Return a parameter, at the rows that its sparse gradient stores if each row has a norm."""
    axes = tree.covered(rule.scope, number, len(array.shape))
    if axes is None or 0 in axes:
        return array
    if tree.wrapped[number].by_entry:
        msg = (
            f"{tree.place(number)} is sparse, and stores single elements: {summarize(rule)} would "
            "compare them with other elements of the parameter; make the gradient dense, or use a "
            "scope of whole leaves"
        )
        raise TypeError(msg)

    return tree.backend.xp.take(array, tree.wrapped[number].rows, axis=0)


def _divide_alike(
    rule: Choices, tree: OpenedTree, params: OpenedTree, arrays: list[Any]
) -> tuple[list[Any], Shards]:
    """Return the parameters and their shards, sharded as the gradients are.

    If norms keep a sharded axis, each process has norms of its own, which it can compare only with
    norms of the same shard.
    """
    shards = dict(params.shards)
    for number in tree.leaf_info.present:
        leaf = params.leaves[number]
        axes = tree.covered(rule.scope, number, len(leaf.shape))
        of_gradient = tree.shard(number)
        of_param: Any = shards.get(number)
        divided = of_gradient and of_gradient.divided(axes)
        if divided == (of_param and of_param.divided(axes)):
            continue
        if of_gradient is None:
            arrays[number] = of_param.gather(leaf)
            del shards[number]
        else:
            arrays[number] = of_gradient.divide(leaf)
            shards[number] = of_gradient

    return arrays, shards_of(shards)
