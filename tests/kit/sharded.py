"""Checks of one norm over local shards, which several processes run together."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import uniclip as uc
from kit.devices import on_torch
from kit.spine import without_spine
from uniclip.integrations.torch import attach, clip_grad_norm_

same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8, equal_nan=True)
RULES = {
    "constant": uc.by_global_norm(0.5),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "rejects": uc.Rule(4.0, curve=uc.curves.reject),
    "autoclip": uc.autoclip(50, window=4),
    "zclip": uc.zclip(0.5, 0.5, warmup=2),
    "spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "schedule": uc.Rule(uc.limits.Schedule(lambda step: 2.0 / (1 + step))),
}
"""Rules of one norm, of all kinds."""


def rank() -> int:
    """Return the rank of this process."""
    return distributed.get_rank()


def full_gradients(step: int) -> list[torch.Tensor]:
    """Return the gradients of a step; the fourth has a spike."""
    made = torch.Generator().manual_seed(step)
    shapes = ((5, 3), (4, 6), (7,), (1, 2), (4,))
    return [torch.randn(shape, generator=made) * (9 if step == 3 else 1) for shape in shapes]


def fsdp2(full: list[torch.Tensor]) -> list[Any]:
    """Shard over one dimension, unevenly; the last tensor stays a regular one."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    sharded = [distribute_tensor(one.clone(), mesh, [Shard(0)]) for one in full[:-1]]
    return [*sharded, full[-1].clone()]


