"""Simulated accelerators: the host cannot read the values of their arrays without waiting."""

from __future__ import annotations

import os
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


@contextmanager
def elsewhere(device: Device = Device()) -> Iterator[None]:  # noqa: B008 - it never changes
    """Let every PyTorch tensor report an accelerator, and refuse reads by the host."""
    import torch

    move = torch.Tensor.to
    stay = lambda x, *args, **options: (
        x if any(isinstance(arg, Device) for arg in args) else move(x, *args, **options)
    )
    where = {
        "device": property(lambda tensor: device),
        "is_cpu": property(lambda tensor: False),
        "to": stay,
    }
    with patched(torch.Tensor, **where, **dict.fromkeys(READS, refuse)):
        yield


@contextmanager
def on_torch() -> Iterator[None]:
    """Let every tensor report an accelerator, and refuse reads by the host.

    Triton kernels are disabled, since there is no accelerator.
    """
    # The import caches the attributes of tensors, so it must come before they are patched.
    import torch._dynamo  # noqa: F401
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoReads(TorchDispatchMode):
        """A dispatch mode that refuses operations that make the host wait."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (refuse if func.overloadpacket.__name__ in OPERATIONS else func)(
                *args, **(kwargs or {})
            )

    with mock.patch.dict(os.environ, UNICLIP_TRITON="0"), elsewhere(), NoReads():
        yield


@contextmanager
def as_nvidia(capability: tuple[int, int], device: Device) -> Iterator[None]:
    """Let tensors report an NVIDIA GPU, as far as PyTorch without CUDA can.

    Nothing can be compiled for it.
    """
    import torch

    cuda = {
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getDevice": lambda: device.index,
    }
    with (
        patched(torch.cuda, get_device_capability=lambda of: capability, Event=mock.MagicMock),
        patched(torch._C, **cuda),
        patched(torch.Tensor, pin_memory=lambda tensor: tensor),
        mock.patch("torch.empty", lambda *size, pin_memory=False, **options: torch.zeros(*size)),
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
