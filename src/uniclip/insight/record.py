# SPDX-License-Identifier: MIT
"""A recorded run: its columns as NumPy arrays.

A file of `uniclip.insight.Recorder` is JSON Lines. The first line is a header, with the version of the format, and the
rule if it is known; a run that goes on with another rule has another header there::

    {"uniclip": 1, "rule": "uc.by_global_norm(1.0)"}

Then there is one line for each step::

    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3}

``norm`` is the largest norm before clipping, ``limit`` the smallest limit, ``factor`` the smallest factor, ``share``
the share of the factors that are not 1, as in `uniclip.Report.scalars`. Where they exist there are also ``threshold``,
``skipped`` (true or false), ``loss``, the user's own numbers, and ``leaves``, the norms of all leaves by their names.
NaN and ∞ are ``null``; only if a norm or a gradient is not finite, the line has ``"finite": false``. A ``loss`` of
``null`` was not finite. A ``limit`` of ``null`` limits nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np  # noqa: TC002 - the documentation reads the types

FORMAT = 1
"""The version of the format, in the header as ``"uniclip"``."""
BEGINNING = b'{"uniclip"'
"""The beginning of a recorded run."""
LOGGED = "clip/"
"""What the names of a report's scalars begin with, and those in the file do not."""
OWN = frozenset({"uniclip", "step", "norm", "limit", "threshold", "factor", "share", "finite", "skipped", "leaves"})
"""The keys of a line that are neither the loss nor the user's own."""


class Record(NamedTuple):
    """A recorded run of n steps, returned by `read`.

    Attributes
    ----------
    steps : (n,) array of int64
        Ascending.
    norms, limits, thresholds, factors, shares : (n,) array of float64
        The largest norm before clipping, the smallest limit (∞ for none), the smallest norm that is clipped, the
        smallest factor, the share of the factors that are not 1. NaN where unknown, or not finite.
    finite, skipped : (n,) array of bool
        Whether all gradients and norms of the step were finite, and whether the rule skipped the step.
    losses : (n,) array of float64
        ∞ where the loss was not finite, NaN where none was recorded.
    leaves : (m, k) array of float64
        The norms of k leaves at the m steps where they were recorded; NaN where a norm is not finite, 0 where a leaf
        had no gradient.
    leaf_steps : (m,) array of int64
        The steps where norms of leaves were recorded.
    labels : list of str
        The names of the k leaves.
    rule : str
        The rule as source text, the last one if there were several; empty if unknown.
    extra : dict of str to (n,) array of float64
        The user's own numbers.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> record.steps[record.norms > 10]
    array([300])
    >>> round(float(record.shares.mean()), 2)  # the share of steps that were clipped
    0.47
    """

    steps: np.ndarray[Any, Any]
    norms: np.ndarray[Any, Any]
    limits: np.ndarray[Any, Any]
    thresholds: np.ndarray[Any, Any]
    factors: np.ndarray[Any, Any]
    shares: np.ndarray[Any, Any]
    finite: np.ndarray[Any, Any]
    skipped: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]
    leaves: np.ndarray[Any, Any]
    leaf_steps: np.ndarray[Any, Any]
    labels: list[str]
    rule: str
    extra: dict[str, np.ndarray[Any, Any]]
