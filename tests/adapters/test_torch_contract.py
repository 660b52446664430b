"""The contract of `attach`, beyond that of all integrations: hooks, names, references, copies."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import random
import threading
import warnings
import weakref
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import uniclip as uc
from adapters.on_torch import Combined, five, params_of
from uniclip import insight
from uniclip.integrations.torch import attach

ONE, OTHER = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
"""Gradients of norm 5 and 12, together 13."""

RULES: dict[str, Any] = {
    "constant": uc.by_global_norm(1.0),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "above": uc.by_global_norm(1.0, skip_above=1e3),
    "stateful": uc.zclip(warmup=2),
    "chain": uc.chain(uc.by_global_norm(2.0), uc.by_global_norm(1.0)),
    "leaves": uc.by_norm(1.0),
}
"""Rules that take different ways; under each, a gradient of 5 may not move a weight by more."""


@pytest.fixture
def swaps() -> Any:
    """Have ``model.to()`` swap tensors, as it does with DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def model_of(*sizes: int) -> torch.nn.Sequential:
    """Return layers with gradients."""
    layers = [torch.nn.Linear(n, m) for n, m in pairwise(sizes)]
    model = torch.nn.Sequential(*layers)
    model(torch.ones(1, sizes[0])).sum().backward()
    return model


def times_ten(optimizer: Any, *_: object) -> None:
    """Multiply the gradients of an optimizer by ten: a hook of the user's."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(10)


# Conversions of a model.


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.usefixtures("swaps")
def test_a_model_that_is_converted(name: str, steps: int) -> None:
    """A model can be converted before and after steps, also with groups that are gone, and once the
    rule is removed; the rule goes on.
    """
    model = model_of(2, 3, 1)
    optimizer = AdamW([{"params": layer.parameters()} for layer in model])
    handle = attach(optimizer, RULES[name], names=model)
    for _ in range(steps):
        optimizer.step()
    if steps:
        del optimizer.param_groups[1]
        optimizer.step()
    for convert in (model.double, model.float, model.cpu, lambda: model.to(torch.float64)):
        convert()
        model(torch.ones(1, 2, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.state.clear()
        optimizer.step()
    handle.remove()
    model.float()


# Hooks of the user.


@pytest.mark.parametrize("name", RULES)
def test_hooks_before_and_after(name: str) -> None:
    """Hooks that were registered before `attach` run before the clip, later ones after it."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    hook = optimizer.register_step_pre_hook(times_ten)
    attach(optimizer, uc.chain(RULES[name], uc.by_global_norm(1.0)))
    optimizer.step()
    assert w.detach().norm().item() == pytest.approx(1.0)

    hook.remove()
    optimizer.register_step_pre_hook(times_ten)
    w.data.zero_()
    w.grad = ONE.clone()
    optimizer.step()
    assert w.detach().norm().item() == pytest.approx(10.0)


