"""Rules attached to PyTorch's optimizers, and the drop-ins for ``torch.nn.utils``."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop

import uniclip as uc
import uniclip.integrations.torch
from adapters.contract import checks, kinds, variants
from kit.training import MOMENTUM, RATE, Arrays, Batch, batches, parts, weights
from uniclip import insight
from uniclip.integrations.torch import (
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from uniclip.saved import renamed


class Attached:
    """A rule attached to an optimizer."""

    takes = frozenset({"loss", "scalars", "record", "save", "refuse", "memory", "micro", "bits"})
    optimizer = "momentum"
    left_out = frozenset[str]()
    own_clipping: ClassVar[MappingProxyType[str, Any]] = MappingProxyType({})
    sparse = False
    make = partial(SGD, lr=RATE, momentum=MOMENTUM)
    handle: Any = None

    def start(self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any) -> None:
        """Begin with the first weights."""
        self.record, self.micro = record, micro
        self.model = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights().items()}
        self.inside = self.make(list(self.model.items()), **options)
        if rule is not None:
            self.handle = attach(self.inside, rule, record=record)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch."""
        rows = functional.embedding(torch.tensor(batch.ids), self.model["table"], sparse=self.sparse)
        errors = rows @ self.model["w"] + self.model["b"] - torch.tensor(batch.targets)
        return (errors**2).mean()

    def backward(self, batch: Batch) -> torch.Tensor:
        """Leave gradients, and return the loss."""
        self.inside.zero_grad()
        total = torch.zeros(())
        for part in parts(batch, self.micro):
            loss = self.loss(part) / self.micro
            loss.backward()
            total += loss.detach()
        return total

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        loss = self.backward(batch)
        if self.handle is not None:
            self.handle.loss = loss
        self.inside.step()

    def weights(self) -> Arrays:
        """Return the weights."""
        return {name: p.detach().numpy().copy() for name, p in self.model.items()}

    def inner(self) -> list[np.ndarray]:
        """Return the tensors of the optimizer's state."""
        states = (self.inside.state[p] for p in self.model.values())
        return [value.numpy().copy() for state in states for value in state.values() if value is not None]

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the handle."""
        return {name: float(value) for name, value in self.handle.scalars().items()}

    def finish(self) -> None:
        """Write the record."""
        self.record.flush()

    def save(self, folder: Path) -> None:
        """Write a file of two states."""
        torch.save({"model": self.model, "optimizer": self.inside.state_dict()}, folder / "checkpoint.pt")

    def load(self, folder: Path) -> None:
        """Read the file, with the default that loads no code."""
        saved = torch.load(folder / "checkpoint.pt")
        self.inside.load_state_dict(saved["optimizer"])
        for name, p in self.model.items():
            p.data.copy_(saved["model"][name])

    def remembered(self) -> dict[str, Any]:
        """Return the state of the handle."""
        return renamed(self.handle.numbers(), lambda name: name.removeprefix("[0]"))

    def recall(self, saved: dict[str, Any]) -> None:
        """Give a state to the handle."""
        self.handle.load_state_dict(renamed(saved, lambda name: f"[0]{name}" if name.startswith("[") else name))


class Fused(Attached):
    """An optimizer whose kernel does all in one."""

    make = partial(SGD, lr=RATE, momentum=MOMENTUM, fused=True)


class FusedAdam(Attached):
    """One whose kernel may leave a step out."""

    optimizer = "adam"
    make = partial(Adam, lr=RATE, fused=True)


class ByClosure(Attached):
    """An optimizer that computes the gradients in its step, and knows the loss by that."""

    takes = Attached.takes - {"micro", "record"}
    optimizer = "adam"
    make = partial(Adam, lr=RATE, foreach=True)

    def step(self, batch: Batch) -> None:
        """Train on a batch, by a positional argument or by keyword."""
        closure = partial(self.backward, batch)
        loss = self.inside.step(closure) if batch.ids[0] % 2 else self.inside.step(closure=closure)
        np.testing.assert_allclose(float(loss), float(self.losses[-1]))

    def backward(self, batch: Batch) -> torch.Tensor:
        """Leave gradients."""
        self.losses = [super().backward(batch)]
        return self.losses[-1]


class Sparse(Attached):
    """A table whose gradients have rows, some of which occur twice."""

    takes = Attached.takes - {"record", "refuse"} | {"rows"}
    optimizer = "sgd"
    sparse = True
    make = partial(SGD, lr=RATE)


class Scaled(Attached):
    """A loss scale, with the gradients unscaled in the step."""

    takes = Attached.takes - {"micro", "record", "refuse", "bits"} | {"scale"}
    unscales = False

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Begin with a scale of 1024."""
        super().start(uc, rule, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.inside.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        if self.handle is not None:
            self.handle.loss = loss.detach()
        if self.unscales:
            self.scaler.unscale_(self.inside)
        self.scaler.step(self.inside)
        self.scaler.update()


class Unscaled(Scaled):
    """A loss scale, with the gradients unscaled before the step."""

    unscales = True


class ScaledFused(Scaled):
    """A loss scale, with a kernel that unscales."""

    optimizer = "adam"
    make = partial(Adam, lr=RATE, fused=True)


class Compiled(Attached):
    """A step that is compiled."""

    takes = Attached.takes - {"loss", "record", "save", "refuse", "micro"}

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Compile the step."""
        super().start(uc, rule, **options)
        torch.compiler.reset()
        self.inside.step = torch.compile(self.inside.step, backend="eager")


FEW = ("by_global_norm", "autoclip", "skip")
VARIANTS: dict[type[Attached], tuple[str, ...] | None] = {
    Attached: None,
    Fused: None,
    FusedAdam: ("by_global_norm", "by_norm", "autoclip", "skip", "zero", "skip_spikes"),
    ByClosure: ("autoclip", "skip", "skip_spikes", "adagc"),
    Sparse: ("by_value", "by_norm", "by_global_norm", "adagc", "skip"),
    Scaled: ("by_global_norm", "by_norm", "zero", "adagc", "skip_spikes"),
    Unscaled: FEW,
    ScaledFused: ("by_global_norm", "by_norm", "autoclip", "zero", "skip", "skip_spikes"),
    Compiled: FEW,
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """What is attached keeps the contract of all adapters, whichever way its optimizer goes."""
    check(make, uc, tmp_path)


class Late(Attached):
    """Forgets to clip in the first step."""

    def start(self, uc: ModuleType, rule: Any, **options: Any) -> None:
        """Do not attach the rule yet."""
        super().start(uc, None, **options)
        self.rule = rule

    def step(self, batch: Batch) -> None:
        """Attach it afterwards."""
        super().step(batch)
        self.handle = self.handle or attach(self.inside, self.rule)


class Twice(Attached):
    """Clips before the step, too."""

    def backward(self, batch: Batch) -> torch.Tensor:
        """Clip by a rule with a memory of its own."""
        loss = super().backward(batch)
        self.first = getattr(self, "first", uc.Clipper(self.handle.rule))
        self.first.clip_({name: p.grad for name, p in self.model.items()})
        return loss


class EachPart(Attached):
    """Clips the gradients of each part of a batch."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Clip what is there before the next part comes."""
        uc.clip_([p.grad for p in self.model.values()], uc.by_global_norm(0.1))
        return super().loss(batch)


class Forgetful(Attached):
    """Does not save what the rule remembers."""

    def save(self, folder: Path) -> None:
        """Leave the rule out."""
        state = self.inside.state_dict()
        del state["uniclip"]
        torch.save({"model": self.model, "optimizer": state}, folder / "checkpoint.pt")


class Trusting(Forgetful):
    """Takes whatever state it is given."""


class Moving(Attached):
    """Decays the weights in a step that is skipped."""

    def step(self, batch: Batch) -> None:
        """Decay them after the step."""
        super().step(batch)
        if self.scalars()["clip/skipped"]:
            self.model["b"].data.mul_(0.9)


class Deaf(Attached):
    """Does not look at the loss."""

    def backward(self, batch: Batch) -> torch.Tensor:
        """Say that the loss is 1."""
        super().backward(batch)
        return torch.ones(())


class AfterClipping(Attached):
    """Shows the norm of what is left."""

    def scalars(self) -> dict[str, float]:
        """Return the norm after clipping."""
        shown = super().scalars()
        return {**shown, "clip/norm": shown["clip/norm"] * shown["clip/factor"]}


BROKEN: dict[type[Attached], str] = {
    Late: "training-by_global_norm",
    Twice: "training-autoclip",
    EachPart: "micro-autoclip",
    Forgetful: "resumed-adagc",
    Trusting: "refused",
    Moving: "training-skip",
    Deaf: "training-skip_spikes",
    AfterClipping: "training-by_norm",
}


@pytest.mark.parametrize(("make", "name"), BROKEN.items(), ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.filterwarnings("ignore")
def test_a_broken_adapter_is_found(make: Any, name: str, tmp_path: Path) -> None:
    """The contract finds what an adapter may get wrong."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        dict(checks(make))[name](make, uc, tmp_path)


# What only PyTorch's optimizers have.


def params_of(*grads: Any) -> list[Any]:
    """Return parameters of zeros with these gradients, copied."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    return params


def grads_of(params: Any) -> list[Any]:
    """Return the gradients."""
    return [p.grad for p in params]


def five() -> Any:
    """Return a parameter whose gradient has the norm 5."""
    return params_of(torch.tensor([3.0, 4.0]))[0]


def layers(count: int = 3, frozen: int | None = None) -> list[tuple[str, Any]]:
    """Return the named parameters of layers, each with a gradient of ones, one of them frozen."""
    params = params_of(*[torch.ones(2, 2) for _ in range(count)])
    if frozen is not None:
        params[frozen].requires_grad_(False).grad = None
    return [(f"{number}.weight", p) for number, p in enumerate(params)]


def started(kind: type[Attached], rule: Any, make: Any) -> Any:
    """Return an adapter with another optimizer."""
    adapter = kind()
    adapter.make = make
    adapter.start(uc, rule)
    return adapter


def same(one: Any, other: Any, **bounds: float) -> None:
    """Require the weights, gradients and moments of two adapters to be equal."""
    for p, q in zip(one.model.values(), other.model.values(), strict=True):
        torch.testing.assert_close((p, p.grad), (q, q.grad), **bounds)
    for p, q in zip(one.inner(), other.inner(), strict=True):
        np.testing.assert_allclose(p, q, rtol=bounds["rtol"], atol=bounds["atol"])


OPTIMIZERS: dict[str, Any] = {
    "rmsprop-foreach": partial(RMSprop, lr=0.1, foreach=True),
    "adam-amsgrad": partial(Adam, lr=0.1, amsgrad=True, weight_decay=0.1),
    "fused-adagrad": partial(Adagrad, lr=0.1, fused=True),
    "fused-adamw-maximize": partial(AdamW, lr=0.1, maximize=True, fused=True),
    "fused-sgd-nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: Any) -> None:
    """Each steps as if clipped by hand; ``.grad`` holds the clipped gradients, and nothing else stays behind."""
    zeroing = uc.by_norm(0.3, nonfinite="zero")
    for rule in (uc.by_global_norm(0.5), uc.autoclip(50, window=4, nonfinite="skip"), zeroing):
        one, other = started(Attached, rule, make), started(Attached, None, make)
        clipper, before = uc.Clipper(rule), sorted(vars(one.inside))
        for batch in batches():
            one.step(batch)
            other.backward(batch)
            clipper.clip_([p.grad for p in other.model.values()])
            assert all(p.grad is not None for p in one.model.values())
            if not clipper.report.skipped:
                other.inside.step()
                if clipper.report.finite or rule is zeroing:
                    same(one, other, rtol=2e-5, atol=2e-6)
        assert sorted(vars(one.inside)) == before


def test_lbfgs() -> None:
    """It computes gradients again and again in its step; each time they are clipped before it looks."""
    rule = uc.by_global_norm(0.2, nonfinite="skip")
    make = partial(LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    one, other = started(Attached, rule, make), started(Attached, None, make)

    def by_hand(batch: Batch) -> torch.Tensor:
        loss = other.backward(batch)
        uc.clip_([p.grad for p in other.model.values()], rule)
        return loss

    for batch in batches()[:3]:
        losses = one.inside.step(partial(one.backward, batch)), other.inside.step(partial(by_hand, batch))
        torch.testing.assert_close(*losses, rtol=0, atol=0)
        for p, q in zip(one.model.values(), other.model.values(), strict=True):
            torch.testing.assert_close((p, p.grad), (q, q.grad), rtol=0, atol=0)
    before = one.weights()
    one.inside.step(partial(one.backward, batches()[-2]))  # with NaN
    np.testing.assert_equal(one.weights(), before)


def test_a_loss_scale_and_raise() -> None:
    """What a GradScaler skips by itself is no error; what would reach the parameters is one."""
    one = started(Scaled, uc.by_global_norm(1.0, nonfinite="raise"), partial(AdamW, fused=True))
    before = one.weights()
    one.step(batches()[-2])
    np.testing.assert_equal(one.weights(), before)
    one.backward(batches()[-2])
    with pytest.raises(FloatingPointError, match=r"grads\[0\]\['b'\]"):
        one.inside.step()
    np.testing.assert_equal(one.weights(), before)


def test_scaled_gradients_in_float16() -> None:
    """They are not unscaled in place, where small ones would be lost."""
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = SGD([w], lr=1.0, fused=True)
    attach(optimizer, uc.by_norm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(w.float() @ torch.tensor([3.0, 0.0, 1e-6])).backward()
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)
    assert not w.any()


@pytest.mark.parametrize("fused", [False, True])
def test_shared_and_absent_gradients(fused: bool) -> None:
    """A gradient of two parameters counts once and is scaled once, an absent one stays absent."""
    a, b, unused, frozen = params_of(*[torch.tensor([3.0, 4.0])] * 4)
    b.grad, unused.grad = a.grad, None
    frozen.requires_grad_(False).grad = None
    optimizer = SGD([{"params": [a, unused]}, {"params": [frozen, b]}], lr=1.0, fused=fused)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    assert handle.report.norms.item() == 5
    torch.testing.assert_close([a.detach(), b.detach()], [torch.tensor([-0.6, -0.8])] * 2)
    assert unused.grad is None
    optimizer.zero_grad()
    optimizer.step()  # with nothing to clip
    assert not unused.any()


@pytest.mark.parametrize("name", [name for name in kinds(uc) if "skip" not in name])
def test_no_value_is_read(name: str) -> None:
    """A step reads no value, which would wait for an accelerator: there are none on the meta device."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in ((3, 2), (2,))]
    optimizer = Adam(params)
    handle = attach(optimizer, kinds(uc)[name].rule)
    for _ in range(3):
        for p in params:
            p.grad = torch.empty_like(p)
        handle.loss = torch.empty((), device="meta")
        optimizer.step()
    assert all(value.is_meta for value in handle.scalars().values())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: attach([], uc.by_norm(1.0)), TypeError, "torch.optim.Optimizer"),
    "model": (lambda: attach(torch.nn.Linear(1, 1), uc.by_norm(1.0)), TypeError, r"attach\("),
    "swapped": (lambda: attach(uc.by_norm(1.0), SGD([five()])), TypeError, r"attach\(optimizer, rule\)"),
    "not called": (lambda: attach(SGD([five()]), uc.by_norm), TypeError, "call it"),
    "number": (lambda: attach(SGD([five()]), 1.0), TypeError, "uc.by_global_norm"),
    "limit": (lambda: attach(SGD([five()]), uc.limits.Constant(1.0)), TypeError, r"uc\.Rule\("),
    "clipper": (lambda: attach(SGD([five()]), uc.Clipper(uc.by_norm(1.0))), TypeError, "uc.Clipper"),
    "examples": (
        lambda: attach(SGD([five()]), uc.chain(uc.by_value(-1, 1), uc.auto_s())), ValueError, "uc.clip_and_sum"
    ),
    "derivatives": (
        lambda: attach(SGD([five()], differentiable=True), uc.by_norm(1.0)), ValueError, "uc.clip"
    ),
    "record": (lambda: attach(SGD([five()]), uc.by_norm(1.0), record="run.jsonl"), TypeError, "record"),
}  # fmt: skip


class Wrapper(torch.optim.Optimizer):
    """A wrapper as Accelerate's is: an optimizer by its class, with the real one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_one_rule_for_each_optimizer() -> None:
    """A second rule is refused, through wrappers, too; after ``remove`` the optimizer is as it was."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    attach(Wrapper(Wrapper(optimizer)), uc.by_global_norm(1.0)).remove()
    handle = attach(optimizer, uc.autoclip())
    for again in (optimizer, Wrapper(optimizer)):
        with pytest.raises(ValueError, match=r"remove\(\)"):
            attach(again, uc.by_global_norm(1.0))
    assert "uniclip" in optimizer.state_dict()
    handle.remove()
    assert "uniclip" not in optimizer.state_dict()
    optimizer.step()
    assert w.tolist() == [-3, -4]
    again = attach(optimizer, uc.by_global_norm(1.0))
    handle.remove()
    Wrapper(optimizer).step()
    assert again.report.norms.item() == 5
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))


def test_copies() -> None:
    """A copy of an optimizer has no rule, a handle has no copies, and neither keeps an optimizer alive."""
    optimizer = Adam([five()], fused=True)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    copied = copy.deepcopy(optimizer)
    (w,) = copied.param_groups[0]["params"]
    w.grad = torch.tensor([3.0, 4.0])
    copied.step()
    assert w.grad.tolist() == [3, 4]
    attach(copied, uc.by_global_norm(1.0))
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="attach"):
            way(handle)
    alive = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_after_a_step_that_failed(nonfinite: Any) -> None:
    """What it left behind does not reach the next one."""
    rule = uc.by_global_norm(0.5, nonfinite=nonfinite)
    one, other = (started(Attached, rule, partial(AdamW, fused=True)) for _ in range(2))

    def fail(*_: Any) -> None:
        raise RuntimeError

    hook = one.inside.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError):
        one.step(batches()[-2 if nonfinite == "skip" else 0])
    hook.remove()
    for adapter in (one, other):
        adapter.step(batches()[1])
    same(one, other, rtol=0, atol=0)


class Nested(SGD):
    """An optimizer whose step is two of PyTorch's: hooks run around all three."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_inside_a_step(closure: bool) -> None:
    """A class that calls ``super().step()`` is clipped once, and its step skipped as a whole."""
    w = torch.nn.Parameter(torch.zeros(2))
    SGD([w])  # PyTorch puts hooks into the classes of which there has been one
    optimizer = Nested([w], lr=0.5)
    handle = attach(optimizer, uc.autoclip(percentile=50, nonfinite="skip"))

    def evaluate(norm: float) -> None:
        w.grad = torch.tensor([norm, 0.0])

    for norm in (1.0, 3.0, 50.0, math.nan):
        if closure:
            optimizer.step(partial(evaluate, norm))
        else:
            evaluate(norm)
            optimizer.step()
    assert bool(handle.report.skipped)
    torch.testing.assert_close(w.detach(), torch.tensor([-1.0 - 2.0 - 3.0, 0.0]))


def test_schedulers() -> None:
    """A scheduler of the learning rate goes with it, in any order, without a warning."""
    for scheduler_first in (True, False):
        w = five()
        optimizer, schedule = SGD([w], lr=1.0), partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
        scheduler = schedule(optimizer) if scheduler_first else None
        attach(optimizer, uc.by_global_norm(1.0))
        scheduler = scheduler or schedule(optimizer)
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(w.detach(), torch.tensor([-0.9, -1.2]))


def test_groups_that_are_added_later() -> None:
    """They are clipped with the others, unless the rule remembers each parameter."""
    for rule in (uc.by_global_norm(0.5), uc.autoclip(50, window=4), uc.adagc()):
        first, second = five(), five()
        optimizer = SGD([first])
        handle = attach(optimizer, rule)
        optimizer.add_param_group({"params": [second]})
        if rule.by_leaf:
            with pytest.raises(ValueError, match="2"):
                optimizer.step()
        else:
            optimizer.step()
            assert handle.report.norms.item() == pytest.approx(math.sqrt(50))


def test_groups_and_names() -> None:
    """Paths are those of groups and names, also in errors; equal names, which PyTorch allows, are two parameters."""
    a, b = five(), five()
    optimizer = SGD([{"params": [("a", a)]}, {"params": [("b", b)]}], lr=1.0)
    handle = attach(optimizer, uc.by_group_norm({(0, "a"): 1.0, (1, "b"): 2.0}, lambda path, leaf: path))
    optimizer.step()
    torch.testing.assert_close([a.grad, b.grad], [torch.tensor([0.6, 0.8]), torch.tensor([1.2, 1.6])])
    handle.remove()
    for named, place in (("b", r"grads\[1\]\['b'\]"), (0, r"grads\[1\]\[0\]")):
        groups = [[five()], [five()]] if named == 0 else [[("a", five())], [("b", five())]]
        optimizer = SGD([{"params": group} for group in groups])
        attach(optimizer, uc.by_global_norm(1.0, nonfinite="raise"))
        optimizer.param_groups[1]["params"][0].grad[1] = math.nan
        with pytest.raises(FloatingPointError, match=place):
            optimizer.step()
    optimizer = SGD([("w", five()), ("w", five())])
    handle = attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    assert handle.report.norms.item() == pytest.approx(math.sqrt(50))


@pytest.mark.parametrize("closure", [False, True])
def test_a_loss_is_for_one_step(closure: bool) -> None:
    """The loss of the handle is for the next step only; a closure without a result leaves it as it is."""
    optimizer = SGD([five()])
    handle = attach(optimizer, uc.skip_spikes(window=4, warmup=2))
    for loss in (1.0, 1.1, 1.05, 99.0):
        handle.loss = torch.tensor(loss)
        optimizer.step((lambda: None) if closure else None)
        assert handle.loss is None
        assert bool(handle.report.skipped) == (loss == 99)


def test_a_state_of_other_layers() -> None:
    """It is refused by name; neither the optimizer nor the rule has changed then, nor if PyTorch refuses the rest."""
    saving = Adam(layers(frozen=1))
    source = attach(saving, uc.adagc())
    saving.step()
    saved = saving.state_dict()
    optimizer = Adam(layers(frozen=2))
    handle = attach(optimizer, uc.adagc())
    before = handle.numbers()
    with pytest.raises(ValueError, match=r"1\.weight(.|\n)*2\.weight|2\.weight(.|\n)*1\.weight"):
        optimizer.load_state_dict(saved)
    fitting = Adam(layers(frozen=1))
    other = attach(fitting, uc.adagc())
    first = other.numbers()
    with pytest.raises(ValueError, match="parameter groups"):
        fitting.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    assert (handle.numbers(), other.numbers()) == (before, first)
    assert not optimizer.state
    assert not fitting.state
    fitting.load_state_dict(saved)
    saved["uniclip"]["state"]["averages"].fill_(7.0)  # what was saved is a copy, and what was loaded too
    assert other.numbers() == source.numbers() != first
    assert 7.0 not in source.numbers()["state"]["averages"]


def test_a_state_dict_in_two_parts() -> None:
    """The rule's part may come later; a step without it is what a warning is for, also if it is attached late."""
    saving = Adam(layers())
    attach(saving, uc.autoclip())
    saving.step()
    saved = saving.state_dict()
    rest = {name: saved[name] for name in ("state", "param_groups")}
    optimizer = Adam(layers())
    handle = attach(optimizer, uc.autoclip())
    optimizer.load_state_dict(rest)
    handle.load_state_dict(saved["uniclip"])
    optimizer.step()
    optimizer.load_state_dict(rest)
    with pytest.warns(UserWarning, match="attach the rule first"):
        optimizer.step()
    optimizer.step()
    late = Adam(layers())
    late.load_state_dict(saved)  # which one without a rule can read
    with pytest.warns(UserWarning, match="attach the rule first"):  # then, or at its first step
        (attach(late, uc.autoclip()), late.step())
    attach(SGD(layers()), uc.autoclip())
    stateless = Adam(layers())
    stateless.load_state_dict(saved)
    attach(stateless, uc.by_norm(1.0))
    stateless.step()


def test_a_record_of_leaves(tmp_path: Path) -> None:
    """It has the norms before clipping by the names of leaves, and is written when the optimizer is saved."""
    path = tmp_path / "run.jsonl"
    record = insight.Recorder(path, every=100, leaves="all")
    optimizer = SGD([("a", five()), ("none", five()), ("c", params_of(torch.tensor([[12.0]]))[0])])
    optimizer.param_groups[0]["params"][1].grad = None
    attach(optimizer, uc.by_norm(0.1), record=record)
    optimizer.step()
    optimizer.state_dict()
    found = insight.read(path)
    record.close()
    np.testing.assert_allclose(found.leaves, [[5.0, math.nan, 12.0]])
    assert [label.strip("[]0'") for label in found.labels] == ["a", "none", "c"]


# The functions of ``torch.nn.utils``.
CALLS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1.0),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1.0),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, 5.0),
    "get_total_norm": get_total_norm,
}


