"""Gradients that several processes hold parts of: two processes run every check, and each result must be that of one.

This file is also the script of the processes: they compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from in_processes import failures_in, run_in_group

import uniclip as uc
from uniclip.integrations.torch import (
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

PROCESSES = 2
RULES: dict[str, Any] = {
    "global": uc.by_global_norm(0.5),
    "not clipped": uc.by_global_norm(1e9),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "each leaf": uc.by_norm(0.3),
    "mean square": uc.by_block_rms(0.1),
    "rows": uc.by_norm(0.3, axis=-1),
    "columns": uc.by_norm(0.3, axis=0, nonfinite="zero"),
    "columns, largest": uc.by_norm(0.3, axis=0, ord=math.inf),
    "units": uc.agc(0.01),
    "value": uc.by_value(-0.3, 0.3),
    "function": lambda grad: grad / (1 + grad.norm()),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_global_norm(0.5)),
}
TRAINED: dict[str, Any] = {
    "global": uc.by_global_norm(0.5),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "units": uc.agc(0.01, nonfinite="zero"),
    "learns": uc.autoclip(50, window=4, nonfinite="skip"),
    "learns each": uc.adagc(warmup=2, nonfinite="skip"),
    "groups": uc.by_group_norm({0: 0.1, 1: 0.5}, lambda path, leaf: path[0], nonfinite="skip"),
    "masked": uc.masked(uc.by_norm(0.1), lambda path, leaf: path[0] == 1),
}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in every process."""
    CHECKS[function.__name__] = function
    return function


def rank() -> int:
    """Return the number of this process."""
    return torch.distributed.get_rank()


def mesh(*shape: int) -> Any:
    """Return a mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (PROCESSES,))


def whole(tensor: Any) -> Any:
    """Return all of a tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values() -> list[torch.Tensor]:
    """Return the same gradients in every process."""
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in [(5, 3), (4, 6), (7,), (4, 6), (1, 2), (4, 4), (2, 2)]]


def laid_out(full: list[torch.Tensor]) -> list[Any]:
    """Split gradients in every way there is; the last one stays whole."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    full = [value.clone() for value in full]  # what is laid out may be a view
    one, two = mesh(), mesh(1, PROCESSES)
    part = full[3] * (0.25 if rank() == 0 else 0.75)
    return [
        distribute_tensor(full[0], one, [Shard(0)]),  # not evenly
        distribute_tensor(full[1], one, [Shard(1)]),
        distribute_tensor(full[2], one, [Replicate()]),
        DTensor.from_local(part, one, [Partial()]),
        distribute_tensor(full[4], one, [Shard(0)]),  # nothing of it is in the last process
        distribute_tensor(full[5], two, [Replicate(), Shard(0)]),
        full[6].clone(),
    ]


def same_by(rule: Any, spoil: float | None) -> None:
    """Assert that a rule does the same to gradients in any layout, in place and not, and reports plain numbers."""
    full, params = values(), [value.cos() for value in values()]
    if spoil is not None:
        full[0][4, 0] = spoil  # in the last process
    wanted, report = uc.clip(full, rule, params)
    for in_place in (False, True):
        grads = laid_out(full)
        if in_place:
            clipped, seen = grads, uc.clip_(grads, rule, laid_out(params))
        else:
            clipped, seen = uc.clip(grads, rule, laid_out(params))
        assert [type(one) for one in clipped] == [type(one) for one in grads]
        torch.testing.assert_close([whole(one) for one in clipped], wanted, equal_nan=True)
        found = optree.tree_leaves(seen)
        assert all(type(one) is torch.Tensor for one in found)
        torch.testing.assert_close(found, optree.tree_leaves(report), equal_nan=True)


for name, rule in RULES.items():
    CHECKS[f"rule {name}"] = lambda rule=rule: same_by(rule, None)
    CHECKS[f"rule {name}, NaN"] = lambda rule=rule: same_by(rule, math.nan)


def reductions(run: Callable[[], Any]) -> int:
    """Return how many times the processes send something to each other."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        run()
    return int(counted.get_total_counts())


