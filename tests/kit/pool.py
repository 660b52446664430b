"""Processes that run checks together: started once, and again where one hangs or crashes.

The tests' process sends a line of JSON to one that has imported PyTorch, which forks the workers; each worker answers
with a traceback or ``None``. A check is a function of a module that is imported there, called in every process.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RANKS = 4
WAIT = 20
"""For how many seconds a process waits for another one in a collective operation."""
LIMIT = 3 * WAIT
"""For how many seconds a check may take; then all workers are killed."""
CHECKS = "kit.joined"
"""The module that has the checks, or imports them."""


class Pool:
    """The side of the tests."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder / "stderr"
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kit.pool"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, check: str, ranks: int = RANKS, **args: Any) -> None:
        """Run a check in so many processes; fail with what went wrong in each of them."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(json.dumps({"check": check, "args": args, "ranks": ranks}) + "\n")
        to.flush()
        line = back.readline()
        assert line, f"{check}: the processes have ended\n{self._errors.read_text()[-4000:]}"
        texts = [f"process {rank}: {text}" for rank, text in enumerate(json.loads(line)) if text]
        assert not texts, "\n".join([f"{check}({args}) in {ranks} processes", *texts])

    def close(self) -> None:
        """End the processes."""
        self._process.communicate()


def answer(pipe: Any) -> str | None:
    """Return what went wrong in a process."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "has crashed"


class Workers:
    """The workers, each at its end of a pipe."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0

    def start(self) -> None:
        """Start the workers, if there are none."""
        if not self._processes:
            way = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
            context = multiprocessing.get_context(way)
            for rank in range(RANKS):
                here, there = context.Pipe()
                process = context.Process(target=work, args=(rank, there), daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)

    def run(self, task: dict[str, Any]) -> list[str | None]:
        """Return what went wrong in each process of a check."""
        self.start()
        self._groups += 1
        task["store"] = os.path.join(self._folder.name, str(self._groups))  # noqa: PTH118 - a text for JSON
        pipes, end = self._pipes[: task["ranks"]], time.monotonic() + LIMIT
        for pipe in pipes:
            pipe.send(task)
        found: dict[Any, str | None] = {}
        while len(found) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in found], max(0.0, end - time.monotonic()))
            if not ready:
                found |= dict.fromkeys([pipe for pipe in pipes if pipe not in found], f"hangs for {LIMIT} seconds")
            found |= {pipe: answer(pipe) for pipe in ready}
        if any(found.values()):
            self.stop()
        return [found[pipe] for pipe in pipes]

    def stop(self) -> None:
        """Kill the workers; the next check has new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()


@contextmanager
def group(rank: int, ranks: int, store: str) -> Any:
    """Be one of a group of processes."""
    from torch import distributed

    limit = timedelta(seconds=WAIT)
    distributed.distributed_c10d.default_pg_timeout = limit  # that of the groups of meshes
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit
    )
    yield
    distributed.destroy_process_group()


def work(rank: int, pipe: Connection) -> None:
    """Run checks as one of the workers."""
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(CHECKS)
    while True:
        task = pipe.recv()
        check: Callable[..., Any] = getattr(module, task["check"])
        error = None
        try:
            with group(rank, task["ranks"], task["store"]):
                check(**task["args"])
        except BaseException:  # noqa: BLE001 - the test shows it
            error = traceback.format_exc()
        pipe.send(error)


def main() -> None:
    """Fork workers, and pass on checks and answers, until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what checks print is no answer
    importlib.import_module(CHECKS)
    gc.freeze()
    workers = Workers()
    for line in sys.stdin:
        print(json.dumps(workers.run(json.loads(line))), file=answers, flush=True)
    workers.stop()


if __name__ == "__main__":
    main()
