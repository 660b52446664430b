"""What processes agree on, checked in each of them: parts, losses, states, what all of them refuse."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed import fsdp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import uniclip as uc
from kit.layouts import local, part
from kit.processes import alike, attached, flags, layout, refused  # noqa: F401 - the pool calls some by name
from kit.trees import leaves, walk
from uniclip.integrations.torch import (
    attach,
    check_layout,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8, equal_nan=True)


def world() -> Any:
    """Return the group of all processes."""
    return distributed.group.WORLD


def rank() -> int:
    """Return the number of this process."""
    return distributed.get_rank()


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Return tensors, the same in all processes."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) for shape in shapes]


def whole(tensor: Any) -> Any:
    """Return all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Distributed tensors.

SHAPES = ((5, 3), (4, 6), (7,), (4, 6), (1, 2), (4, 4), (2, 2))
PLACED = {
    "global": uc.by_global_norm(0.5),
    "not clipped": uc.by_global_norm(1e9),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "skip": uc.by_norm(0.5, nonfinite="skip"),
    "mean square": uc.by_block_rms(0.1),
    "rows": uc.by_norm(0.3, axis=-1),
    "columns, largest": uc.by_norm(0.3, axis=0, ord=math.inf),
    "units": uc.agc(0.01),
    "relative": uc.Rule(uc.limits.Relative(0.01), scope=uc.scopes.each_leaf),
    "value": uc.by_value(-0.3, 0.3),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_global_norm(0.5)),
}


def laid_out(full: list[torch.Tensor]) -> list[Any]:
    """Split two processes' tensors in every way there is; the last one stays whole."""
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    full = [tensor.clone() for tensor in full]  # what is laid out may be a view
    return [
        distribute_tensor(full[0], one, [Shard(0)]),  # not evenly
        distribute_tensor(full[1], one, [Shard(1)]),
        distribute_tensor(full[2], one, [Replicate()]),
        DTensor.from_local(full[3] * (0.25 if rank() == 0 else 0.75), one, [Partial()]),
        distribute_tensor(full[4], one, [Shard(0)]),  # nothing of it is in the last process
        distribute_tensor(full[5], two, [Replicate(), Shard(0)]),
        full[6],
    ]


def placements(spoilt: float | None) -> None:
    """Have every rule do the same to gradients in any layout, in place and not, and reports plain numbers."""
    full, params = drawn(*SHAPES), [tensor.cos() for tensor in drawn(*SHAPES)]
    if spoilt is not None:
        full[0][4, 0] = spoilt  # in the last process
    for title, rule in PLACED.items():
        wanted, report = uc.clip(full, rule, params)
        for in_place in (False, True):
            grads = laid_out(full)
            found, seen = grads, None
            if in_place:
                seen = uc.clip_(grads, rule, laid_out(params))
            else:
                found, seen = uc.clip(grads, rule, laid_out(params))
            assert [type(one) for one in found] == [type(one) for one in grads], title
            same([whole(one) for one in found], wanted, msg=lambda text: f"{title}, {in_place}: {text}")
            assert flags(seen) == flags(report), title
            if title not in {"rows", "columns, largest", "units", "value", "chain"}:
                same([leaves(seen.norms), leaves(seen.factors)], [leaves(report.norms), leaves(report.factors)])
                assert all(type(one) is torch.Tensor for one in leaves(seen.norms)), title


def out_of_range() -> None:
    """Measure squares that overflow or underflow, whichever process has them."""
    for factor in (1e30, 1e-30):
        full = [tensor * factor for tensor in drawn(*SHAPES)]
        same(uc.global_norm(laid_out(full)), uc.global_norm(full))


def parameters_otherwise() -> None:
    """Measure parameters whole, however they are divided: not at all, or on another mesh than gradients."""
    full, params = drawn((5, 3), (4, 6)), drawn((5, 3), (4, 6), seed=1)
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    on = lambda tensors, mesh: [distribute_tensor(t, mesh, [Shard(0)] * mesh.ndim) for t in tensors]
    for rule in (PLACED["units"], PLACED["relative"]):
        wanted = uc.clip(full, rule, params)[0]
        for grads, theirs in ((full, on(params, one)), (on(full, one), params), (on(full, one), on(params, two))):
            same([whole(grad) for grad in uc.clip(grads, rule, theirs)[0]], wanted)


