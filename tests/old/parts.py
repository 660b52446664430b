"""Two processes that each hold a part of one tree, as two threads of this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import optree

from frameworks import Framework

PATIENCE = 60
"""For how many seconds a process waits for the other one."""


def together(
    fw: Framework,
    parts: Sequence[Any],
    run: Callable[[Any, Callable[[Any, str], Any]], Any],
    largest: Callable[[Any, Any], Any] = np.maximum,
) -> list[Any]:
    """Return ``run(part, all_reduce)`` of each part, all at once, as NumPy's arrays.

    ``all_reduce`` joins what the parts have measured; ``largest`` is its maximum of two.
    """
    barrier = threading.Barrier(len(parts), timeout=PATIENCE)
    given: dict[int, np.ndarray] = {}

    def process(number: int) -> Any:
        def all_reduce(own: Any, op: str) -> Any:
            given[number] = np.array(fw.numpy(own))
            barrier.wait()
            arrays = [given[one] for one in range(len(parts))]
            joined = np.sum(arrays, axis=0) if op == "sum" else reduce(largest, arrays)
            barrier.wait()  # before the next ones are written
            return fw.array(joined, fw.dtype(own))

        try:
            with fw.context():
                # Here, since arrays that are lazy are computed in the thread that made them.
                return optree.tree_map(lambda x: np.array(fw.numpy(x)), run(parts[number], all_reduce))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(process, range(len(parts))))
