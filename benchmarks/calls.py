# SPDX-License-Identifier: MIT
"""The clipping calls that users of each library write, as text.

The text that is shown is the text that runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

# The tests define how each framework creates an array.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

from kit.frameworks import JAX, MLX, Framework, TensorFlow, Torch

PYTORCH = {
    "import": "import torch",
    "global norm": "torch.nn.utils.get_total_norm(grads)",
    "by global norm": "torch.nn.utils.clip_grad_norm_(params, c)",
    "by value": "torch.nn.utils.clip_grad_value_(params, c)",
}
TENSORFLOW = {
    "import": "import tensorflow as tf",
    "global norm": "tf.linalg.global_norm(grads)",
    "by global norm": "tf.clip_by_global_norm(grads, c)[0]",
    "each tensor by norm": "[tf.clip_by_norm(g, c) for g in grads]",
    "each row by norm": "[tf.clip_by_norm(g, c, axes=1) for g in grads]",
    "by value": "[tf.clip_by_value(g, -c, c) for g in grads]",
}
KERAS = {
    "import": "import keras",
    "by global norm": "keras.optimizers.SGD(1.0, global_clipnorm=c).apply(grads, weights)",
    "each tensor by norm": "keras.optimizers.SGD(1.0, clipnorm=c).apply(grads, weights)",
    "by value": "keras.optimizers.SGD(1.0, clipvalue=c).apply(grads, weights)",
}
OPTAX = {
    "import": "import jax, optax, optax.contrib, jax.numpy as jnp",
    "global norm": "optax.tree.norm(grads)",
    "by global norm": "optax.clip_by_global_norm(c).update(grads, optax.EmptyState())[0]",
    "each tensor by root mean square": (
        "optax.clip_by_block_rms(c).update(grads, optax.EmptyState())[0]"
    ),
    "sum of clipped examples": "optax.per_example_global_norm_clip(grads, c)[0]",
    "by value": "optax.clip(c).update(grads, optax.EmptyState())[0]",
}
MLX_OPTIMIZERS = {
    "import": "import mlx.core as mx, mlx.optimizers as optim",
    "global norm": "optim.clip_grad_norm(grads, 1.0)[1]",
    "by global norm": "optim.clip_grad_norm(grads, c)[0]",
}
UNICLIP = {
    "import": "import uniclip as uc",
    "global norm": "uc.global_norm(grads)",
    "by global norm": "uc.clip_by_global_norm(grads, c)[0]",
    "each tensor by norm": "uc.clip_by_norm(grads, c)",
    "each row by norm": "uc.clip_by_norm(grads, c, axis=1)",
    "each tensor by root mean square": "uc.clip(grads, uc.by_block_rms(c))[0]",
    "sum of clipped examples": (
        "[g.sum(0) for g in uc.clip(grads, uc.Rule(c, scope=uc.scopes.each_example))[0]]"
    ),
    "by value": "uc.clip_by_value(grads, -c, c)",
}
DEFINITIONS = {
    "import": "import numpy as np; from calls import norm, shrunk",
    "global norm": "norm(np.concatenate([g.ravel() for g in grads]))",
    "by global norm": (
        "[shrunk(g, norm(np.concatenate([g.ravel() for g in grads])), c) for g in grads]"
    ),
    "each tensor by norm": "[shrunk(g, norm(g), c) for g in grads]",
    "each row by norm": "[shrunk(g, norm(g, 1), c) for g in grads]",
    "each tensor by root mean square": "[shrunk(g, norm(g) / g.size**0.5, c) for g in grads]",
    "sum of clipped examples": "[shrunk(g, norm(g, 1), c).sum(0) for g in grads]",
    "by value": "[np.clip(g, -c, c) for g in grads]",
}


# The definition of clipping in float64, in which the squares of all numbers here are finite.


def norm(values: Any, axis: int | None = None) -> Any:
    """Return √Σ|x|²."""
    return np.sqrt(np.sum(np.square(np.abs(values)), axis, keepdims=axis is not None))


def shrunk(values: Any, size: Any, limit: float) -> np.ndarray:
    """Return the values times min(1, limit/size)."""
    below = size <= limit
    # 0 times ∞ is NaN.
    with np.errstate(invalid="ignore"):
        return values * np.where(below, 1.0, limit / np.where(below, 1.0, size))


@dataclass(frozen=True, eq=False)
class Library:
    """A library's calls, and the framework whose arrays they take."""

    name: str
    framework: Framework
    calls: Mapping[str, str]
    lacks: frozenset[str] = frozenset()
    """The missing kinds of calls, out of "derivative" and "sparse"."""

    @cached_property
    def modules(self) -> dict[str, Any]:
        """The names that the library's calls use."""
        names: dict[str, Any] = {}
        exec(self.calls["import"], names)  # noqa: S102 - our own text
        return names

    def call(self, kind: str, grads: list[Any], c: float, **places: Any) -> Any:
        """Run the text of a call."""
        return eval(self.calls[kind], self.modules | {"grads": grads, "c": c} | places)  # noqa: S307 - our own text

    def numpy(self, array: Any) -> np.ndarray:
        """Return a result as a dense NumPy array."""
        if getattr(array, "is_sparse", hasattr(array, "indices")):
            return self.framework.dense(array)
        return (
            np.asarray(array)
            if isinstance(array, (float, np.ndarray))
            else self.framework.numpy(array)
        )


