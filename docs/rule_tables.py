# SPDX-License-Identifier: MIT
"""Tables and cards of the rules: the phrases are typed, the rest is read from uniclip or measured."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rule_presets import FAMILIES, PRESETS, check, family, made
from rule_shares import NORMS, settled, share_above, shares, shares_over_time

import uniclip as uc
from compared import table

DEFINED = "/rules/index.md#calm-usual-and-wild-norms"
"""Where the three kinds of norms are defined."""


def parts() -> Iterator[tuple[str, str]]:
    """Return name and text of every table.

    Yields
    ------
    name, text : str
    """
    check()
    for name in FAMILIES:
        yield f"gallery-{name}", gallery(name)
    yield "rules", overview()
    for name in PRESETS:
        yield f"rule-{name}", facts(name)
    yield "shares-net", share_table(NETS)
    yield "shares-normalizer", share_table(NORMALIZERS)
    yield "shares-adagc", adagc_table()


def gallery(page: str) -> str:
    """Return a card for each preset of a family, with a small picture and a link to its section."""
    cards = [card(name) for name in PRESETS if family(name) == page]
    return "\n".join(["::::{grid} 1 2 3 3", ":gutter: 2", ":class-container: gallery", "", *cards, "::::", ""])


def card(name: str) -> str:
    """Return the card of a preset."""
    return f"""\
:::{{grid-item-card}} `{name}`
:link: rule-{name}
:link-type: ref
:img-top: /_static/generated/small-{name}.svg
:img-alt: {name} {PRESETS[name].phrase}
{PRESETS[name].phrase}
:::
"""


def overview() -> str:
    """Return the table of all presets, each as one expression."""
    rows = [[f"[`{name}`](#rule-{name})", expression(name)] for name in PRESETS]
    return table(["preset", "the same, written out"], rows)


def expression(name: str) -> str:
    """Return the expression that a preset is short for, as code without the modules' names."""
    rule = made(name)
    if not isinstance(rule, uc.Rule):
        return "no norm: each entry by itself"
    limit, text = rule.limit, repr(rule)
    if isinstance(limit, uc.limits.PerGroup):
        return "`Rule(PerGroup(max_norms), scope=groups(label))`"
    if isinstance(limit, uc.limits.Relative) and limit.counts is not None:
        return f"`Rule(Relative({limit.ratio}, {limit.eps}, counts), scope=each_row)`"
    if isinstance(limit, uc.limits.Percentile):
        text = repr(replace(rule, limit=replace(limit, percentile=round(limit.percentile, 2))))
    for module in ("uc.scopes.", "uc.norms.", "uc.limits.", "uc.curves.", "uc."):
        text = text.replace(module, "")
    return f"`{text}`"


def facts(name: str) -> str:
    """Return what a preset is, as a list: its call, its four choices, and how often it clips."""
    rule = made(name)
    run = "a `Clipper`, which remembers" if getattr(rule, "memory", False) else "`uc.clip`"
    if family(name) == "relative":
        run += ", with `params`"
    found = ", ".join(f"{kind} {percent(share)}" for kind, share in zip(NORMS, shares(name), strict=True))
    what = "examples" if family(name) == "examples" else "steps"
    rows = {
        "Call": f"{{py:func}}`{signature(name)} <uniclip.{name}>`",
        "[Choices](/the-four-choices.md)": expression(name),
        "Run it with": run,
        f"[Clipped {what}]({DEFINED})": found,
    }
    lines = [f"* - {key}\n  - {value}" for key, value in rows.items()]
    return "\n".join(["```{list-table}", ":widths: 28 72", ":class: facts", "", *lines, "```", ""])


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


NETS: dict[str, Any] = {
    "constant, 99th percentile": 99,
    "constant, 90th percentile": 90,
    "`autoclip(95)`": uc.autoclip(95),
    "`zclip()`": uc.zclip(),
    "`log_zscore()`": uc.log_zscore(),
    "`skip_spikes()`": uc.skip_spikes(),
    "`spam()`, one entry": uc.spam(),
}
NORMALIZERS: dict[str, Any] = {
    "constant, 10th percentile": 10,
    "`adagc()`": uc.adagc(),
    "`norm_growth()`": uc.norm_growth(),
    "`autoclip(10)`": uc.autoclip(10),
    "`percentile_clipping(5)`": uc.percentile_clipping(5),
    "`adagn()`": uc.adagn(),
    "`to_global_norm()`": uc.to_global_norm(),
}


def share_table(rules: dict[str, Any]) -> str:
    """Return how often rules clip; a number is a constant at that percentile."""
    rows = []
    for name, rule in rules.items():
        found = share_above(rule) if isinstance(rule, int) else shares_over_time(rule)
        rows.append([name, *map(percent, found)])
    return table(["rule", *NORMS], rows)


def adagc_table() -> str:
    """Return how often AdaGC clips and where its average settles, for norms around 1."""
    cvs = (0.05, 0.1, 0.2, 0.3, 0.5)
    found = zip(cvs, *settled(uc.adagc(warmup=0), cvs), strict=True)
    rows = [[percent(cv), percent(share), f"{average:.2f}"] for cv, share, average in found]
    return table(["norms vary by", "clipped steps", "average settles at"], rows)


def percent(share: Any) -> str:
    """Return a share as a percentage."""
    digits = 1 if 0 < share < 0.0995 else 0  # noqa: PLR2004 - two digits in all
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"
