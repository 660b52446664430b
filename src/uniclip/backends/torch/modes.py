# SPDX-License-Identifier: MIT
"""The state of PyTorch around the running code: whether it is transformed, whether derivatives are
recorded, whether it is traced, and the default device.

These functions are called at every step, so most are one call into PyTorch's core: about 0.03 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from uniclip.backends.torch.private import (
    DeviceContext,
    FakeTensor,
    FunctionalTensor,
    any_tracer,
    before_dispatch,
    dispatch_depth,
    function_depth,
    in_forward_mode,
    is_compiling,
    is_fake,
    jit_traces,
    transform_depth,
    transforms_active,
)


def tracing() -> bool:
    """Return whether the running code is recorded to run later on other values,
    or runs on tensors without values.
    """
    # This comes first: the compiler can evaluate it, but none of the functions below.
    if torch.compiler.is_dynamo_compiling():
        from uniclip.backends.torch import between_graphs  # noqa: F401 - imported for old compilers

        return True

    return bool(
        is_compiling()
        or transform_depth()
        or (dispatch_depth() > 0 and any_tracer())
        or jit_traces()
        or (function_depth() > 0 and before_dispatch())
    )


def valueless(array: object) -> bool:
    """Return whether an array has no values: a tensor on the device ``meta``, or a fake one."""
    if not isinstance(array, torch.Tensor):
        return False

    # The compiler cannot trace `is_fake`, and regular tensors need not pay for it.
    if type(array) is torch.Tensor or torch.compiler.is_dynamo_compiling():
        return bool(array.is_meta)
    return bool(array.is_meta or isinstance(array, FunctionalTensor) or is_fake(array))


def in_transform() -> bool:
    """Return whether ``torch.func`` transforms the caller, so that a value may stand for many."""
    return bool(transforms_active())


def is_recorded(array: torch.Tensor) -> bool:
    """Return whether derivatives with respect to the array are recorded."""
    return in_forward_mode() or (array.requires_grad and torch.is_grad_enabled())


class _NestedDevice(TorchFunctionMode):  # type: ignore[misc]
    """A default device inside another one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._context = DeviceContext(device)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call the function as PyTorch's context does."""
        return self._context.__torch_function__(func, types, args, kwargs)


# Up to PyTorch 2.10 DeviceContext asserts that it is the only one. Compilers support only that
# class.
_DefaultDevice = _NestedDevice if torch.__version__ < (2, 11) else DeviceContext


def default_device_of(array: torch.Tensor | None) -> AbstractContextManager[object] | None:
    """Return a context for new tensors on the device of ``array``, fake if it is.

    A tensor of one device cannot be combined with one on the user's default device. ``None`` if no
    context is needed.
    """
    if array is None:
        return None
    if isinstance(array, FakeTensor):
        # A fake tensor may be used outside its mode.
        mode: AbstractContextManager[object] = array.fake_mode
        return mode

    # Without a default device, new tensors are on the CPU, and every device but `meta` accepts 0-d
    # tensors from there. A default device is a mode for functions.
    if function_depth() == 0 and not array.is_meta:
        return None
    return _DefaultDevice(array.device)
