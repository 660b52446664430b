# SPDX-License-Identifier: MIT
"""Find the backend of an array by the root module of its class.

It never loads a framework: that of an existing object is already imported. The hooks of a backend
are in `uniclip.backends.base`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import array_api_compat
import optree

from uniclip._types import Path, Tree, View
from uniclip.backends.arrays import Standard
from uniclip.backends.base import Backend
from uniclip.backends.numpy import BACKEND as DEFAULT

__all__ = [
    "BACKEND_CACHE",
    "COMPILER",
    "DEFAULT",
    "UNCONFIGURED",
    "Backend",
    "backend_by",
    "backend_of",
    "compiling",
    "flatten_registered",
    "library_of",
    "numpy_of",
    "outlives",
    "tell_compilers",
    "to_lists",
]

BACKEND_CACHE: dict[type, Backend] = {}
"""The backend of each class of arrays so far. (torch.compile warns about functools.lru_cache.)

Other classes are not cached: ``torch.compile`` reads all keys, and cannot compare some, such as
``itertools.chain``.
"""


COMPILER = "torch._dynamo"
"""The module of a compiler that `tell_compilers` configures as soon as it is loaded."""
UNCONFIGURED = [COMPILER]
"""The compilers that are not configured yet."""


# Import statements instead of importlib, since tf.function would try to convert importlib's source.
def _torch() -> Backend:
    from uniclip.backends.torch import BACKEND

    return BACKEND


def _tensorflow() -> Backend:
    from uniclip.backends.tensorflow import BACKEND

    return BACKEND


def _jax() -> Backend:
    from uniclip.backends.jax import BACKEND

    return BACKEND


_LOADERS: dict[str, Callable[[], Backend]] = {
    "numpy": lambda: DEFAULT,
    # SciPy's sparse matrices raise an error of their own. Some are dicts, and would be opened.
    "scipy": lambda: DEFAULT,
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "jaxlib": _jax,
}


def backend_of(leaf: object) -> Backend | None:
    """Return the backend of an array, ``None`` if ``leaf`` is not an array."""
    cls = type(leaf)
    backend = BACKEND_CACHE[cls] if cls in BACKEND_CACHE else _find_backend(leaf)
    return backend if backend is not None and backend.is_array(leaf) else None


def _find_backend(leaf: object) -> Backend | None:
    """Return the backend of a class that is not in the cache, by the libraries of its bases."""
    # torch.compile cannot list the bases of a Parameter.
    if compiling() and isinstance(leaf, sys.modules["torch"].Tensor):
        return _torch()

    cls = type(leaf)
    roots = [base.__module__.partition(".")[0] for base in cls.__mro__]
    load = next(filter(None, map(_LOADERS.get, roots)), None)
    backend = load() if load else _standard(leaf)
    # torch.compile would compile again after each change of the cache.
    if backend is not None and not compiling():
        BACKEND_CACHE[cls] = backend
    return backend


def backend_by(group: object) -> Backend | None:
    """Return the backend of the library of an object that is no array, such as a process group.

    ``None`` for a function, and for an object of no library.
    """
    if callable(group):
        return None
    load = _LOADERS.get(type(group).__module__.partition(".")[0])
    if load is None:
        return None
    return load()


def to_lists(array: object) -> Any:
    """Return the values of an array as a number or nested lists."""
    return numpy_of(array).tolist()


def numpy_of(array: object) -> View:
    """Return the values of an array of any library as one of NumPy."""
    return library_of(array).to_host([array])[0]


def library_of(array: object) -> Backend:
    """Return the backend of an array of any dtype, also of flags, which are no gradients;
    else the default one.
    """
    return backend_of(array) or BACKEND_CACHE.get(type(array)) or DEFAULT


def outlives(arrays: list[Any]) -> bool:
    """Return whether values can be kept after the step.

    All are computed from the norms, so the first is like the others.
    """
    if not arrays:
        return True
    first = arrays[0]
    # A tensor on PyTorch's meta device has no values, either, but it stays.
    is_tracer = (backend_of(first) or DEFAULT).traced(first)
    return not is_tracer or getattr(first, "is_meta", False)


def to_remember(new: Any, old: Any) -> Any:
    """Return what is remembered of the state after a step, given the one before.

    A CUDA graph that is replayed reads and writes the same memory. So the old arrays get the new
    values, or each replay would go on from the step that was captured.
    """
    arrays: list[Any] = optree.tree_leaves(new)
    backend = backend_of(arrays[0]) if arrays else None
    if backend is None or not backend.captured(arrays[0]):
        return new
    for array, value in zip(optree.tree_leaves(old), arrays, strict=True):
        backend.write(array, replacement, value)
    return old


def replacement(_: Any, value: Any) -> Any:
    """Return the second argument."""
    return value


def flatten_registered(node: Tree) -> tuple[list[Any], Any, Path] | None:
    """Return children, structure and keys of a container that only a framework can open;
    else ``None``.

    Classes registered with JAX, such as modules of flax and equinox, are opened by JAX.
    """
    if "jax" not in sys.modules:
        return None
    from uniclip.backends import jax

    return jax.flatten_registered(node)


def compiling() -> bool:
    """Return whether ``torch.compile`` traces the caller,
    where NumPy's dtypes and modules of builtins cannot be looked up.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_dynamo_compiling():
        return False
    from uniclip.backends.torch import between_graphs  # noqa: F401 - imported for old compilers

    return True


def tell_compilers() -> None:
    """Have compilers that cannot compile uniclip run it between their graphs.

    Call it where they are loaded.
    """
    # A compiler runs the imports that it traces.
    from uniclip.backends.torch import between_graphs  # noqa: F401

    # A change of the list in traced code would compile that code again.
    if not compiling():
        UNCONFIGURED.clear()


def _standard(leaf: object) -> Backend | None:
    """Return the backend of an array of any other library, which is slow to find out."""
    if not array_api_compat.is_array_api_obj(leaf):
        return None
    # An object that forwards attributes to an array is none itself.
    if hasattr(leaf, "__array_namespace__") and not hasattr(type(leaf), "__array_namespace__"):
        return None

    # Classes of one library share a backend, and with it all that is cached.
    library = array_api_compat.array_namespace(leaf)
    for backend in BACKEND_CACHE.values():
        if isinstance(backend, Standard) and backend.library is library:
            return backend
    return Standard(library)
