"""Checks of whole layouts that several processes run together; tests call them by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import uniclip as uc
from kit.layouts import LAYOUTS, RULES, Kind, Net, OneProcess, local, loss_of, part
from kit.trees import walk
from uniclip.integrations.torch import attach

LOSSES = (1.0, 1.1, 0.9, 1.0, 9.0)
STEPS = ((1.0, None), (1.2, math.nan), (0.9, "none"), (0.8, math.inf), (6.0, None))
"""The factor of the gradients of each step, and the fault in one process. The last is a spike."""
CLOSE = 1e-6


def close(found: Any, wanted: Any, what: str, whole: Any = None) -> None:
    """Require two tensors to agree to 1e-6 of the largest element, here or in the full tensor."""
    size = (wanted if whole is None else whole).nan_to_num(0, 0, 0).abs().max().item()
    same = torch.allclose(found, wanted, rtol=0, atol=CLOSE * size, equal_nan=True)
    assert found.shape == wanted.shape, what
    assert same, f"{what}: off by {(found - wanted).abs().max().item()}, not {CLOSE * size}"


def alike(own: Any, what: str) -> None:
    """Require values of this process to equal those of the others, for the keys that both have."""
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    for values in gathered:
        others = [key for key in own.keys() & values.keys() if own[key] != values[key]]
        assert not others, f"{what}: another process has others: {others}"


def flags(report: Any) -> list[bool | None]:
    """Return the flags of a report: finite and skipped."""
    return [None if one is None else bool(one) for one in (report.finite, report.skipped)]


def flags_of_all(report: Any) -> list[bool | None]:
    """Return the flags of a report where each process has its own norms.

    A step is finite if it is finite in all processes.
    """
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, flags(report))
    assert len({skipped for _, skipped in gathered}) == 1
    return [all(finite for finite, _ in gathered), gathered[0][1]]


def stepped(
    rule: Any, steps: list[Any], params: Any, loss: bool, **joins: Any
) -> list[tuple[Any, Any]]:
    """Return the gradients and the report of each step."""
    state, found = rule.init(params), []
    for grads, said in zip(steps, LOSSES, strict=True):
        clipped, state, report = rule.update(
            grads, state, params, loss=said if loss else None, **joins
        )
        found.append((clipped, report))
    return found


class Still(torch.optim.SGD):
    """An optimizer that never changes the weights, not even to NaN."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change nothing."""


def stepped_by_optimizer(laid: OneProcess, kind: Kind, steps: list[Any]) -> list[tuple[Any, Any]]:
    """Return the gradients and the report of each step of an attached rule."""
    named, found = laid.named(), []
    optimizer = Still(laid.trained())
    handle = attach(optimizer, kind.rule, **laid.joins())
    for grads, said in zip(steps, LOSSES, strict=True):
        for key, p in named.items():
            p.grad = None if grads[key] is None else grads[key].clone()
        handle.loss = said if kind.loss else None
        optimizer.step()
        found.append(({key: p.grad for key, p in named.items()}, handle.report))
    return found


def spoilt(laid: OneProcess) -> tuple[list[Any], list[Any]]:
    """Return the gradients of all steps, as this process has them and as one process would."""
    names, steps, alone = laid.whole_parts(), [], []
    for size, one in STEPS:
        steps.append({key: size * p.grad for key, p in laid.named().items()})
        filled = dict(steps[-1])
        if one == "none":
            for key in [key for key, grad in filled.items() if laid.absent(key, grad)]:
                filled[key], steps[-1][key] = (
                    0 * filled[key] if laid.in_parts(filled[key]) else None,
                    None,
                )
        elif one is not None:
            laid.spoil(filled, one)
        alone.append(dict.fromkeys(names) | laid.gathered(filled))
    return steps, alone


