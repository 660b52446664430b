"""`Clipper`: it does what the pure loop does, and its memory survives copies, files and other frameworks."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import COMPILED, EAGER, KNOWN, Framework
from tracing import Largest

pytestmark = pytest.mark.ways(*EAGER, without="Dask")  # which takes long, and the tests of rules have it

NUMPY = KNOWN["numpy"]()


def falling(step: Any) -> Any:
    """Return the limit of a step, for `Schedule`; it has a name, so that the rule can be pickled."""
    return 3.0 / (1.0 + step)


def weight(path: Any, leaf: Any) -> bool:
    """Whether a leaf is a weight."""
    return path[0] == "w"


def first_key(path: Any, leaf: Any) -> Any:
    """Return the label of a leaf."""
    return path[0]


RULES = {
    "schedule": uc.by_global_norm(uc.limits.Schedule(falling)),
    "autoclip": uc.autoclip(50, window=4),
    "autoclip-all": uc.autoclip(50, window=None),
    "percentile": uc.percentile_clipping(50, window=3),
    "zclip": uc.chain(uc.zclip(z=1.0, warmup=2), uc.by_global_norm(5.0)),
    "log_zscore": uc.log_zscore(z=1.0),
    "adagc": uc.adagc(warmup=2),
    "norm_growth": uc.norm_growth(),
    "skip_spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    "spam": uc.spam(factor=2.0, decay=0.5, warmup=1),
    "adagn": uc.adagn(),
    "quantile": uc.by_example_quantile(),
    "per_group": uc.Rule(
        uc.limits.PerGroup({"b": uc.limits.Ema(1.05, 0.98), "w": 1.0}), scope=uc.scopes.groups(first_key)
    ),
    "masked": uc.masked(uc.chain(np.negative, uc.autoclip(50, window=4)), weight),
    "own": uc.Rule(Largest(), scope=uc.scopes.unit(0)),
    "no memory": uc.by_norm(1.0),
}
SOME = ["autoclip", "zclip", "spam", "own"]


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Any:
    """Each rule; `skip_spikes` looks at a loss that it gets, the others take it and do not."""
    return RULES[request.param]


def negated(rule: Any, fw: Framework) -> Any:
    """Return the rule; a function of arrays inside is one that every framework runs."""
    return uc.masked(uc.chain(negative, uc.autoclip(50, window=4)), weight) if hasattr(rule, "where") else rule


def negative(array: Any) -> Any:
    """Return an array with the other sign."""
    return -array


def steps_of(fw: Framework) -> list[Any]:
    """Return the gradients of some steps; their norms vary by a factor of a hundred."""
    rng, count = np.random.default_rng(3), 5 if fw.family == "Dask" else 8  # which takes long
    return [
        {"b": fw.array(size * rng.standard_normal(3)), "none": None, "w": fw.array(size * rng.standard_normal((3, 2)))}
        for size in 10 ** rng.uniform(-1, 1, 8)[:count]
    ]


def values(fw: Framework, tree: Any) -> list[np.ndarray]:
    """Return the leaves of a tree as NumPy's."""
    return [fw.numpy(leaf) for leaf in optree.tree_leaves(tree)]


def computed(state: Any) -> Any:
    """Return a state with its values: in Dask's arrays, which are lazy, all steps before would be done again."""
    return optree.tree_map(lambda array: array.persist() if hasattr(array, "persist") else array, state)


