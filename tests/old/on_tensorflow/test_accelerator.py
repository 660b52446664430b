"""On an accelerator nothing is read by the host, in eager code too: on tensors that say they are on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index, methodcaller
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

import accelerator
import uniclip as uc
from accelerator import EVERY_RULE, LAUNCHED, RULES, VALUES, close, functions, patched, refuse, refused
from tracing import leaves

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


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.complex64], ids=lambda dtype: dtype.name)
def test_no_reads_of_other_dtypes(dtype: tf.DType) -> None:
    """No dtype is read, nor several together, and all are clipped to what they are on the CPU."""
    made = [tf.cast(leaf, dtype) for leaf in grads()[:-1]]
    for scope in ("all, propagate", "leaf, propagate", "axes, propagate"):
        for given in (made, [*made, *grads()]):
            wanted, expected = uc.clip(given, RULES[scope])
            with on_an_accelerator():
                found, report = uc.clip(given, RULES[scope])
            close(report, expected)
            close(*([tf.cast(leaf, tf.complex64) for leaf in leaves(tree)] for tree in (found, wanted)), rtol=2**-7)


def test_no_reads_in_the_functions() -> None:
    """Nor do the familiar functions read anything, or a rule that remembers."""
    for call in functions(tf.constant(1.0)):
        wanted = call(grads())
        with on_an_accelerator():
            found = call(grads())
        close(found, wanted)


VIEWS = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}
"""Operations whose result is in the memory of their operand, so that they start no kernel."""
KERNELS = {"global": (16, 3), "by_norm": (13, 4), "zclip": (58, 3), "adagc": (67, 4), "agc": (21, 8)}
"""How many kernels a step starts: so many, and so many for each leaf.

TensorFlow has no operations on many tensors. Each leaf is converted to float64, added up and multiplied; along axes it
is squared before it is added, and so is its parameter. Several factors are copied out of their vector one by one.
"""


@contextmanager
def kernels() -> Iterator[list[str]]:
    """Collect the names of the operations that start kernels, one for each result."""
    started: list[str] = []

    def called(name: str | bytes, inputs: Any, attributes: Any, outputs: Any, *_: Any) -> None:
        name = name if isinstance(name, str) else name.decode()
        started.extend([] if name in VIEWS else [name] * len(outputs))

    op_callbacks.add_op_callback(called)
    try:
        yield started
    finally:
        op_callbacks.remove_op_callback(called)


@pytest.mark.parametrize("leaves", [2, 20])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, leaves: int) -> None:
    """A step starts a few kernels for each leaf, none of them for sums that have left the range."""
    rule, (fixed, of_each) = LAUNCHED[name], KERNELS[name]
    grads, params = ([tf.random.normal((4 + number, 8)) for number in range(leaves)] for _ in range(2))
    with on_an_accelerator():
        _, state, _ = rule.update(grads, rule.init(grads), params)
        with kernels() as started:
            rule.update(grads, state, params)
    assert len(started) == fixed + of_each * leaves


def test_kernels_are_counted() -> None:
    """An operation, views of its result, and one with several results."""
    three = tf.ones(3)
    with kernels() as started:
        tf.unstack(tf.expand_dims(tf.reshape(three + 1, (3, 1)), 0)[0])
    assert started == ["AddV2", "StridedSlice", *["Unpack"] * 3]
