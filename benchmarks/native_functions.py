# SPDX-License-Identifier: MIT
"""The clipping functions of each library, and uniclip's on the same arrays, under one set of names.

`Truth` has the same methods in float64, by their definitions.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import uniclip as uc

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")


class NotOfferedError(Exception):
    """The library has no such thing."""


class NoResultError(Exception):
    """There is no true result: a function should raise an error."""


@dataclass(frozen=True)
class Rows:
    """A sparse gradient of a matrix with one column; a row that occurs twice counts as the sum."""

    rows: tuple[int, ...]
    values: tuple[float, ...]
    height: int = 8


def shows(code: str) -> Callable[[Any], Any]:
    """Attach the code that a reader would write for the function, ``{c}`` for the limit."""

    def attach(function: Any) -> Any:
        function.code = code
        return function

    return attach


class Library:
    """Arrays of one library, and a method for each kind of clipping function that it has."""

    name: str
    modules: tuple[str, ...]
    """What to import; those that know their versions are named with them."""

    def __init__(self) -> None:
        """Import the library; `ImportError` if it is missing."""
        self.lib, *self.more = [importlib.import_module(module) for module in self.modules]

    def versions(self) -> dict[str, str]:
        """Return the versions of what was imported."""
        known = (module for module in (self.lib, *self.more) if hasattr(module, "__version__"))
        return {module.__name__.partition(".")[0]: module.__version__ for module in known}

    def array(self, values: Any, dtype: str) -> Any:
        """Return an array of the library."""
        raise NotOfferedError

    def sparse(self, leaf: Rows, dtype: str) -> Any:
        """Return a sparse array of the library."""
        raise NotOfferedError

    def numpy(self, array: Any) -> np.ndarray:
        """Return a dense NumPy array of the same values."""
        return np.asarray(array)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Return the derivative of a scalar function at ``x``."""
        raise NotOfferedError


class Truth(Library):
    """NumPy in float64, where the squares of all numbers here are in range, and the definitions word for word."""

    name, modules = "the true result", ("numpy",)

    def array(self, values: Any, dtype: str) -> np.ndarray:
        """Round to the dtype of the case, then widen (the bfloat16 cases hold numbers that need no rounding)."""
        rounded = np.asarray(values, dtype="float32" if dtype == "bfloat16" else dtype)
        return rounded.astype(np.result_type(rounded, np.float64))

    def sparse(self, leaf: Rows, dtype: str) -> np.ndarray:
        """Add the rows up."""
        return dense(leaf.height, leaf.rows, self.array(leaf.values, dtype)[:, None])

    def gradient(self, function: Callable[[Any], Any], x: Any, step: float = 1e-6) -> np.ndarray:
        """Take central differences; where there is a kink, that is the mean of both sides."""
        steps = step * np.eye(x.size)
        return np.asarray([(function(x + h) - function(x - h)) / (2 * step) for h in steps])

    def global_norm(self, grads: Any, c: float) -> Any:
        """√Σ|g|²."""
        return np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in grads))

    def by_global_norm(self, grads: Any, c: float) -> Any:
        """All leaves · min(1, c/norm of all)."""
        return [g * factor(self.global_norm(grads, c), c) for g in grads]

    def by_norm(self, grads: Any, c: float) -> Any:
        """Each leaf · min(1, c/its norm)."""
        return [g * factor(self.global_norm([g], c), c) for g in grads]

    def by_block_rms(self, grads: Any, c: float) -> Any:
        """Each leaf · min(1, c/its root mean square)."""
        return [g * factor(self.global_norm([g], c) / math.sqrt(g.size), c) for g in grads]

    def by_value(self, grads: Any, c: float) -> Any:
        """Each entry into [-c, c]."""
        factor(0.0, c)  # no interval [-c, c] otherwise
        return [np.clip(g, -c, c) for g in grads]

    def each_example(self, grads: Any, c: float) -> Any:
        """Add up the examples, each clipped by its norm."""
        return [sum(g * factor(self.global_norm([g], c), c) for g in leaf) for leaf in grads]


def factor(norm: float, c: float) -> float:
    """Return min(1, c/norm)."""
    if not c >= 0:
        msg = f"no norm is at most {c}"
        raise NoResultError(msg)
    return 1.0 if norm <= c else c / norm


def dense(height: int, rows: Any, values: Any) -> np.ndarray:
    """Add rows up into a matrix; those outside are padding."""
    out, rows = np.zeros((height, 1)), np.asarray(rows).astype(int)
    np.add.at(out, rows[rows < height], np.asarray(values)[rows < height])
    return out


