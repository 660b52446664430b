"""What rules do to gradients, by their documentation, on `Span`; imports nothing of uniclip.

A rule is plain data here (`Plan`). Where NaN and ∞ are, what comes out is known without arithmetic, so entries that are
not finite are marked, and the spans hold 0 in their place.
"""
# ruff: noqa: EM101, TRY003 - what stops a case is caught and counted

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fuzz_limits import Given, Inconclusive, Spec, State, step, unlimited
from fuzz_spans import LONG, MAYBE, NO, YES, Array, Precision, Span, either, exact, precision, within

Path = tuple[Any, ...]
BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}
FORGETFUL = {"constant", "relative", "trust", "split"}
"""The limits without memory."""
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
SMALLEST = {"float16": (2.0**-24, 2.0**-14), "bfloat16": (2.0**-133, 2.0**-126)}


@dataclass(frozen=True)
class Machine:
    """What the framework does with numbers, and with a weight's axes."""

    flush: bool = False
    """Whether subnormal numbers may become 0."""
    default_float: str = "float64"
    output_axis: int = -1
    exact: bool = True
    """Whether the root of a square is exact."""

    def of_leaf(self, dtype: str) -> Precision:
        """Return the precision of the entries of a leaf."""
        if dtype in SMALLEST:
            return Precision(2.0 ** -BITS[dtype], SMALLEST[dtype][self.flush], LARGEST[dtype])
        return precision(_real(dtype), flush=self.flush)

    def of_norm(self, dtypes: list[str]) -> Precision:
        """Return the precision of the norm of leaves."""
        return precision("float64" if any(BITS[dtype] > 24 for dtype in dtypes) else "float32", flush=self.flush)


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


@dataclass(frozen=True)
class Leaf:
    """A gradient: real and imaginary parts along a new last axis."""

    path: Path
    dtype: str
    parts: Span
    bad: Array
    """Which entries are not finite."""
    signs: Array = 0.0
    """Where entries are not finite, the sign of ∞, 0 for NaN."""
    same: Array = field(default_factory=lambda: np.bool_(True))
    """Which entries are, bit for bit, what was given."""
    integer: str | None = None
    """The dtype of integers that no rule of norms has made floating-point numbers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gradient."""
        return self.parts.shape[:-1]

    def sizes(self) -> Span:
        """Return the modulus of each entry."""
        if self.parts.shape[-1] == 1:
            return self.parts[..., 0].size()
        sizes = self.parts.size()
        return Span(np.sqrt((sizes.lo**2).sum(-1)), np.sqrt((sizes.hi**2).sum(-1)), sizes.precision)


def leaf_of(path: Path, array: Array, dtype: str, machine: Machine) -> Leaf:
    """Return a leaf of an array of NumPy; integers are read as the framework's default float."""
    integer = None if dtype in BITS else dtype
    dtype = dtype if dtype in BITS else machine.default_float
    wide = np.asarray(array, dtype=np.clongdouble if np.iscomplexobj(array) else LONG)
    parts = np.stack([wide.real, wide.imag], axis=-1) if np.iscomplexobj(wide) else wide[..., None]
    bad = ~np.isfinite(parts).all(axis=-1)
    parts = np.where(bad[..., None], 0, parts)
    unit = machine.of_leaf(dtype)
    lost = (np.abs(parts) < unit.tiny) & machine.flush
    low, high = (np.where(lost, end(parts, 0), parts) for end in (np.minimum, np.maximum))
    signs = 0.0 if np.iscomplexobj(wide) else np.sign(np.where(bad & ~np.isnan(wide), wide, 0))
    return Leaf(path, dtype, Span(low, high, unit), bad, signs, integer=integer)