def with_grads(full: list[torch.Tensor], values: list[Any] | None = None) -> list[Any]:
    """Return parameters with gradients in every layout."""
    params = [nn.Parameter(value) for value in laid_out([torch.ones_like(one) for one in full])]
    for p, grad in zip(params, laid_out(full) if values is None else values, strict=True):
        p.grad = grad
    return params


def reductions(run: Callable[[], Any]) -> int:
    """Return how many times processes send something to each other."""
    with CommDebugMode() as counted:
        run()
    return int(counted.get_total_counts())


def one_reduction() -> None:
    """Require a step to send once for each dimension of a mesh, twice at order 3, whatever the gradients."""
    rules = {name: PLACED[name] for name in ("global", "skip", "units", "relative", "largest", "order 3")}
    rules |= {"learns": uc.autoclip(50, window=4), "each learns": uc.adagc(warmup=2), "loss": uc.skip_spikes()}
    for shape, places in (((2,), [Shard(0)]), ((1, 2), [Replicate(), Shard(0)])):
        grads = [distribute_tensor(value, init_device_mesh("cpu", shape), places) for value in drawn((5, 3), (4, 6))]
        for name, rule in rules.items():
            state = rule.init(grads)
            rule.update(grads, state, grads, loss=1.0)  # how they are divided is found out once
            found = reductions(lambda rule=rule, state=state, grads=grads: rule.update(grads, state, grads, loss=1.0))
            most = 2 if name in {"order 3", "largest"} else 1
            assert 1 <= found <= most * len(shape), f"{name}: {found} reductions, not {most} on a mesh of {shape}"
    params = with_grads(drawn(*SHAPES))[:3]
    for p in params:
        p.grad = None if rank() else p.grad
    assert reductions(lambda: clip_grad_norm_(params, 0.5)) == 1


# Drop-ins.


def drop_ins() -> None:
    """Clip every mixture of layouts by the functions of torch.nn.utils, as PyTorch's own where they can."""
    full = drawn(*SHAPES)
    for order in (2.0, "inf", 1.0):
        params = with_grads(full)
        wanted, norm = uc.clip_by_global_norm(full, 0.5, ord=float(order))
        found = clip_grad_norm_(params, 0.5, norm_type=order)
        assert type(found) is torch.Tensor
        same(found, norm)
        same([whole(p.grad) for p in params], wanted)
    params = with_grads(full)
    same(get_total_norm([p.grad for p in params]), uc.global_norm(full))
    clip_grads_with_norm_(params, 0.5, uc.global_norm(full))
    same([whole(p.grad) for p in params], uc.clip_by_global_norm(full, 0.5)[0])
    params = with_grads(full)
    clip_grad_value_(params, 0.3)
    same([whole(p.grad) for p in params], uc.clip_by_value(full, -0.3, 0.3))
    ours, theirs = with_grads(full)[:2], with_grads(full)[:2]
    norms = clip_grad_norm_(ours, 0.5), nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.testing.assert_close(
        [norms[0], *(whole(p.grad) for p in ours)], list(map(whole, (norms[1], *(p.grad for p in theirs))))
    )


def drop_in_of_parts() -> None:
    """Take plain tensors for parts with all_reduce=, what shared= names counts once; raise in all if one has a NaN."""
    full, params = drawn((6, 4), (3,)), [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))]
    wanted, norm = uc.clip_by_global_norm(full, 0.5)
    shared = lambda path, leaf: path[-1] == 1
    for use in ("norm", "total"):
        params[0].grad, params[1].grad = full[0].chunk(2)[rank()].clone(), full[1].clone()
        if use == "norm":
            same(clip_grad_norm_(params, 0.5, all_reduce=world(), shared=shared), norm)
        else:
            total = get_total_norm([p.grad for p in params], all_reduce=world(), shared=shared)
            same(total, norm)
            clip_grads_with_norm_(params, 0.5, total)
        same([p.grad for p in params], [wanted[0].chunk(2)[rank()], wanted[1]])
    params[0].grad[0, 0] = math.nan if rank() else 1.0
    with pytest.raises(RuntimeError, match=r"NaN|finite"):
        clip_grad_norm_(params, 0.5, error_if_nonfinite=True, all_reduce=world(), shared=shared)


