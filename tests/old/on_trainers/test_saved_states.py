"""The state of a rule between `Clipper` and the callbacks, both ways."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as Lightning
from transformers import Trainer, TrainingArguments

import uniclip as uc
from uniclip.integrations import lightning, transformers
from uniclip.saved import renamed

pytestmark = [
    # Lightning's own code asks torch.utils._pytree for a class that is to go.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:max_steps is given, it will override any value given in num_train"),
]

RULES = {
    "autoclip": uc.autoclip(50, window=6),
    "chain": uc.chain(uc.zclip(z=1.0, warmup=2), uc.masked(uc.adagc(warmup=2), lambda path, leaf: leaf.ndim > 1)),
}
"""One memory for all leaves; in a chain one with a norm for each, masked. All are tried in tests/on_all."""


class Stream(torch.utils.data.IterableDataset[Any]):
    """Batches in their order, which the Trainer would otherwise shuffle."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = [{name: value[0] for name, value in batch.items()} for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        """Go through them."""
        return iter(self.batches)


class Module(LightningModule):
    """The small network."""

    def __init__(self, net: Any, make: Any) -> None:
        super().__init__()
        self.net, self.make = net, make

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer."""
        return self.make(self.net)


class Begin(Callback):
    """What a user writes to go on from a state in Lightning."""

    def __init__(self, clipping: Any, saved: dict[str, Any]) -> None:
        self.clipping, self.saved = clipping, saved

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load it into the handle, which is there by now."""
        self.clipping.handles[0].load_state_dict(self.saved)


def by_lightning(tools: Any, net: Any, rule: Any, batches: Any, saved: Any, folder: Path) -> dict[str, Any]:
    """Train, and return the state that the checkpoint has."""
    clipping = lightning.ClipGradients(rule)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    callbacks = [clipping] if saved is None else [clipping, Begin(clipping, saved)]
    trainer = Lightning(max_epochs=1, callbacks=callbacks, enable_checkpointing=False, **quiet)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(Module(net, tools.optimizer), loader)
    trainer.save_checkpoint(folder / "lightning.ckpt")
    file = torch.load(folder / "lightning.ckpt", weights_only=True)["optimizer_states"][0]["uniclip"]
    assert all(map(torch.is_tensor, file["state"].values()))
    assert file["format"] == 1
    return file


def by_hugging_face(tools: Any, net: Any, rule: Any, batches: Any, saved: Any, folder: Path) -> dict[str, Any]:
    """Train, and return the state."""
    clipping = transformers.ClipGradients(rule)
    assert clipping.state_dict() == {}
    if saved is not None:
        clipping.load_state_dict(saved)
        assert clipping.state_dict() == saved
    options = {"per_device_train_batch_size": 1, "use_cpu": True, "remove_unused_columns": False, "disable_tqdm": True}
    options |= {"report_to": [], "save_strategy": "no", "lr_scheduler_type": "constant", "max_steps": len(batches)}
    trainer = Trainer(
        net,
        TrainingArguments(str(folder), **options),
        train_dataset=Stream(batches),
        callbacks=[clipping],
        optimizers=(tools.optimizer(net), None),
    )
    trainer.train()
    return clipping.state_dict()


def by_clipper(tools: Any, net: Any, rule: Any, batches: Any, saved: Any, _: Path) -> dict[str, Any]:
    """Train by hand; the gradients are in the tree that `attach` sees."""
    clipper, optimizer = uc.Clipper(rule), tools.optimizer(net)
    clipper.load_state_dict(saved or {})
    for batch in batches:
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        clipper.clip_([dict(enumerate(p.grad for p in net.parameters()))], [dict(enumerate(net.parameters()))])
        optimizer.step()
    return clipper.state_dict()


TRAINERS = {"Lightning": by_lightning, "Hugging Face": by_hugging_face, "Clipper": by_clipper}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("before", TRAINERS)
def test_each_pair(tools: Any, tmp_path: Path, before: str, rule: Any) -> None:
    """What one learned goes on in each other: the weights are those of a clipper that was never interrupted."""
    batches = tools.batches([1.0, 3.0, 0.3, 2.0, 5.0, 0.5, 4.0, 1.0])
    half, plain = tools.Net(), tools.Net()
    saved = TRAINERS[before](tools, half, rule, batches[:4], None, tmp_path)
    halfway = by_clipper(tools, plain, rule, batches[:4], None, tmp_path)
    tools.same(half, plain, atol=1e-6)
    by_clipper(tools, plain, rule, batches[4:], halfway, tmp_path)  # each part begins with a new momentum
    for train in TRAINERS.values():
        net = copy.deepcopy(half)
        train(tools, net, rule, batches[4:], saved, tmp_path)
        tools.same(net, plain, atol=1e-5)


def test_refused_when_the_training_begins(tools: Any, tmp_path: Path) -> None:
    """The Trainer's callback refuses a state of another rule, and what is none at once."""
    saved = by_clipper(tools, tools.Net(), uc.zclip(), tools.batches([1.0]), None, tmp_path)
    with pytest.raises(ValueError, match="that of another rule than"):
        by_hugging_face(tools, tools.Net(), uc.adagc(), tools.batches([1.0]), json.loads(json.dumps(saved)), tmp_path)
    with pytest.raises(TypeError, match="saved must be what a state_dict"):
        transformers.ClipGradients(uc.adagc()).load_state_dict([saved])
    assert renamed(saved, {}) == saved
