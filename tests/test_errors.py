"""Invalid calls: each is refused with a short message, before any array changes.

The message names the fault and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from kit.frameworks import Framework
from kit.rules import first_key
from kit.trees import leaves

LONGEST = 600
Tokens = tuple[str, ...]


class Unborn(uc.Limit):
    """A stateful limit without a first state."""

    stateful = True

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        """Return the norms."""
        return norms, state


def saved_by(rule: uc.Rule, grads: Any) -> dict[str, Any]:
    """Return what a clipper saves after a step."""
    clipper = uc.Clipper(rule)
    clipper(grads)
    return clipper.state_dict()


ARGUMENTS: dict[str, tuple[type[Exception], Tokens, Callable[[], Any]]] = {
    "negative limit": (ValueError, ("limit", "-1.0"), lambda: uc.by_global_norm(-1.0)),
    "limit of NaN": (ValueError, ("limit", "nan"), lambda: uc.by_norm(np.float32("nan"))),
    "limit of text": (TypeError, ("limit", "'1'"), lambda: uc.by_norm("1")),
    "no limit": (TypeError, ("limit", "None"), lambda: uc.by_norm(None)),
    "true as a limit": (TypeError, ("limit", "True"), lambda: uc.by_norm(True)),
    "complex limit": (TypeError, ("limit", "(1+2j)"), lambda: uc.by_norm(1 + 2j)),
    "complex array as a limit": (
        TypeError,
        ("limit", "complex128"),
        lambda: uc.by_norm(np.ones((), complex)),
    ),
    "list as a limit": (TypeError, ("limit", "list of 2"), lambda: uc.by_norm([1.0, 2.0])),
    "rule as a limit": (TypeError, ("limit", "uc.Limit"), lambda: uc.by_global_norm(uc.zclip())),
    "class as a limit": (TypeError, ("limit", "call the class"), lambda: uc.Rule(uc.limits.Ema)),
    "limit beyond floats": (
        ValueError,
        ("limit", "range", "1329 bits"),
        lambda: uc.by_norm(10**400),
    ),
    "fraction beyond floats": (
        ValueError,
        ("limit", "range"),
        lambda: uc.by_norm(Fraction(10**400)),
    ),
    "negative limit of a group": (
        ValueError,
        ("limit", "-1.0"),
        lambda: uc.by_group_norm({"a": -1.0}, first_key),
    ),
    "no mapping of limits": (
        TypeError,
        ("limits", "mapping"),
        lambda: uc.by_group_norm(first_key, {"a": 1.0}),
    ),
    "schedule without a function": (TypeError, ("fn", "1.0"), lambda: uc.limits.Schedule(1.0)),
    "order below 1": (ValueError, ("order", "0.5"), lambda: uc.by_norm(1.0, ord=0.5)),
    "order of NaN": (ValueError, ("order", "nan"), lambda: uc.Norm(Decimal("nan"))),
    "order of true": (TypeError, ("order", "True"), lambda: uc.Norm(True)),
    "order below 1 of agc": (ValueError, ("ord", "0.5"), lambda: uc.agc(ord=0.5)),
    "endless power": (ValueError, ("size_power", "inf"), lambda: uc.Norm(2, size_power=math.inf)),
    "power of text": (TypeError, ("size_power", "'1'"), lambda: uc.Norm(2, size_power="1")),
    "policy": (
        ValueError,
        ("nonfinite", "'propagate'", "ignore"),
        lambda: uc.by_norm(1.0, nonfinite="ignore"),
    ),
    "axis that is half": (TypeError, ("axis", "1.5"), lambda: uc.scopes.unit(1.5)),
    "axis of true": (TypeError, ("axis", "True"), lambda: uc.by_norm(1.0, axis=True)),
    "axis of text": (TypeError, ("axis", "'1'"), lambda: uc.by_norm(1.0, axis="1")),
    "label that is text": (TypeError, ("label", "function"), lambda: uc.scopes.groups("encoder")),
    "curve that was not called": (
        TypeError,
        ("curve", "Regularized(0.01)"),
        lambda: uc.Rule(1.0, curve=uc.curves.Regularized),
    ),
    "bounds turned round": (ValueError, ("min", "max", "1.0"), lambda: uc.by_value(1.0, -1.0)),
    "bound of NaN": (ValueError, ("min", "nan"), lambda: uc.by_value(math.nan, 1.0)),
    "complex bound": (TypeError, ("max", "1j"), lambda: uc.by_value(-1.0, 1j)),
    "true as a bound": (TypeError, ("min", "True"), lambda: uc.by_value(True, 1.0)),
    "bound beyond floats": (ValueError, ("max", "range"), lambda: uc.by_value(-1.0, 10**400)),
    "percentile above 100": (ValueError, ("percentile", "101"), lambda: uc.autoclip(101)),
    "share for a percentile": (ValueError, ("percentile", "95"), lambda: uc.autoclip(0.95)),
    "share for a percentile of leaves": (
        ValueError,
        ("percentile", "5"),
        lambda: uc.percentile_clipping(0.05),
    ),
    "empty window": (ValueError, ("window", "0"), lambda: uc.autoclip(10, window=0)),
    "window that is no whole number": (
        TypeError,
        ("window", "4.0"),
        lambda: uc.autoclip(window=4.0),
    ),
    "window of one": (ValueError, ("window", "1"), lambda: uc.percentile_clipping(5, window=1)),
    "decay of 1": (ValueError, ("decay", "1.0"), lambda: uc.zclip(decay=1.0)),
    "target": (
        ValueError,
        ("target", "'reciprocal'", "'median'"),
        lambda: uc.zclip(target="median"),
    ),
    "warm-up of one": (ValueError, ("warmup", "1"), lambda: uc.zclip(warmup=1)),
    "negative warm-up": (ValueError, ("warmup", "-1"), lambda: uc.adagc(warmup=-1)),
    "warm-up beyond the window": (
        ValueError,
        ("warmup", "20"),
        lambda: uc.skip_spikes(window=10, warmup=20),
    ),
    "negative factor": (ValueError, ("clip_factor", "-1.0"), lambda: uc.zclip(clip_factor=-1.0)),
    "factor without its target": (
        ValueError,
        ("clip_factor", "target="),
        lambda: uc.zclip(target="mean", clip_factor=0.7),
    ),
    "ratio that shrinks": (ValueError, ("ratio", "1.05"), lambda: uc.norm_growth(0.05)),
    "negative ratio": (ValueError, ("ratio", "-0.1"), lambda: uc.agc(-0.1)),
    "array as a ratio": (TypeError, ("ratio", "(2,)"), lambda: uc.agc(np.ones(2))),
    "negative trust": (
        ValueError,
        ("trust_coefficient", "-1.0"),
        lambda: uc.larc(0.1, trust_coefficient=-1.0),
    ),
    "start at 0": (ValueError, ("start", "0.0"), lambda: uc.by_example_quantile(start=0.0)),
    "start beyond the bounds": (
        ValueError,
        ("start", "max"),
        lambda: uc.by_example_quantile(start=2.0, max=1.0),
    ),
    "no gamma": (ValueError, ("gamma", "0.0"), lambda: uc.auto_s(gamma=0.0)),
    "rules swapped with where": (
        TypeError,
        ("where", "function"),
        lambda: uc.masked(first_key, uc.zclip()),
    ),
    "limit that forgets": (
        TypeError,
        ("stateful = True",),
        lambda: type("Own", (uc.Limit,), {"init": max}),
    ),
}
"""Arguments that no rule accepts: the error, and the words of its message."""


def of_other_leaves(grads: Any) -> Any:
    """Update a clipper with leaves that differ from those of its first step."""
    rule = uc.norm_growth()
    return rule.update(grads, rule.init(grads["a"]))


CALLS: dict[str, tuple[type[Exception], Tokens, Callable[[Any], Any]]] = {
    "rule first": (TypeError, ("uc.clip(grads, rule)",), lambda g: uc.clip(uc.by_norm(1.0), g)),
    "rule first, in place": (
        TypeError,
        ("uc.clip(grads, rule)",),
        lambda g: uc.clip_(uc.by_norm(1.0), g),
    ),
    "rule first, and sum": (
        TypeError,
        ("rule", "dict of 2"),
        lambda g: uc.clip_and_sum(uc.by_example_norm(1.0), g),
    ),
    "gradients for a rule": (
        TypeError,
        ("uc.Clipper(rule)(grads)", "dict of 2"),
        lambda g: uc.Clipper(g),
    ),
    "gradients in a chain": (
        TypeError,
        ("rule", "dict of 2"),
        lambda g: uc.chain(g, uc.by_norm(1.0)),
    ),
    "gradients for a limit": (
        TypeError,
        ("max_norm", "dict of 2"),
        lambda g: uc.clip_by_norm(g, g),
    ),
    "preset not called": (
        TypeError,
        ("uc.by_global_norm", "call it"),
        lambda g: uc.clip(g, uc.by_global_norm),
    ),
    "class not called": (TypeError, ("uc.Rule", "call it"), lambda g: uc.Clipper(uc.Rule)),
    "limit for a rule": (
        TypeError,
        ("rule", "uc.limits.ZScore"),
        lambda g: uc.clip(g, uc.limits.ZScore(2.5, 0.97)),
    ),
    "curve for a rule": (
        TypeError,
        ("rule", "uc.curves.hard"),
        lambda g: uc.clip(g, uc.curves.hard),
    ),
    "clipper for a rule": (
        TypeError,
        ("rule", "Clipper"),
        lambda g: uc.clip_(g, uc.Clipper(uc.zclip())),
    ),
    "number for a rule": (TypeError, ("uc.by_global_norm(1.0)",), lambda g: uc.clip(g, 1.0)),
    "nothing for a rule": (
        TypeError,
        ("uc.by_global_norm(1.0)", "None"),
        lambda g: uc.Clipper(None),
    ),
    "list of rules": (
        TypeError,
        ("list of 2",),
        lambda g: uc.clip(g, [uc.by_norm(1.0), uc.zclip()]),
    ),
    "text for gradients": (
        TypeError,
        ("grads",),
        lambda g: uc.clip({**g, "c": "text"}, uc.by_norm(1.0)),
    ),
    "spent iterator": (ValueError, ("iterator",), lambda g: uc.clip(iter(()), uc.by_norm(1.0))),
    "memory in a function": (
        ValueError,
        ("uc.Clipper(rule)",),
        lambda g: uc.clip(g, uc.autoclip()),
    ),
    "text for parameters": (
        TypeError,
        ("params", "'text'"),
        lambda g: uc.clip(g, uc.agc(), "text"),
    ),
    "reduction for parameters": (
        TypeError,
        ("all_reduce=",),
        lambda g: uc.clip(g, uc.by_norm(1.0), lambda x, op: x),
    ),
    "loss for parameters": (TypeError, ("loss=",), lambda g: uc.Clipper(uc.skip_spikes())(g, 0.5)),
    "missing parameter": (
        ValueError,
        ("grads['b']",),
        lambda g: uc.clip(g, uc.agc(), {"a": g["a"]}),
    ),
    "counts of another shape": (
        ValueError,
        ("counts",),
        lambda g: uc.clip(g, uc.cowclip(np.ones(9)), params=g),
    ),
    "axis named twice": (
        ValueError,
        ("grads", "twice"),
        lambda g: uc.clip_by_norm(g["b"], 1.0, axis=(1, -1)),
    ),
    "group without a limit": (
        ValueError,
        ("'a'",),
        lambda g: uc.clip(g, uc.by_group_norm({"c": 1.0}, first_key)),
    ),
    "single number by example": (
        ValueError,
        ("grads",),
        lambda g: uc.clip(np.asarray(1.0), uc.by_example_norm(1.0)),
    ),
    "other number of examples": (
        ValueError,
        ("grads['b']",),
        lambda g: uc.clip(g, uc.by_example_norm(1.0)),
    ),
    "sum that is not by example": (
        ValueError,
        ("example",),
        lambda g: uc.clip_and_sum(g, uc.by_norm(1.0)),
    ),
    "sum without a norm": (
        TypeError,
        ("by_example_norm",),
        lambda g: uc.clip_and_sum(g, uc.by_value(-1.0, 1.0)),
    ),
    "function of no array": (
        TypeError,
        ("grads['a']",),
        lambda g: uc.clip(g, lambda array: "text"),
    ),
    "no state": (TypeError, ("rule.init(grads)",), lambda g: uc.norm_growth().update(g, None)),
    "state first": (
        TypeError,
        ("rule.init(grads)",),
        lambda g: uc.zclip().update(uc.zclip().init(g), g),
    ),
    "loss of a shape": (
        TypeError,
        ("loss", "(2,)"),
        lambda g: uc.Clipper(uc.skip_spikes())(g, loss=np.ones(2)),
    ),
    "no reduction": (
        TypeError,
        ("all_reduce", "'dp'"),
        lambda g: uc.clip(g, uc.by_norm(1.0), all_reduce="dp"),
    ),
    "reduction that returns nothing": (
        TypeError,
        ("all_reduce", "return", "None"),
        lambda g: uc.clip_(g, uc.by_norm(1.0), all_reduce=lambda array, op: None),
    ),
    "reduction that returns one row for each process": (
        TypeError,
        ("all_reduce", "return", "shape"),
        lambda g: uc.clip_(g, uc.by_norm(1.0), all_reduce=lambda array, op: np.stack([array] * 2)),
    ),
    "limit without a first state": (
        TypeError,
        ("Unborn", "init(self, norms, context)"),
        lambda g: uc.Clipper(uc.Rule(Unborn()))(g),
    ),
    "integers in place": (
        TypeError,
        ("integers", "grads", "uc.clip(grads, rule)"),
        lambda g: uc.clip_([np.asarray([3, 4])], uc.by_norm(1.0)),
    ),
    "memory for a rule without": (
        ValueError,
        ("uc.by_norm(1.0) keeps no state", "{}"),
        lambda g: uc.Clipper(uc.by_norm(1.0)).load_state_dict(saved_by(uc.zclip(), g)),
    ),
    "shared, not joined": (
        ValueError,
        ("shared", "all_reduce"),
        lambda g: uc.clip(g, uc.by_norm(1.0), shared=len),
    ),
    "bounds of a shape": (
        ValueError,
        ("(5,)",),
        lambda g: uc.clip_(g, uc.by_value(np.zeros(5), np.ones(5))),
    ),
    "what is not finite": (
        FloatingPointError,
        ("grads['c']",),
        lambda g: uc.clip_({**g, "c": np.asarray([math.nan])}, uc.by_norm(1.0, nonfinite="raise")),
    ),
    "own function of another shape": (
        TypeError,
        ("grads['b']",),
        lambda g: uc.clip_(g, lambda x: x if x.ndim < 2 else None),
    ),
    "numbers that do not fit": (
        TypeError,
        ("grads['a']", "uc.clip"),
        lambda g: uc.clip_(g, lambda x: x * 1j),
    ),
}
"""Invalid calls: the error, and the words of its message."""


def require_refused(error: type[Exception], tokens: Tokens, call: Callable[[], Any]) -> None:
    """Require an error of a type, whose short message contains some words."""
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert [token for token in tokens if token not in text] == [], text
    assert 10 < len(text) < LONGEST, text[:LONGEST]
    assert text.count("0.12345") <= 1, text


def require_unchanged(
    fw: Framework, grads: Any, call: Callable[[Any], Any], error: Any, tokens: Tokens
) -> None:
    """Require an error, and unchanged gradients."""
    before = [np.array(fw.numpy(leaf)) for leaf in leaves(grads)]
    require_refused(error, tokens, lambda: call(grads))
    for old, new in zip(before, leaves(grads), strict=True):
        np.testing.assert_array_equal(old, fw.numpy(new))


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("what", ARGUMENTS)
def test_an_argument_is_refused_when_a_rule_is_made(what: str) -> None:
    """The error names the argument and its invalid value."""
    require_refused(*ARGUMENTS[what])


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("what", CALLS)
def test_a_call_is_refused(what: str) -> None:
    """The error names the remedy, and no array changes."""
    error, tokens, call = CALLS[what]
    grads = {"a": np.asarray([3.0, 4.0]), "b": np.full((3, 2), 2.0)}
    require_unchanged(Framework(), grads, call, error, tokens)


class Key(NamedTuple):
    """A key of a tree whose text contains its array."""

    value: Any


LARGE: dict[str, Callable[[Any], Any]] = {
    "limit": lambda large: uc.clip(np.ones(3), uc.by_norm(large)),
    "bound": lambda large: uc.clip_by_value(np.ones(3), large, 1.0),
    "rule": lambda large: uc.Clipper(large),
    "axis": lambda large: uc.by_norm(1.0, axis=large),
    "order": lambda large: uc.Norm(large),
    "policy": lambda large: uc.Rule(1.0, nonfinite=large),
    "label": lambda large: uc.scopes.groups(large),
    "window": lambda large: uc.autoclip(window=large),
    "state": lambda large: uc.zclip().update(np.ones(3), large),
    "saved state": lambda large: uc.Clipper(uc.zclip()).load_state_dict(large),
    "loss": lambda large: uc.Clipper(uc.skip_spikes())(np.ones(3), loss=large),
    "reduction": lambda large: uc.clip(np.ones(3), uc.by_norm(1.0), all_reduce=large),
    "what a function returns": lambda large: uc.clip(np.ones(3), lambda grad: [large]),
    "what a curve returns": lambda large: uc.clip(
        np.ones(3), uc.by_norm(1.0, curve=lambda xp, norm, limit: large)
    ),
    "key of a tree": lambda large: uc.clip({Key(large): "text"}, uc.by_norm(1.0)),
}


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("what", LARGE)
def test_no_error_prints_an_array(what: str) -> None:
    """No message contains the values of an array, whichever argument it is passed as."""
    array = np.full((7, 300), 0.12345)
    for large in (array, [array] * 3, {"a": array, "b": (array,)}, "text " * 400, [0.12345] * 500):
        with pytest.raises((TypeError, ValueError)) as caught:
            LARGE[what](large)
        assert len(str(caught.value)) < LONGEST, str(caught.value)[:LONGEST]
        assert str(caught.value).count("0.12345") <= 1


def crossing(fw: Framework) -> Any:
    """Return bounds that cross in one element."""
    return uc.by_value(fw.array([-1.0, 3.0]), fw.array([1.0, 1.0]))


ON_FRAMEWORKS: dict[str, tuple[type[Exception], Tokens, Callable[[Framework, Any], Any]]] = {
    "half for integers": (
        TypeError,
        ("whole",),
        lambda fw, g: uc.clip_by_value(fw.array([1], "int32"), -0.5, 0.5),
    ),
    "in place": (
        TypeError,
        ("grads['c']",),
        lambda fw, g: uc.clip_({"c": fw.array([1, 2], "int32"), "d": g["a"]}, uc.by_norm(0.5)),
    ),
    "no parameters": (ValueError, ("params=",), lambda fw, g: uc.clip(g, uc.larc(0.1))),
    "other parameters": (
        ValueError,
        ("grads['a']",),
        lambda fw, g: uc.clip(g, uc.agc(), {"a": g["b"], "b": g["a"]}),
    ),
    "axis": (ValueError, ("grads['a']", "1"), lambda fw, g: uc.clip(g, uc.by_norm(1.0, axis=1))),
    "array for a limit": (
        ValueError,
        ("(3,)",),
        lambda fw, g: uc.clip(g, uc.by_norm(fw.array([1.0, 2.0, 3.0]))),
    ),
    "state of other leaves": (
        ValueError,
        ("state", "other gradients"),
        lambda fw, g: of_other_leaves(g),
    ),
    "large array for a rule": (
        TypeError,
        ("rule",),
        lambda fw, g: uc.clip(g, fw.array(np.full(500, 0.12345))),
    ),
}
"""Mistakes that each framework detects in its own way."""


@pytest.mark.parametrize("what", ON_FRAMEWORKS)
def test_a_call_is_refused_on_every_framework(framework: Framework, what: str) -> None:
    """Every framework raises the same error."""
    error, tokens, call = ON_FRAMEWORKS[what]
    grads = {"a": framework.array([3.0, 4.0]), "b": framework.array(np.full((3, 2), 2.0))}
    require_unchanged(framework, grads, lambda g: call(framework, g), error, tokens)


@pytest.mark.cpu_only("bounds on an accelerator are not read")
@pytest.mark.only("numpy", "torch", "tensorflow", "jax")
def test_bounds_that_cross_in_one_entry(framework: Framework) -> None:
    """Bounds in arrays are compared where their values are readable."""
    grads = [framework.array([1.0, 2.0])]
    call = lambda g: uc.clip(g, crossing(framework))
    require_unchanged(framework, grads, call, ValueError, ("grads[0]", "min", "max"))


IN_A_TRACE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "policy": ("'skip'", lambda g: uc.clip(g, uc.by_global_norm(1.0, nonfinite="raise"))[0]),
    "clipper": ("update", lambda g: uc.Clipper(uc.zclip())(g)),
    "parameters": ("params=", lambda g: uc.clip(g, uc.agc())[0]),
}
"""Calls that need values, and which traced code refuses.

