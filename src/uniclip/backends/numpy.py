# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import mul
from types import SimpleNamespace
from typing import Any

import numpy as np

from uniclip.backends.base import PIECE, Array, Backend
from uniclip.backends.host import WIDE, squares, squares_along, walk
from uniclip.backends.memory import InPlace
from uniclip.backends.processes import Processes

_NOT_NUMPYS = 2
"""The value of ``dtype.isbuiltin`` for other packages' types, some of whose kinds are NumPy's."""


def _isdtype(dtype: Any, kind: str) -> bool:
    """Answer as NumPy does, and False for the dtypes of ml_dtypes, about which NumPy raises."""
    return isinstance(dtype, np.dtype) and dtype.isbuiltin != _NOT_NUMPYS and np.isdtype(dtype, kind)


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype}))


def _scaled(array: Array, factor: Any, *, in_place: bool) -> Array:
    if array.itemsize >= WIDE:
        return np.multiply(array, factor, out=array if in_place else None)
    array = array if in_place else array.copy("K")  # avoids a wide copy of all of it
    with walk([array], "readwrite") as pieces:
        for piece in pieces:
            piece[...] = piece * np.float32(factor)
    return array


class _InPlace(InPlace):
    writes = True

    def memory(self, leaf: Any) -> tuple[Any, str | None]:
        if not isinstance(leaf, np.ndarray):
            return None, "a scalar never changes"
        return leaf, None if leaf.flags.writeable else "it is read-only"

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:  # noqa: ARG002
        with walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)


class _Processes(Processes):
    def reduction_dtype(self, dtype: Any, array: Any) -> Any:  # noqa: ARG002
        return np.promote_types(dtype, np.float64)


class _NumPy(Backend):
    in_place = _InPlace()
    processes = _Processes()

    def is_array(self, leaf: Any) -> bool:
        # A matrix product is not elementwise, and whether masked entries count is undefined.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, (np.ndarray, np.generic)):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        name = leaf.dtype.name if leaf.dtype.type.__module__ == "ml_dtypes" else ""
        floats = "float" in name and not name.endswith("e8m0fnu")
        return leaf.dtype.kind in "iufc" or floats

    def plain(self, leaves: list[Any], *, gradient: bool = True) -> bool:  # noqa: ARG002
        return all([type(leaf) is np.ndarray and leaf.dtype.kind in "fc" and leaf.dtype.isnative for leaf in leaves])

    def apart(self, leaves: list[Any]) -> bool:
        # Arrays that own their memory do not share it.
        owners = all(leaf.base is None and leaf.flags.owndata and leaf.flags.writeable for leaf in leaves)
        return owners and len(set(map(id, leaves))) == len(leaves)

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        return True

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:
        return np.asarray(array)

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:  # noqa: ARG002
        return array[()] if array.ndim == 0 else array

    def squares(self, arrays: list[Array], lengths: list[int]) -> Array | None:
        return squares(arrays, lengths)

    def squares_along(self, arrays: list[Array], axes: list[Any]) -> list[Array | None]:
        return list(map(squares_along, arrays, axes))

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool) -> list[Array] | None:
        if not in_place and all([array.itemsize >= WIDE for array in arrays]):
            return list(map(mul, arrays, factors))  # a Python number keeps the dtype
        return [_scaled(array, factor, in_place=in_place) for array, factor in zip(arrays, factors, strict=True)]

    def pieces(self, array: Array) -> Iterable[Array] | None:
        return walk([array], "readonly") if array.size > PIECE else None

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        if axes is None or array.dtype != np.float32:
            return np.sum(array, axis=axes)
        # NumPy's accurate pairwise sum is used only over the whole of an array.
        return np.sum(array, axis=axes, dtype=np.float64).astype(np.float32)


BACKEND = _NumPy(namespace)