def drop_in_without_a_gradient() -> None:
    """Let a process join in that has no gradient of a distributed parameter, and keeps ``None``."""
    full = drawn(*SHAPES)
    for use in ("function", "attached"):
        params = with_grads(full)[:2]
        norm = uc.global_norm([local(p.grad) for p in params])
        distributed.broadcast(norm, 0)
        for p in params:
            p.grad = None if rank() else p.grad
        if use == "function":
            found = clip_grad_norm_(params, 0.5)
        else:
            optimizer = torch.optim.SGD(params, lr=0.0)
            handle = attach(optimizer, uc.by_global_norm(0.5))
            optimizer.step()
            found = handle.report.norms
        same(found, norm)
        for p, grad in zip(params, full, strict=False):
            assert (p.grad is None) == (rank() == 1)
            if rank() == 0:
                same(local(p.grad), local(part(grad, p)) * 0.5 / norm)


# Steps that all agree on.

ONE_NORM = {
    "global": uc.by_global_norm(0.5),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "mean square": uc.Rule(0.1, norm=uc.norms.RMS),
    "relative": uc.Rule(uc.limits.Relative(0.01)),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_global_norm(0.5)),
    "learns": uc.autoclip(50, window=4),
    "named groups": uc.by_group_norm({0: 0.5, 1: 1.0}, lambda path, leaf: path[0] % 2),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
}


def columns(tensor: torch.Tensor) -> torch.Tensor:
    """Return the columns of this process."""
    return tensor.chunk(distributed.get_world_size(), 1)[rank()].clone()


def maximum_without_nan(array: torch.Tensor, op: str) -> torch.Tensor:
    """Join as a library does that drops NaN from a maximum."""
    array = array.contiguous()
    distributed.all_reduce(array, distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX)
    return array


def one_has_nan() -> None:
    """Let all processes know of the NaN of one, and which of them has it makes no difference."""
    for name, rule in ONE_NORM.items():
        for bad in range(distributed.get_world_size()):
            full, params = drawn((3, 8), (5, 8)), drawn((3, 8), (5, 8), seed=1)
            full[1][0, 2 * bad] = math.nan
            wanted, _, report = rule.update(full, rule.init(full), params)
            here = [columns(p) for p in params]
            clipped, _, seen = rule.update([columns(g) for g in full], rule.init(here), here, maximum_without_nan)
            assert flags(seen) == flags(report), name
            same(clipped, [columns(g) for g in wanted], msg=lambda text, name=name: f"{name}: {text}")


def one_has_nothing(*, names: list[str] | None = None) -> None:
    """Let a process without gradients take part: they are ``None``, or there are no leaves at all."""
    for name in names or [name for name in ONE_NORM if name != "named groups"]:
        rule = ONE_NORM[name]
        for by in (1.0, 1e30):
            full, params = [by * one for one in drawn((3, 4), (5, 4))], drawn((3, 4), (5, 4), seed=1)
            wanted, _, report = rule.update(full, rule.init(full), params)
            for empty in (([None] * 2, params), ([], [])):
                grads, here = (full, params) if rank() == 0 else empty
                clipped, _, seen = rule.update(grads, rule.init(here), here, world())
                same(clipped, wanted if rank() == 0 else empty[0], msg=lambda text, name=name: f"{name}: {text}")
                same(leaves(seen.norms), leaves(report.norms))
                assert flags(seen) == flags(report), name


def states() -> None:
    """Remember the same in all, as one would, over 30 steps with a spike, NaN, and gradients that one process lacks."""
    rules = [uc.zclip(z=1.0, warmup=3), uc.autoclip(50, window=5), uc.skip_spikes(z=2.0, window=8, warmup=3)]
    rules += [uc.adagc(warmup=2), uc.chain(uc.by_norm(1.0), uc.norm_growth())]
    for rule in rules:
        one, mine = uc.Clipper(rule), uc.Clipper(rule)
        params = drawn((3, 8), (5, 8), seed=1)
        for step in range(30):
            full = [(50.0 if step == 12 else 1.0) * g for g in drawn((3, 8), (5, 8), seed=step)]
            if step == 17:
                full[0][0, 0] = math.nan
            here = [columns(g) for g in full]
            if step % 7 == 3:
                full[1].chunk(4, 1)[2].zero_()
                here[1] = None if rank() == 2 else here[1]
            said = {"loss": 1.0 + step % 3 + (9.0 if step == 21 else 0.0)} if rule is rules[2] else {}
            one(full, params, **said)
            mine(here, [columns(p) for p in params], world(), **said)
            assert flags(mine.report) == flags(one.report), (rule, step)
        found, wanted = dict(walk(mine.state_dict())), dict(walk(one.state_dict()))
        assert found.keys() == wanted.keys()
        alike({path: repr(value) for path, value in found.items()}, repr(rule))
        numbers = [path for path, value in wanted.items() if not isinstance(value, str)]
        for path in numbers:
            same(torch.as_tensor(found[path]), torch.as_tensor(wanted[path]), msg=lambda text: f"{rule}: {text}")


