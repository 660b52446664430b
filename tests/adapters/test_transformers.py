"""The callback for Hugging Face's Trainer: what is special to the Trainer, besides the contract."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

import uniclip as uc
from adapters.contract import contract
from adapters.on_torch import Combined
from adapters.trainers import (
    Fed,
    Looping,
    Net,
    by_hand,
    joint,
    long,
    near,
    remembers,
    sgd,
    short,
    tensors,
)
from kit.pages import run_story
from kit.training import Batch, batches
from uniclip import insight
from uniclip.integrations.torch import attach
from uniclip.integrations.transformers import ClipGradients, ClippedTrainer

# The number of steps is fixed, since the batches are a stream.
pytestmark = pytest.mark.filterwarnings(
    "ignore:max_steps is given, it will override any value given in num_train"
)
BATCHES = [batch for batch in batches() if np.isfinite(batch.targets).all()]


class Feeding(Trainer):
    """A Trainer with a given loader."""

    def __init__(
        self, folder: Path, loader: Any, *callbacks: Any, make: Any = sgd, **options: Any
    ) -> None:
        self.loader, net = loader, Net()
        quiet = {
            "lr_scheduler_type": "constant",
            "disable_tqdm": True,
            "report_to": [],
            "use_cpu": True,
        }
        quiet |= {
            "logging_steps": 1,
            "save_strategy": "no",
            "max_steps": len(loader),
            "ignore_data_skip": True,
        }
        args = TrainingArguments(str(folder), **{**quiet, **options})
        given = (None if make is None else make(net), None)
        super().__init__(net, args, train_dataset=[0], callbacks=list(callbacks), optimizers=given)

    def get_train_dataloader(self) -> Any:
        """Return the given loader."""
        return self.loader

    def logged(self, name: str) -> list[float]:
        """Return the logged values of a name."""
        return [entry[name] for entry in self.state.log_history if name in entry]


def train(
    folder: Path, of: list[Batch], *callbacks: Any, resume: Any = None, **options: Any
) -> Feeding:
    """Train on the batches once, and return the trainer."""
    steps = len(of) // options.get("gradient_accumulation_steps", 1)
    made = Feeding(
        folder, [tensors(batch) for batch in of], *callbacks, **{"max_steps": steps, **options}
    )
    made.train(resume_from_checkpoint=resume)
    return made


class Trained(Looping):
    """A training that is controlled batch by batch."""

    recorded = "transformers"
    takes = frozenset({"scalars", "record", "save", "state", "micro", "bits"})
    left_out = frozenset({"zero", "by_value", "agc"})
    """Rules that keep the finite gradients; the Trainer makes all NaN if one of them is."""
    folder: ClassVar[Path]

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Create the trainer, which starts with the first batch or from a checkpoint."""
        self.micro = micro
        self.callback = None if rule is None else ClipGradients(rule, record=record)
        callbacks = [] if self.callback is None else [self.callback]
        options = {"gradient_accumulation_steps": micro, "max_grad_norm": 0.0, **options}
        self.trainer = Feeding(
            self.folder, Fed(), *callbacks, save_strategy="steps", save_steps=4, **options
        )
        self.net = self.trainer.model

    def train(self, fed: Fed, start: Any) -> None:
        """Train."""
        self.trainer.loader = fed
        self.trainer.train(resume_from_checkpoint=start)

    @property
    def inside(self) -> Any:
        """The optimizer, which Accelerate has wrapped."""
        return self.trainer.optimizer

    def scalars(self) -> dict[str, float]:
        """Return the logged values of one step; the largest norm is that of a window."""
        found = self.trainer.state.log_history[-1].items()
        return {
            name: value
            for name, value in found
            if name.startswith("clip/") and name != "clip/norm_max"
        }

    def save(self, folder: Path) -> None:
        """Do nothing: the Trainer has saved the 4th step."""

    def load(self, folder: Path) -> None:
        """Start from the checkpoint."""
        self.begin(str(self.folder / "checkpoint-4"))

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the callback."""
        return short(self.callback.state_dict())

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state, which the callback uses when it begins."""
        self.callback.load_state_dict(long(saved))
        self.begin()


