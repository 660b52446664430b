"""Clipping inside PyTorch's transformations: compiled once without a graph break, exported, batched."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import uniclip as uc
import uniclip.backends
from tracing import CASES, VALUES, Halving, everything, leaves, same, some, values


def given(by: float = 1.0, rows: int = 4) -> Any:
    """Return gradients in PyTorch."""
    tree = values(by)
    return {"w": torch.from_numpy(tree["w"][:rows]), "b": [torch.from_numpy(tree["b"][0][:rows]), None]}


def wanted(by: float, limit: float, rows: int = 4, function: Any = some) -> Any:
    """Return what NumPy makes of them."""
    tree = values(by)
    return function({"w": tree["w"][:rows], "b": [tree["b"][0][:rows], None]}, limit)


def flat(w: torch.Tensor, b: torch.Tensor, limit: torch.Tensor) -> tuple[Any, ...]:
    """Clip two gradients; return the arrays of the results alone."""
    return tuple(leaves(some({"w": w, "b": [b, None]}, limit)))


def test_one_graph() -> None:
    """Every function is in one graph without a break, which values and limits of any size go through."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(everything, fullgraph=True, backend=counter, dynamic=False)
    for by, limit in CASES.values():
        same(clip(given(by), torch.tensor(limit)), wanted(by, limit, function=everything))
    assert counter.frame_count == 1


def test_units() -> None:
    """The norms of units are measured in one graph, too."""
    torch._dynamo.reset()
    rule, params = uc.agc(), [torch.ones(3, 2, 2, 2), torch.ones(3)]
    clip = torch.compile(lambda g, p: uc.clip(g, rule, p)[0], fullgraph=True, backend="aot_eager", dynamic=False)
    for by in (1.0, 1e-3):
        grads = [by * torch.arange(1.0, 25.0).reshape(3, 2, 2, 2), by * torch.arange(3.0)]
        same(clip(grads, params), uc.clip(grads, rule, params)[0])


def test_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled before uniclip has seen any tensor is not compiled again after it has."""
    monkeypatch.setattr("uniclip.backends._CACHE", {})
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(lambda g: uc.clip_by_value(g, -1, 1), fullgraph=True, backend=counter, dynamic=False)
    for by in (1.0, 2.0):
        same(clip(given(by)), uc.clip_by_value(values(by), -1, 1))
    assert counter.frame_count == 1


def test_dynamic_shapes() -> None:
    """Compiled for dynamic shapes, gradients of other shapes compile nothing anew."""
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), set()
    clip = torch.compile(some, fullgraph=True, backend=counter, dynamic=True)
    for by, limit in CASES.values():
        for rows in (4, 2, 3):
            same(clip(given(by, rows), torch.tensor(limit)), wanted(by, limit, rows))
            counts.add(counter.frame_count)
    assert len(counts) == 1


PER_LEAF = {
    "each leaf": uc.by_norm(0.5),
    "last axis": uc.by_norm(0.5, axis=-1),
    "first axis": uc.by_norm(0.5, axis=0),
    "agc": uc.agc(0.1),
    "adagc": uc.adagc(warmup=0),
}


def test_pairs_of_shapes() -> None:
    """Compiled for dynamic shapes, leaves of any two shapes, equal ones too, go through one graph."""
    torch._dynamo.reset()
    counter, rng = CompileCounterWithBackend("aot_eager"), np.random.default_rng(0)

    def every(grads: Any, states: Any, params: Any) -> Any:
        return {name: rule.update(grads, states[name], params)[0] for name, rule in PER_LEAF.items()}

    clip, counts = torch.compile(every, fullgraph=True, backend=counter, dynamic=True), []
    for pair in ([(4, 3), (5, 6)], [(6, 4), (3, 7)], [(3, 3), (4, 3)], [(5, 6), (4, 3)], [(8, 5), (8, 5)]):
        plain = [rng.standard_normal(shape).astype("float32") for shape in pair]
        grads, params = [torch.from_numpy(leaf) for leaf in plain], [torch.from_numpy(leaf + 1) for leaf in plain]
        states = {name: rule.init(grads) for name, rule in PER_LEAF.items()}
        found = clip(grads, states, params)
        for name, rule in PER_LEAF.items():
            same(found[name], rule.update(grads, states[name], params)[0])
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_float_limits() -> None:
    """A limit that is a Python float is compiled as a constant once, and from its first change on as an argument."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(lambda g, c: uc.clip_by_global_norm(g, c)[0], fullgraph=True, backend=counter)
    for limit in (0.5, 0.6, 0.7, 1000.0, 0.8):
        same(clip(given(), limit), uc.clip_by_global_norm(values(), limit)[0])
    assert counter.frame_count == 2
    spoiled, limit = given(), math.inf  # which only measures, also what is not finite
    spoiled["w"].mul_(math.nan)
    same(clip(spoiled, limit), spoiled)
    assert counter.frame_count == 3


def test_steps() -> None:
    """A rule that counts steps is compiled once."""
    torch._dynamo.reset()
    counter, rule = CompileCounterWithBackend("aot_eager"), uc.Rule(Halving(4.0))
    step = torch.compile(rule.update, fullgraph=True, backend=counter, dynamic=False)
    state = rule.init(given())
    for limit in (4.0, 2.0, 1.0, 0.5):
        clipped, state, report = step(given(), state)
        assert report.limits == limit
        same(clipped, uc.clip_by_global_norm(values(), limit)[0])
    assert counter.frame_count == 1


