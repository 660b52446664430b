# SPDX-License-Identifier: MIT
"""The loss of a step: where processes share their norms, the mean of their losses, so that all of them decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uniclip.layout import Opened
from uniclip.measure import AllReduce


class Loss:
    """A loss that is known once somebody looks at it, and then stays the same."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find, self._found = find, False
        self._value: Any = None

    def __call__(self) -> Any:
        """Return the loss, ``None`` if there is none."""
        if not self._found:
            self._value, self._found = self._find(), True
        return self._value


def loss_of(opened: Opened, all_reduce: AllReduce | None, given: Any) -> Loss:
    """Return the loss of a step: of all processes that hold parts of the gradients."""

    def find() -> Any:
        own = given() if isinstance(given, Loss) else given
        added = opened.backend.added(opened.arrays)
        return own if added is None and all_reduce is None else _mean(opened, added, all_reduce, own)

    return Loss(find)


def _mean(opened: Opened, added: Callable[[Any], Any] | None, all_reduce: AllReduce | None, own: Any) -> Any:
    """Return the mean of the losses of those processes that have one; a process without one takes part, too."""
    backend, xp = opened.backend, opened.backend.xp
    values = [xp.asarray(0.0, dtype=xp.float32)] * 2
    if own is not None:
        loss = backend.detached(xp.astype(xp.asarray(own), xp.float32))
        values = [xp.reshape(loss, ()), xp.asarray(1.0, dtype=xp.float32)]
    total = xp.stack([value if opened.first is None else backend.to_device_of(opened.first, value) for value in values])
    total = total if added is None else added(total)
    total = total if all_reduce is None else all_reduce(total, "sum")
    loss, count = total[0], total[1]
    if backend.readable(count):
        return loss / count if bool(count > 0) else None
    if own is not None:
        return loss / count
    some = count > 0
    # Without any loss it is -∞, which is no spike, and is not kept.
    return loss / xp.where(some, count, 1.0) + xp.log(xp.astype(some, xp.float32))
