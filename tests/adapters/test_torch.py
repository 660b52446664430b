"""Rules attached to PyTorch's optimizers, and the drop-ins for ``torch.nn.utils``."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

import uniclip as uc
from adapters.contract import checks, kinds, trained, variants
from adapters.on_torch import Attached, Compiled, Scaled, Wrapper, five, params_of
from kit.devices import on_torch, patched, refuse
from kit.training import RATE, Batch, batches
from uniclip import insight
from uniclip.integrations.torch import (
    attach,
    check_layout,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from uniclip.saved import to_dict


class Fused(Attached):
    """An optimizer with a fused kernel, which may skip a step."""

    optimizer = "adam"
    make = staticmethod(partial(Adam, lr=RATE, fused=True))


class ByClosure(Attached):
    """An optimizer that computes the gradients, and thus the loss, in its step."""

    takes = Attached.takes - {"micro", "record"}
    optimizer = "adam"
    make = staticmethod(partial(Adam, lr=RATE, foreach=True))

    def step(self, batch: Batch) -> None:
        """Train on a batch, with a positional closure or a keyword."""
        closure, wanted = partial(self.backward, batch), self.loss(batch)
        loss = self.inside.step(closure) if batch.ids[0] % 2 else self.inside.step(closure=closure)
        torch.testing.assert_close(loss, wanted.detach(), equal_nan=True)


class Sparse(Attached):
    """A table with sparse gradients and duplicate rows."""

    takes = Attached.takes - {"record", "refuse"} | {"rows"}
    optimizer = "sgd"
    sparse = True
    make = staticmethod(partial(SGD, lr=RATE))


class ScaledFused(Scaled):
    """A loss scale, with a kernel that unscales."""

    optimizer = "adam"
    make = staticmethod(partial(Adam, lr=RATE, fused=True))


VARIANTS: dict[type[Attached], tuple[str, ...] | None] = {
    Attached: None,
    Fused: ("by_global_norm", "by_norm", "autoclip", "skip", "zero", "skip_spikes"),
    ByClosure: ("autoclip", "skip", "skip_spikes", "adagc"),
    Sparse: ("by_value", "by_norm", "by_global_norm", "adagc", "skip"),
    Scaled: ("by_global_norm", "by_norm", "zero", "adagc", "skip", "skip_spikes"),
    ScaledFused: ("by_global_norm", "by_norm", "autoclip", "zero", "skip", "skip_spikes"),
    Compiled: ("by_global_norm", "skip"),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """An attached rule keeps the contract of all integrations for each kind of optimizer."""
    check(make, uc, tmp_path)


def without_state(self: Attached, folder: Path) -> None:
    """Save everything except the state of the rule."""
    state = {name: value for name, value in self.inside.state_dict().items() if name != "uniclip"}
    torch.save({"model": self.model, "optimizer": state}, folder / "checkpoint.pt")


def with_decay(self: Attached, batch: Batch) -> None:
    """Train on a batch, and then decay the weights if the step was skipped."""
    Attached.step(self, batch)
    self.model["b"].data.mul_(1 - 0.1 * self.scalars()["clip/skipped"])


BROKEN: dict[str, Any] = {
    "training-by_global_norm": {
        "start": lambda self, uc, rule: Attached.start(self, uc, uc.by_global_norm(0.501))
    },
    "training-skip": {"step": with_decay},
    "training-skip_spikes": {
        "backward": lambda self, batch: 0 * Attached.backward(self, batch) + 1
    },
    "training-by_norm": {"scalars": lambda self: {**Attached.scalars(self), "clip/norm": 0.3}},
    "micro-autoclip": {"loss": lambda self, batch: 2 * Attached.loss(self, batch)},
    "resumed-adagc": {"save": without_state},
    "refused": {"save": without_state},
}
"""Faults of an integration, by the check that detects them."""


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore")
def test_a_broken_adapter_is_found(name: str, tmp_path: Path) -> None:
    """The contract detects the faults of an integration."""
    broken = type("Broken", (Attached,), BROKEN[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        dict(checks(broken))[name](broken, uc, tmp_path)


# Behavior of PyTorch's optimizers only.


def layers(frozen: int, first: int = 0) -> list[tuple[str, Any]]:
    """Return the named parameters of three layers, each with a gradient, one of them frozen."""
    params = [five() for _ in range(3)]
    params[frozen].requires_grad_(False).grad = None
    return [(f"{first + number}.weight", p) for number, p in enumerate(params)]


def started(kind: type[Attached], rule: Any, make: Any) -> Any:
    """Return an integration with another optimizer."""
    adapter = kind()
    adapter.make = make
    adapter.start(uc, rule)
    return adapter


def same(one: Any, other: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Require the weights, gradients and moments of two integrations to be equal."""
    sides = [[*trained(side), *(p.grad for p in side.model.values())] for side in (one, other)]
    for found, wanted in zip(*sides, strict=True):
        np.testing.assert_allclose(found, wanted, rtol, atol)


