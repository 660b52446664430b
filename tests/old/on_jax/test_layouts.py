"""A rule does on every layout of a run what it does on one device: the same norms, decisions, results and memory.

This file is also the script of the processes: one with eight devices, two that share four. Each runs all rules as one
program for each layout, compares, and writes what went wrong for the tests to read.
"""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_processes import failure, failures_in
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import uniclip as uc

RULES: dict[str, uc.Rule] = {
    "global": uc.by_global_norm(1.0),
    "∞-norm": uc.by_global_norm(0.5, ord=math.inf),
    "each leaf": uc.by_norm(1.0),
    "groups": uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0] in "ac")),
    "agc": uc.agc(0.01),
    "autoclip": uc.autoclip(20, window=4),
    "zclip": uc.zclip(warmup=2),
    "adagc": uc.adagc(warmup=2),
    "skip on NaN": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip_spikes with a loss": uc.skip_spikes(2.0, window=4, warmup=2),
}
KINDS = ["Auto", "Explicit"]
WAYS = ["jit", "eager", "shard_map, all leaves divided", "shard_map, mixed leaves"]
"""In one process; norms of the columns of leaves that are divided along them are no business of shard_map."""
LAYOUTS = [f"{kind}: {way}" for kind in KINDS for way in [*WAYS, "two processes, jit", "two processes, eager"]]
CASES: dict[str, float | None] = {"finite": None, "NaN in one part": math.nan, "∞ in one part": math.inf}
LEFT_OUT = {"shard_map, all leaves divided": {"agc"}, "shard_map, mixed leaves": {"agc"}}
"""Norms of columns would need an axis for each leaf."""

MIXED = {"a": P("x", "y"), "b": P("x"), "c": P(), "d": P(None, "y")}
DIVIDED = {"a": P("x", "y"), "b": P(("x", "y")), "c": P(("y", "x")), "d": P("x", "y")}
SHAPES = {"a": (16, 6), "b": (8, 4), "c": (8,), "d": (4, 6)}
STEPS = [(0.5, 1.0), (1.0, 1.2), (30.0, 9.0)]
"""By how much the gradients of a step are multiplied, and its loss."""


def gradients(bad: float | None = None) -> dict[str, Any]:
    """Return gradients as NumPy arrays, one entry of which may be bad."""
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    if bad is not None:
        grads["a"][9, 5] = bad  # of one device's part
    return grads


PARAMS = {name: np.cos(value) for name, value in gradients().items()}


def rules_of(layout: str) -> dict[str, uc.Rule]:
    """Return the rules that a layout has."""
    left_out = LEFT_OUT.get(layout.partition(": ")[2], set())
    return {name: rule for name, rule in RULES.items() if name not in left_out}


def update(rules: dict[str, uc.Rule], grads: Any, states: Any, params: Any, loss: Any, **joined: Any) -> Any:
    """Return by name what a step of each rule makes of the gradients, its memory, and what it shows."""
    results = {}
    for name, rule in rules.items():
        mine = loss if "loss" in rule.limit.needs else None
        clipped, state, report = rule.update(grads, states[name], params, loss=mine, **joined)
        results[name] = clipped, state, report.norms, report.finite, report.skipped, report.clipped
    return results


def third(step: Callable[..., Any], states: Any, put: Callable[[Any], Any], bad: float | None) -> Any:
    """Return what the last of the steps makes; its gradients alone may be bad."""
    results = None
    for number, (by, loss) in enumerate(STEPS):
        grads = gradients(bad if number == len(STEPS) - 1 else None)
        results = step(put({name: np.float32(by) * g for name, g in grads.items()}), states, put(PARAMS), loss)
        states = {name: state for name, (_, state, *_) in results.items()}
    return results


@cache
def whole(names: tuple[str, ...], case: str) -> Any:
    """Return what the last of the steps makes on one device."""
    rules = {name: RULES[name] for name in names}
    states = {name: rule.init(PARAMS) for name, rule in rules.items()}
    return third(on_one_device(names), states, lambda tree: jax.tree.map(jnp.asarray, tree), CASES[case])


