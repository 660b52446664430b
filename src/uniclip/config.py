# SPDX-License-Identifier: MIT
"""A rule as plain data for JSON, read without running any code that it names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from types import FunctionType
from typing import Any

import numpy as np

from uniclip import curves, limits, norms, scopes
from uniclip._errors import Origin, public, set_frozen_fields, source, stable, summarize
from uniclip.backends import backend_of, to_lists
from uniclip.compose import ByValue, Chain, Function, Masked
from uniclip.presets import adaptive, examples, fixed, relative
from uniclip.rule import Rule

_CHOICES = [
    getattr(module, name) for module in (curves, limits, norms, scopes) for name in module.__all__
]
_BEHIND = [
    ByValue,
    Chain,
    Function,
    Masked,
    Rule,
    scopes.FanIn,
    scopes.all_but_first,
    scopes.everything,
]
"""Classes and functions behind presets that have no public name."""
_NAMED: dict[str, Any] = {
    f"uniclip{public(value.__module__, value.__qualname__).removeprefix('uc')}": value
    for value in [*_CHOICES, *_BEHIND]
    if isinstance(value, (type, FunctionType))
}
"""The classes and functions that a rule can be made of: configs hold their names,
and only these are looked up.
"""
_PRESETS: dict[str, Any] = {
    f"uniclip.{name}": getattr(module, name)
    for module in (adaptive, examples, fixed, relative)
    for name in module.__all__
}
"""The presets: a config also holds the call of the one that made a rule,
as which the rule prints.
"""


def to_config(
    rule: Any, own: Mapping[str, Any] | None = None, *, other: Callable[[Any], Any] | None = None
) -> Any:
    """Return a rule, or a part of one, as plain data that JSON can hold.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or a part of one
    own : dict, optional
        Your own functions, dataclasses and objects in the rule, by the names to save them under.
    other : callable, optional
        Returns plain data for objects without a name.

    Raises
    ------
    TypeError
        If a function or an object in the rule is neither uniclip's nor in ``own``.

    Examples
    --------
    >>> from uniclip.config import from_config, to_config
    >>> to_config(uc.norms.RMS)
    {'class': 'uniclip.Norm', 'fields': {'ord': 2, 'size_power': 0.5}}
    >>> from_config(to_config(uc.zclip())) == uc.zclip()
    True
    """
    names = _NAMED | dict(own or {})

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, (float, Fraction, Decimal)):
            return _texts(float(value))
        if isinstance(value, (tuple, list, range)):
            return {"tuple": list(map(plain, value))}
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(one)] for key, one in value.items()]}
        return _array_as_data(value) if hasattr(value, "dtype") else named(value)

    def named(value: Any) -> Any:
        name, kind = _public_name(names, value), _public_name(names, type(value))
        if name is not None:
            return {"name": name}
        if kind is not None and is_dataclass(value):
            config = {
                "class": kind,
                "fields": {f.name: plain(getattr(value, f.name)) for f in fields(value)},
            }
            return config | _call_as_data(getattr(value, "origin", None), plain)
        return _refuse(value) if other is None else {"other": other(value)}

    return plain(rule)


def from_config(
    config: Any, own: Mapping[str, Any] | None = None, *, other: Callable[[Any], Any] | None = None
) -> Any:
    """Return the rule, or part of one, that `to_config` was given.

    Parameters
    ----------
    config : dict
        May come from an untrusted source: only names of uniclip's choices, and those in ``own``,
        are looked up.
    own : dict, optional
        As for `to_config`.
    other : callable, optional
        Undoes ``other`` of `to_config`.

    Raises
    ------
    ValueError
        If it names anything else, or is not a config.

    Examples
    --------
    >>> import json
    >>> from uniclip.config import from_config, to_config
    >>> text = json.dumps(to_config(uc.zclip(z=3.0)))
    >>> from_config(json.loads(text))
    uc.zclip(z=3.0)
    """
    names = dict(own or {}) | _NAMED

    def again(part: Any) -> Any:
        result = part
        match part:
            case {"number": str(text)}:
                result = float(text)
            case {"tuple": [*items]}:
                result = tuple(map(again, items))
            case {"dict": [*pairs]}:
                result = {again(key): again(value) for key, value in pairs}
            case {"array": [*_] as items, "dtype": str(dtype)}:
                result = np.asarray(_numbers_of_data(items), dtype=dtype)
            case {"class": str(name), "fields": {**parts}}:
                held = {str(field): again(value) for field, value in parts.items()}
                result = _look_up(names, name, kind=True)(**held)
                _settle_origin(result, part.get("call"), again)
            case {"name": str(name)}:
                result = _look_up(names, name)
            case {"other": value} if other is not None:
                result = other(value)
            case _ if not (part is None or isinstance(part, (bool, int, float, str))):
                result = _check_config(part)
        return result

    return again(config)


def _public_name(names: Mapping[str, Any], value: Any) -> str | None:
    return next((name for name, known in names.items() if known is value), None)


def _look_up(names: Mapping[str, Any], name: str, *, kind: bool = False) -> Any:
    """Return the value with a name in a config; a value with fields must be a class."""
    value = names.get(name)
    if value is None or (kind and not is_dataclass(value)):
        msg = (
            f"the config names {name!r}, which is nothing that uniclip makes rules of: load it "
            "with the uniclip that saved it; or, if it is your own, pass it, from_config(config, "
            f"{{{name!r}: ...}})"
        )
        raise ValueError(msg)
    return value


def _call_as_data(origin: Origin | None, plain: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the call of the preset that made a rule; nothing for a rule that no preset made."""
    preset = None if origin is None else _public_name(_PRESETS, origin.function)
    if origin is None or preset is None:
        return {}

    named = {name: plain(value) for name, value in origin.named.items()}
    return {
        "call": {
            "preset": preset,
            "positional": list(map(plain, origin.positional)),
            "named": named,
        }
    }


