"""Files that flax and orbax write: what a `Clipper` and a rule's pure form remember comes back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import RULES, by_flax, by_orbax
from flax import serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import uniclip as uc


def steps_of(count: int = 8) -> list[Any]:
    """Return the gradients of some steps."""
    rng = np.random.default_rng(0)
    return [
        {"w": jax.numpy.asarray(size * rng.normal(size=(3, 2))), "b": jax.numpy.asarray(size * rng.normal(size=3))}
        for size in 10 ** rng.uniform(-1, 1, count)
    ]


def same(one: Any, other: Any) -> None:
    """Compare two trees bit by bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), one, other)


@pytest.mark.parametrize("file", [by_flax, by_orbax])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_pure_form(tmp_path: Path, rule: Any, file: Any) -> None:
    """The state is one more tree of arrays beside the parameters."""
    update = jax.jit(lambda grads, state: rule.update(grads, state)[:2])
    steps = steps_of()
    state = rule.init(steps[0])
    for grads in steps[:4]:
        _, state = update(grads, state)
    again = file(state, rule.init(steps[0]), tmp_path)
    for grads in steps[4:]:
        (wanted, state), (clipped, again) = update(grads, state), update(grads, again)
        same((clipped, again), (wanted, state))


@pytest.mark.parametrize("file", [by_flax, by_orbax])
def test_the_state_of_a_clipper(tmp_path: Path, file: Any) -> None:
    """So is that of a clipper."""
    rule, steps = RULES[3], steps_of()
    clipper, again = uc.Clipper(rule), uc.Clipper(rule)
    for grads in steps[:4]:
        clipper(grads)
    again.init(steps[0])
    again.state = jax.tree.map(jax.numpy.asarray, file(clipper.state, again.state, tmp_path))
    for grads in steps[4:]:
        same(again(grads), clipper(grads))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_state_dict(tmp_path: Path, rule: Any) -> None:
    """Plain values go into flax's files and, as JSON, into a step of orbax's manager."""
    steps, clipper = steps_of(), uc.Clipper(rule)
    for grads in steps[:4]:
        clipper(grads)
    (tmp_path / "clipper.msgpack").write_bytes(serialization.msgpack_serialize(clipper.state_dict()))
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(4, args=ocp.args.Composite(clipper=ocp.args.JsonSave(clipper.state_dict())))
        manager.wait_until_finished()
        by_json = manager.restore(4, args=ocp.args.Composite(clipper=ocp.args.JsonRestore())).clipper
    for saved in (serialization.msgpack_restore((tmp_path / "clipper.msgpack").read_bytes()), by_json):
        again, other = uc.Clipper(rule), uc.Clipper(rule)
        again.load_state_dict(saved)
        other.load_state_dict(clipper.state_dict())
        for grads in steps[4:]:
            same(again(grads), other(grads))
            same(again.state, other.state)


def divided(steps: list[Any], shape: tuple[int, int] | None) -> list[Any]:
    """Return gradients divided among the devices of a mesh of a shape, or on one device."""
    if shape is None:
        return jax.device_put(steps, jax.devices()[0])
    mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    places = {"w": NamedSharding(mesh, P("x", "y")), "b": NamedSharding(mesh, P(("x", "y")))}
    return [jax.device_put(grads, places) for grads in steps]


@pytest.mark.parametrize("rule", [uc.autoclip(50, window=6), uc.adagc(warmup=2), uc.spam(2.0, 0.5, 1)], ids=repr)
def test_another_mesh(tmp_path: Path, rule: Any) -> None:
    """A state goes from one mesh to another, and to one device; each rule goes on as if nothing had happened."""
    assert len(jax.devices()) == 2
    rng = np.random.default_rng(0)
    steps = [{"w": rng.normal(size=(4, 2)).astype("f"), "b": rng.normal(size=4).astype("f")} for _ in range(9)]
    update = jax.jit(lambda grads, state: rule.update(grads, state)[:2])
    whole = divided(steps, None)
    state = wanted = rule.init(whole[0])
    for part, shape in enumerate([(2, 1), (1, 2), None]):
        here = divided(steps, shape)
        like = rule.init(here[0])
        state = like if part == 0 else by_orbax(state, like, tmp_path / str(part))
        jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim) or pytest.fail(str(a)), state, like)
        for number in range(3 * part, 3 * part + 3):
            (clipped, state), (its, wanted) = update(here[number], state), update(whole[number], wanted)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (clipped, state), (its, wanted))
