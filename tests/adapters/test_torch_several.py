"""Rules attached to objects with several optimizers: wrappers, and optimizers stepped as one."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import uniclip as uc
from adapters.contract import variants
from adapters.on_torch import (
    Attached,
    Combined,
    Compiled,
    Plain,
    Scaled,
    WithoutInit,
    Wrapper,
    five,
    params_of,
)
from kit.training import MOMENTUM, RATE, Batch
from uniclip.integrations.torch import attach, check_layout
from uniclip.saved import renamed

if TYPE_CHECKING:
    import numpy as np

ONE, OTHER = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
"""Gradients of norm 5 and 12, together 13."""


class Nested(Optimizer):
    """A combination inside a combination inside a wrapper."""

    def __init__(self, *opts: Any) -> None:
        super().__init__([group for one in opts for group in one.param_groups], {})
        self.first, self.others = Wrapper(opts[0]), Combined(*opts[1:])

    @property
    def optimizers(self) -> Any:
        return [self.first.optimizer, *self.others.optimizers]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.first.step()
        self.others.step()
        return loss


class OwnParameters(Optimizer):
    """An optimizer with parameters of its own and an inner optimizer for others."""

    def __init__(self, own: Any, others: Any) -> None:
        super().__init__([own], {})
        self.own, self.adam = own, Adam([others], lr=1.0)

    def step(self, closure: Any = None) -> None:
        self.own.data -= self.own.grad
        self.adam.step()


KINDS = [Combined, WithoutInit, Plain, Nested]


class Joint(Attached):
    """The small model under two optimizers that are stepped as one."""

    takes = Attached.takes - {"refuse"}
    kind: Any = Combined

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Start from the first weights."""
        with warnings.catch_warnings():
            # The handle stores the state of the rule; `test_where_the_state_is` tests the warning.
            warnings.simplefilter("ignore")
            super().start(uc, rule, record=record, micro=micro, **options)

    @classmethod
    def make(cls, named: Any, **options: Any) -> Any:  # type: ignore[override]
        """Return the optimizer of all parameters."""
        bias, table, matrix = named
        return cls.kind(cls.single([table]), cls.single([bias, matrix]))

    @staticmethod
    def single(named: Any) -> Any:
        """Return an optimizer of some of the parameters."""
        return SGD(named, lr=RATE, momentum=MOMENTUM)

    def inner(self) -> list[np.ndarray]:
        """Return the tensors of the optimizers' states."""
        states = [state for one in self.inside.optimizers for state in one.state.values()]
        return [
            value.numpy().copy()
            for state in states
            for value in state.values()
            if value is not None
        ]

    def save(self, folder: Path) -> None:
        """Write the states of the optimizers and of the handle."""
        states = [one.state_dict() for one in self.inside.optimizers]
        torch.save(
            {"model": self.model, "optimizers": states, "rule": self.handle.state_dict()},
            folder / "saved.pt",
        )

    def load(self, folder: Path) -> None:
        """Load the file."""
        saved = torch.load(folder / "saved.pt")
        for one, state in zip(self.inside.optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(state)
        self.handle.load_state_dict(saved["rule"])
        for name, p in self.model.items():
            p.data.copy_(saved["model"][name])

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the handle."""
        return renamed(self.handle.numbers(), lambda name: re.sub(r"^\[\d\]", "", name))

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state into the handle."""
        group = {"['table']": 0, "['b']": 1, "['w']": 1}
        self.handle.load_state_dict(
            renamed(saved, lambda name: f"[{group[name]}]{name}" if name in group else name)
        )


class JointFused(Joint):
    """Two fused optimizers as one."""

    optimizer = "adam"

    @staticmethod
    def single(named: Any) -> Any:
        """Return an optimizer of some of the parameters."""
        return Adam(named, lr=RATE, fused=True)


class JointPlain(Joint):
    """Two optimizers as one without a base class, and so without hooks."""

    kind = Plain


class JointByClosure(Joint):
    """Two optimizers as one, with gradients computed in the step."""

    takes = Joint.takes - {"micro", "record"}

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.inside.step(partial(self.backward, batch))


class JointScaled(Scaled, Joint):
    """A loss scale that divides in the outer step, or before it."""

    takes = Joint.takes - {"micro", "record", "bits"} | {"scale"}


class Forwards(Combined):
    """A combination that declares that it unscales, and passes scale and flag on."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.grad_scale, one.found_inf = self.grad_scale, self.found_inf
            one.step()
            del one.grad_scale, one.found_inf


class JointForwards(JointScaled):
    """A loss scale that the inner kernels apply."""

    optimizer = "adam"
    kind = Forwards
    single = JointFused.single


class JointCompiled(Compiled, Joint):
    """A compiled step."""


VARIANTS: dict[type[Joint], tuple[str, ...] | None] = {
    Joint: None,
    JointPlain: None,
    JointFused: ("by_global_norm", "autoclip", "skip", "skip_spikes"),
    JointByClosure: ("autoclip", "skip", "skip_spikes", "adagc"),
    JointScaled: ("by_global_norm", "zero", "adagc", "skip", "skip_spikes"),
    JointForwards: ("by_global_norm", "autoclip", "skip"),
    JointCompiled: ("by_global_norm", "skip"),
}


@pytest.mark.parametrize(("make", "check"), variants(VARIANTS))
def test_contract(make: Any, check: Any, tmp_path: Path) -> None:
    """Several optimizers stepped as one keep the contract of all integrations."""
    check(make, uc, tmp_path)


def both() -> list[Any]:
    """Return two parameters with gradients whose joint norm is 13."""
    return params_of(ONE, OTHER)


def moved(*params: Any) -> float:
    """Return the norm of parameters that started at 0."""
    return math.sqrt(sum(float((p.detach() ** 2).sum()) for p in params))


@pytest.mark.parametrize("kind", KINDS)
def test_one_norm_over_all(kind: Any) -> None:
    """All parameters share a norm in any combination, and removal stops the clipping."""
    one, other = both()
    outer = kind(SGD([one], lr=1.0), SGD([other], lr=1.0))
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    assert handle.report.norms.item() == 13
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)
    assert handle.optimizer is outer

    with pytest.raises(ValueError, match=r"remove\(\)"):
        attach(outer, uc.by_global_norm(1.0))
    handle.remove()
    one.grad, other.grad = ONE.clone(), OTHER.clone()
    outer.step()
    assert moved(one, other) == pytest.approx(14.0, abs=1e-5)


@pytest.mark.parametrize("kind", [Combined, Nested])
@pytest.mark.parametrize("first", ["attach", "scheduler"])
def test_schedulers(kind: Any, first: str) -> None:
    """A scheduler may replace ``step`` before or after, and `remove` looks through it."""
    one, other = both()
    outer = kind(SGD([one], lr=1.0), SGD([other], lr=1.0))
    makes: list[Any] = [
        lambda: attach(outer, uc.by_global_norm(1.0)),
        lambda: StepLR(outer, 1, gamma=0.5),
    ]
    handle, scheduler = (
        (make() for make in makes)
        if first == "attach"
        else reversed([make() for make in makes[::-1]])
    )
    outer.step()
    scheduler.step()
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)
    handle.remove()
    one.grad, other.grad = ONE.clone(), OTHER.clone()
    outer.step()
    scheduler.step()
    assert moved(one, other) == pytest.approx(1.0 + 0.5 * 13, abs=1e-5)


def test_parameters_of_its_own() -> None:
    """Parameters of an inner optimizer that the groups of the outer one lack raise before they
    move; a list of both has one norm.
    """
    one, other = both()
    optimizer = OwnParameters(one, other)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="not in its param_groups"):
        optimizer.step()
    assert not other.any()
    handle.remove()

    one.grad, other.grad = ONE.clone(), OTHER.clone()
    one.data.zero_()
    handle = attach([optimizer, optimizer.adam], uc.by_global_norm(1.0))
    optimizer.step()
    assert handle.report.norms.item() == 13
    torch.testing.assert_close(one.detach(), -ONE / 13)


def test_a_wrapper_of_an_unknown_class() -> None:
    """An object without groups is refused, whatever it holds; a list of what it steps works."""
    one, other = both()
    outer = Wrapper(SGD([one], lr=1.0))
    outer.second = SGD([other], lr=1.0)
    plain = type("Loop", (), {"step": lambda self: None})()
    for wrong in (outer, plain):
        with pytest.raises(
            TypeError, match=r"optimizer inside|attach\(wrapper\.optimizer, rule\).*\[muon, adamw\]"
        ):
            attach(wrong, uc.by_global_norm(1.0))
    handle = attach([outer.optimizer, outer.second], uc.by_global_norm(1.0))
    outer.step()
    outer.second.step()
    assert handle.report.norms.item() == 13
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_loaded(kind: Any) -> None:
    """After ``load_state_dict`` replaces groups, each parameter still counts once.

    A group that is added only inside raises, unless the outer groups are those inside.
    """
    one, other = both()
    outer = kind(SGD([one], lr=1.0), SGD([other], lr=1.0))
    handle = attach(outer, uc.by_global_norm(1.0))
    for inside in outer.optimizers:
        inside.load_state_dict(inside.state_dict())
    outer.step()
    assert handle.report.norms.item() == 13
    for inside in outer.optimizers:
        inside.add_param_group({"params": params_of(torch.tensor([84.0]))})
        break
    one.grad, other.grad = ONE.clone(), OTHER.clone()
    if kind in {WithoutInit, Plain}:
        outer.step()
        assert handle.report.norms.item() == 85
    else:
        with pytest.raises(RuntimeError, match="not in its param_groups"):
            outer.step()


def test_one_parameter_in_two_optimizers() -> None:
    """A parameter in two optimizers counts once."""
    w = five()
    outer = Plain(SGD([w], lr=1.0), SGD([w, *params_of(OTHER)], lr=1.0))
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    assert handle.report.norms.item() == 13


def test_names() -> None:
    """Paths have the names of the model, in each group of each optimizer."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1), "head": torch.nn.Linear(1, 1)})
    outer = Combined(
        SGD(model["body"].parameters(), lr=1.0), SGD(model["head"].parameters(), lr=1.0)
    )
    rule = uc.masked(uc.by_global_norm(1.0), lambda path, leaf: path[1].startswith("body"))
    attach(outer, rule, names=model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    outer.step()
    assert model["head"].weight.grad.item() == 3
    assert moved(*(p.grad for p in model["body"].parameters())) == pytest.approx(1.0, abs=1e-6)
    assert check_layout(outer, rule, names=model).ok


class SAM(Optimizer):
    """An optimizer that climbs before it steps, with an inner optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = SGD(self.param_groups, lr=1.0)

    def first_step(self) -> None:
        """Climb along the gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data += p.grad

    def second_step(self) -> None:
        """Return to the start, and step."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= p.grad
        self.base.step()

    def step(self, closure: Any = None) -> None:
        """Take both steps."""
        self.first_step()
        if closure is not None:
            closure()
        self.second_step()


@pytest.mark.parametrize("whole", [False, True])
def test_sam(*, whole: bool) -> None:
    """SAM is clipped by the optimizer whose ``step()`` the loop calls: SAM itself, or, in its form
    of two steps, the one inside. Attached to the other one, a step raises before it moves anything.
    """
    w = five()
    optimizer = SAM([w])
    wrong = attach(optimizer.base if whole else optimizer, uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="past the step"):
        (optimizer.step if whole else optimizer.second_step)()
    wrong.remove()
    w.data.zero_()

    attach(optimizer if whole else optimizer.base, uc.by_global_norm(1.0))
    if whole:
        optimizer.step()
    else:
        optimizer.first_step()
        assert w.tolist() == [3.0, 4.0]
        optimizer.second_step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


def test_a_class_of_pytorch_that_holds_a_part() -> None:
    """An inner optimizer of the same parameters changes nothing.

    One of other parameters raises, and is clipped in a list.
    """
    optimizer = SGD([five()], lr=1.0)
    optimizer.part = SGD(optimizer.param_groups[0]["params"], lr=1.0)
    assert attach(optimizer, uc.by_global_norm(1.0)).optimizer is optimizer

    one, other = both()
    kind = type("Both", (SGD,), {"step": lambda self: (SGD.step(self), self.muon.step())})
    outer = kind([one], lr=1.0)
    outer.muon = SGD([other], lr=1.0)
    handle = attach(outer, uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="attach to the optimizer inside, or to a list"):
        outer.step()
    handle.remove()
    one.data.zero_()
    one.grad = ONE.clone()
    attach([outer, outer.muon], uc.by_global_norm(1.0))
    outer.step()
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)


def test_an_inner_step_by_itself() -> None:
    """A direct inner step raises, since it would not be clipped.

    That of ``torch.distributed.checkpoint``, which creates a state, passes.
    """
    model = torch.nn.Linear(2, 1)
    outer = Combined(Adam([model.weight]), AdamW([model.bias]))
    handle = attach(outer, uc.by_global_norm(1.0))
    get_optimizer_state_dict(model, outer.optimizers[0])
    get_optimizer_state_dict(model, outer.optimizers)
    assert all(len(one.state) == 1 for one in outer.optimizers)
    assert handle.report is None
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="AdamW took a step past the step"):
        outer.optimizers[1].step()
    outer.step()
    assert handle.report.norms.item() == pytest.approx(math.sqrt(3))
    handle.remove()
    outer.optimizers[1].step()


def test_an_optimizer_inside_that_did_not_step() -> None:
    """Gradients of the groups are clipped at every step, whichever optimizers inside step."""
    one, other = both()
    outer = Combined(SGD([one], lr=1.0), SGD([other], lr=1.0))
    outer.step = lambda: outer.optimizers[0].step()
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    torch.testing.assert_close(other.grad, OTHER / 13)
    one.grad = 3 * ONE
    outer.step()
    assert handle.report.norms.item() == pytest.approx(math.hypot(15, 12 / 13))


def test_other_optimizers_inside() -> None:
    """The step raises after an inner optimizer was added, until its parameters have groups."""
    one, other = both()
    outer = Combined(SGD([one], lr=1.0), SGD(params_of(OTHER), lr=1.0))
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.optimizers.append(SGD([other], lr=1.0))
    with pytest.raises(RuntimeError, match="not in its param_groups"):
        outer.step()
    assert not other.any()
    one.grad = ONE.clone()
    outer.optimizers[1].param_groups[0]["params"][0].grad = OTHER.clone()
    outer.add_param_group({"params": [other]})
    outer.step()
    assert handle.report.norms.item() == pytest.approx(math.sqrt(13**2 + 12**2))


class Moves(SGD):
    """An optimizer that treats absent gradients as zeros, like Muon's reference, with decay."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                state = self.state[p].setdefault("sum", torch.zeros_like(p))
                state.mul_(0.9).add_(grad)
                p.data.mul_(0.99).sub_(0.1 * state)
        return loss


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        uc.by_global_norm(1.0, nonfinite="skip"),
        uc.by_global_norm(1.0, skip_above=100.0),
        uc.chain(uc.by_value(-9.0, 1e9), uc.Rule(100.0, curve=uc.curves.reject)),
    ],
    ids=["nonfinite", "above", "chain"],
)
def test_a_skipped_step_is_not_taken(rule: Any, *, together: bool, by_closure: bool) -> None:
    """A skipped step changes nothing, even in optimizers that treat absent gradients as zeros."""
    one, other = both()
    optimizer = Combined(Moves([one]), Moves([other])) if together else Moves([one, other])
    scheduler = StepLR(optimizer, 1)
    attach(optimizer, rule)
    optimizer.step()
    scheduler.step()

    def states() -> list[Any]:
        insides = optimizer.optimizers if together else [optimizer]
        return [state["sum"].clone() for inside in insides for state in inside.state.values()]

    def closure() -> Any:
        other.grad = torch.tensor(
            [math.nan if rule.__class__ is uc.Rule and rule.nonfinite == "skip" else 1e6]
        )
        return torch.tensor(7.0)

    before = one.detach().clone(), other.detach().clone(), states()
    closure()
    found = optimizer.step(closure) if by_closure else optimizer.step()
    assert found == (7.0 if by_closure else None)
    torch.testing.assert_close((one.detach(), other.detach(), states()), before, rtol=0, atol=0)
    assert one.grad is not None
    assert other.grad is not None
    one.grad, other.grad = ONE.clone(), OTHER.clone()
    optimizer.step()
    assert not torch.equal(one.detach(), before[0])


