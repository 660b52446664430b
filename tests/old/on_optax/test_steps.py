"""Steps of optimizers that clip by a rule, beside the loop that clips by hand and optax's own transformations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniclip as uc
from uniclip.integrations.optax import scalars, to_optax

RULES = {
    "global": uc.by_global_norm(1.0),
    "global, never": uc.by_global_norm(1e9),
    "each leaf": uc.by_norm(0.5),
    "each unit": uc.by_norm(0.5, axis=0),
    "block rms": uc.by_block_rms(0.3),
    "value": uc.by_value(-0.2, 0.2),
    "relative": uc.agc(0.1),
    "autoclip": uc.autoclip(50, window=5),
    "adagc": uc.adagc(warmup=2),
    "zclip": uc.zclip(warmup=3),
    "spam": uc.spam(factor=2.0, warmup=2),
    "skip NaN": uc.by_global_norm(1.0, nonfinite="skip"),
    "zero NaN": uc.by_global_norm(1.0, nonfinite="zero"),
    "skip spikes": uc.skip_spikes(3.0, window=8, warmup=3),
    "chain": uc.chain(uc.by_value(-0.9, 0.9), jnp.sin, uc.autoclip(50, window=5, nonfinite="skip")),
    "masked": uc.masked(uc.by_global_norm(0.5), lambda path, leaf: path[0] == "body"),
    "function": jnp.tanh,
}
SPOILED = {"skip NaN", "zero NaN", "skip spikes", "chain"}
"""The rules that a gradient of NaN does no harm to."""


def momentum() -> Any:
    """Return an optimizer with moments, a schedule's step count and weight decay that compiles quickly."""
    rate = optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0, 10))
    return optax.chain(optax.add_decayed_weights(0.1), optax.trace(0.9), rate)


PLAIN = momentum()
plain_update = jax.jit(PLAIN.update)


def start() -> dict[str, Any]:
    """Return parameters of several shapes."""
    rng = np.random.default_rng(1)
    w, b, head = (jnp.float32(rng.normal(size=shape)) for shape in [(4, 3), (3,), (3, 1)])
    return {"body": {"w": w, "b": b}, "head": [head]}


def steps_of(count: int = 9, *, spoiled: bool = False) -> list[tuple[Any, Any]]:
    """Return gradients and a loss for each step: one is a spike, and one is NaN if so wished."""
    rng = np.random.default_rng(2)
    sizes = [0.3] * count
    sizes[5] = 30.0
    sizes[7] = math.nan if spoiled else 0.1
    return [
        (jax.tree.map(lambda p: jnp.float32(size * rng.normal(size=p.shape)), start()), jnp.float32(1 + rng.random()))
        for size in sizes
    ]


