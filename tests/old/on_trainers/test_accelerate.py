"""`attach` under Accelerate, whose optimizers wrap PyTorch's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

import uniclip as uc
from uniclip.integrations.torch import attach


def train(accelerator: Accelerator, net: Any, optimizer: Any, batches: list[Any]) -> None:
    """Train as Accelerate's documentation does."""
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("first", ["attach", "prepare"])
def test_as_by_hand(tools: Any, case: Any, first: str) -> None:
    """Each rule does, bit for bit, what it does by hand, attached before the optimizer is prepared or after."""
    net, accelerator, batches = tools.Net(), Accelerator(cpu=True), tools.batches(case.factors)
    optimizer = tools.optimizer(net)
    handle = attach(optimizer, case.rule) if first == "attach" else None
    model, optimizer = accelerator.prepare(net, optimizer)
    handle = handle or attach(optimizer, case.rule)
    train(accelerator, model, optimizer, batches)
    hand, reports = tools.by_hand(case.rule, batches, see_loss=False)
    tools.same(net, hand)
    torch.testing.assert_close(tuple(handle.report), tuple(reports[-1]), rtol=0, atol=0)


def test_accumulation(tools: Any) -> None:
    """Inside ``accumulate`` the gradients are clipped once per real step."""
    net, rule, batches = tools.Net(), uc.autoclip(50), tools.batches([1.0] * 12)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(net, tools.optimizer(net))
    handle, seen = attach(optimizer, rule), []
    optimizer.optimizer.register_step_post_hook(lambda *_: seen.append(handle.report))
    train(accelerator, model, optimizer, batches)
    hand, reports = tools.by_hand(rule, batches, micro=3)
    tools.same(net, hand)
    torch.testing.assert_close(*(list(map(tuple, some)) for some in (seen, reports)), rtol=0, atol=0)


def test_bfloat16(tools: Any) -> None:
    """Under autocast to bfloat16 parameters and gradients are float32, and clipped as such."""
    net, accelerator = tools.Net(), Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(net, tools.optimizer(net))
    handle = attach(optimizer, uc.by_global_norm(0.05))
    train(accelerator, model, optimizer, tools.batches([1.0] * 2))
    assert handle.report.norms.dtype is torch.float32
    assert handle.report.norms > 0.05


def test_grad_scaler(tools: Any) -> None:
    """With a scaler, which Accelerate makes on accelerators only, the norms are those of the unscaled gradients."""
    net, rule = tools.Net(), uc.autoclip(50)
    accelerator, batches = Accelerator(cpu=True), tools.batches([1.0, 1.0, 1.0, 1.0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(tools.optimizer(net), scaler=scaler)
    handle = attach(optimizer, rule)
    accelerator.gradient_state._set_sync_gradients(True)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(net(**batch)["loss"]).backward()
        if number == 2:
            before = handle.report
            net.layers[0].weight.grad[0, 0] = torch.inf
        optimizer.step()
        assert optimizer.step_was_skipped == (number == 2)
        if number == 2:
            assert handle.report is before
    hand, reports = tools.by_hand(rule, [*batches[:2], batches[3]])
    tools.same(net, hand)
    torch.testing.assert_close(tuple(handle.report), tuple(reports[-1]), rtol=0, atol=0)


@pytest.mark.parametrize("forget", [False, True])
def test_save_state(tools: Any, tmp_path: Path, forget: bool) -> None:
    """``save_state`` and ``load_state`` keep the rule's state in that of the optimizer, and it is needed."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    for part in ("first", "second"):
        net, accelerator = tools.Net(), Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, tools.optimizer(net))
        if part == "first":
            attach(optimizer, rule)
            train(accelerator, model, optimizer, batches[:4])
            accelerator.save_state(str(tmp_path))
    if forget:  # who attaches later than that loads nothing
        accelerator.load_state(str(tmp_path))
    with pytest.warns(UserWarning, match="starts over: .*attach the rule first") if forget else nullcontext():
        attach(optimizer, rule)
    if not forget:
        accelerator.load_state(str(tmp_path))
    train(accelerator, model, optimizer, batches[4:])
    hand, _ = tools.by_hand(rule, batches)
    with pytest.raises(AssertionError) if forget else nullcontext():
        tools.same(net, hand)


def test_migration(tools: Any) -> None:
    """50 steps with ``accelerator.clip_grad_norm_`` lead to the same weights.

    It divides by the norm + 1e-6, and only norms above 0.1: each of 50 steps, of 0.1 · 0.1 / (1 - 0.9) at most,
    may differ by 1e-5 of itself, which sums up to 5e-5.
    """
    batches, nets = tools.batches([1.0, 3.0] * 25), []
    for ours in (True, False):
        net, accelerator = tools.Net(), Accelerator(cpu=True)
        nets.append(net)
        model, optimizer = accelerator.prepare(net, tools.optimizer(net))
        if ours:
            attach(optimizer, uc.by_global_norm(0.1))
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            if not ours:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    tools.same(*nets, atol=5e-5)


def test_attached_twice(tools: Any) -> None:
    """What Accelerate returns and what it got are one optimizer."""
    net, accelerator = tools.Net(), Accelerator(cpu=True)
    inside = tools.optimizer(net)
    _, optimizer = accelerator.prepare(net, inside)
    attach(inside, uc.by_global_norm(1.0))
    with pytest.raises(ValueError, match="clipped already"):
        attach(optimizer, uc.by_global_norm(1.0))