def test_the_four_functions() -> None:
    """Each does to ``.grad`` what its name says, and returns what PyTorch's returns."""
    w = five()
    norm = clip_grad_norm_([w], 1.0, foreach=True)
    torch.testing.assert_close((norm, w.grad), (torch.tensor(5.0), torch.tensor([0.6, 0.8])))
    assert type(norm) is torch.Tensor
    assert get_total_norm([torch.tensor([3.0]), None, torch.tensor([[4.0]])], foreach=False).item() == 5
    assert clip_grad_value_([w], torch.tensor(0.7), foreach=None) is None
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.7]))
    for known in (10.0, torch.tensor(10.0)):
        w = five()
        assert clip_grads_with_norm_([w], torch.tensor(1.0), known, foreach=True) is None
        torch.testing.assert_close(w.grad, torch.tensor([0.3, 0.4]))
    for known in (math.nan, torch.tensor(math.nan)):
        clip_grads_with_norm_([w], 1.0, known)
        assert w.grad.isnan().all()


GIVEN: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda w: w,
    "generator": lambda w: (p for p in [w]),
    "ParameterList": lambda w: torch.nn.ParameterList([w]),
    "twice": lambda w: [w, w],
    "frozen beside it": lambda w: [w, torch.nn.Parameter(torch.ones(3), requires_grad=False)],
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("limit", [1.0, torch.tensor(1.0), torch.tensor([1])], ids=["number", "0-d", "whole"])
def test_what_parameters_and_limits_can_be(name: str, limit: Any) -> None:
    """Parameters in any iterable, one that occurs twice once; limits as numbers or tensors of one."""
    w = five()
    assert clip_grad_norm_(GIVEN[name](w), limit).item() == 5
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("name", CALLS)
def test_without_parameters(name: str) -> None:
    """The norm of nothing is 0; a generator that was read before is a warning where the user's code is."""
    for given in ([], (), [torch.nn.Parameter(torch.zeros(2))] * (name != "get_total_norm")):
        norm = CALLS[name](given)
        assert torch.equal(norm, torch.tensor(0.0)) if name in {"clip_grad_norm_", "get_total_norm"} else norm is None
    for make in (torch.nn.ReLU().parameters, lambda: iter([])):
        with pytest.warns(UserWarning, match="empty") as seen:
            assert not CALLS[name](make())
        assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "get_total_norm"])
