"""Tensors are made where the gradients are, whatever the user's defaults; tensors without values have shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import uniclip as uc
from uniclip.integrations.torch import (
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

CPU = torch.device("cpu")
RULES = [
    uc.by_global_norm(1.0),
    uc.by_global_norm(1.0, ord=3, nonfinite="zero"),
    uc.by_global_norm(1.0, ord=math.inf, nonfinite="skip"),
    uc.by_norm(1.0, axis=-1),
    uc.by_block_rms(0.1),
    uc.Rule(1.0, scope=uc.scopes.each_entry, curve=uc.curves.tanh),
    uc.by_value(-0.5, 0.5),
    uc.by_value(-np.ones(3), np.ones(3)),
    uc.agc(0.1),
    uc.larc(lr=0.1),
    torch.sign,
]
REMEMBERING = [
    uc.zclip(warmup=2),
    uc.adagc(warmup=1),
    uc.autoclip(10, window=3),
    uc.percentile_clipping(50),
    uc.norm_growth(),
    uc.skip_spikes(),
    uc.by_global_norm(uc.limits.Schedule(lambda step: torch.tensor(2.0) / (1 + step))),
    uc.chain(uc.by_value(-0.5, 0.5), uc.spam()),
]


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Set the default device of all code."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of all code."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "set_default_device": partial(default_device, "meta"),
    "with torch.device": partial(torch.device, "meta"),
    "float64": partial(default_dtype, torch.float64),
    "bfloat16": partial(default_dtype, torch.bfloat16),
}


def grads(by: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return gradients on the CPU, whatever the defaults."""
    draw = torch.Generator(CPU).manual_seed(0)
    make = partial(torch.randn, generator=draw, device=CPU, dtype=torch.float32)
    return {"w": (make(4, 3) * by).to(dtype), "b": [(make(3) * by).to(dtype), None]}


def arrays(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def clipped() -> Any:
    """Clip in every way, new and in place."""
    results = []
    for by in (1.0, 1e30, 1e-30, math.nan):
        for rule in RULES:
            here = grads(by)
            results += [uc.clip(grads(by), rule, grads())[0], uc.clip_(here, rule, grads()), here]
        results += [uc.clip_and_sum([grads(by)["w"]], uc.by_example_norm(0.5))]
    results += [
        uc.clip_by_global_norm(grads(1e10, dtype), 1 / 3, norm=1e10 / 3) for dtype in (torch.half, torch.double)
    ]
    return results


def remembered() -> Any:
    """Clip with every rule that remembers, over steps and a saved state."""
    results = []
    for rule in REMEMBERING:
        state, clipper = rule.init(grads(0.0)), uc.Clipper(rule)
        for step in range(4):
            results.append(clipper(grads(1.0 + step), grads(), loss=1.0))
            new, state, report = rule.update(grads(1.0 + step), state, grads(), loss=1.0)
            results.append((new, state, tuple(report), report.scalars()))
        other = uc.Clipper(rule)
        other.load_state_dict(clipper.state_dict())
        results.append((other(grads(9.0), grads(), loss=1.0), other.state))
    return results


def parameters(by: float = 5.0) -> list[torch.nn.Parameter]:
    """Return parameters with gradients on the CPU."""
    params = [torch.nn.Parameter(leaf) for leaf in arrays(grads())]
    for param in params:
        param.grad = torch.ones_like(param) * by
    return params


def dropped_in() -> Any:
    """Call PyTorch's functions and take steps of an optimizer."""
    results: list[Any] = []
    for function in (
        lambda params: clip_grad_norm_(params, 1.0),
        lambda params: clip_grad_value_(params, 1.0),
        lambda params: clip_grads_with_norm_(params, 1.0, 20.0),
        lambda params: clip_grads_with_norm_(params, 1.0, get_total_norm([p.grad for p in params], 3.0)),
    ):
        params = parameters()
        results += [function(params), [param.grad for param in params]]
    for rule in (*RULES[:3], uc.zclip(warmup=2), uc.adagc(warmup=1)):
        params = parameters()
        optimizer = torch.optim.SGD(params, lr=0.1)
        attach(optimizer, rule)
        for _ in range(4):
            optimizer.step()
        results.append(params)
    return results


@pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize("run", [clipped, remembered, dropped_in], ids=lambda run: run.__name__)
def test_defaults(run: Callable[[], Any], defaults: Callable[[], AbstractContextManager[Any]]) -> None:
    """Results are the same bits on the CPU, whatever the default device and dtype."""
    wanted = arrays(run())
    with defaults():
        found = arrays(run())
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device) == (b.dtype, CPU)
        assert torch.equal(a.detach().nan_to_num(7e7), b.detach().nan_to_num(7e7))


