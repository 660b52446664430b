# SPDX-License-Identifier: MIT
"""Draw every rule, large for its section and small for its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from drawing_style import BLUE, GRAY, ORANGE, WIDTH
from matplotlib.figure import Figure
from rule_presets import EXAMPLES, PRESETS, Example, made

import uniclip as uc

CARD = (2.4, 1.1)


def draw(folder: Path) -> None:
    """Write both figures of every rule into ``folder`` as SVG."""
    for name in PRESETS:
        picture = over_time if made(name).stateful else on_a_gradient
        for kind in ("rule", "small"):
            figure = picture(name, small=kind == "small")
            figure.savefig(folder / f"{kind}-{name}.svg", metadata={"Date": None})


# Stateless rules: a gradient before and after, and what norms its parts have, the larger it
# is.


def on_a_gradient(name: str, *, small: bool) -> Figure:
    """Draw the elements of a gradient before and after a rule, and its norms at other sizes."""
    figure, shown = (
        Figure(figsize=CARD if small else (WIDTH, 4.3)),
        EXAMPLES.get(name) or Example(made(name)),
    )
    bars, lines = figure.subplots(1, 2, width_ratios=(5, 2)) if small else figure.subplots(2, 1)
    texts, start = {}, 0.0
    for text, old, new in zip(shown.names, *run(shown, 1.0), strict=True):
        places = start + np.arange(len(old))
        start = places[-1] + 1.9
        bars.bar(places, old, width=0.84, color=GRAY, alpha=0.5)
        bars.bar(places, new, width=0.42, color=BLUE)
        texts[places.mean()] = f"{text}\n{factor(new / old)}"
    bars.axhline(0, color=GRAY, linewidth=0.8)
    bars.spines[:].set_visible(False)
    sizes = [run(shown, size) for size in np.geomspace(0.003, 100, 300)]
    norms = [
        [[np.linalg.norm(parts[i]) for parts in pair] for pair in sizes]
        for i in range(len(shown.names))
    ]
    lines.plot([0, 4], [0, 4], color=GRAY, linewidth=0.9)
    for text, pairs, dashes in zip(shown.names, norms, ["-", "--", ":", "-."], strict=False):
        lines.plot(
            *np.transpose(pairs), color=BLUE, linestyle=dashes, label=text.replace("\n", ", ")
        )
    lines.set(xlim=(0, 4), ylim=(0, 3.3))
    for ax in (bars, lines):
        ax.set(xticks=[], yticks=[])
    if not small:
        bars.set_xticks(list(texts), texts.values())
        bars.tick_params(length=0)
        bars.set_ylabel("entries")
        figure.legend(bars.containers[:2], ["before", "after"], loc="outside upper center", ncols=2)
        lines.set(xlabel="norm before", ylabel="norm after", xticks=range(5), yticks=range(4))
        lines.legend(loc="upper left", borderpad=0, labelspacing=0.1, handlelength=1.6)
    return figure


def run(shown: Example, size: float) -> list[list[np.ndarray]]:
    """Return the blocks of a scaled example before and after the rule."""
    grads = [size * np.asarray(leaf) for leaf in shown.leaves]
    params = None if shown.params is None else list(map(np.asarray, shown.params))
    both = grads, uc.clip(grads, shown.rule, params)[0]
    return [[row for leaf in leaves for row in np.atleast_2d(leaf)] for leaves in both]


def factor(factors: np.ndarray) -> str:
    """Return the factor of the elements of a block, if it is a single one."""
    if np.ptp(factors) > 1e-6:  # noqa: PLR2004 - rounding
        return ""
    return "kept" if factors[0] == 1 else f"{factors[0]:.2g} times"


# Stateful rules: norms before and after, and the limit, step by step.


SPIKES = {50: 8.0, 120: 100.0, 250: 6.0, 251: 6.0, 252: 6.0}
MISSING, SHIFT, LENGTH, LOW = 85, 180, 300, 0.05
WRITTEN = {50: "8x", MISSING: "NaN", 120: "100x", SHIFT: "doubled", 251: "6x"}


def trace(rule: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Run a rule on synthetic norms.

    Return these, the norms after, the thresholds, and the name of the thresholds.
    """
    norms = np.random.default_rng(4).lognormal(0.0, 0.2, LENGTH)
    norms[SHIFT:] *= 2
    norms[list(SPIKES)] *= list(SPIKES.values())
    norms[MISSING] = np.nan
    state, after, bounds, above = rule.init(np.zeros((1, 1))), [], [], False
    for norm in norms:
        _, state, report = rule.update(np.full((1, 1), norm), state)
        above = report.thresholds is not None
        after.append(norm * np.ravel(report.factors)[0])
        bounds.append(np.ravel(report.thresholds if above else report.limits)[0])
    return norms, np.asarray(after), np.asarray(bounds), "clips above" if above else "limit"


def over_time(name: str, *, small: bool) -> Figure:
    """Draw the norms before and after a stateful rule, its limit, and the clipped steps."""
    before, after, bound, text = trace(made(name))
    figure = Figure(figsize=CARD if small else (WIDTH, 3.0))
    ax, gone = figure.subplots(), np.flatnonzero(after == 0)
    ax.plot(before, color=GRAY, linewidth=0.9, label="before")
    ax.plot(np.maximum(after, LOW), color=BLUE, linewidth=2.8, label="after")
    bound = np.where(bound < np.finfo(np.float32).max, bound, np.nan)
    ax.plot(bound, color=ORANGE, linewidth=1.4, linestyle=(0, (4, 4)), zorder=5, label=text)
    if len(gone):
        ax.plot(
            gone, np.full(len(gone), LOW * 1.3), "v", color=BLUE, markersize=6, label="0: skipped"
        )
    ax.set(yscale="log", xlim=(0, LENGTH), ylim=(LOW, 150 if small else 500))
    ax.minorticks_off()
    if small:
        ax.set(xticks=[], yticks=[])
        ax.spines["left"].set_visible(False)
        return figure
    ax.yaxis.set_major_formatter("{x:g}")
    for step, text in WRITTEN.items():
        ax.text(step, 250, text, color=GRAY, ha="center")
    clipped = np.flatnonzero(~np.isnan(after) & (after != before))
    ax.vlines(
        clipped,
        -0.08,
        -0.02,
        color=BLUE,
        linewidth=1.1,
        transform=ax.get_xaxis_transform(),
        clip_on=False,
    )
    ax.tick_params("x", length=0, pad=15)
    ax.set(xlabel=f"step ({len(clipped)} of {LENGTH} are clipped)", ylabel="norm")
    figure.legend(loc="outside upper center", ncols=4, columnspacing=1)
    return figure
