# SPDX-License-Identifier: MIT
"""Tables and cards of the rules: the phrases are written by hand, the rest is read from uniclip."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import ModuleType

from rule_presets import PRESETS, made

import uniclip as uc
from compared import table
from uniclip.presets import adaptive, examples, fixed, relative


def parts() -> dict[str, str]:
    """Return every table by name."""
    families = (fixed, relative, adaptive, examples)
    galleries = {
        f"gallery-{module.__name__.rpartition('.')[2]}": gallery(module) for module in families
    }
    rows = [[f"[`{name}`](#rule-{name})", expression(name)] for name in PRESETS]
    overview = table(["preset", "the same, written out"], rows)
    return {"rules": overview} | galleries | {f"rule-{name}": facts(name) for name in PRESETS}


def gallery(family: ModuleType) -> str:
    """Return a card for each preset of a family, with a small picture and a link to its section."""
    cards = [card(name) for name in sorted(family.__all__, key=list(PRESETS).index)]
    return "\n".join(
        ["::::{grid} 1 2 3 3", ":gutter: 2", ":class-container: gallery", "", *cards, "::::", ""]
    )


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


def expression(name: str) -> str:
    """Return the expression that a preset abbreviates, as code without module names."""
    rule = made(name)
    if not isinstance(rule, uc.Rule):
        return "no norm: each entry by itself"
    # A copy prints its choices instead of the preset.
    text = re.sub(r"\buc\.((scopes|norms|limits|curves)\.)?", "", repr(replace(rule)))
    return "`" + re.sub(r"(\.\d\d)\d{6,}", r"\1", text) + "`"


def facts(name: str) -> str:
    """Return the facts of a preset as a list: its call, its four choices, and its entry point."""
    run = "a `Clipper`, which remembers" if made(name).memory else "`uc.clip`"
    rows = {
        "Call": f"{{py:func}}`{signature(name)} <uniclip.{name}>`",
        "[Choices](/the-four-choices.md)": expression(name),
        "Run it with": f"{run}, with `params`" if name in relative.__all__ else run,
    }
    lines = [f"* - {key}\n  - {value}" for key, value in rows.items()]
    return "\n".join(["```{list-table}", ":widths: 28 72", ":class: facts", "", *lines, "```", ""])


def signature(name: str) -> str:
    """Return a call with the defaults of a preset, without the parameters that all presets have."""
    usual, parameters = (
        ("propagate", uc.curves.hard),
        inspect.signature(getattr(uc, name)).parameters.values(),
    )
    shown = [one.replace(annotation=one.empty) for one in parameters if one.default not in usual]
    return f"{name}({', '.join(map(str, shown))})"
