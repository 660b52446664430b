"""The callback for the Trainer of Hugging Face, against the same steps by hand and the Trainer's own clipping."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import uniclip as uc
from uniclip.integrations.torch import attach
from uniclip.integrations.transformers import ClipGradients

# The number of steps is given, since the batches come as a stream.
pytestmark = pytest.mark.filterwarnings("ignore:max_steps is given, it will override any value given in num_train")


class Stream(torch.utils.data.IterableDataset[Any]):
    """Batches in their order, which the Trainer would otherwise shuffle."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = [{name: value[0] for name, value in batch.items()} for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        """Go through them."""
        return iter(self.batches)


def make_trainer(
    folder: Path, net: Any, batches: list[Any], *callbacks: Any, optimizer: Any = None, **options: Any
) -> Trainer:
    """Make a trainer that takes the batches one by one."""
    steps = len(batches) // options.get("gradient_accumulation_steps", 1)
    defaults = {"lr_scheduler_type": "constant", "logging_steps": 4, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        **{"max_steps": steps, "learning_rate": 0.01, **defaults, **options},
    )
    return Trainer(net, args, train_dataset=Stream(batches), callbacks=list(callbacks), optimizers=(optimizer, None))


@pytest.fixture
def train(tools: Any, tmp_path: Path) -> Any:
    """Return a function that trains the small network with SGD, and returns it and its trainer."""

    def trained(batches: list[Any], *callbacks: Any, resume: Any = None, own: bool = True, **options: Any) -> Any:
        net = tools.Net()
        optimizer = tools.optimizer(net) if own else None
        trainer = make_trainer(tmp_path, net, batches, *callbacks, optimizer=optimizer, **options)
        trainer.train(resume_from_checkpoint=resume)
        return net, trainer

    return trained


def logged(trainer: Trainer, key: str) -> list[float]:
    """Return what was logged about training under a name."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def test_as_by_hand(tools: Any, train: Any, case: Any) -> None:
    """Each rule does, bit for bit, what it does in a loop by hand; a step that it skips is not taken."""
    batches, callback = tools.batches(case.factors), ClipGradients(case.rule)
    net, _ = train(batches, callback)
    hand, reports = tools.by_hand(case.rule, batches, see_loss=False)
    tools.same(net, hand)
    torch.testing.assert_close(tuple(callback.handle.report), tuple(reports[-1]), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [uc.by_global_norm(0.05), uc.autoclip(50)], ids=["global", "autoclip"])
def test_accumulation(tools: Any, train: Any, rule: Any) -> None:
    """Micro-batches are clipped once, when they are all there, and a rule learns from a step, not from each."""
    batches = tools.batches([1.0] * 12)
    net, trainer = train(batches, ClipGradients(rule), gradient_accumulation_steps=3)
    hand, reports = tools.by_hand(rule, batches, micro=3)
    tools.same(net, hand)
    shares = [float(report.scalars()["clip/share"]) for report in reports]
    assert logged(trainer, "clip/share") == pytest.approx([sum(shares) / 4])


def test_bfloat16(tools: Any, train: Any) -> None:
    """Under autocast to bfloat16 parameters and gradients are float32, and clipped as such."""
    callback = ClipGradients(uc.by_global_norm(0.05))
    _, trainer = train(tools.batches([1.0] * 4), callback, bf16=True)
    assert callback.handle.report.norms.dtype is torch.float32
    assert callback.handle.report.norms > 0.05
    assert logged(trainer, "clip/norm") == pytest.approx(logged(trainer, "grad_norm"))


