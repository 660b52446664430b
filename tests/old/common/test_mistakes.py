"""Mistakes: what is given for something else is named, with what to write instead, and no message prints arrays."""

from __future__ import annotations

import linecache
import math
import traceback
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from frameworks import EAGER, Framework

pytestmark = pytest.mark.ways(*EAGER)

LONGEST = 1000
"""How long a message may be."""
HOME = str(Path(uc.__file__).parent)


def label(path: Any, leaf: Any) -> Any:
    """Name the group of a leaf."""
    return path[0]


def first(path: Any, leaf: Any) -> bool:
    """Whether a leaf is the first one."""
    return path[0] == "a"


ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "by_value": (uc.by_value, {"min": -1.0, "max": 1.0}),
    "by_norm": (uc.by_norm, {"max_norm": 1.0, "axis": 0, "ord": 2, "curve": uc.curves.hard, "nonfinite": "skip"}),
    "by_average_norm": (uc.by_average_norm, {"max_norm": 1.0}),
    "by_global_norm": (uc.by_global_norm, {"max_norm": 1.0, "ord": 1, "curve": uc.curves.hard, "nonfinite": "zero"}),
    "by_block_rms": (uc.by_block_rms, {"max_norm": 1.0}),
    "by_group_norm": (uc.by_group_norm, {"max_norm": {"a": 1.0, "b": 2.0}, "label": label, "ord": 2}),
    "to_global_norm": (uc.to_global_norm, {"norm": 1.0}),
    "agc": (uc.agc, {"ratio": 0.1, "eps": 1e-3, "axis": 0, "ord": 2}),
    "cowclip": (uc.cowclip, {"counts": np.ones(4), "ratio": 1.0, "eps": 1e-5}),
    "larc": (uc.larc, {"lr": 0.1, "trust_coefficient": 0.1, "weight_decay": 0.1}),
    "autoclip": (uc.autoclip, {"percentile": 10, "window": 4}),
    "percentile_clipping": (uc.percentile_clipping, {"percentile": 10, "window": 4}),
    "zclip": (
        uc.zclip,
        {
            "z": 2.5,
            "decay": 0.9,
            "target": "reciprocal",
            "warmup": 2,
            "clip_factor": 0.7,
            "skip_update_on_spike": True,
        },
    ),
    "log_zscore": (uc.log_zscore, {"z": 2.0, "decay": 0.9}),
    "adagc": (uc.adagc, {"ratio": 1.1, "decay": 0.9, "warmup": 2, "warmup_norm": 1.0}),
    "norm_growth": (uc.norm_growth, {"ratio": 1.1}),
    "skip_spikes": (uc.skip_spikes, {"z": 6.0, "window": 4, "warmup": 2, "nonfinite": "skip"}),
    "spam": (uc.spam, {"factor": 10.0, "decay": 0.9, "warmup": 2}),
    "adagn": (uc.adagn, {"mean_decay": 0.5, "square_decay": 0.5}),
    "by_example_norm": (uc.by_example_norm, {"max_norm": 1.0, "curve": uc.curves.hard}),
    "by_example_layer_norm": (uc.by_example_layer_norm, {"max_norm": 1.0, "by_size": True}),
    "by_example_quantile": (
        uc.by_example_quantile,
        {"quantile": 0.5, "rate": 0.1, "start": 1.0, "min": 0.5, "max": 2.0},
    ),
    "auto_s": (uc.auto_s, {"max_norm": 1.0, "gamma": 0.1}),
    "psac": (uc.psac, {"max_norm": 1.0, "r": 0.1}),
    "chain": (uc.chain, {"rules": uc.by_norm(1.0)}),
    "masked": (uc.masked, {"rule": uc.by_norm(1.0), "where": first}),
    "Rule": (
        uc.Rule,
        {
            "limit": 1.0,
            "scope": uc.scopes.all_leaves,
            "norm": uc.norms.L2,
            "curve": uc.curves.hard,
            "nonfinite": "propagate",
        },
    ),
    "Constant": (uc.limits.Constant, {"value": 1.0}),
    "Schedule": (uc.limits.Schedule, {"fn": abs}),
    "Relative": (uc.limits.Relative, {"ratio": 1.0, "eps": 1.0, "counts": None}),
    "TrustRatio": (uc.limits.TrustRatio, {"lr": 1.0, "trust_coefficient": 1.0, "weight_decay": 1.0}),
    "Split": (uc.limits.Split, {"total": 1.0, "by_size": True}),
    "PerGroup": (uc.limits.PerGroup, {"limits": {None: 1.0}}),
    "Ema": (uc.limits.Ema, {"ratio": 1.0, "decay": 0.5, "warmup": 1, "warmup_norm": 1.0}),
    "SecondMoment": (uc.limits.SecondMoment, {"factor": 1.0, "decay": 0.5, "warmup": 1}),
    "MeanOverRms": (uc.limits.MeanOverRms, {"mean_decay": 0.5, "square_decay": 0.5, "eps": 1e-8}),
    "Percentile": (uc.limits.Percentile, {"percentile": 10, "window": 4, "filled": True}),
    "PercentileOfAll": (uc.limits.PercentileOfAll, {"percentile": 10}),
    "TrackedQuantile": (uc.limits.TrackedQuantile, {"quantile": 0.5, "rate": 1.0, "start": 1.0}),
    "ZScore": (uc.limits.ZScore, {"z": 1.0, "decay": 0.5, "target": "mean", "warmup": 2, "eps": 1e-8}),
    "LogZScore": (uc.limits.LogZScore, {"z": 1.0, "decay": 0.5, "eps": 1e-8}),
    "RollingZScore": (uc.limits.RollingZScore, {"z": 1.0, "window": 4, "warmup": 2}),
    "Norm": (uc.Norm, {"ord": 2, "size_power": 0.5}),
    "Scope": (uc.Scope, {"axes": (0,), "label": None}),
    "axes": (uc.scopes.axes, {"axis": 0}),
    "unit": (uc.scopes.unit, {"axis": 0}),
    "groups": (uc.scopes.groups, {"label": label}),
    "Regularized": (uc.curves.Regularized, {"gamma": 1.0}),
    "NonMonotonic": (uc.curves.NonMonotonic, {"r": 1.0}),
    "Clipper": (uc.Clipper, {"rule": uc.by_norm(1.0)}),
    "clip": (uc.clip, {"grads": None, "rule": uc.by_norm(1.0), "params": None, "all_reduce": None}),
    "clip_": (uc.clip_, {"grads": None, "rule": uc.by_norm(1.0), "params": None, "all_reduce": None}),
    "call a Clipper": (uc.Clipper(uc.by_norm(1.0)), {"grads": None, "params": None, "all_reduce": None, "loss": None}),
    "clip_and_sum": (uc.clip_and_sum, {"grads": None, "rule": uc.by_example_norm(1.0), "all_reduce": None}),
    "clip_by_value": (uc.clip_by_value, {"grads": None, "min": -1.0, "max": 1.0}),
    "clip_by_norm": (uc.clip_by_norm, {"grads": None, "max_norm": 1.0, "axis": 0, "ord": 2}),
    "clip_by_average_norm": (uc.clip_by_average_norm, {"grads": None, "max_norm": 1.0}),
    "clip_by_global_norm": (uc.clip_by_global_norm, {"grads": None, "max_norm": 1.0, "ord": 2, "norm": 1.0}),
    "global_norm": (uc.global_norm, {"grads": None, "ord": 2}),
    "update": (
        uc.zclip().update,
        {"grads": None, "state": None, "params": None, "all_reduce": None, "in_place": False, "loss": 1.0},
    ),
    "update of skip_spikes": (uc.skip_spikes(window=2).update, {"grads": None, "state": None, "loss": 1.0}),
    "update of by_norm": (uc.by_norm(1.0).update, {"grads": None, "state": None}),
    "update of by_value": (uc.by_value(-1.0, 1.0).update, {"grads": None, "state": None}),
    "update of a chain": (uc.chain(uc.by_norm(1.0), uc.zclip()).update, {"grads": None, "state": None}),
    "init": (uc.zclip().init, {"grads": None}),
    "load_state_dict": (uc.Clipper(uc.zclip()).load_state_dict, {"saved": {}}),
}
"""Public entry points, and arguments that fit; ``None`` for gradients or a state stands for some."""


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function by position where it has parameters of any number."""
    if function in {uc.chain, uc.scopes.axes}:
        return function(*arguments.values())
    return function(**arguments)


def used(made: Any, grads: Any) -> None:
    """Use what was made, so that what it was made with is looked at."""
    if isinstance(made, uc.Limit):
        scope = uc.scopes.groups(label) if isinstance(made, uc.limits.PerGroup) else uc.scopes.each_leaf
        made = uc.Rule(made, scope=scope)
    elif isinstance(made, uc.Norm):
        made = uc.Rule(1.0, norm=made)
    elif isinstance(made, uc.Scope):
        made = uc.Rule(1.0, scope=made)
    elif isinstance(made, (uc.curves.Regularized, uc.curves.NonMonotonic)):
        made = uc.Rule(1.0, curve=made)
    if hasattr(made, "update") and hasattr(made, "memory"):
        made = uc.Clipper(made)
    if isinstance(made, uc.Clipper):
        for _ in range(3):
            made(grads, params=grads)


def raised(error: BaseException) -> str:
    """Return the source line that raised an error, if it is one of uniclip's own."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = last.filename.startswith(HOME)
    return linecache.getline(last.filename, last.lineno or 0).strip() if own else f"{last.filename}: {last.line}"


