"""What clipping TensorFlow tensors in eager code allocates on the host, beside the tensors of the result."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import uniclip as uc

CALLS: dict[str, Callable[[Any], Any]] = {
    "norm": uc.global_norm,
    "below": lambda g: uc.clip_by_global_norm(g, 1e9),
    "above": lambda g: uc.clip_by_global_norm(g, 1e-3),
    "norm of each": lambda g: uc.clip_by_norm(g, 1e-3),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory(dtype: str, call: Callable[[Any], Any]) -> None:
    """NumPy, which reads the tensors where they are, takes less than 1 MiB."""
    grads = [tf.fill((12_000_001,), tf.cast(0.25, dtype)), *(tf.fill((250, 401), tf.cast(0.25, dtype)),) * 20]
    call(grads[1:])  # NumPy imports some of itself at the first call
    tracemalloc.start()
    call(grads)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**20