def nobody_has() -> None:
    """Require that a leaf that no process has a gradient of leaves its row of the memory as it was."""
    rule, params = uc.adagc(warmup=1), drawn((3, 4), (5, 4))
    here = [columns(p) for p in params]
    state, mine = rule.init(params), rule.init(here)
    for absent in (False, True, False):
        grads, parts = ([tree[0], None if absent else tree[1]] for tree in (params, here))
        _, state, report = rule.update(grads, state, params)
        _, mine, seen = rule.update(parts, mine, here, world())
    same([leaves(seen.norms), leaves(seen.limits)], [leaves(report.norms), leaves(report.limits)])


SPIKES = uc.skip_spikes(z=2.0, window=8, warmup=3)
LOSSES = (1.0, 1.1, 0.9, 1.0, 1.1, 50.0, 1.0, math.nan, 1.1, 0.9)
"""The mean losses of ten steps; in each process they are others."""


def own(mean: float) -> float | None:
    """Return the loss of this process; the last one has none."""
    if math.isnan(mean):
        return math.nan if rank() == 1 else 1.0
    return None if rank() == distributed.get_world_size() - 1 else mean + 0.1 * (rank() - 1)


def losses() -> None:
    """Give a rule the mean of the losses of those that have one: of copies by attach, of parts as they are joined."""
    mesh = init_device_mesh("cpu", (4,))
    one, parts, spread = (uc.Clipper(SPIKES) for _ in range(3))
    weight = nn.Parameter(torch.ones(3, 8))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle, skipped = attach(optimizer, SPIKES), []
    for step, loss in enumerate(LOSSES):
        [grad] = drawn((3, 8), seed=step)
        one([grad], loss=loss)
        parts([columns(grad)], None, world(), loss=own(loss))
        spread([distribute_tensor(grad, mesh, [Shard(1)])], loss=own(loss))
        weight.grad, handle.loss = grad.clone(), own(loss)
        optimizer.step()
        skipped.append(bool(one.report.skipped))
        for holder in (parts, spread, handle):
            assert bool(holder.report.skipped) == skipped[-1], (holder, step)
    assert skipped == [False] * 5 + [True, False, True, False, False]
    weight.grad, handle.loss = None if rank() else torch.ones(3, 8), 1.0
    optimizer.step()  # one has no gradients, and its loss is waited for


def flat(*, use_orig_params: bool) -> Any:
    """Return a small model in FSDP1, with gradients."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        inside = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
        cpu = torch.device("cpu")
        net = fsdp.FullyShardedDataParallel(inside, use_orig_params=use_orig_params, device_id=cpu)
        (net(torch.ones(4, 5)) ** 2).sum().backward()
    return net


def fsdp1(*, alone: bool) -> None:
    """Refuse FSDP1's parameters, which look whole, without all_reduce=, but by value; one process may have them."""
    for use_orig_params in (False, True):
        net, theirs = (flat(use_orig_params=use_orig_params) for _ in range(2))
        params = list(net.parameters())
        optimizer = torch.optim.SGD(params, lr=1.0)
        uses: list[Callable[[], Any]] = [
            lambda o=optimizer: attach(o, uc.by_global_norm(1.0)).remove(),
            lambda p=params: get_total_norm(p),
            lambda p=params: clip_grad_norm_(p, 1.0),
        ]
        for use in uses:
            if alone:
                use()
            else:
                with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
                    use()
        attach(optimizer, uc.by_value(-0.1, 0.1)).remove()
        if alone:
            theirs.clip_grad_norm_(1.0)
            same([p.grad for p in params], [p.grad for p in theirs.parameters()])


# Refused in one process is refused in all.


def parameters(*names: str) -> list[tuple[str, Any]]:
    """Return named parameters with gradients."""
    named = [(name, nn.Parameter(torch.ones(3, 2))) for name in names]
    for number, (_, p) in enumerate(named):
        p.grad = torch.full_like(p, 1.0 + number)
    return named


def stepped(rule: Any, *names: str) -> None:
    """Take a step with an attached rule that joins the processes."""
    optimizer = torch.optim.SGD(parameters(*names), lr=0.1)
    attach(optimizer, rule, all_reduce=world())
    optimizer.step()


