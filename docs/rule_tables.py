# SPDX-License-Identifier: MIT
"""Tables of the rules: the four choices of every preset, and how often it clips norms that do not change for good.

Nothing in them is typed but the phrases: the choices are those of the presets, the shares are measured.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import uniclip as uc
from uniclip import presets

STEPS, SETTLE, BATCH = 2_000, 500, 64
LOGGED, LATER = 1_000, 500  # steps of whole gradients, which take longer
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(cv: float) -> Draw:
    """Return what draws norms around 1 of the coefficient of variation ``cv``."""
    return lambda rng, count: np.abs(rng.normal(1.0, cv, count))


def lognormal(sigma: float) -> Draw:
    """Return what draws norms of median 1 whose logarithms have the standard deviation ``sigma``."""
    return lambda rng, count: rng.lognormal(0.0, sigma, count)


NORMS: dict[str, Draw] = {
    "normal, CV 0.2": normal(0.2),
    "lognormal, sigma 0.3": lognormal(0.3),
    "lognormal, sigma 1": lognormal(1.0),
}
"""Norms around 1 that differ from step to step, each independent of those before."""


def label(path: Any, leaf: Any) -> Any:  # noqa: ARG001 - the signature of a label
    """Name the group of a leaf: its first key."""
    return path[0]


class Preset(NamedTuple):
    """A preset in the tables."""

    phrase: str
    arguments: tuple[Any, ...] = ()


PRESETS = {
    "by_value": Preset("each entry into an interval", (-1.0, 1.0)),
    "by_norm": Preset("each leaf by its own norm", (1.0,)),
    "by_average_norm": Preset("each leaf by TensorFlow 1's average norm", (1.0,)),
    "by_global_norm": Preset("everything by one factor: the usual one", (1.0,)),
    "by_block_rms": Preset("each leaf by its root mean square", (1.0,)),
    "by_group_norm": Preset("each group by its own limit", ({0: 1.0, 1: 1.0}, label)),
    "to_global_norm": Preset("every gradient to the same length"),
    "agc": Preset("each output unit beside its weights"),
    "cowclip": Preset("each row of an embedding beside its weights", (np.ones(2),)),
    "larc": Preset("each leaf's step beside its weights", (0.1,)),
    "autoclip": Preset("at a percentile of all norms so far"),
    "percentile_clipping": Preset("each leaf at a percentile of its last norms"),
    "zclip": Preset("spikes back towards the running mean"),
    "log_zscore": Preset("spikes in logarithms back to the running mean"),
    "adagc": Preset("each leaf near its running average"),
    "norm_growth": Preset("each leaf may grow by 1 % a step"),
    "skip_spikes": Preset("steps with a spike become 0"),
    "spam": Preset("each entry beside its running mean square"),
    "adagn": Preset("each leaf to about 1, smoothed"),
    "by_example_norm": Preset("each example by its norm over all leaves", (1.0,)),
    "by_example_layer_norm": Preset("each example leaf by leaf, one total", (1.0,)),
    "by_example_quantile": Preset("each example, at a quantile of the examples"),
    "auto_s": Preset("each example to just below the limit"),
    "psac": Preset("the same, tiny examples stay tiny"),
}


def made(name: str) -> Any:
    """Return a preset with its defaults, and with 1 or its like for what has none."""
    return getattr(uc, name)(*PRESETS[name].arguments)


def family(name: str) -> str:
    """Return the module of a preset, which is the name of its page."""
    return str(getattr(uc, name).__module__).rpartition(".")[2]


def parts() -> Iterator[tuple[str, str]]:
    """Return name and text of every table.

    Yields
    ------
    name, text : str

    Raises
    ------
    RuntimeError
        If a preset has no phrase.
    """
    if missing := set(presets.__all__) ^ set(PRESETS):
        msg = f"PRESETS in docs/rule_tables.py and uniclip.presets differ in {sorted(missing)}"
        raise RuntimeError(msg)
    yield "rules", overview()
    for name in PRESETS:
        yield f"rule-{name}", facts(name)
    yield "shares-net", share_table(NETS)
    yield "shares-normalizer", share_table(NORMALIZERS)
    yield "shares-adagc", adagc_table()


def overview() -> str:
    """Return the table of all presets."""
    rows = []
    for name, preset in PRESETS.items():
        link = f"[`{name}`]({family(name)}.md#{name})"
        rows.append([link, preset.phrase, *(f"`{choice}`" if choice else "" for choice in choices(made(name)))])
    return table(["rule", "what it does", "scope", "norm", "limit", "curve"], rows)


def choices(rule: Any) -> list[str]:
    """Return the four choices of a rule as source text; of clipping by value, which is no norm, only the interval."""
    if not isinstance(rule, uc.Rule):
        return ["", "", f"[{rule.min}, {rule.max}]", ""]
    scope = "groups(label)" if rule.scope == uc.scopes.groups(label) else short(rule.scope)
    return [scope, short(rule.norm), limit_text(rule.limit), getattr(rule.curve, "__name__", short(rule.curve))]


def short(choice: Any) -> str:
    """Return a choice as source text without its module, which is the column's."""
    return re.sub(r"uc\.([a-z]+\.)?", "", repr(choice))