OPTIMIZERS: dict[str, Any] = {
    "rmsprop-foreach": partial(RMSprop, lr=0.1, foreach=True),
    "fused-adagrad": partial(Adagrad, lr=0.1, fused=True),
    "fused-adamw-maximize": partial(AdamW, lr=0.1, maximize=True, fused=True),
    "fused-sgd-nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(make: Any) -> None:
    """Each optimizer steps as if clipped by hand, at any rate.

    ``.grad`` contains the clipped gradient afterwards, and nothing else remains.
    """
    for rule in (uc.by_global_norm(0.5), uc.autoclip(50, window=4, nonfinite="skip")):
        one, other = started(Attached, rule, make), started(Attached, None, make)
        schedulers = [ExponentialLR(side.inside, gamma=0.9) for side in (one, other)]
        clipper = uc.Clipper(rule)
        for batch in batches():
            one.step(batch)
            other.backward(batch)
            clipper.clip_([p.grad for p in other.model.values()])
            assert all(p.grad is not None for p in one.model.values())
            if not clipper.report.skipped:
                other.inside.step()
                same(one, other, rtol=2e-5, atol=2e-6)
            for scheduler in schedulers:
                scheduler.step()
        assert sorted(vars(one.inside)) == sorted(vars(other.inside))


def test_lbfgs() -> None:
    """LBFGS computes gradients repeatedly in its step.

    They are clipped each time before it reads them.
    """
    rule = uc.by_global_norm(0.2, nonfinite="skip")
    make = partial(LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    one, other = started(Attached, rule, make), started(Attached, None, make)

    def by_hand(batch: Batch) -> torch.Tensor:
        loss = other.backward(batch)
        uc.clip_([p.grad for p in other.model.values()], rule)
        return loss

    for batch in batches()[:3]:
        assert one.inside.step(partial(one.backward, batch)) == other.inside.step(
            partial(by_hand, batch)
        )
        np.testing.assert_equal(one.weights(), other.weights())
    one.inside.step(partial(one.backward, batches()[-2]))  # with NaN
    np.testing.assert_equal(one.weights(), other.weights())


def test_a_loss_scale_and_raise() -> None:
    """A step that a GradScaler skips raises no error; one that would reach the parameters does."""
    one = started(Scaled, uc.by_global_norm(1.0, nonfinite="raise"), partial(AdamW, fused=True))
    before = one.weights()
    one.step(batches()[-2])
    np.testing.assert_equal(one.weights(), before)
    with pytest.raises(FloatingPointError, match=r"grads\[0\]\['b'\]"):
        Attached.step(one, batches()[-2])
    np.testing.assert_equal(one.weights(), before)


def test_scaled_gradients_in_float16() -> None:
    """Scaled float16 gradients are not unscaled in place, since small ones would underflow."""
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
    """A gradient of two parameters counts for each and is scaled once; absent ones stay absent."""
    a, b, unused = five(), five(), torch.nn.Parameter(torch.zeros(2))
    b.grad = a.grad
    optimizer = SGD([{"params": [a, unused]}, {"params": [b]}], lr=1.0, fused=fused)
    handle = attach(optimizer, uc.by_global_norm(50**0.5 / 5))
    optimizer.step()
    assert handle.report.norms.item() == pytest.approx(50**0.5)
    torch.testing.assert_close([a.detach(), b.detach()], [torch.tensor([-0.6, -0.8])] * 2)
    assert unused.grad is None
    optimizer.zero_grad()
    # There is nothing to clip, which warns once, and no report of the step before is left.
    with pytest.warns(UserWarning, match="no parameter had a gradient"):
        optimizer.step()
    assert handle.report is None
    assert handle.scalars() == {}
    optimizer.step()
    assert not unused.any()


@pytest.mark.parametrize("name", [name for name in kinds(uc) if "skip" not in name])
def test_no_value_is_read(name: str) -> None:
    """A step reads no value, which would wait for an accelerator; the meta device has none."""
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in ((3, 2), (2,))]
    optimizer = Adam(params)
    handle = attach(optimizer, kinds(uc)[name].rule)
    for _ in range(3):
        for p in params:
            p.grad = torch.empty_like(p)
        handle.loss = torch.empty((), device="meta")
        optimizer.step()
    assert all(value.is_meta for value in handle.scalars().values())


@pytest.mark.parametrize("make", [Adam, AdamW, Adagrad])
def test_a_fused_step_is_skipped_unread(make: Any) -> None:
    """On an accelerator the kernel skips the step, and the host reads no flag.

    The tensors only report an accelerator.
    """
    rule = uc.by_global_norm(1.0, nonfinite="skip")
    there = {
        "is_cpu": property(lambda tensor: False),
        **dict.fromkeys(("__bool__", "item", "tolist"), refuse),
    }
    one, other = (make([torch.nn.Parameter(torch.ones(2))], lr=0.1, fused=True) for _ in range(2))
    attach(one, rule)
    (p,), (q,) = one.param_groups[0]["params"], other.param_groups[0]["params"]
    for grad in ([3.0, 4.0], [math.nan, 1.0], [0.3, 0.4]):
        p.grad = torch.tensor(grad)
        with patched(torch.Tensor, **there):
            one.step()
        q.grad = torch.tensor(grad)
        if not uc.clip_([q.grad], rule).skipped:
            other.step()
        torch.testing.assert_close(p, q)
        assert one.state[p]["step"] == other.state[q]["step"]
    # A rule that may skip wraps the step.
    assert {*vars(one)} - {"step"} == {*vars(other)}


@pytest.mark.parametrize("name", kinds(uc))
def test_a_captured_step(name: str) -> None:
    """Once a step has run, the next one can be captured in a CUDA graph: it reads and sends
    nothing.
    """
    params = params_of(torch.ones(3, 2), torch.ones(2))
    optimizer = AdamW(params, fused=True)
    handle = attach(optimizer, kinds(uc)[name].rule)
    for capturing in (False, True):
        for p in params:
            p.grad = torch.ones_like(p)
        handle.loss = torch.ones(())
        with on_torch(capturing=capturing):
            optimizer.step()


def test_a_captured_step_that_may_be_skipped() -> None:
    """Without a fused kernel the host reads whether to skip, which a capture refuses."""
    optimizer = SGD([five()], lr=0.1)
    attach(optimizer, uc.by_global_norm(1.0, nonfinite="skip"))
    with on_torch(capturing=True), pytest.raises(AssertionError, match="the host reads"):
        optimizer.step()


def test_one_rule_for_each_optimizer() -> None:
    """A second rule is refused, in lists, too; a wrapper of an unknown class is no optimizer.

    After ``remove`` the optimizer is as it was.
    """
    w, record = five(), insight.Recorder(lambda row: None)
    optimizer = SGD([w], lr=1.0)
    # The recorder looks for earlier steps.
    handle = attach(optimizer, uc.autoclip(), record=record)
    for again in (optimizer, [SGD([five()]), optimizer]):
        with pytest.raises(ValueError, match=r"remove\(\)"):
            attach(again, uc.by_global_norm(1.0))
    with pytest.raises(TypeError, match="attach to the optimizer inside"):
        attach(Wrapper(optimizer), uc.by_global_norm(1.0))
    assert "uniclip" in optimizer.state_dict()
    handle.remove()
    assert "uniclip" not in optimizer.state_dict()
    optimizer.step()
    assert w.tolist() == [-3, -4]
    last = attach(optimizer, uc.by_global_norm(1.0), record=record)
    handle.remove()
    with pytest.raises(ValueError, match="a separate recorder"):
        attach(SGD([five()]), uc.by_global_norm(1.0), record=record)
    Wrapper(optimizer).step()
    assert last.report.norms.item() == 5


def test_copies() -> None:
    """A copy of an optimizer has no rule, which its first step says; handles cannot be copied, and
    none keeps it alive.
    """
    optimizer = Adam([five()], fused=True)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    copied = copy.deepcopy(optimizer)
    (w,) = copied.param_groups[0]["params"]
    w.grad = torch.tensor([3.0, 4.0])
    with pytest.warns(UserWarning, match="this Adam is a copy"):
        copied.step()
    copied.step()
    assert w.grad.tolist() == [3, 4]
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="attach"):
            way(handle)
    alive = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_gradients_warn_of_nothing(layout: Any) -> None:
    """A clipped sparse gradient keeps its indices without a check, and so without a warning."""
    with warnings.catch_warnings():
        # The first sparse tensor of its kind warns.
        warnings.simplefilter("ignore")
        grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse(layout=layout)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            [clipped], report = uc.clip([grad], uc.by_global_norm(1.0))
            uc.clip_([grad], uc.by_global_norm(1.0))
    finally:
        torch.set_warn_always(False)
    assert [str(one.message) for one in heard if "invariant" in str(one.message)] == []
    assert report.norms == 5
    for one in (clipped, grad):
        np.testing.assert_allclose(one.to_dense(), [[0.6, 0], [0, 0.8]], rtol=1e-6)
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_after_a_step_that_failed(nonfinite: Any) -> None:
    """A failed step does not affect the next one."""
    rule = uc.by_global_norm(0.5, nonfinite=nonfinite)
    one, other = (started(Attached, rule, partial(AdamW, fused=True)) for _ in range(2))
    hook = one.inside.register_step_pre_hook(lambda *_: {}["none"])
    with pytest.raises(KeyError):
        one.step(batches()[0])
    hook.remove()
    for adapter in (one, other):
        adapter.step(batches()[1])
    same(one, other)