class Clipping(torch.nn.Module):
    """A module that clips."""

    def forward(self, w: torch.Tensor, b: torch.Tensor, limit: torch.Tensor) -> tuple[Any, ...]:
        """Return the results of `flat`."""
        return flat(w, b, limit)


def test_export() -> None:
    """An exported program that was saved and loaded clips other values, and other numbers of rows."""
    rows, tree, file = torch.export.Dim("rows", min=2, max=64), given(), io.BytesIO()
    example = (tree["w"], tree["b"][0], torch.tensor(1.0))
    shapes = {"w": {0: rows}, "b": {0: rows}, "limit": None}
    torch.export.save(torch.export.export(Clipping(), example, dynamic_shapes=shapes), file)
    file.seek(0)
    clip = torch.export.load(file).module()
    for by, limit in CASES.values():
        for count in (4, 2, 3):
            tree = given(by, count)
            same(clip(tree["w"], tree["b"][0], torch.tensor(limit)), wanted(by, limit, count))


class Learning(torch.nn.Module):
    """A module that takes a step of a rule, whose state comes and goes as a tuple of tensors."""

    def __init__(self, rule: uc.Rule, kind: Any) -> None:
        super().__init__()
        self.rule, self.kind = rule, kind

    def forward(self, w: torch.Tensor, b: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return the clipped gradients, and the next state."""
        clipped, state, _ = self.rule.update({"w": w, "b": b}, self.kind(*state))
        return clipped["w"], clipped["b"], tuple(state)


@pytest.mark.parametrize(
    "rule", [uc.adagc(warmup=1), uc.percentile_clipping(50, window=3), uc.zclip(warmup=2)], ids=repr
)
def test_export_of_a_state(rule: uc.Rule) -> None:
    """An exported program that was saved and loaded learns step by step as eager code does."""
    w, b, file = torch.from_numpy(VALUES["w"]), torch.from_numpy(VALUES["b"][0]), io.BytesIO()
    first = rule.init({"w": w, "b": b})
    torch.export.save(torch.export.export(Learning(rule, type(first)), (w, b, tuple(first))), file)
    file.seek(0)
    step, state, known = torch.export.load(file).module(), tuple(first), first
    for by in (1.0, 0.5, 30.0, 1.5):
        found = step(w * by, b * by, state)
        clipped, known, _ = rule.update({"w": w * by, "b": b * by}, known)
        same(found, (clipped["w"], clipped["b"], tuple(known)))
        state = found[2]


@pytest.mark.parametrize("name", ["global", "each leaf", "last axis", "agc", "adagc"])
def test_vmap_of_some_leaves(name: str) -> None:
    """A batch of one leaf beside another that is the same for all equals one call for each."""
    rule = uc.by_global_norm(0.5) if name == "global" else PER_LEAF[name]
    trees = [given(by) for by in (0.1, 1.0, 20.0)]
    single, params = given()["b"], given(3.0)
    state = rule.init(given())

    def clip(w: torch.Tensor, b: list[Any]) -> Any:
        clipped, new, report = rule.update({"w": w, "b": b}, state, params)
        return clipped["w"], clipped["b"][0], leaves(report.norms), leaves(new)

    batched = torch.func.vmap(clip, in_dims=(0, None))(torch.stack([tree["w"] for tree in trees]), single)
    for number, tree in enumerate(trees):
        for one, all_ in zip(leaves(clip(tree["w"], single)), leaves(batched), strict=True):
            same(all_[number] if all_.ndim > one.ndim else all_, one)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap(compiled: bool) -> None:
    """A batch in which each example has its own scale and its own limit equals one call for each."""
    trees = [given(by) for by, _ in CASES.values()]
    batch = [torch.stack([t["w"] for t in trees]), torch.stack([t["b"][0] for t in trees])]
    torch._dynamo.reset()
    each = torch.func.vmap(flat)
    each = torch.compile(each, fullgraph=True, backend="aot_eager", dynamic=False) if compiled else each
    found = each(*batch, torch.tensor([limit for _, limit in CASES.values()]))
    for i, (by, limit) in enumerate(CASES.values()):
        same([leaf[i] for leaf in found], wanted(by, limit))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap_of_grad(compiled: bool) -> None:
    """Derivatives of a clip for each example of a batch equal those one by one, compiled too."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(3.0) * uc.clip_by_norm(x, 1.0)).sum() + uc.global_norm(x)

    batch = given()["w"] * torch.tensor([[0.0], [0.1], [1.0], [10.0]])
    torch._dynamo.reset()
    each = torch.func.vmap(torch.func.grad(total))
    found = (torch.compile(each, fullgraph=True, backend="aot_eager", dynamic=False) if compiled else each)(batch)
    for row, slope in zip(batch, found, strict=True):
        x = row.clone().requires_grad_()
        total(x).backward()
        torch.testing.assert_close(slope, x.grad)


def test_checkpoint() -> None:
    """Recomputing a clip in the backward pass changes no derivative."""
    slopes = []
    for way in (lambda f, x: f(x), lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)):
        x = given()["w"].requires_grad_()
        (way(lambda x: uc.clip_by_norm(torch.sin(x), 0.5), x) ** 3).sum().backward()
        slopes.append(x.grad)
    torch.testing.assert_close(*slopes, rtol=0, atol=0)
