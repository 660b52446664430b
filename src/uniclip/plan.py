# SPDX-License-Identifier: MIT
"""What is the same at every step of a rule on trees of one structure: which leaves share a norm, and where it lies.

A plan holds no gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from numbers import Number
from operator import eq
from typing import Any, NamedTuple

import numpy as np

from uniclip._errors import check, short, stable
from uniclip.arithmetic import Arithmetic
from uniclip.backends import compiling
from uniclip.backends.arrays import rows_of, same_shape, spread, stacked
from uniclip.backends.base import TRACED, Axes, Op
from uniclip.choices import Choices
from uniclip.processes import Join, copies_of, packed
from uniclip.scopes import Path, Scope, everything
from uniclip.tree import Opened, place

_KEPT = 64
"""The number of plans that a rule keeps."""
_STACKED = 2**16
"""The largest number of norms with kept axes that are stacked into one array."""


class Block(NamedTuple):
    """The groups whose norms form one array, one row for each."""

    groups: tuple[tuple[int, ...], ...]
    """The numbers of the leaves of each group that are present."""
    labels: tuple[Any, ...]
    """For each group, its label in the scope or the number of its leaf."""
    kept: int | None = 0
    """The number of kept axes of each norm; ``None`` if all its gradients are absent."""

    @property
    def absent(self) -> tuple[bool, ...]:
        """Whether all gradients of each group are absent; empty if none is."""
        gone = tuple([not group for group in self.groups])
        return gone if any(gone) else ()


class Measured(NamedTuple):
    """The measurements of a step, joined over processes: an array for each block."""

    norms: list[Any]
    params: list[Any] | None = None
    sizes: list[Any] | None = None
    present: list[Any] | None = None
    """For each norm, whether some process has a gradient of it; ``None`` where this process knows."""
    loss: Any = None
    entries_finite: Any = None
    """Whether all entries are finite, where that was looked at."""


def plan_of(rule: Choices, given: Opened, mode: int, join: Join | None = None, params: Opened | None = None) -> Plan:
    """Return the plan of a rule for an opened tree, one that was made before if possible; traced code makes it anew.

    ``params`` are the parameters that are measured, too.
    """
    trees = [given] if params is None else [given, params]
    parts = tuple([tuple(tree.parts.items()) for tree in trees if tree.odd])
    shapes = tuple([x if x is None else x.shape for x in given.leaves]) if rule.by_shape and mode != TRACED else None
    key: Any = given.spec, given.kinds, mode, shapes, parts, join, join and (join.narrow, join.checked)
    plan = None if mode == TRACED else rule.plans.get(key)
    if plan is not None:
        return plan
    with given.backend.quiet(given.first):
        plan = Plan(rule, given, mode, join, [tree.parts for tree in trees])
    if mode != TRACED:
        if len(rule.plans) >= _KEPT:
            rule.plans.clear()
        rule.plans[key] = plan
    return plan


class Plan:
    """What is the same at every step; made by `plan_of`."""

    def __init__(self, rule: Choices, given: Opened, mode: int, join: Join | None, parts: Any) -> None:
        kinds, scope = given.kinds, rule.scope
        self.math = Arithmetic(given, mode, narrow=kinds.narrow and (join is None or join.narrow))
        """Where its norms lie."""
        self.join, self.kinds, self.scope, self.spec = join, kinds, scope, given.spec
        self._divide(rule, given)
        self.copies = None if join is None else copies_of(self, given, join)
        self._own(rule, parts)
        self.plain = self.copies is None and scope.axes is None and all(self.lengths) and not self.covering
        """Whether rows are sums of whole leaves, each held once, and none is empty."""
        self._on_host: Plan | None = None
        self._counts: tuple[list[Any], list[Any]] | None = None
        if join is None and mode == TRACED and scope.axes is None:  # parts without a reduction are refused
            some = kinds.present
            given.backend.copies([given.arrays[n] for n in some], None, None, lambda n: given.place(some[n]))

    def _own(self, rule: Choices, parts: Sequence[dict[int, Any]]) -> None:
        """Find out which processes join the norms of distributed leaves."""
        every = [[(some.get(number), axes) for number, axes in enumerate(self.axes)] for some in parts]
        self.owners = [[part and part.owners(axes) for part, axes in pairs] for pairs in every]
        """For each leaf of the gradients, and of the parameters, the processes that join its norms."""
        whole = {part.owners(): None for some in parts for part in some.values()}
        self.covering: list[Any] = list(whole) if len(whole) < 2 or self.math.mode == TRACED else []
        """As few groups of processes as cover all that hold parts, which join what is not of a leaf."""
        for one in [] if self.covering else sorted(whole, key=lambda one: -len(one.processes())):
            if not any([one.processes() <= other.processes() for other in self.covering]):
                self.covering.append(one)
        found = {one: None for some in self.owners for one in some if one is not None}
        self.owner_groups = list(found | dict.fromkeys(self.covering))
        """All groups of owners, in the same order in each process."""
        self.norms_apart = any([part and part.divided(axes) for pairs in every for part, axes in pairs])
        """Whether some norms lie in this process alone, as an axis that they keep is divided."""
        if self.norms_apart and rule.memory:
            msg = (
                f"{short(rule)} remembers norms along axes, and some of these axes are divided among processes, so "
                "that its state would differ from process to process: take a scope of whole leaves, such as "
                "uc.scopes.each_leaf, or a limit without memory"
            )
            raise ValueError(msg)

    def _divide(self, rule: Choices, given: Opened) -> None:
        """Find out which leaves share a norm, and which norms form an array."""
        kinds, scope = self.kinds, self.scope
        missing = bool(given.parts) and len(kinds.present) < len(given.leaves)
        everywhere = rule.memory or self.join is not None or missing
        members = _groups(given, scope, rule.limit.groups if everywhere else (), everywhere=everywhere)
        labelled = scope.label not in {None, everything}
        alone = self.join is None and len(kinds.present) == len(given.leaves)
        if labelled and alone and not (rule.tells_apart or compiling()):
            answers = [label for label, some in members.items() for _ in some]
            refuse_one_answer("scopes.groups(label)", scope.label, given.paths(), answers)
            rule.tells_apart.append(True)
        groups = {label: [n for n in some if given.leaves[n] is not None] for label, some in members.items()}
        self.one_norm = scope.label is everything and scope.axes is None
        """Whether there is one norm for all leaves."""
        self.one_by_one = (
            self.math.mode == TRACED
            and self.math.library.one_by_one()
            and not rule.memory
            and scope.label is not everything
        )
        """Whether each norm is an array of its own, since compilers take long for each row taken out of one."""
        self.axes: list[Axes] = [None] * len(given.leaves)
        """The axes of each leaf that its norms cover, ``None`` for all."""
        for number in range(len(given.leaves)) if scope.axes is not None else ():
            self.axes[number] = _axes(given, scope, number)
        for group in groups.values() if scope.axes is not None else ():
            _refuse_unequal(given, self.axes, group)
        if rule.memory:
            refuse_rows(given, self.axes, rule, "remembers something")
        self.blocks = self._blocks(given, groups, everywhere=everywhere)
        self.members = [members[label] for block in self.blocks for label in block.labels]
        """The leaves of each norm, absent ones too."""
        self.places = {
            n: (b, row) for b, one in enumerate(self.blocks) for row, group in enumerate(one.groups) for n in group
        }
        """For each leaf, the block and the row of its norm."""
        self.entries = (
            scope.axes is not None
            and all([axes == () for axes in self.axes])
            and all([len(g) == 1 for g in groups.values()])
        )
        """Whether each norm is the modulus of an entry, whatever its order."""
        self.order = [number for block in self.blocks for group in block.groups for number in group]
        self.lengths = [len(group) for block in self.blocks for group in block.groups]
        places = {number: index for index, number in enumerate(self.order)}
        self.ordered = [[[places[n] for n in group] for group in block.groups] for block in self.blocks]
        """The leaves of each norm by their places in this order."""

    # Which leaves share a norm.

    def _blocks(self, given: Opened, groups: dict[Hashable, list[int]], *, everywhere: bool) -> list[Block]:
        alike: dict[Hashable, list[Hashable]] = {}
        seen: list[tuple[int, ...]] = []
        for number, (label, group) in enumerate(groups.items()):
            kind: Hashable = None
            if self.one_by_one:
                kind = number
            elif self.scope.axes is not None:
                if len(group) == 1 and not everywhere:
                    kind = _stacking_key(given, group[0], self.axes[group[0]], seen)
                kind = number if kind is None else kind
            elif not everywhere:
                kind = self.math.library.varying([given.arrays[n] for n in group])
            alike.setdefault(kind, []).append(label)
        return [
            Block(tuple([tuple(groups[label]) for label in some]), tuple(some), self._kept_axes(given, groups[some[0]]))
            for some in alike.values()
        ]

    def _kept_axes(self, given: Opened, group: Sequence[int]) -> int | None:
        """Return the number of kept axes of the norm of a group, ``None`` if unknown."""
        if self.scope.axes is None:
            return 0
        if not group:
            return None
        covered = self.axes[group[0]]
        return 0 if covered is None else len(given.arrays[group[0]].shape) - len(covered)

    # Rows from the sums of leaves.

    def rows(
        self,
        trees: list[Opened],
        modes: list[int],
        p: float,
        units: list[Any] | None = None,
        scalars: Sequence[Any] = (),
        presence: bool = False,  # noqa: FBT001, FBT002
    ) -> list[Any]:
        """Return ``Σ|x/unit|ᵖ`` of each norm (the largest modulus for p = ∞), one array for each block of each tree.

        In float64, joined over the processes that own distributed leaves; and behind them how many gradients each norm
        has, if asked, and scalars.
        """
        there = [dict.fromkeys(self.order, np.ones(()))] if presence else []
        op: Op = "max" if p == math.inf else "sum"
        if self.plain and self.order and p == 2 and units is None and trees:
            pairs = zip(trees, modes, strict=True)
            vectors = [self.math.library.squares(m, [t.arrays[n] for n in self.order], self.lengths) for t, m in pairs]
            if all([vector is not None for vector in vectors]):
                rows = [row for vector in vectors for row in self._split(vector)]
                return [*rows, *(self._joined([], there, op, list(scalars)) if there else scalars)]
        count = len(self.blocks)
        sums = [
            self._sums(tree, mode, p, op, None if units is None else units[number * count : (number + 1) * count])
            for number, (tree, mode) in enumerate(zip(trees, modes, strict=True))
        ]
        return self._joined(trees, [*sums, *there], op, list(scalars))

    def _split(self, vector: Any) -> list[Any]:
        """Return the rows of each block from those of all."""
        if len(self.blocks) == 1:
            return [vector]
        ends = np.cumsum([len(block.groups) for block in self.blocks]).tolist()
        return [vector[end - len(block.groups) : end] for end, block in zip(ends, self.blocks, strict=True)]

    def _sums(self, tree: Opened, mode: int, p: float, op: Op, units: list[Any] | None) -> dict[int, Any]:
        """Return the sums of leaves, those of copies divided by their number."""
        backend, parts = self.math.library, tree.parts
        some, by = [tree.arrays[n] for n in self.order], None
        if units is not None:
            rows = [units[block][row, ...] for block, row in map(self.places.__getitem__, self.order)]
            by = [self._beside(*one) for one in zip(rows, self.order, some, strict=True)]
        found = backend.sums(mode, some, p, [self.axes[n] for n in self.order], by, self.ordered)
        if self.join is not None and self.join.named:
            found = [backend.varied(x, self.join.all_reduce) for x in found]
        sums = dict(zip(self.order, found, strict=True))
        for number, value in sums.items() if self.copies is not None or parts else ():
            part, held = parts.get(number), 1 if self.copies is None else self.copies[number]
            own, held = (value, held) if part is None else (part.weighted(value, part.copies), held * part.copies)
            sums[number] = own / held if held > 1 and op == "sum" else own
        return sums

    def _beside(self, value: Any, number: int, array: Any) -> Any:
        """Return a value of a norm with the dimensions of a leaf's array."""
        axes = self.axes[number]
        if axes is None:
            return value
        if isinstance(value, np.ndarray):
            return value.reshape([1 if axis in axes else n for axis, n in enumerate(array.shape)])
        return spread(self.math.library, value, array, axes)

    def _joined(self, trees: list[Opened], sums: list[dict[int, Any]], op: Op, scalars: list[Any]) -> list[Any]:
        """Return the rows of all blocks from the sums of the leaves of trees, and scalars, joined over owners.

        More sums than trees are there of numbers for each leaf.
        """
        if self.owner_groups:
            rows, scalars = self._over_owners(trees, sums, op, scalars)
        else:
            rows = [[found[n] for n in some if n in found] for found in sums for some in self.members]
        each = iter([self.math.add(some, op) for some in rows])
        return [*[self.math.stack([next(each) for _ in block.groups]) for _ in sums for block in self.blocks], *scalars]

    def _over_owners(
        self, trees: list[Opened], sums: list[dict[int, Any]], op: Op, scalars: list[Any]
    ) -> tuple[list[list[Any]], list[Any]]:
        """Return the addends of each row, those of each group of owners joined, and scalars that are joined, too."""
        every = [(number, some) for number in range(len(sums)) for some in self.members]
        rows: list[list[Any]] = [[] for _ in every]
        # Which norms form a block may differ from process to process, the order of leaves does not.
        order = sorted(range(len(every)), key=lambda row: (every[row][0], every[row][1][:1]))
        for owners in (None, *self.owner_groups):
            joined, sent = [], []
            for row in order:
                number, some = every[row]
                tree = trees[number] if number < len(trees) else None
                mine = [n for n in some if self.owners[number if tree else 0][n] == owners]
                here = [sums[number][n] for n in mine if n in sums[number]]
                if here or (mine and owners is not None):
                    joined.append(row)
                    sent.append(self.math.add(here, op) if here else self._nothing(tree, mine[0]))
            if owners is not None:
                sent = packed(self.math, [*sent, *(scalars if owners in self.covering else ())], op, owners)
                scalars = sent[len(joined) :] or scalars
            for row, value in zip(joined, sent, strict=False):
                rows[row].append(value)
        return rows, scalars

    def _nothing(self, tree: Opened | None, number: int) -> Any:
        """Return the sums of an absent part of a distributed leaf, or how many gradients that is."""
        axes, shape = self.axes[number], tree.part(number).local if tree else ()
        kept = () if axes is None else [n for axis, n in enumerate(shape) if axis not in axes]
        return self.math.to_library(np.zeros(kept, np.float64 if self.math.double else np.float32))

    def everywhere(self, flags: list[Any]) -> list[Any]:
        """Return flags of the norms, each true only if it is in all processes that have norms of their own."""
        for owners in self.covering if self.norms_apart else ():
            xp = self.math.xp
            own = [1 - xp.astype(xp.asarray(flag), xp.float32) for flag in flags]
            flags = self.math.as_norms([one < 1 for one in packed(self.math, own, "max", owners)])
        return flags

    def sizes(self, given: Opened) -> list[Any]:
        """Return the number of entries of each norm, of shape ``(k, 1, ...)``, in this process; copies count once."""
        counts = {n: self.math.library.size(given.leaves[n], self.axes[n]) for n in self.order}
        if self.copies is not None:
            counts = {n: count / self.copies[n] for n, count in counts.items()}
        return [self._counted([[counts[n] for n in group] for group in b.groups], b.kept or 0) for b in self.blocks]

    def _counted(self, counts: list[list[Any]], kept: int) -> Any:
        xp, shape = self.math.library.xp, (len(counts), *(1,) * kept)
        if all([isinstance(one, (int, float)) for some in counts for one in some]):
            total = np.reshape(np.asarray([sum(some) for some in counts], np.float64), shape)
            return (
                self.math.to_library(total) if self.math.mode == TRACED else total
            )  # a compiler does not know all of NumPy
        dtype = xp.float64 if self.math.double else xp.float32
        rows = [self.math.add([xp.astype(xp.asarray(one), dtype) for one in some], "sum") for some in counts]
        return xp.reshape(stacked(self.math.library, rows), shape)

    def counts(self, sizes: list[Any], power: float) -> tuple[list[Any], list[Any]]:
        """Return numbers of entries, at least 1, in the dtype of the norms; and what norms are divided by."""
        if self._counts is not None:
            return self._counts
        counts, by = [], []
        for size in sizes:
            xp = np if isinstance(size, np.ndarray) else self.math.library.xp
            counts.append(self.math.rounded(xp.where(size > 0, size, xp.ones_like(size))))
            by.append(counts[-1] ** power if self.math.host else self.math.to_library(counts[-1] ** power))
        if self.math.mode != TRACED and self.join is None:
            self._counts = counts, by
        return counts, by

    def zeros(self, given: Opened) -> list[Any]:
        """Return zeros like the norms, in the library of the gradients."""
        backend, xp = self.math.library, self.math.library.xp

        def row(block: Block, group: Sequence[int]) -> Any:
            if not (block.kept and group):
                return self.math.to_library(np.zeros((), self.math.dtypes[1]))
            array, axes = given.arrays[group[0]], self.axes[group[0]] or ()
            if not given.parts and not backend.unsharded(array):  # they are sharded as it is
                return xp.sum(xp.zeros_like(array, dtype=self.math.dtypes[0]), axis=axes)
            kept = tuple([n for axis, n in enumerate(array.shape) if axis not in axes])
            return backend.to_device_of(array, xp.zeros(kept, dtype=self.math.dtypes[0]))

        return [stacked(backend, [row(block, group) for group in block.groups]) for block in self.blocks]

    def absent(self, block: Block, present: Any) -> Any:
        """Return for each row of a block whether all its gradients are absent, ``None`` if none is.

        ``present`` says of which rows some process has a gradient; it is ``None`` in a single process.
        """
        if present is not None:
            return self.math.xp.logical_not(self.math.as_norms([present])[0])
        return self.math.as_norms([np.asarray(block.absent)])[0] if block.absent else None

    def on_host(self) -> Plan:
        """Return the plan of the same norms in NumPy's arrays, as they are recorded."""
        if self._on_host is None:
            self._on_host = copy.copy(self)
            self._on_host.math = self.math.at_host()
        return self._on_host

    def by_leaf(self, given: Opened, factors: list[Any]) -> tuple[list[int], list[Any]]:
        """Return the leaves to multiply, and a factor for each: those known to be 1 change nothing."""
        numbers, by = [], []
        for block, some in zip(self.blocks, factors, strict=True):
            host = isinstance(some, np.ndarray)
            if host and (some == 1).all():
                continue
            if host and not some.ndim - 1:
                values = some.tolist()
            elif len(block.groups) == len(block.groups[0]) == 1:  # which one leaf uses
                values = [some[0, ...]]
            else:
                values = rows_of(self.math.library, some)
            for value, group in zip(values, block.groups, strict=True):
                if host and (value == 1 if isinstance(value, float) else (value == 1).all()):
                    continue
                for number in group:
                    numbers.append(number)
                    by.append(value if isinstance(value, float) else self.factor(given, value, number))
        return numbers, by

    def factor(self, given: Opened, value: Any, number: int) -> Any:
        """Return the factor of a leaf, with its dimensions."""
        part = given.part(number)
        value = value if part is None else part.weighted(value, 1 / part.copies)
        return self._beside(value, number, given.arrays[number])

    def arranged(self, blocks: Sequence[Any]) -> Any:
        """Return a value for each group in the scope's form: a tree, a dict by label, or a single value."""
        if self.scope.label is everything:
            return blocks[0][0] if len(blocks[0].shape) == 1 else blocks[0][0, ...]
        rows = self.by_label(blocks)
        if self.scope.label is not None:
            return {label: rows[label] for label in self.labels if label in rows}
        return self.spec.unflatten([rows.get(number) for number in range(len(self.axes))])

    def by_label(self, blocks: Sequence[Any]) -> dict[Any, Any]:
        """Return a value for each group that is present; processes that are joined have all named ones."""
        rows: dict[Any, Any] = {}
        everywhere = self.join is not None and self.scope.label is not None
        for block, array in zip(self.blocks, blocks, strict=True):
            for row, (label, group) in enumerate(zip(block.labels, block.groups, strict=True)):
                if group or everywhere:
                    rows[label] = array[row] if len(array.shape) == 1 else array[row, ...]
        return rows

    @property
    def names(self) -> list[str]:
        """The groups or leaves of all norms by name, for processes that compare params."""
        if self.scope.label is not None:
            return list(map(_text, self.labels))
        return [stable(place("", path)) for path in self.spec.paths()]

    @property
    def labels(self) -> list[Any]:
        """The labels of all groups in their order."""
        labels = [label for block in self.blocks for label in block.labels]
        return labels if self.scope.label in {None, everything} else sorted(labels, key=_text)


