# SPDX-License-Identifier: MIT
"""Reductions over processes: which of them hold shards of what is measured,
and how partial sums are combined.

A step reduces at one line, between the sums of leaves and their roots: one payload for each group
of processes that hold shards of distributed leaves, and one for ``all_reduce``. Sums are reduced in
float64, where there is one, so that nothing overflows; of a replica that n processes hold, each
contributes 1/n. What differs between processes is a number in the payload, or agreed on at the
first step, by `Reduction.agree`. In a run of one process nothing here is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref
from zlib import crc32

import numpy as np

from uniclip._core.norm_space import NormSpace
from uniclip._core.tree import OpenedTree, Shard, ShardGroup
from uniclip._errors import check, holds_arrays, summarize
from uniclip.backends import backend_by
from uniclip.backends.base import (
    NUMPY,
    Backend,
    Op,
    Reduce,
    Terms,
    cast,
    in_groups,
    kept_lengths,
    op_of,
    take,
)
from uniclip.scopes import Scope

if TYPE_CHECKING:
    from uniclip._core.plan import Plan
    from uniclip.rule import Choices

REDUCTION_CACHE_SIZE = 64
"""The number of reductions that a rule keeps."""


AllReduce: TypeAlias = Reduce | str | tuple[str, ...] | Any
"""How to reduce over the parts of a tree: a function of ``(array, op)``, a process group, a mesh,
or names of axes.
"""
Shared: TypeAlias = Callable[[tuple[Any, ...], Any], bool | int]
"""How many processes hold a leaf, given its path and itself; true for all of them."""


class Reduction:
    """What the processes of an ``all_reduce`` know of each other.

    Python values only, as traces read them.
    """

    __slots__ = ("_reference", "checked", "narrow", "shared", "size")

    def __init__(self, reference: object, shared: Shared | None) -> None:
        self._reference = reference
        self.shared = shared
        self.checked = False
        """Whether the processes have compared their rules and norms."""
        self.narrow = True
        """Whether no process has float64 gradients."""
        self.size = 0
        """How many processes there are; 0 if unknown."""

    @property
    def all_reduce(self) -> Any:
        """The user's ``all_reduce``."""
        return follow_reference(self._reference)

    def reduce(self, backend: Backend, array: Any, op: Op) -> Any:
        """Reduce an array over the processes."""
        return reducer_of(backend, self.all_reduce)(array, op)

    def agree(self, rule: Choices, names: list[str] | None, math_: NormSpace) -> None:
        """Compare the rules and the norms of all processes, and count these, at the first step.

        All come to the same conclusion, since it is drawn from one sum.

        Parameters
        ----------
        rule : Rule
        names : list of str or None
            The groups or leaves of all norms; ``None`` if there is one norm.
        math_ : NormSpace

        Raises
        ------
        ValueError
            In every process, if they differ.
        """
        # Text cannot be summed: four bytes of its checksum, and their squares, can.
        choices = _describe_choice([getattr(rule, choice.name) for choice in fields(rule)])
        rows: Any = 1 if names is None else names
        words = _digest(f"{choices} {self.shared is not None} {rows}")
        squares = [word * word for word in words]
        sent = np.asarray([1.0, not math_.narrow, *words, *squares])
        with math_.library.allow_float64():
            [total] = reduce_payload(math_, [sent], "sum", self)

        # Numbers are equal in all processes if the sum of their squares says that they do not vary.
        totals = np.asarray(math_.read(total), np.float64)
        count, wide = totals[:2]
        if not np.allclose(count * totals[6:], totals[2:6] ** 2, rtol=1e-12):
            msg = (
                "the processes that all_reduce joins use different rules or have different "
                f"leaves or groups, and this one {summarize(rule)}: use one rule in all of them, "
                "on the same tree, with None for what is absent; leaves that are whole in their "
                "process need no all_reduce, and groups with a limit for each name "
                "(uc.by_group_norm) may be empty in some"
            )
            raise ValueError(msg)

        self.size = round(float(count))
        self.narrow = bool(wide == 0)
        self.checked = True


