"""On an accelerator nothing is read by the host: on tensors that say they are on one, and on fake ones of CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import methodcaller
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import uniclip as uc
from tracing import Halving, leaves, soft
from uniclip.backends.torch import BACKEND

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "index", "index_put_"}
METHODS = [
    "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
]  # fmt: skip
SHAPES = [(400, 350), (4, 5), (7,), (3, 1, 2)]
VALUES = {"above": 1.0, "below": 1e-6, "overflow": 1e30, "underflow": 1e-30, "NaN": math.nan, "zeros": 0.0}
SCOPES = {
    "all": uc.all_leaves,
    "leaf": uc.each_leaf,
    "groups": uc.groups(lambda path, leaf: leaf.ndim),
    "axes": uc.axes(-1),
    "entry": uc.each_entry,
}
RULES = {
    **{
        f"{name}, {policy}": uc.Rule(1.0, scope=scope, nonfinite=policy)
        for name, scope in SCOPES.items()
        for policy in ("propagate", "skip", "zero")
    },
    "soft": uc.Rule(1.0, curve=soft),
    "L3": uc.Rule(1.0, norm=uc.Norm(3)),
    "Linf": uc.Rule(1.0, norm=uc.Linf),
    "rms": uc.by_block_rms(0.01),
    "unlimited": uc.Rule(math.inf),
    "value": uc.by_value(0.5),
}
NORM_RULES = {name: rule for name, rule in RULES.items() if name != "value"}  # whose bounds are the CPU's, and compared


class Device(NamedTuple):
    """What a tensor says about an accelerator; its memory is the CPU's all the same."""

    type: str = "cuda"
    index: int = 0


class NoReads(TorchDispatchMode):
    """Refuse operations whose result the host has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            msg = f"the host reads a tensor by {name}"
            raise AssertionError(msg)
        return func(*args, **(kwargs or {}))


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Stand for a method by which the host reads a tensor."""
    msg = "the host reads a tensor"
    raise AssertionError(msg)


def staying(to: Any) -> Any:
    """Return a method ``to`` that takes a tensor to be on its device already."""

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if any(isinstance(arg, Device) for arg in args) else to(tensor, *args, **kwargs)

    return moved


@contextmanager
def on_an_accelerator() -> Iterator[None]:
    """Let every tensor say that it is on an accelerator, where the host reads none."""
    with ExitStack() as stack:
        enter = lambda name, new: stack.enter_context(mock.patch.object(torch.Tensor, name, new, create=True))
        enter("device", property(lambda tensor: Device()))
        enter("is_cpu", property(lambda tensor: False))
        enter("to", staying(torch.Tensor.to))
        for name in METHODS:
            enter(name, refuse)
        stack.enter_context(NoReads())
        yield


def grads(value: float, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Any]:
    """Return random gradients times a value, NaN in one place alone."""
    generator = torch.Generator().manual_seed(0)
    made = [scale * torch.randn(shape, generator=generator) for shape in SHAPES]
    if math.isnan(value):
        made[1][2, 3] = value
    else:
        made = [value * leaf for leaf in made]
    return [*(leaf.to(dtype) for leaf in made), None]


def close(found: Any, wanted: Any) -> None:
    """Assert that results are equal, but for rounding."""
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        # Half precision is added one by one here, in trees on an accelerator.
        rounding = {"rtol": 1e-5, "atol": 0.0} if one.dtype is torch.float32 else {}
        torch.testing.assert_close(one, other, equal_nan=True, **rounding)


def test_the_device_refuses() -> None:
    """Each way to read a tensor is an error on what stands for an accelerator."""
    reads = [bool, float, int, torch.is_nonzero, torch.nonzero, lambda x: torch.equal(x, x), lambda x: x[x > 0]]
    for read in (*reads, *(methodcaller(name) for name in ("cpu", "item", "numpy", "tolist"))):
        with pytest.raises(AssertionError, match="the host reads"), on_an_accelerator():
            read(torch.ones(1).sum())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_reads(rule: Any) -> None:
    """Every scope and policy clips without a read, functionally and in place, to what it does on the CPU."""
    for value in VALUES.values():
        wanted, expected = uc.clip(grads(value), rule)
        given, changed = grads(value), grads(value)
        with on_an_accelerator():
            found, report = uc.clip(given, rule)
            again = uc.clip_(changed, rule)
        close((found, changed), (wanted, wanted))
        close((report, again), (expected, expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_no_reads_of_other_dtypes(dtype: torch.dtype) -> None:
    """No dtype is read, nor several together."""
    for tree in (lambda: grads(1.0, dtype, 0.01), lambda: [grads(1.0, dtype), grads(1.0)]):
        wanted, expected = uc.clip(tree(), RULES["all, propagate"])
        given, changed = tree(), tree()
        with on_an_accelerator():
            found, report = uc.clip(given, RULES["all, propagate"])
            uc.clip_(changed, RULES["all, propagate"])
        close((found, changed, report), (wanted, wanted, expected))


def test_no_reads_in_the_functions() -> None:
    """Nor do the familiar functions read anything, limits that are tensors included, nor a rule that remembers."""
    rule, limit = uc.Rule(Halving(4.0)), torch.tensor(1.0)
    calls = [
        lambda g: uc.clip_by_global_norm(g, 1.0),
        lambda g: uc.clip_by_global_norm(g, limit),
        lambda g: uc.clip_by_global_norm(g, 1.0, norm=uc.global_norm(g)),
        lambda g: uc.clip_by_norm(g, limit),
        lambda g: uc.clip_by_average_norm(g, 1.0),
        lambda g: uc.clip_by_value(g, -0.1, 0.1),
        lambda g: rule.update(rule.update(g, rule.init(g))[0], rule.init(g)),
    ]
    for call in calls:
        wanted, given = call(grads(1.0)), grads(1.0)
        with on_an_accelerator():
            found = call(given)
        close(found, wanted)


class WithoutCUDA(TorchFunctionMode):
    """Slice and copy by PyTorch's operators: its methods ask for the library of CUDA, which need not be here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            array, rows = args
            return array.view_as(array) if rows is ... else torch.ops.aten.slice(array, 0, rows.start, rows.stop)
        if func is torch.Tensor.copy_:
            func = torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plain", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("rule", NORM_RULES.values(), ids=NORM_RULES)
def test_fake_cuda(rule: Any, plain: bool) -> None:
    """Fake tensors of CUDA, which have no values, go through: nothing depends on values or mixes devices."""
    patched = ExitStack()
    # What only a tensor of PyTorch's own class can be asked, and one that has an address.
    patched.enter_context(mock.patch.object(BACKEND, "plain", return_value=plain))
    patched.enter_context(mock.patch.object(BACKEND, "apart", return_value=plain))
    patched.enter_context(mock.patch("uniclip.backends.torch._apart", lambda operand, array: operand))
    with patched, FakeTensorMode(), WithoutCUDA():
        given = [torch.empty(shape, device="cuda", dtype=torch.float16) for shape in SHAPES[:2]]
        given += [torch.empty(shape, device="cuda") for shape in SHAPES[2:]]
        clipped, report = uc.clip(given, rule)
        uc.clip_(given, rule)
    for new, old in zip(clipped, given, strict=True):
        assert (new.shape, new.dtype, new.device.type) == (old.shape, old.dtype, "cuda")
    # A limit that is a number stays where it is.
    assert {leaf.device.type for leaf in leaves(report._replace(limits=None))} <= {"cuda"}