def attempt(name: str, place: str, value: Any, grads: Any) -> None:
    """Put a value in the place of an argument; if that is refused, it is by uniclip and in few words."""
    function, arguments = ENTRIES[name]
    given = {**arguments, **({"grads": grads} if "grads" in arguments else {})}
    if "state" in given:
        given["state"] = function.__self__.init(grads)
    refused(lambda: used(call(function, {**given, place: value}), grads))


class Returns(uc.Limit):
    """A limit of one's own that returns anything."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, norms: Any, state: Any, context: Any) -> Any:
        return self.value


RETURNED: dict[str, Callable[[Any], Any]] = {
    "a function": lambda value: lambda grad: value,
    "a limit": lambda value: uc.Rule(Returns(value)),
    "a limit, as limits": lambda value: uc.Rule(Returns((value, uc.limits.NoState()))),
    "a limit, as the only one": lambda value: uc.Rule(Returns(([value], uc.limits.NoState()))),
    "a schedule": lambda value: uc.by_norm(uc.limits.Schedule(lambda step: value)),
    "a curve": lambda value: uc.by_norm(1.0, curve=lambda xp, norm, limit: value),
    "a label": lambda value: uc.by_group_norm({"a": 1.0}, lambda path, leaf: value),
    "a choice": lambda value: uc.masked(uc.by_norm(1.0), lambda path, leaf: value),
    "axes": lambda value: uc.Rule(1.0, scope=uc.Scope(axes=lambda ndim, output_axis: value)),
}
"""What users write, by what it returns."""


def refused(act: Callable[[], Any]) -> None:
    """Do something; if it is refused, then by uniclip, and in few words."""
    error = None
    try:
        act()
    except (TypeError, ValueError) as caught:
        error = caught
    if error is not None:
        message = str(error)
        assert len(message) < LONGEST, message[:LONGEST]
        assert message.count("0.12345") <= 1, message
        assert raised(error).startswith("raise"), (type(error), message, raised(error))


def large_values(fw: Framework) -> list[Any]:
    """Return what is too large to be printed."""
    large = fw.array(np.full((7, 300), 0.12345))
    return [large, [large] * 3, {"a": large, "b": (large,)}, "text " * 400, [0.12345] * 500]


def some(fw: Framework) -> Any:
    """Return gradients."""
    return {"a": fw.array(np.ones((4, 3))), "b": fw.array(np.full((4, 2), 2.0))}


@pytest.mark.parametrize("what", RETURNED)
def test_no_message_prints_what_functions_return(fw: Framework, what: str) -> None:
    """What a user's function, limit, curve or label returns is refused in few words, too."""
    grads = some(fw)
    for value in [*large_values(fw), None, object()]:
        refused(lambda: used(RETURNED[what](value), grads))


