# SPDX-License-Identifier: MIT
"""Cached metadata for one rule and one tree structure: which leaves share a norm, and how norms are
batched.

Without it, each step would spend time in Python for each leaf. A plan holds no gradient, and a step
never writes into it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from numbers import Number
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from uniclip._core.blocks import Block, Groups, Label
from uniclip._core.collectives import Collectives, Reduction
from uniclip._core.containers import expression_of
from uniclip._core.norm_space import NormSpace
from uniclip._core.sizes import Sizes, count_elements, needs_sizes, sizes_of_counts
from uniclip._core.tree import OpenedTree
from uniclip._errors import check, stable, summarize
from uniclip._types import Axes, Path, Tensor
from uniclip.backends import compiling
from uniclip.backends.arithmetic import in_groups
from uniclip.backends.arrays import same_shape
from uniclip.backends.base import TRACED, Products, kept_lengths, take
from uniclip.scopes import Scope, everything, is_one_norm

if TYPE_CHECKING:
    from uniclip._core.rule_spec import RuleSpec

PLAN_CACHE_SIZE = 64
"""The largest number of plans in the cache of a rule."""
MAX_STACKED_NORMS = 2**16
"""The largest number of norms of one leaf with kept axes that are stacked with others."""
MIN_ELEMENTS_PER_NORM = 8
"""How many elements each norm must have on average for all norms to be copied into one vector."""

_FAILURES = AttributeError, LookupError, TypeError, ValueError
"""The errors of a function of (path, leaf) that uses an argument that is ``None``."""


def plan_for(
    rule: RuleSpec,
    trees: Sequence[OpenedTree],
    mode: int,
    reduction: Reduction | None = None,
    *,
    separate: bool = False,
) -> Plan:
    """Return the plan of a rule for opened gradients, and for parameters if they are measured.

    It is made once for each structure. Traced code makes a plan each time it is traced: code that
    reads a cache would be compiled again after each change of the cache.

    Parameters
    ----------
    rule : Rule
    trees : sequence of OpenedTree
        The gradients, and the parameters if the limit needs them.
    mode : int
        The mode of the step.
    reduction : Reduction, optional
        What the processes of an ``all_reduce`` have agreed on.
    separate : bool, default False
        Do not join all norms in one vector, since the limit is an array with the shape of a block.
    """
    tree = trees[0]
    if mode == TRACED:
        return TreePlan(rule, trees, mode, reduction, separate=separate)

    # Shards are part of the key: which processes hold a leaf changes what is reduced.
    shapes = tuple(tree.shapes()) if rule.by_shape else None
    shards = tuple([one.shards.number for one in trees])
    key = (tree.spec, tree.leaf_info, mode, shapes, shards, reduction, separate)
    # Clear all plans when full: to remove one could raise if another thread removes it, too.
    plans = rule.cache.plans
    plan = plans.get(key)
    if plan is None:
        plan = TreePlan(rule, trees, mode, reduction, separate=separate)
        if len(plans) >= PLAN_CACHE_SIZE:
            plans.clear()
        plans[key] = plan

    return plan


def norm_space_of(tree: OpenedTree, mode: int, reduction: Reduction | None) -> NormSpace:
    """Return the norm space of opened gradients."""
    info = tree.leaf_info
    first = tree.first
    device = info.device if first is None else info.backend.device(first)
    # All processes use the widest dtype of any, or they would reduce sums of different dtypes.
    narrow = info.narrow and (reduction is None or reduction.narrow)
    return NormSpace(info, mode, device, narrow=narrow)


class Plan:
    """The norms of one rule on trees of one structure, in one process; see also `TreePlan`."""

    spec: Any = None
    """The structure of the tree."""
    collectives: Collectives | None = None
    """The reductions over processes; ``None`` in a run of one process."""
    shapes: list[tuple[int, ...]] | None = None
    """The shapes of the blocks, if their norms are one vector between sums and products.

    ``None`` if they stay an array for each block.
    """
    sizes: Sizes | None = None
    """The numbers of elements of the norms, if they are needed and known."""
    counts_elements = False
    """Whether each step counts the elements of its norms."""

    def __init__(
        self,
        space: NormSpace,
        scope: Scope,
        blocks: list[Block],
        axes: list[Axes],
        members: list[list[int]],
    ) -> None:
        self.space = space
        """The norm space: where norms are computed."""
        self.scope = scope
        self.blocks = blocks
        """The groups of leaves of each array of norms."""
        self.axes = axes
        """The axes of each leaf that its norms cover, ``None`` for all."""
        self.members = members
        """The leaves of each norm, absent ones too."""

        groups = _joined(blocks).groups
        self.order = [number for group in groups for number in group or [-1]]
        """The leaves of all norms, one norm after the other; -1 for a norm without gradients."""
        self.counts = [len(group) or 1 for group in groups]
        """The number of leaves in `order` of each norm."""
        self.heights = [len(block.groups) for block in blocks]
        """The number of norms of each block."""
        self.places = _places_of(blocks)
        """For each leaf, the block and the row of its norm."""
        self.along = None if scope.axes is None else [*axes, None]
        """The axes of each leaf, and at the end those of a norm without gradients, for -1.

        ``None`` if norms cover whole leaves.
        """
        # A step then sums no powers and takes no roots.
        each_alone = all([len(group) <= 1 for group in groups])
        self.by_element = scope.axes is not None and each_alone and all([a == () for a in axes])
        """Whether each norm is the modulus of a single element, whatever its order."""
        self.norm_blocks = blocks
        """The blocks between sums and products.

        They are `blocks`, or with `shapes` one block, the vector.
        """

    def join_blocks(self, blocks: Sequence[Tensor]) -> list[Any]:
        """Return the arrays of all blocks joined in one vector, if the plan has `shapes`."""
        if self.shapes is None:
            return list(blocks)
        xp = np if isinstance(blocks[0], np.ndarray) else self.space.xp
        vectors = []
        for block, shape in zip(blocks, self.shapes, strict=True):
            # A leaf has one size for all of its norms.
            full = block if tuple(block.shape) == shape else xp.broadcast_to(block, shape)
            vectors.append(xp.reshape(full, (-1,)))

        return [np.concatenate(vectors) if xp is np else xp.concat(vectors)]

    def split_blocks(self, blocks: Sequence[Any]) -> list[Any]:
        """Return an array for each block from the vector of `join_blocks`, or from a number."""
        if self.shapes is None:
            return list(blocks)
        [vector] = blocks
        lengths = list(map(math.prod, self.shapes))
        # A limit may be a number, which holds for all blocks.
        if tuple(getattr(vector, "shape", ())) != (sum(lengths),):
            return [vector] * len(self.blocks)
        return list(map(self.space.xp.reshape, in_groups(vector, lengths), self.shapes))

    def products(
        self, tree: OpenedTree, numbers: Sequence[int], factors: Sequence[Tensor], *, zero: bool
    ) -> Products:
        """Return the products of some leaves and their factors.

        With ``zero`` factors of 0 make zeros of NaN and ∞, too.
        """
        return Products(
            arrays=take(tree.arrays, numbers),
            blocks=list(factors),
            places=take(self.places, numbers),
            axes=self.along and take(self.along, numbers),
            shards=[tree.shard(number) for number in numbers] if tree.shards else None,
            in_place=tree.in_place,
            zero=zero,
        )

    def in_numpy(self) -> Plan:
        """Return the plan of the same norms as NumPy arrays, as they are recorded."""
        plan = copy.copy(self)
        plan.space = self.space.at_host()
        return plan

    def arrange(self, blocks: Sequence[Any]) -> Any:
        """Return a value for each group in the scope's form: a tree, a dict by label,
        or a single value.
        """
        # `array[0]` returns NumPy's scalars, which print as numbers; `array[0, ...]` 0-d arrays.
        if self.scope.label is everything:
            return blocks[0][0] if len(blocks[0].shape) == 1 else blocks[0][0, ...]
        rows = self.by_label(blocks)
        if self.scope.label is not None:
            return {label: rows[label] for label in sorted(rows, key=_text)}
        return self.spec.unflatten([rows.get(number) for number in range(len(self.axes))])

    def by_label(self, blocks: Sequence[Any]) -> dict[Any, Any]:
        """Return a value for each group that is present.

        With ``all_reduce`` all named groups are: another process may have their gradients.
        """
        reduced = self.collectives is not None and self.collectives.reduction is not None
        everywhere = reduced and self.scope.label is not None
        rows: dict[Any, Any] = {}
        for block, array in zip(self.blocks, blocks, strict=True):
            for row, (label, group) in enumerate(zip(block.labels, block.groups, strict=True)):
                if group or everywhere:
                    rows[label] = array[row] if len(array.shape) == 1 else array[row, ...]

        return rows

    @property
    def one_norm(self) -> bool:
        """Whether there is one norm for all leaves."""
        return is_one_norm(self.scope)


class TreePlan(Plan):
    """The plan of opened trees, with collectives if there are several processes; see `plan_for`."""

    def __init__(
        self,
        rule: RuleSpec,
        trees: Sequence[OpenedTree],
        mode: int,
        reduction: Reduction | None,
        *,
        separate: bool,
    ) -> None:
        """Find which leaves share a norm, which norms form an array, and what processes reduce."""
        # Everything else depends on which leaves share a norm.
        tree = trees[0]
        space = norm_space_of(tree, mode, reduction)
        # A state has a row for each norm, and another process may have the gradient.
        has_absent = len(tree.leaf_info.present) < len(tree.leaves)
        shards_absent = has_absent and bool(tree.shards)
        everywhere = rule.stateful or reduction is not None or shards_absent
        members = group_leaves(rule, tree, everywhere=everywhere)
        _check_labels(rule, tree, members, reduction)

        # Stack norms that can be computed together in one array.
        axes = _axes_of_leaves(rule, tree, members)
        blocks = _stack_norms(rule, tree, members, axes, space, everywhere=everywhere)
        in_order = take(members, _joined(blocks).labels)
        super().__init__(space, rule.scope, blocks, axes, in_order)
        self.spec = tree.spec

        # The rest depends on which norms there are.
        self.collectives = _collectives_of(self, rule, trees, reduction)
        if not separate:
            self.shapes = _shapes_of_vector(self, rule, tree)
        if self.shapes is not None:
            self.norm_blocks = [_joined(blocks)]
        self.counts_elements = needs_sizes(rule.limit, rule.norm)
        if self.counts_elements and not space.compiled and self.collectives is None:
            self.counts_elements = False
            self.sizes = _sizes_of(self, rule, tree)


def _sizes_of(plan: Plan, rule: RuleSpec, tree: OpenedTree) -> Sizes:
    """Return the numbers of elements of the norms."""
    with nullcontext() if plan.space.host else plan.space.library.allow_float64():
        counts = plan.join_blocks(count_elements(plan, tree))
        return sizes_of_counts(plan, counts, rule.norm.size_power)


def _places_of(blocks: Sequence[Block]) -> dict[int, tuple[int, int]]:
    places = {}
    for number, block in enumerate(blocks):
        for row, group in enumerate(block.groups):
            for leaf in group:
                places[leaf] = (number, row)
    return places


# Which leaves share a norm.


def group_leaves(rule: RuleSpec, tree: OpenedTree, *, everywhere: bool) -> Groups:
    """Return the numbers of the leaves that share a norm, by label, also of absent leaves.

    With ``everywhere``, groups without any gradient have a norm, too.
    """
    label = rule.scope.label
    if label is everything:
        return {None: list(range(len(tree.leaves)))}
    if label is None:
        return {n: [n] for n, leaf in enumerate(tree.leaves) if everywhere or leaf is not None}

    groups: Groups = {name: [] for name in rule.limit.groups} if everywhere else {}
    for number, (path, leaf) in enumerate(zip(tree.paths(), tree.leaves, strict=True)):
        if leaf is None and not everywhere:
            continue
        of_leaf = label_of(label, path, leaf, expression_of(tree.name, path))
        groups.setdefault(of_leaf, []).append(number)

    # Sorted, since processes may find the labels in different orders.
    return dict(sorted(groups.items(), key=lambda group: _text(group[0])))


def names_of_norms(rule: RuleSpec, tree: OpenedTree) -> list[str]:
    """Return a name for each norm, of its group or leaf, for processes to compare."""
    if rule.scope.label is None:
        return [stable(expression_of("", path)) for path in tree.spec.paths()]
    return [_text(label) for label in group_leaves(rule, tree, everywhere=True)]


def _text(label: Any) -> str:
    return stable(repr(label))


def _check_labels(
    rule: RuleSpec, tree: OpenedTree, members: Groups, reduction: Reduction | None
) -> None:
    """Raise at the first step if a label looks for names that the leaves do not have."""
    label = rule.scope.label
    if label is None or label is everything or not is_new(rule):
        return

    # With absent leaves, the same label for all that are left is no sign of a mistake.
    if reduction is None and len(tree.leaf_info.present) == len(tree.leaves):
        answers: list[Any] = []
        for answer, numbers in members.items():
            answers += [answer] * len(numbers)

        what = "scopes.groups(label)"
        check_answers_differ(what, label, tree.paths(), tree.leaves, answers)
        rule.answers_checked.append(True)


def _stack_norms(  # noqa: PLR0913 - called in one place
    rule: RuleSpec,
    tree: OpenedTree,
    members: Groups,
    axes: list[Axes],
    space: NormSpace,
    *,
    everywhere: bool,
) -> list[Block]:
    """Stack norms in as few blocks as possible: each operation is one call for each block."""
    # In compiled code the reverse is true: each row taken out of an array takes long to compile.
    never_stack = space.unstacked and not (rule.stateful or rule.scope.label is everything)
    # Norms with kept axes are stacked only if their shapes are known and none is absent.
    can_stack = not (everywhere or space.compiled)
    present = {}
    alike: dict[Hashable, list[Label]] = {}
    for number, (label, leaves) in enumerate(members.items()):
        group = tuple([n for n in leaves if tree.leaves[n] is not None])
        present[label] = group
        key: Hashable = None
        if can_stack and len(group) == 1 and rule.scope.axes is not None:
            key = _stacking_key(tree, group[0], axes[group[0]])
        # A norm that cannot be stacked is a block of its own.
        if never_stack or (key is None and rule.scope.axes is not None):
            key = number

        alike.setdefault(key, []).append(label)

    blocks = []
    for labels in alike.values():
        groups = tuple(take(present, labels))
        kept = 0
        for number in groups[0][:1]:
            kept = len(kept_lengths(tree.arrays[number].shape, axes[number]))
        blocks.append(Block(groups, tuple(labels), kept))

    return blocks


def _stacking_key(tree: OpenedTree, number: int, axes: Axes) -> Hashable:
    """Return a key that is equal for norms with kept axes that can be stacked.

    ``None`` for norms that must not be stacked.
    """
    # Stacking would gather sharded arrays.
    backend = tree.backend
    array = tree.arrays[number]
    if axes is None or not backend.stacks(array):
        return None
    kept = kept_lengths(array.shape, axes)

    # To stack the norms of single entries would copy the gradients.
    of_entries = bool(kept) and math.prod(take(array.shape, axes)) == 1
    if of_entries or math.prod(kept) > MAX_STACKED_NORMS:
        return None
    return kept, backend.device(array), tree.shard(number)


def _shapes_of_vector(plan: Plan, rule: RuleSpec, tree: OpenedTree) -> list[tuple[int, ...]] | None:
    """Return the shape of each block if all norms can be one vector, else ``None``.

    An accelerator then runs each operation on norms once. With an array for each block, the host
    would start hundreds of kernels for the rows of a large model.
    """
    if not plan.space.on_device or len(plan.blocks) < 2 or plan.collectives is not None:
        return None
    if not (rule.limit.elementwise and rule.elementwise_curve) or rule.stateful:
        return None
    if not _can_form_vector(plan, tree):
        return None

    shapes = []
    for block in plan.blocks:
        [number] = block.groups[0]
        kept = kept_lengths(tree.arrays[number].shape, plan.axes[number])
        shapes.append((len(block.groups), *kept))

    # Norms of single elements would take as much memory as the gradients.
    norms = sum(map(math.prod, shapes))
    entries = 0
    for number in plan.order:
        entries += math.prod(tree.arrays[number].shape)
    return shapes if norms * MIN_ELEMENTS_PER_NORM <= entries else None


def _can_form_vector(plan: Plan, tree: OpenedTree) -> bool:
    """Return whether each norm is of one leaf, and all leaves are on one device."""
    if -1 in plan.order or max(plan.counts) > 1:
        return False
    arrays = take(tree.arrays, plan.order)
    devices = set(map(tree.backend.device, arrays))
    return len(devices) == 1 and all(map(tree.backend.stacks, arrays))


def _joined(blocks: Iterable[Block]) -> Block:
    """Return one block with the rows of all blocks."""
    groups: list[tuple[int, ...]] = []
    labels: list[Label] = []
    for block in blocks:
        groups += block.groups
        labels += block.labels
    return Block(tuple(groups), tuple(labels))


def _collectives_of(
    plan: Plan, rule: RuleSpec, trees: Sequence[OpenedTree], reduction: Reduction | None
) -> Collectives | None:
    """Return the reductions over processes of a plan, ``None`` if there is one process."""
    tree = trees[0]
    # In JAX, this call raises an error for leaves that vary along a mapped axis, since without
    # ``all_reduce`` each device would clip by a norm of its own part.
    if reduction is None and plan.space.compiled and rule.scope.axes is None:
        present = tree.leaf_info.present
        arrays = take(tree.arrays, present)
        tree.backend.replicas(arrays, None, None, lambda n: tree.expression(present[n]))

    if reduction is None and not any([one.shards for one in trees]):
        return None
    collectives = Collectives(plan, rule, trees, reduction)
    if collectives.norms_sharded and rule.stateful:
        msg = (
            f"{summarize(rule)} keeps a state for norms along axes, and some of these axes are "
            "sharded, so the state would differ from process to process; use a scope of whole "
            "leaves, such as uc.scopes.each_leaf, or a stateless limit"
        )
        raise ValueError(msg)
    return collectives


def is_new(rule: Any) -> bool:
    """Return whether the answers of a rule's mask or label are still to be checked.

    Compiled code checks nothing.
    """
    return not (rule.answers_checked or compiling())


def check_answers_differ(  # noqa: PLR0913 - a function, and what it was called with
    what: str,
    function: Callable[..., Any],
    paths: list[Path],
    leaves: Sequence[Any],
    answers: list[Any],
    *,
    by_leaf: bool = True,
) -> None:
    """Raise if a mask or a label probably looks for names that the leaves do not have.

    A sign of it is the same answer for several leaves without names, since a mask that matches none
    would silently turn clipping off. The same answer is accepted if the leaves have names, if it is
    a key of the path, or, with ``by_leaf``, from a function that uses the leaf alone.

    Raises
    ------
    ValueError
        If the answers do not differ.
    """
    if len(answers) < 2 or len(set(answers)) > 1:
        return
    answer = answers[0]
    numbered = all([isinstance(path[-1], int) for path in paths if path])
    if not numbered and answer is not False:
        return
    if not isinstance(answer, bool) and answer in paths[0]:
        return
    if by_leaf and _uses_leaf_alone(function, paths, leaves):
        return

    msg = (
        f"{what} returned {summarize(answer)} for all {len(answers)} leaves, so it probably looks "
        f"for names that they don't have; look for keys of their paths, such as "
        f"{summarize(paths[0])}, or give the leaves names (a PyTorch optimizer gets them by "
        "attach(optimizer, rule, names=model)). If the answer is intended, leave the mask or the "
        "label out"
    )
    raise ValueError(msg)


def _uses_leaf_alone(
    function: Callable[..., Any], paths: list[Path], leaves: Sequence[Any]
) -> bool:
    """Return whether a function of (path, leaf) works without the paths, but not without the
    leaves.

    A callable object, such as a ``partial``, counts as one that does, without a call.
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


