"""Norms are as accurate with the kernels that BLAS has for other processors."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = ("Haswell", "Nehalem", "SkylakeX")
PROGRAM = """
import json
from threadpoolctl import threadpool_info
from frameworks import KNOWN
from promises import PROMISES
checks = [promise.check for promise in PROMISES if "accuracy" in promise.case or "split" in promise.case]
for check in checks:
    check(KNOWN["numpy"]())
kernels = [lib["architecture"] for lib in threadpool_info() if lib["internal_api"] == "openblas"]
print(json.dumps([len(checks), kernels]))
"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_accuracy_on_other_processors(kernel: str) -> None:
    """The promises about accuracy hold with the kernels for old and new processors, each in a process of its own."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"OPENBLAS_CORETYPE": kernel, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    count, chosen = json.loads(done.stdout)
    assert count == 4
    if platform.machine() in {"x86_64", "AMD64"}:  # where OpenBLAS has these kernels
        assert chosen in ([], [kernel])
