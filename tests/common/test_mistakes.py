"""Mistakes: what is given for something else is named, with what to write instead, and no message prints arrays."""

from __future__ import annotations

import functools
import linecache
import math
import traceback
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import uniclip as uc
from frameworks import Framework

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
    "by_value": (uc.by_value, {"lo": -1.0, "hi": 1.0}),
    "by_norm": (uc.by_norm, {"c": 1.0, "axis": 0, "ord": 2, "curve": uc.hard, "nonfinite": "skip"}),
    "by_average_norm": (uc.by_average_norm, {"c": 1.0}),
    "by_global_norm": (uc.by_global_norm, {"c": 1.0, "ord": 1, "curve": uc.hard, "nonfinite": "zero"}),
    "by_block_rms": (uc.by_block_rms, {"c": 1.0}),
    "by_group_norm": (uc.by_group_norm, {"limits": {"a": 1.0, "b": 2.0}, "label_of": label, "ord": 2}),
    "normalized": (uc.normalized, {"c": 1.0}),
    "agc": (uc.agc, {"ratio": 0.1, "eps": 1e-3, "axis": 0, "ord": 2}),
    "cowclip": (uc.cowclip, {"counts": np.ones(4), "ratio": 1.0, "eps": 1e-5}),
    "larc": (uc.larc, {"lr": 0.1, "trust_coefficient": 0.1, "weight_decay": 0.1}),
    "autoclip": (uc.autoclip, {"percentile": 10, "window": 4}),
    "percentile": (uc.percentile, {"p": 10, "window": 4}),
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
    "by_example_norm": (uc.by_example_norm, {"c": 1.0, "curve": uc.hard}),
    "by_example_layer_norm": (uc.by_example_layer_norm, {"c": 1.0, "by_size": True}),
    "by_example_quantile": (
        uc.by_example_quantile,
        {"quantile": 0.5, "rate": 0.1, "start": 1.0, "min": 0.5, "max": 2.0},
    ),
    "auto_s": (uc.auto_s, {"c": 1.0, "gamma": 0.1}),
    "psac": (uc.psac, {"c": 1.0, "r": 0.1}),
    "chain": (uc.chain, {"rules": uc.by_norm(1.0)}),
    "masked": (uc.masked, {"rule": uc.by_norm(1.0), "where": first}),
    "Rule": (
        uc.Rule,
        {"limit": 1.0, "scope": uc.all_leaves, "norm": uc.L2, "curve": uc.hard, "nonfinite": "propagate"},
    ),
    "ByValue": (uc.ByValue, {"min": -1.0, "max": 1.0}),
    "Constant": (uc.Constant, {"value": 1.0}),
    "Schedule": (uc.Schedule, {"fn": abs}),
    "Relative": (uc.Relative, {"ratio": 1.0, "eps": 1.0, "counts": None}),
    "TrustRatio": (uc.TrustRatio, {"lr": 1.0, "trust_coefficient": 1.0, "weight_decay": 1.0}),
    "Split": (uc.Split, {"total": 1.0, "by_size": True}),
    "PerGroup": (uc.PerGroup, {"limits": {None: 1.0}}),
    "Ema": (uc.Ema, {"ratio": 1.0, "decay": 0.5, "warmup": 1, "warmup_norm": 1.0}),
    "SecondMoment": (uc.SecondMoment, {"factor": 1.0, "decay": 0.5, "warmup": 1}),
    "MeanOverRms": (uc.MeanOverRms, {"mean_decay": 0.5, "square_decay": 0.5, "eps": 1e-8}),
    "Percentile": (uc.Percentile, {"q": 10, "window": 4, "filled": True}),
    "PercentileOfAll": (uc.PercentileOfAll, {"q": 10}),
    "TrackedQuantile": (uc.TrackedQuantile, {"quantile": 0.5, "rate": 1.0, "start": 1.0}),
    "ZScore": (uc.ZScore, {"z": 1.0, "decay": 0.5, "target": "mean", "warmup": 2, "eps": 1e-8}),
    "LogZScore": (uc.LogZScore, {"z": 1.0, "decay": 0.5, "eps": 1e-8}),
    "RollingZScore": (uc.RollingZScore, {"z": 1.0, "window": 4, "warmup": 2}),
    "Norm": (uc.Norm, {"p": 2, "size_power": 0.5}),
    "Scope": (uc.Scope, {"axes": (0,), "join": None}),
    "axes": (uc.axes, {"axis": 0}),
    "unit": (uc.unit, {"axis": 0}),
    "groups": (uc.groups, {"label": label}),
    "Regularized": (uc.Regularized, {"gamma": 1.0}),
    "NonMonotonic": (uc.NonMonotonic, {"r": 1.0}),
    "Clipper": (uc.Clipper, {"rule": uc.by_norm(1.0)}),
    "clip": (uc.clip, {"grads": None, "rule": uc.by_norm(1.0), "params": None, "all_reduce": None}),
    "clip_": (uc.clip_, {"grads": None, "rule": uc.by_norm(1.0), "params": None, "all_reduce": None}),
    "call a Clipper": (uc.Clipper(uc.by_norm(1.0)), {"grads": None, "params": None, "all_reduce": None, "loss": None}),
    "clip_and_sum": (uc.clip_and_sum, {"grads": None, "rule": uc.by_example_norm(1.0), "all_reduce": None}),
    "clip_and_mean": (uc.clip_and_mean, {"grads": None, "rule": uc.by_example_norm(1.0)}),
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
    "update of by_value": (uc.by_value(1.0).update, {"grads": None, "state": None}),
    "update of a chain": (uc.chain(uc.by_norm(1.0), uc.zclip()).update, {"grads": None, "state": None}),
    "measure": (uc.by_norm(1.0).measure, {"grads": None, "state": None, "all_reduce": None, "loss": None}),
    "init": (uc.zclip().init, {"grads": None}),
    "load_state_dict": (uc.Clipper(uc.zclip()).load_state_dict, {"saved": {}}),
}
"""Public entry points, and arguments that fit; ``None`` for gradients or a state stands for some."""


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function by position where it has parameters of any number."""
    if function in {uc.chain, uc.axes}:
        return function(*arguments.values())
    return function(**arguments)


def used(made: Any, grads: Any) -> None:
    """Use what was made, so that what it was made with is looked at."""
    if isinstance(made, uc.Limit):
        scope = uc.groups(label) if isinstance(made, uc.PerGroup) else uc.each_leaf
        made = uc.Rule(made, scope=scope)
    elif isinstance(made, uc.Norm):
        made = uc.Rule(1.0, norm=made)
    elif isinstance(made, uc.Scope):
        made = uc.Rule(1.0, scope=made)
    elif isinstance(made, (uc.Regularized, uc.NonMonotonic)):
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

    def __call__(self, norms: Any, state: Any, given: Any) -> Any:
        return self.value


RETURNED: dict[str, Callable[[Any], Any]] = {
    "a function": lambda value: lambda grad: value,
    "a limit": lambda value: uc.Rule(Returns(value)),
    "a limit, as limits": lambda value: uc.Rule(Returns((value, uc.limits.NoState()))),
    "a limit, as the only one": lambda value: uc.Rule(Returns(([value], uc.limits.NoState()))),
    "a schedule": lambda value: uc.by_norm(uc.Schedule(lambda step: value)),
    "a curve": lambda value: uc.by_norm(1.0, curve=lambda xp, norm, limit: value),
    "a label": lambda value: uc.by_group_norm({"a": 1.0}, lambda path, leaf: value),
    "a choice": lambda value: uc.masked(uc.by_norm(1.0), lambda path, leaf: value),
    "axes": lambda value: uc.Rule(1.0, scope=uc.Scope(axes=lambda ndim, output_axis: value)),
}
"""What users write, by what it returns."""


def refused(act: Callable[[], Any]) -> None:
    """Do something; if it is refused, then by uniclip, and in few words."""
    try:
        act()
    except (TypeError, ValueError) as error:
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
