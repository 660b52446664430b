"""Clipping inside tracers, which record operations on an example and run them on other values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import uniclip as uc
from tracing import everything, leaves, same

Tensors = tuple[torch.Tensor, ...]


def jit_trace(function: Callable[..., Tensors], example: Tensors) -> Callable[..., Tensors]:
    """Record with ``torch.jit.trace``, which warns of shapes that are compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(function, example, check_trace=False)


def fx(function: Callable[..., Tensors], example: Tensors, **options: Any) -> Callable[..., Tensors]:
    """Record with ``make_fx``."""
    return make_fx(function, **options)(*example)


TRACERS = {
    "make_fx": fx,
    "make_fx, fake": partial(fx, tracing_mode="fake"),
    "make_fx, symbolic": partial(fx, tracing_mode="symbolic"),
    "make_fx, before dispatch": partial(fx, pre_dispatch=True),
    "jit.trace": jit_trace,
    "aot_function": lambda function, example: aot_function(function, nop),
}
tracers = pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)


def example(by: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return a matrix, a vector and a number."""
    draw = torch.Generator().manual_seed(0)
    matrix, vector = (torch.randn(*shape, generator=draw) for shape in ((4, 3), (4,)))
    return tuple((tensor * by).to(dtype) for tensor in (matrix, vector, torch.tensor(0.5)))


def tensors(tree: Any) -> Tensors:
    """Return what is in a tree."""
    tree = pytree.tree_map(lambda node: tuple(node) if isinstance(node, uc.Report) else node, tree)
    return tuple(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def agree(
    trace: Any, function: Callable[..., Tensors], inputs: list[Tensors], rtol: float = 2e-6, atol: float = 0
) -> None:
    """Assert that what is recorded from the first input does on every one what the function does, but for rounding."""
    recorded = trace(function, inputs[0])
    for given in inputs:
        found, wanted = recorded(*given), function(*given)
        for a, b in zip(found, wanted, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


SCALES = (0.01, 100.0, 1e30, 1e-30, 0.0)


@tracers
def test_every_way(trace: Any) -> None:
    """What is recorded where nothing is clipped clips larger values, also those whose squares leave the range."""

    def function(w: torch.Tensor, b: torch.Tensor, limit: torch.Tensor) -> Tensors:
        params = {"w": w * 0 + 0.5, "b": [b * 0, None]}
        grads = {"w": w, "b": [b, None]}
        bounds = b[:3].abs().nan_to_num()
        more = [
            uc.clip(grads, uc.agc(0.1), params),
            uc.clip(grads, uc.by_global_norm(limit, nonfinite="skip")),
            uc.clip(grads, uc.by_global_norm(limit, nonfinite="zero")),
            uc.clip({"w": w}, uc.by_value(-bounds, bounds)),
            uc.clip({"w": w, "b": b, "limit": limit}, uc.by_norm(1.0)),
        ]
        return tuple(leaves(everything(grads, limit))) + tensors(more)

    limit = torch.tensor(1.0)
    agree(trace, function, [(*example(by)[:2], limit * min(1.0, by)) for by in (*SCALES, math.nan)])


@tracers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(trace: Any, dtype: torch.dtype) -> None:
    """Half precision, in place too."""

    def function(*given: torch.Tensor) -> Tensors:
        here = [tensor.clone() for tensor in given]
        return (*tensors(uc.clip(given, uc.by_global_norm(1.0))), *tensors(uc.clip_(here, uc.by_norm(1.0))), *here)

    agree(trace, function, [example(by, dtype) for by in (0.01, 1.0, 1e4)], rtol=torch.finfo(dtype).eps)


RULES = [
    uc.by_global_norm(1.0),
    uc.by_global_norm(1.0, nonfinite="skip"),
    uc.by_norm(1.0),
    uc.by_norm(1.0, ord=3),
    uc.Rule(1.0, scope=uc.scopes.each_entry),
    uc.by_value(-0.5, 0.5),
    lambda g: g.flip(0) if g.ndim else -g,
    lambda g: g.mT if g.ndim == 2 else g,
]


@tracers
def test_in_place(trace: Any) -> None:
    """Changes in place are recorded: of copies, and of the very tensors that are given."""

    def function(*given: torch.Tensor) -> Tensors:
        results: list[Any] = []
        for rule in RULES:
            here = [given[0][:3].clone(), given[1].clone(), given[2].clone()]
            results += [here, uc.clip_(here, rule)]
        return tensors([list(map(tuple, results[1::2])), results[::2]])

    agree(trace, function, [example(by) for by in (*SCALES, math.nan)])


def test_given_tensors() -> None:
    """A graph that was recorded on tensors that it changes changes those that it is given."""

    def function(*given: torch.Tensor) -> torch.Tensor:
        return uc.clip_(given, uc.by_global_norm(1.0)).norms

    for trace in (jit_trace, fx, partial(fx, tracing_mode="symbolic")):
        recorded = trace(function, example(0.01))
        for by in SCALES:
            found, wanted = example(by), example(by)
            torch.testing.assert_close(recorded(*found), function(*wanted))
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


@tracers
@pytest.mark.parametrize("rule", [uc.zclip(warmup=2), uc.adagc(warmup=1), uc.autoclip(10, window=3)], ids=repr)
def test_memory(trace: Any, rule: uc.Rule) -> None:
    """A rule that remembers gets its state as an input and returns the next one."""
    names = ("w", "b", "number")
    first, spec = pytree.tree_flatten(rule.init(dict(zip(names, example(), strict=True))))

    def function(*given: torch.Tensor) -> Tensors:
        state = pytree.tree_unflatten(list(given[3:]), spec)
        clipped, state, report = rule.update(dict(zip(names, given[:3], strict=True)), state)
        return (*tensors(clipped), *pytree.tree_leaves(state), *tensors(report.norms))

    steps = [(*example(), *first)]
    for by in (1.0, 1.1, 0.9, 100.0, math.nan, 1.0):
        after = function(*steps[-1])
        steps.append((*example(by), *after[3 : 3 + len(first)]))
    agree(trace, function, steps, atol=1e-6)  # a variance near 0


def test_shapes() -> None:
    """A symbolic graph runs on other sizes."""

    def function(w: torch.Tensor) -> Tensors:
        rules = (uc.by_global_norm(1.0), uc.by_block_rms(0.1), uc.by_norm(1.0, axis=0), uc.by_norm(1.0, ord=3))
        return tensors([uc.clip(w, rule) for rule in rules])

    agree(partial(fx, tracing_mode="symbolic"), function, [(torch.ones(n, 3),) for n in (4, 7, 200_000)])


@tracers
def test_raise(trace: Any) -> None:
    """To raise where a gradient is not finite needs a value to look at, so it is refused."""
    with pytest.raises(TypeError, match="nonfinite='raise' has to look at the norm"):
        trace(lambda *given: uc.clip(given, uc.by_global_norm(1.0, nonfinite="raise"))[0], example())(*example())


@tracers
def test_clipper(trace: Any) -> None:
    """A clipper would remember what is no value, so it is refused."""
    with pytest.raises(TypeError, match="would remember values of code that is being compiled"):
        trace(lambda *given: tuple(uc.Clipper(uc.zclip())(given)), example())(*example())


class Seen(TorchDispatchMode):
    """Note which operations are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, partial(FlopCounterMode, display=False), torch.inference_mode, torch.no_grad])
def test_other_modes(mode: Any) -> None:
    """What only watches leaves the values there: gradients within the limit are the very same tensors."""
    given = list(example())
    with mode():
        assert uc.clip(given, uc.by_global_norm(100.0))[0][0] is given[0]
        clipped, report = uc.clip(given, uc.by_global_norm(0.1))
        with pytest.raises(FloatingPointError):
            uc.clip([torch.tensor(math.nan)], uc.by_norm(1.0, nonfinite="raise"))
        uc.clip_(given, uc.by_global_norm(0.1))
    same(clipped, uc.clip(list(example()), uc.by_global_norm(0.1))[0])
    same(clipped, given)
    assert report.clipped
