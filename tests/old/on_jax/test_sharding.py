"""Gradients divided among eight devices: every rule does what it does on one device, and gathers nothing.

This file is also the script of the processes that have eight devices, one for each kind of axes: they
compare, and write what went wrong for the tests to read.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from in_processes import failure, failures_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import uniclip as uc

KINDS = ["Explicit", "Auto"]
RULES: dict[str, uc.Rule] = {
    "global": uc.by_global_norm(1.0),
    "order 3": uc.by_global_norm(1.0, ord=3),
    "largest": uc.by_global_norm(1.0, ord=math.inf),
    "each leaf": uc.by_norm(1.0),
    "last axis": uc.by_norm(0.5, axis=-1),
    "agc": uc.agc(0.01),
    "mean square": uc.by_block_rms(0.1),
    "zclip": uc.zclip(warmup=2),
    "log_zscore": uc.log_zscore(),
    "autoclip": uc.autoclip(20, window=4),
    "skip_spikes": uc.skip_spikes(window=4, warmup=2),
    "adagc": uc.adagc(warmup=2),
    "spam": uc.spam(factor=0.5, warmup=1),
    "adagn": uc.adagn(),
    "joint warm-up of rows": uc.Rule(uc.limits.Ema(1.0, 0.9, warmup=2), scope=uc.scopes.each_row),
    "policy skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "policy zero": uc.by_global_norm(1.0, nonfinite="zero"),
}
LARGE = [P("x", "y"), P("x", None), P(None, "y"), P(("x", "y"), None)]
SMALL = [((16,), P("x")), ((8, 16), P("x", "y")), ((3,), P()), ((32,), P(("x", "y")))]


def values(large: int, small: int) -> tuple[dict[str, Any], dict[str, P]]:
    """Return gradients, and how to divide them."""
    rng, grads, specs = np.random.default_rng(0), {}, {}
    for number in range(large):
        grads[f"large {number}"] = rng.standard_normal((128, 64)).astype("float32")
        specs[f"large {number}"] = LARGE[number % 4]
    for number in range(small):
        shape, specs[f"small {number}"] = SMALL[number % 4]
        grads[f"small {number}"] = rng.standard_normal(shape).astype("float32")
    return grads, specs


def divided(kind: str, large: int, small: int) -> tuple[Any, Any, Any, Any]:
    """Return gradients and parameters as NumPy arrays, and divided among the devices."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
    grads, specs = values(large, small)
    params = {name: np.cos(value) for name, value in grads.items()}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return grads, params, *jax.device_put((grads, params), (places, places))


def with_fields(tree: Any) -> Any:
    """Return a tree whose reports have made their fields."""
    made = lambda node: uc.Report(*node) if isinstance(node, uc.Report) else node
    return jax.tree.map(made, tree, is_leaf=lambda node: isinstance(node, uc.Report))


def same(found: Any, wanted: Any) -> None:
    """Compare trees; sums of parts round in another order."""
    found, wanted = map(with_fields, (found, wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), found, wanted)


def step(rule: uc.Rule, grads: Any, state: Any, params: Any) -> Any:
    """Return what a step makes of the gradients, the next state, and all that is shown."""
    clipped, state, report = rule.update(grads, state, params)
    return clipped, state, report, report.scalars()


def step_of_each(rules: dict[str, uc.Rule], grads: Any, states: Any, params: Any) -> Any:
    """Return by name the step of each rule; in compiled code, its operations bear the name."""
    results = {}
    for title, rule in rules.items():
        with jax.named_scope(f"<{title}>"):
            results[title] = step(rule, grads, states[title], params)
    return results


def starts(rules: dict[str, uc.Rule], params: Any) -> Any:
    """Return by name how each rule begins."""
    return {title: rule.init(params) for title, rule in rules.items()}


def compiled(rules: dict[str, uc.Rule], grads: Any, params: Any) -> Any:
    """Return the steps of some rules as one program, and the instructions that send a leaf whole to a device."""
    program = jax.jit(partial(step_of_each, rules)).lower(grads, starts(rules, params), params).compile()
    return program, [line for line in program.as_text().splitlines() if re.search(r" all-gather(-start)?\(", line)]


def steps(rules: dict[str, uc.Rule], update: Callable[..., Any], grads: Any, params: Any) -> Any:
    """Return by name what the third step of each rule makes of the gradients, and what it shows."""
    states = starts(rules, params)
    for by in (0.5, 1.0, 30.0):
        results = update({name: g * by for name, g in grads.items()}, states, params)
        states = {title: state for title, (_, state, *_) in results.items()}
    return {title: (clipped, seen) for title, (clipped, _, *seen) in results.items()}


