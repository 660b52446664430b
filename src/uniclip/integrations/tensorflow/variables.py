# SPDX-License-Identifier: MIT
"""The variables of TensorFlow: their names, and those that hold the state of a rule."""

from __future__ import annotations

import re
from typing import Any

import optree
import tensorflow as tf

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
        paths, arrays, spec = optree.tree_flatten_with_accessor(rule.init(zeros))
        return unique([_path(name, path) for path in paths]), session.run(arrays), spec


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


def _path(name: str, path: Any) -> str:
    """Return a name, of characters that TensorFlow takes, for an array of a state."""
    parts = [str(entry.field if hasattr(entry, "field") else entry.entry) for entry in path]
    return "/".join([name, "clip", *[re.sub(r"[^\w.\-]", "_", part) for part in parts]])
