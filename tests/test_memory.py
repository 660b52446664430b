"""The state of rules: `Clipper` equals the loop by hand, and states survive copies and files.

They also move to other frameworks.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from kit.frameworks import EAGER, Framework
from kit.rules import LOSSES, double, every_rule, falling, first_key, only_w, params, steps
from kit.trees import leaves, mapped
from uniclip.saved import from_dict, renamed, to_dict

on_numpy = pytest.mark.needs("numpy")
NUMPY = Framework()
STEPS = steps("float32")
Arrays = list[list[np.ndarray]]


class Seen(NamedTuple):
    """The state of `Largest`: a number and a flag for each norm."""

    largest: Any
    above: Any


@dataclass(frozen=True)
class Largest(uc.Limit):
    """A custom limit: half the largest norm so far, once a norm was above 1."""

    stateful: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Seen:
        """Return the state before the first step."""
        return Seen(norms, norms > 1)

    def __call__(self, norms: Any, state: Seen, context: uc.limits.Context) -> tuple[Any, Seen]:
        """Compare with the largest norm."""
        largest = context.xp.where(norms > state.largest, norms, state.largest)
        above = state.above | (norms > 1)
        return context.xp.where(above, 0.5 * largest, 2.0), Seen(largest, above)


RULES = {name: rule for name, rule in every_rule(uc).items() if rule.stateful} | {
    "own limit": uc.Rule(Largest(), scope=uc.scopes.unit(0)),
}
SOME = {
    name: RULES[name]
    for name in ("autoclip", "spam", "skip_spikes", "chain of value and zclip", "own limit")
}
"""Rules with a state of one norm, of elements, of the loss, of inner rules, and custom ones."""


LABELLED = (
    "adagc",
    "norm_growth",
    "adagn",
    "spam",
    "percentile_clipping",
    "masked adagc",
    "own limit",
)
"""Rules with a state for each leaf, or more."""


def made(framework: Framework, number: int) -> Any:
    """Return the gradients of a step in a framework."""
    return mapped(framework.array, STEPS[number])


def numbers(framework: Framework, tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as NumPy arrays."""
    return [framework.numpy(leaf) for leaf in leaves(tree)]


def train(framework: Framework, clipper: Any, which: Any) -> Arrays:
    """Return the clipped gradients of some steps."""
    weights, rows = mapped(framework.array, params("float32")), []
    for number in which:
        clipped = clipper(made(framework, number), weights, loss=LOSSES[number])
        assert all(map(framework.owns, leaves(clipped)))
        rows.append(numbers(framework, clipped))
    return rows


def same(found: Arrays, wanted: Arrays, rtol: float = 0.0) -> None:
    """Require the gradients of some steps to be equal, bit for bit unless a tolerance is given."""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, err_msg=f"step {number} of these")


def through_json(saved: Any) -> Any:
    """Return a state after a round trip through JSON."""
    return json.loads(json.dumps(saved, allow_nan=False))


def loaded(rule: Any, saved: dict[str, Any]) -> uc.Clipper:
    """Return a clipper with a loaded state."""
    clipper = uc.Clipper(rule)
    clipper.load_state_dict(saved)
    return clipper


def after(rule: Any, *grads: Any) -> uc.Clipper:
    """Return a clipper that has taken some steps."""
    clipper = uc.Clipper(rule)
    for some in grads:
        clipper(some)
    return clipper


# --- A clipper is the loop by hand


def check_loop(framework: Framework, uc: ModuleType, rule: Any) -> None:
    """Require a clipper to equal the rule at each step, and to save the result of ``to_dict``."""
    clipper, weights = uc.Clipper(rule), mapped(framework.array, params("float32"))
    state = rule.init(weights)
    assert (clipper.report, clipper.state, clipper.state_dict()) == (None, None, {})
    for number, loss in enumerate(LOSSES):
        grads = made(framework, number)
        wanted, state, report = rule.update(grads, state, params=weights, loss=loss)
        same(train(framework, clipper, [number]), [numbers(framework, wanted)])
        saved = clipper.state_dict()
        assert saved == through_json(saved) == to_dict(rule, state, grads)
        assert str(clipper.report) == str(report)
    again = from_dict(rule, through_json(saved), grads)
    assert to_dict(rule, again, grads) == saved
    for mine, its in zip(leaves(again), leaves(state), strict=True):
        assert (framework.owns(mine), framework.dtype(mine), mine.shape) == (
            True,
            framework.dtype(its),
            its.shape,
        )
    assert to_dict(rule, from_dict(rule, {}, grads), grads) == to_dict(
        rule, rule.init(grads), grads
    )


@on_numpy
@pytest.mark.parametrize("name", RULES)
def test_a_clipper_is_the_loop_by_hand(name: str) -> None:
    """Gradients, states and reports are those of ``rule.update``.

    Saved states contain only numbers, lists and texts.
    """
    check_loop(NUMPY, uc, RULES[name])


