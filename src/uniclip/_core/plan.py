# SPDX-License-Identifier: MIT
"""Which leaves share a norm, and how norms are stacked: cached for one rule and one tree structure.

A plan holds no gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from numbers import Number
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uniclip._core.collectives import Collectives, Reduction
from uniclip._core.norm_space import NormSpace
from uniclip._core.tree import Opened, place
from uniclip._errors import check, stable, summarize
from uniclip._types import Path
from uniclip.backends import compiling
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import TRACED, Axes
from uniclip.scopes import Scope, everything

if TYPE_CHECKING:
    from uniclip.rule import Choices

PLAN_CACHE_SIZE = 64
"""The number of plans that a rule keeps."""
_STACKED = 2**16
"""The largest number of norms with kept axes that are stacked into one array."""
_ENTRIES_OF_NORM = 8
"""How many entries each norm must have on average for all norms to be copied into one vector."""

_FAILURES = AttributeError, LookupError, TypeError, ValueError
"""The errors of a function of (path, leaf) that gets ``None`` for what it looks at."""


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
        flags = tuple([not group for group in self.groups])
        return flags if any(flags) else ()


def plan_of(
    rule: Choices,
    given: Opened,
    mode: int,
    reduction: Reduction | None = None,
    params: Opened | None = None,
) -> Plan:
    """Return the plan of a rule for an opened tree, one that was made before if possible.

    Traced code makes it anew.

    ``params`` are the parameters that are measured, too.
    """
    trees = [given] if params is None else [given, params]
    shards = tuple([tuple(tree.shards.items()) for tree in trees if tree.wrapped])
    shapes = tuple(given.shapes()) if rule.by_shape and mode != TRACED else None
    key: Any = (
        given.spec,
        given.leaf_info,
        mode,
        shapes,
        shards,
        reduction,
        reduction and (reduction.narrow, reduction.checked),
    )
    plan = None if mode == TRACED else rule.plans.get(key)
    if plan is not None:
        return plan
    with given.backend.computation_context(given.first):
        plan = Plan(rule, given, mode, reduction, [tree.shards for tree in trees])
    if mode != TRACED:
        if len(rule.plans) >= PLAN_CACHE_SIZE:
            rule.plans.clear()
        rule.plans[key] = plan
    return plan


class Plan:
    """What is the same at every step; made by `plan_of`."""

    def __init__(
        self, rule: Choices, given: Opened, mode: int, reduction: Reduction | None, shards: Any
    ) -> None:
        leaf_info, scope = given.leaf_info, rule.scope
        self.math = NormSpace(
            given, mode, narrow=leaf_info.narrow and (reduction is None or reduction.narrow)
        )
        """Where its norms lie."""
        self.leaf_info, self.scope, self.spec = leaf_info, scope, given.spec
        self._divide(rule, given, reduction)
        collectives = (
            Collectives(self, given, reduction, shards)
            if reduction is not None or any(shards)
            else None
        )
        self.collectives = collectives
        """How processes join what is measured, ``None`` if this one has all of it."""
        if collectives is not None and collectives.divided and rule.stateful:
            msg = (
                f"{summarize(rule)} remembers norms along axes, and some of these axes are divided "
                "among processes, so that its state would differ from process to process: take a "
                "scope of whole leaves, such as uc.scopes.each_leaf, or a limit without memory"
            )
            raise ValueError(msg)
        self.sizes: tuple[list[Any], list[Any]] | None = None
        """The numbers of entries of its norms, and what these are divided by,
        once a step has counted them.
        """
        self.shapes = self._shapes(rule, given)
        """The shapes of the blocks, if their norms are one vector between sums and products."""
        self.norm_blocks = self._joined_blocks()
        """The blocks of norms between sums and products."""
        # Parts without a reduction are refused.
        if reduction is None and self.math.compiled and scope.axes is None:
            present = leaf_info.present
            given.backend.replicas(
                [given.arrays[n] for n in present], None, None, lambda n: given.place(present[n])
            )

    def _divide(self, rule: Choices, given: Opened, reduction: Reduction | None) -> None:
        """Find out which leaves share a norm, and which norms form an array."""
        leaf_info, scope = self.leaf_info, self.scope
        missing = bool(given.shards) and len(leaf_info.present) < len(given.leaves)
        everywhere = rule.stateful or reduction is not None or missing
        members = _groups(
            given, scope, rule.limit.groups if everywhere else (), everywhere=everywhere
        )
        alone = reduction is None and len(leaf_info.present) == len(given.leaves)
        label = scope.label
        if label is not None and label is not everything and alone and is_new(rule):
            answers = [answer for answer, numbers in members.items() for _ in numbers]
            check_answers_differ(
                "scopes.groups(label)", label, given.paths(), given.leaves, answers
            )
            rule.tells_apart.append(True)
        groups = {
            label: [n for n in numbers if given.leaves[n] is not None]
            for label, numbers in members.items()
        }
        self.one_norm = scope.label is everything and scope.axes is None
        """Whether there is one norm for all leaves."""
        self.axes: list[Axes] = [None] * len(given.leaves)
        """The axes of each leaf that its norms cover, ``None`` for all."""
        for number in range(len(given.leaves)) if scope.axes is not None else ():
            self.axes[number] = _axes(given, scope, number)
        for group in groups.values() if scope.axes is not None else ():
            _raise_if_unequal(given, self.axes, group)
        if rule.stateful:
            raise_if_rows(given, self.axes, rule, "remembers something")
        self.blocks = self._blocks(rule, given, groups, everywhere=everywhere)
        self.members = [members[label] for block in self.blocks for label in block.labels]
        """The leaves of each norm, absent ones too."""
        self.places = {
            n: (b, row)
            for b, block in enumerate(self.blocks)
            for row, group in enumerate(block.groups)
            for n in group
        }
        """For each leaf, the block and the row of its norm."""
        self.entries = (
            scope.axes is not None
            and all([axes == () for axes in self.axes])
            and all([len(g) == 1 for g in groups.values()])
        )
        """Whether each norm is the modulus of an entry, whatever its order."""
        self.order = [n for block in self.blocks for group in block.groups for n in group or [-1]]
        """The leaves of each norm in a row, -1 for a norm without gradients."""
        self.counts = [len(group) or 1 for block in self.blocks for group in block.groups]
        """How many of them each norm has."""
        self.heights = [len(block.groups) for block in self.blocks]
        """How many norms each block has."""
        self.along = None if scope.axes is None else [*self.axes, None]
        """The axes of each leaf, and behind them those of a norm without gradients."""

    # Which leaves share a norm.

    def _blocks(
        self, rule: Choices, given: Opened, groups: dict[Hashable, list[int]], *, everywhere: bool
    ) -> list[Block]:
        # Compilers take long for each row taken out of an array of norms.
        apart = self.math.separate and not (rule.stateful or self.scope.label is everything)
        alike: dict[Hashable, list[Hashable]] = {}
        for number, (label, group) in enumerate(groups.items()):
            kind: Hashable = None
            if apart:
                kind = number
            elif self.scope.axes is not None:
                stacked = len(group) == 1 and not everywhere and not self.math.compiled
                kind = _stacking_key(given, group[0], self.axes[group[0]]) if stacked else None
                kind = number if kind is None else kind
            alike.setdefault(kind, []).append(label)
        return [
            Block(
                tuple([tuple(groups[label]) for label in labels]),
                tuple(labels),
                self._kept_axes(given, groups[labels[0]]),
            )
            for labels in alike.values()
        ]

    def _shapes(self, rule: Choices, given: Opened) -> list[tuple[int, ...]] | None:
        """Return the shape of each block if all norms can be one vector, else ``None``.

        An accelerator then runs each operation on norms once, not for each block. Its host would
        otherwise start hundreds of kernels for the rows of a large model.
        """
        if not self.math.on_device or len(self.blocks) < 2 or self.collectives is not None:
            return None
        if not (rule.limit.elementwise and rule.elementwise_curve) or rule.stateful:
            return None
        if any([len(group) != 1 for block in self.blocks for group in block.groups]):
            return None

        arrays = [given.arrays[number] for number in self.order]
        devices = {given.backend.device(array) for array in arrays}
        if len(devices) > 1 or not all([given.backend.stacks(array) for array in arrays]):
            return None
        shapes = []
        for block in self.blocks:
            [number] = block.groups[0]
            covered = self.axes[number]
            lengths = given.arrays[number].shape if covered is not None else ()
            kept = [length for axis, length in enumerate(lengths) if axis not in (covered or ())]
            shapes.append((len(block.groups), *kept))
        norms = sum(map(math.prod, shapes))
        entries = sum([math.prod(array.shape) for array in arrays])
        # Norms of single entries would take as much memory as the gradients.
        return shapes if norms * _ENTRIES_OF_NORM <= entries else None

    def _joined_blocks(self) -> list[Block]:
        """Return the blocks of norms between sums and products: one if they are one vector."""
        if self.shapes is None:
            return self.blocks
        groups = [group for block in self.blocks for group in block.groups]
        return [Block(tuple(groups), tuple([n for block in self.blocks for n in block.labels]))]

    def join_blocks(self, blocks: Sequence[Any]) -> list[Any]:
        """Return an array for each block of norms as one vector of all; see `shapes`."""
        if self.shapes is None:
            return list(blocks)
        xp = np if isinstance(blocks[0], np.ndarray) else self.math.xp
        vectors = []
        for block, shape in zip(blocks, self.shapes, strict=True):
            # Sizes have one entry for all norms of a leaf.
            full = block if tuple(block.shape) == shape else xp.broadcast_to(block, shape)
            vectors.append(xp.reshape(full, (-1,)))
        return [np.concatenate(vectors) if xp is np else xp.concat(vectors)]

    def split_blocks(self, blocks: Sequence[Any]) -> list[Any]:
        """Return an array for each block; those of `join_blocks`, or numbers, in its place."""
        if self.shapes is None:
            return list(blocks)
        [vector] = blocks
        if not getattr(vector, "shape", ()) or vector.shape[0] == 1:
            return [vector] * len(self.blocks)
        ends = list(accumulate(map(math.prod, self.shapes)))
        return [
            self.math.xp.reshape(vector[end - math.prod(shape) : end], shape)
            for end, shape in zip(ends, self.shapes, strict=True)
        ]

    def with_blocks_apart(self) -> Plan:
        """Return the plan for a limit that has the shape of the norms of a leaf."""
        plan = copy.copy(self)
        plan.shapes = None
        plan.norm_blocks = plan.blocks
        return plan

    def _kept_axes(self, given: Opened, group: Sequence[int]) -> int | None:
        """Return the number of kept axes of the norm of a group, ``None`` if unknown."""
        if self.scope.axes is None:
            return 0
        if not group:
            return None
        covered = self.axes[group[0]]
        return 0 if covered is None else len(given.arrays[group[0]].shape) - len(covered)

    def gradients(self) -> list[Any]:
        """Return how many gradients each norm has in this process, an array for each block."""
        return [np.asarray([float(len(group)) for group in block.groups]) for block in self.blocks]

    def in_numpy(self) -> Plan:
        """Return the plan of the same norms in NumPy's arrays, as they are recorded."""
        plan = copy.copy(self)
        plan.math = self.math.at_host()
        return plan

    def arrange(self, blocks: Sequence[Any]) -> Any:
        """Return a value for each group in the scope's form: a tree, a dict by label,
        or a single value.
        """
        if self.scope.label is everything:
            return blocks[0][0] if len(blocks[0].shape) == 1 else blocks[0][0, ...]
        rows = self.by_label(blocks)
        if self.scope.label is not None:
            return {label: rows[label] for label in self.labels if label in rows}
        return self.spec.unflatten([rows.get(number) for number in range(len(self.axes))])

    def by_label(self, blocks: Sequence[Any]) -> dict[Any, Any]:
        """Return a value for each group that is present.

        Processes that are joined have all named ones.
        """
        rows: dict[Any, Any] = {}
        everywhere = (
            self.collectives is not None
            and self.collectives.reduction is not None
            and self.scope.label is not None
        )
        for block, array in zip(self.blocks, blocks, strict=True):
            for row, (label, group) in enumerate(zip(block.labels, block.groups, strict=True)):
                if group or everywhere:
                    rows[label] = array[row] if len(array.shape) == 1 else array[row, ...]
        return rows

    @property
    def names(self) -> list[str]:
        """The groups or leaves of all norms by name, for processes that compare them."""
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


