# SPDX-License-Identifier: MIT
"""The state of PyTorch around the running code: whether it is traced,
and whether derivatives are computed.

These functions are called at every step, so most are one call into PyTorch's core: about 0.03 µs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

ONLY_BETWEEN_GRAPHS = torch.__version__ < (2, 11)
"""Whether the compiler cannot compile uniclip, which runs between its graphs."""

# PyTorch has no public functions for any of these.
_C = torch._C
_MODES = _C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def tracing() -> bool:
    """Whether the running code is recorded to run later on other values,
    or runs on tensors without values.
    """
    # First, as a compiler knows no other answer.
    if torch.compiler.is_dynamo_compiling():
        if ONLY_BETWEEN_GRAPHS:
            from uniclip.backends.torch import between_graphs  # noqa: F401 - to tell the compiler

        return True
    return bool(
        torch.compiler._is_compiling_flag
        or _C._functorch.get_dynamic_layer_stack_depth()
        or (_C._len_torch_dispatch_stack() > 0 and _any_tracer())
        or _C._is_tracing()
        or (_C._len_torch_function_stack() > 0 and _before_dispatch())
    )


def valueless(array: Any) -> bool:
    """Whether an array has no values anywhere: a tensor of the device ``meta``, or a fake one."""
    if not isinstance(array, torch.Tensor):
        return False  # a number
    # which reads no code of fake tensors
    if type(array) is torch.Tensor or torch.compiler.is_dynamo_compiling():
        return bool(array.is_meta)
    return bool(array.is_meta or isinstance(array, FunctionalTensor) or is_fake(array))


def _any_tracer() -> bool:
    """Whether make_fx, aot_function or FakeTensorMode is active.

    Other modes, which count or log, see real values.
    """
    return any([_C._get_dispatch_mode(key) is not None for key in _TRACERS])


def _before_dispatch() -> bool:
    """Whether make_fx records the operations before they are dispatched."""
    return bool(_C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch))


def in_transform() -> bool:
    """Whether ``torch.func`` transforms the caller, so that a value may stand for many."""
    # Not by the depth of the stack, as above: PyTorch 2.11 and 2.12 cannot compile that.
    return bool(_C._are_functorch_transforms_active())


def one_for_all(array: torch.Tensor) -> bool:
    """Whether ``vmap`` runs the code for many examples at once,
    and the tensor is the same for all of them.
    """
    functorch = _C._functorch
    stack = functorch.get_interpreter_stack() or []
    levels = {layer.level() for layer in stack if layer.key() == functorch.TransformType.Vmap}
    while functorch.is_functorch_wrapped_tensor(array):
        levels.discard(functorch.maybe_get_level(array))
        array = functorch.get_unwrapped(array)
    return bool(levels)


def in_forward_mode() -> bool:
    """Whether derivatives are computed forward."""
    return bool(forward_ad._current_level >= 0)


def is_recorded(array: torch.Tensor) -> bool:
    """Whether derivatives with respect to the array are recorded."""
    return in_forward_mode() or (array.requires_grad and torch.is_grad_enabled())


class _NestedDevice(TorchFunctionMode):  # type: ignore[misc]
    """A default device inside of another one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._context = DeviceContext(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer as the context of PyTorch does."""
        return self._context.__torch_function__(func, types, args, kwargs)


# Up to PyTorch 2.10 DeviceContext asserts that it is the only one. Compilers know only that class.
_HomeDevice = _NestedDevice if torch.__version__ < (2, 11) else DeviceContext


def at_home(array: Any) -> AbstractContextManager[Any] | None:
    """Return a context for new tensors on the device of ``array``, fake if it is.

    ``None`` if none is needed.

    A tensor of one device cannot be combined with one on the user's default device.
    """
    if isinstance(array, FakeTensor):
        mode: AbstractContextManager[Any] = array.fake_mode  # it may be used outside of its mode
        return mode
    # A default device is a mode for functions; a compiler takes this class for one, not
    # torch.device itself. Without one, new tensors are on the CPU, and every device but one accepts
    # 0-d tensors from there.
    apart = array is not None and (_C._len_torch_function_stack() > 0 or array.is_meta)
    return _HomeDevice(array.device) if apart else None
