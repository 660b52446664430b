# SPDX-License-Identifier: MIT
"""What clipping is, in float64, of arrays of any size of numbers; nothing of uniclip is imported."""

from __future__ import annotations

from typing import Any

import numpy as np


def norm(values: Any, axis: int | None = None) -> Any:
    """Return √Σ|x|² of entries divided by the largest, so that no square leaves the range; NaN if one is not finite."""
    sizes = np.abs(np.asarray(values)).astype(np.float64)
    top = np.max(sizes, axis, keepdims=True, initial=0.0)
    unit = np.where((top == 0) | ~np.isfinite(top), 1.0, top)
    with np.errstate(invalid="ignore"):
        total = unit * np.sqrt(np.square(sizes / unit).sum(axis, keepdims=True))
    return np.where(np.isfinite(top), total, np.nan)[() if axis is not None else (0,) * sizes.ndim]


def shrunk(values: Any, size: Any, limit: float) -> np.ndarray:
    """Return the values times min(1, limit/size)."""
    values = np.asarray(values)
    below = (size <= limit) | np.isinf(limit)
    factor = np.where(below, 1.0, limit / np.where(below, 1.0, size))
    return values.astype(np.result_type(values.dtype, np.float64)) * factor


def together(leaves: list[Any]) -> np.ndarray:
    """Return all entries in one row."""
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def by_global_norm(leaves: list[Any], limit: float) -> list[np.ndarray]:
    """Clip all leaves by one norm."""
    return [shrunk(leaf, norm(together(leaves)), limit) for leaf in leaves]


def by_norm(leaf: Any, limit: float, axis: int | None = None, size_power: float = 0) -> np.ndarray:
    """Clip one leaf by its norm, or by those along an axis; divided by a power of the number of its entries."""
    return shrunk(leaf, norm(leaf, axis) / np.size(leaf) ** size_power, limit)