@pytest.fixture(autouse=True)
def _end(tmp_path: Path) -> Iterator[None]:
    """End the trainings that a check leaves running, and reset the state of Accelerate."""
    Trained.folder = tmp_path / "trainer"
    # The Trainer collects garbage at the end, which takes longer than all its steps.
    gc.freeze()
    yield
    gc.unfreeze()
    Trained.end_all()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


KINDS = ("by_norm", "by_global_norm", "autoclip", "adagc", "skip", "chain")


@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(0.5), uc.autoclip(50, window=4, nonfinite="skip")]
)
def test_several_optimizers_as_one(rule: Any, tmp_path: Path) -> None:
    """Optimizers stepped as one share a norm, and skip a step together."""
    some = batches() if rule.nonfinite == "skip" else BATCHES
    trainer = train(
        tmp_path, some, ClipGradients(rule), make=partial(joint, kind=Combined), max_grad_norm=0.0
    )
    hand, steps = by_hand(rule, some)
    near(trainer.model.arrays(), hand.weights)
    norms = [step["clip/norm"] for step in steps]
    np.testing.assert_allclose(trainer.logged("clip/norm"), norms, rtol=1e-3)


class Saving(Combined):
    """A combination that saves its optimizers, as in the documentation."""

    def state_dict(self) -> Any:  # type: ignore[override]
        """Return the states of the optimizers."""
        return [one.state_dict() for one in self.optimizers]

    def load_state_dict(self, states: Any) -> None:
        """Load the states of the optimizers, and share their new groups."""
        for one, state in zip(self.optimizers, states, strict=True):
            one.load_state_dict(state)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


@pytest.mark.parametrize("mixin", [False, True])
def test_a_state_over_several_optimizers(mixin: bool, tmp_path: Path) -> None:
    """Checkpoints have the rule's state also if it clips for several optimizers as one."""
    rule, wanted = uc.autoclip(50, window=8), by_hand(uc.autoclip(50, window=8), BATCHES[:6])[0]
    saved = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "max_grad_norm": 0.0}
    for of, resume in ((BATCHES[:6], None), (BATCHES[3:6], tmp_path / "checkpoint-3")):
        loader, make = [tensors(batch) for batch in of], partial(joint, kind=Saving)
        if mixin:
            made: Any = Clipping(tmp_path, loader, make=make, rule=rule, **saved)
        else:
            callback = ClipGradients(rule)
            made = Feeding(tmp_path, loader, callback, make=make, **saved)
        made.train(resume_from_checkpoint=resume)
        near(made.model.arrays(), wanted.weights)
        remembers(made.clipping.numbers() if mixin else callback.state_dict(), wanted.clipper)


