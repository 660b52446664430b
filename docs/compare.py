# SPDX-License-Identifier: MIT
"""Run other libraries' functions next to uniclip on all frameworks, and write results for pages.

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

GRADS = {
    "float32": [(float(x), [[0.6 * x, 0.8 * x]]) for x in np.logspace(-36, 38, 75)],
    "bfloat16": [(n, [[1.0]] * n) for n in (1, *range(20, 801, 20))],
}
"""Large and small gradients, and many tensors, with their positions in the figure."""


def norms() -> dict[str, Any]:
    """Return the norms that libraries report for `GRADS`."""
    native = [library for library in calls.LIBRARIES if "global norm" in library.calls]
    libraries = [calls.uniclip_on(native[0]), *native]
    names = [f"uniclip, on {native[0].name}", *(library.name for library in native)]
    return {
        name: {dtype: reported(library, dtype) for dtype in GRADS}
        for name, library in zip(names, libraries, strict=True)
    }


def reported(library: calls.Library, dtype: str) -> list[list[float]]:
    """Return the positions of gradients in the figure, and the norms that a library reports."""
    places, grads = zip(*GRADS[dtype], strict=True)
    arrays = ([library.framework.array(leaf, dtype) for leaf in leaves] for leaves in grads)
    return [
        list(places),
        [float(library.numpy(library.call("global norm", leaves, 1.0))) for leaves in arrays],
    ]


if __name__ == "__main__":
    text = json.dumps({"parts": compared.parts(), "norms": norms()}, indent=1, ensure_ascii=False)
    (HERE / "compared-pages.json").write_text(f"{text}\n", encoding="utf-8")
