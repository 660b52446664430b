# SPDX-License-Identifier: MIT
"""The saved form of a rule's state: its numbers, whose they are, and the type of rule.

It is a dict of four entries, the same for `uniclip.Clipper`, every integration and every framework:

==============  ===================================================================================
``"format"``    2, the version of the format
``"rule"``      the types of limit, norm and scope that the numbers belong to, see `identity`
``"leaves"``    for each stateful rule, the leaves or groups of its norms, see `leaves_of`
``"state"``     the arrays of the state by name, as numbers and lists, or as arrays
==============  ===================================================================================

`to_dict` and `from_dict` are for states that a custom training loop keeps itself. Rules, without
their states, are saved by `uniclip.config`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from uniclip._core.containers import Flat, expression_of, flatten
from uniclip._core.plan import label_of
from uniclip._errors import check, stable, summarize
from uniclip._types import Tensor, Tree
from uniclip._version import version
from uniclip.backends import DEFAULT, Backend, backend_of, numpy_of, to_lists
from uniclip.compose import AnyRule, Chain, Masked, as_rule, walk_rules
from uniclip.limits import Limit, PerGroup
from uniclip.limits.base import SAVED_NAMES
from uniclip.norms import Norm
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import FanIn, Scope, Stacked, everything

FORMAT = 2
"""The version that is written and read; a state without a version is read as this one."""
_ENTRIES = ("rule", "leaves", "state")
_START_OVER = (
    "begin anew by resume=False in attach, Clipper, ClipGradients or ClippedTrainer, or elsewhere "
    "by loading {}"
)
_MAX_LABELS = 5
"""The number of leaves or groups that an error names."""


Leaves: TypeAlias = list[list[str] | None]
"""For each stateful rule, in the order of a chain: its leaves or groups,
``None`` if all leaves share a norm.

