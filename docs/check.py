# SPDX-License-Identifier: MIT
"""Build the documentation and check its pages; exit with 1 if anything is wrong.

Its examples run with the tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import check_pages

HERE = Path(__file__).parent
PAGES = HERE / "_build" / "html"
# -a: the index of the search is complete only if all pages are written.
BUILD = [
    sys.executable,
    "-m",
    "sphinx",
    "-W",
    "-n",
    "--keep-going",
    "-a",
    "-b",
    "html",
    str(HERE),
    str(PAGES),
]

if __name__ == "__main__":
    sys.exit(subprocess.run(BUILD, check=False).returncode or check_pages.main(PAGES))