def label_of(label: Callable[..., Hashable], path: Path, leaf: Any, where: str) -> Label:
    """Return the label of a leaf's group.

    Raises
    ------
    TypeError
        If the label is not hashable, or is an array, or the function fails on an absent leaf.
    """
    try:
        answer: Any = label(path, leaf)
    except AttributeError as error:
        if leaf is not None:
            raise
        msg = (
            f"{where} is absent (None), and a stateful rule needs its group, too: label leaves by "
            "their paths alone"
        )
        raise TypeError(msg) from error

    is_array = hasattr(answer, "dtype")
    try:
        # NumPy's scalars are valid labels.
        fits = not is_array or isinstance(answer, (Number, str)) or answer in {True, False}
        # Hashes it: PyTorch 2.11 and 2.12 do not compile `hash`.
        frozenset((answer,))
    except TypeError:
        fits = False

    check("the label of a group", answer, fits, "hashable, such as a string or a number")
    return answer


# The axes that norms cover.


def _axes_of_leaves(rule: RuleSpec, tree: OpenedTree, members: Groups) -> list[Axes]:
    """Return the axes of each leaf that its norms cover; raise if the rule cannot have them."""
    axes: list[Axes] = [None] * len(tree.leaves)
    if rule.scope.axes is not None:
        axes = [_covered_axes(tree, rule.scope, number) for number in range(len(tree.leaves))]
        for group in members.values():
            _check_equal_shapes(tree, axes, group)

    if rule.stateful:
        raise_if_rows(tree, axes, rule, "keeps state")
    return axes


