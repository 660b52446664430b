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
    config.addinivalue_line("markers", "any_backend: what no backend changes, which runs on TensorFlow alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the replicas of TensorFlow to the runs on it."""
    others = config.getoption("--keras-backend") != "tensorflow"
    return True if others and collection_path.name == "test_replicas.py" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what no backend changes to the runs on TensorFlow."""
    if config.getoption("--keras-backend") == "tensorflow":
        return
    left = [item for item in items if item.get_closest_marker("any_backend")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("any_backend")]
