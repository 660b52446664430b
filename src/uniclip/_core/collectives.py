# SPDX-License-Identifier: MIT
"""Reductions over processes: which of them hold shards of what is measured,
and how partial sums are combined.

A step joins at one line, between the sums of leaves and their roots: one packet for each group of
owners of distributed arrays, and one for ``all_reduce``. Sums are joined in float64, where there is
one, so that nothing overflows; of a copy that n processes hold, each contributes 1/n. What differs
between processes is a number in the payload, or agreed on at the first step, by `Reduction.agree`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import accumulate
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref
from zlib import crc32

import numpy as np

from uniclip._core.norm_space import NormSpace
from uniclip._core.tree import OpenedTree
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
    op_of,
)

if TYPE_CHECKING:
    from uniclip._core.plan import Plan

REDUCTION_CACHE_SIZE = 64
"""How many joins a rule remembers."""


AllReduce: TypeAlias = Reduce | str | tuple[str, ...] | Any
"""How to reduce over the parts of a tree: a function of ``(array, op)``, a process group, a mesh,
or names of axes.
"""
Shared: TypeAlias = Callable[[tuple[Any, ...], Any], bool | int]
"""How many processes hold a leaf, given its path and itself; true for all of them."""


class Reduction:
    """How the processes of an ``all_reduce`` join the rows of a rule.

    Python values only, as traces read them.
    """

    __slots__ = ("_held", "checked", "narrow", "shared", "size")

    def __init__(self, held: Any, shared: Shared | None) -> None:
        self._held, self.shared = held, shared
        self.checked = False
        """Whether the processes have compared their rules and rows."""
        self.narrow = True
        """Whether no process has float64 gradients."""
        self.size = 0
        """How many processes there are; 0 if unknown."""

    @property
    def all_reduce(self) -> Any:
        """The user's ``all_reduce``."""
        return follow_reference(self._held)

    def reduce(self, backend: Backend, array: Any, op: Op) -> Any:
        """Reduce an array over the processes."""
        return reducer_of(backend, self.all_reduce)(array, op)

    def agree(self, rule: Any, names: list[str] | None, math_: NormSpace) -> None:
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
    reductions: dict[Any, Reduction] | None, all_reduce: Any, shared: Shared | None
) -> Reduction | None:
    """Return the join of a rule that remembers some, or none in compiled code.

    ``None`` without ``all_reduce``.
    """
    check_shared(all_reduce, shared)
    if all_reduce is None:
        return None
    check(
        "all_reduce",
        all_reduce,
        isinstance(all_reduce, Hashable),
        "a function, a process group, a mesh or a name",
    )
    if reductions is None:
        return Reduction(all_reduce, shared)
    said = keep_reference(all_reduce), shared
    if said not in reductions:
        while len(reductions) >= REDUCTION_CACHE_SIZE:
            reductions.pop(next(iter(reductions)))
        reductions[said] = Reduction(*said)
    return reductions[said]


def keep_reference(all_reduce: Any) -> Any:
    """Return a reference to keep.

    A weak one to a process group, which must end when it is destroyed.
    """
    return ref(all_reduce) if hasattr(all_reduce, "allreduce") else all_reduce


def follow_reference(reference: Any) -> Any:
    """Return what `keep_reference` was given."""
    return reference() if isinstance(reference, ref) else reference


def with_reduced_library(given: OpenedTree, all_reduce: Any) -> OpenedTree:
    """Return opened gradients, those without any of the library whose processes are joined,
    if that is known.
    """
    if all_reduce is None or given.leaf_info.present:
        return given
    return given._replace(leaf_info=given.leaf_info.without_leaves(backend_by(all_reduce)))


def check_shared(all_reduce: Any, shared: Any) -> None:
    """Refuse ``shared`` if it is no function, or there is no ``all_reduce``."""
    check("shared", shared, shared is None or callable(shared), "a function of (path, leaf)")
    if shared is not None and all_reduce is None:
        msg = (
            "shared says which leaves are copies beside parts, and nothing joins parts: give "
            "all_reduce, too"
        )
        raise ValueError(msg)


class Payload(NamedTuple):
    """What processes join beside the sums of leaves; ``None`` for what is not asked for."""

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
        """Return the packet with other arrays in the places of its own."""
        left = iter(arrays)
        return Payload(*[field and [next(left) for _ in field] for field in self])