def reduction_of(
    reductions: dict[Hashable, Reduction] | None,
    all_reduce: AllReduce | None,
    shared: Shared | None,
) -> Reduction | None:
    """Return the reduction of a rule over some processes, ``None`` without ``all_reduce``.

    It is kept in ``reductions``; compiled code has none and makes a new one.
    """
    check_shared(all_reduce, shared)
    if all_reduce is None:
        return None
    wanted = "a function, a process group, a mesh or a name"
    check("all_reduce", all_reduce, isinstance(all_reduce, Hashable), wanted)
    if reductions is None:
        return Reduction(all_reduce, shared)

    # One reduction for each pair, since what the processes agreed on holds for both.
    reference = keep_reference(all_reduce)
    key = (reference, shared)
    if key not in reductions:
        while len(reductions) >= REDUCTION_CACHE_SIZE:
            reductions.pop(next(iter(reductions)))
        reductions[key] = Reduction(reference, shared)

    return reductions[key]


def keep_reference(all_reduce: AllReduce | None) -> Any:
    """Return a reference to keep.

    A weak one to a process group, which must end when it is destroyed.
    """
    return ref(all_reduce) if hasattr(all_reduce, "allreduce") else all_reduce


def follow_reference(reference: object) -> Any:
    """Return what `keep_reference` was given."""
    return reference() if isinstance(reference, ref) else reference


def with_reduced_library(tree: OpenedTree, all_reduce: AllReduce | None) -> OpenedTree:
    """Return opened gradients; without any, of the library whose processes are joined, if known."""
    if all_reduce is None or tree.leaf_info.present:
        return tree
    return tree._replace(leaf_info=tree.leaf_info.without_leaves(backend_by(all_reduce)))


def check_shared(all_reduce: AllReduce | None, shared: Shared | None) -> None:
    """Raise if ``shared`` is no function, or there is no ``all_reduce``."""
    check("shared", shared, shared is None or callable(shared), "a function of (path, leaf)")
    if shared is not None and all_reduce is None:
        msg = (
            "shared says which leaves are copies beside parts, and nothing joins parts: give "
            "all_reduce, too"
        )
        raise ValueError(msg)


class Payload(NamedTuple):
    """What processes reduce together with the sums of leaves; ``None`` for what is not asked for.

    There is none in a run of one process.
    """

    losses: list[Any] | None = None
    """The sum of their losses, and how many there are."""
    unsound: list[Any] | None = None
    """How many arrays have entries that are not finite."""
    present: list[Any] | None = None
    """How many gradients each norm has, an array for each block."""
    sizes: list[Any] | None = None
    """How many entries each norm has, an array for each block.

    Those of distributed leaves are known.
    """

    @property
    def arrays(self) -> list[Any]:
        """All of its arrays."""
        return [array for arrays in self if arrays for array in arrays]

    def fill(self, arrays: Iterable[Any]) -> Payload:
        """Return the payload with other arrays in the places of its own."""
        left = iter(arrays)
        return Payload(*[field and [next(left) for _ in field] for field in self])


