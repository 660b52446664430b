# SPDX-License-Identifier: MIT
"""Validate arguments, describe values in a few words for errors, and print choices as source.

Each error names the argument, what is allowed, and the value. Functions for numbers return Python
numbers, which work with every framework. Checks of gradients, which need their tree, are not here.
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
from typing import Any, ClassVar, NamedTuple, TypeAlias

import optree

from uniclip.backends import DEFAULT, backend_of, compiling

LIMIT = " (0 zeroes the gradients, math.inf only measures them)"
"""The valid range of a limit, for errors."""


class NonFiniteError(FloatingPointError, RuntimeError):
    """Raised by ``nonfinite="raise"``: a floating-point error,
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


def nonnegative(name: str, value: object, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real 0-d array,
    returned as it is.
    """
    checked = nonnegatives(name, value, hint)
    if isinstance(checked, Real):
        return checked

    # The rank of a tensor of a graph may be unknown.
    if getattr(checked.shape, "rank", 0) is not None and len(checked.shape):
        check(name, value, fits=False, wanted=f"a number or a 0-d array{hint}")
    if backend_of(checked) is DEFAULT:
        return float(checked)
    return checked


def nonnegatives(name: str, value: object, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real array,
    returned as it is.
    """
    # Most limits are floats of Python, and this is called at each step.
    if type(value) is float and value >= 0:
        return value

    value = real(name, value, f"a number or a 0-d array{hint}")
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more{hint}, got {summarize(value)}"
        raise ValueError(msg)
    return value


def real(name: str, value: object, wanted: str) -> Any:
    """Validate a real number, returned as a Python number, or a real array, returned as it is."""
    # The scalars of NumPy are numbers that have a dtype.
    if hasattr(value, "dtype") and not isinstance(value, Real):
        check(name, value, holds_reals(value), wanted)
        return value
    return number(name, value, wanted)


def holds_reals(array: Any) -> bool:
    """Return whether an array holds real numbers: floating-point ones or integers."""
    backend = backend_of(array)
    return backend is not None and not backend.xp.isdtype(array.dtype, "complex floating")


def number(name: str, value: Any, wanted: str = "a number") -> float:
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

    is_number = isinstance(value, (Real, Decimal)) or _is_single(value)
    backend = None if is_number else backend_of(value)
    if backend is not None and backend.traced(value):
        wanted = (
            f"{wanted} that is known when the code is compiled (only numbers that a step computes "
            "with, such as max_norm, ratio and z, may be arrays of the program)"
        )
    check(name, value, is_number and not isinstance(value, bool), wanted)
    try:
        if isinstance(value, Integral) and abs(int(value)) <= _EXACT:
            return int(value)
        return float(value)
    except OverflowError as error:
        msg = (
            f"{name} must be within the range of a float (1.8e+308, or math.inf), got "
            f"{summarize(value)}"
        )
        raise ValueError(msg) from error


_EXACT = 2**53
"""The largest float up to which all integers are exact; not every framework has larger integers."""


def _is_single(array: Any) -> bool:
    """Return whether an array is one number that can be read."""
    backend = backend_of(array)
    if backend is None or backend.traced(array):
        return False
    return tuple(array.shape) == () and holds_reals(array)


def check_step_arguments(loss: object, params: object = None) -> None:
    """Validate the loss of a step, and raise if it or ``all_reduce`` stands in the place of
    ``params``.
    """
    if params is not None:
        is_function = isinstance(params, (FunctionType, BuiltinFunctionType, MethodType, partial))
        wanted = "a tree of parameters (to reduce norms over processes, pass all_reduce=)"
        check("params", params, not is_function, wanted)

        # A scalar of NumPy, which has a dtype, may be a parameter.
        is_loss = isinstance(params, (Real, str)) and not hasattr(params, "dtype")
        check("params", params, not is_loss, "a tree of parameters (to pass a loss, use loss=)")

    if loss is not None:
        shape = getattr(real("loss", loss, "one number"), "shape", ())
        single = getattr(shape, "rank", 0) is None or all(n in {1, None} for n in shape)
        check("loss", loss, single, "one number, such as the mean over the examples")


def positive(name: str, value: object) -> float:
    """Validate a number above 0."""
    value = number(name, value)
    if not value > 0:
        msg = f"{name} must be above 0, got {summarize(value)}"
        raise ValueError(msg)
    return value


def check_range(name: str, value: object, low: float, high: float, hint: str = "") -> float:
    """Validate a number in a range."""
    value = number(name, value)
    if low <= value <= high:
        return value

    allowed = f"from {low} to {high}"
    if high == math.inf:
        allowed = f"at least {low}"
    msg = f"{name} must be {allowed}{hint}, got {summarize(value)}"
    raise ValueError(msg)


def below_one(name: str, value: object) -> float:
    """Validate a decay, which must be below 1, or an average would never change."""
    value = number(name, value)
    if 0 <= value < 1:
        return value

    hint = ""
    if 2 <= value < 100:
        hint = f" ({value / 100} for {value}%)"
    msg = f"{name} must be from 0 to below 1{hint}, got {summarize(value)}"
    raise ValueError(msg)


def whole_number(name: str, value: Any, low: float = -math.inf) -> int:
    """Validate an integer of any type, at least ``low``; return a Python int."""
    # Frameworks raise errors of any class for an array that is not one integer.
    try:
        integer = operator.index(value)
    except Exception:  # noqa: BLE001
        integer = None
    is_bool = isinstance(value, bool)
    # A Python number has no dtype, and torch.compile cannot ask one that it has made symbolic.
    if not isinstance(value, int):
        is_bool = "bool" in str(getattr(value, "dtype", ""))
    check(name, value, integer is not None and not is_bool, "a whole number")

    if low > -math.inf:
        check_range(name, integer, low, math.inf)
    return integer  # type: ignore[return-value] # None was an error


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise unless a value is one of the allowed names."""
    if not (isinstance(value, str) and value in allowed):
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {summarize(value)}"
        raise ValueError(msg)


def flag(name: str, value: object) -> bool:
    """Validate a boolean; return a Python bool."""
    if isinstance(value, bool):
        return value
    # A boolean of NumPy or of a framework is a 0-d array, or looks like one.
    is_bool_array = "bool" in str(getattr(value, "dtype", ""))
    is_flag = is_bool_array and getattr(value, "shape", None) == ()
    check(name, value, is_flag, "True or False")
    return bool(value)


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Raise an error that says what to install if the imports inside fail."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this part of uniclip needs {library}; run pip install {install} ({error})"
        raise ModuleNotFoundError(msg, name=error.name) from error


# How values are shown.

_MAX_LENGTH = 200
"""The number of characters of a text, a rule or a key in an error."""
_MAX_VALUES = 8
"""The number of values of a tuple, such as axes, in an error."""
_CHOICES = {"curves", "limits", "norms", "scopes"}
"""The modules of the four choices, whose names are public there and not in the package itself,"""
_IN_PACKAGE = {"Limit", "Norm", "Scope"}
"""except for these."""


def source(value: object) -> str:
    """Return the name of a function or class, the shape of an array, else the repr of the value."""
    # Numbers of NumPy print with their class, which the source text may not import.
    if isinstance(value, (Real, Decimal)) and type(value).__module__ != "builtins":
        if isinstance(value, Integral):
            return repr(int(value))
        return repr(float(value))

    if _is_array(value):
        return f"<array of shape {_shape(value)}>"
    if hasattr(value, "__qualname__"):
        return public(value.__module__, value.__qualname__)
    return repr(value)


def public(module: str | None, name: str) -> str:
    """Return the public name of a class, function or constant of a module,
    with ``uniclip`` as ``uc``.
    """
    root, submodule = f"{module}..".split(".")[:2]
    if root != "uniclip" or submodule == "integrations":
        return name
    if submodule in _CHOICES and name not in _IN_PACKAGE:
        return f"uc.{submodule}.{name}"
    return f"uc.{name}"


def summarize(value: object) -> str:
    """Describe any value in a few words.

    An array by its class, dtype and shape, never by its entries.
    """
    text = _summarize_named(value) or _summarize_container(value)
    if not text:
        noun = describe(value)
        text = f"{article(noun)} {noun}"
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH - 4]} ..."


def describe(value: object) -> str:
    """Return the class of an object, and dtype and shape of an array."""
    text = type(value).__qualname__
    if type(value).__module__ != "builtins":
        text = f"{type(value).__module__}.{text}"
    if hasattr(value, "dtype") and not isinstance(value, type):
        text += f" of dtype {value.dtype}"
    if _is_array(value):
        text += f" and shape {_shape(value)}"
    return text


def printed(key: object) -> str:
    """Return a key of a tree as source text.

    One that holds an array is described in a few words.
    """
    # The repr of an array would print its entries.
    if hasattr(key, "shape"):
        return summarize(key)
    text = repr(key)
    if 0 < len(text) <= _MAX_LENGTH:
        return text
    return summarize(key)


def stable(text: str) -> str:
    """Return the repr of a value, without memory addresses."""
    # Not by a pattern, which PyTorch 2.11 and 2.12 cannot compile.
    first, *others = text.split(" at 0x")
    return first + "".join([other.lstrip(hexdigits) for other in others])


def article(noun: str) -> str:
    """Return the indefinite article of a noun."""
    if noun[:1].lower() in set("aeio"):
        return "an"
    return "a"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def attributes_of(choice: Any) -> list[Any]:
    """Return the values of an object's attributes; where it is compiled, those of its fields."""
    if not compiling():
        return list(getattr(choice, "__dict__", {}).values())

    # PyTorch 2.11 and 2.12 cannot compile `__dict__`.
    if not is_dataclass(choice):
        return []
    return [getattr(choice, field.name) for field in fields(choice)]


def held_by(function: Callable[..., object]) -> list[Any]:
    """Return the values in a function's closure; compilers cannot look into it."""
    if compiling():
        return []
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells]


