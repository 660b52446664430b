# SPDX-License-Identifier: MIT
"""Measure what a step needs: norms, accurate and safe from overflow and underflow, joined over processes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np

from uniclip._errors import short
from uniclip._types import Step
from uniclip.backends.arrays import refuse_shape, stacked
from uniclip.backends.base import FITS, HOST, LIBRARY, NUMPY, TRACED, Op, finite_or_zero
from uniclip.choices import Choices
from uniclip.norms import L2, Norm
from uniclip.plan import Measured, Plan
from uniclip.processes import Loss, packed
from uniclip.tree import Opened

_NO_CONTEXT = nullcontext()
_EXACT_POWER = 6
"""The largest power of float32 numbers that float64 holds."""
_FITS = (4.5e-277, 1.7976931348623157e308)
"""Between smallest normal number / eps² and the largest number a sum of squares in float64 is accurate."""


def norms_of(
    plan: Plan,
    trees: list[Opened],
    norm: Norm,
    scalars: list[Any],
    more: list[Any],
    presence: bool,  # noqa: FBT001
) -> tuple[list[list[Any]], list[Any]]:
    """Return the norms of each tree by block, before they are divided by sizes; and what stands beside, joined.

    It decides whether sums are made again, and what is joined. Sums of entries up to float32 are float64; others that
    may have overflowed or underflowed are made again in units of the largest modulus of each norm. ``presence``, how
    many gradients each norm has, and ``scalars`` are joined over all processes, ``more`` over those of ``all_reduce``.
    """
    p = math.inf if plan.entries else norm.ord
    backend, join, here = plan.math.library, plan.join, len(trees) * len(plan.blocks)
    modes = [plan.math.mode] + [plan.math.mode if plan.math.mode in {HOST, TRACED} else LIBRARY for _ in trees[1:]]
    joined: list[Any] = []

    def rows(p: float, units: list[Any] | None = None) -> list[Any]:
        op: Op = "max" if p == math.inf else "sum"
        first = op == "sum" and not joined
        beside, rest = (scalars, more) if first else ([], [])
        found = [*plan.rows(trees, modes, p, units, beside, presence and first), *rest]
        found = found if join is None else packed(plan.math, found, op, join)
        joined.extend(found[here:])
        return found[:here]

    def roots(totals: list[Any]) -> list[Any]:
        return [plan.math.rounded(_root(plan, norm, total)) for total in totals]

    def in_units() -> list[Any]:
        units = [_unit(plan, top) for top in rows(math.inf)]
        return [plan.math.rounded(u * _root(plan, norm, s)) for u, s in zip(units, rows(p, units), strict=True)]

    low = plan.math.narrow and plan.math.double and all([tree.kinds.narrow and tree.kinds.double for tree in trees])
    if p in {1, math.inf}:
        found = [plan.math.rounded(total) for total in rows(p)]
    elif low and p <= _EXACT_POWER:
        found = roots(rows(p))
    elif p != 2 or backend.debug_infs():
        found = in_units()
    else:
        totals = rows(2)
        least, most = _FITS if plan.math.double else FITS
        zero = 0.0 if plan.math.host else -1.0  # where the host reads, the sum of zeros alone is 0
        fits = [((t > least) | (t == zero)) & (t <= most) for t in totals]
        flags = [one.all() if plan.math.host else backend.xp.all(one) for one in fits]
        ok = all(map(bool, flags)) if plan.math.host else plan.math.all(flags)
        found = plan.math.cond(ok, lambda: roots(totals), in_units)
    if not joined and (scalars or more or presence):
        joined = [*plan.rows([], [], 1, None, scalars, presence), *more]
        joined = joined if join is None else packed(plan.math, joined, "sum", join)
    count = len(plan.blocks)
    return [found[number * count : (number + 1) * count] for number in range(len(trees))], joined


def _root(plan: Plan, norm: Norm, total: Any) -> Any:
    """Return the root of sums, with derivatives where they are wanted."""
    if isinstance(total, NUMPY):
        return np.sqrt(total) if norm.ord == 2 else np.power(total, 1 / norm.ord)
    if norm.ord != 2:
        return norm.root(plan.math.library.xp, total)
    if plan.math.mode == LIBRARY:
        return plan.math.library.xp.sqrt(total)
    return plan.math.library.fast_values(_sqrt, L2.root)(total)


def _sqrt(xp: Any, total: Any) -> Any:
    """Return the root, whose derivative is infinite at 0."""
    return xp.sqrt(total)


def _unit(plan: Plan, top: Any) -> Any:
    """Return the unit in which a norm is measured, given the largest modulus: detached, as no norm depends on it."""
    xp = np if isinstance(top, NUMPY) else plan.math.library.xp
    # It stays where its reciprocal is a normal number too; that of zeros is 1, or their second derivative overflows.
    low, high = (2.3e-308, 4e307) if plan.math.double else (1.2e-38, 8e37)
    unit = xp.where(top > 0, xp.clip(top, low, high), xp.ones_like(top))
    return unit if xp is np else plan.math.library.detached(unit)


def measured(rule: Choices, given: Opened, plan: Plan, step: Step, params: Opened | None) -> Measured:
    """Measure what a step needs, joined over processes."""
    with _NO_CONTEXT if plan.math.mode == HOST and plan.join is None else plan.math.library.allow_float64():
        needs, join, power = rule.limit.needs, plan.join, rule.norm.size_power
        looks = rule.nonfinite == "zero" and not (plan.math.host and not plan.covering)
        sized, joins = "sizes" in needs or bool(power), join is not None or bool(plan.covering)
        losses = "loss" in needs and not isinstance(step.loss, Loss) and joins
        presence = joins and not plan.norms_apart and (rule.memory or not plan.one_norm)
        scalars = _as_sums(plan, step.loss) if losses else []
        scalars += [_unsound(plan, given)] if looks else []
        more = plan.sizes(given) if sized else []
        trees = [given] if params is None else [given, params]
        known = step.norm is not None
        if known and params is None and not scalars and not joins:
            found: list[list[Any]] = [[]]
            joined = more
        else:
            found, joined = norms_of(plan, trees, rule.norm, scalars, more, presence)
        left = iter(joined)
        present = [next(left) > 0 for _ in plan.blocks] if presence else None
        loss = _loss(plan, step.loss, [next(left), next(left)] if losses else None) if "loss" in needs else None
        entries_finite = next(left) < 1 if looks else None
        counts, by = plan.counts([next(left) for _ in plan.blocks], power) if sized else (None, [])
        if power:
            found = [[n / d for n, d in zip(norms, by, strict=False)] for norms in found]
        norms = _known(given, plan, step) if known else found[0]
        return Measured(norms, found[1] if params is not None else None, counts, present, loss, entries_finite)


def _unsound(plan: Plan, given: Opened) -> Any:
    """Return how many arrays have entries that are not finite."""
    xp = plan.math.library.xp
    dtype = xp.float64 if plan.math.double else xp.float32
    flags = [xp.astype(xp.logical_not(xp.all(xp.isfinite(given.arrays[n]))), dtype) for n in given.kinds.present]
    if not flags:
        return plan.math.to_library(np.zeros(()))
    return plan.math.library.reduce_rows(stacked(plan.math.library, flags), "sum")


def _as_sums(plan: Plan, loss: Any) -> list[Any]:
    """Return the loss of this process and its count, to be summed over all processes: 0 and 0 without a loss."""
    if loss is None:
        return [np.zeros(()), np.zeros(())]
    xp = plan.math.library.xp
    own = plan.math.library.detached(xp.astype(xp.asarray(loss), xp.float32))
    return [xp.reshape(own, ()), np.ones(())]


def _loss(plan: Plan, loss: Any, sums: list[Any] | None) -> Any:
    """Return the loss of a step in the norms' world, the mean of all processes; ``None`` if there is none."""
    xp, own = plan.math.library.xp, loss is not None
    if sums is not None:
        total, count = (plan.math.to_library(one) for one in sums)
        if own:
            loss = total / count
        elif plan.math.library.readable(count):
            loss = total / count if bool(count > 0) else None
        else:  # -∞, which is no spike, and is not kept
            some = count > 0
            loss = total / xp.where(some, count, xp.ones_like(count)) + xp.log(xp.astype(some, count.dtype))
    elif isinstance(loss, Loss):
        loss = loss()
    if loss is None:
        return None
    loss = plan.math.library.detached(xp.astype(xp.asarray(loss), xp.float32))
    view = plan.math.view(loss)
    return np.asarray(float(loss), np.float32) if view is None else view