@cache
def on_one_device(names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a step of some rules, compiled once for all layouts."""
    return jax.jit(partial(update, {name: RULES[name] for name in names}))


def compare(found: Any, wanted: Any) -> None:
    """Compare the parts that are here with those of the whole; flags and integers exactly."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, whole in zip(jax.tree.leaves(found), map(np.asarray, jax.tree.leaves(wanted)), strict=True):
        assert (one.shape, one.dtype) == (whole.shape, whole.dtype)
        exact = not np.issubdtype(whole.dtype, np.floating)
        bound = 0 if exact else 1e-6
        parts = [(part.data, part.index) for part in one.addressable_shards]
        for part, index in parts:
            np.testing.assert_allclose(part, whole[index], rtol=bound, atol=bound)


def replicated(tree: Any) -> None:
    """Assert that every device holds all of each array, the same bits."""
    for array in jax.tree.leaves(tree):
        assert array.sharding.is_fully_replicated
        first, *others = [np.asarray(part.data) for part in array.addressable_shards]
        assert all(first.tobytes() == other.tobytes() for other in others)


def in_place_of(specs: Any, mesh: Any) -> Callable[[Any], Any]:
    """Return a function that divides arrays, each process making its own parts."""

    def put(tree: Any) -> Any:
        def made(name: str, whole: Any) -> Any:
            place = NamedSharding(mesh, specs[name])
            return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

        return {name: made(name, whole) for name, whole in tree.items()}

    return put


def mapped(rules: dict[str, uc.Rule], specs: Any, mesh: Any) -> Callable[..., Any]:
    """Return the step in shard_map, where each device has a part of each leaf, or a copy, and a loss of its own."""

    def here(grads: Any, states: Any, params: Any, losses: Any) -> Any:
        return update(rules, grads, states, params, losses[0], all_reduce=("x", "y"))

    out = {name: (specs, P(), P(), P(), P(), P()) for name in rules}
    step = jax.jit(jax.shard_map(here, mesh=mesh, in_specs=(specs, P(), specs, P(("x", "y"))), out_specs=out))
    spread = np.linspace(-0.3, 0.3, mesh.size, dtype="float32")
    places = NamedSharding(mesh, P(("x", "y")))
    return lambda grads, states, params, loss: step(
        grads, states, params, jax.device_put(np.float32(loss) + spread, places)
    )


def step_of(layout: str, mesh: Any) -> tuple[Callable[..., Any], dict[str, P]]:
    """Return the step of a layout, and how leaves are divided there."""
    rules = rules_of(layout)
    if "shard_map" in layout:
        specs = DIVIDED if "all leaves" in layout else MIXED
        return mapped(rules, specs, mesh), specs
    step = partial(update, rules)
    return (step if "eager" in layout else jax.jit(step)), MIXED


def check(layout: str, failures: dict[str, str]) -> None:
    """Find where the results of a layout are not those of one device."""
    rules, shape = rules_of(layout), (2, 2) if "two" in layout else (4, 2)
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(getattr(AxisType, layout.partition(":")[0]),) * 2)
    step, specs = step_of(layout, mesh)
    put = in_place_of(specs, mesh)
    divided = {name: rule.init(put(PARAMS)) for name, rule in rules.items()}
    for case, bad in CASES.items():
        wanted = whole(tuple(rules), case)
        found = third(step, divided, put, bad)

        def same(name: str) -> None:
            compare(found[name], wanted[name])
            clipped, state, *shown = found[name]
            assert all(clipped[leaf].sharding.is_equivalent_to(put(PARAMS)[leaf].sharding, 2) for leaf in "ad")
            replicated((state, shown if name != "agc" else shown[1:]))

        for name in rules:
            failures |= failure(f"{layout}, {name}, {case}", partial(same, name))


def main(layouts: str, rank: str, port: str, file: str) -> None:
    """Run the layouts of one process, or of two."""
    jax.config.update("jax_num_cpu_devices", 8 if rank == "-" else 2)
    if rank != "-":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", 2, int(rank), initialization_timeout=60)
    failures: dict[str, str] = {}
    for layout in json.loads(layouts):
        failures |= failure(layout, lambda layout=layout: check(layout, failures))
    Path(file).write_text(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the processes, and return what went wrong in any of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    here, two = ([layout for layout in LAYOUTS if ("two" in layout) == both] for both in (False, True))
    calls = [[json.dumps(here), "-", port], *[[json.dumps(two), rank, port] for rank in "01"]]
    environ = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
    found = failures_in(tmp_path_factory, __file__, calls, environ)
    return {title: text for some in found for title, text in some.items()}


TITLES = [f"{layout}, {name}, {case}" for layout in LAYOUTS for name in rules_of(layout) for case in CASES]


@pytest.mark.parametrize("title", [*LAYOUTS, *TITLES])
def test_as_on_one_device(failures: dict[str, str], title: str) -> None:
    """However gradients are divided, a step is that of one device."""
    assert title not in failures, failures[title]


if __name__ == "__main__":
    main(*sys.argv[1:])
