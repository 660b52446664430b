"""Compiled programs of many leaves: their size grows linearly, and JAX can transform them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import uniclip as uc

pytestmark = pytest.mark.compiled
MANY = 80
DERIVED = 36
"""The number of leaves of derivatives, which take long outside of jit."""
SOME: dict[str, Any] = {
    "global": uc.by_global_norm(2.0),
    "by_norm": uc.by_norm(0.5),
    "agc": uc.agc(0.3, axis=-1),
    "zclip": uc.zclip(z=0.5, warmup=2),
    "adagc": uc.adagc(warmup=1),
}
RULES = SOME | {
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "skip_above": uc.by_global_norm(1.0, skip_above=9.0),
    "zero": uc.by_global_norm(1.0, nonfinite="zero"),
    "autoclip": uc.autoclip(window=16),
    "skip_spikes": uc.skip_spikes(window=16, warmup=4),
    "masked": uc.masked(uc.by_global_norm(1.0), lambda path, leaf: path[0] % 2),
    "groups": uc.Rule(1.0, scope=uc.scopes.groups(lambda path, leaf: path[0] % 4)),
    "by_block_rms": uc.by_block_rms(0.1),
    "chain": uc.chain(uc.agc(0.1, axis=-1), uc.by_global_norm(1.0)),
}


def leaves(count: int = MANY, scale: float = 1.0) -> list[np.ndarray]:
    """Return gradients of shape 4x2, of many magnitudes."""
    rng = np.random.default_rng(0)
    return [
        (scale * (number % 7) * rng.standard_normal((4, 2))).astype("f") for number in range(count)
    ]


def step(rule: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """Return the results of a rule, and its state.

    Parameters belong to the library of the gradients.
    """
    like = np.asarray if isinstance(grads[0], np.ndarray) else jnp.asarray
    params = [like(np.cos(array)) for array in leaves(len(grads))]
    clipped, state, _ = rule.update(grads, state, params, loss=1.0)
    return clipped, state


@pytest.fixture
def _quickly() -> Iterator[None]:
    """Compile without LLVM's optimizations, which neither values nor XLA's instructions need."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.usefixtures("_quickly")
def test_programs_grow_as_the_leaves_do(name: str) -> None:
    """XLA's instructions grow no faster than the leaves.

    A jaxpr does not show copies.
    """

    def instructions(count: int) -> int:
        grads, rule = leaves(count), RULES[name]
        program = (
            jax.jit(partial(step, rule))
            .lower(list(map(jnp.asarray, grads)), rule.init(grads))
            .compile()
        )
        return int(program.as_text().count(" = "))

    few, many, most = (instructions(count) for count in (8, MANY, 2 * MANY))
    assert most - many <= 1.5 * (many - few) * MANY / (MANY - 8)


@pytest.mark.needs("tensorflow")
def test_xla_from_tensorflow() -> None:
    """Programs that TensorFlow compiles with XLA grow linearly, too."""
    import tensorflow as tf

    def instructions(count: int) -> int:
        rule = uc.by_global_norm(1.0, nonfinite="skip")
        grads = list(map(tf.constant, leaves(count)))
        program = tf.function(
            lambda some: uc.clip(some, rule)[0], jit_compile=True, autograph=False
        )
        return int(program.experimental_get_compiler_ir(grads)(stage="optimized_hlo").count(" = "))

    few, many, most = (instructions(count) for count in (8, MANY, 2 * MANY))
    assert most - many <= 1.5 * (many - few) * MANY / (MANY - 8)


