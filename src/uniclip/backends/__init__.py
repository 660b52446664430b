# SPDX-License-Identifier: MIT
"""Choose the backend of an array: by the root module of its class, without importing anything new.

The framework of an existing object is already imported, so the imports below never load one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import array_api_compat
import optree

from uniclip.backends.arrays import Standard
from uniclip.backends.base import Backend
from uniclip.backends.numpy import BACKEND as DEFAULT

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "COMPILER",
    "DEFAULT",
    "MET",
    "UNTOLD",
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

MET: dict[type, Backend] = {}
"""The backends of the classes of arrays that were met; not functools.lru_cache,
about which torch.compile warns.

No other class is kept: ``torch.compile`` looks at all keys, and cannot compare some, such as
``itertools.chain``.
"""


COMPILER = "torch._dynamo"
"""The module of a compiler that has to be told about uniclip, by `tell_compilers`,
once it is loaded.
"""
UNTOLD = [COMPILER]
"""Empty once it was told."""


# Import statements, not importlib: tf.function would try to convert importlib's source.
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
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "jaxlib": _jax,
}


def backend_of(leaf: Any) -> Backend | None:
    """Return the backend of an array, ``None`` if ``leaf`` is not an array."""
    cls = type(leaf)
    backend = MET[cls] if cls in MET else _find_backend(leaf)
    return backend if backend is not None and backend.is_array(leaf) else None


def _find_backend(leaf: Any) -> Backend | None:
    """Return the backend of a class that is met for the first time,
    by the libraries of its bases.
    """
    # It can list no bases of a Parameter.
    if compiling() and isinstance(leaf, sys.modules["torch"].Tensor):
        return _torch()
    cls = type(leaf)
    roots = [base.__module__.partition(".")[0] for base in cls.__mro__]
    load = next(filter(None, map(_LOADERS.get, roots)), None)
    backend = load() if load else _other(leaf)
    if backend is not None and not compiling():  # which would compile again for each class
        MET[cls] = backend
    return backend


def backend_by(thing: Any) -> Backend | None:
    """Return the backend of the library of anything, such as a process group.

    ``None`` if it is of no library.
    """
    load = None if callable(thing) else _LOADERS.get(type(thing).__module__.partition(".")[0])
    return load() if load else None


def to_lists(array: Any) -> Any:
    """Return the values of an array as a number or nested lists."""
    return numpy_of(array).tolist()


def numpy_of(array: Any) -> np.ndarray[Any, Any]:
    """Return the values of an array of any library as one of NumPy."""
    return library_of(array).to_host([array])[0]


def library_of(array: Any) -> Backend:
    """Return the backend of an array of any dtype, also of flags, which are no gradients;
    else the default one.
    """
    return backend_of(array) or MET.get(type(array)) or DEFAULT


def outlives(arrays: list[Any]) -> bool:
    """Whether values can be kept after the step.

    The first says it for all, which are computed from the norms.
    """
    for array in arrays[:1]:  # one of PyTorch's device meta has no values, and stays
        if (backend_of(array) or DEFAULT).traced(array) and not getattr(array, "is_meta", False):
            return False
    return True


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
        backend.write(array, _second, value)
    return old


def _second(_: Any, value: Any) -> Any:
    """Return the second argument."""
    return value


def flatten_registered(node: Any) -> tuple[list[Any], Any, tuple[Any, ...]] | None:
    """Return children, structure and keys of a container that only a framework can open;
    else ``None``.

    Classes registered with JAX, such as modules of flax and equinox, are opened by JAX.
    """
    if "jax" not in sys.modules:
        return None
    from uniclip.backends import jax

    return jax.flatten_registered(node)


def compiling() -> bool:
    """Whether ``torch.compile`` traces the caller,
    where NumPy's dtypes and modules of builtins cannot be looked up.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.compiler.is_dynamo_compiling():
        return False
    from uniclip.backends.torch import between_graphs  # noqa: F401 - imported for old compilers

    return True


def tell_compilers() -> None:
    """Tell compilers that cannot compile uniclip to run it between their graphs.

    Call it where they are loaded.
    """
    from uniclip.backends.torch import between_graphs  # noqa: F401 - compilers run the imports that they trace

    # A change in traced code would have it compiled anew.
    if not compiling():
        UNTOLD.clear()


def _other(leaf: Any) -> Backend | None:
    """Return the backend of an array of any other library, which is slow to find out."""
    known = array_api_compat.is_array_api_obj(leaf) and (
        # not by forwarding
        hasattr(type(leaf), "__array_namespace__") or not hasattr(leaf, "__array_namespace__")
    )
    if not known:
        return None
    library = array_api_compat.array_namespace(leaf)
    for backend in MET.values():
        if isinstance(backend, Standard) and backend.library is library:
            return backend
    return Standard(library)
