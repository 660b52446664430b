# SPDX-License-Identifier: MIT
"""Build the documentation and look at its pages; exit with 1 if anything is wrong. Its examples run with the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGES = HERE / "_build" / "html"
# -a: an index for the search is only whole where all pages are written.
BUILD = ["-m", "sphinx", "-W", "-t", "generated", "-n", "--keep-going", "-a", "-b", "html", str(HERE), str(PAGES)]
STEPS = ([str(HERE / "generate.py")], BUILD, [str(HERE / "check_pages.py"), str(PAGES)])

if __name__ == "__main__":
    sys.exit(any(subprocess.run([sys.executable, *step], check=False).returncode for step in STEPS))
