"""What compilers are given: every function at once, with the limit as an argument, and a limit that counts steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

import uniclip as uc

VALUES = {
    "w": np.random.default_rng(0).standard_normal((4, 3)).astype("float32"),
    "b": [np.asarray([1.0, -2.0, 0.5, 3.0], "float32"), None],
}
CASES = {"above": (1.0, 0.1), "below": (1.0, 1000.0), "zero": (0.0, 1.0), "huge": (1e30, 2e29), "tiny": (1e-30, 2e-31)}
"""By what the values are multiplied, and the limit."""


def soft(xp: Any, norm: Any, limit: Any) -> Any:
    """Return the factor of a curve of one's own."""
    return limit / (limit + norm)


def some(grads: Any, limit: Any) -> dict[str, Any]:
    """Clip in the ways that differ most, for what is slow to trace."""
    clipped, norm = uc.clip_by_global_norm(grads, limit)
    return {
        "global norm": clipped,
        "norm of all": norm,
        "value": uc.clip_by_value(grads, -limit, limit),
        "average norm": uc.clip_by_average_norm(grads, limit),
        "Linf": uc.clip_by_norm(grads, limit, ord=math.inf),
        "each example": uc.clip(grads, uc.Rule(limit, scope=uc.scopes.each_example)),
    }


def everything(grads: Any, limit: Any) -> dict[str, Any]:
    """Clip in every way."""
    return {
        **some(grads, limit),
        "norm": uc.clip_by_norm(grads, limit),
        "norm along an axis": uc.clip_by_norm(grads, limit, axis=-1),
        "L1": uc.clip_by_norm(grads, limit, ord=1),
        "L3": uc.clip_by_norm(grads, limit, ord=3),
        "rms": uc.clip(grads, uc.by_block_rms(limit)),
        "unit": uc.clip(grads, uc.Rule(limit, scope=uc.scopes.unit(0))),
        "soft": uc.clip(grads, uc.Rule(limit, curve=soft)),
    }


def values(by: float = 1.0) -> dict[str, Any]:
    """Return gradients in NumPy."""
    return {"w": VALUES["w"] * np.float32(by), "b": [VALUES["b"][0] * np.float32(by), None]}


def leaves(tree: Any) -> list[Any]:
    """Return the arrays of a result in one order for all frameworks."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple, uc.Report)):
        return [leaf for part in tree for leaf in leaves(part)]
    return [] if tree is None else [tree]


def same(found: Any, wanted: Any) -> None:
    """Assert that two results are equal, but for rounding in float32."""
    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6)


class Count(NamedTuple):
    """The number of steps so far."""

    step: Any


@dataclass(frozen=True)
class Largest(uc.Limit):
    """A limit of one's own: half the largest norm so far; its state is a dict."""

    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Any:
        return {"largest": 0 * norms}

    def __call__(self, norms: Any, state: Any, context: uc.limits.Context) -> Any:
        largest = context.xp.where(norms > state["largest"], norms, state["largest"])
        return 0.5 * largest, {"largest": largest}


@dataclass(frozen=True)
class Halving(uc.Limit):
    """Allow half as much at every step."""

    first: float
    memory: ClassVar[bool] = True

    def init(self, norms: Any, context: uc.limits.Context) -> Count:
        return Count(0 * norms[0, ...])

    def __call__(self, norms: Any, state: Count, context: uc.limits.Context) -> tuple[Any, Count]:
        return self.first * 0.5**state.step, Count(state.step + 1)