def _groups(
    given: Opened, scope: Scope, named: Sequence[Any], *, everywhere: bool
) -> dict[Hashable, list[int]]:
    """Return the numbers of the leaves that share a norm, absent ones too,
    by the label of their group.

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


def is_new(holder: Any) -> bool:
    """Whether a rule with a mask or a label has met no tree yet;
    in code that is compiled nothing is asked.
    """
    return not (holder.tells_apart or compiling())


def check_answers_differ(  # noqa: PLR0913 - a function, and what it was called with
    what: str,
    function: Callable[..., Any],
    paths: list[Path],
    leaves: Sequence[Any],
    answers: list[Any],
    *,
    by_leaf: bool = True,
) -> None:
    """Raise if a mask or a label returned the same for several leaves because it looks for names
    that they do not have.

    All leaves that have names may be meant, and so may a label that is a key of the path. With
    ``by_leaf`` a function may also decide by the leaf alone.

    Raises
    ------
    ValueError
        If it did.
    """
    if len(answers) < 2 or len(set(answers)) > 1:
        return
    answer = answers[0]
    numbered = all([isinstance(path[-1], int) for path in paths if path])
    if not numbered and answer is not False:
        return
    if not isinstance(answer, bool) and answer in paths[0]:
        return
    if by_leaf and _decides_by_leaf(function, paths, leaves):
        return

    msg = (
        f"{what} returned {summarize(answer)} for all {len(answers)} leaves, so it probably looks "
        f"for names that they don't have; look for keys of their paths, such as "
        f"{summarize(paths[0])}, or give the leaves names (a PyTorch optimizer gets them by "
        "attach(optimizer, rule, names=model)). If the answer is intended, leave the mask or the "
        "label out"
    )
    raise ValueError(msg)


def _decides_by_leaf(
    function: Callable[..., Any], paths: list[Path], leaves: Sequence[Any]
) -> bool:
    """Return whether a function of (path, leaf) works without the paths, but not without the
    leaves.

    An object that is called, such as a ``partial``, is taken at its word.
    """
    if not isinstance(function, (FunctionType, MethodType)):
        return True
    try:
        for leaf in leaves:
            function(None, leaf)
    except _FAILURES:
        return False
    try:
        for path in paths:
            function(path, None)
    except _FAILURES:
        return True
    return False


def label_of(label: Callable[..., Hashable], path: Path, leaf: Any, where: str) -> Hashable:
    """Return the label of a leaf's group; refuse labels that are unhashable or hold arrays."""
    try:
        answer: Any = label(path, leaf)
    except AttributeError as error:
        if leaf is not None:
            raise
        msg = (
            f"{where} is absent (None), and a rule that remembers asks for its group: label it by "
            "its path alone"
        )
        raise TypeError(msg) from error
    try:
        fits = (
            not hasattr(answer, "dtype")
            or isinstance(answer, (Number, str))
            or answer in {True, False}
        )
        frozenset((answer,))  # hashes it; PyTorch 2.11 and 2.12 cannot compile `hash`
    except TypeError:
        fits = False
    check("the label of a group", answer, fits, "hashable, such as a text or a number")
    return answer


