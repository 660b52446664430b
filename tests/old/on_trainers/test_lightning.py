"""The callback for Lightning's Trainer, against the same steps taken by hand and the Trainer's own clipping."""

from __future__ import annotations

import copy
import csv
import pickle
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._python_dispatch import TorchDispatchMode

import uniclip as uc
from uniclip.integrations.lightning import ClipGradients
from uniclip.integrations.torch import attach

pytestmark = [
    # Lightning's own code asks torch.utils._pytree for a class that is to go.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # On one small machine its advice about data loaders does not apply.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
NO_FILES = {"logger": False, "enable_checkpointing": False}


class Module(LightningModule):
    """The small network under automatic optimization."""

    def __init__(self, tools: Any, make: Any = None) -> None:
        super().__init__()
        self.net, self._make = tools.Net(), make or tools.optimizer

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer, or several."""
        return self._make(self.net)


class Manual(Module):
    """One optimizer for each layer, which steps when it pleases."""

    def __init__(self, tools: Any, make: Any) -> None:
        super().__init__(tools, make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        """Step with the first optimizer in each batch, with the second in each other one."""
        first, second = self.optimizers()
        loss = self.net(**batch)["loss"]
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if number % 2:
            second.step()
            second.zero_grad()


def one_per_layer(net: Any) -> list[Any]:
    """Make two optimizers."""
    return [torch.optim.Adam(net.layers[i].parameters(), lr=0.01) for i in (0, 2)]


def fit(module: Any, batches: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    """Train for an epoch, if not told otherwise, and return the trainer."""
    trainer = Trainer(callbacks=list(callbacks), **{"max_epochs": 1, **QUIET, **NO_FILES, **options})
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_as_by_hand(tools: Any, case: Any, name: str) -> None:
    """Each rule does, bit for bit, what it does in a loop by hand; a step that it skips is not taken."""
    make, batches = partial(tools.optimizer, name=name), tools.batches(case.factors)
    module, callback = Module(tools, make), ClipGradients(case.rule)
    fit(module, batches, callback)
    net, reports = tools.by_hand(case.rule, batches, make)
    tools.same(module.net, net)
    torch.testing.assert_close(tuple(callback.handles[0].report), tuple(reports[-1]), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [uc.by_global_norm(0.05), uc.autoclip(50)], ids=["global", "autoclip"])
def test_accumulation(tools: Any, rule: Any) -> None:
    """Micro-batches are clipped once, when they are all there, and a rule learns from a step, not from each."""
    module, batches = Module(tools), tools.batches([1.0] * 12)
    trainer = fit(module, batches, ClipGradients(rule), accumulate_grad_batches=3)
    net, reports = tools.by_hand(rule, batches, micro=3)
    tools.same(module.net, net)
    share = sum(float(report.scalars()["clip/share"]) for report in reports) / len(reports)
    assert trainer.callback_metrics["clip/share"] == pytest.approx(share)
    assert trainer.callback_metrics["clip/norm_max"] == max(float(report.norms) for report in reports)


def test_what_it_prints(tools: Any) -> None:
    """The callback prints its rule, and after training what it has seen."""
    callback = ClipGradients(uc.by_global_norm(0.05))
    assert repr(callback) == "<ClipGradients: uc.Rule(0.05), before fit>"
    fit(Module(tools), tools.batches([1.0] * 4), callback)
    assert re.search(r"<attach: uc\.Rule\(0\.05\), \w+ of \d+ parameters, 4 steps>", repr(callback))


def test_several_optimizers(tools: Any) -> None:
    """In manual optimization each optimizer has a norm, a state and a name in the log of its own."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 9)
    ours, theirs = Manual(tools, one_per_layer), tools.Net()
    callback = ClipGradients(rule)
    trainer = fit(ours, batches, callback)
    optimizers = one_per_layer(theirs)
    clippers, seen = [uc.Clipper(rule) for _ in optimizers], [[], []]
    for number, batch in enumerate(batches):
        theirs(**batch)["loss"].backward()
        for k in range(1 + number % 2):
            seen[k].append(clippers[k].clip_([p.grad for p in optimizers[k].param_groups[0]["params"]]))
            optimizers[k].step()
            optimizers[k].zero_grad()
    tools.same(ours.net, theirs)
    assert [len(reports) for reports in seen] == [9, 4]
    for k, reports in enumerate(seen):
        shares = [float(report.scalars()["clip/share"]) for report in reports]
        assert trainer.callback_metrics[f"clip/norm/{k}"] == reports[-1].norms
        assert trainer.callback_metrics[f"clip/share/{k}"] == pytest.approx(sum(shares) / len(shares))
    assert "clip/norm" not in trainer.callback_metrics


def test_a_rule_for_each_optimizer(tools: Any) -> None:
    """A list gives each optimizer a rule, or none."""
    module = Manual(tools, one_per_layer)
    callback = ClipGradients([None, uc.by_global_norm(0.01)])
    trainer = fit(module, tools.batches([1.0] * 4), callback)
    assert len(callback.handles) == 1
    assert "clip/norm/1" in trainer.callback_metrics
    assert "clip/norm/0" not in trainer.callback_metrics
    assert [len(one._optimizer_step_pre_hooks) for one in trainer.optimizers] == [0, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(tools: Any, fused: bool) -> None:
    """The norms are those of the unscaled gradients, and a step that the scaler skips is none."""
    make = partial(torch.optim.AdamW, lr=0.01, fused=fused)
    batches = tools.batches([1.0, 1.0, 1e6, 1.0, 1.0])  # the third overflows
    module, rule = Module(tools, lambda net: make(net.parameters())), uc.autoclip(50)
    callback = ClipGradients(rule)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer = fit(module, batches, callback, plugins=plugin)

    net, clipper, shares = tools.Net(), uc.Clipper(rule), []
    optimizer, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.half, cache_enabled=False):
            loss = net(**batch)["loss"]
        scaler.scale(loss).backward()
        grads = [p.grad for p in net.parameters()]
        if all(bool(torch.isfinite(grad).all()) for grad in grads):
            for grad in grads:
                grad.div_(scaler.get_scale())
            shares.append(float(clipper.clip_(grads).scalars()["clip/share"]))
            optimizer.step()
        else:
            scaler.update(scaler.get_scale() / 2)
    assert len(shares) == 4
    tools.same(module.net, net, atol=1e-6)  # the fused kernel rounds otherwise
    assert trainer.callback_metrics["clip/norm"] == pytest.approx(float(clipper.report.norms), rel=1e-4)
    assert trainer.callback_metrics["clip/share"] == pytest.approx(sum(shares) / 4)


def test_bfloat16(tools: Any) -> None:
    """Under autocast to bfloat16 parameters and gradients are float32, and clipped as such."""
    module, callback = Module(tools), ClipGradients(uc.by_global_norm(0.05))
    fit(module, tools.batches([1.0] * 4), callback, precision="bf16-mixed")
    report = callback.handles[0].report
    grads = [p.grad for p in module.net.parameters()]
    assert report.norms.dtype is torch.float32
    assert float(uc.global_norm(grads)) == pytest.approx(0.05)
    assert report.norms > 0.05


def test_closures(tools: Any) -> None:
    """LBFGS evaluates its closure many times, and each time the gradients are clipped."""
    rule, batches = uc.by_global_norm(0.05), tools.batches([1.0] * 3)

    def make(net: Any) -> Any:
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)

    module, net = Module(tools, make), tools.Net()
    fit(module, batches, ClipGradients(rule))
    optimizer = make(net)
    for batch in batches:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = net(**batch)["loss"]
            loss.backward()
            uc.clip_([p.grad for p in net.parameters()], rule)
            return loss

        optimizer.step(closure)
    tools.same(module.net, net)


