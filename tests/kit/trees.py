"""Trees of arrays, in the same order on all frameworks: sorted keys, without ``None``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from kit.frameworks import Framework

Path: TypeAlias = tuple[Any, ...]
EPS = {
    "float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52, "complex64": 2**-23,
    "complex128": 2**-52,
}  # fmt: skip
"""The distance from 1 to the next number of a dtype."""


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and leaves."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=lambda one: (type(one).__name__, one)):
            yield from walk(tree[key], (*path, key))
    elif isinstance(tree, (list, tuple)):
        for number, inner in enumerate(tree):
            yield from walk(inner, (*path, number))
    elif tree is not None:
        yield path, tree


def leaves(tree: Any) -> list[Any]:
    """Return the leaves."""
    return [leaf for _, leaf in walk(tree)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with a function applied to each leaf; ``None`` stays."""
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(function, value) for value in tree)
    return None if tree is None else function(tree)


def close(
    framework: Framework, found: Any, wanted: Any, dtype: str = "float32", ulps: float = 4
) -> None:
    """Require an array to equal NumPy's to a few units in the last place of a dtype."""
    values = framework.numpy(found).astype(complex)
    np.testing.assert_allclose(values, np.asarray(wanted).astype(complex), rtol=ulps * EPS[dtype])


def close_trees(
    framework: Framework, found: Any, wanted: Any, rtol: float, atol: float = 0.0
) -> None:
    """Require a tree to have the paths of a NumPy tree, and the same values up to rounding."""
    there, here = dict(walk(found)), dict(walk(wanted))
    assert list(there) == list(here)
    for path, array in here.items():
        values = framework.numpy(there[path])
        assert values.shape == np.shape(array), path
        np.testing.assert_allclose(values, array, rtol=rtol, atol=atol, err_msg=str(path))
