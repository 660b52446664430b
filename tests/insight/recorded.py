"""Made-up runs of clipping at 1, with norms around 0.5 that decrease at first, and spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from uniclip.insight import Record


def run(
    count: int = 400,
    leaves: int = 0,
    spikes: Sequence[int] = (),
    broken: Sequence[int] = (),
    **fields: Any,
) -> Record:
    """Return a run with spikes of 40 times the usual norm, and broken steps with NaN."""
    rng, steps = np.random.default_rng(0), np.arange(1, count + 1)
    norms = 0.5 * (1 + 4 * np.exp(-10 * steps / (count + 1))) * np.exp(rng.normal(0, 0.3, count))
    norms[np.asarray(spikes, int) - 1] *= 40
    norms[np.asarray(broken, int) - 1] = np.nan
    finite, factors = np.isfinite(norms), np.minimum(1, 1 / norms)
    at = (
        np.union1d(steps[:: max(count // 100, 1)], np.asarray(spikes, int))
        if leaves
        else np.zeros(0, int)
    )
    parts = np.exp(rng.normal(0, 1, leaves)) * np.exp(rng.normal(0, 0.2, (at.size, leaves)))
    values: dict[str, Any] = {
        "steps": steps,
        "norms": norms,
        "limits": np.ones(count),
        "factors": factors,
        "shares": np.where(finite, factors < 1, np.nan),
        "finite": finite,
        "skipped": np.zeros(count, bool),
        "thresholds": np.full(count, np.nan),
        "losses": 0.2 + 2.3 * np.exp(-3 * steps / (count + 1)) + 0.02 * rng.random(count),
        "leaves": norms[at - 1][:, None] * parts / np.sqrt(np.sum(parts**2, axis=1, keepdims=True)),
        "leaf_steps": at,
        "labels": [f"layers.{leaf}.weight" for leaf in range(leaves)],
        "rule": "uc.by_global_norm(1.0)",
        "extra": {},
    }
    return Record(**values | fields)


def of_norms(norms: Any, **fields: Any) -> Record:
    """Return a run with these norms and no limit.

    A non-finite norm makes its step non-finite.
    """
    norms = np.asarray(norms, np.float64)
    count, finite = len(norms), np.isfinite(norms)
    columns = {
        "limits": np.full(count, np.inf),
        "factors": np.ones(count),
        "losses": np.full(count, np.nan),
    }
    return run(
        count, **columns | {"norms": np.where(finite, norms, np.nan), "finite": finite, **fields}
    )


def nothing() -> Record:
    """Return the record of a run that was killed before its first step."""
    return run(0)


def write(record: Record, path: Path) -> Path:
    """Write a file as the recorder does, without the norms of leaves."""
    lines = [json.dumps({"uniclip": 1, "rule": record.rule})]
    for index, step in enumerate(record.steps):
        columns = {
            "norm": record.norms,
            "limit": record.limits,
            "factor": record.factors,
            "share": record.shares,
        }
        columns["loss"] = record.losses
        line = {name: float(values[index]) for name, values in columns.items()}
        line = {name: value if math.isfinite(value) else None for name, value in line.items()}
        mark = {} if record.finite[index] else {"finite": False}
        lines.append(json.dumps({"step": int(step), **line, **mark}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
