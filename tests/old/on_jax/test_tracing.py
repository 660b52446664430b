"""Clipping inside JAX's transformations: traced once, exported, batched, in control flow."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import uniclip as uc
from tracing import CASES, Halving, everything, leaves, same, values

EVERY_CASE = pytest.mark.parametrize(("by", "limit"), CASES.values(), ids=CASES)


def given(by: float = 1.0) -> Any:
    """Return gradients in JAX."""
    return jax.tree.map(jnp.asarray, values(by))


def shapes(rows: Any = 4, dtype: Any = jnp.float32) -> Any:
    """Return what gradients look like."""
    return {"w": jax.ShapeDtypeStruct((rows, 3), dtype), "b": [jax.ShapeDtypeStruct((rows,), dtype), None]}


def test_one_trace() -> None:
    """Limits and values of any size go through one trace of every function."""
    traces = []

    @jax.jit
    def clip(grads: Any, limit: float) -> Any:
        traces.append(limit)
        return everything(grads, limit)

    for by, limit in CASES.values():
        same(clip(given(by), limit), everything(values(by), limit))
    assert len(traces) == 1


def test_equal_rules_share_a_trace() -> None:
    """A rule can be a static argument: an equal one compiles nothing anew, another one does."""
    traces = []

    @partial(jax.jit, static_argnums=1)
    def clip(grads: Any, rule: uc.Rule) -> Any:
        traces.append(rule)
        return uc.clip(grads, rule)[0]

    for limit in (0.5, 0.5, 2.0, 0.5):
        same(clip(given(), uc.by_global_norm(limit)), uc.clip(values(), uc.by_global_norm(limit))[0])
    assert traces == [uc.by_global_norm(0.5), uc.by_global_norm(2.0)]


def test_steps() -> None:
    """A rule that counts steps is traced once, and its state is the carry of scan and of fori_loop."""
    rule, traces = uc.Rule(Halving(4.0)), []

    @jax.jit
    def step(state: Any, grads: Any) -> Any:
        traces.append(state)
        clipped, state, report = rule.update(grads, state)
        return state, (clipped["w"], report.limits)

    state, found = rule.init(given()), []
    for _ in range(4):
        state, result = step(state, given())
        found.append(result)
    assert len(traces) == 1
    assert [limit for _, limit in found] == [4.0, 2.0, 1.0, 0.5]
    copies = jax.tree.map(lambda g: jnp.stack([g] * 4), given())
    last, scanned = jax.lax.scan(step, rule.init(given()), copies)
    assert last.step == 4
    same(scanned[0], jnp.stack([clipped for clipped, _ in found]))
    looped = jax.lax.fori_loop(0, 3, lambda _, state: step(state, given())[0], rule.init(given()))
    same(step(looped, given())[1], found[3])


@EVERY_CASE
def test_cond(by: float, limit: float) -> None:
    """Both branches of lax.cond can clip, each its own way."""
    clip = jax.jit(
        lambda which, grads, limit: jax.lax.cond(
            which, lambda g: uc.clip_by_norm(g, limit), lambda g: uc.clip_by_global_norm(g, limit)[0], grads
        )
    )
    same(clip(True, given(by), limit), uc.clip_by_norm(values(by), limit))
    same(clip(False, given(by), limit), uc.clip_by_global_norm(values(by), limit)[0])


def test_while_loop() -> None:
    """A loop that halves the norm until it is at most 1 ends where plain halving does."""

    def halved(grads: Any) -> Any:
        return uc.clip_by_global_norm(grads, uc.global_norm(grads) / 2)[0]

    found = jax.lax.while_loop(lambda grads: uc.global_norm(grads) > 1, halved, given(1000.0))
    wanted = values(1000.0)
    while uc.global_norm(wanted) > 1:
        wanted = halved(wanted)
    same(found, wanted)


def test_checkpoint() -> None:
    """Rematerialization changes no derivative of a clip."""

    def total(grads: Any) -> Any:
        clipped = jax.checkpoint(lambda g: uc.clip_by_global_norm(jax.tree.map(jnp.sin, g), 0.5)[0])(grads)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(clipped))

    def plain(grads: Any) -> Any:
        clipped = uc.clip_by_global_norm(jax.tree.map(jnp.sin, grads), 0.5)[0]
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(clipped))

    same(jax.jit(jax.grad(total))(given()), jax.grad(plain)(given()))


@pytest.mark.parametrize(
    "batched",
    [jax.vmap(jax.jit(everything)), jax.jit(jax.vmap(everything))],
    ids=["vmap of jit", "jit of vmap"],
)
def test_vmap(batched: Any) -> None:
    """A batch in which each example has its own scale and its own limit equals one call for each."""
    stacked = jax.tree.map(lambda *leaf: jnp.stack(leaf), *(given(by) for by, _ in CASES.values()))
    found = batched(stacked, jnp.asarray([limit for _, limit in CASES.values()]))
    for i, (by, limit) in enumerate(CASES.values()):
        same(jax.tree.map(lambda leaf, i=i: leaf[i], found), everything(values(by), limit))


def test_vmap_as_devices() -> None:
    """all_reduce over a named axis of vmap joins the norms of a batch."""

    def join(value: Any, op: str) -> Any:
        return {"sum": jax.lax.psum, "max": jax.lax.pmax}[op](value, "parts")

    for rule in (uc.by_global_norm(1.0), uc.by_global_norm(1.0, ord=np.inf), uc.by_block_rms(0.1)):
        clip = jax.vmap(lambda g, rule=rule: uc.clip(g, rule, all_reduce=join)[0], axis_name="parts")
        for by in (1.0, 1e30):
            same(clip(given(by)["w"]), uc.clip(values(by)["w"], rule)[0])


def is_report(node: Any) -> bool:
    """Whether a node is a report."""
    return isinstance(node, uc.Report)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_eval_shape(dtype: str) -> None:
    """Shapes and dtypes are known without values, and are those of the results."""
    limit = jax.ShapeDtypeStruct((), dtype if dtype == "int32" else jnp.float32)
    found = jax.eval_shape(everything, shapes(dtype=dtype), limit)
    wanted = everything(jax.tree.map(lambda g: jnp.asarray(g, dtype), given()), jnp.asarray(1, limit.dtype))
    wanted = jax.tree.map(lambda x: uc.Report(*x) if isinstance(x, uc.Report) else x, wanted, is_leaf=is_report)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    described = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (found, wanted)]
    assert described[0] == described[1]


@pytest.mark.parametrize("rows", ["4", "n"], ids=["fixed", "symbolic"])
def test_export(rows: str) -> None:
    """An exported function that was serialized clips other values, of other shapes where these are symbols."""
    [symbol] = export.symbolic_shape(rows)
    exported = export.export(jax.jit(lambda g, c: leaves(everything(g, c))))(
        shapes(symbol), jax.ShapeDtypeStruct((), jnp.float32)
    )
    loaded = export.deserialize(exported.serialize())
    for by, limit in CASES.values():
        for count in {4} if rows == "4" else {1, 2, 4}:
            cut = lambda tree, count=count: {"w": tree["w"][:count], "b": [tree["b"][0][:count], None]}
            same(loaded.call(cut(given(by)), jnp.float32(limit)), leaves(everything(cut(values(by)), limit)))


@pytest.mark.parametrize(
    "rule", [uc.adagc(warmup=1), uc.percentile_clipping(50, window=3), uc.zclip(warmup=2)], ids=repr
)
def test_export_of_a_state(rule: uc.Rule) -> None:
    """An exported step that was serialized learns as eager code does; its state comes and goes as arrays."""
    first = rule.init(given())
    arrays, structure = jax.tree.flatten(first)

    def step(grads: Any, state: Any) -> Any:
        clipped, new, _ = rule.update(grads, jax.tree.unflatten(structure, state))
        return clipped, jax.tree.leaves(new)

    looks = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    loaded = export.deserialize(export.export(jax.jit(step))(shapes(), looks).serialize())
    state, known = arrays, first
    for by in (1.0, 0.5, 30.0, 1.5):
        clipped, state = loaded.call(given(by), state)
        wanted, known, _ = rule.update(given(by), known)
        same((clipped, state), (wanted, jax.tree.leaves(known)))


SEVERAL = {
    "global": uc.by_global_norm(0.5),
    "each leaf": uc.by_norm(0.5),
    "last axis": uc.by_norm(0.5, axis=-1),
    "agc": uc.agc(0.1),
    "adagc": uc.adagc(warmup=0),
}


def test_vmap_of_some_leaves() -> None:
    """A batch of one leaf beside another that is the same for all equals one call for each."""
    params, single = given(3.0), given()["b"]
    states = {name: rule.init(given()) for name, rule in SEVERAL.items()}

    def clip(w: jax.Array, b: Any) -> Any:
        results = {name: rule.update({"w": w, "b": b}, states[name], params) for name, rule in SEVERAL.items()}
        return {name: (clipped, state, report.norms) for name, (clipped, state, report) in results.items()}

    trees = [given(by) for by in (0.1, 1.0, 20.0)]
    found = jax.vmap(clip, in_axes=(0, None))(jnp.stack([tree["w"] for tree in trees]), single)
    for number, tree in enumerate(trees):
        same(jax.tree.map(lambda leaf, number=number: leaf[number], found), clip(tree["w"], single))


def test_compiled_ahead() -> None:
    """A function lowered and compiled from shapes alone clips."""
    ahead = jax.jit(everything).lower(shapes(), jax.ShapeDtypeStruct((), jnp.float32)).compile()
    for by, limit in CASES.values():
        same(ahead(given(by), jnp.float32(limit)), everything(values(by), limit))
