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


def _walk(arrays: list[Array], access: str) -> Any:
    """Walk through arrays that broadcast together, in pieces; one that does not lie in a row goes through a buffer."""
    # What an operand shares with the array that is to be changed is copied first, unless entry lies on entry.
    operands = [
        [access, "overlap_assume_elementwise"],
        *[["readonly", "overlap_assume_elementwise"]] * (len(arrays) - 1),
    ]
    flags = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    return np.nditer(arrays, flags, operands, order="K", buffersize=PIECE)  # type: ignore[call-overload]


class _NumPy(Backend):
    def is_array(self, leaf: Any) -> bool:
        # The product of matrices is not that of their entries, and what masked entries count is not said.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, (np.ndarray, np.generic)):
            return False
        floats = leaf.dtype.type.__module__ == "ml_dtypes" and "float" in leaf.dtype.name
        return leaf.dtype.kind in "iufc" or floats

    def readable(self, array: Array) -> bool:  # noqa: ARG002
        return True

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
