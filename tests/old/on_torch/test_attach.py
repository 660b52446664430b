"""Rules attached to PyTorch's optimizers, step by step against the loop that clips by hand."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam
from torch.utils._python_dispatch import TorchDispatchMode

import uniclip as uc
from uniclip.backends.torch import BACKEND
from uniclip.integrations.torch import attach

UNFUSED: dict[str, Callable[..., Any]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-foreach": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "adam": partial(Adam, lr=0.1, foreach=False),
    "adam-foreach": partial(Adam, lr=0.1, foreach=True, amsgrad=True),
    "adamw": partial(AdamW, lr=0.1),
    "adagrad": partial(Adagrad, lr=0.1),
    "rmsprop": partial(RMSprop, lr=0.1),
}
FUSED: dict[str, Callable[..., Any]] = {
    "fused-sgd": partial(SGD, lr=0.1, fused=True),
    "fused-sgd-momentum": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "fused-adam": partial(Adam, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "fused-adamw": partial(AdamW, lr=0.1, maximize=True, fused=True),
    "fused-adagrad": partial(Adagrad, lr=0.1, fused=True),
}
OPTIMIZERS = UNFUSED | FUSED


class Seen(NamedTuple):
    """The sum of the norms seen so far, and their number."""

    total: list[Any]
    count: list[Any]


class Usual(uc.Limit):
    """Allow half the mean of all norms so far."""

    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Seen:
        """Nothing is seen yet."""
        return Seen(0 * norms, 0 * norms)

    def __call__(self, norms: Any, state: Seen, context: uc.limits.Context) -> Any:
        """Take the norms in first."""
        total, count = state.total + norms, state.count + 1
        return 0.5 * total / count, Seen(total, count)


class Relative(uc.Limit):
    """Allow a hundredth of the parameters' norm."""

    needs: ClassVar[frozenset[str]] = frozenset({"params"})

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        """Ask for the parameters."""
        return 0.01 * context.params + 1e-3, state


RULES = {
    "clipped": uc.by_global_norm(0.5),
    "not clipped": uc.by_global_norm(1e6),
    "zero": uc.by_global_norm(0.0),
    "largest": uc.by_global_norm(0.1, ord=math.inf),
    "each leaf": uc.by_norm(0.3),
    "by value": uc.by_value(-0.1, 0.1),
    "parameters": uc.Rule(Relative()),
    "memory": uc.Rule(Usual()),
    "each remembered": uc.Rule(Usual(), scope=uc.scopes.each_leaf),
    "each group": uc.Rule(0.3, scope=uc.scopes.groups(lambda path, leaf: path[0])),
    "zeroed": uc.by_global_norm(0.5, nonfinite="zero"),
}


def model() -> torch.nn.Module:
    """Make the same small model each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def loss_of(net: torch.nn.Module, step: int, factor: float = 1.0) -> torch.Tensor:
    """Make a loss that differs from step to step."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    return factor * (net(x) ** 2).sum() * (1 + step % 3)


def groups_of(net: Any) -> list[dict[str, Any]]:
    """Put the layers into two groups."""
    return [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]


def grads_of(optimizer: Any) -> list[list[Any]]:
    """Return the gradients as the attached rule sees them."""
    return [[p.grad for p in group["params"]] for group in optimizer.param_groups]


def params_of(optimizer: Any) -> list[list[Any]]:
    """Return the parameters as the attached rule sees them."""
    return [[p.detach() for p in group["params"]] for group in optimizer.param_groups]


class ByHand:
    """Clip by hand, as the attached rule should."""

    def __init__(self, optimizer: Any, rule: Any) -> None:
        self.optimizer, self.rule, self.report = optimizer, rule, None
        self.state = rule.init(params_of(optimizer))

    def clip(self) -> None:
        """Clip once."""
        _, self.state, self.report = self.rule.update(
            grads_of(self.optimizer), self.state, params_of(self.optimizer), in_place=True
        )


def flat(tree: Any) -> list[Any]:
    """Return the leaves of a state."""
    return torch.utils._pytree.tree_leaves(tree)


