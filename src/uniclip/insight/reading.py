# SPDX-License-Identifier: MIT
"""Read a recorded run: the JSON Lines of the recorder, or the log of a trainer."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from uniclip._repr import short
from uniclip.insight.columns import NUMBERS, Line, Table, ascending, checked_header, parsed, refuse
from uniclip.insight.record import BEGINNING, OWN, Record
from uniclip.insight.recorder import flush_to
from uniclip.report import LOGGED, UNLIMITED

_JOINT = "grad_norm"
"""The name of the global norm before clipping in trainers' logs."""
_NORMS = (_JOINT, LOGGED[0])
_FROM_LOGS = dict(zip(LOGGED[1:], ("limit", "threshold", "factor", "share", "skipped"), strict=True))
"""The keys of the recorder's lines for the values in a trainer's log."""
_LOSSES = ("loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step")
_NOT_TRAINING = ("eval", "test", "val")
_EXACT = 2**53


def read(path: str | os.PathLike[str]) -> Record:
    """Read a recorded run; what a recorder of this process still holds of it is written first.

    Parameters
    ----------
    path : str or path-like
        JSON Lines written by `uniclip.insight.Recorder`; a ``trainer_state.json``, whose ``log_history`` holds
        ``grad_norm`` or ``clip/norm``; or a ``metrics.csv`` with a column of one of these names and one named ``step``.

    Returns
    -------
    Record
        Its steps ascend: where a step occurs again, as in a resumed run, the earlier lines from that step on are
        dropped. Missing values are NaN.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is another kind of file or a newer format, or if a line is damaged or holds an impossible value, such as
        a negative norm. A damaged last line is ignored: the run was killed while writing it.

    Notes
    -----
    A trainer's log holds only the steps that were logged, in the trainer's count. There ``loss`` and ``clip/share`` may
    be means since the previous log, and a step counts as skipped if all steps since then were. The log does not tell
    the scope of ``clip/norm``: without a ``grad_norm`` it is taken for the Euclidean norm of all leaves. Write
    ``record._replace(scope="each_leaf")`` if it is the largest norm of a leaf.

    Examples
    --------
    >>> from uniclip import insight
    >>> record = insight.read("run.jsonl")
    >>> len(record.steps), record.rule, float(record.norms.max())
    (400, 'uc.Rule(1.0)', 20.0)
    """
    flush_to(Path(path))
    text = Path(path).read_bytes().decode("utf-8-sig", "replace")  # the end may be torn in the middle of a character
    name, first = os.fspath(path), text.partition("\n")[0]
    header = parsed(first)
    if isinstance(header, dict) and "uniclip" in header:
        return _of_recorder(name, header, text)
    if first == text and first.startswith(BEGINNING.decode()):  # torn before anything was recorded
        return _record(name, {}, [])
    if text.lstrip().startswith("{"):
        state = parsed(text)
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            return _of_log(name, [Line(number, row) for number, row in enumerate(state["log_history"], 1)])
    elif "step" in first.strip().split(","):
        return _of_log(name, _cells(name, text))
    msg = (
        f"{name} is no recorded run: expected the JSON Lines of uniclip.insight.Recorder, a trainer_state.json, or a "
        "metrics.csv with the columns step and clip/norm"
    )
    raise ValueError(msg)


def _of_recorder(name: str, header: dict[str, Any], text: str) -> Record:
    """Read the lines of the recorder."""
    header = checked_header(name, 1, header)
    rows, lines = text.split("\n")[1:], []
    while rows and not rows[-1].strip():
        rows.pop()
    for number, row in enumerate(rows, 2):
        values = parsed(row)
        if isinstance(values, dict) and "uniclip" in values:
            header = _joined(name, number, header, checked_header(name, number, values))
        elif isinstance(values, dict):
            lines.append(Line(number, values))
        elif number <= len(rows):
            refuse(name, number, f"expected a JSON object, got {short(row)}")
    return _record(name, header, lines)


