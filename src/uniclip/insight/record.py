# SPDX-License-Identifier: MIT
"""A recorded run: the file that a recorder writes, and its columns as NumPy arrays.

A file of `uniclip.insight.Recorder` is JSON Lines. The first line is a header, with the version of
the format, and the rule if it is known; a run that goes on with another rule has another header
there::

    {"uniclip": 1, "rule": "uc.by_global_norm(1.0)"}

Then there is one line for each step::

    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3}

``norm`` is the largest norm before clipping, ``limit`` the smallest limit, ``factor`` the smallest
factor, ``share`` the share of the factors that are not 1, as in `uniclip.Report.scalars`. Where
they exist there are also ``threshold``, ``skipped`` (true or false), ``loss``, the user's own
numbers, and ``leaves``, the norms of all leaves by their names. NaN and ∞ are ``null``; only if a
norm or a gradient is not finite, the line has ``"finite": false``. A ``loss`` of ``null`` was not
finite. A ``limit`` of ``null`` limits nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from uniclip._errors import counted
from uniclip.report import UNLIMITED

INSTALL = '"uniclip-gradients[insight]"'
"""What installs what pictures and replays need."""
FORMAT = 1
"""The version of the format, in the header as ``"uniclip"``."""
BEGINNING = b'{"uniclip"'
"""The beginning of a recorded run."""
LOGGED = "clip/"
"""What the names of a report's scalars begin with, and those in the file do not."""
OWN = frozenset(
    {
        "uniclip",
        "step",
        "norm",
        "limit",
        "threshold",
        "factor",
        "share",
        "finite",
        "skipped",
        "leaves",
    }
)
"""The keys of a line that are neither the loss nor the user's own."""
WAITING: set[Any] = set()
"""The recorders with steps to write, held here so that they are not garbage-collected before these
are written.
"""
_ROW = re.compile(rb'{"step": (\d+)')
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class Record(NamedTuple):
    """A recorded run of n steps, returned by `read`.

    Attributes
    ----------
    steps : (n,) array of int64
        Ascending.
    norms, limits, thresholds, factors, shares : (n,) array of float64
        The largest norm before clipping, the smallest limit (∞ for none), the smallest norm that is
        clipped, the smallest factor, the share of the factors that are not 1. NaN where unknown, or
        not finite.
    finite, skipped : (n,) array of bool
        Whether all gradients and norms of the step were finite, and whether the rule skipped the
        step.
    losses : (n,) array of float64
        ∞ where the loss was not finite, NaN where none was recorded.
    leaves : (m, k) array of float64
        The norms of k leaves at the m steps where they were recorded; NaN where a norm is not
        finite, 0 where a leaf had no gradient.
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

    def __repr__(self) -> str:
        """Return how long it is, and of what."""
        return f"<Record: {counted(len(self.steps), 'step')}, {self.rule or 'an unknown rule'}>"


def read(path: str | os.PathLike[str]) -> Record:
    """Read a recorded run.

    A recorder of this program first writes the steps that it still keeps; those that another
    program keeps are not there.

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
        If it is another kind of file, of a newer format, or damaged. A damaged last line is
        ignored: the run was killed while writing it.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> len(record.steps), record.rule, float(record.norms.max())
    (400, 'uc.by_global_norm(1.0)', 20.0)
    """
    for recorder in [
        one for one in list(WAITING) if one.path and one.path.resolve() == Path(path).resolve()
    ]:
        recorder.flush()
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
        msg = (
            f"{os.fspath(path)} is damaged, or was not written by uniclip.insight.Recorder: {error}"
        )
        raise ValueError(msg) from error
    if newest > FORMAT:
        msg = (
            f"{os.fspath(path)} is of format {newest}, and this uniclip reads up to {FORMAT}: "
            "update it"
        )
        raise ValueError(msg)
    return record


def _record(rows: list[dict[str, Any]]) -> Record:
    """Return the columns of the lines of a file."""
    rules = [row["rule"] for row in rows if "rule" in row]
    rows = _ascending([row for row in rows if "uniclip" not in row])
    with_leaves = [row for row in rows if "leaves" in row]
    labels = list(dict.fromkeys(label for row in with_leaves for label in row["leaves"]))
    leaves = [[row["leaves"].get(label) for label in labels] for row in with_leaves]
    more = dict.fromkeys(name for row in rows for name in row if name not in OWN and name != "loss")
    limits, losses = _column(rows, "limit"), _column(rows, "loss")
    limits[[row.get("limit", 0.0) is None for row in rows]] = np.inf
    losses[[row.get("loss", 0.0) is None for row in rows]] = np.inf
    return Record(
        steps=np.asarray([row["step"] for row in rows], np.int64),
        limits=limits,
        **{f"{name}s": _column(rows, name) for name in ("norm", "threshold", "factor", "share")},
        finite=np.asarray([row.get("finite", True) for row in rows], bool),
        skipped=np.asarray([row.get("skipped", False) for row in rows], bool),
        losses=losses,
        leaves=np.asarray(leaves, np.float64).reshape(len(leaves), len(labels)),
        leaf_steps=np.asarray([row["step"] for row in with_leaves], np.int64),
        labels=labels,
        rule=rules[-1] if rules else "",
        extra={name: _column(rows, name) for name in more},
    )


def _ascending(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop rows before one of an earlier step, as two recorders of one file leave them."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray[Any, Any]:
    """Return the numbers of a name, NaN where there is none."""
    return np.asarray([row.get(name) for row in rows], np.float64)


class File:
    """The file of a recorder, which is opened to write only.

    Raises
    ------
    FileNotFoundError
        If it is a folder, or its folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            what = (
                "is a folder"
                if path.is_dir()
                else f"cannot be written: there is no folder {str(path.parent)!r}"
            )
            msg = f"{path} {what}: give the path of a file"
            raise FileNotFoundError(msg)
        self.path = path
        self._header: bytes | None = None

    def write(self, rows: list[dict[str, Any]], rule: Any) -> None:
        """Append rows, after a header if the rule is another one than before."""
        header = _line({"uniclip": FORMAT} | ({} if rule is None else {"rule": repr(rule)}))
        before = (
            self._go_on(rows[0]["step"])
            if self._header is None or not self.path.exists()
            else self._header
        )
        with self.path.open("ab") as file:
            file.write(b"".join([b"" if header == before else header, *map(_line, rows)]))
        self._header = header

    def _go_on(self, step: int) -> bytes:
        """Drop the rows of an earlier run from a step on, and a torn line.

        Rename the file if there are no others.

        Return the last header.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        lines = [line for line in lines if line.endswith(b"\n")]
        kept = [line for line in lines if not (row := _ROW.match(line)) or int(row[1]) < step]
        if not (lines and lines[0].startswith(BEGINNING) and any(map(_ROW.match, kept))):
            if self.path.exists():
                self.path.replace(_free(self.path))
            return b""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(self.path)
        return [line for line in kept if line.startswith(BEGINNING)][-1]


def _free(path: Path) -> Path:
    """Return a path for the file of an earlier run."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in (0, *range(2, 10**6)))
    return next(name for name in names if not name.exists())


def _line(row: dict[str, Any]) -> bytes:
    """Return the line of a row: ``null`` for what is not finite,
    and for a limit that limits nothing.
    """
    summarize = {name.removeprefix(LOGGED): value for name, value in row.items()}
    for name in ("limit", "threshold"):
        if summarize.get(name, 0.0) >= UNLIMITED:
            summarize[name] = None
    if "skipped" in summarize:
        summarize["skipped"] = summarize["skipped"] == 1  # of a window: all of it
    if "leaves" in summarize:
        summarize["leaves"] = {label: _number(norm) for label, norm in summarize["leaves"].items()}
    return f"{_encode({name: _number(value) for name, value in summarize.items()})}\n".encode()


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
