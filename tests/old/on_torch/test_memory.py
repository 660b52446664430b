"""What clipping PyTorch tensors allocates: next to nothing, and for new gradients one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import uniclip as uc

MIB = 2**20
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.complex64]
TREES: dict[str, list[tuple[int, ...]]] = {
    "one leaf": [(12_000_001,)],
    "some leaves": [(250, 400)] * 110 + [(100_001,)] * 10,
    "many small": [(40, 404)] * 750,
}
EXTRA = {torch.complex64: 2 * MIB}
"""What is allocated at most, if not 1 MiB: of a piece of complex numbers there are the modulus and its square too."""


def peak(call: Callable[[], Any]) -> int:
    """Return how many bytes PyTorch holds at most while a function runs, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    del result
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_peak() -> None:
    """What is given back is not counted twice, nor what is held forgotten."""
    assert peak(lambda: [torch.zeros(MIB), torch.zeros(MIB), torch.zeros(MIB)]) == 12 * MIB
    assert peak(lambda: [torch.zeros(MIB).sum() for _ in range(4)]) < 5 * MIB


@pytest.mark.parametrize("scope", [uc.scopes.all_leaves, uc.scopes.each_leaf], ids=repr)
@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory(dtype: torch.dtype, shapes: list[tuple[int, ...]], scope: uc.Scope) -> None:
    """Measuring and clipping in place take less than 1 MiB; what `uc.clip` returns is a copy only if it is clipped."""
    extra = EXTRA.get(dtype, MIB)
    grads = [torch.full(shape, 0.25, dtype=dtype) for shape in shapes]
    size = sum(leaf.nbytes for leaf in grads)
    assert size >= 24e6
    below, above = uc.Rule(1e9, scope=scope), uc.Rule(1e-3, scope=scope)
    assert peak(lambda: uc.global_norm(grads)) < extra
    assert peak(lambda: uc.clip(grads, below)) < extra
    assert peak(lambda: uc.clip_(grads, below)) < extra
    assert size <= peak(lambda: uc.clip(grads, above)) < size + extra
    assert peak(lambda: uc.clip_(grads, above)) < extra


@pytest.mark.parametrize("limit", [1e9, 1e-3], ids=["below", "above"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_what_is_not_finite(dtype: torch.dtype, limit: float) -> None:
    """To put 0 where entries are not finite takes some pieces in place, and no second set of gradients."""
    rule = uc.by_norm(limit, nonfinite="zero")
    grads = [torch.full((3_000_001,), 0.25, dtype=dtype) for _ in range(4)]
    for leaf in grads:
        leaf[7] = float("nan")
    assert peak(lambda: uc.clip_(grads, rule)) < 4 * MIB < sum(leaf.nbytes for leaf in grads) / 5
    assert all(leaf.isfinite().all() for leaf in grads)
