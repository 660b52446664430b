# SPDX-License-Identifier: MIT
"""Write the generated tables and figures of the documentation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "tests"), str(HERE.parent / "benchmarks")]

import choosing_table  # noqa: E402 - needs the path above
import clip_shares  # noqa: E402 - needs the path above
import figures  # noqa: E402 - needs the path above
import house  # noqa: E402 - needs the path above
import performance_tables  # noqa: E402 - needs the path above
import rule_figures  # noqa: E402 - needs the path above
import rule_tables  # noqa: E402 - needs the path above

from kit import contract  # noqa: E402 - needs the path above

DATA = (
    "compared-pages",
    "choosing",
    "speed-step",
    "speed-rules",
    "speed-processes",
    "speed-engines",
    "speed-growth",
    "speed-gpu",
    "launches",
)
"""The files with results that the pages show."""


def everything() -> None:
    """Write all generated tables and figures."""
    pictures, tables = HERE / "_static" / "generated", HERE / "_generated"
    results = {name: json.loads((HERE / f"{name}.json").read_bytes()) for name in DATA}
    compared, choosing = results["compared-pages"], results["choosing"]
    texts = {"promises": contract.table(), "dtypes": contract.dtypes()} | rule_tables.parts()
    texts |= clip_shares.parts() | choosing_table.parts(choosing)
    texts |= {f"compared-{name}": text for name, text in compared["parts"].items()}
    texts |= {f"speed-{name}": text for name, text in performance_tables.parts(results).items()}
    for folder in (pictures, tables):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (tables / f"{name}.md").write_text(text, encoding="utf-8")
    figures.draw(pictures)
    rule_figures.draw(pictures)
    house.refuse_old()


if __name__ == "__main__":
    everything()
