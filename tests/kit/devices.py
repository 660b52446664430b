"""Simulated accelerators: the host cannot read the values of their arrays without waiting."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np


class Device(NamedTuple):
    """The attributes of a simulated accelerator. Its storage is on the CPU."""

    type: str = "cuda"
    index: int = 0
    platform: str = "gpu"


READS = (
    "item",
    "tolist",
    "numpy",
    "_numpy",
    "cpu",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
)
OPERATIONS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
"""PyTorch operations whose result the host must wait for."""


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Raise in place of a function that reads an array."""
    msg = "the host reads an array"
    raise AssertionError(msg)


@contextmanager
def patched(target: Any, **new: Any) -> Iterator[None]:
    """Replace attributes of a target, also inherited ones."""
    with ExitStack() as stack:
        for name, value in new.items():
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


@contextmanager
def by_numpy(kind: type) -> Iterator[None]:
    """Refuse NumPy's access to the memory of arrays of a type."""

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda array, *rest, **options: (refuse if isinstance(array, kind) else function)(
            array, *rest, **options
        )

    with patched(
        np,
        **{
            name: without(getattr(np, name))
            for name in ("asarray", "array", "from_dlpack", "frombuffer")
        },
    ):
        yield


MAKERS = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "from_numpy",
    "full",
    "linspace",
    "ones",
    "scalar_tensor",
    "tensor",
    "zeros",
)
"""Functions of PyTorch that make tensors on the host, unless they are told a device."""
CALLERS = ("uniclip", "array_api_compat")
"""The packages whose tensors may be on the host; those of a test are elsewhere."""


def is_on_host(tensor: Any) -> bool:
    """Return whether a tensor is one that uniclip made on the host."""
    return bool(vars(tensor).get("on_host", False))


def made_on_host(tensor: Any, *, pinned: bool = False) -> Any:
    """Mark a tensor as one on the host, in pinned memory or not."""
    tensor.on_host = True
    tensor.is_in_pinned_memory = pinned
    return tensor


