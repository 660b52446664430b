# SPDX-License-Identifier: MIT
"""Rules as Keras needs them: as the plain data of a config, and with the output axis last."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import keras
import numpy as np

from uniclip import arraywise, combine, curves, norms, rules, scopes
from uniclip.backends import backend_of
from uniclip.combine import Chain, Masked
from uniclip.limits import averages, fixed, percentiles, zscores
from uniclip.rules import Rule

_PUBLIC = {
    name: value
    for module in (arraywise, averages, combine, curves, fixed, norms, percentiles, rules, scopes, zscores)
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_") and callable(value)
}
"""The classes and functions that a rule can be made of, by name: a config names them, and no code of it is run."""


def rule_to_config(value: Any) -> Any:
    """Return a rule, or a part of one, as plain data that JSON can hold.

    Raises
    ------
    TypeError
        If a function or an object is neither uniclip's nor registered with Keras.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"number": str(value)}
    return _array_to_config(value) if hasattr(value, "dtype") else _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    """Return the config of what is no number."""
    if isinstance(value, tuple):
        return {"tuple": list(map(rule_to_config, value))}
    kind = type(value)
    if is_dataclass(value) and _PUBLIC.get(kind.__name__) is kind:
        return {
            "class": kind.__name__,
            "fields": {f.name: rule_to_config(getattr(value, f.name)) for f in fields(value)},
        }
    name = getattr(value, "__name__", "")
    return {"name": name} if _PUBLIC.get(name) is value else _registered(value)


def rule_from_config(config: Any, custom_objects: Any = None) -> Any:
    """Return what `rule_to_config` was given."""

    def again(part: Any) -> Any:
        return rule_from_config(part, custom_objects)

    result = config
    match config:
        case {"number": text}:
            result = float(text)
        case {"tuple": items}:
            result = tuple(map(again, items))
        case {"array": items, "dtype": dtype}:
            result = np.asarray(again(items), dtype=dtype)
        case [*items]:
            result = list(map(again, items))
        case {"class": name, "fields": parts}:
            result = _named(name)(**{field: again(part) for field, part in parts.items()})
        case {"name": name}:
            result = _named(name)
        case {"keras": inner}:
            result = keras.saving.deserialize_keras_object(inner, custom_objects=custom_objects)
    return result


def _named(name: str) -> Any:
    """Return what a config names."""
    if name not in _PUBLIC:
        msg = f"this uniclip has no {name!r}, which the saved rule is made of: load it with the uniclip that saved it"
        raise ValueError(msg)
    return _PUBLIC[name]


def output_last(rule: Any) -> Any:
    """Return the rule for weights whose output axis is the last one, as those of Keras are, on PyTorch too."""
    if isinstance(rule, Chain):
        return Chain(tuple(map(output_last, rule.rules)))
    if isinstance(rule, Masked):
        return Masked(output_last(rule.rule), rule.where)
    if isinstance(rule, Rule) and callable(rule.scope.axes):
        return replace(rule, scope=replace(rule.scope, axes=_OutputLast(rule.scope.axes)))
    return rule


@dataclass(frozen=True)
class _OutputLast:
    """The axes that one norm covers, where the output axis is the last one."""

    axes: Any

    def __call__(self, ndim: int, output_axis: int) -> Any:  # noqa: ARG002 - the signature of axes
        """Return the axes for a leaf."""
        return self.axes(ndim, -1)


def _array_to_config(array: Any) -> Any:
    """Return an array as lists, one without dimensions as a number."""
    backend = backend_of(array)
    if backend is not None:  # flat: a 0-d bfloat16 of TensorFlow cannot be converted
        array = np.reshape(keras.ops.convert_to_numpy(keras.ops.reshape(array, (-1,))), tuple(array.shape))
    if not array.ndim:
        return rule_to_config(array.item())
    return {"array": _lists(array.tolist()), "dtype": str(array.dtype)}


def _lists(values: Any) -> Any:
    return list(map(_lists, values)) if isinstance(values, list) else rule_to_config(values)


def _registered(value: Any) -> Any:
    """Return what Keras makes of a user's function or object."""
    what = value if hasattr(value, "__qualname__") else type(value)
    if keras.saving.get_registered_object(keras.saving.get_registered_name(what)) is not what:
        msg = (
            f"{what.__module__}.{what.__qualname__} is part of the rule, and cannot be saved: decorate it with "
            "@keras.saving.register_keras_serializable(), a class that has get_config and from_config, or a function "
            "that is no lambda"
        )
        raise TypeError(msg)
    return {"keras": keras.saving.serialize_keras_object(value)}
