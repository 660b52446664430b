"""JAX arrays sharded over devices: a step gives the result of one device, and gathers no leaf.

This file is also the script of two processes that share the devices.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import uniclip as uc
from kit.pool import launched
from uniclip.integrations.optax import scalars, to_optax

RULES: dict[str, Any] = {
    "global": uc.by_global_norm(1.0),
    "largest": uc.by_global_norm(0.5, ord=math.inf),
    "order 3": uc.by_global_norm(1.0, ord=3),
    "leaf": uc.by_norm(1.0),
    "groups": uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0] in "ac")),
    "mean square": uc.by_block_rms(0.1),
    "autoclip": uc.autoclip(20, window=4),
    "zclip": uc.zclip(warmup=2),
    "adagc": uc.adagc(warmup=2),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
    "spikes": uc.skip_spikes(2.0, window=4, warmup=2),
}
KEPT = {
    "agc": uc.agc(0.01),
    "last axis": uc.by_norm(0.5, axis=-1),
    "spam": uc.spam(factor=0.5, warmup=1),
}
"""Rules whose norms keep axes: only where arrays carry their sharding."""
SHAPES = {"a": (16, 6), "b": (8, 4), "c": (8,), "d": (4, 6)}
MIXED = {"a": P("x", "y"), "b": P("x"), "c": P(), "d": P(None, "y")}
DIVIDED = {"a": P("x", "y"), "b": P(("x", "y")), "c": P(("y", "x")), "d": P("x", "y")}
STEPS = ((0.5, 1.0), (1.0, 1.2), (30.0, 9.0))
"""The factor of the gradients of each step, and its loss."""
BAD = {"finite": None, "NaN": math.nan, "inf": math.inf}
KINDS = ("Auto", "Explicit")


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled() -> Iterator[None]:
    """Disable most optimizations of XLA: sharding and communication are settled before them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def mesh_of(kind: str, shape: tuple[int, int] = (4, 2)) -> Any:
    """Return all devices, as a mesh."""
    return jax.make_mesh(shape, ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)


def gradients(bad: float | None = None) -> dict[str, Any]:
    """Return gradients as NumPy arrays, one element of which may be non-finite."""
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    if bad is not None:
        # This element is in one device's shard.
        grads["a"][9, 5] = bad
    return grads


PARAMS = {name: np.cos(value) for name, value in gradients().items()}


def update(
    rules: dict[str, Any], grads: Any, states: Any, params: Any, loss: Any, **joined: Any
) -> Any:
    """Return the results, the state and the report of each rule, by name."""
    results = {}
    for name, rule in rules.items():
        mine = loss if name == "spikes" else None
        clipped, state, report = rule.update(grads, states[name], params, loss=mine, **joined)
        results[name] = clipped, state, (report.norms, report.finite, report.skipped)
    return results


def third(rules: dict[str, Any], step: Any, put: Callable[[Any], Any], case: str) -> Any:
    """Return the results of the third step; only its gradients may be non-finite."""
    states, results = {name: rule.init(put(PARAMS)) for name, rule in rules.items()}, None
    for number, (by, loss) in enumerate(STEPS):
        grads = gradients(BAD[case] if number == len(STEPS) - 1 else None)
        results = step(
            put({name: np.float32(by) * g for name, g in grads.items()}), states, put(PARAMS), loss
        )
        states = {name: state for name, (_, state, _) in results.items()}
    return results


def placed(specs: dict[str, P], mesh: Any) -> Callable[[Any], Any]:
    """Return a function that shards arrays; each process creates its own shards."""

    def put(tree: Any) -> Any:
        places = {name: NamedSharding(mesh, specs[name]) for name in tree}
        make = jax.make_array_from_callback
        return {
            name: make(g.shape, places[name], lambda index, g=g: g[index])
            for name, g in tree.items()
        }

    return put


FEW = {name: (RULES | KEPT)[name] for name in ("global", "agc", "adagc", "zclip", "skip")}
ONE = {"kept": RULES | KEPT, "named": RULES, "few": FEW}
ON_ONE = {key: jax.jit(partial(update, rules)) for key, rules in ONE.items()}


