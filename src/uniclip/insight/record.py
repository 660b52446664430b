# SPDX-License-Identifier: MIT
"""A recorded run: its columns as NumPy arrays, and reading them from a file.

A file of `uniclip.insight.Recorder` is JSON Lines. The first line is a header::

    {"uniclip": 1, "rule": "uc.by_global_norm(1.0)", "scope": "all_leaves", "ord": 2, "every": 100,
     "leaves": ["w", "b"], "sizes": [1000, 10]}

``"uniclip"`` is the number of the format. ``"scope"`` says what ``norm`` is the norm of: ``"all_leaves"``,
``"each_leaf"`` (the largest is written) or ``"other"``; ``"ord"`` is the order of that norm, ``"inf"`` for ∞, or
``null`` where it is none (RMS, several rules). ``"leaves"`` and ``"sizes"`` are there if norms of leaves are recorded.
Then there is one line for each step::

    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3}

``norm`` is the largest norm before clipping, ``limit`` the smallest limit, ``factor`` the smallest factor, ``share``
the share of the factors that are not 1, as in `uniclip.Report.scalars`. Where they exist there are also ``threshold``,
``skipped`` (true or false), ``loss``, numbers of the user's own, and ``leaves``, the norms of all leaves in the order
of the header, ``null`` for a leaf without a gradient. NaN and ∞ are ``null``; if a norm or a gradient is not finite,
the line says ``"finite": false``, else it says nothing about it. A ``loss`` that is ``null`` was not finite. A limit
that nothing reaches is ``null``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

FORMAT = 1
"""The number of the format, in the header as ``"uniclip"``."""
OWN = frozenset(
    {"uniclip", "step", "norm", "limit", "threshold", "factor", "share", "finite", "skipped", "loss", "leaves"}
)
"""The keys of a line that are not numbers of the user's own."""
BEGINNING = b'{"uniclip"'
"""How a recorded run begins."""


class Record(NamedTuple):
    """A recorded run of n steps; what `read` returns.

    Attributes
    ----------
    steps : (n,) array of int64
        Ascending.
    norms, limits, factors, shares : (n,) array of float64
        The largest norm before clipping, the smallest limit (∞ where nothing limits), the smallest factor, the share of
        the factors that are not 1. NaN where it is not known, or is not finite.
    finite, skipped : (n,) array of bool
        Whether all gradients and norms of the step were finite, and whether the rule left the step out.
    thresholds : (n,) array of float64
        NaN where there is none.
    losses : (n,) array of float64
        ∞ where the loss was not finite, NaN where none was recorded.
    leaves : (m, k) array of float64
        The norms of k leaves at the m steps where they were recorded; NaN where one is not finite, or where the leaf
        had no gradient.
    leaf_steps : (m,) array of int64
        These steps.
    labels : list of str
        The labels of the k leaves.
    sizes : (k,) array of int64
        How many entries they have; 0 where it is not known.
    rule : str
        The rule that clipped, as source text; empty where it is not known.
    scope : str
        What ``norms`` are norms of: ``"all_leaves"``, ``"each_leaf"`` (the largest) or ``"other"``.
    ord : float or None
        The order of the norms, 2 for Euclidean ones; ``None`` where it is none.
    extra : dict of str to (n,) array of float64
        What else was recorded.

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