@pytest.mark.parametrize("name", ENTRIES)
def test_no_message_prints_arrays(fw: Framework, name: str) -> None:
    """Large arrays in the place of any argument: taken where they can be meant, else refused by us, in few words."""
    for place in ENTRIES[name][1]:
        for value in large_values(fw):
            attempt(name, place, value, some(fw))


SWAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "clip": (lambda g: uc.clip(uc.by_norm(1.0), g), r"grads and rule are swapped.*write uc\.clip\(grads, rule\)"),
    "clip_": (lambda g: uc.clip_(uc.by_norm(1.0), g), r"swapped.*write uc\.clip_\(grads, rule\)"),
    "clip by a function": (lambda g: uc.clip(np.sign, g), r"gradients are clipped by uc\.clip\(grads, rule\)"),
    "clip_and_sum": (lambda g: uc.clip_and_sum(uc.by_example_norm(1.0), g), r"write uc\.clip_and_sum\(grads, rule\)"),
    "clip_by_norm": (lambda g: uc.clip_by_norm(1.0, g), r"first argument is 1\.0: write uc\.clip_by_norm\(grads, max"),
    "clip_by_average_norm": (
        lambda g: uc.clip_by_average_norm(1, g),
        r"write uc\.clip_by_average_norm\(grads, max_norm",
    ),
    "clip_by_global_norm": (
        lambda g: uc.clip_by_global_norm(1.0, g),
        r"write uc\.clip_by_global_norm\(grads, max_norm",
    ),
    "clip_by_value": (lambda g: uc.clip_by_value(-1, 1, g), r"write uc\.clip_by_value\(grads, min, max\)"),
    "one array": (lambda g: uc.clip_by_norm(1.0, g["a"]), r"the gradients come first, but the first argument is 1\.0"),
    "Clipper": (uc.Clipper, r"got a dict of 2 arrays; gradients are clipped by .*uc\.Clipper\(rule\)\(grads\)"),
    "chain": (lambda g: uc.chain(g, uc.by_norm(1.0)), "rule must be a rule.*got a dict of 2 arrays"),
    "update": (
        lambda g: uc.zclip().update(uc.zclip().init(g), g),
        r"a Moments of 3 arrays: write rule\.update\(grads, st",
    ),
    "update without memory": (
        lambda g: uc.by_norm(1.0).update(uc.by_norm(1.0).init(g), g),
        r"grads must be gradients, got an empty NoState: write rule\.update\(grads, state\)",
    ),
    "update by value": (
        lambda g: uc.by_value(-1.0, 1.0).update(uc.by_value(-1.0, 1.0).init(g), g),
        r"write rule\.update\(grads, st",
    ),
    "update of a chain": (
        lambda g: uc.chain(uc.zclip(), uc.by_norm(1.0)).update(uc.chain(uc.zclip(), uc.by_norm(1.0)).init(g), g),
        "state must be what init returned, a tuple of 2 states, got a dict of 2 arrays",
    ),
    "update of a mask": (
        lambda g: uc.masked(uc.zclip(), first).update(uc.masked(uc.zclip(), first).init(g), g),
        r"write rule\.update\(grads, state\)",
    ),
    "a Clipper's step": (lambda g: uc.Clipper(uc.zclip())(uc.zclip()), "grads must be gradients, got uc.Rule"),
    "masked": (
        lambda g: uc.masked(first, uc.zclip()),
        r"where must be a function of .*, got uc\.Rule\(",
    ),
    "by_group_norm": (lambda g: uc.by_group_norm(label, {"a": 1.0}), "limits must be a mapping.*got label"),
}
"""Arguments in the wrong order."""


