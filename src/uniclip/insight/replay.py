# SPDX-License-Identifier: MIT
"""Replay another rule on the norms of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from uniclip._repr import counted, short
from uniclip.combine import Chain, Masked
from uniclip.insight.measured import measured
from uniclip.insight.record import Record
from uniclip.insight.running import at_once, step_by_step
from uniclip.insight.shares import by_step, share_and_error
from uniclip.limits import Constant
from uniclip.norms import Norm
from uniclip.presets import by_global_norm
from uniclip.rules import AnyRule, Rule, as_rule
from uniclip.scopes import all_leaves, each_leaf, everything

Array: TypeAlias = np.ndarray[Any, Any]

_POWERS = -122, 123
"""The powers of 2 between which limits of float32 are tried."""


class Replay(NamedTuple):
    """The effect of a rule at n steps, returned by `replay`.

    Attributes
    ----------
    steps : (n,) array of int64
    norms, limits, factors : (n,) or (n, k) array of float64
        As in `uniclip.Report`, for all leaves together or for each of the k leaves that ever had a gradient: the norms
        that the rule would have measured, their limits (∞ for none) and factors. A factor that is unknown or does not
        exist is NaN.
    share : float
        The share of the factors that are not 1, as ``"clip/share"`` of `uniclip.Report.scalars`; NaN without factors.
    error : float
        Half the width of a 90 % prediction interval for the share in another part of the run, estimated from blocks of
        steps; from 0 to 1, NaN if there are too few steps.
    skipped : (n,) array of bool
        Whether the rule would have skipped the step.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> replayed = insight.replay(record, uc.by_global_norm(2.0))
    >>> replayed.steps[replayed.factors < 1]
    array([220, 248, 260, 271, 300])
    """

    steps: Array
    norms: Array
    limits: Array
    factors: Array
    share: float
    error: float
    skipped: Array

    def __str__(self) -> str:
        """Return the replay in one line."""
        of = counted(len(self.steps), "step") if self.factors.ndim == 1 else f"{self.factors.size:,} norms"
        words = [f"clipped {percent(self.share, self.error)} of {of}"]
        if np.isfinite(self.factors).any():
            words.append(f"smallest factor {np.nanmin(self.factors):.3g}")
        if self.skipped.any():
            words.append(f"skipped {counted(int(self.skipped.sum()), 'step')}")
        return ", ".join(words)


class WhatIf(NamedTuple):
    """The effect of constant limits, returned by `what_if`.

    Attributes
    ----------
    max_norms, shares, errors, factors : (n,) array of float64
        The limits; the share of steps that each would have clipped, and its error, as in `Replay`; the smallest
        factor.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> insight.what_if(record, [0.5, 1.0, 2.0]).shares.round(3)
    array([0.985, 0.472, 0.012])
    """

    max_norms: Array
    shares: Array
    errors: Array
    factors: Array

    def __str__(self) -> str:
        """Return the table as text."""
        rows = [
            f"{limit:>9.4g}  {percent(share, error):>13}  {factor:>15.3g}"
            for limit, share, error, factor in zip(*self, strict=True)
        ]
        return "\n".join([f"{'max_norm':>9}  {'clipped':>13}  {'smallest factor':>15}", *rows])


def percent(share: float, error: float) -> str:
    """Return a share and its error as text, in percent."""
    if math.isnan(share):
        return "unknown"
    width = float(f"{100 * error:.2g}")  # to two digits
    return f"{100 * share:.3g} %" if math.isnan(error) else f"{100 * share:.3g} ± {width:g} %"


def replay(record: Record, rule: AnyRule) -> Replay:
    """Return what a rule would have done on the norms of a recorded run.

    The rule itself is run on gradients with these norms, so that the result is exact for every rule whose factors
    depend only on them. It runs in float32 if all norms are float32 numbers (to nine digits), else in float64.

    Parameters
    ----------
    record : Record
    rule : Rule
        With the norms of all leaves together: `uniclip.by_global_norm`, `uniclip.to_global_norm`, `uniclip.autoclip`,
        `uniclip.zclip`, `uniclip.log_zscore`, `uniclip.skip_spikes` (with the losses if recorded), and any
        `uniclip.Rule` over all leaves whose limit needs nothing else. With the norms of each leaf at every step, these
        and `uniclip.by_norm`, `uniclip.percentile_clipping`, `uniclip.adagc`, `uniclip.norm_growth`,
        `uniclip.adagn`, and, with their sizes, `uniclip.by_average_norm` and `uniclip.by_block_rms`.

    Returns
    -------
    Replay
        For the steps with recorded norms; NaN where a leaf had no gradient.

    Raises
    ------
    TypeError
        If norms alone do not determine the result: the rule uses the parameters (`uniclip.agc`, `uniclip.larc`,
        `uniclip.cowclip`); its norms cover parts of leaves (``axis``, examples) or entries (`uniclip.spam`); it is
        elementwise (`uniclip.by_value`); it is a rule made of rules (`uniclip.chain`, `uniclip.masked`); or it groups
        leaves by paths, which a record does not hold (`uniclip.by_group_norm`). And if the record lacks what the rule
        needs: norms of its order, norms of leaves, their sizes, or, for a rule with memory, steps, or gradients of a
        leaf at some steps.
    FloatingPointError
        If a step is not finite, and the rule has the policy ``"raise"``, which would have stopped there.

    Notes
    -----
    Norms are recorded before clipping, so record a run that was clipped: without clipping, later gradients have other
    sizes. For the same reason the result is what the rule would have done on **these** gradients; had it been used,
    later gradients would have differed.

    A leaf whose norm is null at a step with finite gradients had no gradient there, and is ``None`` for the rule; a
    leaf that never had a gradient is left out.

    If a record does not tell the order of its norms, as with root mean squares, the norms of leaves are Euclidean.

    The memory of a rule begins with the first recorded step. At a step that is not finite the rule's policy applies;
    with ``"zero"`` the norm of the rest is known only if the recorded rule had that policy, too.

    A rule with memory takes about a second for 8,000 steps, and shows a progress bar on standard error if it takes
    longer; a constant limit takes a second for millions.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> print(insight.replay(record, uc.zclip()))
    clipped 3.25 ± 5.2 % of 400 steps, smallest factor 0.049
    """
    own = _norm_rule(rule)
    seen = measured(record, own)
    norms = seen.norms
    unit = replace(own, norm=Norm(own.norm.ord), scope=each_leaf if norms.ndim > 1 else all_leaves)
    if own.nonfinite != "zero":  # only that policy sees a norm where not all is finite
        norms = _spoiled(norms, seen.finite)
    seen = seen._replace(norms=norms, finite=seen.finite & np.isfinite(by_step(norms)).all(axis=1))
    if own.nonfinite == "raise" and not seen.finite.all():
        first = seen.steps[~seen.finite][0]
        msg = f"step {first} is not finite: with nonfinite='raise' the rule would have stopped there"
        raise FloatingPointError(msg)
    constant = type(own.limit) is Constant and not getattr(own.limit.value, "shape", ())
    limits, factors, skipped = (at_once if constant else step_by_step)(unit, seen)
    if own.nonfinite == "zero":
        factors[~np.isfinite(norms)] = math.nan
    limits[limits >= np.finfo(norms.dtype).max] = math.inf
    gone = seen.absent & (norms.ndim > 1)  # without any gradient the norm of all leaves is 0
    share, error = share_and_error(factors != 1, gone)
    norms, limits, factors = (np.where(gone, math.nan, one).astype(np.float64) for one in (norms, limits, factors))
    return Replay(seen.steps, norms, limits, factors, share, error, skipped)


def _norm_rule(rule: AnyRule) -> Rule:
    """Return the rule if it uses only norms of all leaves, or of each leaf; else refuse it."""
    own, why = as_rule(rule), ""
    if isinstance(own, Chain):
        why = "runs rules one after the other, and only the first sees the norms that are recorded: replay that one"
    elif isinstance(own, Masked):
        why = "leaves some leaves out, and a record does not hold which these are: replay the rule itself"
    elif not isinstance(own, Rule):
        why = "works on the entries of gradients, and a record holds norms"
    elif "params" in own.limit.needs:
        why = "needs the parameters, and a record holds norms of gradients"
    elif own.scope.axes is not None:
        why = "takes norms of parts of leaves, and a record holds those of whole leaves"
    elif own.scope.label not in {None, everything}:
        why = "groups leaves by their paths, which a record does not hold"
    elif "sizes" in own.limit.needs:
        why = "has a limit that goes by the numbers of entries, and a record holds norms"
    if why:
        msg = f"{short(own)} cannot be replayed: it {why}"
        raise TypeError(msg)
    return cast("Rule", own)


def _spoiled(norms: Array, finite: Array) -> Array:
    """Return the norms, with NaN at a step that is not finite if no norm shows which leaf it was."""
    rows: Array = by_step(norms).copy()
    unknown = ~finite & np.isfinite(rows).all(axis=1)
    rows[unknown] = math.nan
    spoiled: Array = rows.reshape(norms.shape)
    return spoiled


def what_if(record: Record, max_norms: Iterable[float] | None = None) -> WhatIf:
    """Return what constant limits would have done on the norms of a recorded run.

    Parameters
    ----------
    record : Record
        Its steps may be far apart. A step counts as clipped if the norm in ``record.norms`` is above the limit; for a
        rule with norms of leaves that is the largest of them.
    max_norms : sequence of float, optional
        The limits; by default nine powers of 2 around the median of the norms.

    Returns
    -------
    WhatIf
        One row for each limit; none if there are no norms.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> print(insight.what_if(record, [0.5, 1.0, 2.0]))
     max_norm        clipped  smallest factor
          0.5   98.5 ± 1.9 %            0.025
            1    47.2 ± 15 %             0.05
            2   1.25 ± 4.8 %              0.1
    """
    usable = record.norms[np.isfinite(record.norms) & (record.norms > 0)]
    if max_norms is None:
        middle = round(np.clip(np.median(np.log2(usable)), *_POWERS)) if len(usable) else 0
        max_norms = [2.0**power for power in range(middle - 4, middle + 5)] if len(usable) else []
    joint = record._replace(scope="all_leaves", ord=2.0)
    found = [replay(joint, by_global_norm(limit)) for limit in max_norms]
    known = [one.factors[np.isfinite(one.factors)] for one in found]
    least = [float(some.min()) if some.size else math.nan for some in known]
    columns = [list(max_norms), [one.share for one in found], [one.error for one in found], least]
    return WhatIf(*[np.asarray(column, np.float64) for column in columns])
