# SPDX-License-Identifier: MIT
"""A callback that adds the scalars of a rule to Keras' logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np

from uniclip._errors import whole_number
from uniclip.integrations import check_record
from uniclip.integrations.keras.optimizer import ClippedOptimizer
from uniclip.report import LOGGED, NORM, NORM_MAX

if TYPE_CHECKING:
    from uniclip.insight import Recorder
    from uniclip.integrations.keras.optimizer import Window


class LogClipping(keras.callbacks.Callback):
    """Add the scalars of a `ClippedOptimizer` to the logs of each epoch.

    ``"clip/norm"``, ``"clip/limit"``, ``"clip/threshold"`` if there is one, and ``"clip/factor"``
    are the values of the epoch's last step; ``"clip/share"`` and ``"clip/skipped"`` are averages
    over its steps, and ``"clip/norm_max"`` is the largest norm. A limit or threshold that does not
    exist is NaN. Put the callback before callbacks that write the logs, such as ``CSVLogger``; the
    progress bar and ``History`` always come last.

    Parameters
    ----------
    every : int, optional
        The number of batches after which to read the scalars, which waits for the device; by
        default, the callback reads them only at the end of each epoch.
    record : uniclip.insight.Recorder, optional
        Records one row each time the scalars are read, for the batches since the previous read,
        with the number of the last batch and the largest norm. With ``every=1`` there is a row for
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
                "LogClipping can't record the norms of leaves, because a row covers several steps; "
                "use a recorder with leaves=False"
            )
            raise ValueError(msg)
        self.every = None if every is None else whole_number("every", every, 1)
        self.record = record

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Find the optimizer, which may be inside a ``LossScaleOptimizer``."""
        optimizer = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, ClippedOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None:
            msg = (
                f"LogClipping needs a ClippedOptimizer, got {type(self.model.optimizer).__name__}; "
                "compile the model with optimizer=ClippedOptimizer(optimizer, rule)"
            )
            raise TypeError(msg)

        self._optimizer = optimizer
        if self.record is not None:
            self.record.describe(optimizer.rule)
            self.record.resume(optimizer.batches() if optimizer.built else 0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Reset the statistics of the optimizer and of the epoch."""
        # This call resets the window, so that earlier steps do not count in this epoch.
        self._epoch = np.zeros_like(self._optimizer.window())
        self._batches_read = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Read the statistics after ``every`` batches."""
        batches = batch + 1
        if self.every is not None and batches - self._batches_read >= self.every:
            self._read()
            self._batches_read = batches

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Add the scalars to the logs."""
        self._read()
        if logs is not None:
            logs.update(self._optimizer.named(self._epoch))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Write the remaining rows."""
        if self.record is not None:
            self.record.flush()

    def _read(self) -> None:
        """Read and reset the statistics accumulated since the last call."""
        # On JAX, fit updates the variables only at the end of an epoch, or in this call.
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()

        window = self._optimizer.window()
        self._epoch = _merge(self._epoch, window)

        scalars = self._optimizer.named(window)
        count = window[-2]
        if self.record is None or not scalars or not count:
            return
        # Without a finite norm the largest is 0, and the last norm shows what happened.
        scalars[NORM] = scalars.pop(NORM_MAX) or scalars[NORM]
        self.record(scalars, step=self._optimizer.batches())


def _merge(earlier: Window, later: Window) -> Window:
    """Return the statistics of the steps of two windows."""
    merged = later.copy()
    sums = slice(len(LOGGED), -1)
    merged[sums] = earlier[sums] + later[sums]
    merged[-1] = max(earlier[-1], later[-1])
    return merged
