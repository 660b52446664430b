# SPDX-License-Identifier: MIT
"""The tables of how often rules clip, from runs of the rules on synthetic norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import uniclip as uc
from compared import table

STEPS, COUNTED = 2500, 2000
"""The number of steps of each rule, and how many of the last ones count."""
CALM, USUAL, WILD = 0.2, 0.3, 1.0
"""The standard deviations of calm norms, and of the logarithms of the others."""
SPREADS = (0.05, 0.1, 0.2, 0.3)
"""The standard deviations of the norms for AdaGC."""
NET, NORMALIZER = "safety net", "normalizer"
RULES: dict[str, tuple[str, uc.Rule]] = {
    "`autoclip(95)`": (NET, uc.autoclip(95)),
    "`zclip()`": (NET, uc.zclip()),
    "`log_zscore()`": (NET, uc.log_zscore()),
    "`skip_spikes()`": (NET, uc.skip_spikes()),
    "`adagc(warmup=0)`": (NORMALIZER, uc.adagc(warmup=0)),
    "`norm_growth()`": (NORMALIZER, uc.norm_growth()),
    "`autoclip(10)`": (NORMALIZER, uc.autoclip(10)),
    "`percentile_clipping(5)`": (NORMALIZER, uc.percentile_clipping(5)),
}
"""The rules of the table by their calls, and what they are for."""


def parts() -> dict[str, str]:
    """Return the tables by name."""
    return {"clip-shares": shares(), "adagc-averages": averages()}


def shares() -> str:
    """Return the percentages of steps that rules clip, on three kinds of norms."""
    norms = [
        np.random.default_rng(0).normal(1.0, CALM, STEPS),
        np.random.default_rng(0).lognormal(0.0, USUAL, STEPS),
        np.random.default_rng(0).lognormal(0.0, WILD, STEPS),
    ]
    rows = []
    for call, (kind, rule) in RULES.items():
        after = clip_each(rule, norms)
        rows.append([call, kind, *(percent(*pair) for pair in zip(norms, after, strict=True))])
    spreads = [f"calm ({CALM:g})", f"usual ({USUAL:g})", f"wild ({WILD:g})"]
    return table(["rule", "kind", *spreads], rows)


def averages() -> str:
    """Return how often AdaGC clips norms around 1, and the average that it settles at."""
    norms = [np.random.default_rng(0).normal(1.0, spread, STEPS) for spread in SPREADS]
    after = clip_each(uc.adagc(warmup=0), norms)
    clipped = [percent(*pair) for pair in zip(norms, after, strict=True)]
    # In the long run, the running average is the average of the norms after clipping.
    settled = [f"{np.mean(kept[-COUNTED:]):.2f}" for kept in after]
    rows = [["clipped steps", *clipped], ["average settles at", *settled]]
    return table(["standard deviation", *(f"{spread:.0%}" for spread in SPREADS)], rows)


def clip_each(rule: Any, norms: list[np.ndarray]) -> list[np.ndarray]:
    """Return several sequences of norms after a rule, which has a separate state for each."""
    each = replace(rule, scope=uc.scopes.each_leaf)
    state = each.init([np.zeros(1) for _ in norms])
    after = []
    for step in zip(*norms, strict=True):
        clipped, state, _ = each.update([np.array([norm]) for norm in step], state)
        after.append(np.concatenate(clipped))
    return list(np.transpose(after))


def percent(before: np.ndarray, after: np.ndarray) -> str:
    """Return the percentage of changed norms among those that count, to two digits."""
    share = 100 * np.mean(before[-COUNTED:] != after[-COUNTED:])
    digits = 0 if share >= 10 or share == 0 else 1  # noqa: PLR2004 - two digits
    return f"{share:.{digits}f}%"