def maker(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes tensors, so that it takes a `Device`, and marks those without."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        import torch

        tensor = make(*args, **options)
        caller = sys._getframe(1).f_globals["__name__"].split(".")[0]
        if isinstance(device, Device) or caller not in CALLERS:
            if args and not isinstance(args[0], torch.Tensor) and make.__name__ in COPIES:
                refuse_wait(f"torch.{make.__name__} copies from pageable memory", caller in CALLERS)
            return tensor
        if any(tensor is argument for argument in args):
            return tensor
        return made_on_host(tensor, pinned=pin_memory)

    return made


STREAM = mock.MagicMock()
"""The stream on which everything runs."""
SENT: list[tuple[int, ...]] = []
"""The shapes of tensors that were sent to an accelerator from pinned memory."""
COPIES = {"as_tensor", "asarray", "tensor", "from_numpy"}
"""Functions that copy values which the host has."""


def refuse_wait(why: str, of_uniclip: bool = True) -> None:
    """Refuse what makes the host wait for an accelerator."""
    if of_uniclip:
        msg = f"the host waits: {why}"
        raise AssertionError(msg)


def unless_on_host(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that reads a tensor, so that it is refused for those elsewhere."""
    return lambda tensor, *rest, **options: (read if is_on_host(tensor) else refuse)(
        tensor, *rest, **options
    )


@contextmanager
def elsewhere(
    device: Device = Device(),  # noqa: B008 - it never changes
    *,
    capturing: bool = False,
) -> Iterator[None]:
    """Let every tensor of PyTorch say that it is on an accelerator, but for those that uniclip
    makes on the host; refuse all that makes the host wait: reads, and copies from pageable memory.

    ``capturing`` stands for the capture of a CUDA graph, which refuses pinned copies, too: it would
    read the host's memory at each replay.
    """
    import torch

    move = torch.Tensor.to
    where = torch.Tensor.device.__get__

    def to(tensor: Any, *args: Any, **options: Any) -> Any:
        places = [arg for arg in (*args, *options.values()) if isinstance(arg, Device)]
        dtypes = [arg for arg in (*args, *options.values()) if isinstance(arg, torch.dtype)]
        if not places:
            return move(tensor, *args, **options)
        moved = move(tensor, dtypes[0]) if dtypes else tensor
        if not is_on_host(tensor):
            return moved
        pinned = tensor.is_in_pinned_memory and options.get("non_blocking", False)
        if capturing or not pinned:
            refuse_wait("Tensor.to copies from the host")
        there = moved.clone()
        there.on_host = False
        return there

    def pin_memory(tensor: Any, *args: Any) -> Any:
        SENT.append(tuple(tensor.shape))
        if capturing:
            refuse_wait("memory is pinned during a capture")
        return made_on_host(tensor.clone(), pinned=True)

    names = {
        "device": property(lambda tensor: where(tensor) if is_on_host(tensor) else device),
        "is_cpu": property(is_on_host),
        "is_cuda": property(lambda tensor: not is_on_host(tensor)),
        "to": to,
        "pin_memory": pin_memory,
    }
    reads = {name: unless_on_host(name, getattr(torch.Tensor, name, refuse)) for name in READS}
    makers = {name: maker(getattr(torch, name)) for name in MAKERS}
    cuda = {
        "Event": mock.MagicMock,
        "current_stream": lambda device=None: STREAM,
        "is_current_stream_capturing": lambda: capturing,
    }
    with (
        patched(torch.Tensor, **names, **reads),
        patched(torch, **makers),
        patched(torch.cuda, **cuda),
    ):
        yield


BY_ONE_FACTOR = {"_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"}
"""Functions of lists that start a kernel for each tensor if a 0-d factor has another dtype."""
NOT_FOR_BFLOAT16 = {"_amp_foreach_non_finite_check_and_unscale_"}
"""Functions that CUDA has for float16, and CPUs for bfloat16, too."""


@contextmanager
def on_torch(*, capturing: bool = False) -> Iterator[None]:
    """Let every tensor say that it is on an accelerator, where the host reads none.

    Triton kernels are disabled, since there is no accelerator.
    """
    # which notes the attributes of tensors when it is imported, and not those patched here
    import torch
    import torch._dynamo
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class NoReads(TorchDispatchMode):
        """Refuse operations that make the host wait, or combine tensors of two devices."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            here = [tensor for tensor in given if is_on_host(tensor)]
            if name in OPERATIONS and len(here) < len(given):
                refuse()
            if name in BY_ONE_FACTOR and func._overloadname == "Tensor":
                is_fast = args[1].dtype is args[0][0].dtype or is_on_host(args[1])
                assert is_fast, (
                    f"{name} starts a kernel for each tensor, by a factor in {args[1].dtype}"
                )
            is_missing = name in NOT_FOR_BFLOAT16 and any(
                [x.dtype is torch.bfloat16 for x in given]
            )
            assert not is_missing, f"CUDA has no {name} for bfloat16"
            made = func(*args, **(kwargs or {}))
            if not here:
                return made
            if len(here) == len(given):
                for tensor in tree_leaves(made):
                    if isinstance(tensor, torch.Tensor):
                        made_on_host(tensor)
            else:
                # A kernel takes a number of the host as an argument.
                assert all(tensor.ndim == 0 for tensor in here), f"{name} of two devices"
                assert name not in {"copy_", "_foreach_copy_"}, "the host waits for a copy"
            return made

    with (
        mock.patch.dict(os.environ, UNICLIP_TRITON="0"),
        elsewhere(capturing=capturing),
        NoReads(),
    ):
        yield


@contextmanager
def as_nvidia(capability: tuple[int, int], device: Device) -> Iterator[None]:
    """Let tensors report an NVIDIA GPU, as far as PyTorch without CUDA can.

    Nothing can be compiled for it.
    """
    import torch

    from uniclip.backends.torch import private

    cuda = {
        "cuda_stream": lambda index: 0,
        "cuda_captures": lambda: False,
        "cuda_device": lambda: device.index,
    }
    with (
        patched(torch.cuda, get_device_capability=lambda of: capability, Event=mock.MagicMock),
        patched(private, **cuda),
        elsewhere(device),
    ):
        yield


@contextmanager
def on_tensorflow() -> Iterator[None]:
    """Let every tensor report an accelerator, and refuse reads by the host."""
    import tensorflow as tf

    device = property(lambda tensor: "/job:localhost/replica:0/task:0/device:GPU:0")
    kind = type(tf.constant(1))
    with patched(kind, device=device, **dict.fromkeys(READS, refuse)), by_numpy(kind):
        yield


@contextmanager
def on_jax() -> Iterator[None]:
    """Let every array report an accelerator, and refuse reads by the host."""
    import jax
    import jax.numpy as jnp

    kind = type(jnp.ones(1))
    # This sharding is equal to no other.
    unequal_sharding = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="unpinned_host"
    )
    methods = dict.fromkeys(READS, refuse) | {
        "devices": lambda array: {Device()},
        "_value": property(refuse),
    }
    methods |= {"sharding": property(lambda array: unequal_sharding)}
    with patched(kind, **methods), by_numpy(kind):
        yield


DEVICES = {"torch": on_torch, "tensorflow": on_tensorflow, "jax": on_jax}
