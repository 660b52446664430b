"""Processes that run checks together: started once, and again where one hangs or crashes.

The tests' process passes tasks to one that has imported PyTorch, which forks the workers; each
worker answers with a traceback or ``None``. A check is a function of a module that is imported
there, called in every process.
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
"""For how many seconds a process waits for another one in a collective operation."""
LIMIT = 3 * WAIT
"""For how many seconds a check may take; then all workers are killed."""
CHECKS = "kit.joined"
"""The module that has the checks, or imports them."""


def launched(*command: str, **environ: str) -> list[str]:
    """Return what two processes print that know of each other, as from a launcher,
    and end as they should.
    """
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
    """The side of the tests."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,))
        self._process.start()
        there.close()

    def run(self, check: str, ranks: int = RANKS, **args: Any) -> None:
        """Run a check in so many processes; fail with what went wrong in each of them."""
        self._pipe.send((check, args, ranks))
        texts = [f"process {rank}: {text}" for rank, text in enumerate(self._pipe.recv()) if text]
        assert not texts, "\n".join([f"{check}({args}) in {ranks} processes", *texts])

    def close(self) -> None:
        """End the processes."""
        self._pipe.close()
        self._process.join()


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

    def run(self, check: str, args: dict[str, Any], ranks: int) -> list[str | None]:
        """Return what went wrong in each process of a check."""
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
    """Fork workers, and pass on checks and answers, until there are no more."""
    importlib.import_module(CHECKS)
    gc.freeze()
    workers = Workers()
    try:
        while True:
            pipe.send(workers.run(*pipe.recv()))
    except EOFError:
        workers.stop()