A leaf without a gradient, or one that a mask excludes, is listed too, since it has its own row.
"""
NumPyArrays: TypeAlias = dict[str, "np.ndarray[Any, Any]"]
"""Numbers of a state by name, as arrays of NumPy."""


class Saved(NamedTuple):
    """A saved state that was checked against a rule, copied into arrays."""

    leaves: Leaves | None
    """``None`` if unknown, or not to be checked."""
    values: Mapping[str, Tensor]


class RuleState(NamedTuple):
    """The state of one rule by leaf or group."""

    rows: dict[str, NumPyArrays]
    """The numbers of each leaf or group."""
    shared: NumPyArrays
    """The numbers that belong to all of them."""


def array_of(values: Any) -> Any:
    """Return numbers, nested lists or an array as a new array."""
    backend = backend_of(values)
    if backend is None:
        return np.array(to_lists(values))

    # A copy by `copy` would share the memory of a tensor of PyTorch.
    array = backend.detach(values)
    if hasattr(array, "clone"):
        return array.clone()
    return copy.copy(array)


def array_like(backend: Backend, name: str, values: Tensor, like: Tensor) -> Tensor:
    """Return saved values as an array like another one."""
    # Empty lists have neither shape nor dtype.
    if 0 == math.prod(values.shape) == math.prod(like.shape):
        return like

    if tuple(values.shape) != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {tuple(values.shape)}, expected {tuple(like.shape)}; load "
            "a state of the same rule for gradients of the same shapes, and pass params= if some "
            "are absent at the first step"
        )
        raise ValueError(msg)

    array: Any = values
    # Frameworks do not read each other's arrays, so the numbers go through Python lists.
    if backend_of(values) is not backend:
        array = np.asarray(to_lists(values))
    with backend.computation_context(like):
        return backend.to_device_of(like, backend.xp.asarray(array, dtype=like.dtype))


def to_dict(rule: AnyRule, state: Tree, grads: Tree) -> dict[str, Any]:
    """Return a state of ``rule.init`` or ``rule.update`` as plain numbers, lists and strings.

    Any file format can hold them.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
    state : tree of arrays
    grads : tree
        Gradients, or parameters of the same shapes, which name the leaves of the norms.

    Returns
    -------
    dict
        In the format of `uniclip.Clipper.state_dict`; empty for a rule without state.

    Examples
    --------
    >>> from uniclip.saved import from_dict, to_dict
    >>> rule, grads = uc.norm_growth(), {"w": np.asarray([3.0, 4.0])}
    >>> _, state, _ = rule.update(grads, rule.init(grads))
    >>> to_dict(rule, state, grads)["state"]
    {'averages': [5.0], 'count': 1}
    >>> from_dict(rule, to_dict(rule, state, grads), grads) == state
    True
    """
    rule = as_rule(rule)
    if not rule.stateful:
        return {}
    leaves = leaves_of(rule, flatten(grads))
    return to_saved(rule, Saved(leaves, values_of(state)))


def from_dict(rule: AnyRule, saved: Mapping[str, Any], grads: Tree) -> Any:
    """Return a saved state for ``rule.update``; it may come from any integration and framework.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
    saved : dict
        An empty dict gives the state of ``rule.init``.
    grads : tree
        Gradients, or parameters of the same shapes, whose framework, dtypes and devices the state
        gets.

    Raises
    ------
    TypeError
        If ``saved`` is not a dict.
    ValueError
        If it belongs to another rule, other leaves or other shapes.

    Examples
    --------
    >>> import json
    >>> from uniclip.saved import from_dict, to_dict
    >>> rule, grads = uc.norm_growth(), {"w": np.asarray([3.0, 4.0])}
    >>> _, state, _ = rule.update(grads, rule.init(grads))
    >>> text = json.dumps(to_dict(rule, state, grads))
    >>> from_dict(rule, json.loads(text), grads)
    Averages(averages=array([5.]), norm_count=array(1, dtype=int32))
    """
    rule = as_rule(rule)
    check("saved", saved, isinstance(saved, dict), "what to_dict() or a state_dict() returned")
    first_state = rule.init(grads)
    if not saved:
        return first_state
    leaves = leaves_of(rule, flatten(grads))
    return restore_state(from_saved(saved, rule), rule, leaves, first_state)


def renamed(
    saved: Mapping[str, Any], names: Mapping[str, str] | Callable[[str], str]
) -> dict[str, Any]:
    """Return a saved state with its leaves or groups renamed.

    Parameters
    ----------
    saved : dict
    names : dict, or function of a name
        Maps the names in ``saved["leaves"]`` to those of the new gradients, both as Python prints
        the keys that lead to a leaf: ``"['layers'][0]"``. Names that are not in the dict stay.

    Raises
    ------
    ValueError
        If the saved state has no leaf with a name in the dict, or if two leaves get the same name.

    Examples
    --------
    >>> from uniclip.saved import renamed
    >>> clipper = uc.Clipper(uc.norm_growth())
    >>> _ = clipper({"w": np.asarray([3.0, 4.0])})
    >>> renamed(clipper.state_dict(), {"['w']": "['dense']['kernel']"})["leaves"]
    [["['dense']['kernel']"]]
    """
    leaves = saved.get("leaves")
    if leaves is None:
        return dict(saved)

    labels = labels_of(leaves)
    if callable(names):
        names = {label: names(label) for label in labels}
    unknown = [name for name in names if name not in labels]
    if unknown:
        msg = (
            f"the saved state has no entry for {shown(unknown)}; it has entries for {shown(labels)}"
        )
        raise ValueError(msg)

    new_leaves = []
    for old_labels in leaves:
        new_labels = old_labels and [names.get(label, label) for label in old_labels]
        for label, count in Counter(new_labels or ()).items():
            if count > 1:
                msg = (
                    f"two leaves of the saved state would be named {shown([label])}; give each a "
                    "different name"
                )
                raise ValueError(msg)
        new_leaves.append(new_labels)
    return {**saved, "leaves": new_leaves}


def names_in_state(state: Any) -> list[str]:
    """Return a name for each array of a state: the fields, keys and indices that lead to it."""
    return list(map(_name_of_path, optree.tree_accessors(state)))


def to_saved(
    rule: BaseRule, saved: Saved, convert: Callable[[Any], object] = to_lists
) -> dict[str, Any]:
    """Return a state in its saved form; ``convert`` converts each array for the file."""
    values = {name: convert(array) for name, array in saved.values.items()}
    return {
        "format": FORMAT,
        "rule": identity(rule),
        "leaves": _copy_labels(saved.leaves),
        "state": values,
    }


def from_saved(saved: Any, rule: BaseRule) -> Saved:
    """Check what can be checked in a saved state without gradients, and copy it.

    Parameters
    ----------
    saved : dict
        What `to_saved` returned; a rule or leaves of ``None`` are not checked.
    rule : Rule, Chain or Masked
        The rule that will use it.

    Raises
    ------
    ValueError
        If it has another format, lacks an entry, or belongs to another rule.
    """
    _check_format(saved)
    complete = isinstance(saved, dict) and set(_ENTRIES) <= set(saved)
    if not complete or not isinstance(saved["state"], dict):
        msg = (
            f"the saved state, {summarize(saved)}, doesn't name its rule and its leaves; "
            f"{_START_OVER}, or, if it is a state of this rule and these leaves, load "
            "{'rule': None, 'leaves': None, 'state': {name: array}}"
        )
        raise ValueError(msg)

    expected = identity(rule)
    if saved["rule"] not in (expected, None):
        here = f"is {expected}"
        if not rule.stateful:
            here = "keeps no state"
        msg = (
            f"the saved state belongs to a different rule: it was saved for {saved['rule']}, but "
            f"{summarize(rule)} {here}; load it with the same rule, or {_START_OVER}"
        )
        raise ValueError(msg)

    values = {name: array_of(numbers) for name, numbers in saved["state"].items()}
    return Saved(_copy_labels(saved["leaves"]), values)


def restore_state(saved: Saved, rule: BaseRule, leaves: Leaves | None, like: Tree) -> Any:
    """Return a saved state in arrays like those of a state before the first step.

    Parameters
    ----------
    saved : Saved
    rule : Rule, Chain or Masked
    leaves : list
        What `leaves_of` returns for the gradients here; ``None`` if unknown.
    like : tree of arrays
        What ``rule.init`` returns for them.

    Raises
    ------
    ValueError
        If it belongs to other leaves, or if an array is missing or has another shape.
    """
    if saved.leaves is None or leaves is None or saved.leaves == leaves:
        return _fill_state(rule, saved.values, like)

    # In another order, rows are looked up by their names.
    saved_sets = [labels and set(labels) for labels in saved.leaves]
    if saved_sets != [labels and set(labels) for labels in leaves]:
        raise ValueError(_describe_mismatch(rule, labels_of(saved.leaves), labels_of(leaves)))
    return by_name(saved, rule, leaves, like)[0]


def by_name(
    saved: Saved, rule: BaseRule, leaves: Leaves, like: Tree
) -> tuple[Any, Saved, list[str]]:
    """Return a state whose rows are looked up in a saved one by the names of leaves or groups.

    Parameters
    ----------
    saved, rule, leaves, like
        As for `restore_state`; ``like`` has the rows of names that are not in the saved state.

    Returns
    -------
    state : tree of arrays
    kept : Saved
        The rows of names that are not here, but for those named ``""``.
    new : list of str
        The names that are not in the saved state.
    """
    saved_states = _split_rules(rule, saved)
    first_states = _split_rules(rule, Saved(leaves, values_of(like)))

    states: list[RuleState] = []
    kept: list[RuleState] = []
    new: list[str] = []
    for saved_state, first_state in zip(saved_states, first_states, strict=True):
        states.append(_look_up_rows(rule, saved_state, first_state))

        # A leaf named "" never comes back.
        here = first_state.rows
        others = {
            label: row for label, row in saved_state.rows.items() if label and label not in here
        }
        kept.append(RuleState(others, {}))
        new += [label for label in here if label not in saved_state.rows]

    state = _fill_state(rule, _join_rules(rule, states).values, like)
    return state, _join_rules(rule, kept), new


def _look_up_rows(rule: BaseRule, saved: RuleState, first: RuleState) -> RuleState:
    """Return the state of one rule with the leaves of its first state, and their saved rows."""
    # An array with a single row looks like a number of that leaf, even if it belongs to all.
    shared_names = {*saved.shared, *first.shared}
    single: NumPyArrays = {}
    for row in saved.rows.values():
        single |= {name: number[None] for name, number in row.items() if name in shared_names}

    rows: dict[str, NumPyArrays] = {}
    for label, first_row in first.rows.items():
        rows[label] = saved.rows.get(label, first_row)
        differing = {*first_row, *first.shared} ^ {*rows[label], *saved.shared}
        if label in saved.rows and differing:
            msg = (
                f"the saved state of {summarize(rule)} and a state here differ in "
                f"{sorted(differing)}; {_START_OVER}"
            )
            raise ValueError(msg)
    return RuleState(rows, {**first.shared, **single, **saved.shared})


def merge_states(rule: BaseRule, first: Saved, other: Saved) -> Saved:
    """Return two saved states of a rule, of different leaves or groups, as one.

    The first one wins where both have a number.
    """
    merged = []
    for a, b in zip(_split_rules(rule, first), _split_rules(rule, other), strict=True):
        # The rows of the first come first, in their order.
        rows = {**a.rows, **b.rows, **a.rows}
        merged.append(RuleState(rows, {**b.shared, **a.shared}))
    return _join_rules(rule, merged)


def values_of(state: Any) -> dict[str, Any]:
    """Return the arrays of a state by name."""
    return dict(zip(names_in_state(state), optree.tree_leaves(state), strict=True))


def _check_format(saved: object) -> None:
    """Raise if a saved state has an unknown format."""
    if not isinstance(saved, dict):
        return
    number = saved.get("format", FORMAT)
    if number != FORMAT:
        msg = (
            f"the saved state has format {summarize(number)}, but uniclip {version()} reads format "
            f"{FORMAT}; load it with the uniclip that saved it or a later one, or {_START_OVER}"
        )
        raise ValueError(msg)


def _fill_state(rule: BaseRule, values: Mapping[str, Tensor], like: Any) -> Any:
    """Return the numbers of a saved state in arrays like those of a state."""
    paths, arrays, spec = optree.tree_flatten_with_accessor(like)
    names = list(map(_name_of_path, paths))
    if set(names) != set(values):
        msg = (
            f"the saved state has {sorted(values)}, but a state of {summarize(rule)} has "
            f"{sorted(names)}; {_START_OVER}"
        )
        raise ValueError(msg)

    # A Python bool has no backend.
    backend = next(filter(None, map(backend_of, arrays)), DEFAULT)
    filled = []
    for name, array in zip(names, arrays, strict=True):
        filled.append(array_like(backend, name, values[name], array))
    return optree.tree_unflatten(spec, filled)


# Rows of leaves and groups: states have an array for many of them, lookups need each by its name.


def _split_rules(rule: BaseRule, saved: Saved) -> list[RuleState]:
    """Return the state of each stateful rule, row by row."""
    states = []
    for (prefix, part), labels in zip(stateful_rules(rule), saved.leaves or (), strict=True):
        values: NumPyArrays = {}
        for name, array in saved.values.items():
            if name.startswith(prefix):
                values[name.removeprefix(prefix)] = numpy_of(array)
        states.append(_split_rows(part, labels or [], values))
    return states


def _split_rows(rule: BaseRule, labels: list[str], values: NumPyArrays) -> RuleState:
    """Return the state of one rule, row by row."""
    rows: dict[str, NumPyArrays] = {label: {} for label in labels}
    if _has_separate_states(rule):
        for number, label in enumerate(labels):
            prefix = _row_prefix(rule, number, len(labels))
            for name, array in values.items():
                if name.startswith(prefix):
                    rows[label][name.removeprefix(prefix)] = array
        return RuleState(rows, {})

    shared: NumPyArrays = {}
    for name, array in values.items():
        # An array with as many rows as there are leaves has one for each; others belong to all.
        if not labels or array.shape[:1] != (len(labels),):
            shared[name] = array
            continue
        for label, number in zip(labels, array, strict=True):
            rows[label][name] = number
    return RuleState(rows, shared)


def _join_rules(rule: BaseRule, states: Sequence[RuleState]) -> Saved:
    """Return the states of stateful rules as a saved state; the inverse of `_split_rules`."""
    leaves: Leaves = []
    values: NumPyArrays = {}
    for (prefix, part), (rows, shared) in zip(stateful_rules(rule), states, strict=True):
        leaves.append(list(rows) if labelled(part) else None)
        for name, array in _join_rows(part, rows, shared).items():
            values[prefix + name] = array
    return Saved(leaves, values)


def _join_rows(rule: BaseRule, rows: dict[str, NumPyArrays], shared: NumPyArrays) -> NumPyArrays:
    """Return the rows of one rule as the arrays of its state; the inverse of `_split_rows`."""
    values: NumPyArrays = {}
    if _has_separate_states(rule):
        for number, row in enumerate(rows.values()):
            prefix = _row_prefix(rule, number, len(rows))
            values |= {prefix + name: array for name, array in row.items()}
        return values

    for row in rows.values():
        for name in row:
            if name not in values and name not in shared:
                values[name] = np.stack([other[name] for other in rows.values()])
    return values | shared


def _has_separate_states(rule: BaseRule) -> bool:
    """Return whether each leaf or group has a separate state, since shapes or limits differ,
    not a row of the same arrays.
    """
    if not isinstance(rule, Rule) or not labelled(rule):
        return False
    return rule.scope.axes is not None or isinstance(rule.limit, PerGroup)


def _row_prefix(rule: BaseRule, number: int, count: int) -> str:
    """Return the beginning of the names in a leaf's separate state."""
    # The state of a single leaf along axes is not a tuple of states.
    if count == 1 and isinstance(rule, Rule) and rule.scope.axes is not None:
        return ""
    return f"{number}."


