# SPDX-License-Identifier: MIT
"""What speed.py measured, as Markdown: for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contenders import ALL_OURS, NATIVE, NATIVE_IN_PLACE, OURS, READ
from gradient_trees import TREES, entries
from targets import COUNTS, Row, Verdict, case, judged, per_leaf, tree_of
from training_steps import BASES

TITLES = {"numpy": "NumPy", "torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}
ORDER = [NATIVE, NATIVE_IN_PLACE, *ALL_OURS, READ]
CASE = ["called", "gradients", "clipped"]
Results = dict[str, Any]


def report(results: Results) -> str:
    """Return everything that was measured."""
    return "\n\n".join(f"## {name.capitalize()}\n\n{text}" for name, text in parts(results).items() if text)


def parts(results: Results) -> dict[str, str]:
    """Return the parts of the page on performance, by name; one that was not measured is empty."""
    rows = results.get("rows", [])
    verdicts = list(judged(results))
    return {
        "versions": versions(results["about"]),
        "ratios": by_framework(rows, speeds),
        "memory": by_framework(rows, memory),
        "compiling": by_framework(rows, compiling),
        "targets": by_framework(verdicts, aims),
        "missed": missed(verdicts) if verdicts else "",
        "slower": slower(rows),
        "steps": by_framework(results.get("steps", []), training),
        "rules-compiling": rules_compiling(results.get("compiling", [])),
        "per-leaf": growth(results.get("scaling", [])),
        "scaling": by_framework(results.get("scaling", []), curves),
    }


def versions(about: dict[str, Any]) -> str:
    """Return what was installed, where and when."""
    heads = ["versions", "CPU", "cores", "date"]
    texts = [", ".join(f"{name} {number}" for name, number in a["versions"].items()) for a in about.values()]
    return table(heads, ([t, a["cpu"], str(a["cores"]), a["date"]] for t, a in zip(texts, about.values(), strict=True)))


def by_framework(items: list[Any], make: Any) -> str:
    """Return a table for each framework, under its name."""
    blocks = []
    for framework, title in TITLES.items():
        text = make([item for item in items if framework_of(item) == framework])
        blocks += [f"### {title}", text] if text else []
    return "\n\n".join(blocks)


def framework_of(item: Row | Verdict) -> str:
    """Return the framework that something was measured on."""
    return item.framework if isinstance(item, Verdict) else item["framework"]


def present(rows: list[Row]) -> list[str]:
    """Return the contenders of some rows."""
    return [name for name in ORDER if any(name in row["contenders"] for row in rows)]


def speeds(rows: list[Row]) -> str:
    """Return the ratios, then the times."""
    names = present(rows)
    ours = [name for name in ALL_OURS if name in names]
    heads = [*CASE, *(f"native / {name}" for name in ours), *names]
    return table(heads, (case(row) + ratios(row, ours) + times(row, names) for row in rows))


def ratios(row: Row, names: list[str]) -> list[str]:
    """Return how far uniclip is ahead; nothing for a contender that the row lacks."""
    found = row["contenders"]
    return [spread(found[name]["ratio"]) if name in found else "" for name in names]


def times(row: Row, names: list[str]) -> list[str]:
    """Return the medians of the times."""
    found = row["contenders"]
    return [duration(found[name]["us"]) if name in found else "" for name in names]


def memory(rows: list[Row]) -> str:
    """Return the peaks of extra memory, in sizes of the gradients and in MiB."""
    rows = [row for row in rows if row["contenders"][READ].get("extra_bytes") is not None]
    names = present(rows)
    return table([*CASE, *names], (case(row) + [extra(row, name) for name in names] for row in rows))


def extra(row: Row, name: str) -> str:
    """Return the extra memory of one contender, if the row has it."""
    if name not in row["contenders"]:
        return ""
    size = entries(TREES[row["tree"]]) * (4 if row["dtype"] == "float32" else 2)
    count = row["contenders"][name]["extra_bytes"]
    return f"{count / size:.2f} × ({count / 2**20:,.1f} MiB)"  # noqa: RUF001 - times


def compiling(rows: list[Row]) -> str:
    """Return the seconds of the first calls."""
    rows = [row for row in rows if "first_call_s" in row["contenders"][READ]]
    names = present(rows)
    lines = (case(row)[:2] + [f"{row['contenders'][name]['first_call_s']:.1f} s" for name in names] for row in rows)
    return table([*CASE[:2], *names], lines)


def rules_compiling(rows: list[Row]) -> str:
    """Return how long each rule takes to compile, in seconds and in times of the native loop."""
    lines = (
        [
            TITLES[row["framework"]],
            row["way"],
            name,
            spread(found["s"]),
            spread(found["times"]) if name != NATIVE else "",
        ]
        for row in rows
        for name, found in row["contenders"].items()
    )
    return table(["framework", "called", "what", "seconds", "times the native loop"], lines)


def training(rows: list[Row]) -> str:
    """Return the times of steps of training."""
    lines = (
        [
            row["kind"],
            name,
            spread(in_ms(found["us"])),
            spread(in_ms(found["above"])) if name != BASES[row["kind"]] else "",
        ]
        for row in rows
        for name, found in row["contenders"].items()
    )
    return table(["step", "rule", "ms", "ms more"], lines)


def growth(rows: list[Row]) -> str:
    """Return the times per leaf."""
    lines = (
        [TITLES[framework], rule, name, *map(duration, times)]
        for (framework, rule), found in per_leaf(rows).items()
        for name, times in found.items()
    )
    return table(["framework", "rule", "what", *(f"{count:,} leaves" for count in COUNTS)], lines)


def aims(verdicts: list[Verdict]) -> str:
    """Return each target beside what was measured."""
    heads = [*CASE, "what", "wanted", "measured", "reached"]
    return table(heads, map(aim, verdicts))


def missed(verdicts: list[Verdict]) -> str:
    """Return how many targets were reached, and those that were not."""
    far = [verdict for verdict in verdicts if not verdict.reached]
    count = f"{len(verdicts) - len(far)} of {len(verdicts)} are reached"
    return f"{count}; these are not:\n\n{by_framework(far, aims)}" if far else f"{count}."


def aim(verdict: Verdict) -> list[str]:
    """Return a target as texts."""
    wanted = f"{'at least' if verdict.sign > 0 else 'at most'} {verdict.bound:g}"
    reached = "yes" if verdict.reached else "**no**"
    return [*verdict.case, verdict.what, wanted, spread(verdict.quartiles), reached]


def slower(rows: list[Row]) -> str:
    """Return where uniclip takes longer than what it is compared with."""
    found: dict[str, list[str]] = {}
    for row, name in ((row, name) for row in rows for name in ALL_OURS if name in row["contenders"]):
        ratio = row["contenders"][name]["ratio"]
        if round(ratio[1], 2) < 1:
            state = "clipped" if row["clipped"] else "not clipped"
            where = f"{TITLES[row['framework']]}, {row['way']}{name.removeprefix(OURS)}"
            found.setdefault(where, []).append(f"{tree_of(row)}, {state}: {spread(ratio)}")
    return "\n".join(f"- **{where}:** {'; '.join(cases)}" for where, cases in found.items()) or "None." * bool(rows)


def curves(rows: list[Row]) -> str:
    """Return the times over leaves and entries."""
    heads = ["called", "rule", "leaves", "entries", NATIVE, OURS]
    counts = ([f"{row['leaves']:,}", f"{row['entries']:,}"] for row in rows)
    lines = ([r["way"], r["rule"], *n, *map(duration, r["us"].values())] for r, n in zip(rows, counts, strict=True))
    return table(heads, lines)


def spread(quartiles: list[float]) -> str:
    """Return a median and the quartiles around it."""
    low, middle, high = (f"{x:.2f}" for x in quartiles)
    return f"{middle} ({low}-{high})" if low != high else middle


def in_ms(us: list[float]) -> list[float]:
    """Return microseconds in milliseconds."""
    return [x / 1e3 for x in us]


def duration(us: float) -> str:
    """Return a time to three digits."""
    unit, size = next(((u, s) for u, s in [("s", 1e6), ("ms", 1e3)] if us >= s), ("µs", 1))
    return f"{us / size:.3g} {unit}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table, aligned, or nothing if there are no rows."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return text if len(lines) > 2 else ""  # noqa: PLR2004 - the heads and the line below