def hsdp(full: list[torch.Tensor]) -> list[Any]:
    """Shard over the second dimension of a mesh, and replicate over the first."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2))
    return [distribute_tensor(one.clone(), mesh, [Replicate(), Shard(0)]) for one in full]


def with_tp(full: list[torch.Tensor]) -> list[Any]:
    """Shard matrices over both dimensions of a mesh, and vectors over one, on a mesh of its own."""
    shape = (distributed.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    laid = []
    for one in full:
        on, places = (mesh, [Shard(0), Shard(1)]) if one.ndim > 1 else (mesh["dp"], [Shard(0)])
        laid.append(distribute_tensor(one.clone(), on, places))
    return laid


LAYOUTS: dict[str, Callable[[list[torch.Tensor]], list[Any]]] = {
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "FSDP2 x TP": with_tp,
}


def whole(tensors: Any) -> list[torch.Tensor]:
    """Return copies of the full tensors."""
    return [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in tensors]


def spoil(grads: list[Any], value: float) -> None:
    """Overwrite the last element of a matrix, in all processes that have it."""
    leaf = grads[1]
    mesh = leaf.device_mesh
    places = zip(mesh.get_coordinate(), mesh.shape, leaf.placements, strict=True)
    if all(place.is_replicate() or at == size - 1 for at, size, place in places):
        leaf.to_local()[-1, -1] = value


def one_norm(layout: str, name: str) -> None:
    """Check five steps on local shards against one process: finite, a spike, NaN and ∞."""
    rule, laid = RULES[name], LAYOUTS[layout]
    state = alone = rule.init(full_gradients(0))
    for step, value in enumerate((None, None, math.nan, None, math.inf)):
        loss = 0.0 if name != "spikes" else float(step == 3)
        grads, full = laid(full_gradients(step)), full_gradients(step)
        if value is not None:
            spoil(grads, value)
            full = whole(grads)
        in_place = step % 2 == 0
        with CommDebugMode() as sent:
            clipped, state, report = rule.update(grads, state, loss=loss, in_place=in_place)
        wanted, alone, its = rule.update(full, alone, loss=loss)
        if in_place:
            assert clipped is grads
        same(whole(clipped), wanted)
        same([report.norms, report.factors], [its.norms, its.factors])
        assert [flag_of(report, one) for one in FLAGS] == [flag_of(its, one) for one in FLAGS]
        decides = name != "constant"
        # The policy "zero" measures once more what is left.
        again = name == "zero" and value is not None
        most = {"FSDP2": 1, "HSDP": 1 + decides, "FSDP2 x TP": 2}[layout]
        assert sent.get_total_counts() == most * (1 + again), step
    same(numbers_of(state), numbers_of(alone))


FLAGS = ("finite", "skipped", "clipped")


def flag_of(report: Any, name: str) -> bool | None:
    """Return a flag of a report."""
    flag = getattr(report, name)
    return None if flag is None else bool(flag)


def numbers_of(state: Any) -> list[torch.Tensor]:
    """Return the arrays of a state."""
    return [torch.as_tensor(one, dtype=torch.float64) for one in state]


def two_paths(layout: str, name: str) -> None:
    """Check that processes on the general path and on the spine send the same numbers."""
    rule, laid = copy.copy(RULES[name]), LAYOUTS[layout]
    state = alone = rule.init(full_gradients(0))
    for step in range(4):
        with without_spine() if rank() == 0 else nullcontext():
            clipped, state, report = rule.update(laid(full_gradients(step)), state, loss=1.0)
        wanted, alone, its = rule.update(full_gradients(step), alone, loss=1.0)
        same(whole(clipped), wanted)
        same(report.norms, its.norms)


def odd_locals() -> None:
    """Check what only one process has: gaps, a leaf twice, a sparse leaf, absent gradients."""
    mesh = init_device_mesh("cpu", (2,))
    rule = RULES["zclip"]

    def check(grads: list[Any], full: list[torch.Tensor], params: Any = None) -> None:
        state = alone = rule.init(full)
        for _ in range(3):
            before = [one if one is None else one.clone() for one in grads]
            _, state, report = rule.update(before, state, params, in_place=True)
            wanted, alone, its = rule.update(full, alone)
            same([report.norms, report.factors], [its.norms, its.factors])
            for found, one in zip(before, wanted, strict=True):
                if found is not None:
                    same(*[t.to_dense() for t in (whole([found])[0], one)])

    wide, full = torch.ones(4, 6), torch.full((4, 3), 2.0)
    here = wide[2 * rank() : 2 * rank() + 2, ::2] if rank() else torch.ones(2, 3)
    check([DTensor.from_local(here, mesh, [Shard(0)], run_check=False)], [torch.ones(4, 3)])
    leaf = distribute_tensor(full, mesh, [Shard(0)])
    with_gaps = DTensor.from_local(wide[:2, ::2] if rank() else torch.ones(2, 3), mesh, [Shard(0)])
    rule.update([with_gaps, with_gaps], rule.init([full, full]), in_place=True)

    beside = torch.tensor([0.0, 3.0, 0.0])
    check([leaf, beside.to_sparse() if rank() else beside], [full, beside])
    # Two leaves of one shape, divided in different places.
    places = ([3, 1], [1, 3])
    columns = distribute_tensor(full, mesh, [Shard(1)])
    for sizes in places:
        own = full.split(sizes)[rank()].clone()
        laid = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        for each in (uc.by_norm(0.5, axis=1), uc.by_norm(0.5)):
            found = uc.clip([laid, columns], each)[0][0].to_local()
            same(found, uc.clip([full], each)[0][0].split(sizes)[rank()])

    params = [leaf, distribute_tensor(full, mesh, [Shard(0)])]
    other = distribute_tensor(full, mesh, [Shard(0)])
    half = torch.cat([full[:2], 0 * full[2:]])
    # A collective would wait for a process that takes no part.
    clipped, _, report = rule.update([leaf, None if rank() else other], rule.init(params), params)
    same(report.norms, uc.global_norm([full, half]))
    assert (clipped[1] is None) is bool(rank())
    state = rule.init(params)
    _, after, report = rule.update([None, None], state, params)
    same(numbers_of(after), numbers_of(state))
    same(report.norms, torch.tensor(0.0))


def ranges() -> None:
    """Check norms that float32 squares cannot hold, half precision, and small factors."""
    for factor in (1e30, 1e-30, 0.0):
        full = [one * factor for one in full_gradients(0)]
        for limit in (1e-30, 1.0, 1e38, math.inf, 0.0):
            wanted, its = uc.clip(full, uc.by_global_norm(limit))
            found, report = uc.clip(fsdp2(full), uc.by_global_norm(limit))
            same(whole(found), wanted, rtol=1e-6, atol=0)
            same([report.norms, report.factors], [its.norms, its.factors], rtol=1e-6, atol=0)
    for dtype in (torch.bfloat16, torch.float16):
        full = [one.to(dtype) for one in full_gradients(1)]
        found, report = uc.clip(fsdp2(full), RULES["constant"])
        wanted, its = uc.clip(full, RULES["constant"])
        same(report.norms, its.norms)
        for one, other in zip(whole(found), wanted, strict=True):
            assert torch.equal(one, other)


def raises() -> None:
    """Check that NaN in one process is an error in all, which names the leaf where it is."""
    names = ("a.weight", "b.weight", "c", "d", "e")
    rule = uc.by_global_norm(0.5, nonfinite="raise")
    grads = dict(zip(names, fsdp2(full_gradients(0)), strict=True))
    spoil(list(grads.values()), math.nan)
    before = [one.clone() for one in whole(grads.values())]
    match = r"NaN or ∞ in grads\['b.weight'\]" if rank() else "norm is out of its dtype's range"
    with pytest.raises(FloatingPointError, match=match):
        uc.clip_(grads, rule)
    same(whole(grads.values()), before)


def losses_in_row() -> None:
    """Check that a loss travels with the sums, and that all decide by the mean."""
    model = nn.Linear(4, 4)
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = attach(optimizer, uc.skip_spikes(z=1.0, window=4, warmup=2), names=model)
    skipped = []
    for step in range(6):
        model(torch.ones(2, 4)).sum().backward()
        # Only one process has a spike, or a loss at all.
        handle.loss = (9.0 if step == 4 and rank() == 0 else 1.0) if step < 5 or rank() else None
        with CommDebugMode() as sent:
            optimizer.step()
        assert step == 0 or sent.get_total_counts() == 1
        skipped.append(bool(handle.report.skipped))
        optimizer.zero_grad()
    assert skipped == [False] * 4 + [True, False]


def skips_as_in_one() -> None:
    """Check a fused optimizer that skips, and the warning of a run that skips all steps."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.Adam([weight], fused=True)
    handle = attach(optimizer, RULES["skip"])

    def skip_many() -> None:
        for _ in range(20):
            weight.grad = distribute_tensor(torch.full((4, 3), math.nan), mesh, [Shard(0)])
            optimizer.step()

    with pytest.warns(UserWarning, match="steps in a row were skipped"):
        skip_many()
    assert handle.report.skipped
    same(whole([weight])[0], torch.ones(4, 3))