@check
def one_reduction_for_each_mesh_and_operation() -> None:
    """Whatever the rule, processes send once for each operation, dimension of a mesh, and mesh."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    wanted = {"value": 0, "order 3": 2, "function": None}
    rules = RULES | {"learns": uc.autoclip(50, window=4), "each learns": uc.adagc(warmup=2), "spikes": uc.skip_spikes()}
    for shape, places in (((PROCESSES,), [Shard(0)]), ((1, PROCESSES), [Replicate(), Shard(0)])):
        grads = [distribute_tensor(value, mesh(*shape), places) for value in values()]
        for name, rule in rules.items():
            times = wanted.get(name, 1)
            if times is None or not hasattr(rule, "update"):
                continue
            state = rule.init(grads)
            rule.update(grads, state, grads)  # how they are divided is found out once
            found = reductions(lambda r=rule, s=state, g=grads: r.update(g, s, g, loss=1.0))
            assert found <= times * len(shape), (name, found)
            assert found >= min(times, 1), (name, found)
            assert shape[0] > 1 or found == times, (name, found)  # nothing is sent along an axis of one process


@check
def parameters_laid_out_otherwise() -> None:
    """Parameters are measured whole, however they are divided: not at all, or on another mesh than gradients."""
    from torch.distributed.tensor import Shard, distribute_tensor

    full, params = values()[:2], [value.cos() for value in values()[:2]]
    divided = [distribute_tensor(param, mesh(), [Shard(0)]) for param in params]
    on_two = [distribute_tensor(param, mesh(1, PROCESSES), [Shard(0), Shard(0)]) for param in params]
    grads = [distribute_tensor(grad, mesh(), [Shard(0)]) for grad in full]
    for rule in (uc.agc(0.01), uc.Rule(uc.limits.Relative(0.01), scope=uc.scopes.each_leaf)):
        wanted = uc.clip(full, rule, params)[0]
        for given, theirs in ((full, divided), (grads, params), (grads, on_two)):
            found = uc.clip(given, rule, theirs)[0]
            torch.testing.assert_close([whole(one) for one in found], wanted)


@check
def no_reduction_depends_on_gradients() -> None:
    """Send as often in a process that has no gradients."""
    counts = []
    for missing in (False, True):
        params = parameters(values(), laid_out(values()))[:3]
        for p in params:
            p.grad = None if missing and rank() else p.grad
        counts.append(reductions(lambda params=params: clip_grad_norm_(params, 0.5)))
    assert counts == [1, 1]


@check
def huge_and_tiny() -> None:
    """Squares that overflow or underflow do not, whichever process has them."""
    for factor in (1e30, 1e-30):
        full = [value * factor for value in values()]
        torch.testing.assert_close(uc.global_norm(laid_out(full)), uc.global_norm(full))


@check
def raised_together() -> None:
    """All processes raise, though the gradients of one are finite."""
    full = values()
    full[0][4, 0] = math.nan
    message = r"NaN or ∞ in grads\[0\]|another device's are not"
    with pytest.raises(FloatingPointError, match=message):
        uc.clip(laid_out(full)[:1], uc.by_global_norm(1.0, nonfinite="raise"))
    params = parameters(full, laid_out(full))
    with pytest.raises(RuntimeError, match=message):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=message):
        get_total_norm([p.grad for p in params], error_if_nonfinite=True)


def parameters(full: list[torch.Tensor], grads: list[Any]) -> list[Any]:
    """Return parameters with gradients; one with a part of a sum has a whole value."""
    params = []
    for value, grad in zip(laid_out([torch.ones_like(one) for one in full]), grads, strict=True):
        params.append(torch.nn.Parameter(value))
        params[-1].grad = grad
    return params


@check
def drop_ins() -> None:
    """Clip by the functions of torch.nn.utils, where PyTorch's own do not take the mixture."""
    full = values()
    norm = uc.global_norm(full)
    for order in (2.0, "inf", 1.0):
        params = parameters(full, laid_out(full))
        wanted, _ = uc.clip_by_global_norm(full, 0.5, ord=float(order))
        found = clip_grad_norm_(params, 0.5, norm_type=order)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, uc.global_norm(full, ord=float(order)))
        torch.testing.assert_close([whole(p.grad) for p in params], wanted)
    params = parameters(full, laid_out(full))
    torch.testing.assert_close(get_total_norm([p.grad for p in params]), norm)
    clip_grads_with_norm_(params, 0.5, norm)
    torch.testing.assert_close([whole(p.grad) for p in params], uc.clip_by_global_norm(full, 0.5)[0])
    params = parameters(full, laid_out(full))
    clip_grad_value_(params, 0.3)
    torch.testing.assert_close([whole(p.grad) for p in params], uc.clip_by_value(full, -0.3, 0.3))
    with pytest.raises((RuntimeError, NotImplementedError)):  # what uniclip is there for
        torch.nn.utils.clip_grad_norm_(parameters(full, laid_out(full)), 0.5)


@check
def as_torch() -> None:
    """On one mesh PyTorch's functions find the same norm, and their norms are taken."""
    full = values()[:2]
    theirs, ours = (parameters(values(), laid_out(values()))[:2] for _ in range(2))
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs])
    assert type(norm) is not torch.Tensor
    torch.testing.assert_close(whole(norm), uc.global_norm(full))
    clip_grads_with_norm_(ours, 0.5, norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, 0.5, norm)
    torch.testing.assert_close([whole(p.grad) for p in ours], [whole(p.grad) for p in theirs], rtol=1e-5, atol=1e-6)