class Nested(SGD):
    """An optimizer whose step calls two of PyTorch's: hooks run around all three."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_a_step_inside_a_step(closure: Any) -> None:
    """A class that calls ``super().step()`` is clipped once, and its step skipped as a whole."""
    w = five()
    # PyTorch adds hooks to each class of which there was an instance.
    SGD([w])
    optimizer = Nested([w], lr=0.5)
    attach(optimizer, uc.autoclip(percentile=50, nonfinite="skip"))
    for norm in (1.0, 3.0, 50.0, math.nan):
        w.grad = torch.tensor([norm, 0.0])
        optimizer.step(closure)
    torch.testing.assert_close(w.detach(), torch.tensor([-1.0 - 2.0 - 3.0, 0.0]))


class Deeper(Nested):
    """An optimizer with three nested steps, which may fail in the middle."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            raise RuntimeError("a step failed")  # noqa: EM101, TRY003 - of a class that is not ours
        super().step()
        return loss


def test_a_class_that_inherits_its_step() -> None:
    """A class that inherits its step is wrapped by PyTorch; its instance gets only a step."""
    kind = type("Inherits", (SGD,), {"step": Optimizer.profile_hook_step(unwrap(SGD.step))})
    optimizer = kind([five()], lr=0.1)
    before = set(vars(optimizer))
    attach(optimizer, uc.by_global_norm(1.0))
    assert set(vars(optimizer)) == before | {"step"}


@pytest.mark.parametrize("kind", [SGD, Nested, Deeper])
@pytest.mark.parametrize("first", ["attach", "scheduler"])
@pytest.mark.filterwarnings("error")
def test_schedulers(kind: Any, first: str) -> None:
    """Schedulers replace ``optimizer.step``, before or after the rule.

    A step clips once, with its rate.
    """
    times = {SGD: 1, Nested: 2, Deeper: 4}[kind]
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = kind([w], lr=1.0)
    makes: list[Any] = [
        lambda: attach(optimizer, uc.autoclip(percentile=50)),
        lambda: ExponentialLR(optimizer, 0.5),
    ]
    handle, scheduler = (
        (make() for make in makes)
        if first == "attach"
        else reversed([make() for make in makes[::-1]])
    )
    for norm in (1.0, 3.0):
        w.grad = torch.tensor([norm, 0.0])
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-times * (1.0 + 0.5 * 2.0), 0.0]))
    handle.remove()
    w.grad = torch.tensor([4.0, 0.0])
    optimizer.step()
    scheduler.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-times * 3.0, 0.0]))


def test_a_step_that_was_kept() -> None:
    """A wrapper that calls a ``step`` saved before the rule gets an error that explains it."""
    optimizer = Nested([five()], lr=1.0)
    kept = optimizer.step
    attach(optimizer, uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="attach first"):
        kept()


def test_a_step_inside_a_step_that_fails() -> None:
    """The step after a failed one is clipped.

    A skipped step is not run, so it does not fail; a copy is not clipped.
    """
    w = five()
    optimizer = Deeper([w], lr=1.0)
    handle = attach(optimizer, uc.by_global_norm(1.0, skip_above=10.0))
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="a step failed"):
        optimizer.step()
    w.data.zero_()
    w.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    assert w.grad.tolist() == [0.0, 0.0]
    assert not w.any()
    w.grad, optimizer.fails = torch.tensor([3.0, 4.0]), False
    copied = copy.deepcopy(optimizer)
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-2.4, -3.2]))
    (other,) = copied.param_groups[0]["params"]
    other.grad = torch.tensor([3.0, 4.0])
    with pytest.warns(UserWarning, match="is a copy"):
        copied.step()
    assert other.tolist() == [-12.0, -16.0]
    handle.remove()
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_closure_of_none_at_rate_0(rate: Any) -> None:
    """A step forwarded with ``closure=None`` is clipped, also at rate 0 in a warmup.

    NaN is skipped, and moments are of clipped gradients.
    """
    for rule, grad, wanted in (
        (uc.by_global_norm(1.0), [30.0, 40.0], [0.06, 0.08]),
        (uc.by_global_norm(1.0, nonfinite="skip"), [math.nan, 1.0], None),
    ):
        w = five()
        optimizer = Adam([w], lr=rate)
        handle = attach(optimizer, rule)
        w.grad = torch.tensor(grad)
        optimizer.step(closure=None)
        assert handle.report is not None
        if wanted is None:
            assert not optimizer.state
        else:
            torch.testing.assert_close(optimizer.state[w]["exp_avg"], torch.tensor(wanted))


def test_a_closure_of_none_without_a_rate() -> None:
    """A group may have a rate of ``None``, for optimizers that find their own."""
    w = five()
    optimizer = SGD([{"params": [w], "lr": 0.0}], lr=0.0)
    handle = attach(optimizer, uc.by_global_norm(1.0), all_reduce=lambda array, op: array)
    optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.0))
    optimizer.param_groups[0]["lr"] = None
    optimizer.step(closure=None)
    assert handle.report.norms.item() == 5


@pytest.mark.parametrize("make", [Adam, partial(SGD, lr=0.1, momentum=0.9)])
def test_a_step_that_only_makes_the_state(make: Any) -> None:
    """The step by which ``torch.distributed.checkpoint`` creates the state is not recorded."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, rows = torch.nn.Linear(2, 1), []
    optimizer = make(model.parameters())
    handle = attach(optimizer, uc.adagc(), record=insight.Recorder(rows.append, every=1))
    first = handle.numbers()
    get_optimizer_state_dict(model, optimizer)
    assert len(optimizer.state) == 2
    assert handle.numbers() == first
    assert handle.report is None
    assert rows == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert handle.numbers() != first


def test_gradients_of_a_wrapper_subclass() -> None:
    """Reports of wrapper subclasses are logged, saved and recorded like those of other tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    def two(*values: float) -> Any:
        return TwoTensor(torch.tensor(values), torch.tensor(values))

    w, rows = torch.nn.Parameter(two(0.0, 0.0)), []
    optimizer = SGD([w], lr=1.0)
    handle = attach(optimizer, uc.adagc(warmup=1), record=insight.Recorder(rows.append, every=1))
    handle.logs()
    for _ in range(2):
        w.grad = two(3.0, 4.0)
        optimizer.step()
    assert handle.logs()["clip/norm"] == 5.0
    assert [row["clip/norm"] for row in rows] == [5.0, 5.0]
    assert handle.numbers()["state"]["averages"] == pytest.approx([1.001])
    torch.testing.assert_close(w.a.detach(), torch.tensor([-0.6, -0.8]) * 2.05)


