# SPDX-License-Identifier: MIT
"""What a state belongs to: the kind of its rule, and the leaves or groups of its norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from uniclip._errors import stable
from uniclip.combine import Chain, Masked
from uniclip.limits import PerGroup
from uniclip.norms import Norm
from uniclip.plan import label_of
from uniclip.rules import Rule
from uniclip.scopes import FanIn, Scope, everything
from uniclip.tree import Flat, place

Leaves: TypeAlias = list[list[str] | None]
"""For each rule with memory, in the order of a chain: its leaves or groups, ``None`` if all leaves share a norm.

A leaf without a gradient, or one that a mask leaves out, is listed too, since it has its own row.
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
    labels = [label_of(label, *pair, place("grads", pair[0])) for pair in zip(paths, leaves, strict=True)]
    return [sorted({stable(repr(name)) for name in [*rule.limit.groups, *labels]})]


def memories_of(rule: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each rule with memory, in the order of `leaves_of`, behind the beginning of the names of its numbers."""
    if isinstance(rule, Chain) and rule.memory:
        for number, inner in enumerate(rule.rules):
            yield from memories_of(inner, (*way, f"{number}."))
    elif isinstance(rule, Masked):
        yield from memories_of(rule.rule, way)
    elif rule.memory:
        yield "".join(way), rule


def labels_of(leaves: Leaves | None) -> list[str]:
    """Return the leaves or groups of all rules in one list."""
    return [label for part in leaves or () for label in part or ()]


def shown(labels: list[str]) -> str:
    """Return leaves and groups as text for an error."""
    names = [f"grads{label}" if label[:1] in {"", "["} else f"group {label}" for label in labels[:5]]
    return ", ".join(names) + (f" and {len(labels) - 5} more" if len(labels) > len(names) else "")


def _limit(limit: Any) -> str:
    """Return the kind of a limit, with the parameters that its state depends on."""
    if isinstance(limit, PerGroup):
        inside = [f"{stable(repr(label))}: {_limit(inner)}" for label, inner in limit.limits if inner.memory]
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
