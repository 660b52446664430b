# SPDX-License-Identifier: MIT
"""The variables of Keras on its three backends: their names, values, and conditional changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from uniclip.backends import DEFAULT, backend_of

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def paths_of(variables: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of each variable; a repeated path gets a number."""
    names = [str(getattr(variable, "path", variable.name)) for variable in variables]
    seen: Counter[str] = Counter()
    paths = []
    for name in names:
        seen[name] += 1
        paths.append(f"{name}#{seen[name]}" if seen[name] > 1 else name)
    return tuple(paths)


def value_of(variable: Any) -> Any:
    """Return the value of a variable of Keras or of TensorFlow, an array of the framework."""
    return keras.ops.convert_to_tensor(
        variable.value if isinstance(variable, keras.Variable) else variable
    )


def stand_in(variable: Any) -> Any:
    """Return a NumPy array of a variable's shape that takes no memory.

    Norms are float32 or wider in any case.
    """
    wide = keras.backend.standardize_dtype(variable.dtype) == "float64"
    return np.broadcast_to(np.zeros((), np.float64 if wide else np.float32), tuple(variable.shape))


def replica_here() -> Any:
    """Return the context of a replica of TensorFlow's that may have others.

    ``None`` if this is none.

    Raises
    ------
    ValueError
        If the replicas of the strategy do not keep a copy of each variable, or it is untested.
    """
    replica = (
        tf.distribute.get_replica_context() if keras.backend.backend() == "tensorflow" else None
    )
    if replica is None or not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return None
    if not isinstance(
        strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    ):
        msg = (
            f"ClippedOptimizer is not for {type(strategy).__name__}: take MirroredStrategy, "
            "OneDeviceStrategy or MultiWorkerMirroredStrategy, or in your own step sum the "
            "gradients of all replicas, clip the sum by uc.clip, and hand that to the optimizer "
            "inside"
        )
        raise ValueError(msg)  # noqa: TRY004 - a strategy it is
    return replica


def summed(replica: Any, grads: Sequence[Any]) -> Any:
    """Return the sums of the gradients of all replicas, dense ones:
    sums of sparse ones lose their shape.
    """
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, list(map(tf.convert_to_tensor, grads)))


def traced(flag: Any) -> bool:
    """Whether a boolean belongs to code that is compiled."""
    number = keras.ops.cast(flag, "int32")  # a Python boolean has no backend
    return (backend_of(number) or DEFAULT).traced(number)


def when(flag: Any, function: Callable[[], None], held: list[Any]) -> None:
    """Call a function where the flag is true, also in compiled code.

    The variables it may change are ``held``.
    """
    if not traced(flag):  # JAX would compile the conditional again at each step
        if bool(flag):
            function()
    elif keras.backend.backend() == "jax":
        _when_traced_by_jax(flag, function, held)
    else:
        keras.ops.cond(flag, function, lambda: None)


def _when_traced_by_jax(flag: Any, function: Callable[[], None], held: list[Any]) -> None:
    """Do as `when` where a branch cannot assign: it returns the new values of all variables."""
    before = list(map(value_of, held))

    def after() -> list[Any]:
        with keras.StatelessScope(list(zip(held, before, strict=True))) as scope:
            function()
        return list(map(scope.get_current_value, held))

    for variable, value in zip(held, keras.ops.cond(flag, after, lambda: before), strict=True):
        variable.assign(value)
