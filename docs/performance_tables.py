# SPDX-License-Identifier: MIT
"""The tables of the page on performance, of what ``benchmarks/speed.py`` measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compared import table

Row = dict[str, Any]
STEP, GROWTH = "in a step, ", "growth, "
"""With these the way of calling begins, where training and compiled code of many leaves were measured."""
PLACES = {
    ("torch", "eager"): "PyTorch",
    ("torch", "torch.compile"): "PyTorch, `torch.compile`",
    ("tensorflow", "eager"): "TensorFlow, eager",
    ("tensorflow", "tf.function"): "TensorFlow, `tf.function`",
    ("tensorflow", "tf.function, XLA"): "TensorFlow, XLA",
    ("jax", "jax.jit"): "JAX, `jit`",
    ("jax", "eager"): "JAX, no `jit`",
    ("numpy", "eager"): "NumPy",
}
STEPS = {
    "one leaf of 16": "16 entries", "MLP, ten leaves": "small MLP", "LSTM, four leaves": "LSTM",
    "50 leaves of 16 k": "50 x 16 k", "4 leaves of 1 M": "4 x 1 M",
}  # fmt: skip
NETS = {"one leaf of 16": "16 entries", "MLP": "small MLP", "LSTM": "LSTM", "ResNet-50": "ResNet-50"}
OTHERS = {"50 leaves of 64": "50 tensors, each by its norm", "10 convolutions": "AGC, 10 layers"}
TRAINED = {"jax": "JAX, `jit`", "tensorflow": "Keras, `train_on_batch`"}


def parts(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by name."""
    rows = results["rows"]
    steps = [row for row in rows if row["way"] == "a training step"]
    cold = [row for row in rows if row["way"].startswith(STEP)]
    many = [row for row in rows if row["way"].startswith(GROWTH)]
    others = [row for row in rows if row not in [*steps, *many, *cold]]
    return {
        "ratios": ratios([row for row in rows if row["framework"] != "torch" or row["way"] != "eager"], NETS),
        "steps": table(["in a step of PyTorch", *STEPS.values()], in_steps(cold)),
        "whole-steps": table(["", "takes", "clipped by PyTorch", "by uniclip"], whole_steps(cold)),
        "rules": ratios(rows, OTHERS),
        "training": table(["a step of", "takes", "the native function adds", "uniclip adds"], training(steps)),
        "many": table(["", "leaves", "first call", "compiler alone", "a run"], growth(many)),
        "all": table(["", "times as fast", "native", "uniclip"], everything(others)),
        "versions": versions(results["about"]),
    }


def ratios(rows: list[Row], columns: dict[str, str]) -> str:
    """Return how many times as fast uniclip is, not clipped / clipped, for each way of calling."""
    found = {(row["framework"], row["way"], row["what"], row.get("clipped")): row["times"] for row in rows}
    lines = []
    for place, title in PLACES.items():
        pairs = [[found.get((*place, what, clipped)) for clipped in (False, True)] for what in columns]
        cells = [" / ".join(number(times["uniclip"][1]) for times in pair) if all(pair) else "" for pair in pairs]
        lines += [[title, *cells]] * any(cells)
    return table(["", *columns.values()], lines)


def training(rows: list[Row]) -> Iterator[list[str]]:
    """Yield what clipping adds to a step of training: the native function, then each of uniclip's ways."""
    for row in rows:
        native, *ours = [f"{added(ratio)}, `{name}`" for name, ratio in row["times"].items()]
        about = [f"{TRAINED[row['framework']]}, {row['what']}", duration(row["us"]["not clipped"])]
        yield [*about, native.removesuffix(", `native`"), "<br>".join(ours)]


def in_steps(rows: list[Row]) -> Iterator[list[str]]:
    """Yield how many times as fast the clip is after a backward pass, not clipped / clipped, with two threads."""
    found = {(row["what"], row["clipped"]): row["times"] for row in rows if row["way"] == f"{STEP}2 threads, the clip"}
    for name in ("clip_grad_norm_", "attach"):
        yield [
            f"`{name}`",
            *[" / ".join(number(found[what, clipped][name][1]) for clipped in (False, True)) for what in STEPS],
        ]


def whole_steps(rows: list[Row]) -> Iterator[list[str]]:
    """Yield what a step of SGD takes, alone and clipped in each of the ways."""
    for row in rows:
        if row["way"].endswith("a step of SGD") and row["clipped"]:
            threads, us = row["way"].removeprefix(STEP).partition(",")[0].replace("1 threads", "1 thread"), row["us"]
            ours = "<br>".join(f"{duration(us[name])}, `{name}`" for name in ("clip_grad_norm_", "attach"))
            yield [f"{row['what']}, {threads}", duration(us["not clipped"]), duration(us["native"]), ours]


def growth(rows: list[Row]) -> Iterator[list[str]]:
    """Yield how many times as fast each rule's program is there and runs, by the number of leaves."""
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        way, stage = row["way"].removeprefix(GROWTH).rsplit(", ", 1)
        rule, leaves = row["what"].rsplit(", ", 1)
        count, _, size = leaves.partition(" leaves of ")
        cells = found.setdefault((PLACES[row["framework"], way], rule, size), {})
        stage, ratio = stage.replace("first call", "trace and compile"), row["times"]["uniclip"][1]
        cells.setdefault(stage, {})[count] = number(ratio)
    for (place, rule, size), cells in found.items():
        counts = " / ".join(cells["a run"])
        ratios = [" / ".join(cells.get(stage, {}).values()) for stage in ("trace and compile", "compile", "a run")]
        yield [f"{place}, `{rule}`", f"{counts} of {size}", *ratios]


def everything(rows: list[Row]) -> Iterator[list[str]]:
    """Yield what was measured but in training, with quartiles and the medians of the times."""
    for row in rows:
        place = PLACES.get((row["framework"], row["way"]), row["way"])
        clipped = {True: ", clipped", False: ", not clipped", None: ""}[row.get("clipped")]
        first = next(iter(row["us"].values()))
        for name, ratio in row["times"].items():
            title = f"{place}, {row['what']}{clipped}{name.removeprefix('uniclip')}"
            yield [title, spread(ratio), duration(first), duration(row["us"][name])]


def versions(about: dict[str, Any]) -> str:
    """Return what was installed, where and when, in a sentence."""
    packages: dict[str, None] = {}
    for one in about.values():
        packages |= dict.fromkeys(f"{name} {number}" for name, number in one["versions"].items())
    machines = " and ".join(dict.fromkeys(f"{a['cores']} cores of an {a['cpu']}" for a in about.values()))
    dates = sorted({a["date"] for a in about.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured on {machines}, {when}, with {', '.join(packages)}."


def number(ratio: float) -> str:
    """Return a ratio to two decimals, or without any if it is large."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"  # noqa: PLR2004


def spread(quartiles: list[float]) -> str:
    """Return a median and the quartiles around it, bold where uniclip is slower."""
    low, middle, high = map(number, quartiles)
    text = f"{middle} ({low}-{high})" if low != high else middle
    return f"**{text}**" if round(quartiles[1], 2) < 1 else text


def added(ratio: list[float]) -> str:
    """Return how much longer something takes, from quartiles of how many times as fast it is."""
    high, middle, low = (round(100 / x - 100) for x in ratio)
    return f"{middle} % ({low} to {high})"


def duration(us: float) -> str:
    """Return a time to three digits."""
    unit, size = next(((unit, size) for unit, size in [("s", 1e6), ("ms", 1e3)] if us >= size), ("µs", 1.0))
    return f"{us / size:.3g} {unit}"
