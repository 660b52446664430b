# SPDX-License-Identifier: MIT
"""The norms that a rule would have measured at the steps of a recorded run."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from uniclip._repr import short
from uniclip.insight.record import Record
from uniclip.norms import Norm
from uniclip.rules import Rule, norm_of
from uniclip.scopes import Scope, everything

Array: TypeAlias = np.ndarray[Any, Any]

_EVERY_LEAF = 'replay needs the norms of leaves at every step: record with Recorder(..., leaves="all")'
_ROUNDED = 5e-9
"""The largest relative error of a float32 number with nine digits in a file."""


class Measured(NamedTuple):
    """The inputs of a rule at n steps, with one norm each or k of them.

    Attributes
    ----------
    steps : (n,) array of int64
    norms : (n,) or (n, k) array
        NaN where not finite, 0 where absent.
    absent : (n,) or (n, k) array of bool
        Whether there was no gradient for a norm.
    finite : (n,) array of bool
        Whether all gradients of the step were.
    losses : (n,) array of float64
        NaN where there is none, ∞ where it was not finite.
    """

    steps: Array
    norms: Array
    absent: Array
    finite: Array
    losses: Array


def measured(record: Record, rule: Rule) -> Measured:
    """Return the steps with norms, and the norms as the rule measures them."""
    joint = rule.scope.label is everything
    known_order = record.ord is not None or not record.labels
    whole = joint and record.scope == "all_leaves" and known_order
    norms: Array = record.norms if whole else _of_leaves(record, rule)
    order = record.ord if known_order else 2.0  # of leaves where the rule's own norm has none
    if order != rule.norm.ord:
        has = "no order that is known" if order is None else f"the order {order:g}"
        msg = f"the norms of the record have {has}, {short(rule)} takes those of the order {rule.norm.ord:g}"
        raise TypeError(msg)
    dtype = _dtype(norms)
    known = ~np.isnan(norms) | ~record.finite if whole else np.ones(len(norms), bool)
    absent = _absent(record)
    norms = norms if whole else np.where(absent, 0.0, norms)
    if joint and not whole:
        norms = norm_of(norms, Scope(axes=(1,)), Norm(rule.norm.ord))
    if rule.norm.size_power:
        norms = norms / _sizes(record, rule, absent, joint=joint) ** rule.norm.size_power
    absent = absent.all(axis=1) & (absent.shape[1] > 0) if joint else absent
    _refuse_gaps(record, rule, record.steps[known], absent)
    return Measured(
        record.steps[known], norms.astype(dtype)[known], absent[known], record.finite[known], record.losses[known]
    )


def _refuse_gaps(record: Record, rule: Rule, steps: Array, absent: Array) -> None:
    """Refuse a record without steps, or gradients, that the rule needs at every step."""
    gaps = np.flatnonzero(np.diff(steps) != 1)
    if rule.memory and len(gaps):
        before, after = steps[gaps[0]], steps[gaps[0] + 1]
        msg = (
            f"{short(rule)} remembers every step, and after step {before} the record goes on with step {after}: "
            "replay needs a record of every step"
        )
        raise TypeError(msg)
    if rule.by_leaf and absent.any():
        number, leaf = np.argwhere(absent)[0]
        label = [name for name, there in zip(record.labels, _present(record), strict=True) if there][leaf]
        msg = (
            f"{short(rule)} remembers each leaf by itself, and {short(label)} had no gradient at step {steps[number]} "
            "and one at another: it needs the same ones at every step"
        )
        raise TypeError(msg)


def _dtype(norms: Array) -> Any:
    """Return the dtype in which norms were measured."""
    with np.errstate(over="ignore"):
        single = norms.astype(np.float32)
    return np.float32 if np.allclose(norms, single, rtol=_ROUNDED, atol=0.0, equal_nan=True) else np.float64


def _every_leaf(record: Record) -> bool:
    """Return whether the norms of leaves were recorded at every step."""
    return bool(record.labels) and np.array_equal(record.leaf_steps, record.steps)


def _of_leaves(record: Record, rule: Rule) -> Array:
    """Return the norms of leaves, if they were recorded at every step."""
    if not _every_leaf(record):
        msg = f"{short(rule)}: {_EVERY_LEAF}"
        raise TypeError(msg)
    leaves: Array = record.leaves[:, _present(record)]
    return leaves


def _present(record: Record) -> Array:
    """Return which leaves had a gradient at any step."""
    rows = record.leaves[np.isin(record.leaf_steps, record.steps[record.finite])]
    return ~np.isnan(rows).all(axis=0) if len(rows) else np.ones(len(record.labels), bool)


def _absent(record: Record) -> Array:
    """Return which of these leaves had no gradient at each step, where known: steps that are not finite are marked."""
    present = _present(record)
    if not _every_leaf(record):
        return np.zeros((len(record.steps), int(present.sum())), bool)
    absent: Array = np.isnan(record.leaves[:, present]) & record.finite[:, None]
    return absent


def _sizes(record: Record, rule: Rule, absent: Array, *, joint: bool) -> Any:
    """Return the number of entries of each norm, at least 1."""
    if not (record.labels and (record.sizes > 0).all()):
        msg = f"{short(rule)} divides norms by the sizes of leaves, which the record does not hold"
        raise TypeError(msg)
    sizes = record.sizes[_present(record)]
    return np.maximum(np.where(absent, 0, sizes).sum(axis=1), 1) if joint else sizes