def test_logged(tools: Any, train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The log has the last step's numbers, and the share of the steps since the log before; it is printed, too."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    callback = ClipGradients(rule)
    assert repr(callback) == f"<ClipGradients: {rule!r}, before training>"
    _, trainer = train(batches, callback)
    _, reports = tools.by_hand(rule, batches)
    scalars = [report.scalars() for report in reports]
    for key in ("clip/norm", "clip/limit", "clip/factor"):
        assert logged(trainer, key) == [float(scalars[step][key]) for step in (3, 7)]
    shares = [float(one["clip/share"]) for one in scalars]
    assert logged(trainer, "clip/share") == pytest.approx([sum(shares[:4]) / 4, sum(shares[4:]) / 4])
    norms = [float(one["clip/norm"]) for one in scalars]
    assert logged(trainer, "clip/norm_max") == [max(norms[:4]), max(norms[4:])]
    assert re.search(r"<attach: uc\.Rule\(.*\), \w+ of \d+ parameters, 8 steps, removed>", repr(callback))
    assert 0 < sum(shares) < 8
    assert logged(trainer, "clip/norm") == pytest.approx(logged(trainer, "grad_norm"))
    assert capsys.readouterr().out.count("'clip/share'") == 2


class Reporter(TrainerCallback):
    """Something that sends logs away."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the names."""
        self.seen.append(set(logs))


def test_reporters(tools: Any, train: Any) -> None:
    """A reporter after the callback sees what it logs, one before it does not: the documentation says so."""
    before, after = Reporter(), Reporter()
    train(tools.batches([1.0] * 4), before, ClipGradients(uc.by_global_norm(0.05)), after)
    assert after.seen[0] - before.seen[0] == {"clip/norm", "clip/limit", "clip/factor", "clip/share", "clip/norm_max"}
    assert after.seen[1:] == before.seen[1:]  # the summary at the end is no step's


class NoReads(TorchDispatchMode):
    """Refuse to read a tensor's value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at each operation."""
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing() -> None:
    """What is logged stays on the device until it is logged."""
    callback = ClipGradients(uc.by_norm(0.05, nonfinite="skip"))
    callback.handle = SimpleNamespace(report=uc.clip([torch.ones(3), torch.ones(2)], callback.rule)[1])
    with NoReads():
        callback.on_optimizer_step(None, None, None)
        with pytest.raises(AssertionError):
            float(callback._last["clip/norm"])


def test_max_grad_norm_is_set(tools: Any, tmp_path: Path) -> None:
    """The default is 0 while it trains, without a word, and comes back."""

    class Look(Reporter):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(args.max_grad_norm)

    look = Look()
    trainer = make_trainer(tmp_path, tools.Net(), tools.batches([1.0] * 2), ClipGradients(uc.by_norm(1.0)), look)
    trainer.train()
    assert look.seen[:2] == [0.0, 0.0]
    assert trainer.args.max_grad_norm == 1.0


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_both_would_clip(tools: Any, train: Any, value: float) -> None:
    """Another value than the default is not used, which a warning says."""
    rule, batches = uc.by_global_norm(0.7), tools.batches([1.0] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        net, _ = train(batches, ClipGradients(rule), max_grad_norm=value)
    said = [str(warning.message) for warning in caught if "ClipGradients" in str(warning.message)]
    assert len(said) == (value == 0.5)
    tools.same(net, tools.by_hand(rule, batches)[0])


RESUMED = {"save_strategy": "steps", "save_steps": 4}


@pytest.mark.parametrize("rule", [uc.autoclip(50), uc.adagc(warmup=2)], ids=["autoclip", "adagc"])
def test_resume(tools: Any, train: Any, tmp_path: Path, rule: Any) -> None:
    """A checkpoint of the Trainer holds the rule's state: the run goes on as it would have, and not without it."""
    batches = tools.batches([1.0] * 8)
    whole, _ = train(batches, ClipGradients(rule), **RESUMED)
    middle = tmp_path / "checkpoint-4"
    tools.same(train(batches, ClipGradients(rule), resume=middle)[0], whole)

    path = middle / "trainer_state.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    del saved["stateful_callbacks"]["uniclip"]
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"without the callback, has no state of uc\.Rule\(.*, which starts over"):
        anew, _ = train(batches, ClipGradients(rule), resume=middle)
    with pytest.raises(AssertionError):
        tools.same(anew, whole)


def test_resume_with_other_callbacks(tools: Any, train: Any, tmp_path: Path) -> None:
    """The Trainer may restore its own callbacks from the checkpoint, too, and save once more."""
    rule, batches = uc.autoclip(50), tools.batches([1.0] * 8)
    options = {"metric_for_best_model": "loss", "restore_callback_states_from_checkpoint": True, **RESUMED}
    options |= {"eval_strategy": "no", "load_best_model_at_end": False}

    class Patience(EarlyStoppingCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            """Do not ask for evaluation."""

    whole, _ = train(batches, ClipGradients(rule), Patience(), **options)
    rest, _ = train(batches, ClipGradients(rule), Patience(), resume=tmp_path / "checkpoint-4", **options)
    tools.same(rest, whole)
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))
    assert saved["stateful_callbacks"]["uniclip"]["state"]