def test_a_missing_state_over_several_optimizers(tmp_path: Path) -> None:
    """A resumed trainer warns if a checkpoint has no state, and no other trainer uses its rule."""
    make = partial(joint, kind=Saving)
    saved = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "max_grad_norm": 0.0}
    train(tmp_path, BATCHES[:3], make=make, **{**saved, "max_steps": 3})
    loader = [tensors(batch) for batch in BATCHES[3:6]]
    made = Clipping(tmp_path, loader, make=make, rule=uc.autoclip(50, window=8), **saved)
    with pytest.warns(UserWarning, match="no saved state of"):
        made.train(resume_from_checkpoint=tmp_path / "checkpoint-3")

    before = made.clipping.numbers()
    given = made.callback_handler.callbacks
    for callbacks in (given, copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        other = Feeding(tmp_path / "other", loader, make=make, max_steps=3)
        for callback in callbacks:
            other.add_callback(callback)
        other.train()
    assert made.clipping.numbers() == before


@pytest.mark.parametrize("between", ["mixin", "stateless"])
def test_no_old_state_is_loaded(between: str, tmp_path: Path) -> None:
    """A training in between leaves no state of an earlier one in the checkpoints."""
    rule = uc.autoclip(50, window=8)
    saved = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    train(tmp_path, BATCHES[:3], ClipGradients(rule), **saved)

    loader = [tensors(batch) for batch in BATCHES[3:6]]
    if between == "mixin":
        made: Any = Clipping(tmp_path, loader, rule=rule, max_steps=6, **saved)
    else:
        made = Feeding(tmp_path, loader, ClipGradients(uc.by_norm(1.0)), max_steps=6, **saved)
    made.train(resume_from_checkpoint=tmp_path / "checkpoint-3")

    callback = ClipGradients(rule)
    last = partial(train, tmp_path, BATCHES[6:8], callback, max_steps=8, **saved)
    with pytest.warns(UserWarning, match="no saved state of"):
        last(resume=tmp_path / "checkpoint-6")
    assert callback.state_dict()["state"] != {}


@pytest.mark.parametrize("mixin", [False, True])
def test_a_new_rule_for_an_old_checkpoint(tmp_path: Path, *, mixin: bool) -> None:
    """The error of a checkpoint of another rule names ``resume=False``, which begins anew."""
    old, new = uc.zclip(warmup=2), uc.chain(uc.zclip(warmup=2), uc.by_global_norm(1.0))
    options = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0, "max_steps": 6}

    def run(of: list[Batch], rule: Any, start: Any = None, **more: Any) -> Any:
        loader = [tensors(batch) for batch in of]
        if mixin:
            made: Any = Clipping(tmp_path, loader, rule=rule, **more, **options)
            made.train(resume_from_checkpoint=start)
            return made.clipping
        callback = ClipGradients(rule, **more)
        Feeding(tmp_path, loader, callback, **options).train(resume_from_checkpoint=start)
        return callback.handle

    run(BATCHES[:6], old)
    again = partial(run, BATCHES[3:6], new, tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match=r"resume=False"):
        again()
    handle = again(resume=False)
    assert handle.numbers()["state"]["0.count"] == [3]


@pytest.mark.parametrize("check", contract(Trained, KINDS))
def test_contract(check: Any, tmp_path: Path) -> None:
    """The callback keeps the contract of all integrations."""
    check(Trained, uc, tmp_path)


def test_other_rules(tmp_path: Path) -> None:
    """Rules with many norms, and bounds, take the steps of the loop by hand, too.

    "zero" would have no effect.
    """
    rule = uc.chain(uc.by_value(-0.4, 0.4), uc.agc(0.05, axis=0), uc.by_norm(0.3))
    near(
        train(tmp_path, BATCHES, ClipGradients(rule)).model.arrays(),
        by_hand(rule, BATCHES)[0].weights,
    )
    with pytest.raises(ValueError, match='nonfinite="skip"'):
        train(tmp_path, BATCHES, ClipGradients(uc.by_norm(1.0, nonfinite="zero")))


@pytest.mark.parametrize("own", [0.1, None])
def test_own_option(own: float | None, tmp_path: Path) -> None:
    """With a rule the Trainer's own clipping is disabled with a warning."""
    rule, seen = uc.by_global_norm(0.5), Seeing()
    with pytest.warns(UserWarning, match="max_grad_norm=0.1") if own else nullcontext([]) as warned:
        made = train(tmp_path, BATCHES, ClipGradients(rule), seen, max_grad_norm=own)
    assert {one.filename for one in warned} <= {__file__}
    near(made.model.arrays(), by_hand(rule, BATCHES)[0].weights)
    assert set(seen.own) == {0.0}
    assert made.args.max_grad_norm == own