@pytest.mark.parametrize("defaults", list(DEFAULTS.values())[:2], ids=list(DEFAULTS)[:2])
def test_compiled(defaults: Callable[[], AbstractContextManager[Any]]) -> None:
    """So they are in compiled code."""
    rule = uc.zclip(warmup=2)

    def function(given: torch.Tensor) -> Any:
        return uc.clip(given, uc.by_value(-0.5, 0.5))[0], rule.update(given, rule.init(given))[:2]

    with defaults():
        given = grads()["w"]
        found = arrays(torch.compile(function, fullgraph=True, backend="eager")(given))
    for a, b in zip(found, arrays(function(given)), strict=True):
        torch.testing.assert_close(a, b)


def large() -> dict[str, torch.Tensor]:
    """Return tensors that are worked on in pieces."""
    return {"w": torch.ones(600, 400), "h": torch.ones(600, 400, dtype=torch.float16), "c": torch.ones(3) + 1j}


def sparse() -> torch.Tensor:
    """Return a sparse tensor in which an index occurs twice."""
    return torch.sparse_coo_tensor([[7, 3, 7]], torch.ones(3, 1), (10, 1), check_invariants=False)


def to_meta(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a tensor of the device meta."""
    return tensor.to("meta")


def to_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor."""
    return mode.from_tensor(tensor)


WITHOUT_VALUES = {
    "meta": (to_meta, lambda mode: nullcontext()),
    "fake, within the mode": (to_fake, lambda mode: mode),
    "fake, outside": (to_fake, lambda mode: nullcontext()),
}


@pytest.fixture(params=WITHOUT_VALUES.values(), ids=WITHOUT_VALUES)
def without_values(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Return what makes trees of tensors without values, and where they are used."""
    mode = FakeTensorMode()
    make, where = request.param
    with where(mode):
        yield lambda tree: pytree.tree_map_only(torch.Tensor, lambda leaf: make(leaf, mode), tree)


def kinds(tree: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a tree of tensors without values."""
    for leaf in arrays(tree):
        assert isinstance(leaf, FakeTensor) or leaf.is_meta
    return [(leaf.shape, leaf.dtype) for leaf in arrays(tree)]


@pytest.mark.parametrize("make", [grads, large, sparse], ids=lambda make: make.__name__)
def test_without_values(without_values: Any, make: Callable[[], Any]) -> None:
    """Every rule gives shapes and dtypes, in place too."""
    for rule in RULES[:4] if make is sparse else RULES[:6] if make is large else RULES:
        if make is sparse and rule is RULES[3]:
            continue  # it has no axes
        given = without_values(make())
        params = without_values(pytree.tree_map_only(torch.Tensor, torch.clone, make()))
        new, report = uc.clip(given, rule, params)
        assert kinds(new) == kinds(given)
        assert kinds(tuple(uc.clip_(given, rule, params))) == kinds(tuple(report))


def test_memory_without_values(without_values: Any) -> None:
    """States have none either, and keep their shapes and dtypes."""
    for rule in (*REMEMBERING[:6], REMEMBERING[-1]):
        state = rule.init(without_values(grads()))
        _, after, _ = rule.update(without_values(grads()), state, without_values(grads()), loss=1.0)
        assert kinds(after) == kinds(state)


def test_errors_without_values(without_values: Any) -> None:
    """What needs a value is refused, and so is a drop-in's error for values that are not finite."""
    with pytest.raises(TypeError, match="nonfinite='raise' has to look at the norm"):
        uc.clip(without_values(grads()), uc.by_norm(1.0, nonfinite="raise"))
    params = [torch.nn.Parameter(without_values(torch.ones(3)))]
    params[0].grad = without_values(torch.ones(3))
    assert kinds(clip_grad_norm_(params, 1.0)) == [(torch.Size([]), torch.float32)]
    clip_grad_value_(params, 1.0)
    with pytest.raises(TypeError, match="nonfinite='raise' has to look at the norm"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
