# SPDX-License-Identifier: MIT
"""Functions for arrays of any library, and the backend of array API libraries without a module.

It is not for libraries that need code of their own. Nothing here assumes that NumPy can read an
array, that its device has float64, or that arrays of two devices can be mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cached_property, wraps
from itertools import accumulate
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import is_lazy_array, is_writeable_array, to_device
from numpy.lib.array_utils import byte_bounds

from uniclip._types import Axes, Device, DType, Namespace, Tensor, View
from uniclip.backends.arithmetic import PIECE, cut, power_sum, times
from uniclip.backends.base import (
    NUMPY,
    ArrayFacts,
    Backend,
    Storage,
    Terms,
    operand,
    stack_terms,
    take,
)

Shape: TypeAlias = Iterable[Any]
"""The lengths of axes. TensorFlow has ``None`` for an unknown one, and shapes of unknown rank."""

_MAKERS = ("arange", "asarray", "empty", "eye", "full", "linspace", "ones", "zeros")
"""The functions of the standard that make arrays from other objects."""
_STEP_DEVICE: ContextVar[_Device | None] = ContextVar("step_device", default=None)
"""The device on which they do so during a step, ``None`` for the library's default."""
_ACCELERATOR_PIECE = 2**24
"""The number of elements of an array that are processed at a time on an accelerator,
where each operation has to be launched.
"""
_CPU = 1
"""The number of the CPU in DLPack."""


def from_numpy(backend: Backend, array: View | np.generic, like: Tensor) -> Tensor:
    """Return values of NumPy as an array of a library, on the device of another one."""
    return backend.from_host(np.asarray(array), backend.device(like))


def known_true(backend: Backend, flag: Tensor) -> bool:
    """Return whether a flag can be read, and is true."""
    return backend.readable(flag) and bool(flag)


def known_ordered(backend: Backend, low: Tensor, high: Tensor) -> bool:
    """Return whether arrays are in order, as far as both can be read."""
    if not (backend.readable(low) and backend.readable(high)):
        return True
    return bool(backend.xp.all(low <= high))


def broadcasts(shape: Shape, to: Shape, *, one: bool = True) -> bool:
    """Return whether an array of ``shape`` broadcasts to shape ``to``, as far as they are known.

    If ``one`` is false, axes of length 1 do not.
    """
    if _rank_is_unknown(shape, to):
        return True
    lengths = tuple(shape)
    target = tuple(to)
    if len(lengths) > len(target):
        return False

    for m, n in zip(reversed(lengths), reversed(target), strict=False):
        is_unknown = m is None or n is None
        if not (m == n or is_unknown or (one and m == 1)):
            return False
    return True


def same_shape(shape: Shape, other: Shape) -> bool:
    """Return whether two shapes are equal as far as they are known."""
    if _rank_is_unknown(shape, other):
        return True
    return len(tuple(shape)) == len(tuple(other)) and broadcasts(shape, other, one=False)


def _rank_is_unknown(*shapes: Shape) -> bool:
    """Return whether a shape is one of TensorFlow's without a rank."""
    return None in {getattr(shape, "rank", 0) for shape in shapes}


def check_shape(name: str, array: Tensor, norms: Tensor) -> None:
    """Check that the shape of limits, or of a norm argument, fits the norms."""
    if len(array.shape) == 0 or broadcasts(array.shape, norms.shape):
        return
    msg = (
        f"the {name} has shape {tuple(array.shape)}, which does not broadcast to the norms' shape "
        f"{tuple(norms.shape)}; use one number, or one for each norm"
    )
    raise ValueError(msg)


def overlaps_itself(view: View) -> bool:
    """Return whether several elements may share memory, as those of a broadcast array do."""
    axes = zip(view.strides, view.shape, strict=True)
    strided = sorted((abs(stride), length) for stride, length in axes if length > 1)
    # From the smallest on, each stride has to step over all elements before it.
    end = view.itemsize
    for stride, length in strided:
        if stride < end:
            return view.size > 0
        end += stride * (length - 1)
    return False


def overlapping(views: dict[int, View]) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each array whose memory range overlaps that of one before:
    the smaller one first.
    """
    # In the order of addresses one pass finds overlaps, without a test of each pair.
    ranges = sorted([(*byte_bounds(view), number) for number, view in views.items()])
    last = 0
    end = 0
    for start, stop, number in ranges:
        if start < end:
            yield min(last, number), max(last, number)
        if stop > end:
            last = number
            end = stop


class Address:
    """Memory as NumPy sees it, for its address only; the contents are never read."""

    def __init__(
        self, start: int, shape: Sequence[int], strides: Sequence[int] | None, size: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            # An empty array has no address, and NumPy up to 2.1 does not accept 0.
            "data": (start or 1, True),
            "shape": tuple(shape),
            "strides": None if strides is None else tuple(strides),
            "typestr": f"|V{size}",
        }


class _Device(NamedTuple):
    """A device of a library, and its abilities."""

    device: Any
    """``None`` if the library has no devices."""
    options: dict[str, Any]
    """The keyword that makes an array on it."""
    has_float64: bool
    on_host: bool
    """Whether NumPy reads its arrays at no cost."""

    @property
    def is_context(self) -> bool:
        """Whether arrays are made on it by entering it, as CuPy's devices."""
        return hasattr(self.device, "__enter__")


