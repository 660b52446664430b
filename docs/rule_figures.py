# SPDX-License-Identifier: MIT
"""Draw every rule, large for its section and small for its card, and the pictures that compare rules and curves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import rule_bars
import rule_traces
from drawing_style import BLUE, GRAY, GREEN, ORANGE, STYLE
from rule_drawing import beside, new, plain_log
from rule_presets import PRESETS, family, made

import uniclip as uc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES: dict[str, Any] = {
    "hard": uc.curves.hard,
    "tanh": uc.curves.tanh,
    "smooth": uc.curves.smooth,
    "soft": uc.curves.soft,
    "normalize": uc.curves.normalize,
    "reject": uc.curves.reject,
    "Regularized(0.3)": uc.curves.Regularized(0.3),
    "NonMonotonic(0.1)": uc.curves.NonMonotonic(0.1),
}


def draw(folder: Path) -> None:
    """Write every picture into ``folder`` as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE | {"font.size": 10.5}):
        for name, figure in pictures().items():
            figure().savefig(folder / f"{name}.svg", metadata={"Date": None})


def pictures() -> dict[str, Callable[[], Figure]]:
    """Return what draws each picture, by the name of its file."""
    found: dict[str, Callable[[], Figure]] = {"curves": curves, "which-rule": both_kinds}
    for name in PRESETS:
        large, little = drawn(name)
        found |= {f"rule-{name}": large, f"small-{name}": little}
    return found


def drawn(name: str) -> tuple[Callable[[], Figure], Callable[[], Figure]]:
    """Return what draws a preset, large and small: over time if it learns, else on a gradient."""
    rule = made(name)
    if not getattr(rule, "memory", False):
        return partial(rule_bars.picture, name), partial(rule_bars.thumbnail, name)
    if family(name) == "examples":
        return partial(rule_traces.over_batches, rule), partial(rule_traces.thumbnail_of_batches, rule)
    return partial(rule_traces.over_time, rule), partial(rule_traces.thumbnail, rule)


def curves() -> Figure:
    """Draw every curve: factor and norm after clipping against norm / limit."""
    figure, norm = new(5.2), np.linspace(0.005, 3, 200)
    axes = figure.subplots(3, 3, sharex=True, sharey=True)
    for ax, (name, curve) in zip(axes.flat, CURVES.items(), strict=False):
        factor = curve(np, norm, np.ones_like(norm))
        ax.plot(norm, norm, color=GRAY, linewidth=0.9)
        ax.plot(norm, factor, color=ORANGE, linewidth=1.5, linestyle="--")
        ax.plot(norm, norm * factor, color=BLUE)
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
    """Draw the norms of a training run with the limits of safety nets and that of a normalizer."""
    norms, figure = training_norms(), new(2.8)
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


def training_norms() -> np.ndarray:
    """Train a small network of two layers on made-up data; in one batch of sixty a target is far off."""
    rng, norms = np.random.default_rng(6), []
    teacher, first, last = rng.normal(size=(10, 1)), rng.normal(size=(10, 32)) / 3, rng.normal(size=(32, 1)) / 6
    for step in range(1200):
        x = rng.normal(size=(16, 10))
        y = np.tanh(x @ teacher) * 3 + 0.3 * rng.normal(size=(16, 1))
        y[0] += 60 * (step % 60 == 59)  # noqa: PLR2004
        hidden = np.tanh(x @ first)
        error = (hidden @ last - y) / len(x)
        grads = [x.T @ (error @ last.T * (1 - hidden**2)), hidden.T @ error]
        (step_1, step_2), norm = uc.clip_by_global_norm(grads, 2.0)
        first, last = first - 0.05 * step_1, last - 0.05 * step_2
        norms.append(float(norm))
    return np.asarray(norms)


if __name__ == "__main__":
    draw(Path(__file__).parent / "_static" / "generated")
