# SPDX-License-Identifier: MIT
"""NumPy arrays and scalars; nothing is needed but to say that their values can be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from uniclip.backends.base import Backend


def _isdtype(dtype: Any, kind: str) -> bool:
    """Answer as NumPy does, and False for the dtypes of ml_dtypes, about which NumPy raises."""
    return isinstance(dtype, np.dtype) and dtype.kind != "V" and np.isdtype(dtype, kind)


def _sum(x: Any, /, *, axis: int | tuple[int, ...] | None = None) -> Any:
    """Sum in float64 along axes: NumPy adds pairwise, which is accurate, only over the whole of an array."""
    if axis is None or x.dtype != np.float32:
        return np.sum(x, axis=axis)
    return np.sum(x, axis=axis, dtype=np.float64).astype(np.float32)


namespace = SimpleNamespace(**(vars(np) | {"isdtype": _isdtype, "sum": _sum}))


class _NumPy(Backend):
    def is_array(self, leaf: Any) -> bool:
        if isinstance(leaf, np.ma.MaskedArray) or not isinstance(leaf, (np.ndarray, np.generic)):
            return False
        return leaf.dtype.kind in "iufc" or leaf.dtype.type.__module__ == "ml_dtypes"

    def readable(self, array: Any) -> bool:  # noqa: ARG002
        return True


BACKEND = _NumPy(namespace)