@on_numpy
def test_a_rule_without_memory_saves_nothing() -> None:
    """A stateless rule saves and loads nothing; a function is a rule; a clipper has a repr."""
    for rule in (uc.by_norm(1.0), double):
        clipper = loaded(rule, {})
        same(train(NUMPY, clipper, [0]), [leaves(uc.clip(STEPS[0], rule)[0])])
        assert clipper.state_dict() == {}
    with pytest.raises(ValueError, match="params="):
        uc.Clipper(uc.agc(0.1))(STEPS[0])
    assert eval(repr(uc.Clipper(uc.zclip(z=3.0))), {"uc": uc}).rule == uc.zclip(z=3.0)


@pytest.mark.parametrize("name", SOME)
def test_in_place(framework: Framework, name: str) -> None:
    """``clip_`` writes the result of a call, and returns the report.

    It raises where arrays are immutable.
    """
    usual, clipper = uc.Clipper(RULES[name]), uc.Clipper(RULES[name])
    for number, loss in enumerate(LOSSES[:8]):
        grads = made(framework, number)
        if framework.writes:
            wanted = train(framework, usual, [number])
            assert clipper.clip_(grads, loss=loss) is clipper.report
            same([numbers(framework, grads)], wanted)
            assert clipper.state_dict() == usual.state_dict()
        else:
            with pytest.raises(TypeError, match=r"uc\.clip"):
                clipper.clip_(grads, loss=loss)
            assert (clipper.report, clipper.state_dict()) == (None, {})


def test_the_loss(framework: Framework) -> None:
    """A spike of the loss alone makes the gradients zero; without a loss they are unchanged."""
    heard, deaf = (uc.Clipper(uc.skip_spikes(window=8, warmup=3)) for _ in range(2))
    grads = [framework.array([3.0, 4.0])]
    for loss in (1.0, 1.1, 0.9, 100.0, 1.0):
        [clipped] = heard(grads, loss=framework.array(loss) if loss < 2 else loss)
        assert framework.numpy(clipped).tolist() == ([3.0, 4.0] if loss < 2 else [0.0, 0.0])
        assert framework.numpy(deaf(grads)[0]).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero", "raise"])
def test_a_step_that_is_not_finite(framework: Framework, nonfinite: Any) -> None:
    """A non-finite step leaves the state unchanged, also as the first one.

    The report describes this step, unless it raised.
    """
    inner = uc.zclip(warmup=2, nonfinite=nonfinite)
    for rule in (
        inner,
        uc.chain(inner, uc.by_global_norm(5.0)),
        uc.autoclip(50, 4, nonfinite=nonfinite),
    ):
        clipper, plain = uc.Clipper(rule), uc.Clipper(rule)
        for bad, number in itertools.product((math.nan, math.inf), (0, 1, 2)):
            before, report = clipper.state_dict(), clipper.report
            wrong = {**made(framework, number), "b": framework.array([1.0, bad, 1.0])}
            if nonfinite == "raise":
                with pytest.raises(FloatingPointError, match=r"grads\['b'\]"):
                    clipper(wrong)
                assert clipper.report is report
            else:
                clipper(wrong)
                assert not framework.numpy(clipper.report.finite)
            assert not before or clipper.state_dict() == before
            same(train(framework, clipper, [number]), train(framework, plain, [number]))
        assert clipper.state_dict() == plain.state_dict()


@on_numpy
@pytest.mark.parametrize("name", RULES)
def test_a_step_without_gradients(name: str) -> None:
    """A step without gradients leaves the state unchanged, also as the first one."""
    clipper, plain, nothing = (
        uc.Clipper(RULES[name]),
        uc.Clipper(RULES[name]),
        {"b": None, "none": None, "w": None},
    )
    for number in range(4):
        same(train(NUMPY, clipper, [number]), train(NUMPY, plain, [number]))
        assert clipper(nothing) == nothing
    assert clipper.state_dict() == plain.state_dict()


@pytest.mark.parametrize("name", LABELLED)
def test_gradients_that_are_absent_in_some_steps(framework: Framework, name: str) -> None:
    """Absent gradients leave their rows of the state unchanged, as in ``rule.update``.

    A state can also be loaded at such a step.
    """
    rule, weights = RULES[name], mapped(framework.array, params("float32"))
    clipper, state = uc.Clipper(rule), rule.init(weights)
    for number, absent in enumerate((None, "w", None, "b", "w", None)):
        if number == 4:
            clipper = loaded(rule, through_json(clipper.state_dict()))
            # These rules see no shapes, or no leaf at all.
            if name in {"spam", "own limit", "masked adagc"}:
                clipper.init(weights)
        grads = {
            key: None if key == absent else leaf for key, leaf in made(framework, number).items()
        }
        wanted, state, _ = rule.update(grads, state, weights)
        found = clipper(grads, weights)
        assert [key for key in grads if found[key] is None] == [
            key for key in grads if wanted[key] is None
        ]
        same([numbers(framework, found)], [numbers(framework, wanted)])
        assert clipper.state_dict()["state"] == to_dict(rule, state, weights)["state"]
    with pytest.raises(ValueError, match=r"grads\['w'\]"):
        clipper({"other" if key == "w" else key: leaf for key, leaf in grads.items()}, weights)


