"""What clipping is, in float64 and plain loops; imports nothing of uniclip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

Curve: TypeAlias = Callable[[float, float], float]


def norm(entries: Iterable[complex], p: float = 2, size_power: float = 0) -> float:
    """(Σ|x|ᵖ)^(1/p) / N^size_power, of entries scaled by the largest so that nothing overflows."""
    sizes = [abs(complex(x)) for x in entries]
    top = max(sizes, default=0.0)
    if top == 0 or not math.isfinite(top):
        return 0.0 if top == 0 else math.nan
    total = top if math.isinf(p) else top * math.fsum((s / top) ** p for s in sizes) ** (1 / p)
    return total / len(sizes) ** size_power


def factor(n: float, limit: float) -> float:
    """Return the hard curve."""
    return 1.0 if n <= limit else limit / n


def clip_global(
    leaves: list[Any], limit: float, p: float = 2, size_power: float = 0, curve: Curve = factor
) -> list[np.ndarray]:
    """One norm for all leaves."""
    n = norm((x for leaf in leaves for x in np.asarray(leaf).ravel().tolist()), p, size_power)
    return [scaled(leaf, 1.0 if math.isinf(limit) else curve(n, limit)) for leaf in leaves]


def clip_leaf(leaf: Any, limit: float, p: float = 2, size_power: float = 0, curve: Curve = factor) -> np.ndarray:
    """One norm for one leaf."""
    return clip_global([leaf], limit, p, size_power, curve)[0]


def clip_axes(
    leaf: Any, limit: float, axes: tuple[int, ...], p: float = 2, size_power: float = 0, curve: Curve = factor
) -> np.ndarray:
    """One norm for each slice along the axes."""
    leaf = np.asarray(leaf)
    axes = tuple(axis % leaf.ndim for axis in axes)
    kept = [range(n) if axis not in axes else [slice(None)] for axis, n in enumerate(leaf.shape)]
    out = leaf.astype(np.result_type(leaf.dtype, np.float64))
    for index in itertools.product(*kept):
        out[index] = clip_leaf(leaf[index], limit, p, size_power, curve)
    return out


def scaled(leaf: Any, by: float) -> np.ndarray:
    """Multiply in float64."""
    leaf = np.asarray(leaf)
    return leaf.astype(np.result_type(leaf.dtype, np.float64)) * by
