"""What the table of layouts is made of: rules, layouts, cases, and what is refused; the documentation prints it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import uniclip as uc

EMBEDDING = {"embed.weight", "norm.weight", "norm.bias", 0, 1, 2}
"""The names of the first parameters; their numbers, where an optimizer knows no names."""


def label(path: Any, leaf: Any) -> str:
    """Name the group of a leaf."""
    return "embedding" if path[1] in EMBEDDING else "rest"


class Kind(NamedTuple):
    """A rule in the table."""

    title: str
    rule: Any
    each: bool = False
    """Whether there is a norm for each leaf or group, not one for the whole tree."""


RULES: dict[str, Kind] = {
    "global": Kind("`by_global_norm`", uc.by_global_norm(0.2)),
    "largest": Kind("`by_global_norm`, ∞-norm", uc.by_global_norm(0.03, ord=math.inf)),
    "leaf": Kind("`by_norm`", uc.by_norm(0.1), each=True),
    "groups": Kind("`by_group_norm`", uc.by_group_norm({"embedding": 0.05, "rest": 0.1}, label), each=True),
    "agc": Kind("`agc`", uc.agc(0.02), each=True),
    "autoclip": Kind("`autoclip`", uc.autoclip(50, window=4)),
    "zclip": Kind("`zclip`", uc.zclip(0.5, 0.5, warmup=2)),
    "adagc": Kind("`adagc`", uc.adagc(1.0, warmup=1), each=True),
    "skip": Kind('`nonfinite="skip"`', uc.by_global_norm(0.2, nonfinite="skip")),
    "spikes": Kind("`skip_spikes` with a loss", uc.skip_spikes(z=3.0, window=4, warmup=2, nonfinite="skip")),
}


class Layout(NamedTuple):
    """A way to lay a run out over processes, a row of the table."""

    title: str
    write: str
    """What is written beside ``attach(optimizer, rule)``."""
    joined: str
    cases: tuple[str, ...] = ("finite", "NaN", "inf", "none")
    refused: tuple[str, ...] = ()
    """The rules that are refused, and why."""
    why: str = ""


KEPT = "norms along axes take no `all_reduce=`: leave it out where leaves are whole, or use DTensors"
EACH = tuple(name for name, kind in RULES.items() if kind.each)
FLAT = "a flat parameter is a part of several leaves, and nobody knows where one ends: use FSDP2, or a rule of one norm"
STAGES = ("finite", "NaN", "inf", "none", "empty stage")
LAYOUTS: dict[str, Layout] = {
    "one": Layout("one process", "", "nothing", ("finite", "NaN", "inf")),
    "ddp": Layout("`DistributedDataParallel`", "", "nothing: copies"),
    "fsdp2": Layout("FSDP2, `fully_shard`", "", "the parts, over the mesh"),
    "hsdp": Layout("HSDP, 2x2", "", "the parts, over one dimension of the mesh"),
    "tp": Layout("tensor and sequence parallel", "", "the parts, over the mesh; replicated ones count once"),
    "tp_fsdp2": Layout("tensor parallel x FSDP2", "", "the parts, over both dimensions"),
    "experts": Layout("experts as DTensors on a mesh of their own", "", "the experts, over their mesh"),
    "plain_experts": Layout(
        "experts as plain tensors beside copies",
        "`all_reduce=group, shared=lambda path, leaf: 'experts' not in path[1]`",
        "the experts; what is shared counts once",
        refused=("agc",),
        why=KEPT,
    ),
    "pipeline": Layout("a pipeline", "`all_reduce=group`", "the stages", STAGES, ("agc",), KEPT),
    "pipeline_fsdp2": Layout(
        "a pipeline x FSDP2", '`all_reduce=mesh["pp"]`', "the parts, then the stages", STAGES, ("agc",), KEPT
    ),
    "fsdp1": Layout(
        "FSDP1, `FullyShardedDataParallel`", "`all_reduce=group`", "the flat parts", refused=EACH, why=FLAT
    ),
    "zero": Layout("`ZeroRedundancyOptimizer`, attached outside", "", "nothing: copies"),
}

CASES: dict[str, str] = {
    "finite": "all gradients are finite",
    "NaN": "NaN in the gradients of one process",
    "inf": "∞ in the gradients of one process",
    "none": "no gradients in one process",
    "empty stage": "a stage without parameters",
}


def combinations() -> list[tuple[str, str, str]]:
    """Return what is tried: layout, rule and case."""
    return [
        (layout, rule, case)
        for layout, one in LAYOUTS.items()
        for rule in RULES
        for case in (one.cases if rule not in one.refused else one.cases[:1])
    ]


def table() -> str:
    """Return the layouts and rules as a Markdown table, and below it why what is refused is."""
    head = ["", *(kind.title for kind in RULES.values())]
    lines = [head, ["---", *[":-:"] * len(RULES)]]
    notes = list(dict.fromkeys(one.why for one in LAYOUTS.values() if one.why))
    for one in LAYOUTS.values():
        cells = [f"({notes.index(one.why) + 1})" if name in one.refused else "✓" for name in RULES]
        lines += [[one.title, *cells]]
    numbered = [f"{number}. Refused: {note}." for number, note in enumerate(notes, 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + "\n".join(numbered) + "\n"
