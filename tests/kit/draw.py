"""Random rules, trees and values for the fuzz.

Each rule is created by a package, passed as ``uc``, and described as plain data for the oracle. The
same case can thus be created with another version of the package.
"""
# ruff: noqa: C901, PLR0911 - a choice among many returns many

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from kit.oracle import BITS, Path, Plan, Scope
from kit.trees import walk

Rng: TypeAlias = np.random.Generator
Made: TypeAlias = tuple[Any, Plan]
LOGS = {
    "float16": (-24, 15), "bfloat16": (-133, 127), "float32": (-149, 127), "complex64": (-149, 126),
    "float64": (-1074, 1023), "complex128": (-1074, 1022), "int32": (0, 9), "int64": (0, 9),
}  # fmt: skip
"""The range of exponents (powers of two) for the elements of each dtype."""


@dataclass(frozen=True)
class Slot:
    """The place of a gradient in a tree, with its shape, dtype and memory layout."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    layout: str = "C"


@dataclass
class Case:
    """A rule, the tree of its gradients, and the values for each step."""

    rule: Any
    plan: Plan
    tree: Any
    """Containers, with a `Slot` for each gradient and ``None`` for an absent one."""
    slots: list[Slot]
    way: str = "plain"
    steps: list[list[np.ndarray | None]] = field(default_factory=list)
    """The values of each slot at each step, ``None`` where a gradient is absent."""
    params: list[np.ndarray] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    twice: tuple[int, int] | None = None
    """Two slots that share one array."""
    boxed: bool = False
    """True if the limit is an array, in single precision."""
    tie: float | None = None
    """The rank of the norm of the first step that becomes the limit, as a share of all norms."""
    saved: int | None = None
    """The step before which the state is saved and loaded."""
    aside: Case | None = None
    """Gradients of other shapes that the same rule clips between these steps."""
    processes: list[int] = field(default_factory=list)
    """The process of each slot: -1 for a replica in each, -2 for a shard in each."""

    def __str__(self) -> str:
        return f"{self.way} {self.rule!r} of {self.tree!r} in {len(self.steps)} steps"


def chance(rng: Rng, share: float) -> bool:
    """Return True with a probability of ``share``."""
    return bool(rng.random() < share)


def one_of(rng: Rng, *choices: Any) -> Any:
    """Return one of the choices."""
    return choices[rng.integers(len(choices))]


def logarithmic(rng: Rng, low: float, high: float) -> float:
    """Return a number between two bounds, log-uniformly distributed."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


