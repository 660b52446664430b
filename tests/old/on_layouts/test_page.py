"""The page on many processes, and the example: what is shown there is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from on_layouts.cases import table

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "use-it-on-many-processes.md"
SECONDS = 240


def run(script: Path, *processes: str) -> str:
    """Return what a script prints."""
    command = [sys.executable, *(["-m", "torch.distributed.run", "--standalone", *processes] if processes else [])]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_the_table_of_the_tests() -> None:
    """What is tried is what the page says."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    """Its first example, on two processes."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("".join(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    assert run(script, "--nproc-per-node", "2") == "".join(text for kind, text in blocks if kind == "text")


def test_the_example_has_the_losses_of_one_process() -> None:
    """It compares by itself."""
    printed = run(ROOT / "examples" / "pipeline_fsdp2.py")
    assert "as in one process" in printed
    assert "NOT" not in printed
    assert "last loss" in printed