def _joined(name: str, number: int, header: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return the header of a run that continued another one, for example with another rule."""
    both = {**header, **later}
    if header.get("leaves", both.get("leaves")) != both.get("leaves"):
        refuse(name, number, "the run goes on with other leaves than it began with")
    if header.get("scope") != later.get("scope"):
        both["scope"] = "other"
    if header.get("ord") != later.get("ord"):
        both["ord"] = None
    return both


def _cells(name: str, text: str) -> list[Line]:
    """Read the rows of a table as one line for each step, as some loggers write several rows for a step."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        refuse(name, reader.line_num, f"{error}")
    if not text.endswith("\n"):  # the last number may be incomplete
        rows = rows[: max(1, len(rows) - 1)]
    names, lines = rows[0][1], list[Line]()
    for number, row in rows[1:]:
        if len(row) != len(names):
            if number < rows[-1][0]:
                refuse(name, number, f"expected {len(names)} cells, got {len(row)}")
            continue
        values = {key: _number(cell) for key, cell in zip(names, row, strict=True) if cell}
        if lines and lines[-1].values.get("step") == values.get("step"):
            lines[-1].values.update(values)
        else:
            lines.append(Line(number, values))
    return lines


def _number(cell: str) -> Any:
    """Return a cell as an int or float if it is a number."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _of_log(name: str, lines: list[Line]) -> Record:
    """Read the log of a trainer: the lines with a norm."""
    for line in lines:
        if not isinstance(line.values, dict):
            refuse(name, line.number, f"expected an entry of the log with step and norm, got {short(line.values)}")
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
    found = [Line(number, _as_recorded(values, named)) for number, values in lines if norm in values]
    return _record(name, {"scope": "all_leaves", "ord": 2}, found)


def _as_recorded(values: dict[str, Any], named: dict[Any, str]) -> dict[str, Any]:
    """Return an entry of a log as a line of the recorder."""
    own = {key for key in values if key in OWN and key != "step" and key not in named}  # with another meaning
    line = {named.get(key, key): value for key, value in values.items() if key not in own}
    if type(line["norm"]) in NUMBERS:
        line["finite"] = line["norm"] is not None and abs(line["norm"]) < math.inf
    for key in ("limit", "threshold"):
        if type(line.get(key)) is float and not line[key] < UNLIMITED:
            line[key] = None
    if "skipped" in line:
        line["skipped"] = line["skipped"] == 1
    return line


def _keys(lines: Iterable[Line]) -> dict[str, None]:
    """Return the keys of all lines in order of appearance."""
    return dict.fromkeys(key for line in lines for key in line.values)


def _record(name: str, header: dict[str, Any], lines: list[Line]) -> Record:
    """Build the columns from the lines."""
    lines = ascending(name, lines)
    table = Table(name, lines)
    finite, limits, losses = table.flags("finite", usual=True), table.column("limit"), table.column("loss")
    limits[table.has("limit") & np.isnan(limits) & finite] = math.inf
    losses[table.has("loss") & ~np.isfinite(losses)] = math.inf
    labels, order = header.get("leaves", []), header.get("ord")
    extra = [key for key in _keys(lines) if key not in OWN and table.holds_numbers(key)]
    return Record(
        steps=np.asarray([line.values["step"] for line in lines], np.int64),
        norms=table.norms("norm"),
        limits=limits,
        factors=table.column("factor"),
        shares=table.column("share"),
        finite=finite,
        skipped=table.flags("skipped", usual=False),
        thresholds=table.column("threshold"),
        losses=losses,
        leaves=table.rows("leaves", len(labels)),
        leaf_steps=np.asarray([line.values["step"] for line in lines if "leaves" in line.values], np.int64),
        labels=labels,
        sizes=np.asarray(header.get("sizes", [0] * len(labels)), np.int64),
        rule=header.get("rule", ""),
        scope=header.get("scope", "other"),
        ord=None if order is None else float(order),
        extra={key: table.column(key) for key in extra},
    )