def _axes(given: Opened, scope: Scope, number: int) -> Axes:
    """Return the axes of a leaf that its norms cover, ``None`` for all."""
    leaf, wrapped = given.leaves[number], given.wrapped.get(number)
    if leaf is None and wrapped is None:
        return None
    by_entry = wrapped is not None and wrapped.by_entry
    if wrapped is None or wrapped.rows is None or by_entry:
        shape = given.shard(number).shape if leaf is None else leaf.shape
    else:
        shape = given.arrays[number].shape  # that of the leaf may be unknown
    try:
        axes = scope.covered(len(shape), given.backend.output_axis)
    except ValueError as error:
        msg = f"{given.place(number)} of shape {tuple(shape)}: {error}"
        raise ValueError(msg) from None
    if axes and by_entry:
        msg = (
            f"{given.place(number)} is sparse, and stores no axes to take norms along; use a scope "
            "of whole leaves"
        )
        raise TypeError(msg)
    return axes


def raise_if_rows(given: Opened, axes: list[Axes], rule: Choices, does: str) -> None:
    """Refuse what a rule does for each row of a sparse leaf, which stores other rows at each step.

    Raises
    ------
    TypeError
        If the norms of a leaf that stores only some of its rows are along other axes.
    """
    for number in given.wrapped:
        covered = axes[number]
        if covered is not None and 0 not in covered and given.is_sparse(number):
            msg = (
                f"{given.place(number)} is sparse: {summarize(rule)} {does} for each row, and at each "
                "step other rows are stored; make the gradient dense, or take a norm of whole "
                "leaves"
            )
            raise TypeError(msg)


