# SPDX-License-Identifier: MIT
"""Texts, arguments, and figure data of every preset, for the rule pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import uniclip as uc


class Preset(NamedTuple):
    """A phrase that completes "this rule ...", and values for the required arguments."""

    phrase: str
    arguments: tuple[Any, ...] = ()


class Example(NamedTuple):
    """A rule, a gradient to draw before and after it, and names for the rows of its leaves."""

    rule: Any
    names: tuple[str, ...] = ("leaf a", "leaf b", "leaf c")
    leaves: tuple[Any, ...] = ([2.0, -1.0, 1.5], [0.4, -0.3], [-0.6, 3.0, 0.8, -0.5])
    params: tuple[Any, ...] | None = None


def label(path: Any, _: Any) -> Any:
    """Put the first leaf of an example into one group, and the others into another."""
    return min(path[0], 1)


PRESETS = {
    "by_value": Preset("limits each element to an interval", (-1.0, 1.0)),
    "by_norm": Preset("scales each leaf by its own norm", (1.0,)),
    "by_average_norm": Preset("scales each leaf by TensorFlow 1's average norm", (1.0,)),
    "by_global_norm": Preset("scales everything by one factor: the usual choice", (1.0,)),
    "by_block_rms": Preset("scales each leaf by its root mean square", (1.0,)),
    "by_group_norm": Preset(
        "gives each group of leaves a separate limit", ({0: 1.0, 1: 1.0}, label)
    ),
    "to_global_norm": Preset("gives every gradient the same norm"),
    "agc": Preset("scales each output unit relative to its weights"),
    "cowclip": Preset("scales each embedding row relative to its weights and count", (np.ones(2),)),
    "larc": Preset("keeps each leaf's step small relative to its weights", (0.1,)),
    "autoclip": Preset("clips at a percentile of all norms so far"),
    "percentile_clipping": Preset("clips each leaf at a percentile of its last norms"),
    "zclip": Preset("scales spikes back toward the running mean"),
    "log_zscore": Preset("scales spikes of the log norm back to the mean"),
    "adagc": Preset("keeps each leaf near its running average"),
    "norm_growth": Preset("lets the norm of each leaf grow by 1% per step"),
    "skip_spikes": Preset("zeroes the gradients of steps with a spike"),
    "spam": Preset("clips elements far above their usual size"),
    "adagn": Preset("scales each leaf to a norm of about 1"),
    "by_example_norm": Preset("scales each example by its norm over all leaves", (1.0,)),
    "by_example_layer_norm": Preset("scales each leaf of each example, for one total", (1.0,)),
    "by_example_quantile": Preset("finds the limit for a fraction of the examples"),
    "auto_s": Preset("scales each example to just below the limit"),
    "psac": Preset("scales each example to about the limit, except tiny ones"),
}


def made(name: str) -> Any:
    """Return a preset with its defaults, and the arguments of `PRESETS` for the others."""
    return getattr(uc, name)(*PRESETS[name].arguments)


WEIGHTS = ([50.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [200.0, 0.0, 0.0, 0.0])
TABLE = [[0.5, 0.0, 0.0, 0.0]] * 3
LARGE = [[0.9, -1.4, -0.4, 0.5], [1.9, 1.0, -1.6, 2.2]]
BATCH, TINY = [*LARGE, [0.2, -0.3, 0.3, 0.2]], [*LARGE, [0.02, -0.03, 0.03, 0.02]]
LAYERS = [[0.9, -1.4, 0.3], [0.5, -0.3, 0.2]], [[-0.4, 0.3, 0.2], [-1.0, 2.2, 0.7]]
BODY_AND_HEAD = ("body: leaf a", "head: leaf b", "head: leaf c")
UNITS = ("unit 0\n‖w‖ = 50", "unit 1\n‖w‖ = 100", "unit 2\n‖w‖ = 200")
LEAVES = ("leaf a\n‖w‖ = 5", "leaf b\n‖w‖ = 5", "leaf c\n‖w‖ = 10")
OF_LAYERS = ("example 1\nleaf a", "example 2\nleaf a", "example 1\nleaf b", "example 2\nleaf b")
OF_BATCH = ("example 1", "example 2", "example 3")
EXAMPLES = {
    "by_average_norm": Example(uc.by_average_norm(0.5)),
    "by_global_norm": Example(uc.by_global_norm(2.0)),
    "by_group_norm": Example(uc.by_group_norm({0: 2.0, 1: 1.0}, label), BODY_AND_HEAD),
    "to_global_norm": Example(uc.to_global_norm(2.0)),
    "agc": Example(uc.agc(axis=1), UNITS, (BATCH,), (WEIGHTS,)),
    "cowclip": Example(
        uc.cowclip(np.asarray([1.0, 2.0, 4.0])),
        ("count 1", "count 2", "count 4"),
        (BATCH,),
        (TABLE,),
    ),
    "larc": Example(
        made("larc"), LEAVES, params=([5.0, 0.0, 0.0], [5.0, 0.0], [10.0, 0.0, 0.0, 0.0])
    ),
    "by_example_norm": Example(made("by_example_norm"), OF_BATCH, (BATCH,)),
    "by_example_layer_norm": Example(made("by_example_layer_norm"), OF_LAYERS, LAYERS),
    "auto_s": Example(uc.auto_s(), OF_BATCH, (TINY,)),
    "psac": Example(uc.psac(), OF_BATCH, (TINY,)),
}
"""The figures of stateless presets, if they differ from the preset on the gradient of `Example`."""
