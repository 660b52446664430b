# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from uniclip.backends.base import PIECE, Array, Backend


def _isdtype(dtype: Any, kind: str) -> bool:
    """Answer as NumPy does, and False for the dtypes of ml_dtypes, about which NumPy raises."""
    return isinstance(dtype, np.dtype) and dtype.kind != "V" and np.isdtype(dtype, kind)


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype}))


_REAL = {"e", "f", "d"}
_WIDE = 4
"""How many bytes an entry has that is precise enough to add and multiply in."""


def _walk(arrays: list[Array], access: str, dtypes: list[Any] | None = None) -> Any:
    """Walk through arrays that broadcast together, in pieces; one that does not lie in a row goes through a buffer."""
    # What an operand shares with the array that is to be changed is copied first, unless entry lies on entry.
    operands = [
        [access, "overlap_assume_elementwise"],
        *[["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1),
    ]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(  # type: ignore[call-overload]
        arrays, flags, operands, dtypes, order="K", casting="same_kind", buffersize=PIECE
    )


def _squares(array: Array) -> Any:
    """Return ``Σx²`` of real entries, by BLAS in pieces: it adds float32 entries in float32."""
    if array.size <= PIECE and array.itemsize >= _WIDE:
        flat = array.ravel("K")
        return flat.dot(flat)
    wide = np.result_type(array.dtype, np.float32)
    with _walk([array], "readonly", [wide]) as pieces:
        return sum(float(piece.dot(piece)) for piece in pieces)


def _scaled(array: Array, factor: Any, *, in_place: bool) -> Array:
    if array.itemsize >= _WIDE:  # a number of Python's leaves the dtype as it is
        return np.multiply(array, float(factor), out=array if in_place else None)
    with _walk([array], "readwrite") as pieces:
        for piece in pieces:
            piece[...] = piece * np.float32(factor)
    return array


class _NumPy(Backend):
    def is_array(self, leaf: Any) -> bool:
        # The product of matrices is not that of their entries, and what masked entries count is not said.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, (np.ndarray, np.generic)):
            return False
        floats = leaf.dtype.type.__module__ == "ml_dtypes" and "float" in leaf.dtype.name
        return leaf.dtype.kind in "iufc" or floats

    def plain(self, leaves: list[Any]) -> bool:
        for leaf in leaves:  # not all(), which takes three times as long for one leaf
            if type(leaf) is not np.ndarray or leaf.dtype.kind not in "fc":
                return False
        return True

    def apart(self, leaves: list[Any]) -> bool:
        # Arrays that own their memory do not share it.
        owners = all(leaf.base is None and leaf.flags.owndata and leaf.flags.writeable for leaf in leaves)
        return owners and len(set(map(id, leaves))) == len(leaves)

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        return True

    def number(self, array: Array) -> Any:
        return array[()] if array.ndim == 0 else None

    def array_of(self, number: Any, like: Array) -> Array:  # noqa: ARG002
        return number

    def squares(self, arrays: list[Array]) -> Array | None:
        kinds = {array.dtype.char for array in arrays}
        if not kinds <= _REAL:
            return None
        total = sum([_squares(array) for array in arrays])
        return np.float64(total) if "d" in kinds else np.float32(total)

    def scaled(self, arrays: list[Array], factor: Any, *, in_place: bool) -> list[Array] | None:
        if any(array.itemsize < _WIDE for array in arrays) and not in_place:
            arrays, in_place = [array.copy("K") for array in arrays], True  # no wide copy of all of it
        return [_scaled(array, factor, in_place=in_place) for array in arrays]

    def large(self, array: Array) -> bool:
        return bool(array.size > PIECE)

    def pieces(self, array: Array) -> Iterable[Array]:
        pieces: Iterable[Array] = _walk([array], "readonly")
        return pieces

    def why_fixed(self, leaf: Any) -> str | None:
        if not isinstance(leaf, np.ndarray):
            return "a scalar never changes"
        return None if leaf.flags.writeable else "it is read-only"

    def memory(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, np.ndarray) else None

    def write(self, leaf: Any, array: Array, function: Callable[..., Array], *operands: Array) -> None:  # noqa: ARG002
        with _walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)

    def sum(self, array: Array, axes: tuple[int, ...] | None) -> Array:
        if axes is None or array.dtype != np.float32:
            return np.sum(array, axis=axes)
        # NumPy adds pairwise, which is accurate, only over the whole of an array.
        return np.sum(array, axis=axes, dtype=np.float64).astype(np.float32)


BACKEND = _NumPy(namespace)