def test_gradients_instead_of_parameters(name: str) -> None:
    """Tensors that can have no gradient are refused: PyTorch clips none of them, and returns 0."""
    w = torch.nn.Parameter(torch.ones(2))
    grads = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    for given in (five().grad, [five().grad], grads, [w.detach()]):
        with pytest.raises(TypeError, match=r"uc\.clip_\("):
            CALLS[name](given)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite(bad: float) -> None:
    """Everything becomes NaN; with ``error_if_nonfinite`` nothing changes, and the error names the gradient."""
    grads = [torch.ones(2), torch.tensor([1.0, bad])]
    params = params_of(*grads)
    for call in (
        lambda: clip_grad_norm_(params, 1.0, error_if_nonfinite=True),
        lambda: get_total_norm(grads_of(params), error_if_nonfinite=True),
    ):
        with pytest.raises(FloatingPointError, match=r"grads\[1\]") as raised:
            call()
        assert isinstance(raised.value, RuntimeError)  # as PyTorch's
    torch.testing.assert_close(grads_of(params), grads, rtol=0, atol=0, equal_nan=True)
    assert not get_total_norm(grads_of(params)).isfinite()
    assert not clip_grad_norm_(params, 1.0).isfinite()
    assert all(grad.isnan().all() for grad in grads_of(params))