def test_groups_and_names() -> None:
    """Paths have the names of groups and parameters, also in errors.

    Groups that are added later are clipped with the others.
    """
    a, b = five(), five()
    optimizer = SGD([{"params": [("a", a)]}, {"params": [("b", b)]}])
    attach(optimizer, uc.by_group_norm({(0, "a"): 1.0, (1, "b"): 2.0}, lambda path, leaf: path))
    optimizer.step()
    torch.testing.assert_close(
        [a.grad, b.grad], [torch.tensor([0.6, 0.8]), torch.tensor([1.2, 1.6])]
    )
    for pair, place in ([("a", five()), ("b", five())], "'b'"), ([five(), five()], "0"):
        optimizer = SGD(pair[:1])
        handle = attach(optimizer, uc.by_global_norm(1.0, nonfinite="raise"))
        optimizer.add_param_group({"params": pair[1:]})
        optimizer.step()
        assert handle.report.norms.item() == pytest.approx(math.sqrt(50))
        optimizer.param_groups[1]["params"][0].grad[1] = math.nan
        with pytest.raises(FloatingPointError, match=rf"grads\[1\]\[{place}\]"):
            optimizer.step()


def test_a_state_of_other_layers() -> None:
    """Rows of a state are looked up by name.

    A state without any of the leaves is refused without a change.
    """
    saving, optimizer, fitting, strange = (
        Adam(layers(1)),
        Adam(layers(1, first=1)),
        Adam(layers(2)),
        Adam(layers(0, 7)),
    )
    source, handle, other, last = (
        attach(one, uc.adagc()) for one in (saving, optimizer, fitting, strange)
    )
    saving.step()
    saved, first = saving.state_dict(), (other.numbers(), last.numbers())
    with pytest.raises(ValueError, match=r"0\.weight(.|\n)*7\.weight|7\.weight(.|\n)*0\.weight"):
        strange.load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter groups"):
        fitting.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})
    assert (other.numbers(), last.numbers()) == first
    assert not strange.state
    assert not fitting.state
    # Another layer is frozen in it.
    fitting.load_state_dict(saved)
    with pytest.warns(
        UserWarning, match=r"no entry for grads\[0\]\['3\.weight'\]; these .* empty state"
    ):
        optimizer.load_state_dict(saved)
    rows = dict(
        zip(handle.numbers()["leaves"][0], handle.numbers()["state"]["averages"], strict=True)
    )
    kept = dict(
        zip(source.numbers()["leaves"][0], source.numbers()["state"]["averages"], strict=True)
    )
    assert rows == {**kept, "[0]['3.weight']": -1}
    # Saving and loading copy the state.
    saved["uniclip"]["state"]["averages"].fill_(7.0)
    assert other.numbers()["state"] == source.numbers()["state"] != first[0]["state"]
    assert 7.0 not in source.numbers()["state"]["averages"]


