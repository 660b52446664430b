# SPDX-License-Identifier: MIT
"""The saved form of a rule's state: its numbers, the labels of their norms, and the kind of rule.

It is a dict of four entries, the same for `uniclip.Clipper`, every integration and every framework:

==============  ===================================================================================
``"format"``    2, the version of the format
``"rule"``      the kinds of limit, norm and scope that the numbers belong to, see `identity`
``"leaves"``    for each rule with memory, the leaves or groups of its norms, see `leaves_of`
``"state"``     the arrays of the state by name, as numbers and lists, or as arrays
==============  ===================================================================================

`to_dict` and `from_dict` are for states that a training loop holds itself.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from uniclip._core.plan import label_of
from uniclip._core.tree import Flat, flatten, place
from uniclip._errors import check, stable, summarize
from uniclip._version import version
from uniclip.backends import DEFAULT, Backend, backend_of, numpy_of, to_lists
from uniclip.compose import Chain, Masked, as_rule, walk_rules
from uniclip.limits import PerGroup
from uniclip.limits.base import SAVED_NAMES
from uniclip.norms import Norm
from uniclip.rule import Rule
from uniclip.scopes import FanIn, Scope, everything

FORMAT = 2
"""The version that is written and read.

A state without a version, made by hand, is taken for one of it.
"""
_ENTRIES = ("rule", "leaves", "state")
_ANEW = "start over by loading {}"


Leaves: TypeAlias = list[list[str] | None]
"""For each rule with memory, in the order of a chain: its leaves or groups,
``None`` if all leaves share a norm.

