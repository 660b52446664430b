# SPDX-License-Identifier: MIT
"""The tables of the page on performance, from the results of ``benchmarks/speed.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compared import table

Row = dict[str, Any]
PLACES = {"torch": "PyTorch, `torch.compile`", "tensorflow": "TensorFlow, XLA", "jax": "JAX, `jit`"}
WAYS = ("clip_grad_norm_", "attach")
"""The two ways to clip with PyTorch."""
STEPS = {"jax": "optax under `jit`", "tensorflow": "Keras, `train_on_batch`"}


def parts(step: dict[str, Any], growth: dict[str, Any]) -> dict[str, str]:
    """Return the tables by name."""
    rows = step["rows"]
    torch, others = (
        [row for row in rows if (row["framework"] == "torch") is wanted] for wanted in (True, False)
    )
    trees = list(dict.fromkeys(row["what"] for row in torch))
    return {
        "steps": table(["in a step of PyTorch", *trees], in_steps(torch, trees)),
        "quartiles": table(["", "native", *[f"`{way}`" for way in WAYS]], quartiles(torch)),
        "training": table(["a whole step", "not clipped", "native", "uniclip"], training(others)),
        "growth": table(
            ["", "leaves", "first call", "compiler alone", "a run"], grown(growth["rows"])
        ),
        "versions": (
            f"Steps were {versions(step['about'])} Many leaves were {versions(growth['about'])}"
        ),
    }


def in_steps(rows: list[Row], trees: list[str]) -> Iterator[list[str]]:
    """Yield the speedup of clipping after a backward pass, unclipped / clipped."""
    found = {(row["what"], row["clipped"]): row["times"] for row in rows}
    for way in WAYS:
        ratios = [[found[tree, clipped][way][1] for clipped in (False, True)] for tree in trees]
        yield [f"`{way}`", *[" / ".join(map(number, pair)) for pair in ratios]]


def quartiles(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the time of the native function, and the speedups with quartiles.

    Slower ones are bold.
    """
    for row in rows:
        title = f"{row['what']}, {'' if row['clipped'] else 'not '}clipped"
        yield [title, duration(row["us"]["native"]), *[spread(row["times"][way]) for way in WAYS]]


def training(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the times of a whole step: unclipped, clipped natively, and clipped by uniclip."""
    for row in rows:
        us = row["us"]
        way = next(name for name in us if name not in {"native", "not clipped"})
        ours = f"{duration(us[way])}, {spread(row['times'][way])}"
        yield [
            f"{STEPS[row['framework']]}, {row['what']}",
            duration(us["not clipped"]),
            duration(us["native"]),
            ours,
        ]


def grown(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the speedups of compiling and running each rule's program, by the number of leaves."""
    found: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        rule, leaves = row["what"].rsplit(", ", 1)
        count, _, size = leaves.partition(" leaves of ")
        cells = found.setdefault((row["framework"], rule, size), {})
        cells.setdefault(row["stage"], {})[count] = number(row["times"]["uniclip"][1])
    for (framework, rule, size), cells in found.items():
        ratios = [
            " / ".join(cells.get(stage, {}).values())
            for stage in ("first call", "compiler alone", "a run")
        ]
        yield [f"{PLACES[framework]}, `{rule}`", f"{' / '.join(cells['a run'])} of {size}", *ratios]


def versions(about: dict[str, Any]) -> str:
    """Return a sentence with versions, machine and date."""
    packages = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"measured on {about['cores']} cores of an {about['cpu']}, {about['date']}, with "
        f"{packages}."
    )


def number(ratio: float) -> str:
    """Return a ratio to two decimals, or to none if it is large."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"  # noqa: PLR2004


def spread(ratios: list[float]) -> str:
    """Return a median and its quartiles, bold where uniclip is slower."""
    low, middle, high = map(number, ratios)
    text = f"{middle} ({low}-{high})"
    return f"**{text}**" if float(middle) < 1 else text


def duration(us: float) -> str:
    """Return a time to three digits."""
    unit, size = next(
        ((unit, size) for unit, size in [("s", 1e6), ("ms", 1e3)] if us >= size), ("µs", 1.0)
    )
    return f"{us / size:.3g} {unit}"
