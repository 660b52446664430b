# SPDX-License-Identifier: MIT
"""A callback that adds clipping to Keras' logs."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras

from uniclip.integrations.keras.optimizer import ClippedOptimizer

_WRITERS = tuple(getattr(keras.callbacks, name) for name in ("CSVLogger", "RemoteMonitor", "TensorBoard"))
"""Callbacks of Keras that write the logs of an epoch at its end."""


class LogClipping(keras.callbacks.Callback):
    """Add the scalars of a `ClippedOptimizer` to the logs of each epoch.

    ``"clip/norm"``, ``"clip/limit"``, ``"clip/threshold"`` if there is one, and ``"clip/factor"`` are those of the
    epoch's last step; ``"clip/share"`` and ``"clip/skipped"`` are averages over its steps, and ``"clip/norm_max"`` is
    their largest norm. They are read once per epoch. Steps that the optimizer records are read once per window, and
    at the end of each epoch. Put it before callbacks that write the logs, such as ``CSVLogger``; the progress bar and
    ``History`` always come last.

    Raises
    ------
    TypeError
        At the start of training, if the optimizer is not a `ClippedOptimizer`.
    ValueError
        At the start of training, if the optimizer records and ``steps_per_execution`` exceeds its window, or if on JAX
        it is in a ``LossScaleOptimizer``, which would save the recorded steps.

    Warns
    -----
    UserWarning
        At the start of training, if a callback that writes the logs comes before.

    Examples
    --------
    >>> import keras
    >>> from uniclip.integrations.keras import ClippedOptimizer, LogClipping
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> optimizer = ClippedOptimizer(keras.optimizers.SGD(0.1), uc.by_global_norm(1.0))
    >>> model.compile(optimizer, "mse")
    >>> x, y = np.ones((4, 2)), np.ones((4, 1))
    >>> history = model.fit(x, y, verbose=0, callbacks=[LogClipping()])
    >>> sorted(history.history)
    ['clip/factor', 'clip/limit', 'clip/norm', 'clip/norm_max', 'clip/share', 'loss']
    """

    def __repr__(self) -> str:
        """Return the callback as source text."""
        return "<LogClipping>"

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Find the optimizer, also inside a ``LossScaleOptimizer``."""
        optimizer = outside = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, ClippedOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None:
            msg = (
                f"LogClipping needs a ClippedOptimizer, got {type(self.model.optimizer).__name__}: compile the model "
                "with optimizer=ClippedOptimizer(optimizer, rule)"
            )
            raise TypeError(msg)
        self._optimizer = optimizer
        self._unread = 0
        if optimizer.record is not None:
            self._refuse(optimizer.record, outside)
        self._warn(inspect.currentframe())

    def _refuse(self, record: Any, outside: Any) -> None:
        """Refuse to record steps that could not be read in time, or would be saved."""
        if self.model.steps_per_execution > record.every:
            msg = (
                f"steps_per_execution={self.model.steps_per_execution} is above the {record.every} steps of a window, "
                f"and some would be lost: Recorder(..., every={self.model.steps_per_execution})"
            )
            raise ValueError(msg)
        if keras.backend.backend() == "jax" and outside is not self._optimizer:
            msg = (
                f"on JAX {type(outside).__name__} would save what is recorded among its variables: train without it, "
                "in mixed_bfloat16, say, which needs none; or clip and record in a loop of your own"
            )
            raise ValueError(msg)

    def _warn(self, frame: Any) -> None:
        """Warn that callbacks that come before write logs without the scalars; the list of callbacks is the caller."""
        while frame is not None and not isinstance(frame.f_locals.get("self"), keras.callbacks.CallbackList):
            frame = frame.f_back
        callbacks = [] if frame is None else frame.f_locals["self"].callbacks
        before = callbacks[: callbacks.index(self)] if self in callbacks else []
        early = [type(callback).__name__ for callback in before if isinstance(callback, _WRITERS)]
        if early:
            msg = (
                f"{', '.join(early)} comes before LogClipping, and writes logs without clip/norm and the others: put "
                f"LogClipping first, callbacks=[LogClipping(), {early[0]}(...)]"
            )
            warnings.warn(msg, UserWarning, stacklevel=2)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Restart the epoch's averages."""
        self._optimizer.begin_epoch()
        self._optimizer.begin_reading(getattr(self.model, "jax_state_sync", _nothing))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Have unread steps read by the recorder, before they exceed its window."""
        record, steps = self._optimizer.record, self.model.steps_per_execution
        if record is None:
            return
        if self._unread + steps > record.every:
            record.flush()
            self._unread = 0
        self._unread += steps

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Add the scalars to the logs."""
        if logs is not None:
            logs.update(self._optimizer.epoch_scalars())
        if self._optimizer.record is not None:
            self._optimizer.record.flush()
            self._unread = 0

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Read the remaining steps."""
        if self._optimizer.record is not None:
            self._optimizer.record.flush()
        self._optimizer.begin_reading(None)


def _nothing() -> None:
    """Leave variables as they are; on backends other than JAX compiled steps change them."""
