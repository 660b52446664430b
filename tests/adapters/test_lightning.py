"""The callback for Lightning's Trainer: what is special to Lightning, besides the contract."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import uniclip as uc
from adapters.contract import variants
from adapters.on_torch import Combined
from adapters.trainers import Fed, Looping, Net, by_hand, joint, near, remembers, sgd, tensors
from kit.pages import run_story
from kit.training import Batch, batches
from uniclip import insight
from uniclip.integrations.lightning import ClipGradients
from uniclip.integrations.torch import attach

pytestmark = [
    # Lightning's code uses a deprecated class of torch.utils._pytree.
    pytest.mark.filterwarnings(
        "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"
    ),
    # Advice about data loaders, logging and checkpoints does not matter for tests.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings(
        "ignore:The number of training batches .* is smaller than the logging interval"
    ),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
]
BATCHES = [batch for batch in batches() if np.isfinite(batch.targets).all()]


class Module(LightningModule):
    """The small model under automatic optimization, which checks the gradients before each step."""

    def __init__(self, make: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.net, self.make = Net(), make
        self.norms: list[list[float]] = [[], []]

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss; the test is about the loss scale, not about low precision."""
        with torch.autocast("cpu", enabled=False):
            return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Return the optimizer, or several."""
        return self.make(self.net)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Check the gradients after all callbacks."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms[self.trainer.optimizers.index(optimizer)].append(float(uc.global_norm(grads)))


class Logged(DummyLogger):
    """A logger that stores its input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Store the metrics."""
        self.rows.append(
            {name: value for name, value in metrics.items() if name.startswith("clip/")}
        )


QUIET = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)


def trainer(*callbacks: Any, **options: Any) -> Any:
    """Return a quiet trainer for one epoch."""
    given = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1, **QUIET, **options}
    return Trainer(callbacks=list(callbacks), **given)


def loader(of: list[Batch]) -> Any:
    """Return a loader of the batches."""
    return torch.utils.data.DataLoader([tensors(batch) for batch in of], batch_size=None)


def fit(
    module: Any, of: list[Batch], *callbacks: Any, ckpt_path: Any = None, **options: Any
) -> Any:
    """Train on the batches in each epoch, and return the trainer."""
    made = trainer(*callbacks, **options)
    made.fit(module, loader(of), ckpt_path=ckpt_path)
    return made


class Fitting(Looping):
    """A fit that is controlled batch by batch."""

    recorded = "lightning"
    prefix = "net."
    takes = frozenset({"loss", "scalars", "record", "save", "state", "micro", "bits"})
    plugins: Any = None

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Create the trainer, which starts with the first batch or from a checkpoint."""
        self.micro, self.module, self.logger = micro, Module(), Logged()
        self.net = self.module.net
        self.callback = None if rule is None else ClipGradients(rule, record=record)
        callbacks = [] if self.callback is None else [self.callback]
        options = {
            "logger": self.logger,
            "accumulate_grad_batches": micro,
            "plugins": self.plugins,
            **options,
        }
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
        """The only optimizer, which does not exist before the fit."""
        return next(iter(self.trainer.optimizers), SimpleNamespace(state={}))

    def scalars(self) -> dict[str, float]:
        """Return the scalars in the logger since the last log; the largest norm is one of many."""
        row = next((row for row in reversed(self.logger.rows) if row), {})
        return {
            name.removesuffix("_step"): value
            for name, value in row.items()
            if not name.startswith("clip/norm_max")
        }

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.trainer.save_checkpoint(folder / "some.ckpt")

    def load(self, folder: Path) -> None:
        """Start from the checkpoint."""
        self.begin(folder / "some.ckpt")

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Start the fit, so that there is a handle, and load a state."""
        self.begin()
        super().load_rule_state(saved)


class Scaled(Fitting):
    """A fit with a loss scale, which Lightning uses on accelerators only."""

    takes = frozenset({"scalars", "state", "scale"})

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Create the plugin, too."""
        self.plugins = MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)
        )
        super().start(uc, rule, **options)
        self.begin()


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    """End the fits that a check leaves running."""
    yield
    Fitting.end_all()


@pytest.mark.parametrize(("make", "check"), variants({Fitting: None, Scaled: ()}))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """The callback keeps the contract of all integrations."""
    check(make, uc, tmp_path)