def _covered_axes(tree: OpenedTree, scope: Scope, number: int) -> Axes:
    """Return the axes of a leaf that its norms cover, ``None`` for all."""
    leaf = tree.leaves[number]
    wrapped = tree.wrapped.get(number)
    if leaf is None and number not in tree.shards:
        return None

    by_entry = wrapped is not None and wrapped.by_entry
    if leaf is None:
        shape = tree.shard(number).shape
    elif wrapped is None or wrapped.rows is None or by_entry:
        shape = leaf.shape
    else:
        # The shape of a leaf that stores rows may be unknown.
        shape = tree.arrays[number].shape

    try:
        axes = tree.covered(scope, number, len(shape))
    except (TypeError, ValueError) as error:
        msg = f"{tree.expression(number)} of shape {tuple(shape)}: {error}"
        raise type(error)(msg) from None

    if axes and by_entry:
        msg = (
            f"{tree.expression(number)} is sparse and stores single elements, which have no axes "
            "to take norms along; use a scope of whole leaves"
        )
        raise TypeError(msg)

    return axes


def raise_if_rows(tree: OpenedTree, axes: list[Axes], rule: RuleSpec, does: str) -> None:
    """Raise if a rule has a value for each row of a sparse leaf, which stores other rows at each
    step.

    Raises
    ------
    TypeError
        If the norms of a leaf that stores only some of its rows are along other axes.
    """
    for number in tree.wrapped:
        covered = axes[number]
        if covered is not None and 0 not in covered and tree.is_sparse(number):
            msg = (
                f"{tree.expression(number)} is sparse and stores other rows at each step, but "
                f"{summarize(rule)} {does} for each row; make the gradient dense, or use a scope "
                "of whole leaves"
            )
            raise TypeError(msg)


def _check_equal_shapes(tree: OpenedTree, axes: list[Axes], group: Sequence[int]) -> None:
    """Raise if a group has leaves whose norms differ in shape."""
    present = [number for number in group if tree.leaves[number] is not None]
    shapes = [kept_lengths(tree.arrays[number].shape, axes[number]) for number in present]
    for number, shape in zip(present, shapes, strict=True):
        if same_shape(shapes[0], shape):
            continue
        msg = (
            "leaves that share norms need equal shapes outside the axes a norm covers, but "
            f"{_expression_and_shape(tree, present[0])} has norms of shape {shapes[0]}, "
            f"{_expression_and_shape(tree, number)} has {shape}"
        )
        raise ValueError(msg)


def _expression_and_shape(tree: OpenedTree, number: int) -> str:
    return f"{tree.expression(number)} of shape {tuple(tree.arrays[number].shape)}"
