# SPDX-License-Identifier: MIT
"""Draw rules without memory: a gradient before and after, and norms after against norms before; the rules are run."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from drawing_style import BLUE, GRAY, ORANGE
from rule_drawing import DASHES, LIMIT, bare, beside, new, small
from rule_presets import Example, Line, example_of, lines_of

import uniclip as uc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORM = np.linspace(0.005, 4, 120)
NAMES = {uc.norms.L2: "norm", uc.norms.RMS: "RMS", uc.Norm(size_power=1): "n/N"}


class Entries(NamedTuple):
    """The entries of an example in the order of the picture; norms is None of a rule that measures none."""

    before: np.ndarray
    after: np.ndarray
    norms: np.ndarray | None
    limits: np.ndarray | None


def entries(shown: Example) -> Entries:
    """Run the rule of an example."""
    grads = [np.asarray(leaf, dtype=float) for leaf in shown.leaves]
    params = None if shown.params is None else [np.asarray(leaf, dtype=float) for leaf in shown.params]
    clipped, report = uc.clip(grads, shown.rule, params)
    before, after = _in_order(grads, shown.by), _in_order(clipped, shown.by)
    if report.norms is None:
        return Entries(before, after, None, None)
    spread = [_in_order(_spread(values, grads, shown), shown.by) for values in (report.norms, report.limits)]
    return Entries(before, after, *spread)


def _spread(values: Any, grads: list[np.ndarray], shown: Example) -> list[np.ndarray]:
    """Give each entry the value of the group that it is in."""
    found = []
    for i, leaf in enumerate(grads):
        label = shown.rule.scope.label
        own = (
            values[label((i,), leaf)] if isinstance(values, dict) else values[i] if isinstance(values, list) else values
        )
        own = np.asarray(own)
        if own.ndim:
            own = own[None, :] if shown.by == "units" else own.reshape(-1, *[1] * (leaf.ndim - 1))
        found.append(np.broadcast_to(own, leaf.shape))
    return found


def _in_order(leaves: list[np.ndarray], by: str) -> np.ndarray:
    """Return all entries, one after the other as they stand in the picture."""
    if by == "rows":
        return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1).ravel()
    return np.concatenate([(leaf.T if by == "units" else leaf).ravel() for leaf in leaves])


def picture(name: str) -> Figure:
    """Draw a gradient before and after a rule, and below it factor and norm after against the norm before."""
    figure = new(4.3)
    top = figure.add_axes((0.02, 0.54, 0.96, 0.31))
    left, right = figure.add_axes((0.11, 0.13, 0.29, 0.29)), figure.add_axes((0.51, 0.13, 0.28, 0.29))
    shown = example_of(name)
    found = entries(shown)
    places = _places(shown, len(found.before))
    _bars(top, found, places)
    _brackets(top, found, places, shown)
    _parts(top, shown, places)
    figure.text(0.02, 0.95, "entries of a gradient:", color=GRAY)
    figure.text(0.41, 0.95, "before (wide),", color=GRAY, weight="bold")
    figure.text(0.69, 0.95, "after (narrow)", color=BLUE, weight="bold")
    _curves(left, right, shown_lines(name))
    what = "modulus" if name == "by_value" else "norm"
    left.set(ylabel="factor", xlabel=f"{what} before")
    right.set(ylabel=f"{what} after", xlabel=f"{what} before")
    return figure


def thumbnail(name: str) -> Figure:
    """Draw the same on a card, without a word."""
    figure, shown = small(), example_of(name)
    found = entries(shown)
    ax, side = figure.add_axes((0.02, 0.03, 0.64, 0.95)), figure.add_axes((0.73, 0.03, 0.25, 0.95))
    _bars(ax, found, _places(shown, len(found.before)))
    for _, dashes, factor in shown_lines(name):
        side.plot(NORM, NORM * factor, color=BLUE, linestyle=dashes, linewidth=1.6)
    side.plot(NORM, NORM, color=GRAY, linewidth=0.8)
    side.set(xlim=(0, 4), ylim=(0, 2.6))
    side.set(xticks=[], yticks=[])
    return figure


def _places(shown: Example, count: int) -> np.ndarray:
    """Return where each bar stands, with room between the parts that have names."""
    sizes = _sizes(shown, count)
    return np.arange(count) + np.repeat(np.arange(len(sizes)) * 0.9, sizes)


def _sizes(shown: Example, count: int) -> list[int]:
    """Return how many entries each part has that has a name."""
    if shown.by == "leaves":
        return [len(leaf) for leaf in shown.leaves]
    return [count // len(shown.names)] * len(shown.names)


def _bars(ax: Any, found: Entries, places: np.ndarray) -> None:
    """Draw the entries."""
    ax.bar(places, found.before, width=0.84, color=GRAY, alpha=0.5, linewidth=0)
    ax.bar(places, found.after, width=0.42, color=BLUE)
    ax.axhline(0, color=GRAY, linewidth=0.8)
    bare(ax)
    ax.spines["bottom"].set_visible(False)
    both = np.concatenate([found.before, found.after])
    ax.set(xlim=(places[0] - 0.8, places[-1] + 0.8), ylim=(1.08 * float(both.min()), 1.1 * float(both.max())))
    if found.norms is None:
        for bound in (-1.0, 1.0):
            ax.axhline(bound, **LIMIT)


def _brackets(ax: Any, found: Entries, places: np.ndarray, shown: Example) -> None:
    """Write over each group of entries that share a norm what it is before and after."""
    if found.norms is None:
        for bound, text in ((1.05, "max"), (-0.98, "min")):
            ax.text((places[4] + places[5]) / 2, bound, text, color=ORANGE, ha="center", va="bottom")
        return
    low, high = ax.get_ylim()
    tick = (high - low) / 35
    starts = [0, *np.flatnonzero(np.diff(found.norms)) + 1, len(places)]
    name = NAMES[shown.rule.norm] if len(starts) <= 4 else ""  # noqa: PLR2004 - more of them leave no room
    for start, end in pairwise(starts):
        left, right = places[start] - 0.4, places[end - 1] + 0.4
        ax.plot(
            [left, left, right, right], [high - tick, high, high, high - tick], color=GRAY, linewidth=1, clip_on=False
        )
        factor = found.after[start] / found.before[start]
        size, after = found.norms[start], found.norms[start] * factor
        text = f"{name} {size:.2g} → {after:.2g}" if factor != 1 else f"{name} {size:.2g}: kept"
        ax.text((left + right) / 2, high + tick, text.strip(), color=BLUE, ha="center", va="bottom")


def _parts(ax: Any, shown: Example, places: np.ndarray) -> None:
    """Write the names of the parts under them."""
    start = 0
    for name, size in zip(shown.names, _sizes(shown, len(places)), strict=True):
        ax.text(places[start : start + size].mean(), ax.get_ylim()[0] - 0.1, name, color=GRAY, ha="center", va="top")
        start += size


@cache
def shown_lines(name: str) -> list[tuple[str, str, np.ndarray]]:
    """Return text, dashes and factors of each line of the picture of a preset."""
    return [(line.text, dashes, factors(line)) for line, dashes in zip(lines_of(name), DASHES, strict=False)]


def factors(line: Line) -> np.ndarray:
    """Return the factor of gradients of equal entries, for each of `NORM`."""
    size, found = math.prod(line.shape), []
    for norm in NORM:
        grads = [np.full(line.shape, norm / size**0.5), *[np.zeros(line.shape)] * line.beside]
        params = None if line.params is None else [line.params] * len(grads)
        clipped, _ = uc.clip(grads, line.rule, params)
        found.append(float(np.ravel(clipped[0])[0] / np.ravel(grads[0])[0]))
    return np.asarray(found)


def _curves(left: Any, right: Any, shown: list[tuple[str, str, np.ndarray]]) -> None:
    """Draw factors and norms after against norms before."""
    right.plot(NORM, NORM, color=GRAY, linewidth=0.9)
    right.text(2.5, 2.6, "unchanged", color=GRAY, ha="right")
    ends, top = [], 1.0
    for text, dashes, factor in shown:
        left.plot(NORM, factor, color=BLUE, linestyle=dashes)
        right.plot(NORM, NORM * factor, color=BLUE, linestyle=dashes)
        ends.append((float(NORM[-1] * factor[-1]), text, BLUE))
        top = max(top, float(factor.max()))
    for ax, high in ((left, 1.15 if top <= 1 else 3.0), (right, 3.0)):
        ax.set(xlim=(0, 4), ylim=(0, high), xticks=[0, 1, 2, 3, 4])
    beside(right, ends, gap=0.17)
