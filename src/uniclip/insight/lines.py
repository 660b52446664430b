# SPDX-License-Identifier: MIT
"""The lines of a recorded run: the text for each step, and the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from uniclip.backends import Backend, backend_of
from uniclip.insight.columns import parsed
from uniclip.insight.record import FORMAT
from uniclip.insight.spikes import WINDOW
from uniclip.report import UNLIMITED, Parts
from uniclip.rules import Rule
from uniclip.scopes import all_leaves, each_leaf

_HOST = (np.ndarray, np.generic, float, int)
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class Counts(NamedTuple):
    """The number of values of each kind in a part of a report."""

    norms: int
    limits: int
    factors: int
    thresholds: int
    finite: int
    skipped: int
    shares: int


class Kept(NamedTuple):
    """One step: its values in a row, arrays or numbers, and their layout."""

    own: Backend | None
    """The backend of the report's arrays, flags among them."""
    step: int
    values: list[Any]
    parts: list[Counts]
    leaves: int
    """The number of arrays that hold norms of leaves."""
    places: Sequence[int] | None
    """The leaves of these norms, ``None`` for all."""
    names: list[str]
    """The names of the other values."""

    def by_backend(self) -> dict[Backend | None, list[int]]:
        """Return the numbers of the values that are arrays of a framework."""
        found: dict[Any, list[int]] = {}
        ours = sum(map(sum, self.parts))
        for number, value in enumerate(self.values):
            if not isinstance(value, _HOST):
                backend = self.own if number < ours else backend_of(value)
                found.setdefault(backend, []).append(number)
        return found


def kept_of(
    step: int, parts: list[Parts], leaves: list[Any], places: Sequence[int] | None, more: dict[str, Any]
) -> Kept:
    """Return the values to keep of a step."""
    values: list[Any] = []
    counts = []
    for part in parts:
        some = [_not_empty(one) for one in (part.norms, part.limits, part.factors, part.thresholds or (), part.finite)]
        if not some[0]:
            continue
        skipped = () if part.skipped is None else (part.skipped,)
        share = () if part.share is None else (part.share,)
        counts.append(Counts(*map(len, (*some, skipped, share))))
        for one in (*some, skipped, share):
            values += one
    own = parts[0].own if parts else None
    return Kept(own, step, [*values, *leaves, *more.values()], counts, len(leaves), places, list(more))


