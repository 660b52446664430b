"""The callback for Lightning's Trainer: what is Lightning's own, beside the contract of all adapters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import uniclip as uc
from adapters.contract import contract
from adapters.trainers import Fed, Looping, Net, by_hand, near, remembers, sgd, tensors
from kit.training import Batch, batches
from uniclip import insight
from uniclip.integrations.lightning import ClipGradients
from uniclip.integrations.torch import attach

pytestmark = [
    # Lightning's own code asks torch.utils._pytree for a class that is to go.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # On one small machine its advice about data loaders, logging and checkpoints does not apply.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
]
BATCHES = [batch for batch in batches() if np.isfinite(batch.targets).all()]


class Module(LightningModule):
    """The small model under automatic optimization."""

    def __init__(self, make: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.net, self.make = Net(), make

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss; a loss scale is what is tested, and no narrow dtype."""
        with torch.autocast("cpu", enabled=False):
            return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Make the optimizer, or several."""
        return self.make(self.net)


class Logged(DummyLogger):
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep it."""
        self.rows.append({name: value for name, value in metrics.items() if name.startswith("clip/")})


def trainer(*callbacks: Any, **options: Any) -> Any:
    """Return a quiet trainer for one epoch."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
    given = {"max_epochs": 1, "enable_checkpointing": False, "log_every_n_steps": 1, **quiet, **options}
    return Trainer(callbacks=list(callbacks), **given)


def fit(module: Any, of: list[Batch], *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    """Train on the batches in each epoch, and return the trainer."""
    made = trainer(*callbacks, **options)
    loader = torch.utils.data.DataLoader([tensors(batch) for batch in of], batch_size=None)
    made.fit(module, loader, ckpt_path=ckpt_path)
    return made


class Fitting(Looping):
    """A fit that goes from batch to batch."""

    takes = frozenset({"loss", "scalars", "record", "save", "memory", "micro", "bits"})
    plugins: Any = None

    def start(self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any) -> None:
        """Make the trainer, which begins with the first batch or a checkpoint."""
        self.micro, self.module, self.logger = micro, Module(), Logged()
        self.net = self.module.net
        self.callback = None if rule is None else ClipGradients(rule, record=record)
        callbacks = [] if self.callback is None else [self.callback]
        options = {"logger": self.logger, "accumulate_grad_batches": micro, "plugins": self.plugins, **options}
        self.trainer = trainer(*callbacks, **options)

    def train(self, fed: Fed, start: Any) -> None:
        """Fit."""
        self.trainer.fit(self.module, fed, ckpt_path=start)

    @property
    def handle(self) -> Any:
        """The handle of the only optimizer."""
        return self.callback.handles[0]

    @property
    def inside(self) -> Any:
        """The only optimizer; before the fit there is none."""
        return next(iter(self.trainer.optimizers), SimpleNamespace(state={}))

    def scalars(self) -> dict[str, float]:
        """Return what the logger got; the means of an epoch are there at its end."""
        found = super().scalars()
        return found | next((row for row in reversed(self.logger.rows) if row), {})

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.trainer.save_checkpoint(folder / "some.ckpt")

    def load(self, folder: Path) -> None:
        """Begin from it."""
        self.begin(folder / "some.ckpt")

    def recall(self, saved: dict[str, Any]) -> None:
        """Begin, so that there is a handle, and give it a memory."""
        self.begin()
        super().recall(saved)


class Scaled(Fitting):
    """With a loss scale, which Lightning makes on accelerators only."""

    takes = frozenset({"scalars", "memory", "scale"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Make the plugin, too."""
        self.plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        super().start(uc, rule, **options)
        self.begin()


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    """End the fits that a check leaves."""
    yield
    Fitting.end_all()


@pytest.mark.parametrize("check", contract(Fitting))
def test_contract(check: Any, tmp_path: Path) -> None:
    """The callback keeps the contract of all adapters."""
    check(Fitting, uc, tmp_path)


@pytest.mark.parametrize("check", contract(Scaled, ()))
def test_scaled(check: Any, tmp_path: Path) -> None:
    """Norms are those of the unscaled gradients, and a step that the scaler leaves out is none."""
    check(Scaled, uc, tmp_path)


OWN = {
    "norm": ({"gradient_clip_val": 0.5}, uc.by_global_norm(0.5)),
    "value": ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, uc.by_value(-0.1, 0.1)),
}


@pytest.mark.parametrize("name", OWN)
def test_own_option(name: str) -> None:
    """50 steps with the Trainer's own clipping lead to the same weights, and to others without it; both are refused."""
    option, rule = OWN[name]
    ours, theirs, plain = (Module() for _ in range(3))
    fit(ours, BATCHES[:5], ClipGradients(rule), max_epochs=10)
    fit(theirs, BATCHES[:5], max_epochs=10, **option)
    fit(plain, BATCHES[:5], max_epochs=10)
    near(ours.net.arrays(), theirs.net.arrays())
    with pytest.raises(AssertionError):
        near(ours.net.arrays(), plain.net.arrays(), 1e-2)
    with pytest.raises(MisconfigurationException, match="leave gradient_clip_val out"):
        fit(Module(), BATCHES[:1], ClipGradients(rule), **option)


