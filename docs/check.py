# SPDX-License-Identifier: MIT
"""Build the documentation, look at its pages, and meanwhile run its examples; exit with 1 if anything is wrong."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "_build"
SPHINX = ["-m", "sphinx", "-W", "-t", "generated"]
# -a: an index for the search is only whole where all pages are written.
PAGES = [*SPHINX, "-n", "--keep-going", "-a", "-b", "html", str(HERE), str(BUILT / "html")]
EXAMPLES = [*SPHINX, "-b", "doctest", str(HERE), str(BUILT / "doctest")]


def run(*words: str) -> int:
    """Run Python, and return how it ended."""
    return subprocess.run([sys.executable, *words], check=False).returncode


def main() -> int:
    """Return 1 if a part has failed; what the examples print comes last."""
    if run(str(HERE / "generate.py")):
        return 1
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        command = [sys.executable, *EXAMPLES]
        with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as examples:
            failed = run(*PAGES) or run(str(HERE / "check_pages.py"), str(BUILT / "html"))
        said.seek(0)
        print(said.read())
    return int(bool(failed or examples.returncode))


if __name__ == "__main__":
    sys.exit(main())
