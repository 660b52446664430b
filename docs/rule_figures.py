# SPDX-License-Identifier: MIT
"""Draw what each rule does: the factor against the norm, or the limit against time; the rules themselves are run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from figures import BLUE, GRAY, GREEN, ORANGE, RED, STYLE
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import uniclip as uc

CURVES: dict[str, Any] = {
    "hard": uc.curves.hard,
    "tanh": uc.curves.tanh,
    "smooth": uc.curves.smooth,
    "soft": uc.curves.soft,
    "normalize": uc.curves.normalize,
    "reject": uc.curves.reject,
}
COLORS = [BLUE, ORANGE, GREEN, RED, GRAY]
MEASURED = {
    "by_value": "modulus of the entry",
    "by_norm": "norm of the leaf",
    "by_average_norm": "L2 norm of the leaf",
    "by_block_rms": "L2 norm of the leaf",
    "by_global_norm": "joint norm",
    "by_group_norm": "joint norm of the group",
    "to_global_norm": "joint norm",
    "agc": "norm of the unit",
    "cowclip": "norm of the row",
    "larc": "norm of the leaf",
    "by_example_norm": "norm of the example",
    "by_example_layer_norm": "norm of the example's leaf",
    "auto_s": "norm of the example",
    "psac": "norm of the example",
}
NORM = np.linspace(0.005, 4, 300)
SPIKES = {50: 8.0, 120: 100.0, 250: 6.0, 251: 6.0, 252: 6.0}
MISSING, SHIFT, LENGTH = 85, 180, 300


def draw(folder: Path) -> None:
    """Write every picture into ``folder`` as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"rule-{name}": lambda name=name, lines=lines: factors(name, lines()) for name, lines in FACTORS.items()}
    figures |= {f"rule-{name}": lambda rule=rule: over_time(rule) for name, rule in REMEMBERING.items()}
    figures |= {"curves": curves, "which-rule": both_kinds, "rule-by_example_quantile": quantile}
    with mpl.rc_context(STYLE | {"font.size": 9}):
        for name, figure in figures.items():
            figure().savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def factors(name: str, lines: dict[str, Any]) -> Figure:
    """Draw factors against norms."""
    figure = Figure(figsize=(3.6, 1.9))
    ax = figure.subplots()
    for (text, factor), color in zip(lines.items(), COLORS, strict=False):
        ax.plot(NORM, factor, color=color, label=text)
    top = max(float(np.max(factor)) for factor in lines.values())
    ax.set(xlabel=MEASURED.get(name, "norm"), ylabel="factor", xlim=(0, 4), ylim=(0, 1.1 if top <= 1 else 3))
    if len(lines) > 1:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def of_norm(rule: Any, shape: tuple[int, ...] = (1,), params: Any = None) -> list[float]:
    """Return the factor of gradients of equal entries, for each of `NORM`."""
    size = math.prod(shape)
    found = [uc.clip(np.full(shape, n / size**0.5), rule, params)[1].factors for n in NORM]
    return [float(np.ravel(factor)[0]) for factor in found]


def by_value() -> dict[str, Any]:
    """Return the factor of an entry."""
    return {"": [float(uc.clip(np.asarray([n]), uc.by_value(-1.0, 1.0))[0][0] / n) for n in NORM]}


def by_sizes(preset: Callable[[float], Any], c: float) -> dict[str, Any]:
    """Return the factors for leaves of several sizes."""
    return {f"{size} entries": of_norm(preset(c), (size,)) for size in (4, 16, 64)}


def by_group() -> dict[str, Any]:
    """Return the factors of two groups."""
    rule = uc.by_group_norm({0: 1.0, 1: 2.0}, lambda path, leaf: path[0])  # noqa: ARG005 - the signature of a label
    found = [uc.clip([np.asarray([n]), np.asarray([n])], rule)[1].factors for n in NORM]
    return {"group with limit 1": [f[0] for f in found], "group with limit 2": [f[1] for f in found]}


