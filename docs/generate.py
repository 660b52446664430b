# SPDX-License-Identifier: MIT
"""Write the tables and draw the pictures of the documentation that are made of what is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import figures  # noqa: E402 - needs the path above
import performance_tables  # noqa: E402 - needs the path above
import rule_figures  # noqa: E402 - needs the path above
import rule_tables  # noqa: E402 - needs the path above

from kit import contract  # noqa: E402 - needs the path above


def write(path: Path, text: str) -> None:
    """Write a file if that changes it: an unchanged one is not built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def everything() -> None:
    """Write the tables and draw the pictures that are made of what is measured."""
    write(HERE / "_generated" / "promises.md", contract.table())
    write(HERE / "_generated" / "dtypes.md", contract.dtypes())
    compared = json.loads((HERE / "compared-pages.json").read_text(encoding="utf-8"))
    for name, text in compared["parts"].items():
        write(HERE / "_generated" / f"compared-{name}.md", text)
    figures.draw(HERE / "_static" / "generated")
    rule_figures.draw(HERE / "_static" / "generated")
    for name, text in rule_tables.parts():
        write(HERE / "_generated" / f"{name}.md", text)
    measured = json.loads((HERE / "performance.json").read_text(encoding="utf-8"))
    for name, text in performance_tables.parts(measured).items():
        write(HERE / "_generated" / f"speed-{name}.md", text)


if __name__ == "__main__":
    everything()