def local_sgd() -> Any:
    """Return an optimizer without hooks."""
    return PostLocalSGDOptimizer(torch.optim.SGD(parameters("a"), lr=0.1), PeriodicModelAverager(period=2))


JOINT, OF_EACH = uc.by_global_norm(0.5), uc.by_norm(0.5)
REFUSALS: dict[str, tuple[Callable[[bool], Any], Any, str]] = {
    "another rule": (
        lambda wrong: stepped(uc.by_norm(0.5) if wrong else uc.by_global_norm(0.5), "a"),
        ValueError,
        "rule",
    ),
    "another limit": (lambda wrong: stepped(uc.by_global_norm(0.5 + wrong), "a"), ValueError, "rule"),
    "another rule of a Clipper": (
        lambda wrong: uc.Clipper(uc.zclip(z=2.0 + wrong))([torch.ones(3)], None, world()),
        ValueError,
        "rule",
    ),
    "another limit beside no gradient": (
        lambda wrong: uc.clip(
            [None if wrong else torch.ones(3)], uc.by_global_norm(0.5 + wrong), [torch.ones(3)], world()
        ),
        ValueError,
        "rule",
    ),
    "other leaves": (lambda wrong: stepped(OF_EACH, "a", "c" if wrong else "b"), ValueError, "shared="),
    "norms along axes": (
        lambda wrong: uc.clip([torch.ones(3, 2)], uc.by_norm(0.5, axis=0), None, world()),
        ValueError,
        "all_reduce",
    ),
    "units of one process's": (
        lambda wrong: stepped(uc.agc(0.1) if wrong else uc.by_norm(0.1), "a"),
        (ValueError, RuntimeError),
        "all_reduce",
    ),
    "raise": (
        lambda wrong: uc.clip(
            [torch.full((3,), math.nan if wrong else 1.0)], uc.by_global_norm(1.0, nonfinite="raise"), None, world()
        ),
        FloatingPointError,
        "",
    ),
    "an optimizer without hooks": (lambda wrong: attach(local_sgd(), JOINT), TypeError, r"\.optim"),
}


def refusal(name: str) -> None:
    """Require what one process does wrong to be an error in both, and no process waits."""
    run, error, token = REFUSALS[name]
    with pytest.raises(error, match=token):
        run(rank() == 1)


# check_layout.


def optimizer_of(**leaves_: tuple[int, int]) -> Any:
    """Return an optimizer of leaves, each with the seeds of its values and its gradients."""
    named = [(name, nn.Parameter(drawn((3, 2), seed=value)[0])) for name, (value, _) in leaves_.items()]
    for (_, p), (_, seed) in zip(named, leaves_.values(), strict=True):
        p.grad = drawn((3, 2), seed=seed)[0]
    return torch.optim.SGD(named, lr=0.1)


def norm_of(*seeds: int) -> float:
    """Return the norm of gradients in one process."""
    return torch.cat([drawn((3, 2), seed=seed)[0].double() for seed in seeds]).norm().item()


def stages() -> Any:
    """Return the optimizer of one of two stages."""
    return optimizer_of(**{f"layer{rank()}": (rank(), 10 + rank())})


def parts() -> Any:
    """Return one of two parts of a leaf."""
    return optimizer_of(a=(rank(), 10 + rank()))


def experts() -> Any:
    """Return a copy beside an expert."""
    return optimizer_of(copied=(1, 2), **{f"expert{rank()}": (10 + rank(), 20 + rank())})


def copied(path: Any, leaf: Any) -> bool:
    """Whether a leaf is the copy."""
    return path[-1] == "copied"


