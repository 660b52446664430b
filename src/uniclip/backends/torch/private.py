# SPDX-License-Identifier: MIT
"""All private names of PyTorch that uniclip uses, and what happens where one is missing.

PyTorch may remove such a name in any version. No other module uses one, and no import fails without
one. Functions are looked up once, at import, so that they take no longer at a step.

`uniclip.backends` has one more, the key "torch._dynamo" of ``sys.modules``, to find out whether a
compiler is loaded before PyTorch is imported.

This is not for private names of other libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad


def _import(name: str) -> Any:
    """Return a module, ``None`` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_C = getattr(torch, "_C", None)
_functorch: Any = getattr(_C, "_functorch", None)
_fake: Any = _import("torch._subclasses.fake_tensor")
_functional: Any = _import("torch._subclasses.functional_tensor")
_device: Any = _import("torch.utils._device")


def _raise_missing(error: AttributeError | None = None) -> NoReturn:
    """Raise for names without which results could be wrong."""
    reason = "torch._C._functorch" if error is None else str(error)
    msg = (
        f"uniclip does not know how PyTorch {torch.__version__} transforms functions ({reason}); "
        "install a later version of uniclip, or call it outside of torch.func"
    )
    raise RuntimeError(msg) from error


# --- Functions of lists.
#
# Without one of them, a function of tensors is called for each tensor.


