# SPDX-License-Identifier: MIT
"""Run a rule on norms: on gradients that have these norms, by the code that clips."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np

from uniclip._repr import counted
from uniclip.ask import Step
from uniclip.curves import reject
from uniclip.insight.measured import Measured
from uniclip.insight.shares import by_step
from uniclip.layout import Opened, opened
from uniclip.limits import NoState
from uniclip.norms import L2
from uniclip.rules import Rule
from uniclip.scopes import each_entry
from uniclip.step import Decision, decide

Array: TypeAlias = np.ndarray[Any, Any]

_SLOW = 1.0
"""The seconds after which a replay shows its progress."""


def at_once(rule: Rule, seen: Measured) -> tuple[Array, Array, Array]:
    """Return limits, factors and skipped steps of a constant limit, with all norms in one step."""
    norms = seen.norms
    entries = replace(rule, scope=each_entry, norm=L2, nonfinite="propagate")
    decision = _decided(entries, opened([norms]), NoState(), None)
    limits = np.broadcast_to(decision.limits[0], norms.shape).astype(norms.dtype)
    factors: Array = decision.factors[0][0]
    skipped = np.zeros(len(norms), bool)
    if rule.nonfinite == "skip":
        factors[~seen.finite], skipped = 0.0, ~seen.finite
    if rule.curve is reject:
        gone, absent = by_step(factors == 0), by_step(seen.absent)
        skipped |= (gone | absent).all(axis=1) & gone.any(axis=1)
    return limits, factors, skipped


def step_by_step(rule: Rule, seen: Measured) -> tuple[Array, Array, Array]:
    """Return limits, factors and skipped steps, running the rule on leaves with two entries: the norm and 0.

    The second entry is NaN where not all was finite, for the policy that still has a norm there.
    """
    rows, absent = by_step(seen.norms), by_step(seen.absent)
    leaves = np.zeros((rows.shape[1], 2), rows.dtype)
    every = opened(list(leaves))
    limits, factors, skipped = np.ones_like(rows), np.ones_like(rows), np.zeros(len(rows), bool)
    state, spoiled = rule.init(list(leaves)), ~seen.finite & (rule.nonfinite == "zero")
    for number in _shown(len(rows)):
        leaves[:, 0], leaves[:, 1] = rows[number], math.nan if spoiled[number] else 0.0
        here = ~absent[number]
        given = (
            every if here.all() else opened([leaf if there else None for leaf, there in zip(leaves, here, strict=True)])
        )
        decision = _decided(rule, given, state, _loss(seen.losses[number]))
        if decision.limits:  # all leaves together have a norm without gradients, too
            some = here | (not here.any())
            limits[number, some], factors[number, some] = decision.limits[0], decision.factors[0]
        skipped[number], state = bool(decision.skipped), decision.state
    return limits.reshape(seen.norms.shape), factors.reshape(seen.norms.shape), skipped


def _loss(recorded: float) -> float | None:
    """Return the loss of a step for the rule: NaN if it was not finite, ``None`` if unknown."""
    if math.isnan(recorded):
        return None
    return float(recorded) if math.isfinite(recorded) else math.nan


def _decided(rule: Rule, given: Opened, state: Any, loss: float | None) -> Decision:
    """Run a step of the rule without scaling."""
    with given.backend.quiet(given.first):
        return cast("Decision", decide(rule, given, state, Step(loss=loss)))


def _shown(count: int) -> Iterator[int]:
    """Yield the numbers of steps; after a second show a progress bar or, without tqdm, the number of steps."""
    if importlib.util.find_spec("tqdm") is not None:
        bar = importlib.import_module("tqdm").tqdm
        yield from bar(range(count), "replay", unit=" steps", delay=_SLOW, leave=False)
        return
    begun, said = time.perf_counter(), False
    for number in range(count):
        if not said and time.perf_counter() - begun > _SLOW:
            sys.stderr.write(f"replay of {counted(count, 'step')} ...\n")
            said = True
        yield number
