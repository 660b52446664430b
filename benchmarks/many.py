# SPDX-License-Identifier: MIT
"""Rules for many leaves in compiled code, and what each framework has of the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import uniclip as uc
from calls import AGC, BY_NORM, EPS, GLOBAL, RATIO, to_time

CHAIN = "chain(agc, by_global_norm)"
SIZES = {(32, 32): "32x32", (128, 128): "128x128", (16,): "16"}
WARM_UP = 100
"""The steps of AdaGC's warm-up."""


def is_even(path: tuple[int, ...], _: Any = None) -> bool:
    """Whether a leaf of a list has an even number."""
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
Update = Callable[[Any, Any, Any], Any]
"""A function of gradients, a state and parameters."""


def shapes() -> dict[tuple[str, str, str], tuple[str, list[tuple[int, ...]]]]:
    """Return what is measured: the rule and the shapes of the leaves, by framework, way and title."""
    square, long, short = SIZES
    wanted = [("jax", "jax.jit", rule, count, square) for rule in RULES for count in (10, 100, 400)]
    wanted += [("jax", "jax.jit", rule, 50, long) for rule in (GLOBAL, BY_NORM, "zclip", "adagc", AGC)]
    wanted += [("jax", "jax.jit", GLOBAL, 1000, short)]
    some = (GLOBAL, "nonfinite='skip'", "zclip")
    wanted += [("tensorflow", "tf.function, XLA", rule, count, square) for rule in some for count in (10, 100, 300)]
    wanted += [("torch", "torch.compile", rule, count, square) for rule in (BY_NORM, AGC) for count in (10, 50)]
    return {
        (framework, way, f"{rule}, {count} leaves of {SIZES[shape]}"): (rule, [shape] * count)
        for framework, way, rule, count, shape in wanted
    }


MANY = shapes()


def updates(framework: str, way: str, rule: str, grads: list[Any]) -> dict[str, tuple[Update, Any]]:
    """Return what a framework has of the kind of a rule, and the rule, each with its first state."""
    ours = RULES[rule]
    update, state = lambda *given: ours.update(*given)[:2], ours.init(grads)
    if framework == "jax":
        native = (adagc, ([0.0] * len(grads), 0)) if rule == "adagc" else of_optax(rule, grads)
        return {"native": native, "uniclip": (update, state)}
    calls = to_time(framework, way, rule if rule in {BY_NORM, AGC} else GLOBAL, c=1.0, rule=ours)

    def clip_in_place(grads: Any, _: Any, params: Any) -> None:
        """Clip, as the lines by hand do; the report is no output of the program."""
        calls["uniclip"](grads, params)

    native = lambda grads, _, params: calls["native"](grads, params), None
    return {"native": native, "uniclip": (clip_in_place, None) if framework == "torch" else (update, state)}


def of_optax(rule: str, grads: list[Any]) -> tuple[Update, Any]:
    """Return the transformation of optax of the kind of a rule, and its first state."""
    import optax

    by_global_norm, by_unit = optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(RATIO, EPS)
    numbers = range(len(grads))
    kinds = {
        "masked": lambda: optax.masked(by_global_norm, [is_even((number,)) for number in numbers]),
        "four groups": lambda: optax.partition(
            dict.fromkeys(range(4), by_global_norm), [remainder((number,)) for number in numbers]
        ),
        BY_NORM: lambda: optax.clip_by_block_rms(1.0),  # which has one norm for each leaf
        "by_block_rms": lambda: optax.clip_by_block_rms(0.1),
        AGC: lambda: by_unit,
        CHAIN: lambda: optax.chain(by_unit, by_global_norm),
    }
    native = kinds.get(rule, lambda: by_global_norm)()
    return native.update, native.init(grads)


def adagc(grads: list[Any], state: Any, _: Any) -> tuple[list[Any], Any]:
    """Clip as AdaGC does, by hand: within the warm-up to the global norm, then each leaf to its average."""
    import jax.numpy as jnp

    averages, step = state
    norms = [jnp.linalg.norm(jnp.ravel(grad)) for grad in grads]
    total, warm = jnp.sqrt(sum(norm**2 for norm in norms)), step < WARM_UP
    first = jnp.minimum(1.0, 1.0 / total)
    pairs = list(zip(averages, norms, strict=True))
    factors = [jnp.where(warm, first, jnp.minimum(1.0, 1.05 * old / norm)) for old, norm in pairs]
    clipped = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
    least = [jnp.where(step == 0, size, jnp.minimum(old, size)) for old, size in zip(averages, clipped, strict=True)]
    mean = [0.98 * old + 0.02 * size for old, size in zip(averages, clipped, strict=True)]
    new = [jnp.where(warm, a, b) for a, b in zip(least, mean, strict=True)]
    return [grad * factor for grad, factor in zip(grads, factors, strict=True)], (new, step + 1)
