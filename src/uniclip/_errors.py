# SPDX-License-Identifier: MIT
"""Validate arguments, and describe any value in a few words, for errors.

Print a choice as the source that makes it.

Each error names the argument, what is allowed, and the value. Functions for numbers return Python
numbers, which work with every framework.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from functools import partial
from inspect import Parameter, signature
from numbers import Integral, Number, Real
from string import hexdigits
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple

import optree

from uniclip.backends import DEFAULT, backend_of, compiling

LIMIT = " (0 zeroes the gradients, math.inf only measures them)"
"""The valid range of a limit, for errors."""


class NonFiniteError(FloatingPointError, RuntimeError):
    """What ``nonfinite="raise"`` raises: a floating-point error,
    and the `RuntimeError` of PyTorch's own functions.
    """


def check(name: str, value: object, fits: bool, wanted: str) -> None:  # noqa: FBT001
    """Raise a ``TypeError`` unless an argument is valid."""
    if not fits:
        msg = f"{name} must be {wanted}, got {summarize(value)}"
        raise TypeError(msg)


def set_frozen_fields(choice: object, **values: object) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(choice, name, value)


def nonnegative(name: str, value: Any, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real 0-d array,
    returned as it is.
    """
    value = nonnegatives(name, value, hint)
    if isinstance(value, Real):
        return value
    if getattr(value.shape, "rank", 0) is not None and len(value.shape):
        check(name, value, fits=False, wanted=f"a number or a 0-d array{hint}")
    return float(value) if backend_of(value) is DEFAULT else value


