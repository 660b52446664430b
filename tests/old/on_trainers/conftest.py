"""One small model, its batches and a table of rules, to be trained by hand and by each trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import uniclip as uc

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded
os.environ["TOKENIZERS_PARALLELISM"] = "false"

STEPS = 8
PLAIN = [1.0] * STEPS
NAN = [1.0, 1.0, math.nan, 1.0, 1.0, math.inf, 1.0, 1.0]
SPIKE = [1.0, 1.1, 0.9, 1.0, 1000.0, 1.0, 1.0, 1.0]


class Case(NamedTuple):
    """A rule and by what the loss of each step is multiplied."""

    rule: Any
    factors: list[float] = PLAIN


CASES = {
    "small": Case(uc.by_global_norm(0.05)),
    "huge": Case(uc.by_global_norm(1e6)),
    "each leaf": Case(uc.by_norm(0.02)),
    "by value": Case(uc.by_value(-0.01, 0.01)),
    "agc": Case(uc.agc(0.01)),
    "autoclip": Case(uc.autoclip(50)),
    "adagc": Case(uc.adagc(warmup=2, warmup_norm=0.05)),
    "skip NaN": Case(uc.by_global_norm(0.05, nonfinite="skip"), NAN),
    "skip spikes": Case(uc.skip_spikes(warmup=3), SPIKE),
    "chain": Case(uc.chain(uc.by_value(-0.05, 0.05), uc.autoclip(50), uc.by_global_norm(0.1))),
    "masked": Case(uc.masked(uc.by_global_norm(0.02), lambda path, leaf: leaf.ndim > 1)),
}


class Net(torch.nn.Module):
    """A small network that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x: Any, factor: Any, shift: Any) -> dict[str, Any]:
        """Multiply the mean square of the outputs, and add what no gradient sees."""
        return {"loss": factor.mean() * (self.layers(x) ** 2).mean() + shift.mean()}


def make_batches(factors: list[float]) -> list[dict[str, Any]]:
    """Draw one batch for each factor."""
    generator = torch.Generator().manual_seed(1)
    x = [3 * torch.randn(1, 8, 5, generator=generator) for _ in factors]
    return [{"x": one, "factor": torch.tensor([f]), "shift": torch.zeros(1)} for one, f in zip(x, factors, strict=True)]


def make_optimizer(net: Any, name: str = "sgd") -> Any:
    """Make an optimizer that would move on gradients of 0."""
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def train_by_hand(
    rule: Any, batches: list[Any], make: Callable[[Any], Any] = make_optimizer, micro: int = 1, *, see_loss: bool = True
) -> tuple[Any, list[Any]]:
    """Clip once per step, then step; return the network and the reports."""
    net = Net()
    optimizer, reports = make(net), []
    params = [dict(enumerate(group["params"])) for group in optimizer.param_groups]
    state = rule.init(params)
    for start in range(0, len(batches), micro):
        optimizer.zero_grad()
        for batch in batches[start : start + micro]:
            loss = net(**batch)["loss"] / micro
            loss.backward()
        grads = [{name: p.grad for name, p in group.items()} for group in params]
        seen = loss.detach() if see_loss else None
        _, state, report = rule.update(grads, state, params, in_place=True, loss=seen)
        reports.append(report)
        if report.skipped is None or not bool(report.skipped):
            optimizer.step()
    return net, reports


def assert_same(ours: Any, theirs: Any, *, atol: float = 0.0) -> None:
    """Assert that two networks have the same finite weights."""
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert bool(torch.isfinite(one).all()), name
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


class Tools(NamedTuple):
    """What the tests of each trainer share: these files cannot be imported from each other."""

    Net: Any = Net
    batches: Any = make_batches
    optimizer: Any = make_optimizer
    by_hand: Any = train_by_hand
    same: Any = assert_same


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Give the functions above."""
    torch.set_num_threads(1)  # the matrices are so small that threads would only wait for each other
    return Tools()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Undo what Accelerate keeps for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each rule."""
    chosen: Case = request.param
    return chosen
