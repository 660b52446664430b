# SPDX-License-Identifier: MIT
"""Run uniclip on a GPU: check numbers, waits, graphs, and streams, then measure times.

Run it in a checkout, as ``python benchmarks/gpu.py [section ...]``, with PyTorch for CUDA, and with
JAX for CUDA and optax, CuPy, and timm, if they are installed. It takes a few minutes, and
writes the times to ``docs/speed-gpu.json``, from which the tables of the documentation are made.

On a machine without a GPU, it checks the numbers in Triton's interpreter, measures small trees,
writes a file only if ``--out`` names one, and says what is left out.

To compare two versions of the code, run the checkout of each, one after the other, with ``--out``.
``git worktree add ../old a880990`` makes one of 0.4.0, whose kernels add all squares in float64.
These changes need such a comparison, since what they do on a GPU isn't known:

- Less code: roots after the sums instead of kernels for norms (four launches more for rules other
  than the global norm); an operation for each shape of norms in `agc` (about 50 launches instead of
  13); `by_value` by PyTorch's own clamps (less time of the host, more of the GPU).
- Other parameters of kernels: `sum_rows` with 8 warps, or with 128 columns in float32; chunks of
  32,768 elements in half precision; `find_factor` with blocks of 4,096 and 4 warps.
- Products that take the chunks in reverse order, since the sums leave the last ones in the cache.
- Products within the limit by a few thousand programs, each for many chunks.
- Chunks of zeros, as in gradients of embeddings, and chunks of tiny numbers, which are read twice.
- `join_norms`, where a norm has two or more chunks: each thread of a program takes the root of the
  same sum. Fewer threads, or a launch of `find_norms` after `join_sums`, would take fewer roots.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime, timezone
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_times
import torch
from gpu_setup import HAS_GPU, ROOT, Run
from timing import save

import uniclip as uc

Rows = list[gpu_times.Row]
README_ROWS = 2 * len(gpu_times.TOLERANCES)
"""The number of rows of the first operation on the first tree: not clipped and clipped, in each
dtype.
"""
SECTIONS = ("kernels", "foreach", "waits", "graphs", "streams", "times", "cupy", "jax")


def has(*names: str) -> bool:
    """Return whether libraries are installed."""
    return all(find_spec(name) is not None for name in names)


def check_all(run: Run) -> None:
    """Run the sections of checks."""
    if not has("triton"):
        run.leave_out("kernels", "Triton")
    elif run.section("kernels"):
        gpu_checks.check_numbers(run, triton=True)
    if run.section("foreach"):
        gpu_checks.check_numbers(run, triton=False)
    for name, check in {
        "waits": gpu_checks.check_waits,
        "graphs": gpu_checks.check_graphs,
        "streams": gpu_checks.check_streams,
    }.items():
        if not HAS_GPU:
            run.leave_out(name, "a GPU")
        elif run.section(name):
            check(run)


def time_all(run: Run, rounds: int) -> Rows:
    """Run the sections of times, and return their rows."""
    rows: Rows = []
    if run.section("times"):
        rows += gpu_times.time_torch(run, rounds)
    if not (HAS_GPU and has("cupy")):
        run.leave_out("cupy", "a GPU and CuPy")
    elif run.section("cupy"):
        rows += gpu_times.time_cupy(run, rounds)
    if not has("jax", "optax"):
        run.leave_out("jax", "JAX and optax")
    elif run.section("jax"):
        # An error outside of a row must not lose the rows before.
        run.check("jax", lambda: rows.extend(time_jax(run, rounds)))
    return rows


def time_jax(run: Run, rounds: int) -> Rows:
    """Return the rows of JAX, unless it has no GPU on a machine with one."""
    # PyTorch has memory, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import gpu_jax
    import jax

    if HAS_GPU and jax.default_backend() != "gpu":
        run.leave_out("jax", "JAX for CUDA")
        return []
    return gpu_jax.time_jax(run, rounds)


def about() -> dict[str, Any]:
    """Return what the rows depend on: the device, the date, and the installed versions."""
    # An installed library may fail to import; its version is known anyway.
    packages = packages_distributions()
    names = [name for name in ("torch", "triton", "jax", "optax", "cupy", "timm") if has(name)]
    versions = {name: version(packages[name][0]) for name in names if name in packages}
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    return {
        "what": f"uniclip {uc.__version__}",
        "device": torch.cuda.get_device_name() if HAS_GPU else "CPU",
        "date": f"{datetime.now(timezone.utc):%B %Y}",
        "versions": versions,
    }


def main() -> int:
    """Run the requested sections, by default all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"one or more of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="when to stop, by default 5")
    parser.add_argument("--rounds", type=int, default=9, help="calls of a function, by default 9")
    parser.add_argument("--out", type=Path, help="the file to write the times to")
    options = parser.parse_args()
    out = options.out
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        parser.error(f"--out {out} is not a file in an existing folder")
    unknown = {*options.sections} - {*SECTIONS}
    if unknown:
        parser.error(f"no section is named {', '.join(sorted(unknown))}")

    run = Run(options.minutes, {*options.sections})
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if HAS_GPU else 'no GPU'}")
    check_all(run)
    rows = time_all(run, options.rounds)
    print(f"\n{run.passed} passed, {len(run.failed)} failed: {', '.join(run.failed) or 'none'}")
    print(f"left out: {', '.join(run.left_out) or 'nothing'}")

    # The documentation has the rows of one run of all sections. Without time, the last ones are
    # missing, which its tables allow, but for the first ones: the README has their cells.
    enough = len(rows) >= README_ROWS and not options.sections and not run.failed
    out = options.out or (ROOT / "docs" / "speed-gpu.json" if HAS_GPU and enough else None)
    if out is None:
        print(
            "nothing is written: that takes a GPU, all sections, no failure, and time for the "
            f"first {README_ROWS} rows, or --out FILE"
        )
    else:
        save(out, about(), rows)
        print(f"written: {out}")
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
