"""Make the package of an earlier commit importable as ``uniclip_old``.

Usage: ``python tests/make_old.py FOLDER``.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

COMMIT = "2b4e4216ae5837d612e72ef79e4c7d4eacc34097"
"""The commit that `test_against_old` compares with."""
LEFT_OUT = {"insight"}
SOURCE = "src/uniclip"


def make(folder: Path) -> None:
    """Write the earlier package into a folder under its other name, without its figures."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "archive", COMMIT, SOURCE]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        why = archived.stderr.decode(errors="replace").strip()
        sys.exit(
            f"commit {COMMIT} is needed, which a clone with its whole history has (git fetch "
            f"--unshallow): {why}"
        )
    shutil.rmtree(folder / "uniclip_old", ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as files:
        for member in filter(tarfile.TarInfo.isfile, files):
            path = Path(member.name).relative_to(SOURCE)
            if not LEFT_OUT & set(path.parts):
                text = files.extractfile(member).read().decode()  # type: ignore[union-attr]
                target = folder / "uniclip_old" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(
                    re.sub(r"\buniclip\b(?!-)", "uniclip_old", text), encoding="utf-8"
                )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