def test_the_loss_is_seen(tools: Any) -> None:
    """A rule that looks at the loss skips a step whose loss alone is a spike."""
    batches = tools.batches([1.0] * 8)
    batches[5]["shift"] = torch.full((1,), 1e4)
    trainer = fit(Module(tools), batches, ClipGradients(uc.skip_spikes(z=20.0, warmup=4)))
    assert trainer.callback_metrics["clip/skipped"] == pytest.approx(1 / 8)


def test_the_loss_in_manual_optimization(tools: Any) -> None:
    """There the callback's user hands it over: Lightning steps with a closure that returns none."""
    batches, callback = tools.batches([1.0] * 8), ClipGradients([uc.skip_spikes(z=20.0, warmup=4), None])

    class Telling(Manual):
        def training_step(self, batch: Any, number: int) -> None:
            callback.handles[0].loss = torch.tensor(1e4 if number == 5 else 0.1)
            super().training_step(batch, number)

    trainer = fit(Telling(tools, one_per_layer), batches, callback)
    assert trainer.callback_metrics["clip/skipped/0"] == pytest.approx(1 / 8)


def resumed(tools: Any, folder: Path, checkpoint: str, rule: Any) -> Any:
    """Train the second epoch from a checkpoint."""
    module = Module(tools)
    fit(module, tools.batches([1.0] * 8), ClipGradients(rule), max_epochs=2, ckpt_path=folder / checkpoint)
    return module.net


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the rest saves no checkpoints
@pytest.mark.parametrize("rule", [uc.autoclip(50), uc.adagc(warmup=2)], ids=["autoclip", "adagc"])
def test_resume(tools: Any, tmp_path: Path, rule: Any) -> None:
    """A checkpoint of the Trainer holds the rule's state: the run goes on as it would have, and not without it."""
    whole, batches = Module(tools), tools.batches([1.0] * 8)
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(whole, batches, ClipGradients(rule), saving, max_epochs=2, enable_checkpointing=True)
    tools.same(resumed(tools, tmp_path, "epoch=0.ckpt", rule), whole.net)

    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)
    del saved["optimizer_states"][0]["uniclip"]
    torch.save(saved, tmp_path / "forgot.ckpt")
    with pytest.warns(UserWarning, match=r"has no state of uc\.Rule\("):
        anew = resumed(tools, tmp_path, "forgot.ckpt", rule)
    with pytest.raises(AssertionError):
        tools.same(anew, whole.net)


