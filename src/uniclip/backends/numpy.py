# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import mul
from types import SimpleNamespace
from typing import Any

import numpy as np

from uniclip.backends.base import HOST, PIECE, Array, Axes, Backend, Blocks, Kinds
from uniclip.backends.host import UNDERFLOWN, WIDE, squares, squares_along, squares_of, walk
from uniclip.backends.memory import InPlace

_NOT_NUMPYS = 2
"""The value of ``dtype.isbuiltin`` for other packages' types, some of whose kinds are NumPy's."""


def _isdtype(dtype: Any, kind: str) -> bool:
    """Answer as NumPy does, and False for the dtypes of ml_dtypes, about which NumPy raises."""
    return isinstance(dtype, np.dtype) and dtype.isbuiltin != _NOT_NUMPYS and np.isdtype(dtype, kind)


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype}))


class _InPlace(InPlace):
    writes = True

    def memory(self, leaf: Any) -> tuple[Any, str | None]:
        if not isinstance(leaf, np.ndarray):
            return None, "a scalar never changes"
        return leaf, None if leaf.flags.writeable else "it is read-only"

    def disjoint(self, leaves: list[Any]) -> bool:
        # Arrays that own their memory do not share it.
        owners = all(
            [type(a) is np.ndarray and a.base is None and a.flags.owndata and a.flags.writeable for a in leaves]
        )
        return owners and len(set(map(id, leaves))) == len(leaves)

    def write(self, array: Array, function: Callable[..., Array], *operands: Array) -> None:
        with walk([array, *operands], "readwrite") as pieces:
            for piece, *others in pieces:
                piece[...] = function(piece, *others)


class _NumPy(Backend):
    in_place = _InPlace()

    def kinds(self, leaves: list[Any]) -> Any:
        return tuple([
            leaf.dtype
            if type(leaf) is np.ndarray
            else None if leaf is None else (type(leaf), getattr(leaf, "dtype", None))
            for leaf in leaves
        ])  # fmt: skip

    def is_array(self, leaf: Any) -> bool:
        # A matrix product is not elementwise, and whether masked entries count is undefined.
        if isinstance(leaf, (np.ma.MaskedArray, np.matrix)) or not isinstance(leaf, (np.ndarray, np.generic)):
            return False
        # A format of exponents alone has neither zero nor negative numbers.
        name = leaf.dtype.name if leaf.dtype.type.__module__ == "ml_dtypes" else ""
        floats = "float" in name and not name.endswith("e8m0fnu")
        return leaf.dtype.kind in "iufc" or floats

    def mode(self, kinds: Kinds) -> int:
        return HOST

    def doubles(self, arrays: list[Array]) -> bool:
        return True

    def readable(self, array: Array) -> bool:
        return True

    def viewed(self, array: Array) -> np.ndarray[Any, Any] | None:
        return np.asarray(array)

    def from_host(self, array: np.ndarray[Any, Any], device: Any) -> Array:
        return array[()] if array.ndim == 0 else array

    def squares(self, mode: int, arrays: list[Array], lengths: list[int]) -> Array | None:
        return squares(arrays, lengths)

    def sums(self, mode: int, arrays: list[Array], p: float, axes: list[Axes], units: Any, blocks: Blocks) -> list[Any]:
        if p != 2:
            return super().sums(mode, arrays, p, axes, units, blocks)
        wide = any(array.dtype.char in "dD" for array in arrays)  # then narrower ones are added as accurately
        arrays, by = list(map(np.asarray, arrays)), units or [None] * len(arrays)
        quick = [
            None if units or (wide and a.dtype.char == "f") else some for a, some in zip(arrays, axes, strict=True)
        ]
        found = squares_along(arrays, quick)
        rest = zip(found, arrays, axes, by, strict=True)
        return [self._squared(*some, wide=wide) if one is None else one for one, *some in rest]

    def _squared(self, array: Array, axes: Axes, unit: Any, *, wide: bool) -> Any:
        """Return ``Σ|x/unit|²`` of an array; it is 0 only if all entries are."""
        if unit is None and axes is None:
            return np.asarray(squares_of(array, wide))
        total = self.total(array, 2, axes, unit)
        if unit is None and array.dtype.char in "dD" and not total.all():
            return np.where((total == 0) & (self.total(array, np.inf, axes) > 0), UNDERFLOWN, total)
        return total

    def scaled(self, arrays: list[Array], factors: Sequence[Any], *, in_place: bool, zero: bool) -> list[Array]:
        plain = all([type(factor) is float and factor for factor in factors])
        if plain and not in_place and all([array.itemsize >= WIDE for array in arrays]):
            with np.errstate(all="ignore"):
                new = list(map(mul, arrays, factors))  # a Python number keeps the dtype
            return [a if a.dtype == b.dtype else a.astype(b.dtype) for a, b in zip(new, arrays, strict=True)]
        with np.errstate(all="ignore"):
            return [self._scaled(*pair, in_place=in_place, zero=zero) for pair in zip(arrays, factors, strict=True)]

    def _scaled(self, array: Array, factor: Any, *, in_place: bool, zero: bool) -> Array:
        exact = zero and bool(np.any(factor == 0))
        if array.itemsize < WIDE or exact or (array.dtype.kind == "c" and isinstance(factor, np.ndarray)):
            new = array if in_place else np.array(array, order="K")
            super().scaled([new], [factor], in_place=True, zero=exact)
            return new if isinstance(array, np.ndarray) else new[()]
        if in_place:
            return np.multiply(array, factor, out=array, casting="same_kind")
        new = array * factor  # a Python number keeps the dtype
        return new if new.dtype == array.dtype else new.astype(array.dtype)

    def pieces(self, array: Array) -> Iterable[Array] | None:
        return walk([array], "readonly") if array.size > PIECE else None


BACKEND = _NumPy(namespace)
