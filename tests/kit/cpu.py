"""A pytest plugin that measures the CPU seconds of each file, and enforces a budget for the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

FACTOR = 1.5
"""Tolerated excess over the budget: a busy machine takes more CPU time, too."""
START = pytest.StashKey[float]()
SPENT: Counter[str] = Counter()
"""CPU seconds of each file, in the process that prints them."""


def seconds() -> float:
    """Return the CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the budget."""
    parser.addoption(
        "--cpu-minutes", type=float, help=f"fail if the run takes more than {FACTOR} times as many"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Store the CPU time at the start of a test."""
    item.stash[START] = seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Store the CPU seconds of a test in its last report, which is sent to the printing process."""
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("cpu", seconds() - item.stash.get(START, seconds())))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the CPU seconds of a test to those of its file."""
    for name, value in report.user_properties:
        if name == "cpu" and report.when == "teardown":
            SPENT[report.nodeid.partition("::")[0]] += value


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if it exceeds the budget.

    The workers have ended by now, so their time counts.
    """
    budget = session.config.getoption("--cpu-minutes")
    if budget and not hasattr(session.config, "workerinput") and seconds() > 60 * FACTOR * budget:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the files, most expensive first."""
    budget = config.getoption("--cpu-minutes")
    if not budget:
        return
    terminalreporter.section("CPU seconds")
    for name, value in SPENT.most_common():
        terminalreporter.write_line(f"{value:7.1f}  {name}")
    total = seconds()
    over = (
        f": more than {FACTOR} times the budget of {budget:g} minutes"
        if total > 60 * FACTOR * budget
        else ""
    )
    terminalreporter.write_line(
        f"{total:7.1f}  in all, or {total / 60:.1f} minutes{over}", red=bool(over)
    )