class Torch(Library):
    """PyTorch clips parameters' ``.grad`` in place."""

    name, modules = "PyTorch", ("torch",)

    def array(self, values: Any, dtype: str) -> Any:
        """Return a tensor."""
        return self.lib.tensor(np.asarray(values, dtype=plain(dtype))).to(getattr(self.lib, dtype))

    def sparse(self, leaf: Rows, dtype: str) -> Any:
        """Return a COO tensor."""
        values = self.array(leaf.values, dtype)[:, None]
        return self.lib.sparse_coo_tensor([leaf.rows], values, (leaf.height, 1), check_invariants=True)

    def numpy(self, array: Any) -> np.ndarray:
        """Return a dense NumPy array of the same values."""
        array = (array.to_dense() if array.is_sparse else array).detach()
        return (array.float() if array.dtype is self.lib.bfloat16 else array).numpy()

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Take it by autograd."""
        x = x.requires_grad_()
        return self.lib.autograd.grad(function(x * 1), x)[0]

    def params(self, grads: Any) -> list[Any]:
        """Return parameters that have these gradients."""
        params = [self.lib.nn.Parameter(self.lib.zeros(g.shape, dtype=g.dtype)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        return params

    @shows("torch.nn.utils.get_total_norm(grads)")
    def global_norm(self, grads: Any, c: float) -> Any:
        """Measure."""
        return self.lib.nn.utils.get_total_norm(grads)

    @shows("torch.nn.utils.clip_grad_norm_(params, {c})")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Clip, in place."""
        params = self.params(grads)
        self.lib.nn.utils.clip_grad_norm_(params, c)
        return [p.grad for p in params]

    @shows("torch.nn.utils.clip_grad_value_(params, {c})")
    def by_value(self, grads: Any, c: float) -> Any:
        """Clip, in place."""
        params = self.params(grads)
        self.lib.nn.utils.clip_grad_value_(params, c)
        return [p.grad for p in params]


class TensorFlow(Library):
    """TensorFlow."""

    name, modules = "TensorFlow", ("tensorflow",)

    def array(self, values: Any, dtype: str) -> Any:
        """Return a tensor."""
        return self.lib.cast(self.lib.constant(np.asarray(values, dtype=plain(dtype))), dtype)

    def sparse(self, leaf: Rows, dtype: str) -> Any:
        """Return slices."""
        tf = self.lib
        return tf.IndexedSlices(
            self.array(leaf.values, dtype)[:, None], tf.constant(leaf.rows), tf.constant((leaf.height, 1))
        )

    def numpy(self, array: Any) -> np.ndarray:
        """Return a dense NumPy array of the same values."""
        if isinstance(array, self.lib.IndexedSlices):
            return dense(array.dense_shape[0], array.indices, array.values)
        return np.asarray(array.numpy() if self.lib.is_tensor(array) else array)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Take it by a tape."""
        with self.lib.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    @shows("tf.linalg.global_norm(grads)")
    def global_norm(self, grads: Any, c: float) -> Any:
        """Measure."""
        return self.lib.linalg.global_norm(grads)

    @shows("tf.clip_by_global_norm(grads, {c})")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Clip."""
        return self.lib.clip_by_global_norm(grads, c)[0]

    @shows("tf.clip_by_norm(grad, {c})")
    def by_norm(self, grads: Any, c: float) -> Any:
        """Clip each."""
        return [self.lib.clip_by_norm(g, c) for g in grads]

    @shows("tf.clip_by_value(grad, -{c}, {c})")
    def by_value(self, grads: Any, c: float) -> Any:
        """Clip each."""
        return [self.lib.clip_by_value(g, -c, c) for g in grads]


class Keras(TensorFlow):
    """Keras optimizers on TensorFlow: one step of plain descent from 0 is minus the gradient it applied."""

    name, modules = "Keras", ("tensorflow", "keras")
    global_norm = None

    def __init__(self) -> None:
        """Import the library; another backend has other arrays and counts as missing."""
        super().__init__()
        (self.keras,) = self.more
        if self.keras.backend.backend() != "tensorflow":
            msg = "the Keras backend is not TensorFlow"
            raise ImportError(msg)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Raise: optimizers have no derivatives."""
        raise NotOfferedError

    def step(self, grads: Any, **option: float) -> list[Any]:
        """Return what one step of descent subtracts."""
        variables = [self.keras.Variable(np.zeros(g.shape), dtype=g.dtype.name) for g in grads]
        self.keras.optimizers.SGD(1.0, **option).apply(grads, variables)
        return [-np.asarray(v.numpy()) for v in variables]

    @shows("SGD(1.0, global_clipnorm={c}).apply(grads, weights)")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Take a step."""
        return self.step(grads, global_clipnorm=c)

    @shows("SGD(1.0, clipnorm={c}).apply(grads, weights)")
    def by_norm(self, grads: Any, c: float) -> Any:
        """Take a step."""
        return self.step(grads, clipnorm=c)

    @shows("SGD(1.0, clipvalue={c}).apply(grads, weights)")
    def by_value(self, grads: Any, c: float) -> Any:
        """Take a step."""
        return self.step(grads, clipvalue=c)


