# SPDX-License-Identifier: MIT
"""Draw the figure of the first page, for light and for dark pages: ``python docs/hero.py``.

It trains the network of ``examples/exploding_rnn.py`` twice, without and with clipping, and takes
half a minute.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from drawing_style import TEXT
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import exploding_rnn as example

FOLDER = Path(__file__).parent / "_static"
# The step and the norm at the edge of the figure.
LAST, HIGHEST = 3000, 1e9
THEMES = {"light": ("#404040", "#1f6fc4", "#c8372d"), "dark": ("#c8c8c8", "#62aef5", "#ff7b6e")}
"""The colors of text, of the clipped run, and of the unclipped run."""


def picture(unclipped: example.Run, clipped: example.Run, text: str, blue: str, red: str) -> Figure:
    """Draw the losses, and below them the norms."""
    figure = Figure(figsize=(5.6, 4.6))
    top, bottom = figure.subplots(2, 1, sharex=True)
    for run, color, width in (clipped, blue, 2.0), (unclipped, red, 2.5):
        top.plot(*example.points(run, run.losses), color=color, linewidth=width)
        bottom.plot(
            *example.points(run, np.minimum(run.norms, HIGHEST)), color=color, linewidth=width
        )
    last, peak = (
        len(unclipped.losses),
        f"above $10^{{{math.floor(math.log10(max(unclipped.norms)))}}}$",
    )
    top.plot(last, 2.6, marker="X", markersize=10, color=red)
    top.text(last * 1.2, 2.6, f"not clipped: NaN at step {last}", color=red, va="center")
    top.text(1.1, 0.35, f"clipped: reads {clipped.accuracy:.0%} of the digits", color=blue)
    bottom.text(last * 1.2, HIGHEST, peak, color=red, va="top")
    bottom.axhline(example.MAX_NORM, color=text, linestyle="--", linewidth=1.2)
    bottom.text(1.1, example.MAX_NORM * 0.6, f"limit {example.MAX_NORM:g}", va="top")
    top.set(xscale="log", ylim=(0, 3.1), ylabel="loss", yticks=[0, 1, 2, 3])
    bottom.set(
        yscale="log",
        ylim=(1e-6, HIGHEST),
        xlim=(1, LAST),
        xlabel="training step",
        ylabel="gradient norm",
    )
    bottom.set_yticks([1e-6, 1e-3, 1, 1e3, 1e6, 1e9])
    bottom.minorticks_off()
    figure.align_ylabels()
    return figure


def main() -> None:
    """Train twice, and write the figure in both themes."""
    task = example.make_task(seed=0, steps=example.STEPS)
    runs = [
        example.train("numpy", example.use_numpy(), task, limit)
        for limit in (math.inf, example.MAX_NORM)
    ]
    for name, colors in THEMES.items():
        with mpl.rc_context({"font.size": 12} | dict.fromkeys(TEXT, colors[0])):
            picture(*runs, *colors).savefig(FOLDER / f"hero-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