class Collectives:
    """How processes reduce what a plan measures: by ``all_reduce``, and over the groups of
    processes that hold the shards of distributed leaves.
    """

    def __init__(
        self,
        plan: Plan,
        tree: OpenedTree,
        reduction: Reduction | None,
        shards: Sequence[dict[int, Shard]],
    ) -> None:
        self._plan = plan
        self.reduction = reduction
        self.replicas = None if reduction is None else _replicas_of(plan, tree, reduction)
        """How many processes hold each leaf, ``None`` if one does.

        0 if the processes have not been counted.
        """
        if self.replicas is not None and 0 in self.replicas and plan.math.compiled:
            msg = (
                "shared marks copies, and in code that is compiled it is not known how many "
                "processes hold one: join along named axes, or run the step before it is compiled"
            )
            raise TypeError(msg)

        self._shard_groups: list[list[Any]] = []
        """For each leaf of the gradients, and of the parameters, the processes that hold its
        norms' shards.
        """
        self.divided = False
        """Whether some norms lie in this process alone, as an axis that they keep is divided."""
        for by_leaf in shards:
            of_leaves = [(by_leaf.get(number), axes) for number, axes in enumerate(plan.axes)]
            self._shard_groups.append([s and s.shard_groups(axes) for s, axes in of_leaves])
            self.divided |= any([s is not None and s.divided(axes) for s, axes in of_leaves])

        self.mesh_groups = _cover_meshes(shards, compiled=plan.math.compiled)
        """As few groups of processes as cover all that hold shards.

        They reduce what belongs to no leaf.
        """
        self._groups = _distinct([*self._shard_groups, self.mesh_groups])
        """All groups of processes, in the same order in each process."""

    def reduce_sums(
        self, trees: Sequence[OpenedTree], terms: Sequence[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the sums of each norm, an array for each block of each tree, and the payload,
        reduced over all processes.
        """
        if self._groups:
            rows, payload = self._over_shards(trees, terms, payload)
        else:
            rows = []
            for tree, of_tree in zip(trees, terms, strict=True):
                rows += self._plan.math.sums(tree, of_tree)

        if self.reduction is None:
            return rows, payload
        op = op_of(terms[0].p) if terms else "sum"
        arrays = reduce_payload(self._plan.math, [*rows, *payload.arrays], op, self.reduction)
        return arrays[: len(rows)], payload.fill(arrays[len(rows) :])

    def weigher(self, tree: OpenedTree, p: float) -> Callable[[list[Any]], list[Any]] | None:
        """Return the function that weighs the sums of a tree's leaves,
        ``None`` if none is held by several processes.
        """
        if self.replicas is None and not tree.shards:
            return None
        return partial(self._weigh, tree, p)

    def _weigh(self, tree: OpenedTree, p: float, sums: list[Any]) -> list[Any]:
        """Return the sums of leaves, those of replicas divided by their number,
        so that together they count once.
        """
        shards = tree.shards
        weighed = []
        for number, total in zip(self._plan.order, sums, strict=True):
            # A maximum takes replicas as they are.
            replicas = 1 if self.replicas is None else self.replicas[number]
            value = total
            shard = shards.get(number)
            if shard is not None:
                value = shard.weigh(total)
                replicas *= shard.replicas

            weighed.append(value / replicas if replicas > 1 and p < math.inf else value)

        return weighed

    def _over_shards(
        self, trees: Sequence[OpenedTree], terms: Sequence[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the sums of each block of each tree, and the payload, reduced over the processes
        that hold the shards of each leaf.
        """
        plan = self._plan
        op = op_of(terms[0].p) if terms else "sum"
        sums = list(map(self._sums_of_leaves, trees, terms))
        sources: list[OpenedTree | None] = list(trees)
        if payload.present is not None:
            # Gradients are counted as a further tree, whose leaves have the sum 1.
            sums.append(dict.fromkeys(plan.places, np.ones(())))
            sources.append(None)

        # Each leaf is reduced over the processes that hold its shards, each group in one payload.
        # Which norms form a block may differ from process to process, the order of leaves does not.
        norms = sorted(enumerate(plan.members), key=lambda norm: norm[1][:1])
        addends: list[list[Any]] = [[] for _ in range(len(norms) * len(sums))]
        extras = Payload(payload.losses, payload.unsound)
        for group in (None, *self._groups):
            partial_sums = {}
            for source, tree in enumerate(sources):
                of_leaves = self._shard_groups[0 if tree is None else source]
                for row, members in norms:
                    numbers = [number for number in members if of_leaves[number] == group]
                    addend = self._add_shards(sums[source], numbers, op)
                    # A process whose gradient is absent takes part, or others would wait for it.
                    if addend is None and numbers and group is not None:
                        addend = self._nothing(tree, numbers[0])
                    if addend is not None:
                        partial_sums[source * len(norms) + row] = addend

            of_group, extras = self._reduce_within(group, partial_sums, extras, op)
            for row, value in of_group.items():
                addends[row].append(value)

        # The leaves of a norm may be reduced by several groups, and by none.
        totals = [plan.math.add(of_norm, op) for of_norm in addends]
        blocks = [plan.math.stack(list(b)) for b in in_groups(totals, plan.heights * len(sums))]
        count = len(trees) * len(plan.blocks)
        present = None if payload.present is None else blocks[count:]
        reduced = payload._replace(losses=extras.losses, unsound=extras.unsound, present=present)
        return blocks[:count], reduced

    def _reduce_within(
        self, group: ShardGroup | None, partial_sums: dict[int, Any], extras: Payload, op: Op
    ) -> tuple[dict[int, Any], Payload]:
        """Return sums reduced within a group of processes, ``None`` for this one alone.

        What belongs to no leaf goes along in those groups that cover all meshes.
        """
        if group is None:
            return partial_sums, extras
        sent = list(partial_sums.values())
        if group not in self.mesh_groups:
            reduced = reduce_payload(self._plan.math, sent, op, group)
            return dict(zip(partial_sums, reduced, strict=True)), extras

        reduced = reduce_payload(self._plan.math, [*sent, *extras.arrays], op, group)
        extras = extras.fill(reduced[len(sent) :])
        return dict(zip(partial_sums, reduced[: len(sent)], strict=True)), extras

    def _add_shards(self, sums: dict[int, Any], numbers: list[int], op: Op) -> Any:
        """Return what this process adds to a norm of some leaves, ``None`` if nothing."""
        addends = [sums[number] for number in numbers if number in sums]
        return self._plan.math.add(addends, op) if addends else None

    def _sums_of_leaves(self, tree: OpenedTree, terms: Terms) -> dict[int, Any]:
        """Return the sums of each leaf, by its number."""
        # As terms of which each has a norm by itself.
        plan = self._plan
        heights = list(map(sum, terms.in_blocks(terms.counts)))
        of_leaves = terms._replace(counts=[1] * len(terms.arrays), blocks=heights)
        rows: list[Any] = []
        for block in plan.math.sums(tree, of_leaves):
            rows += plan.math.backend.unstack(block)
        return {number: row for number, row in zip(plan.order, rows, strict=True) if number >= 0}

    def _nothing(self, tree: OpenedTree | None, number: int) -> Any:
        """Return the sums of an absent shard of a distributed leaf, or of its gradients' count."""
        lengths = () if tree is None else tree.shard(number).local
        return self._plan.math.zeros(kept_lengths(lengths, self._plan.axes[number]))

    def true_in_all_shards(self, flags: list[Any]) -> list[Any]:
        """Return flags of the norms, each true only if it is in all processes that have norms of
        their own.
        """
        if not self.divided:
            return flags
        math_ = self._plan.math
        xp = self._plan.math.xp
        # Flags that are false are counted as faults: a maximum finds one in any process.
        for group in self.mesh_groups:
            faults = [1 - xp.astype(xp.asarray(flag), xp.float32) for flag in flags]
            largest = reduce_payload(math_, faults, "max", group)
            flags = math_.as_norms([fault < 1 for fault in largest])

        return flags

    def count_once(self, counts: dict[int, Any]) -> dict[int, Any]:
        """Return the numbers of entries of leaves, those of replicas divided by their number."""
        if self.replicas is None:
            return counts
        return {number: count / self.replicas[number] for number, count in counts.items()}

    def loss_sums(self, loss: Any) -> list[Any] | None:
        """Return the loss of this process and its count, to be summed over all.

        Both are 0 without a loss; ``None`` for one that is reduced already.
        """
        if isinstance(loss, Loss):
            return None
        if loss is None:
            return [np.zeros(()), np.zeros(())]
        library = self._plan.math.library
        number = library.detach(library.xp.astype(library.xp.asarray(loss), library.xp.float32))
        return [library.xp.reshape(number, ()), np.ones(())]


class Exchange:
    """The reductions of one step over its processes.

    The first sum takes along what else they exchange, in one payload.
    """

    def __init__(
        self, collectives: Collectives, trees: Sequence[OpenedTree], payload: Payload
    ) -> None:
        self._collectives = collectives
        self._trees = trees
        self._waiting: Payload | None = payload if any(payload) else None
        self._reduced = Payload()

    def reduce_sums(self, terms: Sequence[Terms]) -> list[Any]:
        """Return the sums of each norm over all processes, an array for each block of each tree."""
        payload = self._waiting
        # A maximum cannot take sums along.
        if payload is None or not terms or op_of(terms[0].p) != "sum":
            return self._collectives.reduce_sums(self._trees, terms, Payload())[0]
        rows, self._reduced = self._collectives.reduce_sums(self._trees, terms, payload)
        self._waiting = None
        return rows

    def finish(self) -> Payload:
        """Return the reduced payload, which goes by itself if no sum took it along."""
        if self._waiting is not None:
            _, self._reduced = self._collectives.reduce_sums([], [], self._waiting)
            self._waiting = None
        return self._reduced


def _distinct(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """Return each group of processes once, in the order in which they are met."""
    distinct: dict[Any, None] = {}
    for of_tree in groups:
        for group in of_tree:
            if group is not None:
                distinct[group] = None
    return list(distinct)


def _cover_meshes(shards: Sequence[dict[int, Shard]], *, compiled: bool) -> list[Any]:
    """Return as few groups of processes as cover all that hold shards."""
    groups = _distinct([[s.shard_groups() for s in by_leaf.values()] for by_leaf in shards])
    # Compiled code does not list the processes of a group.
    if len(groups) < 2 or compiled:
        return groups

    # The largest first, so that smaller ones within them are left out.
    covering: list[Any] = []
    for group in sorted(groups, key=lambda group: -len(group.processes())):
        if not any([group.processes() <= other.processes() for other in covering]):
            covering.append(group)

    return covering


def _digest(text: str) -> list[float]:
    """Return four numbers of 8 bits each: their squares are exact in float32,
    in which some of the user's reduce.
    """
    return [float(byte) for byte in crc32(text.encode()).to_bytes(4, "big")]


def _describe_choice(value: Any) -> str:
    """Return what a choice is made of, by qualified names and numbers, equal in each process."""
    if value is None or isinstance(value, (str, Number)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe_choice, value))})"
    if hasattr(value, "dtype"):
        return f"array {tuple(value.shape)}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"

    attributes: list[Any] = []
    if is_dataclass(value):
        attributes = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, partial):
        attributes = [value.func, *value.args]
    else:
        for attribute in getattr(value, "__dict__", {}).values():
            if isinstance(attribute, (str, Number)):
                attributes.append(attribute)

    described = ", ".join(map(_describe_choice, attributes))
    return f"{type(value).__module__}.{type(value).__qualname__}({described})"