def alike(kind: str, failures: dict[str, str]) -> None:
    """Find where compiled code does not do with divided gradients what a rule does on one device, or moves them."""
    one, its, grads, params = divided(kind, 4, 4)
    program, gathers = compiled(RULES, grads, params)
    places = program.input_shardings[0][1]
    found = steps(RULES, lambda g, states, p: program(g, jax.device_put(states, places), p), grads, params)
    wanted = steps(RULES, partial(step_of_each, RULES), one, its)

    def check(title: str) -> None:
        assert not [line for line in gathers if f"<{title}>" in line]
        same(found[title], wanted[title])
        assert all(found[title][0][name].sharding.is_equivalent_to(g.sharding, g.ndim) for name, g in grads.items())

    for title in RULES:
        failures |= failure(title, partial(check, title))
    assert not gathers


def many(kind: str) -> None:
    """Assert that nothing is gathered of a model of many leaves."""
    _, _, grads, params = divided(kind, 16, 50)
    assert not compiled({"zclip": RULES["zclip"]}, grads, params)[1]


def sixteen(kind: str, failures: dict[str, str]) -> None:
    """Find which rules of several norms gather something of 16 leaves, which are divided in every way."""
    rules = {title: rule for title, rule in RULES.items() if rule.scope != uc.scopes.all_leaves}
    _, _, grads, params = divided(kind, 8, 8)
    _, gathers = compiled(rules, grads, params)

    def check(title: str) -> None:
        assert not [line for line in gathers if f"<{title}>" in line]

    for title in rules:
        failures |= failure(title, partial(check, title))
    assert not gathers


def reductions(function: Callable[..., Any], *args: Any) -> int:
    """Return how many all-reduces a program has, those of branches too."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert not re.search(r" all-gather(-start)?\(", text)
    return len(re.findall(r" all-reduce(?:-start)?\(", text))


def few(kind: str) -> None:
    """Assert that rules have at most two all-reduces more than optax's global norm, of leaves divided in two ways."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
    grads = [jax.device_put(np.ones((64, 32), "float32"), NamedSharding(mesh, spec)) for spec in LARGE[:2] * 4]
    native = optax.clip_by_global_norm(1.0)
    most = 2 + reductions(lambda grads: native.update(grads, native.init(grads)), grads)
    for title in ("global", "order 3", "largest", "agc", "autoclip", "spam"):
        found = reductions(
            lambda *args, rule=RULES[title]: rule.update(*args)[:2], grads, RULES[title].init(grads), grads
        )
        assert found <= most, (title, found, most)


def eager(kind: str) -> None:
    """Assert the same outside of jit, also of gradients beyond the range of squares, and of large ones in bfloat16."""
    rules = {"agc": RULES["agc"]}
    one, its, grads, params = divided(kind, 1, 2)
    same(*(steps(rules, partial(step_of_each, rules), *given) for given in ((grads, params), (one, its))))
    same(uc.global_norm({name: g * 1e30 for name, g in grads.items()}), uc.global_norm(one) * np.float32(1e30))
    wide = np.random.default_rng(0).standard_normal((2048, 128)).astype("bfloat16")
    [found], _ = uc.clip([jax.device_put(wide, grads["large 0"].sharding)], uc.by_norm(1.0, ord=3))
    same(
        np.asarray(found, "float32"),
        np.asarray(uc.clip([jax.numpy.asarray(wide)], uc.by_norm(1.0, ord=3))[0][0], "float32"),
    )


def main(kind: str, file: str) -> None:
    """Run every check for one kind of axes."""
    failures: dict[str, str] = {}
    failures |= failure("alike", lambda: alike(kind, failures))
    failures |= failure("many", lambda: many(kind))
    failures |= failure("sixteen", lambda: sixteen(kind, failures))
    failures |= failure("few", lambda: few(kind))
    failures |= failure("eager", lambda: eager(kind))
    Path(file).write_text(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Run the processes, and return what went wrong in each."""
    devices = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # what is divided, and what is sent, is settled before them
    }
    return dict(zip(KINDS, failures_in(tmp_path_factory, __file__, [[kind] for kind in KINDS], devices), strict=True))


@pytest.mark.parametrize("title", [*RULES, "alike", "many", "sixteen", "few", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_one_device(failures: dict[str, dict[str, str]], kind: str, title: str) -> None:
    """Divided among devices, gradients are clipped as on one, and stay where they are."""
    assert title not in failures[kind], failures[kind][title]


if __name__ == "__main__":
    main(*sys.argv[1:])