def by_hand(rule: Any, steps: list[tuple[Any, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Clip, then step with the plain optimizer unless the rule leaves the step out; return weights and logs."""
    params, clipper, logs = start(), uc.Clipper(rule), []
    state = PLAIN.init(params)
    for grads, loss in steps:
        clipped = clipper(grads, params, loss=loss)
        logs.append(clipper.report.scalars())
        if clipper.report.skipped is None or not clipper.report.skipped:
            updates, state = plain_update(clipped, state, params)
            params = optax.apply_updates(params, updates)
    return params, logs


def step(optimizer: Any, carry: tuple[Any, Any], batch: tuple[Any, Any]) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Take a step as a training loop does."""
    (params, state), (grads, loss) = carry, batch
    updates, state = optimizer.update(grads, state, params, value=loss)
    return (optax.apply_updates(params, updates), state), scalars(state)


def loop(optimizer: Any, steps: list[tuple[Any, Any]], jit: Callable[..., Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Take the steps one by one."""
    carry, logs, once = (start(), optimizer.init(start())), [], jit(partial(step, optimizer))
    for batch in steps:
        carry, seen = once(carry, batch)
        logs.append(seen)
    return carry[0], logs


def scan(optimizer: Any, steps: list[tuple[Any, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Take the steps in one compiled loop."""
    batches = jax.tree.map(lambda *arrays: jnp.stack(arrays), *steps)
    (params, _), logs = jax.lax.scan(partial(step, optimizer), (start(), optimizer.init(start())), batches)
    return params, [{name: values[number] for name, values in logs.items()} for number in range(len(steps))]


RUNS = {
    "eager": lambda optimizer, steps: loop(optimizer, steps, lambda f: f),
    "jit": lambda optimizer, steps: loop(optimizer, steps, jax.jit),
    "scan": scan,
}


def close(one: Any, other: Any, rtol: float = 1e-5) -> None:
    """Compare trees; compiled code rounds in another order."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), one, other)


COMPILED = {
    "jit": ["global", "each unit", "relative", "adagc", "spam", "skip NaN", "skip spikes", "chain", "masked"],
    "scan": ["skip spikes", "adagc"],
}
"""The rules that also run compiled, which takes time."""


@pytest.mark.parametrize(
    ("name", "run"), [(name, run) for name in RULES for run in RUNS if name in COMPILED.get(run, RULES)]
)
def test_steps_are_those_of_the_loop_by_hand(name: str, run: str) -> None:
    """Clip, then step: weights and logs are the same, also over steps that are left out."""
    rule, steps = RULES[name], steps_of(spoiled=name in SPOILED)
    wanted, logs = by_hand(rule, steps)
    params, seen = RUNS[run](to_optax(rule, momentum()), steps)
    close(params, wanted)
    close(seen, logs)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["global", "relative"])
def test_a_chain_is_the_same(name: str) -> None:
    """Where no step is left out it does not matter whether the optimizer is inside or after the rule."""
    inside = loop(to_optax(RULES[name], momentum()), steps_of(), jax.jit)
    after = loop(optax.chain(to_optax(RULES[name]), momentum()), steps_of(), jax.jit)
    jax.tree.map(np.testing.assert_array_equal, after, inside)


@pytest.mark.parametrize("name", sorted({*RULES} - {"global, never"}))
def test_the_steps_are_such_that_rules_change_them(name: str) -> None:
    """Each rule clips some of the steps above."""
    steps = steps_of()
    plain, clipped = by_hand(uc.Rule(math.inf), steps)[0], by_hand(RULES[name], steps)[0]
    assert not np.allclose(clipped["body"]["w"], plain["body"]["w"], rtol=1e-3)


NATIVE = {
    "global norm": (optax.clip_by_global_norm, uc.by_global_norm),
    "value": (optax.clip, lambda c: uc.by_value(-c, c)),
    "block rms": (optax.clip_by_block_rms, uc.by_block_rms),
    "relative": (optax.adaptive_grad_clip, partial(uc.agc, eps=1e-3)),
}


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("limit", [0.05, 1.0, 100.0])
def test_optax_own(name: str, limit: float) -> None:
    """The updates are those of optax's transformations."""
    theirs, ours = NATIVE[name]
    params = start() if name != "relative" else {key: start()["body"][key] for key in ("w", "b")}
    one, two = theirs(limit), to_optax(ours(limit))
    for step_grads, _ in steps_of():
        grads = step_grads if name != "relative" else step_grads["body"]
        wanted, _ = one.update(grads, one.init(params), params)
        updates, _ = two.update(grads, two.init(params), params)
        close(updates, wanted, rtol=1e-6)


def moons() -> tuple[Any, Any]:
    """Return a small problem of classification."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4))
    return jnp.float32(x), jnp.float32(x @ [1.0, -2.0, 0.5, 3.0] > 0)


@pytest.mark.parametrize("name", NATIVE)
def test_migration(name: str) -> None:
    """Fifty steps of Adam on a network: the same weights, but for rounding, whoever clips.

    optax divides by the norm and multiplies by the limit, uniclip multiplies by one factor: a few units in the last
    place at each step, which fifty steps add up.
    """
    theirs, ours = NATIVE[name]
    limit = 0.05
    x, y = moons()
    params = {"w": jnp.full((4, 3), 0.5) + jnp.eye(4, 3), "b": jnp.ones(3), "v": jnp.ones((3, 1))}

    def loss(params: Any) -> Any:
        logits = (jnp.tanh(x @ params["w"] + params["b"]) @ params["v"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, y).mean()

    def train(clip: Any) -> Any:
        optimizer = optax.chain(clip, optax.adam(1e-2))

        @jax.jit
        def once(params: Any, state: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        now, state = params, optimizer.init(params)
        for _ in range(50):
            now, state = once(now, state)
        return now

    grads, clip = jax.grad(loss)(params), theirs(limit)
    unclipped = clip.update(grads, clip.init(params), params)[0]["w"] == grads["w"]
    assert not unclipped.all(), "nothing is clipped here"
    close(train(to_optax(ours(limit))), train(theirs(limit)))


def test_a_step_left_out_leaves_the_inner_state() -> None:
    """Moments, step counts, schedules and random keys stay bit for bit; the updates are exactly zero."""
    inner = optax.chain(
        optax.scale_by_adam(), optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.scale_by_schedule(lambda n: -n)
    )
    optimizer, params = to_optax(uc.by_global_norm(1.0, nonfinite="skip"), inner), start()
    grads, update = steps_of()[0][0], jax.jit(optimizer.update)
    _, before = update(grads, optimizer.init(params), params)
    updates, after = update(jax.tree.map(lambda g: g * jnp.nan, grads), before, params)
    same_keys(after.inner, before.inner)
    assert not any(np.count_nonzero(update) for update in jax.tree.leaves(updates))
    assert scalars(after)["clip/skipped"] == 1
    assert np.isnan(scalars(after)["clip/norm"])
    updates, after = update(grads, after, params)
    assert scalars(after)["clip/skipped"] == 0
    assert any(np.count_nonzero(update) for update in jax.tree.leaves(updates))


def same_keys(one: Any, other: Any) -> None:
    """Compare trees with random keys bit by bit."""
    plain = lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b), strict=True), one, other)


def test_in_a_chain_zeros_still_move_adam() -> None:
    """Why there is ``inner``: after the rule in a chain, a step left out is a step with zero gradients."""
    rule = uc.by_global_norm(1.0, nonfinite="skip")
    steps = steps_of(spoiled=True)
    chained, _ = loop(optax.chain(to_optax(rule), optax.adam(0.1)), steps, jax.jit)
    inside, _ = loop(to_optax(rule, optax.adam(0.1)), steps, jax.jit)
    assert not np.allclose(chained["body"]["w"], inside["body"]["w"], rtol=1e-3)


def test_the_loss() -> None:
    """A spike of the loss alone leaves the step out, if the loss is passed as ``value``; inner line searches get it."""
    rule = uc.skip_spikes(3.0, window=8, warmup=3)
    params, (grads, _) = start(), steps_of()[0]
    inner = optax.polyak_sgd(1.0)  # which cannot do without value
    optimizer = to_optax(rule, inner)
    state, plain = optimizer.init(params), inner.init(params)
    for loss in (1.0, 1.1, 0.9, 1.0, 50.0):
        updates, state = optimizer.update(grads, state, params, value=jnp.float32(loss))
        wanted, _ = inner.update(grads, plain, params, value=jnp.float32(loss))
        skipped = loss == 50.0
        assert scalars(state)["clip/skipped"] == skipped
        close(updates, jax.tree.map(lambda w: w * (not skipped), wanted))