def _not_empty(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that have entries."""
    return [array for array in arrays if 0 not in getattr(array, "shape", ())]


def row_of(kept: Kept) -> tuple[dict[str, Any], np.ndarray[Any, Any] | None]:
    """Return the line of a step whose values are numbers or NumPy arrays, and the norms of its leaves."""
    values = iter(kept.values)
    found = [_of_part(values, counts) for counts in kept.parts]
    row: dict[str, Any] = {"step": kept.step}
    sound = True
    if found:
        norms, limits, thresholds, factors, shares, finite, skipped = zip(*found, strict=True)
        some = [one for one in thresholds if one is not None]
        row["norm"] = _number(np.max(norms) if len(norms) > 1 else norms[0])  # NaN if one of them is
        row["limit"] = _limit(min(limits))
        row |= {"threshold": _limit(min(some))} if some else {}
        row["factor"] = _number(math.prod(factors))
        row["share"] = float(max(shares))
        sound = all(finite)
        row |= {"skipped": any(skipped)} if any([one is not None for one in skipped]) else {}
    leaves = [np.ravel(array) for array in islice(values, kept.leaves)]
    row |= {name: _number(value) for name, value in zip(kept.names, values, strict=True)}
    row |= {} if sound else {"finite": False}
    return row, np.concatenate(leaves) if leaves else None


def _of_part(values: Iterator[Any], counts: Counts) -> tuple[Any, ...]:
    """Return the largest norm, smallest limit, threshold and factor of a part, its share, and its flags."""
    norms, limits, factors, thresholds, flags, skipped, shares = (list(islice(values, count)) for count in counts)
    count = sum([getattr(factor, "size", 1) for factor in factors])
    changed = sum([_count(factor != 1) for factor in factors])
    norm = _over(np.max, norms)
    finite = math.isfinite(norm) and all([bool(np.all(flag)) for flag in flags])
    return (
        norm, _over(np.min, limits), _over(np.min, thresholds) if thresholds else None, _over(np.min, factors),
        shares[0] if shares else changed / count, finite, bool(np.any(skipped[0])) if skipped else None,
    )  # fmt: skip


def _count(flags: Any) -> int:
    """Return the number of flags that are set."""
    return int(np.count_nonzero(flags)) if getattr(flags, "ndim", 0) else int(flags)


def _over(function: Any, arrays: list[Any]) -> Any:
    """Return a reduction over all entries of all arrays."""
    found = [function(array) if getattr(array, "ndim", 0) else array for array in arrays]
    return found[0] if len(found) == 1 else function(found)


def _number(value: Any) -> float | None:
    """Return a number for JSON, with the digits of its dtype; ``None`` if it is not finite."""
    number = float(value.item() if isinstance(value, np.ndarray) else value)
    if not math.isfinite(number):
        return None
    return float(f"{number:.9g}") if getattr(value, "dtype", None) == np.float32 else number


def _limit(value: Any) -> float | None:
    """Return a limit for JSON, ``None`` for no limit."""
    return None if value >= UNLIMITED else _number(value)


def written(row: dict[str, Any], leaves: np.ndarray[Any, Any] | None = None) -> str:
    """Return a line of the file."""
    if leaves is not None:
        row = {**row, "leaves": list(map(_number, leaves))}
    return _encode(row) + "\n"


def refuse_other(path: Path) -> None:
    """Refuse a file that is not a recorded run, which would be lost."""
    if path.exists():
        with path.open("rb") as file:
            first = _parsed(file.readline())
        if not (first and "uniclip" in first):
            msg = f"{path} exists, and is no recorded run: give another path"
            raise ValueError(msg)


class File:
    """The file of a recorder.

    Attributes
    ----------
    norms : list of float
        The last norms in it, NaN for those that are not finite.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.norms: list[float] = []
        self._header: dict[str, Any] | None = None
        self._begun = False

    def begin(self, header: dict[str, Any], step: int) -> None:
        """Begin, or continue an earlier run from a step on; done only once."""
        if not self._begun:
            self._go_on(header, step)
            self._begun = True

    def write(self, header: dict[str, Any], lines: list[str]) -> None:
        """Append lines, with a header where they need one."""
        there = self.path.exists() and self.path.stat().st_size
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(("" if there and self._header == header else written(header)) + "".join(lines))
        self._header = header

    def _go_on(self, header: dict[str, Any], step: int) -> None:
        """Drop the lines of an earlier run from a step on; if none is left, keep all of them in another file."""
        if not self.path.exists():
            return
        refuse_other(self.path)
        old = _lines_of(self.path)
        rows = [_parsed(line) for line in old]
        if any([row is None for row in rows[:-1]]):
            msg = f"{self.path} has lines that are damaged: give another path"
            raise ValueError(msg)
        kept = [line for line, row in zip(old, rows, strict=True) if row is not None and row.get("step", -1) < step]
        heads = [row for row in rows if row is not None and "uniclip" in row]
        if len(kept) == len(heads):
            self.path.replace(_free(self.path))
            return
        if heads[-1].get("leaves") != header.get("leaves"):
            msg = f"{self.path} is a run of other leaves, and goes on at step {step} of this one: give another path"
            raise ValueError(msg)
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.write_bytes(b"".join(kept))
        fresh.replace(self.path)
        norms = [row.get("norm") for row in rows if row is not None and row.get("step", step) < step]
        self.norms = [math.nan if norm is None else norm for norm in norms[-WINDOW:]]
        self._header = heads[-1]


def _lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends; texts may contain characters that Python counts as line ends."""
    parts = path.read_bytes().split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _free(path: Path) -> Path:
    """Return a path for the file of an earlier run."""
    names = (path.with_name(f"{path.name}.old{number or ''}") for number in (0, *range(2, 10**6)))
    return next(name for name in names if not name.exists())


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the value in a line, ``None`` if the line is incomplete."""
    row = parsed(line) if line.endswith(b"\n") else None
    return row if isinstance(row, dict) else None


def scope_of(kept: Kept) -> str:
    """Return the assumed scope of norms without a rule: a single number covers all leaves."""
    alone = len(kept.parts) == 1 and kept.parts[0].norms == 1 and not getattr(kept.values[0], "ndim", 0)
    return "all_leaves" if alone else "other"


def header_of(
    rule: Any, scope: str | None, every: int, labels: list[str] | None, sizes: list[int] | None
) -> dict[str, Any]:
    """Return the first line of the file; ``scope`` is that of an unknown rule."""
    scope = scope or "other"
    order: Any = 2 if scope == "all_leaves" else None
    if isinstance(rule, Rule):
        scope = {all_leaves: "all_leaves", each_leaf: "each_leaf"}.get(rule.scope, "other")
        order = None if rule.norm.size_power else "inf" if rule.norm.ord == math.inf else rule.norm.ord
    named = {} if rule is None else {"rule": repr(rule)}
    header: dict[str, Any] = {"uniclip": FORMAT, **named, "scope": scope, "ord": order, "every": every}
    header |= {} if labels is None else {"leaves": labels}
    return header | ({} if sizes is None else {"sizes": sizes})
