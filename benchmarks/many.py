# SPDX-License-Identifier: MIT
"""Rules for many leaves in compiled code, next to the counterpart in each framework."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from timing import NATIVE, Row, interleave, row

import uniclip as uc
from calls import Framework  # which knows where the kit is
from kit.frameworks import JAX, TensorFlow, Torch

GLOBAL, BY_NORM, AGC, CHAIN = "by_global_norm", "by_norm", "agc", "chain(agc, by_global_norm)"
# Of adaptive gradient clipping, as in the paper, timm and optax.
RATIO, EPS = 0.01, 1e-3
SIZES = {
    (32, 32): "32x32",
    (128, 128): "128x128",
    (256, 256): "256x256",
    (1024, 1024): "1024x1024",
    (16,): "16",
}
WARM_UP = 100
"""The steps of AdaGC's warmup."""
BUILDS = 2
"""The number of compilations of each program, after a first one."""
FRAMEWORKS: dict[str, Framework] = {"torch": Torch(), "tensorflow": TensorFlow(), "jax": JAX()}


def is_even(path: tuple[int, ...], _: Any = None) -> bool:
    """Return whether a leaf of a list has an even index."""
    return path[0] % 2 == 0


def remainder(path: tuple[int, ...], _: Any = None) -> int:
    """Return the group of a leaf of a list, one of four."""
    return path[0] % 4


RULES: dict[str, Any] = {
    GLOBAL: uc.by_global_norm(1.0),
    "skip_above": uc.by_global_norm(1.0, skip_above=100.0),
    "nonfinite='skip'": uc.by_global_norm(1.0, nonfinite="skip"),
    "zclip": uc.zclip(),
    "autoclip": uc.autoclip(window=100),
    "skip_spikes": uc.skip_spikes(),
    "masked": uc.masked(uc.by_global_norm(1.0), is_even),
    "four groups": uc.Rule(1.0, scope=uc.scopes.groups(remainder)),
    BY_NORM: uc.by_norm(1.0),
    "by_block_rms": uc.by_block_rms(0.1),
    "adagc": uc.adagc(),
    AGC: uc.agc(RATIO, EPS),
    CHAIN: uc.chain(uc.agc(RATIO, EPS), uc.by_global_norm(1.0)),
}


def shapes() -> dict[tuple[str, str], tuple[str, list[tuple[int, ...]]]]:
    """Return the rule and the shapes of the leaves, by framework and title."""
    square, long, large, largest, short = SIZES
    wanted = [("jax", rule, count, square) for rule in RULES for count in (10, 100, 400)]
    wanted += [("jax", rule, 50, long) for rule in (GLOBAL, BY_NORM, "zclip", "adagc", AGC)]
    wanted += [("jax", rule, count, large) for rule in (GLOBAL, BY_NORM) for count in (10, 100)]
    wanted += [("jax", rule, 8, largest) for rule in (GLOBAL, BY_NORM)]
    wanted += [("jax", GLOBAL, 1000, short)]
    wanted += [
        ("tensorflow", rule, count, square) for rule in (GLOBAL, "zclip") for count in (10, 300)
    ]
    wanted += [("torch", BY_NORM, count, square) for count in (10, 30)]
    return {
        (framework, f"{rule}, {count} leaves of {SIZES[shape]}"): (rule, [shape] * count)
        for framework, rule, count, shape in wanted
    }


MANY = shapes()
JOBS = list(MANY)
"""The jobs: a framework, and a rule with its leaves."""


def measure(framework: str, what: str, rounds: int) -> Iterator[Row]:
    """Yield the CPU time until a program is ready, and that of a run.

    In JAX there is also the time of the compiler alone.
    """
    (rule, leaves), rng = MANY[framework, what], np.random.default_rng(0)
    grads, params = (
        [FRAMEWORKS[framework].array(1e-3 * rng.standard_normal(shape)) for shape in leaves]
        for _ in range(2)
    )
    made, programs, spent = updates(framework, rule, grads), {}, {NATIVE: [], "uniclip": []}
    for _ in range(BUILDS + 1):
        for name, (update, state) in made.items():
            programs[name], stages = build_program(framework, update, (grads, state, params))
            spent[name].append(stages)
    for number, stage in enumerate(
        ["first call", "compiler alone"] if framework == "jax" else ["first call"]
    ):
        # The first time of the compiler itself is separate, too.
        yield {
            "stage": stage,
            **row(
                {name: [stages[number] for stages in found[1:]] for name, found in spent.items()}
            ),
        }
    runs = {
        name: partial(programs[name], grads, state, params) for name, (_, state) in made.items()
    }
    yield {"stage": "a run", **interleave(runs, lambda _: None, rounds)}


