"""What processes have to agree on: norms where one has no gradients, NaN, losses; each result must be that of one.

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
from torch import distributed

import uniclip as uc
from uniclip.integrations.torch import attach, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

PROCESSES = 4
CHECKS: dict[str, Callable[[], None]] = {}
ALONE: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in every process."""
    CHECKS[function.__name__] = function
    return function


def alone(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function run in a process that is the only one of its run."""
    ALONE[function.__name__] = function
    return function


def rank() -> int:
    """Return the number of this process."""
    return distributed.get_rank()


def all_reduce(array: torch.Tensor, op: str) -> torch.Tensor:
    """Join arrays as the documentation says; other processes must have the same number of bytes in the same order."""
    array = array.contiguous()
    distributed.all_reduce(array, getattr(distributed.ReduceOp, op.upper()))
    return array


def same(found: Any, wanted: Any) -> None:
    """Compare the arrays of trees."""
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(wanted), equal_nan=True)


def shown(report: uc.Report) -> Any:
    """Return what does not depend on how leaves are cut into parts."""
    return report.norms, report.finite, report.skipped


def full(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the same gradients in every process."""
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=dtype)
        for n, shape in enumerate([(3, 8), (5, 8), (2, 12)])
    ]


def part(leaf: torch.Tensor, number: int | None = None) -> torch.Tensor:
    """Return the columns that a process holds."""
    return leaf.chunk(PROCESSES, 1)[rank() if number is None else number].clone()


ONE_NORM: dict[str, Any] = {
    "global": uc.by_global_norm(0.5),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(0.5, ord=3),
    "order 1": uc.by_global_norm(0.5, ord=1),
    "zero": uc.by_global_norm(0.5, nonfinite="zero"),
    "skip": uc.by_global_norm(0.5, nonfinite="skip"),
    "mean square": uc.Rule(0.1, norm=uc.norms.RMS),
    "relative": uc.Rule(uc.limits.Relative(0.01)),
    "chain": uc.chain(uc.by_value(-0.3, 0.3), uc.by_global_norm(0.5)),
    "masked": uc.masked(uc.by_global_norm(0.5), lambda path, leaf: path[0] != 1),
    "learns": uc.autoclip(50, window=4),
    "skips": uc.skip_spikes(window=4, warmup=2),
}


def nan_somewhere(name: str) -> None:
    """Assert that all processes know of the NaN of one of them, whose library drops NaN from a maximum."""
    for bad in range(PROCESSES):
        grads = full()
        grads[2][0, 3 * bad] = math.nan
        state = (rule := ONE_NORM[name]).init(grads)
        wanted, _, report = rule.update(grads, state, full())
        clipped, _, seen = rule.update([part(g) for g in grads], state, [part(g) for g in full()], all_reduce)
        same(shown(seen), shown(report))
        same(clipped, [part(g) for g in wanted])


def nothing_here(name: str) -> None:
    """Assert that processes without gradients take part, whatever the range and the dtype, by any way to say so."""
    rule, holders = ONE_NORM[name], (0, 2)
    for dtype, by in ((torch.float32, 1.0), (torch.float64, 1.0), (torch.float32, 1e30)):
        one, params = [g * by for g in full(dtype)], full(dtype)
        held, its = ([torch.cat([part(g, n) for n in holders], 1) for g in tree] for tree in (one, params))
        wanted, _, report = rule.update(held, rule.init(held), its)
        here = [part(g) for g in params]
        for empty in ([None] * 3, []):
            mine = [part(g) for g in one] if rank() in holders else empty
            for in_place in (False, True):
                given = [g if g is None else g.clone() for g in mine]
                clipped, _, seen = rule.update(given, rule.init(here), here, all_reduce, in_place=in_place)
                same(shown(seen), shown(report))
                if rank() not in holders:
                    assert clipped == empty
                else:
                    same(clipped, [g.chunk(2, 1)[holders.index(rank())] for g in wanted])


for name in ONE_NORM:
    CHECKS[f"NaN, {name}"] = lambda name=name: nan_somewhere(name)
    CHECKS[f"no gradients, {name}"] = lambda name=name: nothing_here(name)