class Collectives:
    """How processes join what a plan measures: by ``all_reduce``,
    and by the owners of distributed leaves.
    """

    def __init__(
        self,
        plan: Plan,
        given: OpenedTree,
        reduction: Reduction | None,
        shards: Sequence[dict[int, Any]],
    ) -> None:
        self._plan, self.reduction = plan, reduction
        self.replicas = None if reduction is None else _replicas_of(plan, given, reduction)
        """How many processes hold each leaf, ``None`` if one does.

        0 where the processes have not been counted.
        """
        if self.replicas is not None and 0 in self.replicas and plan.math.compiled:
            msg = (
                "shared marks copies, and in code that is compiled it is not known how many "
                "processes hold one: join along named axes, or run the step before it is compiled"
            )
            raise TypeError(msg)
        every = [
            [(by_leaf.get(number), axes) for number, axes in enumerate(plan.axes)]
            for by_leaf in shards
        ]
        self._owners = [
            [shard and shard.shard_groups(axes) for shard, axes in pairs] for pairs in every
        ]
        """For each leaf of the gradients, and of the parameters,
        the processes that join its norms.
        """
        whole = {shard.shard_groups(): None for by_leaf in shards for shard in by_leaf.values()}
        self.mesh_groups: list[Any] = list(whole) if len(whole) < 2 or plan.math.compiled else []
        """As few groups of processes as cover all that hold parts,
        which join what is not of a leaf.
        """
        for shard_groups in (
            [] if self.mesh_groups else sorted(whole, key=lambda group: -len(group.processes()))
        ):
            if not any(
                [shard_groups.processes() <= other.processes() for other in self.mesh_groups]
            ):
                self.mesh_groups.append(shard_groups)
        by_leaf = {
            shard_groups: None
            for tree in self._owners
            for shard_groups in tree
            if shard_groups is not None
        }
        self._groups = list(by_leaf | dict.fromkeys(self.mesh_groups))
        """All groups of owners, in the same order in each process."""
        self.divided = any(
            [shard and shard.divided(axes) for pairs in every for shard, axes in pairs]
        )
        """Whether some norms lie in this process alone, as an axis that they keep is divided."""

    def rows(
        self, trees: list[OpenedTree], terms: list[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the sums of each norm, an array for each block of each tree,
        and the packet, joined.
        """
        if self._groups:
            rows, payload = self._over_owners(trees, terms, payload)
        else:
            rows = [
                row
                for tree, added in zip(trees, terms, strict=True)
                for row in self._plan.math.sums(tree, added)
            ]
        if self.reduction is None:
            return rows, payload
        op = op_of(terms[0].p) if terms else "sum"
        arrays = reduce_payload(self._plan.math, [*rows, *payload.arrays], op, self.reduction)
        return arrays[: len(rows)], payload.fill(arrays[len(rows) :])

    def weigher(self, tree: OpenedTree, p: float) -> Callable[[list[Any]], list[Any]] | None:
        """Return what weighs the sums of a tree's leaves,
        ``None`` if none is held by several processes.
        """
        return partial(self._weigh, tree, p) if self.replicas is not None or tree.shards else None

    def _weigh(self, tree: OpenedTree, p: float, sums: list[Any]) -> list[Any]:
        """Return the sums of leaves, those of copies divided by their number,
        so that together they count once.
        """
        shards, weighed = tree.shards, []
        for number, total in zip(self._plan.order, sums, strict=True):
            shard, replicas = (
                shards.get(number),
                1 if self.replicas is None else self.replicas[number],
            )
            value, replicas = (
                (total, replicas)
                if shard is None
                else (shard.weigh(total), replicas * shard.replicas)
            )
            weighed.append(value / replicas if replicas > 1 and p < math.inf else value)
        return weighed

    def _over_owners(
        self, trees: list[OpenedTree], terms: list[Terms], payload: Payload
    ) -> tuple[list[Any], Payload]:
        """Return the rows of each block of each tree, and the packet,
        joined over the owners of distributed leaves.
        """
        plan = self._plan
        sums = [self._sums_of_leaves(*pair) for pair in zip(trees, terms, strict=True)]
        if payload.present is not None:
            sums.append({number: np.ones(()) for number in plan.order if number >= 0})
        op = op_of(terms[0].p) if terms else "sum"
        every = [(number, members) for number in range(len(sums)) for members in plan.members]
        addends: list[list[Any]] = [[] for _ in every]
        scalars = Payload(payload.losses, payload.unsound)
        # Which norms form a block may differ from process to process, the order of leaves does not.
        order = sorted(range(len(every)), key=lambda row: (every[row][0], every[row][1][:1]))
        for shard_groups in (None, *self._groups):
            joined, sent = [], []
            for row in order:
                number, members = every[row]
                measured = trees[number] if number < len(trees) else None
                mine = [
                    n for n in members if self._owners[number if measured else 0][n] == shard_groups
                ]
                held = [sums[number][n] for n in mine if n in sums[number]]
                if held or (mine and shard_groups is not None):
                    joined.append(row)
                    sent.append(
                        plan.math.add(held, op) if held else self._nothing(measured, mine[0])
                    )
            if shard_groups is not None:
                beside = scalars.arrays if shard_groups in self.mesh_groups else []
                sent = reduce_payload(plan.math, [*sent, *beside], op, shard_groups)
                scalars = scalars.fill(sent[len(joined) :]) if beside else scalars
            for row, value in zip(joined, sent, strict=False):
                addends[row].append(value)
        each = in_groups(
            [plan.math.add(sums_of_row, op) for sums_of_row in addends], plan.heights * len(sums)
        )
        blocks = [plan.math.stack(list(rows)) for rows in each]
        count = len(trees) * len(plan.blocks)
        present = None if payload.present is None else blocks[count:]
        return blocks[:count], payload._replace(
            losses=scalars.losses, unsound=scalars.unsound, present=present
        )

    def _sums_of_leaves(self, tree: OpenedTree, terms: Terms) -> dict[int, Any]:
        """Return the sums of each leaf, by its number."""
        plan, blocks = self._plan, list(map(sum, terms.in_blocks(terms.counts)))
        alone = terms._replace(counts=[1] * len(terms.arrays), blocks=blocks)
        rows = [
            row for rows in plan.math.sums(tree, alone) for row in plan.math.backend.unstack(rows)
        ]
        return {number: row for number, row in zip(plan.order, rows, strict=True) if number >= 0}

    def _nothing(self, tree: OpenedTree | None, number: int) -> Any:
        """Return the sums of an absent part of a distributed leaf,
        or how many gradients that is.
        """
        plan = self._plan
        axes, shape = plan.axes[number], tree.shard(number).local if tree else ()
        return plan.math.zeros(
            () if axes is None else tuple([n for axis, n in enumerate(shape) if axis not in axes])
        )

    def true_in_all_shards(self, flags: list[Any]) -> list[Any]:
        """Return flags of the norms, each true only if it is in all processes that have norms of
        their own.
        """
        for shard_groups in self.mesh_groups if self.divided else ():
            arithmetic = self._plan.math
            faults = [
                1 - arithmetic.xp.astype(arithmetic.xp.asarray(flag), arithmetic.xp.float32)
                for flag in flags
            ]
            flags = arithmetic.as_norms(
                [value < 1 for value in reduce_payload(arithmetic, faults, "max", shard_groups)]
            )
        return flags

    def count_once(self, counts: dict[int, Any]) -> dict[int, Any]:
        """Return the numbers of entries of leaves, those of copies divided by their number."""
        return (
            counts
            if self.replicas is None
            else {n: count / self.replicas[n] for n, count in counts.items()}
        )

    def ask_for(self, loss: Any, payload: Payload, *, losses: bool, presence: bool) -> Payload:
        """Return a packet with the loss of this process, and how many gradients each norm has here,
        if asked for.
        """
        loss_here = self._as_sums(loss) if losses and not isinstance(loss, Loss) else None
        present = self._plan.count_gradients() if presence and not self.divided else None
        return payload._replace(losses=loss_here, present=present)

    def _as_sums(self, loss: Any) -> list[Any]:
        """Return the loss of this process and its count, to be summed over all:
        0 and 0 without a loss.
        """
        if loss is None:
            return [np.zeros(()), np.zeros(())]
        library = self._plan.math.library
        number = library.detach(library.xp.astype(library.xp.asarray(loss), library.xp.float32))
        return [library.xp.reshape(number, ()), np.ones(())]


def _digest(text: str) -> list[float]:
    """Return four numbers of 8 bits each: their squares are exact in float32,
    in which some of the user's reduce.
    """
    return [float(byte) for byte in crc32(text.encode()).to_bytes(4, "big")]


def _describe_choice(value: Any) -> str:
    """Return what a choice is made of, by qualified names and numbers,
    as it is the same in each process.
    """
    if value is None or isinstance(value, (str, Number)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe_choice, value))})"
    if hasattr(value, "dtype"):
        return f"array {tuple(value.shape)}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    held: Any = [
        one for one in getattr(value, "__dict__", {}).values() if isinstance(one, (str, Number))
    ]
    if is_dataclass(value):
        held = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, partial):
        held = [value.func, *value.args]
    return (
        f"{type(value).__module__}.{type(value).__qualname__}("
        f"{', '.join(map(_describe_choice, held))})"
    )


def _replicas_of(plan: Plan, given: Any, reduction: Reduction) -> list[int] | None:
    """Return how many processes hold each leaf, ``None`` if each is held once."""
    backend = plan.math.library
    answers = (
        []
        if reduction.shared is None
        else [reduction.shared(*pair) for pair in zip(given.paths(), given.leaves, strict=True)]
    )
    for answer in answers:
        check(
            "what shared(path, leaf) returns",
            answer,
            not holds_arrays(answer),
            "True, False, or a number of processes",
        )
    present = given.leaf_info.present
    arrays = [given.arrays[number] for number in present]
    marked = None if reduction.shared is None else [bool(answers[number]) for number in present]
    counts = backend.replicas(
        arrays, reduction.all_reduce, marked, lambda n: given.place(present[n])
    )
    if counts is not None:
        known = dict(zip(present, counts, strict=True))
        return [known.get(number, 1) for number in range(len(given.leaves))]
    if not any(answers):
        return None
    return [
        reduction.size if isinstance(answer, (bool, np.bool_)) and answer else max(1, int(answer))
        for answer in answers
    ]


def reduce_payload(arithmetic: NormSpace, arrays: list[Any], op: Op, reduction: Any) -> list[Any]:
    """Return arrays reduced over processes, as one vector in float64; NaN stays NaN in a maximum.

    NumPy arrays stay NumPy arrays in the mode in which the host reads them.
    """
    backend = arithmetic.library
    if not arrays:
        return []
    xp, dtype = backend.xp, arithmetic.sum_dtype
    if arithmetic.host and all([isinstance(array, (float, *NUMPY)) for array in arrays]):
        local: list[Any] = list(map(np.asarray, arrays))
        vector = arithmetic.to_library(
            np.concatenate([array.ravel() for array in local]).astype(np.float64, copy=False)
        )
    else:
        local = [
            arithmetic.to_library(np.asarray(a) if isinstance(a, (float, *NUMPY)) else a)
            for a in arrays
        ]
        if arithmetic.separate:  # XLA makes one reduction of many
            return [_reduce(arithmetic, cast(xp, array, dtype), op, reduction) for array in local]
        flat = [
            xp.reshape(cast(xp, backend.to_device_of(local[0], array), dtype), (-1,))
            for array in local
        ]
        vector = xp.concat(flat, axis=0)
    vector = _reduce(arithmetic, vector, op, reduction)
    view = backend.as_numpy(vector) if arithmetic.host else None
    xp, vector = (xp, vector) if view is None else (np, view)
    shapes = [tuple(array.shape) for array in local]
    ends = accumulate(map(math.prod, shapes))
    pairs = zip(shapes, ends, strict=True)
    return [xp.reshape(vector[end - math.prod(shape) : end], shape) for shape, end in pairs]


def _reduce(arithmetic: NormSpace, array: Any, op: Op, reduction: Any) -> Any:
    reduce = (
        reduction.reduce
        if not isinstance(reduction, Reduction)
        else lambda x, op: reduction.reduce(arithmetic.library, x, op)
    )
    return (
        reduce(array, op)
        if op == "sum"
        else _reduce_to_largest(arithmetic.library.xp, array, reduce)
    )


def _reduce_to_largest(xp: Any, value: Any, reduce: Reduce) -> Any:
    """Return the largest of all processes' values, NaN if one of them is NaN."""
    isnan, shape = xp.isnan(value), tuple(value.shape)
    both = [xp.where(isnan, xp.zeros_like(value), value), xp.astype(isnan, value.dtype)]
    pair = reduce(xp.concat([xp.reshape(shard, (-1,)) for shard in both], axis=0), "max")
    top, bad = (
        xp.reshape(shard, shape)
        for shard in (pair[: math.prod(shape)], pair[math.prod(shape) :] > 0)
    )
    # 0/0, not a constant NaN, which a debugger would report as a result.
    return xp.where(bad, xp.zeros_like(top), top) / xp.astype(xp.logical_not(bad), value.dtype)


def reducer_of(backend: Backend, all_reduce: Any) -> Reduce:
    """Return a function of ``(array, op)`` that reduces over the parts of a tree.

    Raises
    ------
    TypeError
        If ``all_reduce`` is neither a function nor what the library of the backend joins by.
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


def raise_if_kept_axes(scope: Any, all_reduce: Any) -> None:
    """Refuse norms along axes beside ``all_reduce``: which axis of a part is cut is not known.

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


def mean_loss(library: Backend, loss: Any, sums: list[Any]) -> Any:
    """Return the mean of the losses of all processes, ``None`` if there is none,
    given their sum and number.
    """
    xp, (total, count) = library.xp, sums
    if loss is not None:
        return total / count
    if library.readable(count):
        return total / count if bool(count > 0) else None
    known = count > 0  # else -∞, which is no spike, and is not kept
    return total / xp.where(known, count, xp.ones_like(count)) + xp.log(
        xp.astype(known, count.dtype)
    )


class Loss(NamedTuple):
    """A loss that is already reduced."""

    mean: Any
    """That of all processes, ``None`` if there is none."""
    own: Any
    """That of this process."""
