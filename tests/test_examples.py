"""The examples run as they are written, shorter where they can be told to be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "exploding_rnn.py --steps 5 --out plot.png": ["torch"],
    "exploding_rnn.py --framework all --steps 5 --out plot.png": ["torch", "tensorflow", "jax"],
    "resume_training.py --framework torch --steps 200 --out plot.png": ["torch"],
    "torch_lstm.py": ["torch"],
    "tensorflow1_rnn.py": ["tensorflow"],
    "optax_nnx.py": ["optax"],
    "keras_digits.py --backend tensorflow --epochs 2": ["keras"],
    "lightning_digits.py": ["trainers"],
    "hugging_face_gpt2.py": ["trainers"],
}
"""The commands, and what they need; that of a pipeline runs with the tests of processes."""
CASES = [
    pytest.param(command, marks=pytest.mark.needs(*names), id=command.partition(" --out")[0])
    for command, names in NEEDS.items()
]


@pytest.mark.parametrize("command", CASES)
def test_examples(command: str, tmp_path: Path) -> None:
    """It ends without an error, and draws what it says."""
    name, *options = command.split()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert ("--out" not in options) or (tmp_path / "plot.png").stat().st_size > 0