EACH: dict[str, Any] = {
    "leaf": uc.by_norm(0.5),
    "unit": uc.agc(0.01),
    "rows": uc.by_norm(0.3, axis=-1),
    "groups": uc.by_group_norm({0: 0.5, 1: 1.0}, lambda path, leaf: path[0] % 2),
    "mean square": uc.by_block_rms(0.1, nonfinite="zero"),
    "learns": uc.adagc(warmup=1),
    "masked": uc.masked(uc.by_norm(0.3), lambda path, leaf: path[0] != 1),
}


def gaps(name: str) -> None:
    """Assert that norms of leaves are those of the same leaf in all processes, whichever of them has it."""
    rule, missing = EACH[name], {(2, 0), (1, 1), (3, 1), (0, 2)}  # process and leaf
    one, params = full(), full()
    for process, leaf in missing:
        one[leaf].chunk(PROCESSES, 1)[process].zero_()
    counted = one
    if name == "mean square":  # entries that are absent count for nothing
        counted = [
            torch.cat([part(g, n) for n in range(PROCESSES) if (n, leaf) not in missing], 1)
            for leaf, g in enumerate(one)
        ]
    state = rule.init(counted)
    mine = [None if (rank(), leaf) in missing else part(g) for leaf, g in enumerate(one)]
    here = [part(g) for g in params]
    its = rule.init(here)
    for _ in range(3):
        wanted, state, report = rule.update(counted, state, params if counted is one else counted)
        clipped, its, seen = rule.update(mine, its, here, all_reduce)
        same((shown(seen), its), (shown(report), state))
        assert [g is None for g in clipped] == [g is None for g in mine]
        if counted is one:
            same(clipped, [None if g is None else part(w) for g, w in zip(mine, wanted, strict=True)])


for name in EACH:
    CHECKS[f"gaps, {name}"] = lambda name=name: gaps(name)


@check
def a_clipper_without_gradients() -> None:
    """Learn in every process what a Clipper would in one, if it gets the parameters."""
    for rule in (uc.autoclip(50, window=4), uc.adagc(warmup=1)):
        one, mine = uc.Clipper(rule), uc.Clipper(rule)
        for step in range(3):
            grads = [g * (step + 1) for g in full()]
            held = [torch.cat([part(g, n) for n in range(PROCESSES - 1)], 1) for g in grads]
            one(held)
            mine([None if rank() == PROCESSES - 1 else part(g) for g in grads], [part(g) for g in full()], all_reduce)
            same((mine.state, mine.report.norms), (one.state, one.report.norms))


@check
def without_parameters() -> None:
    """Without parameters: right where dtype and shape are known all the same, else an error in every process."""
    grads = full()
    mine = [None if leaf == rank() else part(g) for leaf, g in enumerate(grads)]
    for leaf in range(3):
        grads[leaf].chunk(PROCESSES, 1)[leaf].zero_()
    same(uc.clip(mine, uc.by_norm(0.5), None, all_reduce)[1].norms, uc.clip(grads, uc.by_norm(0.5))[1].norms)
    rule = uc.autoclip(50, window=4)
    held = None if rank() else grads
    state = rule.init(grads)
    same(rule.update([held], state, None, all_reduce)[2].norms, rule.update(grads, state)[2].norms)
    absent = [None, None]
    for rule in (
        uc.by_norm(0.3, axis=-1),
        uc.by_global_norm(0.5),
        uc.by_group_norm({0: 1.0, 1: 1.0}, lambda path, leaf: path[0]),
    ):
        for empty in (absent, [], [part(grads[0]), None]):
            if rule.scope != uc.scopes.all_leaves or empty in (absent, []):
                with pytest.raises(ValueError, match="pass params="):
                    uc.clip(empty, rule, None, all_reduce)
    with pytest.raises(ValueError, match="pass params="):
        uc.clip(absent, uc.masked(uc.by_norm(0.5), lambda path, leaf: True), None, all_reduce)
    with pytest.raises(ValueError, match="pass params="):
        uc.Clipper(uc.autoclip(50))([], None, all_reduce)


SPIKES = uc.skip_spikes(z=2.0, window=8, warmup=3)
LOSSES = [1.0, 1.1, 0.9, 1.0, 1.1, 50.0, 1.0, math.nan, 1.1, 0.9]
"""The mean losses of ten steps; in each process they are others."""


