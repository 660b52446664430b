# SPDX-License-Identifier: MIT
"""Validate arguments; each error names the argument, what is allowed, and the value.

Functions for numbers return Python numbers, which work with every framework.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from uniclip._repr import short
from uniclip.backends import DEFAULT, backend_of, compiling

LIMIT = " (0 zeroes the gradients, math.inf only measures them)"
"""The valid range of a limit, for errors."""


def check(name: str, value: object, fits: bool, wanted: str) -> None:  # noqa: FBT001
    """Raise a ``TypeError`` unless an argument is valid."""
    if not fits:
        msg = f"{name} must be {wanted}, got {short(value)}"
        raise TypeError(msg)


def settle(choice: object, **values: object) -> None:
    """Set fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(choice, name, value)


def nonnegative(name: str, value: Any, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real 0-d array, returned as it is."""
    value = nonnegatives(name, value, hint)
    if isinstance(value, Real):
        return value
    if getattr(value.shape, "rank", 0) is not None and len(value.shape):
        check(name, value, False, f"a number or a 0-d array{hint}")  # noqa: FBT003
    return float(value) if backend_of(value) is DEFAULT else value


def nonnegatives(name: str, value: Any, hint: str = "") -> Any:
    """Validate a nonnegative number, returned as a Python number, or a real array, returned as it is."""
    if type(value) is float and value >= 0:  # Python's own; other types of numbers follow
        return value
    value = real(name, value, f"a number or a 0-d array{hint}")
    if isinstance(value, Real) and not float(value) >= 0:
        msg = f"{name} must be 0 or more{hint}, got {short(value)}"
        raise ValueError(msg)
    return value


def real(name: str, value: Any, wanted: str) -> Any:
    """Validate a real number, returned as a Python number, or a real array, returned as it is."""
    if hasattr(value, "dtype") and not isinstance(value, Real):
        check(name, value, holds_reals(value), wanted)
        return value
    return number(name, value, wanted)


def holds_reals(array: Any) -> bool:
    """Whether an array holds floating-point numbers or integers, by the name of its dtype."""
    if compiling():
        return True
    dtype = str(array.dtype)
    return ("float" in dtype or "int" in dtype) and not isinstance(array, type)


def number(name: str, value: Any, wanted: str = "a number") -> Any:
    """Convert any real number, or a readable 0-d array, to a Python float, or an int that is a float, too.

    Raises
    ------
    TypeError
        If it is not a number; booleans are not.
    ValueError
        If it is beyond the range of a float.
    """
    if type(value) is float:
        return value
    check(name, value, not isinstance(value, bool) and (isinstance(value, (Real, Decimal)) or _single(value)), wanted)
    try:
        return int(value) if isinstance(value, Integral) and abs(int(value)) <= _EXACT else float(value)
    except OverflowError as error:
        msg = f"{name} must be within the range of a float (1.8e+308, or math.inf), got {short(value)}"
        raise ValueError(msg) from error


_EXACT = 2**53
"""The largest float up to which all integers are exact; not every framework has larger integers."""


def _single(array: Any) -> bool:
    """Whether an array is one number that can be read."""
    backend = backend_of(array)
    return backend is not None and not backend.traced(array) and tuple(array.shape) == () and holds_reals(array)


def refuse_in_step(loss: Any, params: Any = None) -> None:
    """Validate the loss of a step, and refuse it or ``all_reduce`` in the place of ``params``."""
    if params is not None:
        function = isinstance(params, (FunctionType, BuiltinFunctionType, MethodType, partial))
        check("params", params, not function, "a tree of parameters (to join norms, write all_reduce=)")
        scalar = isinstance(params, (Real, str)) and not hasattr(params, "dtype")  # with one it may be a parameter
        check("params", params, not scalar, "a tree of parameters (for the loss, write loss=)")
    if loss is not None:
        shape = getattr(real("loss", loss, "one number"), "shape", ())
        single = getattr(shape, "rank", 0) is None or all(n in {1, None} for n in shape)
        check("loss", loss, single, "one number, such as the mean of those of the examples")


def positive(name: str, value: Any) -> Any:
    """Validate a number above 0."""
    value = number(name, value)
    if not value > 0:
        msg = f"{name} must be above 0, got {short(value)}"
        raise ValueError(msg)
    return value


def within(name: str, value: Any, low: float, high: float, hint: str = "") -> Any:
    """Validate a number in a range."""
    value = number(name, value)
    if not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        msg = f"{name} must be {allowed}{hint}, got {short(value)}"
        raise ValueError(msg)
    return value


def below_one(name: str, value: Any) -> Any:
    """Validate a decay, which must be below 1, or an average would never change."""
    value = number(name, value)
    if not 0 <= value < 1:
        percent = f" (a share: {value / 100} for {value} %)" if 2 <= value < 100 else ""
        msg = f"{name} must be from 0 to below 1{percent}, got {short(value)}"
        raise ValueError(msg)
    return value


def whole(name: str, value: Any, low: float = -math.inf) -> int:
    """Validate an integer of any type, at least ``low``; return a Python int."""
    try:
        result = operator.index(value)
    except Exception:  # noqa: BLE001 - any error of a framework for an array that is not one integer
        result = None
    fits = result is not None and not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", ""))
    check(name, value, fits, "a whole number")
    return within(name, result, low, math.inf) if low > -math.inf else result  # type: ignore[return-value]


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Check that a value is one of the allowed names."""
    if not (isinstance(value, str) and value in allowed):
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {short(value)}"
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
