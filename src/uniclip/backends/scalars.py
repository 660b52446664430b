# SPDX-License-Identifier: MIT
"""The few numbers of a step, as NumPy scalars in double precision, where reading them costs nothing.

A scalar is a 0-d array that NumPy works on as fast as Python does on its own numbers, as long as it is not
asked for a where or a ones_like: these take longer than clipping a small gradient does. So the namespace here
has these in Python, and what else the algorithm asks of a number.
"""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from uniclip.backends.base import Backend

Scalar: TypeAlias = np.generic
NUMBERS: tuple[Any, ...] = (float, int, np.float32, np.bool_)  # and float64, which is a float; longdouble is wider
"""What can be worked with in double precision."""

_RANGES = {np.dtype(kind): SimpleNamespace(max=float(np.finfo(kind).max)) for kind in ("float32", "float64")}
_ONE, _ZERO = np.float64(1), np.float64(0)

namespace = SimpleNamespace(
    all=lambda x, /: np.bool_(all(x)) if isinstance(x, list) else x,
    any=lambda x, /: x,
    asarray=lambda value, /, *, dtype=None: np.float64(value),  # noqa: ARG005 - there is one dtype
    equal=operator.eq,
    finfo=_RANGES.__getitem__,
    float32=np.float32,
    float64=np.float64,
    isfinite=lambda x, /: x - x == 0,
    logical_not=lambda x, /: np.bool_(not x),
    ones_like=lambda x, /: _ONE,  # noqa: ARG005
    sqrt=np.sqrt,
    stack=list,
    where=lambda condition, x, y, /: x if condition else y,
    zeros_like=lambda x, /: _ZERO,  # noqa: ARG005
)


class _Scalars(Backend):
    def readable(self, array: Any) -> bool:  # noqa: ARG002
        return True


SCALARS = _Scalars(namespace)
