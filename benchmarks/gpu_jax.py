# SPDX-License-Identifier: MIT
"""Time whole steps of JAX with uniclip's clipping next to optax', on a GPU or on a CPU."""

from __future__ import annotations

import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpu_setup import HAS_GPU, Run
from gpu_times import OURS, Row, Shapes, line, trees
from timing import NATIVE, quartiles

import uniclip as uc
from uniclip.integrations.optax import to_optax

CALLS_BETWEEN_WAITS = 25
"""How many steps run before the host waits, as in training."""
SMALLEST_SPEEDUP = 0.95
"""How fast a step has to be with uniclip's global norm, as a multiple of that with optax'."""
TOLERANCE = 1e-5
"""How far the first step may be from that of optax, as a share of its norm."""
LIMIT = 1.0
SCALES = {False: 1e-9, True: 1.0}
"""The scales of gradients that no rule clips, and of those that all clip: one program runs both."""


def transforms() -> dict[str, tuple[Any, Any]]:
    """Return optimizers with clipping of optax and of uniclip.

    Parameters start at zero, and ε is 1, so that a step shows how long the gradients are.
    """
    adamw = optax.adamw(1e-3, eps=1.0, weight_decay=0.0)
    native = optax.chain(optax.clip_by_global_norm(LIMIT), adamw)
    rules = {
        "global norm": (native, uc.by_global_norm(LIMIT)),
        "skip non-finite": (
            optax.apply_if_finite(native, 9),
            uc.by_global_norm(LIMIT, nonfinite="skip"),
        ),
        "agc": (optax.chain(optax.adaptive_grad_clip(0.01), adamw), uc.agc(0.01)),
    }
    return {
        name: (theirs, optax.chain(to_optax(rule), adamw)) for name, (theirs, rule) in rules.items()
    }


def gradients(shapes: Shapes, scale: float) -> list[Any]:
    """Return random gradients of a scale."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [scale * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


class Training:
    """A compiled step of an optimizer, with the parameters and the state after the last one."""

    def __init__(self, transform: Any) -> None:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.transform = transform
        self.program = jax.jit(step, donate_argnums=(0, 1))

    def first(self, grads: list[Any]) -> list[Any]:
        """Start anew, and return copies of the parameters after the first step.

        The first one of all compiles.
        """
        self.grads = grads
        self.params = [jnp.zeros_like(grad) for grad in grads]
        self.state = self.transform.init(self.params)
        self.params, self.state = self.program(self.params, self.state, self.grads)
        return [np.asarray(param, np.float64) for param in self.params]

    def time(self) -> float:
        """Return the time of a step in µs, over some steps."""
        jax.block_until_ready((self.params, self.state))
        start = time.perf_counter()
        for _ in range(CALLS_BETWEEN_WAITS):
            self.params, self.state = self.program(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return (time.perf_counter() - start) / CALLS_BETWEEN_WAITS * 1e6


def time_pair(pair: list[Training], name: str, tree: str, rounds: int, *, clipped: bool) -> Row:
    """Return the row of an optimizer; the two take turns, in a random order."""
    grads = gradients(trees()[tree], SCALES[clipped])
    theirs, ours = (training.first(grads) for training in pair)
    apart = norm_of([one - other for one, other in zip(theirs, ours, strict=True)])
    if not apart <= TOLERANCE * norm_of(theirs):
        msg = f"the first step is {apart / norm_of(theirs):.2g} of its norm from that of optax"
        raise AssertionError(msg)

    times: list[list[float]] = [[], []]
    order = [0, 1]
    shuffle = random.Random(0).shuffle  # noqa: S311 - no secret
    for _ in range(rounds):
        shuffle(order)
        for number in order:
            times[number].append(pair[number].time())
    ratios = np.array(times[0]) / np.array(times[1])
    native, uniclip = ({"step_us": float(np.median(found))} for found in times)
    return {
        "what": f"JAX: whole step of AdamW, {name}, {tree}",
        "dtype": "float32",
        "clipped": clipped,
        "peer": "optax",
        "speedup": quartiles(ratios),
        NATIVE: native,
        OURS: uniclip,
    }


def norm_of(arrays: list[Any]) -> float:
    """Return the joint norm."""
    return float(np.sqrt(sum(np.sum(array**2) for array in arrays)))


def time_jax(run: Run, rounds: int) -> list[Row]:
    """Return the rows of JAX, and require that the usual rule is about as fast as in optax."""
    rows: list[Row] = []
    # Compiled on a CPU, larger trees would take minutes.
    tree = "GPT-2" if HAS_GPU else "MLP of ten"

    def time_one(pair: list[Training], name: str, *, clipped: bool) -> None:
        row = time_pair(pair, name, tree, rounds, clipped=clipped)
        rows.append(row)
        print(f"{row['what']}, {'' if clipped else 'not '}clipped: {line(row)}", flush=True)
        if HAS_GPU and name == "global norm" and row["speedup"][1] < SMALLEST_SPEEDUP:
            msg = f"a step is {row['speedup'][1]:.3f} times as fast as with optax"
            raise AssertionError(msg)

    for name, both in transforms().items():
        pair = [Training(transform) for transform in both]
        for clipped in SCALES:
            run.check(f"JAX, {name}", lambda: time_one(pair, name, clipped=clipped))  # noqa: B023
    return rows
