# SPDX-License-Identifier: MIT
"""What Keras logs of clipping."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import keras

from uniclip.integrations.keras.optimizer import ClippedOptimizer

_WRITERS = tuple(getattr(keras.callbacks, name) for name in ("CSVLogger", "RemoteMonitor", "TensorBoard"))
"""The callbacks of Keras that write what is in the logs of an epoch when it ends."""


class LogClipping(keras.callbacks.Callback):
    """Add the scalars of a `ClippedOptimizer` to the logs of each epoch.

    ``"clip/norm"``, ``"clip/limit"`` and ``"clip/factor"`` are those of the epoch's last step, ``"clip/share"`` and
    ``"clip/skipped"`` the average over its steps, and ``"clip/norm_max"`` is the largest norm of them. They are read
    once in an epoch. Put it before callbacks that write the logs, such as ``CSVLogger``; the progress bar and
    ``History`` come last by themselves.

    Warns
    -----
    UserWarning
        When the training begins, if a callback that writes the logs comes before.
    """

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Find the optimizer, also inside of a ``LossScaleOptimizer``."""
        optimizer = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, ClippedOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None:
            msg = (
                f"LogClipping needs a ClippedOptimizer, got {type(self.model.optimizer).__name__}: compile the model "
                "with optimizer=ClippedOptimizer(optimizer, rule)"
            )
            raise TypeError(msg)
        self._optimizer = optimizer
        self._warn(inspect.currentframe())

    def _warn(self, frame: Any) -> None:
        """Say that those that come before write logs without the scalars; the list of callbacks is what calls."""
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
        """Begin the epoch's averages."""
        self._optimizer.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - the signature of a callback
        """Add to the logs."""
        if logs is not None:
            logs.update(self._optimizer.epoch_scalars())
