# SPDX-License-Identifier: MIT
"""The colors and settings that all pictures share."""

from __future__ import annotations

from typing import Any

GRAY, BLUE, ORANGE, GREEN, RED = "#808080", "#3b82d0", "#e07b1a", "#2f9e62", "#d0453b"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "uniclip",  # the same bytes at every build
    "font.size": 10,
    "text.color": GRAY,  # gray on nothing: readable on a light and on a dark page
    "axes.edgecolor": GRAY,
    "axes.labelcolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 2,
}
