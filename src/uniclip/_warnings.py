# SPDX-License-Identifier: MIT
"""Warn at the line of the user, however many calls of libraries lie between."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_PACKAGES = {"site-packages", "dist-packages"}
_STANDARD = (str(Path(os.__file__).parent), "<frozen ")


def warn(message: str) -> None:
    """Warn, once for each line of the user."""
    frame = _find_line_of_user()
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "__main__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _find_line_of_user() -> FrameType:
    """Return the innermost frame of code that is not installed; if there is none,
    of code that is not uniclip's.

    A fixed stack level would be wrong: a step is called from a loop, through the hooks of a
    framework, or by a trainer.
    """
    frames = list(_walk_stack(sys._getframe(2)))  # noqa: SLF001 - as the warnings module does
    outside = [frame for frame in frames if not _is_ours(frame)] or frames
    return next(
        (frame for frame in outside if not _is_installed(frame.f_code.co_filename)), outside[0]
    )


def _walk_stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of uniclip."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "uniclip"


def _is_installed(file: str) -> bool:
    """Return whether a file is part of Python, or of an installed package."""
    return file.startswith(_STANDARD) or not _PACKAGES.isdisjoint(Path(file).parts)
