# SPDX-License-Identifier: MIT
"""Rules in Keras: as the plain data of a config, and with the output axis last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from uniclip._errors import set_frozen_fields
from uniclip.compose import Chain, Masked
from uniclip.rule import Rule


def output_last(rule: Any) -> Any:
    """Return the rule with the output axis last, as in Keras' weights, also on PyTorch."""
    if isinstance(rule, Chain):
        return Chain(tuple(map(output_last, rule.rules)))
    if isinstance(rule, Masked):
        return Masked(output_last(rule.rule), rule.where)
    if isinstance(rule, Rule) and callable(rule.scope.axes):
        axes = rule.scope.axes
        changed = replace(rule, scope=replace(rule.scope, axes=lambda ndim, _: axes(ndim, -1)))
        set_frozen_fields(changed, origin=rule.origin)  # as which errors show it
        return changed
    return rule


def registered(value: Any) -> Any:
    """Return Keras' config of a user's function or object.

    Raises
    ------
    TypeError
        If it is not registered with Keras.
    """
    what = value if hasattr(value, "__qualname__") else type(value)
    if keras.saving.get_registered_object(keras.saving.get_registered_name(what)) is not what:
        msg = (
            f"{what.__module__}.{what.__qualname__} is part of the rule, and cannot be saved: "
            "decorate it with @keras.saving.register_keras_serializable(), a class that has "
            "get_config and from_config, or a function that is no lambda"
        )
        raise TypeError(msg)
    return keras.saving.serialize_keras_object(value)
