# SPDX-License-Identifier: MIT
"""Issue warnings that point at the user's own line, however many library calls are between."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = (str(Path(os.__file__).parent), "<frozen ")


def warn(message: str) -> None:
    """Issue a ``UserWarning``, once for each line of the user's code."""
    frame = _find_user_frame()

    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "__main__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _find_user_frame() -> FrameType:
    """Return the innermost frame of code that is not installed.

    If there is none, return the innermost frame outside uniclip.
    """
    # A fixed stack level would be wrong: a step is called from a loop, through a framework's
    # hooks, or by a trainer.
    frames = list(_walk_stack(sys._getframe(2)))  # noqa: SLF001 - as the warnings module does
    outside = [frame for frame in frames if not _is_uniclip(frame)] or frames

    for frame in outside:
        if not _is_installed(frame.f_code.co_filename):
            return frame
    return outside[0]


def _walk_stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_uniclip(frame: FrameType) -> bool:
    """Return whether a frame runs code of uniclip."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "uniclip"


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    if file.startswith(_STANDARD_LIBRARY):
        return True
    return not _PACKAGE_FOLDERS.isdisjoint(Path(file).parts)
