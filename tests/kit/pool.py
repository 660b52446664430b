"""A pool of processes that run checks together: started once, and again after a hang or a crash.

The test process sends tasks to a process that has imported PyTorch, and which forks the workers.
Each worker sends back a traceback or ``None``. A check is a function of a module imported there,
which every process calls.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

RANKS = 4
WAIT = 20
"""Seconds that a process waits for another one in a collective operation."""
LIMIT = 3 * WAIT
"""Seconds that a check may take; then all workers are killed."""
CHECKS = "kit.joined"
"""The module that defines or imports the checks."""


def launched(*command: str, **environ: str) -> list[str]:
    """Return the outputs of two processes started as by a launcher; fail unless both succeed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        **environ,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    some = [
        subprocess.Popen([sys.executable, *command], env=common | {"RANK": rank}, **pipes)
        for rank in "01"
    ]
    try:
        outputs = [one.communicate(timeout=240) for one in some]
    finally:
        for one in some:
            one.kill()
            one.wait()
    assert [one.returncode for one in some] == [0, 0], outputs
    return [output for output, _ in outputs]


class Pool:
    """The test process's end of the pool."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,))
        self._process.start()
        there.close()

    def run(self, check: str, ranks: int = RANKS, **args: Any) -> None:
        """Run a check in some processes; fail with the errors of each."""
        self._pipe.send((check, args, ranks))
        texts = [f"process {rank}: {text}" for rank, text in enumerate(self._pipe.recv()) if text]
        assert not texts, "\n".join([f"{check}({args}) in {ranks} processes", *texts])

    def close(self) -> None:
        """End the processes."""
        self._pipe.close()
        self._process.join()


def error_of(pipe: Any) -> str | None:
    """Return the error of a process."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "has crashed"


class Workers:
    """The worker processes and their pipes."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0

    def start(self) -> None:
        """Start the workers unless they run."""
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

    def run(self, check: str, args: dict[str, Any], ranks: int) -> list[str | None]:
        """Return the error of each process of a check."""
        self.start()
        self._groups += 1
        pipes, end = self._pipes[:ranks], time.monotonic() + LIMIT
        for pipe in pipes:
            pipe.send((check, args, ranks, os.path.join(self._folder.name, str(self._groups))))  # noqa: PTH118
        found: dict[Any, str | None] = {}
        while len(found) < len(pipes):
            ready = wait(
                [pipe for pipe in pipes if pipe not in found], max(0.0, end - time.monotonic())
            )
            if not ready:
                found |= dict.fromkeys(
                    [pipe for pipe in pipes if pipe not in found], f"hangs for {LIMIT} seconds"
                )
            found |= {pipe: error_of(pipe) for pipe in ready}
        if any(found.values()):
            self.stop()
        return [found[pipe] for pipe in pipes]

    def stop(self) -> None:
        """Kill the workers; the next check starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()


@contextmanager
def group(rank: int, ranks: int, store: str) -> Any:
    """Join a process group for the duration of a check."""
    from torch import distributed

    limit = timedelta(seconds=WAIT)
    # The groups of meshes take this default.
    distributed.distributed_c10d.default_pg_timeout = limit
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=limit,
    )
    yield
    distributed.destroy_process_group()


def work(rank: int, pipe: Connection) -> None:
    """Run checks as one of the workers."""
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(CHECKS)
    while True:
        check, args, ranks, store = pipe.recv()
        error = None
        try:
            with group(rank, ranks, store):
                getattr(module, check)(**args)
        except BaseException:  # noqa: BLE001 - the test shows it
            error = traceback.format_exc()
        pipe.send(error)


def serve(pipe: Connection) -> None:
    """Fork workers, and forward checks and results until the pipe is closed."""
    importlib.import_module(CHECKS)
    gc.freeze()
    workers = Workers()
    try:
        while True:
            pipe.send(workers.run(*pipe.recv()))
    except EOFError:
        workers.stop()
