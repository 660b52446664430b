"""Training with clipped gradients in JAX, transformed, on several devices, sparse, and in registered trees."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import oracle
import uniclip as uc
from frameworks import JAX
from promises import close

fw = JAX()
X = jnp.asarray(np.random.default_rng(0).standard_normal((64, 3)), "float32")
Y = X @ jnp.asarray([[3.0], [-2.0], [8.0]]) + 5
WAYS = pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])


def loss_of(weights: dict[str, Any], x: Any, y: Any) -> Any:
    """Return the mean squared error of a linear model; one weight is not used."""
    return jnp.mean((x @ weights["w"] + weights["b"] - y) ** 2)


def start() -> dict[str, Any]:
    """Return the weights to start from."""
    return {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1), "frozen": None}


def is_global_norm(old: Any, new: Any, limit: float) -> None:
    """Assert that gradients are clipped by their global norm, as plain loops do it."""
    assert jax.tree.structure(old) == jax.tree.structure(new)
    wanted = oracle.clip_global([np.asarray(g) for g in jax.tree.leaves(old)], limit)
    for a, b in zip(jax.tree.leaves(new), wanted, strict=True):
        close(fw, a, b, "float32")


def test_optax_step() -> None:
    """value_and_grad, a clip and an optax update in one jit learn as optax's own chain does, and compile once."""
    plain, traces = optax.sgd(0.1, momentum=0.5), []

    @jax.jit
    def step(weights: Any, state: Any, limit: Any) -> tuple[Any, ...]:
        traces.append(limit)
        loss, grads = jax.value_and_grad(loss_of)(weights, X, Y)
        clipped, norm = uc.clip_by_global_norm(grads, limit)
        updates, state = plain.update(clipped, state)
        return optax.apply_updates(weights, updates), state, loss, grads, clipped, norm

    chain = optax.chain(optax.clip_by_global_norm(3.0), plain)

    @jax.jit
    def native(weights: Any, state: Any) -> tuple[Any, Any]:
        updates, state = chain.update(jax.grad(loss_of)(weights, X, Y), state)
        return optax.apply_updates(weights, updates), state

    ours, theirs = (start(), plain.init(start())), (start(), chain.init(start()))
    history = []
    for _ in range(40):
        *ours, loss, grads, clipped, norm = step(*ours, 3.0)
        theirs = native(*theirs)
        is_global_norm(grads, clipped, 3.0)
        history.append((float(loss), float(norm)))
    assert history[0][1] > 3 > history[-1][1]
    assert history[-1][0] < 0.05 * history[0][0]
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for limit in (0.5, 1.0):
        *_, grads, clipped, _ = step(*ours, limit)
        is_global_norm(grads, clipped, limit)
    assert len(traces) == 1


