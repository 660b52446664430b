# SPDX-License-Identifier: MIT
"""Draw what ``benchmarks/speed.py`` measured: how fast uniclip is beside the native functions, and how time grows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from drawing_style import BLUE, GRAY, GREEN, ORANGE, RED, STYLE
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from speed_answers import WAYS, like_native
from speed_format import TITLES, number

from contenders import EAGER, GLOBAL, NATIVE, OURS
from gradient_trees import CONVOLUTIONS, FIFTY, GPT, LSTM, MLP, RESNET, SMALL
from training_steps import KERAS_SMALL_NET, KERAS_STEPS, KERAS_WIDE_NET, WRAPPED

Row = dict[str, Any]
Bar = tuple[str, bool, list[float]]
"""A label, whether something was clipped, and the quartiles of a ratio."""
SHOWN = {
    RESNET: "ResNet-50",
    GPT: "GPT-2 small",
    LSTM: "LSTM",
    MLP: "small MLP",
    SMALL: "16 entries",
    FIFTY: "per tensor,\n50 tensors",
    CONVOLUTIONS: "agc, 10 layers",
}
"""The gradients that are drawn, with their labels."""
LOOKS = {False: (BLUE, "o", "not clipped"), True: (ORANGE, "s", "clipped")}
SCALING_LOOKS = {"torch": (RED, "o"), "tensorflow": (ORANGE, "s"), "jax": (BLUE, "^"), "numpy": (GRAY, "D")}


def draw(folder: Path, results: dict[str, Any]) -> None:
    """Write the pictures into ``folder`` as SVG."""
    with mpl.rc_context(STYLE):
        pictures = {name: ahead(framework_panels(name, results["rows"])) for name in TITLES}
        pictures |= {"keras": ahead(keras_panels(results["steps"])), "scaling": scaling(results["scaling"])}
        for name, figure in pictures.items():
            figure.savefig(folder / f"speed-{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def framework_panels(framework: str, rows: list[Row]) -> dict[str, list[Bar]]:
    """Return what is drawn for a framework: for each way of calling, the ratios of the trees that are shown."""
    panels: dict[str, list[Bar]] = {}
    for key, title in WAYS.items():
        found = [r for r in rows if (r["framework"], r["way"]) == key and r["dtype"] == "float32"]
        bars = [
            (label, row["clipped"], row["contenders"][like_native(row)]["ratio"])
            for tree, label in SHOWN.items()
            for row in sorted(found, key=lambda row: row["clipped"])
            if row["tree"] == tree
        ]
        if key[0] == framework and bars and "donated" not in key[1]:
            panels[title.replace("`", "")] = bars
    return panels


def keras_panels(steps: list[Row]) -> dict[str, list[Bar]]:
    """Return what is drawn for Keras: whole steps with `ClippedOptimizer` beside those with ``global_clipnorm``."""
    found = {row["kind"]: row["contenders"].get(WRAPPED, {}).get("ratio", []) for row in steps}
    eager = [(SHOWN[tree], clipped, found.get(kind, [])) for (tree, clipped), kind in KERAS_STEPS.items()]
    nets = {KERAS_SMALL_NET: "small MLP", KERAS_WIDE_NET: "wide MLP"}
    batch = [(label, True, found.get(kind, [])) for kind, label in nets.items()]
    panels = {"A step of SGD, called eagerly": eager, "train_on_batch": batch}
    return {title: bars for title, bars in panels.items() if all(bar[2] for bar in bars)}


def ahead(panels: dict[str, list[Bar]]) -> Figure:
    """Draw the ratios in panels that share their axis, and the line at which both are as fast."""
    counts = [len({label for label, *_ in bars}) for bars in panels.values()]
    heights = [0.42 * count + 0.45 for count in counts]
    figure = Figure(figsize=(4.4, sum(heights) + 0.7))
    if not panels:
        figure.text(0.5, 0.5, "not measured yet", ha="center")
        return figure
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    for place, (ax, (title, bars)) in enumerate(zip(grid, panels.items(), strict=True)):
        panel(ax, bars)
        ax.set_title(title, loc="left", size=11, color=GRAY, weight="bold", pad=18 if place == 0 else 6)
    above = {"xycoords": ("data", "axes fraction"), "xytext": (0, 4), "textcoords": "offset points"}
    grid[0].annotate("as fast as native", (1, 1), ha="center", size=9.5, **above)
    ratios = [ratio for bars in panels.values() for *_, quartiles in bars for ratio in quartiles]
    low, high = min([*ratios, 0.8]), max([*ratios, 1.25])
    room = (high / low) ** 0.22  # for the numbers beside the markers
    ticks(grid[-1], low / room, high * room)
    grid[-1].set_xlabel("times as fast as the native function")
    looks: dict[str, Any] = {"linewidth": 2, "markersize": 6}
    keys = [Line2D([], [], color=color, marker=marker, label=text, **looks) for color, marker, text in LOOKS.values()]
    grid[0].legend(handles=keys, loc="lower center", bbox_to_anchor=(0.4, 1), borderaxespad=3.6, ncols=2)
    figure.subplots_adjust(hspace=1.1 * len(counts) / sum(counts))
    return figure


def panel(ax: Any, bars: list[Bar]) -> None:
    """Draw a marker at each ratio, a line between its quartiles, and the ratio as a number."""
    labels = list(dict.fromkeys(label for label, *_ in bars))
    ax.axvspan(1e-9, 1, color=GRAY, alpha=0.13, linewidth=0)
    ax.axvline(1, color=GRAY, linewidth=2)
    for label, clipped, (low, middle, high) in bars:
        color, marker, _ = LOOKS[clipped]
        y = labels.index(label) + (0.2 if clipped else -0.2)
        ax.plot([low, high], [y, y], color=color, linewidth=2)
        ax.plot([middle], [y], color=color, marker=marker, markersize=6, linestyle="none")
        end, shift, align = (low, -7, "right") if middle < 1 else (high, 7, "left")
        where = {"xytext": (shift, 0), "textcoords": "offset points", "annotation_clip": False}
        ax.annotate(number(middle), (end, y), va="center", ha=align, size=9.5, **where)
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.5, -0.5)


def ticks(ax: Any, low: float, high: float) -> None:
    """Write the ratios as plain numbers, not as powers of ten."""
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    digits = (1, 2, 5) if high / low < 50 else (1, 3)  # noqa: PLR2004 - so many labels fit
    steps = [digit * 10.0**power for power in range(-3, 4) for digit in digits]
    found = [step for step in steps if low <= step <= high]
    ax.set_xticks(found, [f"{tick:g}" for tick in found])
    ax.minorticks_off()


def scaling(points: list[Row]) -> Figure:
    """Draw the time of the global norm over the number of leaves, and over the number of entries."""
    points = [point for point in points if point["rule"] == GLOBAL]
    figure = Figure(figsize=(4.4, 6.6))
    top, bottom = figure.subplots(2, 1)
    for framework, way in dict.fromkeys((point["framework"], point["way"]) for point in points):
        found = [point for point in points if (point["framework"], point["way"]) == (framework, way)]
        (color, marker), label = SCALING_LOOKS[framework], TITLES[framework]
        look = (color, marker, label) if way == EAGER else (GREEN, "v", f"{label}, jit")
        curve(top, [p for p in found if p["entries"] == 16 * p["leaves"]], "leaves", look)
        curve(bottom, [p for p in found if p["entries"] > 16 * p["leaves"]], "entries", look)
    bottom.plot([], [], color=GRAY, linestyle=":", label="native function")
    figure.legend(*bottom.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.035), ncols=2)
    top.set(xlabel="tensors of 16 entries", ylabel="seconds")
    bottom.set(xlabel="entries of one tensor", ylabel="seconds")
    figure.subplots_adjust(hspace=0.3)
    return figure


def curve(ax: Any, points: list[Row], size: str, look: tuple[str, str, str]) -> None:
    """Draw the time of uniclip, and dotted that of the native function."""
    sizes = [point[size] for point in points]
    native, ours = ([point["us"][name] / 1e6 for point in points] for name in (NATIVE, OURS))
    color, marker, label = look
    if points:  # an empty line would still take its place in the legend
        ax.loglog(sizes, native, color=color, linestyle=":", linewidth=1.5)
        ax.loglog(sizes, ours, color=color, marker=marker, markersize=4, label=label)