def limit_text(limit: Any) -> str:
    """Return a limit as source text, short."""
    if isinstance(limit, uc.limits.PerGroup):
        return "PerGroup(...)"
    if isinstance(limit, uc.limits.Relative) and not isinstance(limit.ratio, float):
        return "Relative(counts, eps=1e-05)"
    if isinstance(limit, uc.limits.Percentile):
        limit = replace(limit, percentile=round(limit.percentile, 2))
    return short(limit)


def facts(name: str) -> str:
    """Return a row of what a preset is: its defaults, its four choices, and how often it clips."""
    made_of = " · ".join(f"`{choice}`" for choice in choices(made(name)) if choice)
    row = [f"{{py:func}}`{signature(name)} <uniclip.{name}>`", made_of, *map(percent, shares(name))]
    return table(["defaults", "scope · norm · limit · curve", *(f"clips, {norms}" for norms in NORMS)], [row])


def signature(name: str) -> str:
    """Return a call with the defaults of a preset."""
    shown = []
    for key, parameter in inspect.signature(getattr(uc, name)).parameters.items():
        usual = {"nonfinite": "propagate", "curve": uc.curves.hard}.get(key, parameter.empty)
        if parameter.default is parameter.empty:
            shown.append(key)
        elif parameter.default != usual:
            shown.append(f"{key}={parameter.default!r}")
    return f"{name}({', '.join(shown)})"


@cache
def shares(name: str) -> tuple[float, ...]:
    """Return the share of the steps that a preset clips (of the examples, if it is for those), for each of `NORMS`."""
    return tuple(_share(name, draw) for draw in NORMS.values())


def _share(name: str, draw: Draw) -> float:
    if family(name) == "adaptive":
        return share_over_time(made(name), draw)
    if family(name) == "examples":
        return share_of_examples(name, draw)
    return share_of_steps(name, draw)


@cache
def share_over_time(rule: Any, draw: Draw) -> float:
    """Return how often a rule clips a series of norms, once it has settled."""
    series = draw(np.random.default_rng(0), SETTLE + STEPS)
    state, clipped = rule.init(np.zeros(1)), []
    for norm in series:
        _, state, report = rule.update(np.asarray([norm]), state)
        clipped.append(bool(report.clipped))
    return float(np.mean(clipped[SETTLE:]))


def share_of_steps(name: str, draw: Draw) -> float:
    """Return how often a rule with a given limit clips anything of two leaves of 5 by 10 entries.

    A constant is the 90th percentile of what the rule measured in earlier steps; a ratio lets the usual
    norm be half of the limit.
    """
    early, late = list(_gradients(draw, 1, LOGGED)), list(_gradients(draw, 2, LATER))
    if family(name) == "relative":
        rule = {"cowclip": uc.cowclip(np.ones(5)), "agc": uc.agc(axis=0)}.get(name) or made(name)
        params = [np.ones((5, 10)), np.ones((5, 10))]
        reports = [rule.update(grads, (), params)[2] for grads in early[:100]]
        limit, norm = _flat(report.limits for report in reports), _flat(report.norms for report in reports)
        params = [np.median(norm) / np.median(limit) * 2 * w for w in params]
        return float(np.mean([bool(rule.update(grads, (), params)[2].clipped) for grads in late]))
    if name == "by_value":
        limit = np.percentile(_flat(np.abs(leaf).ravel() for grads in early for leaf in grads), 90)
        return float(np.mean([any(np.any(np.abs(leaf) > limit) for leaf in grads) for grads in late]))
    rule = replace(made(name), limit=uc.limits.Constant(math.inf))
    limit = float(np.percentile(_flat(rule.update(grads, ())[2].norms for grads in early), 90))
    rule = replace(rule, limit=uc.limits.Constant(limit))
    return float(np.mean([bool(rule.update(grads, ())[2].clipped) for grads in late]))