def own(mean: float) -> float | None:
    """Return the loss of this process; the last one has none."""
    if math.isnan(mean):
        return math.nan if rank() == 1 else 1.0
    return None if rank() == PROCESSES - 1 else mean + 0.1 * (rank() - 1)


def stepped(losses: list[Any], grads: Callable[[int], list[Any]]) -> tuple[list[Any], list[bool]]:
    """Return weights after some steps, and which were left out, without attach and in this process alone."""
    weights = [torch.nn.Parameter(g) for g in full()]
    optimizer, clipper, skipped = torch.optim.SGD(weights, lr=0.1, momentum=0.9), uc.Clipper(SPIKES), []
    for step, loss in enumerate(losses):
        for weight, grad in zip(weights, clipper(grads(step), loss=loss), strict=True):
            weight.grad = grad
        skipped.append(bool(clipper.report.skipped))
        if not skipped[-1]:
            optimizer.step()
    return [w.detach() for w in weights], skipped


def attached(weights: list[Any], losses: list[Any], grads: Callable[[int], list[Any]]) -> tuple[list[Any], list[bool]]:
    """Return weights after some steps with an attached rule, and which were left out."""
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    handle, skipped = attach(optimizer, SPIKES), []
    for step, loss in enumerate(losses):
        for weight, grad in zip(weights, grads(step), strict=True):
            weight.grad = grad
        handle.loss = loss
        optimizer.step()
        skipped.append(bool(handle.report.skipped))
    return [w.detach() for w in weights], skipped


def copies(step: int) -> list[torch.Tensor]:
    """Return the gradients that every process has whole."""
    return [g * (1 + 0.1 * (step % 3)) for g in full()]


def weights_of(tensors: list[Any]) -> list[Any]:
    """Return parameters."""
    return [torch.nn.Parameter(tensor) for tensor in tensors]


@check
def losses_of_copies() -> None:
    """With data parallelism no process sees another one's loss: attach takes the mean, and all skip the same steps."""
    wanted, skipped = stepped(LOSSES, copies)
    assert skipped == [False] * 5 + [True, False, True, False, False]
    for losses in (
        [own(loss) for loss in LOSSES],
        LOSSES,
        [torch.tensor(loss, dtype=torch.float64) for loss in LOSSES],
    ):
        found, left_out = attached(weights_of(full()), losses, copies)
        assert left_out == skipped
        same(found, wanted)
    wanted, skipped = stepped([None] * 10, copies)
    same(attached(weights_of(full()), [None] * 10, copies), (wanted, skipped))


@check
def losses_of_a_limit_of_ones_own() -> None:
    """Join losses too for a limit of one's own that looks at them."""

    class Loss(uc.Limit):
        needs = frozenset({"loss"})

        def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
            return context.loss, state

    weight = torch.nn.Parameter(torch.ones(2))
    handle = attach(torch.optim.SGD([weight], lr=1.0), uc.Rule(Loss()))
    weight.grad, handle.loss = torch.full((2,), 99.0), float(rank())
    handle._optimizer.step()
    same(handle.report.limits, torch.tensor((PROCESSES - 1) / 2))


