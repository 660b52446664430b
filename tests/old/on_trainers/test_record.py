"""The trainers record what a loop by hand records, at the trainer's steps, and go on in the file of a checkpoint."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import Trainer, TrainingArguments

import uniclip as uc
from uniclip import insight
from uniclip.integrations.lightning import ClipGradients as InLightning
from uniclip.integrations.torch import attach
from uniclip.integrations.transformers import ClipGradients as InTransformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:max_steps is given, it will override any value given in num_train"),
]
NAMES = ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]


class Module(LightningModule):
    """The small network under Lightning."""

    def __init__(self, tools: Any, optimizers: int = 1) -> None:
        super().__init__()
        self.net, self._make, self._count = tools.Net(), tools.optimizer, optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer, or several."""
        made = [self._make(self.net.layers[2 * n] if self._count > 1 else self.net) for n in range(self._count)]
        return made if self._count > 1 else made[0]


class Stream(torch.utils.data.Dataset[Any]):
    """Batches, one by one."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = [{name: value[0] for name, value in batch.items()} for batch in batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        return self.batches[number]


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def by_hand(tools: Any, rule: Any, batches: list[Any], record: Any, *, shown: bool = True) -> None:
    """Train in a loop with `attach`; a loss that the rule is not shown is recorded all the same."""
    net = tools.Net()
    optimizer = tools.optimizer(net)
    handle = attach(optimizer, rule, record=record)
    handle.name_leaves(net)
    for batch in batches:
        optimizer.zero_grad()
        loss = net(**batch)["loss"]
        loss.backward()
        handle.loss, record.loss = loss if shown else None, loss
        optimizer.step()


def blind(tools: Any, rule: Any, batches: list[Any], record: Any) -> None:
    """Train so that the rule sees no loss, as in the Trainer of Hugging Face."""
    by_hand(tools, rule, batches, record, shown=False)


def trainer_with(callback: Any, **options: Any) -> Any:
    """Return a quiet trainer of Lightning."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    given = {"max_epochs": 1, "enable_checkpointing": False, **quiet, **options}
    return LightningTrainer(callbacks=[callback], **given)


def loader(batches: list[Any]) -> Any:
    """Return batches for Lightning."""
    return torch.utils.data.DataLoader(batches, batch_size=None)


def lightning(tools: Any, rule: Any, batches: list[Any], record: Any, ckpt: Any = None, epochs: int = 1) -> Any:
    """Train with Lightning."""
    trainer = trainer_with(InLightning(rule, record=record), max_epochs=epochs)
    trainer.fit(Module(tools), loader(batches), ckpt_path=ckpt)
    return trainer


