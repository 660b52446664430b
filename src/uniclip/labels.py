# SPDX-License-Identifier: MIT
"""What a state belongs to: the kind of its rule, and the leaves or groups of its norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from uniclip._repr import short, stable
from uniclip.combine import Chain, Masked
from uniclip.limits import PerGroup
from uniclip.norms import Norm
from uniclip.plan import label_of, named_by
from uniclip.rules import Rule
from uniclip.scopes import FanIn, Path, Scope, everything
from uniclip.tree import place

Flat: TypeAlias = tuple[list[Any], Any]
"""The leaves of a tree, ``None`` for absent ones, and its structure."""
Leaves: TypeAlias = list[list[str | None] | None]
"""For each rule with memory, in the order of a chain: its leaves or groups, ``None`` if all leaves share a norm.

A leaf that never had a gradient, or one that a mask leaves out, is listed as ``None``, since it has its own row.
"""


def identity(rule: Any) -> str:
    """Return what a state of the rule depends on: the kinds of its limits, norms and scopes, in the order of a chain.

    Numbers that may be tuned during a run, such as a z-score or a decay, are not part of it, nor are functions and
    rules without memory.
    """
    if not rule.memory:
        return "-"
    if isinstance(rule, Chain):
        return f"chain({', '.join(map(identity, rule.rules))})"
    if isinstance(rule, Masked):
        return f"masked({identity(rule.rule)})"
    if isinstance(rule, Rule):
        return f"{_limit(rule.limit)} of {_norm(rule.norm)} over {_scope(rule.scope)}"
    return type(rule).__name__


def labelled(rule: Any) -> bool:
    """Whether a state of the rule belongs to certain leaves or groups."""
    if isinstance(rule, Chain):
        return any(map(labelled, rule.rules))
    if isinstance(rule, Masked):
        return labelled(rule.rule)
    return isinstance(rule, Rule) and rule.memory and rule.scope.label is not everything


def leaves_of(rule: Any, flat: Flat) -> Leaves:
    """Return the leaves or groups of each rule with memory, in the order of its norms; ``flat`` is a flattened tree."""
    if not rule.memory:
        return []
    if isinstance(rule, Chain):
        return [part for one in rule.rules for part in leaves_of(one, flat)]
    if isinstance(rule, Masked):
        return leaves_of(rule.rule, (rule.chosen(*flat), flat[1]))
    if not labelled(rule):
        return [None]
    leaves, spec = flat
    both = zip(spec.paths(), leaves, strict=True)
    if rule.scope.label is None:
        return [[None if leaf is None else _name(path) for path, leaf in both]]
    groups: dict[str, bool] = {stable(repr(label)): False for label in named_by(rule)}
    for path, leaf in both:
        label = stable(repr(label_of(rule.scope.label, path, leaf, place("grads", path))))
        groups[label] = groups.get(label, False) or leaf is not None
    return [[label if there else None for label, there in sorted(groups.items())]]


def parts_of(rule: Any, state: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the state of each rule with memory, in the order of `leaves_of`, and the indices that lead to it."""
    if isinstance(rule, Chain) and rule.memory:
        for number, (one, inside) in enumerate(zip(rule.rules, state, strict=True)):
            yield from parts_of(one, inside, (*way, str(number)))
    elif isinstance(rule, Masked):
        yield from parts_of(rule.rule, state, way)
    elif rule.memory:
        yield way, state


def labels_of(leaves: Leaves | None) -> list[str]:
    """Return the leaves or groups of all rules in one list."""
    return [label for part in leaves or () for label in part or () if label is not None]


def agree(known: Leaves, here: Leaves, flat: Flat | None = None) -> bool:
    """Whether the leaves or groups are in the same places, as far as they are named.

    A leaf or group without a gradient has no name here; a leaf that had a name needs a place in the tree.
    """
    if [part and len(part) for part in known] != [part and len(part) for part in here]:
        return False
    pairs = [pair for a, b in zip(known, here, strict=True) for pair in zip(a or (), b or (), strict=True)]
    absent = {a for a, b in pairs if a is not None and b is None and _is_leaf(a)}
    paths = [] if flat is None or not absent else flat[1].paths()
    return absent.issubset(map(_name, paths)) and all(a == b for a, b in pairs if None not in {a, b})


def joined(rule: Any, known: Leaves, here: Leaves, flat: Flat) -> Leaves:
    """Return the names of all leaves that had a gradient in a step; refuse a tree of other leaves or groups."""
    if agree(known, here, flat):
        parts = zip(known, here, strict=True)
        return [a and [one or other for one, other in zip(a, b or (), strict=True)] for a, b in parts]
    others = sorted(set(labels_of(known)) ^ set(labels_of(here)))
    change = f"{shown(others)} had a place at one step and none at another" if others else "their order has changed"
    msg = (
        f"{short(rule)} remembers each leaf or group by itself, and {change}: give the same tree, in the same order, "
        "at every step, with None in the place of a gradient that is absent"
    )
    raise ValueError(msg)


def shown(labels: list[str]) -> str:
    """Return leaves and groups as text for an error."""
    names = [f"grads{label}" if _is_leaf(label) else f"group {label}" for label in labels[:5]]
    return ", ".join(names) + (f" and {len(labels) - 5} more" if len(labels) > len(names) else "")


def _name(path: Path) -> str:
    return stable(place("", path))


def _is_leaf(label: str) -> bool:
    return label[:1] in {"", "["}


def _limit(limit: Any) -> str:
    """Return the kind of a limit, with the parameters that its state depends on."""
    if isinstance(limit, PerGroup):
        inside = [f"{stable(repr(label))}: {_limit(one)}" for label, one in limit.limits if one.memory]
        return f"PerGroup({', '.join(sorted(inside))})"
    values = {f.name: getattr(limit, f.name) for f in fields(limit)} if is_dataclass(limit) else {}
    shown = [f"window={int(values['window'])}"] if "window" in values else []
    shown += [name for name, value in values.items() if isinstance(value, (bool, np.bool_)) and value]
    return type(limit).__name__ + (f"({', '.join(shown)})" if shown else "")


def _norm(norm: Norm) -> str:
    name = repr(norm).rpartition(".")[2]
    return name if name.isidentifier() else f"{type(norm).__name__}({float(norm.ord):g}, {float(norm.size_power):g})"


def _scope(scope: Scope) -> str:
    """Return which leaves share a norm, and along which axes."""
    joined = "each leaf" if scope.label is None else "all leaves" if scope.label is everything else "groups of leaves"
    axes = scope.axes
    if axes is None:
        return joined
    if isinstance(axes, FanIn):
        return f"the units of {joined}" if axes.axis is None else f"the units of axis {int(axes.axis)} of {joined}"
    along = str(list(axes)) if isinstance(axes, tuple) else getattr(axes, "__name__", type(axes).__name__)
    return f"axes {along} of {joined}"