def test_logs_of_an_epoch() -> None:
    """At the end of an epoch loggers get the means over its steps, and the largest norm, of this epoch alone."""
    rule, logger = uc.zclip(z=1.0, warmup=2), Logged()
    fit(Module(), BATCHES[:6], ClipGradients(rule), max_epochs=2, logger=logger, accumulate_grad_batches=2)
    joined = [Batch(*map(np.concatenate, zip(*BATCHES[start : start + 2], strict=True))) for start in (0, 2, 4)]
    _, steps = by_hand(rule, joined * 2)
    ends = [row for row in logger.rows if "clip/share" in row]
    for found, epoch in zip(ends, (steps[:3], steps[3:]), strict=True):
        assert found["clip/share"] == pytest.approx(np.mean([step["clip/share"] for step in epoch]))
        assert found["clip/norm_max"] == pytest.approx(max(step["clip/norm"] for step in epoch), rel=1e-4)
    assert {row["clip/share"] for row in ends} != {0.0}


class Seeing(Callback):
    """A callback that looks at the gradients before and after a step."""

    def __init__(self) -> None:
        self.norms: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look before the step."""
        self.before = float(uc.global_norm([p.grad for p in pl_module.parameters()]))

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at what the step before has left."""
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms += [(self.before, float(uc.global_norm(grads)))] if grads else []


def test_other_callbacks() -> None:
    """Whichever comes first, other callbacks see the gradients unclipped before a step, and clipped after it."""
    first, last = Seeing(), Seeing()
    module = fit(Module(), BATCHES[:4], first, ClipGradients(uc.by_global_norm(0.1)), last).lightning_module
    assert first.norms == last.norms
    assert all(before > 0.1 for before, _ in first.norms)
    assert [after for _, after in first.norms] == pytest.approx([0.1] * 3)
    assert float(uc.global_norm([p.grad for p in module.parameters()])) == pytest.approx(0.1)


def two(net: Any) -> list[Any]:
    """Make an optimizer for the bias, and one for the rest."""
    return [torch.optim.Adam([net.b], lr=0.01), torch.optim.Adam([net.table, net.w], lr=0.01)]


class Manual(Module):
    """Two optimizers: one steps at each batch, one at every other; the first rule is told a loss."""

    def __init__(self) -> None:
        super().__init__(two)
        self.automatic_optimization = False
        self.clipping: Any = None

    def training_step(self, batch: Any, number: int) -> None:
        """Step by hand."""
        loss = self.net(**batch)["loss"]
        self.manual_backward(loss)
        if self.clipping is not None:
            self.clipping.handles[0].loss = torch.tensor(1e4 if number == 4 else 0.1)
        for optimizer in self.optimizers()[: 1 + number % 2]:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization() -> None:
    """Each optimizer has a memory, and a name in the logs; a list gives each a rule or none; losses are handed over."""
    rule, module, net = uc.autoclip(50, window=4), Manual(), Net()
    made = fit(module, BATCHES, ClipGradients(rule))
    clippers = [uc.Clipper(rule), uc.Clipper(rule)]
    optimizers = two(net)
    for number, batch in enumerate(BATCHES):
        net(**tensors(batch))["loss"].backward()
        for clipper, optimizer in list(zip(clippers, optimizers, strict=True))[: 1 + number % 2]:
            clipper.clip_([p.grad for p in optimizer.param_groups[0]["params"]])
            optimizer.step()
            optimizer.zero_grad()
    for p, wanted in zip(module.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, wanted)
    for number, clipper in enumerate(clippers):
        assert made.callback_metrics[f"clip/norm/{number}"] == pytest.approx(float(clipper.report.norms), rel=1e-5)
    assert "clip/norm" not in made.callback_metrics
    module = Manual()
    module.clipping = ClipGradients([uc.skip_spikes(z=20.0, warmup=4), None])
    metrics = fit(module, BATCHES, module.clipping).callback_metrics
    assert metrics["clip/skipped/0"] == pytest.approx(1 / len(BATCHES))
    assert not [name for name in metrics if name.endswith("/1")]
    with pytest.raises(MisconfigurationException, match="1 rules for 2 optimizers"):
        fit(Manual(), BATCHES[:1], ClipGradients([rule]))
    with pytest.raises(MisconfigurationException, match="record"):
        fit(Manual(), BATCHES[:1], ClipGradients(rule, record=insight.Recorder("never.jsonl")))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the rest saves no checkpoints
