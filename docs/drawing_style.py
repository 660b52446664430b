# SPDX-License-Identifier: MIT
"""The colors and settings of all figures; importing this module applies them."""

from __future__ import annotations

import matplotlib as mpl

GRAY, BLUE, ORANGE, GREEN, RED = "#808080", "#3b82d0", "#e07b1a", "#2f9e62", "#d0453b"
WIDTH = 5.0
"""Inches: narrow enough that the text is readable where the page is 360 pixels wide."""
TEXT = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
# Gray on transparent: readable on a light and on a dark page.
mpl.rcParams |= dict.fromkeys(TEXT, GRAY) | {
    # The same bytes at every build.
    "svg.hashsalt": "uniclip",
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "lines.linewidth": 2,
}
