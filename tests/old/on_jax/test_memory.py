"""What clipping inside jit allocates, as XLA counts it when it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import uniclip as uc

TREES: dict[str, list[tuple[int, ...]]] = {
    "one leaf": [(12_000_001,)],
    "some leaves": [(1000, 1000)] * 10 + [(500_001,)] * 4,
}
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda g, limit: uc.global_norm(g),
    "global norm": lambda g, limit: uc.clip_by_global_norm(g, limit)[0],
    "norm of each": uc.clip_by_norm,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_memory(dtype: str, shapes: list[tuple[int, ...]], call: Callable[[Any, Any], Any]) -> None:
    """Beside the result less than 1 MiB for a leaf in float32; of donated gradients the memory is used again."""
    grads = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in grads)
    assert size >= 24e6 - 1e6
    # In the branch that measures in units, which is hardly ever taken, XLA keeps a few of several leaves. Of half
    # precision it keeps all of it in float32, on the CPU: `jnp.sum(jnp.square(x.astype("float32")))` in float16 takes
    # as much, and so does optax's clipping in both.
    extra = (0 if len(shapes) == 1 else size // 4) + (2**20 if dtype == "float32" else 2 * size + 2**20)
    donated = [] if call is CALLS["norm"] else [0]
    for donate in ([], donated):
        used = jax.jit(call, donate_argnums=donate).lower(grads, 1.0).compile().memory_analysis()
        assert used.temp_size_in_bytes < extra
        assert used.alias_size_in_bytes == (size if donate else 0)