@on_numpy
@pytest.mark.parametrize("late", [0, 1])
def test_a_float64_gradient_that_comes_and_goes(late: int) -> None:
    """A histogram keeps its bins as the dtype of the norms changes."""
    clipper = uc.Clipper(uc.autoclip(50, window=None))
    for step in range(7):
        wide = np.zeros(1) if step % 2 == late else None
        clipper({"narrow": np.asarray([2.0 + step], np.float32), "wide": wide})

    assert float(clipper.report.norms) == 8.0
    assert float(clipper.report.limits) == pytest.approx(5.0, rel=0.01)


@on_numpy
def test_a_saved_row_of_a_gradient_that_is_absent_at_first() -> None:
    """An absent gradient has no shape, which a parameter has."""
    grads = [np.ones((2, 3)), np.ones(2)]
    clipper = uc.Clipper(uc.spam(2.0))
    clipper(grads)
    resumed = uc.Clipper(uc.spam(2.0))
    resumed.load_state_dict(clipper.state_dict())
    with pytest.raises(ValueError, match=r"has shape \(1, 2, 3\).* pass params="):
        resumed([None, np.ones(2)])

    resumed([None, np.ones(2)], params=grads)
    assert resumed.state_dict()["state"].keys() == clipper.state_dict()["state"].keys()


@on_numpy
def test_a_gradient_that_comes_late() -> None:
    """A leaf has a name in the saved state from the first step on, even without a gradient."""
    rule, both = uc.adagc(warmup=1), {"b": np.asarray([2.0]), "w": np.asarray([3.0, 4.0])}
    early = after(rule, {**both, "b": None})
    assert early.state_dict()["leaves"] == [["['b']", "['w']"]]
    late = loaded(rule, early.state_dict())
    same([leaves(late(both))], [leaves(early(both))])
    assert early.state_dict() == late.state_dict()
    turned = loaded(rule, early.state_dict())(OrderedDict(w=9 * both["w"], b=9 * both["b"]))
    wanted = early({key: 9 * leaf for key, leaf in both.items()})
    same([[turned["b"], turned["w"]]], [leaves(wanted)])


@on_numpy
def test_a_copy_goes_on_without_a_gradient() -> None:
    """With norms of rows or elements, the parameters give the shape of an absent gradient."""
    rule, weights = uc.spam(warmup=1), {"a": np.ones(2), "b": np.ones(3)}
    clipper = after(rule, weights)
    again, late = copy.deepcopy(clipper), {"a": 9 * np.ones(2), "b": None}
    same([numbers(NUMPY, again(late, weights))], [numbers(NUMPY, clipper(late))])


def test_parameters_make_the_first_state(framework: Framework) -> None:
    """``init`` accepts parameters in place of gradients, before the first step or after loading."""
    weights = mapped(framework.array, params("float32"))
    for rule in SOME.values():
        clipper, plain = uc.Clipper(rule), uc.Clipper(rule)
        clipper.init(weights)
        assert clipper.report is None
        same(train(framework, clipper, range(3)), train(framework, plain, range(3)))
        again = loaded(rule, clipper.state_dict())
        again.init(weights)
        assert again.state_dict() == clipper.state_dict()
        same(train(framework, again, range(3, 6)), train(framework, plain, range(3, 6)))


# --- Resuming


WAYS: dict[str, Callable[[uc.Clipper], uc.Clipper]] = {
    "JSON": lambda clipper: loaded(clipper.rule, through_json(clipper.state_dict())),
    "pickle": lambda clipper: pickle.loads(pickle.dumps(clipper)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def check_goes_on(framework: Framework, rule: Any, way: str, done: int) -> None:
    """Require a copy to continue like the clipper, with a state of its own."""
    clipper = uc.Clipper(rule)
    train(framework, clipper, range(done))
    before = clipper.state_dict()
    again = WAYS[way](clipper)
    assert (again.rule, again.report, again.state_dict()) == (rule, None, before)
    wanted = train(framework, clipper, range(done, 12))
    assert again.state_dict() == before
    same(train(framework, again, range(done, 12)), wanted)
    assert again.state_dict() == clipper.state_dict()
    # This discards the steps since.
    again.load_state_dict(before)
    assert again.report is None
    same(train(framework, again, range(done, 12)), wanted)
    again.load_state_dict({})
    anew = train(framework, again, range(done, 12))
    same(anew, train(framework, uc.Clipper(rule), range(done, 12)))
    differs = any(
        not np.allclose(*pair, rtol=1e-6, equal_nan=True)
        for pair in zip(leaves(anew), leaves(wanted), strict=True)
    )
    # The second rule of this chain sees norms of 1.
    assert differs is (done > 0 and rule != RULES["chain of skip and autoclip"])


@on_numpy
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in RULES if name != "own limit"])
def test_going_on(name: str, way: str) -> None:
    """After any copy or file, all later steps are bitwise those of an uninterrupted run."""
    check_goes_on(NUMPY, RULES[name], way, 5)


@pytest.mark.only("strict", "mlx", "torch", "tensorflow", "jax")
@pytest.mark.parametrize("name", SOME)
def test_other_frameworks(framework: Framework, name: str) -> None:
    """A clipper of each framework equals the loop by hand, and can be resumed.

    This includes the state before the first step.
    """
    check_loop(framework, uc, RULES[name])
    for way, done in (("JSON", 5), ("deepcopy", 5), ("pickle", 0)):
        check_goes_on(framework, RULES[name], way, done)


