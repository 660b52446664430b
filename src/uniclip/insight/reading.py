# SPDX-License-Identifier: MIT
"""Read a recorded run: the JSON Lines of the recorder, or the log that a trainer wrote."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from uniclip._repr import short
from uniclip.insight.record import FORMAT, Record
from uniclip.report import LOGGED

Array: TypeAlias = np.ndarray[Any, Any]

_NUMBERS = {int, float, bool, type(None)}
_OWN = {"step", "norm", "limit", "factor", "share", "finite", "skipped", "threshold", "loss", "leaves"}
"""What a line of the recorder holds beside numbers of the user's own."""
_JOINT = "grad_norm"
"""What trainers call the joint norm before clipping."""
_NORMS = (_JOINT, LOGGED[0])
_FROM_LOGS = dict(zip(LOGGED[1:], ("limit", "threshold", "factor", "share", "skipped"), strict=True))
"""The names of a line of the recorder for what a trainer's log holds beside the norm."""
_LOSSES = ("loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step")
_NOT_TRAINING = ("eval", "test", "val")
_UNLIMITED = 3e38
_EXACT = 2**53


class _Line(NamedTuple):
    """What was recorded of a step, and on which line of the file."""

    number: int
    values: dict[str, Any]


def read(path: str | os.PathLike[str]) -> Record:
    """Read a recorded run.

    Parameters
    ----------
    path : str or path-like
        JSON Lines written by `uniclip.insight.Recorder`; a ``trainer_state.json``, whose ``log_history`` holds
        ``grad_norm`` or ``clip/norm``; or a ``metrics.csv`` with a column of one of these names and one named ``step``.

    Returns
    -------
    Record
        Its steps ascend: where a step comes again, as in a run that was resumed, all lines before from that step on are
        dropped. What a line does not hold is NaN.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is a file of another kind, or of a newer format, or if a line is damaged. A damaged last line is left out:
        the run was killed while it was written.

    Notes
    -----
    A trainer's log holds the steps that it logged, as it counted them; ``loss`` and ``clip/share`` may be means over
    the steps since the log before, and ``clip/skipped`` counts as skipped where all of these were. It does not say what
    ``clip/norm`` is the norm of: without a ``grad_norm`` it is taken for the Euclidean norm of all leaves. Write
    ``record._replace(scope="each_leaf")`` if it is the largest norm of a leaf.
    """
    text = Path(path).read_bytes().decode("utf-8", "replace")  # the end may be torn in the middle of a character
    name, first = os.fspath(path), text.partition("\n")[0]
    header = _parsed(first)
    if isinstance(header, dict) and "uniclip" in header:
        return _of_recorder(name, header, text)
    if first == text and first.startswith('{"uniclip"'):  # torn before anything was recorded
        return _record(name, {}, [])
    if text.lstrip().startswith("{"):
        state = _parsed(text)
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            return _of_log(name, [_Line(number, row) for number, row in enumerate(state["log_history"], 1)])
    elif "step" in first.strip().split(","):
        return _of_log(name, _cells(name, text))
    msg = (
        f"{name} is no recorded run: expected the JSON Lines of uniclip.insight.Recorder, a trainer_state.json, or a "
        "metrics.csv with the columns step and clip/norm"
    )
    raise ValueError(msg)


def _parsed(text: str) -> Any:
    """Parse JSON; ``None`` if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _refuse(name: str, number: int, what: str) -> None:
    msg = f"{name}, line {number}: {what}"
    raise ValueError(msg)


def _of_recorder(name: str, header: dict[str, Any], text: str) -> Record:
    """Read the lines of the recorder."""
    version = header["uniclip"]
    if type(version) is not int:
        _refuse(name, 1, f'"uniclip" must be the number of the format, {FORMAT}, got {short(version)}')
    if version > FORMAT:
        _refuse(name, 1, f"format {version} is that of a newer uniclip; this one reads up to {FORMAT}: update it")
    rows, lines = text.split("\n")[1:], []
    while rows and not rows[-1].strip():
        rows.pop()
    for number, row in enumerate(rows, 2):
        values = _parsed(row)
        if isinstance(values, dict):
            lines.append(_Line(number, values))
        elif number <= len(rows):
            _refuse(name, number, f"expected a JSON object, got {short(row)}")
    return _record(name, header, lines)


def _cells(name: str, text: str) -> list[_Line]:
    """Read the rows of a table as one line for each step: some log what is of one step in several rows."""
    rows = list(csv.reader(text.splitlines()))
    if not text.endswith("\n"):  # the last number may be cut off
        rows = rows[: max(1, len(rows) - 1)]
    names, lines = rows[0], list[_Line]()
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            if number < len(rows):
                _refuse(name, number, f"expected {len(names)} cells, got {len(row)}")
            continue
        values = {key: _number(cell) for key, cell in zip(names, row, strict=True) if cell}
        if lines and lines[-1].values.get("step") == values.get("step"):
            lines[-1].values.update(values)
        else:
            lines.append(_Line(number, values))
    return lines


def _number(cell: str) -> Any:
    """Return a cell as a number if it is one, as a whole one if it is that."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _of_log(name: str, lines: list[_Line]) -> Record:
    """Read the log of a trainer: the lines with a norm."""
    for line in lines:
        if not isinstance(line.values, dict):
            _refuse(name, line.number, f"expected an entry of the log with step and norm, got {short(line.values)}")
    keys = _keys(lines)
    norm = next((key for key in _NORMS if key in keys), None)
    if norm is None and lines:
        several = sorted(key for key in keys if key.startswith(f"{LOGGED[0]}/"))
        hint = f", but those of several optimizers, {', '.join(several)}: keep one" if several else ""
        msg = f"{name} holds no norms: expected {' or '.join(_NORMS)}{hint}"
        raise ValueError(msg)
    training = [key for key in keys if key.endswith(("loss", "loss_step")) and not key.startswith(_NOT_TRAINING)]
    loss = next((key for key in (*_LOSSES, *training) if key in keys), None)
    named = _FROM_LOGS | {norm: "norm", loss: "loss"}
    found = [_Line(number, _as_recorded(values, named)) for number, values in lines if norm in values]
    return _record(name, {"scope": "all_leaves", "ord": 2}, found)