A leaf without a gradient, or one that a mask leaves out, is listed too, since it has its own row.
"""


class Saved(NamedTuple):
    """A saved state of the right kind of rule, copied into arrays."""

    leaves: Leaves | None
    """``None`` if unknown, or not to be checked."""
    values: dict[str, Any]


class Memory(NamedTuple):
    """What one rule remembers, as NumPy arrays by the names of its numbers."""

    rows: dict[str, dict[str, Any]]
    """For each leaf or group."""
    in_common: dict[str, Any]
    """For all of them."""


def array_of(value: Any) -> Any:
    """Return values as a new array."""
    backend = backend_of(value)
    if backend is None:
        return np.array(to_lists(value))
    array = backend.detach(value)
    return array.clone() if hasattr(array, "clone") else copy.copy(array)


def array_like(backend: Backend, name: str, value: Any, like: Any) -> Any:
    """Return values as an array like another one."""
    # Empty lists have neither shape nor dtype.
    if 0 == math.prod(value.shape) == math.prod(like.shape):
        return like
    if tuple(value.shape) != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {tuple(value.shape)}, but here it is "
            f"{tuple(like.shape)}: load the state of the same rule on gradients of the same shapes"
        )
        raise ValueError(msg)
    value = value if backend_of(value) is backend else np.asarray(to_lists(value))
    with backend.computation_context(like):
        return backend.to_device_of(like, backend.xp.asarray(value, dtype=like.dtype))


def to_dict(rule: Any, state: Any, grads: Any) -> dict[str, Any]:
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
        In the format of `uniclip.Clipper.state_dict`; empty for a rule without memory.

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
    return (
        to_saved(rule, Saved(leaves_of(rule, flatten(grads)), values_of(state)))
        if rule.stateful
        else {}
    )


def from_dict(rule: Any, saved: Mapping[str, Any], grads: Any) -> Any:
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
    new = rule.init(grads)
    leaves = leaves_of(rule, flatten(grads))
    return restore_state(from_saved(saved, rule), rule, leaves, new) if saved else new


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
    if saved.get("leaves") is None:
        return dict(saved)
    known = labels_of(saved["leaves"])
    strange = [] if callable(names) else [name for name in names if name not in known]
    if strange:
        msg = f"the saved state is not of {shown(strange)}: it is of {shown(known)}"
        raise ValueError(msg)

    of: Any = names if callable(names) else lambda label: names.get(label, label)
    leaves = [None if part is None else list(map(of, part)) for part in saved["leaves"]]
    twice = [label for part in leaves for label, n in Counter(part or ()).items() if n > 1]
    if twice:
        msg = f"two leaves of the saved state would become {shown(twice[:1])}"
        raise ValueError(msg)
    return {**saved, "leaves": leaves}


def names_of(state: Any) -> list[str]:
    """Return a name for each array of a state: the fields, keys and indices that lead to it."""
    return [_name_of_path(path) for path in optree.tree_accessors(state)]


def to_saved(rule: Any, saved: Saved, convert: Callable[[Any], Any] = to_lists) -> dict[str, Any]:
    """Return a state in its saved form; ``convert`` converts each array for the file."""
    values = {name: convert(array) for name, array in saved.values.items()}
    return {
        "format": FORMAT,
        "rule": identity(rule),
        "leaves": _copy_labels(saved.leaves),
        "state": values,
    }


def from_saved(saved: Any, rule: Any) -> Saved:
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
    if (
        not isinstance(saved, dict)
        or not set(_ENTRIES) <= set(saved)
        or not isinstance(saved["state"], dict)
    ):
        msg = (
            f"the saved state, {summarize(saved)}, does not say whose norms it holds: {_ANEW}; or, if "
            "it surely is of this rule and these leaves, load {'rule': None, 'leaves': None, "
            "'state': {name: array}}"
        )
        raise ValueError(msg)
    ours, theirs = identity(rule), saved["rule"]
    if theirs not in (ours, None):
        msg = (
            f"the saved state is that of another rule than {summarize(rule)}: it is of {theirs}, this "
            f"one of {ours}; give the same rule, or {_ANEW}"
        )
        raise ValueError(msg)
    return Saved(
        _copy_labels(saved["leaves"]),
        {name: array_of(value) for name, value in saved["state"].items()},
    )


def restore_state(saved: Saved, rule: Any, leaves: Leaves | None, like: Any) -> Any:
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
    if [part and set(part) for part in saved.leaves] != [part and set(part) for part in leaves]:
        raise ValueError(_describe_mismatch(rule, labels_of(saved.leaves), labels_of(leaves)))
    return by_name(saved, rule, leaves, like)[0]


def by_name(saved: Saved, rule: Any, leaves: Leaves, like: Any) -> tuple[Any, Saved, list[str]]:
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
    theirs, ours = _memories(rule, saved), _memories(rule, Saved(leaves, values_of(like)))
    joined, left, new = [], [], []
    for old, new_memory in zip(theirs, ours, strict=True):
        # A single row does not tell that it is of all.
        common = {*old.in_common, *new_memory.in_common}
        once = {
            name: value[None]
            for row in old.rows.values()
            for name, value in row.items()
            if name in common
        }
        rows = {label: old.rows.get(label, row) for label, row in new_memory.rows.items()}
        for label in [label for label in rows if label in old.rows]:
            missing = {*new_memory.rows[label], *new_memory.in_common} ^ {
                *old.rows[label],
                *old.in_common,
            }
            if missing:
                msg = (
                    f"the saved state of {summarize(rule)} and one here differ in {sorted(missing)}: "
                    f"{_ANEW}"
                )
                raise ValueError(msg)
        joined.append(Memory(rows, {**new_memory.in_common, **once, **old.in_common}))
        left.append(
            Memory(
                {label: row for label, row in old.rows.items() if label and label not in rows}, {}
            )
        )
        new += [label for label in rows if label not in old.rows]
    return (
        _fill_state(rule, _save_memories(rule, joined).values, like),
        _save_memories(rule, left),
        new,
    )


def merge_states(rule: Any, first: Saved, other: Saved) -> Saved:
    """Return two saved states of a rule, of different leaves or groups, as one.

    What all share is that of the first.
    """
    pairs = zip(_memories(rule, first), _memories(rule, other), strict=True)
    return _save_memories(
        rule,
        [Memory({**a.rows, **b.rows, **a.rows}, {**b.in_common, **a.in_common}) for a, b in pairs],
    )


def values_of(state: Any) -> dict[str, Any]:
    """Return the numbers of a state by name."""
    return dict(zip(names_of(state), optree.tree_leaves(state), strict=True))


def _check_format(saved: Any) -> None:
    """Refuse a state in an unknown format."""
    name = saved.get("format", FORMAT) if isinstance(saved, dict) else FORMAT
    if isinstance(name, bool) or name != FORMAT:
        msg = (
            f"the saved state has the format {summarize(name)}, and uniclip {version()} knows the "
            f"format {FORMAT}: load it with the uniclip that saved it, or a later one, or {_ANEW}"
        )
        raise ValueError(msg)


def _fill_state(rule: Any, numbers: dict[str, Any], like: Any) -> Any:
    """Return the numbers of a saved state in arrays like those of a state."""
    accessors, arrays, spec = optree.tree_flatten_with_accessor(like)
    names = [_name_of_path(path) for path in accessors]
    if set(names) != set(numbers):
        msg = (
            f"the saved state has {sorted(numbers)}, and one of {summarize(rule)} here has "
            f"{sorted(names)}: {_ANEW}"
        )
        raise ValueError(msg)
    backend = next(filter(None, map(backend_of, arrays)), DEFAULT)  # a Python bool has no backend
    new = [
        array_like(backend, name, numbers[name], array)
        for name, array in zip(names, arrays, strict=True)
    ]
    return optree.tree_unflatten(spec, new)


def _memories(rule: Any, saved: Saved) -> list[Memory]:
    """Return what each rule with memory remembers, row by row."""
    parts = zip(memories_of(rule), saved.leaves or (), strict=True)
    return [
        _memory(rule_part, way, labels or [], saved.values) for (way, rule_part), labels in parts
    ]


def _memory(rule: Any, way: str, labels: list[str], values: dict[str, Any]) -> Memory:
    numbers = {
        name[len(way) :]: numpy_of(value) for name, value in values.items() if name.startswith(way)
    }
    if _has_separate_states(rule):
        fronts = [_front(rule, number, len(labels)) for number in range(len(labels))]
        rows = [
            {name[len(f) :]: array for name, array in numbers.items() if name.startswith(f)}
            for f in fronts
        ]
        return Memory(dict(zip(labels, rows, strict=True)), {})
    in_common = {
        name: array
        for name, array in numbers.items()
        if not labels or array.shape[:1] != (len(labels),)
    }
    of_rows = [name for name in numbers if name not in in_common]
    return Memory(
        {label: {name: numbers[name][n] for name in of_rows} for n, label in enumerate(labels)},
        in_common,
    )


def _save_memories(rule: Any, memories: list[Memory]) -> Saved:
    """Return what rules remember as a saved state."""
    leaves: Leaves = []
    values: dict[str, Any] = {}
    for (way, rule_part), (rows, in_common) in zip(memories_of(rule), memories, strict=True):
        leaves.append(list(rows) if labelled(rule_part) else None)
        if _has_separate_states(rule_part):
            for number, row in enumerate(rows.values()):
                front = way + _front(rule_part, number, len(rows))
                values |= {front + name: array for name, array in row.items()}
            continue
        names = dict.fromkeys(
            [name for row in rows.values() for name in row if name not in in_common]
        )
        values |= {way + name: np.stack([row[name] for row in rows.values()]) for name in names}
        values |= {way + name: array for name, array in in_common.items()}
    return Saved(leaves, values)


def _has_separate_states(rule: Any) -> bool:
    """Whether each leaf or group has a state of its own, as shapes or limits differ,
    not a row of the same arrays.
    """
    return labelled(rule) and (rule.scope.axes is not None or isinstance(rule.limit, PerGroup))


def _front(rule: Any, number: int, count: int) -> str:
    """Return the beginning of the names of a leaf's own state.

    A single leaf's along axes is no tuple of states.
    """
    return "" if rule.scope.axes is not None and count == 1 else f"{number}."


def _describe_mismatch(rule: Any, theirs: list[str], ours: list[str]) -> str:
    """Return the error that a state belongs to other leaves or groups."""
    missing, extra = (
        [label for label in a if label not in b] for a, b in ((theirs, ours), (ours, theirs))
    )
    what = [f"norms of {shown(missing)}, which are not here"] if missing else []
    what += [f"none of {shown(extra)}"] if extra else []
    return (
        f"the saved state of {summarize(rule)} is that of other leaves: it holds "
        f"{', and '.join(what) or 'their norms in another order'}; give the same leaves, or "
        f"{_ANEW} (if only their names have changed, give it the new ones by "
        "uniclip.saved.renamed)"
    )


def _copy_labels(leaves: Any) -> Any:
    return None if leaves is None else [None if part is None else list(part) for part in leaves]


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


# Whose norms a state holds.


def identity(rule: Any) -> str:
    """Return what a state of the rule depends on: the kinds of its limits, norms and scopes,
    in the order of a chain.

    Numbers that may be tuned during a run, such as a z-score or a decay, are not part of it, nor
    are functions and rules without memory.
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