@dataclass(frozen=True)
class Scope:
    """Which entries share a norm."""

    kind: str
    axes: tuple[int, ...] = ()
    axis: int | None = None
    label: Callable[[Path, Any], Any] | None = None

    def covered(self, ndim: int, machine: Machine) -> tuple[int, ...] | None:
        """Return the axes that a norm covers, ``None`` for all."""
        if self.kind in {"all", "leaf", "groups"}:
            return None
        if self.kind == "entry":
            return ()
        if self.kind == "axes":
            return tuple(sorted({axis % ndim for axis in self.axes}))
        if self.kind in {"row", "example"}:
            return tuple(range(1, ndim))
        output = machine.output_axis if self.axis is None else self.axis
        return tuple(range(ndim)) if ndim < 2 else tuple(n for n in range(ndim) if n != output % ndim)

    def groups(self, leaves: list[Leaf]) -> list[tuple[Any, list[int]]]:
        """Return labels and the numbers of the leaves that share norms."""
        if self.kind in {"all", "example"}:
            return [(None, list(range(len(leaves))))]
        if self.kind != "groups":
            return [(None, [number]) for number in range(len(leaves))]
        labels = [self.label(leaf.path, None) for leaf in leaves]
        return [(one, [n for n, label in enumerate(labels) if label == one]) for one in sorted(set(labels), key=repr)]


@dataclass(frozen=True)
class Plan:
    """A rule as data."""

    kind: str = "rule"
    """``rule``, ``value``, ``halve``, ``chain`` or ``masked``."""
    scope: Scope = Scope("all")
    p: float = 2
    power: float = 0
    limit: Spec = ("constant", math.inf)
    curve: Any = "hard"
    policy: str = "propagate"
    bounds: tuple[Any, Any] = (None, None)
    parts: tuple[Plan, ...] = ()
    where: Callable[[Path, Any], bool] | None = None

    @property
    def remembers(self) -> bool:
        """Whether a state is kept from step to step."""
        if self.parts:
            return any(part.remembers for part in self.parts)
        limits = self.limit[1].values() if self.limit[0] == "per group" else [self.limit]
        return self.kind == "rule" and any(limit[0] not in FORGETFUL for limit in limits)


@dataclass
class Outcome:
    """What a step comes to. A flag is ``None`` where rounding decides it."""

    leaves: list[Leaf]
    state: State = None
    measured: bool = False
    norms: list[Span] = field(default_factory=list)
    broken: list[Array] = field(default_factory=list)
    """Which norms are not finite."""
    limits: list[Span] = field(default_factory=list)
    factors: list[Span] = field(default_factory=list)
    """NaN where the norm is not finite and the policy does not say otherwise."""
    labels: list[Any] | None = None
    finite: bool = True
    clipped: bool | None = False
    skips: bool = False
    """Whether the rule may leave out a step."""
    skipped: bool | None = False
    parts: list[Outcome] = field(default_factory=list)


@dataclass
class Step:
    """What a caller adds to a step, and what was reported of it."""

    machine: Machine
    params: dict[Path, Leaf] = field(default_factory=dict)
    loss: float | None = None
    seen: Any = None
    """The limits and the factors that were reported, as lists of arrays; of a chain, a list with those of each rule."""
    maybes: Counter[str] = field(default_factory=Counter)