class OfPath:
    """A named function of the path of a leaf.

    It may label all leaves alike, which a Python function must not.
    """

    def __init__(self, function: Callable[[Path], Any]) -> None:
        self.function, self.__qualname__ = function, function.__name__

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Return the label of a leaf, or whether it is chosen."""
        return self.function(path)

    def __repr__(self) -> str:
        """Return the name of the function."""
        return self.__qualname__


@OfPath
def by_depth(path: Path) -> int:
    """Return the parity of the depth of a leaf as its label."""
    return len(path) % 2


@OfPath
def by_first(path: Path) -> str:
    """Return the first key of a leaf as its label."""
    return str(path[0]) if path else "the only one"


@OfPath
def by_last(path: Path) -> bool:
    """Return whether a leaf is chosen, by its last key."""
    return str(path[-1:]) < "(1"


# Rules.

POLICIES = ("propagate", "propagate", "skip", "zero", "raise")
CURVES = ("hard", "soft", "smooth", "tanh", "normalize", "reject", "root")


def curve_of(uc: ModuleType, name: Any) -> Any:
    """Return a curve by its name, or by a pair of name and parameter."""
    if isinstance(name, tuple):
        curves = uc.curves
        made = {
            "regularized": curves.Regularized,
            "other": curves.NonMonotonic,
            "reject above": curves.RejectAbove,
        }
        return made[name[0]](name[1])
    if name == "root":
        return lambda xp, norm, limit: xp.sqrt(uc.curves.hard(xp, norm, limit))
    return getattr(uc.curves, name)


def drawn_scope(uc: ModuleType, rng: Rng) -> tuple[Any, Scope]:
    """Return a random scope."""
    axes = one_of(rng, (0,), (-1,), (0, -1), (1,))
    axis = one_of(rng, None, 0, -1)
    label = one_of(rng, by_depth, by_first)
    scopes = uc.scopes
    return one_of(
        rng,
        *[(scopes.all_leaves, Scope("all"))] * 3,
        *[(scopes.each_leaf, Scope("leaf"))] * 3,
        (scopes.each_entry, Scope("entry")),
        *[(scopes.axes(*axes), Scope("axes", axes=axes))] * 2,
        (scopes.unit(axis), Scope("unit", axis=axis)),
        (scopes.each_row, Scope("row")),
        (scopes.each_example, Scope("example")),
        (scopes.groups(label), Scope("groups", label=label)),
    )


def drawn_limit(rng: Rng, size: float) -> float:
    """Return a constant limit for norms of about a size."""
    if chance(rng, 0.25):
        return one_of(
            rng,
            0.0,
            0,
            math.inf,
            1e39,
            1e-50,
            1e300,
            1e-30,
            1e30,
            1.0,
            1,
            3.4028234663852886e38,
            5.0,
        )
    return min(size * logarithmic(rng, 1e-3, 1e3), 1e308)


def drawn_curve(rng: Rng) -> Any:
    """Return the name of a curve."""
    if chance(rng, 0.15):
        return one_of(rng, "regularized", "other", "reject above"), logarithmic(rng, 1e-3, 10)
    return "hard" if chance(rng, 0.4) else one_of(rng, *CURVES)


def drawn_rule(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a stateless rule of four random choices."""
    scope, own_scope = drawn_scope(uc, rng)
    p, power = one_of(rng, 1, 1.5, 2, 2, 2, 3, math.inf), one_of(rng, 0, 0, 0, 0.5, 1)
    name, policy, limit = drawn_curve(rng), one_of(rng, *POLICIES), drawn_limit(rng, size)
    rule = uc.Rule(
        limit, scope=scope, norm=uc.Norm(p, power), curve=curve_of(uc, name), nonfinite=policy
    )
    return rule, Plan("rule", own_scope, p, power, ("constant", float(limit)), name, policy)