def nonnegatives(name: str, value: Any, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real array,
    returned as it is.
    """
    if type(value) is float and value >= 0:  # Python's own; other types of numbers follow
        return value
    value = real(name, value, f"a number or a 0-d array{hint}")
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more{hint}, got {summarize(value)}"
        raise ValueError(msg)
    return value


def real(name: str, value: Any, wanted: str) -> Any:
    """Validate a real number, returned as a Python number, or a real array, returned as it is."""
    if hasattr(value, "dtype") and not isinstance(value, Real):
        check(name, value, holds_reals(value), wanted)
        return value
    return number(name, value, wanted)


def holds_reals(array: Any) -> bool:
    """Whether an array holds real numbers: floating-point ones or integers."""
    backend = backend_of(array)
    return backend is not None and not backend.xp.isdtype(array.dtype, "complex floating")


def number(name: str, value: Any, wanted: str = "a number") -> Any:
    """Convert any real number, or a readable 0-d array, to a Python float,
    or an int that is a float, too.

    Raises
    ------
    TypeError
        If it is not a number; booleans are not.
    ValueError
        If it is beyond the range of a float.
    """
    if type(value) is float:
        return value
    check(
        name,
        value,
        not isinstance(value, bool) and (isinstance(value, (Real, Decimal)) or _single(value)),
        wanted,
    )
    try:
        return (
            int(value)
            if isinstance(value, Integral) and abs(int(value)) <= _EXACT
            else float(value)
        )
    except OverflowError as error:
        msg = (
            f"{name} must be within the range of a float (1.8e+308, or math.inf), got "
            f"{summarize(value)}"
        )
        raise ValueError(msg) from error


_EXACT = 2**53
"""The largest float up to which all integers are exact; not every framework has larger integers."""


def _single(array: Any) -> bool:
    """Whether an array is one number that can be read."""
    backend = backend_of(array)
    return (
        backend is not None
        and not backend.traced(array)
        and tuple(array.shape) == ()
        and holds_reals(array)
    )


def check_step_arguments(loss: Any, params: Any = None) -> None:
    """Validate the loss of a step, and refuse it or ``all_reduce`` in the place of ``params``."""
    if params is not None:
        function = isinstance(params, (FunctionType, BuiltinFunctionType, MethodType, partial))
        check(
            "params",
            params,
            not function,
            "a tree of parameters (to join norms, write all_reduce=)",
        )
        # with one it may be a parameter
        scalar = isinstance(params, (Real, str)) and not hasattr(params, "dtype")
        check("params", params, not scalar, "a tree of parameters (for the loss, write loss=)")
    if loss is not None:
        shape = getattr(real("loss", loss, "one number"), "shape", ())
        single = getattr(shape, "rank", 0) is None or all(n in {1, None} for n in shape)
        check("loss", loss, single, "one number, such as the mean of those of the examples")


def positive(name: str, value: Any) -> Any:
    """Validate a number above 0."""
    value = number(name, value)
    if not value > 0:
        msg = f"{name} must be above 0, got {summarize(value)}"
        raise ValueError(msg)
    return value


def check_range(name: str, value: Any, low: float, high: float, hint: str = "") -> Any:
    """Validate a number in a range."""
    value = number(name, value)
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        msg = f"{name} must be {allowed}{hint}, got {summarize(value)}"
        raise ValueError(msg)
    return value


def below_one(name: str, value: Any) -> Any:
    """Validate a decay, which must be below 1, or an average would never change."""
    value = number(name, value)
    if not 0 <= value < 1:
        percent = f" (a share: {value / 100} for {value} %)" if 2 <= value < 100 else ""
        msg = f"{name} must be from 0 to below 1{percent}, got {summarize(value)}"
        raise ValueError(msg)
    return value


def whole(name: str, value: Any, low: float = -math.inf) -> int:
    """Validate an integer of any type, at least ``low``; return a Python int."""
    try:
        result = operator.index(value)
    except Exception:  # noqa: BLE001 - any error of a framework for an array that is not one integer
        result = None
    fits = (
        result is not None
        and not isinstance(value, bool)
        and "bool" not in str(getattr(value, "dtype", ""))
    )
    check(name, value, fits, "a whole number")
    return check_range(name, result, low, math.inf) if low > -math.inf else result  # type: ignore[return-value]


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Check that a value is one of the allowed names."""
    if not (isinstance(value, str) and value in allowed):
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {summarize(value)}"
        raise ValueError(msg)


def flag(name: str, value: Any) -> bool:
    """Validate a boolean; return a Python bool."""
    if isinstance(value, bool):
        return value
    single = getattr(value, "shape", None) == () and "bool" in str(getattr(value, "dtype", ""))
    check(name, value, single, "True or False")
    return bool(value)


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Raise an error that says what to install if the imports inside fail."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this part of uniclip needs {library}: pip install {install} ({error})"
        raise ModuleNotFoundError(msg, name=error.name) from error


# How values are shown.

_LONGEST = 200
"""The number of characters of a text, a rule or a key in an error."""
_CHOICES = {"curves", "limits", "norms", "scopes"}
"""The modules of the four choices, searched for names,"""
_BASES = {"Limit", "Norm", "Scope"}
"""except these."""
_FEW = 8
"""The number of values of a tuple, such as axes, in an error."""


def source(value: object) -> str:
    """Return the name of a function or class, the shape of an array, else the repr of the value."""
    if isinstance(value, (Real, Decimal)) and type(value).__module__ != "builtins":
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if _is_array(value):
        return f"<array of shape {_shape(value)}>"
    return (
        public(value.__module__, value.__qualname__)
        if hasattr(value, "__qualname__")
        else repr(value)
    )


def public(module: str | None, name: str) -> str:
    """Return the public name of a class, function or constant of a module,
    with ``uniclip`` as ``uc``.
    """
    root, home = f"{module}..".split(".")[:2]
    if root != "uniclip" or home == "integrations":
        return name
    return f"uc.{home}.{name}" if home in _CHOICES and name not in _BASES else f"uc.{name}"


def summarize(value: object) -> str:
    """Describe any value in a few words.

    An array by its class, dtype and shape, never by its entries.
    """
    text = _name_of(value) or _contained(value) or f"{article(describe(value))} {describe(value)}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def describe(leaf: Any) -> str:
    """Return the class of an object, and dtype and shape of an array."""
    dtype = (
        f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") and not isinstance(leaf, type) else ""
    )
    dtype += f" and shape {_shape(leaf)}" if _is_array(leaf) else ""
    module = "" if type(leaf).__module__ == "builtins" else f"{type(leaf).__module__}."
    return f"{module}{type(leaf).__qualname__}{dtype}"


def printed(key: object) -> str:
    """Return a key of a tree as source text.

    One that holds an array is described in a few words.
    """
    text = "" if hasattr(key, "shape") else repr(key)
    return text if 0 < len(text) <= _LONGEST else summarize(key)


def stable(text: str) -> str:
    """Return the repr of a value, without memory addresses."""
    # Not by a pattern, which PyTorch 2.11 and 2.12 cannot compile.
    first, *others = text.split(" at 0x")
    return first + "".join([other.lstrip(hexdigits) for other in others])


def article(noun: str) -> str:
    """Return the indefinite article of a noun."""
    return "an" if noun[:1].lower() in set("aeio") else "a"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def attributes_of(choice: Any) -> list[Any]:
    """Return the values of an object's attributes; where it is compiled, those of its fields."""
    if not compiling():
        return list(getattr(choice, "__dict__", {}).values())
    # PyTorch 2.11 and 2.12 cannot compile `__dict__`.
    return [getattr(choice, field.name) for field in fields(choice)] if is_dataclass(choice) else []


def held_by(function: Any) -> list[Any]:
    """Return what a function holds in its closure; compilers cannot look into it."""
    cells = () if compiling() else getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def home_of(function: Any) -> str:
    """Return the module of a function; compilers know those of classes only."""
    return "" if compiling() else getattr(function, "__module__", None) or ""


def holds_arrays(value: Any) -> bool:
    """Whether a value is an array with dimensions, or a container of arrays."""
    if _is_array(value):
        return bool(_shape(value) != ())
    return not isinstance(value, (Number, Printed)) and any(
        map(_is_array, optree.tree_leaves(value))
    )


def _is_array(value: Any) -> bool:
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    except RuntimeError:  # ragged tensors, and parameters without a shape yet
        return False


def _shape(array: Any) -> Any:
    shape = getattr(array, "shape", ())
    # One of unknown rank is not a sequence.
    return shape if getattr(shape, "rank", 0) is None else tuple(shape)


def _name_of(value: Any) -> str | None:
    """Return the short repr of a number, string, named function or choice.

    ``None`` for anything else.
    """
    text = getattr(value, "__qualname__", None)
    text = public(getattr(value, "__module__", None), text) if isinstance(text, str) else None
    if isinstance(value, int) and value.bit_length() > _LONGEST:
        text = f"a whole number of {value.bit_length()} bits"
    elif value is None or isinstance(value, (Number, Decimal, str)):
        text = repr(value)
    elif isinstance(value, Printed):
        text = value.as_source(summarize)
    elif isinstance(value, type):
        text = f"the class {text}"
    elif isinstance(value, ModuleType):
        text = f"the module {value.__name__}"
    elif isinstance(value, functools.partial):
        text = f"functools.partial({summarize(value.func)}, ...)"
    elif is_dataclass(value) and not _is_array(value):
        parts = [f"{f.name}={summarize(getattr(value, f.name, None))}" for f in fields(value)]
        text = f"{type(value).__qualname__}({', '.join(parts)})"
    return text


def _contained(value: Any) -> str | None:
    """Describe the contents of a container; ``None`` if it is not one."""
    if _is_array(value) or not isinstance(value, (list, tuple, dict)):
        return None
    tree: Any = value
    leaves = optree.tree_leaves(tree)
    leaf_info = {
        "array" if _is_array(leaf) else "number" if isinstance(leaf, Number) else "value"
        for leaf in leaves
    }
    name = type(value).__qualname__
    if type(value) is tuple and "array" not in leaf_info and len(leaves) <= _FEW:
        return f"({', '.join(map(summarize, value))}{',' * (len(value) == 1)})"
    kind = leaf_info.pop() if len(leaf_info) == 1 else "value"
    many = f"{article(name)} {name} of {len(leaves)} {kind}{'' if len(leaves) == 1 else 's'}"
    return many if leaves else f"an empty {name}"


def _differs(value: Any, default: Any) -> bool:
    """Whether a field differs from its default.

    An array always does, since comparing it gives no boolean.
    """
    return (hasattr(value, "shape") and not isinstance(value, Number)) or bool(value != default)


class Origin(NamedTuple):
    """The call of a function that made an object, as which it prints."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]

    def as_source(self, show: Callable[[object], str]) -> str:
        """Return the call with the arguments that were given and differ from their defaults."""
        called, texts, in_order = signature(self.function), [], True
        arguments = called.bind(*self.positional, **self.named).arguments
        for number, name in enumerate(arguments):
            default, value = called.parameters[name].default, arguments[name]
            if default is not Parameter.empty and not _differs(value, default):
                in_order = False
                continue
            in_order &= default is Parameter.empty or number < len(self.positional)
            texts.append(show(value) if in_order else f"{name}={show(value)}")
        return f"{public(self.function.__module__, self.function.__qualname__)}({', '.join(texts)})"


class Printed:
    """A frozen dataclass that prints as its public name, or as the call that made it: of a preset,
    or of its class.
    """

    origin: ClassVar[Origin | None] = None
    """The call of a preset that made it; it takes no part in comparisons."""

    def __repr__(self) -> str:
        """Return source text that evaluates to an equal object."""
        return self.as_source(source)

    def as_source(self, show: Callable[[object], str]) -> str:
        """Return the source text, with the arguments as ``show`` prints them."""
        return self._printed(show) if self.origin is None else self.origin.as_source(show)

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the source text, with the arguments as ``show`` prints them."""
        module = type(self).__module__
        for name in (
            sys.modules[module].__all__ if module in {"uniclip.norms", "uniclip.scopes"} else ()
        ):
            value = getattr(sys.modules[module], name)
            if type(value) is type(self) and value == self:
                return public(module, name)
        return (
            f"{public(type(self).__module__, type(self).__qualname__)}("
            f"{', '.join(self._arguments(show))})"
        )

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        me: Any = self
        defaults = [
            (f.name, f.default if f.default_factory is MISSING else f.default_factory())
            for f in fields(me)
        ]
        return [
            show(getattr(self, name))
            if default is MISSING
            else f"{name}={show(getattr(self, name))}"
            for name, default in defaults
            if default is MISSING or _differs(getattr(self, name), default)
        ]
