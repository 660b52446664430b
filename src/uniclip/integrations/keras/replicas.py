# SPDX-License-Identifier: MIT
"""The replicas of ``tf.distribute``, on TensorFlow: summed gradients, and steps taken by all replicas or by none."""
# ruff: noqa: SLF001 - Keras has no public way to give an optimizer gradients that are summed

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from uniclip.integrations.keras.variables import traced, when

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    import tensorflow as tf

    from uniclip.integrations.tensorflow import replicas


def refuse_strategies(optimizer: Any, inner: Any) -> None:
    """Refuse an unsupported strategy, and a wrapped optimizer that was created under another one."""
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
    """Return the sums of the replicas' gradients."""
    return replicas.summed(grads) if ON_TENSORFLOW else grads


def addends(optimizer: Any) -> AbstractContextManager[Any]:
    """Create variables that differ between replicas; saved, or read from outside, they are the sum of all."""
    if not ON_TENSORFLOW or optimizer._distribution_strategy.num_replicas_in_sync == 1:
        return nullcontext()
    both = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    scope: AbstractContextManager[Any] = tf.variable_creator_scope(lambda make, **options: make(**options | both))
    return scope


def addable(grad: Any) -> Any:
    """Return a gradient that can be added to a variable of `addends`."""
    sparse = ON_TENSORFLOW and isinstance(grad, tf.IndexedSlices)
    return tf.convert_to_tensor(grad) if sparse and replicas.replica() is not None else grad


def apply(inner: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Let the wrapped optimizer take a step with summed gradients, without summing them again."""
    if not ON_TENSORFLOW or replicas.replica() is None:
        inner.apply(grads, variables)
        return
    once = vars(inner).get("_all_reduce_sum_gradients")
    if once is None:
        once = vars(inner)["_all_reduce_sum_gradients"] = _Once(inner._all_reduce_sum_gradients)
    with once:
        inner.apply(list(map(replicas.kept, grads)), variables)


def is_first() -> bool:
    """Whether this is the first replica of all, or none runs."""
    return not ON_TENSORFLOW or replicas.is_first()


def writes(optimizer: Any) -> bool:
    """Whether this process, of several workers, writes files."""
    return not ON_TENSORFLOW or replicas.writes(optimizer._distribution_strategy)


class _Once(threading.local):
    """The sum over replicas that an optimizer calls, which inside a ``with`` returns its argument.

    Each replica is a thread with its own ``with``.
    """

    def __init__(self, sums: Callable[[Any], Any]) -> None:
        self.sums, self.asked = sums, -1
        """How often it was called in the ``with``; -1 outside."""

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
    """Call a function where the flag is true, as `when` does; compiled code of replicas calls it in all or none."""
    if ON_TENSORFLOW and replicas.waits() and traced(flag):
        replicas.in_all(flag, function, args)
    else:
        when(flag, lambda: function(*args), held)