@pytest.mark.parametrize("what", SWAPPED)
def test_swapped_arguments_are_named(fw: Framework, what: str) -> None:
    """Arguments in the wrong order are named, with the right one; nothing is clipped, or taken for gradients."""
    act, message = SWAPPED[what]
    with pytest.raises(TypeError, match=message):
        act(some(fw))


NO_RULES: dict[str, tuple[Any, str]] = {
    "a preset": (uc.by_global_norm, r"and uc\.by_global_norm makes one: call it"),
    "a preset that reads parameters": (uc.agc, r"and uc\.agc makes one: call it"),
    "the class of rules": (uc.Rule, r"and uc\.Rule makes one: call it"),
    "a function that combines": (uc.masked, r"and uc\.masked makes one: call it"),
    "a limit": (
        uc.limits.ZScore(2.5, 0.97),
        r"a limit is only one of its choices: uc\.Rule\(limit\), got uc\.limits\.ZScore\(2\.5, 0\.97\)",
    ),
    "the class of a limit": (uc.limits.Percentile, r"uc\.Rule\(limit\), got the class uc\.limits\.Percentile"),
    "a curve": (
        uc.curves.hard,
        r"a curve is only one of its choices: .*curve=curve\), got uc\.curves\.hard",
    ),
    "a curve with a number": (uc.curves.Regularized(0.1), r"curve=curve\), got uc\.curves\.Regularized\(0\.1\)"),
    "a scope": (uc.scopes.each_leaf, r"uc\.Rule\(1\.0, scope=scope\), got uc\.scopes\.each_leaf"),
    "a scope's function": (uc.scopes.unit, r"uc\.Rule\(1\.0, scope=scope\), got uc\.scopes\.unit"),
    "a norm": (uc.norms.L2, r"uc\.Rule\(1\.0, norm=norm\), got uc\.norms\.L2"),
    "a clipper": (uc.Clipper(uc.zclip()), r"a uc\.Clipper has one, clipper\.rule.*got a uniclip\.clipper\.Clipper"),
    "a function of all gradients": (
        uc.clip_by_norm,
        r"uc\.clip_by_norm is a function of all gradients: give it a rule such",
    ),
    "a module": (
        uc.presets,
        r"such as uc\.by_global_norm\(1\.0\), or a function of one array, got the module uniclip\.pres",
    ),
    "a text": ("by_norm", r"such as uc\.by_global_norm\(1\.0\), or a function of one array, got 'by_norm'"),
    "a number": (1.0, r"such as uc\.by_global_norm\(1\.0\).*got 1\.0"),
    "nothing": (None, r"such as uc\.by_global_norm\(1\.0\).*got None"),
    "rules in a list": ([uc.by_norm(1.0), uc.zclip()], "got a list of 2 values"),
}
"""What is given for a rule."""


