# SPDX-License-Identifier: MIT
"""Tables and cards of the rules: the phrases are typed, the rest is read from uniclip."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

from rule_presets import FAMILIES, PRESETS, check, family, made

import uniclip as uc
from compared import table


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
    """Return what a preset is, as a list: its call, its four choices, and what runs it."""
    rule = made(name)
    run = "a `Clipper`, which remembers" if getattr(rule, "memory", False) else "`uc.clip`"
    if family(name) == "relative":
        run += ", with `params`"
    rows = {
        "Call": f"{{py:func}}`{signature(name)} <uniclip.{name}>`",
        "[Choices](/the-four-choices.md)": expression(name),
        "Run it with": run,
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
