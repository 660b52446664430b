# SPDX-License-Identifier: MIT
"""Every preset as the pages on the rules show it: a phrase, its arguments, and what its picture shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import uniclip as uc
from uniclip.presets import adaptive, examples, fixed, relative


class Example(NamedTuple):
    """A gradient before and after a rule: its leaves, and the parts that have names, in the order of the picture."""

    rule: Any
    names: tuple[str, ...] = ("leaf a", "leaf b", "leaf c")
    leaves: tuple[Any, ...] = ([2.0, -1.0, 1.5], [0.4, -0.3], [-0.6, 3.0, 0.8, -0.5])
    params: tuple[Any, ...] | None = None
    by: str = "leaves"  # or "units", the last axis, or "rows", the first one of all leaves

    def parts(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """Return the entries of each part."""
        if self.by == "leaves":
            return leaves
        flat = leaves[0].T if self.by == "units" else np.concatenate(leaves, axis=1)
        return np.split(flat.ravel(), len(self.names))


class Preset(NamedTuple):
    """A preset; without an example its picture is made from the preset itself."""

    phrase: str
    arguments: tuple[Any, ...] = ()
    example: Callable[[], Example] | None = None


def label(path: Any, leaf: Any) -> Any:  # noqa: ARG001 - the signature of a label
    """Name the group of a leaf: its first key."""
    return path[0]


def two_parts(path: Any, leaf: Any) -> Any:  # noqa: ARG001 - the signature of a label
    """Put the first leaf of an example into one group, the others into another."""
    return min(path[0], 1)


def units() -> Example:
    """Return a matrix of three units whose weights have the norms 50, 100 and 200."""
    weights = np.asarray([[50.0, 100.0, 200.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    grads = np.asarray([[1.0, -1.0, 0.4], [-0.6, 2.0, 1.1], [0.3, 0.7, -0.8], [0.8, 0.5, 0.6]])
    names = tuple(f"unit {i}\n‖w‖ = {size:g}" for i, size in enumerate(weights[0]))
    return Example(uc.agc(0.01), names, (grads,), (weights,), by="units")


def rows() -> Example:
    """Return three rows of an embedding that occur once, twice and four times in the batch."""
    table = np.asarray([[0.5, 0.0, 0.0, 0.0]] * 3)
    grads = np.asarray([[1.0, -0.6, 0.3, 0.8], [-1.0, 2.0, 0.7, 0.5], [0.4, 1.3, -2.4, 0.6]])
    names = ("count 1", "count 2", "count 4")
    return Example(uc.cowclip(np.asarray([1.0, 2.0, 4.0])), names, (grads,), (table,), by="rows")


def groups() -> Example:
    """Return a leaf of one group, and two of another."""
    rule = uc.by_group_norm({0: 2.0, 1: 1.0}, two_parts)
    return Example(rule, ("body: leaf a", "head: leaf b", "head: leaf c"))


def beside(rule: Any) -> Example:
    """Return three leaves whose parameters have the norms 5, 5 and 10."""
    params = ([5.0, 0.0, 0.0], [5.0, 0.0], [10.0, 0.0, 0.0, 0.0])
    return Example(rule, ("leaf a\n‖w‖ = 5", "leaf b\n‖w‖ = 5", "leaf c\n‖w‖ = 10"), params=params)


def batch(rule: Any, scale: float = 1.0) -> Example:
    """Return three examples with two leaves of two entries each; the third has norms of about 0.5 times ``scale``."""
    first = np.asarray([[0.9, -1.4], [1.9, 1.0], [0.2 * scale, -0.3 * scale]])
    last = np.asarray([[-0.4, 0.5], [-1.6, 2.2], [0.3 * scale, 0.2 * scale]])
    return Example(rule, ("example 1", "example 2", "example 3"), (first, last), by="rows")


def layers() -> Example:
    """Return two examples with two leaves of three entries each."""
    first, last = [[0.9, -1.4, 0.3], [0.5, -0.3, 0.2]], [[-0.4, 0.3, 0.2], [-1.0, 2.2, 0.7]]
    names = ("example 1\nleaf a", "example 1\nleaf b", "example 2\nleaf a", "example 2\nleaf b")
    return Example(uc.by_example_layer_norm(1.0), names, (first, last), by="rows")


PRESETS = {
    "by_value": Preset("limits each entry to an interval", (-1.0, 1.0)),
    "by_norm": Preset("scales each leaf by its own norm", (1.0,)),
    "by_average_norm": Preset(
        "scales each leaf by TensorFlow 1's average norm", (1.0,), lambda: Example(uc.by_average_norm(0.5))
    ),
    "by_global_norm": Preset(
        "scales everything by one factor: the usual choice", (1.0,), lambda: Example(uc.by_global_norm(2.0))
    ),
    "by_block_rms": Preset("scales each leaf by its root mean square", (1.0,)),
    "by_group_norm": Preset("gives each group of leaves a limit of its own", ({0: 1.0, 1: 1.0}, label), groups),
    "to_global_norm": Preset("gives every gradient the same norm", (), lambda: Example(uc.to_global_norm(2.0))),
    "agc": Preset("scales each output unit relative to its weights", (), units),
    "cowclip": Preset("scales each embedding row relative to its weights and count", (np.ones(2),), rows),
    "larc": Preset("keeps each leaf's step small relative to its weights", (0.1,)),
    "autoclip": Preset("clips at a percentile of all norms so far"),
    "percentile_clipping": Preset("clips each leaf at a percentile of its last norms"),
    "zclip": Preset("sets spikes back towards the running mean"),
    "log_zscore": Preset("sets spikes of the log norm back to the mean"),
    "adagc": Preset("keeps each leaf near its running average"),
    "norm_growth": Preset("lets the norm of each leaf grow by 1 % a step"),
    "skip_spikes": Preset("zeroes the gradients of steps with a spike"),
    "spam": Preset("clips entries far above their own usual size"),
    "adagn": Preset("scales each leaf to a norm of about 1"),
    "by_example_norm": Preset("scales each example by its norm over all leaves", (1.0,)),
    "by_example_layer_norm": Preset("scales each leaf of each example, for one total", (1.0,), layers),
    "by_example_quantile": Preset("finds the limit that a share of the examples is below"),
    "auto_s": Preset("scales each example to just below the limit", (), lambda: batch(uc.auto_s(), 0.1)),
    "psac": Preset("scales each example to about the limit, tiny ones stay tiny", (), lambda: batch(uc.psac(), 0.1)),
}
"""The phrases complete "this rule ..."; arguments are 1 or its like where the preset has no default."""

FAMILIES = ("fixed", "relative", "adaptive", "examples")


def made(name: str) -> Any:
    """Return a preset with its defaults, and with the arguments of `PRESETS` for what has none."""
    return getattr(uc, name)(*PRESETS[name].arguments)


def family(name: str) -> str:
    """Return the module of a preset, which is the name of its page."""
    return str(getattr(uc, name).__module__).rpartition(".")[2]


def example_of(name: str) -> Example:
    """Return what the picture of a preset without memory shows: its own example, or that of its family."""
    if make := PRESETS[name].example:
        return make()
    if family(name) == "examples":
        return batch(made(name))
    return beside(made(name)) if family(name) == "relative" else Example(made(name))


def check() -> None:
    """Compare the presets here with those of uniclip.

    Raises
    ------
    RuntimeError
        If one is missing.
    """
    if missing := {name for module in (fixed, relative, adaptive, examples) for name in module.__all__} ^ set(PRESETS):
        msg = f"PRESETS in docs/rule_presets.py and uniclip.presets differ in {sorted(missing)}"
        raise RuntimeError(msg)