CHECKED: dict[str, tuple[Callable[[], Any], Any, bool, Any, bool]] = {
    "copies": (lambda: optimizer_of(a=(1, 10), b=(2, 11)), JOINT, False, None, True),
    "stages": (stages, JOINT, False, None, False),
    "stages joined": (stages, JOINT, True, None, True),
    "stages by leaf": (stages, OF_EACH, False, None, True),
    "parts": (parts, JOINT, False, None, False),
    "parts joined": (parts, JOINT, True, None, True),
    "never averaged": (lambda: optimizer_of(a=(1, 10 + rank())), JOINT, False, None, False),
    "copies counted twice": (experts, JOINT, True, None, False),
    "copies that are said": (experts, JOINT, True, copied, True),
}
"""An optimizer, a rule, whether the processes are joined, what is shared, and whether that is right."""
NORMS = {
    "copies": (norm_of(10, 11), [norm_of(10, 11)] * 2),
    "stages": (norm_of(10, 11), [norm_of(10), norm_of(11)]),
    "stages joined": (norm_of(10, 11), [norm_of(10, 11)] * 2),
    "parts": (norm_of(10, 11), [norm_of(10), norm_of(11)]),
    "parts joined": (norm_of(10, 11), [norm_of(10, 11)] * 2),
    "copies counted twice": (norm_of(2, 20, 21), [norm_of(2, 2, 20, 21)] * 2),
    "copies that are said": (norm_of(2, 20, 21), [norm_of(2, 20, 21)] * 2),
}
"""The norm of one process, and what each of two finds."""


def layout_checked(name: str) -> None:
    """Tell whether the norm is that of one process, and what each process finds, and change nothing."""
    make, rule, joined, shared, ok = CHECKED[name]
    optimizer, joins = make(), {"all_reduce": world() if joined else None, "shared": shared}
    params = optimizer.param_groups[0]["params"]
    before = [(p.detach().clone(), p.grad.clone()) for p in params]
    check = check_layout(optimizer, rule, **joins)
    assert check.ok == ok, check
    if name in NORMS:
        assert check.norm == pytest.approx(NORMS[name][0], rel=1e-6)
        assert check.norms == pytest.approx(NORMS[name][1], rel=1e-6)
    if ok:
        check.raise_if_wrong()
    else:
        with pytest.raises(ValueError, match="NOT"):
            check.raise_if_wrong()
    alike({"text": str(check)}, name)
    assert not optimizer.state
    assert all(torch.equal(p, value) and torch.equal(p.grad, g) for p, (value, g) in zip(params, before, strict=True))
    attach(optimizer, rule, **joins).remove()  # it has no rule yet


# Checkpoints.

SAVED = {
    "autoclip": (uc.autoclip(50, window=6), partial(torch.optim.AdamW, lr=0.01), True),
    "adagc": (uc.adagc(warmup=2, warmup_norm=0.5), partial(torch.optim.SGD, lr=0.1, momentum=0.9), False),
}
"""By the name of a rule: it, an optimizer, and whether the layers are split by FSDP2 on four processes too."""
PART = 4
"""How many steps each number of processes takes."""


def run_of(name: str, ranks: int) -> tuple[Any, Any, Any]:
    """Return a network as so many processes hold it, its optimizer, and the handle of its rule."""
    rule, make, sharded = SAVED[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        if ranks == 2 or sharded:
            fsdp.fully_shard(net, mesh=mesh)
        else:
            parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = make(net.named_parameters())
    return net, optimizer, attach(optimizer, rule)


def train(net: Any, optimizer: Any, steps: range, shares: int) -> None:
    """Take some steps, on a share of each batch."""
    for step in steps:
        optimizer.zero_grad()
        x = drawn((8, 6), seed=step)[0] * (1 + step % 3)
        (net(x.chunk(shares)[rank() if shares > 1 else 0]) ** 2).mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def saved_in_parts(name: str, number: int, folder: str) -> None:
    """Go on from what another number of processes has saved, as if there had always been one."""
    ranks = distributed.get_world_size()
    net, optimizer, handle = run_of(name, ranks)
    state = lambda: {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "clipping": handle,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*uc[.]")
        if number:
            loaded = state()
            dcp.load(loaded, checkpoint_id=Path(folder) / str(number))
            set_model_state_dict(net, loaded["model"])
            set_optimizer_state_dict(net, optimizer, loaded["optimizer"])
        shares = ranks if ranks == 2 or SAVED[name][2] else 1
        train(net, optimizer, range(number * PART, (number + 1) * PART), shares)
        dcp.save(state(), checkpoint_id=Path(folder) / str(number + 1))
    if ranks == 1:
        straight = run_of(name, 1)
        train(straight[0], straight[1], range((number + 1) * PART), 1)
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
        close(list(net.parameters()), list(straight[0].parameters()))
        close(leaves(tuple(handle.state)), leaves(tuple(straight[2].state)))
        forgetful = run_of(name, 1)
        train(forgetful[0], forgetful[1], range(number * PART, (number + 1) * PART), 1)
        with pytest.raises(AssertionError, match="not close"):
            close(leaves(tuple(forgetful[2].state)), leaves(tuple(straight[2].state)))
