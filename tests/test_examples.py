"""The examples run as they are, with fewer steps where they have such an option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "exploding_rnn.py --steps 5 --out plot.png": ["torch"],
    "exploding_rnn.py --framework all --steps 5 --out plot.png": ["torch", "tensorflow", "jax"],
    "resume_training.py --framework torch --steps 100 --out plot.png": ["torch"],
    "torch_lstm.py": ["torch"],
    "tensorflow1_rnn.py": ["tensorflow"],
    "optax_nnx.py": ["optax"],
    "keras_digits.py --backend tensorflow --epochs 2": ["keras"],
    "lightning_digits.py": ["trainers"],
    "hugging_face_gpt2.py": ["trainers"],
}
"""The commands, with the frameworks they need. test_processes.py runs the example of a pipeline."""
CASES = [
    pytest.param(command, marks=pytest.mark.needs(*names), id=command.partition(" --out")[0])
    for command, names in NEEDS.items()
]


@pytest.mark.parametrize("command", CASES)
def test_examples(command: str, tmp_path: Path) -> None:
    """An example ends without an error, and writes the figure that it announces."""
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