@pytest.mark.parametrize("what", NO_RULES)
def test_what_is_no_rule_says_what_to_write(what: str) -> None:
    """The same words wherever a rule is wanted."""
    value, message = NO_RULES[what]
    grads = [np.ones(2)]
    for act in (
        lambda: uc.clip(grads, value),
        lambda: uc.clip_(grads, value),
        lambda: uc.Clipper(value),
        lambda: uc.chain(uc.by_norm(1.0), value),
        lambda: uc.masked(value, first),
    ):
        with pytest.raises(TypeError, match=f"^rule must be a rule, .*{message}"):
            act()


def test_functions_are_rules_still(fw: Framework) -> None:
    """A function of one array is one, whatever kind of function."""
    for function in (abs, lambda grad: abs(grad), np.vectorize(abs).__call__ if fw.family == "NumPy" else abs):
        [clipped], _ = uc.clip([fw.array([-2.0])], function)
        assert fw.numpy(clipped).item() == 2.0


def numbers(fw: Framework) -> list[Any]:
    """Return one and a half in all the ways of saying it."""
    kinds = [1.5, Fraction(3, 2), Decimal("1.5"), np.float16(1.5), np.float32(1.5), np.float64(1.5), np.asarray(1.5)]
    return [*kinds, fw.array(1.5)]


