# SPDX-License-Identifier: MIT
"""Arrays of any library: functions written with the hooks of its backend,
and that of those without a file.

These may lie on any device: NumPy may not read it, it may have no float64, and arrays of two may
not be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cached_property, wraps
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import is_lazy_array, to_device
from numpy.lib.array_utils import byte_bounds

from uniclip.backends.base import (
    NUMPY,
    PIECE,
    Array,
    Axes,
    Backend,
    Facts,
    Memory,
    Terms,
    operand,
    times,
)

View: TypeAlias = np.ndarray[Any, Any]
"""An array of NumPy that stands for the memory of one of any framework."""

_MAKERS = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")
"""The functions of the standard that make arrays of something else."""
_HOME: ContextVar[Any] = ContextVar("home", default=None)
"""The device on which they do, ``None`` for the library's default."""
_LAUNCH = 2**24
"""How many entries of an array are processed at a time on an accelerator,
where each operation has to be launched.
"""
_CPU = 1
"""The number of the CPU in DLPack."""


def from_numpy(backend: Backend, array: Any, like: Array) -> Array:
    """Return values of NumPy as a plain array of a library, on the device of another one."""
    return backend.from_host(np.asarray(array), backend.device(like))


def surely(backend: Backend, flag: Array) -> bool:
    """Whether a flag can be read, and is true."""
    return backend.readable(flag) and bool(flag)


def surely_ordered(backend: Backend, low: Array, high: Array) -> bool:
    """Whether arrays are in order, as far as both can be read."""
    return not (backend.readable(low) and backend.readable(high)) or bool(
        backend.xp.all(low <= high)
    )


def broadcasts(shape: Any, to: Any, *, one: bool = True) -> bool:
    """Whether an array of ``shape`` broadcasts to shape ``to``, as far as they are known."""
    if _rank_is_unknown(shape, to):
        return True
    pairs = zip(reversed(tuple(shape)), reversed(tuple(to)), strict=False)
    return len(shape) <= len(to) and all(
        m == n or None in (m, n) or (one and m == 1) for m, n in pairs
    )


def same_shape(shape: Any, other: Any) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return _rank_is_unknown(shape, other) or (
        len(shape) == len(other) and broadcasts(shape, other, one=False)
    )


def _rank_is_unknown(*shapes: Any) -> bool:
    return None in {getattr(shape, "rank", 0) for shape in shapes}


def refuse_shape(name: str, array: Any, norms: Any) -> None:
    """Refuse limits, or a given norm, whose shape does not fit the norms."""
    if len(array.shape) and not broadcasts(array.shape, norms.shape):
        shapes = f"{tuple(array.shape)} does not fit norms of shape {tuple(norms.shape)}"
        msg = f"a {name} of shape {shapes}; give one number"
        raise ValueError(msg)


