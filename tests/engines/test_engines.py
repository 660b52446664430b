"""Engines that keep gradients in flat buffers train the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import uniclip as uc
from kit.engines import (
    STEPS,
    Failed,
    adamw,
    distance,
    grads_of_both,
    megatron_optimizer,
    net,
    run_cases,
    start_megatron,
    train_beside,
    zero_config,
    zero_engine,
)
from uniclip.integrations.torch import attach

CLOSE = 1e-6
RULES: dict[str, Callable[[], Any]] = {
    "global": lambda: uc.by_global_norm(0.3),
    "zclip": lambda: uc.zclip(z=1.0, decay=0.5, warmup=2),
    "skip": lambda: uc.by_global_norm(0.3, skip_above=8.0),
    "groups": lambda: uc.by_group_norm({"0": 0.05, "2": 0.2, "4": 0.1}, lambda path, _: path[1][0]),
    "leaf": lambda: uc.by_norm(0.05),
    "adagc": lambda: uc.adagc(warmup=2),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def with_zero(rank: int, stage: int, dtype: str, rule: str) -> float:
    """Return how far weights are from those of a plain optimizer with the same gradients."""
    engine = zero_engine(zero_config(stage, dtype))
    worst, handle, _ = train_beside(rank, engine, RULES[rule](), dtype=DTYPES[dtype])
    handle.remove()
    return worst


def with_megatron(rank: int, dtype: str, layout: str, rule: str) -> float:
    """Return how far the weights are from those of a plain optimizer."""
    start_megatron()
    module, plain = net().to(DTYPES[dtype]), net()
    experts = (lambda model: model[4]) if layout == "experts" else None
    ddp, optimizer = megatron_optimizer(module, dtype, sharded=layout != "whole", experts=experts)
    handle = attach(optimizer, RULES[rule](), names=module)
    beside = adamw(plain)
    attach(beside, RULES[rule]())

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        grads_of_both(plain, step)
        # Each process has the sum over both; the average is the same.
        for q, p in zip(plain.parameters(), module.parameters(), strict=True):
            p.main_grad.copy_(q.grad)
        ddp.finish_grad_sync()
        optimizer.step()
        beside.step()
    handle.remove()
    rounded = [q.to(DTYPES[dtype]) for q in plain.parameters()]
    return distance(module.parameters(), rounded)


CASES: dict[str, dict[str, Callable[[int], float]]] = {
    "deepspeed": {
        f"stage {stage}, {dtype}, {rule}": partial(with_zero, stage=stage, dtype=dtype, rule=rule)
        for stage in (0, 1, 2, 3)
        for dtype in DTYPES
        for rule in RULES
    },
    "megatron": {
        f"{layout}, {dtype}, {rule}": partial(with_megatron, dtype=dtype, layout=layout, rule=rule)
        for layout in ("whole", "sharded", "experts")
        for dtype in DTYPES
        for rule in RULES
    },
}


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, float]]:
    """Return what each process has found in an engine."""
    folder = tmp_path_factory.mktemp(request.param)
    return run_cases(request.param, CASES[request.param], folder)


@pytest.mark.parametrize("rule", RULES)
def test_weights(found: list[dict[str, float]], rule: str) -> None:
    """In every stage, dtype and layout, all processes have the weights of one process."""
    for of_process in found:
        of_rule = {name: far for name, far in of_process.items() if name.endswith(f" {rule}")}
        for name, far in of_rule.items():
            assert not isinstance(far, Failed), far
            assert far < CLOSE, name
        assert len(of_rule) in {6, 8}
