# SPDX-License-Identifier: MIT
"""The replicas of ``tf.distribute``: the gradients of each are addends, summed before the sum is clipped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_OTHERS = (
    tf.distribute.experimental.CentralStorageStrategy,
    tf.compat.v1.distribute.experimental.CentralStorageStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.compat.v1.distribute.experimental.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.compat.v1.distribute.experimental.TPUStrategy,
)


def refuse_strategy(strategy: Any) -> None:
    """Refuse a strategy whose replicas do not keep a copy of each variable, or that nobody has tried."""
    if isinstance(strategy, _OTHERS):
        msg = (
            f"ClippedOptimizer is not for {type(strategy).__name__}: take MirroredStrategy, OneDeviceStrategy or "
            "MultiWorkerMirroredStrategy, or in your own step sum the gradients of all replicas, clip the sum by "
            "uc.clip, and hand that to the optimizer inside"
        )
        raise ValueError(msg)  # noqa: TRY004 - a strategy it is


def replica() -> Any:
    """Return the context of the replica that runs, or ``None`` without a strategy.

    Raises
    ------
    RuntimeError
        If none runs, but what is around them.
    """
    if not tf.distribute.has_strategy():
        return None
    context = tf.distribute.get_replica_context()
    if context is None:
        msg = (
            "gradients are applied in strategy.scope(), but outside of the replicas, where nobody knows whether they "
            "are summed: apply them in the function that strategy.run calls"
        )
        raise RuntimeError(msg)
    return context


def thread() -> int | None:
    """Return a number for the replica that runs, each of which is a thread; ``None`` where none does."""
    inside = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return threading.get_ident() if inside else None


def is_first() -> bool:
    """Whether the first replica of all runs, or none does."""
    context = replica()
    return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0


def writes(strategy: Any) -> bool:
    """Whether this process, of the workers of a strategy, is the one that writes files."""
    return bool(strategy.extended.should_save_summary)


def joined(operation: Any) -> Any:
    """Return an operation that runs those of all replicas, as that of a TensorFlow 1 optimizer does."""
    if operation is None or not waits() or tf.executing_eagerly():
        return operation
    return replica().merge_call(lambda strategy, one: tf.group(*strategy.experimental_local_results(one)), (operation,))


def summed(values: Sequence[Any]) -> list[Any]:
    """Return the sums over all replicas, the same ones in each; ``None`` stays where it is."""
    context = replica()
    if context is None:
        return list(values)
    some = [value for value in values if value is not None]
    sums = iter(map(_shaped, some, context.all_reduce(tf.distribute.ReduceOp.SUM, some) if some else []))
    return [None if value is None else next(sums) for value in values]


def _shaped(value: Any, total: Any) -> Any:
    """Return a sum with the shape that is known of a sparse addend."""
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values, total.indices, value.dense_shape)
    return total


def kept(grad: Any) -> Any:
    """Return a gradient that Grappler takes as it is: it would first multiply factor and rate, in one replica alone."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(kept(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else tf.ensure_shape(grad, grad.shape)


def in_all(flag: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function in all replicas if the flag holds, else in none; return an operation that does it.

    What a replica knows alone is in ``args``: the function that all of them call is that of the first. It is not for
    eager code.
    """

    def around(strategy: Any, flag: Any, *args: Any) -> Any:
        def call() -> Any:
            done = strategy.extended.call_for_each_replica(function, args=args)
            return tf.group(*[one for one in strategy.experimental_local_results(done) if one is not None])

        first, *_ = strategy.experimental_local_results(flag)  # those of all replicas follow from the same sums
        return tf.cond(first, call, tf.no_op)

    # In a branch of its own a replica could not wait for the others.
    return replica().merge_call(around, args=(flag, *args))


def waits() -> bool:
    """Whether replicas wait for each other where they change variables: all but those that XLA compiles for GPUs."""
    return replica() is not None and not tf.__internal__.distribute.strategy_supports_no_merge_call()
