# SPDX-License-Identifier: MIT
"""Replay another rule on recorded norms."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from uniclip._core.tree import flatten
from uniclip._errors import check, needs, summarize
from uniclip.compose import AnyRule, as_rule
from uniclip.insight.record import INSTALL, Record
from uniclip.report import UNLIMITED
from uniclip.rule import Rule
from uniclip.scopes import all_leaves, each_leaf

Array: TypeAlias = np.ndarray[Any, Any]


class Replay(NamedTuple):
    """What a rule would have done at n steps, returned by `replay`.

    Attributes
    ----------
    limits, factors : (n,) or (n, k) array of float64
        The limits of the norms, ∞ for none, and the factors; one for each norm of the rule.
    skipped : (n,) array of bool
        Whether the rule would have skipped the step.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> replayed = insight.replay(record.norms, uc.by_global_norm(2.0))
    >>> record.steps[replayed.factors < 1]
    array([220, 248, 260, 271, 300])
    """

    limits: Array
    factors: Array
    skipped: Array


def replay(norms: Any, rule: AnyRule, losses: Any = None) -> Replay:
    """Return what a rule would have done on the norms of a recorded run.

    The rule is run on gradients of one entry, the norm, in float64, from its first step on. So the
    result is exact for rules whose factors depend only on the norms, if these are the rule's own:
    for a rule with one norm, those of all leaves; for one with a norm for each leaf, ``(n, k)``,
    recorded with ``leaves="all"``.

    Parameters
    ----------
    norms : (n,) or (n, k) array
        ``record.norms`` or ``record.leaves``; NaN where a gradient was not finite. Of k norms, 0
        stands for a gradient that was absent.
    rule : Rule
        Its scope is `uniclip.scopes.all_leaves` or `uniclip.scopes.each_leaf`, and its limit does
        not need the parameters.
    losses : (n,) array, optional
        ``record.losses``, for `uniclip.skip_spikes`.

    Returns
    -------
    Replay

    Raises
    ------
    TypeError
        If it is another kind of rule, or has another scope.
    ValueError
        If ``norms`` has another number of dimensions, or is of one norm where the rule has one for
        each leaf; or if the rule needs the parameters.
    FloatingPointError
        If a step is not finite, and the rule has the policy ``"raise"``, which would have stopped
        there.
    ModuleNotFoundError
        If tqdm, which shows the progress if it takes more than a second, is not installed.

    Notes
    -----
    Norms are recorded before clipping, so record a run that was clipped: without clipping, later
    gradients have other sizes. For the same reason this is what the rule would have done on
    **these** gradients; had it been used, later gradients would have differed.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> replayed = insight.replay(record.norms, uc.zclip())
    >>> float(np.mean(replayed.factors < 1)), float(replayed.factors.min().round(3))
    (0.0325, 0.049)
    """
    with needs("tqdm", INSTALL):
        from tqdm import tqdm  # noqa: PLC0415 - not everybody has it
    own: Any = as_rule(rule)
    check("norms", norms, not isinstance(norms, Record), "record.norms or record.leaves")
    norms = np.asarray(norms, np.float64)
    fits = isinstance(own, Rule) and own.scope in {all_leaves, each_leaf}
    check("rule", own, fits, "a uc.Rule with one norm of all leaves, or one for each leaf")
    if norms.ndim not in {1, 2}:
        msg = f"norms must be record.norms, (n,), or record.leaves, (n, k), got {summarize(norms)}"
        raise ValueError(msg)
    if norms.ndim == 1 and own.scope == each_leaf:
        msg = (
            f"{summarize(own)} has a norm for each leaf: give record.leaves, (n, k), recorded with "
            'leaves="all"'
        )
        raise ValueError(msg)
    state = own.init(list(np.ones((*norms.shape[1:], 1)) if norms.ndim > 1 else np.ones((1, 1))))
    losses = np.full(len(norms), math.nan) if losses is None else np.asarray(losses, np.float64)
    limits, factors, skipped = [], [], []
    for norm, loss in zip(
        tqdm(norms, "replay", unit=" steps", delay=1, leave=False), losses, strict=True
    ):
        grads = [one.reshape(1) if one or norms.ndim == 1 else None for one in np.atleast_1d(norm)]
        _, state, report = own.update(grads, state, loss=None if math.isnan(loss) else float(loss))
        limits.append(_numbers(report.limits))
        factors.append(_numbers(report.factors))
        skipped.append(report.skipped is not None and bool(report.skipped))
    shape = norms.shape if own.scope == each_leaf else norms.shape[:1]
    found = np.asarray(limits, np.float64).reshape(shape)
    found[found >= UNLIMITED] = math.inf
    return Replay(found, np.asarray(factors, np.float64).reshape(shape), np.asarray(skipped, bool))


def _numbers(values: Any) -> list[float]:
    """Return the numbers in a field of a report, NaN for a gradient that was absent."""
    return [math.nan if one is None else float(one) for one in flatten(values)[0]]