def _gradients(draw: Draw, seed: int, count: int) -> Iterator[list[np.ndarray]]:
    """Return gradients of two equal leaves: random directions with the joint norms that are drawn."""
    rng = np.random.default_rng(seed)
    for norm in draw(rng, count):
        direction = rng.normal(size=(2, 5, 10))
        yield list(norm * direction / np.linalg.norm(direction))


def share_of_examples(name: str, draw: Draw) -> float:
    """Return the share of the examples that a rule clips, in batches of 64; a constant is the median norm."""
    rng, rule = np.random.default_rng(3), made(name)
    if name in {"by_example_norm", "by_example_layer_norm"}:
        rule = getattr(uc, name)(float(np.median(draw(rng, STEPS))))
    state, shares = rule.init([np.zeros((BATCH, 20)), np.zeros((BATCH, 20))]), []
    for _ in range(150):
        direction = rng.normal(size=(2, BATCH, 20))
        direction *= (draw(rng, BATCH) / np.sqrt((direction**2).sum((0, 2))))[:, None]
        _, state, report = rule.update(list(direction), state)
        factors = np.stack(report.factors) if isinstance(report.factors, list) else report.factors[None]
        shares.append(np.mean((factors != 1).any(0)))
    return float(np.mean(shares[50:]))


def _flat(values: Any) -> np.ndarray:
    return np.concatenate([np.ravel(one) for value in values for one in _values(value)])


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


NETS: dict[str, Any] = {
    "a constant at the 99th percentile": 99,
    "a constant at the 90th percentile": 90,
    "`autoclip(95)`": uc.autoclip(95),
    "`zclip()`": uc.zclip(),
    "`log_zscore()`": uc.log_zscore(),
    "`skip_spikes()`": uc.skip_spikes(),
    "`spam()`, one entry": uc.spam(),
}
NORMALIZERS: dict[str, Any] = {
    "a constant at the 10th percentile": 10,
    "`adagc()`": uc.adagc(),
    "`norm_growth()`": uc.norm_growth(),
    "`autoclip(10)`": uc.autoclip(10),
    "`percentile_clipping(5)`": uc.percentile_clipping(5),
    "`adagn()`": uc.adagn(),
    "`to_global_norm()`": uc.to_global_norm(),
}


def share_table(rules: dict[str, Any]) -> str:
    """Return how often rules clip."""
    rows = []
    for name, rule in rules.items():
        found = [share_over_time(_constant(rule, draw), draw) for draw in NORMS.values()]
        rows.append([name, *map(percent, found)])
    return table(["rule", *NORMS], rows)


def _constant(rule: Any, draw: Draw) -> Any:
    """Return a rule, a number as a constant limit at that percentile of earlier norms."""
    if not isinstance(rule, int):
        return rule
    return uc.by_global_norm(float(np.percentile(draw(np.random.default_rng(1), STEPS), rule)))


def adagc_table() -> str:
    """Return how often AdaGC clips and where its average settles, for norms around 1."""
    cvs = (0.05, 0.1, 0.2, 0.3, 0.5)
    rule, series = uc.adagc(warmup=0), [normal(cv)(np.random.default_rng(0), 2 * STEPS) for cv in cvs]
    state, seen = rule.init([np.zeros(1) for _ in cvs]), []
    for norms in zip(*series, strict=True):
        _, state, report = rule.update([np.asarray([norm]) for norm in norms], state)
        seen.append((report.factors, state.averages))
    factors, averages = np.moveaxis(np.asarray(seen[STEPS:], dtype=float), 1, 0)
    found = zip(cvs, (factors < 1).mean(0), averages.mean(0), strict=True)
    rows = [[f"{cv:g}", percent(share), f"{average:.2f}"] for cv, share, average in found]
    return table(["CV of the norms", "steps clipped", "the average, of norms around 1"], rows)


def percent(share: Any) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"  # noqa: PLR2004 - two digits


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