def compare(key: str, case: str, found: Any, put: Callable[[Any], Any]) -> None:
    """Require the local shards to equal those of one device, with the same placement.

    All else is equal on all devices.
    """
    wanted = third(
        ONE[key], ON_ONE[key], lambda tree: {k: jax.numpy.asarray(g) for k, g in tree.items()}, case
    )
    places = {name: leaf.sharding for name, leaf in put(PARAMS).items()}
    for name, (clipped, state, shown) in found.items():
        one = wanted[name]
        for leaf, place in places.items():
            assert clipped[leaf].sharding.is_equivalent_to(place, clipped[leaf].ndim), (
                f"{name}, {leaf} moves"
            )
        here, there = jax.tree.leaves((clipped, state, shown)), jax.tree.leaves(one)
        for array, whole in zip(here, map(np.asarray, there), strict=True):
            for part in array.addressable_shards:
                bound = {"rtol": 2e-6, "atol": 1e-6, "err_msg": f"{name}, {case}"}
                np.testing.assert_allclose(part.data, whole[part.index], **bound)
        if name not in KEPT:
            for array in jax.tree.leaves((state, shown)):
                bits = {np.asarray(part.data).tobytes() for part in array.addressable_shards}
                assert len(bits) == 1, f"{name}, {case}: devices show different bits"


@pytest.fixture(scope="module", params=KINDS)
def compiled(request: pytest.FixtureRequest) -> Any:
    """Return all rules as one program for sharded arrays, and their sharding."""
    put = placed(MIXED, mesh_of(request.param))
    states = {name: rule.init(put(PARAMS)) for name, rule in ONE["kept"].items()}
    lowered = jax.jit(partial(update, ONE["kept"])).lower(put(PARAMS), states, put(PARAMS), 1.0)
    return lowered.compile(), put


@pytest.mark.parametrize("case", BAD)
def test_jit(compiled: Any, case: str) -> None:
    """Under jit, sharded arrays give the results of one device, and keep their sharding."""
    program, put = compiled
    places = program.input_shardings[0]

    def step(grads: Any, states: Any, params: Any, loss: Any) -> Any:
        return program(*jax.device_put((grads, states, params, np.float32(loss)), places))

    compare("kept", case, third(ONE["kept"], step, put, case), put)


def test_nothing_is_gathered(compiled: Any) -> None:
    """No rule gathers a leaf on a device."""
    assert not re.findall(r".* all-gather(?:-start)?\(.*", compiled[0].as_text())


def reductions(function: Callable[..., Any], *args: Any) -> int:
    """Return the number of all-reduces of a program, branches included.

    Require that nothing is gathered.
    """
    text = jax.jit(function).lower(*args).compile().as_text()
    assert not re.search(r" all-gather(-start)?\(", text)
    return len(re.findall(r" all-reduce(?:-start)?\(", text))


@pytest.mark.parametrize("kind", KINDS)
def test_few_reductions(kind: str) -> None:
    """Rules need at most two all-reduces more than optax's global norm."""
    mesh = mesh_of(kind)
    places = [NamedSharding(mesh, spec) for spec in (P("x", "y"), P("x", None)) * 8]
    grads = [jax.device_put(np.ones((64, 32), "float32"), place) for place in places]
    native = optax.clip_by_global_norm(1.0)
    most = 2 + reductions(lambda grads: native.update(grads, native.init(grads)), grads)
    for name in ("global", "agc", "zclip"):
        rule = (RULES | KEPT)[name]
        found = reductions(
            lambda *args, rule=rule: rule.update(*args)[:2], grads, rule.init(grads), grads
        )
        assert found <= most, f"{name}: {found} all-reduces, not {most}"


@pytest.fixture(scope="module", params=[("Auto", "mixed"), ("Explicit", "divided")], ids="-".join)
def mapped(request: pytest.FixtureRequest) -> Any:
    """Return all rules as one shard_map program.

    Each device has shards or replicas, and its own loss.
    """
    kind, way = request.param
    mesh, specs = mesh_of(kind), MIXED if way == "mixed" else DIVIDED

    def here(grads: Any, states: Any, params: Any, losses: Any) -> Any:
        return update(RULES, grads, states, params, losses[0], all_reduce=("x", "y"))

    out = {name: (specs, P(), P()) for name in RULES}
    step = jax.jit(
        jax.shard_map(here, mesh=mesh, in_specs=(specs, P(), specs, P(("x", "y"))), out_specs=out)
    )
    spread, place = (
        np.linspace(-0.3, 0.3, mesh.size, dtype="float32"),
        NamedSharding(mesh, P(("x", "y"))),
    )

    def whole(grads: Any, states: Any, params: Any, loss: Any) -> Any:
        return step(grads, states, params, jax.device_put(np.float32(loss) + spread, place))

    return whole, placed(specs, mesh)


@pytest.mark.parametrize("case", BAD)
def test_shard_map(mapped: Any, case: str) -> None:
    """In shard_map, named axes join the shards.

    Replicas count once, and the loss is the mean.
    """
    step, put = mapped
    compare("named", case, third(RULES, step, put, case), put)


@pytest.mark.parametrize("name", ["agc", "last axis"])
def test_kept_axes_are_refused(name: str) -> None:
    """With named axes, rules that keep axes are refused: the sharded axis of a leaf is unknown."""
    run = lambda grads: uc.clip(grads, KEPT[name], grads, "x")[0]
    with pytest.raises(ValueError, match="all_reduce="):
        jax.shard_map(run, mesh=mesh_of("Auto"), in_specs=P(None, "x"), out_specs=P(None, "x"))(
            np.ones((4, 8))
        )


