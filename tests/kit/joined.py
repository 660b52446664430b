"""Checks that all processes run together: shards, drop-ins, losses, refusals, checkpoints."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import uniclip as uc
from kit.layouts import LAYOUTS, RANKS, RULES, Flat, Net, fully_sharded, loss_of
from kit.processes import alike, attached, flags, flags_of_all, layout, refused  # noqa: F401 - the pool calls some by name
from kit.sharded import (  # noqa: F401 - the pool calls them by name
    known_whole,
    losses_in_row,
    mixed_up,
    odd_locals,
    offloaded,
    one_norm,
    raises,
    ranges,
    rank,
    same,
    skips_as_in_one,
    steps_in_backward,
    two_paths,
    unread,
)
from kit.trees import leaves
from uniclip.integrations.torch import (
    attach,
    check_layout,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)


def world() -> Any:
    """Return the group of all processes."""
    return distributed.group.WORLD


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Return random tensors, equal in all processes."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) for shape in shapes]


def whole(tensors: Any) -> list[torch.Tensor]:
    """Return the full tensors."""
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]


# Distributed tensors.

SHAPES = ((5, 3), (4, 6), (7,), (4, 6), (1, 2), (4, 4), (2, 2))
PLACED = {
    "global": uc.by_global_norm(0.5),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "skip": uc.by_norm(0.5, nonfinite="skip"),
    "mean square": uc.by_block_rms(0.1),
    "relative": uc.Rule(uc.limits.Relative(0.01), scope=uc.scopes.each_leaf),
}


class Shared(uc.Limit):
    """A limit that depends on all norms jointly."""

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        return context.largest(lambda block: block.norms) / 2, state


KEPT = {
    "rows": uc.by_norm(0.3, axis=-1),
    "columns, largest": uc.by_norm(0.3, axis=0, ord=math.inf),
    "units": uc.agc(0.01),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_global_norm(0.5)),
}
"""Rules whose norms are sharded, too, and a chain."""


def laid_out(full: list[torch.Tensor]) -> list[Any]:
    """Lay tensors out on two processes in every way; the last one stays a plain tensor."""
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    # `distribute_tensor` may return a view.
    full = [tensor.clone() for tensor in full]
    return [
        # The rows do not divide evenly.
        distribute_tensor(full[0], one, [Shard(0)]),
        distribute_tensor(full[1], one, [Shard(1)]),
        distribute_tensor(full[2], one, [Replicate()]),
        DTensor.from_local(full[3] * (0.25 if rank() == 0 else 0.75), one, [Partial()]),
        # The last process has no element of it.
        distribute_tensor(full[4], one, [Shard(0)]),
        distribute_tensor(full[5], two, [Replicate(), Shard(0)]),
        full[6],
    ]


def placements(spoilt: float | None) -> None:
    """Check that every rule finds the same in any layout, also in place.

    Reports contain plain tensors.
    """
    full, params = drawn(*SHAPES), [tensor.cos() for tensor in drawn(*SHAPES)]
    if spoilt is not None:
        # This element is in the last process.
        full[0][4, 0] = spoilt
    for title, rule in (PLACED | KEPT).items():
        wanted, report = uc.clip(full, rule, params)
        for in_place in (False, True):
            found = grads = laid_out(full)
            if in_place:
                own_report = uc.clip_(grads, rule, laid_out(params))
            else:
                found, own_report = uc.clip(grads, rule, laid_out(params))
            assert [type(one) for one in found] == [type(one) for one in grads], title
            same(whole(found), wanted, msg=lambda text: f"{title}, {in_place}: {text}")
            assert (flags if title in PLACED else flags_of_all)(own_report) == flags(report), title
            if title in PLACED:
                same(
                    [leaves(own_report.norms), leaves(own_report.factors)],
                    [leaves(report.norms), leaves(report.factors)],
                )
                assert all(type(one) is torch.Tensor for one in leaves(own_report.norms)), title


def other_values() -> None:
    """Check sums of squares that overflow, and parameters sharded unlike gradients."""
    for factor in (1e30, 1e-30):
        full = [tensor * factor for tensor in drawn(*SHAPES)]
        same(uc.global_norm(laid_out(full)), uc.global_norm(full))
    full, params = drawn((5, 3), (4, 6)), drawn((5, 3), (4, 6), seed=1)
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    on = lambda tensors, mesh: [distribute_tensor(t, mesh, [Shard(0)] * mesh.ndim) for t in tensors]
    for rule in (KEPT["units"], PLACED["relative"]):
        wanted = uc.clip(full, rule, params)[0]
        for grads, theirs in (
            (full, on(params, one)),
            (on(full, one), params),
            (on(full, one), on(params, two)),
        ):
            same(whole(uc.clip(grads, rule, theirs)[0]), wanted)
    for rule in (uc.spam(), uc.Rule(Shared(), scope=uc.scopes.unit())):
        with pytest.raises(ValueError, match=r"sharded.*each_leaf"):
            uc.Clipper(rule)(on(full, one))


def odd_parts() -> None:
    """Check norms of sharded integers, 8-bit floats, and partial sums."""
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    whole_numbers = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    floats = whole_numbers.float()
    partial_sum = DTensor.from_local(floats[2 * rank() :][:2], two, [Shard(0), Partial()])
    small = distribute_tensor(floats, one, [Shard(0)]).to(torch.float8_e4m3fn)
    for leaf in (distribute_tensor(whole_numbers, one, [Shard(0)]), partial_sum, small):
        for norm in (uc.norms.L2, uc.norms.RMS):
            rule = uc.Rule(math.inf, norm=norm)
            same(uc.clip([leaf], rule)[1].norms, uc.clip([floats], rule)[1].norms)


def sums_of_examples() -> None:
    """Check sums of clipped gradients of sharded examples, and a state next to sharded leaves."""
    mesh = init_device_mesh("cpu", (2,))
    [full] = drawn((4, 3))
    divided = distribute_tensor(full, mesh, [Shard(0)])
    rule = uc.by_example_norm(0.5)
    same(uc.clip_and_sum([divided], rule)[0][0].full_tensor(), uc.clip_and_sum([full], rule)[0][0])
    beside = uc.masked(uc.zclip(warmup=2), lambda path, leaf: path[0] == "a")
    state = beside.init({"a": None, "b": divided})
    assert all(type(array) is torch.Tensor for array in leaves(state))


def with_grads(full: list[torch.Tensor]) -> list[Any]:
    """Return parameters with gradients, in every layout."""
    params = [nn.Parameter(value) for value in laid_out([torch.ones_like(one) for one in full])]
    for p, grad in zip(params, laid_out(full), strict=True):
        p.grad = grad
    return params


def reductions(run: Callable[[], Any]) -> int:
    """Return the number of collectives of a call."""
    with CommDebugMode() as counted:
        run()
    return int(counted.get_total_counts())


def meshed(shape: tuple[int, ...], *places: Any, rows: bool = True) -> list[Any]:
    """Return matrices, and a vector unless ``rows``, distributed on a mesh."""
    mesh = init_device_mesh("cpu", shape)
    return [
        distribute_tensor(one, mesh, places)
        for one in drawn((5, 3), (4, 6), *([] if rows else [(7,)]))
    ]


def plain(dtype: Any = torch.float32, by: float = 1.0) -> list[Any]:
    """Return plain tensors of this process."""
    return [one.to(dtype) * by for one in drawn((5, 3), (4,))]


SHARDED = lambda rows=True: meshed((2,), Shard(0), rows=rows)
TWICE = lambda: meshed((2, 2), Replicate(), Shard(0))
DECIDES = {"zero", "skip"}
SKIPS = uc.by_norm(0.3, axis=-1, nonfinite="skip")
COUNTED: dict[str, tuple[Callable[[], list[Any]], Any, int, int]] = {
    **{f"a group: {name}": (plain, rule, 2, 1) for name, rule in PLACED.items() if name != "zero"},
    "a group: learns": (plain, uc.autoclip(50, window=4), 2, 1),
    "a group: learns of each leaf": (plain, uc.adagc(), 2, 1),
    "a group: loss": (plain, uc.skip_spikes(), 2, 1),
    "a group: zero, NaN": (partial(plain, by=math.nan), PLACED["zero"], 3, 2),
    "a group: float64": (partial(plain, torch.float64), PLACED["global"], 2, 1),
    "a group: float64 out of range": (
        partial(plain, torch.float64, 1e-200),
        PLACED["global"],
        4,
        3,
    ),
    "a group: float64 zeros": (partial(plain, torch.float64, 0.0), PLACED["global"], 2, 1),
    **{f"FSDP2: {name}": (SHARDED, rule, 1, 1) for name, rule in PLACED.items()},
    "FSDP2: rows": (partial(SHARDED, rows=False), KEPT["rows"], 1, 1),
    "FSDP2: rows of matrices alone": (SHARDED, KEPT["rows"], 0, 0),
    "FSDP2: rows, all skipped": (SHARDED, SKIPS, 1, 1),
    "FSDP2: columns": (SHARDED, uc.by_norm(0.3, axis=0), 1, 1),
    "FSDP2: learns": (SHARDED, uc.autoclip(50, window=4), 1, 1),
    "FSDP2: loss": (SHARDED, uc.skip_spikes(), 1, 1),
    # Replicas reduce by themselves, unless they have to decide alike.
    **{
        f"two dimensions: {name}": (TWICE, rule, *(2 if name in DECIDES else 1,) * 2)
        for name, rule in PLACED.items()
    },
    "two dimensions: learns": (TWICE, uc.autoclip(50, window=4), 2, 2),
    "two dimensions: rejects": (TWICE, uc.skip_spikes(), 2, 2),
    "two meshes and a plain one": (
        lambda: [*meshed((4,), Shard(0)), *TWICE(), *plain()],
        PLACED["global"],
        2,
        2,
    ),
}
"""Gradients, a rule, and the number of collectives of its first step and of later steps."""


def counted(name: str) -> None:
    """Require a step to use the expected number of collectives."""
    made, rule, *most = COUNTED[name]
    grads = made()
    joins: dict[str, Any] = {"all_reduce": world()} if name.startswith("a group") else {}
    step = partial(rule.update, grads, rule.init(grads), grads, loss=1.0, **joins)
    assert [reductions(step), reductions(step)] == most


def compiled(name: str) -> None:
    """Check that a collective step compiles into one graph with the result of the eager step."""
    made, rule, *_ = COUNTED[name]
    grads, joins = made(), {"all_reduce": world()} if name.startswith("a group") else {}
    wanted, report = uc.clip(grads, rule, grads, **joins)
    # An earlier check may have compiled other shapes. PyTorch then makes some sizes symbolic, which
    # 2.14 cannot do with distributed tensors (pytorch#185296). One check has all of them symbolic.
    step = torch.compile(
        lambda *some: uc.clip(list(some), rule, list(some), **joins),
        fullgraph=True,
        backend="aot_eager",
        dynamic=name == "FSDP2: rows",
    )
    found, seen = step(*grads)
    same(whole(found), whole(wanted))
    same(leaves(seen.norms), leaves(report.norms))


DERIVED = {
    "global": uc.by_global_norm(0.5),
    "largest": PLACED["largest"],
    "order 3": PLACED["order 3"],
    "leaf": uc.by_norm(0.5),
    **{name: KEPT[name] for name in ("rows", "units")},
}
"""Rules to differentiate."""


def derived(name: str, group: bool) -> None:
    """Check that second derivatives through a collective clip equal those of one process."""
    rule, shapes = DERIVED[name], ((4, 3), (4, 6), (5, 3))
    mesh, places = init_device_mesh("cpu", (2,)), ([Shard(0)], [Shard(1)], [Replicate()])

    def mine(full: list[torch.Tensor]) -> list[Any]:
        if group:
            return [one.tensor_split(2)[rank()] for one in full]
        return [
            distribute_tensor(one, mesh, place) for one, place in zip(full, places, strict=True)
        ]

    def slopes(part: Callable[[list[torch.Tensor]], list[Any]], **join: Any) -> list[Any]:
        grads, one, two = (part(drawn(*shapes, seed=seed)) for seed in range(3))
        grads = [grad.clone().requires_grad_() for grad in grads]
        clipped = uc.clip(grads, rule, [one.detach() for one in grads], **join)[0]
        first = torch.autograd.grad(added(clipped, one), grads, create_graph=True)
        return [*first, *torch.autograd.grad(added(first, two), grads)]

    def added(some: Any, weights: list[Any]) -> torch.Tensor:
        return sum(
            whole((a * b).sum() for a, b in zip(some, weights, strict=True)), torch.zeros(())
        )

    found, wanted = (
        slopes(mine, all_reduce=world()) if group else slopes(mine),
        slopes(lambda full: full),
    )
    parts = [one for some in (wanted[:3], wanted[3:]) for one in mine([x.detach() for x in some])]
    torch.testing.assert_close(whole(found), whole(parts), rtol=1e-5, atol=1e-6)


def derived_of_addends() -> None:
    """Check that each addend of a partial gradient gets the derivative of the sum."""
    mesh, (full, weights) = init_device_mesh("cpu", (2,)), drawn((4, 3), (4, 3))
    one = full.clone().requires_grad_()
    (uc.clip(one, uc.by_global_norm(0.5))[0] * weights).sum().backward()
    own = (full * (0.25 if rank() == 0 else 0.75)).requires_grad_()
    clipped = uc.clip(DTensor.from_local(own, mesh, [Partial()]), uc.by_global_norm(0.5))[0]
    (clipped.full_tensor() * weights).sum().backward()
    same(own.grad, one.grad)


# Attached optimizers that a library changes.


def attached_before_sharding(name: str) -> None:
    """Check that names survive FSDP2 after `attach`, as in ``accelerator.prepare``, and that the
    model can be converted while the rule is attached, and after it.
    """
    rule = {"label": uc.by_group_norm(LAYER_LIMITS, layer), "state": uc.adagc(warmup=1)}[name]
    nets = [Net() for _ in range(2)]
    handles = []
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        handles.append(attach(optimizer, rule, names=net))
        if net is nets[1]:
            names = {id(p): key for key, p in net.named_parameters()}
            kept = [names[id(p)] for p in optimizer.param_groups[0]["params"]]
            fully_sharded(net, init_device_mesh("cpu", (2,)))
            params = dict(net.named_parameters())
            optimizer.param_groups[0]["params"] = [params[key] for key in kept]
        for step in range(3):
            optimizer.zero_grad()
            shares = range(2) if net is nets[0] else [rank()]
            loss_of(net, step, shares).backward()
            optimizer.step()
            if step == 1:
                net.float()
                net.cpu()
    same(whole(nets[1].parameters()), list(nets[0].parameters()))
    one, other = (handle.numbers() for handle in handles)
    assert one.get("leaves") == other.get("leaves")
    for net, handle in zip(nets, handles, strict=True):
        handle.remove()
        net.double()
        assert all(p.dtype is torch.float64 for p in net.parameters())


def changed_between_steps(*, whole_round: bool) -> None:
    """Check that the steps of a list under FSDP2 notice another backward, or a clip, between them.

    After another backward, all gradients are others, and the next step begins a round.
    """
    net = Net()
    fully_sharded(net, init_device_mesh("cpu", (2,)))
    params = list(net.parameters())
    opts = [torch.optim.SGD(some, lr=0.1) for some in (params[:2], params[2:])]
    handle = attach(opts, uc.by_global_norm(1e-3))
    loss_of(net, 0, [rank()]).backward()
    opts[0].step()
    if whole_round:
        loss_of(net, 1, [rank()]).backward()
        opts[1].step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in params]).full_tensor()
        same([norm], [torch.tensor(1e-3)], rtol=1e-5)
        return
    for p in params[2:]:
        p.grad.mul_(10.0)
    with pytest.raises(RuntimeError, match="have changed since the first step"):
        opts[1].step()
    handle.remove()


LAYER_LIMITS = {"embed": 0.5, "rest": 0.1}


def layer(path: Any, leaf: Any) -> str:
    """Return a label by the name of a parameter."""
    return "embed" if path[1].startswith("embed") else "rest"


def averaged_in_a_hook(name: str) -> None:
    """Check that a hook that averages gradients over the processes comes before the rule, also
    under a rule that skips, so that all have one norm.
    """
    rule = {"constant": uc.by_global_norm(1.0), "skip": uc.by_global_norm(1.0, nonfinite="skip")}
    w = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def average(*_: object) -> None:
        distributed.all_reduce(w.grad)
        w.grad.div_(distributed.get_world_size())

    optimizer.register_step_pre_hook(average)
    handle = attach(optimizer, rule[name])
    for bad in (None, 1, None):
        w.grad = torch.tensor([6.0 * rank(), 8.0 * rank()])
        if rank() == bad:
            w.grad[0] = math.nan
        optimizer.step()
        if bad is None:
            same(handle.report.norms, torch.tensor(5.0))
        else:
            assert bool(handle.report.skipped) == (name == "skip")
            w.data.nan_to_num_()
    alike({"w": w.tolist()}, "the parameter")


# Drop-ins.


def drop_ins() -> None:
    """Check that our versions of torch.nn.utils clip every mixture of layouts.

    They do as PyTorch's own where these support the layout.
    """
    full = drawn(*SHAPES)
    for order in (2.0, "inf", 1.0):
        params, (wanted, norm) = (
            with_grads(full),
            uc.clip_by_global_norm(full, 0.5, ord=float(order)),
        )
        found = clip_grad_norm_(params, 0.5, norm_type=order)
        assert type(found) is torch.Tensor
        same([found, *whole(p.grad for p in params)], [norm, *wanted])
    params = with_grads(full)
    same(get_total_norm([p.grad for p in params]), uc.global_norm(full))
    clip_grads_with_norm_(params, 0.5, uc.global_norm(full))
    same(whole(p.grad for p in params), uc.clip_by_global_norm(full, 0.5)[0])
    params = with_grads(full)
    clip_grad_value_(params, 0.3)
    same(whole(p.grad for p in params), uc.clip_by_value(full, -0.3, 0.3))
    ours, theirs = with_grads(full)[:2], with_grads(full)[:2]
    norms = clip_grad_norm_(ours, 0.5), nn.utils.clip_grad_norm_(theirs, 0.5)
    same(
        *(
            whole([norm, *(p.grad for p in some)])
            for norm, some in zip(norms, (ours, theirs), strict=True)
        )
    )


def drop_in_without_a_gradient() -> None:
    """Check that a process without a gradient of a distributed parameter joins in.

    Its gradient stays ``None``.
    """
    params = with_grads(drawn((4, 3), (4, 6), *SHAPES[2:]))[:2]
    before = [p.grad.to_local().clone() for p in params]
    norm = uc.global_norm(before)
    distributed.broadcast(norm, 0)
    for p in params:
        p.grad = None if rank() else p.grad
    assert reductions(lambda: same(clip_grad_norm_(params, 0.5), norm)) == 1
    assert all((p.grad is None) == (rank() == 1) for p in params)
    if rank() == 0:
        same([p.grad.to_local() for p in params], [grad * 0.5 / norm for grad in before])


def drop_in_of_parts() -> None:
    """Check that plain tensors act as shards with all_reduce=; shared= counts replicas once.

    A NaN in one process raises in all.
    """
    full, params = (
        drawn((6, 4), (3,)),
        [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))],
    )
    wanted, norm = uc.clip_by_global_norm(full, 0.5)
    joins = {"all_reduce": world(), "shared": lambda path, leaf: path[-1] == 1}
    for use in (clip_grad_norm_, get_total_norm):
        params[0].grad, params[1].grad = full[0].chunk(2)[rank()].clone(), full[1].clone()
        if use is clip_grad_norm_:
            same(clip_grad_norm_(params, 0.5, **joins), norm)
        else:
            total = get_total_norm([p.grad for p in params], **joins)
            same(total, norm)
            clip_grads_with_norm_(params, 0.5, total)
        same([p.grad for p in params], [wanted[0].chunk(2)[rank()], wanted[1]])
    params[0].grad[0, 0] = math.nan if rank() else 1.0
    with pytest.raises(RuntimeError, match=r"NaN|finite"):
        clip_grad_norm_(params, 0.5, error_if_nonfinite=True, **joins)


# Steps that all agree on.


def one_has_nothing(names: list[str]) -> None:
    """Check a process without gradients: they are ``None``, or there are no leaves."""
    full, params = (
        dict(zip(("norm", "up"), drawn((3, 4), (5, 4), seed=seed), strict=True)) for seed in (0, 1)
    )
    for name in names:
        rule = RULES[name].rule
        wanted, _, report = rule.update(full, rule.init(full), params)
        for empty in ((dict.fromkeys(full), params), ({}, {})):
            grads, here = (full, params) if rank() == 0 else empty
            clipped, _, own_report = rule.update(grads, rule.init(here), here, world())
            same(
                clipped,
                wanted if rank() == 0 else empty[0],
                msg=lambda text, name=name: f"{name}: {text}",
            )
            same(leaves(own_report.norms), leaves(report.norms))
            assert flags(own_report) == flags(report), name


LEARNS = {
    "autoclip": uc.autoclip(50, window=8),
    "all norms": uc.autoclip(50, window=None),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(warmup=3),
    "skip_spikes": uc.skip_spikes(window=8, warmup=3),
    "groups": uc.Rule(
        uc.limits.Ema(1.5, 0.9), scope=uc.scopes.Scope(label=lambda path, leaf: path[-1] < 1)
    ),
}


def remembered(name: str, divided: bool) -> None:
    """Check that all processes keep the same state, bit for bit.

    The thirty steps contain a spike, a NaN, and steps without gradients in one process.
    """
    rule, mesh = LEARNS[name], init_device_mesh("cpu", (RANKS,))
    params = drawn((RANKS, 3), (2 * RANKS,))
    here = [distribute_tensor(one, mesh, [Shard(0)]) for one in params] if divided else params
    joins: dict[str, Any] = {} if divided else {"all_reduce": world()}
    state, alone = rule.init(here), rule.init(params)
    for step in range(30):
        full = [
            one * (9 if step == 20 else 1) for one in drawn((RANKS, 3), (2 * RANKS,), seed=step)
        ]
        if step == 10:
            full[0][-1, 0] = math.nan
        # One process has no gradients.
        if step % 7 == 3:
            for one in full:
                one.chunk(RANKS)[1].zero_()
        loss = float(full[1].abs().sum())
        mine = [one.chunk(RANKS)[rank()] for one in full]
        grads = (
            [distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None) for one in full]
            if divided
            else mine
        )
        if step % 7 == 3 and rank() == 1:
            grads = [None, None]
        _, state, report = rule.update(grads, state, here, loss=loss, **joins)
        _, alone, its = rule.update(full, alone, params, loss=loss)
        assert flags(report) == flags(its), step
        same(leaves(state), leaves(alone))
        alike(
            {number: one.numpy().tobytes() for number, one in enumerate(leaves(state))},
            f"step {step}",
        )


def losses() -> None:
    """Check that an attached rule gets the mean of the losses that processes have.

    In the last step, three processes have no gradients.
    """
    weight, skipped = nn.Parameter(torch.ones(3)), []
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle = attach(optimizer, uc.skip_spikes(z=2.0, window=8, warmup=3))
    for mean in (1.0, 1.1, 0.9, 1.0, 50.0, 1.0, math.nan, 0.9):
        weight.grad, handle.loss = torch.ones(3), [mean - 0.1, mean, mean + 0.1, None][rank()]
        optimizer.step()
        skipped.append(bool(handle.report.skipped))
    assert skipped == [False] * 4 + [True, False, True, False]
    weight.grad, handle.loss = None if rank() else torch.ones(3), 1.0
    # No process waits for a loss.
    optimizer.step()


# Refusals: an error in one process is an error in all.


def fsdp1(*, alone: bool) -> None:
    """Check that FSDP1's parameters are refused without all_reduce=, except by value.

    They look unsharded. One process may have them.
    """
    for original in (False, True):
        laid = Flat(use_orig_params=original)
        laid.backward(0)
        params = list(laid.net.parameters())
        optimizer = torch.optim.SGD(params, lr=1.0)
        uses: list[Callable[[], Any]] = [
            lambda o=optimizer: attach(o, uc.by_global_norm(1.0)).remove(),
            lambda p=params: get_total_norm(p),
            lambda p=params: clip_grad_norm_(p, 1.0),
        ]
        for use in uses:
            with nullcontext() if alone else pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
                use()
        attach(optimizer, uc.by_value(-0.1, 0.1)).remove()


JOINT, OF_EACH = uc.by_global_norm(0.5), uc.by_norm(0.5)


def stepped(rule: Any, *names: str) -> None:
    """Take a step with an attached rule that spans the processes."""
    optimizer = optimizer_of(dict.fromkeys(names, (0, 1)))
    attach(optimizer, rule, all_reduce=world())
    optimizer.step()


REFUSALS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "another limit": (lambda wrong: stepped(uc.by_global_norm(0.5 + wrong), "a"), "rule"),
    "another limit beside no gradient": (
        lambda wrong: uc.clip(
            [None if wrong else torch.ones(3)],
            uc.by_global_norm(0.5 + wrong),
            [torch.ones(3)],
            world(),
        ),
        "rule",
    ),
    "other leaves": (
        lambda wrong: stepped(OF_EACH, "a", "c" if wrong else "b"),
        "rules, leaves, or groups",
    ),
}


def refusal(name: str) -> None:
    """Check that a mistake in one process raises in both, and that neither waits."""
    run, token = REFUSALS[name]
    with pytest.raises((ValueError, RuntimeError), match=token):
        run(rank() == 1)


# check_layout.

Leaves = dict[str, tuple[int, int]]
"""The seeds of values and gradients, by the names of leaves."""


def optimizer_of(seeds: Leaves) -> Any:
    """Return an optimizer with these leaves."""
    named = [
        (name, nn.Parameter(drawn((3, 2), seed=value)[0])) for name, (value, _) in seeds.items()
    ]
    for (_, p), (_, seed) in zip(named, seeds.values(), strict=True):
        p.grad = drawn((3, 2), seed=seed)[0]
    return torch.optim.SGD(named, lr=0.1)


def norm_of(*seeds: int | tuple[int, ...]) -> float:
    """Return the joint norm of gradients; a tuple of seeds stands for the mean of its gradients."""
    groups = [one if isinstance(one, tuple) else (one,) for one in seeds]
    means = [sum(drawn((3, 2), seed=seed)[0].double() for seed in one) / len(one) for one in groups]
    return torch.cat(means).norm().item()


COPIES: tuple[Leaves, Leaves] = ({"a": (1, 10), "b": (2, 11)},) * 2
STAGES: tuple[Leaves, Leaves] = ({"layer0": (0, 10)}, {"layer1": (1, 11)})
PARTS: tuple[Leaves, Leaves] = ({"a": (0, 10)}, {"a": (1, 11)})
EXPERTS: tuple[Leaves, Leaves] = (
    {"copied": (1, 2), "one": (10, 20)},
    {"copied": (1, 2), "two": (11, 21)},
)
COPIED = lambda path, leaf: path[-1] == "copied"
CHECKED: dict[str, tuple[Any, Any, dict[str, Any], tuple[Any, ...], Any]] = {
    "copies": (COPIES, JOINT, {}, (10, 11), [(10, 11), (10, 11)]),
    "stages": (STAGES, JOINT, {}, (10, 11), [(10,), (11,)]),
    "stages joined": (STAGES, JOINT, {"joined": True}, (10, 11), [(10, 11), (10, 11)]),
    "stages by leaf": (STAGES, OF_EACH, {}, (), None),
    "parts": (PARTS, JOINT, {}, (10, 11), [(10,), (11,)]),
    "parts joined": (PARTS, JOINT, {"joined": True}, (10, 11), [(10, 11), (10, 11)]),
    "never averaged": (({"a": (1, 10)}, {"a": (1, 11)}), JOINT, {}, ((10, 11),), [(10,), (11,)]),
    "copies counted twice": (EXPERTS, JOINT, {"joined": True}, (2, 20, 21), [(2, 2, 20, 21)] * 2),
    "copies that are said": (
        EXPERTS,
        JOINT,
        {"joined": True, "shared": COPIED},
        (2, 20, 21),
        [(2, 20, 21)] * 2,
    ),
}
"""The leaves of two processes, a rule, and how the processes are joined; then the seeds of the
gradients in the norm of one process, and in that of each.
"""


def layout_checked(name: str) -> None:
    """Check that `check_layout` reports whether the norm is that of one process, and all norms.

    It changes nothing.
    """
    layouts, rule, joined, seeds, found = CHECKED[name]
    optimizer = optimizer_of(layouts[rank()])
    joins = {"all_reduce": world() if "joined" in joined else None, "shared": joined.get("shared")}
    params = optimizer.param_groups[0]["params"]
    before = [(p.detach().clone(), p.grad.clone()) for p in params]
    check = check_layout(optimizer, rule, **joins)
    if seeds:
        assert check.norm == pytest.approx(norm_of(*seeds), rel=1e-6)
        assert check.norms == pytest.approx([norm_of(*theirs) for theirs in found], rel=1e-6)
        assert check.shares == pytest.approx(
            [norm_of(*(seed for _, seed in one.values())) for one in layouts], rel=1e-6
        )
    assert check.ok == (found is None or found == [seeds] * 2), check
    with (
        nullcontext()
        if check.ok
        else pytest.raises(ValueError, match=r"NOT(.|\n)*off by(.|\n)*all_reduce=")
    ):
        check.raise_if_wrong()
    alike({"text": str(check)}, name)
    assert not optimizer.state
    assert all(
        torch.equal(p, value) and torch.equal(p.grad, g)
        for p, (value, g) in zip(params, before, strict=True)
    )
    # The optimizer has no rule yet.
    attach(optimizer, rule, **joins).remove()


def layout_of_a_run(name: str) -> None:
    """Check that a correct layout is reported as such, with the norm of one process.

    Without all_reduce= it is reported as wrong.
    """
    laid = LAYOUTS[name]()
    laid.backward(0)
    optimizer = laid.optimizer(laid.trained(), lr=0.1)
    for rule in {"global", "leaf", "groups", "agc"} - laid.refused.keys():
        check_layout(optimizer, RULES[rule].rule, **laid.joins()).raise_if_wrong()
    whole = Net(laid.experts)
    loss_of(whole, 0).backward()
    norm = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm().item()
    alone = check_layout(optimizer, JOINT)
    assert alone.norm == pytest.approx(norm, rel=1e-5)
    assert alone.ok == (laid.all_reduce is None), alone


def layout_refused() -> None:
    """Check reports of a refusal in one process, of norms along axes, and without gradients."""
    optimizer = optimizer_of(PARTS[rank()])
    (p,) = optimizer.param_groups[0]["params"]
    (problem,) = check_layout(optimizer, uc.agc(0.1)).problems
    assert "norms along axes of grads[0]['a'] cannot be checked" in problem
    # The shards of FSDP1 are vectors.
    p.data, p.grad = p.detach().flatten(), None
    p.grad = torch.ones_like(p)
    p._fsdp_flattened = rank() == 1
    check = check_layout(optimizer, JOINT)
    assert len(check.problems) == 1, check
    assert re.match(r"process 1: ValueError: .*FSDP1.*fully_shard", check.problems[0]), check
    assert check.norms == (None, None)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="no process has a gradient"):
        check_layout(optimizer, uc.by_value(-1.0, 1.0))


# Checkpoints.

SAVED = {"autoclip": uc.autoclip(50, window=6), "adagc": uc.adagc(warmup=2, warmup_norm=0.5)}
PART = 4
"""The number of steps that each group of processes takes."""


def trained(
    name: str, steps: range, ranks: int, load: Any = None
) -> tuple[Any, Any, Callable[[], Any]]:
    """Train from a checkpoint, each process on a share of the batch.

    Return the network, the handle, and a function that returns the state for a checkpoint.
    """
    net = Net()
    if ranks > 1:
        fully_sharded(net, init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    handle = attach(optimizer, SAVED[name])
    state = lambda: (
        dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
        | {"clipping": handle}
    )
    if load is not None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=load)
        set_state_dict(
            net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step, range(RANKS)[rank() % ranks :: ranks]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net, handle, state


def saved_in_parts(name: str, number: int, folder: str) -> None:
    """Check that a run resumed with another number of processes gives the result of one process."""
    ranks, steps = distributed.get_world_size(), range(number * PART, (number + 1) * PART)
    load = Path(folder) / str(number) if number else None
    net, handle, state = trained(name, steps, ranks, load)
    dcp.save(state(), checkpoint_id=Path(folder) / str(number + 1))
    if ranks == 1:
        straight, its, _ = trained(name, range(steps.stop), 1)
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
        close(list(net.parameters()), list(straight.parameters()))
        close(leaves(tuple(handle.state)), leaves(tuple(its.state)))
        _, forgetful, _ = trained(name, steps, 1)
        with pytest.raises(AssertionError, match="not close"):
            close(leaves(tuple(forgetful.state)), leaves(tuple(its.state)))


def example(path: str) -> None:
    """Run an example in these processes with fewer steps, in their existing group."""
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    module.STEPS = 5  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(distributed, name, lambda *_: None)
        module.main()
