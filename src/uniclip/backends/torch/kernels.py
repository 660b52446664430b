# SPDX-License-Identifier: MIT
"""Decide where the Triton kernels of `uniclip.backends.torch.triton` run.

Everybody else asks `kernels_on` and takes PyTorch's own functions if the answer is ``None``. Triton
is imported at the first use on an accelerator, so never on a CPU.

The environment variable ``UNICLIP_TRITON`` is read at each step. ``0`` turns the kernels off.
``1`` also tries them where they are not tested: AMD and Intel GPUs, other versions of Triton,
and in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
import warnings
from types import ModuleType
from typing import Any

import torch

_LOG = logging.getLogger("uniclip")
_MINIMUM_CAPABILITY = (7, 0)
"""Volta: the oldest NVIDIA GPUs for which Triton compiles."""
_VERSIONS = {(3, 3), (3, 4), (3, 5), (3, 6), (3, 7), (3, 8)}
"""Versions of Triton by which ``tox -e triton`` compiles all kernels. PyTorch 2.7 brings 3.3."""
_DEVICES_IF_ASKED = {"cuda", "xpu"}
"""Devices with float64 and addresses that a kernel can follow. PyTorch calls AMD's "cuda", too."""
_ERROR_LENGTH = 200
_UNDECIDED = object()

_decisions: dict[tuple[Any, str | None], ModuleType | None] = {}
"""The answer by device and by the value of ``UNICLIP_TRITON``."""
_failures: dict[Any, str] = {}
"""Why kernels cannot be used on a device, though they should."""
_lock = threading.Lock()


def kernels_on(device: Any) -> ModuleType | None:
    """Return the module of kernels, or ``None`` where PyTorch's own functions are to be used."""
    wish = os.environ.get("UNICLIP_TRITON")
    if wish == "0":
        return None

    decision: Any = _decisions.get((device, wish), _UNDECIDED)
    if decision is _UNDECIDED:
        decision = _load(device, asked=wish == "1")
        with _lock:
            if device in _failures:  # of another thread, meanwhile
                decision = None
            _decisions[device, wish] = decision
    return decision


def give_up(device: Any, error: BaseException) -> None:
    """Use the kernels on a device no more, and warn once."""
    message = f"{type(error).__name__}: {error}".strip()
    message = message if len(message) <= _ERROR_LENGTH else f"{message[:_ERROR_LENGTH]}..."
    with _lock:
        is_first = not _failures
        _failures[device] = message
        for key in [key for key in _decisions if key[0] == device]:
            _decisions[key] = None
    if is_first:
        warnings.warn(
            f"uniclip's Triton kernels cannot be used on {device}, so PyTorch's own functions are, "
            f"which take longer ({message}). Triton needs a C compiler, and a cache directory that "
            "it can write (TRITON_CACHE_DIR). UNICLIP_TRITON=0 turns the kernels off",
            UserWarning,
            stacklevel=2,
        )


def _load(device: Any, *, asked: bool) -> ModuleType | None:
    """Return the module of kernels if a device, and the Triton that is installed, are supported."""
    if device in _failures or not _is_supported(device, asked=asked):
        return None

    # Triton and TensorFlow bring an LLVM each. The second to be loaded ends the process.
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        _LOG.warning(
            "TensorFlow is loaded, so Triton is not: gradients on %s are clipped by PyTorch's own "
            "functions, which take longer. Import Triton before TensorFlow if you need both",
            device,
        )
        return None

    if importlib.util.find_spec("triton") is None:
        return None
    try:
        version = importlib.import_module("triton").__version__
        if tuple(map(int, version.split(".")[:2])) not in _VERSIONS and not asked:
            _LOG.info("Triton %s is not tested: PyTorch's own functions are used", version)
            return None
        return importlib.import_module("uniclip.backends.torch.triton")
    except (ImportError, OSError) as error:  # installed, and broken
        give_up(device, error)
        return None


def _is_supported(device: Any, *, asked: bool) -> bool:
    """Return whether kernels are to be tried on a device."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # for tests, and for those who write kernels
        return asked
    if device.type not in _DEVICES_IF_ASKED:
        return False
    if device.type == "cuda" and torch.version.hip is None:
        return bool(torch.cuda.get_device_capability(device) >= _MINIMUM_CAPABILITY)
    return asked