@on_numpy
def test_what_is_saved_is_a_copy() -> None:
    """Changes of a saved dictionary reach no clipper, and arrays load like lists."""
    clipper = after(uc.percentile_clipping(50, window=3), STEPS[0])
    saved = clipper.state_dict()
    again, wanted = loaded(clipper.rule, saved), copy.deepcopy(saved)
    for one in (saved, again.state_dict(), clipper.state_dict()):
        one["state"]["norms"][0][0] = 7.0
        one["leaves"][0][0] = "other"
    assert again.state_dict() == clipper.state_dict() == wanted
    arrays = {
        **wanted,
        "state": {name: np.asarray(value) for name, value in wanted["state"].items()},
    }
    again = loaded(clipper.rule, arrays)
    arrays["state"]["norms"][...] = 7.0
    again.init(STEPS[0])
    assert again.state_dict() == wanted


@pytest.mark.needs("torch", "tensorflow", "jax", "mlx", "strict")
@pytest.mark.parametrize("name", [name for name in RULES if name != "own limit"])
def test_through_all_frameworks(name: str) -> None:
    """Twelve steps, two in each framework, are those of a run on NumPy alone."""
    wanted, saved, found = train(NUMPY, uc.Clipper(RULES[name]), range(12)), {}, []
    for number, names in enumerate(("numpy", "torch", "jax", "tensorflow", "mlx", "strict")):
        clipper, here = loaded(RULES[name], saved), EAGER[names][0]()
        found += train(here, clipper, range(2 * number, 2 * number + 2))
        saved = through_json(clipper.state_dict())
    same(found, wanted, rtol=1e-5)


# --- Files


def half_way(
    framework: Framework, rule: Any
) -> tuple[uc.Clipper, Callable[[dict[str, Any]], None]]:
    """Return a clipper after six steps, and a check that a saved state continues like it."""
    clipper = uc.Clipper(rule)
    train(framework, clipper, range(6))
    wanted = train(framework, copy.deepcopy(clipper), range(6, 12))
    return clipper, lambda saved: same(train(framework, loaded(rule, saved), range(6, 12)), wanted)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", SOME)
def test_files_of_torch(name: str, tmp_path: Path) -> None:
    """A state passes through `torch.save` as numbers and as tensors, of a graph, too."""
    import torch

    framework, rule, path = EAGER["torch"][0](), SOME[name], tmp_path / "state.pt"
    clipper, goes_on = half_way(framework, rule)
    torch.save(clipper.state_dict(), path)
    goes_on(torch.load(path))
    tensors = {key: torch.tensor(value) for key, value in clipper.state_dict()["state"].items()}
    torch.save({**clipper.state_dict(), "state": tensors}, path)
    goes_on(torch.load(path))
    recording = uc.Clipper(rule)
    for number in range(6):
        grads = mapped(lambda leaf: 2 * (leaf / 2).requires_grad_(), made(framework, number))
        assert all(leaf.requires_grad for leaf in leaves(recording(grads, loss=LOSSES[number])))
        assert not any(array.requires_grad for array in leaves(recording.state))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", ["autoclip", "spam"])
def test_files_of_tensorflow(name: str, tmp_path: Path) -> None:
    """A state passes through `tf.train.Checkpoint` as JSON."""
    import tensorflow as tf

    framework, rule = EAGER["tensorflow"][0](), SOME[name]
    clipper, goes_on = half_way(framework, rule)
    path = tf.train.Checkpoint(clipper=tf.Variable(json.dumps(clipper.state_dict()))).save(
        str(tmp_path / "state")
    )
    text = tf.Variable("")
    tf.train.Checkpoint(clipper=text).restore(path).assert_consumed()
    goes_on(json.loads(text.numpy()))


