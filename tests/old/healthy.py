"""Healthy gradients through every rule, for debuggers that stop at the first NaN or ∞."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import uniclip as uc

_rng = np.random.default_rng(0)
PARAMS = {"w": _rng.standard_normal((4, 3)), "b": [_rng.standard_normal(4), None], "zero": np.zeros((4, 2))}
STEPS = [
    {"w": by * PARAMS["w"], "b": [by * PARAMS["b"][0], None], "zero": np.zeros((4, 2))}
    for by in (1.0, 0.5, 0.0, 100.0, 1.5, 2.0)
]
"""The gradients of some steps: usual ones, zeros, and a spike. One leaf is always zero, and so is its parameter."""

CURVES = {
    "hard": uc.curves.hard,
    "soft": uc.curves.soft,
    "smooth": uc.curves.smooth,
    "tanh": uc.curves.tanh,
    "normalize": uc.curves.normalize,
    "skip": uc.curves.reject,
}
RULES: dict[str, Any] = {
    "by_value": uc.by_value(-0.5, 0.5),
    "by_norm": uc.by_norm(1.0),
    "rows": uc.by_norm(1.0, axis=-1),
    "L1": uc.by_norm(1.0, ord=1),
    "L1.5": uc.by_global_norm(1.0, ord=1.5),
    "L3": uc.by_global_norm(1.0, ord=3),
    "Linf": uc.by_global_norm(1.0, ord=math.inf),
    "average": uc.by_average_norm(0.1),
    "global": uc.by_global_norm(1.0),
    "only measures": uc.by_global_norm(math.inf),
    "huge limit": uc.by_global_norm(1e39),
    "zero limit": uc.by_norm(0.0),
    "rms": uc.by_block_rms(0.1),
    "groups": uc.by_group_norm(
        {"w": 1.0, "b": uc.limits.Percentile(50, 3), "zero": math.inf}, lambda path, leaf: path[0]
    ),
    "entries": uc.Rule(0.5, scope=uc.scopes.each_entry),
    "normalized": uc.to_global_norm(1.0),
    "agc": uc.agc(0.01),
    "cowclip": uc.cowclip(np.ones(4)),
    "larc": uc.larc(0.1),
    "autoclip": uc.autoclip(percentile=50, window=4),
    "autoclip of all": uc.autoclip(window=None),
    "percentile": uc.percentile_clipping(50, window=3),
    "zclip": uc.zclip(warmup=2),
    "zclip, threshold": uc.zclip(warmup=2, target="threshold"),
    "log_zscore": uc.log_zscore(),
    "adagc": uc.adagc(warmup=2),
    "norm_growth": uc.norm_growth(),
    "skip_spikes": uc.skip_spikes(window=4, warmup=2),
    "spam": uc.spam(warmup=1),
    "adagn": uc.adagn(),
    "by_example_norm": uc.by_example_norm(1.0),
    "by_example_layer_norm": uc.by_example_layer_norm(1.0, by_size=True),
    "by_example_quantile": uc.by_example_quantile(),
    "auto_s": uc.auto_s(),
    "psac": uc.psac(),
    "schedule": uc.by_global_norm(uc.limits.Schedule(lambda step: 1.0 + 0.5**step)),
    "chain": uc.chain(uc.by_value(-0.5, 0.5), uc.zclip(warmup=2)),
    "masked": uc.masked(uc.by_norm(1.0), lambda path, leaf: path[0] == "w"),
    **{f"curve {name}": uc.Rule(1.0, scope=uc.scopes.each_leaf, curve=curve) for name, curve in CURVES.items()},
    **{f"policy {name}": uc.by_norm(1.0, nonfinite=name) for name in ("skip", "zero")},
}


def train(rule: Any, steps: list[Any], params: Any) -> list[Any]:
    """Take steps by a rule from its first state on; return what came of each, and the last state."""
    state, results = rule.init(params), []
    for number, grads in enumerate(steps):
        clipped, state, report = rule.update(grads, state, params, loss=2.0 - 0.1 * number)
        results.append((clipped, report, report.scalars()))
    return [*results, state]


def arrays_of(array: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of NumPy arrays as one of a framework's arrays."""
    if isinstance(tree, dict):
        return {key: arrays_of(array, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [arrays_of(array, value) for value in tree]
    return None if tree is None else array(tree)
