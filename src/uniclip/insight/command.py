# SPDX-License-Identifier: MIT
"""The command ``uniclip``: sum up a recorded run, in the terminal, as a page, or as a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from uniclip._version import version
from uniclip.insight.page import page
from uniclip.insight.plot import plot
from uniclip.insight.record import read
from uniclip.insight.summary import printable, summary

_PICTURES = ".svg", ".png", ".pdf"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the command line.

    Returns
    -------
    int
        The exit status: 0, or 2 if a file or library is missing or damaged, or a file cannot be
        written.
    """
    parser = argparse.ArgumentParser(
        "uniclip", description="See what gradient clipping did in a recorded run."
    )
    parser.add_argument("--version", action="version", version=f"uniclip {version()}")
    parser.add_argument("run", type=Path, help="a file of uniclip.insight.Recorder")
    parser.add_argument(
        "-o",
        metavar="FILE",
        type=_output,
        help="write a page (.html) or a picture (.svg, .png, .pdf)",
    )
    chosen = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    try:
        record = read(chosen.run)
        if chosen.o is not None and chosen.o.suffix == ".html":
            chosen.o.write_text(page(record), encoding="utf-8")
        elif chosen.o is not None:
            plot(record).figure.savefig(chosen.o)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{error}"
        print(f"uniclip: {printable(' '.join(text.split()))}", file=sys.stderr)  # noqa: T201 - a command prints
        return 2
    try:
        print(summary(record), flush=True)  # noqa: T201 - a command prints
    except BrokenPipeError:
        # or Python complains at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _output(text: str) -> Path:
    """Return the path of a file to write; its end says what."""
    path = Path(text)
    if path.suffix not in {".html", *_PICTURES}:
        msg = f"the name of the file must end in .html, {', '.join(_PICTURES)}, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return path
