# SPDX-License-Identifier: MIT
"""The file of a recorder: JSON Lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from uniclip.insight.record import BEGINNING, FORMAT, LOGGED
from uniclip.report import UNLIMITED

_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class File:
    """The file of a recorder, which is opened to write only.

    Raises
    ------
    FileNotFoundError
        If its folder does not exist.
    ValueError
        If there is another file.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            msg = f"there is no folder {str(path.parent)!r} to write {path.name!r} into"
            raise FileNotFoundError(msg)
        self.path, self._header = path, ""
        self._refuse_other()

    def _refuse_other(self) -> None:
        """Refuse a file that is not a recorded run, which would be lost."""
        if self.path.exists():
            with self.path.open("rb") as file:
                first = file.readline()
            if not (first.startswith(BEGINNING) and first.endswith(b"\n")):
                msg = f"{self.path} exists, and is no recorded run: give another path"
                raise ValueError(msg)

    def write(self, rows: list[dict[str, Any]], rule: Any) -> None:
        """Append rows, after a header if the rule is another one than before."""
        header = _encode({"uniclip": FORMAT} | ({} if rule is None else {"rule": repr(rule)})) + "\n"
        if not self._header and self.path.exists():
            self._refuse_other()
            self._go_on(rows[0]["step"])
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(["" if header == self._header else header, *map(_line, rows)]))
        self._header = header

    def _go_on(self, step: int) -> None:
        """Drop the rows of an earlier run from a step on, and a torn line; if no row is left, rename the file."""
        lines = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        kept = [line for line in lines if json.loads(line).get("step", -1) < step]
        heads = [line for line in kept if line.startswith(BEGINNING)]
        if len(kept) == len(heads):
            self.path.replace(_free(self.path))
            return
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(self.path)
        self._header = heads[-1].decode()


def _free(path: Path) -> Path:
    """Return a path for the file of an earlier run."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in (0, *range(2, 10**6)))
    return next(name for name in names if not name.exists())


def _line(row: dict[str, Any]) -> str:
    """Return the line of a row: ``null`` for what is not finite, and for a limit that limits nothing."""
    short = {name.removeprefix(LOGGED): value for name, value in row.items()}
    for name in ("limit", "threshold"):
        if short.get(name, 0.0) >= UNLIMITED:
            short[name] = None
    if "skipped" in short:
        short["skipped"] = bool(short["skipped"])
    if "leaves" in short:
        short["leaves"] = {label: _number(norm) for label, norm in short["leaves"].items()}
    return _encode({name: _number(value) for name, value in short.items()}) + "\n"


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