class ClimbsFirst(SGD):
    """An optimizer that moves the parameters before the closure, and back after it."""

    fails = False
    through_data = False

    def move(self, by: float) -> None:
        for p in self.param_groups[0]["params"]:
            if self.through_data:
                p.data += by
            else:
                with torch.no_grad():
                    p.add_(by)

    def step(self, closure: Any = None) -> Any:
        self.move(1.0)
        loss = closure()
        self.move(-1.0)
        if self.fails:
            raise RuntimeError("a step failed")  # noqa: EM101, TRY003 - of a class that is not ours
        super().step()
        return loss


@pytest.mark.parametrize("through_data", [False, True])
def test_a_step_that_has_moved_something(*, through_data: bool) -> None:
    """A step that has already moved parameters is completed without gradients, which come back."""
    w = five()
    optimizer = ClimbsFirst([w], lr=1.0)
    optimizer.through_data = through_data
    attach(optimizer, uc.by_global_norm(1.0, skip_above=10.0))

    def closure() -> float:
        w.grad = torch.tensor([30.0, 40.0])
        return 7.0

    assert optimizer.step(closure) == 7
    assert w.tolist() == [0.0, 0.0]
    assert w.grad.tolist() == [0.0, 0.0]
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="a step failed"):
        optimizer.step(closure)
    assert w.grad.tolist() == [0.0, 0.0]


