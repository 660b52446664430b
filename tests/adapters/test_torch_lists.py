"""Rules attached to a list of optimizers, and steps that go past the attached one."""

from __future__ import annotations

import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer

import uniclip as uc
from adapters.contract import variants
from adapters.on_torch import Combined, Scaled, five, params_of
from adapters.test_torch_several import Joint, JointFused
from kit.devices import patched, refuse
from kit.training import Batch
from uniclip.integrations.torch import attach

SCALING = "_step_supports_amp_scaling"
"""The attribute of optimizers with fused kernels, which a GradScaler looks for."""
RULES = ("by_global_norm", "by_norm", "autoclip", "skip", "skip_spikes", "adagc", "zero")
"""The kinds of rules that the contract of a list is checked with."""
ONE, OTHER = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
"""Gradients of norm 5 and 12, together 13."""


class Loop:
    """What a training loop does with a list of optimizers; no optimizer itself."""

    def __init__(self, *opts: Any) -> None:
        self.optimizers = list(opts)

    def step(self) -> None:
        """Step one after the other."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Remove the gradients of all."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Listed(Joint):
    """The small model under a list of two optimizers."""

    kind = Loop

    def target(self) -> Any:
        """Return the list."""
        return self.inside.optimizers


class ListedFused(Listed):
    """A list of fused optimizers."""

    optimizer = "adam"
    single = JointFused.single


class ListedScaled(Scaled, Listed):
    """A list under a loss scale, which divides the gradients of all before the first step."""

    takes = Listed.takes - {"micro", "record", "bits"} | {"scale"}

    def take_step(self, batch: Batch) -> None:
        """Unscale all, and step one after the other."""
        for optimizer in self.inside.optimizers:
            self.scaler.unscale_(optimizer)
        for optimizer in self.inside.optimizers:
            self.scaler.step(optimizer)


VARIANTS: dict[type[Listed], tuple[str, ...] | None] = {
    Listed: None,
    ListedFused: RULES,
    ListedScaled: ("by_global_norm", "zero", "adagc", "skip", "skip_spikes"),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """A list of optimizers keeps the contract of all integrations."""
    check(make, uc, tmp_path)


def pair(make: Any = None) -> tuple[Any, Any, list[Any]]:
    """Return two parameters, and an optimizer of each."""
    one, other = params_of(ONE, OTHER)
    make = make or partial(SGD, lr=1.0)
    return one, other, [make([one]), make([other])]


@pytest.mark.parametrize("kind", [list, tuple, lambda opts: dict(zip("ab", opts, strict=True))])
def test_one_norm_for_a_list(kind: Any) -> None:
    """The first step of a round clips all gradients, in any order of the steps."""
    one, other, opts = pair()
    handle = attach(kind(opts), uc.zclip(warmup=2))
    for round_, order in enumerate((opts, opts[::-1], opts)):
        one.grad, other.grad = ONE.clone() * (1 + round_), OTHER.clone() * (1 + round_)
        for optimizer in order:
            optimizer.step()
    assert handle.state.norm_count.item() == 3
    assert handle.report.norms.item() == pytest.approx(39)
    assert opts[0].state_dict()["uniclip"]["state"].keys() == handle.state_dict()["state"].keys()
    handle.remove()
    assert all("step" not in vars(optimizer) for optimizer in opts)


@pytest.mark.parametrize("order", [1, -1])
def test_a_saved_state_and_another_order(order: int) -> None:
    """A state is loaded with whichever optimizer has it, and no other one misses it."""
    one, other, opts = pair(partial(SGD, lr=1.0, momentum=0.9))
    handle = attach(opts, uc.zclip(warmup=9))
    for optimizer in opts:
        optimizer.step()
    saved, numbers = [optimizer.state_dict() for optimizer in opts], handle.numbers()
    handle.remove()
    _, _, again = pair(partial(SGD, lr=1.0, momentum=0.9))
    loading = attach(again[::order], uc.zclip(warmup=9))
    for load in ((0, 1), (1, 0)):
        for number in load:
            again[number].load_state_dict(saved[number])
        assert loading.numbers() == numbers
        for optimizer in again:
            optimizer.step()
    assert one.grad is not other.grad


def test_a_skipped_round() -> None:
    """No optimizer of a skipped round steps, and the next round does."""
    one, other, opts = pair(partial(AdamW, lr=1.0))
    attach(opts, uc.by_global_norm(1.0, nonfinite="skip"))
    other.grad.fill_(math.nan)
    for optimizer in opts:
        optimizer.step()
    assert not any(optimizer.state for optimizer in opts)
    one.grad, other.grad = ONE.clone(), OTHER.clone()
    for optimizer in opts:
        optimizer.step()
    assert all(optimizer.state for optimizer in opts)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_list_is_skipped_unread(*, scaled: bool) -> None:
    """On an accelerator each fused kernel of a list skips its own step, and the host reads nothing,
    also with a GradScaler, which sets and deletes the flags of its own.
    """
    rule = uc.by_global_norm(1.0, skip_above=100.0, nonfinite="skip")
    there = {
        "is_cpu": property(lambda tensor: False),
        **dict.fromkeys(("__bool__", "item", "tolist"), refuse),
    }
    sides = [pair(partial(AdamW, lr=0.1, fused=True)) for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in sides]
    attach(sides[0][2], rule)
    for size in (1.0, 50.0, 2.0, math.nan, 1.0):
        for (one, other, opts), scaler in zip(sides, scalers, strict=True):
            scaler.scale(torch.zeros(()))
            one.grad, other.grad = size * ONE * 4, OTHER * 4
            for optimizer in opts:
                scaler.unscale_(optimizer)

        one, other, opts = sides[1]
        if not uc.clip_([one.grad, other.grad], rule).skipped:
            for optimizer in opts:
                optimizer.step()
        with patched(torch.Tensor, **there):
            for optimizer in sides[0][2]:
                (partial(scalers[0].step, optimizer) if scaled else optimizer.step)()
        for scaler in scalers:
            scaler.update(4.0)
        for found, wanted in zip(sides[0][:2], sides[1][:2], strict=True):
            torch.testing.assert_close(found, wanted)
    counts = [[float(opt.state[p]["step"]) for opt in s[2] for p in opt.state] for s in sides]
    assert counts == [[3, 3], [3, 3]]
    assert not any(hasattr(optimizer, "found_inf") for optimizer in sides[0][2])


def test_a_round_after_one_that_was_left() -> None:
    """What is noted of a round that was not finished says nothing of the next one."""
    one, other, opts = pair()
    hooks = [optimizer.register_step_pre_hook(lambda *_: None) for optimizer in opts]
    handle = attach(opts, uc.by_global_norm(2.0))
    opts[0].step()
    for hook in hooks:
        hook.remove()
    one.grad, other.grad = 2 * ONE, 2 * OTHER
    for optimizer in opts:
        optimizer.step()
    assert handle.report.norms.item() == pytest.approx(26)


@pytest.mark.parametrize(
    "rule",
    [
        uc.chain(uc.by_global_norm(1.0, nonfinite="raise"), uc.by_value(-1.0, 1.0)),
        uc.masked(uc.by_global_norm(1.0, nonfinite="raise"), lambda path, leaf: True),
        uc.by_global_norm(1.0, nonfinite="raise"),
    ],
    ids=["chain", "masked", "rule"],
)
def test_an_overflow_on_an_accelerator(rule: Any) -> None:
    """An overflow that a GradScaler has found raises nothing, wherever the policy stands."""
    w = five()
    optimizer = Adam([("w", w)], lr=1.0, fused=True)
    attach(optimizer, rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    w.grad = torch.tensor([math.inf, 1.0])
    scaler.unscale_(optimizer)
    with patched(torch.Tensor, is_cpu=property(lambda tensor: False)):
        scaler.step(optimizer)
    assert not w.any()


def test_a_round_that_was_left() -> None:
    """An optimizer that steps alone begins a round; one that takes turns is refused."""
    one, other, opts = pair()
    handle = attach(opts, uc.by_global_norm(1.0))
    for size in (1.0, 2.0):
        one.grad, other.grad = size * ONE, size * OTHER
        opts[1].step()
    one.grad, other.grad = 3 * ONE, 3 * OTHER
    opts[0].step()
    assert handle.report.norms.item() == pytest.approx(39)
    opts[1].step()
    torch.testing.assert_close(one.detach(), -ONE / 13)

    one.grad, other.grad = ONE.clone(), None
    opts[0].step()
    other.grad = OTHER.clone()
    with pytest.raises(RuntimeError, match="have changed"):
        opts[1].step()


@pytest.mark.parametrize("stateful", [False, True])
def test_gradients_that_are_unscaled_one_by_one(*, stateful: bool) -> None:
    """A loop that unscales each optimizer only before its own step raises: the first step has
    clipped gradients of which some were still scaled.
    """
    one, other, opts = pair()
    attach(opts, uc.norm_growth(1.5) if stateful else uc.by_global_norm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((one * ONE).sum() + (other * OTHER).sum()).backward()
    scaler.unscale_(opts[0])
    scaler.step(opts[0])
    scaler.unscale_(opts[1])
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(opts[1])
    assert not other.any()


@pytest.mark.parametrize("infinite", [0, 1])
@pytest.mark.parametrize("policy", ["propagate", "skip", "zero", "raise"])
def test_an_infinity_under_a_loss_scale(policy: Any, infinite: int) -> None:
    """An infinity in one optimizer skips all, under any policy, and lowers the scale once."""
    *params, opts = pair(partial(Adam, lr=1.0))
    handle = attach(opts, uc.by_global_norm(1.0, nonfinite=policy))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    params[infinite].grad[0] = math.inf
    for optimizer in opts:
        scaler.unscale_(optimizer)
    for optimizer in opts:
        scaler.step(optimizer)
    scaler.update()
    assert not any(optimizer.state for optimizer in opts)
    assert handle.report is None
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_loss_scale_of_a_list(options: dict[str, Any]) -> None:
    """With a GradScaler all are unscaled first, and an infinity in one skips all."""
    one, other, opts = pair(partial(Adam, lr=1.0, **options))
    handle = attach(opts, uc.by_global_norm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    one.grad, other.grad = 1024 * ONE, 1024 * OTHER
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(opts[0])
    assert not one.any()
    scaler.update()

    for grad in (OTHER, OTHER * math.inf):
        one.grad, other.grad = 1024 * ONE, 1024 * grad
        for optimizer in opts:
            scaler.unscale_(optimizer)
        for optimizer in opts:
            scaler.step(optimizer)
        scaler.update()
        assert [
            float(optimizer.state[p]["step"]) for optimizer in opts for p in optimizer.state
        ] == [1, 1]
    handle.remove()
    assert not any("step" in vars(optimizer) for optimizer in opts)
    assert all(hasattr(optimizer, SCALING) == bool(options) for optimizer in opts)


class Around(Optimizer):
    """An optimizer that steps another one of the same parameters."""

    def __init__(self, inside: Any) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure: Any = None) -> None:
        self.inside.step()


def test_steps_past_the_attached_one() -> None:
    """Any other optimizer of the same parameters raises before it moves them."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    kept = optimizer.step
    handle = attach(optimizer, uc.by_global_norm(1.0))
    for step in (kept, SGD([w], lr=1.0).step, Around(optimizer).step):
        with pytest.raises(RuntimeError, match="past the step"):
            step()
    assert not w.any()
    handle.remove()
    kept()
    assert w.tolist() == [-3.0, -4.0]


