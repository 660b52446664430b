# SPDX-License-Identifier: MIT
"""Draw every rule, large for its section and small for its card, and the pictures that compare rules and curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from drawing_style import BLUE, GRAY, GREEN, ORANGE, RED, STYLE
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rule_presets import PRESETS, Example, example_of, made

import uniclip as uc

WIDTH, SMALL = 5.0, (2.4, 1.1)
"""Inches: narrow enough that the text can be read where the page is 360 pixels wide; and on a card."""
CURVES = {name: getattr(uc.curves, name) for name in ("hard", "tanh", "smooth", "soft", "normalize", "reject")}
CURVES |= {"Regularized(0.3)": uc.curves.Regularized(0.3), "NonMonotonic(0.1)": uc.curves.NonMonotonic(0.1)}


def draw(folder: Path) -> None:
    """Write every picture into ``folder`` as SVG."""
    with mpl.rc_context(STYLE | {"font.size": 10.5}):
        for name, figure in pictures():
            figure().savefig(folder / f"{name}.svg", metadata={"Date": None})


def pictures() -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the name of the file of each picture, and what draws it."""
    yield "curves", curves
    yield "which-rule", both_kinds
    for name in PRESETS:
        picture = over_time if getattr(made(name), "memory", False) else on_a_gradient
        yield f"rule-{name}", partial(picture, name)
        yield f"small-{name}", partial(picture, name, small=True)


# What all share.