def _replicas_of(plan: Plan, tree: OpenedTree, reduction: Reduction) -> list[int] | None:
    """Return how many processes hold each leaf, ``None`` if each is held once."""
    present = tree.leaf_info.present
    arrays = take(tree.arrays, present)
    shared: list[bool | int] = []
    marked = None
    if reduction.shared is not None:
        for path, leaf in zip(tree.paths(), tree.leaves, strict=True):
            is_shared = reduction.shared(path, leaf)
            wanted = "True, False, or a number of processes"
            check("what shared(path, leaf) returns", is_shared, not holds_arrays(is_shared), wanted)
            shared.append(is_shared)

        marked = list(map(bool, take(shared, present)))

    # A library may know where its arrays lie, and then says so itself.
    counts = plan.math.library.replicas(
        arrays, reduction.all_reduce, marked, lambda n: tree.place(present[n])
    )
    if counts is not None:
        replicas = [1] * len(tree.leaves)
        for number, count in zip(present, counts, strict=True):
            replicas[number] = count
        return replicas

    if not any(shared):
        return None
    # True means all processes, whose number is known once they have agreed.
    numbers_of_processes = []
    for is_shared in shared:
        count = max(1, int(is_shared))
        if isinstance(is_shared, (bool, np.bool_)) and is_shared:
            count = reduction.size
        numbers_of_processes.append(count)

    return numbers_of_processes


