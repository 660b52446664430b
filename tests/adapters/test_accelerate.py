"""Rules attached to optimizers that Accelerate wraps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState

import uniclip as uc
from adapters.contract import variants
from adapters.on_torch import Combined, Plain
from adapters.trainers import Handled, Net, by_hand, joint, near, sgd, tensors
from kit.training import Batch, batches, parts
from uniclip.integrations.torch import attach


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Reset the process-wide state of Accelerate."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Accelerated(Handled):
    """The loop of Accelerate's documentation.

    The rule is attached before the optimizer is wrapped.
    """

    recorded = "accelerate"
    takes = frozenset({"loss", "scalars", "record", "save", "refuse", "state", "micro", "bits"})

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Prepare model and optimizer."""
        self.record, self.micro = record, micro
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro, **options)
        net = Net()
        optimizer = sgd(net)
        self.handle = None if rule is None else attach(optimizer, rule, record=record, names=net)
        self.net, self.inside = self.accelerator.prepare(net, optimizer)

    def step(self, batch: Batch) -> None:
        """Train on a batch, possibly in parts."""
        for part in parts(batch, self.micro):
            with self.accelerator.accumulate(self.net):
                loss = self.net(**tensors(part))["loss"]
                self.accelerator.backward(loss)
                if self.handle is not None:
                    self.handle.loss = loss.detach()
                self.inside.step()
                self.inside.zero_grad()

    def finish(self) -> None:
        """Write the record."""
        self.record.flush()

    def save(self, folder: Path) -> None:
        """Save all prepared objects."""
        self.accelerator.save_state(str(folder / "state"))

    def load(self, folder: Path) -> None:
        """Load all prepared objects."""
        self.accelerator.load_state(str(folder / "state"))


class Scaled(Accelerated):
    """The loop with a gradient scaler, which Accelerate uses on accelerators only.

    The rule is attached to the inner optimizer.
    """

    takes = frozenset({"scalars", "state", "scale"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Wrap the optimizer with a scaler."""
        self.accelerator, self.net = Accelerator(cpu=True), Net()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.inside = AcceleratedOptimizer(sgd(self.net), scaler=self.scaler)
        self.handle = attach(self.inside, rule, names=self.net)
        self.accelerator.gradient_state._set_sync_gradients(True)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.inside.zero_grad()
        self.scaler.scale(self.net(**tensors(batch))["loss"]).backward()
        self.inside.step()


@pytest.mark.parametrize(("make", "check"), variants({Accelerated: None, Scaled: ()}))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """The loop keeps the contract of all integrations."""
    check(make, uc, tmp_path)


def test_attached_twice() -> None:
    """A rule cannot be attached to both the wrapped and the wrapping optimizer."""
    adapter = Accelerated()
    adapter.start(uc, uc.by_norm(1.0))
    with pytest.raises(ValueError, match=r"uc\.chain|already"):
        attach(adapter.inside, uc.by_norm(1.0))


def test_bfloat16() -> None:
    """Under autocast to bfloat16, gradients and norms are float32."""
    adapter = Accelerated()
    adapter.start(uc, uc.by_global_norm(0.5), mixed_precision="bf16")
    adapter.step(batches()[0])
    assert adapter.handle.report.norms.dtype is torch.float32
    assert adapter.scalars()["clip/factor"] < 1


@pytest.mark.parametrize("listed", [False, True])
def test_the_kept_step_of_a_loss_scale(*, listed: bool) -> None:
    """The wrapper keeps a step if there is a loss scale, and follows each rule that is attached."""
    Accelerator(cpu=True)
    w = torch.nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inside = torch.optim.SGD([w], lr=1.0)
    wrapper = AcceleratedOptimizer(inside, device_placement=False, scaler=scaler)
    for limit in (1.0, None, 2.0):
        handle = None
        if limit is not None:
            handle = attach([wrapper] if listed else wrapper, uc.by_global_norm(limit))
        w.data.zero_()
        wrapper.zero_grad()
        scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
        wrapper.step()
        assert w.detach().norm().item() == pytest.approx(limit or 5.0)
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("kind", [Combined, Plain])
@pytest.mark.parametrize("first", ["attach", "prepare"])
def test_several_optimizers_as_one(kind: Any, first: str) -> None:
    """Optimizers stepped as one share a norm, also in an object that Accelerate does not wrap."""
    net, rule = Net(), uc.by_global_norm(0.5, skip_above=20.0)
    optimizer = joint(net, kind)
    handle = attach(optimizer, rule, names=net) if first == "attach" else None
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    handle = handle or attach(optimizer, rule, names=net)
    some = batches()[:6]
    for batch in some:
        accelerator.backward(net(**tensors(batch))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    hand, steps = by_hand(rule, some)
    near(net.arrays(), hand.weights)
    assert float(handle.scalars()["clip/norm"]) == pytest.approx(steps[-1]["clip/norm"], rel=1e-4)
    assert any(step["clip/skipped"] for step in steps)