def _settle_origin(rule: Any, call: Any, again: Callable[[Any], Any]) -> None:
    """Let a rule print as the call of a preset that a config holds, if this makes the same rule.

    It need not: a config may have been changed by hand, or saved by a version in which the preset
    made another rule.
    """
    match call:
        case {"preset": str(name), "positional": [*positional], "named": {**named}} if (
            name in _PRESETS
        ):
            make = _PRESETS[name]
        case _:
            return

    in_order = list(map(again, positional))
    by_name = {str(argument): again(value) for argument, value in named.items()}
    try:
        made = make(*in_order, **by_name)
    except (TypeError, ValueError):
        # Arguments of another version, or changed by hand: the rule itself was read from its
        # fields, and prints its choices.
        return

    # Without its origin, a rule prints its choices.
    if stable(repr(replace(made))) == stable(repr(rule)):
        set_frozen_fields(rule, origin=made.origin)


def _refuse(value: Any) -> Any:
    what = (
        source(value)
        if hasattr(value, "__qualname__")
        else f"an object of {type(value).__qualname__}"
    )
    msg = (
        f"{what} is part of the rule, and has no name that it could be saved by: pass it to "
        "to_config and from_config, "
        'by a name, as in to_config(rule, {"mine": mine})'
    )
    raise TypeError(msg)


def _check_config(part: Any) -> Any:
    msg = f"{summarize(part)} is no part of the config of a rule: pass what to_config returned"
    raise ValueError(msg)


def _array_as_data(array: Any) -> Any:
    """Return an array as lists, a 0-d one as a number."""
    backend, shape = backend_of(array), tuple(array.shape)
    # not every 0-d array converts
    flat = array if backend is None or shape else backend.xp.reshape(array, (-1,))
    values = _texts(to_lists(flat))
    if not shape:
        return values if backend is None else values[0]
    dtype = re.findall(r"u?int\d+|bool|float32|float64", str(array.dtype))
    return {"array": values, "dtype": dtype[0] if dtype else "float32"}


def _texts(values: Any) -> Any:
    """Return numbers in the forms that JSON has."""
    if isinstance(values, list):
        return list(map(_texts, values))
    return (
        {"number": str(values)}
        if isinstance(values, float) and not math.isfinite(values)
        else values
    )


def _numbers_of_data(values: Any) -> Any:
    """Undo `_texts`."""
    if isinstance(values, list):
        return list(map(_numbers_of_data, values))
    return float(values["number"]) if isinstance(values, dict) else values
