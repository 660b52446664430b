# SPDX-License-Identifier: MIT
"""Replay another rule on the norms of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from uniclip._core.containers import flatten
from uniclip._errors import check, needs, summarize
from uniclip._types import Tree
from uniclip.compose import AnyRule, as_rule
from uniclip.insight.record import INSTALL, Booleans, Floats, Record
from uniclip.report import UNLIMITED
from uniclip.rule import Rule
from uniclip.scopes import all_leaves, each_leaf

ArrayLike: TypeAlias = npt.ArrayLike


class Replay(NamedTuple):
    """The limits, factors and skipped steps of a replayed rule, returned by `replay`.

    Attributes
    ----------
    limits, factors : (n,) or (n, k) array of float64
        The limits of the norms, infinity for none, and the factors; one for each norm of the rule.
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

    limits: Floats
    factors: Floats
    skipped: Booleans


def replay(norms: ArrayLike, rule: AnyRule, losses: ArrayLike | None = None) -> Replay:
    """Return what a rule would have done on the norms of a recorded run.

    The rule runs on gradients of one element, the norm, in float64, from its first step on. So the
    result is exact for rules whose factors depend only on the norms, if the recorded norms are
    those of the rule: for a rule with one norm, the norms of all leaves together; for a rule with a
    norm for each leaf, an ``(n, k)`` array, recorded with ``leaves="all"``.

    Parameters
    ----------
    norms : (n,) or (n, k) array
        ``record.norms`` or ``record.leaves``; NaN for a non-finite gradient. Among k norms, 0
        stands for an absent gradient.
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
        If ``rule`` is not a `uniclip.Rule`, or has another scope.
    ValueError
        If ``norms`` has another number of dimensions, or one norm a step for a rule with a norm for
        each leaf; or if the rule needs the parameters.
    FloatingPointError
        If a step is non-finite and the rule has the policy ``"raise"``, which would have stopped
        there.
    ModuleNotFoundError
        If tqdm is not installed, which shows the progress of a replay of more than a second.

    Notes
    -----
    Norms are recorded before clipping, so record a run that was clipped: without clipping, later
    gradients have other sizes. For the same reason, the result shows what the rule would have done
    on **these** gradients; with the rule in use, later gradients would have differed.

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
    replayed = _check_rule(rule)
    check("norms", norms, not isinstance(norms, Record), "record.norms or record.leaves")
    norms = np.asarray(norms, np.float64)
    _check_dimensions(norms, replayed)

    if losses is None:
        losses = np.full(len(norms), math.nan)
    losses = np.asarray(losses, np.float64)

    # A norm of 0 stands for an absent gradient, so the first state needs others.
    state = replayed.init(_to_gradients(np.ones(norms.shape[1:])))
    limits, factors, skipped = [], [], []
    steps = tqdm(norms, "replay", unit=" steps", delay=1, leave=False)
    for norm, loss in zip(steps, losses, strict=True):
        loss_or_none = None if math.isnan(loss) else float(loss)
        _, state, report = replayed.update(_to_gradients(norm), state, loss=loss_or_none)

        limits.append(_to_numbers(report.limits))
        factors.append(_to_numbers(report.factors))
        skipped.append(report.skipped is not None and bool(report.skipped))

    # One norm a step is a vector in the result, too.
    shape = norms.shape if replayed.scope == each_leaf else norms.shape[:1]
    limit_array = np.asarray(limits, np.float64).reshape(shape)
    limit_array[limit_array >= UNLIMITED] = math.inf
    factor_array = np.asarray(factors, np.float64).reshape(shape)
    return Replay(limit_array, factor_array, np.asarray(skipped, bool))


def _check_rule(rule: AnyRule) -> Rule:
    """Return a rule; raise if it needs more of the gradients than their norms."""
    checked = as_rule(rule)
    if isinstance(checked, Rule) and checked.scope in {all_leaves, each_leaf}:
        return checked
    msg = (
        "rule must be a uc.Rule with one norm of all leaves, or one for each leaf, got "
        f"{summarize(checked)}"
    )
    raise TypeError(msg)


def _check_dimensions(norms: Floats, rule: Rule) -> None:
    """Raise unless norms have the number of dimensions that a rule needs."""
    if norms.ndim not in {1, 2}:
        msg = (
            f"norms must have one or two dimensions, got {summarize(norms)}; pass record.norms, "
            "(n,), or record.leaves, (n, k)"
        )
        raise ValueError(msg)
    if norms.ndim == 1 and rule.scope == each_leaf:
        msg = (
            f"{summarize(rule)} has a norm for each leaf; pass record.leaves, (n, k), recorded "
            'with leaves="all"'
        )
        raise ValueError(msg)


def _to_gradients(norm: Floats) -> Sequence[Floats | None]:
    """Return gradients of one element each that have these norms."""
    if norm.ndim == 0:
        return [norm.reshape(1)]
    # A leaf without a gradient was recorded as 0.
    return [leaf_norm.reshape(1) if leaf_norm else None for leaf_norm in norm]


def _to_numbers(values: Tree) -> list[float]:
    """Return the numbers in a field of a report, NaN for an absent gradient."""
    numbers, _ = flatten(values)
    return [math.nan if number is None else float(number) for number in numbers]
