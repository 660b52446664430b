# SPDX-License-Identifier: MIT
"""A type checker finds the mistakes that are in one file, and none in the file that has them mended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISTAKES, MENDED = HERE / "mistakes.py", HERE / "mended.py"


@pytest.fixture(scope="module")
def found() -> set[tuple[str, int]]:
    """Return the files and lines with errors, as a user without a configuration of mypy sees them."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(MISTAKES), str(MENDED)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode in {0, 1}, run.stdout + run.stderr  # 2 where mypy itself fails
    lines = re.findall(r"^(.+?):(\d+): error: ", run.stdout, re.MULTILINE)
    return {(Path(file).name, int(number)) for file, number in lines}


def marked(file: Path) -> set[tuple[str, int]]:
    """Return the lines of a file that say they are mistakes."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {(file.name, number) for number, line in enumerate(lines, 1) if "# mistake: " in line}


def test_mistakes_are_found(found: set[tuple[str, int]]) -> None:
    """Each of the eight mistakes is found on its line, and nothing else, in no file."""
    assert len(marked(MISTAKES)) == 8
    assert found == marked(MISTAKES)


def test_mended_differs_where_the_mistakes_are() -> None:
    """The other file is the same program, but for the lines with a mistake."""
    wrong, right = (file.read_text(encoding="utf-8").partition("\nfrom __future__")[2] for file in (MISTAKES, MENDED))
    for one, other in zip(wrong.splitlines(), right.splitlines(), strict=True):
        assert (one != other) == ("# mistake: " in one), one
