# SPDX-License-Identifier: MIT
"""The numbers of a saved state: as lists, as NumPy arrays, and as arrays like those of a new state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from uniclip.backends import DEFAULT, Backend, backend_of

_NEVER_NEGATIVE = {"below", "count", "limits", "squares", "variances"}
"""The fields of uniclip's states that hold counts and squares."""
_NONE_YET = {"averages", "norms"}
"""The fields that hold norms, and -1 where there is none yet."""


def to_lists(array: Any) -> Any:
    """Return the values of an array as a number or nested lists."""
    return array.tolist() if hasattr(array, "tolist") else np.asarray(array).tolist()


def field_of(path: tuple[Any, ...]) -> str | None:
    """Return the field of uniclip's states that leads to an array, ``None`` in states of other limits."""
    own = [entry.field for entry in path if hasattr(entry, "field") and entry.type.__module__.startswith("uniclip.")]
    return own[-1] if own else None


def array_of(name: str, value: Any) -> Any:
    """Return values as a new array."""
    backend = backend_of(value)
    try:
        array = np.array(to_lists(value)) if backend is None else _twin(backend.detached(value))
    except ValueError:  # ragged rows
        array = np.array(None)
    if backend is None and array.dtype.kind not in "biuf":
        msg = f"the saved {name} is made of {array.dtype}, and a state is made of real numbers"
        raise ValueError(msg)
    return array


def _twin(array: Any) -> Any:
    """Return a copy of an array."""
    return array.clone() if hasattr(array, "clone") else copy.copy(array)


def array_like(backend: Backend, name: str, value: Any, like: Any, field: str | None) -> Any:
    """Return values as an array like another one."""
    if 0 == math.prod(value.shape) == math.prod(like.shape):  # empty lists have neither shape nor dtype
        return like
    if tuple(value.shape) != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {tuple(value.shape)}, but here it is {tuple(like.shape)}: load the state of "
            "the same rule on gradients of the same shapes"
        )
        raise ValueError(msg)
    value = value if backend_of(value) is backend else np.asarray(to_lists(value))
    with backend.quiet(like):  # where a number does not fit
        why = _illegal(backend, value, like, field)
        if why:
            msg = f"the saved {name} cannot be restored: {why}"
            raise ValueError(msg)
        return backend.to_device_of(like, backend.xp.asarray(value, dtype=like.dtype))


def _illegal(backend: Backend, value: Any, like: Any, field: str | None) -> str | None:
    """Return why an array cannot take values, ``None`` if it can."""
    theirs, ours = (backend_of(value) or DEFAULT).xp, backend.xp
    kind, theirs_is = _kind(like), _kind(value)
    if theirs_is != kind and not (kind == "float" and theirs_is == "int"):
        return f"it is made of {value.dtype}, and has to be of {like.dtype}"
    if kind == "int":
        low, high = ours.iinfo(like.dtype).min, ours.iinfo(like.dtype).max
        outside = [number for number in np.ravel(np.asarray(to_lists(value))).tolist() if not low <= number <= high]
        if outside:
            return f"{outside[0]} does not fit into {like.dtype}"
    why = _not_finite(theirs, ours, value, like, field) if kind == "float" else None
    if why:
        return why
    if field in _NEVER_NEGATIVE | _NONE_YET:
        wrong = (value < 0) & (value != -1) if field in _NONE_YET else value < 0
        if bool(theirs.any(wrong)):
            return "it holds negative numbers"
    return None


def _not_finite(theirs: Any, ours: Any, value: Any, like: Any, field: str | None) -> str | None:
    """Return the error in numbers that are not finite, or would not be; a user's own limit may hold ∞."""
    if bool(theirs.any(value != value)):  # noqa: PLR0124 - of integers, too
        return "it holds NaN"
    if _infinite(theirs, value):
        return "it holds ∞" if field else None
    fits = not _infinite(ours, ours.asarray(value, dtype=like.dtype))
    return None if fits else f"its numbers do not fit into {like.dtype}"


def _kind(array: Any) -> str:
    """Return the kind of numbers in an array, by the name of its dtype, which every framework has."""
    return next((kind for kind in ("bool", "int", "complex") if kind in str(array.dtype)), "float")


def _infinite(xp: Any, array: Any) -> bool:
    return bool(xp.any((array == math.inf) | (array == -math.inf)))