@check
def without_a_gradient() -> None:
    """Let a process without a gradient join in: nobody waits for it, and all know the norm."""
    full = values()
    for use in ("function", "attached"):
        params = parameters(full, laid_out(full))[:2]
        for p in params:
            p.grad = None if rank() else p.grad
        own = [laid_out(full)[number].to_local() for number in (0, 1)]
        norm = torch.tensor(0.0)
        if rank() == 0:
            norm = uc.global_norm(own)
        torch.distributed.broadcast(norm, 0)
        if use == "function":
            found = clip_grad_norm_(params, 0.5)
        else:
            optimizer = torch.optim.SGD(params, lr=0.0)
            handle = attach(optimizer, uc.by_global_norm(0.5))
            optimizer.step()
            found = handle.report.norms
        torch.testing.assert_close(found, norm)
        for p, part in zip(params, own, strict=True):
            assert (p.grad is None) == (rank() > 0)
            if rank() == 0:
                torch.testing.assert_close(p.grad.to_local(), part * 0.5 / norm)


def model() -> torch.nn.Sequential:
    """Return the same small model in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def optimizer_of(net: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    return torch.optim.AdamW([{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}], lr=0.1)


def sharded() -> Any:
    """Return the model, of which each process holds a part."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh())
    return fully_shard(net, mesh=mesh())


def loss_of(net: Any, x: torch.Tensor, step: int, bad: int | None) -> torch.Tensor:
    """Return a loss that differs from step to step, and is NaN in one."""
    return (net(x) ** 2).mean() * (1 + 5 * step) * (math.nan if step == bad else 1.0)


def batch(step: int) -> torch.Tensor:
    """Return the examples of all processes."""
    return torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(step))[step % 4]


def trained(net: Any, optimizer: Any, before: Callable[[], None], bad: int | None = None) -> list[Any]:
    """Take some steps on this process's share of each batch, and return the weights."""
    for step in range(6):
        optimizer.zero_grad()
        x = batch(step)
        share = x.chunk(PROCESSES)[rank()] if hasattr(net, "reshard") else x
        loss_of(net, share, step, bad).backward()
        before()
        optimizer.step()
    return [whole(p.detach()) for p in net.parameters()]


def fully_sharded(rule: Any, bad: int | None) -> None:
    """Assert that FSDP2 trains with an attached rule as one process does."""
    one, two = model(), sharded()
    optimizers = optimizer_of(one), optimizer_of(two)
    handles = [attach(optimizer, rule) for optimizer in optimizers]
    results = [trained(net, opt, lambda: None, bad) for net, opt in zip((one, two), optimizers, strict=True)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    seen = [optree.tree_leaves((handle.report, handle.state)) for handle in handles]
    assert all(type(array) is torch.Tensor for array in seen[1])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


for name, rule in TRAINED.items():
    CHECKS[f"FSDP2 {name}"] = lambda rule=rule: fully_sharded(rule, None)
    if "skip" in repr(rule) or "zero" in repr(rule):
        CHECKS[f"FSDP2 {name}, NaN"] = lambda rule=rule: fully_sharded(rule, 3)


@check
def fully_sharded_drop_in() -> None:
    """Do in an FSDP2 loop what PyTorch's function does there."""
    nets = [sharded(), sharded()]
    results = [
        trained(net, optimizer_of(net), lambda net=net, clip=clip: clip(net.parameters(), 0.5))
        for net, clip in zip(nets, (clip_grad_norm_, torch.nn.utils.clip_grad_norm_), strict=True)
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@check
def fully_sharded_checkpoint() -> None:
    """Find the state of a rule in the optimizer's own state_dict, and load it from there."""
    rule = uc.autoclip(50, window=4)
    nets = [sharded(), sharded()]
    optimizers = [optimizer_of(net) for net in nets]
    handles = [attach(optimizer, rule) for optimizer in optimizers]
    trained(nets[0], optimizers[0], lambda: None)
    assert any(
        not torch.equal(*pair) for pair in zip(*map(optree.tree_leaves, (h.state for h in handles)), strict=True)
    )
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    torch.testing.assert_close(handles[1].state, handles[0].state, rtol=0, atol=0)


@check
def plain_parts() -> None:
    """Plain tensors that are parts of larger ones are clipped by their norm together, with all_reduce."""
    from torch import distributed

    def all_reduce(array: torch.Tensor, op: str) -> torch.Tensor:
        distributed.all_reduce(array, distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX)
        return array

    full = values()
    for rule in (uc.by_global_norm(0.5), uc.by_global_norm(0.5, ord=math.inf), uc.by_global_norm(0.5, ord=3)):
        wanted, report = uc.clip([one.flatten() for one in full], rule)
        clipped, seen = uc.clip([one.flatten().tensor_split(PROCESSES)[rank()] for one in full], rule, None, all_reduce)
        torch.testing.assert_close(seen.norms, report.norms)
        torch.testing.assert_close(clipped, [one.tensor_split(PROCESSES)[rank()] for one in wanted])


def main(number: str, file: str) -> None:
    """Run every check as one of the processes, and write what went wrong."""
    run_in_group(CHECKS, number, PROCESSES, file)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    return failures_in(tmp_path_factory, __file__, [[str(number)] for number in range(PROCESSES)])


@pytest.mark.parametrize("title", CHECKS)
def test_as_in_one_process(failures: list[dict[str, str]], title: str) -> None:
    """Every process finds what one process would."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
