# SPDX-License-Identifier: MIT
"""Draw the figures of single pages, from results of uniclip and of other libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from drawing_style import BLUE, GRAY, GREEN, ORANGE, RED, WIDTH
from matplotlib.figure import Figure

import uniclip as uc
from uniclip import insight
from uniclip.insight.page import page

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import exploding_rnn

ARROW = {"arrowstyle": "-|>", "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
CURVES = {
    name: getattr(uc.curves, name)
    for name in ("hard", "tanh", "smooth", "soft", "normalize", "reject")
}
CURVES |= {
    "Regularized(0.3)": uc.curves.Regularized(0.3),
    "NonMonotonic(0.1)": uc.curves.NonMonotonic(0.1),
}


def draw(folder: Path) -> None:
    """Write every figure into ``folder`` as SVG, and the page of a run."""
    for picture in (place, direction, norms, curves, which_rule):
        name = picture.__name__.replace("_", "-")
        picture().savefig(folder / f"{name}.svg", metadata={"Date": None})
    run(folder)


def run(folder: Path) -> None:
    """Write the page and the figure of a recorded run of the first example, clipped at 1.0."""
    lines = folder / "exploding_rnn.jsonl"
    lines.unlink(missing_ok=True)
    task = exploding_rnn.make_task(seed=0, steps=1000)
    exploding_rnn.train("numpy", exploding_rnn.use_numpy(), task, 1.0, lines)
    record = insight.read(lines)
    lines.with_suffix(".html").write_text(page(record), encoding="utf-8")
    with mpl.rc_context({"lines.linewidth": 1}):
        insight.plot(record).figure.savefig(folder / "run.svg", metadata={"Date": None})
    lines.unlink()


def place() -> Figure:
    """Draw the place of clipping in a training step."""
    figure = Figure(figsize=(7.5, 0.9))
    ax = figure.subplots()
    ax.set(xlim=(0, 4), ylim=(0, 1))
    ax.axis("off")
    steps = ["loss", "gradients", "clip", "update"]
    notes = ["forward pass", "backward pass", "here, every step", "optimizer step"]
    for i, (step, note) in enumerate(zip(steps, notes, strict=True)):
        color = ORANGE if step == "clip" else GRAY
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color, "linewidth": 2}
        ax.text(
            i + 0.5,
            0.72,
            step,
            ha="center",
            va="center",
            color=color,
            size=12,
            weight="bold",
            bbox=box,
        )
        ax.text(i + 0.5, 0.05, note, ha="center", va="center", color=color)
        if i:
            ax.annotate("", (i + 0.1, 0.72), (i - 0.06, 0.72), arrowprops=ARROW | {"color": GRAY})
    return figure


def direction() -> Figure:
    """Draw the effect of two scopes on a gradient of two leaves with one element each."""
    figure = Figure(figsize=(7, 3))
    ax = figure.subplots()
    leaves = [np.asarray([4.0]), np.asarray([1.2])]
    angle = np.linspace(0, np.pi / 2)
    ax.plot(np.cos(angle), np.sin(angle), color=BLUE, linewidth=1, linestyle="--")
    ax.plot([1, 1, 0], [0, 1, 1], color=ORANGE, linewidth=1, linestyle="--")
    for end, color, text, offset in [
        (leaves, GRAY, "gradient", (6, -2)),
        (uc.clip_by_norm(leaves, 1.0), ORANGE, "clipped per tensor: turned", (8, 6)),
        (
            uc.clip_by_global_norm(leaves, 1.0)[0],
            BLUE,
            "clipped by global norm: same direction",
            (12, -14),
        ),
    ]:
        ax.annotate("", np.concatenate(end), (0, 0), arrowprops=ARROW | {"color": color})
        ax.annotate(text, np.concatenate(end), offset, textcoords="offset points", color=color)
    ax.set(xlim=(0, 5), ylim=(0, 1.7), aspect="equal", xticks=range(6), yticks=[0, 1])
    ax.set(xlabel="gradient of the first leaf", ylabel="of the second")
    return figure


def norms() -> Figure:
    """Draw the norms that libraries report for large and small gradients and for many tensors."""
    figure = Figure(figsize=(5.6, 6.4))
    top, bottom = figure.subplots(2, 1)
    # The places of 0 and ∞ on the axis.
    zero, infinite = 1e-44, 1e46
    measured = json.loads(
        Path(__file__).with_name("compared-pages.json").read_text(encoding="utf-8")
    )["norms"]
    looks = zip(measured, [BLUE, RED, ORANGE, GREEN, GRAY], "os^vD", strict=True)
    for turn, (name, color, marker) in enumerate(looks):
        style = {"color": color, "marker": marker, "label": name, "linewidth": 1, "markersize": 5}
        style |= {} if turn else {"linewidth": 6, "alpha": 0.4, "markersize": 9}
        true, found = measured[name]["float32"]
        top.loglog(true, np.clip(found, zero, infinite), markevery=(2 * turn, 10), **style)
        bottom.plot(*measured[name]["bfloat16"], markevery=(turn, 5), **style)
    top.set_yticks(
        [zero, 1e-30, 1e-15, 1, 1e15, 1e30, infinite],
        ["0", "1e-30", "1e-15", "1", "1e15", "1e30", "∞"],
    )
    top.set_xticks([1e-30, 1e-15, 1, 1e15, 1e30], ["1e-30", "1e-15", "1", "1e15", "1e30"])
    top.minorticks_off()
    top.set(xlabel="true norm of a float32 gradient", ylabel="norm reported")
    bottom.set(xlabel="number of bfloat16 tensors [1]", ylabel="norm reported")
    top.legend(loc="upper left")
    return figure


def curves() -> Figure:
    """Draw every curve: factor and norm after clipping, by norm / limit."""
    figure, norm = Figure(figsize=(WIDTH, 5.6)), np.linspace(0.005, 3, 200)
    axes = figure.subplots(4, 2, sharex=True, sharey=True)
    for ax, (name, curve) in zip(axes.flat, CURVES.items(), strict=True):
        factors = curve(np, norm, np.ones_like(norm))
        ax.plot(norm, norm, color=GRAY, linewidth=0.9, label="unchanged")
        ax.plot(norm, factors, color=ORANGE, linewidth=1.5, linestyle="--", label="factor")
        ax.plot(norm, norm * factors, color=BLUE, label="norm after")
        ax.set_title(name, color=GRAY)
    ax.set(xlim=(0, 3), ylim=(0, 1.9), xticks=[0, 1, 2, 3], yticks=[0, 1])
    figure.supxlabel("norm / limit", size="medium")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def which_rule() -> Figure:
    """Draw synthetic norms, one in sixty far off, with the limits of different rules."""
    figure, norms = Figure(figsize=(WIDTH, 2.8)), np.random.default_rng(6).lognormal(0.0, 0.3, 1200)
    norms[59::60] *= 8
    ax = figure.subplots()
    ax.semilogy(norms, color=GRAY, linewidth=0.7)
    looks = [
        (99, GREEN, "-", "safety net"),
        (90, BLUE, "-.", "safety net"),
        (10, ORANGE, "--", "normalizer"),
    ]
    for percentile, color, dashes, text in looks:
        limit, clips = np.percentile(norms, percentile), f"{text}: clips {100 - percentile} %"
        ax.axhline(limit, color=color, linestyle=dashes, linewidth=1.4, zorder=5)
        ax.annotate(
            clips, (1.03, limit), xycoords=("axes fraction", "data"), color=color, va="center"
        )
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set(xlabel="step", ylabel="norm", xlim=(0, len(norms)))
    return figure