@pytest.mark.parametrize("name", ["global", "largest", "leaf"])
def test_derivatives(name: str) -> None:
    """Derivatives go through the collectives in shard_map, those of replicas too."""
    rule, specs = RULES[name], {"part": P("x"), "copy": P()}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    grads, weights = (
        {"part": rng.random((8, 3), "f"), "copy": rng.random(5, "f")}
        for rng in map(np.random.default_rng, (0, 1))
    )
    joined = jax.shard_map(
        lambda g: uc.clip(g, rule, all_reduce="x")[0], mesh=mesh, in_specs=(specs,), out_specs=specs
    )

    def slope(clip: Any) -> Any:
        # Outside of jit, JAX would compile each operation on its own.
        total = lambda g: sum(jax.numpy.sum(clip(g)[name] * weights[name]) for name in g)
        return jax.jit(jax.grad(total))

    found, wanted = (slope(clip)(grads) for clip in (joined, lambda g: uc.clip(g, rule)[0]))
    for leaf in grads:
        np.testing.assert_allclose(found[leaf], wanted[leaf], rtol=1e-5, atol=1e-6)


def test_outside_of_jit() -> None:
    """Outside of jit the results are the same, also if squares overflow."""
    put = placed(MIXED, mesh_of("Auto"))
    compare("few", "finite", third(FEW, partial(update, FEW), put, "finite"), put)
    large = {name: g * np.float32(1e30) for name, g in gradients().items()}
    np.testing.assert_allclose(uc.global_norm(put(large)), uc.global_norm(large), rtol=1e-6)


def test_without_names() -> None:
    """Where types do not mark replicas, ``shared=`` does: with ``check_vma=False`` and in pmap."""
    grads = {"part": np.arange(8.0, dtype="float32"), "copy": np.ones(3, "float32")}
    shared = lambda path, leaf: path[0] == "copy"
    specs = {"part": P("x"), "copy": P()}
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    norm = lambda grads: uc.clip(grads, RULES["global"], None, "x", shared)[1].norms
    found = jax.shard_map(norm, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)(grads)
    np.testing.assert_allclose(found, uc.global_norm(grads), rtol=1e-6)
    each = {"part": grads["part"].reshape(8, 1), "copy": np.stack([grads["copy"]] * 8)}
    np.testing.assert_allclose(
        jax.pmap(norm, axis_name="x")(each), [uc.global_norm(grads)] * 8, rtol=1e-6
    )


@pytest.mark.needs("optax")
def test_optax() -> None:
    """The state and logs of the optax wrapper are those of one device where axes are named."""
    mesh = mesh_of("Auto")
    put = placed(MIXED, mesh)
    for name in ("autoclip", "skip"):
        alone = to_optax(RULES[name], optax.trace(0.9))
        optimizer = to_optax(RULES[name], optax.trace(0.9), axis_name=("x", "y"))
        one, mine = alone.init(PARAMS), optimizer.init(put(PARAMS))
        like = jax.tree.map_with_path(
            lambda path, _: MIXED.get(getattr(path[-1], "key", ""), P()), mine
        )
        step = jax.jit(
            jax.shard_map(
                optimizer.update, mesh=mesh, in_specs=(MIXED, like), out_specs=(MIXED, like)
            )
        )
        for case in ("finite", "NaN", "finite"):
            wanted, one = alone.update(gradients(BAD[case]), one)
            found, mine = step(put(gradients(BAD[case])), mine)
            for leaf, whole in wanted.items():
                np.testing.assert_allclose(
                    found[leaf], whole, rtol=1e-6, atol=1e-7, err_msg=f"{name}, {leaf}"
                )
        logs, shown = scalars(one), scalars(mine)
        assert logs.keys() == shown.keys()
        np.testing.assert_allclose(
            list(shown.values()), list(logs.values()), rtol=1e-6, err_msg=str(list(logs))
        )


def test_two_processes() -> None:
    """Two processes of four devices each give the results of one device."""
    paths = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    flags = "--xla_force_host_platform_device_count=4"
    launched(__file__, PYTHONPATH=paths, XLA_FLAGS=flags, JAX_DISABLE_MOST_OPTIMIZATIONS="1")


def main() -> None:
    """Compare as one of two processes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"localhost:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(where, 2, int(os.environ["RANK"]), initialization_timeout=60)
    put, step = placed(MIXED, mesh_of("Auto")), jax.jit(partial(update, FEW))
    for case in BAD:
        compare("few", case, third(FEW, step, put, case), put)


if __name__ == "__main__":
    main()
