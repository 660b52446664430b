# SPDX-License-Identifier: MIT
"""The variables of TensorFlow: their names, and those that hold the state of a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import optree
import tensorflow as tf

from uniclip.combine import Chain, Masked
from uniclip.saved import leaves_of
from uniclip.tree import flatten

tf1 = tf.compat.v1


def outermost_graph() -> Any:
    """Return the graph that variables are made in; that of eager code is one, too."""
    with tf.init_scope():
        return tf1.get_default_graph()


def first_state(rule: Any, params: dict[str, Any], name: str) -> tuple[list[str], list[Any], Any]:
    """Return names and values for the arrays of a state before the first step, and its structure."""
    # In a graph of its own: initializing variables must not take part in the user's.
    with tf.Graph().as_default(), tf1.Session() as session:
        zeros = {key: tf.zeros(v.shape, v.dtype.base_dtype) for key, v in params.items()}
        state = rule.init(zeros)
        arrays, spec = optree.tree_flatten(state)
        places = _places(rule, iter(leaves_of(rule, flatten(zeros))), state)
        names = ["/".join([name, "clip", *[re.sub(r"[^\w.\-/]", "_", part) for part in place]]) for place in places]
        return unique(names), session.run(arrays), spec


def names_of(variables: list[Any]) -> list[str]:
    """Return a name for each variable; eager ones may share theirs, and get numbers as in a graph."""
    if len({id(variable) for variable in variables}) < len(variables):
        names = [variable.name for variable in variables]
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"{twice} occurs twice in grads_and_vars: give the sum of its gradients once"
        raise ValueError(msg)
    return unique([variable.name.split(":")[0] for variable in variables])


def unique(names: list[str]) -> list[str]:
    """Return the names, numbers added to those that were there before."""
    used: dict[str, None] = {}
    for name in names:
        new, number = name, 0
        while new in used:
            number += 1
            new = f"{name}_{number}"
        used[new] = None
    return list(used)


def _places(rule: Any, leaves: Iterator[Any], state: Any) -> Iterator[list[str]]:
    """Yield the way to each array of a state: a saver finds by its name whose norms it holds."""
    if isinstance(rule, Chain) and rule.memory:
        for number, (one, inside) in enumerate(zip(rule.rules, state, strict=True)):
            yield from ([str(number), *place] for place in _places(one, leaves, inside))
    elif isinstance(rule, Masked):
        yield from _places(rule.rule, leaves, state)
    elif rule.memory:
        labels = next(leaves) or []
        for path in optree.tree_accessors(state):
            yield list(_parts(path, state, [label.strip("[]'\"") for label in labels]))


def _parts(path: Any, node: Any, labels: list[str]) -> Iterator[str]:
    """Yield the parts of a way to an array, the label of a norm instead of its number."""
    for entry in path:
        known = isinstance(node, list) and len(node) == len(labels)
        yield labels[entry.entry] if known else str(entry.field if hasattr(entry, "field") else entry.entry)
        node = entry(node)
