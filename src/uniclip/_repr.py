# SPDX-License-Identifier: MIT
"""Print a choice as the source that makes it, and describe any value in a few words for an error."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from numbers import Number
from types import ModuleType
from typing import Any

import optree

_LONGEST = 200
"""The number of characters of a text, a rule or a key in an error."""
_CHOICES = {"curves", "limits", "norms", "scopes"}
"""The modules of the four choices, searched for names,"""
_BASES = {"Limit", "Norm", "Scope"}
"""except these."""
_FEW = 8
"""The number of values of a tuple, such as axes, in an error."""


def source(value: object) -> str:
    """Return the name of a function or class, else the repr of the value."""
    return public(value.__module__, value.__qualname__) if hasattr(value, "__qualname__") else repr(value)


def public(module: str | None, name: str) -> str:
    """Return the public name of a class, function or constant of a module, with ``uniclip`` as ``uc``."""
    root, home = f"{module}..".split(".")[:2]
    if root != "uniclip" or home == "integrations":
        return name
    return f"uc.{home}.{name}" if home in _CHOICES and name not in _BASES else f"uc.{name}"


def short(value: object) -> str:
    """Describe any value in a few words; an array by its class, dtype and shape, never by its entries."""
    text = _named(value) or _contained(value) or f"{article(describe(value))} {describe(value)}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def describe(leaf: Any) -> str:
    """Return the class of an object, and dtype and shape of an array."""
    dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") and not isinstance(leaf, type) else ""
    dtype += f" and shape {_shape(leaf)}" if _is_array(leaf) else ""
    module = "" if type(leaf).__module__ == "builtins" else f"{type(leaf).__module__}."
    return f"{module}{type(leaf).__qualname__}{dtype}"


def printed(key: object) -> str:
    """Return a key of a tree as source text; one that holds an array is described in a few words."""
    text = "" if hasattr(key, "shape") else repr(key)
    return text if 0 < len(text) <= _LONGEST else short(key)


def stable(text: str) -> str:
    """Return the repr of a value, without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def article(noun: str) -> str:
    """Return the indefinite article of a noun."""
    return "an" if noun[:1].lower() in set("aeio") else "a"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def holds_arrays(value: Any) -> bool:
    """Whether a value is an array with dimensions, or a container of arrays."""
    if _is_array(value):
        return bool(_shape(value) != ())
    return not isinstance(value, (Number, Printed)) and any(map(_is_array, optree.tree_leaves(value)))


def _is_array(value: Any) -> bool:
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    except RuntimeError:  # ragged tensors, and parameters without a shape yet
        return False


def _shape(array: Any) -> Any:
    shape = getattr(array, "shape", ())
    return shape if getattr(shape, "rank", 0) is None else tuple(shape)  # one of unknown rank is not a sequence


def _named(value: Any) -> str | None:
    """Return the short repr of a number, string, named function or choice; ``None`` for anything else."""
    text = getattr(value, "__qualname__", None)
    text = public(getattr(value, "__module__", None), text) if isinstance(text, str) else None
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        text = f"a whole number of {value.bit_length()} bits"
    elif value is None or isinstance(value, (Number, Decimal, str)):
        text = repr(value)
    elif isinstance(value, Printed):
        text = value._printed(short)  # noqa: SLF001 - its own repr calls this
    elif isinstance(value, type):
        text = f"the class {text}"
    elif isinstance(value, ModuleType):
        text = f"the module {value.__name__}"
    elif isinstance(value, functools.partial):
        text = f"functools.partial({short(value.func)}, ...)"
    elif is_dataclass(value) and not _is_array(value):
        parts = [f"{f.name}={short(getattr(value, f.name, None))}" for f in fields(value)]
        text = f"{type(value).__qualname__}({', '.join(parts)})"
    return text


def _contained(value: Any) -> str | None:
    """Describe the contents of a container; ``None`` if it is not one."""
    if _is_array(value) or not isinstance(value, (list, tuple, dict)):
        return None
    tree: Any = value
    leaves = optree.tree_leaves(tree)
    kinds = {"array" if _is_array(leaf) else "number" if isinstance(leaf, Number) else "value" for leaf in leaves}
    name = type(value).__qualname__
    if type(value) is tuple and "array" not in kinds and len(leaves) <= _FEW:
        return f"({', '.join(map(short, value))}{',' * (len(value) == 1)})"
    kind = kinds.pop() if len(kinds) == 1 else "value"
    many = f"{article(name)} {name} of {len(leaves)} {kind}{'' if len(leaves) == 1 else 's'}"
    return many if leaves else f"an empty {name}"


def _differs(value: Any, default: Any) -> bool:
    """Whether a field differs from its default; an array always does, since comparing it gives no boolean."""
    return hasattr(value, "shape") or bool(value != default)


class Printed:
    """A frozen dataclass that prints as its public name if it has one, else as the call that makes it."""

    def __repr__(self) -> str:
        """Return source text that evaluates to an equal object."""
        return self._printed(source)

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the source text, with the arguments as ``show`` prints them."""
        module = type(self).__module__
        for name in sys.modules[module].__all__ if module in {"uniclip.norms", "uniclip.scopes"} else ():
            value = getattr(sys.modules[module], name)
            if type(value) is type(self) and value == self:
                return public(module, name)
        return f"{public(type(self).__module__, type(self).__qualname__)}({', '.join(self._arguments(show))})"

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        me: Any = self
        defaults = [(f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in fields(me)]
        return [
            show(getattr(self, name)) if default is MISSING else f"{name}={show(getattr(self, name))}"
            for name, default in defaults
            if default is MISSING or _differs(getattr(self, name), default)
        ]
