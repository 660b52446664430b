# SPDX-License-Identifier: MIT
"""Clipping inside what people train with; each module imports its own library, and nothing here imports any."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Say what to install where the imports inside fail."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this part of uniclip needs {library}: pip install {install} ({error})"
        raise ModuleNotFoundError(msg, name=error.name) from error
