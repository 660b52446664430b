# SPDX-License-Identifier: MIT
"""The command ``uniclip``: summarize a recorded run in the terminal, as a page, or as a figure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from uniclip._version import version
from uniclip.insight.page import page
from uniclip.insight.plot import save_plot
from uniclip.insight.record import Record, read
from uniclip.insight.summary import printable, summary

_SUFFIXES = {".html", ".svg", ".png", ".pdf"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default, those of the command line.

    Returns
    -------
    int
        The exit status: 0, or 2 if a file, a library, or all requested steps are missing, a file is
        damaged, or a file cannot be written.
    """
    options = _parse(arguments)
    # The terminal may lack a character of a name.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")

    try:
        record = read(options.run)
        if options.steps is not None:
            record = record.between(*options.steps)
        if options.o is not None:
            _write(record, options.o)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        message = printable(" ".join(_describe(error).split()))
        print(f"uniclip: {message}", file=sys.stderr)  # noqa: T201 - a command prints
        return 2

    try:
        print(summary(record), flush=True)  # noqa: T201 - a command prints
    except BrokenPipeError:
        # Python would flush again at exit, and complain.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        "uniclip", description="Summarize what gradient clipping did in a recorded training run."
    )
    parser.add_argument("--version", action="version", version=f"uniclip {version()}")
    parser.add_argument(
        "run", type=Path, help="a recorded run: a file written by uniclip.insight.Recorder"
    )
    parser.add_argument(
        "--steps",
        metavar="FIRST:LAST",
        type=_two_steps,
        help="only the steps with these numbers, such as 800:830",
    )
    parser.add_argument(
        "-o",
        metavar="FILE",
        type=_output_path,
        help="also write a page (.html) or a figure (.svg, .png, .pdf) to this file",
    )
    return parser.parse_args(arguments)


def _two_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of a part of the run."""
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        msg = f"expected the first and the last step, such as 800:830, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
    return first, last


def _output_path(text: str) -> Path:
    """Return the path of a file to write, whose suffix is its format."""
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        msg = f"expected a file name that ends in .html, .svg, .png, or .pdf, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return path


def _write(record: Record, path: Path) -> None:
    """Write a page or a figure of a run."""
    if path.suffix == ".html":
        path.write_text(page(record), encoding="utf-8")
    else:
        save_plot(record, path)


def _describe(error: Exception) -> str:
    """Return the message of an error, for an operating system error with its file."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