def test_scan() -> None:
    """Training inside lax.scan, with a limit that changes from step to step, equals a Python loop and learns."""

    def step(weights: Any, limit: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(weights, X, Y)
        clipped, norm = uc.clip_by_global_norm(grads, limit)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, clipped), (loss, norm)

    limits = jnp.linspace(2.0, 6.0, 60)
    scanned, (losses, norms) = jax.jit(partial(jax.lax.scan, step))(start(), limits)
    weights, looped = start(), []
    for limit in limits:
        weights, (_, norm) = step(weights, limit)
        looped.append(norm)
    np.testing.assert_allclose(norms, looped, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    assert losses[-1] < 0.01 * losses[0]


@WAYS
def test_per_example(way: Any) -> None:
    """Vmap over examples clips each one's gradient by its own global norm, as the scope each_example does."""
    one = jax.grad(lambda w, x, y: loss_of(w, x[None], y[None]))
    each = jax.vmap(one, (None, 0, 0))(start(), X, Y)
    clipped = way(jax.vmap(lambda x, y: uc.clip_by_global_norm(one(start(), x, y), 20.0)[0]))(X, Y)
    scoped, report = way(lambda g: uc.clip(g, uc.Rule(20.0, scope=uc.scopes.each_example)))(each)
    native = [jax.tree.map(lambda g, i=i: g[i], each) for i in range(len(X))]
    assert 0 < int((report.factors < 1).sum()) < len(X)
    for i, grads in enumerate(native):
        for result in (clipped, scoped):
            is_global_norm(grads, jax.tree.map(lambda g, i=i: g[i], result), 20.0)


def along(x: Any) -> Any:
    """Return one direction's part of a gradient clipped to norm 2."""
    return jnp.asarray([1.0, -2.0, 3.0]) @ uc.clip_by_norm(x, 2.0)


@WAYS
def test_derivatives(way: Any) -> None:
    """grad, jvp, hessian and vmap of grad see the exact derivatives of the clip."""
    with jax.enable_x64(True):
        x, w = np.asarray([1.0, 2.0, -2.5]), np.asarray([1.0, -2.0, 3.0])
        n, s, mixed = np.linalg.norm(x), w @ x, np.outer(w, x)
        first = 2 * (w / n - s * x / n**3)
        second = 2 * ((-mixed - mixed.T - s * np.eye(3)) / n**3 + 3 * s * np.outer(x, x) / n**5)
        np.testing.assert_allclose(way(jax.grad(along))(x), first, rtol=1e-12)
        np.testing.assert_allclose(way(jax.hessian(along))(x), second, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(
            way(lambda x: jax.jvp(along, (x,), (x,)))(x)[1], 0, atol=1e-14
        )  # only the norm changes
        batch = way(jax.vmap(jax.grad(along)))(np.stack([x, 0.1 * x]))
        np.testing.assert_allclose(batch, [first, w], rtol=1e-12)


def test_derivative_of_the_limit() -> None:
    """The derivative for a traced limit is the clipped part of g/‖g‖."""
    grads = [jnp.asarray([3.0, 4.0]), jnp.asarray(12.0)]

    def total(limit: Any) -> Any:
        return sum(leaf.sum() for leaf in uc.clip_by_global_norm(grads, limit)[0])

    close(fw, jax.jit(jax.grad(total))(2.0), 19 / 13, "float32")
    assert jax.grad(total)(20.0) == 0


def join(value: Any, op: str) -> Any:
    """Join what each device has measured."""
    return jax.lax.psum(value, "shards") if op == "sum" else jax.lax.pmax(value, "shards")


def shards() -> Any:
    """Return a mesh of two devices."""
    return jax.make_mesh((2,), ("shards",))


def spread(values: Any, spec: PartitionSpec = PartitionSpec("shards")) -> jax.Array:  # noqa: B008 - immutable
    """Return an array in parts on two devices."""
    return jax.device_put(jnp.asarray(values, "float32"), NamedSharding(shards(), spec))


RULES = {
    "L1": uc.by_global_norm(1.0, ord=1),
    "L2": uc.by_global_norm(1.0),
    "L3": uc.by_global_norm(1.0, ord=3),
    "largest": uc.by_global_norm(1.0, ord=math.inf),
    "rms": uc.by_block_rms(0.1),
    "average": uc.by_average_norm(0.01),
}


@pytest.mark.parametrize(
    ("name", "way", "by"),
    [
        *[pytest.param(name, jax.jit, 1.0, id=f"{name}-jit") for name in RULES],
        *[pytest.param(name, jax.jit, 1e30, id=f"{name}-jit-huge") for name in RULES],
        # Traced too, and then compiled operation by operation, which takes long.
        *[pytest.param(name, lambda f: f, 1.0, id=f"{name}-eager") for name in ("L2", "average")],
    ],
)
def test_shard_map(name: str, way: Any, by: float) -> None:
    """Where each device has a part of the gradients, all_reduce makes the norm that of all parts, on every device."""
    rule = RULES[name]
    rng = np.random.default_rng(0)
    grads = [np.asarray(by * rng.standard_normal(shape), "float32") for shape in [(6, 3), (4,)]]
    spec = PartitionSpec("shards")
    clip = jax.shard_map(
        lambda g: uc.clip(g, rule, all_reduce=join), mesh=shards(), in_specs=spec, out_specs=(spec, PartitionSpec())
    )
    clipped, report = way(clip)([spread(g) for g in grads])
    wanted, wanted_report = uc.clip(grads, rule)
    for a, b in zip(
        [*clipped, *jax.tree.leaves(report.norms)], [*wanted, *jax.tree.leaves(wanted_report.norms)], strict=True
    ):
        close(fw, a, b, "float32", ulps=8)


LEARNING = {
    "adagc": uc.adagc(warmup=2),
    "units": uc.Rule(uc.limits.Ema(1.05, 0.9, warmup=1), scope=uc.scopes.unit(-1)),
    "adagn": uc.adagn(),
    "zclip": uc.zclip(warmup=2),
    "split": uc.Rule(uc.limits.Split(1.0, by_size=True), scope=uc.scopes.unit(-1)),
}


def test_shard_map_of_rules_that_learn() -> None:
    """Step after step, each device with its part learns what one device with all of the gradients does."""
    rng, spec, none = np.random.default_rng(0), PartitionSpec("shards"), PartitionSpec()
    grads = [np.asarray(rng.standard_normal(shape), "float32") for shape in [(6, 3), (4, 5), (4,)]]

    def every(states: Any, grads: Any) -> Any:
        results = {name: rule.update(grads, states[name], all_reduce=join) for name, rule in LEARNING.items()}
        return {name: result[1] for name, result in results.items()}, {name: r[0] for name, r in results.items()}

    step = jax.jit(jax.shard_map(every, mesh=shards(), in_specs=(none, spec), out_specs=(none, spec)))
    states = {name: rule.init([spread(g) for g in grads]) for name, rule in LEARNING.items()}
    known = {name: rule.init(grads) for name, rule in LEARNING.items()}
    for by in (1.0, 0.5, 40.0, 1.0):
        states, found = step(states, [spread(g * np.float32(by)) for g in grads])
        for name, rule in LEARNING.items():
            wanted, known[name], _ = rule.update([g * np.float32(by) for g in grads], known[name])
            for a, b in zip(*map(jax.tree.leaves, ((found[name], states[name]), (wanted, known[name]))), strict=True):
                np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("scope", [uc.scopes.unit(), uc.scopes.each_leaf], ids=str)
def test_shards_beside_copies(scope: uc.Scope, count: int) -> None:
    """What each device has alike stays known to be alike, beside gradients of which each has a part."""
    one = Mesh(np.asarray(jax.devices()[:1]), ("shards",))
    rule, whole = uc.Rule(0.1, scope=scope), PartitionSpec()

    def clip(parts: Any, copies: Any) -> Any:
        return uc.clip([parts, *copies], rule)[0][1:]

    run = jax.jit(jax.shard_map(clip, mesh=one, in_specs=(PartitionSpec("shards"), whole), out_specs=whole))
    copies = [jnp.ones((4, 3))] * count
    wanted = uc.clip(np.ones((4, 3), "float32"), rule)[0]
    for found in run(jnp.ones((4, 3)), copies):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_shards_need_all_reduce() -> None:
    """Without all_reduce each device would see its own part only: refused, unless a function says that it may."""
    spec = PartitionSpec("shards")

    def clipped(**joins: Any) -> Any:
        rule = uc.by_norm(1.0)
        clip = jax.shard_map(lambda g: uc.clip(g, rule, **joins)[0], mesh=shards(), in_specs=spec, out_specs=spec)
        return clip(spread([3.0, 4.0]))

    with pytest.raises(
        ValueError, match=r"all_reduce=None, but grads varies along the axis 'shards'.*all_reduce='shards'"
    ):
        clipped()
    np.testing.assert_allclose(clipped(all_reduce="shards"), [0.6, 0.8])
    np.testing.assert_allclose(clipped(all_reduce=lambda array, op: array), [1.0, 1.0])


@pytest.mark.parametrize("spec", [PartitionSpec("shards"), PartitionSpec(None, "shards"), PartitionSpec()], ids=str)
@pytest.mark.parametrize("limit", [1.0, 1000.0], ids=["above", "below"])
@WAYS
def test_sharding_is_kept(way: Any, limit: float, spec: PartitionSpec) -> None:
    """A gradient spread over devices is measured as a whole and stays spread as it was."""
    values = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    grad = spread(values, spec)
    clipped, norm = way(lambda g: uc.clip_by_global_norm(g, limit))(grad)
    rows = way(lambda g: uc.clip_by_norm(g, limit, axis=1))(grad)
    assert clipped.sharding.is_equivalent_to(grad.sharding, 2)
    assert rows.sharding.is_equivalent_to(grad.sharding, 2)
    close(fw, norm, np.linalg.norm(values.astype("float64")), "float32")
    close(fw, clipped, oracle.clip_leaf(values, limit), "float32")
    close(fw, rows, oracle.clip_axes(values, limit, (1,)), "float32")


@pytest.mark.parametrize(
    "rule", [uc.by_global_norm(1.0), uc.by_norm(1.0), uc.by_global_norm(1.0, ord=math.inf)], ids=repr
)
@pytest.mark.parametrize("first", [0, 1])
def test_two_devices(first: int, rule: uc.Rule) -> None:
    """Leaves on two devices share their norm in eager code, and each stays on its device."""
    devices = jax.devices()[first], jax.devices()[1 - first]
    for by in (1.0, 1e30):
        values = [[3.0 * by, 4.0 * by], [12.0 * by, 0.0]]
        grads = [jax.device_put(jnp.asarray(v), device) for v, device in zip(values, devices, strict=True)]
        clipped, _ = uc.clip(grads, rule)
        wanted, _ = uc.clip([np.asarray(v, "float32") for v in values], rule)
        for a, b, device in zip(clipped, wanted, devices, strict=True):
            assert a.devices() == {device}
            close(fw, a, b, "float32")


@pytest.mark.parametrize("order", [1, -1], ids=["mesh first", "mesh last"])
def test_mesh_and_one_device(order: int) -> None:
    """A gradient spread over a mesh and one on no particular device share their norm in eager code too."""
    wide = spread(np.arange(8.0))
    grads = [wide, jnp.asarray([2.0])][::order]
    clipped, norm = uc.clip_by_global_norm(grads, 6.0)
    close(fw, norm, 12.0, "float32")
    is_global_norm(grads, clipped, 6.0)
    assert clipped[::order][0].sharding.is_equivalent_to(wide.sharding, 1)


def table(data: Any) -> sparse.BCOO:
    """Return a sparse gradient of two entries, one of which is stored in two parts."""
    return sparse.BCOO((data, jnp.asarray([[7], [3], [7]])), shape=(1000,))


@WAYS
def test_sparse(way: Any) -> None:
    """A BCOO gradient stays one, is measured with its duplicates summed, and never as its dense form."""

    @way
    def clip(data: Any) -> tuple[Any, ...]:
        grad = table(data)
        return (
            uc.clip_by_global_norm([grad, jnp.asarray(84.0)], 8.5),
            uc.clip_by_value(grad, -4, 4),
            uc.clip_by_norm(grad, 1.0),
        )

    (clipped, norm), by_value, by_norm = clip(jnp.asarray([3.0, 12.0, 2.0]))
    close(fw, norm, 85.0, "float32")
    dense = np.zeros(1000)
    dense[[7, 3]] = [5.0, 12.0]
    for result, wanted in [(clipped[0], dense / 10), (by_value, dense.clip(-4, 4)), (by_norm, dense / 13)]:
        assert isinstance(result, sparse.BCOO)
        close(fw, fw.dense(result), wanted, "float32")


@WAYS
def test_huge_embedding(way: Any) -> None:
    """Only stored entries take memory: the dense form of this gradient would need 38 GB."""
    shape = (148_331_760, 64)
    rows = sparse.BCOO((jnp.ones((3, 64)), jnp.asarray([[7], [shape[0] - 1], [7]])), shape=shape)
    entries = sparse.BCOO(
        (jnp.asarray([3.0, 3.0, 4.0]), jnp.asarray([[7, 3], [7, 3], [shape[0] - 1, 63]])), shape=shape
    )
    clipped, norm = way(lambda g: uc.clip_by_global_norm(g, 1.0))([rows, entries])
    close(fw, norm, math.sqrt(5 * 64 + 36 + 16), "float32")
    close(fw, uc.global_norm(clipped), 1.0, "float32")
    _, report = way(lambda g: uc.clip(g, uc.by_block_rms(1.0)))([rows])
    close(fw, report.norms[0], math.sqrt(5 * 64 / (shape[0] * shape[1])), "float32")
    bounded = way(lambda g: uc.clip_by_value(g, -1, 1))(entries)
    close(fw, uc.global_norm(bounded), math.sqrt(2), "float32")


@WAYS
def test_many_duplicates_and_padding(way: Any) -> None:
    """Entries that occur often are summed in float32, and padding, whose index is beyond the shape, counts 0."""
    grad = sparse.BCOO((jnp.ones(3000, "bfloat16"), jnp.zeros((3000, 1), int).at[2000:].set(2)), shape=(2,))
    clipped, norm = way(lambda g: uc.clip_by_global_norm(g, 10.0))(grad)
    assert norm == 2000
    assert clipped.dtype == "bfloat16"
    assert clipped.todense().tolist() == [10, 0]


def test_other_sparse_kinds_are_refused() -> None:
    """Of a kind whose indices would be taken for gradients, none is changed: an error names BCOO."""
    with pytest.raises(TypeError, match=r"grads\['w'\] is a jax\.experimental\.sparse.*BCSR.*only BCOO"):
        uc.clip_by_norm({"w": sparse.BCSR.fromdense(jnp.eye(3))}, 1.0)


def test_sparse_training() -> None:
    """Descent on the entries of a sparse gradient, clipped inside jit, learns."""

    @jax.jit
    def step(weights: Any) -> tuple[Any, Any]:
        loss, data = jax.value_and_grad(lambda d: jnp.sum((weights[jnp.asarray([7, 3, 7])] + d - 9.0) ** 2))(
            jnp.zeros(3)
        )
        clipped, _ = uc.clip_by_global_norm(table(data), 4.0)
        return weights.at[clipped.indices[:, 0]].add(-0.2 * clipped.data, mode="drop"), loss

    weights, losses = jnp.zeros(1000), []
    for _ in range(60):
        weights, loss = step(weights)
        losses.append(float(loss))
    assert losses[-1] < 1e-3 * losses[0]


@flax.struct.dataclass
class Dense:
    """A flax dataclass with a field that is no gradient."""

    kernel: Any
    bias: Any
    name: str = flax.struct.field(pytree_node=False, default="dense")


@jax.tree_util.register_pytree_node_class
class Pair:
    """A class that registers how to flatten itself."""

    def __init__(self, kernel: Any, bias: Any) -> None:
        self.kernel, self.bias = kernel, bias

    def tree_flatten(self) -> tuple[Any, None]:
        """Return the children."""
        return (self.kernel, self.bias), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Pair:
        """Put them back."""
        return cls(*children)


@partial(jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=["activation"])
@dataclasses.dataclass(frozen=True)
class Layer:
    """A frozen dataclass with a static field, as equinox's modules are."""

    kernel: Any
    bias: Any
    activation: Any = jnp.tanh


@WAYS
@pytest.mark.parametrize("cls", [Dense, Pair, Layer, lambda kernel, bias: flax.core.freeze({"k": kernel, "b": bias})])
def test_registered_nodes(cls: Any, way: Any) -> None:
    """Classes that JAX knows come back as they were, static fields included, nested in other containers too."""
    grads = {"layers": [cls(jnp.asarray([3.0, 4.0]), None), (cls(jnp.asarray([[12.0]]), jnp.asarray(84.0)),)]}
    clipped, norm = way(lambda g: uc.clip_by_global_norm(g, 8.5))(grads)
    close(fw, norm, 85.0, "float32")
    is_global_norm(grads, clipped, 8.5)
    assert type(clipped["layers"][1][0]) is type(grads["layers"][1][0])


def test_nnx_training() -> None:
    """The gradients of a flax.nnx module go in and come out as its optimizer wants them, and it learns."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    opt = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, opt: Any) -> tuple[Any, ...]:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(X) - Y) ** 2))(model)
        clipped, norm = uc.clip_by_global_norm(grads, 3.0)
        opt.update(model, clipped)
        return loss, grads, clipped, norm

    losses = []
    for _ in range(60):
        loss, grads, clipped, norm = step(model, opt)
        assert type(clipped) is type(grads)
        is_global_norm(grads, clipped, 3.0)
        losses.append((float(loss), float(norm)))
    assert losses[0][1] > 3
    assert losses[-1][0] < 0.05 * losses[0][0]


def test_without_compilation() -> None:
    """It runs where nothing is compiled, as one does to debug."""
    with jax.disable_jit():
        clipped, norm = uc.clip_by_global_norm([jnp.asarray([3.0, 4.0]), jnp.zeros(2**18)], 1.0)
    close(fw, clipped[0], [0.6, 0.8], "float32")
    assert norm == 5


@pytest.mark.parametrize(
    "rule",
    [
        uc.autoclip(window=5), uc.autoclip(window=None), uc.percentile_clipping(window=5), uc.zclip(), uc.log_zscore(),
        uc.adagc(), uc.norm_growth(), uc.skip_spikes(window=4), uc.spam(), uc.adagn(), uc.by_example_quantile(),
        uc.chain(uc.zclip(), uc.log_zscore()),
    ],
    ids=repr,
)  # fmt: skip
def test_a_donated_state(rule: Any) -> None:
    """The memory of a state can be used again, as that of parameters is: no two parts of it are one array."""
    grads = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
    update = jax.jit(lambda g, s: rule.update(g, s)[:2], donate_argnums=1)
    state = rule.init(grads)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), state)
    for _ in range(3):
        _, state = update(grads, state)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == shapes


def test_a_scan_over_steps() -> None:
    """A state is the carry of `jax.lax.scan`, with the same factors as step by step."""
    rule, norms = uc.zclip(warmup=3), jnp.asarray([1.0, 1.1, 0.9, 1.0, 50.0, 1.0])

    def step(state: Any, norm: Any) -> Any:
        _, state, report = rule.update([norm * jnp.ones(1)], state)
        return state, report.factors

    state = rule.init([jnp.ones(1)])
    _, factors = jax.lax.scan(step, state, norms)
    for norm, factor in zip(norms, factors, strict=True):
        state, wanted = step(state, norm)
        np.testing.assert_allclose(factor, wanted, rtol=1e-6)
