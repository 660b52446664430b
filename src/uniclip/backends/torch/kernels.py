# SPDX-License-Identifier: MIT
"""Decide on which devices the Triton kernels of `uniclip.backends.torch.triton` run.

Callers use PyTorch's own functions if `kernels_on` returns ``None``. Triton is imported at the
first use on an accelerator, so never on a CPU.

The environment variable ``UNICLIP_TRITON`` is read at each step. ``0`` turns the kernels off.
``1`` also allows what is not tested: AMD and Intel GPUs, other versions of Triton, and Triton's
interpreter (``TRITON_INTERPRET=1``).
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
from typing import TypeAlias

import torch

_Decision: TypeAlias = ModuleType | None
"""The module of kernels, ``None`` for PyTorch's own functions."""

_LOG = logging.getLogger("uniclip")
_MINIMUM_CAPABILITY = (7, 0)
"""Volta: the oldest NVIDIA GPUs for which Triton compiles."""
_VERSIONS = {(3, 3), (3, 4), (3, 5), (3, 6), (3, 7), (3, 8)}
"""Versions of Triton that ``tox -e triton`` compiles all kernels with. PyTorch 2.7 brings 3.3."""
_DEVICE_TYPES = {"cuda", "xpu"}
"""Devices with float64 whose memory has addresses. PyTorch calls AMD's "cuda", too."""
_ERROR_LENGTH = 200

_decisions: dict[tuple[torch.device, str | None], _Decision] = {}
"""By device and by the value of ``UNICLIP_TRITON``."""
_failures: dict[torch.device, str] = {}
"""Errors of kernels, by device."""
_lock = threading.Lock()


def kernels_on(device: torch.device) -> _Decision:
    """Return the module of kernels, or ``None`` if PyTorch's own functions are to be used."""
    setting = os.environ.get("UNICLIP_TRITON")
    if setting == "0":
        return None

    key = device, setting
    if key in _decisions:
        return _decisions[key]

    if setting not in {None, "", "1"}:
        msg = f'the environment variable UNICLIP_TRITON must be "0", "1", or unset, got {setting!r}'
        raise ValueError(msg)

    decision = _load(device, allow_untested=setting == "1")
    with _lock:
        # Another thread may have failed while this one imported Triton.
        if device in _failures:
            decision = None
        _decisions[key] = decision
    return decision


def give_up(device: torch.device, error: BaseException) -> None:
    """Stop using the kernels on a device, and warn once."""
    message = f"{type(error).__name__}: {error}".strip()
    if len(message) > _ERROR_LENGTH:
        message = f"{message[:_ERROR_LENGTH]}..."

    with _lock:
        is_first = not _failures
        _failures[device] = message
        for key in list(_decisions):
            if key[0] == device:
                _decisions[key] = None

    # A warning may raise an error or run a user's hook, so it is given outside of the lock.
    if is_first:
        warnings.warn(
            f"uniclip's Triton kernels cannot be used on {device} ({message}), and PyTorch's own "
            "functions take longer; install a C compiler and set TRITON_CACHE_DIR to a writable "
            "directory, or turn the kernels off by UNICLIP_TRITON=0",
            UserWarning,
            stacklevel=2,
        )


def _load(device: torch.device, *, allow_untested: bool) -> _Decision:
    """Return the module of kernels if a device and the installed Triton are supported."""
    if device in _failures or not _is_supported(device, allow_untested=allow_untested):
        return None

    # Triton and TensorFlow bring an LLVM each. Loading the second one can end the process.
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        _LOG.warning(
            "uniclip does not load Triton beside TensorFlow, which can end the process, and "
            "PyTorch's own functions take longer to clip gradients on %s; import TensorFlow in "
            "another process",
            device,
        )
        return None

    if importlib.util.find_spec("triton") is None:
        return None
    try:
        version = importlib.import_module("triton").__version__
        is_tested = tuple(map(int, version.split(".")[:2])) in _VERSIONS
        if not is_tested and not allow_untested:
            _LOG.info("uniclip uses PyTorch's own functions: Triton %s is not tested", version)
            return None
        return importlib.import_module("uniclip.backends.torch.triton")
    except (ImportError, OSError) as error:
        # An installation can be broken, as by a missing library.
        give_up(device, error)
        return None


def _is_supported(device: torch.device, *, allow_untested: bool) -> bool:
    """Return whether kernels may run on a device."""
    # The interpreter is for tests, and for writing kernels.
    if os.environ.get("TRITON_INTERPRET") == "1":
        return allow_untested
    if device.type not in _DEVICE_TYPES:
        return False

    # Only NVIDIA's GPUs are tested.
    if device.type == "cuda" and torch.version.hip is None:
        return bool(torch.cuda.get_device_capability(device) >= _MINIMUM_CAPABILITY)
    return allow_untested