REMEMBERING: dict[str, Any] = {
    "leaves": uc.adagc(warmup=1),
    "groups": uc.Rule(
        uc.limits.Ema(1.0, 0.5), scope=uc.scopes.groups(lambda path, leaf: path[1] == "1.weight")
    ),
    "entries": uc.spam(),
    "masked": uc.masked(uc.norm_growth(), lambda path, leaf: path[1] != "0.weight"),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_absent_gradients(name: str) -> None:
    """A parameter without a gradient, as in a frozen layer, keeps its value and its state."""
    rule, named = REMEMBERING[name], [(f"{number}.weight", five()) for number in range(3)]
    optimizer = SGD(named, lr=1.0)
    handle, state = attach(optimizer, rule), rule.init([OrderedDict(named)])
    wanted = OrderedDict((key, torch.zeros(2)) for key, _ in named)
    for absent, size in ((None, 1.0), ("1.weight", 4.0), ("2.weight", 0.5), (None, 9.0)):
        grads = OrderedDict(
            (key, None if key == absent else torch.tensor([3.0 * size, 4.0])) for key, _ in named
        )
        (clipped,), state, _ = rule.update([grads], state, [wanted])
        wanted = OrderedDict(
            (key, p if clipped[key] is None else p - clipped[key]) for key, p in wanted.items()
        )
        for key, p in named:
            p.grad = None if grads[key] is None else grads[key].clone()
            p.requires_grad_(key != absent)
        if absent == "2.weight":
            again = SGD(named, lr=1.0)
            saved = optimizer.state_dict()
            handle.remove()
            handle, optimizer = attach(again, rule), again
            optimizer.load_state_dict(saved)
        optimizer.step()
        torch.testing.assert_close([p.detach() for _, p in named], list(wanted.values()))
    assert handle.numbers()["state"] == to_dict(rule, state, [OrderedDict(named)])["state"]


EACH: dict[str, Any] = {
    "leaves": uc.norm_growth(1.5),
    "entries": uc.Rule(uc.limits.Ema(1.5, 0.5), scope=uc.scopes.each_entry),
    "units": uc.chain(
        uc.by_value(-100.0, 100.0), uc.Rule(uc.limits.Ema(1.5, 0.5), scope=uc.scopes.unit(0))
    ),
    "masked": uc.masked(uc.norm_growth(1.5), lambda path, leaf: leaf.shape != (3,)),
    "groups": uc.Rule(
        uc.limits.Ema(1.5, 0.5), scope=uc.scopes.groups(lambda path, leaf: tuple(leaf.shape))
    ),
    "limits": uc.by_group_norm(
        {
            2: uc.limits.Ema(1.5, 0.5),
            3: uc.limits.ZScore(1.0, 0.5, warmup=2),
            4: 2.0,
            5: uc.limits.Ema(2.0, 0.9),
        },
        lambda path, leaf: leaf.shape[0],
    ),
}
"""Rules with a state for each leaf.

Each of the leaves below has its own shape.
"""


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("named", [False, True])
def test_leaves_that_come_and_go(name: str, named: bool) -> None:
    """Each parameter has its own state.

    New ones start from the initial state, and returning ones continue, in any place.
    """
    rule, sizes = EACH[name], {"a": 2, "b": 3, "c": 4, "d": 5}
    params = {key: torch.nn.Parameter(torch.zeros(size)) for key, size in sizes.items()}
    model = torch.nn.ParameterDict(params)
    alone = {key: uc.Clipper(rule) for key in params}
    optimizer = SGD([params["a"], params["b"]], lr=1.0)
    handle = attach(optimizer, rule, names=model if named else None)
    groups = iter(
        [
            [["a", "b"]],
            [["a", "b"]],
            [["a", "b"], ["c"]],
            [["b"], ["c"]],
            [["c", "d"]],
            [["d"], ["b", "c"]],
            [["c", "b", "d"], ["a"]],
            [["a"]],
        ]
    )
    for step, keys in enumerate(groups):
        group = {
            name: value for name, value in optimizer.param_groups[0].items() if name != "params"
        }
        optimizer.param_groups[:] = [
            {**group, "params": [params[key] for key in some]} for some in keys
        ]
        for number, key in enumerate(key for some in keys for key in some):
            grad = torch.arange(1.0, sizes[key] + 1) * 2.0 ** (step * (1 + number) % 5)
            params[key].grad, wanted = grad.clone(), grad.clone()
            alone[key].clip_([wanted])
            params[key].wanted = params[key].detach() - wanted
        optimizer.step()
        for key in (key for some in keys for key in some):
            torch.testing.assert_close(
                params[key].detach(), params[key].wanted, msg=f"{key} at step {step}"
            )
    names = {
        label.rpartition("[")[2].strip("']")
        for part in handle.numbers()["leaves"]
        for label in part or ()
    }
    expected = {"a", "c", "d"} if name == "masked" else {"a", "b", "c", "d"}
    assert names >= expected or not named or name in {"groups", "limits"}


@pytest.mark.parametrize("kept", [False, True])
def test_leaves_that_are_deleted(kept: bool) -> None:
    """The state of a removed parameter is never reused, whether it still exists or not."""
    rule, held = uc.norm_growth(1.5), []
    params = [five() for _ in range(3)]
    optimizer = SGD([{"params": [p]} for p in params], lr=1.0)
    handle = attach(optimizer, rule)
    optimizer.step()
    held += params if kept else []
    params.pop(0)
    # The groups after it get other indices.
    del optimizer.param_groups[0]
    gc.collect()
    for p in params:
        p.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    torch.testing.assert_close([p.grad for p in params], [torch.tensor([4.5, 6.0])] * 2)
    params.pop()
    del optimizer.param_groups[1], p
    gc.collect()
    new = five()
    optimizer.add_param_group({"params": [new]})
    new.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    torch.testing.assert_close(new.grad, torch.tensor([30.0, 40.0]))
    assert handle.numbers()["leaves"][0][:2] == ["[0][0]", "[1][0]"]
    assert len(handle.numbers()["leaves"][0]) == (4 if kept else 2)


def test_parameters_that_change_groups() -> None:
    """The same parameters in other groups are other leaves; no groups have none."""
    a, b = five(), five()
    optimizer = SGD([{"params": [a]}, {"params": [b]}], lr=0.0)
    handle = attach(optimizer, uc.by_group_norm({0: 1.0, 1: 2.0}, lambda path, leaf: path[0]))
    optimizer.step()
    torch.testing.assert_close(
        [a.grad.norm(), b.grad.norm()], [torch.tensor(1.0), torch.tensor(2.0)]
    )
    optimizer.param_groups[0]["params"].append(optimizer.param_groups.pop()["params"].pop())
    optimizer.step()
    torch.testing.assert_close(torch.stack([a.grad, b.grad]).norm(), torch.tensor(1.0))
    assert set(handle.report.norms) == {0}
    remembers = SGD([a], lr=0.0)
    other = attach(remembers, uc.norm_growth(1.5))
    remembers.step()
    group = remembers.param_groups.pop()
    remembers.step()
    remembers.add_param_group({"params": group["params"]})
    a.grad.mul_(100)
    remembers.step()
    assert other.report.factors[0][0] == pytest.approx(0.015)


def test_groups_in_another_order() -> None:
    """Saved rows are looked up by the names of parameters in any group.

    A change of groups is saved at once.
    """
    params = {key: torch.nn.Parameter(torch.full((2,), float(n))) for n, key in enumerate("abc", 1)}
    for key, p in params.items():
        p.grad = p.detach() * 0 + {"a": 1.0, "b": 2.0, "c": 3.0}[key]
    saving, loading = (
        SGD([{"params": [(key, params[key])]} for key in order], lr=0.0) for order in ("abc", "cab")
    )
    source, handle = (attach(one, uc.norm_growth()) for one in (saving, loading))
    saving.step()
    # Expect no warning.
    handle.load_state_dict(source.numbers())

    def rows(numbers: Any) -> dict[str, float]:
        return {
            name[3:]: row
            for name, row in zip(numbers["leaves"][0], numbers["state"]["averages"], strict=True)
        }

    assert rows(handle.numbers()) == rows(source.numbers())
    saving.param_groups.reverse()
    assert rows(saving.state_dict()["uniclip"]) == rows(source.numbers())
    assert source.numbers()["leaves"] == [["[0]['c']", "[1]['b']", "[2]['a']"]]


def test_damaged_states() -> None:
    """A state with missing or superfluous numbers is refused, even when sorted by names."""
    optimizer = SGD([("a", five()), ("b", five())])
    handle = attach(optimizer, uc.adagc())
    optimizer.step()
    before = handle.numbers()
    for change in (
        lambda state: state.pop("averages"),
        lambda state: state.pop("count"),
        lambda state: state.update(more=[1.0]),
    ):
        saved = copy.deepcopy(before)
        saved["leaves"] = [["[0]['b']", "[0]['c']"]]
        change(saved["state"])
        with pytest.raises(ValueError, match=r"averages|count|more"):
            handle.load_state_dict(saved)
        assert handle.numbers() == before


def test_where_a_warning_points() -> None:
    """The warning about parameters without saved norms points at the user's loading line."""
    saving, loading = SGD([("a", five())]), SGD([("a", five()), ("b", five())])
    attach(saving, uc.adagc())
    handle = attach(loading, uc.adagc())
    saved = saving.state_dict()
    whole = {**loading.state_dict(), "uniclip": saved["uniclip"]}
    for load in (
        lambda: handle.load_state_dict(saved["uniclip"]),
        lambda: loading.load_state_dict(whole),
    ):
        with pytest.warns(UserWarning, match="start with empty state") as seen:
            load()
        assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize("loop", ["plain", "a scheduler", "a closure", "Clipper"])
def test_where_the_warning_of_skipped_steps_points(loop: str) -> None:
    """The warning about skipped steps points at the training loop, through any PyTorch code."""
    rule, param = uc.by_global_norm(1e-9, skip_above=1e-9), five()
    optimizer = SGD([param])
    clipper = uc.Clipper(rule)
    if loop != "Clipper":
        attach(optimizer, rule)
    if loop == "a scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = {
        "a closure": lambda: optimizer.step(lambda: torch.tensor(0.0)),
        "Clipper": lambda: clipper([torch.ones(2)]),
    }.get(loop, optimizer.step)
    for _ in range(19):
        step()
        param.grad = torch.ones(2)
    with pytest.warns(UserWarning, match="20 steps in a row") as seen:
        step()
    assert [one.filename for one in seen] == [__file__]


