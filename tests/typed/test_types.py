"""A type checker finds the mistakes in one file, and none in its corrected copy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MISTAKES, MENDED = HERE / "mistakes.py", HERE / "mended.py"


def test_mistakes_are_found() -> None:
    """Each mistake is found on its line, and nothing else, without a configuration of mypy."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        str(MISTAKES),
        str(MENDED),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    # 2 means that mypy itself failed.
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    found = re.findall(r"^(.+?):(\d+): error: ", run.stdout, re.MULTILINE)
    lines = MISTAKES.read_text(encoding="utf-8").splitlines()
    marked = {
        (MISTAKES.name, number) for number, line in enumerate(lines, 1) if "# mistake: " in line
    }
    assert len(marked) == 8
    assert {(Path(file).name, int(number)) for file, number in found} == marked, run.stdout


def test_mended_differs_where_the_mistakes_are() -> None:
    """The corrected copy differs only in the lines with a mistake."""
    wrong, right = (
        file.read_text(encoding="utf-8").partition("\nfrom __future__")[2]
        for file in (MISTAKES, MENDED)
    )
    for one, other in zip(wrong.splitlines(), right.splitlines(), strict=True):
        assert (one != other) == ("# mistake: " in one), one
