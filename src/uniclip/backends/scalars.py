# SPDX-License-Identifier: MIT
"""The few numbers of a step, as NumPy scalars in double precision, where reading them costs nothing.

A scalar is a 0-d array that NumPy works on as fast as Python does on its own numbers, as long as it is not
asked for a where or a ones_like: these take longer than clipping a small gradient does.
"""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from uniclip.backends.base import Backend

Scalar: TypeAlias = np.generic
NUMBERS: tuple[Any, ...] = (Scalar, float, int)
"""What is a number already."""

_ONE, _ZERO = np.float64(1), np.float64(0)


def _all(x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:  # noqa: ARG001 - a scalar has no axes
    return np.bool_(all(x)) if isinstance(x, list) else x


def _any(x: Any, /, *, axis: Any = None, keepdims: bool = False) -> Any:  # noqa: ARG001 - a scalar has no axes
    return np.bool_(any(x)) if isinstance(x, list) else x


def _where(condition: Any, x: Any, y: Any, /) -> Any:
    return x if condition else y


namespace = SimpleNamespace(
    **(
        vars(np)
        | {
            "all": _all,
            "any": _any,
            "asarray": lambda value, /, *, dtype=None: np.float64(value),  # noqa: ARG005 - there is one dtype
            "equal": operator.eq,
            "isfinite": lambda x, /: x - x == 0,
            "isinf": lambda x, /: abs(x) == math.inf,
            "logical_not": lambda x, /: np.bool_(not x),
            "ones_like": lambda x, /: _ONE,  # noqa: ARG005
            "stack": list,
            "where": _where,
            "zeros_like": lambda x, /: _ZERO,  # noqa: ARG005
        }
    )
)


class _Scalars(Backend):
    def readable(self, array: Any) -> bool:  # noqa: ARG002
        return True


SCALARS = _Scalars(namespace)