def test_leaves_that_are_gone_are_saved() -> None:
    """The rows of removed leaves are saved and restored when these return.

    New leaves warn.
    """
    rule, (a, b, c) = uc.norm_growth(1.5), [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    saving = SGD([{"params": [("a", a)]}, {"params": [("b", b)]}])
    source = attach(saving, rule)
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    saving.step()
    saving.param_groups.pop()
    saving.step()
    saved = saving.state_dict()
    loading = SGD([{"params": [("a", a)]}])
    handle = attach(loading, rule)
    # Expect no warning.
    loading.load_state_dict(saved)
    assert handle.numbers() == source.numbers()
    loading.add_param_group({"params": [("b", b)]})
    loading.add_param_group({"params": [("c", c)]})
    a.grad, b.grad, c.grad = (torch.tensor([3e4, 4e4]) for _ in range(3))
    loading.step()
    torch.testing.assert_close(
        [a.grad, b.grad, c.grad], [torch.tensor(v) for v in ([4.5, 6.0], [45.0, 60.0], [3e4, 4e4])]
    )
    elsewhere = uc.Clipper(rule)
    elsewhere.init([OrderedDict(a=a.detach())])
    # where nothing says that it may come back
    with pytest.raises(ValueError, match=r"norms for grads\[1\]\['b'\]"):
        elsewhere.load_state_dict(saved["uniclip"])


def test_names_of_a_model() -> None:
    """An optimizer without names gets those of the model in paths, errors and records.

    Parameters outside of the model keep their indices.
    """
    model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(2, 2), head=torch.nn.Linear(2, 1)))
    more, rows = five(), []
    optimizer = SGD([*model.parameters(), more], lr=1.0)
    rule = uc.masked(uc.by_global_norm(0.0), lambda path, leaf: str(path[1]).startswith("head"))
    record = insight.Recorder(rows.append, leaves="all")
    handle = attach(optimizer, rule, record=record, names=model)
    model(torch.ones(1, 2)).sum().backward()
    before = [p.detach().clone() for p in model.head.parameters()]
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.head.parameters()], before)
    record.close()
    assert list(rows[0]["leaves"]) == ["body.weight", "body.bias", "head.weight", "head.bias", "4"]
    handle.remove()
    attach(optimizer, uc.by_norm(1.0, nonfinite="raise"), names=model.named_parameters())
    model.head.bias.grad.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"grads\[0\]\['head\.bias'\]"):
        optimizer.step()


def test_names_that_the_optimizer_has() -> None:
    """Names of the optimizer stay, and missing ones are added, by `check_layout`, too."""
    model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(2, 2), head=torch.nn.Linear(2, 1)))
    body = [(f"mine.{name}", p) for name, p in model.body.named_parameters()]
    optimizer = SGD([{"params": body}])
    model(torch.ones(1, 2)).sum().backward()
    handle = attach(optimizer, uc.adagc(), names=model)
    assert handle.numbers()["leaves"] == [["[0]['mine.weight']", "[0]['mine.bias']"]]
    unnamed = SGD(model.parameters())
    rule = uc.by_group_norm(
        {"body": 1.0, "head": 0.1}, lambda path, leaf: path[1].partition(".")[0]
    )
    assert check_layout(unnamed, rule, names=model).ok
    assert not check_layout(optimizer, rule, names=model).ok


def in_head(path: Any, leaf: Any) -> bool:
    """Return whether a parameter belongs to the head."""
    return "head" in str(path)


NAMED: dict[str, Any] = {
    "mask": uc.masked(uc.by_global_norm(1.0), lambda path, leaf: not in_head(path, leaf)),
    "mask in a chain": uc.chain(
        uc.by_value(-1.0, 1.0), uc.masked(uc.adagc(), lambda path, leaf: "head" in str(path))
    ),
    "label": uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: "head" in str(path))),
    "groups": uc.by_group_norm(
        {"head": 1.0, "body": 0.1}, lambda path, leaf: "head" if "head" in path[1] else "body"
    ),
    "method": uc.masked(uc.by_norm(1.0), lambda path, leaf: path[1].startswith("head")),
    "table": uc.masked(uc.by_norm(1.0), lambda path, leaf: IS_BIAS[path[1]]),
    "partial": uc.masked(uc.by_norm(1.0), partial(lambda name, path, _: name in str(path), "head")),
    "in": uc.masked(uc.by_global_norm(1.0), lambda path, leaf: "head.bias" not in path),
    "in a set": uc.masked(
        uc.by_global_norm(1.0), lambda path, leaf: leaf.ndim < 9 and path[1] not in {"c", "d"}
    ),
    "and shape": uc.masked(
        uc.by_global_norm(1.0), lambda path, leaf: leaf.ndim > 1 and "head" in str(path)
    ),
}
IS_BIAS = {
    f"{layer}.{name}": name == "bias" for layer in ("body", "head") for name in ("weight", "bias")
}


def two_layers() -> Any:
    """Return a model of a body and a head, with gradients."""
    model = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(2, 2), head=torch.nn.Linear(2, 1)))
    model(torch.ones(1, 2)).sum().backward()
    return model


@pytest.mark.parametrize("name", NAMED)
def test_masks_of_names_that_are_not_there(name: str) -> None:
    """A mask or label by name is refused without names, since it would choose all leaves.

    With names it continues when layers are added.
    """
    model = two_layers()
    model.body.weight.requires_grad_(False).grad = None
    unnamed = SGD(model.parameters())
    error = TypeError if name in {"groups", "method", "table"} else ValueError
    with pytest.raises(error, match=r"(?s)\(0, 0\).*names=model") as caught:
        attach(unnamed, NAMED[name])
    assert ("failed for the path" in str(caught.value)) == (error is TypeError)
    # The refused calls attached nothing.
    attach(unnamed, NAMED[name], names=model).remove()
    optimizer = SGD(model.head.parameters(), lr=0.1)
    attach(optimizer, NAMED[name], names=model)
    # Only the head has a gradient.
    optimizer.step()
    optimizer.add_param_group({"params": list(model.body.parameters())})
    optimizer.step()
    del optimizer.param_groups[1]
    optimizer.step()


