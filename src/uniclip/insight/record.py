# SPDX-License-Identifier: MIT
"""A recorded run: the file that a recorder writes, and its columns as NumPy arrays.

A file of `uniclip.insight.Recorder` is JSON Lines. The first line is a header with the version of
the format and, if it is known, the rule. A run that continues with another rule has another header
at that point::

    {"uniclip": 1, "rule": "uc.by_global_norm(1.0)"}

Then there is one line for each step::

    {"step": 1, "norm": 13.0, "limit": 1.0, "factor": 0.0769, "share": 1.0, "loss": 2.3}

``norm`` is the largest norm before clipping, ``limit`` the smallest limit, ``factor`` the smallest
factor, ``share`` the fraction of the factors that are not 1, as in `uniclip.Report.scalars`. If
they exist there are also ``threshold``, ``skipped`` (true or false), ``loss``, the user's own
numbers, and ``leaves``, the norms of all leaves by name.

NaN and infinity are ``null``. A line has ``"finite": false`` only if a norm or a gradient is
non-finite. A ``loss`` of ``null`` was non-finite. A ``limit`` of ``null`` means no limit.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from uniclip._errors import counted
from uniclip.report import UNLIMITED

if TYPE_CHECKING:
    from uniclip.rule import BaseRule

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]
Row: TypeAlias = dict[str, Any]
"""The values of one step by name: a line of a file."""

INSTALL = '"uniclip-gradients[insight]"'
"""The package to install for figures and replays."""
FORMAT = 1
"""The version of the format, in the header as ``"uniclip"``."""
HEADER_START = b'{"uniclip"'
"""The first bytes of a recorded run."""
SCALAR_PREFIX = "clip/"
"""The prefix of a report's scalars, which the file omits."""
RESERVED_KEYS = frozenset(
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
"""The keys of a line other than the loss and the user's own numbers."""


class Pending(Protocol):
    """The part of a `uniclip.insight.Recorder` that reads of its file use."""

    path: Path | None

    def flush(self) -> None:
        """Write the steps."""

    def close(self) -> None:
        """Write the steps, and close the file."""


PENDING_RECORDERS: set[Pending] = set()
"""The recorders with unwritten steps.

The references keep these recorders alive until they have written their steps.
"""
_STEP = re.compile(rb'{"step": (\d+)')
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


_COLUMNS = (
    *("steps", "norms", "limits", "thresholds", "factors", "shares"),
    *("finite", "skipped", "losses"),
)
"""The attributes of a record with a value for each step."""


class Record(NamedTuple):
    """A recorded run of n steps, returned by `read`.

    Attributes
    ----------
    steps : (n,) array of int64
        Ascending.
    norms, limits, thresholds, factors, shares : (n,) array of float64
        The largest norm before clipping, the smallest limit (infinity for none), the smallest
        threshold (the norm above which the rule clips), the smallest factor, the fraction of the
        factors that are not 1. NaN for unknown or non-finite values.
    finite, skipped : (n,) array of bool
        Whether all gradients and norms of the step were finite, and whether the rule skipped the
        step.
    losses : (n,) array of float64
        Infinity for a non-finite loss, NaN if none was recorded.
    leaves : (m, k) array of float64
        The norms of k leaves at the m steps at which they were recorded; NaN for a non-finite norm,
        0 for a leaf without a gradient.
    leaf_steps : (m,) array of int64
        The steps at which norms of leaves were recorded.
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
    >>> round(float(record.shares.mean()), 2)  # the fraction of steps that were clipped
    0.47
    """

    steps: Integers
    norms: Floats
    limits: Floats
    thresholds: Floats
    factors: Floats
    shares: Floats
    finite: Booleans
    skipped: Booleans
    losses: Floats
    leaves: Floats
    leaf_steps: Integers
    labels: list[str]
    rule: str
    extra: dict[str, Floats]

    def between(self, first: int, last: int) -> Record:
        """Return a part of the run, to plot or summarize the steps around one.

        Parameters
        ----------
        first, last : int
            The numbers of its first and last step.

        Returns
        -------
        Record

        Raises
        ------
        ValueError
            If none of these steps was recorded.

        Examples
        --------
        >>> from uniclip import insight
        >>> insight.read("run.jsonl").between(290, 310)
        <Record: 21 steps, uc.by_global_norm(1.0)>
        """
        chosen = (first <= self.steps) & (self.steps <= last)
        if not chosen.any():
            run = f"{self.steps[0]} to {self.steps[-1]}" if self.steps.size else "none"
            msg = f"no step from {first} to {last} was recorded; the recorded steps are {run}"
            raise ValueError(msg)

        of_leaves = (first <= self.leaf_steps) & (self.leaf_steps <= last)
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return self._replace(
            **columns,
            leaves=self.leaves[of_leaves],
            leaf_steps=self.leaf_steps[of_leaves],
            extra={name: values[chosen] for name, values in self.extra.items()},
        )

    def __repr__(self) -> str:
        """Return the number of steps and the rule."""
        return f"<Record: {counted(len(self.steps), 'step')}, {self.rule or 'unknown rule'}>"


def read(path: str | os.PathLike[str]) -> Record:
    """Read a recorded run.

    A recorder of this process first writes its unwritten steps. Unwritten steps of other processes
    are missing.

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
        If it is not a recorded run, has a newer format, or is damaged. A damaged last line is
        ignored: the run was killed while writing it.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> len(record.steps), record.rule, float(record.norms.max())
    (400, 'uc.by_global_norm(1.0)', 20.0)
    """
    _flush_recorders_of(Path(path))

    content = Path(path).read_bytes()
    # Another file may be large or binary, so decode no line of it.
    if not content.startswith(HEADER_START):
        msg = f"{os.fspath(path)} isn't a recorded run; create one with uniclip.insight.Recorder"
        raise ValueError(msg)

    # A killed run may leave part of a line after the last line break.
    *lines, _ = content.split(b"\n")
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        version = max([row.get("uniclip", FORMAT) for row in rows], default=FORMAT)
        record = _to_record(rows)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        msg = (
            f"{os.fspath(path)} is damaged, or wasn't written by uniclip.insight.Recorder: {error}"
        )
        raise ValueError(msg) from error

    if version > FORMAT:
        msg = (
            f"{os.fspath(path)} has format {version}, but this version of uniclip reads formats up "
            f"to {FORMAT}; update uniclip"
        )
        raise ValueError(msg)
    return record


def _flush_recorders_of(path: Path) -> None:
    """Write the unwritten steps of all recorders of a file."""
    for recorder in list(PENDING_RECORDERS):
        if recorder.path is not None and recorder.path.resolve() == path.resolve():
            recorder.flush()


def _to_record(lines: list[Row]) -> Record:
    """Return the columns of the lines of a file."""
    rules = [line["rule"] for line in lines if "rule" in line]
    rows = _drop_repeated_steps([line for line in lines if "uniclip" not in line])

    leaf_steps, labels, leaves = _leaf_norms(rows)

    # A limit of null is none, and a loss of null non-finite; a missing value stays NaN.
    limits = _column(rows, "limit")
    limits[[row.get("limit", 0.0) is None for row in rows]] = np.inf
    losses = _column(rows, "loss")
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
        leaves=leaves,
        leaf_steps=leaf_steps,
        labels=labels,
        rule=rules[-1] if rules else "",
        extra={name: _column(rows, name) for name in _user_names(rows)},
    )