def relative(rule: Any, sizes: tuple[float, ...], shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Return the factors for parameters of several norms."""
    return {f"‖w‖ = {size:g}": of_norm(rule, shape, np.full(shape, size)) for size in sizes}


def examples(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the factors of examples by several rules."""
    return {text: of_norm(rule, (1, 1)) for text, rule in rules.items()}


FACTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "by_value": by_value,
    "by_norm": lambda: {"": of_norm(uc.by_norm(1.0))},
    "by_average_norm": lambda: by_sizes(uc.by_average_norm, 0.125),
    "by_global_norm": lambda: {
        f"curve={name}": of_norm(uc.by_global_norm(1.0, curve=CURVES[name]))
        for name in ("hard", "tanh", "smooth", "soft")
    },
    "by_block_rms": lambda: by_sizes(uc.by_block_rms, 0.25),
    "by_group_norm": by_group,
    "to_global_norm": lambda: {"": of_norm(uc.to_global_norm(1.0))},
    "agc": lambda: relative(uc.agc(0.01), (50.0, 100.0, 200.0)),
    "cowclip": lambda: {
        f"count {n}, ‖w‖ = 0.5": of_norm(uc.cowclip(np.asarray([float(n)])), (1, 1), np.full((1, 1), 0.5))
        for n in (1, 2, 4)
    },
    "larc": lambda: {
        f"lr = {lr:g}, ‖w‖ = 5": of_norm(uc.larc(lr), params=np.asarray([5.0])) for lr in (0.05, 0.1, 0.2)
    },
    "by_example_norm": lambda: examples(
        {"curve=hard": uc.by_example_norm(1.0), "curve=reject": uc.by_example_norm(1.0, curve=uc.curves.reject)}
    ),
    "by_example_layer_norm": lambda: {
        f"{count} {'leaf' if count == 1 else 'leaves'}": [
            float(
                uc.clip([np.asarray([[n]]), *([np.zeros((1, 1))] * (count - 1))], uc.by_example_layer_norm(1.0))[
                    1
                ].factors[0][0]
            )
            for n in NORM
        ]
        for count in (1, 2, 4)
    },
    "auto_s": lambda: examples({f"gamma={gamma}": uc.auto_s(gamma=gamma) for gamma in (0.01, 0.5)}),
    "psac": lambda: examples({f"r={r}": uc.psac(r=r) for r in (0.01, 0.1)}),
}

REMEMBERING = {
    "autoclip": uc.autoclip(),
    "percentile_clipping": uc.percentile_clipping(),
    "zclip": uc.zclip(),
    "log_zscore": uc.log_zscore(),
    "adagc": uc.adagc(),
    "norm_growth": uc.norm_growth(),
    "skip_spikes": uc.skip_spikes(),
    "spam": uc.spam(),
    "adagn": uc.adagn(),
}


def series() -> np.ndarray:
    """Return made-up norms: around 1, then around 2, with spikes and one NaN."""
    norms = np.random.default_rng(4).lognormal(0.0, 0.2, LENGTH)
    norms[SHIFT:] *= 2
    for step, size in SPIKES.items():
        norms[step] *= size
    norms[MISSING] = np.nan
    return norms


def over_time(rule: Any) -> Figure:
    """Draw the norms before and after a rule with memory, its limit where it has one, and what is a spike to it."""
    norms, state = series(), rule.init(np.zeros(1))
    limits, after, bounds = [], [], []
    spikes_only = isinstance(rule.limit, (uc.limits.ZScore, uc.limits.LogZScore, uc.limits.RollingZScore))
    for norm in norms:
        bounds.append(_bound(rule, state) if spikes_only else math.nan)
        _, state, report = rule.update(np.asarray([norm]), state)
        limits.append(float(np.ravel(report.limits)[0]))
        after.append(norm * float(np.ravel(report.factors)[0]))
    figure = Figure(figsize=(6.2, 2.3))
    ax = figure.subplots()
    floor, steps, shown = 0.1, np.arange(LENGTH), np.asarray(after)
    ax.plot(steps, norms, color=GRAY, linewidth=1, label="norm before")
    ax.plot(steps, np.where(shown < floor, floor, shown), color=BLUE, alpha=0.8, label="norm after")
    if spikes_only:
        ax.plot(steps, bounds, "--", color=GREEN, linewidth=1, label="clipped above")
    if not spikes_only:
        ax.plot(
            steps,
            np.where(np.asarray(limits) < np.finfo(float).max, limits, np.nan),  # where there is one
            color=ORANGE,
            linewidth=1.3,
            dashes=(4, 3),
            label="limit",
        )
    ax.axvline(MISSING, color=RED, linewidth=1, linestyle=":")
    ax.text(MISSING + 2, 70, "NaN", color=RED)
    ax.set(xlabel="step", ylabel="norm", yscale="log", ylim=(floor, 150), xlim=(0, LENGTH))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bound(rule: Any, state: Any) -> float:
    """Return the least norm that the rule would clip now, to two digits; NaN if there is none."""
    low, high = 0.1, 1e4
    if not bool(rule.update(np.asarray([high]), state)[2].clipped):
        return math.nan
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        clipped = bool(rule.update(np.asarray([middle]), state)[2].clipped)
        low, high = (low, middle) if clipped else (middle, high)
    return high


