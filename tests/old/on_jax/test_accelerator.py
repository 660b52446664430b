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
import pytest
from jax._src import pjit
from jax._src.interpreters import pxla

import accelerator
import uniclip as uc
from accelerator import EVERY_RULE, LAUNCHED, RULES, VALUES, close, functions, patched, refuse, refused
from tracing import leaves
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_no_reads_of_other_dtypes(dtype: str) -> None:
    """No dtype is read, nor several together, and all are clipped to what they are on the CPU."""
    made = [leaf.astype(dtype) for leaf in grads()[:-1]]
    for scope in ("all, propagate", "leaf, propagate", "axes, propagate"):
        for given in (made, [*made, *grads()]):
            wanted, expected = uc.clip(given, RULES[scope])
            with on_an_accelerator():
                found, report = uc.clip(given, RULES[scope])
            close(report, expected)
            close(*([leaf.astype("complex64") for leaf in leaves(tree)] for tree in (found, wanted)), rtol=2**-7)


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


PROGRAMS = {"global": (42, 0), "by_norm": (39, 0), "zclip": (85, 0), "adagc": (92, 0), "agc": (73, 1)}
"""How many compiled programs a step runs outside of jit: so many, and so many for each leaf.

Arrays are added up, measured again in units and multiplied by three programs; the others compute with numbers, of which
`jit` makes one program. Along axes each factor is reshaped.
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[list[str]]:
    """Collect the names of the compiled programs that run."""
    ran: list[str] = []
    run = pxla.ExecuteReplicated.__call__

    def noted(self: Any, *args: Any) -> Any:
        ran.append(self.name)
        return run(self, *args)

    # Without these data no call takes JAX's way around Python, unless an earlier one did.
    slow = mock.patch.object(pjit, "_get_fastpath_data", return_value=None)
    with slow, mock.patch.object(pxla.ExecuteReplicated, "__call__", noted):
        jax.clear_caches()
        yield ran
    jax.clear_caches()


@pytest.mark.parametrize("leaves", [2, 20])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, leaves: int, programs: list[str]) -> None:
    """A step outside of jit runs a few dozen programs, whatever the number of leaves, but for what is said above."""
    rule, (fixed, of_each) = LAUNCHED[name], PROGRAMS[name]
    rng = np.random.default_rng(0)
    grads, params = (
        [jnp.asarray(rng.standard_normal((4 + number, 8)), jnp.float32) for number in range(leaves)] for _ in range(2)
    )
    with on_an_accelerator():
        _, state, _ = rule.update(grads, rule.init(grads), params)
        programs.clear()
        rule.update(grads, state, params)
    assert len(programs) == fixed + of_each * leaves


def test_programs_are_counted(programs: list[str]) -> None:
    """An operation is one, at each call, and so is a function under jit."""
    one, twice = jnp.ones(2), jax.jit(lambda x: jnp.sin(x) + jnp.cos(x))
    for _ in range(3):
        programs.clear()
        twice(one + one)
        assert len(programs) == 2