def mixed_up() -> None:
    """Check losses and parameters of different kinds in two processes: neither waits."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle = attach(optimizer, RULES["spikes"])
    everywhere = DTensor.from_local(torch.tensor(1.0), mesh, [Replicate()], run_check=False)
    for loss in (None, torch.tensor(1.0)):
        weight.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        handle.loss = loss if rank() else everywhere
        optimizer.step()
    recorded = weight.detach().clone().requires_grad_()
    recorded.grad = (weight * 2).sum(0, keepdim=True).expand(4, 3) * weight
    assert not clip_grad_norm_([recorded], 1.0).requires_grad
    marked = nn.Parameter(torch.ones(3))
    marked._fsdp_flattened = True
    marked.grad = torch.ones(3) if rank() else None
    with pytest.raises(ValueError, match="FSDP1"):
        clip_grad_norm_([weight, marked], 1.0)


def unread(layout: str, name: str) -> None:
    """Check that a simulated accelerator is not read, and has the numbers of the host."""
    rule, laid = RULES[name], LAYOUTS[layout]
    full = full_gradients(0)
    state = rule.init(full)
    for value in (None, math.nan):
        here, there = laid(full), laid(full)
        if value is not None:
            spoil(here, value)
            spoil(there, value)
        loss = torch.tensor(1.0) if name == "spikes" else None
        _, _, its = rule.update(here, state, loss=loss, in_place=True)
        with on_torch():
            _, _, report = rule.update(there, state, loss=loss, in_place=True)
        same(whole(there), whole(here))
        same(report.norms, its.norms)


def offloaded() -> None:
    """Check gradients on the host in a group for accelerators alone: the sums travel there."""
    full = full_gradients(0)
    grads = fsdp2(full)
    moved = []
    move = torch.Tensor.to

    def to(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        # There is no such device here.
        if where and str(where[0]) == "cuda":
            moved.append(tensor.numel())
            return move(tensor, "cpu")
        return move(tensor, *where, **options)

    config = mock.patch.object(distributed, "get_backend_config", return_value="cuda:nccl")
    with config, mock.patch.object(torch.Tensor, "to", to):
        report = uc.clip_(grads, RULES["constant"])
    assert moved == [1]
    same(report.norms, uc.global_norm(full))


def known_whole(*, original: bool) -> None:
    """Check parameters of FSDP1 that are whole, by ``NO_SHARD``: they count once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = fsdp.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            device_id=torch.device("cpu"),
            sharding_strategy=fsdp.ShardingStrategy.NO_SHARD,
            use_orig_params=original,
        )
    model(torch.ones(1, 3)).sum().backward()
    params = list(model.parameters())
    grads = [p.grad.clone() for p in params]
    wanted = uc.global_norm(grads)
    same(clip_grad_norm_(params, math.inf), wanted)
    optimizer = torch.optim.SGD(params, lr=0.0)
    everything = distributed.group.WORLD
    with pytest.raises(ValueError, match=r"NO_SHARD.*shared="):
        attach(optimizer, RULES["constant"], all_reduce=everything, names=model)
    with pytest.raises(ValueError, match=r"NO_SHARD.*shared="):
        clip_grad_norm_(params, 1.0, all_reduce=everything)
    same(
        clip_grad_norm_(params, math.inf, all_reduce=everything, shared=lambda path, leaf: True),
        wanted,
    )
    # A flat parameter has several leaves, of which nothing is known.
    with nullcontext() if original else pytest.raises(ValueError, match="norm for each"):
        attach(optimizer, uc.by_norm(0.5)).remove()
    handle = attach(optimizer, RULES["constant"])
    optimizer.step()
    same(handle.report.norms, wanted)


def steps_in_backward() -> None:
    """Check that an optimizer whose ``step`` does nothing is refused."""
    params = nn.Linear(2, 2).parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        attach(optimizer, RULES["constant"])
    # The other process may not have joined yet.
    distributed.barrier()
