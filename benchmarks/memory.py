# SPDX-License-Identifier: MIT
"""How much memory a call takes at its peak, from the kernel's count of this process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak(call: Callable[[Any], Any], ready: Callable[[], Any]) -> int | None:
    """Return the bytes a call takes at its peak beyond those before; None where the kernel tells no peak."""
    if sys.platform != "linux":
        return None
    grads = ready()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    before = resident("VmRSS")
    call(grads)
    return max(0, resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return a count of bytes that the kernel keeps of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))
