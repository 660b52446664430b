# SPDX-License-Identifier: MIT
"""How tables are written in Markdown, and numbers of measured speed."""

from __future__ import annotations

from collections.abc import Iterable

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX", "numpy": "NumPy"}


def number(ratio: float) -> str:
    """Return a ratio to two decimals, or without any if it is large."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"  # noqa: PLR2004


def spread(quartiles: list[float]) -> str:
    """Return a median and the quartiles around it."""
    low, middle, high = map(number, quartiles)
    return f"{middle} ({low}-{high})" if low != high else middle


def percent(times: list[float]) -> str:
    """Return how much longer something takes, from quartiles of ratios to what is shorter."""
    low, middle, high = (round(100 * (x - 1)) for x in times)
    return f"{middle} % ({low} to {high})"


def duration(us: float) -> str:
    """Return a time to three digits."""
    unit, size = unit_of(us)
    return f"{digits(us / size)} {unit}"


def durations(us: list[float]) -> str:
    """Return a time with its quartiles, in one unit."""
    unit, size = unit_of(us[1])
    low, middle, high = (digits(x / size) for x in us)
    return f"{middle} {unit} ({low} to {high})"


def unit_of(us: float) -> tuple[str, float]:
    """Return the unit in which a time is written, and its microseconds."""
    return next(((unit, size) for unit, size in [("s", 1e6), ("ms", 1e3)] if abs(us) >= size), ("µs", 1.0))


def digits(value: float) -> str:
    """Return a number to three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def table(heads: list[str], rows: Iterable[list[str]], align: str = "---") -> str:
    """Return a Markdown table, or nothing if there are no rows; ``align`` is below all heads but the first."""
    lines = [heads, ["---", *[align] * (len(heads) - 1)], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return text if len(lines) > 2 else ""  # noqa: PLR2004 - the heads and the line below