def test_logs_of_an_epoch() -> None:
    """At the end of an epoch, loggers get the means and the largest norm of this epoch."""
    rule, logger = uc.zclip(z=1.0, warmup=2), Logged()
    fit(
        Module(),
        BATCHES[:6],
        ClipGradients(rule),
        max_epochs=2,
        logger=logger,
        accumulate_grad_batches=2,
    )
    joined = [
        Batch(*map(np.concatenate, zip(*BATCHES[start : start + 2], strict=True)))
        for start in (0, 2, 4)
    ]
    _, steps = by_hand(rule, joined * 2)
    ends = [row for row in logger.rows if "clip/share" in row]
    for found, epoch in zip(ends, (steps[:3], steps[3:]), strict=True):
        assert found["clip/share"] == pytest.approx(np.mean([step["clip/share"] for step in epoch]))
        assert found["clip/norm_max"] == pytest.approx(
            max(step["clip/norm"] for step in epoch), rel=1e-4
        )
    assert {row["clip/share"] for row in ends} != {0.0}


@pytest.mark.parametrize("micro", [1, 2])
def test_logs_when_the_trainer_does(micro: int) -> None:
    """Between the Trainer's logs nothing is logged, but every step counts in the next log."""
    called: list[int] = []

    class Counting(Module):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            """Store when the module logs."""
            called.append(self.trainer.global_step)
            super().log(name, *args, **kwargs)

    rule, logger = uc.zclip(z=1.0, warmup=2), Logged()
    of = [batch for batch in BATCHES[:5] for _ in range(micro)]
    options = {"log_every_n_steps": 2, "accumulate_grad_batches": micro, "logger": logger}
    made = fit(Counting(), of, ClipGradients(rule), **options)
    _, steps = by_hand(rule, BATCHES[:5])

    assert sorted(set(called)) == [2, 4, 5]
    # The last row is of the whole epoch.
    rows = [row for row in logger.rows if row]
    for row, part in zip(rows, (steps[:2], steps[2:4], steps), strict=True):
        suffix = "" if len(part) == 5 else "_step"
        assert row["clip/norm"] == pytest.approx(part[-1]["clip/norm"], rel=1e-4)
        share = np.mean([step["clip/share"] for step in part])
        assert row[f"clip/share{suffix}"] == pytest.approx(share)
        largest = max(step["clip/norm"] for step in part)
        assert row[f"clip/norm_max{suffix}"] == pytest.approx(largest, rel=1e-4)
    assert made.callback_metrics["clip/norm"] == pytest.approx(steps[-1]["clip/norm"], rel=1e-4)


def test_a_limit_that_does_not_exist() -> None:
    """A limit that does not exist is a gap in a plot, not the largest number, nor the last one."""
    rule, logger = uc.zclip(z=1.0, warmup=2), Logged()
    made = fit(Module(), BATCHES, ClipGradients(rule), logger=logger)
    _, steps = by_hand(rule, BATCHES)
    for name in ("clip/limit", "clip/threshold"):
        # After the rows of the steps there is one of the epoch.
        found = [row[name] for row in logger.rows if row][:-1]
        wanted = [step[name] if step[name] < 1e30 else np.nan for step in steps]
        assert found == pytest.approx(wanted, rel=1e-4, nan_ok=True)
        assert np.isnan(found).any()
        assert np.isfinite(found).any()
    assert float(made.callback_metrics["clip/threshold"]) == pytest.approx(found[-1])


class Manual(Module):
    """Two optimizers, of which the second steps at every other batch, with losses."""

    def __init__(self, clipping: ClipGradients | None) -> None:
        super().__init__(
            lambda net: [torch.optim.Adam([net.b]), torch.optim.Adam([net.table, net.w])]
        )
        self.automatic_optimization = False
        self.clipping = clipping

    def training_step(self, batch: Any, number: int) -> None:
        """Step manually."""
        self.manual_backward(self.net(**batch)["loss"])
        self.clipping.handles[0].loss = torch.tensor(1e4 if number == 4 else 0.1)
        for optimizer in self.optimizers()[: 1 + number % 2]:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization() -> None:
    """Each optimizer has its own state, and its own name in the logs.

    A list assigns a rule, or none, to each; losses are passed on.
    """
    rule = uc.autoclip(50, window=4)
    module = Manual(ClipGradients(rule))
    logged = fit(module, BATCHES, module.clipping).callback_metrics
    assert len(module.norms[0]) > len(module.norms[1])
    for number, handle in enumerate(module.clipping.handles):
        clipper = uc.Clipper(rule)
        for norm in module.norms[number]:
            clipper([np.asarray([norm])])
        remembers(handle.numbers(), clipper)
        for name in ("norm", "limit", "factor"):
            assert logged[f"clip/{name}/{number}"] == pytest.approx(
                clipper.report.scalars()[f"clip/{name}"], rel=1e-5
            )
    assert "clip/norm" not in logged
    module = Manual(ClipGradients([uc.skip_spikes(z=20.0, warmup=4), None]))
    logged = fit(module, BATCHES, module.clipping).callback_metrics
    assert logged["clip/skipped/0"] == pytest.approx(1 / len(BATCHES))
    assert not [name for name in logged if name.endswith("/1")]
    with pytest.raises(MisconfigurationException, match="1 rules for 2 optimizers"):
        fit(Manual(None), BATCHES[:1], ClipGradients([rule]))
    with pytest.raises(MisconfigurationException, match="record"):
        fit(Manual(None), BATCHES[:1], ClipGradients(rule, record=insight.Recorder("never.jsonl")))


