# SPDX-License-Identifier: MIT
"""Cross-process reductions: which processes hold which shards, and how sums are all-reduced.

A usual step reduces once, between the sums of leaves and their roots: one vector along each
dimension of a mesh that shards leaves, and one for ``all_reduce``. (Sums in units of the largest
modulus take two more, and a maximum cannot carry the payload.) Each reduction costs a latency, so
the vector also has what else processes exchange, the `Payload`. Sums are reduced in float64 where
the library has it, so that nothing overflows. Replicas count once: sums of those that ``shared``
marks are divided by their number; those along a mesh are not reduced, or are divided, too, if all
processes have to agree. Facts that never change are agreed on at the first step, by
`Reduction.agree`. In a run of one process nothing is reduced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from numbers import Number
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref
from zlib import crc32

import numpy as np

from uniclip._core.norm_space import NormSpace
from uniclip._core.tree import OpenedTree
from uniclip._errors import check, holds_arrays, summarize
from uniclip._types import Op
from uniclip.backends import backend_by
from uniclip.backends.arithmetic import cast, op_of
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import (
    NUMPY,
    Backend,
    Reduce,
    Shard,
    ShardGroup,
    Terms,
    kept_lengths,
    take,
)
from uniclip.scopes import Scope

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec
    from uniclip._core.sizes import Layout

REDUCTION_CACHE_SIZE = 64
"""The largest number of reductions in the cache of a rule."""


AllReduce: TypeAlias = Reduce | str | tuple[str, ...] | Any
"""How to reduce over processes: a function of ``(array, op)``, a process group, a mesh, or names of
axes.
"""
Shared: TypeAlias = Callable[[tuple[Any, ...], Any], bool | int]
"""A function of a leaf's path and the leaf: how many processes hold it, ``True`` for all."""


