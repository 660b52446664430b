# SPDX-License-Identifier: MIT
"""What the TensorFlow 1 optimizer asks before it clips: names, the first state, and what cannot be clipped."""

from __future__ import annotations

import re
from typing import Any

import optree
import tensorflow as tf

tf1 = tf.compat.v1


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped."""
    if isinstance(optimizer, tf1.mixed_precision.MixedPrecisionLossScaleOptimizer):
        msg = (
            "MixedPrecisionLossScaleOptimizer would look for overflows in gradients that are clipped: wrap the "
            "optimizer inside, MixedPrecisionLossScaleOptimizer(ClippedOptimizer(optimizer, rule), loss_scale)"
        )
        raise ValueError(msg)  # noqa: TRY004 - the type is right
    if isinstance(optimizer, tf1.train.Optimizer):
        return
    fix = "an object of one, such as tf.compat.v1.train.AdamOptimizer()"
    if any(base.__module__.split(".")[0] in {"keras", "tf_keras"} for base in type(optimizer).__mro__):
        fix = "for a Keras optimizer use uniclip.integrations.keras.ClippedOptimizer"
    msg = f"optimizer must be a tf.compat.v1.train.Optimizer, got {optimizer!r}: {fix}"
    raise TypeError(msg)


def refuse_strategy() -> None:
    """Refuse tf.distribute, where each replica has only its part of the gradients."""
    if tf.distribute.has_strategy():
        msg = (
            "ClippedOptimizer does not add up the gradients of a tf.distribute strategy's replicas: clip by hand, "
            "uc.clip of tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads), and then "
            "optimizer.apply_gradients(grads_and_vars, skip_gradients_aggregation=True) of the optimizer inside"
        )
        raise RuntimeError(msg)


def refuse_references(variables: list[Any]) -> None:
    """Refuse to leave steps out where tf.cond cannot change variables."""
    old = [v.name for v in variables if not tf.executing_eagerly() and v.dtype != v.dtype.base_dtype]
    if old and tf1.control_flow_v2_enabled():
        msg = (
            f"{', '.join(old[:5])} are no resource variables, and tf.cond of control flow version 2 cannot change "
            "those, so no step can be skipped: make them with use_resource=True, or call "
            "tf.compat.v1.disable_control_flow_v2() first"
        )
        raise ValueError(msg)


def refuse_others(rule: Any, known: dict[str, Any], params: dict[str, Any]) -> None:
    """Refuse gradients of other variables than a state is for, if the rule knows them by their order."""
    others = [name for name in {**known, **params} if known.get(name) is not params.get(name)]
    if rule.by_leaf and others:
        msg = (
            f"{rule!r} remembers each variable by itself, and {', '.join(others[:5])} had a gradient in one "
            "apply_gradients and none in another: give the same variables each time, zeros if there is no "
            "gradient, and each train op of other variables a ClippedOptimizer of its own"
        )
        raise ValueError(msg)


def outermost_graph() -> Any:
    """Return the graph that variables are made in; that of eager code is one, too."""
    with tf.init_scope():
        return tf1.get_default_graph()


def start_of(rule: Any, params: dict[str, Any], name: str) -> tuple[list[str], list[Any], Any]:
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