def reduce_payload(
    math_: NormSpace, arrays: list[Any], op: Op, reduction: Reduction | ShardGroup
) -> list[Any]:
    """Return arrays reduced over processes, as one vector in float64; NaN stays NaN in a maximum.

    NumPy arrays stay NumPy arrays in the mode in which the host reads them.
    """
    if not arrays:
        return []
    backend = math_.library
    xp: Any = math_.library.xp
    local = [np.asarray(x) if isinstance(x, (float, *NUMPY)) else x for x in arrays]
    if math_.host and all([isinstance(array, np.ndarray) for array in local]):
        joined = np.concatenate([array.ravel() for array in local])
        vector = math_.to_library(joined.astype(np.float64, copy=False))
    else:
        local = list(map(math_.to_library, local))
        # XLA makes one reduction of many.
        if math_.separate:
            reduced = []
            for array in local:
                wide = cast(xp, array, math_.sum_dtype)
                reduced.append(_reduce(math_, wide, op, reduction))
            return reduced

        flat = []
        for array in local:
            here = backend.to_device_of(local[0], array)
            flat.append(xp.reshape(cast(xp, here, math_.sum_dtype), (-1,)))
        vector = xp.concat(flat, axis=0)

    # One reduction costs a latency; a longer vector costs next to nothing.
    vector = _reduce(math_, vector, op, reduction)
    view = backend.as_numpy(vector) if math_.host else None
    if view is not None:
        xp = np
        vector = view

    return _split(xp, vector, [tuple(array.shape) for array in local])