def test_numbers_of_any_kind(fw: Framework) -> None:
    """Orders, limits, bounds and decays are numbers of any kind, and 0-d arrays; the results are the same."""
    grads = [fw.array([[3.0, 4.0], [0.3, 0.4]])]
    wanted = [fw.numpy(clipped[0]) for clipped in used_as(1.5, grads)]
    for value in numbers(fw):
        for clipped, expected in zip(used_as(value, grads), wanted, strict=True):
            np.testing.assert_allclose(fw.numpy(clipped[0]), expected, rtol=1e-6, err_msg=repr(value))


def used_as(value: Any, grads: Any) -> list[Any]:
    """Return gradients clipped with a number in several places."""
    return [
        uc.clip_by_global_norm(grads, value)[0],
        uc.clip_by_norm(grads, 1.0, ord=value),
        uc.clip(grads, uc.by_norm(value))[0],
        uc.clip_by_value(grads, -1.0, value),
        uc.clip_by_value(grads, -value, value),
        uc.Clipper(uc.zclip(value, warmup=2))(grads),
        uc.Clipper(uc.Rule(uc.limits.Ema(value, 0.5)))(grads),
        uc.clip(grads, uc.auto_s(gamma=value))[0],
    ]


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.int32, np.asarray])
def test_whole_numbers_of_any_kind(fw: Framework, kind: Any) -> None:
    """Axes and windows are whole numbers of any kind; a list of axes is as good as a tuple."""
    grads = fw.array([[3.0, 4.0], [0.3, 0.4]])
    one, zero = kind(1), kind(0)
    wanted = fw.numpy(uc.clip_by_norm(grads, 1.0, axis=1))
    for rule in (
        uc.by_norm(1.0, axis=one),
        uc.by_norm(1.0, axis=[one]),
        uc.by_norm(1.0, axis=(one,)),
        uc.Rule(1.0, scope=uc.scopes.axes(one)),
        uc.Rule(1.0, scope=uc.Scope(axes=[one])),
        uc.Rule(1.0, scope=uc.scopes.unit(zero)),
        uc.Rule(1.0, scope=uc.Scope(axes=lambda ndim, output_axis: [one])),
    ):
        np.testing.assert_array_equal(fw.numpy(uc.clip(grads, rule)[0]), wanted)
    assert uc.by_norm(1.0, axis=one) == uc.by_norm(1.0, axis=1)
    assert repr(uc.by_norm(1.0, axis=[zero, one])) == repr(uc.by_norm(1.0, axis=(0, 1)))
    assert uc.autoclip(kind(50), window=kind(4)) == uc.autoclip(50, window=4)
    assert repr(uc.skip_spikes(window=kind(8))) == repr(uc.skip_spikes(window=8))


