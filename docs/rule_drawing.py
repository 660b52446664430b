# SPDX-License-Identifier: MIT
"""What the pictures of the rules share: their size, their colors, and labels beside lines instead of legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from drawing_style import BLUE, GRAY, ORANGE
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

WIDTH, SMALL = 5.0, (2.4, 1.1)
"""Inches: narrow enough that the text can be read where the page is 360 pixels wide."""
DASHES = ["-", "--", ":"]
"""How lines of one picture differ."""
BEFORE: dict[str, Any] = {"color": GRAY, "linewidth": 0.9}
AFTER: dict[str, Any] = {"color": BLUE, "linewidth": 2.8}
LIMIT: dict[str, Any] = {"color": ORANGE, "linewidth": 1.4, "linestyle": (0, (4, 4)), "zorder": 5}


def new(height: float) -> Figure:
    """Return a figure of the common width."""
    return Figure(figsize=(WIDTH, height))


def small() -> Figure:
    """Return a figure for a card."""
    return Figure(figsize=SMALL)


def bare(ax: Any) -> None:
    """Leave of the axes nothing but the line at the bottom."""
    ax.set(xticks=[], yticks=[])
    ax.minorticks_off()
    ax.spines["left"].set_visible(False)


def plain_log(ax: Any, low: float, high: float) -> None:
    """Scale the norms by powers of ten, written as numbers."""
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    ticks = [tick for tick in (0.01, 0.1, 1, 10, 100) if low <= tick <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


def beside(ax: Any, texts: Sequence[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Write (height, text, color) at the right of the axes, at least ``gap`` of their height apart."""
    to_axes = ax.transData + ax.transAxes.inverted()
    x = ax.get_xlim()[1]
    heights = [float(to_axes.transform((x, y))[1]) for y, _, _ in texts]
    order = np.argsort(heights, kind="stable")
    placed: list[float] = []
    for i in order:
        placed.append(max(heights[i], placed[-1] + gap if placed else heights[i]))
    over = max(0.0, placed[-1] - 1.0)  # if the highest left the axes, move the ones that touch down together
    for k in range(len(placed) - 1, -1, -1):
        bound = placed[k + 1] - gap if k + 1 < len(placed) else 1.0
        placed[k] = min(placed[k], bound) if over else placed[k]
    for i, height in zip(order, placed, strict=True):
        _, text, color = texts[i]
        ax.text(1.02, height, text, color=color, transform=ax.transAxes, va="center", clip_on=False)