def gpt2(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """Return the shapes of the 148 parameters of GPT-2."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *layers * block, (width,), (width,)]


def kernels(program: str) -> tuple[int, int]:
    """Return how many operations each run of a compiled program starts, and its conditionals."""
    main = program[program.index("\nENTRY ") :]
    names = re.findall(r"^  .*? = .*? ([a-z-]+)\(", main, re.MULTILINE)
    views = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "conditional"}
    return sum(name not in views for name in names), names.count("conditional")


@pytest.mark.needs("optax")
def test_a_step_starts_no_more_than_with_optax() -> None:
    """A step of AdamW on GPT-2 starts no more kernels than with optax' own clipping.

    With JAX 0.10 it is 824 and 958 (447 without clipping).
    """
    import optax

    from uniclip.integrations.optax import to_optax

    def program(clipping: Any) -> str:
        transform = optax.chain(clipping, optax.adamw(1e-3))
        params = [jax.ShapeDtypeStruct(shape, "float32") for shape in gpt2()]

        def train(params: Any, grads: Any, state: Any) -> Any:
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(transform.init, params)
        compiled = jax.jit(train, donate_argnums=(0, 2)).lower(params, params, state).compile()
        return str(compiled.as_text())

    ours, conditionals = kernels(program(to_optax(uc.by_global_norm(1.0))))
    theirs, _ = kernels(program(optax.clip_by_global_norm(1.0)))
    assert conditionals == 0
    assert len(gpt2()) < ours <= theirs


SIZES = {"usual": 1.0, "tiny": 1e-30, "huge": 1e25, "edge": 2e19, "zero": 0.0}
"""Elements whose float32 squares are in range, underflow, or overflow."""
LEAVES_ON = {"cpu": 3, "gpu": 4, "tpu": 5}
"""The number of leaves of a tree that is on a kind of device only."""


@pytest.mark.needs("optax")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("name", ["by_global_norm", "by_norm", "by_block_rms", "agc"])
def test_large_leaves_on_each_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Programs for one device of each kind have no conditional and give no warning: with float64,
    with float32 sums (as on a GPU), and without float64 (as on a TPU).
    """
    from uniclip.integrations.optax import scalars, to_optax

    monkeypatch.setattr(jax, "default_backend", lambda: kind)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.clear_caches()
    rule = getattr(uc, name)(1e-3)
    transform = to_optax(rule)
    rng = np.random.default_rng(0)
    # What is known of a tree is kept, and a process has one kind of device in truth.
    count = LEAVES_ON[kind]
    for size in SIZES.values():
        values = [
            (size * rng.uniform(0.5, 1.5, (256, 128))).astype("float32") for _ in range(count)
        ]
        params = [np.ones((256, 128), "float32")] * count
        grads = list(map(jnp.asarray, values))
        given = (grads, transform.init(params), list(map(jnp.asarray, params)))
        lowered = jax.jit(transform.update).lower(*given)
        assert "stablehlo.case" not in lowered.as_text()
        clipped, state = lowered.compile()(*given)
        wanted, report = uc.clip(
            [value.astype("float64") for value in values],
            rule,
            params=params if name == "agc" else None,
        )
        largest = report.scalars()["clip/norm"]
        np.testing.assert_allclose(float(scalars(state)["clip/norm"]), largest, rtol=5e-7)
        for new, leaf in zip(clipped, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(new), leaf, rtol=2e-6)


def test_sums_of_examples_are_contractions() -> None:
    """A product of a vector and a matrix sums the examples of a leaf, in full float32."""
    grads = [jnp.asarray(array).reshape(4, 2, 1) for array in leaves(3)]
    summed = jax.jit(lambda trees: uc.clip_and_sum(trees, uc.by_example_norm(0.5))[0])
    products = re.findall("stablehlo.dot_general.*", summed.lower(grads).as_text())
    assert len(products) == len(grads)
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)


@pytest.mark.parametrize(
    ("kind", "size"),
    # Without float64, a second derivative of norms of 1e12 is less than the least float32 number.
    [("gpu", 1.0), ("gpu", 1e-12), ("gpu", 1e12), ("tpu", 1.0), ("tpu", 1e-12)],
)
@pytest.mark.usefixtures("_quickly")
def test_derivatives_on_each_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: float
) -> None:
    """First and second derivatives of float32 sums are those of a CPU, also beside zeros."""

    def derived(count: int) -> list[np.ndarray]:
        jax.clear_caches()
        x = size * jnp.asarray([3.0, -4.0, 0.0, 1.0], "float32")
        clip = lambda x: uc.clip_by_global_norm([x, *[0 * x] * count], size)[0][0]
        along = lambda x: (jnp.arange(4.0) * clip(x)).sum() / size
        slope = lambda x: size * jax.grad(along)(x)
        with_rows = jax.vmap(slope)(jnp.stack([x, 0.1 * x, 0 * x]))
        return list(
            map(np.asarray, jax.jit(lambda: (slope(x), jax.jacobian(slope)(x), with_rows))())
        )

    on_cpu = derived(LEAVES_ON["cpu"])
    monkeypatch.setattr(jax, "default_backend", lambda: kind)
    for found, wanted in zip(derived(LEAVES_ON[kind]), on_cpu, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def close(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    """Require trees to be nearly equal."""
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6),
        found,
        wanted,
    )