def test_rules_hold_plain_numbers() -> None:
    """Whatever kind of number a rule is made with, it prints, compares and is saved as if with Python's own."""
    for one, two in (
        (uc.by_norm(Fraction(1, 2), ord=Fraction(3, 2)), uc.by_norm(0.5, ord=1.5)),
        (uc.zclip(np.float32(2.5), np.float64(0.5), warmup=np.int64(3)), uc.zclip(2.5, 0.5, warmup=3)),
        (uc.by_value(np.float32(-0.5), np.float32(0.5)), uc.by_value(-0.5, 0.5)),
        (uc.by_value(np.uint8(2), np.uint8(5)), uc.by_value(2, 5)),
        (uc.agc(Decimal("0.25"), axis=np.int64(0)), uc.agc(0.25, axis=0)),
    ):
        assert one == two
        assert repr(one) == repr(two)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: uc.by_norm(1 + 2j), TypeError, r"limit, must be a number or a 0-d array.*got \(1\+2j\)"),
    (lambda: uc.by_norm(np.complex64(1)), TypeError, "limit, must be a number"),
    (lambda: uc.by_norm(np.ones((), complex)), TypeError, "limit, must be .*dtype complex128"),
    (lambda: uc.clip_by_norm(np.ones(2), np.ones((), complex)), TypeError, "max_norm must be .*dtype complex128"),
    (lambda: uc.by_norm("1"), TypeError, "limit, must be .*got '1'"),
    (lambda: uc.by_norm(None), TypeError, "limit, must be .*got None"),
    (lambda: uc.by_norm(True), TypeError, "limit, must be .*got True"),
    (lambda: uc.by_norm(np.bool_(True)), TypeError, "limit, must be "),
    (lambda: uc.by_norm([1.0, 2.0]), TypeError, "limit, must be .*got a list of 2 numbers"),
    (
        lambda: uc.by_norm(10**400),
        ValueError,
        "limit, must be within the range of a float .*a whole number of 1329 bits",
    ),
    (lambda: uc.by_norm(Fraction(10**400)), ValueError, "limit, must be within the range of a float"),
    (lambda: uc.by_norm(np.float32("nan")), ValueError, "limit, must be 0 or more.*got nan"),
    (lambda: uc.clip(np.ones(2), uc.by_norm(np.ones(2))), ValueError, r"a limit of shape \(2,\).*give one number"),
    (lambda: uc.agc(np.ones(2)), TypeError, r"ratio must be a number or a 0-d array, got .*shape \(2,\)"),
    (lambda: uc.by_value(1j, 1.0), TypeError, "min must be a number or an array of real numbers"),
    (lambda: uc.by_value(np.ones(2, complex), 1.0), TypeError, "min must be .*dtype complex128"),
    (lambda: uc.by_value(-1.0, 1j), TypeError, "max must be .*got 1j"),
    (lambda: uc.by_value(True, 1.0), TypeError, "min must be .*got True"),
    (lambda: uc.by_value(-1.0, 10**400), ValueError, "max must be within the range of a float"),
    (lambda: uc.by_norm(1.0, axis=True), TypeError, "axis must be a whole number, got True"),
    (lambda: uc.by_norm(1.0, axis=np.bool_(True)), TypeError, "axis must be a whole number"),
    (lambda: uc.by_norm(1.0, axis=1.0), TypeError, r"axis must be a whole number or a tuple of them, got 1\.0"),
    (lambda: uc.by_norm(1.0, axis="1"), TypeError, "axis must be a whole number"),
    (lambda: uc.scopes.unit(1.5), TypeError, "axis must be a whole number, got 1.5"),
    (lambda: uc.clip_by_norm(np.ones((2, 2)), 1.0, axis=(0, 0)), ValueError, r"axes \(0, 0\) name one axis twice"),
    (
        lambda: uc.clip_by_norm(np.ones((2, 2)), 1.0, axis=(1, -1)),
        ValueError,
        r"grads of shape \(2, 2\): axes \(1, -1\)",
    ),
    (lambda: uc.scopes.groups("encoder"), TypeError, "label must be a function"),
    (lambda: uc.Scope(label=1), TypeError, "label must be a function"),
    (lambda: uc.Norm(2, size_power=math.nan), ValueError, "size_power must be finite, got nan"),
    (lambda: uc.Norm(2, size_power=math.inf), ValueError, "size_power must be finite, got inf"),
    (lambda: uc.Norm(2, size_power="1"), TypeError, "size_power must be a number, got '1'"),
    (lambda: uc.Norm(True), TypeError, "order of a norm, must be a number"),
    (lambda: uc.Norm(2 + 0j), TypeError, "order of a norm, must be a number"),
    (lambda: uc.Norm(np.ones(2)), TypeError, r"order of a norm, must be .*shape \(2,\)"),
    (lambda: uc.Norm(Decimal("nan")), ValueError, "order of a norm, must be .*got nan"),
    (lambda: uc.autoclip(window=4.0), TypeError, r"window must be a whole number, got 4\.0"),
    (lambda: uc.autoclip(window=True), TypeError, "window must be a whole number, got True"),
    (lambda: uc.by_norm(1.0, nonfinite=None), ValueError, "nonfinite must be one of 'propagate', .*got None"),
    (
        lambda: uc.clip(np.ones(2), uc.by_norm(1.0), None, "dp"),
        TypeError,
        r"all_reduce must be a function of \(array, op\) for gradients of this library, got 'dp'",
    ),
    (lambda: uc.clip(np.ones(2), uc.by_norm(1.0), None, 2), TypeError, "all_reduce must be .*a process group, .*got 2"),
    (lambda: uc.clip(np.ones(2), uc.by_norm(1.0), shared=len), ValueError, "shared .*give all_reduce, too"),
    (lambda: uc.clip(np.ones(2), uc.by_norm(1.0), lambda x, op: x), TypeError, r"params must be .*write all_reduce=\)"),
    (lambda: uc.clip_(np.ones(2), uc.by_norm(1.0), sum), TypeError, r"params must be .*write all_reduce=\)"),
    (lambda: uc.Clipper(uc.skip_spikes())(np.ones(2), 0.5), TypeError, r"params must be .*write loss=\), got 0\.5"),
    (lambda: uc.clip(np.ones(2), uc.by_norm(1.0), "params"), TypeError, "params must be a tree .*got 'params'"),
    (lambda: uc.Rule(1.0, curve=uc.curves.Regularized), TypeError, r"curve must be .*uc\.curves\.Regularized\(0\.01\)"),
    (lambda: uc.Clipper(uc.zclip())(np.ones(2), loss=np.ones(2)), TypeError, r"loss must be one number.*shape \(2,\)"),
    (lambda: uc.zclip().update(np.ones(2), [1.0]), TypeError, r"state must be what rule\.init\(grads\) returns"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number: int) -> None:
    """What makes no sense is refused by the name of the argument and its value, in an error of uniclip's."""
    act, error, message = REFUSED[number]
    with pytest.raises(error, match=message) as found:
        act()
    assert raised(found.value).startswith("raise")