def _describe_mismatch(rule: BaseRule, saved_labels: list[str], labels: list[str]) -> str:
    """Return the error that a state belongs to other leaves or groups."""
    missing = [label for label in saved_labels if label not in labels]
    new = [label for label in labels if label not in saved_labels]
    differences = []
    if missing:
        differences.append(f"it has norms for {shown(missing)}, which don't exist here")
    if new:
        differences.append(f"it has no norms for {shown(new)}")
    if not differences:
        differences.append("its rules have other leaves")
    return (
        f"the saved state of {summarize(rule)} doesn't match these gradients: "
        f"{', and '.join(differences)}; pass the same leaves, rename the saved ones with "
        f"uniclip.saved.renamed, or {_START_OVER}"
    )


def _copy_labels(leaves: Leaves | None) -> Leaves | None:
    if leaves is None:
        return None
    return [None if labels is None else list(labels) for labels in leaves]


def _name_of_path(path: tuple[Any, ...]) -> str:
    """Return the name of an array in a state: the fields, keys and indices that lead to it."""
    return ".".join([_name_of_entry(entry) for entry in path])


def _name_of_entry(entry: Any) -> str:
    """Return the name of a field, key or index.

    Files keep the names that fields of uniclip's states once had.
    """
    if not hasattr(entry, "field"):
        return str(entry.entry)

    of_uniclip = entry.type.__module__.startswith("uniclip.")
    return SAVED_NAMES.get(entry.field, entry.field) if of_uniclip else str(entry.field)


