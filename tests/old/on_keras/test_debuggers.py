"""`fit` under a debugger that stops at NaN and ∞: the one of the backend that Keras runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
import pytest

import uniclip as uc
from uniclip.integrations.keras import ClippedOptimizer, LogClipping

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]
RULES = {"agc": uc.agc(0.01), "adagc": uc.adagc(warmup=2)}
"""Every rule is tried under the debugger of each framework without Keras (tests/on_tensorflow, on_jax and on_torch)."""


@contextmanager
def stopping() -> Iterator[None]:
    """Have the backend stop at NaN and ∞."""
    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            tf.debugging.enable_check_numerics()
            try:
                yield
            finally:
                tf.debugging.disable_check_numerics()
        case "jax":
            import jax

            with jax.debug_nans(True), jax.debug_infs(True):
                yield
        case _:
            import torch

            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                yield


@pytest.mark.parametrize("name", RULES)
def test_fit(name: str) -> None:
    """No step of a rule makes NaN or ∞, and the log holds neither."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)])
    model.compile(ClippedOptimizer(keras.optimizers.Adam(), RULES[name]), loss="mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    with stopping():
        history = model.fit(x, x.sum(1, keepdims=True), batch_size=4, epochs=2, verbose=0, callbacks=[LogClipping()])
    assert np.isfinite([history.history[key] for key in ("loss", "clip/norm", "clip/limit", "clip/factor")]).all()
