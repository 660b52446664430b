# SPDX-License-Identifier: MIT
"""Rules as plain data for JSON, which is read without running any code that it names.

A config holds the choices of a rule. Its state is saved by `uniclip.saved`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from fractions import Fraction
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from uniclip import curves, limits, norms, scopes
from uniclip._errors import Origin, public, set_frozen_fields, source, stable, summarize
from uniclip.backends import backend_of, to_lists
from uniclip.compose import ByValue, Chain, Function, Masked
from uniclip.presets import adaptive, examples, fixed, relative
from uniclip.rule import Rule

Data: TypeAlias = object
"""What JSON can hold: ``None``, a boolean, a number, a string, or a list or dict of these."""

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
    scopes.Stacked,
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
"""The presets. A rule that one of them made prints as its call, so a config holds the call, too."""


def to_config(
    rule: object,
    own: Mapping[str, object] | None = None,
    *,
    other: Callable[[Any], Data] | None = None,
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

    def as_data(part: object) -> Data:
        if part is None or isinstance(part, (bool, int, str)):
            return part
        if isinstance(part, (float, Fraction, Decimal)):
            return _json_numbers(float(part))
        if isinstance(part, (tuple, list, range)):
            return {"tuple": list(map(as_data, part))}
        if isinstance(part, Mapping):
            return {"dict": [[as_data(key), as_data(entry)] for key, entry in part.items()]}
        if hasattr(part, "dtype"):
            return _array_as_data(part)
        return object_as_data(part)

    def object_as_data(part: object) -> Data:
        data = _named_as_data(part, names, as_data)
        if data is not None:
            return data
        if other is None:
            _raise_unnamed(part)
        return {"other": other(part)}

    return as_data(rule)


def from_config(
    config: Data,
    own: Mapping[str, object] | None = None,
    *,
    other: Callable[[Any], object] | None = None,
) -> Any:
    """Return the rule, or part of one, from which `to_config` made a config.

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
    # The names of uniclip come last, so that ``own`` cannot change what a shared config means.
    names = dict(own or {}) | _NAMED

    def restore(data: Data) -> Any:
        part: Any = data
        match data:
            case {"number": str(text)}:
                part = float(text)
            case {"tuple": [*entries]}:
                part = tuple(map(restore, entries))
            case {"dict": [*pairs]}:
                part = {restore(key): restore(entry) for key, entry in pairs}
            case {"array": [*_] as numbers, "dtype": str(dtype)}:
                part = np.asarray(_python_numbers(numbers), dtype=dtype)
            case {"class": str(name), "fields": {**values}, **others}:
                arguments = {str(field): restore(value) for field, value in values.items()}
                part = _look_up(names, name, has_fields=True)(**arguments)
                _set_origin(part, others.get("call"), restore)
            case {"name": str(name)}:
                part = _look_up(names, name)
            case {"other": others_data} if other is not None:
                part = other(others_data)
            case _ if not (data is None or isinstance(data, (bool, int, float, str))):
                msg = f"{summarize(data)} is no part of a config; pass what to_config returned"
                raise ValueError(msg)
        return part

    return restore(config)


def _name_in(names: Mapping[str, object], part: object) -> str | None:
    """Return the name of a class, function or object, ``None`` if it has none."""
    for name, named in names.items():
        # Identity is safe for any object, while ``==`` on arrays gives an array of booleans.
        if named is part:
            return name
    return None


def _look_up(names: Mapping[str, object], name: str, *, has_fields: bool = False) -> Any:
    """Return the class, function or object with a name in a config."""
    part = names.get(name)
    # A function is never called with the fields of a config, which may be untrusted.
    if part is None or (has_fields and not is_dataclass(part)):
        msg = (
            f"the config names {name!r}, which uniclip doesn't have; if it is your own, pass it, "
            f"from_config(config, {{{name!r}: ...}}), else load the config with the uniclip that "
            "saved it"
        )
        raise ValueError(msg)
    return part


def _named_as_data(
    part: object, names: Mapping[str, object], as_data: Callable[[object], Data]
) -> Data:
    """Return a part by its name, or by the name of its class and its fields.

    ``None`` if it has neither.
    """
    name = _name_in(names, part)
    if name is not None:
        return {"name": name}

    class_name = _name_in(names, type(part))
    if class_name is None or not is_dataclass(part):
        return None
    values = {field.name: as_data(getattr(part, field.name)) for field in fields(part)}
    config: dict[str, Data] = {"class": class_name, "fields": values}
    return config | _call_as_data(getattr(part, "origin", None), as_data)


def _call_as_data(origin: Origin | None, as_data: Callable[[object], Data]) -> dict[str, Data]:
    """Return the call of the preset that made a rule; nothing for a rule that no preset made."""
    if origin is None:
        return {}
    preset = _name_in(_PRESETS, origin.function)
    if preset is None:
        return {}

    positional = list(map(as_data, origin.positional))
    named = {name: as_data(argument) for name, argument in origin.named.items()}
    return {"call": {"preset": preset, "positional": positional, "named": named}}


def _set_origin(rule: object, call: Data, restore: Callable[[Data], Any]) -> None:
    """Let a rule print as the call of a preset in its config, if this call makes the same rule.

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

    arguments = list(map(restore, positional))
    named_arguments = {str(argument): restore(value) for argument, value in named.items()}
    try:
        made = make(*arguments, **named_arguments)
    except (TypeError, ValueError):
        # Arguments of another version, or changed by hand: the rule itself was read from its
        # fields, and prints its choices.
        return

    # Without its origin, a rule prints its choices.
    if stable(repr(replace(made))) == stable(repr(rule)):
        set_frozen_fields(rule, origin=made.origin)


def _raise_unnamed(part: object) -> NoReturn:
    """Raise an error that a part of a rule has no name."""
    described = f"an object of {type(part).__qualname__}"
    if hasattr(part, "__qualname__"):
        described = source(part)
    msg = (
        f"{described} is part of the rule, but a config has no name for it; pass it with a name to "
        'to_config and from_config, as in to_config(rule, {"mine": mine})'
    )
    raise TypeError(msg)


def _array_as_data(array: Any) -> Data:
    """Return an array as lists, a 0-d one as a number."""
    if tuple(array.shape):
        # Other dtypes, such as bfloat16, are unknown to NumPy: float32 holds all of their numbers.
        dtypes = re.findall(r"u?int\d+|bool|float32|float64", str(array.dtype))
        dtype = next(iter(dtypes), "float32")
        return {"array": _json_numbers(to_lists(array)), "dtype": dtype}

    backend = backend_of(array)
    if backend is None:
        return _json_numbers(to_lists(array))

    # Not every library converts a 0-d array to a number.
    [number] = to_lists(backend.xp.reshape(array, (-1,)))
    return _json_numbers(number)


def _json_numbers(numbers: object) -> Data:
    """Return numbers in the forms that JSON has, which has no infinity and no NaN."""
    if isinstance(numbers, list):
        return list(map(_json_numbers, numbers))
    if isinstance(numbers, float) and not math.isfinite(numbers):
        return {"number": str(numbers)}
    return numbers


def _python_numbers(numbers: Data) -> Any:
    """Return the numbers from which `_json_numbers` made data."""
    if isinstance(numbers, list):
        return list(map(_python_numbers, numbers))
    if isinstance(numbers, dict):
        return float(numbers["number"])
    return numbers
