"""Drawn rules and gradients on the spine and on the general path, which have to agree.

Each week draws other cases; ``--fuzz SEED`` repeats those of a seed, and ``--fuzz SEED:NUMBER`` one
of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_fuzz import week

import uniclip as uc
from kit.check import FIELDS
from kit.frameworks import Framework
from kit.rules import falling, root
from kit.spine import without_spine

CASES = {"numpy": 600, "torch": 400, "tensorflow": 60, "jax": 60}
"""The number of cases of a run."""
PARTS = 4
"""The number of tests that share the cases, for several workers."""
STEPS = 10
BOUNDS = {"float32": 2e-6, "float64": 1e-12, "bfloat16": 3e-2, "float16": 4e-3}
"""The largest differences, relative to the largest element. Half precision is rounded after each of
up to four rules of a chain, or once.
"""
SCALES = (0.01, 1.0, 1.0, 1.0, 100.0)
Rng = np.random.Generator


class Twice(uc.Limit):
    """A limit as a user writes it, twice the norm of the step before, without checks."""

    stateful = True

    def init(self, norms: Any, context: Any) -> Any:
        """Return the state before the first step."""
        return norms + 1.0

    def __call__(self, norms: Any, state: Any, context: Any) -> Any:
        """Return the limit and the next state."""
        return 2.0 * state, norms


def drawn_follower(rng: Rng) -> Any:
    """Return a rule for the rest of a chain.

    It is continuous in the norm, which differs by a rounding error there: no state, no bound.
    """
    curve = (uc.curves.hard, uc.curves.soft, uc.curves.normalize)[rng.integers(3)]
    policy = ("propagate", "skip", "zero", "raise")[rng.integers(4)]
    return uc.by_global_norm(float(np.exp(rng.normal(0, 2))), curve=curve, nonfinite=policy)


def drawn_rule(rng: Rng, *, single: bool = False) -> Any:
    """Return a rule with one norm; or a chain or a mask of such rules, unless ``single``."""
    scale = float(np.exp(rng.normal(0, 2)))
    policy = ("propagate", "propagate", "skip", "zero", "raise")[rng.integers(5)]
    curves = uc.curves
    curve = (curves.hard, curves.hard, curves.soft, curves.normalize, curves.reject, root)
    makers: list[Callable[[], Any]] = [
        lambda: uc.by_global_norm(scale, nonfinite=policy),
        lambda: uc.by_global_norm(scale, nonfinite=policy, curve=curve[rng.integers(len(curve))]),
        lambda: uc.by_global_norm(scale, skip_above=3.0 * scale, nonfinite=policy),
        lambda: uc.by_global_norm((0.0, math.inf, 1, 1e-30, 1e30)[rng.integers(5)]),
        lambda: uc.by_global_norm(uc.limits.Schedule(falling), nonfinite=policy),
        lambda: uc.by_global_norm(Twice(), nonfinite=policy),
        lambda: uc.by_global_norm(uc.limits.Ema(1.05, 0.9), nonfinite=policy),
        lambda: uc.autoclip(50, window=4, nonfinite=policy),
        lambda: uc.autoclip(50, window=None),
        lambda: uc.zclip(z=1.5, warmup=3, nonfinite=policy),
        lambda: uc.zclip(z=1.5, warmup=3, clip_factor=0.7, skip_update_on_spike=True),
        lambda: uc.log_zscore(z=1.7, nonfinite=policy),
        lambda: uc.skip_spikes(z=1.5, window=4, warmup=2, nonfinite=policy),
    ]
    if not single:
        makers += [
            lambda: uc.chain(drawn_rule(rng, single=True)),
            lambda: uc.chain(drawn_rule(rng, single=True), drawn_follower(rng)),
            lambda: uc.chain(drawn_rule(rng, single=True), *map(drawn_follower, [rng] * 3)),
            lambda: uc.masked(drawn_rule(rng, single=True), lambda path, leaf: path[-1] != "b"),
        ]
    return makers[rng.integers(len(makers))]()


def drawn_steps(rng: Rng, dtype: str) -> list[dict[str, np.ndarray | None]]:
    """Return the gradients of some steps: usual ones, spikes, NaN, zeros, absent leaves."""
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": (), "d": (0, 2)}
    names = list(shapes)[: rng.integers(2, 5)]
    half = dtype in {"float16", "bfloat16"}
    steps = []
    for _ in range(STEPS):
        kind = rng.integers(14)
        scale = SCALES[rng.integers(len(SCALES))]
        if kind == 0:
            scale = 1.0 if half else 1e25
        elif kind == 1:
            scale = 0.0
        elif kind == 2:
            scale = 1.0 if half else 1e-30
        values: dict[str, np.ndarray | None] = {
            name: rng.standard_normal(shapes[name]) * scale for name in names
        }
        if kind == 3:
            values["a"] = np.full(shapes["a"], (np.nan, np.inf)[rng.integers(2)])
        if kind in {4, 5}:
            values["b"] = None
        steps.append(values)
    return steps


def outcome(fw: Framework, rule: Any, steps: Any, dtype: str, in_place: bool) -> list[Any]:
    """Return for each step the gradients, which of them are the same objects, the report and the
    state; or the error.
    """
    clipper = uc.Clipper(rule)
    found: list[Any] = []
    for number, values in enumerate(steps):
        grads = {
            name: None if value is None else fw.array(value, dtype)
            for name, value in values.items()
        }
        loss = 1.0 + number % 3 if number % 2 else None
        try:
            if in_place:
                clipper.clip_(grads, loss=loss)
            clipped = grads if in_place else clipper(grads, loss=loss)
        except FloatingPointError as error:
            found.append(str(error))
            continue
        same = [clipped[name] is grads[name] for name in grads]
        fields = {name: getattr(clipper.report, name) for name in FIELDS}
        found.append((clipped, same, fields, clipper.state_dict().get("state")))
    return found


def numbers(fw: Framework, value: Any) -> Any:
    """Return arrays in trees as float64 arrays of NumPy."""
    if isinstance(value, dict):
        return {name: numbers(fw, one) for name, one in value.items()}
    if isinstance(value, list) and all([type(one) in {float, int} for one in value]):
        return np.asarray(value, np.float64)
    if isinstance(value, (tuple, list)):
        return [numbers(fw, one) for one in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    array = value if isinstance(value, (float, int)) else fw.numpy(value)
    return np.asarray(array).astype(np.float64)


def compare(ours: Any, theirs: Any, bound: float, where: str) -> None:
    """Require that two trees of arrays agree."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for name in ours:
            compare(ours[name], theirs[name], bound, f"{where} {name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            compare(*pair, bound, f"{where} {number}")
    elif isinstance(ours, np.ndarray):
        assert ours.shape == theirs.shape, where
        largest = np.max(np.abs(theirs), initial=1e-37, where=np.isfinite(theirs))
        near = np.isclose(ours, theirs, rtol=bound, atol=bound * largest, equal_nan=True)
        assert near.all(), f"{where} {ours} and {theirs}"
    else:
        assert ours == theirs, where


def run_case(fw: Framework, seed: int, number: int) -> None:
    """Run a case both ways."""
    rng = np.random.default_rng([seed, number, 73])
    rule = drawn_rule(rng)
    dtypes = [dtype for dtype in BOUNDS if dtype in fw.dtypes]
    dtype = [*dtypes, "float32", "float32"][rng.integers(len(dtypes) + 2)]
    steps = drawn_steps(rng, dtype)
    in_place = fw.writes and bool(rng.integers(2))
    with np.errstate(all="ignore"):
        ours = outcome(fw, rule, steps, dtype, in_place)
        with without_spine():
            theirs = outcome(fw, rule, steps, dtype, in_place)

    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"--fuzz {seed}:{number} {dtype} {rule!r} step {step}:"
        compare(numbers(fw, one), numbers(fw, other), BOUNDS[dtype], where)


@pytest.mark.only(*CASES)
@pytest.mark.parametrize("part", range(PARTS))
def test_cases(framework: Framework, part: int, request: pytest.FixtureRequest) -> None:
    """Gradients, objects, reports, states and errors agree."""
    seed, _, number = (request.config.getoption("--fuzz") or str(week())).partition(":")
    numbered = [int(number)] if number else range(part, CASES[framework.name], PARTS)
    for case in numbered:
        run_case(framework, int(seed), case)


def is_general(call: Callable[[], object]) -> bool:
    """Return whether a call takes the general path."""
    found = []

    def listen(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "run_general_step":
            found.append(frame)

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return bool(found)


SPINE = {
    "a constant": uc.by_global_norm(1.0),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip above": uc.by_global_norm(1.0, skip_above=9.0),
    "zclip": uc.zclip(),
    "autoclip": uc.autoclip(),
    "skip_spikes": uc.skip_spikes(),
    "a curve": uc.by_global_norm(1.0, curve=uc.curves.soft),
    "an own limit": uc.by_global_norm(Twice()),
    "a chain": uc.chain(uc.skip_spikes(), uc.by_global_norm(1.0)),
    "a mask": uc.masked(uc.by_global_norm(1.0), lambda path, leaf: path[0] == "a"),
}


@pytest.mark.parametrize("name", SPINE)
@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
def test_which_rules_take_it(framework: Framework, name: str) -> None:
    """Rules with one norm take the spine after their first step; nothing takes it if it is off."""
    clipper = uc.Clipper(SPINE[name])
    for dtype in ("float32", "float64"):
        if dtype not in framework.dtypes:
            continue
        clipper = uc.Clipper(SPINE[name])
        grads = {key: framework.array([3.0, 4.0], dtype) for key in "ab"}
        clipper(grads)
        assert not is_general(lambda: clipper(grads))
        with without_spine():
            assert is_general(lambda: clipper(grads))


def train(seed: int) -> list[Any]:
    """Train by an attached rule; return the parameters, the scalars and the state of each step."""
    import torch

    from uniclip.integrations.torch import attach

    rng = np.random.default_rng([seed, 37])
    rule = drawn_rule(rng)
    shapes = [(3, 5), (7,), (2, 2)]
    params = [torch.nn.Parameter(torch.from_numpy(rng.standard_normal(s))) for s in shapes]
    if rng.integers(4):
        params = [torch.nn.Parameter(param.detach().float()) for param in params]
    groups: Any = [{"params": params[:1]}, {"params": params[1:]}] if rng.integers(2) else params
    kind = rng.integers(3)
    options = {"lr": 0.01, "momentum": 0.9} if kind == 0 else {"lr": 0.01}
    if kind == 2:
        groups = params
    optimizer = (torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS)[kind](groups, **options)
    handle = attach(optimizer, rule, names=zip("abc", params, strict=True))
    by_closure = kind == 2 or bool(rng.integers(2))

    found = []
    for step in range(STEPS):
        scale = float(SCALES[rng.integers(len(SCALES))])
        values = [torch.from_numpy(rng.standard_normal(s) * scale) for s in shapes]
        absent = rng.integers(8) == 0
        if rng.integers(9) == 0:
            values[0][0, 0] = math.nan

        def closure(values: Any = values, absent: bool = absent, scale: float = scale) -> Any:
            for param, value in zip(params, values, strict=True):
                param.grad = value.to(param.dtype, copy=True)
            if absent:
                params[1].grad = None
            return torch.tensor(scale)

        try:
            if by_closure:
                optimizer.step(closure)
            else:
                loss = closure()
                handle.loss = loss if step % 2 else None
                optimizer.step()
        except FloatingPointError as error:
            found.append(str(error))
            continue
        state = handle.state_dict().get("state")
        copies = [param.detach().double().numpy().copy() for param in params]
        scalars = {name: float(value) for name, value in handle.scalars().items()}
        found.append([copies, scalars, numbers(Framework(), state)])
    return found


@pytest.mark.needs("torch")
@pytest.mark.parametrize("part", range(PARTS))
def test_trainings(part: int) -> None:
    """Attached rules train to the same parameters, with closures, groups, losses and skips."""
    for case in range(part, 200, PARTS):
        seed = 1000 * week() + case
        with np.errstate(all="ignore"):
            ours = train(seed)
            with without_spine():
                theirs = train(seed)
        compare(numbers(Framework(), ours), numbers(Framework(), theirs), 1e-4, f"training {seed}:")


@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
def test_a_loss_that_no_limit_uses(framework: Framework) -> None:
    """A loss is converted only for rules that use it; it is validated for all."""
    grads = [framework.array([3.0, 4.0])]
    clipper = uc.Clipper(uc.by_global_norm(1.0))
    clipper(grads)
    assert not is_general(lambda: clipper(grads, loss=np.float32(2.0)))
    with pytest.raises(TypeError, match="loss"):
        clipper(grads, loss="2")


def test_a_foreign_byte_order() -> None:
    """Gradients in another byte order keep it."""
    grads = [np.asarray([3.0, 4.0], ">f4"), np.asarray([12.0], ">f4")]
    clipped, _ = uc.clip(grads, uc.by_global_norm(1.0))
    assert [array.dtype for array in clipped] == [np.dtype(">f4")] * 2
    np.testing.assert_allclose(clipped[0], [3 / 13, 4 / 13], rtol=1e-6)


class Halve(uc.curves.RejectAbove):
    """A subclass that returns other factors."""

    def __call__(self, xp: Any, norm: Any, limit: Any) -> Any:
        """Return one half."""
        return 0.5 * xp.ones_like(norm)


class Overwrite(uc.Limit):
    """A limit that writes into its norms."""

    def __call__(self, norms: Any, state: Any, context: Any) -> Any:
        """Return a limit of 1."""
        norms[...] = 0.25
        return norms * 4.0, state


@pytest.mark.only("numpy", "torch")
def test_own_choices(framework: Framework) -> None:
    """A subclass of a curve is asked, and a limit that writes into its norms changes no report."""
    grads = [framework.array([3.0, 4.0])]
    clipped, _ = uc.clip(grads, uc.by_global_norm(1.0, curve=Halve(100.0)))
    np.testing.assert_allclose(framework.numpy(clipped[0]), [1.5, 2.0])
    clipped, report = uc.clip(grads, uc.by_global_norm(Overwrite()))
    np.testing.assert_allclose(framework.numpy(clipped[0]), [0.6, 0.8], rtol=1e-6)
    assert float(report.norms) == 5.0


@pytest.mark.parametrize("bound", [1e39, 1e300])
def test_a_bound_that_overflows(bound: float) -> None:
    """A bound beyond the range of float32 rejects nothing, and warns of nothing."""
    grads = [np.asarray([3.0, 4.0], np.float32)]
    with np.errstate(all="raise"):
        clipped, report = uc.clip(grads, uc.by_global_norm(10.0, skip_above=bound))
        assert clipped[0] is grads[0]
        assert not report.skipped


@pytest.mark.parametrize("name", [name for name in SPINE if name != "a mask"])
def test_in_place_the_tree_comes_back(name: str) -> None:
    """`update` in place returns the tree that it was given, on either path."""
    rule = SPINE[name]
    grads = {"a": np.asarray([3.0, 4.0]), "b": np.asarray([1.0])}
    state = rule.init(grads)
    assert rule.update(grads, state, in_place=True)[0] is grads
    with without_spine():
        assert rule.update(grads, state, in_place=True)[0] is grads


def test_the_state_of_a_stateless_rule() -> None:
    """A clipper of a stateless rule holds the same state on either path."""
    clipper = uc.Clipper(uc.by_global_norm(1.0))
    clipper([np.asarray([3.0, 4.0])])
    with without_spine():
        other = uc.Clipper(uc.by_global_norm(1.0))
        other([np.asarray([3.0, 4.0])])
    assert type(clipper.state) is type(other.state)


@pytest.mark.needs("torch")
def test_checkpoints_between_steps() -> None:
    """After a step, a checkpoint without the state of the rule warns, also after one with it."""
    import torch

    from uniclip.integrations.torch import attach

    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    attach(optimizer, uc.zclip())
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    param.grad = torch.ones(3)
    optimizer.step()
    without = {name: saved[name] for name in ("state", "param_groups")}
    optimizer.load_state_dict(without)
    param.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="no saved state"):
        optimizer.step()


def test_a_state_of_another_precision() -> None:
    """A state in float32 goes on with gradients in float64, and a report of it warns of nothing."""
    clipper = uc.Clipper(uc.zclip(warmup=3))
    clipper([np.asarray([3.0, 4.0], np.float32)])
    clipper([np.asarray([3.0, 4.0])])
    assert clipper.report is not None
    assert clipper.report.thresholds > 1e38


@pytest.mark.compiled
@pytest.mark.needs("torch")
def test_a_chain_in_one_graph() -> None:
    """A chain compiles in one graph, and a copy of it clips as it does."""
    import copy

    import torch

    rule = uc.chain(uc.by_global_norm(5.0), uc.by_global_norm(1.0))
    grads = [torch.tensor([3.0, 4.0])]
    compiled = torch.compile(lambda x: copied.update(x, state)[0], backend="eager", fullgraph=True)
    for copied in (rule, copy.deepcopy(rule)):
        state = copied.init(grads)
        torch.testing.assert_close(compiled(grads)[0], torch.tensor([0.6, 0.8]))