@check
def losses_and_no_gradients() -> None:
    """Join the loss of a process whose parameters have no gradients, so that nobody waits."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, uc.chain(uc.by_value(-9.0, 9.0), SPIKES))
    weight.grad, handle.loss = torch.ones(2) if rank() else None, 1.0
    optimizer.step()
    same(weight.detach(), torch.zeros(2) if rank() else torch.ones(2))


@check
def losses_that_no_rule_looks_at() -> None:
    """Join no loss for a rule that looks at none: a process without gradients does nothing at all."""
    from torch.distributed.tensor.debug import CommDebugMode

    weight = torch.nn.Parameter(torch.ones(2))
    handle = attach(torch.optim.SGD([weight], lr=1.0), uc.by_global_norm(1.0))
    weight.grad, handle.loss = torch.ones(2) if rank() else None, 1.0
    with CommDebugMode() as counted:
        handle._optimizer.step()
    assert counted.get_total_counts() == 0


@check
def losses_that_are_no_number() -> None:
    """Refuse them as in one process, before any is joined."""
    weight = torch.nn.Parameter(torch.ones(2))
    handle = attach(torch.optim.SGD([weight], lr=1.0), SPIKES)
    weight.grad, handle.loss = torch.ones(2), torch.ones(3)
    with pytest.raises(TypeError, match="loss must be one number"):
        handle._optimizer.step()


@check
def losses_of_parts() -> None:
    """Where norms are joined, so are losses: by all_reduce, and among the processes of distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    one, mine, spread, also = (uc.Clipper(SPIKES) for _ in range(4))
    mesh = init_device_mesh("cpu", (PROCESSES,))

    def laid_out(tensors: list[torch.Tensor]) -> list[Any]:
        return [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in tensors]

    skipped = []
    for step, loss in enumerate(LOSSES):
        one(copies(step), loss=loss)
        mine([part(g) for g in copies(step)], None, all_reduce, loss=own(loss))
        spread(laid_out(copies(step)), loss=own(loss))
        also(laid_out(copies(step)))
        for clipper in (mine, spread):
            same((clipper.report, clipper.state), (one.report, one.state))
        skipped.append(bool(one.report.skipped))
    assert sum(skipped) == 2
    assert not also.report.skipped
    weights = weights_of(laid_out(full()))
    found, left_out = attached(weights, [own(loss) for loss in LOSSES], lambda step: laid_out(copies(step)))
    assert left_out == skipped
    same([w.full_tensor() for w in found], stepped(LOSSES, copies)[0])


def flat(use_orig_params: bool) -> Any:
    """Return a small model in FSDP1, with gradients."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        net = FullyShardedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 3)),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        (net(torch.ones(4, 5)) ** 2).sum().backward()
    return net


@check
def fsdp1_is_refused() -> None:
    """Refuse FSDP1's parameters, which look whole and are parts, but for what is done entry by entry."""
    for use_orig_params in (False, True):
        net = flat(use_orig_params)
        params = list(net.parameters())
        optimizer = torch.optim.SGD(params, lr=1.0)
        for use in (
            lambda o=optimizer: attach(o, uc.by_global_norm(1.0)),
            lambda o=optimizer: attach(o, lambda grad: grad / grad.norm()),
            lambda p=params: clip_grad_norm_(p, 1.0),
            lambda p=params: clip_grads_with_norm_(p, 1.0, 2.0),
            lambda p=params: get_total_norm(p),
        ):
            with pytest.raises(ValueError, match=r"FSDP1.*fully_shard.*clip_grad_norm_"):
                use()
        before = [None if p.grad is None else p.grad.clone() for p in params]
        clip_grad_value_(params, 0.1)
        same([p.grad for p in params], [None if g is None else g.clamp(-0.1, 0.1) for g in before])
        attach(optimizer, uc.by_value(-0.1, 0.1)).remove()


@alone
def fsdp1_in_one_process() -> None:
    """In one process nothing is in parts."""
    for use_orig_params in (False, True):
        net, theirs = flat(use_orig_params), flat(use_orig_params)
        torch.testing.assert_close(clip_grad_norm_(net.parameters(), 1.0), theirs.clip_grad_norm_(1.0))
        same([p.grad for p in net.parameters()], [p.grad for p in theirs.parameters()])
        attach(torch.optim.SGD(net.parameters(), lr=1.0), uc.by_global_norm(1.0)).remove()


@alone
def losses_in_one_process() -> None:
    """In one process a loss is what it is."""
    same(attached(weights_of(full()), LOSSES, copies), stepped(LOSSES, copies))


def main(number: str, processes: str, file: str) -> None:
    """Run every check as one of the processes, and write what went wrong."""
    run_in_group(ALONE if processes == "1" else CHECKS, number, int(processes), file)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    calls = [[str(number), str(PROCESSES)] for number in range(PROCESSES)]
    return failures_in(tmp_path_factory, __file__, [*calls, ["0", "1"]])


@pytest.mark.parametrize("title", [*CHECKS, *ALONE])
def test_as_in_one_process(failures: list[dict[str, str]], title: str) -> None:
    """Every process finds what one process would."""
    found = [one[title] for one in failures if title in one]
    assert not found, found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
