# SPDX-License-Identifier: MIT
"""The variables of Keras on its three backends: names, values, replicas and conditional changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from uniclip._types import Tensor
from uniclip.backends import DEFAULT, backend_of

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def paths_of(variables: Sequence[keras.Variable]) -> tuple[str, ...]:
    """Return the path of each variable; a repeated path gets a number."""
    paths = []
    counts: Counter[str] = Counter()
    for variable in variables:
        path = str(getattr(variable, "path", variable.name))
        counts[path] += 1
        # A saved state finds its rows by path, so two variables must not share one.
        if counts[path] > 1:
            path = f"{path}#{counts[path]}"
        paths.append(path)
    return tuple(paths)


def value_of(variable: keras.Variable | tf.Variable) -> Tensor:
    """Return the value of a variable of Keras or TensorFlow, an array of the framework."""
    # A variable of TensorFlow 2 can be converted as it is.
    if isinstance(variable, keras.Variable):
        return keras.ops.convert_to_tensor(variable.value)
    return keras.ops.convert_to_tensor(variable)


def zeros_like(variable: keras.Variable) -> np.ndarray[Any, Any]:
    """Return a NumPy array of zeros in a variable's shape, which takes no memory."""
    # Norms are float32 or wider in any case.
    is_float64 = keras.backend.standardize_dtype(variable.dtype) == "float64"
    zero = np.zeros((), np.float64 if is_float64 else np.float32)
    return np.broadcast_to(zero, tuple(variable.shape))


def current_replica() -> tf.distribute.ReplicaContext | None:
    """Return the context of this replica of TensorFlow; ``None`` if there is only one.

    Raises
    ------
    ValueError
        If the replicas of the strategy do not keep a copy of each variable, or the strategy is
        untested.
    """
    if keras.backend.backend() != "tensorflow":
        return None
    replica = tf.distribute.get_replica_context()
    if replica is None or not tf.distribute.has_strategy():
        return None

    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return None
    supported = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not isinstance(strategy, supported):
        msg = (
            f"ClippedOptimizer doesn't support {type(strategy).__name__}; use MirroredStrategy, "
            "OneDeviceStrategy or MultiWorkerMirroredStrategy, or in a custom training step sum "
            "the gradients of all replicas, clip the sum with uc.clip, and pass it to the inner "
            "optimizer"
        )
        raise ValueError(msg)  # noqa: TRY004 - a strategy it is
    return replica


def sum_over_replicas(
    replica: tf.distribute.ReplicaContext, grads: Sequence[tf.Tensor | tf.IndexedSlices]
) -> list[tf.Tensor]:
    """Return the sums of the gradients of all replicas, as dense tensors."""
    # The sum of sparse gradients would lose its shape.
    dense = list(map(tf.convert_to_tensor, grads))
    sums: list[tf.Tensor] = replica.all_reduce(tf.distribute.ReduceOp.SUM, dense)
    return sums


def is_traced(flag: Tensor) -> bool:
    """Return whether a boolean belongs to code that is being compiled."""
    # A Python boolean has no backend.
    number = keras.ops.cast(flag, "int32")
    return (backend_of(number) or DEFAULT).traced(number)


def run_if(flag: Tensor, function: Callable[[], None], variables: list[keras.Variable]) -> None:
    """Call a function if a flag is true, also in compiled code.

    The function may change only these variables.
    """
    if not is_traced(flag):
        # JAX would compile a conditional again at each step.
        if bool(flag):
            function()
    elif keras.backend.backend() == "jax":
        _run_if_in_jax(flag, function, variables)
    else:
        keras.ops.cond(flag, function, lambda: None)


def _run_if_in_jax(
    flag: Tensor, function: Callable[[], None], variables: list[keras.Variable]
) -> None:
    """Run `run_if` in JAX, where a branch cannot assign: it returns the values of all variables."""
    old_values = list(map(value_of, variables))

    def compute_new_values() -> list[Tensor]:
        mapping = list(zip(variables, old_values, strict=True))
        with keras.StatelessScope(mapping) as scope:
            function()
        return list(map(scope.get_current_value, variables))

    values = keras.ops.cond(flag, compute_new_values, lambda: old_values)
    for variable, new_value in zip(variables, values, strict=True):
        variable.assign(new_value)