class Seeing(TrainerCallback):
    """A callback that reads the arguments and the logs."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.logs: list[set[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the arguments."""
        self.own.append(args.max_grad_norm)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Store the names."""
        self.logs.append({name for name in logs if name.startswith("clip/")})


def test_logs(tmp_path: Path) -> None:
    """A log has the last step, and means and the largest norm since the log before.

    Later callbacks see it.
    """
    rule, after = uc.autoclip(50, window=4), Seeing()
    made = train(tmp_path, BATCHES[:6], ClipGradients(rule), after, logging_steps=3)
    _, steps = by_hand(rule, BATCHES[:6])
    for number, part in enumerate((steps[:3], steps[3:])):
        wanted = part[-1] | {"clip/share": np.mean([step["clip/share"] for step in part])}
        wanted["clip/norm_max"] = max(step["clip/norm"] for step in part)
        found = {name: made.logged(name)[number] for name in after.logs[number]}
        assert found == pytest.approx(wanted, rel=1e-4)
    assert made.logged("clip/norm") == pytest.approx(made.logged("grad_norm"), rel=1e-4)
    # The summary at the end belongs to no step.
    assert after.logs[2] == set()


def in_tensorboard(folder: Path, name: str) -> list[float]:
    """Return the values that TensorBoard shows."""
    [file] = folder.rglob("events.*")
    shown = EventAccumulator(str(file.parent)).Reload()
    return [event.value for event in shown.Scalars(f"train/{name}")]


@pytest.mark.parametrize("way", ["mixin", "moved", "listed"])
def test_loggers(way: str, tmp_path: Path) -> None:
    """TensorBoard shows the scalars, with each way that the page names."""
    rule, loader = uc.autoclip(50, window=4), [tensors(batch) for batch in BATCHES[:6]]
    options: dict[str, Any] = {"report_to": ["tensorboard"], "logging_steps": 2}
    if way == "mixin":
        made: Any = Clipping(tmp_path, loader, rule=rule, **options)
    elif way == "moved":
        made = Feeding(tmp_path, loader, ClipGradients(rule), **options)
        made.add_callback(made.pop_callback(TensorBoardCallback))
    else:
        callbacks = ClipGradients(rule), TensorBoardCallback()
        made = Feeding(tmp_path, loader, *callbacks, **{**options, "report_to": []})
    made.train()

    _, steps = by_hand(rule, BATCHES[:6])
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    norms = [second["clip/norm"] for _, second in pairs]
    assert in_tensorboard(tmp_path, "clip/norm") == pytest.approx(norms, rel=1e-4)
    shares = [(first["clip/share"] + second["clip/share"]) / 2 for first, second in pairs]
    assert in_tensorboard(tmp_path, "clip/share") == pytest.approx(shares)


@pytest.mark.parametrize("mixin", [False, True])
def test_a_limit_that_does_not_exist(tmp_path: Path, *, mixin: bool) -> None:
    """A limit that does not exist is NaN, a gap in a plot, and not the largest number."""
    rule, loader = uc.zclip(z=1.0, warmup=2), [tensors(batch) for batch in BATCHES]
    if mixin:
        made: Any = Clipping(tmp_path, loader, rule=rule)
    else:
        made = Feeding(tmp_path, loader, ClipGradients(rule))
    made.train()
    _, steps = by_hand(rule, BATCHES)
    for name in ("clip/limit", "clip/threshold"):
        wanted = [step[name] if step[name] < 1e30 else np.nan for step in steps]
        assert made.logged(name) == pytest.approx(wanted, rel=1e-4, nan_ok=True)
        assert np.isnan(wanted).any()
        assert np.isfinite(wanted).any()


class Patient(EarlyStoppingCallback):
    """A callback with a state of its own, which needs no evaluation here."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Skip the checks of the base class."""


def test_checkpoints(tmp_path: Path) -> None:
    """A run continues bit for bit, with the states of other callbacks and with its record.

    The state of another rule is reported.
    """
    rule, again = uc.chain(uc.autoclip(50, window=8), uc.adagc(warmup=2)), tmp_path / "checkpoint-3"
    saved = {
        "save_strategy": "steps",
        "save_steps": 3,
        "restore_callback_states_from_checkpoint": True,
    }
    for of, more in ((BATCHES[:6], {}), (BATCHES[3:6], {"resume": again, "max_steps": 6})):
        with insight.Recorder(tmp_path / "run.jsonl", every=2) as record:
            callbacks = ClipGradients(rule, record=record), Patient()
            made = train(tmp_path, of, *callbacks, metric_for_best_model="loss", **saved, **more)
        near(made.model.arrays(), by_hand(rule, BATCHES[:6])[0].weights)
        assert insight.read(tmp_path / "run.jsonl").steps.tolist() == [1, 2, 3, 4, 5, 6]
    trainer = Feeding(
        tmp_path, [tensors(batch) for batch in BATCHES[3:6]], ClipGradients(uc.zclip())
    )
    with pytest.raises(ValueError, match="a different rule"):
        trainer.train(resume_from_checkpoint=again)
    # The optimizer can be attached to again.
    trainer.train()
    train(tmp_path / "without", BATCHES[:3], **saved)
    with pytest.warns(UserWarning, match="no saved state of"):
        train(
            tmp_path,
            BATCHES[3:6],
            ClipGradients(rule),
            resume=tmp_path / "without" / "checkpoint-3",
            max_steps=6,
        )


