# SPDX-License-Identifier: MIT
"""Checks of what can be clipped inside TensorFlow 1 optimizers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from uniclip._errors import short
from uniclip.labels import labelled

tf1 = tf.compat.v1


def refuse_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that cannot be wrapped."""
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
    msg = f"optimizer must be a tf.compat.v1.train.Optimizer, got {short(optimizer)}: {fix}"
    raise TypeError(msg)


def refuse_strategy() -> None:
    """Refuse a strategy of ``tf.distribute``, whose replicas have parts of the gradients."""
    if tf.distribute.has_strategy():
        msg = (
            f"ClippedOptimizer of TensorFlow 1 is not for {type(tf.distribute.get_strategy()).__name__}: sum the "
            "gradients of all replicas, clip the sum by uc.clip, and hand that to the optimizer inside; or use "
            "uniclip.integrations.keras"
        )
        raise ValueError(msg)


def refuse_references(variables: list[Any]) -> None:
    """Refuse to skip steps where tf.cond cannot change variables."""
    old = [v.name for v in variables if not tf.executing_eagerly() and v.dtype != v.dtype.base_dtype]
    if old and tf1.control_flow_v2_enabled():
        msg = (
            f"{', '.join(old[:5])} are no resource variables, and tf.cond of control flow version 2 cannot change "
            "those, so no step can be skipped: make them with use_resource=True, or call "
            "tf.compat.v1.disable_control_flow_v2() first"
        )
        raise ValueError(msg)


def refuse_others(rule: Any, known: dict[str, Any], params: dict[str, Any]) -> None:
    """Refuse other variables than those in the state, each of which it knows by itself or in a group."""
    others = [name for name, variable in params.items() if known.get(name) is not variable]
    if labelled(rule) and others:
        msg = (
            f"{short(rule)} remembers each variable or group by itself, and {', '.join(others[:5])} had no place in "
            "the first apply_gradients: give the same variables each time, with None if there is no gradient, and each "
            "train op of other variables a ClippedOptimizer of its own"
        )
        raise ValueError(msg)