@pytest.mark.needs("jax", "optax")
def test_files_of_jax(tmp_path: Path) -> None:
    """A state is saved next to the parameters as a tree of arrays, and comes back bit for bit.

    It can be loaded onto another mesh.
    """
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    rule, rng = (
        uc.chain(uc.spam(2.0, 0.5, 1), uc.autoclip(50, 4), uc.adagc(warmup=1)),
        np.random.default_rng(0),
    )
    grads, update = (
        {"b": rng.standard_normal(4), "w": rng.standard_normal((4, 2))},
        jax.jit(rule.update),
    )

    def divided(*shape: int) -> Any:
        mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        return jax.device_put(
            grads, {"b": NamedSharding(mesh, P("x")), "w": NamedSharding(mesh, P("x", "y"))}
        )

    here, there = divided(2, 1), divided(1, 2)
    _, state, _ = update(here, rule.init(here))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        same_place, another = (
            checkpointer.restore(tmp_path / "state", rule.init(one)) for one in (here, there)
        )
    assert jax.tree.structure(same_place) == jax.tree.structure(state)
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one, other, strict=True), same_place, state
    )
    for one, other in zip(
        *(jax.tree.leaves(update(*some)) for some in ((there, another), (here, state))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# --- Refusals: another rule, other leaves, another format

EMA = uc.limits.Ema(1.05, 0.98)
OTHERS: dict[str, tuple[Any, Any]] = {
    "limit": (uc.adagc(), uc.adagn()),
    "norm": (uc.autoclip(), uc.Rule(uc.limits.Percentile(10, 10_000), norm=uc.norms.RMS)),
    "scope": (uc.autoclip(), uc.Rule(uc.limits.Percentile(10, 10_000), scope=uc.scopes.each_leaf)),
    "axes": (uc.Rule(EMA, scope=uc.scopes.axes(0)), uc.Rule(EMA, scope=uc.scopes.axes(-1))),
    "window": (uc.autoclip(window=3), uc.autoclip(window=4)),
    "flag": (
        uc.Rule(uc.limits.Percentile(50, 3)),
        uc.Rule(uc.limits.Percentile(50, 3, filled=True)),
    ),
    "chain": (uc.adagc(), uc.chain(uc.adagc())),
    "order": (uc.chain(double, uc.zclip()), uc.chain(uc.zclip(), double)),
    "mask": (uc.autoclip(), uc.masked(uc.autoclip(), only_w)),
    "no memory": (uc.autoclip(), uc.by_norm(1.0)),
    "groups": (
        uc.by_group_norm({"b": 1.0, "w": EMA}, first_key),
        uc.by_group_norm({"b": EMA, "w": 1}, first_key),
    ),
}
TUNED: dict[str, tuple[Any, Any]] = {
    "numbers": (uc.zclip(z=1.0), uc.zclip(z=np.float32(2.0), decay=0.5, warmup=3)),
    ("a rule without memory"): (
        uc.chain(uc.by_norm(1.0), uc.adagc()),
        uc.chain(uc.by_value(0.0, 2.0), uc.adagc()),
    ),
    "function": tuple(
        uc.by_global_norm(uc.limits.Schedule(limit)) for limit in (falling, lambda step: 1.0 + step)
    ),
    "curve": (
        uc.autoclip(),
        uc.Rule(uc.limits.Percentile(10, 10_000), curve=uc.curves.soft, nonfinite="skip"),
    ),
    "order of NumPy's": tuple(
        uc.Rule(uc.limits.Percentile(50, 3), norm=uc.Norm(p)) for p in (3, np.float64(3.0))
    ),
    "decay 0": (uc.adagc(), uc.norm_growth()),
    "mask": (uc.masked(uc.autoclip(), only_w), uc.masked(uc.autoclip(), lambda path, leaf: True)),
}


@on_numpy
@pytest.mark.parametrize("name", OTHERS)
def test_another_rule(name: str) -> None:
    """The state of another rule is refused at once, and the own state is kept."""
    before, rule = OTHERS[name]
    saved = after(before, STEPS[0]).state_dict()
    used, plain = after(rule, STEPS[0], STEPS[1]), after(rule, STEPS[0], STEPS[1])
    for clipper in (used, uc.Clipper(rule)):
        own, report = clipper.state_dict(), clipper.report
        with pytest.raises(ValueError, match=r"loading \{\}"):
            clipper.load_state_dict(saved)
        assert clipper.state_dict() == own
        assert clipper.report is report
    same(train(NUMPY, used, range(2, 5)), train(NUMPY, plain, range(2, 5)))
    with pytest.raises(ValueError, match=r"loading \{\}"):
        from_dict(rule, saved, STEPS[0])


@on_numpy
@pytest.mark.parametrize("name", TUNED)
def test_a_rule_that_is_tuned(name: str) -> None:
    """A state fits a rule with other parameters or functions, and with other stateless rules."""
    before, rule = TUNED[name]
    saved = after(before, STEPS[0]).state_dict()
    clipper = loaded(rule, saved)
    clipper.init(STEPS[0])
    assert clipper.state_dict()["state"] == saved["state"]
    train(NUMPY, clipper, [1])
    assert clipper.state_dict()["state"] != saved["state"]


@pytest.mark.only("numpy", "torch")
@pytest.mark.parametrize("name", LABELLED)
def test_other_leaves(framework: Framework, name: str) -> None:
    """A state of other leaves is refused by name, even if its norms have the same shapes.

    The clipper keeps its state.
    """
    rule = (
        uc.masked(RULES[name].rule, lambda path, leaf: path[0] != "b")
        if name == "masked adagc"
        else RULES[name]
    )
    grads = {"b": framework.array([[1.0, 2.0]]), "w": framework.array([[3.0, 4.0]])}
    others, w, v = {"b": grads["b"], "v": grads["w"]}, r"grads\['w'\]", r"grads\['v'\]"
    saved, fresh = after(rule, grads).state_dict(), uc.Clipper(rule)
    fresh.load_state_dict(saved)
    # A second attempt also fails, and keeps the loaded state.
    for act in (fresh, fresh.init, fresh):
        with pytest.raises(ValueError, match=rf"{w}.*{v}.*uniclip\.saved\.renamed"):
            act(others)
        assert (fresh.state, fresh.report, fresh.state_dict()) == (None, None, saved)
    with pytest.raises(ValueError, match=w):
        from_dict(rule, saved, {"b": grads["b"]})
    used = after(rule, others)
    own, report = used.state_dict(), used.report
    with pytest.raises(ValueError, match=rf"{w}.*{v}"):
        used.load_state_dict(saved)
    assert used.state_dict() == own
    assert used.report is report
    with pytest.raises(ValueError, match=w):
        used(grads)
    names = lambda name: name.replace("'w'", "'v'")
    for state in (
        renamed(saved, {"['w']": "['v']"}),
        renamed(saved, names),
        {**saved, "leaves": None},
    ):
        wanted, found = loaded(rule, saved)(grads), loaded(rule, state)(others)
        same([numbers(framework, found)], [numbers(framework, wanted)])


@on_numpy
def test_other_leaves_of_one_norm() -> None:
    """The state of a rule over all leaves does not depend on their names."""
    rule = uc.chain(double, uc.autoclip(50, 4))
    clipper = loaded(rule, after(rule, {"b": np.asarray([1.0])}).state_dict())
    clipper({"b": np.asarray([1.0]), "w": np.asarray([[3.0, 4.0]])})
    assert clipper({"v": np.asarray([[100.0]])})["v"].item() == pytest.approx(2 * 26**0.5)


ORDERED = {
    "adagc": uc.adagc(warmup=1),
    "as many norms as leaves": uc.Rule(uc.limits.Percentile(50, 2), scope=uc.scopes.each_leaf),
    "entries": uc.spam(warmup=1),
    "units": uc.Rule(EMA, scope=uc.scopes.unit(0)),
    "limits": uc.by_group_norm(
        {"w": uc.limits.Ema(1.5, 0.5), "b": 0.1}, lambda path, leaf: path[0]
    ),
    "losses": uc.Rule(uc.limits.RollingZScore(1.0, 2, warmup=2), scope=uc.scopes.each_leaf),
    "chain": uc.chain(
        uc.autoclip(50, 3), uc.masked(uc.adagc(warmup=1), lambda path, leaf: True), uc.adagn()
    ),
}
GRADS = OrderedDict(w=np.asarray([3.0, 4.0]), b=np.asarray([1.0]))


@pytest.mark.only("numpy", "torch", "jax")
@pytest.mark.parametrize("name", ORDERED)
def test_leaves_in_another_order(framework: Framework, name: str) -> None:
    """A state belongs to the names of leaves, so their order may change."""
    steps = [
        OrderedDict((key, framework.array(size * GRADS[key])) for key in GRADS)
        for size in (1.0, 3.0, 9.0, 2.0)
    ]
    one = after(ORDERED[name], *steps[:2])
    other = loaded(ORDERED[name], through_json(one.state_dict()))
    for grads in steps[2:]:
        wanted, found = one(grads, loss=1.0), other(OrderedDict(reversed(grads.items())), loss=1.0)
        for key in GRADS:
            np.testing.assert_array_equal(
                framework.numpy(found[key]), framework.numpy(wanted[key]), err_msg=key
            )


@on_numpy
@pytest.mark.parametrize("name", ["adagc", "as many norms as leaves"])
def test_frozen_leaves(name: str) -> None:
    """A leaf that never has a gradient keeps its place in the state.

    The state continues in the same tree, and is refused without the leaf.
    """
    steps = [{key: size * GRADS[key] for key in GRADS} for size in (1.0, 3.0, 9.0, 2.0)]
    frozen = [OrderedDict(w=grads["w"], frozen=None, b=grads["b"]) for grads in steps]
    whole, saved = after(ORDERED[name], *steps[:2]), after(ORDERED[name], *frozen[:2]).state_dict()
    other = loaded(ORDERED[name], through_json(saved))
    for given, grads in zip(frozen[2:], steps[2:], strict=True):
        found, wanted = other(given), whole(grads)
        assert all(
            map(np.array_equal, [found[key] for key in GRADS], [wanted[key] for key in GRADS])
        )
    with pytest.raises(ValueError, match="frozen"):
        loaded(ORDERED[name], saved)(GRADS)


@on_numpy
def test_other_shapes_and_numbers_of_norms() -> None:
    """Arrays that have another shape, are missing or are superfluous are refused by name."""
    grads, rule = {"b": np.asarray([1.0]), "w": np.asarray([[3.0, 4.0]])}, uc.spam()
    saved = after(rule, grads).state_dict()
    with pytest.raises(ValueError, match=r"\(1, 1, 2\).*\(1, 2, 1\)"):
        loaded(rule, saved)({**grads, "w": np.asarray([[3.0], [4.0]])})
    for name in saved["state"]:
        less = {key: value for key, value in saved["state"].items() if key != name}
        for state in (less, {**saved["state"], "more": 1.0}):
            with pytest.raises(ValueError, match=r"loading \{\}"):
                loaded(rule, {**saved, "state": state})(grads)
    with pytest.raises(ValueError, match="2 norms"):
        uc.adagc().update({**grads, "more": np.ones(2)}, uc.adagc().init(grads))


@on_numpy
def test_another_format() -> None:
    """A state of another format is refused by its number.

    A state without a number is read as the current format.
    """
    clipper = after(uc.adagc(), GRADS)
    saved = clipper.state_dict()
    for number in (1, 3, "2", None):
        for load in (clipper.load_state_dict, lambda state: from_dict(uc.adagc(), state, GRADS)):
            with pytest.raises(ValueError, match=f"format {number!r}"):
                load({**saved, "format": number})
    for wrong in (None, [1.0], "count"):
        with pytest.raises(TypeError, match="saved"):
            clipper.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"loading \{\}"):
        clipper.load_state_dict({"count": 1})
    assert clipper.state_dict() == saved
    assert (
        loaded(uc.adagc(), {name: saved[name] for name in ("rule", "leaves", "state")}).state_dict()
        == saved
    )


@on_numpy
def test_renamed() -> None:
    """A dict, which may be partial, or a function renames the leaves of a state.

    The state itself is unchanged.
    """
    saved = after(uc.chain(uc.autoclip(), uc.adagc()), GRADS).state_dict()
    before = copy.deepcopy(saved)
    assert renamed(saved, {"['w']": "['v']"}) == {**before, "leaves": [None, ["['v']", "['b']"]]}
    assert renamed(saved, lambda name: f"[0]{name}")["leaves"] == [None, ["[0]['w']", "[0]['b']"]]
    assert renamed({}, str.lower) == {}
    assert saved == before
    with pytest.raises(ValueError, match=r"grads\['v'\].*grads\['w'\]"):
        renamed(saved, {"['v']": "['w']"})
    with pytest.raises(ValueError, match=r"grads\['b'\]"):
        renamed(saved, {"['w']": "['b']"})


# --- Compilers and threads


def test_compiled_code(compiler: Framework) -> None:
    """A stateful clipper refuses compiled code, names the alternative, and stays as it was."""
    grads, clipper = {"w": compiler.array([3.0, 4.0])}, uc.Clipper(uc.norm_growth())
    plain = uc.Clipper(uc.by_global_norm(1.0))
    plain.logs()
    compiler.run(lambda grads: plain(grads)["w"], grads)
    # Code that runs once has nothing to log.
    assert plain.logs() == {}
    # torch.compile wraps the error in its own.
    with pytest.raises(Exception, match=r"rule\.update\(grads, state\)"):
        compiler.run(lambda grads: clipper(grads), grads)
    assert (clipper.state, clipper.report) == (None, None)


def one_more(step: Any) -> Any:
    """Return the number of a step, from 1."""
    return step + 1.0


@pytest.mark.only("numpy", "torch")
def test_threads_that_read(framework: Framework) -> None:
    """While one thread clips, another one reads and saves states of whole steps, in order."""
    limit = uc.by_global_norm(uc.limits.Schedule(one_more))
    clipper, seen, done, ones = (
        uc.Clipper(uc.chain(limit, limit)),
        [],
        threading.Event(),
        framework.array([1.0]),
    )
    clipper([ones])

    def look() -> None:
        while not done.is_set():
            saved, report = clipper.state_dict()["state"], clipper.report
            seen.append(
                (
                    list(saved.values()),
                    [float(framework.numpy(norm)) for norm in report.norms],
                    report.limits,
                )
            )

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(look)
        for step in range(2, 200):
            clipper([step * ones])
        done.set()
        reader.result()
    last = 1.0
    for counts, norms, limits in seen:
        # Step n has norm n, which is its limit.
        assert [float(framework.numpy(limit)) for limit in limits] == norms
        assert last <= counts[0] == counts[1] <= norms[0] == norms[1]
        last = norms[0]
    assert len({norms[0] for _, norms, _ in seen}) > 1


LOGGED = {
    "norm": uc.by_global_norm(2.0),
    "leaves": uc.by_norm(2.0),
    "chain": uc.chain(uc.by_norm(3.0), uc.by_global_norm(2.0, nonfinite="skip")),
    "learned": uc.zclip(warmup=2),
}


@pytest.mark.parametrize("name", LOGGED)
def test_logs(framework: Framework, name: str) -> None:
    """Logs contain the last scalars, means, and the largest finite norm since the last log.

    The first log is that of a single step.
    """
    clipper, seen = uc.Clipper(LOGGED[name]), list[dict[str, float]]()
    assert (clipper.logs(), clipper.scalars()) == ({}, {})
    norms = [1.0, 3.0, math.nan, 5.0, 0.5]
    for norm in norms * 2:
        clipper({"a": framework.array([norm]), "b": framework.array([0.1])})
        seen.append(
            {key: float(framework.numpy(value)) for key, value in clipper.scalars().items()}
        )
        if len(seen) == len(norms):
            first = clipper.logs()
    for found, some in ((first, seen[:5]), (clipper.logs(), seen[5:])):
        wanted = some[-1] | {
            key: np.mean([one[key] for one in some])
            for key in ("clip/share", "clip/skipped")
            if key in found
        }
        wanted["clip/norm_max"] = max(
            one["clip/norm"] for one in some if math.isfinite(one["clip/norm"])
        )
        # The last step of one of the rules has no limit.
        wanted = {key: math.nan if value > 3e38 else value for key, value in wanted.items()}
        assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert clipper.logs() == {}


def test_logs_without_a_limit(framework: Framework) -> None:
    """A limit or threshold that does not exist is NaN in logs; scalars have the largest number."""
    clipper = uc.Clipper(uc.zclip(warmup=2))
    logs = []
    for norm in (1.0, 2.0, 1.5, 40.0):
        clipper({"a": framework.array([norm])})
        logs.append(clipper.logs())
        assert float(framework.numpy(clipper.scalars()["clip/limit"])) > 0
    limits = [row["clip/limit"] for row in logs]
    assert np.isnan(limits).tolist() == [True, True, True, False]
    assert np.isnan([row["clip/threshold"] for row in logs]).tolist() == [True, True, False, False]
    assert limits[-1] == pytest.approx(float(framework.numpy(clipper.report.limits)), rel=1e-6)


@on_numpy
def test_logs_of_many_steps() -> None:
    """Each step is counted once, for any number between logs, and while another thread reads."""
    clipper, done, shares = uc.Clipper(uc.by_global_norm(2.0)), threading.Event(), list[float]()
    clipper.logs()

    def look() -> None:
        while not done.is_set():
            shares.append(clipper.logs().get("clip/share", 0.0))

    for _ in range(1000):
        clipper([np.asarray([3.0])])
        clipper([np.asarray([1.0])])
    assert clipper.logs()["clip/share"] == 0.5
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(look)
        for _ in range(1000):
            clipper([np.asarray([1.0])])
        done.set()
        reader.result()
    assert set(shares) == {0.0}
    bounds = uc.Clipper(uc.by_value(-1.0, 1.0))
    bounds([np.ones(3)])
    assert (bounds.logs(), bounds.scalars()) == ({}, {})


@pytest.mark.parametrize("percentile", [0, 37, 50, 80, 100])
def test_percentiles_of_rows_that_are_absent(framework: Framework, percentile: float) -> None:
    """Each leaf has the percentile of its own last norms, for any number of absent gradients."""
    rng, window = np.random.default_rng(0), 4
    rule = uc.Rule(uc.limits.Percentile(percentile, window), scope=uc.scopes.each_leaf)
    state, seen = rule.init([framework.array([1.0])] * 3), [list[float]() for _ in range(3)]
    for step in range(9):
        norms = rng.lognormal(size=3)
        here = [leaf == 0 or bool(rng.random() < 0.5) for leaf in range(3)]
        grads = [
            framework.array([norm]) if there else None
            for norm, there in zip(norms, here, strict=True)
        ]
        _, state, report = rule.update(grads, state)
        for own, norm, there, limit in zip(seen, norms, here, report.limits, strict=True):
            if there:
                own.append(norm)
                wanted = np.percentile(own[-window:], percentile)
                assert float(limit) == pytest.approx(wanted, rel=1e-5), (step, own)


@on_numpy
def test_names_outlive_a_load() -> None:
    """A leaf that is absent after a load keeps its name and its state in the next save."""
    grads, rule = {name: np.ones(2) for name in "abc"}, uc.adagc(warmup=2)
    saved = uc.Clipper(rule)
    saved(grads)
    loaded = uc.Clipper(rule)
    loaded.load_state_dict(saved.state_dict())
    loaded(grads | {"b": None})
    other = uc.Clipper(rule)
    other.load_state_dict(loaded.state_dict())
    with pytest.raises(ValueError, match=r"\['b'\]"):
        other({"a": np.ones(2), "aa": np.ones(2), "c": np.ones(2)})


def test_masked_leaves_that_come_later(framework: Framework) -> None:
    """A rule whose leaves are absent at the first step adapts to them later.

    Networks that train in turn do this.
    """
    own = {
        name: uc.masked(uc.zclip(warmup=2), lambda path, leaf, name=name: path[0] == name)
        for name in "ab"
    }
    clipper, alone = (
        uc.Clipper(uc.chain(*own.values())),
        {name: uc.Clipper(rule) for name, rule in own.items()},
    )
    for step, norm in enumerate((1.0, 2.0, 1.5, 1.0, 90.0, 50.0)):
        name = "ab"[step % 2]
        grads = {"a": None, "b": None} | {name: framework.array([norm])}
        found, wanted = clipper(grads)[name], alone[name](grads)[name]
        np.testing.assert_allclose(framework.numpy(found), framework.numpy(wanted), rtol=1e-6)


@pytest.mark.cpu_only("an accelerator's flags are read steps later, or by logs()")
# Only their values can be read by the host for free.
@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
@pytest.mark.parametrize(
    ("by", "why"), [(3.0, "a norm of 3 is above its bound"), (math.nan, "are not finite")]
)
def test_a_run_that_skips_every_step_says_so(framework: Framework, by: float, why: str) -> None:
    """After twenty skipped steps in a row, a run warns once; a taken step resets the count."""
    clipper = uc.Clipper(
        uc.chain(uc.by_value(-9.0, 9.0), uc.by_global_norm(1.0, nonfinite="skip", skip_above=2.0))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm in [by] * 19 + [1.0] + [by] * 19:
            clipper([framework.array([norm])])
    with pytest.warns(
        UserWarning, match=f"20 steps in a row were skipped by uc.chain.*{why}"
    ) as seen:
        clipper([framework.array([by])])
    assert [one.filename for one in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            clipper([framework.array([by])])
