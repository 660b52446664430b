# SPDX-License-Identifier: MIT
"""The file of a recorder: JSON Lines."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from uniclip.insight.record import BEGINNING, FORMAT, LOGGED
from uniclip.report import UNLIMITED

_ROW = re.compile(rb'{"step": (\d+)')
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class File:
    """The file of a recorder, which is opened to write only.

    Raises
    ------
    FileNotFoundError
        If it is a folder, or its folder does not exist.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {str(path.parent)!r}"
            msg = f"{path} {what}: give the path of a file"
            raise FileNotFoundError(msg)
        self.path = path
        self._header: bytes | None = None

    def write(self, rows: list[dict[str, Any]], rule: Any) -> None:
        """Append rows, after a header if the rule is another one than before."""
        header = _line({"uniclip": FORMAT} | ({} if rule is None else {"rule": repr(rule)}))
        before = self._go_on(rows[0]["step"]) if self._header is None or not self.path.exists() else self._header
        with self.path.open("ab") as file:
            file.write(b"".join([b"" if header == before else header, *map(_line, rows)]))
        self._header = header

    def _go_on(self, step: int) -> bytes:
        """Drop the rows of an earlier run from a step on, and a torn line; rename the file if there are no others.

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
    """Return the line of a row: ``null`` for what is not finite, and for a limit that limits nothing."""
    short = {name.removeprefix(LOGGED): value for name, value in row.items()}
    for name in ("limit", "threshold"):
        if short.get(name, 0.0) >= UNLIMITED:
            short[name] = None
    if "skipped" in short:
        short["skipped"] = short["skipped"] == 1  # of a window: all of it
    if "leaves" in short:
        short["leaves"] = {label: _number(norm) for label, norm in short["leaves"].items()}
    return f"{_encode({name: _number(value) for name, value in short.items()})}\n".encode()


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
