# SPDX-License-Identifier: MIT
"""The loss of a step: where processes share norms, the mean of their losses, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uniclip.layout import Opened


class Loss:
    """A loss that is already reduced; it is computed on first access and then stays the same."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find, self._found = find, False
        self._value: Any = None

    def __call__(self) -> Any:
        """Return the loss, ``None`` if there is none."""
        if not self._found:
            self._value, self._found = self._find(), True
        return self._value


def as_scalars(given: Opened, loss: Any) -> list[Any]:
    """Return the loss of this process and its count, to be summed over all processes: 0 and 0 without a loss."""
    backend, xp = given.backend, given.backend.xp
    values = [xp.asarray(0.0, dtype=xp.float32)] * 2
    if loss is not None:
        own = backend.detached(xp.astype(xp.asarray(loss), xp.float32))
        values = [xp.reshape(own, ()), xp.asarray(1.0, dtype=xp.float32)]
    return values if given.first is None else [backend.to_device_of(given.first, value) for value in values]


def mean_of(given: Opened, loss: Any, count: Any, *, own: bool) -> Any:
    """Return the mean of losses, given their sum and number; ``None`` if it is known that there is no loss.

    Without any loss it is -∞ where numbers cannot be read, which is not a spike, and not kept. ``own`` tells that this
    process has a loss.
    """
    backend, xp = given.backend, given.backend.xp
    if own:
        return loss / count
    if backend.readable(count):
        return loss / count if bool(count > 0) else None
    some = count > 0
    return loss / xp.where(some, count, 1.0) + xp.log(xp.astype(some, xp.float32))