def overlaps_itself(view: View) -> bool:
    """Whether several entries may share memory, as those of a broadcast array do."""
    end = view.itemsize
    for stride, n in sorted(
        (abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1
    ):
        if stride < end:
            return view.size > 0
        end += stride * (n - 1)
    return False


def overlapping(views: dict[int, View]) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each array whose stretch of memory overlaps that of one before:
    the smaller one first.
    """
    last, end = 0, 0
    for start, stop, number in sorted(
        [(*byte_bounds(view), number) for number, view in views.items()]
    ):
        if start < end:
            yield min(last, number), max(last, number)
        if stop > end:
            last, end = number, stop


class Address:
    """Memory as NumPy sees it, for its address only; the contents are never read."""

    def __init__(
        self, start: int, shape: Sequence[int], strides: Sequence[int] | None, size: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            # An empty array has no address, which NumPy up to 2.1 does not take.
            "data": (start or 1, True),
            "shape": tuple(shape),
            "strides": None if strides is None else tuple(strides),
            "typestr": f"|V{size}",
        }


class _Device(NamedTuple):
    """A device that a library's arrays lie on."""

    device: Any
    argument: dict[str, Any]
    """That of functions that make arrays there."""
    double: bool
    """Whether it has float64."""
    host: bool
    """Whether NumPy reads its memory, which is not known to lie elsewhere."""


def _look_at(xp: Any, device: Any) -> _Device:
    """Return what a device of a library is like."""
    info, argument = (
        getattr(xp, "__array_namespace_info__", None),
        {} if device is None else {"device": device},
    )
    try:
        made = xp.zeros(1, dtype=xp.float32, **argument)
        host = isinstance(np.asarray(made), np.ndarray)
        host = host and (
            not hasattr(made, "__dlpack_device__") or made.__dlpack_device__()[0] == _CPU
        )
    except Exception:  # noqa: BLE001 - of any library
        host = False
    return _Device(
        device, argument, info is not None and "float64" in info().dtypes(**argument), host
    )


class Standard(Backend):
    """Any library that follows the array API standard.

    Parameters
    ----------
    xp : module
        Its namespace.
    writes : bool
        Whether arrays can be changed in place.
    """

    def __init__(self, xp: Any, *, writes: bool) -> None:
        makers = {name: _make_at_home(getattr(xp, name)) for name in _MAKERS if hasattr(xp, name)}
        super().__init__(SimpleNamespace(**(vars(xp) | makers)))
        self.library, self.writes = xp, writes
        self.records = hasattr(xp, "stop_gradient")
        """Whether it may record derivatives; then it may be lazy, too."""
        self._met: dict[str, _Device] = {}

    def kinds(self, leaves: list[Any]) -> Any:
        return tuple([leaf if leaf is None else (type(leaf), *_place(leaf)) for leaf in leaves])

    def facts(self, arrays: list[Array]) -> Facts:
        double = all([self._device_of(array).double for array in arrays])
        return Facts(traced=False, reads=False, records=self.records, double=double)

    def device(self, array: Array) -> str:
        device = getattr(array, "device", None)  # some libraries have none
        name = str(device)
        if name not in self._met:
            self._met[name] = _look_at(self.xp, device)
        return name

    def _device_of(self, array: Array) -> _Device:
        return self._met[self.device(array)]

    def from_host(self, array: np.ndarray[Any, Any], device: str) -> Array:
        at = self._met[device]
        narrow = array.dtype == np.float64 and not at.double
        return self.xp.asarray(array.astype(np.float32) if narrow else array, **at.argument)

    def to_host(self, arrays: list[Array]) -> list[np.ndarray[Any, Any]]:
        if all([self._device_of(array).host for array in arrays]):
            return super().to_host(arrays)
        values: list[Any] = [None] * len(arrays)
        places = list(map(_place, arrays))
        for place in set(places):
            numbers = [number for number, other in enumerate(places) if other == place]
            with self.quiet(arrays[numbers[0]]):
                flat = _read(
                    self.xp.concat([self.xp.reshape(arrays[number], (-1,)) for number in numbers])
                )
            ends = list(accumulate([math.prod(arrays[number].shape) for number in numbers]))
            for number, piece in zip(numbers, np.split(flat, ends[:-1]), strict=True):
                values[number] = piece.reshape(arrays[number].shape)
        return values

    def to_device_of(self, other: Array, array: Array) -> Array:
        name = self.device(other)
        return array if self.device(array) == name else to_device(array, self._met[name].device)

    def quiet(self, first: Array | None = None) -> AbstractContextManager[Any]:
        device = getattr(first, "device", None)
        return super().quiet() if device is None else _at_home(device)

    def sums(self, mode: int, terms: Terms) -> list[Array]:
        if terms.axes is None or self.facts(terms.arrays).double:
            return super().sums(mode, terms)
        every = [self._in_rows(array, axes, unit) for array, _, axes, unit in terms.each()]
        arrays, axes, units = map(list, zip(*every, strict=True))
        return super().sums(
            mode, terms._replace(arrays=arrays, axes=axes, units=terms.units and units)
        )

    def _in_rows(self, array: Array, axes: Axes, unit: Any) -> tuple[Array, Axes, Any]:
        """Return an array whose last axis are those that are added:
        along others float32 is added one by one.
        """
        kept = tuple([axis for axis in range(len(array.shape)) if axes and axis not in axes])
        if not axes or axes[0] == len(kept):
            return array, axes, unit
        lengths = [array.shape[axis] for axis in kept]
        # A copy, of rows.
        flat = self.xp.reshape(self.xp.permute_dims(array, (*kept, *axes)), (-1,))
        rows = self.xp.reshape(flat, (*lengths, math.prod([array.shape[axis] for axis in axes])))
        return rows, (len(kept),), None if unit is None else self.xp.reshape(unit, (*lengths, 1))

    def piece(self, array: Array) -> int:
        return PIECE if self._device_of(array).host else _LAUNCH

    def multiply(
        self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[Array]:
        if zero or not in_place:
            return super().multiply(arrays, factors, in_place=in_place, zero=zero)
        for array, factor in zip(arrays, factors, strict=True):
            by = operand(self, array, factor)
            product = array
            if by.dtype == array.dtype and self.xp.isdtype(array.dtype, "real floating"):
                product *= by  # the array itself where a library can, without a copy
            else:
                product = times(self.xp, array, by, zero)
            if product is not array:
                array[...] = product
        return arrays

    def memory(self, leaves: list[Any]) -> list[Memory] | None:
        if not self.writes:
            return super().memory(leaves)
        return [(_view(leaf) if self._has_views else None, None) for leaf in leaves]

    @cached_property
    def _has_views(self) -> bool:
        """Whether a part of an array shares its memory,
        which is not known of a library before it is tried.
        """
        whole = self.xp.zeros(2)
        part = whole[:1]
        part[...] = self.xp.ones(1)
        return bool(whole[0] == 1)

    def write(self, array: Any, function: Callable[..., Any], *operands: Any) -> None:
        array[...] = function(array, *operands)

    def cond(
        self, ok: Array, usual: Callable[[], list[Array]], rare: Callable[[], list[Array]]
    ) -> list[Array]:
        if self.records or is_lazy_array(ok):
            return super().cond(ok, usual, rare)
        # Waits for the norms, where `rare` reads the gradients twice.
        return usual() if bool(ok) else rare()


def _place(array: Any) -> tuple[str, str]:
    """Return dtype and device of an array by name,
    since not every library's objects can be compared.
    """
    return str(getattr(array, "dtype", None)), str(getattr(array, "device", None))


def _read(vector: Any) -> np.ndarray[Any, Any]:
    """Return the values of a vector on an accelerator, by the first way that its library has."""
    for read in (
        lambda: np.asarray(to_device(vector, "cpu")),
        lambda: np.from_dlpack(vector, device="cpu"),
    ):
        with suppress(Exception):
            return read()
    return np.asarray([float(vector[number]) for number in range(vector.shape[0])])


def _make_at_home(make: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function that makes arrays on the device of the step,
    where none is given and no array is converted.
    """

    @wraps(make)
    def made(*args: Any, **options: Any) -> Array:
        home = _HOME.get()
        if home is not None and options.get("device") is None:
            known = (
                args and hasattr(args[0], "__array_namespace__") and not isinstance(args[0], NUMPY)
            )
            options |= {} if known else {"device": home}
        return make(*args, **options)

    return made


@contextmanager
def _at_home(device: Any) -> Iterator[None]:
    """Make arrays on a device; some are contexts themselves, as CuPy's."""
    context = hasattr(device, "__enter__")
    token = _HOME.set(None if context else device)
    try:
        with np.errstate(all="ignore"), device if context else nullcontext():
            yield
    finally:
        _HOME.reset(token)


def _view(leaf: Any) -> View | None:
    """Return a NumPy array of an array's memory, ``None`` if it is unknown."""
    told = getattr(leaf, "__cuda_array_interface__", None)
    if told is not None:
        size = np.dtype(told["typestr"]).itemsize
        return np.asarray(Address(told["data"][0], told["shape"], told.get("strides"), size))
    with suppress(Exception):  # of any library
        return np.from_dlpack(leaf)
    return None
