# SPDX-License-Identifier: MIT
"""What speed.py measured, as Markdown: for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speed_answers import KERAS_NETS, NETS, WAYS, answers, headline
from speed_format import TITLES, duration, durations, percent, spread, table

from contenders import ALL_OURS, BY_NORM, NATIVE, NATIVE_IN_PLACE, OURS, OURS_IN_PLACE, READ, native_of
from gradient_trees import RESNET, TREES, entries
from targets import COUNTS, Row, Verdict, judged, per_leaf, tree_of
from training_steps import ATTACH, ATTACHED, BASES, CLIPNORM, CLIPPER, FUSED, PLAIN, WRAPPED

__all__ = ["headline", "parts", "report"]
ORDER = [NATIVE, NATIVE_IN_PLACE, *ALL_OURS, READ]
NOT_YET = "*Not measured yet.*"
MINUTE = 60
PAIRS = ((OURS, WRAPPED), (NATIVE, CLIPNORM))
"""The names of the contenders in steps of training: uniclip's, then the native ones."""
Results = dict[str, Any]


def report(results: Results) -> str:
    """Return everything that was measured, and which targets were missed."""
    found = parts(results) | {"targets": missed(list(judged(results)))}
    texts = {name: text for name, text in found.items() if text and text != NOT_YET}
    return "\n\n".join(f"## {name.capitalize()}\n\n{text}" for name, text in texts.items())


def parts(results: Results) -> dict[str, str]:
    """Return the parts of the page on performance, by name; one that was not measured says so."""
    rows, steps = results.get("rows", []), results.get("steps", [])
    found = {
        "versions": versions(results["about"]),
        "took": took(results["about"]),
        **{f"ratios-{f}": "\n\n".join(speeds([row for row in rows if row["framework"] == f])) for f in TITLES},
        "memory": memory(rows),
        "compiling": compiling(rows),
        "steps": "\n\n".join(learning(steps)),
        "fused": fused(steps),
        "training": training(steps),
        "rules-compiling": rules_compiling(results.get("compiling", [])),
        "per-leaf": growth(results.get("scaling", [])),
        **answers(results),
    }
    return {name: text or NOT_YET for name, text in found.items()}