def module_of(function: object) -> str:
    """Return the name of a function's module; compilers know those of classes only."""
    if compiling():
        return ""
    return getattr(function, "__module__", None) or ""


def holds_arrays(value: Any) -> bool:
    """Return whether a value is an array with dimensions, or a container of arrays."""
    if _is_array(value):
        return bool(_shape(value) != ())
    if isinstance(value, (Number, Printed)):
        return False
    return any(map(_is_array, optree.tree_leaves(value)))


def _is_array(value: object) -> bool:
    # Ragged tensors raise, and so do parameters without a shape yet.
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    except RuntimeError:
        return False


def _shape(array: object) -> object:
    shape: Any = getattr(array, "shape", ())
    # A shape of unknown rank is not a sequence.
    if getattr(shape, "rank", 0) is None:
        return shape
    return tuple(shape)


def _summarize_named(value: Any) -> str | None:
    """Return the short repr of a number, string, named function or choice.

    ``None`` for anything else.
    """
    name = getattr(value, "__qualname__", None)
    text = None
    if isinstance(name, str):
        text = public(getattr(value, "__module__", None), name)

    # Python refuses to print integers of thousands of digits.
    if isinstance(value, int) and value.bit_length() > _MAX_LENGTH:
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


def _summarize_container(value: object) -> str | None:
    """Describe the contents of a container; ``None`` if it is not one."""
    if _is_array(value) or not isinstance(value, (list, tuple, dict)):
        return None

    name = type(value).__qualname__
    tree: Any = value
    kinds = [_kind_of(leaf) for leaf in optree.tree_leaves(tree)]
    if type(value) is tuple and "array" not in kinds and len(kinds) <= _MAX_VALUES:
        comma = "," * (len(value) == 1)
        return f"({', '.join(map(summarize, value))}{comma})"

    if not kinds:
        return f"an empty {name}"
    kind = kinds[0]
    if len(set(kinds)) > 1:
        kind = "value"
    return f"{article(name)} {name} of {counted(len(kinds), kind)}"