def same(fw: Framework, one: Any, other: Any, like: Framework | None = None, rtol: float = 0.0) -> None:
    """Compare two trees, bit by bit unless they are of two frameworks."""
    pairs = zip(values(fw, one), values(like or fw, other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, strict=not rtol)


def train(clipper: uc.Clipper, steps: list[Any]) -> list[Any]:
    """Return the clipped gradients of some steps, each with a loss."""
    return [clipper(grads, loss=float(number % 3)) for number, grads in enumerate(steps)]


def test_a_clipper_is_the_pure_loop(fw: Framework, rule: Any) -> None:
    """At each step gradients, state and report are those of `rule.update`, and without memory those of `clip`."""
    rule = negated(rule, fw)
    clipper, steps = uc.Clipper(rule), steps_of(fw)
    assert clipper.rule is rule
    assert clipper.report is clipper.state is None
    state = rule.init(steps[0])
    for number, grads in enumerate(steps):
        wanted, state, report = rule.update(grads, computed(state), loss=float(number % 3))
        clipped = clipper(grads, loss=float(number % 3))
        assert all(fw.owns(leaf) for leaf in optree.tree_leaves(clipped))
        same(fw, clipped, wanted)
        same(fw, clipper.state, state)
        same(fw, clipper.report, report)
        assert isinstance(clipper.report, uc.Report)
    if not rule.memory:
        same(fw, clipped, uc.clip(steps[-1], rule)[0])


def test_it_prints_as_its_source() -> None:
    """What a clipper prints evaluates to a new one of an equal rule."""
    clipper = uc.Clipper(uc.zclip(z=3.0))
    assert repr(clipper) == "uc.Clipper(uc.Rule(uc.limits.ZScore(3.0, 0.97)))"
    assert eval(repr(clipper), {"uc": uc}).rule == clipper.rule


@pytest.mark.parametrize("wrong", [1.0, None, uc.Rule, "zclip"], ids=repr)
def test_what_is_no_rule(wrong: Any) -> None:
    """Whatever is neither a rule nor a function is refused at once."""
    with pytest.raises(TypeError, match=r"rule must be a rule, .*uc.by_global_norm\(1.0\)"):
        uc.Clipper(wrong)


def test_functions_and_params(fw: Framework) -> None:
    """A function is a rule, too; parameters and a reduction over devices reach the rule."""
    clipper = uc.Clipper(negative)
    np.testing.assert_array_equal(fw.numpy(clipper(fw.array([1.0, -2.0]))), [-1.0, 2.0])
    assert clipper.report == uc.Report()
    grads, params = [fw.array([3.0, 4.0])], [fw.array([0.0, 10.0])]
    np.testing.assert_allclose(fw.numpy(uc.Clipper(uc.agc(0.1))(grads, params)[0]), fw.numpy(uc.clip(
        grads, uc.agc(0.1), params)[0][0]))  # fmt: skip
    with pytest.raises(ValueError, match="pass params="):
        uc.Clipper(uc.agc(0.1))(grads)
    doubled = uc.Clipper(uc.by_global_norm(1.0, ord=1))
    doubled(grads, all_reduce=lambda total, op: 2 * total if op == "sum" else total)
    assert float(fw.numpy(doubled.report.norms)) == 14


def test_the_loss(fw: Framework) -> None:
    """A spike of the loss alone makes the gradients zero; without a loss nothing does."""
    losses = [1.0, 1.1, 0.9, 100.0, 1.0]
    with_loss, without = (uc.Clipper(uc.skip_spikes(window=8, warmup=3)) for _ in range(2))
    for loss in losses:
        grads = [fw.array([3.0, 4.0])]
        clipped = with_loss(grads, loss=fw.array(loss) if loss < 2 else loss)
        np.testing.assert_array_equal(fw.numpy(clipped[0]), [3.0, 4.0] if loss < 2 else [0.0, 0.0])
        np.testing.assert_array_equal(fw.numpy(without(grads)[0]), [3.0, 4.0])


@pytest.mark.parametrize("name", SOME)
def test_in_place(fw: Framework, name: str) -> None:
    """`clip_` changes the arrays themselves, and returns the report; where arrays never change it is an error."""
    rule = RULES[name]
    usual, in_place = uc.Clipper(rule), uc.Clipper(rule)
    for number, (grads, own) in enumerate(zip(steps_of(fw), steps_of(fw), strict=True)):
        if not fw.writes:
            with pytest.raises(TypeError, match=r"never change|read-only|use uc\.clip"):
                in_place.clip_(own, loss=float(number % 3))
            assert in_place.report is in_place.state is None
            continue
        wanted = usual(grads, loss=float(number % 3))
        report = in_place.clip_(own, loss=float(number % 3))
        same(fw, own, wanted)
        assert in_place.report is report
        same(fw, report, usual.report)
        same(fw, in_place.state, usual.state)


def test_generators(fw: Framework) -> None:
    """A generator can be read once: that is enough, at the first step, too."""
    for name in SOME:
        rule = RULES[name]
        one, other = uc.Clipper(rule), uc.Clipper(rule)
        for grads in steps_of(fw):
            leaves = [grads["w"], grads["b"]]
            same(fw, list(one(leaf for leaf in leaves)), other(leaves), rtol=1e-6)
        same(fw, one.state, other.state, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero", "raise"])
def test_a_step_that_is_not_finite(fw: Framework, bad: float, nonfinite: Any) -> None:
    """It changes nothing that was learned; the report is of that step, unless it raised."""
    inner = uc.zclip(warmup=2, nonfinite=nonfinite)
    for rule in (inner, uc.chain(inner, uc.by_global_norm(5.0)), uc.autoclip(50, 4, nonfinite=nonfinite)):
        clipper, steps = uc.Clipper(rule), steps_of(fw)
        train(clipper, steps[:3])
        before, report = clipper.state_dict(), clipper.report
        wrong = {**steps[3], "b": fw.array([1.0, bad, 1.0])}
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"^NaN or ∞ in grads\['b'\]$"):
                clipper(wrong)
            assert clipper.report is report
        else:
            clipper(wrong)
            assert not bool(fw.numpy(clipper.report.finite))
        assert clipper.state_dict() == before
        other = uc.Clipper(rule)
        same(fw, train(clipper, steps[4:]), train(other, steps[:3] + steps[4:])[3:])
        first = uc.Clipper(rule)  # and the first step may be such a one
        if nonfinite != "raise":
            first(wrong)
            same(fw, first.state, rule.init(wrong))


COPIES: dict[str, Callable[[uc.Clipper], uc.Clipper]] = {
    "pickle": lambda clipper: pickle.loads(pickle.dumps(clipper)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def loaded(saved: dict[str, Any], rule: Any) -> uc.Clipper:
    """Return a new clipper that goes on from what was saved."""
    clipper = uc.Clipper(rule)
    clipper.load_state_dict(saved)
    return clipper


@pytest.mark.parametrize(("way", "name", "done"), [("json", name, 3) for name in RULES] + [
    (way, name, done) for way in (*COPIES, "json", "state") for name, done in (("zclip", 0), ("spam", 2))
])  # fmt: skip
def test_going_on(fw: Framework, name: str, way: str, done: int) -> None:
    """After any way through a copy or a file, all later steps are bitwise those of the clipper itself."""
    rule = negated(RULES[name], fw)
    clipper, steps = uc.Clipper(rule), steps_of(fw)
    train(clipper, steps[:done])
    before = clipper.state_dict()
    if way in COPIES:
        again = COPIES[way](clipper)
    elif way == "json":
        again = loaded(json.loads(json.dumps(before)), rule)
    else:
        again = uc.Clipper(rule)
        again.state = clipper.state
    assert again.rule == rule
    assert again.report is None
    if way != "state":  # of which the leaves are not known before the first step
        assert again.state_dict() == before
    elif done:
        assert again.state_dict()["state"] == before["state"]
    wanted = train(clipper, steps[done:])
    same(fw, train(again, steps[done:]), wanted)
    same(fw, again.state, clipper.state)
    same(fw, again.report, clipper.report)
    for mine, its in zip(optree.tree_leaves(again.state), optree.tree_leaves(clipper.state), strict=True):
        assert fw.owns(mine)
        assert fw.dtype(mine) == fw.dtype(its)


def test_copies_go_their_own_ways(fw: Framework) -> None:
    """What a copy sees later, and what is done to a dictionary, does not reach the clipper."""
    steps = steps_of(fw)
    for make in COPIES.values():
        clipper = uc.Clipper(RULES["autoclip"])
        train(clipper, steps[:3])
        before = clipper.state_dict()
        train(make(clipper), steps[3:])
        assert clipper.state_dict() == before
        clipper.state_dict().clear()
        assert clipper.state_dict() == before
        saved = clipper.state_dict()
        again = loaded(saved, clipper.rule)
        saved.clear()
        assert again.state_dict() == before


def plain(value: Any) -> bool:
    """Whether a value is made of Python's own numbers, lists and names."""
    if type(value) is dict:
        return all(map(plain, value)) and all(map(plain, value.values()))
    return all(map(plain, value)) if type(value) is list else value is None or type(value) in {int, float, bool, str}


def test_state_dict(fw: Framework, rule: Any) -> None:
    """It is made of plain numbers, lists and names; without a step it is empty, without memory it stays so."""
    rule = negated(rule, fw)
    clipper = uc.Clipper(rule)
    assert clipper.state_dict() == {}
    train(clipper, steps_of(fw))
    saved = clipper.state_dict()
    assert type(saved) is dict
    assert list(saved) == (["format", "rule", "leaves", "state"] if rule.memory else [])
    assert plain(saved)
    assert json.loads(json.dumps(saved, allow_nan=False)) == saved


def test_names_in_a_state_dict(fw: Framework) -> None:
    """A name is the way to the array: the number of a rule in a chain, and the field."""
    clipper = uc.Clipper(uc.chain(uc.by_value(-10.0, 10.0), uc.adagc(warmup=0)))
    clipper([fw.array([3.0, 4.0]), fw.array([2.0])])
    saved = clipper.state_dict()
    assert saved["state"] == {"1.averages": [5.0, 2.0], "1.count": 1}
    assert saved["leaves"] == [["[0]", "[1]"]]
    assert saved["rule"] == "chain(-, Ema of L2 over each leaf)"


@pytest.mark.parametrize("back", [False, True])
def test_from_one_framework_to_another(fw: Framework, rule: Any, back: bool) -> None:
    """What was saved on one framework goes on in NumPy, and the other way round, as it would have at home."""
    rule = negated(rule, fw)
    before, after = (NUMPY, fw) if back else (fw, NUMPY)
    clipper = uc.Clipper(rule)
    train(clipper, steps_of(before)[:3])
    again = loaded(json.loads(json.dumps(clipper.state_dict())), rule)
    wanted = train(clipper, steps_of(before)[3:5])
    clipped = train(again, steps_of(after)[3:5])
    same(after, clipped, wanted, like=before, rtol=1e-5)
    same(after, again.state, clipper.state, like=before, rtol=1e-5)
    assert all(after.owns(leaf) for leaf in optree.tree_leaves((clipped, again.state)))
    assert list(again.state_dict()) == list(clipper.state_dict())


def saved_by(rule: Any, grads: Any) -> dict[str, Any]:
    """Return what a clipper saves after one step."""
    clipper = uc.Clipper(rule)
    clipper(grads)
    return clipper.state_dict()


@dataclass(frozen=True)
class Doubled(Largest):
    """Another limit, whose state looks the same."""


OTHER_RULES = {
    "limit": (uc.adagc(), uc.adagn(), r"of Ema of L2 over each leaf, this one of MeanOverRms"),
    "own limit": (uc.Rule(Largest()), uc.Rule(Doubled()), r"of Largest of L2 .* this one of Doubled of L2"),
    "norm": (
        uc.autoclip(),
        uc.Rule(uc.limits.Percentile(10, 10_000), norm=uc.norms.RMS),
        r"of L2 over all leaves, this one of .* of RMS over",
    ),
    "scope": (
        uc.autoclip(),
        uc.Rule(uc.limits.Percentile(10, 10_000), scope=uc.scopes.each_leaf),
        r"over all leaves, this one of .* over each leaf",
    ),
    "axes": (
        uc.Rule(uc.limits.Ema(2, 0.9), scope=uc.scopes.axes(0)),
        uc.Rule(uc.limits.Ema(2, 0.9), scope=uc.scopes.axes(1)),
        r"axes \[0\] of each leaf, .* axes \[1\] of",
    ),
    "window": (uc.autoclip(window=3), uc.autoclip(window=4), r"Percentile\(window=3\) .* Percentile\(window=4\)"),
    "flag": (
        uc.Rule(uc.limits.Percentile(50, 3)),
        uc.Rule(uc.limits.Percentile(50, 3, filled=True)),
        r"of Percentile\(window=3, filled\) of",
    ),
    "chain": (uc.adagc(), uc.chain(uc.adagc()), r"this one of chain\(Ema of L2 over each leaf\)"),
    "order": (uc.chain(np.negative, uc.zclip()), uc.chain(uc.zclip(), np.negative), r"of chain\(-, ZScore .*, -\)"),
    "mask": (uc.autoclip(), uc.masked(uc.autoclip(), weight), r"this one of masked\(Percentile"),
    "no memory": (uc.autoclip(), uc.by_norm(1.0), r"this one of -; start over with load_state_dict\(\{\}\)"),
    "groups": (
        uc.Rule(uc.limits.PerGroup({"b": 1.0, "w": uc.limits.Ema(1.05, 0.98)}), scope=uc.scopes.groups(first_key)),
        RULES["per_group"],
        r"PerGroup\('w': Ema\) .*PerGroup\('b': Ema\)",
    ),
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_another_rule(fw: Framework, name: str) -> None:
    """The state of a rule of another kind is refused at once, and nothing is lost."""
    before, after, message = OTHER_RULES[name]
    grads = {"b": fw.array([[1.0]]), "w": fw.array([[3.0, 4.0], [1.0, 2.0]])}
    if name in {"chain", "order"}:
        before, after = (uc.chain(negative, uc.zclip()), uc.chain(uc.zclip(), negative)) if name == "order" else (
            before, after)  # fmt: skip
    saved = saved_by(before, grads)
    for clipper in (uc.Clipper(after), uc.Clipper(after)):
        own = clipper.state_dict()
        with pytest.raises(ValueError, match=r"^the saved state is that of another rule than .*" + message):
            clipper.load_state_dict(saved)
        assert clipper.state_dict() == own
        clipper(grads)


TUNED = {
    "z": (uc.zclip(z=1.0), uc.zclip(z=np.float32(2.0), decay=0.5, warmup=3)),
    "limit of another": (
        uc.chain(uc.by_norm(1.0), uc.adagc()),
        uc.chain(uc.by_value(0.0, np.asarray(2.0)), uc.adagc()),
    ),
    "function": (
        uc.by_global_norm(uc.limits.Schedule(falling)),
        uc.by_global_norm(uc.limits.Schedule(lambda step: 1.0 + step)),
    ),
    "curve": (uc.autoclip(), uc.Rule(uc.limits.Percentile(10, 10_000), curve=uc.curves.soft, nonfinite="skip")),
    "p of NumPy": (
        uc.Rule(uc.limits.Percentile(50, 3), norm=uc.Norm(3)),
        uc.Rule(uc.limits.Percentile(90, 3), norm=uc.Norm(np.float64(3.0))),
    ),
    "decay 0": (uc.adagc(), uc.norm_growth()),
    "mask": (uc.masked(uc.autoclip(), weight), uc.masked(uc.autoclip(), lambda path, leaf: True)),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_rule_that_is_tuned(name: str) -> None:
    """Other numbers and functions, and other rules without memory, leave a state what it is."""
    before, after = TUNED[name]
    grads = {"b": np.asarray([1.0]), "w": np.asarray([[3.0, 4.0]])}
    clipper = loaded(saved_by(before, grads), after)
    clipper(grads)
    assert max(int(np.max(leaf)) for leaf in optree.tree_leaves(clipper.state) if "int" in str(leaf.dtype)) == 2


LABELLED = {name: RULES[name] for name in ("adagc", "norm_growth", "adagn", "spam", "own", "per_group")} | {
    "percentile": uc.percentile_clipping(50, window=3),
    "log_zscore": uc.Rule(uc.limits.LogZScore(2.0, 0.95), scope=uc.scopes.each_leaf),
    "chain": uc.chain(uc.autoclip(), uc.adagc()),
    "masked": uc.masked(uc.adagc(), first_key),
}


@pytest.mark.parametrize("name", LABELLED)
def test_other_leaves(fw: Framework, name: str) -> None:
    """A state of as many norms of the same shapes, but of other leaves, is refused by name; and changes nothing."""
    rule = LABELLED[name]
    if name == "per_group":
        limits = {label: uc.limits.Ema(1.05, 0.98) for label in "bvw"}
        rule = uc.Rule(uc.limits.PerGroup(limits), scope=uc.scopes.groups(first_key))
    grads = {"b": fw.array([[1.0, 2.0]]), "w": fw.array([[3.0, 4.0]])}
    others = {"b": grads["b"], "v": grads["w"]}
    saved = saved_by(rule, grads)
    b, v, w = ("group 'b'", "group 'v'", "group 'w'") if name == "per_group" else (
        r"grads\['b'\]", r"grads\['v'\]", r"grads\['w'\]")  # fmt: skip
    fresh = loaded(saved, rule)
    for _ in range(2):  # trying again does not help, and does not lose what was loaded
        for act in (fresh, fresh.init):
            with pytest.raises(ValueError, match=rf"norms of {w}, which are not here, and none of {v}; give the same"):
                act(others)
        assert fresh.state is fresh.report is None
        assert fresh.state_dict() == saved
    with pytest.raises(ValueError, match=rf"holds norms of {w}, which are not here; give"):
        fresh({"b": grads["b"]})
    used = uc.Clipper(rule)
    used(others)
    own, report = used.state_dict(), used.report
    with pytest.raises(ValueError, match=rf"holds norms of {w}, which are not here, and none of {v}; give"):
        used.load_state_dict(saved)
    assert used.state_dict() == own
    assert used.report is report
    with pytest.raises(ValueError, match=rf"{v}, {w} had a gradient at one step and none at another"):
        used(grads)
    fresh(grads)  # and its own leaves go on
    renamed = {**saved, "leaves": json.loads(json.dumps(saved["leaves"]).replace("'w'", "'v'"))}
    loaded(renamed, rule)(others)
    loaded({**saved, "leaves": None}, rule)(others)
    assert b


def test_other_leaves_of_a_joint_norm(fw: Framework) -> None:
    """A rule over all leaves does not care which ones there are."""
    for rule in (uc.autoclip(), uc.chain(negative, uc.zclip()), uc.masked(uc.autoclip(), lambda path, leaf: True)):
        clipper = loaded(saved_by(rule, {"b": fw.array([1.0])}), rule)
        clipper({"b": fw.array([1.0]), "w": fw.array([[3.0, 4.0]])})
        clipper({"v": fw.array([[3.0, 4.0]])})
        assert (
            max(int(fw.numpy(leaf).max()) for leaf in optree.tree_leaves(clipper.state) if "int" in fw.dtype(leaf)) == 3
        )


def test_labels_of_absent_gradients() -> None:
    """A label that looks at an absent leaf is an error that names it."""
    clipper = uc.Clipper(uc.Rule(uc.limits.Ema(1.5, 0.9), scope=uc.scopes.groups(lambda path, leaf: leaf.ndim)))
    with pytest.raises(TypeError, match=r"\['b'\] is absent \(None\).*by its path alone"):
        clipper({"a": np.ones(2), "b": None})


def test_labels_that_differ_only_in_their_addresses() -> None:
    """Groups by such objects are in the order of the tree, wherever the objects lie."""

    class Part:
        pass

    one, two = sorted((Part(), Part()), key=id)
    grads = {"encoder": np.asarray([1.0]), "head": np.asarray([100.0])}

    def rule(encoder: Part, head: Part) -> uc.Rule:
        scope = uc.scopes.groups(lambda path, leaf: encoder if path[0] == "encoder" else head)
        return uc.Rule(uc.limits.Percentile(50, 4), scope=scope)

    saved = saved_by(rule(one, two), grads)
    clipper = loaded(saved, rule(two, one))
    clipper(grads)
    assert sorted(float(limit) for limit in clipper.report.limits.values()) == [1.0, 100.0]


def test_labels_without_addresses() -> None:
    """Groups by objects of one's own are known in another process, where these lie elsewhere."""

    class Label:
        pass

    def saved() -> Any:
        label = Label()
        return saved_by(
            uc.Rule(uc.limits.Percentile(50, 3), scope=uc.scopes.groups(lambda path, leaf: label)), [np.ones(2)]
        )

    kept, other = saved(), saved()
    assert kept["leaves"] == other["leaves"]
    assert "0x" not in str(kept)


BAD_VALUES: dict[str, tuple[str, Any, str]] = {
    "wraps": ("count", [2**40], "1099511627776 does not fit into"),
    "wraps below": ("count", [-(2**40)], "-1099511627776 does not fit into"),
    "huge": ("count", [2**70], "is made of object"),
    "negative count": ("count", [-1], "negative numbers"),
    "float for an integer": ("count", [1.5], "has to be of"),
    "bool for an integer": ("count", [True], "has to be of"),
    "NaN": ("means", [math.nan], "NaN"),
    "complex": ("means", [1j], "is made of complex128"),
    "text": ("means", ["1.0"], "is made of <U3"),
    "none": ("means", [None], "is made of object"),
    "bool for a float": ("means", [False], "has to be of"),
    "negative variance": ("variances", [-1e-9], "negative numbers"),
    "shape": ("means", 1.0, r"has shape \(\), but here it is \(1,\): load"),
    "too large": ("means", [1e39], "do not fit into"),
    "ragged": ("means", [[1.0], [1.0, 2.0]], "is made of object"),
    "missing": ("means", ..., r"the saved state has \['count', 'variances'\], .* here has \['count', 'm"),
    "too many": ("more", 1.0, r"the saved state has \['count', 'means', 'more', 'variances'\]"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_cannot_be(fw: Framework, name: str) -> None:
    """They are refused when they are loaded, or at the next step where nothing is known before; nothing changes."""
    field, value, message = BAD_VALUES[name]
    grads = {"w": fw.array([3.0, 4.0])}
    saved = saved_by(uc.zclip(), grads)
    wrong = copy.deepcopy(saved)
    wrong["state"][field] = value
    if value is ...:
        del wrong["state"][field]
    used = uc.Clipper(uc.zclip())
    used(grads)
    before, report = used.state_dict(), used.report
    with pytest.raises(ValueError, match=message):
        used.load_state_dict(wrong)
    assert used.state_dict() == before
    assert used.report is report
    with pytest.raises(ValueError, match=message):
        loaded(wrong, uc.zclip())(grads)


@dataclass(frozen=True)
class Once(uc.Limit):
    """A limit of one's own whose state holds a flag: nothing is limited before a norm above 1."""

    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Any:
        return {"seen": norms > 1, "last": norms}

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        return norms + 1, {"seen": state["seen"] | (norms > 1), "last": norms}


def test_flags(fw: Framework) -> None:
    """A state may hold booleans."""
    grads, rule = {"w": fw.array([3.0, 4.0])}, uc.Rule(Once())
    saved = saved_by(rule, grads)
    assert saved["state"] == {"last": [5.0], "seen": [True]}
    again = loaded(saved, rule)
    again.init(grads)
    assert again.state_dict() == saved
    with pytest.raises(ValueError, match=r"the saved seen cannot be restored: it is made of float64"):
        loaded({**saved, "state": {"last": [5.0], "seen": [1.0]}}, rule).init(grads)


def test_negative_norms(fw: Framework) -> None:
    """Of norms -1 may stand for none, and nothing else is below 0; means of logarithms may be."""
    grads = {"w": fw.array([3.0, 4.0])}
    for rule, field, value in (
        (uc.autoclip(window=2), "norms", [[5.0, -2.0]]),
        (uc.adagc(), "averages", [-0.5]),
        (uc.adagn(), "squares", [-1.0]),
        (uc.by_example_quantile(), "limits", [-1.0]),
        (uc.autoclip(window=None), "below", [[-1] * 19_250]),
    ):
        example = {"w": fw.array([[3.0, 4.0]])} if rule == uc.by_example_quantile() else grads
        saved = saved_by(rule, example)
        saved["state"][field] = value
        with pytest.raises(ValueError, match=rf"the saved {field} cannot be restored: it holds negative numbers"):
            loaded(saved, rule)(example)
    saved = saved_by(uc.log_zscore(), grads)
    saved["state"]["means"] = [-3.0]
    loaded(saved, uc.log_zscore())(grads)
    saved = saved_by(uc.Rule(Largest()), grads)
    saved["state"]["largest"] = [-3.0]  # what a limit of one's own holds is its own business
    loaded(saved, uc.Rule(Largest()))(grads)


def test_what_is_no_saved_state(fw: Framework) -> None:
    """Old files are refused, and the error says how to go on; so is what is no dict."""
    grads = {"b": fw.array([1.0]), "w": fw.array([[3.0, 4.0]])}
    saved = saved_by(uc.adagc(), grads)
    clipper = loaded(saved, uc.adagc())
    old = saved["state"]
    for name, value in (("leaves", 5), ("leaves", [5]), ("leaves", [[5]]), ("rule", np.ones(2)), ("rule", 5)):
        with pytest.raises(ValueError, match=r"saved state is damaged: .*load_state_dict\(\{\}\)"):
            clipper.load_state_dict({**saved, name: value})
    for wrong in (old, {**saved, "state": None}, {"leaves": [], "state": {}}):
        with pytest.raises(ValueError, match=r"does not say whose norms it holds.*load_state_dict\(\{\}\); or, if it"):
            clipper.load_state_dict(wrong)
        assert clipper.state_dict() == saved
    for wrong in (None, [1.0], "count", saved.items()):
        with pytest.raises(TypeError, match=r"^saved must be what state_dict\(\) returned, got "):
            clipper.load_state_dict(wrong)
        assert clipper.state_dict() == saved
    again = loaded({"rule": None, "leaves": None, "state": old}, uc.adagc())
    same(fw, again(grads), clipper(grads))
    assert again.state_dict() == clipper.state_dict()


def test_shapes(fw: Framework) -> None:
    """An array of another shape is refused, though it is of as many entries."""
    grads = {"b": fw.array([1.0]), "w": fw.array([[3.0, 4.0]])}
    saved = saved_by(uc.spam(), grads)
    with pytest.raises(ValueError, match=r"the saved 1.averages has shape \(1, 1, 2\), but here it is \(1, 2, 1\)"):
        loaded(saved, uc.spam())({**grads, "w": fw.array([[3.0], [4.0]])})


def test_saved_lists_are_copies(fw: Framework) -> None:
    """What is done to a saved dictionary, deep inside too, reaches no clipper; nor the other way round."""
    grads = {"w": fw.array([3.0, 4.0])}
    clipper = uc.Clipper(uc.percentile_clipping(50, window=3))
    clipper(grads)
    saved = clipper.state_dict()
    again = loaded(saved, clipper.rule)
    wanted = copy.deepcopy(saved)
    for one in (saved, again.state_dict(), clipper.state_dict()):
        one["state"]["norms"][0][0] = 7.0
        one["leaves"][0][0] = "other"
    assert again.state_dict() == clipper.state_dict() == wanted
    arrays = {**wanted, "state": {name: np.asarray(value) for name, value in wanted["state"].items()}}
    again = loaded(arrays, clipper.rule)
    arrays["state"]["norms"][...] = 7.0
    assert again.state_dict() == wanted
    again.init(grads)
    assert again.state_dict() == wanted


def test_a_state_that_was_set(fw: Framework) -> None:
    """After `init` a clipper knows whose norms a state is that is set; before it, from the first step on."""
    grads = {"w": fw.array([3.0, 4.0])}
    clipper, known, unknown = (uc.Clipper(uc.adagc()) for _ in range(3))
    clipper(grads)
    known.init(grads)
    known.state = unknown.state = clipper.state
    assert known.state_dict() == clipper.state_dict()
    assert unknown.state_dict()["leaves"] is None
    assert copy.deepcopy(unknown).state_dict() == unknown.state_dict()
    with pytest.raises(ValueError, match="had a gradient at one step"):
        known({"v": grads["w"]})
    unknown(grads)
    assert unknown.state_dict()["leaves"] == [["['w']"]]


def test_loading_in_the_middle(fw: Framework) -> None:
    """Loading forgets what was learned since, and the report; an empty dictionary is a new beginning."""
    steps = steps_of(fw)
    for name in SOME:
        clipper = uc.Clipper(RULES[name])
        train(clipper, steps[:2])
        saved = clipper.state_dict()
        wanted = train(clipper, steps[2:4])
        clipper.load_state_dict(saved)
        assert clipper.report is clipper.state is None
        same(fw, train(clipper, steps[2:4]), wanted)
        clipper.load_state_dict({})
        same(fw, train(clipper, steps), train(uc.Clipper(RULES[name]), steps))


def test_init(fw: Framework) -> None:
    """The state can be made from parameters before the first step, from what was loaded, too."""
    steps = steps_of(fw)
    params = {"b": fw.array([7.0, 7.0, 7.0]), "none": None, "w": fw.array(np.ones((3, 2)))}
    for name in SOME:
        rule = RULES[name]
        clipper = uc.Clipper(rule)
        clipper.init(params)
        same(fw, clipper.state, rule.init(steps[0]))
        assert clipper.report is None
        train(clipper, steps[:3])
        again = loaded(clipper.state_dict(), rule)
        again.init(params)
        same(fw, again.state, clipper.state)
        same(fw, train(again, steps[3:]), train(clipper, steps[3:]))


@pytest.mark.ways(*COMPILED, "tensorflow-graph")
def test_compiled_code(fw: Framework) -> None:
    """A clipper that remembers refuses code that is being compiled, and says what to use there; that works."""
    grads, rule = {"w": fw.array([3.0, 4.0])}, uc.norm_growth(1.5)
    clipper = uc.Clipper(rule)
    if fw.traced:
        clipper(grads)
        before = clipper.state
        for one in (clipper, uc.Clipper(rule)):
            with pytest.raises(
                Exception, match=r"would remember values of code .*rule\.update\(grads, state\)"
            ) as caught:
                fw.run(lambda grads: one(grads), grads)
            assert isinstance(caught.value, TypeError) or fw.name == "torch.compile"  # which wraps every error
        assert clipper.state is before
    else:
        fw.run(lambda grads: clipper(grads), grads)

    def two_steps(grads: Any) -> Any:
        clipped, state, _ = rule.update(grads, rule.init(grads))
        return clipped, rule.update({"w": 10 * clipped["w"]}, state)[0]

    first, second = fw.run(two_steps, grads)
    np.testing.assert_allclose(fw.numpy(first["w"]), [3, 4], rtol=1e-6)
    np.testing.assert_allclose(fw.numpy(second["w"]), [4.5, 6], rtol=1e-6)


@pytest.fixture
def busy() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def reading(look: Callable[[], None], work: Callable[[], None]) -> None:
    """Look again and again in a thread while the work is done in this one."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            look()

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(run)
        try:
            work()
        finally:
            done.set()
        reader.result()


def one_more(step: Any) -> Any:
    """Return the number of the step, from 1."""
    return step + 1.0


@pytest.mark.usefixtures("busy")
def test_a_thread_that_reads(fw: Framework) -> None:
    """While one thread clips, another one sees report and state of one step, and steps in order."""
    rule = uc.chain(uc.by_global_norm(uc.limits.Schedule(one_more)), uc.by_global_norm(uc.limits.Schedule(one_more)))
    clipper, seen, ones = uc.Clipper(rule), [], fw.array([1.0])
    clipper([ones])

    def look() -> None:
        seen.append((clipper.state, clipper.report, clipper.state))
        time.sleep(1e-4)

    def work() -> None:
        for step in range(2, 22):
            clipper([step * ones])

    reading(look, work)
    last = 1
    for before, report, after in seen[:: 1 + len(seen) // 50]:  # lazy arrays are computed in the thread they are of
        counts = [int(fw.numpy(one.count)) for one in (*before, *after)]
        norms, limits = ([int(fw.numpy(x)) for x in some] for some in (report.norms, report.limits))
        assert norms == limits  # the gradient of step n has the norm n, which is its limit, too
        assert last <= counts[0] == counts[1] <= norms[0] <= counts[2] == counts[3]
        last = counts[3]


@pytest.mark.usefixtures("busy")
def test_a_thread_that_saves(fw: Framework) -> None:
    """While one thread loads and clips, another one never saves a state that is lost or half one."""
    rule, ones = uc.norm_growth(), [fw.array([1.0])]
    clipper = uc.Clipper(rule)
    clipper(ones)
    saved = clipper.state_dict()

    def look() -> None:
        assert list(clipper.state_dict()) == list(saved)

    def work() -> None:
        for _ in range(20):
            clipper.load_state_dict(saved)
            if fw.family != "MLX":  # no thread but its own can compute its lazy arrays
                clipper(ones)

    reading(look, work)
