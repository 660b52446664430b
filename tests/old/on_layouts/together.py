"""Checks that several processes run together: a hang fails by name, and what comes after it is run all the same."""

from __future__ import annotations

import faulthandler
import gc
import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from in_processes import failure
from torch import distributed

SECONDS = 20
"""How long a process waits for another one before it fails."""
HANGS = 4
"""After so many checks in which somebody waited in vain the others are not run any more."""


class Together:
    """The processes of a run, of which this is one."""

    def __init__(self, rank: int, size: int, file: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self.file = rank, size, Path(file)
        distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=SECONDS)  # that of the groups of meshes
        wait = timedelta(seconds=10 * SECONDS)
        self._store = distributed.FileStore(str(self.file.parent / f"agreed-{size}"), size)
        self._store.set_timeout(wait)
        self._groups = 0
        self.begin()

    def begin(self) -> None:
        """Make a process group."""
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.file.parent}/init-{self.size}-{self._groups}",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=SECONDS),
        )
        self._groups += 1

    def end(self) -> None:
        """Leave the process group."""
        distributed.destroy_process_group()

    def run(
        self, checks: Mapping[str, Callable[[], Any]], again: Callable[[], None] = lambda: None, *, fresh: bool = False
    ) -> None:
        """Run every check, and write what went wrong; after a failure, ``again`` in a group that is new.

        With ``fresh`` each check has a group of its own.
        """
        failures: dict[str, str] = {}
        hangs = 0
        for number, (title, check) in enumerate(checks.items()):
            if hangs == HANGS:
                failures[title] = "not run: too many checks before it took too long"
                continue
            gc.collect()
            gc.freeze()  # `attach` looks for an optimizer around its own among all objects: now those of this check
            faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # where no timeout of a group helps
            start = time.monotonic()
            found = failure(title, check)
            took = time.monotonic() - start
            failures |= found
            faulthandler.cancel_dump_traceback_later()
            states = self._agreed(f"{number}", f"{int(bool(found))}{int(bool(found) and took > SECONDS / 2)}")
            hangs += any(state[1] == "1" for state in states)
            self.file.write_text(json.dumps(failures))
            if fresh or any(state[0] == "1" for state in states):
                self.end()
                self.begin()
                again()
        self.file.write_text(json.dumps(failures))

    def _agreed(self, key: str, value: str) -> list[str]:
        """Return what each process says, without the process group, which may be broken."""
        self._store.set(f"{key}-{self.rank}", value)
        return [self._store.get(f"{key}-{other}").decode() for other in range(self.size)]
