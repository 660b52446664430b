# SPDX-License-Identifier: MIT
"""The lines of a recorded run as columns, with a check of each value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from uniclip._repr import short
from uniclip.insight.record import FORMAT

Array: TypeAlias = np.ndarray[Any, Any]

NUMBERS = {int, float, bool, type(None)}
_SCOPES = ("all_leaves", "each_leaf", "other")
_WHOLE = 2**63
"""An upper bound of integers."""
_TOO_LARGE = "a number that float64 holds"
_NORM = "a norm, at least 0"


class Line(NamedTuple):
    """The values recorded for a step, and the number of its line in the file."""

    number: int
    values: dict[str, Any]


def parsed(text: str | bytes) -> Any:
    """Parse JSON; ``None`` if it is not valid, or nested too deeply to be a record."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def refuse(name: str, number: int, what: str) -> NoReturn:
    """Raise an error that says which line of which file is damaged, and how."""
    msg = f"{name}, line {number}: {what}"
    raise ValueError(msg)


def checked_header(name: str, number: int, header: dict[str, Any]) -> dict[str, Any]:
    """Return a header; refuse a newer format, or a value of the wrong kind."""
    version = header["uniclip"]
    if type(version) is not int or version < 1:
        refuse(name, number, f'"uniclip" must be the number of the format, {FORMAT}, got {short(version)}')
    if version > FORMAT:
        refuse(name, number, f"format {version} is that of a newer uniclip; this one reads up to {FORMAT}: update it")
    rule, scope, order = header.get("rule", ""), header.get("scope", "other"), header.get("ord")
    labels = header.get("leaves", [])
    sizes = header.get("sizes", [0] * len(labels) if isinstance(labels, list) else [])
    positive = isinstance(order, (int, float)) and type(order) is not bool and 0 < order <= sys.float_info.max
    fits = [
        ("rule", rule, isinstance(rule, str), "text"),
        ("scope", scope, isinstance(scope, str) and scope in _SCOPES, f"one of {', '.join(_SCOPES)}"),
        ("ord", order, order is None or order == "inf" or positive, 'a number above 0, "inf" or null'),
        ("leaves", labels, isinstance(labels, list) and set(map(type, labels)) <= {str}, "a list of labels"),
        ("sizes", sizes, isinstance(sizes, list) and all(map(_is_size, sizes)), "a list of whole numbers"),
    ]
    for key, value, right, wanted in fits:
        if not right:
            refuse(name, number, f"{key} must be {wanted}, got {short(value)}")
    if len(sizes) != len(labels):
        refuse(name, number, f"sizes must be those of {len(labels)} leaves, got {len(sizes)}")
    return header


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _WHOLE


def ascending(name: str, lines: list[Line]) -> list[Line]:
    """Drop lines from before a run was resumed at an earlier step."""
    kept: list[Line] = []
    for line in lines:
        step = line.values.get("step")
        if type(step) is not int:
            refuse(name, line.number, f"step must be a whole number, got {short(step)}")
        if not -_WHOLE <= step < _WHOLE:
            refuse(name, line.number, f"step must be a number that int64 holds, got {short(step)}")
        while kept and kept[-1].values["step"] >= step:
            kept.pop()
        kept.append(line)
    return kept


class Table(NamedTuple):
    """The lines of a file, to be read by column."""

    name: str
    lines: list[Line]

    def column(self, key: str) -> Array:
        """Return the numbers of a key, NaN where there is none."""
        values = [line.values.get(key) for line in self.lines]
        if not set(map(type, values)) <= NUMBERS:
            self._refuse(key, lambda value: type(value) in NUMBERS, "a number or null")
        try:
            return np.asarray(values, np.float64)
        except OverflowError:
            self._refuse(key, _in_range, _TOO_LARGE)

    def norms(self, key: str) -> Array:
        """Return the numbers of a key, none of which may be negative."""
        column = self.column(key)
        if (column < 0).any():
            self._refuse(key, lambda value: value is None or not value < 0, _NORM)
        return column

    def flags(self, key: str, *, usual: bool) -> Array:
        """Return the flags of a key, the default where there is none."""
        values = [line.values.get(key, usual) for line in self.lines]
        if not set(map(type, values)) <= {bool}:
            self._refuse(key, lambda value: type(value) is bool, "true or false")
        return np.asarray(values, bool)

    def has(self, key: str) -> Array:
        """Return which lines have a key."""
        return np.asarray([key in line.values for line in self.lines], bool)

    def rows(self, key: str, count: int) -> Array:
        """Return the norms in the lists of a key, ``(m, count)``, one row for each of the m lines that have it."""
        lists = [line.values[key] for line in self.lines if key in line.values]
        if not all([_is_row(row, count) for row in lists]):
            self._refuse(key, lambda row: _is_row(row, count), f"{count} norms, as the first line names")
        try:
            found = np.asarray(lists, np.float64).reshape(len(lists), count)
        except OverflowError:
            self._refuse(key, lambda row: all(map(_in_range, row)), f"{count} numbers that float64 holds")
        if (found < 0).any():
            self._refuse(
                key, lambda row: not any(one is not None and one < 0 for one in row), f"{count} norms, at least 0"
            )
        return found

    def holds_numbers(self, key: str) -> bool:
        """Whether all values of a key are numbers."""
        return {type(line.values.get(key)) for line in self.lines} <= NUMBERS

    def _refuse(self, key: str, fits: Callable[[Any], bool], wanted: str) -> NoReturn:
        """Refuse the first line with an invalid value."""
        line = next(line for line in self.lines if key in line.values and not fits(line.values[key]))
        refuse(self.name, line.number, f"{key} must be {wanted}, got {short(line.values[key])}")


def _is_row(row: Any, count: int) -> bool:
    return isinstance(row, list) and len(row) == count and set(map(type, row)) <= NUMBERS


def _in_range(value: Any) -> bool:
    """Whether a number, or ``None``, is in the range of float64."""
    return type(value) is not int or abs(value) <= sys.float_info.max
