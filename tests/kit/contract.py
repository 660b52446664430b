"""What uniclip promises, once: the tests run each check, and the docs print the table."""

from __future__ import annotations

from kit.contract_programs import Below
from kit.promise import Program, Promise

__all__ = ["PROMISES", "Program", "Promise"]

PROMISES = [
    Promise(
        "norm ≤ limit",
        "the gradients come back bit for bit; in eager NumPy, PyTorch, TensorFlow and JAX on the CPU as the same "
        "arrays",
        (Below(),),
    ),
]
