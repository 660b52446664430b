"""The saved form of a state: its number, the order and the names of its leaves, and states without a clipper."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import optree
import pytest

import uniclip as uc
from frameworks import EAGER, Framework
from uniclip.saved import from_dict, renamed, to_dict

pytestmark = pytest.mark.ways(*EAGER, without="Dask")  # which takes long


def after(rule: Any, *steps: Any) -> uc.Clipper:
    """Return a clipper that has taken some steps."""
    clipper = uc.Clipper(rule)
    for grads in steps:
        clipper(grads)
    return clipper


def loaded(rule: Any, saved: dict[str, Any]) -> uc.Clipper:
    """Return a clipper that goes on from a saved state."""
    clipper = uc.Clipper(rule)
    clipper.load_state_dict(saved)
    return clipper


GRADS = OrderedDict(w=np.array([3.0, 4.0]), b=np.array([1.0]))


@pytest.mark.parametrize("number", [0, 2, "1", None, True])
def test_another_format(number: Any) -> None:
    """A state of another format is refused, by its number and the version that does not know it; nothing is lost."""
    clipper = after(uc.adagc(), GRADS)
    before = clipper.state_dict()
    assert before["format"] == 1
    for load in (clipper.load_state_dict, lambda saved: from_dict(uc.adagc(), saved, GRADS)):
        with pytest.raises(ValueError, match=rf"format {number!r}, and uniclip {uc.__version__} .* format 1: load it"):
            load({**before, "format": number})
    assert clipper.state_dict() == before


def test_no_format() -> None:
    """A state without the number, of before there was one, is taken for the first."""
    saved = after(uc.adagc(), GRADS).state_dict()
    assert loaded(uc.adagc(), {name: saved[name] for name in ("rule", "leaves", "state")}).state_dict() == saved


ORDERED = {
    "adagc": uc.adagc(warmup=1),
    "percentile of each leaf": uc.Rule(uc.limits.Percentile(50, 2), scope=uc.scopes.each_leaf),  # as many as leaves
    "losses": uc.Rule(uc.limits.RollingZScore(1.0, 2, warmup=2), scope=uc.scopes.each_leaf),
    "chain": uc.chain(uc.autoclip(50, 3), uc.masked(uc.adagc(warmup=1), lambda path, leaf: True), uc.adagn()),
}


@pytest.mark.parametrize("name", ORDERED)
def test_leaves_in_another_order(fw: Framework, name: str) -> None:
    """Norms are known by the names of their leaves: a state goes on where these come in another order."""
    rule = ORDERED[name]
    steps = [OrderedDict((key, fw.array(size * GRADS[key])) for key in GRADS) for size in (1.0, 3.0, 9.0, 2.0)]
    turned = [OrderedDict(reversed(grads.items())) for grads in steps]
    one = after(rule, *steps[:2])
    other = loaded(rule, json.loads(json.dumps(one.state_dict())))
    for grads, same in zip(steps[2:], turned[2:], strict=True):
        wanted, got = one(grads, loss=1.0), other(same, loss=1.0)
        for key, array in wanted.items():
            np.testing.assert_array_equal(fw.numpy(got[key]), fw.numpy(array))


@pytest.mark.parametrize(
    "rule",
    [uc.spam(), uc.Rule(uc.limits.Ema(2.0, 0.9), scope=uc.scopes.unit(0))],
    ids=["each entry", "units"],
)
def test_an_order_that_matters(rule: Any) -> None:
    """Where a norm is no row of an array, another order is refused."""
    saved = after(rule, GRADS).state_dict()
    clipper = loaded(rule, saved)
    with pytest.raises(ValueError, match="it holds their norms in another order; give the same leaves"):
        clipper(OrderedDict(reversed(GRADS.items())))
    clipper(GRADS)


def test_renamed() -> None:
    """Other names are given by a dict, which may leave some out, or by a function."""
    saved = after(uc.chain(uc.autoclip(), uc.adagc()), GRADS).state_dict()
    before = copy.deepcopy(saved)
    assert renamed(saved, {"['w']": "['v']"}) == {**before, "leaves": [None, ["['v']", "['b']"]]}
    assert renamed(saved, lambda name: f"[0]{name}")["leaves"] == [None, ["[0]['w']", "[0]['b']"]]
    assert renamed({**saved, "leaves": None}, str.lower)["leaves"] is None
    assert renamed({}, str.lower) == {}
    assert saved == before
    with pytest.raises(ValueError, match=r"not of grads\['v'\]: it is of grads\['w'\], grads\['b'\]"):
        renamed(saved, {"['v']": "['w']"})
    with pytest.raises(ValueError, match=r"would become grads\['b'\]"):
        renamed(saved, {"['w']": "['b']"})


def test_renamed_leaves_go_on() -> None:
    """A state goes on with the leaves of its new names, in whatever order, and says how where it cannot."""
    one = after(uc.adagc(warmup=1), GRADS, GRADS)
    new = {"kernel": 5 * GRADS["w"], "bias": 2 * GRADS["b"]}
    with pytest.raises(ValueError, match=r"only their names have changed, give it the new ones by uniclip\.saved\.ren"):
        loaded(one.rule, one.state_dict())(new)
    other = loaded(one.rule, renamed(one.state_dict(), {"['w']": "['kernel']", "['b']": "['bias']"}))
    wanted, got = one(OrderedDict(w=new["kernel"], b=new["bias"])), other(new)
    np.testing.assert_array_equal(got["kernel"], wanted["w"])
    np.testing.assert_array_equal(got["bias"], wanted["b"])


@pytest.mark.parametrize("rule", [uc.zclip(), uc.adagc(), uc.spam(), uc.by_norm(1.0)], ids=repr)
def test_states_of_a_loop(fw: Framework, rule: Any) -> None:
    """What `to_dict` returns is what a clipper saves, and `from_dict` makes the state of it again."""
    grads = {"w": fw.array([3.0, 4.0]), "b": fw.array([1.0])}
    clipper = after(rule, grads, grads)
    state = clipper.state if rule.memory else rule.init(grads)
    saved = to_dict(rule, state, grads)
    assert saved == clipper.state_dict()
    again = from_dict(rule, json.loads(json.dumps(saved, allow_nan=False)), grads)
    assert optree.tree_structure(again) == optree.tree_structure(state)
    for mine, its in zip(optree.tree_leaves(again), optree.tree_leaves(state), strict=True):
        assert fw.owns(mine)
        np.testing.assert_array_equal(fw.numpy(mine), fw.numpy(its), strict=True)
    assert to_dict(rule, from_dict(rule, {}, grads), grads) == to_dict(rule, rule.init(grads), grads)


def test_mistakes_with_states_of_a_loop() -> None:
    """What is no saved state, or one of other leaves, is refused."""
    saved = after(uc.adagc(), GRADS).state_dict()
    with pytest.raises(TypeError, match="saved must be what to_dict"):
        from_dict(uc.adagc(), [saved], GRADS)
    with pytest.raises(ValueError, match=r"not here; give the same leaves, or start over with rule\.init\(grads\)"):
        from_dict(uc.adagc(), saved, {"w": GRADS["w"]})
    with pytest.raises(TypeError, match="rule must be a rule"):
        to_dict(1.0, (), GRADS)


def test_the_number_is_no_part_of_the_rule() -> None:
    """Arrays of any framework load, as they do from files of tensors."""
    saved = after(uc.adagc(), GRADS, GRADS).state_dict()
    arrays = {**saved, "state": {name: np.asarray(value) for name, value in saved["state"].items()}}
    assert loaded(uc.adagc(), arrays).state_dict() == saved


@pytest.mark.parametrize("rule", [uc.adagc(warmup=1), ORDERED["percentile of each leaf"]], ids=["adagc", "percentile"])
def test_absent_leaves(rule: Any) -> None:
    """A leaf without a gradient, such as one that is frozen, has a row in the state, and need not be in other trees."""
    steps = [{key: size * GRADS[key] for key in GRADS} for size in (1.0, 3.0, 9.0, 2.0)]
    frozen = [OrderedDict(a=None, w=grads["w"], frozen=None, b=grads["b"]) for grads in steps]
    for before, after_ in ((frozen, steps), (steps, frozen)):
        one, whole = after(rule, *before[:2]), after(rule, *steps[:2])
        other = loaded(rule, json.loads(json.dumps(one.state_dict())))
        for given, grads in zip(after_[2:], steps[2:], strict=True):
            got, wanted = other(given), whole(grads)
            np.testing.assert_array_equal(got["w"], wanted["w"])
            np.testing.assert_array_equal(got["b"], wanted["b"])
    assert after(rule, *frozen).state_dict()["leaves"] == [[None, "['w']", None, "['b']"]]