def test_bounds_that_are_nan(fw: Framework) -> None:
    """NaN among bounds, and bounds that cross in one entry, are refused where they can be read."""
    grads, low, high = fw.array([1.0, 2.0, 3.0]), fw.array([-1.0, math.nan, -1.0]), fw.array([1.0, -2.0, 1.0])
    if fw.raises:
        for rule in (uc.by_value(low, 1.0), uc.by_value(-1.0, -low), uc.by_value(-1.0, high)):
            with pytest.raises(ValueError, match=r"grads: min must not be above max, and neither NaN: got min="):
                uc.clip(grads, rule)


def test_whole_numbers_beyond_64_bits(fw: Framework) -> None:
    """They are limits as floats are."""
    for rule in (uc.by_norm(10**30, curve=uc.curves.smooth), uc.by_value(-(10**19), 10**19)):
        np.testing.assert_array_equal(fw.numpy(uc.clip(fw.array([3.0, 4.0]), rule)[0]), [3.0, 4.0])


def test_no_message_prints_keys_that_hold_arrays() -> None:
    """A key that is an array, or prints as one, is shown in a few words."""

    class Key:
        def __repr__(self) -> str:
            return "7.0, " * 10_000

    with pytest.raises(TypeError, match=r"^grads\[a .*Key\] is a ") as found:
        uc.clip({Key(): "text"}, uc.by_norm(1.0))
    assert len(str(found.value)) < 600