# Whose norms a state has.


def identity(rule: BaseRule) -> str:
    """Return what a state of the rule depends on: the types of its limits, norms and scopes,
    in the order of a chain.

    Numbers that may be tuned during a run, such as a z-score or a decay, are not part of it, nor
    are functions and rules without state.
    """
    if not rule.stateful:
        return "-"
    if isinstance(rule, Chain):
        return f"chain({', '.join(map(identity, rule.rules))})"
    if isinstance(rule, Masked):
        return f"masked({identity(rule.rule)})"
    if isinstance(rule, Rule):
        return (
            f"{_describe_limit(rule.limit)} of {_describe_norm(rule.norm)} over "
            f"{_describe_scope(rule.scope)}"
        )
    return type(rule).__name__


def labelled(rule: BaseRule) -> bool:
    """Return whether a state of the rule belongs to certain leaves or groups."""
    for inner in walk_rules(rule):
        if isinstance(inner, Rule) and inner.stateful and inner.scope.label is not everything:
            return True
    return False


def leaves_of(rule: BaseRule, flat: Flat) -> Leaves:
    """Return the leaves or groups of each stateful rule, in the order of its norms.

    ``flat`` is a flattened tree.
    """
    if not rule.stateful:
        return []
    if isinstance(rule, Chain):
        return [labels for inner in rule.rules for labels in leaves_of(inner, flat)]
    if isinstance(rule, Masked):
        return leaves_of(rule.rule, Flat(rule.choose_leaves(*flat), flat.spec))
    if isinstance(rule, Rule) and labelled(rule):
        return [_labels_of_rule(rule, flat)]

    # One norm of all leaves goes on with any leaves, so they are not saved.
    return [None]


