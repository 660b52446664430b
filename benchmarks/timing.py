# SPDX-License-Identifier: MIT
"""Time calls in turn, so that disturbances of a machine affect all of them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CALLS = 20
"""The number of calls in a round."""
NATIVE = "native"
Call = Callable[[], object]
Prepare = Callable[[str], object]
"""A function of the name of the call that comes next."""
Row = dict[str, Any]


def interleave(calls: dict[str, Call], prepare: Prepare, rounds: int) -> Row:
    """Return the row of calls in a random order, each after an untimed ``prepare(name)``."""
    return row(in_turn(calls, prepare, rounds))


def in_turn(
    calls: dict[str, Call],
    prepare: Prepare,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the median seconds of each call in each round; see `interleave`."""
    order, shuffle = list(calls), random.Random(0).shuffle  # noqa: S311 - no secret
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(CALLS):
            shuffle(order)
            for name in order:
                prepare(name)
                start = clock()
                calls[name]()
                spent[name].append(clock() - start)
        for name, seconds in spent.items():
            medians[name].append(float(np.median(seconds)))
    # The first round compiles.
    return {name: seconds[1:] for name, seconds in medians.items()}


def row(seconds: dict[str, list[float]]) -> Row:
    """Return the median time of each call, and the quartiles of the native time over it."""
    times = {name: np.asarray(found) for name, found in seconds.items()}
    ratios = {name: times[NATIVE] / found for name, found in times.items() if name != NATIVE}
    return {
        "us": {name: 1e6 * float(np.median(found)) for name, found in times.items()},
        "times": {name: quartiles(found) for name, found in ratios.items()},
    }


def quartiles(ratios: Any) -> list[float]:
    """Return the quartiles of ratios, the median in the middle."""
    found: list[float] = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return found


def save(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write results, one row a line."""
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n', "utf-8")