def _text(label: Any) -> str:
    return stable(repr(label))


def _groups(given: Opened, scope: Scope, named: Sequence[Any], *, everywhere: bool) -> dict[Hashable, list[int]]:
    """Return the numbers of the leaves that share a norm, absent ones too, by the label of their group.

    ``everywhere`` tells that absent gradients have rows.
    """
    if scope.label is everything:
        return {None: list(range(len(given.leaves)))}
    if scope.label is None:
        return {n: [n] for n, leaf in enumerate(given.leaves) if everywhere or leaf is not None}
    groups: dict[Hashable, list[int]] = {label: [] for label in named}
    for number, (path, leaf) in enumerate(zip(given.paths(), given.leaves, strict=True)):
        if leaf is not None or everywhere:
            label = label_of(scope.label, path, leaf, place(given.name, path))
            groups.setdefault(label, []).append(number)
    # Whichever leaf is first, or None, in any process.
    return dict(sorted(groups.items(), key=lambda item: _text(item[0])))


def refuse_one_answer(what: str, function: Any, paths: list[Path], answers: list[Any]) -> None:
    """Refuse a mask or a label that looks for names where leaves have numbers, or takes none: they have other names.

    It says the same of all leaves then. All leaves that have names may be meant, and so may a label that is a key.

    Raises
    ------
    ValueError
        If there are several leaves.
    """
    answer = answers[0] if len(answers) > 1 and len(set(answers)) == 1 else None
    numbered = all([isinstance(path[-1], int) for path in paths if path])
    fine = answer is None or not (numbered or answer is False) or (not isinstance(answer, bool) and answer in paths[0])
    if fine or not _reads_path(function):
        return
    msg = (
        f"{what} says {short(answer)} of all {len(answers)} leaves, whose paths are like {short(paths[0])}: look for "
        "these names. Parameters of PyTorch's optimizers have numbers unless they get names, by "
        "attach(optimizer, rule, names=model). If all are meant, give a function that does not look at the path"
    )
    raise ValueError(msg)


