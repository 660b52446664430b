# SPDX-License-Identifier: MIT
"""Decide on which devices the Triton kernels of `uniclip.backends.torch.triton` run.

Callers use PyTorch's own functions if `kernels_on` returns ``None``. On an NVIDIA GPU, the log says
why, once. Triton is imported at the first use on an accelerator, so never on a CPU.

The environment variable ``UNICLIP_TRITON`` is read at each step. ``0`` turns the kernels off.
``1`` also allows what is not tested: AMD and Intel GPUs, other versions of Triton, and Triton's
interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import threading
import warnings
from types import ModuleType
from typing import TypeAlias

import torch

_Decision: TypeAlias = ModuleType | None
"""The module of kernels, ``None`` for PyTorch's own functions."""

_LOG = logging.getLogger("uniclip")
_VERSIONS = {(3, 3), (3, 4), (3, 5), (3, 6), (3, 7), (3, 8)}
"""Versions of Triton that ``tox -e triton`` compiles all kernels with. PyTorch 2.7 brings 3.3."""
_VOLTA, _HOPPER = (7, 0), (9, 0)
"""Every version above compiles the kernels for all compute capabilities in this range."""
_FIRST_VERSIONS = {
    (10, 0): (3, 3),
    (10, 3): (3, 6),
    (11, 0): (3, 7),
    (12, 0): (3, 3),
    (12, 1): (3, 6),
}
"""The first version that compiles for each newer GPU. An older one can end the process instead of
raising an error, and so can any version on a GPU that is not listed.
"""
_DEVICE_TYPES = {"cuda", "xpu"}
"""Devices with float64 whose memory has addresses. PyTorch calls AMD's "cuda", too."""
_ERROR_LENGTH = 200

_decisions: dict[tuple[torch.device, str | None], _Decision] = {}
"""By device and by the value of ``UNICLIP_TRITON``."""
_failures: dict[torch.device, str] = {}
"""Errors of kernels, by device."""
_logged: set[str] = set()
"""The reasons that were logged."""
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
    try:
        obstacle = _find_obstacle(device, allow_untested=allow_untested)
        if obstacle is None:
            return importlib.import_module("uniclip.backends.torch.triton")
    except (ImportError, OSError) as error:
        # An installation can be broken, as by a missing library.
        give_up(device, error)
        return None
    _log_once(obstacle)
    return None


def _log_once(obstacle: str) -> None:
    """Log why the kernels are not used, once for each reason."""
    with _lock:
        is_new = obstacle not in _logged
        _logged.add(obstacle)
    if not is_new:
        return
    _LOG.warning(
        "uniclip's Triton kernels are not used, and PyTorch's own functions take longer to clip "
        "gradients on a GPU: %s; UNICLIP_TRITON=0 turns this message off",
        obstacle,
    )


def _find_obstacle(device: torch.device, *, allow_untested: bool) -> str | None:
    """Return why Triton cannot be used on a device, and what to change; ``None`` if it can."""
    # Triton and TensorFlow bring an LLVM each. Loading the second one can end the process.
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        return (
            "Triton is not loaded beside TensorFlow, which can end the process; import TensorFlow "
            "in another process"
        )
    tested = f"{_dotted(min(_VERSIONS))} to {_dotted(max(_VERSIONS))}"
    version = _installed_version()
    if version is None:
        return f"Triton is not installed; install a version from {tested}"
    if allow_untested:
        return None

    numbers = _numbers_of(version)
    if numbers not in _VERSIONS:
        # PyTorch requires the version of Triton that it brings, so only both can be changed.
        return (
            f"Triton {version} is not tested; install PyTorch 2.7 or later with Triton {tested}, "
            "or set UNICLIP_TRITON=1 to use it anyway"
        )
    capability = torch.cuda.get_device_capability(device)
    first = first_version(capability)
    if first is None:
        return (
            f"GPUs of compute capability {_dotted(capability)} are not tested; UNICLIP_TRITON=1 "
            "tries the kernels, which can end the process"
        )
    if numbers < first:
        return (
            f"Triton {version} is too old for GPUs of compute capability {_dotted(capability)}; "
            f"install a version of PyTorch with Triton {_dotted(first)} or later"
        )
    return None


def _installed_version() -> str | None:
    """Return the version of Triton, ``None`` if it is not installed."""
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return None
        raise
    # A folder of that name can be imported, too.
    return getattr(triton, "__version__", None)


def _numbers_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, zeros if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def first_version(capability: tuple[int, int]) -> tuple[int, int] | None:
    """Return the first version of Triton for an NVIDIA GPU, ``None`` if none is tested."""
    if _VOLTA <= capability <= _HOPPER:
        return min(_VERSIONS)
    return _FIRST_VERSIONS.get(capability)


def _dotted(version: tuple[int, int]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def _is_supported(device: torch.device, *, allow_untested: bool) -> bool:
    """Return whether kernels may run on a device."""
    # The interpreter is for tests, and for writing kernels.
    if os.environ.get("TRITON_INTERPRET") == "1":
        return allow_untested
    if device.type not in _DEVICE_TYPES:
        return False

    # Only NVIDIA's GPUs are tested.
    return allow_untested or (device.type == "cuda" and torch.version.hip is None)
