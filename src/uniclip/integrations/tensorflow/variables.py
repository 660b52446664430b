# SPDX-License-Identifier: MIT
"""The variables of TensorFlow: their names, and those that hold the state of a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import tensorflow as tf

from uniclip.labels import Leaves, leaves_of, parts_of
from uniclip.tree import flatten

tf1 = tf.compat.v1


def outermost_graph() -> Any:
    """Return the graph in which variables are created; ``None`` in eager code, where each thread would have another."""
    with tf.init_scope():
        return None if tf.executing_eagerly() else tf1.get_default_graph()


class Rows(NamedTuple):
    """How variables hold the arrays of a state: an array with labeled rows is held in one variable for each row."""

    spec: Any
    counts: list[int]
    """The number of variables of each array; 0 if one holds all of it."""

    def stacked(self, values: list[Any], stack: Any = tf.stack) -> Any:
        """Return the state from its parts."""
        parts = iter(values)
        arrays = [stack([next(parts) for _ in range(n)]) if n else next(parts) for n in self.counts]
        return optree.tree_unflatten(self.spec, arrays)

    def parts(self, state: Any, unstack: Any = tf.unstack) -> list[Any]:
        """Return the parts of a state."""
        pairs = zip(self.counts, optree.tree_leaves(state), strict=True)
        return [part for n, array in pairs for part in (unstack(array, n) if n else [array])]


def values_of(variables: list[Any], session: Any) -> list[Any]:
    """Return the values of variables as NumPy arrays; in a graph those of a session."""
    if session is None:
        return [variable.numpy() for variable in variables]
    values: list[Any] = session.run(variables)
    return values


def set_values(variables: list[Any], values: list[Any], session: Any) -> None:
    """Set variables; in a graph those of a session, without new operations, as a graph may be finalized."""
    for variable, value in zip(variables, values, strict=True):
        if session is None:
            variable.assign(value)
        else:
            session.run(variable.initializer, {variable.initializer.inputs[1]: value})


def session_of(session: Any) -> Any:
    """Return a session, or the one that was entered; ``None`` in eager code."""
    session = tf1.get_default_session() if session is None else session
    if session is None and not tf.executing_eagerly():
        msg = "the values are in a session: pass it, session=..., or enter it, `with session.as_default():`"
        raise ValueError(msg)
    return session


def first_state(rule: Any, params: dict[str, Any], name: str) -> tuple[list[str], list[Any], Rows]:
    """Return names and values for the parts of a state before the first step, and their layout."""
    # In a separate graph, so that the initialization stays out of the user's.
    with tf.Graph().as_default(), tf1.Session() as session:
        zeros = {key: tf.zeros(v.shape, v.dtype.base_dtype) for key, v in params.items()}
        state = rule.init(zeros)
        places = list(_places(rule, leaves_of(rule, flatten(zeros)), state))
        rows = Rows(optree.tree_structure(state), [len(labels) for _, labels in places])
        ways = [[*place, *([label] if label else [])] for place, labels in places for label in labels or [""]]
        names = ["/".join([name, "clip", *[re.sub(r"[^\w.\-/]", "_", part) for part in way]]) for way in ways]
        return unique(names), session.run(rows.parts(state)), rows


def names_of(variables: list[Any]) -> list[str]:
    """Return a name for each variable; eager ones may share a name, and get numbers as in a graph."""
    if len({id(variable) for variable in variables}) < len(variables):
        names = [variable.name for variable in variables]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"{twice} occurs twice in grads_and_vars: give the sum of its gradients once"
        raise ValueError(msg)
    return unique([variable.name.split(":")[0] for variable in variables])


def unique(names: list[str]) -> list[str]:
    """Return the names, with numbers added to those that occur before."""
    used: dict[str, None] = {}
    for name in names:
        new, number = name, 0
        while new in used:
            number += 1
            new = f"{name}_{number}"
        used[new] = None
    return list(used)


def _places(rule: Any, leaves: Leaves, state: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the path to each array of a state, and the labels of its rows, by which a saver finds them."""
    for (way, inside), part in zip(parts_of(rule, state), leaves, strict=True):
        labels = [label.strip("[]'\"") for label in part or ()]
        for path in optree.tree_accessors(inside):
            rows = tuple(path(inside).shape)[:1] == (len(labels),) and len(labels) > 0
            yield [*way, *map(_part, path)], labels if rows else []


def _part(entry: Any) -> str:
    return str(entry.field if hasattr(entry, "field") else entry.entry)