def _inspect_device(xp: Namespace, device: Device) -> _Device:
    """Find out the abilities of a device, on an array of one element."""
    options = {} if device is None else {"device": device}
    info = getattr(xp, "__array_namespace_info__", None)
    has_float64 = info is not None and "float64" in info().dtypes(**options)
    try:
        array = xp.zeros(1, dtype=xp.float32, **options)
        on_host = isinstance(np.asarray(array), np.ndarray)
        # NumPy may read the memory of an accelerator, too, but has to wait for it.
        if hasattr(array, "__dlpack_device__"):
            on_host = on_host and array.__dlpack_device__()[0] == _CPU
    except Exception:  # noqa: BLE001 - of any library
        on_host = False
    return _Device(device, options, has_float64, on_host)


class _Namespace:
    """A namespace whose functions make arrays on the device of the step."""

    def __init__(self, library: Namespace) -> None:
        self.__dict__["_library"] = library

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__dict__["_library"], name)
        if name in _MAKERS:
            attribute = _make_on_step_device(attribute)
        # Python calls this method for missing names only, so each is looked up once.
        self.__dict__[name] = attribute
        return attribute


def _make_on_step_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes arrays on the device of the step,
    unless a device is given or an array is converted.
    """

    @wraps(make)
    def make_there(*args: Any, **options: Any) -> Tensor:
        # A device that was entered as a context applies already, and needs no keyword.
        target = _STEP_DEVICE.get()
        if target is None or target.is_context or options.get("device") is not None:
            return make(*args, **options)

        # An array stays on its own device.
        if args and hasattr(args[0], "__array_namespace__") and not isinstance(args[0], NUMPY):
            return make(*args, **options)
        return make(*args, **options | target.options)

    return make_there


@contextmanager
def _on_device(device: _Device) -> Iterator[None]:
    """Make arrays on a device, without NumPy's floating-point warnings."""
    token = _STEP_DEVICE.set(device)
    try:
        with np.errstate(all="ignore"), device.device if device.is_context else nullcontext():
            yield
    finally:
        _STEP_DEVICE.reset(token)