class Optax(Library):
    """JAX's arrays, optax's transformations."""

    name, modules = "optax", ("jax", "optax", "jax.experimental.sparse")

    def __init__(self) -> None:
        """Import the library."""
        super().__init__()
        self.optax, self.bcoo = self.more[0], self.more[1].BCOO

    def array(self, values: Any, dtype: str) -> Any:
        """Return an array."""
        return self.lib.numpy.asarray(np.asarray(values, dtype=plain(dtype))).astype(dtype)

    def sparse(self, leaf: Rows, dtype: str) -> Any:
        """Return a BCOO array."""
        values = self.array(leaf.values, dtype)[:, None]
        return self.bcoo((values, np.asarray(leaf.rows)[:, None]), shape=(leaf.height, 1))

    def numpy(self, array: Any) -> np.ndarray:
        """Return a dense NumPy array of the same values."""
        if isinstance(array, self.bcoo):
            return dense(array.shape[0], array.indices[:, 0], array.data)
        return np.asarray(array)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Take it by reverse mode."""
        return self.lib.grad(function)(x)

    def run(self, transformation: Any, grads: Any) -> Any:
        """Return the updates that a transformation makes of gradients."""
        return transformation.update(grads, transformation.init(grads))[0]

    @shows("optax.tree.norm(grads)")
    def global_norm(self, grads: Any, c: float) -> Any:
        """Measure."""
        return self.optax.tree.norm(grads)

    @shows("optax.clip_by_global_norm({c})")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Clip."""
        return self.run(self.optax.clip_by_global_norm(c), grads)

    @shows("optax.clip_by_block_rms({c})")
    def by_block_rms(self, grads: Any, c: float) -> Any:
        """Clip."""
        return self.run(self.optax.clip_by_block_rms(c), grads)

    @shows("optax.clip({c})")
    def by_value(self, grads: Any, c: float) -> Any:
        """Clip."""
        return self.run(self.optax.clip(c), grads)

    @shows("optax.per_example_global_norm_clip(grads, {c})")
    def each_example(self, grads: Any, c: float) -> Any:
        """Clip and add up."""
        return self.optax.per_example_global_norm_clip(grads, c)[0]


class MLX(Library):
    """MLX."""

    name, modules = "MLX", ("mlx.core", "mlx.optimizers")

    def array(self, values: Any, dtype: str) -> Any:
        """Return an array."""
        return self.lib.array(np.asarray(values, dtype=plain(dtype))).astype(getattr(self.lib, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """Return a NumPy array of the same values."""
        bfloat16 = getattr(array, "dtype", None) == self.lib.bfloat16
        return np.asarray(array.astype(self.lib.float32) if bfloat16 else array)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        """Take it by reverse mode."""
        return self.lib.grad(function)(x)

    @shows("mlx.optimizers.clip_grad_norm(grads, 1.0)[1]")
    def global_norm(self, grads: Any, c: float) -> Any:
        """Measure."""
        return self.more[0].clip_grad_norm(grads, 1.0)[1]

    @shows("mlx.optimizers.clip_grad_norm(grads, {c})")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Clip."""
        return self.more[0].clip_grad_norm(grads, c)[0]


class Uniclip(Library):
    """uniclip on the arrays of another library."""

    def __init__(self, library: Library) -> None:
        """Borrow all that concerns arrays."""
        self.name = library.name
        self.array, self.sparse, self.numpy = library.array, library.sparse, library.numpy
        self.gradient = library.gradient

    @shows("uc.global_norm(grads)")
    def global_norm(self, grads: Any, c: float) -> Any:
        """Measure."""
        return uc.global_norm(grads)

    @shows("uc.clip_by_global_norm(grads, {c})")
    def by_global_norm(self, grads: Any, c: float) -> Any:
        """Clip."""
        return uc.clip_by_global_norm(grads, c)[0]

    @shows("uc.clip_by_norm(grads, {c})")
    def by_norm(self, grads: Any, c: float) -> Any:
        """Clip."""
        return uc.clip_by_norm(grads, c)

    @shows("uc.clip(grads, uc.by_block_rms({c}))")
    def by_block_rms(self, grads: Any, c: float) -> Any:
        """Clip."""
        return uc.clip(grads, uc.by_block_rms(c))[0]

    @shows("uc.clip_by_value(grads, -{c}, {c})")
    def by_value(self, grads: Any, c: float) -> Any:
        """Clip."""
        return uc.clip_by_value(grads, -c, c)

    @shows("uc.clip(grads, uc.Rule({c}, scope=uc.each_example))")
    def each_example(self, grads: Any, c: float) -> Any:
        """Clip and add up."""
        return [leaf.sum(0) for leaf in uc.clip(grads, uc.Rule(c, scope=uc.each_example))[0]]


LIBRARIES = (Torch, TensorFlow, Keras, Optax, MLX)


def plain(dtype: str) -> str:
    """Return a dtype that NumPy has, wide enough for ``dtype``."""
    return "float32" if dtype == "bfloat16" else dtype
