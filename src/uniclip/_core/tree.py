# SPDX-License-Identifier: MIT
"""Trees of gradients and parameters: open their leaves into dense arrays, and rebuild them.

`uniclip._core.containers` flattens trees. A step flattens and opens a tree once. Only this module
opens leaves that are not dense floating-point arrays. Distributed ones become their local arrays,
and `Shards`. Sparse ones, integers and storage formats become a `WrappedLeaf` each, with a dense
array in which elements that are stored twice are summed. `OpenedTree.restore_leaves` rebuilds the
formats. An absent gradient, ``None``, stays in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from uniclip._core.containers import Leaf, Spec, expression_of, flatten_known, open_containers
from uniclip._core.storage import find_shared_storage
from uniclip._errors import article, describe, summarize
from uniclip._types import Array, Axes, Path, StepOptions, Tensor, Tree
from uniclip.backends import BACKEND_CACHE, DEFAULT, Backend, backend_of, compiling
from uniclip.backends.arithmetic import cast
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import NO_SHARDS, LeafInfo, Shards, WrappedLeaf, shards_of
from uniclip.scopes import Scope, Stacked

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

LEAF_INFO_CACHE_SIZE = 256
"""The largest number of `LeafInfo` objects in the cache of a backend."""


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

    def expression(self, number: int) -> str:
        """Return the expression that reaches a leaf, for example ``grads['layers'][0]``."""
        return expression_of(self.name, self.paths()[number])

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
        repeated = find_shared_storage(self.backend, self.leaves, self.expression)
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


# Open its leaves.


def open_tree(
    tree: Tree, name: str = "grads", *, in_place: bool = False, as_given: bool = False
) -> OpenedTree:
    """Open a tree of gradients, or of parameters if ``name`` is ``"params"``.

    With ``as_given``, integers and distributed arrays stay as they are, for a function of each
    array.

    Raises
    ------
    TypeError
        If a leaf is not an array, leaves belong to two frameworks, or, with ``in_place``, leaves
        are immutable or hold integers.
    """
    return open_leaves(flatten_known(tree), name, in_place=in_place, as_given=as_given)


def open_leaves(
    flat: tuple[list[Leaf], Spec],
    name: str = "grads",
    *,
    in_place: bool = False,
    as_given: bool = False,
) -> OpenedTree:
    """Implement `open_tree`, given the leaves and the structure from `flatten_known`."""
    tree = _open_familiar(flat, name, in_place=in_place, as_given=as_given)
    if tree is None:
        tree = _open_new(flat, name, in_place=in_place, as_given=as_given)
    if in_place:
        _raise_if_not_writable(tree, as_given=as_given)
    return tree


def _open_familiar(
    flat: tuple[list[Leaf], Spec], name: str, *, in_place: bool, as_given: bool
) -> OpenedTree | None:
    """Open leaves of a cached signature, whose `LeafInfo` lists the leaves to unwrap.

    ``None`` if the cache does not have it, as for containers that are not registered yet.
    """
    leaves, spec = flat
    present = [leaf for leaf in leaves if leaf is not None]
    backend = BACKEND_CACHE.get(type(present[0])) if present else None
    if backend is None:
        return None
    local, shards = (leaves, NO_SHARDS) if as_given else backend.open_shards(leaves)
    signature = _signature(backend, local, shards) if shards else backend.signature(local)
    leaf_info = backend.leaf_infos.get((name, as_given, signature))
    if leaf_info is None:
        return None

    arrays = local
    wrapped: dict[int, WrappedLeaf] = {}
    if leaf_info.wrapped:
        unwrap = partial(_unwrap, backend, in_place=in_place, as_given=as_given)
        arrays, wrapped = _unwrap_each(backend, local, leaf_info.wrapped, unwrap)
    return OpenedTree(leaf_info, leaves, arrays, spec, name, in_place, wrapped, shards, arrays)


def _open_new(
    flat: tuple[list[Leaf], Spec], name: str, *, in_place: bool, as_given: bool
) -> OpenedTree:
    """Open the leaves of any tree: find their library, check each, and keep a `LeafInfo`."""
    leaves, spec = open_containers(*flat, name)
    backend = backend_for(leaves, name, spec)
    local, shards = (leaves, NO_SHARDS) if as_given else backend.open_shards(leaves)
    present = [number for number, leaf in enumerate(leaves) if leaf is not None]
    arrays = local
    wrapped: dict[int, WrappedLeaf] = {}
    if present:
        unwrap = partial(_unwrap, backend, in_place=in_place, as_given=as_given)
        arrays, wrapped = _unwrap_each(backend, local, present, unwrap)

    with backend.computation_context():
        leaf_info = LeafInfo(backend, arrays, tuple(wrapped))
    leaf_info = _keep_leaf_info(leaf_info, (name, as_given, _signature(backend, local, shards)))
    return OpenedTree(leaf_info, leaves, arrays, spec, name, in_place, wrapped, shards, arrays)


def _unwrap_each(
    backend: Backend,
    leaves: list[Leaf],
    numbers: Sequence[int],
    unwrap: Callable[[Leaf], WrappedLeaf | None],
) -> tuple[list[Any], dict[int, WrappedLeaf]]:
    """Return the leaves, with dense arrays in place of wrapped ones, and each `WrappedLeaf`."""
    arrays = list(leaves)
    wrapped = {}
    # Integers become the default float, which depends on the device.
    with backend.computation_context(leaves[numbers[0]]):
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
    """Cache a `LeafInfo` for the next tree with its signature, and return the cached one."""
    # Compiled code caches nothing: it would be compiled again after each change of the cache.
    if key[2] is None:
        return leaf_info
    leaf_infos = leaf_info.backend.leaf_infos
    if len(leaf_infos) >= LEAF_INFO_CACHE_SIZE:
        leaf_infos.clear()
    return leaf_infos.setdefault(key, leaf_info)


def _raise_if_not_writable(tree: OpenedTree, *, as_given: bool) -> None:
    """Raise if leaves that never change, or integers by a rule of norms, would be changed."""
    for number in tree.wrapped:
        if not as_given and tree.is_integral(number):
            msg = (
                f"{tree.expression(number)} holds integers, which a rule of norms scales to "
                "fractions, so they can't be clipped in place; use clipped, report = "
                "uc.clip(grads, rule), or make them floating-point numbers"
            )
            raise TypeError(msg)

    if not tree.backend.writes:
        # Its error says what to use for arrays that never change.
        find_shared_storage(tree.backend, tree.leaves, tree.expression)


def _unwrap(backend: Backend, leaf: Leaf, *, in_place: bool, as_given: bool) -> WrappedLeaf | None:
    """Return the dense array in a leaf and the way back, ``None`` if the leaf is that array.

    Layers, such as float8 in a distributed tensor, are opened one by one.
    """
    outer = backend.unwrap(leaf, in_place=in_place, as_given=as_given)
    if outer is None:
        return None
    inner = _unwrap(backend, outer.array, in_place=in_place and not outer.copied, as_given=as_given)
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
        return f"{expression_of(name, spec.paths()[number])} is {article(noun)} {noun}"

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


# Parameters and their gradients.


def with_params(
    rule: RuleSpec, tree: OpenedTree, step: StepOptions
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


def _match_params(rule: RuleSpec, tree: OpenedTree, params: OpenedTree) -> OpenedTree:
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
        gradient = tree.expression(present[0])
        msg = f"{params.expression(present[0])} belongs to another framework than {gradient}"
        raise TypeError(msg)

    shapes = tree.shapes()
    for number in present:
        if params.leaves[number] is None:
            parameter = params.expression(number)
            msg = f"{tree.expression(number)} has no parameter: {parameter} is missing"
            raise ValueError(msg)

        shape = params.leaves[number].shape
        of_gradient = shapes[number]
        # A length that is known only at run time is None here.
        if not (shape == of_gradient or same_shape(shape, of_gradient)):
            msg = (
                f"{params.expression(number)} has shape {tuple(shape)}, but "
                f"{tree.expression(number)} has {tuple(of_gradient)}"
            )
            raise ValueError(msg)


def _take_stored_rows(rule: RuleSpec, tree: OpenedTree, number: int, array: Tensor) -> Array:
    """Return a parameter, at the rows that its sparse gradient stores if each row has a norm."""
    axes = tree.covered(rule.scope, number, len(array.shape))
    if axes is None or 0 in axes:
        return array
    if tree.wrapped[number].by_entry:
        msg = (
            f"{tree.expression(number)} is sparse, and stores single elements: {summarize(rule)} "
            "would compare them with other elements of the parameter; make the gradient dense, or "
            "use a scope of whole leaves"
        )
        raise TypeError(msg)

    return tree.backend.xp.take(array, tree.wrapped[number].rows, axis=0)


def _divide_alike(
    rule: RuleSpec, tree: OpenedTree, params: OpenedTree, arrays: list[Any]
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
