"""A CPU library that behaves like CuPy, to test what a backend must not assume of an accelerator.

NumPy cannot read its arrays. Its devices are context managers and cannot be hashed. Functions run
on the current device, and refuse arrays of another one. Views share memory, and
``__cuda_array_interface__`` exposes its address. Reads of values are counted, since a host would
have to wait.

This module is the namespace: ``array.__array_namespace__()`` returns it.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

COUNTS: Counter[str] = Counter()
"""Counters of values read ("reads"), kernels ("launches"), and constant elements ("constants")."""
VIEWS = {"broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze"}
"""Functions that start no kernel, and run on any device."""
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
WIDE = ("float64", "complex128")
FUNCTIONS_OF_DTYPES = {"finfo", "iinfo", "isdtype"}
MAKERS = {"arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros"}


class Device:
    """An accelerator; a ``with`` statement makes it the current one."""

    current: list[Device]
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.number == other.number

    def __repr__(self) -> str:
        return f"<Accelerator {self.number}>"

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the device; the third device has no float64."""
        return [name for name in DTYPES if self.number < 2 or name not in WIDE]

    def __enter__(self) -> Device:  # noqa: PYI034 - Self is of Python 3.11
        Device.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        Device.current.pop()


Device.current = [Device(0)]


class Array:
    """An array on a device."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: np.ndarray, device: Device) -> None:
        assert str(values.dtype) in device.dtypes, f"{device} has no {values.dtype}"
        self._values, self.device = values, device

    dtype = property(lambda self: self._values.dtype)
    shape = property(lambda self: self._values.shape)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return sys.modules[__name__]

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        msg = "Implicit conversion to a NumPy array is not allowed. Use `.get()`."
        raise TypeError(msg)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device.number)

    def __dlpack__(self, **kwargs: Any) -> Any:
        msg = "the memory of an accelerator cannot be exported to the CPU"
        raise BufferError(msg)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._values.__array_interface__

    def get(self) -> np.ndarray:
        """Return the values as a NumPy array."""
        COUNTS["reads"] += 1
        return self._values.copy()

    def to_device(self, device: Device, /, *, stream: Any = None) -> Array:
        assert isinstance(device, Device), device
        return Array(self._values.copy(), device)

    def __repr__(self) -> str:
        return f"Array({self._values!r}, {self.device})"

    def made(self, values: Any) -> Array:
        """Return the result of an operation on this array."""
        return Array(np.asarray(values), self.device)

    def __getitem__(self, key: Any) -> Array:
        return self.made(self._values[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        [values] = on_current_device(value)
        on_current_device(self)
        COUNTS["launches"] += 1
        self._values[key] = values


def on_current_device(*arrays: Any) -> list[Any]:
    """Return NumPy arrays of the values; refuse arrays of another device, and NumPy's."""
    for array in arrays:
        if isinstance(array, Array) and array.device != Device.current[-1]:
            msg = f"an array of {array.device}, but the current device is {Device.current[-1]}"
            raise ValueError(msg)
        if isinstance(array, (np.ndarray, np.generic)):
            msg = f"Unsupported type {type(array)}"
            raise TypeError(msg)
    return [array._values if isinstance(array, Array) else array for array in arrays]


def lifted(name: str) -> Callable[..., Any]:
    """Return a function of NumPy as a function of this library."""
    function = getattr(np, name)

    def call(*args: Any, device: Any = None, **options: Any) -> Any:
        assert device is None
        if name in FUNCTIONS_OF_DTYPES:
            return function(*args, **options)
        arrays = args[0] if name in {"concat", "stack"} else args
        device = next((array.device for array in arrays if isinstance(array, Array)), None)
        if device is None:
            device = Device.current[-1]
        values = (
            [array._values if isinstance(array, Array) else array for array in arrays]
            if name in VIEWS
            else on_current_device(*arrays)
        )
        if name == "result_type":
            return function(*values)
        COUNTS["launches"] += name not in VIEWS
        result = function(*([values] if name in {"concat", "stack"} else values), **options)
        COUNTS["constants"] += np.size(result) if name.endswith("_like") else 0
        if isinstance(result, tuple):
            return tuple(Array(np.asarray(one), device) for one in result)
        return Array(np.asarray(result), device)

    return call


def maker(name: str) -> Callable[..., Any]:
    """Return a function that creates arrays, by default on the current device."""
    function = getattr(np, name)

    def make(first: Any, *args: Any, device: Device | None = None, **options: Any) -> Array:
        with device or Device.current[-1] as here:
            if not isinstance(first, Array):
                made = np.array(function(first, *args, **options))
                COUNTS["launches"] += 1
                COUNTS["constants"] += made.size
                return Array(made, here)
            values = function(first._values, *args, **options)
            COUNTS["launches"] += values is not first._values
            return first if values is first._values else Array(values, first.device)

    return make


def astype(array: Array, dtype: Any, /, *, copy: bool = True) -> Array:
    """Return an array converted to another dtype."""
    [values] = on_current_device(array)
    COUNTS["launches"] += 1
    return Array(values.astype(dtype, copy=copy), array.device)


def unstack(array: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """Return the rows of an array."""
    assert axis == 0
    return tuple(array[number, ...] for number in range(array.shape[0]))


def __getattr__(name: str) -> Any:
    if name in DTYPES:
        return np.dtype(name)
    if name.startswith("__") or not hasattr(np, name):
        raise AttributeError(name)
    return maker(name) if name in MAKERS else lifted(name)


def __array_namespace_info__() -> Any:  # noqa: N807 - the standard's name
    """Return the inspection object of the array API standard: devices and dtypes."""
    return SimpleNamespace(
        dtypes=lambda *, device: {name: np.dtype(name) for name in device.dtypes},
        devices=lambda: [Device(0), Device(1), Device(2)],
    )


def _binary(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def call(self: Array, other: Any) -> Any:
        if not isinstance(other, (Array, bool, int, float, complex)):
            return NotImplemented
        one, two = on_current_device(self, other)
        COUNTS["launches"] += 1
        made = function(two, one) if swapped else function(one, two)
        return self.made(made)

    return call


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Array, other: Any) -> Array:
        one, two = on_current_device(self, other)
        COUNTS["launches"] += 1
        self._values = function(one, two) if one.ndim else self._values
        if not one.ndim:
            one[...] = function(one, two)
        return self

    return call


def _reader(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Array) -> Any:
        COUNTS["reads"] += 1
        return function(self._values)

    return call


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Array) -> Array:
        COUNTS["launches"] += 1
        return self.made(function(*on_current_device(self)))

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "and", "or"):
    _function = getattr(operator, f"{_name}_" if _name in {"and", "or"} else _name)
    setattr(Array, f"__{_name}__", _binary(_function))
    setattr(Array, f"__r{_name}__", _binary(_function, swapped=True))
    setattr(Array, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Array, f"__{_name}__", _binary(getattr(operator, _name)))
for _name, _function in {"bool": bool, "int": int, "float": float, "complex": complex}.items():
    setattr(Array, f"__{_name}__", _reader(_function))
for _name in ("neg", "abs", "invert"):
    setattr(Array, f"__{_name}__", _unary(getattr(operator, _name)))