def _of_each(function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Return a function of lists that calls a function of tensors."""

    def of_list(arrays: Sequence[torch.Tensor], operand: Any, **options: Any) -> list[torch.Tensor]:
        is_list = isinstance(operand, (list, tuple))
        operands = operand if is_list else [operand] * len(arrays)
        return [function(x, y, **options) for x, y in zip(arrays, operands, strict=True)]

    return of_list


foreach_mul = getattr(torch, "_foreach_mul", _of_each(torch.mul))
foreach_mul_ = getattr(torch, "_foreach_mul_", _of_each(torch.Tensor.mul_))
foreach_div_ = getattr(torch, "_foreach_div_", _of_each(torch.Tensor.div_))
foreach_norm = getattr(torch, "_foreach_norm", _of_each(torch.linalg.vector_norm))
foreach_clamp_min = getattr(torch, "_foreach_clamp_min", _of_each(torch.clamp_min))
foreach_clamp_min_ = getattr(torch, "_foreach_clamp_min_", _of_each(torch.Tensor.clamp_min_))
foreach_clamp_max_ = getattr(torch, "_foreach_clamp_max_", _of_each(torch.Tensor.clamp_max_))
foreach_copy_ = getattr(torch, "_foreach_copy_", _of_each(torch.Tensor.copy_))


def _flatten(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one vector, as ``torch._C._nn.flatten_dense_tensors`` does."""
    return torch.cat([array.reshape(-1) for array in arrays])


flatten = getattr(getattr(_C, "_nn", None), "flatten_dense_tensors", _flatten)
"""Copies tensors into one vector. Without it, `torch.cat` does."""


# --- Attributes of tensors.

stored_values = getattr(torch.Tensor, "_values", torch.Tensor.values)
"""Returns the elements of a sparse tensor as they are stored. Without it, PyTorch raises an error
for a tensor that is not coalesced.
"""
OPAQUE = getattr(torch, "_mkldnn", None)
"""The layout of MKL-DNN. Without it, the refusal of such tensors does not suggest to_dense()."""


def _no_version(_: torch.Tensor) -> int:
    """Stand for a version counter."""
    return 0


version_of: Callable[[torch.Tensor], int] = (
    attrgetter("_version") if hasattr(torch.Tensor, "_version") else _no_version
)
"""Returns how often a tensor was written. Without it, changes are found by addresses and by the
elements that are compared.
"""

LOCAL_TENSOR = "_local_tensor"
"""The local tensor of a `DTensor`. Without it, `DTensor.to_local` is called, which takes longer."""
SPEC = "_spec"
"""The layout of a `DTensor`. Without it, layouts are looked up at each step."""
_LOCAL = attrgetter(LOCAL_TENSOR)


def local_tensors(tensors: list[Any]) -> list[Any]:
    """Return tensors with the local tensors of distributed ones.

    Without the attribute, these stay; callers recognize them by their class.
    """
    try:
        # `map` runs no Python code for each of many tensors.
        return list(map(_LOCAL, tensors))
    except AttributeError:
        return [getattr(tensor, LOCAL_TENSOR, tensor) for tensor in tensors]


FSDP1_PARAM = "_fsdp_flattened"
"""The mark of parameters of FSDP1. Without it, their shards are not refused."""
FSDP1_FLAT_PARAM = "_is_flat_param"
"""The mark of flat parameters. Without it, whole ones are taken for single parameters."""
FSDP1_SIZE = "_unpadded_unsharded_size"
"""The size of a flat parameter. Without it, vectors are taken for shards."""


class _NoTensor:
    """A class without instances, in the place of a missing one."""


FakeTensor: Any = getattr(_fake, "FakeTensor", _NoTensor)
"""A tensor without values. Without it, PyTorch raises an error where uniclip reads one outside of
its mode.
"""
FunctionalTensor = getattr(_functional, "FunctionalTensor", _NoTensor)
"""A tensor of `functionalize`. Without it, only the mode is detected."""


def _is_fake_tensor(array: object) -> bool:
    """Return whether a tensor is fake itself."""
    return isinstance(array, FakeTensor)


is_fake = getattr(_fake, "is_fake", _is_fake_tensor)
"""Returns whether a tensor is fake, or wraps a fake one. Without it, the latter is not detected."""


# --- The state around the running code.


def _unknown_depth() -> int:
    """Stand for the depth of a stack that cannot be read: there may be something on it."""
    return 1


dispatch_depth = getattr(_C, "_len_torch_dispatch_stack", _unknown_depth)
"""Returns the number of dispatch modes. Without it, each kind of mode is looked up, and the Triton
kernels are not used.
"""
function_depth = getattr(_C, "_len_torch_function_stack", _unknown_depth)
"""Returns the number of function modes. Without it, new tensors are always made in the context of a
device, and the dispatch key is looked up.
"""
jit_traces = getattr(_C, "_is_tracing", torch.jit.is_tracing)
"""Returns whether `torch.jit.trace` runs. Without it, the public function of the same purpose."""

_modes = getattr(_C, "_TorchDispatchModeKey", None)
_TRACERS = [getattr(_modes, name, None) for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_mode_of = getattr(_C, "_get_dispatch_mode", None)
_PRE_DISPATCH = getattr(getattr(_C, "DispatchKey", None), "PreDispatch", None)
_includes = getattr(_C, "_dispatch_tls_is_dispatch_key_included", None)


def any_tracer() -> bool:
    """Return whether make_fx, aot_function or FakeTensorMode is active.

    Other modes, which count or log, see real values. Without a name, they are taken for tracers.
    """
    if _mode_of is None or None in _TRACERS:
        return True
    return any([_mode_of(key) is not None for key in _TRACERS])


def before_dispatch() -> bool:
    """Return whether make_fx records the operations before they are dispatched.

    Without a name, every function mode is taken for one that does.
    """
    if _includes is None or _PRE_DISPATCH is None:
        return True
    return bool(_includes(_PRE_DISPATCH))


_depth = getattr(_functorch, "get_dynamic_layer_stack_depth", None)
_active = getattr(_C, "_are_functorch_transforms_active", None)
# PyTorch 2.11 and 2.12 cannot compile the depth, and the other takes longer.
transform_depth: Any = _depth or _active or _raise_missing
"""Returns whether `torch.func` transforms the caller. Without it, `transforms_active` is used."""
transforms_active: Any = _active or _depth or _raise_missing
"""The same for compiled code. Without it, the depth is used; without both, an error is raised."""


def same_for_all_examples(array: torch.Tensor) -> bool:
    """Return whether ``vmap`` runs the code for many examples at once,
    and the tensor is the same for all of them.

    Without a name, an error is raised before anything is written.
    """
    try:
        stack = _functorch.get_interpreter_stack() or []
        vmap = _functorch.TransformType.Vmap
        levels = {layer.level() for layer in stack if layer.key() == vmap}

        # The tensor differs between the examples of each level that wraps it.
        while _functorch.is_functorch_wrapped_tensor(array):
            levels.discard(_functorch.maybe_get_level(array))
            array = _functorch.get_unwrapped(array)
    except AttributeError as error:
        _raise_missing(error)
    return bool(levels)


_COMPILING = "_is_compiling_flag"
is_compiling: Callable[[], bool] = torch.compiler.is_compiling
"""Returns whether code is compiled. Without the flag, the public function, which takes longer."""
if hasattr(torch.compiler, _COMPILING):
    is_compiling = partial(getattr, torch.compiler, _COMPILING)

if hasattr(forward_ad, "_current_level"):

    def in_forward_mode() -> bool:
        """Return whether derivatives are computed in forward mode."""
        return bool(forward_ad._current_level >= 0)

else:

    def in_forward_mode() -> bool:
        """Return whether derivatives are computed in forward mode: whether a dual number can be
        made, which takes longer.
        """
        try:
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
        except RuntimeError:
            return False
        return True


def _not_in_backward() -> int:
    """Stand for the number of a backward pass."""
    return -1


backward_number = getattr(_C, "_current_graph_task_id", _not_in_backward)
"""Returns the number of the backward pass that runs in this thread, -1 outside of one. Without it,
steps inside of a backward pass are not refused.
"""

DeviceContext = getattr(_device, "DeviceContext", torch.device)
"""A context for new tensors. Without it, `torch.device`, which some compilers do not support."""


def dynamo_skips() -> tuple[Callable[[str], None], Callable[[CodeType], None]]:
    """Return functions that make Dynamo compile no function of a package, and not one function.

    Only PyTorch 2.6 to 2.10 needs them, and has both. The import takes seconds.
    """
    from torch._dynamo import eval_frame, trace_rules

    return trace_rules.add, eval_frame.skip_code


# --- GPUs. PyTorch without CUDA has none of these names, either.


def _cuda_stream(index: int) -> int:
    """Return the address of the current stream by a public function, which takes longer."""
    return int(torch.cuda.current_stream(index).cuda_stream)


def _xpu_stream(index: int) -> int:
    """Return the address of the current queue by a public function, which takes longer."""
    return int(torch.xpu.current_stream(index).sycl_queue)


# Without one of them, the public function of the same purpose, which takes longer.
cuda_stream = getattr(_C, "_cuda_getCurrentRawStream", _cuda_stream)
xpu_stream = getattr(_C, "_xpu_getCurrentRawStream", _xpu_stream)
cuda_device = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
cuda_captures = getattr(
    _C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


# --- Attributes of optimizers and schedulers.

STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
"""The hooks before a step. Without it, a rule clips where ``step`` is called, before all hooks."""
STATE_DICT_HOOKS = "_optimizer_state_dict_post_hooks"
"""The hooks that add to a state. Without it, a rule is not saved with the optimizer."""
SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""Tells a GradScaler to pass its scale and its flag. Without it, optimizers of a list that have no
fused step are stepped by the flag of each.
"""
OVERLAPS = "_overlap_with_ddp"
"""Whether a ZeroRedundancyOptimizer steps inside of backward. Without it, it is not refused."""
SCHEDULED = "_wrapped_by_lr_sched"
"""Marks a step that a scheduler has wrapped. Without it, the scheduler may warn of a replaced one.
"""
HAS_STEPPED = "_opt_called"
"""Tells a scheduler that a step was taken. Without it, the scheduler may warn of a skipped one."""