def layout(name: str) -> None:
    """Check that all rules find the same in a layout as in one process."""
    laid = LAYOUTS[name]()
    laid.backward(0)
    params, full_params = {key: p.detach() for key, p in laid.named().items()}, laid.whole_parts()
    entries = {key: laid.entries(p.grad) for key, p in laid.named().items() if not summed(p.grad)}
    steps, alone = spoilt(laid)
    agreed: dict[Any, Any] = {}
    for title, kind in RULES.items():
        # With all_reduce=, a leaf that no process has still updates its state. Rules over different
        # leaves must be refused.
        if title in laid.refused or (title == "adagc" and laid.all_reduce is not None):
            continue
        # Called directly, rules with params= hang where a process has no gradient of a DTensor.
        if any(isinstance(p, DTensor) for p in params.values()):
            mine = stepped_by_optimizer(laid, kind, steps)
        else:
            mine = stepped(kind.rule, steps, params, kind.loss, **laid.joins())
        wanted = stepped(kind.rule, alone, full_params, kind.loss)
        for step, (clipped, report) in enumerate(mine):
            what, (all_clipped, its) = f"{title}, step {step}", wanted[step]
            assert [grad is None for grad in clipped.values()] == [
                grad is None for grad in steps[step].values()
            ], what
            for key, grad in clipped.items():
                if grad is not None:
                    close(
                        *both(grad, all_clipped[key], entries.get(key)),
                        f"{what}, {key}",
                        all_clipped[key],
                    )
            # Each process has its own norms along sharded axes.
            divided = title == "agc"
            norms, own = (
                ({}, flags_of_all(report)) if divided else (norms_of(report, params), flags(report))
            )
            for key, norm in norms.items():
                close(norm, norms_of(its, full_params).get(key, 0 * norm), f"{what}, norm of {key}")
            assert own == flags(its), what
            agreed |= {(what, key): norm.numpy().tobytes() for key, norm in norms.items()}
            agreed |= {(what, "flags"): own}
    alike(agreed, name)


def summed(tensor: Any) -> bool:
    """Return whether the local tensor is an addend of a partial sum."""
    return isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements)


def both(grad: Any, whole: Any, entries: Any) -> tuple[Any, Any]:
    """Return the local elements of a gradient, and those of the full one."""
    if summed(grad):
        return grad.full_tensor(), whole
    return local(grad), local(part(whole, grad)) if entries is None else whole.flatten()[entries]


def norms_of(report: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Return norms by the names of their leaves or groups."""
    last = lambda path: path[-1] if path else "all"
    names = list(named)
    return {
        names[key] if isinstance(key := last(path), int) else key: norm
        for path, norm in walk(report.norms)
    }


def attached(name: str) -> None:
    """Check that training with an attached rule equals clipping by hand in one process."""
    for title in ("spikes", "adagc"):
        if title in LAYOUTS[name].refused:
            continue
        laid, (_, rule, _, with_loss) = LAYOUTS[name](), RULES[title]
        optimizer = laid.optimizer(laid.trained(), lr=0.1, momentum=0.9)
        handle = attach(optimizer, rule, **laid.joins())
        net, clipper, skipped = Net(laid.experts), uc.Clipper(rule), []
        named = dict(net.named_parameters())
        by_hand = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            by_hand.zero_grad()
            told = laid.backward(step)
            handle.loss = told if with_loss else None
            optimizer.step()
            loss = loss_of(net, step)
            loss.backward()
            grads = {key: p.grad for key, p in named.items()}
            clipped = clipper(
                grads,
                {key: p.detach() for key, p in named.items()},
                loss=loss if with_loss else None,
            )
            for key, p in named.items():
                p.grad = clipped[key]
            skipped.append(flags(clipper.report)[1])
            if not skipped[-1]:
                by_hand.step()
            assert flags(handle.report) == flags(clipper.report), (title, step)
        if title == "spikes":
            alike(
                {path: repr(value) for path, value in walk(handle.numbers())}, "what they remember"
            )
        for key, weight in laid.weights().items():
            close(weight, named[key].detach(), f"{title}, {key}", torch.ones(1))
        assert skipped[3] == (True if title == "spikes" else None), skipped


def refused(name: str) -> None:
    """Check that all processes refuse a rule that the layout cannot have."""
    for title in LAYOUTS[name].refused:
        laid = LAYOUTS[name]()
        laid.backward(0)
        optimizer = laid.optimizer(laid.trained(), lr=0.1)
        joins = laid.joins()
        with pytest.raises(ValueError, match=r"all_reduce|FSDP1"):  # noqa: PT012 - at the latest
            attach(optimizer, RULES[title].rule, **joins)
            optimizer.step()
