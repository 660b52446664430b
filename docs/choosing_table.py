# SPDX-License-Identifier: MIT
"""The table of validation losses under different limits, from ``choosing.json``.

The file has the results of one experiment, which isn't part of the repository.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from performance_tables import versions

from compared import table

Setting = dict[str, Any]
PERCENTILE, AROUND = "at the percentile", "best of three around it"
FIXED: dict[str, Sequence[float | None]] = {
    "no clipping": [None],
    "1": [1.0],
    "0.25, 1, and 4": [0.25, 1.0, 4.0],
    "1, 4, and 16": [1.0, 4.0, 16.0],
    "0.5, 2, and 8": [0.5, 2.0, 8.0],
}
"""The limits that are the same in all settings."""
MEASURED = {
    "the 90th percentile of an unclipped run": (2, PERCENTILE),
    "three, from the 90th percentile of a run clipped at 1": (4, AROUND),
}
"""The limits that come from a first run: the number of runs, and the key of their losses."""


def parts(found: dict[str, Any]) -> dict[str, str]:
    """Return the tables, and a sentence about the machine, by name."""
    rows = [[name, str(len(limits)), *regrets(found, name)] for name, limits in FIXED.items()]
    rows += [[name, str(runs), *regrets(found, name)] for name, (runs, _) in MEASURED.items()]
    return {
        "choosing": table(["limits", "runs", "mean regret", "worst"], rows, "--:"),
        "choosing-best": table(["", "smallest", "median", "largest"], best_limits(found), "--:"),
        "choosing-versions": f"The losses were {versions(found['about'])}",
    }


def regrets(found: dict[str, Any], name: str) -> tuple[str, str]:
    """Return the mean and the worst regret of limits, to two digits."""
    each = [regret(found, setting, name) for setting in found["settings"]]
    return percent(statistics.mean(each)), percent(max(each))


def regret(found: dict[str, Any], setting: Setting, name: str) -> float:
    """Return how far the loss is above that of the best limit, in percent.

    Of several runs with one seed, the best counts.
    """
    if name in MEASURED:
        _, key = MEASURED[name]
        reached = setting[key]
    else:
        rows = [setting["losses"][found["limits"].index(limit)] for limit in FIXED[name]]
        reached = [min(losses) for losses in zip(*rows, strict=True)]

    best = min(map(statistics.mean, setting["losses"]))
    return max(100 * (statistics.mean(reached) / best - 1), 0.0)


def best_limits(found: dict[str, Any]) -> list[list[str]]:
    """Return the best limits of all settings, alone and over a percentile of the norms."""
    limits = [best_limit(found, setting) for setting in found["settings"]]
    percentiles = [statistics.mean(setting["percentiles"]) for setting in found["settings"]]
    ratios = [limit / percentile for limit, percentile in zip(limits, percentiles, strict=True)]
    return [
        ["best limit", *spread(limits)],
        ["best limit / 90th percentile of the norms", *spread(ratios)],
    ]


def spread(values: list[float]) -> list[str]:
    """Return the smallest, the median, and the largest of numbers, to two digits."""
    return [f"{value:.2g}" for value in (min(values), statistics.median(values), max(values))]


def best_limit(found: dict[str, Any], setting: Setting) -> float:
    """Return the limit with the smallest mean loss."""
    means = list(map(statistics.mean, setting["losses"]))
    return found["limits"][means.index(min(means))]


def percent(value: float) -> str:
    """Return a regret to two digits, or as a whole number if it is larger."""
    digits = 0 if value >= 10 else 1  # noqa: PLR2004 - two digits
    return f"{value:.{digits}f}"
