# SPDX-License-Identifier: MIT
"""Reduce measurements over processes: one reduction for each mesh and operation, whatever the rule.

A process holds parts of leaves, or some of the leaves. Sums and maxima of a step are reduced in one vector each; of a
copy that n processes hold, each contributes 1/n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from uniclip._checks import check
from uniclip._repr import short
from uniclip.backends.arrays import cast, stacked
from uniclip.backends.processes import Op, Part, Reduce
from uniclip.layout import Opened

if TYPE_CHECKING:
    from uniclip.backends import Backend


class Group(Protocol):
    """A process group."""

    def rank(self) -> int:
        """Return the number of this process."""

    def size(self) -> int:
        """Return how many processes there are."""


class Mesh(Protocol):
    """A mesh of processes."""

    def get_all_groups(self) -> Any:
        """Return the process group of each dimension."""


AllReduce: TypeAlias = Reduce | Group | Mesh | str | tuple[str, ...]
"""How to reduce over the parts of a tree: a function of ``(array, op)``, a process group, a mesh, or names of axes."""
Shared: TypeAlias = Callable[[tuple[Any, ...], Any], bool]
"""Whether a leaf, given its path and itself, is a copy held beside parts."""


class Joining(NamedTuple):
    """The user's ``all_reduce`` and ``shared``."""

    all_reduce: AllReduce
    shared: Shared | None = None
    holder: Any = None
    """The object that goes from step to step with one rule, each of which compares once."""


def joining(all_reduce: Any, shared: Shared | None, holder: Any = None) -> Any:
    """Combine both; a rule of rules passes on what is already combined."""
    if shared is None:
        return all_reduce if holder is None or all_reduce is None else Joining(all_reduce, None, holder)
    check("shared", shared, callable(shared), "a function of (path, leaf)")
    if all_reduce is None:
        msg = "shared says which leaves are copies beside parts, and nothing joins parts: give all_reduce, too"
        raise ValueError(msg)
    return Joining(all_reduce, shared, holder)


def of(all_reduce: Any) -> Any:
    """Return the user's ``all_reduce``."""
    return all_reduce.all_reduce if isinstance(all_reduce, Joining) else all_reduce


def along_names(all_reduce: Any) -> bool:
    """Whether values are reduced along named axes that include all axes along which they vary."""
    return isinstance(of(all_reduce), (str, tuple))


class Rows(NamedTuple):
    """The places of this process's rows among those of all processes, which hold different leaves."""

    inverse: np.ndarray[Any, Any]
    """For each row of all: its number here, or the number of rows here."""
    places: np.ndarray[Any, Any]
    """For each row here: its number among all."""
    rest: np.ndarray[Any, Any]
    """The numbers of all other rows."""


class Column(NamedTuple):
    """One value for each norm."""

    blocks: list[Any]
    """An array for each block, of shape ``(k, *kept)``, one row for each group."""
    elsewhere: Any = None
    """The values of groups that only other processes have, of shape ``(n,)``; ``None`` if there are none."""

    def mapped(self, function: Callable[[Any], Any]) -> Column:
        """Return a function of each array."""
        return Column(
            list(map(function, self.blocks)), self.elsewhere if self.elsewhere is None else function(self.elsewhere)
        )

    @property
    def arrays(self) -> list[Any]:
        """All arrays."""
        return self.blocks if self.elsewhere is None else [*self.blocks, self.elsewhere]

    def filled(self, arrays: Sequence[Any]) -> Column:
        """Return a column with other arrays."""
        count = len(self.blocks)
        return Column(list(arrays[:count]), arrays[count] if len(arrays) > count else None)


class Share(NamedTuple):
    """The contribution of this process to rows of a block."""

    array: Any
    """Of shape ``(rows, *kept)``."""
    rows: Sequence[int] | None = None
    """The numbers of the rows; ``None`` for all of the block."""
    part: Part | None = None
    """A part whose owner's processes contribute too; ``None`` if they do not."""