class Twice(Module):
    """A module that takes two steps for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        """Step twice."""
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.net(**batch)["loss"])
            self.optimizers().step()


def test_several_steps_for_a_batch() -> None:
    """All steps of a batch count; so do those of an optimizer without a step in this batch."""
    logger = Logged()
    rule = uc.autoclip(50, window=4)
    fit(Twice(), BATCHES[:4], ClipGradients(rule), logger=logger, log_every_n_steps=2)
    _, steps = by_hand(rule, [batch for batch in BATCHES[:4] for _ in range(2)])
    rows = [row for row in logger.rows if "clip/share_step" in row]
    for row, part in zip(rows, (steps[:4], steps[4:]), strict=True):
        share = np.mean([step["clip/share"] for step in part])
        assert row["clip/share_step"] == pytest.approx(share)
        largest = max(step["clip/norm"] for step in part)
        assert row["clip/norm_max_step"] == pytest.approx(largest, rel=1e-4)

    # The second optimizer steps at the second and the fourth batch only.
    logger, module = Logged(), Manual(ClipGradients(uc.by_global_norm(1e-6)))
    fit(module, BATCHES[:4], module.clipping, logger=logger, log_every_n_steps=3)
    row = next(row for row in logger.rows if row)
    assert row["clip/norm/1"] == pytest.approx(module.norms[1][0], rel=1e-4)


# Checkpoints of the rest are not saved.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints(tmp_path: Path) -> None:
    """A run continues bit for bit from any checkpoint, with its record.

    The state of another run is refused.
    """
    rule = uc.chain(uc.autoclip(50, window=8), uc.adagc(warmup=2))

    def run(checkpoint: str | None, *callbacks: Any, rule: Any = rule, **options: Any) -> Any:
        with insight.Recorder(tmp_path / "run.jsonl", every=4) as record:
            start = checkpoint and tmp_path / checkpoint
            clipping = ClipGradients(rule, record=record)
            return fit(
                Module(),
                BATCHES,
                clipping,
                *callbacks,
                ckpt_path=start,
                **{"max_epochs": 2, **options},
            )

    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = run(None, saving, enable_checkpointing=True).lightning_module.net.arrays()
    run(None, max_epochs=1).save_checkpoint(tmp_path / "after.ckpt")
    for checkpoint in ("epoch=0.ckpt", "after.ckpt"):
        near(run(checkpoint).lightning_module.net.arrays(), whole, 0.0)
        assert insight.read(tmp_path / "run.jsonl").steps.tolist() == list(
            range(1, 2 * len(BATCHES) + 1)
        )
    with pytest.raises(ValueError, match="a different rule"):
        run("after.ckpt", rule=uc.zclip())
    fit(Module(), BATCHES).save_checkpoint(tmp_path / "without.ckpt")
    with pytest.warns(UserWarning, match="no saved state of"):
        run("without.ckpt")


def test_where_a_warning_points() -> None:
    """The warning about twenty skipped steps points at the line that starts the fit."""
    callback = ClipGradients(uc.by_global_norm(1e-9, skip_above=1e-9))
    with pytest.warns(UserWarning, match="20 steps in a row") as seen:
        fit(Module(), BATCHES[:5], callback, max_epochs=4)
    assert [one.filename for one in seen if "20 steps" in str(one.message)] == [__file__]


def test_fit_again() -> None:
    """One callback serves several fits, also after an error.

    Its copies and pickles work, and contain no model.
    """
    rule = uc.autoclip(50, window=4)
    callback, module = ClipGradients(rule), Module()
    optimizer = sgd(module.net)
    # An optimizer like this cannot be pickled.
    module.make = lambda _: optimizer
    broken = Batch(BATCHES[0].ids, BATCHES[0].targets[:3])
    with pytest.raises(RuntimeError):
        fit(module, [*BATCHES[:2], broken], callback)
    # The adapted handle no longer exists.
    with pytest.warns(UserWarning, match="no saved state of"):
        fit(module, BATCHES[:3], callback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback)), callback):
        fit(Module(), BATCHES[:4], other)
        remembers(other.handles[0].numbers(), by_hand(rule, BATCHES[:4])[0].clipper)
    attach(optimizer, uc.by_norm(1.0))
    with pytest.raises(ValueError, match="clipped already"):
        fit(module, BATCHES[:1], callback)


@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(0.5), uc.autoclip(50, window=4, nonfinite="skip")]
)
@pytest.mark.filterwarnings("ignore:.*may leave out the state")
def test_several_optimizers_as_one(rule: Any) -> None:
    """Optimizers stepped as one share a norm, and skip a step together."""
    module = Module(partial(joint, kind=Combined))
    logged = fit(module, batches(), ClipGradients(rule)).callback_metrics
    hand, steps = by_hand(rule, batches())
    # Otherwise NaN reaches all of them.
    if rule.nonfinite == "skip":
        near(module.net.arrays(), hand.weights)
        assert logged["clip/skipped"] == pytest.approx(1 / len(steps))
    assert logged["clip/norm"] == pytest.approx(steps[-1]["clip/norm"], rel=1e-4, nan_ok=True)


def test_parameters_outside_of_the_module() -> None:
    """Parameters that the module does not name are clipped, and identified by index."""
    module, callback, outside = (
        Module(),
        ClipGradients(uc.adagc()),
        torch.nn.Parameter(torch.zeros(2)),
    )
    module.make = lambda _: torch.optim.SGD([outside])
    with pytest.warns(UserWarning, match="no parameter had a gradient"):
        fit(module, BATCHES[:1], callback)
    assert callback.handles[0].numbers()["leaves"] == [["[0][0]"]]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_new_rule_for_an_old_checkpoint(tmp_path: Path) -> None:
    """The error of a checkpoint of another rule names ``resume=False``, which begins anew."""
    old, new = uc.zclip(warmup=2), uc.chain(uc.zclip(warmup=2), uc.by_global_norm(1.0))
    path = tmp_path / "old.ckpt"
    fit(Module(), BATCHES[:2], ClipGradients(old)).save_checkpoint(path)
    again = partial(fit, Module(), BATCHES[:2], ckpt_path=path, max_epochs=2)
    with pytest.raises(ValueError, match=r"resume=False"):
        again(ClipGradients(new))
    callback = ClipGradients(new, resume=False)
    again(callback)
    assert callback.handles[0].numbers()["state"]["0.count"] == [2]


def test_refused() -> None:
    """A value that is no rule is refused at once.

    A second clipping, and a strategy that hides gradients, are refused when a fit begins.
    """
    for wrong in (1.0, uc.Clipper(uc.by_norm(1.0)), [1.0], uc.Rule):
        with pytest.raises(TypeError, match="rule"):
            ClipGradients(wrong)
    with pytest.raises(MisconfigurationException, match="leave gradient_clip_val out"):
        fit(Module(), BATCHES[:1], ClipGradients(uc.by_norm(1.0)), gradient_clip_val=0.5)
    hiding = SimpleNamespace(
        gradient_clip_val=None, strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    )
    with pytest.raises(MisconfigurationException, match="DeepSpeedStrategy"):
        ClipGradients(uc.by_norm(1.0)).on_fit_start(hiding, None)


# Barebones warns about what it disables.
@pytest.mark.filterwarnings("ignore:.*barebones")
def test_ways_to_run() -> None:
    """A step is clipped under autocast, in a bare run, and by the other package's trainer.

    Other callbacks see the unclipped gradients.
    """

    class Other(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers
        on_before_optimizer_step = Module.on_before_optimizer_step

    other = Other()
    other.net, other.make, other.norms = Net(), sgd, [[]]
    for kind, options, module in (
        (Trainer, {"precision": "bf16-mixed", **QUIET}, Module()),
        (Trainer, {"barebones": True}, Module()),
        (pytorch_lightning.Trainer, QUIET, other),
    ):
        callback = ClipGradients(uc.by_global_norm(0.05))
        made = kind(accelerator="cpu", callbacks=[callback], max_epochs=1, **options)
        made.fit(module, loader(BATCHES[:1]))
        assert callback.handles[0].report.norms.dtype is torch.float32
        assert float(uc.global_norm([p.grad for p in module.net.parameters()])) == pytest.approx(
            0.05
        )
        assert module.norms[0][0] > 0.05
        assert ("clip/norm" in made.callback_metrics) == ("barebones" not in options)


def test_only_sound_checkpoints(tmp_path: Path) -> None:
    """The recipe of the page saves no checkpoint of an epoch with a skipped step."""

    class InTurn:
        def __iter__(self) -> Iterator[Any]:
            return iter(
                [tensors(batch) for batch in (batches() if made.current_epoch == 1 else BATCHES)]
            )

    page = run_story("skip-a-step.md", "sound-lightning")
    keep = page["KeepSound"](tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    made = trainer(page["clip"], keep, max_epochs=3, enable_checkpointing=True)
    made.fit(Module(), InTurn())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["epoch=0.ckpt", "epoch=2.ckpt"]
