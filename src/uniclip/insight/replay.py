# SPDX-License-Identifier: MIT
"""What another rule would have done on the norms that a run recorded."""

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
"""Those of 2 around which limits of float32 are tried."""


class Replay(NamedTuple):
    """What a rule would have done at n steps; what `replay` returns.

    Attributes
    ----------
    steps : (n,) array of int64
    norms, limits, factors : (n,) or (n, k) array of float64
        As in `uniclip.Report`, of all leaves together or of each of the k leaves that ever had a gradient: the norms
        that the rule would have seen, what they were allowed to be (∞ where nothing limits) and what the gradients
        would have been multiplied by. A factor that is not known, or is none, is NaN.
    share : float
        The share of the factors that are not 1, as ``"clip/share"`` of `uniclip.Report.scalars`; NaN without any.
    error : float
        How far from it the share of another part of the run is, at most, in nine of ten cases: between blocks of steps
        of this part it differs so. At least 0, at most 1; NaN if there are too few steps to tell.
    skipped : (n,) array of bool
        Whether the rule would have left out the step.

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
    """What limits would have done; what `what_if` returns.

    Attributes
    ----------
    max_norms, shares, errors, factors : (n,) array of float64
        The limits; the share of the steps that each would have clipped, and its error, as in `Replay`; the smallest
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

    The real rule is run on gradients that have these norms, so that the result is exact for every rule whose factors
    follow from them. It computes in float32 if all norms are float32 numbers (to nine digits), as the
    rule that measured them did, else in float64.

    Parameters
    ----------
    record : Record
    rule : Rule
        From the norms of all leaves together: `uniclip.by_global_norm`, `uniclip.to_global_norm`, `uniclip.autoclip`,
        `uniclip.zclip`, `uniclip.log_zscore`, `uniclip.skip_spikes` (with the losses where they are recorded), and any
        `uniclip.Rule` over all leaves whose limit asks for nothing else. From those of each leaf at every step, these
        and `uniclip.by_norm`, `uniclip.percentile_clipping`, `uniclip.adagc`, `uniclip.norm_growth`,
        `uniclip.adagn`, and, with their sizes, `uniclip.by_average_norm` and `uniclip.by_block_rms`.

    Returns
    -------
    Replay
        Of the steps whose norms are recorded; NaN where a leaf had no gradient.

    Raises
    ------
    TypeError
        If norms do not determine what the rule does: it compares gradients with parameters (`uniclip.agc`,
        `uniclip.larc`, `uniclip.cowclip`); its norms are of parts of leaves (``axis``, examples) or of entries
        (`uniclip.spam`, whose limits are running means of the square of each entry); it is a function of entries
        (`uniclip.by_value`); it is a rule of rules, of which the second sees what the first leaves (`uniclip.chain`),
        or some leaves (`uniclip.masked`); or it groups leaves by their paths, which a record does not hold
        (`uniclip.by_group_norm`). And if the record lacks what the rule looks at: norms of that order, those of leaves,
        their sizes, or, for a rule that remembers, steps, or the gradients of a leaf at some of them.
    FloatingPointError
        If a step is not finite, and the rule has the policy ``"raise"``, which would have stopped there.

    Notes
    -----
    Norms are recorded before clipping, so a run that was clipped can be replayed, and had better be: without clipping
    gradients of another size follow. For the same reason it is what the rule would have done on **these** gradients;
    had it clipped, the later ones would have been others.

    A leaf whose norm is null at a step whose gradients were all finite had no gradient there, and is ``None`` for the
    rule; one that never had a gradient is left out.

    Where a record does not say of what order its norms are, as that of a rule with root mean squares, the norms of
    leaves are Euclidean.

    The memory of a rule begins with the first recorded step. At a step that is not finite the rule does what its policy
    says; with ``"zero"`` the norm of what is left is known only if the recorded rule had that policy, too.

    A rule that remembers takes about a second for 8,000 steps, and shows a progress bar on the standard error if it
    takes longer; a constant limit takes a second for millions.

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
    if own.nonfinite != "zero":  # which alone sees a norm where not all is finite
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
    """Return the rule if norms of all leaves, or of each leaf, are what it looks at; else refuse it."""
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
    """Return the norms, NaN at a step that is not finite if none of them says which leaf it was."""
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
        Its steps may be far apart. A step counts as clipped if the norm in ``record.norms`` is above the limit: of a
        rule with norms of leaves that is the largest of them.
    max_norms : sequence of float, optional
        The limits; nine powers of 2 around the median of the norms if not given.

    Returns
    -------
    WhatIf
        Of as many rows as there are limits; without any norm of none.

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