def test_resume_in_one_process(tools: Any, tmp_path: Path) -> None:
    """A checkpoint of ModelParallelStrategy, with the rules' states beside the optimizers', goes on without it."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    whole = Module(tools)
    fit(whole, batches, ClipGradients(rule), max_epochs=2)
    fit(Module(tools), batches, ClipGradients(rule)).save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    saved["uniclip"] = {0: saved["optimizer_states"][0].pop("uniclip")}
    torch.save(saved, tmp_path / "parts.ckpt")
    tools.same(resumed(tools, tmp_path, "parts.ckpt", rule), whole.net)
    callback = ClipGradients(rule)
    callback.on_load_checkpoint(SimpleNamespace(state=SimpleNamespace(fn="test")), None, saved)
    fit(Module(tools), batches, callback)
    assert callback.handles[0].state.count.item() == 8  # what was loaded for another purpose is not gone on from


def test_resume_with_another_layer_frozen(tools: Any, tmp_path: Path) -> None:
    """The state of other layers in a checkpoint is refused by name."""

    class Frozen(Module):
        def __init__(self, number: int) -> None:
            super().__init__(tools)
            self.net = torch.nn.Sequential(*[torch.nn.Linear(1, 1, bias=False) for _ in range(3)])
            self.net[number].requires_grad_(False)

        def training_step(self, batch: Any, _: Any) -> Any:
            return self.net(torch.ones(1, 1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.named_parameters(), lr=0.1)

    batches, rule = tools.batches([1.0] * 2), uc.adagc()
    fit(Frozen(0), batches, ClipGradients(rule)).save_checkpoint(tmp_path / "half.ckpt")
    path = {"max_epochs": 2, "ckpt_path": tmp_path / "half.ckpt"}
    with pytest.raises(ValueError, match=r"norms of grads\[0\]\['1\.weight'\], .* none of grads\[0\]\['0\.weight'\]"):
        fit(Frozen(1), batches, ClipGradients(rule), **path)


def test_saved_after_the_fit(tools: Any, tmp_path: Path) -> None:
    """``trainer.save_checkpoint`` after ``fit`` still finds the rule's state."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    whole, half = Module(tools), Module(tools)
    fit(whole, batches, ClipGradients(rule), max_epochs=2)
    fit(half, batches, ClipGradients(rule)).save_checkpoint(tmp_path / "half.ckpt")
    tools.same(resumed(tools, tmp_path, "half.ckpt", rule), whole.net)


@pytest.mark.filterwarnings("ignore:.*(ckpt_path=None|no last checkpoint)")  # it looks for an earlier file first
def test_saved_on_exception(tools: Any, tmp_path: Path) -> None:
    """The checkpoint of a run that fails holds the rule's state."""
    batches = tools.batches([1.0] * 4)
    del batches[3]["shift"]
    saving = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(TypeError, match="shift"):
        fit(Module(tools), batches, ClipGradients(uc.autoclip(50)), saving, enable_checkpointing=True)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["optimizer_states"][0]["uniclip"]