def _reads_path(function: Any) -> bool:
    """Whether a Python function of (path, leaf) uses its path; false for a ``partial`` and for what is no function."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    import dis  # noqa: PLC0415 - few rules have functions

    path = code.co_varnames[hasattr(function, "__self__") :][:1]
    used = [one.argval if isinstance(one.argval, tuple) else [one.argval] for one in dis.get_instructions(code)]
    return any([name in names for names in used for name in path])


def label_of(label: Callable[..., Hashable], path: Path, leaf: Any, where: str) -> Hashable:
    """Return the label of a leaf's group; refuse labels that are unhashable or hold arrays."""
    try:
        found: Any = label(path, leaf)
    except AttributeError as error:
        if leaf is not None:
            raise
        msg = f"{where} is absent (None), and a rule that remembers asks for its group: label it by its path alone"
        raise TypeError(msg) from error
    try:
        fits = not hasattr(found, "dtype") or isinstance(found, (Number, str)) or found in {True, False}
        hash(found)
    except TypeError:
        fits = False
    check("the label of a group", found, fits, "hashable, such as a text or a number")
    return found


def _axes(given: Opened, scope: Scope, number: int) -> Axes:
    """Return the axes of a leaf that its norms cover, ``None`` for all."""
    leaf, odd = given.leaves[number], given.odd.get(number)
    if leaf is None and odd is None:
        return None
    by_entry = odd is not None and odd.by_entry
    if odd is None or odd.rows is None or by_entry:
        shape = given.part(number).shape if leaf is None else leaf.shape
    else:
        shape = given.arrays[number].shape  # that of the leaf may be unknown
    try:
        axes = scope.covered(len(shape), given.backend.output_axis)
    except ValueError as error:
        msg = f"{given.place(number)} of shape {tuple(shape)}: {error}"
        raise ValueError(msg) from None
    if axes and by_entry:
        msg = f"{given.place(number)} is sparse, and stores no axes to take norms along; use a scope of whole leaves"
        raise TypeError(msg)
    return axes