def _split(xp: Any, vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the arrays of some shapes that a vector consists of."""
    arrays = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        arrays.append(xp.reshape(vector[start:end], shape))
        start = end
    return arrays


def _reduce(math_: NormSpace, array: Any, op: Op, reduction: Reduction | ShardGroup) -> Any:
    """Return an array reduced by a `Reduction`, or by the processes that hold shards."""
    reduce: Reduce
    if isinstance(reduction, Reduction):
        reduce = partial(reduction.reduce, math_.library)
    else:
        reduce = reduction.reduce
    if op == "sum":
        return reduce(array, op)
    return _reduce_to_largest(math_.library.xp, array, reduce)


def _reduce_to_largest(xp: Any, value: Any, reduce: Reduce) -> Any:
    """Return the largest of all processes' values, NaN if one of them is NaN."""
    # A maximum of several processes may drop NaN: it goes along as a flag.
    is_nan = xp.isnan(value)
    number = xp.where(is_nan, xp.zeros_like(value), value)
    flag = xp.astype(is_nan, value.dtype)
    both = xp.concat([xp.reshape(number, (-1,)), xp.reshape(flag, (-1,))], axis=0)
    reduced = reduce(both, "max")

    shape = tuple(value.shape)
    top, flag = _split(xp, reduced, [shape, shape])
    bad = flag > 0
    # 0/0, not a constant NaN, which a debugger would report as a result.
    return xp.where(bad, xp.zeros_like(top), top) / xp.astype(xp.logical_not(bad), value.dtype)


def reducer_of(backend: Backend, all_reduce: AllReduce | None) -> Reduce:
    """Return a function of ``(array, op)`` that reduces over the parts of a tree.

    Raises
    ------
    TypeError
        If ``all_reduce`` is neither a function nor what the library of the backend reduces by.
    """
    reduce: Reduce | None = backend.reducer(all_reduce)
    if reduce is not None:
        return reduce
    if callable(all_reduce):
        return all_reduce
    msg = (
        f"all_reduce must be {backend.joins_by} for gradients of this library, got "
        f"{summarize(all_reduce)}"
    )
    raise TypeError(msg)


def raise_if_kept_axes(scope: Scope, all_reduce: AllReduce | None) -> None:
    """Raise if norms are along axes and ``all_reduce`` is given: which axis is cut is not known.

    Raises
    ------
    ValueError
        If the norms of the scope keep axes: those of different units, rows or entries would be
        added.
    """
    if all_reduce is not None and scope.axes is not None:
        msg = (
            f"all_reduce= joins the norms of whole leaves, and {scope!r} gives a leaf many: plain "
            "arrays do not say which of their axes is divided, so norms of different units could "
            "be added. Leave all_reduce= out where each leaf is whole in its process; where "
            "leaves are divided, use distributed arrays (DTensors, or jax.jit with sharded "
            "arrays), which need no all_reduce="
        )
        raise ValueError(msg)


def mean_loss(library: Backend, loss: Any, sums: Sequence[Any]) -> Any:
    """Return the mean of the losses of all processes, given their sum and number.

    ``None`` if there is none.
    """
    xp = library.xp
    total, count = sums
    if loss is not None:
        return total / count
    if library.readable(count):
        return total / count if bool(count > 0) else None

    # Without a value, no loss is -∞, which is no spike and enters no state.
    has_loss = count > 0
    mean = total / xp.where(has_loss, count, xp.ones_like(count))
    return mean + xp.log(xp.astype(has_loss, count.dtype))


class Loss(NamedTuple):
    """A loss that is already reduced."""

    mean: Any
    """That of all processes, ``None`` if there is none."""
    own: Any
    """That of this process."""
