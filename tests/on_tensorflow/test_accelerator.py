"""On an accelerator nothing is read by the host, in eager code too: on tensors that say they are on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index, methodcaller
from typing import Any
from unittest import mock

import tensorflow as tf

import accelerator
import uniclip as uc
from accelerator import EVERY_RULE, VALUES, close, functions, patched, refuse, refused

METHODS = ("numpy", "_numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__")


@contextmanager
def on_an_accelerator() -> Iterator[None]:
    """Let every tensor say that it is on an accelerator, where the host reads none."""
    device = property(lambda tensor: "/job:localhost/replica:0/task:0/device:GPU:0")
    # NumPy reads the memory of the CPU without asking the tensor: so what uniclip does there is refused too.
    host = mock.patch("uniclip.backends.tensorflow.squares", refuse)
    with patched(type(tf.constant(1)), device=device, **dict.fromkeys(METHODS, refuse)), host:
        yield


def grads(value: float = 1.0) -> list[Any]:
    """Return gradients, one of them absent."""
    return [*map(tf.constant, accelerator.values(value)), None]


def test_the_device_refuses() -> None:
    """Each way to read a tensor is an error on what stands for an accelerator."""
    for read in (bool, float, index, methodcaller("numpy"), lambda x: tf.cond(x > 0, lambda: x, lambda: x)):
        with refused, on_an_accelerator():
            read(tf.constant(1))


@EVERY_RULE
def test_no_reads(rule: Any) -> None:
    """Every scope and policy clips without a read to what it does on the CPU."""
    for value in VALUES.values():
        wanted = uc.clip(grads(value), rule)
        with on_an_accelerator():
            found = uc.clip(grads(value), rule)
        close(found, wanted)


def test_no_reads_in_the_functions() -> None:
    """Nor do the familiar functions read anything, or a rule that remembers."""
    for call in functions(tf.constant(1.0)):
        wanted = call(grads())
        with on_an_accelerator():
            found = call(grads())
        close(found, wanted)