def same(one: Any, other: Any, *, exact: bool = False) -> None:
    """Assert that two optimizers (attached, by hand) and what they optimize agree."""
    close = partial(torch.testing.assert_close, **({"rtol": 0, "atol": 0} if exact else {"rtol": 2e-5, "atol": 2e-6}))
    for get in (params_of, grads_of):
        close(get(one), get(other))
    close(one.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_as_by_hand(make: Any, rule: Any) -> None:
    """Each optimizer steps by each rule as if clipped by hand, and .grad holds the clipped gradients after it."""
    ours, theirs = model(), model()
    one, other = make(groups_of(ours)), make(groups_of(theirs))
    handle, hand = attach(one, rule), ByHand(other, rule)
    for step in range(5):
        for net, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(net, step).backward()
        one.step()
        hand.clip()
        other.step()
        same(one, other, exact=not one.defaults.get("fused"))
        torch.testing.assert_close(flat(handle.state), flat(hand.state))
        torch.testing.assert_close(flat(tuple(handle.report)), flat(tuple(hand.report)), rtol=1e-5, atol=1e-6)
        assert {"grad_scale", "found_inf"}.isdisjoint(vars(one))


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_the_clip_is_folded(make: Any) -> None:
    """The fused kernel gets the gradients as they are and what to divide by, only where it clips."""
    net = model()
    optimizer = make(groups_of(net))
    handle = attach(optimizer, uc.by_global_norm(0.5))
    seen: list[Any] = []

    def spy(optimizer: Any, *_: Any) -> None:
        seen.append((getattr(optimizer, "grad_scale", None), copy.deepcopy(grads_of(optimizer))))

    optimizer.register_step_pre_hook(spy)
    for factor in (1.0, 1e-3):
        optimizer.zero_grad()
        loss_of(net, 0, factor).backward()
        before = copy.deepcopy(grads_of(optimizer))
        optimizer.step()
        torch.testing.assert_close(seen[-1][1], before, rtol=0, atol=0)
        scale = seen[-1][0]
        assert (scale is not None) == bool(handle.report.clipped) == (factor == 1)
        assert scale is None or (scale.dtype is torch.float32 and scale.shape == ())
        assert scale is None or scale.item() == pytest.approx(1 / handle.report.factors.item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Double precision, which grad_scale has not, is clipped in place; half precision is folded."""
    ours, theirs = model().to(dtype), model().to(dtype)
    one, other = (SGD(net.parameters(), lr=0.5, fused=True) for net in (ours, theirs))
    attach(one, uc.by_global_norm(0.5))
    for optimizer in (one, other):
        for number, p in enumerate(params_of(optimizer)[0]):
            optimizer.param_groups[0]["params"][number].grad = torch.ones_like(p)
    uc.clip_(grads_of(other), uc.by_global_norm(0.5))
    one.step()
    other.step()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(params_of(one), params_of(other), rtol=2 * eps, atol=eps / 4)
    torch.testing.assert_close(grads_of(one), grads_of(other), rtol=2 * eps, atol=0)


AMP_RULES = ["clipped", "not clipped", "zero", "each leaf", "memory", "zeroed"]
AMP_OPTIMIZERS = ["sgd", "adam-foreach", "fused-sgd-momentum", "fused-adamw", "fused-adagrad"]


@pytest.mark.parametrize("inf", [None, 0, 2])
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("rule", AMP_RULES)
@pytest.mark.parametrize("name", AMP_OPTIMIZERS)
def test_grad_scaler(name: str, rule: str, unscale: bool, inf: int | None) -> None:
    """With a GradScaler the unscaled gradients are clipped, and a step that it skips changes nothing."""
    ours, theirs, make = model(), model(), OPTIMIZERS[name]
    # A fused SGD by hand has no momentum to compare with after a first step that was skipped.
    one, other = make(groups_of(ours)), partial(make.func, **make.keywords | {"fused": False})(groups_of(theirs))
    handle, hand = attach(one, RULES[rule]), ByHand(other, RULES[rule])
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for net, optimizer, scaler in zip((ours, theirs), (one, other), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, step, math.inf if step == inf else 1.0)).backward()
            if optimizer is other or unscale:
                scaler.unscale_(optimizer)
            state = handle.state
            if optimizer is other and step != inf:
                hand.clip()
            scaler.step(optimizer)
            if optimizer is one and step == inf:
                assert handle.state is state
            scaler.update()
        if step != inf:
            same(one, other)
            torch.testing.assert_close(flat(tuple(handle.report)), flat(tuple(hand.report)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(params_of(one), params_of(other), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(flat(handle.state), flat(hand.state))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert {"grad_scale", "found_inf"}.isdisjoint(vars(one))


def test_grad_scaler_with_raise() -> None:
    """What GradScaler skips by itself is no error, what reaches the parameters is one."""
    net = model()
    optimizer = AdamW(net.parameters(), fused=True)
    attach(optimizer, uc.by_global_norm(1.0, nonfinite="raise"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, 0, math.inf)).backward()
    before = copy.deepcopy(params_of(optimizer))
    scaler.step(optimizer)
    torch.testing.assert_close(params_of(optimizer), before, rtol=0, atol=0)
    with pytest.raises(FloatingPointError, match=r"^NaN or ∞ in grads\[0\]\[0\], "):
        optimizer.step()


def test_float16_that_cannot_be_unscaled() -> None:
    """Float16 gradients are not unscaled in place, where small ones would be lost; folded they need not be."""
    for rule in (uc.by_norm(1.0), uc.by_global_norm(1.0)):
        w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        optimizer = SGD([w], lr=1.0, fused=True)
        handle = attach(optimizer, rule)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        scaler.scale(w.float() @ torch.tensor([3.0, 0.0, 1e-6])).backward()
        if rule.scope == uc.scopes.each_leaf:
            with pytest.raises(ValueError, match="float16 cannot hold them"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            assert w[0].item() == -1
            assert handle.report.norms.item() == 3


class Unscaling(SGD):
    """An optimizer of the old kind, to which GradScaler hands itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        """Take scaled gradients."""
        raise AssertionError


def test_a_differentiable_optimizer() -> None:
    """Derivatives of a step would not see the clipping."""
    with pytest.raises(ValueError, match=r"\(differentiable=True\) do not see: use uc.clip"):
        attach(SGD(model().parameters(), differentiable=True), uc.by_global_norm(1.0))


def test_an_optimizer_that_gets_the_scaler() -> None:
    """Whether such an optimizer's gradients are still scaled cannot be known, so they are not clipped."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = Unscaling([w]), torch.amp.GradScaler("cpu")
    attach(optimizer, uc.by_global_norm(1.0))
    scaler.scale(w.sum()).backward()
    message = "Unscaling unscales inside its step: clip by hand after"
    with pytest.warns(FutureWarning, match="passing itself"), pytest.raises(TypeError, match=message):
        scaler.step(optimizer)


def test_the_users_own_grad_scale() -> None:
    """Gradients that are to be divided by a grad_scale of the user's are clipped as if they were."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0, fused=True)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    optimizer.grad_scale = own = torch.tensor(8.0)
    w.grad = torch.tensor([24.0, 32.0])
    optimizer.step()
    assert handle.report.norms.item() == 5
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))
    assert optimizer.grad_scale is own