def test_resume_from_before(tools: Any, train: Any, tmp_path: Path) -> None:
    """A checkpoint from before the callback was there is gone on from, with a new state, and saved with it."""
    batches = tools.batches([1.0] * 8)
    train(batches, **RESUMED)
    callback = ClipGradients(uc.autoclip(50))
    with pytest.warns(UserWarning, match="saved without the callback"):
        train(batches, callback, resume=tmp_path / "checkpoint-4", **RESUMED)
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))
    assert len(saved["stateful_callbacks"]["uniclip"]["state"]) == len(callback.handle.state)


def test_resume_with_another_rule(tools: Any, train: Any, tmp_path: Path) -> None:
    """The state of another rule is refused."""
    batches = tools.batches([1.0] * 8)
    train(batches, ClipGradients(uc.autoclip(50)), **RESUMED)
    with pytest.raises(ValueError, match="saved state is that of another rule than"):
        train(batches, ClipGradients(uc.adagc()), resume=tmp_path / "checkpoint-4")


def test_resume_with_another_layer(tools: Any, train: Any, tmp_path: Path) -> None:
    """The state of other layers is refused by name; so is that of an old file."""
    batches, rule = tools.batches([1.0] * 8), uc.adagc()
    train(batches, ClipGradients(rule), **RESUMED)
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    entry = saved["stateful_callbacks"]["uniclip"]
    for leaves, message in (
        (
            {"leaves": [["[0]['other']", *entry["leaves"][0][1:]]]},
            r"norms of grads\[0\]\['other'\], which are not here",
        ),
        ({"state": list(entry["state"].values())}, "does not say whose norms it holds"),
    ):
        saved["stateful_callbacks"]["uniclip"] = entry | leaves
        path.write_text(json.dumps(saved), encoding="utf-8")
        with pytest.raises(ValueError, match=message + r".* start over by deleting 'uniclip' from stateful_callbacks"):
            train(batches, ClipGradients(rule), resume=tmp_path / "checkpoint-4")


def test_copies(tools: Any, train: Any) -> None:
    """A callback that has served can be copied and pickled; a copy has no handle."""
    callback = ClipGradients(uc.autoclip(50))
    train(tools.batches([1.0] * 2), callback)
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert other.handle is None
        train(tools.batches([1.0] * 2), other)
        assert other.handle.state.count.item() == 2


def test_train_again(tools: Any, tmp_path: Path) -> None:
    """One callback serves one training after the other, also after an error in the midst of one."""
    net, rule, batches = tools.Net(), uc.by_global_norm(0.05), tools.batches([1.0] * 4)
    callback, optimizer = ClipGradients(rule), tools.optimizer(net)
    failing = [*batches[:3], {name: value for name, value in batches[3].items() if name != "shift"}]
    trainer = make_trainer(tmp_path, net, failing, callback, optimizer=optimizer)
    with pytest.raises(TypeError, match="shift"):
        trainer.train()
    trainer.train_dataset = Stream(batches)
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    assert not optimizer._optimizer_step_pre_hooks
    handle = callback.handle
    trainer.train()
    assert callback.handle is not handle


def test_other_arguments_after_an_error(tools: Any, tmp_path: Path) -> None:
    """Each arguments get their own ``max_grad_norm`` back, also those of a training that failed."""
    callback, (batch,) = ClipGradients(uc.by_norm(1.0)), tools.batches([1.0])
    failing = make_trainer(tmp_path, tools.Net(), [{"x": batch["x"]}], callback, max_steps=1)
    with pytest.raises(TypeError, match="shift"):
        failing.train()
    trainer = make_trainer(tmp_path, tools.Net(), [batch], callback, max_grad_norm=0.0)
    trainer.train()
    assert [failing.args.max_grad_norm, trainer.args.max_grad_norm] == [1.0, 0.0]


def test_no_max_grad_norm(tools: Any, tmp_path: Path) -> None:
    """``None`` comes back, and leaves the optimizer free for the next training."""
    trainer = make_trainer(
        tmp_path, tools.Net(), tools.batches([1.0]), ClipGradients(uc.by_norm(1.0)), max_grad_norm=None
    )
    for _ in range(2):
        trainer.train()
        assert trainer.args.max_grad_norm is None


