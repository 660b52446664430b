"""Gradients in parts on two devices: the norm is that of the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import uniclip as uc
from uniclip.integrations.optax import scalars, to_optax

SPECS = {"w": PartitionSpec("part"), "b": PartitionSpec("part")}
PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.ones(2)}
GRADS = {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.asarray([1.0, 20.0])}
RULES = [uc.by_global_norm(1.0), uc.by_norm(2.0, nonfinite="skip"), uc.autoclip(20, window=4)]
ids = pytest.mark.parametrize("rule", RULES, ids=repr)


def mesh(kind: str = "Auto") -> Any:
    """Return a line of the two devices."""
    assert len(jax.devices()) == 2
    return jax.make_mesh((2,), ("part",), axis_types=(getattr(jax.sharding.AxisType, kind),))


def two_steps(update: Any, state: Any, grads: Any) -> tuple[Any, dict[str, Any]]:
    """Take two steps; return the second one's updates and logs."""
    _, state = update(jax.tree.map(lambda g: g / 2, grads), state)
    updates, state = update(grads, state)
    return updates, scalars(state)


def same(one: Any, other: Any) -> None:
    """Compare results; sums of parts round in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@ids
def test_jit(rule: Any, kind: str) -> None:
    """Under jit there is nothing to say: arrays are whole, whatever device holds a part, and stay where they are."""
    optimizer = to_optax(rule, optax.trace(0.9))
    wanted = two_steps(optimizer.update, optimizer.init(PARAMS), GRADS)
    places = jax.tree.map(lambda spec: NamedSharding(mesh(kind), spec), SPECS)
    params, grads = jax.device_put(PARAMS, places), jax.device_put(GRADS, places)
    updates, seen = two_steps(jax.jit(optimizer.update), optimizer.init(params), grads)
    same((updates, seen), wanted)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda u, place: u.sharding.is_equivalent_to(place, u.ndim), updates, places))
    )
    assert all(value.sharding.is_fully_replicated for value in seen.values())


@ids
def test_shard_map(rule: Any) -> None:
    """In shard_map each device sees its part; the axis by name joins the norms."""
    optimizer = to_optax(rule, axis_name="part")
    wanted = two_steps(to_optax(rule).update, to_optax(rule).init(PARAMS), GRADS)
    update = jax.jit(
        jax.shard_map(
            optimizer.update, mesh=mesh(), in_specs=(SPECS, PartitionSpec()), out_specs=(SPECS, PartitionSpec())
        )
    )
    same(two_steps(update, optimizer.init(PARAMS), GRADS), wanted)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_losses_in_shard_map(bad: int | None) -> None:
    """Where each device has a loss of its own, all of them see the mean, and skip the same steps."""
    rule = uc.skip_spikes(2.0, window=4, warmup=2)
    optimizer, alone = to_optax(rule, axis_name="part"), to_optax(rule)
    states = optimizer.init(PARAMS), alone.init(PARAMS)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(SPECS, PartitionSpec(), PartitionSpec("part")),
        out_specs=(SPECS, PartitionSpec()),
    )
    def update(grads: Any, state: Any, losses: Any) -> Any:
        return optimizer.update(grads, state, value=losses[0])

    for step, mean in enumerate((1.0, 1.2, 1.1, 9.0, 1.0)):
        losses = jnp.asarray([mean - 0.4, mean + 0.4])
        if step == 3 and bad is not None:
            losses = losses.at[bad].set(jnp.nan)
        grads = jax.tree.map(lambda g, by=1 + 0.1 * (step % 2): g * by, GRADS)
        updates, new = update(grads, states[0], losses)
        wanted, its = alone.update(grads, states[1], value=losses.mean())
        same((updates, new), (wanted, its))
        assert bool(its.skipped) == (step == 3)
        states = new, its


def test_without_the_axis_each_part_has_its_own_norm() -> None:
    """Why the axis has to be named."""
    optimizer = to_optax(uc.by_global_norm(1.0))
    spread = partial(jax.shard_map, mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS, check_vma=False)
    updates = jax.jit(spread(lambda grads: optimizer.update(grads, optimizer.init(grads))[0]))(GRADS)
    np.testing.assert_allclose(optax.tree_utils.tree_norm(updates), np.sqrt(2), rtol=1e-6)


def test_pmap() -> None:
    """So it is in pmap."""
    optimizer = to_optax(RULES[0], axis_name="part", shared=lambda path, leaf: False)
    parts = jax.tree.map(lambda g: g.reshape(2, -1, *g.shape[1:]), GRADS)
    update = jax.pmap(lambda grads: optimizer.update(grads, optimizer.init(grads)), axis_name="part")
    updates, state = update(parts)
    np.testing.assert_allclose(optax.tree_utils.tree_norm(updates), 1.0, rtol=1e-6)
    np.testing.assert_allclose(scalars(state)["clip/norm"], [optax.tree_utils.tree_norm(GRADS)] * 2, rtol=1e-6)