class Reduction:
    """What the processes of one ``all_reduce`` have agreed on.

    The attributes are Python values, since traced code reads them.
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
        """Reduce an array over the processes.

        Raises
        ------
        TypeError
            If ``all_reduce`` is a function that returns something else.
        """
        reduced = reducer_of(backend, self.all_reduce)(array, op)
        # Functions that reduce in place often return nothing.
        if not (hasattr(reduced, "shape") and same_shape(reduced.shape, array.shape)):
            msg = (
                f"all_reduce must return the reduced array, of shape {tuple(array.shape)}, got "
                f"{summarize(reduced)}; if it reduces in place, return its array"
            )
            raise TypeError(msg)

        return reduced

    def agree(self, rule: RuleSpec, names: list[str] | None, space: NormSpace) -> None:
        """Compare the rules and the norms of all processes, and count the processes.

        Called at the first step. All processes raise or none does, since they compare one sum: if
        only some raised, the others would wait for them forever.

        Parameters
        ----------
        rule : Rule
        names : list of str or None
            The groups or leaves of all norms; ``None`` if there is one norm.
        space : NormSpace

        Raises
        ------
        ValueError
            In every process, if rules or norms differ.
        """
        # Processes can reduce numbers, not text: they sum four bytes of its checksum, and squares.
        choices = _describe_choice([getattr(rule, choice.name) for choice in fields(rule)])
        rows: Any = 1 if names is None else names
        words = _digest(f"{choices} {self.shared is not None} {rows}")
        squares = [word * word for word in words]
        sent = np.asarray([1.0, not space.narrow, *words, *squares])
        with space.library.allow_float64():
            [total] = reduce_payload(space, [sent], "sum", self)

        # n numbers are equal if n times the sum of their squares is the square of their sum.
        totals = np.asarray(space.read(total), np.float64)
        count, wide = totals[:2]
        if not np.allclose(count * totals[6:], totals[2:6] ** 2, rtol=1e-12):
            msg = (
                "the processes in all_reduce= have different rules, leaves, or groups (this one "
                f"has {summarize(rule)}); use the same rule and the same tree in each process, "
                "with None for an absent gradient. Omit all_reduce= if no leaf is sharded. With "
                "uc.by_group_norm, a process may have no leaf of a group"
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
    """Return the reduction for an ``all_reduce``, ``None`` without one.

    It is cached in ``reductions``. Compiled code passes ``None`` and gets a new one.
    """
    check_shared(all_reduce, shared)
    if all_reduce is None:
        return None
    wanted = "a function, a process group, a mesh or a name"
    check("all_reduce", all_reduce, isinstance(all_reduce, Hashable), wanted)
    if reductions is None:
        return Reduction(all_reduce, shared)

    # The key is a pair, since processes have compared their rules with or without ``shared``.
    reference = keep_reference(all_reduce)
    key = (reference, shared)
    reduction = reductions.get(key)
    if reduction is None:
        # All at once: threads that share a rule would remove the same one.
        if len(reductions) >= REDUCTION_CACHE_SIZE:
            reductions.clear()
        reduction = reductions.setdefault(key, Reduction(reference, shared))
    return reduction


def keep_reference(all_reduce: AllReduce | None) -> Any:
    """Return a reference to cache.

    It is weak for a process group: a strong one would keep a destroyed group alive.
    """
    return ref(all_reduce) if hasattr(all_reduce, "allreduce") else all_reduce


def follow_reference(reference: object) -> Any:
    """Return what `keep_reference` was given."""
    return reference() if isinstance(reference, ref) else reference


def with_reduced_library(tree: OpenedTree, all_reduce: AllReduce | None) -> OpenedTree:
    """Return opened gradients, with the backend of ``all_reduce`` if all are absent."""
    if all_reduce is None or tree.leaf_info.present:
        return tree
    return tree._replace(leaf_info=tree.leaf_info.without_leaves(backend_by(all_reduce)))


def check_shared(all_reduce: AllReduce | None, shared: Shared | None) -> None:
    """Raise if ``shared`` is not a function, or is passed without ``all_reduce``."""
    check("shared", shared, shared is None or callable(shared), "a function of (path, leaf)")
    if shared is not None and all_reduce is None:
        msg = (
            "shared= marks the replicas among the leaves that all_reduce= reduces: pass "
            "all_reduce=, too"
        )
        raise ValueError(msg)


class Payload(NamedTuple):
    """What processes reduce in addition to sums, ``None`` for what a step does not need."""

    losses: list[Any] | None = None
    """The sum of the losses, and their number."""
    nonfinite_arrays: list[Any] | None = None
    """The number of arrays with elements that are not finite."""
    present: list[Any] | None = None
    """The number of gradients of each norm, an array for each block."""
    sizes: list[Any] | None = None
    """The number of elements of each norm, an array for each block.

    ``all_reduce`` alone sums it: a distributed leaf has its whole shape in every process.
    """

    @property
    def arrays(self) -> list[Any]:
        """All of its arrays."""
        return [array for arrays in self if arrays for array in arrays]

    def fill(self, arrays: Iterable[Any]) -> Payload:
        """Return a payload with the same fields, filled with other arrays."""
        remaining = iter(arrays)
        return Payload(*[field and [next(remaining) for _ in field] for field in self])


class Collectives:
    """How processes reduce what a plan measures: by ``all_reduce``, and over the groups of
    processes that hold the shards of distributed leaves.
    """

    def __init__(
        self,
        plan: Layout,
        rule: RuleSpec,
        trees: Sequence[OpenedTree],
        reduction: Reduction | None,
    ) -> None:
        self._plan = plan
        self.reduction = reduction
        self.replicas = None if reduction is None else _replicas_of(plan, trees[0], reduction)
        """How many processes hold each leaf, 0 if they have not been counted.

        ``None`` if no leaf has replicas.
        """
        if self.replicas is not None and 0 in self.replicas and plan.space.compiled:
            msg = (
                "shared= marks replicas, and compiled code does not know how many processes hold "
                "one: pass named axes as all_reduce=, or run one step before it is compiled"
            )
            raise TypeError(msg)

        self.norms_sharded = False
        """Whether each process has norms of its own, because an axis that norms keep is sharded."""
        for tree in trees:
            for number, shard in tree.shards.items():
                self.norms_sharded |= shard.divided(plan.axes[number]) is not None

        # Compilers do not trace the calls that list the processes of a group.
        groups = _groups_of_meshes(trees)
        self.mesh_groups = groups if plan.space.compiled else _cover(groups)
        """As few groups of processes as cover all that hold shards.

        They reduce what belongs to no leaf, such as losses.
        """
        self._parts = [_parts_of(plan, tree, n) for n, tree in enumerate(trees)]
        self._is_reduced = any([part.groups for parts in self._parts for part in parts])
        """Whether there are norms of shards in several processes."""
        # Replicas that are reduced by themselves may differ in the last bit. Where a rule decides
        # more than a factor, all processes have to decide alike, so all reduce every sum.
        self._everywhere: list[Any] = []
        if rule.must_agree and not (self.norms_sharded or plan.space.derives):
            self._everywhere = groups
        self._shard_sums: dict[Hashable, ShardSums] = {}

    def reduce_sums(
        self, trees: Sequence[OpenedTree], terms: Sequence[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the sums of each norm, an array for each block of each tree, and the payload,
        reduced over all processes.
        """
        if self._is_reduced:
            blocks, payload = self._over_shards(trees, terms, payload)
        else:
            blocks = []
            for tree, of_tree in zip(trees, terms, strict=True):
                blocks += self._plan.space.sums(tree, of_tree)
            # Whole leaves of meshes, or norms whose axes are all sharded.
            for group in self.mesh_groups:
                extras = Payload(payload.losses, payload.nonfinite_arrays)
                extras = extras.fill(reduce_payload(self._plan.space, extras.arrays, "sum", group))
                payload = extras._replace(present=payload.present, sizes=payload.sizes)

        if self.reduction is None:
            return blocks, payload
        op = op_of(terms[0].p) if terms else "sum"
        arrays = reduce_payload(self._plan.space, [*blocks, *payload.arrays], op, self.reduction)
        return arrays[: len(blocks)], payload.fill(arrays[len(blocks) :])

    def weigher(
        self, tree: OpenedTree, p: float, order: Sequence[int] | None = None
    ) -> Callable[[list[Any]], list[Any]] | None:
        """Return a function of the sums of leaves, in the order of the plan or in another one, by
        which replicas count once.

        ``None`` if no leaf can have replicas.
        """
        shards = tree.shards if self._plan.space.derives else {}
        if self.replicas is None and not shards:
            return None
        return partial(self._weigh, shards, p, self._plan.order if order is None else order)

    def _weigh(
        self, shards: dict[int, Shard], p: float, order: Sequence[int], sums: list[Any]
    ) -> list[Any]:
        """Return the sums of leaves, divided by the number of their replicas."""
        # `Shard.weigh_derivative` changes only the derivative of a sum; its value is divided below.
        weighed = []
        for number, total in zip(order, sums, strict=True):
            replicas = 1 if self.replicas is None else self.replicas[number]
            value = total
            shard = shards.get(number)
            if shard is not None:
                value = shard.weigh_derivative(total)
                replicas *= shard.replicas

            # Replicas do not change a maximum.
            weighed.append(value / replicas if replicas > 1 and p < math.inf else value)

        return weighed

    def _over_shards(
        self, trees: Sequence[OpenedTree], terms: Sequence[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the sums of each block of each tree, and the payload, reduced over the processes
        that hold the shards of each leaf.
        """
        space = self._plan.space
        op = op_of(terms[0].p) if terms else "sum"
        shard_sums = self._shard_sums_of(trees, counts=payload.present is not None)
        vector = shard_sums.sum_here(trees, terms, self.weigher, op)
        extras = Payload(payload.losses, payload.nonfinite_arrays)
        for group in dict.fromkeys([*shard_sums.groups, *self.mesh_groups]):
            sent = shard_sums.select(vector, group)
            carries = group in self.mesh_groups
            carried = extras.arrays if carries else []
            reduced = reduce_payload(space, [*sent, *carried], op, group)
            vector = shard_sums.put_back(vector, group, reduced[: len(sent)])
            if carries:
                extras = extras.fill(reduced[len(sent) :])

        blocks = shard_sums.to_blocks(vector, op)
        count = len(trees) * len(self._plan.blocks)
        if payload.present is not None:
            extras = extras._replace(present=blocks[count:])
        return blocks[:count], extras._replace(sizes=payload.sizes)

    def _shard_sums_of(self, trees: Sequence[OpenedTree], *, counts: bool) -> ShardSums:
        """Return how the sums of some trees are reduced; it is made once for a plan."""
        sources = tuple([int(tree.name == "params") for tree in trees])
        key = sources, counts
        if key not in self._shard_sums:
            parts = [part for source in sources for part in self._parts[source]]
            if counts:
                parts += [part._replace(source=_COUNTS, lengths=()) for part in self._parts[0]]
            self._shard_sums[key] = ShardSums(self._plan, parts, self._everywhere)
        return self._shard_sums[key]

    def true_in_all_shards(self, flags: list[Any]) -> list[Any]:
        """Return flags, each true only if it is true in all processes.

        They differ only if each process has norms of its own.
        """
        if not self.norms_sharded:
            return flags
        space = self._plan.space
        xp = self._plan.space.xp
        # The reductions are sum and max: all flags are true if the largest of their negations is 0.
        for group in self.mesh_groups:
            negations = [1 - xp.astype(xp.asarray(flag), xp.float32) for flag in flags]
            largest = reduce_payload(space, negations, "max", group)
            flags = space.as_norms([negation < 1 for negation in largest])

        return flags

    def count_once(self, counts: dict[int, Any]) -> dict[int, Any]:
        """Return the numbers of elements of leaves, divided by the number of replicas."""
        if self.replicas is None:
            return counts
        return {number: count / self.replicas[number] for number, count in counts.items()}


_COUNTS = 2
"""The source of the numbers of gradients, as if they were one more tree."""


class _Part(NamedTuple):
    """The leaves of one norm whose shards are held by the same processes."""

    source: int
    """0 for the gradients, 1 for the parameters, or `_COUNTS`."""
    block: int
    """The block of its norm."""
    row: int
    """The row of its norm in the block."""
    groups: tuple[Any, ...]
    """The processes over which it is reduced; empty for leaves that are whole in each process."""
    leaves: tuple[int, ...]
    """Its leaves, absent ones too."""
    present: tuple[int, ...]
    """Those that this process has."""
    lengths: tuple[int, ...]
    """The lengths of the axes that its norm keeps."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.lengths)

    @property
    def is_computed(self) -> bool:
        """Whether it is a sum of leaves of this process, which each step computes."""
        return self.source != _COUNTS and bool(self.present)

    @property
    def constants(self) -> list[float]:
        """The number of its gradients, or zeros, if it is not computed."""
        if self.source == _COUNTS:
            return [float(len(self.present))]
        return [] if self.present else [0.0] * self.size


def _parts_of(plan: Layout, tree: OpenedTree, source: int) -> list[_Part]:
    """Return the parts of all norms, those with the same processes side by side in each block."""
    norms = iter(plan.members)
    parts: list[_Part] = []
    for number, block in enumerate(plan.blocks):
        of_block: dict[Any, list[_Part]] = {}
        for row in range(len(block.groups)):
            by_groups: dict[Any, list[int]] = {}
            for leaf in next(norms):
                shard = tree.shard(leaf)
                groups = ()
                if shard is not None:
                    # A derivative counts each replica, so all of them are reduced.
                    groups = shard.groups(plan.axes[leaf], replicas=plan.space.derives)
                by_groups.setdefault(groups, []).append(leaf)

            for groups, leaves in by_groups.items():
                present = tuple([leaf for leaf in leaves if leaf in plan.places])
                # A process whose gradient is absent takes part, or others would wait for it.
                if present or groups:
                    lengths = _kept_of(plan, tree, (*present, *leaves)[0])
                    part = _Part(source, number, row, groups, tuple(leaves), present, lengths)
                    of_block.setdefault(groups, []).append(part)

        for of_groups in of_block.values():
            parts += of_groups
    return parts


def _kept_of(plan: Layout, tree: OpenedTree, leaf: int) -> tuple[int, ...]:
    """Return the lengths of the axes of a leaf that its norms keep, in this process."""
    shard = tree.shard(leaf)
    shape = tree.arrays[leaf].shape if shard is None else shard.local
    return tuple(kept_lengths(shape, plan.axes[leaf]))


class ShardSums:
    """How sums are added over the processes that hold the shards of some trees.

    Each process adds up its own shards. The sums of all parts form one vector, of which each group
    of processes reduces those elements that belong to it, in the order of leaves, since that is the
    same in all processes. Elements are found by arrays of indices, which are made once.
    """

    def __init__(self, plan: Layout, parts: list[_Part], everywhere: Sequence[ShardGroup]) -> None:
        self._plan = plan
        self._everywhere = tuple(everywhere)
        # Computed sums come first in the vector.
        in_vector = sorted(parts, key=attrgetter("is_computed"), reverse=True)
        self._placed: list[tuple[_Part, list[int]]] = []
        constants: list[float] = []
        self._size = 0
        for part in in_vector:
            self._placed.append((part, list(range(self._size, self._size + part.size))))
            self._size += part.size
            constants += part.constants
        self._constants = np.asarray(constants, np.float64)
        self._weights = self._weights_of_replicas()

        in_leaf_order = sorted(
            self._placed, key=lambda placed: (placed[0].source, placed[0].leaves)
        )
        self.groups = _distinct([self._reduced_over(part) for part, _ in in_leaf_order])
        """All groups of processes, in the same order in each process, or they would deadlock."""
        self._sent = {}
        for group in self.groups:
            self._sent[group] = self._sent_by(group, in_leaf_order)

        self._orders = []
        self._rows: list[tuple[list[Any], tuple[int, ...]]] = []
        self._has_zeros = False
        """Whether a row has fewer parts than others of its block, or none."""
        for source in sorted({part.source for part in parts}):
            if source != _COUNTS:
                self._orders.append(_order_of(plan, in_vector, source))
            for block in range(len(plan.blocks)):
                self._rows.append(self._rows_of_block(source, block))

    def _reduced_over(self, part: _Part) -> tuple[Any, ...]:
        """Return the groups of processes that reduce a part."""
        return (self._everywhere or part.groups) if part.groups else ()

    def _weights_of_replicas(self) -> Any:
        """Return factors by which replicas count once, ``None`` if all are 1."""
        weights: list[float] = []
        for part, _ in self._placed:
            groups = self._reduced_over(part)
            replicas = math.prod([group.size for group in groups if group not in part.groups])
            weights += [1 / replicas] * part.size
        return np.asarray(weights) if set(weights) - {1.0} else None

    def _sent_by(self, group: ShardGroup, in_leaf_order: Sequence[Any]) -> _Sent:
        """Return the elements that a group reduces."""
        sent: list[int] = []
        for part, place in in_leaf_order:
            if group in self._reduced_over(part):
                sent += place

        back = list(range(self._size))
        if sent == back:
            return _Sent(_as_slice(sent), None)
        # The reduced elements come after the vector.
        for number, index in enumerate(sent):
            back[index] = self._size + number
        return _Sent(_as_slice(sent), np.asarray(back, np.int64))

    def _rows_of_block(self, source: int, block: int) -> tuple[list[Any], tuple[int, ...]]:
        """Return the indices whose elements are added to form a block of a tree, and its shape."""
        rows: list[list[list[int]]] = [[] for _ in self._plan.blocks[block].groups]
        lengths: tuple[int, ...] = ()
        for part, place in self._placed:
            if (part.source, part.block) == (source, block):
                rows[part.row].append(place)
                lengths = part.lengths

        # The index past the end stands for 0.
        zeros = [self._size] * math.prod(lengths)
        layers = []
        for layer in range(max([1, *map(len, rows)])):
            indices: list[int] = []
            for row in rows:
                indices += row[layer] if layer < len(row) else zeros
            self._has_zeros |= self._size in indices
            layers.append(_as_slice(indices))
        return layers, (len(rows), *lengths)

    def sum_here(
        self,
        trees: Sequence[OpenedTree],
        terms: Sequence[Terms],
        weigher: Callable[..., Any],
        op: Op,
    ) -> Any:
        """Return the vector of this process."""
        space = self._plan.space
        arrays: list[Any] = []
        for tree, of_tree, order in zip(trees, terms, self._orders, strict=True):
            in_order = of_tree._replace(
                arrays=take(of_tree.arrays, order.numbers),
                counts=order.counts,
                blocks=order.heights,
                axes=of_tree.axes and take(of_tree.axes, order.numbers),
                weigh=weigher(tree, of_tree.p, order.leaves),
            )
            arrays += space.sums(tree, in_order)

        constants, weights = space.constants([self._constants, self._weights])
        if self._constants.size or not arrays:
            arrays.append(constants)
        vector = space.join(arrays)
        # Replicas do not change a maximum.
        return vector if weights is None or op == "max" else vector * weights

    def select(self, vector: Any, group: ShardGroup) -> list[Any]:
        """Return what a group reduces, as one array; nothing if no sum belongs to it."""
        if group not in self._sent:
            return []
        return [self._plan.space.take(vector, self._sent[group].indices)]

    def put_back(self, vector: Any, group: ShardGroup, reduced: list[Any]) -> Any:
        """Return the vector with reduced elements."""
        if not reduced:
            return vector
        back = self._sent[group].back
        if back is None:
            return reduced[0]
        space = self._plan.space
        return space.take(space.join([vector, *reduced]), back)

    def to_blocks(self, vector: Any, op: Op) -> list[Any]:
        """Return the sums of each block of each tree, then the counts of each block."""
        space = self._plan.space
        if self._has_zeros:
            vector = space.join([vector, *space.constants([_ZERO])])
        blocks = []
        for layers, shape in self._rows:
            addends = [space.take(vector, layer, shape) for layer in layers]
            blocks.append(space.add(addends, op))
        return blocks


_ZERO = np.zeros(1)


class _Sent(NamedTuple):
    """The elements of a vector that a group of processes reduces."""

    indices: Any
    back: Any
    """The indices that put them back, given the vector followed by the reduced elements.

    ``None`` if the whole vector is reduced, as it is.
    """


def _as_slice(indices: list[int]) -> Any:
    """Return indices as a slice if they are consecutive, else as an array."""
    if indices and indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return np.asarray(indices, np.int64)


class _Order(NamedTuple):
    """The order in which the sums of a tree are computed: part by part."""

    leaves: list[int]
    numbers: list[int]
    """Where these leaves are in the order of the plan."""
    counts: list[int]
    """The number of leaves of each part."""
    heights: list[int]
    """How many parts are summed together: those of one block and of the same processes."""


def _order_of(plan: Layout, parts: Sequence[_Part], source: int) -> _Order:
    """Return the order in which the sums of a tree are computed."""
    leaves: list[int] = []
    counts = []
    heights: Counter[Any] = Counter()
    for part in parts:
        if part.source == source and part.is_computed:
            leaves += part.present
            counts.append(len(part.present))
            heights[part.block, part.groups] += 1
    number_in_plan = {leaf: number for number, leaf in enumerate(plan.order)}
    return _Order(leaves, take(number_in_plan, leaves), counts, list(heights.values()))


class Exchange:
    """The reductions of one step over its processes.

    The first sum also carries the payload, which saves a reduction.
    """

    def __init__(
        self, collectives: Collectives, trees: Sequence[OpenedTree], payload: Payload
    ) -> None:
        self._collectives = collectives
        self._trees = trees
        self._unsent: Payload | None = payload if any(payload) else None
        self._reduced = Payload()

    def reduce_sums(self, terms: Sequence[Terms]) -> list[Any]:
        """Return the sums of each norm over all processes, an array for each block of each tree."""
        payload = self._unsent
        # A payload is summed, so a maximum cannot carry it.
        if payload is None or not terms or op_of(terms[0].p) != "sum":
            return self._collectives.reduce_sums(self._trees, terms, Payload())[0]
        blocks, self._reduced = self._collectives.reduce_sums(self._trees, terms, payload)
        self._unsent = None
        return blocks

    def reduced_payload(self) -> Payload:
        """Return the reduced payload; reduce it by itself if no sum has carried it."""
        if self._unsent is not None:
            _, self._reduced = self._collectives.reduce_sums([], [], self._unsent)
            self._unsent = None
        return self._reduced


def _distinct(groups: Iterable[Sequence[Any]]) -> list[Any]:
    """Return each group of processes once, in the order of first occurrence."""
    return list(dict.fromkeys(chain.from_iterable(groups)))


def _groups_of_meshes(trees: Sequence[OpenedTree]) -> list[Any]:
    """Return all groups of processes that hold shards or replicas."""
    return _distinct([shard.groups() for tree in trees for shard in tree.shards.values()])


def _cover(groups: list[Any]) -> list[Any]:
    """Return as few groups of processes as cover all of them."""
    if len(groups) < 2:
        return groups
    # The largest first, so that smaller ones within them are left out.
    covering: list[Any] = []
    for group in sorted(groups, key=lambda group: -group.size):
        if not any([group.processes() <= other.processes() for other in covering]):
            covering.append(group)

    return covering


def _digest(text: str) -> list[float]:
    """Return a checksum as four numbers of 8 bits.

    Their squares are exact in float32: the user's ``all_reduce`` may have nothing wider.
    """
    return [float(byte) for byte in crc32(text.encode()).to_bytes(4, "big")]


def _describe_choice(value: Any) -> str:
    """Return a text for a choice that is equal in each process: qualified names and numbers.

    A repr may have memory addresses, which differ.
    """
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


def _replicas_of(plan: Layout, tree: OpenedTree, reduction: Reduction) -> list[int] | None:
    """Return how many processes hold each leaf, ``None`` if no leaf has replicas."""
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

    # In JAX, for example, the type of an array says along which axes it is replicated.
    counts = plan.space.library.replicas(
        arrays, reduction.all_reduce, marked, lambda n: tree.expression(present[n])
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
    space: NormSpace, arrays: list[Any], op: Op, reduction: Reduction | ShardGroup
) -> list[Any]:
    """Return arrays reduced over processes, as one vector in float64; NaN stays NaN in a maximum.

    NumPy arrays stay NumPy arrays in the mode in which the host reads them.
    """
    if not arrays:
        return []
    backend = space.library
    xp: Any = space.library.xp
    local = [np.asarray(x) if isinstance(x, (float, *NUMPY)) else x for x in arrays]
    if space.host and all([isinstance(array, np.ndarray) for array in local]):
        # NumPy concatenates small arrays with less overhead than a framework.
        concatenated = np.concatenate([array.ravel() for array in local])
        vector = space.to_library(concatenated.astype(np.float64, copy=False))
    else:
        local = list(map(space.to_library, local))
        # XLA makes one reduction of many.
        if space.unstacked:
            reduced = []
            for array in local:
                wide = cast(xp, array, space.sum_dtype)
                reduced.append(_reduce(space, wide, op, reduction))
            return reduced

        flat = []
        for array in local:
            here = backend.to_device_of(local[0], array)
            flat.append(xp.reshape(cast(xp, here, space.sum_dtype), (-1,)))
        vector = xp.concat(flat, axis=0)

    # One reduction costs a latency; a longer vector costs next to nothing.
    vector = _reduce(space, vector, op, reduction)
    view = backend.as_numpy(vector) if space.host else None
    if view is not None:
        xp = np
        vector = view

    return _split(xp, vector, [tuple(array.shape) for array in local])


def _split(xp: Any, vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return a vector split into consecutive arrays of these shapes."""
    arrays = []
    start = 0
    for shape in shapes:
        end = start + math.prod(shape)
        arrays.append(xp.reshape(vector[start:end], shape))
        start = end
    return arrays


def _reduce(space: NormSpace, array: Any, op: Op, reduction: Reduction | ShardGroup) -> Any:
    """Return an array reduced over the processes of a `Reduction` or of a group of shards."""
    reduce: Reduce
    if isinstance(reduction, Reduction):
        reduce = partial(reduction.reduce, space.library)
    else:
        reduce = reduction.reduce
    if op == "sum":
        return reduce(array, op)
    return _reduce_to_largest(space.library.xp, array, reduce)


def _reduce_to_largest(xp: Any, value: Any, reduce: Reduce) -> Any:
    """Return the largest of all processes' values, NaN if one of them is NaN."""
    # The maximum of a communication library may drop NaN, so send a flag for it.
    is_nan = xp.isnan(value)
    number = xp.where(is_nan, xp.zeros_like(value), value)
    flag = xp.astype(is_nan, value.dtype)
    both = xp.concat([xp.reshape(number, (-1,)), xp.reshape(flag, (-1,))], axis=0)
    reduced = reduce(both, "max")

    shape = tuple(value.shape)
    top, flag = _split(xp, reduced, [shape, shape])
    bad = flag > 0
    # NaN as 0/0 at run time: a constant NaN in the graph would stop a NaN debugger at every step.
    return xp.where(bad, xp.zeros_like(top), top) / xp.astype(xp.logical_not(bad), value.dtype)


def reducer_of(backend: Backend, all_reduce: AllReduce | None) -> Reduce:
    """Return a function of ``(array, op)`` that reduces over processes.

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
    """Raise if norms keep axes and ``all_reduce`` is passed.

    A plain array does not say which of its axes is sharded.

    Raises
    ------
    ValueError
        If the norms of the scope keep axes: norms of different units or rows would be added.
    """
    if all_reduce is not None and scope.axes is not None:
        msg = (
            f"all_reduce= needs one norm for each leaf, or for several, and {scope!r} gives a leaf "
            "many: plain arrays do not say which of their axes is sharded, so norms of different "
            "units could be added. Leave all_reduce= out if each leaf is whole in its process; if "
            "leaves are sharded, use distributed arrays (DTensors, or jax.jit with sharded "
            "arrays), which need no all_reduce="
        )
        raise ValueError(msg)


def loss_sums(library: Backend, loss: Any) -> list[Any] | None:
    """Return the loss of this process and the number of losses, 0 or 1, to be summed over all.

    ``None`` for a loss that is reduced already.
    """
    if isinstance(loss, Loss):
        return None
    if loss is None:
        return [np.zeros(()), np.zeros(())]
    number = library.detach(library.xp.astype(library.xp.asarray(loss), library.xp.float32))
    return [library.xp.reshape(number, ()), np.ones(())]


def mean_loss(library: Backend, loss: Any, sums: Sequence[Any]) -> Any:
    """Return the mean of the losses of all processes, given their sum and number.

    ``None`` if no process has a loss.
    """
    xp = library.xp
    total, count = sums
    if loss is not None:
        return total / count
    if library.readable(count):
        return total / count if bool(count > 0) else None

    # Traced code cannot choose to return `None`. It returns -∞, which is no spike, and from which
    # no state learns.
    has_loss = count > 0
    mean = total / xp.where(has_loss, count, xp.ones_like(count))
    return mean + xp.log(xp.astype(has_loss, count.dtype))


class Loss(NamedTuple):
    """A loss that is already reduced."""

    mean: Any
    """The mean over all processes, ``None`` if no process has a loss."""
    own: Any
    """The loss of this process."""
