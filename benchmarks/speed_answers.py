# SPDX-License-Identifier: MIT
"""What a user of each framework sees of the measured speed, in sentences and short lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speed_format import TITLES, duration, durations, number, percent, spread, table

from contenders import DROP_IN, EAGER, NATIVE, OURS, OURS_IN_PLACE
from gradient_trees import MLP, RESNET
from targets import Row, tree_of
from training_steps import (
    ATTACHED,
    CLIPNORM,
    KERAS_SMALL_NET,
    KERAS_STEPS,
    KERAS_WIDE_NET,
    PLAIN,
    SMALL_NET,
    WIDE_NET,
    WRAPPED,
)

NATIVES = {
    "torch": "`torch.nn.utils.clip_grad_norm_`",
    "tensorflow": "`tf.clip_by_global_norm`",
    "jax": "`optax.clip_by_global_norm`",
    "numpy": "the lines by hand",
}
WAYS = {
    ("torch", EAGER): "Eager",
    ("torch", "torch.compile"): "Under `torch.compile`",
    ("tensorflow", EAGER): "Eager",
    ("tensorflow", "tf.function"): "In a `tf.function`",
    ("tensorflow", "tf.function, XLA"): "With XLA",
    ("jax", "jax.jit"): "Under `jax.jit`",
    ("jax", EAGER): "Outside of `jit`",
    ("jax", "jax.jit, donated"): "Under `jax.jit`, gradients donated",
    ("numpy", EAGER): "NumPy",
}
"""How clipping is called, in the order of the page."""
SHORT = {
    ("torch", EAGER): "PyTorch",
    ("tensorflow", EAGER): "TensorFlow, eager",
    ("tensorflow", "tf.function"): "`tf.function`",
    ("jax", "jax.jit"): "JAX, `jit`",
    ("jax", EAGER): "JAX, no `jit`",
    ("numpy", EAGER): "NumPy",
}
"""The rows of the table that leads the page."""
NETS = {SMALL_NET: "small MLP", WIDE_NET: "wide MLP", KERAS_SMALL_NET: "small MLP", KERAS_WIDE_NET: "wide MLP"}
KERAS_NETS = [KERAS_SMALL_NET, KERAS_WIDE_NET]
Results = dict[str, Any]


def answers(results: Results) -> dict[str, str]:
    """Return the parts of the page that lead it, by name."""
    rows, steps = results.get("rows", []), results.get("steps", [])
    found = {f"answer-{f}": "\n".join(answer(f, rows, steps)) for f in TITLES}
    found["answer-keras"] = "\n".join(keras_answer(steps))
    found |= {f"slower-{f}": slower([row for row in rows if row["framework"] == f]) for f in TITLES}
    found["slower-keras"] = keras_slower(steps)
    return found | {"summary": summary(rows, steps)}


def headline(results: Results) -> str:
    """Return what the README says of the speed: ratios on gradients of ResNet-50, not clipped / clipped."""

    def both(framework: str, way: str) -> str:
        return " / ".join(number(ratio[1]) for ratio in ratios(results["rows"], framework, way, RESNET))

    return (
        f"{both('torch', EAGER)} times as fast as PyTorch's function, "
        f"{both('tensorflow', EAGER)} as eager TensorFlow's, "
        f"{both('jax', 'jax.jit')} as optax's under `jit` and {both('jax', EAGER)} outside"
    )


def like_native(row: Row) -> str:
    """Return the contender that does what the native function does: in PyTorch in place, elsewhere new gradients."""
    names = [DROP_IN, OURS_IN_PLACE] if row["framework"] == "torch" else []
    return next((name for name in names if name in row["contenders"]), OURS)


def pick(rows: list[Row], framework: str, way: str, tree: str) -> list[Row]:
    """Return the rows of a tree in float32, first the one that is not clipped."""
    key = (framework, way, tree, "float32")
    found = [r for r in rows if (r["framework"], r["way"], r["tree"], r["dtype"]) == key]
    return sorted(found, key=lambda row: row["clipped"])


def ratios(rows: list[Row], framework: str, way: str, tree: str) -> list[list[float]]:
    """Return the ratio, with quartiles, not clipped and clipped; empty unless both were measured."""
    found = [row["contenders"][like_native(row)]["ratio"] for row in pick(rows, framework, way, tree)]
    return found if len(found) == len((False, True)) else []


def summary(rows: list[Row], steps: list[Row]) -> str:
    """Return the ratios of two trees, not clipped and clipped, a line for each way of calling."""
    found = {title: [ratios(rows, *key, tree) for tree in (RESNET, MLP)] for key, title in SHORT.items()}
    kinds = {row["kind"]: row["contenders"].get(WRAPPED, {}).get("ratio") for row in steps}
    if all(kinds.get(kind) for kind in KERAS_STEPS.values()):
        found["Keras, eager step"] = [[kinds[KERAS_STEPS[tree, c]] for c in (False, True)] for tree in (RESNET, MLP)]
    titles = sorted(found, key=lambda title: title.startswith(("JAX", "NumPy")) + title.startswith("NumPy"))
    cells = {title: [" / ".join(number(q[1]) for q in pair) for pair in found[title]] for title in titles}
    return table(["", "ResNet-50", "small MLP"], [[title, *texts] for title, texts in cells.items() if all(texts)])


def answer(framework: str, rows: list[Row], steps: list[Row]) -> Iterator[str]:
    """Yield the items that answer how fast uniclip is on a framework."""
    for way in (way for name, way in WAYS if name == framework and "donated" not in way):
        for tree, name in ((RESNET, "gradients of ResNet-50"), (MLP, "gradients of a small MLP")):
            found = pick(rows, framework, way, tree)
            if len(found) == len((False, True)):
                texts = (against_native(row) for row in found)
                lead = f"{WAYS[framework, way]}, {name}" if framework != "numpy" else f"G{name[1:]}"
                yield f"- {lead}: {' when nothing is clipped, '.join(texts)} when clipped."
    yield from in_training(
        [row for row in steps if row["framework"] == framework and row["kind"] in {SMALL_NET, WIDE_NET}]
    )


def against_native(row: Row) -> str:
    """Return a ratio and the times behind it."""
    name, found = like_native(row), row["contenders"]
    ratio, ours, native = found[name]["ratio"], found[name]["us"], found[NATIVE]["us"]
    return f"**{number(ratio[1])} times** as fast ({duration(ours)}, native {duration(native)})"


def in_training(steps: list[Row]) -> Iterator[str]:
    """Yield what clipping adds to whole steps of training."""
    for row in steps:
        found = row["contenders"]
        ours, native = next(pair for pair in ((OURS, NATIVE), (WRAPPED, CLIPNORM)) if pair[0] in found)
        text = (
            f"uniclip adds **{percent(found[ours]['times'])}**, the native function {percent(found[native]['times'])}"
        )
        extra = f", `attach` {percent(found[ATTACHED]['times'])}" if ATTACHED in found else ""
        yield f"- A training step of a {NETS[row['kind']]} takes {duration(found[PLAIN]['us'][1])}: {text}{extra}."


def keras_answer(steps: list[Row]) -> Iterator[str]:
    """Yield the items that answer how fast clipping in Keras' optimizers is."""
    kinds = {row["kind"]: row for row in steps}
    for (tree, clipped), kind in KERAS_STEPS.items():
        if kind in kinds:
            found, state = kinds[kind]["contenders"], "clipped" if clipped else "nothing clipped"
            ours, native = found[WRAPPED], found.get(CLIPNORM)
            more = f", `global_clipnorm` {durations(native['above'])}" if native else ""
            name = "ResNet-50" if tree == RESNET else "a small MLP"
            yield (
                f"- `apply_gradients` called eagerly, {name}, {state}: a step without clipping takes "
                f"{duration(found[PLAIN]['us'][1])}; `ClippedOptimizer` adds **{durations(ours['above'])}**{more}."
            )
    yield from in_training([kinds[kind] for kind in KERAS_NETS if kind in kinds])


def slower(rows: list[Row]) -> str:
    """Return where uniclip takes longer than the native function, both called alike; the other calls are in tables."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        ratio = row["contenders"][like_native(row)]["ratio"]
        if round(ratio[1], 2) < 1:
            text = f"{'clipped ' if row['clipped'] else ''}{spread(ratio)}"
            found.setdefault(WAYS[row["framework"], row["way"]], {}).setdefault(tree_of(row), []).append(text)
    cases = {
        way: "; ".join(f"{tree}: {', '.join(sorted(q))}" for tree, q in trees.items()) for way, trees in found.items()
    }
    return "\n".join(f"- **{way}.** {text}." for way, text in cases.items()) or NOWHERE


def keras_slower(steps: list[Row]) -> str:
    """Return the steps of Keras that take longer than those that clip as Keras does."""
    found = [(row["kind"], row["contenders"].get(WRAPPED, {}).get("ratio")) for row in steps]
    cases = [f"- {kind}: {spread(ratio)}." for kind, ratio in found if ratio and round(ratio[1], 2) < 1]
    return "\n".join(cases) or NOWHERE


NOWHERE = "- None of those measured."
