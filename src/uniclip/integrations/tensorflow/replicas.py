# SPDX-License-Identifier: MIT
"""The replicas of ``tf.distribute``: their gradients are addends, summed before the sum is clipped."""

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
    """Refuse a strategy whose replicas do not keep a copy of each variable, or that is untested."""
    if isinstance(strategy, _OTHERS):
        msg = (
            f"ClippedOptimizer is not for {type(strategy).__name__}: take MirroredStrategy, OneDeviceStrategy or "
            "MultiWorkerMirroredStrategy, or in your own step sum the gradients of all replicas, clip the sum by "
            "uc.clip, and hand that to the optimizer inside"
        )
        raise ValueError(msg)  # noqa: TRY004 - a strategy it is


def replica() -> Any:
    """Return the context of the running replica, or ``None`` without a strategy.

    Raises
    ------
    RuntimeError
        In ``strategy.scope()``, where no replica runs.
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
    """Return a number for the running replica, each of which is a thread; ``None`` outside of replicas."""
    inside = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    return threading.get_ident() if inside else None


def is_first() -> bool:
    """Whether this is the first replica of all, or none runs."""
    context = replica()
    return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0


def writes(strategy: Any) -> bool:
    """Whether this process, of the workers of a strategy, writes files."""
    return bool(strategy.extended.should_save_summary)


def joined(operation: Any) -> Any:
    """Return an operation that runs those of all replicas, as a TensorFlow 1 optimizer does."""
    if operation is None or not waits() or tf.executing_eagerly():
        return operation
    return replica().merge_call(lambda strategy, one: tf.group(*strategy.experimental_local_results(one)), (operation,))


def summed(values: Sequence[Any]) -> list[Any]:
    """Return the sums over all replicas, equal in each; ``None`` stays."""
    context = replica()
    if context is None:
        return list(values)
    some = [value for value in values if value is not None]
    sums = iter(map(_shaped, some, context.all_reduce(tf.distribute.ReduceOp.SUM, some) if some else []))
    return [None if value is None else next(sums) for value in values]


def _shaped(value: Any, total: Any) -> Any:
    """Return a sum with the known shape of a sparse addend."""
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values, total.indices, value.dense_shape)
    return total


def kept(grad: Any) -> Any:
    """Return a gradient that Grappler does not rewrite: it would multiply factor and rate first, in one replica."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(kept(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else tf.ensure_shape(grad, grad.shape)


def in_all(flag: Any, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function in all replicas if the flag is true, else in none; return an operation that does so.

    Values that differ between replicas are in ``args``, as all of them call the function of the first. Not for eager
    code.
    """

    def around(strategy: Any, flag: Any, *args: Any) -> Any:
        def call() -> Any:
            done = strategy.extended.call_for_each_replica(function, args=args)
            return tf.group(*[one for one in strategy.experimental_local_results(done) if one is not None])

        first, *_ = strategy.experimental_local_results(flag)  # equal in all replicas, computed from the same sums
        return tf.cond(first, call, tf.no_op)

    # In its own branch a replica could not wait for the others.
    return replica().merge_call(around, args=(flag, *args))


def waits() -> bool:
    """Whether replicas wait for each other where they change variables: all except those that XLA compiles for GPUs."""
    return replica() is not None and not tf.__internal__.distribute.strategy_supports_no_merge_call()
