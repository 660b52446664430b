"""Record what every rule does, so that later versions can be held to it: ``python tests/record.py`` writes tests/data.

It was run once, and `test_recordings` compares today's results with what it wrote. Run it again only where results are
meant to change, and say so in the change log.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optree

import uniclip
from kit.rules import LOSSES, every_rule, params, steps
from uniclip.saved import to_dict

DATA = Path(__file__).parent / "data"
DTYPES = ("float32", "float64")
FLAGS = ("clipped", "finite", "skipped")
SHOWN = (0, 6, 11)
"""The steps whose clipped gradients are recorded: the first, a spike, the last."""
STOP = 6
"""After how many steps the state is saved, from which another clipper goes on."""
LARGE = 1000
"""How many entries of a state are too many to record at each step: the histogram of all norms."""
STEPS = 3
"""After how many steps the files of PyTorch and Keras are written."""
Arrays = dict[str, np.ndarray]


def flat(tree: Any) -> np.ndarray:
    """Return all entries of a tree of arrays as one row; ``None`` has none."""
    parts = [np.asarray(leaf).reshape(-1) for leaf in optree.tree_leaves(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)


def row(clipped: Any, report: Any, saved: dict[str, Any]) -> Arrays:
    """Return what is recorded of one step."""
    fields = {name: flat(getattr(report, name)) for name in ("norms", "limits", "factors", "thresholds")}
    fields |= {name: flat(getattr(report, name)) for name in FLAGS}
    fields |= {f"state {name}": np.asarray(value) for name, value in saved.get("state", {}).items()}
    return {"gradients": flat(clipped), **{name: value for name, value in fields.items() if 0 < value.size < LARGE}}


def taken(rule: Any, dtype: str) -> list[Arrays]:
    """Return what is recorded of the twelve steps of a rule."""
    weights, rows = params(dtype), []
    state = rule.init(weights)
    for grads, loss in zip(steps(dtype), LOSSES, strict=True):
        clipped, state, report = rule.update(grads, state, params=weights, loss=loss)
        rows.append(row(clipped, report, to_dict(rule, state, grads)))
    return rows


def together(rows: list[Arrays], dtype: str) -> np.ndarray:
    """Return the rows of all steps as one array of records; gradients are 0 where they are not recorded."""
    for number in set(range(len(rows))) - set(SHOWN):
        rows[number]["gradients"] = np.zeros_like(rows[number]["gradients"])
    kind = lambda value: dtype if value.dtype.kind == "f" else value.dtype
    kinds = [(name, kind(value), value.shape) for name, value in rows[0].items()]
    return np.asarray([tuple(one[name] for name, *_ in kinds) for one in rows], kinds)


def stopped(uc: ModuleType, rule: Any, dtype: str) -> dict[str, Any]:
    """Return the saved state of a rule after the first half of the steps."""
    clipper = uc.Clipper(rule)
    for grads, loss in zip(steps(dtype)[:STOP], LOSSES, strict=False):
        clipper(grads, params=params(dtype), loss=loss)
    return clipper.state_dict()


def two_memories(uc: ModuleType) -> Any:
    """Return the rule of the files of PyTorch and Keras, which remembers one norm of all leaves and one of each."""
    return uc.chain(uc.zclip(z=1.0, warmup=2), uc.adagc(warmup=2))


def of_torch(uc: ModuleType) -> tuple[Any, dict[str, Any], Callable[[int], Arrays]]:
    """Return an optimizer of PyTorch with a rule attached, its weights, and what takes a step and returns them."""
    import torch

    from uniclip.integrations.torch import attach

    weights = {name: torch.nn.Parameter(torch.tensor(params("float32")[name])) for name in ("b", "w")}
    optimizer = torch.optim.SGD(list(weights.items()), lr=0.1, momentum=0.5)
    attach(optimizer, two_memories(uc))

    def step(number: int) -> Arrays:
        for name, weight in weights.items():
            weight.grad = torch.tensor(steps("float32")[number][name])
        optimizer.step()
        return {name: weight.detach().numpy().copy() for name, weight in weights.items()}

    return optimizer, weights, step


def of_keras(model: Any, number: int) -> Arrays:
    """Train a model of Keras on one batch, and return its weights."""
    grads = steps("float32")[number]["w"]
    model.train_on_batch(grads.T, grads.T @ np.ones((3, 2), np.float32))
    return {weight.name: np.asarray(weight) for weight in model.trainable_variables}


def write_files(uc: ModuleType) -> None:
    """Write a file of PyTorch, one of Keras, and the weights of the steps after both."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import torch

    from uniclip.integrations.keras import ClippedOptimizer

    optimizer, weights, step = of_torch(uc)
    for number in range(STEPS):
        step(number)
    torch.save(
        {"weights": {n: w.detach() for n, w in weights.items()}, "optimizer": optimizer.state_dict()},
        DATA / "attach.pt",
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="layer")], name="model")
    model.compile(ClippedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), two_memories(uc)), "mse", jit_compile=False)
    model.set_weights([params("float32")["w"], np.zeros(2)])
    for number in range(STEPS):
        of_keras(model, number)
    model.save(DATA / "model.keras")
    after = {f"torch {STEPS + n} {k}": v for n in range(4) for k, v in step(STEPS + n).items()}
    after |= {f"keras {STEPS + n} {k}": v for n in range(4) for k, v in of_keras(model, STEPS + n).items()}
    np.savez_compressed(DATA / "after.npz", **after)


def write(uc: ModuleType) -> None:
    """Write everything."""
    rules = every_rule(uc)
    for dtype in DTYPES:
        np.savez_compressed(
            DATA / f"{dtype}.npz", **{name: together(taken(rule, dtype), dtype) for name, rule in rules.items()}
        )
    states = {dtype: {name: stopped(uc, rule, dtype) for name, rule in rules.items()} for dtype in DTYPES}
    remembered = {dtype: {name: saved for name, saved in every.items() if saved} for dtype, every in states.items()}
    (DATA / "states.json.gz").write_bytes(gzip.compress(json.dumps(remembered).encode(), mtime=0))
    write_files(uc)


if __name__ == "__main__":
    write(uniclip)
