# SPDX-License-Identifier: MIT
"""The tables of the performance page, from the results of ``benchmarks/speed.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compared import table

Row = dict[str, Any]
PLACES = {"torch": "PyTorch, `torch.compile`", "tensorflow": "TensorFlow, XLA", "jax": "JAX, `jit`"}
WAYS = ("clip_grad_norm_", "attach")
"""The two ways to clip in PyTorch."""
ADOPTED = {
    "clip_grad_norm_": "`clip_grad_norm_`",
    "attach": "`attach`",
    "nonfinite='skip'": "skip",
    "zclip": "`zclip`",
    "chain(zclip, by_global_norm)": "`zclip`, cap",
}
"""The rows of the README's table."""
SHOWN = ["small MLP", "50 x 16 k", "4 x 1 M"]
"""The README's columns of models on a CPU."""
SHARDED = "FSDP2, 148 parameters"
"""The README's column of two processes."""
DTYPES = ("float32", "bfloat16")
"""The columns of the README that were measured on a GPU."""
STEPS = {"jax": "optax under `jit`", "tensorflow": "Keras, `train_on_batch`"}


def parts(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the tables by name, given the results by the names of their files."""
    step = results["speed-step"]
    rules = results["speed-rules"]
    processes = results["speed-processes"]
    engines = results["speed-engines"]
    growth = results["speed-growth"]
    gpu = results["speed-gpu"]
    launches = results["launches"]
    rows = step["rows"]
    torch, others = (
        [row for row in rows if (row["framework"] == "torch") is wanted] for wanted in (True, False)
    )
    trees = list(dict.fromkeys(row["what"] for row in torch))
    return {
        "steps": table(["in a step of PyTorch", *trees], in_steps(torch, trees)),
        "readme": table(
            [
                "",
                *[f"CPU: {tree}" for tree in SHOWN],
                f"CPU, host: {SHARDED}",
                *[f"GPU ({gpu_of(gpu['about'])}): GPT-2, {name}" for name in DTYPES],
            ],
            for_adopters(torch, SHOWN, processes["rows"], gpu["rows"]),
        ),
        "quartiles": table(["", "native", *ADOPTED.values()], quartiles(torch)),
        "rules": table(
            ["a step of SGD", *[row["what"] for row in rules["rows"]]], costs(rules["rows"])
        ),
        "processes": table(
            ["on two processes", *models(processes["rows"]), "collectives"],
            on_processes(processes["rows"]),
        ),
        "engines": table(
            ["a step, clipped", *models(engines["rows"])], of_engines(engines["rows"])
        ),
        "engines-versions": f"Steps inside of DeepSpeed were {versions(engines['about'])}",
        "training": table(["a whole step", "not clipped", "native", "uniclip"], training(others)),
        "growth": table(
            ["", "gradients", "first call", "compiler alone", "one run"], grown(growth["rows"])
        ),
        "gpu": table(
            ["on a GPU", "compared with", "speedup", "GPU time in µs"], on_gpu(gpu["rows"])
        ),
        "gpu-host": table(
            ["on a GPU", "host time in µs", "launches", "memory in MB"], on_host(gpu["rows"])
        ),
        "gpu-without": table(
            ["clipped, without Triton", "compared with", "GPU time in µs", "launches"],
            without_triton(gpu["rows"]),
        ),
        "launches": table(["kernels", "rules"], by_launches(launches)),
        "gpu-versions": gpu_versions(gpu["about"]),
        "processes-versions": f"Steps on two processes were {versions(processes['about'])}",
        "versions": (
            f"Training steps were {versions(step['about'])} "
            f"Compiled code was {versions(growth['about'])}"
        ),
    }


def in_steps(rows: list[Row], trees: list[str]) -> Iterator[list[str]]:
    """Yield the speedup of the clipping call after a backward pass, not clipped / clipped."""
    found = {(row["what"], row["clipped"]): row["times"] for row in rows}
    for way in WAYS:
        ratios = [[found[tree, clipped][way][1] for clipped in (False, True)] for tree in trees]
        yield [f"`{way}`", *[" / ".join(map(number, pair)) for pair in ratios]]


def for_adopters(
    steps: list[Row], trees: list[str], processes: list[Row], gpu: list[Row]
) -> Iterator[list[str]]:
    """Yield the times of PyTorch's function and of `attach`, and the speedups by rule: on a CPU, of
    the host in one process of two, and on a GPU, where few rules were timed.
    """
    columns = [[row for row in steps if row["what"] == tree] for tree in trees]
    columns.append([row for row in processes if row["what"] == SHARDED])
    for title, name in (("PyTorch", "native"), ("`attach`", "attach")):
        cells = [pair([f"{row['us'][name]:,.0f}" for row in some]) for some in columns]
        yield [f"{title}, µs", *cells, *["-"] * len(DTYPES)]

    for name, title in ADOPTED.items():
        what = f"{'global norm' if name == 'clip_grad_norm_' else name}, GPT-2"
        cells = []
        for some in columns:
            ratios = [row["times"][name][1] if name in row["times"] else None for row in some]
            cells.append(pair(list(map(speedup, ratios))))
        for dtype in DTYPES:
            timed = [row for row in gpu if (row["what"], row["dtype"]) == (what, dtype)]
            cells.append(pair([speedup(ratio_on_gpu(row)) for row in timed]))
        yield [title, *cells]


def pair(cells: list[str]) -> str:
    """Return what was found in a step that is not clipped / clipped, ``-`` if nothing was."""
    return " / ".join(cells) if set(cells) - {"-"} else "-"


def speedup(ratio: float | None) -> str:
    """Return a speedup, bold if uniclip is slower, ``-`` if there is none."""
    return "-" if ratio is None else bold_if_slower(number(ratio), float(number(ratio)))


def quartiles(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the native function's time, and the speedups with quartiles."""
    for row in rows:
        title = f"{row['what']}, {'' if row['clipped'] else 'not '}clipped"
        times = row["times"]
        ratios = [spread(times[name]) if name in times else "-" for name in ADOPTED]
        yield [title, duration(row["us"]["native"]), *ratios]


def costs(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the time of a step by each rule over that of the constant limit, with quartiles."""
    for rule in rows[0]["cost"]:
        yield [f"`{rule}`", *[with_quartiles(row["cost"][rule]) for row in rows]]


def models(rows: list[Row]) -> list[str]:
    """Return the models of some rows."""
    return list(dict.fromkeys(row["what"] for row in rows))


def on_processes(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the host's time of a clip over that of the native function, with quartiles, and its
    collectives.
    """
    for clipped in (False, True):
        some = [row for row in rows if row["clipped"] is clipped]
        for name, count in some[0]["collectives"].items():
            if name == "native":
                cells = [duration(row["us"][name]) for row in some]
            else:
                ratios = [row["host"][name] for row in some]
                cells = [bold_if_slower(with_quartiles(one), 1 / one[1]) for one in ratios]
            title = f"{name_of(name)}, {'' if clipped else 'not '}clipped"
            yield [title, *cells, str(count)]


def of_engines(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the host's time of a step that DeepSpeed clips, and those of rules over it."""
    yield ["`gradient_clipping` of DeepSpeed", *[duration(row["us"]["native"]) for row in rows]]
    for name in rows[0]["times"]:
        ratios = [row["host"][name] for row in rows]
        yield [f"`{name}`", *[bold_if_slower(with_quartiles(one), 1 / one[1]) for one in ratios]]


def name_of(name: str) -> str:
    """Return a contender's name for a table."""
    return "PyTorch's `clip_grad_norm_`" if name == "native" else f"`{name}`"


def training(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the times of a whole step: not clipped, clipped natively, and clipped by uniclip."""
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


def on_gpu(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the speedups and the times of the GPU, not clipped / clipped."""
    for title, some in by_title(rows):
        speedups = " / ".join(speedup_on_gpu(row) for row in some)
        times = before_and_after(some, ("gpu_us", "step_us"), "{:,.0f}")
        yield [title, some[0]["peer"], speedups, times]


def on_host(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the times of the host, the launched kernels, and the memory above the gradients."""
    for title, some in by_title(rows):
        formats = {"host_us": "{:,.0f}", "launches": "{:,}", "peak_mb": "{:.1f}"}
        cells = [before_and_after(some, (key,), form) for key, form in formats.items()]
        if set(cells) != {"-"}:
            yield [title, *cells]


def without_triton(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the GPU times and launches of the other function and of uniclip without Triton."""
    for row in rows:
        if "without_triton" not in row:
            continue
        cells = []
        for key in ("gpu_us", "launches"):
            theirs, ours = (row[way][key] for way in ("native", "without_triton"))
            cells.append(bold_if_slower(f"{theirs:,.0f} → {ours:,.0f}", theirs / ours))
        yield [f"{row['what']}, {row['dtype']}", row["peer"], *cells]


def by_title(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of an operation, not clipped and clipped, with their title."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["what"], row["dtype"]), []).append(row)
    for (what, dtype), some in cases.items():
        # A title says which steps a row is of, if these are not both.
        only = {None: "", True: ", clipped", False: ", not clipped"}[some[0]["clipped"]]
        yield f"{what}, {dtype}{only if len(some) == 1 else ''}", some


def before_and_after(rows: list[Row], keys: tuple[str, ...], form: str) -> str:
    """Return a measurement of the other function and those of uniclip, ``-`` if not measured."""
    theirs, ours = (
        [form.format(row[way][key]) for row in rows for key in keys if key in row[way]]
        for way in ("native", "uniclip")
    )
    if not ours:
        return "-"

    # The other function does the same in both kinds of steps, and so does uniclip in some.
    after = " / ".join(dict.fromkeys(ours))
    return f"{theirs[-1]} → {after}" if theirs else after


def by_launches(launches: dict[str, list[int]]) -> Iterator[list[str]]:
    """Yield how many kernels a step starts, and the rules of which this is so."""
    rules: dict[int, list[str]] = {}
    for name, (triton, torch) in launches.items():
        rules.setdefault(triton + torch, []).append(f"`{name}`")
    for number_of_kernels, names in sorted(rules.items()):
        yield [str(number_of_kernels), ", ".join(names)]


def speedup_on_gpu(row: Row) -> str:
    """Return how many times as fast uniclip is on the GPU, with quartiles if there are rounds."""
    if "speedup" in row:
        return spread(row["speedup"])
    return bold_if_slower(number(ratio_on_gpu(row)), ratio_on_gpu(row))


def ratio_on_gpu(row: Row) -> float:
    """Return how many times as fast uniclip is on the GPU."""
    if "speedup" in row:
        return float(row["speedup"][1])
    return float(row["native"]["gpu_us"] / row["uniclip"]["gpu_us"])


def gpu_versions(about: dict[str, Any]) -> str:
    """Return on which GPU, when, and with which versions the rows were measured, in a sentence."""
    packages = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return f"Measured on one {about['device']} in {about['date']} ({about['what']}; {packages})."


def gpu_of(about: dict[str, Any]) -> str:
    """Return what was measured on which GPU, for the head of a column."""
    what = about["what"].partition(" ")[0]
    return f"{what}, {about['device'].split()[-1]}, PyTorch {about['versions']['torch']}"


def versions(about: dict[str, Any]) -> str:
    """Return one sentence with the machine, the date, and the installed versions."""
    packages = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"measured on {about['cores']} cores of an {about['cpu']}, {about['date']}, with "
        f"{packages}."
    )


def number(ratio: float) -> str:
    """Return a ratio to two decimals, or to none if it is large."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"  # noqa: PLR2004


def spread(ratios: list[float]) -> str:
    """Return a median and its quartiles, bold if uniclip is slower."""
    return bold_if_slower(with_quartiles(ratios), float(number(ratios[1])))


def with_quartiles(ratios: list[float]) -> str:
    """Return a median and its quartiles."""
    low, middle, high = map(number, ratios)
    return f"{middle} ({low}-{high})"


def bold_if_slower(text: str, ratio: float) -> str:
    """Return a speedup in bold if uniclip is slower."""
    return f"**{text}**" if ratio < 1 else text


def duration(us: float) -> str:
    """Return a time to three digits."""
    unit, size = next(
        ((unit, size) for unit, size in [("s", 1e6), ("ms", 1e3)] if us >= size), ("µs", 1.0)
    )
    return f"{us / size:.3g} {unit}"