@pytest.mark.parametrize("closure", [False, True])
def test_hooks_of_a_skipped_step(closure: bool) -> None:
    """Hooks from before `attach` run at a skipped step, and no others."""
    w, calls = five(), []
    optimizer = SGD([w], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    attach(optimizer, uc.by_global_norm(1.0, skip_above=1.0))
    optimizer.register_step_pre_hook(lambda *_: calls.append("after"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    result = optimizer.step(lambda: 7.0) if closure else optimizer.step()
    # With a closure the decision falls after all pre-hooks.
    assert calls == (["before", "after"] if closure else ["before"])
    assert result == (7.0 if closure else None)
    assert w.tolist() == [0.0, 0.0]


def test_hooks_in_a_list() -> None:
    """Of a list, hooks of the optimizer that steps first may change gradients before the clip.

    One of a later optimizer raises, unless it was registered after `attach`.
    """
    for first, late in ((True, False), (False, False), (False, True)):
        one, other = params_of(ONE, OTHER)
        opts = [SGD([one], lr=1.0), SGD([other], lr=1.0)]
        if not late:
            opts[not first].register_step_pre_hook(times_ten)
        handle = attach(opts, uc.by_global_norm(1.0))
        if late:
            opts[1].register_step_pre_hook(times_ten)
        opts[0].step()
        if first or late:
            opts[1].step()
            assert handle.report.norms.item() == pytest.approx(math.hypot(50, 12) if first else 13)
        else:
            with pytest.raises(RuntimeError, match="hook that changes gradients"):
                opts[1].step()
            assert not other.any()


def test_a_hook_that_changes_no_counter() -> None:
    """Of a list, a hook of a later optimizer is also found if it changes gradients past PyTorch's
    counters, as a collective does; one that only looks is no fault.
    """
    for by in (0.0, 1000.0):
        one, other = params_of(ONE, OTHER)
        opts = [SGD([one], lr=1.0), SGD([other], lr=1.0)]
        opts[1].register_step_pre_hook(lambda *_, by=by, p=other: p.grad.data.add_(by) and None)
        attach(opts, uc.by_global_norm(1.0))
        opts[0].step()
        if by:
            with pytest.raises(RuntimeError, match="hook that changes gradients"):
                opts[1].step()
        else:
            opts[1].step()


def test_a_step_of_a_list_that_fails() -> None:
    """A step that failed can be taken again, in the same round."""
    one, other = params_of(ONE, OTHER)
    opts = [SGD([one], lr=1.0), SGD([other], lr=1.0)]
    handle = attach(opts, uc.zclip(warmup=9))
    opts[0].step()
    hook = opts[1].register_step_pre_hook(lambda *_: {}["none"])
    with pytest.raises(KeyError):
        opts[1].step()
    hook.remove()
    opts[1].step()
    assert handle.numbers()["state"]["count"] == [1]
    assert other.tolist() == [-12.0]


def test_a_step_without_its_hooks() -> None:
    """An object whose own ``step`` runs no hooks is clipped before it; one that loses its hooks
    after `attach` raises.
    """
    one, other = params_of(ONE, OTHER)
    outer = Combined(SGD([one], lr=1.0), SGD([other], lr=1.0))
    outer.step = lambda: [inside.step() for inside in outer.optimizers]
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    assert handle.report.norms.item() == 13

    kind = type("Loses", (SGD,), {})
    optimizer = kind([five()], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0))
    kind.step = lambda self: None
    with pytest.raises(RuntimeError, match="ran no step pre-hooks"):
        optimizer.step()


# Names.


def replace(model: Any, optimizer: Any) -> None:
    """Replace the parameters of a model and of its optimizer, as FSDP2 does in Accelerate."""
    by_old = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            new = torch.nn.Parameter(p.detach().clone())
            new.grad = None if p.grad is None else p.grad.clone()
            by_old[id(p)] = module._parameters[name] = new
    for group in optimizer.param_groups:
        group["params"] = [by_old[id(p)] for p in group["params"]]


NAMES: dict[str, Any] = {
    "module": lambda model: {"names": model},
    "pairs": lambda model: {"names": list(model.named_parameters())},
    "iterator": lambda model: {"names": model.named_parameters()},
    "own": lambda model: {},
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("loaded", [False, True])
def test_parameters_that_are_replaced(kind: str, loaded: bool) -> None:
    """Names and a loaded state stay with parameters that are replaced before the first step, as by
    ``accelerator.prepare``.
    """
    by_layer = uc.by_group_norm({"0": 1.0, "1": 2.0}, lambda path, _: path[1].partition(".")[0])
    rule = uc.chain(uc.norm_growth(1.5), by_layer)
    model = model_of(2, 3, 1)
    params = model.named_parameters() if kind == "own" else model.parameters()
    optimizer = SGD(params, lr=0.0)
    handle = attach(optimizer, rule, **NAMES[kind](model))
    saved = handle.numbers()
    assert saved["leaves"][0] == [f"[0]['{name}']" for name, _ in model.named_parameters()]
    if loaded:
        # Limits of 0, so that everything is clipped to nothing.
        (name,) = (name for name, row in saved["state"].items() if isinstance(row, list))
        saved["state"][name] = [0.0] * 4
        handle.load_state_dict(saved)
    replace(model, optimizer)
    optimizer.step()
    assert handle.numbers()["leaves"] == saved["leaves"]
    assert any(p.grad.any() for p in model.parameters()) != loaded


@pytest.mark.parametrize("kind", ["module", "own"])
def test_names_after_the_first_step(kind: str) -> None:
    """Parameters that are replaced later have the names that the model or the optimizer has."""
    model = model_of(2, 3, 1)
    params = model.named_parameters() if kind == "own" else model.parameters()
    optimizer = SGD(params, lr=0.0)
    handle = attach(optimizer, uc.adagc(), **NAMES[kind](model))
    optimizer.step()
    before = handle.numbers()["leaves"]
    replace(model, optimizer)
    optimizer.step()
    assert (
        handle.numbers()["leaves"]
        == before
        == [[f"[0]['{n}']" for n, _ in model.named_parameters()]]
    )


@pytest.mark.parametrize(
    "names", [lambda model: [], lambda model: iter(()), lambda model: torch.nn.ReLU()]
)
def test_no_names(names: Any) -> None:
    """Names that are none are refused, such as a used-up iterator."""
    model = model_of(2, 1)
    with pytest.raises(ValueError, match="names has no parameters"):
        attach(SGD(model.parameters()), uc.by_norm(1.0), names=names(model))
    used_up = model.named_parameters()
    assert len(list(used_up)) == 2
    with pytest.raises(ValueError, match="iterator that was used"):
        attach(SGD(model.parameters()), uc.by_norm(1.0), names=used_up)


# Gradients that are elsewhere.


class MasterWeights(Optimizer):
    """An optimizer of bfloat16 weights that steps float32 copies of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.pairs = [
            (p, torch.nn.Parameter(p.detach().float()))
            for group in self.param_groups
            for p in group["params"]
        ]
        self.inside = SGD([copied for _, copied in self.pairs], lr=1.0)

    def step(self, closure: Any = None) -> None:
        for p, copied in self.pairs:
            copied.grad = p.grad.float()
        self.inside.step()
        for p, copied in self.pairs:
            p.data.copy_(copied.data)


def test_copies_of_the_weights() -> None:
    """An optimizer with float32 copies of its weights says where to attach, and is right there."""
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = MasterWeights([w])
    handle = attach(optimizer, uc.by_global_norm(1.0))
    w.grad = ONE.bfloat16()
    with pytest.raises(RuntimeError, match="attach to the optimizer inside"):
        optimizer.step()
    assert not w.any()
    handle.remove()

    handle = attach(optimizer.inside, uc.by_global_norm(1.0))
    norms = []
    for size in (1.0, 1.0, 1.0):
        w.grad = torch.tensor([size, 0.0], dtype=torch.bfloat16)
        optimizer.step()
        norms.append(handle.report.norms.item())
    assert norms == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("mixed", [False, True])
def test_main_grad(name: str, mixed: bool) -> None:
    """Gradients in ``main_grad`` are not clipped, which the first step says, and no later one."""
    one, other = params_of(ONE, OTHER)
    one.grad, one.main_grad = None, ONE.clone()
    if not mixed:
        other.grad, other.main_grad = None, OTHER.clone()
    optimizer = SGD([one, other], lr=1.0)
    attach(optimizer, RULES[name])
    count = "1 parameter of 2" if mixed else "2 parameters of 2"
    with pytest.warns(UserWarning, match=f"{count} have a gradient in main_grad") as seen:
        optimizer.step()
    assert len(seen) == 1
    optimizer.step()


@pytest.mark.parametrize("name", RULES)
def test_a_report_of_an_earlier_step(name: str) -> None:
    """A step without gradients has no report of an earlier one."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    handle = attach(optimizer, RULES[name])
    optimizer.step()
    assert handle.report is not None
    w.grad = None
    with pytest.warns(UserWarning, match="no parameter had a gradient"):
        optimizer.step()
    assert handle.report is None
    assert handle.logs() == {}


# Copies.


@pytest.mark.parametrize("attached", [True, False])
def test_a_copy_says_that_it_has_no_rule(attached: bool) -> None:
    """Copies and pickles of an optimizer warn once, also after the original is gone.

    A rule that is attached to the copy ends it, and a copy made after ``remove`` says nothing.
    """
    optimizer = AdamW([five()], lr=1.0)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert optimizer.defaults == copies[0].defaults
    handle.remove()
    copies.append(copy.deepcopy(optimizer))
    assert type(optimizer.defaults) is dict
    if not attached:
        del optimizer, handle
        gc.collect()
    for number, copied in enumerate(copies):
        (w,) = copied.param_groups[0]["params"]
        w.grad = ONE.clone()
        if attached:
            attach(copied, uc.by_global_norm(1.0))
        if attached or number == 2:
            copied.step()
        else:
            with pytest.warns(UserWarning, match="this AdamW is a copy"):
                copied.step()
            copied.step()
            assert "uniclip" not in str(copied.state_dict())


# References.


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wraps", [False, True])
def test_a_training_that_is_deleted(name: str, wraps: bool) -> None:
    """Nothing keeps a training alive: its parameters are freed without a collection."""
    gc.collect()
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            params = [five() for _ in range(2)]
            optimizer = AdamW([("a", params[0]), ("b", params[1])])
            handle = attach(optimizer, RULES[name])
            scheduler = StepLR(optimizer, 1) if wraps else None
            optimizer.step()
            handle.state_dict()
            optimizer.state_dict()
            alive += [weakref.ref(p) for p in params]
            del params, optimizer, handle, scheduler
        assert [reference() for reference in alive] == [None] * 6
    finally:
        gc.enable()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("names", ["module", "own"])
def test_parameters_that_a_library_shards(name: str, names: str) -> None:
    """Whole parameters are freed when others take their places before the first step."""
    model = model_of(2, 3, 1)
    params = model.named_parameters() if names == "own" else model.parameters()
    optimizer = SGD(params, lr=0.0)
    handle = attach(optimizer, RULES[name], **NAMES[names](model))
    alive = [weakref.ref(p) for p in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        replace(model, optimizer)
        del params
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()
    optimizer.step()
    assert handle.report is not None


def test_a_parameter_that_is_deleted_later() -> None:
    """A parameter that has left the groups is freed at the next save after everybody has dropped
    it, and at once by ``remove``.
    """
    params = [five() for _ in range(3)]
    optimizer = SGD([{"params": [p]} for p in params], lr=0.0)
    handle = attach(optimizer, uc.norm_growth(1.5))
    optimizer.step()
    alive = [weakref.ref(p) for p in params]
    while len(optimizer.param_groups) > 1:
        optimizer.param_groups.pop()
    optimizer.step()
    del params[1]
    handle.state_dict()
    assert alive[1]() is None
    del params[1]
    handle.remove()
    assert alive[2]() is None


def test_the_handle_keeps_the_optimizer() -> None:
    """The handle alone is enough to go on training; a kept step alone is not."""
    w = five()
    handle = attach(SGD([w], lr=1.0), uc.by_global_norm(1.0))
    gc.collect()
    handle.optimizer.step()
    torch.testing.assert_close(w.detach(), -ONE / 5)
    step = handle.optimizer.step
    del handle
    with pytest.raises(ReferenceError, match="keep a reference to it"):
        step()


def test_a_recorder_of_a_handle_that_was_dropped() -> None:
    """A recorder belongs to its optimizer as long as that exists, with or without its handle."""
    record = insight.Recorder(lambda row: None)
    optimizer = SGD([five()], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0), record=record)
    with pytest.raises(ValueError, match=r"already records <attach: .*, SGD of 1 parameter>"):
        attach(SGD([five()]), uc.by_global_norm(1.0), record=record)
    del optimizer
    attach(SGD([five()]), uc.by_global_norm(1.0), record=record)


# A new rule for an old checkpoint.


@pytest.mark.parametrize("way", ["optimizer", "handle", "clipper"])
def test_another_rule_begins_anew(way: str) -> None:
    """A state of another rule is refused, and the error names ``resume=False``, which begins anew
    without a warning.
    """
    old, new = uc.zclip(warmup=2), uc.chain(uc.zclip(warmup=2), uc.by_global_norm(1.0))
    saving = Adam([five()])
    handle = attach(saving, old)
    saving.step()
    saved = saving.state_dict()

    def load(resume: bool) -> Any:
        if way == "clipper":
            clipper = uc.Clipper(new, resume=resume)
            clipper.load_state_dict(saved["uniclip"])
            clipper([ONE])
            return clipper
        optimizer = Adam([five()])
        other = attach(optimizer, new, resume=resume)
        if way == "optimizer":
            optimizer.load_state_dict(saved)
        else:
            other.load_state_dict(saved["uniclip"])
        optimizer.step()
        return other

    with pytest.raises(ValueError, match=r"resume=False"):
        load(resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(resume=False).report is not None
    assert handle.numbers()["rule"] != load(resume=False).state_dict()["rule"]


def test_wrappers_that_are_known() -> None:
    """A class with the name of a known wrapper stands for the optimizer inside, if it has one."""
    optimizer = SGD([five()], lr=1.0)
    wrapper = type("AcceleratedOptimizer", (), {"optimizer": optimizer, "scaler": None})()
    assert attach(wrapper, uc.by_global_norm(1.0)).optimizer is optimizer
    empty = type("DPOptimizer", (), {"original_optimizer": None})()
    with pytest.raises(TypeError, match="optimizer must be"):
        attach(empty, uc.by_global_norm(1.0))


def test_a_signature_that_a_scaler_sees() -> None:
    """The replaced step has the signature and the name of the optimizer's own."""
    import inspect

    optimizer = SGD([five()], lr=1.0)
    before = inspect.signature(optimizer.step)
    attach(optimizer, uc.by_global_norm(1.0))
    assert inspect.signature(optimizer.step) == before
    assert optimizer.step.__name__ == "step"
    kind = type("Scales", (SGD,), {"step": lambda self, closure=None, *, grad_scaler=None: None})
    kind._step_supports_amp_scaling = True
    scales = kind([five()], lr=1.0)
    attach(scales, uc.by_global_norm(1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    # GradScaler says that such a step is deprecated.
    warnings.simplefilter("ignore")
    with pytest.raises(TypeError, match="unscales inside its step"):
        scaler.step(scales)


def test_groups_of_an_ordered_dict() -> None:
    """A dict of optimizers is one list, in its order; names are those of each optimizer."""
    one, other = params_of(ONE, OTHER)
    opts = OrderedDict(muon=SGD([("m", one)], lr=1.0), adamw=SGD([("a", other)], lr=1.0))
    handle = attach(opts, uc.adagc())
    for optimizer in opts.values():
        optimizer.step()
    assert handle.optimizers == list(opts.values())
    assert handle.numbers()["leaves"] == [["[0]['m']", "[1]['a']"]]
    assert repr(handle) == "<attach: uc.adagc(), SGD and SGD of 2 parameters>"
    handle.remove()
    assert repr(handle).endswith(", removed>")


@pytest.mark.parametrize("make", [partial(SGD, lr=1.0), partial(AdamW, lr=1.0, fused=True)])
def test_a_parameter_added_on_the_spine(make: Any) -> None:
    """Groups that are added after `attach` are guarded as well as those from before."""
    one, other = params_of(ONE, OTHER)
    optimizer = make([one])
    handle = attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    optimizer.add_param_group({"params": [other]})
    one.grad = ONE.clone()
    optimizer.step()
    assert handle.report.norms.item() == pytest.approx(13)


class Delegates:
    """A wrapper that passes on all attributes of the optimizer inside, as in Noam's schedule."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class DelegatesWithStep(Delegates):
    """The same, with a step of its own."""

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("kind", [Delegates, DelegatesWithStep])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.filterwarnings("ignore:.*is not PyTorch's own")
def test_a_wrapper_that_delegates(kind: Any, listed: bool) -> None:
    """A wrapper that has the attributes of the optimizer inside is clipped, and so is a list."""
    one, other = params_of(ONE, OTHER)
    wrapped = [kind(SGD([p], lr=1.0, momentum=0.9)) for p in (one, other)]
    handle = attach(wrapped if listed else wrapped[0], uc.zclip(warmup=2))
    for wrapper in wrapped if listed else wrapped[:1]:
        wrapper.step()
    assert handle.report.norms.item() == (13 if listed else 5)
    assert "uniclip" in wrapped[0].state_dict()
    handle.remove()
    copied = copy.deepcopy(wrapped[0])
    copied.step()


class WithoutHooks:
    """An object with a step and groups, and nothing else."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad


@pytest.mark.parametrize("make", [WithoutHooks, partial(SGD, lr=1.0)])
@pytest.mark.parametrize("wraps", [False, True])
def test_attached_again_to_a_kept_step(make: Any, wraps: bool) -> None:
    """A rule that is attached again clips, also if the step of the earlier one was put back."""
    w = five()
    optimizer = make([w])
    first = attach(optimizer, uc.by_global_norm(1.0))
    kept = optimizer.step
    if wraps:
        optimizer.step = functools.wraps(kept)(lambda *args: kept(*args))
        first.remove()
    else:
        first.remove()
        optimizer.step = kept
    handle = attach(optimizer, uc.by_global_norm(2.5))
    optimizer.step()
    torch.testing.assert_close(w.detach(), -ONE / 2)
    assert handle.report.norms.item() == 5


class OwnArguments(SGD):
    """An optimizer with an argument before its closure."""

    def step(self, metric: float, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("how", ["keyword", "second"])
def test_a_closure_after_other_arguments(how: str) -> None:
    """A closure is clipped wherever it stands among the arguments."""
    w = five()
    optimizer = OwnArguments([w], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0))

    def closure() -> float:
        w.grad = torch.tensor([30.0, 40.0])
        return 7.0

    by_keyword = how == "keyword"
    step = partial(optimizer.step, 3.0, **{"closure": closure} if by_keyword else {})
    assert step(*[] if by_keyword else [closure]) == 7
    torch.testing.assert_close(w.detach(), -ONE / 5)


def test_a_step_past_the_rule_of_any_parameter() -> None:
    """Each parameter is guarded, wherever it stands in the groups of another optimizer."""
    body, head = five(), five()
    attached = SGD([head], lr=1.0)
    attach(attached, uc.by_global_norm(1.0))
    other = SGD([body, head], lr=1.0)
    with pytest.raises(RuntimeError, match="past the step"):
        other.step()
    assert not body.any()
    assert not head.any()


@pytest.mark.parametrize("where", ["after", "post", "closure"])
def test_a_rule_that_is_removed_in_a_step(where: str) -> None:
    """A hook or a closure may remove the rule; the next step is not clipped."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    if where == "after":
        optimizer.register_step_pre_hook(lambda *_: handle.remove())
    elif where == "post":
        optimizer.register_step_post_hook(lambda *_: handle.remove())
    optimizer.step(lambda: handle.remove() if where == "closure" else None)
    w.data.zero_()
    w.grad = ONE.clone()
    optimizer.step()
    assert w.tolist() == [-3.0, -4.0]


def test_a_round_with_gradients_of_the_same_identity() -> None:
    """Gradients of another backward begin a round, also if they got the identities of others."""
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    opts = [SGD([one], lr=1.0), SGD([other], lr=1.0)]
    attach(opts, uc.by_global_norm(1.0))
    for _ in range(200):
        for size, first in ((0.1, 0), (100.0, 1)):
            one.grad, other.grad = None, None
            one.data.zero_()
            other.data.zero_()
            (one.sum() * size + other.sum() * size).backward()
            opts[first].step()
        assert other.detach().norm() <= 1.0


def test_a_step_that_is_a_property() -> None:
    """A step that cannot be replaced is refused."""
    kind = type(
        "Holds",
        (),
        {
            "inside": WithoutHooks([five()]),
            "param_groups": property(lambda self: self.inside.param_groups),
            "step": property(lambda self: self.inside.step),
        },
    )
    with pytest.raises(TypeError, match="is a property"):
        attach(kind(), uc.by_global_norm(1.0))


def test_a_replaced_step_with_hooks() -> None:
    """A function in the place of a step keeps the order of hooks if it says what it wraps, and is
    refused if it does not.
    """
    for wraps in (True, False):
        w = five()
        optimizer = SGD([w], lr=1.0)
        optimizer.register_step_pre_hook(times_ten)
        step = optimizer.step
        timed = lambda *args, step=step: step(*args)
        optimizer.step = functools.wraps(step)(timed) if wraps else timed
        if wraps:
            attach(optimizer, uc.by_global_norm(1.0))
            optimizer.step()
            assert w.detach().norm().item() == pytest.approx(1.0)
        else:
            with pytest.raises(ValueError, match=r"functools\.wraps"):
                attach(optimizer, uc.by_global_norm(1.0))


def test_a_scheduler_around_a_function_without_hooks() -> None:
    """A scheduler around a function that runs no hooks does not hide that."""
    w = five()
    optimizer = SGD([w], lr=1.0)
    optimizer.step = MethodType(lambda self: [p.data.sub_(p.grad) for p in [w]], optimizer)
    StepLR(optimizer, 1)
    attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    torch.testing.assert_close(w.detach(), -ONE / 5)


def test_a_loss_scale_after_a_step_that_failed() -> None:
    """After an error in a step, a loss scale goes on with the next one."""
    w = five()
    optimizer = SGD([w], lr=1.0, fused=True)
    attach(optimizer, uc.by_global_norm(1.0))
    hook = optimizer.register_step_pre_hook(lambda *_: {}["none"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    hook.remove()
    w.grad = 1024 * ONE
    scaler.step(optimizer)
    torch.testing.assert_close(w.detach(), -ONE / 5)
    assert not hasattr(optimizer, "grad_scale")


def test_another_optimizer_in_a_closure() -> None:
    """A closure may step an optimizer that has no rule, and not one with the same parameters."""
    w, other = five(), five()
    generator, critic = SGD([w], lr=1.0), SGD([other], lr=1.0)
    attach(generator, uc.by_global_norm(1.0))
    generator.step(lambda: critic.step())
    assert other.tolist() == [-3.0, -4.0]
    torch.testing.assert_close(w.detach(), -ONE / 5)
    past = SGD([w], lr=1.0)
    with pytest.raises(RuntimeError, match="past the step"):
        generator.step(lambda: past.step())


def test_a_loss_of_a_step_that_failed() -> None:
    """A loss is for one step, also if a hook from before `attach` fails."""
    optimizer = SGD([five()], lr=1.0)
    hook = optimizer.register_step_pre_hook(lambda *_: {}["none"])
    handle = attach(optimizer, uc.by_global_norm(1.0))
    handle.loss = 5.0
    with pytest.raises(KeyError):
        optimizer.step()
    hook.remove()
    assert handle.loss is None


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("change", ["reverse", "delete", "add"])
def test_groups_that_change_before_the_first_step(named: bool, change: str) -> None:
    """Groups may change before the first step, and back later: no row is lost, and none is left."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    entries = list(zip("abcd", params, strict=True)) if named else params
    optimizer = SGD([{"params": entries[:2]}, {"params": entries[2:3]}], lr=0.0)
    handle = attach(optimizer, uc.norm_growth(1.5))
    groups = optimizer.param_groups

    def step(size: float) -> list[float]:
        for p in params:
            p.grad = torch.tensor([size, 0.0])
        optimizer.step()
        present = [p for group in groups for p in group["params"]]
        return sorted({p.grad.norm().item() for p in present})

    removed = []
    if change == "reverse":
        groups.reverse()
    elif change == "delete":
        removed.append(groups.pop(0))
    else:
        optimizer.add_param_group({"params": entries[3:]})
    assert step(1.0) == [1.0]
    present = [p for group in groups for p in group["params"]]
    assert sum(map(len, handle.numbers()["leaves"])) == len(present)
    groups.reverse()
    groups.extend(removed)
    assert step(20.0) == ([1.5, 20.0] if removed else [1.5])


def test_a_loaded_row_of_another_group() -> None:
    """A parameter that comes after a file finds its row there by name, in whatever group."""
    rule, names = uc.norm_growth(1.5), "abc"
    named = [(name, five()) for name in names]
    saving = SGD([{"params": [pair]} for pair in named], lr=0.0)
    source = attach(saving, rule)
    saving.step()
    source.remove()
    loading = SGD([{"params": named[:1]}], lr=0.0)
    handle = attach(loading, rule)
    handle.load_state_dict(source.numbers())
    loading.add_param_group({"params": named[2:]})
    for _, p in named:
        p.grad = 4 * ONE
    loading.step()
    assert [p.grad.norm().item() for _, p in named] == pytest.approx([7.5, 20.0, 7.5])
    assert sorted(handle.numbers()["leaves"][0]) == ["[0]['a']", "[1]['b']", "[1]['c']"]


@pytest.mark.parametrize("kind", ["pairs", "own"])
@pytest.mark.parametrize("by", ["optimizer", "handle"])
def test_a_loaded_state_and_another_order(kind: str, by: str) -> None:
    """Rows that are loaded stay with names if parameters change places before the first step."""
    one, other = five(), five()
    named = [("a", one), ("c", other)]

    def make() -> Any:
        optimizer = SGD(named if kind == "own" else [one, other], lr=0.0)
        return optimizer, attach(optimizer, uc.norm_growth(1.5), names=named)

    saving, source = make()
    one.grad, other.grad = torch.tensor([1.0, 0.0]), torch.tensor([10.0, 0.0])
    saving.step()
    saved, numbers = saving.state_dict(), source.numbers()
    source.remove()
    loading, handle = make()
    if by == "optimizer":
        loading.load_state_dict(saved)
    else:
        handle.load_state_dict(numbers)
    for key in {"params", "param_names"} & loading.param_groups[0].keys():
        loading.param_groups[0][key].reverse()
    one.grad, other.grad = (torch.tensor([100.0, 0.0]) for _ in range(2))
    loading.step()
    assert [one.grad.norm().item(), other.grad.norm().item()] == pytest.approx([1.5, 15.0])


def test_defaults_that_are_shared() -> None:
    """An optimizer with the very ``defaults`` of an attached one is no copy."""
    optimizer = SGD([five()], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0))
    copy.deepcopy(optimizer)
    other = SGD([five()], lr=1.0)
    other.defaults = optimizer.defaults
    other.step()


def test_defaults_are_given_back() -> None:
    """After ``remove`` the optimizer has its very own ``defaults``, with what was changed."""
    optimizer = SGD([five()], lr=1.0)
    before = optimizer.defaults
    handle = attach(optimizer, uc.by_global_norm(1.0))
    optimizer.defaults["lr"] = 0.5
    handle.remove()
    assert optimizer.defaults is before
    assert before["lr"] == 0.5


def test_steps_of_other_threads() -> None:
    """While an attached optimizer steps, another thread may step one that has no rule."""
    inside, outside = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert outside.wait(10)

    optimizer = SGD([five()], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0))
    optimizer.register_step_pre_hook(wait)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert inside.wait(10)
    other = five()
    SGD([other], lr=1.0).step()
    outside.set()
    thread.join()
    assert other.tolist() == [-3.0, -4.0]


class Changing:
    """A training whose parameters change places at random, and the norms that each has kept."""

    def __init__(self, seed: int, *, named: bool) -> None:
        self.draw = random.Random(seed)  # noqa: S311 - it draws tests
        self.named = named
        self.pool = [torch.nn.Parameter(torch.zeros(2)) for _ in range(6)]
        self.names = {id(p): f"w{number}" for number, p in enumerate(self.pool)}
        self.last: dict[int, float] = {}
        self.begin([self.pool[:2], self.pool[2:3]])

    def begin(self, groups: list[list[Any]]) -> None:
        """Make an optimizer, and attach to it."""
        self.optimizer = SGD([self.group(params) for params in groups], lr=0.0)
        self.groups = self.optimizer.param_groups
        self.handle = attach(self.optimizer, uc.norm_growth(1.5))

    def group(self, params: list[Any]) -> dict[str, Any]:
        """Return a group of parameters, with names or without."""
        return {"params": [(self.names[id(p)], p) if self.named else p for p in params]}

    def change(self) -> str:
        """Change something, and return what."""
        present = {id(p) for group in self.groups for p in group["params"]}
        free = [p for p in self.pool if id(p) not in present]
        kind = self.draw.choice(["add", "remove", "shuffle", "swap", "reload", "again", "none"])
        if kind == "add" and free:
            self.optimizer.add_param_group(self.group([self.draw.choice(free)]))
        elif kind == "remove" and len(self.groups) > 1:
            del self.groups[self.draw.randrange(len(self.groups))]
        elif kind == "shuffle":
            group = self.draw.choice(self.groups)
            order = self.draw.sample(range(len(group["params"])), len(group["params"]))
            for key in {"params", "param_names"} & group.keys():
                group[key][:] = [group[key][number] for number in order]
        elif kind == "swap":
            self.draw.shuffle(self.groups)
        elif kind == "reload":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            self.groups = self.optimizer.param_groups
        elif kind == "again" and self.named:
            # Numbers in a file say nothing of parameters that are not in the groups.
            saved = copy.deepcopy(self.optimizer.state_dict())
            self.handle.remove()
            self.begin([list(group["params"]) for group in self.groups])
            self.optimizer.load_state_dict(saved)
            self.groups = self.optimizer.param_groups
        return kind

    def step(self) -> tuple[list[float], list[float]]:
        """Take a step, and return the norms that there are after it, and should be."""
        params = [p for group in self.groups for p in group["params"]]
        for p in params:
            p.grad = torch.tensor([self.draw.choice([0.25, 1.0, 4.0, 32.0]), 0.0])
        wanted = []
        for p in params:
            norm = p.grad[0].item()
            self.last[id(p)] = min(norm, 1.5 * self.last.get(id(p), math.inf))
            wanted.append(self.last[id(p)])
        self.optimizer.step()
        return [p.grad[0].item() for p in params], wanted


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_parameters_that_change_places(seed: int, *, named: bool) -> None:
    """Each parameter keeps its own norm, however groups are changed, saved and loaded."""
    training = Changing(seed, named=named)
    kinds = []
    for _ in range(12):
        kinds.append(training.change())
        after, wanted = training.step()
        assert after == pytest.approx(wanted), kinds