def transformers(tools: Any, rule: Any, batches: list[Any], record: Any, folder: Any, **options: Any) -> Any:
    """Train with the Trainer of Hugging Face."""
    net, resume = tools.Net(), options.pop("resume", None)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    given = {"save_strategy": "no", "max_steps": len(batches), "lr_scheduler_type": "constant", **quiet, **options}
    args = TrainingArguments(str(folder), per_device_train_batch_size=1, **given)
    callback = InTransformers(rule, record=record)
    trainer = InOrder(
        net, args, train_dataset=Stream(batches), callbacks=[callback], optimizers=(tools.optimizer(net), None)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def accelerate(tools: Any, rule: Any, batches: list[Any], record: Any) -> None:
    """Train with Accelerate."""
    accelerator, net = Accelerator(cpu=True), tools.Net()
    net, optimizer = accelerator.prepare(net, tools.optimizer(net))
    handle = attach(optimizer, rule, record=record)
    handle.name_leaves(net)
    for batch in batches:
        optimizer.zero_grad()
        handle.loss = net(**batch)["loss"]
        accelerator.backward(handle.loss)
        optimizer.step()


def assert_equal(one: insight.Record, two: insight.Record) -> None:
    """Assert that two records are the same to rounding."""
    for name in insight.Record._fields:
        a, b = getattr(one, name), getattr(two, name)
        if isinstance(a, np.ndarray) and a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


def test_equal_records(tools: Any, case: Any, tmp_path: Path) -> None:
    """A loop by hand, Lightning, Hugging Face's Trainer and Accelerate record the same, whatever the rule."""
    batches, found = tools.batches(case.factors), {}
    for way in (by_hand, lightning, accelerate, blind, transformers):
        path, more = tmp_path / f"{way.__name__}.jsonl", [tmp_path / "trainer"] if way is transformers else []
        with insight.Recorder(path, every=3, leaves="all") as record:
            way(tools, case.rule, batches, record, *more)
        read = insight.read(path)
        found[way] = read._replace(labels=[label.removeprefix("net.") for label in read.labels])
    first = found[by_hand]
    assert first.steps.tolist() == list(range(1, len(batches) + 1))
    assert first.labels == NAMES
    assert first.leaves.shape == (len(batches), 4)
    assert np.isfinite(first.losses).tolist() == [math.isfinite(factor) for factor in case.factors]
    for one, other in ((by_hand, lightning), (by_hand, accelerate), (blind, transformers)):
        assert_equal(found[one], found[other])


def test_lightning_goes_on(tools: Any, tmp_path: Path) -> None:
    """A fit from a checkpoint drops the lines after it, and numbers its steps as the Trainer does."""
    rule, batches, path = uc.by_global_norm(0.05), tools.batches([1.0] * 6), tmp_path / "run.jsonl"
    with insight.Recorder(path, every=4) as record:
        trainer = lightning(tools, rule, batches, record)
        trainer.save_checkpoint(tmp_path / "some.ckpt")
        assert insight.read(path).steps.tolist() == [1, 2, 3, 4, 5, 6]
    with insight.Recorder(path, every=4, rule=rule) as record:
        record.resume(6)
        record(uc.clip([np.ones(3)], rule)[1])  # a step after the checkpoint that is lost
    with insight.Recorder(path, every=4) as record:
        lightning(tools, rule, batches, record, ckpt=tmp_path / "some.ckpt", epochs=2)
    with insight.Recorder(tmp_path / "whole.jsonl", every=4) as record:
        lightning(tools, rule, batches, record, epochs=2)
    assert_equal(insight.read(path), insight.read(tmp_path / "whole.jsonl"))


@pytest.mark.parametrize("micro", [1, 2])
def test_transformers_goes_on(tools: Any, micro: int, tmp_path: Path) -> None:
    """A training from a checkpoint drops the lines after it; accumulated batches are one step with one loss."""
    rule, batches = uc.by_global_norm(0.05), tools.batches([1.0] * 8)
    options = {"gradient_accumulation_steps": micro, "max_steps": 8 // micro}
    saved = {**options, "save_strategy": "steps", "save_steps": 2}
    for name, more in (("whole", {}), ("run", {})):
        with insight.Recorder(tmp_path / f"{name}.jsonl", every=3) as record:
            transformers(tools, rule, batches, record, tmp_path / name, **saved, **more)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    with insight.Recorder(tmp_path / "run.jsonl", every=3) as record:
        transformers(tools, rule, batches, record, tmp_path / "run", **saved, resume=checkpoint)
    whole = insight.read(tmp_path / "whole.jsonl")
    assert_equal(insight.read(tmp_path / "run.jsonl"), whole)
    assert len(whole.steps) == 8 // micro
    with torch.no_grad():
        first = np.mean([float(tools.Net()(**batch)["loss"]) for batch in batches[:micro]])
    assert math.isclose(whole.losses[0], first, rel_tol=1e-5)


def test_lightning_accumulates(tools: Any, tmp_path: Path) -> None:
    """Accumulated batches are one step, whose loss is their mean."""
    batches = tools.batches([1.0, 2.0] * 4)
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        callback = InLightning(uc.by_global_norm(0.05), record=record)
        trainer_with(callback, accumulate_grad_batches=2).fit(Module(tools), loader(batches))
    with insight.Recorder(tmp_path / "other.jsonl") as record:
        options = {"gradient_accumulation_steps": 2, "max_steps": 4}
        transformers(tools, uc.by_global_norm(0.05), batches, record, tmp_path / "trainer", **options)
    found = insight.read(tmp_path / "run.jsonl")
    assert found.steps.tolist() == [1, 2, 3, 4]
    with torch.no_grad():
        first = np.mean([float(tools.Net()(**batch)["loss"]) for batch in batches[:2]])
    np.testing.assert_allclose(found.losses[0], first, rtol=1e-6)
    assert_equal(found, insight.read(tmp_path / "other.jsonl"))


def test_steps_that_a_loss_scale_skips(tools: Any, tmp_path: Path) -> None:
    """They have no line, and the trainer's numbers."""
    batches = tools.batches([1.0, 1.0, math.inf, 1.0, 1.0])
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
        lightning = trainer_with(InLightning(uc.by_global_norm(0.05), record=record), plugins=plugin)
        lightning.fit(Module(tools), loader(batches))
    found = insight.read(tmp_path / "run.jsonl")
    assert found.steps.tolist() == [1, 2, 4, 5]
    assert found.finite.all()
    assert np.isnan(found.losses).all()


def test_thresholds_are_logged(tools: Any, tmp_path: Path) -> None:
    """Both trainers log the threshold of a rule that has one."""
    rule, batches = uc.zclip(warmup=2), tools.batches([1.0] * 6)
    trainer = lightning(tools, rule, batches, None)
    there = transformers(tools, rule, batches, None, tmp_path, logging_steps=6)
    (row,) = [entry for entry in there.state.log_history if "clip/norm" in entry]
    for logged in (trainer.callback_metrics, row):
        assert float(logged["clip/threshold"]) > 0
        assert float(logged["clip/norm_max"]) >= float(logged["clip/norm"])


def test_several_optimizers(tools: Any, tmp_path: Path) -> None:
    """One recorder cannot hold the steps of two optimizers."""
    callback = InLightning(uc.by_norm(1.0), record=insight.Recorder(tmp_path / "run.jsonl"))
    trainer = trainer_with(callback)
    with pytest.raises(MisconfigurationException, match="record holds the steps of one optimizer, and 2 are clipped"):
        trainer.fit(Module(tools, 2), loader(tools.batches([1.0])))


@pytest.mark.parametrize("kind", [InLightning, InTransformers])
def test_arguments_and_copies(kind: Any, tmp_path: Path) -> None:
    """What is no recorder is refused at once; copies and pickles have a recorder without steps."""
    with pytest.raises(TypeError, match="record must be a recorder"):
        kind(uc.by_norm(1.0), record="run.jsonl")
    callback = kind(uc.by_norm(1.0), record=insight.Recorder(tmp_path / "run.jsonl", every=7))
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert other.record.every == 7
        assert other.record.path == callback.record.path


def test_an_error_in_training(tools: Any, tmp_path: Path) -> None:
    """What was recorded before an error is written."""

    class Failing(Module):
        def training_step(self, batch: Any, number: int) -> Any:
            if number == 3:
                raise KeyError
            return super().training_step(batch, number)

    record = insight.Recorder(tmp_path / "run.jsonl")
    trainer = trainer_with(InLightning(uc.by_norm(1.0), record=record))
    with pytest.raises(KeyError):
        trainer.fit(Failing(tools), loader(tools.batches([1.0] * 5)))
    assert insight.read(tmp_path / "run.jsonl").steps.tolist() == [1, 2, 3]