def test_checkpoints(tmp_path: Path) -> None:
    """A run goes on to the bit from any checkpoint, with its record; a state that is not its own is refused."""
    rule = uc.chain(uc.autoclip(50, window=8), uc.adagc(warmup=2))
    whole, half, rest, lost = (Module() for _ in range(4))
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    with insight.Recorder(tmp_path / "run.jsonl", every=4) as record:
        fit(whole, BATCHES, ClipGradients(rule, record=record), saving, max_epochs=2, enable_checkpointing=True)
    fit(half, BATCHES, ClipGradients(rule)).save_checkpoint(tmp_path / "after.ckpt")
    with insight.Recorder(tmp_path / "run.jsonl", every=4) as record:
        given = {"max_epochs": 2, "ckpt_path": tmp_path / "epoch=0.ckpt"}
        fit(rest, BATCHES, ClipGradients(rule, record=record), **given)
    near(rest.net.arrays(), whole.net.arrays(), 0.0)
    assert insight.read(tmp_path / "run.jsonl").steps.tolist() == list(range(1, 2 * len(BATCHES) + 1))
    given["ckpt_path"] = tmp_path / "after.ckpt"
    rest = Module()
    fit(rest, BATCHES, ClipGradients(rule), **given)
    near(rest.net.arrays(), whole.net.arrays(), 0.0)
    with pytest.raises(ValueError, match="another rule"):
        fit(Module(), BATCHES, ClipGradients(uc.zclip()), **given)
    fit(half, BATCHES).save_checkpoint(tmp_path / "without.ckpt")
    given["ckpt_path"] = tmp_path / "without.ckpt"
    with pytest.warns(UserWarning, match="no state of"):
        fit(lost, BATCHES, ClipGradients(rule), **given)


def test_fit_again() -> None:
    """One callback serves one fit after the other, after an error too, and so do its copies and pickles."""
    rule = uc.autoclip(50, window=4)
    callback, module = ClipGradients(rule), Module()
    optimizer = sgd(module.net)
    module.make = lambda _: optimizer
    broken = Batch(BATCHES[0].ids, BATCHES[0].targets[:3])
    with pytest.raises(RuntimeError):
        fit(module, [*BATCHES[:2], broken], callback)
    with pytest.warns(UserWarning, match="starts over"):  # the handle that has learned is gone
        fit(module, BATCHES[:3], callback)
    module.make = sgd
    for other in (callback, copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        fit(Module(), BATCHES[:4], other)
        remembers(other.handles[0].numbers(), by_hand(rule, BATCHES[:4])[0])
    attach(optimizer := sgd(module.net), uc.by_norm(1.0))
    module.make = lambda _: optimizer
    with pytest.raises(ValueError, match="clipped already"):
        fit(module, BATCHES[:1], callback)


def test_refused() -> None:
    """What is no rule is refused at once, a strategy that hides parts of the gradients when it begins."""
    for wrong in (1.0, uc.Clipper(uc.by_norm(1.0)), [1.0], uc.Rule):
        with pytest.raises(TypeError, match="rule"):
            ClipGradients(wrong)
    hiding = SimpleNamespace(gradient_clip_val=None, strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match="DeepSpeedStrategy"):
        ClipGradients(uc.by_norm(1.0)).on_fit_start(hiding, None)


@pytest.mark.filterwarnings("ignore:.*barebones")  # what it switches off it says
def test_ways_to_run() -> None:
    """Under autocast, in a bare run, and in the other package's trainer, a step is clipped."""
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    other = Other()
    other.net, other.make = Net(), sgd
    quiet = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    bare = {"max_epochs": 1, "barebones": True} | dict.fromkeys(["enable_progress_bar", "enable_model_summary"])
    for kind, options, module in (
        (Trainer, {"precision": "bf16-mixed", **quiet}, Module()),
        (Trainer, bare, Module()),
        (pytorch_lightning.Trainer, quiet, other),
    ):
        callback = ClipGradients(uc.by_global_norm(0.05))
        made = kind(accelerator="cpu", callbacks=[callback], enable_checkpointing=False, **options)
        made.fit(module, torch.utils.data.DataLoader([tensors(BATCHES[0])], batch_size=None))
        assert callback.handles[0].report.norms.dtype is torch.float32
        assert float(uc.global_norm([p.grad for p in module.net.parameters()])) == pytest.approx(0.05)
        assert ("clip/norm" in made.callback_metrics) == (options is not bare)


def test_fabric() -> None:
    """With Fabric an optimizer is attached to as any other."""
    fabric, net, rule = Fabric(accelerator="cpu"), Net(), uc.autoclip(50, window=4)
    model, optimizer = fabric.setup(net, sgd(net))
    attach(optimizer, rule)
    for batch in BATCHES:
        optimizer.zero_grad()
        fabric.backward(model(**tensors(batch))["loss"])
        optimizer.step()
    near(net.arrays(), by_hand(rule, BATCHES)[0].weights)