class Ignores(SGD):
    """An optimizer that does not call its closure."""

    def step(self, closure: Any = None) -> None:
        super().step()


@pytest.mark.parametrize(
    "make", [Ignores, lambda *args, **kwargs: Combined(SGD(*args, **kwargs), SGD(params_of(OTHER)))]
)
def test_a_closure_that_is_never_called(make: Any) -> None:
    """The step raises if its closure was not called, and the next one, without it, is clipped."""
    w = five()
    optimizer = make([w], lr=1.0)
    if isinstance(optimizer, Combined):
        optimizer.step = lambda closure=None: [one.step() for one in optimizer.optimizers]
    attach(optimizer, uc.by_global_norm(1.0))
    with pytest.raises(RuntimeError, match="did not call it"):
        optimizer.step(lambda: None)
    w.data.zero_()
    w.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert moved(w) <= 1 + 1e-6


@pytest.mark.parametrize(
    "rule",
    [
        uc.by_global_norm(1.0),
        uc.autoclip(),
        uc.adagc(),
        uc.Rule(uc.limits.Split(1.0), scope=uc.scopes.each_leaf),
    ],
)
def test_a_step_in_backward(rule: Any) -> None:
    """A joint norm is refused in a backward hook, since later gradients are missing.

    The error names the rules to use.
    """
    model = torch.nn.Linear(2, 2)
    for p in model.parameters():
        optimizer = SGD([p], lr=1.0)
        attach(optimizer, rule)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(RuntimeError, match="during backward"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_step_of_one_leaf_in_backward() -> None:
    """A norm of each leaf works in a backward hook."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0)
    attach(optimizer, uc.by_norm(1.0))
    w.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    (w @ torch.tensor([3.0, 4.0])).backward()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


def test_where_the_state_is() -> None:
    """The state is in the outer ``state_dict`` where that is PyTorch's own, else in the handle.

    In that case `attach` warns.
    """
    outer = Combined(SGD([five()]), SGD([five()]))
    handle = attach(outer, uc.autoclip())
    outer.step()
    assert outer.state_dict()["uniclip"]["state"].keys() == handle.state_dict()["state"].keys()
    again = Combined(SGD([five()]), SGD([five()]))
    other = attach(again, uc.autoclip())
    again.load_state_dict(outer.state_dict())
    assert other.numbers() == handle.numbers()

    own = type(
        "OwnState",
        (Combined,),
        {"state_dict": lambda self: [one.state_dict() for one in self.optimizers]},
    )
    for kind in (
        own,
        WithoutInit,
        Plain,
        lambda one, _: WithoutHooks(one.param_groups[0]["params"]),
    ):
        with pytest.warns(UserWarning, match=r"handle\.state_dict\(\)"):
            attach(kind(SGD([five()]), SGD([five()])), uc.autoclip())
        # A stateless rule needs no warning.
        attach(kind(SGD([five()]), SGD([five()])), uc.by_global_norm(1.0))


def test_a_warning_that_is_an_error() -> None:
    """An attach that fails, because warnings are errors, leaves the optimizer without a rule."""
    outer = Plain(SGD([five()], lr=1.0), SGD(params_of(OTHER), lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"handle\.state_dict\(\)"):
            attach(outer, uc.zclip())
    attach(outer, uc.by_norm(1.0)).remove()


def test_copies() -> None:
    """Copies and pickles have no rule: they step unclipped, and the first step says so."""
    outer = Plain(SGD([five()], lr=1.0), SGD(params_of(OTHER), lr=1.0))
    attach(outer, uc.by_global_norm(1.0))
    for copied in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        params = [p for group in copied.param_groups for p in group["params"]]
        for p, grad in zip(params, (ONE, OTHER), strict=True):
            p.grad = grad.clone()
        with pytest.warns(UserWarning, match="this Plain is a copy"):
            copied.step()
        assert moved(*params) == 13
        assert "step" not in vars(copied)


class WithoutHooks:
    """An object with a step, and no optimizer inside."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 1.0}]

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad


def test_an_object_without_hooks() -> None:
    """An object without hooks is clipped like an optimizer, also by a rule that skips.

    So is one inside of an object whose groups have its parameters.
    """
    w = five()
    optimizer = WithoutHooks([w])
    handle = attach(optimizer, uc.by_global_norm(1.0, skip_above=10.0))
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))
    w.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))
    handle.remove()
    assert "step" not in vars(optimizer)

    one, other = both()
    outer = Plain(SGD([one], lr=1.0), WithoutHooks([other]))
    attach(outer, uc.by_global_norm(1.0))
    outer.step()
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)