def clip(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Take a step; ``None`` is the state before the first."""
    return {"rule": _rule, "value": _value, "halve": _halve, "chain": _chain, "masked": _masked}[plan.kind](
        plan, leaves, state, given
    )


# Rules.


def _value(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Clip each entry; NaN stays."""
    new = []
    for leaf in leaves:
        bounds, unit = [_cast(bound, leaf.dtype) for bound in plan.bounds], leaf.parts.precision
        ends = [
            np.clip(np.where(leaf.signs == 0, end[..., 0], leaf.signs * np.inf), *bounds)
            for end in (leaf.parts.lo, leaf.parts.hi)
        ]
        zero = np.asarray((leaf.parts.lo[..., 0] == 0) & np.bool_(0 in bounds))  # its sign may be that of the bound
        inside = (ends[0] == leaf.parts.lo[..., 0]) & (ends[1] == leaf.parts.hi[..., 0]) & ~leaf.bad & ~zero
        ends = _flushed(ends, leaf, bounds) if given.machine.flush else ends
        endless = np.isinf(ends[0])
        parts = Span(*(np.where(endless, 0, end)[..., None] for end in ends), unit)
        bad = leaf.bad & ((leaf.signs == 0) | endless)
        new.append(replace(leaf, parts=parts, bad=bad, signs=leaf.signs * endless, same=leaf.same & (inside | bad)))
    return Outcome(new, state)


def _flushed(ends: list[Array], leaf: Leaf, bounds: list[Array]) -> list[Array]:
    """Allow 0, the entry and the bounds where these are subnormal: a comparison takes them for equal."""
    tiny = leaf.parts.precision.tiny
    near = (np.abs(ends[0]) < tiny) & (np.abs(ends[1]) < tiny)
    some = [leaf.parts.lo[..., 0], leaf.parts.hi[..., 0], *ends, *(one for one in bounds if abs(one) < tiny)]
    some = np.broadcast_arrays(*[np.where(np.abs(one) < tiny, one, 0) for one in some])
    return [
        np.where(near, np.minimum.reduce(some), ends[0]),
        np.where(near, np.maximum.reduce(some), ends[1]),
    ]


def _cast(bound: float, dtype: str) -> Array:
    if dtype not in SMALLEST:
        with np.errstate(over="ignore"):
            return LONG(np.dtype(dtype).type(bound))
    if not math.isfinite(bound):
        return LONG(bound)
    unit = np.exp2(np.maximum(np.floor(np.log2(abs(LONG(bound)) or LONG(1))), np.log2(LONG(SMALLEST[dtype][1]))))
    rounded = np.round(LONG(bound) / unit * 2 ** (BITS[dtype] - 1)) / 2 ** (BITS[dtype] - 1) * unit
    return rounded if abs(rounded) <= LARGEST[dtype] else LONG(math.copysign(math.inf, bound))


def _halve(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Halve each entry; ∞ stays what it is."""
    halves = [_scaled(leaf, exact(0.5, _free(leaf.parts.precision)), ()) for leaf in leaves]
    return Outcome([replace(half, signs=leaf.signs) for half, leaf in zip(halves, leaves, strict=True)], state)


def _chain(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """One after the other; states stay where one met what is not finite, and after one that skips."""
    states = state or [None] * len(plan.parts)
    parts: list[Outcome] = []
    for number, (part, old) in enumerate(zip(plan.parts, states, strict=True)):
        own = replace(given, seen=None if given.seen is None else given.seen[number])
        outcome = clip(part, leaves, old, own)
        if part.remembers and any(one.skips and one.skipped is None for one in parts):
            raise Inconclusive("whether the rule before skipped")
        if any(one.skips and one.skipped for one in parts):
            outcome.state = old
        parts.append(outcome)
        leaves = outcome.leaves if number == len(states) - 1 else [_in_range(leaf) for leaf in outcome.leaves]
    measured = [part for part in parts if part.measured]
    finite = all(part.finite for part in measured)
    return Outcome(
        leaves, [part.state for part in parts] if finite else states, bool(measured),
        finite=finite, clipped=_any([part.clipped for part in measured]), skips=any(part.skips for part in measured),
        skipped=_any([part.skipped for part in measured if part.skips]), parts=parts,
    )  # fmt: skip


def _in_range(leaf: Leaf) -> Leaf:
    """Return what the next rule gets: ∞ where an entry is beyond its dtype."""
    sizes, largest = leaf.parts.size(), LARGEST.get(leaf.dtype, leaf.parts.precision.largest)
    gone = sizes.lo > largest * (1 + 2 * LONG(leaf.parts.precision.ulp))
    if ((sizes.hi > largest) & ~gone).any() or (gone.any() and gone.shape[-1] > 1):
        raise Inconclusive("an entry near the largest number, or a complex one above it")
    if not gone.any():
        return leaf
    signs = np.where(gone[..., 0], np.sign(leaf.parts.lo[..., 0]), leaf.signs)
    parts = Span(*(np.where(gone, 0, end) for end in (leaf.parts.lo, leaf.parts.hi)), leaf.parts.precision)
    return replace(leaf, parts=parts, bad=leaf.bad | gone[..., 0], signs=signs)


def _masked(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Clip some of the leaves; a step is not left out for the others."""
    numbers = [number for number, leaf in enumerate(leaves) if plan.where(leaf.path, None)]
    if not numbers:
        return Outcome(leaves, state)
    outcome = clip(plan.parts[0], [leaves[number] for number in numbers], state, given)
    new = list(leaves)
    for number, leaf in zip(numbers, outcome.leaves, strict=True):
        new[number] = leaf
    return replace(outcome, leaves=new, skips=False)


def _any(flags: list[bool | None]) -> bool | None:
    return True if True in flags else None if None in flags else False


def _rule(plan: Plan, leaves: list[Leaf], state: State, given: Step) -> Outcome:
    """Measure, ask the limit, bend the curve, scale."""
    machine, sound = given.machine, not any(leaf.bad.any() for leaf in leaves)
    own = (
        [replace(leaf, bad=np.zeros_like(leaf.bad), signs=0.0) for leaf in leaves] if plan.policy == "zero" else leaves
    )
    norms, broken, sizes = norms_of(plan, own, machine)
    finite = sound and not any(bad.any() for bad in broken)
    out = Outcome(
        list(leaves), state, True, norms, broken, finite=finite, skips=plan.policy == "skip" or plan.curve == "reject"
    )
    groups = plan.scope.groups(leaves)
    out.labels = [label for label, _ in groups] if plan.scope.kind == "groups" else None
    out.limits, new_state = _limits(plan, groups, leaves, out, sizes, state, given)
    out.state = new_state if finite else state
    measures = plan.limit == ("constant", math.inf)
    changed: list[bool | None] = []
    for number, ((_, numbers), *pair, bad) in enumerate(zip(groups, norms, out.limits, broken, strict=True)):
        n, limit = (Span(one.lo, one.hi, _free(one.precision)) for one in pair)
        seen = None if given.seen is None else given.seen[1][number]
        factor = _factor(plan, n, limit, norms[number].precision.largest, seen, given.maybes)
        nothing = (bad & (plan.policy == "zero")) | (plan.policy == "skip" and not finite)
        factor = either(np.where(nothing, YES, NO), factor * 0, factor)
        spoiled = bad & (plan.policy in {"propagate", "raise"}) & (not measures)
        factor = Span(np.where(spoiled, np.nan, factor.lo), np.where(spoiled, np.nan, factor.hi), factor.precision)
        out.factors.append(factor)
        changed += [_differs(factor)]
        for one in numbers:
            axes = plan.scope.covered(len(leaves[one].shape), machine)
            out.leaves[one] = _scaled(own[one], factor, axes)
            if plan.policy == "zero":
                kept = ~leaves[one].bad & out.leaves[one].same
                out.leaves[one] = replace(out.leaves[one], same=kept)
    out.clipped = _any(changed)
    out.skipped = _left_out(plan, out)
    return out


def _limits(
    plan: Plan, groups: Any, leaves: list[Leaf], out: Outcome, sizes: list[Array], state: State, given: Step
) -> tuple[list[Span], State]:
    """Ask the limit; in place of a norm that is not finite it sees 1."""
    calm = [
        Span(np.where(bad, 1, n.lo), np.where(bad, 1, n.hi), n.precision)
        for n, bad in zip(out.norms, out.broken, strict=True)
    ]
    if plan.remembers and not leaves:
        return [unlimited(n) for n in calm], state
    ask = Given(
        [label for label, _ in groups],
        lambda: norms_of(plan, [given.params[leaf.path] for leaf in leaves], given.machine)[0],
        lambda: sizes, precision("float32", flush=given.machine.flush),
        given.loss, None if given.seen is None else given.seen[0],
        given.maybes, any(bad.any() for bad in out.broken),
    )  # fmt: skip
    return step(plan.limit, calm, state, ask)


def _factor(plan: Plan, n: Span, limit: Span, largest: float, seen: Array | None, maybes: Counter[str]) -> Span:
    """Return the factors; where rounding decides whether a gradient is left out, the report says it.

    A limit as large as the largest number of its norm's dtype limits nothing. Two numbers of that dtype make up a
    factor, so it reaches as far as the largest number divided by the smallest normal one: normalizing needs more only
    where the norm is not even a normal number. Other curves return one number.
    """
    endless = np.where(limit.lo >= largest, YES, np.where(limit.hi >= largest, MAYBE, NO))
    held = Span(*(np.where(endless == YES, 1, end) for end in (limit.lo, limit.hi)), limit.precision)
    held = Span(*np.broadcast_arrays(held.lo, held.hi, n.lo)[:2], held.precision)
    factor = either(endless, exact(np.ones(n.shape), n.precision), _curve(plan.curve, n, held))
    reach = LONG(largest) * (1 if isinstance(plan.curve, tuple) else 1 / _normal(largest))
    factor = Span(np.minimum(factor.lo, reach), factor.hi, factor.precision)
    if plan.curve in {"hard", "reject"}:
        maybes["within the limit or not"] += int((within(n, held) == MAYBE).sum())
    if plan.curve == "reject" and seen is not None:
        unsure = (factor.lo < factor.hi) & ((seen == 0) | (seen == 1))
        factor = Span(np.where(unsure, seen, factor.lo), np.where(unsure, seen, factor.hi), factor.precision)
    return factor


def _normal(largest: float) -> float:
    """Return the smallest normal number of the dtype with such a largest one."""
    return 2.0**-126 if largest < 1e39 else 2.0**-1022


def _differs(factor: Span) -> bool | None:
    """Return whether one of the factors is not 1."""
    if ((factor.hi < 1) | (factor.lo > 1) | np.isnan(factor.lo)).any():
        return True
    return None if ((factor.lo != 1) | (factor.hi != 1)).any() else False


def _left_out(plan: Plan, out: Outcome) -> bool | None:
    if plan.policy == "skip" and not out.finite:
        return True
    if plan.curve != "reject" or not any(factor.lo.size for factor in out.factors):
        return False
    if all((factor.hi == 0).all() for factor in out.factors):
        return True
    return None if all((factor.lo == 0).all() for factor in out.factors) else False


def _free(unit: Precision) -> Precision:
    """Return the same precision without bounds: only results have to be in range."""
    return Precision(unit.ulp, 0.0, math.inf)


def _scaled(leaf: Leaf, factor: Span, axes: tuple[int, ...] | None) -> Leaf:
    """Multiply; where the factor is NaN, all is."""
    kept = Span(*(np.expand_dims(end, axes or ())[..., None] for end in (factor.lo, factor.hi)), factor.precision)
    if axes is None:
        kept = factor
    spoiled = np.broadcast_to(np.isnan(kept.lo), leaf.parts.shape)[..., 0]
    ones = np.broadcast_to((kept.lo == 1) & (kept.hi == 1), leaf.parts.shape)[..., 0]
    zeros = np.broadcast_to(kept.hi == 0, leaf.parts.shape)[..., 0]
    calm = Span(np.where(np.isnan(kept.lo), 0, kept.lo), np.where(np.isnan(kept.hi), 0, kept.hi), kept.precision)
    unit = leaf.parts.precision
    free = Precision(unit.ulp, unit.tiny, math.inf)
    product = Span(leaf.parts.lo, leaf.parts.hi, _free(unit)) * calm
    rounded = Span(product.lo, product.hi, free).rounded()
    parts = Span(
        np.where(ones[..., None], leaf.parts.lo, rounded.lo), np.where(ones[..., None], leaf.parts.hi, rounded.hi), unit
    )
    return replace(
        leaf,
        parts=parts,
        bad=(leaf.bad & ~zeros) | spoiled,
        signs=leaf.signs * ones,
        same=leaf.same & ones,
        integer=None,
    )


def reduced(plan: Plan, leaves: list[Leaf], given: Step, *, mean: bool) -> Outcome:
    """Clip the gradients of examples, and add them up along the first axis."""
    out = clip(plan, leaves, None, given)
    new = []
    for leaf in out.leaves:
        parts, count = leaf.parts, max(leaf.shape[0], 1) if mean else 1
        sizes = np.maximum(np.abs(parts.lo), np.abs(parts.hi)).sum(axis=0)
        if (sizes > np.finfo(np.float64 if BITS[leaf.dtype] > 24 else np.float32).max).any():
            raise Inconclusive("a sum near the largest number")  # of which ∞ - ∞ is made
        slack = (len(leaf.bad) + 2) * sizes * LONG(2.0**-52 if BITS[leaf.dtype] > 24 else 2.0**-23)
        ends = Span((parts.lo.sum(axis=0) - slack) / count, (parts.hi.sum(axis=0) + slack) / count, parts.precision)
        free = Precision(parts.precision.ulp, parts.precision.tiny, math.inf)
        ends = Span(ends.lo, ends.hi, free).rounded()
        new.append(replace(leaf, parts=ends, bad=leaf.bad.any(axis=0), same=np.bool_(False)))
    return replace(out, leaves=new)


# Norms.


def norms_of(plan: Plan, leaves: list[Leaf], machine: Machine) -> tuple[list[Span], list[Array], list[Array]]:
    """Return the norms, which of them are not finite, and how many entries each covers.

    Raises
    ------
    Inconclusive
        If a norm is as large as its dtype just holds.
    """
    norms, broken, sizes = [], [], []
    for _, numbers in plan.scope.groups(leaves):
        members = [leaves[number] for number in numbers]
        unit = machine.of_norm([leaf.dtype for leaf in members])
        axes = [plan.scope.covered(len(leaf.shape), machine) for leaf in members]
        over = [tuple(range(len(leaf.shape))) if one is None else one for leaf, one in zip(members, axes, strict=True)]
        size = LONG(sum(math.prod(leaf.shape[a] for a in one) for leaf, one in zip(members, over, strict=True)))
        norm = _norm(plan.p, members, over, unit, machine)
        norm = norm if not plan.power else (norm / max(size, 1) ** LONG(plan.power)).rounded(16)
        bad = [leaf.bad.any(axis=one) for leaf, one in zip(members, over, strict=True)]
        spoiled = np.logical_or.reduce(bad) if bad else np.bool_(False)
        if (np.isinf(norm.hi) & (norm.lo < unit.largest) & ~spoiled).any():
            raise Inconclusive("a norm near the largest number")
        broken.append(np.asarray(spoiled | np.isinf(norm.hi)))
        norms.append(norm)
        sizes.append(max(size, 1))
    return norms, broken, sizes


def _norm(p: float, members: list[Leaf], over: list[tuple[int, ...]], unit: Precision, machine: Machine) -> Span:
    if not members:
        return exact(0, unit)
    spans = [leaf.sizes() for leaf in members]
    ends = []
    for end in ("lo", "hi"):
        tops = [np.max(getattr(s, end), axis=one, initial=0) for s, one in zip(spans, over, strict=True)]
        top = np.maximum.reduce(tops)
        if p == math.inf:
            ends.append(top)
            continue
        safe = np.where(top > 0, top, 1)
        sums = []
        for span, one in zip(spans, over, strict=True):
            kept = np.expand_dims(safe, one)
            sums.append((np.asarray(getattr(span, end) / kept) ** LONG(p)).sum(axis=one))
        ends.append(safe * np.add.reduce(sums) ** (1 / LONG(p)))
    norm = Span(np.asarray(ends[0]), np.asarray(ends[1]), unit)
    modulus = 9 if any(leaf.parts.shape[-1] > 1 for leaf in members) else 0
    if p == 1 and modulus:  # each modulus is rounded by itself
        lost = sum(math.prod(leaf.shape) for leaf in members) * LONG(unit.tiny)
        norm = Span(np.where(norm.lo > 0, np.maximum(norm.lo - lost, 0), 0), norm.hi + lost * (norm.hi > 0), unit)
    # In double precision libraries may add one by one: half a rounding for each entry.
    added = 0.5 * max(math.prod(leaf.shape) for leaf in members) if unit.ulp < 2**-30 else 0
    loose = norm.rounded({1: 9 + 2 * added, 2: 9 + added, math.inf: modulus}.get(p, 32 + added))
    sharp = _is_exact(p, members, over, norm) & np.isfinite(loose.hi) & machine.exact
    return Span(np.where(sharp, norm.lo, loose.lo), np.where(sharp, norm.hi, loose.hi), unit)


def _is_exact(p: float, members: list[Leaf], over: list[tuple[int, ...]], norm: Span) -> Array:
    """Return which norms every order of summation gets exactly: of small whole numbers, times a power of two."""
    if any(leaf.parts.shape[-1] > 1 for leaf in members) or (norm.lo != norm.hi).any() or p not in {1, 2}:
        return np.bool_(False)
    root = np.asarray(norm.lo)
    usual = ((root > 1e-10) & (root < 1e15)).all() and not any(leaf.bad.any() for leaf in members)
    unit = np.exp2(np.floor(np.log2(np.where(usual, root, 1))) - 11)
    whole = [
        ((leaf.parts.lo[..., 0] / np.expand_dims(unit, one)) % 1 == 0).all(axis=one)
        for leaf, one in zip(members, over, strict=True)
    ]
    return usual & np.logical_and.reduce(whole) & ((root / unit) % 1 == 0)


# Curves.


def _curve(curve: Any, n: Span, limit: Span) -> Span:
    """Return the factor of norms that are limited."""
    one, zero = exact(np.ones(n.shape), n.precision), exact(np.zeros(n.shape), n.precision)
    below, nothing = within(n, limit), np.where(n.hi <= 0, YES, np.where(n.lo > 0, NO, MAYBE))
    if curve == "hard":
        factor = limit / n
        return either(below, one, Span(np.minimum(factor.lo, 1), np.minimum(factor.hi, 1), n.precision))
    if curve == "reject":
        return either(below, one, zero)
    if curve == "normalize":
        return either(nothing, one, limit / n)
    if curve == "root":
        inner, lost = _curve("hard", n, limit), 2.0**-1022 if n.precision.ulp < 2**-30 else 2.0**-126
        return Span(np.maximum(inner.lo - lost, 0), inner.hi + lost * (inner.hi < 1), inner.precision).sqrt()
    if isinstance(curve, tuple):
        kind, gamma = curve
        return limit / (n + (gamma if kind == "regularized" else exact(gamma, n.precision) / (n + gamma)))
    # These depend on limit/norm alone, and rise with it.
    ratio = limit / n
    functions = {
        "soft": lambda x: np.where(np.isinf(x), 1, x / (1 + np.where(np.isinf(x), 0, x))),
        "smooth": lambda x: np.where(x > 1e30, 1, x / np.sqrt(1 + np.where(x > 1e30, 0, x) ** 2)),
        "tanh": lambda x: np.where(x > 1e15, 1, x * np.tanh(1 / np.where((x > 0) & (x < 1e15), x, 1))),
    }
    factor = ratio.each(functions[curve])
    factor = Span(np.maximum(factor.lo, 0), np.minimum(factor.hi, 1), n.precision)
    return either(nothing, one, factor)