def refuse_rows(given: Opened, axes: list[Axes], rule: Choices, does: str) -> None:
    """Refuse what a rule does for each row of a sparse leaf, which stores other rows at each step.

    Raises
    ------
    TypeError
        If the norms of a leaf that stores only some of its rows are along other axes.
    """
    for number in given.odd:
        covered = axes[number]
        if covered is not None and 0 not in covered and given.is_sparse(number):
            msg = (
                f"{given.place(number)} is sparse: {short(rule)} {does} for each row, and at each step other rows are "
                "stored; make the gradient dense, or take a norm of whole leaves"
            )
            raise TypeError(msg)


def _stacking_key(given: Opened, number: int, axes: Axes, seen: list[tuple[int, ...]]) -> Hashable:
    """Return a key that must be equal for norms with axes to be stacked, ``None`` if they must not be.

    ``seen`` are the shapes of norms that were met before.
    """
    backend, array, part = given.backend, given.arrays[number], given.part(number)
    if axes is None or not (all([type(n) is int for n in array.shape]) and backend.unsharded(array)):
        return None
    kept = tuple([n for axis, n in enumerate(array.shape) if axis not in axes])
    covered = math.prod([array.shape[axis] for axis in axes])
    if not backend.certain(math.prod(kept) <= _STACKED) or (kept and backend.certain(covered == 1)):
        return None
    alike = [n for n, one in enumerate(seen) if len(one) == len(kept) and all(map(backend.certain, map(eq, one, kept)))]
    if not alike:
        seen.append(kept)
    return (alike or [len(seen) - 1])[0], backend.device(array), part, backend.varying([array])


def _refuse_unequal(given: Opened, axes: list[Axes], group: Sequence[int]) -> None:
    """Refuse a group whose leaves have norms of different shapes."""

    def kept(number: int) -> tuple[Any, ...]:
        covered = axes[number]
        shape = given.arrays[number].shape
        return () if covered is None else tuple(n for axis, n in enumerate(shape) if axis not in covered)

    for number in group:
        if not same_shape(kept(group[0]), kept(number)):
            first, other = (f"{given.place(n)} of shape {tuple(given.arrays[n].shape)}" for n in (group[0], number))
            msg = (
                "leaves that share norms need equal shapes outside the axes a norm covers, but "
                f"{first} has norms of shape {kept(group[0])}, {other} has {kept(number)}"
            )
            raise ValueError(msg)
