"""Record the results of every rule, to compare later versions with.

``python tests/record.py`` writes tests/data. ``python tests/record.py files`` writes the files that
each library saves into tests/data/files; `adapters.contract` loads them.

Each was run once. Run it again only where results are meant to change, and mention the change in
the change log.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
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
"""The step after which the state is saved; another clipper resumes from it."""
NOT_NEEDED = (
    "training_args.bin",
    "rng_state.pth",
    "random_states_0.pkl",
    "model.meta",
    "checkpoint",
)
"""Files that a training does not need, and which contain paths or other clutter."""
LARGE = 1000
"""The size of a state that is too large to record at each step: the histogram of all norms."""
Arrays = dict[str, np.ndarray]


def flat(tree: Any) -> np.ndarray:
    """Return all elements of a tree of arrays as one row; ``None`` has none."""
    parts = [np.asarray(leaf).reshape(-1) for leaf in optree.tree_leaves(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)


def row(clipped: Any, report: Any, saved: dict[str, Any]) -> Arrays:
    """Return the record of one step."""
    fields = {
        name: flat(getattr(report, name)) for name in ("norms", "limits", "factors", "thresholds")
    }
    fields |= {name: flat(getattr(report, name)) for name in FLAGS}
    fields |= {f"state {name}": np.asarray(value) for name, value in saved.get("state", {}).items()}
    return {
        "gradients": flat(clipped),
        **{name: value for name, value in fields.items() if 0 < value.size < LARGE},
    }


def taken(rule: Any, dtype: str) -> list[Arrays]:
    """Return the records of the twelve steps of a rule."""
    weights, rows = params(dtype), []
    state = rule.init(weights)
    for grads, loss in zip(steps(dtype), LOSSES, strict=True):
        clipped, state, report = rule.update(grads, state, params=weights, loss=loss)
        rows.append(row(clipped, report, to_dict(rule, state, grads)))
    return rows


def together(rows: list[Arrays], dtype: str) -> np.ndarray:
    """Return the rows of all steps as one structured array.

    Gradients are 0 at steps where they are not recorded.
    """
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


def write_files(uc: ModuleType) -> None:
    """Write the files of each library that has an integration."""
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"}
    from adapters import (
        contract,
        test_accelerate,
        test_keras,
        test_lightning,
        test_optax,
        test_tensorflow1,
        test_torch,
        test_transformers,
    )

    trained = test_transformers.Trained
    trained.folder = contract.FILES / trained.recorded / "trainer"
    for make in (
        test_torch.Attached,
        test_accelerate.Accelerated,
        test_lightning.Fitting,
        trained,
        test_keras.Stepping,
        test_optax.Optax,
        test_tensorflow1.InSession,
    ):
        contract.write_files(make, uc)
    trained.end_all()
    for name in NOT_NEEDED:
        for file in contract.FILES.rglob(name):
            file.unlink()


def write(uc: ModuleType) -> None:
    """Write all recordings."""
    rules = every_rule(uc)
    for dtype in DTYPES:
        np.savez_compressed(
            DATA / f"{dtype}.npz",
            **{name: together(taken(rule, dtype), dtype) for name, rule in rules.items()},
        )
    states = {
        dtype: {name: stopped(uc, rule, dtype) for name, rule in rules.items()} for dtype in DTYPES
    }
    remembered = {
        dtype: {name: saved for name, saved in every.items() if saved}
        for dtype, every in states.items()
    }
    (DATA / "states.json.gz").write_bytes(gzip.compress(json.dumps(remembered).encode(), mtime=0))
    write_files(uc)


if __name__ == "__main__":
    (write_files if "files" in sys.argv else write)(uniclip)
