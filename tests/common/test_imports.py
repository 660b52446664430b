"""What importing and using uniclip loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "tensorflow", "jax", "keras", "mlx", "dask", "array_api_strict"}

USE = """
import numpy as np, uniclip as uc
uc.clip_by_global_norm({"w": np.ones(3), "b": None}, 1.0)
uc.clip_by_value([np.ones(3)], -1, 1)
"""


@pytest.mark.parametrize("code", ["import uniclip", USE])
def test_no_framework_is_imported(code: str) -> None:
    """Neither importing uniclip nor using it on NumPy arrays imports a framework."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & FRAMEWORKS
    assert {"numpy", "uniclip"} <= loaded
