# SPDX-License-Identifier: MIT
"""The leaves of a rule's state in Keras' files, which hold only arrays of numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from uniclip._errors import short
from uniclip.labels import Leaves, labels_of

SAVED = "uniclip"
"""The key in a file, beside the numbered variables of the optimizer."""
ANEW = (
    "start over by loading the model without its optimizer, keras.saving.load_model(path, compile=False), and "
    "compiling it again"
)


def to_bytes(known: dict[str, Any]) -> Any:
    """Encode plain data as an array of bytes."""
    return np.frombuffer(json.dumps(known).encode(), np.uint8)


def known_of(store: Any, rule: Any) -> dict[str, Any]:
    """Return what a file stores about the state of a rule."""
    if SAVED not in store.keys():  # noqa: SIM118 - a store is no dict
        msg = f"the file does not say whose norms it holds of {short(rule)}, as old files do not: {ANEW}"
        raise ValueError(msg)
    known: dict[str, Any] = json.loads(np.asarray(store[SAVED], np.uint8).tobytes().decode())
    return known


def renumbered(saved: Leaves | None, here: Leaves) -> Leaves | None:
    """Return the saved leaves with the names here, if these differ only in what Keras chose.

    Keras numbers unnamed layers, so that a model built twice has other paths: ``dense`` and ``dense_1`` become
    ``dense_2`` and ``dense_3``. In a loaded model paths also lack the first parts.
    """
    if saved is None:
        return None
    both = [labels_of(saved), labels_of(here)]
    if len(both[0]) != len(both[1]) or [one is None for one in saved] != [one is None for one in here]:
        return saved
    pairs = [(_parts(one), _parts(other)) for one, other in zip(*both, strict=True)]
    ends = [(one[-len(other) :], other[-len(one) :]) for one, other in pairs]
    if _counted_from_0([one for one, _ in ends]) != _counted_from_0([one for _, one in ends]):
        return saved
    names = iter(both[1])
    return [part and [next(names) for _ in part] for part in saved]


def _counted_from_0(paths: list[list[str]]) -> list[list[tuple[str, int]]]:
    """Return the names and numbers of paths, with the numbers of each name counted from the smallest one."""
    numbered = [list(map(_numbered, path)) for path in paths]
    least: dict[str, int] = {}
    for name, number in (part for path in numbered for part in path):
        least[name] = min(number, least.get(name, number))
    return [[(name, number - least[name]) for name, number in path] for path in numbered]


def _parts(label: str) -> list[str]:
    """Return the parts of a path, without suffixes that distinguish equal names."""
    return re.sub(r"#\d+", "", label).strip("[]'\"").split("/")


def _numbered(part: str) -> tuple[str, int]:
    """Return a name without the number at its end, and the number."""
    name, _, number = part.rpartition("_")
    return (name, int(number)) if number.isdecimal() else (part, 0)
