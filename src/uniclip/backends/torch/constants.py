# SPDX-License-Identifier: MIT
"""A cache of constant vectors on accelerators, with the stream that each was sent on.

The sizes of norms, the limits of groups and the flags of absent gradients are the same at every
step. The key is the values, so that callers store nothing. It is not for values that change:
`uniclip.backends.torch.one_norm.move` sends these.

A CUDA graph that was captured with a constant reads it at each replay, so it is never freed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from uniclip.backends.torch.modes import tracing
from uniclip.backends.torch.one_norm import ACCELERATORS, move
from uniclip.backends.torch.private import in_forward_mode

if TYPE_CHECKING:
    from uniclip._types import View

_CACHE_SIZE = 256
_LARGEST = 2**18
"""The number of bytes up to which a constant is kept."""


class _Sent(NamedTuple):
    """A constant, the stream that it was sent on, and the event after which it has arrived."""

    tensor: torch.Tensor
    stream: Any
    event: Any


_sent: dict[Any, _Sent] = {}
_captured: list[torch.Tensor] = []
"""The constants that captured graphs read."""
_lock = threading.Lock()


def constant(array: View, device: torch.device) -> torch.Tensor:
    """Return a NumPy array, which must not be written, as a tensor on a device."""
    is_kept = device.type in ACCELERATORS and 0 < array.nbytes <= _LARGEST
    if not is_kept or tracing() or in_forward_mode():
        return _send(array, device)

    key = array.tobytes(), array.dtype.str, array.shape, device
    sent = _sent.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A tensor made during a capture lies in the graph's own memory, so it is not cached.
        if sent is None:
            return _send(array, device)
        # A capture begins after all transfers have finished.
        _captured.append(sent.tensor)
        return sent.tensor

    of_device = getattr(torch, device.type)
    stream = of_device.current_stream(device)
    if sent is None:
        tensor = _send(array, device)
        event = of_device.Event()
        event.record(stream)
        # A run with many shapes must not fill the memory of the device with constants.
        with _lock:
            if len(_sent) >= _CACHE_SIZE:
                _sent.clear()
            _sent[key] = _Sent(tensor, stream, event)
        return tensor

    # Another stream may read the constant only after it has arrived.
    if sent.stream != stream:
        stream.wait_event(sent.event)
        # The allocator must not reuse the memory before this stream has read it.
        sent.tensor.record_stream(stream)
    return sent.tensor


def _send(array: View, device: torch.device) -> torch.Tensor:
    """Return a copy of an array on a device."""
    # PyTorch warns of memory that cannot be written.
    writable = array.copy()
    return move(torch.as_tensor(writable, device="cpu"), device)
