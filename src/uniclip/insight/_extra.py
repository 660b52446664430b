# SPDX-License-Identifier: MIT
"""What the extra ``insight`` installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Say what to install if an import inside fails.

    Raises
    ------
    ModuleNotFoundError
        If a module is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f'{what}: pip install "uniclip-gradients[insight]" ({error})'
        raise ModuleNotFoundError(msg, name=error.name) from error
