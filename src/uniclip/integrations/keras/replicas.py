# SPDX-License-Identifier: MIT
"""The replicas of ``tf.distribute``, on TensorFlow: gradients that are summed, steps that all of them take or none."""
# ruff: noqa: SLF001 - Keras has no public way to give an optimizer gradients that are summed

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from uniclip.backends import DEFAULT, backend_of
from uniclip.integrations.keras.variables import when

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    import tensorflow as tf

    from uniclip.integrations.tensorflow import replicas


def refuse_strategies(optimizer: Any, inner: Any) -> None:
    """Refuse a strategy that clipping is not for, and an optimizer inside that was made under another one."""
    if not ON_TENSORFLOW:
        return
    own, other = optimizer._distribution_strategy, inner._distribution_strategy
    replicas.refuse_strategy(own)
    if own is not other:
        msg = (
            f"inner was made under {type(other).__name__}, and ClippedOptimizer under {type(own).__name__}: make "
            "both, and the model, inside of one `with strategy.scope():`"
        )
        raise ValueError(msg)


def summed(grads: list[Any]) -> list[Any]:
    """Return the sums of the gradients that the replicas have."""
    return replicas.summed(grads) if ON_TENSORFLOW else grads


def addends(optimizer: Any) -> AbstractContextManager[Any]:
    """Make variables that are different in each replica, and as saved or read from outside the sum of all."""
    if not ON_TENSORFLOW or optimizer._distribution_strategy.num_replicas_in_sync == 1:
        return nullcontext()
    both = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    scope: AbstractContextManager[Any] = tf.variable_creator_scope(lambda make, **options: make(**options | both))
    return scope


def addable(grad: Any) -> Any:
    """Return a gradient that can be added to what `addends` made."""
    sparse = ON_TENSORFLOW and isinstance(grad, tf.IndexedSlices)
    return tf.convert_to_tensor(grad) if sparse and replicas.replica() is not None else grad


def apply(inner: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Have the optimizer inside take a step with gradients that are summed, and not sum them again."""
    if not ON_TENSORFLOW or replicas.replica() is None:
        inner.apply(grads, variables)
        return
    once = vars(inner).get("_all_reduce_sum_gradients")
    if once is None:
        once = vars(inner)["_all_reduce_sum_gradients"] = _Once(inner._all_reduce_sum_gradients)
    with once:
        inner.apply(list(map(_kept, grads)), variables)


def _kept(grad: Any) -> Any:
    """Return a gradient that Grappler takes as it is: it would multiply factor and rate first, in one replica of two."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_kept(grad.values), grad.indices, grad.dense_shape)
    return tf.ensure_shape(grad, grad.shape)


class _Once(threading.local):
    """The sum over replicas that an optimizer asks for, which in a ``with`` is what it is given.

    Each replica is a thread, and has a ``with`` of its own.
    """

    def __init__(self, sums: Callable[[Any], Any]) -> None:
        self.sums, self.asked = sums, -1
        """How often it was asked in the ``with``; -1 outside."""

    def __enter__(self) -> None:
        self.asked = 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        asked, self.asked = self.asked, -1
        if kind is None and asked != 1:
            msg = (
                f"the optimizer inside asked {asked} times for sums over the replicas, and not once, as Keras' own do: "
                "its steps would be wrong, so clip in your own step, by uc.clip"
            )
            raise RuntimeError(msg)

    def __call__(self, pairs: Any) -> Any:
        """Return pairs of a gradient, summed, and its variable."""
        if self.asked < 0:
            return self.sums(pairs)
        self.asked += 1
        return list(pairs)


def when_in_all(flag: Any, function: Callable[..., None], args: Sequence[Any], held: list[Any]) -> None:
    """Call a function where the flag holds, as `when` does; in compiled code of replicas in all of them or in none.

    What a replica knows alone is in ``args``: the function that all of them call is that of the first.
    """
    if not ON_TENSORFLOW or not _merged(flag):
        when(flag, lambda: function(*args), held)
        return

    def around(strategy: Any, flag: Any, *args: Any) -> None:
        first, *_ = strategy.experimental_local_results(flag)  # those of all replicas follow from the same sums
        tf.cond(first, lambda: _ran(strategy, function, args), tf.no_op)

    replicas.replica().merge_call(around, args=(flag, *args))


def _ran(strategy: Any, function: Callable[..., None], args: Sequence[Any]) -> Any:
    """Run a function in each replica, and return an operation, as the other branch does."""
    strategy.extended.call_for_each_replica(function, args=args)
    return tf.no_op()


def _merged(flag: Any) -> bool:
    """Whether replicas wait for each other here, which they cannot do in a branch of their own."""
    number = keras.ops.cast(flag, "int32")
    traced = (backend_of(number) or DEFAULT).traced(number)
    free = tf.__internal__.distribute.strategy_supports_no_merge_call()
    return replicas.replica() is not None and traced and not free
