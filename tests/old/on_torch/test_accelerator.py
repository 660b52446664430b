"""On an accelerator nothing is read by the host: on tensors that say they are on one, and on fake ones of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import accelerator
import uniclip as uc
from accelerator import EVERY_RULE, LAUNCHED, RULES, SHAPES, VALUES, close, functions, patched, refuse, refused
from tracing import leaves
from uniclip import insight
from uniclip.backends.torch import BACKEND
from uniclip.rules import seen

OPERATIONS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "index", "index_put_"}
LARGE = (400, 350)
METHODS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__float__", "__int__", "__index__")


class Device(NamedTuple):
    """What a tensor says about an accelerator; its memory is the CPU's all the same."""

    type: str = "cuda"
    index: int = 0


class NoReads(TorchDispatchMode):
    """Refuse operations whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (refuse if func.overloadpacket.__name__ in OPERATIONS else func)(*args, **(kwargs or {}))


def staying(to: Any) -> Any:
    """Return a method ``to`` that takes a tensor to be on its device already."""

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if any(isinstance(arg, Device) for arg in args) else to(tensor, *args, **kwargs)

    return moved


@contextmanager
def on_an_accelerator() -> Iterator[None]:
    """Let every tensor say that it is on an accelerator, where the host reads none."""
    where = {"device": property(lambda tensor: Device()), "is_cpu": property(lambda tensor: False)}
    methods = dict.fromkeys(METHODS, refuse) | {"to": staying(torch.Tensor.to)}
    with patched(torch.Tensor, **where, **methods), NoReads():
        yield


def grads(value: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return gradients, one of them absent."""
    return [*(torch.from_numpy(leaf).to(dtype) for leaf in accelerator.values(value)), None]


def test_the_device_refuses() -> None:
    """Each way to read a tensor is an error on what stands for an accelerator."""
    reads = [bool, float, int, torch.is_nonzero, torch.nonzero, lambda x: torch.equal(x, x), lambda x: x[x > 0]]
    for read in (*reads, *(methodcaller(name) for name in ("cpu", "item", "numpy", "tolist"))):
        with refused, on_an_accelerator():
            read(torch.ones(1).sum())


@EVERY_RULE
def test_no_reads(rule: Any) -> None:
    """Every scope and policy clips without a read, functionally and in place, to what it does on the CPU."""
    for value in VALUES.values():
        wanted, expected = uc.clip(grads(value), rule)
        given, changed = grads(value), grads(value)
        with on_an_accelerator():
            found, report = uc.clip(given, rule)
            again = uc.clip_(changed, rule)
        close([found, changed, report, again], [wanted, wanted, expected, expected])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_no_reads_of_other_dtypes(dtype: torch.dtype) -> None:
    """No dtype is read, nor several together, nor large gradients, which are gone through piece by piece."""
    large = lambda: torch.from_numpy(np.random.default_rng(0).standard_normal(LARGE)).to(dtype)
    for tree in (lambda: grads(1.0, dtype), lambda: [grads(1.0, dtype), grads(1.0)], lambda: [large(), *grads()]):
        wanted, expected = uc.clip(tree(), RULES["all, propagate"])
        given, changed = tree(), tree()
        with on_an_accelerator():
            found, report = uc.clip(given, RULES["all, propagate"])
            uc.clip_(changed, RULES["all, propagate"])
        close(report, expected, rtol=2e-5)  # half precision is added one by one here, in trees on an accelerator
        for one in (found, changed):
            close(*([leaf.to(torch.complex64) for leaf in leaves(tree)] for tree in (one, wanted)), rtol=2**-7)


def test_no_reads_to_record(tmp_path: Path) -> None:
    """A recorder reads nothing before its window ends, of reports of all kinds, norms of leaves, and losses."""
    for number, rule in enumerate(RULES.values()):
        with insight.Recorder(tmp_path / str(number), leaves="all") as record:
            for _ in range(3):
                given, loss = grads(), torch.tensor(2.0)
                with on_an_accelerator():
                    _, _, report, norms = seen(rule, given, rule.init(given))
                    record(report, loss=loss, leaves=norms)
        found = insight.read(record.path)
        wanted = seen(rule, grads(), rule.init(grads()))[-1]
        np.testing.assert_allclose(found.leaves, [np.asarray(wanted)] * 3, rtol=1e-6)
        assert found.losses.tolist() == [2.0] * 3


