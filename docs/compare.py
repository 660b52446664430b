# SPDX-License-Identifier: MIT
"""Run other libraries' functions beside uniclip on all frameworks, and write what the pages show of it.

It takes some minutes; the pages are built from ``compared-pages.json``, and need no framework.

    python docs/compare.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "benchmarks")]

import calls  # noqa: E402 - needs the path above
import compared  # noqa: E402 - needs the path above

LARGE_AND_SMALL = [(float(x), [[0.6 * x, 0.8 * x]]) for x in np.logspace(-36, 38, 75)]
MANY = [(n, [[1.0]] * n) for n in (1, *range(20, 801, 20))]


def norms() -> dict[str, Any]:
    """Return the norms that libraries report, of large and small gradients and of many tensors."""
    native = [library for library in calls.LIBRARIES if "global norm" in library.calls]
    libraries = {f"uniclip, on {native[0].name}": calls.uniclip_on(native[0])}
    libraries |= {library.name: library for library in native}
    return {
        name: {
            "float32": reported(library, "float32", LARGE_AND_SMALL),
            "bfloat16": reported(library, "bfloat16", MANY),
        }
        for name, library in libraries.items()
    }


def reported(library: calls.Library, dtype: str, grads: list[Any]) -> list[list[float]]:
    """Return what gradients are drawn at, and the norms that a library reports of them."""
    arrays = [[library.framework.array(leaf, dtype) for leaf in leaves] for _, leaves in grads]
    found = [library.call("global norm", leaves, 1.0) for leaves in arrays]
    return [[x for x, _ in grads], [float(library.numpy(norm)) for norm in found]]


if __name__ == "__main__":
    pages = {"parts": compared.parts(), "norms": norms()}
    text = json.dumps(pages, indent=1, ensure_ascii=False) + "\n"
    (HERE / "compared-pages.json").write_text(text, encoding="utf-8")