def test_what_is_refused() -> None:
    """Objects that are not stepped like an optimizer are refused in one sentence."""
    keyed = type("InBackward", (), {})()
    keyed.optim_map = {p: SGD([p]) for p in params_of(*[torch.ones(300)] * 148)}
    scheduler = StepLR(SGD([five()]), 1)
    for wrong in (keyed, scheduler, torch.nn.Linear(2, 1), SGD, None):
        with pytest.raises(TypeError, match="optimizer must be") as error:
            attach(wrong, uc.by_global_norm(1.0))
        assert len(str(error.value)) < 300
    empty = WithoutInit()
    del WithoutInit.param_groups
    with pytest.raises(TypeError, match="no param_groups"):
        attach(empty, uc.by_global_norm(1.0))


def test_many_optimizers_by_parameter() -> None:
    """A dict with an optimizer for each parameter has one norm.

    Errors print no tensor.
    """
    params = params_of(*[torch.ones(300)] * 148)
    opts = {p: SGD([p], lr=1.0) for p in params}
    handle = attach(opts, uc.by_global_norm(1.0))
    for optimizer in opts.values():
        optimizer.step()
    assert handle.report.norms.item() == pytest.approx(math.sqrt(300 * 148))
    assert moved(*params) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(RuntimeError, match="past the step") as error:
        SGD(params, lr=1.0).step()
    assert len(str(error.value)) < 400