def _labels_of_rule(rule: Rule, flat: Flat) -> list[str]:
    """Return the leaves or groups of a rule in the order of its norms."""
    paths = flat.spec.paths()
    label = rule.scope.label
    if label is None:
        return [stable(expression_of("", path)) for path in paths]

    # A limit for each group has a state for all of its groups, also for those without a leaf.
    groups = list(rule.limit.groups)
    for path, leaf in zip(paths, flat.leaves, strict=True):
        groups.append(label_of(label, path, leaf, expression_of("grads", path)))
    # A state has its groups in the order of their labels, not in that of the leaves.
    return sorted({stable(repr(group)) for group in groups})


def stateful_rules(rule: BaseRule, prefix: str = "") -> Iterator[tuple[str, BaseRule]]:
    """Yield each stateful rule, in the order of `leaves_of`,
    after the beginning of the names of its numbers.
    """
    if isinstance(rule, Chain) and rule.stateful:
        for number, inner in enumerate(rule.rules):
            yield from stateful_rules(inner, f"{prefix}{number}.")
    elif isinstance(rule, Masked):
        # The state of a mask is that of its rule.
        yield from stateful_rules(rule.rule, prefix)
    elif rule.stateful:
        yield prefix, rule


def labels_of(leaves: Leaves | None) -> list[str]:
    """Return the leaves or groups of all rules in one list."""
    return [label for labels in leaves or () for label in labels or ()]


