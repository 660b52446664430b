# SPDX-License-Identifier: MIT
"""How much memory a call takes at its peak, beyond what there was before: on Linux, from the kernel's own count."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_of(call: Callable[[Any], Any], ready: Callable[[], Any]) -> int | None:
    """Return the bytes, or None where the kernel does not count them; the call has been made before."""
    if sys.platform != "linux":
        return None
    grads = ready()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    before = _status("VmRSS")
    call(grads)
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
