# SPDX-License-Identifier: MIT
"""Draw the pictures of the documentation, from results of uniclip and of other libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import uniclip as uc
from uniclip import insight
from uniclip.insight.page import page

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from drawing_style import BLUE, GRAY, GREEN, ORANGE, RED, STYLE

import exploding_rnn


def draw(folder: Path) -> None:
    """Write every picture into ``folder`` as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for figure in (place, direction, norms):
            figure().savefig(folder / f"{figure.__name__}.svg", metadata={"Date": None}, bbox_inches="tight")
    write_page(folder / "exploding_rnn.html")


def write_page(path: Path) -> None:
    """Write the page and the picture of a recorded run of the first example, clipped at 1.0."""
    lines = path.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    task = exploding_rnn.make_task(seed=0, steps=exploding_rnn.STEPS)
    exploding_rnn.train("numpy", exploding_rnn.use_numpy(), task, 1.0, lines)
    record = insight.read(lines)
    path.write_text(page(record), encoding="utf-8")
    with mpl.rc_context(STYLE | {"lines.linewidth": 1}):
        picture = insight.plot(record).figure
        picture.savefig(path.with_name("run.svg"), metadata={"Date": None}, bbox_inches="tight")
    lines.unlink()


def place() -> Figure:
    """Draw where clipping goes."""
    figure = Figure(figsize=(7.5, 0.9))
    ax = figure.subplots()
    ax.set(xlim=(0, 4), ylim=(0, 1))
    ax.axis("off")
    steps = ["loss", "gradients", "clip", "update"]
    notes = ["forward pass", "backward pass", "here, every step", "optimizer step"]
    for i, (step, note) in enumerate(zip(steps, notes, strict=True)):
        color = ORANGE if step == "clip" else GRAY
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color, "linewidth": 2}
        ax.text(i + 0.5, 0.72, step, ha="center", va="center", color=color, size=12, weight="bold", bbox=box)
        ax.text(i + 0.5, 0.05, note, ha="center", va="center", color=color)
        if i:
            _arrow(ax, (i - 0.06, 0.72), (i + 0.1, 0.72), GRAY)
    return figure


def direction() -> Figure:
    """Draw what the two ways of clipping do to a gradient of two leaves with one entry each."""
    figure = Figure(figsize=(7, 3))
    ax = figure.subplots()
    grad = np.asarray([4.0, 1.2])
    leaves = [grad[:1], grad[1:]]
    whole = np.concatenate(uc.clip_by_global_norm(leaves, 1.0)[0])
    each = np.concatenate(uc.clip_by_norm(leaves, 1.0))
    angle = np.linspace(0, np.pi / 2)
    ax.plot(np.cos(angle), np.sin(angle), color=BLUE, linewidth=1, linestyle="--")
    ax.plot([1, 1, 0], [0, 1, 1], color=ORANGE, linewidth=1, linestyle="--")
    for end, color, text, offset in [
        (grad, GRAY, "gradient", (6, -2)),
        (each, ORANGE, "clipped per tensor: turned", (8, 6)),
        (whole, BLUE, "clipped by global norm: same direction", (12, -14)),
    ]:
        _arrow(ax, (0, 0), end, color)
        ax.annotate(text, end, xytext=offset, textcoords="offset points", color=color)
    ax.set(xlim=(0, 5), ylim=(0, 1.7), aspect="equal", xticks=range(6), yticks=[0, 1])
    ax.set(xlabel="gradient of the first leaf", ylabel="of the second")
    return figure


def norms() -> Figure:
    """Draw the norms that libraries report, of large and small gradients and of many tensors."""
    figure = Figure(figsize=(5.6, 6.4))
    top, bottom = figure.subplots(2, 1)
    zero, infinite = 1e-44, 1e46  # where the axis shows 0 and ∞
    measured = json.loads(Path(__file__).with_name("compared-pages.json").read_text(encoding="utf-8"))["norms"]
    looks = zip(measured, [BLUE, RED, ORANGE, GREEN, GRAY], "os^vD", strict=True)
    for turn, (name, color, marker) in enumerate(looks):
        style = {"color": color, "marker": marker, "label": name, "linewidth": 1, "markersize": 5}
        style |= {} if turn else {"linewidth": 6, "alpha": 0.4, "markersize": 9}
        true, found = measured[name]["float32"]
        top.loglog(true, np.clip(found, zero, infinite), markevery=(2 * turn, 10), **style)
        count, found = measured[name]["bfloat16"]
        bottom.plot(count, found, markevery=(turn, 5), **style)
    ticks = {zero: "0", 1e-30: "1e-30", 1e-15: "1e-15", 1: "1", 1e15: "1e15", 1e30: "1e30", infinite: "∞"}
    top.set_yticks(list(ticks), list(ticks.values()))
    top.set_xticks([1e-30, 1e-15, 1, 1e15, 1e30], ["1e-30", "1e-15", "1", "1e15", "1e30"])
    top.minorticks_off()
    top.set(xlabel="true norm of a float32 gradient", ylabel="norm reported")
    bottom.set(xlabel="number of bfloat16 tensors [1]", ylabel="norm reported")
    top.legend(loc="upper left")
    figure.subplots_adjust(hspace=0.3)
    return figure


def _arrow(ax: Any, start: Any, end: Any, color: str) -> None:
    ax.annotate(
        "",
        end,
        xytext=start,
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 0, "shrinkB": 0},
    )