def shown(labels: list[str]) -> str:
    """Return leaves and groups as text for an error."""
    names = []
    for label in labels[:_MAX_LABELS]:
        is_path = label[:1] in {"", "["}
        names.append(f"grads{label}" if is_path else f"group {label}")

    text = ", ".join(names)
    more = len(labels) - len(names)
    if more:
        text += f" and {more} more"
    return text


def _describe_limit(limit: Limit) -> str:
    """Return the class of a limit, with the parameters that its state depends on."""
    if isinstance(limit, PerGroup):
        groups = []
        for label, inner in limit.limits:
            if inner.stateful:
                groups.append(f"{stable(repr(label))}: {_describe_limit(inner)}")
        return f"PerGroup({', '.join(sorted(groups))})"

    parameters: list[str] = []
    if is_dataclass(limit):
        for field in fields(limit):
            value = getattr(limit, field.name)
            # A window is the length of an array, and a switch changes what an array means.
            if field.name == "window":
                parameters.insert(0, f"window={int(value)}")
            elif isinstance(value, (bool, np.bool_)) and value:
                parameters.append(field.name)

    kind = type(limit).__name__
    if not parameters:
        return kind
    return f"{kind}({', '.join(parameters)})"


def _describe_norm(norm: Norm) -> str:
    name = repr(norm).rpartition(".")[2]
    if name.isidentifier():
        return name
    return f"{type(norm).__name__}({float(norm.ord):g}, {float(norm.size_power):g})"


def _describe_scope(scope: Scope) -> str:
    """Return which leaves share a norm, and along which axes."""
    if isinstance(scope.axes, Stacked):
        count = scope.axes.layers
        layers = getattr(count, "__name__", type(count).__name__) if callable(count) else count
        one_layer = _describe_scope(Scope(scope.axes.axes, scope.label))
        return f"{one_layer} in layers stacked by {layers}"

    leaves = "groups of leaves"
    if scope.label is None:
        leaves = "each leaf"
    elif scope.label is everything:
        leaves = "all leaves"

    axes = scope.axes
    if axes is None:
        return leaves
    if isinstance(axes, FanIn):
        if axes.axis is None:
            return f"the units of {leaves}"
        return f"the units of axis {int(axes.axis)} of {leaves}"
    if isinstance(axes, tuple):
        return f"axes {list(axes)} of {leaves}"
    return f"axes {getattr(axes, '__name__', type(axes).__name__)} of {leaves}"
