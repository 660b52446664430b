# SPDX-License-Identifier: MIT
"""Rules in Keras: their parts in a config, and the output axis of Keras' weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from uniclip._errors import set_frozen_fields
from uniclip.compose import Chain, Masked
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import Axes, Stacked


def with_output_axis_last(rule: BaseRule) -> BaseRule:
    """Return the rule for weights whose output axis is the last, as in Keras, even on PyTorch."""
    if isinstance(rule, Chain):
        return Chain(tuple(map(with_output_axis_last, rule.rules)))
    if isinstance(rule, Masked):
        return Masked(with_output_axis_last(rule.rule), rule.where)
    if not (isinstance(rule, Rule) and callable(rule.scope.axes)):
        return rule

    scope = replace(rule.scope, axes=_for_the_last(rule.scope.axes))
    changed = replace(rule, scope=scope)
    # Errors print the rule as the call that made it.
    set_frozen_fields(changed, origin=rule.origin)
    return changed


def _for_the_last(axes: Axes) -> Axes:
    """Return the axes of a scope for leaves whose output axis is the last."""
    if isinstance(axes, Stacked):
        return replace(axes, axes=_for_the_last(axes.axes))
    return (lambda ndim, _: axes(ndim, -1)) if callable(axes) else axes


def serialize_registered(part: object) -> dict[str, Any]:
    """Return Keras' config of a user's function or object that is part of a rule.

    Raises
    ------
    TypeError
        If it is not registered with Keras.
    """
    definition: Any = part if hasattr(part, "__qualname__") else type(part)
    name = keras.saving.get_registered_name(definition)
    if keras.saving.get_registered_object(name) is not definition:
        msg = (
            f"{definition.__module__}.{definition.__qualname__} is part of the rule, but can't be "
            "saved; decorate it with @keras.saving.register_keras_serializable() (use a named "
            "function instead of a lambda, and give a class get_config and from_config)"
        )
        raise TypeError(msg)
    config: dict[str, Any] = keras.saving.serialize_keras_object(part)
    return config
