# SPDX-License-Identifier: MIT
"""Steps of compiled code for a recorder: rows of a variable, which are read once for many steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from uniclip.backends import DEFAULT, backend_of
from uniclip.integrations.keras.variables import value_of
from uniclip.report import LOGGED, Parts, Report
from uniclip.tree import flatten

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_TURN = 2**23
"""Where the numbers of the rows restart: float32 holds all integers up to twice that."""
_FIRST = 2 + len(LOGGED)
"""The column of the first leaf, after the number of the row, the scalars, and whether all is finite."""


class Tape:
    """The last steps that compiled code took, as many as the recorder has in a window.

    Parameters
    ----------
    record : Recorder
    count : int
        How many leaves there are.
    writes : bool
        Whether the recorder of this process is the one that writes.
    """

    def __init__(self, record: Recorder, count: int, *, writes: bool = True) -> None:
        self._record, self._writes = record, writes
        width = _FIRST + (count if record.leaves else 0)
        self._rows = _variable(np.zeros((record.every, width), np.float32), "record_rows")
        self._next = _variable(np.zeros((), np.int32), "record_count")
        self._names: tuple[str, ...] | None = None
        self._seen = 0
        self._drains = False
        self.sync: Callable[[], Any] | None = None
        """Sets the variables from the values that a trainer holds; ``None`` where nothing reads them in between."""
        record.draws_from(self.drain)

    @property
    def variables(self) -> list[Any]:
        """The variables that a step of JAX must pass on."""
        return [self._next, self._rows]

    def write(self, report: Report, leaves: Any, places: Sequence[int]) -> None:
        """Write a step in compiled code."""
        self._refuse_fit(inspect.currentframe())
        scalars = report.scalars()
        self._names = tuple(name for name in LOGGED if name in scalars)
        number = value_of(self._next)
        values = [keras.ops.mod(number, _TURN) + 1, *[scalars.get(name, 0.0) for name in LOGGED], _all(report.finite)]
        row = keras.ops.stack([keras.ops.cast(value, "float32") for value in values])
        if leaves is not None:
            every = keras.ops.full((self._rows.shape[1] - _FIRST,), np.nan, "float32")
            where = np.asarray(places, np.int32)[:, None]
            row = keras.ops.concatenate(
                [row, keras.ops.scatter_update(every, where, keras.ops.cast(leaves, "float32"))]
            )
        place = keras.ops.reshape(keras.ops.mod(number, self._rows.shape[0]), (1, 1))
        self._rows.assign(keras.ops.scatter_update(value_of(self._rows), place, row[None]))
        self._next.assign(number + 1)

    def _refuse_fit(self, frame: Any) -> None:
        """Refuse compiled steps of ``fit`` if nothing reads the rows; its list of callbacks is a caller."""
        while frame is not None and self.sync is None:
            if any(isinstance(value, keras.callbacks.CallbackList) for value in frame.f_locals.values()):
                msg = (
                    "the steps of fit are compiled, and record needs a callback that reads them: "
                    "fit(..., callbacks=[LogClipping()])"
                )
                raise ValueError(msg)
            frame = frame.f_back

    def drain(self) -> None:
        """Pass the steps since the last call to the recorder."""
        if self._names is None or self._drains or not self._writes:  # a full window of the recorder calls again
            return
        self._drains = True
        try:
            self._drain()
        finally:
            self._drains = False

    def _drain(self) -> None:
        if self.sync is not None:
            self.sync()
        rows = np.asarray(keras.ops.convert_to_numpy(value_of(self._rows)))
        rows = rows[rows[:, 0] > 0]
        ahead = (rows[:, 0].astype(np.int64) - 1 - self._seen) % _TURN
        new = np.flatnonzero(ahead < _TURN // 2)
        if not len(new):
            return
        lost = int(ahead[new].max()) + 1 - len(new)
        if lost:
            every = self._record.every
            msg = (
                f"{lost} steps of compiled code are missing in {str(self._record.path)!r}, where nobody read them in "
                f"time: give fit callbacks=[LogClipping()], and in a loop of your own call record.flush() at least "
                f"after each {every} steps, with the optimizer's variables assigned"
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        before = (self._record.step or 0) + 1
        for number in new[np.argsort(ahead[new])]:
            row = rows[number]
            leaves = [row[_FIRST:]] if self._record.leaves else []
            self._record.take(self._parts(row), step=before + int(ahead[number]), leaves=leaves)
        self._seen += int(ahead[new].max()) + 1

    def _parts(self, row: np.ndarray[Any, Any]) -> list[Parts]:
        """Return the parts of a report from a row."""
        names = self._names or ()
        if not names:
            return []
        norm, limit, threshold, factor, share, skipped = [row[1 + number] for number in range(len(LOGGED))]
        own = backend_of(value_of(self._next)) or DEFAULT
        there = [name in names for name in LOGGED]
        thresholds, skip = [threshold] if there[2] else None, bool(skipped) if there[5] else None
        finite = [bool(row[_FIRST - 1])]
        return [Parts(own, DEFAULT, [norm], [limit], [factor], thresholds, finite, skip, share)]


def _variable(array: Any, name: str) -> Any:
    """Return a variable that an optimizer does not save."""
    return keras.Variable(lambda *_, **__: array, array.shape, str(array.dtype), trainable=False, name=name)


def _all(flags: Any) -> Any:
    """Return whether all flags are true."""
    found = [keras.ops.all(flag) for flag in flatten(flags).leaves]
    return keras.ops.all(keras.ops.stack(found)) if found else True
