"""On an accelerator nothing is read by the host, outside jit too: on arrays that say they are on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index, methodcaller
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import accelerator
import uniclip as uc
from accelerator import EVERY_RULE, RULES, VALUES, close, functions, patched, refuse, refused
from uniclip import insight
from uniclip.rules import seen

METHODS = ("item", "tolist", "__array__", "__bool__", "__float__", "__int__", "__complex__")


class Device(NamedTuple):
    """What an array says about an accelerator; its memory is the CPU's all the same."""

    platform: str = "gpu"


@contextmanager
def on_an_accelerator() -> Iterator[None]:
    """Let every array say that it is on an accelerator, where the host reads none."""
    # NumPy reads the memory of the CPU without asking the array: so what uniclip does there is refused too.
    methods = dict.fromkeys(METHODS, refuse) | {"devices": lambda array: {Device()}, "_value": property(refuse)}
    with patched(type(jnp.ones(1)), **methods), mock.patch("uniclip.backends.jax.squares", refuse):
        yield


def grads(value: float = 1.0) -> list[Any]:
    """Return gradients, one of them absent."""
    return [*map(jnp.asarray, accelerator.values(value)), None]


def test_the_device_refuses() -> None:
    """Each way to read an array is an error on what stands for an accelerator."""
    for read in (bool, float, index, jax.device_get, methodcaller("item"), methodcaller("tolist")):
        number = jnp.asarray(1)
        with refused, on_an_accelerator():
            read(number)


@EVERY_RULE
def test_no_reads(rule: Any) -> None:
    """Every scope and policy clips without a read to what it does on the CPU."""
    for value in VALUES.values():
        given = grads(value)
        wanted = uc.clip(given, rule)
        with on_an_accelerator():
            found = uc.clip(given, rule)
        close(found, wanted)


def test_no_reads_to_record(tmp_path: Path) -> None:
    """A recorder reads nothing before its window ends, of reports of all kinds, norms of leaves, and losses."""
    for number, rule in enumerate(RULES.values()):
        with insight.Recorder(tmp_path / str(number), leaves="all") as record:
            for _ in range(3):
                given, loss = grads(), jnp.asarray(2.0)
                with on_an_accelerator(), jax.transfer_guard_device_to_host("disallow"):
                    _, _, report, norms = seen(rule, given, rule.init(given))
                    record(report, loss=loss, leaves=norms)
        found = insight.read(record.path)
        wanted = seen(rule, grads(), rule.init(grads()))[-1]
        np.testing.assert_allclose(found.leaves, [np.asarray(wanted)] * 3, rtol=1e-6)
        assert found.losses.tolist() == [2.0] * 3


def test_no_reads_in_the_functions() -> None:
    """Nor do the familiar functions read anything, or a rule that remembers."""
    for call in functions(jnp.asarray(1.0)):
        given = grads()
        wanted = call(given)
        with on_an_accelerator():
            found = call(given)
        close(found, wanted)