class Joint(NamedTuple):
    """How values of several processes are reduced to one."""

    given: Opened
    reduce: Reduce | None = None
    """Reduces the parts of the tree, after the meshes of distributed arrays."""
    rows: Rows | None = None
    """``None`` if all processes have the same rows."""
    copies: Sequence[int] | None = None
    """How many processes of ``reduce`` hold each leaf; ``None`` if each is held once."""

    @property
    def backend(self) -> Backend:
        """The backend of the arrays."""
        return self.given.backend

    def columns(
        self, columns: list[list[list[Share]]], op: Op, scalars: Sequence[Any] = ()
    ) -> tuple[list[Column], list[Any]]:
        """Return reduced columns, each given as a list of shares for each block, and reduced scalars."""
        columns, scalars = self._over_meshes(columns, op, list(scalars))
        rows = [[self._rows(shares, op) for shares in column] for column in columns]
        if self.reduce is None:
            return [Column(blocks) for blocks in rows], scalars
        packets = [blocks if self.rows is None else self._among_all(blocks) for blocks in rows]
        arrays = [array for packet in packets for array in packet]
        joined = iter(reduced(self.given, [*arrays, *scalars], op, self.reduce))
        found = [[next(joined) for _ in packet] for packet in packets]
        if self.rows is None:
            return list(map(Column, found)), list(joined)
        return [self._own(*pair) for pair in zip(found, rows, strict=True)], list(joined)

    def _over_meshes(self, columns: Any, op: Op, scalars: list[Any]) -> tuple[Any, list[Any]]:
        """Return columns and scalars reduced by the owners of the shares, one reduction for each."""
        columns = [[list(shares) for shares in column] for column in columns]
        owned: dict[Any, tuple[Part, list[tuple[list[Share], int]]]] = {
            part.owner: (part, []) for part in self.given.parts or () if part
        }
        for column in columns:
            for shares in column:
                for number, share in enumerate(shares):
                    if share.part is not None:
                        owned.setdefault(share.part.owner, (share.part, []))[1].append((shares, number))
        joins = _covering([part for part, _ in owned.values()]) if scalars else []
        for part, places in owned.values():
            arrays, with_scalars = [shares[number].array for shares, number in places], part in joins
            if not arrays and not with_scalars:
                continue
            joined = reduced(self.given, [*arrays, *(scalars if with_scalars else ())], op, part.reduce)
            scalars = joined[len(arrays) :] if with_scalars else scalars
            for (shares, number), array in zip(places, joined, strict=False):
                shares[number] = shares[number]._replace(array=array)
        return columns, scalars

    def _rows(self, shares: list[Share], op: Op) -> Any:
        """Return the rows of a block, each of which has at least one share."""
        if len(shares) == 1:
            return shares[0].array
        by_row: dict[int, list[Any]] = {}
        host = all([isinstance(share.array, np.ndarray) for share in shares])
        for share in shares:
            array = share.array if host else self.given.own(share.array)
            for place, row in enumerate(share.rows or range(array.shape[0])):
                by_row.setdefault(row, []).append(array[place, ...])
        xp = np if host else self.backend.xp
        rows = [_of(xp, by_row[row], op) for row in range(len(by_row))]
        return np.stack(rows) if host else stacked(self.backend, rows)

    def _among_all(self, blocks: list[Any]) -> list[Any]:
        """Return rows in the order of all processes, with 0 for those that only others have."""
        rows, host = self._different, all([isinstance(block, np.ndarray) for block in blocks])
        xp = np if host else self.backend.xp
        vectors = blocks if host else list(map(self.given.own, blocks))
        zero = xp.zeros_like(vectors[0][:1]) if vectors else np.zeros(1, np.float32)
        return [xp.take(xp.concat([*vectors, zero], axis=0), xp.asarray(rows.inverse), axis=0)]

    def _own(self, joined: list[Any], blocks: list[Any]) -> Column:
        """Return the rows here, and those of groups that only other processes have."""
        every, rows = joined[0], self._different
        xp = np if isinstance(every, np.ndarray) else self.backend.xp
        here, start, new = xp.take(every, xp.asarray(rows.places), axis=0), 0, []
        for block in blocks:
            new.append(here[start : start + block.shape[0]])
            start += block.shape[0]
        return Column(new, xp.take(every, xp.asarray(rows.rest), axis=0) if len(rows.rest) else None)

    @property
    def _different(self) -> Rows:
        if self.rows is None:
            msg = "all processes have the same rows"
            raise AssertionError(msg)
        return self.rows


def _covering(parts: list[Part]) -> list[Part]:
    """Return as few of the parts as have owners that cover all processes of all of them."""
    chosen: list[Part] = []
    for part in sorted(parts, key=lambda one: -len(one.processes())):
        if not any([part.processes() <= one.processes() for one in chosen]):
            chosen.append(part)
    return chosen


def reducer_of(backend: Backend, all_reduce: Any) -> Reduce:
    """Return a function of ``(array, op)`` that reduces over the parts of a tree.

    Raises
    ------
    TypeError
        If ``all_reduce`` is neither a function nor what the library of the backend joins by.
    """
    processes = backend.processes
    reduce: Reduce | None = processes.reducer(all_reduce)
    if reduce is not None:
        return reduce
    if callable(all_reduce):
        return all_reduce  # type: ignore[no-any-return]
    msg = f"all_reduce must be {processes.joins_by} for gradients of this library, got {short(all_reduce)}"
    raise TypeError(msg)


def _of(xp: Any, parts: list[Any], op: Op) -> Any:
    """Return the sum or the maximum of a few arrays."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part if op == "sum" else xp.where(xp.isnan(part) | (part > total), part, total)
    return total


def reduced(given: Opened, arrays: list[Any], op: Op, reduce: Reduce) -> list[Any]:
    """Reduce arrays over processes, as one vector; NumPy arrays stay NumPy arrays if they can be read.

    NaN stays NaN in a maximum, which many libraries drop.
    """
    if not arrays:
        return []
    backend, xp = given.backend, given.backend.xp
    arrays = [np.asarray(array) if isinstance(array, np.generic) else array for array in arrays]
    own = list(map(given.own, arrays))
    dtype = backend.processes.reduction_dtype(xp.result_type(*[array.dtype for array in own]), own[0])
    flat = [xp.reshape(cast(xp, backend.to_device_of(own[0], array), dtype), (-1,)) for array in own]
    vector = xp.concat(flat, axis=0)
    vector = reduce(vector, op) if op == "sum" else _largest_of_all(xp, vector, reduce)
    ends = np.cumsum([math.prod(array.shape) for array in own]).tolist()
    found = [
        xp.reshape(vector[end - math.prod(array.shape) : end], tuple(array.shape))
        for array, end in zip(own, ends, strict=True)
    ]
    if all(isinstance(array, np.ndarray) for array in arrays):
        views = [backend.viewed(array) for array in found]
        found = found if any(view is None for view in views) else views
    return found


def _largest_of_all(xp: Any, value: Any, reduce: Reduce) -> Any:
    """Return the largest of all processes' values, NaN if one of them is NaN."""
    isnan = xp.isnan(value)
    pair = reduce(xp.concat([xp.where(isnan, 0.0, value), xp.astype(isnan, value.dtype)], axis=0), "max")
    count = value.shape[0]
    value, isnan = pair[:count], pair[count:] > 0
    # 0/0, not a constant NaN, which a debugger would report as a result.
    return xp.where(isnan, 0.0, value) / xp.astype(xp.logical_not(isnan), value.dtype)
