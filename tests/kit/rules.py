"""The rules that the tests run: the presets, and combinations of scope, norm, limit and curve."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np


def first_key(path: Any, leaf: Any) -> Any:
    """Return the group of a leaf: the first key of its path."""
    return path[0]


def only_w(path: Any, leaf: Any) -> bool:
    """Return whether a leaf belongs to ``w``."""
    return path[0] == "w"


def double(grad: Any) -> Any:
    """Double a gradient, as a user's function of an array may."""
    return 2 * grad


def falling(step: Any) -> Any:
    """Return a limit that decreases from step to step."""
    return 1.0 + 4.0 * 0.5**step


def half(xp: Any, norm: Any, limit: Any) -> float:
    """Return a Python number, as a user's curve may."""
    return 0.5


def root(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the square root of the factor, as a user's curve may."""
    return limit / xp.sqrt(limit * (limit + norm))


def fixed(uc: ModuleType) -> dict[str, Any]:
    """Return rules with a fixed limit."""
    return {
        "by_value": uc.by_value(-1.0, 2.0),
        "by_norm": uc.by_norm(1.0),
        "by_norm along an axis": uc.by_norm(1.0, axis=-1, ord=1),
        "by_average_norm": uc.by_average_norm(0.1),
        "by_global_norm": uc.by_global_norm(2.0),
        "by_global_norm, limit in float32": uc.by_global_norm(np.float32(2)),
        "by_global_norm, whole limit": uc.by_global_norm(2),
        "by_block_rms": uc.by_block_rms(0.5),
        "by_group_norm": uc.by_group_norm({"b": 1.0, "w": math.inf}, first_key),
        "to_global_norm": uc.to_global_norm(2.0),
        "unlimited": uc.by_global_norm(math.inf),
        "limit 0": uc.by_norm(0.0),
        "zero": uc.by_norm(1.0, nonfinite="zero"),
        "skip": uc.by_global_norm(1.0, nonfinite="skip"),
        "skip above": uc.by_global_norm(1.0, skip_above=4.0),
        "chain": uc.chain(double, uc.by_norm(4.0), uc.by_global_norm(1.0)),
        "masked": uc.masked(uc.by_global_norm(1.0), only_w),
    }


def choices(uc: ModuleType) -> dict[str, Any]:
    """Return rules that combine the four choices."""
    scopes, norms, curves = uc.scopes, uc.norms, uc.curves
    some_scopes = {
        "entries": scopes.each_entry,
        "axis 0": scopes.axes(0),
        "last axis": scopes.axes(-1),
        "unit 1": scopes.unit(1),
        "unit 0": scopes.unit(0),
        "examples": scopes.each_example,
    }
    some_norms = {
        "L1": norms.L1,
        "Linf": norms.Linf,
        "L1.5": uc.Norm(1.5),
        "L3": uc.Norm(3),
        "RMS": norms.RMS,
        "mean": norms.MEAN,
        "L2 over the size": uc.Norm(2, size_power=1),
    }
    some_curves = {
        "soft": curves.soft,
        "smooth": curves.smooth,
        "tanh": curves.tanh,
        "reject": curves.reject,
        "reject above": curves.RejectAbove(2.0),
        "normalize": curves.normalize,
        "regularized": curves.Regularized(0.1),
        "non-monotonic": curves.NonMonotonic(0.1),
        "a number": half,
        "own": root,
    }
    return {
        **{f"scope {name}": uc.Rule(0.5, scope=scope) for name, scope in some_scopes.items()},
        **{f"norm {name}": uc.Rule(0.5, norm=norm) for name, norm in some_norms.items()},
        "norm L3 of groups": uc.Rule(0.5, scope=scopes.groups(first_key), norm=uc.Norm(3)),
        **{f"curve {name}": uc.Rule(1.0, curve=curve) for name, curve in some_curves.items()},
    }


def relative(uc: ModuleType) -> dict[str, Any]:
    """Return rules that need ``params=``."""
    return {
        "agc": uc.agc(0.1, axis=-1),
        "agc along an axis": uc.agc(0.1, axis=0, ord=1),
        "agc, units": uc.agc(0.01),
        "cowclip": uc.masked(uc.cowclip(np.asarray([1.0, 2.0, 3.0])), only_w),
        "larc": uc.larc(0.1, weight_decay=0.1),
        "by_group_norm, relative": uc.by_group_norm(
            {"b": uc.limits.Relative(0.5), "w": 1.0}, first_key
        ),
    }


def examples(uc: ModuleType) -> dict[str, Any]:
    """Return rules for per-example gradients: the first axis of each leaf."""
    return {
        "by_example_norm": uc.by_example_norm(1.0),
        "by_example_layer_norm": uc.by_example_layer_norm(1.0),
        "by_example_layer_norm, by size": uc.by_example_layer_norm(1.0, by_size=True),
        "by_example_quantile": uc.by_example_quantile(min=0.05, max=2.0),
        "auto_s": uc.auto_s(),
        "psac": uc.psac(),
    }


def learning(uc: ModuleType) -> dict[str, Any]:
    """Return rules that adapt to the joint norm of all leaves."""
    return {
        "schedule": uc.by_global_norm(uc.limits.Schedule(falling)),
        "autoclip": uc.autoclip(50, window=4),
        "autoclip of all steps": uc.autoclip(50, window=None),
        "percentile_clipping": uc.percentile_clipping(50, window=3),
        "zclip": uc.zclip(z=1.0, warmup=2),
        "zclip to the mean": uc.zclip(z=1.0, warmup=2, target="mean"),
        "zclip to the threshold": uc.zclip(z=1.0, warmup=2, target="threshold"),
        "zclip, no update on a spike": uc.zclip(
            z=1.0, warmup=2, clip_factor=0.7, skip_update_on_spike=True
        ),
        # At z=1 the second step is exactly on the bound.
        "log_zscore": uc.log_zscore(z=1.2),
        "skip_spikes": uc.skip_spikes(z=1.0, window=4, warmup=2),
    }


def learning_more(uc: ModuleType) -> dict[str, Any]:
    """Return rules that adapt to many norms, and rules that contain adaptive rules."""
    return {
        "adagc": uc.adagc(warmup=2),
        "norm_growth": uc.norm_growth(),
        "spam": uc.spam(factor=2.0, decay=0.5, warmup=1),
        "adagn": uc.adagn(),
        "by_group_norm, a limit that learns": uc.by_group_norm(
            {"b": uc.limits.Ema(1.05, 0.98), "w": uc.limits.Percentile(50, 3)}, first_key
        ),
        "masked adagc": uc.masked(uc.chain(double, uc.adagc(warmup=0)), only_w),
        "chain of skip and autoclip": uc.chain(
            uc.by_global_norm(1.0, nonfinite="skip"), uc.autoclip(50, window=3)
        ),
        "chain of value and zclip": uc.chain(uc.by_value(-0.5, 0.5), uc.zclip(warmup=2)),
    }


FAMILIES = {
    family.__name__: family
    for family in (fixed, choices, relative, examples, learning, learning_more)
}
"""The rules in families; each family fits into one compiled program."""


def every_rule(uc: ModuleType) -> dict[str, Any]:
    """Return all rules by name."""
    return {name: rule for family in FAMILIES.values() for name, rule in family(uc).items()}


class Kind(NamedTuple):
    """A rule that stands for many, where each run takes long."""

    rule: Any
    loss: bool = False
    """True if the rule reads the loss."""


def kinds(uc: ModuleType) -> dict[str, Kind]:
    """Return representative rules, with limits for gradients whose global norm is about 1."""
    return {
        "by_value": Kind(uc.by_value(-0.1, 0.2)),
        "by_norm": Kind(uc.by_norm(0.3)),
        "by_global_norm": Kind(uc.by_global_norm(0.5)),
        "agc": Kind(uc.agc(0.05)),
        "autoclip": Kind(uc.autoclip(50, window=4)),
        "zclip": Kind(uc.zclip(z=1.0, warmup=2)),
        "adagc": Kind(uc.adagc(warmup=2)),
        "skip": Kind(uc.by_global_norm(0.5, nonfinite="skip")),
        "zero": Kind(uc.by_norm(0.3, nonfinite="zero")),
        "skip_spikes": Kind(uc.skip_spikes(z=1.0, window=4, warmup=2), loss=True),
        "chain": Kind(uc.chain(uc.by_value(-0.2, 0.2), uc.zclip(z=1.0, warmup=2))),
    }


SIZES = (1.0, 1.2, 0.9, 1.1, 0.8, 1.3, 100.0, 0.9, math.nan, 0.0, 0.5, 1.0)
"""The factors of twelve gradients: a spike at the 7th, NaN at the 9th, zeros at the 10th."""
LOSSES = (1.0, 1.1, 0.9, 1.0, 1.2, 0.9, 99.0, 1.0, 1.0, 1.0, 1.1, 0.9)


def params(dtype: str = "float64") -> dict[str, Any]:
    """Return parameters that every rule accepts: a vector, nothing, a matrix."""
    return {"b": np.asarray([1.0, 2.0, 3.0], dtype), "none": None, "w": np.ones((3, 2), dtype)}


def steps(dtype: str = "float64") -> list[dict[str, Any]]:
    """Return the gradients of twelve steps for these parameters."""
    rng = np.random.default_rng(3)
    draw = lambda size, shape: np.asarray(size * rng.standard_normal(shape), dtype)
    return [{"b": draw(size, 3), "none": None, "w": draw(size, (3, 2))} for size in SIZES]
