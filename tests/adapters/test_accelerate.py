"""Rules attached to optimizers under Accelerate, which wraps them."""

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
from adapters.trainers import Handled, Net, sgd, tensors
from kit.training import Batch, batches, parts
from uniclip.integrations.torch import attach


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Undo what Accelerate keeps for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Accelerated(Handled):
    """A loop as Accelerate's documentation writes it.

    The rule is attached before the optimizer is wrapped.
    """

    recorded = "accelerate"
    takes = frozenset({"loss", "scalars", "record", "save", "refuse", "memory", "micro", "bits"})

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Prepare."""
        self.record, self.micro = record, micro
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro, **options)
        net = Net()
        optimizer = sgd(net)
        self.handle = None if rule is None else attach(optimizer, rule, record=record, names=net)
        self.net, self.inside = self.accelerator.prepare(net, optimizer)

    def step(self, batch: Batch) -> None:
        """Train on a batch, in parts if asked for."""
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
        """Save all that was prepared."""
        self.accelerator.save_state(str(folder / "state"))

    def load(self, folder: Path) -> None:
        """Load it."""
        self.accelerator.load_state(str(folder / "state"))


class Scaled(Accelerated):
    """With a scaler, which Accelerate makes on accelerators only.

    The rule is attached to what it wraps.
    """

    takes = frozenset({"scalars", "memory", "scale"})

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
    """The loop keeps the contract of all adapters."""
    check(make, uc, tmp_path)


def test_attached_twice() -> None:
    """What Accelerate returns and what it got are one optimizer."""
    adapter = Accelerated()
    adapter.start(uc, uc.by_norm(1.0))
    with pytest.raises(ValueError, match=r"uc\.chain|already"):
        attach(adapter.inside, uc.by_norm(1.0))


def test_bfloat16() -> None:
    """Under autocast to bfloat16 gradients are float32, and measured as such."""
    adapter = Accelerated()
    adapter.start(uc, uc.by_global_norm(0.5), mixed_precision="bf16")
    adapter.step(batches()[0])
    assert adapter.handle.report.norms.dtype is torch.float32
    assert adapter.scalars()["clip/factor"] < 1