def test_train_again_after_a_wrong_checkpoint(tools: Any, train: Any, tmp_path: Path) -> None:
    """The trainer that refused the state of another rule can start over."""
    batches = tools.batches([1.0] * 4)
    train(batches, ClipGradients(uc.autoclip(50)), **RESUMED)
    net = tools.Net()
    trainer = make_trainer(tmp_path, net, batches, ClipGradients(uc.adagc()), optimizer=tools.optimizer(net))
    with pytest.raises(ValueError, match="saved state is that of another rule than"):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch", "adamw_torch_fused"])
def test_own_optimizers(tools: Any, train: Any, optim: str) -> None:
    """The Trainer's own optimizers, with their groups for weight decay, are clipped as any."""
    callback = ClipGradients(uc.by_norm(0.01))
    net, trainer = train(tools.batches([1.0] * 4), callback, own=False, optim=optim, weight_decay=0.1)
    assert len(callback.handle.report.norms) == 2
    assert logged(trainer, "clip/share") == [1.0]
    assert logged(trainer, "clip/limit") == pytest.approx([0.01])
    assert not torch.equal(net.layers[0].weight, tools.Net().layers[0].weight)


class InBackward(torch.optim.SGD):
    """An optimizer that has taken the gradients by the time that it steps."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def test_steps_that_are_not_seen(tools: Any, tmp_path: Path) -> None:
    """A step without gradients would be one that nobody clips: it is refused."""
    net = tools.Net()
    optimizer = InBackward(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    trainer = make_trainer(tmp_path, net, tools.batches([1.0] * 2), ClipGradients(uc.by_norm(1.0)), optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"InBackward took a step in which .* saw no gradients"):
        trainer.train()


def test_attached_already(tools: Any, tmp_path: Path) -> None:
    """An optimizer that has a rule already is refused."""
    net = tools.Net()
    optimizer = tools.optimizer(net)
    attach(optimizer, uc.by_value(-1.0, 1.0))
    trainer = make_trainer(tmp_path, net, tools.batches([1.0]), ClipGradients(uc.by_norm(1.0)), optimizer=optimizer)
    with pytest.raises(ValueError, match=r"clipped already, by uc\.by_value"):
        trainer.train()


def test_zero_is_refused(tools: Any, train: Any) -> None:
    """Where one gradient is not finite, the Trainer makes all of them NaN: nothing would be left but zeros."""
    with pytest.raises(ValueError, match='use nonfinite="skip"'):
        train(tools.batches([1.0]), ClipGradients(uc.by_global_norm(1.0, nonfinite="zero")))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines(kind: str) -> None:
    """What keeps parts of the gradients to itself is refused."""
    optimizer = SimpleNamespace(accelerator_state=SimpleNamespace(distributed_type=SimpleNamespace(value=kind)))
    callback = ClipGradients(uc.by_global_norm(1.0))
    with pytest.raises(ValueError, match=f"cannot be used with {kind}"):
        callback.on_train_begin(None, None, None, optimizer=optimizer)


@pytest.mark.parametrize("rule", [1.0, uc.Clipper(uc.by_norm(1.0)), uc.Rule], ids=["number", "clipper", "class"])
def test_no_rule(rule: Any) -> None:
    """What is no rule is refused at once."""
    with pytest.raises(TypeError, match="rule must be a rule"):
        ClipGradients(rule)


def test_migration(tools: Any, train: Any) -> None:
    """50 steps with the Trainer's own option lead to the same weights.

    It divides by the norm + 1e-6, and only norms above 0.1: each of 50 steps, of 0.1 · 0.1 / (1 - 0.9) at most,
    may differ by 1e-5 of itself, which sums up to 5e-5.
    """
    batches = tools.batches([1.0, 3.0] * 25)
    ours, _ = train(batches, ClipGradients(uc.by_global_norm(0.1)))
    theirs, _ = train(batches, max_grad_norm=0.1)
    plain, _ = train(batches, max_grad_norm=0.0)
    tools.same(ours, theirs, atol=5e-5)
    with pytest.raises(AssertionError):
        tools.same(ours, plain, atol=1e-2)
