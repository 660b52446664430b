# SPDX-License-Identifier: MIT
"""The state of PyTorch around the running code: whether it is traced,
and whether derivatives are computed.

These functions are called at every step, so most are one call into PyTorch's core: about 0.03 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

# PyTorch has no public functions for any of these.
_C = torch._C
_MODES = _C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def tracing() -> bool:
    """Return whether the running code is recorded to run later on other values,
    or runs on tensors without values.
    """
    # This comes first: the compiler can evaluate it, but none of the functions below.
    if torch.compiler.is_dynamo_compiling():
        from uniclip.backends.torch import between_graphs  # noqa: F401 - imported for old compilers

        return True

    return bool(
        torch.compiler._is_compiling_flag
        or _C._functorch.get_dynamic_layer_stack_depth()
        or (_C._len_torch_dispatch_stack() > 0 and _any_tracer())
        or _C._is_tracing()
        or (_C._len_torch_function_stack() > 0 and _before_dispatch())
    )


def valueless(array: object) -> bool:
    """Return whether an array has no values: a tensor on the device ``meta``, or a fake one."""
    if not isinstance(array, torch.Tensor):
        return False

    # The compiler cannot trace `is_fake`, and regular tensors need not pay for it.
    if type(array) is torch.Tensor or torch.compiler.is_dynamo_compiling():
        return bool(array.is_meta)
    return bool(array.is_meta or isinstance(array, FunctionalTensor) or is_fake(array))


def _any_tracer() -> bool:
    """Return whether make_fx, aot_function or FakeTensorMode is active.

    Other modes, which count or log, see real values.
    """
    return any([_C._get_dispatch_mode(key) is not None for key in _TRACERS])


def _before_dispatch() -> bool:
    """Return whether make_fx records the operations before they are dispatched."""
    return bool(_C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch))


def in_transform() -> bool:
    """Return whether ``torch.func`` transforms the caller, so that a value may stand for many."""
    # PyTorch 2.11 and 2.12 cannot compile the depth of the stack that `tracing` reads.
    return bool(_C._are_functorch_transforms_active())


def same_for_all_examples(array: torch.Tensor) -> bool:
    """Return whether ``vmap`` runs the code for many examples at once,
    and the tensor is the same for all of them.
    """
    functorch = _C._functorch
    stack = functorch.get_interpreter_stack() or []
    vmap = functorch.TransformType.Vmap
    levels = {layer.level() for layer in stack if layer.key() == vmap}

    # The tensor differs between the examples of each level that wraps it.
    while functorch.is_functorch_wrapped_tensor(array):
        levels.discard(functorch.maybe_get_level(array))
        array = functorch.get_unwrapped(array)
    return bool(levels)


def in_forward_mode() -> bool:
    """Return whether derivatives are computed in forward mode."""
    return bool(forward_ad._current_level >= 0)


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
    if _C._len_torch_function_stack() == 0 and not array.is_meta:
        return None
    return _DefaultDevice(array.device)