def labelled(rule: Any) -> bool:
    """Whether a state of the rule belongs to certain leaves or groups."""
    return any(
        [
            isinstance(one, Rule) and one.stateful and one.scope.label is not everything
            for one in walk_rules(rule)
        ]
    )


def leaves_of(rule: Any, flat: Flat) -> Leaves:
    """Return the leaves or groups of each rule with memory, in the order of its norms.

    ``flat`` is a flattened tree.
    """
    if not rule.stateful:
        return []
    if isinstance(rule, Chain):
        return [part for inner in rule.rules for part in leaves_of(inner, flat)]
    if isinstance(rule, Masked):
        return leaves_of(rule.rule, Flat(rule.choose_leaves(*flat), flat.spec))
    if not labelled(rule):
        return [None]
    leaves, spec = flat
    paths = spec.paths()
    if rule.scope.label is None:
        return [[stable(place("", path)) for path in paths]]
    label = rule.scope.label
    labels = [
        label_of(label, *pair, place("grads", pair[0])) for pair in zip(paths, leaves, strict=True)
    ]
    return [sorted({stable(repr(name)) for name in [*rule.limit.groups, *labels]})]


def memories_of(rule: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each rule with memory, in the order of `leaves_of`,
    behind the beginning of the names of its numbers.
    """
    if isinstance(rule, Chain) and rule.stateful:
        for number, inner in enumerate(rule.rules):
            yield from memories_of(inner, (*way, f"{number}."))
    elif isinstance(rule, Masked):
        yield from memories_of(rule.rule, way)
    elif rule.stateful:
        yield "".join(way), rule


def labels_of(leaves: Leaves | None) -> list[str]:
    """Return the leaves or groups of all rules in one list."""
    return [label for part in leaves or () for label in part or ()]


def shown(labels: list[str]) -> str:
    """Return leaves and groups as text for an error."""
    names = [
        f"grads{label}" if label[:1] in {"", "["} else f"group {label}" for label in labels[:5]
    ]
    return ", ".join(names) + (f" and {len(labels) - 5} more" if len(labels) > len(names) else "")


def _describe_limit(limit: Any) -> str:
    """Return the kind of a limit, with the parameters that its state depends on."""
    if isinstance(limit, PerGroup):
        inside = [
            f"{stable(repr(label))}: {_describe_limit(inner)}"
            for label, inner in limit.limits
            if inner.stateful
        ]
        return f"PerGroup({', '.join(sorted(inside))})"
    values = {f.name: getattr(limit, f.name) for f in fields(limit)} if is_dataclass(limit) else {}
    shown = [f"window={int(values['window'])}"] if "window" in values else []
    shown += [
        name for name, value in values.items() if isinstance(value, (bool, np.bool_)) and value
    ]
    return type(limit).__name__ + (f"({', '.join(shown)})" if shown else "")


def _describe_norm(norm: Norm) -> str:
    name = repr(norm).rpartition(".")[2]
    return (
        name
        if name.isidentifier()
        else f"{type(norm).__name__}({float(norm.ord):g}, {float(norm.size_power):g})"
    )


def _describe_scope(scope: Scope) -> str:
    """Return which leaves share a norm, and along which axes."""
    joined = (
        "each leaf"
        if scope.label is None
        else "all leaves"
        if scope.label is everything
        else "groups of leaves"
    )
    axes = scope.axes
    if axes is None:
        return joined
    if isinstance(axes, FanIn):
        return (
            f"the units of {joined}"
            if axes.axis is None
            else f"the units of axis {int(axes.axis)} of {joined}"
        )
    along = (
        str(list(axes))
        if isinstance(axes, tuple)
        else getattr(axes, "__name__", type(axes).__name__)
    )
    return f"axes {along} of {joined}"