def _stacking_key(given: Opened, number: int, axes: Axes) -> Hashable:
    """Return a key that must be equal for norms with axes to be stacked,
    ``None`` if they must not be.
    """
    backend, array = given.backend, given.arrays[number]
    if axes is None or not backend.stacks(array):
        return None
    kept = tuple([n for axis, n in enumerate(array.shape) if axis not in axes])
    # Norms never leave their leaf.
    as_large = kept and math.prod([array.shape[axis] for axis in axes]) == 1
    large = math.prod(kept) > _STACKED
    return None if as_large or large else (kept, backend.device(array), given.shard(number))


def _raise_if_unequal(given: Opened, axes: list[Axes], group: Sequence[int]) -> None:
    """Refuse a group whose leaves have norms of different shapes."""

    def kept(number: int) -> tuple[Any, ...]:
        covered = axes[number]
        shape = given.arrays[number].shape
        return (
            ()
            if covered is None
            else tuple(n for axis, n in enumerate(shape) if axis not in covered)
        )

    for number in group:
        if not same_shape(kept(group[0]), kept(number)):
            first, other = (
                f"{given.place(n)} of shape {tuple(given.arrays[n].shape)}"
                for n in (group[0], number)
            )
            msg = (
                "leaves that share norms need equal shapes outside the axes a norm covers, but "
                f"{first} has norms of shape {kept(group[0])}, {other} has {kept(number)}"
            )
            raise ValueError(msg)