class Scheduled(SGD):
    """An optimizer with a helper that has the same two attributes, and no step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.helper = WithoutHooks(params)


class Own(Optimizer):
    """A custom class with such a helper."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})
        self.scheduler = WithoutHooks(params)
        self.scheduler.optimizer = self
        self.mock = MagicMock()

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad


@pytest.mark.parametrize("make", [partial(Scheduled, lr=1.0), Own])
def test_a_helper_inside(make: Any) -> None:
    """A scheduler that looks like an optimizer, or a mock, is ignored; its owner is clipped."""
    w = five()
    optimizer = make([w])
    assert attach(optimizer, uc.by_global_norm(1.0)).optimizer is optimizer
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


class Known(Optimizer):
    """An optimizer with a reference to the wrapper around it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    step = Own.step


def test_a_wrapper_that_is_known_inside() -> None:
    """The given optimizer is clipped, not a wrapper that it references."""
    w = five()
    optimizer = Known([w])
    optimizer.owner = Combined(optimizer)
    assert attach(optimizer, uc.by_global_norm(1.0)).optimizer is optimizer
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


def test_what_a_removed_rule_keeps_alive() -> None:
    """A removed rule keeps no reference: an unused optimizer is freed without a collection."""
    optimizer = SGD([five()], lr=1.0)
    attach(optimizer, uc.by_global_norm(1.0, nonfinite="skip")).remove()
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "pairs": lambda one: [("name", one)],
    "set": lambda one: {one},
    "deque": lambda one: deque([one]),
    "key": lambda one: {one: "its scheduler"},
    "tuple in a dict": lambda one: {"muon": (one, None)},
    "generator": lambda one: iter([one]),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_containers(make: Any) -> None:
    """Lists, tuples and dicts of optimizers are taken, but nothing is searched."""
    with pytest.raises(TypeError, match="or be a list of these"):
        attach(make(SGD([five()])), uc.by_global_norm(1.0))


def test_optimizers_that_take_turns() -> None:
    """Two optimizers may share parameters, and an attribute may point to the one that steps."""
    w = five()
    outer = Plain(SGD([w], lr=1.0), Adam([w], lr=1.0))
    outer.step = lambda: (vars(outer).update(active=outer.optimizers[0]), outer.active.step())
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    outer.step()
    assert handle.report.norms.item() == pytest.approx(1.0)


def test_optimizers_that_alternate() -> None:
    """An optimizer may wait for its turn while its gradients are 0."""
    one, other = both()
    outer = Combined(SGD([one], lr=1.0), SGD([other], lr=1.0))
    turns = iter(outer.optimizers)
    outer.step = lambda: next(turns).step()
    handle = attach(outer, uc.by_global_norm(1.0))
    other.grad.zero_()
    outer.step()
    one.grad.zero_()
    other.grad = OTHER.clone()
    outer.step()
    assert handle.report.norms.item() == 12


class Switches(Combined):
    """A wrapper that takes its first steps by itself."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 1:
            for p in self.param_groups[0]["params"]:
                p.data -= p.grad
        elif self.count == 3:
            super().step()


