# SPDX-License-Identifier: MIT
"""What the checks and the measurements of ``gpu.py`` share. It is imported before Triton."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
HAS_GPU = torch.cuda.is_available()
# Triton reads the variable when it is imported.
if not HAS_GPU:
    os.environ |= {"TRITON_INTERPRET": "1"}

from kit.devices import elsewhere  # noqa: E402 - needs the path above

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


class Run:
    """The results of checks, and the remaining time."""

    def __init__(self, minutes: float, wanted: set[str]) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.wanted = wanted
        self.passed = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def section(self, name: str) -> bool:
        """Return whether to run a section."""
        if self.wanted and name not in self.wanted:
            return False
        print(f"\n## {name}", flush=True)
        return True

    def leave_out(self, name: str, need: str) -> None:
        """Note that a section cannot run here, unless nobody wants it."""
        if not self.wanted or name in self.wanted:
            self.left_out.append(f"{name} (needs {need})")

    def has_time(self, name: str) -> bool:
        """Return whether there is time for another part."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(f"{name} (no time)")
        return False

    def check(self, name: str, function: Callable[[], None]) -> None:
        """Run a check, and continue after a failure, since machines with a GPU are rare."""
        if not self.has_time(name):
            return
        try:
            function()
        except Exception as error:  # noqa: BLE001 - all failures are printed
            self.failed.append(name)
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:260]
            print(f"FAILED {name}: {type(error).__name__} {text} ({place.name}:{place.lineno})")
        else:
            self.passed += 1


@contextmanager
def with_kernels(*, triton: bool) -> Iterator[None]:
    """Turn the Triton kernels on or off. On a CPU, let tensors report an accelerator."""
    wish = "0" if not triton else "1" if not HAS_GPU else ""
    with (
        mock.patch.dict(os.environ, UNICLIP_TRITON=wish),
        nullcontext() if HAS_GPU else elsewhere(),
    ):
        yield


def needs(rule: Any) -> Any:
    """Return the arguments that a rule needs besides the gradients."""
    return getattr(getattr(rule, "limit", None), "needs", ())


def synchronize() -> None:
    """Wait for the GPU."""
    if HAS_GPU:
        torch.cuda.synchronize()


def norm_of(arrays: Sequence[torch.Tensor]) -> float:
    """Return the joint norm in float64."""
    norms = [torch.linalg.vector_norm(array, dtype=torch.float64) for array in arrays]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Return parameters with gradients."""
    made = [torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Let PyTorch raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