def test_where_a_warning_points(tmp_path: Path) -> None:
    """The warning about twenty skipped steps points at the line that starts the training."""
    callback = ClipGradients(uc.by_global_norm(1e-9, skip_above=1e-9))
    with pytest.warns(UserWarning, match="20 steps in a row") as seen:
        train(tmp_path, BATCHES[:5] * 4, callback)
    assert [one.filename for one in seen] == [__file__]


def test_train_again(tmp_path: Path) -> None:
    """One callback serves several trainings, also after an error, and so do copies and pickles."""
    rule = uc.autoclip(50, window=4)
    callback, broken = ClipGradients(rule), Batch(BATCHES[0].ids, BATCHES[0].targets[:3])
    trainer = Feeding(tmp_path, [tensors(batch) for batch in (*BATCHES[:2], broken)], callback)
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.loader = [tensors(batch) for batch in BATCHES[:3]]
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback)), callback):
        assert other is callback or other.handle is None
        train(tmp_path, BATCHES[:4], other)
        remembers(other.state_dict(), by_hand(rule, BATCHES[:4])[0].clipper)
    attach(trainer.optimizer.optimizer, uc.by_norm(1.0))
    with pytest.raises(ValueError, match="clipped already"):
        trainer.train()


class Clipping(ClippedTrainer, Feeding):
    """A custom trainer that clips."""


class Own(Clipping):
    """A trainer that creates its optimizer itself."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer."""
        return self.optimizer


