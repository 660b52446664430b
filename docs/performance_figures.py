# SPDX-License-Identifier: MIT
"""Draw what ``benchmarks/speed.py`` measured: how far uniclip is ahead, and how its time grows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from figures import BLUE, GRAY, GREEN, ORANGE, RED, STYLE
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from contenders import DROP_IN, EAGER, GLOBAL, NATIVE, OURS, OURS_IN_PLACE
from speed_tables import TITLES
from targets import tree_of

Row = dict[str, Any]
Look = tuple[str, float, str]
LOOKS: dict[tuple[str, bool], Look] = {
    (OURS, False): (BLUE, 1.0, "not clipped"),
    (OURS_IN_PLACE, False): (BLUE, 0.45, "not clipped, in place"),
    (DROP_IN, False): (GREEN, 1.0, "not clipped, drop-in"),
    (OURS, True): (ORANGE, 1.0, "clipped"),
    (OURS_IN_PLACE, True): (ORANGE, 0.45, "clipped, in place"),
    (DROP_IN, True): (RED, 1.0, "clipped, drop-in"),
}
"""The color, the opacity and the label of a contender, unclipped and clipped."""
COLORS = dict(zip(TITLES, [GRAY, RED, ORANGE, BLUE], strict=True))


def draw(folder: Path, results: dict[str, Any]) -> None:
    """Write the pictures into ``folder`` as SVG."""
    with mpl.rc_context(STYLE):
        pictures = {name: ahead([r for r in results["rows"] if r["framework"] == name]) for name in TITLES}
        for name, figure in (pictures | {"scaling": scaling(results["scaling"])}).items():
            figure.savefig(folder / f"speed-{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def ahead(rows: list[Row]) -> Figure:
    """Draw the ratios of one framework, a part for each way of calling."""
    looks = {key: look for key, look in LOOKS.items() if any(key[0] in row["contenders"] for row in rows)}
    ways = {way: [row for row in rows if row["way"] == way] for way in dict.fromkeys(row["way"] for row in rows)}
    sizes = [len({tree_of(row) for row in found}) for found in ways.values()]
    figure = Figure(figsize=(5.6, sum(sizes) * (0.12 * len(looks) + 0.15) + 0.5 * len(ways) + 0.5), layout="tight")
    grid = figure.subplots(len(ways), 1, sharex=True, squeeze=False, height_ratios=sizes)
    for ax, (way, found) in zip(grid[:, 0], ways.items(), strict=True):
        bars(ax, found, looks)
        ax.set_title(f"{TITLES[found[0]['framework']]}, {way}", loc="left", size=10, color=GRAY)
    plain_ticks(ax, [q for row in rows for c in row["contenders"].values() for q in c.get("ratio", [])])
    ax.set_xlabel("native time / uniclip's time: right of 1 uniclip is faster")
    patches = [Patch(color=color, alpha=alpha, label=label) for color, alpha, label in looks.values()]
    figure.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    return figure


def bars(ax: Any, rows: list[Row], looks: dict[tuple[str, bool], Look]) -> None:
    """Draw bars from 1 to the ratios, and lines between their quartiles."""
    trees, width = list(dict.fromkeys(map(tree_of, rows))), 0.8 / len(looks)
    for place, ((name, clipped), (color, alpha, _)) in enumerate(looks.items()):
        for row in (row for row in rows if row["clipped"] == clipped and name in row["contenders"]):
            low, middle, high = row["contenders"][name]["ratio"]
            y = trees.index(tree_of(row)) + (place - (len(looks) - 1) / 2) * width
            ax.barh(y, middle - 1, width, left=1, color=color, alpha=alpha)
            ax.plot([low, high], [y, y], color=GRAY, linewidth=1)
    ax.set_yticks(range(len(trees)), trees)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.axvline(1, color=GRAY, linewidth=1)


def plain_ticks(ax: Any, values: list[float]) -> None:
    """Write the ratios as plain numbers, not as powers of ten."""
    steps = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    ticks = [step for step in steps if min(values) / 1.5 <= step <= max(values) * 1.5]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


def scaling(points: list[Row]) -> Figure:
    """Draw the time of the global norm over the number of leaves, and over the number of entries."""
    points = [point for point in points if point["rule"] == GLOBAL]
    figure = Figure(figsize=(5.6, 7.6))
    top, bottom = figure.subplots(2, 1)
    for framework, way in dict.fromkeys((point["framework"], point["way"]) for point in points):
        found = [point for point in points if (point["framework"], point["way"]) == (framework, way)]
        color, label = (COLORS[framework], TITLES[framework]) if way == EAGER else (GREEN, way)
        curve(top, [p for p in found if p["entries"] == 16 * p["leaves"]], "leaves", color, label)
        curve(bottom, [p for p in found if p["entries"] > 16 * p["leaves"]], "entries", color, label)
    bottom.plot([], [], color=GRAY, linestyle=":", label="native function")
    bottom.legend(loc="upper left")
    top.set(xlabel="leaves of 16 entries", ylabel="seconds")
    bottom.set(xlabel="entries of one leaf", ylabel="seconds")
    figure.subplots_adjust(hspace=0.3)
    return figure


def curve(ax: Any, points: list[Row], size: str, color: str, label: str) -> None:
    """Draw the time of uniclip, and dotted that of the native function."""
    sizes = [point[size] for point in points]
    native, ours = ([point["us"][name] / 1e6 for point in points] for name in (NATIVE, OURS))
    if points:  # an empty line would still take its place in the legend
        ax.loglog(sizes, native, color=color, linestyle=":", linewidth=1.5)
        ax.loglog(sizes, ours, color=color, marker="o", markersize=4, label=label)
