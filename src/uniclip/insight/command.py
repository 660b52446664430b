# SPDX-License-Identifier: MIT
"""The command ``uniclip``: report on a recorded run, in the terminal or as a page."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from uniclip._checks import positive, whole
from uniclip._version import version
from uniclip.insight import tables
from uniclip.insight.advice import suggest
from uniclip.insight.page import PREDICTED, refuse_records, written
from uniclip.insight.panels import printable
from uniclip.insight.reading import read
from uniclip.insight.record import Record
from uniclip.insight.spikes import FEWEST, WINDOW, Spike, Z, spikes

_PROBLEM = 2
"""The exit status for an unreadable or unwritable file or a missing library, as for wrong arguments."""
_MOST = 20
"""The number of spikes in a report in the terminal."""
_LARGE = 5_000_000
"""The file size in bytes from which reading takes about a second."""
_FILE = "a file of uniclip.insight.Recorder, a trainer_state.json of Hugging Face, or a metrics.csv of Lightning"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the command line.

    Returns
    -------
    int
        The exit status: 0, or 2 if a file or library is missing or damaged, or a file cannot be written.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.run is None:
        parser.print_help()
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    try:
        print(chosen.run(chosen), flush=True)  # noqa: T201 - a command prints
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else f"{error}")
    except (ModuleNotFoundError, _RefusedError) as error:
        return _complain(f"{error}")
    return 0


class _RefusedError(Exception):
    """A file that is not a record, or one that a page would overwrite."""


def _complain(problem: str) -> int:
    """Print an error in one line."""
    print(f"uniclip: {printable(' '.join(problem.split()))}", file=sys.stderr)  # noqa: T201 - a command prints
    return _PROBLEM


def _parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser("uniclip", description="See what gradient clipping did in a recorded run.")
    parser.add_argument("--version", action="version", version=f"uniclip {version()}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="{report,suggest,spikes}")
    report = _add(commands, "report", _report, "the run, advice, other limits and spikes", "run.jsonl -o run.html")
    report.add_argument("-o", metavar="PAGE", dest="page", type=Path, help="write a page of HTML with pictures, too")
    _add(commands, "suggest", _suggest, "three limits to try, and why", "run.jsonl")
    found = _add(commands, "spikes", _spikes, "the steps with spikes of the norm", "run.jsonl -z 4")
    found.add_argument("-z", type=_z, default=Z, help="how many deviations above the median (default: %(default)s)")
    window = "how many earlier norms a norm is compared with (default: %(default)s)"
    found.add_argument("--window", type=_window, default=WINDOW, help=window)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], str],
    about: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add a command that reads one file, with an example in its help."""
    text = f"Print {about}."
    parser = commands.add_parser(name, help=about, description=text, epilog=f"example: uniclip {name} {example}")
    parser.add_argument("file", type=Path, help=_FILE)
    parser.set_defaults(run=run)
    return parser


def _z(text: str) -> float:
    """Parse the number of deviations."""
    try:
        return float(positive("z", float(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _window(text: str) -> int:
    """Parse the size of the window."""
    try:
        return int(whole("window", int(text), FEWEST))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _report(chosen: argparse.Namespace) -> str:
    """Return the whole report on a run; write its page if asked."""
    if chosen.page is not None:
        _refuse_page(chosen.page, chosen.file)
    with _stages(chosen.file, 3 if chosen.page is None else 4) as begin:
        begin("read")
        record = _record(chosen.file)
        begin("suggest")
        advice = suggest(record)
        begin("spikes")
        found = spikes(record)
        if chosen.page is not None:
            begin("draw")
            chosen.page.write_text(written(record, advice, found), encoding="utf-8")
    forecast = textwrap.fill(PREDICTED, _width())
    parts = [
        _headed("The run", _table(tables.summary(record))),
        _headed("Advice", f"{advice}", forecast),
        _headed("Spikes", _listed(found, _MOST)),
    ]
    if chosen.page is not None:
        parts.append(f"The page is in {chosen.page}.")
    return "\n\n".join(parts)


def _refuse_page(page: Path, file: Path) -> None:
    """Refuse to write a page over the file that is read, or over another record."""
    if page.exists() and file.exists() and page.samefile(file):
        msg = f"{page} is the file that is read: give another path for the page"
        raise _RefusedError(msg)
    try:
        refuse_records(page)
    except ValueError as error:
        raise _RefusedError(error) from error


def _suggest(chosen: argparse.Namespace) -> str:
    """Return the advice."""
    with _stages(chosen.file, 2) as begin:
        begin("read")
        record = _record(chosen.file)
        begin("suggest")
        return f"{suggest(record)}"


def _spikes(chosen: argparse.Namespace) -> str:
    """Return all spikes."""
    with _stages(chosen.file, 2) as begin:
        begin("read")
        record = _record(chosen.file)
        begin("spikes")
        return _listed(spikes(record, chosen.z, chosen.window))


def _record(path: Path) -> Record:
    """Read a file."""
    try:
        return read(path)
    except ValueError as error:
        raise _RefusedError(error) from error


@contextmanager
def _stages(path: Path, count: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each stage, which shows it in a terminal if all takes more than a second."""
    try:
        from tqdm import tqdm  # noqa: PLC0415 - not everybody has it
    except ModuleNotFoundError:
        yield lambda _: None
        return
    delay = 0 if path.is_file() and path.stat().st_size > _LARGE else 1
    look = {"bar_format": "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}", "leave": False, "miniters": 0}
    with tqdm(total=count, disable=None, delay=delay, file=sys.stderr, mininterval=0, **look) as bar:

        def begin(stage: str) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update()

        yield begin


def _headed(title: str, *parts: str) -> str:
    """Return a part of the report with its title."""
    return "\n".join([title, "-" * len(title), *parts])


def _listed(found: Sequence[Spike], most: int | None = None) -> str:
    """Return spikes as a table, and their number."""
    if not found:
        return "No spikes."
    rest = f", the {most} largest of them" if most is not None and len(found) > most else ""
    return f"{_table(tables.of_spikes(found, most))}\n{len(found):,} in all{rest}."


def _table(table: tables.Table) -> str:
    return tables.as_text(table, _width())


def _width() -> int:
    """Return the width of the terminal in characters."""
    return shutil.get_terminal_size().columns