class Standard(Backend[Tensor]):
    """Any library that follows the array API standard.

    Parameters
    ----------
    library : module
        Its namespace.
    """

    writes = True
    """Arrays of some classes cannot be written: see `storage`."""

    def __init__(self, library: Namespace) -> None:
        super().__init__(_Namespace(library))
        self.library = library
        self.may_record = hasattr(library, "stop_gradient")
        """Whether it may record derivatives. Then it may be lazy, too."""
        self._devices: dict[Device, _Device] = {}
        """By name, since devices need be neither hashable nor unique."""
        self._lazy: dict[type, bool] = {}
        """Whether arrays of a class may have no values yet."""

    def signature(self, leaves: list[Any]) -> tuple[Any, ...] | None:
        return tuple([leaf if leaf is None else (type(leaf), *_place(leaf)) for leaf in leaves])

    def array_facts(self, arrays: list[Tensor]) -> ArrayFacts:
        double = all([self._device_of(array).has_float64 for array in arrays])
        return ArrayFacts(traced=False, reads=False, records=self.may_record, double=double)

    # Where arrays are.

    def device(self, array: Tensor | None) -> str:
        # Some libraries have no devices.
        device = getattr(array, "device", None)
        name = str(device)
        if name not in self._devices:
            self._devices[name] = _inspect_device(self.library, device)
        return name

    def _device_of(self, array: Tensor) -> _Device:
        return self._devices[self.device(array)]

    def _are_there(self, arrays: Sequence[Tensor]) -> bool:
        """Return whether all arrays are on the device of the step."""
        target = _STEP_DEVICE.get()
        return target is None or all([self._device_of(array) is target for array in arrays])

    def computation_context(self, first: Tensor | None = None) -> AbstractContextManager[Any]:
        if first is None:
            return super().computation_context()
        return _on_device(self._device_of(first))

    def from_host(self, array: View, device: Device) -> Tensor:
        target = self._devices[device]
        if array.dtype == np.float64 and not target.has_float64:
            array = array.astype(np.float32)
        with _on_device(target):
            return self.xp.asarray(array)

    def to_device_of(self, like: Tensor, array: Tensor) -> Tensor:
        return self._move(array, self._device_of(like))

    def _move(self, array: Tensor, target: _Device) -> Tensor:
        """Return an array on a device, in float32 if that has no wider floats."""
        source = self._device_of(array)
        if source is target:
            return array
        if source.has_float64 and not target.has_float64:
            array = self._narrow(array, source)
        return to_device(array, target.device)

    def _narrow(self, array: Tensor, source: _Device) -> Tensor:
        """Return an array in a dtype that a device without float64 has."""
        narrow = _NARROW.get(_dtype_name(array.dtype))
        if narrow is None:
            return array
        with _on_device(source):
            return self.xp.astype(array, getattr(self.xp, narrow))

    def to_host(self, arrays: list[Tensor]) -> list[View]:
        if all([self._device_of(array).on_host and not self._is_lazy(array) for array in arrays]):
            return super().to_host(arrays)

        # One transfer for each dtype and device.
        values: list[Any] = [None] * len(arrays)
        places = list(map(_place, arrays))
        for place in set(places):
            numbers = [number for number in range(len(arrays)) if places[number] == place]
            together = self._read_together(take(arrays, numbers))
            for number, array in zip(numbers, together, strict=True):
                values[number] = array
        return values

    def _read_together(self, arrays: list[Tensor]) -> list[View]:
        """Return the values of arrays of one dtype and device."""
        with self.computation_context(arrays[0]):
            flat = [self.xp.reshape(array, (-1,)) for array in arrays]
            joined = flat[0] if len(flat) == 1 else self.xp.concat(flat)
            vector = self._read(joined)

        shapes = [tuple(array.shape) for array in arrays]
        ends = list(accumulate(map(math.prod, shapes)))
        pieces = np.split(vector, ends[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _read(self, vector: Any) -> View:
        """Return the values of a vector, by the first way that its library has."""
        if self._device_of(vector).on_host:
            return np.asarray(vector)
        if self._host_device is not None:
            return np.asarray(to_device(vector, self._host_device.device))
        if hasattr(vector, "get"):
            return np.asarray(vector.get())
        # Exceptions of any library; the last way needs the standard alone.
        with suppress(Exception):
            return np.from_dlpack(vector, device="cpu", copy=True)

        convert = self._converter_of(vector.dtype)
        numbers = [convert(vector[number]) for number in range(vector.shape[0])]
        return np.asarray(numbers, dtype=getattr(np, _dtype_name(vector.dtype), None))

    def _converter_of(self, dtype: DType) -> type[complex]:
        """Return the class of Python numbers for elements of a dtype."""
        for kind, number_class in _CONVERTERS:
            if self.xp.isdtype(dtype, kind):
                return number_class
        return float

    @cached_property
    def _host_device(self) -> _Device | None:
        """The device of the library that NumPy reads, ``None`` if it names none."""
        info = getattr(self.library, "__array_namespace_info__", None)
        if info is None:
            return None
        named = [device for device in info().devices() if device is not None]
        devices = [_inspect_device(self.library, device) for device in named]
        return next((device for device in devices if device.on_host), None)

    def _is_lazy(self, array: Tensor) -> bool:
        """Return whether arrays of a class may have no values yet.

        array-api-compat may read an array to find out, and wait for it, so ask once for each class.
        """
        if type(array) not in self._lazy:
            self._lazy[type(array)] = is_lazy_array(array)
        return self._lazy[type(array)]

    # Sums and products.

    def sums(self, mode: int, terms: Terms) -> list[Tensor]:
        if terms.axes is not None and not self.array_facts(terms.arrays).double:
            terms = self._with_summed_axes_last(terms)
        if self._are_there(terms.arrays):
            return super().sums(mode, terms)

        # Each sum is computed on the device of its array, and moved.
        target = _STEP_DEVICE.get()
        sums = []
        for array, p, axes in terms.by_array():
            with self.computation_context(array):
                total = power_sum(self, array, p, axes)
            sums.append(total if target is None else self._move(total, target))
        return stack_terms(self, sums, terms)

    def _with_summed_axes_last(self, terms: Terms) -> Terms:
        """Return the terms with the axes that are added last in each array.

        Along others libraries add one by one, and float32 loses digits.
        """
        arrays = []
        axes = []
        for array, _, along in terms.by_array():
            rows, last = self._move_axes_last(array, along)
            arrays.append(rows)
            axes.append(last)
        return terms._replace(arrays=arrays, axes=axes)

    def _move_axes_last(self, array: Tensor, axes: Axes) -> tuple[Tensor, Axes]:
        """Return an array with a row for each sum, and its axis."""
        if not axes:
            return array, axes
        shape = tuple(array.shape)
        kept = tuple([axis for axis in range(len(shape)) if axis not in axes])
        if axes[0] == len(kept):
            return array, axes

        # Flattened first: libraries need not copy a permuted array to reshape it.
        with self.computation_context(array):
            flat = self.xp.reshape(self.xp.permute_dims(array, (*kept, *axes)), (-1,))
            lengths = take(shape, kept)
            rows = self.xp.reshape(flat, (*lengths, math.prod(take(shape, axes))))
        return rows, (len(kept),)

    def pieces(self, array: Tensor, axes: Axes = None) -> Iterable[Tensor] | None:
        size = PIECE if self._device_of(array).on_host else _ACCELERATOR_PIECE
        return cut(self.xp, array, axes, size)

    def multiply(
        self, arrays: list[Tensor], factors: Sequence[Any], *, in_place: bool, zero: bool
    ) -> list[Tensor]:
        multiply = self._multiply_in_place if in_place else self._multiply
        if self._are_there(arrays):
            return [multiply(*pair, zero) for pair in zip(arrays, factors, strict=True)]
        products = []
        for array, factor in zip(arrays, factors, strict=True):
            with self.computation_context(array):
                products.append(multiply(array, factor, zero))
        return products

    def _multiply(self, array: Tensor, factor: float | Tensor, zero: bool) -> Tensor:
        """Return a product."""
        return times(self.xp, array, operand(self, array, factor), zero)

    def _multiply_in_place(self, array: Any, factor: float | Tensor, zero: bool) -> Tensor:
        """Write a product into the array."""
        by = operand(self, array, factor)
        if zero or by.dtype != array.dtype or not self.xp.isdtype(array.dtype, "real floating"):
            array[...] = times(self.xp, array, by, zero)
            return array

        # Some libraries change the array itself by `*=`, and make no copy.
        product = array
        product *= by
        if product is not array:
            array[...] = product
        return array

    def cond(
        self, ok: Tensor, usual: Callable[[], list[Tensor]], rare: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        if self.may_record or self._is_lazy(ok):
            return super().cond(ok, usual, rare)
        # This is the one value that a step reads: `rare` would read the gradients twice more.
        return usual() if bool(ok) else rare()

    # Arrays that are changed in place.

    def storage(self, leaves: list[Any]) -> list[Storage] | None:
        return [self._storage_of_leaf(leaf) for leaf in leaves]

    def _storage_of_leaf(self, leaf: Any) -> Storage:
        with self.computation_context(leaf):
            if not is_writeable_array(leaf):
                return None, "arrays of this kind are immutable"
            return _storage_of(leaf) if self._has_views else (None, None)

    @cached_property
    def _has_views(self) -> bool:
        """Whether a slice of an array shares its memory. No library has a function for it."""
        whole = self.xp.zeros(2)
        part = whole[:1]
        part[...] = self.xp.ones(1)
        return bool(whole[0] == 1)

    def write(self, array: Any, function: Callable[..., Any], *operands: Any) -> None:
        with self.computation_context(array):
            array[...] = function(array, *operands)


_CONVERTERS = (("bool", bool), ("integral", int), ("complex floating", complex))
"""The classes of Python numbers for elements that are not real; `float` is for those that are."""


_NARROW = {"float64": "float32", "complex128": "complex64"}
"""The dtypes that a device without float64 has instead."""


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, without that of its library."""
    return str(dtype).rpartition(".")[2]


def _place(array: Tensor) -> tuple[str, str]:
    """Return dtype and device of an array by name,
    since not every library's objects can be compared.
    """
    return str(getattr(array, "dtype", None)), str(getattr(array, "device", None))


def _storage_of(leaf: Any) -> Storage:
    """Return a NumPy array at an array's place in memory, ``None`` if that is unknown;
    and why it cannot be written, if so.
    """
    interface = getattr(leaf, "__cuda_array_interface__", None)
    if interface is not None:
        start, read_only = interface["data"]
        size = np.dtype(interface["typestr"]).itemsize
        view = np.asarray(Address(start, interface["shape"], interface.get("strides"), size))
        return view, "it is read-only" if read_only else None

    # Exceptions of any library: without an address, arrays are compared as objects.
    with suppress(Exception):
        return np.from_dlpack(leaf), _reason_of_memory(leaf)
    return None, None


def _summarize(error: Exception) -> str:
    """Return an error of a library in a few words, for another message."""
    return shorten(f"{type(error).__name__}: {error}", 120)


def _reason_of_memory(leaf: Any) -> str | None:
    """Return why memory of the host cannot be written, by writing nothing into it."""
    try:
        if leaf.shape:
            leaf[:0, ...] = leaf[:0, ...]
        else:
            leaf[...] = leaf
    except Exception as error:  # noqa: BLE001 - of any library
        return f"it cannot be written ({_summarize(error)})"
    return None