def test_logged(tools: Any, tmp_path: Path) -> None:
    """A logger gets the numbers of each step, and at the end of the epoch the share of the steps that were clipped."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    logger = CSVLogger(tmp_path)
    fit(Module(tools), batches, ClipGradients(rule), logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    _, reports = tools.by_hand(rule, batches, micro=2)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    for key in ("clip/norm", "clip/limit", "clip/factor"):
        theirs = [float(report.scalars()[key]) for report in reports]
        assert [float(row[key]) for row in rows if row[key]] == pytest.approx(theirs)
    shares = [float(report.scalars()["clip/share"]) for report in reports]
    assert [float(row["clip/share"]) for row in rows if row["clip/share"]] == pytest.approx([sum(shares) / 4])
    assert 0 < sum(shares) < 4


@pytest.mark.parametrize("options", [{"fast_dev_run": 2}, {"barebones": True}], ids=lambda options: next(iter(options)))
@pytest.mark.filterwarnings("ignore:.*barebones")  # what it switches off it says
def test_short_runs(tools: Any, options: Any) -> None:
    """The ways to run a Trainer bare clip, too."""
    bare = dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary"])
    callback, module = ClipGradients(uc.by_global_norm(0.05)), Module(tools)
    fit(module, tools.batches([1.0] * 2), callback, **bare | options)
    assert callback.handles[0].report.norms > 0.05
    assert float(uc.global_norm([p.grad for p in module.net.parameters()])) == pytest.approx(0.05)


class NoReads(TorchDispatchMode):
    """Refuse to read a tensor's value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at each operation."""
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing() -> None:
    """What is logged stays on the device."""
    rule, logged = uc.by_norm(0.05, nonfinite="skip"), {}
    callback = ClipGradients(rule)
    callback.handles = [SimpleNamespace(report=uc.clip([torch.ones(3), torch.ones(2)], rule)[1])]
    callback._names, callback._logged = [""], [None]
    module = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    with NoReads():
        callback.on_train_batch_end(SimpleNamespace(barebones=False), module)
        with pytest.raises(AssertionError):
            float(logged["clip/norm"])
    wanted = {"clip/norm": 3**0.5, "clip/limit": 0.05, "clip/factor": 0.05 / 3**0.5, "clip/norm_max": 3**0.5}
    wanted |= {"clip/share": 1.0, "clip/skipped": 0.0}
    assert {name: float(value) for name, value in logged.items()} == pytest.approx(wanted)


def test_a_rule_without_norms_logs_nothing(tools: Any) -> None:
    """By value there is no norm to show."""
    trainer = fit(Module(tools), tools.batches([1.0] * 2), ClipGradients(uc.by_value(-0.01, 0.01)))
    assert not trainer.callback_metrics


def test_fit_again(tools: Any) -> None:
    """One callback serves one fit after the other, also on an optimizer that it has met, and after an error."""
    net, rule = tools.Net(), uc.autoclip(50)
    optimizer = tools.optimizer(net)
    module = Module(tools, lambda _: optimizer)
    module.net = net
    callback = ClipGradients(rule)
    good = tools.batches([1.0] * 4)
    with pytest.raises(TypeError, match="shift"):
        fit(module, [*good, {"x": good[0]["x"], "factor": good[0]["factor"]}], callback)
    first = callback.handles[0]
    with pytest.warns(UserWarning, match="starts over"):  # the handle that has learned is gone
        fit(module, good, callback)
    assert callback.handles[0] is not first
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert callback.handles[0].state is not first.state


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))],
    ids=["deepcopy", "pickle"],
)
def test_copies(tools: Any, copied: Any) -> None:
    """A callback that has served can be copied, and pickled for other processes; a copy has no handles."""
    callback, batches = ClipGradients(uc.autoclip(50)), tools.batches([1.0] * 4)
    fit(Module(tools), batches, callback)
    other = copied(callback)
    assert len(callback.handles) == 1
    assert not other.handles
    fit(Module(tools), batches, other)
    assert other.handles[0].state.count.item() == 4


def test_clipped_twice_by_the_trainer(tools: Any) -> None:
    """The Trainer's own option as well is refused."""
    with pytest.raises(MisconfigurationException, match="leave gradient_clip_val out"):
        fit(Module(tools), tools.batches([1.0]), ClipGradients(uc.by_global_norm(1.0)), gradient_clip_val=0.5)


def test_clipped_twice_by_attach(tools: Any) -> None:
    """An optimizer that has a rule already is refused."""

    def make(net: Any) -> Any:
        optimizer = tools.optimizer(net)
        attach(optimizer, uc.by_value(-1.0, 1.0))
        return optimizer

    with pytest.raises(ValueError, match=r"clipped already, by uc\.by_value"):
        fit(Module(tools, make), tools.batches([1.0]), ClipGradients(uc.by_global_norm(1.0)))


