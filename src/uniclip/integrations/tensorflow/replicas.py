# SPDX-License-Identifier: MIT
"""The replicas of ``tf.distribute``: the gradients of each are addends, summed before the sum is clipped."""

from __future__ import annotations

from collections.abc import Sequence
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


def summed(values: Sequence[Any]) -> list[Any]:
    """Return the sums over all replicas, the same ones in each; ``None`` stays where it is."""
    context = replica()
    if context is None:
        return list(values)
    some = [value for value in values if value is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, some) if some else [])
    return [None if value is None else next(sums) for value in values]
