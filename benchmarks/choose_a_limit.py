# SPDX-License-Identifier: MIT
"""Measure how well the three limits of ``uniclip.insight.suggest`` do, beside fixed ones and a grid.

Each cell is a task, a learning rate, and clean or bad data. Its pilot run is clipped at 1.0; if the advice is to record
again, that is done, at most twice; then the three limits are tried as they are. All runs are full ones of one length.
The result is ``docs/choosing.json`` and the tables in ``docs/how-the-advice-does.md``. Tasks, seeds and grid were
committed before the first run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import choosing_tables
import uniclip as uc
from choosing_tasks import BAD_SHARE, BATCH, CELLS, DATA, LOUDNESS, TASKS, Cell, Data
from uniclip import insight
from uniclip.insight.advice import Advice, suggest
from uniclip.insight.spikes import FEWEST, spikes

RESULTS = Path(__file__).parent.parent / "docs" / "choosing.json"
PAGE = RESULTS.parent / "how-the-advice-does.md"
SEEDS, STEPS, RISING = (0, 1, 2), 300, 30
GRID = (*(2.0**n for n in range(-4, 6)), math.inf)
PILOT, PILOTS = 1.0, 3
"""The limit of the first pilot run, and how many there are at most."""
MOMENTUM, SECOND = 0.9, 0.999

Array = np.ndarray[Any, Any]


class Runs(NamedTuple):
    """What runs, one a row, recorded and reached."""

    norms: Array
    losses: Array
    reached: Array
    """The validation loss; that of chance where it is not finite or worse."""


@cache
def data(name: str) -> Data:
    """Return data, made once."""
    return DATA[name]()


def bad_steps(cell: Cell, seed: int) -> Array:
    """Return which steps of a run have bad batches."""
    return (np.random.default_rng(1000 + seed).random(STEPS) < BAD_SHARE) & cell.bad


def batches(cell: Cell, seed: int) -> tuple[Array, Array, Array]:
    """Return the examples of each step, which steps are bad, and what is learned there."""
    rng, given = np.random.default_rng(seed), data(TASKS[cell.task].data)
    chosen = rng.integers(0, len(given.inputs), (STEPS, BATCH)).astype(np.int32)
    wrong = rng.integers(0, given.classes, (STEPS, BATCH, *given.targets.shape[1:])).astype(np.int32)
    return chosen, bad_steps(cell, seed), wrong


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean loss."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1))


def rates(rate: Any) -> Any:
    """Return the learning rates of the steps: warm-up, then half a cosine."""
    step = jnp.arange(STEPS)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * (step - RISING) / (STEPS - RISING)))
    return rate * jnp.where(step < RISING, (step + 1) / RISING, falling)


def moved(grads: Any, memory: Any, step: Any, *, adam: bool) -> tuple[Any, Any]:
    """Return the update of Adam, or of SGD with momentum, and its memory."""
    first, second = memory
    mixed = partial(jax.tree.map, lambda m, g: MOMENTUM * m + (1 - MOMENTUM if adam else 1) * g)
    first = mixed(first, grads)
    if not adam:
        return first, (first, second)
    second = jax.tree.map(lambda v, g: SECOND * v + (1 - SECOND) * g**2, second, grads)
    one, two = 1 - MOMENTUM ** (step + 1), 1 - SECOND ** (step + 1)
    return jax.tree.map(lambda m, v: (m / one) / (jnp.sqrt(v / two) + 1e-8), first, second), (first, second)


@cache
def trainer(name: str) -> Callable[..., Any]:
    """Return the compiled training of many runs of a task at once."""
    task, given = TASKS[name], data(TASKS[name].data)
    noisy = task.data == "digits"  # letters cannot be 20 times as large; their loss can

    def loss_of(params: Any, inputs: Any, targets: Any, scale: Any) -> Any:
        if noisy:
            return cross_entropy(task.logits(params, inputs * scale), targets)
        return scale * cross_entropy(task.logits(params, inputs), targets)

    def train(limit: Any, seed: Any, given_steps: Any, rate: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            params, memory = carry
            index, is_bad, others, lr, n = now
            targets = jnp.where(is_bad, others, jnp.asarray(given.targets)[index])
            scale = jnp.where(is_bad, LOUDNESS, 1.0)
            loss, grads = jax.value_and_grad(loss_of)(params, jnp.asarray(given.inputs)[index], targets, scale)
            clipped, norm = uc.clip_by_global_norm(grads, limit)
            updates, memory = moved(clipped, memory, n, adam=task.adam)
            return (jax.tree.map(lambda p, u: p - lr * u, params, updates), memory), (norm, loss)

        params = task.init(jax.random.key(seed))
        zeros = jax.tree.map(jnp.zeros_like, params)
        steps = (*given_steps, rates(rate), jnp.arange(STEPS, dtype=jnp.float32))
        (params, _), (norms, losses) = jax.lax.scan(step, (params, (zeros, zeros)), steps)
        return norms, losses, cross_entropy(task.logits(params, given.val_inputs), given.val_targets)

    return jax.jit(jax.vmap(train, in_axes=(0, 0, 0, None)))


def run(cell: Cell, limits: list[float], seeds: list[int]) -> Runs:
    """Train one run for each limit and seed."""
    given = {seed: batches(cell, seed) for seed in SEEDS}
    steps = tuple(np.stack([given[seed][n] for seed in seeds]) for n in range(3))
    found = trainer(cell.task)(np.asarray(limits, np.float32), np.asarray(seeds), steps, cell.rate)
    norms, losses, reached = (np.asarray(array, np.float64) for array in found)
    chance = math.log(data(TASKS[cell.task].data).classes)
    return Runs(norms, losses, np.where(np.isfinite(reached), np.minimum(reached, chance), chance))


def recorded(norms: Array, losses: Array, limit: float) -> insight.Record:
    """Return the record of a run that was clipped at a limit, as reading its file gives it."""
    n, finite = len(norms), np.isfinite(norms)
    norms, losses = np.where(finite, norms, np.nan), np.where(np.isfinite(losses), losses, np.nan)
    return insight.Record(
        steps=np.arange(1, n + 1),
        norms=norms,
        limits=np.full(n, limit),
        factors=np.minimum(1.0, limit / norms),
        shares=np.where(norms > limit, 1.0, 0.0),
        finite=finite,
        skipped=np.zeros(n, bool),
        thresholds=np.full(n, np.nan),
        losses=losses,
        leaves=np.zeros((0, 0)),
        leaf_steps=np.zeros(0, np.int64),
        labels=[],
        sizes=np.zeros(0, np.int64),
        rule=f"uc.by_global_norm({limit})",
        scope="all_leaves",
        ord=2,
        extra={},
    )


def piloted(cell: Cell, grid: Runs) -> list[dict[str, Any]]:
    """Follow the advice for each seed, from the run clipped at 1.0; the pilots of one round are trained together."""
    at = GRID.index(PILOT) * len(SEEDS)
    limits, runs = [PILOT] * len(SEEDS), Runs(*(array[at : at + len(SEEDS)] for array in grid))
    found: list[dict[str, Any]] = [{"pilots": [], "verdicts": [], "reached": [], "limits": []} for _ in SEEDS]
    waiting = set(range(len(SEEDS)))
    for left in reversed(range(PILOTS)):
        advice: dict[int, Advice] = {}
        for n in sorted(waiting):
            advice[n] = suggest(recorded(runs.norms[n], runs.losses[n], limits[n]))
            for name, value in (
                ("pilots", limits[n]),
                ("verdicts", advice[n].verdict),
                ("reached", float(runs.reached[n])),
            ):
                found[n][name].append(value)
            found[n]["limits"] = list(advice[n].limits)
        waiting = {n for n in waiting if advice[n].record_at is not None}
        if not waiting or not left:
            return found
        limits = [advice[n].record_at or PILOT if n in waiting else PILOT for n in range(len(SEEDS))]
        runs = padded(cell, limits, list(SEEDS))
    return found


def padded(cell: Cell, limits: list[float], seeds: list[int]) -> Runs:
    """Train a few runs in a program for four times as many as there are seeds: it is compiled once."""
    missing = 4 * len(SEEDS) - len(limits)
    runs = run(cell, limits + [PILOT] * missing, seeds + [SEEDS[0]] * missing)
    return Runs(*(array[: len(limits)] for array in runs))


def usual_percentile(norms: Array) -> float:
    """Return the 90th percentile of the norms of a run without clipping, after the warm-up; NaN if it exploded."""
    later = norms[RISING:]
    return float(np.percentile(later, 90)) if np.isfinite(later).all() else math.nan


def seen(cell: Cell, norms: Array) -> dict[str, Any]:
    """Return which bad steps of the pilots `spikes` lists, and what else; steps before it can are not counted."""
    counts = {"bad": 0, "found": 0, "false": 0, "steps": 0}
    high, rest = [], []
    for row, seed in zip(norms, SEEDS, strict=True):
        bad = bad_steps(cell, seed)
        flagged = np.zeros(STEPS, bool)
        flagged[[spike.step - 1 for spike in spikes(recorded(row, np.full(STEPS, np.nan), PILOT))]] = True
        bad, flagged = bad[FEWEST:], flagged[FEWEST:]
        counts["bad"] += int(bad.sum())
        counts["found"] += int((bad & flagged).sum())
        counts["false"] += int((flagged & ~bad).sum())
        counts["steps"] += int((~bad).sum())
        high += row[FEWEST:][bad].tolist()
        rest += row[FEWEST:][~bad].tolist()
    return counts | {"loudness": float(np.median(high) / np.median(rest)) if high else None}


def measured(cell: Cell) -> dict[str, Any]:
    """Return all that was found of a cell."""
    grid = run(cell, [limit for limit in GRID for _ in SEEDS], list(SEEDS) * len(GRID))
    at = GRID.index(PILOT) * len(SEEDS)
    pilots = piloted(cell, grid)
    usual = [usual_percentile(norms) for norms in grid.norms[-len(SEEDS) :]]
    limits = [limit for pilot in pilots for limit in [*pilot["limits"], *[math.nan] * (3 - len(pilot["limits"]))]]
    tried = [PILOT if math.isnan(limit) else limit for limit in limits + usual]
    runs = padded(cell, tried, [seed for seed in SEEDS for _ in range(3)] + list(SEEDS))
    for n, pilot in enumerate(pilots):
        pilot["suggested"] = runs.reached[3 * n : 3 * n + len(pilot["limits"])].tolist()
    chance = math.log(data(TASKS[cell.task].data).classes)
    percentile = [
        chance if math.isnan(c) else float(v) for c, v in zip(usual, runs.reached[-len(SEEDS) :], strict=True)
    ]
    return {
        **cell._asdict(),
        "chance": chance,
        "grid": grid.reached.reshape(len(GRID), len(SEEDS)).tolist(),
        "pilots": pilots,
        "percentile": {"limits": [None if math.isnan(c) else c for c in usual], "reached": percentile},
        "spikes": seen(cell, grid.norms[at : at + len(SEEDS)]),
    }


def main() -> None:
    """Measure all cells and write what was found; or time one, or write the page anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--time", action="store_true", help="train the grid of one cell of each task; keep nothing")
    parser.add_argument("--page", action="store_true", help="write the tables of the page from what was measured")
    options = parser.parse_args()
    if options.time:
        for cell in {cell.task: cell for cell in CELLS}.values():
            start = time.perf_counter()
            run(cell, [limit for limit in GRID for _ in SEEDS], list(SEEDS) * len(GRID))
            print(f"{cell.task}: {time.perf_counter() - start:.1f} s")
        return
    if not options.page:
        start = time.perf_counter()
        cells = [measured(cell) for cell in tqdm(CELLS, desc="cells")]
        grid = [None if math.isinf(limit) else limit for limit in GRID]
        result = {"seeds": SEEDS, "steps": STEPS, "grid": grid, "seconds": time.perf_counter() - start, "cells": cells}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    found = json.loads(options.out.read_text(encoding="utf-8"))
    PAGE.write_text(choosing_tables.filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