def _as_recorded(values: dict[str, Any], named: dict[Any, str]) -> dict[str, Any]:
    """Return an entry of a log as a line of the recorder."""
    own = {key for key in values if key in _OWN and key != "step" and key not in named}  # of another meaning
    line = {named.get(key, key): value for key, value in values.items() if key not in own}
    if type(line["norm"]) in _NUMBERS:
        line["finite"] = line["norm"] is not None and math.isfinite(line["norm"])
    for key in ("limit", "threshold"):
        if type(line.get(key)) is float and not line[key] < _UNLIMITED:
            line[key] = None
    if "skipped" in line:
        line["skipped"] = line["skipped"] == 1
    return line


def _keys(lines: Iterable[_Line]) -> dict[str, None]:
    """Return the keys of all lines in the order in which they come."""
    return dict.fromkeys(key for line in lines for key in line.values)


def _record(name: str, header: dict[str, Any], lines: list[_Line]) -> Record:
    """Make the columns of the lines."""
    lines = _ascending(name, lines)
    table = _Table(name, lines)
    finite = table.flags("finite", usual=True)
    limits = table.column("limit")
    given = np.asarray(["limit" in line.values for line in lines], bool)
    limits[given & np.isnan(limits) & finite] = math.inf
    labels = [str(label) for label in header.get("leaves", ())]
    with_leaves = [line for line in lines if "leaves" in line.values]
    order = header.get("ord")
    extra = [key for key in _keys(lines) if key not in _OWN and table.holds_numbers(key)]
    return Record(
        steps=np.asarray([line.values["step"] for line in lines], np.int64),
        norms=table.column("norm"),
        limits=limits,
        factors=table.column("factor"),
        shares=table.column("share"),
        finite=finite,
        skipped=table.flags("skipped", usual=False),
        thresholds=table.column("threshold"),
        losses=table.column("loss"),
        leaves=_leaves(name, with_leaves, len(labels)),
        leaf_steps=np.asarray([line.values["step"] for line in with_leaves], np.int64),
        labels=labels,
        sizes=np.asarray(header.get("sizes", [0] * len(labels)), np.int64),
        rule=header.get("rule", ""),
        scope=header.get("scope", "other"),
        ord=None if order is None else float(order),
        extra={key: table.column(key) for key in extra},
    )


def _ascending(name: str, lines: list[_Line]) -> list[_Line]:
    """Drop what was recorded before a run was resumed from an earlier step."""
    kept: list[_Line] = []
    for line in lines:
        step = line.values.get("step")
        if type(step) is not int:
            _refuse(name, line.number, f"step must be a whole number, got {short(step)}")
        while kept and kept[-1].values["step"] >= step:
            kept.pop()
        kept.append(line)
    return kept


def _leaves(name: str, lines: list[_Line], count: int) -> Array:
    """Return the norms of leaves, a row for each line."""
    for number, values in lines:
        row = values["leaves"]
        if not (isinstance(row, list) and len(row) == count and set(map(type, row)) <= _NUMBERS):
            _refuse(name, number, f"leaves must be {count} norms, as the first line names, got {short(row)}")
    return np.asarray([line.values["leaves"] for line in lines], np.float64).reshape(len(lines), count)


class _Table(NamedTuple):
    """The lines of a file, to be read by column."""

    name: str
    lines: list[_Line]

    def column(self, key: str) -> Array:
        """Return the numbers of a key, NaN where there is none."""
        values = [line.values.get(key) for line in self.lines]
        if not set(map(type, values)) <= _NUMBERS:
            self._refuse(key, _NUMBERS, "a number or null")
        return np.asarray(values, np.float64)

    def flags(self, key: str, *, usual: bool) -> Array:
        """Return the flags of a key, the usual one where there is none."""
        values = [line.values.get(key, usual) for line in self.lines]
        if not set(map(type, values)) <= {bool}:
            self._refuse(key, {bool}, "true or false")
        return np.asarray(values, bool)

    def holds_numbers(self, key: str) -> bool:
        """Whether all values of a key are numbers."""
        return {type(line.values.get(key)) for line in self.lines} <= _NUMBERS

    def _refuse(self, key: str, kinds: set[Any], wanted: str) -> None:
        for number, values in self.lines:
            if key in values and type(values[key]) not in kinds:
                _refuse(self.name, number, f"{key} must be {wanted}, got {short(values[key])}")
