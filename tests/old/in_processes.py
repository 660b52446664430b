"""Checks that need processes of their own: a file of tests is their script too, and each process writes what failed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).parent
LIMIT = 400
"""Seconds that all processes have together."""


def failure(title: str, run: Callable[[], Any]) -> dict[str, str]:
    """Return what goes wrong in a check, by its title; pytest's own failures are no Exceptions."""
    try:
        run()
    except BaseException:  # noqa: BLE001 - the test shows it
        return {title: traceback.format_exc()}
    return {}


def write_failures(checks: Mapping[str, Callable[[], Any]], file: str) -> None:
    """Run checks, and write what goes wrong in each of them for the tests to read."""
    failures: dict[str, str] = {}
    for title, run in checks.items():
        failures |= failure(title, run)
    Path(file).write_text(json.dumps(failures))


def run_in_group(checks: Mapping[str, Callable[[], Any]], number: str, count: int, file: str) -> None:
    """Run checks in one of the processes of a group of PyTorch's, and write what goes wrong in each of them."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{Path(file).parent}/init{count}",
        rank=int(number),
        world_size=count,
        timeout=timedelta(seconds=20),
    )
    gc.freeze()  # `attach` looks for an optimizer around its own among all objects: those of imports are left out
    write_failures(checks, file)
    distributed.destroy_process_group()


def failures_in(
    factory: pytest.TempPathFactory,
    script: str,
    calls: Sequence[Sequence[str]],
    environ: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """Run a script once for each call, all at the same time; return what went wrong in each, by check.

    The last argument of a script is the file to write that to. Of several workers one runs the processes, and the
    others wait for what it finds.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = factory.getbasetemp().parent / f"{Path(script).stem}-{run}"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + LIMIT + 60
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.1)
    else:
        try:
            _run(folder, script, calls, os.environ | dict(environ or {}))
        finally:
            done.touch()
    codes, outputs = json.loads((folder / "outputs").read_text())
    assert not any(codes), "\n".join(outputs)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(calls))]


def _run(folder: Path, script: str, calls: Sequence[Sequence[str]], environ: Mapping[str, str]) -> None:
    paths = os.pathsep.join(filter(None, [str(TESTS), environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, script, *call, str(folder / f"{number}.json")],
            env={**environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, call in enumerate(calls)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    (folder / "outputs").write_text(json.dumps([[process.returncode for process in processes], outputs]))