def versions(about: dict[str, Any]) -> str:
    """Return what was installed, where and when, in a sentence."""
    packages: dict[str, None] = {}
    for one in about.values():
        packages |= dict.fromkeys(f"{name} {number}" for name, number in one["versions"].items())
    machines = " and ".join(dict.fromkeys(f"{a['cores']} cores of an {a['cpu']}" for a in about.values()))
    dates = sorted({a["date"] for a in about.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured on {machines}, {when}, with {', '.join(packages)}."


def took(about: dict[str, Any]) -> str:
    """Return how long the parts of the measurement took."""
    found = {f: about[f].get("took", {}) for f in TITLES if f in about}
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    if not names:
        return ""
    total = sum(sum(parts.values()) for parts in found.values())
    lines = [[name, minutes(sum(parts.get(name, 0.0) for parts in found.values()))] for name in names]
    return f"All of it took {minutes(total)}:\n\n" + table(["part", "time"], lines)


def minutes(seconds: float) -> str:
    """Return a long time."""
    return f"{seconds / MINUTE:.1f} min"


def speeds(rows: list[Row]) -> Iterator[str]:
    """Yield a table for each way of calling each of uniclip's functions."""
    for way, name in ((way, name) for way in ways(rows) for name in ALL_OURS):
        found = [row for row in rows if row["way"] == way and name in row["contenders"]]
        cells = {(tree_of(row), row["clipped"]): speed(row, name) for row in found}
        trees = dict.fromkeys(map(tree_of, found))
        lines = [[tree, *(cells.get((tree, clipped), "") for clipped in (False, True))] for tree in trees]
        if lines:
            title = WAYS[rows[0]["framework"], way] + f", {name}"
            yield f"**{title}**\n\n" + table(["gradients", "not clipped", "clipped"], lines)


def ways(rows: list[Row]) -> list[str]:
    """Return the ways of calling in some rows."""
    return list(dict.fromkeys(row["way"] for row in rows))


def speed(row: Row, name: str) -> str:
    """Return a ratio, bold where uniclip is slower, and below it the times."""
    found = row["contenders"]
    ours, native = (duration(found[n]["us"]) for n in (name, native_of(name, found)))
    ratio = spread(found[name]["ratio"])
    marked = f"**{ratio}**" if round(found[name]["ratio"][1], 2) < 1 else ratio
    return f"{marked}<br>{ours}, native {native}"


def memory(rows: list[Row]) -> str:
    """Return the peaks of extra memory on ResNet-50's gradients, in times of their size."""
    rows = [row for row in rows if (row["tree"], row["dtype"]) == (RESNET, "float32")]
    rows = [row for row in rows if row["contenders"][READ].get("extra_bytes") is not None]
    cells: dict[tuple[str, str], dict[bool, str]] = {}
    for row, name in ((row, name) for f in TITLES for row in rows if row["framework"] == f for name in ORDER[:-1]):
        if name in row["contenders"]:
            count = row["contenders"][name]["extra_bytes"] / (4 * entries(TREES[RESNET]))
            where = WAYS[row["framework"], row["way"]]
            where = (
                where if row["framework"] == "numpy" else f"{TITLES[row['framework']]}, {where[0].lower()}{where[1:]}"
            )
            cells.setdefault((where, name), {})[row["clipped"]] = f"{count:.2f}"
    lines = ([f"{where}: {name}", found.get(False, ""), found.get(True, "")] for (where, name), found in cells.items())
    return table(["function", "not clipped", "clipped"], lines)


def compiling(rows: list[Row]) -> str:
    """Return the seconds of the first calls."""
    rows = [row for row in rows if "first_call_s" in row["contenders"][READ] and row["dtype"] == "float32"]
    blocks = []
    for framework, way in WAYS:
        found = [row for row in rows if (row["framework"], row["way"]) == (framework, way)]
        names = [name for name in (NATIVE, OURS, OURS_IN_PLACE) if found and name in found[0]["contenders"]]
        lines = ([tree_of(row), *(first_call(row, name) for name in names)] for row in found)
        if found:
            title = f"**{TITLES[framework]}, `{way.partition(',')[0]}`{''.join(way.partition(',')[1:])}**"
            blocks.append(f"{title}\n\n{table(['gradients', *(n.removeprefix('uniclip ') for n in names)], lines)}")
    return "\n\n".join(blocks)


def first_call(row: Row, name: str) -> str:
    """Return the time of the first call."""
    return f"{row['contenders'][name]['first_call_s']:.2g} s"


def rules_compiling(rows: list[Row]) -> str:
    """Return how long each rule takes to compile, in seconds and in times of the native loop."""
    lines = (
        [
            f"`{row['way']}`, {row['leaves']} leaves: {name if name == NATIVE else f'`{name}`'}",
            f"{found['s'][1]:.2g} s",
            spread(found["times"]) if name != NATIVE else "",
        ]
        for row in rows
        for name, found in row["contenders"].items()
    )
    return table(["program", "time", "times the loop"], lines)


def learning(steps: list[Row]) -> Iterator[str]:
    """Yield a table of the steps of rules that learn for each framework, and for `attach`."""
    for kind, title in ((CLIPPER, "`uc.Clipper`"), (ATTACH, "`attach`, a step of SGD")):
        for row in (row for f in TITLES for row in steps if (row["framework"], row["kind"]) == (f, kind)):
            more = {name: f"<br>{duration(found['above'][1])} more" for name, found in row["contenders"].items()}
            more[BASES[kind]] = ""
            lines = [[name, durations(found["us"]) + more[name]] for name, found in row["contenders"].items()]
            yield f"**{TITLES[row['framework']]}, {title}**\n\n" + table(["rule", "a step"], lines)


def fused(steps: list[Row]) -> str:
    """Return how much longer a step of a fused optimizer takes with clipping."""
    found = {row["kind"]: row["contenders"] for row in steps}
    if not all(kind in found for kind in FUSED.values()):
        return ""
    names = [name for name in found[FUSED[False]] if name != PLAIN]
    texts = ([f"`{name}`", *(percent(found[kind][name]["times"]) for kind in FUSED.values())] for name in names)
    plain = durations(found[FUSED[False]][PLAIN]["us"])
    return f"A step without clipping takes {plain}.\n\n" + table(["added by", "not clipped", "clipped"], texts)


def training(steps: list[Row]) -> str:
    """Return what clipping adds to a step of training a network, on each framework."""
    lines = []
    for row in (row for f in TITLES for row in steps if row["framework"] == f and row["kind"] in NETS):
        found = row["contenders"]
        title = "Keras" if row["kind"] in KERAS_NETS else TITLES[row["framework"]]
        about = f"{title}, {NETS[row['kind']]}, {duration(found[PLAIN]['us'][1])}"
        ours, native = (percent(next(found[n] for n in names if n in found)["times"]) for names in PAIRS)
        extra = f"; `attach` {percent(found[ATTACHED]['times'])}" if ATTACHED in found else ""
        lines.append([about, native, ours + extra])
    return table(["a step", "native adds", "uniclip adds"], lines)


def growth(rows: list[Row]) -> str:
    """Return the microseconds per leaf."""
    lines = (
        [
            f"{TITLES[framework]}, {'per tensor' if rule == BY_NORM else 'global norm'}, {name}",
            *(f"{t:.3g}" for t in times),
        ]
        for (framework, rule), found in per_leaf(rows).items()
        for name, times in found.items()
    )
    return table(["leaves", *(f"{count:,}" for count in COUNTS)], lines)


def missed(verdicts: list[Verdict]) -> str:
    """Return how many targets were reached, and those that were not."""
    far = [verdict for verdict in verdicts if not verdict.reached]
    lines = ([", ".join([TITLES[v.framework], *v.case, v.what]), wanted(v), spread(v.quartiles)] for v in far)
    count = f"{len(verdicts) - len(far)} of {len(verdicts)} are reached."
    return f"{count}\n\n{table(['missed', 'wanted', 'measured'], lines)}" if verdicts else ""


def wanted(verdict: Verdict) -> str:
    """Return a bound in words."""
    return f"{'at least' if verdict.sign > 0 else 'at most'} {verdict.bound:g}"
