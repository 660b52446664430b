# SPDX-License-Identifier: MIT
"""Rules in Keras: as the plain data of a config, and with the output axis last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras

from uniclip.combine import Chain, Masked
from uniclip.config import from_config, to_config
from uniclip.rules import Rule


def rule_to_config(rule: Any) -> Any:
    """Return a rule as plain data, as `uniclip.config.to_config` does, with a user's functions by their names in Keras.

    Raises
    ------
    TypeError
        If a function or an object is neither uniclip's nor registered with Keras.
    """
    return to_config(rule, other=_registered)


def rule_from_config(config: Any, custom_objects: Any = None) -> Any:
    """Return the rule that `rule_to_config` was given."""
    return from_config(config, other=partial(keras.saving.deserialize_keras_object, custom_objects=custom_objects))


def output_last(rule: Any) -> Any:
    """Return the rule with the output axis last, as in Keras' weights, also on PyTorch."""
    if isinstance(rule, Chain):
        return Chain(tuple(map(output_last, rule.rules)))
    if isinstance(rule, Masked):
        return Masked(output_last(rule.rule), rule.where)
    if isinstance(rule, Rule) and callable(rule.scope.axes):
        return replace(rule, scope=replace(rule.scope, axes=_OutputLast(rule.scope.axes)))
    return rule


@dataclass(frozen=True)
class _OutputLast:
    """The axes that one norm covers, with the output axis last."""

    axes: Any

    def __call__(self, ndim: int, output_axis: int) -> Any:
        """Return the axes for a leaf."""
        return self.axes(ndim, -1)


def _registered(value: Any) -> Any:
    """Return Keras' config of a user's function or object."""
    what = value if hasattr(value, "__qualname__") else type(value)
    if keras.saving.get_registered_object(keras.saving.get_registered_name(what)) is not what:
        msg = (
            f"{what.__module__}.{what.__qualname__} is part of the rule, and cannot be saved: decorate it with "
            "@keras.saving.register_keras_serializable(), a class that has get_config and from_config, or a function "
            "that is no lambda"
        )
        raise TypeError(msg)
    return keras.saving.serialize_keras_object(value)