def test_wrong_number_of_rules(tools: Any) -> None:
    """A list that is too short, or too long, is refused."""
    with pytest.raises(MisconfigurationException, match="1 rules for 2 optimizers"):
        fit(Manual(tools, one_per_layer), tools.batches([1.0]), ClipGradients([uc.by_global_norm(1.0)]))


@pytest.mark.parametrize(
    "rule", [1.0, uc.Clipper(uc.by_norm(1.0)), [1.0], uc.Rule], ids=["number", "clipper", "list", "class"]
)
def test_no_rule(rule: Any) -> None:
    """What is no rule is refused at once."""
    with pytest.raises(TypeError, match="rule must be a rule"):
        ClipGradients(rule)


def test_engines() -> None:
    """A strategy that keeps parts of the gradients to itself is refused."""
    trainer = SimpleNamespace(gradient_clip_val=None, strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match="DeepSpeedStrategy"):
        ClipGradients(uc.by_global_norm(1.0)).on_fit_start(trainer, None)


@pytest.mark.parametrize(
    ("option", "rule", "atol"),
    [
        ({"gradient_clip_val": 0.1}, uc.by_global_norm(0.1), 5e-5),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, uc.by_value(-0.01, 0.01), 0.0),
    ],
    ids=["norm", "value"],
)
def test_migration(tools: Any, option: Any, rule: Any, atol: float) -> None:
    """50 steps with the Trainer's own option lead to the same weights.

    By norm it divides by the norm + 1e-6, and only norms above 0.1: each of 50 steps, of 0.1 · 0.1 / (1 - 0.9) at most,
    may differ by 1e-5 of itself, which sums up to 5e-5. By value it does the same, bit for bit.
    """
    batches = tools.batches([1.0, 3.0] * 25)
    ours, theirs, plain = (Module(tools) for _ in range(3))
    fit(ours, batches, ClipGradients(rule))
    fit(theirs, batches, **option)
    fit(plain, batches)
    tools.same(ours.net, theirs.net, atol=atol)
    with pytest.raises(AssertionError):
        tools.same(ours.net, plain.net, atol=1e-2)


class OwnHook(Module):
    """A module that clips in Lightning's hook."""

    def __init__(self, tools: Any, rule: Any) -> None:
        super().__init__(tools)
        self.clipper = uc.Clipper(rule)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Clip, and log."""
        report = self.clipper.clip_([p.grad for group in optimizer.param_groups for p in group["params"]])
        self.log_dict(report.scalars())

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        """Save the state of the rule."""
        checkpoint["clipper"] = self.clipper.state_dict()

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from it."""
        self.clipper.load_state_dict(checkpoint["clipper"])


def test_the_hook_of_the_module(tools: Any, tmp_path: Path) -> None:
    """A Clipper in ``configure_gradient_clipping`` does as the callback, also from a checkpoint."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    whole, half, rest = (OwnHook(tools, rule) for _ in range(3))
    theirs = Module(tools)
    fit(whole, batches, max_epochs=2)
    fit(theirs, batches, ClipGradients(rule), max_epochs=2)
    tools.same(whole.net, theirs.net)
    trainer = fit(half, batches)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert {"clip/norm", "clip/share"} <= trainer.callback_metrics.keys()
    fit(rest, batches, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    tools.same(rest.net, whole.net)


def test_the_other_package(tools: Any) -> None:
    """A Trainer of pytorch_lightning, which comes with Lightning, takes the callback, too."""
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    module, rule, batches = Other(), uc.autoclip(50), tools.batches([1.0] * 4)
    module.net, module._make = tools.Net(), tools.optimizer
    trainer = pytorch_lightning.Trainer(max_epochs=1, callbacks=[ClipGradients(rule)], **QUIET, **NO_FILES)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    net, reports = tools.by_hand(rule, batches)
    tools.same(module.net, net)
    assert trainer.callback_metrics["clip/norm"] == reports[-1].norms


def test_fabric(tools: Any, tmp_path: Path) -> None:
    """With Fabric an optimizer is attached to as any other, before or after it is set up."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    fabric = Fabric(accelerator="cpu")
    net = tools.Net()
    model, optimizer = fabric.setup(net, tools.optimizer(net))
    handle = attach(optimizer, rule)
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
    hand, reports = tools.by_hand(rule, batches)
    tools.same(net, hand)
    assert handle.report.norms == reports[-1].norms
    fabric.save(tmp_path / "fabric.ckpt", {"optimizer": optimizer})
    assert "uniclip" in torch.load(tmp_path / "fabric.ckpt")["optimizer"]