def drawn_fixed(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a preset with a fixed limit."""
    c, policy = drawn_limit(rng, size), one_of(rng, *POLICIES)
    limit, more = ("constant", float(c)), {"nonfinite": policy}
    order, axis = one_of(rng, 1, 1.5, 2, 2, 3, math.inf), one_of(rng, 0, -1, (0, 1))
    label = one_of(rng, by_depth, by_first)
    curve = one_of(rng, "hard", "soft", "smooth", "tanh")
    axes = axis if isinstance(axis, tuple) else (axis,)
    match one_of(
        rng,
        "norm",
        "axis",
        "average",
        "global",
        "rms",
        "groups",
        "normalized",
        "value",
        "value",
        "normalized",
    ):
        case "norm":
            rule = uc.by_norm(c, ord=order, curve=curve_of(uc, curve), **more)
            return rule, Plan(scope=Scope("leaf"), p=order, limit=limit, curve=curve, policy=policy)
        case "axis":
            rule = uc.by_norm(c, axis, order, **more)
            return rule, Plan(scope=Scope("axes", axes=axes), p=order, limit=limit, policy=policy)
        case "average":
            return uc.by_average_norm(c, **more), Plan(
                scope=Scope("leaf"), power=1, limit=limit, policy=policy
            )
        case "global":
            rule = uc.by_global_norm(c, order, curve=curve_of(uc, curve), **more)
            return rule, Plan(p=order, limit=limit, curve=curve, policy=policy)
        case "rms":
            return uc.by_block_rms(c, **more), Plan(
                scope=Scope("leaf"), power=0.5, limit=limit, policy=policy
            )
        case "groups":
            labels = [0, 1, "the only one", *"012345", *"abcdef"]
            limits = {one: drawn_limit(rng, size) for one in labels}
            own = ("per group", {one: ("constant", float(value)) for one, value in limits.items()})
            rule = uc.by_group_norm(limits, label, order, **more)
            return rule, Plan(scope=Scope("groups", label=label), p=order, limit=own, policy=policy)
        case "normalized":
            return uc.to_global_norm(c, order, **more), Plan(
                p=order, limit=limit, curve="normalize", policy=policy
            )
    low, high = sorted(
        [
            one_of(rng, -1.0, 0.0, -math.inf, -size, -1),
            one_of(rng, 1, 0.0, math.inf, size, size / 2),
        ]
    )
    return uc.by_value(low, high), Plan("value", bounds=(low, high))


def drawn_relative(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a preset that compares gradients with their parameters."""
    policy, eps = one_of(rng, *POLICIES), one_of(rng, 1e-3, 1e-5, 1e-2)
    ratio, axis = logarithmic(rng, 1e-3, 10), one_of(rng, None, 0, -1)
    decay = one_of(rng, 0.0, 0.1)
    match one_of(rng, "agc", "agc", "larc", "relative"):
        case "agc":
            scope = Scope("unit") if axis is None else Scope("axes", axes=(axis,))
            order = one_of(rng, 2, 2, 1, 3, math.inf)
            rule = uc.agc(ratio, eps, axis, order, nonfinite=policy)
            return rule, Plan(scope=scope, p=order, limit=("relative", ratio, eps), policy=policy)
        case "larc":
            lr, trust = logarithmic(rng, 1e-4, 10), logarithmic(rng, 1e-3, 1)
            rule = uc.larc(lr, trust, decay, nonfinite=policy)
            return rule, Plan(scope=Scope("leaf"), limit=("trust", lr, trust, decay), policy=policy)
    scope, own_scope = drawn_scope(uc, rng)
    rule = uc.Rule(uc.limits.Relative(ratio, eps), scope=scope, nonfinite=policy)
    return rule, Plan(scope=own_scope, limit=("relative", ratio, eps), policy=policy)


def drawn_for_examples(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a stateless preset for per-example gradients."""
    c, policy = drawn_limit(rng, size), one_of(rng, "propagate", "skip", "zero")
    c = min(c, 1e300)
    gamma, by_size = logarithmic(rng, 1e-3, 1), chance(rng, 0.5)
    curve = one_of(rng, "hard", "reject", "normalize", "soft")
    more, limit = {"nonfinite": policy}, ("constant", float(c))
    match one_of(rng, "norm", "layer", "auto", "psac"):
        case "norm":
            rule = uc.by_example_norm(c, curve=curve_of(uc, curve), **more)
            return rule, Plan(scope=Scope("example"), limit=limit, curve=curve, policy=policy)
        case "layer":
            c = min(c, 1e37)
            rule = uc.by_example_layer_norm(c, by_size=by_size, **more)
            return rule, Plan(scope=Scope("row"), limit=("split", float(c), by_size), policy=policy)
        case "auto":
            plan = Plan(
                scope=Scope("example"), limit=limit, curve=("regularized", gamma), policy=policy
            )
            return uc.auto_s(c, gamma, **more), plan
    plan = Plan(scope=Scope("example"), limit=limit, curve=("other", gamma), policy=policy)
    return uc.psac(c, gamma, **more), plan


def drawn_stateful(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a stateful preset."""
    policy = one_of(rng, *POLICIES)
    decay, z = one_of(rng, 0.5, 0.9, 0.97, 0.98, 0.999), one_of(rng, 0.5, 1.5, 2.5, 2)
    ratio, window, warmup = (
        one_of(rng, 1.01, 1.05, 1.5, 0.9),
        int(one_of(rng, 2, 3, 5, 8, 11)),
        int(rng.integers(2, 8)),
    )
    more: dict[str, Any] = {"nonfinite": policy}
    match one_of(
        rng, "autoclip", "autoclip of all", "percentile", "zclip", "zclip", "log", "adagc",
        "growth", "spikes", "spikes", "spam", "adagn", "quantile", "schedule"
    ):  # fmt: skip
        case "autoclip":
            q = one_of(rng, 0, 5, 10, 50, 90, 100, 33.3, 0.7)
            rule = (
                uc.Rule(uc.limits.Percentile(q, window), **more)
                if 0 < q < 1
                else uc.autoclip(q, window, **more)
            )
            return rule, Plan(limit=("percentile", q, window, False), policy=policy)
        case "autoclip of all":
            q = one_of(rng, 0, 10, 50, 90, 100)
            return uc.autoclip(q, None, **more), Plan(limit=("percentile of all", q), policy=policy)
        case "percentile":
            p = int(rng.integers(0, 101))
            rank = min(p * window // 100, window - 1)
            limit = ("percentile", 100 * rank / (window - 1), window, True)
            return uc.percentile_clipping(p, window, **more), Plan(
                scope=Scope("leaf"), limit=limit, policy=policy
            )
        case "zclip":
            target = one_of(rng, "reciprocal", "mean", "threshold")
            factor, same = (
                one_of(rng, 1.0, 0.5, 2.0) if target == "reciprocal" else 1.0,
                chance(rng, 0.3),
            )
            limit = ("z-score", z, decay, target, warmup, 1e-6, factor, same)
            rule = uc.zclip(
                z, decay, target, warmup, clip_factor=factor, skip_update_on_spike=same, **more
            )
            return rule, Plan(limit=limit, policy=policy)
        case "log":
            return uc.log_zscore(z, decay, **more), Plan(
                limit=("log z-score", z, decay), policy=policy
            )
        case "adagc":
            warm, joint = int(rng.integers(0, 6)), size * logarithmic(rng, 0.1, 10)
            joint = min(joint, 1e37)
            limit = ("ema", ratio, decay, warm, joint)
            rule = uc.adagc(max(ratio, 1), decay, warm, joint, **more)
            # The preset refuses these ratios.
            rule = replace(rule, limit=uc.limits.Ema(*limit[1:])) if ratio < 1 else rule
            return rule, Plan(scope=Scope("leaf"), limit=limit, policy=policy)
        case "growth":
            limit = ("ema", ratio, 0.0, 0, 1.0)
            rule = uc.norm_growth(max(ratio, 1), **more)
            rule = replace(rule, limit=uc.limits.Ema(*limit[1:])) if ratio < 1 else rule
            return rule, Plan(scope=Scope("leaf"), limit=limit, policy=policy)
        case "spikes":
            policy = one_of(rng, "skip", "skip", "propagate", "zero")
            limit = ("rolling z-score", z, window, min(warmup, window))
            rule = uc.skip_spikes(z, window, min(warmup, window), nonfinite=policy)
            return rule, Plan(limit=limit, curve="reject", policy=policy)
        case "spam":
            factor, warm = one_of(rng, 2.0, 9.0, 5000.0), int(rng.integers(0, 6))
            limit = ("second moment", factor, decay, warm)
            return uc.spam(factor, decay, warm, **more), Plan(
                scope=Scope("entry"), limit=limit, policy=policy
            )
        case "adagn":
            slow = one_of(rng, 0.0, 0.7, 0.9)
            limit = ("mean over rms", slow, decay)
            own = Plan(scope=Scope("leaf"), limit=limit, curve="normalize", policy=policy)
            return uc.adagn(slow, decay, **more), own
        case "quantile":
            start = max(min(size * logarithmic(rng, 0.1, 10), 1e37), 1e-37)
            quantile, rate = one_of(rng, 0.5, 0.5, 0.9, 0.0), one_of(rng, 0.2, 0.2, 1.0)
            low, high = (
                one_of(rng, 0.0, start / 1.1, start),
                one_of(rng, math.inf, start * 1.1, start),
            )
            rule = uc.by_example_quantile(quantile, rate, start, min=low, max=high, **more)
            limit = ("quantile", quantile, rate, start, low, high)
            return rule, Plan(scope=Scope("example"), limit=limit, policy=policy)
    # The schedule computes in float32 and must stay in the normal range.
    low, high = (max(1e-36, min(size * logarithmic(rng, 0.1, 10), 1e37)) for _ in range(2))
    rule = uc.by_global_norm(uc.limits.Schedule(lambda step: low + high * 0.5**step), **more)
    return rule, Plan(limit=("schedule", low, high, 0.5), policy=policy)


def drawn_stateful_in_scope(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a stateful limit in another scope than that of its preset."""
    rule, plan = drawn_stateful(uc, rng, size)
    if plan.scope.kind == "example":
        return rule, plan
    scope, own = drawn_scope(uc, rng)
    if plan.limit[0] == "percentile of all" and own.kind in {"entry", "row", "axes", "unit"}:
        # Each histogram has many bins.
        scope, own = uc.scopes.each_leaf, Scope("leaf")
    name = plan.curve if chance(rng, 0.7) else drawn_curve(rng)
    rule = uc.Rule(
        rule.limit, scope=scope, norm=rule.norm, curve=curve_of(uc, name), nonfinite=rule.nonfinite
    )
    return rule, Plan(plan.kind, own, plan.p, plan.power, plan.limit, name, plan.policy)


def drawn_named(uc: ModuleType, rng: Rng, size: float) -> Made:
    """Return a rule whose groups have limits of several types."""
    policy, label = one_of(rng, *POLICIES), one_of(rng, by_depth, by_first)
    limits, plans = {}, {}
    for name in [0, 1, "the only one", *"012345", *"abcdef"]:
        rule, plan = (drawn_stateful if chance(rng, 0.5) else drawn_rule)(uc, rng, size)
        if (
            plan.limit[0] == "percentile of all"
            or plan.scope.kind == "example"
            or plan.limit[0] == "ema"
        ):
            rule, plan = drawn_rule(uc, rng, size)
        limits[name], plans[name] = rule.limit, plan.limit
    rule = uc.by_group_norm(limits, label, nonfinite=policy)
    return rule, Plan(scope=Scope("groups", label=label), limit=("per group", plans), policy=policy)


def drawn_made(uc: ModuleType, rng: Rng, size: float, *, deep: bool = True) -> Made:
    """Return any rule."""
    kinds = [drawn_rule] * 6 + [drawn_fixed] * 6 + [drawn_relative] * 2 + [drawn_for_examples] * 2
    kinds += [drawn_stateful] * 4 + [drawn_stateful_in_scope] * 2 + [drawn_named]
    if not deep or chance(rng, 0.9):
        return one_of(rng, *kinds)(uc, rng, size)
    if chance(rng, 0.4):
        rule, plan = drawn_made(uc, rng, size, deep=False)
        where = one_of(rng, by_depth, by_last)
        return uc.masked(rule, where), Plan("masked", scope=plan.scope, parts=(plan,), where=where)
    made = [drawn_made(uc, rng, size, deep=False) for _ in range(rng.integers(1, 4))]
    if chance(rng, 0.2):
        made.append((lambda array: array / 2, Plan("halve")))
    return uc.chain(*[rule for rule, _ in made]), Plan(
        "chain", parts=tuple(plan for _, plan in made)
    )


def plans_of(plan: Plan) -> list[Plan]:
    """Return the plans of the rules that a plan consists of."""
    return [inner for part in plan.parts for inner in plans_of(part)] if plan.parts else [plan]


# Trees.


def drawn_dtypes(rng: Rng, dtypes: list[str]) -> list[str]:
    """Return the dtypes of the leaves of a tree."""
    floats = [dtype for dtype in dtypes if not dtype.startswith("int")]
    allowed = dtypes if chance(rng, 0.1) else floats
    return [one_of(rng, *allowed) for _ in range(1 if chance(rng, 0.65) else 3)]


POOL: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((), (3,), (2, 3)), ((3,), (2, 3)), ((2, 3), (2, 1, 3)), ((2, 1, 3), (2, 1, 3))
)  # fmt: skip
"""Shapes of the leaves of four trees, for programs that are compiled for each shape."""
LONG_LEAF = 140_001
"""The number of elements of a large leaf."""


def drawn_tree(
    rng: Rng,
    plan: Plan,
    dtypes: list[str],
    layouts: tuple[str, ...],
    *,
    few: bool,
    large: bool = False,
) -> tuple[Any, list[Slot]]:
    """Return a tree whose leaves fit the scopes of a plan.

    With ``few``, the shapes come from a small pool, since each one is compiled.
    """
    plans = plans_of(plan)
    least = max(_least(part.scope) for part in plans)
    alike = any(part.scope.kind == "example" or part.limit[0] == "split" for part in plans)
    rows = int(rng.integers(1, 5)) if alike else None
    # Clipping by value has no meaning for complex numbers, and halves of integers may not be
    # integers.
    if any(part.kind in {"value", "halve"} for part in plans):
        dtypes = [dtype for dtype in dtypes if not dtype.startswith(("complex", "int"))] or [
            "float32"
        ]
    slots: list[Slot] = []

    def slot(shape: tuple[int, ...]) -> Slot:
        slots.append(Slot(len(slots), shape, str(one_of(rng, *dtypes)), one_of(rng, *layouts)))
        return slots[-1]

    def leaf() -> Slot:
        ndim = (
            int(rng.integers(least, max(least, 3) + 1))
            if rows is None
            else int(rng.integers(max(least, 1), 4))
        )
        side = lambda: 0 if chance(rng, 0.02) else int(one_of(rng, 1, 2, 3, 4, 7))
        shape = tuple(side() for _ in range(ndim))
        if chance(rng, 0.01):
            shape = (*shape[:-1], 1500) if shape else ()
        return slot(shape if rows is None else (rows, *shape[1:]))

    def node(depth: int) -> Any:
        if depth == 0 or chance(rng, 0.35):
            return None if chance(rng, 0.06) else leaf()
        inner = [node(depth - 1) for _ in range(rng.integers(0 if chance(rng, 0.1) else 1, 4))]
        return contained(inner)

    def contained(inner: list[Any]) -> Any:
        kind, keys = one_of(rng, list, tuple, dict), list(rng.permutation(list("abcdef")))
        return (
            {str(key): one for key, one in zip(keys, inner, strict=False)}
            if kind is dict
            else kind(inner)
        )

    if few:
        least = max(least, 2 if alike else 0)
        shapes = one_of(rng, *[some for some in POOL if min(map(len, some)) >= least])
        return contained([slot(shape) for shape in shapes]), slots
    tree = node(int(rng.integers(0, 4)))
    if large:
        ndim = max(least, 1 if rows is None else 2)
        tree = [
            tree,
            slot(
                (rows or 3, *[1] * (ndim - 2), LONG_LEAF // (rows or 3))
                if ndim > 1
                else (LONG_LEAF,)
            ),
        ]
    return tree if slots else [tree], slots


def _least(scope: Scope) -> int:
    """Return how many dimensions a leaf needs."""
    if scope.kind == "axes":
        # Axes must be distinct.
        return max(len(scope.axes), *(axis + 1 if axis >= 0 else -axis for axis in scope.axes))
    return 1 if scope.kind in {"row", "example"} else 0


# Values.


def drawn_scale(rng: Rng, dtypes: list[str]) -> tuple[str, int]:
    """Return how elements are drawn, and the power of two of their size."""
    kind = one_of(
        rng, *["usual"] * 6, "large", "small", "any", "any", "wide", "whole", "whole", "equal"
    )
    low, high = max(LOGS[dtype][0] for dtype in dtypes), min(LOGS[dtype][1] for dtype in dtypes)
    match kind:
        case "large":
            return kind, high - int(rng.integers(0, 8))
        case "small":
            return kind, low + int(rng.integers(0, 8))
        case "any":
            return kind, int(rng.integers(low, high - 1))
    return kind, int(rng.integers(max(low, -8), min(high, 8)))


def drawn_values(rng: Rng, slot: Slot, kind: str, power: float, share: float) -> np.ndarray:
    """Return the values of a gradient, some of which are not finite."""
    complex_, low, high = slot.dtype.startswith("complex"), *LOGS[slot.dtype]

    def real() -> np.ndarray:
        with np.errstate(over="ignore", under="ignore"):
            if kind == "whole":
                made = rng.integers(-8, 9, slot.shape) * 2.0 ** min(max(power, low), high - 4)
            elif kind == "equal":
                made = np.full(slot.shape, rng.uniform(-1, 1)) * 2.0 ** min(max(power, low), high)
            elif kind == "wide":
                made = np.ldexp(rng.uniform(-1, 1, slot.shape), rng.integers(low, high, slot.shape))
            else:
                made = rng.standard_normal(slot.shape) * 2.0 ** min(power, 1023)
        made = np.where(rng.random(slot.shape) < 0.1, 0.0, made)
        made = np.clip(made, -(2.0**high), 2.0**high)
        bad = rng.choice([np.nan, np.inf, -np.inf], slot.shape)
        return np.where(rng.random(slot.shape) < share, bad, made)

    made = real() + 1j * real() if complex_ and share == 0 else real()
    if complex_ and share:
        made = made + 0j
    return np.round(real()) if slot.dtype.startswith("int") else made


def _values_of(rng: Rng, case: Case, kind: str, power: float, count: int) -> None:
    """Draw the values, losses and saves of each step."""
    plans = plans_of(case.plan)
    one = len({slot.dtype for slot in case.slots}) == 1
    may_be_absent = lambda part: (
        not part.stateful or (part.independent_rows and (one or part.scope.kind == "all"))
    )
    gaps = chance(rng, 0.3) and all(map(may_be_absent, plans))
    for number in range(count):
        swing = float(np.exp(rng.standard_normal() * one_of(rng, 0.05, 0.3))) if count > 1 else 1.0
        swing *= logarithmic(rng, 3, 1e4) if count > 1 and chance(rng, 0.08) else 1.0
        share = one_of(rng, 0.05, 0.5) if chance(rng, 0.06) else 0.0
        values = [
            drawn_values(rng, slot, kind, power + math.log2(swing), share) for slot in case.slots
        ]
        values = [np.zeros_like(one) for one in values] if chance(rng, 0.03) else values
        # A stateful rule must see all leaves at the first step.
        gone = gaps and (number or not case.plan.stateful)
        share = 1.0 if chance(rng, 0.1) else 0.1
        case.steps.append([None if gone and chance(rng, share) else one for one in values])
        loss = float(rng.normal(2, 0.2)) * (10 if chance(rng, 0.05) else 1)
        loss = one_of(rng, math.nan, math.inf) if chance(rng, 0.03) else loss
        case.losses.append(
            loss if any(part.limit[0] == "rolling z-score" for part in plans) else None
        )
        case.saved = number if case.plan.stateful and chance(rng, 0.3) else case.saved
    case.params = [
        drawn_values(rng, slot, "usual", min(max(power, -20), 8), 0.0) for slot in case.slots
    ]


def drawn_case(
    uc: ModuleType,
    rng: Rng,
    dtypes: list[str],
    layouts: tuple[str, ...],
    ways: tuple[str, ...],
    *,
    few: bool = False,
) -> Case:
    """Return a rule, a tree, and the values of each step."""
    own = drawn_dtypes(rng, dtypes)
    kind, power = drawn_scale(rng, own)
    size = math.ldexp(float(rng.uniform(0.5, 4)), min(power, 1020))
    rule, plan = drawn_made(uc, rng, size)
    plans, large = plans_of(plan), chance(rng, 0.02) and not few
    tree, slots = drawn_tree(rng, plan, own, layouts, few=few, large=large)
    case = Case(rule, plan, tree, slots)
    count = int(one_of(rng, 2, 3, 3, 4, 5, 8, 12, 20)) if plan.stateful else 1
    _values_of(rng, case, kind, power, min(count, 4) if large or few else count)
    case.way = one_of(rng, *[way for way in ways if way in fitting(case)])
    if plan.kind == "rule" and plan.limit[0] == "constant" and chance(rng, 0.15):
        case.tie = float(rng.random())
    alike = [
        (a, b)
        for a in slots
        for b in slots[a.number + 1 :]
        if (a.shape, a.dtype) == (b.shape, b.dtype)
    ]
    if alike and chance(rng, 0.15) and case.way in {"plain", "holder"}:
        case.twice = tuple(slot.number for slot in one_of(rng, *alike))
    if any(part.limit[0] == "percentile of all" and part.scope.kind != "all" for part in plans):
        # Their saved states are long texts.
        case.saved = None
    case.boxed = chance(rng, 0.1)
    if chance(rng, 0.2):
        other = drawn_tree(rng, plan, own, layouts, few=few)
        case.aside = Case(rule, plan, *other)
        _values_of(rng, case.aside, kind, power, 2 if plan.stateful else 1)
    # Every process has all named groups, so the limits are those of this case.
    if case.way == "parts" and case.plan.limit[0] == "per group":
        named = {case.plan.scope.label(path, slot) for path, slot in walk(tree)}
        limits = {name: limit for name, limit in rule.limit.limits if name in named}
        case.rule = replace(rule, limit=uc.limits.PerGroup(limits))
        # Its groups may have other names.
        case.aside = None
    if case.way == "parts":
        case.processes = [-2 if slot.shape and chance(rng, 0.8) else -1 for slot in slots]
        if plan.scope.kind == "all" and len(slots) > 1:
            # Each process gets a leaf.
            count = min(len(slots), int(rng.integers(2, 4)))
            drawn = [*range(count), *rng.integers(-2, count, len(slots) - count).tolist()]
            case.processes = [
                one if slot.shape else max(one, -1) for one, slot in zip(drawn, slots, strict=True)
            ]
    return case


def fitting(case: Case) -> set[str]:
    """Return the ways in which a case may run."""
    plan, plans, slots = case.plan, plans_of(case.plan), case.slots
    ints = any(slot.dtype.startswith("int") for slot in slots)
    full = all(value is not None for step in case.steps for value in step)
    # A row of state belongs to a leaf, so stateful rules need all leaves.
    complete = full or not any(part.stateful and part.scope.kind != "all" for part in plans)
    alike = len({slot.shape[:1] for slot in slots}) == 1 and full
    own_axis = any(part.scope.kind == "unit" and part.scope.axis is None for part in plans)
    rule, kind = plan.kind == "rule", plan.scope.kind
    joined = rule and kind in {"all", "leaf", "groups"} and plan.policy != "raise"
    joined = joined and full and "None" not in str(case.tree)
    fits = {
        "plain": True,
        "in place": not ints,
        "familiar": not plan.stateful,
        "holder": complete,
        "renamed": complete and rule and kind != "groups" and case.saved,
        "moved": complete and plan.stateful and case.saved and not (ints or own_axis or case.boxed),
        "summed": rule and kind in {"row", "example"} and not plan.stateful and alike,
        "parts": joined and not ints and len({BITS[slot.dtype] > 24 for slot in slots}) == 1,
    }
    return {way for way, fit in fits.items() if fit}
