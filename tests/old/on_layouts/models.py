"""A small model, its data, and how one process trains it by hand."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import cache
from typing import Any, NamedTuple

import torch
from on_layouts.cases import RULES
from torch import nn

import uniclip as uc
from uniclip.tree import flatten

PROCESSES, STEPS, SPIKE = 4, 4, 3
TOKENS, WIDTH, LENGTH = 12, 8, 4
BAD = {"NaN": math.nan, "inf": math.inf}
SPOILT = {"": "down.weight", "list": "experts.3.weight", "stacked": "experts"}
"""The leaf whose last entry is not finite in some cases."""


class Net(nn.Module):
    """Guess a token from another one."""

    def __init__(self, experts: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if experts == "stacked":
            self.experts = nn.Parameter(torch.randn(PROCESSES, WIDTH, WIDTH) / 4)
        elif experts == "list":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PROCESSES))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Any, unused: Any = False) -> Any:
        """Return a score for each token; ``unused`` leaves the bias of the last layer without a gradient."""
        x = self.norm(self.embed(tokens))
        x = self.down(torch.tanh(self.up(x)))
        if hasattr(self, "experts"):
            listed = isinstance(self.experts, nn.ModuleList)
            weights = [one.weight for one in self.experts] if listed else self.experts
            x = x + sum(torch.tanh(x @ weight.T) for weight in weights)
        return x @ self.head.weight.T + self.head.bias.detach() if unused else self.head(x)


@cache
def first(experts: str = "") -> dict[str, torch.Tensor]:
    """Return the first weights."""
    torch.manual_seed(0)
    return {name: p.detach() * 1.5 + (0.1 if "norm" in name else 0.0) for name, p in Net(experts).named_parameters()}


def made(experts: str = "") -> Net:
    """Return the model."""
    net = Net(experts)
    net.load_state_dict(first(experts))
    return net


def batch(step: int, shares: Any = range(PROCESSES)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and what they are to be, of some of the shares of a batch."""
    both = torch.randint(TOKENS, (PROCESSES, 2, 2, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens, wanted = both[list(shares)].unbind(1)
    return tokens.flatten(0, 1), wanted.flatten(0, 1)


def loss_of(scores: Any, wanted: Any, step: int) -> Any:
    """Return a loss that differs from step to step."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()) * (1 + step % 3)


def told(loss: Any, step: int, shares: Any = range(PROCESSES)) -> Any:
    """Return the loss that a rule is told: once, that of one share is a spike."""
    return loss.detach() + (400.0 * (1 in shares) / len(shares) if step == SPIKE else 0.0)


def bad_step(rule: str, case: str) -> int | None:
    """Return the step whose gradients are not finite: the last one, where that spoils the weights."""
    return None if case not in BAD else 1 if RULES[rule].rule.nonfinite == "skip" else STEPS - 1


class Seen(NamedTuple):
    """What there is to compare."""

    norms: list[dict[Any, torch.Tensor]]
    flags: list[tuple[Any, Any]]
    weights: dict[str, torch.Tensor]


def norms_of(report: Any) -> dict[Any, torch.Tensor]:
    """Return norms by the paths of their leaves or groups; a joint one has none."""
    if isinstance(report.norms, torch.Tensor):
        return {(): report.norms}
    tree = flatten(report.norms)
    return dict(zip(tree.paths(), tree.leaves, strict=True))


def flags_of(report: Any) -> tuple[Any, Any]:
    """Return whether a step was finite, and whether it was left out."""
    return tuple(None if flag is None else bool(flag) for flag in (report.finite, report.skipped))  # type: ignore[return-value]


def optimizer_of(named: Any, case: str, kind: Any = torch.optim.SGD) -> Any:
    """Return an optimizer; without gradients momentum would go on with zeros and not go on with ``None``."""
    return kind([{"params": list(named)}], lr=0.1, momentum=0.0 if case == "none" else 0.9)


def by_hand(
    rule: str, case: str, experts: str = "", masks: dict[str, torch.Tensor | None] | None = None, *, shared: bool = True
) -> Seen:
    """Train in this process alone, and clip by hand.

    Masks are 0 where nobody has a gradient, ``None`` where a whole leaf has none. What spoils a step is one entry, or
    with ``shared`` the loss of one share of the batch.
    """
    net = made(experts)
    named = dict(net.named_parameters())
    optimizer, clipper = optimizer_of(named.values(), case), uc.Clipper(RULES[rule].rule)
    norms, flags = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for share in range(PROCESSES):
            tokens, wanted = batch(step, [share])
            loss = loss_of(net(tokens, unused=case == "none" and shared and share == 1), wanted, step)
            weight = BAD[case] if shared and share == 1 and step == bad_step(rule, case) else 1.0
            (loss * weight / PROCESSES).backward()
            losses.append(loss.detach())
        for name, p in named.items():
            mask = (masks or {}).get(name, 1.0)
            p.grad = None if mask is None else p.grad * mask
        if step == bad_step(rule, case) and not shared:
            named[SPOILT[experts]].grad.flatten()[-1] = BAD[case]
        tree = [OrderedDict((name, p.grad) for name, p in named.items())]
        params = [OrderedDict((name, p.detach()) for name, p in named.items())]
        [clipped] = clipper(tree, params, loss=told(torch.stack(losses).mean(), step))
        norms.append(norms_of(clipper.report))
        flags.append(flags_of(clipper.report))
        for name, p in named.items():
            p.grad = clipped[name]
        if not flags[-1][1]:
            optimizer.step()
    return Seen(norms, flags, {name: p.detach() for name, p in named.items()})