def total(rule: Any, state: Any, grads: Any) -> Any:
    """Return a number that depends on all results."""
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in step(rule, grads, state)[0])


def batched(function: Callable[[Any], Any], grads: Any) -> Any:
    """Return the second of three results of a batched function."""
    batch = jax.tree.map(lambda leaf: jnp.stack([2 * leaf, leaf, 0 * leaf]), grads)
    return jax.tree.map(lambda leaf: leaf[1], jax.jit(jax.vmap(function))(batch))


def scanned(rule: Any, grads: Any, state: Any) -> Any:
    """Return the result of the last of three steps, in one loop."""
    steps = jax.tree.map(lambda leaf: jnp.stack([leaf, 3 * leaf, leaf]), grads)
    last, every = jax.jit(partial(jax.lax.scan, lambda held, one: step(rule, one, held)[::-1]))(
        state, steps
    )
    return jax.tree.map(lambda leaf: leaf[-1], every), last


@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("_quickly")
def test_transformations(name: str) -> None:
    """Values are NumPy's with donated buffers, in batches and loops, and of exported programs."""
    rule, plain = SOME[name], leaves()
    grads, first = list(map(jnp.asarray, plain)), rule.init(plain)
    before = step(rule, leaves(scale=0.9), first)[1]
    state = jax.tree.map(jnp.asarray, before)
    wanted = step(rule, plain, before)

    program = jax.jit(partial(step, rule), donate_argnums=0).lower(grads, state).compile()
    assert program.memory_analysis().alias_size_in_bytes == MANY * 32
    close(program(jax.tree.map(jnp.copy, grads), state), wanted)

    close(batched(lambda leaf: step(rule, leaf, state), grads), wanted)

    after = [(None, first)]
    for size in (1.0, 3.0, 1.0):
        after.append(step(rule, leaves(scale=size), after[-1][1]))
    close(scanned(rule, grads, jax.tree.map(jnp.asarray, first)), after[-1], 1e-4)
    flat, form = jax.tree.flatten(state)
    bare = jax.jit(lambda grads, flat: jax.tree.leaves(step(rule, grads, form.unflatten(flat))))
    again = export.deserialize(export.export(bare)(grads, flat).serialize())
    close(again.call(grads, flat), jax.tree.leaves(wanted))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("_quickly")
def test_derivatives(name: str) -> None:
    """Derivatives are those outside of jit.

    The leaves are enough for two chunks of rows (32 each).
    """
    rule, plain = SOME[name], leaves(DERIVED)
    grads, first = list(map(jnp.asarray, plain)), rule.init(plain)
    before = step(rule, leaves(DERIVED, scale=0.9), first)[1]
    slope = jax.grad(partial(total, rule, jax.tree.map(jnp.asarray, before)))
    close(jax.jit(slope)(grads), slope(grads), 1e-4)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.usefixtures("_quickly")
def test_devices(name: str) -> None:
    """Leaves sharded over devices are clipped like full ones.

    No leaf is gathered, and there are few reductions.
    """
    rule, plain = SOME[name], leaves()
    mesh, state = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), rule.init(plain)
    wanted = step(rule, plain, state)
    parts = [jax.device_put(leaf, NamedSharding(mesh, P("x"))) for leaf in plain]
    whole = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P())), state)
    program = jax.jit(partial(step, rule)).lower(parts, whole).compile()
    close(program(parts, whole), wanted)
    text = program.as_text()
    assert not re.findall(r"all-gather(?:-start)?\(", text)
    most = {"global": 2, "zclip": 2, "agc": 2 * MANY}.get(name, MANY)
    assert len(re.findall(r"all-reduce(?:-start)?\(", text)) <= most
    if name in {"global", "zclip"}:
        inside = partial(rule.update, all_reduce="x")
        specs = jax.tree.map(lambda _: P(), state)
        shared = jax.jit(
            jax.shard_map(
                lambda g, s: inside(g, s)[:2],
                mesh=mesh,
                in_specs=(P("x"), specs),
                out_specs=(P("x"), specs),
            )
        )
        close(shared(parts, whole), wanted)