@pytest.mark.parametrize("scope", [uc.scopes.all_leaves, uc.scopes.each_leaf], ids=repr)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("bad", [0, 2])
def test_skip_skips_the_step(make: Any, scope: Any, bad: int) -> None:
    """With the policy "skip" a step on NaN is as if it had not been: parameters, moments, counts and state."""
    ours, theirs = model(), model()
    one, other = make(groups_of(ours)), make(groups_of(theirs))
    rule = uc.Rule(Usual(), scope=scope, nonfinite="skip")
    handle, hand = attach(one, rule), ByHand(other, rule)
    for step in range(4):
        one.zero_grad()
        loss_of(ours, step).backward()
        if step == bad:
            ours[0].bias.grad[1] = math.nan
        one.step()
        assert bool(handle.report.finite) == (step != bad)
        assert all(p.grad is not None for p in ours.parameters())
        if step != bad:
            other.zero_grad()
            loss_of(theirs, step).backward()
            hand.clip()
            other.step()
            same(one, other)
        torch.testing.assert_close(params_of(one), params_of(other), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(flat(handle.state), flat(hand.state))


@pytest.mark.parametrize("make", [UNFUSED["sgd"], *FUSED.values()], ids=str)
def test_propagate(make: Any) -> None:
    """By default what is not finite is seen: every parameter becomes NaN."""
    net = model()
    optimizer = make(groups_of(net))
    attach(optimizer, uc.by_global_norm(1.0))
    loss_of(net, 0).backward()
    net[0].bias.grad[1] = math.inf
    optimizer.step()
    assert all(p.isnan().all() for p in net.parameters())


@pytest.mark.parametrize("make", [UNFUSED["sgd"], *FUSED.values()], ids=str)
def test_zero(make: Any) -> None:
    """With the policy "zero" the entries that are not finite count as 0, also where a step is fused."""
    ours, theirs = model(), model()
    one, other = make(groups_of(ours)), make(groups_of(theirs))
    attach(one, uc.by_global_norm(0.5, nonfinite="zero"))
    for net, optimizer in ((ours, one), (theirs, other)):
        loss_of(net, 0).backward()
        net[0].bias.grad[1] = 0 if optimizer is other else math.nan
    uc.clip_(grads_of(other), uc.by_global_norm(0.5))
    one.step()
    other.step()
    same(one, other)


def test_a_factor_whose_reciprocal_overflows() -> None:
    """A gradient far beyond its limit is clipped to it, though grad_scale could not hold the ratio."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0, fused=True)
    attach(optimizer, uc.by_global_norm(0.1))
    w.grad = torch.tensor([3e38, 0.0])
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.1, 0.0]), rtol=1e-4, atol=0)


class NoHostRead(TorchDispatchMode):
    """Refuse to read a tensor's value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read to the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_no_host_reads(monkeypatch: pytest.MonkeyPatch, make: Any, nonfinite: Any, scaled: bool) -> None:
    """Where values cannot be read at no cost, none is; but the momentum of SGD costs "skip" one."""
    ours, theirs = model(), model()
    one, other = make(groups_of(ours)), make(groups_of(theirs))
    rule = uc.Rule(Usual(), nonfinite=nonfinite)
    handle, hand = attach(one, rule), ByHand(other, rule)
    skips = nonfinite == "skip"
    for step in range(4):
        bad = skips and step in {0, 2}
        for net, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            loss_of(net, step, math.nan if bad else 1.0).backward()
        if scaled:
            one.grad_scale, one.found_inf = torch.tensor(64.0), torch.tensor(0.0)
            torch._foreach_mul_([g for group in grads_of(one) for g in group], 64.0)
        with monkeypatch.context() as patch, torch.utils._python_dispatch._disable_current_modes():
            patch.setattr(type(BACKEND), "readable", lambda self, array: False)
            if skips and isinstance(one, SGD):
                one.step()
                assert step or not one.state  # no momentum from a first step that is skipped
            else:
                with NoHostRead():
                    one.step()
        if scaled:
            del one.grad_scale, one.found_inf
        if not bad:
            hand.clip()
            other.step()
            same(one, other)
        torch.testing.assert_close(params_of(one), params_of(other), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(flat(handle.state), flat(hand.state))
        assert {"grad_scale", "found_inf"}.isdisjoint(vars(one))


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero", "raise"])
def test_a_scaled_step_on_a_device(monkeypatch: pytest.MonkeyPatch, nonfinite: Any) -> None:
    """Where found_inf is on a device, a step that GradScaler has skipped changes nothing either."""
    net = model()
    optimizer = AdamW(net.parameters(), fused=True)
    handle = attach(optimizer, uc.Rule(Usual(), nonfinite=nonfinite))
    loss_of(net, 0).backward()
    optimizer.step()
    before, state = copy.deepcopy(params_of(optimizer)), copy.deepcopy(handle.state)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    net[0].bias.grad[1] = math.inf
    monkeypatch.setattr(type(BACKEND), "readable", lambda self, array: False)
    optimizer.step()
    torch.testing.assert_close(params_of(optimizer), before, rtol=0, atol=0)
    torch.testing.assert_close(handle.state, state, rtol=0, atol=0)


def test_lbfgs() -> None:
    """LBFGS computes gradients inside its step; each time, they are clipped before it looks."""
    ours, theirs = model(), model()
    rule = uc.by_global_norm(2.0)
    options = {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    one, other = LBFGS(ours.parameters(), **options), LBFGS(theirs.parameters(), **options)
    handle = attach(one, rule)

    def closure(net: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        if optimizer is other:
            uc.clip_(grads_of(other), rule)
        return loss

    for _ in range(3):
        losses = [optimizer.step(partial(closure, net, optimizer)) for net, optimizer in ((ours, one), (theirs, other))]
        torch.testing.assert_close(*losses, rtol=0, atol=0)
        same(one, other, exact=True)
    assert handle.report.norms.item() > 2


def test_lbfgs_skips() -> None:
    """LBFGS does not move by gradients that are not finite."""
    net = model()
    optimizer = LBFGS(net.parameters())
    attach(optimizer, uc.by_global_norm(1.0, nonfinite="skip"))
    before = copy.deepcopy(params_of(optimizer))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        (loss * math.nan).backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(params_of(optimizer), before, rtol=0, atol=0)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("make", [UNFUSED["adam"], FUSED["fused-adam"]], ids=str)
def test_closures(make: Any, by_keyword: bool) -> None:
    """A closure's gradients are clipped, not those before it, and its loss is returned."""
    ours, theirs = model(), model()
    one, other = make(groups_of(ours)), make(groups_of(theirs))
    attach(one, uc.by_global_norm(0.5))
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            one.zero_grad()
            loss = loss_of(ours, step)
            loss.backward()
            return loss

        loss = one.step(closure=closure) if by_keyword else one.step(closure)
        other.zero_grad()
        wanted = loss_of(theirs, step)
        wanted.backward()
        uc.clip_(grads_of(other), uc.by_global_norm(0.5))
        other.step()
        torch.testing.assert_close(loss, wanted)
        same(one, other)


@pytest.mark.parametrize("make", [partial(SparseAdam, lr=0.1), partial(SGD, lr=0.1)], ids=str)
def test_sparse(make: Any) -> None:
    """Sparse gradients are clipped as they are; rows that occur twice are summed first."""
    embeddings = [torch.nn.Embedding(9, 3, sparse=True, _weight=torch.ones(9, 3)) for _ in range(2)]
    one, other = (make(embedding.parameters()) for embedding in embeddings)
    handle = attach(one, uc.by_global_norm(0.5))
    for _ in range(3):
        for embedding, optimizer in zip(embeddings, (one, other), strict=True):
            optimizer.zero_grad()
            embedding(torch.tensor([7, 3, 7])).square().sum().backward()
        report = uc.clip_([embeddings[1].weight.grad], uc.by_global_norm(0.5))
        one.step()
        other.step()
        torch.testing.assert_close(embeddings[0].weight, embeddings[1].weight, rtol=0, atol=0)
        assert handle.report.norms == report.norms > 0.5
        assert embeddings[0].weight.grad.layout is torch.sparse_coo


@pytest.mark.parametrize("make", [UNFUSED["sgd"], FUSED["fused-adamw"]], ids=str)
def test_accumulation_ties_and_absent_gradients(make: Any) -> None:
    """Gradients are clipped once, when the step is taken; a tied weight counts once, an absent gradient not at all."""
    w, unused, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = make([{"params": [unused, w]}, {"params": [frozen]}])
    handle = attach(optimizer, uc.by_global_norm(1.0))
    first, second = w, w
    for x in ([30.0, 0.0], [0.0, 40.0]):
        ((first + second) @ torch.tensor(x) / 2).backward()
    optimizer.step()
    assert handle.report.norms.item() == 50
    torch.testing.assert_close(w.grad, torch.tensor([0.6, 0.8]))
    assert unused.grad is None
    optimizer.zero_grad()
    optimizer.step()  # nothing to clip


@pytest.mark.parametrize("fused", [False, True])
def test_one_gradient_of_two_parameters(fused: bool) -> None:
    """A tensor that is the gradient of two parameters counts once and is scaled once."""
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = SGD([a, b], lr=1.0, fused=fused)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    a.grad = b.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert handle.report.norms.item() == 5
    torch.testing.assert_close(a.detach(), torch.tensor([-0.6, -0.8]))
    torch.testing.assert_close(b.detach(), a.detach())


def test_names() -> None:
    """Errors name the gradient by group and name, or by group and index."""
    for named, place in ((True, r"grads\[1\]\['2.weight'\]"), (False, r"grads\[1\]\[0\]")):
        net = model()
        layers = [[(n, p) for n, p in net.named_parameters() if n[0] == number] for number in "02"]
        groups = [{"params": layer if named else [p for _, p in layer]} for layer in layers]
        optimizer = SGD(groups, lr=0.1)
        attach(optimizer, uc.by_global_norm(1.0, nonfinite="raise"))
        loss_of(net, 0).backward()
        net[2].weight.grad[0, 0] = math.nan
        with pytest.raises(FloatingPointError, match=f"^NaN or ∞ in {place}$"):
            optimizer.step()


def test_two_modules_whose_parameters_have_the_same_names() -> None:
    """All of one group are clipped; PyTorch allows equal names."""
    nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizer = SGD([pair for net in nets for pair in net.named_parameters()], lr=0.1)
    handle = attach(optimizer, uc.by_global_norm(1.0))
    for net, value in zip(nets, (3.0, 4.0), strict=True):
        net.weight.grad = torch.full((1, 1), value)
    optimizer.step()
    assert handle.report.norms.item() == 5
    torch.testing.assert_close([net.weight.grad.item() for net in nets], [0.6, 0.8])


class Nested(SGD):
    """An optimizer whose step is one of PyTorch's and something beside; hooks run around both."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Step as SGD does, but fail once where that is asked for."""
        if self.fails:
            self.fails = False
            raise RuntimeError
        loss = super().step(closure)
        super().step()
        return loss


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_inside_a_step(closure: bool) -> None:
    """A class that calls ``super().step()`` is clipped once, and its step skipped as a whole, after a failure too."""
    w = torch.nn.Parameter(torch.zeros(2))
    SGD([w], lr=0.1)  # PyTorch puts hooks into the classes of which there has been one
    optimizer = Nested([w], lr=0.5)
    handle = attach(optimizer, uc.autoclip(percentile=50, nonfinite="skip"))

    def evaluate(norm: float) -> None:
        w.grad = torch.tensor([norm, 0.0])

    for norm, fails in ((1.0, False), (3.0, True), (50.0, False), (math.nan, False)):
        optimizer.fails = fails
        if not closure:
            evaluate(norm)
        with pytest.raises(RuntimeError) if fails else nullcontext():
            optimizer.step(partial(evaluate, norm) if closure else None)
    assert handle.state.count.item() == (2 if closure else 3)
    assert bool(handle.report.skipped)
    torch.testing.assert_close(w.detach(), torch.tensor([-1 - (25.5 if closure else 3.0), 0.0]))


@pytest.mark.parametrize("make", [UNFUSED["adam"], FUSED["fused-adam"]], ids=str)
@pytest.mark.parametrize("scope", [uc.scopes.all_leaves, uc.scopes.each_leaf], ids=repr)
def test_checkpoints(make: Any, scope: Any) -> None:
    """A run that is stopped, saved and loaded goes on as if it had not been stopped."""
    rule = uc.Rule(Usual(), scope=scope)

    def train(optimizer: Any, net: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()

    whole, stopped = model(), model()
    through, before = make(groups_of(whole)), make(groups_of(stopped))
    handles = [attach(optimizer, rule) for optimizer in (through, before)]
    train(through, whole, range(6))
    train(before, stopped, range(3))
    file = io.BytesIO()
    torch.save({"net": stopped.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)  # with weights_only, the default
    net = model()
    after = make(groups_of(net))
    handles.append(attach(after, rule))
    net.load_state_dict(saved["net"])
    after.load_state_dict(saved["optimizer"])
    assert isinstance(handles[2].state, Seen)
    train(after, net, range(3, 6))
    same(after, through, exact=True)
    torch.testing.assert_close(handles[2].state, handles[0].state, rtol=0, atol=0)

    plain = make(groups_of(model()))  # an optimizer that is not clipped reads the checkpoint too
    plain.load_state_dict(saved["optimizer"])
    state = handles[2].state
    after.load_state_dict(plain.state_dict())  # and a checkpoint without the rule leaves the state as it is
    assert handles[2].state is state
    with pytest.warns(
        UserWarning, match=r"has no state of uc\.Rule\(.*attach the rule first, then optimizer.load_state_dict"
    ):
        after.step()
    after.step()


def test_checkpoint_of_another_rule() -> None:
    """A state that does not fit is refused, and the error says what to do."""
    optimizers = [SGD(model().parameters(), lr=0.1) for _ in range(3)]
    attach(optimizers[0], uc.Rule(Usual(), scope=uc.scopes.each_leaf))
    attach(optimizers[1], uc.Rule(Usual()))
    attach(optimizers[2], uc.by_global_norm(1.0))
    saved = optimizers[0].state_dict()
    with pytest.raises(ValueError, match=r"another rule than uc\.Rule\(.*del state_dict\['uniclip'\]"):
        optimizers[1].load_state_dict(saved)
    optimizers[2].load_state_dict(saved)  # remembers nothing anyway
    assert "uniclip" not in optimizers[2].state_dict()


def remembering(params: Any, rule: Any, steps: int = 2) -> Any:
    """Return an optimizer with a rule attached that has seen some steps."""
    params = [dict(p) for p in params] if isinstance(params[0], dict) else params
    optimizer = Adam(params)
    attach(optimizer, rule)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
    return optimizer


LEAF_RULES = {
    "adagc": uc.adagc(),
    "percentile": uc.percentile_clipping(50, 4),
    "norm_growth": uc.norm_growth(),
    "adagn": uc.adagn(),
    "spam": uc.spam(),
    "chain": uc.chain(uc.autoclip(), uc.adagc()),
}


def layers(*frozen: int, named: bool = True) -> Any:
    """Return the parameters of four alike layers, named or not, some of which are frozen."""
    net = torch.nn.Sequential(*[torch.nn.Linear(2, 2, bias=False) for _ in range(4)])
    for number in frozen:
        net[number].requires_grad_(False)
    return list(net.named_parameters() if named else net.parameters())


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("name", LEAF_RULES)
def test_another_layer_frozen(name: str, named: bool) -> None:
    """The state of other layers is refused by name, and neither optimizer nor rule has changed then."""
    rule = LEAF_RULES[name]
    saved = remembering(layers(1, named=named), rule).state_dict()
    optimizer = Adam(layers(2, named=named))
    handle = attach(optimizer, rule)
    before = handle.state
    theirs, ours = (r"'1\.weight'", r"'2\.weight'") if named else ("1", "2")
    message = rf"holds norms of grads\[0\]\[{ours}\], which are not here, and none of grads\[0\]\[{theirs}\]; give"
    with pytest.raises(ValueError, match=message + r".*del state_dict\['uniclip'\]"):
        optimizer.load_state_dict(saved)
    assert handle.state is before
    assert not optimizer.state
    again = Adam(layers(1, named=named))
    attach(again, rule)
    again.load_state_dict(saved)
    other = Adam(layers(1, named=not named))
    attach(other, rule)
    renamed = saved | {"uniclip": saved["uniclip"] | {"leaves": other.state_dict()["uniclip"]["leaves"]}}
    other.load_state_dict(renamed)  # as the documentation says for other names


def test_a_joint_norm_and_another_layer() -> None:
    """A rule over all leaves goes on whichever layer is frozen."""
    saved = remembering(layers(1), uc.autoclip()).state_dict()
    optimizer = Adam(layers(2))
    handle = attach(optimizer, uc.autoclip())
    optimizer.load_state_dict(saved)
    assert handle.state.count.item() == 2


def test_groups_that_come_and_go() -> None:
    """A rule that remembers groups by their labels needs a gradient in each of them, as one of each parameter does."""
    rule = uc.Rule(uc.limits.Percentile(50, 4), scope=uc.scopes.groups(lambda path, leaf: path[1][0]))
    optimizer = remembering(layers(), rule)
    optimizer.param_groups[0]["params"][1].grad = None
    with pytest.raises(ValueError, match=r"group '1' had a gradient at one step and none at another"):
        optimizer.step()


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Whether the rule's state or PyTorch's own is refused, the other one is not loaded either."""
    rule = uc.adagc()
    saved = remembering(layers(), rule).state_dict()
    for name, value, message in (
        ("count", torch.tensor(2**40), "1099511627776 does not fit"),
        ("count", torch.tensor(-1), "negative"),
        ("count", torch.tensor(1.0), "is made of torch.float32"),
        ("averages", torch.full((4,), math.nan), "NaN"),
        ("averages", torch.full((4,), -0.5), "negative"),
        ("averages", torch.full((4,), 1e300, dtype=torch.float64), "do not fit into"),
        ("averages", torch.full((4,), 1j), "is made of torch.complex64"),
        ("averages", torch.ones(3), "shape"),
    ):
        optimizer = Adam(layers())
        handle = attach(optimizer, rule)
        before = handle.state
        wrong = copy.deepcopy(saved)
        wrong["uniclip"]["state"][name] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
        assert handle.state is before
        assert not optimizer.state
    wrong = copy.deepcopy(saved)
    wrong["param_groups"] *= 2
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(wrong)
    assert handle.state is before
    wrong = saved | {"uniclip": [torch.tensor(1.0)]}  # of before there were names
    with pytest.raises(ValueError, match=r"a list, does not say whose norms it holds.*del state_dict\['uniclip'\]"):
        optimizer.load_state_dict(wrong)


def test_saved_tensors_are_copies() -> None:
    """What is done to a saved dict does not reach the rule, nor the other way round."""
    optimizer, other = remembering(layers(), uc.adagc()), Adam(layers())
    attach(other, uc.adagc())
    saved = optimizer.state_dict()
    wanted = copy.deepcopy(saved["uniclip"])
    other.load_state_dict(saved)
    saved["uniclip"]["state"]["averages"].fill_(7.0)
    saved["uniclip"]["leaves"][0][0] = "other"
    for one in (optimizer, other):
        torch.testing.assert_close(one.state_dict()["uniclip"]["state"], wanted["state"])
        assert one.state_dict()["uniclip"]["leaves"] == wanted["leaves"]


def test_attaching_late() -> None:
    """A rule that remembers, attached after steps or a load, starts over with a warning that says the order."""
    order = r"starts over: .*attach the rule first, then optimizer\.load_state_dict\(saved\)"
    stepped, loaded = Adam([p for _, p in layers()]), Adam(layers())
    stepped.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    stepped.step()
    loaded.load_state_dict(remembering(layers(), uc.by_global_norm(1.0)).state_dict())
    for optimizer in (stepped, loaded):
        attach(optimizer, uc.by_norm(1.0)).remove()  # which remembers nothing
        with pytest.warns(UserWarning, match=order) as caught:
            attach(optimizer, uc.autoclip())
        assert caught[0].filename == __file__
    for make in (SGD, Adam, Adagrad):  # the last one has a state before any step
        attach(make([p for _, p in layers()]), uc.autoclip())


def test_a_state_dict_that_comes_in_two_parts() -> None:
    """The rule's state may be loaded after the optimizer's: a step in between is what a warning is for."""
    saved = remembering(layers(), uc.autoclip()).state_dict()
    optimizer = Adam(layers())
    handle = attach(optimizer, uc.autoclip())
    optimizer.load_state_dict({name: saved[name] for name in ("state", "param_groups")})
    optimizer.load_state_dict(optimizer.state_dict() | {"uniclip": saved["uniclip"]})
    optimizer.step()
    assert handle.state.count.item() == 2


def test_handles_are_not_copied() -> None:
    """A handle is tied to its optimizer, and says what to copy instead."""
    handle = attach(SGD([p for _, p in layers()]), uc.autoclip())
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"tied to its optimizer, .*attach the rule to the other optimizer, and then"
        ):
            way(handle)


def test_functions_of_names() -> None:
    """A rule's function of names says what to do where the optimizer knows none; others do without."""

    def head(path: Any, leaf: Any) -> bool:
        return bool(path[1].startswith("0"))

    for rule in (
        uc.masked(uc.agc(), head),
        uc.chain(uc.by_value(-1.0, 1.0), uc.masked(uc.adagc(), head)),
        uc.by_group_norm({True: 1.0, False: 2.0}, head),
    ):
        with pytest.raises(TypeError, match=r"fails on \(0, 0\), as .*'startswith'\): .*model\.named_parameters\(\)"):
            attach(SGD([p for _, p in layers()]), rule)
        attach(SGD(layers()), rule)
    attach(SGD([p for _, p in layers()]), uc.masked(uc.agc(), lambda path, leaf: leaf.ndim > 1))


def test_remembered_parameters() -> None:
    """A rule that remembers each parameter needs the gradients of them all; one that joins them does not."""
    net = model()
    for scope in (uc.scopes.all_leaves, uc.scopes.each_leaf):
        optimizer = SGD(net.parameters(), lr=0.1)
        attach(optimizer, uc.Rule(Usual(), scope=scope))
        loss_of(net, 0).backward()
        net[0].bias.grad = None
        if scope == uc.scopes.all_leaves:
            optimizer.step()
        else:
            with pytest.raises(ValueError, match=r"each of the 4 parameters .* but 3 have one"):
                optimizer.step()


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("make", [UNFUSED["adam-foreach"], FUSED["fused-adamw"]], ids=str)
def test_compiled_steps(make: Any, nonfinite: Any) -> None:
    """A step that is compiled is clipped as an eager one is."""
    ours, theirs = model(), model()
    optimizers = one, other = make(groups_of(ours)), make(groups_of(theirs))
    for optimizer in optimizers:
        attach(optimizer, uc.by_global_norm(0.5, nonfinite=nonfinite))
    torch.compiler.reset()
    one.step = torch.compile(one.step, backend="eager")
    for step, factor in enumerate([1.0, 1e-3, math.inf if nonfinite == "skip" else 1.0, 1.0]):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(net, step, factor).backward()
            optimizer.step()
        torch.testing.assert_close(params_of(one), params_of(other), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [UNFUSED["sgd"], FUSED["fused-sgd"]], ids=str)
def test_remove(make: Any) -> None:
    """After remove() the optimizer is as it was before, and can be attached again."""
    net = model()
    optimizer = make(groups_of(net))
    before = {name: copy.copy(value) for name, value in vars(optimizer).items()}
    handle = attach(optimizer, uc.Rule(Usual()))
    with pytest.raises(ValueError, match=r"clipped already, by uc\.Rule\(.*call remove\(\)"):
        attach(optimizer, uc.by_global_norm(1.0))
    handle.remove()
    handle.remove()
    assert vars(optimizer) == before
    again = attach(optimizer, uc.by_global_norm(1.0))
    handle.remove()
    with pytest.raises(ValueError, match="clipped already"):
        attach(optimizer, uc.by_global_norm(1.0))
    again.remove()
    loss_of(net, 0).backward()
    grads = copy.deepcopy(grads_of(optimizer))
    optimizer.step()
    torch.testing.assert_close(grads_of(optimizer), grads, rtol=0, atol=0)
    assert "uniclip" not in optimizer.state_dict()
    assert again.report is None


def test_nothing_keeps_an_optimizer_alive() -> None:
    """An optimizer that is attached goes when nobody uses it."""
    optimizer = SGD(model().parameters())
    attach(optimizer, uc.by_global_norm(1.0))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_copies_are_not_attached() -> None:
    """A copy of an optimizer has no rule, as it has none of its hooks, and can get one of its own."""
    net = model()
    optimizer = FUSED["fused-adam"](groups_of(net))
    attach(optimizer, uc.by_global_norm(1.0))
    attach(copy.deepcopy(optimizer), uc.by_global_norm(1.0))


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_after_a_step_that_failed(nonfinite: Any) -> None:
    """What an interrupted step left behind does not reach the next one."""
    ours, theirs = model(), model()
    one, other = (AdamW(net.parameters(), fused=True) for net in (ours, theirs))
    rule = uc.by_global_norm(0.5, nonfinite=nonfinite)
    attach(one, rule)

    def fail(*_: Any) -> None:
        raise RuntimeError

    hook = one.register_step_pre_hook(fail)
    loss_of(ours, 0, math.nan if nonfinite == "skip" else 1.0).backward()
    with pytest.raises(RuntimeError):
        one.step()
    hook.remove()
    for net, optimizer in ((ours, one), (theirs, other)):
        optimizer.zero_grad()
        loss_of(net, 1).backward()
    uc.clip_(grads_of(other), rule)
    one.step()
    other.step()
    same(one, other)
    assert "grad_scale" not in vars(one)


def test_schedulers() -> None:
    """A learning rate scheduler goes with it, in any order, without a warning."""
    for scheduler_first in (True, False):
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = SGD([w], lr=1.0)
        if scheduler_first:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        attach(optimizer, uc.by_global_norm(1.0))
        if not scheduler_first:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            w.grad = torch.tensor([3.0, 4.0])
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(w.detach(), torch.tensor([-0.9, -1.2]))


@pytest.mark.parametrize(
    ("optimizer", "rule", "message"),
    [
        (
            [],
            uc.by_global_norm(1.0),
            "optimizer must be a torch.optim.Optimizer, got a list: give the object whose step",
        ),
        (model(), uc.by_global_norm(1.0), "got a .*: attach to the optimizer of its parameters, as in attach"),
        (
            uc.by_global_norm(1.0),
            SGD(model().parameters()),
            r"got a Rule: the arguments are swapped, it is attach\(opti",
        ),
        (None, uc.by_global_norm, r"uc\.by_global_norm makes one: call it"),
        (None, 1.0, r"rule must be a rule, such as uc.by_global_norm\(1.0\), or a function of one array, got 1.0"),
        (None, uc.limits.Constant(1.0), r"a limit is only one of its choices: uc.Rule\(limit\)"),
        (None, uc.Clipper(uc.by_global_norm(1.0)), "a uc.Clipper has one"),
        (None, uc.Rule, r"rule must be a rule, and uc\.Rule makes one: call it"),
        (None, uc.chain, r"uc\.chain makes one: call it"),
        (None, uc.limits.Percentile, r"a limit is only one of its choices: uc\.Rule\(limit\)"),
        (None, uc.curves.hard, r"a curve is only one of its choices: uc\.Rule\(1\.0, curve=curve\)"),
        (None, uc.clip, r"uc\.clip is a function of all gradients: give it a rule such as uc\.by_global_norm\(1\.0\)"),
    ],
)
def test_wrong_arguments(optimizer: Any, rule: Any, message: str) -> None:
    """What is no optimizer or no rule is refused."""
    with pytest.raises(TypeError, match=message):
        attach(SGD(model().parameters()) if optimizer is None else optimizer, rule)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "rule", [uc.skip_spikes(warmup=3), uc.chain(uc.skip_spikes(warmup=3), uc.by_norm(1.0))], ids=repr
)
def test_a_spike_is_no_step(make: Any, rule: Any) -> None:
    """A step that the rule leaves out moves nothing: no weight decay, no momentum, no count."""
    net = model()
    optimizer = make(net.parameters())
    handle = attach(optimizer, rule)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(net, 0, 1e6 if step == 4 else 1.0).backward()
        before = copy.deepcopy([net.state_dict(), optimizer.state_dict()["state"]])
        optimizer.step()
    assert handle.report.skipped
    for old, new in zip(before, [net.state_dict(), optimizer.state_dict()["state"]], strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_other_rules_can_be_attached() -> None:
    """Chains, masks, groups and rules that remember are attached, and saved, as any other."""
    rule = uc.chain(
        uc.masked(uc.zclip(warmup=2), lambda path, leaf: path[0] == 0),
        uc.by_group_norm({0: 1.0, 1: uc.limits.Ema(1.1, 0.9, 0)}, lambda path, leaf: path[0]),
    )
    nets = [model(), model()]
    optimizers = [SGD(groups_of(net), lr=0.1) for net in nets]
    handle = attach(optimizers[0], rule)
    for step in range(6):
        if step == 3:
            nets[1].load_state_dict(nets[0].state_dict())
            attach(optimizers[1], rule)
            file = io.BytesIO()
            torch.save(optimizers[0].state_dict(), file)
            file.seek(0)
            optimizers[1].load_state_dict(torch.load(file))
        for net, optimizer in list(zip(nets, optimizers, strict=True))[: 1 if step < 3 else 2]:
            optimizer.zero_grad()
            loss_of(net, step, 100.0).backward()
            optimizer.step()
    assert handle.report.clipped
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict(), rtol=0, atol=0)


def test_parameters_without_a_gradient() -> None:
    """Rules that do not know leaves by themselves do not ask for all of them, also within chains and masks."""
    rules = [
        uc.chain(uc.zclip(), uc.by_global_norm(1.0)),
        uc.masked(uc.zclip(), lambda path, leaf: "0" in str(path[1])),
        uc.by_group_norm({0: uc.limits.Ema(1.1, 0.9), 1: 1.0}, lambda path, leaf: path[0]),
    ]
    for rule in rules:
        net = model()
        optimizer = SGD(groups_of(net), lr=0.1)
        attach(optimizer, rule)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            if step:
                net[0].bias.grad = None
            optimizer.step()


@pytest.mark.parametrize("closure", [None, "silent", "with loss"])
def test_a_spike_of_the_loss(closure: str | None) -> None:
    """The loss is that of the closure, or set before the step, for a closure that returns none, too."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.0)
    handle = attach(optimizer, uc.skip_spikes(window=4))
    for step in range(5):
        loss = torch.tensor(100.0 if step == 4 else 1.0 + 0.1 * step)

        def evaluate(loss: torch.Tensor = loss) -> torch.Tensor:
            optimizer.zero_grad()
            loss_of(net, 0).backward()
            return loss

        if closure == "with loss":
            optimizer.step(evaluate)
        else:
            handle.loss = evaluate()
            optimizer.step((lambda: None) if closure else None)
        assert handle.loss is None
        assert bool(handle.report.skipped) == (step == 4)


class Wrapper(torch.optim.Optimizer):
    """A wrapper as those of Accelerate and Lightning are: an optimizer by its class, with the real one inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        """Have the one inside step."""
        return self.optimizer.step(closure)


def test_a_wrapper_is_taken_for_the_optimizer_inside() -> None:
    """The one inside gets the rule, once, however it is wrapped."""
    (w,) = params = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = SGD(params, lr=1.0)
    wrapped = Wrapper(Wrapper(optimizer))
    handle = attach(wrapped, uc.by_global_norm(1.0))
    for again in (optimizer, wrapped, Wrapper(optimizer)):
        with pytest.raises(ValueError, match="clipped already"):
            attach(again, uc.by_global_norm(1.0))
    w.grad = torch.tensor([3.0, 4.0])
    wrapped.step()
    torch.testing.assert_close(w.detach(), torch.tensor([-0.6, -0.8]))
    assert handle.report.norms.item() == 5


def test_presets_that_need_parameters_get_them() -> None:
    """Limits relative to the weights see the weights as they are before each step."""
    ours, theirs = model(), model()
    one, other = SGD(groups_of(ours), lr=0.5), SGD(groups_of(theirs), lr=0.5)
    attach(one, uc.agc(0.01))
    for step in range(3):
        for net, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            loss_of(net, step).backward()
        uc.clip_(grads_of(other), uc.agc(0.01), params_of(other))
        one.step()
        other.step()
        same(one, other, exact=True)


def test_a_limit_for_each_group() -> None:
    """Each parameter group has a limit and a norm of its own, also by a name that the group has."""
    net = model()
    optimizer = SGD(groups_of(net), lr=0.1)
    handle = attach(optimizer, uc.by_group_norm({0: 0.1, 1: 0.5}, lambda path, leaf: path[0]))
    loss_of(net, 0).backward()
    norms = [uc.global_norm(group).item() for group in grads_of(optimizer)]
    optimizer.step()
    assert {label: norm.item() for label, norm in handle.report.norms.items()} == pytest.approx(dict(enumerate(norms)))
    for group, limit in zip(grads_of(optimizer), (0.1, 0.5), strict=True):
        assert uc.global_norm(group).item() == pytest.approx(limit)


def test_groups_that_are_added_later() -> None:
    """They are clipped with the others, unless the rule remembers each parameter."""
    net = model()
    for rule in (uc.by_global_norm(0.5), uc.autoclip(50, window=4), uc.adagc()):
        first, second = groups_of(net)
        optimizer = SGD([first], lr=0.0)
        handle = attach(optimizer, rule)
        optimizer.add_param_group(second)
        optimizer.zero_grad()
        loss_of(net, 0).backward()
        before = uc.global_norm(grads_of(optimizer)).item()
        if rule.by_leaf:
            with pytest.raises(ValueError, match="add new ones before you attach"):
                optimizer.step()
        else:
            optimizer.step()
            assert handle.report.norms.item() == pytest.approx(before)


def test_functions_are_rules() -> None:
    """A function of one gradient is called on each."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0)
    handle = attach(optimizer, torch.sign)
    w.grad = torch.tensor([-3.0, 4.0])
    optimizer.step()
    assert w.tolist() == [1.0, -1.0]
    assert handle.scalars() == {}


def test_scalars_for_a_logger() -> None:
    """What a logger shows is there under fixed names, and no norm is measured again."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0)
    handle = attach(optimizer, uc.by_global_norm(1.0, nonfinite="skip"))
    w.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    shown = {name: value.item() for name, value in handle.scalars().items()}
    wanted = {"clip/norm": 5.0, "clip/limit": 1.0, "clip/factor": 0.2, "clip/share": 1.0, "clip/skipped": 0.0}
    assert shown == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (uc.by_global_norm, TypeError, r"uc.by_global_norm makes one: call it"),
        (uc.by_example_norm(1.0), ValueError, r"gradients of single examples.*uc.clip_and_sum"),
        (
            uc.chain(uc.by_value(-1.0, 1.0), uc.masked(uc.auto_s(), lambda path, leaf: True)),
            ValueError,
            r"single examples",
        ),
    ],
    ids=["uncalled", "examples", "examples in a chain"],
)
def test_rules_for_other_uses(rule: Any, error: type[Exception], message: str) -> None:
    """What is no rule for gradients of a batch is refused where it is given."""
    with pytest.raises(error, match=message):
        attach(SGD(model().parameters()), rule)


def test_nothing_to_log_before_the_first_step() -> None:
    """Before the first step the scalars are none."""
    assert attach(SGD(model().parameters()), uc.by_global_norm(1.0)).scalars() == {}


@pytest.mark.parametrize(
    ("rule", "by", "to"), [(uc.by_global_norm(1e-20), 1e30, 1e-20), (uc.to_global_norm(1.0), 1e-40, 1.0)]
)
@pytest.mark.parametrize(("fused", "scale"), [(False, 1.0), (True, 1.0), (True, 8.0)])
def test_factors_out_of_range(rule: uc.Rule, by: float, to: float, fused: bool, scale: float) -> None:
    """Where one factor cannot be held, nor its reciprocal, the step takes what uc.clip returns."""
    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([w], lr=1.0, fused=fused)
    attach(optimizer, rule)
    w.grad = torch.tensor([0.6, -0.8]) * by * scale
    if scale != 1.0:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    optimizer.step()
    torch.testing.assert_close(-w.detach() / to, torch.tensor([0.6, -0.8]), rtol=1e-4, atol=0)