class InPlace(Library):
    """PyTorch, which clips the ``.grad`` of parameters."""

    def call(self, kind: str, grads: list[Any], c: float, **places: Any) -> Any:
        """Return the gradients of the parameters after the call."""
        torch = self.modules["torch"]
        params = [torch.nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        out = super().call(kind, grads, c, params=params, **places)
        return [p.grad for p in params] if "params" in self.calls[kind] else out


class Optimizer(Library):
    """A Keras optimizer, which clips in ``apply``.

    Plain descent from 0 ends at minus the clipped gradients.
    """

    def call(self, kind: str, grads: list[Any], c: float, **places: Any) -> Any:
        """Return the applied gradients."""
        weights = [
            self.modules["keras"].Variable(np.zeros(g.shape), dtype=g.dtype.name) for g in grads
        ]
        super().call(kind, grads, c, weights=weights, **places)
        return [-w.numpy() for w in weights]


class Indexed(JAX):
    """JAX, where optax may clip row indices of a sparse array, too, and turn them into floats."""

    def dense(self, leaf: Any) -> np.ndarray:
        """Round the row indices to integers."""
        return super().dense(type(leaf)((leaf.data, leaf.indices.astype(int)), shape=leaf.shape))


class Float64(Framework):
    """NumPy in float64, with dense arrays only."""

    def array(self, values: Any, dtype: str = "float32") -> np.ndarray:
        """Round to the dtype, then widen."""
        rounded = super().array(values, dtype)
        return rounded.astype(np.result_type(rounded, np.float64))

    def sparse(self, shape: tuple[int, int], rows: list[int], values: Any) -> np.ndarray:
        """Return the sum of the rows."""
        out = np.zeros(shape)
        np.add.at(out, rows, self.array(values))
        return out

    def gradient(self, function: Callable[[Any], Any], x: Any) -> np.ndarray:
        """Return central differences, which at a kink are the mean of both sides."""
        step = 1e-6
        return np.asarray(
            [(function(x + h) - function(x - h)) / (2 * step) for h in step * np.eye(x.size)]
        )


TRUTH = Library("the definition", Float64(), DEFINITIONS)
LIBRARIES = (
    InPlace("PyTorch", Torch(), PYTORCH),
    Library("TensorFlow", TensorFlow(), TENSORFLOW),
    Optimizer("Keras", TensorFlow(), KERAS, frozenset({"derivative"})),
    Library("optax", Indexed(), OPTAX),
    Library("MLX", MLX(), MLX_OPTIMIZERS, frozenset({"sparse"})),
)


def uniclip_on(library: Library) -> Library:
    """Return uniclip on the arrays of a library."""
    return Library("uniclip", library.framework, UNICLIP)