@pytest.mark.parametrize(
    ("rule", "measures"), [(uc.by_norm(0.1), True), (uc.by_value(-0.1, 0.1), False)]
)
def test_the_norm_is_measured_once(
    rule: Any, measures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Trainer logs the rule's norm as its own, and measures one only if the rule has none."""
    made, calls = Clipping(tmp_path, [tensors(batch) for batch in BATCHES[:3]], rule=rule), []
    usual = type(made.accelerator).clip_grad_norm_
    counted = lambda self, *arguments: calls.append(1) or usual(self, *arguments)
    monkeypatch.setattr(type(made.accelerator), "clip_grad_norm_", counted)
    made.train()
    near(made.model.arrays(), by_hand(rule, BATCHES[:3])[0].weights)
    assert len(calls) == (0 if measures else 3)
    assert len(made.logged("grad_norm")) == 3
    assert min(made.logged("grad_norm")) > 0
    assert not measures or made.logged("grad_norm") == made.logged("clip/norm")


def test_names_in_the_mixin(tmp_path: Path) -> None:
    """A trainer that clips uses the names of the model, like the callback."""
    rule = uc.masked(uc.by_global_norm(0.1), lambda path, leaf: path[-1] == "w")
    made = Clipping(tmp_path, [tensors(batch) for batch in BATCHES[:2]], rule=rule)
    made.train()
    near(made.model.arrays(), by_hand(rule, BATCHES[:2])[0].weights)


def test_mixin(tmp_path: Path) -> None:
    """A trainer that clips trains like the callback, also when resumed.

    Its first logger sees the scalars.
    """
    rule, first, saved = (
        uc.autoclip(50, window=4),
        Seeing(),
        {"save_strategy": "steps", "save_steps": 3},
    )
    clipped = {"rule": rule, "max_grad_norm": 0.7, **saved}
    for of, resume in ((BATCHES[:6], None), (BATCHES[3:6], tmp_path / "checkpoint-3")):
        made = Clipping(tmp_path, [tensors(batch) for batch in of], **{"max_steps": 6, **clipped})
        made.callback_handler.callbacks.insert(0, first)
        with pytest.warns(UserWarning, match="max_grad_norm=0.7"):
            made.train(resume_from_checkpoint=resume)
        hand, steps = by_hand(rule, BATCHES[:6])
        near(made.model.arrays(), hand.weights)
        remembers(made.clipping.numbers(), hand.clipper)
        assert made.logged("clip/norm")[-1] == pytest.approx(steps[-1]["clip/norm"], rel=1e-4)
        assert made.args.max_grad_norm == 0.7
    assert first.own == [0.0] * 9
    assert all("clip/norm" in names for names in first.logs[:6])
    assert first.logs[6] == set()
    made.args.max_grad_norm = 0.0
    # The same optimizer, which Accelerate has wrapped.
    made.train()
    with pytest.raises(RuntimeError, match="create_optimizer"):
        Own(tmp_path, [tensors(BATCHES[0])], rule=rule).train()
    for wrong in (1.0, uc.Rule):
        with pytest.raises(TypeError, match="rule"):
            Clipping(tmp_path, [], rule=wrong)
    with pytest.raises(ValueError, match='nonfinite="skip"'):
        Clipping(tmp_path, [tensors(BATCHES[0])], rule=uc.by_norm(1.0, nonfinite="zero")).train()


class InBackward(torch.optim.SGD):
    """An optimizer that has consumed the gradients before it steps."""

    def __init__(self, net: Any) -> None:
        super().__init__(net.parameters(), lr=0.1)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def test_refused(tmp_path: Path) -> None:
    """A value that is no rule is refused at once.

    Engines that hide gradients, and steps that nothing clips, are refused when they begin.
    """
    for wrong in (1.0, uc.Clipper(uc.by_norm(1.0)), uc.Rule):
        with pytest.raises(TypeError, match="rule"):
            ClipGradients(wrong)
    callback = ClipGradients(uc.by_norm(1.0))
    with (
        pytest.warns(UserWarning, match="no parameter had a gradient"),
        pytest.raises(RuntimeError, match="InBackward"),
    ):
        train(tmp_path, BATCHES, callback, make=InBackward)
    state = SimpleNamespace(distributed_type=SimpleNamespace(value="MEGATRON_LM"))
    with pytest.raises(ValueError, match="MEGATRON_LM"):
        callback.on_train_begin(
            None, None, None, optimizer=SimpleNamespace(accelerator_state=state)
        )


def test_deepspeed_makes_its_own_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that clips itself attaches too early for DeepSpeed, and names the callback."""
    trainer = Clipping(tmp_path, [tensors(batch) for batch in BATCHES[:3]], rule=uc.by_norm(1.0))
    state = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"))
    monkeypatch.setattr(trainer, "accelerator", state)
    with pytest.raises(ValueError, match=r"callback ClipGradients\(rule\)"):
        trainer.create_optimizer()


@pytest.mark.parametrize(
    "options", [{"optim": "adafactor"}, {"optim": "adamw_torch_fused"}, {"bf16": True}], ids=str
)
def test_own_optimizers(options: dict[str, Any], tmp_path: Path) -> None:
    """The Trainer's own optimizers, with groups for weight decay, are clipped like any other.

    Under autocast gradients are float32.
    """
    callback = ClipGradients(uc.by_global_norm(0.01))
    made = train(
        tmp_path, BATCHES[:3], callback, make=None, weight_decay=0.1, learning_rate=0.01, **options
    )
    assert callback.handle.report.norms.dtype is torch.float32
    assert made.logged("clip/share") == [1.0] * 3
    assert not np.array_equal(made.model.arrays()["w"], Net().arrays()["w"])


@pytest.mark.parametrize("wide", [1, 4])
def test_only_sound_checkpoints(wide: int, tmp_path: Path) -> None:
    """The recipe of the page saves after taken steps, however often it logs.

    The seventh step is skipped.
    """
    callbacks = run_story("skip-a-step.md", "sound-transformers")["callbacks"]
    train(
        tmp_path,
        batches(),
        *callbacks[::-1],
        save_strategy="steps",
        save_steps=2,
        logging_steps=wide,
    )
    assert sorted(file.name for file in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (2, 4, 6)
    ]
    train(tmp_path / "epoch", batches(), *callbacks, save_strategy="epoch", logging_steps=wide)
    assert not list((tmp_path / "epoch").glob("checkpoint-*"))