def test_sparse_gradients() -> None:
    """They stay sparse, and rows that occur twice are summed; PyTorch raises."""
    rows = torch.sparse_coo_tensor([[0, 2, 2]], [[3.0, 0.0], [0.0, 1.0], [0.0, 3.0]], (4, 2), check_invariants=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        compressed = torch.tensor([[0.0, 12.0], [0.0, 0.0]]).to_sparse_csr()
    w, v = torch.nn.Parameter(torch.zeros(4, 2)), torch.nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
    w.grad, v.grad = rows.clone(), compressed
    assert clip_grad_norm_([w, v], 6.5).item() == pytest.approx(13)
    assert (w.grad.layout, v.grad.layout) == (torch.sparse_coo, torch.sparse_csr)
    torch.testing.assert_close(w.grad.to_dense(), rows.to_dense() / 2)
    clip_grad_value_([w], 1.75)
    torch.testing.assert_close(w.grad.to_dense(), (rows.to_dense() / 2).clip(-1.75, 1.75))


def test_gradients_with_a_graph() -> None:
    """Those of ``create_graph=True`` are clipped outside of the graph, as PyTorch does."""
    w = torch.nn.Parameter(torch.tensor([1.5, 2.0]))
    (w.grad,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    norm = clip_grad_norm_(w, 1.0)
    assert (norm.item(), norm.requires_grad) == (5, False)
    torch.testing.assert_close(w.grad.detach(), torch.tensor([0.6, 0.8]))
    w.grad = None  # its graph keeps itself alive


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "names": (
        lambda: clip_grad_norm_(torch.nn.Linear(2, 1).named_parameters(), 1.0), TypeError, r"model\.parameters\(\)"
    ),
    "groups": (lambda: clip_grad_value_(SGD([five()]).param_groups, 1.0), TypeError, r"model\.parameters\(\)"),
    "module": (lambda: clip_grad_norm_(torch.nn.Linear(2, 1), 1.0), TypeError, r"model\.parameters\(\)"),
    "swapped": (lambda: clip_grad_norm_(1.0, [five()]), TypeError, "parameters"),
    "numbers": (lambda: get_total_norm([1.0]), TypeError, "tensors"),
    "negative": (lambda: clip_grad_norm_([five()], -1.0), ValueError, "max_norm"),
    "NaN": (lambda: clip_grad_norm_([five()], math.nan), ValueError, "max_norm"),
    "negative tensor": (lambda: clip_grad_norm_([five()], torch.tensor(-2.0)), ValueError, "max_norm"),
    "text": (lambda: clip_grad_norm_([five()], "1"), TypeError, "max_norm"),
    "negative value": (lambda: clip_grad_value_([five()], -1.0), ValueError, "clip_value"),
    "order in words": (lambda: clip_grad_norm_([five()], 1.0, "fro"), TypeError, "norm_type"),
    "order below 1": (lambda: clip_grad_norm_([five()], 1.0, 0.5), ValueError, "1"),
    "flag for an order": (lambda: clip_grad_norm_([five()], 1.0, True), TypeError, "error_if_nonfinite=True"),
    "several norms": (lambda: clip_grads_with_norm_([five()], 1.0, torch.ones(3)), ValueError, "total_norm"),
    "negative norm": (lambda: clip_grads_with_norm_([five()], 1.0, -1.0), ValueError, "norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED | WRONG)
def test_wrong_arguments(name: str) -> None:
    """What cannot be meant is refused, and the error says what to pass."""
    call, error, token = (REFUSED | WRONG)[name]
    with pytest.raises(error, match=token):
        call()