def test_functions_of_paths_that_fail() -> None:
    """The error of a failing function contains an example of a path."""
    model = two_layers()
    for where in (lambda path, leaf: path[0].startswith("head"), lambda path: True):
        with pytest.raises(
            TypeError, match=r"failed for the path \(0, 'body.weight'\) of group and name"
        ):
            attach(SGD(model.parameters()), uc.masked(uc.by_norm(1.0), where), names=model)


def test_labels_of_groups() -> None:
    """Labels and masks that read indices of the path need no names, even for a single group."""
    half = uc.masked(
        uc.by_norm(1.0),
        lambda path, leaf: path[1] % 2 == 0 and path != (5, 5) and path[1] in (0, 1),
    )
    attach(SGD([five(), five()]), half)
    table = {(0, 0): "a", (0, 1): "b"}
    for label in (
        lambda path, leaf: path[1],
        lambda path, leaf: str(path),
        lambda path, leaf: table[path],
    ):
        attach(SGD([five(), five()]), uc.Rule(1.0, scope=uc.scopes.groups(label)))
    attach(SGD([five(), five()]), uc.masked(uc.by_norm(1.0), lambda path, leaf: path[1] in {0, 2}))
    for rule in (
        uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0])),
        uc.by_group_norm({0: 1.0, 1: 2.0}, lambda path, leaf: path[0]),
    ):
        optimizer = SGD([five(), five()], lr=1.0)
        attach(optimizer, rule)
        optimizer.step()


def test_one_answer_for_all_parameters() -> None:
    """It is what a search for names that are not there looks like, so it needs names; with them,
    all may be meant, or none by shape.
    """
    kept = [five(), five()]
    named = [("a", kept[0]), ("b", kept[1])]
    for function in (
        lambda path, leaf: leaf.ndim == 1,
        lambda path, leaf: leaf.ndim > 1,
        lambda path, leaf: True,
        lambda path, leaf: path[1] < 2,
    ):
        for rule in (
            uc.masked(uc.by_norm(1.0), function),
            uc.Rule(1.0, scope=uc.scopes.groups(function)),
        ):
            with pytest.raises(ValueError, match="for all 2 leaves"):
                attach(SGD(kept), rule)
    for where in (
        lambda path, leaf: leaf.ndim == 1,
        lambda path, leaf: leaf.ndim > 1,
        lambda path, leaf: True,
        lambda path, leaf: "c" not in path[1],
    ):
        attach(SGD(kept), uc.masked(uc.by_norm(1.0), where), names=named).remove()
    with pytest.raises(ValueError, match="for all 2 leaves"):
        attach(
            SGD(kept), uc.masked(uc.by_norm(1.0), lambda path, leaf: "c" in path[1]), names=named
        )
    # One parameter tells nothing.
    attach(SGD([five()]), uc.masked(uc.by_norm(1.0), lambda path, leaf: path[1] < 2))


def test_a_state_dict_in_two_parts() -> None:
    """The rule's part of a state dict may be loaded later.

    A step without it warns, also if the rule is attached late.
    """
    saving, optimizer, late = (Adam([five()]) for _ in range(3))
    _, handle = (attach(one, uc.autoclip()) for one in (saving, optimizer))
    saving.step()
    saved = saving.state_dict()
    rest = {name: saved[name] for name in ("state", "param_groups")}
    optimizer.load_state_dict(rest)
    handle.load_state_dict(saved["uniclip"])
    optimizer.step()
    optimizer.load_state_dict(rest)
    with pytest.warns(UserWarning, match="attach the rule first"):
        optimizer.step()
    optimizer.step()
    # An optimizer without a rule can read it.
    late.load_state_dict(saved)
    # A stateless rule needs nothing of it.
    attach(late, uc.by_norm(1.0)).remove()
    # It warns here, or at its first step.
    with pytest.warns(UserWarning, match="attach the rule first"):
        (attach(late, uc.autoclip()), late.step())


def test_names_that_come_with_a_file() -> None:
    """Loading the file of an optimizer with names does not rename the leaves of a rule without."""
    named, optimizer = SGD([("a", five())], momentum=0.5), SGD([five()], momentum=0.5)
    named.step()
    handle = attach(optimizer, uc.adagc(warmup=1))
    optimizer.load_state_dict(named.state_dict())
    with pytest.warns(UserWarning, match="attach the rule first"):
        optimizer.step()
    optimizer.step()
    assert handle.numbers()["leaves"] == [["[0][0]"]]


def test_a_record_of_leaves(tmp_path: Path) -> None:
    """A record has the norms before clipping by leaf name, and is flushed by ``state_dict``."""
    with insight.Recorder(tmp_path / "run.jsonl", every=100, leaves="all") as record:
        optimizer = SGD([("a", five()), ("none", torch.nn.Parameter(torch.ones(2))), ("c", five())])
        attach(optimizer, uc.by_norm(0.1), record=record)
        optimizer.step()
        optimizer.state_dict()
        found = insight.read(record.path)
    np.testing.assert_allclose(found.leaves, [[5.0, 0.0, 5.0]])
    assert [label.strip("[]0'") for label in found.labels] == ["a", "none", "c"]


def test_a_closed_record() -> None:
    """A step that cannot be recorded changes neither the gradients nor the state of the rule."""
    p, record = five(), insight.Recorder(lambda row: None)
    optimizer = SGD([p])
    handle = attach(optimizer, uc.autoclip(50, window=4), record=record)
    optimizer.step()
    before, grad = handle.numbers(), p.grad.clone()
    record.close()
    with pytest.raises(ValueError, match="closed"):
        optimizer.step()
    assert handle.numbers() == before
    torch.testing.assert_close(p.grad, grad)


def test_a_record_after_other_parameters_came(tmp_path: Path) -> None:
    """The leaves of a group that is added later are recorded, too."""
    with insight.Recorder(tmp_path / "run.jsonl", leaves="all") as record:
        optimizer = SGD([("a", five())])
        attach(optimizer, uc.by_global_norm(1.0), record=record)
        optimizer.step()
        optimizer.add_param_group({"params": [("b", five())]})
        for group in optimizer.param_groups:
            group["params"][0].grad = five().grad
        optimizer.step()
    found = insight.read(record.path)
    assert found.labels == ["a", "b"]
    np.testing.assert_allclose(found.leaves, [[5.0, math.nan], [5.0, 5.0]])


# The functions of ``torch.nn.utils``, beyond the comparison in `test_native`.
CALLS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda params: clip_grad_norm_(params, 1.0),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1.0),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, 5.0),
}


