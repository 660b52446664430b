"""Keras has one backend for each process: ``--keras-backend NAME`` says which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BACKENDS = ("tensorflow", "jax", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--keras-backend", choices=BACKENDS, help="what Keras runs on")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the backend before Keras is imported."""
    name = config.getoption("--keras-backend")
    if name is None:
        message = f"tests/on_keras need --keras-backend and one of {', '.join(BACKENDS)}"
        raise pytest.UsageError(message)
    os.environ["KERAS_BACKEND"] = name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the replicas of TensorFlow to the runs on it."""
    others = config.getoption("--keras-backend") != "tensorflow"
    return True if others and collection_path.name == "test_replicas.py" else None