Some frameworks wrap the error in their own.
"""


@pytest.mark.parametrize("what", IN_A_TRACE)
def test_a_call_is_refused_in_compiled_code(compiler: Framework, what: str) -> None:
    """Code that needs a value, or an outside object, is refused while it is traced."""
    token, call = IN_A_TRACE[what]
    with pytest.raises(Exception, match=token):
        compiler.run(call, [compiler.array([3.0, 4.0])])


@pytest.mark.needs("numpy")
def test_functions_are_rules() -> None:
    """Any kind of function of one array is a rule."""
    for function in (abs, lambda grad: abs(grad), np.vectorize(abs).__call__):
        [clipped], _ = uc.clip([np.asarray([-2.0])], function)
        assert clipped.tolist() == [2.0]


@pytest.mark.needs("numpy")
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.asarray])
def test_whole_numbers_of_any_kind(kind: Callable[[int], Any]) -> None:
    """Axes and windows accept integers of any type, and axes may be a list or a tuple."""
    one, zero = kind(1), kind(0)
    assert uc.by_norm(1.0, axis=one) == uc.by_norm(1.0, axis=[one]) == uc.by_norm(1.0, axis=1)
    assert uc.by_norm(1.0, axis=[zero, one]) == uc.by_norm(1.0, axis=(0, 1))
    assert uc.autoclip(kind(50), window=kind(4)) == uc.autoclip(50, window=4)


@pytest.mark.needs("numpy")
def test_rules_hold_plain_numbers() -> None:
    """Rules store Python numbers, so they print and compare alike for every numeric type."""
    for one, two in (
        (uc.by_norm(Fraction(1, 2), ord=Fraction(3, 2)), uc.by_norm(0.5, ord=1.5)),
        (
            uc.zclip(np.float32(2.5), np.float64(0.5), warmup=np.int64(3)),
            uc.zclip(2.5, 0.5, warmup=3),
        ),
        (uc.by_value(np.float32(-0.5), np.uint8(5)), uc.by_value(-0.5, 5)),
        (uc.agc(Decimal("0.25"), axis=np.int64(0)), uc.agc(0.25, axis=0)),
    ):
        assert (one, repr(one)) == (two, repr(two))


MISSED: dict[str, Callable[[Any], Any]] = {
    "mask that takes none": lambda fn: uc.masked(uc.by_global_norm(1.0), fn),
    "mask that takes all": lambda fn: uc.masked(
        uc.by_global_norm(1.0), lambda path, leaf: not fn(path, leaf)
    ),
    "label": lambda fn: uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: fn(path, leaf))),
    "mask with memory that takes none, in a chain": lambda fn: uc.chain(
        uc.by_value(-9.0, 9.0), uc.masked(uc.adagc(), fn)
    ),
}


def in_head(path: Any, leaf: Any) -> bool:
    """Return whether a leaf belongs to the head."""
    return any("head" in str(key) for key in path)


@pytest.mark.only("numpy", "torch", "tensorflow", "jax", "mlx", "strict")
@pytest.mark.parametrize("name", MISSED)
def test_names_that_no_leaf_has(framework: Framework, name: str) -> None:
    """A mask or label by name is refused if no leaf has the name.

    Leaves with numbers have no names, and a mask that chooses no leaf is an error, too.
    """
    rule = MISSED[name](in_head)
    w, b = framework.array([3.0, 4.0]), framework.array([1.0])
    for tree in [[w, b], (w, [b]), *([{"body": w, "tail": b}] if "none" in name else [])]:
        with pytest.raises(
            ValueError,
            match=r"(where|label)\) returned (True|False) for all 2 leaves(.|\n)*names=model",
        ):
            rule.update(tree, rule.init(tree))
    # Another step may have the other leaves, and a single leaf needs no distinction.
    for tree in ({"body": w, "head": b}, {"body": w, "tail": None}, [w]):
        rule.update(tree, rule.init(tree))


@pytest.mark.needs("numpy")
def test_masks_that_say_the_same_of_all_leaves_by_intent() -> None:
    """One answer for all leaves is fine if it is intended.

    Constant masks do, and so may those that look at leaves, at keys of the path, or at all names.
    """
    grads = [np.asarray([3.0, 4.0]), np.asarray([1.0])]
    for where in (
        lambda path, leaf: leaf.ndim == 1,
        lambda path, leaf: leaf.shape[0] > 9,
        partial(lambda answer, path, leaf: answer, False),
        partial(lambda answer, path, leaf: answer, True),
    ):
        uc.clip(grads, uc.masked(uc.by_global_norm(1.0), where))
        uc.clip(grads, uc.Rule(1.0, scope=uc.scopes.groups(where)))
    # A constant, or a name with a shape, is no different from a name that no leaf has.
    for where in (
        lambda path, leaf: False,
        lambda path, leaf: leaf.ndim == 1 and path[-1] == "head",
    ):
        for tree in (grads, dict(zip("ab", grads, strict=True))):
            with pytest.raises(ValueError, match="returned False for all 2 leaves"):
                uc.clip(tree, uc.masked(uc.by_global_norm(1.0), where))
    uc.clip(
        {"encoder": grads},
        uc.by_group_norm({"encoder": 1.0, "decoder": 2.0}, lambda path, leaf: path[0]),
    )
    uc.clip(grads, uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0] * 0)))
    for where in (
        lambda path, leaf: "head" not in str(path),
        lambda path, leaf: "bias" not in path[-1],
    ):
        # The leaves have names, so choosing all of them is intended.
        uc.clip({"w": grads[0], "v": grads[1]}, uc.masked(uc.by_norm(1.0), where))
    with pytest.raises(TypeError, match="argument"):
        uc.clip(grads, uc.masked(uc.by_norm(1.0), lambda: True))
    rule, some = uc.masked(uc.adagc(), in_head), {"body": grads[0], "head": grads[1]}
    state = rule.update(some, rule.init(some))[1]
    # An earlier step has shown that the mask distinguishes leaves.
    rule.update({"body": grads[0], "tail": grads[1]}, state)