def quantile() -> Figure:
    """Draw the limit of `uniclip.by_example_quantile` and the norms of the examples of each batch."""
    rng, rule, batch, count = np.random.default_rng(5), uc.by_example_quantile(), 32, 60
    state, limits, batches = rule.init(np.zeros((batch, 1))), [], []
    for step in range(count):
        grads = rng.lognormal(0.0 if step < count // 2 else 1.0, 0.6, (batch, 1))
        _, state, report = rule.update(grads, state)
        limits.append(float(np.ravel(report.limits)[0]))
        batches.append(grads[:, 0])
    figure = Figure(figsize=(7, 2.3))
    ax = figure.subplots()
    ax.plot(
        np.repeat(np.arange(count), batch), np.ravel(batches), ".", color=GRAY, markersize=2, label="examples' norms"
    )
    ax.plot(np.median(batches, axis=1), "--", color=GREEN, linewidth=1, label="their median")
    ax.plot(limits, color=ORANGE, label="limit")
    ax.set(xlabel="step", ylabel="norm", yscale="log", ylim=(0.08, 20), xlim=(0, count))
    ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def curves() -> Figure:
    """Draw every curve: the factor, and the norm after clipping, against norm / limit."""
    figure = Figure(figsize=(8, 2.9))
    left, right = figure.subplots(1, 2)
    named = CURVES | {"Regularized(0.3)": uc.curves.Regularized(0.3), "NonMonotonic(0.1)": uc.curves.NonMonotonic(0.1)}
    looks = zip([*COLORS, "#8a5cc9", ORANGE, GREEN], ["-"] * 6 + [":"] * 2, strict=True)
    for (name, curve), (color, line) in zip(named.items(), looks, strict=True):
        factor = curve(np, NORM, np.ones_like(NORM))
        wide = {"linewidth": 5, "alpha": 0.5} if name == "hard" else {"linewidth": 1.5}
        left.plot(NORM, factor, color=color, linestyle=line, label=name, **wide)
        right.plot(NORM, NORM * factor, color=color, linestyle=line, **wide)
    left.set(xlabel="norm / limit", ylabel="factor", ylim=(0, 2), xlim=(0, 4))
    right.set(xlabel="norm / limit", ylabel="norm after / limit", ylim=(0, 1.25), xlim=(0, 4))
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4)
    figure.subplots_adjust(wspace=0.25)
    return figure


def both_kinds() -> Figure:
    """Draw the norms of a training run with the limit of a safety net and that of a normalizer."""
    norms = training_norms()
    figure = Figure(figsize=(8, 2.8))
    ax, side = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    ax.semilogy(norms, color=GRAY, linewidth=0.8)
    side.hist(norms, bins=np.logspace(-1, 2, 60), orientation="horizontal", color=GRAY, alpha=0.6)
    for q, color, text in [(99, GREEN, "safety net"), (90, BLUE, "safety net"), (10, ORANGE, "normalizer")]:
        for axes in (ax, side):
            axes.axhline(np.percentile(norms, q), color=color, linewidth=1.5)
        side.text(side.get_xlim()[1] * 1.05, np.percentile(norms, q), f"{q} %: {text}", color=color, va="center")
    ax.set(xlabel="step", ylabel="norm", xlim=(0, len(norms)), ylim=(np.min(norms) * 0.8, np.max(norms) * 1.3))
    side.set(xlabel="steps", xticks=[])
    ax.yaxis.set_minor_locator(NullLocator())
    side.yaxis.set_minor_locator(NullLocator())
    figure.subplots_adjust(wspace=0.05)
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
