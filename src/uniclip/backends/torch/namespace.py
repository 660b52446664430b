# SPDX-License-Identifier: MIT
"""PyTorch's array API namespace: that of array-api-compat, with replacements for functions that
cannot be compiled, have other derivatives, or take longer.
"""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from array_api_compat import torch as compat

from uniclip.backends.torch.modes import is_recorded, tracing
from uniclip.backends.torch.one_norm import REAL

_Bound: TypeAlias = "float | torch.Tensor | None"
_LARGEST = {
    dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
"""The largest numbers of the dtypes whose range is smaller than that of Python's numbers."""


def _result_type(*dtypes: torch.dtype) -> torch.dtype:
    """Promote dtypes; unlike ``torch.result_type`` this can be compiled."""
    return reduce(torch.promote_types, dtypes)


def _asarray(value: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert numbers and other frameworks' arrays.

    PyTorch itself would read the latter as sequences of numbers.
    """
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)

    # torch.compile would treat the number as a constant.
    if torch.compiler.is_compiling() and isinstance(value, (float, torch.SymFloat)):
        return torch.ones((), dtype=dtype) * value

    # A number beyond the dtype's range becomes ∞, as elsewhere, instead of an error.
    if isinstance(value, float) and dtype in _LARGEST and abs(value) > _LARGEST[dtype]:
        return torch.full((), value, dtype=torch.float64).to(dtype)

    # torch.export cannot save constants inside torch.cond, so numbers fill.
    if isinstance(value, float) and dtype in REAL and not torch.compiler.is_compiling():
        return torch.scalar_tensor(value, dtype=dtype)
    if isinstance(value, (bool, int, float, torch.SymInt)):
        return torch.full((), value, dtype=dtype)

    if hasattr(value, "__array__"):
        value = np.array(value)
    return compat.asarray(value, dtype=dtype)


def _isfinite(x: torch.Tensor, /) -> torch.Tensor:
    """Return which elements are finite, by two operations; PyTorch's function takes four."""
    return x - x == 0


def _clip(x: torch.Tensor, /, min: _Bound = None, max: _Bound = None) -> torch.Tensor:
    """Clip, with derivative 1 at the bounds, too.

    The derivative of ``clamp`` there depends on PyTorch's version.
    """
    is_float = x.is_floating_point()
    if is_float and (
        tracing() or any([is_recorded(value) for value in (x, min, max) if hasattr(value, "dtype")])
    ):
        for bound, is_within in ((min, torch.ge), (max, torch.le)):
            if bound is not None:
                x = torch.where(is_within(x, bound) | x.isnan(), x, bound)
        return x

    # `clamp` is one operation for numbers; array-api-compat, which also takes arrays, needs more.
    are_numbers = all([bound is None or isinstance(bound, (int, float)) for bound in (min, max)])
    changes_dtype = not is_float and any([isinstance(bound, float) for bound in (min, max)])
    if are_numbers and not changes_dtype:
        return torch.clamp(x, min, max)
    return compat.clip(x, min, max)


def _unstack(x: torch.Tensor, /, *, axis: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the parts of a tensor along an axis; that of array-api-compat fails under vmap."""
    return x.unbind(axis)


namespace = SimpleNamespace(
    **(
        vars(compat)
        | {
            "asarray": _asarray,
            "clip": _clip,
            "isfinite": _isfinite,
            "result_type": _result_type,
            "unstack": _unstack,
            "where": torch.where,
        }
    )
)