def build_program(
    framework: str, update: Any, given: Any
) -> tuple[Callable[..., Any], list[float]]:
    """Compile a function.

    Return it, and the seconds in total, and of the compiler alone if these are known.
    """
    if framework == "jax":
        import jax

        jax.clear_caches()
        start = time.process_time()
        traced = jax.jit(update).trace(*given)
        between = time.process_time()
        program = traced.lower().compile()
        end = time.process_time()
        return lambda *some: jax.block_until_ready(program(*some)), [end - start, end - between]
    if framework == "torch":
        import torch

        torch.compiler.reset()
        compiled = partial(torch.compile, fullgraph=True, dynamic=False)
    else:
        import tensorflow as tf

        compiled = partial(tf.function, autograph=False, jit_compile=True)
    start = time.process_time()
    program = compiled(update)
    program(*given)
    return program, [time.process_time() - start]


def use_one_core() -> None:
    """Pin this process to one core before it imports a framework, where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])


Update = Callable[[Any, Any, Any], Any]
"""A function of gradients, a state and parameters."""


def updates(framework: str, rule: str, grads: list[Any]) -> dict[str, tuple[Update, Any]]:
    """Return a framework's counterpart of a rule, and the rule, each with its initial state."""
    ours = RULES[rule]
    # In place, like the lines by hand; the report is no output of the program.
    if framework == "torch":
        return {NATIVE: (norms_by_hand, None), "uniclip": (partial(clip_in_place, ours), None)}
    if framework == "jax":
        native = (adagc, ([0.0] * len(grads), 0)) if rule == "adagc" else of_optax(rule, grads)
    else:
        native = (clip_by_tensorflow, None)
    return {NATIVE: native, "uniclip": (lambda *given: ours.update(*given)[:2], ours.init(grads))}


def clip_in_place(rule: Any, grads: list[Any], _: Any, params: list[Any]) -> None:
    """Clip PyTorch tensors in place."""
    uc.clip_(grads, rule, params)


def clip_by_tensorflow(grads: list[Any], *others: Any) -> list[Any]:
    """Clip by the global norm."""
    import tensorflow as tf

    return tf.clip_by_global_norm(grads, 1.0)[0]


def norms_by_hand(grads: list[Any], *others: Any) -> None:
    """Clip each PyTorch tensor by its norm, as ``clip_grad_norm_`` would."""
    import torch

    for grad in grads:
        grad.mul_((1.0 / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0))


def of_optax(rule: str, grads: list[Any]) -> tuple[Update, Any]:
    """Return optax's counterpart of a rule, and its initial state."""
    import optax

    by_global_norm, by_unit = optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(RATIO, EPS)
    numbers = range(len(grads))
    kinds = {
        "masked": lambda: optax.masked(by_global_norm, [is_even((number,)) for number in numbers]),
        "four groups": lambda: optax.partition(
            dict.fromkeys(range(4), by_global_norm), [remainder((number,)) for number in numbers]
        ),
        # It has one norm for each leaf.
        BY_NORM: lambda: optax.clip_by_block_rms(1.0),
        "by_block_rms": lambda: optax.clip_by_block_rms(0.1),
        AGC: lambda: by_unit,
        CHAIN: lambda: optax.chain(by_unit, by_global_norm),
    }
    native = kinds.get(rule, lambda: by_global_norm)()
    return native.update, native.init(grads)


def adagc(grads: list[Any], state: Any, _: Any) -> tuple[list[Any], Any]:
    """Clip like AdaGC, by hand: to the global norm in the warmup, then each leaf to its average."""
    import jax.numpy as jnp

    averages, step = state
    norms = [jnp.linalg.norm(jnp.ravel(grad)) for grad in grads]
    total, warm = jnp.sqrt(sum(norm**2 for norm in norms)), step < WARM_UP
    first = jnp.minimum(1.0, 1.0 / total)
    pairs = list(zip(averages, norms, strict=True))
    factors = [jnp.where(warm, first, jnp.minimum(1.0, 1.05 * old / norm)) for old, norm in pairs]
    clipped = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
    least = [
        jnp.where(step == 0, size, jnp.minimum(old, size))
        for old, size in zip(averages, clipped, strict=True)
    ]
    mean = [0.98 * old + 0.02 * size for old, size in zip(averages, clipped, strict=True)]
    new = [jnp.where(warm, a, b) for a, b in zip(least, mean, strict=True)]
    return [grad * factor for grad, factor in zip(grads, factors, strict=True)], (new, step + 1)