def _kind_of(leaf: object) -> str:
    if _is_array(leaf):
        return "array"
    if isinstance(leaf, Number):
        return "number"
    return "value"


def _differs(value: object, default: object) -> bool:
    """Return whether a field differs from its default."""
    # An array always does, since comparing it gives no boolean.
    if hasattr(value, "shape") and not isinstance(value, Number):
        return True
    return bool(value != default)


class Origin(NamedTuple):
    """The call of a function that made an object, as which it prints."""

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    named: dict[str, Any]

    def as_source(self, show: Callable[[object], str]) -> str:
        """Return the call with the arguments that were passed and differ from their defaults."""
        called = signature(self.function)
        bound = called.bind(*self.positional, **self.named)

        # After an argument that is omitted, the others need their names.
        by_position = True
        texts: list[str] = []
        for number, (name, argument) in enumerate(bound.arguments.items()):
            default = called.parameters[name].default
            required = default is Parameter.empty
            if not required and not _differs(argument, default):
                by_position = False
                continue

            by_position &= required or number < len(self.positional)
            text = show(argument)
            if not by_position:
                text = f"{name}={text}"
            texts.append(text)

        name = public(self.function.__module__, self.function.__qualname__)
        return f"{name}({', '.join(texts)})"


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
        if self.origin is None:
            return self._printed(show)
        return self.origin.as_source(show)

    def _printed(self, show: Callable[[object], str]) -> str:
        """Return the source text, with the arguments as ``show`` prints them."""
        # Norms and scopes have named constants, which read better than their arguments.
        module = type(self).__module__
        if module in {"uniclip.norms", "uniclip.scopes"}:
            for name in sys.modules[module].__all__:
                constant = getattr(sys.modules[module], name)
                if type(constant) is type(self) and constant == self:
                    return public(module, name)

        name = public(module, type(self).__qualname__)
        return f"{name}({', '.join(self._arguments(show))})"

    def _arguments(self, show: Callable[[object], str]) -> list[str]:
        """Return the arguments that differ from their defaults, as source text."""
        this: Any = self
        texts = []
        for field in fields(this):
            value = getattr(self, field.name)
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()

            if default is MISSING:
                texts.append(show(value))
            elif _differs(value, default):
                texts.append(f"{field.name}={show(value)}")
        return texts


Checks: TypeAlias = dict[str, Callable[[str, Any], Any]]
"""For each field to validate, a function of its name and value that returns the valid value."""


class Checked(Printed):
    """A choice whose numbers are validated by a table."""

    checks: ClassVar[Checks] = {}
    """How each field is validated."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        for name, validate in self.checks.items():
            set_frozen_fields(self, **{name: validate(name, getattr(self, name))})


def at_least(low: int) -> Callable[[str, Any], int]:
    """Return a function that validates an integer."""
    return partial(whole_number, low=low)