def plain_log(ax: Any, low: float, high: float) -> None:
    """Scale the norms by powers of ten, written as numbers."""
    ax.set_yscale("log")
    ticks = [tick for tick in (0.01, 0.1, 1, 10, 100) if low <= tick <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylim(low, high)
    ax.yaxis.set_minor_locator(NullLocator())


def bare(ax: Any) -> None:
    """Leave of the axes nothing but the line at the bottom."""
    ax.set(xticks=[], yticks=[])
    ax.spines["left"].set_visible(False)


def beside(ax: Any, texts: Sequence[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Write (height, text, color) at the right of the axes, at least ``gap`` of their height apart."""
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [float(to_axes.transform((ax.get_xlim()[1], y))[1]) for y, _, _ in texts]
    last = -gap
    for height, (_, text, color) in sorted(zip(heights, texts, strict=True)):
        last = max(height, last + gap)
        ax.text(1.02, last, text, color=color, transform=ax.transAxes, va="center", clip_on=False)


# Rules without memory: a gradient before and after, and what norms its parts have, the larger it is.


def on_a_gradient(name: str, *, small: bool = False) -> Figure:
    """Draw the entries of a gradient before and after a rule, and the norms of its parts at other sizes of it."""
    figure, shown = Figure(figsize=SMALL if small else (WIDTH, 4.3)), example_of(name)
    large = (0.02, 0.56, 0.96, 0.34), (0.1, 0.12, 0.66, 0.27)
    bars, side = map(figure.add_axes, ((0.02, 0.03, 0.64, 0.95), (0.73, 0.03, 0.25, 0.95)) if small else large)
    before, after = run(shown, 1.0)
    start = 0.0
    for text, old, new in zip(shown.names, before, after, strict=True):
        places = start + np.arange(len(old))
        start = places[-1] + 1.9
        bars.bar(places, old, width=0.84, color=GRAY, alpha=0.5, linewidth=0)
        bars.bar(places, new, width=0.42, color=BLUE)
        if not small:
            note = f"{text}\n{factor(new / old)}"
            bars.text(
                places.mean(), -0.02, note, color=GRAY, ha="center", va="top", transform=bars.get_xaxis_transform()
            )
    bars.axhline(0, color=GRAY, linewidth=0.8)
    bare(bars)
    bars.spines["bottom"].set_visible(False)
    ends = compared(side, shown)
    if small:
        side.set(xticks=[], yticks=[])
        return figure
    for x, text, color in (
        (0.02, "entries of a gradient:", GRAY),
        (0.41, "before (wide),", GRAY),
        (0.69, "after (narrow)", BLUE),
    ):
        figure.text(x, 0.95, text, color=color)
    side.set(xlabel="norm before", ylabel="norm after")
    beside(side, ends, gap=0.17)
    return figure


def run(shown: Example, size: float) -> list[list[np.ndarray]]:
    """Return the parts of a gradient of so many times the example before and after the rule."""
    grads = [size * np.asarray(leaf, dtype=float) for leaf in shown.leaves]
    params = None if shown.params is None else [np.asarray(leaf, dtype=float) for leaf in shown.params]
    return [shown.parts(leaves) for leaves in (grads, uc.clip(grads, shown.rule, params)[0])]


def factor(factors: np.ndarray) -> str:
    """Return what the entries of a part were multiplied by, if that is one number."""
    if np.ptp(factors) > 1e-6:  # noqa: PLR2004 - rounding
        return ""
    return "kept" if factors[0] == 1 else f"{factors[0]:.2g} times"


def compared(ax: Any, shown: Example) -> list[tuple[float, str, str]]:
    """Draw norms after against norms before of each part; return where the lines end, with their names."""
    norms = np.asarray(
        [[list(map(np.linalg.norm, parts)) for parts in run(shown, s)] for s in np.geomspace(0.003, 100, 300)]
    )
    ax.plot([0, 4], [0, 4], color=GRAY, linewidth=0.9)
    ends = {}
    for text, old, new, dashes in zip(shown.names, *norms.transpose(1, 2, 0), ["-", "--", ":", "-."], strict=False):
        ax.plot(old, new, color=BLUE, linestyle=dashes)
        end = float(np.interp(4, old, new))
        ends.setdefault(round(end, 1), (end, text.partition("\n")[0], BLUE))
    ax.set(xlim=(0, 4), ylim=(0, 3), xticks=range(5), yticks=range(4))
    return list(ends.values()) if len(ends) > 1 else []


# Rules that learn: norms before and after, and the limit, step by step.


class Trace(NamedTuple):
    """Norms before and after a rule at each step, and above which it clips, NaN where nothing does."""

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray
    text: str  # what the bound is called


SPIKES = {50: 8.0, 120: 100.0, 250: 6.0, 251: 6.0, 252: 6.0}
WRITTEN = {50: "8 times", 120: "100 times", 251: "6 times"}
MISSING, SHIFT, LENGTH, LOW, HIGH = 85, 180, 300, 0.05, 500.0


@cache
def trace(name: str) -> Trace:
    """Run a rule on synthetic norms: around 1, then around 2, with spikes and one NaN."""
    rule, norms = made(name), np.random.default_rng(4).lognormal(0.0, 0.2, LENGTH)
    norms[SHIFT:] *= 2
    norms[list(SPIKES)] *= list(SPIKES.values())
    norms[MISSING] = np.nan
    state, after, bounds, above = rule.init(np.zeros((1, 1))), [], [], False
    for norm in norms:
        _, state, report = rule.update(np.full((1, 1), norm), state)
        above = report.thresholds is not None
        after.append(norm * float(np.ravel(report.factors)[0]))
        bounds.append(float(np.ravel(report.thresholds if above else report.limits)[0]))
    there = np.asarray(bounds) < np.finfo(np.float32).max
    bound = np.where(there & ~np.isnan(norms), bounds, np.nan)
    return Trace(norms, np.asarray(after), bound, "clips above" if above else "limit")


def over_time(name: str, *, small: bool = False) -> Figure:
    """Draw the norms before and after a rule that learns, its limit, and which steps it clips."""
    found, figure = trace(name), Figure(figsize=SMALL if small else (WIDTH, 3.0))
    ax = figure.add_axes((0.02, 0.03, 0.96, 0.95) if small else (0.13, 0.25, 0.65, 0.73))
    steps, gone = np.arange(LENGTH), np.flatnonzero(found.after == 0)
    ax.plot(steps, found.before, color=GRAY, linewidth=0.9)
    ax.plot(steps, np.where(found.after < LOW, LOW, found.after), color=BLUE, linewidth=2.8)
    ax.plot(steps, found.bound, color=ORANGE, linewidth=1.4, linestyle=(0, (4, 4)), zorder=5)
    ax.plot(gone, np.full(len(gone), LOW * 1.3), "v", color=BLUE, markersize=6, zorder=6)
    plain_log(ax, LOW, 150 if small else HIGH)
    ax.set_xlim(0, LENGTH)
    if small:
        bare(ax)
        return figure
    if len(gone):
        ax.annotate("0: skipped", (gone[0], LOW * 1.3), (8, 2), color=BLUE, textcoords="offset points")
    for step, text in WRITTEN.items():
        top = np.nanmax([found.before[step], *found.bound[max(step - 25, 0) : step + 25]])
        ax.text(step, top * 1.35, text, color=GRAY, ha="center")
    arrow = {"arrowstyle": "-|>", "linewidth": 1, "shrinkA": 0, "shrinkB": 1}
    notes = [("norms double", (SHIFT, 5), (SHIFT + 17, 250), GRAY), ("NaN", (MISSING, 0.7), (MISSING, 0.12), RED)]
    for text, end, place, color in notes:
        ax.annotate(text, end, place, color=color, ha="center", arrowprops={**arrow, "color": color})
    ax.set(ylabel="norm", xticks=[])
    last = [(found.before[-20:], "before", GRAY), (found.after[-20:], "after", BLUE), (found.bound, found.text, ORANGE)]
    beside(ax, [(height(line), text, color) for line, text, color in last if not np.all(np.isnan(line))])
    clipped = np.flatnonzero(~np.isnan(found.after) & (found.after != found.before))
    strip = figure.add_axes((0.13, 0.17, 0.65, 0.06))
    strip.vlines(clipped, 0, 1, color=BLUE, linewidth=1.1)
    bare(strip)
    strip.set(xlim=(0, LENGTH), ylim=(0, 1), xticks=range(0, LENGTH + 1, 100), xlabel="step")
    strip.text(
        1.03, 0.5, f"clipped: {len(clipped)}\nof {LENGTH} steps", color=BLUE, transform=strip.transAxes, va="center"
    )
    return figure


def height(line: np.ndarray) -> float:
    """Return the height of a line's label."""
    return float(np.exp(np.nanmean(np.log(np.maximum(line[~np.isnan(line)][-20:], LOW)))))


# What compares curves and limits.


def curves() -> Figure:
    """Draw every curve: factor and norm after clipping against norm / limit."""
    figure, norm = Figure(figsize=(WIDTH, 5.2)), np.linspace(0.005, 3, 200)
    axes = figure.subplots(3, 3, sharex=True, sharey=True)
    for ax, (name, curve) in zip(axes.flat, CURVES.items(), strict=False):
        factors = curve(np, norm, np.ones_like(norm))
        ax.plot(norm, norm, color=GRAY, linewidth=0.9)
        ax.plot(norm, factors, color=ORANGE, linewidth=1.5, linestyle="--")
        ax.plot(norm, norm * factors, color=BLUE)
        ax.set_title(name, size=10.5, color=GRAY)
        ax.set(xlim=(0, 3), ylim=(0, 1.9), xticks=[0, 1, 2, 3], yticks=[0, 1])
    key = axes.flat[-1]
    key.axis("off")
    for y, text, color in ((1.4, "norm after", BLUE), (0.9, "factor (dashed)", ORANGE), (0.4, "unchanged", GRAY)):
        key.text(0.1, y, text, color=color, va="center")
    for ax in (*axes[2, :2], axes[1, 2]):
        ax.set_xlabel("norm / limit")
        ax.tick_params(labelbottom=True)
    figure.subplots_adjust(left=0.06, right=0.97, top=0.94, bottom=0.1, hspace=0.42, wspace=0.15)
    return figure


def both_kinds() -> Figure:
    """Draw synthetic norms, one in sixty far off, with the limits of safety nets and that of a normalizer."""
    figure, norms = Figure(figsize=(WIDTH, 2.8)), np.random.default_rng(6).lognormal(0.0, 0.3, 1200)
    norms[59::60] *= 8
    ax = figure.subplots()
    figure.subplots_adjust(left=0.11, right=0.66, top=0.98, bottom=0.18)
    ax.plot(norms, color=GRAY, linewidth=0.7)
    ax.set(xlabel="step", ylabel="norm", xlim=(0, len(norms)))
    plain_log(ax, float(np.min(norms)) * 0.8, float(np.max(norms)) * 1.3)
    looks = [(99, GREEN, "-", "safety net"), (90, BLUE, "-.", "safety net"), (10, ORANGE, "--", "normalizer")]
    ends = []
    for percentile, color, dashes, text in looks:
        limit = float(np.percentile(norms, percentile))
        ax.axhline(limit, color=color, linestyle=dashes, linewidth=1.4, zorder=5)
        ends.append((limit, f"{text}: clips {100 - percentile} %", color))
    beside(ax, ends)
    return figure
