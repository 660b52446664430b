# SPDX-License-Identifier: MIT
"""A recorded run: its columns as NumPy arrays, and reading them from a file.

A file of `uniclip.insight.Recorder` is JSON Lines. The first line is a header::

    {"uniclip": 1, "rule": "uc.by_global_norm(1.0)", "scope": "all_leaves", "ord": 2, "every": 100,
     "leaves": ["w", "b"], "sizes": [1000, 10]}

``"uniclip"`` is the version of the format. ``"scope"`` is the scope of ``norm``: ``"all_leaves"``, ``"each_leaf"`` (the
largest is written) or ``"other"``; ``"ord"`` is the order of that norm, ``"inf"`` for ∞, or ``null`` if it has none
(RMS, several rules). ``"leaves"`` and ``"sizes"`` are there if norms of leaves are recorded.
Then there is one line for each step::

    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3}

``norm`` is the largest norm before clipping, ``limit`` the smallest limit, ``factor`` the smallest factor, ``share``
the share of the factors that are not 1, as in `uniclip.Report.scalars`. Where they exist there are also ``threshold``,
``skipped`` (true or false), ``loss``, the user's own numbers, and ``leaves``, the norms of all leaves in the order of
the header, ``null`` for a leaf without a gradient. NaN and ∞ are ``null``; only if a norm or a gradient is not finite,
the line has ``"finite": false``. A ``loss`` of ``null`` was not finite. A ``limit`` of ``null`` limits nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

FORMAT = 1
"""The version of the format, in the header as ``"uniclip"``."""
OWN = frozenset(
    {"uniclip", "step", "norm", "limit", "threshold", "factor", "share", "finite", "skipped", "loss", "leaves"}
)
"""The keys of a line that are not the user's own."""
BEGINNING = b'{"uniclip"'
"""The beginning of a recorded run."""


class Record(NamedTuple):
    """A recorded run of n steps, returned by `read`.

    Attributes
    ----------
    steps : (n,) array of int64
        Ascending.
    norms, limits, factors, shares : (n,) array of float64
        The largest norm before clipping, the smallest limit (∞ for none), the smallest factor, the share of the
        factors that are not 1. NaN where unknown, or not finite.
    finite, skipped : (n,) array of bool
        Whether all gradients and norms of the step were finite, and whether the rule skipped the step.
    thresholds : (n,) array of float64
        NaN where there is none.
    losses : (n,) array of float64
        ∞ where the loss was not finite, NaN where none was recorded.
    leaves : (m, k) array of float64
        The norms of k leaves at the m steps where they were recorded; NaN where a norm is not finite, or the leaf had
        no gradient.
    leaf_steps : (m,) array of int64
        The steps where norms of leaves were recorded.
    labels : list of str
        The labels of the k leaves.
    sizes : (k,) array of int64
        The number of entries of each leaf; 0 where unknown.
    rule : str
        The rule as source text; empty if unknown.
    scope : str
        The scope of ``norms``: ``"all_leaves"``, ``"each_leaf"`` (the largest) or ``"other"``.
    ord : float or None
        The order of the norms, 2 for Euclidean norms; ``None`` if they have none.
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
    factors: np.ndarray[Any, Any]
    shares: np.ndarray[Any, Any]
    finite: np.ndarray[Any, Any]
    skipped: np.ndarray[Any, Any]
    thresholds: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]
    leaves: np.ndarray[Any, Any]
    leaf_steps: np.ndarray[Any, Any]
    labels: list[str]
    sizes: np.ndarray[Any, Any]
    rule: str
    scope: str
    ord: float | None
    extra: dict[str, np.ndarray[Any, Any]]

    def before(self, count: int) -> Record:
        """Return the record of the first ``count`` steps."""
        first: dict[str, Any] = {
            name: value[:count]
            for name, value in self._asdict().items()
            if name not in {"leaves", "leaf_steps", "sizes"} and isinstance(value, np.ndarray)
        }
        rows = int(np.isin(self.leaf_steps, first["steps"]).sum())
        return self._replace(
            **first,
            leaves=self.leaves[:rows],
            leaf_steps=self.leaf_steps[:rows],
            extra={name: values[:count] for name, values in self.extra.items()},
        )
