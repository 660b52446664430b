# SPDX-License-Identifier: MIT
"""Constant vectors on accelerators: sent once, and kept with the stream that they were sent on.

The sizes of norms, the limits of groups and the flags of absent gradients are the same at every
step. Each is found again by its values, so nobody else has to keep it. It is not for values that
change, which `uniclip.backends.torch.fast_path.move` sends.

A CUDA graph that was captured with a constant reads it at each replay, so it is never let go.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from uniclip.backends.torch.fast_path import ACCELERATORS, move
from uniclip.backends.torch.modes import in_forward_mode, tracing

if TYPE_CHECKING:
    import numpy as np

_CACHE_SIZE = 256
_LARGEST = 2**18
"""The number of bytes up to which a constant is kept."""


class _Sent(NamedTuple):
    """A constant, the stream that it was sent on, and the event after which it is there."""

    tensor: torch.Tensor
    stream: Any
    event: Any


_sent: dict[Any, _Sent] = {}
_captured: list[torch.Tensor] = []
"""What captured graphs read."""
_lock = threading.Lock()


def constant(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    """Return a NumPy array, which must not be written, as a tensor on a device."""
    is_kept = device.type in ACCELERATORS and 0 < array.nbytes <= _LARGEST
    if not is_kept or tracing() or in_forward_mode():
        return _send(array, device)

    key = array.tobytes(), array.dtype.str, array.shape, device
    sent = _sent.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if sent is None:
            return _send(array, device)
        # A capture begins after all that was sent is there.
        _captured.append(sent.tensor)
        return sent.tensor

    of_device = getattr(torch, device.type)
    stream = of_device.current_stream(device)
    if sent is None:
        tensor = _send(array, device)
        event = of_device.Event()
        event.record(stream)
        with _lock:
            if len(_sent) >= _CACHE_SIZE:
                _sent.clear()
            _sent[key] = _Sent(tensor, stream, event)
        return tensor
    if sent.stream != stream:
        stream.wait_event(sent.event)
        sent.tensor.record_stream(stream)
    return sent.tensor


def _send(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    """Return a copy of an array on a device; PyTorch warns of memory that cannot be written."""
    sent: torch.Tensor = move(torch.as_tensor(array.copy(), device="cpu"), device)
    return sent
