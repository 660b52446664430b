# SPDX-License-Identifier: MIT
"""A callback that adds clipping to Keras' logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from uniclip._errors import whole
from uniclip.integrations import check_record
from uniclip.integrations.keras.optimizer import ClippedOptimizer
from uniclip.report import LOGGED, NORM, NORM_MAX

if TYPE_CHECKING:
    from uniclip.insight import Recorder


class LogClipping(keras.callbacks.Callback):
    """Add the scalars of a `ClippedOptimizer` to the logs of each epoch.

    ``"clip/norm"``, ``"clip/limit"``, ``"clip/threshold"`` if there is one, and ``"clip/factor"``
    are those of the epoch's last step; ``"clip/share"`` and ``"clip/skipped"`` are averages over
    its steps, and ``"clip/norm_max"`` is their largest norm. Put it before callbacks that write the
    logs, such as ``CSVLogger``; the progress bar and ``History`` always come last.

    Parameters
    ----------
    every : int, optional
        The number of batches after which the scalars are read, which waits for the device; by
        default they are read at the end of each epoch only.
    record : uniclip.insight.Recorder, optional
        Gets the scalars each time they are read, over the batches since the time before: one row,
        with the number of the last batch, and the largest norm. With ``every=1`` that is a row for
        each step.

    Raises
    ------
    TypeError
        If ``every`` is not a whole number, or ``record`` not a recorder; at the start of training,
        if the optimizer is not a `ClippedOptimizer`.
    ValueError
        If ``every`` is below 1.

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

    def __init__(self, every: int | None = None, record: Recorder | None = None) -> None:
        super().__init__()
        check_record(record)
        if record is not None and record.leaves:
            msg = (
                "record must be without leaves: a row of LogClipping is of many steps, whose "
                "leaves are not measured"
            )
            raise ValueError(msg)
        self.every = None if every is None else whole("every", every, 1)
        self.record = record

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the optimizer, also inside a ``LossScaleOptimizer``."""
        optimizer = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, ClippedOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None:
            msg = (
                "LogClipping needs a ClippedOptimizer, got "
                f"{type(self.model.optimizer).__name__}: compile the model with "
                "optimizer=ClippedOptimizer(optimizer, rule)"
            )
            raise TypeError(msg)
        self._optimizer = optimizer
        if self.record is not None:
            self.record.describe(optimizer.rule)
            self.record.resume(optimizer.batches() if optimizer.built else 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a window."""
        self._epoch, self._read_at = 0 * self._optimizer.window(), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read a window that is full."""
        if self.every is not None and batch + 1 - self._read_at >= self.every:
            self._read()
            self._read_at = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the scalars to the logs."""
        self._read()
        if logs is not None:
            logs.update(self._optimizer.named(self._epoch))

    def on_train_end(self, logs: Any = None) -> None:
        """Write the remaining rows."""
        if self.record is not None:
            self.record.flush()

    def _read(self) -> None:
        """Read what steps have left in variables since the time before, and begin anew."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        window = self._optimizer.window()
        *sums, _ = self._epoch[len(LOGGED) :] + window[len(LOGGED) :]
        self._epoch = np.asarray([*window[: len(LOGGED)], *sums, max(self._epoch[-1], window[-1])])
        row = self._optimizer.named(window)
        if self.record is not None and row and window[-2]:
            row[NORM] = row.pop(NORM_MAX) or row[NORM]
            self.record(row, step=self._optimizer.batches())