@pytest.mark.parametrize(
    "limit", [1.0, torch.tensor(1.0), torch.tensor([1])], ids=["number", "0-d", "whole"]
)
def test_what_arguments_can_be(limit: Any) -> None:
    """Parameters may come in any iterable, and duplicates are scaled once.

    Limits are numbers or tensors with one element.
    """
    w, frozen = five(), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    for given in (w, (p for p in [w]), torch.nn.ParameterList([w]), [w, frozen]):
        w.grad = torch.tensor([3.0, 4.0])
        assert clip_grad_norm_(given, limit).item() == 5
        torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm_([w, w], limit).item() == pytest.approx(2**0.5)
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]) / 2**0.5)
    w.grad = torch.tensor([0.6, 0.8])
    assert clip_grads_with_norm_([w], limit, 4 * limit) is None
    torch.testing.assert_close(w.grad, torch.tensor([0.15, 0.2]))
    assert clip_grad_value_([w], limit / 8) is None
    torch.testing.assert_close(w.grad, torch.tensor([0.125, 0.125]))
    assert get_total_norm([torch.tensor([3.0]), None, torch.tensor([[4.0]])]).item() == 5


@pytest.mark.parametrize("name", CALLS)
def test_without_parameters(name: str) -> None:
    """The norm without parameters is 0.

    An exhausted generator warns at the user's line.
    """
    for given in ([], [torch.nn.Parameter(torch.zeros(2))]):
        assert CALLS[name](given) == (torch.tensor(0.0) if name == "clip_grad_norm_" else None)
    assert torch.equal(get_total_norm([]), torch.tensor(0.0))
    with pytest.warns(UserWarning, match="empty") as seen:
        assert not CALLS[name](torch.nn.ReLU().parameters())
    assert [one.filename for one in seen] == [__file__]


def test_gradients_with_a_graph() -> None:
    """Gradients with a graph are clipped outside of it.

    Gradients passed in place of parameters are refused.
    """
    w = torch.nn.Parameter(torch.tensor([1.5, 2.0]))
    (w.grad,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
    for call in CALLS.values():
        for given in (five().grad, [five().grad], (w.grad,), [w.detach()]):
            # PyTorch clips none of them, and returns 0.
            with pytest.raises(TypeError, match=r"uc\.clip_\("):
                call(given)
    norm = clip_grad_norm_(w, 1.0)
    assert (norm.item(), norm.requires_grad) == (5, False)
    torch.testing.assert_close(w.grad.detach(), torch.tensor([0.6, 0.8]))
    # The graph is a reference cycle.
    w.grad = None


def test_gradients_that_are_not_finite() -> None:
    """Non-finite gradients make everything NaN, also with a precomputed norm.

    The optional error names the gradient.
    """
    for bad in (math.nan, math.inf):
        params = params_of(torch.ones(2), torch.tensor([1.0, bad]), torch.ones(2))
        with pytest.raises(FloatingPointError, match=r"grads\[1\]"):
            clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        clip_grads_with_norm_(params[2:], 1.0, torch.tensor(math.nan))
        assert not get_total_norm([p.grad for p in params[:2]]).isfinite()
        assert not clip_grad_norm_(params[:2], 1.0).isfinite()
        assert all(p.grad.isnan().all() for p in params)


def test_sparse_gradients() -> None:
    """Sparse gradients stay sparse with summed duplicate rows, whereas PyTorch raises."""
    rows = torch.sparse_coo_tensor(
        [[0, 2, 2]], [[6.0, 0.0], [0.0, 2.0], [0.0, 6.0]], (4, 2), check_invariants=True
    )
    (w,) = params_of(rows.to_dense())
    w.grad = rows.clone()
    assert clip_grad_norm_([w], 5.0).item() == 10
    torch.testing.assert_close(w.grad.to_dense(), rows.to_dense() / 2)
    assert w.grad.layout == torch.sparse_coo


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (lambda: attach([], uc.by_norm(1.0)), TypeError, "torch.optim.Optimizer"),
    "model": (lambda: attach(torch.nn.Linear(1, 1), uc.by_norm(1.0)), TypeError, r"attach\("),
    "rule first": (
        lambda: attach(uc.by_norm(1.0), SGD([five()])),
        TypeError,
        r"attach\(optimizer, rule\)",
    ),
    "not called": (lambda: attach(SGD([five()]), uc.by_norm), TypeError, "call it"),
    "examples": (
        lambda: attach(SGD([five()]), uc.by_example_norm(1.0)),
        ValueError,
        "uc.clip_and_sum",
    ),
    "layers": (
        lambda: attach(SGD([five()]), uc.by_example_layer_norm(1.0)),
        ValueError,
        "uc.clip_and_sum",
    ),
    "derivatives": (
        lambda: attach(SGD([five()], differentiable=True), uc.by_norm(1.0)),
        ValueError,
        "uc.clip",
    ),
    "names": (
        lambda: attach(SGD([five()]), uc.by_norm(1.0), names=["w"]),
        TypeError,
        "named_parameters",
    ),
    "equal names": (
        lambda: attach(SGD([five()]), uc.by_norm(1.0), names=[("w", five()), ("w", five())]),
        ValueError,
        "'w'",
    ),
    "numbers for names": (
        lambda: attach(SGD([five()]), uc.by_norm(1.0), names=[(1, five())]),
        TypeError,
        "pairs",
    ),
    "names of some": (
        lambda: attach(
            SGD([w := five(), five()]), uc.by_norm(1.0), lambda array, op: array, names=[("w", w)]
        ),
        ValueError,
        "names=model",
    ),
    "other names": (
        lambda: attach(SGD([five()]), uc.by_norm(1.0), names=torch.nn.Linear(1, 1)),
        ValueError,
        "none of the parameters",
    ),
    "record": (
        lambda: attach(SGD([five()]), uc.by_norm(1.0), record="run.jsonl"),
        TypeError,
        "record",
    ),
    "pairs": (
        lambda: clip_grad_norm_(iter([("w", five())]), 1.0),
        TypeError,
        r"model\.parameters\(\)",
    ),
    "module": (
        lambda: clip_grad_norm_(torch.nn.Linear(2, 1), 1.0),
        TypeError,
        r"model\.parameters\(\)",
    ),
    "limit first": (lambda: clip_grad_norm_(1.0, [five()]), TypeError, "parameters"),
    "negative": (lambda: clip_grad_norm_([five()], -1.0), ValueError, "max_norm"),
    "NaN": (lambda: clip_grad_norm_([five()], torch.tensor(math.nan)), ValueError, "max_norm"),
    "negative value": (lambda: clip_grad_value_([five()], -1.0), ValueError, "clip_value"),
    "order below 1": (lambda: clip_grad_norm_([five()], 1.0, 0.5), ValueError, "1"),
    "flag for an order": (
        lambda: clip_grad_norm_([five()], 1.0, True),
        TypeError,
        "error_if_nonfinite=True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    """Invalid arguments are refused, and the error names the valid ones."""
    call, error, token = WRONG[name]
    with pytest.raises(error, match=token):
        call()
