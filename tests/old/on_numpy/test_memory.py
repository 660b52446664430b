"""What clipping NumPy arrays allocates: next to nothing, and for new gradients one copy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import uniclip as uc

MIB = 2**20
TREES: dict[str, list[tuple[int, ...]]] = {
    "one leaf": [(12_000_001,)],
    "some leaves": [(250, 400)] * 110 + [(100_001,)] * 10,
    "many small": [(40, 101)] * 3000,
}
# 1 MiB at most, but of a piece of 2¹⁷ complex numbers there are the modulus and its square too, and numbers of
# ml_dtypes are measured in the array API.
EXTRA = {"complex64": 2 * MIB, "bfloat16": 2 * MIB}
OBJECTS = 512
"""How many bytes Python's own objects take for a leaf, its results and its part of the report."""


def peak(call: Callable[[], Any]) -> int:
    """Return how many bytes are held at most while a function runs, beyond what was held before."""
    tracemalloc.start()
    result = call()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return most


@pytest.mark.parametrize("scope", [uc.scopes.all_leaves, uc.scopes.each_leaf], ids=repr)
@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64", "bfloat16"])
def test_memory(dtype: str, shapes: list[tuple[int, ...]], scope: uc.Scope) -> None:
    """Measuring and clipping in place take less than 1 MiB; what `uc.clip` returns is a copy only if it is clipped."""
    extra = EXTRA.get(dtype, MIB) + OBJECTS * len(shapes)
    grads = [np.full(shape, 0.25, getattr(ml_dtypes, dtype, dtype)) for shape in shapes]
    size = sum(leaf.nbytes for leaf in grads)
    assert size >= 24e6
    # Of a leaf in bfloat16, which NumPy does not know, there are for a moment two copies in float32.
    wide = 8 * max(leaf.size for leaf in grads) if dtype == "bfloat16" else 0
    below, above = uc.Rule(1e9, scope=scope), uc.Rule(1e-3, scope=scope)
    uc.clip(np.ones((9, 9), "float32"), below)  # NumPy imports some of itself at the first call
    assert peak(lambda: uc.global_norm(grads)) < extra
    assert peak(lambda: uc.clip(grads, below)) < extra
    assert peak(lambda: uc.clip_(grads, below)) < extra
    assert size <= peak(lambda: uc.clip(grads, above)) < size + wide + extra
    assert peak(lambda: uc.clip_(grads, above)) < extra