def _known(given: Opened, plan: Plan, step: Step) -> list[Any]:
    """Return a given norm as measuring would return it; refuse an invalid one."""
    backend, norms = given.backend, []
    for zero in plan.zeros(given):
        norm = backend.xp.asarray(step.norm, dtype=zero.dtype)
        refuse_shape("norm", norm, zero)
        if backend.readable(norm) and bool(backend.xp.any(norm < 0)):  # NaN is a norm that was measured
            msg = f"norm must be 0 or more, got {short(norm) if norm.shape else norm}"
            raise ValueError(msg)
        norms.append(zero + norm)
    views = [plan.math.view(norm) for norm in norms]
    return norms if any(view is None for view in views) else views


def cleaned(
    rule: Choices, given: Opened, plan: Plan, step: Step, params: Opened | None, found: Measured, norms: list[Any]
) -> tuple[Opened, list[Any], Any]:
    """Return gradients with 0 for entries that are not finite, their norms, and whether there was none of them."""
    if plan.math.host:  # read twice only in a step in which it happens
        flag = found.entries_finite  # where processes hold parts, all of them measure again, or none
        if bool(flag) if flag is not None else all([bool(np.isfinite(np.asarray(n)).all()) for n in found.norms]):
            return given, norms, plan.math.view(np.ones((), np.bool_))
    xp = plan.math.library.xp
    given = given._replace(arrays=[None if array is None else finite_or_zero(xp, array) for array in given.arrays])
    if plan.math.host:
        norms = plan.math.as_norms(measured(rule, given, plan, step, params).norms)
        return given, norms, plan.math.view(np.zeros((), np.bool_))
    again = measured(rule, given, plan, step._replace(loss=None), None) if step.norm is None else found
    return given, plan.math.as_norms(again.norms), found.entries_finite
