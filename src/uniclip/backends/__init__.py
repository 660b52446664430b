# SPDX-License-Identifier: MIT
"""Choose the backend of an array: by the root module of its class, without importing anything new.

If an object exists, its framework is imported already, so the import below never loads one.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

from uniclip.backends.base import Backend

__all__ = ["Backend", "backend_of"]

_FILES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "tensorflow": "tensorflow"}
# A plain dictionary: torch.compile warns about functools.lru_cache.
_CACHE: dict[type, Backend | None] = {}


def backend_of(leaf: Any) -> Backend | None:
    """Return the backend of an array, ``None`` if ``leaf`` is no array."""
    cls = type(leaf)
    if cls not in _CACHE:
        _CACHE[cls] = _choose(leaf)
    backend = _CACHE[cls]
    return backend if backend is not None and backend.is_array(leaf) else None


def _choose(leaf: Any) -> Backend | None:
    for base in type(leaf).__mro__:
        if file := _FILES.get(base.__module__.partition(".")[0]):
            # The builtin, not importlib: tf.function would try to convert importlib's source.
            chosen: Backend = __import__(f"{__name__}.{file}", fromlist=["BACKEND"]).BACKEND
            return chosen
    if array_api_compat.is_array_api_obj(leaf):
        return _of_namespace(array_api_compat.array_namespace(leaf))
    return None


def _of_namespace(xp: Any) -> Backend:
    same = [backend for backend in _CACHE.values() if backend is not None and backend.xp is xp]
    return same[0] if same else Backend(xp)