def _drop_repeated_steps(rows: list[Row]) -> list[Row]:
    """Drop each row that a later row of the same or an earlier step replaces.

    Two recorders of one file leave such rows.
    """
    ascending: list[Row] = []
    for row in rows:
        while ascending and ascending[-1]["step"] >= row["step"]:
            ascending.pop()
        ascending.append(row)
    return ascending


def _leaf_norms(rows: list[Row]) -> tuple[Integers, list[str], Floats]:
    """Return the steps with norms of leaves, the names of the leaves, and the norms."""
    with_leaves = [row for row in rows if "leaves" in row]

    # Leaves can come and go during a run; a dict keeps the order of their first steps.
    labels: dict[str, None] = {}
    for row in with_leaves:
        labels |= dict.fromkeys(row["leaves"])

    norms = [list(map(row["leaves"].get, labels)) for row in with_leaves]
    return (
        np.asarray([row["step"] for row in with_leaves], np.int64),
        list(labels),
        np.asarray(norms, np.float64).reshape(len(norms), len(labels)),
    )


def _user_names(rows: list[Row]) -> list[str]:
    """Return the names of the user's own numbers, in the order in which they appear."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return [name for name in names if name not in RESERVED_KEYS and name != "loss"]


def _column(rows: list[Row], name: str) -> Floats:
    """Return the numbers of a name, NaN for rows that lack it."""
    return np.asarray([row.get(name) for row in rows], np.float64)


class File:
    """The file of a recorder, open only during a write.

    Raises
    ------
    FileNotFoundError
        If it is a folder, or its folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            msg = f"{path} is a folder; pass the path of a file"
            raise FileNotFoundError(msg)
        if not path.parent.is_dir():
            msg = (
                f"{path} can't be written, because the folder {str(path.parent)!r} doesn't exist; "
                "create the folder, or pass another path"
            )
            raise FileNotFoundError(msg)
        self.path = path
        self._header: bytes | None = None

    def write(self, rows: list[Row], rule: BaseRule | None) -> None:
        """Append rows, after a header if the rule has changed."""
        fields: Row = {"uniclip": FORMAT}
        if rule is not None:
            fields["rule"] = repr(rule)
        header = _encode_row(fields)

        # Someone may have moved the file away during the run.
        last_header = self._header
        if last_header is None or not self.path.exists():
            last_header = self._continue_run(rows[0]["step"])

        lines = list(map(_encode_row, rows))
        if header != last_header:
            lines.insert(0, header)
        with self.path.open("ab") as file:
            file.write(b"".join(lines))
        self._header = header

    def _continue_run(self, step: int) -> bytes:
        """Drop the rows of an earlier run from a step on, and a partial line.

        If no row is left, rename the file. Return the last remaining header.
        """
        if not self.path.exists():
            return b""
        lines = self.path.read_bytes().splitlines(keepends=True)
        lines = [line for line in lines if line.endswith(b"\n")]

        # The beginning of a line has its step, so a long run need not be decoded.
        remaining = []
        row_count = 0
        last_header = b""
        for line in lines:
            match = _STEP.match(line)
            if match is None:
                remaining.append(line)
                if line.startswith(HEADER_START):
                    last_header = line
            elif int(match[1]) < step:
                remaining.append(line)
                row_count += 1

        # A file that is no recorded run, or that of a finished run, must not be lost.
        is_record = bool(lines) and lines[0].startswith(HEADER_START)
        if not (is_record and row_count):
            self.path.replace(_unused_path(self.path))
            return b""

        # A run that is killed here keeps the whole old file.
        new_file = self.path.with_name(f"{self.path.name}.new")
        new_file.write_bytes(b"".join(remaining))
        new_file.replace(self.path)
        return last_header


def _unused_path(path: Path) -> Path:
    """Return an unused path for the file of an earlier run."""
    old = path.with_name(f"{path.name}.old")
    number = 2
    while old.exists():
        old = path.with_name(f"{path.name}.old{number}")
        number += 1
    return old


def _encode_row(row: Row) -> bytes:
    """Return the line of a row, with ``null`` for non-finite numbers and for no limit."""
    fields = {name.removeprefix(SCALAR_PREFIX): value for name, value in row.items()}

    for name in ("limit", "threshold"):
        if fields.get(name, 0.0) >= UNLIMITED:
            fields[name] = None
    if "skipped" in fields:
        # The mean over accumulated steps counts as skipped only if all of them were.
        fields["skipped"] = fields["skipped"] == 1
    if "leaves" in fields:
        leaves = fields["leaves"].items()
        fields["leaves"] = {label: _null_if_nonfinite(norm) for label, norm in leaves}

    fields = {name: _null_if_nonfinite(value) for name, value in fields.items()}
    return f"{_encode(fields)}\n".encode()


def _null_if_nonfinite(value: object) -> object:
    """Return ``None`` for NaN and infinity, any other value as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