def test_an_optimizer_that_was_dropped() -> None:
    """An optimizer that nobody uses any more does not stand in the way of the next one."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0))
    gc.disable()
    try:
        optimizer = SGD([w], lr=1.0)
        optimizer.step()
    finally:
        gc.enable()
    assert w.tolist() == [-3.0, -4.0]


def test_clipped_twice() -> None:
    """A step inside of another one that has clipped the same parameters raises."""
    _, _, opts = pair()
    outer = Combined(*opts)
    attach(outer, uc.by_global_norm(1.0))
    attach(opts[0], uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="twice"):
        outer.step()


@pytest.mark.parametrize("is_list", [False, True])
def test_states_that_a_checkpoint_makes(*, is_list: bool) -> None:
    """PyTorch makes the states of optimizers by steps of zeros, which teach the rule nothing."""
    model = torch.nn.Linear(3, 1)
    opts = [AdamW([("weight", model.weight)]), AdamW([("bias", model.bias)])]
    if not is_list:
        opts = [AdamW(model.named_parameters())]
    handle = attach(opts if is_list else opts[0], uc.autoclip())
    before = handle.numbers()
    get_state_dict(model, opts)
    assert all(optimizer.state for optimizer in opts)
    assert handle.numbers() == before
    assert handle.report is None


@pytest.mark.parametrize("is_list", [False, True])
def test_a_state_that_was_loaded_before_that_of_the_optimizer(*, is_list: bool) -> None:
    """A handle that was loaded, as by `torch.distributed.checkpoint`, is not missing later."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(1 + is_list)]

    def made() -> tuple[list[Optimizer], Any]:
        opts: list[Optimizer] = [AdamW([weight]) for weight in weights]
        return opts, attach(opts if is_list else opts[0], uc.zclip(warmup=2))

    def step(opts: list[Optimizer]) -> None:
        for weight in weights:
            weight.grad = torch.ones(2)
        for optimizer in opts:
            optimizer.step()

    opts, handle = made()
    step(opts)
    saved = handle.state_dict(), [optimizer.state_dict() for optimizer in opts]
    for of_optimizer in saved[1]:
        of_optimizer.pop("uniclip", None)
    handle.remove()

    opts, handle = made()
    handle.load_state_dict(saved[0])
    for optimizer, of_optimizer in zip(opts, saved[1], strict=True):
        optimizer.load_state_dict(of_optimizer)
    # A warning would be an error here.
    step(opts)
    assert handle.numbers()["state"]["count"] == [2]