def test_no_reads_in_the_functions() -> None:
    """Nor do the familiar functions read anything, or a rule that remembers."""
    for call in functions(torch.tensor(1.0)):
        wanted, given = call(grads()), grads()
        with on_an_accelerator():
            found = call(given)
        close(found, wanted)


VIEWS = {"alias", "as_strided", "detach", "expand", "permute", "select", "slice", "unbind", "unsqueeze", "view"}
"""Operations that start no kernel."""
FAST = {"_foreach_norm", "_foreach_mul.Tensor", "_foreach_mul.Scalar", "_foreach_mul_.Tensor", "_foreach_mul_.Scalar"}
"""Those on many arrays for which CUDA has one kernel; with a factor for each array it has one for each."""
KERNELS = {"global": (16, 0), "by_norm": (15, 1), "zclip": (60, 0), "adagc": (60, 1), "agc": (60, 4)}
"""How many kernels a step may start: so many, and so many for each leaf."""


class Kernels(TorchDispatchMode):
    """Count the kernels that operations start."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, way = func.overloadpacket.__name__, f"{func.overloadpacket.__name__}.{func._overloadname}"
        on_the_host = not any(isinstance(arg, (torch.Tensor, list, tuple)) for arg in args)  # a number becomes a tensor
        if name not in VIEWS | {"promote_types"} and not on_the_host:
            self.count += len(args[0]) if name.startswith("_foreach") and not {name, way} & FAST else 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_place", [False, True], ids=["functional", "in place"])
@pytest.mark.parametrize("leaves", [2, 20])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, leaves: int, in_place: bool) -> None:
    """A step starts a few dozen kernels, whatever the number of norms: beside scaling nothing goes leaf by leaf."""
    rule, (fixed, of_each) = LAUNCHED[name], KERNELS[name]
    grads, params = ([torch.randn(8, 4 + number) for number in range(leaves)] for _ in range(2))
    with on_an_accelerator():
        state = rule.init(grads)
        with Kernels() as kernels:
            rule.update(grads, state, params, in_place=in_place)
    assert kernels.count <= fixed + of_each * leaves


def test_kernels_are_counted() -> None:
    """An operation, views of its result, and one on many arrays with one factor and with a factor for each."""
    three = [torch.ones(2), torch.ones(3), torch.ones(4)]
    with Kernels() as kernels:
        (three[1] + 1).view(3, 1)[0].detach()
        torch._foreach_mul(three, 2.0)
        torch._foreach_mul(three, [1.0, 2.0, 3.0])
    assert kernels.count == 1 + 1 + len(three)


class WithoutCUDA(TorchFunctionMode):
    """Slice and copy by PyTorch's operators: its methods ask for the library of CUDA, which need not be here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            array, rows = args
            rows, *_ = rows if isinstance(rows, tuple) else (rows,)
            if isinstance(rows, int):
                return torch.ops.aten.select(array, 0, rows)
            return array.view_as(array) if rows is ... else torch.ops.aten.slice(array, 0, rows.start, rows.stop)
        if func is torch.Tensor.copy_:
            func = torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plain", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("name", sorted(RULES.keys() - {"value"}))  # whose bounds are the CPU's, and compared there
def test_fake_cuda(name: str, plain: bool) -> None:
    """Fake tensors of CUDA, which have no values, go through: nothing depends on values or mixes devices."""
    hooks = ExitStack()
    # What only tensors of PyTorch's own class can be asked, and those that have addresses.
    hooks.enter_context(mock.patch.object(BACKEND, "plain", return_value=plain))
    hooks.enter_context(mock.patch.object(BACKEND, "apart", return_value=plain))
    hooks.enter_context(mock.patch("uniclip.backends.torch_in_place._apart", lambda operand, array: operand))
    with hooks, FakeTensorMode(), WithoutCUDA():
        given = [torch.empty(shape, device="cuda", dtype=torch.float16) for shape in SHAPES[:2]]
        given += [torch.empty(shape, device="cuda") for shape in (*SHAPES[2:], LARGE)]
        clipped, report = uc.clip(given, RULES[name])
        uc.clip_(given, RULES[name])
    for new, old in zip(clipped, given, strict=True):
        assert (new.shape, new.dtype, new.device.type) == (old.shape, old.dtype, "cuda")
    # A limit that is a number is not moved to the device.
    assert {leaf.device.type for leaf in leaves(tuple(report))} == {"cuda"}