def test_a_wrapper_that_moves_parameters_itself() -> None:
    """A wrapper that moves parameters itself is clipped at each of its steps, also at one in which
    it only waits.
    """
    w = five()
    optimizer = Switches(SGD([w], lr=1.0))
    attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))
    w.data.zero_()
    w.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("make", [SGD, Moves])
def test_a_scheduler_and_a_first_step_that_is_skipped(make: Any) -> None:
    """A scheduler does not warn after a skipped first step."""
    w = five()
    optimizer = make([w], lr=1.0)
    scheduler = StepLR(optimizer, 1)
    attach(optimizer, uc.by_global_norm(1.0, skip_above=1.0))
    optimizer.step()
    scheduler.step()
    assert w.tolist() == [0.0, 0.0]


def test_a_step_that_was_kept() -> None:
    """A wrapper that calls a ``step`` saved before the rule raises before anything moves.

    After a failed step, a direct inner one is still refused.
    """
    one, other = both()
    outer = Combined(SGD([one], lr=1.0), SGD([other], lr=1.0))
    kept = outer.step
    handle = attach(outer, uc.by_global_norm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # Accelerate does this; its scaler then steps the outer optimizer.
    outer.step = kept
    one.grad, other.grad = 1024 * ONE, 1024 * OTHER
    scaler.scale(torch.zeros(()))
    with pytest.raises(RuntimeError, match="attach first, then make the wrapper"):
        scaler.step(outer)
    assert moved(one, other) == 0
    assert handle.report is None
    handle.remove()
    # The step of Accelerate, which was there before, is still there.
    assert outer.step == kept
    attach(outer, uc.by_global_norm(1.0))

    first = outer.optimizers[0].register_step_pre_hook(lambda *_: {}["none"])
    with pytest.raises(KeyError):
        outer.step()
    first.remove()
    with pytest.raises(RuntimeError, match="past the step"):
        outer.optimizers[0].step()


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_scaler_that_steps_each(options: dict[str, Any]) -> None:
    """A scaler that steps each optimizer divides its gradients after all are clipped: this raises
    before any move, and is right once all are unscaled.
    """
    model = torch.nn.Linear(2, 1)
    opts = [SGD([p], lr=1.0, **options) for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = attach(opts, uc.by_global_norm(1.0))
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(opts[0])
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    scaler.update()
    for optimizer in opts:
        scaler.unscale_(optimizer)
    for optimizer in opts:
        scaler.step(optimizer)
    assert handle.report.norms.item() == pytest.approx(math.sqrt(26))


def test_a_refused_attach_changes_nothing() -> None:
    """A refused attach leaves no hooks on inner optimizers; a frozen one can be attached to."""
    inner = SGD([five()], lr=1.0)
    groups = property(lambda self: self.inner.param_groups)
    slots = type(
        "Slots", (), {"__slots__": ("inner", "other"), "step": None, "param_groups": groups}
    )()
    kind = type(slots)
    kind.step = lambda self: (self.inner.step(), self.other.step())
    slots.inner, slots.other = inner, SGD([five()], lr=1.0)
    with pytest.raises(TypeError, match="has slots"):
        attach(slots, uc.by_global_norm(1.0))
    slots.step()

    @dataclass(frozen=True)
    class Frozen:
        first: Any
        second: Any

        @property
        def param_groups(self) -> Any:
            return [*self.first.param_groups, *self.second.param_groups]

        def step(self) -> None:
            self.first.step()
            self.second.step()

    one, other = both()
    outer = Frozen(SGD([one], lr=1.0), SGD([other], lr=1.0))
    handle = attach(outer, uc.by_global_norm(1.0))
    outer.step()
    assert moved(one, other) == pytest.approx(1.0, abs=1e-6)
    handle.remove()
    assert "step" not in vars(outer)


class Container(Combined, Stateful):
    """A combination that is a ``Stateful`` of ``torch.distributed.checkpoint``."""

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self.optimizers]


def test_another_base_class_of_pytorch() -> None:
    """Another base class of PyTorch does not make an optimizer, so the inner ones are watched."""
    one, other = both()
    outer = Container(SGD([one], lr=1.0), SGD([other], lr=1.0))
    with pytest.warns(UserWarning, match="handle.state_dict"):
        attach(outer, uc.autoclip())
    with pytest.raises(RuntimeError, match="past the step"):
        outer.optimizers[0].step()


def test_a_wrapper_that_waits_with_nan() -> None:
    """A parameter that is NaN, and stays so, has not moved."""
    w = five()
    optimizer = Switches(SGD([w], lr=1.0))
    optimizer.count = 1
    w.data.fill_(math.nan)
    attach(optimizer, uc.by_global_norm(1.0))
    optimizer.step()
    assert optimizer.count == 2
