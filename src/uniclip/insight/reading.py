# SPDX-License-Identifier: MIT
"""Read a recorded run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from uniclip.insight.record import BEGINNING, FORMAT, OWN, Record
from uniclip.insight.recorder import flush_to


def read(path: str | os.PathLike[str]) -> Record:
    """Read a recorded run; what a recorder of this process still holds of it is written first.

    Parameters
    ----------
    path : str or path-like
        A file of `uniclip.insight.Recorder`.

    Returns
    -------
    Record
        Missing values are NaN.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is another kind of file, of a newer format, or damaged. A damaged last line is ignored: the run was killed
        while writing it.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> len(record.steps), record.rule, float(record.norms.max())
    (400, 'uc.Rule(1.0)', 20.0)
    """
    flush_to(Path(path))
    text = Path(path).read_bytes()
    if not text.startswith(BEGINNING):
        msg = f"{os.fspath(path)} is no recorded run, which uniclip.insight.Recorder writes"
        raise ValueError(msg)
    *lines, _ = text.split(b"\n")  # what follows the last line is nothing, or torn
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        newest = max([row.get("uniclip", FORMAT) for row in rows], default=FORMAT)
        record = _record(rows)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        msg = f"{os.fspath(path)} is damaged, or was not written by uniclip.insight.Recorder: {error}"
        raise ValueError(msg) from error
    if newest > FORMAT:
        msg = f"{os.fspath(path)} is of format {newest}, and this uniclip reads up to {FORMAT}: update it"
        raise ValueError(msg)
    return record


def _record(rows: list[dict[str, Any]]) -> Record:
    """Return the columns of the lines of a file."""
    rules = [row["rule"] for row in rows if "rule" in row]
    rows = [row for row in rows if "uniclip" not in row]
    with_leaves = [row for row in rows if "leaves" in row]
    labels = list(dict.fromkeys(label for row in with_leaves for label in row["leaves"]))
    leaves = [[row["leaves"].get(label) for label in labels] for row in with_leaves]
    more = dict.fromkeys(name for row in rows for name in row if name not in OWN and name != "loss")
    limits, losses = _column(rows, "limit"), _column(rows, "loss")
    limits[[row.get("limit", 0.0) is None for row in rows]] = np.inf
    losses[[row.get("loss", 0.0) is None for row in rows]] = np.inf
    return Record(
        steps=np.asarray([row["step"] for row in rows], np.int64),
        norms=_column(rows, "norm"),
        limits=limits,
        thresholds=_column(rows, "threshold"),
        factors=_column(rows, "factor"),
        shares=_column(rows, "share"),
        finite=np.asarray([row.get("finite", True) for row in rows], bool),
        skipped=np.asarray([row.get("skipped", False) for row in rows], bool),
        losses=losses,
        leaves=np.asarray(leaves, np.float64).reshape(len(leaves), len(labels)),
        leaf_steps=np.asarray([row["step"] for row in with_leaves], np.int64),
        labels=labels,
        rule=rules[-1] if rules else "",
        extra={name: _column(rows, name) for name in more},
    )


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray[Any, Any]:
    """Return the numbers of a name, NaN where there is none."""
    return np.asarray([row.get(name) for row in rows], np.float64)
